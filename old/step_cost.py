"""What a training step costs: the memory that is alive while it runs, and the seconds it takes."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from old import report


class LiveMemory(TorchDispatchMode):
    """Sees every operator that runs inside it, on real tensors and on fake ones, and knows the memory of their results
    for as long as it lives. What an operator frees before it returns is not seen."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = weakref.WeakValueDictionary()  # memory by address: what is freed disappears
        for tensor in held:
            self._note(tensor)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor then does the same with its part, which is a plain tensor
        result = operator(*args, **(kwargs or {}))
        # A view makes no memory. What first shows in one is a copy in which gloo reduces, unlike NCCL: not counted.
        for tensor in () if operator.is_view else tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._note(tensor)
        self.after(operator, args)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.alive[storage._cdata] = storage

    def bytes_now(self) -> int:
        """Added up anew each time: FSDP and ZeRO-3 free and fill the memory of tensors that stay alive."""
        return sum(storage.nbytes() for storage in self.alive.values())

    def after(self, operator, operands: tuple) -> None:
        """Called after each operator."""


def held_tensors(net: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """What a model and its optimizers hold between two steps, one by one: a list of them would keep alive the states
    that an update replaces."""
    yield from net.parameters()
    yield from net.buffers()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class Memory(NamedTuple):
    """Bytes: after each operator of a step, and at the most."""

    timeline: list[int]
    peak_bytes: int


class _Timeline(LiveMemory):
    def __init__(self, device: torch.device, held: Iterable[Tensor]) -> None:
        super().__init__(held if device.type != "cuda" else ())
        self.device, self.timeline = device, []

    def bytes_now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else super().bytes_now()

    def after(self, operator, operands: tuple) -> None:
        self.timeline.append(self.bytes_now())


def record_memory(step: Callable[[], object], device: torch.device, held: Iterable[Tensor] = ()) -> Memory:
    """Run a step and note the memory that tensors take, after each of its operators.

    On CUDA that is what torch's allocator has given out. Elsewhere it is the tensors that the step makes, and those
    that are `held` before it. Operators inside a compiled graph are not seen: there only a GPU's peak is right.
    """
    recorder = _Timeline(device, held)
    if device.type == "cuda":
        report.reset_peak_memory(device)
    with recorder:
        step()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else max(recorder.timeline)
    return Memory(recorder.timeline, peak)


@dataclass
class Saved:
    """Bytes by the address of a storage, so that one that is saved twice counts once."""

    activations: dict[int, int] = field(default_factory=dict)
    weight_copies: dict[int, int] = field(default_factory=dict)


@contextmanager
def saved_for_backward(net: nn.Module) -> Iterator[Saved]:
    """Notes what autograd saves for backward inside the block."""
    saved = Saved()

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kind = saved.weight_copies if is_of_a_weight(t) else saved.activations
        kind[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        yield saved
    for weight in net.parameters():  # the weight itself is no copy, and no activation if it is frozen
        for kind in (saved.weight_copies, saved.activations):
            kind.pop(weight.untyped_storage().data_ptr(), None)


def is_of_a_weight(t: Tensor) -> bool:
    """Whether t is a parameter, or one that was only transposed or cast."""
    node = t.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return isinstance(t, nn.Parameter) or (node is not None and node.name().endswith("AccumulateGrad"))


def time_in_turns(steps: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, by name. Steps take turns, so that what disturbs one disturbs all; before the
    first round each has run once."""
    seconds = {name: [] for name in steps}
    for counted in (False, *(True,) * rounds):
        for name, step in steps.items():
            wait_for(device)
            start = time.perf_counter()
            step()
            wait_for(device)
            if counted:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was asked to."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def plot_memory(memories: dict[str, Memory], file: Path) -> str | None:
    """Draw memory over a step, a line for each; returns the file's name, None without matplotlib."""
    if (plt := report.pyplot()) is None:
        return None
    figure, axes = plt.subplots(figsize=(7, 4))
    draw_memory(memories, axes)
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return str(file)


def draw_memory(memories: dict[str, Memory], axes) -> None:
    """As plot_memory, into a figure that shows more."""
    for name, memory in memories.items():
        share_of_step = [i / len(memory.timeline) for i in range(len(memory.timeline))]
        axes.plot(share_of_step, [size / 2**20 for size in memory.timeline], label=name)
    axes.set(xlabel="operators of a step, from the first (0) to the last (1)", ylabel="MiB", ylim=(0, None))
    axes.legend()
