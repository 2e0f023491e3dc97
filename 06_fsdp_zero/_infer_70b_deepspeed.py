"""DeepSpeed for infer_70b.py: imported in silence, and its operator for files."""

import contextlib
import io
import logging
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from old import runtime
from old.exits import UserError

OURS = "zero_stage_3"  # what DeepSpeed calls its part of the folder


def check_nvme_folder(folder: str) -> None:
    """UserError on all ranks if one cannot write files there. Compiles DeepSpeed's operator at first use."""
    problems = runtime.gather(_problem(Path(folder)))  # each node has a disk of its own
    if problem := next((problem for problem in problems if problem), None):
        raise UserError(problem)


def _problem(folder: Path) -> str | None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return f"--nvme {folder}: no such folder, or not one to write to"
    if (folder / OURS).exists():
        return f"--nvme {folder}: another run's files are there; if none is running, remove {folder / OURS}"
    needs = f"--nvme {folder} needs DeepSpeed's operator async_io, which is compiled at first use: it takes libaio-dev "
    needs += "(apt-get install libaio-dev), g++ and ninja"
    builder = AsyncIOBuilder()
    with contextlib.redirect_stdout(io.StringIO()):  # it tells how long it took
        if not builder.is_compatible(verbose=False):
            return f"{needs}; it cannot be compiled here"
        try:
            builder.load(verbose=False)
        except Exception as error:  # whatever a compiler or a linker makes of it
            lines = str(error).splitlines()
            return f"{needs}: {next((line for line in lines if 'error:' in line), lines[0])}"
    return None


def import_deepspeed(device: torch.device, args):
    """The package, for this device and in the process group that is there. UserError for what it cannot do here."""
    os.environ["DS_ACCELERATOR"] = device.type  # read by the import; left alone it takes a GPU wherever it sees one
    os.environ.setdefault("LOCAL_RANK", "0")  # read by zero.Init, also where one process was started without torchrun
    logging.disable(logging.INFO)  # the import itself logs, to stdout
    import deepspeed

    logging.disable(logging.NOTSET)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)  # names that torch has since changed
    # on a CPU it would compile an all-reduce through shared memory, for two minutes; only its inference uses that
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    if args.dtype == "fp16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        raise UserError(f"--dtype fp16: DeepSpeed has no fp16 for this {device.type}; use bf16 or fp32")
    return deepspeed


def same_timeouts() -> None:
    """Have DeepSpeed's groups wait as long as ours; it makes some with torch's own 30 minutes."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(runtime.collective_timeout(), group)
