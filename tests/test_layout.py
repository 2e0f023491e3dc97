"""What one has to read stays small: closures within budgets, names that tell roles, chapters apart. And take.py.

The closure of a lesson is the script and every file of the repository that it imports, at any depth. What is not yet in
shape is in data/layout.json with its present number, which must not grow. `python tests/test_layout.py --write` removes
what is mended and lowers what has shrunk. With --anew it takes in what is new, too: for the day when files move.
"""

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from take import closure, needs

EXCEPTIONS = ROOT / "tests/data/layout.json"
FILES = [Path(folder, name) for folder, _, names in os.walk(ROOT) for name in names if name.endswith(".py")]
FILES = sorted(file.relative_to(ROOT) for file in FILES if not {".venv", "runs"} & set(file.parts))
CODE = [file for file in FILES if file.parts[0] != "tests"]
NUMBERED = [file for file in CODE if file.parts[0][0].isdigit()]
LESSONS = [file for file in NUMBERED if file.name[0] != "_"]

ALONE = {"closure files": 1}
TRAINING = {"lines": 170, "closure lines": 1900, "closure statements": 1350, "closure files": 13}
LESSON = {"lines": 250, "lines with helper": 400, "closure lines": 2200}
BUDGETS = {  # of a file, or of every file with that name
    "minimal.py": {"lines": 125} | ALONE,
    "03_linear_regression/train.py": {"lines": 200} | ALONE,
    "03_linear_regression/graphs.py": {"lines": 200} | ALONE,
    "04_amp/train.py": TRAINING,
    "05_ddp/train.py": TRAINING,
    "06_fsdp_zero/train_fsdp.py": TRAINING,
    "06_fsdp_zero/finetune.py": {"lines": 300, "lines with helper": 500, "closure lines": 2700},
    "07_memory_tricks/estimate.py": LESSON | {"lines": 350},
    "08_model_parallel/pipeline_parallel.py": LESSON | {"lines": 300, "lines with helper": 550},
    "08_model_parallel/train_3d.py": LESSON | {"closure lines": 2700},
    "01_devices/doctor.py": LESSON | {"lines with helper": 600},
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
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)


def to_read(files: list[Path], root: Path = ROOT) -> list[Path]:
    """The Python files among these that hold code, relative to the root."""
    return [name for name in (file.relative_to(root) for file in files if file.suffix == ".py") if statements(name)]


def sizes(lesson: Path) -> dict[str, int]:
    read = to_read(closure(ROOT / lesson))
    counted = [file for file in read if file.parts[0] != "planner" or lesson.stem == "estimate"]
    helpers = [file for file in read if file.parent == lesson.parent and file.name.startswith("_")]
    return {
        "lines": lines([lesson]),
        "lines with helper": lines([lesson] + [file for file in helpers if file.stem != "_shared"]),
        "closure lines": lines(counted),
        "closure statements": sum(map(statements, counted)),
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
    own, found = file.parts[0], []
    for other in to_read(needs(ROOT / file)):
        lesson = other.with_name(other.name[1:])
        if own in ("common", "planner") and other.parts[0] != own:
            allowed = own == "planner" and other.name in ("shapes.py", "hardware.py")
            found += [] if allowed else [f"{own}/ imports what it should not"]
        if own != "old" and other.parts[0] == "old":
            found.append("imports old/")
        if file in NUMBERED and other in NUMBERED and own != other.parts[0]:
            found.append("imports across numbered folders")
        elif file in NUMBERED and other in LESSONS and file.name[0] == "_":
            found.append("a helper imports a lesson")
        elif lesson in LESSONS and file != lesson:
            found.append("imports the helper of another lesson")
        if ROOT / file in closure(ROOT / other):
            found.append("in a circle of imports")
    return found


def offences() -> dict[str, int]:
    """Everything that breaks a rule, as "rule: path", with a number that must not grow."""
    found = {}
    for lesson in LESSONS:
        budget = BUDGETS.get(str(lesson), BUDGETS.get(lesson.name, LESSON))
        size = sizes(lesson)
        over = [rule for rule in budget if size[rule] > budget[rule]]
        if over:  # then statements are held as well: packing is no way out
            found |= {f"{rule}: {lesson}": size[rule] for rule in {*over, "closure statements"}}
    for file in CODE:
        for rule in wrong_imports(file):
            found[f"{rule}: {file}"] = found.get(f"{rule}: {file}", 0) + 1
        if file in NUMBERED and file.stem == "_shared":
            found |= {f"lines: {file}": lines([file])} if lines([file]) > 300 else {}
        elif file in NUMBERED and file not in LESSONS and file.with_name(file.name[1:]) not in LESSONS:
            found[f"neither a lesson, nor its _lesson.py, nor _shared.py: {file}"] = 1
        if file.name == "__init__.py" and (ROOT / file).read_text():
            found[f"__init__.py is not empty: {file}"] = lines([file])
        if file.stem in sys.stdlib_module_names:
            found[f"shadows the standard library: {file}"] = 1
    for folder, budget in FOLDERS.items():
        size = lines(CODE if folder == "everything but tests" else [file for file in FILES if file.parts[0] == folder])
        if size > budget:
            found[f"lines: {folder}"] = -(-size // 100) * 100
    if len(LESSONS) > 50:
        found["lessons"] = len(LESSONS)
    for (before, after), most in STEPS.items():
        if marked_lines(before, after) > most:
            found[f"lines that diff marks: {before} -> {after}"] = marked_lines(before, after)
    return found


def test_nothing_outgrows_its_budget():
    excepted = json.loads(EXCEPTIONS.read_text())
    grown = {what: n for what, n in offences().items() if n > excepted.get(what, 0)}
    assert not grown, f"not allowed, or more than the exceptions in {EXCEPTIONS.name} allow"


def test_every_exception_is_needed():
    mended = json.loads(EXCEPTIONS.read_text()).keys() - offences().keys()
    assert not mended, f"in shape by now: remove with python tests/{Path(__file__).name} --write"


@pytest.mark.parametrize("script", LESSONS, ids=str)
def test_every_lesson_can_be_taken(tmp_path, script):
    take(script, tmp_path)
    files = [file.relative_to(ROOT) for file in closure(ROOT / script)]
    assert [file.relative_to(tmp_path) for file in closure(tmp_path / script, tmp_path)] == files
    assert sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()) == files


@pytest.mark.parametrize(
    "command",
    [
        "01_devices/show.py",
        "04_amp/train.py --steps 2",
        "05_ddp/minimal.py",
        "07_memory_tricks/gradient_checkpointing.py --seq-len 32 --batch-size 1 --rounds 1",
    ],
)
def test_what_was_taken_runs(tmp_path, command):
    script, *flags = command.split()
    take(script, tmp_path)
    result = python(tmp_path, script, *flags)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("script", "target"), [("05_ddp/none.py", "new"), ("05_ddp/train.py", "."), ("05_ddp/train.py", "file")]
)
def test_take_refuses_in_one_line(tmp_path, script, target):
    (tmp_path / "file").touch()
    result = python(tmp_path, ROOT / "take.py", script, target)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def python(folder: Path, *argv: str | Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def take(script: str | Path, target: Path) -> None:
    result = python(ROOT, "take.py", script, target)
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    found = offences()
    if "--anew" not in sys.argv:
        excepted = json.loads(EXCEPTIONS.read_text())
        found = {what: min(number, excepted[what]) for what, number in found.items() if what in excepted}
    if "--write" in sys.argv:
        EXCEPTIONS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
