"""01_devices/show.py, and what the chapter reads GPUs with: 01_devices/_machine.py, on a driver library of our own."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from support import harness

SCRIPT = "01_devices/show.py"
DRIVER = (Path(__file__).parent / "support/fake_nvml.c").read_text(encoding="utf-8")
QUERIES = set(re.findall(r"\b(nvml(?:Device|System)Get\w+)\(", DRIVER)) | set(
    re.findall(r"CONSTANT\((\w+),", DRIVER)
)
# asks the driver once per environment given on the command line: the real pynvml, which loads it once per process
ASK = f"""
import json, os, sys
from types import SimpleNamespace
import torch
sys.path[:0] = [{str(harness.ROOT)!r}, {str(harness.ROOT / "01_devices")!r}]
import _machine as nvml
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"{{device + 1:08d}}")
answers = []
for planted in json.loads(sys.argv[1]):
    os.environ.update(planted)
    of_device = [nvml.gpu_of(i) for i in range(3)]
    gpus, why_none = nvml.gpus()
    answers.append(dict(gpus=gpus, why_none=why_none, of_device=of_device))
    for name in planted:
        del os.environ[name]
print(json.dumps(answers))
"""


def ask(driver: str, *planted: dict[str, str]) -> list[dict]:
    """What the chapter reads with these faults planted in the driver library of that folder."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "ask.py")
        script.write_text(ASK, encoding="utf-8")
        result = harness.run(script, Path(folder), json.dumps(planted), LD_LIBRARY_PATH=driver)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_numbers_are_in_the_units_of_their_names(fake_driver):
    [whole] = ask(fake_driver, {})
    second = whole["gpus"][1]
    assert (second["refused"], [name for name, value in second.items() if value is None]) == (
        {},
        [],
    )
    assert (second["uuid"], second["cuda"], second["compute_capability"]) == (
        "GPU-00000002",
        "13.0",
        "9.0",
    )
    assert (second["memory_total_bytes"], second["memory_used_bytes"]) == (80 * 2**30, 10 * 2**30)
    assert (second["power_watts"], second["power_limit_watts"], second["utilization"]) == (
        612,
        700,
        0.97,
    )
    assert (second["sm_clock_mhz"], second["sm_clock_max_mhz"], second["nvlinks"]) == (
        1755,
        1980,
        4,
    )
    assert second["processes"][0]["memory_bytes"] == 9 * 2**30
    assert second["processes"][0]["user"]  # this very process, as the fake driver has it
    # torch's GPU is found by its UUID; the third is one that NVML does not know
    assert [gpu.get("uuid") for gpu in whole["of_device"]] == ["GPU-00000001", "GPU-00000002", None]


def test_a_refused_query_costs_its_own_answer_only_and_is_not_known_rather_than_0(fake_driver):
    functions = sorted(
        QUERIES - {"nvmlDeviceGetCount_v2"} - {name for name in QUERIES if "GetHandle" in name}
    )
    whole, *answers = ask(fake_driver, {}, *({"NVML_REFUSE": function} for function in functions))
    costly = 0
    for function, answer in zip(functions, answers, strict=True):
        for gpu, healthy in zip(answer["gpus"], whole["gpus"], strict=True):
            lost = {name for name, value in gpu.items() if value is None}
            assert lost == gpu["refused"].keys(), function
            # processes: each has another pid
            kept = gpu.keys() - lost - {"refused", "processes", "nvlinks"}
            assert {name: gpu[name] for name in kept} == {name: healthy[name] for name in kept}, (
                function
            )
            costly += bool(lost)
    assert costly >= 30  # two GPUs for each: most queries are used


def test_gpus_that_are_lost_and_drivers_that_do_not_answer(fake_driver):
    lost, broken, empty = ask(
        fake_driver, {"NVML_LOST": "0"}, {"NVML_BROKEN": "1"}, {"NVML_GPUS": "0"}
    )
    first, second = lost["gpus"]
    assert {name for name, value in first.items() if value is not None} == {"index", "refused"}
    assert (second["power_watts"], second["refused"]) == (612, {})
    for answer, why in ((broken, "Unknown Error"), (empty, "no GPU")):
        assert answer["gpus"] == []
        assert why in answer["why_none"]
    assert broken["of_device"] == [{}] * 3


@pytest.mark.parametrize("refused", ["", "nvmlDeviceGetName,nvmlDeviceGetMemoryInfo"])
def test_gpus_that_only_the_driver_sees(tmp_path, fake_driver, refused):
    """What fits on them is told, too; where the driver does not say their size, what fits into the RAM."""
    env = {"LD_LIBRARY_PATH": fake_driver, "NVML_GPUS": "4", "NVML_REFUSE": refused}
    result = harness.run(SCRIPT, tmp_path, "--json", "all.json", "--device", "cpu", **env)
    assert result.code == 0, result.out + result.err
    found = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    name = None if refused else "NVIDIA H100 80GB HBM3"
    assert [gpu["name"] for gpu in found["gpus"]] == [name] * 4
    full = {
        fit["model"]: fit["fits_here"] for fit in found["fits"] if fit["use"] == "full training"
    }
    assert full["70B"] is False
    if not refused:
        assert full["7B"] is True
        [sheet] = [sheet for sheet in found["peaks"] if sheet["device"] == name]
        assert (sheet["bf16_tflops"], sheet["memory_bytes"]) == (
            pytest.approx(989.4),
            pytest.approx(80e9),
        )


LIMITS = f"""
import sys
sys.path[:0] = [{str(harness.ROOT)!r}, {str(harness.ROOT / "01_devices")!r}]
import _machine
print(_machine.limits("proc", "groups"))
"""


@pytest.mark.parametrize(
    ("own_group", "files", "limits"),
    [
        (
            "0::/job/step",
            {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000"},
            (None, 1.5),
        ),
        (
            "4:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc",
            {
                "cpu/cpu.cfs_quota_us": "300000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "2147483648",
            },
            (2**31, 3.0),
        ),
        (
            "4:cpu:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            (None, None),
        ),
    ],
)
def test_the_limits_of_a_container_count(tmp_path, own_group, files, limits):
    """In both versions of control groups, and in the groups above that of the process."""
    contents = {"proc/self/cgroup": own_group}
    for name, text in files.items():
        contents[f"groups/{name}"] = text
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    (tmp_path / "ask.py").write_text(LIMITS, encoding="utf-8")
    result = harness.run(tmp_path / "ask.py", tmp_path)
    assert result.out == f"{limits}\n", result


VIRTUAL = """
import torch
from types import SimpleNamespace
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda index: SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=72 * 2**30, uuid="00000001", major=9, minor=0
)
"""


def test_a_gpu_whose_driver_keeps_a_part_of_its_memory(tmp_path, fake_driver):
    """As a virtual GPU: CUDA has a tenth less than the driver says. Both are shown."""
    script = harness.with_prelude(SCRIPT, tmp_path, VIRTUAL)
    flags = ["--device", "cpu", "--json", "all.json"]
    result = harness.run(script, tmp_path, *flags, LD_LIBRARY_PATH=fake_driver)
    assert result.code == 0, result
    first, second = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))["gpus"]
    assert (first["memory_total_bytes"], first["memory_for_torch_bytes"]) == (
        80 * 2**30,
        72 * 2**30,
    )
    assert "memory_for_torch_bytes" not in second
    assert "NVML and torch agree about 1 GPUs" in result.out


def test_what_cannot_be_is_one_line(tmp_path):
    for flags in (["--device", "cuda"], ["--json", "none/x.json"]):
        harness.assert_refused(harness.run(SCRIPT, tmp_path, *flags), *flags)
