"""Flags, processes and checks of survive.py."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common import cli
from common.exits import UserError
from lm import stdlib_text, weights
from training.digest import digest as digest

RANKS = 3
GLOBAL_BATCH = 24
SECONDS = 300  # of the whole life of a rank
# Variables of a rank's environment.
FOLDER = "SURVIVE_FOLDER"
RESTARTED = "SURVIVE_RESTARTED"
COLUMNS = {
    "name": "how",
    "noticed_seconds": "error after",
    "ready_seconds": "ready after",
    "total_seconds": "next step done after",
}


def parse_flags(doc: str) -> argparse.Namespace:
    """Return the flags. Raise UserError for those that do not fit each other."""
    parser = cli.Parser(doc)
    add = parser.add_argument
    add("--kill-rank", type=cli.natural, default=1, help="0, 1 or 2 (default: 1)")
    add("--kill-step", type=cli.positive_int, default=5)
    add("--moment", choices=("all-reduce", "vote"), default="all-reduce")
    add("--steps", type=cli.positive_int, default=10)
    add("--model", default="nano", help="as in train.py")
    add("--seq-len", type=cli.positive_int, default=32, help="tokens")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    if args.device not in ("auto", "cpu"):
        raise UserError(f"--device {args.device}: the ranks of this lesson use gloo on the CPU")
    if args.kill_rank >= RANKS:
        raise UserError(f"--kill-rank {args.kill_rank}: the last of {RANKS} ranks is {RANKS - 1}")
    if args.kill_step >= args.steps:
        raise UserError(f"--kill-step {args.kill_step}: it must be below --steps {args.steps}")
    if FOLDER not in os.environ and "RANK" in os.environ:
        raise UserError("this script starts its ranks by itself: start it with plain python")
    weights.load_config(args.model, 256, args.seq_len)  # raises here, once, for a wrong model
    return args


def build(args: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, the same on every rank."""
    config = weights.load_config(args.model, 256, args.seq_len)
    model = weights.build(args.model, config, seed=0, device="cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def save_checkpoint(folder: Path, model: nn.Module, optimizer, step: int) -> None:
    """Write a checkpoint to `folder`."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, folder / "checkpoint.pt")


def load_checkpoint(folder: Path, model: nn.Module, optimizer) -> int:
    """Load the checkpoint in `folder`, and return its step."""
    state = torch.load(folder / "checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


# --- what is planted


class Plan:
    """Kill a rank, and let a survivor lose the result of a vote, as the flags say."""

    def __init__(self, args: argparse.Namespace, me: int, store: dist.Store) -> None:
        self.store = store
        self.step = args.kill_step
        self.moment = args.moment
        self.victim = me == args.kill_rank
        self.loses_result = me == (args.kill_rank + 1) % RANKS
        if RESTARTED in os.environ:
            self.step = 0

    def kill_myself(self, step: int, moment: str) -> None:
        """Send this process SIGKILL if its time has come."""
        if self.victim and step == self.step and moment == self.moment:
            self.store.set("killed", str(time.time()))
            self.store.get("killed")  # so that it has arrived
            os.kill(os.getpid(), signal.SIGKILL)

    def lose_result(self, step: int) -> None:
        """Raise RuntimeError, as a vote does whose result does not arrive."""
        if self.loses_result and step == self.step and self.moment == "vote":
            raise RuntimeError("planted: the result of the vote did not arrive")


# --- the parent


class Ranks:
    """Start ranks, announce who has died, and collect reports. Host the store of all of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.generation = 0
        self.processes: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> "Ranks":
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        inputs, targets = stdlib_text.one_batch(
            self.args.steps * GLOBAL_BATCH, self.args.seq_len, "cpu"
        )
        rows = torch.cat([inputs, targets[:, -1:]], dim=1)
        torch.save(rows.unflatten(0, (self.args.steps, GLOBAL_BATCH)), self.folder / "batches.pt")
        return self

    def __exit__(self, *_exception) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.temporary.cleanup()

    def run(self, ranks: range, killed: int | None) -> dict[int, dict]:
        """Start ranks, and wait until they have ended. Return the reports of those that lived.

        `killed` is the rank that will die. Without one the ranks start from the checkpoint.
        """
        settings = {FOLDER: str(self.folder), "MASTER_ADDR": "127.0.0.1"}
        settings |= {"MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(len(ranks))}
        if killed is None:
            self.generation += 1
            settings[RESTARTED] = str(self.generation)
        self.announce(list(ranks))
        self.started = time.time()
        for rank in ranks:
            environment = os.environ | settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes[rank] = subprocess.Popen([sys.executable, *sys.argv], env=environment)

        living = list(ranks)
        if killed is not None:
            self.processes[killed].wait(SECONDS)
            living.remove(killed)
            assert self.processes[killed].returncode == -signal.SIGKILL
            self.generation += 1
            self.announce(living)
        for rank in living:
            code = self.processes[rank].wait(SECONDS)
            assert code == 0, f"rank {rank} has ended with exit code {code}"
        return {rank: self.read(f"report {self.generation} {rank}") for rank in living}

    def announce(self, members: list[int]) -> None:
        """Tell the ranks who belongs to the next process group."""
        self.store.set(f"members of generation {self.generation}", json.dumps(members))

    def read(self, key: str) -> dict | float:
        """Return a value that a rank has left in the store."""
        self.store.wait([key], timedelta(seconds=10))
        return json.loads(self.store.get(key))


def train_alone(args: argparse.Namespace, folder: Path) -> list[float]:
    """Return the losses of all steps in one process, undisturbed."""
    model, optimizer = build(args)
    losses = []
    for rows in torch.load(folder / "batches.pt"):
        optimizer.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- the report


def losses_of(reports: dict[int, dict]) -> list[tuple[int, float]]:
    """Return each step with its loss. A rank that lost the result of a vote has not all of them."""
    losses = {}
    for report in reports.values():
        for step, loss in report["losses"].items():
            losses[int(step)] = loss
    return sorted(losses.items())


def rows_of(ranks: Ranks, survivors: dict[int, dict], restarted: dict[int, dict]) -> list[dict]:
    """Return a row for each way to go on. Seconds are those of the slowest rank."""
    killed = ranks.read("killed")
    rows = []
    for name, start, reports in (
        ("the survivors go on", killed, survivors),
        ("a restart from a checkpoint", ranks.started, restarted),
    ):
        row = {"name": name}
        for key, moment in (
            ("noticed", "noticed"),
            ("ready", "recovered"),
            ("total", "first_step"),
        ):
            times = [report[moment] for report in reports.values() if moment in report]
            row[f"{key}_seconds"] = max(times) - start if times else None
        rows.append(row)
    return rows


def check(
    args: argparse.Namespace,
    survivors: dict[int, dict],
    restarted: dict[int, dict],
    undisturbed: list[float],
) -> list[str]:
    """Assert that no step was lost or made twice. Return a line for each thing that was checked."""
    assert len({report["digest"] for report in survivors.values()}) == 1, "weights differ"
    steps = {report["start"] for report in survivors.values()}
    assert len(steps) == 1, f"the survivors went on from steps {steps}"
    [start] = steps
    losses = losses_of(survivors)
    assert [step for step, _ in losses] == list(range(1, args.steps + 1)), losses
    after = losses[start:]
    assert after == losses_of(restarted), (after, losses_of(restarted))

    errors = []
    for (_, loss), expected in zip(losses, undisturbed, strict=True):
        errors.append(abs(loss - expected) / expected)
    assert max(errors) < 1e-5, f"losses {losses}, undisturbed {undisturbed}"
    count = len(survivors)
    return [
        f"all {count} survivors hold the same weights, bit for bit",
        f"the losses of steps {start + 1} to {args.steps} are those of {count} ranks that start "
        f"from the weights after step {start}, bit for bit",
        f"the losses of all {args.steps} steps are those of one undisturbed process "
        f"(largest relative difference: {max(errors):.0e})",
    ]
