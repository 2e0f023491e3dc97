"""08_model_parallel/train_3d.py --ep: experts on several ranks train as on one process."""

from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import assert_same_first_gradients
from support.harness import BASELINE, Result, in_full, in_long, train
from test_moe import BALANCED, STEPS, write_skewed

SCRIPT = "08_model_parallel/train_3d.py"
CASES = {  # ranks, flags
    "2 of 2": (2, "--ep 2"),
    "1 of 1": (1, ""),
    "1 of 2": (2, "--micro-batch-size 3"),
    "4 of 4": (4, "--ep 4 --micro-batch-size 1"),
    "2 of 4": (4, "--ep 2 --checkpointing selective"),
    "copies": (4, "--ep 2 --replicate 2 --micro-batch-size 3"),
    "tensor": (2, "--tp 2"),
    "tensor and experts": (2, "--tp 2 --ep 2 --micro-batch-size 6"),
    "tensor, 2 of 4": (4, "--tp 2 --ep 2 --micro-batch-size 3"),
    "tensor, 4 of 4": (4, "--tp 2 --ep 4 --checkpointing full"),
    "context": (2, "--cp 2 --ep 2 --micro-batch-size 6"),
    "context, 4 of 4": (4, "--cp 2 --ep 4"),
    "tensor, context": (4, "--tp 2 --cp 2 --ep 2 --micro-batch-size 4"),
}


def on_ranks(folder: Path, ranks: int, flags: str) -> Result:
    from support.harness import train

    return train(SCRIPT, folder, *flags.split(), nproc=ranks)


@pytest.fixture(scope="module")
def skewed(once):
    return once("skewed", write_skewed)


def start(folder, skewed, script, n, *flags):
    return train(script, folder, "--model", skewed, *STEPS, *BALANCED, *flags, nproc=n)


@pytest.mark.parametrize("case", CASES)
def test_experts_on_ranks_train_as_one_process(once, skewed, case):
    baseline = once("base", start, skewed, BASELINE, None, "--micro-batch-size", 12)
    n, flags = CASES[case]
    result = once("epr", start, skewed, SCRIPT, n, *flags.split())
    print(result.column("loss"), baseline.column("loss"))
    print(result.column("grad_norm"), baseline.column("grad_norm"))
    for column in ("loss", "grad_norm", "val_loss", "balance_loss"):
        assert result.column(column) == pytest.approx(baseline.column(column), rel=1e-5), column
    assert result.column("expert_tokens") == baseline.column("expert_tokens")
    assert_same_first_gradients(result.folder, baseline.folder)
