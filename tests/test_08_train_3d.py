"""08_model_parallel/train_3d.py: on any mesh the run of one process; who holds what; what a mesh must divide."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints import moments, write_folder
from support.harness import (
    BASELINE,
    TINY,
    Result,
    assert_refused,
    config_of,
    drop_after,
    run,
    tiny_flags,
    train,
)

from lm import shapes
from planner import shape
from planner.memory import Memory
from planner.plan import Plan

SCRIPT, FSDP = "08_model_parallel/train_3d.py", "06_fsdp_zero/train_fsdp.py"
UNEVEN = {  # 3 layers for 2 stages; 131 tokens, 27 MLP channels a tensor rank for 2 shards
    **{
        "model_type": "llama",
        "vocab_size": 262,
        "hidden_size": 38,
        "head_dim": 6,
        "intermediate_size": 54,
    },
    **{
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}
STEPS = 6
FLAGS = ("--steps", STEPS, "--save-every", 2, "--keep", 100, "--eval-every", 3, "--clip-norm", 0.9)
TP, PP, CP, COPIES, HALF = (
    ("--tp", 2),
    ("--pp", 2),
    ("--cp", 2),
    ("--replicate", 2),
    ("--micro-batch-size", 3),
)
LAYOUTS = {  # ranks, model, flags; the first are those of make test
    "tensor": (2, "tied", TP),
    "context": (2, "tied", (*CP, *HALF)),
    "stages": (2, "untied", (*PP, *HALF)),
    "tensor, stages": (4, "untied", (*TP, *PP, *HALF)),
    "tensor, trained weights": (2, "folder", TP),
    "tensor, norms of heads": (2, "qwen3", TP),
    "a token a rank": (2, "tied", (*CP, "--seq-len", 2)),
    "stages, trained weights": (2, "folder", (*PP, *HALF)),
    "tensor, biases": (2, "qwen2", TP),
    "3 stages": (3, "untied", ("--pp", 3, "--micro-batch-size", 2)),
    "3 contexts": (3, "tied", ("--cp", 3, "--seq-len", 30)),
    "3 shards": (3, "tied", ("--micro-batch-size", 2)),
    "tensor, contexts": (4, "tied", (*TP, *CP, *HALF)),
    "stages, contexts": (4, "untied", (*PP, *CP, *HALF)),
    "shards, stages": (4, "untied", (*PP, *HALF)),
    "copies, tensor": (4, "tied", (*COPIES, *TP, *HALF)),
    "copies, contexts": (4, "tied", (*COPIES, *CP, *HALF)),
    "copies, tensor, stages": (8, "untied", (*COPIES, *TP, *PP, *HALF)),
    "tensor, stages, contexts": (8, "untied", (*TP, *PP, *CP, *HALF)),
    "recomputed": (
        4,
        "tied",
        (*TP, *CP, "--checkpointing", "selective", "--reshard-after-forward", "off"),
    ),
    "recomputed stages": (4, "untied", (*PP, *CP, *HALF, "--checkpointing", "full")),
}
OFTEN = [*LAYOUTS][:7]


def flags_of(folder: Path, model: str) -> tuple:
    folder.mkdir(parents=True, exist_ok=True)
    if model == "folder":  # trained weights, of which each rank reads its part
        if not (folder / "model").exists():
            write_folder(folder / "model", config_of(UNEVEN), seed=3)
        return ("--model", folder / "model", *FLAGS)
    kind = model if model.startswith("qwen") else "llama"
    shape = {**UNEVEN, "model_type": kind, "tie_word_embeddings": model == "tied"}
    (folder / "uneven.json").write_text(json.dumps(shape))
    return ("--model", "uneven.json", *FLAGS)


def on_one_process(folder: Path, model: str, seq_len: int) -> Result:
    return train(BASELINE, folder, *flags_of(folder, model), "--seq-len", seq_len)


def on_a_mesh(folder: Path, layout: str) -> Result:
    ranks, model, flags = LAYOUTS[layout]
    return train(SCRIPT, folder, *flags_of(folder, model), *flags, nproc=ranks)


@pytest.fixture
def one_process(once):
    """one_process(model, seq_len): the run of the baseline script on one process."""
    return partial(once, "08 one process", on_one_process)


def assert_same_curve(ours: Result, theirs: Result) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert ours.column(column) == pytest.approx(theirs.column(column), rel=1e-5), column


@pytest.mark.parametrize(
    "layout",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS],
)
def test_any_mesh_is_one_process(once, one_process, layout):
    _, model, flags = LAYOUTS[layout]
    theirs = one_process(model, flags[flags.index("--seq-len") + 1] if "--seq-len" in flags else 32)
    ours = once("08 mesh", on_a_mesh, layout)
    assert len(ours.column("loss")) == STEPS
    assert_same_curve(ours, theirs)
    # AdamW's first moment holds the clipped gradients of all steps until then
    for step in (2, STEPS):
        our, their = moments(ours.folder, step), moments(theirs.folder, step)
        torch.testing.assert_close(our, their, rtol=1e-5, atol=3e-8)
    held = ours.summary["parameter_bytes_per_rank"]
    config = config_of(UNEVEN | {"tie_word_embeddings": model == "tied"})
    assert max(held) < 0.75 * 4 * shapes.parameter_count(config)
    assert ours.summary["optimizer_bytes_per_rank"] == [2 * own for own in held]


def test_without_a_mesh_it_is_train_fsdp_to_the_bit(tmp_path):
    mesh, fsdp = (
        train(script, tmp_path / script[:2], *flags_of(tmp_path / script[:2], "tied"), nproc=2)
        for script in (SCRIPT, FSDP)
    )
    assert mesh.column("loss") == fsdp.column("loss")
    assert mesh.summary["weights_sha256"] == fsdp.summary["weights_sha256"]


def test_a_run_moves_from_mesh_to_mesh(tmp_path, once, one_process):
    """Steps 1 and 2 on stages, to 4 on tensor ranks, to 6 on context ranks: the checkpoint has no mesh in it."""
    shutil.copytree(once("08 mesh", on_a_mesh, "stages").folder / "run", tmp_path / "run")
    for last, mesh in ((2, TP), (4, (*CP, *HALF))):
        drop_after(tmp_path, last)
        moved = train(SCRIPT, tmp_path, *flags_of(tmp_path, "untied"), *mesh, "--resume", nproc=2)
    losses = {record["step"]: record["loss"] for record in moved.records if "loss" in record}
    assert [*losses.values()] == pytest.approx(one_process("untied", 32).column("loss"), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("cut", [(*TP, *PP), (*CP, *COPIES)], ids=str)
def test_a_dry_run_has_the_bytes_of_real_ranks_and_of_the_planner(tmp_path, cut):
    ranks = 4
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": False}))
    flags = (*cut, "--micro-batch-size", 3, "--steps", 1, "--model", tmp_path / "config.json")
    real = train(SCRIPT, tmp_path / "real", *flags, nproc=ranks).summary
    stages = train(SCRIPT, tmp_path, *flags, "--dry-run", "--world-size", ranks).summary["stages"]
    sizes = {flag[2:]: value for flag, value in zip(cut[::2], cut[1::2], strict=True)}
    plan = Plan(**sizes, gpus=ranks, zero=3, seq_len=32, micro_batch_size=3, micro_batches=4)
    for row in stages:
        first = row["stage"] * ranks // len(stages)
        assert real["parameter_bytes_per_rank"][first] == row["weight_bytes"]
        assert real["optimizer_bytes_per_rank"][first] == row["optimizer_bytes"]
        memory = Memory(shape.from_config("tiny", config_of(TINY)), plan, row["stage"])
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            assert row[name] == pytest.approx(memory.lines[name], rel=0.02)


REFUSED = {  # flags of one process: words of the line
    "--cp 2 --dry-run --world-size 3": "--cp 2 3",
    "--tp 3 --dry-run": "--tp 3 num_attention_heads 8",
    "--world-size 4": "--world-size --dry-run",
    "--tp 2": "",
    "--pp 2 --dry-run": "--pp 2",
    "--cp 3 --dry-run": "--cp 3 --seq-len 64",
    "--seq-len 2 --cp 3 --dry-run": "--cp 3 --seq-len 2",
    "--pp 2 --dry-run --model llama-8b --global-batch-size 1": "--pp 2 --global-batch-size",
    "--dtype fp16": "--dtype fp16 05_ddp/train.py",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_refused_in_one_line(tmp_path, flags):
    assert_refused(run(SCRIPT, tmp_path, *flags.split()), *(REFUSED[flags] or flags).split())


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("flags", [TP, CP], ids=["tensor", "context"])
def test_two_gpus_are_one(gpu_run, tmp_path, flags):
    results = []
    for ranks, mesh in ((1, ()), (2, flags)):
        folder = tmp_path / str(ranks)
        model = flags_of(folder, "tied")
        common = (*tiny_flags(folder), *model, "--device", "cuda")
        result = gpu_run(SCRIPT, folder, *common, *mesh, nproc=ranks)
        assert result.code == 0, result
        results.append(result)
    assert_same_curve(*results)
