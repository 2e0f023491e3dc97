"""01_devices/doctor.py finds each planted fault by name, and is silent where all is well."""

import json
import re
import socket
from pathlib import Path

import psutil
import pytest
from support.commands import check
from support.harness import (
    ROOT,
    assert_refused,
    run,
    with_fault,
    with_prelude,
    write_tiny,
)

SCRIPT = "01_devices/doctor.py"
# true faults of the machine that tests, if it has any
HOST = {"shared memory", "disk", "port"}
PLAIN = """
import os, threading, torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
rank = int(os.environ.get("RANK", 0))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
{setup}
for step in range(1, 4):
    x = torch.randn(8, 4)
    y = torch.randn(8, 1)
    {step}
    optimizer.zero_grad()
    mse_loss(net(x), y).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The script without the two processes that add up numbers: a healthy run has them."""
    folder = tmp_path_factory.mktemp("quick")
    (folder / "requirements.txt").symlink_to(ROOT / "requirements.txt")
    return with_fault(SCRIPT, folder, 'processes = {"gloo": 2}', "processes = {}")


def doctor(
    folder: Path, *flags, script: str | Path = SCRIPT, **env: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the result and what was seen of each check. A fault has a fix, a failure code 1."""
    result = run(script, folder, "--json", "d.json", *flags, **env)
    assert (folder / "d.json").exists(), result.out + result.err
    summary = json.loads((folder / "d.json").read_text(encoding="utf-8"))
    checks = summary["checks"]
    failures = sum(check["result"] == "fail" for check in checks)
    assert (result.code, summary["failures"]) == (min(1, failures), failures), (
        result.out + result.err
    )
    assert all(check["fix"] for check in checks if check["result"] in ("warn", "fail"))
    return {c["check"]: c["result"] for c in checks}, {c["check"]: c["seen"] for c in checks}


def planted(folder: Path, quick: Path, setup="pass", step="pass", nproc=1, timeout=600, **env: str):
    """Run the doctor on a script with these lines in it. Nothing of it may be left running."""
    script = folder / "script.py"
    script.write_text(PLAIN.format(setup=setup, step=step), encoding="utf-8")
    flags = ["--script", script, "--nproc", nproc, "--timeout", timeout]
    found = doctor(folder, *flags, script=quick, **env)
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])
    ]
    return found


def failed(results: dict[str, str]) -> set[str]:
    return {name for name, result in results.items() if result == "fail"} - HOST - {"host name"}


def test_a_healthy_run_is_silent(tmp_path):
    """The whole command, on a training script of this repository."""
    write_tiny(tmp_path)
    flags = "--model tiny.json --seq-len 32 --global-batch-size 4 --device cpu --steps 4"
    script = ROOT / "04_amp/train.py"
    results, seen = doctor(tmp_path, "--script", script, "--", *flags.split())
    assert failed(results) == set(), seen
    assert (results["script"], results["gloo all-reduce"]) == ("ok", "ok")


def test_a_wrong_flag_is_one_line(tmp_path):
    for flags in (["--script", "none.py"], ["--nproc", "0"], ["--json", "none/d.json"]):
        assert_refused(run(SCRIPT, tmp_path, *flags), *flags)


def test_faults_of_a_machine_and_of_a_job(tmp_path, quick):
    """Variables half set, a port in use, no disk; then a rank that is none."""
    prelude = (
        "import shutil, types\n"
        "shutil.disk_usage = lambda path: types.SimpleNamespace(free=64 * 2**20)"
    )
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
    """A driver that fits a torch for CUDA 12.8, one that does not tell, and one that is too old."""
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


# A torch that can use the first two GPUs. No GPU is there to multiply on, or to start ranks on.
TWO_GPUS = """
import torch
import _doctor
_doctor.run_command = lambda argv, seconds, **extra: (1, "no GPU is there")
torch.version.cuda = "12.8"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_arch_list = lambda: ["sm_90"]
"""


def test_gpus_of_other_jobs_are_no_faults(fake_driver, tmp_path, quick):
    """A batch system gives a job 2 of 8 GPUs: the driver counts 8, and refuses to describe 6."""
    script = with_prelude(str(quick), tmp_path, TWO_GPUS)
    env = {"LD_LIBRARY_PATH": fake_driver, "NVML_GPUS": "8", "NVML_OWN": "2"}
    results, seen = doctor(tmp_path, script=script, **env)
    assert (results["driver"], results["visible GPUs"]) == ("ok", "ok"), seen
    assert "6 of 8" in seen["driver"]
    assert "CUDA_VISIBLE_DEVICES" not in seen["visible GPUs"]
    # a job without any of them
    results, seen = doctor(tmp_path, script=quick, **env | {"NVML_OWN": "0"})
    assert results["driver"] == "skip"
    assert failed(results) == set()
    # a GPU that is lost is a fault, whoever has the others
    results, seen = doctor(tmp_path, script=script, **env | {"NVML_LOST": "1"})
    assert results["driver"] == "fail"
    assert "GPU 1" in seen["driver"]


def test_a_name_without_an_address_is_named(tmp_path, quick):
    prelude = "import socket\nsocket.gethostname = lambda: 'no-such-host.invalid'"
    results, seen = doctor(tmp_path, script=with_prelude(str(quick), tmp_path, prelude))
    assert results["host name"] == "fail"
    assert "no-such-host.invalid" in seen["host name"]


def test_settings_that_slow_a_job_are_named(tmp_path, quick):
    results, seen = doctor(tmp_path, script=quick, NCCL_P2P_DISABLE="1", CUDA_LAUNCH_BLOCKING="0")
    assert results["environment variables"] == "warn"
    assert "NCCL_P2P_DISABLE" in seen["environment variables"]
    assert "CUDA_LAUNCH_BLOCKING" not in seen["environment variables"]


def test_a_gpu_whose_clocks_are_held_down(fake_driver, tmp_path, quick):
    driver = {"LD_LIBRARY_PATH": fake_driver}
    assert doctor(tmp_path, script=quick, **driver)[0]["GPU clocks"] == "ok"
    results, seen = doctor(tmp_path, script=quick, NVML_THROTTLE="5", **driver)
    assert results["GPU clocks"] == "warn"
    assert "power cap" in seen["GPU clocks"]


def line_of(folder: Path, code: str) -> str:
    """Return file:line of the line of the script that holds this code."""
    lines = (folder / "script.py").read_text(encoding="utf-8").splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if code in line]
    return f"script.py:{number}"


@pytest.mark.full  # it waits until --timeout
def test_a_rank_that_hangs(tmp_path, quick):
    """Rank 1 waits for ever, and rank 0 waits for rank 1: both places are named."""
    wait = "threading.Event().wait()"
    setup = f"if rank == 1: {wait}\nif rank == 0: dist.barrier()"
    results, seen = planted(tmp_path, quick, setup=setup, nproc=2, timeout=30)
    assert failed(results) == {"script"}
    assert f"rank 0 at {line_of(tmp_path, 'dist.barrier()')}" in seen["script"]
    assert f"rank 1 at {line_of(tmp_path, wait)}" in seen["script"]


@pytest.mark.full
def test_a_batch_of_another_dtype(tmp_path, quick):
    results, seen = planted(tmp_path, quick, step="x = x.double()")
    assert failed(results) == {"script"}
    assert "RuntimeError" in seen["script"]
    assert line_of(tmp_path, "mse_loss(net") in seen["script"]


@pytest.mark.full
def test_the_first_rank_that_fails_is_named(tmp_path, quick):
    step = "dist.barrier() if rank == 0 else print(1 / 0)"
    results, seen = planted(tmp_path, quick, step=step, nproc=2)
    assert failed(results) == {"script"}
    assert "ZeroDivisionError" in seen["script"]
    assert line_of(tmp_path, "1 / 0") in seen["script"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("step", "result"), [("x, y = x.cuda(), y.cuda()", "ok"), ("pass", "fail")]
)
def test_a_batch_on_the_gpu_and_one_left_on_the_cpu(gpus, tmp_path, quick, step, result):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    results, seen = planted(tmp_path, quick, setup="net.cuda()", step=step, **visible)
    assert (results["architecture"], results["script"]) == ("ok", result), seen
    assert result == "ok" or "device" in seen["script"]


# torch sees three GPUs, and processes that doctor.py would start are only noted.
THREE_GPUS = """
import json, torch
import _doctor
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 3

def note(argv, seconds, **extra):
    with open("started.txt", "a", encoding="utf-8") as file:
        print(json.dumps([*map(str, argv)]), file=file)
    return 0, ""

_doctor.run_command = note
"""
# The process of one GPU, on a machine without any: what it asks of torch is noted, in order.
ON_EACH_GPU = """
import os, torch, torch.distributed as dist
os.environ.update(RANK="2", WORLD_SIZE="3", LOCAL_RANK="2")
on_cpu = torch.full
torch.full = lambda size, value, device: print("numbers", device) or on_cpu(size, value)
torch.cuda.set_device = lambda device: print("set_device", device)
dist.init_process_group = lambda backend, *, timeout, device_id: print("init", device_id)
dist.all_reduce = lambda numbers: numbers.fill_(6)
dist.barrier = lambda: print("barrier", flush=True)
"""


def test_the_small_job_uses_each_gpu_and_leaves_the_network_to_another(tmp_path):
    script = with_prelude(SCRIPT, tmp_path, THREE_GPUS)
    result = run(script, tmp_path)
    started = (tmp_path / "started.txt").read_text(encoding="utf-8").splitlines()
    [argv] = [json.loads(line) for line in started if line.endswith('"nccl"]')]
    assert "--nproc_per_node=3" in argv
    program = argv[-2]

    # Its device is set before the process group is made, which gets it, too.
    (tmp_path / "rank.py").write_text(ON_EACH_GPU + program, encoding="utf-8")
    rank = run(tmp_path / "rank.py", tmp_path / "rank", "nccl", warm=False)
    calls = ["set_device cuda:2", "init cuda:2", "numbers cuda:2", "barrier"]
    assert rank.out.splitlines() == calls, rank

    # It says what it does not test, with a command that torchrun takes.
    told = result.out.split("not tested: ")[1]
    assert "network between nodes" in told
    check(re.search(r"torchrun .*", told.replace("\\\n", " "))[0])


@pytest.mark.gpu(n=2)
def test_nccl_between_two_gpus(gpus, tmp_path):
    results, seen = doctor(tmp_path, CUDA_VISIBLE_DEVICES=gpus["CUDA_VISIBLE_DEVICES"])
    assert results["nccl all-reduce"] == "ok"
    assert seen["nccl all-reduce"].startswith("2 ")
