"""launch/slurm: the shipped batch files, submitted to a real Slurm of two nodes on this machine."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from support import slurm_cluster
from support.commands import check
from support.harness import ROOT, Result, tiny_flags, train, write_tiny
from support.slurm_cluster import until

pytestmark = pytest.mark.launch
FILES = sorted(ROOT.glob("launch/slurm/*.sbatch"))
ARRAY = "launch/slurm/array_requeue.sbatch"
FSDP = "06_fsdp_zero/train_fsdp.py"
FLAGS = ["--steps", 200, "--deterministic", "--data", "stdlib"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.start(tmp_path_factory.mktemp("slurm")) as cluster:
        write_tiny(cluster.repository)
        yield cluster


def flags(folder: Path) -> list:
    """The harness's small run, its summary and run directory in `folder`."""
    folder.mkdir()
    return [*tiny_flags(folder), *FLAGS, "--json", folder / "summary.json"]


def flags_of_a_sweep(cluster) -> list:
    """The same where the batch file names the run directory; runs of one array would write one summary."""
    words = tiny_flags(cluster.repository)
    for flag in ("--run-dir", "--json"):
        del words[words.index(flag) : words.index(flag) + 2]
    return words


@pytest.fixture(scope="module")
def undisturbed(cluster) -> dict[str, tuple[str, Result]]:
    """The job and what is left of one_node.sbatch and of many_nodes.sbatch with a script of its own."""
    one, many = (cluster.repository / name for name in ("one", "many"))
    jobs = {
        one: cluster.submit("--gpus-per-node=2", "launch/slurm/one_node.sbatch", *flags(one)),
        many: cluster.submit(
            "launch/slurm/many_nodes.sbatch", *flags(many), PROCS_PER_NODE="1", SCRIPT=FSDP
        ),
    }
    for job in jobs.values():
        assert cluster.finished(job)["JobState"] == "COMPLETED", cluster.log(job)
    return {
        folder.name: (job, Result(0, cluster.log(job), "", folder)) for folder, job in jobs.items()
    }


def rank_logs(cluster, job: str) -> list[str]:
    """The nodes of the ranks that have a log of their own."""
    [folder] = cluster.repository.glob(f"runs/logs/*-{job}")
    return sorted(file.relative_to(folder).parts[0] for file in folder.rglob("stdout.log"))


def test_one_node_has_a_process_per_gpu_and_two_nodes_reach_the_losses_of_one_process(
    cluster, undisturbed, tmp_path
):
    job, one = undisturbed["one"]
    assert one.summary["world_size"] == len(rank_logs(cluster, job)) == 2
    alone = train("05_ddp/train.py", tmp_path, *FLAGS)
    assert one.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
    job, many = undisturbed["many"]
    assert (many.summary["world_size"], many.summary["script"]) == (2, FSDP)
    assert many.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
    assert rank_logs(cluster, job) == ["node-0", "node-1"]


def test_inference_on_one_node_and_on_two(cluster):
    """On one node the ranks share the matrices. Over two the job ends with the command of a server for that."""
    file = cluster.repository / "answers.json"
    words = [
        "--model",
        "nano",
        "--max-new-tokens",
        8,
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--json",
        file,
    ]
    one, two = (
        cluster.submit(
            f"--nodes={nodes}", "launch/slurm/infer_70b.sbatch", *words, PROCS_PER_NODE=processes
        )
        for nodes, processes in ((1, "2"), (2, "1"))
    )
    assert cluster.finished(two)["JobState"] == "FAILED"
    assert "vllm serve" in cluster.log(two)
    assert cluster.finished(one)["JobState"] == "COMPLETED", cluster.log(one)
    answers = json.loads(file.read_text(encoding="utf-8"))
    assert answers["world_size"] == 2
    assert len(answers["token_ids"][0]) == 8


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


class Sweep:
    """A run of array_requeue.sbatch, and what it leaves behind."""

    def __init__(self, cluster, job: str, ranks: int = 1, saves: bool = False) -> None:
        self.cluster, self.job, self.ranks, self.saves = cluster, job, ranks, saves
        self.run_dir = Path("runs", f"sweep-{job}")
        self.folder = cluster.repository / self.run_dir

    @property
    def log(self) -> str:
        return self.cluster.log(self.job)

    def show(self) -> dict[str, str]:
        return self.cluster.show(self.job)

    def saved(self) -> int:
        """The step of its newest checkpoint; 0 where there is none."""
        steps = [int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*[0-9]")]
        return max(steps, default=0)

    def trains(self) -> bool:
        """Return whether it has saved, if it does that before its end, or whether it trains.

        A signal before the end of the first step saves nothing, so wait for the second line.
        """
        if self.saves:
            return self.saved() > 0
        log = self.folder / "metrics.jsonl"
        return log.exists() and log.read_bytes().count(b"\n") >= 2

    def signal(self, number: signal.Signals) -> None:
        assert signal_ranks(self.run_dir, number) == self.ranks

    def ends(self, state: str, restarts: int) -> None:
        found = self.cluster.finished(self.job)
        assert (found["JobState"], found["Restarts"]) == (state, str(restarts)), self.log


def hold(*runs: Sweep) -> None:
    """Let the ranks of each stand still as soon as it trains: how far it is does not hang on the machine's speed."""
    waiting = [*runs]

    def all_held() -> bool:
        for run in [*waiting]:
            if run.trains():
                run.signal(signal.SIGSTOP)
                waiting.remove(run)
        return not waiting

    until(all_held)


def test_a_signalled_and_a_preempted_run_go_on_by_themselves(cluster, tmp_path):
    """Index 1 is told that its time is up, as --signal does it; later index 0 is driven out by another job."""
    words = ["--nodes=2", "--array=0-1", ARRAY, *flags_of_a_sweep(cluster), *FLAGS]
    array = cluster.submit(*words, PROCS_PER_NODE="1")
    other, told = runs = [Sweep(cluster, f"{array}_{index}", ranks=2) for index in (0, 1)]
    hold(*runs)

    def goes_on(run: Sweep) -> None:
        until(lambda: run.log.count("closing signal SIGTERM") == 2)  # by the torchrun of each node
        run.signal(signal.SIGCONT)
        until(lambda: run.show()["Restarts"] != "0")

    assert told.show()["JobId"] == array  # its own number means the whole array
    cluster.command("scancel", "--batch", "--signal=USR1", told.job)
    goes_on(told)
    assert (other.show()["JobState"], other.show()["Restarts"]) == ("RUNNING", "0")
    assert "closing signal" not in other.log

    cluster.submit(
        "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    goes_on(other)

    for seed, run in enumerate(runs):
        state = cluster.finished(run.job)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), run.log
        first, last = (
            "".join(
                file.read_text(encoding="utf-8")
                for file in (run.folder / "logs" / start).rglob("stdout.log")
            )
            for start in ("start-0", f"start-{state['Restarts']}")
        )
        assert int(re.search(r"saved at step (\d+)", first)[1]) < 200
        assert "resuming from" in last
        undisturbed = train(
            "05_ddp/train.py", tmp_path / str(seed), *FLAGS, "--seed", seed, nproc=2
        )
        assert undisturbed.summary["weights_sha256"] in last
    assert other.show()["Restarts"] == "1"  # a run that is done does not start again


def test_a_failing_and_a_cancelled_run_are_not_started_again(cluster):
    wrong = (
        cluster.submit("--array=7", "--gpus-per-node=2", ARRAY, "--lr", "-1", PROCS_PER_NODE="1")
        + "_7"
    )
    endless = ["--model", "tiny.json", "--steps", 10**6, "--save-every", 50]
    cancelled = Sweep(
        cluster, cluster.submit("--array=8", ARRAY, *endless, PROCS_PER_NODE="1") + "_8"
    )
    until(lambda: cancelled.saved() > 0)  # it could go on, but its owner does not want it to
    cluster.command("scancel", cancelled.job)
    cancelled.ends("CANCELLED", restarts=0)
    failed = Sweep(cluster, wrong)
    failed.ends("FAILED", restarts=0)
    assert "error: argument --lr" in failed.log
    assert "--device=cuda" in failed.log  # GPUs that Slurm gave and torch does not see are an error


def sweep(cluster, index: int, *words, save_every: int = 0, **env: str) -> Sweep:
    """Submit one index of the array, with options for Slurm; long enough to be caught in the middle, twice."""
    flags = [*flags_of_a_sweep(cluster), "--steps", 600, "--save-every", save_every]
    submitted = [f"--array={index}", *words, ARRAY, *flags]
    job = f"{cluster.submit(*submitted, PROCS_PER_NODE='1', **env)}_{index}"
    return Sweep(cluster, job, saves=save_every > 0)


def test_a_save_that_outlasts_the_grace_loses_only_itself(cluster):
    """A rank that stands still is a save that never ends. Who kills it: torchrun, the time limit, a preemption."""
    here, there = "--nodelist=127.0.0.1", "--nodelist=127.0.0.2"
    signalled = sweep(cluster, 10, here, save_every=25, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2")
    # has no checkpoint: it was told to stop, so it starts again
    timed_out = sweep(cluster, 12, here)
    preempted = sweep(cluster, 13, there, "--partition=cancel", save_every=25)
    runs = (signalled, timed_out, preempted)
    hold(*runs)
    cluster.command("scancel", "--batch", "--signal=USR1", signalled.job)
    # "now" itself may be past when the request arrives
    cluster.command("scontrol", "update", f"JobId={timed_out.job}", "EndTime=now+2")
    cluster.submit("--partition=high", there, "--exclusive", "--output=/dev/null", "--wrap=true")
    # Slurm kills torchrun, and on a cluster the ranks too; here one outlives it
    for run in (preempted, timed_out):
        until(lambda run=run: run.show()["Restarts"] == "1")
        signal_ranks(run.run_dir, signal.SIGKILL)
    # of its next start
    cluster.command("scontrol", "update", f"JobId={timed_out.job}", "TimeLimit=60")
    for run in runs:
        run.ends("COMPLETED", restarts=1)
        assert ("resuming from" in run.log) == (run is not timed_out)
        assert "with --resume goes on" not in run.log  # no save was completed
    assert "DUE TO TIME LIMIT" in timed_out.log
    assert "DUE TO PREEMPTION" in preempted.log


def test_a_failed_run_goes_on_as_long_as_it_gets_further(cluster):
    """A rank is killed, as a broken node kills it: once before any checkpoint, once after one in each start."""
    stuck = sweep(cluster, 20)
    until(stuck.trains)
    stuck.signal(signal.SIGKILL)
    moving = sweep(cluster, 21, save_every=25, MAX_REQUEUES="1")
    reached = 0
    for _ in range(2):
        until(lambda reached=reached: moving.saved() > reached)
        reached = moving.saved()
        moving.signal(signal.SIGKILL)
        until(lambda: cluster.show(moving.job)["JobState"] != "RUNNING")
    stuck.ends("FAILED", restarts=0)
    moving.ends("FAILED", restarts=1)
    assert "resuming from" in moving.log
    assert "MAX_REQUEUES=1" in moving.log


def test_no_gpus_and_no_count_of_processes_is_an_error(cluster):
    jobs = {}
    for file in FILES:
        array = ["--array=30"] if "array" in file.name else []
        output = f"--output={cluster.repository}/none-{file.name}.out"
        jobs[file] = cluster.submit(
            *array, output, f"launch/slurm/{file.name}", "--steps", 1
        ) + "_30" * len(array)
    for file, job in jobs.items():
        found = cluster.finished(job)
        assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0")
        assert "--gpus-per-node" in (cluster.repository / f"none-{file.name}.out").read_text(
            encoding="utf-8"
        )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_slurm_takes_every_line_that_a_site_may_switch_on(cluster, file):
    """It passes over `# SBATCH` without a word, and over what follows the first command."""
    head, body = re.split(
        r"^set -euo pipefail$", file.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert not re.search(r"^#+[ \t]+SBATCH|^#SBATCH(?! --)", head, re.MULTILINE)
    assert "SBATCH" not in body
    everything = cluster.repository / file.name
    everything.write_text(
        re.sub("^##SBATCH", "#SBATCH", file.read_text(encoding="utf-8"), flags=re.MULTILINE),
        encoding="utf-8",
    )
    cluster.command(
        "sbatch",
        "--test-only",
        "--partition=low",
        "--gpus-per-node=2",
        "--cpus-per-task=1",
        everything,
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_commands_at_the_top_are_right(file):
    commands = re.findall(
        r"^#     .*?sbatch .*?(launch/slurm/\S+)((?: --\S+| [^-#\s]\S*)*)",
        file.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert commands
    for name, flags in commands:
        assert name == f"launch/slurm/{file.name}"
        script = "09_inference/infer_70b.py" if "infer" in name else "05_ddp/train.py"
        check(f"python {script}{flags}")
