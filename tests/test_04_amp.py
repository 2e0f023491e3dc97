"""04_amp/train.py: precision, loss scaling, schedule, and what it tells."""

import contextlib
import itertools
import json
import math
import os
import pty
import subprocess
import termios
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import saved
from support.harness import TINY, clean_env, command, needs_compiler, run, tiny_flags, train

from common import data, hardware, model, report, shapes

SCRIPT = "04_amp/train.py"


def test_small_updates_are_kept_in_bf16(tmp_path):
    """At this rate a bf16 weight of 0.02 would not move: its neighbours are 6e-5 away."""
    result = train(SCRIPT, tmp_path, "--dtype", "bf16", "--lr", 1e-5, "--weight-decay", 0, "--steps", 5)
    config = shapes.load_config(str(tmp_path / "tiny.json"), 256, 32)
    initial = model.build(str(tmp_path / "tiny.json"), config, seed=0).state_dict()
    trained = saved(tmp_path, 5)["model"]
    assert {t.dtype for t in trained.values()} == {torch.float32}
    moved = {name: (trained[name] != initial[name]).float().mean().item() for name in initial}
    seldom = {"model.embed_tokens.weight"}  # bytes that do not occur have no gradient
    assert min(share for name, share in moved.items() if name not in seldom) > 0.9
    assert "matmuls in torch.bfloat16, weights and optimizer state kept in torch.float32" in result.out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_follows_fp32(tmp_path, dtype):
    fp32 = train(SCRIPT, tmp_path / "fp32", "--dtype", "fp32")
    low = train(SCRIPT, tmp_path / dtype, "--dtype", dtype)
    assert low.column("loss") != fp32.column("loss")
    assert low.column("loss") == pytest.approx(fp32.column("loss"), rel=0.01)


def test_warmup_then_cosine(tmp_path):
    result = train(SCRIPT, tmp_path, "--lr", 0.01)
    lr = result.column("lr")
    assert lr[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert lr[4] == pytest.approx(0.01)
    assert all(a > b for a, b in itertools.pairwise(lr[4:]))
    assert 0.001 < lr[-1] < 0.0012


def test_the_bare_script_learns_and_tells(tmp_path):
    """Only the number of steps is not the default: nano, the standard library, bf16 where the CPU has units for it."""
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--steps", 20, "--json", "s.json")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert set(summary) >= set(report.SUMMARY)
    assert summary["script"] == SCRIPT
    dtype = hardware.choose_dtype("auto", torch.device("cpu"))  # tests/test_hardware.py plants CPUs of both kinds
    assert (summary["model"], summary["dtype"], summary["world_size"]) == ("nano", dtype, 1)
    assert (summary["steps"], summary["tokens"], summary["parameters"]) == (20, 20 * 24 * 64, 4_812_032)
    corpus, config = data.load_corpus("stdlib", "bytes"), shapes.load_config("nano", 256, 64)
    sizes = SimpleNamespace(seq_len=64, global_batch_size=24, micro_batch_size=None, seed=0)
    first_batch = next(data.Batches(corpus, sizes, rank=0, world_size=1).stream(0))
    with torch.no_grad():
        untrained = model.build("nano", config, seed=0)(*first_batch).item()
    assert untrained == pytest.approx(math.log(256), abs=0.3)  # it knows nothing yet
    assert summary["first_loss"] == pytest.approx(untrained, rel=0.01)  # bf16 rounds
    assert summary["last_loss"] < 3.5
    assert summary["val_loss"] < 3.5
    assert summary["mfu"] is None  # nobody knows this CPU's peak
    assert summary["tokens_per_second"] > 0
    assert 2**27 < summary["peak_memory_bytes"] < 2**33
    run_dir = next((tmp_path / "runs").iterdir())
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert "\r" not in result.out + result.err  # no progress bar where there is no terminal


def test_the_progress_bar_is_for_terminals(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (24, 100))
    argv = command(SCRIPT, *tiny_flags(tmp_path))
    process = subprocess.Popen(argv, cwd=tmp_path, env=clean_env(), stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(stderr)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(terminal, 1000):
            shown += piece
    assert process.wait(timeout=600) == 0
    assert b"20/20" in shown
    assert b"100%" in shown


def test_evaluation_is_over_the_held_out_text_in_eval_mode(tmp_path):
    result = train(SCRIPT, tmp_path, "--data", "stdlib", "--eval-every", 8)
    assert [r["step"] for r in result.records if "val_loss" in r] == [8, 16, 20]
    net = model.build("nano", shapes.load_config(str(tmp_path / "tiny.json"), 256, 32), seed=0)
    net.load_state_dict(saved(tmp_path, 20)["model"])
    sequences = data.Sequences(data.load_corpus("stdlib", "bytes").held_out, 32)
    chosen = torch.linspace(0, len(sequences) - 1, 96, dtype=torch.float64).long().tolist()
    with torch.no_grad():
        losses = [net.double()(*(t[None] for t in sequences[i])).item() for i in chosen]
    assert result.summary["val_loss"] == pytest.approx(sum(losses) / 96, rel=1e-5)


@needs_compiler
def test_compiled_equals_eager(tmp_path):
    eager = train(SCRIPT, tmp_path / "eager", "--dtype", "fp32", "--steps", 5)
    compiled = train(SCRIPT, tmp_path / "compiled", "--dtype", "fp32", "--steps", 5, "--compile")
    assert compiled.column("loss") == pytest.approx(eager.column("loss"), rel=1e-5)
