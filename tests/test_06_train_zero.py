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

from old import checkpoint, model, shapes

pytest.importorskip("deepspeed")
slow = pytest.mark.long
SCRIPT, DDP = "06_fsdp_zero/train_zero.py", "05_ddp/train.py"
STEPS = 6
UNEVEN = {  # 4 ranks divide none of its sizes
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 42,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
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
    written = ("--write-config", "config.json")
    result = train(SCRIPT, tmp_path, *flags(tmp_path, stage), *ACCUMULATED, *written, nproc=2)
    assert len(result.column("loss")) == STEPS
    assert_same(result, ddp())
    weights = 4 * (parts(3, 2) if stage == 3 else parts(0, 2))
    part = 4 * parts(stage, 2)
    assert result.summary["parameter_bytes_per_rank"] == [weights] * 2
    assert result.summary["optimizer_bytes_per_rank"] == [2 * part] * 2
    assert result.summary["fp32_copy_bytes_per_rank"] == [part if stage else 0] * 2
    assert "checked: each rank holds 0." in result.out
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["zero_optimization"]["stage"] == stage
    assert told["gradient_accumulation_steps"] == 3


FOUR = {  # stage, flags
    "stage 1": (1, ()),
    "stage 1, offloaded": (1, ("--offload", "optimizer")),
    "stage 2, recomputed": (2, ("--checkpointing", "full", "--micro-batch-size", 1)),
    "stage 2, offloaded": (2, ("--offload", "optimizer", "--micro-batch-size", 1)),
    "stage 2, products kept": (2, ("--checkpointing", "selective", "--micro-batch-size", 1)),
    "stage 3, recomputed": (3, ("--checkpointing", "full")),
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


# DeepSpeed refuses fp16 on a CPU without instructions for it; torch has them in software. Records each RoPE's types.
FP16 = """
import os, torch
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
CPU_Accelerator.is_fp16_supported = lambda self: True
from old import model
rotate = model.rotate
def exact(x, cos, sin):
    assert (x.dtype, cos.dtype, sin.dtype) == (torch.float16, torch.float32, torch.float32)
    return rotate(x, cos, sin)
model.rotate = exact
"""
# an infinity in the gradients of rank 1 alone, at the third step
OVERFLOW = """
from deepspeed.runtime.engine import DeepSpeedEngine
backward, calls = DeepSpeedEngine.backward, 0
def broken(self, loss, **more):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        loss = loss * float("inf")
    return backward(self, loss, **more)
DeepSpeedEngine.backward = broken
"""


@slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_keeps_an_fp32_copy_and_skips_an_overflow_on_all_ranks(tmp_path, ddp, stage):
    fp16 = ("--dtype", "fp16")
    result = train(with_prelude(SCRIPT, tmp_path, FP16), tmp_path, *flags(tmp_path, stage), *fp16, nproc=2)
    assert_same(result, ddp(), tolerance=2e-3)
    assert result.summary["parameter_bytes_per_rank"] == [2 * (parts(3, 2) if stage == 3 else parts(0, 2))] * 2
    assert result.summary["fp32_copy_bytes_per_rank"] == [4 * parts(stage, 2)] * 2
    folder = tmp_path / "overflow"
    result = train(with_prelude(SCRIPT, folder, FP16 + OVERFLOW), folder, *flags(folder, stage), *fp16, nproc=2)
    assert result.column("skipped_steps") == [0, 0, 1, 1, 1, 1]
    assert result.column("loss_scale")[2] == result.column("loss_scale")[1] / 2
    assert result.column("lr")[3] == result.column("lr")[2]  # the schedule waits too


@slow
@pytest.mark.parametrize(("stage", "more"), [(0, ()), (1, ()), (2, ("--async-save",)), (3, ("--offload", "params"))])
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
from old import model
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


def consolidated(folder: Path, step: int) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder / "run"), tag=f"step-{step:08d}")


def digest(weights: dict[str, torch.Tensor]) -> str:
    net = model.build("nano", config(), seed=0)
    missing, unexpected = net.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == ([], [])
    return checkpoint.digest(net)


@slow
def test_stages_consolidate_to_fp32(tmp_path):
    for stage in (2, 3):
        folder = tmp_path / str(stage)
        result = train(SCRIPT, folder, *flags(folder, stage), nproc=2)
        assert digest(consolidated(folder, STEPS)) == result.summary["weights_sha256"]


@slow
@pytest.mark.parametrize("trained", [False, True])
def test_stage_3_starts_from_the_weights_of_one_process_to_the_bit(tmp_path, trained):
    """At a learning rate that moves nothing, the weights at the end are those of the start."""
    net = model.build("nano", config(), seed=4)
    given = [*flags(tmp_path, 3), "--seed", 4]
    if trained:  # a folder with weights of other values
        net = model.build("nano", config(), seed=5)
        write_folder(tmp_path / "folder", config(), seed=5)
        given += ["--model", "folder"]
    result = train(SCRIPT, tmp_path, *given, "--steps", 1, "--lr", 1e-30, nproc=3)
    assert result.summary["weights_sha256"] == checkpoint.digest(net)


@slow
@pytest.mark.parametrize("how", ["truncated", "one bit", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, how):
    given = flags(tmp_path, 3)
    summary = train(SCRIPT, tmp_path, *given, nproc=2).summary
    newest = tmp_path / f"run/step-{STEPS:08d}"
    damage(newest, how, "*optim_states.pt")
    resumed = train(SCRIPT, tmp_path, *given, "--resume", nproc=2)
    assert f"{newest} is broken (" in resumed.out
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


TIMEOUTS = """
import json, torch
import torch.distributed as dist
from old import runtime
shutdown = runtime.shutdown
def tell():
    groups = dist.distributed_c10d._world.pg_map
    seconds = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    with open(f"timeouts-{dist.get_rank()}.json", "w") as file:
        json.dump(seconds, file)
    shutdown()
runtime.shutdown = tell
"""


@slow
def test_every_group_waits_as_long_as_it_was_told_to(tmp_path):
    script = with_prelude(SCRIPT, tmp_path, TIMEOUTS)
    train(script, tmp_path, *flags(tmp_path, 3), nproc=2, COLLECTIVE_TIMEOUT_SECONDS="77")
    for rank in range(2):
        seconds = json.loads((tmp_path / f"timeouts-{rank}.json").read_text())
        assert len(seconds) > 1
        assert set(seconds) == {77.0}


@slow
def test_started_cold_it_is_silent_and_compiles_nothing(tmp_path):
    built = tmp_path / "built"
    given = (*flags(tmp_path, 3), "--offload", "params")
    result = train(SCRIPT, tmp_path, *given, nproc=2, warm=False, TORCH_EXTENSIONS_DIR=str(built))
    first, *lines = result.out.splitlines()
    assert first == "uneven.json, ZeRO-3, fp32, 2 x cpu"
    assert all(line.startswith("step ") for line in lines[: STEPS + 1])
    assert lines[STEPS + 1].startswith("checked: ")
    assert "eepspeed" not in result.out
    assert "Warning" not in result.err
    assert not built.exists()


@slow
@needs_compiler
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_is_the_same(tmp_path, ddp, stage):
    assert_same(train(SCRIPT, tmp_path, *flags(tmp_path, stage), "--compile", nproc=2), ddp())


# --- state in files

ALIGNED = {  # the parts of two ranks are multiples of 128 numbers, and gradients of a MiB or more go to files too
    **UNEVEN,
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 4352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def async_io_is_compiled() -> bool:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("async_io", verbose=False), "async_io.so").exists()


@slow
@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_state_in_files_changes_nothing(tmp_path, offload):
    """To the bit; and what is saved at the end is a folder that the next run starts from."""
    if not async_io_is_compiled():
        pytest.skip("DeepSpeed's async_io is not compiled here: one run with --nvme compiles it, which takes minutes")
    (tmp_path / "aligned.json").write_text(json.dumps(ALIGNED))
    shared = ("--model", tmp_path / "aligned.json", "--steps", 3, "--stage", 3, "--offload", offload, *ACCUMULATED)
    memory = train(SCRIPT, tmp_path / "memory", *shared, nproc=2)
    disk = tmp_path / "disk"
    disk.mkdir()
    files = train(SCRIPT, tmp_path / "files", *shared, "--nvme", disk, nproc=2)
    assert files.column("loss") == memory.column("loss")
    assert files.column("grad_norm") == memory.column("grad_norm")
    assert files.summary["weights_sha256"] == memory.summary["weights_sha256"]
    of_state = 3 * 4 * shapes.parameter_count(config_of(ALIGNED)) // 2
    for rank in range(2):
        held = {kind: files.summary[f"{kind}_bytes_per_rank"][rank] for kind in ("optimizer", "fp32_copy", "nvme")}
        assert 0 <= sum(held.values()) - of_state < 20_000  # what comes last is padded
        assert held["nvme"] > 0.99 * of_state
        weights = files.summary["parameter_bytes_per_rank"][rank]
        assert weights < of_state / 3 / 4 if offload == "params" else weights > of_state / 3 - 1
    assert list(disk.iterdir()) == []
    folder = tmp_path / "files/run/step-00000003"
    start = ("--model", folder, "--steps", 1, "--lr", 1e-30)
    again = train("05_ddp/train.py", tmp_path / "again", *start)
    assert again.summary["weights_sha256"] == files.summary["weights_sha256"]


NO_OPERATOR = """
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.ops.op_builder import AsyncIOBuilder
AsyncIOBuilder.is_compatible = lambda self, verbose=False: False
"""


@slow
@pytest.mark.parametrize("missing", ["operator", "folder", "alignment"])
def test_files_that_cannot_be_are_told_in_one_line(tmp_path, missing):
    script = with_prelude(SCRIPT, tmp_path, NO_OPERATOR)
    write_tiny(tmp_path)
    (tmp_path / "disk").mkdir()
    given = [*tiny_flags(tmp_path), "--stage", 3, "--offload", "optimizer", "--nvme"]
    given += ["none" if missing == "folder" else "disk"]
    given += flags(tmp_path) if missing == "alignment" else ()
    given += ["--save-every", 0]
    words = {
        "operator": "async_io, which is compiled at first use: it takes libaio-dev (apt-get install libaio-dev), g++",
        "folder": "--nvme none: no such folder",
        "alignment": "1 ranks cut model.embed_tokens.weight into parts of 10878 numbers, and DeepSpeed loses the",
    }
    result = run(script, tmp_path, *given)
    assert result.code == 2
    told = [line for line in result.err.splitlines() if "error: " in line]
    assert len(told) == 1
    assert words[missing] in told[0]
    assert not (tmp_path / "disk/zero_stage_3").exists()


WRONG = [  # flags, words of the error
    (("--nvme", "."), "--nvme .: at --stage 2 DeepSpeed keeps it in memory; use --stage 3"),
    (("--nvme", ".", "--stage", "3"), "nothing would go there; add --offload optimizer"),
    (
        ("--nvme", ".", "--stage", "3", "--offload", "params", "--save-every", "2"),
        "with --save-every: DeepSpeed cannot",
    ),
    (("--nvme", ".", "--stage", "3", "--offload", "params", "--resume"), "with --resume: DeepSpeed cannot"),
    (("--offload", "params"), "--offload params: at --stage 2 each rank computes with all weights; use --stage 3"),
    (("--stage", "0", "--offload", "optimizer"), "stage 0 shares nothing that could be moved"),
    (("--stage", "0", "--dtype", "fp16"), "DeepSpeed's fp16 optimizer without ZeRO does not follow AdamW"),
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
def test_without_deepspeed(tmp_path):
    script = with_prelude(SCRIPT, tmp_path, "sys.modules['deepspeed'] = None")
    write_tiny(tmp_path)
    result = run(script, tmp_path, *tiny_flags(tmp_path))
    assert result.code == 2
    assert result.err.splitlines()[-1].endswith(
        "train_zero.py needs the package deepspeed: pip install deepspeed==0.19.8"
    )


@slow
def test_another_stage_is_another_run(tmp_path):
    train(SCRIPT, tmp_path, *flags(tmp_path, 2), nproc=2)
    result = train(SCRIPT, tmp_path, *flags(tmp_path, 3), "--resume", nproc=2, code=1)
    assert "holds a run with other settings: --stage 3 (was 2); use another" in result.err
    result = train(DDP, tmp_path, *flags(tmp_path), "--resume", code=2)
    assert "holds a run with other settings: --stage None (was 2); use another" in result.err
