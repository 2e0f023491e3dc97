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
    cluster   the same on two nodes, with --nproc_per_node=2 --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400.
              It works, but each block waits for four collectives: keep the ranks of one model inside a node.

By torch: the same cuts are a plan for parallelize_module, in _tensor_parallel_torch.py.

Look for: the share of the weights that a rank holds; calls and bytes per step, which grow with tokens and layers, not
with weights; the difference from one process. Before: 06_fsdp_zero/zero_from_scratch.py. What it costs:
benchmarks/tensor_parallel.py. Next: pipeline_parallel.py.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _tensor_parallel_collectives import gather_positions, identity, sum_of_my_positions, sum_over_ranks
from _tensor_parallel_report import check_sizes, conclude
from _tensor_parallel_torch import parallelize_with_torch
from _tensor_parallel_train import Way, train

from old import cli, data, exits, model, runtime, shapes

# Which dimension of a weight is cut, by the module that holds it. nn.Linear stores [outputs, inputs], so the columns of
# the papers' XA are dimension 0. What is not named here, the norms, is whole on every rank.
CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}  # attention: by key-value head, with its query heads
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
    """The mean over the targets of log(sum of exp(logits)) - logit of the target, where a rank has some of the logits.

    Three numbers per token travel, not a row of logits: the largest, the sum and the target's.
    """
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # shifts all logits alike, so it needs no gradient
    logits = logits - largest[..., None]
    row, mine = my_rows(targets, vocab_size)
    logit_of_target = logits.gather(-1, row[..., None]).squeeze(-1) * mine
    sum_of_exp, logit_of_target = g(torch.stack([logits.exp().sum(-1), logit_of_target]))
    counted = targets != data.PADDING
    return ((sum_of_exp.log() - logit_of_target) * counted).sum() / counted.sum()


def cut_loss(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cut_cross_entropy(net(inputs), targets, net.config.vocab_size)


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


def make_ways(build: Callable[[], nn.Module]) -> list[Way]:
    """One process, which is the baseline, and what must be equal to it. Each has a model of its own."""
    whole, cut, cut_in_sequence, by_torch = (build() for _ in range(4))
    cut_model(cut, f, g)
    cut_model(cut_in_sequence, f_of_sequence, g_of_sequence)
    parallelize_with_torch(by_torch)

    def clip_in_sequence(most: float) -> Tensor:
        add_up_norms(cut_in_sequence)  # once per step: the summands of micro-batches add up before
        return clip_gradients(cut_in_sequence, most)

    def clip_by_torch(net: nn.Module, most: float) -> Tensor:
        # DTensors know what is cut, and what is a summand: that, torch 2.11 scales wrongly with foreach
        return runtime.whole(nn.utils.clip_grad_norm_(net.parameters(), most, foreach=False))

    return [
        Way("one process", whole, whole, partial(clip_by_torch, whole)),
        Way("by hand", cut, partial(cut_loss, cut), partial(clip_gradients, cut)),
        Way("by hand, sequence parallel", cut_in_sequence, partial(cut_loss, cut_in_sequence), clip_in_sequence),
        # torch's loss on cut logits needs its context around forward and backward
        Way("by torch, sequence parallel", by_torch, by_torch, partial(clip_by_torch, by_torch), loss_parallel),
    ]


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

    def build() -> nn.Module:
        # Each rank draws all weights and keeps its part. A model that fits nowhere would be drawn matrix by matrix.
        return model.build(args.model, config, seed=args.seed, device=device)

    ways = make_ways(build)
    train(ways, steps, args.clip_norm, cut_dimension)
    conclude(ways, args, config, device, began)
    runtime.shutdown()
    return 0


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="as in 05_ddp/train.py")
    add("--seq-len", type=cli.positive_int, default=32, help="tokens per sequence")
    add("--global-batch-size", type=cli.positive_int, default=4, help="sequences per step, on all ranks the same")
    add("--micro-batch-size", type=cli.positive_int, default=2, help="sequences per forward")
    add("--clip-norm", type=cli.positive_or_inf, default=1.0, help="largest gradient norm")
    add("--steps", type=cli.positive_int, default=10)
    add("--seed", type=cli.natural, default=0)
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
