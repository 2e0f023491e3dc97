"""What quantize.py and qat.py share: weights as integers and scales, the model that both start from, and its loss.

The model is a Hugging Face folder's, or nano on the source text of the standard library. nano is trained here in fp32
throughout, so that what a row loses is lost to quantization, and kept in runs/, in a file whose name says what the
weights depend on.
"""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import cli
from common.exits import UserError
from lm import data, shapes, weights

Forward = Callable[[Tensor], Tensor]  # stands in for the forward of a layer
Batches = list[tuple[Tensor, Tensor]]
SEQ_LEN, BATCH_SIZE = 64, 16


class Quantized(NamedTuple):
    codes: Tensor  # int8 [out, in], or for 4 bits and fewer uint8 [out, in / 2]: two to a byte
    scale: Tensor  # bf16 [out, groups], or [1, 1] for one per tensor
    width: int  # values of a row that share a scale; the last group may be shorter

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def quantize(weight: Tensor, bits: int, group: str | int, clip: float | Tensor = 1.0) -> Quantized:
    """Symmetric, to nearest; `group`: "tensor", "channel" (a row) or how many values share a scale. What is above the
    share `clip` of the largest value becomes the largest integer."""
    # 127 or 7: -128 and -8 have no positive counterpart and stay unused
    limit = 2 ** (bits - 1) - 1
    rows, columns = weight.shape
    width = group if isinstance(group, int) else columns
    values = F.pad(weight, (0, -columns % width)).view(rows, -1, width)  # zeros change no maximum
    largest = values.abs().amax((0, 1, 2) if group == "tensor" else 2, keepdim=True)
    # off by 1/512 at most: 127 ± 0.25 still rounds to 127
    scale = (largest * clip / limit).bfloat16()
    scale = torch.where(scale > 0, scale, 1)  # all zeros: 0 / 1, not 0 / 0
    codes = (
        (values / scale.float())
        .round()
        .clamp(-limit, limit)
        .to(torch.int8)
        .view(rows, -1)[:, :columns]
    )
    return Quantized(pack(codes) if bits <= 4 else codes.contiguous(), scale[..., 0], width)


def dequantize(w: Quantized) -> Tensor:
    codes = unpack(w.codes) if w.codes.dtype == torch.uint8 else w.codes
    return codes * scale_of_each(w, codes.shape[1])


def scale_of_each(w: Quantized, columns: int) -> Tensor:
    """The scale of each value, [out, in] or [1, in]: twice the most that rounding may do to it."""
    return w.scale.float().repeat_interleave(w.width, 1)[:, :columns]


def pack(codes: Tensor) -> Tensor:
    """int8 [out, in] of -8 to 7 -> uint8 [out, in / 2]: even columns in the low four bits, odd in the high."""
    return (codes[:, 1::2] << 4 | codes[:, ::2] & 15).view(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    signed = packed.view(torch.int8)
    return torch.stack((signed << 4 >> 4, signed >> 4), -1).flatten(1)  # >> repeats the sign bit


def dequantizing(w: Quantized) -> Forward:
    """A layer whose integers are dequantized at each call and multiplied in fp32."""
    return lambda x: F.linear(x, dequantize(w))


def linears(net: nn.Module) -> dict[str, nn.Linear]:
    """The matrices inside the blocks; lm_head, which is the embedding, is not among them."""
    return {
        name: module for name, module in net.model.named_modules() if isinstance(module, nn.Linear)
    }


@torch.no_grad()
def losses(net: nn.Module, forwards: dict[str, Forward], batches: Batches) -> Tensor:
    """The loss of each sequence, in nats per token; `forwards` stand in for those of the layers they name."""
    layers = linears(net)
    for name, forward in forwards.items():
        layers[name].forward = forward
    found = []
    for inputs, targets in batches:
        logits = net(inputs).flatten(0, 1)
        of_tokens = F.cross_entropy(
            logits, targets.flatten(), ignore_index=data.PADDING, reduction="none"
        )
        real = targets != data.PADDING
        of_sequences = of_tokens.view(targets.shape).sum(1) / real.sum(1)
        found.append(of_sequences[real.any(1)].cpu())  # without the rows that only pad
    for name in forwards:
        del layers[name].forward
    return torch.cat(found).double()


def difference(found: Tensor, baseline: Tensor) -> tuple[float, float]:
    """Mean of the differences, sequence by sequence, and its standard error: what of it chance could be."""
    delta = found - baseline
    return delta.mean().item(), delta.std().item() / math.sqrt(len(delta))


def parser(doc: str) -> cli.Parser:
    """The flags that both scripts have."""
    parser = cli.Parser(doc)
    add = parser.add_argument
    add(
        "--model",
        default="nano",
        help="nano, trained here first, or a Hugging Face folder with trained weights",
    )
    add("--train-steps", type=cli.positive_int, default=20, help="steps that nano is trained first")
    cli.add_device_and_json(parser)
    return parser


def starting_model(
    args: argparse.Namespace, seed: int, device: torch.device
) -> tuple[nn.Module, data.Corpus]:
    """The folder's model, or nano of that seed, trained here; and text in its tokens."""
    if args.model != "nano" and not shapes.has_weights(args.model):
        raise UserError(
            f"--model {args.model}: neither nano nor a Hugging Face folder with .safetensors files"
        )
    shapes.read_config(args.model)  # its errors come before minutes of tokenizing
    corpus = data.load_corpus("stdlib", model=args.model)
    config = shapes.load_config(args.model, corpus.vocab_size, SEQ_LEN)
    if config.qkv_bias:
        raise UserError(
            f"--model {args.model}: no biases are quantized here: use 09_inference/quantized.py"
        )
    net = weights.build(args.model, config, seed=seed, device=device)
    if args.model == "nano":
        key = f"nano-{device.type}-seed{seed}-steps{args.train_steps}-{corpus.sha256[:12]}-torch{torch.__version__}"
        file = Path("runs", f"{key}.pt")
        if file.is_file():
            net.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        else:
            print(f"{file}: not there yet, training {args.train_steps} steps", flush=True)
            train(net, corpus, args.train_steps, 2e-3, seed)
            file.parent.mkdir(exist_ok=True)
            # a killed run leaves no half of it
            unfinished = file.with_suffix(f".{os.getpid()}.tmp")
            torch.save(net.state_dict(), unfinished)
            unfinished.rename(file)
    return net.eval(), corpus


def train(net: nn.Module, corpus: data.Corpus, steps: int, lr: float, seed: int) -> None:
    """`seed` decides the order of the data, and nothing else here is random."""
    device = next(net.parameters()).device
    stream = _batches(corpus, seed).stream(0)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        # warm-up, then a cosine
        factor = min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr * factor
        inputs, targets = next(stream)
        net(inputs.to(device), targets.to(device)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def held_out_sets(corpus: data.Corpus, device: torch.device) -> tuple[Batches, Batches]:
    """Text that no model was trained on: a calibration set to choose with, an evaluation set for the losses shown."""
    half = len(corpus.held_out) // 2
    sets = []
    for part in (corpus.held_out[:half], corpus.held_out[half:]):
        batches = _batches(corpus._replace(held_out=part), seed=0).evaluation()
        sets.append([(inputs.to(device), targets.to(device)) for inputs, targets in batches])
    return tuple(sets)


def space(name: str) -> int:
    """The token of a space, to the tokenizer that starting_model reads with."""
    if not any(Path(name).glob("tokenizer*")):
        return ord(" ")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name).encode(" ", add_special_tokens=False)[0]


def _batches(corpus: data.Corpus, seed: int) -> data.Batches:
    settings = argparse.Namespace(
        seed=seed, seq_len=SEQ_LEN, global_batch_size=BATCH_SIZE, micro_batch_size=None
    )
    return data.Batches(*data.sequences(corpus, settings.seq_len), settings, rank=0, world_size=1)
