"""07_memory_tricks/gradient_checkpointing.py, and --checkpointing: the same gradients, less memory."""

import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import TINY, config_of, run

from common import measure, model, shapes

SCRIPT = "07_memory_tricks/gradient_checkpointing.py"
script = load(SCRIPT)

ODD = {**TINY, "vocab_size": 259, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10, "num_hidden_layers": 5}
TIED = {**TINY, "tie_word_embeddings": True, "num_key_value_heads": 4, "intermediate_size": 96}
SHAPES = {"odd sizes, grouped heads": ODD, "tied, wide": TIED, "one layer": {**ODD, "num_hidden_layers": 1}}


def test_less_is_kept_and_no_gradient_moves(tmp_path: Path):
    shape = {**ODD, "num_hidden_layers": 7}
    (tmp_path / "odd.json").write_text(json.dumps(shape))
    flags = ("--model", "odd.json", "--seq-len", 21, "--batch-size", 3, "--rounds", 2, "--device", "cpu")
    result = run(SCRIPT, tmp_path, *flags, "--json", "s.json")
    assert result.code == 0, result.err[-3000:]
    assert result.out.count("checked: ") == 3
    summary = json.loads((tmp_path / "s.json").read_text())
    rows = {row["name"]: row for row in summary["rows"]}
    kept = {name: row["kept_bytes"] for name, row in rows.items()}
    assert kept["none"] > kept["selective"] > kept["full"]
    assert kept["full, by hand"] == pytest.approx(kept["full"], rel=0.01)
    assert {row["gradient_relative_error"] for row in rows.values()} == {0.0}
    assert summary["parameters"] == shapes.parameter_count(config_of(shape))
    assert all(row["peak_bytes"] > row["kept_bytes"] for row in rows.values())


def kept_and_gradients(net: model.Transformer) -> tuple[int, list[torch.Tensor]]:
    """Bytes of tensors that are alive between forward and backward, and what backward then gives."""
    tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(1))
    with measure.LiveBytes() as memory:
        loss = net(tokens[:, :-1], tokens[:, 1:])
        kept = memory.now
        loss.backward()
    return kept, [parameter.grad for parameter in net.parameters()]


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_training_scripts_keep_what_the_script_shows(name, how):
    """common/model.py has the policy once more, for --checkpointing: gradients and bytes are the script's."""
    shown, shared, stored = (model.build("nano", config_of(SHAPES[name]), seed=0) for _ in range(3))
    for block in shown.model.layers.values():
        block.forward = script.partial(script.WAYS[how], block.forward)
    model.checkpoint_blocks(shared, how)
    (kept_by_script, of_script), (kept, gradients), (all_kept, exact) = map(kept_and_gradients, (shown, shared, stored))
    assert kept == kept_by_script < all_kept
    for wanted, *found in zip(exact, of_script, gradients, strict=True):
        assert all(torch.equal(wanted, gradient) for gradient in found)


@pytest.mark.parametrize("heads", [8, 2])
def test_the_memory_that_nano_saves(heads):
    config = shapes.Config(**{**vars(shapes.SIZES["nano"]), "num_key_value_heads": heads})
    kept = {}
    for how in ("none", "full", "selective"):
        net = model.build("nano", config, seed=0)
        model.checkpoint_blocks(net, how)
        kept[how], _ = kept_and_gradients(net)
    assert kept["full"] <= 0.4 * kept["none"]
    assert kept["selective"] <= 0.6 * kept["none"]


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_a_gpu(gpus, tmp_path, dtype):
    flags = ("--device", "cuda", "--dtype", dtype, "--rounds", 1, "--json", "s.json")
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, tmp_path, *flags, warm=False, **visible)
    assert result.code == 0, result.err[-3000:]
    rows = {row["name"]: row for row in json.loads((tmp_path / "s.json").read_text())["rows"]}
    assert rows["full"]["peak_bytes"] < rows["selective"]["peak_bytes"] < rows["none"]["peak_bytes"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--model", "nonsense"), "--model nonsense"),
        (("--batch-size", 999999999), "999999999 sequences of"),
        (("--seq-len", 2000), "--seq-len 2000 is over the limit"),
        (("--rounds", 0), "--rounds"),
        (("--dtype", "fp16"), "--dtype"),
        (("--json", "none/s.json"), "--json"),
    ],
)
def test_wrong_flags_are_named(tmp_path, flags, told):
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 2
    assert told in result.err
    assert len(result.err.strip().splitlines()) == 1
