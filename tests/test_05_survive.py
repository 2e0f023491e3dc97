"""05_ddp/survive.py: two ranks go on when the third is killed. The script compares the losses."""

import pytest
from support.harness import assert_refused, in_full, in_long, run

SCRIPT = "05_ddp/survive.py"
SMALL = ("--steps", 4, "--seq-len", 8, "--json", "summary.json")


@pytest.mark.parametrize(
    ("rank", "step", "moment", "last_common_step", "caught_up"),
    [
        # one survivor has made the update of step 2, and the other one makes it later
        in_full(0, 2, "vote", 2, [1]),
        # nobody can make the update of step 3, and it is repeated
        in_long(2, 3, "all-reduce", 2, []),
    ],
)
def test_the_survivors_go_on(tmp_path, rank, step, moment, last_common_step, caught_up):
    flags = ("--kill-rank", rank, "--kill-step", step, "--moment", moment)
    result = run(SCRIPT, tmp_path, *SMALL, *flags)
    assert result.code == 0, result
    assert result.out.count("checked: ") == 3
    assert result.summary["last_common_step"] == last_common_step
    assert result.summary["caught_up"] == caught_up
    assert len(result.summary["losses"]) == 4


def test_flags_that_do_not_fit_are_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--kill-rank", 3), "--kill-rank 3", "2")
    assert_refused(run(SCRIPT, tmp_path, "--kill-step", 10), "--kill-step 10", "--steps 10")
