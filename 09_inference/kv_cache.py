"""The KV cache: compute the keys and values of each token once, and keep them.

A new token attends to all tokens before it, so it needs their keys and values. A token's keys and
values depend on this token, on the tokens before it and on its position. Later tokens do not change
them. Without a cache, each step computes all of them again. With a cache, a step computes the keys
and values of one token and loads the others from memory. They take

    2 x layers x kv_heads x head_dim numbers per token,

which can be more than the weights if there are many long sequences. A sequence is a prompt and its
answer. Three ideas save memory:

    paging    a sequence gets pages of 16 tokens as it grows, instead of memory for the longest
              sequence. Its page table lists its pages in order (Kwon et al. 2023; vLLM calls a
              page a block)
    sharing   sequences that begin alike list the same pages in their tables
    offload   the pages of an idle sequence wait in CPU memory

    laptop    python 09_inference/kv_cache.py
    trained   python 09_inference/kv_cache.py --model models/smollm2-135m --chat
              (`make model` makes that folder)
    one GPU   python 09_inference/kv_cache.py --device cuda
              python 09_inference/kv_cache.py --model llama-1b --dtype bf16 --max-new-tokens 256
    cluster   it uses one process only: infer_70b.py shards the heads, and so the cache, over GPUs

What to look at: how many tokens the model processes without a cache and with one, padding included
("tokens read"), and the bytes of each cache. "cache" counts the pages that sequences use. The
memory of all pages is allocated once and stays allocated. All variants generate the same tokens.

On a GPU the default is --model wide with 48 prompts. Expected on an H100 from its data sheet:
without a cache the model processes about 7,500 tokens per step, 0.9 TFLOP, which takes at least
13 ms in fp32 (67 TFLOP/s). A step with the cache processes 48 tokens, and its launches take longer
than its arithmetic.

A server such as vLLM adds a scheduler: requests join and leave between two steps, and a request
waits if no page is free. Next: infer_70b.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _kv_cache as helper
import torch
from _prompts import Text, check_tokens, choose_dtype, parser
from torch import Tensor, nn

from common import cli, lesson, measure, report
from common.runtime import DTYPES
from lm import model, shapes, weights
from lm.generate import nan_if_not_finite, not_finite_error, sample

PAGE = 16  # slots
READ_EVERY = 8  # decode steps: so often the CPU asks whether all answers have ended
ROUNDS = 3
VARIANTS = (
    "no cache",
    "static cache",
    "paged",
    "paged, prefix shared",
    "paged, offloaded and back",
)


# --- 1. the cache


class KVCache:
    """The keys and values of all tokens so far.

    There are two tensors per layer, [batch, heads, slots, head_dim]. A slot is the room for one
    token, and the slot of a token is its position. With grouped-query attention, `heads` is the
    number of key-value heads.

    In each layer, q, k and v are of the new tokens only. Attention takes the others from the cache:

        k, v = cache.updater(layer, positions)(k, v)
        y = scaled_dot_product_attention(q, k, v, cache.mask(positions), enable_gqa=grouped)
    """

    def __init__(
        self,
        config: shapes.Config,
        *,
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (batch, config.num_key_value_heads, slots, config.head_dim)
        self.keys = {}
        self.values = {}
        for layer in range(config.num_hidden_layers):
            # Not torch.empty: an unused slot has weight 0 in attention, and 0 times NaN is NaN.
            self.keys[str(layer)] = torch.zeros(shape, dtype=dtype, device=device)
            self.values[str(layer)] = torch.zeros(shape, dtype=dtype, device=device)
        self.batch_index = torch.arange(batch, device=device)[:, None]  # [batch, 1]
        self.slots = torch.arange(slots, device=device)

    def mask(self, positions: Tensor) -> Tensor:
        """Return True where a token sees a slot: [batch, 1, tokens, slots].

        positions is [batch, tokens]. A token sees the slots up to its own. Later slots may hold
        the padding of a prompt, which the next tokens of the sequence overwrite.
        """
        visible = self.slots <= positions[:, :, None]  # [batch, tokens, slots]
        return visible[:, None]

    def updater(self, layer: str, positions: Tensor) -> Callable:
        """Return update_cache(k, v) of a layer, for new tokens at these positions.

        It writes k and v into the cache, and returns the keys and values of all slots.
        """
        keys = self.keys[layer]
        values = self.values[layer]

        def update_cache(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            # With a slice between two index tensors, PyTorch puts the indexed dimensions first: the
            # left side is [batch, tokens, heads, head_dim]. k is [batch, heads, tokens, head_dim].
            keys[self.batch_index, :, positions] = k.transpose(1, 2)
            values[self.batch_index, :, positions] = v.transpose(1, 2)
            return keys, values

        return update_cache

    def tensors(self) -> list[Tensor]:
        """Return the keys and values of all layers."""
        return [*self.keys.values(), *self.values.values()]


# --- 2. a step with a cache, and without one


class CachedSteps:
    """Process each token once."""

    def __init__(self, net: model.Transformer, cache: KVCache) -> None:
        self.net = net
        self.cache = cache

    def prefill(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Process all prompts at once. Return the logits of their last tokens, [batch, vocab].

        ids and positions are [batch, tokens], with padding after short prompts. last is [batch],
        the index in `ids` of the last token of each prompt.
        """
        hidden = self.net.model(ids, positions, self.cache)  # [batch, tokens, hidden]
        return self.net.lm_head(pick(hidden, last))

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Process the newest token of each sequence. Return its logits, [batch, vocab].

        tokens and positions are [batch].
        """
        hidden = self.net.model(tokens[:, None], positions[:, None], self.cache)
        return self.net.lm_head(hidden[:, 0])


class UncachedSteps:
    """Process each sequence from its beginning at every step.

    Padding comes after the last token of a sequence. The causal mask hides it, and new tokens
    overwrite it.
    """

    def __init__(self, net: model.Transformer) -> None:
        self.net = net

    def prefill(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        self.ids = ids
        hidden = self.net.model(ids)
        return self.net.lm_head(pick(hidden, last))

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        ids = nn.functional.pad(self.ids, (0, 1))  # [batch, one more token]
        ids.scatter_(1, positions[:, None], tokens[:, None])
        return self.prefill(ids, positions, last=positions)


def pick(hidden: Tensor, last: Tensor) -> Tensor:
    """Return the hidden state at the index `last` of each sequence, [batch, hidden].

    hidden is [batch, tokens, hidden], and last is [batch].
    """
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, last]


# --- 3. the decode loop: prefill gives the first new token, each decode step one more


@torch.inference_mode()
def generate(
    steps: CachedSteps | UncachedSteps,
    prompts: list[list[int]],
    choose: Callable[[Tensor], Tensor],
    *,
    max_new_tokens: int,
    stop: frozenset[int],
    device: torch.device,
) -> tuple[list[list[int]], int]:
    """Return the new tokens of each prompt, up to a stop token, and the number of decode steps.

    `choose` turns logits, [batch, vocab], into tokens, [batch].
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [batch]
    ids = nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt, device=device) for prompt in prompts], batch_first=True
    )  # [batch, tokens]
    positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    stop_ids = torch.tensor(sorted(stop), device=device)

    tokens = choose(steps.prefill(ids, positions, lengths - 1))  # [batch]
    new_tokens = [tokens]
    has_ended = torch.isin(tokens, stop_ids)
    progress = report.progress_bar(range(max_new_tokens - 1), "decoding", unit="token", delay=2)
    for step in progress:
        # This comparison waits for the GPU. At the other steps the CPU runs ahead of it.
        if step % READ_EVERY == 0 and has_ended.all():
            break
        tokens = choose(steps.decode(tokens, lengths + step))
        new_tokens.append(tokens)
        has_ended |= torch.isin(tokens, stop_ids)

    answers = []
    for answer in torch.stack(new_tokens, dim=1).tolist():
        stops = [place for place, token in enumerate(answer) if token in stop]
        answers.append(answer[: stops[0]] if stops else answer)
    return answers, len(new_tokens) - 1


# --- 4. paging: pages of 16 slots, and a page table for each sequence


class PagedCache(KVCache):
    """A cache of pages, with room for 16 tokens each: [pages, heads, PAGE, head_dim] per tensor.

    All pages are allocated once. A sequence has a number and a page table.

    Attributes:
        free: The numbers of the pages that no sequence uses.
        tables: For each sequence, the numbers of its pages in order.
    """

    def __init__(
        self, config: shapes.Config, *, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, batch=1 + pages, slots=PAGE, dtype=dtype, device=device)
        # Page 0 belongs to no sequence. The table of a short sequence is padded with 0, so its
        # padding tokens are written there. The mask hides them.
        self.free = list(range(1, 1 + pages))
        self.tables = {}

    def reserve(self, sequence: int, tokens: int) -> None:
        """Add pages to a sequence's table until it has room for so many tokens."""
        table = self.tables.setdefault(sequence, [])
        while len(table) * PAGE < tokens:
            table.append(self.free.pop())

    def release(self, sequence: int) -> None:
        """Delete a sequence's table. A page becomes free when no other table lists it."""
        table = self.tables.pop(sequence)
        self.free += set(table) - self.held_pages()

    def held_pages(self) -> set[int]:
        """Return the pages that any table lists."""
        held = set()
        for table in self.tables.values():
            held.update(table)
        return held

    def select(self, sequences: list[int]) -> None:
        """Choose the sequences of the next forward, in the order of its batch."""
        tables = [torch.tensor(self.tables[sequence]) for sequence in sequences]
        table = nn.utils.rnn.pad_sequence(tables, batch_first=True)  # padded with page 0
        # Otherwise the CPU would wait for the GPU at each step. The table is not pinned, but it is
        # small, and CUDA stages a small copy before it returns.
        self.table = table.to(self.slots.device, non_blocking=True)  # [sequences, pages]
        self.slots = torch.arange(self.table.shape[1] * PAGE, device=self.slots.device)

    def updater(self, layer: str, positions: Tensor) -> Callable:
        """Return update_cache(k, v) of a layer, for new tokens at these positions.

        It writes k and v to the pages of the page table. Then it gathers all pages of each
        sequence into one contiguous tensor, because F.scaled_dot_product_attention needs that. The
        attention kernel of a server reads the pages in place.
        """
        keys = self.keys[layer]  # [all pages, heads, PAGE, head_dim]
        values = self.values[layer]
        pages = self.table.gather(1, positions // PAGE)  # [sequences, tokens]
        slots = positions % PAGE

        def update_cache(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            # [sequences, tokens, heads, head_dim] on both sides
            keys[pages, :, slots] = k.transpose(1, 2)
            values[pages, :, slots] = v.transpose(1, 2)
            return self.in_order(keys), self.in_order(values)

        return update_cache

    def in_order(self, all_pages: Tensor) -> Tensor:
        """Copy the pages of each sequence side by side: [sequences, heads, slots, head_dim]."""
        pages = all_pages[self.table]  # [sequences, pages, heads, PAGE, head_dim]
        return pages.transpose(1, 2).flatten(2, 3)

    # --- 5. sharing

    def share(self, sequence: int, other: int, tokens: int) -> None:
        """Let `sequence` use the pages that hold the first `tokens` tokens of `other`.

        Both must begin with these tokens, because a key depends on all tokens up to its own. Only
        full pages are shared: new tokens are never written to a full page.
        """
        self.tables[sequence] = self.tables[other][: tokens // PAGE]

    # --- 6. offload

    def offload(self, sequence: int) -> list[Tensor]:
        """Copy a sequence's pages to CPU memory and free the pages.

        On a GPU the copies are asynchronous. The pages may be freed at once, because later writes
        are queued on the same stream, after the copies. Synchronize before the CPU reads the
        copies. The memory of a free page stays allocated, for other sequences.
        """
        copies = []
        for tensor in self.tensors():
            pages = tensor[self.tables[sequence]]
            copy = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=pages.is_cuda)
            copies.append(copy.copy_(pages, non_blocking=True))
        self.release(sequence)
        return copies

    def bring_back(self, sequence: int, copies: list[Tensor]) -> None:
        """Copy a sequence's pages from CPU memory into free pages.

        These may be other pages than before. The new table lists them.
        """
        self.reserve(sequence, len(copies[0]) * PAGE)
        for tensor, copy in zip(self.tensors(), copies, strict=True):
            tensor[self.tables[sequence]] = copy.to(tensor.device, non_blocking=True)


class PagedSteps(CachedSteps):
    """Give each sequence the pages that it needs before each step.

    `lengths` are the tokens of each sequence. All sequences begin with the same `shared` tokens.
    These are processed once, and all tables list their pages.
    """

    def __init__(
        self, net: model.Transformer, cache: PagedCache, lengths: list[int], shared: int = 0
    ) -> None:
        super().__init__(net, cache)
        self.lengths = list(lengths)
        self.shared = shared
        self.sequences = list(range(len(lengths)))

    def prefill(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        shared = self.shared
        if shared > 0:
            self.cache.reserve(0, shared)
            self.cache.select([0])
            self.net.model(ids[:1, :shared], positions[:1, :shared], self.cache)
            for sequence in self.sequences[1:]:
                self.cache.share(sequence, 0, shared)
        for sequence in self.sequences:
            self.cache.reserve(sequence, self.lengths[sequence])
        self.cache.select(self.sequences)
        # Without the shared tokens, ids has other indices. Positions stay as they are.
        return super().prefill(ids[:, shared:], positions[:, shared:], last - shared)

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        for sequence in self.sequences:
            # counted here: to read `positions`, the CPU would have to wait for the GPU
            self.lengths[sequence] += 1
            self.cache.reserve(sequence, self.lengths[sequence])
        self.cache.select(self.sequences)
        return super().decode(tokens, positions)


class PausedSteps(PagedSteps):
    """After prefill, move all sequences to CPU memory while another one uses their pages."""

    def prefill(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        super().prefill(ids, positions, last)
        tables_before = dict(self.cache.tables)
        copies = {sequence: self.cache.offload(sequence) for sequence in self.sequences}
        self.pause = helper.measure_pause(self.cache, copies)

        # Another sequence takes as many pages as all of these had, and overwrites them. They are
        # the same pages, because `reserve` takes the pages that were released last.
        other = -1
        self.cache.reserve(other, sum(map(len, tables_before.values())) * PAGE)
        for tensor in self.cache.tensors():
            tensor[self.cache.tables[other]] = 1
        for sequence in self.sequences:
            self.cache.bring_back(sequence, copies[sequence])
        self.pause["same_places"] = helper.common_pages(tables_before, self.cache.tables)
        self.cache.release(other)

        # Compute the logits of each prompt's last token again, from the pages that came back.
        # PagedSteps.decode would count this token a second time, so call CachedSteps.decode.
        self.cache.select(self.sequences)
        return CachedSteps.decode(self, ids.gather(1, last[:, None])[:, 0], last)


def shared_tokens(prompts: list[list[int]]) -> int:
    """Return how many tokens all prompts have in common at the start, in full pages.

    Each prompt keeps at least one token of its own, whose logits choose the first new token.
    """
    in_common = 0
    for tokens in zip(*prompts, strict=False):  # the tokens at one position
        if len(set(tokens)) > 1:
            break
        in_common += 1
    shortest = min(len(prompt) for prompt in prompts)
    return min(in_common, shortest - 1) // PAGE * PAGE


# --- 7. the comparison


def make_steps(
    variant: str, net: model.Transformer, text: Text, dtype: torch.dtype, device: torch.device
) -> CachedSteps | UncachedSteps:
    """Return the steps of a variant, with an empty cache."""
    if variant == "no cache":
        return UncachedSteps(net)
    lengths = [len(prompt) for prompt in text.prompts]
    if variant == "static cache":
        cache = KVCache(
            text.config, batch=len(lengths), slots=text.length, dtype=dtype, device=device
        )
        return CachedSteps(net, cache)

    pages_per_sequence = -(-text.length // PAGE)  # rounded up
    # twice as many as needed: another sequence uses as many during the pause
    pages = 2 * pages_per_sequence * len(lengths)
    cache = PagedCache(text.config, pages=pages, dtype=dtype, device=device)
    if variant == "paged, offloaded and back":
        return PausedSteps(net, cache, lengths)
    if variant == "paged, prefix shared":
        return PagedSteps(net, cache, lengths, shared_tokens(text.prompts))
    return PagedSteps(net, cache, lengths)


def run(variant: str, net: model.Transformer, text: Text, args, device: torch.device) -> dict:
    """Answer all prompts. Return the new tokens, how many tokens were processed, and the bytes."""
    row = {"name": variant, "tokens_read": 0}
    marks = []  # of each step, [batch]: NaN if a logit is NaN or infinite

    def count(_, inputs: tuple) -> None:
        row["tokens_read"] += inputs[0].numel()

    steps = make_steps(variant, net, text, DTYPES[args.dtype], device)
    generator = torch.Generator(device).manual_seed(args.seed)

    def choose(logits: Tensor) -> Tensor:
        row["logits"] = logits  # in the end, the logits of the last step
        marks.append(nan_if_not_finite(logits))
        return sample(logits, args, generator)

    counter = net.model.register_forward_pre_hook(count)
    row["token_ids"], row["decode_steps"] = generate(
        steps,
        text.prompts,
        choose,
        max_new_tokens=args.max_new_tokens,
        stop=text.stop,
        device=device,
    )
    counter.remove()
    if torch.stack(marks).isnan().any():
        raise not_finite_error(f"--model {args.model}", "a new token")
    return row | helper.cache_figures(steps)


def main() -> int:
    flags = parser(__doc__, default_prompt="the lines of kv_cache_prompts.txt")
    flags.set_defaults(model=None)
    flags.add_argument(
        "--repeat",
        type=cli.positive_int,
        metavar="N",
        help="put each prompt into the batch N times (default: 1, on a GPU 16)",
    )
    args = flags.parse_args()
    lesson.fill_defaults(
        args, cpu={"model": "nano", "repeat": 1}, gpu={"model": "wide", "repeat": 16}
    )
    if args.prompt is None and args.prompts is None:
        args.prompts = Path(__file__).with_name("kv_cache_prompts.txt")
    config = weights.read_config(args.model)
    text = Text(args, config)
    text.prompts *= args.repeat
    device = lesson.start(args.device, args.seed)
    args.dtype = choose_dtype(args, config, device)
    net = weights.build(args.model, config, seed=args.seed, device="meta").to(DTYPES[args.dtype])
    net = weights.materialize(net, args.model, seed=args.seed, device=device)

    rows = {}

    def answer(variant: str) -> None:
        rows[variant] = run(variant, net, text, args, device)

    runs = {variant: partial(answer, variant) for variant in VARIANTS}
    seconds = measure.seconds_in_turns(runs, device, ROUNDS)
    rows = [rows[variant] | seconds[variant] for variant in VARIANTS]
    checked = helper.check(rows, text, args, shared_tokens(text.prompts), PAGE)
    checked.append(helper.check_70b(KVCache))
    checked += check_tokens(rows[0]["token_ids"], text, args, device)

    steps = make_steps("paged", net, text, DTYPES[args.dtype], device)
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=checked,
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        tokens=sum(map(len, rows[0]["token_ids"])),
        texts=[text.decode(ids) for ids in rows[0]["token_ids"]],
        resume=helper.seconds_to_resume(steps, text.prompts, device, ROUNDS),
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
