"""Test 06_fsdp_zero/zero_from_scratch.py: each stage trains as DDP does, and holds 1/N of it."""

import json
from pathlib import Path

import pytest
from support.harness import TINY, assert_refused, in_long, run, with_fault

SCRIPT = "06_fsdp_zero/zero_from_scratch.py"
STEPS = 4
FLAGS = ("--model", "tiny.json", "--device", "cpu", "--steps", STEPS, "--json", "s.json")
SHAPES = {
    "untied": {**TINY, "tie_word_embeddings": False},
    # 2 ranks divide neither the 9,669 parameters of a block nor the 8,481 outside of blocks.
    "odd": {
        **TINY,
        "hidden_size": 33,
        "intermediate_size": 65,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
}
BLOCKS = 2
PARAMETERS_OF_BLOCK = {"untied": 9_280, "odd": 9_669}
PARAMETERS_OUTSIDE = {"untied": 16_416, "odd": 8_481}
TENSORS = {"untied": 9 * BLOCKS + 3, "odd": 9 * BLOCKS + 2}
RUNS = [("odd", None), ("untied", 3)]  # without torchrun the script starts two ranks itself


def start(folder, shape: str, nproc: int | None, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    return run(script, folder, *FLAGS, nproc=nproc)


def name_of(parameters) -> str:
    shape, nproc = parameters
    return f"{shape}-{nproc or 2}"


@pytest.fixture(scope="module", params=RUNS, ids=name_of)
def finished(request, once) -> tuple[str, int, dict]:
    """The shape, the number of ranks and the summary of a run."""
    return once("06 zero", finish, *request.param)


def finish(folder: Path, shape: str, nproc: int | None) -> tuple[str, int, dict]:
    result = start(folder, shape, nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return shape, nproc or 2, json.loads((folder / "s.json").read_text(encoding="utf-8"))


def rounded_up(count: int, ranks: int) -> int:
    """The count with padding, so that the ranks divide it."""
    return -(-count // ranks) * ranks


def values_of(row: dict, kinds: list[str], ending: str) -> list[int]:
    return [row.get(f"{kind}_{ending}", 0) for kind in kinds]


def test_a_rank_holds_and_sends_what_it_must(finished):
    """Numbers from the shape, which this test computes by itself."""
    shape, n, summary = finished
    block = PARAMETERS_OF_BLOCK[shape]
    outside = PARAMETERS_OUTSIDE[shape]
    tensors = TENSORS[shape]
    total = BLOCKS * block + outside
    as_one_group = rounded_up(total, n)
    in_groups = BLOCKS * rounded_up(block, n) + rounded_up(outside, n)
    groups = BLOCKS + 1
    assert summary["parameters"] == total
    if shape == "odd":
        assert in_groups > total  # padding

    rows = {row["stage"]: row for row in summary["rows"]}
    held = {}
    calls = {}
    sent = {}
    for stage, row in rows.items():
        held[stage] = values_of(row, ["parameter", "gradient", "optimizer"], "bytes_per_rank")
        calls[stage] = values_of(row, ["all_gathers", "reduce_scatters", "all_reduces"], "per_step")
        sent[stage] = row["bytes_sent_per_rank_per_step"]

    shard = in_groups // n
    assert held == {
        0: [4 * total, 4 * total, 8 * total + 4 * tensors],
        1: [4 * as_one_group, 4 * as_one_group, 8 * as_one_group // n + 4],
        2: [4 * in_groups, 4 * shard, 8 * shard + 4 * groups],
        3: [4 * shard, 4 * shard, 8 * shard + 4 * groups],
    }
    assert calls == {
        0: [0, 0, tensors],
        1: [1, 1, 0],
        2: [groups, groups, 0],
        3: [2 * groups, groups, 0],
    }
    elements_round_the_ring = {0: 2 * total, 1: 2 * as_one_group, 2: 2 * in_groups}
    elements_round_the_ring[3] = 3 * in_groups
    for stage, elements in elements_round_the_ring.items():
        assert sent[stage] == round(4 * elements * (n - 1) / n)


PLANTED = {
    "(2) forgets to divide by the number of ranks": (
        "group.my_weights.grad = my_gradients / dist.get_world_size()",
        "group.my_weights.grad = my_gradients",
        "stage 2: first_moments_error",
    ),
    "(3) does not free the weights": (
        "        storage.resize_(0)",
        "        pass",
        "stage 3: parameter_bytes_per_rank",
    ),
}


@pytest.mark.parametrize(
    "fault",
    [
        "(3) does not free the weights",
        in_long("(2) forgets to divide by the number of ranks"),
    ],
)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    line, wrong, message = PLANTED[fault]
    result = start(tmp_path, "untied", 2, script=str(with_fault(SCRIPT, tmp_path, line, wrong)))
    assert result.code == 1
    assert message in result.err


def test_what_is_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--model", "giant", "--device", "cpu"), "--model", "giant")
