"""What tensor_parallel.py stands on: collectives on activations, torch's own plan, and the comparison of the ways."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
from _stages import cut_matrices
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from common import measure, runtime
from common.exits import UserError
from common.torch_versions import functional_all_gather, functional_reduce_scatter
from lm import shapes

LEARNING_RATE, LARGEST_NORM = 0.05, 1.0  # of gradients
TOLERANCE = 1e-5  # relative; what another order of the same sums in fp32 may change in 10 steps
COLUMNS = {
    "way": "way",
    "most_parameters": "weights per rank",
    "collectives": "collectives a step",
    "sent_bytes": "sent a step",
    "calls_after_backward": "calls after backward",
    "gradient_error": "gradient error",
}


def all_reduce(x: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", dist.group.WORLD))


def all_gather(x: Tensor) -> Tensor:  # [batch, length / N, hidden] to [batch, length, hidden]
    return functional.wait_tensor(functional_all_gather(x.contiguous(), 1, dist.group.WORLD))


# [batch, length, hidden] to [batch, length / N, hidden]: sums over the ranks
def reduce_scatter(x: Tensor) -> Tensor:
    scattered = functional_reduce_scatter(x.contiguous(), "sum", 1, dist.group.WORLD)
    return functional.wait_tensor(scattered)


def my_part(tensor: Tensor, dimension: int) -> Tensor:
    """The first parts have one row more where the ranks do not divide the rows."""
    return tensor.tensor_split(dist.get_world_size(), dimension)[dist.get_rank()]


def my_rows(tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """In this rank's part of the vocabulary, the row of each token; and whether it is there. If not, row 0."""
    rows = my_part(torch.arange(vocab_size), 0)
    mine = (tokens >= rows[0]) & (tokens <= rows[-1])
    return (tokens - rows[0]).where(mine, 0), mine


def keep_my_part(weight: nn.Parameter, dimension: int) -> None:
    weight.data = my_part(weight.data, dimension).clone()  # in place: tied weights stay tied
    weight.cut_dimension = dimension  # whole weights have no such attribute


@dataclass
class Way:
    """A model, and how a step of it is made."""

    name: str
    net: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]  # inputs, targets: gives their mean loss
    clip: Callable[[float], Tensor]  # largest norm: gives the norm that was found
    context: Callable[[], AbstractContextManager] = nullcontext  # of forward and backward

    def backward(self, inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        """Add to the gradients what this micro-batch has of them, by its share of the step. Gives its loss."""
        with self.context():
            loss = self.loss(inputs, targets)
            (loss * share).backward()
        return runtime.full_tensor(loss.detach())


def parallelize_with_torch(net: nn.Module) -> Way:
    """The same cuts, with sequence parallelism, as a plan: DTensors know how they are cut, and what follows from it."""
    mesh = dist.init_device_mesh(net.lm_head.weight.device.type, (dist.get_world_size(),))
    cut_matrices(net, mesh)
    # torch's loss on cut logits needs its context around forward and backward
    return Way("by torch, sequence parallel", net, net, partial(clip_by_torch, net), loss_parallel)


def clip_by_torch(net: nn.Module, largest_norm: float) -> Tensor:
    # DTensors know what is sharded and what is partial; torch 2.11 scales partial ones wrongly with foreach
    return runtime.full_tensor(
        nn.utils.clip_grad_norm_(net.parameters(), largest_norm, foreach=False)
    )


def check_sizes(args, config: shapes.Config) -> None:
    """UserError for what so many ranks cannot cut. Channels and vocabulary may be cut into unequal parts."""
    ranks = runtime.world_size_after_relaunch(args.device)
    # with each of them goes its group of query heads
    if (heads := config.num_key_value_heads) % ranks:
        raise UserError(
            f"--model {args.model}: {ranks} ranks do not divide its {heads} key-value heads: start fewer"
        )
    if config.qkv_bias or config.qk_norm:
        raise UserError(
            f"--model {args.model}: biases and norms of heads are not cut here: train_3d.py --tp cuts them"
        )
    if args.seq_len % ranks:
        raise UserError(f"--seq-len {args.seq_len}: use a multiple of the number of ranks, {ranks}")
    if (size := args.global_batch_size) % args.micro_batch_size:
        raise UserError(
            f"--global-batch-size {size} is no multiple of --micro-batch-size {args.micro_batch_size}"
        )


def run(ways: list[Way], micro_batches: list[tuple[Tensor, Tensor]], args) -> list[dict]:
    """A row per way, with a step of each in turn: gradients are compared before they are used. Every rank must call it.
    With SGD: AdamW divides a gradient by its size, which hides a wrong scale and enlarges rounding."""
    in_a_step = args.global_batch_size // args.micro_batch_size
    rows = [
        {"way": way.name, "losses": [], "gradient_norms": [], "gradient_errors": []} for way in ways
    ]
    optimizers = [torch.optim.SGD(way.net.parameters(), lr=LEARNING_RATE) for way in ways]
    # of all steps: until backward ends, and after it
    traffics = [(measure.Traffic(), measure.Traffic()) for _ in ways]
    for first in range(0, len(micro_batches), in_a_step):
        step = micro_batches[first : first + in_a_step]
        for way, row, (until, after) in zip(ways, rows, traffics, strict=True):
            with until:
                losses = [way.backward(inputs, targets, 1 / in_a_step) for inputs, targets in step]
            with after:
                norm = way.clip(LARGEST_NORM)
            row["losses"].append(torch.stack(losses).mean().item())
            row["gradient_norms"].append(norm.item())
        for way, row in zip(ways, rows, strict=True):
            errors = runtime.all_gather(gradient_error(way.net, ways[0].net))
            row["gradient_errors"].append(torch.tensor(errors).max().item())  # NaN if one is
        for optimizer, (_, after) in zip(optimizers, traffics, strict=True):
            with after:  # torch adds up a DTensor's partial gradient here
                optimizer.step()
            optimizer.zero_grad()
    for way, row, (until, after) in zip(ways, rows, traffics, strict=True):
        local = [
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in way.net.parameters()
        ]
        row["parameters_per_rank"] = runtime.all_gather(sum(tensor.numel() for tensor in local))
        row["most_parameters"] = max(row["parameters_per_rank"])
        row["gradient_error"] = torch.tensor(row["gradient_errors"]).max().item()
        # these four are of a step
        row["calls"] = {kind: calls / args.steps for kind, calls in until.calls.items()}
        row["sent_bytes"] = round(sum(until.bytes_sent.values()) / args.steps)
        row["calls_after_backward"] = after.calls.total() / args.steps
        row["sent_bytes_after_backward"] = round(sum(after.bytes_sent.values()) / args.steps)
        row["collectives"] = ", ".join(
            f"{calls:g} {kind.replace('_', '-')}" for kind, calls in row["calls"].items()
        )
    return rows


def gradient_error(net: nn.Module, baseline: nn.Module) -> float:
    """The largest relative error of a weight's gradient. A rank looks at its part, or at the whole of a DTensor."""
    expected = []
    for weight, whole in zip(net.parameters(), baseline.parameters(), strict=True):
        cut = hasattr(weight, "cut_dimension")
        expected.append(my_part(whole.grad, weight.cut_dimension) if cut else whole.grad)
    return measure.relative_error(
        [runtime.full_tensor(weight.grad) for weight in net.parameters()], expected
    )


def check(rows: list[dict], config: shapes.Config, args) -> list[str]:
    """Of every rank: does each way send what it must, by the shape alone, and is it equal to one process?"""
    one_process, *others = rows
    ranks = len(one_process["parameters_per_rank"])
    micro_batches = args.global_batch_size // args.micro_batch_size
    tokens = args.micro_batch_size * args.seq_len
    # pairs of matrices, and embedding with head: each sends in both directions
    cuts = 2 * config.num_hidden_layers + 1
    norms = cuts * config.hidden_size  # weights that every rank holds
    calls = micro_batches * 2 * cuts
    apart = {"reduce_scatters": calls, "all_gathers": calls}
    # bytes that a rank sends for an element in fp32, all-reduced
    ring = Fraction(2 * 4 * (ranks - 1), ranks)
    # loss: 3 numbers per token
    sent = round(ring * (calls * tokens * config.hidden_size + micro_batches * 3 * tokens))
    must = {
        "by hand": ({"all_reduces": calls + 2 * micro_batches}, sent, 1, round(ring)),
        "by hand, sequence parallel": (
            {"all_reduces": 2 * micro_batches, **apart},
            sent,
            2,
            round(ring * (norms + 1)),
        ),
        # torch's calls after backward differ from release to release; on one rank DTensor knows that it is alone
        "by torch, sequence parallel": (
            {"all_reduces": 3 * micro_batches, **(apart if ranks > 1 else {})},
            sent,
        ),
    }
    largest = 0.0
    for row in others:
        found = (
            row["calls"],
            row["sent_bytes"],
            row["calls_after_backward"],
            row["sent_bytes_after_backward"],
        )
        expected = must[row["way"]]
        assert found[: len(expected)] == expected, (
            f"{row['way']}: traffic of a step is {found}, and must be {expected}"
        )
        held, whole = (
            sum(row["parameters_per_rank"]),
            shapes.parameter_count(config) + (ranks - 1) * norms,
        )
        assert held == whole, f"{row['way']}: {held:,} weights on all ranks, not {whole:,}"
        errors = {"gradients": row["gradient_error"]}
        for what in ("losses", "gradient_norms"):  # as lists of steps
            errors[what] = measure.relative_error(
                [*torch.tensor(row[what])], [*torch.tensor(one_process[what])]
            )
        for what, error in errors.items():  # NaN fails, too
            assert error <= TOLERANCE, (
                f"{row['way']}: {what} differ from one process by {error:.0e}"
            )
        largest = max(largest, *errors.values())
    return [
        "the ranks together hold each cut weight once; calls and bytes of each step are the formula's",
        f"each way has losses, gradient norms and gradients of one process in {args.steps} steps ({largest:.0e})",
    ]
