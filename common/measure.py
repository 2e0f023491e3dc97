"""Measure for lessons: bytes that are alive, bytes sent between ranks, seconds, and errors."""

import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import report, runtime

# --- memory


class LiveBytes:
    """Count the bytes of the tensors that are alive: `now`, and `peak` since this object was made.

    On CUDA these are the figures of torch's caching allocator, and no operator is intercepted.
    Elsewhere they are the bytes of the tensors in `held` and of those that operators make inside
    the with block.
    """

    def __init__(self, held: Iterable[Tensor] = (), device: torch.device | None = None) -> None:
        if device is not None and device.type == "cuda":
            self._counter = AllocatorBytes(device)
        else:
            self._counter = OperatorBytes(held)

    def __enter__(self) -> "LiveBytes":
        self._counter.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._counter.__exit__(*error)

    @property
    def now(self) -> int:
        return self._counter.now

    @property
    def peak(self) -> int:
        return self._counter.peak


class AllocatorBytes:
    """Read `now` and `peak` from CUDA's caching allocator, for all tensors of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        report.remember_peak(device)
        self.restart()

    def __enter__(self) -> "AllocatorBytes":
        return self

    def __exit__(self, *error) -> None:
        pass

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def restart(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats(self.device)


class OperatorBytes(TorchDispatchMode):
    """Count the memory of the tensors in `held` and of the results of operators in the with block.

    It does not see the inside of a compiled graph, or of an operator that calls others in C++.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._peak = 0
        # Storages by address. A storage that is freed disappears from this dictionary.
        self._alive = weakref.WeakValueDictionary()
        for tensor in held:
            self._note(tensor)

    @property
    def now(self) -> int:
        # The sum is new each time, because FSDP and ZeRO-3 resize storages that stay alive.
        return sum(storage.nbytes() for storage in self._alive.values())

    @property
    def peak(self) -> int:
        return max(self._peak, self.now)

    def restart(self) -> None:
        """Begin a new peak."""
        self._peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if _has_dtensor(types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        # A view shares the memory of its base, which has been counted already. One base has not:
        # the copy in which gloo reduces. NCCL makes no such copy, so it stays uncounted.
        if not operator.is_view:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                    self._note(tensor)
        self._peak = max(self._peak, self.now)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = storage


def _has_dtensor(types: Iterable[type]) -> bool:
    """Return whether an operator has a DTensor among its arguments.

    A dispatch mode then returns NotImplemented: DTensor runs the operator again on its local shard,
    a plain tensor, and the mode sees that.
    """
    return any(hasattr(tensor_type, "full_tensor") for tensor_type in types)


# --- seconds


def seconds_in_turns(
    steps: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, dict]:
    """Time several steps, and return the median and the range of each by its name.

    Each round runs every step once, so that a disturbance of the machine hits all of them. One more
    round before them warms up. The keys are n, seconds, min_seconds, max_seconds, and time_ratio,
    min_time_ratio, max_time_ratio: the seconds of the step over those of the first step in the same
    round.
    """
    seconds = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            runtime.synchronize(device)
            start = time.perf_counter()
            step()
            runtime.synchronize(device)
            if round_number > 0:  # round 0 is the warm-up
                seconds[name].append(time.perf_counter() - start)

    first_name = next(iter(steps))
    timings = {}
    for name, own_seconds in seconds.items():
        pairs = zip(own_seconds, seconds[first_name], strict=True)
        ratios = [own / first for own, first in pairs]
        timings[name] = {
            "n": rounds,
            "seconds": statistics.median(own_seconds),
            "min_seconds": min(own_seconds),
            "max_seconds": max(own_seconds),
            "time_ratio": statistics.median(ratios),
            "min_time_ratio": min(ratios),
            "max_time_ratio": max(ratios),
        }
    return timings


def copy_bytes_per_second(device: torch.device, buffer_bytes: int = 2**28) -> float:
    """Return the rate at which this device copies within its own memory, in bytes per second.

    Both the bytes read and the bytes written count. The rate is the best of five rounds. A round is
    20 copies of `buffer_bytes`, so that the launches take little of its time. No kernel that
    streams through memory can be expected to be faster.
    """
    source = torch.ones(buffer_bytes // 4, device=device)  # fp32: 4 bytes per element
    target = torch.empty_like(source)

    def copy_20_times() -> None:
        for _ in range(20):
            target.copy_(source)

    timing = seconds_in_turns({"copy": copy_20_times}, device, rounds=5)["copy"]
    return 20 * 2 * source.nbytes / timing["min_seconds"]


# --- errors


def relative_error(found: Tensor | list[Tensor], expected: Tensor | list[Tensor]) -> float:
    """Return the largest |found - expected| / |expected| over pairs of tensors, as norms.

    0 means that all are equal to the bit. The denominator is at least 1/1000 of the norm of all
    expected tensors together: a gradient near 0 consists only of rounding errors.
    """
    if isinstance(found, Tensor):
        found = [found]
    if isinstance(expected, Tensor):
        expected = [expected]
    least_norm = torch.nn.utils.get_total_norm(expected) / 1000
    errors = []
    for found_tensor, expected_tensor in zip(found, expected, strict=True):
        difference = (found_tensor - expected_tensor).norm()
        norm = expected_tensor.norm().maximum(least_norm)
        errors.append((difference / norm).float())
    return torch.stack(errors).max().item()  # NaN if one of them is NaN


# --- traffic between ranks

# The collectives that Traffic counts, by a part of the operator's name without underscores.
# Receiving, waiting and a barrier send nothing.
KINDS = {
    "reducescatter": "reduce_scatters",
    "allreduce": "all_reduces",
    "allgather": "all_gathers",
    "alltoall": "all_to_alls",
    "broadcast": "broadcasts",
    "::send": "sends",
}


class Traffic(TorchDispatchMode):
    """Count the collectives that this rank calls and the bytes that it sends in the with block.

    The bytes are those of a ring of n ranks. For a tensor of S bytes a rank sends S (n-1)/n in an
    all-gather, a reduce-scatter or a broadcast, and twice that in an all-reduce. In an all-to-all
    it sends all but its own part. NCCL may choose a tree or the NVLink switch instead. gather,
    scatter and reduce, which have one root, are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()  # by the values of KINDS
        self.bytes_sent: Counter[str] = Counter()  # as Fractions, whose sums are exact

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if _has_dtensor(types):
            return NotImplemented
        kind = _kind_of(operator)
        if kind is not None:
            self.calls[kind] += 1
            self.bytes_sent[kind] += bytes_on_the_wire(kind, args)
        return operator(*args, **(kwargs or {}))


def _kind_of(operator) -> str | None:
    """Return which collective an operator is, or None if it is none that Traffic counts."""
    # c10d has the calls of torch.distributed, _c10d_functional those of DTensor
    if operator.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = operator.name().replace("_", "")
    for part, kind in KINDS.items():
        if part in name:
            return kind
    return None


def bytes_on_the_wire(kind: str, args: tuple) -> Fraction:
    """Return the bytes that this rank sends, from the arguments of a collective's operator.

    The tensor arguments are the outputs, if there are any, and then the inputs. The process group,
    split sizes and flags follow.
    """
    group = _group_of(args)
    n = group.size()
    inputs = _input_bytes(args)
    size = sum(inputs)
    if kind == "all_to_alls":
        parts = _all_to_all_parts(args, inputs, n)
        own_part = Fraction(size * parts[group.rank()], sum(parts) or 1)
        return size - own_part
    if kind == "all_gathers":
        # The input is one shard. In n-1 rounds a rank sends its own shard and passes on the others
        # but one.
        return Fraction(size * (n - 1))
    if kind == "all_reduces":
        return Fraction(2 * size * (n - 1), n)
    if kind == "sends":
        return Fraction(size)
    return Fraction(size * (n - 1), n)  # a reduce-scatter or a broadcast


def _input_bytes(args: tuple) -> list[int]:
    """Return the bytes of each input tensor: those in the last argument that holds tensors."""
    inputs = []
    for arg in args:
        tensors = [leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)]
        if tensors:
            inputs = tensors
    return [tensor.nbytes for tensor in inputs]


def _all_to_all_parts(args: tuple, inputs: list[int], n: int) -> list[int]:
    """Return the sizes of the parts that an all-to-all sends to rank 0, 1, ..., in any unit."""
    parts = []
    for arg in args:  # the split sizes of the output come first, then those of the input
        if isinstance(arg, list | tuple) and arg and isinstance(arg[0], int):
            parts = list(arg)
    if parts:
        return parts
    if len(inputs) > 1:  # one tensor per rank
        return inputs
    return [1] * n  # one tensor in equal parts


def _group_of(args: tuple) -> dist.ProcessGroup:
    """Return the process group among an operator's arguments."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):  # the operators of torch.distributed
            return dist.ProcessGroup.unbox(arg)
    # The functional collectives of DTensor have the name of the group as their last string.
    name = [arg for arg in args if isinstance(arg, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)
