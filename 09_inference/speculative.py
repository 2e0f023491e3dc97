"""Speculative decoding: a small model guesses tokens, and the large model checks them at once.

A decode step takes as long as reading the weights from memory. In this time a GPU could compute
five tokens as well as one, but each token depends on the one before. So a small model, the draft,
guesses them. A step of the large model, the target, then has three parts (Leviathan et al. 2023,
arXiv:2211.17192):

    draft     guess K tokens, one after the other, each drawn from the draft's probabilities q
    verify    compute the target's probabilities p of these tokens, in one forward of K + 1 tokens
    accept    accept each guess with probability min(1, p / q), up to the first that is rejected.
              Draw that one again, from what p has more than q: max(0, p - q), normalized

Together, each token has the probability p, as the verify step computes it. In fp32 the text at
temperature 0 is the target's own, token by token. In 16 bits a verify step of K + 1 tokens rounds
otherwise than a decode step of one (parity.py), so texts may part where two tokens are nearly tied.
A step gives between 1 and K + 1 tokens.

    laptop    python 09_inference/speculative.py
              python 09_inference/speculative.py --temperature 0.8 --draft-tokens 2
    one GPU   python 09_inference/speculative.py --device cuda
              python 09_inference/speculative.py --model models/llama-3.1-8b \\
                  --draft models/llama-3.2-1b --compile
    cluster   it uses one device only; servers such as vLLM combine it with tensor parallelism

Without --draft, two drafts are tried that need no files: the first half of the target's layers, and
the target itself, whose guesses are all accepted, at the full price. How often a draft is right
depends on the weights, and random ones say nothing about that. For a gain, take two folders of one
family, such as Llama 3.1 8B and Llama 3.2 1B.

What to look at: how many steps the target takes, and the time, which need not fall with them. A
verify step against a decode step. Expected on an H100, where the target is llama-1b in bf16: both
read 2.5 GB of weights, at least 0.74 ms by the data sheet's 3.35 TB/s. On a CPU verifying takes
longer, because there arithmetic is not free.
Previous: quantized.py. Next: offloaded.py.
"""

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _prompts
import _speculative as helper
import torch
from torch import Tensor, nn

from common import lesson, measure
from common.runtime import DTYPES
from lm import model, shapes, weights
from lm.generate import StaticCache, compiled, probabilities, steps_of

# --- 1. the algorithm


def accept(p: Tensor, q: Tensor, guesses: Tensor, generator: torch.Generator) -> tuple[int, Tensor]:
    """Return how many of the K guesses are accepted, and the token after them, [1].

    p: [K + 1, vocab], the target's probabilities of the tokens at these positions. q: [K, vocab],
    the draft's probabilities, from which the guesses, [K], were drawn.
    """
    places = torch.arange(len(guesses), device=guesses.device)
    p_of_guesses = p[places, guesses]  # [K]
    q_of_guesses = q[places, guesses]  # [K]
    random = torch.rand(len(guesses), generator=generator, device=guesses.device)
    is_accepted = random * q_of_guesses < p_of_guesses  # with probability min(1, p / q)
    count = int(is_accepted.long().cumprod(0).sum())  # up to the first that is rejected

    rest = p[count]  # [vocab], of the token after K accepted guesses
    if count < len(guesses):
        rest = (p[count] - q[count]).clamp(min=0)  # replaces the rejected guess
    return count, torch.multinomial(rest, 1, generator=generator)  # multinomial normalizes


class Steps(NamedTuple):
    """The forwards of a model with its own KV cache, for one prompt."""

    prefill: Callable[..., Tensor]  # ids and positions [1, prompt], last [1] -> logits [1, vocab]
    decode: Callable[..., Tensor]  # token and position [1] -> logits [1, vocab]
    verify: Callable[..., Tensor]  # tokens and positions [1, K + 1] -> logits [1, K + 1, vocab]
    cache: StaticCache
    marks: list[Tensor]  # of each forward: NaN if a logit is NaN or infinite


@torch.inference_mode()
def speculative_decode(
    target: Steps,
    draft: Steps,
    prompt: list[int],
    *,
    draft_tokens: int,
    max_new_tokens: int,
    probabilities: Callable[[Tensor], Tensor],
    stop: frozenset[int],
    generator: torch.Generator,
) -> tuple[list[int], list[int]]:
    """Return the new tokens, and how many guesses each step of the target has accepted.

    `probabilities` turns logits into probabilities. Rejected guesses stay in both KV caches, at
    positions that no token sees before they are written again.
    """
    device = generator.device
    prompt_ids = torch.tensor([prompt], device=device)  # [1, prompt]
    prompt_positions = torch.arange(len(prompt), device=device)[None]
    last = torch.tensor([len(prompt) - 1], device=device)
    logits = target.prefill(prompt_ids, prompt_positions, last)  # [1, vocab]
    draft.prefill(prompt_ids, prompt_positions, last)
    token = torch.multinomial(probabilities(logits[0]), 1, generator=generator)  # [1]
    answer = token.tolist()
    accepted = []
    position = len(prompt)  # of the newest token, which is in no cache yet

    while len(answer) < max_new_tokens and stop.isdisjoint(answer):
        # of this token and of the K guesses after it, [K + 1]
        positions = torch.arange(position, position + draft_tokens + 1, device=device)
        # Slots of rejected guesses are free again. A captured step reads only slots in use.
        target.cache.filled = position
        draft.cache.filled = position

        # Draft: guess K tokens.
        tokens = [token]  # [1] each
        q = []  # [vocab] each
        for i in range(draft_tokens):
            logits = draft.decode(tokens[i], positions[i : i + 1])  # [1, vocab]
            q.append(probabilities(logits[0]))
            tokens.append(torch.multinomial(q[i], 1, generator=generator))
        # The draft reads its last guess, too, because all guesses may be accepted.
        draft.decode(tokens[-1], positions[-1:])

        # Verify: one forward of the target gives p for all of them.
        ids = torch.cat(tokens)  # [K + 1]
        logits = target.verify(ids[None], positions[None])  # [1, K + 1, vocab]
        p = probabilities(logits[0])

        # Accept: the next step goes on with the token after the accepted guesses.
        count, token = accept(p, torch.stack(q), ids[1:], generator)
        answer += ids[1 : count + 1].tolist() + token.tolist()
        accepted.append(count)
        position += count + 1

    return helper.up_to_stop(answer[:max_new_tokens], stop), accepted


# --- 2. the models


def first_half(net: model.Transformer) -> model.Transformer:
    """Return a draft that needs no files: embedding, half of the layers and head of the model.

    It uses the same memory as the model.
    """
    shared = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    draft = copy.deepcopy(net, memo=shared)  # deepcopy does not copy what is in memo
    half = (net.config.num_hidden_layers + 1) // 2
    for name in list(draft.model.layers)[half:]:
        del draft.model.layers[name]
    draft.config = dataclasses.replace(net.config, num_hidden_layers=half)
    return draft


def make_steps(
    net: nn.Module,
    text: _prompts.Text,
    args: argparse.Namespace,
    device: torch.device,
) -> Steps:
    """Allocate a cache for one prompt, and return the forwards of a model with it."""
    cache = StaticCache(
        net.config,
        batch=1,
        length=text.length,
        dtype=DTYPES[args.dtype],
        device=device,
    )
    prefill, decode = steps_of(net, cache)

    def verify(ids: Tensor, positions: Tensor) -> Tensor:
        return net(ids, positions=positions, cache=cache)

    if args.compile:
        decode, verify = compiled(net, cache, decode, verify)
    marks = []
    steps = []
    for step in (prefill, decode, verify):
        steps.append(helper.watched(helper.without_padding(step, text.vocab_size), marks))
    return Steps(*steps, cache, marks)


def load(
    name: str,
    config: shapes.Config,
    args: argparse.Namespace,
    device: torch.device,
    flag: str = "--model",
) -> model.Transformer:
    """Return a model with the weights of the folder `name`, or with random ones."""
    dtype = DTYPES[args.dtype]
    net = weights.build(name, config, seed=args.seed, device="meta").to(dtype)
    return weights.materialize(net, name, seed=args.seed, device=device, flag=flag)


# --- 3. with and without a draft


def run(
    name: str,
    target: Steps,
    draft: Steps | None,
    text: _prompts.Text,
    args: argparse.Namespace,
    device: torch.device,
) -> dict:
    """Answer all prompts, one after the other, and return the row of a draft, or of none."""
    answers = []
    accepted = []
    for prompt in text.prompts:
        if draft is None:
            steps = (target.prefill, target.decode)
            result = _prompts.answer(steps, text, args, device, prompts=[prompt])
            answers += result.token_ids
            accepted += [0] * result.decode_steps
        else:
            generator = torch.Generator(device).manual_seed(args.seed)
            answer, accepted_per_step = speculative_decode(
                target,
                draft,
                prompt,
                draft_tokens=args.draft_tokens,
                max_new_tokens=args.max_new_tokens,
                probabilities=partial(
                    probabilities,
                    temperature=args.temperature,
                    top_k=args.top_k,
                    top_p=args.top_p,
                ),
                stop=text.stop,
                generator=generator,
            )
            answers.append(answer)
            accepted += accepted_per_step
            helper.check_finite(target.marks, f"--model {args.model}")
            helper.check_finite(draft.marks, f"--draft {args.draft or args.model}")
    return helper.row_of(name, answers, accepted, has_draft=draft is not None)


def main() -> int:
    args = helper.parse_flags(__doc__)
    config = weights.read_config(args.model)
    text = _prompts.Text(args, config, ahead=args.draft_tokens)
    if args.draft:
        draft_config = weights.read_config(args.draft, "--draft")
        helper.check_draft(args, config, draft_config, text)
    device = lesson.start(args.device, args.seed)
    args.dtype = _prompts.choose_dtype(args, config, device)

    net = load(args.model, config, args, device)
    if args.draft:
        draft = load(args.draft, draft_config, args, device, flag="--draft")
        draft_nets = {f"draft: {args.draft}": draft}
    else:
        draft_nets = {"draft: half of its layers": first_half(net), "draft: the model itself": net}
    target = make_steps(net, text, args, device)
    drafts = {helper.NO_DRAFT: None}
    for name, draft_net in draft_nets.items():
        drafts[name] = make_steps(draft_net, text, args, device)

    rows = {}

    def answer(name: str) -> None:
        rows[name] = run(name, target, drafts[name], text, args, device)

    variants = {name: partial(answer, name) for name in drafts}
    seconds = measure.seconds_in_turns(variants, device, helper.ROUNDS)
    for name, row in rows.items():
        helper.add_seconds(row, seconds[name])
    rows = list(rows.values())
    verify_ratio = helper.time_of_verify(target, text.prompts[0], args.draft_tokens, device)

    token_ids = rows[1]["token_ids"]
    _prompts.say_if_random(args.model)
    for prompt, ids in zip(text.texts, token_ids, strict=True):
        print(f"{prompt!r} goes on: {text.decode(ids)!r}")
    lesson.end(
        rows,
        columns=helper.columns(args),
        checked=helper.check(rows, accept, text, args, device),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        token_ids=token_ids,
        verify_ratio=verify_ratio,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
