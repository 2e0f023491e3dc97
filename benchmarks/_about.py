"""Ask the driver and torch about the GPUs of this machine, for _measure.about."""

import json
import sys
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "01_devices")]
import _machine

from common import hardware


def print_facts() -> None:
    """Print one object: the card, how many there are, its limits, and the versions below torch."""
    visible = torch.cuda.device_count()
    device = torch.device("cuda", 0)
    nvml = _machine.gpu_of(device)
    memory = torch.cuda.get_device_properties(device).total_memory
    facts = {
        "device": hardware.device_name(device),
        "gpus": visible,
        "gpu_memory_gib": round(memory / 2**30, 1),
        "driver": nvml.get("driver"),
        "power_limit_watts": nvml.get("power_limit_watts"),
        "sm_clock_max_mhz": nvml.get("sm_clock_max_mhz"),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": hardware.cudnn_version(),
        "nccl": nccl_version(),
        "attention_kernel": hardware.attention_kernel(),
    }
    print(json.dumps(facts))


def nccl_version() -> str | None:
    """Return the version of NCCL, or None without NCCL."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())
