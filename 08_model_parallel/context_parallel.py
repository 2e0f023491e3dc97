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

All is in fp32, to compare with one process. (3) writes its scores out, to be read; in a long run a fused kernel that
also returns the log-sum-exp takes their place. Comments say how a tensor lies over the ranks: replicate (all hold the
same), shard (each holds a part), partial (each holds a term of the sum), varying (ranks differ by intention).

Look for: the scores of the busiest rank in both orders; the bytes sent, which shrink with more ranks only in (2); what
is kept for backward. Before: pipeline_parallel.py. Next: expert_parallel.py.
"""

import copy
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _context_parallel as context
from _context_parallel import add_tile, add_tile_gradients, positions_of_rank, tiles

from common import exits, measure, report, runtime
from common.torch_versions import all_gather_with_backward
from lm import data, model, shapes, weights

# These three stand in for the model's attention. They get q, k and v of this rank's tokens,
# [batch, heads, tokens, head_dim], rotated by their place in the sequence: shard(tokens).


def all_gather_attention(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
    """(1) Every rank gathers all keys and values: replicate. Each of its queries looks at those not in its future.
    Backward: every rank has used my keys and values, so their gradients are partial: a reduce-scatter adds mine up."""
    # one collective for both
    parts = all_gather_with_backward(torch.stack((k, v)), gather_dim=0, group=dist.group.WORLD)
    # one rank's tokens after the other's
    keys, values = parts.unflatten(0, (-1, 2)).movedim(0, 3).flatten(3, 4)
    my_positions = positions_of_rank("contiguous", keys.shape[2]).to(q.device)
    may_see = my_positions[:, None] >= torch.arange(keys.shape[2], device=q.device)
    return model.attend(q, keys, values, may_see, enable_gqa=q.shape[1] != k.shape[1])


# What (1) lacks: each rank holds the keys and values of all tokens, and computes half of its scores to mask them away.


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
    """(2) Attention never mixes heads. So a rank trades: some heads of all tokens for all heads of its tokens."""
    world_size = dist.get_world_size()
    by_rank = [part.unflatten(1, (world_size, -1)) for part in (q, k, v)]  # each rank's heads
    # [ranks, batch, heads / ranks, tokens / ranks, head_dim]
    parts = torch.cat(by_rank, dim=2).movedim(1, 0)
    # shard(heads): [batch, heads / ranks, tokens, head_dim]
    whole = exchange(parts).movedim(0, 2).flatten(2, 3)
    q, k, v = whole.split([part.shape[2] for part in by_rank], dim=1)
    out = model.attend(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    parts = out.unflatten(2, (world_size, -1)).movedim(2, 0)
    return exchange(parts).movedim(0, 1).flatten(1, 2)  # shard(tokens) again, with all heads


def exchange(parts: Tensor) -> Tensor:
    """All-to-all: part i goes to rank i, and what rank i sends takes its place. Backward is the same exchange."""
    return collectives.all_to_all_single_autograd(
        parts.contiguous(), None, None, group=dist.group.WORLD
    )


# What (2) lacks: it cannot use more ranks than there are key-value heads. Nothing is computed while the parts travel.


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *_, order: str, **__) -> Tensor:
    """(3) In each turn a rank computes with one block of keys and values, while the next one is on its way."""
    # [batch, key-value heads, query heads of each, tokens, head_dim]
    grouped = q.unflatten(1, (k.shape[1], -1))
    return RingAttention.apply(grouped, torch.stack((k, v)), order).flatten(1, 2)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, my_kv: Tensor, order: str) -> Tensor:
        kv = my_kv  # varying: in each turn a rank holds the block of another
        out = torch.zeros_like(q)
        log_sum_exp = q.new_full(q.shape[:-1], -torch.inf)  # of each query's scores so far
        for turn in range(dist.get_world_size()):
            is_last = turn == dist.get_world_size() - 1
            arriving, under_way = start_round([] if is_last else [kv])
            for tile in tiles(order, turn, q.shape[-2]):
                add_tile(tile, q, kv, out, log_sum_exp)
            for message in under_way:
                message.wait()
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
        kv_gradient = None  # of the block before; partial until it has been on every rank
        for turn in range(dist.get_world_size()):
            is_last = turn == dist.get_world_size() - 1
            leaving = [] if turn == 0 else [kv_gradient]
            leaving += [] if is_last else [kv]
            arriving, under_way = start_round(leaving)
            kv_gradient = torch.zeros_like(kv)
            for tile in tiles(ctx.order, turn, q.shape[-2]):
                add_tile_gradients(
                    tile, (q, out_gradient, q_gradient), (log_sum_exp, row_sums), (kv, kv_gradient)
                )
            for message in under_way:
                message.wait()
            if not is_last:
                kv = arriving.pop()
            if turn > 0:
                kv_gradient += arriving.pop()
        if dist.get_world_size() > 1:  # the last hop: home
            (kv_gradient,), under_way = start_round([kv_gradient])
            for message in under_way:
                message.wait()
        return q_gradient, kv_gradient, None


def start_round(leaving: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
    """Start to send these to the next rank and to receive the like from the one before; wait before touching either."""
    if not leaving:
        return [], []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arriving = [torch.empty_like(tensor) for tensor in leaving]
    sends = [dist.P2POp(dist.isend, tensor, (rank + 1) % world_size) for tensor in leaving]
    receives = [dist.P2POp(dist.irecv, tensor, (rank - 1) % world_size) for tensor in arriving]
    # as one group: NCCL would wait for ever in a send alone
    return arriving, dist.batch_isend_irecv(sends + receives)


# The order of the tokens on the ranks, and what stands in for attention.
WAYS = {
    "one process": (None, model.attend),  # the baseline, which each rank computes for itself
    "all-gather": ("contiguous", all_gather_attention),
    "Ulysses": ("contiguous", ulysses_attention),
    "ring, contiguous": ("contiguous", partial(ring_attention, order="contiguous")),
    "ring, zigzag": ("zigzag", partial(ring_attention, order="zigzag")),
}
ATTENTIONS = ("all", "all-gather", "ulysses", "ring")  # what --attention takes


def loss_of(
    net: nn.Module, way: str, inputs: Tensor, targets: Tensor, counted_tokens: Tensor
) -> Tensor:
    """This rank's term of the mean loss over the tokens of all ranks: partial, and so are its gradients."""
    positions = positions_of_rank(WAYS[way][0], inputs.shape[1]).to(inputs.device)
    # shard(tokens); targets were shifted before
    inputs, targets = inputs[:, positions], targets[:, positions]
    logits = net(inputs, positions=positions[None])  # RoPE by the place in the whole sequence
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return summed / counted_tokens  # no mean: where a text ends early, the ranks' own counts differ


def sum_over_ranks(loss: Tensor, net: nn.Module) -> None:
    """Partial to replicate: each rank has used all weights for its own tokens. So gradients add up, and are no mean."""
    tensors = [loss, *(parameter.grad for parameter in net.parameters())]
    flat = nn.utils.parameters_to_vector(tensors)  # for one call instead of many
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, tensors)


def run(
    way: str,
    start: nn.Module,
    batches: list[tuple[Tensor, ...]],
    baseline_gradients: list[list[Tensor]],
) -> dict:
    """Train for a step per batch; one process fills baseline_gradients, the others are compared with them."""
    net = copy.deepcopy(start)  # replicate
    for layer in net.model.layers.values():
        layer.self_attn.attend = WAYS[way][1]
    # SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses, errors = [], []
    for step, batch in enumerate(batches):  # the last step's bytes and scores are reported
        context.tile_scores.clear()
        with measure.Traffic() as sent:
            with measure.LiveBytes(device=batch[0].device) as live:
                before = live.now
                loss = loss_of(net, way, *batch)
                kept_bytes = live.now - before
            loss.backward()
        loss = loss.detach()
        gradients = [parameter.grad for parameter in net.parameters()]
        if way == "one process":
            baseline_gradients.append([gradient.clone() for gradient in gradients])
        else:
            sum_over_ranks(loss, net)
        losses.append(loss.item())
        errors.append(measure.relative_error(gradients, baseline_gradients[step]))
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # each rank has all gradients: replicate
        optimizer.step()
        optimizer.zero_grad()
    of_ranks = runtime.all_gather(
        (kept_bytes, sum(context.tile_scores), errors, weights.digest(net))
    )
    kept, scores, errors_of_ranks, digests = zip(*of_ranks, strict=True)
    return {
        "name": way,
        "losses": losses,
        "calls": ", ".join(
            f"{count} {kind.replace('_', '-')}" for kind, count in sent.calls.items()
        )
        or "none",
        "sent_bytes": round(sum(sent.bytes_sent.values())),
        "scores_of_each_rank": scores,
        # counted in the ring alone
        "busiest_ratio": max(scores) * len(scores) / sum(scores) if any(scores) else None,
        "kept_bytes_per_rank": max(kept),
        "gradient_error": torch.tensor(errors_of_ranks).max().item(),  # NaN if one is
        "weights_sha256": digests,
    }


def main() -> int:
    args = report.lesson_flags(
        __doc__, model="nano", attention=ATTENTIONS, seq_len=240, batch_size=4, steps=5
    )
    # raises a UserError before any rank starts
    config = shapes.load_config(args.model, 256, args.seq_len)
    ways = context.chosen_ways(args, config, WAYS)
    runtime.relaunch(args.device)
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    batches = []
    # the same on every rank
    whole = data.one_batch(args.steps * args.batch_size, args.seq_len, device)
    for inputs, targets in zip(*(tensor.split(args.batch_size) for tensor in whole), strict=True):
        targets[0, 3 * (args.seq_len + 1) // 4 :] = data.PADDING  # a text that ends early
        batches.append((inputs, targets, (targets != data.PADDING).sum()))
    start = weights.build(args.model, config, seed=0, device=device)
    # cuBLAS takes its workspace here, and not where bytes are counted
    loss_of(start, "one process", *batches[0])
    rows, baseline_gradients = [], []
    for way in ways:
        rows.append(run(way, start, batches, baseline_gradients))
        rows[-1]["kept_share"] = rows[-1]["kept_bytes_per_rank"] / rows[0]["kept_bytes_per_rank"]
    report.end_lesson(
        rows,
        columns=context.COLUMNS,
        checked=context.check(rows, config, args),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=args.steps * args.batch_size * args.seq_len,
        first_loss=rows[0]["losses"][0],
        last_loss=rows[0]["losses"][-1],
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
