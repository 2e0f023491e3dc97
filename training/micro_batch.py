"""Choose --micro-batch-size by measurement: the largest one that fits on every GPU.

Run forward and backward with 1, 2, 4, ... sequences and read the peak of the memory, until the next
size would not fit. All runs together take as long as about four micro-batches of the chosen size.

This works for any model that is trained by forward, backward and an optimizer step. The model runs
in eager mode, where a size takes no compilation. A compiled model needs less memory.
"""

import random
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from common import exits, hardware, report, runtime
from common.exits import UserError

GIB = 2**30
MEMORY_SHARE = 0.9  # of the free memory. The rest is for fragmentation
# Flags that training scripts and 07_memory_tricks/estimate.py call the same.
ESTIMATED_FLAGS = (
    "model",
    "seq_len",
    "global_batch_size",
    "dtype",
    "checkpointing",
    "tp",
    "pp",
    "cp",
    "ep",
    "schedule",
    "replicate",
)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def choose(
    args,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches,
    device: torch.device,
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    my_tokens: Tensor | None = None,
    estimate_flags: str = "",
) -> int:
    """Return --micro-batch-size or, if it was not given, the largest size that fits on every GPU.

    A resumed run keeps its size if it divides this rank's share of the batch. Without CUDA, the
    size is the share. Every rank must call this, after the optimizer is created and before it has
    state.

    Args:
        args: The flags of the script.
        model: What the training loop calls. It may be compiled, and wrapped by DDP or FSDP.
        batches: The batches of this rank, with its samples and its share of a step.
        autocast: The context of forward in the training loop.
        my_tokens: The positions of this rank's tokens in each sequence, if it has not all of them.
        estimate_flags: Flags of 07_memory_tricks/estimate.py that describe the script.
    """
    size = given_size(args, batches)
    if size is None and not measures_on(device):
        size = batches.samples_per_rank
    if size is None and getattr(args, "ep", 1) > 1:
        # A rank's memory follows the router, which changes as it learns: a measurement at the first
        # step says nothing of a later one.
        return fixed(args, batches, device, most=1, estimate_flags=estimate_flags)
    if size is None:
        run = partial(forward_backward, model, batches, device, autocast, my_tokens)
        explain = partial(explain_out_of_memory, args, device, estimate_flags, measuring=True)
        size = largest_that_fits(run, model, optimizer, batches, device, explain)
    explain_out_of_memory(args, device, estimate_flags, size)
    return size


def fixed(
    args,
    batches,
    device: torch.device,
    *,
    most: int | None,
    fewest_micro_batches: int = 1,
    estimate_flags: str = "",
) -> int:
    """Return --micro-batch-size or, if it was not given, a size that is not measured.

    It is the largest power of two up to `most` that divides this rank's share of the batch, or the
    share if `most` is None. A resumed run keeps its size if there are enough micro-batches.
    """
    size = given_size(args, batches, fewest_micro_batches)
    if size is None and most is None:
        size = batches.samples_per_rank
    elif size is None:
        assert most is not None
        size = 1
        while 2 * size <= most and batches.samples_per_rank % (2 * size) == 0:
            size *= 2
        runtime.print0(f"micro-batch {size}: not measured; set it with --micro-batch-size")
    explain_out_of_memory(args, device, estimate_flags, size)
    return size


def given_size(args, batches, fewest_micro_batches: int = 1) -> int | None:
    """Return --micro-batch-size, else the size of the run that is resumed, else None.

    A resumed run keeps its size if it divides this rank's share into enough micro-batches. Rank 0
    has read the size: the folder of the run may be missing on another node.
    """
    if args.micro_batch_size is not None:
        return args.micro_batch_size
    earlier = runtime.on_rank0(lambda: args.earlier_micro_batch_size)
    if earlier is None or batches.samples_per_rank % earlier != 0:
        return None
    is_enough = batches.samples_per_rank // earlier >= fewest_micro_batches
    return earlier if is_enough else None


def measures_on(device: torch.device) -> bool:
    """Return whether the size is measured on this device. A CPU has no limit of its own."""
    return device.type == "cuda"


# --- the measurement


def largest_that_fits(
    run: Callable[[int], None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches,
    device: torch.device,
    explain: Callable[[int], None],
) -> int:
    """Return the largest power of two that divides this rank's share and fits on every GPU.

    If not even the smallest size fits, return that.

    Weights, buffers, optimizer and random generators are afterwards as they were.

    Args:
        run: run(n) computes forward and backward of two micro-batches of n sequences, as a step of
            the training loop does. The second finds the gradients of the first.
        explain: explain(n) sets the message for the case that n sequences need too much memory.
    """
    share = batches.samples_per_rank
    size = smallest_size(model, share)
    if share % (2 * size) != 0:
        return size  # there is no other
    report.remember_peak(device)
    with without_trace(model, optimizer, device):
        explain(size)
        run(size)  # allocates gradients, and libraries allocate their workspaces
        step_without_effect(optimizer)  # allocates the optimizer's state
        run(size)  # DDP makes new buckets after the first backward
        smaller = 0  # the peak of 0 sequences: weights, gradients and optimizer state
        smaller_peak = held_bytes(device)
        optimizer.zero_grad()
        limit = min(runtime.all_gather(usable_bytes(device)))
        peak = peak_bytes(run, optimizer, size, device)
        while share % (2 * size) == 0:
            # The peak grows nearly on a straight line. Do not run a size that would not fit.
            bytes_per_sequence = (peak - smaller_peak) / (size - smaller)
            next_peak = peak + size * bytes_per_sequence
            if max(runtime.all_gather(next_peak)) > MEMORY_SHARE * limit:
                break
            smaller = size
            smaller_peak = peak
            size *= 2
            explain(size)
            peak = peak_bytes(run, optimizer, size, device)
        if smaller > 0 and max(runtime.all_gather(peak)) > MEMORY_SHARE * limit:
            size = smaller  # memory grew faster than linearly
            peak = smaller_peak
    forget_peak(device)  # the peak that the script reports is that of the training
    needed = max(runtime.all_gather(peak))
    runtime.print0(
        f"micro-batch {size}: measured {needed / GIB:.1f} of {limit / GIB:.1f} GiB in eager mode"
    )
    return size


def smallest_size(model: nn.Module, share: int) -> int:
    """Return the size to begin with: 1, or 2 if batch norm may need two samples."""
    has_batch_norm = any(isinstance(module, BATCH_NORMS) for module in model.modules())
    return 2 if has_batch_norm and share % 2 == 0 else 1


@contextmanager
def without_trace(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[None]:
    """Run the block in eager mode. Then restore what it changed.

    The weights must not change in the block. The optimizer must have no state before it.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]  # BatchNorm's, for example
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    optimizer.state.clear()
    optimizer.zero_grad()


def forward_backward(
    model: nn.Module,
    batches,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    my_tokens: Tensor | None,
    sequences: int,
) -> None:
    """Compute forward and backward of two micro-batches, as a step of the training loop does."""
    loader = DataLoader(batches.train, batch_sampler=[list(range(sequences))])
    for is_last in (False, True):
        inputs, targets = next(iter(loader))
        inputs = inputs.to(device)
        targets = targets.to(device)
        if my_tokens is not None:
            inputs = inputs[:, my_tokens]
            targets = targets[:, my_tokens]
        sync = nullcontext()
        if hasattr(model, "no_sync") and not is_last:  # DDP
            sync = model.no_sync()
        if hasattr(model, "set_requires_all_reduce"):  # FSDP
            model.set_requires_all_reduce(is_last)
        with sync:
            with autocast():
                loss = model(inputs, targets)
            loss.backward()


def step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state, and leave the weights as they are."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # weight decay is multiplied by it, too
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()  # 0 times NaN would be NaN
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# --- the memory of a GPU


def peak_bytes(
    run: Callable[[int], None],
    optimizer: torch.optim.Optimizer,
    sequences: int,
    device: torch.device,
) -> int:
    """Return the most bytes that were in use at once while `run` computed."""
    torch.cuda.reset_peak_memory_stats(device)
    run(sequences)
    optimizer.zero_grad()
    return torch.cuda.memory_stats(device)["active_bytes.all.peak"]


def held_bytes(device: torch.device) -> int:
    """Return the bytes of the tensors that are alive."""
    return torch.cuda.memory_allocated(device)


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that are free on the GPU, or that this process has reserved."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device)


def forget_peak(device: torch.device) -> None:
    """Free the blocks that no tensor uses, and begin a new peak.

    Blocks of small sizes would otherwise stay beside those of large sizes.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


# --- out of memory


def explain_out_of_memory(
    args, device: torch.device, estimate_flags: str, size: int, *, measuring: bool = False
) -> None:
    """Set what the message about too little memory says from now on."""
    if device.type != "cuda":
        return
    problem = f"micro-batches of {size} do not fit"
    if measuring:
        problem += " in eager mode, in which they are measured"
    fixes = []
    if size > 1:
        smaller = size // 2 if size % 2 == 0 else 1
        fixes.append(f"--micro-batch-size {smaller}")
    elif measuring and args.compile:
        fixes.append("--micro-batch-size 1, which is not measured")
    if not args.compile:
        fixes.append("--compile")
    if args.checkpointing != "full":
        fixes.append("--checkpointing full")
    is_sharded = "--zero 3" in estimate_flags
    fixes.append("more GPUs" if is_sharded else "more GPUs with 06_fsdp_zero/train_fsdp.py")
    command = estimate_command(args, device, estimate_flags)
    advice = f"{problem}: use {' or '.join(fixes)}; `{command}` prints the largest size"

    def add_advice(_kind, error: BaseException | None, _trace) -> None:
        if exits.is_out_of_memory(error):
            raise UserError(f"out of memory: {advice}") from None

    exits.at_exit.push(add_advice)


def estimate_command(args, device: torch.device, flags: str) -> str:
    """Return the command that computes the memory of this run, for a model of lm/."""
    _, world_size, _ = runtime.ranks()
    command = ["python", "07_memory_tricks/estimate.py", "--gpus", str(world_size), *flags.split()]
    device_name = hardware.device_name(device)
    if device_name in hardware.devices():
        command += ["--device", device_name]
    command.append("--compile" if args.compile else "--no-compile")
    if args.loss != "plain":  # without the flag, the estimate knows what --compile does with it
        command += ["--loss", args.loss]
    for name in ESTIMATED_FLAGS:
        if hasattr(args, name):
            command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    return shlex.join(command)
