"""Progress bars: on a terminal, never in a pipe or a file, and no line of the output is garbled."""

import re
import subprocess
import sys

import pytest
from support.harness import (
    LIMIT,
    ROOT,
    TEXT,
    clean_env,
    command,
    in_full,
    in_long,
    tiny_flags,
    train,
    write_tiny,
)
from support.terminal import lines_on_screen, run_in_terminal

TRAIN_3D = "08_model_parallel/train_3d.py"
TRAIN_ZERO = "06_fsdp_zero/train_zero.py"
FINETUNE = "06_fsdp_zero/finetune.py"
PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"

# Scripts whose training loop has a bar, their number of processes, and flags of their own.
TRAINING = [
    ("05_ddp/train.py", 2, ()),
    in_long("04_amp/train.py", None, ()),
    in_long("06_fsdp_zero/train_fsdp.py", 2, ()),
    in_long(TRAIN_3D, None, ()),
    in_full(TRAIN_ZERO, 2, ()),
    in_full(FINETUNE, 2, ("--data", PAIRS, "--seq-len", 128, "--adapters", 0)),
]
BAR = re.compile(r"training: +\d+%\|.*?\| (\d+)/(\d+) ")


def logged(lines: list[str]) -> list[list[str]]:
    """Return what the log lines say, without what differs from run to run: their speed."""
    return [line.split(" | ")[:4] for line in lines if line.startswith("step ")]


@pytest.mark.parametrize(("script", "nproc", "more"), TRAINING)
def test_training_has_a_bar_on_a_terminal_and_the_same_lines(tmp_path, script, nproc, more):
    piped = train(script, tmp_path / "piped", *more, nproc=nproc)
    assert "training:" not in piped.out + piped.err
    assert "\r" not in piped.out + piped.err

    folder = tmp_path / "terminal"
    write_tiny(folder)
    argv = command(script, *tiny_flags(folder), *more, nproc=nproc)
    code, written = run_in_terminal(argv, folder)
    assert code == 0, written
    counts = BAR.findall(written)
    assert counts[0] == ("0", "20")
    lines = lines_on_screen(written)
    assert not [line for line in lines if "training:" in line], "the bar is erased at the end"
    assert logged(lines) == logged(piped.out.splitlines())


@pytest.mark.full
def test_the_bar_of_a_resumed_run_starts_where_the_run_stood(tmp_path):
    train("04_amp/train.py", tmp_path, "--steps", 6)
    argv = command("04_amp/train.py", *tiny_flags(tmp_path), "--steps", 9, "--resume")
    code, written = run_in_terminal(argv, tmp_path)
    assert code == 0, written
    assert BAR.findall(written)[0] == ("6", "9")


LOOP = """
import sys
sys.path.insert(0, {root!r})
from common import exits, progress, report

def main():
    for step in report.progress_bar(range(1, 11), "training", unit="step"):
        progress.print_line(f"step {{step}}")
        if step == 4:
            {end}
    print("after the loop")
    return 0

exits.run(main)
"""


@pytest.mark.parametrize(
    ("end", "exit_code", "last_line"),
    [
        ("break", 0, "after the loop"),
        ("raise exits.UserError('a wrong value')", 2, "loop.py: error: a wrong value"),
        in_long("raise ValueError('a bug')", 1, "ValueError: a bug"),
        in_long("raise KeyboardInterrupt", 130, "step 4"),
    ],
)
def test_the_bar_is_erased_however_the_loop_ends(tmp_path, end, exit_code, last_line):
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(root=str(ROOT), end=end), encoding="utf-8")
    code, written = run_in_terminal([sys.executable, str(script)], tmp_path)
    assert code == exit_code
    assert "training:" in written
    lines = [line for line in lines_on_screen(written) if line]
    assert lines[:4] == ["step 1", "step 2", "step 3", "step 4"]
    assert lines[-1] == last_line
    assert not [line for line in lines if "training:" in line]


def test_output_into_a_file_has_no_bar_although_stderr_is_a_terminal(tmp_path):
    """The bar is on the terminal, and the lines are in the file."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(root=str(ROOT), end="break"), encoding="utf-8")
    code, written = run_in_terminal(["sh", "-c", f"{sys.executable} {script} > out"], tmp_path)
    assert code == 0
    assert "training:" in written
    expected = "".join(f"step {step}\n" for step in range(1, 5)) + "after the loop\n"
    assert (tmp_path / "out").read_text(encoding="utf-8") == expected


def test_output_into_a_pipe_is_not_mixed_with_a_bar(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(root=str(ROOT), end="break"), encoding="utf-8")
    code, written = run_in_terminal(["sh", "-c", f"{sys.executable} {script} | cat"], tmp_path)
    assert code == 0
    assert "training:" not in written


def test_only_rank_0_has_a_bar(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(root=str(ROOT), end="break"), encoding="utf-8")
    argv = [sys.executable, str(script)]
    for rank in (0, 1):
        job = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        code, written = run_in_terminal(argv, tmp_path, **job)
        assert code == 0
        assert ("training:" in written) == (rank == 0)


def test_tokenizing_has_a_bar_on_a_terminal(tmp_path):
    script = "05_ddp/prepare_data.py"
    flags = ("--data", TEXT, "--workers", 1)
    code, written = run_in_terminal(command(script, *flags, "--out", "seen"), tmp_path)
    assert code == 0, written
    assert "tokenizing:" in written
    assert "tokenizing:" not in "".join(lines_on_screen(written))

    piped = subprocess.run(
        command(script, *flags, "--out", "piped"),
        cwd=tmp_path,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert piped.returncode == 0, piped.stderr
    assert "\r" not in piped.stdout + piped.stderr
