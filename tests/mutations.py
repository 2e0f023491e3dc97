"""Can the tests fail? Plant a fault in a copy of the repository, and see whether the test that is meant for it does.

    python tests/mutations.py                     all of them, two at a time
    python tests/mutations.py --only clip --jobs 1

tests/data/mutations.toml has the faults: what a user loses, whole lines of a file as they stand, what stands there
instead, and the contract test that must fail. First all these tests must pass on the copy as it is; then, fault by
fault, the named test must fail. Exit code 1 and the word SURVIVED if one does not.
"""

import argparse
import ast
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests/data/mutations.toml"
COPIED = (
    "[0-9]*",
    "common",
    "lm",
    "planner",
    "training",
    "tests",
    "benchmarks",
    "launch",
    "docs",
    "Makefile",
    "pyproject.toml",
    "requirements*.txt",
    "take.py",
    "LICENSE",
    "*.md",
)
SECONDS_PER_TEST = 600  # a fault may turn a run into a hang, and a busy machine is slow
TESTS_FAILED = 1  # pytest's exit status


@dataclass(frozen=True)
class Fault:
    breaks: str
    file: str
    old: str  # whole lines, each with its end
    new: str
    test: str

    def faulty(self, text: str) -> str:
        """Return the text of the file with the faulty lines. ValueError if the old ones are not there once."""
        faulty, times = re.subn(
            "^" + re.escape(self.old), lambda _: self.new, text, flags=re.MULTILINE
        )
        if times != 1:
            raise ValueError(f"{self.breaks}: stands {times} times in {self.file}: {self.old!r}")
        if self.file.endswith(".py"):
            ast.parse(faulty)  # a fault that does not compile proves nothing
        return faulty

    def plant(self, folder: Path) -> None:
        """Write the faulty lines into a copy of the repository."""
        text = (folder / self.file).read_text(encoding="utf-8")
        (folder / self.file).write_text(self.faulty(text), encoding="utf-8")


def all_faults() -> list[Fault]:
    return [Fault(**fault) for fault in tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]]


def copy_of_the_repository(folder: Path, left_out: tuple[str, ...] = ()) -> Path:
    """Copy the repository to `folder`, which must not exist, without files of these names."""
    paths = []
    for pattern in COPIED:
        paths += ROOT.glob(pattern)
    ignore = shutil.ignore_patterns("__pycache__", "results", "runs", *left_out)
    folder.mkdir(parents=True)
    for path in paths:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=ignore)
        else:
            shutil.copy(path, folder)
    return folder


def pytest(folder: Path, *tests: str) -> subprocess.CompletedProcess:
    """Run these tests of a copy. Its corpora stay in there: a fault may be in how they are split."""
    flags = ["-x", "-q", "-p", "no:cacheprovider", "-m", "", "--timeout", str(SECONDS_PER_TEST)]
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    env = {}
    for name, value in os.environ.items():
        # without those of a pytest around this one, whose workers share their runs
        if name not in launcher and not name.startswith("PYTEST_"):
            env[name] = value
    # two versions of a file may have one size and be written within one second, which is what a .pyc goes by
    env |= {"CORPUS_CACHE": str(folder / "corpora"), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "COLLECTIVE_TIMEOUT_SECONDS": "60"}
    argv = [sys.executable, "-m", "pytest", *flags, *tests]
    limit = (SECONDS_PER_TEST + 60) * len(tests)
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=limit)


def judge(folder: Path, fault: Fault) -> tuple[bool, str]:
    """Plant the fault in the copy, run its test, and take it out again: whether it was caught, and what pytest told."""
    start, whole = time.monotonic(), (folder / fault.file).read_text(encoding="utf-8")
    shutil.rmtree(folder / "corpora", ignore_errors=True)
    try:
        fault.plant(folder)
        result = pytest(folder, fault.test)
    finally:
        (folder / fault.file).write_text(whole, encoding="utf-8")
    # ERROR file::test: the run failed that a fixture makes for several tests. A file that cannot be imported has no ::
    failed = re.search(r"^(FAILED|ERROR \S+\.py::)", result.stdout, re.MULTILINE)
    if result.returncode != TESTS_FAILED or failed is None:
        return (
            False,
            f"pytest exit {result.returncode}\n{result.stdout[-2000:]}{result.stderr[-2000:]}",
        )
    told = re.search(r"^E +.+|^.*Timeout.*", result.stdout, re.MULTILINE)
    return True, f"{time.monotonic() - start:.0f} s: {told[0][1:160].strip() if told else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        metavar="WORDS",
        default="",
        help="faults with these words in breaks, file or test",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="faults at a time, each in its own copy"
    )
    args = parser.parse_args()
    chosen = [
        f for f in all_faults() if any(args.only in words for words in (f.breaks, f.file, f.test))
    ]
    if not chosen:
        parser.error(f"--only {args.only}: no fault has that")
    start, survivors, copies = time.monotonic(), [], queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as name:
        for i in range(args.jobs):
            copies.put(copy_of_the_repository(Path(name, str(i))))

        def in_a_copy(work, *given):
            copy = copies.get()
            try:
                return work(copy, *given)
            finally:
                copies.put(copy)

        tests = sorted({fault.test for fault in chosen})
        shares = [tests[i :: args.jobs] for i in range(min(args.jobs, len(tests)))]
        with ThreadPoolExecutor(args.jobs) as pool:
            for sound in pool.map(lambda share: in_a_copy(pytest, *share), shares):
                if sound.returncode:
                    sys.exit(
                        f"{sound.stdout[-6000:]}\nerror: without a fault these tests must pass, and one does not"
                    )
            print(
                f"no fault: {len(tests)} tests pass, {time.monotonic() - start:.0f} s", flush=True
            )
            for fault, (caught, told) in zip(
                chosen, pool.map(partial(in_a_copy, judge), chosen), strict=True
            ):
                print(f"{fault.breaks}: {'caught' if caught else 'SURVIVED'}, {told}", flush=True)
                survivors += [] if caught else [fault.breaks]
    print(
        f"\nfaults planted: {len(chosen)}, survived: {len(survivors)}, {time.monotonic() - start:.0f} s"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
