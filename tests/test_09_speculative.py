"""09_inference/speculative.py: a draft changes no greedy token, and saves steps of the large model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.harness import ODD, config_of, run, with_fault

from common import model, shapes

SCRIPT = "09_inference/speculative.py"
PROMPTS = ["for i in range(3): print(i)", "x = 1"]  # of unequal lengths
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two Hugging Face folders: a model, and a draft that often agrees with it."""
    where = tmp_path_factory.mktemp("models")
    config = config_of(ODD)
    net = model.build("nano", config, seed=5)
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
    shared = ("--model", "large", "--prompts", "prompts.txt", "--max-new-tokens", NEW_TOKENS, "--device", "cpu")
    return run(script, folder, *shared, "--json", "s.json", *flags)


def summary_of(folder, *flags) -> dict:
    result = answer(folder, *flags)
    assert result.code == 0, result.err
    return json.loads((folder / "s.json").read_text())


@pytest.mark.parametrize("guesses", [1, 3])
def test_greedy_tokens_stay_and_take_fewer_steps(folder, guesses):
    summary = summary_of(folder, "--draft", "draft", "--draft-tokens", guesses)
    assert len(summary["checked"]) == 3  # among them that the tokens are those of transformers' generate
    plain, guessed = summary["rows"]
    assert plain["large_steps"] == len(PROMPTS) * (NEW_TOKENS - 1)
    assert 0 < guessed["kept_per_step"] < guesses
    assert guessed["large_steps"] < plain["large_steps"]
    stop = plain["token_ids"][0][5]
    (folder / "large/generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    ended = summary_of(folder, "--draft", "draft", "--draft-tokens", guesses)  # at a stop token
    (folder / "large/generation_config.json").unlink()
    assert ended["token_ids"][0] == plain["token_ids"][0][:5]
    assert len(ended["checked"]) == 3


def test_the_model_as_its_own_draft_keeps_every_guess(folder):
    rows = summary_of(folder, "--draft-tokens", 3, "--temperature", 0.7, "--top-k", 50)["rows"]
    assert rows[2]["kept_per_step"] == pytest.approx(3, abs=0.2)
    assert rows[2]["large_steps"] < rows[1]["large_steps"] < rows[0]["large_steps"]


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        ("(target[count] - given).clamp(min=0)", "target[count]", "chi-square"),
        ("        ahead = ahead + count + 1", "        ahead = ahead + count", "other tokens than without a draft"),
    ],
)
def test_a_fault_is_seen(folder, tmp_path, line, wrong, message):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    result = answer(tmp_path, "--draft", "draft", script=with_fault(SCRIPT, tmp_path, line, wrong))
    assert result.code == 1
    assert message in result.err


@pytest.mark.parametrize("wrong", ["--draft nano", "--draft nope", "--max-new-tokens 40", "--top-k 5"])
def test_a_wrong_flag_is_one_line(folder, wrong):
    result = answer(folder, *wrong.split())
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert wrong.split()[0] in result.err
