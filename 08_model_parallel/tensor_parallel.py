"""Tensor parallelism by hand: each rank holds a part of every matrix, and all ranks work on the same tokens.

A block has two pairs of matrices: q, k, v and o in attention; gate, up and down in the MLP. The first of a pair is cut
by columns, so each rank computes whole heads, or some of the MLP's channels, alone. The second is cut by rows, so each
rank ends with a summand of the output. One all-reduce per pair adds them up, and backward has one more where the pair
begins (Megatron-LM: Shoeybi et al. 2019, section 3). Embedding and head are cut by vocabulary, and the cross-entropy is
computed from cut logits. Norms and residuals are still whole on every rank. Sequence parallelism (Korthikanti et al.
2022) cuts these by position: each all-reduce becomes a reduce-scatter and an all-gather, which send the same bytes.

    laptop    python 08_model_parallel/tensor_parallel.py
              torchrun --nproc_per_node=4 08_model_parallel/tensor_parallel.py --seq-len 32
    one node  torchrun --nproc_per_node=4 08_model_parallel/tensor_parallel.py --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400: it works, but
              every block waits for four collectives, so keep the ranks of one copy of the model inside a node

Look for: the share of the weights that a rank holds; calls and bytes per step, which grow with tokens and layers, not
with weights; the difference from one process. Before: 06_fsdp_zero/zero_from_scratch.py. What it costs:
benchmarks/tensor_parallel.py.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _tensor_parallel_report import Seen, check_sizes, compare_gradients, conclude

from common import cli, data, exits, model, runtime, shapes

LEARNING_RATE = 0.1
Batch = tuple[Tensor, Tensor]  # inputs and targets
# torch 2.13 has new names for these two
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Which dimension of a weight is cut, by the module that holds it. nn.Linear stores [outputs, inputs], so the columns of
# the papers' XA are dimension 0. What is not named here, the norms, is whole on every rank.
CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}  # attention: by heads
CUT |= {"gate_proj": 0, "up_proj": 0, "down_proj": 1}  # MLP: by channels
CUT |= {"embed_tokens": 0, "lm_head": 0}  # by vocabulary


class Conjugate(torch.autograd.Function):
    """One function in forward, another in backward: autograd cannot know what the other ranks do with a tensor."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Callable, backward: Callable) -> Tensor:
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(gradient), None, None


def f(x: Tensor) -> Tensor:
    """Where a pair begins. All ranks use the same x, so its gradient is the sum of what each of them finds."""
    return Conjugate.apply(x, identity, sum_over_ranks)


def g(x: Tensor) -> Tensor:
    """Where a pair ends. The result is the sum over the ranks, so its gradient is that of every summand."""
    return Conjugate.apply(x, sum_over_ranks, identity)


def f_of_sequence(x: Tensor) -> Tensor:
    """f where a rank comes with its positions alone: the pair needs all of them."""
    return Conjugate.apply(x, gather_positions, sum_of_my_positions)


def g_of_sequence(x: Tensor) -> Tensor:
    """g where a rank goes on with its positions alone."""
    return Conjugate.apply(x, sum_of_my_positions, gather_positions)


def cut_model(net: nn.Module, f: Callable, g: Callable) -> None:
    """Keep this rank's part of each weight, and put f and g around each pair. The modules compute as they did."""
    for name, parameter in net.named_parameters():
        if (dimension := cut_dimension(name)) is not None:
            parameter.data = my_part(parameter.data, dimension).clone()  # in place: tied weights stay tied
    for block in net.model.layers.values():
        for pair in (block.self_attn, block.mlp):
            pair.register_forward_pre_hook(lambda _, inputs: (f(inputs[0]), *inputs[1:]))
            pair.register_forward_hook(lambda _, inputs, output: g(output))
    embedding = net.model.embed_tokens
    embedding.forward = lambda tokens: g(look_up(embedding.weight, tokens, net.config.vocab_size))
    net.lm_head.register_forward_pre_hook(lambda _, inputs: f(inputs[0]))


def look_up(weight: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """The rows of the tokens that this rank holds, and zeros for the others. The sum over the ranks has all rows."""
    row, mine = my_rows(tokens, vocab_size)
    return F.embedding(row, weight) * mine[..., None]


def cut_cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """The mean over all targets of log(sum of exp(logits)) - logit of the target, where a rank has some of the logits.

    Three numbers per token travel, not a row of logits: the largest, the sum and the target's.
    """
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # shifts all logits alike, so it needs no gradient
    logits = logits - largest[..., None]
    row, mine = my_rows(targets, vocab_size)
    logit_of_target = logits.gather(-1, row[..., None]).squeeze(-1) * mine
    sum_of_exp, logit_of_target = g(torch.stack([logits.exp().sum(-1), logit_of_target]))
    return (sum_of_exp.log() - logit_of_target).mean()


def clip_gradients(net: nn.Module, most: float) -> Tensor:
    """As clip_grad_norm_. Every rank must divide by the same norm, that of the whole gradient: cut weights count over
    all ranks, and those that each rank holds whole count once."""
    squares = {"cut": torch.zeros((), device=net.lm_head.weight.device)}
    squares["whole"] = squares["cut"].clone()
    for name, parameter in net.named_parameters():
        squares["whole" if cut_dimension(name) is None else "cut"] += parameter.grad.square().sum()
    dist.all_reduce(squares["cut"])
    norm = (squares["cut"] + squares["whole"]).sqrt()
    nn.utils.clip_grads_with_norm_(net.parameters(), most, norm)
    return norm


def add_up_norms(net: nn.Module) -> None:
    """With sequence parallelism a norm sees this rank's positions alone, so its gradient is a summand."""
    gradients = [parameter.grad for name, parameter in net.named_parameters() if cut_dimension(name) is None]
    together = torch.stack(gradients)  # they all have hidden_size elements
    dist.all_reduce(together)
    for gradient, total in zip(gradients, together, strict=True):
        gradient.copy_(total)


# The small parts of the above.


def identity(x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd wants a new tensor


def sum_over_ranks(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def gather_positions(x: Tensor) -> Tensor:
    """[batch, length / N, hidden] to [batch, length, hidden]."""
    n = dist.get_world_size()
    parts = x.new_empty(n * len(x), *x.shape[1:])  # one after the other, as they come
    all_gather(parts, x.contiguous())
    return torch.cat(parts.chunk(n), dim=1)


def sum_of_my_positions(x: Tensor) -> Tensor:
    """[batch, length, hidden] to [batch, length / N, hidden], summed over the ranks."""
    parts = torch.cat(x.chunk(dist.get_world_size(), dim=1))  # rank r gets the r-th
    mine = parts.new_empty(len(x), *parts.shape[1:])
    reduce_scatter(mine, parts)
    return mine


def cut_dimension(name: str) -> int | None:
    """Of a parameter by its name, such as model.layers.0.mlp.up_proj.weight."""
    return CUT.get(name.split(".")[-2])


def my_part(tensor: Tensor, dimension: int) -> Tensor:
    """The first parts have one row more where the ranks do not divide the rows."""
    return tensor.tensor_split(dist.get_world_size(), dimension)[dist.get_rank()]


def my_rows(tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """In this rank's part of the vocabulary, the row of each token; and whether it is there. If not, row 0."""
    rows = my_part(torch.arange(vocab_size), 0)
    mine = (tokens >= rows[0]) & (tokens <= rows[-1])
    return (tokens - rows[0]).where(mine, 0), mine


# The same by torch.


def parallelize_with_torch(net: nn.Module) -> None:
    """The same cuts, with sequence parallelism, as a plan: DTensors know how they are cut, and what follows from it."""
    mesh = runtime.device_mesh(net.lm_head.weight.device, {"tensor": dist.get_world_size()})
    positions = Shard(1)  # of [batch, length, hidden]
    whole = Replicate()
    attention_input = PrepareModuleInput(
        input_layouts=(positions, None, None),  # beside it, cos and sin for all positions
        desired_input_layouts=(whole, None, None),
    )
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=positions),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": attention_input,
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=positions),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=positions, desired_input_layouts=whole),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=positions),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=positions, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(net, mesh, plan, src_data_rank=None)  # or rank 0 would send its weights to all
    net.tie_weights()  # parallelize_module has made two parameters of one


@dataclass
class Way:
    """A model, how a step of it is made, and what was seen of it."""

    name: str
    net: nn.Module
    backward: Callable[[Tensor, Tensor, float], Tensor]  # inputs, targets, share of the step: gives the loss
    clip: Callable[[float], Tensor]  # largest norm: gives the norm that was found
    seen: Seen = field(default_factory=Seen)


def one_process(net: nn.Module) -> Way:
    """The baseline: every rank trains the whole model alone."""

    def backward(inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        loss = net(inputs, targets)
        (loss * share).backward()
        return loss.detach()

    return Way("one process", net, backward, partial(nn.utils.clip_grad_norm_, list(net.parameters())))


def by_hand(net: nn.Module) -> Way:
    cut_model(net, f, g)

    def backward(inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        loss = cut_cross_entropy(net(inputs), targets, net.config.vocab_size)
        (loss * share).backward()
        return loss.detach()

    return Way("by hand", net, backward, partial(clip_gradients, net))


def by_hand_sequence(net: nn.Module) -> Way:
    cut_model(net, f_of_sequence, g_of_sequence)

    def backward(inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        loss = cut_cross_entropy(net(inputs), targets, net.config.vocab_size)
        (loss * share).backward()
        return loss.detach()

    def clip(most: float) -> Tensor:
        add_up_norms(net)  # once per step: summands of micro-batches add up, too
        return clip_gradients(net, most)

    return Way("by hand, sequence parallel", net, backward, clip)


def by_torch(net: nn.Module) -> Way:
    parallelize_with_torch(net)

    def backward(inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        with loss_parallel():  # around both: in backward, too, the logits are cut
            loss = net(inputs, targets)
            (loss * share).backward()
        return loss.detach().full_tensor()

    def clip(most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(net.parameters(), most).full_tensor()

    return Way("by torch, sequence parallel", net, backward, clip)


def train(ways: list[Way], steps: list[list[Batch]], largest_norm: float) -> None:
    """A step of each way in turn, so that gradients are compared before they are used.

    With SGD: AdamW divides a gradient by its size, which hides a wrong scale and enlarges rounding.
    """
    optimizers = [torch.optim.SGD(way.net.parameters(), lr=LEARNING_RATE, momentum=0.9) for way in ways]
    for micro_batches in steps:
        for way in ways:
            with way.seen.in_backward():
                losses = [way.backward(*micro_batch, 1 / len(micro_batches)) for micro_batch in micro_batches]
            with way.seen.after_backward():
                norm = way.clip(largest_norm)
            way.seen.note_step(torch.stack(losses).mean(), norm)
        compare_gradients(ways, cut_dimension)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def main() -> int:
    began = time.perf_counter()
    args = parse_args()
    config = shapes.load_config(args.model, 256, args.seq_len)
    micro_batch_size, micro_batches = cli.split_batch(args.global_batch_size, args.micro_batch_size, world_size=1)
    check_sizes(args, config, runtime.processes(args.device))  # before any rank starts
    runtime.relaunch(args.device)
    runtime.seed(args.seed, deterministic=False)
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)  # or some containers would multiply in tf32
    stream = data.train_batches(  # without rank and world_size: all ranks read the same batches
        data.load_corpus().train,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        micro_batch_size=micro_batch_size,
        seed=args.seed,
        device=device,
    )
    steps = [
        [tuple(tensor.to(device) for tensor in next(stream)) for _ in range(micro_batches)] for _ in range(args.steps)
    ]
    ways = []
    for make in (one_process, by_hand, by_hand_sequence, by_torch):
        # Each rank draws all weights and keeps its part. A model that fits nowhere would be drawn part by part.
        net = model.build(args.model, config, seed=args.seed, device=device)
        ways.append(make(net))
    train(ways, steps, args.clip_norm)
    conclude(ways, args, config, device, began)
    runtime.shutdown()
    return 0


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="as in 05_ddp/train.py")
    add("--seq-len", type=cli.positive_int, default=32, help="tokens per sequence")
    add("--global-batch-size", type=cli.positive_int, default=8, help="sequences per step, on all ranks the same")
    add("--micro-batch-size", type=cli.positive_int, default=4, help="sequences per forward")
    add("--clip-norm", type=cli.positive, default=1.0, help="largest gradient norm")
    add("--steps", type=cli.positive_int, default=10)
    add("--seed", type=cli.seed, default=0)
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
