"""A script that needs several ranks, started as `python script.py`: it starts itself again under torchrun."""

import os
import sys

import torch

from common.exits import UserError


def relaunch(device: str, argv: list[str]) -> None:
    """Return under torchrun. Else become torchrun of the same script: a process per GPU, or two on the CPU."""
    if "RANK" in os.environ:
        return
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < 2:
        raise UserError(f"--device cuda: two ranks need two GPUs, {gpus} visible: use --device cpu")
    processes, place = 2, "on the CPU, gloo"
    if gpus > 1:
        processes, place = gpus, "a GPU each, NCCL"
    elif gpus == 1:
        place += ": NCCL wants two GPUs"
    flags = [*argv[1:], "--device", "cuda" if gpus > 1 else "cpu"]  # the last --device wins
    print(f"one process has nobody to talk to: torchrun --nproc_per_node={processes} {argv[0]} ({place})", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, without its warning
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    os.execv(sys.executable, [sys.executable, *torchrun, argv[0], *flags])  # nothing is left running in between
