"""tests/support/warm.py: a script forked from a warm process is the script that a shell or torchrun starts."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support import warm
from support.harness import BASELINE, ROOT, SEVERAL, case, run, train

BOTH_WAYS = [case(BASELINE, None)] + [case(script, 2) for script in SEVERAL]
TIMED = {"tokens_per_second", "mfu", "seconds", "peak_memory_bytes", "data_wait_share", "slowest_rank"}
TIMED |= {"slowest_rank_lag", "memory_active_bytes", "memory_reserved_bytes"}


def untimed(record: dict) -> dict:
    return {key: value for key, value in record.items() if key not in TIMED}


@pytest.mark.parametrize(("script", "n"), BOTH_WAYS)
def test_training_ends_equal_to_the_bit(tmp_path, script, n):
    flags = ("--deterministic", "--save-every", 7, "--run-dir", "run")
    cold, forked = (train(script, tmp_path / str(w), *flags, nproc=n, warm=w) for w in (False, True))
    assert forked.summary["weights_sha256"] == cold.summary["weights_sha256"]
    assert untimed(forked.summary) == untimed(cold.summary)
    assert [untimed(record) for record in forked.records] == [untimed(record) for record in cold.records]
    left = [sorted(p.name for p in (result.folder / "run").rglob("*")) for result in (forked, cold)]
    events = "events.out.tfevents"  # their names tell time and process
    assert [n for n in left[0] if not n.startswith(events)] == [n for n in left[1] if not n.startswith(events)]


def test_a_lesson_ends_equal(tmp_path):
    flags = ("--device", "cpu", "--json", "s.json", "--run-dir", "run")
    cold, forked = (run("03_linear_regression/train.py", tmp_path / str(w), *flags, warm=w) for w in (False, True))
    told = [untimed(json.loads((result.folder / "s.json").read_text())) for result in (cold, forked)]
    # LAPACK's last bits follow where the allocator has put its arrays
    for name in ("least_squares_slope", "least_squares_intercept"):
        assert told[1].pop(name) == pytest.approx(told[0].pop(name), rel=1e-12)
    assert told[1] == told[0]


TELLS = """
import json, os, random, signal, sys, threading
import numpy, torch
signals = [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)]
rank = os.environ.get("RANK")
known = {key: os.environ.get(key) for key in
         ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MINE", "HOME")}
told = dict(argv=sys.argv, name=__name__, file=__file__, cwd=os.getcwd(), path=sys.path[0], signals=signals,
            environment=known, torch_threads=torch.get_num_threads(),
            modules="transformers" in sys.modules, python=sys.executable, leads=os.getpid() == os.getsid(0))
own = dict(threads=threading.active_count(), tasks=len(os.listdir("/proc/self/task")),
           drawn=[random.random(), numpy.random.rand(), torch.rand(()).item()],
           open=sorted(os.listdir("/proc/self/fd")))
open(f"told-{rank}.json", "w").write(json.dumps([told, own]))
print("out", rank)
print("err", rank, file=sys.stderr)
"""


@pytest.mark.parametrize("n", [None, 2])
def test_a_job_finds_what_a_shell_gives_it(tmp_path, n):
    told, own = {}, []
    for how in (False, True):
        folder = tmp_path / "job"
        folder.mkdir(exist_ok=True)
        (folder / "tells.py").write_text(TELLS)
        result = run(folder / "tells.py", folder, "--a flag", 7, nproc=n, warm=how, MINE="yes")
        assert result.code == 0, result.err
        ranks = [None] if n is None else ["0", "1"]
        assert sorted(result.out.splitlines()) == [f"out {rank}" for rank in ranks]
        assert [line for line in sorted(result.err.splitlines()) if line.startswith("err")] == [
            f"err {rank}" for rank in ranks
        ]
        files = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in ranks]
        told[how] = [first for first, _ in files]
        own += [second for _, second in files]
    for record in (*told[True], *told[False]):
        del record["leads"], record["environment"]["MASTER_ADDR"]
    for forked, cold in zip(told[True], told[False], strict=True):
        assert {key: (forked[key], cold[key]) for key in cold if forked[key] != cold[key]} == {}
    assert {one["threads"] for one in own} == {1}
    assert len({value for one in own for value in one["drawn"]}) == 3 * len(own)  # no two draw the same
    assert own[-1]["tasks"] == 1
    if n is None:
        assert own[-1]["open"] == own[0]["open"] == ["0", "1", "2", "3"]  # 3 is the listing itself


ENDS = {
    "return": ("pass", 0),
    "exit": ("sys.exit(7)", 7),
    "raise": ("raise ValueError('no')", 1),
    "kill": ("os.kill(os.getpid(), 9)", -9),
    "at exit": ("import atexit; atexit.register(os._exit, 5)", 5),
}


@pytest.mark.parametrize("case", ENDS)
def test_exit_codes(tmp_path, case):
    code, expected = ENDS[case]
    (tmp_path / "ends.py").write_text(f"import os, sys\nprint('started')\nsys.stdout.flush()\n{code}\n")
    for how in (False, True):
        result = run(tmp_path / "ends.py", tmp_path, warm=how)
        assert (result.code, result.out) == (expected, "started\n")
        assert ("ValueError: no" in result.err) == (case == "raise")


def test_a_rank_that_fails_ends_the_others(tmp_path):
    (tmp_path / "fails.py").write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    raise ValueError('rank 1')\nsignal.pause()\n"
    )
    result = run(tmp_path / "fails.py", tmp_path, nproc=3)
    assert result.code == 1
    assert "ValueError: rank 1" in result.err


SLEEPS = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
open("pids", "a").write(f"{os.getpid()} {child.pid} ")
END
"""


def alive(folder) -> list[int]:
    pids = [int(word) for word in (folder / "pids").read_text().split()]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("n", [None, 2])
def test_a_timeout_kills_the_whole_job(tmp_path, n):
    (tmp_path / "sleeps.py").write_text(SLEEPS.replace("END", "signal.pause()"))
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path / "sleeps.py", tmp_path, nproc=n, timeout=5)
    assert len((tmp_path / "pids").read_text().split()) == 2 * (n or 1)
    assert not alive(tmp_path)


def test_what_a_job_leaves_behind_is_found_and_killed(tmp_path):
    (tmp_path / "leaves.py").write_text(SLEEPS.replace("END", ""))
    with pytest.raises(AssertionError, match=r"left running: .*signal.pause"):
        run(tmp_path / "leaves.py", tmp_path)
    assert not alive(tmp_path)


def test_nothing_survives_the_tests_that_started_it(tmp_path):
    """pytest is killed: its server and the server's jobs go too."""
    (tmp_path / "sleeps.py").write_text(SLEEPS.replace("END", "signal.pause()"))
    (tmp_path / "tests.py").write_text(
        f"import sys\nfrom pathlib import Path\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from support.harness import run\nrun(Path('sleeps.py').absolute(), Path('.').absolute(), timeout=600)\n"
    )
    client = subprocess.Popen([sys.executable, "tests.py"], cwd=tmp_path)
    deadline = time.monotonic() + 600
    while not (tmp_path / "pids").exists() or len(alive(tmp_path)) < 2:
        assert time.monotonic() < deadline, "the job never started"
        time.sleep(0.01)  # between two looks
    server = psutil.Process(client.pid).children()
    client.send_signal(signal.SIGKILL)
    client.wait(timeout=600)
    gone, left = psutil.wait_procs(server, timeout=600)
    assert (len(gone), left) == (1, [])
    while alive(tmp_path):
        assert time.monotonic() < deadline, "the job survived"
        time.sleep(0.01)


def test_what_a_library_reads_when_it_is_loaded_needs_a_process_of_its_own():
    assert warm.can_take({"RANK": "0", "HF_HUB_OFFLINE": "1"})
    for name in ("OMP_NUM_THREADS", "PYTHONPATH", "LD_PRELOAD", "LD_DEBUG", "TORCH_LOGS", "CUDA_VISIBLE_DEVICES"):
        assert not warm.can_take({name: "2"})
