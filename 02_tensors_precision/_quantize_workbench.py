"""What quantize.py and qat.py share: the model they start from, its measurement, their results as JSON.

The model is nano on the standard library's source text, trained here in fp32 throughout, so that what a row
loses is lost to quantization, and kept in runs/. The file's name says what the weights depend on: device,
seed, steps, text, torch version. It is written under another name and renamed, so that a killed run leaves
no half of it; a damaged one is trained again.
"""

import argparse
import collections
import hashlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # common/, with nothing installed
from common import cli, data, model, report, runtime
from common.exits import UserError
from common.hardware import device_name

SEQ_LEN, BATCH = 64, 16
Forward = Callable[[Tensor], Tensor]
Batches = list[tuple[Tensor, Tensor]]
LLAMA2 = {
    "7B": model.Config(32_000, 4096, 11_008, 32, 32, 32, 128, 4096),
    "13B": model.Config(32_000, 5120, 13_824, 40, 40, 40, 128, 4096),
    "70B": model.Config(32_000, 8192, 28_672, 80, 64, 8, 128, 4096),
}  # lm_head is not tied to the embedding


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
    args = argparse.Namespace(data="stdlib", seq_len=SEQ_LEN, global_batch_size=BATCH, seed=seed, num_workers=0)
    batches = data.train_batches(tokens, args, BATCH, 0, 0, 1, device)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        factor = min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / steps))  # warm-up, then a cosine
        optimizer.param_groups[0]["lr"] = lr * factor
        inputs, targets = (t.to(device) for t in next(batches))
        net(inputs, targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trained_model(args: argparse.Namespace, device: torch.device) -> tuple[model.Transformer, data.Corpus]:
    """The model of --seed and --train-steps, from the cache if a whole file of it is there."""
    corpus = data.load_corpus("stdlib", "bytes")
    text = hashlib.sha256(corpus.train).hexdigest()[:12]
    key = f"nano-{device.type}-seed{args.seed}-steps{args.train_steps}-{text}-torch{torch.__version__}"
    file = args.run_dir / f"{key}.pt"
    runtime.seed(args.seed, deterministic=False)
    torch.set_float32_matmul_precision("highest")  # some containers make tf32 the default
    net = model.build("nano", model.load_config("nano", corpus.vocab_size, SEQ_LEN)).to(device)
    try:
        args.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {args.run_dir}: {error.strerror}; name another folder") from None
    try:
        net.load_state_dict(torch.load(file, map_location=device, weights_only=True))
    except Exception as error:  # torch raises many kinds for a file that is cut short
        why = "not there yet" if isinstance(error, FileNotFoundError) else "damaged"
        print(f"{file.name}: {why}, training {args.train_steps} steps", flush=True)
        train(net, corpus.train, args.train_steps, 2e-3, args.seed)
        part = file.with_name(f"{key}.{os.getpid()}.tmp")
        torch.save(net.state_dict(), part)
        part.rename(file)
    return net.eval(), corpus


def held_out(corpus: data.Corpus, device: torch.device) -> tuple[Batches, Batches]:
    """Text that no model was trained on: one half to calibrate and choose with, the other for the losses shown."""
    half = len(corpus.held_out) // 2
    loaders = [data.eval_batches(t, SEQ_LEN, BATCH, 0, 1) for t in (corpus.held_out[:half], corpus.held_out[half:])]
    tuning, shown = ([(i.to(device), t.to(device)) for i, t in loader] for loader in loaders)
    return tuning, shown


def linears(net: model.Transformer) -> dict[str, nn.Linear]:
    """The matrices inside the blocks; lm_head, which is the embedding, is not among them."""
    return {name: module for name, module in net.model.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def measure(net: model.Transformer, forwards: dict[str, Forward], batches: Batches) -> tuple[Tensor, float]:
    """(loss of each sequence in nats per token, tokens/s), `forwards` standing in for those of the layers named."""
    layers, losses, seconds = linears(net), [], []
    for name, forward in forwards.items():
        layers[name].forward = forward
    for inputs, targets in batches:
        start = time.perf_counter()
        loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.view(targets.shape).mean(1).cpu())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    for name in forwards:
        del layers[name].forward
    return torch.cat(losses), inputs.numel() / statistics.median(seconds)


def difference(losses: Tensor, base: Tensor) -> tuple[float, float]:
    """Mean of the differences, sequence by sequence, and its standard error: what of it chance could be."""
    delta = losses - base
    return delta.mean().item(), delta.std().item() / math.sqrt(len(delta))


def sensitivity(net: model.Transformer, forwards: dict[str, Forward], batches: Batches) -> dict[str, tuple]:
    """What each forward alone adds to the loss, and the standard error of that; the worst layer first."""
    base, _ = measure(net, {}, batches)
    found = {name: difference(measure(net, {name: f}, batches)[0], base) for name, f in forwards.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


@torch.no_grad()
def observe(net: model.Transformer, inputs: Tensor, clip: float) -> dict[str, tuple[float, float]]:
    """The range of each layer's input, the most extreme share `clip` at either end left out (0: min and max)."""
    ranges = {}

    def note(name: str, _module, args: tuple[Tensor]) -> None:
        x = args[0].flatten()
        beyond = int(clip * x.numel())
        ranges[name] = (x.kthvalue(1 + beyond)[0].item(), x.kthvalue(x.numel() - beyond)[0].item())

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in linears(net).items()]
    net(inputs)
    for hook in hooks:
        hook.remove()
    return ranges


def llama2_bytes(kinds: dict[str, Callable]) -> list[dict]:
    """Bytes of all weights by model and kind of quantization in the blocks; the rest is bf16."""
    rows = []
    for name, config in LLAMA2.items():
        with torch.device("meta"):  # tensors with a shape and no storage: any size fits
            net = model.Transformer(config)
        alike = collections.Counter(layer.weight.shape for layer in linears(net).values())
        weights = {torch.empty(shape, device="meta"): count for shape, count in alike.items()}
        parameters = sum(p.numel() for p in net.parameters())
        rest = 2 * (parameters - sum(w.numel() * count for w, count in weights.items()))
        row = {"model": name, "parameters": parameters, "bf16_bytes": 2 * parameters}
        for kind, quantize in kinds.items():
            row[f"{kind}_bytes"] = rest + sum(quantize(w).nbytes * count for w, count in weights.items())
        rows.append(row)
    return rows


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4f}"
    return "n/a" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def finish(args: argparse.Namespace, net: model.Transformer, start: float, **own) -> None:
    """Print what is a list of rows in `own` as tables, and write all of it to --json."""
    for rows in own.values():
        if isinstance(rows, list):
            head = [name.replace("_", " ") for name in rows[0]]
            print("\n" + report.table([head, *([cell(value) for value in row.values()] for row in rows)]))
    device = next(net.parameters()).device
    summary = {
        "device": device_name(device),
        "world_size": 1,
        "dtype": "fp32",
        "model": "nano",
        "parameters": sum(p.numel() for p in net.parameters()),
        "steps": args.train_steps,
        "tokens": args.train_steps * BATCH * SEQ_LEN,
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - start,
        **own,
    }
    report.write_json(summary, args.json)
    print(f"\n{summary['seconds']:.0f} s on {summary['device']}, torch {torch.__version__}")
