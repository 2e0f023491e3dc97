r"""Tensor parallelism, by hand and by torch: each rank holds a shard of every matrix.

All ranks work on the same tokens and share each matmul. Matrices come in pairs: q, k, v and then o
in attention; gate, up and then down in the MLP. The first of a pair is sharded by its outputs. Each
rank computes some of the heads, or some of the MLP's channels, without the others. The second is
sharded by its inputs. Each rank computes a term of every output, and an all-reduce sums the terms.
Backward has one more all-reduce, where the pair begins (Megatron-LM: Shoeybi et al. 2019,
section 3). `parallel_pair` below draws it.

The embedding and the head are sharded by vocabulary. The cross-entropy is computed from logits that
stay sharded. Sequence parallelism (Korthikanti et al. 2022) also shards the norms and the residual
connections, by tokens, so that a rank keeps 1/N of their activations for backward. It replaces each
all-reduce by a reduce-scatter and an all-gather, which together send the same bytes.

Comments say how the ranks hold a tensor:

    replicate   every rank has the full tensor
    shard(d)    each rank has a shard of it along dimension d
    partial     each rank has a term; the tensor is the sum over the ranks

torch's own tool is a plan for parallelize_module. The script trains one process, both variants by
hand and torch's plan, all in fp32, and checks that they are equal. Another table shows the loss of
bf16 logits, which must be computed in fp32.

    laptop    python 08_model_parallel/tensor_parallel.py
    one node  torchrun --standalone --nproc_per_node=4 08_model_parallel/tensor_parallel.py \
                  --model llama-124m --seq-len 512
    cluster   the same on two nodes, but in place of --standalone --nproc_per_node=4
              --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400
              --rdzv-id=$JOB
              It works, but each block waits for four collectives. So keep the ranks of one model
              on one node, where links are fast.

What to look at: the weights that a rank holds. The collectives and the bytes sent, which grow with
tokens, layers and hidden size, and not with the number of weights. The gradient error, which is
rounding. The time of a step: on a laptop, the collectives may take longer than the matmuls that
they save.

The default model has 24 heads, so that 2, 3, 4, 6, 8 or 12 ranks can share them. On GPUs it is
wide, and the batch is larger. Expected on 8 H100s from their data sheets: in fp32 the arithmetic of
a step takes at least 68 ms on one of them, and 8.5 ms on each of 8. By hand, each GPU sends 1.3 GB
per step in a ring. Over NVLink (450 GB/s in one direction) this takes at least 2.9 ms, and no
matmul runs meanwhile.

Previous: minimal.py. Next: pipeline_parallel.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _tensor_parallel as helper
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel import Variant
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from common import lesson, runtime
from common.torch_versions import all_gather_single, reduce_scatter_single
from lm import shapes, stdlib_text, weights
from training.batches import PADDING

# On a GPU, nano's kernels would end before the CPU has launched the next ones.
GPU_DEFAULTS = {
    "model": f"wide{helper.WITH_24_HEADS}",
    "seq_len": 768,
    "global_batch_size": 16,
    "micro_batch_size": 8,
}


# --- 1. collectives on activations


def all_reduce(x: Tensor) -> Tensor:
    """Sum x over the ranks: partial to replicate."""
    total = x.clone(memory_format=torch.contiguous_format)  # dist.all_reduce works in place
    dist.all_reduce(total)
    return total


def all_gather(x: Tensor) -> Tensor:
    """Gather the tokens of all ranks: shard(1) to replicate.

    [batch, tokens / N, hidden] becomes [batch, tokens, hidden] on N ranks.
    """
    world_size = dist.get_world_size()
    gathered = x.new_empty(world_size * x.shape[0], *x.shape[1:])
    all_gather_single(gathered, x.contiguous())  # [N * batch, tokens / N, hidden]
    return torch.cat(gathered.chunk(world_size), dim=1)


def reduce_scatter(x: Tensor) -> Tensor:
    """Sum x over the ranks, and keep this rank's tokens: partial to shard(1).

    [batch, tokens, hidden] becomes [batch, tokens / N, hidden] on N ranks.
    """
    world_size = dist.get_world_size()
    by_rank = torch.cat(x.chunk(world_size, dim=1))  # [N * batch, tokens / N, hidden]
    total = x.new_empty(x.shape[0], *by_rank.shape[1:])
    reduce_scatter_single(total, by_rank)
    return total


# --- 2. the same with a backward: a pair of matrices begins with Copy and ends with Reduce


class Copy(torch.autograd.Function):
    """Begin a pair: replicate to replicate. Megatron-LM calls it f, and Reduce g.

    All ranks use x for their own outputs. So each rank computes a term of the gradient of x.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)  # the identity; autograd needs a new tensor

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return all_reduce(grad)  # partial to replicate


class Reduce(torch.autograd.Function):
    """End a pair: partial to replicate. The gradient of a sum is the gradient of each term."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad  # replicate to replicate


class Gather(torch.autograd.Function):
    """Begin a pair under sequence parallelism: shard(1) to replicate."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return all_gather(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return reduce_scatter(grad)  # partial to shard(1)


class ReduceScatter(torch.autograd.Function):
    """End a pair under sequence parallelism: partial to shard(1)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return reduce_scatter(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return all_gather(grad)  # shard(1) to replicate


# --- 3. a pair of matrices


def my_shard(tensor: Tensor, dim: int) -> Tensor:
    """Return this rank's shard of a tensor along a dimension.

    If the ranks do not divide the size, the shards of the first ranks have one row more.
    """
    return tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def parallel_pair(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Compute y = relu(x A) B on all ranks together. Ranks 0 and 1 hold these elements:

              x                    A                   hidden                B                 y

        01 01 01 01          0 0 0 | 1 1 1          0 0 0 | 1 1 1         0 0 0 0         each rank
        01 01 01 01          0 0 0 | 1 1 1          0 0 0 | 1 1 1         0 0 0 0         has a term
                       x     0 0 0 | 1 1 1    =                     x     0 0 0 0    =    of each
                             0 0 0 | 1 1 1                                -------         element
                                                                          1 1 1 1
                                                                          1 1 1 1
                                                                          1 1 1 1

        replicate            shard(1)               shard(1)              shard(0)        partial

    nn.Linear stores the transposed matrices, [outputs, inputs]. So `first`, the transpose of A, is
    shard(0), and `second` is shard(1). The papers call A column-parallel and B row-parallel.
    """
    my_first = my_shard(first, 0)  # [channels / N, inputs]
    my_second = my_shard(second, 1)  # [outputs, channels / N]
    x = Copy.apply(x)  # [tokens, inputs], replicate
    hidden = F.linear(x, my_first)  # [tokens, channels / N], shard(1)
    hidden = F.relu(hidden)  # any elementwise function works on a shard
    y = F.linear(hidden, my_second)  # [tokens, outputs], partial
    return Reduce.apply(y)  # replicate


# --- 4. the model by hand


def shard_weight(weight: nn.Parameter, dim: int) -> None:
    """Replace a weight by this rank's shard.

    The Parameter stays the same object, so that tied weights stay tied.
    """
    weight.data = my_shard(weight.data, dim).clone()
    weight.shard_dim = dim  # replicated weights do not have this attribute


class ParallelBlock(nn.Module):
    """The block of lm/model.py with sharded matrices: two pairs, each between `begin` and `end`.

    `begin` is Copy or Gather, and `end` is Reduce or ReduceScatter.
    """

    def __init__(self, block: nn.Module, begin: type, end: type) -> None:
        super().__init__()
        self.begin = begin
        self.end = end
        self.self_attn = block.self_attn
        self.mlp = block.mlp
        self.input_layernorm = block.input_layernorm  # the weights of norms stay replicate
        self.post_attention_layernorm = block.post_attention_layernorm

        attention = block.self_attn
        mlp = block.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            shard_weight(linear.weight, 0)  # some heads
        for linear in (mlp.gate_proj, mlp.up_proj):
            shard_weight(linear.weight, 0)  # some channels
        shard_weight(attention.o_proj.weight, 1)  # the inputs that come from these heads
        shard_weight(mlp.down_proj.weight, 1)  # the inputs that come from these channels

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # x: [batch, tokens, hidden], replicate. With sequence parallelism: shard(1).
        y = self.begin.apply(self.input_layernorm(x))  # [batch, tokens, hidden], replicate
        # Attention takes the number of heads from the shape of q: it computes this rank's heads.
        y = self.self_attn(y, cos, sin)  # [batch, tokens, hidden], partial
        x = x + self.end.apply(y)  # like x
        y = self.begin.apply(self.post_attention_layernorm(x))  # replicate
        y = self.mlp(y)  # partial
        return x + self.end.apply(y)  # like x


class ParallelEmbedding(nn.Module):
    """An embedding that is sharded by vocabulary. Its weight is [vocab / N, hidden], shard(0)."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, end: type) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_size = vocab_size
        self.end = end

    def forward(self, tokens: Tensor) -> Tensor:
        rows, is_mine = my_rows(tokens, self.vocab_size)
        hidden = F.embedding(rows, self.weight)  # [batch, tokens, hidden]
        hidden = hidden * is_mine[..., None]  # partial: 0 for the tokens of other ranks
        return self.end.apply(hidden)


def my_rows(tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Find tokens in this rank's shard of the vocabulary.

    Return the row of each token in the shard, and whether the shard has the token. For tokens that
    it does not have, the row is 0.
    """
    my_tokens = my_shard(torch.arange(vocab_size), 0)
    first = my_tokens[0].item()
    last = my_tokens[-1].item()
    is_mine = (tokens >= first) & (tokens <= last)
    return (tokens - first).where(is_mine, 0), is_mine


def parallelize(model: nn.Module, begin: type, end: type) -> None:
    """Shard all matrices of a model. `begin` and `end`: see ParallelBlock."""
    embedding = model.model.embed_tokens.weight
    head = model.lm_head.weight
    shard_weight(embedding, 0)  # some of the vocabulary
    if head is not embedding:  # tied weights are one Parameter
        shard_weight(head, 0)
    model.model.embed_tokens = ParallelEmbedding(embedding, model.config.vocab_size, end)
    for name, block in model.model.layers.items():
        model.model.layers[name] = ParallelBlock(block, begin, end)


def parallel_loss(model: nn.Module, begin: type, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, computed from logits that are sharded by vocabulary."""
    hidden = begin.apply(model.model(inputs))  # [batch, tokens, hidden], replicate
    # fp32, also if the model is bf16, where a loss near 12 would be a multiple of 1/16.
    logits = model.lm_head(hidden).float()  # [batch, tokens, vocab / N], shard(2)
    return loss_of_shards(logits, targets, model.config.vocab_size)


def loss_of_shards(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy of logits, [batch, tokens, vocab / N], and of their targets.

    The loss of a token is log(sum of exp(logits)) - logit of the target. So the ranks exchange
    three numbers per token, and not a row of logits: the largest logit, the sum, and the logit of
    the target.
    """
    # Subtract the largest logit of each token, because exp could overflow. The loss does not
    # depend on it, so it needs no gradient.
    largest = logits.detach().amax(-1)  # [batch, tokens]
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # replicate
    logits = logits - largest[..., None]

    sum_of_exp = logits.exp().sum(-1)  # [batch, tokens], partial
    rows, is_mine = my_rows(targets, vocab_size)
    target_logit = logits.gather(-1, rows[..., None]).squeeze(-1)  # [batch, tokens]
    target_logit = target_logit * is_mine  # partial: 0 for the targets of other ranks
    sum_of_exp, target_logit = Reduce.apply(torch.stack([sum_of_exp, target_logit]))  # replicate

    losses = sum_of_exp.log() - target_logit  # [batch, tokens]
    is_target = targets != PADDING
    return (losses * is_target).sum() / is_target.sum()


def clip_gradients(model: nn.Module, sequence_parallel: bool, max_norm: float) -> Tensor:
    """Clip gradients by the norm of the full gradient, and return that norm.

    Every rank must compute the same norm. If each clipped by the norm of its own shards, replicated
    weights would become different.
    """
    sharded = []
    replicated = []  # the weights of norms, which have hidden_size elements each
    for weight in model.parameters():
        if hasattr(weight, "shard_dim"):
            sharded.append(weight.grad)
        else:
            replicated.append(weight.grad)

    if sequence_parallel:
        # A norm has seen only this rank's tokens, so the gradient of its weight is partial.
        stacked = torch.stack(replicated)
        dist.all_reduce(stacked)
        for gradient, total in zip(replicated, stacked, strict=True):
            gradient.copy_(total)

    sharded_square = sum(gradient.square().sum() for gradient in sharded)
    dist.all_reduce(sharded_square)  # the shards of all ranks
    replicated_square = sum(gradient.square().sum() for gradient in replicated)  # counts once
    norm = (sharded_square + replicated_square).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


# --- 5. the model by torch


def parallelize_by_torch(model: nn.Module) -> None:
    """Shard all matrices by a plan, with sequence parallelism.

    The weights become DTensors, which know how the ranks hold them. The comments name the part of
    the model by hand that does the same.
    """
    device_type = model.lm_head.weight.device.type
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    replicate = Replicate()
    tokens = Shard(1)
    plan = {
        # ParallelEmbedding
        "model.embed_tokens": RowwiseParallel(input_layouts=replicate, output_layouts=tokens),
        # A norm of this rank's tokens. DTensor sums the gradient of its weight.
        "model.layers.*.*_layernorm": SequenceParallel(),
        # Gather. Of the arguments x, cos and sin, only x is sharded.
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(tokens, None, None), desired_input_layouts=(replicate, None, None)
        ),
        # shard_weight(weight, 0)
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        # shard_weight(weight, 1), then ReduceScatter
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
        # Gather
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=tokens, desired_input_layouts=replicate
        ),
        # shard_weight(weight, 0). The output stays a DTensor, because the shards of the channels
        # may be unequal: a plain tensor would not tell down_proj the full size.
        "model.layers.*.mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "model.layers.*.mlp.up_proj": ColwiseParallel(use_local_output=False),
        # shard_weight(weight, 1), then ReduceScatter
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=tokens),
        "model.norm": SequenceParallel(),
        # Gather, then shard_weight(weight, 0). Logits stay sharded, for loss_parallel.
        "lm_head": ColwiseParallel(
            input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    # src_data_rank=None: each rank takes its shard of its own weights. Otherwise rank 0 sends them.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.tie_weights()  # parallelize_module has made two parameters of one


def clip_by_torch(model: nn.Module, max_norm: float) -> Tensor:
    """Clip gradients, which may be DTensors, and return their norm."""
    # torch 2.11 scales partial gradients wrongly with foreach.
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
    return runtime.full_tensor(norm)


# --- 6. the comparison


def shard_by_hand(name: str, model: nn.Module, sequence_parallel: bool) -> Variant:
    """Shard a model by hand, and return the variant that trains it."""
    begin = Copy
    end = Reduce
    if sequence_parallel:
        begin = Gather
        end = ReduceScatter
    parallelize(model, begin, end)
    loss = partial(parallel_loss, model, begin)
    return Variant(name, model, loss, partial(clip_gradients, model, sequence_parallel))


def make_variants(build: Callable[[], nn.Module]) -> list[Variant]:
    """Return the variants, each with its own model. The first is the baseline."""
    full = build()
    for_torch = build()
    parallelize_by_torch(for_torch)
    return [
        Variant("one process", full, full, partial(clip_by_torch, full)),
        shard_by_hand(helper.BY_HAND, build(), sequence_parallel=False),
        shard_by_hand(helper.BY_HAND_IN_SEQUENCE, build(), sequence_parallel=True),
        # loss_parallel computes the loss of sharded logits, in forward and in backward.
        Variant(
            helper.BY_TORCH, for_torch, for_torch, partial(clip_by_torch, for_torch), loss_parallel
        ),
    ]


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu=GPU_DEFAULTS,
        relaunches=True,
        model=f"nano{helper.WITH_24_HEADS}",
        seq_len=48,
        global_batch_size=4,
        micro_batch_size=2,
        steps=10,
    )
    # Before relaunch, a wrong flag raises one UserError. After it, every rank would raise it.
    config = helper.load_config(args)
    lesson.relaunch(args.device)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    # The same tokens on all ranks.
    samples = args.steps * args.global_batch_size
    inputs, targets = stdlib_text.one_batch(samples, args.seq_len, device)
    micro_batches = list(
        zip(inputs.split(args.micro_batch_size), targets.split(args.micro_batch_size), strict=True)
    )

    checked = [helper.check_pair(parallel_pair, device)]
    bf16_rows = helper.losses_in_bf16(loss_of_shards, my_shard, device)
    # Each rank draws all weights and keeps its shards. For a model that does not fit on one GPU,
    # each rank would draw its shards only, as train_3d.py does.
    name = args.model.removesuffix(helper.WITH_24_HEADS)
    variants = make_variants(partial(weights.build, name, config, seed=0, device=device))
    rows = helper.run(variants, micro_batches, args)
    checked += helper.check(rows, config, args)
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=checked,
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=inputs.numel(),
        first_loss=rows[0]["losses"][0],
        last_loss=rows[0]["losses"][-1],
        bf16_rows=bf16_rows,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
