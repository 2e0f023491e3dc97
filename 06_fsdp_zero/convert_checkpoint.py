"""Turn the weights of one kind of checkpoint into another, with the memory of one tensor, however large the model.

A checkpoint is names with tensors behind them. Each kind lays them out in its own way: DCP (the runs here save
with torch.distributed.checkpoint) in files of each rank, Hugging Face in .safetensors files of a few GB, torch.save in
one .pt, DeepSpeed in files of each rank that depend on the stage. In all of them one tensor can be found without
reading the others, and the place of every tensor is known from names, shapes and types before the first number is
written. So a tensor is read, written and dropped, and then comes the next. Optimizer state stays behind.

    laptop    python 06_fsdp_zero/convert_checkpoint.py
    one node  python 06_fsdp_zero/convert_checkpoint.py runs/8b models/my-8b --to hf
              torchrun --nproc_per_node=8 06_fsdp_zero/train_fsdp.py --model models/my-8b
              python 06_fsdp_zero/convert_checkpoint.py models/my-8b my-8b.pt --to pt
    cluster   the same, on one of the nodes

FROM is a run directory (its newest step is taken), one step of it, a folder or a file. Its kind is found by looking. TO
must not exist. Without FROM and TO, random weights of nano go round through all kinds.

A run can start from TO, and none can be resumed from it: --resume needs the optimizer state. A Hugging Face folder is
what `--model` takes, in every script and at every stage. Of the others, load_state_dict takes "model" of the .pt, and
dcp.load the DCP folder. engine.load_checkpoint(TO, load_module_only=True) takes DeepSpeed's at stages 0 to 2; stage 3
reads only files cut as it cuts them.

Look for: the peak memory, beside the bytes written; the last check, for which all of TO is read again. Before:
train_fsdp.py. Next: `--model TO`; transformers opens a Hugging Face folder with from_pretrained(TO).
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import _TYPES as TYPES  # "F32": torch.float32, ...
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _convert_checkpoint_deepspeed import read_deepspeed, write_deepspeed
from _convert_checkpoint_files import (
    EMBEDDING,
    HEAD,
    Read,
    Source,
    as_bytes,
    aside,
    check_fits,
    check_free,
    copy_tokenizer,
    find,
    find_config,
    readable,
    sha256,
)
from _convert_checkpoint_pt import read_pt, write_pt
from _convert_checkpoint_round import go_round

from old import cli, exits, report, run_dir


def convert(source: Source, write: Callable, read_again: Callable, target: Path, tied: bool, config: dict) -> dict:
    """Tensor by tensor, in the order in which `write` asks for them. `target` gets its name when all of it has been
    read again and is what `source` is, to the bit."""
    began = time.perf_counter()
    hashes = {}

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        hashes[name] = sha256(tensor)
        return tensor

    # a tied head is not read: who wants both names reads the embedding twice
    tensors = {name: tensor for name, tensor in source.tensors.items() if not (tied and name == HEAD)}
    with aside(target) as temporary:
        write(temporary, tensors, read, tied, config)
        written = read_again(temporary)
        assert written.tensors.keys() >= tensors.keys()
        for name in written.tensors:
            expected = hashes[EMBEDDING if tied and name == HEAD else name]
            assert sha256(written.read(name)) == expected, f"{name} was written otherwise than it was read"
    dtypes = {str(tensor.dtype) for tensor in tensors.values()}
    return {
        "to": str(target),
        "dtype": ", ".join(sorted(dtypes)),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "tensors": len(tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "largest_tensor_bytes": max(tensor.nbytes for tensor in tensors.values()),
        "peak_memory_bytes": report.peak_memory_bytes(torch.device("cpu")),
        "seconds": time.perf_counter() - began,
    }


def read_dcp(folder: Path) -> Source:
    reader = dcp.FileSystemReader(folder)
    reader.read_metadata = functools.cache(reader.read_metadata)  # or each tensor would read it again
    with readable(folder / ".metadata"):
        saved = reader.read_metadata().state_dict_metadata
    # a run keeps its weights under "model.", beside the optimizer's state; others may have saved a bare state dict
    prefix = "model." if any(key.startswith("model.model.") for key in saved) else ""
    tensors = {
        key.removeprefix(prefix): torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        for key, about in saved.items()
        if key.startswith(prefix) and hasattr(about, "size")
    }

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(tensors[name], device="cpu")
        with readable(folder):
            dcp.load({prefix + name: tensor}, storage_reader=reader, no_dist=True)  # its rows, from each rank's file
        return tensor

    return Source(tensors, read)


def write_dcp(folder: Path, tensors: dict[str, Tensor], read: Read, tied: bool, config: dict) -> None:
    """As a step of a run, without its optimizer state: a file per tensor, since DCP keeps a file's tensors until it
    is complete."""

    class ReadWhenWritten(dcp.DefaultSavePlanner):
        def lookup_object(self, index) -> Tensor:
            name = index.fqn.removeprefix("model.")
            return read(EMBEDDING if tied and name == HEAD else name)

    if tied:
        tensors = {**tensors, HEAD: tensors[EMBEDDING]}  # as in a state dict, both names
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, per_thread_copy_ahead=0)
    dcp.save({"model": tensors}, storage_writer=writer, planner=ReadWhenWritten(), no_dist=True)
    run_dir.write_json(folder / "config.json", config)


def read_hf(folder: Path) -> Source:
    index = folder / "model.safetensors.index.json"
    with readable(index):
        listed = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ()
        files = sorted(folder / name for name in listed) or sorted(folder.glob("*.safetensors"))
    tensors, file_of = {}, {}
    for file in files:
        with readable(file), safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dict
                part = opened.get_slice(name)
                tensors[name] = torch.empty(part.get_shape(), dtype=TYPES[part.get_dtype()], device="meta")
                file_of[name] = file

    def read(name: str) -> Tensor:
        # opened anew each time: what a map has read stays in memory as long as the map
        with readable(file_of[name]), safe_open(file_of[name], "pt") as opened:
            return opened.get_tensor(name)

    return Source(tensors, read)


def write_hf(
    folder: Path, tensors: dict[str, Tensor], read: Read, tied: bool, config: dict, max_shard_bytes: float
) -> None:
    """A .safetensors file is a header that tells each tensor's place, and then their bytes."""
    folder.mkdir()
    shards = [[]]
    for name, tensor in tensors.items():  # of a tied model, the head is left out
        if shards[-1] and sum(tensors[other].nbytes for other in shards[-1]) + tensor.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        with open(folder / file, "wb") as stream:
            stream.write(header({name: tensors[name] for name in names}))
            for name in names:
                stream.write(as_bytes(read(name)))
            os.fsync(stream.fileno())
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        run_dir.write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": weight_map})
    run_dir.write_json(folder / "config.json", config)


def header(tensors: dict[str, Tensor]) -> bytes:
    """Of a .safetensors file: its own length, then JSON."""
    type_names = {dtype: name for name, dtype in TYPES.items()}
    entries = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": type_names[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


READ = {"dcp": read_dcp, "hf": read_hf, "pt": read_pt, "deepspeed": read_deepspeed}
WRITE = {"dcp": write_dcp, "hf": write_hf, "pt": write_pt, "deepspeed": write_deepspeed}


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "source", metavar="FROM", nargs="?", type=cli.path, help="a run directory, a step, a folder, a file"
    )
    parser.add_argument("target", metavar="TO", nargs="?", type=cli.path, help="a folder, or for pt a file")
    parser.add_argument("--to", choices=READ, help="the kind of TO")
    parser.add_argument(
        "--model",
        help="a size, or a Hugging Face config.json or folder: the shape, where FROM does not "
        "tell it; from a folder the tokenizer is copied too",
    )
    parser.add_argument("--max-shard-gb", type=cli.positive, default=5, help="of each .safetensors file, in 1e9 bytes")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    if exits.world_from_env()[1] > 1:
        raise exits.UserError("one process converts: start it without torchrun")
    write = {**WRITE, "hf": partial(write_hf, max_shard_bytes=args.max_shard_gb * 1e9)}
    if args.source is None:
        report.write_json(go_round(convert, READ, write), args.json)
        return 0
    if args.target is None or args.to is None:
        raise exits.UserError(f"FROM {args.source} needs TO and --to {'|'.join(READ)}")

    check_free(args.target)
    kind, path = find(args.source)
    source = READ[kind](path)
    config = find_config(args.model, source, path)
    tied = check_fits(source, config, path)
    done = convert(source, write[args.to], READ[args.to], args.target, tied, config)
    if args.to == "hf":
        copy_tokenizer(args.model, path, args.target)
    print(f"{path} ({kind}) is now {args.target} ({args.to}): weights alone, {done['tensors']} tensors")
    for name in ("tensor_bytes", "largest_tensor_bytes", "peak_memory_bytes", "seconds"):
        print(f"{name:<22} {report.for_people(name, done[name])}")
    print(f"checked: {args.target} read again, every tensor is that of {path} to the bit")
    summary = {"device": "cpu", "world_size": 1, "from": str(path), "from_kind": kind, "to_kind": args.to, **done}
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
