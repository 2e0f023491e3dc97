"""What pages quote of the output of scripts is what the scripts print, numbers apart."""

import re
import shlex

import pytest
from support.harness import ROOT, run
from support.printed import (
    Quoted,
    checked_lines,
    headings,
    not_in_source,
    not_printed,
    quoted_outputs,
)

OUTPUTS = quoted_outputs()
FAST = ("07_memory_tricks/estimate.py", "infer_70b.py --model llama-70b --dry-run")
# It measures for minutes.
NOT_RUN = ("01_devices/benchmark.py",)


def cases() -> list:
    """Return the commands that are run, each with the mark of the tests in which it is."""
    params = []
    for quoted in OUTPUTS:
        if quoted.script in NOT_RUN or not (checked_lines(quoted.lines) or headings(quoted.lines)):
            continue
        marks = [pytest.mark.long]
        if any(text in quoted.command for text in FAST):
            marks = []
        params.append(pytest.param(quoted, marks=marks, id=quoted.command[:60]))
    return params


def test_all_chapters_are_read():
    assert len(OUTPUTS) >= 20
    pages = {quoted.page[:2] for quoted in OUTPUTS}
    assert pages >= {f"0{number}" for number in range(1, 10)}
    assert sum(len(list(checked_lines(quoted.lines))) for quoted in OUTPUTS) > 30


def test_what_is_quoted_is_in_the_source():
    missing = {f"{quoted.page}: {quoted.command}": not_in_source(quoted) for quoted in OUTPUTS}
    assert not {quoted: lines for quoted, lines in missing.items() if lines}


@pytest.mark.parametrize("quoted", cases())
def test_what_is_quoted_is_printed(tmp_path, request, quoted):
    if "smollm2" in quoted.command:
        request.getfixturevalue("smollm2")
    words = shlex.split(quoted.command)
    nproc = None
    if words[0] == "torchrun":
        nproc = int(re.search(r"--nproc_per_node=(\d+)", quoted.command)[1])
    flags = words[words.index(quoted.script) + 1 :]
    if (ROOT / "models").is_dir():
        (tmp_path / "models").symlink_to(ROOT / "models")
    result = run(quoted.script, tmp_path, *flags, nproc=nproc, CUDA_VISIBLE_DEVICES="")
    assert result.code == 0, result
    assert not_printed(quoted, result.out) == [], result.out


def test_line_numbers_in_quoted_output_are_those_of_the_script():
    numbers = 0
    for quoted in OUTPUTS:
        source = (ROOT / quoted.script).read_text(encoding="utf-8").splitlines()
        for number, code in re.findall(r"\bline (\d+), (\w.*)", "\n".join(quoted.lines)):
            assert source[int(number) - 1].strip() == code, quoted.script
            numbers += 1
    assert numbers >= 3


def test_a_line_that_is_not_printed_is_found():
    lines = [
        "| graphs so far | ms |",
        "| --- | --: |",
        "checked: 3 losses are equal",
        "  to the bit",
    ]
    quoted = Quoted("03_linear_regression", "python 03_linear_regression/train.py", lines)
    assert not_printed(quoted, "\n".join(lines).replace("3", "12")) == []
    assert not_printed(quoted, "\n".join(lines).replace("ms", "us")) == ["graphs so far | ms"]
    changed = "\n".join(lines).replace("to the bit", "within 1e-5")
    assert not_printed(quoted, changed) == ["checked: 3 losses are equal to the bit"]
    assert not_in_source(quoted) == ["checked: 3 losses are equal to the bit"]
