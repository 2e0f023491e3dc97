"""common/hardware.py: the data sheets' figures, and which types a device multiplies in hardware."""

from types import SimpleNamespace

import pytest
import torch

from old import hardware

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAMES = list(hardware.peaks())
GEFORCE = [name for name in NAMES if "GeForce" in name]
# multiprocessors; FLOP per clock and multiprocessor in fp32 and, without sparsity and with sums in fp32, in fp16
CHIPS = {
    "NVIDIA B200": (148, 256, 8192),
    "NVIDIA H200": (132, 256, 4096),
    "NVIDIA H200 NVL": (132, 256, 4096),
    "NVIDIA GH200 480GB": (132, 256, 4096),
    "NVIDIA H100 80GB HBM3": (132, 256, 4096),
    "NVIDIA H100 NVL": (132, 256, 4096),
    "NVIDIA H100 PCIe": (114, 256, 4096),
    "NVIDIA A100-SXM4-80GB": (108, 128, 2048),
    "NVIDIA A30": (56, 128, 2048),
    "NVIDIA A40": (84, 256, 1024),
    "NVIDIA RTX A6000": (84, 256, 1024),
    "NVIDIA A10": (72, 256, 1024),
    "NVIDIA A10G": (80, 256, 512),
    "NVIDIA L40S": (142, 256, 1024),
    "NVIDIA L4": (58, 256, 1024),
    "NVIDIA RTX 6000 Ada Generation": (142, 256, 1024),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (188, 256, 1024),
    "NVIDIA GeForce RTX 5090": (170, 256, 512),
    "NVIDIA GeForce RTX 4090": (128, 256, 512),
    "NVIDIA GeForce RTX 4090 D": (114, 256, 512),
    "NVIDIA GeForce RTX 3090": (82, 256, 512),
    "Tesla V100-SXM2-32GB": (80, 128, 1024),
    "Tesla V100-PCIE-32GB": (80, 128, 1024),
    "Tesla T4": (40, 128, 1024),
    "AMD Instinct MI300X": (304, 256, 2048),
}

# The table


OWNED = """
NVIDIA B200, NVIDIA GB200, NVIDIA GH200 480GB, NVIDIA H200, NVIDIA H200 NVL, NVIDIA H20, NVIDIA H800,
NVIDIA A800-SXM4-80GB, NVIDIA L20, NVIDIA L40S, NVIDIA L4, NVIDIA A40, NVIDIA A30, NVIDIA A10G, NVIDIA A10,
Tesla V100-SXM2-16GB, Tesla V100-SXM2-32GB, Tesla V100-PCIE-16GB, Tesla V100-PCIE-32GB, Tesla T4,
NVIDIA GeForce RTX 5090, NVIDIA GeForce RTX 4090 D, NVIDIA RTX 6000 Ada Generation, NVIDIA RTX A6000,
NVIDIA RTX PRO 6000 Blackwell Workstation Edition, AMD Instinct MI300X, AMD Instinct MI325X
"""


def test_the_devices_that_people_own_are_in_the_table():
    wanted = [name.strip() for name in OWNED.split(",")]
    assert [name for name in wanted if hardware.peak(name) is None] == []
    assert len({hardware.peak(name) for name in wanted}) == len(wanted)  # no row stands for two variants


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_dense_and_in_proportion(name):
    """A figure with sparsity, or in the wrong column, breaks these."""
    p = hardware.peak(name)
    if p.tf32:
        assert p.bf16 / p.tf32 == pytest.approx(2, rel=0.025)  # each halving of the bits doubles the rate
        assert p.tf32 >= p.fp32
    if p.bf16:
        assert p.bf16 == p.fp16
    if p.fp8:
        assert p.fp8 / p.bf16 == pytest.approx(2, rel=0.025)
    if p.int8:
        assert p.int8 / p.fp16 == pytest.approx(4 if name in GEFORCE else 2, rel=0.025)
    assert p.fp16 > 0
    assert 0.3e12 <= p.bandwidth <= 8e12
    assert 16e9 <= p.memory <= 256e9
    assert 70 <= p.tdp <= 1200
    assert p.source


@pytest.mark.parametrize("name", CHIPS)
def test_figures_are_units_times_clock(name):
    p, (multiprocessors, fp32_per_clock, fp16_per_clock) = hardware.peak(name), CHIPS[name]
    assert p.fp32 == pytest.approx(multiprocessors * fp32_per_clock * p.fp32_clock, rel=0.015)
    assert p.fp16 == pytest.approx(multiprocessors * fp16_per_clock * p.matrix_clock, rel=0.015)


@pytest.mark.parametrize(
    ("name", "since"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("Tesla T4", (7, 5)),
        ("NVIDIA A100-SXM4-40GB", (8, 0)),
        ("NVIDIA A40", (8, 6)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA H20", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
    ],
)
def test_the_sheet_and_the_native_types_agree(monkeypatch, name, since):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: since)
    native, _ = hardware.native_types(CUDA)
    assert native == {dtype for dtype in hardware.CUDA_SINCE if hardware.peak_flops(name, dtype)}


def test_known_figures():
    a100 = hardware.peak("NVIDIA A100-SXM4-80GB")
    assert (a100.tf32, a100.bf16, a100.bandwidth) == (156e12, 312e12, 2.039e12)
    assert a100.fp32 == pytest.approx(6912 * 2 * 1.41e9, rel=1e-3)  # cores, a multiplication and an addition, clock
    assert hardware.memory_bandwidth("NVIDIA A100-SXM4-40GB") == 1.555e12
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3", "fp16") == 989.4e12
    assert hardware.peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None  # no unit: nothing to take a share of
    nvl = hardware.peak("NVIDIA H100 NVL")
    assert (nvl.tf32, nvl.fp8, nvl.int8) == (417.5e12, 1670.5e12, 1670.5e12)
    assert (nvl.memory, nvl.tdp) == (94e9, 400)
    v100 = hardware.peak("Tesla V100-SXM2-32GB")
    assert (v100.fp16, v100.bf16, v100.tf32, v100.fp8) == (125e12, 0, 0, 0)
    assert hardware.peak("NVIDIA RTX PRO 6000 Blackwell Server Edition").int8 is None  # no source for it
    assert hardware.peak_flops("NVIDIA RTX PRO 6000 Blackwell Server Edition", "int8") is None


def test_peaks_are_those_of_the_very_device_or_none():
    sxm, pcie, nvl = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"
    peaks = [hardware.peak_flops(name, "bf16") for name in (sxm, pcie, nvl)]
    assert len(set(peaks)) == 3
    assert hardware.peak_flops(sxm, "bf16") == 989.4e12
    assert hardware.peak_flops(sxm, "fp16") == 989.4e12
    assert hardware.peak_flops(sxm, "fp32") == 67e12
    assert hardware.memory_bandwidth(sxm) == 3.35e12
    assert hardware.peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12


@pytest.mark.parametrize(
    "name",
    ["", "cpu", "mps", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A1000", "Some GPU", "Radeon"],
)
def test_unknown_device_has_no_peaks(name):
    assert hardware.peak(name) is hardware.memory_bandwidth(name) is None
    assert hardware.peak_flops(name, "bf16") is hardware.highest_flops(name, "bf16", 1980) is None


# What a right measurement cannot exceed


def test_the_highest_rate_is_that_of_the_highest_clock():
    sxm = "NVIDIA H100 80GB HBM3"
    assert hardware.highest_flops(sxm, "bf16", 1980) == pytest.approx(989.4e12 * 1980 / 1830)
    assert hardware.highest_flops(sxm, "fp8", 1980) == pytest.approx(1978.9e12 * 1980 / 1830)
    assert hardware.highest_flops(sxm, "fp32", 1980) == 67e12  # counted with 1,980 MHz already
    assert hardware.highest_flops(sxm, "bf16", 1500) == 989.4e12  # locked to a lower one: the sheet still stands
    assert hardware.highest_flops(sxm, "bf16", None) == 989.4e12  # the driver does not say
    assert hardware.highest_flops("NVIDIA H20", "bf16", 1980) == 148e12  # a sheet whose clock has no source
    assert hardware.highest_flops("NVIDIA A100-SXM4-80GB", "fp8", 1410) is None


# Which types a device multiplies in hardware


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((6, 1), {"fp32"}),
        ((7, 0), {"fp32", "fp16"}),  # V100: no bf16, no int8 for matrices
        ((7, 5), {"fp32", "fp16", "int8"}),  # T4
        ((8, 0), {"fp32", "tf32", "bf16", "fp16", "int8"}),
        ((8, 6), {"fp32", "tf32", "bf16", "fp16", "int8"}),
        ((8, 9), {"fp32", "tf32", "bf16", "fp16", "fp8", "int8"}),
        ((9, 0), {"fp32", "tf32", "bf16", "fp16", "fp8", "int8"}),
        ((12, 0), {"fp32", "tf32", "bf16", "fp16", "fp8", "int8"}),
    ],
)
def test_nvidia_by_compute_capability(monkeypatch, capability, native):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert hardware.native_types(CUDA) == (native, "compute capability {}.{}".format(*capability))
    assert hardware.choose_dtype("auto", CUDA) == ("bf16" if "bf16" in native else "fp32")


@pytest.mark.parametrize(
    ("chip", "native"),
    [
        ("gfx906:sramecc+:xnack-", {"fp32"}),
        ("gfx90a:sramecc+:xnack-", {"fp32", "fp16", "bf16", "int8"}),
        ("gfx942:sramecc+:xnack-", {"fp32", "tf32", "fp16", "bf16", "fp8", "int8"}),
        ("gfx1201", {"fp32", "fp16", "bf16", "fp8", "int8"}),
    ],
)
def test_amd_is_not_asked_for_a_compute_capability(monkeypatch, chip, native):
    """ROCm answers (9, 4) for an MI300X and (9, 0) for an MI250X: the second would be taken for an H100."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=chip))
    assert hardware.native_types(CUDA) == (native, f"AMD {chip.split(':')[0]}")


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("model name\t: bf16 amx_bf16\nflags\t\t: fpu avx2\n", {"fp32"}),  # the name of a CPU proves nothing
        ("flags\t\t: fpu avx512_bf16 avx512_vnni\n", {"fp32", "bf16", "int8"}),
        ("flags\t\t: amx_bf16 amx_int8 avx512_fp16\n", {"fp32", "bf16", "fp16", "int8"}),
        ("Features\t: fp asimd asimdhp asimddp bf16 i8mm\n", {"fp32", "bf16", "fp16", "int8"}),
    ],
)
def test_a_cpu_by_its_instruction_sets(monkeypatch, tmp_path, cpuinfo, native):
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    read = hardware.cpu_instruction_sets
    monkeypatch.setattr(hardware, "cpu_instruction_sets", lambda: read(file))
    assert hardware.native_types(CPU)[0] == native
    assert hardware.choose_dtype("auto", CPU) == ("bf16" if "bf16" in native else "fp32")


def test_without_proc_torch_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False, "cores": 2}, False)
    assert hardware.cpu_instruction_sets(tmp_path / "none") == {"avx2"}
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # torch 2.11
    assert hardware.cpu_instruction_sets(tmp_path / "none") == set()


def test_a_type_that_is_named_is_not_changed(monkeypatch):
    monkeypatch.setattr(hardware, "native_types", lambda device: ({"fp32"}, "nothing else"))
    assert [hardware.choose_dtype(name, CPU) for name in ("fp32", "bf16", "fp16", "auto")] == [
        "fp32",
        "bf16",
        "fp16",
        "fp32",
    ]


def test_the_cpus_name(monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware.platform, "processor", lambda: "")
    assert hardware.cpu_model(file) is None
    monkeypatch.setattr(hardware.platform, "processor", lambda: "arm")
    assert hardware.cpu_model(file) == "arm"
    file.write_text("processor\t: 0\nmodel name\t: One of 2\nprocessor\t: 1\nmodel name\t: Two of 2\n")
    assert hardware.cpu_model(file) == "One of 2"
