"""The text, the table and the checks of parity.py."""

from argparse import Namespace
from itertools import islice

import _prompts
import torch
from torch import Tensor

from common import hardware, report
from common.exits import UserError
from lm import data, model, shapes
from lm.generate import nan_if_not_finite, not_finite_error
from lm.tokenizer import has_tokenizer
from training.batches import Batches

PROMPT_TOKENS = 64
TRAIN_TOKENS = 128  # of each of 8 samples in a step, or as many as the model can read
REFERENCE = "trainer, fp32"
FP32_SERVER = "server, decode, fp32"
AUTOCAST = "trainer, autocast, fp32 weights"
TRAINER_16 = "trainer, 16-bit weights (FSDP)"
SAME_KERNEL = "server, prefill, kernel of the trainer"
COLUMNS = {
    "name": "computed by",
    "error": "mean off fp32",
    "largest_error": "largest",
    "difference_error": "mean off decode",
    "largest_difference_error": "largest",
    "clipped_tokens_share": "tokens clipped",
    "sequence_ratio": "ratio of a sequence",
    "clipped_sequences_share": "sequences clipped",
}
FP32_TOLERANCE = 1e-3  # nats, of any token
# A row in 16 bits may be so many times as far off fp32 as the trainer under autocast.
MOST_TIMES = 10


def load_text(args) -> tuple[shapes.Config, data.Corpus]:
    """Return the shape of the model and the text for training and for prompts.

    Raise UserError if prompt and new tokens do not fit into the model's context.
    """
    config = shapes.read_config(args.model)
    limit = config.max_position_embeddings
    length = PROMPT_TOKENS + args.new_tokens
    if length > limit:
        raise UserError(
            f"--new-tokens {args.new_tokens} after prompts of {PROMPT_TOKENS} is over the limit of "
            f"--model {args.model}, {limit}: use at most {limit - PROMPT_TOKENS}"
        )
    if not has_tokenizer(args.model):
        _prompts.check_reads_bytes(args.model, config)
        tokenizer = "bytes"
    else:
        tokenizer = args.model
    corpus = data.load_corpus("stdlib", model=args.model, tokenizer=tokenizer)
    return shapes.load_config(args.model, corpus.vocab_size, length), corpus


def prompts_of(corpus: data.Corpus, batch_size: int, device: torch.device) -> Tensor:
    """Return prompts from the held-out text, [batch_size, PROMPT_TOKENS]."""
    needed = batch_size * PROMPT_TOKENS
    tokens = corpus.held_out[:needed]
    if len(tokens) < needed:
        most = len(tokens) // PROMPT_TOKENS
        raise UserError(f"--batch-size {batch_size}: the held-out text has {most} prompts")
    return torch.from_numpy(tokens.astype("int64")).view(batch_size, -1).to(device)


def check_finite(logits: Tensor, args) -> None:
    """Raise UserError if a logit is NaN or infinite, which has no probability."""
    if nan_if_not_finite(logits).isnan().any():
        raise not_finite_error(f"--model {args.model}", f"a token in {args.dtype}")


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile works here. Print what is missing if it does not."""
    if hardware.can_compile(device):
        return True
    print("left out: compiled (torch.compile on a CPU needs g++ and Python.h)")
    return False


def train(net: model.Transformer, corpus: data.Corpus, args, device: torch.device) -> float:
    """Train a model with random weights for some steps. Return the last loss."""
    seq_len = min(TRAIN_TOKENS, net.config.max_position_embeddings)
    sizes = Namespace(seq_len=seq_len, global_batch_size=8, micro_batch_size=8, seed=0)
    samples = data.sequences(corpus, seq_len)
    batches = Batches(*samples, sizes, rank=0, world_size=1)
    lr = shapes.recipe(args.model).lr
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, fused=True)
    steps = report.progress_bar(islice(batches.stream(0), args.steps), "training", total=args.steps)
    for inputs, targets in steps:
        with torch.autocast(device.type, torch.bfloat16):
            loss = net(inputs.to(device), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def check(rows: list[dict], args) -> list[str]:
    """Assert which rows are equal to the bit, and that others differ by rounding errors only."""
    by_name = {row["name"]: row for row in rows}
    assert by_name[SAME_KERNEL]["equals_trainer"], (
        f"{SAME_KERNEL}: not equal to {TRAINER_16}, but the same operators of the same inputs"
    )

    fp32 = by_name[FP32_SERVER]
    assert fp32["largest_error"] <= FP32_TOLERANCE, (
        f"in fp32 a log-probability of the server is off by {fp32['largest_error']:.1e}: "
        "this is no rounding error"
    )
    autocast_error = by_name[AUTOCAST]["error"]
    for row in rows:
        if row["is_16_bit"]:
            assert 0 < row["error"] <= MOST_TIMES * autocast_error, (
                f"{row['name']}: off fp32 by {row['error']:.1e}, and autocast by "
                f"{autocast_error:.1e}: this is no rounding error"
            )

    token_differences = torch.tensor([row["largest_difference_error"] for row in rows])
    sequence_differences = torch.tensor([row["largest_sequence_difference"] for row in rows])
    token = token_differences.expm1().max().item()
    sequence = sequence_differences.expm1().max().item()
    return [
        f"{SAME_KERNEL}: equal to '{TRAINER_16}' to the bit",
        f"in fp32, prefill and decode with a cache give the trainer's log-probabilities within "
        f"{fp32['largest_error']:.0e}",
        f"every row in {args.dtype} differs from fp32, at most {MOST_TIMES} times as much as "
        "autocast",
        f"against the decode steps that sampled, a token is up to {token:.1%} more or less likely, "
        f"and a sequence of {args.new_tokens} tokens up to {sequence:.1%}",
    ]
