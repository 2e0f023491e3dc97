"""What is written can be followed: commands parse, generated parts are fresh, links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest
from support.commands import check
from support.harness import ROOT
from support.readme import find_hunk, hunks, regenerate

READMES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("[0-9]*/*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("benchmarks/*.md"),
    ROOT / "benchmarks/results/claims.md",
    *ROOT.glob("launch/**/*.md"),
]
SCRIPTS = [*ROOT.glob("[0-9]*/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("launch/*.py")]
WITHOUT_COMMANDS = (
    "CHANGELOG.md",
    "estimate.md",
    "flags.md",
    "glossary.md",
    "launch_mistakes.md",
    "scripts.md",
)
COMMAND = re.compile(
    r"(?:^|\s|`)((?:torchrun|python3?|make|pytest) [^`#\n]+?)(?:`|\s{2,}[a-z]|\s+#|$)", re.MULTILINE
)


def lines_of_blocks(readme: Path) -> list[str]:
    """The lines of a README's blocks of shell commands, continued ones as one."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def commands_of(file: Path) -> list[str]:
    """Those of a README's blocks, of the tables of CLAIMS.md, and of a script's docstring."""
    if file.suffix == ".py":
        docstring = file.read_text(encoding="utf-8").split('"""')[1]
        lines = [
            line
            for line in re.sub(r"\\+\n", " ", docstring).splitlines()
            if line.startswith("    ")
        ]
    else:
        lines = lines_of_blocks(file)
    if file.name in ("CLAIMS.md", "claims.md", "ONBOARDING.md"):
        lines += re.findall(r"`[^`\n]+`", file.read_text(encoding="utf-8"))
    return list(
        dict.fromkeys(match[1].strip() for line in lines for match in COMMAND.finditer(line))
    )


LESSONS = [file for file in SCRIPTS if not file.name.startswith("_")]


def test_every_command_parses():
    wrong = []
    for file in [*READMES, *LESSONS]:
        name = file.relative_to(ROOT)
        commands = commands_of(file)
        if not commands and file.name not in WITHOUT_COMMANDS:
            wrong.append(f"{name}: no command")
        for command in commands:
            try:
                check(command)
            except (AssertionError, ValueError, SyntaxError, SystemExit) as error:
                wrong.append(f"{name}: {command}\n    {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def test_generated_parts_are_fresh():
    stale = [
        file
        for file in READMES
        if regenerate(file.read_text(encoding="utf-8")) != file.read_text(encoding="utf-8")
    ]
    assert not stale, "run make readme"


def test_a_readme_with_hunks_of_a_diff_shows_all_of_them():
    for file in READMES:
        text = file.read_text(encoding="utf-8")
        for before, after in set(re.findall(r"<!-- hunk (\S+) (\S+): ", text)):
            missing = [hunk for hunk in hunks(before, after) if str(hunk) not in text]
            assert not missing, f"{file.relative_to(ROOT)} leaves out:\n{missing[0]}"


def test_a_hunk_is_named_by_the_text_of_one_hunk_only():
    minimal = ("04_amp/minimal.py", "05_ddp/minimal.py")
    assert find_hunk(*minimal, "DistributedDataParallel(model)").changes("ddp_model = ")
    for text in ("no such text", "rank"):
        with pytest.raises(ValueError, match=text):
            find_hunk(*minimal, text)


def test_the_table_of_sections_names_what_the_script_has():
    script = (ROOT / "04_amp/train.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\| section \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    names = re.findall(r"`([\w.]+)`", "\n".join(row.split("|")[2] for row in table.splitlines()))
    assert names
    assert [name for name in names if name not in script] == []


def test_links_and_images_lead_somewhere():
    broken = []
    for file in READMES:
        text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        targets = re.findall(r"\]\((?!http)([^)#\s]+)[^)]*\)", text)
        targets += re.findall(r'(?:src|href)="(?!http)([^"#]+)', text)
        broken += [
            f"{file.relative_to(ROOT)}: {target}"
            for target in targets
            if not (file.parent / target).exists()
        ]
    assert not broken


def test_a_chinese_page_has_the_commands_of_the_english_one():
    def commands(page: Path) -> list[str]:
        lines = [re.sub(r"\s+#.*", "", line).strip() for line in lines_of_blocks(page)]
        return [line for line in lines if line]

    for chinese in [ROOT / "README.zh-CN.md", *ROOT.glob("[0-9]*/README.zh-CN.md")]:
        english = chinese.with_name("README.md")
        assert commands(chinese) == commands(english), chinese.relative_to(ROOT)


def texts_with_commands() -> list[tuple[str, str]]:
    """The pages, and the docstrings of all modules, with continued lines as one."""
    texts = [(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in READMES]
    for folder in ("[0-9]*", "benchmarks", "common", "launch", "lm", "planner", "training"):
        for file in ROOT.glob(f"{folder}/**/*.py"):
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            texts.append((str(file.relative_to(ROOT)), docstring))
    return [(name, re.sub(r" *\\+\n *", " ", text)) for name, text in texts]


def test_a_command_for_one_node_is_standalone_and_one_for_many_has_a_name():
    """So two jobs on a machine, or with the same head node, do not meet.

    torchrun --standalone ignores --rdzv-endpoint: a job of several nodes must not have it.
    """
    wrong = []
    commands = 0
    for name, text in texts_with_commands():
        for command in re.findall(r"torchrun [^`\n]*--nproc[-_]per[-_]node[^`\n]*", text):
            commands += 1
            several = "--nnodes" in command
            if ("--standalone" in command) == several or (several and "--rdzv-id" not in command):
                wrong.append(f"{name}: {command}")
        for flags in re.findall(r"^.*\n.*--nnodes=.*\n.*", text, re.MULTILINE):
            if "--rdzv-endpoint" in flags and "--rdzv-id" not in flags:
                wrong.append(f"{name}: {flags}")
            if "the same" in flags and "in place of --standalone" not in flags:
                wrong.append(f"{name}: {flags}")
    assert commands > 50
    assert not wrong, "\n".join(wrong)


def test_no_pasted_block_sends_a_token_to_a_mirror():
    """A token that `hf auth login` has saved goes to the address in HF_ENDPOINT."""
    mentioned = 0
    for file in READMES:
        text = file.read_text(encoding="utf-8")
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        assert not [block for block in blocks if "HF_ENDPOINT" in block], file
        for paragraph in text.split("\n\n"):
            if "HF_ENDPOINT" in paragraph:
                mentioned += 1
                assert "token" in paragraph, file
    assert mentioned
