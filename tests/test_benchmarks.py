"""What the benchmarks make of their measurements; the measuring itself is theirs, and no test's business."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import ODD, ROOT, config_of, run

from old import exits, hardware, model

gpu_report, text, shared = (load(f"benchmarks/{name}.py") for name in ("gpu_report", "_gpu_report_text", "_shared"))
vs_generate, inference_gpu = (load(f"benchmarks/{name}.py") for name in ("vs_generate", "inference_gpu"))
theirs = load("benchmarks/_generate.py")
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


NESTED = """
import os, sys
sys.path.insert(0, "benchmarks")
import _shared
if sys.argv[2] == "with a handler":
    _shared.end_children_at_sigterm()
pid_to = f"import os; print(os.getpid(), file=open({sys.argv[1]!r}, 'w')); os.read(0, 1)"
_shared.start([sys.executable, "-c", pid_to], dict(os.environ), 600)
"""


@pytest.fixture
def open_input():
    """A standard input that never ends: Popen's own is closed by communicate, and who reads it then ends by itself."""
    read, write = os.pipe()
    yield read
    os.close(read)
    os.close(write)


@pytest.fixture
def nested(tmp_path, request, open_input):
    """A process that waits in `start` for one of its own, and that one."""
    pipe = str(tmp_path / "pid")
    os.mkfifo(pipe)
    command = [shared.sys.executable, "-c", NESTED, pipe, request.param]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=open_input, stdout=subprocess.PIPE)
    with open(pipe) as opened:  # returns when the inner one has come so far
        inner = psutil.Process(int(opened.read()))
    yield process, inner
    if inner.is_running():
        inner.kill()
    process.kill()
    process.wait()


def is_alive(process: psutil.Process) -> bool:
    return bool(psutil.wait_procs([process], timeout=600)[1]) and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("nested", ["with a handler", "without"], indirect=True)
def test_what_a_command_has_started_ends_with_it(nested):
    """As when gpu_report.py has no time left for inference_gpu.py, whose process holds the GPU."""
    process, inner = nested
    assert inner.is_running()
    shared.end(process)
    assert process.returncode is not None
    assert not is_alive(inner)


@pytest.mark.parametrize("nested", ["with a handler"], indirect=True)
def test_a_benchmark_that_is_terminated_takes_its_process_along(nested):
    process, inner = nested
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 128 + signal.SIGTERM
    assert not is_alive(inner)


def test_what_holds_the_output_open_does_not_keep_the_benchmark_waiting(monkeypatch, tmp_path, open_input):
    """A command that does not heed SIGTERM, with a process that writes to the same pipe."""
    monkeypatch.setattr(shared, "PATIENCE_SECONDS", 0.1)
    pipe = str(tmp_path / "pid")
    os.mkfifo(pipe)
    inner = f"import os; print(os.getpid(), file=open({pipe!r}, 'w')); os.read(0, 1)"
    code = "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN); "
    code += f"subprocess.run([sys.executable, '-c', {inner!r}])"
    command = [shared.sys.executable, "-c", code]
    process = subprocess.Popen(command, text=True, stdin=open_input, stdout=subprocess.PIPE)
    with open(pipe) as opened:
        inner = psutil.Process(int(opened.read()))
    shared.end(process)
    assert process.returncode == -signal.SIGKILL
    assert not is_alive(inner)


def test_a_command_without_time_is_no_failed_one(tmp_path):
    with pytest.raises(shared.OutOfTime, match="did not end within 0 s"):
        shared.start([shared.sys.executable, "-c", "import signal; signal.pause()"], dict(os.environ), 0.01)


def decoded(tokens_per_second: float, share: float | None = 0.5, token_ids: tuple[int, ...] = (1, 2)) -> dict:
    """What a process that generates gives, as far as the benchmarks read it."""
    return {
        "decode_tokens_per_second": tokens_per_second,
        "weight_bytes_read_per_second": 1e9 * tokens_per_second,
        "read_bandwidth_bytes_per_second": 2e9 * tokens_per_second,
        "bandwidth_share": share,
        "peak_memory_bytes": 2**30,
        "token_ids": [[*token_ids]],
    }


def test_generate_is_timed_on_our_weights_and_gives_our_tokens(tmp_path):
    """Greedy without a cache, by our model, on a prompt of bytes that its 211 tokens hold."""
    config = config_of(ODD)
    write_folder(tmp_path / "odd", config)
    flags = ["--model", "odd", "--dtype", "fp32", "--device", "cpu", "--max-new-tokens", 7, "--prompt", "abc def"]
    result = run("benchmarks/_generate.py", tmp_path, "r.json", *flags)
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "r.json").read_text())
    net = model.build(str(tmp_path / "odd"), config, seed=0)
    tokens = [*b"abc def"]
    with torch.no_grad():
        for _ in range(7):
            tokens.append(net(torch.tensor([tokens]))[0, -1].argmax().item())
    assert found["token_ids"] == [tokens[-7:]]
    untied = 211 * 36  # of the embedding a step reads a row
    weights = 4 * (sum(parameter.numel() for parameter in net.parameters()) - untied)
    assert found["weight_bytes_read_per_second"] == pytest.approx(weights * found["decode_tokens_per_second"])
    assert found["prompt_tokens"] == 7


def test_the_steps_that_record_a_graph_are_not_timed():
    """generate's second call: a prompt at 10 s, the first token at 11, slow steps up to the sixth, then 0.5 s each."""
    marks = [10, 11, 15, 19, 20, 21, 22, 22.5, 23, 23.5]
    assert theirs.seconds_of(marks, 10, "static") == {
        "prefill_seconds": 1,
        "decode_seconds": 1.5,
        "decode_steps": 3,
        "decoded_tokens": 3,
    }
    dynamic = theirs.seconds_of(marks, 10, "dynamic")
    assert (dynamic["decode_seconds"], dynamic["decode_steps"]) == (12.5, 8)
    with pytest.raises(exits.UserError, match="after 6 new tokens: more than 6"):
        theirs.seconds_of(marks[:7], 10, "static")


def test_decode_ratios_are_taken_round_by_round():
    runs = {
        "generate": [decoded(100), decoded(10)],
        "eager": [decoded(99), decoded(12)],
        "compiled": [decoded(160), decoded(17)],
    }
    sides = vs_generate.sides_of(vs_generate.argparse.Namespace(device="cpu", max_new_tokens=9), "nano")
    found = vs_generate.summarize("nano", sides, runs)
    eager, compiled = found["ratios"]
    assert eager["ratio"] == {"median": pytest.approx(1.095), "min": 0.99, "max": 1.2, "n": 2}
    assert (eager["verdict"], compiled["verdict"]) == ("met", "missed")  # 1.65 of 1.7
    text, whole = vs_generate.write_up({}, [found])
    assert "| compiled | generate |    1.7 |" in text
    assert "07_memory_tricks/quantized_inference.py --json RESULT.json --model nano --dtype fp32" in whole
    runs["compiled"][1] = decoded(17, token_ids=(1, 3))
    with pytest.raises(AssertionError, match="compiled: not the tokens of generate"):
        vs_generate.summarize("nano", sides, runs)


def test_every_model_has_its_sides_and_claims():
    args = vs_generate.argparse.Namespace(device="cpu", max_new_tokens=9)
    for name in (*vs_generate.PLANS, "llama-1b"):
        sides = vs_generate.sides_of(args, name)
        _, _, claims = vs_generate.PLANS.get(name, vs_generate.OTHERS)
        for side, against, target in claims:
            assert side in sides
            assert against in sides
            assert target >= 1
        assert all(flags.count("--weights") == (side != "generate") for side, flags in sides.items())


def test_decode_on_a_gpu_in_turns_with_results_on_disk(monkeypatch, tmp_path):
    """Each case once before any twice; a kill leaves what was measured; a share above the roof is a bug."""
    monkeypatch.setattr(shared, "RESULTS", tmp_path)
    ran, clock = [], [0.0]
    shares = {"bf16": 0.71, "int8": 0.69, "int4": 1.02, "generate": 0.5}

    def run_side(weights, flags, env, timeout):
        if ran:
            [file] = tmp_path.glob("nvidia-h200-inference-*.json")
            assert json.loads(file.read_text())["cases"][ran[-1]]["tokens_per_second"]["n"] >= 1
        if weights == "int8" and "llama-70b int8" in ran:
            raise shared.Failed("exit code 1: out of memory", "a traceback")
        ran.append(f"{flags[1]} {weights}")
        clock[0] += 60
        return decoded(shares[weights] * 100, shares[weights])

    monkeypatch.setattr(inference_gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(inference_gpu, "run_side", run_side)
    cases = inference_gpu.CASES
    assert [case.name for case in cases[:2]] == ["llama-8b bf16", "llama-70b int8"]
    found = inference_gpu.measure({"gpu": H200}, cases, 9, {}, 500)
    names = [case.name for case in cases]
    assert ran == names + [name for name in names if name != "llama-70b int8"] + ["llama-8b bf16"]
    assert found["llama-70b int8"]["failed"] == "exit code 1: out of memory"
    verdicts = {v["claim"]: v["verdict"] for v in inference_gpu.summarize(cases, found)["verdicts"]}
    assert verdicts == {
        "llama-8b bf16: at least 70% of the bandwidth roof": "met",
        "llama-70b int4: below the roof": "BUG",
        "llama-70b int4: at least 55% of the bandwidth roof": "met",
        "llama-70b int8: at least 70% of the bandwidth roof": "missed",
        "llama-8b bf16: faster than transformers' generate, as a ratio": "met",
    }
    [written] = tmp_path.glob("*.md")
    assert "FAILED: llama-70b int8: exit code 1: out of memory" in written.read_text()


def test_a_case_without_time_is_not_run_and_no_failure(monkeypatch, tmp_path):
    """One starts if its guess fits; one that takes longer than thought is ended at the deadline."""
    monkeypatch.setattr(shared, "RESULTS", tmp_path)
    started, clock = [], [0.0]

    def run_side(weights, flags, env, timeout):
        started.append(f"{flags[1]} {weights}")
        if weights == "generate":
            clock[0] += timeout
            raise shared.OutOfTime(f"did not end within {timeout:.0f} s", "")
        clock[0] += 100
        return decoded(50)

    monkeypatch.setattr(inference_gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(inference_gpu, "run_side", run_side)
    cases = inference_gpu.CASES
    found = inference_gpu.measure({"gpu": H200}, cases, 9, {}, 330)
    assert started == ["llama-8b bf16", "llama-8b generate"]
    assert all(own["failed"] is None for own in found.values())
    _, text, _ = inference_gpu.save({"gpu": H200}, cases, found, 9)
    assert "not run: llama-70b int8: no time left: 230 s of about 260 s" in text
    assert "not run: llama-8b generate: no time left: did not end within 230 s" in text
    assert "FAILED" not in text


def test_a_chapter_without_time_is_not_run_and_no_failure(report, monkeypatch, tmp_path):
    monkeypatch.setattr(shared, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_report, "CHAPTERS", [gpu_report.CHAPTERS[0], [gpu_report.DECODE, "--only", "llama-8b"]])
    monkeypatch.setattr(gpu_report.time, "monotonic", lambda: 0.0)

    def start(command, env, timeout):
        raise shared.OutOfTime(f"did not end within {timeout:.0f} s", "as far as it came")

    monkeypatch.setattr(gpu_report, "start", start)
    gpu_report.run_chapters(report, {}, 80)
    assert [chapter["failed"] for chapter in report.chapters] == [None, None]
    assert report.chapters[1]["command"].endswith("--only llama-8b --minutes 1.00")
    assert report.not_run[0].endswith("no time left: did not end within 80 s")
    written = text.write_up(report, text.summarize(report))
    assert "as far as it came" in written
    assert "FAILED" not in written


def test_which_models_a_gpu_has_room_for():
    def room(gib: int) -> list[str]:
        return [case.name for case in inference_gpu.CASES if inference_gpu.fits(case, gib * 2**30)]

    assert room(16) == []  # 8B in bf16 takes 15 GiB, and there is more than weights
    assert room(24) == ["llama-8b bf16", "llama-8b generate"]
    assert room(80) == ["llama-8b bf16", "llama-70b int8", "llama-70b int4", "llama-8b generate"]


def test_every_cut_trains_on_a_world_of_one_what_plain_training_does(monkeypatch):
    """The benchmark compares first losses itself. Every way is in its result, and a way with another loss fails."""
    benchmark = load("benchmarks/model_parallel_gpu.py")
    written = []
    monkeypatch.setattr(benchmark, "write_results", lambda *parts: written.append(parts) or ROOT / "results.md")
    flags = "--model nano --device cpu --seq-len 16 --batch-size 2 --rounds 2 --steps 1"
    monkeypatch.setattr(sys, "argv", ["model_parallel_gpu.py", *flags.split()])
    assert benchmark.main() == 0
    _, _, result, text = written[0]
    ways = [name.split(",")[0] for name in result["ratios"]]
    assert ways == ["tensor"] * 3 + ["pipeline"] + ["context"] * 4 + ["experts over ranks"]
    assert all(ratio["n"] == 2 for ratio in result["ratios"].values())
    assert len(result["claims"]) == 9
    assert all(claim in text for claim in result["claims"])
    losses = {"plain": lambda: torch.tensor(2.0), "twice": lambda: torch.tensor(4.0)}
    with pytest.raises(AssertionError, match=r"twice: a loss of 4\.0 where plain has 2\.0"):
        benchmark.check_first_losses(losses, "plain")
