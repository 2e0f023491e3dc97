"""09_inference/kv_cache.py: the same tokens with every cache, bytes and tokens read by formula, pages given back."""

import json
import shutil
from pathlib import Path

import pytest
from support.checkpoints import write_folder
from support.harness import ODD, assert_refused, config_of, in_long, run, with_fault

SCRIPT = "09_inference/kv_cache.py"
# of unequal lengths, the first 16 bytes equal: with pages of 16 tokens they share one
PROMPTS = (
    "import os, sys, x\nimport os, sys, re, json\nimport os, sys, and for i in range(3): print(i)\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kv-cache") / "model"
    write_folder(folder, config_of(ODD), scale=4)
    return folder


def serve(folder: Path, model: Path, *flags, script: str = SCRIPT):
    (folder / "prompts.txt").write_text(PROMPTS, encoding="utf-8")
    shared = (
        "--model",
        model,
        "--prompts",
        "prompts.txt",
        "--max-new-tokens",
        12,
        "--device",
        "cpu",
    )
    return run(script, folder, *shared, "--json", "summary.json", *flags)


def test_all_rows_have_the_tokens_of_transformers(tmp_path, model):
    result = serve(tmp_path, model)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-3000:]}"
    rows = {row["name"]: row for row in result.summary["rows"]}
    assert len({str(row["token_ids"]) for row in rows.values()}) == 1
    assert any("transformers" in line for line in result.summary["checked"])
    sharing, paged = rows["paged, prefix shared"], rows["paged"]
    assert sharing["tokens_read"] < paged["tokens_read"] < rows["no cache"]["tokens_read"]
    assert sharing["cache_bytes"] < paged["cache_bytes"] < rows["static cache"]["cache_bytes"]


def test_the_cache_here_gives_the_tokens_of_infer_70b(tmp_path, model):
    """infer_70b.py uses the cache of lm/generate.py, which also serves ranks and CUDA graphs."""
    ours = serve(tmp_path, model)
    flags = ("--model", model, "--prompts", "prompts.txt", "--max-new-tokens", 12)
    others = run("09_inference/infer_70b.py", tmp_path, *flags, "--json", "infer.json")
    assert others.code == 0, others
    expected = json.loads((tmp_path / "infer.json").read_text(encoding="utf-8"))["token_ids"]
    rows = {row["name"]: row for row in ours.summary["rows"]}
    assert rows["static cache"]["token_ids"] == expected
    assert rows["paged"]["token_ids"] == expected


def test_an_answer_ends_before_its_stop_token(tmp_path, model):
    """One prompt: the loop reads the tokens seldom, and computes some behind the stop token."""
    flags = ("--model", "model", "--prompt", "import os", "--max-new-tokens", 12, "--device", "cpu")
    shutil.copytree(model, tmp_path / "model")

    def answer() -> list[int]:
        result = run(SCRIPT, tmp_path, *flags, "--json", "summary.json")
        assert result.code == 0, result
        [answer] = {tuple(row["token_ids"][0]) for row in result.summary["rows"]}
        return list(answer)

    whole = answer()
    stop = whole[3]
    settings = json.dumps({"eos_token_id": stop})
    (tmp_path / "model/generation_config.json").write_text(settings, encoding="utf-8")
    assert answer() == whole[: whole.index(stop)]


def test_repeated_prompts_are_answered_alike(tmp_path, model):
    result = serve(tmp_path, model, "--repeat", 2)
    assert result.code == 0, result
    for row in result.summary["rows"]:
        assert row["token_ids"][:3] == row["token_ids"][3:]


@pytest.mark.long  # tests/test_bare.py
def test_without_a_prompt_it_answers_several_of_its_own(tmp_path):
    result = run(
        SCRIPT, tmp_path, "--max-new-tokens", 2, "--device", "cpu", "--json", "summary.json"
    )
    assert result.code == 0, result.err
    assert all(len(row["token_ids"]) > 1 for row in result.summary["rows"])


FAULTS = {  # a line, and what stands in its place
    "a page is given back while another text has it": ("(table) - self.held_pages()", "(table)"),
    "no page is given back": ("self.free += set(table) - self.held_pages()", "pass"),
    "two texts have one page": ("table.append(self.free.pop())", "table.append(self.free[-1])"),
    "a page comes back to another place of its text": ("] = copy.to(", "] = copy.flip(0).to("),
    "a token sees the slot after its own": (
        "self.slots <= positions",
        "self.slots - 1 <= positions",
    ),
    "keys of the next token overwrite another text's": (
        "keys[pages, :, slots]",
        "keys[pages, :, 0]",
    ),
}


@pytest.mark.parametrize(
    "fault",
    [fault if fault == "two texts have one page" else in_long(fault) for fault in FAULTS],
)
def test_a_wrong_version_fails_its_own_check(tmp_path, model, fault):
    result = serve(tmp_path, model, script=str(with_fault(SCRIPT, tmp_path, *FAULTS[fault])))
    assert (result.code, "Error" in result.err) == (1, True), result.err[-3000:]


REFUSED = {
    "--max-new-tokens 5000": "--max-new-tokens 64",
    "--model none": "",
    "--top-k 3": "--top-k --temperature",
}


def test_bad_input_is_refused_in_one_line(tmp_path, model):
    for flags, words in REFUSED.items():
        assert_refused(serve(tmp_path, model, *flags.split()), *(words or flags).split())
