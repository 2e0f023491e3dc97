"""What only a GPU can show, asked of the real scripts: the same numbers as on a CPU, in less time and memory.

    pytest -m gpu tests/test_gpu.py

The runs that the tests look at are made once each, one after another in one process: most of a run
is start-up. Everything is nano but the MFU run (llama-124m), which is marked slow, as are compiled
runs.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.chapter import load
from support.checkpoints import saved
from support.harness import Result, drop_after, run

from common import hardware
from lm import moe

AMP, DDP, FSDP = "04_amp/train.py", "05_ddp/train.py", "06_fsdp_zero/train_fsdp.py"
NANO = ("--model", "nano", "--no-compile")
TEN_STEPS = ("--steps", "10", "--log-every", "1")
FP32 = (*NANO, "--dtype", "fp32", *TEN_STEPS)
BF16 = (*NANO, "--dtype", "bf16", *TEN_STEPS)
# --save-every leaves a checkpoint to resume from half-way
EXACT = ("--device", "cuda", *FP32, "--deterministic", "--save-every", "5")
LARGE = (
    *("--model", "llama-124m", "--dtype", "bf16", "--no-compile"),
    *("--seq-len", "1024", "--global-batch-size", "8"),
)
RUN_SECONDS = 240  # the longest a run may take: the compiled ones, cold


class Job(NamedTuple):
    script: str
    flags: tuple[str, ...]
    nproc: int | None = None  # ranks; None: plain python


# The name of a run is that of the fixture that gives its result.
RUNS = {
    "compiled_ddp": Job(DDP, (*BF16, "--compile"), nproc=1),
    "compiled": Job(AMP, (*BF16, "--compile")),
    "large": Job(AMP, (*LARGE, "--steps", "20", "--log-every", "5")),
    "fp32_on_cpu": Job(AMP, ("--device", "cpu", *FP32)),
    "fp32": Job(AMP, ("--device", "cuda", *FP32)),
    "bf16": Job(AMP, BF16),
    "fp16": Job(AMP, (*NANO, "--dtype", "fp16", *TEN_STEPS)),
    "exact": Job(AMP, EXACT),
    "recomputed": Job(AMP, (*EXACT, "--checkpointing", "full")),
    "products_kept": Job(AMP, (*EXACT, "--checkpointing", "selective")),
    "exact_async": Job(AMP, (*EXACT, "--async-save")),
    "exact_ddp": Job(DDP, EXACT, nproc=1),
    "exact_fsdp": Job(FSDP, EXACT, nproc=1),
    "offloaded_fsdp": Job(FSDP, (*EXACT, "--cpu-offload", "--checkpointing", "full"), nproc=1),
    "exact_ddp_two": Job(DDP, EXACT, nproc=2),
    "exact_fsdp_two": Job(FSDP, EXACT, nproc=2),
}

# a wait for another run's GPUs counts as the test's time
pytestmark = [
    pytest.mark.gpu(n=1),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def train(run: Callable[..., Result], job: Job, folder: Path, **how) -> Result:
    """Do that run. Its run directory is folder/run, its summary folder/summary.json."""
    flags = [*job.flags, "--run-dir", folder / "run", "--json", "summary.json"]
    result = run(job.script, folder, *flags, nproc=job.nproc, timeout=RUN_SECONDS, **how)
    assert result.code == 0, result
    return result


@pytest.fixture(scope="module")
def finished() -> dict[str, Result]:
    """The runs that have been done, by name."""
    return {}


def result_of(name: str):
    """Return the fixture `name`: the Result of that run."""

    @pytest.fixture(name=name)
    def run_once(gpu_run, finished, tmp_path_factory) -> Result:
        if name not in finished:
            finished[name] = train(gpu_run, RUNS[name], tmp_path_factory.mktemp(name))
        return finished[name]

    return run_once


for _name in RUNS:
    globals()[f"_{_name}"] = result_of(_name)


def losses(result: Result) -> list[float]:
    return result.column("loss")


def test_gpu_losses_are_the_cpus(fp32_on_cpu, fp32):
    assert fp32.summary["device"] not in ("cpu", "mps")
    assert len(losses(fp32)) == 10
    assert losses(fp32) == pytest.approx(losses(fp32_on_cpu), rel=1e-3)
    assert fp32.summary["val_loss"] == pytest.approx(fp32_on_cpu.summary["val_loss"], rel=1e-3)


def test_16_bit_losses_are_near_fp32(fp32, bf16, fp16):
    assert bf16.summary["skipped_steps"] == 0
    for low in (bf16, fp16):
        skipped = low.summary["skipped_steps"]  # each leaves the curve a step behind
        assert skipped <= 2
        assert losses(low)[0] == pytest.approx(losses(fp32)[0], rel=5e-3)
        assert losses(low)[-1] == pytest.approx(losses(fp32)[-1], rel=0.02 + 0.05 * skipped)


def test_deterministic_resume_is_bit_identical(exact, gpus, tmp_path):
    """In a process of its own, as a run is resumed."""
    shutil.copytree(exact.folder / "run", tmp_path / "run")
    drop_after(tmp_path, 5)
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    job = Job(AMP, (*EXACT, "--resume"))
    resumed = train(run, job, tmp_path, warm=False, **visible)
    assert f"{tmp_path}/run/step-00000005" in resumed.out
    assert resumed.summary["weights_sha256"] == exact.summary["weights_sha256"]
    assert losses(resumed) == losses(exact)


def test_deterministic_runs_are_bit_identical_and_async_save_saves_the_same(exact, exact_async):
    assert exact_async.summary["weights_sha256"] == exact.summary["weights_sha256"]
    for step in (5, 10):
        expected, found = saved(exact.folder, step), saved(exact_async.folder, step)
        for part in ("model", "optimizer"):
            assert expected[part]
            torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)


def test_checkpointing_changes_memory_alone(exact, recomputed, products_kept):
    for run_with_it in (recomputed, products_kept):
        assert losses(run_with_it) == pytest.approx(losses(exact), rel=1e-6)
    peaks = [
        run_with_it.summary["peak_memory_bytes"]
        for run_with_it in (recomputed, products_kept, exact)
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[2]


def test_one_nccl_process_is_the_chapter_before(exact, exact_ddp, exact_fsdp):
    for distributed in (exact_ddp, exact_fsdp):
        assert distributed.summary["world_size"] == 1
        assert losses(distributed) == pytest.approx(losses(exact), rel=1e-5)
    assert exact_fsdp.summary["parameter_bytes_per_rank"] == [4 * exact_fsdp.summary["parameters"]]


def test_offloaded_and_recomputed_is_sharded(exact_fsdp, offloaded_fsdp):
    """AdamW is the CPU's then, and rounds in another order."""
    assert losses(offloaded_fsdp) == pytest.approx(losses(exact_fsdp), rel=1e-4)
    assert offloaded_fsdp.summary["peak_memory_bytes"] < exact_fsdp.summary["peak_memory_bytes"]


@pytest.mark.slow
def test_compiled_losses_are_near_eager(bf16, compiled, compiled_ddp):
    for run_with_it in (compiled, compiled_ddp):
        assert losses(run_with_it) == pytest.approx(losses(bf16), rel=1e-2)
        assert run_with_it.summary["val_loss"] == pytest.approx(bf16.summary["val_loss"], rel=1e-2)


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (0, 24, 0, 8)])
def test_experts_without_rows_have_no_gradient(counts, gpus):
    """grouped_mm of bf16, as on a rank of expert parallelism to which few tokens come, or none."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 16, generator=generator, dtype=torch.bfloat16)
    stack = torch.randn(len(counts), 32, 16, generator=generator, dtype=torch.bfloat16)
    gradients = {}
    for device in ("cpu", "cuda"):
        weight = stack.to(device, copy=True).requires_grad_()
        output = moe.multiply(rows.to(device), weight, torch.tensor(counts, device=device))
        output.backward(torch.ones_like(output))
        gradients[device] = weight.grad.cpu().float()
    assert torch.allclose(gradients["cuda"], gradients["cpu"], rtol=2**-6, atol=2**-6)
    for count, gradient in zip(counts, gradients["cuda"], strict=True):
        assert count > 0 or gradient.eq(0).all()


@pytest.mark.slow
def test_memory_fits_and_mfu_is_a_share_of_a_known_peak_or_null(large, gpus):
    found, _ = load("01_devices/_machine.py").gpus()
    total, name = next(
        (gpu["memory_total_bytes"], gpu["name"])
        for gpu in found
        if gpu["uuid"] == gpus["CUDA_VISIBLE_DEVICES"]
    )
    # fp32: the weights and AdamW's two moments
    weights_and_optimizer = 3 * 4 * large.summary["parameters"]
    active, reserved = large.column("memory_active_bytes"), large.column("memory_reserved_bytes")
    for active_bytes, reserved_bytes in zip(active, reserved, strict=True):
        assert weights_and_optimizer < active_bytes <= reserved_bytes < total
    assert weights_and_optimizer < large.summary["peak_memory_bytes"] < total
    assert large.summary["device"] == name
    peak = hardware.peak_flops(name, "bf16")
    assert large.summary["peak_flops_per_device"] == peak
    for share in (large.summary["mfu"], *large.column("mfu")):
        assert share is None if peak is None else 0 < share < 1


def test_more_processes_than_gpus_is_one_line(gpus, tmp_path):
    flags = (*FP32, "--device", "cuda", "--run-dir", tmp_path / "run")
    env = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(DDP, tmp_path, *flags, nproc=2, timeout=RUN_SECONDS, warm=False, **env)
    assert result.code != 0
    told = [line for line in result.err.splitlines() if ": error: " in line]
    assert len(told) == 1, result
    assert "--device cuda" in told[0]
    assert "2 processes" in told[0]
    # no traceback before it; torchrun's own report comes after
    assert 'File "' not in result.err.split(told[0])[0]


# last: it takes a second GPU, and the runs above must be over by then
@pytest.mark.gpu(n=2)
def test_two_ranks_are_one(exact_ddp, exact_ddp_two, exact_fsdp_two):
    for two in (exact_ddp_two, exact_fsdp_two):
        assert two.summary["world_size"] == 2
        assert losses(two) == pytest.approx(losses(exact_ddp), rel=1e-5)
