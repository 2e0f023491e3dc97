"""The figures of data sheets in devices.csv, and whether a device multiplies bf16. A name that is not in the table, as
torch.cuda.get_device_name prints it, gives None, and MFU prints n/a: a share of a guessed peak is no measurement."""

import csv
from functools import cache
from pathlib import Path

# the others: TFLOP/s
UNITS = {"bandwidth": 1e9, "memory": 1e9, "tdp": 1.0, "fp32_clock": 1e6, "matrix_clock": 1e6}
CPU_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # instruction sets; the last is ARM's


@cache
def devices() -> dict[str, dict[str, float | None]]:
    """Figures of devices.csv by device name: dense FLOP/s by dtype, bandwidth in bytes/s, memory in bytes, tdp in W,
    clocks in Hz. 0 is a dtype without units for it, None a figure without a source."""
    found = {}
    with Path(__file__).with_name("devices.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            names, _source = row.pop("names"), row.pop("source")
            figures = {
                key: float(text) * UNITS.get(key, 1e12) if text else None
                for key, text in row.items()
            }
            found |= dict.fromkeys(names.split(";"), figures)
    return found


def peak_flops(name: str, dtype: str) -> float | None:
    """FLOP/s of device `name` in `dtype` (fp32, tf32, bf16, fp16, fp8, int8) by its data sheet; None if not known."""
    return devices().get(name, {}).get(dtype) or None


def device_name(device) -> str:
    """A GPU's name as its driver gives it; else the device type."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def choose_dtype(name: str, device) -> str:
    """What --dtype `name` means on this device: "auto" is bf16 where that is multiplied in hardware, else fp32."""
    if name != "auto":
        return name
    import torch

    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        cpuinfo = Path("/proc/cpuinfo")
        native = (
            device.type == "cpu"
            and cpuinfo.is_file()
            and not CPU_BF16.isdisjoint(cpuinfo.read_text().split())
        )
    return "bf16" if native else "fp32"


def cudnn_version() -> str | None:
    """Return the version of cuDNN that is loaded at run time, such as "9.19.0"; None without cuDNN.

    It may be another one than torch was built with, for example from LD_LIBRARY_PATH.
    """
    import torch

    if not torch.backends.cudnn.is_available():
        return None
    # torch.backends.cudnn.version() raises where the loaded cuDNN is older than the one built with
    return ".".join(str(number) for number in torch._C._cudnn.getRuntimeVersion())


def attention_kernel(dtype: str = "bf16", head_dim: int = 128) -> str | None:
    """Return the kernel that scaled_dot_product_attention runs on this GPU in a causal training step.

    The name is one of torch.nn.attention.SDPBackend: CUDNN_ATTENTION, FLASH_ATTENTION,
    EFFICIENT_ATTENTION or MATH. None without a GPU. Nothing is computed: torch is asked for its choice
    for 2,048 tokens and heads of `head_dim`.
    """
    import torch
    from torch.nn.attention import SDPBackend

    if not torch.cuda.is_available():
        return None
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    q = torch.empty(1, 8, 2048, head_dim, device="cuda", dtype=torch_dtype, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
