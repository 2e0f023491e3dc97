"""05_ddp/collectives.py: its arithmetic by hand, results with 2 and 3 ranks, and what is planted.

No test asks how fast anything is: seconds are given, or only put back together from the bytes.
"""

import json

import pytest
from support.chapter import load
from support.harness import ROOT, run

from common import report

collectives = load("05_ddp/collectives.py")

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
