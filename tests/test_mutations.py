"""tests/mutations.py: every fault can be planted."""

import ast
from functools import cache

import mutations
from support.harness import ROOT


@cache
def marks_of(file: str) -> dict[str, list[str]]:
    """Return the marks of each test of a file, by the name of the test."""
    marks = {}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            marks[node.name] = [ast.unparse(mark) for mark in node.decorator_list]
    return marks


def whats_wrong(fault: mutations.Fault) -> str | None:
    """Return why the fault cannot be planted, or why its test does not run everywhere."""
    try:
        fault.faulty((ROOT / fault.file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        return str(error)
    if fault.new == fault.old:
        return f"{fault.breaks}: changes nothing in {fault.file}"
    file, name = fault.test.split("[")[0].split("::")
    marks = marks_of(file).get(name)
    if marks is None:
        return f"{fault.breaks}: {file} has no {name}"
    if any("mark.gpu" in mark or "mark.real_model" in mark for mark in marks):
        return f"{fault.breaks}: {fault.test} does not run everywhere"
    return None


def test_every_fault_can_be_planted():
    """A line or a test that has changed is found here, in a moment, and not by make test-long."""
    faults = mutations.all_faults()
    assert faults
    wrong = [whats_wrong(fault) for fault in faults]
    assert not any(wrong), "\n".join(line for line in wrong if line)
