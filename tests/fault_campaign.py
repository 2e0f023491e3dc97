"""A campaign of random faults: whatever ends a training job, the same command with --resume ends at the same weights.

Each fault is drawn from the seed. A small run of --script is hit by it, dies, and is started again with the very same
command. The verdict is ok if the job ends by itself and leaves no process; the restart goes on at the newest whole
checkpoint; no more steps are lost than lie between two saves (none where the job was asked to stop); and the weights
equal an undisturbed run's, bit for bit.

    python tests/fault_campaign.py --faults 100 --seed 0
    python tests/fault_campaign.py --script 08_model_parallel/train_3d.py      on 2 x 2 tensor and pipeline ranks

Exit code 1 if one verdict is not ok; its folder is kept.
"""

import contextlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from support.harness import (
    SEVERAL,
    damage,
    descendants,
    finish,
    holds,
    kill_all,
    launch,
    rank_process,
    steps_logged,
    train,
)

from common import cli, exits
from training.meter import read_records

STEPS, SAVE_EVERY = 48, 4
NUMBERS = (1, 1, 2, 2, 3)  # of processes: a fault draws one of them
DEEPSPEED = "06_fsdp_zero/train_zero.py"  # has no --async-save
SCRIPTS = dict.fromkeys((*SEVERAL, DEEPSPEED), (NUMBERS, ()))
SCRIPTS["08_model_parallel/train_3d.py"] = ((4,), ("--tp", 2, "--pp", 2, "--micro-batch-size", 3))
FLAGS = ("--steps", STEPS, "--save-every", SAVE_EVERY, "--deterministic", "--resume")
# a run that has not reached the fault's step by then, or has not ended that long after it
HANGS_AFTER_SECONDS = 120
# the other ranks wait this long for a stopped one, and torchrun that long after SIGTERM until it kills it
STOPPED_RANK = {"COLLECTIVE_TIMEOUT_SECONDS": "20", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
KINDS = (
    *("pause a rank", "corrupt newest", "disk full", "kill a rank"),
    *("SIGTERM in save", "kill the agent", "stop a rank"),
)


@dataclass(frozen=True)
class Fault:
    number: int
    kind: str
    world_size: int
    rank: int  # the one that is killed, stopped or paused
    async_save: bool
    step: int  # strike when this many steps are logged
    in_save: bool  # and then wait for the next save to be on its way
    seconds_paused: float
    damage: str

    @property
    def steps_at_risk(self) -> int:
        """The most steps that the restart may have to do again."""
        if self.kind in ("SIGTERM in save", "kill the agent", "pause a rank"):
            return 0  # asked to stop: saves first
        # a save in the background may be under way until the next one begins; a damaged one is passed over
        return SAVE_EVERY * (1 + self.async_save + (self.kind == "corrupt newest"))


def draw(
    seed: int, number: int, kinds: tuple[str, ...], numbers: tuple[int, ...] = NUMBERS
) -> Fault:
    """Fault `number` of the campaign with that seed, on one of these numbers of processes."""
    rng = random.Random(f"{seed}:{number}")
    kind = kinds[number % len(kinds)]
    # a stopped rank shows only by the others' waiting
    world_size = rng.choice([n for n in numbers if n > 1] if kind == "stop a rank" else numbers)
    return Fault(
        number,
        kind,
        world_size,
        rank=rng.randrange(world_size),
        async_save=rng.random() < 0.5,
        step=rng.randint(
            2 * SAVE_EVERY + 1 if kind == "corrupt newest" else 1, STEPS - 3 * SAVE_EVERY
        ),
        in_save=rng.random() < 1 / 3 or kind == "SIGTERM in save",
        seconds_paused=rng.uniform(0.1, 2),
        damage=rng.choice(("truncated", "one bit", "missing")),
    )


def saved_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints, oldest first."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("run/step-*[0-9]"))


def strike(fault: Fault, process: subprocess.Popen, folder: Path) -> bool:
    """Wait for the fault's moment and do it; False if the run was over before."""
    reaches = partial(holds, process, timeout=HANGS_AFTER_SECONDS)
    if not reaches(lambda: steps_logged(folder) >= 1):
        return False
    rank = (
        psutil.Process(process.pid) if fault.world_size == 1 else rank_process(process, fault.rank)
    )
    if not reaches(lambda: steps_logged(folder) >= fault.step):
        return False
    if fault.kind == "corrupt newest" and not reaches(lambda: len(saved_steps(folder)) >= 2):
        return False
    if fault.in_save and not reaches(lambda: any(folder.glob("run/step-*.tmp"))):
        return False
    if fault.kind == "kill a rank":
        rank.kill()
    elif fault.kind == "kill the agent":
        process.send_signal(signal.SIGKILL)
    elif fault.kind == "stop a rank":
        rank.suspend()
    elif fault.kind == "pause a rank":
        rank.suspend()
        time.sleep(fault.seconds_paused)
        rank.resume()
    elif fault.kind == "SIGTERM in save":
        process.send_signal(signal.SIGTERM)
    elif fault.kind == "disk full":
        # again and again: the job may delete files
        with open(folder / "run/ballast", "ab", buffering=0) as ballast:
            reaches(lambda: fill(ballast))
    elif fault.kind == "corrupt newest":
        kill_all(process)
        newest = folder / f"run/step-{saved_steps(folder)[-1]:08d}"
        damage(newest, fault.damage, "*.distcp" if any(newest.glob("*.distcp")) else "*_states.pt")
    return True


def fill(ballast) -> None:
    """Write until nothing more fits."""
    with contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own for folder/run, with room for five checkpoints. CalledProcessError without root."""
    (folder / "run").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", folder / "run"]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder / "run"], check=True)


def suffer(fault: Fault, folder: Path, weights: str, script: str) -> list[str]:
    """Let the fault strike a run, start the run again, and judge: what did not hold."""
    problems = []
    # killing torchrun needs one; else one process is started bare
    nproc = None if fault.world_size == 1 and fault.kind != "kill the agent" else fault.world_size
    flags = (*FLAGS, *SCRIPTS[script][1], *(["--async-save"] if fault.async_save else []))
    env = STOPPED_RANK if fault.kind == "stop a rank" else {}
    with small_disk(folder) if fault.kind == "disk full" else contextlib.nullcontext():
        try:
            process = launch(script, folder, *flags, nproc=nproc, **env)
            try:
                struck = strike(fault, process, folder)
                process.wait(HANGS_AFTER_SECONDS)
                # ranks outlive a killed agent
                psutil.wait_procs(descendants(process), timeout=HANGS_AFTER_SECONDS)
            finally:
                result = finish(process, folder, timeout=1)
            (folder / "run/ballast").unlink(missing_ok=True)
            last = max(record["step"] for record in read_records(folder / "run/metrics.jsonl"))
            # what a restart can count on; the newest was damaged on purpose
            saved = [0, *saved_steps(folder)][-2 if fault.kind == "corrupt newest" else -1]
            lost = last - saved
            problems += ["struck too late"] * (not struck)
            if fault.kind != "pause a rank":
                # there the job was killed by this process, its exit code is lost
                if fault.kind != "corrupt newest":
                    problems += ["exit code 0 despite the fault"] * (result.code == 0)
                result = finish(
                    launch(script, folder, *flags, nproc=nproc), folder, HANGS_AFTER_SECONDS
                )
                resumed = int(
                    (re.findall(r"resuming from \S+/step-(\d+)", result.out) or ["0"])[-1]
                )
                problems += [f"went on at step {resumed}, not {saved}"] * (resumed != saved)
            problems += [f"exit code {result.code} at the end"] * (result.code != 0)
            problems += [f"lost {lost} steps, {fault.steps_at_risk} at risk"] * (
                lost > fault.steps_at_risk
            )
            if result.code == 0:
                problems += ["other weights"] * (result.summary["weights_sha256"] != weights)
                problems += ["gaps in metrics.jsonl"] * (
                    result.column("step") != [*range(1, STEPS + 1), STEPS]
                )
        except subprocess.TimeoutExpired:
            problems.append(f"hung: not over {HANGS_AFTER_SECONDS} s after the fault")
        except (AssertionError, OSError, ValueError, LookupError, psutil.Error) as error:
            problems.append(f"{type(error).__name__}: {error}")
    return problems


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--faults", type=cli.positive_int, default=10, help="how many; 7 have each kind once"
    )
    parser.add_argument("--seed", type=cli.natural, default=0)
    parser.add_argument(
        "--script", choices=SCRIPTS, default=SEVERAL[0], help="the training script that suffers"
    )
    parser.add_argument("--jobs", type=cli.positive_int, default=2, help="faults at a time")
    args = parser.parse_args()
    start, folder, kinds = time.monotonic(), Path(tempfile.mkdtemp(prefix="faults-")), KINDS
    try:
        with small_disk(folder / "disk"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        kinds = tuple(kind for kind in KINDS if kind != "disk full")
        print(f"left out: disk full (mounting a small file system needs root: {error})")
    numbers, flags = SCRIPTS[args.script]
    faults = [draw(args.seed, number, kinds, numbers) for number in range(args.faults)]
    if args.script == DEEPSPEED:
        faults = [replace(fault, async_save=False) for fault in faults]
    worlds = sorted({fault.world_size for fault in faults})
    bad = 0

    def undisturbed(n: int) -> str:
        return train(args.script, folder / f"world-{n}", *FLAGS, *flags, nproc=n).summary[
            "weights_sha256"
        ]

    def judged(fault: Fault) -> list[str]:
        return suffer(
            fault, folder / f"fault-{fault.number}", weights[fault.world_size], args.script
        )

    with ThreadPoolExecutor(args.jobs) as pool:
        weights = dict(zip(worlds, pool.map(undisturbed, worlds), strict=True))
        for fault, problems in zip(faults, pool.map(judged, faults), strict=True):
            bad += bool(problems)
            where = f"{fault.kind:<15} on {fault.world_size} ranks at step {fault.step}"
            print(f"fault {fault.number:>3} {where}: {'; '.join(problems) or 'ok'}", flush=True)
    print(
        f"\n{len(faults)} faults, {bad} not ok, {time.monotonic() - start:.0f} s, seed {args.seed}"
    )
    print(f"see {folder}") if bad else shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    exits.run(main)
