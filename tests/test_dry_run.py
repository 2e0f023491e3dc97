"""train_3d.py --dry-run: the bytes of fake ranks beside the planner's, and beside those of real ranks."""

import json

import pytest
from support.harness import TINY, run, train

from common import shapes
from planner import shape
from planner.memory import Memory
from planner.plan import Plan

SCRIPT = "08_model_parallel/train_3d.py"
CONFIG = shapes.Config(
    32_000, 4096, 14_336, 6, 32, 8, 128, 8192
)  # the widths of an 8B; stages do not divide its layers
RANKS = 8
SIZES = {"tp": 1, "pp": 1, "cp": 1, "replicate": 1, "seq_len": 1024, "micro_batch_size": 1, "micro_batches": 2}
SIZES |= {"checkpointing": "none"}
LAYOUTS = {
    "sharded": {},
    "replicated": {"replicate": 4},
    "kept and repeated": {"checkpointing": "selective"},
    "tensor": {"tp": 4},
    "tensor, kept and repeated": {"tp": 4, "checkpointing": "selective", "seq_len": 8192},
    "context": {"cp": 4, "micro_batch_size": 4},
    "pipeline": {"pp": 4, "micro_batches": 8, "checkpointing": "full"},  # stages of two layers and of one
    "all": {"tp": 2, "pp": 2, "cp": 2, "micro_batches": 3},
}


def predicted(sizes: dict, stage: int) -> dict[str, float]:
    """The planner's bytes for the first rank of a stage, with the kernels of a CPU, as fake tensors have them."""
    loss = "parallel" if sizes["tp"] > 1 else "plain"
    memory = Memory(shape.from_config("8b", CONFIG), Plan(**sizes, gpus=RANKS, zero=3, loss=loss, on_cpu=True), stage)
    held = {name: memory.lines[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")}
    return {**held, "peak_bytes": memory.allocated_bytes()}


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=pytest.mark.long) for cut in LAYOUTS if cut != "all"] + ["all"]
)
def test_built_bytes_are_those_of_the_planner(tmp_path, cut):
    sizes = SIZES | LAYOUTS[cut]
    (tmp_path / "config.json").write_text(json.dumps(shapes.config_json(CONFIG)))
    data_ranks = RANKS // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    flags = {name: value for name, value in sizes.items() if name != "micro_batches"}
    flags["global_batch_size"] = data_ranks * sizes["micro_batch_size"] * sizes["micro_batches"]
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    given += ["--model=config.json", "--dry-run", f"--world-size={RANKS}", "--json=dry.json"]
    result = run(SCRIPT, tmp_path, *given)
    assert result.code == 0, result.err
    stages = json.loads((tmp_path / "dry.json").read_text())["stages"]
    assert [row["stage"] for row in stages] == [*range(sizes["pp"])]
    peak = 0.06 if sizes["pp"] > 1 else 0.03
    for row in (stages[0], stages[-1]):  # these differ most
        for name, expected in predicted(sizes, row["stage"]).items():
            assert row[name] == pytest.approx(expected, rel=peak if name == "peak_bytes" else 0.001), (row, name)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "cut"), [(2, ()), (4, ("--tp", 2, "--pp", 2)), (4, ("--cp", 2, "--replicate", 2))])
def test_real_ranks_hold_the_same(tmp_path, ranks, cut):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    flags = ("--model", "config.json", *cut, "--micro-batch-size", 3, "--steps", 1)
    real = train(SCRIPT, tmp_path / "real", *flags, "--model", tmp_path / "config.json", nproc=ranks).summary
    dry = train(SCRIPT, tmp_path, *flags, "--dry-run", "--world-size", ranks).summary["stages"]
    for row in dry:
        first = row["stage"] * ranks // len(dry)
        assert real["parameter_bytes_per_rank"][first] == row["weight_bytes"]
        assert real["optimizer_bytes_per_rank"][first] == row["optimizer_bytes"]


BAD = {
    ("--dry-run", "--world-size", 3, "--cp", 2): "takes a multiple of 2 processes, and 3 were started: use 2 or 4",
    ("--dry-run", "--tp", 3): "--tp 3 does not divide the 8 attention heads",
    ("--dry-run", "--compile"): "--dry-run counts one memory and kernels that are not compiled",
    ("--world-size", 4): "--world-size goes with --dry-run",
}


@pytest.mark.parametrize("flags", BAD, ids=lambda flags: " ".join(map(str, flags)))
def test_what_cannot_be_is_one_line(tmp_path, flags):
    result = run(SCRIPT, tmp_path, *flags)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), result.err
    assert BAD[flags] in result.err
