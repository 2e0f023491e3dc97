"""06_fsdp_zero/convert_checkpoint.py: every bit there and back, what others load, what is refused, what it takes."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chapter import load
from support.checkpoints import saved, write_folder
from support.harness import ROOT, SEVERAL, TINY, case, damage, run, train, with_small_files

from old import checkpoint, model, shapes
from old.exits import UserError

SCRIPT, FSDP = "06_fsdp_zero/convert_checkpoint.py", "06_fsdp_zero/train_fsdp.py"
UNEVEN = shapes.Config(83, 42, 50, 2, 6, 3, 14, 32)  # nothing that two or three ranks divide
slow = pytest.mark.long


def convert(*words) -> None:
    """The script's main with this command line, in this process."""
    script = load(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [SCRIPT, *map(str, words)])
        assert script.main() == 0


def refused(*words) -> str:
    """What the script says to a command line that it refuses."""
    with pytest.raises(UserError) as error:
        convert(*words)
    return str(error.value)


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """As transformers computes them from the folder."""
    from transformers import AutoModelForCausalLM

    net, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    with torch.no_grad():
        return net.float()(tokens).logits


@slow
def test_random_weights_go_round_all_kinds(tmp_path):
    result = run(SCRIPT, tmp_path, "--json", "summary.json")
    assert result.code == 0, result.err
    rows = result.summary["rows"]
    assert [row["to"] for row in rows] == ["dcp", "hf", "pt", "deepspeed", "dcp"]
    assert all(row["tensor_bytes"] == 4 * result.summary["parameters"] <= row["file_bytes"] for row in rows)
    assert "checked: nano's 57 weights are the same to the bit" in result.out


@pytest.mark.parametrize("tied", [pytest.param(True, marks=slow), False])
def test_a_run_becomes_a_folder_that_transformers_computes_alike(tmp_path, tied):
    """Trained on two ranks; to a folder of several files, a .pt and back to DCP: the same bits, the same logits."""
    (tmp_path / "own.json").write_text(json.dumps({**TINY, "tie_word_embeddings": tied}))
    train(FSDP, tmp_path, "--model", "own.json", "--steps", 2, "--save-every", 1, nproc=2)
    weights = saved(tmp_path, 2)["model"]
    folder, file, again = tmp_path / "hf", tmp_path / "one.pt", tmp_path / "dcp"
    convert(tmp_path / "run", folder, "--to", "hf", "--max-shard-gb", 2e-5)
    convert(folder, file, "--to", "pt")
    convert(file, again, "--to", "dcp")
    shutil.move(again, tmp_path / "run/step-00000003")
    torch.testing.assert_close(saved(tmp_path, 3)["model"], weights, rtol=0, atol=0)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(
        4 * w.numel() for n, w in weights.items() if not tied or "lm" not in n
    )
    net = model.Transformer(shapes.read_config(str(folder)))
    net.load_state_dict(torch.load(file)["model"])
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(folder, tokens), net(tokens), rtol=1e-5, atol=1e-5)


@slow
@pytest.mark.parametrize("script", [case("04_amp/train.py"), *(case(script) for script in SEVERAL)])
def test_training_goes_on_from_a_converted_folder(tmp_path, script):
    """At a learning rate that moves nothing, the weights at the end are those that the run before had."""
    before = train(FSDP, tmp_path, "--steps", 2, nproc=2).summary
    convert(tmp_path / "run", tmp_path / "hf", "--to", "hf")
    again = tmp_path / "again"
    flags = ("--model", tmp_path / "hf", "--steps", 1, "--lr", 1e-30)
    result = train(script, again, *flags, nproc=2 if script in SEVERAL else None)
    assert result.summary["weights_sha256"] == before["weights_sha256"]
    assert "weights from 1 .safetensors file(s)" in result.out


@slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_transformers_goes_through_dcp_and_back(tmp_path, dtype):
    """Llama 3.1's rotation, tied, in several files: types, names and logits stay."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {"rope_type": "llama3", **dict(zip(shapes.ROPE_SCALING, (8.0, 1.0, 4.0, 16), strict=True))}
    rope = {"rope_theta": 5e5, **scaling}
    sizes = {key: value for key, value in TINY.items() if key != "model_type"}
    config = LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=True, dtype=dtype)
    LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    convert(tmp_path / "theirs", tmp_path / "dcp", "--to", "dcp")
    convert(tmp_path / "dcp", tmp_path / "ours", "--to", "hf")
    theirs = {name: w for file in (tmp_path / "theirs").glob("*.safetensors") for name, w in load_file(file).items()}
    ours = load_file(tmp_path / "ours/model.safetensors")
    assert {weight.dtype for weight in ours.values()} == {dtype}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = logits_of(tmp_path / "ours", tokens)
    torch.testing.assert_close(logits, logits_of(tmp_path / "theirs", tokens), rtol=0, atol=0)
    net = model.build(str(tmp_path / "ours"), shapes.read_config(str(tmp_path / "ours")), seed=0)
    with torch.no_grad():
        torch.testing.assert_close(logits, net(tokens), rtol=1e-5, atol=1e-5)


@slow
def test_shape_and_tokenizer_from_a_named_folder(tmp_path):
    """A checkpoint of before config.json was saved in it: --model tells the shape."""
    train(FSDP, tmp_path, "--steps", 1)
    step = tmp_path / "run/step-00000001"
    hashes = json.loads((step / "hashes.json").read_text())
    (step / "hashes.json").write_text(json.dumps({name: sha for name, sha in hashes.items() if name != "config.json"}))
    (step / "config.json").unlink()
    told = refused(step, tmp_path / "to", "--to", "hf")
    assert "does not say the shape of its model: add --model" in told
    told = refused(step, tmp_path / "to", "--to", "hf", "--model", "nano")
    assert "model.embed_tokens.weight has shape (256, 32), not (256, 256)" in told
    origin = tmp_path / "origin"
    origin.mkdir()
    shutil.copy(tmp_path / "tiny.json", origin / "config.json")
    (origin / "tokenizer.json").write_text("{}")
    (origin / "model.safetensors.index.json").write_text("{}")
    convert(step, tmp_path / "to", "--to", "hf", "--model", origin)
    assert sorted(file.name for file in (tmp_path / "to").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "to/config.json").read_text()) == TINY


# --- DeepSpeed

ENGINE = """
import logging, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from old import model, runtime, shapes
device = runtime.init_process_group("cpu")
logging.disable(logging.INFO)
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
deepspeed.init_distributed("gloo")
how, stage = sys.argv[1], int(sys.argv[2])
net = model.build("folder", shapes.read_config("folder"), seed=3)
settings = dict(stage=stage, reduce_bucket_size=1000, allgather_bucket_size=1000)
config = dict(train_micro_batch_size_per_gpu=2, zero_allow_untested_optimizer=True, zero_optimization=settings)
matrices, vectors = ([p for p in net.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
lr = 1e-2 if how == "save" else 0.0  # a step would show master weights that were not loaded
optimizer = torch.optim.AdamW([dict(params=matrices), dict(params=vectors)], lr=lr, weight_decay=0.0)
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
if how == "load":
    assert engine.load_checkpoint("run", load_module_only=True)[0]
tokens = torch.randint(0, 83, (2, 2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
engine.backward(engine(*tokens))
engine.step()
if how == "save":
    engine.save_checkpoint("run", tag="first")
with deepspeed.zero.GatheredParameters(list(net.parameters())):
    weights = {{name: p.detach().clone() for name, p in net.named_parameters()}}
if dist.get_rank() == 0:
    torch.save(weights, "weights.pt")
runtime.shutdown()
os._exit(0)
"""


def with_deepspeed(folder: Path, how: str, stage: int, n: int = 2) -> dict[str, torch.Tensor]:
    """`save` or `load` folder/run with DeepSpeed on n ranks; returns the weights that they then have."""
    pytest.importorskip("deepspeed")
    (folder / "engine.py").write_text(ENGINE.format(root=str(ROOT)))
    result = run(folder / "engine.py", folder, how, stage, nproc=n)
    assert result.code == 0, result.err[-3000:]
    return torch.load(folder / "weights.pt")


@slow
@pytest.mark.parametrize(
    ("stage", "tied", "n"), [(0, True, 2), (1, False, 2), (2, True, 3), (3, True, 2), (3, False, 3)]
)
def test_what_deepspeed_has_saved_becomes_a_folder(tmp_path, stage, tied, n):
    config = dataclasses.replace(UNEVEN, tie_word_embeddings=tied)
    start = write_folder(tmp_path / "folder", config)
    weights = with_deepspeed(tmp_path, "save", stage, n)
    assert not torch.equal(weights["model.norm.weight"], start["model.norm.weight"])  # it has trained
    convert(tmp_path / "run", tmp_path / "hf", "--to", "hf", "--model", tmp_path / "folder")
    torch.testing.assert_close(load_file(tmp_path / "hf/model.safetensors"), weights, rtol=0, atol=0)
    if stage > 0:
        (tmp_path / "run/first/zero").mkdir()
        told = refused(tmp_path / "run/first", tmp_path / "to", "--to", "hf", "--model", tmp_path / "folder")
        assert "is a universal checkpoint: convert the one that it was made of" in told
        (tmp_path / "run/first/zero").rmdir()
        next((tmp_path / "run").rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()
        told = refused(tmp_path / "run/first", tmp_path / "to", "--to", "hf", "--model", tmp_path / "folder")
        assert f"was saved by {n} ranks, and has the _optim_states.pt of {n - 1}" in told


@slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_loads_what_it_is_given(tmp_path, stage):
    weights = write_folder(tmp_path / "other", UNEVEN, seed=8)
    convert(tmp_path / "other", tmp_path / "run", "--to", "deepspeed")
    write_folder(tmp_path / "folder", UNEVEN)
    torch.testing.assert_close(with_deepspeed(tmp_path, "load", stage), weights, rtol=0, atol=0)


def test_eleven_ranks_are_read_in_their_order(tmp_path):
    """Files as stage 2 writes them, by hand: 25 numbers, padded to 33, in 11 parts. By name, rank 10 precedes 2."""
    numbers = torch.arange(33.0)
    shapes_of_group = {"a": torch.Size([3, 5]), "b": torch.Size([10])}
    torch.save({"param_shapes": [shapes_of_group], "shared_params": {}}, tmp_path / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(numbers.chunk(11)):
        optimizer = {"zero_stage": 2, "partition_count": 11, "single_partition_of_fp32_groups": [part]}
        file = tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, file)
    source = load(SCRIPT).read_deepspeed(tmp_path)
    assert torch.equal(source.read("a"), numbers[:15].view(3, 5))
    assert torch.equal(source.read("b"), numbers[15:25])


# --- what is refused


def test_what_was_written_otherwise_gets_no_name(tmp_path, monkeypatch):
    """A disk that writes zeros: found when all of it is read again."""
    write_folder(tmp_path / "from", UNEVEN)
    monkeypatch.setattr(load(SCRIPT), "as_bytes", lambda tensor: bytes(tensor.nbytes))
    with pytest.raises(AssertionError, match="was written otherwise than it was read"):
        convert(tmp_path / "from", tmp_path / "to", "--to", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


FOLDER = {  # what is done to a good folder's weights, and what is said
    "a missing weight": (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
    "a superfluous one": (lambda w: w.update(extra=torch.ones(3)), "extra is not a weight of this model"),
    "another shape": (
        lambda w: w.update({"model.norm.weight": torch.ones(41)}),
        "model.norm.weight has shape (41,), not (42,)",
    ),
    "integers": (lambda w: w.update({"model.norm.weight": torch.ones(42).int()}), "of type torch.int32"),
    "an untied head": (
        lambda w: w.update({"lm_head.weight": torch.ones(83, 42)}),
        "ties lm_head.weight to model.embed_tokens.weight, and they differ",
    ),
}


def test_sparse_weights_are_named(tmp_path):
    weights = write_folder(tmp_path / "from", UNEVEN)
    weights["model.norm.weight"] = weights["model.norm.weight"].to_sparse()
    torch.save({"model": weights, "config": shapes.config_json(UNEVEN)}, tmp_path / "sparse.pt")
    assert "model.norm.weight is sparse" in refused(tmp_path / "sparse.pt", tmp_path / "to", "--to", "hf")


@pytest.mark.parametrize("how", FOLDER)
def test_weights_that_do_not_fit_are_named(tmp_path, how):
    weights = write_folder(tmp_path / "from", dataclasses.replace(UNEVEN, tie_word_embeddings=True))
    change, told = FOLDER[how]
    change(weights)
    save_file(weights, tmp_path / "from/model.safetensors")
    assert told in refused(tmp_path / "from", tmp_path / "to", "--to", "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def test_what_is_broken_or_no_checkpoint_is_named_and_nothing_is_left(tmp_path):
    good, dcp, pt = tmp_path / "hf", tmp_path / "dcp", tmp_path / "one.pt"
    write_folder(good, UNEVEN)
    convert(good, dcp, "--to", "dcp")
    convert(good, pt, "--to", "pt")
    convert(good, tmp_path / "many", "--to", "hf", "--max-shard-gb", 2e-5)
    assert f"{pt} exists, and nothing is overwritten" in refused(good, pt, "--to", "pt")
    assert f"{dcp} exists, and nothing is overwritten" in refused(good, dcp, "--to", "hf")
    assert f"no such folder {tmp_path}/none" in refused(good, tmp_path / "none/to", "--to", "hf")
    assert "no such file or folder" in refused(tmp_path / "none", tmp_path / "to", "--to", "hf")
    assert "--model none: no such size" in refused(good, tmp_path / "to", "--to", "hf", "--model", "none")
    assert "needs TO and --to dcp|hf|pt|deepspeed" in refused(good)
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 42}))
    told = refused(good, tmp_path / "to", "--to", "hf", "--model", tmp_path / "other.json")
    assert f"{good}: its config is not a Llama config: it has no 'num_attention_heads'" in told
    (tmp_path / "other.json").unlink()
    (tmp_path / "to.tmp").mkdir()
    assert "another conversion writes it, or was killed" in refused(good, tmp_path / "to", "--to", "hf")
    (tmp_path / "to.tmp").rmdir()

    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty} is no checkpoint" in refused(empty, tmp_path / "to", "--to", "hf")
    empty.rmdir()
    first = min((tmp_path / "many").glob("*.safetensors"))
    cut(first)
    assert f"{first} cannot be read" in refused(tmp_path / "many", tmp_path / "to", "--to", "dcp")
    first.unlink()
    assert f"{first} cannot be read" in refused(tmp_path / "many", tmp_path / "to", "--to", "dcp")
    index = tmp_path / "many/model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": 3}}')
    assert f"{index} cannot be read" in refused(tmp_path / "many", tmp_path / "to", "--to", "dcp")
    cut(pt)
    assert f"{pt} cannot be read" in refused(pt, tmp_path / "to", "--to", "hf")
    pt.write_text("text")
    assert f"{pt} cannot be read" in refused(pt, tmp_path / "to", "--to", "hf", "--model", good)
    damage(dcp, "truncated")  # found when half of it has been written
    assert f"{dcp} cannot be read" in refused(dcp, tmp_path / "to", "--to", "hf")
    assert f"{dcp} cannot be read" in refused(dcp, tmp_path / "to", "--to", "dcp")
    damage(dcp, "missing")
    assert f"{dcp} cannot be read" in refused(dcp, tmp_path / "to", "--to", "pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf", "many", "one.pt"]


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda state: {"state_dict": state}, "its weights are at ['state_dict']: save them plainly with torch.save("),
        (
            lambda state: {"state_dict": state, "optimizer": {"state": {}}, "epoch": 3},
            "its weights are at ['state_dict']",
        ),
        (lambda state: {"model": {"module": state}}, "its weights are at ['model']['module']"),
        (lambda state: {"net": state, "ema": state}, "holds 2 dictionaries of tensors (['net'], ['ema'])"),
        (lambda state: {"epoch": 3}, "holds no dictionary of tensors"),
        (lambda state: [*state.values()], "holds no dictionary of tensors"),
        (None, "is in torch.save's old format, which is no zip archive: save it again with torch.save(torch.load("),
    ],
)
def test_a_pt_file_of_another_layout_is_told_in_a_line(tmp_path, wrap, named):
    folder, file = tmp_path / "hf", tmp_path / "one.pt"
    write_folder(folder, UNEVEN)
    state = load_file(folder / "model.safetensors")
    if wrap is None:
        torch.save(state, file, _use_new_zipfile_serialization=False)
    else:
        torch.save(wrap(state), file)
    result = run(SCRIPT, tmp_path, "one.pt", "to", "--to", "hf", "--model", "hf")
    assert result.code == 2, result.out + result.err[-2000:]
    assert len(result.err.splitlines()) == 1
    assert f"error: one.pt{':' if 'its weights' in named else ''} {named}" in result.err
    assert not (tmp_path / "to").exists()
    if remedy := re.search(r"(torch\.save\(torch\.load\(.*?'NEW\.pt'\))", result.err):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            exec(remedy[1], {"torch": torch})  # what the line says to do does it
        convert(tmp_path / "NEW.pt", tmp_path / "to", "--to", "hf", "--model", folder)


@slow
@pytest.mark.parametrize("kind", ["hf", "dcp", "pt"])
def test_a_full_disk_is_told_in_a_line(tmp_path, kind):
    """A limit on the size of a file, half the model's, stands in for the disk."""
    write_folder(tmp_path / "from", dataclasses.replace(UNEVEN, vocab_size=8300))
    result = run(with_small_files(SCRIPT, tmp_path, 2**19), tmp_path, "from", "to", "--to", kind)
    assert result.code == 2, result.err[-2000:]
    assert "to cannot be written (" in result.err.splitlines()[-1]
    assert not list(tmp_path.glob("to*"))


@slow
@pytest.mark.parametrize("how", ["truncated", "one bit", "missing"])
def test_a_damaged_step_of_a_run_is_refused(tmp_path, how):
    train(FSDP, tmp_path, "--steps", 2, "--save-every", 1, nproc=2)
    step = tmp_path / "run/step-00000002"
    damage(step, how)
    result = run(SCRIPT, tmp_path, "run", "to", "--to", "hf")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert f"run/{step.name} is broken" in result.err
    assert not list(tmp_path.glob("to*"))
    convert(tmp_path / "run/step-00000001", tmp_path / "to", "--to", "hf")  # the one before is whole


@slow
def test_training_does_not_start_from_random_weights_beside_a_checkpoint(tmp_path):
    """A step has a config.json now; --model would read the shape from it, and no weights."""
    train(FSDP, tmp_path, "--steps", 1)
    result = train(FSDP, tmp_path / "again", "--model", tmp_path / "run/step-00000001", code=2)
    assert "is not .safetensors: save the weights as such (06_fsdp_zero/convert_checkpoint.py --to hf)" in result.err


# --- what it takes


@slow
def test_memory_is_that_of_a_tensor_and_not_of_the_model(tmp_path):
    """Half a GiB, by way of every kind, against the same with a small model: what the libraries take."""
    peak = {}
    for name, layers, hidden in (("small", 1, 64), ("large", 10, 1024)):
        config = shapes.Config(1000, hidden, 3 * hidden, layers, 4, 4, hidden // 4, 32)
        source = tmp_path / name
        write_folder(source, config)
        for kind in ("dcp", "pt", "deepspeed", "hf"):
            target = tmp_path / f"{name}-{kind}"
            result = run(SCRIPT, tmp_path, source, target, "--to", kind, "--json", "summary.json", warm=False)
            assert result.code == 0, result.err
            peak[name, kind] = result.summary["peak_memory_bytes"]
            source = target
    assert result.summary["tensor_bytes"] == 4 * shapes.parameter_count(config) > 2**29
    for kind in ("dcp", "pt", "deepspeed", "hf"):
        extra = peak["large", kind] - peak["small", kind]
        assert extra < 8 * result.summary["largest_tensor_bytes"] < 2**29 / 5, (kind, peak)


@slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_of_train_zero_needs_no_more_than_itself(tmp_path, stage):
    result = train("06_fsdp_zero/train_zero.py", tmp_path, "--stage", stage, nproc=2)
    folder = tmp_path / "hf"
    convert(tmp_path / "run", folder, "--to", "hf")
    net = model.build(str(folder), shapes.load_config(str(folder), 256, 16), seed=0)
    assert checkpoint.digest(net) == result.summary["weights_sha256"]
