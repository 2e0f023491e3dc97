"""--micro-batch-size by itself, flags of a resumed run, and the message about too little memory."""

import json
import re
import shlex
import sys

import pytest
from support import nogpu
from support.harness import (
    BASELINE,
    NO_COMPILER,
    ROOT,
    assert_refused,
    each_script,
    finish,
    in_full,
    run,
    start,
    tiny_flags,
    train,
    two_if_it_can,
    with_prelude,
    write_tiny,
)

from lm import shapes
from planner import micro_batch
from planner.plan import Plan
from planner.shape import from_config

GB = 10**9
CARDS = [8, 16, 24, 80, 141]
SHAPE = from_config("llama-124m", shapes.SIZES["llama-124m"])
PLAN = Plan(seq_len=1024, compile=True)
MEASURED = re.compile(r"micro-batch (\d+): measured ([\d.]+) of ([\d.]+) GiB")
# Measure on the CPU, where a step needs 1,000 bytes and 100 for each sequence: 2 fit, and 4 do not.
# Around the measurement, everything that the training reads must stay as it is.
MEASURE_ON_CPU = """
import random
import numpy as np
import torch
from training import micro_batch

def peak_bytes(run, optimizer, sequences, device):
    run(sequences)
    optimizer.zero_grad()
    return 1000 + 100 * sequences

micro_batch.measures_on = lambda device: True
micro_batch.report.remember_peak = micro_batch.forget_peak = lambda device: None
micro_batch.held_bytes = lambda device: 1000
micro_batch.usable_bytes = lambda device: 1450
micro_batch.peak_bytes = peak_bytes

def state(model, optimizer):
    tensors = []
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor = tensor.detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        tensors.append(tensor.clone())
    generators = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1])]
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    return tensors + generators, (random.getstate(), groups, dict(optimizer.state))

def check_and_choose(args, model, optimizer, *others, **more):
    tensors_before, others_before = state(model, optimizer)
    size = choose(args, model, optimizer, *others, **more)
    tensors, others = state(model, optimizer)
    assert others == others_before
    assert all(torch.equal(*pair) for pair in zip(tensors, tensors_before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch._dynamo.utils.counters["frames"]  # nothing was compiled
    return size

choose = micro_batch.choose
micro_batch.choose = check_and_choose
"""
# A model of one's own with all that a measurement could change, and data that draws numbers.
OWN_MODEL = """
import own_images
import train
from torch import nn
from common import exits
from training.batches import Batches
from training.training_objects import TrainingObjects

class Classifier(own_images.Classifier):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10)
        )

class Images(own_images.Images):
    def __getitem__(self, i):
        random.random()
        np.random.rand()
        return super().__getitem__(i)

def load_training_objects(args, rank, world_size, device):
    samples = Images(first=0, count=100), Images(first=100, count=100)
    batches = Batches(*samples, args, rank=rank, world_size=world_size)
    return TrainingObjects(Classifier(), batches, name="own", must_match={})

train.load_training_objects = load_training_objects
exits.run(train.main)
"""


def test_the_choice_fits_and_twice_as_much_does_not():
    for card in CARDS:
        free = card * GB
        choice = micro_batch.choose(SHAPE, PLAN, share=256, free_bytes=free)
        assert choice.planned_bytes <= micro_batch.MEMORY_SHARE * free, card
        if choice.size < 256:
            twice = micro_batch.with_size(PLAN, 2 * choice.size, 256)
            assert micro_batch.planned_bytes(SHAPE, twice) > micro_batch.MEMORY_SHARE * free, card


def test_the_choice_is_a_power_of_two_that_divides_the_share():
    assert micro_batch.choose(SHAPE, PLAN, share=48, free_bytes=10**15).size == 16
    assert micro_batch.choose(SHAPE, PLAN, share=7, free_bytes=10**15).size == 1
    assert micro_batch.choose(SHAPE, PLAN, share=48, free_bytes=1).size == 1


@each_script
def test_a_resumed_run_has_the_flags_of_the_run(tmp_path, script):
    ranks = two_if_it_can(script)
    flags = ("--lr", 0.01, "--micro-batch-size", 2, "--eval-every", 3)
    expected = train(script, tmp_path / "whole", *flags, "--steps", 8, nproc=ranks)
    folder = tmp_path / "resumed"
    train(script, folder, *flags, "--steps", 5, nproc=ranks)

    # Without the tiny model and its flags, which the run has, too.
    resume = ("--device", "cpu", "--run-dir", folder / "run", "--resume", "--steps", 8)
    result = run(script, folder, *resume, "--json", "summary.json", nproc=ranks)
    assert result.code == 0, result
    assert result.column("loss") == pytest.approx(expected.column("loss"), rel=1e-6)
    assert len(result.column("val_loss")) == 4  # after 3, 5, 6 and 8 steps
    assert result.summary["model"] == "tiny.json"


def test_a_flag_that_is_given_counts(tmp_path):
    train(BASELINE, tmp_path, "--steps", 2)
    resume = ("--device", "cpu", "--run-dir", tmp_path / "run", "--resume")
    assert_refused(run(BASELINE, tmp_path, *resume, "--lr", 0.5), "--lr 0.5 (was 0.002)")


def losses_and_weights(result):
    assert result.code == 0, result
    return result.column("loss"), result.column("val_loss"), result.summary["weights_sha256"]


def run_as_on_a_gpu(script, folder, *flags, prelude=""):
    """Return the result of a run on the CPU that measures as on a GPU, and the size it took."""
    write_tiny(folder)
    flags = [*tiny_flags(folder), *flags, "--steps", 3]
    started = with_prelude(script, folder, prelude + MEASURE_ON_CPU)
    ranks = None if script == BASELINE else 2
    result = run(started, folder, *flags, nproc=ranks)
    assert result.code == 0, result
    remembered = json.loads((folder / "run/run.json").read_text(encoding="utf-8"))["flags"]
    return result, remembered["micro_batch_size"]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("04_amp/train.py", ""),
        in_full("05_ddp/train.py", ""),
        in_full("06_fsdp_zero/train_fsdp.py", "--replicate 2"),
        pytest.param("08_model_parallel/train_3d.py", "--tp 2", marks=pytest.mark.full),
    ],
)
def test_a_measurement_leaves_no_trace(tmp_path, script, flags):
    measured, size = run_as_on_a_gpu(script, tmp_path / "measured", *flags.split())
    assert size == 2
    flags = ["--micro-batch-size", 2, "--steps", 3, *flags.split()]
    given = train(script, tmp_path / "given", *flags, nproc=two_if_it_can(script))
    assert losses_and_weights(measured) == losses_and_weights(given)


@pytest.mark.full
def test_a_compiled_model_is_measured_in_eager_mode(tmp_path):
    _, size = run_as_on_a_gpu("05_ddp/train.py", tmp_path, "--compile", prelude=NO_COMPILER)
    assert size == 2


def test_a_model_of_ones_own_is_measured(tmp_path):
    script = tmp_path / "own.py"
    paths = [str(ROOT / "05_ddp"), str(ROOT)]
    results = []
    for prelude in ("import random\nimport numpy as np", MEASURE_ON_CPU):
        script.write_text(
            f"import sys\nsys.path[:0] = {paths!r}\n{prelude}\n{OWN_MODEL}", encoding="utf-8"
        )
        folder = tmp_path / str(len(results))
        folder.mkdir()
        flags = ["--device", "cpu", "--dtype", "fp32", "--global-batch-size", 12, "--log-every", 1]
        flags += ["--steps", 3, "--keep", 0, "--run-dir", "run", "--json", "summary.json"]
        if prelude != MEASURE_ON_CPU:
            flags += ["--micro-batch-size", 2]
        results.append(run(script, folder, *flags))
    given, measured = map(losses_and_weights, results)
    assert measured == given


@pytest.mark.parametrize(
    ("script", "flags", "expected"),
    [
        # a rank's share is 6 sequences of 32 tokens
        pytest.param("06_fsdp_zero/train_zero.py", ("--stage", 3), 2, marks=pytest.mark.full),
        ("08_model_parallel/train_3d.py", ("--pp", 2, "--model", "untied.json"), 1),
    ],
)
def test_what_is_not_measured_has_a_rule(tmp_path, script, flags, expected):
    nogpu.write_shape(tmp_path, "untied.json", tie_word_embeddings=False)
    if "train_zero" in script:
        pytest.importorskip("deepspeed")
    _, size = run_as_on_a_gpu(script, tmp_path, *flags)
    assert size == expected


def test_a_resumed_run_keeps_its_size_where_it_divides_the_share(tmp_path):
    _, size = run_as_on_a_gpu("05_ddp/train.py", tmp_path, "--micro-batch-size", 3)
    assert size == 3
    for steps, ranks, expected in ((4, 2, 3), (5, 3, 2)):
        flags = ["--device", "cpu", "--run-dir", tmp_path / "run", "--resume", "--steps", steps]
        started = with_prelude("05_ddp/train.py", tmp_path, MEASURE_ON_CPU)
        result = run(started, tmp_path, *flags, nproc=ranks)
        assert result.code == 0, result
        remembered = json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))["flags"]
        assert remembered["micro_batch_size"] == expected


@pytest.mark.nogpu
@pytest.mark.parametrize("card", CARDS)
def test_the_bare_command_takes_what_the_allocator_accepts(tmp_path, card):
    flags = "--steps 2 --no-compile --keep 0 --run-dir run --json summary.json"
    result = nogpu.run("noop", tmp_path, BASELINE, flags, NOGPU_MEMORY=str(card * GB))
    assert result.code == 0, result
    assert result.summary["model"] == "llama-124m"
    assert result.summary["tokens"] == 2 * 48 * 1024
    size, measured, free = map(float, MEASURED.search(result.out).groups())
    assert result.summary["peak_memory_bytes"] == pytest.approx(measured * 2**30, rel=0.01)
    assert measured <= 0.9 * free
    twice = micro_batch.with_size(Plan(seq_len=1024), 2 * int(size), 48)
    if 48 % (2 * size) == 0:
        assert micro_batch.planned_bytes(SHAPE, twice) > 0.9 * free * 2**30


@pytest.mark.nogpu
@pytest.mark.parametrize(
    "script", ["05_ddp/train.py", "06_fsdp_zero/train_fsdp.py", "08_model_parallel/train_3d.py"]
)
def test_the_bare_command_on_two_gpus(tmp_path, script):
    flags = "--steps 2 --no-compile --keep 0 --run-dir run --json summary.json"
    result = nogpu.run("noop", tmp_path, script, flags, 2, NOGPU_MEMORY=str(16 * GB))
    assert result.code == 0, result
    assert result.summary["model"] == "llama-124m"
    assert MEASURED.search(result.out)[1] == "8"


@pytest.mark.nogpu
@pytest.mark.parametrize("script", ["05_ddp/train.py", "06_fsdp_zero/train_fsdp.py"])
def test_a_compiled_run_on_two_gpus(tmp_path, script):
    flags = "--model tiny.json --seq-len 32 --steps 2 --compile --keep 0 --run-dir run"
    result = nogpu.run("noop", tmp_path, script, flags, 2)
    assert result.code == 0, result
    assert MEASURED.search(result.out)[1] == "4"  # the share is 12


@pytest.mark.nogpu
def test_out_of_memory_names_a_command_that_prints_what_fits(tmp_path):
    flags = "--steps 2 --no-compile --keep 0 --micro-batch-size 48"
    result = nogpu.run("noop", tmp_path, BASELINE, flags, NOGPU_MEMORY=str(16 * GB))
    assert_refused(result, "out of memory", "--micro-batch-size 24", "--compile")
    command = shlex.split(re.search("`(.*)`", result.err)[1])
    command[:2] = [sys.executable, str(ROOT / command[1])]
    estimate = finish(start(command, tmp_path), tmp_path)
    assert estimate.code == 0, estimate
    assert "3 x 16 sequences of 1,024 tokens" in estimate.out
