"""What plan.py prints: the ranking, and why the first of it wins."""

import time
from math import isclose
from pathlib import Path

import _estimate_shapes as shapes
import estimate
import plan
from _estimate_config import read_shape
from _estimate_shapes import Shape
from _plan_flags import check_mesh, nearest_batch, parser, sequences_of
from _plan_layout import Layout
from _plan_machine import EFFICIENCIES, MARGIN, Machine, read_machine
from _plan_search import layouts

from old import report
from old.exits import UserError
from old.shapes import read_config

GIB = 2**30
ALWAYS_SHOWN = ("compute", "bubble")
NO_SCRIPT = "train_3d.py trains our sizes and any config.json of a Llama; for {model} there is no command"
SHOWN = 8
IN_JSON = 50
NEAR = {"weights": 0.01, "gradients": 0.01, "optimizer state": 0.01, "peak": 0.1}  # relative errors that --check allows
CAUSES = {
    "compute": "products, attention, and kernels between them",
    "recomputation": "what backward computes again",
    "tensor": "exposed: gathers and scatters of tensor parallel",
    "context": "exposed: keys and values between context-parallel ranks",
    "expert": "exposed: tokens to their experts and back",
    "data": "exposed: weights and gradients of data parallel",
    "send": "exposed: activations between pipeline stages",
    "bubble": "stages that wait while the pipeline fills and drains",
    "launches": "the GPU waits for Python to start kernels",
    "optimizer": "AdamW and the gradient's norm",
}


def answer(description: str) -> int:
    args = parser(description).parse_args()
    started = time.perf_counter()
    shape = read_shape(args.model)
    machine = read_machine(args.device, gpus_per_node=args.nodes_of, network=args.link * 1e9)
    if args.sequence and shape.positions and args.sequence > shape.positions:
        raise UserError(f"--sequence {args.sequence} is over the limit of --model {args.model}: {shape.positions}")
    seq_len = args.sequence or min(4096, shape.positions or 4096)
    base = Layout(gpus=args.gpus, seq_len=seq_len)
    check_mesh(args, shape, base)
    sequences = sequences_of(args, seq_len)
    fixed = {name: getattr(args, name) for name in ("tp", "pp", "cp")}
    tried = list(layouts(shape, machine, base, sequences=sequences, fixed=fixed))
    if not tried:
        raise UserError(
            f"--global-batch-tokens {args.global_batch_tokens}: its {sequences} sequences cannot be divided over "
            f"--gpus {args.gpus} in any way that --model {args.model} allows: try {nearest_batch(args)} sequences"
        )
    ranked, least = plan.rank(shape, tried, machine)
    if not ranked:
        raise UserError(
            f"--model {args.model} does not fit on --gpus {args.gpus} x {args.device}: the smallest of {len(tried):,} "
            f"layouts needs {least / GIB:.1f} GiB of each, {(least - machine.memory_bytes) / GIB:.1f} GiB too much"
        )
    seconds = time.perf_counter() - started
    best = ranked[0]
    flops = estimate.flops_per_token(shape, seq_len=seq_len)
    speed = args.global_batch_tokens / best["step_seconds"]
    print(
        f"{args.model} on {args.gpus} x {args.device}, {sequences:,} sequences of {seq_len:,} tokens per step: "
        f"{len(tried):,} layouts, {len(ranked):,} fit into {machine.memory_bytes / GIB:.1f} GiB "
        f"({MARGIN:.0%} stay free)\n"
    )
    print(report.table(ranking_rows(ranked[:SHOWN], args.global_batch_tokens)))
    print_reasons(ranked)
    print_assumptions(machine)
    start = command(args.model, best["layout"], machine)
    print(f"\nstart it on each node:\n{start}\n" if start else f"\n{NO_SCRIPT.format(model=args.model)}\n")
    print_checks(best, machine, args.global_batch_tokens)
    built = check_bytes(shape, best["layout"]) if args.check else []
    summary = {
        "device": machine.device,
        "world_size": args.gpus,
        "dtype": base.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(shape),
        "tokens": args.global_batch_tokens,
        "tokens_per_second": speed,
        "mfu": speed * flops / (machine.peak_flops * args.gpus),
        "seconds": seconds,
        "predicted": True,  # speed and MFU are computed, not measured
        "efficiency": vars(machine.efficiency),
        "tried": len(tried),
        "fit": len(ranked),
        "command": start,
        "built": built,
        "ranking": [{**row, "layout": vars(row["layout"])} for row in ranked[:IN_JSON]],
    }
    report.write_json(summary, args.json)
    return 0 if all(row["near"] for row in built) else 1


def ranking_rows(ranked: list[dict], tokens: int) -> list[list[str]]:
    rows = [["tp x pp x cp x ep", "shards x replicas", "micro-batch", "recomputation"]]
    rows[0] += ["GiB", "s/step", "tokens/s/GPU"]
    for row in ranked:
        layout = row["layout"]
        rows.append(
            [
                f"{layout.tp} x {layout.pp} x {layout.cp} x {layout.ep}",
                f"{layout.sharded_over} x {layout.replicate}",
                f"{layout.micro_batch_size} x {layout.micro_batches}",
                layout.checkpointing,
                f"{row['total_bytes'] / GIB:.1f}",
                f"{row['step_seconds']:.3f}",
                f"{tokens / row['step_seconds'] / layout.gpus:,.0f}",
            ]
        )
    return rows


def mesh(layout: Layout) -> tuple[int, int, int, int]:
    return layout.tp, layout.pp, layout.cp, layout.ep


def print_reasons(ranked: list[dict]) -> None:
    """Where a step's time goes in the best layout, beside the best ones of the two next meshes."""
    first_of_mesh = {}
    for row in ranked:
        first_of_mesh.setdefault(mesh(row["layout"]), row)
    compared = list(first_of_mesh.values())[:3]
    others = ["x".join(map(str, mesh(row["layout"]))) for row in compared[1:]]
    rows = [["seconds of a step", "best", *others, "what it is"]]
    for cause, words in CAUSES.items():
        if cause in ALWAYS_SHOWN or any(row["causes"][cause] > 0.0005 for row in compared):
            rows.append([cause, *(f"{row['causes'][cause]:.3f}" for row in compared), words])
    print(f"\nwhy it wins:\n\n{report.table(rows)}\n")
    best = compared[0]
    for row in compared[1:]:
        loss, cause = max((row["causes"][cause] - best["causes"][cause], cause) for cause in CAUSES)
        ratio = row["step_seconds"] / best["step_seconds"]
        name = " x ".join(map(str, mesh(row["layout"])))
        print(f"tp x pp x cp x ep = {name} takes {ratio:.3f} times as long: {loss:.3f} s more of {cause}")


def print_assumptions(machine: Machine) -> None:
    share = machine.efficiency
    source = "fitted to measured steps" if machine.device in EFFICIENCIES else "no step of this device was measured"
    print(
        f"\nassumed ({source}): large products reach {share.products:.0%} of {machine.peak_flops / 1e12:,.0f} TFLOP/s, "
        f"attention {share.attention:.0%};\ncollectives {share.links:.0%} of {machine.link / 1e9:,.0f} GB/s inside a "
        f"node and {share.network:.0%} of {machine.network / 1e9:,.0f} GB/s between nodes"
    )


def command(model: str, layout: Layout, machine: Machine) -> str | None:
    """What starts the layout, for each node; None if train_3d.py does not train that model."""
    try:
        read_config(model)
    except UserError:
        return None
    if Path(model).is_dir() and layout.tp * layout.pp > 1:  # train_3d.py cuts these ways from random weights only
        model = str(Path(model, "config.json"))
    per_node = min(machine.gpus_per_node, layout.gpus)
    nodes = layout.gpus // per_node
    where = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500" if nodes > 1 else "--standalone"
    flags = {
        "model": model,
        "seq-len": layout.seq_len,
        "global-batch-size": layout.dp * layout.micro_batch_size * layout.micro_batches,
        "micro-batch-size": layout.micro_batch_size,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "replicate": layout.replicate,
        "checkpointing": layout.checkpointing,
    }
    text = " ".join(f"--{name} {value}" for name, value in flags.items())
    return f"torchrun {where} --nproc_per_node={per_node} 08_model_parallel/train_3d.py {text}"


def check_bytes(shape: Shape, layout: Layout) -> list[dict]:
    """What the ranks of the layout hold when it is built, beside the prediction."""
    from _plan_check import compare  # the only part that needs torch

    rows = compare(shape, layout)
    cells = [["stage", "a rank holds", "built, GiB", "predicted, GiB", "error", "allowed"]]
    for row in rows:
        error = row["predicted_bytes"] / row["built_bytes"] - 1
        row["near"] = abs(error) <= NEAR[row["line"]]
        sizes = [f"{row[name] / GIB:.3f}" for name in ("built_bytes", "predicted_bytes")]
        cells.append([str(row["stage"]), row["line"], *sizes, f"{error:+.1%}", f"{NEAR[row['line']]:.0%}"])
    missed = sum(not row["near"] for row in rows)
    verdict = f"missed: {missed} of {len(rows)} lines are off by more than allowed"
    if not missed:
        verdict = f"checked: of what built ranks hold, none of {len(rows)} lines is off by more than allowed"
    told = f"built: the first rank of the first and of the last stage, of {layout.gpus} fake ones, with a CPU's kernels"
    print(f"\n{told}\n\n{report.table(cells)}\n\n{verdict}")
    return rows


def print_checks(best: dict, machine: Machine, tokens: int) -> None:
    """What must hold of a plan, whatever was assumed."""
    layout = best["layout"]
    assert layout.tp * layout.pp * layout.cp * layout.dp == layout.gpus
    assert layout.dp * layout.micro_batch_size * layout.micro_batches * layout.seq_len == tokens
    assert layout.sharded_over * layout.replicate == layout.dp * layout.cp
    assert isclose(sum(best["causes"].values()), best["step_seconds"])
    assert min(best["causes"].values()) >= 0
    assert best["total_bytes"] <= machine.memory_bytes
    print(
        f"checked: tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp} is {layout.gpus} ranks, their "
        f"micro-batches are {tokens:,} tokens, the causes add up to the step, and it fits"
    )
