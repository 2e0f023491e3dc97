"""Will it fit, and how long will a step take? Computed from shapes alone, before anything starts.

Memory is a table. Its rows are parts: weights, gradients, optimizer state, activations, logits.
Its columns are moments of a step, because not all parts are alive together. The peak is the
largest sum of a column, so that shrinking a part which is not alive then does not help. Every
row is derived in words below the table. A step's time is what its kernels need, what ranks wait
for each other, and a pipeline's bubble. --search computes both for every layout.

Without flags it describes what the training scripts do without flags. Flags that a script has,
too, mean the same here. torch is not needed.

    laptop    python 07_memory_tricks/estimate.py --device cpu
    one GPU   python 07_memory_tricks/estimate.py --model llama-124m --compile
    one node  python 07_memory_tricks/estimate.py --model llama-8b --gpus 8 --checkpointing full
    cluster   python 07_memory_tricks/estimate.py --model llama-70b --gpus 64 --link 50 --search
    serving   python 07_memory_tricks/estimate.py --model llama-8b --inference --weights int8

Look for: the column with the largest sum, and the largest row in it. Bytes are within 3 % of
torch's allocator, seconds within 10 % on one H200, and unmeasured elsewhere: estimate.md.
Before: 06_fsdp_zero/. Next: memory_profile.py measures these parts; 08_model_parallel/.
"""

import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

# so that `import common` works
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _estimate import default_seq_len, make_plan, parse_flags, read_shape, shape_from_json

from common import exits, report
from common.report import fold, table
from lm import shapes
from planner import inference, machine
from planner.memory import MOMENTS, Memory, peak
from planner.plan import OPTIMIZERS, Plan, divides
from planner.search import MARGIN, SEARCHED, layouts
from planner.shape import Shape
from planner.step import decode_seconds, step

__all__ = ["read_shape", "shape_from_json"]  # for tests

GIB = 2**30
MIB = 2**20
COLUMNS = {
    "end of forward": "forward",
    "loss backward": "loss",
    "head gradient": "head",
    "last block": "last block",
    "first MLP": "first MLP",
    "first attention": "first attn.",
    "last gradients": "end",
    "evaluation": "eval.",
}
CAUSES = {
    "matmuls": "of the blocks, forward and backward",
    "attention": "softmax(q k) v, forward and backward",
    "kernels": "norms, rotations, activations, casts: bound by memory bandwidth",
    "loss": "the head's matmuls and the cross-entropy",
    "recomputation": "what backward computes again",
    "gaps": "between kernels",
    "launches": "the GPU waits for Python to start kernels",
    "tensor": "exposed: gathers and scatters of tensor parallel",
    "context": "exposed: keys and values between context-parallel ranks",
    "expert": "exposed: tokens to their experts and back",
    "data": "exposed: weights and gradients of data parallel",
    "send": "exposed: activations between pipeline stages",
    "bubble": "stages that wait while the pipeline fills and drains",
    "optimizer": "clipping and AdamW",
}


# --- one layout


def layout_answer(shape: Shape, plan: Plan, memory: Memory, where: machine.Machine) -> dict:
    """Print the bytes and seconds of one layout, and return them for the summary."""
    for line in describe(shape, plan, where).splitlines():
        print(fold(line))
    print()
    print_memory(memory)
    fits = print_total(memory, where)
    lines = memory.lines
    cells = {}
    for row in memory.rows:
        cells[row.part] = {moment: round(row[moment]) for moment in MOMENTS}
    after_forward = lines["activation_bytes"]
    if plan.loss_method in ("plain", "parallel"):
        after_forward += 4 * memory.rank.own_tokens * shape.vocab  # log-softmax
    elif memory.rank.has_head:
        after_forward += lines["logits_bytes"]
    master_bytes = 4 if plan.uses_deepspeed and plan.zero > 0 else 0
    summary = {
        **{name: round(size) for name, size in lines.items()},
        "allocated_bytes": round(memory.allocated_bytes()),
        "fragmentation_bytes": round(memory.fragmentation_bytes()),
        "context_bytes": round(memory.context_bytes()),
        "nccl_bytes": round(memory.nccl_bytes()),
        "total_bytes": round(memory.total_bytes()),
        "reserved_bytes": round(memory.allocated_bytes() + memory.fragmentation_bytes()),
        "saved_for_backward_bytes": round(after_forward),
        "moments": {moment: round(size) for moment, size in memory.moments.items()},
        "peak_moment": memory.moment,
        "table": cells,
        "bytes_per_parameter": [4, 4, master_bytes, OPTIMIZERS[plan.optimizer]],
        "fits": fits,
        "plan": {**asdict(plan), "loss": plan.loss_method},
    }
    return summary | step_answer(shape, plan, where)


def describe(shape: Shape, plan: Plan, where: machine.Machine) -> str:
    """Return what is computed, in two lines: the script, and the settings that matter."""
    matmuls = f"{plan.dtype}, frozen in 4 bits" if plan.weights == "int4" else plan.dtype
    compiled = "compiled" if plan.compile else "eager"
    batch = f"{plan.micro_batches} x {plan.micro_batch_size} sequences of {plan.seq_len:,} tokens"
    by = "by" if is_trained_here(shape, plan) else "(not trained here) as by"
    return (
        f"{shape.name} {by} {script_of(plan)} on {plan.gpus} x {where.device}: {matmuls}, "
        f"{compiled}, {plan.loss_method} loss, checkpointing {plan.checkpointing}\n"
        f"a step: {batch} (micro-batches x size) on each of {plan.dp} data-parallel ranks"
    )


def is_trained_here(shape: Shape, plan: Plan) -> bool:
    """Return whether a script runs the plan."""
    if shape.experts and (plan.pp > 1 or (plan.ep > 1 and plan.compile)):
        return False
    return not (shape.kv_rank or plan.ring)


def script_of(plan: Plan) -> str:
    """Return the script that runs a plan."""
    if plan.adapters:
        return "06_fsdp_zero/finetune.py"
    if plan.tp * plan.pp * plan.cp * plan.ep > 1:
        return "08_model_parallel/train_3d.py"
    if plan.uses_deepspeed:
        return f"06_fsdp_zero/train_zero.py --stage {plan.zero}"
    if plan.zero == 3:
        return "06_fsdp_zero/train_fsdp.py"
    return "05_ddp/train.py" if plan.gpus > 1 else "04_amp/train.py"


def print_memory(memory: Memory) -> None:
    """Print the table of parts and moments, and the derivation of each row."""
    unit, scale = unit_of(memory.allocated_bytes())
    rows = [[f"{unit} on a rank", *[COLUMNS[moment] for moment in MOMENTS]]]
    words = []
    for row in memory.rows:
        if row.largest:
            rows.append([row.part, *[f"{row[moment] / scale:,.2f}" for moment in MOMENTS]])
            text = f"{row.part}: {row.words}"
            words.append(textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="    "))
    rows.append(["sum", *[f"{memory.moments[moment] / scale:,.2f}" for moment in MOMENTS]])
    print(f"{table(rows)}\n")
    print("\n".join(words))


def print_total(memory: Memory, where: machine.Machine) -> bool | None:
    """Print what the card must have, and whether it fits; return that, None if not known."""
    unit, scale = unit_of(memory.total_bytes())
    parts = {
        f"the peak ({COLUMNS[memory.moment]})": memory.allocated_bytes(),
        "that the allocator reserves beside it (estimated)": memory.fragmentation_bytes(),
        "CUDA's context (assumed)": memory.context_bytes(),
        "NCCL (256 MiB for each group of ranks)": memory.nccl_bytes(),
    }
    total = memory.total_bytes()
    terms = [f"{size / scale:,.2f} {name}" for name, size in parts.items() if size]
    print()
    print(fold(f"{total / scale:,.2f} {unit} = " + " + ".join(terms)))
    return print_fits(total, where)


def print_fits(total: float, where: machine.Machine) -> bool | None:
    """Print whether so many bytes fit; return that, None if the device's memory is not known."""
    if where.memory_bytes is None:
        print(f"whether it fits is n/a: common/devices.csv has no memory of {where.device}")
        return None
    fits = total <= where.memory_bytes
    verdict = "fits" if fits else "does not fit"
    print(f"{verdict} into {where.memory_bytes / GIB:.1f} GiB of {where.device}")
    return fits


def unit_of(size: float) -> tuple[str, int]:
    """Return the unit in which sizes up to `size` are printed, and its bytes."""
    return ("GiB", GIB) if size >= GIB else ("MiB", MIB)


def step_answer(shape: Shape, plan: Plan, where: machine.Machine) -> dict:
    """Print the seconds of a step by cause, and return them for the summary."""
    flops = shape.flops_per_token(seq_len=plan.seq_len)
    if not (where.peak_flops and where.memory_bandwidth):
        print(f"step time n/a: common/devices.csv has no {plan.dtype} rate of {where.device}")
        return {"flops_per_token": flops, "step_seconds": None, "mfu": None}

    timed = step(shape, plan, where)
    rows = [["seconds of a step", "", "what it is"]]
    for cause, what in CAUSES.items():
        if timed.causes[cause] >= 5e-5:
            rows.append([cause, f"{timed.causes[cause]:.4f}", what])
    print(f"\n{table(rows)}")

    speed = timed.tokens / timed.seconds
    peak_flops = where.peak_flops * plan.gpus
    mfu = speed * flops / peak_flops
    causal = speed * shape.flops_per_token(seq_len=plan.seq_len, causal=True) / peak_flops
    print(
        f"\nstep: {timed.seconds:.3f} s for {timed.tokens:,} tokens, "
        f"{speed / plan.gpus:,.0f} tokens/s on each GPU\n"
        f"MFU {mfu:.1%} of {where.peak_flops / 1e12:.1f} TFLOP/s; "
        f"{causal:.1%} by the convention that counts half of attention"
    )
    return {
        "flops_per_token": flops,
        "step_seconds": timed.seconds,
        "causes": timed.causes,
        "tokens": timed.tokens,
        "tokens_per_second": speed,
        "mfu": mfu,
        "mfu_causal": causal,
        "predicted": True,
    }


# --- every layout


def search_answer(args, shape: Shape, plan: Plan, where: machine.Machine) -> dict:
    """Print the best layouts that fit, and return them for the summary.

    Raise ValueError if none fits, or if sizes that were given do not divide each other.
    """
    if not (where.memory_bytes and where.peak_flops):
        raise ValueError(
            "--search needs a GPU whose memory and rate are known, "
            f"and --device {where.device} is none"
        )
    if shape.tied and args.pp > 1:
        raise ValueError(
            f"--pp {args.pp}: {shape.name} has tied embeddings, which train_3d.py does not "
            "split into stages: use 1"
        )
    if shape.experts and not shape.kv_rank and args.pp > 1:
        raise ValueError(
            f"--pp {args.pp}: {shape.name} has experts, which train_3d.py does not split into "
            "stages: use 1, and --ep"
        )
    if args.ep > 1 and args.compile:
        raise ValueError(f"--compile: train_3d.py does not compile --ep {args.ep}: leave it out")
    if plan.gpus > args.nodes_of:
        divides("--nodes-of", args.nodes_of, "--gpus", plan.gpus)
    divides("--tp x --pp x --cp", args.tp * args.pp * args.cp, "--gpus", args.gpus)
    sequences = args.global_batch_size or 8 * plan.gpus
    fixed = {name: args.given[name] for name in SEARCHED if name in args.given}
    found = layouts(shape, plan, where, sequences=sequences, **fixed)
    print(
        f"{shape.name} on {plan.gpus} x {where.device}, {sequences:,} sequences of "
        f"{plan.seq_len:,} tokens per step: {len(found):,} layouts fit "
        f"({MARGIN:.0%} of the memory stays free)\n"
    )

    ranking = []
    for layout, memory, timed in found[:8]:
        entry = {
            "plan": {**asdict(layout), "loss": layout.loss_method},
            "total_bytes": round(memory.total_bytes()),
            "step_seconds": timed.seconds,
            "causes": timed.causes,
        }
        ranking.append(entry)
    print_ranking(found[:8])
    best, memory, _ = found[0]
    print("\nthe first:")
    summary = layout_answer(shape, best, memory, where)

    command = None
    has_command = is_trained_here(shape, best) and not plan.deepspeed
    if has_command and (args.model in shapes.SIZES or Path(args.model).exists()):
        command = start_command(args, best)
    print(f"\nstart it on each node:\n{command or 'no command: no training script does this'}")
    return {**summary, "fit": len(found), "ranking": ranking, "command": command}


def print_ranking(found: list) -> None:
    """Print layouts, one a line."""
    headings = ["tp x pp x cp x ep", "shards x replicas", "micro-batch", "checkpointing"]
    rows = [[*headings, "GiB", "s/step", "tokens/s/GPU"]]
    for plan, memory, timed in found:
        row = [
            f"{plan.tp} x {plan.pp} x {plan.cp} x {plan.ep}",
            f"{plan.shards} x {plan.replicate}",
            f"{plan.micro_batch_size} x {plan.micro_batches}",
            plan.checkpointing,
            f"{memory.total_bytes() / GIB:.1f}",
            f"{timed.seconds:.3f}",
            f"{timed.tokens / timed.seconds / plan.gpus:,.0f}",
        ]
        rows.append(row)
    print(table(rows))


def start_command(args, plan: Plan) -> str:
    """Return the command that starts a layout, for each node."""
    sequences = plan.dp * plan.micro_batch_size * plan.micro_batches
    flags = f"--model {args.model} --seq-len {plan.seq_len}"
    flags += f" --micro-batch-size {plan.micro_batch_size} --global-batch-size {sequences}"
    flags += f" --checkpointing {plan.checkpointing} --dtype {plan.dtype}"
    if plan.compile:
        flags += " --compile"
    if plan.gpus == 1:
        return f"python 04_amp/train.py {flags}"

    flags += f" --tp {plan.tp} --pp {plan.pp} --cp {plan.cp} --replicate {plan.replicate}"
    if plan.ep > 1:
        flags += f" --ep {plan.ep}"
    if plan.schedule != "1f1b":
        flags += f" --schedule {plan.schedule}"
    nodes = max(1, plan.gpus // args.nodes_of)
    launcher = "--standalone"
    if nodes > 1:
        launcher = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500"
    launcher += f" --nproc_per_node={plan.gpus // nodes}"
    return f"torchrun {launcher} 08_model_parallel/train_3d.py {flags}"


# --- inference


def inference_answer(args, shape: Shape, where: machine.Machine) -> dict:
    """Print the bytes of each of --tp ranks and the time of a token, and return them.

    The activations are those of one sequence's prompt.
    """
    divides("--tp", args.tp, "--gpus", args.gpus)
    divides("--tp", args.tp, "attention heads", shape.heads)
    e = 4 if args.dtype == "fp32" else 2
    tokens = args.seq_len * args.concurrency
    held = {
        "weights": args.weights,
        "group_size": args.group_size,
        "tp": args.tp,
        "head_divided": True,
    }
    plan = Plan(gpus=args.tp, tp=args.tp, seq_len=args.tp, on_cpu=args.device == "cpu")
    rank = Memory(shape, plan)
    cache_size = inference.CACHE_DTYPES[args.kv_cache_dtype]
    lines = {
        "weight_bytes": inference.weight_bytes(shape, **held),
        "kv_cache_bytes": inference.kv_cache_bytes(
            shape, tokens=tokens, bytes_each=cache_size, tp=args.tp
        ),
        "activation_bytes": inference.prefill_bytes(
            shape, tokens=args.seq_len, bytes_each=e, tp=args.tp
        ),
        "logits_bytes": inference.logits_bytes(shape, sequences=args.concurrency, bytes_each=e),
        "context_bytes": rank.context_bytes(),
        "nccl_bytes": rank.nccl_bytes(),
    }
    lines["total_bytes"] = sum(lines.values())
    derivations = {
        "weight_bytes": f"matrices in {args.weights}, the rest in 16 bits; tp shares all but norms",
        "kv_cache_bytes": f"keys and values of {tokens:,} tokens in {args.kv_cache_dtype}",
        "activation_bytes": "a prompt in one block: 3 hidden + 3 ffn numbers per token",
        "logits_bytes": f"of {args.concurrency} last tokens, and an fp32 copy",
        "context_bytes": "CUDA's context: assumed",
        "nccl_bytes": "256 MiB for each group of ranks",
        "total_bytes": "the sum",
    }
    unit, scale = unit_of(lines["total_bytes"])
    rows = [["on a rank", unit, "what it is"]]
    for name, words in derivations.items():
        part = name.removesuffix("_bytes").replace("_", " ")
        rows.append([part, f"{lines[name] / scale:,.2f}", words])
    print(f"{table(rows)}\n")

    summary = dict.fromkeys(("gradient_bytes", "optimizer_bytes", "gathered_bytes"), 0)
    summary["fits"] = print_fits(lines["total_bytes"], where)
    for name, size in lines.items():
        summary[name] = round(size)
    summary["flops_per_token"] = 2 * shape.parameter_count(active=True)
    if where.memory_bandwidth:
        summary |= decode_answer(args, shape, where, held, lines["kv_cache_bytes"])
    return summary


def decode_answer(
    args, shape: Shape, where: machine.Machine, held: dict, cache_bytes: float
) -> dict:
    """Print the time of a decode step, and return it for the summary.

    A step reads the cache and the weights that it multiplies with. With experts these are at least
    the ones of one sequence, and at most others for each sequence.
    """
    few = shape.active_experts
    many = min(shape.experts, shape.active_experts * args.concurrency)
    least = []
    for experts in (few, many):
        read = inference.weight_bytes(shape, **held, count_embedding=False, experts_read=experts)
        least.append((read + cache_bytes) / where.memory_bandwidth)
    expected = decode_seconds(
        shape,
        where,
        bytes_read=least[0] * where.memory_bandwidth,
        weights=args.weights,
        sequences=args.concurrency,
        tp=args.tp,
    )
    text = f"decoding: {expected * 1e3:.2f} ms a token expected, compiled; "
    text += f"at least {least[0] * 1e3:.2f} by memory bandwidth"
    if few != many:
        text += f" ({least[1] * 1e3:.2f} if no two sequences share an expert)"
    print(text)
    return {"step_seconds": expected, "least_step_seconds": least[0]}


def main() -> int:
    try:
        args = parse_flags(__doc__)
        shape = read_shape(args.model)
        if args.layers:
            dense_layers = min(args.layers, shape.dense_layers)
            shape = replace(shape, layers=args.layers, dense_layers=dense_layers)
        if args.seq_len and shape.positions and args.seq_len > shape.positions:
            raise ValueError(
                f"--seq-len {args.seq_len} is over the limit of --model {args.model}: "
                f"{shape.positions}"
            )
        args.seq_len = args.seq_len or default_seq_len(args, shape)
        where = machine.read(args.device, args.dtype)
        where = replace(where, gpus_per_node=args.nodes_of, network=args.link * 1e9)

        summary = {
            "kv_cache_bytes": None,
            "flops_per_token": None,
            "mfu": None,
            "step_seconds": None,
            "device": args.device,
            "world_size": args.gpus,
            "dtype": args.dtype,
            "model": args.model,
            "parameters": shape.parameter_count(),
        }
        if args.inference:
            summary |= inference_answer(args, shape, where)
        elif args.search:
            summary |= search_answer(args, shape, make_plan(args, shape), where)
        else:
            plan = make_plan(args, shape)
            summary |= layout_answer(shape, plan, peak(shape, plan), where)
    except ValueError as error:
        raise exits.UserError(str(error)) from None
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
