"""Seconds of a training step, by cause. Backward is two matmuls for each of forward's, and five for attention's two."""

from dataclasses import dataclass
from math import prod

from planner.frameworks import FRAMEWORKS, LOSSES
from planner.machine import Machine, behind
from planner.memory import Memory
from planner.plan import DTYPES, Plan, check
from planner.shape import Shape

HALF_SIZE = 256  # a matmul of which one size is so small reaches half of the rate


@dataclass(frozen=True)
class Step:
    causes: dict[str, float]  # seconds
    seconds: float
    tokens: float  # of the global batch


def matmul_seconds(machine: Machine, m: float, k: float, n: float, fp8: str = "") -> float:
    """(m x k) times (k x n): arithmetic, at a rate that falls with small sizes, or moving three matrices."""
    # rowwise: no faster
    peak = machine.fp8_flops if fp8 == "tensorwise" and machine.fp8_flops else machine.peak_flops
    rate = peak * machine.efficiency[0] * prod(size / (size + HALF_SIZE) for size in (m, k, n))
    return max(2 * m * k * n / rate, machine.moved(2 * (m * k + k * n + m * n)))


def block_seconds(machine: Machine, plan: Plan, matrices: list[tuple[int, int]]) -> float:
    """Matmuls in a row, those of equal inputs as one. tp divides the inputs of the last, the outputs of the others."""
    *into, (last_inputs, last_outputs) = matrices
    found = matmul_seconds(machine, plan.tokens, last_inputs / plan.tp, last_outputs, plan.fp8)
    for inputs in dict(into):
        outputs = sum(n for k, n in into if k == inputs) / plan.tp
        found += matmul_seconds(machine, plan.tokens, inputs, outputs, plan.fp8)
    if plan.fp8:  # each operand is read twice, for its scale and its cast, and written in 8 bits
        found += machine.moved(5 * plan.tokens * sum(inputs for inputs, _ in matrices) / plan.tp)
    return found


def layer_causes(shape: Shape, plan: Plan, machine: Machine, *, experts: bool) -> dict[str, float]:
    """Forward and backward of one layer on one rank, for one micro-batch, and what backward repeats of forward."""
    traits, e, tp, tokens = FRAMEWORKS[plan.framework], DTYPES[plan.dtype], plan.tp, plan.tokens
    hidden, of_heads = tokens * shape.hidden * e, tokens * e / tp
    keys_and_values = of_heads * (
        shape.q_width + shape.value_width if shape.kv_rank else 2 * shape.kv_width
    )
    context = machine.gather(plan.cp, tp, plan.cp * keys_and_values, calls=2)
    # norms, rotations, residuals
    moved = 10 * hidden / tp + 4 * (of_heads * shape.q_width + keys_and_values)
    # causal attention sees half of the tokens; with gathered keys it computes what the mask hides, too
    seen = plan.seq_len * (1 if plan.cp > 1 and traits.gathered_keys else 0.5)
    scores = 2 * tokens / tp * (shape.q_width + shape.value_width) * seen
    attention = scores / (machine.peak_flops * machine.efficiency[1])
    matmuls, expert = block_seconds(machine, plan, shape.attention_matrices()), 0.0
    if experts:
        copies = tokens / tp * shape.active_experts * traits.imbalance  # on the busiest rank
        rows = copies * plan.ep / shape.experts
        for inputs, outputs in shape.feed_forward_matrices(shape.expert_ffn):
            matmuls += shape.experts / plan.ep * matmul_seconds(machine, rows, inputs, outputs)
        if shape.shared_ffn:
            matmuls += block_seconds(machine, plan, shape.feed_forward_matrices(shape.shared_ffn))
        moved += e * copies * (traits.permuted * shape.hidden + 4 * shape.expert_ffn)
        expert = 2 * machine.gather(plan.ep, 1, copies * shape.hidden * e, all_to_all=True)
    else:
        matmuls += block_seconds(machine, plan, shape.feed_forward_matrices(shape.ffn))
        moved += 4 * of_heads * shape.ffn
    kernels = machine.moved(moved * traits.moved)
    tensor = machine.gather(tp, 1, hidden)
    if traits.launch_tp and tp > 1 and plan.micro_batch_size > 1:
        tensor += machine.moved(2 * hidden)  # DTensor gathers along the first dimension, and copies
    # half runs behind matmuls: assumed
    tensor *= (2 if experts else 4) * (0.5 if plan.async_tp else 1.0)
    full, again = plan.checkpointing == "full", plan.checkpointing != "none"
    repeated = 1.0 if full else 0.5 if again and traits.every_second else 0.0  # of the matmuls
    # our selective keeps nothing that collectives gave; the last one of a layer is not needed again
    collectives = 0.75 if traits.gathered_keys and again and not full else repeated
    causes = {  # frozen matrices have no gradient of their own: a third of the arithmetic
        "compute": (2 if plan.adapters else 3) * matmuls + 3.5 * attention + 3 * kernels,
        "recomputation": repeated * matmuls + full * attention + again * kernels,
        "tensor": (2 + collectives) * tensor,
        "context": (2 + (again if traits.gathered_keys else full)) * context,
        "expert": (2 + full) * expert,
    }
    launches = (traits.launch + traits.launch_tp * (tp > 1)) * (2.5 + again)
    # Python runs ahead of the GPU, if it can
    return {**causes, "launches": max(0.0, launches - sum(causes.values()))}


def data_seconds(plan: Plan, machine: Machine, rank: Memory, busy: float) -> float:
    """Seconds that data parallelism adds to a step of which a micro-batch keeps the rank busy for `busy`."""
    traits, times = rank.traits, plan.micro_batches
    calls = plan.shards if traits.one_by_one and plan.zero else 1
    if plan.zero == 3:
        calls = rank.dense_layers + rank.expert_layers + 1

    def gather(bytes_each: float) -> float:
        """Of the stage's parameters; or the reduce-scatter of their gradients."""
        dense = machine.gather(plan.shards, plan.tp, rank.parameters * bytes_each, calls)
        of_experts = machine.gather(
            plan.expert_shards, plan.ep, rank.expert_parameters * bytes_each, calls
        )
        return dense + of_experts * (rank.expert_layers > 0)

    weights = gather(rank.e)
    if plan.zero < 3:
        gradients = gather(traits.gradient) * (1 if plan.zero else 2)  # an all-reduce is two
        exposed = behind(busy * 2 / 3, gradients) if traits.overlaps and calls == 1 else gradients
        return exposed + (weights if plan.zero else 0.0)
    # weights are gathered for forward and for backward of each micro-batch, unless a pipeline keeps them or gradients
    gathers, reduces = 2 * times, times * (not plan.adapters)
    if rank.gradients_stay_whole:
        gathers, reduces = 2 if rank.weights_stay_whole else times + plan.pp - 1, 1
    # each shard's gradient is added to those of its replicas, once a step
    across = 2 * machine.gather(
        plan.replicate, plan.tp * plan.shards, 4 * rank.all_parameters / plan.shards, calls
    )
    # fully_shard copies into and out of its buffers: 4 bytes for a number that is gathered, 12 for one that is reduced
    copied = machine.moved((4 * gathers + 12 * reduces) * rank.all_parameters)
    return copied + behind(times * busy, gathers * weights + reduces * gather(4) + across)


def step(shape: Shape, plan: Plan, machine: Machine) -> Step:
    """The slowest stage works for every micro-batch; while the pipeline fills and drains it waits for (pp - 1) /
    virtual more (1F1B: Narayanan et al. 2021, arXiv:2104.04473, section 2.2). ValueError: see plan.check."""
    check(shape, plan)
    if not (machine.peak_flops and machine.memory_bandwidth):
        raise ValueError(
            f"--device {machine.device}: its {plan.dtype} rate or bandwidth is not in common/devices.csv"
        )
    ranks = [Memory(shape, plan, number) for number in range(plan.pp)]
    dense = layer_causes(shape, plan, machine, experts=False)
    mixture = layer_causes(shape, plan, machine, experts=True) if shape.experts else dense
    by_stage = []
    for rank in ranks:
        causes = {
            cause: dense[cause] * rank.dense_layers + mixture[cause] * rank.expert_layers
            for cause in dense
        }
        if rank.last:  # output head and loss, which are not recomputed
            causes["compute"] += 3 * matmul_seconds(
                machine, plan.tokens, shape.hidden, shape.vocab / plan.tp
            )
            causes["compute"] += machine.moved(
                plan.tokens * shape.vocab / plan.tp * LOSSES[plan.loss][1]
            )
        if rank.traits.weight == 2:  # 16-bit gradients of matmuls are added to fp32 sums
            causes["compute"] += machine.moved(8 * rank.all_parameters)
        by_stage.append(causes)
    busy = [sum(causes.values()) for causes in by_stage]
    slowest = busy.index(max(busy))
    rank, found = (
        ranks[slowest],
        {cause: plan.micro_batches * part for cause, part in by_stage[slowest].items()},
    )
    found["data"] = data_seconds(plan, machine, rank, busy[slowest])
    # activations and their gradients; while the first micro-batch fills the pipeline all wait
    sends, sent = (
        2 * (plan.micro_batches * plan.virtual + plan.pp - 1),
        rank.own_tokens * shape.hidden * rank.e,
    )
    found["send"] = sends * machine.gather(min(plan.pp, 2), plan.gpus // plan.pp, 2 * sent)
    found["bubble"] = (plan.pp - 1) / plan.virtual * sum(busy) / plan.pp
    # AdamW reads weight, gradient and two moments and writes three of them (28 bytes) and a 16-bit copy; the gradient
    # is read for its norm, and set to zero
    found["optimizer"] = machine.moved(30 * rank.trained(1) + 8 * rank.trained(2))
    return Step(
        found,
        sum(found.values()),
        plan.dp * plan.micro_batches * plan.micro_batch_size * plan.seq_len,
    )
