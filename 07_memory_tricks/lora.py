"""LoRA and QLoRA: freeze a model, and train two thin matrices beside each of its own.

Full fine-tuning holds 16 bytes per parameter: the weight, its gradient and AdamW's two averages, in fp32. LoRA freezes
each weight matrix W and trains two thin ones beside it: y = x W^T + alpha / rank * x A^T B^T. Only A and B
have gradients and optimizer state, and W, which no update is added to, needs no fp32 copy. QLoRA also rounds W to 4
bits and dequantizes it, one layer at a time, in forward and again in backward. The activations stay: A needs its input,
too. Afterwards W + alpha / rank * B A is one matrix again.

    laptop    python 07_memory_tricks/lora.py
    answers   python 07_memory_tricks/lora.py --model models/smollm2-135m   (make model makes it)
    one GPU   python 07_memory_tricks/lora.py --model llama-1b --seq-len 1024 --batch-size 4
    cluster   one process is all it uses. For chats of your own, on many GPUs: 06_fsdp_zero/finetune.py

A model with random weights is first trained on the standard library's source, then adapted to this repository's pages.
One with a chat template is adapted to lora_instructions.jsonl: held-out questions show whether it answers in their way.

Look for: bytes of weights, gradients and optimizer state by method, and how little the activations change; the loss on
text that no method has read. Before: offload.py. Next: packing.py.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _lora
from _shared import saved_for_backward

from common import exits, hardware, measure, report, runtime
from lm import data, model, reference, shapes, weights
from lm.lora import LoRALinear, adapt

METHODS = ("full", "lora", "qlora")
LORA_LR_FACTOR = 10  # adapters take a learning rate about so many times that of full fine-tuning
BASE_STEPS = 60  # from random weights, so that there is something to adapt
# weights that share a scale and a zero: 4 bits each, and 2 x 16 bits for all of them, make 4.5
GROUP = 64
TOLERANCE = 1e-5  # relative; sums of thousands of terms in fp32 came out 7e-7 apart on one CPU


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, two to a byte: uint8 [groups, GROUP / 2]; scale and zero: bf16 [groups, 1]. w is about zero + code * scale
    with a code of 0 to 15: between a group's smallest and largest weight."""
    groups = F.pad(weight.float().flatten(), (0, -weight.numel() % GROUP)).view(-1, GROUP)
    zero = groups.amin(1, keepdim=True).bfloat16()
    scale = ((groups.amax(1, keepdim=True) - zero) / 15).bfloat16()
    scale = torch.where(scale > 0, scale, 1)  # all weights of a group equal: 0 / 1, not 0 / 0
    codes = ((groups - zero) / scale).round().clamp(0, 15).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, zero


class QLoRALinear(LoRALinear):
    """The same adapter beside 4 bits per weight. They are buffers: no optimizer ever sees them."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(linear, rank, alpha)
        self.weight = None
        for name, tensor in zip(
            ("codes", "scale", "zero"), quantize_int4(linear.weight.detach()), strict=True
        ):
            self.register_buffer(name, tensor)

    def frozen_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)
        values = codes * self.scale.to(dtype) + self.zero.to(dtype)
        return values.flatten()[: self.out_features * self.in_features].view(
            self.out_features, self.in_features
        )

    def base(self, x: Tensor) -> Tensor:
        return (
            Int4Matmul.apply(x, self)
            if self.bias is None
            else Int4Matmul.apply(x, self) + self.bias
        )


class Int4Matmul(torch.autograd.Function):
    """x W^T with a frozen int4 W. Left to itself, autograd would keep the dequantized W of every layer until backward:
    QLoRA would take more memory than LoRA. So backward dequantizes it again."""

    @staticmethod
    def forward(context, x: Tensor, layer: QLoRALinear) -> Tensor:
        context.layer = layer
        return F.linear(x, layer.frozen_weight(x.dtype))

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple:
        return gradient @ context.layer.frozen_weight(gradient.dtype), None


def merged_error(layer: LoRALinear, device: torch.device) -> float:
    """How far an adapted layer is at most from one with the merged matrix W', for random inputs and gradients, in fp32.
    If G is the gradient of W' = W + s B A, the chain rule gives s B^T G for A and s G A^T for B."""
    # bf16 values are fp32 values: nothing is rounded
    layer = copy.deepcopy(layer).to(device, torch.float32)
    a, b, s = layer.lora_A, layer.lora_B, layer.scaling
    x = torch.randn(32, layer.in_features, device=device, requires_grad=True)
    upstream = torch.randn(32, layer.out_features, device=device)
    output = layer(x)
    found = [output, *torch.autograd.grad(output, (x, a, b), upstream)]
    merged_weight = layer.merged_weight().requires_grad_()
    output = F.linear(x, merged_weight, layer.bias)
    x_gradient, gradient = torch.autograd.grad(output, (x, merged_weight), upstream)
    expected = [output, x_gradient, s * b.T @ gradient, s * gradient @ a.T]
    return max(
        measure.relative_error(one, other) for one, other in zip(found, expected, strict=True)
    )


def training_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], autocast
) -> Tensor:
    """Leaves the gradients, so that they can be counted."""
    optimizer.zero_grad()
    with autocast():
        loss = net(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_([weight for weight in net.parameters() if weight.requires_grad], 1.0)
    optimizer.step()
    return loss.detach()


def run(
    method: str, base: model.Transformer, task: _lora.Task, args, autocast, device
) -> tuple[dict, Callable]:
    """Train with one method: its row, and one more step, to be timed beside those of the others."""
    others_bytes = measure.LiveBytes(device=device).now  # on CUDA what other methods hold
    net = copy.deepcopy(base).to(device)
    kind = QLoRALinear if method == "qlora" else LoRALinear
    if method != "full":
        runtime.seed_all(0)  # LoRA and QLoRA start from the same A
        # no update that bf16 could lose
        net.to(torch.bfloat16 if args.dtype == "bf16" else torch.float32)
        adapt(net, rank=args.rank, alpha=args.alpha, kind=kind)
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    lr = args.lr / LORA_LR_FACTOR if method == "full" else args.lr
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True)
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in task.batches]

    digest, val_loss_before = _lora.frozen_digest(net), _lora.evaluate(net, task.held_out, autocast)
    with saved_for_backward(net) as saved, autocast():
        net(*batches[0])
    losses = [training_step(net, optimizer, batch, autocast) for batch in batches]
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    row = {
        "method": method,
        "lr": lr,
        "trained_parameters": sum(weight.numel() for weight in trained),
        # tied ones once
        "weight_bytes": sum({t.data_ptr(): t.nbytes for t in net.state_dict().values()}.values()),
        "gradient_bytes": sum(weight.grad.nbytes for weight in trained),
        "optimizer_bytes": sum(tensor.nbytes for tensor in state),
        "activation_bytes": sum(saved["activations"].values()),
        "losses": torch.stack(losses).tolist(),
        "val_loss_before": val_loss_before,
        "val_loss_after": _lora.evaluate(net, task.held_out, autocast),
        "frozen_sha256": (digest, _lora.frozen_digest(net)),
    }
    optimizer.zero_grad()
    if method != "full":
        adapted = [layer for layer in net.modules() if isinstance(layer, kind)]
        with reference.comparison(device) as where:
            row["merged_error"] = max(merged_error(layer, where) for layer in adapted)
        merged = copy.deepcopy(base).to(device)
        for name, layer in net.named_modules():
            if isinstance(layer, kind):
                merged.get_submodule(name).weight = nn.Parameter(layer.merged_weight())
        row["val_loss_merged"] = _lora.evaluate(merged, task.held_out, autocast)
        del merged  # or a GPU's peak would count it
    row["answer"] = task.answer(net, autocast)
    one_more_step = partial(training_step, net, optimizer, batches[0], autocast)
    with measure.LiveBytes([*net.parameters(), *net.buffers(), *state], device) as memory:
        one_more_step()
    return row | {"peak_memory_bytes": memory.peak - others_bytes}, one_more_step


def check(rows: list[dict], dtype: str) -> list[str]:
    checked = []
    for row in rows:
        if row["method"] != "full":
            name, error = row["method"], row["merged_error"]
            assert len(set(row["frozen_sha256"])) == 1, f"{name} changed what it had frozen"
            checked.append(
                f"{name}'s frozen weights have the same SHA-256 before and after training"
            )
            assert error <= TOLERANCE, f"{name}: a layer differs from its merged one by {error:.1e}"
            checked.append(
                f"{name}'s layers and merged ones, outputs and gradients in fp32: {error:.0e} apart"
            )
    if len(rows) == len(METHODS):
        full, lora, qlora = rows
        if dtype == "fp32":
            error = abs(lora["val_loss_before"] / full["val_loss_before"] - 1)
            assert error <= TOLERANCE, (
                f"lora does not start from the model as it is: its loss is {error:.0e} off"
            )
        assert qlora["activation_bytes"] == lora["activation_bytes"], (
            "qlora keeps dequantized weights for backward"
        )
        assert full["peak_memory_bytes"] > lora["peak_memory_bytes"] > qlora["peak_memory_bytes"], (
            "peaks do not fall"
        )
        checked.append(
            "qlora keeps for backward what lora keeps, no dequantized weight; the peaks fall in this order"
        )
    return checked


def main() -> int:
    choices = {"method": ("all", *METHODS), "dtype": ("auto", "fp32", "bf16")}
    args = report.lesson_flags(
        __doc__, model="nano", rank=8, alpha=16.0, steps=20, batch_size=4, seq_len=128, **choices
    )
    device = report.start_lesson(args.device)
    args.dtype = hardware.choose_dtype(args.dtype, device)
    trained_before = shapes.has_weights(args.model)
    # for nano, 1e-2 ended lower than 1e-3 and 2e-2 did; 1e-3 is a common choice for a model that has been trained
    args.lr = 1e-3 if trained_before else 5 * shapes.recipe(args.model).lr
    task = _lora.choose_task(args)
    args.seq_len = task.batches[0][0].size(1)
    config = shapes.load_config(args.model, task.vocab_size, args.seq_len)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.dtype == "bf16")
    base = weights.build(args.model, config, seed=0, device=device)
    if not trained_before:
        text = _lora.make_batches(data.load_corpus("stdlib"), seq_len=64, batch_size=16)
        optimizer = torch.optim.AdamW(
            base.parameters(), lr=shapes.recipe(args.model).lr, fused=True
        )
        for inputs, targets in islice(text.stream(0), BASE_STEPS):
            training_step(base, optimizer, (inputs.to(device), targets.to(device)), autocast)
        optimizer.zero_grad()
    answer_before = task.answer(base, autocast)
    base.cpu()  # from here on it is only copied from
    rows, steps = [], {}
    for method in METHODS if args.method == "all" else (args.method,):
        row, steps[method] = run(method, base, task, args, autocast, device)
        rows.append(row)
    seconds = measure.seconds_in_turns(steps, device, rounds=3)
    rows = [{**row, **seconds[row["method"]]} for row in rows]
    if task.question is not None:
        print(f"question, held out: {task.question}\n  before: {answer_before}")
        for row in rows:
            print(f"  after {row['method']}: {row['answer']}")
    shown = rows[len(rows) // 2]  # of all three LoRA, whose losses are the summary's
    columns = {
        "method": "method",
        "trained_parameters": "trained",
        "weight_bytes": "weights",
        "optimizer_bytes": "AdamW",
        "activation_bytes": "activations",
        "peak_memory_bytes": "peak",
        "time_ratio": "time",
        "val_loss_after": "held-out loss",
    }
    report.end_lesson(
        rows,
        columns=columns,
        checked=check(rows, args.dtype),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        tokens=args.steps * args.batch_size * args.seq_len,
        first_loss=shown["losses"][0],
        last_loss=shown["losses"][-1],
        val_loss=shown["val_loss_after"],
        question=task.question,
        answer_before=answer_before,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
