"""09_inference/parity.py: log-probabilities of a trainer and a server, and where they are equal."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import (
    ODD,
    assert_refused,
    config_of,
    in_long,
    needs_compiler,
    run,
    with_fault,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lm import weights

SCRIPT = "09_inference/parity.py"
SHAPE = {**ODD, "vocab_size": 256, "max_position_embeddings": 96}
FLAGS = ("--model", "odd.json", "--batch-size", 3, "--new-tokens", 24, "--device", "cpu")


def start(folder: Path, *more, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "odd.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return run(script, folder, *FLAGS, "--steps", 4, "--json", "summary.json", *more)


def finish(folder: Path, *more) -> dict[str, dict]:
    result = start(folder, *more)
    assert result.code == 0, result
    return {row["name"]: row for row in result.summary["rows"]}


@pytest.mark.parametrize("flags", [(), in_long(("--dtype", "fp16", "--head", "fp32"))], ids=str)
def test_trainer_and_prefill_are_equal_to_the_bit(tmp_path, flags):
    rows = finish(tmp_path, "--no-compile", *flags)
    equal = {name for name, row in rows.items() if row["equals_trainer"]}
    assert {"trainer, 16-bit weights (FSDP)", "server, prefill, kernel of the trainer"} <= equal
    assert "trainer, fp32" not in equal
    assert rows["server, decode, fp32"]["largest_error"] < 1e-5
    assert (
        rows["server, decode, fp32"]["error"] < rows["server, decode: sampled the tokens"]["error"]
    )


@pytest.mark.full
def test_the_fixes_bring_trainer_and_server_together(tmp_path):
    name = "trainer, autocast, fp32 weights"
    bf16 = finish(tmp_path / "bf16", "--no-compile")[name]
    fp16 = finish(tmp_path / "fp16", "--no-compile", "--dtype", "fp16")[name]
    assert fp16["difference_error"] < bf16["difference_error"] / 2


@needs_compiler
@pytest.mark.long
def test_compiled_rows_are_as_near_as_eager_ones(tmp_path):
    rows = finish(tmp_path)
    assert {"trainer, autocast, compiled", "server, decode, compiled"} <= set(rows)


def test_weights_of_a_folder_are_not_trained(tmp_path):
    write_folder(tmp_path / "model", config_of(SHAPE), scale=2)
    result = start(tmp_path, "--no-compile", "--model", "model")
    assert result.code == 0, result
    assert result.summary["last_loss"] is None


def test_weights_in_16_bits_are_what_fsdp_computes_with(tmp_path):
    """fully_shard on one rank, with the mixed precision of 06_fsdp_zero/train_fsdp.py."""
    parity = load(SCRIPT)
    net = weights.build("nano", config_of(SHAPE), seed=0)
    ids = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(0))
    expected = parity.trainer_logprobs(copy.deepcopy(net).bfloat16(), ids, 24)

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for block in net.model.layers.values():
            fully_shard(block, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        assert torch.equal(parity.trainer_logprobs(net, ids, 24), expected)
    finally:
        dist.destroy_process_group()


FAULTS = {  # a line, and what stands in its place
    "prefill reads other texts": ("inputs = ids[:, :-1]", "inputs = ids[:, :-1].roll(1, 0)"),
    "decode is one position behind": (
        "decode(tokens[-1], position)",
        "decode(tokens[-1], position - 1)",
    ),
    "the server has fp32 weights": ("copy.deepcopy(net).to(dtype)", "copy.deepcopy(net)"),
}


@pytest.mark.parametrize(
    "fault",
    [fault if fault.startswith("decode") else in_long(fault) for fault in FAULTS],
)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    script = with_fault(SCRIPT, tmp_path, *FAULTS[fault])
    result = start(tmp_path, "--no-compile", script=str(script))
    assert (result.code, "AssertionError" in result.err) == (1, True), result


REFUSED = {
    "--new-tokens 50": "--new-tokens 32",
    "--batch-size 1000000": "--batch-size held-out",
    "--model none": "none",
    "--dtype fp32": "--dtype",
}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags, words in REFUSED.items():
        assert_refused(start(tmp_path, *flags.split()), *words.split())
