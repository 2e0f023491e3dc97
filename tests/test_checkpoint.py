"""What a disk, a file system or another node can do to a run."""

import json

import pytest
from support.harness import TINY, run, tiny_flags, train, with_prelude

DDP = "05_ddp/train.py"


# --- the folder of a run


@pytest.mark.parametrize("left", [(), ("step-00000004", "step-00000008.tmp")], ids=["fresh", "with a checkpoint"])
def test_ranks_with_folders_of_their_own_are_refused_before_the_first_step(tmp_path, left):
    """Two nodes, each with its own disk: here two ranks in two working directories, and a relative --run-dir."""
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "tiny.json").write_text(json.dumps(TINY))
        for name in left:
            (tmp_path / rank / "run" / name).mkdir(parents=True)
    moved = with_prelude(DDP, tmp_path, "os.chdir(os.environ['RANK'])")
    flags = [flag for flag in tiny_flags(tmp_path) if flag != tmp_path / "run"]
    flags[flags.index("--run-dir") : flags.index("--run-dir") + 1] = ["--run-dir", "run", "--resume"]
    result = run(moved, tmp_path, *flags, nproc=2)
    assert result.code != 0
    told = [line for line in result.err.splitlines() if ": error: " in line]
    assert len(told) == 1, result.err
    assert "--run-dir run: a file that rank 0 on " in told[0]
    assert " is not seen by rank 1 on " in told[0]
    assert "exitcode  : 2" in result.err
    assert "step " not in result.out
    for rank in "01":
        assert {path.name for path in (tmp_path / rank / "run").glob("step-*")} == set(left)
    assert not list((tmp_path / "0/run").glob(".seen*"))


def test_ranks_whose_nodes_hold_different_texts_are_refused(tmp_path):
    """As the standard libraries of two Python versions do, or a file of one name on two disks."""
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "tiny.json").write_text(json.dumps(TINY))
        (tmp_path / rank / "text.txt").write_text(f"this is what node {rank} has " * 400)
    moved = with_prelude(DDP, tmp_path, "os.chdir(os.environ['RANK'])")
    result = run(moved, tmp_path, *tiny_flags(tmp_path), "--data", "text.txt", nproc=2)
    told = [line for line in result.err.splitlines() if ": error: " in line]
    assert len(told) == 1, result.err
    assert "--data stands for something else on rank 1 on " in told[0]
    assert "exitcode  : 2" in result.err
    assert not (tmp_path / "run").exists()


def test_a_resume_checks_the_dtype_that_auto_has_become(tmp_path):
    flags = ("--dtype", "auto", "--steps", 2)
    trained = train(DDP, tmp_path, *flags)
    settings = json.loads((tmp_path / "run/settings.json").read_text())
    assert settings["--dtype"] == trained.summary["dtype"] in ("bf16", "fp32")
    other = "fp32" if settings["--dtype"] == "bf16" else "bf16"
    refused = train(DDP, tmp_path, "--dtype", other, "--steps", 2, "--resume", code=2)
    assert f"--dtype {other} (was {settings['--dtype']})" in refused.err
