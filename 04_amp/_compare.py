"""Measure and check what compare.py trains: hardware support, activations, rows, claims."""

import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode

from common import hardware

# The first compute capability of NVIDIA's GPUs with units for a dtype.
FIRST_CAPABILITY = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0)}
# A CPU multiplies a dtype in hardware if /proc/cpuinfo names one of these instruction sets.
CPU_INSTRUCTIONS = {"bf16": hardware.CPU_BF16, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
# Of fp32's first loss.
FIRST_LOSS_TOLERANCE = {"tf32": 1e-3, "bf16": 2e-3, "fp16": 1e-3}
LARGEST_ACTIVATION_SHARE = 0.8  # of fp32's bytes, for bf16 and fp16
SPEEDS = {
    "name": "dtype",
    "tokens_per_second": "speed",
    "speed_ratio": "against fp32",
    "activation_bytes": "activations",
}
LOSSES = {
    "name": "dtype",
    "last_loss": "last loss",
    "largest_loss_difference": "largest loss difference",
    "skipped_steps": "steps skipped",
}


# --- hardware


@cache
def is_native(dtype: str, device: torch.device) -> bool:
    """Return whether the device multiplies this dtype in hardware. Others are emulated."""
    if dtype == "fp32":
        return True
    if device.type == "cuda" and torch.version.hip:
        # ROCm reports a compute capability, too, but not one of CUDA's.
        return dtype in ("bf16", "fp16")
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY[dtype]
    if device.type == "mps":
        return dtype == "fp16"
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    instructions = set(cpuinfo.read_text(encoding="utf-8").split())
    return not instructions.isdisjoint(CPU_INSTRUCTIONS.get(dtype, set()))


class EmulatedFp16(TorchDispatchMode):
    """Multiply fp16 matrices as tensor cores do: sum in fp32, and round once at the end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].dtype is torch.float16:
            return torch.mm(args[0].float(), args[1].float()).half()
        return func(*args, **(kwargs or {}))


# --- activations


def bytes_for_backward(run, batch: tuple[Tensor, Tensor]) -> int:
    """Return the bytes that autograd keeps between forward and backward, without the weights."""
    weight_addresses = set()
    for parameter in run.net.parameters():
        weight_addresses.add(parameter.untyped_storage().data_ptr())
    bytes_at_address = {}  # a tensor that is saved twice counts once

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_addresses and not is_copy_of_weight(tensor):
            bytes_at_address[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unchanged(tensor: Tensor) -> Tensor:
        return tensor

    with saved_tensors_hooks(note, unchanged):
        run.forward_backward(batch)
    run.optimizer.zero_grad()
    return sum(bytes_at_address.values())


def is_copy_of_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight, transposed or cast to another dtype."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node.name().endswith("AccumulateGrad")


# --- rows and checks


def row_of(run, baseline, activation_bytes: int, timing: dict, tokens_per_round: int) -> dict:
    """Return the results of a run after its last step.

    `baseline` is the run in fp32. `timing` is that of a round, from measure.seconds_in_turns.
    """
    native = is_native(run.dtype, run.device)
    losses = torch.stack(run.losses)
    differences = (losses - torch.stack(baseline.losses)).abs()

    kept_bytes = 0
    for parameter in run.net.parameters():
        kept_bytes += parameter.nbytes
        for value in run.optimizer.state[parameter].values():
            kept_bytes += value.nbytes

    # The optimizer counts the steps that were not skipped. Reading its count waits for the GPU.
    first_parameter = next(run.net.parameters())
    optimizer_steps = int(run.optimizer.state[first_parameter]["step"])

    row = {
        "name": run.dtype if native else f"{run.dtype} (emulated)",
        "dtype": run.dtype,
        "native": native,
        "n": timing["n"],
        "kept_bytes": kept_bytes,
        "activation_bytes": activation_bytes,
        "losses": losses.tolist(),
        "last_loss": losses[-1].item(),
        "largest_loss_difference": differences.max().item(),
        "skipped_steps": len(losses) - optimizer_steps,
    }
    if native:
        row["tokens_per_second"] = tokens_per_round / timing["seconds"]
        row["min_tokens_per_second"] = tokens_per_round / timing["max_seconds"]
        row["max_tokens_per_second"] = tokens_per_round / timing["min_seconds"]
        row["speed_ratio"] = 1 / timing["time_ratio"]
        row["min_speed_ratio"] = 1 / timing["max_time_ratio"]
        row["max_speed_ratio"] = 1 / timing["min_time_ratio"]
    return row


def check(rows: list[dict], rounded: list[dict]) -> list[str]:
    """Assert what the lesson says of losses and bytes. Return a line for each thing checked."""
    baseline = rows[0]
    checked = []
    for row in rows[1:]:
        dtype = row["dtype"]
        first_loss = baseline["losses"][0]
        difference = abs(row["losses"][0] - first_loss)
        assert difference <= FIRST_LOSS_TOLERANCE[dtype] * first_loss, (
            f"{dtype}: first loss off by {difference:.0e}"
        )
        share = row["activation_bytes"] / baseline["activation_bytes"]
        if dtype != "tf32":  # in memory tf32 is fp32
            assert share < LARGEST_ACTIVATION_SHARE, f"{dtype}: {share:.0%} of fp32's activations"
        checked.append(
            f"{dtype}: first loss within {difference:.0e} of fp32's, {share:.0%} of its "
            "activations in bytes"
        )

    kept_bytes = {row["kept_bytes"] for row in rows}
    assert len(kept_bytes) == 1, f"weights and AdamW's state by dtype: {kept_bytes} bytes"
    checked.append(
        f"weights and AdamW's state: {baseline['kept_bytes'] / 2**20:.1f} MiB in every dtype, all "
        "in fp32"
    )
    for shares in rounded:
        checked.append(
            f"gradients x 2^{math.log2(shares['factor']):.0f}, rounded to fp16: "
            f"{shares['zero_share']:.2%} become zero, {shares['fewer_bits_share']:.2%} lose bits, "
            f"{shares['infinite_share']:.2%} overflow"
        )
    return checked


def check_overflow(
    naive: nn.Module, cured: nn.Module, scaler: GradScaler, scale: float, skipped_steps: int
) -> str:
    """Assert that the naive step ruined the weights, and that the scaler's did not."""
    ruined = count_not_finite(naive)
    ruined_with_scaler = count_not_finite(cured)
    fitting_scale = scaler.get_scale()
    text = (
        f"scale 2^{math.log2(scale):.0f}: a step makes {ruined:,} weights NaN; "
        f"a scaler skips {skipped_steps} steps, and continues at {fitting_scale:,.0f}"
    )
    assert ruined > 0, text
    assert ruined_with_scaler == 0, f"{text} with {ruined_with_scaler} weights NaN"
    assert fitting_scale == scale / 2**skipped_steps < scale, text
    return text


def count_not_finite(net: nn.Module) -> int:
    """Return how many weights are infinite or NaN."""
    finite = parameters_to_vector(net.parameters()).isfinite()
    return int((~finite).sum())


def check_vanishing(naive_share: float, cured_share: float, divisor: int) -> str:
    """Assert that far more gradients become zero without a scaler."""
    text = (
        f"gradients of a loss / {divisor:,}: {naive_share:.1%} become zero in fp16, "
        f"with a scaler {cured_share:.2%}"
    )
    assert naive_share > 0.01, text
    assert naive_share > 10 * cured_share, text
    return text


def check_clipping(naive_norm: float, cured_norm: float, limit: float, scale: float) -> str:
    """Assert that clipping before unscale_ leaves gradients `scale` times too small."""
    text = (
        f"clipping to {limit:.2f}: before unscale_ it leaves a norm of {naive_norm:.1e}, "
        f"after it {cured_norm:.2f}"
    )
    assert abs(naive_norm * scale / limit - 1) < 0.01, text
    assert abs(cured_norm / limit - 1) < 0.01, text
    return text
