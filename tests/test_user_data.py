"""Data and run folders as people have them.

Links, few documents, moved files, outputs of runs beside the text, locks.
"""

import json
import os
import re
import shutil
import signal
import socket
from argparse import Namespace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from support.harness import (
    BASELINE,
    SEVERAL,
    TINY,
    Result,
    assert_refused,
    config_of,
    finish,
    holds,
    in_full,
    kill_all,
    launch,
    run,
    steps_logged,
    tiny_flags,
    train,
    with_prelude,
)

from lm import weights
from training import checkpoint

DDP = SEVERAL[0]
PREPARE = "05_ddp/prepare_data.py"
SHORT = ["--steps", 1, "--global-batch-size", 2, "--seq-len", 16]


def sizes(result: Result) -> tuple[int, int]:
    """Return the numbers of training and held-out tokens that a run printed, once."""
    [(train_tokens, held_out)] = re.findall(
        r": ([\d,]+) tokens for training, ([\d,]+) held out", result.out
    )
    return int(train_tokens.replace(",", "")), int(held_out.replace(",", ""))


def lines(word: str, count: int) -> str:
    """Return a text of numbered lines, each of 32 bytes."""
    return "".join(f"{word} says number {i}".ljust(31, ".") + "\n" for i in range(count))


# --- links, and what cannot be read


def link_a_folder(data: Path) -> int:
    (data.parent / "big").mkdir()
    (data.parent / "big/b.txt").write_text(lines("b", 50), encoding="utf-8")
    (data / "part2").symlink_to("../big")
    return 50


def link_folders_in_a_chain(data: Path) -> int:
    for name, count in (("one", 10), ("two", 20)):
        (data.parent / name).mkdir()
        (data.parent / name / "text.md").write_text(lines(name, count), encoding="utf-8")
    (data / "z").symlink_to(data.parent / "one")
    (data.parent / "one/next.d").symlink_to("../two")
    return 30


def link_in_a_loop(data: Path) -> int:
    (data / "deep").mkdir()
    (data / "deep/c.txt").write_text(lines("c", 20), encoding="utf-8")
    (data / "deep/up").symlink_to("..")
    (data / "self").symlink_to(".")
    return 20


def link_one_folder_twice(data: Path) -> int:
    added = link_a_folder(data)
    (data / "again").symlink_to("../big")
    return added


def link_files(data: Path) -> int:
    """Store texts as blobs, as the cache of the Hugging Face hub does."""
    (data.parent / "blobs").mkdir()
    (data.parent / "blobs/0123").write_text(lines("blob", 30), encoding="utf-8")
    for name in ("d.txt", "the-same.txt"):
        (data / name).symlink_to("../blobs/0123")
    (data / "again.txt").symlink_to("a.txt")
    return 30


LINKS = [
    link_files,
    link_in_a_loop,
    in_full(link_a_folder),
    in_full(link_folders_in_a_chain),
    in_full(link_one_folder_twice),
]


@pytest.mark.parametrize("make", LINKS)
def test_links_are_followed_and_each_file_is_read_once(tmp_path, make):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text(lines("a", 100), encoding="utf-8")
    added = make(data)
    result = train(BASELINE, tmp_path, *SHORT, "--data", "data")
    text_bytes = 32 * (100 + added)
    assert text_bytes <= sum(sizes(result)) < text_bytes + 20  # an end token for each document


def test_prepare_data_follows_links(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text(lines("a", 100), encoding="utf-8")
    added = link_folders_in_a_chain(tmp_path / "data") + link_in_a_loop(tmp_path / "data")
    flags = ["--data", "data", "--out", "tokens", "--json", "summary.json", "--workers", 1]
    result = run(PREPARE, tmp_path, *flags)
    assert result.code == 0, result
    assert result.summary["text_bytes"] == 32 * (100 + added)


def break_a_link(data: Path) -> str:
    (data / "b.txt").symlink_to("nowhere.txt")
    return ""


def break_a_link_to_a_folder(data: Path) -> str:
    (data / "secret").symlink_to("/no/such/disk")
    return ""


def put_a_pipe(data: Path) -> str:
    os.mkfifo(data / "b.txt")
    return ""


def forbid_a_folder(data: Path) -> str:
    (data / "secret").mkdir()
    return """
scandir = os.scandir
def forbid(path='.'):
    if str(path).endswith('secret'):
        raise PermissionError(13, 'Permission denied', str(path))
    return scandir(path)
os.scandir = forbid
"""


def forbid_a_file(data: Path) -> str:
    (data / "secret.txt").write_text(lines("b", 50), encoding="utf-8")
    return """
import pyarrow
input_stream = pyarrow.input_stream
def forbid(path):
    if str(path).endswith('secret.txt'):
        raise PermissionError(13, 'Permission denied', str(path))
    return input_stream(path)
pyarrow.input_stream = forbid
"""


UNREADABLE = {
    "broken link": (break_a_link, "b.txt"),
    "broken link to a folder": (break_a_link_to_a_folder, "secret"),
    "pipe": (put_a_pipe, "b.txt"),
    "folder": (forbid_a_folder, "secret"),
    "file": (forbid_a_file, "secret.txt"),
}


@pytest.mark.parametrize("script", [BASELINE, in_full(PREPARE)])
def test_what_cannot_be_read_is_told(tmp_path, script):
    for case, (make, word) in UNREADABLE.items():
        if (script, case) == (PREPARE, "file"):
            continue
        folder = tmp_path / case
        data = folder / "data"
        data.mkdir(parents=True)
        (data / "a.txt").write_text(lines("a", 100), encoding="utf-8")
        prelude = make(data)
        program = with_prelude(script, folder, prelude) if prelude else script
        flags = ["--data", "data"]
        if script == BASELINE:
            flags += ["--device", "cpu"]
        assert_refused(run(program, folder, *flags), "--data data", word)
        assert not list(folder.glob("runs/*/step-*"))


def test_what_cannot_be_read_is_told_once_under_torchrun(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text(lines("a", 100), encoding="utf-8")
    break_a_link(tmp_path / "data")
    result = run(DDP, tmp_path, "--data", "data", "--device", "cpu", nproc=2)
    told = [line for line in result.err.splitlines() if ": error: " in line]
    assert (result.code, len(told)) == (1, 1), result
    assert "b.txt" in told[0]
    assert "exitcode  : 2" in result.err


# --- the held-out text


def jsonl(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


FEW_DOCUMENTS = {
    "a book and a note": {"book.txt": lines("book", 800), "README.md": lines("note", 12)},
    "a note and a book": {"book.md": lines("b", 800), "a.txt": "short\n", "z.txt": "brief\n"},
    "ten of a size": {f"{i}.txt": lines(f"file {i}", 40) for i in range(10)},
    "a long row": {"rows.jsonl": jsonl([lines("long", 500)] + [f"row {i}" for i in range(300)])},
    "many rows": {"rows.jsonl": jsonl([lines(f"row {i}", 1 + i % 5) for i in range(300)])},
    "a large copy": {"a.txt": lines("same", 300), "b.txt": lines("same", 300)},
    "many copies": {"rows.jsonl": jsonl([lines(f"row {i % 150}", 2) for i in range(300)])},
}


@pytest.mark.parametrize(
    "case",
    [
        case if case in ("a book and a note", "a long row", "many copies") else in_full(case)
        for case in FEW_DOCUMENTS
    ],
)
def test_about_5_percent_of_the_text_is_held_out(tmp_path, case):
    data = tmp_path / "data"
    data.mkdir()
    for name, text in FEW_DOCUMENTS[case].items():
        (data / name).write_text(text, encoding="utf-8")
    cache = tmp_path / "cache"
    result = train(BASELINE, tmp_path, *SHORT, "--data", "data", CORPUS_CACHE=str(cache))
    train_tokens, held_out_tokens = sizes(result)
    assert 0.04 < held_out_tokens / (train_tokens + held_out_tokens) < 0.06

    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    sides = []
    for name in ("train.npy", "held_out.npy"):
        tokens = np.load(folder / name)
        assert len(tokens) in (train_tokens, held_out_tokens)
        sides.append({line for line in bytes(tokens).split(b"\n") if len(line) == 31})
    assert not sides[0] & sides[1]  # whole lines


# --- the same run, described in another way


def write_model(folder: Path, seed: int = 0, vocab_size: int = 320) -> None:
    """Write a model folder with random weights and a tokenizer."""
    from safetensors.torch import save_file
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    shape = {**TINY, "vocab_size": vocab_size}
    net = weights.build("", config_of(shape), seed=0, device="meta").to_empty(device="cpu")
    weights.init_weights(net, seed)
    tensors = {name: tensor.detach() for name, tensor in net.named_parameters()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([lines("a", 20)], vocab_size=300, special_tokens=["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>")
    tokenizer.save_pretrained(folder)


@pytest.fixture
def started(once, tmp_path) -> Path:
    """A run of 2 steps on job1/text.txt and the model m/llama, in tmp_path."""

    def start(folder: Path) -> Path:
        (folder / "job1").mkdir()
        (folder / "job1/text.txt").write_text(lines("a", 300), encoding="utf-8")
        shutil.copytree(folder / "job1", folder / "job2")
        write_model(folder / "m/llama")
        shutil.copytree(folder / "m/llama", folder / "m/copy")
        write_model(folder / "m/trained", seed=1)
        train(BASELINE, folder, "--data", "job1/text.txt", "--model", "m/llama", "--steps", 2)
        return folder

    shutil.copytree(once("started", start), tmp_path, dirs_exist_ok=True)
    return tmp_path


def resume(folder: Path, *flags) -> Result:
    defaults = ["--data", "job1/text.txt", "--model", "m/llama", "--steps", 3, "--resume"]
    return run(BASELINE, folder, *tiny_flags(folder), *defaults, *flags)


SAME = {
    "another path": ["--data", "job2/text.txt"],
    "./": ["--data", "./job1/text.txt"],
    "a folder with the file": ["--data", "job2"],
    "the model's folder with a slash": ["--model", "m/llama/"],
    "a copy of the model's folder": ["--model", "m/copy"],
    "the model's own tokenizer": ["--tokenizer", "m/llama"],
    "its copy": ["--tokenizer", "./m/copy/", "--model", "m/../m/llama"],
}
IN_SHORT = ("another path", "its copy")


@pytest.mark.parametrize(
    "case", [*IN_SHORT, *(in_full(case) for case in SAME if case not in IN_SHORT)]
)
def test_a_run_resumes_however_its_files_are_named(started, case):
    result = resume(started, *SAME[case])
    assert result.code == 0, result
    assert "resuming from" in result.out
    assert json.loads((started / "summary.json").read_text(encoding="utf-8"))["steps"] == 3


OTHER = {
    "another text under the name": ([], "--data job1/text.txt"),
    "other bytes as tokens": (["--tokenizer", "bytes"], "--tokenizer bytes (was None)"),
    "other weights of the same shape": (["--model", "m/trained"], "weights of --model (SHA-256 "),
}


def test_a_run_does_not_resume_with_other_content(started):
    for flags, words in OTHER.values():
        if not flags:
            (started / "job1/text.txt").write_text(lines("b", 300), encoding="utf-8")
        assert_refused(resume(started, *flags), words)
        (started / "job1/text.txt").write_text(lines("a", 300), encoding="utf-8")


def test_a_run_keeps_the_date_of_its_first_start(tmp_path, monkeypatch):
    args = Namespace(
        run_dir=tmp_path / "run", resume=True, keep=1, keep_best=False, async_save=False
    )
    first = checkpoint.start_date(args)
    assert abs((datetime.now() - first).total_seconds()) < 60
    settings = {"--model": "nano", "--data": "chats", "--seed": 0}
    settings[checkpoint.DATE] = first.isoformat()
    started = checkpoint.Run(args, settings=settings)
    started.lock.release()

    class Later(datetime):
        @classmethod
        def now(cls):
            return datetime.fromtimestamp(first.timestamp() + 400 * 86400)

    monkeypatch.setattr(checkpoint, "datetime", Later)
    assert checkpoint.start_date(args).isoformat() == first.isoformat()
    assert checkpoint.start_date(Namespace(run_dir=None)).date() != first.date()


# --- other content under the same names, of the same size and time


def write_as_before(file: Path, text: str) -> None:
    """Write a file that has the time of an older one."""
    file.write_text(text, encoding="utf-8")
    os.utime(file, (1e9, 1e9))


def write_bpe(folder: Path, text: str) -> None:
    """Write a tokenizer as vocab.json and merges.txt. Its merges are learned from the text."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(exist_ok=True)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size=300, special_tokens=["<end>"])
    bpe.save_model(str(folder))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>", "unk_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))


def test_cached_tokens_are_those_of_the_content_and_not_of_the_names(tmp_path):
    cache = tmp_path / "cache"
    (tmp_path / "wide.json").write_text(json.dumps({**TINY, "vocab_size": 320}), encoding="utf-8")
    flags = [*SHORT, "--data", "d.txt", "--model", "wide.json"]
    write_as_before(tmp_path / "d.txt", lines("a", 100))

    def entries_after_training(*more) -> int:
        train(BASELINE, tmp_path, *flags, *more, "--keep", 0, CORPUS_CACHE=str(cache))
        shutil.rmtree(tmp_path / "run")
        return sum(path.is_dir() for path in cache.iterdir())

    assert entries_after_training() == 1
    os.utime(tmp_path / "d.txt")  # the same text, at another time
    assert entries_after_training() == 1
    write_as_before(tmp_path / "d.txt", lines("b", 100))
    assert entries_after_training() == 2
    # a tokenizer of several files, of which only some are replaced
    write_bpe(tmp_path / "bpe", lines("b", 100))
    assert entries_after_training("--tokenizer", "bpe") == 3
    shutil.copytree(tmp_path / "bpe", tmp_path / "copy")
    assert entries_after_training("--tokenizer", "copy") == 3
    write_bpe(tmp_path / "bpe", lines("c", 100)[::-1])
    assert entries_after_training("--tokenizer", "bpe") == 4


def test_tokens_are_not_prepared_from_one_text_and_then_another(tmp_path):
    file = tmp_path / "data/d.jsonl"
    file.parent.mkdir()
    write_as_before(file, jsonl([lines("a", 10)] * 9))
    flags = ["--data", "data", "--out", "tokens", "--workers", 1]
    assert run(PREPARE, tmp_path, *flags).code == 0
    write_as_before(file, jsonl([lines("b", 10)] * 9))
    assert_refused(run(PREPARE, tmp_path, *flags), "--out", "other data")


# --- outputs of runs


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder in which people train: texts beside the folders of runs."""
    for i in range(3):
        (tmp_path / f"n{i}.txt").write_text(lines(f"file {i}", 100), encoding="utf-8")
    return tmp_path


def train_here(folder: Path, *flags) -> Result:
    """Train on all texts in the folder that is the working directory."""
    (folder / ".tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    shared = ["--model", ".tiny.json", "--device", "cpu", "--data", ".", "--log-every", 1]
    result = run(BASELINE, folder, *shared, *SHORT, *flags)
    assert result.code == 0, result
    return result


def test_outputs_of_other_runs_are_no_text(project):
    first = train_here(project)
    (project / "runs/notes.txt").write_text(lines("notes in runs/", 10), encoding="utf-8")
    second = train_here(project, "--run-dir", "elsewhere/run")
    assert sum(sizes(second)) == sum(sizes(first)) + 321  # the notes are text
    [folder] = [path.name for path in (project / "runs").iterdir() if path.is_dir()]
    told = [line for line in second.out.splitlines() if "left out" in line]
    assert len(told) == 1
    assert folder in told[0]
    (project / "elsewhere/link").symlink_to(f"../runs/{folder}")
    third = train_here(project, "--run-dir", "elsewhere/second")
    assert sizes(third) == sizes(second)


@pytest.mark.parametrize("run_dir", [".", *map(in_full, ("run", "./deep/run/", "n0.d"))])
def test_a_run_beside_its_text_resumes(project, run_dir):
    first = train_here(project, "--run-dir", run_dir)
    again = train_here(project, "--run-dir", run_dir, "--resume", "--steps", 2)
    assert sizes(again) == sizes(first)
    assert "resuming from" in again.out
    assert "left out" in again.out


def test_what_lies_in_the_run_dir_is_left_out_from_the_first_start(project):
    (project / "run").mkdir()
    (project / "run/notes.txt").write_text(lines("notes", 50), encoding="utf-8")
    first = train_here(project, "--run-dir", "run")
    assert sum(sizes(first)) == 3 * 3201 + 3  # each of the three is cut, into two documents
    again = train_here(project, "--run-dir", "run", "--resume", "--steps", 2)
    assert sizes(again) == sizes(first)


def test_files_with_the_names_of_a_runs_are_text_where_they_are_no_runs(project):
    (project / "songs").mkdir()
    (project / "songs/metrics.jsonl").write_text(jsonl([lines("song", 100)]), encoding="utf-8")
    (project / "songs/run.json").write_text('{"volume": 11}', encoding="utf-8")
    assert sum(sizes(train_here(project))) == 4 * 3202


def test_prepare_data_leaves_out_runs_and_its_own_output(project):
    train_here(project)
    for name in (".tiny.json", "stdout", "stderr"):
        (project / name).unlink()
    flags = ["--data", str(project), "--json", str(project.parent / "summary.json")]
    folder = project.parent / "elsewhere"
    for _ in range(2):
        result = run(PREPARE, folder, *flags, "--out", project / "tokens", "--workers", 1)
        assert result.code == 0, result
        assert "left out" in result.out
    summary = json.loads((project.parent / "summary.json").read_text(encoding="utf-8"))
    assert summary["text_bytes"] == 3 * 3200


# --- locks

LEASE = """
from training import lock
lock.LEASE_SECONDS = {0}
lock.HEARTBEAT_SECONDS = 0.25
lock.QUIET_SECONDS = 0.25
"""
OTHER_NODE = """
import socket
socket.gethostname = lambda: "another-node"
"""


def with_locks(folder: Path, *preludes: str, lease_seconds: float = 2) -> Path:
    """Return the baseline script with these changes to its locks."""
    return with_prelude(BASELINE, folder, "".join([*preludes, LEASE.format(lease_seconds)]))


@pytest.mark.parametrize("prelude", ["", OTHER_NODE], ids=["same node", "another node"])
def test_two_runs_exclude_each_other(tmp_path, prelude):
    """A live run keeps its folder. After kill -9 the next run takes it."""
    live_folder = tmp_path / "live"
    script = with_locks(tmp_path / "1", prelude)
    process = launch(script, live_folder, "--steps", 100_000, "--save-every", 5)
    second = with_locks(tmp_path / "2")
    flags = ["--run-dir", live_folder / "run", "--resume"]
    try:
        assert holds(process, lambda: (live_folder / "run/step-00000005").exists())
        refused = train(second, tmp_path / "2", *flags, code=2, RUN_DIR_LOCK_SECONDS="1")
        host = "another-node" if prelude else socket.gethostname()
        assert_refused(refused, "--run-dir", "live run", f"process {process.pid} on {host}")
        assert process.poll() is None
    finally:
        kill_all(process)
    steps = steps_logged(live_folder)
    resumed = train(second, tmp_path / "2", *flags, "--steps", steps + 5, RUN_DIR_LOCK_SECONDS="1")
    assert "resuming from" in resumed.out
    assert not (live_folder / "run/.lock.lease").exists()  # the next run need not wait


def lock_run_folder(folder: Path, lease: str) -> None:
    (folder / "run").mkdir()
    (folder / "run/.lock.lease").write_text(lease, encoding="utf-8")


def lock_cache(folder: Path, lease: str) -> None:
    train(BASELINE, folder, *SHORT, "--keep", 0, CORPUS_CACHE=str(folder / "cache"))
    shutil.rmtree(folder / "run")
    [tokens] = [path for path in (folder / "cache").iterdir() if path.is_dir()]
    shutil.rmtree(tokens)
    tokens.with_name(f"{tokens.name}.lock.lease").write_text(lease, encoding="utf-8")


@pytest.fixture
def lease_of_a_dead_node(once) -> str:
    """The content of the lease that a killed run on another node has left."""

    def kill_a_run(folder: Path) -> str:
        dead = launch(with_locks(folder, OTHER_NODE), folder, "--steps", 100_000)
        try:
            assert holds(dead, lambda: steps_logged(folder) > 0)
            lease = (folder / "run/.lock.lease").read_text(encoding="utf-8")
        finally:
            kill_all(dead)
        # The time when the process was started contains a number of the running kernel.
        return re.sub("start=.*", "start=1", lease)

    return once("dead node", kill_a_run)


@pytest.mark.parametrize("lock", [lock_run_folder, lock_cache])
def test_the_lock_of_a_dead_node_is_taken(tmp_path, lease_of_a_dead_node, lock):
    lock(tmp_path, lease_of_a_dead_node)
    script = with_locks(tmp_path)
    result = train(script, tmp_path, *SHORT, CORPUS_CACHE=str(tmp_path / "cache"))
    assert result.summary["steps"] == 1
    [told] = [line for line in result.out.splitlines() if line.startswith("waiting for ")]
    assert ".lock.lease" in told
    assert "another-node" in told


def test_a_run_ends_when_another_has_taken_its_lock(tmp_path, lease_of_a_dead_node):
    """Another run takes the lock of one that was suspended."""
    process = launch(with_locks(tmp_path), tmp_path, "--steps", 100_000, "--save-every", 2)
    assert holds(process, lambda: steps_logged(tmp_path) > 0)
    lock_of_another = tmp_path / "other.lease"
    lock_of_another.write_text(lease_of_a_dead_node, encoding="utf-8")
    os.replace(lock_of_another, tmp_path / "run/.lock.lease")
    result = finish(process, tmp_path)
    assert_refused(result, ".lock.lease", "another run")
    assert (tmp_path / "run/.lock.lease").read_text(encoding="utf-8") == lease_of_a_dead_node


@pytest.mark.parametrize("lock", [lock_cache, in_full(lock_run_folder)])
def test_a_stop_signal_ends_the_wait_for_a_lock(tmp_path, lease_of_a_dead_node, lock):
    lock(tmp_path, lease_of_a_dead_node.replace("duration=2", "duration=3600"))
    script = with_locks(tmp_path, lease_seconds=3600)
    process = launch(script, tmp_path, *SHORT, CORPUS_CACHE=str(tmp_path / "cache"))
    assert holds(process, lambda: b"waiting for" in (tmp_path / "stdout").read_bytes())
    process.send_signal(signal.SIGTERM)
    result = finish(process, tmp_path)
    assert (result.code, result.err.count("\n")) == (75, 1), result
    assert "SIGTERM" in result.err
