"""launch/deepspeed/hostfile.sh: DeepSpeed's own launcher on two hosts, stopped; resumed on one."""

import os
import signal
import sys
from pathlib import Path

import pytest
from support.harness import (
    ROOT,
    Result,
    finish,
    holds,
    kill_all,
    start,
    steps_logged,
    tiny_flags,
    train,
    write_tiny,
)
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
    given = [
        *tiny_flags(folder),
        "--model",
        folder / "tiny.json",
        "--json",
        folder / "summary.json",
        "--stage",
        3,
    ]
    return [*map(str, given)]


def newest_step(folder: Path) -> int:
    steps = [path.name.removeprefix("step-") for path in (folder / "run").glob("step-*[0-9]")]
    return max(map(int, steps))


def test_stopped_on_two_hosts_it_saves_and_goes_on_on_one(tmp_path):
    """Neither host has a server for ssh. All that is trained is trained as by one process."""
    given = [*flags(tmp_path), "--steps", "100"]
    with two_hosts() as hosts:
        (tmp_path / "hosts").write_text(
            "".join(f"{host.address} slots=1  # as of today\n" for host in hosts),
            encoding="utf-8",
        )
        processes = []
        try:
            for host in hosts:
                folder = tmp_path / host.name
                folder.mkdir()
                process = host.start(
                    [str(LAUNCH), *given], folder, PATH=PATH, HOSTFILE=str(tmp_path / "hosts")
                )
                processes.append((process, folder))
            told, _ = processes[0]
            assert holds(told, lambda: steps_logged(tmp_path) > 2)
            told.send_signal(signal.SIGTERM)
            results = [finish(process, folder) for process, folder in processes]
        finally:
            for process, _ in processes:
                kill_all(process)
    assert [result.code for result in results] == [75, 75], [result.err for result in results]
    stopped = Result(0, "", "", tmp_path)
    assert stopped.summary["world_size"] == 2
    assert newest_step(tmp_path) == stopped.summary["steps"] < 100

    (tmp_path / "hosts").write_text("localhost slots=2\n", encoding="utf-8")
    env = {"PATH": PATH, "HOSTFILE": "hosts", "MASTER_PORT": str(free_ports(1)[0])}
    resumed = finish(start([str(LAUNCH), *given, "--resume"], tmp_path, **env), tmp_path)
    assert resumed.code == 0, resumed.err
    alone = train(SCRIPT, tmp_path / "alone", "--stage", 3, "--steps", 100)
    together = Result(0, "", "", tmp_path)
    assert together.column("step") == alone.column("step")
    assert together.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)


WRONG = [  # what is set, and words of the one line
    ({}, ["HOSTFILE"]),
    ({"HOSTFILE": "none"}, ["HOSTFILE=none"]),
    ({"HOSTFILE": "empty"}, ["HOSTFILE=empty"]),
    ({"HOSTFILE": "others"}, ["HOSTFILE=others", "NODE_RANK"]),
    ({"HOSTFILE": "others", "NODE_RANK": "2"}, ["NODE_RANK=2"]),
    ({"HOSTFILE": "others", "NODE_RANK": "1", "SCRIPT": "none.py"}, ["SCRIPT=none.py"]),
    ({"PATH": "/usr/bin:/bin"}, ["deepspeed", "PATH"]),
    (
        {"HOSTFILE": "others", "NODE_RANK": "0", "CUDA_VISIBLE_DEVICES": ""},
        ["no GPU", "--device cpu"],
    ),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_wrong_settings(tmp_path, settings, words):
    (tmp_path / "empty").write_text("# nobody\n\n", encoding="utf-8")
    (tmp_path / "others").write_text(
        "198.51.100.1 slots=8\n198.51.100.2 slots=8\n", encoding="utf-8"
    )
    device = [] if "CUDA_VISIBLE_DEVICES" in settings else ["--device", "cpu"]
    argv = [str(LAUNCH), *device]
    result = finish(start(argv, tmp_path, **{"PATH": PATH, **settings}), tmp_path)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert all(word in result.err for word in ["error: ", *words])
