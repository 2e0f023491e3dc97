"""What is written is true: commands parse, files exist, generated parts are fresh, names tell roles, sizes are kept."""

import ast
import json
import re
import sys

import pytest
from support.commands import check
from support.harness import ROOT
from support.readme import regenerate

READMES = [*ROOT.glob("*.md"), *ROOT.glob("0*/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("launch/**/*.md")]
SCRIPTS = [*ROOT.glob("0*/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("launch/*.py")]
CHAPTERS = sorted(ROOT.glob("0[0-9]_*"))
LESSONS = [file for file in SCRIPTS if not file.name.startswith("_")]
COMMAND = re.compile(r"(?:^|\s|`)((?:torchrun|python3?|make|pytest) [^`#\n]+?)(?:`|\s{2,}[a-z]|\s+#|$)", re.MULTILINE)


def name_of(file) -> str:
    return str(file.relative_to(ROOT))


def commands() -> list[tuple[str, str]]:
    """Every command in a code block of a README, in a table of CLAIMS.md, and in the docstring of a script."""
    found = []
    for file in READMES:
        blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", file.read_text(), re.DOTALL)
        found += [(file, line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    claims = ROOT / "CLAIMS.md"
    found += [(claims, code) for code in re.findall(r"`[^`\n]+`", claims.read_text())]
    for file in SCRIPTS:
        docstring = file.read_text().split('"""')[1]
        lines = re.sub(r"\\+\n", " ", docstring).splitlines()
        found += [(file, line) for line in lines if line.startswith("    ")]
    return [(name_of(file), match[1].strip()) for file, line in found for match in COMMAND.finditer(line)]


def test_commands_are_found():
    found = {command for _, command in commands()}
    assert "torchrun --nproc_per_node=8 05_ddp/train.py" in found
    assert "make train" in found
    assert "make test" in found
    assert len(found) > 15
    assert len([file for file, _ in commands() if file == "CLAIMS.md"]) > 50


@pytest.mark.parametrize(("file", "command"), commands())
def test_command_parses(file, command):
    check(command)


@pytest.mark.parametrize(
    "wrong",
    [
        "python 04_amp/train.py --stepz 3",
        "python 99_none/train.py",
        "make nonsense",
        "pytest tests/test_none.py",
        "pytest tests/test_docs.py -k nonsense",
        "pytest tests/test_launch_torchrun.py -k sigusr1",
    ],
)
def test_a_wrong_command_is_seen(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_generated_parts_are_fresh():
    for file in ROOT.glob("0*/README.md"):
        assert regenerate(file.read_text()) == file.read_text(), f"{file}: run make readme"
    for folder in ("05_ddp", "06_fsdp_zero"):
        assert "@@" in (ROOT / folder / "README.md").read_text()


@pytest.mark.parametrize("file", [file for file in READMES if file.name == "README.md"], ids=name_of)
def test_a_readme_is_short(file):
    assert len(file.read_text().splitlines()) <= 220


def test_the_chinese_readme_has_the_commands_and_figures_of_the_english_one():
    english, chinese = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "README.zh-CN.md"))
    for pattern in (r"```bash (.*?)```", r"(?<!`)`([^`]+)`(?!`)", r"\]\(([^)]+)\)", r"\| ([\d.]+) (?=\|)"):
        found, expected = (set(re.findall(pattern, text)) for text in (chinese, english))
        assert found
        assert found <= expected | {"README.md"}
    assert len((ROOT / "README.zh-CN.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("folder", [*CHAPTERS, ROOT / "launch"], ids=name_of)
def test_a_readme_opens_with_the_commands_of_its_folder(folder):
    lines = (folder / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("```"))
    assert start < 25, f"the first code block is in line {start + 1}"
    assert lines[start] == "```bash"
    first_block = lines[start + 1 : lines.index("```", start + 1)]
    assert [line for line in first_block if f"{folder.name}/" in line], first_block


@pytest.mark.parametrize("file", LESSONS, ids=name_of)
def test_a_file_without_underscore_is_a_script(file):
    text = file.read_text()
    assert ast.get_docstring(ast.parse(text)), "it has no docstring"
    assert '\nif __name__ == "__main__":\n' in text, "it is not a script: give it an underscore"
    if file.parent in CHAPTERS:
        assert re.search(rf"\b{file.name}\b", (file.parent / "README.md").read_text()), "its README does not mention it"
        assert name_of(file) in (ROOT / "README.md").read_text(), "the main README does not mention it"


def test_links_and_images_lead_somewhere():
    for file in READMES:
        text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\((?!http)([^)#\s]+)[^)]*\)", text) + re.findall(
            r'(?:src|href)="(?!http)([^"#]+)', text
        )
        for target in targets:
            assert (file.parent / target).exists(), f"{file}: {target}"


def test_the_headline_is_what_was_measured():
    newest = max(ROOT.glob("benchmarks/results/*-loss-curves-*.json"), key=lambda file: file.stem[-10:])
    measured = json.loads(newest.read_text())
    differences = measured["relative_differences"].values()
    first = max(max(values[: measured["claimed_steps"]]) for values in differences)
    whole = max(max(values) for values in differences)
    headline = f"losses within {first:.1e} (relative) over 20 steps of nano, {whole:.1e} over 40".replace("e-0", "e-")
    assert headline in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("claim", [f"C{n}" for n in range(1, 16)] + [f"S{n}" for n in range(1, 20)])
def test_every_claim_has_a_row(claim):
    rows = [line for line in (ROOT / "CLAIMS.md").read_text().splitlines() if line.startswith(f"| {claim} |")]
    assert rows


def test_every_row_of_the_claims_names_what_shows_it():
    tables = (ROOT / "CLAIMS.md").read_text().split("\n## Speed\n")[1]
    heads = ("| id |", "| what |", "| what is said |", "| ---")
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    assert len(rows) > 50
    for row in rows:
        assert COMMAND.search(row) or "](http" in row or "to come" in row, f"no command: {row}"


def test_no_script_shadows_the_standard_library():
    assert not [file for file in SCRIPTS if file.stem in sys.stdlib_module_names]
