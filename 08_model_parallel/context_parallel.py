"""Context parallelism by hand: one sequence over several ranks, by all-gather, by Ulysses and by ring attention.

Each rank holds a part of every sequence, and all weights. Norms, projections, MLP and loss look at one token at a time,
so they need nothing from other ranks. Attention does: a query looks at every key before it. Three ways to let it:
(1) gather all keys and values on every rank; (2) Ulysses (Jacobs et al. 2023): an all-to-all trades a part of the
sequence of all heads for the whole sequence of some heads; (3) ring attention (Liu et al. 2023): blocks of keys and
values travel from rank to rank, and an online softmax adds up what each has found.

    laptop    python 08_model_parallel/context_parallel.py
              torchrun --nproc_per_node=4 08_model_parallel/context_parallel.py --steps 5
    one node  torchrun --nproc_per_node=8 08_model_parallel/context_parallel.py --model llama-124m --attention ring
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

All is in fp32, to compare losses and gradients with one process. (3) writes its products out, to be read. In a long run
a fused kernel that also returns the log-sum-exp takes their place.

Look for: the score elements of each rank in contiguous and in zigzag order; the bytes that a rank sends, which shrink
with more ranks only in (2); what it saves for backward. Before: 05_ddp/ddp_from_scratch.py, which cuts the batch.
"""

import copy
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _context_parallel_collectives import all_gather, all_reduce, all_to_all, batch_isend_irecv, reduce_scatter
from _context_parallel_flags import parse_args
from _context_parallel_order import positions_of_rank, tiles
from _context_parallel_report import Trainee, conclude, note_step
from _context_parallel_tiles import add_tile, add_tile_gradients

from old import data, exits, model, runtime

# all_gather_attention, ulysses_attention and ring_attention stand in for F.scaled_dot_product_attention in the model.
# They get q, k and v of this rank's tokens, [batch, heads, tokens, head_dim], rotated by their place in the sequence.


def all_gather_attention(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
    """(1) Every rank gathers all keys and values. Each of its queries looks at those that are not in its future."""
    keys, values = GatherTokens.apply(torch.stack((k, v)))  # one collective for both
    my_positions = positions_of_rank("contiguous", keys.shape[2]).to(q.device)
    may_see = my_positions[:, None] >= torch.arange(keys.shape[2], device=q.device)
    return model.attend(q, keys, values, may_see[None, None], enable_gqa=q.shape[1] != k.shape[1])


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        parts = part.new_empty(dist.get_world_size(), *part.shape)
        all_gather(parts, part)
        return parts.movedim(0, -3).flatten(-3, -2)  # one rank's tokens after the other's

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        """Every rank has used my keys and values. My gradient is the sum of theirs: a reduce-scatter."""
        parts = gradient.unflatten(-2, (dist.get_world_size(), -1)).movedim(-3, 0).contiguous()
        my_gradient = torch.empty_like(parts[0])
        reduce_scatter(my_gradient, parts)
        return my_gradient


# What (1) lacks: each rank holds the keys and values of all tokens, and computes half of its scores to mask them away.


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
    """(2) Attention never mixes heads. So a rank trades: some heads of all tokens for all heads of its tokens."""
    world_size = dist.get_world_size()
    by_rank = [part.unflatten(1, (world_size, -1)) for part in (q, k, v)]  # each rank's heads
    parts = torch.cat(by_rank, dim=2).movedim(1, 0)  # [ranks, batch, heads / ranks, tokens / ranks, head_dim]
    whole = ExchangeParts.apply(parts).movedim(0, 2).flatten(2, 3)  # [batch, heads / ranks, tokens, head_dim]
    q, k, v = whole.split([part.shape[2] for part in by_rank], dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    parts = out.unflatten(2, (world_size, -1)).movedim(2, 0)
    return ExchangeParts.apply(parts).movedim(0, 1).flatten(1, 2)  # all heads of my tokens again


class ExchangeParts(torch.autograd.Function):
    """All-to-all: part i goes to rank i, and what rank i sends takes its place. The same again takes it back."""

    @staticmethod
    def forward(ctx, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        all_to_all(received, parts)
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return ExchangeParts.forward(ctx, gradient)


# What (2) lacks: it cannot use more ranks than there are key-value heads. Nothing is computed while the parts travel.


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *_, order: str, **__) -> Tensor:
    """(3) In each turn a rank computes with one block of keys and values, while the next one is on its way."""
    grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, key-value heads, query heads of each, tokens, head_dim]
    return RingAttention.apply(grouped, torch.stack((k, v)), order).flatten(1, 2)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, my_kv: Tensor, order: str) -> Tensor:
        kv = my_kv
        out = torch.zeros_like(q)
        log_sum_exp = q.new_full(q.shape[:-1], -torch.inf)  # of each query's scores so far
        for turn in range(dist.get_world_size()):
            is_last = turn == dist.get_world_size() - 1
            arriving, under_way = start_round([] if is_last else [kv])
            for rows, columns, on_diagonal in tiles(order, turn, q.shape[-2]):
                add_tile(q[..., rows, :], kv[..., columns, :], on_diagonal, out[..., rows, :], log_sum_exp[..., rows])
            finish(under_way)
            kv = kv if is_last else arriving[0]
        ctx.save_for_backward(q, my_kv, out, log_sum_exp)  # no scores, and no other rank's block
        ctx.order = order
        return out

    @staticmethod
    def backward(ctx, out_gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """The blocks go round again. Each block's gradient follows it one turn behind, and every rank adds its part."""
        q, kv, out, log_sum_exp = ctx.saved_tensors
        row_sums = (out_gradient * out).sum(-1)  # softmax's backward subtracts them
        q_gradient = torch.zeros_like(q)
        kv_gradient = None  # of the block before
        for turn in range(dist.get_world_size()):
            is_last = turn == dist.get_world_size() - 1
            leaving = [] if turn == 0 else [kv_gradient]
            leaving += [] if is_last else [kv]
            arriving, under_way = start_round(leaving)
            kv_gradient = torch.zeros_like(kv)
            for rows, columns, on_diagonal in tiles(ctx.order, turn, q.shape[-2]):
                of_queries = [tensor[..., rows, :] for tensor in (q, out_gradient, q_gradient)]
                of_rows = [tensor[..., rows] for tensor in (log_sum_exp, row_sums)]
                of_keys = [tensor[..., columns, :] for tensor in (kv, kv_gradient)]
                add_tile_gradients(*of_queries, *of_rows, *of_keys, on_diagonal)
            finish(under_way)
            if not is_last:
                kv = arriving.pop()
            if turn > 0:
                kv_gradient += arriving.pop()
        if dist.get_world_size() > 1:  # the last hop: home
            (kv_gradient,), under_way = start_round([kv_gradient])
            finish(under_way)
        return q_gradient, kv_gradient, None


def start_round(leaving: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
    """Start to send these to the next rank, and to receive the like from the one before. Both go on in the background:
    nothing may write into the first or read the second before finish()."""
    if not leaving:
        return [], []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arriving = [torch.empty_like(tensor) for tensor in leaving]
    sends = [dist.P2POp(dist.isend, tensor, (rank + 1) % world_size) for tensor in leaving]
    receives = [dist.P2POp(dist.irecv, tensor, (rank - 1) % world_size) for tensor in arriving]
    return arriving, batch_isend_irecv(sends + receives)  # as one group: NCCL would wait for ever in a send alone


def finish(under_way: list[dist.Work]) -> None:
    for work in under_way:
        work.wait()


# The order of the tokens on the ranks, and what stands in for attention.
WAYS = {
    "all-gather": ("contiguous", all_gather_attention),
    "Ulysses": ("contiguous", ulysses_attention),
    "ring, contiguous": ("contiguous", partial(ring_attention, order="contiguous")),
    "ring, zigzag": ("zigzag", partial(ring_attention, order="zigzag")),
}


def make_trainee(name: str, start: nn.Module) -> Trainee:
    """A copy of the model that attends in this way, or as it always does."""
    net = copy.deepcopy(start)
    order, attend = WAYS.get(name, (None, model.attend))
    for layer in net.model.layers.values():
        layer.self_attn.attend = attend
    # SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    return Trainee(name, order, net, optimizer)


def forward_backward(trainee: Trainee, inputs: Tensor, targets: Tensor, micro_batch_size: int) -> Tensor:
    """This rank's part of the mean loss over all tokens of all ranks and micro-batches, and of its gradients."""
    counted_tokens = (targets != data.PADDING).sum()  # of the whole batch: the ranks' own counts differ
    positions = positions_of_rank(trainee.order, inputs.shape[1]).to(inputs.device)
    my_inputs = inputs[:, positions].split(micro_batch_size)
    my_targets = targets[:, positions].split(micro_batch_size)
    loss = torch.zeros((), device=inputs.device)
    for micro_inputs, micro_targets in zip(my_inputs, my_targets, strict=True):
        logits = trainee.net(micro_inputs, positions=positions[None])  # RoPE by the place in the sequence
        summed = F.cross_entropy(logits.flatten(0, 1), micro_targets.flatten(), reduction="sum")
        (summed / counted_tokens).backward()
        loss += summed.detach() / counted_tokens
    return loss


def sum_over_ranks(loss: Tensor, net: nn.Module) -> None:
    """Every rank has all weights, and has used them for its own tokens. So the gradients add up, and are no mean."""
    tensors = [loss, *(parameter.grad for parameter in net.parameters())]
    flat = nn.utils.parameters_to_vector(tensors)  # for one call instead of many
    all_reduce(flat)
    nn.utils.vector_to_parameters(flat, tensors)


def main() -> int:
    began = time.perf_counter()
    args, config = parse_args(__doc__)
    runtime.relaunch(args.device)
    runtime.seed(args.seed, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)  # or some containers would multiply in tf32
    batches = data.train_batches(
        data.load_corpus().train,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.global_batch_size,  # every rank reads all sequences and takes its tokens of each
        seed=args.seed,
        device=device,
    )
    start = model.build(args.model, config, seed=args.seed, device=device)
    names = [name for name in WAYS if args.attention == "all" or name.lower().startswith(args.attention)]
    baseline, *trainees = [make_trainee(name, start) for name in ("one process", *names)]
    for _ in range(args.steps):
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        targets[0, 3 * (args.seq_len + 1) // 4 :] = data.PADDING  # a text that ends early: ranks' counts differ
        for trainee in (baseline, *trainees):
            loss = forward_backward(trainee, inputs, targets, args.micro_batch_size)
            if trainee is not baseline:
                sum_over_ranks(loss, trainee.net)
            note_step(trainee, loss, baseline)
        for trainee in (baseline, *trainees):
            nn.utils.clip_grad_norm_(trainee.net.parameters(), args.clip_norm)  # each rank has all gradients
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
    conclude(args, config, baseline, trainees, forward_backward, device, began)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
