"""tests/support/warm.py: a script forked from a warm process is the script that a shell or torchrun starts."""

import psutil
import pytest
from support.harness import BASELINE, SEVERAL, checkpoints, in_long, run, train

# what a clock or the allocator says differs from run to run
MEASURED = ("second", "mfu", "bytes", "data_wait_share", "slowest_rank")


def computed(record: dict) -> dict:
    return {
        key: value for key, value in record.items() if not any(word in key for word in MEASURED)
    }


@pytest.mark.parametrize(("script", "n"), [(BASELINE, None), in_long(SEVERAL[0], 2)])
def test_training_ends_equal_to_the_bit(tmp_path, script, n):
    flags = ("--deterministic", "--save-every", 7, "--run-dir", "run")
    cold, forked = (
        train(script, tmp_path / str(w), *flags, nproc=n, warm=w) for w in (False, True)
    )
    assert computed(forked.summary) == computed(cold.summary)
    assert [computed(record) for record in forked.records] == [
        computed(record) for record in cold.records
    ]
    assert checkpoints(forked.folder) == checkpoints(cold.folder)


SLEEPS = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
open("pids.tmp", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.tmp", "pids")
"""


@pytest.mark.full
def test_what_a_job_leaves_behind_is_found_and_killed(tmp_path):
    (tmp_path / "leaves.py").write_text(SLEEPS, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"left running: .*signal.pause"):
        run(tmp_path / "leaves.py", tmp_path)
    for pid in map(int, (tmp_path / "pids").read_text(encoding="utf-8").split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
