"""launch/preflight.py names the node with a slow link, and the one on which doctor.py fails."""

import sys
from pathlib import Path

import pytest
from support.harness import ROOT, Result, finish, kill_all, start
from support.two_hosts import hosts_on_a_switch

pytestmark = pytest.mark.launch


def command(node: int, count: int, head: str, run_dir: Path) -> list[str]:
    """Return what a launcher starts in place of torchrun, with flags that preflight.py ignores."""
    torchrun = [f"--nnodes={count}", f"--node-rank={node}", "--max-restarts=0", "--tee=3"]
    torchrun += [f"--master-addr={head}", "--master-port=29400", "--nproc-per-node=1"]
    script = ["05_ddp/train.py", "--model", "nano", "--run-dir", str(run_dir)]
    return [sys.executable, str(ROOT / "launch/preflight.py"), *torchrun, *script]


def on_all(hosts, folder: Path, no_shared_memory: int | None = None) -> list[Result]:
    """Run it on all hosts. One of them may have a /dev/shm of 1 MiB."""
    processes = []
    try:
        for node, host in enumerate(hosts):
            argv = command(node, len(hosts), hosts[0].address, folder / "run")
            if node == no_shared_memory:  # ip netns exec gives the host mounts of its own
                mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
                argv = ["sh", "-c", mount, "sh", *argv]
            process_folder = folder / f"node-{node}"
            process_folder.mkdir()
            # Slurm's name: all hosts have that of this machine
            process = host.start(argv, process_folder, SLURMD_NODENAME=f"node{node}")
            processes.append((process, process_folder))
        return [finish(*process) for process in processes]
    finally:
        for process, _ in processes:
            kill_all(process)


def test_the_node_whose_link_is_slow_is_named(tmp_path):
    with hosts_on_a_switch(3) as hosts:
        hosts[1].slow_down(mbit=200)
        results = on_all(hosts, tmp_path)
    assert [result.code for result in results] == [1, 1, 1], results
    assert "node1: all of its pairs are slow" in results[0].err
    assert results[0].err.splitlines()[-1].endswith("--exclude=node1")
    assert not (tmp_path / "run").exists()


def test_nodes_that_have_passed_are_not_examined_again_but_new_ones_are(tmp_path):
    times = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        argv = command(0, 1, "127.0.0.1", tmp_path / "run")
        argv[argv.index("--master-port=29400")] = "--master-port=0"  # any
        result = finish(start(argv, folder, SLURMD_NODENAME="node0"), folder)
        assert result.code == 0, result
        times.append((tmp_path / "run/preflight.json").read_text(encoding="utf-8"))
    assert times[0] == times[1]

    with hosts_on_a_switch(2) as hosts:
        results = on_all(hosts, tmp_path, no_shared_memory=1)
    assert [result.code for result in results] == [1, 1], results
    assert "node1: shared memory: 0.00 GiB free" in results[0].err
    assert results[0].err.splitlines()[-1].endswith("--exclude=node1")
