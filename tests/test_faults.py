"""What goes wrong in practice: signals, kill -9, ranks that die, full disks, damaged checkpoints."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.harness import (
    BASELINE,
    ROOT,
    SEVERAL,
    Result,
    assert_refused,
    checkpoints,
    content,
    damage,
    each_of_several,
    each_way_to_shard,
    finish,
    holds,
    in_full,
    in_long,
    kill_all,
    launch,
    run,
    steps_logged,
    tiny_flags,
    train,
    with_prelude,
    with_small_files,
    write_tiny,
)

DDP, *OTHERS = SEVERAL
LONG = ("--steps", 60, "--deterministic", "--save-every", 10)  # long enough to be hit while it runs


@pytest.fixture(scope="module")
def undisturbed(once) -> Callable[[str, int], str]:
    """undisturbed(script, n): the weights that a run of LONG on n processes ends with."""

    def weights(folder: Path, script: str, n: int) -> str:
        return train(script, folder, *LONG, nproc=n).summary["weights_sha256"]

    return partial(once, "undisturbed", weights)


@pytest.fixture(scope="module")
def saved_often(once) -> Callable[[str, Path], Result]:
    """saved_often(script, folder): the run of 20 steps with four checkpoints, copied into `folder`."""

    def whole(folder: Path, script: str) -> Result:
        return train(script, folder, "--save-every", 5, "--keep", 4, "--deterministic")

    def copied(script: str, folder: Path) -> Result:
        result = once("saved often", whole, script)
        shutil.copytree(result.folder, folder, dirs_exist_ok=True)
        return result

    return copied


# --- signals


def signalled(process, folder: Path, number: int, steps: int = 3) -> Result:
    """Send a run that signal when it has logged so many steps, and wait for its end."""
    assert holds(process, lambda: steps_logged(folder) >= steps)
    process.send_signal(number)
    return finish(process, folder)


@pytest.mark.parametrize(
    ("number", "script"),
    [
        pytest.param(signal.SIGTERM, DDP, id=f"SIGTERM-{DDP}"),
        in_long(signal.SIGUSR1, DDP, id=f"SIGUSR1-{DDP}"),
        *(in_long(signal.SIGTERM, script, id=f"SIGTERM-{script}") for script in OTHERS),
    ],
)
def test_a_signal_saves_and_asks_to_be_started_again(tmp_path, undisturbed, number, script):
    result = signalled(launch(script, tmp_path, *LONG), tmp_path, number, steps=7)
    assert result.code == 75, result
    step = result.summary["steps"]
    assert 7 <= step < 60
    assert checkpoints(tmp_path)[-1] == f"step-{step:08d}"
    assert "Traceback" not in result.err
    resumed = train(script, tmp_path, *LONG, "--resume")
    assert resumed.summary["weights_sha256"] == undisturbed(script, 1)
    assert resumed.column("step") == [*range(1, 61), 60]


def assert_saved_and_goes_on(result: Result, undisturbed: Callable, script: str) -> None:
    """Two ranks that were told to stop have saved, and end with --resume as if nothing had happened."""
    step = int(checkpoints(result.folder)[-1].removeprefix("step-"))
    assert step == result.summary["steps"] < 60
    resumed = train(script, result.folder, *LONG, "--resume", nproc=2)
    assert resumed.summary["weights_sha256"] == undisturbed(script, 2)


@each_way_to_shard
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, undisturbed, script):
    tells = with_prelude(
        script, tmp_path, 'print(os.getpid(), file=open("rank-" + os.environ["RANK"], "w"))'
    )
    process = launch(tells, tmp_path, *LONG, nproc=2, torchrun=False)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    os.kill(int((tmp_path / "rank-1").read_text(encoding="utf-8")), signal.SIGUSR1)
    result = finish(process, tmp_path)
    assert result.code != 0
    assert "exitcode  : 75" in result.err
    assert_saved_and_goes_on(result, undisturbed, script)


@pytest.mark.parametrize(
    ("number", "flags", "script"),
    [
        pytest.param(signal.SIGTERM, ("--num-workers", 1), DDP, id="workers"),
        in_full(signal.SIGKILL, (), DDP, id="SIGKILL"),
        in_full(signal.SIGHUP, (), DDP, id="terminal"),
        *(
            in_full(signal.SIGTERM, ("--async-save",), script, id=f"async-{script}")
            for script in OTHERS
        ),
    ],
)
def test_a_signal_to_torchrun_saves_too(tmp_path, undisturbed, number, flags, script):
    """It hands one that it can catch to each rank's process group, workers included; else its ranks miss it."""
    process = launch(script, tmp_path, *LONG, *flags, nproc=2)
    assert_saved_and_goes_on(signalled(process, tmp_path, number), undisturbed, script)


@pytest.mark.parametrize(
    ("found", "code"), [("SIG_DFL", 75), ("SIG_IGN", 0)], ids=["terminal", "nohup"]
)
def test_a_process_saves_when_its_terminal_closes_but_goes_on_under_nohup(
    tmp_path, undisturbed, found, code
):
    script = with_prelude(
        BASELINE, tmp_path, f"import signal; signal.signal(signal.SIGHUP, signal.{found})"
    )
    result = signalled(launch(script, tmp_path, *LONG), tmp_path, signal.SIGHUP)
    assert result.code == code, result
    resumed = train(BASELINE, tmp_path, *LONG, "--resume")
    assert resumed.summary["weights_sha256"] == undisturbed(BASELINE, 1)


@each_of_several
def test_files_in_the_folder_of_the_run_save_and_stop_it(tmp_path, script):
    process = launch(script, tmp_path, "--steps", 1_000_000, nproc=2)
    assert holds(process, lambda: steps_logged(tmp_path) >= 3)
    (tmp_path / "run/save").touch()
    assert holds(process, lambda: list((tmp_path / "run").glob("step-*[0-9]")))
    (tmp_path / "run/stop").touch()
    result = finish(process, tmp_path)
    assert result.code == 0, result  # so that nothing starts it again
    assert result.out.splitlines()[-1].endswith(f"--run-dir {tmp_path / 'run'} --resume")
    step = result.summary["steps"]
    saved, stopped = checkpoints(tmp_path)
    assert saved < stopped == f"step-{step:08d}"
    assert not (tmp_path / "run/save").exists()
    # one that an earlier run has left
    (tmp_path / "run/stop").touch()
    resumed = train(script, tmp_path, "--resume", "--steps", step + 2)
    assert resumed.summary["steps"] == step + 2
    assert not (tmp_path / "run/stop").exists()


# --- kill -9 at any moment


@pytest.mark.parametrize(
    ("seed", "script"),
    [
        (3, DDP),
        in_full(2, DDP),
        in_long(0, DDP),
        in_long(1, DDP),
        *(in_full(3, other) for other in OTHERS),
    ],
)
def test_killed_and_resumed_is_undisturbed(tmp_path, undisturbed, seed, script):
    """Kill a job up to three times, at moments drawn from the seed, half of them inside a save."""
    draw = random.Random(seed)
    nproc = (None, 2)[seed % 2]
    flags = (*LONG, *(["--async-save"] if seed % 4 >= 2 else []), "--resume")
    for _ in range(draw.randint(1, 3)):
        process = launch(script, tmp_path, *flags, nproc=nproc, torchrun=False)
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


@each_of_several
def test_a_rank_that_fails_takes_the_job_down(tmp_path, script):
    failing = with_fault(script, tmp_path, 'raise RuntimeError("the third step broke")')
    busy = ("--save-every", 1, "--async-save", "--num-workers", 1)
    process = launch(failing, tmp_path, "--steps", 5000, *busy, nproc=2, torchrun=False)
    result = finish(process, tmp_path)
    assert result.code != 0
    assert "RuntimeError: the third step broke" in result.err


@each_of_several
def test_a_rank_that_is_killed_takes_the_job_down(tmp_path, script):
    failing = with_fault(script, tmp_path, "os.kill(os.getpid(), 9)")
    result = finish(launch(failing, tmp_path, "--steps", 5000, nproc=2, torchrun=False), tmp_path)
    assert result.code != 0
    assert steps_logged(tmp_path) == 2
    assert "exitcode  : -9" in result.err


@each_way_to_shard
def test_a_rank_that_drifts_is_found_at_the_end(tmp_path, script):
    parameter = "self.param_groups[0]['params'][0].data"
    drifting = with_fault(
        script,
        tmp_path,
        f"getattr({parameter}, '_local_tensor', {parameter}).view(-1)[0].mul_(1.0001)",
    )
    # a rank can only drift from one that holds the same
    copies = (
        ["--replicate", 2] if '"--replicate"' in (ROOT / script).read_text(encoding="utf-8") else []
    )
    result = train(drifting, tmp_path, *copies, nproc=2, code=1)
    assert "AssertionError: ranks hold different weights" in result.err


# --- disks; tests/fault_campaign.py has one that is full


@pytest.mark.parametrize(
    ("background", "script"),
    [
        pytest.param((), DDP, id=f"sync-{DDP}"),
        in_full(("--async-save",), DDP, id=f"async-{DDP}"),
        *(in_long((), script, id=f"sync-{script}") for script in OTHERS),
    ],
)
def test_a_file_that_cannot_be_written_leaves_the_previous_checkpoint(tmp_path, background, script):
    train(script, tmp_path, "--steps", 10)
    before = content(tmp_path / "run/step-00000010")
    limited = with_small_files(script, tmp_path, 100_000)
    result = run(
        limited, tmp_path, *tiny_flags(tmp_path), "--save-every", 15, "--resume", *background
    )
    assert_refused(result, "cannot save step 15", "File too large")
    assert [name for name in checkpoints(tmp_path) if not name.endswith(".tmp")] == [
        "step-00000010"
    ]
    assert content(tmp_path / "run/step-00000010") == before
    resumed = train(script, tmp_path, "--save-every", 15, "--resume")
    assert "run/step-00000010" in resumed.out


def test_a_failed_save_on_two_ranks_ends_both(tmp_path):
    limited = with_small_files(DDP, tmp_path, 50_000)
    result = train(limited, tmp_path, "--save-every", 5, nproc=2, code=1)
    assert result.err.count("error: cannot save step 5") == 1


@pytest.mark.parametrize(
    ("how", "script"),
    [
        ("one bit", DDP),
        in_full("truncated", DDP),
        in_full("missing", DDP),
        *(in_full("one bit", other) for other in OTHERS),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, saved_often, how, script):
    whole = saved_often(script, tmp_path)
    damage(tmp_path / "run/step-00000020", how)
    resumed = train(script, tmp_path, "--save-every", 5, "--keep", 4, "--deterministic", "--resume")
    assert f"{tmp_path}/run/step-00000015" in resumed.out
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.column("loss") == whole.column("loss")
    assert list((tmp_path / "run").glob("broken-step-00000020-*"))


def test_only_damaged_checkpoints_stop_the_run_and_stay_as_they_are(tmp_path, saved_often):
    saved_often(DDP, tmp_path)
    for checkpoint, how in zip(
        checkpoints(tmp_path), ("truncated", "one bit", "missing", "one bit"), strict=True
    ):
        damage(tmp_path / "run" / checkpoint, how)
    before = content(tmp_path / "run")
    assert_refused(
        train(DDP, tmp_path, "--resume", code=2), "--resume", f"{tmp_path}/run is broken"
    )
    assert content(tmp_path / "run") == before


# --- too little memory


def test_a_model_that_does_not_fit_ends_in_one_line(tmp_path):
    """The limit is on the address space, so that Linux refuses instead of killing somebody."""
    limit = (
        "import resource\n"
        "mapped = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (mapped + 32 * 2**20,) * 2)"
    )
    write_tiny(tmp_path)
    flags = [*tiny_flags(tmp_path), "--seq-len", 128, "--global-batch-size", 64]
    result = run(with_prelude(BASELINE, tmp_path, limit), tmp_path, *flags)
    assert_refused(result, "out of memory", "07_memory_tricks/estimate.py")


# Refused at once: more than any address space. No page of it is touched.
ASKS_TOO_MUCH = """
import torch
step, calls = torch.optim.AdamW.step, 0
def failing_step(self, *args, **more):
    global calls
    calls += 1
    if os.environ.get("RANK") == FAILING and calls == 4:
        torch.empty(2**47, dtype=torch.uint8)
    return step(self, *args, **more)
torch.optim.AdamW.step = failing_step
"""


@pytest.mark.parametrize("rank", [0, in_full(1)])  # rank 1 waits 5 s for rank 0 to tell
def test_one_rank_without_memory_ends_the_job_in_one_line(tmp_path, rank):
    script = with_prelude(DDP, tmp_path, ASKS_TOO_MUCH.replace("FAILING", f"'{rank}'"))
    result = train(script, tmp_path, nproc=2, code=1)
    lines = [line for line in result.err.splitlines() if "error: out of memory" in line]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("rank 1: ") == (rank == 1)
    assert "DefaultCPUAllocator" not in result.err


@pytest.mark.gpu(n=1)
def test_gpu_out_of_memory_is_one_line(gpus, tmp_path):
    prelude = "import torch\ntorch.cuda.set_per_process_memory_fraction(0.001)"
    script = with_prelude(BASELINE, tmp_path, prelude)
    flags = ["--device", "cuda", "--model", "llama-124m", "--run-dir", tmp_path / "run"]
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(script, tmp_path, *flags, warm=False, **visible)
    assert (result.code, result.err.count("error: out of memory"), "Traceback" in result.err) == (
        2,
        1,
        False,
    ), result


# --- losses that are not finite


def test_a_loss_that_is_not_finite_names_the_step(tmp_path):
    flags = ("--lr", 1e30, "--dtype", "fp32", "--clip-norm", "inf", "--save-every", 7)
    each = train(BASELINE, tmp_path / "each", *flags, code=2)
    first_bad = len(each.records) + 1
    assert 1 < first_bad < 7
    seventh = train(BASELINE, tmp_path / "seventh", *flags, "--log-every", 7, code=2)
    for result, step in ((each, first_bad), (seventh, 7)):
        assert_refused(result, f"not finite by step {step}", "--lr", "--warmup-steps")
        assert not checkpoints(result.folder)


def test_a_held_out_loss_that_is_not_finite_is_told(tmp_path):
    flags = ("--steps", 1, "--lr", 1e38, "--warmup-steps", 0, "--dtype", "fp32")
    assert_refused(train(BASELINE, tmp_path, *flags, code=2), "held-out loss", "nan", "step 1")


def test_a_background_save_is_finished_before_an_error_ends_the_run(tmp_path):
    result = train(
        BASELINE,
        tmp_path,
        "--lr",
        1e30,
        "--clip-norm",
        "inf",
        "--save-every",
        1,
        "--async-save",
        code=2,
    )
    last = len(result.records)
    assert_refused(result, f"not finite by step {last + 1}")
    assert checkpoints(tmp_path)[-1] == f"step-{last:08d}"


OVERFLOWS = """
import torch
unscale = torch.amp.GradScaler.unscale_
def broken(self, optimizer):
    optimizer.param_groups[0]["params"][0].grad.fill_(float("inf"))
    unscale(self, optimizer)
torch.amp.GradScaler.unscale_ = broken
"""


def test_gradients_that_overflow_at_every_scale_end_the_run(tmp_path):
    """Not as a success in which no step was taken."""
    result = train(
        with_prelude(BASELINE, tmp_path, OVERFLOWS),
        tmp_path,
        "--dtype",
        "fp16",
        "--steps",
        40,
        code=2,
    )
    assert_refused(result, "not finite by step 17")  # 2**16 halved 17 times
    assert not checkpoints(tmp_path)
