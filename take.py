"""Copy a script, and every file of this repository that it needs, into a new folder.

    python take.py 05_ddp/train.py ../mine
    python take.py 05_ddp/train.py ../mine --own-model    without the language model of the script

With --own-model, write load_training_objects anew before you run the copy: the files that it
imports are left out. The same holds for shard_model of 06_fsdp_zero/train_fsdp.py.
"""

import argparse
import ast
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OWN_MODEL = ("load_training_objects", "shard_model")  # functions that --own-model leaves out


def imported_names(node: ast.AST) -> list[str]:
    """Return the modules that a statement may import, such as `lm` and `lm.model`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        # `from lm import model` imports the module lm.model
        return [node.module, *[f"{node.module}.{alias.name}" for alias in node.names]]
    return []


def files_of_module(name: str, folder: Path, root: Path) -> list[Path]:
    """Return where a module may be that a file in `folder` imports. Not all of these files exist.

    A module without a package is beside the file, or else in the one lesson folder that has it:
    a script may put another folder on sys.path.
    """
    path = root / name.replace(".", "/")
    files = [path.with_suffix(".py"), path / "__init__.py"]
    beside = folder / f"{name}.py"
    in_lesson_folders = [file for file in lesson_files(root) if file.name == beside.name]
    if beside.exists():
        files.append(beside)
    elif len(in_lesson_folders) == 1:
        files += in_lesson_folders
    return files


@cache
def lesson_files(root: Path) -> list[Path]:
    """Return the Python files of all lesson folders."""
    return list(root.glob("[0-9]*/*.py"))


@cache
def data_files(root: Path) -> dict[str, Path]:
    """Return the files of all lesson folders that are not Python, by their path from the root."""
    files = {}
    for file in root.glob("[0-9]*/*"):
        if file.is_file() and file.suffix not in (".py", ".md"):
            files[file.relative_to(root).as_posix()] = file
    return files


@cache
def read_names(file: Path, own_model: bool) -> tuple[set[str], set[str]]:
    """Return the modules that a file may import, and its strings.

    With own_model, the functions OWN_MODEL are left out.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if own_model:
        tree.body = [node for node in tree.body if getattr(node, "name", "") not in OWN_MODEL]
    modules = set()
    strings = set()
    for node in ast.walk(tree):
        modules.update(imported_names(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    return modules, strings


@cache
def needs(file: Path, root: Path = ROOT, own_model: bool = False) -> set[Path]:
    """Return the files of the repository that one file imports or names in a string.

    A string counts if it is the name of a file beside this one: data, or a script that it starts.
    It also counts if it is the path of a data file in another lesson folder.
    """
    named = {other.name: other for other in file.parent.iterdir()} | data_files(root)
    # a copy that is a link is read once
    modules, strings = read_names(file.resolve(), own_model)
    candidates = {named[text] for text in strings & named.keys()}
    for module in modules:
        candidates.update(files_of_module(module, file.parent, root))
    return {other for other in candidates if other.is_file() and other != file}


def closure(script: Path, root: Path = ROOT, own_model: bool = False) -> list[Path]:
    """Return the script and every file of the repository that it needs, directly or indirectly.

    With own_model, leave out what the script needs for its functions OWN_MODEL alone.
    """
    found = {script}
    waiting = [script]
    while waiting:
        file = waiting.pop()
        if file.suffix == ".py":
            new = needs(file, root, own_model and file == script) - found
            found |= new
            waiting += new
    return sorted(found)


def find_script(path: Path) -> Path | None:
    """Return the script at `path`, from this folder or the repository; None if it is not ours."""
    for candidate in (path, ROOT / path):
        if candidate.is_file():
            script = candidate.resolve()
            is_ours = script.suffix == ".py" and script.is_relative_to(ROOT)
            return script if is_ours else None
    return None


def make_new_folder(folder: Path) -> None:
    """Create the folder. Raise OSError if that fails or if it has something in it already."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise OSError("it is not empty")


def count_lines(files: Iterable[Path]) -> int:
    """Return how many lines the files have together."""
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files)


def copy_files(files: Iterable[Path], target: Path) -> None:
    """Copy the files with their folders, and print the lines of each."""
    for file in files:
        copy = target / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
        print(f"{count_lines([file]):6,} lines  {copy}")


def files_to_copy_alone(script: Path) -> str:
    """Return the names of the scripts beside this one that need no other file."""
    names = [name for name in ("minimal.py", "resumable.py") if (script.parent / name).exists()]
    return " or ".join(f"{script.parent.name}/{name}" for name in names if name != script.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path, help="a script of this repository")
    parser.add_argument(
        "target", type=Path, help="a new or an empty folder: the copy keeps the layout"
    )
    parser.add_argument(
        "--own-model",
        action="store_true",
        help="leave out the files that only load_training_objects imports",
    )
    args = parser.parse_args()

    script = find_script(args.script)
    if script is None:
        parser.exit(
            2, f"{args.script} is not a script of {ROOT}: give one such as 05_ddp/train.py\n"
        )
    try:
        make_new_folder(args.target)
    except OSError as error:
        parser.exit(2, f"{args.target} cannot be the new folder: {error}\n")

    files = closure(script, own_model=args.own_model)
    copy_files(files, args.target)
    for name in ("requirements.txt", "LICENSE"):
        shutil.copy(ROOT / name, args.target)
    print(f"{len(files)} files, {count_lines(files):,} lines, and requirements.txt and LICENSE")
    if args.own_model:
        names = " and ".join(OWN_MODEL)
        print(f"Write {names} of {script.relative_to(ROOT)} anew, where it has them. Then:")
    print(f"cd {args.target} && python {script.relative_to(ROOT)}")
    alone = files_to_copy_alone(script)
    if len(files) > 1 and alone:
        print(f"One file for a start: {alone}")


if __name__ == "__main__":
    main()
