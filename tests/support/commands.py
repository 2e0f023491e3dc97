"""Is a command that is written somewhere one that would start?"""

import re
import shlex
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.run import get_args_parser

from support.harness import ROOT, run


@cache
def help_of(script: str) -> str:
    with TemporaryDirectory() as folder:
        result = run(script, Path(folder), "--help")
    assert result.code == 0, result.err
    return result.out


def check_pytest(words: list[str]) -> None:
    """The files exist, and -k names a test in them."""
    files = [ROOT / word for word in words if word.startswith("tests/")]
    for file in files:
        assert file.is_file(), f"no such file: {file}"
        marked = re.search(
            r"^pytestmark = pytest\.mark\.(launch|long)$",
            file.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        assert not marked or marked[1] in words, f"nothing of {file} runs without -m {marked[1]}"
    if "-k" in words:
        wanted = words[words.index("-k") + 1]
        names = [
            name
            for file in files
            for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
        ]
        assert [name for name in names if wanted in name], f"no test named {wanted!r} in {files}"


def check(command: str) -> None:
    """A command's script exists and knows its flags; a make target exists."""
    program, *words = shlex.split(command)
    if program == "make":
        target = next(word for word in words if "=" not in word)
        assert re.search(
            rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        ), f"no make target {target}"
        return
    if program == "pytest" or words[:2] == ["-m", "pytest"]:
        check_pytest(words)
        return
    if program == "torchrun":
        words = [word.replace("$HEAD", "head") for word in words]
        launched = get_args_parser().parse_args(words)
        words = [launched.training_script, *launched.training_script_args]
    if words[0] == "-c":
        compile(words[1], command, "exec")
        return
    if words[0].startswith("-"):  # python -m
        return
    script, *flags = words
    # the rest is for a script that this one starts
    flags = flags[: flags.index("--")] if "--" in flags else flags
    assert (ROOT / script).is_file(), f"no such file: {script}"
    known = set(re.findall(r"(--[a-z][a-z-]*)", help_of(script)))
    unknown = {flag.split("=")[0] for flag in flags if flag.startswith("--")} - known
    assert not unknown, f"{script} does not know {unknown}"
