"""Run Muon under FSDP: an optimizer that needs full matrices, on ranks that hold shards.

AdamW computes each element of an update by itself, so each rank updates its rows alone. Muon
(Jordan et al. 2024) replaces the update of a matrix by the nearest orthogonal matrix, which moves
the weights equally far in every direction. That takes matmuls of the full matrix. Each rank

    1. updates its rows of the momentum, and computes its rows of the update
    2. all-gathers the full update
    3. orthogonalizes the full update, as every other rank does
    4. applies its rows of the result to its rows of the weights

Vectors, the embedding and the head keep AdamW.

    laptop    python 06_fsdp_zero/muon.py
              torchrun --standalone --nproc_per_node=3 06_fsdp_zero/muon.py --steps 5
    one node  torchrun --standalone --nproc_per_node=8 06_fsdp_zero/muon.py
    cluster   the same on each node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

Muon holds one moment per element, and AdamW two. It costs an all-gather per matrix and step, and
matmuls that every rank repeats. In larger jobs each rank orthogonalizes some of the matrices, and
sends them to the others.

What to look at: the losses of the sharded run are those of one process. The optimizer state of a
rank, and the time of an optimizer step, beside AdamW's.

On GPUs the default is --model wide: 57 million parameters. Expected on 8 H100s: 27 MiB of optimizer
state per rank with Muon, 54 MiB with AdamW. By the data sheet's 67 TFLOP/s for fp32, the matmuls of
a Muon step take at least 34 ms; by its 450 GB/s for NVLink, the all-gathers take at least 0.4 ms.

Previous: train_fsdp.py. Next: 07_memory_tricks/.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _muon as helper
import torch
import torch.distributed as dist
from _sharding import shard_groups
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from common import lesson, runtime
from lm import shapes, stdlib_text
from lm.weights import build

GPU_DEFAULTS = {"model": "wide", "seq_len": 256}  # nano is too small to keep a GPU busy
BATCH_SIZE = 24  # sequences of all ranks together
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5 in an iteration of Newton-Schulz


# --- the optimizer


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum, for matrices that are full or sharded by fully_shard.

    torch.optim.Muon has the same update. It takes sharded matrices, too, but each matmul of its
    iteration then sends messages. This class sends one message per matrix.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update each matrix that has a gradient. Every rank must call this.

        torch's get_state_dict calls `step(closure=None)` to create the state of a new optimizer.
        Return the loss of `closure`, if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:  # it is None if frozen or not used, on every rank
                    self.update_matrix(
                        matrix, group["lr"], group["momentum"], group["weight_decay"]
                    )
        return loss

    def update_matrix(
        self, matrix: nn.Parameter, lr: float, beta: float, weight_decay: float
    ) -> None:
        """Update a matrix, [rows, columns]. This rank holds some of its rows, or all."""
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)  # the same rows
        momentum = state["momentum"]
        momentum.lerp_(matrix.grad, 1 - beta)  # beta * momentum + (1 - beta) * gradient
        update = matrix.grad.lerp(momentum, beta)  # Nesterov momentum: one step ahead

        # The only message: each rank sends its rows to all others.
        full_update = runtime.full_tensor(update)  # [rows, columns] on every rank
        direction = orthogonalize(full_update) * rms_of_adamw(full_update)

        if isinstance(matrix, DTensor):
            # Every rank has computed the same direction and keeps its rows, so nothing is sent.
            direction = distribute_tensor(
                direction, matrix.device_mesh, matrix.placements, src_data_rank=None
            )
        matrix.mul_(1 - lr * weight_decay)
        matrix.sub_(lr * direction)


def orthogonalize(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Return the matrix with its singular values moved to between 0.7 and 1.2.

    This is close enough to an orthogonal matrix for an update. It is a Newton-Schulz iteration: an
    odd polynomial of a matrix has the same singular vectors, and that polynomial of the singular
    values. So it takes only matmuls. COEFFICIENTS raise small values fast (Jordan et al. 2024).

    Large jobs compute it in bf16. Here it is fp32, so that sharding changes only the last digits.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix  # [short side, long side]
    # Singular values of at most 1. With larger ones the iteration diverges.
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T  # [short side, short side]
        x = a * x + (b * gram + c * gram @ gram) @ x  # a x + b x^3 + c x^5
    return x.T if is_tall else x


def rms_of_adamw(matrix: Tensor) -> float:
    """Return the factor that gives an orthogonal matrix the root mean square of AdamW's updates.

    So the learning rate of AdamW fits Muon, too (Liu et al. 2025, section 2.2).
    """
    return 0.2 * max(matrix.shape) ** 0.5


# --- the comparison: one process, sharded Muon, sharded AdamW


def make_optimizers(name: str, net: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks and AdamW for the rest, or AdamW for all."""
    matrices = []
    rest = []
    for path, parameter in net.named_parameters():
        in_block = path.startswith("model.layers.")
        if name == "muon" and in_block and parameter.ndim == 2:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    optimizers = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)]
    if matrices:
        optimizers.append(Muon(matrices, lr))
    return optimizers


def run(
    name: str, weights: str, net: nn.Module, lr: float, batches: list[tuple[Tensor, Tensor]]
) -> dict:
    """Train for one step per batch, and return a row. Every rank must call this."""
    optimizers = make_optimizers(name, net, lr)
    meter = helper.StepMeter()
    losses = []
    for inputs, targets in batches:
        loss = net(inputs, targets)
        loss.backward()
        with meter.step(inputs.device):
            for optimizer in optimizers:
                optimizer.step()
        net.zero_grad()
        losses.append(loss.item())

    row = {"optimizer": name, "weights": weights}
    row |= helper.losses_of_global_batch(losses)
    row |= helper.state_bytes(optimizers)
    row |= meter.results()
    return row


def main() -> int:
    args = lesson.parse_flags(
        __doc__, gpu=GPU_DEFAULTS, relaunches=True, model="nano", seq_len=32, steps=10
    )
    # Check flags before relaunch. After it, every rank would print the error.
    config = shapes.load_config(args.model, 256, args.seq_len)
    lr = shapes.recipe(args.model).lr
    lesson.relaunch(args.device)  # plain python becomes torchrun: a rank per GPU, 2 on a CPU
    # This sets environment variables that NCCL reads in init_process_group.
    runtime.seed_all(0, deterministic=True)
    device = runtime.init_process_group(args.device)
    rank = dist.get_rank()
    world_size = dist.get_world_size()

    # Equal shares for all ranks: round the batch up to a multiple of the number of ranks.
    batch_size = -(-BATCH_SIZE // world_size) * world_size
    all_inputs, all_targets = stdlib_text.one_batch(args.steps * batch_size, args.seq_len, device)
    global_batches = list(
        zip(all_inputs.split(batch_size), all_targets.split(batch_size), strict=True)
    )
    my_batches = []
    for inputs, targets in global_batches:
        my_batches.append((inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]))

    rows = []
    for name, weights in (("muon", "full"), ("muon", "sharded"), ("adamw", "sharded")):
        net = build(args.model, config, seed=0, device=device)
        batches = global_batches  # the reference: every rank trains as if it were alone
        if weights == "sharded":
            # By rows over all ranks, a block at a time.
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            shard_groups(net, {"mesh": mesh})
            batches = my_batches
        rows.append(run(name, weights, net, lr, batches))
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, 7 * config.num_hidden_layers, world_size),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=args.steps * batch_size * args.seq_len,
        first_loss=rows[1]["first_loss"],
        last_loss=rows[1]["last_loss"],
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
