"""common/hardware.py: figures of data sheets, and whether a device multiplies bf16."""

from pathlib import Path

import pytest
import torch

from common import hardware

# multiprocessors, FLOP per clock and multiprocessor in fp32, the same in fp16 (dense, fp32 sums)
CHIPS = {
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


def test_figures_are_dense_and_in_proportion():
    """A figure with sparsity or in the wrong column breaks these proportions."""
    for name, sheet in hardware.devices().items():
        if sheet["tf32"]:
            assert sheet["bf16"] / sheet["tf32"] == pytest.approx(2, rel=0.025), name
        if sheet["bf16"]:
            assert sheet["bf16"] == sheet["fp16"], name
        if sheet["fp8"]:
            assert sheet["fp8"] / sheet["bf16"] == pytest.approx(2, rel=0.025), name
        assert 0.3e12 <= sheet["bandwidth"] <= 8e12, name
        assert 16e9 <= sheet["memory"] <= 256e9, name


def test_figures_are_units_times_clock():
    for name, (multiprocessors, fp32_per_clock, fp16_per_clock) in CHIPS.items():
        sheet = hardware.devices()[name]
        fp32 = multiprocessors * fp32_per_clock * sheet["fp32_clock"]
        fp16 = multiprocessors * fp16_per_clock * sheet["matrix_clock"]
        assert (sheet["fp32"], sheet["fp16"]) == pytest.approx((fp32, fp16), rel=0.015), name


def test_peaks_belong_to_the_exact_device_name_or_are_none():
    h100s = [f"NVIDIA H100 {kind}" for kind in ("80GB HBM3", "PCIe", "NVL")]
    assert len({hardware.peak_flops(name, "bf16") for name in h100s}) == 3
    # data sheets, dense: an H100 SXM has 1,979 TFLOP/s with sparsity, half of that without
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3", "bf16") == pytest.approx(989e12, rel=0.01)
    assert hardware.peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    # an A100 has no fp8 units, so there is no peak
    assert hardware.peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    for unknown in ("", "cpu", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Some GPU"):
        assert hardware.peak_flops(unknown, "bf16") is None


CPUS = (
    ("model name\t: Bfloat\nflags\t\t: fpu avx2\n", "fp32"),
    ("flags\t\t: fpu avx512_bf16 avx512_vnni\n", "bf16"),
    ("Features\t: fp asimd bf16 i8mm\n", "bf16"),
)


def test_auto_is_bf16_where_a_cpu_multiplies_it(monkeypatch):
    text = ""
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: text)
    for text, dtype in CPUS:
        assert hardware.choose_dtype("auto", torch.device("cpu")) == dtype, text
    assert hardware.choose_dtype("fp16", torch.device("cpu")) == "fp16"
