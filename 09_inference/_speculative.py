"""The flags, the vocabulary of two models, the table and the checks of speculative.py."""

import argparse
from collections.abc import Callable

import _prompts
import torch
from torch import Tensor

from common import cli, lesson, measure, report
from common.exits import UserError
from lm import shapes
from lm.generate import nan_if_not_finite, not_finite_error

ROUNDS = 3  # of all variants in turn, for the time
NO_DRAFT = "no draft"
DRAWS = 2000  # of tokens, to see that they have the target's distribution
CHI_SQUARE = 16.3  # with 3 degrees of freedom, one experiment in 1,000 exceeds it

Accept = Callable[[Tensor, Tensor, Tensor, torch.Generator], tuple[int, Tensor]]


def parse_flags(doc: str) -> argparse.Namespace:
    """Parse the flags of the script. On a GPU the model is large enough to be bound by memory."""
    flags = _prompts.parser(doc)
    flags.add_argument(
        "--draft",
        metavar="MODEL",
        help="the model that guesses (default: half of the model's own layers)",
    )
    flags.add_argument(
        "--draft-tokens", type=cli.positive_int, default=4, metavar="K", help="guesses per step"
    )
    flags.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile decode and verify; on a GPU as CUDA graphs (default: on a GPU)",
    )
    flags.set_defaults(model=None)
    args = flags.parse_args()
    lesson.fill_defaults(
        args,
        cpu={"model": "nano", "compile": False},
        gpu={"model": "llama-1b", "compile": True},
    )
    return args


# --- the vocabulary


def check_draft(
    args: argparse.Namespace,
    config: shapes.Config,
    draft_config: shapes.Config,
    text: _prompts.Text,
) -> None:
    """Raise UserError for a draft that cannot guess for the model.

    The text's vocabulary becomes what both models have.
    """
    text.vocab_size = shared_vocab_size(args, config, draft_config, text.tokenizer)
    needed = max(map(len, text.prompts)) + args.max_new_tokens + args.draft_tokens
    context = draft_config.max_position_embeddings
    if context < needed:
        raise UserError(
            f"--draft {args.draft} has a context of {context} tokens, and this takes {needed}: "
            "use fewer --max-new-tokens"
        )


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
    draft_tokenizer = _prompts.read_tokenizer(args.draft, "--draft")
    if tokenizer is None or draft_tokenizer is None:
        if config.vocab_size != draft_config.vocab_size:
            raise UserError(
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
        # other model: the target accepts it with its own probability, as any other token.
        if token is None and draft_token in draft_added:
            continue
        if draft_token is None and token in added and token_id < vocab_size:
            continue
        raise UserError(
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


def without_padding(step: Callable[..., Tensor], vocab_size: int) -> Callable[..., Tensor]:
    """Return the step with its first `vocab_size` logits only.

    Sizes of one family may pad the same vocabulary to different numbers of rows. A row that one of
    the models does not have is no token: it is never drawn, guessed or accepted.
    """

    def step_without_padding(*inputs: Tensor) -> Tensor:
        return step(*inputs)[..., :vocab_size]

    return step_without_padding


def watched(step: Callable[..., Tensor], marks: list[Tensor]) -> Callable[..., Tensor]:
    """Return the step. Each call adds a tensor to `marks`: NaN if a logit is NaN or infinite."""

    def watched_step(*inputs: Tensor) -> Tensor:
        logits = step(*inputs)
        marks.append(nan_if_not_finite(logits).flatten())
        return logits

    return watched_step


def check_finite(marks: list[Tensor], model: str) -> None:
    """Raise UserError if a logit was NaN or infinite since the last call."""
    is_nan = torch.cat(marks).isnan().any().item()
    marks.clear()
    if is_nan:
        raise not_finite_error(model, "a guess")


def up_to_stop(tokens: list[int], stop: frozenset[int]) -> list[int]:
    """Return the tokens before the first stop token."""
    for place, token in enumerate(tokens):
        if token in stop:
            return tokens[:place]
    return tokens


# --- the table


def row_of(name: str, answers: list[list[int]], accepted: list[int], *, has_draft: bool) -> dict:
    """Return the row of a variant. `accepted` has the accepted guesses of each step."""
    accepted_per_step = None
    if has_draft and accepted:
        accepted_per_step = round(sum(accepted) / len(accepted), 2)
    return {
        "name": name,
        "target_steps": len(accepted),
        "accepted_per_step": accepted_per_step,
        "token_ids": answers,
    }


def add_seconds(row: dict, seconds: dict) -> None:
    """Add the timing of a row, and what follows from it."""
    row |= seconds
    row["tokens_per_second"] = sum(map(len, row["token_ids"])) / row["seconds"]
    row["step_seconds"] = row["seconds"] / max(1, row["target_steps"])


def columns(args: argparse.Namespace) -> dict[str, str]:
    """Return the heading of each key that the table shows."""
    return {
        "name": "variant",
        "target_steps": "steps of the model",
        "accepted_per_step": f"accepted of {args.draft_tokens} guesses",
        "step_seconds": "a step",
        "tokens_per_second": "speed",
        "time_ratio": "time against no draft",
    }


@torch.inference_mode()
def time_of_verify(target, prompt: list[int], draft_tokens: int, device: torch.device) -> float:
    """Time a verify step against a decode step, print it, and return the ratio.

    `target` is a Steps of speculative.py.
    """
    ids = torch.tensor([prompt], device=device)
    positions = torch.arange(len(prompt), device=device)[None]
    last = torch.tensor([len(prompt) - 1], device=device)
    target.prefill(ids, positions, last)

    # The tokens do not matter. Each call writes the same slots of the cache.
    tokens = torch.zeros(draft_tokens + 1, dtype=torch.long, device=device)
    places = torch.arange(len(prompt), len(prompt) + draft_tokens + 1, device=device)

    def decode() -> None:
        target.cache.filled = len(prompt)
        target.decode(tokens[:1], places[:1])

    def verify() -> None:
        target.cache.filled = len(prompt)
        target.verify(tokens[None], places[None])

    steps = {"decode": decode, "verify": verify}
    timing = measure.seconds_in_turns(steps, device, rounds=2 * ROUNDS)
    ratio = timing["verify"]["time_ratio"]
    print(
        f"a decode step takes {report.for_people('seconds', timing['decode']['seconds'])}, "
        f"a verify step of {draft_tokens + 1} tokens "
        f"{report.for_people('seconds', timing['verify']['seconds'])}: {ratio:.2f}x"
    )
    return ratio


# --- the checks


def check(
    rows: list[dict],
    accept: Accept,
    text: _prompts.Text,
    args: argparse.Namespace,
    device: torch.device,
) -> list[str]:
    """Assert that greedy tokens do not depend on the draft, and that drawn ones have p.

    Return a line for each thing that was checked.
    """
    without_draft, *with_draft = rows
    checked = [check_distribution(accept)]
    if args.temperature == 0 and args.dtype == "fp32":
        for row in with_draft:
            assert row["token_ids"] == without_draft["token_ids"], (
                f"{row['name']}: other tokens than without a draft"
            )
        checked.append("the tokens with a draft are those without one")
    return checked + _prompts.check_tokens(without_draft["token_ids"], text, args, device)


def check_distribution(accept: Accept) -> str:
    """Draw tokens by `accept`, with a draft that often disagrees: Pearson's chi-square test."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])  # [K + 1, vocab], K = 1
    q = torch.tensor([[0.2, 0.2, 0.3, 0.3]])  # [K, vocab]
    counts = torch.zeros(4)  # of the first token
    for _ in range(DRAWS):
        guess = torch.multinomial(q[0], 1, generator=generator)
        accepted, token = accept(p, q, guess, generator)
        first_token = guess if accepted else token
        counts[first_token] += 1

    distance_to_p = chi_square(counts, p[0])
    distance_to_q = chi_square(counts, q[0])
    assert distance_to_p < CHI_SQUARE < distance_to_q, (
        f"chi-square is {distance_to_p} for the model, and {distance_to_q} for the draft"
    )
    return (
        f"{DRAWS:,} tokens drawn by accept have the model's distribution, "
        "and not the draft's (chi-square)"
    )


def chi_square(counts: Tensor, expected_shares: Tensor) -> float:
    """Return Pearson's chi-square of the counts against the expected shares."""
    expected = DRAWS * expected_shares
    return ((counts - expected) ** 2 / expected).sum().item()
