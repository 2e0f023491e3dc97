"""User errors end with one line and exit code 2: wrong flags, files, launchers, run folders."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import (
    BASELINE,
    ROOT,
    SEVERAL,
    TINY,
    assert_refused,
    checkpoints,
    content,
    each_of_several,
    error_lines,
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

DDP, *OTHERS = SEVERAL

FILES = {
    "empty.txt": "",
    "short.txt": "too short a text to train on" * 20,
    "cut.jsonl": "{",
    "body.jsonl": '{"body": "x"}',
    "null.jsonl": '{"text": "x"}\n{"text": null}',
    "cut.parquet": "x",
    "gpt2.json": json.dumps({**TINY, "model_type": "gpt2"}),
    "biased.json": json.dumps({**TINY, "attention_bias": True}),
    "gemma2.json": json.dumps({**TINY, "model_type": "gemma2"}),
    "rotated.json": json.dumps({**TINY, "partial_rotary_factor": 0.5}),
    "yarn.json": json.dumps({**TINY, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "packed.json": json.dumps({**TINY, "quantization_config": {"quant_method": "gptq"}}),
    "window.json": json.dumps({**TINY, "layer_types": ["full_attention", "sliding_attention"]}),
    "gelu.json": json.dumps({**TINY, "hidden_act": "gelu"}),
    "heads.json": json.dumps({**TINY, "num_attention_heads": 0}),
    "groups.json": json.dumps({**TINY, "num_key_value_heads": 3}),
    "vocabulary.json": json.dumps({**TINY, "vocab_size": 2.5}),
}
BAD = {  # the flags, and words that the error line must have
    "model": (["--model", "llama-9b"], "llama-9b"),
    "no Llama": (["--model", "gpt2.json"], "--model gpt2.json", "model_type"),
    "biases": (["--model", "biased.json"], "--model biased.json", "attention_bias"),
    "another family": (["--model", "gemma2.json"], "--model gemma2.json", "gemma2"),
    "half of a head": (
        ["--model", "rotated.json"],
        "--model rotated.json",
        "partial_rotary_factor",
    ),
    "other angles": (["--model", "yarn.json"], "--model yarn.json", "yarn"),
    "quantized weights": (["--model", "packed.json"], "--model packed.json", "quantization_config"),
    "a window": (["--model", "window.json"], "--model window.json", "layer_types"),
    "activation": (["--model", "gelu.json"], "--model gelu.json", "hidden_act"),
    "no heads": (["--model", "heads.json"], "--model heads.json"),
    "uneven groups": (["--model", "groups.json"], "--model groups.json"),
    "half a token": (["--model", "vocabulary.json"], "--model vocabulary.json"),
    "dtype": (["--dtype", "fp8"], "--dtype", "fp8"),
    "data": (["--data", "nowhere.txt"], "--data nowhere.txt"),
    "empty data": (["--data", "empty.txt"], "--data empty.txt"),
    "cut rows": (["--data", "cut.jsonl"], "--data cut.jsonl"),
    "other rows": (["--data", "body.jsonl"], "--data body.jsonl", "text"),
    "a row that is no text": (["--data", "null.jsonl"], "--data null.jsonl", "byte 14"),
    "no parquet": (["--data", "cut.parquet"], "--data cut.parquet"),
    "short data": (["--data", "short.txt"], "--data", "--seq-len 64"),
    "hub": (["--data", "hf:no/such"], "--data hf:no/such"),
    "tokenizer": (["--tokenizer", "./nowhere"], "--tokenizer ./nowhere"),
    "a tokenizer not made yet": (["--tokenizer", "models/smollm2-135m"], "make model"),
    "batch": (
        ["--global-batch-size", 10, "--micro-batch-size", 4],
        "--global-batch-size 10",
        "8 or 12",
    ),
    "seq-len": (["--seq-len", 1025], "1025", "--model nano: 1024"),
    "steps": (["--steps", 0], "--steps", "'0'"),
    "a word": (["--steps", "many"], "--steps", "'many'"),
    "lr": (["--lr", "nan"], "--lr", "'nan'"),
    "flag": (["--step", 5], "--step"),
    "resume": (["--resume"], "--resume", "--run-dir"),
    "json": (["--json", "no/such/folder.json"], "--json", "no/such/folder.json"),
    "run dir": (["--run-dir", "empty.txt/run"], "--run-dir empty.txt/run"),
}


def test_bad_input(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for flags, *words in BAD.values():
        result = run(BASELINE, tmp_path, "--device", "cpu", *flags, HF_HUB_OFFLINE="1")
        assert_refused(result, *words)
    assert {path.name for path in tmp_path.iterdir()} <= {*FILES, "stdout", "stderr", "runs"}
    assert not list(tmp_path.glob("runs/*/step-*"))


def test_no_gpu(tmp_path):
    result = run(DDP, tmp_path, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert_refused(result, "--device cuda", "--device cpu")


@pytest.mark.parametrize(
    ("script", "flags", "words", "warm"),
    [
        in_full(DDP, ["--model", "llama-9b"], "llama-9b", False),
        (DDP, ["--global-batch-size", 7], "6 or 8", True),
        *(in_full(script, ["--global-batch-size", 7], "6 or 8", True) for script in OTHERS),
    ],
)
def test_bad_input_is_told_once_under_torchrun(tmp_path, script, flags, words, warm):
    result = run(script, tmp_path, "--device", "cpu", *flags, nproc=2, warm=warm)
    told = [line for line in error_lines(result) if f"{script}: error: " in line]
    assert (result.code, len(told), result.out) == (1, 1, ""), result
    assert words in told[0]
    if not warm:  # the real torchrun ends with that line
        last_lines = result.err.rstrip("=\n ").splitlines()
        assert last_lines[-1].strip() == f"traceback : {told[0]}"
    assert "exitcode  : 2" in result.err


def test_a_script_of_one_process_refuses_several(tmp_path):
    result = run(BASELINE, tmp_path, "--device", "cpu", nproc=2)
    assert (result.code, len(error_lines(result))) == (1, 1), result


def test_a_launcher_that_sets_half_its_variables(tmp_path):
    for given in ("RANK=0 WORLD_SIZE=2", "RANK=a WORLD_SIZE=1 LOCAL_RANK=0", "LOCAL_RANK=1"):
        variables = dict(pair.split("=") for pair in given.split())
        assert_refused(run(DDP, tmp_path, **variables), "torchrun")


@each_of_several
def test_a_rank_without_its_torchrun_does_not_train(tmp_path, script):
    """A rank can still be starting when its torchrun is killed. Then no store answers it."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # takes a port but does not listen on it
        env = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(nobody.getsockname()[1]),
            "COLLECTIVE_TIMEOUT_SECONDS": "2",
            "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        result = run(script, tmp_path, "--device", "cpu", "--steps", 1, **env)
    assert (result.code, result.out) == (1, ""), result
    assert "DistNetworkError" in result.err


# --- the folder of a run


@pytest.fixture
def trained(once, tmp_path) -> Callable[[str], dict]:
    """Return a function that trains a script for 2 steps on text.txt and returns the summary.

    Each script is trained once. The files of its run are copied to tmp_path for each test.
    """

    def train_once(folder: Path, script: str) -> dict:
        (folder / "text.txt").write_text(
            (ROOT / "05_ddp/train.py").read_text(encoding="utf-8"), encoding="utf-8"
        )
        summary = train(script, folder, "--data", "text.txt", "--steps", 2).summary
        return summary | {"folder": folder}

    def copied(script: str) -> dict:
        summary = once("trained", train_once, script)
        shutil.copytree(summary["folder"], tmp_path, dirs_exist_ok=True)
        return summary

    return copied


def resume(script: str, folder: Path, *flags):
    """Run the command of `trained` with --resume and these flags."""
    command = [*tiny_flags(folder), "--data", "text.txt", "--steps", 2, "--resume"]
    return run(script, folder, *command, *flags)


@each_of_several
def test_a_folder_with_another_runs_settings(tmp_path, trained, script):
    trained(script)
    # the weights would still fit
    (tmp_path / "other.json").write_text(
        json.dumps({**TINY, "rms_norm_eps": 1e-3}), encoding="utf-8"
    )
    before = content(tmp_path / "run")
    other = {
        "--model": "other.json",
        "--seq-len": 16,
        "--global-batch-size": 24,
        "--lr": 0.5,
        "--lr-schedule": "linear",
        "--warmup-steps": 3,
        "--weight-decay": 0.2,
        "--clip-norm": 2.0,
        "--dtype": "bf16",
        "--seed": 1,
    }
    flags = []
    told = []
    for flag, value in other.items():
        flags += [flag, value]
        told.append(f"{flag} {value}")
    assert_refused(resume(script, tmp_path, *flags), *told)
    assert_refused(train(script, tmp_path, "--data", "text.txt", code=2), "--run-dir", "--resume")

    (tmp_path / "run/run.json").rename(tmp_path / "run.json")
    assert_refused(resume(script, tmp_path), "--run-dir", "run.json")
    (tmp_path / "run.json").rename(tmp_path / "run/run.json")
    assert content(tmp_path / "run") == before


@each_of_several
def test_a_folder_whose_text_or_model_has_changed(tmp_path, trained, script):
    trained(script)
    (tmp_path / "tiny.json").write_text(
        json.dumps({**TINY, "rms_norm_eps": 1e-3}), encoding="utf-8"
    )
    assert_refused(resume(script, tmp_path), "--model tiny.json", "SHA-256")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text.replace("rank", "link"), encoding="utf-8")
    assert_refused(resume(script, tmp_path), "--data text.txt", "SHA-256")


def test_a_resume_checks_the_dtype_that_auto_has_become(tmp_path):
    dtype = train(DDP, tmp_path, "--dtype", "auto", "--steps", 2).summary["dtype"]
    other = {"bf16": "fp32", "fp32": "bf16"}[dtype]
    refused = train(DDP, tmp_path, "--dtype", other, "--steps", 2, "--resume", code=2)
    assert_refused(refused, f"--dtype {other} (was {dtype})")


@each_of_several
def test_a_refused_resume_leaves_the_flags_of_the_run(tmp_path, trained, script):
    trained(script)
    before = content(tmp_path / "run")
    assert_refused(resume(script, tmp_path, "--steps", 1), "--steps 1", "step 2")
    assert content(tmp_path / "run") == before


@each_of_several
def test_a_finished_run_resumes_to_its_summary(tmp_path, trained, script):
    whole = trained(script)
    assert resume(script, tmp_path).code == 0
    again = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    same = ("steps", "tokens", "first_loss", "last_loss", "val_loss", "weights_sha256")
    assert {key: again[key] for key in same} == {key: whole[key] for key in same}


@each_of_several
def test_a_folder_in_use_by_a_live_run(tmp_path, script):
    process = launch(script, tmp_path / "live", "--steps", 100_000)
    try:
        assert holds(process, lambda: steps_logged(tmp_path / "live") > 0)
        # a new run would delete this as the leftover of a save
        being_saved = tmp_path / "live/run/step-00099999.tmp"
        being_saved.mkdir()
        flags = ("--run-dir", tmp_path / "live/run", "--resume")
        result = train(script, tmp_path / "second", *flags, code=2, RUN_DIR_LOCK_SECONDS="1")
        assert_refused(result, "--run-dir", "live")
        assert being_saved.is_dir()
        assert process.poll() is None
    finally:
        kill_all(process)
    # the killed run had saved nothing
    afresh = train(script, tmp_path / "second", *flags, "--steps", 2)
    assert afresh.summary["steps"] == 2


@each_of_several
def test_more_ranks_than_held_out_sequences(tmp_path, script):
    # 38 training sequences of 32 bytes, 2 held out
    text = (ROOT / "05_ddp/train.py").read_bytes()[:1300]
    (tmp_path / "text.txt").write_bytes(text)
    result = train(script, tmp_path, "--data", "text.txt", "--steps", 2, nproc=3)
    assert result.summary["val_loss"] > 0


# --- two nodes, played by two ranks in two working directories with relative paths


def on_two_nodes(folder: Path, *flags, texts: tuple[str, str] = ("as here, so there ",) * 2) -> str:
    """Run two ranks, each with its own tiny.json and text.txt, and return their error line."""
    for rank, text in enumerate(texts):
        (folder / str(rank)).mkdir(exist_ok=True)
        (folder / str(rank) / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
        (folder / str(rank) / "text.txt").write_text(text * 400, encoding="utf-8")
    moved = with_prelude(DDP, folder, "os.chdir(os.environ['RANK'])")
    result = run(moved, folder, *tiny_flags(folder), "--data", "text.txt", *flags, nproc=2)
    told = [line for line in result.err.splitlines() if ": error: " in line]
    assert (result.code, len(told)) == (1, 1), result
    assert "exitcode  : 2" in result.err
    return told[0]


@pytest.mark.parametrize(
    "left", [(), ("step-00000004", "step-00000008.tmp")], ids=["fresh", "with a checkpoint"]
)
def test_a_run_dir_that_ranks_do_not_share_is_refused_before_the_first_step(tmp_path, left):
    for rank in "01":
        for name in left:
            (tmp_path / rank / "run" / name).mkdir(parents=True)
    told = on_two_nodes(tmp_path, "--run-dir", "run", "--resume")
    assert "--run-dir run" in told
    for rank in "01":
        assert {path.name for path in (tmp_path / rank / "run").glob("step-*")} == set(left)


def test_ranks_whose_nodes_hold_different_texts_are_refused(tmp_path):
    """Standard libraries of two Python versions differ, and files of one name on two disks."""
    told = on_two_nodes(tmp_path, texts=("what node 0 has ", "what node 1 has "))
    assert "--data" in told
    assert "rank 1 " in told
    assert not checkpoints(tmp_path)
