"""launch/debug_hang.py: the rank and the collective that it names are those that were planted."""

import json
import signal

import pytest
from support.harness import (
    holds,
    in_full,
    in_long,
    kill_all,
    launch,
    rank_process,
    run,
    train,
    with_fault,
    with_prelude,
)

SCRIPT = "launch/debug_hang.py"
# a busy machine keeps no rank waiting for so long
PATIENT = ("--device", "cpu", "--timeout", 4, "--json", "s.json")


def summary(folder) -> dict:
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("plant", "rank", "ranks", "what"),
    [
        ("skipped-collective", 0, 2, "loss"),
        in_long("skipped-collective", 2, 3, "loss"),
        in_full("stuck-loader", 0, 3, "gradients"),
        in_long("early-return", 1, 2, "loss"),
    ],
)
def test_the_planted_rank_and_collective_are_named(tmp_path, plant, rank, ranks, what):
    result = run(SCRIPT, tmp_path, "--plant", plant, "--rank", rank, *PATIENT, nproc=ranks)
    assert result.code == 0, result.err
    found = summary(tmp_path)
    assert (found["missing_ranks"], found["collective"]) == ([rank], "all_reduce")
    assert what in found["called_at"]
    others_at = [line for other, line in enumerate(found["at"]) if other != rank]
    assert others_at == [found["called_at"]] * (ranks - 1)  # they wait there
    assert found["at"][rank] != found["called_at"]
    assert found["flight_recorder_agrees"]
    assert "Traceback" not in result.err


@pytest.mark.launch
def test_a_real_torchrun_ends_when_the_hang_is_found(tmp_path):
    result = run(SCRIPT, tmp_path, *PATIENT, nproc=2, warm=False)
    assert result.code == 0, result.err
    assert summary(tmp_path)["named_what_was_planted"]


def test_a_healthy_run_names_nobody(tmp_path):
    """Bare: it starts its ranks itself."""
    result = run(
        SCRIPT, tmp_path, "--plant", "none", "--timeout", 30, "--device", "cpu", "--json", "s.json"
    )
    assert result.code == 0, result.err
    assert (summary(tmp_path)["missing_ranks"], summary(tmp_path)["world_size"]) == ([], 3)


def test_a_wrong_answer_is_a_failure(tmp_path):
    """With a judge that looks away: exit code 1, and nothing left running."""
    blind = with_fault(SCRIPT, tmp_path, "if call != expected]", "if call == expected]")
    result = run(blind, tmp_path, *PATIENT, nproc=2)
    assert result.code == 1, result.err
    assert not summary(tmp_path)["named_what_was_planted"]


@pytest.mark.parametrize(
    ("flags", "words"), [(["--plant", "bug"], ["--plant", "bug"]), (["--rank", 3], ["--rank", "3"])]
)
def test_wrong_flags(tmp_path, flags, words):
    result = run(SCRIPT, tmp_path, *flags, "--device", "cpu")
    assert (result.code, result.out) == (2, "")
    assert all(word in result.err for word in words)


# Rank 1 leaves out its second all_reduce of a loss, or stops in its third optimizer step.
LEFT_OUT = """
import torch.distributed as dist
all_reduce, calls = dist.all_reduce, 0
def skipping(tensor, *args, **how):
    global calls
    calls += tensor.ndim == 0
    if os.environ["RANK"] == "1" and calls == 2:
        return None
    return all_reduce(tensor, *args, **how)
dist.all_reduce = skipping
"""
STUCK = """
import threading, torch
step, calls = torch.optim.AdamW.step, 0
def waits_in_the_optimizer(self, *args, **how):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 3:
        open("stuck", "w").close()
        threading.Event().wait()
    return step(self, *args, **how)
torch.optim.AdamW.step = waits_in_the_optimizer
"""


@pytest.mark.full
def test_advice_4_fsdp_fails_at_the_call_that_a_rank_leaves_out(tmp_path):
    script = with_prelude("06_fsdp_zero/train_fsdp.py", tmp_path, LEFT_OUT)
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    result = train(script, tmp_path, "--steps", 4, nproc=2, code=1, **detail)
    assert "Detected mismatch between collectives on ranks" in result.err


@pytest.mark.full
def test_advice_5_ddp_prints_the_stacks_of_a_stuck_rank(tmp_path):
    script = with_prelude("05_ddp/train.py", tmp_path, STUCK)
    process = launch(script, tmp_path, nproc=2, PYTHONFAULTHANDLER="1")
    try:
        assert holds(process, (tmp_path / "stuck").exists)
        rank_process(process, 1).send_signal(signal.SIGABRT)
        stacks = tmp_path / "stderr"
        assert holds(process, lambda: b"waits_in_the_optimizer" in stacks.read_bytes())
    finally:
        kill_all(process)


@pytest.mark.gpu(n=2)
def test_nccl(tmp_path, gpus):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    for plant in ("skipped-collective", "stuck-loader"):
        flags = ("--plant", plant, "--device", "cuda", "--timeout", 5, "--json", "s.json")
        result = run(SCRIPT, tmp_path, *flags, nproc=2, **visible)
        assert result.code == 0, result.err
        assert summary(tmp_path)["missing_ranks"] == [1]
