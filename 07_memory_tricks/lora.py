"""LoRA and QLoRA: freeze a model, and train two thin matrices beside each linear layer.

Full fine-tuning holds 16 bytes per parameter: the weight, its gradient and AdamW's two moments, all
fp32. LoRA freezes the model. To the weight W, [out, in], of each linear layer in its blocks it adds
a product of two thin matrices, and trains only these:

    y = W x + (alpha / rank) B A x        A: [rank, in]    B: [out, rank]

Only A and B have gradients and optimizer state. W receives no update, so with --dtype bf16 it is
bf16. QLoRA stores W in 4 bits, and dequantizes it layer by layer in forward and again in backward.
Most activations stay, because the gradient of A needs the layer's input, as that of W did. After
training, W + (alpha / rank) B A can be merged into one matrix.

    laptop    python 07_memory_tricks/lora.py
    answers   python 07_memory_tricks/lora.py --model models/smollm2-135m   (first: make model)
    one GPU   python 07_memory_tricks/lora.py --device cuda
    cluster   it uses one process only; for your own chats, on many GPUs: 06_fsdp_zero/finetune.py

The default model, nano, has random weights. It is first trained on the source text of the standard
library, and then adapted to this repository's pages. A model with a chat template is adapted to
lora_instructions.jsonl: a held-out question shows whether it answers in that style.

What to look at: the bytes of weights, gradients and optimizer state of each method, and how little
the activations change. Compare the loss on held-out text. Expected on an H100, where the
model is wider: 871 MiB of weights, gradients and optimizer state for all weights, 116 MiB for LoRA,
38 MiB for QLoRA. By the data sheet's 989 TFLOP/s a step of full fine-tuning takes at least 10 ms,
and one of LoRA, which computes no gradient of W, at least 7 ms.
Previous: offload.py. Next: packing.py.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _lora
import torch
import torch.nn.functional as F
from _saved_tensors import saved_for_backward
from torch import Tensor, nn

from common import hardware, lesson, measure, runtime
from lm import data, model, reference, shapes, weights

# --- 1. LoRA (Hu et al. 2021, arXiv:2106.09685)


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter: y = W x + (alpha / rank) B A x."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight = linear.weight  # W: [out, in]
        self.bias = linear.bias
        self.scaling = alpha / rank
        out_features, in_features = linear.weight.shape
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, in_features, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        # B = 0: training starts from the model as it is. With A = 0, too, both gradients would be
        # zero: that of A has B as a factor, and that of B has A.
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:  # [..., in]
        output = F.linear(x, self.weight, self.bias)  # [..., out]
        low_rank = F.linear(x, self.lora_A)  # [..., rank]
        return output + F.linear(low_rank, self.lora_B) * self.scaling

    def frozen_weight(self) -> Tensor:
        """Return W in fp32, [out, in]."""
        return self.weight.detach().float()

    def merged_weight(self) -> Tensor:
        """Return the W of a plain linear layer that computes the same, in fp32, [out, in]."""
        update = self.lora_B.detach() @ self.lora_A.detach()
        return self.frozen_weight() + self.scaling * update


def adapt(net: model.Transformer, rank: int, alpha: float, kind: type[LoRALinear]) -> None:
    """Freeze a model, and give each linear layer of its blocks an adapter.

    lm/lora.py has this function and LoRALinear for finetune.py, which shards and saves adapters.
    """
    net.requires_grad_(False)
    for block in net.model.layers.values():
        for name, module in list(block.named_modules()):  # a list: the loop replaces modules
            if isinstance(module, nn.Linear):
                block.set_submodule(name, kind(module, rank, alpha))


# --- 2. QLoRA (Dettmers et al. 2023, arXiv:2305.14314)
#
# The paper stores W in 4 bits as NF4, whose 16 values follow quantiles of a normal distribution.
# Here they are evenly spaced: plain int4.

# So many weights share a scale and a minimum of 16 bits each: 4 + 2 x 16 / 64 = 4.5 bits a weight.
GROUP = 64


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight to 16 values between the smallest and the largest of its group.

    The code of a weight, 0 to 15, is the number of its value: the weight is about minimum + code *
    scale. Return the codes, two per byte, uint8 [groups, GROUP / 2], and scale and minimum, each
    bf16 [groups, 1].
    """
    padding = -weight.numel() % GROUP
    groups = F.pad(weight.float().flatten(), (0, padding)).view(-1, GROUP)
    minimum = groups.amin(1, keepdim=True).bfloat16()
    scale = ((groups.amax(1, keepdim=True) - minimum) / 15).bfloat16()
    scale = torch.where(scale > 0, scale, 1)  # in a group of equal weights: 0 / 1, not 0 / 0
    codes = ((groups - minimum) / scale).round().clamp(0, 15).to(torch.uint8)
    low = codes[:, ::2]
    high = codes[:, 1::2]
    return low | high << 4, scale, minimum


class QLoRALinear(LoRALinear):
    """The same adapter beside a weight of 4 bits, which is held in buffers, not in a parameter."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(linear, rank, alpha)
        self.weight = None
        codes, scale, minimum = quantize_int4(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("minimum", minimum)
        self.shape = linear.weight.shape

    def frozen_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized W, [out, in]."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)
        values = codes * self.scale.to(dtype) + self.minimum.to(dtype)  # [groups, GROUP]
        return values.flatten()[: self.shape.numel()].view(self.shape)

    def forward(self, x: Tensor) -> Tensor:  # [..., in]
        output = Int4Matmul.apply(x, self)  # [..., out]
        if self.bias is not None:
            output = output + self.bias
        low_rank = F.linear(x, self.lora_A)  # [..., rank]
        return output + F.linear(low_rank, self.lora_B) * self.scaling


class Int4Matmul(torch.autograd.Function):
    """Multiply by a frozen W of 4 bits, and keep nothing for backward.

    With F.linear autograd would keep the dequantized W of every layer until backward, and QLoRA
    would take more memory than LoRA. So backward dequantizes W again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, layer: QLoRALinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.frozen_weight(x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.frozen_weight(gradient.dtype), None


# --- 3. training

KINDS = {"full": None, "lora": LoRALinear, "qlora": QLoRALinear}
LORA_LR_FACTOR = 10  # adapters take about ten times the learning rate of full fine-tuning
BASE_STEPS = 60  # steps that train a model with random weights before it is adapted


def training_step(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    autocast: _lora.Autocast,
) -> Tensor:
    """Take one step, and return its loss. The gradients stay, so that they can be counted."""
    optimizer.zero_grad()
    with autocast():
        loss = net(*batch)
    loss.backward()
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    return loss.detach()


def run(
    method: str,
    base: model.Transformer,
    task: _lora.Task,
    args,
    autocast: _lora.Autocast,
    device: torch.device,
) -> tuple[dict, Callable[[], Tensor]]:
    """Train with one method. Return its row, and one more step that can be timed."""
    bytes_before = measure.LiveBytes(device=device).now  # on CUDA: what the other methods hold
    net = copy.deepcopy(base).to(device)
    lr = args.lr
    if method == "full":
        lr = args.lr / LORA_LR_FACTOR
    else:
        runtime.seed_all(0)  # LoRA and QLoRA start from the same A
        # W gets no updates, so bf16 rounds none away.
        net.to(torch.bfloat16 if args.dtype == "bf16" else torch.float32)
        adapt(net, args.rank, args.alpha, KINDS[method])
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True)

    digest_before = _lora.frozen_digest(net)
    val_loss_before = _lora.evaluate(net, task.held_out, autocast)
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in task.batches]
    with saved_for_backward(net) as saved, autocast():
        net(*batches[0])
    losses = [training_step(net, optimizer, batch, autocast) for batch in batches]

    state = []
    for values in optimizer.state.values():
        state += values.values()
    row = {
        "method": method,
        "lr": lr,
        "trained_parameters": sum(weight.numel() for weight in trained),
        "weight_bytes": _lora.weight_bytes(net),
        "gradient_bytes": sum(weight.grad.nbytes for weight in trained),
        "optimizer_bytes": sum(tensor.nbytes for tensor in state),
        "activation_bytes": sum(saved["activations"].values()),
        "losses": torch.stack(losses).tolist(),
        "val_loss_before": val_loss_before,
        "val_loss_after": _lora.evaluate(net, task.held_out, autocast),
        "frozen_sha256": (digest_before, _lora.frozen_digest(net)),
    }
    optimizer.zero_grad()
    if method != "full":
        row |= compare_with_merged(net, base, task, autocast, device)
    row["answer"] = task.answer(net, autocast)

    one_more_step = partial(training_step, net, optimizer, batches[0], autocast)
    with measure.LiveBytes([*net.parameters(), *net.buffers(), *state], device) as memory:
        one_more_step()
    row["peak_memory_bytes"] = memory.peak - bytes_before
    return row, one_more_step


def compare_with_merged(
    net: nn.Module,
    base: model.Transformer,
    task: _lora.Task,
    autocast: _lora.Autocast,
    device: torch.device,
) -> dict:
    """Return the largest error of adapted against merged layers, and the merged held-out loss."""
    adapted = {name: layer for name, layer in net.named_modules() if isinstance(layer, LoRALinear)}
    with reference.comparison(device) as where:
        errors = [_lora.merged_error(layer, where) for layer in adapted.values()]
    merged = copy.deepcopy(base).to(device)
    for name, layer in adapted.items():
        merged.get_submodule(name).weight = nn.Parameter(layer.merged_weight())
    return {
        "merged_error": max(errors),
        "val_loss_merged": _lora.evaluate(merged, task.held_out, autocast),
    }


def train_base(
    net: nn.Module, model_name: str, autocast: _lora.Autocast, device: torch.device
) -> None:
    """Train a model with random weights on the standard library's source, to have a base."""
    text = _lora.make_batches(data.load_corpus("stdlib"), seq_len=64, batch_size=16)
    lr = shapes.recipe(model_name).lr
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, fused=True)
    for inputs, targets in islice(text.stream(0), BASE_STEPS):
        training_step(net, optimizer, (inputs.to(device), targets.to(device)), autocast)
    optimizer.zero_grad()


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "batch_size": 6, "seq_len": 4096},
        model="nano",
        rank=8,
        alpha=16.0,
        steps=20,
        batch_size=4,
        seq_len=128,
        method=("all", *KINDS),
        dtype=("auto", "fp32", "bf16"),
    )
    device = lesson.start(args.device)
    args.dtype = hardware.choose_dtype(args.dtype, device)
    has_weights = shapes.has_weights(args.model)
    # The learning rate of the adapters; full fine-tuning takes a tenth of it. 1e-3 is common for a
    # pretrained model. nano takes 5 times its recipe's, 1e-2: its loss was lower than with 1e-3 and
    # 2e-2.
    args.lr = 1e-3 if has_weights else 5 * shapes.recipe(args.model).lr
    task = _lora.choose_task(args)
    args.seq_len = task.batches[0][0].size(1)
    config = weights.load_config(args.model, task.vocab_size, args.seq_len)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=args.dtype == "bf16")
    base = weights.build(args.model, config, seed=0, device=device)
    if not has_weights:
        train_base(base, args.model, autocast, device)
    answer_before = task.answer(base, autocast)
    base.cpu()  # from here on it is only copied from

    methods = list(KINDS) if args.method == "all" else [args.method]
    rows = []
    steps = {}
    for method in methods:
        row, steps[method] = run(method, base, task, args, autocast, device)
        rows.append(row)
    seconds = measure.seconds_in_turns(steps, device, rounds=3)
    for row in rows:
        row |= seconds[row["method"]]

    if task.question is not None:
        print(f"question, held out: {task.question}\n  before: {answer_before}")
        for row in rows:
            print(f"  after {row['method']}: {row['answer']}")
    shown = rows[len(rows) // 2]  # LoRA, if all three ran: the summary has its losses
    lesson.end(
        rows,
        columns=_lora.COLUMNS,
        checked=_lora.check(rows, args.dtype),
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
