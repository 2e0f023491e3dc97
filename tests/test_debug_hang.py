"""launch/debug_hang.py: the rank and the collective that it names are those that were planted."""

import json
import shutil

import pytest
from support.chapter import load
from support.harness import ROOT, command, finish, run, start

SCRIPT = "launch/debug_hang.py"
PATIENT = ("--device", "cpu", "--timeout", 4)  # longer than a busy machine keeps a rank from running

debug_hang = load(SCRIPT)


def line(code: str) -> str:
    """debug_hang.py:LINE CODE, as the script names a line of its own."""
    found = [i for i, text in enumerate((ROOT / SCRIPT).read_text().splitlines(), 1) if text.strip() == code]
    assert len(found) == 1
    return f"debug_hang.py:{found[0]} {code}"


GRADIENTS, LOSS = line("collective(dist.all_reduce, gradients)"), line("collective(dist.all_reduce, loss)")
TIMES, LOADER = line("collective(dist.all_gather, times, torch.ones(1, device=device))"), line("return batches.get()")
END = line("watchdog.join()")  # of the script: it has left its loop


@pytest.mark.parametrize(
    ("plant", "rank", "world_size"),
    [
        ("skipped-collective", 0, 2),
        pytest.param("skipped-collective", 2, 3, marks=pytest.mark.launch),
        pytest.param("stuck-loader", 0, 3, marks=pytest.mark.launch),
        pytest.param("early-return", 1, 2, marks=pytest.mark.launch),
    ],
)
def test_the_planted_rank_and_collective_are_named(tmp_path, plant, rank, world_size):
    flags = ("--plant", plant, "--rank", rank, "--json", "s.json", *PATIENT)
    result = run(SCRIPT, tmp_path, *flags, nproc=world_size, warm=False)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["missing_ranks"], summary["collective"]) == ([rank], "all_reduce")
    # three calls a step: the first or the second of the third step
    number, called_at = (7, GRADIENTS) if plant == "stuck-loader" else (8, LOSS)
    there = {"stuck-loader": LOADER, "skipped-collective": TIMES, "early-return": END}[plant]
    assert (summary["number"], summary["called_at"]) == (number, called_at)
    assert summary["at"] == [there if other == rank else called_at for other in range(world_size)]
    assert summary["flight_recorder_agrees"]
    assert f"rank {rank} did not make call {number}, all_reduce" in result.out
    assert "Traceback" not in result.err


def test_a_healthy_run_names_nobody(tmp_path):
    """Bare: it starts its ranks itself."""
    result = run(SCRIPT, tmp_path, "--plant", "none", "--timeout", 30, "--device", "cpu", "--json", "s.json")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["missing_ranks"], summary["world_size"]) == ([], 3)
    assert "did not make" not in result.out


def test_a_wrong_answer_is_a_failure(tmp_path):
    """The same script, with a judge that looks away: exit code 1, and nothing left running."""
    text = (ROOT / SCRIPT).read_text().replace("parents[1]", f"parents[0] / {str(ROOT)!r}")
    assert "call != expected]" in text
    (tmp_path / "blind.py").write_text(text.replace("call != expected]", "call == expected]"))
    shutil.copy(ROOT / "launch/_debug_hang_report.py", tmp_path)
    result = finish(start(command(tmp_path / "blind.py", *PATIENT, "--json", "s.json", nproc=2), tmp_path), tmp_path)
    assert result.code == 1, result.err
    assert not json.loads((tmp_path / "s.json").read_text())["named_what_was_planted"]


def test_wrong_flags(tmp_path):
    result = run(SCRIPT, tmp_path, "--plant", "bug")
    assert result.code == 2
    assert "error: argument --plant" in result.err
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = run(SCRIPT, tmp_path, **alone)
    assert (result.code, result.out) == (2, "")
    assert "--rank 1 of 1" in result.err


@pytest.mark.gpu(n=2)
def test_nccl(tmp_path, gpus):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    for plant in ("skipped-collective", "stuck-loader"):
        flags = ("--plant", plant, "--device", "cuda", "--timeout", 5, "--json", "s.json")
        result = run(SCRIPT, tmp_path, *flags, nproc=2, **visible)
        assert result.code == 0, result.err
        assert json.loads((tmp_path / "s.json").read_text())["missing_ranks"] == [1]
