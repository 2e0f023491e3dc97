"""Tensor parallelism by hand: each rank holds a part of every matrix, and all ranks work on the same tokens.

Matrices come in pairs: q, k, v and then o in attention; gate, up and then down in the MLP. The first of a pair is cut
by its outputs: each rank computes whole heads, or some channels, alone. The second is cut by its inputs: each rank ends
with a summand of the output. One all-reduce per pair adds them up, and backward has one more where the pair begins
(Megatron-LM: Shoeybi et al. 2019, section 3). Embedding and head are cut by vocabulary, and the cross-entropy is
computed from cut logits. Sequence parallelism (Korthikanti et al. 2022) cuts what is left, norms and residuals, by
position: each all-reduce becomes a reduce-scatter and an all-gather, which send the same bytes.

Comments name a tensor's state on the axis of the tensor ranks: replicate (all have it), shard(d) (each has a part along
dimension d), partial (each has a summand).

    laptop    python 08_model_parallel/tensor_parallel.py
    one node  torchrun --nproc_per_node=4 08_model_parallel/tensor_parallel.py --model llama-124m --seq-len 512
    cluster   the same on two nodes, with --nproc_per_node=2 --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400.
              It works, but each block waits for four collectives: keep the ranks of one model inside a node.

Look for: the share of the weights that a rank holds; calls and bytes, which grow with tokens and layers, not with
weights. Before: minimal.py. What it costs: benchmarks/README.md. Next: pipeline_parallel.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _tensor_parallel as helper
from _tensor_parallel import (
    Way,
    all_gather,
    all_reduce,
    keep_my_part,
    my_part,
    my_rows,
    reduce_scatter,
)

from common import exits, measure, report, runtime
from lm import data, shapes, weights


class Copy(torch.autograd.Function):
    """replicate to replicate. All ranks use the same x, so its gradient is the sum of what each of them finds."""

    # the identity; autograd requires a new tensor
    forward = staticmethod(lambda context, x: x.view_as(x))
    backward = staticmethod(lambda context, gradient: all_reduce(gradient))  # partial to replicate


class Reduce(torch.autograd.Function):
    """partial to replicate. The result is the sum over the ranks, so its gradient is that of every summand."""

    forward = staticmethod(lambda context, x: all_reduce(x))
    backward = staticmethod(lambda context, gradient: gradient)  # replicate to replicate


class Gather(torch.autograd.Function):
    """shard(1) to replicate: Copy where a rank comes with its positions alone, and what follows needs all of them."""

    forward = staticmethod(lambda context, x: all_gather(x))
    # partial to shard(1)
    backward = staticmethod(lambda context, gradient: reduce_scatter(gradient))


class ReduceScatter(torch.autograd.Function):
    """partial to shard(1): Reduce where a rank goes on with its positions alone."""

    forward = staticmethod(lambda context, x: reduce_scatter(x))
    backward = staticmethod(lambda context, gradient: all_gather(gradient))  # shard(1) to replicate


def cut_pair(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Two matmuls over all ranks. nn.Linear stores [outputs, inputs], so the papers' columns are dimension 0."""
    x = Copy.apply(x)  # replicate
    # shard(-1): whole outputs, so any elementwise function may follow
    hidden = F.relu(F.linear(x, my_part(first, 0)))
    # each matmul gives a summand: partial to replicate
    return Reduce.apply(F.linear(hidden, my_part(second, 1)))


class ParallelBlock(nn.Module):
    """The block of lm/model.py, cut. A pair is entered by Copy or Gather, and left by Reduce or ReduceScatter."""

    def __init__(self, block: nn.Module, enter: type, leave: type) -> None:
        super().__init__()
        attention, mlp = block.self_attn, block.mlp
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = block.input_layernorm  # norms stay replicate
        self.post_attention_layernorm = block.post_attention_layernorm
        self.enter, self.leave = enter.apply, leave.apply
        for linear in (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            mlp.gate_proj,
            mlp.up_proj,
        ):
            keep_my_part(linear.weight, 0)  # shard(0): whole heads, or channels
        for linear in (attention.o_proj, mlp.down_proj):
            # shard(1): the inputs that the rank's own heads or channels give
            keep_my_part(linear.weight, 1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # replicate. x is that too, or shard(1) under sequence parallelism
        y = self.enter(self.input_layernorm(x))
        y = self.self_attn(y, cos, sin)  # partial
        x = x + self.leave(y)  # as x was
        y = self.enter(self.post_attention_layernorm(x))  # replicate
        return x + self.leave(self.mlp(y))  # partial, and then as x was


class ParallelEmbedding(nn.Module):
    """weight: shard(0), some of the vocabulary."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, leave: type) -> None:
        super().__init__()
        self.weight, self.vocab_size, self.leave = weight, vocab_size, leave.apply

    def forward(self, tokens: Tensor) -> Tensor:
        row, mine = my_rows(tokens, self.vocab_size)
        # partial: 0 for tokens of other ranks
        return self.leave(F.embedding(row, self.weight) * mine[..., None])


def cut_model(net: nn.Module, name: str, enter: type, leave: type) -> Way:
    embedding, head = net.model.embed_tokens.weight, net.lm_head.weight
    for weight in {embedding, head}:  # one matrix if they are tied
        keep_my_part(weight, 0)  # shard(0): some of the vocabulary
    net.model.embed_tokens = ParallelEmbedding(embedding, net.config.vocab_size, leave)
    for number, block in net.model.layers.items():
        net.model.layers[number] = ParallelBlock(block, enter, leave)
    clip = partial(clip_gradients, net, sequence_parallel=enter is Gather)
    return Way(name, net, partial(cut_cross_entropy, net, enter), clip)


def cut_cross_entropy(net: nn.Module, enter: type, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the targets of log(sum of exp(logits)) - logit of the target. Three numbers per token travel, not a
    row of logits: the largest, the sum and the target's."""
    hidden = enter.apply(net.model(inputs))  # replicate
    logits = net.lm_head(hidden)  # shard(-1), and they stay so
    largest = logits.detach().amax(-1)
    # shifts all logits alike, so it needs no gradient
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    logits = logits - largest[..., None]
    row, mine = my_rows(targets, net.config.vocab_size)
    logit_of_target = logits.gather(-1, row[..., None]).squeeze(-1) * mine  # partial
    sum_of_exp, logit_of_target = Reduce.apply(torch.stack([logits.exp().sum(-1), logit_of_target]))
    counted = targets != data.PADDING
    return ((sum_of_exp.log() - logit_of_target) * counted).sum() / counted.sum()


def clip_gradients(net: nn.Module, largest_norm: float, sequence_parallel: bool) -> Tensor:
    """As clip_grad_norm_, by the norm of the whole gradient: sharded weights count over all ranks, replicated once."""
    sharded = [weight.grad for weight in net.parameters() if hasattr(weight, "cut_dimension")]
    replicated = [
        weight.grad for weight in net.parameters() if not hasattr(weight, "cut_dimension")
    ]
    if sequence_parallel:  # a norm sees this rank's positions alone, so its gradient is partial
        together = torch.stack(replicated)  # they all have hidden_size elements
        dist.all_reduce(together)
        torch._foreach_copy_(replicated, [*together])
    squares = sum(gradient.square().sum() for gradient in sharded)
    dist.all_reduce(squares)
    norm = (squares + sum(gradient.square().sum() for gradient in replicated)).sqrt()
    nn.utils.clip_grads_with_norm_(net.parameters(), largest_norm, norm)
    return norm


def make_ways(build: Callable[[], nn.Module]) -> list[Way]:
    """One process, which is the baseline, and what must be equal to it. Each has a model of its own."""
    whole, cut, sequence, by_torch = (build() for _ in range(4))
    return [
        Way("one process", whole, whole, partial(helper.clip_by_torch, whole)),
        cut_model(cut, "by hand", Copy, Reduce),
        cut_model(sequence, "by hand, sequence parallel", Gather, ReduceScatter),
        helper.parallelize_with_torch(by_torch),
    ]


def check_pair(device: torch.device) -> str:
    """One pair of matmuls against one process: output, gradients, calls. All ranks draw the same x, first, second."""
    whole = [
        torch.randn(shape, device=device, requires_grad=True)
        for shape in ((4, 16), (50, 16), (8, 50))
    ]
    cut = [tensor.detach().clone().requires_grad_() for tensor in whole]
    expected = F.linear(F.relu(F.linear(whole[0], whole[1])), whole[2])
    expected.square().sum().backward()
    with measure.Traffic() as sent:
        found = cut_pair(*cut)
        found.square().sum().backward()
    # a rank's are 0 outside its part
    gradients = [cut[0].grad, all_reduce(cut[1].grad), all_reduce(cut[2].grad)]
    error = measure.relative_error(
        [found, *gradients], [expected, *(tensor.grad for tensor in whole)]
    )
    assert error <= helper.TOLERANCE, (
        f"a pair of matmuls: output or gradients differ from one process by {error:.0e}"
    )
    assert sent.calls == {"all_reduces": 2}, (
        f"a pair of matmuls calls {dict(sent.calls)}: one all-reduce each way"
    )
    return f"a pair of matmuls, cut: output and gradients of one process ({error:.0e}), one all-reduce each way"


def main() -> int:
    args = report.lesson_flags(
        __doc__, model="nano", seq_len=32, global_batch_size=4, micro_batch_size=2, steps=10
    )
    # this and the next raise before any rank starts
    config = shapes.load_config(args.model, 256, args.seq_len)
    helper.check_sizes(args, config)
    runtime.relaunch(args.device)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    # same on all ranks
    inputs, targets = data.one_batch(args.steps * args.global_batch_size, args.seq_len, device)
    micro_batches = [
        *zip(inputs.split(args.micro_batch_size), targets.split(args.micro_batch_size), strict=True)
    ]
    checked = [check_pair(device)]
    # Each rank draws all weights and keeps its part. A model that fits nowhere would be drawn matrix by matrix.
    ways = make_ways(lambda: weights.build(args.model, config, seed=0, device=device))
    rows = helper.run(ways, micro_batches, args)
    checked += helper.check(rows, config, args)
    about = {
        "dtype": "fp32",
        "parameters": shapes.parameter_count(config),
        "tokens": inputs.numel(),
    }
    about |= {"first_loss": rows[0]["losses"][0], "last_loss": rows[0]["losses"][-1]}
    report.end_lesson(
        rows, columns=helper.COLUMNS, checked=checked, args=args, device=device, **about
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
