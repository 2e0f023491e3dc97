"""What convert_checkpoint.py does without arguments: random weights of nano through all kinds, and back."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _convert_checkpoint_files import Source

from old import model, report, shapes


def go_round(convert: Callable, read: dict[str, Callable], write: dict[str, Callable]) -> dict:
    """Each kind is made of the one before, and the last must be the first. Returns the summary."""
    began = time.perf_counter()
    net = model.build("nano", shapes.SIZES["nano"], seed=0)
    config = shapes.config_json(net.config)
    weights = net.state_dict()
    source = Source({name: weight.to("meta") for name, weight in weights.items()}, weights.__getitem__)
    kinds = [*read, next(iter(read))]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(kinds):
            target = Path(folder, f"{number}-{kind}")
            done = convert(source, write[kind], read[kind], target, True, config)
            files = [file for file in (target, *target.rglob("*")) if file.is_file()]
            rows.append({**done, "to": kind, "files": len(files), "file_bytes": sum(f.stat().st_size for f in files)})
            source = read[kind](target)
        for name, weight in weights.items():
            assert torch.equal(source.read(name), weight), name
    heads = [["kind", "files", "on disk", "seconds"]]
    cells = [[r["to"], str(r["files"]), f"{r['file_bytes'] / 2**20:.2f} MiB", f"{r['seconds']:.2f}"] for r in rows]
    print(report.table(heads + cells))
    print(f"checked: nano's {len(weights)} weights are the same to the bit after {' -> '.join(kinds)}")
    return {
        "device": "cpu",
        "world_size": 1,
        "model": "nano",
        "parameters": shapes.parameter_count(net.config),
        "peak_memory_bytes": report.peak_memory_bytes(torch.device("cpu")),
        "seconds": time.perf_counter() - began,
        "rows": rows,
    }
