"""06_fsdp_zero/convert_checkpoint.py: every bit there and back, what others load, what is refused, what it takes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from support.checkpoints import saved, write_folder
from support.harness import (
    TINY,
    TRAINING_SCRIPTS,
    Result,
    assert_refused,
    damage,
    run,
    train,
    two_if_it_can,
    with_prelude,
    with_small_files,
)

from lm import model, shapes
from lm.weight_files import EMBEDDING

SCRIPT, FSDP = "06_fsdp_zero/convert_checkpoint.py", "06_fsdp_zero/train_fsdp.py"
# nothing that two or three ranks divide
UNEVEN = shapes.Config(83, 42, 50, 2, 6, 3, 14, 32, tie_word_embeddings=True)
slow = pytest.mark.full


def convert(folder: Path, *words, **how) -> Result:
    result = run(SCRIPT, folder, *words, "--json", "summary.json", **how)
    assert result.code == 0, result.err[-3000:]
    return result


def refused(folder: Path, given: str, words: str, script: str | Path = SCRIPT) -> None:
    """assert_refused, and nothing is left of TO."""
    assert_refused(run(script, folder, *given.split()), *words.split())
    assert not list(folder.glob("to*"))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for file in folder.glob("*.safetensors")
        for name, weight in load_file(file).items()
    }


def assert_equal(ours: dict, theirs: dict) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """As transformers computes them from the folder."""
    from transformers import AutoModelForCausalLM

    net, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        told
    )
    with torch.no_grad():
        return net.float()(tokens).logits


@pytest.mark.long  # tests/test_bare.py
def test_random_weights_go_round_all_kinds(tmp_path):
    result = convert(tmp_path)
    assert {row["to_kind"] for row in result.summary["rows"]} == {"dcp", "hf", "pt"}
    assert {row["tensor_bytes"] for row in result.summary["rows"]} == {
        4 * shapes.parameter_count(shapes.SIZES["nano"])
    }


def test_a_run_becomes_a_folder_that_transformers_computes_alike(tmp_path):
    """Trained on two ranks; to a folder of several files, a .pt and back to DCP: the same bits, the same logits."""
    (tmp_path / "own.json").write_text(
        json.dumps({**TINY, "tie_word_embeddings": False}), encoding="utf-8"
    )
    train(FSDP, tmp_path, "--model", "own.json", "--steps", 2, "--save-every", 1, nproc=2)
    weights = saved(tmp_path, 2)["model"]
    convert(tmp_path, "run", "hf", "--to", "hf", "--max-shard-gb", 2e-5)
    convert(tmp_path, "hf", "one.pt", "--to", "pt", "--model", "own.json")
    convert(tmp_path, "one.pt", "run/step-00000003", "--to", "dcp", "--model", "own.json")
    assert_equal(saved(tmp_path, 3)["model"], weights)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    net = model.Transformer(shapes.read_config(str(tmp_path / "hf")))
    net.load_state_dict(torch.load(tmp_path / "one.pt")["model"])
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(tmp_path / "hf", tokens), net(tokens), rtol=1e-5, atol=1e-5
        )


@slow
def test_training_goes_on_from_a_converted_folder(tmp_path):
    """At a learning rate that moves nothing, the weights at the end are those that the run before had."""
    before = train(FSDP, tmp_path, "--steps", 2, nproc=2).summary
    convert(tmp_path, "run", "hf", "--to", "hf")
    flags = ("--model", tmp_path / "hf", "--steps", 1, "--lr", 1e-30)
    for script in TRAINING_SCRIPTS:
        result = train(script, tmp_path / script, *flags, nproc=two_if_it_can(script))
        assert result.summary["weights_sha256"] == before["weights_sha256"]


@slow
def test_a_folder_of_transformers_goes_through_dcp_and_back(tmp_path):
    """Llama 3.1's rotation, tied, in several files, with a tokenizer: types, names and logits stay."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {
        "rope_type": "llama3",
        **dict(zip(shapes.ROPE_SCALING, (8.0, 1.0, 4.0, 16), strict=True)),
    }
    sizes = {key: value for key, value in TINY.items() if key != "model_type"}
    rope = {"rope_theta": 5e5, **scaling}
    config = LlamaConfig(
        **sizes, rope_parameters=rope, tie_word_embeddings=True, dtype=torch.bfloat16
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(
        tmp_path / "theirs", max_shard_size="40KB"
    )
    (tmp_path / "theirs/tokenizer.json").write_text("{}", encoding="utf-8")
    convert(tmp_path, "theirs", "dcp", "--to", "dcp")
    convert(tmp_path, "dcp", "ours", "--to", "hf", "--model", "theirs")
    ours = weights_in(tmp_path / "ours")
    assert {weight.dtype for weight in ours.values()} == {torch.bfloat16}
    assert_equal(ours, weights_in(tmp_path / "theirs"))
    assert (
        json.loads((tmp_path / "ours/config.json").read_text(encoding="utf-8"))["rope_parameters"]
        == config.rope_parameters
    )
    assert (tmp_path / "ours/tokenizer.json").read_text(encoding="utf-8") == "{}"
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    assert_equal(logits_of(tmp_path / "ours", tokens), logits_of(tmp_path / "theirs", tokens))


PLANTED = """
from lm import hf_folder
save_file = hf_folder.save_file
def flip(tensors, file, **how):
    save_file(tensors, file, **how)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
hf_folder.save_file = flip
"""


def test_what_was_written_otherwise_gets_no_name(tmp_path):
    """A disk that changes a bit: found when all of it is read again."""
    write_folder(tmp_path / "from", UNEVEN)
    result = run(with_prelude(SCRIPT, tmp_path, PLANTED), tmp_path, "from", "to", "--to", "hf")
    assert result.code == 1
    assert "was written otherwise than it was read" in result.err
    assert not list(tmp_path.glob("to*"))


NORM = "model.norm.weight"
DO_NOT_FIT = [  # what is done to a good folder's weights, and words of the refusal
    (lambda weights: weights.pop(NORM), NORM),
    (lambda weights: weights.update(extra=torch.ones(3)), "extra (3,)"),
    (lambda weights: weights.update({NORM: torch.ones(41)}), f"{NORM} (41,) (42,)"),
]


def test_weights_that_do_not_fit_are_named(tmp_path):
    for number, (change, words) in enumerate(DO_NOT_FIT):
        weights = write_folder(tmp_path / f"from-{number}", UNEVEN)
        change(weights)
        save_file(weights, tmp_path / f"from-{number}/model.safetensors")
        refused(tmp_path, f"from-{number} to --to dcp", words)


def test_what_is_broken_or_no_checkpoint_is_named(tmp_path):
    write_folder(tmp_path / "hf", UNEVEN)
    convert(tmp_path, "hf", "dcp", "--to", "dcp")
    convert(tmp_path, "hf", "one.pt", "--to", "pt")
    refused(tmp_path, "hf dcp --to dcp", "dcp exists")
    refused(tmp_path, "hf", "hf TO --to")
    refused(tmp_path, "none to --to hf", "none")
    refused(tmp_path, "hf to --to hf --model none", "--model none")
    refused(tmp_path, "one.pt to --to hf", "one.pt --model")
    file = tmp_path / "hf/model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    refused(tmp_path, "hf to --to dcp", "hf")
    damage(tmp_path / "dcp", "truncated")  # found when half of it has been written
    refused(tmp_path, "dcp to --to hf", "dcp")
    (tmp_path / "one.pt").write_text("text", encoding="utf-8")
    refused(tmp_path, "one.pt to --to hf --model dcp", "one.pt")


def with_prefix(weights: dict, prefix: str) -> dict:
    return {prefix + name: weight for name, weight in weights.items()}


def with_wrapped_blocks(weights: dict) -> dict:
    """Return the names that torch.compile and activation checkpointing of each block make."""
    wrapped = {}
    for name, weight in weights.items():
        for number in "01":
            block = f"layers.{number}."
            name = name.replace(block, f"{block}_orig_mod._checkpoint_wrapped_module.")
        wrapped[name] = weight
    return wrapped


def lightning(weights: dict) -> dict:
    """Return what Lightning saves of a module that has the model as `self.model`."""
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": with_prefix(weights, "model."),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": []}],
        "hyper_parameters": {"lr": 1e-3},
    }


def state_dicts(weights: dict) -> dict[str, dict]:
    """Return what programs save of a model with these weights, by the kind of program."""
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    compiled = with_prefix(weights, "_orig_mod.")
    return {
        "state dict alone": weights,
        "compiled": compiled,
        "DDP": with_prefix(weights, "module."),
        "DDP of a compiled model": with_prefix(weights, "module._orig_mod."),
        "compiled DDP": with_prefix(weights, "_orig_mod.module."),
        "wrapped blocks": with_wrapped_blocks(weights),
        "Lightning": lightning(weights),
        "Lightning, compiled": lightning(compiled),
        "an attribute of an attribute": with_prefix(weights, "net.llm."),
        "model_state_dict": {"epoch": 3, "model_state_dict": weights, "loss": 0.5},
        "model, DDP": {"model": with_prefix(weights, "module.")},
        "an older model": {**weights, inv_freq: torch.ones(7)},
    }


def test_state_dicts_of_other_programs_load(tmp_path):
    weights = write_folder(tmp_path / "from", UNEVEN)
    for number, (program, saved_by_it) in enumerate(state_dicts(weights).items()):
        new_format = number % 3 != 2
        torch.save(saved_by_it, tmp_path / "x.ckpt", _use_new_zipfile_serialization=new_format)
        convert(tmp_path, "x.ckpt", program, "--to", "hf", "--model", "from")
        assert_equal(weights_in(tmp_path / program), weights)


def test_a_folder_with_prefixes_loads(tmp_path):
    weights = write_folder(tmp_path / "from", UNEVEN)
    save_file(with_prefix(weights, "_orig_mod."), tmp_path / "from/model.safetensors")
    convert(tmp_path, "from", "dcp", "--to", "dcp")
    convert(tmp_path, "dcp", "hf", "--to", "hf")
    assert_equal(weights_in(tmp_path / "hf"), weights)


class OfATrainer:
    """An object that torch.load does not make without being allowed to."""


def other_contents(weights: dict) -> list[tuple[object, str]]:
    """Return contents that are not the weights of one model, and words of the refusal."""
    twice = {**weights, **with_prefix(weights, "module.")}
    two_models = {**with_prefix(weights, "a."), **with_prefix(weights, "b.")}
    return [
        ([*weights.values()], "type list"),
        (weights[NORM], "type Tensor"),
        ({}, "empty dict"),
        ({"state": {}, "param_groups": []}, "'state'"),
        ({"weights": weights, "step": 3}, "'weights'"),
        ({**weights, "step": 3}, "'step' int"),
        ({"state_dict": weights, "args": OfATrainer()}, "state dict alone"),
        (twice, f"module.{EMBEDDING} both"),
        (two_models, "'a.' 'b.' alone"),
    ]


def test_a_file_with_other_contents_is_named(tmp_path):
    weights = write_folder(tmp_path / "from", UNEVEN)
    for content, words in other_contents(weights):
        torch.save(content, tmp_path / "other.pt")
        refused(tmp_path, "other.pt to --to hf --model from", f"other.pt {words}")


# --- weights below keys and prefixes, and tensors that are no weights


def save_dcp(folder: Path, state: dict) -> None:
    torch.distributed.checkpoint.save(state, checkpoint_id=folder, no_dist=True)


def moments_of(weights: dict) -> dict:
    """Return optimizer state with the names that get_optimizer_state_dict gives it."""
    return {"state": {name: {"exp_avg": weight + 1} for name, weight in weights.items()}}


def test_dcp_checkpoints_with_weights_below_any_key_load(tmp_path):
    weights = write_folder(tmp_path / "from", UNEVEN)
    optimizer = moments_of(weights)
    layouts = {
        "app": {"app": {"model": weights, "optim": optimizer}},
        "state_dict": {"state_dict": {"model": weights}, "epoch": 3},
        "DDP": {"net": with_prefix(weights, "module._orig_mod."), "step": torch.tensor(3)},
        "alone": {**weights, "optimizer": optimizer, "step": torch.tensor(3)},
        "model": {"model": weights, "optimizer": optimizer},
    }
    for name, state in layouts.items():
        save_dcp(tmp_path / f"dcp-{name}", state)
        convert(tmp_path, f"dcp-{name}", name, "--to", "hf", "--model", "from")
        assert_equal(weights_in(tmp_path / name), weights)

    save_dcp(tmp_path / "two", {"app": {"model": weights, "ema": weights}})
    refused(tmp_path, "two to --to hf --model from", "two app.model. app.ema.")
    save_dcp(tmp_path / "none", {"app": {"optim": optimizer}})
    refused(tmp_path, "none to --to hf --model from", f"none {EMBEDDING}")


def test_what_is_not_under_the_models_prefix_is_named(tmp_path):
    weights = write_folder(tmp_path / "from", UNEVEN)
    other = {**with_prefix(weights, "net."), "metric.mean": torch.ones(3)}
    torch.save({"state_dict": other}, tmp_path / "lightning.pt")
    result = convert(tmp_path, "lightning.pt", "hf", "--to", "hf", "--model", "from")
    assert_equal(weights_in(tmp_path / "hf"), weights)
    assert "metric.mean" in result.out


def saved_by(code: str, folder: Path) -> dict[str, torch.Tensor]:
    """Run code that reads weights.pt and saves it in another form. Return the weights."""
    weights = write_folder(folder / "from", UNEVEN)
    torch.save(weights, folder / "weights.pt")
    (folder / "save.py").write_text(code, encoding="utf-8")
    made = run(folder / "save.py", folder)
    assert made.code == 0, made
    return weights


SHARDS = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
weights = torch.load("weights.pt")
for ranks, placement in ((1, Shard(0)), (2, Shard(0)), (2, Replicate())):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = {}
    for name, weight in weights.items():
        shard = weight.chunk(ranks)[0] if placement.is_shard() else weight
        sharded[name] = DTensor.from_local(shard.clone(), mesh, [placement], run_check=False)
    torch.save({"model": sharded}, f"{type(placement).__name__}-{ranks}.pt")
    dist.destroy_process_group()
"""


def test_dtensors_of_one_rank_load_and_shards_of_several_are_refused(tmp_path):
    weights = saved_by(SHARDS, tmp_path)
    for whole in ("Shard-1", "Replicate-2"):
        convert(tmp_path, f"{whole}.pt", whole, "--to", "hf", "--model", "from")
        assert_equal(weights_in(tmp_path / whole), weights)
    words = "Shard-2.pt DTensors 2 gather"
    refused(tmp_path, "Shard-2.pt to --to hf --model from", words)


ON_A_GPU = """
import torch
from torch.serialization import register_package
register_package(0, lambda storage: "cuda:0", lambda storage, location: None)
torch.save({"model": torch.load("weights.pt")}, "gpu.pt")
"""


def test_a_file_that_was_saved_on_a_gpu_loads_without_one(tmp_path):
    weights = saved_by(ON_A_GPU, tmp_path)
    assert b"cuda:0" in (tmp_path / "gpu.pt").read_bytes()
    convert(tmp_path, "gpu.pt", "hf", "--to", "hf", "--model", "from", CUDA_VISIBLE_DEVICES="")
    assert_equal(weights_in(tmp_path / "hf"), weights)


def test_tensors_that_are_no_weights_are_named(tmp_path):
    weights = write_folder(tmp_path / "from", UNEVEN)
    norm = weights[NORM]
    with torch.device("meta"):
        empty = torch.empty(42)
    for tensor, words in (
        (empty, "meta"),
        (norm.to_sparse(), "sparse"),
        (torch.quantize_per_tensor(norm, 0.1, 0, torch.qint8), "quantized"),
        (norm.to(torch.int8), "int8"),
        (norm.to(torch.complex64), "complex64"),
    ):
        torch.save({**weights, NORM: tensor}, tmp_path / "odd.pt")
        refused(tmp_path, "odd.pt to --to hf --model from", f"odd.pt {NORM} {words}")
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2)), tmp_path / "module.pt")
    refused(tmp_path, "module.pt to --to hf --model from", "module.pt Sequential state_dict()")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    refused(tmp_path, "script.pt to --to hf --model from", "script.pt TorchScript")
    torch.save({0: norm}, tmp_path / "numbers.pt")
    refused(tmp_path, "numbers.pt to --to hf --model from", "numbers.pt 0")


def test_one_file_of_a_folder_is_named(tmp_path):
    write_folder(tmp_path / "from", UNEVEN)
    refused(tmp_path, "from/model.safetensors to --to dcp --model from", "name the folder")


def test_tokenizer_and_chat_templates_are_copied(tmp_path):
    write_folder(tmp_path / "from", UNEVEN)
    files = ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"]
    (tmp_path / "from/additional_chat_templates").mkdir()
    for name in files:
        (tmp_path / "from" / name).write_text(f"{{}} {name}", encoding="utf-8")
    convert(tmp_path, "from", "dcp", "--to", "dcp")
    convert(tmp_path, "dcp", "hf", "--to", "hf", "--model", "from")
    for name in files:
        assert (tmp_path / "hf" / name).read_text(encoding="utf-8") == (
            tmp_path / "from" / name
        ).read_text(encoding="utf-8")


@slow
@pytest.mark.parametrize("kind", ["hf", "dcp", "pt"])
def test_a_full_disk_is_told_in_a_line(tmp_path, kind):
    """A limit on the size of a file, half the model's, stands in for the disk."""
    write_folder(tmp_path / "from", dataclasses.replace(UNEVEN, vocab_size=8300))
    script = with_small_files(SCRIPT, tmp_path, 2**19)
    refused(tmp_path, f"from to --to {kind}", "to written", script=script)


@slow
def test_a_damaged_step_of_a_run_is_refused(tmp_path):
    train(FSDP, tmp_path, "--steps", 2, "--save-every", 1, nproc=2)
    damage(tmp_path / "run/step-00000002", "one bit")
    refused(tmp_path, "run to --to hf", "run/step-00000002")
    convert(tmp_path, "run/step-00000001", "to", "--to", "hf")  # the one before is whole


@pytest.mark.long
def test_memory_is_that_of_a_file_and_not_of_the_model(tmp_path):
    """Half a GiB, against the same with a small model: what the libraries take."""
    peak = {}
    for name, layers, hidden in (("small", 1, 64), ("large", 10, 1024)):
        write_folder(
            tmp_path / name, shapes.Config(1000, hidden, 3 * hidden, layers, 4, 4, hidden // 4, 32)
        )
        source = name
        for kind in ("dcp", "hf"):
            target = f"{name}-{kind}"
            flags = ("--to", kind, "--max-shard-gb", 0.05)
            peak[name, kind] = convert(tmp_path, source, target, *flags, warm=False).summary[
                "peak_memory_bytes"
            ]
            source = target
    assert peak["large", "dcp"] - peak["small", "dcp"] < 100e6
    assert peak["large", "hf"] - peak["small", "hf"] < 1.5 * 50e6 + 100e6
