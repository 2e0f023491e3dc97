"""06_fsdp_zero/zero_from_scratch.py: stages 1 to 3 by hand train as DDP does, and hold and send what they must."""

import json
from pathlib import Path

import pytest
from support.harness import TINY, assert_refused, run, with_fault

SCRIPT = "06_fsdp_zero/zero_from_scratch.py"
STEPS = 4
FLAGS = ("--model", "tiny.json", "--device", "cpu", "--steps", STEPS, "--json", "s.json")
SHAPES = {
    "untied": {**TINY, "tie_word_embeddings": False},
    # A block has 9,669 weights, and what is around the blocks 8,481: 2 ranks divide neither.
    "odd": {
        **TINY,
        "hidden_size": 33,
        "intermediate_size": 65,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
}
RUNS = [("odd", None), ("untied", 3)]  # without torchrun the script starts two ranks itself


def start(folder, shape: str, nproc: int | None, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPES[shape]))
    return run(script, folder, *FLAGS, nproc=nproc)


@pytest.fixture(
    scope="module", params=RUNS, ids=lambda parameters: f"{parameters[0]}-{parameters[1] or 2}"
)
def finished(request, once) -> tuple[str, int, dict]:
    """The shape, the number of ranks and the summary of a run."""
    return once("06 zero", finish, *request.param)


def finish(folder: Path, shape: str, nproc: int | None) -> tuple[str, int, dict]:
    result = start(folder, shape, nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return shape, nproc or 2, json.loads((folder / "s.json").read_text())


def test_a_rank_holds_and_sends_what_it_must(finished):
    """Numbers from the shape, written down again here: a block, and what is outside of the blocks."""
    shape, n, summary = finished
    block, rest = {"untied": (9_280, 16_416), "odd": (9_669, 8_481)}[shape]
    whole = 2 * block + rest
    flat = -(-whole // n) * n
    grouped = 2 * (-(-block // n) * n) + -(-rest // n) * n
    assert summary["parameters"] == whole
    if shape == "odd":
        assert grouped > whole  # padding
    tensors = 2 * 9 + (3 if shape == "untied" else 2)
    rows = {row["stage"]: row for row in summary["rows"]}

    def held(stage: int) -> list[int]:
        return [
            rows[stage][f"{kind}_bytes_per_rank"] for kind in ("parameter", "gradient", "optimizer")
        ]

    assert held(0) == [4 * whole, 4 * whole, 8 * whole + 4 * tensors]
    assert held(1) == [4 * flat, 4 * flat, 8 * flat // n + 4]
    assert held(2) == [4 * grouped, 4 * grouped // n, 8 * grouped // n + 4 * 3]
    assert held(3) == [4 * grouped // n, 4 * grouped // n, 8 * grouped // n + 4 * 3]
    names = ("all_gathers_per_step", "reduce_scatters_per_step", "all_reduces_per_step")
    assert [[rows[stage].get(name, 0) for name in names] for stage in range(4)] == [
        [0, 0, tensors],
        [1, 1, 0],
        [3, 3, 0],
        [6, 3, 0],
    ]
    sent = [rows[stage]["bytes_sent_per_rank_per_step"] for stage in range(4)]
    elements = [2 * whole, 2 * flat, 2 * grouped, 3 * grouped]
    assert sent == [round(4 * count * (n - 1) / n) for count in elements]


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


@pytest.mark.parametrize("fault", PLANTED)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    line, wrong, message = PLANTED[fault]
    result = start(tmp_path, "untied", 2, script=str(with_fault(SCRIPT, tmp_path, line, wrong)))
    assert result.code == 1
    assert message in result.err


def test_what_is_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--model", "giant", "--device", "cpu"), "--model", "giant")
