"""01_devices/benchmark.py: the arithmetic of its figures, its verdict, and that wrong results are seen.

What is timed is checked with a clock of our own: no test asks how fast anything is.
"""

import argparse
import json
import math
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.chapter import load
from support.harness import ROOT, clean_env, run
from torch import nn

from old import cli, hardware
from old.exits import UserError

SCRIPT = "01_devices/benchmark.py"
benchmark, benchmark_report = load(SCRIPT), load("01_devices/_benchmark_report.py")
products, benchmark_timing = load("01_devices/_benchmark_products.py"), load("01_devices/_benchmark_timing.py")

CPU = torch.device("cpu")
STAND_IN = torch.device("cpu", 0)  # a device beside the CPU, for what a GPU does there
CUDA = torch.device("cuda", 0)


def fake_timed(seconds, works=True):
    """A `timed` that takes the times it is given, and leaves the work undone if told so."""

    def timed(work, device, samples, flush=None, repeat=1, clock="device"):
        if works:
            work()
        return list(seconds)

    return timed


def a_figure(kind="matmul", dtype="fp32", values=(1.0, 3.0, 2.0), unit="FLOP/s", **more) -> dict:
    return benchmark_report.figure(kind, "a test", dtype, (1,), list(values), unit, **more)


# Timing


class Clock:
    """Moves on by one second each time it is looked at."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


def test_a_sample_is_the_mean_of_its_calls(monkeypatch):
    monkeypatch.setattr(benchmark_timing, "time", Clock())
    calls = []
    assert benchmark_timing.timed(lambda: calls.append(0), CPU, samples=3, repeat=4) == [0.25] * 3
    assert len(calls) == 1 + 3 * 4  # one to warm up: this clock is past the deadline at the next look


def test_warm_up_lasts_its_time_and_is_not_counted(monkeypatch):
    monkeypatch.setattr(benchmark_timing, "time", Clock())
    monkeypatch.setattr(benchmark_timing, "WARM_UP_SECONDS", 5.5)
    calls = []
    assert benchmark_timing.timed(lambda: calls.append(0), CPU, samples=2) == [1.0, 1.0]
    assert len(calls) == 1 + 5 + 2


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 1), (0.5, 1), (4.5, 5)])
def test_a_longer_warm_up_goes_on_for_its_time(monkeypatch, seconds, calls):
    monkeypatch.setattr(benchmark_timing, "time", Clock())
    done = []
    benchmark_timing.warm_up(lambda: done.append(0), CPU, seconds)
    assert len(done) == calls


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "cache", "expected"),
    [
        (64 * GIB, 50 * 2**20, (GIB, GIB // 2)),
        (4 * GIB, 50 * 2**20, (GIB // 2, GIB // 2)),
        (2 * GIB, 50 * 2**20, (GIB // 4, GIB // 4)),
        (2 * GIB, 200 * 2**20, (GIB // 4, 400 * 2**20)),  # a flush that the cache holds would flush nothing
    ],
)
def test_buffers_fit_the_free_memory_and_the_flush_exceeds_the_cache(monkeypatch, free, cache, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=cache))
    most = benchmark.ARRAY_BYTES["gpu"], benchmark.FLUSH_BYTES["gpu"]
    assert benchmark_timing.buffer_bytes(CUDA, *most) == expected
    monkeypatch.setattr(benchmark_timing.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    levels = [SimpleNamespace(read_text=f"{kib}K\n".__str__) for kib in (32, 1024, 512)]
    monkeypatch.setattr(benchmark_timing, "Path", lambda _: SimpleNamespace(glob=lambda _: levels))
    assert benchmark_timing.buffer_bytes(CPU, 2**40, 0) == (free // 8, 2 * 2**20)


def test_a_gpu_that_is_full_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**31 - 1, 80 * GIB))
    with pytest.raises(UserError, match="2,147,483,647 bytes are free on cuda:0"):
        benchmark_timing.buffer_bytes(CUDA, GIB, GIB)


def test_caches_are_flushed_before_every_sample(monkeypatch):
    monkeypatch.setattr(benchmark_timing, "time", Clock())
    flush, seen = torch.ones(8), []

    def work():
        seen.append(flush.sum().item())
        flush.fill_(1)

    benchmark_timing.timed(work, CPU, samples=3, flush=flush, repeat=2)
    assert seen == [8, 0, 8, 0, 8, 0, 8]  # the warm-up; then a written flush before the first call of each sample


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ("device", ["wait", "flush", "event", "work", "work", "event", "wait"]),
        ("wall", ["wait", "flush", "wait", "work", "wait", "work", "wait"]),
        ("issue", ["wait", "flush", "wait", "work", "work"]),
    ],
)
def test_order_on_a_gpu(monkeypatch, clock, expected):
    """What goes into the queue, and when the CPU waits for it."""
    log = []
    event = SimpleNamespace(record=lambda: log.append("event"), elapsed_time=lambda _: 3000.0)
    monkeypatch.setattr(benchmark_timing, "time", Clock())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    flush = SimpleNamespace(zero_=lambda: log.append("flush"))
    seconds = benchmark_timing.timed(lambda: log.append("work"), CUDA, samples=1, flush=flush, repeat=2, clock=clock)
    assert seconds == [1.5] if clock == "device" else len(seconds) == 1
    assert log == ["work", "wait", *expected, "wait"]


def test_conditions_are_those_of_this_gpu(monkeypatch):
    properties = SimpleNamespace(uuid="00000002", L2_cache_size=50 * 2**20, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    this = {"uuid": "GPU-00000002", "driver": "1.0", "sm_clock_mhz": 200, "power_limit_watts": 700.0}
    for told, clock, limit in ((this, 200, 700.0), ({}, None, None)):
        monkeypatch.setattr(benchmark_timing.nvml, "gpu_of", {CUDA: told}.get)
        found = benchmark_timing.conditions(CUDA)
        assert (found["sm_clock_mhz"], found["power_limit_watts"]) == (clock, limit)
        assert (found["l2_cache_bytes"], found["compute_capability"]) == (52_428_800, "9.0")
    assert benchmark_timing.conditions(CPU) == {"cpu": hardware.cpu_model(), "cpu_threads": torch.get_num_threads()}


def test_conditions_under_load_are_read_while_the_work_goes_on(monkeypatch):
    """The reading ends only after work was done that began after the reading did."""
    log, done = [], threading.Event()

    def conditions(device):
        log.append("asked")
        assert done.wait(30)
        log.append("told")
        return {"sm_clock_mhz": 1755}

    def work():
        if "asked" in log:
            log.append("work")
            done.set()

    monkeypatch.setattr(benchmark_timing, "conditions", conditions)
    assert benchmark_timing.conditions_under_load(work, CPU) == {"sm_clock_mhz": 1755}
    assert log.index("asked") < log.index("work") < log.index("told")


# The arithmetic of figures


def test_figure_is_median_and_spread():
    found = a_figure(values=(4.0, 1.0, 2.0, 9.0), peak=12.0)
    assert (found["median"], found["min"], found["max"], found["n"]) == (3.0, 1.0, 9.0, 4)
    assert (found["peak"], found["share_of_peak"]) == (12.0, 0.25)
    assert a_figure()["share_of_peak"] is None


@pytest.mark.parametrize(
    ("dtype", "bytes_moved"),
    [("fp32", 4 * (8 + 12 + 6)), ("bf16", 2 * (8 + 12 + 6)), ("int8", 8 + 12 + 4 * 6)],  # x, w and the result
)
def test_flop_and_bytes_of_a_product(monkeypatch, dtype, bytes_moved):
    monkeypatch.setattr(benchmark, "timed", fake_timed([0.5, 0.25, 1.0]))
    found = benchmark.matmul("matmul", dtype, (2, 3, 4), CPU, 3, torch.zeros(1))
    assert (found["median"], found["min"], found["max"]) == (96.0, 48.0, 192.0)  # 2 x 2 x 3 x 4 FLOP each
    assert found["flop_per_byte"] == pytest.approx(48 / bytes_moved)
    assert (found["shape"], found["unit"], found["peak"]) == ([2, 3, 4], "FLOP/s", None)


def test_bytes_of_copy_and_triad(monkeypatch):
    monkeypatch.setattr(benchmark, "timed", fake_timed([2.0]))
    copy, triad = benchmark.bandwidth(CPU, 1, torch.zeros(1), array_bytes=4000)
    assert (copy["median"], copy["shape"], copy["flop_per_byte"]) == (2 * 4000 / 2, [1000], 0)
    assert triad["median"] == 3 * 4000 / 2
    assert triad["flop_per_byte"] == pytest.approx(1 / 6)  # 2 FLOP for 12 bytes of each element
    assert (copy["unit"], triad["unit"]) == ("B/s", "B/s")


def test_transfers_are_all_there(monkeypatch):
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, pin_memory=False, **k: randn(*a, **k))  # pinning takes a GPU
    monkeypatch.setattr(benchmark, "timed", fake_timed([0.5]))
    found = benchmark.transfers(STAND_IN, 1, 4000)
    rates = [f for f in found if f["unit"] == "B/s"]
    assert {f["what"] for f in rates} == {
        f"{way}, {memory}, {call}"
        for way in ("h2d", "d2h")
        for memory in ("pageable", "pinned")
        for call in ("blocking", "non-blocking")
    }
    assert {f["median"] for f in rates} == {8000.0}
    assert [f["kind"] for f in found if f["unit"] == "s"] == [f"{f['kind']}_call" for f in rates]


def test_ceilings_are_by_type_and_for_the_memory():
    found = [
        a_figure(values=[10.0]),
        a_figure("width", values=[40.0]),
        a_figure(dtype="bf16", values=[80.0]),
        a_figure("copy", values=[3.0], unit="B/s"),
        a_figure("triad", values=[4.0], unit="B/s"),
        a_figure("h2d", None, values=[100.0], unit="B/s"),
        a_figure("launch", values=[1e-6], unit="s"),
    ]
    assert benchmark_report.ceilings(found) == {"fp32": 40.0, "bf16": 80.0, "memory": 4.0}
    assert [f["share_of_ceiling"] for f in found] == [0.25, 1.0, 1.0, 0.75, 1.0, None, None]


def test_one_sample_above_the_peak_is_a_bug():
    fine = a_figure(values=(1.0, 2.0), peak=2.0, limit=2.0)
    unknown = a_figure(values=(1e30,))
    assert benchmark_report.bugs([fine, unknown]) == []
    above = partial(a_figure, values=(1.0, 1.0, 2.5), peak=2.0)
    assert benchmark_report.bugs([above(limit=2.5)]) == []
    assert len(benchmark_report.bugs([above(limit=2.4)])) == 1
    (line,) = benchmark_report.bugs([fine, above(limit=2.0), unknown])
    assert "2.5" in line
    assert "peak 2" in line


@pytest.mark.parametrize(
    ("name", "dtype", "clock", "limit"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 1980, 989.4e12 * 1980 / 1830),  # 8 % above the data sheet
        ("NVIDIA H100 80GB HBM3", "fp8_fast", 1980, 1978.9e12 * 1980 / 1830),
        ("NVIDIA H100 80GB HBM3", "bf16", None, 989.4e12),
        ("NVIDIA GeForce RTX 4090", "fp8", 2520, 330.3e12),
        ("NVIDIA GeForce RTX 4090", "fp8_fast", 2520, 660.6e12),  # sums in less than fp32 come at full rate
        ("NVIDIA A100-SXM4-80GB", "fp8_fast", 1410, None),
        ("cpu", "fp32", None, None),
    ],
)
def test_the_limit_of_a_rate(name, dtype, clock, limit):
    assert products.limit_flops(name, dtype, clock) == (limit and pytest.approx(limit))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ({1: 9, 2: 9, 4: 3, 8: 1}, 4),
        ({1: 0.5, 2: 9, 4: 3, 8: 1}, 4),  # one lucky small size is no crossover
        ({1: 0.5, 2: 1, 4: 3, 8: 1}, 1),
        ({1: 9, 2: 9, 4: 9, 8: 8}, None),  # a draw is no win
        ({}, None),
    ],
)
def test_crossover(gpu, expected):
    assert benchmark_report.crossover({1: 1, 2: 2, 4: 4, 8: 8}, gpu) == expected


# Results are checked


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("shape", [(64, 48, 256), (33, 17, 129)])
def test_a_right_product_passes_and_a_wrong_one_does_not(monkeypatch, dtype, shape):
    monkeypatch.setattr(benchmark, "timed", fake_timed([1.0]))
    measure = partial(benchmark.matmul, "matmul", dtype, shape, CPU, 1, torch.zeros(1))
    assert 0 <= measure()["relative_error"] <= products.TYPES[dtype][1]

    def wrong(dtype, x, w):
        result = products.product(dtype, x, w)()
        result[0, 0] += 100 if dtype == "int8" else 0.5 * result.float().norm().item()
        return lambda: result

    monkeypatch.setattr(benchmark, "product", wrong)
    with pytest.raises(AssertionError, match="relative error"):
        measure()


@pytest.mark.parametrize(("claimed", "used"), [("fp32", "tf32"), ("tf32", "bf16"), ("fp16", "bf16"), ("bf16", "fp8")])
def test_a_type_that_is_not_the_one_claimed_is_seen(claimed, used):
    torch.manual_seed(0)
    x, w = torch.randn(2, 128, 512)
    result = x @ w.t()
    low = torch.float32 if used == "tf32" else products.TYPES[used][0]
    cut = x.view(torch.int32).bitwise_and(-(2**13)).view(torch.float32) if used == "tf32" else x.to(low).float()
    cut_w = w.view(torch.int32).bitwise_and(-(2**13)).view(torch.float32) if used == "tf32" else w.to(low).float()
    rounded = (cut @ cut_w.t()).to(torch.bfloat16 if used == "fp8" else low)
    assert products.relative_error(result, x, w) < 2**-20
    error = products.relative_error(rounded, x, w)
    assert error > products.TYPES[claimed][1]
    if used == "tf32":  # what the hardware does at worst is allowed where it is claimed
        assert error < products.TYPES["tf32"][1]


def test_work_that_is_not_done_is_seen(monkeypatch):
    monkeypatch.setattr(benchmark, "timed", fake_timed([1.0], works=False))
    with pytest.raises(AssertionError):
        benchmark.bandwidth(CPU, 1, torch.zeros(1), 4000)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, pin_memory=False, **k: randn(*a, **k))
    with pytest.raises(AssertionError, match="h2d, pageable, blocking"):
        benchmark.transfers(STAND_IN, 1, 4000)
    # the second transfer finds the bytes of the first at the target: they must not pass for its own
    first = iter([True, True])
    monkeypatch.setattr(benchmark, "timed", lambda *a, **k: fake_timed([1.0], works=next(first, False))(*a, **k))
    with pytest.raises(AssertionError, match="h2d, pageable, non-blocking"):
        benchmark.transfers(STAND_IN, 1, 4000)


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((7, 0), {"fp32", "fp16"}),
        ((7, 5), {"fp32", "fp16", "int8"}),
        ((8, 0), {"fp32", "tf32", "bf16", "fp16", "int8"}),
        ((8, 9), set(products.TYPES)),
        ((12, 0), set(products.TYPES)),
    ],
)
def test_types_by_compute_capability(monkeypatch, capability, native):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(products, "operands", lambda *_: (None, None))
    monkeypatch.setattr(products, "product", lambda *_: lambda: None)
    reasons = {dtype: products.obstacle(dtype, CUDA) for dtype in products.TYPES}
    assert {dtype for dtype, why in reasons.items() if why is None} == native
    if capability == (8, 0):
        assert reasons["fp8"] == reasons["fp8_fast"] == "no units for it (compute capability 8.0)"


def test_a_kernel_that_refuses_is_a_reason(monkeypatch):
    def refuse():
        raise NotImplementedError("no such kernel\nand a long tail")

    monkeypatch.setattr(products, "product", lambda *_: refuse)
    assert products.obstacle("int8", CPU) == "no such kernel"


@pytest.mark.parametrize("native", [{"fp32"}, {"fp32", "bf16"}])
def test_types_on_a_cpu(monkeypatch, native):
    """What it only emulates is timed and marked; what torch would compute in fp32 is not timed."""
    monkeypatch.setattr(hardware, "native_types", lambda device: (native, "as planted"))
    obstacles = {dtype: why for dtype in products.TYPES if (why := products.obstacle(dtype, CPU))}
    assert obstacles == dict.fromkeys(["tf32", "fp8", "fp8_fast"], "no units for it (as planted)")
    monkeypatch.setattr(benchmark, "timed", fake_timed([1.0]))
    bf16 = benchmark.matmul("matmul", "bf16", (16, 16, 16), CPU, 1, torch.zeros(1))
    assert bf16["native"] == ("bf16" in native)
    assert benchmark_report.type_name(bf16) == ("bf16" if "bf16" in native else "bf16 (emulated)")


def test_fp8_is_timed_with_and_without_fast_accumulation(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, use_fast_accum, **k: asked.append(use_fast_accum))
    x, w = products.operands("fp8", (16, 16, 16), CPU)
    for dtype in ("fp8", "fp8_fast"):
        products.product(dtype, x, w)()
        name = benchmark_report.type_name(a_figure(dtype=dtype))
        assert name == f"fp8, use_fast_accum={asked[-1]}"
    assert asked == [False, True]


def test_fp32_is_fp32_whatever_was_set_before():
    x, w = products.operands("fp32", (16, 16, 16), CPU)
    for before in ("high", "medium"):
        torch.set_float32_matmul_precision(before)
        products.product("fp32", x, w)
        assert torch.get_float32_matmul_precision() == "highest"


# The whole script, small


@pytest.fixture(scope="module")
def small():
    """small(device, folder): main() with small sizes; (exit code, JSON)."""
    patch = pytest.MonkeyPatch()
    patch.setattr(benchmark, "SHAPES", {"cpu": [(16, 16, 16), (32, 64, 128)]})
    patch.setattr(benchmark, "WIDTHS", {"cpu": [(16, 33, 16), (16, 48, 16), (16, 17, 17), (16, 16, 16)]})
    patch.setattr(benchmark, "SQUARES", [16, 1000])
    patch.setattr(benchmark, "ARRAY_BYTES", {"cpu": 2**16})
    patch.setattr(benchmark, "FLUSH_BYTES", {"cpu": 2**16})
    patch.setattr(benchmark, "TYPE_WARM_UP_SECONDS", {"cpu": 0.0})
    patch.setattr(benchmark_timing, "WARM_UP_SECONDS", 0.0)
    patch.setattr(benchmark_timing, "cache_bytes", lambda _: 0)
    one_layer = partial(nn.Transformer, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64)
    layers = SimpleNamespace(Transformer=one_layer, TransformerEncoderLayer=nn.TransformerEncoderLayer)
    patch.setattr(benchmark, "nn", layers)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def main(device, folder):
        file = folder / "numbers.json"
        flags = ["--samples", "3", "--json", str(file), "--plot", str(folder / "roofline.png")]
        with pytest.MonkeyPatch.context() as own:
            own.setattr(sys, "argv", [str(ROOT / SCRIPT), *flags])
            own.setattr(benchmark.runtime, "single_device", lambda _: device)
            return benchmark.main(), json.loads(file.read_text())

    yield main
    torch.set_num_threads(threads)
    patch.undo()


KEYS = {"kind", "dtype", "shape", "median", "min", "max", "n", "unit", "peak", "share_of_peak", "share_of_ceiling"}


def test_small_run_on_a_cpu(small, tmp_path, capsys, monkeypatch):
    order = []  # of warm-ups by type and of the products measured after them
    monkeypatch.setattr(benchmark, "warm_up", lambda work, device, s: order.append((work().shape.numel(), s)))
    matmul = benchmark.matmul
    monkeypatch.setattr(benchmark, "matmul", lambda *args: order.append((*args[:3],)) or matmul(*args))
    monkeypatch.setattr(hardware, "native_types", lambda device: ({"fp32", "bf16", "int8"}, "as planted"))
    code, summary = small(CPU, tmp_path)
    out = capsys.readouterr().out
    assert {f["dtype"] for f in summary["measurements"] if not f["native"]} == {"fp16"}
    assert "fp16 (emulated)" in out
    assert summary["under_load"] == summary["after_matmuls"]  # on a CPU: its name and threads
    assert (summary["array_bytes"], summary["flush_bytes"], summary["type_warm_up_seconds"]) == (2**16, 2**16, 0)
    for kind, dtypes, sizes in (("matmul", ["fp32", "bf16", "fp16", "int8"], "SHAPES"), ("width", ["bf16"], "WIDTHS")):
        for dtype in dtypes:
            shapes = getattr(benchmark, sizes)["cpu"]
            m, n, _ = max(shapes, key=math.prod)
            assert order[: 1 + len(shapes)] == [(m * n, 0), *((kind, dtype, shape) for shape in shapes)]
            order = order[1 + len(shapes) :]
    assert order == []
    assert (code, summary["verdict"], summary["bugs"]) == (0, None, [])
    assert (summary["device"], summary["script"], summary["world_size"]) == ("cpu", SCRIPT, 1)
    found = summary["measurements"]
    assert all(f.keys() >= KEYS for f in found)
    assert all(0 < f["min"] <= f["median"] <= f["max"] and f["n"] == 3 for f in found)
    assert {f["dtype"] for f in found if f["kind"] == "matmul"} == {"fp32", "bf16", "fp16", "int8"}
    kinds = [f["kind"] for f in found]
    assert kinds.count("matmul") == 8
    passes = {"encoder_layer", "transformer", "transformer_by_default"}
    assert {*kinds} == {"matmul", "width", "copy", "triad", "launch", "square"} | passes
    for dtype, ceiling in summary["ceilings"].items():
        shares = [f["share_of_ceiling"] for f in found if f["dtype"] == dtype and f["unit"] == "FLOP/s"]
        assert dtype == "memory" or max(shares) == 1
        assert ceiling > 0
    assert all(f["peak"] is None for f in found)
    # what a CPU cannot show is named, and null
    assert summary["not_measured"].keys() == {"tf32", "fp8", "fp8_fast", "between host and GPU", "CPU against GPU"}
    assert out.count("not measured: ") == 5
    gpu_sides = ["transformer_cpu_over_gpu", "square_1000_cpu_over_gpu", "crossover_size", "tf32_over_fp32"]
    assert [summary[key] for key in gpu_sides] == [None] * 4
    assert summary["bf16_over_fp32"] == pytest.approx(summary["ceilings"]["bf16"] / summary["ceilings"]["fp32"])
    assert "checked: 12 products in fp32, bf16, fp16, int8 against float64" in out
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_beside_a_cpu_and_with_impossible_rates(small, tmp_path, capsys, monkeypatch):
    """The CPU once more in the place of a GPU that a data sheet gives next to nothing: every rate is a BUG."""
    monkeypatch.setattr(hardware, "peak_flops", lambda name, dtype: 1.0 if dtype == "bf16" else 1e30)
    monkeypatch.setattr(hardware, "highest_flops", lambda name, dtype, clock: hardware.peak_flops(name, dtype))
    monkeypatch.setattr(hardware, "memory_bandwidth", lambda name: 1e30)
    monkeypatch.setattr(hardware, "native_types", lambda device: ({"fp32", "bf16", "int8"}, "as planted"))
    code, summary = small(STAND_IN, tmp_path)
    out = capsys.readouterr().out
    assert (code, summary["verdict"]) == (1, "BUG")
    bf16 = [f for f in summary["measurements"] if f["dtype"] == "bf16"]
    assert len(summary["bugs"]) == len(bf16) == out.count("BUG: ") > 0
    assert all(f["share_of_peak"] == pytest.approx(f["median"]) for f in bf16)
    # both sides are there now
    median = {f["what"]: f["median"] for f in summary["measurements"] if f["kind"] == "square"}
    assert median.keys() == {f"{n}, {place}" for n in (16, 1000) for place in ("cpu", "gpu", "gpu with copies")}
    assert summary["square_1000_cpu_over_gpu"] == pytest.approx(median["1000, cpu"] / median["1000, gpu"])
    assert summary["transformer_cpu_over_gpu"] > 0
    assert {f["kind"] for f in summary["measurements"]} >= {"launch", "round_trip"}
    assert "CPU against GPU" not in summary["not_measured"]


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert benchmark_report.plot_roofline([], {"memory": 1.0}, "cpu", tmp_path / "none.png") is False
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--samples", "0"], "--samples"), (["--plot", "/nowhere/at/all.png"], "--plot"), ([], "runs/roofline.png")],
)
def test_what_cannot_be_is_one_line_before_anything_is_measured(tmp_path, flags, named):
    (tmp_path / "runs").touch()  # where the default plot would go
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert named in result.err
    assert result.out == ""


def test_the_default_plots_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.plot_file("runs/roofline.png") == Path("runs/roofline.png")
    assert Path("runs").is_dir()
    for name in ("roofline", "roofline.txt", "elsewhere/roofline"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"does not end with \.png"):
            cli.plot_file(name)
    assert not Path("elsewhere").exists()


# On a GPU: one run, looked at by all


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return {"folder": tmp_path_factory.mktemp("gpu")}


@pytest.fixture
def on_gpu(gpus, measured):
    """The JSON of a real run there."""
    if "summary" not in measured:
        folder = measured["folder"]
        flags = ["--device", "cuda", "--samples", "3", "--json", folder / "n.json", "--plot", folder / "roofline.png"]
        env = {**clean_env(), "CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
        del env["OMP_NUM_THREADS"]
        command = [sys.executable, ROOT / SCRIPT, *flags]
        result = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        measured["summary"] = json.loads((folder / "n.json").read_text())
    return measured["summary"]


@pytest.mark.gpu
def test_gpu_rates_are_below_the_peaks(on_gpu):
    known = hardware.peak(on_gpu["device"]) is not None
    assert (on_gpu["verdict"], on_gpu["bugs"]) == ("ok" if known else None, [])
    for f in on_gpu["measurements"]:
        assert 0 < f["min"] <= f["median"] <= f["max"]
        assert f["limit"] is None or f["max"] <= f["limit"]


@pytest.mark.gpu
def test_gpu_types_are_those_of_its_compute_capability(on_gpu):
    capability = tuple(map(int, on_gpu["compute_capability"].split(".")))
    native = {dtype for dtype, since in hardware.CUDA_SINCE.items() if capability >= since}
    native |= {"fp8_fast"} if "fp8" in native else set()
    assert {f["dtype"] for f in on_gpu["measurements"] if f["kind"] == "matmul"} == native
    assert on_gpu["not_measured"].keys() == products.TYPES.keys() - native
    assert all(f["native"] for f in on_gpu["measurements"])


@pytest.mark.gpu
def test_gpu_clocks_are_read_under_load(on_gpu):
    """While it multiplies it needs more power than before it began, and its clocks are not those of an idle GPU."""
    loaded = on_gpu["under_load"]
    if loaded["power_watts"] is None:
        pytest.skip("the driver does not tell its power")
    assert loaded["power_watts"] > on_gpu["power_watts"]
    assert loaded["sm_clock_mhz"] > 0.25 * on_gpu["sm_clock_max_mhz"]  # a card of 70 W goes far down


@pytest.mark.gpu
def test_gpu_shows_what_a_cpu_cannot(on_gpu, measured):
    kinds = [f["kind"] for f in on_gpu["measurements"]]
    assert kinds.count("h2d") == kinds.count("d2h") == kinds.count("h2d_call") == 4
    assert {"launch", "round_trip", "encoder_layer", "transformer"} <= {*kinds}
    assert on_gpu["transformer_cpu_over_gpu"] > 0
    assert on_gpu["crossover_size"] in [None, *benchmark.SQUARES]
    assert on_gpu["flush_bytes"] >= 2 * on_gpu["l2_cache_bytes"]
    assert on_gpu["type_warm_up_seconds"] >= 0.5
    assert (measured["folder"] / "roofline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
