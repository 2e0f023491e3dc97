"""01_devices/doctor.py finds each planted fault by name, and is silent where all is well."""

import json
import os
import socket
from pathlib import Path

import psutil
import pytest
import torch
from support.harness import ROOT, run, with_fault, with_prelude, write_tiny

SCRIPT = "01_devices/doctor.py"
# true faults of the machine that tests, if it has any
HOST = {"shared memory", "open files", "disk", "compile cache", "port"}
PLAIN = """
import os, threading, time, torch
from collections import OrderedDict
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
rank = int(os.environ.get("RANK", 0))
class Boom(nn.Module):
    def forward(self, x): return x
{before}
net = nn.Sequential(OrderedDict(first=nn.Linear(4, 8), boom=Boom(), last=nn.Linear(8, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
{setup}
for step, (x, y) in enumerate(DataLoader(data, 8), 1):
    {step}
    optimizer.zero_grad()
    mse_loss(net(x), y).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The script without the two processes that add up numbers, which have a test of their own."""
    return copy(tmp_path_factory.mktemp("quick"), '("gloo", "nccl") if gpus > 1 else ("gloo",)', "()")


def copy(folder: Path, line: str, wrong: str) -> Path:
    file = with_fault(SCRIPT, folder, line, wrong)
    (folder / "requirements.txt").symlink_to(ROOT / "requirements.txt")
    return file


def doctor(folder: Path, *flags, script: str | Path = SCRIPT, **env: str) -> tuple[dict[str, str], dict[str, str]]:
    """By check: its result, and what was seen. Each fault has a fix, and the exit code says whether one failed."""
    result = run(script, folder, "--json", "d.json", *flags, **env)
    summary = json.loads((folder / "d.json").read_text())
    checks = summary["checks"]
    failures = sum(check["result"] == "fail" for check in checks)
    assert (result.code, summary["failures"]) == (min(1, failures), failures), result.out + result.err
    assert all(check["fix"] for check in checks if check["result"] in ("warn", "fail"))
    return {c["check"]: c["result"] for c in checks}, {c["check"]: c["seen"] for c in checks}


def planted(folder: Path, quick: Path, before="", setup="", step="pass", nproc=1, timeout=600, **env: str):
    """What is said of a script with these lines in it; nothing of it may be left running."""
    script = folder / "script.py"
    script.write_text(PLAIN.format(before=before, setup=setup, step=step))
    flags = ["--script", script, "--nproc", nproc, "--steps", 5, "--timeout", timeout]
    found = doctor(folder, *flags, script=quick, **env)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]
    return found


def failed(results: dict[str, str]) -> set[str]:
    return {name for name, result in results.items() if result == "fail"} - HOST


def test_a_healthy_run_is_silent(tmp_path):
    """The whole command, on a script that leaves through os._exit before the last step that is watched."""
    write_tiny(tmp_path)
    flags = ["--model", "tiny.json", "--seq-len", 32, "--global-batch-size", 4, "--device", "cpu", "--steps", 4]
    results, seen = doctor(tmp_path, "--script", ROOT / "04_amp/train.py", "--", *flags)
    assert failed(results) == set(), seen
    for name in ("script", "devices", "dtypes", "float64", "NaN, overflow", "memory", "gloo all-reduce"):
        assert results[name] == "ok"
    assert seen["script"] == "4 steps"
    assert json.loads((tmp_path / "d.json").read_text())["script"] == SCRIPT


def test_a_wrong_flag_is_one_line(tmp_path):
    result = run(SCRIPT, tmp_path, "--script", "none.py")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "--script none.py is not a file" in result.err


def test_faults_of_a_machine_and_of_a_job(tmp_path):
    """Variables half set, more threads than cores, no such interface, a port in use, a truncated library, no disk."""
    library = next(Path(torch.__file__).parent.glob("_C.*.so")).read_bytes()
    cache = tmp_path / "cache"
    cache.mkdir()
    for name, content in (("whole.so", library), ("cut.so", library[: len(library) // 2]), ("empty.so", b"")):
        (cache / name).write_bytes(content)
    prelude = "import resource, shutil, types\nresource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
    prelude += "shutil.disk_usage = lambda path: types.SimpleNamespace(free=64 * 2**20)"
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "4096"}
        env |= {"NCCL_SOCKET_IFNAME": "none-such", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        results, seen = doctor(tmp_path, script=with_prelude(SCRIPT, tmp_path, prelude), **env)
    for name in ("environment variables", "NCCL interface", "port", "compile cache", "shared memory", "open files"):
        assert results[name] == "fail", name
    assert (results["threads"], results["disk"]) == ("warn", "fail")
    assert seen["environment variables"] == "half set: without LOCAL_RANK, MASTER_ADDR"
    assert seen["port"] == f"{port}: pid {os.getpid()}"
    assert seen["compile cache"].endswith(f"truncated libraries: {cache}/cut.so, {cache}/empty.so")


def test_a_hanging_collective_becomes_an_answer(tmp_path):
    file = copy(tmp_path, "dist.all_reduce(numbers)", "rank or dist.all_reduce(numbers)")
    stay = "rank and __import__('signal').pause()\nassert"  # its end would be an error of rank 0's, and no hang
    file.write_text(file.read_text().replace("seconds=60", "seconds=4").replace("assert", stay, 1))
    results, seen = doctor(tmp_path, script=file)
    assert results["gloo all-reduce"] == "fail"
    assert "rank 0: " in seen["gloo all-reduce"]
    assert "imed out" in seen["gloo all-reduce"]


def gpu_doctor(folder: Path, driver: str, script: str | Path, prelude: str = "", **env: str):
    """On a torch that says it was built for CUDA 12.8."""
    folder.mkdir(exist_ok=True)
    prelude = f"import torch\ntorch.version.cuda = '12.8'\n{prelude}"
    return doctor(folder, script=with_prelude(str(script), folder, prelude), LD_LIBRARY_PATH=driver, **env)


def test_gpus_that_only_the_driver_sees(fake_driver, tmp_path, quick):
    healthy, seen = gpu_doctor(tmp_path / "a", fake_driver, quick)
    assert {healthy[name] for name in ("driver", "other processes", "clocks")} == {"ok"}
    assert {healthy[name] for name in ("torch build", "visible GPUs")} == {"fail"}
    assert seen["clocks"] == "throttled: none (0 of 2 GPUs under load)"
    refuse = "nvmlSystemGetCudaDriverVersion,nvmlSystemGetCudaDriverVersion_v2,nvmlDeviceGetCurrentClocksEventReasons"
    refuse += ",nvmlDeviceGetComputeRunningProcesses_v3"
    silent, _ = gpu_doctor(tmp_path / "b", fake_driver, quick, NVML_REFUSE=refuse)
    assert {silent[name] for name in ("driver", "other processes", "clocks")} == {"skip"}
    faults, seen = gpu_doctor(tmp_path / "c", fake_driver, quick, NVML_CUDA="11040", NVML_THROTTLE="8", NVML_PID="1")
    assert faults["driver"] == "fail"
    assert seen["driver"] == "runs CUDA 11.4, torch was built for 12.8"
    assert (faults["clocks"], faults["other processes"]) == ("warn", "warn")
    assert "GPU 0: hardware slowdown; GPU 1: hardware slowdown" in seen["clocks"]
    assert "GPU 0: pid 1 of " in seen["other processes"]


USABLE = """
import types
gpus = [types.SimpleNamespace(uuid=f"0000000{i}", name="H100", major=9, minor=0) for i in (2, 1)]
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
torch.cuda.get_device_properties, torch.cuda.get_arch_list = gpus.__getitem__, lambda: ["sm_90"]
torch.cuda.can_device_access_peer = lambda i, j: (i, j) != (1, 0)
def refuse(): raise RuntimeError("cuDNN version incompatibility: built for (9, 20, 0). More words.")
torch.backends.cudnn.version = refuse
"""


def test_gpus_under_load(fake_driver, tmp_path):
    """Both multiply, in the other order than the driver's, and their clocks are watched meanwhile."""
    line = 'matrix = torch.randn(4096, 4096, device=f"cuda:{sys.argv[1]}", dtype=torch.float16)'
    on_cpu = "matrix = torch.randn(64, 64)\ntorch.cuda.synchronize = lambda device: None"
    file = copy(tmp_path, line, on_cpu)
    env = {"NVML_THROTTLE": "4", "NVML_THROTTLE_OTHER": "8"}  # each reason in every other answer
    results, seen = gpu_doctor(tmp_path / "a", fake_driver, file, USABLE, **env)
    assert (results["driver"], results["architecture"], results["visible GPUs"]) == ("ok", "ok", "ok")
    told = "throttled: GPU 0: hardware slowdown; GPU 1: hardware slowdown (2 of 2 GPUs under load)"
    assert (results["clocks"], seen["clocks"]) == ("warn", told)  # and not the power cap
    assert (results["peer access"], seen["peer access"]) == ("warn", "none for 1->0")
    assert results["cuDNN"] == results["nccl all-reduce"] == "fail"  # this torch has no NCCL
    assert seen["cuDNN"] == "cuDNN version incompatibility: built for (9, 20, 0)"


def test_a_nan_and_a_hang(tmp_path, quick):
    step = "if step == 2: net.boom.forward = lambda x: x * float('nan')\n    if step == 4: threading.Event().wait()"
    results, seen = planted(tmp_path, quick, step=step, timeout=12)
    assert failed(results) == {"script", "NaN, overflow"}
    where = "in the output of Boom 'boom' at step 2; its input and parameters were finite"
    assert seen["NaN, overflow"] == f"NaN {where}"
    assert "hangs in step 4: rank 0 in wait, from script.py:" in seen["script"]


def test_a_float64_batch(tmp_path, quick):
    results, seen = planted(tmp_path, quick, step="x = x.double()")
    assert failed(results) == {"script", "dtypes"}
    assert "Linear 'first': parameters torch.float32 on cpu, input torch.float64 on cpu script.py:" in seen["dtypes"]
    assert (results["float64"], seen["float64"]) == ("warn", "input of Sequential ''")


def test_out_of_memory_and_idle_gpus(tmp_path, quick):
    setup = "torch.cuda.device_count = lambda: 4"
    step = "if step == 3: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    results, seen = planted(tmp_path, quick, setup=setup, step=step)
    assert failed(results) == {"script", "memory"}
    assert "exit code 1 in step 3: torch.OutOfMemoryError" in seen["script"]
    assert (results["GPUs in use"], seen["GPUs in use"]) == ("warn", "0 of 4 visible to torch")


def test_ranks_that_do_the_same_apart(tmp_path, quick):
    """No DDP, one order of batches for all, slow data, float64 targets: four faults of one script that runs through."""
    before = "class Slow(TensorDataset):\n    def __getitem__(self, i): time.sleep(0.02); return super().__getitem__(i)"
    setup = "torch.manual_seed(rank); [p.data.normal_() for p in net.parameters()]\n"
    setup += "torch.manual_seed(0); data = Slow(torch.randn(64, 4), torch.randn(64, 1).double())"
    results, seen = planted(tmp_path, quick, before, setup, nproc=2)
    assert failed(results) == {"ranks' batches", "ranks' weights"}
    assert (results["script"], results["data wait"], results["float64"]) == ("ok", "warn", "warn")
    assert seen["float64"] == "the loss"
    assert seen["ranks' weights"] == "4 of 4 parameters differ between ranks: first.weight"


def test_an_idle_rank(tmp_path, quick):
    results, seen = planted(tmp_path, quick, step="if rank == 1 and step == 3: break", nproc=2)
    assert (results["ranks in step"], seen["ranks in step"]) == ("fail", "5, 2 steps")
    assert results["ranks' weights"] == "skip"


@pytest.mark.gpu
@pytest.mark.parametrize("moved", [True, False])
def test_a_batch_on_the_gpu_and_one_left_on_the_cpu(gpus, tmp_path, quick, moved):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    results, seen = planted(
        tmp_path, setup="net.cuda()", step="x, y = x.cuda(), y.cuda()" if moved else "pass", **visible
    )
    assert results["architecture"] == "ok"
    assert results["devices"] == ("ok" if moved else "fail")
    assert seen["devices"].startswith(
        "cuda:0" if moved else "Linear 'first': parameters torch.float32 on cuda:0, input"
    )
    if moved:
        assert (failed(results), results["GPUs in use"]) == (set(), "ok")


@pytest.mark.gpu(n=2)
def test_nccl_between_two_gpus(gpus, tmp_path):
    results, _ = doctor(tmp_path, CUDA_VISIBLE_DEVICES=gpus["CUDA_VISIBLE_DEVICES"])
    assert results["nccl all-reduce"] == "ok"
