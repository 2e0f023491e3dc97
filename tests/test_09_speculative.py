"""09_inference/speculative.py: a draft changes no greedy token, and saves steps of the target."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.harness import (
    ODD,
    assert_refused,
    config_of,
    in_long,
    run,
    with_fault,
    with_prelude,
)

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
        (where / name / "config.json").write_text(
            json.dumps(shapes.config_json(config)), encoding="utf-8"
        )
    (where / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return where


def answer(folder, *flags, script=SCRIPT):
    shared = ["--model", "large", "--prompts", "prompts.txt", "--device", "cpu"]
    shared += ["--max-new-tokens", NEW_TOKENS, "--json", "s.json"]
    return run(script, folder, *shared, *flags)


def summary_of(folder, *flags) -> dict:
    result = answer(folder, *flags)
    assert result.code == 0, result.err
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("guesses", [3, pytest.param(1, marks=pytest.mark.full)])
def test_greedy_tokens_stay_and_take_fewer_steps(folder, guesses):
    summary = summary_of(folder, "--draft", "draft", "--draft-tokens", guesses)
    assert any("transformers" in line for line in summary["checked"])
    without_draft, with_draft = summary["rows"]
    assert without_draft["target_steps"] == len(PROMPTS) * (NEW_TOKENS - 1)
    assert 0 < with_draft["accepted_per_step"] < guesses
    assert with_draft["target_steps"] < without_draft["target_steps"]

    token_ids = without_draft["token_ids"]
    stop = token_ids[0][5]
    (folder / "large/generation_config.json").write_text(
        json.dumps({"eos_token_id": stop}), encoding="utf-8"
    )
    ended = summary_of(folder, "--draft", "draft", "--draft-tokens", guesses)  # at a stop token
    (folder / "large/generation_config.json").unlink()
    assert ended["token_ids"][0] == token_ids[0][:5]
    assert any("transformers" in line for line in ended["checked"])


def test_the_model_as_its_own_draft_has_every_guess_accepted(folder):
    flags = ("--draft-tokens", 3, "--temperature", 0.7, "--top-k", 50)
    without_draft, half, itself = summary_of(folder, *flags)["rows"]
    assert itself["accepted_per_step"] == pytest.approx(3, abs=0.2)
    assert itself["target_steps"] < half["target_steps"] < without_draft["target_steps"]


# Takes the path of CUDA graphs without a GPU. Only what is captured reads less than all slots.
BUCKET = 8
CAPTURED = f"""
import torch
from lm import generate
def capture(step, inputs, pool):
    static_inputs = [tensor.clone() for tensor in inputs]
    logits = step(*static_inputs)
    class Graph:
        def replay(self):
            logits.copy_(step(*static_inputs))
    return Graph(), static_inputs, logits
def compiled(net, cache, *steps):
    return [generate.captured(step, cache) for step in steps]
mask = generate.StaticCache.mask
captures = open("captures", "a", encoding="utf-8")
def noting_mask(cache, positions):
    if len(cache.slots) < cache.keys["0"].shape[2]:
        print(len(cache.slots), positions.max().item(), file=captures, flush=True)
    return mask(cache, positions)
torch.cuda.graph_pool_handle = tuple
generate.BUCKET = {BUCKET}
generate.StaticCache.mask = noting_mask
generate.capture, generate.compiled = capture, compiled
"""


def test_slots_of_rejected_guesses_are_not_read(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    script = with_prelude(SCRIPT, tmp_path, CAPTURED)
    flags = ("--draft", "draft", "--draft-tokens", 3, "--compile", "--dtype", "fp32")
    result = answer(tmp_path, *flags, script=script)
    assert result.code == 0, result
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert summary["rows"][1]["accepted_per_step"] < 3
    captures = (tmp_path / "captures").read_text(encoding="utf-8").splitlines()
    assert captures
    for capture in captures:
        slots, last_position = map(int, capture.split())
        assert slots == math.ceil((last_position + 1) / BUCKET) * BUCKET


FAULTS = {  # a line, and what stands in its place
    "a rejected guess is drawn again from all of p": (
        "(p[count] - q[count]).clamp(min=0)",
        "p[count]",
    ),
    "the draft is one token behind": (
        "        position += count + 1",
        "        position += count",
    ),
}


@pytest.mark.parametrize(
    "fault",
    [
        "the draft is one token behind",
        in_long("a rejected guess is drawn again from all of p"),
    ],
)
def test_a_wrong_version_fails_its_own_check(folder, tmp_path, fault):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    wrong = with_fault(SCRIPT, tmp_path, *FAULTS[fault])
    result = answer(tmp_path, "--draft", "draft", script=wrong)
    assert result.code == 1, result
    assert "AssertionError" in result.err


REFUSED = {  # flags: words of the line
    "--draft nano": "",
    "--draft nope": "",
    "--max-new-tokens 40": "--max-new-tokens",
    "--top-k 5": "--top-k",
}


def test_bad_input_is_refused_in_one_line(folder):
    for flags, words in REFUSED.items():
        assert_refused(answer(folder, *flags.split()), *(words or flags).split())
