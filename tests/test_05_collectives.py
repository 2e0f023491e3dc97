"""05_ddp/collectives.py: each collective's result, the arithmetic of its figures, and that a wrong result is found."""

import json

import pytest
from support.harness import assert_refused, in_long, run, with_prelude

SCRIPT = "05_ddp/collectives.py"
COLLECTIVES = {"broadcast", "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send/recv"}
SMALL = ("--device", "cpu", "--max-bytes", 1024, "--samples", 1)

# `replace` makes a function of torch.distributed wrong, under each name that it has.
REPLACE = """
import torch.distributed as dist
from common import torch_versions
MAX = dist.ReduceOp.MAX
def replace(change, *names):
    for module in (dist, torch_versions):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, change(getattr(module, name)))
"""
WRONG = {
    "broadcast": "replace(lambda real: lambda out, src: real(out, src=1), 'broadcast')",
    "all-reduce": "replace(lambda real: lambda out, op=MAX: real(out, op=op), 'all_reduce')",
    "reduce-scatter": (
        "replace(lambda real: lambda out, full: real(out, full, op=MAX), 'reduce_scatter_single')"
    ),
    "all-gather": (
        "replace(lambda real: lambda out, part: (real(out, part), out.copy_(out.roll(1))),"
        " 'all_gather_single')"
    ),
    "all-to-all": "replace(lambda real: lambda out, full: None, 'all_to_all_single')",
    "send/recv": "replace(lambda real: lambda call, x, peer: real(call, -x, peer), 'P2POp')",
}


@pytest.mark.parametrize(
    "name", [name if name == "all-reduce" else in_long(name) for name in WRONG]
)
def test_a_wrong_result_is_found_and_named(tmp_path, name):
    result = run(with_prelude(SCRIPT, tmp_path, REPLACE + WRONG[name]), tmp_path, *SMALL, nproc=2)
    assert result.code == 1, result.out + result.err
    assert f"AssertionError: {name} " in result.err


def test_faster_than_the_link_is_a_bug(tmp_path):
    result = run(SCRIPT, tmp_path, *SMALL, "--link-gb-per-s", 1e-9, nproc=2)
    assert result.code == 1, result.out + result.err
    assert "AssertionError: BUG" in result.err


def test_every_collective_is_measured_at_every_size(tmp_path):
    """Without torchrun the script starts two ranks itself. No test asks how fast anything is."""
    flags = [
        "--device",
        "cpu",
        "--max-bytes",
        20_000,
        "--samples",
        3,
        "--link-gb-per-s",
        1e6,
        "--json",
        "c.json",
    ]
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert summary["world_size"] == 2
    assert {row["collective"] for row in summary["rows"]} == COLLECTIVES
    for row in summary["rows"]:
        assert [m["bytes"] for m in row["measurements"]] == [1024, 4096, 16384]
        for m in row["measurements"]:
            factor = (
                0.5 if row["collective"] in ("reduce-scatter", "all-gather", "all-to-all") else 1
            )
            assert m["bus_bytes_per_second"] == pytest.approx(factor * m["bytes"] / m["seconds"])
            assert 0 < m["min_seconds"] <= m["seconds"] <= m["max_seconds"]
        assert row["link_share"] == pytest.approx(row["bus_gb_per_s"] / 1e6)


def test_what_is_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--max-bytes", "100"), "--max-bytes", "100", "1024")
