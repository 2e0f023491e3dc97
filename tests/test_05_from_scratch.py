"""05_ddp/ddp_from_scratch.py: one process, two and three, by hand and by torch: one result."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.harness import (
    ROOT,
    TINY,
    assert_refused,
    command,
    config_of,
    finish,
    in_full,
    run,
    start,
    with_fault,
)

from lm import shapes, weights

SCRIPT = "05_ddp/ddp_from_scratch.py"
STEPS = 4
SMALL = ("--model", "tiny.json", "--device", "cpu", "--json", "s.json")
PARAMETERS = shapes.parameter_count(config_of(TINY))


@pytest.fixture(scope="module")
def runs(once) -> Callable[[int], dict]:
    """runs(n): the summary on n ranks; two is what a bare `python` starts."""

    def run_on(folder: Path, n: int) -> dict:
        (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
        result = run(SCRIPT, folder, *SMALL, "--steps", STEPS, nproc=None if n == 2 else n)
        assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
        return json.loads((folder / "s.json").read_text(encoding="utf-8"))

    return partial(once, "ddp from scratch", run_on)


def averaged_rows(summary: dict) -> list[dict]:
    """All but the control, which sends nothing."""
    return [row for row in summary["rows"] if row["all_reduces"]]


@pytest.mark.parametrize("n", [1, 2, in_full(3)])
def test_losses_are_those_of_one_process(runs, n):
    summary, expected = runs(n), averaged_rows(runs(1))[0]["losses"]
    assert summary["world_size"] == n
    assert len(expected) == summary["steps"] > STEPS  # and some to warm up
    assert expected[-1] < expected[0]
    for row in averaged_rows(summary):
        assert row["losses"] == pytest.approx(expected, rel=1e-5), row["name"]
        # of the weights, to those of one process with the whole batch
        assert row["relative_error"] < 1e-4


@pytest.mark.parametrize("n", [1, 2, in_full(3)])
def test_who_holds_which_bits(runs, n):
    (control,) = (row for row in runs(n)["rows"] if not row["all_reduces"])
    assert len(set(control["weights_sha256"])) == n
    averaged = averaged_rows(runs(n))
    assert {len(set(row["weights_sha256"])) for row in averaged} == {1}
    if n < 3:  # with three terms the order of a sum counts
        assert len({row["weights_sha256"][0] for row in averaged}) == 1


def test_each_gradient_is_sent_once_and_early(runs):
    averaged = averaged_rows(runs(2))
    assert {sum(row["bucket_bytes"]) for row in averaged} == {4 * PARAMETERS}
    calls = {row["all_reduces"] for row in averaged}
    assert (min(calls), max(calls)) == (
        1,
        len(list(weights.build("tiny", config_of(TINY), seed=0).parameters())),
    )
    early = {row["started_in_backward"] for row in averaged if row["all_reduces"] == max(calls)}
    assert early == {0, max(calls) - 1}  # after backward, and in hooks


def test_the_script_finds_what_is_planted(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    script = with_fault(SCRIPT, tmp_path, " flat /= dist.get_world_size()\n", " pass\n")
    result = run(script, tmp_path, *SMALL, "--steps", 1, nproc=2)
    assert result.code == 1
    assert "came out differently" in result.err


def test_what_is_refused_before_any_rank_starts(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--model", "giant", "--device", "cpu"), "--model", "giant")


@pytest.mark.full
def test_two_hosts_with_a_slow_link(tmp_path):
    """The bytes of a step cannot be faster than the link, and no host is left behind."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, ip and tc (Debian's iproute2)")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    flags = (*SMALL, "--steps", 3, "--model", "nano")
    process = start(
        [str(ROOT / "benchmarks/slow_link.sh"), "200", *command(SCRIPT, *flags)], tmp_path
    )
    result = finish(process, tmp_path)
    assert result.code == 0, result.err
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=600, check=True
    ).stdout
    assert f"-{process.pid}" not in listed
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert summary["world_size"] == 2
    least = 8 * 4 * summary["parameters"] / 200e6
    for row in summary["rows"][1:]:
        # a second's credit (256 kB) may pass at once
        assert row["step_seconds"] > 0.9 * least, row["name"]
