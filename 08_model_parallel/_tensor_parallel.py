"""Compare the variants of tensor_parallel.py: gradients, traffic, and the time of a step."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common import lesson, measure, runtime
from common.exits import UserError
from lm import shapes

WITH_24_HEADS = "-24-heads"  # at the end of --model: nano or wide with another number of heads
BY_HAND = "by hand"
BY_HAND_IN_SEQUENCE = "by hand, sequence parallel"
BY_TORCH = "by torch, sequence parallel"
LEARNING_RATE = 0.05
MAX_NORM = 1.0  # of the gradient
TIMED_ROUNDS = 3
TOLERANCE = 1e-5  # relative: what another order of the same sums may change in 10 steps of fp32
COLUMNS = {
    "name": "variant",
    "most_parameters": "weights per rank",
    "collectives": "collectives per step",
    "sent_bytes": "sent per step",
    "kept_bytes_per_rank": "kept for backward",
    "gradient_error": "gradient error",
    "seconds": "step",
}

BF16_COLUMNS = {
    "vocabulary": "vocabulary",
    "bf16_loss": "loss from bf16 logits",
    "fp32_loss": "from the same in fp32",
    "exact_loss": "in fp64",
}


def load_config(args) -> shapes.Config:
    """Return the shape of --model. Raise UserError if the ranks cannot share the model.

    Channels and vocabulary may be sharded into unequal shards.
    """
    name = args.model.removesuffix(WITH_24_HEADS)
    config = shapes.load_config(name, 256, args.seq_len)
    if name != args.model:
        head_dim = max(16, config.hidden_size // 24)
        config = dataclasses.replace(
            config, num_attention_heads=24, num_key_value_heads=24, head_dim=head_dim
        )

    ranks = lesson.world_size_after_relaunch(args.device)
    heads = config.num_key_value_heads  # a rank has a key-value head and all its query heads
    if heads % ranks != 0:
        raise UserError(
            f"--model {args.model}: {ranks} ranks do not divide its {heads} key-value heads: "
            f"start a divisor of {heads}"
        )
    if config.qkv_bias or config.qk_norm:
        raise UserError(
            f"--model {args.model} has biases or norms of heads, which are not sharded here: "
            "use train_3d.py --tp"
        )
    if args.seq_len % ranks != 0:
        raise UserError(f"--seq-len {args.seq_len}: use a multiple of the number of ranks, {ranks}")
    if args.global_batch_size % args.micro_batch_size != 0:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of "
            f"--micro-batch-size {args.micro_batch_size}: change one of them"
        )
    return config


class Variant:
    """A model, how it is trained, and what was measured."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        clip: Callable[[float], Tensor],
        context: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Make a variant.

        Args:
            name: Its name in the table.
            model: The model, sharded or not.
            loss: A function that returns the mean loss of inputs and targets.
            clip: A function that clips the gradients by a norm, and returns their norm.
            context: A context for forward and backward.
        """
        self.name = name
        self.model = model
        self.loss = loss
        self.clip = clip
        self.context = context
        # A step of SGD is proportional to the gradient. AdamW divides by the gradient's size, which
        # would hide a gradient that is N times too large.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.losses: list[float] = []  # by step, as the next two
        self.gradient_norms: list[float] = []
        self.gradient_errors: list[float] = []
        self.traffic = measure.Traffic()  # of all steps, until the end of backward
        self.traffic_after = measure.Traffic()  # of all steps, after backward

    def forward_backward(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the gradients of a step; return its mean loss."""
        losses = []
        for inputs, targets in micro_batches:
            with self.context():
                loss = self.loss(inputs, targets)
                (loss / len(micro_batches)).backward()
            losses.append(runtime.full_tensor(loss.detach()))
        return torch.stack(losses).mean()

    def train(self, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
        """Train for one step."""
        self.forward_backward(micro_batches)
        self.clip(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


# --- the measurement


def run(variants: list[Variant], micro_batches: list[tuple[Tensor, Tensor]], args) -> list[dict]:
    """Train each variant for all steps, and return a row for each. Every rank must call this."""
    one_process, _, in_sequence, by_torch = variants
    per_step = args.global_batch_size // args.micro_batch_size
    differences = []  # between by hand and by torch
    batches = []  # of each step
    for first in range(0, len(micro_batches), per_step):
        batches.append(micro_batches[first : first + per_step])
    for batch in batches:
        for variant in variants:
            with variant.traffic:
                loss = variant.forward_backward(batch)
            with variant.traffic_after:
                norm = variant.clip(MAX_NORM)
            variant.losses.append(loss.item())
            variant.gradient_norms.append(norm.item())
        # Compare the gradients before the optimizers use them.
        for variant in variants:
            variant.gradient_errors.append(gradient_error(variant.model, one_process.model))
        differences.append(gradient_error(in_sequence.model, by_torch.model))
        for variant in variants:
            with variant.traffic_after:  # DTensor sums a partial gradient here
                variant.optimizer.step()
            variant.optimizer.zero_grad()

    rows = [row_of(variant, args.steps) for variant in variants]
    rows[-1]["difference_from_by_hand"] = largest(differences)
    inputs, _ = micro_batches[0]
    trained = {variant.name: partial(variant.train, batches[-1]) for variant in variants}
    timings = measure.seconds_in_turns(trained, inputs.device, rounds=TIMED_ROUNDS)
    for row, variant in zip(rows, variants, strict=True):
        row.update(timings[row["name"]])
        row["kept_bytes_per_rank"] = kept_bytes(variant, micro_batches[0])
    return rows


def kept_bytes(variant: Variant, micro_batch: tuple[Tensor, Tensor]) -> int:
    """Return the most bytes that a rank keeps for the backward of a micro-batch.

    Every rank must call this.
    """
    inputs, targets = micro_batch
    with variant.context(), measure.LiveBytes(device=inputs.device) as live:
        before = live.now
        loss = variant.loss(inputs, targets)
        kept = live.now - before
    del loss  # it holds the graph until here
    return max(runtime.all_gather(kept))


def gradient_error(model: nn.Module, expected_model: nn.Module) -> float:
    """Return the largest relative error of a gradient, over all weights and ranks.

    Weights that are sharded by hand are compared with this rank's shard of the expected gradient.
    """
    gradients = []
    expected_gradients = []
    for weight, expected in zip(model.parameters(), expected_model.parameters(), strict=True):
        expected_gradient = runtime.full_tensor(expected.grad)
        if hasattr(weight, "shard_dim"):
            shards = expected_gradient.tensor_split(dist.get_world_size(), weight.shard_dim)
            expected_gradient = shards[dist.get_rank()]
        gradients.append(runtime.full_tensor(weight.grad))
        expected_gradients.append(expected_gradient)
    error = measure.relative_error(gradients, expected_gradients)
    return largest(runtime.all_gather(error))


def largest(values: list[float]) -> float:
    """Return the largest value, or NaN if one is NaN. Python's max would ignore some NaN."""
    return torch.tensor(values).max().item()


def row_of(variant: Variant, steps: int) -> dict:
    """Return the row of a variant after its last step. Every rank must call this."""
    parameters = 0  # on this rank
    for weight in variant.model.parameters():
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        parameters += weight.numel()
    parameters_per_rank = runtime.all_gather(parameters)

    calls = {kind: count / steps for kind, count in variant.traffic.calls.items()}
    collectives = [f"{count:g} {kind.replace('_', '-')}" for kind, count in calls.items()]
    return {
        "name": variant.name,
        "losses": variant.losses,
        "gradient_norms": variant.gradient_norms,
        "gradient_errors": variant.gradient_errors,
        "gradient_error": largest(variant.gradient_errors),
        "parameters_per_rank": parameters_per_rank,
        "most_parameters": max(parameters_per_rank),
        # of a step
        "calls": calls,
        "collectives": ", ".join(collectives),
        "sent_bytes": sent_bytes(variant.traffic, steps),
        "calls_after_backward": variant.traffic_after.calls.total() / steps,
        "sent_bytes_after_backward": sent_bytes(variant.traffic_after, steps),
    }


def sent_bytes(traffic: measure.Traffic, steps: int) -> int:
    """Return the bytes that this rank sends per step."""
    return round(sum(traffic.bytes_sent.values()) / steps)


# --- what bf16 loses


def losses_in_bf16(
    loss_of_shards: Callable, my_shard: Callable, device: torch.device
) -> list[dict]:
    """Print losses of bf16 logits, computed in bf16, fp32 and fp64. Return the rows.

    Every rank must call this: the logits are sharded by vocabulary.
    """
    rows = []
    for vocab_size in (256, 128_256):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(1, 32, vocab_size, generator=generator).to(device).bfloat16()
        targets = torch.randint(vocab_size, (1, 32), generator=generator).to(device)
        my_logits = my_shard(logits, 2)  # [batch, tokens, vocab / N]
        exact_loss = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
        row = {
            "vocabulary": vocab_size,
            "bf16_loss": loss_of_shards(my_logits, targets, vocab_size).item(),
            "fp32_loss": loss_of_shards(my_logits.float(), targets, vocab_size).item(),
            "exact_loss": exact_loss.item(),
        }
        rows.append(row)
    if runtime.is_rank0():
        print("\nthe loss of the same bf16 logits\n")
        lesson.print_rows(rows, BF16_COLUMNS)
    return rows


# --- the checks


def check_pair(
    parallel_pair: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device
) -> str:
    """Assert that a pair of matrices on all ranks equals one process; return what was checked."""
    x = torch.randn(4, 16, device=device, requires_grad=True)  # the same on all ranks
    first = torch.randn(50, 16, device=device, requires_grad=True)
    second = torch.randn(8, 50, device=device, requires_grad=True)
    expected = F.linear(F.relu(F.linear(x, first)), second)
    expected.square().sum().backward()
    expected_gradients = [x.grad, first.grad, second.grad]

    x, first, second = (tensor.detach().requires_grad_() for tensor in (x, first, second))
    with measure.Traffic() as sent:
        result = parallel_pair(x, first, second)
        result.square().sum().backward()
    # The gradients of the matrices are 0 outside a rank's shards.
    dist.all_reduce(first.grad)
    dist.all_reduce(second.grad)

    error = measure.relative_error(
        [result, x.grad, first.grad, second.grad], [expected, *expected_gradients]
    )
    assert error <= TOLERANCE, f"a pair of matrices differs from one process by {error:.0e}"
    assert sent.calls == {"all_reduces": 2}, f"a pair of matrices calls {dict(sent.calls)}"
    return (
        f"a pair of matrices has the output and gradients of one process ({error:.0e}), with one "
        "all-reduce in forward and one in backward"
    )


def check(rows: list[dict], config: shapes.Config, args) -> list[str]:
    """Assert that all variants are equal, and send what the formulas say.

    Return a line for each thing that was checked.
    """
    one_process, *others = rows
    ranks = len(one_process["parameters_per_rank"])
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size  # on every rank
    total = shapes.parameter_count(config) + (ranks - 1) * norms
    expected_traffic = traffic_by_formula(config, ranks, args)
    errors = []
    for row in others:
        name = row["name"]
        for key, expected in expected_traffic[name].items():
            assert row[key] == expected, f"{name}: {key} per step: {row[key]}, not {expected}"
        held = sum(row["parameters_per_rank"])
        assert held == total, f"{name}: {held:,} weights on all ranks, not {total:,}"
        errors += compare(row, one_process, row["gradient_error"])
    checked = [
        "the ranks together hold each matrix once; calls and bytes of a step are the formula's",
        f"each variant has losses, gradient norms and gradients of one process in {args.steps} "
        f"steps ({largest(errors):.0e})",
    ]

    _, in_sequence, by_torch = others
    differences = compare(by_torch, in_sequence, by_torch["difference_from_by_hand"])
    checked.append(
        "by torch has losses, gradient norms and gradients of by hand, sequence parallel "
        f"({largest(differences):.0e})"
    )
    return checked


def compare(row: dict, expected: dict, gradient_error: float) -> list[float]:
    """Assert that two variants trained alike; return the relative errors."""
    errors = {"gradients": gradient_error}
    for key in ("losses", "gradient_norms"):
        found = list(torch.tensor(row[key]))
        errors[key] = measure.relative_error(found, list(torch.tensor(expected[key])))
    for key, error in errors.items():
        # This also fails for NaN.
        assert error <= TOLERANCE, f"{row['name']}: {key} differ from {expected['name']}: {error}"
    return list(errors.values())


def traffic_by_formula(config: shapes.Config, ranks: int, args) -> dict[str, dict]:
    """Return what each variant must call and send in a step, by the keys of its row."""
    micro_batches = args.global_batch_size // args.micro_batch_size
    tokens = args.micro_batch_size * args.seq_len
    # Two pairs per layer, and embedding with head as one more. Each has two collectives: one in
    # forward and one in backward.
    pairs = 2 * config.num_hidden_layers + 1
    calls = micro_batches * 2 * pairs
    # In a ring all-reduce a rank sends each fp32 number 2 (N - 1) / N times.
    bytes_per_number = Fraction(4 * 2 * (ranks - 1), ranks)
    numbers = calls * tokens * config.hidden_size
    numbers += micro_batches * 3 * tokens  # of the loss
    sent = round(bytes_per_number * numbers)
    norm_weights = pairs * config.hidden_size

    of_loss = 2 * micro_batches  # two all-reduces per micro-batch
    in_sequence = {"all_reduces": of_loss, "reduce_scatters": calls, "all_gathers": calls}
    of_torch = {"all_reduces": 3 * micro_batches}
    if ranks > 1:  # on one rank DTensor leaves out the others
        of_torch |= {"reduce_scatters": calls, "all_gathers": calls}
    return {
        BY_HAND: {
            "calls": {"all_reduces": calls + of_loss},
            "sent_bytes": sent,
            "calls_after_backward": 1,  # the gradient norm, one number
            "sent_bytes_after_backward": round(bytes_per_number),
        },
        BY_HAND_IN_SEQUENCE: {
            "calls": in_sequence,
            "sent_bytes": sent,
            "calls_after_backward": 2,  # the gradients of norms, and the gradient norm
            "sent_bytes_after_backward": round(bytes_per_number * (norm_weights + 1)),
        },
        # What torch calls after backward differs from release to release.
        BY_TORCH: {"calls": of_torch, "sent_bytes": sent},
    }
