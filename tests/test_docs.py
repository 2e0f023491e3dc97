"""What is written is true: commands parse, files exist, generated parts are fresh, sizes are kept."""

import re
import subprocess
import sys

import pytest
from support.commands import check
from support.harness import ROOT
from support.readme import regenerate

READMES = [*ROOT.glob("*.md"), *ROOT.glob("0*/README.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("launch/**/*.md")]
SCRIPTS = [*ROOT.glob("0*/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("launch/*.py")]
COMMAND = re.compile(r"(?:^|\s|`)((?:torchrun|python3?|make|pytest) [^`#\n]+?)(?:`|\s{2,}[a-z]|\s+#|$)", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Every command in a code block of a README, and every one in the docstring of a script."""
    found = []
    for file in READMES:
        blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", file.read_text(), re.DOTALL)
        found += [(file, line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for file in SCRIPTS:
        docstring = file.read_text().split('"""')[1]
        lines = re.sub(r"\\+\n", " ", docstring).splitlines()
        found += [(file, line) for line in lines if line.startswith("    ")]
    return [(str(file.relative_to(ROOT)), match[1].strip()) for file, line in found for match in COMMAND.finditer(line)]


def test_commands_are_found():
    found = {command for _, command in commands()}
    assert "torchrun --nproc_per_node=8 05_ddp/train.py" in found
    assert "make train" in found
    assert "make test" in found
    assert len(found) > 15


@pytest.mark.parametrize(("file", "command"), commands())
def test_command_parses(file, command):
    check(command)


def test_a_wrong_command_is_seen():
    for wrong in ("python 04_amp/train.py --stepz 3", "python 99_none/train.py", "make nonsense"):
        with pytest.raises(AssertionError):
            check(wrong)


def test_generated_parts_are_fresh():
    for file in ROOT.glob("0*/README.md"):
        assert regenerate(file.read_text()) == file.read_text(), f"{file}: run make readme"
    assert "@@" in (ROOT / "05_ddp/README.md").read_text()


def test_the_lesson_of_a_chapter_is_short():
    result = subprocess.run(
        ["diff", ROOT / "04_amp/train.py", ROOT / "05_ddp/train.py"], capture_output=True, text=True, timeout=10
    )
    changed = [line for line in result.stdout.splitlines() if line[:1] in "<>"]
    assert 20 < len(changed) <= 60


def test_every_file_is_short_enough_to_read():
    for file in [*ROOT.glob("0*/*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("launch/*.py")]:
        assert len(file.read_text().splitlines()) <= 250, file


def test_links_lead_somewhere():
    for file in READMES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text()):
            assert (file.parent / target).exists(), f"{file}: {target}"


def test_no_script_shadows_the_standard_library():
    assert not [file for file in SCRIPTS if file.stem in sys.stdlib_module_names]
