"""The files of launch/torchrun, run as they are: on one node, and on two hosts that come and go, their cable cut."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import (
    ROOT,
    Result,
    assert_refused,
    descendants,
    error_lines,
    finish,
    holds,
    kill_all,
    launch,
    run,
    start,
    steps_logged,
    tiny_flags,
    train,
    write_tiny,
)
from support.two_hosts import two_hosts

pytestmark = pytest.mark.launch
LAUNCH = ROOT / "launch/torchrun"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the scripts call python and torchrun
PORT = "29400"  # each host has its own

# the real script, waiting after its fourth step while the file `hold` is there: faults then find it in mid-training
HOLD = f"""
import runpy, sys, time
from pathlib import Path
import torch, torch.distributed as dist
sys.path.insert(0, {str(ROOT)!r})
from common import runtime
requested, folder, steps = runtime.stop_requested, Path(__file__).parent, 0
def stop_requested():
    global steps
    steps += 1
    told = False
    while True:
        stop, held = requested(), torch.tensor(int((folder / "hold").exists()))
        dist.all_reduce(held)
        if stop or not held or steps < 4:
            return stop
        if not told and dist.get_rank() == 0:
            (folder / "worlds").open("a").write(f"{{dist.get_world_size()}}\\n")
        told = True
        time.sleep(0.02)
runtime.stop_requested = stop_requested
sys.argv[0] = {str(ROOT / "05_ddp/train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# a clock that is wrong from the first look at it; libfaketime cannot do that to Python's sleep
SKEW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec += 400;
  return result;
}
"""
needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="clocks are set apart by a library that gcc makes"
)


def clock_ahead(folder: Path) -> dict[str, str]:
    """The environment of a host whose clock is 400 s ahead."""
    (folder / "skew.c").write_text(SKEW, encoding="utf-8")
    library = str(folder / "skew.so")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, folder / "skew.c"], check=True, timeout=600
    )
    return {"LD_PRELOAD": library}


def flags(folder: Path) -> list[str]:
    given = [
        *tiny_flags(folder),
        "--deterministic",
        "--save-every",
        2,
        "--json",
        folder / "summary.json",
    ]
    return [*map(str, given)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Result:
    """The undisturbed run in one process."""
    return train("05_ddp/train.py", tmp_path_factory.mktemp("alone"), "--deterministic")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Result:
    """The undisturbed run by single_node.sh in two."""
    folder = tmp_path_factory.mktemp("pair")
    write_tiny(folder)
    process = start(
        [str(LAUNCH / "single_node.sh"), *flags(folder)], folder, NPROC_PER_NODE="2", PATH=PATH
    )
    result = finish(process, folder)
    assert result.code == 0, result.err
    return result


class Job:
    """One run in `folder` on two hosts, which share it as nodes share a file system."""

    def __init__(self, hosts, folder: Path) -> None:
        self.hosts, self.folder, self.processes = hosts, folder, []
        (folder / "hold.py").write_text(HOLD, encoding="utf-8")
        (folder / "hold").touch()

    def start(
        self, script: str, index: int, *extra: str, disk: Path | None = None, **env: str
    ) -> subprocess.Popen:
        """Start a launch script on host `index`; with `disk`, that folder is the run's on this host alone."""
        process_folder = self.folder / f"process-{len(self.processes)}"
        write_tiny(process_folder)
        settings = {
            "RDZV_ENDPOINT": f"{self.hosts[0].address}:{PORT}",
            "NPROC_PER_NODE": "1",
            "PATH": PATH,
        }
        settings |= {"SCRIPT": str(self.folder / "hold.py"), "JOIN_TIMEOUT_SECONDS": "60", **env}
        argv = [str(LAUNCH / script), *flags(self.folder), *extra]
        if disk:  # ip netns exec gives the host mounts of its own
            mount = f'mount --bind {disk} {self.folder / "run"} && exec "$@"'
            argv = ["sh", "-c", mount, "sh", *argv]
        process = self.hosts[index].start(argv, process_folder, **settings)
        process.folder = process_folder
        self.processes.append(process)
        return process

    def trains_on(self, world_size: int, count: int) -> bool:
        """Wait until ranks have started for the count-th time and trained, as a world of that size."""

        def reached() -> bool:
            file = self.folder / "worlds"
            worlds = file.read_text(encoding="utf-8").split() if file.exists() else []
            return len(worlds) >= count and worlds[-1] == str(world_size)

        return holds(self.processes[0], reached)


@pytest.fixture
def job(tmp_path):
    with two_hosts() as hosts:
        job = Job(hosts, tmp_path)
        try:
            yield job
        finally:
            for process in job.processes:
                kill_all(process)


def ended(process: subprocess.Popen, timeout: float = 600) -> Result:
    return finish(process, process.folder, timeout)


def assert_undisturbed(job: Job, reference: Result) -> dict:
    whole = Result(0, "", "", job.folder)
    assert whole.column("step") == reference.column("step")
    assert whole.column("loss") == pytest.approx(reference.column("loss"), rel=1e-5)
    assert whole.summary["last_loss"] == pytest.approx(reference.summary["last_loss"], rel=1e-5)
    return whole.summary


def test_one_node(alone, pair):
    assert pair.summary["world_size"] == 2
    assert pair.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)


@needs_gcc
def test_two_nodes_whose_link_is_cut_and_that_resume_with_clocks_apart(job, alone, pair):
    env = {"NNODES": "2", "COLLECTIVE_TIMEOUT_SECONDS": "15"}
    both = [job.start("multi_node.sh", i, **env) for i in (0, 1)]
    assert job.trains_on(2, 1)
    job.hosts[1].cable("down")
    host, other = map(ended, both)
    # on the second host torchrun asks the first without end
    assert (host.code, other.code) == (1, -9)
    assert f"error: RDZV_ENDPOINT={job.hosts[0].address}:{PORT}: no answer" in other.err

    job.hosts[1].cable("up")
    (job.folder / "hold").unlink()
    both = [job.start("multi_node.sh", 0, "--resume", **env)]
    both += [job.start("multi_node.sh", 1, "--resume", **clock_ahead(job.folder), **env)]
    for result in map(ended, both):
        assert result.code == 0, result.err
    summary = assert_undisturbed(job, alone)
    assert summary["world_size"] == 2
    assert summary["weights_sha256"] == pair.summary["weights_sha256"]


def test_inference_on_one_node(tmp_path):
    (tmp_path / "prompts.txt").write_text("for\nimport os\n", encoding="utf-8")
    asked = [
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--max-new-tokens",
        "8",
        "--device",
        "cpu",
        "--dtype",
        "fp32",
    ]
    asked += ["--model", "nano", "--json", "summary.json"]
    alone = run("09_inference/infer_70b.py", tmp_path / "alone", *asked)
    assert alone.code == 0, alone.err
    result = finish(
        start([str(LAUNCH / "infer_70b.sh"), *asked], tmp_path, NPROC_PER_NODE="2", PATH=PATH),
        tmp_path,
    )
    assert result.code == 0, result.err
    assert result.summary["world_size"] == 2
    assert result.summary["token_ids"] == alone.summary["token_ids"]


def test_hosts_with_a_disk_each_are_refused(job):
    """The same --run-dir on both, but not the same folder: nothing is trained, nothing saved, nothing deleted."""
    disks = [job.folder / "run", job.folder / "disk-of-host1"]
    for disk in disks:
        for name in ("step-00000002", "step-00000004.tmp"):
            (disk / name).mkdir(parents=True)
            (disk / name / "__0_0.distcp").write_text("half of a checkpoint", encoding="utf-8")
    before = {path.relative_to(job.folder) for disk in disks for path in disk.rglob("*")}
    both = [job.start("multi_node.sh", 0, "--resume", NNODES="2")]
    both += [job.start("multi_node.sh", 1, "--resume", NNODES="2", disk=disks[1])]
    results = list(map(ended, both))
    assert [result.code for result in results] == [1, 1]
    told = [
        line for result in results for line in error_lines(result) if " error: --run-dir" in line
    ]
    assert 1 <= len(told) <= 2  # no torchrun ends the other host's ranks at once
    assert all(str(disks[0]) in line for line in told)
    after = {path.relative_to(job.folder) for disk in disks for path in disk.rglob("*")}
    assert {path.name for path in after - before} <= {".lock.lease"}  # rank 0's
    assert not before - after


def test_elastic(job, alone):
    """One restart is allowed and one rank fails: the nodes that come and go may not count."""
    env = {"NNODES": "1:2", "MAX_RESTARTS": "1", "HEARTBEAT_SECONDS": "2", "LAST_CALL_SECONDS": "5"}
    env["COLLECTIVE_TIMEOUT_SECONDS"] = "60"
    stays = job.start("elastic.sh", 0, **env)
    goes = job.start("elastic.sh", 1, **env)
    assert job.trains_on(2, 1)
    (rank,) = [p for p in descendants(goes) if "LOCAL_RANK" in p.environ()]
    rank.kill()
    assert job.trains_on(2, 2)
    goes.kill()
    assert job.trains_on(1, 3)
    comes = job.start("elastic.sh", 1, **env)
    assert job.trains_on(2, 4)
    (job.folder / "hold").unlink()
    for process in (stays, comes):
        result = ended(process)
        assert result.code == 0, result.err
    assert assert_undisturbed(job, alone)["world_size"] == 2


@needs_gcc
def test_no_node_trains_in_a_group_smaller_than_min(job):
    """The node whose clock is ahead takes the other for dead."""
    env = {
        "NNODES": "2:2",
        "HEARTBEAT_SECONDS": "2",
        "JOIN_TIMEOUT_SECONDS": "30",
        "COLLECTIVE_TIMEOUT_SECONDS": "15",
    }
    both = [
        job.start("elastic.sh", 0, **env, **clock_ahead(job.folder)),
        job.start("elastic.sh", 1, **env),
    ]
    host, other = map(ended, both)
    assert host.code == 1
    assert "elastic.sh: error: 1 of at least 2 nodes" in host.err.splitlines()[-1]
    assert other.code != 0
    assert not (job.folder / "run").exists()


def test_a_node_that_does_not_come(job):
    env = {"NNODES": "2", "JOIN_TIMEOUT_SECONDS": "1"}
    alone = ended(job.start("multi_node.sh", 0, **env))
    assert alone.code == 1
    assert "RendezvousTimeoutError" in alone.err.splitlines()[-1]
    nobody = ended(job.start("multi_node.sh", 1, RDZV_ENDPOINT="10.77.0.77:29400", **env))
    assert_refused(nobody, "RDZV_ENDPOINT=10.77.0.77:29400", "no answer")


@pytest.mark.parametrize("handled", [True, False])
def test_torchrun_dies_of_sigusr1_unless_it_is_told_to_hand_it_on(tmp_path, handled):
    # torchrun's --signals-to-handle
    env = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1"} if handled else {}
    process = launch("05_ddp/train.py", tmp_path, "--steps", 100000, nproc=1, **env)
    assert holds(process, lambda: steps_logged(tmp_path) > 2)
    process.send_signal(signal.SIGUSR1)
    result = finish(process, tmp_path)
    assert result.code == (1 if handled else -signal.SIGUSR1)
    if handled:
        assert list((tmp_path / "run").glob("step-*[0-9]"))


WRONG = {
    "single_node.sh": ["SCRIPT=none.py", "NPROC_PER_NODE=two", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1h"],
    "multi_node.sh": [
        *(
            "NNODES=1:2",
            "RDZV_ENDPOINT=",
            "RDZV_ENDPOINT=localhost",
            "RDZV_ENDPOINT=localhost:70000",
        ),
        *(
            "RDZV_ENDPOINT=node0.invalid:29400",
            "JOIN_TIMEOUT_SECONDS=5m",
            "RUN_DIR_LOCK_SECONDS=2m",
        ),
    ],
    "elastic.sh": ["NNODES=3:2", "HEARTBEAT_SECONDS=0", "MAX_RESTARTS=x"],
}
# without torchrun; without a GPU that is seen, nothing trains
EVERYWHERE = ["PATH=/usr/bin:/bin", "NPROC_PER_NODE="]


@pytest.mark.parametrize(
    ("script", "given"),
    [(script, given) for script in WRONG for given in WRONG[script] + EVERYWHERE],
)
def test_wrong_settings(tmp_path, script, given):
    name, value = given.split("=")
    env = {"NNODES": "1:2" if script == "elastic.sh" else "2", "RDZV_ENDPOINT": "localhost:29400"}
    env |= {"NPROC_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": PATH, name: value}
    word = "timeout" if "TIMEOUT" in name or "HEARTBEAT" in name else name
    result = finish(start([str(LAUNCH / script)], tmp_path, **env), tmp_path)
    assert_refused(result, *(["torchrun"] if name == "PATH" else [word, value]))


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        env = {"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV_ENDPOINT": endpoint, "PATH": PATH}
        process = start([str(LAUNCH / "multi_node.sh")], tmp_path, **env)
        assert_refused(finish(process, tmp_path), "cannot be used here (Address already in use)")


def test_the_host_whose_own_name_is_on_the_loopback(tmp_path):
    """As on Debian, where it is 127.0.1.1: it hosts the meeting, under the name that was given."""
    with socket.create_server(("127.0.1.1", 0)) as server:
        endpoint = f"127.0.1.1:{server.getsockname()[1]}"
    check = [sys.executable, str(LAUNCH / "endpoint.py"), "check", endpoint, "2"]
    result = finish(start(check, tmp_path), tmp_path)
    assert (result.code, result.out.split()) == (0, ["1", "127.0.1.1"])
