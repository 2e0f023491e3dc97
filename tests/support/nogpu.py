"""Scripts on GPUs that are not there: ../nogpu/README.md."""

import json
import subprocess
from pathlib import Path

import pytest

from support.checkpoints import write_folder
from support.harness import ROOT, TINY, Result, config_of, finish, start, write_tiny

TOOL = ROOT / "tests/nogpu"


def set_up(_folder: Path) -> None:
    """Skip where this machine cannot have the tool."""
    made = subprocess.run(["bash", TOOL / "setup.sh"], capture_output=True, text=True, timeout=1800)
    if made.returncode == 2:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr


def write_shape(folder: Path, name: str, **other: int) -> None:
    """A config.json of that name: the tiny model's but for this."""
    (folder / name).write_text(json.dumps(TINY | other), encoding="utf-8")


def run(
    how: str, folder: Path, script: str, flags: str, ranks: int = 0, gpus: int = 1, **env: str
) -> Result:
    """The script to its end in `folder`, on as many GPUs as it has ranks. --model: tiny.json, or folder."""
    write_tiny(folder)
    if "--model folder" in flags:
        write_folder(folder / "folder", config_of(TINY | {"max_position_embeddings": 256}), scale=4)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks
        else []
    )
    argv = ["bash", str(TOOL / "run.sh"), how, *launcher, str(ROOT / script), *flags.split()]
    return finish(start(argv, folder, NOGPU_DEVICES=str(ranks or gpus), **env), folder)


def gpu_tests(how: str, folder: Path, tests: str) -> Result:
    """Gpu-marked tests, with two GPUs. Their locks are in `folder`: they hold no real GPU."""
    argv = [
        "bash",
        str(TOOL / "run.sh"),
        how,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"{ROOT}/tests/{tests}",
    ]
    return finish(start(argv, folder, NOGPU_DEVICES="2", TMPDIR=str(folder)), folder)


def counts(
    folder: Path, script: str, flags: str, ranks: int = 0, how: str = "noop"
) -> list[dict[str, int]]:
    """How often each rank launched, copied, waited and sent what."""
    result = run(how, folder, script, flags, ranks, NOGPU_REPORT=str(folder / "report"))
    assert result.code == 0, result
    reports = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("report.*"))]
    rows = [[line.split(None, 1) for line in report.splitlines()] for report in reports]
    return [{what: int(n) for n, what in row} for row in rows]
