"""What one has to read stays small: closures within budgets, names that tell roles, chapters apart. And take.py.

The closure of a lesson is the script and every file of the repository that it imports, at any depth.
"""

import ast
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from take import closure, needs

FILES = sorted(file.relative_to(ROOT) for file in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")])
CODE = [file for file in FILES if file.parts[0] not in ("tests", "runs")]
NUMBERED = [file for file in CODE if file.parts[0][0].isdigit()]
LESSONS = [file for file in NUMBERED if file.name[0] != "_"]

LESSON = {"lines": 250, "lines with helper": 400, "closure lines": 2200}
TRAINING = {"lines": 170, "closure lines": 1900, "closure statements": 1350, "closure files": 13}
BUDGETS = {  # of one lesson, or of all that have the name
    "minimal.py": {"lines": 125, "closure files": 1},
    "03_linear_regression/train.py": {"lines": 200, "closure files": 1},
    "graphs.py": {"lines": 200, "closure files": 1},
    "04_amp/train.py": TRAINING,
    "05_ddp/train.py": TRAINING,
    "train_fsdp.py": TRAINING,
    "finetune.py": {"lines": 300, "lines with helper": 500, "closure lines": 2700},
    "estimate.py": LESSON | {"lines": 350},
    "pipeline_parallel.py": LESSON | {"lines": 300, "lines with helper": 550},
    "train_3d.py": LESSON | {"closure lines": 2700},
    "doctor.py": LESSON | {"lines with helper": 420},
}
FOLDERS = {"common": 2000, "planner": 900, "benchmarks": 1800, "tests": 12000, "everything but tests": 19500}
STEPS = {  # how many lines diff may mark from one script to the next
    ("04_amp/minimal.py", "05_ddp/minimal.py"): 25,
    ("05_ddp/minimal.py", "06_fsdp_zero/minimal.py"): 25,
    ("06_fsdp_zero/minimal.py", "08_model_parallel/minimal.py"): 25,
    ("04_amp/train.py", "05_ddp/train.py"): 50,
    ("05_ddp/train.py", "06_fsdp_zero/train_fsdp.py"): 100,
}


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines(files: list[Path]) -> int:
    return sum((ROOT / file).read_text().count("\n") for file in files)


@functools.cache
def statements(file: Path) -> int:
    nodes = ast.walk(ast.parse(file.read_text()))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)


def to_read(files: Iterable[Path]) -> list[Path]:
    """The Python files among these that hold code, relative to the repository."""
    return [file.relative_to(ROOT) for file in files if file.suffix == ".py" and statements(file)]


def sizes(lesson: Path) -> dict[str, int]:
    read = to_read(closure(ROOT / lesson))
    counted = [file for file in read if file.parts[0] != "planner" or lesson.stem == "estimate"]
    helpers = [file for file in read if file.parent == lesson.parent and file.name.startswith("_")]
    return {
        "lines": lines([lesson]),
        "lines with helper": lines([lesson] + [file for file in helpers if file.stem != "_shared"]),
        "closure lines": lines(counted),
        "closure statements": sum(statements(ROOT / file) for file in counted),
        "closure files": len(counted),
    }


def code_lines(script: str) -> str:
    """A script without docstrings and blank lines."""
    text = (ROOT / script).read_text()
    code = text.splitlines(keepends=True)
    for node in filter(is_docstring, ast.walk(ast.parse(text))):
        code[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "".join(line for line in code if line.strip())


def marked_lines(before: str, after: str) -> int:
    with TemporaryDirectory() as folder:
        Path(folder, "before").write_text(code_lines(before))
        Path(folder, "after").write_text(code_lines(after))
        found = subprocess.run(["diff", "before", "after"], cwd=folder, capture_output=True, text=True, timeout=600)
    return sum(line[0] in "<>" for line in found.stdout.splitlines())


def wrong_imports(file: Path) -> list[str]:
    """The rules that the imports of a file break, one entry for each import."""
    found = []
    home = file.parts[0]
    for other in to_read(needs(ROOT / file)):
        theirs = other.parts[0]
        lesson = other.with_name(other.name[1:])  # if the other is its helper
        for_planner = str(other) in ("common/shapes.py", "common/hardware.py")
        broken = {
            "common/ imports what is above it": home == "common" != theirs,
            "planner/ imports more than it may": home == "planner" != theirs and not for_planner,
            "imports across numbered folders": file in NUMBERED and other in NUMBERED and home != theirs,
            "a helper imports a lesson": file in NUMBERED and file not in LESSONS and other in LESSONS,
            "imports the helper of another lesson": lesson in LESSONS and file != lesson,
            "in a circle of imports": ROOT / file in closure(ROOT / other),
        }
        found += [f"{rule}: {file}" for rule in broken if broken[rule]]
    return found


def offences() -> dict[str, int]:
    """Everything that breaks a rule, as "rule: path", with a number that must not grow."""
    found = Counter(rule for file in CODE for rule in wrong_imports(file))
    for lesson in LESSONS:
        budget = BUDGETS.get(str(lesson)) or BUDGETS.get(lesson.name) or LESSON
        size = sizes(lesson)
        over = {f"{rule}: {lesson}": size[rule] for rule in budget if size[rule] > budget[rule]}
        found |= over
        if over:  # then its statements are held, too: packing is no way out
            found[f"closure statements: {lesson}"] = size["closure statements"]
    for helper in set(NUMBERED) - set(LESSONS):
        if helper.name == "_shared.py":
            found[f"lines: {helper}"] = lines([helper]) if lines([helper]) > 300 else 0
        elif helper.with_name(helper.name[1:]) not in LESSONS:
            found[f"neither _lesson.py nor _shared.py: {helper}"] = 1
    for file in CODE:
        found[f"shadows the standard library: {file}"] = int(file.stem in sys.stdlib_module_names)
        found[f"not empty: {file}"] = lines([file]) if file.name == "__init__.py" else 0
    for folder, budget in FOLDERS.items():
        size = lines(CODE if folder == "everything but tests" else [file for file in FILES if file.parts[0] == folder])
        found[f"lines: {folder}"] = size if size > budget else 0
    for (before, after), most in STEPS.items():
        marked = marked_lines(before, after)
        found[f"lines that diff marks: {before} {after}"] = marked if marked > most else 0
    found["lessons"] = len(LESSONS) if len(LESSONS) > 50 else 0
    return {what: number for what, number in found.items() if number}


def test_nothing_outgrows_its_budget():
    assert not offences()


def python(folder: Path, *argv: str | Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_every_lesson_can_be_taken(tmp_path):
    """The copy of its files needs no other file: in process, for fifty starts of python would take longer."""
    for script in LESSONS:
        mine, files = tmp_path / str(script).replace("/", "-"), closure(ROOT / script)
        for file in files:
            copy = mine / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file)
        assert [file.relative_to(mine) for file in closure(mine / script, mine)] == [f.relative_to(ROOT) for f in files]


SMALL = "--seq-len 32 --batch-size 1 --rounds 1"
ESTIMATE = "07_memory_tricks/estimate.py"  # which reads a file of data


@pytest.mark.parametrize("command", [ESTIMATE, f"07_memory_tricks/gradient_checkpointing.py {SMALL}"])
def test_what_was_taken_runs(tmp_path, command):
    script, *flags = command.split()
    assert python(ROOT, "take.py", script, tmp_path / "mine").returncode == 0
    result = python(tmp_path / "mine", script, *flags)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("script", "target"), [("99_none/train.py", "new"), (ESTIMATE, "."), (ESTIMATE, "file")])
def test_take_refuses_in_one_line(tmp_path, script, target):
    (tmp_path / "file").touch()
    result = python(tmp_path, ROOT / "take.py", script, target)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
