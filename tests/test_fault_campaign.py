"""tests/fault_campaign.py: every kind of fault, and that its verdicts can be bad."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import fault_campaign
import pytest
from support.harness import ROOT, SEVERAL, clean_env

pytestmark = pytest.mark.long
SEED = 41  # every kind, 1 to 3 processes, both ways to save, and few process starts


@pytest.mark.parametrize("script", fault_campaign.SCRIPTS)
def test_every_kind_of_fault(tmp_path, script):
    numbers, _ = fault_campaign.SCRIPTS[script]
    faults = 10 if len(numbers) > 1 else 7  # four ranks take long to start
    flags = ["--faults", str(faults), "--seed", str(SEED), "--script", script, "--json", "f.json"]
    argv = [sys.executable, ROOT / "tests/fault_campaign.py", *flags]
    result = subprocess.run(argv, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "f.json").read_text())
    rows = summary["rows"]
    assert summary["left_out"] in ([], ["disk full"] if os.geteuid() else [])
    assert {row["kind"] for row in rows} == {*fault_campaign.KINDS} - {*summary["left_out"]}
    assert {row["world_size"] for row in rows} == {*numbers}
    assert [row["number"] for row in rows] == [*range(faults)]
    for row in rows:
        assert row["verdict"] == "ok"
        assert row["kind"] == "pause a rank" or row["resumed_step"] == row["saved_step"]
        assert 0 <= row["lost_steps"] <= row["steps_at_risk"] <= 3 * summary["save_every_steps"]
    assert sum(row["lost_steps"] for row in rows) > 0  # they did strike


def fault(kind: str, **change) -> fault_campaign.Fault:
    number = fault_campaign.KINDS.index(kind)
    return replace(fault_campaign.draw(SEED, number, fault_campaign.KINDS), in_save=False, **change)


def test_other_weights_are_found(tmp_path):
    row = fault_campaign.suffer(
        fault("pause a rank", world_size=1, seconds_paused=0), tmp_path / "run", "not these", SEVERAL[0]
    )
    assert row["verdict"].startswith("other weights; see")


def test_a_hang_is_found_and_ended(tmp_path, monkeypatch):
    """The other rank waits far longer for the stopped one than the campaign allows."""
    monkeypatch.setattr(fault_campaign, "ENDS_WITHIN_SECONDS", 2)
    monkeypatch.setitem(fault_campaign.STOPPED_RANK, "COLLECTIVE_TIMEOUT_SECONDS", "600")
    row = fault_campaign.suffer(fault("stop a rank", world_size=2, rank=1), tmp_path / "run", "any", SEVERAL[0])
    assert row["verdict"].startswith("hung: not over 2 s after the fault")


def test_a_fault_is_the_same_however_many_are_drawn():
    drawn = [fault_campaign.draw(7, number, fault_campaign.KINDS) for number in range(200)]
    assert drawn[3] == fault_campaign.draw(7, 3, fault_campaign.KINDS)
    assert {f.kind for f in drawn} == {*fault_campaign.KINDS}
    assert {f.world_size for f in drawn} == {1, 2, 3}
    assert min(f.world_size for f in drawn if f.kind == "stop a rank") == 2
    assert all(f.rank < f.world_size and 1 <= f.step < fault_campaign.STEPS - 8 for f in drawn)
