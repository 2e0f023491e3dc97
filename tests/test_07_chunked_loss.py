"""07_memory_tricks/chunked_loss.py: the loss and gradients of the plain one, in a fraction of its memory."""

import copy
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.harness import TINY, config_of, needs_compiler, run

from common import measure, model
from common.data import PADDING

SCRIPT = "07_memory_tricks/chunked_loss.py"
chunked = load(SCRIPT)
SMALL = ("--device", "cpu", "--tokens", 65, "--vocab-size", 5003, "--chunk-tokens", 8, "--hidden-size", 33)
ARGS = Namespace(tokens=65, vocab_size=5003, hidden_size=33, chunk_tokens=8, dtype="fp32")
needs_torchs_own = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")


def batch(tokens: int, vocab_size: int, hidden_size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(vocab_size, hidden_size, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    targets[::3] = PADDING
    return [hidden, head, targets]


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    for tensor in tensors:
        tensor.grad = None
    loss.backward()
    return [tensor.grad for tensor in tensors]


def finish(folder: Path, dtype: str) -> dict:
    flags = (*SMALL, "--dtype", dtype, "--rounds", 2, "--json", "c.json")
    result = run(SCRIPT, folder, *flags, PATH="/nowhere")  # no g++ there: compiling takes longer than all else
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert "left out: plain, compiled (torch.compile on a CPU needs g++" in result.out
    assert result.out.count("checked: ") == 3
    return json.loads((folder / "c.json").read_text())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_script_tells_what_each_loss_takes(once, dtype):
    summary = once("07 chunked loss", finish, dtype)
    rows = {row["name"]: row for row in summary["rows"]}
    plain, by_hand = rows["plain"], rows["chunked, by hand"]
    assert plain["step_bytes"] == pytest.approx(12 * 65 * 5003, rel=0.01)
    assert by_hand["step_bytes"] < plain["step_bytes"] / 2
    assert summary["parameters"] == 5003 * 33
    assert plain["gradient_bytes"] == (65 + 5003) * 33 * (4 if dtype == "fp32" else 2)


@needs_torchs_own
def test_torchs_own_is_chunked_only_with_options(once):
    rows = {row["name"]: row for row in once("07 chunked loss", finish, "fp32")["rows"]}
    assert rows["torch, no options"]["step_bytes"] == pytest.approx(rows["plain"]["step_bytes"], rel=0.01)
    assert rows["torch, chunked"]["step_bytes"] < rows["plain"]["step_bytes"] / 2


@needs_compiler
@pytest.mark.long
def test_the_compiled_loss_is_told_too(tmp_path):
    result = run(SCRIPT, tmp_path, *SMALL, "--json", "c.json", warm=False)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    rows = {row["name"]: row for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert rows["plain, compiled"]["step_bytes"] < rows["plain"]["step_bytes"]


SPOILED = {
    "loss and gradients are off": lambda rows: rows[1].update(largest_relative_error=1e-5),
    "12 N V is": lambda rows: rows[0].update(step_bytes=int(rows[0]["step_bytes"] * 1.03)),
    "the chunked loss takes": lambda rows: rows[1].update(step_bytes=rows[1]["step_bytes"] + 8 * 4 * 5003),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_claim_that_does_not_hold_fails(once, message):
    rows = copy.deepcopy(once("07 chunked loss", finish, "fp32")["rows"])
    chunked.check(rows, ARGS, 1e-6)
    SPOILED[message](rows)
    with pytest.raises(AssertionError, match=message):
        chunked.check(rows, ARGS, 1e-6)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--tokens", 1, "--hidden-size", 1, "--vocab-size", 1), "checked: the plain loss takes"),
        (
            ("--tokens", 129, "--hidden-size", 513, "--vocab-size", 10007, "--chunk-tokens", 1000),
            "checked: the plain loss takes 4 (N V + N H + V H) = 24.8 MiB",
        ),
    ],
)
def test_other_sizes_are_told_with_their_formula(tmp_path, flags, told):
    result = run(SCRIPT, tmp_path, *flags, "--device", "cpu", "--rounds", 1, PATH="/nowhere")
    assert result.code == 0, result.err
    assert told in result.out


@pytest.mark.parametrize(
    ("flag", "value"), [("--tokens", "0"), ("--dtype", "fp16"), ("--chunk-tokens", "x"), ("--json", "no/such/f.json")]
)
def test_a_wrong_flag_is_one_line(tmp_path, flag, value):
    result = run(SCRIPT, tmp_path, flag, value)
    assert result.code == 2
    assert flag in result.err
    assert result.err.count("\n") == 1


@pytest.mark.gpu(n=1)
def test_a_fifteenth_of_the_memory_on_a_gpu(gpus, tmp_path):
    """By max_memory_allocated, at the vocabulary of Llama 3 and the hidden size of llama-1b; plain takes 26 GiB."""
    sizes = ("--tokens", 16_384, "--hidden-size", 2048, "--chunk-tokens", 512, "--dtype", "bf16")
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"], "OMP_NUM_THREADS": "4"}
    flags = ("--device", "cuda", *sizes, "--json", "c.json")
    result = run(SCRIPT, tmp_path, *flags, timeout=600, warm=False, **visible)
    if "out of memory" in result.err:
        pytest.skip("the plain loss takes 26 GiB here")
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    summary = json.loads((tmp_path / "c.json").read_text())
    rows = {row["name"]: row for row in summary["rows"]}
    assert rows["chunked, by hand"]["step_bytes"] * 15 <= rows["plain"]["step_bytes"]
    assert summary["peak_memory_bytes"] >= rows["plain"]["step_bytes"]  # though the count began anew for each way


# --- of the function that readers copy


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "hidden_size", "chunk_tokens"),
    [(7, 11, 5, 3), (64, 257, 33, 16), (10, 31, 8, 100), (5, 1000, 16, 1), (16, 2, 3, 16)],
)
def test_chunks_equal_the_whole(tokens, vocab_size, hidden_size, chunk_tokens):
    hidden, head, targets = batch(tokens, vocab_size, hidden_size)
    plain = chunked.plain_cross_entropy(hidden, head, targets)
    own = chunked.chunked_cross_entropy(hidden, head, targets, chunk_tokens)
    assert own.item() == pytest.approx(plain.item(), rel=1e-6)
    expected = gradients(plain / 3, hidden, head)
    assert measure.relative_error(gradients(own / 3, hidden, head), expected) < 1e-6
    assert not hidden.grad[::3].any()  # padding


def test_micro_batches_add_up():
    hidden, head, targets = batch(24, 101, 16)
    correct = gradients(chunked.plain_cross_entropy(hidden, head, targets), hidden, head)
    hidden.grad = head.grad = None
    count = (targets != PADDING).sum()
    for rows in (slice(11), slice(11, None)):
        share = (targets[rows] != PADDING).sum() / count
        (chunked.chunked_cross_entropy(hidden[rows], head, targets[rows], 4) * share).backward()
    assert measure.relative_error([hidden.grad, head.grad], correct) < 1e-6


def test_no_target_at_all_is_as_in_the_plain_loss():
    hidden, head, targets = batch(9, 20, 4)
    targets.fill_(PADDING)
    plain = chunked.plain_cross_entropy(hidden, head, targets)
    own = chunked.chunked_cross_entropy(hidden, head, targets, 4)
    assert plain.isnan()
    assert own.isnan()
    for loss in (plain, own):
        assert not any(gradient.any() for gradient in gradients(loss, hidden, head))


def test_a_target_outside_the_vocabulary_is_an_error():
    hidden, head, targets = batch(9, 20, 4)
    for wrong in (20, -1):
        targets[4] = wrong
        with pytest.raises(RuntimeError, match="out of bounds"):
            chunked.chunked_cross_entropy(hidden, head, targets, 4)


@pytest.mark.parametrize("tied", [True, False])
def test_in_a_model_all_gradients_are_those_of_its_own_loss(tied):
    shape = {**TINY, "vocab_size": 261, "tie_word_embeddings": tied}
    net = model.build("nano", config_of(shape), seed=0)
    text = torch.randint(261, (3, 18), generator=torch.Generator().manual_seed(0))
    inputs, targets = text[:, :-1], text[:, 1:].clone()
    targets[1, 9:] = PADDING
    correct = gradients(net(inputs, targets), *net.parameters())
    loss = chunked.chunked_cross_entropy(net.model(inputs).flatten(0, 1), net.lm_head.weight, targets.flatten(), 7)
    assert measure.relative_error(gradients(loss, *net.parameters()), correct) < 2e-6


def test_what_is_frozen_gets_no_gradient():
    hidden, head, targets = batch(12, 50, 8)
    correct = gradients(chunked.plain_cross_entropy(hidden, head, targets), hidden, head)
    for i, (h, w) in enumerate([(hidden, head.detach()), (hidden.detach(), head)]):
        (got,) = gradients(chunked.chunked_cross_entropy(h, w, targets, 5), (hidden, head)[i])
        assert measure.relative_error(got, correct[i]) < 1e-6


def test_an_evaluation_computes_no_gradient():
    hidden, head, targets = batch(64, 500, 64)
    with torch.no_grad(), measure.LiveBytes() as memory:
        loss = chunked.chunked_cross_entropy(hidden, head, targets, 4)
    assert not loss.requires_grad
    assert memory.peak < head.nbytes  # which the head's gradient would take


def test_a_second_backward_is_an_error():
    loss = chunked.chunked_cross_entropy(*batch(6, 10, 4), 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_under_autocast_the_weights_gradient_is_summed_in_fp32():
    hidden, head, targets = batch(64, 203, 32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(chunked.plain_cross_entropy(hidden.bfloat16(), head, targets), hidden, head)
        own = gradients(chunked.chunked_cross_entropy(hidden.bfloat16(), head, targets, 8), hidden, head)
    assert own[1].dtype == torch.float32
    assert measure.relative_error(own, plain) < 1e-2
