"""Practise debugging: a copy of this repository with a real bug in it, and a test of your fix.

    python gym.py --list                    the bugs, as somebody would report them
    python gym.py 3 --folder ../gym3        a copy of the repository with bug 3 in it
    python gym.py 3 --hint                  the chapter that teaches it, and where people met it
    python gym.py 3 --folder ../gym3 --check     exit code 0 if it is mended, in whatever way
    python gym.py 3 --folder ../gym3 --check --verbose     also what the test printed

Each bug is one of the faults that tests/mutations.py plants: it changes a few lines of one file, as
people have done in training code of their own. Work in the copy as in a colleague's repository:
run the scripts, print, compare with the minimal scripts. The check runs the tests of this folder,
not those of the copy, so changing a test mends nothing. It changes nothing in the copy.
"""

import argparse
import os
import shutil
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests"))
import mutations

ANSWERS = ("tests/data/mutations.toml", "tests/data/gym.toml")  # files that a copy must not have
MARK = ".gym"  # a file in each copy, with the number of its bug


def bugs() -> list[dict[str, str]]:
    """Read the bugs from tests/data/gym.toml.

    Each has a name, a symptom, the chapter that teaches it, a thread in which people met it ("" if
    no public one is known), and `breaks`, the name of its fault in mutations.toml.
    """
    return tomllib.loads((ROOT / "tests/data/gym.toml").read_text(encoding="utf-8"))["bug"]


def fault_of(bug: dict[str, str]) -> mutations.Fault:
    """Return the fault that plants this bug."""
    return next(fault for fault in mutations.all_faults() if fault.breaks == bug["breaks"])


def answer_names() -> tuple[str, ...]:
    """Return the names of the files with the answers."""
    return tuple(Path(answer).name for answer in ANSWERS)


def plant(number: int, folder: Path) -> None:
    """Copy the repository to `folder`, which must not exist, and put the bug into the copy.

    The copy does not have the files with the answers.
    """
    mutations.copy_of_the_repository(folder, left_out=answer_names())
    fault_of(bugs()[number - 1]).plant(folder)
    (folder / MARK).write_text(f"{number}\n", encoding="utf-8")


def planted_in(folder: Path) -> int | None:
    """Return the number of the bug that was planted in `folder`, or None if it is not a copy."""
    mark = folder / MARK
    if not mark.is_file():
        return None
    number = mark.read_text(encoding="utf-8").strip()
    return int(number) if number.isdecimal() else None


def check(bug: dict[str, str], folder: Path) -> tuple[bool, str]:
    """Run the test of this bug on the copy in `folder`, with the tests of this repository.

    `folder` is only read: the tests run in a temporary copy of it. Return whether the test passes,
    and what it printed.
    """
    without = shutil.ignore_patterns("tests", "runs", ".venv", ".git", "__pycache__")
    without_answers = shutil.ignore_patterns("__pycache__", *answer_names())
    with tempfile.TemporaryDirectory(prefix="gym-", ignore_cleanup_errors=True) as name:
        judged = Path(name) / "copy"
        shutil.copytree(folder, judged, symlinks=True, ignore=without)
        shutil.copytree(ROOT / "tests", judged / "tests", ignore=without_answers)
        result = mutations.pytest(judged, fault_of(bug).test)
    return result.returncode == 0, result.stdout + result.stderr


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", type=int, nargs="?", help="which bug; without it: --list")
    parser.add_argument("--list", action="store_true", help="what one would see in production")
    parser.add_argument("--folder", type=Path, help="the copy: made, or with --check judged")
    parser.add_argument(
        "--check", action="store_true", help="run the test for this bug in --folder"
    )
    parser.add_argument(
        "--hint", action="store_true", help="the chapter to read, and a public thread about the bug"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="with --check: also the output of the test"
    )
    args = parser.parse_args()
    all_bugs = bugs()
    if args.number is None and (args.folder or args.check or args.hint):
        parser.error("which bug? Put its number first, see --list")
    if args.list or args.number is None:
        for number, bug in enumerate(all_bugs, 1):
            print(f"{number:2d}  {bug['name']}: {bug['symptom']}")
        return
    if not 1 <= args.number <= len(all_bugs):
        parser.error(f"bug {args.number}: there are {len(all_bugs)}, see --list")
    bug = all_bugs[args.number - 1]

    if args.hint:
        print(f"read {bug['chapter']}")
        if bug["thread"]:
            print(f"met in {bug['thread']}")
        return
    if args.folder is None:
        parser.error(f"bug {args.number}: name a new folder for the copy with --folder")

    if args.check:
        planted = planted_in(args.folder)
        if planted is None:
            parser.error(f"--folder {args.folder} holds no copy: make one without --check")
        if planted != args.number:
            parser.error(f"--folder {args.folder} holds bug {planted}, and not {args.number}")
        for package in ("pytest", "torch"):
            if find_spec(package) is None:
                parser.error(f"{package} is missing: `make venv`, then `. .venv/bin/activate`")
        mended, output = check(bug, args.folder)
        if args.verbose:
            print(output)
        if mended:
            print("mended")
            return
        print(f"not mended yet: {bug['symptom']}")
        sys.exit(1)

    if os.path.lexists(args.folder):
        parser.error(f"--folder {args.folder} exists: name a new one")
    if args.folder.resolve().is_relative_to(ROOT):
        parser.error(f"--folder {args.folder} is inside this repository: name one outside of it")
    try:
        plant(args.number, args.folder)
    except OSError as error:
        parser.error(f"--folder {args.folder}: {error}")
    print(f"{bug['symptom']}\n\nThe bug is in {args.folder}. Mend it there, then:")
    print(f"    python gym.py {args.number} --folder {args.folder} --check")


if __name__ == "__main__":
    main()
