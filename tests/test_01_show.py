"""01_devices/show.py, and what it reads the GPUs with: common/nvml.py."""

import json
import math
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import harness
from support.chapter import load

from old import hardware, model, nvml, shapes
from old.exits import UserError

show, machine = load("01_devices/show.py"), load("01_devices/_show_machine.py")

# what a query needs of the driver: refusing one function must cost these answers and no other
ANSWERS = {
    "nvmlDeviceGetUUID": ["uuid"],
    "nvmlDeviceGetName": ["name"],
    "nvmlDeviceGetPciInfo_v3": ["bus_id"],
    "nvmlSystemGetDriverVersion": ["driver"],
    "nvmlSystemGetCudaDriverVersion": ["cuda"],
    "nvmlDeviceGetCudaComputeCapability": ["compute_capability"],
    "nvmlDeviceGetMemoryInfo": ["memory_total_bytes", "memory_used_bytes"],
    "nvmlDeviceGetUtilizationRates": ["utilization"],
    "nvmlDeviceGetPowerUsage": ["power_watts"],
    "nvmlDeviceGetEnforcedPowerLimit": ["power_limit_watts"],
    "nvmlDeviceGetTemperature": ["temperature_celsius"],
    "nvmlDeviceGetClockInfo": ["sm_clock_mhz", "memory_clock_mhz"],
    "nvmlDeviceGetMaxClockInfo": ["sm_clock_max_mhz"],
    "nvmlDeviceGetCurrentClocksEventReasons": ["throttle_reasons"],
    "nvmlDeviceGetCurrPcieLinkGeneration": ["pcie_generation"],
    "nvmlDeviceGetMaxPcieLinkGeneration": ["pcie_generation_max"],
    "nvmlDeviceGetCurrPcieLinkWidth": ["pcie_width"],
    "nvmlDeviceGetMaxPcieLinkWidth": ["pcie_width_max"],
    "nvmlDeviceGetPcieThroughput": ["pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"],
    "nvmlDeviceGetEccMode": ["ecc"],
    "nvmlDeviceGetMigMode": ["mig"],
    "nvmlDeviceGetNvLinkVersion": ["nvlink_version"],
    "nvmlDeviceGetFieldValues": ["nvlink_tx_bytes", "nvlink_rx_bytes"],
    "nvmlDeviceGetComputeRunningProcesses_v3": ["processes"],
}
# asks the driver once per environment given on the command line: the real pynvml, which loads it once per process
ASK = f"""
import json, os, sys
from types import SimpleNamespace
import torch
sys.path[:0] = [{str(harness.ROOT)!r}, {str(harness.ROOT / "01_devices")!r}]
from _show_machine import topology
from old import nvml
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"{{device + 1:08d}}")
answers = []
for planted in json.loads(sys.argv[1]):
    os.environ.update(planted)
    of_device = [nvml.gpu_of(i) for i in range(3)]
    answers.append(dict(gpus=nvml.gpus(), topology=topology(), of_device=of_device))
    for name in planted:
        del os.environ[name]
print(json.dumps(answers))
"""


def ask(driver: str | None, *planted: dict[str, str]) -> list[dict]:
    """What common/nvml.py answers with these faults planted in the driver library of that folder."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "ask.py")
        script.write_text(ASK)
        result = harness.run(script, Path(folder), json.dumps(planted), LD_LIBRARY_PATH=driver or "")
    assert result.code == 0, result.err
    return json.loads(result.out)


@pytest.fixture(scope="module")
def two_h100(fake_driver) -> list[dict]:
    (gpus, why), topology, _ = ask(fake_driver, {})[0].values()
    assert (why, len(gpus), topology) == (None, 2, [["X", "NV4"], ["NV4", "X"]])
    return gpus


# NVML


def test_numbers_are_in_the_units_of_their_names(two_h100):
    second = two_h100[1]
    assert second["refused"] == {}
    assert [name for name, value in second.items() if value is None] in ([], ["numa_node"])  # the kernel's answer
    assert (second["index"], second["uuid"], second["cuda"]) == (1, "GPU-00000002", "13.0")
    assert (second["memory_total_bytes"], second["memory_used_bytes"]) == (80 * 2**30, 10 * 2**30)
    assert (second["power_watts"], second["power_limit_watts"], second["utilization"]) == (612, 700, 0.97)
    assert (second["sm_clock_mhz"], second["sm_clock_max_mhz"], second["memory_clock_mhz"]) == (1755, 1980, 2619)
    assert (second["pcie_tx_bytes_per_second"], second["pcie_rx_bytes_per_second"]) == (1_000_000, 2_000_000)
    assert (second["ecc"], second["mig"], second["nvlinks"], second["compute_capability"]) == (True, False, 4, "9.0")
    assert second["processes"][0]["memory_bytes"] == 9 * 2**30
    assert second["processes"][0]["user"]  # this very process, as the fake driver has it


def test_one_device_is_found_by_its_uuid_and_no_other_is_asked(fake_driver):
    told, lost, none = ask(fake_driver, {}, {"NVML_LOST": "0"}, {"NVML_BROKEN": "1"})
    without_pid = [{**gpu, "processes": None} for gpu in told["gpus"][0]]
    assert [{**gpu, "processes": None} for gpu in told["of_device"][:2]] == without_pid
    assert told["of_device"][2] == {}  # torch sees a GPU that NVML does not know
    assert lost["of_device"][1]["index"] == 1
    assert none["of_device"] == [{}] * 3


def test_a_lost_gpu_leaves_the_others(fake_driver, two_h100):
    lost, kept = ask(fake_driver, {"NVML_LOST": "0"})[0]["gpus"][0]
    assert {name: value for name, value in lost.items() if value is not None and name != "refused"} == {"index": 0}
    assert lost["refused"].keys() == {"handle"}
    assert kept["name"] == two_h100[1]["name"]
    assert kept["refused"] == {}


def test_a_refused_query_costs_its_own_answer_only(fake_driver, two_h100):
    told = {name for name in two_h100[0] if name not in ("index", "refused", "nvlinks", "numa_node")}
    assert told == {name for names in ANSWERS.values() for name in names}  # a new query belongs into ANSWERS
    answers = ask(fake_driver, *({"NVML_REFUSE": function} for function in ANSWERS))
    for (function, lost), answer in zip(ANSWERS.items(), answers, strict=True):
        gpus, why = answer["gpus"]
        assert why is None
        for gpu, whole in zip(gpus, two_h100, strict=True):
            assert [name for name in gpu if gpu[name] is None and name != "numa_node"] == lost, function
            refused = {name: why for name, why in gpu["refused"].items() if name != "numa_node"}
            assert refused == dict.fromkeys(lost, "Not Supported")
            kept = gpu.keys() - {*lost, "refused", "processes", "numa_node"}  # processes: another pid in each
            assert {name: gpu[name] for name in kept} == {name: whole[name] for name in kept}
        if function != "nvmlDeviceGetPciInfo_v3":  # without bus ids nobody knows where a lane ends
            assert answer["topology"] == [["X", "NV4"], ["NV4", "X"]], function


def test_throttle_reasons_leave_idleness_out(fake_driver):
    idle, capped, hot = ask(fake_driver, *({"NVML_THROTTLE": mask} for mask in ("1", "5", "104")))
    assert [answer["gpus"][0][0]["throttle_reasons"] for answer in (idle, capped)] == [[], ["power cap"]]
    assert hot["gpus"][0][0]["throttle_reasons"] == ["hardware slowdown", "thermal, software", "thermal, hardware"]


def test_topology_with_and_without_nvlink(fake_driver):
    levels = {"0": "PIX", "10": "PIX", "20": "PXB", "30": "PHB", "40": "NODE", "50": "SYS", "41": "?"}
    no_links = {"NVML_REFUSE": "nvmlDeviceGetNvLinkState"}
    answers = ask(
        fake_driver,
        {"NVML_SWITCH": "7"},  # every lane ends at a bus id that is no GPU's
        {"NVML_REFUSE": "nvmlDeviceGetNvLinkRemotePciInfo_v2"},
        {"NVML_REFUSE": "nvmlDeviceGetNvLinkState,nvmlDeviceGetTopologyCommonAncestor"},
        {"NVML_GPUS": "1"},
        *({**no_links, "NVML_TOPOLOGY": level} for level in levels),
    )
    found = [answer["topology"] for answer in answers]
    assert [matrix[0][1] for matrix in found[:3]] == ["NV4", "NODE", "?"]
    assert found[3] == [["X"]]
    assert [matrix[1][0] for matrix in found[4:]] == list(levels.values())
    assert {gpu["nvlinks"] for answer in answers[4:] for gpu in answer["gpus"][0]} == {0}


def test_numa_node_is_the_kernels(tmp_path):
    for address, node in (("0000:3b:00.0", "1\n"), ("0001:3b:00.0", "0\n"), ("0000:af:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(node)
    # NVML writes capitals, and the domain with eight digits; the kernel says -1 where there is one socket only
    bus_ids = ("00000000:3B:00.0", "00000001:3B:00.0", "00000000:AF:00.0", "00000000:D8:00.0")
    assert [nvml._numa_node(bus_id, tmp_path) for bus_id in bus_ids] == [1, 0, None, None]


def test_no_driver_a_broken_one_and_one_without_gpus(fake_driver):
    broken, uncounted, empty = ask(
        fake_driver,
        {"NVML_BROKEN": "1"},
        {"NVML_REFUSE": "nvmlDeviceGetCount_v2"},
        {"NVML_GPUS": "0"},
    )
    assert [answer["gpus"][0] for answer in (broken, uncounted, empty)] == [[]] * 3
    assert [answer["topology"] for answer in (broken, uncounted, empty)] == [None] * 3
    words = "no NVIDIA driver that answers: "
    assert broken["gpus"][1] == words + "Unknown Error"
    assert uncounted["gpus"][1] == words + "Not Supported"
    assert empty["gpus"][1] == "no GPU"


def test_without_the_module(monkeypatch):
    monkeypatch.setattr(nvml, "nv", None)
    assert nvml.gpus() == ([], "the module pynvml is missing (pip install nvidia-ml-py)")
    assert machine.topology() is None
    assert nvml.gpu_of(torch.device("cuda", 0)) == {}


# What fits


def test_parameters_are_counted():
    counts = [show.needs(config)[0] for config in show.LLAMA2.values()]
    assert counts == [6_738_415_616, 13_015_864_320, 68_976_648_192]  # the published checkpoints
    for config in shapes.SIZES.values():  # tied embeddings, grouped-query attention
        with torch.device("meta"):
            net = model.Transformer(config)
        assert show.needs(config)[0] == sum(p.numel() for p in net.parameters())


def test_needs_by_hand():
    n, uses = show.needs(show.LLAMA2["7B"])
    # bf16 inputs of 32 blocks, of the last norm and of the head; 1/rms; logits; token ids; RoPE's tables; cuBLAS
    activations = 4096 * (2 * 4096 * 34 + 4 + 12 * 32_000 + 16) + 2 * 4 * 4096 * 128 + 2**26
    adapters = 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11_008))  # parameters: 39,976,960
    assert uses == {
        "inference bf16": (2 * n + 2**31, 0),  # 32 layers, k and v of 4096 values, 2 bytes, 4096 tokens: 2 GiB
        "inference int8": (n + 2 * n / 128 + 2**31, 0),
        "inference int4": (n / 2 + 2 * n / 128 + 2**31, 0),
        "full training": (16 * n, activations),
        "LoRA training": (2 * n + 16 * adapters, activations),
        "QLoRA training": (n / 2 + 2 * n / 128 + 16 * adapters, activations),
    }
    n, uses = show.needs(show.LLAMA2["70B"])
    assert uses["inference bf16"][0] - 2 * n == 80 * 2 * 8 * 128 * 2 * 4096  # 8 key-value heads, not 64


@pytest.mark.parametrize("memory", [24e9, 80e9, 192e9])
def test_devices_needed_is_enough_and_no_more(memory):
    for config in show.LLAMA2.values():
        for spread, each in show.needs(config)[1].values():
            n = show.devices_needed(spread, each, memory)
            assert spread / n + each <= 0.9 * memory
            assert n == 1 or spread / (n - 1) + each > 0.9 * memory
    assert show.devices_needed(90, 0, 100) == 1
    assert show.devices_needed(91, 0, 100) == 2
    assert show.devices_needed(1, 90, 100) is None


# Dtypes


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8", "int8"])
def test_a_product_that_works(dtype):
    assert show.try_product(dtype, torch.device("cpu")) is None


def test_a_product_that_does_not(monkeypatch):
    cpu = torch.device("cpu")
    assert "not rounded" in show.try_product("tf32", cpu)
    monkeypatch.setattr(torch, "_int_mm", lambda x, y: (x.int() @ y.int()).add_(1))
    assert show.try_product("int8", cpu) == "wrong result"
    monkeypatch.setattr(torch, "_int_mm", None)
    assert "not callable" in show.try_product("int8", cpu)
    assert torch.get_float32_matmul_precision() == "highest"


# The host


def plant(folder, cpuinfo: str, group: str, files: dict[str, str]) -> dict:
    (folder / "self").mkdir()
    (folder / "cpuinfo").write_text(cpuinfo)
    (folder / "self/cgroup").write_text(group)
    for name, content in files.items():
        (folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / name).write_text(content)
    return machine.host(str(folder), str(folder / "groups"))


def test_limits_of_a_control_group_and_those_above_it(tmp_path):
    files = {
        "job/step/memory.max": "max\n",
        "job/memory.max": "1000000\n",
        "memory.max": "2000000\n",
        "job/step/cpu.max": "150000 100000\n",
        "job/cpu.max": "max 100000\n",
        "other/memory.max": "5\n",
    }
    found = plant(tmp_path, "model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16\n", "0::/job/step\n", files)
    assert (found["memory_limit_bytes"], found["cores_limit"]) == (1_000_000, 1.5)
    assert (found["cpu"], found["instruction_sets"]) == ("Some CPU", ["amx_bf16", "avx2"])


def test_limits_of_version_1_and_an_arm(tmp_path):
    no_limit = {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/a/memory.limit_in_bytes": "7000\n"}
    found = plant(tmp_path, "Features\t: fp asimd asimddp sve bf16\n", "4:memory:/a\n0::/\n", no_limit)
    assert (found["memory_limit_bytes"], found["cores_limit"]) == (7000, None)
    assert found["instruction_sets"] == ["asimd", "asimddp", "bf16", "sve"]


# The whole script


def run_main(monkeypatch, tmp_path, *flags: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["01_devices/show.py", "--json", str(tmp_path / "all.json"), *flags])
    assert show.main() == 0
    return json.loads((tmp_path / "all.json").read_text())


def test_bare(tmp_path):
    result = harness.run("01_devices/show.py", tmp_path, "--device", "cpu", "--json", "all.json")
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "all.json").read_text())
    assert (found["script"], found["device"]) == ("01_devices/show.py", "cpu")
    assert [d["dtype"] for d in found["dtypes"]] == list(show.TYPES)
    assert {d["verdict"] for d in found["dtypes"]} <= {"native", "emulated", "missing"}
    assert [d["verdict"] for d in found["dtypes"] if d["dtype"] == "fp32"] == ["native"]
    assert len(found["fits"]) == 3 * 6
    assert found["host"]["cores_usable"] >= 1


def test_gpus_that_only_the_driver_sees(tmp_path, fake_driver):
    env = {"LD_LIBRARY_PATH": fake_driver, "NVML_GPUS": "4", "CUDA_VISIBLE_DEVICES": ""}
    result = harness.run("01_devices/show.py", tmp_path, "--json", "all.json", **env)
    assert result.code == 0, result.err
    assert "NVML sees 4 GPUs, torch can use 0" in result.out
    found = json.loads((tmp_path / "all.json").read_text())
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA H100 80GB HBM3"] * 4
    assert len(found["topology"]) == 4
    assert found["peaks"][0]["device"] == "NVIDIA H100 80GB HBM3"
    fits = {(fit["model"], fit["use"]): fit for fit in found["fits"]}
    assert (fits["7B", "full training"]["devices_needed"], fits["7B", "full training"]["fits_here"]) == (2, True)
    assert fits["70B", "full training"]["fits_here"] is False


def test_a_driver_that_refuses_everything(monkeypatch, tmp_path, two_h100, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    nothing = [{**dict.fromkeys(gpu), "index": gpu["index"], "refused": {}} for gpu in two_h100]
    monkeypatch.setattr(nvml, "gpus", lambda: (nothing, None))
    monkeypatch.setattr(show, "topology", lambda: [["X", "?"], ["?", "X"]])
    found = run_main(monkeypatch, tmp_path, "--device", "cpu")
    assert found["peaks"][0] == {"device": "n/a", **dict.fromkeys(show.SHEET)}
    assert "What fits into 1 x RAM" in capsys.readouterr().out


def test_an_unknown_gpu_has_no_guessed_peaks_and_the_smallest_card_decides(monkeypatch, tmp_path, two_h100):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cards = [{**two_h100[0], "name": "NVIDIA Nonesuch"}, {**two_h100[1], "memory_total_bytes": 20e9}]
    monkeypatch.setattr(nvml, "gpus", lambda: (cards, None))
    monkeypatch.setattr(show, "topology", lambda: [["X", "SYS"], ["SYS", "X"]])
    found = run_main(monkeypatch, tmp_path, "--device", "cpu")
    assert found["peaks"][0] == {"device": "NVIDIA Nonesuch", **dict.fromkeys(show.SHEET)}
    assert found["peaks"][1]["bf16_tflops"] == pytest.approx(989.4)
    fits = {fit["use"]: fit for fit in found["fits"] if fit["model"] == "13B"}
    assert fits["inference bf16"]["devices_needed"] == math.ceil(29.4 / 18)


@pytest.mark.parametrize(
    ("wrong", "agrees"),
    [({}, True), ({"name": "NVIDIA A10"}, False), ({"major": 8}, False), ({"total_memory": 2**36}, False)],
)
def test_nvml_against_torch(monkeypatch, tmp_path, two_h100, capsys, wrong, agrees):
    seen = {"uuid": "00000002", "name": "NVIDIA H100 80GB HBM3", "total_memory": 79 * 2**30, "major": 9, "minor": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(**{**seen, **wrong}))
    monkeypatch.setattr(nvml, "gpus", lambda: (two_h100, None))
    monkeypatch.setattr(show, "topology", lambda: [["X", "NV4"], ["NV4", "X"]])
    if agrees:
        found = run_main(monkeypatch, tmp_path, "--device", "cpu")
        assert "agree about 1 GPUs" in capsys.readouterr().out
        assert {fit["fits_here"] for fit in found["fits"] if fit["model"] == "70B"} == {True, False}
    else:
        with pytest.raises(AssertionError):
            run_main(monkeypatch, tmp_path, "--device", "cpu")


def test_a_driver_too_old_for_torch(monkeypatch, tmp_path, two_h100):
    """torch then counts the GPUs through NVML, and can use none of them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nvml, "gpus", lambda: (two_h100, None))
    monkeypatch.setattr(show, "topology", lambda: [["X", "NV4"], ["NV4", "X"]])
    assert len(run_main(monkeypatch, tmp_path, "--device", "cpu")["gpus"]) == 2


def test_errors_are_for_people(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        run_main(monkeypatch, tmp_path / "none")
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="one process"):
        run_main(monkeypatch, tmp_path)


@pytest.mark.gpu(n=1)
def test_on_a_gpu(gpus, tmp_path):
    flags = ["--device", "cuda", "--json", "all.json"]
    result = harness.run("01_devices/show.py", tmp_path, *flags, CUDA_VISIBLE_DEVICES=gpus["CUDA_VISIBLE_DEVICES"])
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "all.json").read_text())
    mine = next(gpu for gpu in found["gpus"] if gpu["uuid"] == gpus["CUDA_VISIBLE_DEVICES"])
    assert found["device"] == mine["name"]
    assert "agree about 1 GPUs" in result.out
    capability = tuple(int(part) for part in mine["compute_capability"].split("."))
    for dtype in found["dtypes"]:
        assert dtype["unit"] == (capability >= hardware.CUDA_SINCE[dtype["dtype"]])
        if dtype["unit"]:  # a unit that torch cannot reach would be a finding
            assert dtype["verdict"] == "native", dtype
