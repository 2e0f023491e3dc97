"""What data sheets say about a device (devices.csv), and what a device can do.

A device is looked up by the exact name that torch.cuda.get_device_name prints. A name that is not
in the table gives None, and MFU is then n/a: a share of a guessed peak would not be a measurement.
"""

import csv
import os
import re
import shutil
import sysconfig
from functools import cache
from pathlib import Path

# What a figure in devices.csv is multiplied by. A column that is not listed here has TFLOP/s.
UNITS = {"bandwidth": 1e9, "memory": 1e9, "tdp": 1.0, "fp32_clock": 1e6, "matrix_clock": 1e6}
TERA = 1e12
NO_LIMIT = 2**60  # bytes; control groups of version 1 write a larger number for no limit
# How /proc/cpuinfo names instructions that multiply bf16: two of x86, and the one of ARM.
CPU_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


@cache
def devices() -> dict[str, dict[str, float | None]]:
    """Read devices.csv and return the figures of each device by its name.

    A column with the name of a dtype is the dense peak in FLOP/s. bandwidth is in bytes/s, memory
    in bytes, tdp in W, and clocks are in Hz. 0 means that the device has no units for this dtype,
    None that there is no source for the figure.
    """
    figures_by_name = {}
    with Path(__file__).with_name("devices.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names = row.pop("names").split(";")
            del row["source"]
            figures = {}
            for column, text in row.items():
                figures[column] = float(text) * UNITS.get(column, TERA) if text else None
            for name in names:
                figures_by_name[name] = figures
    return figures_by_name


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of device `name` in `dtype`, or None if it is not known.

    `dtype` is fp32, tf32, bf16, fp16, fp8 or int8.
    """
    return devices().get(name, {}).get(dtype) or None


def device_name(device) -> str:
    """Return the name of a GPU as its driver gives it. For another device return its type."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def choose_dtype(name: str, device) -> str:
    """Return the dtype that `--dtype name` means on this device.

    "auto" is bf16 if the hardware multiplies bf16, else fp32. Any other name is returned as it is.
    """
    if name != "auto":
        return name
    return "bf16" if multiplies_bf16(device) else "fp32"


def multiplies_bf16(device) -> bool:
    """Return whether the hardware of this device multiplies bf16, without emulation."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpuinfo = Path("/proc/cpuinfo")
    if device.type != "cpu" or not cpuinfo.is_file():
        return False
    words = cpuinfo.read_text(encoding="utf-8").split()
    return not CPU_BF16.isdisjoint(words)


def free_bytes(device) -> int:
    """Return the bytes of memory that are free on a GPU, or on this machine for a CPU."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def memory_bytes(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> int | None:
    """Return the memory that the processes of this machine or container can take; None: not known.

    It is RAM and swap. More may be in use by others: this is what an empty machine would have.
    """
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not in Windows
        return None
    limit = container_memory_bytes(proc, groups)
    if limit is not None:
        total = min(total, limit)
    swap = re.search(r"^SwapTotal:\s*(\d+) kB", file_text(Path(proc, "meminfo")), re.MULTILINE)
    return total + (1024 * int(swap[1]) if swap else 0)


def container_memory_bytes(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes of memory that a container or a batch system allows; None: no limit.

    The limit may be set on the control group of this process or on any group above it. Both
    versions of control groups are read. Version 1 writes a number near 2**63 for no limit.
    """
    limits = []
    for folder in control_groups(proc, groups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = file_text(folder / name)
            if text.isdigit() and int(text) < NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def control_groups(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> list[Path]:
    """Return the folders of the control groups of this process, and those of the groups above.

    In a container a path may be that of the host, and its folder missing. The folder at the top is
    then the group of the container.
    """
    folders = []
    lines = file_text(Path(proc, "self/cgroup")).splitlines()
    for line in [*lines, "0::/", "0:memory:/", "0:cpu:/"]:
        _, controllers, group = line.split(":", 2)
        # version 2 has one tree for all controllers, version 1 one for each: memory, cpu,cpuacct
        trees = [".", "unified"]
        if controllers:
            trees = [controllers, *controllers.split(",")]
        for tree in trees:
            folders += Path(f"{groups}/{tree}{group}", "_").parents
    return folders


def file_text(file: Path) -> str:
    """Return the text of a small file without blanks around it, or "" if there is no file."""
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def can_compile(device) -> bool:
    """Return whether torch.compile works on this device. On a CPU it needs g++ and Python.h."""
    if device.type == "cuda":
        return True
    python_h = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which("g++") is not None and python_h.exists()


def cudnn_version() -> str | None:
    """Return the version of cuDNN that is loaded at run time, such as "9.19.0"; None without cuDNN.

    It can differ from the version that torch was built with, for example through LD_LIBRARY_PATH.
    """
    import torch

    if not torch.backends.cudnn.is_available():
        return None
    # torch.backends.cudnn.version() raises if the loaded cuDNN is older than the one of the build
    return ".".join(str(number) for number in torch._C._cudnn.getRuntimeVersion())


def attention_kernel(dtype: str = "bf16", head_dim: int = 128) -> str | None:
    """Return the kernel that scaled_dot_product_attention chooses on this GPU in causal training.

    The name is one of torch.nn.attention.SDPBackend: CUDNN_ATTENTION, FLASH_ATTENTION,
    EFFICIENT_ATTENTION or MATH. None without a GPU. The function runs no attention: it asks torch
    for its choice at 2,048 tokens and heads of size `head_dim`.
    """
    import torch
    from torch.nn.attention import SDPBackend

    if not torch.cuda.is_available():
        return None
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    # [batch, heads, tokens, head_dim]
    query = torch.empty(1, 8, 2048, head_dim, device="cuda", dtype=torch_dtype, requires_grad=True)
    choice = torch._fused_sdp_choice(query, query, query, is_causal=True)
    return SDPBackend(choice).name
