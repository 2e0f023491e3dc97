"""The four minimal.py: one program growing, one loss whatever cuts it, weights that load into the plain model.

Small: with three steps of other sizes, as of a reader who has edited them. In full: started as a reader starts it, by
python or by torchrun. Nothing here depends on time or on a machine.
"""

import ast
import importlib.util
import re
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
FP32 = ("--dtype", "fp32")
SMALL_STEPS = 3
EDITED = {
    "STEPS = 20\n": f"STEPS = {SMALL_STEPS}\n",
    "GLOBAL_BATCH = 24 ": "GLOBAL_BATCH = 12 ",
    "LENGTH = 64 ": "LENGTH = 37 ",
}


def run_minimal(
    script: str | Path, folder: Path, *flags, nproc: int | None = None, warm: bool = True
) -> Result:
    result = run(str(script), folder, *flags, nproc=nproc, warm=warm)
    assert result.code == 0, f"exit code {result.code}\n{result.out[-2000:]}\n{result.err[-4000:]}"
    return result


def last_loss(result: Result, step: int = SMALL_STEPS) -> float:
    """The loss of the last step, which rank 0 alone prints, to six digits."""
    [loss] = re.findall(rf"step {step} \| loss (\d+\.\d{{6}})", result.out)
    return float(loss)


def saved_weights(result: Result) -> dict[str, torch.Tensor]:
    # weights_only: plain tensors, nothing of torch.distributed
    return torch.load(result.folder / "minimal.pt")


def small(script: str, folder: Path) -> Path:
    """Return a copy of the script whose reader has edited the sizes."""
    source = (ROOT / script).read_text(encoding="utf-8")
    for line, edited in EDITED.items():
        assert source.count(line) == 1
        source = source.replace(line, edited)
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "minimal.py"
    copy.write_text(source, encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def small_baseline(tmp_path_factory) -> Result:
    folder = tmp_path_factory.mktemp("small_baseline")
    return run_minimal(small(AMP, folder), folder, *FP32)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Result:
    return run_minimal(AMP, tmp_path_factory.mktemp("baseline"), *FP32, warm=False)


def same(result: Result, expected: Result, step: int) -> None:
    """One loss, and the same weights in fp32 under the same names."""
    assert last_loss(result, step) == pytest.approx(last_loss(expected, step), rel=1e-5)
    weights, expected_weights = saved_weights(result), saved_weights(expected)
    assert list(weights) == list(expected_weights)
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(
            weight,
            expected_weights[name],
            rtol=0,
            atol=1e-4,
            msg=lambda text, name=name: name + text,
        )


def test_they_import_torch_and_the_standard_library_only():
    for script in SCRIPTS:
        imported = set()
        for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        assert imported - sys.stdlib_module_names == {"torch"}, script


CUT = [(DDP, None), (DDP, 3), (FSDP, None), (FSDP, 2), (TENSOR, None), (TENSOR, 4)]


@pytest.mark.parametrize(("script", "nproc"), CUT)
def test_one_loss_and_the_same_weights(script, nproc, small_baseline, tmp_path):
    result = run_minimal(small(script, tmp_path), tmp_path, *FP32, nproc=nproc)
    same(result, small_baseline, SMALL_STEPS)


@pytest.mark.full
@pytest.mark.parametrize(("script", "nproc"), [*CUT, (DDP, 2), (FSDP, 3), (TENSOR, 2)])
def test_one_loss_as_a_reader_starts_it(script, nproc, baseline, tmp_path):
    same(run_minimal(script, tmp_path, *FP32, nproc=nproc, warm=False), baseline, 20)


def test_what_is_saved_is_the_plain_model(small_baseline):
    spec = importlib.util.spec_from_file_location("minimal", ROOT / AMP)
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    minimal.LENGTH = 37  # as in the run
    model = minimal.Model()
    before = model.head.weight.detach().clone()
    model.load_state_dict(saved_weights(small_baseline))  # strict: all names, no others
    assert not torch.equal(model.head.weight, before)


@pytest.mark.parametrize(
    ("script", "nproc", "dtype"),
    [
        (AMP, None, None),
        (AMP, None, "fp16"),
        (DDP, 2, "fp16"),
        (FSDP, 2, "bf16"),
        (TENSOR, 2, "bf16"),
    ],
)
def test_16_bits_end_near_fp32(script, nproc, dtype, small_baseline, tmp_path):
    flags = ["--dtype", dtype] if dtype else []  # without a flag: bf16
    result = run_minimal(small(script, tmp_path), tmp_path, *flags, nproc=nproc)
    loss, expected = last_loss(result), last_loss(small_baseline)
    assert loss == pytest.approx(expected, rel=0.02)
    assert loss != expected  # or the flag had no effect
    assert all(weight.dtype == torch.float32 for weight in saved_weights(result).values())


FIVE_RANKS = {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}
REFUSED = [
    *((script, "", FIVE_RANKS, ("GLOBAL_BATCH=24", "5")) for script in (DDP, FSDP, TENSOR)),
    (AMP, "--dtype int8", {}, ("--dtype", "int8")),
    *((script, "--dtype fp16", {}, ("--dtype", "fp16")) for script in (FSDP, TENSOR)),
]


@pytest.mark.parametrize(("script", "flags", "env", "words"), REFUSED)
def test_what_cannot_run_ends_with_code_2(script, flags, env, words, tmp_path):
    result = run(script, tmp_path, *flags.split(), **env)
    assert result.code == 2
    *_, error = result.err.splitlines()
    assert [word for word in words if word not in error] == []


def test_several_people_on_one_machine(small_baseline, tmp_path):
    """Without torchrun each run takes a port that is free."""
    folders = [tmp_path / "one", tmp_path / "other"]
    jobs = [start(command(str(small(DDP, folder)), *FP32), folder) for folder in folders]
    for job, folder in zip(jobs, folders, strict=True):
        result = finish(job, folder)
        assert result.code == 0, result.err
        assert last_loss(result) == pytest.approx(last_loss(small_baseline), rel=1e-5)
