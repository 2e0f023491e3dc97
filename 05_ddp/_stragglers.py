"""Flags, rows and checks of stragglers.py."""

import statistics
from collections.abc import Iterable

import torch
import torch.distributed as dist

from common import cli

COLUMNS = {
    "name": "run",
    "rank": "rank",
    "step_seconds": "step",
    "data_seconds": "data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "wait_seconds": "all-reduce wait",
    "optimizer_seconds": "optimizer",
    "lag_ratio": "compute / typical",
}


def parser(doc: str) -> cli.Parser:
    """Return the parser of the flags. --model and --seq-len are None if they are not given."""
    parser = cli.Parser(doc)
    parser.add_argument(
        "--slow-rank",
        type=cli.natural,
        default=1,
        help="the rank that is made slow (default: 1)",
    )
    parser.add_argument(
        "--slow-factor",
        type=cli.positive_int,
        default=10,
        help="how many times the work it gets (default: 10)",
    )
    parser.add_argument(
        "--steps",
        type=cli.positive_int,
        default=10,
        help="of each of the two runs (default: 10)",
    )
    parser.add_argument("--model", help="as in train.py (default: nano, on a GPU wide)")
    parser.add_argument(
        "--seq-len", type=cli.positive_int, help="tokens (default: 32, on a GPU 512)"
    )
    parser.add_argument(
        "--batch-size",
        type=cli.positive_int,
        default=2,
        help="sequences per rank (default: 2)",
    )
    parser.add_argument(
        "--trace",
        type=cli.output_folder,
        metavar="FOLDER",
        help="write rank-0.json ... there, for ui.perfetto.dev",
    )
    cli.add_device_and_json(parser)
    return parser


# --- slow ranks


def add_phases(seconds: dict[str, list[float]], phases: Iterable[str]) -> list[float]:
    """Return the seconds of each step, added up over these phases."""
    columns = [seconds[phase] for phase in phases]
    return [sum(step) for step in zip(*columns, strict=True)]


def row_of(name: str, rank: int, seconds: dict[str, list[float]]) -> dict:
    """Return the row of a rank: the median of each phase, and the median and range of a step."""
    step_seconds = add_phases(seconds, seconds)
    row = {
        "name": name,
        "rank": rank,
        "n": len(step_seconds),
        "step_seconds": statistics.median(step_seconds),
        "min_step_seconds": min(step_seconds),
        "max_step_seconds": max(step_seconds),
    }
    for phase, values in seconds.items():
        row[f"{phase}_seconds"] = statistics.median(values)
    return row


def check(healthy: list[dict], planted: list[dict], slow_rank: int) -> list[str]:
    """Assert that the planted rank alone is found, and that it waits less than the others.

    Return a line for each thing that was checked.
    """
    assert not any(row["found_slow"] for row in healthy), (
        "a rank is slow although none was planted: does its machine have other work?"
    )
    found = [row["rank"] for row in planted if row["found_slow"]]
    assert found == [slow_rank], f"ranks {found} were found, not {slow_rank}, which was made slow"

    waits = [row["wait_seconds"] for row in planted]
    slow_wait = waits.pop(slow_rank)
    assert slow_wait < min(waits), (
        f"the others do not wait for rank {slow_rank}: {slow_wait:.2g} s against {waits}"
    )

    step = max(row["step_seconds"] for row in planted)
    healthy_step = max(row["step_seconds"] for row in healthy)
    wait_share = slow_wait / planted[slow_rank]["step_seconds"]
    return [
        f"rank {slow_rank} alone was found; a step of every rank takes {step / healthy_step:.1f} "
        "times as long",
        f"rank {slow_rank} waits {wait_share:.0%} of a step, less than any other rank",
    ]


# --- uneven inputs


def batches_of(rank: int) -> int:
    """Return how many batches a rank has: uneven on purpose."""
    return 4 + 2 * rank


def check_uneven_inputs(with_join: list[list[float]], errors: list[str]) -> list[str]:
    """Assert that ranks end equal with join(), and that they hang without it.

    `with_join` has the weights of each rank, and `errors` the error of each rank without join(), or
    "". Return a line for each thing that was checked.
    """
    n = dist.get_world_size()
    weights = with_join[0]
    assert all(weights_of_rank == weights for weights_of_rank in with_join), (
        f"ranks end with different weights: {with_join}"
    )
    # join() divides every sum by n, also when some ranks have no batch left. So all samples count
    # the same.
    expected = [batches_of(rank) / n for rank in range(n)]
    assert torch.allclose(torch.tensor(weights), torch.tensor(expected)), (
        f"ranks end with the weights {weights}, not with {expected}"
    )

    # The first rank that gives up closes its connections. Others may report that, and no timeout.
    assert any("Timed out" in error for error in errors), f"no rank waited: {errors}"
    hung = [rank for rank in range(n) if errors[rank]]
    assert hung == list(range(1, n)), (
        f"ranks {hung} hung, not all that have more batches than rank 0"
    )
    return [
        f"uneven inputs: with join() all {n} ranks end with the same weights, in which every "
        "sample counts the same",
        f"without join() ranks {hung} waited for rank 0 until the timeout",
    ]
