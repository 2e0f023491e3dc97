"""What lora.py adapts a model to, and its evaluation. In a chat the answer's tokens alone are targets."""

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
from torch import Tensor, nn

from common.exits import UserError
from lm import data

INSTRUCTIONS = Path(__file__).with_name("lora_instructions.jsonl")
HELD_OUT_EVERY = 4  # of the pairs the last of each four
ANSWER_TOKENS = 32
Batch = tuple[Tensor, Tensor]  # inputs and targets, each int64 [batch_size, seq_len]
Autocast = Callable[[], AbstractContextManager]


class Task(NamedTuple):
    vocab_size: int
    batches: list[Batch]  # one per step
    held_out: list[Batch]
    question: str | None = None  # one of those held out
    answer: Callable[[nn.Module, Autocast], str | None] = lambda net, autocast: None


def choose_task(args: Namespace) -> Task:
    """Instructions for a folder with a tokenizer, else the pages of this repository as bytes."""
    if (Path(args.model) / "tokenizer.json").is_file():
        return instruction_task(args.model, args.batch_size, args.steps)
    root = Path(__file__).resolve().parents[1]
    pages = [file.read_bytes() for file in sorted([*root.glob("*.md"), *root.glob("[!.]*/*.md")])]
    ends = [int(len(page) * 0.9) for page in pages]  # what follows is held out
    train = b"".join(page[:end] for page, end in zip(pages, ends, strict=True))
    held_out = b"".join(page[end:] for page, end in zip(pages, ends, strict=True))
    corpus = data.Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), 256, "")
    batches = make_batches(corpus, args.seq_len, args.batch_size)
    return Task(256, [*islice(batches.stream(0), args.steps)], batches.evaluation())


def make_batches(corpus: data.Corpus, seq_len: int, batch_size: int) -> data.Batches:
    sizes = Namespace(
        seq_len=seq_len, global_batch_size=batch_size, micro_batch_size=batch_size, seed=0
    )
    return data.Batches(*data.sequences(corpus, sizes.seq_len), sizes, rank=0, world_size=1)


def instruction_task(folder: str, batch_size: int, steps: int) -> Task:
    """Instructions in the chat template of the tokenizer in this folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise UserError(
            f"--model {folder}: its tokenizer has no chat template, and instructions need one"
        )
    pairs = [json.loads(line) for line in INSTRUCTIONS.read_text().splitlines()]
    inputs, targets = zip(*(encode(tokenizer, pair) for pair in pairs), strict=True)
    # at the end: causal attention never looks there
    inputs = nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    targets = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=data.PADDING)
    held_out = torch.arange(len(pairs)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    train = (~held_out).nonzero().flatten()
    if batch_size > len(train):
        raise UserError(f"--batch-size {batch_size}: there are {len(train)} pairs to train on")
    order = np.concatenate(
        [np.random.default_rng([0, epoch]).permutation(len(train)) for epoch in range(steps)]
    )
    chosen = train[torch.from_numpy(order)].split(batch_size)[:steps]
    question = pairs[HELD_OUT_EVERY - 1]["prompt"]
    return Task(
        vocab_size=len(tokenizer),
        batches=[(inputs[rows], targets[rows]) for rows in chosen],
        held_out=[(inputs[held_out], targets[held_out])],
        question=question,
        answer=partial(greedy_answer, tokenizer, question),
    )


def prompt_tokens(tokenizer, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


def encode(tokenizer, pair: dict[str, str]) -> Batch:
    """Inputs and targets of one pair, each [tokens - 1], targets one token on."""
    chat = [
        {"role": "user", "content": pair["prompt"]},
        {"role": "assistant", "content": pair["completion"]},
    ]
    tokens = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    prompt = prompt_tokens(tokenizer, pair["prompt"])
    assert tokens[: len(prompt)] == prompt, (
        "this chat template changes a question when an answer follows"
    )
    targets = [data.PADDING] * len(prompt) + tokens[len(prompt) :]
    return torch.tensor(tokens[:-1]), torch.tensor(targets[1:])


@torch.no_grad()
def greedy_answer(tokenizer, question: str, net: nn.Module, autocast: Autocast) -> str:
    """Always the likeliest token. Without a cache: each token reads all before it again."""
    tokens = prompt_tokens(tokenizer, question)
    prompt_length = len(tokens)
    device = next(net.parameters()).device
    while len(tokens) < prompt_length + ANSWER_TOKENS:
        with autocast():
            token = net(torch.tensor([tokens], device=device))[0, -1].argmax().item()
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[prompt_length:])


@torch.no_grad()
def evaluate(net: nn.Module, batches: list[Batch], autocast: Autocast) -> float:
    """Mean loss per target of the held-out sequences."""
    device = next(net.parameters()).device
    loss_sum = count = 0
    for inputs, targets in batches:
        with autocast():
            loss = net(inputs.to(device), targets.to(device))
        counted = (targets != data.PADDING).sum().item()
        loss_sum += loss.item() * counted
        count += counted
    return loss_sum / count


def frozen_digest(net: nn.Module) -> str:
    """SHA-256 over all that is not an adapter: weights, or codes, scales and zeros."""
    sha = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        if "lora_" not in name:
            sha.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()
