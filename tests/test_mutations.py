"""tests/mutations.py: every fault can be planted."""

import ast

import mutations
import pytest
from support.harness import ROOT

FAULTS = mutations.all_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.breaks for fault in FAULTS])
def test_a_fault_can_be_planted(tmp_path, fault):
    """A line or a test that has changed is found here, in a moment, and not by make test-long."""
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text(whole := (ROOT / fault.file).read_text(encoding="utf-8"), encoding="utf-8")
    fault.plant(tmp_path)
    assert copy.read_text(encoding="utf-8") != whole
    path, name = fault.test.split("[")[0].split("::")
    functions = {
        f.name: f
        for f in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if isinstance(f, ast.FunctionDef)
    }
    marks = [ast.unparse(mark) for mark in functions[name].decorator_list]
    assert not [mark for mark in marks if "mark.gpu" in mark or "mark.real_model" in mark]
