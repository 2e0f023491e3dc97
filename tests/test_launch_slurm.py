"""launch/slurm: the shipped batch files, submitted to a real Slurm of two nodes on this machine."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from support import slurm_cluster
from support.commands import check
from support.harness import ROOT, Result, tiny_flags, train, write_tiny
from support.slurm_cluster import until

pytestmark = pytest.mark.launch
FILES = sorted(ROOT.glob("launch/slurm/*.sbatch"))
TRAIN = "launch/slurm/train.sbatch"
FSDP = "06_fsdp_zero/train_fsdp.py"
FLAGS = ["--steps", 200, "--deterministic", "--data", "stdlib"]
SHARED = "--oversubscribe"  # the node, with other jobs: the file has --exclusive


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.start(tmp_path_factory.mktemp("slurm")) as cluster:
        write_tiny(cluster.repository)
        (cluster.repository / "models/own").mkdir(parents=True)
        (cluster.repository / "models/own/config.json").touch()
        yield cluster


def small_run(cluster) -> list:
    """The harness's small run, without the run directory and the summary."""
    words = tiny_flags(cluster.repository)
    for flag in ("--run-dir", "--json"):
        del words[words.index(flag) : words.index(flag) + 2]
    return words


@pytest.fixture(scope="module")
def undisturbed(cluster) -> dict[str, Result]:
    """What is left of a job on one node and of a job on two, and rank logs by node.

    The first is submitted without the environment of the shell. So its file says where torchrun is. The second asks
    for a task per rank, as other launchers need it, and has a script of its own.
    """
    file = cluster.repository / "site.sbatch"
    site = (ROOT / TRAIN).read_text(encoding="utf-8")
    activate = "# source .venv/bin/activate"
    assert activate in site
    path = f"export PATH={slurm_cluster.path()} OMP_NUM_THREADS=1"
    file.write_text(site.replace(activate, path), encoding="utf-8")
    folders = [cluster.repository / name for name in ("one", "many")]
    for folder in folders:
        folder.mkdir()
    one, many = (
        [*small_run(cluster), *FLAGS, "--json", folder / "summary.json"] for folder in folders
    )
    jobs = [
        cluster.submit("--export=NONE", "--gpus-per-node=2", SHARED, file, *one),
        cluster.submit(
            *("--nodes=2", "--ntasks-per-node=2", SHARED, TRAIN, *many),
            PROCS_PER_NODE="1",
            SCRIPT=FSDP,
            RUN_DIR="many/run",
            PREFLIGHT="1",
        ),
    ]
    for job in jobs:
        assert cluster.finished(job)["JobState"] == "COMPLETED", cluster.log(job)
    (folders[0] / "run").symlink_to(cluster.repository / f"runs/train-{jobs[0]}")
    return {
        folder.name: Result(0, cluster.log(job), "", folder)
        for folder, job in zip(folders, jobs, strict=True)
    }


def rank_logs(result: Result) -> list[str]:
    """The nodes of the ranks that have a log of their own."""
    [folder] = result.folder.glob("run/slurm-*/start-0")
    return sorted(file.relative_to(folder).parts[0] for file in folder.rglob("stdout.log"))


def test_one_node_has_a_process_per_gpu_and_two_nodes_reach_the_losses_of_one_process(
    undisturbed, tmp_path
):
    alone = train("05_ddp/train.py", tmp_path, *FLAGS)
    one, many = undisturbed["one"], undisturbed["many"]
    for result in (one, many):
        assert result.summary["world_size"] == 2
        assert result.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
        assert "[rank 0]: step" in result.out
    assert rank_logs(one) == ["node-0", "node-0"]  # of 3 GPUs, of which --exclusive gives all
    assert rank_logs(many) == ["node-0", "node-1"]
    assert many.summary["script"] == FSDP
    [model] = many.folder.glob("run/slurm-*/code/models/own/config.json")
    assert model.is_symlink()
    assert "preflight: 2 nodes are fit" in many.out


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
            if words[2].endswith("/code/05_ddp/train.py") and f"--run-dir={run_dir}" in words:
                process.send_signal(number)
                ranks += 1
        except (psutil.Error, IndexError):
            continue
    return ranks


class Run:
    """A run of train.sbatch, and what it leaves behind."""

    def __init__(self, cluster, job: str, ranks: int = 1, saves: bool = False) -> None:
        self.cluster, self.job, self.ranks, self.saves = cluster, job, ranks, saves
        self.run_dir = Path("runs", f"train-{job}")
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


def hold(*runs: Run) -> None:
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
    """Index 1 is told that its time is up, as --signal does it; later index 0 is driven out by another job.

    The code that they were started with goes on, though it is edited in between.
    """
    words = ["--nodes=2", "--array=0-1", SHARED, TRAIN, *small_run(cluster), *FLAGS]
    array = cluster.submit(*words, PROCS_PER_NODE="1")
    other, told = runs = [Run(cluster, f"{array}_{index}", ranks=2) for index in (0, 1)]
    hold(*runs)
    (cluster.repository / "05_ddp/train.py").write_text("raise SystemExit('edited')")

    def goes_on(run: Run) -> None:
        until(lambda: run.log.count("closing signal SIGTERM") == 2)  # by the torchrun of each node
        run.signal(signal.SIGCONT)
        until(lambda: run.show()["Restarts"] != "0")

    assert told.show()["JobId"] == array  # its own number means the whole array
    cluster.command("scancel", "--batch", "--signal=USR1", told.job)
    goes_on(told)
    assert "Exited with exit code 75" in told.log
    assert (other.show()["JobState"], other.show()["Restarts"]) == ("RUNNING", "0")
    assert "closing signal" not in other.log

    cluster.submit(
        "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    goes_on(other)

    assert [path.name for path in cluster.repository.glob(f"runs/*{array}*/**/code")] == ["code"]

    for seed, run in enumerate(runs):
        state = cluster.finished(run.job)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), run.log
        first, last = (
            "".join(
                file.read_text(encoding="utf-8")
                for file in run.folder.glob(f"slurm-*/{start}/**/stdout.log")
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
    shutil.copy(ROOT / "05_ddp/train.py", cluster.repository / "05_ddp/train.py")


# rank 0 fails at its start, and srun then ends the other node before a step
FAILS_EARLY = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists("rank-1-is-here"):
        time.sleep(0.1)
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
open("rank-1-is-here", "w").close()
signal.pause()
"""


def test_a_failing_and_a_cancelled_run_are_not_started_again(cluster):
    (cluster.repository / "fails_early.py").write_text(FAILS_EARLY, encoding="utf-8")
    words = ["--nodes=2", SHARED, TRAIN]
    early = cluster.submit(*words, PROCS_PER_NODE="1", SCRIPT="fails_early.py")
    words = ["--gpus-per-node=2", TRAIN, "--lr", "-1"]  # not SHARED: alone on its node
    failed = Run(cluster, cluster.submit(*words, PROCS_PER_NODE="1"))
    endless = ["--model", "tiny.json", "--steps", 10**6, "--save-every", 50]
    words = ["--array=8-9", SHARED, TRAIN, *endless]
    array = cluster.submit(*words, PROCS_PER_NODE="1")
    cancelled, stopped = (Run(cluster, f"{array}_{index}") for index in (8, 9))
    # they could go on, but their owner does not want it
    until(lambda: cancelled.saved() > 0 and stopped.saved() > 0)
    cluster.command("scancel", cancelled.job)
    (stopped.folder / "stop").touch()
    cancelled.ends("CANCELLED", restarts=0)
    stopped.ends("COMPLETED", restarts=0)
    failed.ends("FAILED", restarts=0)
    assert "error: argument --lr" in failed.log
    assert "--cpus-per-task=4" in failed.log  # all of the node
    Run(cluster, early).ends("FAILED", restarts=0)
    assert cluster.show(early)["ExitCode"] == "75:0"
    assert "--device=cuda" in failed.log  # GPUs that Slurm gave and torch does not see are an error


def submit_long(cluster, *words, save_every: int = 0, **env: str) -> Run:
    """Submit a run with options for Slurm; long enough to be caught in the middle, twice."""
    flags = [*small_run(cluster), "--steps", 600, "--save-every", save_every]
    job = cluster.submit(SHARED, *words, TRAIN, *flags, PROCS_PER_NODE="1", **env)
    return Run(cluster, job, saves=save_every > 0)


def test_a_save_that_outlasts_the_grace_loses_only_itself(cluster):
    """A rank that stands still is a save that never ends. Who kills it: torchrun, the time limit, a preemption."""
    here, there = "--nodelist=127.0.0.1", "--nodelist=127.0.0.2"
    signalled = submit_long(cluster, here, save_every=25, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2")
    # has no checkpoint: it was told to stop, so it starts again
    timed_out = submit_long(cluster, here)
    preempted = submit_long(cluster, there, "--partition=cancel", save_every=25)
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
        assert "exit code 75" not in run.log  # no save was completed
    assert "DUE TO TIME LIMIT" in timed_out.log
    assert "DUE TO PREEMPTION" in preempted.log


def test_a_failed_run_goes_on_as_long_as_it_gets_further(cluster):
    """A rank is killed, as a broken node kills it: once before any checkpoint, once after one in each start."""
    stuck = submit_long(cluster)
    until(stuck.trains)
    stuck.signal(signal.SIGKILL)
    moving = submit_long(cluster, save_every=25, MAX_FAILURES="1")
    reached = 0
    for _ in range(2):
        until(lambda reached=reached: moving.saved() > reached)
        reached = moving.saved()
        moving.signal(signal.SIGKILL)
        until(lambda: cluster.show(moving.job)["JobState"] != "RUNNING")
    stuck.ends("FAILED", restarts=0)
    moving.ends("FAILED", restarts=1)
    assert "resuming from" in moving.log
    assert "MAX_FAILURES=1" in moving.log


REFUSED = [  # words for sbatch, and of the one line
    ([TRAIN], "ask for --gpus-per-node"),
    (["launch/slurm/infer_70b.sbatch"], "ask for --gpus-per-node"),
    (["--gpus=1", TRAIN, "--run-dir", "runs/mine"], "RUN_DIR=runs/first"),
    (["--gpus=1", ":", "--gpus=1", TRAIN], "a heterogeneous job of 2 parts"),
    (["--nodes=2", "--gpus=3", TRAIN], "3 GPUs on 2 nodes"),
]


def test_jobs_that_it_cannot_serve(cluster):
    files = [cluster.repository / f"refused-{number}.out" for number in range(len(REFUSED))]
    jobs = [
        cluster.submit(f"--output={file}", SHARED, *argv)
        for file, (argv, _) in zip(files, REFUSED, strict=True)
    ]
    for job, file, (_, words) in zip(jobs, files, REFUSED, strict=True):
        found = cluster.finished(job)
        assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0")
        [line] = file.read_text(encoding="utf-8").splitlines()
        assert words in line
    words = ["salloc", "--quiet", "--gpus=1", "bash", TRAIN]
    result = subprocess.run(
        words, cwd=cluster.repository, env=cluster.env, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert "start this file with sbatch" in line


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
        SHARED,
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
