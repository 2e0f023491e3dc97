"""gym.py plants a bug. Its check fails on the bug, and passes on any right fix."""

import dataclasses
from pathlib import Path

import mutations
import pytest
from support.harness import ROOT, run

import gym

BUGS = gym.bugs()


def mend(bug: dict[str, str], folder: Path) -> None:
    """Put the other right fix where the bug is."""
    fault = gym.fault_of(bug)
    (folder / fault.file).write_text(
        (ROOT / fault.file).read_text(encoding="utf-8"), encoding="utf-8"
    )
    dataclasses.replace(fault, new=bug["also_right"]).plant(folder)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["breaks"])
def test_a_bug_has_a_test_and_a_chapter(bug):
    assert gym.fault_of(bug).test
    assert (ROOT / bug["chapter"]).is_file()
    assert not bug["thread"] or bug["thread"].startswith("https://")


def test_there_are_enough_bugs():
    assert len({bug["symptom"] for bug in BUGS}) == len(BUGS) >= 15


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
    assert not [answer for answer in gym.ANSWERS if (folder / answer).exists()]
    assert run("gym.py", tmp_path, number, "--folder", folder).code == 2  # it is there already
    assert run("gym.py", tmp_path, number, "--folder", folder, "--check").code == 1
    mend(bug, folder)
    assert run("gym.py", tmp_path, number, "--folder", folder, "--check").code == 0
    assert run("gym.py", tmp_path, len(BUGS) + 1, "--hint").code == 2


# tests/mutations.py shows that each check fails on its bug and passes without it
@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["breaks"])
def test_a_check_passes_on_another_right_fix(bug, tmp_path):
    folder = mutations.copy_of_the_repository(tmp_path / "copy")
    mend(bug, folder)
    mended, output = gym.check(bug, folder)
    assert mended, output
