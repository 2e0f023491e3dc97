"""benchmarks/: sides that take turns, ratios round by round, what is on disk after a kill, processes that end."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace

import psutil
import pytest
import torch
from support.chapter import load
from support.checkpoints import write_folder
from support.commands import check
from support.harness import ODD, ROOT, assert_refused, config_of, in_long, run

measure = load("benchmarks/_measure.py")
training, inference, gpu = (
    load(f"benchmarks/{name}.py") for name in ("training", "inference", "gpu")
)


# The real commands


def test_pictures_that_need_no_run_are_those_that_figures_draws(tmp_path):
    """The same bytes each time, and no picture is older than what it is drawn from."""
    names = (*load("benchmarks/figures.py").SCHEMES, "kernels_of_a_step")
    drawn = tmp_path / "images"
    drawn.mkdir()
    result = run("benchmarks/figures.py", tmp_path, "--only", *names, OUT=str(drawn))
    assert result.code == 0, result.err
    for name in names:
        for file in (f"{name}.svg", f"{name}-dark.svg"):
            committed = (ROOT / "docs/images" / file).read_bytes()
            assert (drawn / file).read_bytes() == committed, f"{file}: run make figures"


@pytest.mark.full
def test_a_training_case(tmp_path):
    """One process and two ranks train the same; the results have what a figure must be read with."""
    flags = "--case processes --device cpu --steps 20 --rounds 1 --seq-len 16 --global-batch-size 2 --json summary.json"
    data = ("--data", ROOT / "tests/data/text.txt")
    result = run(
        "benchmarks/training.py", tmp_path, *flags.split(), *data, OUT=str(tmp_path / "results")
    )
    assert result.code == 0, result.err
    one, two = result.summary["rows"]
    assert two["against"] == one["side"]
    assert (
        two["ratio"]["median"]
        == two["tokens_per_second"]["median"] / one["tokens_per_second"]["median"]
    )
    [file] = (tmp_path / "results").glob("*.json")
    written = json.loads(file.read_text(encoding="utf-8"))
    assert {"device", "cores", "torch", "commit", "date", "command"} <= written["about"].keys()
    runs = written["comparisons"]["training-processes"]["runs"]
    assert [own[0]["world_size"] for own in runs.values()] == [1, 2]
    assert "torchrun --standalone --nproc_per_node=2 05_ddp/train.py" in file.with_suffix(
        ".md"
    ).read_text(encoding="utf-8")


@pytest.mark.full
def test_variants_and_the_baseline_again(tmp_path):
    """Each case's variants compute the same, or ab.py fails."""
    flags = "--device cpu --layers 1 --seq-len 8 --batch-size 4 --rounds 3 --json summary.json"
    result = run("benchmarks/ab.py", tmp_path, *flags.split())
    assert result.code == 0, result.err
    rows = result.summary["rows"]
    cases = {row["case"] for row in rows}
    assert len(cases) == 7
    assert len(result.summary["checked"]) == len(rows) - len(cases)
    for case in cases:
        variants = [row["variant"] for row in rows if row["case"] == case]
        assert variants[-1] == f"{variants[0]}, again"
        assert len(set(variants)) == len(variants)


FAULTS = {  # line: what stands there instead
    "MergedMLP swaps gate and up": (
        "self.down_proj(F.silu(gate) * up)",
        "self.down_proj(F.silu(up) * gate)",
    ),
    "a part of the batch is left out": ("for x, y in zip(inputs,", "for x, y in zip(inputs[:1],"),
    "bf16 moments forget": ("m.copy_(m_fp32)", "m.zero_()"),
}
OFTEN_PLANTED = "a part of the batch is left out"


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [OFTEN_PLANTED, *(in_long(fault) for fault in FAULTS if fault != OFTEN_PLANTED)]
)
def test_a_variant_that_computes_something_else_is_an_error(tmp_path, fault):
    right, wrong = FAULTS[fault]
    source = (ROOT / "benchmarks/_ab.py").read_text(encoding="utf-8")
    assert source.count(right) == 1
    wrong_source = source.replace(right, wrong).replace("strict=True", "strict=False")
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "_ab.py").write_text(wrong_source, encoding="utf-8")
    for name in ("ab.py", "_int4.py", "_measure.py"):
        (folder / name).write_text(
            (ROOT / "benchmarks" / name).read_text(encoding="utf-8"), encoding="utf-8"
        )
    for pattern in ("[0-9]*", "common", "lm", "planner", "training"):
        for file in ROOT.glob(pattern):
            (tmp_path / file.name).symlink_to(file)
    flags = "--device cpu --layers 1 --seq-len 8 --batch-size 4 --rounds 1"
    result = run(folder / "ab.py", tmp_path, *flags.split())
    assert result.code == 1, result
    assert "AssertionError" in result.err


@pytest.mark.full
def test_generate_gives_our_tokens(tmp_path):
    """transformers' generate with our weights, from a folder whose sizes share no factor."""
    write_folder(tmp_path / "odd", config_of(ODD))
    flags = (
        "--model odd --dtype fp32 --sides generate,ours --rounds 1 --max-new-tokens 16 --device cpu"
    )
    result = run("benchmarks/inference.py", tmp_path, *flags.split(), OUT=str(tmp_path / "results"))
    assert result.code == 0, result.err
    [file] = (tmp_path / "results").glob("*.json")
    runs = json.loads(file.read_text(encoding="utf-8"))["comparisons"]["decode-odd"]["runs"]
    assert runs["generate"][0]["token_ids"] == runs["ours"][0]["token_ids"]
    assert runs["generate"][0]["decode_tokens_per_second"] > 0


def commands() -> list[str]:
    args = Namespace(
        model="nano", data="stdlib", dtype="fp32", device="cpu", seq_len=16, global_batch_size=8
    )
    args.steps, args.ranks, args.max_new_tokens = 20, 2, 16
    args.sides = [
        name for name, (script, *_) in inference.SIDES.items() if (ROOT / script).exists()
    ]
    sides = [side for case in training.CASES for side in training.sides_of(case, args)]
    found = [side._replace(env=None).command() for side in sides + inference.sides_of(args)]
    for part in gpu.PARTS.values():
        found += [f"python {command.command}" for command in part.together + part.alone]
    return sorted(set(found))


def test_what_is_started_knows_its_flags():
    wrong = {}
    for command in commands():
        try:
            check(command)
        except (AssertionError, SystemExit) as error:
            wrong[command] = str(error)
    assert not wrong


REFUSED = [
    "training.py --steps 5",
    "training.py --ranks 1 --case sharding --device cpu",
    "inference.py --sides theirs",
    "peer_generate.py --max-new-tokens 3",
    "ab.py --case theirs",
    "ab.py --case int4 --device cpu",
    *([] if torch.cuda.is_available() else ["training.py --device cuda"]),
]


def test_a_wrong_flag_is_one_line_and_code_2(tmp_path):
    for command in REFUSED:
        script, flag, value, *more = command.split()
        assert_refused(run(f"benchmarks/{script}", tmp_path, flag, value, *more), flag, value)


def test_ratios_are_taken_round_by_round():
    sides = [measure.Side("eager", ""), measure.Side("compiled", "", against="eager")]
    comparison = measure.Comparison("case", sides, "speed", "share")
    for name, speeds in {"eager": (100, 200, 400), "compiled": (110, 240, 396)}.items():
        comparison.runs[name] = [{"speed": speed, "share": None} for speed in speeds]
    row = comparison.rows()[1]
    assert row["ratio"] == {"n": 3, "median": pytest.approx(1.1), "min": 0.99, "max": 1.2}
    assert row["verdict"] == "equal within noise"
    assert measure.verdict({"n": 2, "min": 2, "max": 3}).startswith("open")


# Processes

NESTED = """
import sys
sys.path.insert(0, "benchmarks")
import _measure
_measure.end_children_at_sigterm()
pid_to = f"import os; print(os.getpid(), file=open({sys.argv[1]!r}, 'w')); os.read(0, 1)"
_measure.start([sys.executable, "-c", pid_to], 600, {}, _measure.REPO)
"""


@pytest.mark.parametrize("how", ["by the benchmark that started it", "by SIGTERM"])
def test_what_a_command_has_started_ends_with_it(tmp_path, how):
    """As when gpu.py has no time left for a command, whose process holds the GPU."""
    pipe = str(tmp_path / "pid")
    os.mkfifo(pipe)
    never_ends, write = os.pipe()
    command = [sys.executable, "-c", NESTED, pipe]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=never_ends, stdout=subprocess.PIPE
    )
    with open(pipe, encoding="utf-8") as opened:  # returns when the inner one has come so far
        inner = psutil.Process(int(opened.read()))
    if how == "by SIGTERM":
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 128 + signal.SIGTERM
    else:
        measure.end(process)
    gone, alive = psutil.wait_procs([inner], timeout=600)
    os.close(write)
    os.close(never_ends)
    assert gone or alive[0].status() == psutil.STATUS_ZOMBIE
