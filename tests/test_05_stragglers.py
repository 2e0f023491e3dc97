"""05_ddp/stragglers.py: the slow rank that is planted is found by its phases, and uneven ranks end equal.

No test asks how fast anything is: the ranks have a logical clock. It ticks in each forward, and an all-reduce ends for
all ranks when the last one has come.
"""

import json

import pytest
from support.harness import (
    TINY,
    Result,
    assert_refused,
    in_long,
    run,
    with_fault,
    with_prelude,
)

SCRIPT = "05_ddp/stragglers.py"
LOGICAL_CLOCK = """
import time
import torch
import torch.distributed as dist
from lm import model

now = 0.0
forward, all_reduce = model.Transformer.forward, dist.all_reduce

def ticking_forward(*inputs):
    global now
    now += 1
    return forward(*inputs)

class Meeting:
    def __init__(self, work):
        self.work, self.came = work, torch.tensor(now)

    def wait(self):
        global now
        self.work.wait()
        all_reduce(self.came, op=dist.ReduceOp.MAX)
        now = max(now, self.came.item())

time.perf_counter = lambda: now
model.Transformer.forward = ticking_forward

def meeting_all_reduce(tensor, *, async_op=False, **more):
    work = all_reduce(tensor, async_op=async_op, **more)
    return Meeting(work) if async_op and not more else work  # join() names its group

dist.all_reduce = meeting_all_reduce
"""


def run_with_clock(script, folder, *flags, nproc: int) -> Result:
    (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    small = ("--device", "cpu", "--model", "tiny.json", "--steps", 3, "--json", "s.json")
    return run(with_prelude(script, folder, LOGICAL_CLOCK), folder, *small, *flags, nproc=nproc)


def test_the_planted_rank_is_found_and_the_others_wait_for_it(tmp_path):
    result = run_with_clock(
        SCRIPT, tmp_path, "--slow-rank", 2, "--slow-factor", 7, "--trace", "traces", nproc=3
    )
    assert result.code == 0, result
    rows = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["rows"]
    keys = ("rank", "forward_seconds", "wait_seconds", "step_seconds", "lag_ratio", "found_slow")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        *((rank, 1, 0, 1, 1, False) for rank in range(3)),
        (0, 1, 6, 7, 1, False),
        (1, 1, 6, 7, 1, False),
        (2, 7, 0, 7, 7, True),
    ]
    for rank in range(3):
        assert json.loads((tmp_path / f"traces/rank-{rank}.json").read_text(encoding="utf-8"))[
            "traceEvents"
        ]


WRONG = {  # a piece of the script, what stands there instead, words of the error
    "no rank is slow": (
        "            work = args.slow_factor\n",
        "            work = 1\n",
        "ranks [] were found, not 1",
    ),
    "a rank is slow that should not be": (
        '"nothing planted", net, batch, 1',
        '"", net, batch, 1 + 9 * rank',
        "slow",
    ),
    "step times are compared": (
        "add_phases(seconds, COMPUTE_PHASES)",
        "add_phases(seconds, PHASES)",
        "ranks [] were found, not 1",
    ),
}


@pytest.mark.parametrize("fault", ["step times are compared", *map(in_long, [*WRONG][:2])])
def test_it_fails_the_scripts_own_check(tmp_path, fault):
    piece, wrong, words = WRONG[fault]
    result = run_with_clock(with_fault(SCRIPT, tmp_path, piece, wrong), tmp_path, nproc=2)
    assert result.code == 1, result
    assert words in result.err.split("AssertionError: ")[1]


def test_what_is_refused(tmp_path):
    refusals = {"--slow-factor 2": "--slow-factor 2", "--model giant": "--model giant"}
    for given, words in refusals.items():
        assert_refused(run(SCRIPT, tmp_path, "--device", "cpu", *given.split()), *words.split())


@pytest.mark.gpu(n=2)
def test_stragglers_over_nccl(gpu_run, tmp_path):
    flags = ("--device", "cuda", "--trace", "traces", "--json", "s.json")
    result = gpu_run(SCRIPT, tmp_path, *flags, nproc=2)
    assert result.code == 0, result
    assert "nccl" in (tmp_path / "traces/rank-0.json").read_text(encoding="utf-8")
