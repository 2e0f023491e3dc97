"""Seconds of a training step on one rank, by cause; and of a decode step.

A step is the sum of what its kernels need: arithmetic at a share of the peak rate, or bytes at a
share of the memory bandwidth. planner/measured.py has the shares. Communication adds what cannot
run beside them, and a pipeline its bubble. The functions return the seconds of one micro-batch
unless they say otherwise.

In the formulas, r is the bytes of a number of the residual stream, and e that of a number in
--dtype.
"""

from dataclasses import dataclass

from planner import measured
from planner.machine import Machine, behind
from planner.plan import CHUNKS, Plan, check
from planner.rank import Rank
from planner.shape import Shape

TILE = 128  # rows and columns of the scores that an attention kernel computes at once


@dataclass(frozen=True)
class Step:
    """The seconds of a step by cause, their sum, and the tokens of the global batch."""

    causes: dict[str, float]
    seconds: float
    tokens: float


# --- what kernels need


def matmul_seconds(machine: Machine, rows: float, inputs: float, outputs: float) -> float:
    """Return the seconds of one matmul, [rows, inputs] x [inputs, outputs].

    It is bound by its 2 x rows x inputs x outputs FLOPs, or by moving its three matrices once. They
    count two bytes a number.
    """
    assert machine.peak_flops is not None
    flops = 2 * rows * inputs * outputs
    numbers = rows * inputs + inputs * outputs + rows * outputs
    arithmetic = flops / (machine.peak_flops * measured.MATMUL)
    return max(arithmetic, machine.moved(2 * numbers, measured.STREAM))


def layer_matmul_seconds(rank: Rank, machine: Machine, *, experts: bool) -> float:
    """Return the seconds of the matmuls in one layer's forward.

    tp shares the inputs of the last matrix of attention and MLP, and the outputs of the others. The
    busiest rank's experts get more tokens than the mean.
    """
    shape = rank.shape
    plan = rank.plan
    blocks = [shape.attention_matrices()]
    if not experts:
        blocks.append(shape.feed_forward_matrices(shape.ffn))
    elif shape.shared_ffn:
        blocks.append(shape.feed_forward_matrices(shape.shared_ffn))

    seconds = 0.0
    for *leading, (last_inputs, last_outputs) in blocks:
        for inputs, outputs in leading:
            seconds += matmul_seconds(machine, plan.tokens, inputs, outputs / plan.tp)
        seconds += matmul_seconds(machine, plan.tokens, last_inputs / plan.tp, last_outputs)

    if experts:
        own_experts = shape.experts / plan.ep
        rows = expert_tokens(rank) / own_experts
        for inputs, outputs in shape.feed_forward_matrices(shape.expert_ffn):
            seconds += own_experts * matmul_seconds(machine, rows, inputs, outputs)
    return seconds


def expert_tokens(rank: Rank) -> float:
    """Return the tokens that the experts of the busiest rank get, a token once for each expert."""
    return rank.own_tokens * rank.shape.active_experts * measured.EXPERT_IMBALANCE


def attention_flops(rank: Rank) -> float:
    """Return the FLOPs of one layer's attention in forward: two matmuls, queries by keys.

    Kernels compute the scores in tiles, and skip the tiles above the diagonal. Of n x n tiles
    (n + 1) n / 2 are left. Context parallelism shares them out equally, by zigzag order.
    """
    plan = rank.plan
    tiles = max(1, plan.seq_len / TILE)
    computed = (tiles + 1) / (2 * tiles)
    widths = rank.shape.q_width + rank.shape.value_width
    return 2 * rank.own_tokens * widths * plan.seq_len * computed


def dequantization_size(rank: Rank) -> float:
    """Return the bytes that the kernels move for each weight that they dequantize.

    Compiled, they read 4 bits and write a number. Eager, they take two codes from each byte and
    join the two, 1 + 1 + 2 bytes, multiply by the scale and add the minimum.
    """
    if rank.plan.compile:
        return 0.5 + rank.e
    return 1 + 1 + 2 + (1 + rank.e) + 2 * rank.e


def attention_seconds(rank: Rank, machine: Machine) -> float:
    """Return the seconds of one layer's attention in forward. Backward has 2.5 times the FLOPs."""
    assert machine.peak_flops is not None
    return attention_flops(rank) / (machine.peak_flops * measured.ATTENTION)


def forward_kernel_bytes(rank: Rank, *, experts: bool) -> float:
    """Return the bytes that the kernels between a layer's matmuls move in forward, per token.

    Compiled, each norm is one kernel with the residual connection before it: it reads the residual
    and a branch's output, and writes the residual and the normed input. RoPE reads and writes
    queries and keys. silu(gate) * up reads two tensors and writes one.

    Eager, each operation reads and writes: the norm, under autocast its cast, the addition, the
    product; and RoPE's six operations, four of them in fp32.
    """
    shape = rank.shape
    e = rank.e
    r = rank.residual_size
    rotated = shape.q_width + shape.kv_width
    ffn = shape.active_ffn(experts)
    if rank.plan.compile:
        size = 2 * (2 * r + 2 * e) * shape.hidden + 2 * e * rotated + 3 * e * ffn
    else:
        cast = r + e if rank.cast_size else 0
        norms = 2 * (2 * r + cast)
        additions = 2 * (2 * r + e)
        rope = 2 * (e + 4) + 8 + 8 + 12
        size = (norms + additions) * shape.hidden + rope * rotated + 5 * e * ffn
    if experts:
        size += e * measured.EXPERT_COPIES * shape.active_experts * shape.hidden
    return size


def backward_kernel_bytes(rank: Rank, *, experts: bool) -> float:
    """Return the same of backward, per token.

    Compiled, SwiGLU reads gate, up and the product's gradient, and writes the product again and two
    gradients. Each norm reads its input, the gradients of its two or three matmuls' inputs and of
    the residual, and writes the residual's gradient, also in --dtype. RoPE is as in forward.

    Eager, the two products and silu have 3 tensors each, and the gradients of the norms' outputs
    are summed, cast, and taken through the norm, the addition and the next cast one by one.
    """
    shape = rank.shape
    e = rank.e
    r = rank.residual_size
    rotated = shape.q_width + shape.kv_width
    ffn = shape.active_ffn(experts)
    if rank.plan.compile:
        norms = 2 * 3 * r + (2 + 3) * e + 2 * e
        size = norms * shape.hidden + 2 * e * rotated + 6 * e * ffn
    else:
        sums = (1 + 2) * 3 * e
        casts = 2 * (e + 4 + r + e) if rank.cast_size else 0
        norms_and_additions = 2 * 6 * r
        rope = 2 * (e + 4) + 8 + 8 + 8 + 12
        size = (sums + casts + norms_and_additions) * shape.hidden + rope * rotated + 9 * e * ffn
    if experts:
        size += 2 * e * measured.EXPERT_COPIES * shape.active_experts * shape.hidden
    return size


def cast_bytes(rank: Rank) -> float:
    """Return the bytes that autocast moves in a micro-batch: weights to 16 bits, gradients back."""
    if not rank.cast_size:
        return 0.0
    return 2 * (4 + rank.e) * rank.matrices


def loss_seconds(rank: Rank, machine: Machine) -> float:
    """Return the seconds of head and loss, forward and backward, on the stage that has them.

    The head is three matmuls. Fused, the loss reads the logits twice, for their sum and for their
    gradient, and writes that in their place: 6 bytes a logit. Plain, forward casts to fp32 and
    makes log-softmax, 6 + 8 bytes; backward makes the gradients of log-softmax and logits and casts
    back, 4 + 12 + 6. With the vocabulary on several ranks exp(log-softmax) is a tensor more. In
    chunks, forward does the same, and its gradient is log-softmax in place, cast back: 8 + 6. Each
    chunk also reads and writes the gradient of the head.
    """
    if not rank.has_head:
        return 0.0
    shape = rank.shape
    vocab = shape.vocab / rank.plan.tp
    head = 3 * matmul_seconds(machine, rank.plan.tokens, shape.hidden, vocab)
    number = rank.plan.tokens * vocab
    method = rank.plan.loss_method
    if method == "fused":
        return head + machine.moved(3 * rank.e * number, measured.LOSS)
    if method == "chunked":
        passes = 0 if rank.plan.adapters else CHUNKS
        size = (6 + 8 + 8 + 6) * number + passes * 2 * rank.e * rank.embedding
        return head + machine.moved(size)
    bytes_each = 6 + 8 + 4 + 12 + 6
    if method == "parallel":
        bytes_each += 8
    return head + machine.moved(bytes_each * number)


def optimizer_seconds(rank: Rank, machine: Machine) -> float:
    """Return the seconds of clipping and AdamW, once a step.

    Clipping reads the gradients for their norm, then reads and writes them: 12 bytes. AdamW reads
    weight, gradient and two moments, and writes all but the gradient: 28.
    """
    size = 12 * rank.trained(2) + 28 * rank.trained(1)
    return machine.moved(size, measured.OPTIMIZER)


# --- what ranks wait for


def tensor_seconds(rank: Rank, machine: Machine, *, experts: bool) -> float:
    """Return the seconds of tensor parallel's collectives in one layer's forward.

    Attention and MLP each gather their input and reduce-scatter their output. DTensor gathers along
    the first dimension: with several sequences it copies the result.
    """
    plan = rank.plan
    if plan.tp == 1:
        return 0.0
    hidden = plan.tokens * rank.shape.hidden * rank.e
    seconds = machine.gather(plan.tp, 1, hidden)
    if plan.micro_batch_size > 1:
        seconds += machine.moved(2 * hidden)
    return (2 if experts else 4) * seconds


def context_seconds(rank: Rank, machine: Machine) -> float:
    """Return the seconds in which context-parallel ranks gather one layer's keys and values.

    Then two copies bring them in order, and one joins the outputs of a rank's two chunks. In a ring
    each rank sends to the next one, through its own port, once for each other rank.
    """
    plan = rank.plan
    shape = rank.shape
    widths = 2 * shape.kv_width
    if shape.kv_rank:
        widths = shape.q_width + shape.value_width
    size = plan.cp * rank.own_tokens * widths * rank.e
    if plan.ring:
        hops = plan.cp - 1
        seconds = machine.gather(plan.cp, plan.tp, size, all_to_all=True)
        return seconds + hops * measured.START_SECONDS
    if plan.cp == 1:
        return 0.0
    outputs = rank.own_tokens * shape.value_width * rank.e
    copies = machine.moved(4 * size + 2 * outputs)
    return machine.gather(plan.cp, plan.tp, size, calls=2) + copies


def expert_seconds(rank: Rank, machine: Machine) -> float:
    """Return the seconds in which tokens travel to their experts and back, in one layer's forward.

    An all-to-all dispatches a row of the hidden size for each choice of the router, and another one
    combines the results. Backward has two more.
    """
    size = expert_tokens(rank) * rank.shape.hidden * rank.e
    return 2 * machine.gather(rank.plan.ep, 1, size, all_to_all=True)


def launch_seconds(rank: Rank) -> float:
    """Return the seconds in which Python starts the kernels of one layer, forward and backward."""
    launches: float = measured.LAUNCHES["compiled" if rank.plan.compile else "eager"]
    if rank.plan.tp > 1 and not rank.plan.compile:
        launches *= measured.TENSOR_LAUNCHES
    if rank.plan.checkpointing != "none":
        launches *= 4 / 3  # forward runs twice
    return launches * measured.LAUNCH_SECONDS


def layer_causes(rank: Rank, machine: Machine, *, experts: bool) -> dict[str, float]:
    """Return the seconds of one layer by cause: forward, backward, and what backward repeats.

    Backward has two matmuls for each of forward's, of which a frozen matrix needs one. Full
    checkpointing repeats the whole forward. Selective checkpointing repeats what is neither a
    matmul nor attention, and all collectives but the last of a layer.
    """
    plan = rank.plan
    full = plan.checkpointing == "full"
    selective = plan.checkpointing == "selective"
    matmuls = layer_matmul_seconds(rank, machine, experts=experts)
    attention = attention_seconds(rank, machine)
    forward = machine.moved(rank.own_tokens * forward_kernel_bytes(rank, experts=experts))
    backward = machine.moved(rank.own_tokens * backward_kernel_bytes(rank, experts=experts))
    if plan.weights == "int4":
        dequantized = machine.moved(rank.layer_matrices * dequantization_size(rank))
        forward += dequantized
        backward += dequantized
    tensor = tensor_seconds(rank, machine, experts=experts)
    context = context_seconds(rank, machine)
    expert = expert_seconds(rank, machine) if experts else 0.0

    recomputation = 0.0
    tensor_times = 2.0
    context_times = 2
    expert_times = 2
    if full:
        recomputation = matmuls + attention + forward
        tensor_times = 3.0
        context_times = 3
        expert_times = 3
    elif selective:
        recomputation = forward
        tensor_times = 2.75
        context_times = 3
    attention_times = 3.5
    exposed_context = context_times * context
    if plan.ring:
        # In backward the gradients of keys and values travel, too, in fp32. All of it runs beside
        # attention.
        attention_passes = attention_times + 1 if full else attention_times
        of_gradients = 4 / rank.e
        exposed_context = behind(
            attention_passes * attention, (context_times + of_gradients) * context
        )
    causes = {
        "matmuls": (2 if plan.adapters else 3) * matmuls,
        "attention": attention_times * attention,
        "kernels": forward + backward,
        "recomputation": recomputation,
        "tensor": tensor_times * tensor,
        "context": exposed_context,
        "expert": expert_times * expert,
    }
    # Python runs ahead of the GPU if it can.
    causes["launches"] = max(0.0, launch_seconds(rank) - sum(causes.values()))
    return causes


def stage_causes(rank: Rank, machine: Machine) -> dict[str, float]:
    """Return the seconds of one micro-batch on a stage by cause, without data parallelism."""
    causes = {}
    dense = layer_causes(rank, machine, experts=False)
    mixture = dense
    if rank.shape.experts:
        mixture = layer_causes(rank, machine, experts=True)
    for cause in dense:
        causes[cause] = dense[cause] * rank.dense_layers + mixture[cause] * rank.expert_layers
    causes["kernels"] += machine.moved(cast_bytes(rank))
    causes["loss"] = loss_seconds(rank, machine)
    causes["gaps"] = measured.GAPS * sum(causes.values())
    return causes


def data_seconds(rank: Rank, machine: Machine, busy: float) -> float:
    """Return the seconds that data parallelism adds to a step.

    A micro-batch keeps the rank busy for `busy` seconds, two thirds of them in backward.
    """
    plan = rank.plan
    if plan.is_fsdp:
        return fsdp_seconds(rank, machine, busy)
    weights = gather_parameters(rank, machine, 4)
    gradients = gather_parameters(rank, machine, 4)
    if plan.zero == 0:
        # The last backward of a step averages gradients, an all-reduce: reduce-scatter, all-gather.
        return behind(busy * 2 / 3, 2 * gradients)
    if plan.zero < 3:
        return behind(busy * 2 / 3, gradients) + weights
    return behind(plan.micro_batches * busy, plan.micro_batches * (2 * weights + gradients))


def gather_parameters(rank: Rank, machine: Machine, bytes_each: float) -> float:
    """Return the seconds in which a stage's parameters are gathered, or gradients scattered."""
    plan = rank.plan
    calls = 1
    if plan.zero == 3:
        calls = rank.layers + (2 if rank.has_two_groups else 1)
    seconds = machine.gather(plan.shards, plan.tp, rank.parameters * bytes_each, calls)
    if rank.expert_layers:
        size = rank.expert_parameters * bytes_each
        seconds += machine.gather(plan.expert_shards, plan.ep, size, calls)
    return seconds


def fsdp_seconds(rank: Rank, machine: Machine, busy: float) -> float:
    """Return the seconds that FSDP adds to a step.

    Every micro-batch gathers the weights for forward and for backward, and reduces the gradients.
    In a pipeline gradients are reduced once, after the last backward. Weights are gathered once;
    or, with --reshard-after-forward on, for each forward and until backward has gathered them.
    Replicas then average what they hold.

    fully_shard copies beside the collectives. To gather, it casts a shard from fp32 to --dtype and
    copies it (4 + 2 and 2 + 2 bytes), beside other kernels; it copies the gathered numbers out (2 +
    2), before the block computes. To reduce, it copies gradients to fp32 (2 + 4) and adds (4 + 4).
    """
    plan = rank.plan
    times = plan.micro_batches
    gathers = 2 * times
    reduces = times
    if rank.gradients_stay_whole:
        gathers = times + plan.pp - 1
        reduces = 1
    if rank.weights_stay_gathered:
        gathers = 1
    reduced = rank.all_parameters
    if plan.adapters:
        reduced = rank.layer_adapters * rank.layers

    size = rank.frozen_bytes(rank.gathered_size) / rank.all_parameters
    communication = gathers * gather_parameters(rank, machine, size)
    communication += reduces * gather_parameters(rank, machine, 4) * reduced / rank.all_parameters
    replicas = 4 * rank.trained(3)
    communication += 2 * machine.gather(plan.replicate, plan.tp * plan.shards, replicas)

    # Embedding and head stay gathered from forward to backward.
    gathered = gathers * rank.all_parameters
    if not rank.weights_stay_gathered:
        gathered -= (gathers / 2) * rank.root
    in_stream = machine.moved(2 * size * gathered, measured.STREAM)
    beside = machine.moved((4 + 3 * size) * gathered + (rank.e + 12) * reduces * reduced)
    return in_stream + behind(times * busy, communication + beside)


def send_seconds(rank: Rank, machine: Machine) -> float:
    """Return the seconds in which a step's activations and gradients travel between stages.

    While the first micro-batch fills the pipeline all other stages wait for it.
    """
    plan = rank.plan
    sends = 2 * (plan.stages_per_rank * plan.micro_batches + plan.pp - 1)
    size = rank.own_tokens * rank.shape.hidden * rank.e
    return sends * machine.gather(min(plan.pp, 2), plan.gpus // plan.pp, 2 * size)


def bubble_seconds(plan: Plan, busy_by_stage: list[float]) -> float:
    """Return the seconds in which a stage waits while the pipeline fills and drains.

    It waits for pp - 1 micro-batches of a stage. Interleaved, a rank has several stages, which are
    as much smaller (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
    """
    return (plan.pp - 1) * sum(busy_by_stage) / plan.pp / plan.stages_per_rank


# --- the step


def step(shape: Shape, plan: Plan, machine: Machine) -> Step:
    """Return the seconds of a training step, those of the slowest pipeline stage.

    Raise ValueError if there is no such plan (see planner.plan.check), or if common/devices.csv
    lacks the device's rate or bandwidth.
    """
    check(shape, plan)
    if not (machine.peak_flops and machine.memory_bandwidth):
        raise ValueError(
            f"--device {machine.device}: its {plan.dtype} rate or bandwidth is not in "
            "common/devices.csv"
        )
    ranks = [Rank(shape, plan, stage) for stage in range(plan.pp)]
    causes_by_stage = [stage_causes(rank, machine) for rank in ranks]
    busy_by_stage = [sum(causes.values()) for causes in causes_by_stage]
    slowest = busy_by_stage.index(max(busy_by_stage))
    rank = ranks[slowest]

    causes = {}
    for cause, seconds in causes_by_stage[slowest].items():
        causes[cause] = plan.micro_batches * seconds
    causes["data"] = data_seconds(rank, machine, busy_by_stage[slowest])
    causes["send"] = send_seconds(rank, machine)
    causes["bubble"] = bubble_seconds(plan, busy_by_stage)
    causes["optimizer"] = optimizer_seconds(rank, machine)
    tokens = plan.dp * plan.micro_batches * plan.micro_batch_size * plan.seq_len
    return Step(causes, sum(causes.values()), tokens)


def decode_seconds(
    shape: Shape,
    machine: Machine,
    *,
    bytes_read: float,
    weights: str = "bf16",
    sequences: int = 1,
    tp: int = 1,
) -> float:
    """Return the seconds of one compiled decode step, which gives each sequence a token.

    Each of tp ranks streams its weights and KV cache, `bytes_read`, or is bound by its matmuls if
    there are many sequences. Each layer costs a fixed time beside that, and with tp > 1 two
    all-reduces of the hidden states.
    """
    share = measured.INT4_STREAM if weights == "int4" else measured.STREAM
    seconds = machine.moved(bytes_read, share)
    if machine.peak_flops:
        flops = 2 * shape.parameter_count(active=True) * sequences / tp
        seconds = max(seconds, flops / (machine.peak_flops * measured.MATMUL))
    hidden = sequences * shape.hidden * 2
    all_reduce = 2 * machine.gather(tp, 1, hidden)
    return seconds + shape.layers * (measured.DECODE_LAYER_SECONDS + 2 * all_reduce)
