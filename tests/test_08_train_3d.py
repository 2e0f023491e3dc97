"""08_model_parallel/train_3d.py: on any mesh the run of one process; who holds what; what a mesh must divide."""

import json
from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import assert_same_gradients, write_folder
from support.harness import BASELINE, TINY, Result, config_of, drop_after, run, train

from common import shapes
from planner import shape
from planner.memory import Memory
from planner.plan import Plan

SCRIPT, FSDP = "08_model_parallel/train_3d.py", "06_fsdp_zero/train_fsdp.py"
UNEVEN = {  # 3 layers for 2 stages; 131 tokens, 27 MLP channels a tensor rank for 2 shards
    **{"model_type": "llama", "vocab_size": 262, "hidden_size": 38, "head_dim": 6, "intermediate_size": 54},
    **{"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
FLAGS = ("--steps", 10, "--save-every", 1, "--keep", 100, "--eval-every", 5, "--clip-norm", 0.9)
TP, PP, CP, COPIES, HALF = ("--tp", 2), ("--pp", 2), ("--cp", 2), ("--replicate", 2), ("--micro-batch-size", 3)
LAYOUTS = {  # ranks, tied embeddings, flags
    "tensor": (2, True, TP),
    "context": (2, True, (*CP, *HALF)),
    "stages": (2, False, (*PP, *HALF)),
    "tensor, stages": (4, False, (*TP, *PP, *HALF)),
    "3 stages": (3, False, ("--pp", 3, "--micro-batch-size", 2)),
    "3 contexts": (3, True, ("--cp", 3, "--seq-len", 30)),
    "3 shards": (3, True, ("--micro-batch-size", 2)),
    "tensor, contexts": (4, True, (*TP, *CP, *HALF)),
    "stages, contexts": (4, False, (*PP, *CP, *HALF)),
    "shards, stages": (4, False, (*PP, *HALF)),
    "copies, tensor": (4, True, (*COPIES, *TP, *HALF)),
    "copies, contexts": (4, True, (*COPIES, *CP, *HALF)),
    "copies, tensor, stages": (8, False, (*COPIES, *TP, *PP, *HALF)),
    "tensor, stages, contexts": (8, False, (*TP, *PP, *CP, *HALF)),
    "recomputed": (4, False, (*TP, *CP, "--checkpointing", "selective", "--reshard-after-forward", "off")),
    "recomputed stages": (4, False, (*PP, *CP, *HALF, "--checkpointing", "full")),
}
OFTEN = ("tensor", "context", "stages", "tensor, stages")


def flags_of(folder: Path, tied: bool) -> tuple:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uneven.json").write_text(json.dumps({**UNEVEN, "tie_word_embeddings": tied}))
    return ("--model", "uneven.json", *FLAGS)


@pytest.fixture
def one_process(once):
    """one_process(tied, seq_len): the run of the baseline script on one process."""

    def baseline(folder: Path, tied: bool, seq_len: int) -> Result:
        return train(BASELINE, folder, *flags_of(folder, tied), "--seq-len", seq_len)

    return partial(once, "08 one process", baseline)


def assert_same_curve(ours: Result, theirs: Result) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert ours.column(column) == pytest.approx(theirs.column(column), rel=1e-5), column


@pytest.mark.parametrize(
    "layout", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_any_mesh_is_one_process(tmp_path, one_process, layout):
    ranks, tied, flags = LAYOUTS[layout]
    theirs = one_process(tied, flags[flags.index("--seq-len") + 1] if "--seq-len" in flags else 32)
    ours = train(SCRIPT, tmp_path, *flags_of(tmp_path, tied), *flags, nproc=ranks)
    assert len(ours.column("loss")) == 10
    assert_same_curve(ours, theirs)
    assert_same_gradients(ours.folder, theirs.folder, 10)
    held = ours.summary["parameter_bytes_per_rank"]
    assert max(held) < 0.75 * 4 * shapes.parameter_count(config_of(UNEVEN | {"tie_word_embeddings": tied}))
    assert ours.summary["optimizer_bytes_per_rank"] == [2 * own for own in held]


@pytest.mark.parametrize("ranks", [None, 2])
def test_without_a_mesh_it_is_train_fsdp_to_the_bit(tmp_path, ranks):
    mesh, fsdp = (
        train(script, tmp_path / script[:2], *flags_of(tmp_path / script[:2], True), nproc=ranks)
        for script in (SCRIPT, FSDP)
    )
    assert mesh.column("loss") == fsdp.column("loss")
    assert mesh.summary["weights_sha256"] == fsdp.summary["weights_sha256"]


def test_a_run_moves_from_mesh_to_mesh(tmp_path, one_process):
    """Steps 1 to 4 on tensor ranks, to 7 on stages, to 10 on context ranks: the checkpoint has no mesh in it."""
    flags = flags_of(tmp_path, False)
    for last, mesh in ((4, TP), (7, (*PP, *HALF))):
        train(SCRIPT, tmp_path, *flags, *mesh, "--resume", nproc=2)
        drop_after(tmp_path, last)
    moved = train(SCRIPT, tmp_path, *flags, *CP, *HALF, "--resume", nproc=2)
    losses = {record["step"]: record["loss"] for record in moved.records if "loss" in record}
    assert [*losses.values()] == pytest.approx(one_process(False, 32).column("loss"), rel=1e-5)
    drop_after(tmp_path, 7)
    again = train(SCRIPT, tmp_path, *flags, *CP, *HALF, "--resume", nproc=2)
    assert again.summary["weights_sha256"] == moved.summary["weights_sha256"]


@pytest.mark.parametrize("flags", [(*TP,), (*PP, *HALF)], ids=["tensor", "stages"])
def test_weights_of_a_folder(tmp_path, flags):
    """Trained weights are read by each rank, its part alone."""
    write_folder(tmp_path / "model", config_of(UNEVEN), seed=3)
    flags = (*flags_of(tmp_path, False), "--model", tmp_path / "model", *flags)
    ours = train(SCRIPT, tmp_path / "two", *flags, nproc=2)
    theirs = train(BASELINE, tmp_path / "one", *flags[:-2] if flags[-2] == "--tp" else flags[:-4])
    assert_same_curve(ours, theirs)


@pytest.mark.parametrize(("ranks", "cut"), [(4, ("--tp", 2, "--pp", 2)), (4, ("--cp", 2, "--replicate", 2))])
def test_a_dry_run_has_the_bytes_of_real_ranks_and_of_the_planner(tmp_path, ranks, cut):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
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


BAD = {  # flags of one process: words that the line must have
    ("--dry-run", "--world-size", 3, "--cp", 2): "3 processes",
    ("--dry-run", "--tp", 3): "--tp 3 does not divide the num_attention_heads 8",
    ("--world-size", 4): "--dry-run",
    ("--tp", 2): "1 processes",
    ("--dry-run", "--pp", 2): "tied",
    ("--dry-run", "--cp", 3): "--seq-len 64",
    ("--dry-run", "--model", "llama-8b", "--pp", 2, "--global-batch-size", 1): "micro-batches",
    ("--dtype", "fp16"): "05_ddp/train.py",
}


@pytest.mark.parametrize("flags", BAD, ids=lambda flags: " ".join(map(str, flags)))
def test_what_cannot_be_is_one_line(tmp_path, flags):
    result = run(SCRIPT, tmp_path, *flags)
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert BAD[flags] in result.err


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("flags", [TP, CP], ids=["tensor", "context"])
def test_two_gpus_are_one(gpus, tmp_path, flags):
    one, two = (
        train(SCRIPT, tmp_path / str(nproc), *flags_of(tmp_path / str(nproc), True), *mesh, "--device", "cuda", **how)
        for nproc, mesh, how in ((1, (), {"nproc": 1, **gpus}), (2, flags, {"nproc": 2, **gpus}))
    )
    assert_same_curve(one, two)
