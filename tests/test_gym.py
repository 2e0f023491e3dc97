"""gym.py plants a bug. Its check fails on the bug, and passes on any right fix."""

import dataclasses
import re
from pathlib import Path

import mutations
import pytest
from support.harness import ROOT, content, in_long, run

import gym

BUGS = gym.bugs()
OFTEN = 11  # was once mended in an untouched copy
SELDOM = [number for number in range(1, len(BUGS) + 1) if number != OFTEN]


def mend(bug: dict[str, str], folder: Path) -> None:
    """Put the other right fix where the bug is."""
    fault = gym.fault_of(bug)
    (folder / fault.file).parent.mkdir(parents=True, exist_ok=True)
    (folder / fault.file).write_text(
        (ROOT / fault.file).read_text(encoding="utf-8"), encoding="utf-8"
    )
    dataclasses.replace(fault, new=bug["also_right"]).plant(folder)


def test_every_bug_has_a_test_a_chapter_and_another_fix():
    wrong = []
    for bug in BUGS:
        fault = gym.fault_of(bug)
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        try:
            dataclasses.replace(fault, new=bug["also_right"]).faulty(text)
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{bug['breaks']}: also_right: {error}")
        if not fault.test:
            wrong.append(f"{bug['breaks']}: no test")
        if not (ROOT / bug["chapter"]).is_file():
            wrong.append(f"{bug['breaks']}: no chapter {bug['chapter']}")
        if bug["thread"] and not bug["thread"].startswith("https://"):
            wrong.append(f"{bug['breaks']}: no thread {bug['thread']}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", ["wrapper_bypassed.svg", "wrapper_bypassed-dark.svg"])
def test_the_recorded_terminal_of_the_readme_shows_the_bug_as_it_is(file):
    """Bug 19: the line that it changes, its change, and its test. `make figures` records again."""
    shown = (ROOT / "docs/images" / file).read_text(encoding="utf-8").replace("\u00a0", " ")
    number = int(re.search(r"gym\.py (\d+)", shown)[1])
    fault = gym.fault_of(BUGS[number - 1])
    assert f"{fault.old.rstrip()}</text>" in shown
    assert f"{fault.new.rstrip()}</text>" in shown
    assert f"{fault.test.split('[')[0]}</text>" in shown


def test_there_are_enough_bugs():
    assert len({bug["symptom"] for bug in BUGS}) == len(BUGS) >= 15


@pytest.mark.parametrize("number", [OFTEN, *map(in_long, SELDOM)])
def test_an_untouched_copy_is_not_mended(tmp_path, number):
    """The test that is meant for the bug runs, and sees it."""
    folder = tmp_path / "mine"
    made = run("gym.py", tmp_path, number, "--folder", folder)
    assert made.code == 0, made
    before = content(folder)
    checked = run("gym.py", tmp_path, number, "--folder", folder, "--check", "--verbose")
    assert checked.code == 1, checked
    assert re.search(r"^(FAILED|ERROR \S+\.py::)", checked.out, re.MULTILINE), checked
    assert checked.out.endswith(f"not mended yet: {BUGS[number - 1]['symptom']}\n")
    assert content(folder) == before


def test_a_folder_that_is_no_copy_of_the_bug_stays_as_it_is(tmp_path):
    project = tmp_path / "project"
    (project / "tests").mkdir(parents=True)
    (project / "tests/test_mine.py").write_text("assert True\n", encoding="utf-8")
    copy_of_a_copy = tmp_path / "copy"
    assert run("gym.py", tmp_path, 3, "--folder", copy_of_a_copy).code == 0
    before = content(tmp_path / "project")

    for flags, words in (
        ((11, "--folder", project, "--check"), (str(project), "no copy")),
        ((11, "--folder", project), (str(project), "exists")),
        ((11, "--folder", tmp_path / "nowhere", "--check"), ("nowhere",)),
        ((11, "--folder", copy_of_a_copy, "--check"), ("bug 3", "11")),
        ((11, "--folder", ROOT / "common/gym11"), ("common/gym11", "inside")),
        ((11, "--folder", project / "tests/test_mine.py/gym11"), ("test_mine.py",)),
        ((len(BUGS) + 1, "--hint"), (str(len(BUGS) + 1), "--list")),
        (("--folder", copy_of_a_copy, "--check"), ("--list",)),
    ):
        refused = run("gym.py", tmp_path, *flags)
        last_line = refused.err.splitlines()[-1]
        assert refused.code == 2, refused
        assert not [word for word in words if word not in last_line], refused
    assert content(project) == before
    assert not (ROOT / "common/gym11").exists()


def test_a_copy_holds_what_its_readme_needs(tmp_path):
    folder = tmp_path / "mine"
    assert run("gym.py", tmp_path, 3, "--folder", folder).code == 0
    assert not [answer for answer in gym.ANSWERS if (folder / answer).exists()]
    readme = (folder / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', readme)
    assert pictures
    for name in (*pictures, "LICENSE", "requirements.txt", "requirements-dev.txt"):
        assert (folder / name).is_file(), name


@pytest.mark.full
def test_list_hint_plant_and_check(tmp_path):
    """A learner's way: the check fails until the bug is mended."""
    names = [bug["breaks"] for bug in BUGS]
    index = names.index("every epoch has the order of the first")
    bug = BUGS[index]
    number = index + 1
    folder = tmp_path / "mine"

    assert bug["symptom"] in run("gym.py", tmp_path, "--list").out
    assert bug["thread"] in run("gym.py", tmp_path, number, "--hint").out
    assert bug["symptom"] in run("gym.py", tmp_path, number, "--folder", folder).out
    unmended = run("gym.py", tmp_path, number, "--folder", folder, "--check")
    assert (unmended.code, unmended.out.count("\n"), unmended.err) == (1, 1, "")
    assert bug["symptom"] in unmended.out
    mend(bug, folder)
    assert run("gym.py", tmp_path, number, "--folder", folder, "--check").code == 0


# tests/mutations.py shows that each check fails on its bug and passes without it
@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["breaks"])
def test_a_check_passes_on_another_right_fix(bug, tmp_path):
    folder = mutations.copy_of_the_repository(tmp_path / "copy")
    mend(bug, folder)
    mended, output = gym.check(bug, folder)
    assert mended, output
