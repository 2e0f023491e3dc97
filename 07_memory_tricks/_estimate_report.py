"""The answers of estimate.py and the tables that it prints."""

import argparse

import _estimate_shapes as shapes
import estimate
from _estimate_advise import advise, print_advice
from _estimate_flags import length, parse_flags, plan_of, shape_of
from _estimate_formulas import inference_formulas, training_formulas
from _estimate_frameworks import FP32_LOG_SOFTMAX, LOSSES
from _estimate_inference import CACHE_DTYPES, experts_in_a_step, inference_weight_bytes
from _estimate_mfu import print_shares
from _estimate_plan import DTYPES, Plan, check
from _estimate_shapes import Shape
from _estimate_time import EFFICIENCY, Device, read_device, step_seconds

from old import hardware, report
from old.cli import nearest_multiples
from old.exits import UserError

GIB = 2**30


def answer(description: str) -> int:
    args = parse_flags(description)
    shape = shape_of(args)
    device = read_device(args.device, args.dtype)
    summary = {
        "device": device.name,
        "world_size": args.gpus,
        "dtype": args.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(shape),
    }
    summary |= inference_answer(args, shape, device) if args.inference else training_answer(args, shape, device)
    report.write_json({**dict.fromkeys(EMPTY), **summary}, args.json)
    return 0


def inference_answer(args: argparse.Namespace, shape: Shape, device: Device) -> dict:
    seq_len = length(args, shape)
    lines = inference(args, shape, seq_len)
    print_lines(lines, inference_formulas(args, shape, seq_len), device)
    seconds = decoding_seconds(args, shape, device, cache_bytes=lines["kv_cache_bytes"])
    forward = 2 * shapes.parameter_count(shape, active=True)
    return in_bytes(lines) | fit(lines, device) | {"flops_per_token": forward, "step_seconds": seconds}


def decoding_seconds(args: argparse.Namespace, shape: Shape, device: Device, *, cache_bytes: float) -> float | None:
    """The least that a token of each sequence takes: its rank reads the whole cache and what it multiplies with."""
    bandwidth = hardware.memory_bandwidth(device.name)
    if not bandwidth:
        return None

    def seconds(experts: int | None) -> float:
        how = {"count_embedding": False, "experts_read": experts}
        return (inference_weight_bytes(shape, **serving(args), **how) + cache_bytes) / bandwidth

    fewest, most = experts_in_a_step(shape, args.concurrency)
    least = seconds(fewest)
    own = f" ({seconds(most) * 1e3:.2f} if no two sequences share an expert)" if fewest != most else ""
    print(f"decoding: at least {least * 1e3:.2f} ms a token{own}, by {bandwidth / 1e12:.3g} TB/s of memory bandwidth")
    return least


def serving(args: argparse.Namespace) -> dict:
    """How weights are held: keywords of inference_weight_bytes."""
    return {"weights": args.weights, "group_size": args.group_size, "tp": args.tp, "head_divided": True}


def training_answer(args: argparse.Namespace, shape: Shape, device: Device) -> dict:
    plan = plan_of(args, shape)
    more = {}
    if args.is_my_mfu_right:
        how = {"gpus": args.gpus, "seq_len": plan.seq_len, "checkpointing": plan.checkpointing}
        found = print_shares(shape, device, tokens_per_second=args.is_my_mfu_right, **how)
        more = {"tokens_per_second": args.is_my_mfu_right, "conventions": found, "mfu": next(iter(found.values()))}
    if args.advise:
        batch = args.global_batch_size or 8 * plan.gpus
        ranked = advise(shape, plan, device, global_batch_size=batch)
        if not ranked:
            where = f"{plan.gpus} x {device.name}"
            raise UserError(f"--advise: no plan of {where} holds {shape.name} at {plan.seq_len} tokens")
        print(f"{shape.name} on {plan.gpus} x {device.name}, {batch} sequences of {plan.seq_len} tokens per step\n")
        print_advice(ranked, device)
        more = {"advice": [{**row, "plan": vars(row["plan"])} for row in ranked[:20]]}
        plan = ranked[0]["plan"]
    lines = estimate.memory(shape, plan)
    flops = estimate.flops_per_token(shape, seq_len=plan.seq_len)
    seconds = step_seconds(shape, plan, device, flops)
    if not (args.advise or args.is_my_mfu_right):
        print_lines(lines, training_formulas(shape, plan), device)
        print_speed(plan, device, flops, seconds)
    kept = lines["logits_bytes"] * (4 / LOSSES[plan.loss] if plan.loss in FP32_LOG_SOFTMAX else 1)
    more = {"saved_for_backward_bytes": round(lines["activation_bytes"] + kept), **more}
    speed = {"flops_per_token": flops, "step_seconds": seconds, "mfu": share_of_peak(plan, device, flops, seconds)}
    return in_bytes(lines) | fit(lines, device) | speed | more


EMPTY = ("kv_cache_bytes", "flops_per_token", "mfu", "step_seconds")


def in_bytes(lines: dict[str, float]) -> dict[str, int | dict[str, int]]:
    moments = {name: round(lines[name]) for name in estimate.MOMENTS if name in lines}
    return {name: round(size) for name, size in lines.items() if name not in moments} | {"moments": moments}


def fit(lines: dict[str, float], device: Device) -> dict[str, bool | None]:
    return {"fits": None if device.memory_bytes is None else lines["total_bytes"] <= device.memory_bytes}


def share_of_peak(plan: Plan, device: Device, flops: float, seconds: float | None) -> float | None:
    if not seconds:
        return None
    tokens = plan.tokens * plan.micro_batches / (plan.tp * plan.pp)
    return estimate.mfu(tokens_per_second=tokens / seconds, flops_per_token=flops, peak_flops=device.peak_flops)


def inference(args: argparse.Namespace, shape: Shape, seq_len: int) -> dict[str, float]:
    """Bytes of each of --tp ranks. Activations are one sequence's prefill through the widest part of a block."""
    if args.gpus % args.tp:
        raise UserError(
            f"--gpus {args.gpus} is no multiple of --tp {args.tp}: use {nearest_multiples(args.gpus, args.tp)}"
        )
    check(shape, Plan(gpus=args.tp, tp=args.tp, seq_len=args.tp, dtype=args.dtype))
    tokens = seq_len * args.concurrency
    widest = 2 * shape.hidden + 3 * shape.ffn / args.tp
    lines = {
        "weight_bytes": inference_weight_bytes(shape, **serving(args)),
        "gradient_bytes": 0,
        "optimizer_bytes": 0,
        "activation_bytes": seq_len * widest * DTYPES[args.dtype],
        "logits_bytes": args.concurrency * shape.vocab * (DTYPES[args.dtype] + 4),
        "gathered_bytes": 0,
        "kv_cache_bytes": estimate.kv_cache_bytes(
            shape, tokens=tokens, bytes_each=CACHE_DTYPES[args.kv_cache_dtype], tp=args.tp
        ),
        "context_bytes": 0 if args.device == "cpu" else estimate.CONTEXT,
        "nccl_bytes": estimate.NCCL if args.tp > 1 else 0,
    }
    return {**lines, "total_bytes": sum(lines.values())}


def print_lines(lines: dict[str, float], formulas: dict[str, str], device: Device) -> None:
    unit, scale = ("GiB", GIB) if lines["total_bytes"] >= GIB else ("MiB", 2**20)
    rows = [["per rank", unit, "formula"]]
    for name, formula in formulas.items():
        rows.append([name.removesuffix("_bytes").replace("_", " "), f"{lines[name] / scale:,.2f}", formula])
    print(report.table(rows))
    peak = max((name for name in estimate.MOMENTS if name in lines), key=lambda name: lines[name], default=None)
    if peak:
        print(f"\npeak: {peak}; lines that are not alive together do not add up to it")
    verdict = fit(lines, device)["fits"]
    if verdict is None:
        print(f"\nwhether it fits is n/a: the memory of {device.name} is not in common/devices.csv")
    else:
        print(f"\n{'fits' if verdict else 'does not fit'} into {device.memory_bytes / GIB:.1f} GiB of {device.name}")


def print_speed(plan: Plan, device: Device, flops: float, seconds: float | None) -> None:
    if seconds is None:
        print(f"step time n/a: common/devices.csv has no peak of {device.name} in {plan.dtype}")
        return
    share = share_of_peak(plan, device, flops, seconds)
    tokens = plan.seq_len * plan.micro_batch_size * plan.micro_batches * plan.dp
    print(
        f"step: {seconds:.3f} s for {tokens:,} tokens, MFU {share:.1%} of {device.peak_flops / 1e12:.1f} TFLOP/s, "
        f"if products reach {EFFICIENCY:.0%} of the peak (assumed)"
    )
