"""What lora.py measures of a run, and how it is told: memory by kind, losses, answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from old import report
from old.step_cost import Memory, held_tensors, record_memory, saved_for_backward, wait_for


@dataclass
class Run:
    """One method: its model, what trains it, and what was measured."""

    method: str
    net: nn.Module
    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    lr: float
    gradient_bytes: int = 0
    activation_bytes: int = 0
    weight_copy_bytes: int = 0
    memory: Memory | None = None
    losses: list[Tensor] = field(default_factory=list)  # left on the device: reading one would wait for it
    seconds: list[float] = field(default_factory=list)
    val_loss_before: float | None = None
    val_loss_after: float | None = None


def weight_bytes(net: nn.Module) -> int:
    """Parameters, and the codes, scales and zeros of int4 layers; tied weights once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in net.state_dict().values()}
    return sum(sizes.values())


def optimizer_tensors(run: Run) -> list[Tensor]:
    return [tensor for state in run.optimizer.state.values() for tensor in state.values()]


def note_saved_bytes(run: Run, batch: tuple[Tensor, Tensor], autocast) -> None:
    """What autograd keeps from forward to backward."""
    with saved_for_backward(run.net) as saved, autocast():
        run.net(*batch)
    run.activation_bytes = sum(saved.activations.values())
    run.weight_copy_bytes = sum(saved.weight_copies.values())


def note_memory(run: Run, step: Callable[[], None], device: torch.device) -> None:
    """Memory over a step, the optimizer's state included. On CUDA what the other runs hold is taken off again."""
    held = list(held_tensors(run.net, [run.optimizer]))
    others_bytes = 0
    if device.type == "cuda":
        others_bytes = torch.cuda.memory_allocated(device) - sum(tensor.nbytes for tensor in held)
    memory = record_memory(step, device, held)
    run.memory = Memory([size - others_bytes for size in memory.timeline], memory.peak_bytes - others_bytes)


def timed(step: Callable[[], None], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - start


def summarize(run: Run) -> dict:
    """A run as --json has it."""
    return {
        "method": run.method,
        "lr": run.lr,
        "trained_parameters": sum(p.numel() for p in run.trained),
        "weight_bytes": weight_bytes(run.net),
        "gradient_bytes": run.gradient_bytes,
        "optimizer_bytes": sum(tensor.nbytes for tensor in optimizer_tensors(run)),
        "activation_bytes": run.activation_bytes,
        "weight_copy_bytes": run.weight_copy_bytes,
        "peak_memory_bytes": run.memory.peak_bytes,
        "step_seconds": report.spread(run.seconds[1:]),  # the first warms up
        "losses": torch.stack(run.losses).tolist(),
        "val_loss_before": run.val_loss_before,
        "val_loss_after": run.val_loss_after,
        "val_loss_merged": None,
        "answer": None,
    }


def print_runs(rows: list[dict], *, question: str | None, answer_before: str | None) -> None:
    head = ["method", "trained", "weights", "gradients", "optimizer", "activations", "peak", "step"]
    body = [memory_cells(row) for row in rows]
    print("\n" + report.table([head, *body]) + "\n")
    head = ["method", "learning rate", "held-out loss before", "after", "after, merged"]
    body = [loss_cells(row) for row in rows]
    print(report.table([head, *body]) + "\n")
    if question is not None:
        print(f"question, held out: {question}\n  before: {answer_before}")
        for row in rows:
            print(f"  after {row['method']}: {row['answer']}")


def memory_cells(row: dict) -> list[str]:
    kinds = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "peak_memory_bytes")
    seconds = row["step_seconds"]["median"]
    return [
        row["method"],
        f"{row['trained_parameters']:,}",
        *(report.for_people(kind, row[kind]) for kind in kinds),
        "n/a" if seconds is None else f"{seconds * 1e3:,.0f} ms",
    ]


def loss_cells(row: dict) -> list[str]:
    losses = (row["val_loss_before"], row["val_loss_after"], row["val_loss_merged"])
    return [row["method"], f"{row['lr']:g}", *("n/a" if loss is None else f"{loss:.4f}" for loss in losses)]
