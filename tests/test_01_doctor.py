"""01_devices/doctor.py finds each planted fault by name, and is silent where all is well."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from support.chapter import load
from support.harness import ROOT, clean_env, run

from old import nvml

checks_gpu, checks_job = load("01_devices/_doctor_gpu.py"), load("01_devices/_doctor_job.py")
checks_machine, checks_script = load("01_devices/_doctor_machine.py"), load("01_devices/_doctor_script.py")

JOB = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
# true faults of the machine that tests, if it has any
HOST = {"shared memory", "pinned memory", "open files", "disk", "compile cache"}
PLAIN = """
import os, threading, time
import torch
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


def results(checks) -> dict[str, str]:
    return {name: result for name, result, _, _ in checks}


def seen(checks) -> dict[str, str]:
    return {name: text for name, _, text, _ in checks}


def planted(tmp_path, monkeypatch, before="", setup="", step="pass", nproc=1, steps=5, seconds=600.0):
    """The checks of a script with these lines in it; nothing of it may be left running."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "script.py"
    script.write_text(PLAIN.format(before=before, setup=setup, step=step))
    checks = checks_script.checks(checks_script.watch(script, [], nproc, steps, seconds))
    left = [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]
    assert not left
    return checks


def test_a_healthy_run_is_silent(tmp_path):
    """The whole command, on a script that leaves through os._exit before the last step that is watched."""
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny |= {"model_type": "llama", "vocab_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "tiny.json").write_text(json.dumps(tiny))
    flags = ["--model", "tiny.json", "--seq-len", 32, "--global-batch-size", 4, "--device", "cpu", "--steps", 4]
    result = run(
        "01_devices/doctor.py", tmp_path, "--script", ROOT / "04_amp/train.py", "--json", "d.json", "--", *flags
    )
    summary = json.loads((tmp_path / "d.json").read_text())
    found = {check["check"]: check for check in summary["checks"]}
    failed = {name for name, check in found.items() if check["result"] == "fail"}
    assert failed <= HOST, result.out
    assert result.code == min(1, summary["failures"]) == min(1, len(failed))
    script = ("script", "devices", "dtypes", "float64", "NaN, overflow", "memory", "gloo all-reduce")
    assert {name: found[name]["result"] for name in script} == dict.fromkeys(script, "ok")
    assert found["script"]["seen"] == "4 steps"
    assert all(check["fix"] for check in found.values() if check["result"] in ("warn", "fail"))
    assert summary["script"] == "01_devices/doctor.py"


def test_failures_are_the_exit_code_and_wrong_flags_are_one_line(tmp_path):
    result = run("01_devices/doctor.py", tmp_path, "--script", "none.py")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "--script none.py is not a file" in result.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"LOCAL_RANK": None, "MASTER_ADDR": None}, "without LOCAL_RANK, MASTER_ADDR"),
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"RANK": "first"}, "RANK='first'"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 above RANK=0"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "LOCAL_RANK=1 with 1 GPU(s)"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "no-such-host.invalid does not resolve"),
    ],
)
def test_bad_rendezvous_variables(change, words):
    environ = {name: value for name, value in {**JOB, **change}.items() if value is not None}
    _, result, text, fix = checks_job.rendezvous(environ, gpus=1)
    assert (result, words in text, bool(fix)) == ("fail", True, True), text


def test_good_rendezvous_variables():
    assert checks_job.rendezvous(JOB, gpus=0)[1] == "ok"
    assert checks_job.rendezvous({}, gpus=0)[1] == "ok"


def test_port_taken_and_by_whom():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        _, result, text, _ = checks_job.master_port({"MASTER_PORT": port})
        assert result == "fail"
        assert f"{port} is in use by pid {os.getpid()} of {psutil.Process().username()}" in text
        assert checks_job.master_port({**JOB, "MASTER_PORT": port, "RANK": "1"})[1] == "skip"
    assert checks_job.master_port({"MASTER_PORT": port})[1] == "ok"


def test_limits_of_memory_and_files(tmp_path):
    assert checks_machine.shared_memory(tmp_path, least=2**60)[1] == "fail"
    assert checks_machine.shared_memory(tmp_path, least=0, enough=2**60)[1] == "warn"
    assert checks_machine.shared_memory(tmp_path, least=0, enough=0)[1] == "ok"
    assert checks_machine.shared_memory(tmp_path / "none")[1] == "skip"
    assert [checks_machine.open_files(limit)[1] for limit in (100, 1024, 65536, -1)] == ["fail", "warn", "ok", "ok"]
    assert checks_machine.locked_memory(65536, tmp_path / "none")[1] == "ok"
    (tmp_path / "uverbs0").touch()
    assert checks_machine.locked_memory(65536, tmp_path)[1] == "warn"
    assert checks_machine.locked_memory(-1, tmp_path)[1] == "ok"


def test_disk(tmp_path):
    assert checks_machine.disk(tmp_path / "not" / "yet", least=0, enough=0, slow=0)[1] == "ok"
    assert checks_machine.disk(tmp_path, least=2**60)[1] == "fail"
    assert checks_machine.disk(tmp_path, least=0, enough=2**60)[1] == "warn"
    assert checks_machine.disk(Path("/proc/no-files-here"))[1] == "fail"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("write", "read", "result"), [(9e7, 9e7, "ok"), (4e7, 9e7, "warn"), (9e7, 4e7, "warn")])
def test_a_slow_disk(tmp_path, monkeypatch, write, read, result):
    monkeypatch.setattr(checks_machine, "rates", lambda folder: (write, read))
    _, found, text, fix = checks_machine.disk(tmp_path, least=0, enough=0)
    assert (found, bool(fix)) == (result, result == "warn")
    assert f"writes {write / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s" in text


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_what_is_read_back_was_dropped_from_the_cache(tmp_path, monkeypatch):
    """Not before it is on the disk: what is not yet written stays in the cache."""
    done = []
    for name in ("fsync", "posix_fadvise"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: done.append((name, *args[1:])) or real(*args))
    assert min(checks_machine.rates(tmp_path)) > 0
    assert done == [("fsync",), ("posix_fadvise", 0, 0, os.POSIX_FADV_DONTNEED)]


def test_threads_against_cores(tmp_path):
    assert checks_job.threads({"OMP_NUM_THREADS": "16"}, cores=8, processes=1, gpus=0)[1::2] == (
        "warn",
        "OMP_NUM_THREADS=8",
    )
    assert checks_job.threads({"OMP_NUM_THREADS": "4"}, cores=8, processes=4, gpus=4)[1::2] == (
        "warn",
        "OMP_NUM_THREADS=2",
    )
    assert checks_job.threads({"OMP_NUM_THREADS": "1"}, cores=16, processes=2, gpus=0)[1] == "warn"
    assert checks_job.threads({"OMP_NUM_THREADS": "1"}, cores=16, processes=2, gpus=2)[1] == "ok"
    assert checks_job.threads({"OMP_NUM_THREADS": "4"}, cores=8, processes=2, gpus=0)[1] == "ok"
    assert checks_job.threads({"OMP_NUM_THREADS": "all"}, cores=8, processes=2, gpus=0)[1] == "fail"
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert checks_job.usable_cores(quota) == 1  # and not what the machine has
    quota.write_text("max 100000\n")
    assert checks_job.usable_cores(quota) == checks_job.usable_cores(tmp_path / "none") >= 1


def test_nccl_interface():
    def check(wanted):
        return checks_job.nccl({"NCCL_SOCKET_IFNAME": wanted}, ["lo", "eth0", "eth1"], usable=False)

    for wanted, taken in (
        ("eth", "eth0, eth1"),
        ("=eth1", "eth1"),
        ("^lo,docker", "eth0, eth1"),
        ("^=eth0,lo", "eth1"),
    ):
        assert (check(wanted)[1] != "fail", f"takes {taken} of" in check(wanted)[2]) == (True, True), check(wanted)
    assert check("ib")[1] == check("=eth")[1] == check("^eth,lo")[1] == "fail"


def test_other_versions_are_told(tmp_path):
    pins = tmp_path / "requirements.txt"
    pins.write_text(f"torch=={torch.__version__.split('+')[0]}\npsutil==0.0.1\nno-such-package==1.0\n")
    _, result, text, _ = checks_machine.packages(pins)
    assert result == "warn"
    assert text == f"psutil {psutil.__version__} (pinned 0.0.1), no-such-package missing (pinned 1.0)"
    pins.write_text(f"torch=={torch.__version__.split('+')[0]}\n")
    assert checks_machine.packages(pins)[1] == "ok"
    project = tmp_path / "pyproject.toml"
    for wanted, result in (("99.0", "fail"), ("3.9", "ok")):
        project.write_text(f'[project]\nrequires-python = ">={wanted}"\n')
        assert checks_machine.python_version(project)[1] == result


def test_a_truncated_library_in_the_cache_of_compiled_code_is_named(tmp_path):
    whole = next(Path(torch.__file__).parent.glob("_C.*.so")).read_bytes()
    for file, content in (("whole.so", whole), ("cut.so", whole[: len(whole) // 2]), ("empty.so", b"")):
        (tmp_path / file).write_bytes(content)
    result = run("01_devices/doctor.py", tmp_path, "--json", "d.json", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert result.code == 1
    found = {check["check"]: check for check in json.loads((tmp_path / "d.json").read_text())["checks"]}
    cut = [str(tmp_path / name) for name in ("cut.so", "empty.so")]
    assert found["compile cache"]["seen"] == f"truncated: {', '.join(cut)}"
    assert found["compile cache"]["fix"] == f"rm {' '.join(cut)}"


def test_peer_access(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != (1, 0))
    assert checks_gpu.peer_access(2)[1:3] == ("warn", "none for 1->0")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    assert checks_gpu.peer_access(3)[1:3] == ("ok", "all 6 ordered pairs of 3 GPUs")
    assert checks_gpu.peer_access(1)[1] == "skip"


BUSY = """
import json, time
def work(place, seconds): time.sleep(seconds)
def fail(place, seconds): json.loads("no json")
def hang(place, seconds): time.sleep(60 if place and seconds else seconds)
"""
NVML_SCENARIOS = """
import json, os, sys
import torch
sys.path[:0] = [{repo!r}, {repo!r} + "/01_devices", {folder!r}]
import _doctor_gpu as checks_gpu
import busy
from old import nvml
torch.version.cuda = "12.8"
healthy = {{}}
faults = {{"NVML_CUDA": "11040", "NVML_THROTTLE": "8", "NVML_PID": "1", "CUDA_VISIBLE_DEVICES": "1"}}
hidden = {{"CUDA_VISIBLE_DEVICES": "-1"}}
silent = {{"NVML_REFUSE": "nvmlSystemGetCudaDriverVersion,nvmlSystemGetCudaDriverVersion_v2,nvmlDeviceGetUUID,"
    "nvmlDeviceGetCurrentClocksEventReasons,nvmlDeviceGetComputeRunningProcesses_v3", "CUDA_VISIBLE_DEVICES": "0,1"}}
for scenario in (healthy, faults, hidden, silent, {{"NVML_BROKEN": "1"}}):
    os.environ.update(scenario)
    gpus, why = nvml.gpus()
    print(json.dumps([check[:3] for check in checks_gpu.checks(gpus, why, os.environ, 0)]))
    for name in scenario:
        del os.environ[name]

os.environ.update(NVML_THROTTLE="4", NVML_THROTTLE_OTHER="8")  # each reason in every other answer
pairs = [(0, 1), (1, 0)]  # torch counts them the other way round
asked, throttle_reasons = [], nvml.throttle_reasons
nvml.throttle_reasons = lambda index: asked.append(index) or throttle_reasons(index)
told = [checks_gpu.under_load(pairs, busy.work, 0.3)]
once = [index for i, index in enumerate(asked) if asked[i - 1 : i] != [index]]
told += [checks_gpu.under_load(pairs, busy.fail, 0.3), checks_gpu.under_load(pairs, busy.hang, 0.1, timeout=5)]
os.environ["NVML_REFUSE"] = "nvmlDeviceGetCurrentClocksEventReasons"
told.append(checks_gpu.under_load(pairs, busy.work, 0.1))
print(json.dumps([[{{index: sorted(reasons) for index, reasons in seen.items()}}, error] for seen, error in told]))
print(json.dumps(once))
"""


def test_gpu_faults_through_the_driver(fake_driver, tmp_path):
    """A torch that says it was built for CUDA 12.8, before a driver of our own."""
    (tmp_path / "busy.py").write_text(BUSY)
    code = NVML_SCENARIOS.format(repo=str(ROOT), folder=str(tmp_path))
    environ = clean_env(LD_LIBRARY_PATH=fake_driver)
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    before = psutil.Process().children()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environ)
    assert done.returncode == 0, done.stderr
    assert psutil.Process().children() == before
    *lines, loaded, order = [json.loads(line) for line in done.stdout.splitlines()]
    healthy, faults, hidden, silent, broken = [{name: (found, text) for name, found, text in line} for line in lines]
    for name in ("driver", "visible GPUs", "clocks", "other processes"):
        assert healthy[name][0] == "ok", healthy
        assert silent[name][0] == ("ok" if name == "visible GPUs" else "skip"), silent
        assert broken[name][0] == "skip", broken
    assert healthy["clocks"] == ("ok", "not throttled, 2 GPU(s), idle: not loaded")
    assert faults["driver"] == ("fail", "driver 580.65.06 runs CUDA 11.4, torch was built for 12.8")
    told = "throttled, GPU 0: hardware slowdown; GPU 1: hardware slowdown (2 GPU(s), idle: not loaded)"
    assert faults["clocks"] == ("warn", told)
    assert faults["visible GPUs"] == ("warn", "CUDA_VISIBLE_DEVICES='1' shows 1 of 2")
    assert faults["other processes"][0] == "warn"
    assert "pid 1 of " in faults["other processes"][1]
    assert hidden["visible GPUs"] == ("fail", "CUDA_VISIBLE_DEVICES='-1' shows 0 of 2")

    while_it_worked, while_it_failed, while_it_hung, refused = loaded
    assert while_it_worked == [{"0": ["hardware slowdown", "power cap"], "1": ["hardware slowdown", "power cap"]}, ""]
    assert order == [1, 0]  # one GPU after the other: none is asked while another is at work
    assert while_it_failed[0] == {}
    assert while_it_failed[1].startswith("GPU 1: JSONDecodeError: Expecting value")
    assert [*while_it_hung[0]] == ["1", "0"]
    assert while_it_hung[1] == "GPU 0: no answer in 5 s"
    assert refused == [{}, ""]


def gpu(index: int, *reasons: str) -> dict:
    return {"index": index, "throttle_reasons": [*reasons]}


def test_clocks_under_load():
    two, clocks = [gpu(0), gpu(1)], checks_gpu.clocks
    assert clocks(two, {0: set(), 1: set()})[1:3] == ("ok", "not throttled, 2 of 2 GPU(s) under load")
    found = clocks(two, {0: {"power cap"}, 1: set()})  # what full load does to most cards
    assert found[1:3] == ("ok", "not throttled, 2 of 2 GPU(s) under load; at its power cap: GPU 0")
    assert clocks([gpu(0, "power cap")], {})[1] == "warn"  # but nothing runs: the cap is too low, or somebody is there
    for reason in ("hardware slowdown", "thermal, software", "thermal, hardware", "power brake"):
        found = clocks(two, {0: set(), 1: {"power cap", reason}})
        assert found[1:3] == ("warn", f"throttled, GPU 1: {reason} (2 of 2 GPU(s) under load)")
        assert found[3]
    hidden = clocks([gpu(0, "power brake"), gpu(1)], {1: set()})  # CUDA_VISIBLE_DEVICES=1
    assert hidden[1:3] == ("warn", "throttled, GPU 0: power brake (1 of 2 GPU(s) under load)")
    assert clocks(two, {}, "OutOfMemoryError: CUDA out of memory")[1] == "fail"
    refuses = [{"index": 0, "throttle_reasons": None}]
    assert (clocks(refuses, {})[1], clocks([], {})[1]) == ("skip", "skip")


@pytest.mark.parametrize(
    ("capability", "built_for", "result"),
    [
        ((9, 0), "sm_80 sm_90", "ok"),
        ((8, 9), "sm_80 sm_90", "ok"),  # an older minor of the same major
        ((8, 0), "sm_86 sm_90", "fail"),  # a newer one
        ((9, 0), "sm_80 sm_86", "fail"),  # another major
        ((12, 1), "sm_90 sm_120", "ok"),  # major 12, not 1
        ((9, 0), "sm_80 compute_80", "warn"),
        ((7, 5), "sm_80 compute_80", "fail"),
        ((9, 0), "sm_90a", "ok"),
        ((12, 1), "sm_120a compute_120a", "fail"),  # for that GPU and no other
        ((9, 0), "gfx90a", "skip"),
    ],
)
def test_architecture(capability, built_for, result):
    _, found, text, fix = checks_gpu.architecture([capability], built_for.split())
    assert (found, bool(fix)) == (result, result in ("warn", "fail")), text
    assert checks_gpu.architecture([], built_for.split())[1] == "skip"
    if result != "skip":  # one GPU that is known does not excuse another
        assert checks_gpu.architecture([(5, 0), capability], [*built_for.split(), "sm_50"])[1] == result


def test_cudnn():
    def differs():
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 20, 0). More words.")

    assert checks_gpu.cudnn(1, lambda: 92000)[1:3] == ("ok", "version 92000")
    assert checks_gpu.cudnn(1, lambda: None)[1] == "warn"
    told = "cuDNN version incompatibility: PyTorch was compiled against (9, 20, 0)"
    assert checks_gpu.cudnn(1, differs)[1:3] == ("fail", told)
    assert checks_gpu.cudnn(0, differs)[1] == "skip"


@pytest.mark.gpu
def test_a_gpu_under_load(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus["CUDA_VISIBLE_DEVICES"])
    [index] = [g["index"] for g in nvml.gpus()[0] if g["uuid"] == gpus["CUDA_VISIBLE_DEVICES"]]
    seen, error = checks_gpu.under_load([(0, index)], checks_gpu.load, 1.0)
    assert (error, {*seen} <= {index}) == ("", True)
    assert checks_gpu.under_load([(1, index)], checks_gpu.load, 1.0)[1]  # there is only one: the error is told


def test_a_card_whose_driver_does_not_answer(tmp_path):
    assert checks_gpu.nvidia_cards(tmp_path) == 0
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x020000"), ("c", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert checks_gpu.nvidia_cards(tmp_path) == 1
    assert checks_gpu.driver([], "12.8", "version mismatch")[1] == "fail"
    assert checks_gpu.driver([], "12.8", None)[1] == "skip"
    assert checks_gpu.driver([{"index": 3, "cuda": None, "refused": {"handle": "lost"}}], "12.8")[1] == "fail"


def test_nccl_takes_infiniband_first():
    assert checks_job._first_choice(["lo", "docker0", "eth0", "ib0"]) == "ib0"
    assert checks_job._first_choice(["lo", "docker0", "enp1s0"]) == "enp1s0"
    assert checks_job._first_choice(["lo", "docker0", "dummy0"]) == "dummy0"
    assert checks_job._first_choice(["lo", "docker0"]) == "docker0"
    assert checks_job._first_choice(["lo"]) == "lo"


def test_cpu_build_beside_a_gpu():
    assert checks_gpu.torch_build([{}], None, False)[1] == "fail"
    assert checks_gpu.torch_build([{}], "12.8", False)[1] == "fail"
    assert checks_gpu.torch_build([{}], "12.8", True)[1] == "ok"
    assert checks_gpu.torch_build([], None, False)[1] == "ok"


def test_a_hanging_collective_becomes_an_answer():
    # rank 1 gives up after rank 0 has: its end would break rank 0's connection, which is an error and no hang
    later = "faulthandler.dump_traceback_later(seconds + 3, exit=True)"
    skipped_by_rank_1 = f"import signal; rank or dist.all_reduce(numbers); {later}; signal.pause()"
    code = checks_job.ALL_REDUCE.replace("dist.all_reduce(numbers)", skipped_by_rank_1)
    before = psutil.Process().children()
    _, result, text, fix = checks_job.collective("gloo", 0, seconds=6, code=code)
    assert result == "fail", text
    assert "no answer in 6 s" in text
    assert "rank 0 in all_reduce" in text
    assert fix
    assert psutil.Process().children() == before


def test_a_collective_that_fails_says_why():
    code = "import sys; sys.exit(f'[rank{sys.argv[3]}]: ValueError: no route')"  # torch puts the rank before each line
    told = "rank 0: ValueError: no route; rank 1: ValueError: no route"
    assert checks_job.collective("gloo", 0, code=code)[1:3] == ("fail", told)
    assert checks_job.collective("nccl", 1)[1] == "skip"


def test_a_nan_and_a_hang(tmp_path, monkeypatch):
    step = "if step == 2: net.boom.forward = lambda x: x * float('nan')\n    if step == 4: threading.Event().wait()"
    checks = planted(tmp_path, monkeypatch, step=step, seconds=12)
    assert {name for name, result in results(checks).items() if result == "fail"} == {"script", "NaN, overflow"}
    where = "in the output of Boom 'boom' at step 2; its input and parameters were finite"
    assert seen(checks)["NaN, overflow"] == f"NaN {where}"
    assert "hangs in step 4: rank 0 in wait, from script.py:" in seen(checks)["script"]


def test_meta_parameters(tmp_path, monkeypatch):
    checks = planted(tmp_path, monkeypatch, setup="net.last.to('meta')")
    assert results(checks)["devices"] == results(checks)["script"] == "fail"
    assert seen(checks)["devices"] == "parameter last.weight is on meta: a shape without memory"
    assert "script.py:" in seen(checks)["script"]


def test_a_float64_batch(tmp_path, monkeypatch):
    checks = planted(tmp_path, monkeypatch, step="x = x.double()")
    assert results(checks)["dtypes"] == results(checks)["script"] == "fail"
    assert "Linear 'first': parameters float32 on cpu, input float64 on cpu script.py:" in seen(checks)["dtypes"]
    assert results(checks)["float64"] == "warn"
    assert seen(checks)["float64"] == "input of Sequential ''"


def test_ranks_that_do_the_same_apart(tmp_path, monkeypatch):
    """No DDP, one order of batches for all, slow data, float64 targets: four faults of one script that runs through."""
    before = (
        "class Slow(TensorDataset):\n    def __getitem__(self, i): time.sleep(0.02); return super().__getitem__(i)\n"
    )
    setup = "torch.manual_seed(rank); [p.data.normal_() for p in net.parameters()]\n"
    setup += "torch.manual_seed(0); data = Slow(torch.randn(64, 4), torch.randn(64, 1).double())"
    checks = planted(tmp_path, monkeypatch, before, setup, nproc=2)
    found = results(checks)
    assert (found["script"], found["ranks in step"] != "fail") == ("ok", True), checks
    assert (found["ranks' batches"], found["ranks' weights"]) == ("fail", "fail")
    assert (found["data wait"], found["float64"]) == ("warn", "warn")
    assert seen(checks)["float64"] == "the loss"
    assert seen(checks)["ranks' weights"] == "4 of 4 parameters differ between ranks: first.weight, ..."


def test_an_idle_rank(tmp_path, monkeypatch):
    checks = planted(tmp_path, monkeypatch, step="if rank == 1 and step == 3: break", nproc=2)
    assert results(checks)["ranks in step"] == "fail"
    assert seen(checks)["ranks in step"] == "5, 2 steps"
    assert results(checks)["ranks' weights"] == "skip"


def facts(**changes) -> dict:
    known = {"steps": 5, "devices": ["cuda:0"], "gpus": ["GPU-a"], "gpus_visible": 4, "peak_memory_bytes": 2**30}
    return {**known, **changes}


def watched(*ranks, **changes):
    blank = checks_script.Watched([*ranks], [""] * len(ranks), 0, "", "", [0.9, 0.0, 0.0, 0.0])
    return blank._replace(**changes)


def test_one_of_four_gpus_is_busy():
    assert checks_script.busy_gpus(watched(facts()))[1:3] == ("warn", "1 of 4; mean utilisation 90%, 0%, 0%, 0%")
    ranks = [facts(gpus=[gpu]) for gpu in ("GPU-a", "GPU-b", "GPU-c", "GPU-d")]
    assert checks_script.busy_gpus(watched(*ranks))[1] == "ok"
    assert checks_script.busy_gpus(watched(facts(gpus=[]), facts(gpus=[])))[1] == "warn"  # the model stayed on the CPU
    assert checks_script.busy_gpus(watched(facts(gpus=[], gpus_visible=0)))[1] == "skip"


def test_out_of_memory_is_named():
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert checks_script.memory(watched(facts(), code=1, error=error))[1] == "fail"
    assert checks_script.memory(watched(facts()))[1] == "ok"


@pytest.mark.gpu
def test_a_batch_left_on_the_cpu(gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus["CUDA_VISIBLE_DEVICES"])
    checks = planted(tmp_path, monkeypatch, setup="net.cuda()")
    assert results(checks)["devices"] == "fail"
    assert "Linear 'first': parameters float32 on cuda:0, input float32 on cpu script.py:" in seen(checks)["devices"]


@pytest.mark.gpu
def test_a_healthy_gpu_run_is_silent(gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus["CUDA_VISIBLE_DEVICES"])
    checks = planted(tmp_path, monkeypatch, setup="net.cuda()", step="x, y = x.cuda(), y.cuda()")
    assert not [check for check in checks if check[1] == "fail"]
    assert results(checks)["GPUs in use"] == "ok"
    assert seen(checks)["devices"] == "cuda:0"


@pytest.mark.gpu(n=2)
def test_nccl_between_two_gpus(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus["CUDA_VISIBLE_DEVICES"])
    assert checks_job.collective("nccl", 2)[1] == "ok"
