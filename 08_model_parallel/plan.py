"""Which layout trains this model fastest on these GPUs? Every layout that fits is timed on paper; the best one explains
itself and comes with its command.

A step is arithmetic at the rate that its sizes reach, what ranks wait for each other, and a pipeline's bubble. Tensor
parallel makes products smaller and waits in every layer, so it stays inside a node. A pipeline sends little and is idle
for pp - 1 micro-batches. Data parallel hides its traffic behind backward, until a rank has too few tokens.
Recomputation buys memory for arithmetic. Bytes come from the formulas of 07_memory_tricks/estimate.py. No torch here,
except for --check.

    laptop    python 08_model_parallel/plan.py
    one node  python 08_model_parallel/plan.py --model llama-8b --gpus 8 --sequence 8192 --global-batch-tokens 1M
    cluster   python 08_model_parallel/plan.py --model llama-70b --gpus 1024 --device "NVIDIA H100 80GB HBM3" \\
                  --nodes-of 8 --link 50 --sequence 8192 --global-batch-tokens 4M
    a part of the choice is yours: --tp 8 --pp 4
    what it says of memory: --check builds the best layout on ranks that are not there, and compares what they hold

Look for: what the second best would lose, and where. Differences under a few percent are below the model's own error:
measure both. How far it is from measured steps: python benchmarks/planner_cases.py
Before: tensor, pipeline and context parallel in this folder. Next: train_3d.py runs the command.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "07_memory_tricks")]  # common/ and estimate.py, with nothing installed
from _estimate_frameworks import FRAMEWORKS
from _estimate_plan import DTYPES
from _estimate_shapes import Shape
from _estimate_stages import Stage, stage_of
from _plan_collectives import send_seconds
from _plan_data import data_seconds, optimizer_seconds
from _plan_habits import HABITS
from _plan_layer import head_seconds, layer_seconds, moved_seconds
from _plan_layout import Layout, bytes_of
from _plan_machine import Machine


def step_seconds(shape: Shape, layout: Layout, machine: Machine) -> dict[str, float]:
    """Seconds of a step by cause. The slowest stage works for every micro-batch; while the pipeline fills and drains it
    waits for (pp - 1) / virtual micro-batches more (1F1B: Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    stages = [stage_of(shape, layout, number) for number in range(layout.pp)]
    by_stage = micro_batch_seconds(shape, layout, machine, stages)
    busy = [sum(causes.values()) for causes in by_stage]
    slowest = busy.index(max(busy))
    step = {cause: layout.micro_batches * seconds for cause, seconds in by_stage[slowest].items()}
    step["send"] = boundary_seconds(shape, layout, machine)
    step["bubble"] = (layout.pp - 1) / layout.virtual * sum(busy) / layout.pp
    step["data"] = data_seconds(layout, machine, stages[slowest], busy[slowest])
    step["optimizer"] = optimizer_seconds(layout, machine, stages[slowest])
    return step


def micro_batch_seconds(shape: Shape, layout: Layout, machine: Machine, stages: list[Stage]) -> list[dict[str, float]]:
    """Seconds of a micro-batch, forward and backward, in each pipeline stage."""
    dense = layer_passes(shape, layout, machine, experts=False)
    mixture = layer_passes(shape, layout, machine, experts=True) if shape.experts else dense
    found = []
    for stage in stages:
        causes = {cause: dense[cause] * stage.dense_layers + mixture[cause] * stage.expert_layers for cause in dense}
        if stage.last:
            causes["compute"] += head_seconds(shape, layout, machine)
        if FRAMEWORKS[layout.framework].weight == 2:  # 16-bit gradients of products are added to fp32 sums
            causes["compute"] += moved_seconds(machine, 8 * stage.all_parameters)
        found.append(causes)
    return found


def layer_passes(shape: Shape, layout: Layout, machine: Machine, *, experts: bool) -> dict[str, float]:
    """Seconds of a micro-batch, forward and backward, in one layer. Backward is two products for each of forward's,
    and five for attention's two; what it repeats of forward is recomputation."""
    forward = layer_seconds(shape, layout, machine, experts=experts)
    habits = HABITS[layout.framework]
    products, attention, moved = layout.recomputed
    tensor_again, context_again = products, attention
    if layout.checkpointing == "selective" and not habits.keeps_gathered:
        tensor_again, context_again = 3 / 4, 1.0  # nothing needs what the last collective of a layer gave
    causes = {
        "compute": 3 * forward.products + 3.5 * forward.attention + 3 * forward.moved,
        "recomputation": products * forward.products + attention * forward.attention + moved * forward.moved,
        "tensor": (2 + tensor_again) * forward.tensor,
        "context": (2 + context_again) * forward.context,
        "expert": (2 + attention) * forward.expert,
    }
    launches = (habits.launch + (habits.launch_tp if layout.tp > 1 else 0)) * (2.5 + moved)
    return {**causes, "launches": max(0.0, launches - sum(causes.values()))}  # Python runs ahead of the GPU, if it can


def boundary_seconds(shape: Shape, layout: Layout, machine: Machine) -> float:
    """Activations and their gradients between stages; while the first micro-batch fills the pipeline all wait."""
    if layout.pp == 1:
        return 0.0
    size = layout.tokens * shape.hidden * DTYPES[layout.dtype] / layout.tp
    sends = 2 * (layout.micro_batches * layout.virtual + layout.pp - 1)
    return sends * send_seconds(machine, layout.gpus // layout.pp, size)


def rank(shape: Shape, layouts: Iterable[Layout], machine: Machine) -> tuple[list[dict], float]:
    """Layouts that fit, the fastest first, and the bytes of the one that needs least."""
    found = []
    least = float("inf")
    for layout in layouts:
        total = bytes_of(shape, layout)["total_bytes"]
        least = min(least, total)
        if total <= machine.memory_bytes:
            causes = step_seconds(shape, layout, machine)
            row = {"layout": layout, "step_seconds": sum(causes.values()), "causes": causes, "total_bytes": total}
            found.append(row)
    return sorted(found, key=lambda row: (row["step_seconds"], row["total_bytes"])), least


def main() -> int:
    from _plan_report import answer

    return answer(__doc__)


if __name__ == "__main__":
    from old import exits

    exits.run(main)
