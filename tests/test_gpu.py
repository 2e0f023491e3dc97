"""What only a GPU can show, asked of the real scripts: the same numbers as on a CPU, in less time and memory.

    pytest -m gpu tests/test_gpu.py

Runs that several tests look at are made once. Everything is nano but the MFU run (llama-124m).
"""

import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from common import hardware
from common.report import read_records

REPO = Path(__file__).resolve().parents[1]
AMP, DDP = "04_amp/train.py", "05_ddp/train.py"
FP32 = ("--dtype", "fp32", "--steps", "10", "--log-every", "1")
# --save-every leaves a checkpoint to resume from half-way
EXACT = (*FP32, "--deterministic", "--save-every", "5")
COMPILED = ("--dtype", "bf16", "--steps", "10", "--log-every", "1", "--compile")
LARGE = (
    *("--model", "llama-124m", "--dtype", "bf16", "--seq-len", "1024", "--global-batch-size", "8"),
    *("--steps", "20", "--log-every", "5"),
)

# a wait for another run's GPUs counts as the test's time
pytestmark = [
    pytest.mark.gpu(n=1),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Run(NamedTuple):
    folder: Path
    records: list[dict]  # those of metrics.jsonl that carry a training loss
    summary: dict

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]


def launch(env: dict[str, str], command: list[str], timeout: float = 240) -> tuple[int, str]:
    """Run `python command`; (exit code, everything it printed). Past the timeout, ends it and fails."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun takes its processes with it, which a SIGKILL would leave
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        pytest.fail(f"{command} did not end within {timeout} s:\n{output[-4000:]}")
    return process.returncode, output


def torchrun(processes: int, *command: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *command]


def result(folder: Path) -> Run:
    records = [record for record in read_records(folder / "metrics.jsonl") if "loss" in record]
    return Run(folder, records, json.loads((folder / "summary.json").read_text()))


@pytest.fixture(scope="module")
def finished() -> dict[tuple, Run]:
    return {}


@pytest.fixture
def train(gpus, finished, tmp_path_factory) -> Callable[..., Run]:
    """train(script, *flags, processes=None): that run of the script, made at the first call for it."""

    def run(script: str, *flags: str, processes: int | None = None) -> Run:
        key = (script, flags, processes)
        if key not in finished:
            folder = tmp_path_factory.mktemp("run")
            command = [script, *flags, "--run-dir", str(folder), "--json", str(folder / "summary.json")]
            code, output = launch(gpus, command if processes is None else torchrun(processes, *command))
            assert code == 0, output[-4000:]
            finished[key] = result(folder)
        return finished[key]

    return run


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every model and optimizer tensor of a checkpoint, by name, on the CPU."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("rng")
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def test_runs_on_the_gpu(train):
    summary = train(AMP, "--device", "cuda", *FP32).summary
    assert summary["device"] not in ("cpu", "mps")
    assert summary["torch"] == torch.__version__


def test_gpu_losses_are_the_cpus(train):
    on_cpu, on_gpu = train(AMP, "--device", "cpu", *FP32), train(AMP, "--device", "cuda", *FP32)
    assert len(on_gpu.losses) == 10
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-3)
    assert on_gpu.summary["val_loss"] == pytest.approx(on_cpu.summary["val_loss"], rel=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_losses_are_near_fp32(train, dtype):
    exact = train(AMP, "--device", "cuda", *FP32)
    low = train(AMP, "--dtype", dtype, *FP32[2:])
    assert low.losses[0] == pytest.approx(exact.losses[0], rel=5e-3)
    # a step that fp16's scaler skipped leaves the curve that much behind
    assert low.summary["skipped_steps"] <= 2
    assert low.losses[-1] == pytest.approx(exact.losses[-1], rel=0.02 + 0.05 * low.summary["skipped_steps"])


def test_deterministic_resume_is_bit_identical(train, gpus, tmp_path):
    whole = train(AMP, *EXACT)
    folder = copy_until(whole.folder, tmp_path / "resumed", "step-00000005")
    flags = ["--resume", "--run-dir", str(folder), "--json", str(folder / "summary.json")]
    code, output = launch(gpus, [AMP, *EXACT, *flags])
    assert code == 0, output[-4000:]
    assert "resuming from" in output
    resumed = result(folder)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.losses == whole.losses


def copy_until(source: Path, target: Path, last: str) -> Path:
    """A copy of a run's folder as a kill right after checkpoint `last` would have left it."""
    shutil.copytree(source, target)
    for checkpoint in target.glob("step-*"):
        if checkpoint.name > last:
            shutil.rmtree(checkpoint)
    (target / "summary.json").unlink()
    return target


def test_deterministic_runs_are_bit_identical_and_async_save_saves_the_same(train):
    sync, in_background = train(AMP, *EXACT), train(AMP, *EXACT, "--async-save")
    assert in_background.summary["weights_sha256"] == sync.summary["weights_sha256"]
    for step in ("step-00000005", "step-00000010"):
        expected, saved = weights(sync.folder / step), weights(in_background.folder / step)
        assert expected
        assert expected.keys() == saved.keys()
        assert [name for name in expected if not torch.equal(expected[name], saved[name])] == []


def test_one_nccl_process_is_the_chapter_before(train):
    amp, ddp = train(AMP, *EXACT), train(DDP, *EXACT, processes=1)  # else two runs of one script differ too
    assert ddp.summary["world_size"] == 1
    assert ddp.losses == pytest.approx(amp.losses, rel=1e-5)


def test_ddp_without_torchrun(train):
    torchrun_losses = train(DDP, *EXACT, processes=1).losses
    assert train(DDP, *EXACT).losses == pytest.approx(torchrun_losses, rel=1e-5)


@pytest.mark.gpu(n=2)
def test_two_ranks_are_one(train):
    one, two = train(DDP, *EXACT, processes=1), train(DDP, *EXACT, processes=2)
    assert two.summary["world_size"] == 2
    assert two.losses == pytest.approx(one.losses, rel=1e-5)


def test_compiled_losses_are_near_eager(train):
    eager, compiled = train(AMP, *(flag for flag in COMPILED if flag != "--compile")), train(AMP, *COMPILED)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-2)
    assert compiled.summary["val_loss"] == pytest.approx(eager.summary["val_loss"], rel=1e-2)


def test_compiled_ddp_losses_are_near_eager(train):
    flags = tuple(flag for flag in COMPILED if flag != "--compile")
    eager, compiled = train(AMP, *flags), train(DDP, *COMPILED, processes=1)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-2)


def test_memory_is_told_and_fits(train, gpus):
    import pynvml

    run = train(AMP, *LARGE)
    pynvml.nvmlInit()
    total = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpus["CUDA_VISIBLE_DEVICES"])).total
    pynvml.nvmlShutdown()
    weights_and_optimizer = 3 * 4 * run.summary["parameters"]  # fp32: the weights and AdamW's two moments
    for record in run.records:
        assert weights_and_optimizer < record["memory_active_bytes"] <= record["memory_reserved_bytes"] < total
    assert weights_and_optimizer < run.summary["peak_memory_bytes"] < total


def test_mfu_is_a_share_of_a_known_peak_or_null(train, gpus):
    import pynvml

    run = train(AMP, *LARGE)
    pynvml.nvmlInit()
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID(gpus["CUDA_VISIBLE_DEVICES"]))
    pynvml.nvmlShutdown()
    assert run.summary["device"] == name
    peak = hardware.peak_flops(name, "bf16")
    assert run.summary["peak_flops_per_device"] == peak
    shares = [run.summary["mfu"], *(record["mfu"] for record in run.records)]
    if peak is None:
        assert shares == [None] * len(shares)
    else:
        assert all(0 < share < 1 for share in shares)
        assert hardware.memory_bandwidth(name) > 0
    assert all(math.isfinite(loss) for loss in run.losses)


def test_more_processes_than_gpus_is_one_line(gpus, tmp_path):
    visible = len(gpus["CUDA_VISIBLE_DEVICES"].split(","))
    code, output = launch(gpus, torchrun(visible + 1, DDP, *FP32, "--run-dir", str(tmp_path)))
    assert code != 0
    told = [line for line in output.splitlines() if "GPUs visible" in line]
    assert len(told) == 1, output
    assert f"error: --device cuda: {visible + 1} processes on this node, {visible} GPUs visible" in told[0]
    assert 'File "' not in output.split(told[0])[0]  # no traceback before it; torchrun's own report comes after
