"""01_devices/benchmark.py: wrong results and impossible rates are seen.

No test asks how fast anything is.
"""

import json
import subprocess
import sys

import pytest
import torch
from support.chapter import load
from support.harness import ROOT, clean_env, run, with_fault

from common import hardware

SCRIPT = "01_devices/benchmark.py"
benchmark = load(SCRIPT)
bench = benchmark._benchmark
machine = benchmark._machine

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
TINY = {"samples": 1, "flush": torch.zeros(1)}


def test_a_wrong_product_and_a_rate_above_the_peak_are_seen(monkeypatch):
    monkeypatch.setattr(benchmark, "WARM_UP_SECONDS", 0.0)
    right = benchmark.time_matmul("matmul", "bf16", (16, 16, 16), CPU, **TINY)
    bench.add_shares([right], "cpu", None)
    bench.check([right])
    with pytest.raises(AssertionError, match=r"bf16.*relative error"):
        bench.check([{**right, "relative_error": 0.5}])
    monkeypatch.setattr(benchmark, "make_matmul", lambda dtype, x, w: lambda: (x @ w.t()) * 1.1)
    wrong = benchmark.time_matmul("matmul", "bf16", (16, 16, 16), CPU, **TINY)
    with pytest.raises(AssertionError, match="relative error"):
        bench.check([{**right, "relative_error": wrong["relative_error"]}])

    monkeypatch.setattr(hardware, "peak_flops", lambda name, dtype: 10.0)
    monkeypatch.setattr(machine, "highest_flops", lambda name, dtype, clock: 11.0)
    for rates in ([10.0, 10.5, 11.0], [1.0, 2.0, 11.5]):  # one sample above is enough
        row = bench.make_row(
            "matmul",
            "a test",
            "bf16",
            (16,),
            "FLOP/s",
            rates,
            relative_error=0.0,
            flop_per_byte=1.0,
        )
        bench.add_shares([row], "a GPU", 1980.0)
        assert row["peak_share"] == pytest.approx(row["median"] / 10)
        if max(rates) <= 11:
            bench.check([row])
        else:
            with pytest.raises(AssertionError, match="BUG"):
                bench.check([row])


def test_work_that_is_not_done_is_seen(monkeypatch):
    monkeypatch.setattr(benchmark, "timed", lambda *_, **__: [1.0])
    with pytest.raises(AssertionError):
        benchmark.time_triad(CPU, array_bytes=2**16, **TINY)


def test_a_run_on_a_cpu_says_what_it_cannot_show(tmp_path):
    # arrays that take no time, and small matmuls
    file = with_fault(SCRIPT, tmp_path, '"cpu": 2**28', '"cpu": 2**22')
    file.write_text(
        file.read_text(encoding="utf-8")
        .replace("50_257, 256", "257, 256")
        .replace("50_304, 256", "320, 256"),
        encoding="utf-8",
    )
    result = run(
        file,
        tmp_path,
        "--device",
        "cpu",
        "--samples",
        "1",
        "--json",
        "n.json",
        "--plot",
        "roofline.png",
    )
    assert result.code == 0, result.out + result.err
    summary = json.loads((tmp_path / "n.json").read_text(encoding="utf-8"))
    assert {"between host and GPU", "CPU against GPU"} <= summary["not_measured"].keys()
    assert (summary["crossover_size"], summary["square_1000_cpu_over_gpu"]) == (None, None)
    rows = {row["kind"]: row for row in summary["rows"]}
    assert rows.keys() >= {
        "matmul",
        "width",
        "triad",
        "launch",
        "square",
        "transformer",
        "transformer_by_default",
    }
    assert all(0 < row["min"] <= row["median"] <= row["max"] for row in summary["rows"])
    assert rows["triad"]["flop_per_byte"] == pytest.approx(1 / 6)
    native, _ = machine.native_types(CPU)
    for row in summary["rows"]:
        if row["kind"] == "matmul":
            (m, n, k), size = row["shape"], {"fp32": 4, "bf16": 2, "fp16": 2}.get(row["dtype"])
            assert row["native"] is (row["dtype"] in native)
            assert size is None or row["flop_per_byte"] == pytest.approx(
                2 * m * n * k / (size * (m * k + n * k + m * n))
            )
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    "flags", [["--samples", "0"], ["--plot", "/nowhere/at/all.png"], ["--device", "cuda"]]
)
def test_what_cannot_be_is_one_line_before_anything_is_measured(tmp_path, flags):
    result = run(SCRIPT, tmp_path, *flags)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1), (
        result.out + result.err
    )
    assert all(word in result.err for word in flags)


@pytest.mark.gpu
def test_on_a_gpu(gpus, tmp_path):
    """The types of its compute capability, power read under load, and what a CPU cannot show."""
    flags = ["--device", "cuda", "--samples", "3", "--json", "n.json", "--plot", "roofline.png"]
    env = {**clean_env(), "CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    del env["OMP_NUM_THREADS"]
    command = [sys.executable, ROOT / SCRIPT, *flags]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "n.json").read_text(encoding="utf-8"))
    native = machine.native_types(CUDA)[0]
    native |= {"fp8_fast"} if "fp8" in native else set()
    assert {found["dtype"] for found in summary["rows"] if found["kind"] == "matmul"} == native
    assert summary["not_measured"].keys() == benchmark.DTYPES.keys() - native
    assert {"h2d", "d2h"} <= {found["kind"] for found in summary["rows"]}
    loaded = summary["under_load"]
    assert loaded["power_watts"] is None or loaded["power_watts"] > summary["power_watts"]
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
