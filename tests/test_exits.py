"""Nothing is lost, and one line says why: signals, a log that nobody reads, full disks, limits."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import (
    BASELINE,
    LIMIT,
    ROOT,
    SEVERAL,
    Result,
    assert_refused,
    checkpoints,
    clean_env,
    command,
    error_lines,
    finish,
    holds,
    in_full,
    launch,
    run,
    start,
    steps_logged,
    tiny_flags,
    train,
    with_prelude,
    with_small_files,
    write_tiny,
)

DDP = SEVERAL[0]
ESTIMATE = "07_memory_tricks/estimate.py"
FINETUNE = "06_fsdp_zero/finetune.py"
PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"


def shell(folder: Path, line: str, **env: str) -> Result:
    """Run a line of shell in a folder, as a user types it."""
    environment = clean_env(**env)
    process = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return Result(process.returncode, process.stdout, process.stderr, folder, (line,))


def words_of(script: str, *flags) -> str:
    """Return the command line of a script, for `shell`."""
    return " ".join(command(script, *flags))


# --- signals


def test_ctrl_c_saves_and_says_so(tmp_path):
    """A job of a launcher that starts what ends with 75 again must end: the exit code is 130."""
    process = launch(DDP, tmp_path, "--steps", 100_000)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    process.send_signal(signal.SIGINT)
    result = finish(process, tmp_path)
    assert result.code == 130, result
    step = result.summary["steps"]
    assert checkpoints(tmp_path) == [f"step-{step:08d}"]
    [line] = [line for line in result.out.splitlines() if f"saved at step {step}" in line]
    assert f"{tmp_path}/run" in line
    assert "--resume" in line
    assert (tmp_path / "run/loss.png").exists()
    assert "Traceback" not in result.err

    resumed = train(DDP, tmp_path, "--steps", step + 1, "--resume")
    assert resumed.column("step")[-1] == step + 1


# The second signal comes while the run saves, which here takes for ever.
NEVER_SAVES = """
import threading
from training import checkpoint
def save(*arguments):
    open("saving", "w").close()
    threading.Event().wait()
checkpoint.Run.save = save
"""


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    process = launch(with_prelude(BASELINE, tmp_path, NEVER_SAVES), tmp_path, "--steps", 100_000)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    process.send_signal(signal.SIGINT)
    assert holds(process, lambda: (tmp_path / "saving").exists())
    process.send_signal(signal.SIGINT)
    result = finish(process, tmp_path)
    assert result.code == 130, result
    assert "Traceback" not in result.err


# The model is never ready: as one of many billions of parameters on a CPU.
NEVER_READY = """
import time
from lm import weights
def build(*arguments, **settings):
    open("building", "w").close()
    while True:
        time.sleep(0.01)
weights.build = build
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), in_full(signal.SIGINT, 130)])
def test_a_signal_before_the_first_step_ends_the_script(tmp_path, number, code):
    process = launch(with_prelude(BASELINE, tmp_path, NEVER_READY), tmp_path)
    assert holds(process, lambda: (tmp_path / "building").exists())
    process.send_signal(number)
    result = finish(process, tmp_path)
    assert result.code == code, result
    assert "Traceback" not in result.err
    if number == signal.SIGTERM:
        assert len(error_lines(result)) == 1
        assert "SIGTERM" in result.err


# --- a log that nobody reads, or that cannot be written


@pytest.mark.parametrize("nproc", [None, in_full(2)])
def test_a_run_goes_on_when_the_reader_of_its_log_ends(tmp_path, nproc):
    write_tiny(tmp_path)
    script = DDP if nproc else BASELINE
    argv = command(script, *tiny_flags(tmp_path), nproc=nproc)
    result = shell(tmp_path, f"{' '.join(argv)} | head -2; exit ${{PIPESTATUS[0]}}")
    assert result.code == 0, result
    assert len(result.out.splitlines()) == 2
    assert "BrokenPipeError" not in result.err
    assert "metrics.jsonl" in result.err
    assert (result.summary["steps"], checkpoints(tmp_path)) == (20, ["step-00000020"])
    assert result.column("step")[-1] == 20


@pytest.mark.long
def test_a_run_goes_on_without_any_reader(tmp_path):
    """The terminal has been closed: neither stdout nor stderr can be written."""
    write_tiny(tmp_path)
    line = f"{words_of(BASELINE, *tiny_flags(tmp_path))} 2>&1 | true; exit ${{PIPESTATUS[0]}}"
    result = shell(tmp_path, line)
    assert (result.code, result.summary["steps"]) == (0, 20), result


@pytest.mark.parametrize(
    ("redirection", "words"),
    [("| head -1", []), (">&-", []), (">/dev/full", ["No space left on device"])],
)
def test_a_script_without_a_reader_ends_without_a_traceback(tmp_path, redirection, words):
    # of a second or less, and without torch
    result = shell(tmp_path, f"{words_of(ESTIMATE)} {redirection}; exit ${{PIPESTATUS[0]}}")
    assert result.code == 0, result
    assert "Traceback" not in result.err
    assert "Error" not in result.err
    assert all(word in result.err for word in words)
    assert words or result.err == ""


def test_text_that_the_terminal_cannot_show(tmp_path):
    """With an ASCII locale, names of files and lines of the log are written as escapes."""
    (tmp_path / "été.txt").write_text("Ça ira, ça ira. " * 200, encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    flags = [*tiny_flags(tmp_path), "--data", "été.txt", "--run-dir", "rün", "--steps", 1]
    write_tiny(tmp_path)
    result = finish(start(command(BASELINE, *flags), tmp_path, **ascii_only), tmp_path)
    assert result.code == 0, result
    assert (tmp_path / "rün/step-00000001").is_dir()
    result = run(ESTIMATE, tmp_path, "--model", "café", **ascii_only)
    assert_refused(result, "--model caf")


# --- disks


def test_a_model_that_does_not_fit_on_the_disk(tmp_path):
    """safetensors has an exception of its own, without errno."""
    write_tiny(tmp_path)
    limited = with_small_files(FINETUNE, tmp_path, 60_000)
    flags = [*tiny_flags(tmp_path), "--data", PAIRS, "--seq-len", 128, "--steps", 1]
    more = ["--adapters", 0, "--keep", 0, "--save-dtype", "fp32"]
    result = run(limited, tmp_path, *flags, *more)
    assert_refused(result, str(tmp_path / "run/model"), "MiB free", "File too large")
    assert not list((tmp_path / "run").glob("model*"))  # no half of it takes room


# Exceptions of libraries whose disk is full, as they raise them
FULL = {
    "safetensors": "SafetensorError('Error while serializing: I/O error: {} (os error 28)')",
    "torch": "RuntimeError('[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0')",
    "numpy": "OSError('1000 requested and 24 written')",
    "sqlite": "sqlite3.OperationalError('database or disk is full')",
    "system": "OSError(28, '{}', 'cache/x.bin')",
    "quota": "OSError(122, 'Disk quota exceeded')",
    "broken": "OSError(5, 'Input/output error')",
}
RAISE = """
import os, sqlite3, sys
sys.path.insert(0, {root!r})
from common import exits
class SafetensorError(Exception):
    pass
def main():
    raise {error}
exits.run(main)
"""


def test_the_exception_of_a_library_for_a_full_disk_is_one_line(tmp_path):
    for library in FULL:
        error = FULL[library].format("No space left on device")
        script = tmp_path / "script.py"
        script.write_text(RAISE.format(root=str(ROOT), error=error), encoding="utf-8")
        result = run(script, tmp_path)
        assert_refused(result)
        assert "enforce fail" not in result.err, library


def test_the_last_line_of_torchrun_is_the_error_of_the_rank(tmp_path):
    """Also for an error that is no user's: the last line of the traceback."""
    script = tmp_path / "script.py"
    script.write_text(RAISE.format(root=str(ROOT), error="ValueError('a bug')"), encoding="utf-8")
    result = finish(start(command(str(script), nproc=1), tmp_path), tmp_path)
    assert result.code == 1
    last_line = result.err.rstrip("=\n ").splitlines()[-1]
    assert last_line.strip() == "traceback : ValueError: a bug"


# --- flags

LIMITS = {
    "a seed of 2^64": ("--seed", str(2**64)),
    "more steps than a loop can have": ("--steps", str(2**63)),
    "more processes than a machine has": ("--num-workers", "1000000"),
    "a rate without end": ("--lr", "inf"),
    "a decay without end": ("--weight-decay", "inf"),
    "a norm that is none": ("--clip-norm", "nan"),
    "a number of many digits": ("--log-every", "9" * 5000),
}


def test_a_value_out_of_range_is_refused(tmp_path):
    for flag, value in LIMITS.values():
        assert_refused(run(BASELINE, tmp_path, flag, value), flag, value[:300])
        assert not (tmp_path / "runs").exists()


def test_the_largest_seed_trains(tmp_path):
    train(BASELINE, tmp_path, "--seed", 10**15, "--steps", 2)


def test_a_mistake_is_told_with_its_fix(tmp_path):
    for flags, words in (
        (["--stpes", 5], ["--stpes", "--steps"]),
        (["--dtype", "fp61"], ["fp61", "fp16"]),
        (["--model", "lama-8b"], ["lama-8b", "llama-8b"]),
        (["--nproc_per_node=2"], ["--nproc_per_node", "before the name of the script"]),
    ):
        assert_refused(run(BASELINE, tmp_path, "--device", "cpu", *flags), *words)


def test_too_few_ranks_for_a_mesh_gives_the_command(tmp_path):
    result = run("08_model_parallel/train_3d.py", tmp_path, "--tp", 2, "--device", "cpu")
    assert_refused(result, "torchrun --nproc_per_node=2", "--tp 2")


def test_help_has_the_defaults(tmp_path):
    result = run(BASELINE, tmp_path, "--help")
    assert result.code == 0
    text = " ".join(result.out.split())
    for flag, default in (("--weight-decay", "0.1"), ("--seed", "0"), ("--keep", "3")):
        own_text = text.rpartition(f"{flag} ")[2].partition(" --")[0]
        assert f"(default: {default})" in own_text
    assert "None" not in text
    assert "default: False" not in text


# --- packages that are missing

SCRIPTS = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("[0-9]*/[!_]*.py"))
WITH_COMMON = []  # the others are files to copy, or import a script
for script in SCRIPTS:
    if script != ESTIMATE and "sys.path.insert" in (ROOT / script).read_text(encoding="utf-8"):
        WITH_COMMON.append(script)


def test_without_torch_one_line_says_what_to_do(tmp_path):
    """Python -S finds no installed package, as the system's Python."""
    assert WITH_COMMON
    wrong = []
    for script in WITH_COMMON:
        argv = [sys.executable, "-S", str(ROOT / script), "--help"]
        result = finish(start(argv, tmp_path), tmp_path)
        try:
            assert_refused(result, "make venv", ".venv/bin/activate")
        except AssertionError as error:
            wrong.append(f"{script}: {error}")
    assert not wrong, "\n".join(wrong)


def test_what_needs_no_torch_runs_without(tmp_path):
    argv = [sys.executable, "-S", str(ROOT / ESTIMATE)]
    assert finish(start(argv, tmp_path), tmp_path).code == 0


# --- a machine whose name has no address


@pytest.mark.launch
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="root gives the host a name"
)
def test_a_host_whose_name_has_no_address(tmp_path):
    """torchrun would ask for it without end."""
    write_tiny(tmp_path)
    flags = " ".join(map(str, [*tiny_flags(tmp_path), "--steps", 1]))
    own_name = "hostname no-such-host.invalid &&"
    line = f"{own_name} NPROC_PER_NODE=1 {ROOT}/launch/torchrun/single_node.sh {flags}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    argv = ["unshare", "-u", "bash", "-c", line]
    result = finish(start(argv, tmp_path, PATH=path), tmp_path)
    assert (result.code, result.summary["steps"]) == (0, 1), result
