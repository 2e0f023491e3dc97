"""01_devices/benchmark.py: what is timed, and that wrong results and impossible rates are seen.

What is timed is checked with a clock of our own: no test asks how fast anything is.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.chapter import load
from support.harness import ROOT, clean_env, run

from common import hardware, report

SCRIPT = "01_devices/benchmark.py"
benchmark = load(SCRIPT)
bench, machine = benchmark.bench, benchmark.machine

CPU = torch.device("cpu")
STAND_IN = torch.device("cpu", 0)  # a device beside the CPU, for what a GPU does there
CUDA = torch.device("cuda", 0)
TINY = {"samples": 1, "flush": torch.zeros(1)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(benchmark, "WARM_UP_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ("device", ["wait", "flush", "event", "work", "work", "event", "event's wait"]),
        ("wall", ["wait", "flush", "wait", "work", "wait", "work", "wait"]),
        ("issue", ["wait", "flush", "wait", "work", "work"]),
    ],
)
def test_what_goes_into_a_gpus_queue_and_when_the_cpu_waits_for_it(monkeypatch, clock, expected):
    log = []
    event = SimpleNamespace(record=lambda: log.append("event"), elapsed_time=lambda _: 3000.0)
    event.synchronize = lambda: log.append("event's wait")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    flush = SimpleNamespace(zero_=lambda: log.append("flush"))
    seconds = benchmark.timed(lambda: log.append("work"), CUDA, samples=1, flush=flush, repeat=2, clock=clock)
    assert seconds == [1.5] if clock == "device" else len(seconds) == 1
    assert log == ["work", "wait", *expected, "wait"]


def test_flop_and_bytes_of_a_matmul_of_copy_and_of_triad(monkeypatch):
    monkeypatch.setattr(benchmark, "timed", lambda work, *_, **__: [work(), 0.5][1:])
    row = benchmark.matmul("matmul", "fp32", (32, 64, 128), CPU, **TINY)
    assert row["median"] == 2 * 32 * 64 * 128 / 0.5
    assert row["flop_per_byte"] == 2 * 32 * 64 * 128 / (4 * (32 * 128 + 64 * 128 + 32 * 64))
    copy, triad = benchmark.bandwidth(CPU, array_bytes=4000, **TINY)
    assert (copy["median"], triad["median"]) == (2 * 4000 / 0.5, 3 * 4000 / 0.5)
    assert triad["flop_per_byte"] == pytest.approx(2 / 12)


def row(**own) -> dict:
    values = own.pop("values", [1.0])
    return benchmark.run("matmul", "a test", "bf16", (16, 16, 16), "FLOP/s", values, **own)


def test_a_wrong_product_and_a_rate_above_the_peak_are_seen(monkeypatch):
    right = benchmark.matmul("matmul", "bf16", (16, 16, 16), CPU, **TINY)
    triad = benchmark.run("triad", "a test", "fp32", (1,), "B/s", [1.0], flop_per_byte=1 / 6)
    bench.compare([right, triad], "cpu", None)
    assert benchmark.check([right, triad])[1] == "peaks of this device: not known"
    with pytest.raises(AssertionError, match=r"bf16.*relative error 5"):
        benchmark.check([{**right, "relative_error": 0.5}])
    monkeypatch.setattr(bench, "matmul", lambda dtype, x, w: lambda: (x @ w.t()) * 1.1)
    wrong = benchmark.matmul("matmul", "bf16", (16, 16, 16), CPU, **TINY)
    assert wrong["relative_error"] > bench.TYPES["bf16"][1]

    monkeypatch.setattr(hardware, "peak_flops", lambda name, dtype: 10.0)
    monkeypatch.setattr(machine, "highest_flops", lambda name, dtype, clock: 11.0)
    for values, fine in (([10.0, 10.5, 11.0], True), ([1.0, 2.0, 11.5], False)):  # one sample above is enough
        rows = [row(values=values, relative_error=0.0, flop_per_byte=1.0)]
        bench.compare(rows, "a GPU", 1980.0)
        assert rows[0]["peak_share"] == pytest.approx(rows[0]["median"] / 10)
        if fine:
            assert benchmark.check(rows)[1] == "no rate is above the peak"
        else:
            with pytest.raises(AssertionError, match="BUG in the timing"):
                benchmark.check(rows)


def test_work_that_is_not_done_is_seen(monkeypatch):
    monkeypatch.setattr(benchmark, "timed", lambda *_, **__: [1.0])
    with pytest.raises(AssertionError):
        benchmark.bandwidth(CPU, array_bytes=2**16, **TINY)


@pytest.mark.parametrize("native", [{"fp32"}, {"fp32", "bf16"}])
def test_what_a_cpu_emulates_is_marked_and_what_torch_would_compute_in_fp32_is_not_timed(monkeypatch, native):
    monkeypatch.setattr(machine, "native_types", lambda device: (native, "as planted"))
    obstacles = {dtype: why for dtype in bench.TYPES if (why := bench.obstacle(dtype, CPU))}
    assert obstacles == dict.fromkeys(["tf32", "fp8", "fp8_fast"], "no units for it (as planted)")
    found = benchmark.matmul("matmul", "bf16", (16, 16, 16), CPU, **TINY)
    bench.compare([found], "cpu", None)
    assert found["type"] == ("bf16" if "bf16" in native else "bf16 (emulated)")


def test_fp8_is_timed_with_and_without_fast_accumulation_and_fp32_is_fp32(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, use_fast_accum, **k: asked.append(use_fast_accum))
    x, w = bench.operands("fp8", (16, 16, 16), CPU)
    for dtype in ("fp8", "fp8_fast"):
        bench.matmul(dtype, x, w)()
    assert asked == [False, True]
    torch.set_float32_matmul_precision("high")
    bench.matmul("fp32", x, w)
    assert torch.get_float32_matmul_precision() == "highest"


def test_beside_a_cpu_the_ratios_and_the_crossover(monkeypatch):
    """The CPU once more in the place of a GPU."""
    monkeypatch.setattr(benchmark, "SQUARES", [16, 32, 64])
    planted = {("cpu", 16): 1, ("gpu", 16): 2, ("cpu", 32): 4, ("gpu", 32): 3, ("cpu", 64): 9, ("gpu", 64): 3}
    rows = benchmark.against_cpu(STAND_IN, 1)
    for found in rows:
        if found["kind"] == "square":
            place, _, copies = found["place"].partition(" with ")
            found["median"] = planted[place, found["shape"][-1]] + (3.5 if copies else 0)
    widths = [benchmark.run("width", "a test", "bf16", (1,), "FLOP/s", [value]) for value in (2.0, 3.0, 4.0, 5.0)]
    ratios = bench.ratios(rows + widths, {"fp32": 2.0, "bf16": 5.0})
    assert (ratios["crossover_size"], ratios["crossover_size_with_copies"]) == (32, 64)
    assert (ratios["square_64_cpu_over_gpu"], ratios["bf16_over_fp32"], ratios["tf32_over_fp32"]) == (3, 2.5, None)
    assert (ratios["gain_by_padded_vocabulary"], ratios["gain_by_even_hidden_size"]) == (0.5, 0.25)
    assert ratios["transformer_cpu_over_gpu"] > 0


def test_a_run_on_a_cpu_says_what_it_cannot_show(tmp_path):
    flags = ["--device", "cpu", "--samples", "1", "--json", "n.json", "--plot", "roofline.png"]
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, result.out + result.err
    summary = json.loads((tmp_path / "n.json").read_text())
    assert set(summary) >= set(report.SUMMARY)
    assert {"between host and GPU", "CPU against GPU"} <= summary["not_measured"].keys()
    assert (summary["crossover_size"], summary["transformer_cpu_over_gpu"]) == (None, None)
    kinds = {"matmul", "width", "copy", "triad", "launch", "round_trip", "square"}
    assert {found["kind"] for found in summary["rows"]} >= kinds | {"encoder_layer", "transformer_by_default"}
    assert all(0 < found["min"] <= found["median"] <= found["max"] for found in summary["rows"])
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("flags", [["--samples", "0"], ["--plot", "/nowhere/at/all.png"]])
def test_what_cannot_be_is_one_line_before_anything_is_measured(tmp_path, flags):
    result = run(SCRIPT, tmp_path, *flags)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert flags[0] in result.err


@pytest.mark.gpu
def test_on_a_gpu(gpus, tmp_path):
    """The types of its compute capability, power read under load, and what a CPU cannot show."""
    flags = ["--device", "cuda", "--samples", "3", "--json", "n.json", "--plot", "roofline.png"]
    env = {**clean_env(), "CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    del env["OMP_NUM_THREADS"]
    command = [sys.executable, ROOT / SCRIPT, *flags]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "n.json").read_text())
    native = machine.native_types(CUDA)[0]
    native |= {"fp8_fast"} if "fp8" in native else set()
    assert {found["dtype"] for found in summary["rows"] if found["kind"] == "matmul"} == native
    assert summary["not_measured"].keys() == bench.TYPES.keys() - native
    kinds = [found["kind"] for found in summary["rows"]]
    assert kinds.count("h2d") == kinds.count("d2h") == kinds.count("h2d_call") == 4
    loaded = summary["under_load"]
    assert loaded["power_watts"] is None or loaded["power_watts"] > summary["power_watts"]
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
