"""DeepSpeed's own launcher, alone and by launch/deepspeed/hostfile.sh: on one host, on two, stopped and resumed."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.harness import ROOT, Result, finish, holds, kill_all, start, steps_logged, tiny_flags, train, write_tiny
from support.slurm_cluster import free_ports
from support.two_hosts import two_hosts

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.launch
LAUNCH = ROOT / "launch/deepspeed/hostfile.sh"
SCRIPT = "06_fsdp_zero/train_zero.py"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the launcher is called deepspeed


def flags(folder: Path) -> list[str]:
    """Of the same run as alone's, whatever folder its processes start in."""
    write_tiny(folder)
    given = [*tiny_flags(folder), "--model", folder / "tiny.json", "--json", folder / "summary.json", "--stage", 3]
    return [*map(str, given)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Result:
    """The run of one process that no launcher has started."""
    return train(SCRIPT, tmp_path_factory.mktemp("alone"), "--stage", 3)


def assert_same(folder: Path, theirs: Result) -> None:
    ours = Result(0, "", "", folder)
    assert ours.summary["world_size"] == 2
    assert ours.column("loss") == pytest.approx(theirs.column("loss"), rel=1e-5)


def test_the_launcher_on_one_host(tmp_path, alone):
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus=2", f"--master_port={free_ports(1)[0]}"]
    process = start([*launcher, str(ROOT / SCRIPT), *flags(tmp_path)], tmp_path, PATH=PATH)
    result = finish(process, tmp_path)
    assert result.code == 0, result.err
    assert_same(tmp_path, alone)


def test_two_hosts(tmp_path, alone):
    """Neither has a server for ssh."""
    with two_hosts() as hosts:
        (tmp_path / "hosts").write_text("".join(f"{host.address} slots=1  # as of today\n" for host in hosts))
        given = flags(tmp_path)
        processes = []
        try:
            for host in hosts:
                folder = tmp_path / host.name
                folder.mkdir()
                process = host.start([str(LAUNCH), *given], folder, PATH=PATH, HOSTFILE=str(tmp_path / "hosts"))
                processes.append((process, folder))
            results = [finish(process, folder) for process, folder in processes]
        finally:
            for process, _ in processes:
                kill_all(process)
    assert [result.code for result in results] == [0, 0], [result.err for result in results]
    assert "--node_rank 0 --master_addr 10.77.0.9 --master_port 29500" in results[0].out
    assert "--node_rank 1 --master_addr 10.77.0.9 --master_port 29500" in results[1].out
    assert_same(tmp_path, alone)


def test_stopped_it_saves_and_goes_on(tmp_path, alone):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    env = {"PATH": PATH, "HOSTFILE": "hosts", "MASTER_PORT": str(free_ports(1)[0])}
    long = [*flags(tmp_path), "--steps", "100000"]
    process = start([str(LAUNCH), *long], tmp_path, **env)
    assert holds(process, lambda: steps_logged(tmp_path) > 2)
    process.send_signal(signal.SIGTERM)
    result = finish(process, tmp_path)
    assert result.code == 75, result.err
    step = int(re.search(r"signal 15: saved at step (\d+); the same command with --resume goes on", result.out)[1])
    more = [*flags(tmp_path), "--resume", "--steps", str(step + 2)]
    resumed = finish(start([str(LAUNCH), *more], tmp_path, **env), tmp_path)
    assert resumed.code == 0, resumed.err
    assert Result(0, "", "", tmp_path).column("step")[-2] == step + 2


WRONG = [
    ({}, "HOSTFILE is not set: a file with a line such as 'node0 slots=8' per host"),
    ({"HOSTFILE": "none"}, "HOSTFILE=none: no such file"),
    ({"HOSTFILE": "empty"}, "HOSTFILE=empty names no host"),
    ({"HOSTFILE": "others"}, "HOSTFILE=others does not name this host"),
    ({"HOSTFILE": "others", "NODE_RANK": "2"}, "NODE_RANK=2 is not one of 0 to 1"),
    ({"HOSTFILE": "others", "SCRIPT": "none.py"}, "SCRIPT=none.py: no such file"),
    ({"PATH": "/usr/bin:/bin"}, "there is no deepspeed on the PATH: pip install deepspeed==0.19.8"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_wrong_settings(tmp_path, settings, words):
    (tmp_path / "empty").write_text("# nobody\n\n")
    (tmp_path / "others").write_text("198.51.100.1 slots=8\n198.51.100.2 slots=8\n")
    result = finish(start([str(LAUNCH)], tmp_path, **{"PATH": PATH, **settings}), tmp_path)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert f"hostfile.sh: error: {words}" in result.err
