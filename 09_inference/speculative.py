"""Speculative decoding: a small draft model guesses some tokens, the large model checks all of them in one step.

A decode step takes the time that the weights take to be read, and so the large model computes five tokens in little
more than the time of one. The draft guesses K tokens, one after the other. The large model reads them in one forward of
K + 1 tokens and keeps the first ones, each with the probability large / draft (Leviathan et al. 2023). So the text has
the large model's distribution, and at temperature 0 it is the large model's own text, token by token.

    laptop    python 09_inference/speculative.py
              python 09_inference/speculative.py --temperature 0.8 --draft-tokens 2
    one GPU   python 09_inference/speculative.py --model llama-8b --draft llama-1b --compile
    cluster   one device is all it uses; servers such as vLLM combine it with tensor parallelism

Without --draft the draft is the first half of the model's own layers; and then the model itself, whose guesses are all
kept, each at the full price. No draft guesses random weights well at temperature 0: take two folders of one family.

Look for: the steps of the large model, which fall with each guess that is kept; and the time, which need not. Before:
quantized.py, fewer bytes per weight. Next: launch/.
"""

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _generate as shared

from common import cli, exits, measure, report
from lm import model, shapes, weights

ROUNDS = 3  # of all ways in turn, for the time
DRAWS = 2000  # of tokens, to see that they have the large model's distribution
CHI_SQUARE = 16.3  # with 3 degrees of freedom, one experiment in 1,000 exceeds it


def accept(
    target: Tensor, draft: Tensor, guesses: Tensor, generator: torch.Generator
) -> tuple[int, Tensor]:
    """How many of the K guesses are kept, and the token [1] after them. `target` [K + 1, vocab] and `draft` [K, vocab]
    are the probabilities that both models gave to each next token.

    A guess is kept with probability min(1, target / draft). The first one that is not is drawn again, from what the
    large model gives beyond the draft: max(0, target - draft). Together, a token has exactly its probability in target.
    """
    places = torch.arange(len(guesses), device=guesses.device)
    drawn = torch.rand(len(guesses), generator=generator, device=guesses.device)
    kept = drawn * draft[places, guesses] < target[places, guesses]
    count = int(kept.long().cumprod(0).sum())  # up to the first that is not kept
    # zeros after the last guess: target alone decides there
    given = nn.functional.pad(draft, (0, 0, 0, 1))[count]
    return count, torch.multinomial((target[count] - given).clamp(min=0), 1, generator=generator)


@torch.inference_mode()
def speculate(
    large,
    draft,
    prompt: list[int],
    *,
    draft_tokens: int,
    max_new_tokens: int,
    distribution,
    generator,
    stop,
) -> tuple[list[int], list[int]]:
    """The new tokens of a prompt; and how many guesses each step of the large model has kept.

    large: prefill and verify, draft: prefill and decode, see `steps`. distribution: logits to probabilities. What
    rejected guesses leave in the caches is at later positions, which no token sees before they are written again.
    """
    (prefill, verify), (draft_prefill, draft_decode) = large, draft
    ids = torch.tensor([prompt], device=generator.device)
    positions = torch.arange(len(prompt) + 1 + draft_tokens, device=ids.device)
    start = (ids, positions[None, : len(prompt)], positions[len(prompt) - 1, None])
    token = torch.multinomial(distribution(prefill(*start))[0], 1, generator=generator)
    draft_prefill(*start)
    answer, kept = token.tolist(), []
    # of the newest token, which no cache holds yet, and of the guesses after it
    ahead = positions[len(prompt) :]
    while len(answer) < max_new_tokens and stop.isdisjoint(answer):
        tokens, chances = [token], []
        for position in ahead[:-1].split(1):
            chances.append(distribution(draft_decode(tokens[-1], position)))
            tokens.append(torch.multinomial(chances[-1][0], 1, generator=generator))
        draft_decode(tokens[-1], ahead[-1:])  # for its cache: all guesses may be kept
        tokens = torch.cat(tokens)
        logits = verify(tokens[None], ahead[None])
        count, token = accept(distribution(logits[0]), torch.cat(chances), tokens[1:], generator)
        answer += torch.cat((tokens[1 : count + 1], token)).tolist()
        kept.append(count)
        ahead = ahead + count + 1
    ends = [place for place, token in enumerate(answer) if token in stop]
    return answer[: min([max_new_tokens, *ends])], kept


def first_half(net: model.Transformer) -> model.Transformer:
    """A draft that needs no files: embedding, half of the layers and head of the model, in the same memory."""
    draft = copy.deepcopy(
        net, {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    )
    half = (net.config.num_hidden_layers + 1) // 2
    for name in list(draft.model.layers)[half:]:
        del draft.model.layers[name]
    draft.config = dataclasses.replace(net.config, num_hidden_layers=half)
    return draft


def steps(
    net: nn.Module,
    length: int,
    vocab_size: int,
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[Callable, Callable, Callable]:
    """Return prefill, decode and verify of a model, with a cache for one prompt.

    Prefill and decode are those of _generate.steps_of. Verify returns the logits
    [1, tokens, vocab_size] of all its tokens [1, tokens].
    """
    cache = shared.StaticCache(
        net.config, batch=1, length=length, dtype=shared.DTYPES[args.dtype], device=device
    )
    prefill, decode = shared.steps_of(net, cache)

    def verify(ids: Tensor, positions: Tensor) -> Tensor:
        return net(ids, positions=positions, cache=cache)

    if args.compile:
        decode, verify = shared.compiled(net, cache, decode, verify)
    return (
        without_padding(prefill, vocab_size),
        without_padding(decode, vocab_size),
        without_padding(verify, vocab_size),
    )


def without_padding(step: Callable, vocab_size: int) -> Callable:
    """Return the step with its first `vocab_size` logits only.

    Sizes of one family may pad the same vocabulary to different numbers of rows. A row that one of
    the models does not have is no token: it is never drawn, proposed or accepted.
    """

    def step_without_padding(*inputs: Tensor) -> Tensor:
        return step(*inputs)[..., :vocab_size]

    return step_without_padding


def run(
    name: str, large: tuple, draft: tuple | None, text: shared.Text, args, device: torch.device
) -> dict:
    """Answer all prompts, one after the other: token by token without a draft, else with guesses."""
    prefill, decode, verify = large
    flags = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    guessing = {
        "draft_tokens": args.draft_tokens,
        "distribution": partial(shared.probabilities, **flags),
    }
    how = {"max_new_tokens": args.max_new_tokens, "stop": text.stop}
    answers, kept = [], []
    for prompt in text.prompts:
        generator = torch.Generator(device).manual_seed(args.seed)
        if draft is None:
            choose = partial(shared.sample, args=args, generator=generator)
            result = shared.generate(prefill, decode, [prompt], choose=choose, device=device, **how)
            answer, counts = result.token_ids[0], [0] * result.decode_steps
        else:
            answer, counts = speculate(
                (prefill, verify), draft[:2], prompt, generator=generator, **guessing, **how
            )
        answers.append(answer)
        kept += counts
    kept_per_step = round(sum(kept) / len(kept), 2) if draft and kept else None
    return {
        "name": name,
        "large_steps": len(kept),
        "kept_per_step": kept_per_step,
        "token_ids": answers,
    }


def check(rows: list[dict], text: shared.Text, args, device: torch.device) -> list[str]:
    """Greedy tokens are the same with and without a draft; drawn ones have the large model's distribution."""
    plain, *guessed = rows
    proved = [check_distribution()]
    if args.temperature == 0 and args.dtype == "fp32":
        for row in guessed:
            assert row["token_ids"] == plain["token_ids"], (
                f"{row['name']}: other tokens than without a draft"
            )
        proved.append("the tokens with a draft are those without one")
    return proved + shared.check_tokens(plain["token_ids"], text, args, device)


def check_distribution() -> str:
    """Draw by accept, with a draft that often disagrees, and count the first tokens: Pearson's chi-square test."""
    generator = torch.Generator().manual_seed(0)
    target = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
    draft = torch.tensor([[0.2, 0.2, 0.3, 0.3]])
    counts = torch.zeros(4)
    for _ in range(DRAWS):
        guess = torch.multinomial(draft[0], 1, generator=generator)
        kept, token = accept(target, draft, guess, generator)
        counts[guess if kept else token] += 1
    to_target, to_draft = (
        ((counts / DRAWS - each[0]) ** 2 / each[0]).sum() * DRAWS for each in (target, draft)
    )
    assert to_target < CHI_SQUARE < to_draft, (
        f"chi-square {to_target} to the model, {to_draft} to the draft"
    )
    return f"{DRAWS:,} tokens drawn by accept have the large model's distribution, and not the draft's (chi-square)"


def load(
    name: str, config: shapes.Config, args, device: torch.device, flag: str = "--model"
) -> model.Transformer:
    net = weights.build(name, config, seed=args.seed, device="meta").to(shared.DTYPES[args.dtype])
    return weights.materialize(net, name, seed=args.seed, device=device, flag=flag)


def shared_vocab_size(
    args: argparse.Namespace,
    config: shapes.Config,
    draft_config: shapes.Config,
    tokenizer,
) -> int:
    """Return how many logits both models have, if their tokens are the same.

    Raise UserError for a draft with another tokenizer. The number of rows in the vocabulary, which
    may be padded, decides only where a folder without a tokenizer leaves nothing else to compare.
    """
    vocab_size = min(config.vocab_size, draft_config.vocab_size)
    draft_tokenizer = shared.read_tokenizer(args.draft, "--draft")
    if tokenizer is None or draft_tokenizer is None:
        if config.vocab_size != draft_config.vocab_size:
            raise exits.UserError(
                f"--draft {args.draft} has {draft_config.vocab_size} tokens, and --model "
                f"{args.model} {config.vocab_size}: use a draft with the same tokenizer, "
                "and put tokenizer.json into both folders"
            )
        return vocab_size

    tokens = tokens_by_id(tokenizer, config.vocab_size)
    draft_tokens = tokens_by_id(draft_tokenizer, draft_config.vocab_size)
    added = tokenizer.get_added_vocab()
    draft_added = draft_tokenizer.get_added_vocab()
    for token_id in sorted({*tokens, *draft_tokens}):
        token = tokens.get(token_id)
        draft_token = draft_tokens.get(token_id)
        if token == draft_token:
            continue
        # A token that was added to one tokenizer, such as one for padding, is a spare row of the
        # other model: the large model accepts it with its own probability, as any other token.
        if token is None and draft_token in draft_added:
            continue
        if draft_token is None and token in added and token_id < vocab_size:
            continue
        raise exits.UserError(
            f"--draft {args.draft} has another vocabulary than --model {args.model}: token "
            f"{token_id} is {draft_token!r}, and {token!r} in the model: use a draft with the same "
            "tokenizer"
        )
    return vocab_size


def tokens_by_id(tokenizer, vocab_size: int) -> dict[int, str]:
    """Return the tokens of a tokenizer that a model with so many rows can read."""
    tokens = {}
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size:
            tokens[token_id] = token
    return tokens


def check_draft(args: argparse.Namespace, config: shapes.Config, text: shared.Text) -> None:
    """Raise UserError for a draft that cannot guess for the model, and cut the text's vocabulary.

    The vocabulary of the text becomes that of both models.
    """
    draft_config = shapes.read_config(args.draft, "--draft")
    text.vocab_size = shared_vocab_size(args, config, draft_config, text.tokenizer)
    needed = max(map(len, text.prompts)) + args.max_new_tokens + args.draft_tokens
    if draft_config.max_position_embeddings < needed:
        both = f"{draft_config.max_position_embeddings} tokens, and this takes {needed}"
        raise exits.UserError(
            f"--draft {args.draft} has a context of {both}: use fewer --max-new-tokens"
        )


def main() -> int:
    flags = shared.parser(__doc__)
    flags.add_argument(
        "--draft", metavar="MODEL", help="what guesses (default: half of the model's own layers)"
    )
    flags.add_argument(
        "--draft-tokens", type=cli.positive_int, default=4, metavar="K", help="guesses per step"
    )
    flags.add_argument(
        "--compile", action="store_true", help="compile decode and verify; on a GPU as CUDA graphs"
    )
    args = flags.parse_args()
    config = shapes.read_config(args.model)
    text = shared.Text(args, config, ahead=args.draft_tokens)
    if args.draft:
        check_draft(args, config, text)
    device = report.start_lesson(args.device, args.seed)
    args.dtype = shared.choose_dtype(args, config, device)

    net = load(args.model, config, args, device)
    if args.draft:
        draft_config = shapes.read_config(args.draft, "--draft")
        draft = load(args.draft, draft_config, args, device, flag="--draft")
        drafts = {f"draft: {args.draft}": draft}
    else:
        drafts = {"draft: half of its layers": first_half(net), "draft: the model itself": net}
    large = steps(net, text.length, text.vocab_size, args, device)
    ways = {"no draft": None}
    for name, draft in drafts.items():
        ways[name] = steps(draft, text.length, text.vocab_size, args, device)
    rows = {}

    def answer(name: str) -> None:
        rows[name] = run(name, large, ways[name], text, args, device)

    seconds = measure.seconds_in_turns(
        {name: partial(answer, name) for name in ways}, device, ROUNDS
    )
    for name, row in rows.items():
        row |= seconds[name]
        row["tokens_per_second"] = sum(map(len, row["token_ids"])) / row["seconds"]
        row["step_seconds"] = row["seconds"] / max(1, row["large_steps"])
    rows = [*rows.values()]
    token_ids = rows[1]["token_ids"]
    for prompt, ids in zip(text.texts, token_ids, strict=True):
        print(f"{prompt!r} goes on: {text.decode(ids)!r}")
    columns = {
        "name": "way",
        "large_steps": "steps of the model",
        "kept_per_step": f"kept of {args.draft_tokens} guesses",
        "step_seconds": "a step",
        "tokens_per_second": "speed",
        "time_ratio": "time against no draft",
    }
    own = {"parameters": shapes.parameter_count(config), "token_ids": token_ids}
    checked = check(rows, text, args, device)
    report.end_lesson(rows, columns=columns, checked=checked, args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
