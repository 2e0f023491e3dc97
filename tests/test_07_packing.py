"""07_memory_tricks/packing.py: packed documents are trained as each would be alone."""

import json
from pathlib import Path

import pytest
from support.harness import ODD, assert_refused, in_long, run, with_fault

SCRIPT = "07_memory_tricks/packing.py"
# grouped heads
SHAPE = {**ODD, "vocab_size": 256, "max_position_embeddings": 96, "tie_word_embeddings": True}
FLAGS = ("--model", "odd.json", "--seq-len", 96, "--documents", 9, "--rounds", 1, "--device", "cpu")
LEAKS = "best fit, no mask"


def start(folder: Path, *more, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "odd.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return run(script, folder, *FLAGS, "--json", "summary.json", *more)


def finish(folder: Path) -> dict:
    result = start(folder)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return result.summary


def test_documents_do_not_see_each_other(once):
    summary = once("07 packing", finish)
    rows = {row["name"]: row for row in summary["rows"]}
    leaking = rows.pop(LEAKS)
    assert leaking["documents_see_each_other"]
    assert leaking["largest_change"] > 0.01
    assert leaking["gradient_error"] > 0.01
    for row in rows.values():
        assert not row["documents_see_each_other"]
        assert row["largest_change"] == 0
        assert row["gradient_error"] < 1e-5


def test_shares_targets_and_memory(once):
    summary = once("07 packing", finish)
    rows = {row["name"]: row for row in summary["rows"]}
    tokens = rows["one at a time"]["useful_tokens"]
    assert {row["useful_tokens"] for row in rows.values()} == {tokens}
    # none behind a last token
    assert {row["targets"] for row in rows.values()} == {tokens - summary["documents"]}
    shares = {name: row["useful_token_share"] for name, row in rows.items()}
    assert shares["one at a time"] == 1
    assert (
        shares["padded"]
        < shares["in order, cut"]
        <= shares["best fit, cut"]
        == shares["best fit, mask"]
    )
    assert rows["best fit, cut"]["peak_bytes"] < rows["padded"]["peak_bytes"]
    assert summary["shares_of_10000_documents"]["best_fit"] > 0.99


FAULTS = {  # a line, and what stands in its place
    "a last token learns the next document's first": ("is_last | (owner < 0)", "owner < 0"),
    "the mask is causal alone": (
        "(owner[:, None] == owner).tril()",
        "(owner[:, None] == owner[:, None]).tril()",
    ),
    "a query sees its future": (
        "(owner[:, None] == owner).tril()",
        "owner[:, None] == owner",
    ),
}
OFTEN_PLANTED = "a query sees its future"


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [OFTEN_PLANTED, *(in_long(fault) for fault in FAULTS if fault != OFTEN_PLANTED)]
)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    result = start(tmp_path, script=str(with_fault(SCRIPT, tmp_path, *FAULTS[fault])))
    assert (result.code, "AssertionError" in result.err) == (1, True), result.err[-3000:]


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_a_gpu(gpu_run, tmp_path, dtype):
    """The script's own checks are the test; in bf16 with varlen_attn."""
    flags = ("--device", "cuda", "--dtype", dtype, "--rounds", 1, "--json", "summary.json")
    result = gpu_run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert ("best fit, varlen_attn" in {row["name"] for row in result.summary["rows"]}) == (
        dtype == "bf16"
    )


REFUSED = {  # flags: words of the line
    "--documents 1": "--seq-len --documents",
    "--seq-len 97": "--seq-len 97 --model",
    "--dtype fp16": "--dtype",
    "--json no/such/file.json": "no/such/file.json",
}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags, words in REFUSED.items():
        assert_refused(start(tmp_path, *flags.split()), *words.split())
