"""09_inference/speculative.py: a draft changes no greedy token, and saves steps of the large model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.harness import ODD, assert_refused, config_of, run, with_fault

from lm import shapes
from lm.weights import build

SCRIPT = "09_inference/speculative.py"
PROMPTS = ["for i in range(3): print(i)", "x = 1"]  # of unequal lengths
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two Hugging Face folders: a model, and a draft that often agrees with it."""
    where = tmp_path_factory.mktemp("models")
    config = config_of(ODD)
    net = build("nano", config, seed=5)
    generator = torch.Generator().manual_seed(6)
    for name, noise in (("large", 0), ("draft", 0.01)):
        weights = {}
        for key, weight in net.named_parameters():
            matrix = 12 * weight.detach() + noise * torch.randn(weight.shape, generator=generator)
            weights[key] = matrix if weight.ndim == 2 else weight.detach()
        (where / name).mkdir()
        save_file(weights, where / name / "model.safetensors", metadata={"format": "pt"})
        (where / name / "config.json").write_text(json.dumps(shapes.config_json(config)))
    (where / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return where


def answer(folder, *flags, script=SCRIPT):
    shared = (
        "--model",
        "large",
        "--prompts",
        "prompts.txt",
        "--max-new-tokens",
        NEW_TOKENS,
        "--device",
        "cpu",
    )
    return run(script, folder, *shared, "--json", "s.json", *flags)


def summary_of(folder, *flags) -> dict:
    result = answer(folder, *flags)
    assert result.code == 0, result.err
    return json.loads((folder / "s.json").read_text())


@pytest.mark.parametrize("guesses", [3, pytest.param(1, marks=pytest.mark.full)])
def test_greedy_tokens_stay_and_take_fewer_steps(folder, guesses):
    summary = summary_of(folder, "--draft", "draft", "--draft-tokens", guesses)
    assert any("transformers" in line for line in summary["checked"])
    plain, guessed = summary["rows"]
    assert plain["large_steps"] == len(PROMPTS) * (NEW_TOKENS - 1)
    assert 0 < guessed["kept_per_step"] < guesses
    assert guessed["large_steps"] < plain["large_steps"]
    stop = plain["token_ids"][0][5]
    (folder / "large/generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    ended = summary_of(folder, "--draft", "draft", "--draft-tokens", guesses)  # at a stop token
    (folder / "large/generation_config.json").unlink()
    assert ended["token_ids"][0] == plain["token_ids"][0][:5]
    assert any("transformers" in line for line in ended["checked"])


def test_the_model_as_its_own_draft_keeps_every_guess(folder):
    rows = summary_of(folder, "--draft-tokens", 3, "--temperature", 0.7, "--top-k", 50)["rows"]
    assert rows[2]["kept_per_step"] == pytest.approx(3, abs=0.2)
    assert rows[2]["large_steps"] < rows[1]["large_steps"] < rows[0]["large_steps"]


FAULTS = {  # a line, and what stands in its place
    "a refused guess is drawn again from all": (
        "(target[count] - given).clamp(min=0)",
        "target[count]",
    ),
    "the draft is one token behind": (
        "        ahead = ahead + count + 1",
        "        ahead = ahead + count",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_version_fails_its_own_check(folder, tmp_path, fault):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    result = answer(
        tmp_path, "--draft", "draft", script=with_fault(SCRIPT, tmp_path, *FAULTS[fault])
    )
    assert (result.code, "AssertionError" in result.err) == (1, True), result.err[-3000:]


REFUSED = {  # flags: words of the line
    "--draft nano": "",
    "--draft nope": "",
    "--max-new-tokens 40": "--max-new-tokens",
    "--top-k 5": "--top-k",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_refused_in_one_line(folder, flags):
    assert_refused(answer(folder, *flags.split()), *(REFUSED[flags] or flags).split())
