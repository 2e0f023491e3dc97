"""What lora.py adapts a model to: the pages of this repository, or instructions in a tokenizer's chat template.

The answer's tokens alone are targets. The question, which the model will be given, is PADDING there.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from old import data
from old.exits import UserError

INSTRUCTIONS = Path(__file__).with_name("lora_instructions.jsonl")
HELD_OUT_EVERY = 4  # of the pairs the last of each four
HELD_OUT_SHARE = 0.1  # of each page: its end
TEXT_SEQ_LEN = 128
ANSWER_TOKENS = 32
BASE_STEPS = 80
BASE_SIZES = {"seq_len": 64, "global_batch_size": 16, "micro_batch_size": 16}
Batch = tuple[Tensor, Tensor]


class Task(NamedTuple):
    about: str
    vocab_size: int
    seq_len: int
    batches: list[Batch]  # one per step
    held_out: list[Batch]
    question: str | None  # one of those held out
    answer: Callable[..., str | None]  # what a model says to it, under autocast


def choose_task(model_name: str, *, steps: int, batch_size: int, seq_len: int | None, seed: int, device) -> Task:
    """Instructions for a folder with a tokenizer, else the pages."""
    if (Path(model_name) / "tokenizer.json").is_file():
        return instruction_task(
            model_name, steps=steps, batch_size=batch_size, seq_len=seq_len, seed=seed, device=device
        )
    return page_task(steps=steps, batch_size=batch_size, seq_len=seq_len or TEXT_SEQ_LEN, seed=seed, device=device)


def page_task(*, steps: int, batch_size: int, seq_len: int, seed: int, device: torch.device) -> Task:
    root = Path(__file__).resolve().parents[1]
    pages = [file.read_bytes() for file in sorted([*root.glob("*.md"), *root.glob("[!.]*/*.md")])]
    ends = [int(len(page) * (1 - HELD_OUT_SHARE)) for page in pages]
    train = b"".join(page[:end] for page, end in zip(pages, ends, strict=True))
    held_out = b"".join(page[end:] for page, end in zip(pages, ends, strict=True))
    longest = min(len(train) // batch_size, len(held_out)) - 1
    if seq_len > longest:
        raise UserError(f"--seq-len {seq_len} with --batch-size {batch_size}: the pages are too short, lower one")
    batches = data.train_batches(
        np.frombuffer(train, dtype=np.uint8),
        seq_len=seq_len,
        global_batch_size=batch_size,
        micro_batch_size=batch_size,
        seed=seed,
        device=device,
    )
    return Task(
        about=f"{len(pages)} pages, {len(train):,} bytes to train on, {len(held_out):,} held out",
        vocab_size=256,
        seq_len=seq_len,
        batches=[next(batches) for _ in range(steps)],
        held_out=data.eval_batches(
            np.frombuffer(held_out, dtype=np.uint8), seq_len=seq_len, batch_size=max(4, batch_size)
        ),
        question=None,
        answer=lambda net, autocast: None,
    )


def instruction_task(folder: str, *, steps: int, batch_size: int, seq_len: int | None, seed: int, device) -> Task:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(f"--model {folder} has a tokenizer: pip install transformers to read it") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise many kinds
        reason = " ".join(str(error).split())
        raise UserError(f"--model {folder}: its tokenizer cannot be read: {type(error).__name__}: {reason}") from None
    if tokenizer.chat_template is None:
        raise UserError(f"--model {folder}: its tokenizer has no chat template, and instructions need one")
    pairs = [json.loads(line) for line in INSTRUCTIONS.read_text().splitlines()]
    encoded = [encode(tokenizer, pair) for pair in pairs]
    longest = max(len(tokens) for tokens, _ in encoded) - 1
    if (seq_len or longest) < longest:
        raise UserError(f"--seq-len {seq_len}: the longest pair takes {longest} tokens")
    held_out = encoded[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [pair for i, pair in enumerate(encoded) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    if batch_size > len(train):
        raise UserError(f"--batch-size {batch_size}: there are {len(train)} pairs to train on")
    order = data.batch_order(len(train), global_batch_size=batch_size, micro_batch_size=batch_size, seed=seed)
    question = pairs[HELD_OUT_EVERY - 1]["instruction"]
    return Task(
        about=f"{len(train)} instructions to train on, {len(held_out)} held out",
        vocab_size=len(tokenizer),
        seq_len=seq_len or longest,
        batches=[pad([train[i] for i in next(order)], seq_len or longest) for _ in range(steps)],
        held_out=[pad(held_out, seq_len or longest)],
        question=question,
        answer=partial(greedy_answer, tokenizer, question),
    )


def prompt_tokens(tokenizer, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def encode(tokenizer, pair: dict[str, str]) -> tuple[list[int], int]:
    """Tokens of a question and its answer, and how many of them are the question's."""
    chat = [{"role": "user", "content": pair["instruction"]}, {"role": "assistant", "content": pair["answer"]}]
    tokens = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    prompt = prompt_tokens(tokenizer, pair["instruction"])
    assert tokens[: len(prompt)] == prompt, "this chat template changes a question when an answer follows"
    return tokens, len(prompt)


def pad(pairs: list[tuple[list[int], int]], seq_len: int) -> Batch:
    """Inputs and targets [pairs, seq_len], targets one token on. Padding is at the end: causal attention from the
    tokens before never sees it."""
    inputs = torch.zeros(len(pairs), seq_len, dtype=torch.int64)
    targets = torch.full_like(inputs, data.PADDING)
    for row, (tokens, prompt_length) in enumerate(pairs):
        inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        targets[row, prompt_length - 1 : len(tokens) - 1] = torch.tensor(tokens[prompt_length:])
    return inputs, targets


@torch.no_grad()
def greedy_answer(tokenizer, question: str, net: nn.Module, autocast) -> str:
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


def train_base(net: nn.Module, autocast, *, lr: float, seed: int) -> None:
    """A few steps from random weights, so that there is something to adapt."""
    corpus = data.load_corpus("stdlib", "bytes")
    device = next(net.parameters()).device
    batches = data.train_batches(corpus.train, **BASE_SIZES, seed=seed, device=device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, fused=True)
    for _ in range(BASE_STEPS):
        inputs, targets = (t.to(device) for t in next(batches))
        with autocast():
            loss = net(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"base: {BASE_STEPS} steps on the standard library's source, last loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def evaluate(net: nn.Module, batches: list[Batch], autocast) -> float:
    """Mean loss per target of the held-out sequences."""
    device = next(net.parameters()).device
    total = torch.zeros(2, device=device)  # sum of losses, number of targets
    for inputs, targets in batches:
        targets = targets.to(device)
        with autocast():
            loss = net(inputs.to(device), targets)
        count = (targets != data.PADDING).sum()
        total += torch.stack((torch.where(count > 0, loss * count, 0.0), count))  # padding alone has no mean
    return (total[0] / total[1]).item()
