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
    in_long,
    kill_all,
    launch,
    run,
    start,
    steps_logged,
    tiny_flags,
    train,
    write_tiny,
)
from support.two_hosts import ip, two_hosts

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
        self, script: str, index: int, *extra: str, mounts: dict | None = None, **env: str
    ) -> subprocess.Popen:
        """Start a launch script on host `index`; `mounts` are folders and files that this host alone has elsewhere."""
        process_folder = self.folder / f"process-{len(self.processes)}"
        write_tiny(process_folder)
        settings = {
            "RDZV_ENDPOINT": f"{self.hosts[0].address}:{PORT}",
            "MASTER_ADDR": self.hosts[0].address,
            "NODE_RANK": str(index),
            "NPROC_PER_NODE": "1",
            "PATH": PATH,
            "PREFLIGHT": "0",
        }
        settings |= {"SCRIPT": str(self.folder / "hold.py"), "JOIN_TIMEOUT_SECONDS": "60", **env}
        argv = [str(LAUNCH / script), *flags(self.folder), *extra]
        if mounts:  # ip netns exec gives the host mounts of its own
            commands = [f"mount --bind {own} {place}" for place, own in mounts.items()]
            # the script has to find the interface itself
            shell = " && ".join([*commands, 'unset GLOO_SOCKET_IFNAME && exec "$@"'])
            argv = ["sh", "-c", shell, "sh", *argv]
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
    """The hosts' own names are on the loopback, as on Debian, and on the first one so is node0."""
    env = {"NNODES": "2", "COLLECTIVE_TIMEOUT_SECONDS": "15", "MASTER_ADDR": "node0"}
    name = socket.gethostname()
    first = job.hosts[0]
    texts = [f"127.0.1.1 {name} node0\n", f"127.0.1.1 {name}\n{first.address} node0\n"]
    mounts = [{"/etc/hosts": job.folder / f"hosts-{i}"} for i in (0, 1)]
    for mount, text in zip(mounts, texts, strict=True):
        mount["/etc/hosts"].write_text(f"127.0.0.1 localhost\n{text}", encoding="utf-8")
    ip("-n", first.name, "route", "add", "default", "dev", "eth0")

    def start_both(*extra: str, **second: str) -> list[subprocess.Popen]:
        envs = [env, env | second]
        return [job.start("multi_node.sh", i, *extra, mounts=mounts[i], **envs[i]) for i in (0, 1)]

    both = start_both()
    assert job.trains_on(2, 1)
    job.hosts[1].cable("down")
    assert [result.code for result in map(ended, both)] == [1, 1]

    job.hosts[1].cable("up")
    (job.folder / "hold").unlink()
    both = start_both("--resume", **clock_ahead(job.folder))
    for result in map(ended, both):
        assert result.code == 0, result.err
    summary = assert_undisturbed(job, alone)
    assert summary["world_size"] == 2
    assert summary["weights_sha256"] == pair.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("script", "nodes"),
    [("multi_node.sh", "2"), in_long("elastic.sh", "2:2")],
)
def test_files_in_the_folder_of_the_run_save_and_stop_it_on_two_nodes(job, script, nodes):
    env = {"NNODES": nodes, "SCRIPT": str(ROOT / "05_ddp/train.py")}
    both = [job.start(script, i, "--steps=100000", "--save-every=0", **env) for i in (0, 1)]
    run_folder = job.folder / "run"
    assert holds(both[0], lambda: steps_logged(job.folder) > 2)
    (run_folder / "save").touch()
    assert holds(both[0], lambda: list(run_folder.glob("step-*[0-9]")))
    (run_folder / "stop").touch()
    for result in map(ended, both):
        assert result.code == 0, result.err
    summary = Result(0, "", "", job.folder).summary
    assert summary["world_size"] == 2
    saved, stopped = sorted(path.name for path in run_folder.glob("step-*[0-9]"))
    assert saved < stopped == f"step-{summary['steps']:08d}"


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
    both += [job.start("multi_node.sh", 1, "--resume", mounts={disks[0]: disks[1]}, NNODES="2")]
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


@pytest.mark.long
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


@pytest.mark.long
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
    both = [job.start("multi_node.sh", 0, **env)]
    both += [job.start("multi_node.sh", 1, MASTER_ADDR="10.77.0.77", **env)]
    alone, nobody = map(ended, both)
    assert alone.code == 1
    assert "1/2 clients joined" in alone.err.splitlines()[-1]
    assert_refused(nobody, "no answer from MASTER_ADDR=10.77.0.77")


def test_torchrun_dies_of_sigusr1(tmp_path):
    process = launch("05_ddp/train.py", tmp_path, "--steps", 100000, nproc=1)
    assert holds(process, lambda: steps_logged(tmp_path) > 2)
    process.send_signal(signal.SIGUSR1)
    assert finish(process, tmp_path).code == -signal.SIGUSR1


def test_sigusr1_that_is_handed_on_ends_in_a_save_and_in_75(tmp_path):
    write_tiny(tmp_path)
    argv = [str(LAUNCH / "single_node.sh"), *flags(tmp_path), "--steps", "100000"]
    env = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1"}  # torchrun's --signals-to-handle
    process = start(argv, tmp_path, NPROC_PER_NODE="2", PATH=PATH, **env)
    assert holds(process, lambda: steps_logged(tmp_path) > 2)
    process.send_signal(signal.SIGUSR1)
    result = finish(process, tmp_path)
    assert result.code == 75, result.err
    assert list((tmp_path / "run").glob("step-*[0-9]"))


WRONG = {
    "single_node.sh": [
        "SCRIPT=none.py",
        "NPROC_PER_NODE=two",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1h",
        "RUN_DIR_LOCK_SECONDS=2m",
    ],
    "multi_node.sh": [
        "NNODES=1:2",
        "NODE_RANK=",
        "NODE_RANK=2",
        "MASTER_ADDR=",
        "MASTER_ADDR=node0.invalid",
        "MASTER_PORT=70000",
        "JOIN_TIMEOUT_SECONDS=5m",
        "PREFLIGHT=no",
    ],
    "elastic.sh": [
        "NNODES=3:2",
        "HEARTBEAT_SECONDS=0",
        "MAX_RESTARTS=x",
        "RDZV_ENDPOINT=localhost",
        "RDZV_ENDPOINT=localhost:70000",
        "RDZV_ENDPOINT=node0.invalid:29400",
    ],
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
    env |= {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "NPROC_PER_NODE": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PATH": PATH, name: value}
    word = "timeout" if "TIMEOUT" in name or "HEARTBEAT" in name else name
    result = finish(start([str(LAUNCH / script)], tmp_path, **env), tmp_path)
    assert_refused(result, *(["torchrun"] if name == "PATH" else [word, value]))


def test_slices_of_a_gpu_get_one_process(tmp_path):
    """CUDA shows a process one MIG slice. nvidia-smi lists them where no variable does."""
    slices = [f"  MIG 3g.71gb Device {i}: (UUID: MIG-{i})" for i in range(2)]
    listed = "\n".join(["GPU 0: NVIDIA H200 (UUID: GPU-0)", *slices])
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    without_variable = ["env", "--unset=CUDA_VISIBLE_DEVICES", f"PATH={tmp_path}:{PATH}"]
    with_variable = ["env", "CUDA_VISIBLE_DEVICES=MIG-0,MIG-1", f"PATH={PATH}"]
    for settings in (without_variable, with_variable):
        argv = [*settings, str(LAUNCH / "single_node.sh")]
        result = finish(start(argv, tmp_path, NPROC_PER_NODE="2"), tmp_path)
        assert_refused(result, "2 processes on 2 MIG slices", "NPROC_PER_NODE=1")


@pytest.mark.parametrize("script", ["multi_node.sh", "elastic.sh"])
def test_a_port_in_use(tmp_path, script):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        env = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env["PREFLIGHT"] = "0"
        if script == "elastic.sh":
            env = {"NNODES": "1:2", "RDZV_ENDPOINT": f"127.0.0.1:{port}"}
        process = start([str(LAUNCH / script)], tmp_path, NPROC_PER_NODE="1", PATH=PATH, **env)
        result = finish(process, tmp_path)
    assert result.code != 0
    last = result.err.splitlines()[-1]
    assert " error: " in last
    assert port in last
    assert "address already in use" in last.lower()


def test_the_host_whose_own_name_is_on_the_loopback(tmp_path):
    """As on Debian, where it is 127.0.1.1: it hosts the elastic job under the name given."""
    with socket.create_server(("127.0.1.1", 0)) as server:
        endpoint = f"127.0.1.1:{server.getsockname()[1]}"
    env = {"NNODES": "1:2", "LAST_CALL_SECONDS": "1", "RDZV_ENDPOINT": endpoint}
    env |= {"NPROC_PER_NODE": "1", "PATH": PATH, "SCRIPT": str(tmp_path / "address.py")}
    (tmp_path / "address.py").write_text(
        "import os; print(os.environ['MASTER_ADDR'])", encoding="utf-8"
    )
    result = finish(start([str(LAUNCH / "elastic.sh")], tmp_path, **env), tmp_path)
    assert (result.code, result.out.split()[-1]) == (0, "127.0.1.1"), result.err
