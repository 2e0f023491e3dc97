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

from old import model, nvml
from old.data import PADDING
from old.step_cost import record_memory

SCRIPT = "07_memory_tricks/chunked_loss.py"
chunked = load(SCRIPT)
report = load("07_memory_tricks/_chunked_loss_report.py")
CPU = torch.device("cpu")
SMALL = ("--device", "cpu", "--tokens", 65, "--vocab-size", 5003, "--chunk-tokens", 8, "--hidden-size", 33)
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


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return report.relative_error(got, expected)


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
    for got, correct in zip(gradients(own / 3, hidden, head), expected, strict=True):
        assert relative_error(got, correct) < 1e-6
    assert not hidden.grad[::3].any()  # padding


def test_micro_batches_add_up():
    hidden, head, targets = batch(24, 101, 16)
    correct = gradients(chunked.plain_cross_entropy(hidden, head, targets), hidden, head)
    hidden.grad = head.grad = None
    count = (targets != PADDING).sum()
    for rows in (slice(11), slice(11, None)):
        share = (targets[rows] != PADDING).sum() / count
        (chunked.chunked_cross_entropy(hidden[rows], head, targets[rows], 4) * share).backward()
    assert relative_error(head.grad, correct[1]) < 1e-6
    assert relative_error(hidden.grad, correct[0]) < 1e-6


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
    net = model.build("tiny", config_of(shape), seed=0)
    text = torch.randint(261, (3, 18), generator=torch.Generator().manual_seed(0))
    inputs, targets = text[:, :-1], text[:, 1:].clone()
    targets[1, 9:] = PADDING
    correct = gradients(net(inputs, targets), *net.parameters())
    loss = chunked.chunked_cross_entropy(net.model(inputs).flatten(0, 1), net.lm_head.weight, targets.flatten(), 7)
    for got, expected in zip(gradients(loss, *net.parameters()), correct, strict=True):
        assert relative_error(got, expected) < 2e-6


def test_what_is_frozen_gets_no_gradient():
    hidden, head, targets = batch(12, 50, 8)
    correct = gradients(chunked.plain_cross_entropy(hidden, head, targets), hidden, head)
    for i, (h, w) in enumerate([(hidden, head.detach()), (hidden.detach(), head)]):
        (got,) = gradients(chunked.chunked_cross_entropy(h, w, targets, 5), (hidden, head)[i])
        assert relative_error(got, correct[i]) < 1e-6


def test_an_evaluation_computes_no_gradient():
    hidden, head, targets = batch(64, 500, 64)
    with torch.no_grad():
        step = record_memory(lambda: chunked.chunked_cross_entropy(hidden, head, targets, 4), CPU)
        loss = chunked.chunked_cross_entropy(hidden, head, targets, 4)
    assert not loss.requires_grad
    assert step.peak_bytes < head.nbytes  # which the head's gradient would take


def test_a_second_backward_is_an_error():
    loss = chunked.chunked_cross_entropy(*batch(6, 10, 4), 2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bf16_is_about_as_exact_as_the_plain_loss():
    hidden, head, targets = batch(256, 503, 64, torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    correct = gradients(F.cross_entropy(F.linear(*exact), targets), *exact)
    plain = gradients(chunked.plain_cross_entropy(hidden, head, targets), hidden, head)
    own = gradients(chunked.chunked_cross_entropy(hidden, head, targets, 32), hidden, head)
    assert [gradient.dtype for gradient in own] == [torch.bfloat16] * 2
    for got, expected, limit in zip(own, correct, plain, strict=True):
        assert relative_error(got, expected) < 3 * relative_error(limit, expected) < 0.03


def test_under_autocast_the_weights_gradient_is_summed_in_fp32():
    hidden, head, targets = batch(64, 203, 32)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = hidden.bfloat16()
        plain = gradients(chunked.plain_cross_entropy(narrow, head, targets), hidden, head)
        own = gradients(chunked.chunked_cross_entropy(hidden.bfloat16(), head, targets, 8), hidden, head)
    assert own[1].dtype == torch.float32
    for got, expected in zip(own, plain, strict=True):
        assert relative_error(got, expected) < 1e-2


def test_two_chunks_are_never_alive_at_once():
    hidden, head, targets = batch(64, 4096, 16)
    held = (hidden, head, targets)
    step = record_memory(lambda: chunked.chunked_cross_entropy(hidden, head, targets, 8).backward(), CPU, held)
    whole = sum(tensor.nbytes for tensor in held)
    kept = hidden.nbytes + head.nbytes  # their gradients
    assert step.peak_bytes < whole + kept + 2.1 * 8 * 4096 * 4
    plain = record_memory(lambda: chunked.plain_cross_entropy(hidden, head, targets).backward(), CPU, held)
    assert plain.peak_bytes > whole + 12 * 64 * 4096


def finish(folder: Path, dtype: str) -> dict:
    flags = (*SMALL, "--dtype", dtype, "--json", "c.json", "--plot", "c.png")
    result = run(SCRIPT, folder, *flags, PATH="/nowhere")  # no g++ there: compiling takes longer than all else
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert "left out: plain, compiled (torch.compile on a CPU needs g++" in result.out
    assert result.out.count("checked: ") == 3
    assert (folder / "c.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "c.json").read_text())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_script_tells_what_each_loss_takes(once, dtype):
    summary = once("07 chunked loss", finish, dtype)
    rows = {row["name"]: row for row in summary["rows"]}
    plain, by_hand = rows["plain"], rows["chunked, by hand"]
    assert plain["step_bytes"] == pytest.approx(12 * 65 * 5003, rel=0.01)
    assert by_hand["step_bytes"] < plain["step_bytes"] / 2
    assert summary["counted_tokens"] == 59
    assert summary["parameters"] == 5003 * 33
    assert plain["gradient_bytes"] == (65 + 5003) * 33 * (4 if dtype == "fp32" else 2)
    assert all(row["seconds"]["n"] == 5 for row in rows.values())


@needs_torchs_own
def test_torchs_own_is_chunked_only_with_options(once):
    rows = {row["name"]: row for row in once("07 chunked loss", finish, "fp32")["rows"]}
    assert rows["torch, no options"]["step_bytes"] == pytest.approx(rows["plain"]["step_bytes"], rel=0.01)
    assert rows["torch, chunked"]["step_bytes"] < rows["plain"]["step_bytes"] / 2


SPOILED = {
    "loss and gradients are off": lambda rows: rows[1].update(head_gradient_relative_error=1e-5),
    "12 N V is": lambda rows: rows[0].update(step_bytes=int(rows[0]["step_bytes"] * 1.03)),
    "the chunked loss takes": lambda rows: rows[1].update(step_bytes=rows[1]["step_bytes"] + 8 * 4 * 5003),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_claim_that_does_not_hold_fails(once, message):
    rows = copy.deepcopy(once("07 chunked loss", finish, "fp32")["rows"])
    args = Namespace(tokens=65, vocab_size=5003, hidden_size=33, chunk_tokens=8, dtype="fp32")
    report.check(rows, args, "cpu")
    SPOILED[message](rows)
    with pytest.raises(AssertionError, match=message):
        report.check(rows, args, "cpu")


def test_the_allocators_log_is_that_of_the_operators():
    hidden, head, targets = batch(64, 4096, 4)

    def step() -> None:
        chunked.forward_backward(chunked.plain_cross_entropy, hidden, head, targets)

    expected = record_memory(step, CPU).peak_bytes
    hidden.grad = head.grad = None
    assert report.record_allocations(step, CPU, held_bytes=1000).peak_bytes == pytest.approx(1000 + expected, rel=1e-3)


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
    result = run(SCRIPT, tmp_path, *flags, "--device", "cpu", "--plot", "c.png", PATH="/nowhere")
    assert result.code == 0, result.err
    assert told in result.out


def test_a_gpu_adds_up_in_another_order(once):
    rows = copy.deepcopy(once("07 chunked loss", finish, "fp32")["rows"])
    args = Namespace(tokens=65, vocab_size=5003, hidden_size=33, chunk_tokens=8, dtype="fp32")
    rows[1].update(head_gradient_relative_error=5e-6)
    report.check(rows, args, "cuda")
    with pytest.raises(AssertionError, match="loss and gradients are off"):
        report.check(rows, args, "cpu")


@needs_torchs_own
def test_the_allocators_log_sees_into_an_operator():
    """torch's chunked loss is one operator, whose chunks no dispatch mode sees."""
    hidden, head, targets = batch(64, 4096, 4)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)

    def step() -> None:
        F.linear_cross_entropy(hidden, head, targets, ignore_index=PADDING, options=options).backward()

    chunk = 16 * 4096 * 4
    assert record_memory(step, CPU).peak_bytes < chunk
    hidden.grad = head.grad = None
    assert report.record_allocations(step, CPU, held_bytes=0).peak_bytes > chunk


@pytest.mark.parametrize(
    ("flag", "value"), [("--tokens", "0"), ("--dtype", "fp16"), ("--chunk-tokens", "x"), ("--json", "no/such/f.json")]
)
def test_a_wrong_flag_is_one_line(tmp_path, flag, value):
    result = run(SCRIPT, tmp_path, flag, value)
    assert result.code == 2
    assert flag in result.err
    assert result.err.count("\n") == 1


@needs_compiler
@pytest.mark.long
def test_the_compiled_loss_is_told_too(tmp_path):
    result = run(SCRIPT, tmp_path, *SMALL, "--json", "c.json", warm=False)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    rows = {row["name"]: row for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert rows["plain, compiled"]["step_bytes"] < rows["plain"]["step_bytes"]


@pytest.mark.gpu(n=1)
def test_a_fifteenth_of_the_memory_on_a_gpu(gpus, tmp_path):
    """By max_memory_allocated, at the vocabulary of Llama 3 and the hidden size of llama-1b."""
    uuid = gpus["CUDA_VISIBLE_DEVICES"]
    total = next(gpu["memory_total_bytes"] for gpu in nvml.gpus()[0] if gpu["uuid"] == uuid)
    if total < 36 * 2**30:
        pytest.skip(f"the plain loss takes 26 GiB here, the GPU has {total / 2**30:.0f}")
    sizes = ("--tokens", 16_384, "--hidden-size", 2048, "--chunk-tokens", 512, "--dtype", "bf16")
    visible = {"CUDA_VISIBLE_DEVICES": uuid, "OMP_NUM_THREADS": "4"}
    flags = ("--device", "cuda", *sizes, "--json", "c.json")
    result = run(SCRIPT, tmp_path, *flags, timeout=600, warm=False, **visible)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    summary = json.loads((tmp_path / "c.json").read_text())
    rows = {row["name"]: row for row in summary["rows"]}
    assert rows["chunked, by hand"]["step_bytes"] * 15 <= rows["plain"]["step_bytes"]
    assert summary["peak_memory_bytes"] >= rows["plain"]["step_bytes"]  # though the count began anew for each way
