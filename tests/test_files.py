"""No script deletes or replaces what it has not made, and no output is an input."""

import ast
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import transformers
from support.checkpoints import write_folder
from support.harness import ROOT, TEXT, TINY, assert_refused, config_of, in_full, run

PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"
TRAIN = "04_amp/train.py"
FINETUNE = "06_fsdp_zero/finetune.py"
PREPARE = "05_ddp/prepare_data.py"
CONVERT = "06_fsdp_zero/convert_checkpoint.py"
SHORT = ("--seq-len", 32, "--steps", 2, "--global-batch-size", 2)
CHATS = ("--data", PAIRS, "--seq-len", 128, "--global-batch-size", 2, "--adapters", 0)


def contents(folder: Path) -> dict[str, str]:
    """The hash of each file in a folder, and where each link leads, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def base_model(folder: Path) -> Path:
    """A downloaded model, with files that describe other things than its tokenizer."""
    write_folder(folder, config_of(TINY))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", encoding="utf-8"
    )
    (folder / "NOTICE.txt").symlink_to("nowhere")
    return folder


# --- a run's folder


@pytest.mark.parametrize(
    "how", ["a link in the run", *map(in_full, ("the same path", "a link to it"))]
)
def test_the_base_model_is_never_replaced(tmp_path, how):
    (tmp_path / "exp").mkdir()
    base = named = base_model(tmp_path / "exp/model")
    if how == "a link to it":
        named = tmp_path / "link"
        named.symlink_to(base)
    if how == "a link in the run":
        named = base.rename(tmp_path / "base")
        base.symlink_to(named)
    before = contents(base)
    result = run(FINETUNE, tmp_path, "--model", named, *CHATS, "--steps", 2, "--run-dir", "exp")
    assert_refused(result, "--run-dir")
    assert contents(base) == before


def test_a_model_of_others_in_the_folder_of_the_run_stays(tmp_path):
    """Refused before training: no step was logged."""
    (tmp_path / "exp").mkdir()
    base = base_model(tmp_path / "base")
    foreign = base_model(tmp_path / "exp/model")
    before = contents(foreign)
    flags = ("--model", base, *CHATS, "--steps", 2, "--run-dir", "exp")
    assert_refused(run(FINETUNE, tmp_path, *flags), "exp/model")
    assert contents(foreign) == before
    assert not (tmp_path / "exp/metrics.jsonl").exists()


def test_a_resumed_run_replaces_its_own_model_and_copies_no_other_file(tmp_path):
    base = base_model(tmp_path / "base")
    flags = ("--model", base, *CHATS, "--run-dir", "exp")
    assert run(FINETUNE, tmp_path, *flags, "--steps", 1).code == 0
    before = contents(tmp_path / "exp/model")
    assert "config.json" in before
    assert not {"adapter_config.json", "NOTICE.txt"} & before.keys()

    result = run(FINETUNE, tmp_path, *flags, "--steps", 2, "--resume")
    assert result.code == 0, result
    after = contents(tmp_path / "exp/model")
    assert after.keys() == before.keys()
    assert after != before
    left = [path.name for path in (tmp_path / "exp").iterdir() if path.suffix in (".tmp", ".old")]
    assert left == []


def test_a_tokenizer_that_cannot_be_copied_is_found_before_training(tmp_path):
    base = base_model(tmp_path / "base")
    (base / "generation_config.json").symlink_to("nowhere")
    result = run(FINETUNE, tmp_path, "--model", base, *CHATS, "--steps", 1, "--run-dir", "exp")
    assert_refused(result, "generation_config.json")
    assert not (tmp_path / "exp/metrics.jsonl").exists()


def test_what_the_user_has_set_aside_stays(tmp_path):
    """Renamed checkpoints, and folders with names such as the run's own."""
    flags = ("--data", TEXT, *SHORT, "--run-dir", "exp", "--save-every", 1)
    assert run(TRAIN, tmp_path, *flags).code == 0
    exp = tmp_path / "exp"
    (exp / "step-00000002").rename(exp / "step-00000002.old")
    (exp / "step-00000001").rename(exp / "step-00000001.tmp")
    moved = tmp_path / "moved"  # to another disk: a link is left
    shutil.copytree(exp / "step-00000001.tmp", moved)
    (exp / "step-00000001").symlink_to(moved)
    (exp / "step-00000009").mkdir()  # no checkpoint: a folder of the user's
    (exp / "step-00000009/notes.txt").write_text("keep", encoding="utf-8")
    (exp / "step-00000002.txt").write_text("keep", encoding="utf-8")
    before = contents(exp)
    moved_before = contents(moved)

    result = run(TRAIN, tmp_path, *flags, "--keep", 1, "--resume")
    assert result.code == 0, result
    assert contents(moved) == moved_before
    names = ("step-00000002.old", "step-00000001.tmp", "step-00000002.txt")
    after = contents(exp)
    for name, content in before.items():
        if name.startswith(names):
            assert after[name] == content, (name, result)
    assert "keep" in [
        path.read_text(encoding="utf-8") for path in exp.glob("*step-00000009*/notes.txt")
    ]


def test_a_run_overwrites_no_file_of_others(tmp_path):
    for name in ("metrics.jsonl", "loss.png", "run.json"):
        folder = tmp_path / name
        (folder / "exp").mkdir(parents=True)
        (folder / "exp" / name).write_text('{"mine": true}\n', encoding="utf-8")
        before = contents(folder / "exp")
        flags = ("--data", TEXT, *SHORT, "--keep", 0, "--run-dir", "exp")
        assert_refused(run(TRAIN, folder, *flags), "exp")
        assert contents(folder / "exp").items() >= before.items()


def test_a_run_writes_neither_into_its_model_nor_into_its_data(tmp_path):
    base = base_model(tmp_path / "base")
    (tmp_path / "link").symlink_to("base")
    before = contents(base)
    flags = ("--model", base, "--data", TEXT, *SHORT, "--run-dir", "link")
    assert_refused(run(TRAIN, tmp_path, *flags), "--run-dir")
    assert contents(base) == before

    # the data may be beside the files of the run
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp/text.txt").write_bytes(TEXT.read_bytes())
    flags = ("--data", "exp/text.txt", *SHORT, "--run-dir", "exp")
    assert run(TRAIN, tmp_path, *flags).code == 0
    resume = (*SHORT, "--run-dir", "exp", "--resume")
    result = run(TRAIN, tmp_path, "--data", "exp/metrics.jsonl", *resume)
    assert_refused(result, "--data", "metrics.jsonl")
    flags = ("--data", TEXT, *SHORT, "--run-dir", "new", "--json", "new/metrics.jsonl")
    (tmp_path / "new").mkdir()
    assert_refused(run(TRAIN, tmp_path, *flags), "--json", "metrics.jsonl")


# --- --json


@pytest.mark.parametrize(
    "script",
    [TRAIN, "07_memory_tricks/estimate.py", in_full("09_inference/infer_70b.py")],
)
def test_json_replaces_nothing_but_a_summary(tmp_path, script):
    """Not the config that --model names, nor any other file. An earlier summary is replaced."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY), encoding="utf-8")
    before = contents(tmp_path)
    flags = ["--model", config]
    if script == TRAIN:
        flags += ["--data", TEXT, *SHORT, "--keep", 0]
    assert_refused(run(script, tmp_path / "a", *flags, "--json", config), "--json")
    assert contents(tmp_path).items() >= before.items()

    summary = tmp_path / "summary.json"
    for _ in range(2):
        result = run(script, tmp_path / "a", *flags, "--json", summary)
        assert result.code == 0, result
    assert json.loads(summary.read_text(encoding="utf-8"))["script"] == script


# --- prepare_data.py


def test_prepare_data_deletes_no_text(tmp_path):
    """Neither where --out is the data, nor where --out has files of others."""
    parts = tmp_path / "web/parts"
    parts.mkdir(parents=True)
    for number in range(3):
        (parts / f"{number}.txt").write_bytes(TEXT.read_bytes())
    (tmp_path / "link").symlink_to("web")
    before = contents(tmp_path / "web")
    for data, out in (("web", "web"), ("web", "link"), (TEXT, "web")):
        flags = ("--data", data, "--out", out, "--workers", 1)
        assert_refused(run(PREPARE, tmp_path, *flags), "web")
    assert contents(tmp_path / "web") == before

    # a folder that it has written, and in which the user has made one of the same name since
    flags = ("--data", "web", "--out", "tokens", "--workers", 1)
    assert run(PREPARE, tmp_path, *flags).code == 0
    (tmp_path / "tokens/parts").mkdir()
    (tmp_path / "tokens/parts/notes.txt").write_text("keep", encoding="utf-8")
    before = contents(tmp_path / "tokens")
    run(PREPARE, tmp_path, *flags)
    assert contents(tmp_path / "tokens") == before


# --- convert_checkpoint.py


def test_convert_deletes_no_folder_beside_its_target(tmp_path):
    base = base_model(tmp_path / "base")
    # of the user, and of a conversion to another target that goes on now
    for name in ("out.tmp", "out-hf-01234567.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("keep", encoding="utf-8")
    (tmp_path / "out-hf-01234567.tmp/.made-by-script").write_text("unfinished", encoding="utf-8")
    (tmp_path / "out-89abcdef.tmp").mkdir()  # of one to this target that was killed
    (tmp_path / "out-89abcdef.tmp/.made-by-script").write_text("unfinished", encoding="utf-8")
    result = run(CONVERT, tmp_path, base, "out", "--to", "pt")
    assert result.code == 0, result
    result = run(CONVERT, tmp_path, "out", "hf", "--to", "hf", "--model", base)
    assert result.code == 0, result
    left = sorted(path.name for path in tmp_path.glob("*.tmp"))
    assert left == ["out-hf-01234567.tmp", "out.tmp"]
    assert "adapter_config.json" not in contents(tmp_path / "hf")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


# --- the rule


def test_only_one_module_deletes_and_replaces():
    """common/files.py. A call elsewhere needs a check of its own.

    The two resumable.py stand alone, and tests/test_resumable.py has their checks.
    """
    allowed = [
        Path("common/files.py"),
        *(Path(p, "resumable.py") for p in ("05_ddp", "06_fsdp_zero")),
    ]
    found = []
    for file in sorted(ROOT.glob("[!.]*/**/*.py")) + sorted(ROOT.glob("*.py")):
        path = file.relative_to(ROOT)
        if path.parts[0] in ("tests", "runs", "build") or path in allowed:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if deletes(node):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def deletes(node: ast.AST) -> bool:
    """Return whether a node is a function that deletes or replaces a path, or Path.replace.

    Path.replace has one argument, and str.replace has two.
    """
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if node.attr in ("replace", "remove", "rename"):
            return owner == "os" or node.attr == "rename"
        names = ("rmtree", "unlink", "rmdir", "removedirs", "renames", "move")
        return node.attr in names and owner != "files"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
    return False
