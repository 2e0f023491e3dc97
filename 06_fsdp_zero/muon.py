"""Muon under FSDP: an optimizer that needs whole matrices, for a model whose ranks hold rows.

AdamW looks at one element at a time, so each rank updates its rows alone. Muon (Jordan et al. 2024) replaces the update
of a matrix by the orthogonal matrix nearest to it: every direction moves the weights equally far. That takes matmuls
of the whole matrix. Here the momentum stays sharded, and a matrix's update is gathered, orthogonalised on every rank
and cut again. Vectors, embeddings and the head keep AdamW.

    laptop    python 06_fsdp_zero/muon.py
              torchrun --nproc_per_node=3 06_fsdp_zero/muon.py --steps 5
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/muon.py --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

What it costs: one all-gather per matrix and step more than AdamW, and the matmuls, which every rank repeats. What it
saves: one moment per element instead of two. Larger jobs let each rank orthogonalise some of the matrices for all.

Look for: losses of the sharded run equal to those of one process; optimizer state of a rank beside AdamW's; the last
loss of both. Before: train_fsdp.py. Next: 07_memory_tricks/.
"""

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, measure, report, runtime
from lm import data, shapes
from lm.weights import build

TOLERANCE = 1e-5  # between the losses of the sharded run and those of one process


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. For matrices alone, whole or sharded by fully_shard."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    # a rank's rows, like those of the weights
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                # Nesterov's: one step ahead
                update = matrix.grad.lerp(state["momentum"], group["momentum"])
                whole = runtime.full_tensor(
                    update
                )  # the only message: each rank sends its rows to all
                direction = orthogonalize(whole) * rms_of_adamw(whole)
                # every rank has all of it and cuts out its rows: nothing is sent
                if isinstance(matrix, DTensor):
                    direction = distribute_tensor(
                        direction, matrix.device_mesh, matrix.placements, src_data_rank=None
                    )
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.sub_(group["lr"] * direction)


def orthogonalize(matrix: Tensor, iterations: int = 5) -> Tensor:
    """The matrix with its singular values moved to about 1, between 0.7 and 1.2: enough for an update.

    Newton-Schulz: an odd polynomial of the matrix is that polynomial of its singular values, so matmuls suffice. The
    coefficients lift small values fast (Jordan et al. 2024). Large jobs compute it in bf16. In fp32, as here, the
    order of the sums shows in the last digits only.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    # the square matrices below are then the small ones
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    x = wide / (wide.norm() + 1e-7)  # singular values of 1 at most, or the iteration runs away
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if matrix.size(0) <= matrix.size(1) else x.T


def rms_of_adamw(matrix: Tensor) -> float:
    """Makes the mean square of an update what AdamW's usually is, so that AdamW's learning rate fits both (Liu et al.
    2025, section 2.2)."""
    return 0.2 * max(matrix.shape) ** 0.5


def make_optimizers(name: str, net: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for all else; or AdamW for all."""
    matrices, rest = [], []
    for path, parameter in net.named_parameters():
        in_block = path.startswith("model.layers.") and parameter.ndim == 2
        (matrices if name == "muon" and in_block else rest).append(parameter)
    adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return [Muon(matrices, lr), adamw] if matrices else [adamw]


def shard(net: nn.Module, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in net.model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def run(
    name: str, weights: str, net: nn.Module, lr: float, batches: list[tuple[Tensor, Tensor]]
) -> dict:
    """Train for a step per batch. Every rank must call it."""
    optimizers = make_optimizers(name, net, lr)
    losses = []
    for inputs, targets in batches:
        loss = net(inputs, targets)
        loss.backward()
        with measure.Traffic() as sent:  # the last step's is reported
            for optimizer in optimizers:
                optimizer.step()
        net.zero_grad()
        losses.append(loss.item())
    losses = [
        statistics.fmean(of_ranks) for of_ranks in zip(*runtime.all_gather(losses), strict=True)
    ]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    moments = [tensor for state in states for tensor in state.values() if tensor.ndim]
    own_bytes = sum(
        (moment.to_local() if isinstance(moment, DTensor) else moment).nbytes for moment in moments
    )
    bytes_per_rank = runtime.all_gather(own_bytes)
    return {
        "optimizer": name,
        "weights": weights,
        "optimizer_bytes_per_rank": bytes_per_rank,
        "most_optimizer_bytes": max(bytes_per_rank),
        "all_gathers_per_optimizer_step": sum(sent.calls.values()),
        "optimizer_sent_bytes": round(sum(sent.bytes_sent.values())),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses": losses,
    }


def check(rows: list[dict], matrices: int, world_size: int) -> list[str]:
    one_process, sharded, adamw = rows
    gathered = matrices if world_size > 1 else 0  # one rank has all rows
    calls = [row["all_gathers_per_optimizer_step"] for row in rows]
    assert calls == [0, gathered, 0], (
        f"all-gathers in a step of the optimizer: {calls}, for {matrices} matrices"
    )
    difference = max(
        abs(a / b - 1) for a, b in zip(sharded["losses"], one_process["losses"], strict=True)
    )
    assert difference <= TOLERANCE, (
        f"losses differ from those of one process by {difference:.0e}: that is no rounding"
    )
    held, whole = sum(sharded["optimizer_bytes_per_rank"]), one_process["most_optimizer_bytes"]
    assert held == whole, f"the ranks hold {held:,} bytes of Muon's state together, of {whole:,}"
    lower, higher = sharded["most_optimizer_bytes"], adamw["most_optimizer_bytes"]
    assert lower < higher, (
        f"Muon's state of {lower:,} bytes is no smaller than AdamW's of {higher:,}"
    )
    return [
        f"sharded Muon has the losses of one process (largest difference {difference:.1g})",
        f"{gathered} all-gathers for {matrices} matrices, and each byte of the state on one rank alone",
    ]


COLUMNS = {
    "optimizer": "optimizer",
    "weights": "weights",
    "most_optimizer_bytes": "state per rank",
    "all_gathers_per_optimizer_step": "all-gathers in its step",
    "optimizer_sent_bytes": "sent per rank",
    "first_loss": "first loss",
    "last_loss": "last loss",
}


def main() -> int:
    args = report.lesson_flags(__doc__, model="nano", seq_len=32, steps=10)
    # raises a UserError before any rank starts
    config = shapes.load_config(args.model, 256, args.seq_len)
    lr = shapes.recipe(args.model).lr
    runtime.relaunch(args.device)
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sequences = -(-24 // world_size) * world_size  # 24, or the next number that the ranks divide
    # the same on every rank
    inputs, targets = data.one_batch(args.steps * sequences, args.seq_len, device)
    batches = [*zip(inputs.split(sequences), targets.split(sequences), strict=True)]
    own_batches = [tuple(tensor.chunk(world_size)[rank] for tensor in batch) for batch in batches]

    rows = []
    for name, weights in (("muon", "whole"), ("muon", "sharded"), ("adamw", "sharded")):
        net = build(args.model, config, seed=0, device=device)
        if weights == "sharded":
            shard(net, device)
        rows.append(run(name, weights, net, lr, own_batches if weights == "sharded" else batches))
    report.end_lesson(
        rows,
        columns=COLUMNS,
        checked=check(rows, 7 * config.num_hidden_layers, world_size),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=args.steps * sequences * args.seq_len,
        first_loss=rows[1]["first_loss"],
        last_loss=rows[1]["last_loss"],
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
