"""Load or train the model that quantize.py and qat.py start from, and measure its loss.

The model comes from a Hugging Face folder, or it is nano, trained here on the source text of the
standard library. nano is trained in fp32 throughout, so that what a row of the table loses is lost
to quantization. It is kept in runs/, in a file whose name says what the weights depend on.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import cli, files, report
from common.exits import UserError
from lm import data, shapes, weights
from lm.tokenizer import has_tokenizer, open_tokenizer
from training import batches as training_batches
from training.batches import PADDING

Forward = Callable[[Tensor], Tensor]  # takes the place of a layer's forward
Batches = list[tuple[Tensor, Tensor]]  # (inputs, targets), each [sequences, tokens]
LR = 2e-3  # peak learning rate of nano


class Sizes(NamedTuple):
    seq_len: int
    batch_size: int
    train_steps: int  # default of --train-steps


SMALL = Sizes(seq_len=64, batch_size=16, train_steps=20)
# Steps of 49,152 tokens, so that a GPU computes for much longer than the launches take.
LARGE = Sizes(seq_len=512, batch_size=96, train_steps=200)


def sizes_for(model: str, device: torch.device) -> Sizes:
    """Return the sizes for a model and a device.

    A folder's model always gets SMALL: it may have few positions, or a vocabulary whose logits
    would not fit.
    """
    if model == "nano" and device.type == "cuda":
        return LARGE
    return SMALL


def add_flags(parser: cli.Parser) -> None:
    """Add the flags that both scripts have."""
    parser.add_argument(
        "--model",
        default="nano",
        help="nano, trained here first, or a Hugging Face folder with trained weights",
    )
    parser.add_argument(
        "--train-steps",
        type=cli.positive_int,
        help=f"steps that nano is trained first (default: {SMALL.train_steps}; "
        f"on a GPU {LARGE.train_steps}, of more tokens)",
    )
    cli.add_device_and_json(parser)


# --- layers and losses


def linears(net: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers inside the blocks. lm_head, which is the embedding, is outside."""
    layers = {}
    for name, module in net.model.named_modules():
        if isinstance(module, nn.Linear):
            layers[name] = module
    return layers


@torch.no_grad()
def losses(net: nn.Module, forwards: dict[str, Forward], batches: Batches) -> Tensor:
    """Return the loss of each sequence, in nats per token, as fp64 [sequences] on the CPU.

    `forwards` has, by the name of a layer, what computes in place of that layer.
    """
    layers = linears(net)
    originals = {}
    for name, forward in forwards.items():
        originals[name] = layers[name].forward
        layers[name].forward = forward

    all_losses = []
    for inputs, targets in batches:
        logits = net(inputs).flatten(0, 1)  # [sequences * tokens, vocabulary]
        token_losses = F.cross_entropy(
            logits, targets.flatten(), ignore_index=PADDING, reduction="none"
        )
        is_target = targets != PADDING  # [sequences, tokens]
        sums = token_losses.view(targets.shape).sum(1)
        sequence_losses = sums / is_target.sum(1)
        # rows of padding fill up the last batch
        has_targets = (targets.cpu() != PADDING).any(1)
        all_losses.append(sequence_losses.cpu()[has_targets])

    for name, forward in originals.items():
        layers[name].forward = forward
    return torch.cat(all_losses).double()


def loss_difference(found: Tensor, baseline: Tensor) -> tuple[float, float]:
    """Return the mean difference over the sequences, and its standard error."""
    difference = found - baseline
    standard_error = difference.std().item() / math.sqrt(len(difference))
    return difference.mean().item(), standard_error


# --- the model and its data


def starting_model(
    args: argparse.Namespace, sizes: Sizes, seed: int, device: torch.device
) -> tuple[nn.Module, data.Corpus]:
    """Return the folder's model, or nano trained from this seed, and a corpus in its tokens."""
    if args.model != "nano" and not shapes.has_weights(args.model):
        raise UserError(
            f"--model {args.model}: neither nano nor a Hugging Face folder with .safetensors files"
        )
    shapes.read_config(args.model)  # its errors come before minutes of tokenizing
    corpus = data.load_corpus("stdlib", model=args.model)
    config = weights.load_config(args.model, corpus.vocab_size, sizes.seq_len)
    if config.qkv_bias:
        raise UserError(
            f"--model {args.model}: no biases are quantized here: use 09_inference/quantized.py"
        )
    net = weights.build(args.model, config, seed=seed, device=device)
    if args.model == "nano":
        _train_or_load(net, corpus, sizes, args.train_steps, seed)
    return net.eval(), corpus


def _train_or_load(
    net: nn.Module, corpus: data.Corpus, sizes: Sizes, steps: int, seed: int
) -> None:
    """Train nano, or load the weights that an earlier call with the same arguments has saved."""
    device = next(net.parameters()).device
    parts = [
        f"nano-{device.type}-seed{seed}-steps{steps}x{sizes.batch_size}x{sizes.seq_len}",
        corpus.sha256[:12],
        f"torch{torch.__version__}",
    ]
    file = Path("runs", "-".join(parts) + ".pt")
    if file.is_file():
        net.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        return
    line = f"{file} does not exist yet: training {steps} steps"
    print(report.fold(line), flush=True)
    train(net, corpus, sizes, steps, LR, seed)
    file.parent.mkdir(exist_ok=True)
    with files.complete_file(file, "wb") as stream:
        torch.save(net.state_dict(), stream)


def train(
    net: nn.Module, corpus: data.Corpus, sizes: Sizes, steps: int, lr: float, seed: int
) -> None:
    """Train in fp32. `seed` decides the order of the data, and nothing else is random."""
    device = next(net.parameters()).device
    stream = _batches(corpus, seed, sizes).stream(0)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        warm_up = (step + 1) / 10
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = lr * min(warm_up, cosine)
        inputs, targets = next(stream)
        net(inputs.to(device), targets.to(device)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def held_out_sets(
    corpus: data.Corpus, sizes: Sizes, device: torch.device
) -> tuple[Batches, Batches]:
    """Return two sets of text that no model was trained on: calibration and evaluation.

    Ranges, layers and scales are chosen on the first. The losses in the table are of the second.
    """
    half = len(corpus.held_out) // 2
    sets = []
    for text in (corpus.held_out[:half], corpus.held_out[half:]):
        batches = _batches(corpus._replace(held_out=text), 0, sizes).evaluation()
        sets.append([(inputs.to(device), targets.to(device)) for inputs, targets in batches])
    calibration, evaluation = sets
    return calibration, evaluation


def space_token(model: str) -> int:
    """Return the token of a space, for the tokenizer that starting_model reads with."""
    if not has_tokenizer(model):
        return ord(" ")
    tokenizer = open_tokenizer(model, "--model")
    return tokenizer.encode(" ", add_special_tokens=False)[0]


def _batches(corpus: data.Corpus, seed: int, sizes: Sizes) -> training_batches.Batches:
    settings = argparse.Namespace(
        seed=seed,
        seq_len=sizes.seq_len,
        global_batch_size=sizes.batch_size,
        micro_batch_size=None,
    )
    sequences = data.sequences(corpus, sizes.seq_len)
    return training_batches.Batches(*sequences, settings, rank=0, world_size=1)
