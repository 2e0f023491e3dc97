"""Speculative decoding for quantized_inference.py: a small model guesses tokens, the large one verifies them at once.

A step takes the time that the weights take to be read, so the large model looks at five tokens in little more than the
time of one. A guess is kept with the large model's probability of it over the small one's, so that the result is one of
the large model (Leviathan et al. 2023). The first that is refused is drawn again, from what the large model gives more
than the small one did. What refused guesses leave in the caches lies behind the next position, where nobody sees it:
rolling back is setting the position.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from old.generate import Generated, Sampler, probabilities


def accept(target: Tensor, draft: Tensor, guesses: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """How many of the guesses [k] are kept, and the token after them: from probabilities [k + 1, vocab] and [k, vocab].

    At temperature 0 each distribution is a single token, and what comes out is the large model's own choice.
    """
    index = torch.arange(len(guesses), device=guesses.device)
    drawn = torch.rand(len(guesses), generator=generator, device=guesses.device)
    kept = drawn * draft[index, guesses] < target[index, guesses]
    count = kept.long().cumprod(0).sum()[None]
    wanted = target.index_select(0, count)[0]
    given = torch.cat((draft, torch.zeros_like(draft[:1]))).index_select(0, count)[0]  # after the last guess: nothing
    missing = (wanted - given).clamp(min=0)
    missing = torch.where(missing.sum() > 0, missing, wanted)  # equal up to rounding
    return count, torch.multinomial(missing, 1, generator=generator)


@dataclass
class Models:
    """prefill and decode as in common/generate.py. verify(ids [1, k + 1], positions [1, k + 1]) is the large model's
    step for several tokens: logits [1, k + 1, vocab]."""

    prefill: Callable[[Tensor, Tensor, Tensor], Tensor]
    verify: Callable[[Tensor, Tensor], Tensor]
    draft_prefill: Callable[[Tensor, Tensor, Tensor], Tensor]
    draft_decode: Callable[[Tensor, Tensor], Tensor]


@torch.inference_mode()
def speculate(
    models: Models,
    prompt: list[int],
    *,
    draft_tokens: int,
    max_new_tokens: int,
    sampler: Sampler,
    device: torch.device,
    stop: frozenset[int] = frozenset(),
) -> tuple[Generated, list[int]]:
    """What generate gives for one prompt, in fewer steps of the large model; and how many guesses each step kept."""
    distribution = partial(probabilities, temperature=sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p)
    ids = torch.tensor([prompt], device=device)
    positions = torch.arange(len(prompt), device=device)[None]
    last = torch.tensor([len(prompt) - 1], device=device)
    result, kept = Generated([[]], len(prompt)), []
    started = time.perf_counter()
    token = sampler(models.prefill(ids, positions, last))
    models.draft_prefill(ids, positions, last)
    add(token.tolist(), result, stop, max_new_tokens)
    result.prefill_seconds = time.perf_counter() - started

    started = time.perf_counter()
    ahead = torch.arange(draft_tokens + 1, device=device)
    position = len(prompt)  # of the newest token, which no cache has yet
    while not result.finished:
        tokens, chances = [token], []
        for step in range(draft_tokens):
            chances.append(distribution(models.draft_decode(tokens[-1], ahead[step : step + 1] + position)))
            tokens.append(torch.multinomial(chances[-1], 1, generator=sampler.generator)[0])
        models.draft_decode(tokens[-1], ahead[-1:] + position)  # for its cache, should all be kept
        guesses = torch.cat(tokens[1:])
        logits = models.verify(torch.cat(tokens)[None], ahead[None] + position)
        count, token = accept(distribution(logits[0]), torch.cat(chances), guesses, sampler.generator)
        fresh = torch.cat((count, guesses, token)).tolist()
        kept.append(fresh[0])
        add([*fresh[1 : 1 + fresh[0]], fresh[-1]], result, stop, max_new_tokens)
        position += fresh[0] + 1
        result.decode_steps += 1
    result.decoded_tokens = max(0, len(result.token_ids[0]) - 1)
    result.decode_seconds = time.perf_counter() - started
    return result, kept


def add(tokens: list[int], result: Generated, stop: frozenset[int], max_new_tokens: int) -> None:
    for token in tokens:
        if token in stop:
            result.finished.add(0)
        if not result.finished:
            result.token_ids[0].append(token)
        if len(result.token_ids[0]) == max_new_tokens:
            result.finished.add(0)
