"""09_inference/offloaded.py: wherever the weights are, the tokens are those of transformers."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import (
    ODD,
    assert_refused,
    config_of,
    in_full,
    in_long,
    run,
    with_fault,
    with_prelude,
    with_small_files,
)

from lm import shapes
from lm.weights import build

SCRIPT = "09_inference/offloaded.py"
PROMPTS = ["for i in range(3): print(i)", "x = 1", "a"]  # of unequal lengths
NEW_TOKENS = 12
LAYERS = ODD["num_hidden_layers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with weights large enough for attention to matter, and prompts."""
    where = tmp_path_factory.mktemp("offloaded")
    net = build("nano", config_of(ODD), seed=5)
    weights = {}
    for name, weight in net.named_parameters():
        scale = 12 if weight.ndim == 2 else 1
        weights[name] = scale * weight.detach()
    (where / "model").mkdir()
    save_file(weights, where / "model/model.safetensors", metadata={"format": "pt"})
    (where / "model/config.json").write_text(
        json.dumps(shapes.config_json(net.config)), encoding="utf-8"
    )
    (where / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return where


def answer(folder: Path, *flags, nproc: int | None = None, script: str | Path = SCRIPT):
    shared = ["--model", "model", "--prompts", "prompts.txt", "--device", "cpu"]
    shared += ["--max-new-tokens", NEW_TOKENS, "--json", "s.json"]
    return run(script, folder, *shared, *flags, nproc=nproc)


def summary_of(folder: Path, *flags, nproc: int | None = None) -> dict:
    result = answer(folder, *flags, nproc=nproc)
    assert result.code == 0, result.err[-4000:]
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def expected(folder) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([list(prompt.encode())])
        tokens = net.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        answers.append(tokens[0, ids.shape[1] :].tolist())
    assert len({tuple(ids) for ids in answers}) == len(PROMPTS)
    return answers


def total(summary: dict) -> int:
    return summary["gpu_bytes"] + summary["cpu_bytes"] + summary["disk_bytes"]


def test_a_stream_gives_the_tokens_of_transformers(folder, expected):
    summary = summary_of(folder)
    on_device, one_buffer, two_buffers = summary["rows"]
    for row in (on_device, one_buffer, two_buffers):
        assert row["token_ids"] == expected
        assert total(row) == 4 * summary["parameters"]
    assert on_device["moved_bytes"] == 0
    assert two_buffers["moved_bytes"] == one_buffer["moved_bytes"] == two_buffers["cpu_bytes"]
    assert two_buffers["buffer_bytes"] == 2 * two_buffers["cpu_bytes"] / LAYERS
    assert summary["token_ids"] == expected


@pytest.fixture(scope="module")
def deep(folder, tmp_path_factory) -> Path:
    """The same shape with more layers: some can stay on the device, and more than two must not."""
    where = tmp_path_factory.mktemp("deep")
    net = build("nano", config_of({**ODD, "num_hidden_layers": 6}), seed=5)
    (where / "model").mkdir()
    save_file(dict(net.named_parameters()), where / "model/model.safetensors")
    (where / "model/config.json").write_text(
        json.dumps(shapes.config_json(net.config)), encoding="utf-8"
    )
    (where / "prompts.txt").symlink_to(folder / "prompts.txt")
    return where


def test_layers_that_fit_stay_on_the_device(deep):
    all_streamed = summary_of(deep)
    layer_bytes = all_streamed["moved_bytes"] // 6
    # Room for embedding, head, cache and 3.5 layers: two are the buffers, so one layer stays.
    cache_bytes = 4 * 2 * 6 * 36 // 2 * len(PROMPTS) * 48
    memory = (all_streamed["gpu_bytes"] + 3.5 * layer_bytes + cache_bytes) / 2**30
    some_stay = summary_of(deep, "--memory", memory)
    assert some_stay["cpu_bytes"] == 5 * layer_bytes
    assert some_stay["moved_bytes"] == 5 * layer_bytes
    assert some_stay["token_ids"] == all_streamed["token_ids"]
    all_stay = summary_of(deep, "--memory", 1)
    assert all_stay["moved_bytes"] == 0
    assert all_stay["token_ids"] == all_streamed["token_ids"]


def test_a_copy_of_the_wrong_layer_fails_the_check(folder, tmp_path):
    wrong = with_fault(
        SCRIPT, tmp_path, "self.layers[layer].parameters()", "self.layers[layer - 1].parameters()"
    )
    result = answer(folder, script=wrong)
    assert result.code == 1, result
    assert "AssertionError" in result.err


@pytest.mark.parametrize("memory", [in_long(None), 1e-4])  # GiB: all, and a part on the disk
def test_a_device_map_gives_the_tokens_of_transformers(folder, expected, memory):
    flags = ["--by", "device-map"]
    if memory is not None:
        flags += ["--memory", memory]
    summary = summary_of(folder, *flags)
    assert summary["token_ids"] == expected
    assert total(summary) == 4 * summary["parameters"]
    assert (summary["disk_bytes"] > 0) == (memory is not None)
    assert summary["moved_bytes"] == summary["disk_bytes"]


@pytest.mark.parametrize(
    ("ranks", "offload"),
    [
        (2, "cpu"),
        in_full(5, "cpu"),
        in_long(None, "none"),
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


@pytest.mark.full
def test_each_prompt_ends_at_its_own_stop_token(folder, expected, tmp_path):
    (tmp_path / "model").mkdir()
    for file in (folder / "model").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    (tmp_path / "prompts.txt").symlink_to(folder / "prompts.txt")
    stop = expected[0][3]
    (tmp_path / "model/generation_config.json").write_text(
        json.dumps({"eos_token_id": stop}), encoding="utf-8"
    )
    ended = [ids[: ids.index(stop)] if stop in ids else ids for ids in expected]
    assert len(ended[0]) < min(map(len, ended[1:]))
    assert summary_of(tmp_path, "--by", "zero3", nproc=2)["token_ids"] == ended


@pytest.mark.full
def test_sampled_tokens_do_not_depend_on_the_ranks(folder):
    flags = ("--by", "zero3", "--temperature", 0.8, "--seed", 3)
    of_one = summary_of(folder, *flags)["token_ids"]
    assert summary_of(folder, *flags, nproc=2)["token_ids"] == of_one


def test_a_dry_run_places_70b_on_two_gpus(tmp_path):
    flags = ["--by", "device-map", "--model", "llama-70b", "--dry-run", "--world-size", 2]
    result = run(SCRIPT, tmp_path, *flags, "--memory", 80, "--json", "s.json")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    parts = summary["bytes_by_place"]
    assert [*parts] == ["0", "1"]
    assert max(parts.values()) < 80 * 2**30
    assert sum(parts.values()) == 2 * shapes.parameter_count(shapes.SIZES["llama-70b"])


REFUSED = {  # flags: words of the line, where these are not the flag and its value
    "--memory 1 --by zero3": "--memory",
    "--offload cpu": "",
    "--world-size 2": "--world-size",
    "--dry-run": "--by device-map",
    "--model nope": "",
    "--memory 0": "",
    "--memory 1e-5": "--memory",
}


def test_bad_input_is_refused_in_one_line(folder):
    for flags, words in REFUSED.items():
        assert_refused(answer(folder, *flags.split()), *(words or flags).split())


@pytest.mark.parametrize(
    ("variant", "damage"),
    [
        ("device-map", "a tensor is missing"),
        in_long("stream", "a tensor is missing"),
        in_long("zero3", "a file is cut"),
    ],
)
def test_a_folder_that_is_not_complete_is_refused(folder, tmp_path, variant, damage):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").symlink_to(folder / "model/config.json")
    (tmp_path / "prompts.txt").symlink_to(folder / "prompts.txt")
    weights = load_file(folder / "model/model.safetensors")
    if damage == "a tensor is missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    if damage == "a file is cut":
        os.truncate(tmp_path / "model/model.safetensors", 50_000)
    result = answer(tmp_path, "--by", variant)
    assert result.code == 2, result.err
    assert "--model model" in result.err.splitlines()[-1]


NO_ROOM = """
import collections, shutil
usage = collections.namedtuple("usage", "total used free")
shutil.disk_usage = lambda path: usage(10**9, 10**9 - 300_000, 300_000)
"""


@pytest.mark.parametrize("how", [in_long("before"), "while it writes"])
def test_a_full_disk_is_one_line(tmp_path, how):
    """The random weights of nano, 19,248,128 bytes, go to a temporary folder."""
    if how == "before":
        script = with_prelude(SCRIPT, tmp_path / "prelude", NO_ROOM)
    else:
        script = with_small_files(SCRIPT, tmp_path / "prelude", 2**20)
    (tmp_path / "temporary").mkdir()
    temporary = str(tmp_path / "temporary")
    flags = ["--by", "device-map", "--memory", 0.012, "--device", "cpu"]
    result = run(script, tmp_path, *flags, TMPDIR=temporary)
    assert_refused(result, temporary, "19,248,128 bytes", "free", "TMPDIR=")
    assert not any(Path(temporary).iterdir())
