"""The largest model that trains on this one device, with as few tricks of this chapter as that takes.

From the largest named size down, estimate.py's formulas predict the peak of a training step: as it is, and with one
trick more at a time. The first that fits is built and trained for ten steps. The ladder: every block is checkpointed;
the loss is computed in chunks; each weight is updated inside backward, so that gradients never pile up; AdamW's moments
are kept in 8 bits. Weights are fp32 on all of these rungs, so that no update is lost. With --tune qlora the base is
frozen in 4 bits, quantized block by block as it is made, and adapters are trained.

    laptop    python 07_memory_tricks/train_big.py
    laptop    python 07_memory_tricks/train_big.py --tune qlora --model llama-124m
    one GPU   python 07_memory_tricks/train_big.py --model llama-8b --plot runs/8b.png
    one GPU   python 07_memory_tricks/train_big.py --model llama-70b --tune qlora --memory 57
    cluster   one process is all it uses; a model that no device holds is sharded: 06_fsdp_zero/train_fsdp.py

On a CPU it stays within 4 GiB unless --memory says more, so that it ends within a minute. Look for: the rung on which a
size begins to fit, and the measured peak beside the predicted one. Before: every script of this chapter. Next:
08_model_parallel/.
"""

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _estimate_shapes import from_config
from _train_big_predict import LOSS_CHUNKS, RANK, predict, predict_qlora
from _train_big_report import print_ladder, size_text, tell
from chunked_loss import chunked_cross_entropy
from lora import adapt_block
from optimizer_memory import CompactAdamW, step_inside_backward

from old import cli, data, exits, hardware, model, runtime, shapes
from old.exits import UserError
from old.step_cost import held_tensors, record_memory, wait_for

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FREE_SHARE = 0.1  # of the memory: for fragments, workspaces and what a formula leaves out
CPU_BYTES = 4 * 2**30
DEFAULT_SEQ_LEN = {"cuda": 4096, "cpu": 128}


@dataclass(frozen=True)
class Recipe:
    """A rung of the ladder: each has the tricks of the one before."""

    name: str
    checkpointing: str = "none"
    chunked_loss: bool = False
    step_inside_backward: bool = False
    moments: str = "fp32"


LADDER = [
    Recipe("plain"),
    Recipe("+ checkpointing", "full"),
    Recipe("+ chunked loss", "full", chunked_loss=True),
    Recipe("+ step inside backward", "full", chunked_loss=True, step_inside_backward=True),
    Recipe("+ moments in 8 bits", "full", chunked_loss=True, step_inside_backward=True, moments="8bit"),
]
QLORA = Recipe("QLoRA", "full", chunked_loss=True)


def ladder(args, device: torch.device, dtype: str) -> list[dict]:
    """Every size and rung until one fits, with the peak that is predicted for it; the last one fits."""
    names = [args.model] if args.model else list(reversed(shapes.SIZES))
    recipes = [QLORA] if args.tune == "qlora" else LADDER
    tried = []
    for name in names:
        config = shapes.read_config(name)
        if args.seq_len and args.seq_len > config.max_position_embeddings:
            if args.model:
                shapes.load_config(name, 1, args.seq_len)  # UserError, in the words of the other scripts
            continue
        plan = {
            "seq_len": args.seq_len or min(DEFAULT_SEQ_LEN[device.type], config.max_position_embeddings),
            "dtype": dtype,
            "on_cpu": device.type == "cpu",
        }
        for recipe in recipes:
            if args.tune == "qlora":
                peak = predict_qlora(from_config(name, config), recipe, rank=RANK, **plan)
            else:
                peak = predict(from_config(name, config), recipe, **plan)
            tried.append({"model": name, "recipe": recipe, "seq_len": plan["seq_len"], "predicted_bytes": round(peak)})
            if peak <= (1 - FREE_SHARE) * args.memory_bytes:
                return tried
    if not tried:
        raise UserError(f"--seq-len {args.seq_len} is over the limit of every named size: lower it")
    least = min(tried, key=lambda row: row["predicted_bytes"])
    raise UserError(
        f"--memory {args.memory_bytes / 2**30:g}: {least['model']} takes {size_text(least['predicted_bytes'])} of "
        f"{size_text(args.memory_bytes)} with --tune {args.tune} and every trick, and a tenth must stay free: "
        "raise --memory or lower --seq-len"
    )


def build_full(name: str, config: shapes.Config, recipe: Recipe, device: torch.device) -> tuple[nn.Module, list]:
    """A model whose weights are all trained, and its optimizers."""
    net = model.build(name, config, seed=0, device=device)
    model.checkpoint_blocks(net, recipe.checkpointing)
    lr = shapes.recipe(name).lr
    make = partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if recipe.moments == "8bit":
        make = partial(CompactAdamW, lr=lr, moments="8bit")
    if recipe.step_inside_backward:
        return net, step_inside_backward(net, make)
    return net, [make(net.parameters())]


def build_qlora(name: str, config: shapes.Config, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, list]:
    """Random weights, drawn on the device, block by block: one alone is ever there in more than 4 bits."""
    net = model.build(name, config, seed=0, device="meta")
    for block in net.model.layers.values():
        draw_weights(block, dtype, device)
        adapt_block(block, rank=RANK, alpha=2 * RANK, int4=True)
    for module in (net.model.embed_tokens, net.model.norm, net.lm_head):
        draw_weights(module, dtype, device)
        module.requires_grad_(False)
    net.tie_weights()
    net.model.to_empty(device=device, recurse=False)  # the tables of angles
    model.checkpoint_blocks(net, QLORA.checkpointing)
    adapters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return net, [torch.optim.AdamW(adapters, lr=10 * shapes.recipe(name).lr, weight_decay=0.0, fused=True)]


def loss_of(net: nn.Module, inputs: Tensor, targets: Tensor, autocast: Callable, chunk_tokens: int | None) -> Tensor:
    """The loss of one sequence. Without chunk_tokens all logits are made."""
    with autocast():
        if chunk_tokens is None:
            return net(inputs, targets)
        hidden = net.model(inputs).flatten(0, 1)
        return chunked_cross_entropy(hidden, net.lm_head.weight, targets.flatten(), chunk_tokens)


def training_step(
    net: nn.Module, optimizers: list, inputs: Tensor, targets: Tensor, autocast: Callable, chunk_tokens: int | None
) -> Tensor:
    """One step with one sequence."""
    loss = loss_of(net, inputs, targets, autocast, chunk_tokens)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()  # those inside backward have stepped, and find no gradient
        optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def draw_weights(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """As model.init_weights, which draws on the CPU: for 70 billion numbers that takes a quarter of an hour."""
    module.to(dtype).to_empty(device=device)
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1)


def available_bytes(device: torch.device) -> int:
    """What nobody uses on a GPU; on a CPU as much as a minute can fill."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_BYTES


def parse_args():
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", help="a named size or config.json (default: the largest that fits)")
    add("--tune", choices=("full", "qlora"), default="full", help="train all weights, or adapters on an int4 base")
    add("--memory", type=cli.positive, metavar="GIB", help="to stay within (default: what a GPU has free; on a CPU 4)")
    add("--seq-len", type=cli.positive_int, help="tokens of the one sequence per step (default: 4096; on a CPU 128)")
    add("--steps", type=cli.positive_int, default=10)
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="what matrices are multiplied in")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    add("--plot", type=cli.plot_file, metavar="PNG", default="runs/train_big.png", help="memory over the last step")
    return parser.parse_args()


def main() -> int:
    began = time.perf_counter()
    args = parse_args()
    device = runtime.single_device(args.device)
    runtime.seed(0, deterministic=False)
    dtype = hardware.choose_dtype(args.dtype, device)
    args.memory_bytes = args.memory * 2**30 if args.memory else available_bytes(device)
    tried = ladder(args, device, dtype)
    print_ladder(tried, args.memory_bytes)
    name, recipe, seq_len = (tried[-1][key] for key in ("model", "recipe", "seq_len"))

    corpus = data.load_corpus()
    config = shapes.load_config(name, corpus.vocab_size, seq_len)
    if args.tune == "qlora":
        net, optimizers = build_qlora(name, config, DTYPES[dtype], device)
    else:
        net, optimizers = build_full(name, config, recipe, device)
    batches = data.train_batches(
        corpus.train, seq_len=seq_len, global_batch_size=1, micro_batch_size=1, seed=0, device=device
    )
    # no cache: it would keep the bf16 copy of every weight until forward ends, and each is used once
    autocast = partial(torch.autocast, device.type, DTYPES[dtype], enabled=dtype != "fp32", cache_enabled=False)
    chunk_tokens = -(-seq_len // LOSS_CHUNKS) if recipe.chunked_loss else None

    first_batch = next(batches)
    batches = itertools.chain([first_batch], batches)

    def step() -> None:
        inputs, targets = (t.to(device) for t in next(batches))
        losses.append(training_step(net, optimizers, inputs, targets, autocast, chunk_tokens))

    losses, seconds = [], []
    for _ in range(args.steps - 1):
        start = time.perf_counter()
        step()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    memory = record_memory(step, device, held_tensors(net, optimizers))
    with torch.no_grad():
        again = loss_of(net, *(t.to(device) for t in first_batch), autocast, chunk_tokens)
    tell(args, tried, losses, again, seconds, memory, config, dtype, device, began)
    return 0


if __name__ == "__main__":
    exits.run(main)
