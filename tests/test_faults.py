"""What goes wrong in practice: signals, kills, full disks, damaged files, wrong flags, dying ranks."""

import json
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.harness import (
    BASELINE,
    IN_LONG,
    ROOT,
    SEVERAL,
    TINY,
    TRAINING_SCRIPTS,
    command,
    damage,
    each_of_several,
    each_script,
    finish,
    holds,
    kill_all,
    launch,
    rank_process,
    run,
    start,
    steps_logged,
    tiny_flags,
    train,
    with_prelude,
    with_small_files,
    write_tiny,
)

LONG = ("--steps", 60, "--deterministic", "--save-every", 4)  # long enough to be hit while it runs


def each_launched(name: str, values: dict, sample: set, slow: frozenset = frozenset()):
    """Each value, named by its key, with each script for several processes.

    Real launches are slow, and what answers a signal or a fault is in common/. So of the scripts after the first only
    the values in `sample` run every time. The rest, and those in `slow` of all scripts, run in `make test-all`.
    """
    cases = []
    for script in SEVERAL:
        for key, value in values.items():
            seldom = script in IN_LONG or key in slow or (script != SEVERAL[0] and key not in sample)
            marks = pytest.mark.full if seldom else ()
            cases.append(pytest.param(value, script, id=f"{key}-{script}", marks=marks))
    return pytest.mark.parametrize((name, "script"), cases)


@pytest.fixture(scope="module")
def undisturbed(once) -> Callable[[str, int], str]:
    """undisturbed(script, n): the weights that a run of LONG on n processes ends with."""

    def weights(folder: Path, script: str, n: int) -> str:
        return train(script, folder, *LONG, nproc=n).summary["weights_sha256"]

    return partial(once, "undisturbed", weights)


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "run").glob("step-*"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


# --- signals


@each_launched("number", {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1}, sample={"SIGTERM"})
def test_a_signal_saves_and_asks_to_be_started_again(tmp_path, undisturbed, number, script):
    process = launch(script, tmp_path, *LONG)
    assert holds(process, lambda: steps_logged(tmp_path) >= 7)
    process.send_signal(number)
    result = finish(process, tmp_path)
    assert result.code == 75
    step = result.summary["steps"]
    assert 7 <= step < 60
    assert checkpoints(tmp_path)[-1] == f"step-{step:08d}"
    assert "Traceback" not in result.err
    resumed = train(script, tmp_path, *LONG, "--resume")
    assert resumed.summary["weights_sha256"] == undisturbed(script, 1)
    assert resumed.column("step") == [*range(1, 61), 60]


@each_launched("rank", {"1": 1}, sample=set())
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, undisturbed, rank, script):
    process = launch(script, tmp_path, *LONG, nproc=2)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    rank_process(process, rank).send_signal(signal.SIGUSR1)
    result = finish(process, tmp_path)
    assert result.code != 0
    assert "exitcode  : 75" in result.err
    assert result.out.count("the same command with --resume goes on") == 1
    resumed = train(script, tmp_path, *LONG, "--resume", nproc=2)
    assert resumed.summary["weights_sha256"] == undisturbed(script, 2)


def assert_saved_and_goes_on(process, folder: Path, undisturbed: Callable, script: str) -> None:
    """Two ranks that were told to stop have saved, and end with --resume as if nothing had happened."""
    result = finish(process, folder)
    assert "the same command with --resume goes on" in result.out
    resumed = train(script, folder, *LONG, "--resume", nproc=2)
    assert resumed.summary["weights_sha256"] == undisturbed(script, 2)


@each_launched("flags", {"async": ("--async-save",), "workers": ("--num-workers", 1)}, sample={"async"}, slow={"async"})
def test_a_signal_to_torchrun_saves_too(tmp_path, undisturbed, flags, script):
    """torchrun hands it to each rank's whole process group, data loading workers included."""
    process = launch(script, tmp_path, *LONG, *flags, nproc=2)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    process.send_signal(signal.SIGTERM)
    assert_saved_and_goes_on(process, tmp_path, undisturbed, script)


@each_launched("nohup", {"terminal": [], "nohup": ["nohup"]}, sample=set(), slow={"terminal"})
def test_a_terminal_that_closes_saves_too(tmp_path, undisturbed, nohup, script):
    """torchrun ends even under nohup. A single process goes on there."""
    write_tiny(tmp_path)
    flags = (*tiny_flags(tmp_path), *LONG)
    process = start([*nohup, *command(script, *flags, nproc=2)], tmp_path)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    process.send_signal(signal.SIGHUP)
    assert_saved_and_goes_on(process, tmp_path, undisturbed, script)


@pytest.fixture
def terminal():
    """SIGHUP as in a terminal: under nohup the tests ignore it, and hand that on to what they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("nohup", "code"), [([], 75), (["nohup"], 0)], ids=["terminal", "nohup"])
def test_a_process_saves_when_its_terminal_closes_but_goes_on_under_nohup(tmp_path, undisturbed, terminal, nohup, code):
    write_tiny(tmp_path)
    process = start([*nohup, *command(BASELINE, *tiny_flags(tmp_path), *LONG)], tmp_path)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    process.send_signal(signal.SIGHUP)
    result = finish(process, tmp_path)
    assert result.code == code
    resumed = train(BASELINE, tmp_path, *LONG, "--resume")
    assert resumed.summary["weights_sha256"] == undisturbed(BASELINE, 1)


@each_launched("number", {"SIGUSR1": signal.SIGUSR1, "SIGKILL": signal.SIGKILL}, sample=set(), slow={"SIGUSR1"})
def test_ranks_whose_torchrun_dies_save_and_end(tmp_path, undisturbed, number, script):
    """torchrun does not catch these, and would leave its ranks training for nobody."""
    process = launch(script, tmp_path, *LONG, nproc=2)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    process.send_signal(number)
    assert_saved_and_goes_on(process, tmp_path, undisturbed, script)


# --- kill -9 at any moment


@each_launched("seed", {i: i for i in range(20)}, sample={3}, slow=frozenset(range(4, 20)))
def test_killed_and_resumed_is_undisturbed(tmp_path, undisturbed, seed, script):
    """Kill a job up to three times, at moments drawn from the seed, half of them inside a save."""
    draw = random.Random(seed)
    nproc = (None, 2)[seed % 2]
    flags = (*LONG, *(["--async-save"] if seed % 4 >= 2 else []), "--resume")
    for _ in range(draw.randint(1, 3)):
        process = launch(script, tmp_path, *flags, nproc=nproc)
        moment, in_save = steps_logged(tmp_path) + draw.randrange(1, 30), draw.random() < 0.5
        if holds(process, lambda: steps_logged(tmp_path) >= moment) and in_save:  # noqa: B023
            holds(process, lambda: any((tmp_path / "run").glob("step-*.tmp")))
        kill_all(process)
    resumed = train(script, tmp_path, *flags, nproc=nproc)
    assert resumed.summary["weights_sha256"] == undisturbed(script, nproc or 1)
    assert resumed.column("step") == [*range(1, 61), 60]


# --- ranks that die


FAULT = """
import torch
from torch.nn.parallel import DistributedDataParallel
rank, calls = os.environ["RANK"], 0
step = torch.optim.AdamW.step
def failing_step(self, *args, **kwargs):
    global calls
    calls += 1
    if rank == "1" and calls == 3:
        FAULT
    return step(self, *args, **kwargs)
torch.optim.AdamW.step = failing_step
"""


def with_fault(script: str, folder: Path, fault: str) -> Path:
    """The script, with one statement run on rank 1 before its third optimizer step."""
    return with_prelude(script, folder, FAULT.replace("FAULT", fault))


@each_launched(
    "flags",
    {"plain": (), "busy": ("--save-every", 1, "--async-save", "--num-workers", 1)},
    sample={"plain"},
    slow={"busy"},
)
def test_a_rank_that_fails_takes_the_job_down(tmp_path, flags, script):
    failing = with_fault(script, tmp_path, 'raise RuntimeError("the third step broke")')
    process = launch(failing, tmp_path, "--steps", 5000, *flags, nproc=2)
    assert holds(process, lambda: "the third step broke" in (tmp_path / "stderr").read_text())
    result = finish(process, tmp_path)
    assert result.code != 0
    assert 'raise RuntimeError("the third step broke")' in result.err or "failing_step" in result.err
    assert "RuntimeError: the third step broke" in result.err


@each_of_several
def test_a_rank_that_is_killed_takes_the_job_down(tmp_path, script):
    failing = with_fault(script, tmp_path, "os.kill(os.getpid(), 9)")
    process = launch(failing, tmp_path, "--steps", 5000, nproc=2)
    assert holds(process, lambda: steps_logged(tmp_path) >= 2)
    result = finish(process, tmp_path)
    assert result.code != 0
    assert "Signal 9 (SIGKILL)" in result.err


@each_of_several
def test_a_rank_that_drifts_is_found_at_the_end(tmp_path, script):
    parameter = "self.param_groups[0]['params'][0].data"
    drifting = with_fault(
        script, tmp_path, f"getattr({parameter}, '_local_tensor', {parameter}).view(-1)[0].mul_(1.0001)"
    )
    # a rank can only drift from one that holds the same
    copies = ["--replicate", 2] if '"--replicate"' in (ROOT / script).read_text() else []
    result = train(drifting, tmp_path, *copies, nproc=2, code=1)
    assert "AssertionError: ranks hold different weights" in result.err


# --- disks


@each_of_several
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, script):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        flags = ("--run-dir", disk / "run", "--save-every", 5, "--keep", 9)
        result = train(script, tmp_path, *flags, code=2)
        assert_one_line(result, "cannot save step", "(0 MiB free there)")
        kept = sorted(p.name for p in disk.glob("run/step-*[0-9]"))
        assert kept
        (tmp_path / "run").mkdir()
        shutil.copytree(disk / "run", tmp_path / "run", dirs_exist_ok=True)
    finally:
        subprocess.run(["umount", disk], check=True)
    resumed = train(script, tmp_path, "--save-every", 5, "--keep", 9, "--resume")
    assert f"resuming from {tmp_path}/run/{kept[-1]}" in resumed.out
    assert "is broken" not in resumed.out
    assert resumed.summary["steps"] == 20


@each_launched("background", {"sync": (), "async": ("--async-save",)}, sample={"sync"})
def test_a_file_that_cannot_be_written_leaves_the_previous_checkpoint(tmp_path, background, script):
    train(script, tmp_path, "--steps", 10)
    before = content(tmp_path / "run/step-00000010")
    limited = with_small_files(script, tmp_path, 100_000)
    result = run(limited, tmp_path, *tiny_flags(tmp_path), "--save-every", 15, "--resume", *background)
    assert result.code == 2
    assert_one_line(result, "cannot save step 15", "File too large")
    assert [name for name in checkpoints(tmp_path) if not name.endswith(".tmp")] == ["step-00000010"]
    assert content(tmp_path / "run/step-00000010") == before
    resumed = train(script, tmp_path, "--save-every", 15, "--resume")
    assert "run/step-00000010" in resumed.out


@each_of_several
def test_a_failed_save_on_two_ranks_ends_both(tmp_path, script):
    limited = with_small_files(script, tmp_path, 50_000)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    result = run(limited, tmp_path, *tiny_flags(tmp_path), "--save-every", 5, nproc=2)
    assert result.code != 0
    assert result.err.count("error: cannot save step 5") == 1


@each_of_several
@pytest.mark.parametrize("how", ["truncated", "one bit", "missing"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how, script):
    flags = ("--save-every", 5, "--deterministic")
    whole = train(script, tmp_path, *flags)
    damage(tmp_path / "run/step-00000020", how)
    resumed = train(script, tmp_path, *flags, "--resume")
    assert "run/step-00000020 is broken" in resumed.out
    assert "resuming from" in resumed.out
    assert "run/step-00000015" in resumed.out
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.column("loss") == whole.column("loss")
    assert list((tmp_path / "run").glob("broken-step-00000020-*"))


@each_of_several
def test_only_damaged_checkpoints_stop_the_run_and_stay_as_they_are(tmp_path, script):
    train(script, tmp_path, "--save-every", 10)
    damage(tmp_path / "run/step-00000010", "truncated")
    damage(tmp_path / "run/step-00000020", "one bit")
    before = content(tmp_path / "run")
    result = train(script, tmp_path, "--resume", code=2)
    assert_one_line(result, "every checkpoint", "is broken")
    assert content(tmp_path / "run") == before


# --- bad input: one line, exit code 2


def assert_one_line(result, *words: str) -> None:
    assert result.code == 2, result.err
    lines = [line for line in result.err.splitlines() if line.strip()]
    assert len(lines) == 1, result.err
    assert ": error: " in lines[0]
    for word in words:
        assert word in lines[0]


BAD = {
    "model": (["--model", "llama-9b"], "llama-9b"),
    "dtype": (["--dtype", "fp8"], "fp8"),
    "data": (["--data", "nowhere.txt"], "nowhere.txt"),
    "empty data": (["--data", "empty.txt"], "empty.txt holds no text"),
    "short data": (["--data", "short.txt"], "--seq-len 64, and needs 24: add text"),
    "hub": (["--data", "hf:no/such"], "hf:no/such"),
    "tokenizer": (["--tokenizer", "./nowhere"], "--tokenizer ./nowhere"),
    "batch": (["--global-batch-size", 10, "--micro-batch-size", 4], "use 8 or 12"),
    "batch below": (["--global-batch-size", 3, "--micro-batch-size", 4], "use 4"),
    "zero batch": (["--global-batch-size", 0], "--global-batch-size"),
    "seq-len": (["--seq-len", 1025], "1025 is over the limit of --model nano: 1024"),
    "steps": (["--steps", 0], "--steps"),
    "negative steps": (["--steps", -5], "--steps"),
    "steps word": (["--steps", "many"], "--steps"),
    "lr": (["--lr", "nan"], "--lr"),
    "infinite lr": (["--lr", "inf"], "'inf' is not a number above 0"),
    "keep": (["--keep", 0], "--keep"),
    "flag": (["--step", 5], "--step"),
    "resume": (["--resume"], "--resume needs --run-dir"),
    "json": (["--json", "no/such/folder.json"], "no/such/folder.json"),
    "run dir": (["--run-dir", "empty.txt/run"], "empty.txt/run"),
}


@pytest.mark.parametrize("case", BAD)
@each_script
def test_bad_input(tmp_path, script, case):
    flags, words = BAD[case]
    of_the_parser = {"dtype", "keep", "lr", "infinite lr", "flag", "zero batch", "steps word", "json"}
    if script != BASELINE and case in of_the_parser:
        pytest.skip("the parser is the same as the baseline's")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short a text to train on" * 20)
    result = run(script, tmp_path, "--device", "cpu", *flags, HF_HUB_OFFLINE="1")
    assert_one_line(result, words)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/step-*"))


@each_of_several
def test_no_gpu(tmp_path, script):
    result = run(script, tmp_path, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert_one_line(result, "--device cuda", "--device cpu")


@each_of_several
@pytest.mark.parametrize(
    ("flags", "words", "warm"),
    [
        (["--model", "llama-9b"], "llama-9b", False),
        (["--global-batch-size", 7], "use 6 or 8", True),
        (["--steps", "0"], "--steps", True),
    ],
)
def test_bad_input_is_told_once_under_torchrun(tmp_path, flags, words, warm, script):
    result = run(script, tmp_path, "--device", "cpu", *flags, nproc=2, warm=warm)
    assert result.code != 0
    told = [line for line in result.err.splitlines() if f"{script}: error: " in line]
    assert len(told) == 1
    assert words in told[0]
    assert result.out == ""
    assert warm or "exitcode  : 2" in result.err  # torchrun's own report


@pytest.mark.parametrize("script", sorted({*TRAINING_SCRIPTS} - {*SEVERAL}))
def test_a_script_of_one_process_refuses_several(tmp_path, script):
    result = run(script, tmp_path, "--device", "cpu", nproc=2)
    assert result.code != 0
    assert result.err.count("error: this script runs in one process") == 1


@each_of_several
@pytest.mark.parametrize("given", ["RANK=0", "RANK=0 WORLD_SIZE=2", "RANK=a WORLD_SIZE=1 LOCAL_RANK=0", "LOCAL_RANK=1"])
def test_a_launcher_that_sets_half_its_variables(tmp_path, given, script):
    result = run(script, tmp_path, **dict(pair.split("=") for pair in given.split()))
    assert_one_line(result, "start with torchrun")


@each_of_several
def test_a_rank_without_its_torchrun_does_not_train(tmp_path, script):
    """As one that was still starting when its torchrun was killed: nobody answers where they should meet."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(nobody.getsockname()[1]), "COLLECTIVE_TIMEOUT_SECONDS": "2"}
        env |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        result = run(script, tmp_path, "--device", "cpu", "--steps", 1, **env)
    assert result.code == 1
    assert "DistNetworkError" in result.err
    assert result.out == ""


@each_of_several
def test_a_folder_with_another_runs_settings(tmp_path, script):
    train(script, tmp_path)
    before = content(tmp_path / "run")
    result = train(script, tmp_path, "--lr", 0.5, "--seq-len", 16, "--resume", code=2)
    assert_one_line(result, "--lr 0.5 (was 0.002)", "--seq-len 16 (was 32)")
    assert "--seed" not in result.err
    assert_one_line(train(script, tmp_path, code=2), "holds a run with checkpoints", "--resume")
    assert content(tmp_path / "run") == before


@each_of_several
def test_a_folder_whose_text_has_changed(tmp_path, script):
    text = (ROOT / "05_ddp/train.py").read_text()
    (tmp_path / "text.txt").write_text(text)
    train(script, tmp_path, "--data", "text.txt", "--steps", 2)
    (tmp_path / "text.txt").write_text(text.replace("rank", "link"))
    result = train(script, tmp_path, "--data", "text.txt", "--steps", 2, "--resume", code=2)
    assert_one_line(result, "other settings: --data text.txt (SHA-256 ")


@each_of_several
def test_a_finished_run_resumes_to_its_summary(tmp_path, script):
    whole = train(script, tmp_path).summary
    again = train(script, tmp_path, "--resume").summary
    same = ("steps", "tokens", "first_loss", "last_loss", "val_loss", "weights_sha256")
    assert {key: again[key] for key in same} == {key: whole[key] for key in same}


@each_of_several
def test_more_ranks_than_held_out_sequences(tmp_path, script):
    text = (ROOT / "05_ddp/train.py").read_bytes()[:1300]  # 38 training sequences of 32 bytes, 2 held out
    (tmp_path / "text.txt").write_bytes(text)
    result = train(script, tmp_path, "--data", "text.txt", "--steps", 2, nproc=3)
    assert result.summary["val_loss"] > 0


@each_of_several
def test_a_folder_in_use_by_a_live_run(tmp_path, script):
    (tmp_path / "live").mkdir()
    process = launch(script, tmp_path / "live", "--steps", 100_000)
    try:
        assert holds(process, lambda: steps_logged(tmp_path / "live") > 0)
        flags = ("--run-dir", tmp_path / "live/run", "--resume")
        result = train(script, tmp_path / "second", *flags, code=2, RUN_DIR_LOCK_SECONDS="1")
        assert_one_line(result, "in use by a live run")
        assert process.poll() is None
    finally:
        kill_all(process)


@each_of_several
def test_resume_with_nothing_there_starts_afresh(tmp_path, script):
    assert train(script, tmp_path, "--resume").summary["steps"] == 20


@each_of_several
def test_a_model_file_that_has_changed(tmp_path, script):
    train(script, tmp_path, "--steps", 2)
    (tmp_path / "other.json").write_text(json.dumps({**TINY, "rms_norm_eps": 1e-3}))  # the weights would still fit
    (tmp_path / "other.json").replace(tmp_path / "tiny.json")
    result = run(script, tmp_path, *tiny_flags(tmp_path), "--steps", 2, "--resume")
    assert_one_line(result, "other settings: --model tiny.json (SHA-256 ")


def test_a_loss_that_is_not_finite_names_the_step(tmp_path):
    flags = ("--lr", 1e30, "--dtype", "fp32", "--clip-norm", "inf", "--save-every", 7)
    each = train(BASELINE, tmp_path / "each", *flags, code=2)
    first_bad = len(each.records) + 1
    assert 1 < first_bad < 7
    seventh = train(BASELINE, tmp_path / "seventh", *flags, "--log-every", 7, code=2)
    for result in (each, seventh):
        assert_one_line(result, f"not finite at step {first_bad}", "--lr", "--warmup-steps")
        assert not checkpoints(result.folder)


def test_a_held_out_loss_that_is_not_finite_is_told(tmp_path):
    flags = ("--steps", 1, "--lr", 1e38, "--warmup-steps", 0, "--dtype", "fp32")
    result = train(BASELINE, tmp_path, *flags, code=2)
    assert_one_line(result, "the held-out loss is nan after step 1")


def test_a_background_save_is_finished_before_an_error_ends_the_run(tmp_path):
    result = train(BASELINE, tmp_path, "--lr", 1e30, "--clip-norm", "inf", "--save-every", 1, "--async-save", code=2)
    last = len(result.records)
    assert_one_line(result, f"not finite at step {last + 1}")
    assert checkpoints(tmp_path)[-1] == f"step-{last:08d}"


def test_gradients_that_overflow_at_every_scale_end_the_run(tmp_path):
    """Not as a success in which no step was taken."""
    (tmp_path / "nan.py").write_text(
        "import runpy, sys, torch\n"
        "unscale = torch.amp.GradScaler.unscale_\n"
        "def broken(self, optimizer):\n"
        "    optimizer.param_groups[0]['params'][0].grad.fill_(float('inf'))\n"
        "    unscale(self, optimizer)\n"
        "torch.amp.GradScaler.unscale_ = broken\n"
        f"sys.argv = [{str(ROOT / BASELINE)!r}, *sys.argv[1:]]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    result = run(tmp_path / "nan.py", tmp_path, *tiny_flags(tmp_path), "--dtype", "fp16", "--steps", 40)
    assert_one_line(result, "not finite at step 17")  # 2**16 halved 17 times
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"vocab_size": 2.5},
        {"num_hidden_layers": 0},
    ],
)
def test_a_config_that_cannot_be(tmp_path, change):
    (tmp_path / "odd.json").write_text(json.dumps({**TINY, **change}))
    assert_one_line(run(BASELINE, tmp_path, "--device", "cpu", "--model", "odd.json"), "--model")
