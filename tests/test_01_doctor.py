"""01_devices/doctor.py finds each planted fault by name, and is silent where all is well."""

import json
import socket
from pathlib import Path

import psutil
import pytest
from support.harness import ROOT, run, with_fault, with_prelude, write_tiny

SCRIPT = "01_devices/doctor.py"
# true faults of the machine that tests, if it has any
HOST = {"shared memory", "disk", "port"}
PLAIN = """
import os, threading, time, torch
from collections import OrderedDict
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
rank = int(os.environ.get("RANK", 0))
class Boom(nn.Module):
    def forward(self, x): return x
class Slow(TensorDataset):
    def __getitem__(self, i): time.sleep(0.02); return super().__getitem__(i)
net = nn.Sequential(OrderedDict(first=nn.Linear(4, 8), boom=Boom(), last=nn.Linear(8, 1)))
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
{setup}
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step, (x, y) in enumerate(DataLoader(data, 8), 1):
    {step}
    optimizer.zero_grad()
    mse_loss(net(x), y).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The script without the two processes that add up numbers, which the test of a healthy run has."""
    folder = tmp_path_factory.mktemp("quick")
    (folder / "requirements.txt").symlink_to(ROOT / "requirements.txt")
    return with_fault(SCRIPT, folder, '("gloo", "nccl") if gpus > 1 else ("gloo",)', "()")


def doctor(
    folder: Path, *flags, script: str | Path = SCRIPT, **env: str
) -> tuple[dict[str, str], dict[str, str]]:
    """By check: its result, and what was seen. Each fault has a fix, and the exit code says whether one failed."""
    result = run(script, folder, "--json", "d.json", *flags, **env)
    assert (folder / "d.json").exists(), result.out + result.err
    summary = json.loads((folder / "d.json").read_text())
    checks = summary["checks"]
    failures = sum(check["result"] == "fail" for check in checks)
    assert (result.code, summary["failures"]) == (min(1, failures), failures), (
        result.out + result.err
    )
    assert all(check["fix"] for check in checks if check["result"] in ("warn", "fail"))
    return {c["check"]: c["result"] for c in checks}, {c["check"]: c["seen"] for c in checks}


def planted(folder: Path, quick: Path, setup="", step="pass", nproc=1, timeout=600, **env: str):
    """What is said of a script with these lines in it; nothing of it may be left running."""
    script = folder / "script.py"
    script.write_text(PLAIN.format(setup=setup, step=step))
    flags = ["--script", script, "--nproc", nproc, "--steps", 5, "--timeout", timeout]
    found = doctor(folder, *flags, script=quick, **env)
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])
    ]
    return found


def failed(results: dict[str, str]) -> set[str]:
    return {name for name, result in results.items() if result == "fail"} - HOST


def test_a_healthy_run_is_silent(tmp_path):
    """The whole command, on a script that leaves through os._exit before the last step that is watched."""
    write_tiny(tmp_path)
    flags = [
        "--model",
        "tiny.json",
        "--seq-len",
        32,
        "--global-batch-size",
        4,
        "--device",
        "cpu",
        "--steps",
        4,
    ]
    results, seen = doctor(tmp_path, "--script", ROOT / "04_amp/train.py", "--", *flags)
    assert failed(results) == set(), seen
    for name in ("script", "devices", "dtypes", "NaN, overflow", "memory", "gloo all-reduce"):
        assert results[name] == "ok"
    assert "4 steps" in seen["script"]


@pytest.mark.parametrize(
    "flags", [["--script", "none.py"], ["--nproc", "0"], ["--json", "none/d.json"]]
)
def test_a_wrong_flag_is_one_line(tmp_path, flags):
    result = run(SCRIPT, tmp_path, *flags)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1), (
        result.out + result.err
    )
    assert all(word in result.err for word in flags)


def test_faults_of_a_machine_and_of_a_job(tmp_path, quick):
    """Variables half set, a port in use, no disk; then a rank that is none."""
    prelude = "import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free=64 * 2**20)"
    script = with_prelude(str(quick), tmp_path, prelude)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        half = {"MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
        results, seen = doctor(tmp_path, script=script, **half)
    assert failed(results) == {"environment variables"}
    assert {results[name] for name in HOST} == {"fail"}
    assert "LOCAL_RANK" in seen["environment variables"]
    assert port in seen["port"]
    whole = {**half, "LOCAL_RANK": "2", "MASTER_ADDR": "localhost"}
    assert failed(doctor(tmp_path, script=quick, **whole)[0]) == {"environment variables"}
    assert failed(doctor(tmp_path, script=quick, **{**whole, "LOCAL_RANK": "0"})[0]) == set()


def test_gpus_that_only_the_driver_sees(fake_driver, tmp_path, quick):
    """On a torch that says it was built for CUDA 12.8: a driver that fits, a silent one, one that is too old."""
    script = with_prelude(str(quick), tmp_path, "import torch\ntorch.version.cuda = '12.8'")
    refuse = "nvmlSystemGetCudaDriverVersion,nvmlSystemGetCudaDriverVersion_v2"
    for env, expected in (
        ({}, "ok"),
        ({"NVML_REFUSE": refuse}, "skip"),
        ({"NVML_CUDA": "11040"}, "fail"),
    ):
        results, seen = doctor(tmp_path, script=script, LD_LIBRARY_PATH=fake_driver, **env)
        assert (results["driver"], results["visible GPUs"]) == (expected, "fail"), seen
    assert "11.4" in seen["driver"]


def test_a_hang(tmp_path, quick):
    """Before the first step, so that the seconds until the script counts as hung are not its start's."""
    results, seen = planted(
        tmp_path,
        quick,
        setup="net.boom.forward = lambda x: threading.Event().wait(); net(data[:2][0])",
        timeout=5,
    )
    assert failed(results) == {"script"}
    assert "script.py:" in seen["script"]


def test_a_nan_and_no_memory_and_idle_gpus(tmp_path, quick):
    setup = "torch.cuda.device_count = lambda: 4"
    step = "if step == 2: net.boom.forward = lambda x: x * float('nan')\n"
    step += "    if step == 3: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    results, seen = planted(tmp_path, quick, setup=setup, step=step)
    assert failed(results) == {"script", "NaN, overflow", "memory"}
    assert "'boom' at step 2" in seen["NaN, overflow"]  # the first module that made it
    assert "OutOfMemoryError" in seen["script"]
    assert results["GPUs in use"] == "warn"


def test_a_batch_of_another_dtype(tmp_path, quick):
    results, seen = planted(tmp_path, quick, step="x = x.double()")
    assert failed(results) == {"script", "dtypes"}
    for fact in ("'first'", "torch.float32", "torch.float64", "script.py:"):
        assert fact in seen["dtypes"]


def test_ranks_that_do_the_same_apart(tmp_path, quick):
    """No DDP, one order of batches for all, slow data: three faults of one script that runs through."""
    setup = "torch.manual_seed(rank); [p.data.normal_() for p in net.parameters()]\n"
    setup += "torch.manual_seed(0); data = Slow(torch.randn(64, 4), torch.randn(64, 1))"
    results, seen = planted(tmp_path, quick, setup, nproc=2)
    assert failed(results) == {"ranks' weights"}
    assert (results["script"], results["data wait"], results["ranks' batches"]) == (
        "ok",
        "warn",
        "warn",
    ), seen


@pytest.mark.full
def test_an_idle_rank(tmp_path, quick):
    results, seen = planted(tmp_path, quick, step="if rank == 1 and step == 3: break", nproc=2)
    assert results["ranks in step"] == "fail"
    assert "5, 2" in seen["ranks in step"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("step", "result"), [("x, y = x.cuda(), y.cuda()", "ok"), ("pass", "fail")]
)
def test_a_batch_on_the_gpu_and_one_left_on_the_cpu(gpus, tmp_path, quick, step, result):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    results, seen = planted(tmp_path, quick, setup="net.cuda()", step=step, **visible)
    assert (results["architecture"], results["script"], results["devices"]) == (
        "ok",
        result,
        result,
    ), seen
    assert step != "pass" or "cuda:0" in seen["devices"]


@pytest.mark.gpu(n=2)
def test_nccl_between_two_gpus(gpus, tmp_path):
    results, _ = doctor(tmp_path, CUDA_VISIBLE_DEVICES=gpus["CUDA_VISIBLE_DEVICES"])
    assert results["nccl all-reduce"] == "ok"
