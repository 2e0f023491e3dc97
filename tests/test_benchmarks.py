"""What the benchmarks make of their measurements; the measuring itself is theirs, and no test's business."""

import json

import pytest
from support.chapter import load

from common import hardware

gpu_report, text, shared = (load(f"benchmarks/{name}.py") for name in ("gpu_report", "_gpu_report_text", "_shared"))
H200 = "NVIDIA H200"


def measured(tokens_per_second: float) -> dict:
    """What a run gives, as far as the report reads it."""
    windows = [0.9 * tokens_per_second, 1.1 * tokens_per_second]
    return {
        "device": H200,
        "tokens_per_second": tokens_per_second,
        "windows": windows,
        "peak_memory_bytes": 2**30,
        "last_loss": 3.0,
    }


@pytest.fixture
def report() -> "text.Report":
    report = text.Report({"gpu": H200, "sm_clock_max_mhz": 1980, "transformers": "5", "accelerate": "1"}, batch_size=32)
    report.ceilings = {"matmul": [7e14, 8e14], "copy": [4e12, 4.1e12]}
    return report


def verdicts(report: "text.Report") -> dict[str, str]:
    """Verdict by the beginning of the claim."""
    return {v["claim"].split(":")[0]: v["verdict"] for v in text.summarize(report)["verdicts"]}


def test_a_rate_above_the_sheet_is_a_bug_only_above_the_highest_clock(report):
    sheet = hardware.peak_flops(H200, "bf16")
    claim = "matmul"
    for share, verdict in ((0.9, "ok"), (1.05, "ok"), (1.1, "BUG")):  # 1,980 MHz is 8 % above the sheet's 1,830
        report.ceilings["matmul"] = [share * sheet]
        assert verdicts(report)[claim] == verdict
    report.about["sm_clock_max_mhz"] = None
    report.ceilings["matmul"] = [1.05 * sheet]
    assert verdicts(report)[claim] == "BUG"


def test_mfu_is_a_share_of_the_sheet_and_ratios_have_a_target(report):
    per_token = text.summarize(report)["flops_per_token"]
    at_peak = hardware.peak_flops(H200, "bf16") / per_token
    report.commands = dict.fromkeys(text.TITLES, "command")
    report.runs = {"ours": [measured(0.46 * at_peak)], "trainer": [measured(0.44 * at_peak)]}
    figures = text.summarize(report)
    assert figures["training"]["ours"]["mfu"]["median"] == pytest.approx(0.46)
    found = verdicts(report)
    assert found[f"MFU of {text.TITLES['ours']}, is at least 45%"] == "met"
    ratio = f"{text.TITLES['ours']}, reaches at least 1.05 of the tokens/s of {text.TITLES['trainer']}"
    assert found[ratio] == "missed"  # 0.46 / 0.44 = 1.045
    report.runs["trainer"] = [measured(0.43 * at_peak)]
    assert verdicts(report)[ratio] == "met"
    assert "| 46.0% |" in text.write_up(report, text.summarize(report))


def test_every_part_is_on_disk_when_it_is_over(report, monkeypatch, tmp_path):
    """A kill leaves what was measured; every kind of run is started; a run of ours that fails is a failure."""
    monkeypatch.setattr(shared, "RESULTS", tmp_path)
    ran = []

    def on_disk() -> dict:
        [file] = tmp_path.glob("nvidia-h200-*.json")
        return json.loads(file.read_text())

    def run_one(kind, flags, env, timeout):
        if ran:
            assert on_disk()["training"][ran[-1]]["tokens_per_second"]["n"] >= 1
        if kind == "ddp":
            raise shared.Failed("exit code 1: no NCCL here", "a traceback")
        ran.append(kind)
        clock[0] += 60
        return measured(1e5)

    clock = [0.0]
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_report, "run_one", run_one)
    monkeypatch.setattr(gpu_report, "start", lambda command, env, timeout: "said")
    gpu_report.measure_training(report, {}, 600, "all")
    assert ran == [kind for kind in text.TITLES if kind != "ddp"] + ["ours", "trainer"] * ((len(ran) - 6) // 2)
    assert len(ran) >= 8
    left = on_disk()
    assert left["training"]["ddp"]["failed"] == "exit code 1: no NCCL here"
    assert [chapter["output"] for chapter in left["chapters"]] == ["said"] * len(gpu_report.CHAPTERS)
    [written] = tmp_path.glob("nvidia-h200-*.md")
    assert "FAILED: 05_ddp/train.py" in written.read_text()


def test_a_command_that_fails_keeps_what_it_said(tmp_path):
    code = "import sys; print('before'); sys.exit('ValueError: the reason')"
    with pytest.raises(shared.Failed, match="exit code 1: ValueError: the reason") as caught:
        shared.start([shared.sys.executable, "-c", code], {}, 60)
    assert "before" in caught.value.output
