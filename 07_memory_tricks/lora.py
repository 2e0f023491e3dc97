"""LoRA and QLoRA: freeze a model, and train two thin matrices beside each of its own.

Full fine-tuning holds 16 bytes per parameter: the weight, its gradient and AdamW's two averages, in fp32. LoRA freezes
each weight matrix W and trains a product of two thin ones beside it: y = W x + alpha / rank * B A x. Only A and B have
gradients and optimizer state, and W, which no update is added to, needs no fp32 copy. QLoRA also rounds W to 4 bits and
dequantizes it, one layer at a time, in forward and again in backward. The activations stay: A needs its input, too.

    laptop    python 07_memory_tricks/lora.py
    answers   python 07_memory_tricks/lora.py --model models/smollm2-135m --save runs/adapters   (make model makes it)
    one GPU   python 07_memory_tricks/lora.py --model llama-1b --seq-len 1024 --batch-size 4
    cluster   one process is all it uses; adapters this small need no sharding, and their base can be sharded as in 06

A model with random weights is first trained on the standard library's source, then adapted to the pages (*.md) of this
repository. One with a chat template (make model) is adapted to the instructions in lora_instructions.jsonl: held-out
questions show whether it has learnt to answer in their way.

Look for: bytes of weights, gradients and optimizer state by method, and how little the activations change; the loss on
text that no method has read. Before: offload.py. Next: cuda_graphs.py.
"""

import copy
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _lora_checks import check_layers, frozen_digest
from _lora_flags import LORA_LR_FACTOR, has_weights, parse_args
from _lora_peft import save_for_peft
from _lora_report import Run, note_memory, note_saved_bytes, print_runs, summarize, timed
from _lora_tasks import choose_task, evaluate, train_base

from old import exits, hardware, model, report, runtime, shapes, step_cost

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLIP_NORM = 1.0
GROUP = 64  # weights that share a scale and a zero: 4 bits each, and 2 x 16 bits for all of them, make 4.5


class LoRALinear(nn.Module):
    """W x + alpha / rank * B A x. W is frozen. B starts at zero, so that training starts from the model as it is."""

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scaling = alpha / rank  # with it the same learning rate serves many ranks
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)  # random: if both were zero, both would stay so
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scaling

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """One matrix that does the same, in fp32. In bf16 the rounding of W could swallow the small product."""
        return self.base.weight.float() + self.scaling * self.lora_B.weight.float() @ self.lora_A.weight.float()


def adapt_block(block: nn.Module, *, rank: int, alpha: float, int4: bool) -> None:
    """Freeze one block and put adapters beside its linear layers. With int4 their weights are rounded: the block alone
    is ever there in both forms, so that a model can be built, rounded and kept block by block."""
    block.requires_grad_(False)
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        with torch.device(linear.weight.device):
            base = Int4Linear(linear) if int4 else linear
            block.set_submodule(name, LoRALinear(base, rank, alpha))


def adapt(net: model.Transformer, *, rank: int, alpha: float, int4: bool, dtype: torch.dtype) -> None:
    """What is frozen takes no updates that bf16 could lose: it is kept in `dtype`. Adapters are fp32."""
    net.requires_grad_(False).to(dtype)  # embedding, norms and head as well
    for block in net.model.layers.values():
        adapt_block(block, rank=rank, alpha=alpha, int4=int4)


class Int4(NamedTuple):
    codes: Tensor  # uint8 [groups, GROUP / 2]: two to a byte
    scale: Tensor  # bf16 [groups, 1]
    zero: Tensor  # bf16 [groups, 1]: what code 0 stands for


def quantize_int4(weight: Tensor) -> Int4:
    """w is about zero + code * scale with a code of 0 to 15: between a group's smallest and largest weight."""
    groups = F.pad(weight.float().flatten(), (0, -weight.numel() % GROUP)).view(-1, GROUP)
    zero = groups.amin(1, keepdim=True).bfloat16()
    scale = ((groups.amax(1, keepdim=True) - zero) / 15).bfloat16()
    scale = torch.where(scale > 0, scale, 1)  # all weights of a group equal: 0 / 1, not 0 / 0
    codes = ((groups - zero) / scale).round().clamp(0, 15).to(torch.uint8)
    return Int4(codes[:, ::2] | codes[:, 1::2] << 4, scale, zero)


def dequantize_int4(weight: Int4, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).flatten(1)
    values = codes * weight.scale.to(dtype) + weight.zero.to(dtype)
    return values.flatten()[: shape[0] * shape[1]].view(shape)


class Int4Product(torch.autograd.Function):
    """x W^T with a frozen int4 W. Left to itself, autograd would keep the dequantized W of every layer until backward:
    QLoRA would take more memory than LoRA. So backward gets the codes and dequantizes them again."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Int4, shape: tuple[int, int]) -> Tensor:
        ctx.weight, ctx.shape = weight, shape
        return F.linear(x, dequantize_int4(weight, shape, x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient @ dequantize_int4(ctx.weight, ctx.shape, gradient.dtype), None, None


class Int4Linear(nn.Module):
    """A frozen linear layer without bias. Buffers, not parameters: no optimizer ever sees them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        for name, tensor in quantize_int4(linear.weight.detach())._asdict().items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        return dequantize_int4(self.int4(), (self.out_features, self.in_features), torch.float32)

    def int4(self) -> Int4:
        return Int4(self.codes, self.scale, self.zero)

    def forward(self, x: Tensor) -> Tensor:
        return Int4Product.apply(x, self.int4(), (self.out_features, self.in_features))


def merge(net: model.Transformer) -> None:
    """Back to plain layers in fp32, of the same names and sizes as before: nothing is left to compute beside them."""
    layers = {name: module for name, module in net.named_modules() if isinstance(module, LoRALinear)}
    for name, layer in layers.items():
        plain = nn.Linear(layer.base.in_features, layer.base.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(layer.merged_weight())
        net.set_submodule(name, plain)
    net.float()


def new_run(method: str, base: model.Transformer, args, dtype: torch.dtype, device: torch.device) -> Run:
    net = copy.deepcopy(base).to(device)
    if method != "full":
        runtime.seed(args.seed, deterministic=False)  # LoRA and QLoRA start from the same A
        adapt(net, rank=args.rank, alpha=args.alpha, int4=method == "qlora", dtype=dtype)
    trained = [p for p in net.parameters() if p.requires_grad]
    lr = args.lr / LORA_LR_FACTOR if method == "full" else args.lr
    return Run(method, net, trained, torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True), lr)


def training_step(run: Run, batch: tuple[Tensor, Tensor], autocast) -> None:
    with autocast():
        loss = run.net(*batch)
    loss.backward()
    clip_grad_norm_(run.trained, CLIP_NORM)
    run.optimizer.step()
    run.gradient_bytes = sum(p.grad.nbytes for p in run.trained)
    run.optimizer.zero_grad(set_to_none=True)
    run.losses.append(loss.detach())


def main() -> int:
    started = time.perf_counter()
    args = parse_args(__doc__)
    device = runtime.single_device(args.device)
    runtime.exact_fp32(device)
    dtype = hardware.choose_dtype(args.dtype, device)
    autocast = partial(torch.autocast, device.type, DTYPES[dtype], enabled=dtype != "fp32")
    task = choose_task(
        args.model, steps=args.steps, batch_size=args.batch_size, seq_len=args.seq_len, seed=args.seed, device=device
    )
    config = shapes.load_config(args.model, task.vocab_size, task.seq_len)
    print(f"{args.model}, {dtype} products, {hardware.device_name(device)}; {task.about}", flush=True)

    base = model.build(args.model, config, seed=args.seed, device=device)
    if not has_weights(args.model):
        train_base(base, autocast, lr=shapes.recipe(args.model).lr, seed=args.seed)
    answer_before = task.answer(base, autocast)
    base.cpu()  # from here on it is only copied from
    runs = [new_run(method, base, args, DTYPES[dtype], device) for method in args.methods]
    digests = [frozen_digest(run.net) for run in runs]
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in task.batches]
    for run in runs:
        run.val_loss_before = evaluate(run.net, task.held_out, autocast)
        note_saved_bytes(run, batches[0], autocast)
    for batch in batches[:-1]:
        for run in runs:  # in turns: what disturbs one disturbs all
            run.seconds.append(timed(partial(training_step, run, batch, autocast), device))
    for run in runs:
        note_memory(run, partial(training_step, run, batches[-1], autocast), device)
        run.val_loss_after = evaluate(run.net, task.held_out, autocast)

    rows = [summarize(run) for run in runs]
    for run, digest, row in zip(runs, digests, rows, strict=True):
        if run.method != "full":
            assert frozen_digest(run.net) == digest, f"{run.method} changed what it had frozen"
            print(f"checked: {run.method}'s frozen weights have the same SHA-256 before and after {args.steps} steps")
            error = check_layers(run.net)
            print(f"checked: {run.method}'s layers and merged ones, outputs and gradients in fp32: {error:.0e} apart")
            if args.save:
                save_for_peft(run.net, args.save / run.method, base=args.model, rank=args.rank, alpha=args.alpha)
                print(f"saved for peft: {args.save / run.method}")
            merge(run.net)
            row["val_loss_merged"] = evaluate(run.net, task.held_out, autocast)
        row["answer"] = task.answer(run.net, autocast)
    print_runs(rows, question=task.question, answer_before=answer_before)
    if device.type != "cuda":
        print("left out: what torch's allocator holds (CUDA only); peaks are of the tensors that are alive")
    if plot := step_cost.plot_memory({run.method: run.memory for run in runs}, args.plot):
        print(f"plot: {plot}")
    shown = next((row for row in rows if row["method"] == "lora"), rows[0])  # whose losses are the summary's
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "steps": args.steps,
        "tokens": args.steps * args.batch_size * task.seq_len,
        "first_loss": shown["losses"][0],
        "last_loss": shown["losses"][-1],
        "val_loss": shown["val_loss_after"],
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - started,
        "rank": args.rank,
        "alpha": args.alpha,
        "seq_len": task.seq_len,
        "question": task.question,
        "answer_before": answer_before,
        "methods": rows,
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
