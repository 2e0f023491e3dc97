"""What train_zero.py does for --nvme: DeepSpeed's operator for files, its files, and what is saved of such a run."""

import contextlib
import io
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from old import checkpoint, model, runtime, shapes
from old.exits import UserError
from old.run_dir import write_json

OURS = "zero_stage_3"  # what DeepSpeed calls its part of the folder
PADDED_TO = 1024  # bytes: the size of a file is a multiple
ALIGNED_TO = 128  # fp32 numbers: what is read without the system's cache must begin at a multiple in memory, too


def claim_nvme(folder: str | None, shape: shapes.Config) -> None:
    """See that files can go there, and compile the operator that writes them. UserError if not."""
    if folder is None:
        return
    check_parts(folder, shape)
    check_nvme_folder(folder)


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


def check_parts(folder: str, shape: shapes.Config) -> None:
    """UserError for a shape whose gradients DeepSpeed would lose. It reads them from their files into one row, each at
    its place there. A read to a place that is not aligned fails, DeepSpeed 0.19.8 does not look at the answer, and
    AdamW goes on with what was there before."""
    ranks = dist.get_world_size()
    with torch.device("meta"):
        net = model.Transformer(shape)
    for name, parameter in net.named_parameters():
        part = math.ceil(parameter.numel() / ranks)
        if parameter.ndim == 2 and part % ALIGNED_TO:
            raise UserError(
                f"--nvme {folder}: {ranks} ranks cut {name} into parts of {part} numbers, and DeepSpeed loses the "
                f"gradients unless that is a multiple of {ALIGNED_TO}: take another number of ranks"
            )


def give_back_nvme(folder: str | None) -> None:
    """Remove the files of this run; all ranks have ended with them."""
    if folder is not None:
        dist.barrier()
        shutil.rmtree(Path(folder, OURS), ignore_errors=True)  # another rank of this node may be first


def end_early(stop: int, step: int, run: Path, folder: str) -> None:
    """What is left to do and to say after a signal."""
    give_back_nvme(folder)
    raise UserError(
        f"signal {stop}: a run with --nvme cannot be resumed; --model {run}/step-{step:08d} starts a new one from the "
        f"weights after {step} steps"
    )


def state_files(folder: str) -> list[Path]:
    """This rank's files of optimizer state and of the fp32 copy of its weights."""
    files = Path(folder, OURS, "optimizer", f"rank{dist.get_rank()}").glob("*.swp")
    return [file for file in files if "gradient" not in file.name]


def save_weights(checkpoints: checkpoint.Checkpoints, progress: dict, engine) -> None:
    """Save the weights as step-{progress["step"]}, a Hugging Face folder with a file for each, so that one at a time is
    whole. UserError if it cannot be written."""
    engine.optimizer.checkpoint_event_prologue()  # waits for what evaluation has asked for ahead and not used
    net = engine.module

    def write(_state: dict, folder: Path, _group) -> Iterable[Path]:
        from safetensors.torch import save

        weight_map = {}
        total_bytes = 0
        failure = None
        for number, (name, parameter) in enumerate(net.named_parameters()):
            weight = runtime.whole(parameter).cpu()  # the ranks send it together, also if rank 0 cannot write it
            file = folder / f"model-{number:05}.safetensors"
            weight_map[name] = file.name
            total_bytes += weight.nbytes
            if runtime.is_rank0() and failure is None:
                try:
                    folder.mkdir(exist_ok=True)
                    with open(file, "wb") as stream:
                        stream.write(save({name: weight}, {"format": "pt"}))
                        stream.flush()
                        os.fsync(stream.fileno())
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
        if not runtime.is_rank0():
            return []
        index = folder / "model.safetensors.index.json"
        write_json(index, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
        files = [folder / name for name in weight_map.values()]
        return [*files, index, *checkpoint.write_config(net, folder)]

    checkpoints.save(progress["step"], {}, write)
