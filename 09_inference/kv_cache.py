"""The KV cache: compute the keys and values of each token once, and keep them.

A new token attends to all tokens before it, so it needs their keys and values. These depend only on
earlier tokens, and never change. Without a cache, each step computes them again. With a cache, a
step computes the keys and values of one token and reads the others from memory. They take

    2 x layers x kv_heads x head_dim numbers per token,

which can be more than the weights if there are many long texts. Three ideas save memory:

    paging    a text gets blocks of 16 tokens as it grows, not a row for the longest text, and a
              block table names its blocks in order (Kwon et al. 2023, vLLM)
    sharing   texts that begin alike name the same blocks in their tables
    offload   the blocks of an idle conversation wait in CPU memory

    laptop    python 09_inference/kv_cache.py
    trained   python 09_inference/kv_cache.py --model models/smollm2-135m --chat
              (`make model` makes that folder)
    one GPU   python 09_inference/kv_cache.py --device cuda
              python 09_inference/kv_cache.py --model llama-1b --dtype bf16 --max-new-tokens 256
    cluster   it uses one process only: infer_70b.py shards the heads, and so the cache, over GPUs

What to look at: the tokens that the model reads without a cache and with one, padding included; the
bytes of rows, of blocks, and of shared blocks. All rows have the same new tokens.

On a GPU the default is --model wide with 48 texts. Expected on an H100 from its data sheet: without
a cache the model reads about 7,500 tokens per step, 0.9 TFLOP, which takes at least 13 ms in fp32
(67 TFLOP/s). A step with the cache reads 48 tokens, and its launches take longer than its
arithmetic.

A server such as vLLM adds a scheduler: requests join and leave between two steps, and a request
waits if no block is free. Previous: offloaded.py. Next: parity.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _kv_cache as helper
from _generate import DTYPES, Text, check_tokens, choose_dtype, generate, parser, sample

from common import cli, exits, measure, report
from lm import model, shapes, weights

BLOCK = 16  # tokens
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

    There are two tensors per layer, [batch, heads, slots, head_dim]. With grouped heads, `heads`
    are the key-value heads.

    The slot of a token is its position. In each layer, attention has q, k and v of the new tokens
    only, and then reads the cache:

        k, v = cache.updater(layer, positions)(k, v)
        y = scaled_dot_product_attention(q, k, v, cache.mask(positions))
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
        self.rows = torch.arange(batch, device=device)[:, None]  # [batch, 1]
        self.slots = torch.arange(slots, device=device)

    def mask(self, positions: Tensor) -> Tensor:
        """Return True where a token sees a slot: [batch, 1, tokens, slots].

        positions is [batch, tokens]. A token sees the slots up to its own. Later slots may hold
        the padding of a prompt, which the next tokens of the text overwrite.
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
            # k and v are [batch, heads, tokens, head_dim], and what they are written to is
            # [batch, tokens, heads, head_dim].
            keys[self.rows, :, positions] = k.transpose(1, 2)
            values[self.rows, :, positions] = v.transpose(1, 2)
            return keys, values

        return update_cache

    def tensors(self) -> list[Tensor]:
        """Return the keys and values of all layers."""
        return [*self.keys.values(), *self.values.values()]


# --- 2. a step with a cache, and without one
#
# Text is generated by prefill, and then decode for each new token after the first:
#
#     tokens = choose(steps.prefill(ids, positions, last))
#     tokens = choose(steps.decode(tokens, positions))


class CachedSteps:
    """Read each token once."""

    def __init__(self, net: model.Transformer, cache: KVCache) -> None:
        self.net = net
        self.cache = cache

    def prefill(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Read all prompts at once. Return the logits of their last tokens, [batch, vocab].

        ids and positions are [batch, tokens], with padding after short prompts. last is [batch],
        the position of the last token of each prompt.
        """
        hidden = self.net.model(ids, positions, self.cache)  # [batch, tokens, hidden]
        return self.net.lm_head(pick(hidden, last))

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Read the newest token of each text, [batch]. Return its logits, [batch, vocab]."""
        hidden = self.net.model(tokens[:, None], positions[:, None], self.cache)
        return self.net.lm_head(hidden[:, 0])


class UncachedSteps:
    """Read each text from its beginning at every step."""

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
    """Return the hidden state at the position `last` of each text, [batch, hidden].

    hidden is [batch, tokens, hidden], and last is [batch].
    """
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, last]


# --- 3. paging: rows of 16 slots, and a table of rows for each text


class PagedCache(KVCache):
    """A cache whose rows are blocks of 16 tokens. Texts have numbers, and each has a block table.

    Attributes:
        free: The numbers of the blocks that no text uses.
        tables: For each text, the numbers of its blocks in order.
    """

    def __init__(
        self, config: shapes.Config, *, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, batch=1 + blocks, slots=BLOCK, dtype=dtype, device=device)
        # Block 0 belongs to no text. It takes what padding writes.
        self.free = list(range(1, 1 + blocks))
        self.tables = {}

    def reserve(self, text: int, tokens: int) -> None:
        """Add blocks to a text's table until it has room for so many tokens."""
        table = self.tables.setdefault(text, [])
        while len(table) * BLOCK < tokens:
            table.append(self.free.pop())

    def release(self, text: int) -> None:
        """Delete a text's table. A block becomes free when no other table names it."""
        table = self.tables.pop(text)
        self.free += set(table) - self.held_blocks()

    def held_blocks(self) -> set[int]:
        """Return the blocks that any table names."""
        held = set()
        for table in self.tables.values():
            held.update(table)
        return held

    def select(self, texts: list[int]) -> None:
        """Choose the texts that the next forward reads, one per row of its token ids."""
        tables = [torch.tensor(self.tables[text]) for text in texts]
        table = nn.utils.rnn.pad_sequence(tables, batch_first=True)  # padded with block 0
        # non_blocking: otherwise the CPU would wait for the GPU at each step
        self.table = table.to(self.rows.device, non_blocking=True)  # [texts, blocks]
        self.slots = torch.arange(self.table.shape[1] * BLOCK, device=self.rows.device)

    def updater(self, layer: str, positions: Tensor) -> Callable:
        """Return the function that writes new tokens to the blocks of their texts.

        It returns copies of the blocks, in the order of the tables. The attention kernel of a
        server reads the table instead, and copies nothing.
        """
        keys = self.keys[layer]  # [all blocks, heads, BLOCK, head_dim]
        values = self.values[layer]
        blocks = self.table.gather(1, positions // BLOCK)  # of each token, [texts, tokens]
        slots = positions % BLOCK

        def update_cache(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys[blocks, :, slots] = k.transpose(1, 2)
            values[blocks, :, slots] = v.transpose(1, 2)
            return self.in_order(keys), self.in_order(values)

        return update_cache

    def in_order(self, rows: Tensor) -> Tensor:
        """Copy the blocks of each text side by side: [texts, heads, slots, head_dim]."""
        of_texts = rows[self.table]  # [texts, blocks, heads, BLOCK, head_dim]
        return of_texts.transpose(1, 2).flatten(2, 3)

    # --- 4. sharing

    def share(self, text: int, other: int, tokens: int) -> None:
        """Begin a text's table with the other text's blocks of its first `tokens`.

        Both texts must begin with these tokens: a key depends on its position and on all tokens
        before it. Only full blocks are shared, because nobody writes to them again.
        """
        self.tables[text] = self.tables[other][: tokens // BLOCK]

    # --- 5. offload

    def offload(self, text: int) -> list[Tensor]:
        """Copy a text's blocks to CPU memory and free them.

        A GPU only starts the copies here. What is written to the blocks next comes later in the
        same stream.
        """
        copies = []
        for tensor in self.tensors():
            blocks = tensor[self.tables[text]]
            copy = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=blocks.is_cuda)
            copies.append(copy.copy_(blocks, non_blocking=True))
        self.release(text)
        return copies

    def bring_back(self, text: int, copies: list[Tensor]) -> None:
        """Copy a text's blocks from CPU memory into blocks that are free now.

        They need not be the blocks of before. Only the table changes.
        """
        self.reserve(text, len(copies[0]) * BLOCK)
        for tensor, copy in zip(self.tensors(), copies, strict=True):
            tensor[self.tables[text]] = copy.to(tensor.device, non_blocking=True)


class PagedSteps(CachedSteps):
    """Give each text the blocks that it needs before each step.

    lengths: the tokens of each text. shared: how many of them all texts have in common at the
    start. They are read once, and all tables name their blocks.
    """

    def __init__(
        self, net: model.Transformer, cache: PagedCache, lengths: list[int], shared: int = 0
    ) -> None:
        super().__init__(net, cache)
        self.lengths = list(lengths)
        self.shared = shared
        self.texts = list(range(len(lengths)))

    def prefill(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        shared = self.shared
        if shared > 0:
            self.cache.reserve(0, shared)
            self.cache.select([0])
            self.net.model(ids[:1, :shared], positions[:1, :shared], self.cache)
            for text in self.texts[1:]:
                self.cache.share(text, 0, shared)
        for text in self.texts:
            self.cache.reserve(text, self.lengths[text])
        self.cache.select(self.texts)
        return super().prefill(ids[:, shared:], positions[:, shared:], last - shared)

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        for text in self.texts:
            # counted here: to read `positions`, the CPU would have to wait for the GPU
            self.lengths[text] += 1
            self.cache.reserve(text, self.lengths[text])
        self.cache.select(self.texts)
        return super().decode(tokens, positions)


class PausedSteps(PagedSteps):
    """After prefill, let all texts wait in CPU memory while another text uses their blocks."""

    def prefill(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        super().prefill(ids, positions, last)
        tables_before = dict(self.cache.tables)
        copies = {text: self.cache.offload(text) for text in self.texts}
        self.pause = helper.measure_pause(self.cache, copies)

        other = -1  # a text that writes to all blocks that are free now
        self.cache.reserve(other, sum(map(len, tables_before.values())) * BLOCK)
        for tensor in self.cache.tensors():
            tensor[self.cache.tables[other]] = 1
        for text in self.texts:
            self.cache.bring_back(text, copies[text])
        self.pause["same_places"] = helper.common_blocks(tables_before, self.cache.tables)
        self.cache.release(other)

        # The logits of the last tokens again: they depend on all that has been brought back. Not by
        # PagedSteps.decode, which reads one more token.
        self.cache.select(self.texts)
        return CachedSteps.decode(self, ids.gather(1, last[:, None])[:, 0], last)


def shared_tokens(prompts: list[list[int]]) -> int:
    """Return how many tokens all prompts have in common at the start, in full blocks.

    Each prompt keeps at least one token to read, because its logits choose the first new token.
    """
    in_common = 0
    for tokens in zip(*prompts, strict=False):  # the tokens at one position
        if len(set(tokens)) > 1:
            break
        in_common += 1
    shortest = min(len(prompt) for prompt in prompts)
    return min(in_common, shortest - 1) // BLOCK * BLOCK


# --- 6. the comparison


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

    blocks_per_text = -(-text.length // BLOCK)  # rounded up
    # twice as many as the texts need: another text uses as many during the pause
    blocks = 2 * blocks_per_text * len(lengths)
    cache = PagedCache(text.config, blocks=blocks, dtype=dtype, device=device)
    if variant == "paged, offloaded and back":
        return PausedSteps(net, cache, lengths)
    if variant == "paged, prefix shared":
        return PagedSteps(net, cache, lengths, shared_tokens(text.prompts))
    return PagedSteps(net, cache, lengths)


def run(variant: str, net: model.Transformer, text: Text, args, device: torch.device) -> dict:
    """Answer all prompts. Return the new tokens, the number of tokens read and the bytes held."""
    row = {"name": variant, "tokens_read": 0}

    def count(_, inputs: tuple) -> None:
        row["tokens_read"] += inputs[0].numel()

    steps = make_steps(variant, net, text, DTYPES[args.dtype], device)
    generator = torch.Generator(device).manual_seed(args.seed)

    def choose(logits: Tensor) -> Tensor:
        row["logits"] = logits  # at the end: those of the last step
        return sample(logits, args, generator)

    counter = net.model.register_forward_pre_hook(count)
    result = generate(
        steps.prefill,
        steps.decode,
        text.prompts,
        max_new_tokens=args.max_new_tokens,
        choose=choose,
        device=device,
        stop=text.stop,
    )
    counter.remove()
    row["token_ids"] = result.token_ids
    row["decode_steps"] = result.decode_steps
    return row | helper.cache_figures(steps)


def main() -> int:
    flags = parser(__doc__)
    flags.set_defaults(model=None)
    flags.add_argument(
        "--repeat",
        type=cli.positive_int,
        metavar="N",
        help="put each prompt into the batch N times (default: 1, on a GPU 16)",
    )
    args = flags.parse_args()
    report.fill_defaults(
        args, cpu={"model": "nano", "repeat": 1}, gpu={"model": "wide", "repeat": 16}
    )
    if args.prompt is None and args.prompts is None:
        args.prompts = Path(__file__).with_name("kv_cache_prompts.txt")
    config = shapes.read_config(args.model)
    text = Text(args, config)
    text.prompts *= args.repeat
    device = report.start_lesson(args.device, args.seed)
    args.dtype = choose_dtype(args, config, device)
    net = weights.build(args.model, config, seed=args.seed, device="meta").to(DTYPES[args.dtype])
    net = weights.materialize(net, args.model, seed=args.seed, device=device)

    rows = {}

    def answer(variant: str) -> None:
        rows[variant] = run(variant, net, text, args, device)

    runs = {variant: partial(answer, variant) for variant in VARIANTS}
    seconds = measure.seconds_in_turns(runs, device, ROUNDS)
    rows = [rows[variant] | seconds[variant] for variant in VARIANTS]
    checked = helper.check(rows, text, args, shared_tokens(text.prompts), BLOCK)
    checked.append(helper.check_70b(KVCache))
    checked += check_tokens(rows[0]["token_ids"], text, args, device)

    steps = make_steps("paged", net, text, DTYPES[args.dtype], device)
    report.end_lesson(
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
