"""A conversation that waits for its user: kv_cache.py takes its blocks off the device, and brings them back."""

import tempfile
from dataclasses import dataclass

import torch
from _kv_cache_measure import check_same
from torch import Tensor

from old import report, step_cost


@dataclass
class Away:
    """The keys and values of an idle conversation: [blocks, tokens, heads, head_dim] per layer, keys then values."""

    parts: list[Tensor]
    tokens: int

    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def slower_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """For a GPU pinned CPU memory, which it can copy to and from by itself. Else a file mapped into memory, which Linux
    writes to the disk when memory gets short."""
    if device.type == "cuda":
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    with tempfile.NamedTemporaryFile() as file:  # its name goes at once, its content when the tensor goes
        return torch.from_file(file.name, shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)


def send_away(cache, request: int, tokens: int) -> Away:
    """Copy a request's blocks, in the order of its text, and free them. On a GPU nobody waits: what is written to the
    blocks next comes after these copies in the same stream."""
    table = cache.tables[request]
    parts = []
    for part in (*cache.keys.values(), *cache.values.values()):
        blocks = part[table]
        parts.append(slower_memory(blocks.shape, part.dtype, part.device))
        parts[-1].copy_(blocks, non_blocking=True)
    cache.release(request)
    return Away(parts, tokens)


def bring_back(cache, request: int, away: Away) -> None:
    """Into blocks that are free now: other ones than before, and nothing but the table has to know."""
    cache.reserve(request, away.tokens)
    table = cache.tables[request]
    for part, waiting in zip((*cache.keys.values(), *cache.values.values()), away.parts, strict=True):
        part[table] = waiting.to(part.device, non_blocking=True)


def read(net, cache, request: int, ids: list[int], start: int) -> Tensor:
    """Logits of the last of these tokens, the first of which is at position `start`."""
    device = net.lm_head.weight.device
    cache.reserve(request, start + len(ids))
    cache.select([request])
    positions = torch.arange(start, start + len(ids), device=device)[None]
    last = torch.tensor([-1], device=device)
    return net(torch.tensor([ids], device=device), positions=positions, cache=cache, last=last)


@torch.inference_mode()
def measure_offload(
    net, new_cache, prompt: list[int], seq_len: int, block: int, device: torch.device, rounds: int
) -> dict:
    """A conversation of seq_len tokens in two turns. Between them its blocks, of `block` tokens, go to a stranger."""
    text = (prompt * seq_len)[:seq_len]
    turn = seq_len - seq_len // 4
    cache = new_cache(blocks=2 * -(-seq_len // block))
    read(net, cache, 0, text[:turn], 0)
    before = list(cache.tables[0])
    away = send_away(cache, 0, turn)
    read(net, cache, 1, text[::-1], 0)  # somebody else's text, into the same blocks
    bring_back(cache, 0, away)
    assert set(before) & set(cache.tables[1]), "the stranger got other blocks, and nothing was shown"
    assert before != cache.tables[0]
    found = read(net, cache, 0, text[turn:], turn)
    whole = torch.tensor([text], device=device)
    same = check_same(found, net(whole, last=torch.tensor([-1], device=device)))

    waiting = []

    def there() -> None:
        waiting.append(send_away(cache, 0, seq_len))

    def back() -> None:
        bring_back(cache, 0, waiting.pop())

    def read_again() -> None:
        cache.release(0)
        read(net, cache, 0, text, 0)

    steps = {"away": there, "back": back, "read again": read_again}
    seconds = step_cost.time_in_turns(steps, device, rounds)
    return {
        "tokens": seq_len,
        "moved_bytes": send_away(cache, 0, seq_len).nbytes(),
        "to": "pinned CPU memory" if device.type == "cuda" else "a mapped file",
        "away_seconds": report.spread(seconds["away"]),
        "back_seconds": report.spread(seconds["back"]),
        "read_again_seconds": report.spread(seconds["read again"]),
        **same,
    }
