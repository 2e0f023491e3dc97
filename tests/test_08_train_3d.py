"""08_model_parallel/train_3d.py: every mesh trains as one process does.

Also what each rank holds, and which meshes are refused.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints import gradients, moments, write_folder
from support.harness import (
    BASELINE,
    NO_COMPILER,
    TINY,
    Result,
    assert_refused,
    config_of,
    drop_after,
    in_full,
    in_long,
    needs_compiler,
    run,
    tiny_flags,
    train,
    with_prelude,
)

from lm import shapes
from planner import shape
from planner.memory import Memory
from planner.plan import Plan

SCRIPT = "08_model_parallel/train_3d.py"
FSDP = "06_fsdp_zero/train_fsdp.py"
UNEVEN = {  # 2 stages share 3 layers; on 2 tensor ranks, 2 shards share 131 tokens and 27 channels
    "model_type": "llama",
    "vocab_size": 262,
    "hidden_size": 38,
    "head_dim": 6,
    "intermediate_size": 54,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
STEPS = 6
FLAGS = ("--steps", STEPS, "--save-every", 2, "--keep", 100, "--eval-every", 3, "--clip-norm", 0.9)
TP = ("--tp", 2)
PP = ("--pp", 2)
CP = ("--cp", 2)
COPIES = ("--replicate", 2)
HALF = ("--micro-batch-size", 3)
INTERLEAVED = (*PP, "--schedule", "interleaved")
RECOMPUTED = ("--checkpointing", "selective", "--reshard-after-forward", "off")
OFTEN = {  # ranks, model, flags of the layouts of make test
    "tensor": (2, "tied", TP),
    "context": (2, "tied", (*CP, *HALF)),
    "stages": (2, "untied", (*PP, *HALF)),
    "interleaved": (2, "deep", (*INTERLEAVED, *HALF)),
}
LAYOUTS = OFTEN | {
    "tensor, stages": (4, "untied", (*TP, *PP, *HALF)),
    "tensor, trained weights": (2, "folder", TP),
    "tensor, norms of heads": (2, "qwen3", TP),
    "a token a chunk": (2, "tied", (*CP, "--seq-len", 4)),
    "stages, trained weights": (2, "folder", (*PP, *HALF)),
    "tensor, biases": (2, "qwen2", TP),
    "3 stages": (3, "untied", ("--pp", 3, "--micro-batch-size", 2)),
    "3 contexts": (3, "tied", ("--cp", 3, "--seq-len", 30)),
    "3 shards": (3, "tied", ("--micro-batch-size", 2)),
    "tensor, contexts": (4, "tied", (*TP, *CP, *HALF)),
    "stages, contexts": (4, "untied", (*PP, *CP, *HALF)),
    "shards, stages": (4, "untied", (*PP, *HALF)),
    "shards, freed stages": (4, "untied", (*PP, *HALF, "--reshard-after-forward", "on")),
    "shards, interleaved": (4, "deep", (*INTERLEAVED, *HALF)),
    "tensor, interleaved": (4, "deep", (*TP, *INTERLEAVED, *HALF)),
    "contexts, interleaved": (4, "deep", (*CP, *INTERLEAVED, *HALF, "--checkpointing", "full")),
    "copies, tensor": (4, "tied", (*COPIES, *TP, *HALF)),
    "copies, contexts": (4, "tied", (*COPIES, *CP, *HALF)),
    "copies, tensor, stages": (8, "untied", (*COPIES, *TP, *PP, *HALF)),
    "tensor, stages, contexts": (8, "untied", (*TP, *PP, *CP, *HALF)),
    "recomputed": (4, "tied", (*TP, *CP, *RECOMPUTED)),
    "recomputed stages": (4, "untied", (*PP, *CP, *HALF, "--checkpointing", "full")),
}
IN_FULL = (  # each thing that a mesh can have, and the most that it can have at once
    "stages, trained weights",
    "tensor, biases",
    "3 stages",
    "tensor, contexts",
    "shards, freed stages",
    "contexts, interleaved",
    "copies, tensor, stages",
    "recomputed",
)
IN_LONG = [layout for layout in LAYOUTS if layout not in (*OFTEN, *IN_FULL)]
CASES = [*OFTEN, *map(in_full, IN_FULL), *map(in_long, IN_LONG)]


def flags_of(folder: Path, model: str) -> tuple:
    """Write a model to `folder`, and return the flags of a run in that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if model == "folder":  # with weights, of which each rank reads its shards
        if not (folder / "model").exists():
            write_folder(folder / "model", config_of(UNEVEN), seed=3)
        return ("--model", folder / "model", *FLAGS)
    (folder / "uneven.json").write_text(json.dumps(content_of(model)), encoding="utf-8")
    return ("--model", "uneven.json", *FLAGS)


def content_of(model: str) -> dict:
    """Return the content of a config.json."""
    content = UNEVEN | {"tie_word_embeddings": model == "tied"}
    if model == "deep":
        content["num_hidden_layers"] = 5
    if model.startswith("qwen"):
        content["model_type"] = model
    return content


def on_one_process(folder: Path, model: str, seq_len: int) -> Result:
    return train(BASELINE, folder, *flags_of(folder, model), "--seq-len", seq_len)


def on_a_mesh(folder: Path, layout: str) -> Result:
    ranks, model, flags = LAYOUTS[layout]
    return train(SCRIPT, folder, *flags_of(folder, model), *flags, nproc=ranks)


@pytest.fixture
def one_process(once):
    """Return one_process(model, seq_len), which runs the baseline script once for each model."""
    return partial(once, "08 one process", on_one_process)


def assert_same_curve(found: Result, expected: Result) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert found.column(column) == pytest.approx(expected.column(column), rel=1e-5), column


@pytest.mark.parametrize("layout", CASES)
def test_any_mesh_is_one_process(once, one_process, layout):
    _, model, flags = LAYOUTS[layout]
    seq_len = 32
    if "--seq-len" in flags:
        seq_len = flags[flags.index("--seq-len") + 1]
    expected = one_process(model, seq_len)
    found = once("08 mesh", on_a_mesh, layout)
    assert len(found.column("loss")) == STEPS
    assert_same_curve(found, expected)
    # AdamW's first moment is a mean of the clipped gradients of all steps so far.
    for step in (2, STEPS):
        expected_moments = moments(expected.folder, step)
        found_moments = moments(found.folder, step)
        torch.testing.assert_close(found_moments, expected_moments, rtol=1e-5, atol=3e-8)
    weight_bytes = found.summary["parameter_bytes_per_rank"]
    config = config_of(content_of(model))
    assert max(weight_bytes) < 0.75 * 4 * shapes.parameter_count(config)
    two_moments = [2 * nbytes for nbytes in weight_bytes]
    assert found.summary["optimizer_bytes_per_rank"] == two_moments


COMPILED = {  # ranks, model, flags
    "tensor": (2, "tied", TP),
    "tensor, untied": (2, "untied", TP),
    "stages": (2, "untied", (*PP, *HALF)),
    "context": (2, "tied", CP),
    "tensor, stages": (4, "untied", (*TP, *PP, *HALF)),
    "tensor, contexts": (4, "tied", (*TP, *CP)),
}


def check_compiled_gradients(folder: Path, layout: str, script: str | Path) -> None:
    """The errors are relative to the largest number of a tensor."""
    ranks, model, flags = COMPILED[layout]
    results = []
    for compiled in ((), ("--compile",)):
        own = folder / f"run{len(compiled)}"
        flags_of_run = (*flags_of(own, model), "--steps", 1, "--warmup-steps", 0)
        train(script, own, *flags_of_run, *flags, *compiled, nproc=ranks)
        results.append(gradients(own))
    eager, compiled = results
    assert compiled.keys() == eager.keys()
    for name, gradient in eager.items():
        largest = gradient.abs().max().item()
        assert largest > 0
        torch.testing.assert_close(compiled[name], gradient, rtol=0, atol=1e-5 * largest)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("layout", COMPILED)
def test_compiled_gradients_are_those_of_eager(tmp_path, layout):
    check_compiled_gradients(tmp_path, layout, SCRIPT)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor, untied", "stages", "context"])
def test_gradients_of_graphs_are_those_of_eager(tmp_path, layout):
    """The graphs that torch.compile makes, without the minutes of a compiler."""
    check_compiled_gradients(tmp_path, layout, with_prelude(SCRIPT, tmp_path, NO_COMPILER))


def test_without_a_mesh_it_is_train_fsdp_to_the_bit(tmp_path):
    mesh = train(SCRIPT, tmp_path / "mesh", *flags_of(tmp_path / "mesh", "tied"), nproc=2)
    fsdp = train(FSDP, tmp_path / "fsdp", *flags_of(tmp_path / "fsdp", "tied"), nproc=2)
    assert mesh.column("loss") == fsdp.column("loss")
    assert mesh.summary["weights_sha256"] == fsdp.summary["weights_sha256"]


def test_a_run_moves_from_mesh_to_mesh(tmp_path, once, one_process):
    """Train to step 2 on interleaved stages, to 4 on tensor ranks, to 6 on two stages.

    A checkpoint does not depend on the mesh.
    """
    shutil.copytree(once("08 mesh", on_a_mesh, "interleaved").folder / "run", tmp_path / "run")
    for last_step, mesh in ((2, TP), (4, (*PP, *HALF))):
        drop_after(tmp_path, last_step)
        moved = train(SCRIPT, tmp_path, *flags_of(tmp_path, "deep"), *mesh, "--resume", nproc=2)
    loss_at = {record["step"]: record["loss"] for record in moved.records if "loss" in record}
    expected = one_process("deep", 32).column("loss")
    assert list(loss_at.values()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_stages_have_equal_work(tmp_path):
    """The head of llama-8b has as many parameters as 2.4 layers."""
    flags = ("--model", "llama-8b", "--pp", 2, "--micro-batch-size", 1, "--json", "s.json")
    assert run(SCRIPT, tmp_path, "--dry-run", *flags).code == 0
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    work = [row["layers"] for row in summary["stages"]]
    assert sum(work) == 32
    work[-1] += 2.4
    assert max(work) / (sum(work) / 2) < 1.05


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        in_long({"tp": 2, "pp": 2}, id="tensor, stages"),
        in_long({"cp": 2, "replicate": 2}, id="copies"),
        pytest.param({"pp": 2, "schedule": "interleaved"}, id="interleaved"),
    ],
)
def test_a_dry_run_has_the_bytes_of_real_ranks_and_of_the_planner(tmp_path, sizes):
    ranks = 4
    content = TINY | {"tie_word_embeddings": False, "num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    flags = [*HALF, "--steps", 1, "--model", tmp_path / "config.json"]
    for name, size in sizes.items():
        flags += [f"--{name}", size]
    real = train(SCRIPT, tmp_path / "real", *flags, nproc=ranks).summary
    dry_run = train(SCRIPT, tmp_path, *flags, "--dry-run", "--world-size", ranks)
    stages = dry_run.summary["stages"]
    plan = Plan(**sizes, gpus=ranks, zero=3, seq_len=32, micro_batch_size=3, micro_batches=4)
    tiny = shape.from_config("tiny", config_of(content))
    for row in stages:
        first_rank = row["stage"] * ranks // len(stages)
        assert real["parameter_bytes_per_rank"][first_rank] == row["weight_bytes"]
        assert real["optimizer_bytes_per_rank"][first_rank] == row["optimizer_bytes"]
        memory = Memory(tiny, plan, row["stage"])
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            assert row[name] == pytest.approx(memory.lines[name], rel=0.02)


@pytest.mark.full
def test_a_dry_run_of_experts_has_the_bytes_of_the_planner(tmp_path):
    """Tensor ranks have whole experts and routers, and copies have all of it: to the byte."""
    sizes = {"tp": 2, "ep": 4, "replicate": 2}
    flags = ["--model", "nano-moe", "--json", "s.json"]
    for name, size in sizes.items():
        flags += [f"--{name}", size]
    assert run(SCRIPT, tmp_path, "--dry-run", "--world-size", 16, *flags).code == 0
    [row] = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["stages"]
    experts = shape.from_config("own", shapes.SIZES["nano-moe"])
    planned = Memory(experts, Plan(**sizes, gpus=16, zero=3))
    for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
        assert row[name] == planned.lines[name]


REFUSED = {  # flags of one process: words of the line
    "--cp 2 --dry-run --world-size 3": "--cp 2 3",
    "--tp 3 --dry-run": "--tp 3 num_attention_heads 8",
    "--world-size 4": "--world-size --dry-run",
    "--tp 2": "--tp 2",
    "--pp 2 --dry-run": "--pp 2",
    "--cp 3 --dry-run": "--cp 3 --seq-len 64 60",
    "--seq-len 2 --cp 3 --dry-run": "--cp 3 --seq-len 2 6",
    "--seq-len 18 --cp 2 --dry-run": "--cp 2 --seq-len 18 16",
    "--pp 2 --dry-run --model llama-8b --global-batch-size 1": "--pp 2 --global-batch-size",
    "--pp 4 --schedule interleaved --dry-run": "--pp 4 --schedule interleaved 8 6",
    "--schedule interleaved --dry-run": "--pp 1 --schedule interleaved",
    "--pp 2 --schedule interleaved --model llama-8b --global-batch-size 3 --micro-batch-size 1"
    " --dry-run": "--schedule interleaved 3 --global-batch-size 2",
    "--ep 2 --dry-run": "--ep 2 experts",
    "--ep 3 --model nano-moe --dry-run": "--ep 3 8 experts --ep 1",
    "--ep 4 --model nano-moe --dry-run --world-size 6": "--ep 4 6 ranks --ep 2",
    "--ep 2 --model nano-moe --dry-run --compile": "--ep 2 --compile",
    "--pp 2 --model nano-moe --dry-run": "--pp 2 experts",
    "--dtype fp16": "--dtype fp16 05_ddp/train.py",
    "--loss chunked": "--loss train_fsdp.py plain",
}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags, words in REFUSED.items():
        assert_refused(run(SCRIPT, tmp_path, *flags.split()), *words.split())


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


# counts the numbers of bf16 that a rank all-reduces
TRACE = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from common import measure

numbers = 0


class Trace(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        global numbers
        if measure._has_dtensor(types):
            return NotImplemented
        if measure._kind_of(operator) == "all_reduces" and torch.is_tensor(args[0]):
            if args[0].dtype == torch.bfloat16:
                numbers += args[0].numel()
                open("numbers", "w", encoding="utf-8").write(str(numbers))
        return operator(*args, **(kwargs or {}))


Trace().__enter__()
"""


@pytest.mark.full
def test_only_gradients_of_norms_are_all_reduced_in_bf16(tmp_path):
    """The README and parallelize() say so (pytorch#190626). When torch is fixed, this fails."""
    flags = (*tiny_flags(tmp_path), "--dtype", "bf16", *TP, "--steps", 1, "--micro-batch-size", 6)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    result = run(with_prelude(SCRIPT, tmp_path, TRACE), tmp_path, *flags, nproc=2)
    assert result.code == 0, result
    norms = 2 * TINY["num_hidden_layers"] + 1
    micro_batches = 2
    expected = micro_batches * norms * TINY["hidden_size"]
    assert int((tmp_path / "numbers").read_text(encoding="utf-8")) == expected
