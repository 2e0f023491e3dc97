"""What quantize.py and qat.py start from and end with: flags, the model and its text, results as JSON.

The model is a Hugging Face folder's, or nano on the standard library's source text, trained here in fp32
throughout, so that what a row loses is lost to quantization, and kept in runs/. The file's name says what the
weights depend on: device, seed, steps, text, torch version. It is written under another name and renamed, so that
a killed run leaves no half of it; a damaged one is trained again.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # old/, with nothing installed
from old import cli, data, model, report, runtime, shapes
from old.exits import UserError
from old.hardware import device_name

NANO = "nano"
SEQ_LEN = 64
BATCH_SIZE = 16
Batches = list[tuple[Tensor, Tensor]]


def flags(description: str) -> cli.Parser:
    """The flags that both scripts have."""
    parser = cli.Parser(description)
    add = parser.add_argument
    add("--model", default=NANO, help="nano, trained here first, or a Hugging Face folder with trained weights")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--seed", type=cli.natural, default=0, help="of nano's weights, and of the order of the data")
    add("--train-steps", type=cli.positive_int, default=20, help="steps that nano is trained first")
    add("--run-dir", type=cli.path, default=REPO / "runs", help="folder where nano is kept")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the results as one JSON object")
    return parser


class Start(NamedTuple):
    """The model that both scripts start from, and text in its tokens."""

    net: model.Transformer
    corpus: data.Corpus
    space: int  # the token of a space


def starting_model(args: argparse.Namespace, seed: int, device: torch.device) -> Start:
    """nano of that seed, trained here, or the model of a folder."""
    if args.model != NANO:
        return folder_model(args.model, device)
    net, corpus = trained_model(run_dir=args.run_dir, seed=seed, train_steps=args.train_steps, device=device)
    return Start(net, corpus, ord(" "))


def folder_model(name: str, device: torch.device) -> Start:
    """The weights of a Hugging Face folder, in fp32, with its own tokenizer, or bytes where it has none."""
    folder = Path(name)
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"--model {name}: neither nano nor a Hugging Face folder with .safetensors files")
    tokenizer = name if (folder / "tokenizer.json").is_file() else "bytes"
    corpus = data.load_corpus("stdlib", tokenizer)
    config = shapes.load_config(name, corpus.vocab_size, SEQ_LEN)
    runtime.exact_fp32(device)
    net = model.build(name, config, seed=0, device=device)
    space = ord(" ") if tokenizer == "bytes" else data.load_tokenizer(name).encode(" ", add_special_tokens=False)[0]
    return Start(net.eval(), corpus, space)


def trained_model(
    *, run_dir: Path, seed: int, train_steps: int, device: torch.device
) -> tuple[model.Transformer, data.Corpus]:
    """The model of that seed and that many steps, from the cache if a whole file of it is there."""
    corpus = data.load_corpus("stdlib", "bytes")
    # "by-name": initial weights are a function of seed and parameter name; older files started from others
    key = f"nano-by-name-{device.type}-seed{seed}-steps{train_steps}-{corpus.sha256[:12]}-torch{torch.__version__}"
    file = run_dir / f"{key}.pt"
    runtime.seed(seed, deterministic=False)
    runtime.exact_fp32(device)
    config = shapes.load_config("nano", corpus.vocab_size, SEQ_LEN)
    net = model.build("nano", config, seed=seed, device=device)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir}: {error.strerror}; name another folder") from None
    try:
        net.load_state_dict(torch.load(file, map_location=device, weights_only=True))
    except Exception as error:  # torch raises many kinds for a file that is cut short
        why = "not there yet" if isinstance(error, FileNotFoundError) else "damaged"
        print(f"{file.name}: {why}, training {train_steps} steps", flush=True)
        train(net, corpus.train, train_steps, 2e-3, seed)
        part = file.with_name(f"{key}.{os.getpid()}.tmp")
        torch.save(net.state_dict(), part)
        part.rename(file)
    return net.eval(), corpus


def train(net: nn.Module, tokens: np.ndarray, steps: int, lr: float, seed: int) -> None:
    """`seed` decides the order of the data, and nothing else here is random."""
    device = next(net.parameters()).device
    batches = data.train_batches(
        tokens,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH_SIZE,
        micro_batch_size=BATCH_SIZE,
        seed=seed,
        device=device,
    )
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        factor = min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / steps))  # warm-up, then a cosine
        optimizer.param_groups[0]["lr"] = lr * factor
        inputs, targets = (t.to(device) for t in next(batches))
        net(inputs, targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def held_out_batches(tokens: np.ndarray, device: torch.device) -> Batches:
    batches = data.eval_batches(tokens, seq_len=SEQ_LEN, batch_size=BATCH_SIZE)
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]


def held_out_sets(corpus: data.Corpus, device: torch.device) -> tuple[Batches, Batches]:
    """Text that no model was trained on: a calibration set to choose with, an evaluation set for the losses shown."""
    half = len(corpus.held_out) // 2
    calibration_set = held_out_batches(corpus.held_out[:half], device)
    evaluation_set = held_out_batches(corpus.held_out[half:], device)
    return calibration_set, evaluation_set


def scan_set(args: argparse.Namespace, calibration_set: Batches) -> Batches:
    """What the scan of all layers reads, one by one: of a folder's model, which has more and larger ones, less."""
    if args.model == NANO:
        return calibration_set[:2]
    inputs, targets = calibration_set[0]
    return [(inputs[:4], targets[:4])]


def finish(args: argparse.Namespace, net: model.Transformer, start: float, results: dict) -> None:
    """Write the results to --json, and say on what they were measured."""
    device = next(net.parameters()).device
    own_training = {}
    if args.model == NANO:
        own_training = {"steps": args.train_steps, "tokens": args.train_steps * BATCH_SIZE * SEQ_LEN}
    summary = {
        "device": device_name(device),
        "world_size": 1,
        "dtype": "fp32",
        "model": args.model,
        "parameters": sum(p.numel() for p in net.parameters()),
        **own_training,
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - start,
    }
    report.write_json(summary | results, args.json)
    print(f"\n{summary['seconds']:.0f} s on {summary['device']}, torch {torch.__version__}")
