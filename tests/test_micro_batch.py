"""--micro-batch-size by itself, flags of a resumed run, and the message about too little memory."""

import re

import pytest
from support import nogpu
from support.harness import BASELINE, assert_refused, each_script, run, train, two_if_it_can

from lm import shapes
from planner import micro_batch
from planner.plan import Plan
from planner.shape import from_config

GB = 10**9
CARDS = [8, 16, 24, 80, 141]
SHAPE = from_config("llama-124m", shapes.SIZES["llama-124m"])
PLAN = Plan(seq_len=1024, compile=True)
PLANNED = re.compile(r"micro-batch (\d+): ([\d.]+) of ([\d.]+) GiB planned")


@pytest.mark.parametrize("card", CARDS)
def test_the_choice_fits_and_twice_as_much_does_not(card):
    free = card * GB
    choice = micro_batch.choose(SHAPE, PLAN, share=256, free_bytes=free)
    assert choice.planned_bytes <= micro_batch.MEMORY_SHARE * free
    if choice.size < 256:
        twice = micro_batch.with_size(PLAN, 2 * choice.size, 256)
        assert micro_batch.planned_bytes(SHAPE, twice) > micro_batch.MEMORY_SHARE * free


def test_the_choice_is_a_power_of_two_that_divides_the_share():
    assert micro_batch.choose(SHAPE, PLAN, share=48, free_bytes=10**15).size == 16
    assert micro_batch.choose(SHAPE, PLAN, share=7, free_bytes=10**15).size == 1
    assert micro_batch.choose(SHAPE, PLAN, share=48, free_bytes=1).size == 1


def test_a_resumed_run_keeps_its_size_where_it_divides_and_fits():
    assert micro_batch.choose(SHAPE, PLAN, share=48, free_bytes=10**15, earlier=6).size == 6
    assert micro_batch.choose(SHAPE, PLAN, share=48, free_bytes=10**15, earlier=5).size == 16
    assert micro_batch.choose(SHAPE, PLAN, share=48, free_bytes=8 * GB, earlier=48).size < 48


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


@pytest.mark.nogpu
@pytest.mark.parametrize("card", CARDS)
def test_the_bare_command_takes_what_the_allocator_accepts(tmp_path, card):
    flags = "--steps 2 --no-compile --keep 0 --run-dir run --json summary.json"
    result = nogpu.run("noop", tmp_path, BASELINE, flags, NOGPU_MEMORY=str(card * GB))
    assert result.code == 0, result
    assert result.summary["model"] == "llama-124m"
    assert result.summary["tokens"] == 2 * 48 * 1024
    size, planned, free = map(float, PLANNED.search(result.out).groups())
    assert result.summary["peak_memory_bytes"] <= planned * 2**30
    assert planned <= 0.9 * free
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
    assert PLANNED.search(result.out)[1] == "8"


@pytest.mark.nogpu
def test_out_of_memory_names_what_helps_in_the_order_of_its_cost(tmp_path):
    flags = "--steps 2 --no-compile --keep 0 --micro-batch-size 48"
    result = nogpu.run("noop", tmp_path, BASELINE, flags, NOGPU_MEMORY=str(16 * GB))
    helps = ["--micro-batch-size 24", "--compile", "--checkpointing selective"]
    helps += ["--checkpointing full", "06_fsdp_zero/train_fsdp.py"]
    assert_refused(result, "out of memory", "GiB", *helps)
    places = [result.err.index(flag) for flag in helps]
    assert places == sorted(places)
