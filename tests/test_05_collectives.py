"""05_ddp/collectives.py: its arithmetic by hand, results with 2 and 3 ranks, and what is planted.

No test asks how fast anything is: seconds are given, or only put back together from the bytes.
"""

import json
import subprocess
import sys

import pytest
import torch
from support.chapter import load
from support.harness import ROOT, command, run

from common import exits, lesson, report, shapes

collectives = load("05_ddp/collectives.py")
collectives_links = load("05_ddp/_collectives.py")

COLLECTIVES = ["broadcast", "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send/recv"]
# every wrong one is a real collective, or does nothing: what a slip of the pen would give
WRONG = """
import sys
import torch, torch.distributed as dist
sys.path[:0] = [{folder!r}, {folder!r} + "/05_ddp"]
import collectives
from common import runtime

device = runtime.init_process_group("cpu")
rank, n = dist.get_rank(), dist.get_world_size()
mine = collectives.pattern(100 * n, device) * (rank + 1)
out = torch.empty_like(mine)
right = collectives.collectives(mine, out, rank, n)

def backwards():
    ops = [dist.P2POp(dist.isend, mine, (rank - 1) % n), dist.P2POp(dist.irecv, out, (rank + 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()

def moved():
    right["all-reduce"][0]()
    out.copy_(out.roll(1))

wrong = {{
    "broadcast": [lambda: dist.broadcast(out, src=n - 1)],
    "all-reduce": [lambda: dist.all_reduce(out, op=dist.ReduceOp.MAX), lambda: None, moved],
    "reduce-scatter": [lambda: collectives.reduce_scatter(out[:100], mine, op=dist.ReduceOp.MAX)],
    "all-gather": [lambda: collectives.all_gather(out, mine[:100] * (1 + (rank == 0))), lambda: None],
    "all-to-all": [lambda: collectives.all_gather(out, mine[:100]), lambda: None],
    "send/recv": [backwards],
}}
seen = 0
for name, (work, result) in right.items():
    collectives.check_result(name, work, result, mine, out, rank, n)
    for planted in wrong[name]:
        try:
            collectives.check_result(name, planted, result, mine, out, rank, n)
        except AssertionError as error:
            assert name in str(error) and "is wrong on rank" in str(error)
            seen += 1
found = torch.tensor(seen)
dist.all_reduce(found)
if rank == 0:
    print("seen", found.item())
collectives.nvlink = lambda device, one_node: (1.0, "one byte per second")
collectives.runtime.init_process_group = lambda name: device  # there is one already
sys.argv = ["collectives.py", "--max-bytes", "1024", "--samples", "1"]
try:
    collectives.main()
except AssertionError as error:
    if rank == 0:
        print("told", error)
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("n", "factors"),
    [(1, [0, 0, 0, 0, 0, 0]), (2, [1, 1, 0.5, 0.5, 0.5, 1]), (3, [1, 4 / 3, 2 / 3, 2 / 3, 2 / 3, 1])],
)
def test_bus_factors(n, factors):
    assert [collectives_links.bus_factor(name, n) for name in COLLECTIVES] == pytest.approx(factors)


def test_bandwidths_by_hand():
    """8 ranks all-reduce 1 GB in 5 ms: 200 GB/s of algorithm, times 14/8 on the bus; the median counts."""
    m = collectives_links.measurement("all-reduce", 8, 10**9, [0.004, 0.005, 0.9], 450e9)
    assert (m["seconds_min"], m["seconds_median"], m["seconds_max"], m["samples"]) == (0.004, 0.005, 0.9, 3)
    assert m["algorithm_bytes_per_second"] == pytest.approx(200e9)
    assert m["bus_bytes_per_second"] == pytest.approx(350e9)
    assert m["share_of_peak"] == pytest.approx(350 / 450)
    assert collectives_links.measurement("all-reduce", 8, 10**9, [0.005], None)["share_of_peak"] is None


def test_more_than_the_links_peak_is_a_bug():
    def found(name: str, n: int, gigabytes_per_second: float) -> list[str]:
        seconds = [1.0, 1 / gigabytes_per_second]  # one sample is enough
        return collectives_links.bugs([collectives_links.measurement(name, n, 10**9, seconds, 450e9)], 450e9)

    assert found("broadcast", 8, 449) == []
    assert "broadcast, 1000000000 bytes: 451 GB/s, peak 450" in found("broadcast", 8, 451)[0]
    assert found("all-gather", 8, 510) == []  # 7/8 of it on the link
    assert len(found("all-gather", 8, 520)) == 1
    # the switch may add up: 275 GB/s of buffer is 481 of "bus" on 8 GPUs and no bug, more buffer than peak is one
    assert found("all-reduce", 8, 275) == []
    assert len(found("all-reduce", 8, 451)) == 1
    assert collectives_links.bugs([collectives_links.measurement("broadcast", 2, 10**9, [1e-9], None)], None) == []


def test_the_fit_recovers_a_planted_line():
    sizes = [1024 * 4**i for i in range(9)]
    planted = [20e-6 + size / 300e9 for size in sizes]
    line = collectives_links.fit(sizes, planted)
    assert line["alpha_seconds"] == pytest.approx(20e-6, rel=1e-6)
    assert line["beta_bytes_per_second"] == pytest.approx(300e9, rel=1e-6)
    assert line["factor_off_max"] == pytest.approx(1, abs=1e-9)

    def with_late(late: int, factor: float) -> dict:
        return collectives_links.fit(
            sizes, [(20e-6 + size / 300e9) * (factor if i == late else 1) for i, size in enumerate(sizes)]
        )

    # one time half as long again shows in the quality, and does not carry the line off
    disturbed = with_late(4, 1.5)
    assert disturbed["factor_off_max"] == pytest.approx(1.5, abs=0.15)
    assert disturbed["alpha_seconds"] == pytest.approx(20e-6, rel=0.1)
    assert disturbed["beta_bytes_per_second"] == pytest.approx(300e9, rel=0.1)
    # a largest message 20 % late moves the latency by 1 %, not by the 8 % of plain least squares
    assert with_late(8, 1.2)["alpha_seconds"] == pytest.approx(20e-6, rel=0.02)
    # half and double are equally wrong: between them lies the middle
    swinging = collectives_links.fit(sizes, [t * f for t, f in zip(planted, [2, 0.5, 1] * 3, strict=True)])
    assert swinging["alpha_seconds"] == pytest.approx(20e-6, rel=0.1)
    assert collectives_links.fit(sizes[:2], [1e-5, 2e-5]) is None
    assert collectives_links.fit(sizes, planted[::-1]) is None  # times that fall have no line


def test_predictions_are_the_line_at_the_size_of_the_gradients():
    found = collectives_links.predictions({"alpha_seconds": 1e-3, "beta_bytes_per_second": 1e9})
    assert [(p["model"], p["gradients"]) for p in found] == [
        (name, dtype) for name in shapes.SIZES for dtype in ("fp32", "bf16")
    ]
    by_name = {(p["model"], p["gradients"]): p for p in found}
    assert by_name["llama-8b", "bf16"]["bytes"] == 2 * 8_030_261_248
    assert by_name["llama-70b", "fp32"]["bytes"] == 4 * 70_553_706_496
    for p in found:
        assert p["predicted_seconds"] == pytest.approx(1e-3 + p["bytes"] / 1e9)


def test_nvlinks_peak_is_lanes_times_the_rate_of_the_architecture(monkeypatch):
    def peak(name: str, capability: tuple[int, int], lanes: int | None, one_node: bool = True) -> float | None:
        monkeypatch.setattr(collectives_links, "lanes_up", lambda asked: lanes if asked.index == 1 else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        found, told = collectives_links.nvlink(torch.device("cuda", 1), one_node)
        assert found is None or f"{lanes} lanes" in told
        return found

    # the data sheets count both directions: 900, 600, 1,800 and 100 GB/s
    assert peak("NVIDIA H100 80GB HBM3", (9, 0), 18) == 450e9
    assert peak("NVIDIA A100-SXM4-80GB", (8, 0), 12) == 300e9
    assert peak("NVIDIA B200", (10, 0), 18) == 900e9
    assert peak("Quadro RTX 8000", (7, 5), 2) == 50e9
    # GA102: "112.5 GB/s total bandwidth", 14.0625 a lane and direction
    assert peak("NVIDIA A40", (8, 6), 4) == 56.25e9
    assert peak("NVIDIA RTX A6000", (8, 6), 4) == 56.25e9
    assert peak("NVIDIA GeForce RTX 3090", (8, 6), 4) == 56.25e9
    assert peak("NVIDIA H100 80GB HBM3", (9, 0), 18, one_node=False) is None
    assert peak("NVIDIA L4", (8, 9), 0) is None  # no lanes
    assert peak("NVIDIA H300", (99, 0), 18) is None  # lanes of a rate not known here
    assert peak("NVIDIA H100 80GB HBM3", (9, 0), None) is None
    assert collectives_links.nvlink(torch.device("cuda", 0), True)[0] is None  # no driver that answers
    assert collectives_links.nvlink(torch.device("cpu"), True)[0] is None


def test_three_ranks_are_right_and_every_wrong_collective_is_seen(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG.format(folder=str(ROOT)))
    result = run(tmp_path / "wrong.py", tmp_path, nproc=3)
    assert result.code == 0, result.err
    assert "seen 29\n" in result.out  # 10 wrong ones by 3 ranks, but to rank 0 an all-gather is the all-to-all
    assert result.out.count("GB/s, peak ") == 6  # what is above a peak is told


def test_collectives_bare_starts_two_ranks(tmp_path):
    flags = ["--device", "cpu", "--max-bytes", 70_000, "--samples", 3, "--json", "c.json", "--plot", "c.png"]
    result = run("05_ddp/collectives.py", tmp_path, *flags, warm=False)  # torchrun for real
    assert result.code == 0, result.err
    assert "torchrun --nproc_per_node=2" in result.out
    summary = json.loads((tmp_path / "c.json").read_text())
    assert set(summary) >= set(report.SUMMARY)
    assert (summary["script"], summary["world_size"], summary["backend"]) == ("05_ddp/collectives.py", 2, "gloo")
    found = [(m["bytes"], m["collective"]) for m in summary["measurements"]]
    assert found == [(size, name) for size in (1024, 4096, 16384, 65536) for name in COLLECTIVES]
    assert summary["not_measured"] == {}
    assert "checked: 24 results of 6 collectives, to the bit, on all 2 ranks" in result.out
    for m in summary["measurements"]:
        factor = 0.5 if m["collective"] in ("reduce-scatter", "all-gather", "all-to-all") else 1
        assert m["bus_bytes_per_second"] == pytest.approx(factor * m["bytes"] / m["seconds_median"])
        assert m["samples"] == 3
        assert 0 < m["seconds_min"] <= m["seconds_median"] <= m["seconds_max"]
        assert m["share_of_peak"] is None
    assert summary["link_peak_bytes_per_second"] is None
    assert [row["collective"] for row in summary["rows"]] == list(summary["fits"]) == COLLECTIVES
    for p in summary["predictions"]:
        assert ("measured_seconds" in p) == (p["model"] == "nano")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_flag_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--max-bytes", "1000"])
    with pytest.raises(exits.UserError, match="--max-bytes 1000: the smallest buffer has 1024 bytes"):
        collectives.main()


@pytest.mark.parametrize(
    ("device", "gpus", "processes", "place"),
    [
        ("auto", 0, 2, "cpu"),
        ("auto", 1, 2, "cpu"),
        ("auto", 4, 4, "cuda"),
        ("cuda", 2, 2, "cuda"),
        ("cpu", 4, 2, "cpu"),
    ],
)
def test_bare_becomes_torchrun(monkeypatch, device, gpus, processes, place):
    started = []
    monkeypatch.setattr(lesson.os, "execv", lambda program, argv: started.extend(argv))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["script.py", "--samples", "3"])
    lesson.relaunch(device)
    assert f"--nproc_per_node={processes}" in started
    assert started[-5:] == ["script.py", "--samples", "3", "--device", place]
    started.clear()
    monkeypatch.setenv("RANK", "0")
    lesson.relaunch(device)
    assert started == []  # torchrun has started it


@pytest.mark.gpu(n=2)
def test_nccl(gpus, tmp_path):
    """Every result right on two GPUs, nothing above the link's peak."""
    argv = command("05_ddp/collectives.py", "--device", "cuda", "--max-bytes", 2**28, "--json", "c.json", nproc=2)
    done = subprocess.run(argv, cwd=tmp_path, env=gpus, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads((tmp_path / "c.json").read_text())
    assert (summary["backend"], summary["not_measured"]) == ("nccl", {})
    assert {m["collective"] for m in summary["measurements"]} == set(COLLECTIVES)
    assert max(m["bytes"] for m in summary["measurements"]) == 2**28
    assert summary["predictions"][0]["measured_seconds"] > 0
