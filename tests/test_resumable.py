"""The two resumable.py: one loss, whatever stops the run and whatever continues it.

Each run has 12 short steps. A copy of the script with one edited line stops the run at a step.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from support.harness import ROOT, Result, command, finish, holds, in_full, in_long, run, start

pytestmark = pytest.mark.timeout(1200)

DDP = "05_ddp/resumable.py"
FSDP = "06_fsdp_zero/resumable.py"
RESTART = 75
STEPS = ("--steps", 12, "--save-every", 4, "--evaluate-every", 6)
FLAGS = ("--dtype", "fp32", "--global-batch", 6, "--micro-batch", 1, "--log-every", 1, *STEPS)
LAYOUTS = [
    (DDP, 2),
    (FSDP, 2),
    in_full(FSDP, 3),
    in_long(FSDP, None),
    *(in_long(DDP, nproc) for nproc in (None, 3)),
]


def resumable(
    script: str | Path, folder: Path, *flags, nproc: int | None = None, code: int = 0
) -> Result:
    """Start the script with its run in folder/run, and wait for its end."""
    result = run(str(script), folder, "--run-dir", folder / "run", *FLAGS, *flags, nproc=nproc)
    assert result.code == code, result
    return result


def values(folder: Path) -> dict[tuple[str, int], float]:
    """Return the losses and gradient norms by step: the last line of a step counts."""
    found = {}
    for line in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for name in ("loss", "norm", "held_out_loss"):
            if name in record:
                found[name, record["step"]] = record[name]
    return found


def assert_equal_up_to_rounding(folder: Path, expected_folder: Path) -> None:
    """Losses agree within 1e-6, and gradient norms, which amplify rounding, within 1e-5."""
    found = values(folder)
    expected = values(expected_folder)
    assert found.keys() == expected.keys()
    for key in expected:
        tolerance = 1e-5 if key[0] == "norm" else 1e-6
        assert found[key] == pytest.approx(expected[key], rel=tolerance), key


def with_line(script: str | Path, folder: Path, line: str) -> Path:
    """Return a copy of the script that runs a line of code in each step, before the batch."""
    before = "        micro_batches = load_batch(train, step)\n"
    source = (ROOT / script).read_text(encoding="utf-8")
    assert source.count(before) == 1
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "resumable.py"
    copy.write_text(source.replace(before, f"        {line}\n{before}"), encoding="utf-8")
    return copy


def killed(script: str, folder: Path, nproc: int | None) -> None:
    """Train until step 7, where each rank is killed as by kill -9. The last checkpoint is of 4."""
    killing = "step == 7 and os.kill(os.getpid(), signal.SIGKILL)"
    copy = with_line(script, folder, killing)
    result = run(str(copy), folder, "--run-dir", folder / "run", *FLAGS, nproc=nproc)
    assert result.code != 0
    assert [step for name, step in values(folder) if name == "loss"] == [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def never_stopped(once):
    """never_stopped(script, nproc): a finished run."""

    def whole(folder: Path, script: str, nproc: int | None) -> Result:
        return resumable(script, folder, nproc=nproc)

    return partial(once, "never stopped", whole)


@pytest.fixture
def finished(never_stopped, tmp_path) -> Result:
    """A copy of a finished run of one process."""
    result = never_stopped(DDP, None)
    shutil.copytree(result.folder, tmp_path, dirs_exist_ok=True)
    return result


@pytest.mark.parametrize(("script", "nproc"), LAYOUTS)
def test_all_have_one_loss(script, nproc, never_stopped):
    folder = never_stopped(script, nproc).folder
    assert_equal_up_to_rounding(folder, never_stopped(DDP, None).folder)


def test_micro_batches_of_any_size_have_one_loss(never_stopped, tmp_path):
    resumable(DDP, tmp_path, "--micro-batch", 4)  # the last one has two sequences
    assert_equal_up_to_rounding(tmp_path, never_stopped(DDP, None).folder)


@pytest.mark.parametrize(
    ("script", "nproc"), [(DDP, 2), *(in_full(FSDP, nproc) for nproc in (None, 2, 3))]
)
def test_a_killed_run_resumes_bit_for_bit(script, nproc, never_stopped, tmp_path):
    killed(script, tmp_path, nproc)
    result = resumable(script, tmp_path, nproc=nproc)
    assert "4 of 12 steps are done" in result.out
    assert values(tmp_path) == values(never_stopped(script, nproc).folder)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "lock",
        "metrics.jsonl",
        "settings.json",
        "step-00000008",
        "step-00000012",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [((DDP, 2), (FSDP, 3)), in_long((DDP, 2), (DDP, 3)), in_full((FSDP, 3), (DDP, None))],
)
def test_a_run_resumes_on_other_ranks_and_with_the_other_script(
    before, after, never_stopped, tmp_path
):
    killed(before[0], tmp_path, before[1])
    resumable(after[0], tmp_path, nproc=after[1])
    assert_equal_up_to_rounding(tmp_path, never_stopped(*before).folder)


@pytest.mark.parametrize(
    ("script", "nproc", "number"),
    [
        (DDP, 2, signal.SIGTERM),
        in_full(FSDP, None, signal.SIGUSR1),
        in_long(DDP, 2, signal.SIGUSR1),
        in_long(FSDP, None, signal.SIGTERM),
    ],
)
def test_a_signal_to_one_rank_saves_and_stops_all(script, nproc, number, never_stopped, tmp_path):
    last = (nproc or 1) - 1
    sending = f"(step, rank) == (6, {last}) and os.kill(os.getpid(), {int(number)})"
    copy = with_line(script, tmp_path, sending)
    flags = ("--run-dir", tmp_path / "run", *FLAGS)
    result = run(str(copy), tmp_path, *flags, nproc=nproc)
    if nproc is None:
        assert result.code == RESTART, result
    else:
        assert result.code == 1, result  # of torchrun itself
        assert f"exitcode  : {RESTART}" in result.err
    assert (tmp_path / "run/step-00000006").is_dir()
    resumed = resumable(script, tmp_path, nproc=nproc)
    assert "6 of 12 steps are done" in resumed.out
    assert values(tmp_path) == values(never_stopped(script, nproc).folder)


@pytest.mark.long  # torchrun itself; tests/test_faults.py has the same for 05_ddp/train.py
def test_torchrun_passes_sigterm_on(tmp_path):
    argv = command(FSDP, "--run-dir", tmp_path / "run", *FLAGS, "--steps", 100_000, nproc=2)
    process = start(argv, tmp_path)
    metrics = tmp_path / "run/metrics.jsonl"
    assert holds(process, lambda: metrics.exists() and ("loss", 3) in values(tmp_path))
    process.terminate()
    result = finish(process, tmp_path)
    assert result.code == 1, result
    last = max(step for name, step in values(tmp_path) if name == "loss")
    assert (tmp_path / f"run/step-{last:08d}/sizes.json").exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", in_full(".metadata"), in_full("sizes.json")])
def test_a_truncated_checkpoint_is_set_aside(name, finished, tmp_path):
    file = tmp_path / "run/step-00000012" / name
    os.truncate(file, file.stat().st_size - 1)
    (tmp_path / "run/step-00000016.tmp").mkdir()  # what a killed save leaves
    (tmp_path / "run/step-of-mine.tmp").mkdir()
    result = resumable(DDP, tmp_path)
    assert "step-00000012 is damaged" in result.out
    assert "8 of 12 steps are done" in result.out
    assert values(tmp_path) == values(finished.folder)
    names = [path.name for path in (tmp_path / "run").iterdir()]
    assert "step-00000012" in names
    assert [name for name in names if name.endswith(".tmp")] == ["step-of-mine.tmp"]
    assert any(re.fullmatch(r"damaged-step-00000012-\d+", name) for name in names)


@pytest.mark.usefixtures("finished")
def test_a_run_with_damaged_checkpoints_only_does_not_start_again(tmp_path):
    for folder in (tmp_path / "run").glob("step-*"):
        os.truncate(folder / ".metadata", 10)
    for _ in range(2):
        result = resumable(DDP, tmp_path, code=1)
        assert "has damaged checkpoints only" in result.err


def write_tokens(folder: Path, text: bytes, size: int) -> None:
    """Write the bytes of a text as nanoGPT's files, with token ids of `size` bytes."""
    folder.mkdir()
    cut = len(text) * 95 // 100
    for name, part in (("train.bin", text[:cut]), ("val.bin", text[cut:])):
        ids = b"".join(token.to_bytes(size, "little") for token in part)
        (folder / name).write_bytes(ids)


@pytest.mark.parametrize(("vocabulary", "size"), [(300, 2), in_full(70_000, 4)])
def test_token_files_train_as_the_text_does(vocabulary, size, tmp_path):
    text = (ROOT / "tests/data/text.txt").read_bytes()
    (tmp_path / "text.txt").write_bytes(text)
    write_tokens(tmp_path / "tokens", text, size)
    flags = ["--vocabulary", vocabulary, "--steps", 2]
    for data in ("text.txt", "tokens"):
        resumable(DDP, tmp_path / f"run of {data}", "--data", tmp_path / data, *flags)
    assert values(tmp_path / "run of tokens") == values(tmp_path / "run of text.txt")


REFUSED = {
    "another learning rate": (["--lr", 0.1], "has lr 0.001, not 0.1"),
    "more steps": (["--steps", 13], "has steps 12, not 13"),
    "other data": (["--data", ROOT / "tests/data/text.txt"], "has tokens "),
    "no data": (["--data", "missing.txt"], "missing.txt"),
    "no token files": (["--data", ROOT / "tests"], "train.bin"),
    "little data": (["--data", ROOT / "requirements.txt"], "are too few"),
    "a small vocabulary": (["--vocabulary", 50], "give --vocabulary"),
}


@pytest.mark.usefixtures("finished")
def test_a_mistake_is_refused_in_one_line(tmp_path):
    for mistake, (flags, words) in REFUSED.items():
        result = resumable(DDP, tmp_path, *flags, code=2)
        assert words in result.err.splitlines()[-1], mistake


@pytest.mark.usefixtures("finished")
def test_a_folder_in_use_is_refused(tmp_path):
    with open(tmp_path / "run/lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = resumable(DDP, tmp_path, code=1)
    assert "is in use" in result.err
    assert (tmp_path / "run/step-00000012").exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    copy = with_line(DDP, tmp_path, "step == 7 and model.head.weight.data.fill_(math.nan)")
    result = resumable(copy, tmp_path, code=1)
    assert "the gradient norm of step 8 is nan" in result.err
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000004"]


@pytest.mark.parametrize("script", [FSDP, in_full(DDP)])
def test_a_weight_without_a_gradient_is_named(script, tmp_path):
    """A resume of FSDP would miss its optimizer state."""
    head = "        self.head = nn.Linear(width, vocabulary)\n"
    source = (ROOT / script).read_text(encoding="utf-8")
    assert source.count(head) == 1
    pooler = "        self.pooler = nn.Linear(width, width)\n"
    copy = tmp_path / "pooler.py"
    copy.write_text(source.replace(head, head + pooler), encoding="utf-8")
    result = resumable(copy, tmp_path, code=1)
    assert "pooler.weight has no gradient" in result.err


def test_buffers_are_those_of_rank_0(tmp_path):
    """As BatchNorm's are, which each rank computes from its own rows."""
    head = "        self.head = nn.Linear(width, vocabulary)\n"
    source = (ROOT / DDP).read_text(encoding="utf-8")
    forward = "        x = self.embedding(tokens)"
    for text in (head, forward):
        assert source.count(text) == 1
    buffer = '        self.register_buffer("seen", torch.zeros(1))\n'
    noted = "        self.seen += tokens.sum() * self.training\n"
    copy = tmp_path / "buffer.py"
    source = source.replace(head, head + buffer).replace(forward, noted + forward)
    copy.write_text(source, encoding="utf-8")
    resumable(copy, tmp_path / "whole", nproc=2)
    killed_copy = with_line(copy, tmp_path / "killed", "step == 7 and os.kill(os.getpid(), 9)")
    run_dir = tmp_path / "killed/run"
    run(str(killed_copy), tmp_path / "killed", "--run-dir", run_dir, *FLAGS, nproc=2)
    resumable(copy, tmp_path / "killed", nproc=2)
    assert values(tmp_path / "killed") == values(tmp_path / "whole")


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path):
    result = resumable(DDP, tmp_path, "--global-batch", 5, nproc=2, code=1)
    assert "--global-batch 5 is not divisible by 2 ranks" in result.err
    assert not (tmp_path / "run").exists()


def test_checkpoints_of_another_program_are_refused(tmp_path):
    (tmp_path / "run/step-00000100").mkdir(parents=True)
    result = resumable(DDP, tmp_path, code=2)
    assert "has checkpoints, and no settings.json" in result.err
    assert (tmp_path / "run/step-00000100").exists()


def test_the_weights_load_into_the_plain_model(finished, tmp_path):
    converter = "torch.distributed.checkpoint.format_utils"
    assert f"-m {converter} dcp_to_torch" in (ROOT / DDP).read_text(encoding="utf-8")
    argv = [sys.executable, "-m", converter, "dcp_to_torch"]
    argv += [str(tmp_path / "run/step-00000012"), "all.pt"]
    assert finish(start(argv, tmp_path), tmp_path).code == 0
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    load = f"import sys, torch; sys.path.insert(0, {str(ROOT / '05_ddp')!r}); import resumable; "
    load += "resumable.Model().load_state_dict(torch.load('all.pt')['model'])"
    (tmp_path / "load.py").write_text(load, encoding="utf-8")
    assert run(str(tmp_path / "load.py"), tmp_path).code == 0
    assert len(saved["model"]) > 0
