"""05_ddp/stragglers.py: the slow rank that is planted is found, and uneven ranks end equal.

No test asks how fast anything is.
"""

import json
import subprocess
import sys

import pytest
import torch
from support.chapter import load
from support.harness import command, run

from common import exits, report

stragglers = load("05_ddp/stragglers.py")
stragglers_uneven = load("05_ddp/_stragglers.py")


def test_own_times_tell_who_is_slow():
    typical = [0.010, 0.011, 0.030]
    assert stragglers.find_slow([typical, typical, [0.012, 0.010, 0.9]])[0] == []  # now and then is not slow
    assert stragglers.find_slow([typical, typical, [0.031, 0.040, 0.9]]) == ([2], pytest.approx([1, 1, 3.1]))
    assert stragglers.find_slow([[0.9, 0.8], [0.1, 0.2]])[0] == [0]
    assert stragglers.find_slow([typical, [0.05], typical, [0.05], typical])[0] == [1, 3]


def test_balanced_ranks_have_about_equal_tokens():
    lengths = [9, 1, 7, 3, 5, 5]
    shares = stragglers_uneven.balance(lengths, 3)
    assert sorted(length for share in shares for length in share) == sorted(lengths)
    assert [sum(share) for share in shares] == [10, 10, 10]
    assert stragglers_uneven.waiting_share(shares) == 0
    assert stragglers_uneven.waiting_share([[9, 1], [7, 3], [10, 10]]) == pytest.approx(1 / 3)  # 40 of 60


def test_the_planted_rank_is_found_and_uneven_ranks_end_equal(tmp_path):
    flags = ["--device", "cpu", "--slow-rank", 2, "--steps", 10, "--json", "s.json"]
    result = run("05_ddp/stragglers.py", tmp_path, *flags, nproc=3)
    assert result.code == 0, result.out + result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert set(summary) >= set(report.SUMMARY)
    assert [(row["rank"], row["found_slow"]) for row in summary["rows"]] == [(r % 3, r == 5) for r in range(6)]
    uneven = summary["uneven"]
    assert uneven["hung_ranks_without_join"] == [1, 2]
    # steps 1 to 4 have three ranks, 5 and 6 two, 7 and 8 one
    assert uneven["samples"] == [4, 6, 8]
    assert uneven["weights_divided_by_all"] == pytest.approx([4 / 3, 6 / 3, 8 / 3])
    assert uneven["weights_divided_by_left"] == pytest.approx([4 / 3, 4 / 3 + 2 / 2, 4 / 3 + 2 / 2 + 2 / 1])
    assert summary["waiting_share"]["balanced"] < summary["waiting_share"]["as they come"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--slow-factor 3", "--slow-factor 3 is near what every rank shows: at least 4"),
        ("--device cuda", "--device cuda: two ranks need two GPUs, 1 visible: use --device cpu"),
    ],
)
def test_wrong_flags_are_one_line(monkeypatch, flags, told):
    monkeypatch.setattr(sys, "argv", [stragglers.__file__, *flags.split()])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(exits.UserError, match=told):
        stragglers.main()


@pytest.mark.gpu(n=2)
def test_stragglers_over_nccl(gpus, tmp_path):
    argv = command("05_ddp/stragglers.py", "--device", "cuda", "--json", "s.json", nproc=2)
    done = subprocess.run(argv, cwd=tmp_path, env=gpus, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
