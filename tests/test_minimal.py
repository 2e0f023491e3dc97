"""The four minimal.py: one program growing, one loss whatever cuts it, weights that load into the plain model.

Each is started as a reader starts it: by python, or by torchrun. Nothing here depends on time or on a machine.
"""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from support.harness import ROOT, Result, command, finish, run, start

pytestmark = pytest.mark.timeout(1200)

AMP, DDP, FSDP, TENSOR = SCRIPTS = (
    "04_amp/minimal.py",
    "05_ddp/minimal.py",
    "06_fsdp_zero/minimal.py",
    "08_model_parallel/minimal.py",
)
SIZES = "STEPS, GLOBAL_BATCH, LENGTH, LEARNING_RATE, SEED = 20, 24, 64, 1e-3, 0"

each = pytest.mark.parametrize("script", SCRIPTS)
each_of_several = pytest.mark.parametrize("script", [DDP, FSDP, TENSOR])


def run_minimal(script: str | Path, folder: Path, *flags, nproc: int | None = None) -> Result:
    result = run(str(script), folder, *flags, nproc=nproc, timeout=600, warm=False)
    assert result.code == 0, f"exit code {result.code}\n{result.out[-2000:]}\n{result.err[-4000:]}"
    return result


def last_loss(result: Result, step: int = 20) -> float:
    """The loss in the last line of the output, which has no other form than this."""
    *_, last = result.out.splitlines()
    head, loss = last.split(" | loss ")
    assert head == f"step {step}"
    assert len(loss.split(".")[1]) == 6
    return float(loss)


def saved_weights(result: Result) -> dict[str, torch.Tensor]:
    return torch.load(result.folder / "minimal.pt")  # weights_only: plain tensors, nothing of torch.distributed


def with_sizes(script: str, folder: Path, steps: int, global_batch: int, length: int) -> Path:
    """A copy of the script whose reader has edited the sizes."""
    source = (ROOT / script).read_text()
    assert source.count(SIZES) == 1
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "minimal.py"
    names, _ = SIZES.split(" = ")
    copy.write_text(source.replace(SIZES, f"{names} = {steps}, {global_batch}, {length}, 1e-3, 0"))
    return copy


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Result:
    return run_minimal(AMP, tmp_path_factory.mktemp("baseline"))


@pytest.fixture(scope="module")
def small_baseline(tmp_path_factory) -> float:
    """The fp32 loss of sizes that no script was written with."""
    folder = tmp_path_factory.mktemp("small_baseline")
    return last_loss(run_minimal(with_sizes(AMP, folder, 3, 10, 37), folder), step=3)


@each
def test_it_imports_torch_and_the_standard_library_only(script):
    imported = set()
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize(
    ("script", "nproc"),
    [(script, nproc) for script in (DDP, FSDP) for nproc in (None, 2, 3)] + [(TENSOR, nproc) for nproc in (None, 2, 4)],
)
def test_one_loss_and_the_same_weights_on_any_number_of_processes(script, nproc, baseline, tmp_path):
    result = run_minimal(script, tmp_path, nproc=nproc)
    assert last_loss(result) == pytest.approx(last_loss(baseline), rel=1e-5)
    assert result.out.count("step 20 |") == 1  # rank 0 alone prints

    weights, expected = saved_weights(result), saved_weights(baseline)
    assert list(weights) == list(expected)
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4, msg=lambda text, name=name: name + text)


def test_what_is_saved_is_the_plain_model(baseline):
    spec = importlib.util.spec_from_file_location("minimal", ROOT / AMP)
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    torch.manual_seed(minimal.SEED)
    model = minimal.Model()
    before = model.head.weight.detach().clone()
    model.load_state_dict(saved_weights(baseline))  # strict: all names, no others
    assert not torch.equal(model.head.weight, before)


@pytest.mark.parametrize(
    ("script", "nproc", "dtype"),
    [
        (AMP, None, "bf16"),
        (AMP, None, "fp16"),
        (DDP, 2, "bf16"),
        (DDP, 2, "fp16"),
        (FSDP, 2, "bf16"),
        (TENSOR, 2, "bf16"),
    ],
)
def test_16_bits_end_near_fp32(script, nproc, dtype, small_baseline, tmp_path):
    copy = with_sizes(script, tmp_path, 3, 10, 37)
    loss = last_loss(run_minimal(copy, tmp_path, "--dtype", dtype, nproc=nproc), step=3)
    assert loss == pytest.approx(small_baseline, rel=0.02)
    assert loss != small_baseline  # or the flag had no effect
    assert all(weight.dtype == torch.float32 for weight in torch.load(tmp_path / "minimal.pt").values())


@each_of_several
def test_a_batch_that_does_not_divide_is_told_in_one_line(script, tmp_path):
    result = run(script, tmp_path, warm=False, timeout=600, RANK="0", WORLD_SIZE="5", LOCAL_RANK="0")
    assert result.code == 2
    _usage, error = result.err.splitlines()
    assert "GLOBAL_BATCH=24 does not divide over 5 " in error
    assert error.endswith("use a multiple of 5")


@pytest.mark.parametrize(("script", "dtype"), [(AMP, "int8"), (FSDP, "fp16"), (TENSOR, "fp16")])
def test_a_wrong_dtype_is_told_by_argparse(script, dtype, tmp_path):
    result = run(script, tmp_path, "--dtype", dtype, warm=False, timeout=600)
    assert result.code == 2
    assert f"invalid choice: '{dtype}'" in result.err


def test_several_people_on_one_machine(small_baseline, tmp_path):
    """Without torchrun each run takes a port that is free."""
    folders = [tmp_path / "one", tmp_path / "other"]
    copies = [with_sizes(DDP, folder, 3, 10, 37) for folder in folders]
    jobs = [start(command(str(copy)), folder) for copy, folder in zip(copies, folders, strict=True)]
    for job, folder in zip(jobs, folders, strict=True):
        result = finish(job, folder, timeout=600)
        assert result.code == 0, result.err
        assert last_loss(result, step=3) == pytest.approx(small_baseline, rel=1e-5)
