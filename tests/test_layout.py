"""Names tell roles, imports go one way, neighbouring scripts differ by their idea. And take.py."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from take import closure, needs

PATHS = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")]
FILES = sorted(path.relative_to(ROOT) for path in PATHS)
CODE = [file for file in FILES if file.parts[0] not in ("tests", "runs")]
NUMBERED = [file for file in CODE if file.parts[0][0].isdigit()]
LESSONS = [file for file in NUMBERED if not file.name.startswith("_")]
HELPERS = [file for file in NUMBERED if file.name.startswith("_")]
PLANNER_MAY_IMPORT = (
    Path("lm/shapes.py"),
    Path("training/defaults.py"),
    Path("lm/stages.py"),
    Path("common/hardware.py"),
)

NEIGHBOURS = [  # (script, next script, how many lines of code diff may mark)
    ("04_amp/minimal.py", "05_ddp/minimal.py", 35),
    ("05_ddp/minimal.py", "06_fsdp_zero/minimal.py", 35),
    ("06_fsdp_zero/minimal.py", "08_model_parallel/minimal.py", 35),
    ("05_ddp/resumable.py", "06_fsdp_zero/resumable.py", 40),
]
COPIED = {before for before, _, _ in NEIGHBOURS} | {after for _, after, _ in NEIGHBOURS}
# README's table does not have these
NEIGHBOURS_IN_A_CHAPTER = [("10_post_training/grpo.py", "10_post_training/distill.py", 40)]


def lesson_of(helper: Path) -> Path:
    """Return the lesson that _lesson.py would help."""
    return helper.with_name(helper.name.removeprefix("_"))


def python_files(files: Iterable[Path]) -> list[Path]:
    """Return the Python files among these that are not empty, relative to the repository."""
    found = []
    for file in files:
        if file.suffix == ".py" and file.stat().st_size > 0:
            found.append(file.relative_to(ROOT))
    return found


def is_docstring(node: ast.AST) -> bool:
    """Tell whether a statement is a string."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def code_lines(script: str) -> list[str]:
    """Return the lines of a script that hold code: no docstring, comment or blank line."""
    text = (ROOT / script).read_text(encoding="utf-8")
    code = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if is_docstring(node):
            code[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return [line for line in code if line.strip() and not line.strip().startswith("#")]


def broken_import_rules(file: Path, imported: Path) -> list[str]:
    """Return the rules that this import breaks."""
    home = file.parts[0]
    target = imported.parts[0]
    both_numbered = file in NUMBERED and imported in NUMBERED
    broken = []
    if home == "common" and target != "common":
        broken.append("common/ imports what is above it")
    if home == "training" and target not in ("training", "common"):
        broken.append("training/ imports what is above it")
    if home == "lm" and target not in ("lm", "training", "common"):
        broken.append("lm/ imports what is above it")
    if home == "planner" and target != "planner" and imported not in PLANNER_MAY_IMPORT:
        broken.append("planner/ imports more than it may")
    if both_numbered and home != target:
        broken.append("an import across numbered folders")
    if file in HELPERS and imported in LESSONS:
        broken.append("a helper imports a lesson")
    helper_of_lesson = imported in HELPERS and lesson_of(imported) in LESSONS
    # benchmarks/ may: its pictures are those that a lesson draws
    if helper_of_lesson and file != lesson_of(imported) and home != "benchmarks":
        broken.append("the helper of another lesson")
    if ROOT / file in closure(ROOT / imported):
        broken.append("a circle of imports")
    return broken


def test_a_folder_has_at_most_one_helper_that_lessons_share():
    """A helper of one lesson is named after that lesson, so all the others are shared."""
    shared = [helper for helper in HELPERS if lesson_of(helper) not in LESSONS]
    folders = [helper.parent for helper in shared]
    assert len(folders) == len(set(folders)), shared


def test_no_file_has_the_name_of_a_standard_module():
    assert not [file for file in CODE if file.stem in sys.stdlib_module_names]


def test_every_init_file_is_empty():
    assert not [
        file
        for file in CODE
        if file.name == "__init__.py" and (ROOT / file).read_text(encoding="utf-8")
    ]


def test_imports_go_one_way():
    broken = []
    for file in CODE:
        for imported in python_files(needs(ROOT / file)):
            for rule in broken_import_rules(file, imported):
                broken.append(f"{file} imports {imported}: {rule}")
    assert not broken


def changed_lines(folder: Path, before: str, after: str) -> list[str]:
    """Return the lines of code that differ between two scripts, of both scripts."""
    for name, script in (("before", before), ("after", after)):
        (folder / name).write_text("\n".join(code_lines(script)) + "\n", encoding="utf-8")
    diff = subprocess.run(
        ["diff", "before", "after"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return [line for line in diff.stdout.splitlines() if line.startswith(("<", ">"))]


def test_neighbouring_scripts_differ_by_their_idea(tmp_path):
    too_different = []
    for before, after, most in NEIGHBOURS + NEIGHBOURS_IN_A_CHAPTER:
        changed = changed_lines(tmp_path, before, after)
        if not 0 < len(changed) <= most:
            too_different += [f"{before} and {after}: {len(changed)} lines", *changed]
    assert not too_different, "\n".join(too_different)


def test_the_table_of_files_to_copy_has_their_sizes(tmp_path):
    sizes = {}
    for script in COPIED:
        sizes[script] = [len((ROOT / script).read_text(encoding="utf-8").splitlines()), None]
    for before, after, _ in NEIGHBOURS:
        sizes[after][1] = len(changed_lines(tmp_path, before, after))
    for page in ("README.md", "README.zh-CN.md"):
        rows = re.findall(
            r"^\| \[(\w+/(?:minimal|resumable)\.py)\].*?\| (\d+) \|.*?\| (\d*) ?\|$",
            (ROOT / page).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        told = {}
        for script, lines, changed in rows:
            told[script] = [int(lines), int(changed) if changed else None]
        assert told == sizes, page


def python(folder: Path, *argv: str | Path) -> subprocess.CompletedProcess:
    """Run Python in a folder, without a PYTHONPATH that would find this repository."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_every_lesson_can_be_taken(tmp_path):
    """A copy of the files that a lesson needs, needs no other file."""
    for script in LESSONS:
        folder = tmp_path / str(script).replace("/", "-")
        files = [file.relative_to(ROOT) for file in closure(ROOT / script)]
        for file in files:
            copy = folder / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(ROOT / file)
        needed_in_the_copy = closure(folder / script, folder)
        assert [file.relative_to(folder) for file in needed_in_the_copy] == files


ESTIMATE = "07_memory_tricks/estimate.py"  # which reads a file of data
CHECKPOINTING = "07_memory_tricks/gradient_checkpointing.py"
SMALL_CHECKPOINTING = f"{CHECKPOINTING} --seq-len 32 --batch-size 1 --rounds 1"
FINETUNE = "06_fsdp_zero/finetune.py"  # whose data is in another lesson's folder
SHORT_FINETUNE = f"{FINETUNE} --steps 1 --seq-len 128 --global-batch-size 2"


@pytest.mark.parametrize(
    "command",
    [
        ESTIMATE,
        pytest.param(SHORT_FINETUNE, marks=pytest.mark.full),
        pytest.param(SMALL_CHECKPOINTING, marks=pytest.mark.long),
    ],
)
def test_what_was_taken_runs(tmp_path, command):
    script, *flags = command.split()
    assert python(ROOT, "take.py", script, tmp_path / "mine").returncode == 0
    result = python(tmp_path / "mine", script, *flags)
    assert result.returncode == 0, result.stderr


def test_what_is_taken_for_a_model_of_ones_own_trains_it(tmp_path):
    """Without lm/model.py. own_images.py replaces the function that would import it."""
    mine = tmp_path / "mine"
    assert python(ROOT, "take.py", "05_ddp/train.py", mine, "--own-model").returncode == 0
    assert not (mine / "lm/model.py").exists()
    assert (mine / "LICENSE").exists()
    assert (mine / "requirements.txt").exists()
    shutil.copy(ROOT / "05_ddp/own_images.py", mine / "05_ddp")
    result = python(mine, "05_ddp/own_images.py", "--steps", "2", "--device", "cpu")
    assert result.returncode == 0, result.stderr


WRONG_ARGUMENTS = [
    ("99_none/train.py", "new"),
    (ESTIMATE, "."),
    (ESTIMATE, "file"),
]


def test_take_refuses_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    for script, target in WRONG_ARGUMENTS:
        result = python(tmp_path, ROOT / "take.py", script, target)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
