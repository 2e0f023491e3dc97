"""Generating text with the model of model.py: a cache of keys and values, sampling, and the loop of prefill and decode.

06_fsdp_zero/infer_70b.py and 07_memory_tricks/quantized_inference.py generate with it; kv_cache.py explains it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from old.shapes import Config


class StaticCache:
    """Keys and values of the tokens so far: [batch, key-value heads, length, head_dim] per layer, allocated once.

    A token's slot is its position. It sees the slots up to its own, so what padding or a rejected draft has left
    behind is never seen, and the next token at that position overwrites it.
    """

    def __init__(
        self,
        config: Config,
        *,
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layers: Iterable[str] | None = None,
        ranks: int = 1,
    ) -> None:
        """`layers`: the names of the layers that a pipeline stage holds (all); `ranks`: how many share the heads."""
        names = map(str, range(config.num_hidden_layers)) if layers is None else layers
        shape = (batch, config.num_key_value_heads // ranks, length, config.head_dim)
        zeros = torch.zeros  # a slot that nothing was written to is multiplied by 0, and NaN times 0 is NaN
        self.keys = {name: zeros(shape, dtype=dtype, device=device) for name in names}
        self.values = {name: zeros(shape, dtype=dtype, device=device) for name in self.keys}
        self.rows = torch.arange(batch, device=device)[:, None]
        self.slots = torch.arange(length, device=device)

    def visible(self, positions: Tensor) -> Tensor:
        """Which slots each token sees: bool [batch, 1, tokens, length], from positions [batch, tokens]."""
        return (self.slots <= positions.unsqueeze(-1)).unsqueeze(1)

    def extend(self, layer: str, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v [batch, heads, tokens, head_dim] to their slots; all keys and values of the layer."""
        keys, values = self.keys[layer], self.values[layer]
        # not through a transposed view, which a compiler may copy back and forth
        keys[self.rows, :, positions] = k.transpose(1, 2)
        values[self.rows, :, positions] = v.transpose(1, 2)
        return keys, values

    def tensors(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values()]

    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors())


def probabilities(logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """What tokens are drawn from: logits [..., vocab] / temperature, then the `top_k` likeliest of them (0: all), then
    the fewest whose probabilities reach `top_p` together. Temperature 0 leaves the likeliest alone."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits.float()
    temperature = max(temperature, torch.finfo(torch.float32).tiny)  # what is smaller would be 0 here, and 0 / 0 a NaN
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: a small temperature makes no infinity
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        likely, order = logits.softmax(-1).sort(dim=-1, descending=True)
        before = likely.cumsum(-1) - likely  # what the likelier ones have together
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits.softmax(-1)


@dataclass(frozen=True)
class Sampler:
    """Draws the next token of each row from logits [batch, vocab]. The same seed gives the same tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def draw(self, rows: int) -> Tensor:
        """A number in [0, 1) for each row of a batch: all that is random in a step.

        Whoever computes only some of the rows takes theirs of it, and samples what one process with all rows would.
        """
        device = "cpu" if self.generator is None else self.generator.device
        return torch.rand(rows, generator=self.generator, device=device)

    def __call__(self, logits: Tensor, drawn: Tensor | None = None) -> Tensor:
        """The next tokens; `drawn` are the numbers of these rows, if draw has given those of a larger batch."""
        if self.temperature == 0:
            return logits.argmax(-1)
        chances = probabilities(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        drawn = self.draw(len(logits)) if drawn is None else drawn
        up_to = chances.cumsum(-1)  # the first token whose sum is above the number drawn: never one of probability 0
        return torch.searchsorted(up_to, drawn.to(up_to)[:, None] * up_to[:, -1:], right=True).squeeze(-1)


@dataclass
class Generated:
    """New tokens per prompt, without the stop token; seconds of the prefill and of all decode steps after it.

    decoded_tokens are those of the decode steps: the prefill has given the first of each prompt. weight_reads are the
    forwards of these steps where there are more than one a step, for a batch cut into micro-batches; else 0.
    """

    token_ids: list[list[int]]
    prompt_tokens: int
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    weight_reads: int = 0
    decoded_tokens: int = 0
    finished: set[int] = field(default_factory=set)


def pad(prompts: list[list[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor [batch, longest], padded on the right, and the length of each."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


@torch.inference_mode()
def generate(
    prefill: Callable[[Tensor, Tensor, Tensor], Tensor],
    decode: Callable[[Tensor, Tensor], Tensor],
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    device: torch.device | str,
    stop: frozenset[int] = frozenset(),
    on_tokens: Callable[[list[int | None]], None] | None = None,
    read_late: bool = False,
) -> Generated:
    """Prefill reads all prompts at once and gives the first token of each; each decode step gives one more.

    prefill(ids [batch, tokens], positions [batch, tokens], last [batch]) and decode(ids [batch], positions [batch])
    return logits [batch, vocab]. on_tokens is called with each step's tokens, None for a row that has ended. With
    `read_late` a step's tokens are read after the next one was started: a GPU then hardly waits for Python, and the
    step after the last stop token is for nothing.
    """
    ids, lengths = pad(prompts, device)
    positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    result = Generated([[] for _ in prompts], int(lengths.sum()))
    started = time.perf_counter()
    tokens = sampler(prefill(ids, positions, lengths - 1))
    take(tokens, result, stop, on_tokens)
    result.prefill_seconds = time.perf_counter() - started

    started = time.perf_counter()
    read_before = None
    for step in range(max_new_tokens - 1):
        if len(result.finished) == len(prompts):
            break
        tokens = sampler(decode(tokens, lengths + step))
        result.decode_steps += 1
        if not read_late:
            take(tokens, result, stop, on_tokens)
            continue
        if read_before is not None:
            take(read_before(), result, stop, on_tokens)
        read_before = start_reading(tokens)
    if read_before is not None:
        take(read_before(), result, stop, on_tokens)
    result.decoded_tokens = sum(len(ids[1:]) for ids in result.token_ids)
    result.decode_seconds = time.perf_counter() - started
    return result


def start_reading(tokens: Tensor) -> Callable[[], Tensor]:
    """Have a GPU copy tokens to the CPU as soon as it has them. The function that is returned waits for this copy
    alone, not for a step that was started after it."""
    if tokens.device.type != "cuda":
        return tokens.cpu
    copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    copy.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def take(tokens: Tensor, result: Generated, stop: frozenset[int], on_tokens: Callable | None) -> None:
    """Add a token to each row that has not ended. Reading them here is what waits for the device."""
    fresh = tokens.tolist()
    for row, token in enumerate(fresh):
        if row in result.finished or token in stop:
            result.finished.add(row)
            fresh[row] = None
        else:
            result.token_ids[row].append(token)
    if on_tokens:
        on_tokens(fresh)
