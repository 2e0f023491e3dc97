"""tests/fault_campaign.py: every kind of fault, in each script that trains on several processes."""

import json
import os
import subprocess
import sys

import fault_campaign
import pytest
from support.harness import ROOT, clean_env

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
    for row in rows:
        assert row["verdict"] == "ok"
        assert row["kind"] == "pause a rank" or row["resumed_step"] == row["saved_step"]
        assert 0 <= row["lost_steps"] <= row["steps_at_risk"] <= 3 * summary["save_every_steps"]
    assert sum(row["lost_steps"] for row in rows) > 0  # they did strike
