"""Practise debugging: a copy of this repository with a real bug in it, and a test of your fix.

    python gym.py --list                    the bugs, as somebody would report them
    python gym.py 3 --folder ../gym3        a copy of the repository with bug 3 in it
    python gym.py 3 --hint                  the chapter that teaches it, and where people met it
    python gym.py 3 --folder ../gym3 --check     exit code 0 if it is mended, in whatever way

Each bug is one of the faults that tests/mutations.py plants: it changes a few lines of one file, as
people have done in training code of their own. Work in the copy as in a colleague's repository:
run the scripts, print, compare with the minimal scripts. The check runs the tests of this folder,
not those of the copy, so changing a test mends nothing.
"""

import argparse
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests"))
import mutations

ANSWERS = ("tests/data/mutations.toml", "tests/data/gym.toml")  # files that a copy must not have


def bugs() -> list[dict[str, str]]:
    """Read the bugs from tests/data/gym.toml.

    Each has a symptom, the chapter that teaches it, a thread in which people met it ("" if no
    public one is known), and `breaks`, the name of its fault in mutations.toml.
    """
    return tomllib.loads((ROOT / "tests/data/gym.toml").read_text(encoding="utf-8"))["bug"]


def fault_of(bug: dict[str, str]) -> mutations.Fault:
    """Return the fault that plants this bug."""
    return next(fault for fault in mutations.all_faults() if fault.breaks == bug["breaks"])


def plant(bug: dict[str, str], folder: Path) -> None:
    """Copy the repository to `folder`, which must not exist, and put the bug into the copy.

    The copy does not have the files with the answers.
    """
    mutations.copy_of_the_repository(folder)
    for answer in ANSWERS:
        (folder / answer).unlink()
    fault_of(bug).plant(folder)


def check(bug: dict[str, str], folder: Path) -> tuple[bool, str]:
    """Run the test of this bug on the copy in `folder`, with the tests of this repository.

    Return whether it passes, and the end of its output.
    """
    shutil.rmtree(folder / "tests")
    answer_names = [Path(answer).name for answer in ANSWERS]
    left_out = shutil.ignore_patterns("__pycache__", *answer_names)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=left_out)
    result = mutations.pytest(folder, fault_of(bug).test)
    return result.returncode == 0, result.stdout[-3000:]


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
    args = parser.parse_args()
    all_bugs = bugs()
    if args.list or args.number is None:
        for number, bug in enumerate(all_bugs, 1):
            print(f"{number:2d}  {bug['symptom']}")
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
        if not (args.folder / "tests").is_dir():
            parser.error(f"--folder {args.folder} holds no copy: make one without --check")
        mended, output = check(bug, args.folder)
        if mended:
            print("mended")
            return
        print(f"{output}\nnot mended yet: {bug['symptom']}")
        sys.exit(1)

    if args.folder.exists():
        parser.error(f"--folder {args.folder} exists: name a new one")
    plant(bug, args.folder)
    print(f"{bug['symptom']}\n\nThe bug is in {args.folder}. Mend it there, then:")
    print(f"    python gym.py {args.number} --folder {args.folder} --check")


if __name__ == "__main__":
    main()
