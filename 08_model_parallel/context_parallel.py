"""Context parallelism: one sequence over several ranks, by hand and by torch.

Each rank holds all weights and a shard of every sequence. Norms, projections, MLP and loss look at
one token at a time, so they need no other rank. Attention does: a query looks at every key before
it. This file has three variants by hand, and torch's own:

    (1) ring attention (Liu et al. 2023): blocks of keys and values travel from rank to rank, and an
        online softmax adds each block to the result
    (2) all-gather: every rank gathers all keys and values (Llama 3)
    (3) Ulysses (Jacobs et al. 2023): an all-to-all trades all heads of some tokens for some heads
        of all tokens
    (4) torch.distributed.tensor.experimental.context_parallel, which torch's source calls the
        legacy API: see README.md for its successors. Fused kernels compute block by block
        as in (1). By default it gathers all keys and values first, as in (2), and only their
        gradients travel from rank to rank.

    laptop    python 08_model_parallel/context_parallel.py
              torchrun --standalone --nproc_per_node=4 08_model_parallel/context_parallel.py
    one node  torchrun --standalone --nproc_per_node=8 08_model_parallel/context_parallel.py
    cluster   the same on each node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

What to look at: the work of the busiest rank in both orders of the ring; the bytes sent, which
shrink with more ranks only in (3); what is kept for backward.

All is in fp32, to compare it with one process, but for one table: attention in bf16, with the sums
of (1) in fp32 and in bf16. (1) writes the scores of one tile at a time to
memory and then frees them, so that you can read the arithmetic. A fused kernel never writes them.
Neither keeps them for backward. (4) supports CUDA's kernels only. On a CPU _context_parallel.py
registers the CPU's flash attention with it, and the rest is torch's.

Calls, bytes and seconds are of forward and backward. They leave out the all-reduce of the gradients
of all weights, which is the same for every variant on several ranks.

On GPUs the default is --model wide and 2 sequences of 4,096 tokens. Expected on 4 H100s from the
data sheet (67 TFLOP/s in fp32, NVLink 450 GB/s): the arithmetic of a step takes one process at
least 60 ms, and each of 4 ranks 15 ms. A rank sends 503 MB in (1), which takes at least 1.1 ms and
can overlap with arithmetic, 302 MB in (2) and 151 MB in (3). (1) writes its scores to memory and
takes longer. With 8 GPUs (3) is left out: they do not divide 12 key-value heads.

Previous: pipeline_parallel.py. Next: expert_parallel.py.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _context_parallel as helper
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from common import lesson, measure, runtime
from common.torch_versions import all_gather_with_backward, all_to_all_with_backward
from lm import model, shapes, stdlib_text, weights
from training.batches import PADDING
from training.digest import digest

# --- (1) ring attention
#
# The words of this section:
#
#     block   the keys and values of one rank's tokens, which travel from rank to rank
#     hop     the transfer of a tensor from one rank to the next
#     turn    what all ranks compute between two hops, each with one block
#     chunk   a run of consecutive tokens; a rank has two
#     tile    the scores of one chunk of queries with one chunk of keys, and their sum of values
#
# A group of query heads shares one key-value head. q, out and their gradients are [batch, kv_heads,
# group, queries, head_dim]; k and v are [batch, kv_heads, keys, head_dim]; log_sum_exp is [batch,
# kv_heads, group, queries].
#
# Every sum over tiles is fp32, also if the model is bf16: out, log_sum_exp and all gradients. In
# bf16 each tile would round the sum so far, and more blocks would make a larger error. Matmuls are
# in the model's dtype.


def add_tile(
    q: Tensor, k: Tensor, v: Tensor, is_diagonal: bool, out: Tensor, log_sum_exp: Tensor
) -> None:
    """Add a tile to the attention of q, in place: the online softmax.

    `out` is the attention over the keys so far, and `log_sum_exp` is log(sum(exp(score))) over
    them, both in fp32. With more keys the sum grows. So `out` shrinks by old sum / new sum, and the
    new values are added with the weights exp(score) / new sum.
    """
    scores = compute_scores(q, k, is_diagonal)  # [batch, kv_heads, group, queries, keys]
    new_log_sum_exp = torch.logaddexp(log_sum_exp, scores.logsumexp(-1))
    out *= (log_sum_exp - new_log_sum_exp).exp()[..., None]
    attention = (scores - new_log_sum_exp[..., None]).exp()
    out += torch.einsum("bhgqk,bhkd->bhgqd", attention.to(v.dtype), v)
    log_sum_exp.copy_(new_log_sum_exp)


def compute_scores(q: Tensor, k: Tensor, is_diagonal: bool) -> Tensor:
    """Return the scaled scores in fp32, [batch, kv_heads, group, queries, keys].

    On the diagonal, queries and keys are the same tokens, and the mask hides later keys.
    """
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q, k).float() / math.sqrt(q.shape[-1])
    if is_diagonal:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(is_later, -torch.inf)
    return scores


def tile_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_diagonal: bool,
    out_gradient: Tensor,
    log_sum_exp: Tensor,
    row_sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v that come from one tile, for sums in fp32.

    The final log_sum_exp gives the softmax over all keys, so no other tile is needed. row_sums are
    the sums of out_gradient * out over head_dim, which the backward of a softmax subtracts.
    """
    attention = (compute_scores(q, k, is_diagonal) - log_sum_exp[..., None]).exp()
    v_gradient = torch.einsum("bhgqk,bhgqd->bhkd", attention.to(v.dtype), out_gradient)
    attention_gradient = torch.einsum("bhgqd,bhkd->bhgqk", out_gradient, v)
    score_gradient = attention * (attention_gradient - row_sums[..., None])
    score_gradient = (score_gradient / math.sqrt(q.shape[-1])).to(q.dtype)
    q_gradient = torch.einsum("bhgqk,bhkd->bhgqd", score_gradient, k)
    k_gradient = torch.einsum("bhgqk,bhgqd->bhkd", score_gradient, q)
    return q_gradient, k_gradient, v_gradient


class RingAttention(torch.autograd.Function):
    """Attention in as many turns as there are ranks.

    In each turn a rank computes with one block, while the next one is on its way. In turn t, rank r
    has the block of rank (r - t) % ranks.
    """

    @staticmethod
    def forward(ctx, q: Tensor, my_kv: Tensor, order: str) -> Tensor:
        """Return the attention of q. my_kv is [2, batch, kv_heads, tokens, head_dim]."""
        turns = dist.get_world_size()
        kv = my_kv
        out = torch.zeros_like(q, dtype=torch.float32)
        log_sum_exp = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        for turn in range(turns):
            is_last = turn == turns - 1
            if not is_last:
                kv_hop = Hop(kv)
            for queries, keys, is_diagonal in tiles(order, turn, tokens=q.shape[-2]):
                k, v = kv[..., keys, :]  # dimension 0: keys, values
                add_tile(
                    q[..., queries, :],
                    k,
                    v,
                    is_diagonal,
                    out[..., queries, :],
                    log_sum_exp[..., queries],
                )
            if not is_last:
                kv = kv_hop.wait()
        out = out.to(q.dtype)  # after the last tile
        ctx.save_for_backward(q, my_kv, out, log_sum_exp)  # no scores, and no other rank's block
        ctx.order = order
        return out

    @staticmethod
    def backward(ctx, out_gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of q and my_kv.

        The blocks travel again, in n - 1 hops on n ranks as in forward. The gradient of a block
        follows it one turn behind, in fp32, and every rank adds to it. After n hops it is at the
        rank of the block. So forward and backward have 3 n - 2 hops.
        """
        q, kv, out, log_sum_exp = ctx.saved_tensors
        turns = dist.get_world_size()
        row_sums = (out_gradient.float() * out).sum(-1)  # [batch, kv_heads, group, queries]
        q_gradient = torch.zeros_like(q, dtype=torch.float32)
        kv_gradient = None  # of the block of the previous turn
        for turn in range(turns):
            is_last = turn == turns - 1
            if turn > 0:
                gradient_hop = Hop(kv_gradient)
            if not is_last:
                kv_hop = Hop(kv)
            kv_gradient = torch.zeros_like(kv, dtype=torch.float32)  # the term of this rank
            for queries, keys, is_diagonal in tiles(ctx.order, turn, tokens=q.shape[-2]):
                k, v = kv[..., keys, :]  # dimension 0: keys, values
                q_term, k_term, v_term = tile_gradients(
                    q[..., queries, :],
                    k,
                    v,
                    is_diagonal,
                    out_gradient[..., queries, :],
                    log_sum_exp[..., queries],
                    row_sums[..., queries],
                )
                q_gradient[..., queries, :] += q_term
                kv_gradient[0, ..., keys, :] += k_term
                kv_gradient[1, ..., keys, :] += v_term
            if turn > 0:
                kv_gradient += gradient_hop.wait()  # the shares of the ranks before
            if not is_last:
                kv = kv_hop.wait()
        if turns > 1:
            kv_gradient = Hop(kv_gradient).wait()  # the last block belongs to the next rank
        return q_gradient.to(q.dtype), kv_gradient.to(q.dtype), None


class Hop:
    """Send a tensor to the next rank, and receive one of the same shape from the previous rank.

    Both start at once. Do not write to the tensor before `wait`.
    """

    def __init__(self, leaving: Tensor) -> None:
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        self.leaving = leaving  # kept alive until it has been sent
        self.arriving = torch.empty_like(leaving)
        send = dist.P2POp(dist.isend, leaving, (rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, self.arriving, (rank - 1) % world_size)
        # As one group: with NCCL, ranks that all send first wait forever.
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Wait for both, and return the tensor that has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


# What a rank computes in a turn. The sequence has two chunks per rank, so its length must be
# divisible by 2 x ranks. With four ranks:
#
#     contiguous   rank 0 has chunks 0 1, rank 1 has 2 3, rank 2 has 4 5, rank 3 has 6 7
#     zigzag       rank 0 has chunks 0 7, rank 1 has 1 6, rank 2 has 2 5, rank 3 has 3 4
#
# Chunk 0 sees one chunk of keys, chunk 7 sees eight. In contiguous order the last rank computes
# most, and all others wait for it. Zigzag gives each rank an early and a late chunk.


def chunks_of_rank(order: str, rank: int) -> list[int]:
    """Return the two chunks of the sequence that a rank holds."""
    if order == "contiguous":
        return [2 * rank, 2 * rank + 1]
    return [rank, 2 * dist.get_world_size() - 1 - rank]


def positions_of_rank(order: str, seq_len: int) -> Tensor:
    """Return the positions in the sequence of this rank's tokens, [seq_len / ranks]."""
    positions = torch.arange(seq_len).unflatten(0, (2 * dist.get_world_size(), -1))
    # [chunks, tokens of a chunk] -> [2, tokens of a chunk] -> [tokens]
    return positions[chunks_of_rank(order, dist.get_rank())].flatten()


class Tile(NamedTuple):
    """A chunk of this rank's queries, and a chunk of the keys of this turn."""

    queries: slice
    keys: slice
    is_diagonal: bool  # both are the same chunk of the sequence


def tiles(order: str, turn: int, tokens: int) -> list[Tile]:
    """Return the tiles that this rank computes in a turn. A rank has `tokens` tokens.

    A tile whose keys are all later than its queries is left out.
    """
    rank = dist.get_rank()
    source = (rank - turn) % dist.get_world_size()
    halves = (slice(0, tokens // 2), slice(tokens // 2, tokens))
    computed = []
    for query_chunk, queries in zip(chunks_of_rank(order, rank), halves, strict=True):
        for key_chunk, keys in zip(chunks_of_rank(order, source), halves, strict=True):
            if key_chunk <= query_chunk:
                computed.append(Tile(queries, keys, key_chunk == query_chunk))
    return computed


# The functions below replace `attend` of lm/model.py. q is [batch, heads, tokens, head_dim], k and
# v are [batch, kv_heads, tokens, head_dim], for this rank's tokens and already rotated by RoPE. The
# model also passes a mask, is_causal and enable_gqa. These functions ignore them (*_ and **__):
# attention is always causal here, and the shapes tell how many heads there are.


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *_, order: str, **__) -> Tensor:
    """Return the attention of this rank's queries, [batch, heads, tokens, head_dim]."""
    grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, tokens, head_dim]
    out = RingAttention.apply(grouped, torch.stack((k, v)), order)
    return out.flatten(1, 2)


# Weakness of (1): each turn sends and computes little. With few tokens per rank the messages take
# longer than the arithmetic that they should overlap with.


# --- (2) all-gather


def all_gather_attention(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
    """Gather all keys and values on every rank. The order is contiguous.

    In backward each rank has gradients of all keys and values. A reduce-scatter sums them and gives
    each rank its own.
    """
    rank = dist.get_rank()
    tokens = q.shape[2]
    kv = torch.stack((k, v))  # [2, batch, kv_heads, tokens, head_dim]: one collective for both
    gathered = all_gather_with_backward(kv, gather_dim=0, group=dist.group.WORLD)
    by_rank = gathered.unflatten(0, (-1, 2))  # [ranks, 2, batch, kv_heads, tokens, head_dim]
    # each [batch, kv_heads, ranks * tokens, head_dim]
    all_keys, all_values = by_rank.movedim(0, 3).flatten(3, 4)

    key_positions = torch.arange(all_keys.shape[2], device=q.device)
    query_positions = key_positions[rank * tokens : (rank + 1) * tokens]
    mask = query_positions[:, None] >= key_positions  # [tokens, ranks * tokens]
    return model.attend(q, all_keys, all_values, mask, enable_gqa=q.shape[1] != k.shape[1])


# Weakness of (2): each rank holds the keys and values of all tokens. It computes the scores of its
# queries with all keys, and on average the mask hides half of them.


# --- (3) Ulysses


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
    """Exchange all heads of this rank's tokens for some heads of all tokens, and back.

    Attention never mixes heads, so any kernel can compute it between the two exchanges.
    """
    ranks = dist.get_world_size()
    # each [batch, ranks, heads / ranks, tokens, head_dim]
    by_rank = [tensor.unflatten(1, (ranks, -1)) for tensor in (q, k, v)]
    heads_per_rank = [tensor.shape[2] for tensor in by_rank]  # of q, of k and of v
    # q, k and v together: [ranks, batch, (heads + 2 * kv_heads) / ranks, tokens, head_dim]
    leaving = torch.cat(by_rank, dim=2).movedim(1, 0)
    arriving = exchange(leaving)  # part r has the tokens of rank r
    # [batch, (heads + 2 * kv_heads) / ranks, ranks * tokens, head_dim]
    full_sequence = arriving.movedim(0, 2).flatten(2, 3)
    q, k, v = full_sequence.split(heads_per_rank, dim=1)
    out = model.attend(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    leaving = out.unflatten(2, (ranks, -1)).movedim(2, 0)
    arriving = exchange(leaving)  # [ranks, batch, heads / ranks, tokens, head_dim]
    return arriving.movedim(0, 1).flatten(1, 2)  # [batch, heads, tokens, head_dim]


def exchange(parts: Tensor) -> Tensor:
    """Send part i to rank i, and put what rank i sends in its place. Backward is the same."""
    return all_to_all_with_backward(parts.contiguous(), None, None, group=dist.group.WORLD)


# Weakness of (3): the number of ranks must divide the number of key-value heads, and nothing is
# computed while the parts travel.


# --- how each variant shards a batch
#
# A batch has inputs, targets and positions, each [batch, tokens]. Targets were shifted before they
# are sharded: the last target of a shard is the first token of another one.

Batch = tuple[Tensor, Tensor, Tensor]


@contextmanager
def full_sequences(batch: Batch) -> Iterator[Batch]:
    """Leave the batch as it is, for one process."""
    yield batch


@contextmanager
def shard(batch: Batch, order: str) -> Iterator[Batch]:
    """Give each rank its tokens. RoPE gets their positions in the full sequence."""
    mine = positions_of_rank(order, seq_len=batch[0].shape[1])
    inputs, targets, positions = batch
    yield inputs[:, mine], targets[:, mine], positions[:, mine]


@contextmanager
def shard_with_torch(batch: Batch, mesh: DeviceMesh) -> Iterator[Batch]:
    """Shard the batch with torch: (4).

    Inside the context, `buffers` have the tokens of this rank in zigzag order, and torch replaces
    F.scaled_dot_product_attention by one over all ranks. The model is unchanged. Backward must run
    inside, too. Here `buffers` are any tensors with a sequence dimension, not a module's buffers.
    """
    buffers = [tensor.clone() for tensor in batch]  # torch resizes them in place
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        yield tuple(buffers)


class Variant(NamedTuple):
    """A context manager that shards a batch, and the function that computes attention."""

    shard: Callable[[Batch], AbstractContextManager[Batch]]
    attend: Callable[..., Tensor]  # replaces lm.model.attend


def make_variants(mesh: DeviceMesh) -> dict[str, Variant]:
    """Return all variants by name. Each rank computes the first one for itself."""
    contiguous = partial(shard, order="contiguous")
    zigzag = partial(shard, order="zigzag")
    return {
        "one process": Variant(full_sequences, model.attend),
        "ring, contiguous": Variant(contiguous, partial(ring_attention, order="contiguous")),
        "ring, zigzag": Variant(zigzag, partial(ring_attention, order="zigzag")),
        "all-gather": Variant(contiguous, all_gather_attention),
        "Ulysses": Variant(contiguous, ulysses_attention),
        "torch": Variant(partial(shard_with_torch, mesh=mesh), model.attend),
    }


# --- training


def forward(net: nn.Module, variant: Variant, my_batch: Batch, token_count: Tensor) -> Tensor:
    """Return this rank's share of the mean loss over all tokens of all ranks.

    It is a sum divided by the tokens of all ranks. A mean of the ranks' means would be wrong: where
    a text ends early, ranks have different numbers of targets.
    """
    for layer in net.model.layers.values():
        layer.self_attn.attend = variant.attend
    inputs, targets, positions = my_batch
    logits = net(inputs, positions=positions)
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss_sum / token_count


def train_step(net: nn.Module, variant: Variant, batch: Batch) -> Tensor:
    """Run forward and backward, and return this rank's share of the loss."""
    with variant.shard(batch) as my_batch:
        loss = forward(net, variant, my_batch, helper.count_targets(batch))
        loss.backward()
    return loss.detach()


def sum_over_ranks(loss: Tensor, net: nn.Module) -> None:
    """Sum the ranks' shares of the loss and of the gradients, in place.

    Each rank has used all weights for its own tokens, so gradients add up. They are not averaged.
    """
    tensors = [loss, *[parameter.grad for parameter in net.parameters()]]
    flat = nn.utils.parameters_to_vector(tensors)  # for one call instead of many
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, tensors)


def train(
    name: str,
    variant: Variant,
    start: nn.Module,
    batches: list[Batch],
    baseline_gradients: list[list[Tensor]],
) -> dict:
    """Train for a step per batch, and return the row of this variant.

    "one process" appends to baseline_gradients, and the others are compared with them.
    """
    net = copy.deepcopy(start)
    # A step of SGD is proportional to the gradient. Adam divides by the gradient's size, which
    # would hide a gradient that is N times too large.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses = []
    errors = []
    for step, batch in enumerate(batches):
        loss = train_step(net, variant, batch)
        gradients = [parameter.grad for parameter in net.parameters()]
        if name == "one process":
            baseline_gradients.append([gradient.clone() for gradient in gradients])
        else:
            sum_over_ranks(loss, net)
        losses.append(loss.item())
        errors.append(measure.relative_error(gradients, baseline_gradients[step]))
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # every rank has all gradients
        optimizer.step()
        optimizer.zero_grad()
    return {
        "name": name,
        "losses": losses,
        "weights_sha256": runtime.all_gather(digest(net)),
        "gradient_error": helper.largest(runtime.all_gather(errors)),
    }


def count_bytes(net: nn.Module, variant: Variant, batch: Batch) -> dict:
    """Run one more step, and return what it sends and what it keeps for backward.

    The all-reduce of gradients is left out: it is the same for all variants.
    """
    token_count = helper.count_targets(batch)
    with measure.Traffic() as sent, variant.shard(batch) as my_batch:
        with measure.LiveBytes(device=token_count.device) as live:
            before = live.now
            loss = forward(net, variant, my_batch, token_count)
            kept_bytes = live.now - before
        loss.backward()
    net.zero_grad()
    return {
        "calls": helper.in_words(sent.calls),
        "sent_bytes": round(sum(sent.bytes_sent.values())),
        "kept_bytes_per_rank": max(runtime.all_gather(kept_bytes)),
    }


def count_scores(order: str, seq_len: int) -> int:
    """Return how many scores of one head this rank computes in a forward of the ring."""
    tokens = seq_len // dist.get_world_size()
    tile_count = 0
    for turn in range(dist.get_world_size()):
        tile_count += len(tiles(order, turn, tokens))
    return tile_count * (tokens // 2) ** 2


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "seq_len": 4096, "batch_size": 2, "steps": 3},
        relaunches=True,
        model="nano",
        attention=("all", "ring", "all-gather", "ulysses", "torch"),
        seq_len=240,
        batch_size=4,
        steps=5,
        rounds=3,
    )
    # Before relaunch, a wrong flag raises one UserError. After it, every rank would raise it.
    config = shapes.load_config(args.model, 256, args.seq_len)
    names = helper.chosen_variants(args, config)
    lesson.relaunch(args.device)
    # This sets environment variables that NCCL reads in init_process_group.
    runtime.seed_all(0, deterministic=True)
    device = runtime.init_process_group(args.device)
    helper.register_cpu_attention(device)
    all_variants = make_variants(init_device_mesh(device.type, (dist.get_world_size(),)))
    variants = {name: all_variants[name] for name in names}

    # Every rank makes the same batches.
    all_inputs, all_targets = stdlib_text.one_batch(
        args.steps * args.batch_size, args.seq_len, device
    )
    positions = torch.arange(args.seq_len, device=device).expand(args.batch_size, -1)
    batches = []
    for step in range(args.steps):
        rows = slice(step * args.batch_size, (step + 1) * args.batch_size)
        targets = all_targets[rows]
        targets[0, 3 * (args.seq_len + 1) // 4 :] = PADDING  # a text that ends early
        batches.append((all_inputs[rows], targets, positions))

    bf16_rows = helper.errors_in_bf16(add_tile, tile_gradients, device)
    start = weights.build(args.model, config, seed=0, device=device)
    rows = []
    timed_steps = {}
    baseline_gradients = []
    for name, variant in variants.items():
        row = train(name, variant, start, batches, baseline_gradients)
        row |= count_bytes(start, variant, batches[0])
        if name.startswith("ring"):
            order = name.removeprefix("ring, ")
            row |= helper.scores_of_ranks(count_scores(order, args.seq_len))
        timed_steps[name] = partial(train_step, start, variant, batches[0])
        rows.append(row)
    seconds = measure.seconds_in_turns(timed_steps, device, args.rounds)
    for row in rows:
        row |= seconds[row["name"]]
        row["kept_share"] = row["kept_bytes_per_rank"] / rows[0]["kept_bytes_per_rank"]
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, config, args),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=args.steps * args.batch_size * args.seq_len,
        first_loss=rows[0]["losses"][0],
        last_loss=rows[0]["losses"][-1],
        bf16_rows=bf16_rows,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
