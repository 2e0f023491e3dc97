"""The KV cache: keys and values that are computed once, in blocks, for requests that come and go.

To generate a token a model needs the keys and values of every token before it. They depend on those tokens alone, so
they are computed once and kept: 2 x layers x key-value heads x head_dim numbers per token. With many requests that is
more than the weights. So a server gives a request blocks of 16 tokens as its text grows, named in a table, and not a
row as long as the longest text. Then requests join and leave between any two steps, two that begin alike name the same
blocks, and the blocks of an idle conversation can wait in CPU memory.

    laptop    python 07_memory_tricks/kv_cache.py
    trained   python 07_memory_tricks/kv_cache.py --model models/smollm2-135m --requests 6   (make model makes it)
    one GPU   python 07_memory_tricks/kv_cache.py --model llama-8b --dtype bf16 --seq-len 2048 --concurrency 16
    cluster   one process is all it uses; 06_fsdp_zero/infer_70b.py divides the heads, and so the cache, over GPUs

Prompts are random tokens: neither bytes nor time depend on them. Look for: the same logits in every row; the slots that
hold a token; the steps of static batching. Before: estimate.py (--inference). Next: 09_inference.
"""

import sys
import time
from collections import defaultdict, deque
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _kv_cache_flags import DTYPES, parse_args
from _kv_cache_measure import measure_serving, measure_ways
from _kv_cache_offload import measure_offload
from _kv_cache_report import plot_slots, print_report
from _kv_cache_requests import Request, Served, make_requests
from _kv_cache_size import check_grouped, check_sizes

from old import exits, hardware, model, report, runtime, shapes
from old.generate import StaticCache

BLOCK = 16  # tokens
ROUNDS = 3


@torch.inference_mode()
def without_cache(net, prompt: list[int], new_tokens: int) -> Tensor:
    """Each new token reads the whole text again. Returns the logits that each was taken from: [new_tokens, vocab]."""
    ids = torch.tensor([prompt], device=net.lm_head.weight.device)
    logits = []
    for _ in range(new_tokens):
        logits.append(net(ids, last=torch.tensor([-1], device=ids.device)))
        ids = torch.cat((ids, logits[-1].argmax(-1, keepdim=True)), dim=1)
    return torch.cat(logits)


@torch.inference_mode()
def with_cache(net, cache, prompt: list[int], new_tokens: int) -> Tensor:
    """The same logits. The prompt is read once, then each forward reads one token, and the cache has the rest."""
    ids = torch.tensor([prompt], device=net.lm_head.weight.device)
    logits = []
    positions = torch.arange(len(prompt), device=ids.device)[None]
    for _ in range(new_tokens):
        logits.append(net(ids, positions=positions, cache=cache, last=torch.tensor([-1], device=ids.device)))
        ids = logits[-1].argmax(-1, keepdim=True)
        positions = positions[:, -1:] + 1
    return torch.cat(logits)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)  # rounded up


class PagedCache:
    """To the model a StaticCache. A request's table names its blocks, anywhere in memory, in the order of its text."""

    def __init__(self, config: shapes.Config, *, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (blocks, BLOCK, config.num_key_value_heads, config.head_dim)
        names = [str(i) for i in range(config.num_hidden_layers)]
        self.keys = {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}
        self.values = {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}
        self.free = list(range(blocks))
        self.users = [0] * blocks  # how many tables name a block
        self.tables = defaultdict(list)

    def reserve(self, request: int, tokens: int) -> bool:
        """Lengthen a request's table for so many tokens; False, and nothing is done, if too few blocks are free."""
        missing = blocks_for(tokens) - len(self.tables[request])
        if missing > len(self.free):
            return False
        for _ in range(missing):
            self.tables[request].append(self.free.pop())
            self.users[self.tables[request][-1]] += 1
        return True

    def share(self, request: int, other: int, tokens: int) -> None:
        """Begin the request's table with the full blocks of the other's first `tokens`, which nobody writes to again.
        Both texts must begin with them: a key depends on its position and on all tokens before."""
        table = self.tables[other][: tokens // BLOCK]
        for block in table:
            self.users[block] += 1
        self.tables[request] = list(table)

    def release(self, request: int) -> None:
        for block in self.tables.pop(request):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)

    def select(self, requests: list[int]) -> None:
        """The next forward is of these requests, a row for each."""
        device = self.keys["0"].device
        tables = [torch.tensor(self.tables[request]) for request in requests]
        self.table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(device)  # padded with blocks not seen
        self.slots = torch.arange(self.table.shape[1] * BLOCK, device=device)

    def visible(self, positions: Tensor) -> Tensor:
        return (self.slots <= positions.unsqueeze(-1)).unsqueeze(1)

    def extend(self, layer: str, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write each token where the table says. Then gather the rows: a server's attention kernel follows the table
        instead, and copies nothing."""
        place = self.table.gather(1, positions // BLOCK), positions % BLOCK
        self.keys[layer][place] = k.transpose(1, 2)
        self.values[layer][place] = v.transpose(1, 2)
        return tuple(part[layer][self.table].flatten(1, 2).transpose(1, 2) for part in (self.keys, self.values))


@torch.inference_mode()
def serve(net, cache: PagedCache, requests: list[Request], *, rows: int, continuous: bool, system=None) -> Served:
    """Answer requests, at most `rows` at a time: admit, decode one token for each, retire. Static batching admits
    nobody before the last of a batch has ended. `system`: a text that all requests begin with, read once."""
    served = Served()
    waiting = deque(requests)
    running = []
    if system is not None:
        served.prompt_tokens_read += prefill(net, cache, system)
    assert all(blocks_for(len(request.prompt) + request.new_tokens) <= len(cache.free) for request in requests)
    while waiting or running:
        admitting = continuous or not running
        while admitting and waiting and len(running) < rows and waiting[0].arrival <= served.steps:
            if blocks_for(len(waiting[0].ids) + 1 - shared_tokens(waiting[0], system)) > len(cache.free):
                break
            running.append(waiting.popleft())
            served.prompt_tokens_read += prefill(net, cache, running[-1], system)
        served.preemptions += make_room(cache, running, waiting)
        if running:
            forward(net, cache, running, 1)
            served.note(cache, running, BLOCK)
        if continuous or all(request.ended for request in running):
            for ended in [request for request in running if request.ended]:
                cache.release(ended.key)  # its blocks are free at once
            running = [request for request in running if not request.ended]
        served.steps += 1
    return served


def shared_tokens(request: Request, system: Request | None) -> int:
    """Full blocks only; and one token at least has to be read, for its logits."""
    return 0 if system is None else min(len(system.prompt), len(request.ids) - 1) // BLOCK * BLOCK


def prefill(net, cache: PagedCache, request: Request, system: Request | None = None) -> int:
    """Read a request's text, but for what it shares, and take its next token. Returns how many tokens were read."""
    if system is not None:
        cache.share(request.key, system.key, shared_tokens(request, system))
    cache.reserve(request.key, len(request.ids))
    unread = len(request.ids) - shared_tokens(request, system)
    forward(net, cache, [request], unread)
    return unread


def forward(net, cache: PagedCache, requests: list[Request], unread: int) -> None:
    """Read the last tokens of each request, one in a decode step, and take the next one. The requests are at positions
    of their own, and each sees its own blocks."""
    cache.select([request.key for request in requests])
    device = net.lm_head.weight.device
    ids = torch.tensor([request.ids[-unread:] for request in requests], device=device)
    ends = torch.tensor([[len(request.ids)] for request in requests], device=device)
    positions = ends + torch.arange(-unread, 0, device=device)
    logits = net(ids, positions=positions, cache=cache, last=torch.full_like(ends[:, 0], -1))
    for request, token, of_request in zip(requests, logits.argmax(-1).tolist(), logits, strict=True):
        request.take(token, of_request)


def make_room(cache: PagedCache, running: list[Request], waiting: deque) -> int:
    """A slot for each newest token. Where no block is free, the youngest request gives up its own and begins again."""
    grown = preempted = 0
    while grown < len(running):
        if cache.reserve(running[grown].key, len(running[grown].ids)):
            grown += 1
        else:
            cache.release(running[-1].key)
            waiting.appendleft(running.pop())
            preempted += 1
    return preempted


def main() -> int:
    started = time.perf_counter()
    args = parse_args(__doc__)
    device = runtime.single_device(args.device)
    runtime.exact_fp32(device)
    dtype = hardware.choose_dtype(args.dtype, device)
    config = shapes.load_config(args.model, 256, args.seq_len)
    print(f"{args.model}, {dtype}, {hardware.device_name(device)}; requests of at most {args.seq_len} tokens")
    kind = {"dtype": DTYPES[dtype], "device": device}
    sizes = check_sizes(args.model, config, seq_len=args.seq_len, concurrency=args.concurrency, **kind)
    grouped = check_grouped(config, seq_len=args.seq_len, seed=args.seed, device=device, with_cache=with_cache)
    net = model.build(args.model, config, seed=args.seed, device=device).to(DTYPES[dtype]).eval()
    system, requests = make_requests(args, config.vocab_size)
    expected = {request.key: without_cache(net, request.prompt, request.new_tokens) for request in requests}
    text = max(requests, key=lambda request: len(request.prompt) + request.new_tokens)
    new_cache = partial(PagedCache, config, **kind)
    in_blocks = new_cache(blocks=blocks_for(args.seq_len))
    in_blocks.reserve(0, args.seq_len)
    in_blocks.select([0])
    caches = {"static cache": StaticCache(config, batch=1, length=args.seq_len, **kind), "cache in blocks": in_blocks}
    one_text = measure_ways(partial(without_cache, net), partial(with_cache, net), caches, text, device, ROUNDS)
    whole = args.concurrency * blocks_for(args.seq_len)  # what a static cache takes
    half = max(whole // 2, blocks_for(args.seq_len) + blocks_for(len(system.prompt)))  # and still the longest fits
    policies = {
        "static batching": (whole, {"continuous": False}),
        "continuous, half the slots": (half, {"continuous": True}),
        "and system prompt read once": (half, {"continuous": True, "system": system}),
    }
    answer = partial(serve, net, rows=args.concurrency)
    serving, runs = measure_serving(answer, new_cache, policies, requests, expected, device, ROUNDS)
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "tokens": sum(request.new_tokens for request in requests),
        "tokens_per_second": serving[-1]["new_tokens_per_second"]["median"],
        "sizes": sizes,
        "grouped_query_attention": grouped,
        "one_text": one_text,
        "serving": serving,
        "static_cache_slots": whole * BLOCK,
        "offload": measure_offload(net, new_cache, text.prompt, args.seq_len, BLOCK, device, ROUNDS),
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - started,
    }
    print_report(summary)
    if plot := plot_slots(runs, whole * BLOCK, args.plot):
        print(f"plot: {plot}")
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
