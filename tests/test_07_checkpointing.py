"""07_memory_tricks/gradient_checkpointing.py, and --checkpointing: the same gradients, less memory, counted work."""

import copy
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import TINY, config_of, run
from torch.utils.flop_counter import FlopCounterMode

from old import model, shapes
from old.step_cost import LiveMemory, saved_for_backward

SCRIPT = "07_memory_tricks/gradient_checkpointing.py"
script = load(SCRIPT)
report = load("07_memory_tricks/_gradient_checkpointing_report.py")

ODD = {**TINY, "vocab_size": 259, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10, "num_hidden_layers": 5}
TIED = {**TINY, "tie_word_embeddings": True, "num_key_value_heads": 4, "intermediate_size": 96}
SHAPES = {"odd sizes, grouped heads": ODD, "tied, wide": TIED, "one layer": {**ODD, "num_hidden_layers": 1}}


def example(shape: dict, length: int = 19) -> tuple[model.Transformer, tuple]:
    net = model.build("nano", config_of(shape), seed=0)
    tokens = torch.randint(0, 256, (3, length + 1), generator=torch.Generator().manual_seed(1))
    return net, (tokens[:, :-1], tokens[:, 1:])


def kept_bytes(net, batch) -> int:
    """Of tensors that are alive between forward and backward."""
    with LiveMemory() as memory:
        loss = net(*batch)
    kept = memory.bytes_now()
    loss.backward()
    return kept


def finish(folder: Path) -> dict:
    (folder / "odd.json").write_text(json.dumps({**ODD, "num_hidden_layers": 7}))
    flags = ("--model", "odd.json", "--seq-len", 21, "--batch-size", 3, "--rounds", 2, "--device", "cpu")
    result = run(SCRIPT, folder, *flags, "--json", "s.json", "--plot", "p.png")
    assert result.code == 0, result.err[-3000:]
    assert result.out.count("checked: ") == 3
    assert "equal those with everything kept, to the bit" in result.out
    assert "full: 8" in result.out  # the verdict
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "s.json").read_text())


def test_each_variant_recomputes_what_it_should(once):
    summary = once("07 checkpointing", finish)
    rows = {row["name"]: row for row in summary["rows"]}
    assert rows["none"]["forward_calls_by_block"] == [1] * 7
    assert rows["every 3rd block"]["forward_calls_by_block"] == [1, 1, 2, 1, 1, 2, 1]
    assert rows["every 2nd block"]["forward_calls_by_block"] == [1, 2, 1, 2, 1, 2, 1]
    for name in ("selective, all products", "selective", "full", "full, by hand"):
        assert rows[name]["forward_calls_by_block"] == [2] * 7
    # 36 inputs; 4 heads of 10 on 2 key-value heads; 50 wide; 63 tokens
    until_down_proj = 36 * 40 + 2 * 36 * 20 + 40 * 36 + 2 * 36 * 50
    whole_block = until_down_proj + 50 * 36
    extra = {name: row["extra_flops"] for name, row in rows.items()}
    assert extra["full"] == 2 * 63 * 7 * until_down_proj
    assert extra["full, by hand"] == 2 * 63 * 7 * whole_block
    assert extra["every 2nd block"] == 2 * 63 * 3 * until_down_proj
    assert extra["every 3rd block"] == 2 * 63 * 2 * until_down_proj
    assert extra["selective"] == extra["selective, all products"] == extra["none"] == 0
    assert rows["none"]["flops"] == 3 * 2 * 63 * (7 * whole_block + 36 * 259)


def test_less_is_kept_and_no_gradient_moves(once):
    summary = once("07 checkpointing", finish)
    kept = [row["kept_for_backward_bytes"] for row in summary["rows"]]
    none, third, second, all_products, selective, full, by_hand = kept
    assert none > third > second > full
    assert none > all_products > selective > full
    output_of_down_proj = 4 * 63 * 36
    assert all_products - selective == 7 * output_of_down_proj
    assert by_hand == pytest.approx(full, rel=0.01)
    assert {row["gradient_relative_error"] for row in summary["rows"]} == {0.0}
    assert summary["parameters"] == shapes.parameter_count(config_of({**ODD, "num_hidden_layers": 7}))
    for row in summary["rows"]:
        assert row["step_seconds"]["n"] == row["time_ratio"]["n"] == 2
        assert row["peak_bytes"] > row["kept_for_backward_bytes"]


SPOILED = {
    "gradients differ": lambda row: row.update(gradient_relative_error=2e-6),
    "gradients differ from": lambda row: row.update(gradient_relative_error=float("nan")),
    "forward calls": lambda row: row["forward_calls_by_block"].__setitem__(2, 1),
    "FLOP more than none": lambda row: row.update(extra_flops=row["extra_flops"] + 2),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_claim_that_does_not_hold_fails(once, message):
    rows = copy.deepcopy(once("07 checkpointing", finish)["rows"])
    due = {row["name"]: row["extra_flops"] for row in rows}
    report.check(rows, due, "fp32", "cpu")
    SPOILED[message](next(row for row in rows if row["name"] == "full"))
    with pytest.raises(AssertionError, match=message):
        report.check(rows, due, "fp32", "cpu")


@pytest.mark.parametrize("name", SHAPES)
def test_the_training_scripts_keep_what_the_script_shows(name):
    """common/model.py has the policy once more, for --checkpointing: gradients, bytes and FLOP of the script's."""
    for how in ("full", "selective"):
        shown, batch = example(SHAPES[name])
        variants = script.make_variants(list(shown.model.layers.values()))
        for layer, block in zip(shown.model.layers, variants[how], strict=True):
            shown.model.layers[layer] = block
        shared, _ = example(SHAPES[name])
        model.checkpoint_blocks(shared, how)
        stored, _ = example(SHAPES[name])
        stored(*batch).backward()
        counts = []
        for net in (shown, shared):
            kept = kept_bytes(net, batch)
            for ours, theirs in zip(net.parameters(), stored.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
            with FlopCounterMode(display=False) as flops:
                net(*batch).backward()
            counts.append((kept, flops.get_total_flops()))
        assert counts[0] == counts[1]


@pytest.mark.parametrize("heads", [8, 2])
def test_the_memory_that_nano_saves(heads):
    """Of what autograd keeps without checkpointing, which hooks count too."""
    config = {**vars(shapes.SIZES["nano"]), "num_key_value_heads": heads}
    nets = {how: model.Transformer(shapes.Config(**config)) for how in ("none", "full", "selective")}
    tokens = torch.randint(0, 256, (1, 257))
    batch = (tokens[:, :-1], tokens[:, 1:])
    kept = {}
    for how, net in nets.items():
        net.init_weights(0)
        model.checkpoint_blocks(net, how)
        kept[how] = kept_bytes(net, batch)
    with saved_for_backward(nets["none"]) as saved:
        nets["none"](*batch)
    assert kept["none"] == pytest.approx(sum(saved.activations.values()), rel=0.01)
    assert kept["full"] <= 0.4 * kept["none"]
    assert kept["selective"] <= 0.6 * kept["none"]


def test_none_leaves_the_blocks_alone():
    net, _ = example(ODD)
    before = list(net.model.layers.values())
    model.checkpoint_blocks(net, "none")
    assert list(net.model.layers.values()) == before


def test_under_autocast_the_block_by_hand_multiplies_in_bf16_again():
    gradients = []
    for name in ("none", "full, by hand"):
        net, batch = example(TIED)
        variants = script.make_variants(list(net.model.layers.values()))
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)
        script.train_step(net, variants[name], batch, autocast)
        gradients.append([weight.grad for weight in net.parameters()])
    assert report.largest_relative_error(*gradients) == 0.0


def test_attention_that_is_no_single_kernel_is_computed_again():
    """As on a GPU in fp32 with grouped heads: its products are counted, and selective does not keep them."""
    net, batch = example(ODD)
    blocks = list(net.model.layers.values())
    flops = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        due = script.expected_extra_flops(net.config, batch, blocks, torch.float32)
        for name in ("none", "selective"):
            with FlopCounterMode(display=False) as counter:
                script.train_step(net, script.make_variants(blocks)[name], batch, nullcontext)
            flops.append(counter.get_total_flops())
    one_block = 2 * 2 * 3 * 4 * 19 * 19 * 10  # two products, 3 sequences, 4 heads, 19 x 19 pairs, head_dim 10
    assert flops[1] - flops[0] == due["selective"] == 5 * one_block
    assert due["full"] > 5 * one_block


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
        (("--batch-size", 999999999), "--batch-size 999999999: the text has"),
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
