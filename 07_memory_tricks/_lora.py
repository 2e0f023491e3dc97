"""The data, the evaluation and the checks of lora.py.

In a chat only the tokens of the answer are targets.
"""

import copy
import hashlib
import json
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import measure
from common.exits import UserError
from lm import data
from lm.tokenizer import has_tokenizer, largest_id, open_tokenizer
from training.batches import PADDING, Batches

INSTRUCTIONS = Path(__file__).with_name("lora_instructions.jsonl")
HELD_OUT_EVERY = 4  # the last pair of each four is held out
ANSWER_TOKENS = 32
Batch = tuple[Tensor, Tensor]  # inputs and targets, each int64 [batch_size, seq_len]
Autocast = Callable[[], AbstractContextManager]

# Relative. Sums of thousands of fp32 terms came out 7e-7 apart on one CPU.
TOLERANCE = 1e-5
COLUMNS = {
    "method": "method",
    "trained_parameters": "trained",
    "weight_bytes": "weights",
    "optimizer_bytes": "AdamW",
    "activation_bytes": "activations",
    "peak_memory_bytes": "peak",
    "time_ratio": "time",
    "val_loss_after": "held-out loss",
}


def no_answer(net: nn.Module, autocast: Autocast) -> None:
    """Return no answer, for a model without a chat template."""


class Task(NamedTuple):
    """The data that a model is adapted to, and the one question that it answers."""

    vocab_size: int
    batches: list[Batch]  # one per step
    held_out: list[Batch]
    question: str | None = None  # a question that is held out
    answer: Callable[[nn.Module, Autocast], str | None] = no_answer


# --- data


def choose_task(args: Namespace) -> Task:
    """Return instructions if the model's folder has a tokenizer, else this repository's pages."""
    if has_tokenizer(args.model):
        return instruction_task(args.model, args.batch_size, args.steps)
    root = Path(__file__).resolve().parents[1]
    files = sorted([*root.glob("*.md"), *root.glob("[!.]*/*.md")])
    train = b""
    held_out = b""
    for file in files:
        page = file.read_bytes()
        end = int(len(page) * 0.9)
        train += page[:end]
        held_out += page[end:]
    corpus = data.Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), 256, "")
    batches = make_batches(corpus, args.seq_len, args.batch_size)
    return Task(256, list(islice(batches.stream(0), args.steps)), batches.evaluation())


def make_batches(corpus: data.Corpus, seq_len: int, batch_size: int) -> Batches:
    """Return the batches of a run of one process that reads this corpus."""
    sizes = Namespace(
        seq_len=seq_len, global_batch_size=batch_size, micro_batch_size=batch_size, seed=0
    )
    return Batches(*data.sequences(corpus, sizes.seq_len), sizes, rank=0, world_size=1)


def instruction_task(folder: str, batch_size: int, steps: int) -> Task:
    """Return the instructions, in the chat template of the tokenizer in this folder."""
    tokenizer = open_tokenizer(folder, "--model")
    if tokenizer.chat_template is None:
        raise UserError(
            f"--model {folder}: its tokenizer has no chat template, and instructions need one"
        )
    pairs = [json.loads(line) for line in INSTRUCTIONS.read_text(encoding="utf-8").splitlines()]
    encoded = [encode(tokenizer, pair) for pair in pairs]
    # The padding is at the end, where causal attention never looks.
    inputs = nn.utils.rnn.pad_sequence([inputs for inputs, _ in encoded], batch_first=True)
    targets = nn.utils.rnn.pad_sequence(
        [targets for _, targets in encoded], batch_first=True, padding_value=PADDING
    )
    held_out = torch.arange(len(pairs)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    train = (~held_out).nonzero().flatten()
    if batch_size > len(train):
        raise UserError(f"--batch-size {batch_size}: there are {len(train)} pairs to train on")

    epochs = [np.random.default_rng([0, epoch]).permutation(len(train)) for epoch in range(steps)]
    order = torch.from_numpy(np.concatenate(epochs))
    chosen = train[order].split(batch_size)[:steps]
    question = pairs[HELD_OUT_EVERY - 1]["prompt"]
    return Task(
        vocab_size=largest_id(tokenizer.get_vocab()) + 1,
        batches=[(inputs[rows], targets[rows]) for rows in chosen],
        held_out=[(inputs[held_out], targets[held_out])],
        question=question,
        answer=partial(greedy_answer, tokenizer, question),
    )


def prompt_tokens(tokenizer, question: str) -> list[int]:
    """Return the tokens of a question, up to where the answer begins."""
    chat = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    return encoded["input_ids"]


def encode(tokenizer, pair: dict[str, str]) -> Batch:
    """Return the inputs and targets of a pair, each [tokens - 1]. Targets are one token ahead."""
    chat = [
        {"role": "user", "content": pair["prompt"]},
        {"role": "assistant", "content": pair["completion"]},
    ]
    tokens = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    prompt = prompt_tokens(tokenizer, pair["prompt"])
    assert tokens[: len(prompt)] == prompt, (
        "this chat template changes a question when an answer follows"
    )
    targets = [PADDING] * len(prompt) + tokens[len(prompt) :]
    return torch.tensor(tokens[:-1]), torch.tensor(targets[1:])


# --- evaluation


@torch.no_grad()
def greedy_answer(tokenizer, question: str, net: nn.Module, autocast: Autocast) -> str:
    """Return the model's answer, which always takes the likeliest token.

    There is no cache: the model reads all tokens again for each new one.
    """
    tokens = prompt_tokens(tokenizer, question)
    prompt_length = len(tokens)
    device = next(net.parameters()).device
    while len(tokens) < prompt_length + ANSWER_TOKENS:
        inputs = torch.tensor([tokens], device=device)
        with autocast():
            logits = net(inputs)[0, -1]
        token = logits.argmax().item()
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[prompt_length:])


@torch.no_grad()
def evaluate(net: nn.Module, batches: list[Batch], autocast: Autocast) -> float:
    """Return the mean loss per target of these batches."""
    device = next(net.parameters()).device
    loss_sum = 0
    count = 0
    for inputs, targets in batches:
        with autocast():
            loss = net(inputs.to(device), targets.to(device))
        target_count = (targets != PADDING).sum().item()
        loss_sum += loss.item() * target_count
        count += target_count
    return loss_sum / count


def frozen_digest(net: nn.Module) -> str:
    """Return the SHA-256 of the frozen tensors: weights, or codes, scales and minimums."""
    sha = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        if "lora_" not in name:
            cpu_tensor = tensor.cpu().contiguous()
            sha.update(cpu_tensor.view(torch.uint8).numpy())
    return sha.hexdigest()


def weight_bytes(net: nn.Module) -> int:
    """Return the bytes of a model's state. Tied weights have one address, and count once."""
    bytes_by_address = {}
    for tensor in net.state_dict().values():
        bytes_by_address[tensor.data_ptr()] = tensor.nbytes
    return sum(bytes_by_address.values())


def merged_error(layer: nn.Module, device: torch.device) -> float:
    """Return the largest relative error of an adapted layer against one with the merged matrix.

    It compares the outputs and gradients for random inputs, in fp32. With s = alpha / rank the
    merged matrix is W' = W + s B A. If G is the gradient of W', the chain rule gives s B^T G for A
    and s G A^T for B.
    """
    layer = copy.deepcopy(layer).to(device, torch.float32)  # exact: bf16 values are fp32 values
    a = layer.lora_A  # [rank, in]
    b = layer.lora_B  # [out, rank]
    s = layer.scaling
    x = torch.randn(32, a.size(1), device=device, requires_grad=True)
    upstream = torch.randn(32, b.size(0), device=device)

    output = layer(x)
    found = [output, *torch.autograd.grad(output, (x, a, b), upstream)]

    merged_weight = layer.merged_weight().requires_grad_()
    output = F.linear(x, merged_weight, layer.bias)
    x_gradient, gradient = torch.autograd.grad(output, (x, merged_weight), upstream)
    expected = [output, x_gradient, s * b.T @ gradient, s * gradient @ a.T]

    pairs = zip(found, expected, strict=True)
    return max(measure.relative_error(one, other) for one, other in pairs)


# --- checks


def check(rows: list[dict], dtype: str) -> list[str]:
    """Assert what the lesson claims, and return it as text."""
    checked = []
    for row in rows:
        if row["method"] != "full":
            checked += check_adapters(row)
    if len(rows) < 3:
        return checked

    full, lora, qlora = rows
    if dtype == "fp32":
        error = abs(lora["val_loss_before"] / full["val_loss_before"] - 1)
        assert error <= TOLERANCE, (
            f"lora does not start from the model as it is: its loss is {error:.0e} off"
        )
    assert qlora["activation_bytes"] == lora["activation_bytes"], (
        "qlora keeps dequantized weights for backward"
    )
    peaks = [row["peak_memory_bytes"] for row in rows]
    assert peaks[0] > peaks[1] > peaks[2], f"peaks do not fall: {peaks}"
    checked.append(
        "qlora keeps for backward what lora keeps, no dequantized weight; "
        "the peaks fall in this order"
    )
    return checked


def check_adapters(row: dict) -> list[str]:
    """Assert that a method left the frozen weights alone and computes what merged layers do."""
    name = row["method"]
    error = row["merged_error"]
    before, after = row["frozen_sha256"]
    assert before == after, f"{name} changed what it had frozen"
    assert error <= TOLERANCE, f"{name}: a layer differs from its merged one by {error:.1e}"
    return [
        f"{name}'s frozen weights have the same SHA-256 before and after training",
        f"{name}'s layers and merged ones, outputs and gradients in fp32: {error:.0e} apart",
    ]
