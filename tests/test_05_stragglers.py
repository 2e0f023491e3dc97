"""05_ddp/stragglers.py: the slow rank that is planted is found by its phases and in the trace, the shares of a step add
up, and uneven ranks end equal.

No test asks how fast anything is.
"""

import json
import subprocess
from types import SimpleNamespace

import pytest
from support.chapter import load
from support.harness import assert_refused, command, run, with_fault

SCRIPT = "05_ddp/stragglers.py"
stragglers = load(SCRIPT)


def event(name: str, start: float, end: float, device: str = "CUDA", own: float = 0.0, label: bool = False):
    kind, time_range = SimpleNamespace(name=device), SimpleNamespace(start=start, end=end)
    own_time = {"self_cpu_time_total": own, "is_user_annotation": label}
    return SimpleNamespace(name=name, device_type=kind, time_range=time_range, **own_time)


def test_communication_that_a_kernel_overlaps_is_not_exposed():
    events = [
        event("ProfilerStep#1", 0, 100, "CPU", label=True),
        event("ProfilerStep#1", 0, 100, label=True),
        event("nvjet_tst_128x128", 0, 30),
        event("fmha_cutlassF_bf16_aligned", 30, 40),
        event("vectorized_elementwise_kernel", 40, 45),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 35, 70),
        event("nccl:all_reduce", 20, 90, label=True),
        event("Memcpy HtoD", 95, 120),  # the next step's, in part
        event("aten::mm", 0, 90, "CPU", own=90),
    ]
    found = stragglers.shares_of_step(events, "cuda")
    shares = {name.removesuffix("_share"): share for name, share in found.items() if name.endswith("share")}
    assert shares == pytest.approx(
        {"matmul": 0.3, "attention": 0.1, "elementwise": 0.1, "communication": 0.35, "exposed": 0.25, "idle": 0.25}
    )


IDLE = 'seconds["idle"] = step - length_of(union(compute + communication))'
WRONG = {  # a line, what stands there instead, ranks, what the error speaks of
    "shares that do not add up": (IDLE, f"{IDLE} + 0.1 * step", 1, "share"),
    "no rank is slow": ("dist.get_rank() == args.slow_rank else 1", "False else 1", 2, "slow"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_it_fails_the_scripts_own_check(tmp_path, fault):
    line, wrong, ranks, words = WRONG[fault]
    script = with_fault(SCRIPT, tmp_path, line, wrong)
    for _ in range(3):  # other work may slow the very rank that should have been slow
        result = run(script, tmp_path, "--device", "cpu", "--steps", 3, nproc=ranks)
        if result.code == 1:
            break
    assert result.code == 1, result.out + result.err
    assert words in result.err.split("AssertionError: ")[1]


def test_what_is_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--device", "cpu", "--slow-factor", "2"), "--slow-factor", "2")


def test_the_planted_rank_is_found_traced_and_uneven_ranks_end_equal(tmp_path):
    flags = ["--device", "cpu", "--slow-rank", 2, "--steps", 5, "--trace", "traces", "--json", "s.json"]
    for _ in range(3):  # other work that slows a healthy rank hides the planted one, and the script then says so
        result = run(SCRIPT, tmp_path, *flags, nproc=3)
        if result.code == 0:
            break
    assert result.code == 0, result.out + result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    found = [row for row in summary["rows"] if row["found_slow"]]
    assert [row["rank"] for row in found] == [2]
    planted = {row["rank"]: row["wait_seconds"] for row in summary["rows"] if row["name"] == found[0]["name"]}
    assert planted[2] < min(planted[0], planted[1])
    for rank, row in enumerate(summary["traced"]):
        assert row["exposed_share"] <= row["communication_share"]
        events = json.loads((tmp_path / f"traces/rank-{rank}.json").read_text())["traceEvents"]
        assert len({event["name"] for event in events if event["name"].startswith("ProfilerStep#")}) == 3
    assert summary["uneven"]["hung_ranks_without_join"] == [1, 2]
    assert summary["waiting_share"]["balanced"] < summary["waiting_share"]["as they come"]


@pytest.mark.gpu(n=2)
def test_stragglers_over_nccl(gpus, tmp_path):
    argv = command(SCRIPT, "--device", "cuda", "--trace", "traces", "--json", "s.json", nproc=2)
    done = subprocess.run(argv, cwd=tmp_path, env=gpus, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads((tmp_path / "s.json").read_text())
    assert all(row["matmul_share"] > 0 and row["communication_share"] > 0 for row in summary["traced"])
