"""06_fsdp_zero/train_zero.py: each stage of DeepSpeed trains as DDP does, and resumes on any ranks.

Importing DeepSpeed takes longer than these runs. So the ranks start once, and the stages run one
after the other.
"""

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_folder
from support.harness import (
    ROOT,
    TINY,
    Result,
    assert_refused,
    checkpoints,
    config_of,
    drop_after,
    run,
    tiny_flags,
    train,
    with_prelude,
)

from lm.weights import build, digest

pytestmark = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
SCRIPT = "06_fsdp_zero/train_zero.py"
DDP = "05_ddp/train.py"
STEPS = 6
STAGES = range(4)
UNEVEN = {  # 4 ranks divide none of its sizes
    **TINY,
    **{"vocab_size": 259, "hidden_size": 42, "intermediate_size": 50, "num_hidden_layers": 3},
    **{"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
}
FLAGS = ("--model", "uneven.json", "--steps", STEPS, "--save-every", 1, "--keep", 100)
ACCUMULATED = ("--micro-batch-size", 2)
# Runs at stage 3 that save nothing after their last step, or evaluate and save at no other step.
SELDOM_SAVED = {
    "nothing is saved": ("--keep", 0),
    "nothing is saved, evaluated often": ("--keep", 0, "--eval-every", 1),
    "nothing is saved, never evaluated before": ("--keep", 0, "--eval-every", STEPS + 1),
    "saved at the end": ("--save-every", STEPS + 1, "--eval-every", STEPS + 1),
}

# Calls main() for all runs but the last, in the process group of the first. The last run is the
# script itself.
IN_TURN = """
import functools, importlib.util, json
from pathlib import Path
from common import runtime
script, runs = json.loads(Path("runs.json").read_text())
spec = importlib.util.spec_from_file_location("script", script)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
shutdown = runtime.shutdown
runtime.init_process_group = functools.cache(runtime.init_process_group)
runtime.shutdown = lambda: None
for number, (folder, flags) in enumerate(runs):
    os.chdir(folder)
    sys.argv[1:] = flags
    if number < len(runs) - 1:
        assert module.main() == 0
runtime.shutdown = shutdown
"""


# Writes, into the folder of each run, how many numbers of each dtype each collective was given.
TRACE = """
from collections import Counter
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from common import measure

numbers = {}


class Trace(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kind = measure._kind_of(operator)
        if kind is not None:
            inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            counter = numbers.setdefault(os.getcwd(), Counter())
            counter[f"{kind} {inputs[-1].dtype}"] += inputs[-1].numel()
            if os.environ["RANK"] == "0":
                open("traced.json", "w", encoding="utf-8").write(json.dumps(counter))
        return operator(*args, **(kwargs or {}))


import json
Trace().__enter__()
"""


def train_uneven(script: str, folder: Path, *more, **how) -> Result:
    """A small model with uneven sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uneven.json").write_text(json.dumps(UNEVEN), encoding="utf-8")
    return train(script, folder, *FLAGS, *more, **how)


def train_in_turn(folder: Path, runs: dict, nproc: int, prelude: str = "") -> dict:
    """Train in folder/name with the flags of each name, and return the results by name.

    A name that is a number is the --stage. Runs with other names are at stage 3.
    """
    given = []
    for name, more in runs.items():
        own = folder / str(name)
        own.mkdir(parents=True, exist_ok=True)
        (own / "uneven.json").write_text(json.dumps(UNEVEN), encoding="utf-8")
        stage = name if name in STAGES else 3
        flags = (*tiny_flags(own), *FLAGS, "--stage", stage, *more)
        given.append((str(own), [str(flag) for flag in flags]))
    (folder / "runs.json").write_text(json.dumps([str(ROOT / SCRIPT), given]), encoding="utf-8")
    result = run(with_prelude(SCRIPT, folder, prelude + IN_TURN), folder, nproc=nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return {name: Result(0, result.out, result.err, folder / str(name)) for name in runs}


@pytest.fixture(scope="module")
def ddp(once) -> Result:
    """The run of two processes that hold the whole model each."""

    def run(folder: Path) -> Result:
        return train_uneven(DDP, folder, nproc=2)

    return once("zero ddp", run)


@pytest.fixture(scope="module")
def seldom_saved(once) -> dict:
    """The runs on two ranks by the names of SELDOM_SAVED."""

    def run(folder: Path) -> dict:
        runs = {name: (*ACCUMULATED, *flags) for name, flags in SELDOM_SAVED.items()}
        return train_in_turn(folder, runs, nproc=2)

    return once("zero seldom saved", run)


@pytest.fixture(scope="module")
def zero(once) -> dict[int, Result]:
    """Return the runs on two ranks by stage."""

    def run(folder: Path) -> dict:
        return train_in_turn(folder, dict.fromkeys(STAGES, ACCUMULATED), nproc=2)

    return once("zero stages", run)


def copy_of(run: Result, folder: Path, last_step: int = STEPS) -> Path:
    """The folder of a run, to go on from `last_step`."""
    shutil.copytree(run.folder, folder)
    drop_after(folder, last_step)
    return folder


def assert_same(ours: Result, theirs: Result, tolerance: float = 1e-5) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert ours.column(column) == pytest.approx(theirs.column(column), rel=tolerance), column


def named_sizes() -> dict[str, torch.Size]:
    net = build("nano", config_of(UNEVEN), seed=0, device="meta")
    return {name: parameter.shape for name, parameter in net.named_parameters()}


def parts(stage: int, ranks: int) -> int:
    """Return how many elements a rank holds.

    Stage 3 shards each tensor. Stages 1 and 2 shard all matrices as one, and all vectors as one.
    """
    sizes = named_sizes().values()
    if stage == 3:
        return sum(math.ceil(size.numel() / ranks) for size in sizes)
    matrices = sum(size.numel() for size in sizes if len(size) == 2)
    vectors = sum(size.numel() for size in sizes if len(size) == 1)
    if stage == 0:
        return matrices + vectors
    return sum(2 * math.ceil(numbers / (2 * ranks)) for numbers in (matrices, vectors))


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_is_data_parallelism(ddp, zero, stage):
    result = zero[stage]
    assert len(result.column("loss")) == STEPS
    assert_same(result, ddp)
    weights = 4 * (parts(3, 2) if stage == 3 else parts(0, 2))
    part = 4 * parts(stage, 2)
    assert result.summary["parameter_bytes_per_rank"] == [weights] * 2
    assert result.summary["optimizer_bytes_per_rank"] == [2 * part] * 2


@pytest.mark.full
@pytest.mark.parametrize("name", SELDOM_SAVED)
def test_stage_3_passes_its_checks_also_without_a_save(seldom_saved, zero, name):
    """DeepSpeed partitions the parameters again when it saves. The checks do not depend on it."""
    result = seldom_saved[name]
    assert result.summary["weights_sha256"] == zero[3].summary["weights_sha256"]
    saves = "--keep" not in SELDOM_SAVED[name]
    assert checkpoints(result.folder) == ([f"step-{STEPS:08d}"] if saves else [])


@pytest.mark.full
def test_bf16_is_autocast_and_weights_stay_in_fp32(tmp_path, zero):
    bf16 = ("--dtype", "bf16")
    whole = train_uneven(DDP, tmp_path / "ddp", *bf16, nproc=2)
    for stage, result in train_in_turn(tmp_path, {2: bf16, 3: bf16}, nproc=2).items():
        assert (
            result.summary["parameter_bytes_per_rank"]
            == zero[stage].summary["parameter_bytes_per_rank"]
        )
        assert_same(result, whole, tolerance=5e-3)
        assert result.column("loss") == pytest.approx(whole.column("loss"), rel=3e-4)


@pytest.mark.full
def test_gradients_of_bf16_matmuls_are_averaged_in_fp32(tmp_path):
    """As DDP and FSDP here do. Stage 2 sends what the row of DeepSpeed in compare.py says."""
    flags = ("--dtype", "bf16", "--steps", 2, "--save-every", 0, "--eval-every", 3)
    results = train_in_turn(tmp_path, {2: flags, 3: flags}, nproc=2, prelude=TRACE)
    total = sum(shape.numel() for shape in named_sizes().values())
    for stage, kind in ((2, "all_reduces"), (3, "reduce_scatters")):
        traced = json.loads((results[stage].folder / "traced.json").read_text(encoding="utf-8"))
        assert not [name for name in traced if "bfloat16" in name]
        sent = traced[f"{kind} torch.float32"]
        assert 2 * total <= sent < 2 * total + 100  # losses and norms, and padding
    assert "[WARNING]" not in results[2].out


@pytest.mark.full
def test_offloaded_and_recomputed_on_four_ranks(tmp_path, ddp):
    cases = {
        1: ("--offload", "optimizer"),
        2: ("--offload", "optimizer", "--checkpointing", "full", "--micro-batch-size", 1),
        3: ("--offload", "params", "--checkpointing", "selective", "--micro-batch-size", 1),
    }
    for stage, result in train_in_turn(tmp_path, cases, nproc=4).items():
        assert_same(result, ddp)
        assert result.summary["optimizer_bytes_per_rank"] == [8 * parts(stage, 4)] * 4


@pytest.mark.full
def test_resumed_on_as_many_ranks_is_uninterrupted_to_the_bit(tmp_path, zero):
    for stage, whole in zero.items():
        copy_of(whole, tmp_path / str(stage), last_step=3)
    again = train_in_turn(tmp_path, dict.fromkeys(STAGES, (*ACCUMULATED, "--resume")), nproc=2)
    for stage, resumed in again.items():
        whole = zero[stage]
        assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
        assert resumed.column("loss") == whole.column("loss")
        assert resumed.column("grad_norm") == whole.column("grad_norm")
        assert f"{resumed.folder}/run/step-00000003" in resumed.out


@pytest.mark.full
def test_a_run_can_be_made_longer(tmp_path, ddp, zero):
    """With more --steps the learning rate follows the new schedule from the first step on."""
    longer = ("--steps", STEPS + 3, "--resume")
    expected = train_uneven(DDP, copy_of(ddp, tmp_path / "ddp"), *longer, nproc=2)
    for stage, whole in zero.items():
        copy_of(whole, tmp_path / str(stage))
    for result in train_in_turn(tmp_path, dict.fromkeys(STAGES, longer), nproc=2).values():
        assert len(result.column("lr")) == STEPS + 3
        assert result.column("lr") == pytest.approx(expected.column("lr"), rel=1e-9)
        assert_same(result, expected)


@pytest.mark.full
def test_a_run_moves_between_numbers_of_ranks(tmp_path, ddp, zero):
    """Saved on 2 ranks, resumed on 3, then on 1. The universal checkpoint is removed afterwards."""
    stages = (0, 2, 3)
    for stage in stages:
        copy_of(zero[stage], tmp_path / str(stage))
    for step, ranks in ((2, 3), (4, 1)):
        for stage in stages:
            drop_after(tmp_path / str(stage), step)
        for result in train_in_turn(tmp_path, dict.fromkeys(stages, ("--resume",)), ranks).values():
            assert f"{result.folder}/run/step-{step:08d}" in result.out
            assert result.column("step") == [*range(1, STEPS + 1), STEPS]
            assert_same(result, ddp)
            assert not list((result.folder / "run").glob("*universal*"))


@pytest.mark.full
def test_stage_3_starts_from_the_weights_of_one_process_to_the_bit(tmp_path):
    """Random weights, and those of a folder. The learning rate is so small that none changes."""
    write_folder(tmp_path / "hf", config_of(UNEVEN), seed=5)
    for seed, more in ((4, ()), (5, ("--model", tmp_path / "hf"))):
        still = ("--stage", 3, "--seed", 4, *more, "--steps", 1, "--lr", 1e-30)
        result = train_uneven(SCRIPT, tmp_path / str(seed), *still, nproc=3)
        assert result.summary["weights_sha256"] == digest(
            build("nano", config_of(UNEVEN), seed=seed)
        )


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_becomes_a_folder_of_hugging_face(tmp_path, zero, stage):
    """And what is left when the file of one rank is lost is refused."""
    whole = zero[stage]
    folder = copy_of(whole, tmp_path / "0")
    convert = "06_fsdp_zero/convert_checkpoint.py"
    result = run(convert, folder, "run", "hf", "--to", "hf")
    assert result.code == 0, result.err
    net = build(str(folder / "hf"), config_of(UNEVEN), seed=0)
    assert digest(net) == whole.summary["weights_sha256"]
    if stage > 0:
        newest = folder / f"run/step-{STEPS:08d}"
        (newest / "hashes.json").unlink()  # as DeepSpeed itself writes one
        next(newest.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()
        assert_refused(run(convert, folder, "run", "to", "--to", "hf"), "run/step")
        assert not list(folder.glob("to*"))


def test_another_stage_is_another_run(tmp_path, zero):
    folder = copy_of(zero[2], tmp_path / "2")
    result = train_uneven(SCRIPT, folder, "--stage", 3, *ACCUMULATED, "--resume", code=2)
    assert "--stage 3 (was 2)" in result.err


def test_what_is_refused(tmp_path):
    refusals = {
        "--offload params": "--offload params --stage 2",
        "--stage 0 --offload optimizer": "--offload optimizer 0",
        "--dtype fp16": "--dtype fp16 05_ddp/train.py",
        "--async-save": "--async-save",
        "--stage 4": "--stage 4",
    }
    for given, words in refusals.items():
        assert_refused(run(SCRIPT, tmp_path, *given.split()), *words.split())
