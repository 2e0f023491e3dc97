"""tests/fault_campaign.py: every kind of fault, in each script that trains on several processes."""

import os
import subprocess
import sys

import fault_campaign
import pytest
from support.harness import ROOT, clean_env

pytestmark = pytest.mark.long


@pytest.mark.parametrize("script", fault_campaign.SCRIPTS)
def test_every_kind_of_fault(script):
    faults = 7 if "train_3d" in script else 10  # its four ranks take long to start
    # this seed has 1 to 3 processes, both ways to save, and few process starts
    flags = ["--faults", str(faults), "--seed", "41", "--script", script]
    argv = [sys.executable, ROOT / "tests/fault_campaign.py", *flags]
    result = subprocess.run(argv, env=clean_env(), capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    for kind in fault_campaign.KINDS:
        assert kind in result.stdout
    assert "left out" not in result.stdout or os.geteuid()
