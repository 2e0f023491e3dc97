"""What 05_ddp/README.md says about taking train.py with you: the lines that are left run, with the modules it names."""

import re
import shutil

import pytest
from support.harness import ROOT, run
from support.reduced_train import CHANGES, MODULES, reduced

SOURCE = (ROOT / "05_ddp/train.py").read_text()
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")


def test_eighty_lines_are_left():
    lines = [line for line in reduced(SOURCE).splitlines() if line.strip()]
    assert len(lines) <= 80
    kept = set(SOURCE.splitlines())
    assert len([line for line in lines if line in kept]) > 0.75 * len(
        lines
    )  # it is train.py still, not another program


def test_a_passage_that_is_gone_is_named():
    first = CHANGES[0][0]
    with pytest.raises(AssertionError, match="no line that starts with 'def warmup_cosine"):
        reduced(SOURCE.replace(first, "def something_else("))


def test_the_reduced_script_trains_on_one_and_two_processes_alike(tmp_path):
    """In a folder of its own, beside nothing but the modules that the README says to copy."""
    (tmp_path / "common").mkdir()
    (tmp_path / "mine").mkdir()
    for module in MODULES:
        shutil.copy(ROOT / f"common/{module}.py", tmp_path / "common")
    script = tmp_path / "mine/my_train.py"
    script.write_text(reduced(SOURCE))
    flags = ("--device", "cpu", "--steps", 6, "--log-every", 1, "--global-batch-size", 12, "--seq-len", 32)
    curves = []
    for processes in (1, 2):
        result = run(script, tmp_path / str(processes), *flags, nproc=processes)
        assert result.code == 0, result.err
        curves.append([float(loss) for _, loss in LOSS.findall(result.out)])
    assert len(curves[0]) == 6
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)  # bf16 sums of other sizes
    assert curves[0][-1] < curves[0][0] - 0.5


def test_the_readme_names_the_modules():
    readme = (ROOT / "05_ddp/README.md").read_text()
    section = readme.split("## Take train.py with you")[1].split("\n## ")[0]
    for module in MODULES:
        assert f"`{module}.py`" in section
    assert "tests/support/reduced_train.py" in section
