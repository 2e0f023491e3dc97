"""The same run, cut differently: processes, micro-batches, interruptions, background saves. One curve."""

import itertools
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    assert_near,
    assert_same_first_gradients,
    assert_same_gradients,
    gradients,
    moments,
    saved,
    write_folder,
)
from support.harness import (
    BASELINE,
    ROOT,
    SEVERAL,
    TEXT,
    TINY,
    Result,
    assert_refused,
    checkpoints,
    config_of,
    drop_after,
    each_of_several,
    each_script,
    each_way_to_shard,
    in_full,
    in_long,
    needs_compiler,
    run,
    train,
    two_if_it_can,
    with_prelude,
)

from lm.weights import build, load_config

STEPS = 12
TWELVE = ("--steps", STEPS)
EVERY_STEP = (*TWELVE, "--save-every", 1, "--keep", 100)
ONE_STEP = ("--steps", 1, "--warmup-steps", 0, "--clip-norm", 0.01)
DDP, *OTHERS = SEVERAL
TRAIN_3D = "08_model_parallel/train_3d.py"
TRAIN_ZERO = "06_fsdp_zero/train_zero.py"
FINETUNE = "06_fsdp_zero/finetune.py"
CHATS = ROOT / "07_memory_tricks/lora_instructions.jsonl"


def write_corpus(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_bytes(TEXT.read_bytes()[:3200])
    return file


@pytest.fixture(scope="module")
def corpus(once) -> Path:
    """94 training sequences of 32 bytes: with batches of 12 an epoch ends in the middle of a step."""
    return once("corpus", write_corpus)


@pytest.fixture(scope="module")
def runs(once, corpus) -> Callable[[str, int | None], Result]:
    """runs(script, n): its fp32 run of 12 steps over 1.5 epochs on n processes, with a checkpoint after each step."""

    def run(folder: Path, script: str, n: int | None) -> Result:
        return train(script, folder, "--data", corpus, "--deterministic", *EVERY_STEP, nproc=n)

    return partial(once, "equivalence", run)


def assert_same_curve(a, b, tolerance: float = 1e-5) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert len(a.column(column)) == len(b.column(column)) > 0
        assert a.column(column) == pytest.approx(b.column(column), rel=tolerance), column


@pytest.mark.parametrize(
    ("script", "n"),
    [*((script, 2) for script in SEVERAL), (DDP, 3), *(in_full(script, 3) for script in OTHERS)],
)
def test_every_script_on_any_number_of_processes_gives_the_same_losses_and_gradients(
    runs, script, n
):
    baseline, result = runs(BASELINE, None), runs(script, n)
    assert result.summary["world_size"] == (n or 1)
    assert len(result.column("loss")) == STEPS
    assert_same_curve(baseline, result)
    assert_same_gradients(result.folder, baseline.folder, 3)
    for step in (7, STEPS):  # and the running mean of all gradients until then
        assert_near(moments(result.folder, step), moments(baseline.folder, step))


@pytest.mark.parametrize(
    ("script", "n"),
    [(DDP, None), in_full(DDP, 1), *(in_long(script, n) for script in OTHERS for n in (None, 1))],
)
def test_one_process_equals_the_baseline_to_the_bit(runs, script, n):
    baseline, result = runs(BASELINE, None), runs(script, n)
    assert result.summary["weights_sha256"] == baseline.summary["weights_sha256"]
    assert result.column("loss") == baseline.column("loss")


@pytest.mark.parametrize(
    ("script", "n", "micro"),
    [
        (DDP, 2, 2),
        in_full(BASELINE, None, 3),
        in_long(DDP, 3, 1),
        *(in_full(script, 2, 2) for script in OTHERS),
    ],
)
def test_micro_batches_equal_one_batch(runs, tmp_path, corpus, script, n, micro):
    """And so do chunks of the loss, which train_3d.py has not."""
    baseline = runs(BASELINE, None)
    flags = ("--micro-batch-size", micro, "--data", corpus, *EVERY_STEP)
    if script != TRAIN_3D:
        flags += ("--loss", "chunked")
    result = train(script, tmp_path, *flags, nproc=n)
    assert_same_curve(baseline, result)
    assert_same_gradients(tmp_path, baseline.folder)


RECOMPUTED = [
    (DDP, 2, "full"),
    in_full(BASELINE, None, "selective"),
    in_long(BASELINE, None, "full"),
    in_long(DDP, 2, "selective"),
    *(in_full(script, 2, "selective") for script in OTHERS),
]


# Counts how often a block's forward runs inside of backward.
COUNT = """
import os
from pathlib import Path
import torch
from common import exits
from lm import model
forward, calls = model.Block.forward, 0
def counted(self, *args):
    global calls
    calls += torch._C._current_graph_task_id() != -1
    return forward(self, *args)
model.Block.forward = counted
exits.at_exit.callback(lambda: Path(f"calls-{os.environ.get('RANK', 0)}").write_text(str(calls)))
"""


@pytest.mark.parametrize(("script", "n", "how"), RECOMPUTED)
def test_what_backward_computes_again_is_what_forward_computed_to_the_bit(
    runs, tmp_path, corpus, script, n, how
):
    stored = runs(script, n)
    flags = ("--data", corpus, "--deterministic", *EVERY_STEP, "--checkpointing", how)
    recomputed = train(with_prelude(script, tmp_path, COUNT), tmp_path, *flags, nproc=n)
    layers, steps = TINY["num_hidden_layers"], STEPS
    for rank in range(n or 1):
        calls = int((tmp_path / f"calls-{rank}").read_text(encoding="utf-8"))
        assert calls in (layers * steps, layers * (steps + 1))  # DDP's throw-away step
    assert recomputed.summary["weights_sha256"] == stored.summary["weights_sha256"]
    for column in ("loss", "grad_norm", "val_loss"):
        assert recomputed.column(column) == stored.column(column)
    torch.testing.assert_close(gradients(tmp_path), gradients(stored.folder), rtol=0, atol=0)


def norm(tensors) -> float:
    return torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors.values()])).item()


@pytest.mark.parametrize(
    "script", [DDP, "06_fsdp_zero/train_fsdp.py", *map(in_full, (BASELINE, OTHERS[-1]))]
)
def test_bf16_is_in_the_arithmetic_and_not_in_what_is_kept(tmp_path, script):
    """Each script checks at its end what it keeps: the last forward must not be taken for it."""
    runs = {}
    for dtype in ("fp32", "bf16"):
        runs[dtype] = train(
            script, tmp_path / dtype, "--dtype", dtype, "--steps", 2, nproc=two_if_it_can(script)
        )
    assert runs["bf16"].column("loss") == pytest.approx(runs["fp32"].column("loss"), rel=5e-3)
    assert runs["bf16"].column("loss") != runs["fp32"].column("loss")


@pytest.mark.parametrize("script", [BASELINE, DDP])  # 06 and 08 refuse it
def test_the_fp16_clip_equals_the_fp32_clip(tmp_path, script):
    flags, n = (*ONE_STEP, "--micro-batch-size", 3), two_if_it_can(script)
    results = {
        d: train(script, tmp_path / d, *flags, "--dtype", d, nproc=n) for d in ("fp32", "fp16")
    }
    clipped = {d: gradients(tmp_path / d) for d in results}
    before = {d: results[d].column("grad_norm")[0] for d in results}
    assert before["fp16"] == pytest.approx(before["fp32"], rel=5e-3)
    assert min(before.values()) > 10 * 0.01  # there was something to clip
    for gradient in clipped.values():
        assert norm(gradient) == pytest.approx(0.01, rel=1e-3)
    difference = {name: clipped["fp16"][name] - clipped["fp32"][name] for name in clipped["fp32"]}
    assert norm(difference) < 0.01 * norm(clipped["fp32"])


@each_script
def test_weight_decay_is_for_matrices_alone(tmp_path, script):
    flags = ("--steps", 1, "--warmup-steps", 0, "--lr", 0.01)
    decays = {decay: tmp_path / str(decay) for decay in (0, 10)}
    for decay, folder in decays.items():
        train(script, folder, *flags, "--weight-decay", decay)
    plain, decayed = (saved(folder, 1)["model"] for folder in decays.values())
    initial = build("nano", load_config(str(decays[0] / "tiny.json"), 256, 32), seed=0).state_dict()
    for name, weight in plain.items():
        if weight.ndim == 1:
            assert torch.equal(decayed[name], weight), name
        else:  # AdamW: before the step, by lr · weight decay
            torch.testing.assert_close(decayed[name], weight - 0.01 * 10 * initial[name])


# The training scripts draw nothing, a reader's own model may.
WITH_DROPOUT = """
import torch.nn.functional as F
from lm import model
exact = model.MLP.forward
def dropped(self, x):
    y = exact(self, x)
    return F.dropout(y, 0.3) if self.training else y
model.MLP.forward = dropped
"""


@pytest.mark.parametrize(
    "script", [BASELINE, DDP, *map(in_long, OTHERS), *map(in_full, (TRAIN_ZERO, FINETUNE))]
)
def test_the_held_out_loss_is_without_dropout_and_the_loss_with_it(tmp_path, corpus, script):
    """The same weights with and without dropout: two runs with dropout would draw the same."""
    flags = ["--data", corpus, "--steps", 2, "--eval-every", 1]
    flags += ["--lr", 1e-30]  # no step changes a weight
    if script == TRAIN_ZERO:
        pytest.importorskip("deepspeed")
    if script == FINETUNE:
        flags += ["--data", CHATS, "--seq-len", 128]
    n = None if script == BASELINE else 2
    plain = train(script, tmp_path / "plain", *flags, nproc=n)
    wrapper = with_prelude(script, tmp_path, WITH_DROPOUT)
    dropped = train(wrapper, tmp_path / "dropped", *flags, nproc=n)
    assert dropped.column("val_loss") == plain.column("val_loss")
    # also in the step after an evaluation
    for step in range(2):
        assert dropped.column("loss")[step] != plain.column("loss")[step]


# Each layer writes a number that dropout would have drawn there.
WITH_RECORDED_DRAWS = """
import torch
from lm import model
exact = model.MLP.forward
def recorded(self, x):
    if self.training and torch.is_grad_enabled():
        with open(f"draws-{os.environ.get('RANK', 0)}.txt", "a", encoding="utf-8") as file:
            print(torch.randint(2**62, ()).item(), file=file)
    return exact(self, x)
model.MLP.forward = recorded
"""


@pytest.mark.parametrize(
    ("script", "n", "flags"),
    [
        (DDP, 2, ""),
        in_long(BASELINE, None, ""),
        in_long("06_fsdp_zero/train_fsdp.py", 2, ""),
        in_full(TRAIN_ZERO, 2, ""),
        in_full(FINETUNE, 2, f"--data {CHATS} --seq-len 128"),
        pytest.param("08_model_parallel/train_3d.py", 4, "--tp 2", marks=pytest.mark.full),
        in_long("08_model_parallel/train_3d.py", 4, "--pp 2 --cp 2 --micro-batch-size 3"),
    ],
)
def test_each_seed_step_and_rank_draws_other_numbers(tmp_path, corpus, script, n, flags):
    """Runs with neighbouring seeds are independent. Tensor ranks of a group draw the same."""
    if script == TRAIN_ZERO:
        pytest.importorskip("deepspeed")
    wrapper = with_prelude(script, tmp_path, WITH_RECORDED_DRAWS)
    flags = ["--data", corpus, "--steps", 4, *flags.split()]
    copies = 2 if "--tp" in flags else 1  # neighbouring ranks that hold the same activations
    draws = []
    for seed in (0, 1):
        folder = tmp_path / f"seed{seed}"
        train(wrapper, folder, *flags, "--seed", seed, nproc=n)
        for rank in range(n or 1):
            # without the first: a pipeline's forward for shape inference draws it, too
            _, *drawn = (folder / f"draws-{rank}.txt").read_text(encoding="utf-8").split()
            if rank % copies == 0:
                draws += drawn
            else:
                assert drawn == draws[-len(drawn) :]
    assert len(draws) >= 8
    assert len(set(draws)) == len(draws)


@each_of_several
def test_evaluation_switches_dropout_on_again(tmp_path, corpus, script):
    """Training goes on as if there had been no evaluation."""
    wrapper = with_prelude(script, tmp_path, WITH_DROPOUT)
    flags, n = ("--data", corpus, "--deterministic", "--steps", 10), two_if_it_can(script)
    seldom = train(wrapper, tmp_path / "seldom", *flags, nproc=n)
    often = train(wrapper, tmp_path / "often", *flags, "--eval-every", 3, nproc=n)
    assert len(often.column("val_loss")) == 4 > len(seldom.column("val_loss"))
    assert often.summary["weights_sha256"] == seldom.summary["weights_sha256"]
    assert often.summary["val_loss"] == seldom.summary["val_loss"]


def interrupted(result, step: int, folder: Path) -> Path:
    """A copy of a run as a power cut after `step` would have left it: its last record cut short, others damaged."""
    shutil.copytree(result.folder, folder)
    drop_after(folder, step)
    metrics = folder / "run/metrics.jsonl"
    last = metrics.read_bytes().splitlines()[-1]
    metrics.write_bytes(metrics.read_bytes() + b'\0\0\0\n7\n{"loss": 7}\n' + last[: len(last) // 2])
    return folder


# 8: the first epoch ends inside that step; 3 processes: the order of a sum of three counts
@pytest.mark.parametrize(
    ("script", "n", "step"),
    [
        (BASELINE, None, 8),
        (DDP, 2, 8),
        in_full(DDP, 3, 8),
        *(in_long(DDP, 2, step) for step in (1, STEPS - 1)),
        *(in_full(script, 2, 8) for script in OTHERS),
    ],
)
def test_resumed_is_uninterrupted_to_the_bit(runs, tmp_path, corpus, script, n, step):
    whole = runs(script, n)
    folder = interrupted(whole, step, tmp_path / "resumed")
    # the ranks share the writing
    assert len([*folder.glob(f"run/step-{step:08d}/__*")]) == (n or 1)
    resumed = train(
        script, folder, "--data", corpus, "--deterministic", *EVERY_STEP, "--resume", nproc=n
    )
    assert f"{folder}/run/step-{step:08d}" in resumed.out
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.column("loss") == whole.column("loss")
    assert resumed.column("step") == whole.column("step")
    for key in ("first_loss", "last_loss", "val_loss", "steps", "tokens"):
        assert resumed.summary[key] == whole.summary[key]


@pytest.mark.parametrize(
    ("script", "n"),
    [(DDP, 2), in_full(BASELINE, None), *(in_long(script, 2) for script in OTHERS)],
)
def test_a_run_of_version_0_3_0_resumes(tmp_path, script, n):
    """Take the steps after the checkpoint as version 0.3.0 took them."""
    with tarfile.open(ROOT / "tests/data/run_0_3_0/run.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        archive.extractall(tmp_path)
    shutil.copy(TEXT, tmp_path / "text.txt")
    old = Result(0, "", "", tmp_path)
    old_steps = old.column("step")
    old_losses = old.column("loss")
    old_norms = old.column("grad_norm")

    flags = ["--model", "tiny.json", "--data", "text.txt", "--device", "cpu", "--dtype", "fp32"]
    flags += ["--seq-len", 32, "--global-batch-size", 12, "--steps", 6, "--warmup-steps", 2]
    flags += ["--log-every", 1, "--run-dir", "run", "--resume"]
    resumed = run(script, tmp_path, *flags, nproc=n)

    assert resumed.code == 0, resumed
    assert "resuming from run/step-00000003" in resumed.out
    assert checkpoints(tmp_path) == ["step-00000003", "step-00000006"]
    assert resumed.column("step") == old_steps
    assert resumed.column("loss") == pytest.approx(old_losses, rel=1e-5)
    assert resumed.column("grad_norm") == pytest.approx(old_norms, rel=1e-5)


@pytest.mark.parametrize(
    ("script", "n"),
    [
        (DDP, 3),
        in_full(DDP, 1),
        *(in_long(script, 1) for script in OTHERS),
        *(in_full(script, 3) for script in OTHERS),
    ],
)
def test_a_run_saved_on_two_processes_goes_on_on_others(runs, tmp_path, corpus, script, n):
    whole = runs(script, 2)
    folder = interrupted(whole, 9, tmp_path / "moved")
    resumed = train(
        script, folder, *TWELVE, "--micro-batch-size", 2, "--data", corpus, "--resume", nproc=n
    )
    assert len(resumed.column("loss")) == STEPS
    assert_same_curve(whole, resumed)
    assert_near(saved(folder, STEPS)["model"], saved(whole.folder, STEPS)["model"])


@pytest.mark.parametrize("script", [BASELINE, in_long(DDP)])
def test_fp16_scaler_and_accumulation_resume_to_the_bit(tmp_path, corpus, loud_weights, script):
    flags = (
        "--model",
        loud_weights,
        "--data",
        corpus,
        "--dtype",
        "fp16",
        "--micro-batch-size",
        3,
        "--deterministic",
    )
    flags, n = (*flags, *TWELVE, "--lr", 0.002), two_if_it_can(script)
    whole = train(script, tmp_path / "whole", *flags, *EVERY_STEP, nproc=n)
    skipped = whole.column("skipped_steps")
    # the scaler has skipped before step 2, and has found a scale
    assert 0 < skipped[1] <= skipped[-1] < STEPS
    assert whole.column("loss_scale")[1] < 2**16
    assert whole.column("grad_norm")[0] is None  # it overflowed
    lr = whole.column("lr")
    for step, (before, after) in enumerate(itertools.pairwise([0, *skipped[: STEPS - 1]])):
        # a skipped step does not move the schedule
        assert after == before or lr[step + 1] == lr[step]
    unsaved = train(script, tmp_path / "unsaved", *flags, nproc=n)
    assert unsaved.summary["weights_sha256"] == whole.summary["weights_sha256"]
    folder = interrupted(whole, 2, tmp_path / "resumed")
    resumed = train(script, folder, *flags, *EVERY_STEP, "--resume", nproc=n)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.column("skipped_steps") == skipped
    assert resumed.column("loss_scale") == whole.column("loss_scale")


@pytest.fixture
def loud_weights(tmp_path) -> Path:
    """A model folder whose weights are large enough for fp16 gradients to overflow at the first scale."""
    folder = tmp_path / "loud"
    write_folder(folder, config_of(TINY))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 100
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@each_way_to_shard
def test_background_saves_hold_what_foreground_saves_hold(runs, tmp_path, corpus, script):
    foreground = runs(script, 2)
    result = train(
        script, tmp_path, "--data", corpus, "--deterministic", *EVERY_STEP, "--async-save", nproc=2
    )
    assert result.summary["weights_sha256"] == foreground.summary["weights_sha256"]
    for step in (1, 6, STEPS):
        ours, theirs = saved(tmp_path, step), saved(foreground.folder, step)
        torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
        assert ours["optimizer"].keys() == theirs["optimizer"].keys()
        for key, value in theirs["optimizer"].items():
            torch.testing.assert_close(ours["optimizer"][key], value, rtol=0, atol=0)
        assert ours["progress"] == theirs["progress"]
        assert ours["scheduler"] == theirs["scheduler"]


def test_keep_prunes_the_oldest_and_keep_best_spares_the_best(tmp_path, corpus):
    flags = ("--data", corpus, "--save-every", 3, "--keep", 2)
    best = ("--keep-best", "--eval-every", 3, "--lr", 0.4, "--warmup-steps", 20)
    result = train(BASELINE, tmp_path, *flags, *best)
    losses = {r["step"]: r["val_loss"] for r in result.records if "val_loss" in r}
    step = min(losses, key=losses.get)
    assert step < 18  # since the rate goes on rising
    assert checkpoints(tmp_path) == [f"step-{step:08d}", "step-00000018", "step-00000020"]
    assert f"step-{step:08d}, held-out loss {losses[step]:.4f}" in result.out


READERS = """
from pathlib import Path
from torch.utils.data import get_worker_info
from lm import data
read = data.Sequences.__getitem__
def noted(self, i):
    worker = get_worker_info()
    if worker is not None:
        Path(f"rank-{os.environ.get('RANK', 0)}-worker-{worker.id}").touch()
    return read(self, i)
data.Sequences.__getitem__ = noted
"""


@pytest.mark.parametrize(
    ("script", "n"),
    [(DDP, 2), in_full(BASELINE, None), *(in_long(script, 2) for script in OTHERS)],
)
def test_data_loading_processes_change_nothing(runs, tmp_path, corpus, script, n):
    reading = with_prelude(script, tmp_path, READERS)
    flags = ("--data", corpus, "--num-workers", 2, "--deterministic", *TWELVE)
    result = train(reading, tmp_path, *flags, nproc=n)
    assert result.summary["weights_sha256"] == runs(script, n).summary["weights_sha256"]
    assert result.column("loss") == runs(script, n).column("loss")
    assert len([*tmp_path.glob("rank-*-worker-*")]) == 2 * (n or 1)  # they did read


@each_script
def test_a_run_can_be_made_longer(runs, tmp_path, corpus, script):
    whole = runs(script, None)
    folder = interrupted(whole, STEPS, tmp_path / "longer")
    result = train(script, folder, "--data", corpus, "--resume", "--steps", STEPS + 5)
    assert result.column("loss")[:STEPS] == whole.column("loss")
    assert result.summary["steps"] == len(result.column("loss")) == STEPS + 5
    lr = result.column("lr")[STEPS:]
    assert all(a > b for a, b in itertools.pairwise(lr))  # all five on the longer cosine
    shorter = train(script, folder, "--data", corpus, "--resume", "--steps", 5, code=2)
    assert_refused(shorter, f"step {STEPS + 5}", "--steps 5")


@pytest.mark.parametrize(
    ("script", "n"),
    [(BASELINE, None), in_full(DDP, 2), *(in_full(script, 2) for script in OTHERS)],
)
def test_what_is_drawn_at_random_goes_on_where_it_was(tmp_path, corpus, script, n):
    wrapper = with_prelude(script, tmp_path, WITH_DROPOUT)
    flags = ("--data", corpus, "--deterministic", "--steps", 6, "--save-every", 3)
    whole = train(wrapper, tmp_path / "whole", *flags, nproc=n)
    folder = interrupted(whole, 3, tmp_path / "resumed")
    resumed = train(wrapper, folder, *flags, "--resume", nproc=n)
    assert resumed.column("loss") == whole.column("loss")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize(("script", "nproc"), [in_long(BASELINE, None), (DDP, 2)])
def test_compiled_gradients_are_those_of_eager_kernels(tmp_path, script, nproc):
    """tests/test_06_fsdp.py has FSDP."""
    flags = ("--steps", 3, "--save-every", 1, "--keep", 3, "--dtype", "fp32")
    eager = train(script, tmp_path / "eager", *flags, nproc=nproc)
    compiled = train(script, tmp_path / "compiled", *flags, "--compile", nproc=nproc)
    assert_same_first_gradients(compiled.folder, eager.folder)
    for column in ("loss", "grad_norm", "val_loss"):
        assert compiled.column(column) == pytest.approx(eager.column(column), rel=1e-5), column
