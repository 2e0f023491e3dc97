"""The KV cache: keys and values of past tokens, computed once; in blocks, shared by texts, and offloaded to the CPU.

A new token needs the keys and values of every token before it. They depend on those tokens alone, so they are computed
once and kept: 2 x layers x key-value heads x head_dim numbers per token, more than the weights if many texts are long.
A static cache gives each text a row as long as the longest may become. Paging (Kwon et al. 2023, vLLM) gives it blocks
of 16 tokens as it grows, and a block table that names them. Two texts that begin alike can then name the same blocks.
The blocks of an idle conversation can wait in CPU memory and come back to other places.

    laptop    python 09_inference/kv_cache.py
    trained   python 09_inference/kv_cache.py --model models/smollm2-135m --chat          (make model makes that folder)
    one GPU   python 09_inference/kv_cache.py --model llama-1b --dtype bf16 --max-new-tokens 256
    cluster   one process is all it uses; infer_70b.py divides the heads, and so the cache, over GPUs

A server such as vLLM adds a scheduler to this: requests join and leave between two steps, and one that finds no free
block waits. Look for: the same tokens in every row; tokens read (padding included) without a cache and with one; the
bytes of rows, of blocks and of shared blocks. Before: offloaded.py. Next: quantized.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from _generate import (
    DTYPES,
    StaticCache,
    Text,
    check_tokens,
    choose_dtype,
    generate,
    parser,
    sample,
    steps_of,
    write,
)
from _kv_cache import COLUMNS, check, held_at_the_end, seconds_to_resume, shared_tokens

from common import exits, measure, report
from lm import shapes, weights

BLOCK = 16  # tokens
ROUNDS = 3
WAYS = ("no cache", "static cache", "paged", "paged, prefix shared", "paged, offloaded and back")


class NoCache:
    """Each step reads every text again from its beginning, for one new token each."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def prefill(self, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        self.ids = ids
        hidden = self.net.model(ids)
        return self.net.lm_head(hidden[torch.arange(len(ids), device=ids.device), last])

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        ids = nn.functional.pad(self.ids, (0, 1))
        ids[torch.arange(len(ids), device=ids.device), positions] = tokens
        return self.prefill(ids, positions, positions)


class PagedCache(StaticCache):
    """A static cache whose rows are blocks of 16 tokens. A text, here a number, has a table of its blocks in order."""

    def __init__(
        self, config: shapes.Config, *, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, batch=1 + blocks, length=BLOCK, dtype=dtype, device=device)
        # block 0 belongs to no text: padding is written there
        self.free = list(range(1, 1 + blocks))
        self.tables = {}

    def reserve(self, text: int, tokens: int) -> None:
        """Lengthen the text's table to hold so many tokens. In a server a text waits if no block is free."""
        table = self.tables.setdefault(text, [])
        while len(table) * BLOCK < tokens:
            table.append(self.free.pop())

    def share(self, text: int, other: int, tokens: int) -> None:
        """Begin the text's table with the full blocks of the other's first `tokens`, which are never written to again.
        Both texts must begin with these tokens: a key depends on its position and on all tokens before it."""
        self.tables[text] = self.tables[other][: tokens // BLOCK]

    def release(self, text: int) -> None:
        """A block is free when the last table that names it is gone."""
        table = self.tables.pop(text)
        self.free += set(table) - self.held_blocks()

    def held_blocks(self) -> set[int]:
        return set(chain(*self.tables.values()))

    def held_bytes(self) -> int:
        return len(self.held_blocks()) * sum(tensor[0].nbytes for tensor in self.tensors)

    def select(self, texts: list[int]) -> None:
        """The next forward reads tokens of these texts, a row of ids for each. Block 0 pads their tables."""
        table = nn.utils.rnn.pad_sequence(
            [torch.tensor(self.tables[text]) for text in texts], batch_first=True
        )
        # or each step would wait for the GPU
        self.table = table.to(self.tensors[0].device, non_blocking=True)
        self.slots = torch.arange(self.table.shape[1] * BLOCK, device=self.table.device)

    def updater(self, layer: str, positions: Tensor) -> Callable:
        """Write each token where its text's table says, then gather the blocks of each text. That copies them at every
        step; a server's attention kernel follows the table instead."""
        rows = self.table.gather(1, positions // BLOCK)
        keep = partial(write, self.keys[layer], self.values[layer], rows, positions % BLOCK)
        return lambda k, v: (
            blocks[self.table].transpose(1, 2).flatten(2, 3) for blocks in keep(k, v)
        )

    def offload(self, text: int) -> list[Tensor]:
        """Copy the text's blocks to the CPU and free them. A GPU only starts the copies; what is written to the blocks
        next comes after them in the same stream."""
        copies = []
        for tensor in self.tensors:
            blocks = tensor[self.tables[text]]
            copy = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=blocks.is_cuda)
            copies.append(copy.copy_(blocks, non_blocking=True))
        self.release(text)
        return copies

    def bring_back(self, text: int, copies: list[Tensor]) -> None:
        """Copy them into blocks that are free now, often others than before: only the table changes."""
        self.reserve(text, len(copies[0]) * BLOCK)
        for tensor, copy in zip(self.tensors, copies, strict=True):
            tensor[self.tables[text]] = copy.to(tensor.device, non_blocking=True)


def paged_steps(
    net: nn.Module, cache: PagedCache, lengths: list[int], shared: int = 0
) -> tuple[Callable, Callable]:
    """As steps_of, but each table gets the blocks for its tokens before they are written. `lengths`: of the prompts;
    `shared`: how many tokens they share at the start. These are read once, and every table names their blocks."""
    texts = range(len(lengths))
    read_prompts, read_token = steps_of(net, cache)

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        if shared > 0:
            cache.reserve(0, shared)
            cache.select([0])
            net.model(ids[:1, :shared], positions[:1, :shared], cache)
            for text in texts[1:]:
                cache.share(text, 0, shared)
        for text in texts:
            cache.reserve(text, lengths[text])
        cache.select(texts)
        return read_prompts(ids[:, shared:], positions[:, shared:], last - shared)

    def decode(tokens: Tensor, positions: Tensor) -> Tensor:
        for text in texts:
            lengths[text] += 1  # known without the positions, which a GPU would have to hand over
            cache.reserve(text, lengths[text])
        cache.select(texts)
        return read_token(tokens, positions)

    return prefill, decode


def with_a_pause(
    net: nn.Module, cache: PagedCache, lengths: list[int], row: dict
) -> tuple[Callable, Callable]:
    """After the prompts are read, all texts wait in CPU memory while another text has their blocks."""
    read_prompts, decode = paged_steps(net, cache, lengths)

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        read_prompts(ids, positions, last)
        before = dict(cache.tables)
        copies = {text: cache.offload(text) for text in before}
        row["idle_bytes"] = cache.held_bytes()
        row["cpu_bytes"] = sum(copy.nbytes for of_text in copies.values() for copy in of_text)
        cache.reserve(-1, sum(map(len, before.values())) * BLOCK)
        for tensor in cache.tensors:
            tensor[cache.tables[-1]] = 1  # keys and values of the other text
        for text in before:
            cache.bring_back(text, copies[text])
        row["same_places"] = sum(len({*before[text]} & {*cache.tables[text]}) for text in before)
        cache.release(-1)
        cache.select(range(len(lengths)))
        # read again
        return net(ids.gather(1, last[:, None]), positions=last[:, None], cache=cache)[:, -1]

    return prefill, decode


def cache_and_steps(
    way: str, net: nn.Module, text: Text, args, device: torch.device, row: dict
) -> tuple:
    """The cache of a way, its prefill and its decode. with_a_pause writes the bytes that wait into the row."""
    lengths = [len(prompt) for prompt in text.prompts]
    kind = {"dtype": DTYPES[args.dtype], "device": device}
    if way == "no cache":
        reader = NoCache(net)
        return None, reader.prefill, reader.decode
    if way == "static cache":
        cache = StaticCache(text.config, batch=len(lengths), length=text.length, **kind)
        return cache, *steps_of(net, cache)
    most_blocks = len(lengths) * -(-text.length // BLOCK)
    # with_a_pause needs twice as many
    cache = PagedCache(text.config, blocks=2 * most_blocks, **kind)
    if way == "paged, offloaded and back":
        return cache, *with_a_pause(net, cache, lengths, row)
    shared = shared_tokens(text.prompts, BLOCK) if way == "paged, prefix shared" else 0
    return cache, *paged_steps(net, cache, lengths, shared)


def run(way: str, net: nn.Module, text: Text, args, device: torch.device) -> dict:
    """Answer all prompts. A row has the tokens that the model has read, and what the texts hold at the end."""
    row = {"name": way, "tokens_read": 0, "cache_bytes": 0}

    def count(_, inputs: tuple) -> None:
        row["tokens_read"] += inputs[0].numel()

    cache, prefill, decode = cache_and_steps(way, net, text, args, device, row)
    generator = torch.Generator(device).manual_seed(args.seed)

    def choose(logits: Tensor) -> Tensor:
        row["logits"] = logits  # those of the last step remain
        return sample(logits, args, generator)

    how = {
        "max_new_tokens": args.max_new_tokens,
        "choose": choose,
        "device": device,
        "stop": text.stop,
    }
    counter = net.model.register_forward_pre_hook(count)
    result = generate(prefill, decode, text.prompts, **how)
    counter.remove()
    row |= {"token_ids": result.token_ids, "decode_steps": result.decode_steps}
    if way == "static cache":
        row["cache_bytes"] = sum(tensor.nbytes for tensor in cache.tensors)
    elif way != "no cache":
        row |= held_at_the_end(cache)
    row.setdefault("idle_bytes", row["cache_bytes"])
    return row


def main() -> int:
    args = parser(__doc__).parse_args()
    if args.prompt is None and args.prompts is None:
        args.prompts = Path(__file__).with_name("kv_cache_prompts.txt")
    config = shapes.read_config(args.model)
    text = Text(args, config)
    device = report.start_lesson(args.device, args.seed)
    args.dtype = choose_dtype(args, config, device)
    net = weights.build(args.model, config, seed=args.seed, device="meta").to(DTYPES[args.dtype])
    net = weights.materialize(net, args.model, seed=args.seed, device=device)
    rows = {}

    def answer(way: str) -> None:
        rows[way] = run(way, net, text, args, device)

    seconds = measure.seconds_in_turns({way: partial(answer, way) for way in WAYS}, device, ROUNDS)
    rows = [rows[way] | seconds[way] for way in WAYS]
    checked = check(rows, text, args, BLOCK)
    checked += check_tokens(rows[0]["token_ids"], text, args, device)
    cache, prefill, decode = cache_and_steps("paged", net, text, args, device, {})
    how = {"max_new_tokens": 1, "choose": partial(torch.argmax, dim=-1), "device": device}
    read_again = partial(generate, prefill, decode, text.prompts, **how)
    report.end_lesson(
        rows,
        columns=COLUMNS,
        checked=checked,
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        tokens=sum(map(len, rows[0]["token_ids"])),
        texts=[text.decode(ids) for ids in rows[0]["token_ids"]],
        resume=seconds_to_resume(cache, read_again, device, ROUNDS),
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
