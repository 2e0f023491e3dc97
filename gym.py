"""Real bugs of training code, planted in a copy of this repository: find them, mend them, and let a test judge.

    python gym.py --list                    the bugs, as somebody would report them
    python gym.py 3 --folder ../gym3        a copy of the repository with bug 3 in it
    python gym.py 3 --hint                  the chapter that teaches it, and where people met it
    python gym.py 3 --folder ../gym3 --check     exit code 0 if it is mended, in whatever way

Each bug is one of the faults that tests/mutations.py plants: a few lines of one file, which people have written in
training code of their own. Work in the copy as in a repository of a colleague: run the scripts, print, compare with
the minimal scripts. The check runs the tests of this folder, not the copy's, so changing a test mends nothing.
"""

import argparse
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests"))
import mutations

ANSWERS = ("tests/data/mutations.toml", "tests/data/gym.toml")  # a copy has none of these


def bugs() -> list[dict[str, str]]:
    """symptom, chapter and thread ('' if no public one is known) of each bug, and `breaks`: its name as a fault."""
    return tomllib.loads((ROOT / "tests/data/gym.toml").read_text())["bug"]


def fault_of(bug: dict[str, str]) -> mutations.Fault:
    return next(fault for fault in mutations.all_faults() if fault.breaks == bug["breaks"])


def plant(bug: dict[str, str], folder: Path) -> None:
    """Copy the repository to `folder`, which must not exist, with the bug in it and without the answers."""
    mutations.copy_of_the_repository(folder)
    for answer in ANSWERS:
        (folder / answer).unlink()
    fault_of(bug).plant(folder)


def check(bug: dict[str, str], folder: Path) -> tuple[bool, str]:
    """Whether the test that is meant for the bug passes in `folder`, and the end of what it printed."""
    shutil.rmtree(folder / "tests")
    left_out = shutil.ignore_patterns("__pycache__", *(Path(answer).name for answer in ANSWERS))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=left_out)
    done = mutations.pytest(folder, fault_of(bug).test)
    return done.returncode == 0, done.stdout[-3000:]


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
    known = bugs()
    if args.list or args.number is None:
        print("\n".join(f"{number:2d}  {bug['symptom']}" for number, bug in enumerate(known, 1)))
        return
    if not 1 <= args.number <= len(known):
        parser.error(f"bug {args.number}: there are {len(known)}, see --list")
    bug = known[args.number - 1]
    if args.hint:
        print(f"read {bug['chapter']}\n{bug['thread'] and 'met in ' + bug['thread']}".rstrip())
        return
    if args.folder is None:
        parser.error(f"bug {args.number}: name a new folder for the copy with --folder")
    if args.check:
        if not (args.folder / "tests").is_dir():
            parser.error(f"--folder {args.folder} holds no copy: make one without --check")
        mended, output = check(bug, args.folder)
        print("mended" if mended else f"{output}\nnot mended yet: {bug['symptom']}")
        sys.exit(0 if mended else 1)
    if args.folder.exists():
        parser.error(f"--folder {args.folder} exists: name a new one")
    plant(bug, args.folder)
    print(f"{bug['symptom']}\n\nThe bug is in {args.folder}. Mend it there, then:")
    print(f"    python gym.py {args.number} --folder {args.folder} --check")


if __name__ == "__main__":
    main()
