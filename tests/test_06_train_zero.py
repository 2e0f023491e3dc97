"""06_fsdp_zero/train_zero.py: DeepSpeed's stages train as DDP does and resume on any number of ranks, in silence."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints import assert_near, gradients, write_folder
from support.harness import (
    TINY,
    Result,
    config_of,
    damage,
    drop_after,
    needs_compiler,
    run,
    tiny_flags,
    train,
    with_prelude,
    write_tiny,
)

from common import model, shapes

pytest.importorskip("deepspeed")
slow = pytest.mark.full
SCRIPT, DDP = "06_fsdp_zero/train_zero.py", "05_ddp/train.py"
STEPS = 6
UNEVEN = {  # 4 ranks divide none of its sizes
    **TINY,
    **{"vocab_size": 259, "hidden_size": 42, "intermediate_size": 50, "num_hidden_layers": 3},
    **{"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
}
ACCUMULATED = ("--micro-batch-size", 2)


def flags(folder: Path, stage: int | None = None) -> tuple:
    """The flags for a small model with uneven sizes; of ZeRO where a stage is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uneven.json").write_text(json.dumps(UNEVEN))
    shared = ("--model", "uneven.json", "--steps", STEPS, "--save-every", 1, "--keep", 100)
    return shared if stage is None else (*shared, "--stage", stage)


@pytest.fixture(scope="module")
def ddp(once) -> Callable[[str], Result]:
    """ddp(dtype): the run of two processes that hold the whole model each."""

    def run(folder: Path, dtype: str = "fp32") -> Result:
        return train(DDP, folder, *flags(folder), "--dtype", dtype, nproc=2)

    return partial(once, "zero ddp", run)


def assert_same(ours: Result, theirs: Result, tolerance: float = 1e-5) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert ours.column(column) == pytest.approx(theirs.column(column), rel=tolerance), column


def config() -> shapes.Config:
    return config_of(UNEVEN)


def parts(stage: int, ranks: int) -> int:
    """The elements of a rank's part: of each tensor at stage 3, of all matrices and of all vectors at 1 and 2."""
    shapes = [p.shape for p in model.build("nano", config(), seed=0, device="meta").parameters()]
    if stage == 3:
        return sum(math.ceil(shape.numel() / ranks) for shape in shapes)
    groups = [sum(shape.numel() for shape in shapes if (len(shape) == 2) == matrices) for matrices in (True, False)]
    return sum(2 * math.ceil(size / (2 * ranks)) for size in groups) if stage else sum(groups)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=slow), pytest.param(1, marks=slow), 2, 3])
def test_each_stage_is_data_parallelism(tmp_path, ddp, stage):
    result = train(SCRIPT, tmp_path, *flags(tmp_path, stage), *ACCUMULATED, nproc=2)
    assert len(result.column("loss")) == STEPS
    assert_same(result, ddp())
    weights = 4 * (parts(3, 2) if stage == 3 else parts(0, 2))
    part = 4 * parts(stage, 2)
    assert result.summary["parameter_bytes_per_rank"] == [weights] * 2
    assert result.summary["optimizer_bytes_per_rank"] == [2 * part] * 2
    assert result.summary["fp32_copy_bytes_per_rank"] == [part if stage else 0] * 2
    assert "checked: each rank holds 0." in result.out


FOUR = {  # stage, flags
    "stage 1": (1, ()),
    "stage 1, offloaded": (1, ("--offload", "optimizer")),
    "stage 2, recomputed": (2, ("--checkpointing", "full", "--micro-batch-size", 1)),
    "stage 2, offloaded": (2, ("--offload", "optimizer", "--micro-batch-size", 1)),
    "stage 3, products kept": (3, ("--checkpointing", "selective")),
    "stage 3, all flags": (3, ("--checkpointing", "full", "--offload", "params", "--micro-batch-size", 1)),
}


@slow
@pytest.mark.parametrize("case", FOUR)
def test_on_four_ranks_with_gradients(tmp_path, ddp, case):
    stage, more = FOUR[case]
    result = train(SCRIPT, tmp_path, *flags(tmp_path, stage), *more, nproc=4)
    assert_same(result, ddp())
    assert result.summary["optimizer_bytes_per_rank"] == [8 * parts(stage, 4)] * 4
    moments = universal(tmp_path, 1, "exp_avg")
    assert_near({name: moment / 0.1 for name, moment in moments.items()}, gradients(ddp().folder))


def universal(folder: Path, step: int, what: str) -> dict[str, torch.Tensor]:
    """The whole tensors of one kind in a step's folder, by DeepSpeed's own conversion."""
    paths = ["--input_folder", folder / f"run/step-{step:08d}", "--output_folder", folder / "whole/step"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, paths), "--inject_missing_state"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    files = list((folder / "whole/step/zero").glob(f"*/{what}.pt"))
    whole = {file.parent.name: torch.load(file, weights_only=False) for file in files}
    shapes = {name: p.shape for name, p in model.build("nano", config(), seed=0, device="meta").named_parameters()}
    return {name: (t["param"] if isinstance(t, dict) else t).reshape(shapes[name]) for name, t in whole.items()}


@slow
@pytest.mark.parametrize("stage", range(4))
def test_bf16_is_autocast_and_weights_stay_in_fp32(tmp_path, ddp, stage):
    result = train(SCRIPT, tmp_path, *flags(tmp_path, stage), "--dtype", "bf16", nproc=2)
    assert result.summary["parameter_bytes_per_rank"] == [4 * (parts(3, 2) if stage == 3 else parts(0, 2))] * 2
    assert_same(result, ddp("bf16"), tolerance=5e-3)
    assert result.column("loss") == pytest.approx(ddp("bf16").column("loss"), rel=3e-4)
    assert result.column("loss") != pytest.approx(ddp().column("loss"), rel=1e-6)


@slow
@pytest.mark.parametrize(("stage", "more"), [(0, ()), (1, ()), (2, ()), (3, ("--offload", "params"))])
def test_resumed_on_as_many_ranks_is_uninterrupted_to_the_bit(tmp_path, stage, more):
    given = (*flags(tmp_path, stage), *ACCUMULATED, *more)
    whole = train(SCRIPT, tmp_path, *given, nproc=2)
    summary, records = whole.summary, [whole.column("loss"), whole.column("grad_norm")]
    drop_after(tmp_path, 3)
    resumed = train(SCRIPT, tmp_path, *given, "--resume", nproc=2)
    assert f"resuming from {tmp_path}/run/step-00000003" in resumed.out
    assert resumed.summary["weights_sha256"] == summary["weights_sha256"]
    assert [resumed.column("loss"), resumed.column("grad_norm")] == records


DROPOUT = """
import torch.nn.functional as F
from common import model
exact = model.MLP.forward
model.MLP.forward = lambda self, x: F.dropout(exact(self, x), 0.3, self.training)
"""


@slow
def test_what_is_drawn_at_random_goes_on_where_it_was(tmp_path):
    """The training script draws nothing, a reader's own model may."""
    script = with_prelude(SCRIPT, tmp_path, DROPOUT)
    given = flags(tmp_path, 3)
    whole = train(script, tmp_path, *given, nproc=2).summary["weights_sha256"]
    drop_after(tmp_path, 3)
    assert train(script, tmp_path, *given, "--resume", nproc=2).summary["weights_sha256"] == whole
    plain = train(SCRIPT, tmp_path / "plain", *flags(tmp_path / "plain", 3), nproc=2)
    assert plain.summary["weights_sha256"] != whole


@slow
@pytest.mark.parametrize("stage", range(4))
def test_a_run_moves_between_numbers_of_ranks(tmp_path, ddp, stage):
    """Saved on 4 ranks; resumed on 2, then 3, then 1. A universal checkpoint is made and goes away again."""
    given = flags(tmp_path, stage)
    train(SCRIPT, tmp_path, *given, nproc=4)
    for step, ranks in ((1, 2), (3, 3), (4, 1)):
        drop_after(tmp_path, step)
        result = train(SCRIPT, tmp_path, *given, "--resume", nproc=ranks)
        assert f"resuming from {tmp_path}/run/step-{step:08d}" in result.out
        assert result.column("step") == [*range(1, STEPS + 1), STEPS]
        assert_same(result, ddp())
        left = [file.name for file in (tmp_path / "run").iterdir() if "universal" in file.name]
        assert left == []


@slow
@pytest.mark.parametrize("trained", [False, True])
def test_stage_3_starts_from_the_weights_of_one_process_to_the_bit(tmp_path, trained):
    """At a learning rate that moves nothing, the weights at the end are those of the start."""
    net = model.build("nano", config(), seed=5 if trained else 4)
    given = [*flags(tmp_path, 3), "--seed", 4]
    if trained:
        write_folder(tmp_path / "folder", config(), seed=5)
        given += ["--model", "folder"]
    result = train(SCRIPT, tmp_path, *given, "--steps", 1, "--lr", 1e-30, nproc=3)
    assert result.summary["weights_sha256"] == model.digest(net)


@slow
@pytest.mark.parametrize("how", ["truncated", "one bit", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, how):
    given = flags(tmp_path, 3)
    summary = train(SCRIPT, tmp_path, *given, nproc=2).summary
    damage(tmp_path / f"run/step-{STEPS:08d}", how, "*optim_states.pt")
    resumed = train(SCRIPT, tmp_path, *given, "--resume", nproc=2)
    assert f"step-{STEPS:08d} is broken (" in resumed.out
    assert f"resuming from {tmp_path}/run/step-{STEPS - 1:08d}" in resumed.out
    assert resumed.summary["weights_sha256"] == summary["weights_sha256"]


@slow
def test_without_a_whole_checkpoint_nothing_is_trained(tmp_path):
    given = (*flags(tmp_path, 2), "--save-every", 0)
    train(SCRIPT, tmp_path, *given, nproc=2)
    damage(tmp_path / f"run/step-{STEPS:08d}", "one bit", "*optim_states.pt")
    result = train(SCRIPT, tmp_path, *given, "--resume", nproc=2, code=1)
    assert "every checkpoint in" in result.err
    assert "exitcode  : 2" in result.err
    assert (tmp_path / f"run/step-{STEPS:08d}").is_dir()


@slow
@needs_compiler
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_is_the_same(tmp_path, ddp, stage):
    assert_same(train(SCRIPT, tmp_path, *flags(tmp_path, stage), "--compile", nproc=2), ddp())


WRONG = [  # flags, words of the error
    (("--offload", "params"), "--offload params: at --stage 2 each rank computes with all weights; use --stage 3"),
    (("--stage", "0", "--offload", "optimizer"), "stage 0 shares nothing that could be moved"),
    (("--dtype", "fp16"), "--dtype fp16: 05_ddp/train.py has a GradScaler"),
    (("--async-save",), "--async-save: DeepSpeed writes its own files while training waits"),
    (("--stage", "4"), "invalid choice: 4"),
]


@slow
@pytest.mark.parametrize(("given", "words"), WRONG)
def test_what_cannot_be_is_told_in_one_line(tmp_path, given, words):
    write_tiny(tmp_path)
    result = run(SCRIPT, tmp_path, *tiny_flags(tmp_path), *given)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert f"{SCRIPT}: error: " in result.err
    assert words in result.err


@slow
def test_another_stage_is_another_run(tmp_path):
    train(SCRIPT, tmp_path, *flags(tmp_path, 2), nproc=2)
    result = train(SCRIPT, tmp_path, *flags(tmp_path, 3), "--resume", nproc=2, code=1)
    assert "holds a run with other settings: --stage 3 (was 2); use another" in result.err
    result = train(DDP, tmp_path, *flags(tmp_path), "--resume", code=2)
    assert "holds a run with other settings: --stage None (was 2); use another" in result.err
