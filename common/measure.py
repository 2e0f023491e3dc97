"""How lessons measure: live bytes, bytes sent between ranks, seconds, and how far numbers are from others."""

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

# By what the operator's name contains, without underscores. To receive, to wait and a barrier send nothing.
KINDS = {"reducescatter": "reduce_scatters", "allreduce": "all_reduces", "allgather": "all_gathers"}
KINDS |= {"alltoall": "all_to_alls", "broadcast": "broadcasts", "::send": "sends"}


class LiveBytes:
    """Count the bytes of the tensors that are alive: `now`, and `peak` since this object was made.

    On CUDA these are the caching allocator's own figures, so no operator is intercepted. Elsewhere they are the bytes
    of the tensors in `held` and of those that operators make inside the with block.
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
    """Read `now` and `peak` from CUDA's caching allocator, which keeps both for all tensors of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        report.earlier_peaks.append(torch.cuda.max_memory_allocated(device))
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
    """Count the memory of the tensors in `held` and of the results of every operator inside the with block.

    The inside of a compiled graph, and of an operator that calls others in C++, is not seen.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._peak = 0
        self._alive = weakref.WeakValueDictionary()  # memory by address: what is freed disappears
        for tensor in held:
            self._note(tensor)

    @property
    def now(self) -> int:
        # added up anew each time: FSDP and ZeRO-3 free and fill the memory of tensors that stay alive
        return sum(storage.nbytes() for storage in self._alive.values())

    @property
    def peak(self) -> int:
        return max(self._peak, self.now)

    def restart(self) -> None:
        """Begin a new peak."""
        self._peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # a DTensor then does the same with its part, which is a plain tensor
        result = operator(*args, **(kwargs or {}))
        # A view makes no memory. What first shows in one is a copy in which gloo reduces, unlike NCCL: not counted.
        if not operator.is_view:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                    self._note(tensor)
        self._peak = max(self._peak, self.now)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = storage


def seconds_in_turns(
    steps: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, dict]:
    """By name: median, lowest and highest seconds of a step, and of its time against the first's in the same round.
    Steps take turns, so that what disturbs one disturbs all; before the first round each has run once."""
    seconds = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            runtime.wait_for(device)
            start = time.perf_counter()
            step()
            runtime.wait_for(device)
            if round_number > 0:
                seconds[name].append(time.perf_counter() - start)
    first, found = next(iter(seconds.values())), {}
    for name, own in seconds.items():
        found[name] = {"n": rounds}
        for key, values in (
            ("seconds", own),
            ("time_ratio", [a / b for a, b in zip(own, first, strict=True)]),
        ):
            found[name] |= {
                key: statistics.median(values),
                f"min_{key}": min(values),
                f"max_{key}": max(values),
            }
    return found


def copy_bytes_per_second(device: torch.device, buffer_bytes: int = 2**28) -> float:
    """Return the rate at which this device copies within its own memory, in bytes per second.

    Bytes that are read and bytes that are written both count. The rate is the best of five rounds of 20
    copies of `buffer_bytes`, so that the launch of a copy takes little of the time. No kernel that
    streams through memory can be expected to be faster than that.
    """
    source = torch.ones(buffer_bytes // 4, device=device)
    target = torch.empty_like(source)

    def copy_20_times() -> None:
        for _ in range(20):
            target.copy_(source)

    timing = seconds_in_turns({"copy": copy_20_times}, device, rounds=5)["copy"]
    return 20 * 2 * source.nbytes / timing["min_seconds"]


def relative_error(found: Tensor | list[Tensor], expected: Tensor | list[Tensor]) -> float:
    """The largest over the tensors of |found - expected| / |expected|, as norms; 0 is equality to the bit. Lower bound
    for the denominator: a thousandth of the norm of all, since of a gradient near 0 there is only rounding."""
    founds, expecteds = (
        [tensors] if isinstance(tensors, Tensor) else tensors for tensors in (found, expected)
    )
    least = torch.nn.utils.get_total_norm(expecteds) / 1000
    pairs = zip(founds, expecteds, strict=True)
    errors = [((one - other).norm() / other.norm().maximum(least)).float() for one, other in pairs]
    return torch.stack(errors).max().item()  # NaN if one is


class Traffic(TorchDispatchMode):
    """This rank's calls and bytes, by kind, while entered. Of S bytes on n ranks, a rank of a ring sends S (n-1)/n
    in an all-gather, a reduce-scatter or a broadcast, twice that in an all-reduce; in an all-to-all all but its own
    part. NCCL may choose a tree or the switch. gather, scatter and reduce to one rank are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()  # exact fractions, so that they add up

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            # a DTensor then does the same with its part, which is a plain tensor
            return NotImplemented
        # calls of torch.distributed, and those of DTensor
        if operator.namespace in ("c10d", "_c10d_functional"):
            name = operator.name().replace("_", "")
            if kind := next((KINDS[part] for part in KINDS if part in name), None):
                self.calls[kind] += 1
                self.bytes_sent[kind] += bytes_on_the_wire(kind, args)
        return operator(*args, **(kwargs or {}))


def bytes_on_the_wire(kind: str, args: tuple) -> Fraction:
    """Sent by this rank, from an operator's arguments: [outputs,] inputs, then the group, sizes of parts, flags."""
    tensors = [
        [leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)] for arg in args
    ]
    inputs = [tensor.nbytes for tensor in [found for found in tensors if found][-1]]
    group = _group_of(args)
    n, size = group.size(), sum(inputs)
    if kind == "all_to_alls":
        sizes = [
            arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], int)
        ]
        parts = sizes[-1] if sizes else inputs if len(inputs) > 1 else [1] * n
        return size - Fraction(size * parts[group.rank()], sum(parts) or 1)
    # inputs are whole, but those of an all-gather are the rank's part: it sends its own, and all others' but the last
    trips = {"all_gathers": n - 1, "all_reduces": Fraction(2 * (n - 1), n), "sends": 1}
    return Fraction(size * trips.get(kind, Fraction(n - 1, n)))


def _group_of(args: tuple) -> dist.ProcessGroup:
    if boxed := [arg for arg in args if isinstance(arg, torch.ScriptObject)]:
        return dist.ProcessGroup.unbox(boxed[0])
    # a functional collective knows its group by name
    name = [arg for arg in args if isinstance(arg, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)
