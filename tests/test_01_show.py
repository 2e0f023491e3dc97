"""01_devices/show.py, and what the chapter reads GPUs with: 01_devices/_shared.py."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from support import harness
from support.chapter import load

show, machine = load("01_devices/show.py"), load("01_devices/_show.py")

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
    "nvmlDeviceGetMigMode": ["mig"],
    "nvmlDeviceGetFieldValues": ["nvlink_tx_bytes", "nvlink_rx_bytes"],
    "nvmlDeviceGetComputeRunningProcesses_v3": ["processes"],
}
# asks the driver once per environment given on the command line: the real pynvml, which loads it once per process
ASK = f"""
import json, os, sys
from types import SimpleNamespace
import torch
sys.path[:0] = [{str(harness.ROOT)!r}, {str(harness.ROOT / "01_devices")!r}]
import _shared as nvml
from _show import topology
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
    """What _shared.py answers with these faults planted in the driver library of that folder."""
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
    assert (second["mig"], second["nvlinks"], second["compute_capability"]) == (False, 4, "9.0")
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


def test_products_that_do_not_come_out_right_are_named(monkeypatch):
    cpu = torch.device("cpu")
    assert "not rounded" in show.try_matmul("tf32", cpu)
    monkeypatch.setattr(torch, "_int_mm", lambda x, y: (x.int() @ y.int()).add_(1))
    assert show.try_matmul("int8", cpu) == "wrong result"
    monkeypatch.setattr(torch, "_int_mm", None)
    assert "not callable" in show.try_matmul("int8", cpu)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("cpuinfo", "group", "files", "found"),
    [
        (
            "model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16\n",
            "0::/job/step\n",
            {
                "job/step/memory.max": "max\n",
                "job/memory.max": "1000000\n",
                "memory.max": "2000000\n",
                "job/step/cpu.max": "150000 100000\n",
                "job/cpu.max": "max 100000\n",
                "other/memory.max": "5\n",
            },
            (1_000_000, 1.5, ["amx_bf16", "avx2"]),
        ),
        (
            "Features\t: fp asimd asimddp sve bf16\n",
            "4:memory:/a\n0::/\n",
            {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/a/memory.limit_in_bytes": "7000\n"},
            (7000, None, ["asimd", "asimddp", "bf16", "sve"]),
        ),
    ],
    ids=["version 2", "version 1 on ARM"],
)
def test_limits_of_a_container(tmp_path, cpuinfo, group, files, found):
    (tmp_path / "self").mkdir()
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    (tmp_path / "self/cgroup").write_text(group)
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content)
    here = machine.host(str(tmp_path), str(tmp_path / "groups"))
    assert (here["memory_limit_bytes"], here["cores_limit"], here["instruction_sets"]) == found


def run_show(folder: Path, *flags: str, **env: str) -> tuple[dict, str]:
    result = harness.run("01_devices/show.py", folder, "--json", "all.json", *flags, **env)
    assert result.code == 0, result.err
    return json.loads((folder / "all.json").read_text()), result.out


def test_gpus_that_only_the_driver_sees(tmp_path, fake_driver):
    found, out = run_show(tmp_path, LD_LIBRARY_PATH=fake_driver, NVML_GPUS="4", CUDA_VISIBLE_DEVICES="")
    assert "NVML sees 4 GPUs, torch can use 0" in out
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA H100 80GB HBM3"] * 4
    assert len(found["topology"]) == 4
    assert found["peaks"][0]["device"] == "NVIDIA H100 80GB HBM3"
    assert found["peaks"][0]["bf16_tflops"] == pytest.approx(989.4)
    fits = {(fit["model"], fit["use"]): fit for fit in found["fits"]}
    assert (fits["7B", "full training"]["devices_needed"], fits["7B", "full training"]["fits_here"]) == (2, True)
    assert fits["70B", "full training"]["fits_here"] is False


def test_a_driver_that_says_no_name_and_no_memory(tmp_path, fake_driver):
    refused = "nvmlDeviceGetName,nvmlDeviceGetMemoryInfo"
    found, out = run_show(tmp_path, LD_LIBRARY_PATH=fake_driver, NVML_REFUSE=refused, CUDA_VISIBLE_DEVICES="")
    assert (found["peaks"][0]["device"], found["peaks"][0]["bf16_tflops"]) == ("n/a", None)
    assert "What fits into 1 x RAM" in out
