"""tests/mutations.py: every fault can be planted, and one that no test catches is told (make test-long)."""

import ast
import dataclasses

import mutations
import pytest
from support.harness import ROOT

FAULTS = mutations.all_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.breaks for fault in FAULTS])
def test_a_fault_can_be_planted(tmp_path, fault):
    """A line that has changed is found here, in a moment, and not by make test-long."""
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text(whole := (ROOT / fault.file).read_text())
    fault.plant(tmp_path)
    assert copy.read_text() != whole
    path, name = fault.test.split("[")[0].split("::")
    functions = {f.name: f for f in ast.parse((ROOT / path).read_text()).body if isinstance(f, ast.FunctionDef)}
    marks = [ast.unparse(mark) for mark in functions[name].decorator_list]
    assert not [mark for mark in marks if "mark.gpu" in mark or "mark.real_model" in mark]


def test_there_are_faults():
    assert len({fault.breaks for fault in FAULTS}) == len(FAULTS) >= 50


def test_a_line_that_is_gone_or_stands_twice_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 2\ny = 2\n")
    for old in ("z = 3\n", "y = 2\n", " = 1\n"):  # the last is no whole line
        with pytest.raises(ValueError, match=r"stands [02] times in a.py"):
            mutations.Fault("a", "a.py", old, "", "").plant(tmp_path)
    with pytest.raises(SyntaxError):
        mutations.Fault("a", "a.py", "x = 1\n", "x = (\n", "").plant(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 2\ny = 2\n"


@pytest.mark.long  # it starts pytest in a copy of the repository, as the campaign does
def test_a_fault_that_no_test_catches_survives(tmp_path):
    folder = mutations.copy_of_the_repository(tmp_path / "copy")
    real = next(fault for fault in FAULTS if fault.breaks == "attention looks ahead")
    assert mutations.judge(folder, real)[0]
    harmless = dataclasses.replace(real, new="        # the same\n" + real.old)
    assert mutations.judge(folder, harmless)[1].startswith("pytest exit 0")
    nowhere = dataclasses.replace(real, test=real.test + "_not")
    assert not mutations.judge(folder, nowhere)[0]  # pytest fails because there is no such test
