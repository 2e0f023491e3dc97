"""05_ddp/stragglers.py: the slow rank that is planted is found by its phases and in the trace, the shares of a step add
up, and uneven ranks end equal.

No test asks how fast anything is.
"""

import json
import subprocess
from types import SimpleNamespace

import pytest
from support.chapter import load
from support.harness import command, run

from common import report

stragglers = load("05_ddp/stragglers.py")


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


def test_on_a_cpu_the_operators_own_time_counts():
    events = [
        event("ProfilerStep*", 0, 100, "CPU", own=40, label=True),
        event("autograd::engine::evaluate_function: MmBackward0", 5, 65, "CPU", own=10),
        event("aten::matmul", 10, 60, "CPU", own=5),
        event("aten::mm", 15, 60, "CPU", own=45),
        event("gloo:all_reduce", 50, 80, "CPU", label=True),
    ]
    found = stragglers.shares_of_step(events, "cpu")
    assert found["matmul_share"] == 0.5
    assert (found["communication_share"], found["exposed_share"], found["idle_share"]) == (0.3, 0.2, 0.3)


def traced_row(rank: int, **own) -> dict:
    shares = {"matmul": 0.5, "attention": 0.1, "elementwise": 0.1, "exposed": 0.2, "idle": 0.1} | own
    return {"rank": rank, **{f"{kind}_share": share for kind, share in shares.items()}}


def test_shares_that_do_not_add_up_and_ranks_that_do_not_wait_are_seen():
    row = {"found_slow": False, "step_seconds": 1.0}
    rows = [{**row, "name": "nothing planted", "rank": rank} for rank in range(2)]
    rows += [{**row, "name": "planted", "rank": rank, "found_slow": rank == 1} for rank in range(2)]
    waits, slow = traced_row(0, matmul=0.1, exposed=0.6), traced_row(1)
    assert "rank 1 alone was found" in stragglers.check(rows, [waits, slow], 1)[0]
    with pytest.raises(AssertionError, match="rank 1: the shares of a step add up to 110"):
        stragglers.check(rows, [waits, traced_row(1, matmul=0.6)], 1)
    with pytest.raises(AssertionError, match="the others do not wait for rank 1"):
        stragglers.check(rows, [slow, slow], 1)
    with pytest.raises(AssertionError, match=r"ranks \[1\] were found, not 0"):
        stragglers.check(rows, [slow, waits], 0)


def test_the_planted_rank_is_found_traced_and_uneven_ranks_end_equal(tmp_path):
    flags = ["--device", "cpu", "--slow-rank", 2, "--steps", 5, "--trace", "traces", "--json", "s.json"]
    for _ in range(
        3
    ):  # other tests run beside it: where they slow a healthy rank, the script refuses its own measurement
        result = run("05_ddp/stragglers.py", tmp_path, *flags, nproc=3)
        if "has it other work?" not in result.err:
            break
    assert result.code == 0, result.out + result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert set(summary) >= set(report.SUMMARY)
    assert [(row["rank"], row["found_slow"]) for row in summary["rows"]] == [(r % 3, r == 5) for r in range(6)]
    planted = summary["rows"][3:]
    assert planted[2]["wait_seconds"] < min(row["wait_seconds"] for row in planted[:2])
    for rank, row in enumerate(summary["traced"]):
        parts = ("matmul", "attention", "elementwise", "exposed", "idle")
        assert sum(row[f"{kind}_share"] for kind in parts) == pytest.approx(1, abs=stragglers.TOLERANCE)
        assert row["exposed_share"] <= row["communication_share"]
        events = json.loads((tmp_path / f"traces/rank-{rank}.json").read_text())["traceEvents"]
        assert len({event["name"] for event in events if event["name"].startswith("ProfilerStep#")}) == 3
    uneven = summary["uneven"]
    assert uneven["hung_ranks_without_join"] == [1, 2]
    # steps 1 to 4 have three ranks, 5 and 6 two, 7 and 8 one
    assert uneven["samples"] == [4, 6, 8]
    assert uneven["weights_divided_by_all"] == pytest.approx([4 / 3, 6 / 3, 8 / 3])
    assert uneven["weights_divided_by_left"] == pytest.approx([4 / 3, 4 / 3 + 2 / 2, 4 / 3 + 2 / 2 + 2 / 1])
    assert summary["waiting_share"]["balanced"] < summary["waiting_share"]["as they come"]


@pytest.mark.gpu(n=2)
def test_stragglers_over_nccl(gpus, tmp_path):
    argv = command("05_ddp/stragglers.py", "--device", "cuda", "--trace", "traces", "--json", "s.json", nproc=2)
    done = subprocess.run(argv, cwd=tmp_path, env=gpus, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads((tmp_path / "s.json").read_text())
    assert all(row["matmul_share"] > 0 and row["communication_share"] > 0 for row in summary["traced"])
