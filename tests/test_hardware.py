"""common/hardware.py: the data sheets' figures, and whether a device multiplies bf16."""

from pathlib import Path

import pytest
import torch

from common import hardware

OWNED = """
NVIDIA B200, NVIDIA GB200, NVIDIA GH200 480GB, NVIDIA H200, NVIDIA H200 NVL, NVIDIA H20, NVIDIA H800,
NVIDIA A800-SXM4-80GB, NVIDIA L20, NVIDIA L40S, NVIDIA L4, NVIDIA A40, NVIDIA A30, NVIDIA A10G, NVIDIA A10,
Tesla V100-SXM2-16GB, Tesla V100-SXM2-32GB, Tesla V100-PCIE-16GB, Tesla V100-PCIE-32GB, Tesla T4,
NVIDIA GeForce RTX 5090, NVIDIA GeForce RTX 4090 D, NVIDIA RTX 6000 Ada Generation, NVIDIA RTX A6000,
NVIDIA RTX PRO 6000 Blackwell Workstation Edition, AMD Instinct MI300X, AMD Instinct MI325X
"""
CHIPS = {  # multiprocessors; FLOP per clock and multiprocessor in fp32 and, dense, with sums in fp32, in fp16
    "NVIDIA B200": (148, 256, 8192),
    "NVIDIA H200": (132, 256, 4096),
    "NVIDIA H100 80GB HBM3": (132, 256, 4096),
    "NVIDIA H100 PCIe": (114, 256, 4096),
    "NVIDIA A100-SXM4-80GB": (108, 128, 2048),
    "NVIDIA A10G": (80, 256, 512),
    "NVIDIA L40S": (142, 256, 1024),
    "NVIDIA L4": (58, 256, 1024),
    "NVIDIA GeForce RTX 5090": (170, 256, 512),
    "NVIDIA GeForce RTX 4090": (128, 256, 512),
    "Tesla V100-SXM2-32GB": (80, 128, 1024),
    "Tesla T4": (40, 128, 1024),
    "AMD Instinct MI300X": (304, 256, 2048),
}


def test_the_devices_that_people_own_are_in_the_table():
    assert not {name.strip() for name in OWNED.split(",")} - hardware.devices().keys()


@pytest.mark.parametrize("name", hardware.devices())
def test_figures_are_dense_and_in_proportion(name):
    """A figure with sparsity, or in the wrong column, breaks these."""
    sheet = hardware.devices()[name]
    if sheet["tf32"]:
        assert sheet["bf16"] / sheet["tf32"] == pytest.approx(2, rel=0.025)
    if sheet["bf16"]:
        assert sheet["bf16"] == sheet["fp16"]
    if sheet["fp8"]:
        assert sheet["fp8"] / sheet["bf16"] == pytest.approx(2, rel=0.025)
    assert 0.3e12 <= sheet["bandwidth"] <= 8e12
    assert 16e9 <= sheet["memory"] <= 256e9


@pytest.mark.parametrize("name", CHIPS)
def test_figures_are_units_times_clock(name):
    sheet, (multiprocessors, fp32_per_clock, fp16_per_clock) = hardware.devices()[name], CHIPS[name]
    assert sheet["fp32"] == pytest.approx(multiprocessors * fp32_per_clock * sheet["fp32_clock"], rel=0.015)
    assert sheet["fp16"] == pytest.approx(multiprocessors * fp16_per_clock * sheet["matrix_clock"], rel=0.015)


def test_peaks_are_those_of_the_very_device_or_none():
    peaks = {hardware.peak_flops(f"NVIDIA H100 {kind}", "bf16") for kind in ("80GB HBM3", "PCIe", "NVL")}
    assert len(peaks) == 3
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert hardware.peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert hardware.peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None  # no units: nothing to take a share of
    for unknown in ("", "cpu", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Some GPU"):
        assert hardware.peak_flops(unknown, "bf16") is None


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("model name\t: Bfloat\nflags\t\t: fpu avx2\n", "fp32"),
        ("flags\t\t: fpu avx512_bf16 avx512_vnni\n", "bf16"),
        ("Features\t: fp asimd bf16 i8mm\n", "bf16"),
    ],
)
def test_auto_is_bf16_where_a_cpu_multiplies_it(monkeypatch, cpuinfo, dtype):
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: cpuinfo)
    assert hardware.choose_dtype("auto", torch.device("cpu")) == dtype
    assert hardware.choose_dtype("fp16", torch.device("cpu")) == "fp16"
