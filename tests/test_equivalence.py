"""The same run, cut differently: processes, micro-batches, interruptions, background saves. One curve."""

import itertools
import shutil
import threading
from pathlib import Path

import pytest
import torch
from support.checkpoints import assert_near, gradients, moments, saved
from support.harness import ROOT, TINY, train
from torch.distributed.checkpoint import FileSystemReader

from common import checkpoint

DDP, AMP = "05_ddp/train.py", "04_amp/train.py"
EVERY_STEP = ("--save-every", 1, "--keep", 100)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """94 training sequences of 32 bytes: with batches of 12 an epoch ends in the middle of a step."""
    text = (ROOT / "05_ddp/train.py").read_bytes()[:3200]
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_bytes(text)
    return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus):
    """fp32 runs of 20 steps over 2.5 epochs, by number of processes, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("runs")
    flags = ("--data", corpus, "--deterministic", *EVERY_STEP)
    return {n: train(DDP, folder / str(n), *flags, nproc=n) for n in (1, 2, 3)}


def assert_same_curve(a, b, tolerance: float = 1e-5) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert len(a.column(column)) == len(b.column(column)) > 0
        assert a.column(column) == pytest.approx(b.column(column), rel=tolerance), column


@pytest.mark.parametrize("n", [2, 3])
def test_more_processes_give_the_same_losses_and_gradients(runs, n):
    assert runs[n].summary["world_size"] == n
    assert len(runs[n].column("loss")) == 20
    assert_same_curve(runs[1], runs[n])
    torch.testing.assert_close(gradients(runs[n].folder), gradients(runs[1].folder), rtol=1e-5, atol=1e-7)
    for step in (7, 20):  # and the running mean of all gradients until then
        assert_near(moments(runs[n].folder, step), moments(runs[1].folder, step))


def test_one_process_without_torchrun_equals_the_previous_chapter(runs, tmp_path, corpus):
    amp = train(AMP, tmp_path / "amp", "--data", corpus, "--dtype", "fp32", "--deterministic")
    ddp = train(DDP, tmp_path / "ddp", "--data", corpus, "--dtype", "fp32", "--deterministic")
    assert amp.summary["weights_sha256"] == ddp.summary["weights_sha256"] == runs[1].summary["weights_sha256"]
    assert amp.column("loss") == ddp.column("loss") == runs[1].column("loss")


@pytest.mark.parametrize(("script", "n", "micro"), [(AMP, None, 3), (DDP, 2, 2), (DDP, 3, 1)])
def test_micro_batches_equal_one_batch(runs, tmp_path, corpus, script, n, micro):
    flags = ("--micro-batch-size", micro, "--data", corpus, "--dtype", "fp32", *EVERY_STEP)
    result = train(script, tmp_path, *flags, nproc=n)
    assert_same_curve(runs[1], result)
    torch.testing.assert_close(gradients(tmp_path), gradients(runs[1].folder), rtol=1e-5, atol=1e-7)


def interrupted(result, step: int, folder: Path) -> Path:
    """A copy of a run as a kill after `step` would have left it."""
    shutil.copytree(result.folder, folder)
    for saved_at in (folder / "run").glob("step-*"):
        if int(saved_at.name.removeprefix("step-")) > step:
            shutil.rmtree(saved_at)
    return folder


# 8: the first epoch ends inside that step; 3 processes: the order of a sum of three counts
@pytest.mark.parametrize(("n", "step"), [(2, 1), (2, 8), (2, 19), (3, 8)])
def test_resumed_is_uninterrupted_to_the_bit(runs, tmp_path, corpus, n, step):
    folder = interrupted(runs[n], step, tmp_path / "resumed")
    resumed = train(DDP, folder, "--data", corpus, "--deterministic", *EVERY_STEP, "--resume", nproc=n)
    assert f"resuming from {folder}/run/step-{step:08d}" in resumed.out
    assert resumed.summary["weights_sha256"] == runs[n].summary["weights_sha256"]
    assert resumed.column("loss") == runs[n].column("loss")
    assert resumed.column("step") == runs[n].column("step")
    for key in ("first_loss", "last_loss", "val_loss", "steps", "tokens"):
        assert resumed.summary[key] == runs[n].summary[key]


@pytest.mark.parametrize("n", [1, 3])
def test_a_run_saved_on_two_processes_goes_on_on_others(runs, tmp_path, corpus, n):
    folder = interrupted(runs[2], 9, tmp_path / "moved")
    flags = ("--micro-batch-size", 2, "--data", corpus, "--resume")
    resumed = train(DDP, folder, *flags, nproc=n)
    assert len(resumed.column("loss")) == 20
    assert_same_curve(runs[2], resumed)
    assert_near(saved(folder, 20)["model"], saved(runs[2].folder, 20)["model"])


def test_fp16_with_accumulation_moves_between_numbers_of_processes(tmp_path, corpus):
    flags = ("--data", corpus, "--dtype", "fp16", "--micro-batch-size", 2)
    whole = train(DDP, tmp_path / "whole", *flags, *EVERY_STEP, nproc=2)
    for n in (1, 3):
        folder = interrupted(whole, 9, tmp_path / str(n))
        resumed = train(DDP, folder, *flags, "--resume", nproc=n)
        assert resumed.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
        for column in ("loss_scale", "skipped_steps"):
            assert resumed.column(column) == whole.column(column)


def test_fp16_scaler_and_accumulation_resume_to_the_bit(tmp_path, corpus, loud_weights):
    flags = ("--model", loud_weights, "--data", corpus, "--dtype", "fp16", "--micro-batch-size", 3, "--deterministic")
    whole = train(AMP, tmp_path / "whole", *flags, *EVERY_STEP)
    skipped = whole.column("skipped_steps")
    assert 0 < skipped[1] <= skipped[-1] < 20  # the scaler has skipped before step 2, and has found a scale
    assert whole.column("loss_scale")[1] < 2**16
    assert whole.column("grad_norm")[0] is None  # it overflowed
    unsaved = train(AMP, tmp_path / "unsaved", *flags)
    assert unsaved.summary["weights_sha256"] == whole.summary["weights_sha256"]
    folder = interrupted(whole, 2, tmp_path / "resumed")
    resumed = train(AMP, folder, *flags, *EVERY_STEP, "--resume")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.column("skipped_steps") == skipped
    assert resumed.column("loss_scale") == whole.column("loss_scale")


@pytest.fixture
def loud_weights(tmp_path) -> Path:
    """A model folder whose weights are large enough for fp16 gradients to overflow at the first scale."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    net = LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in TINY.items() if k != "model_type"}, tie_word_embeddings=False)
    )
    with torch.no_grad():
        net.lm_head.weight.mul_(100)
    net.save_pretrained(tmp_path / "loud")
    return tmp_path / "loud"


def test_background_saves_hold_what_foreground_saves_hold(runs, tmp_path, corpus):
    result = train(DDP, tmp_path, "--data", corpus, "--deterministic", *EVERY_STEP, "--async-save", nproc=2)
    assert result.summary["weights_sha256"] == runs[2].summary["weights_sha256"]
    for step in (1, 10, 20):
        ours, theirs = saved(tmp_path, step), saved(runs[2].folder, step)
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
        assert ours["optimizer"].keys() == theirs["optimizer"].keys()
        for key, value in theirs["optimizer"].items():
            torch.testing.assert_close(ours["optimizer"][key], value, rtol=0, atol=0)
        assert ours["progress"] == theirs["progress"]
        assert ours["scheduler"] == theirs["scheduler"]


def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """The writer is held up until the weights have changed: what it then writes is what was saved."""
    net = torch.nn.Linear(3, 3)
    parts = {"net": net, "optimizer": torch.optim.AdamW(net.parameters())}
    parts["scheduler"] = torch.optim.lr_scheduler.LambdaLR(parts["optimizer"], lambda step: 1.0)
    parts["scaler"] = torch.amp.GradScaler("cpu", enabled=False)
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=2, in_background=True)
    go_on, write = threading.Event(), checkpoint._write_dcp
    monkeypatch.setattr(checkpoint, "_write_dcp", lambda *args: go_on.wait(60) and write(*args))
    before = net.weight.detach().clone()
    checkpoint.save(checkpoints, {"step": 1, "skipped_steps": 0}, **parts)
    with torch.no_grad():
        net.weight.add_(1.0)
    assert not (tmp_path / "step-00000001").exists()  # save has returned, nothing is written
    go_on.set()
    checkpoints.wait()
    assert checkpoint.resume(checkpoints, **parts) == {"step": 1, "skipped_steps": 0}
    assert torch.equal(net.weight, before)


def test_checkpoint_holds_what_a_resume_needs(runs):
    keys = FileSystemReader(runs[3].folder / "run/step-00000020").read_metadata().state_dict_metadata
    parts = {key.split(".")[0] for key in keys}
    assert parts >= {"model", "optimizer", "scheduler", "progress", "rng-0", "rng-1", "rng-2"}
    files = sorted(p.name for p in (runs[3].folder / "run/step-00000020").glob("__*"))
    assert len(files) == 3  # the ranks share the writing


def test_keep_prunes_the_oldest(tmp_path, corpus):
    train(AMP, tmp_path, "--data", corpus, "--save-every", 3, "--keep", 2)
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-00000018", "step-00000020"]


def test_data_loading_processes_change_nothing(runs, tmp_path, corpus):
    result = train(DDP, tmp_path, "--data", corpus, "--num-workers", 2, "--deterministic")
    assert result.summary["weights_sha256"] == runs[1].summary["weights_sha256"]


def test_a_run_can_be_made_longer(runs, tmp_path, corpus):
    folder = interrupted(runs[1], 20, tmp_path / "longer")
    result = train(DDP, folder, "--data", corpus, "--resume", "--steps", 25)
    assert result.column("loss")[:20] == runs[1].column("loss")
    assert result.summary["steps"] == len(result.column("loss")) == 25
    lr = result.column("lr")[20:]
    assert all(a > b for a, b in itertools.pairwise(lr))  # all five on the longer cosine
    shorter = train(DDP, folder, "--data", corpus, "--resume", "--steps", 5, code=2)
    assert "at step 25 already" in shorter.err
