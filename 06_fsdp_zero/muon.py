"""Muon under FSDP: an optimizer that needs whole matrices, for a model whose ranks hold rows.

AdamW looks at one element at a time, so each rank updates its rows alone. Muon (Jordan et al. 2024) replaces the update
of a matrix by the orthogonal matrix nearest to it: every direction moves the weights equally far. That takes products
of the whole matrix. Here the momentum stays sharded, and a matrix's update is gathered, orthogonalised on every rank
and cut again. Vectors, embeddings and the head keep AdamW.

    laptop    python 06_fsdp_zero/muon.py
              torchrun --nproc_per_node=3 06_fsdp_zero/muon.py --steps 5
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/muon.py --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

What it costs: one all-gather per matrix and step more than AdamW, and the products, which every rank repeats. What it
saves: one moment per element instead of two. Larger jobs let each rank orthogonalise some of the matrices for all.

Look for: losses of the sharded run equal to those of one process; optimizer state of a rank beside AdamW's; the last
loss of both. Before: train_fsdp.py. Next: 07_memory_tricks/.
"""

import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _muon_report import conclude, describe

from old import cli, data, exits, model, runtime, shapes


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. For matrices alone, whole or sharded by fully_shard."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)  # a rank's rows, like those of the weights
                state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(state["momentum"], group["momentum"])  # Nesterov's: one step ahead
                whole = runtime.whole(update)  # the only message: each rank sends its rows to all
                direction = orthogonalize(whole) * rms_of_adamw(whole)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.sub_(group["lr"] * runtime.shard_like(direction, matrix))


def orthogonalize(matrix: Tensor, iterations: int = 5) -> Tensor:
    """The matrix with its singular values moved to about 1, between 0.7 and 1.2: enough for an update.

    Newton-Schulz: an odd polynomial of the matrix is that polynomial of its singular values, so products suffice. The
    coefficients lift small values fast (Jordan et al. 2024). Large jobs compute it in bf16. In fp32, as here, the
    order of the sums shows in the last digits only.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T  # the square products below are then the small ones
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


def shard(net: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    for block in net.model.layers.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(net: nn.Module, optimizers: list[torch.optim.Optimizer], batches: list[list[Tensor]]) -> list[float]:
    """A step per batch; returns the losses."""
    losses = []
    for inputs, targets in batches:
        loss = net(inputs, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> int:
    began = time.perf_counter()
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", default="nano", help="as in train_fsdp.py")
    parser.add_argument("--seq-len", type=cli.positive_int, default=32, help="tokens per sequence")
    parser.add_argument("--steps", type=cli.positive_int, default=10, help="of each of the three runs")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    config = shapes.load_config(args.model, 256, args.seq_len)  # raises a UserError before any rank starts
    lr = shapes.recipe(args.model).lr
    runtime.relaunch(args.device)
    runtime.seed(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)  # or some containers would multiply in tf32
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sequences = -(-24 // world_size) * world_size
    stream = data.train_batches(
        data.load_corpus().train,
        seq_len=args.seq_len,
        global_batch_size=sequences,
        micro_batch_size=sequences,
        seed=0,
        device=device,
        rank=0,
        world_size=1,
    )
    batches = [[tensor.to(device) for tensor in next(stream)] for _ in range(args.steps)]  # whole, on every rank
    my_batches = [[tensor.chunk(world_size)[rank] for tensor in batch] for batch in batches]

    rows = []
    for name, sharded in (("muon", False), ("muon", True), ("adamw", True)):
        net = model.build(args.model, config, seed=0, device=device)
        if sharded:
            shard(net, runtime.sharding_mesh(device, replicas=1))
        optimizers = make_optimizers(name, net, lr)
        losses = train(net, optimizers, my_batches if sharded else batches)
        rows.append(describe(name, sharded, net, optimizers, losses, my_batches[0]))
    conclude(rows, args, config, sequences, device, began)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
