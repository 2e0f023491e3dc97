"""--advise: every way to spread a model over N devices that fits, the fastest first."""

from collections.abc import Iterator
from dataclasses import replace

import estimate
from _estimate_plan import CHECKPOINTING, Plan, check
from _estimate_shapes import Shape
from _estimate_time import GPUS_PER_NODE, Device, step_seconds

from old import report
from old.exits import UserError

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
LONG = 16_384  # tokens from which context parallelism is tried


def powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def candidates(shape: Shape, base: Plan, global_batch_size: int) -> Iterator[Plan]:
    """Plans for the same devices and the same batch. What `check` refuses is left out."""
    tensor = powers_of_two(min(GPUS_PER_NODE, base.gpus))  # its ranks wait for each other: inside a node only
    context = powers_of_two(min(GPUS_PER_NODE, base.gpus)) if base.seq_len >= LONG else [1]
    expert = powers_of_two(base.gpus) if shape.experts else [1]
    for tp in tensor:
        for pp in powers_of_two(min(base.gpus // tp, shape.layers)):
            for cp in context:
                for ep in expert:
                    sizes = replace(base, tp=tp, pp=pp, cp=cp, ep=ep, micro_batches=1, micro_batch_size=1)
                    if base.gpus % (tp * pp * cp) or (base.gpus // pp) % ep:
                        continue
                    try:
                        check(shape, sizes)
                    except UserError:
                        continue
                    yield from batches(sizes, global_batch_size)


def batches(sizes: Plan, global_batch_size: int) -> Iterator[Plan]:
    for micro_batch_size in MICRO_BATCH_SIZES:
        micro_batches, rest = divmod(global_batch_size, sizes.dp * micro_batch_size)
        if rest or micro_batches < sizes.pp:
            continue
        batch = replace(sizes, micro_batch_size=micro_batch_size, micro_batches=micro_batches)
        for zero in (0, 1, 2, 3) if sizes.shards > 1 else (0,):
            if zero >= 2 and sizes.pp > 1:
                continue  # a pipeline would gather the same weights in every micro-batch
            for checkpointing in CHECKPOINTING:
                yield replace(batch, zero=zero, checkpointing=checkpointing)


def advise(shape: Shape, base: Plan, device: Device, *, global_batch_size: int) -> list[dict]:
    """What fits, sorted by estimated seconds of a step, then by bytes. Empty: nothing does."""
    if not device.memory_bytes or not device.peak_flops:
        raise UserError(f"--advise needs a device whose memory and peak are known, and {device.name} is not one")
    flops = estimate.flops_per_token(shape, seq_len=base.seq_len)
    found = []
    for plan in candidates(shape, base, global_batch_size):
        lines = estimate.memory(shape, plan, stages=sorted({0, plan.pp - 1}))
        if lines["total_bytes"] <= device.memory_bytes:
            seconds = step_seconds(shape, plan, device, flops)
            found.append({"plan": plan, "step_seconds": seconds, "total_bytes": lines["total_bytes"]})
    return sorted(found, key=lambda row: (row["step_seconds"], row["total_bytes"]))


def print_advice(found: list[dict], device: Device, *, shown: int = 8) -> None:
    rows = [["zero", "tp x pp x cp x ep", "dp", "micro-batch", "checkpointing", "GiB", "s/step", "tokens/s/GPU"]]
    for row in found[:shown]:
        plan = row["plan"]
        tokens = plan.seq_len * plan.micro_batch_size * plan.micro_batches * plan.dp
        rows.append(
            [
                str(plan.zero),
                f"{plan.tp} x {plan.pp} x {plan.cp} x {plan.ep}",
                str(plan.dp),
                f"{plan.micro_batch_size} x {plan.micro_batches}",
                plan.checkpointing,
                f"{row['total_bytes'] / 2**30:.1f}",
                f"{row['step_seconds']:.2f}",
                f"{tokens / row['step_seconds'] / plan.gpus:,.0f}",
            ]
        )
    print(report.table(rows))
    print(f"\n{len(found)} plans fit into {device.memory_bytes / 2**30:.1f} GiB; ranked by estimated seconds of a step")
