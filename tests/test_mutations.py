"""tests/mutations.py: every fault can be planted, and one that no test catches is told (make test-mutations)."""

import mutations
import pytest
from support.harness import ROOT


def test_every_fault_can_be_planted(tmp_path):
    """A line that has changed is found here, in a second, and not in the slow half of CI."""
    folder = mutations.copy_of_the_repository(tmp_path / "copy")
    for mutation in mutations.MUTATIONS:
        file = folder / mutation.file
        whole = file.read_text()
        mutation.apply(folder)
        assert file.read_text() != whole
        file.write_text(whole)
        path, name = mutation.test.split("[")[0].split("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(), mutation.test
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names) >= 24


def test_a_line_that_is_gone_or_stands_twice_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 2\ny = 2\n")
    for line in ("z = 3\n", "y = 2\n"):
        with pytest.raises(ValueError, match=r"stands [02] times in a.py"):
            mutations.Mutation("a", "a.py", line, "", "").apply(tmp_path)
    with pytest.raises(SyntaxError):
        mutations.Mutation("a", "a.py", "x = 1", "x = (", "").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 2\ny = 2\n"


@pytest.mark.launch  # it starts pytest in a copy of the repository, as the campaign does
def test_a_fault_that_no_test_catches_survives(tmp_path):
    folder = mutations.copy_of_the_repository(tmp_path / "copy")
    epochs = next(m for m in mutations.MUTATIONS if m.name == "every epoch has the same order")
    assert mutations.judge(epochs, folder)["caught"]
    harmless = mutations.Mutation("none", epochs.file, "EVAL_SEQUENCES = 96", "EVAL_SEQUENCES = 96 + 0", epochs.test)
    row = mutations.judge(harmless, folder)
    assert (row["caught"], row["exit_code"]) == (False, 0)
    nowhere = mutations.Mutation("none", epochs.file, epochs.line, epochs.fault, epochs.test + "_not")
    assert not mutations.judge(nowhere, folder)["caught"]  # pytest fails because there is no such test
