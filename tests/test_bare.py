"""Every lesson without flags, by itself and, where it has ranks, under torchrun with 1, 2 and 3 of them."""

import pytest
from support.harness import ROOT, assert_refused, run

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
LESSONS = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("0*/[!_]*.py"))
RANKS = ("init_process_group(", "lesson.relaunch(")
WITH_RANKS = [script for script in LESSONS if any(call in (ROOT / script).read_text() for call in RANKS)]


@pytest.mark.parametrize(
    ("script", "ranks"), [*((script, None) for script in LESSONS), *((s, n) for s in WITH_RANKS for n in (1, 2, 3))]
)
def test_it_runs_without_flags(tmp_path, script, ranks):
    result = run(script, tmp_path, nproc=ranks, timeout=900, warm=False, CUDA_VISIBLE_DEVICES="")
    if ranks is None or result.code == 0:
        assert result.code == 0, result
    else:
        assert_refused(result)  # ranks that do not divide what it cuts
