"""Take a script with you, and every file of this repository that it needs: python take.py 05_ddp/train.py ../mine"""

import argparse
import ast
import functools
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent


@functools.cache
def needs(file: Path, root: Path = ROOT) -> set[Path]:
    """The files that one file imports, and those beside it that it names: data, or a script that it starts."""
    beside = {other.name: other for other in file.parent.iterdir()}
    names, found = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and node.value in beside:
            found.add(beside[node.value])
    for name in names:
        path = root / name.replace(".", "/")
        same_stem = (
            [beside[f"{name}.py"]]
            if f"{name}.py" in beside
            else list(root.glob(f"[0-9]*/{name}.py"))
        )
        found |= {
            path.with_suffix(".py"),
            path / "__init__.py",
            *(same_stem if len(same_stem) == 1 else []),
        }
    return {other for other in found if other.is_file() and other != file}


def closure(script: Path, root: Path = ROOT) -> list[Path]:
    """The script and every file of the repository that it needs, at any depth."""
    found, new = set(), {script}
    while new:
        found |= new
        new = {other for file in new if file.suffix == ".py" for other in needs(file, root)} - found
    return sorted(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path, help="a script of this repository")
    parser.add_argument(
        "target", type=Path, help="a new or an empty folder: the copy keeps the layout"
    )
    args = parser.parse_args()
    script = next(
        (path.resolve() for path in (args.script, ROOT / args.script) if path.is_file()), ROOT
    )
    if script.suffix != ".py" or not script.is_relative_to(ROOT):
        parser.exit(
            2, f"{args.script} is not a script of {ROOT}: give one such as 05_ddp/train.py\n"
        )
    try:
        args.target.mkdir(parents=True, exist_ok=True)
        if any(args.target.iterdir()):
            raise OSError("it is not empty")
    except OSError as error:
        parser.exit(2, f"{args.target} cannot be the new folder: {error}\n")
    sizes = {file: file.read_text().count("\n") for file in closure(script)}
    for file, lines in sizes.items():
        copy = args.target / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
        print(f"{lines:6,} lines  {copy}")
    print(
        f"{len(sizes)} files, {sum(sizes.values()):,} lines: cd {args.target} && python {script.relative_to(ROOT)}"
    )
