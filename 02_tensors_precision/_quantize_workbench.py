"""What quantize.py and qat.py share: the model they start from, its measurement, their results as JSON.

The model is nano on the standard library's source text, trained here in fp32 throughout, so that what a row
loses is lost to quantization, and kept in runs/. The file's name says what the weights depend on: device,
seed, steps, text, torch version. It is written under another name and renamed, so that a killed run leaves
no half of it; a damaged one is trained again.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # common/, with nothing installed
from common import cli, data, model, report, runtime
from common.exits import UserError
from common.hardware import device_name

SEQ_LEN = 64
BATCH_SIZE = 16
Forward = Callable[[Tensor], Tensor]
Batches = list[tuple[Tensor, Tensor]]


def flags(description: str) -> cli.Parser:
    """The flags that both scripts have."""
    parser = cli.Parser(description)
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument("--seed", type=cli.seed, default=0, help="of the model to start from")
    parser.add_argument("--train-steps", type=cli.positive_int, default=60, help="steps of the model to start from")
    parser.add_argument("--run-dir", type=Path, default=REPO / "runs", help="folder where that model is kept")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the results as one JSON object")
    return parser


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
    config = model.load_config("nano", corpus.vocab_size, SEQ_LEN)
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


def held_out_batches(tokens: np.ndarray, device: torch.device) -> Batches:
    batches = data.eval_batches(tokens, seq_len=SEQ_LEN, batch_size=BATCH_SIZE)
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]


def held_out_sets(corpus: data.Corpus, device: torch.device) -> tuple[Batches, Batches]:
    """Text that no model was trained on: a calibration set to choose with, an evaluation set for the losses shown."""
    half = len(corpus.held_out) // 2
    calibration_set = held_out_batches(corpus.held_out[:half], device)
    evaluation_set = held_out_batches(corpus.held_out[half:], device)
    return calibration_set, evaluation_set


def linears(net: model.Transformer) -> dict[str, nn.Linear]:
    """The matrices inside the blocks; lm_head, which is the embedding, is not among them."""
    return {name: module for name, module in net.model.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def measure(net: model.Transformer, forwards: dict[str, Forward], batches: Batches) -> tuple[Tensor, float]:
    """(loss of each sequence in nats per token, tokens/s), `forwards` standing in for those of the layers named."""
    layers = linears(net)
    for name, forward in forwards.items():
        layers[name].forward = forward
    losses, seconds = [], []
    for inputs, targets in batches:
        start = time.perf_counter()
        token_losses = F.cross_entropy(
            net(inputs).flatten(0, 1), targets.flatten(), ignore_index=data.PADDING, reduction="none"
        ).view(targets.shape)
        real = targets != data.PADDING
        sequence_losses = token_losses.sum(1) / real.sum(1)  # of a padding row nan: it has no token
        losses.append(sequence_losses[real.any(1)].cpu())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    for name in forwards:
        del layers[name].forward
    return torch.cat(losses).double(), inputs.numel() / statistics.median(seconds)


def difference(losses: Tensor, baseline: Tensor) -> tuple[float, float]:
    """Mean of the differences, sequence by sequence, and its standard error: what of it chance could be."""
    delta = losses - baseline
    return delta.mean().item(), delta.std().item() / math.sqrt(len(delta))


class Scheme(NamedTuple):
    """One row of the table: a way to keep and to multiply the weights of all layers."""

    name: str
    multiplied: str
    nbytes: int
    forwards: dict[str, Forward]  # by layer


def evaluate(net, tried: list[Scheme], evaluation_set: Batches) -> list[dict]:
    """Loss and speed of each scheme; the first is the baseline.

    Batch by batch all take turns, so that a disturbance hits all alike.
    """
    turns = []
    for batch in evaluation_set:
        turns.append([measure(net, scheme.forwards, [batch]) for scheme in tried])
    baseline = torch.cat([turn[0][0] for turn in turns])
    rows = []
    for i, scheme in enumerate(tried):
        losses = torch.cat([turn[i][0] for turn in turns])
        speeds = [turn[i][1] for turn in turns[1:]]  # the first turn warms up
        delta, standard_error = difference(losses, baseline)
        row = {
            "scheme": scheme.name,
            "multiplied": scheme.multiplied,
            "weight_bytes": scheme.nbytes,
            "val_loss": losses.mean().item(),
            "delta": delta,
            "standard_error": standard_error,
            "tokens_per_second": statistics.median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
        }
        rows.append(row)
    return rows


def sensitivity(net: model.Transformer, forwards: dict[str, Forward], batches: Batches) -> dict[str, tuple]:
    """What each forward alone adds to the loss, and the standard error of that; the worst layer first."""
    baseline, _ = measure(net, {}, batches)
    added = {}
    for name, forward in forwards.items():
        losses, _ = measure(net, {name: forward}, batches)
        added[name] = difference(losses, baseline)
    return dict(sorted(added.items(), key=lambda item: -item[1][0]))


@torch.no_grad()
def observe(net: model.Transformer, inputs: Tensor, clipped_share: float) -> dict[str, tuple[float, float]]:
    """The range of each layer's input, the most extreme `clipped_share` at either end left out (0: min and max)."""
    activation_ranges = {}

    def note(name: str, _module, args: tuple[Tensor]) -> None:
        x = args[0].flatten()
        beyond = int(clipped_share * x.numel())
        low = x.kthvalue(1 + beyond)[0].item()
        high = x.kthvalue(x.numel() - beyond)[0].item()
        activation_ranges[name] = (low, high)

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in linears(net).items()]
    net(inputs)
    for hook in hooks:
        hook.remove()
    return activation_ranges


def finish(args: argparse.Namespace, net: model.Transformer, start: float, results: dict) -> None:
    """Write the results to --json, and say on what they were measured."""
    device = next(net.parameters()).device
    summary = {
        "device": device_name(device),
        "world_size": 1,
        "dtype": "fp32",
        "model": "nano",
        "parameters": sum(p.numel() for p in net.parameters()),
        "steps": args.train_steps,
        "tokens": args.train_steps * BATCH_SIZE * SEQ_LEN,
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - start,
    }
    report.write_json(summary | results, args.json)
    print(f"\n{summary['seconds']:.0f} s on {summary['device']}, torch {torch.__version__}")
