"""09_inference/kv_cache.py: the same tokens with every cache, bytes and tokens read by formula, refusals."""

import json

import pytest
from support.checkpoints import write_folder
from support.harness import ODD, config_of, run

SCRIPT = "09_inference/kv_cache.py"


def serve(folder, *flags, code: int = 0):
    result = run(SCRIPT, folder, "--device", "cpu", "--json", "summary.json", *flags)
    assert result.code == code, f"{result.out[-2000:]}\n{result.err[-3000:]}"
    return result


def test_bare_all_rows_have_the_tokens_of_transformers(tmp_path):
    summary = serve(tmp_path).summary
    rows = {row["name"]: row for row in summary["rows"]}
    assert len(rows) == 5
    assert any("transformers" in line for line in summary["checked"])
    assert rows["paged, prefix shared"]["tokens_read"] < rows["paged"]["tokens_read"] < rows["no cache"]["tokens_read"]


def test_other_sizes_and_prompts_of_unequal_lengths(tmp_path):
    write_folder(tmp_path / "model", config_of(ODD), scale=4)
    (tmp_path / "prompts.txt").write_text("x\nimport os, sys\nfor i in range(3): print(i)\n")
    flags = ["--model", "model", "--prompts", "prompts.txt", "--max-new-tokens", 20]
    assert any("transformers" in line for line in serve(tmp_path, *flags).summary["checked"])


@pytest.mark.parametrize("flags", ["--max-new-tokens 5000", "--model none", "--top-k 3"])
def test_a_wrong_flag_ends_in_one_line(tmp_path, flags):
    result = serve(tmp_path, *flags.split(), code=2)
    assert result.err.count("\n") == 1
    assert json.dumps(flags.split()[0])[1:-1] in result.err
