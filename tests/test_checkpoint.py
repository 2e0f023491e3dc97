"""common/checkpoint.py, run_dir.py, cli.py, exits.py: what a disk, a file system or another node can do to a run."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.harness import ROOT, TINY, command, finish, holds, kill_all, run, start, tiny_flags, train, with_prelude

from common import checkpoint, cli, run_dir
from common.exits import UserError

DDP = "05_ddp/train.py"


def write_text(state, folder: Path, group) -> list[Path]:
    """A writer that is not torch's: what another engine would bring along."""
    folder.mkdir(parents=True)
    (folder / "weights.txt").write_text(state["weights"])
    return [folder / "weights.txt"]


@pytest.fixture
def checkpoints(tmp_path) -> checkpoint.Checkpoints:
    return checkpoint.Checkpoints(tmp_path, keep=1, in_background=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_any_writer_goes_through_the_protocol(tmp_path, checkpoints):
    assert checkpoints.newest() is None
    checkpoints.save(3, {"weights": "three"}, write_text)
    checkpoints.keep = 2
    checkpoints.save(5, {"weights": "five"}, write_text)
    assert names(tmp_path) == ["step-00000003", "step-00000005"]
    assert names(checkpoints.newest()) == ["hashes.json", "weights.txt"]
    assert (checkpoints.newest() / "weights.txt").read_text() == "five"
    (tmp_path / "step-00000005/weights.txt").write_text("fiVe")
    assert checkpoints.newest().name == "step-00000003"
    assert names(tmp_path)[0].startswith("broken-step-00000005")


@pytest.mark.parametrize("hashes", ["{}", "[]", "null", '["weights.txt"]'])
def test_a_checkpoint_whose_hashes_are_gone_is_broken(checkpoints, hashes):
    for step in (1, 2):
        checkpoints.keep = 2
        checkpoints.save(step, {"weights": "some"}, write_text)
    (checkpoints.newest() / "hashes.json").write_text(hashes)
    assert checkpoints.newest().name == "step-00000001"


def test_folders_and_files_of_other_names_are_left_alone(tmp_path, checkpoints):
    others = ["step-00000009-old2", "step-1", "step-old2"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").touch()  # a file
    assert checkpoints.newest() is None
    for step in (1, 2):  # the second save deletes the first
        checkpoints.save(step, {"weights": "some"}, write_text)
    assert checkpoints.newest().name == "step-00000002"
    assert names(tmp_path) == sorted([*others, "step-00000002", "step-00000008"])


def test_a_checkpoint_without_one_of_its_files_gets_no_name(tmp_path, checkpoints):
    """As when a rank writes to a disk of its own."""

    def elsewhere(state, folder, group):
        files = write_text(state, folder, group)
        hidden = folder / "rank-1.txt"
        hidden.write_text("x")
        yield from (*files, hidden)
        hidden.unlink()  # hashed, and then not there

    checkpoints.save(1, {"weights": "one"}, write_text)
    with pytest.raises(UserError, match=r"not seen by rank 0: rank-1.txt; older checkpoints are untouched"):
        checkpoints.save(2, {"weights": "two"}, elsewhere)
    assert checkpoints.newest().name == "step-00000001"


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, checkpoints, monkeypatch, capsys):
    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    claim(tmp_path)
    checkpoints.save(1, {"weights": "one"}, write_text)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", busy)
    checkpoints.save(2, {"weights": "two"}, write_text)
    assert "warning: " in (told := capsys.readouterr().out)
    assert "step-00000001 is no longer needed and cannot be deleted: [Errno 16]" in told
    claim(tmp_path, resume=True)  # still busy at the next start
    assert "step-00000001.old is no longer needed and cannot be deleted" in capsys.readouterr().out
    monkeypatch.undo()
    checkpoints.save(3, {"weights": "three"}, write_text)
    assert [path.name for path in checkpoints._found()] == ["step-00000003"]
    claim(tmp_path, resume=True)
    assert not list(tmp_path.glob("*.old"))  # what was left is cleared at the next start


def test_a_folder_that_cannot_be_synced_is_a_warning(checkpoints, monkeypatch, capsys):
    fsync = os.fsync

    def refused(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    checkpoints.save(1, {"weights": "one"}, write_text)
    assert "cannot be synced, a power cut may lose step-00000001" in capsys.readouterr().out
    assert checkpoints.newest().name == "step-00000001"


def test_a_run_on_the_cpu_of_a_gpu_machine_opens_no_context(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("a CUDA context was opened"))
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("a CUDA context was opened"))
    parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu")}
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=1, in_background=False)
    checkpoint.save(checkpoints, {"step": 1, "skipped_steps": 0}, **parts)
    assert checkpoint.resume(checkpoints, **parts) == {"step": 1, "skipped_steps": 0}


def test_a_save_in_the_background_uses_the_gpu_of_its_rank(tmp_path, monkeypatch):
    set_by = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda i: set_by.update({threading.current_thread(): i}))
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=1, in_background=True)
    checkpoints.save(1, {"weights": "one"}, write_text)
    checkpoints.wait()
    assert list(set_by.values()) == [3]
    assert threading.main_thread() not in set_by


# --- the folder of a run


def claim(folder: Path, resume: bool = False, **settings) -> Path:
    settings = {"lr": 0.1, "data": "stdlib", **settings}
    try:
        return run_dir.claim(folder, settings=settings, contents={"data": "a text"}, resume=resume)
    finally:
        while run_dir._locks:
            run_dir._locks.pop().release()


@pytest.mark.parametrize("left", [(), ("step-00000004", "step-00000008.tmp")], ids=["fresh", "with a checkpoint"])
def test_ranks_with_folders_of_their_own_are_refused_before_the_first_step(tmp_path, left):
    """Two nodes, each with its own disk: here two ranks in two working directories, and a relative --run-dir."""
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "tiny.json").write_text(json.dumps(TINY))
        for name in left:
            (tmp_path / rank / "run" / name).mkdir(parents=True)
    moved = with_prelude(DDP, tmp_path, "os.chdir(os.environ['RANK'])")
    flags = [flag for flag in tiny_flags(tmp_path) if flag != tmp_path / "run"]
    flags[flags.index("--run-dir") : flags.index("--run-dir") + 1] = ["--run-dir", "run", "--resume"]
    result = run(moved, tmp_path, *flags, nproc=2)
    assert result.code != 0
    told = [line for line in result.err.splitlines() if ": error: " in line]
    assert len(told) == 1, result.err
    assert "--run-dir run: a file that rank 0 on " in told[0]
    assert " is not seen by rank 1 on " in told[0]
    assert "exitcode  : 2" in result.err
    assert "step " not in result.out
    for rank in "01":
        assert {path.name for path in (tmp_path / rank / "run").glob("step-*")} == set(left)
    assert not list((tmp_path / "0/run").glob(".seen*"))


def test_ranks_whose_nodes_hold_different_texts_are_refused(tmp_path):
    """As the standard libraries of two Python versions do, or a file of one name on two disks."""
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "tiny.json").write_text(json.dumps(TINY))
        (tmp_path / rank / "text.txt").write_text(f"this is what node {rank} has " * 400)
    moved = with_prelude(DDP, tmp_path, "os.chdir(os.environ['RANK'])")
    result = run(moved, tmp_path, *tiny_flags(tmp_path), "--data", "text.txt", nproc=2)
    told = [line for line in result.err.splitlines() if ": error: " in line]
    assert len(told) == 1, result.err
    assert "--data stands for something else on rank 1 on " in told[0]
    assert "exitcode  : 2" in result.err
    assert not (tmp_path / "run").exists()


def test_a_shared_lock_is_asked_for_as_nfs_wants_it(tmp_path, monkeypatch):
    """There flock becomes a lock of POSIX, and a shared one needs a file that is open for reading."""
    flock = fcntl.flock

    def as_on_nfs(descriptor, operation):
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_SH and access == os.O_WRONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    assert claim(tmp_path) == tmp_path


def test_a_folder_in_use_says_by_whom(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    process = start(command(DDP, *tiny_flags(tmp_path), "--steps", 100_000), tmp_path, SLURM_JOB_ID="4711")
    try:
        assert holds(process, lambda: (tmp_path / "run/metrics.jsonl").exists())
        other = tmp_path / "other"
        result = run(DDP, other, "--device", "cpu", "--run-dir", tmp_path / "run", RUN_DIR_LOCK_SECONDS="0")
    finally:
        kill_all(process)
    assert result.code == 2
    assert (
        f"is in use by a live run (host {os.uname().nodename}, process {process.pid}, job 4711, since 2" in result.err
    )
    assert "RUN_DIR_LOCK_SECONDS=0" in result.err
    claim(tmp_path / "free")  # and the lock of the dead is free
    assert run(DDP, other, "--run-dir", tmp_path / "run", RUN_DIR_LOCK_SECONDS="x").code == 2


HOLDER = """
import errno, fcntl, sys
sys.path.insert(0, {root!r})
from pathlib import Path
def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
from common import exits, run_dir
run_dir.LEASE_SECONDS = 3
def main():
    run_dir.create(Path("run"))
    print("held", flush=True)
    sys.stdin.read()
    return 0
exits.run(main)
"""


def test_without_flock_the_lock_of_a_dead_process_runs_out(tmp_path):
    (tmp_path / "holder.py").write_text(HOLDER.format(root=str(ROOT)))
    argv = [sys.executable, "holder.py"]
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "stdin")
    stdin = os.open(tmp_path / "stdin", os.O_RDWR)  # neither reader nor writer waits for the other
    first = start(["sh", "-c", f"exec {sys.executable} holder.py < stdin"], tmp_path)
    assert holds(first, lambda: "held" in (tmp_path / "stdout").read_text())
    (tmp_path / "a/holder.py").symlink_to(tmp_path / "holder.py")
    (tmp_path / "a/run").symlink_to(tmp_path / "run")
    second = finish(start(argv, tmp_path / "a", RUN_DIR_LOCK_SECONDS="0"), tmp_path / "a")
    assert second.code == 2
    assert "is in use by a live run (host " in second.err
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=600)
    # the file of the dead says another machine now: nobody can ask there whether the process lives
    marker = tmp_path / "run/.lease"
    marker.write_text(marker.read_text().replace(os.uname().nodename, "another-host"))
    third = finish(start(argv, tmp_path / "a", RUN_DIR_LOCK_SECONDS="60"), tmp_path / "a")
    assert third.code == 0, third.err
    os.close(stdin)


def test_settings_say_which_commit_and_a_resume_on_another_says_so(tmp_path, capsys):
    claim(tmp_path)
    file = tmp_path / "settings.json"
    settings = json.loads(file.read_text())
    assert settings["commit"] == run_dir._commit()
    assert settings["data"].startswith("stdlib (SHA-256 ")
    claim(tmp_path, resume=True)
    assert "commit" not in capsys.readouterr().out
    file.write_text(json.dumps({**settings, "commit": "0" * 40}))
    claim(tmp_path, resume=True)
    assert f"warning: this run began at commit {'0' * 40}, and this is " in capsys.readouterr().out
    assert json.loads(file.read_text())["commit"] == "0" * 40


def test_other_settings_or_contents_are_refused(tmp_path):
    claim(tmp_path)
    with pytest.raises(UserError, match=r"--lr 0.2 \(was 0.1\); use another"):
        claim(tmp_path, lr=0.2)
    with pytest.raises(UserError, match=r"--stage 3 \(was None\)"):
        claim(tmp_path, stage=3)
    with pytest.raises(UserError, match=r"--lr None \(was 0.1\)"):
        run_dir.claim(tmp_path, settings={}, contents={}, resume=True)
    run_dir._locks.pop().release()
    with pytest.raises(UserError, match=r"--data stdlib \(SHA-256 [0-9a-f]{12}\) \(was stdlib \(SHA-256"):
        run_dir.claim(tmp_path, settings={"lr": 0.1, "data": "stdlib"}, contents={"data": "b text"}, resume=True)
    run_dir._locks.pop().release()
    for damaged in ("[", "[]", "null"):
        (tmp_path / "settings.json").write_text(damaged)
        with pytest.raises(UserError, match="cannot be used"):
            claim(tmp_path)


@pytest.mark.parametrize("left", [None, "{}"])
def test_checkpoints_without_their_settings_are_refused(tmp_path, left):
    """As of a folder that was copied in part: nobody knows of which run they are."""
    claim(tmp_path)
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "settings.json").unlink()
    if left is not None:
        (tmp_path / "settings.json").write_text(left)
    with pytest.raises(UserError, match="holds checkpoints without the settings"):
        claim(tmp_path, resume=True)
    with pytest.raises(UserError, match="holds a run with checkpoints"):
        claim(tmp_path)
    file = tmp_path / "settings.json"
    assert (file.read_text() if file.exists() else None) == left  # it has not become another run


def test_a_dirty_tree_is_said(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    shutil.copytree(ROOT / "common", tmp_path / "common")
    git = "git -c user.name=a -c user.email=a@b -C ."
    script = "import sys; sys.path.insert(0, '.'); from common import run_dir; print(run_dir._commit())"
    (tmp_path / "commit.py").write_text(script)
    steps = f"{git} init -q && {git} add -A && {git} commit -qm x && {sys.executable} commit.py"
    clean = finish(start(["sh", "-c", steps], tmp_path), tmp_path)
    assert len(clean.out.strip()) == 40, clean.err
    (tmp_path / "common/__init__.py").write_text("# changed\n")
    changed = finish(start(["sh", "-c", f"{sys.executable} commit.py"], tmp_path), tmp_path)
    assert changed.out.strip() == f"{clean.out.strip()}-dirty"


# --- flags


def test_the_recipe_fills_in_what_is_not_given():
    args = cli.training_parser("").parse_args(["--model", "llama-124m", "--lr", "0.5"])
    assert (args.seq_len, args.lr, args.warmup_steps) == (1024, 0.5, 20)
    args = cli.training_parser("").parse_args([])
    assert (args.seq_len, args.lr, args.warmup_steps, args.dtype) == (64, 2e-3, 10, "auto")


def test_a_path_takes_the_recipe_of_the_nearest_size(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}))
    args = cli.training_parser("").parse_args(["--model", str(file)])
    assert (args.seq_len, args.lr) == (128, 6e-4)  # its config has 128 positions
    (tmp_path / "model.safetensors").touch()
    args = cli.training_parser("").parse_args(["--model", str(tmp_path)])
    assert args.lr == pytest.approx(6e-5)


def test_a_chapter_adds_flags_to_what_a_resume_checks():
    parser = cli.training_parser("")
    parser.add_argument("--stage", type=int, default=2, identity=True)
    parser.add_argument("--bucket-mib", type=int, default=1)
    settings = parser.settings(parser.parse_args(["--stage", "3", "--steps", "7"]))
    assert settings["stage"] == 3
    assert {"model", "data", "tokenizer", "seq_len", "global_batch_size", "lr", "dtype", "seed"} <= settings.keys()
    assert not {"steps", "bucket_mib", "micro_batch_size", "device", "run_dir"} & settings.keys()


# --- the end


@pytest.mark.parametrize(("end", "code"), [("return 0", 0), ("raise exits.UserError('no')", 2), ("1 / 0", 1)])
def test_what_must_be_flushed_is_flushed_however_a_script_ends(tmp_path, end, code):
    (tmp_path / "ends.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom common import exits\n"
        "exits.before_exit += [lambda: 1 / 0, lambda: print('flushed')]\n"
        f"def main():\n    {end}\nexits.run(main)\n"
    )
    result = run(tmp_path / "ends.py", tmp_path)
    assert (result.code, result.out) == (code, "flushed\n")
    assert "ZeroDivisionError" in result.err  # a hook that fails hides neither the other hooks nor the exit code


@pytest.mark.parametrize(("lines", "code"), [(100_000, 141), (1, 0)])
def test_a_reader_that_ends_early_is_no_error(tmp_path, lines, code):
    """`script | head`: in the middle of what is printed, and after main has returned."""
    script = tmp_path / "talks.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom common import exits\n"
        "def main():\n    print('first', flush=True)\n    sys.stdin.read()\n"
        f"    for line in range({lines}):\n        print(line)\n    return 0\nexits.run(main)\n"
    )
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # else each line is written at once
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, script], **pipes, env=env, text=True) as process:
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait(timeout=600)) == ("", code)


def test_a_resume_checks_the_dtype_that_auto_has_become(tmp_path):
    flags = ("--dtype", "auto", "--steps", 2)
    trained = train(DDP, tmp_path, *flags)
    settings = json.loads((tmp_path / "run/settings.json").read_text())
    assert settings["dtype"] == trained.summary["dtype"] in ("bf16", "fp32")
    other = "fp32" if settings["dtype"] == "bf16" else "bf16"
    refused = train(DDP, tmp_path, "--dtype", other, "--steps", 2, "--resume", code=2)
    assert f"--dtype {other} (was {settings['dtype']})" in refused.err
