"""launch/slurm: the shipped batch files, submitted to a real Slurm of two nodes on this machine."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from support import slurm_cluster
from support.commands import check
from support.harness import ROOT, TINY, tiny_flags, train
from support.slurm_cluster import until

pytestmark = pytest.mark.launch
FILES = sorted(ROOT.glob("launch/slurm/*.sbatch"))
FLAGS = ["--steps", 200, "--deterministic"]
RESUMABLE = "with --resume goes on"  # what array_requeue.sbatch looks for


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.start(tmp_path_factory.mktemp("slurm")) as cluster:
        (cluster.repository / "tiny.json").write_text(json.dumps(TINY))
        yield cluster


def flags(folder: Path) -> list:
    """The harness's small run, its summary and run directory in `folder`."""
    folder.mkdir()
    words = [*tiny_flags(folder), *FLAGS]
    words[words.index("summary.json")] = folder / "summary.json"
    return words


def losses(run_dir: Path) -> list[float]:
    records = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def summary(file: Path) -> dict:
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def undisturbed(cluster) -> dict[str, dict]:
    """The summaries of one_node.sbatch (seed 1) and many_nodes.sbatch (seed 0), which run side by side."""
    one, many = cluster.repository / "one", cluster.repository / "many"
    jobs = {
        one: cluster.submit("--gpus-per-node=2", "launch/slurm/one_node.sbatch", *flags(one), "--seed", 1),
        many: cluster.submit("launch/slurm/many_nodes.sbatch", *flags(many)),
    }
    for job in jobs.values():
        state, log = cluster.finished(job), cluster.repository / f"slurm-{job}.out"
        assert state["JobState"] == "COMPLETED", log.read_text()
    return {folder.name: {**summary(folder / "summary.json"), "job": job} for folder, job in jobs.items()}


def test_one_node_starts_a_process_per_gpu_that_slurm_gave(cluster, undisturbed):
    job = undisturbed["one"]["job"]
    assert undisturbed["one"]["world_size"] == 2
    assert undisturbed["one"]["steps"] == 200
    logs = list((cluster.repository / f"runs/logs/one-node-{job}").glob("*/attempt_0/*/stdout.log"))
    assert len(logs) == 2
    printed = (cluster.repository / f"slurm-{job}.out").read_text()
    assert re.search(r"^\+ srun .* torchrun .* 05_ddp/train\.py .*--steps 200", printed, re.MULTILINE)


def test_two_nodes_reach_the_losses_of_one_process(cluster, undisturbed, tmp_path):
    alone = train("05_ddp/train.py", tmp_path, *FLAGS)
    assert undisturbed["many"]["world_size"] == 2
    assert losses(cluster.repository / "many/run") == pytest.approx(alone.column("loss"), rel=1e-5)
    logs = cluster.repository / f"runs/logs/many-nodes-{undisturbed['many']['job']}"
    for node in ("node-0", "node-1"):
        assert len(list((logs / node).glob("*/attempt_0/0/stdout.log"))) == 1
    nodes = cluster.show(undisturbed["many"]["job"])["NodeList"]
    assert nodes == "127.0.0.[1-2]"


def signal_ranks(run_dir: Path, number: signal.Signals) -> int:
    """Send it to the ranks that train in `run_dir` (torchrun has their flags too); returns how many there are."""
    ranks = 0
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if words[2] == "05_ddp/train.py" and f"--run-dir={run_dir}" in words:
                process.send_signal(number)
                ranks += 1
        except (psutil.Error, IndexError):
            continue
    return ranks


def test_a_signalled_and_a_preempted_run_go_on_by_themselves(cluster, undisturbed):
    """Index 1 is told that its time is up, as --signal does it; later index 0 is driven out by another job.

    The ranks stand still while Slurm's signal is on its way: how far a run is does not hang on the machine's speed.
    """
    words = ["--nodes=2", "--array=0-1", "launch/slurm/array_requeue.sbatch", *tiny_flags(cluster.repository), *FLAGS]
    for flag in ("--run-dir", "--json"):  # the run directory is the batch file's; both runs would write one summary
        del words[words.index(flag) : words.index(flag) + 2]
    array = cluster.submit(*words)
    jobs = [f"{array}_{index}" for index in (0, 1)]
    run_dirs = [Path("runs", f"sweep-{job}") for job in jobs]
    logs = [cluster.repository / f"slurm-{job}.out" for job in jobs]

    running = [*run_dirs]

    def held() -> bool:
        for run_dir in [*running]:  # whichever trains first
            if (cluster.repository / run_dir / "metrics.jsonl").exists():
                assert signal_ranks(run_dir, signal.SIGSTOP) == 2
                running.remove(run_dir)
        return not running

    until(held)

    def told(index: int) -> bool:
        return logs[index].read_text().count("closing signal SIGTERM") == 2  # by the torchrun of each node

    def goes_on(index: int) -> dict[str, str]:
        until(lambda: told(index))
        assert signal_ranks(run_dirs[index], signal.SIGCONT) == 2
        until(lambda: cluster.show(jobs[index])["Restarts"] != "0")
        return cluster.show(jobs[index])

    assert cluster.show(jobs[1])["JobId"] == array  # its own number means the whole array
    cluster.command("scancel", "--batch", "--signal=USR1", jobs[1])
    goes_on(1)
    other = cluster.show(jobs[0])
    assert (other["JobState"], other["Restarts"]) == ("RUNNING", "0")
    assert "closing signal" not in logs[0].read_text()

    cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    goes_on(0)

    for job, run_dir, log, reference in zip(jobs, run_dirs, logs, ("many", "one"), strict=True):
        state = cluster.finished(job)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
        first, last = (
            "".join(file.read_text() for file in (cluster.repository / run_dir / "logs" / start).rglob("stdout.log"))
            for start in ("start-0", f"start-{state['Restarts']}")
        )
        assert int(re.search(rf"saved at step (\d+); the same command {RESUMABLE}", first)[1]) < 200
        assert "resuming from" in last
        assert undisturbed[reference]["weights_sha256"] in last
    assert cluster.show(jobs[0])["Restarts"] == "1"  # a run that is done does not start again


def test_a_failing_and_a_cancelled_run_are_not_started_again(cluster):
    file = "launch/slurm/array_requeue.sbatch"
    wrong = cluster.submit("--array=7", "--gpus-per-node=2", file, "--lr", "-1", PROCS_PER_NODE="1") + "_7"
    cancelled = cluster.submit("--array=8", file, "--model", "tiny.json", "--steps", 10**6) + "_8"
    log = cluster.repository / f"slurm-{cancelled}.out"
    until(lambda: log.exists() and "]:step" in log.read_text())
    cluster.command("scancel", cancelled)
    for job, state in ((wrong, "FAILED"), (cancelled, "CANCELLED")):
        found = cluster.finished(job)
        assert (found["JobState"], found["Restarts"]) == (state, "0")
    printed = (cluster.repository / f"slurm-{wrong}.out").read_text()
    assert "error: argument --lr" in printed
    assert "start 0: 1 process" in printed  # the environment variable wins over the number of GPUs


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_slurm_takes_every_line_that_a_site_may_switch_on(cluster, file):
    everything = cluster.repository / file.name
    everything.write_text(re.sub("^##SBATCH", "#SBATCH", file.read_text(), flags=re.MULTILINE))
    assert everything.read_text().count("\n#SBATCH --") > file.read_text().count("\n#SBATCH --")
    cluster.command("sbatch", "--test-only", "--partition=low", "--gpus-per-node=2", "--cpus-per-task=1", everything)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_commands_at_the_top_are_right(file):
    commands = re.findall(r"sbatch .*?(launch/slurm/\S+)((?: --\S+| [^-#\s]\S*)*)", file.read_text())
    assert len(commands) == 2
    for name, flags in commands:
        assert name == f"launch/slurm/{file.name}"
        check(f"python 05_ddp/train.py{flags}")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_line_looks_like_one_that_slurm_reads(file):
    """It passes over `# SBATCH` without a word, and over what follows the first command."""
    head, body = re.split(r"^set -euo pipefail$", file.read_text(), flags=re.MULTILINE)
    assert not re.search(r"^#+[ \t]+SBATCH|^#SBATCH(?! --)", head, re.MULTILINE)
    assert "SBATCH" not in body
