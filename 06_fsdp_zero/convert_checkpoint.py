"""Turn the weights of one kind of checkpoint into another, with little memory.

A checkpoint is names with tensors behind them. In the kind of torch.distributed.checkpoint (DCP)
each rank has a file: the runs here save so. DCP asks its planner for a tensor when it writes the
file with it. The planner here reads the tensor only then, so a model larger than the memory goes
through. A Hugging Face folder is written one .safetensors file at a time. DeepSpeed's own
zero_to_fp32 opens its checkpoints, and torch.save writes one .pt. Both hold all weights at once.
Optimizer state stays behind.

    laptop    python 06_fsdp_zero/convert_checkpoint.py
    one node  python 06_fsdp_zero/convert_checkpoint.py runs/8b models/my-8b --to hf
              torchrun --standalone --nproc_per_node=8 09_inference/infer_70b.py \
                  --model models/my-8b
    cluster   the same, on one of the nodes

FROM is a run's folder (its newest checkpoint is taken), one checkpoint of it, a folder or a .pt
file; its kind is found by looking. A file of torch.save may hold a state dict, or a dict with one,
such as Lightning's. Prefixes that wrappers add to the names of weights are left out.

TO must not exist. With --to hf it gets the tokenizer of the run, so that --model TO answers and
trains. No run can be resumed from it: --resume needs the optimizer state. Without FROM and TO,
random weights of nano are converted to all kinds, one after the other.

Look for: the peak of memory beside the largest file; the check, for which all of TO is read again.
Before: train_fsdp.py. Next: 09_inference/infer_70b.py --model TO; transformers opens TO, too.
"""

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch
import torch.distributed.checkpoint as dcp
from _convert_checkpoint import (
    EMBEDDING,
    HEAD,
    SAFETENSORS_DTYPES,
    Source,
    cause_of,
    find,
    find_config,
    find_tokenizer,
    fit,
    load_deepspeed,
    load_torch_file,
    origin_of,
    readable,
    save_tokenizer,
    set_special_ids,
    without_prefixes,
)
from safetensors import SafetensorError
from torch import Tensor

from common import cli, files, lesson, report, runtime
from common.exits import UserError
from lm import runs, shapes
from lm.expert_files import in_files
from lm.hf_folder import write_weights
from lm.weight_files import StoredWeights
from lm.weights import build


def write(kind: str, source: Source, target: Path, config: dict, most_file_bytes: float) -> None:
    """Write a checkpoint: "dcp" and "hf" with little memory, "pt" with torch.save.

    DCP reads a tensor only when it writes the file with it.
    """
    if kind == "pt":
        torch.save({"model": {name: source.read(name) for name in source.tensors}}, target)
        return
    if kind == "hf":
        write_weights(source.tensors, source.read, target, most_file_bytes)
    else:
        # or all weights would wait for one file
        writer = dcp.FileSystemWriter(target, single_file_per_rank=False)
        writer.per_thread_copy_ahead = 0  # copying ahead would open a CUDA context
        planner = ReadWhenWritten(lambda name: source.read(name.removeprefix("model.")))
        # a run keeps its weights under "model", beside the optimizer's state
        state = {"model": source.tensors}
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    files.write_json(target / "config.json", config)


class ReadWhenWritten(dcp.DefaultSavePlanner):
    """Read a tensor when DCP writes it: DCP plans a save from the shapes alone."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index) -> Tensor:
        return self.read(index.fqn)


def open_checkpoint(kind: str, path: Path) -> Source:
    """Return the tensors of a checkpoint. Raise UserError if it cannot be read."""
    with readable(path):
        if kind == "hf":
            return open_safetensors(path)
        if kind == "dcp":
            return open_dcp(dcp.FileSystemReader(path))
        weights = load_torch_file(path) if kind == "pt" else load_deepspeed(path)
        tensors = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            for name, weight in weights.items()
        }
        # zero_to_fp32 returns lazy tensors: contiguous() joins their parts
        return Source(tensors, lambda name: weights[name].contiguous())


def open_safetensors(folder: Path) -> Source:
    """Return the tensors in the weight files of a Hugging Face folder."""
    stored = StoredWeights(folder, flag="FROM")
    tensors = {}
    for name, tensor in stored.tensors.items():
        dtype = SAFETENSORS_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise UserError(
                f"FROM {folder}: {name} has the type {tensor.dtype}, which is no weight's"
            )
        tensors[name] = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return Source(tensors, stored.read)


def open_dcp(reader: dcp.FileSystemReader) -> Source:
    """Return the tensors in a folder of DCP."""
    reader.read_metadata = cache(reader.read_metadata)  # or each tensor would read it again
    saved = reader.read_metadata().state_dict_metadata
    tensors = {}
    for name, about in saved.items():
        if hasattr(about, "size"):  # others are numbers and objects
            dtype = about.properties.dtype
            tensors[name] = torch.empty(about.size, dtype=dtype, device="meta")

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(tensors[name], device="cpu")
        with readable(reader.path):
            # its rows, from each rank's file
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    # a run keeps its weights under "model", beside the optimizer's state
    return without_prefixes(Source(tensors, read), reader.path, has_optimizer=True)


def run(
    path: Path,
    target: Path,
    to: str,
    named: str | None,
    most_file_bytes: float,
    given_tokenizer: str | None = None,
) -> dict:
    """Convert a checkpoint, and return a row of the table.

    `target` gets its name when all of it has been read again and is bit-identical to the source.
    """
    began = time.perf_counter()
    kind, path = find(path)
    runs.check_has_all_weights(path.parent, f"{path} is a checkpoint of a run")
    config = find_config(named, path)
    tokenizer = None
    if to == "hf":
        tokenizer = find_tokenizer(given_tokenizer, named, path, config)
        set_special_ids(config, named, path, tokenizer)
    source, tied = fit(without_prefixes(open_checkpoint(kind, path), path), config, path)
    shape = shapes.parse_config(config, str(path))
    if to == "hf" and shape.experts:
        source = Source(*in_files(*source, shape))
    tensors = source.tensors
    hashes = {}
    if tied and to != "hf":
        # as in the state dict of a tied model, which has both names
        tensors = {**tensors, HEAD: tensors[EMBEDDING]}

    def read(name: str) -> Tensor:
        tensor = source.read(EMBEDDING if tied and name == HEAD else name)
        hashes[name] = sha256(tensor)
        return tensor

    unfinished = None
    try:
        unfinished = files.start_folder(target)
        written = unfinished / target.name if to == "pt" else unfinished
        write(to, Source(tensors, read), written, config, most_file_bytes)
        save_tokenizer(tokenizer, unfinished, origin_of(named, path))
        check(open_checkpoint(to, written), hashes)
        if to == "pt":
            files.move(written, target)
        else:
            files.finish_folder(unfinished, target)
    except (OSError, RuntimeError, SafetensorError, dcp.api.CheckpointException) as error:
        cause = cause_of(error)
        raise (
            cause
            if isinstance(cause, UserError)
            else UserError(f"{target} cannot be written: {exits.disk_message(cause) or cause}")
        ) from None
    finally:
        if unfinished is not None and unfinished.exists():
            files.delete(unfinished)
    sizes = [file.stat().st_size for file in (target, *target.rglob("*")) if file.is_file()]
    return {
        "from": str(path),
        "from_kind": kind,
        "to_kind": to,
        "tensors": len(tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in source.tensors.values()),
        "files": len(sizes),
        "largest_file_bytes": max(sizes),
        "peak_memory_bytes": report.peak_memory_bytes(torch.device("cpu")),
        "seconds": time.perf_counter() - began,
    }


def check(written: Source, hashes: dict[str, str]) -> None:
    """Assert that the written tensors have these hashes."""
    assert written.tensors.keys() == hashes.keys(), (
        f"written: {[*written.tensors]}, read: {[*hashes]}"
    )
    for name in written.tensors:
        assert sha256(written.read(name)) == hashes[name], (
            f"{name} was written otherwise than it was read"
        )


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    flat = tensor.detach().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()


def go_round(most_file_bytes: float) -> list[dict]:
    """Convert random weights of nano to all kinds in turn; return the rows of the table.

    Assert that the last checkpoint has the weights of the first.
    """
    weights = build("nano", shapes.SIZES["nano"], seed=0).state_dict()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "nano.pt")
        torch.save({"model": weights}, path)
        for kind in ("dcp", "hf", "pt", "dcp"):
            target = Path(folder, f"{len(rows)}-{kind}")
            rows.append(run(path, target, kind, "nano", most_file_bytes))
            path = target
        check(
            open_checkpoint("dcp", path), {name: sha256(weight) for name, weight in weights.items()}
        )
    return rows


COLUMNS = {
    "from_kind": "from",
    "to_kind": "to",
    "tensors": "tensors",
    "tensor_bytes": "weights",
    "files": "files",
}
COLUMNS |= {
    "largest_file_bytes": "largest file",
    "peak_memory_bytes": "peak memory",
    "seconds": "time",
}


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="FROM",
        nargs="?",
        type=Path,
        help="a run's folder, a step, a folder, a .pt file",
    )
    add("target", metavar="TO", nargs="?", type=Path, help="a folder, or for pt a file")
    add("--to", choices=("hf", "dcp", "pt"), help="the kind of TO")
    add(
        "--model",
        help="a size, config.json or folder, with the shape if FROM has none, and a tokenizer",
    )
    add(
        "--tokenizer",
        help="bytes, or a Hugging Face name or folder, for --to hf (default: that of the run)",
    )
    add(
        "--max-shard-gb",
        type=cli.positive,
        default=2,
        help="of each .safetensors file, in 1e9 bytes (default: 2)",
    )
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    runtime.single_device("cpu")  # one process converts
    most_file_bytes = args.max_shard_gb * 1e9
    if args.source is None:
        rows = go_round(most_file_bytes)
        checked = [
            "nano's weights are the same to the bit after .pt -> DCP -> Hugging Face -> .pt -> DCP"
        ]
    elif args.target is None or args.to is None:
        raise UserError(f"FROM {args.source} needs TO and --to hf, dcp or pt")
    elif args.target.exists() or not args.target.absolute().parent.is_dir():
        raise UserError(
            f"{args.target} exists, or its folder does not: nothing is overwritten, name another TO"
        )
    else:
        rows = [run(args.source, args.target, args.to, args.model, most_file_bytes, args.tokenizer)]
        checked = [
            f"{args.target} read again, every tensor is that of {rows[0]['from']} to the bit"
        ]
    lesson.end(rows, columns=COLUMNS, checked=checked, args=args, device=torch.device("cpu"))
    return 0


if __name__ == "__main__":
    exits.run(main)
