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
from support.harness import ODD, ROOT, assert_refused, config_of, run

measure = load("benchmarks/_measure.py")
training, inference, gpu_report = (
    load(f"benchmarks/{name}.py") for name in ("training", "inference", "gpu_report")
)


# The real commands


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
    written = json.loads(file.read_text())
    assert {"device", "cores", "torch", "commit", "date", "command"} <= written["about"].keys()
    runs = written["comparisons"]["training-processes"]["runs"]
    assert [own[0]["world_size"] for own in runs.values()] == [1, 2]
    assert (
        "torchrun --standalone --nproc_per_node=2 05_ddp/train.py"
        in file.with_suffix(".md").read_text()
    )


def test_two_versions_in_turns(tmp_path):
    """Each case's versions compute the same, or ab.py fails."""
    flags = "--device cpu --seq-len 8 --batch-size 1 --rounds 3 --json summary.json"
    result = run("benchmarks/ab.py", tmp_path, *flags.split())
    assert result.code == 0, result.err
    rows = result.summary["rows"]
    assert len(rows) == 2 * len(result.summary["checked"]) == 8
    for baseline, other in zip(rows[::2], rows[1::2], strict=True):
        assert baseline["case"] == other["case"]
        assert baseline["time_ratio"] == 1


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
    runs = json.loads(file.read_text())["comparisons"]["decode-odd"]["runs"]
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
    parts = [part.command for parts in gpu_report.PARTS.values() for part in parts]
    return sorted({*found, *(f"python {command}" for command in parts)})


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
    "_generate.py --max-new-tokens 3",
    "ab.py --case theirs",
    "ab.py --case int4 --device cpu",
    *([] if torch.cuda.is_available() else ["training.py --device cuda"]),
]


@pytest.mark.parametrize("command", REFUSED)
def test_a_wrong_flag_is_one_line_and_code_2(tmp_path, command):
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
    """As when gpu_report.py has no time left for inference.py, whose process holds the GPU."""
    pipe = str(tmp_path / "pid")
    os.mkfifo(pipe)
    never_ends, write = os.pipe()
    command = [sys.executable, "-c", NESTED, pipe]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=never_ends, stdout=subprocess.PIPE
    )
    with open(pipe) as opened:  # returns when the inner one has come so far
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
