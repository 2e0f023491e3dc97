"""09_inference/offloaded.py: wherever the weights lie, the tokens are those of transformers."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import ODD, assert_refused, config_of, run

from lm import shapes
from lm.weights import build

SCRIPT = "09_inference/offloaded.py"
PROMPTS = ["for i in range(3): print(i)", "x = 1", "a"]  # of unequal lengths
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with weights large enough for attention to matter, and prompts."""
    where = tmp_path_factory.mktemp("offloaded")
    net = build("nano", config_of(ODD), seed=5)
    weights = {
        name: (12 if each.ndim == 2 else 1) * each.detach() for name, each in net.named_parameters()
    }
    (where / "model").mkdir()
    save_file(weights, where / "model/model.safetensors", metadata={"format": "pt"})
    (where / "model/config.json").write_text(json.dumps(shapes.config_json(net.config)))
    (where / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return where


def answer(folder: Path, *flags, nproc: int | None = None):
    shared = (
        "--model",
        "model",
        "--prompts",
        "prompts.txt",
        "--max-new-tokens",
        NEW_TOKENS,
        "--device",
        "cpu",
    )
    return run(SCRIPT, folder, *shared, "--json", "s.json", *flags, nproc=nproc)


def summary_of(folder: Path, *flags, nproc: int | None = None) -> dict:
    result = answer(folder, *flags, nproc=nproc)
    assert result.code == 0, result.err[-4000:]
    return json.loads((folder / "s.json").read_text())


@pytest.fixture(scope="module")
def expected(folder) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([list(prompt.encode())])
        how = {
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "max_new_tokens": NEW_TOKENS,
        }
        found.append(net.generate(ids, **how)[0, ids.shape[1] :].tolist())
    assert len({tuple(ids) for ids in found}) == len(PROMPTS)
    return found


def total(summary: dict) -> int:
    return summary["gpu_bytes"] + summary["cpu_bytes"] + summary["disk_bytes"]


@pytest.mark.parametrize("memory", [None, 1e-4])  # GiB: all, and a part on the disk
def test_a_device_map_gives_the_tokens_of_transformers(folder, expected, memory):
    summary = summary_of(folder, *(("--memory", memory) if memory else ()))
    assert summary["token_ids"] == expected
    assert total(summary) == 4 * summary["parameters"]
    assert (summary["disk_bytes"] > 0) == (memory is not None)
    assert summary["moved_bytes"] == summary["disk_bytes"]


@pytest.mark.parametrize(
    ("ranks", "offload"),
    [
        (2, "cpu"),
        *(pytest.param(*way, marks=pytest.mark.full) for way in [(5, "cpu"), (None, "none")]),
    ],
)
def test_zero3_gives_the_tokens_of_transformers(folder, expected, ranks, offload):
    """Two ranks have two prompts and one; of five, two have none."""
    summary = summary_of(folder, "--by", "zero3", "--offload", offload, nproc=ranks)
    assert summary["token_ids"] == expected
    assert summary["world_size"] == (ranks or 1)
    weights = 4 * summary["parameters"] / (ranks or 1)
    # no tensor is padded by more than a number
    assert weights <= total(summary) <= weights + 4 * 50


def test_each_prompt_ends_at_its_own_stop_token(folder, expected, tmp_path):
    for file in (folder / "model").iterdir():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / file.name).symlink_to(file)
    (tmp_path / "prompts.txt").symlink_to(folder / "prompts.txt")
    stop = expected[0][3]
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    ended = [ids[: ids.index(stop)] if stop in ids else ids for ids in expected]
    assert len(ended[0]) < min(map(len, ended[1:]))
    assert summary_of(tmp_path, "--by", "zero3", nproc=2)["token_ids"] == ended


@pytest.mark.full
def test_sampled_tokens_do_not_depend_on_the_ranks(folder):
    flags = ("--by", "zero3", "--temperature", 0.8, "--seed", 3)
    assert (
        summary_of(folder, *flags)["token_ids"] == summary_of(folder, *flags, nproc=2)["token_ids"]
    )


def test_a_dry_run_places_70b_on_two_gpus(tmp_path):
    flags = (
        "--model",
        "llama-70b",
        "--dry-run",
        "--world-size",
        2,
        "--memory",
        80,
        "--json",
        "s.json",
    )
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    parts = summary["bytes_by_place"]
    assert [*parts] == ["0", "1"]
    assert max(parts.values()) < 80 * 2**30
    assert sum(parts.values()) == 2 * shapes.parameter_count(shapes.SIZES["llama-70b"])


REFUSED = {  # flags: words of the line, where these are not the flag and its value
    "--memory 1 --by zero3": "--memory",
    "--offload cpu": "",
    "--world-size 2": "--world-size",
    "--model nope": "",
    "--memory 0": "",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_refused_in_one_line(folder, flags):
    assert_refused(answer(folder, *flags.split()), *(REFUSED[flags] or flags).split())


@pytest.mark.parametrize(
    ("way", "damage"), [("device-map", "a tensor is missing"), ("zero3", "a file is cut")]
)
def test_a_folder_that_is_not_whole_is_refused(folder, tmp_path, way, damage):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").symlink_to(folder / "model/config.json")
    (tmp_path / "prompts.txt").symlink_to(folder / "prompts.txt")
    weights = load_file(folder / "model/model.safetensors")
    if damage == "a tensor is missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    if damage == "a file is cut":
        os.truncate(tmp_path / "model/model.safetensors", 50_000)
    result = answer(tmp_path, "--by", way)
    assert result.code == 2, result.err
    assert "--model model" in result.err.splitlines()[-1]
