"""Will it fit, and how long will a step take? Computed before anything is started, from shapes alone, without torch.

A rank holds weights, gradients and optimizer state, which ZeRO divides; what backward needs of each token, which
checkpointing and the parallel sizes divide; and for a moment the logits and the blocks that sharding gathers. The peak
is the largest sum of what is alive together. A step is arithmetic at the rate that its sizes reach, what ranks wait for
each other, and a pipeline's bubble. --search computes both for every layout, and prints the best that fit.

    laptop    python 07_memory_tricks/estimate.py --model nano --gpus 1 --seq-len 64 --dtype fp32
    one node  python 07_memory_tricks/estimate.py --model llama-70b --gpus 8 --checkpointing full --adapters 16
    cluster   python 07_memory_tricks/estimate.py --model llama-70b --gpus 64 --nodes-of 8 --link 50 --search
    serving   python 07_memory_tricks/estimate.py --model llama-8b --inference --concurrency 16 --weights int8

Look for: the line that is largest, and the moment of the peak: a trick that shrinks another line does not help.
Differences of a few percent are below the model's own error: measure both.
Before: 06_fsdp_zero/. Next: memory_profile.py measures the same lines; 08_model_parallel/ runs the layouts.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

# so that `import common` works
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import cli, exits, report
from common.report import table
from lm import shapes
from planner import inference, machine
from planner.frameworks import FP32_LOG_SOFTMAX, FRAMEWORKS, LOSSES
from planner.memory import LINES, Memory, peak
from planner.plan import CHECKPOINTING, DTYPES, OPTIMIZERS, Plan, divides
from planner.search import MARGIN, layouts
from planner.shape import Shape, from_config
from planner.step import step

GIB = 2**30
BITS = {2: "16 bits", 4: "fp32"}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
)
OF_TRAINING = {
    "zero": None,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "replicate": 1,
    "micro_batch_size": 1,
    "checkpointing": "none",
}
OF_TRAINING |= {
    "global_batch_size": None,
    "optimizer": "adamw",
    "framework": "ours",
    "loss": "plain",
    "adapters": 0,
}
OF_SERVING = {"concurrency": 1, "weights": "bf16", "group_size": 32, "kv_cache_dtype": "bf16"}
CAUSES = {
    "compute": "matmuls, attention, and kernels between them",
    "recomputation": "what backward computes again",
    "tensor": "exposed: gathers and scatters of tensor parallel",
    "context": "exposed: keys and values between context-parallel ranks",
    "expert": "exposed: tokens to their experts and back",
    "launches": "the GPU waits for Python to start kernels",
    "data": "exposed: weights and gradients of data parallel",
    "send": "exposed: activations between pipeline stages",
    "bubble": "stages that wait while the pipeline fills and drains",
    "optimizer": "AdamW and the gradient's norm",
}


def shape_from_json(name: str, content: dict) -> Shape:
    """The shape of a Hugging Face config.json. UserError or ValueError name the key that is missing or impossible."""
    kind = content.get("model_type")
    if kind not in FAMILIES or content.get("mlp_bias"):
        raise ValueError(
            f"--model {name}: model_type {kind!r} is none of {', '.join(FAMILIES)}, or it has mlp_bias"
        )
    known = shapes.Config.__dataclass_fields__
    sizes = {key: value for key, value in content.items() if key in known and "rope" not in key}
    shape = from_config(
        name, shapes.parse_config({"max_position_embeddings": 0, **sizes}, f"--model {name}")
    )
    more = {
        "qkv_bias": kind == "qwen2" or content.get("attention_bias", False),
        "qk_norm": kind.startswith("qwen3"),
    }
    number_key = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}.get(
        kind, "n_routed_experts"
    )
    try:
        if kind in ("mixtral", "qwen3_moe") or content.get(number_key):
            width = content["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"]
            more |= {
                "experts": content[number_key],
                "active_experts": content["num_experts_per_tok"],
            }
            more |= {
                "expert_ffn": width,
                "shared_ffn": (content.get("n_shared_experts") or 0) * width,
            }
            more["dense_layers"] = content.get("first_k_dense_replace") or 0
        if kind.startswith("deepseek"):
            more |= {"q_rank": content.get("q_lora_rank") or 0, "kv_rank": content["kv_lora_rank"]}
            more |= {"nope": content["qk_nope_head_dim"], "rope": content["qk_rope_head_dim"]}
            more["value_dim"] = content["v_head_dim"]
    except KeyError as error:
        raise ValueError(f"--model {name}: the config.json of a {kind} has no {error}") from None
    if more.get("active_experts", 0) > more.get("experts", 0):
        raise ValueError(
            f"--model {name}: num_experts_per_tok {more['active_experts']} of {more['experts']} experts"
        )
    return replace(shape, **more)


def read_shape(name: str) -> Shape:
    """--model: one of our sizes, a name of models.json, or a config.json or a folder with one."""
    published = json.loads(Path(__file__).with_name("models.json").read_text())
    if name in shapes.SIZES:
        return from_config(name, shapes.SIZES[name])
    if name in published:
        return shape_from_json(name, published[name])
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if not path.is_file():
        known = ", ".join([*shapes.SIZES, *published])
        raise ValueError(
            f"--model {name}: no such size, nor a config.json or a folder with one; sizes: {known}"
        )
    content = shapes.read_config_json(name)
    return shape_from_json(name, content)


def parse_flags() -> argparse.Namespace:
    """The flags, those that were not given with their defaults; `given` names the others."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="llama-8b", help="our sizes, a name of models.json, or a config.json")
    add("--layers", type=cli.positive_int, help="cut the model to so many layers")
    add("--gpus", type=cli.positive_int, default=8, help="of all nodes")
    add("--device", default="NVIDIA H100 80GB HBM3", help="a name of common/devices.csv, or cpu")
    add(
        "--nodes-of",
        type=cli.positive_int,
        default=8,
        metavar="N",
        help="GPUs that NVLink connects",
    )
    add(
        "--link",
        type=cli.positive,
        default=50.0,
        metavar="GB/s",
        help="between nodes, per GPU, in one direction",
    )
    add(
        "--zero",
        type=int,
        choices=range(4),
        help="what data-parallel ranks divide (default: 3, on one GPU 0)",
    )
    add("--tp", type=cli.positive_int, help="tensor parallel, with sequence parallel")
    add("--pp", type=cli.positive_int, help="pipeline stages, 1F1B")
    add("--cp", type=cli.positive_int, help="context parallel")
    add("--ep", type=cli.positive_int, help="expert parallel")
    add("--replicate", type=cli.positive_int, help="copies of the sharded model (HSDP)")
    add(
        "--seq-len",
        type=cli.positive_int,
        help="tokens per sequence (default: 4096, or the model's limit)",
    )
    add(
        "--micro-batch-size",
        type=cli.positive_int,
        help="sequences per rank and forward (default: 1)",
    )
    add(
        "--global-batch-size",
        type=cli.positive_int,
        help="sequences per step (default: one micro-batch each)",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="what matrices are multiplied in")
    add(
        "--checkpointing",
        choices=CHECKPOINTING,
        help="what backward computes again (default: none)",
    )
    add("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    add(
        "--adapters",
        type=cli.positive_int,
        metavar="RANK",
        help="LoRA beside frozen matrices in --dtype",
    )
    add("--loss", choices=LOSSES, help="how the cross-entropy is computed (default: plain)")
    add(
        "--framework",
        choices=FRAMEWORKS,
        help="whose bytes per parameter and kernels (default: ours)",
    )
    add(
        "--search",
        action="store_true",
        help="every layout: the best eight; parallel sizes that are given are kept",
    )
    add("--inference", action="store_true", help="weights and KV cache instead of a training step")
    add(
        "--concurrency",
        type=cli.positive_int,
        help="sequences of --seq-len tokens in the cache (default: 1)",
    )
    add("--weights", choices=inference.WEIGHTS, help="of --inference (default: bf16)")
    add(
        "--group-size",
        type=cli.positive_int,
        help="weights per scale of --weights int4 (default: 32)",
    )
    add("--kv-cache-dtype", choices=inference.CACHE_DTYPES, help="default: bf16")
    add(
        "--json", type=cli.writable_file, metavar="PATH", help="write the answer as one JSON object"
    )
    args = parser.parse_args()
    args.given = {
        name: value
        for name, value in vars(args).items()
        if value is not None and value is not False
    }
    for name in args.given:
        flag = f"--{name.replace('_', '-')}"
        if args.inference and (name in OF_TRAINING or name == "search"):
            raise ValueError(
                f"{flag} is of training, and --inference does not read it: leave it out"
            )
        if not args.inference and name in OF_SERVING:
            raise ValueError(f"{flag} is of serving, and is read with --inference only")
    if args.group_size and args.weights != "int4":
        raise ValueError(
            f"--group-size {args.group_size} is of --weights int4: add that, or leave it out"
        )
    for name, default in {**OF_TRAINING, **OF_SERVING, "tp": 1}.items():
        setattr(args, name, args.given.get(name, default))
    return args


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that the flags name. --global-batch-size must be a multiple of what all ranks take at once."""
    zero = args.given.get("zero", 3 if args.gpus > 1 else 0)
    sizes = {
        name: getattr(args, name)
        for name in ("gpus", "tp", "pp", "cp", "ep", "replicate", "seq_len", "adapters")
    }
    ways = {
        name: getattr(args, name) for name in ("dtype", "checkpointing", "optimizer", "framework")
    }
    ways["loss"] = "parallel" if args.tp > 1 and args.loss == "plain" else args.loss
    plan = Plan(
        **sizes,
        **ways,
        zero=zero,
        micro_batch_size=args.micro_batch_size,
        on_cpu=args.device == "cpu",
    )
    if args.search:
        return plan
    divides("--tp x --pp x --cp", args.tp * args.pp * args.cp, "--gpus", args.gpus)
    at_once = plan.dp * plan.micro_batch_size
    sequences = args.global_batch_size or at_once * plan.pp
    if sequences % at_once:
        nearest = sequences // at_once * at_once
        raise ValueError(
            f"--global-batch-size {sequences} is no multiple of data-parallel ranks x micro-batch size = {at_once}: "
            f"use {' or '.join(str(size) for size in (nearest, nearest + at_once) if size)}"
        )
    return replace(plan, micro_batches=sequences // at_once)


def print_lines(
    lines: dict[str, float], formulas: dict[str, str], where: machine.Machine
) -> bool | None:
    """The table of bytes, and whether they fit; None if the memory of the device is not known."""
    unit, scale = ("GiB", GIB) if lines["total_bytes"] >= GIB else ("MiB", 2**20)
    rows = [["per rank", unit, "formula"]]
    for name, formula in formulas.items():
        short = " ".join(formula.split()).split(";")[0]
        rows.append(
            [name.removesuffix("_bytes").replace("_", " "), f"{lines[name] / scale:,.2f}", short]
        )
    print(table(rows))
    if where.memory_bytes is None:
        print(
            f"\nwhether it fits is n/a: the memory of {where.device} is not in common/devices.csv"
        )
        return None
    fits = lines["total_bytes"] <= where.memory_bytes
    print(
        f"\n{'fits' if fits else 'does not fit'} into {where.memory_bytes / GIB:.1f} GiB of {where.device}"
    )
    return fits


def layout_answer(shape: Shape, plan: Plan, memory: Memory, where: machine.Machine) -> dict:
    """Bytes by line and seconds by cause of one layout, printed and as a part of the summary."""
    names = [
        *LINES,
        "allocated_bytes",
        "fragmentation_bytes",
        "context_bytes",
        "nccl_bytes",
        "total_bytes",
    ]
    lines = {name: getattr(memory, name)() for name in names}
    framework = FRAMEWORKS[plan.framework]
    print(
        f"N = {memory.all_parameters:,.0f} parameters of the rank's stage, T = {plan.tokens:,.0f} tokens, "
        f"L = {shape.layers} layers, e = {DTYPES[plan.dtype]} bytes\n"
        f"states: weights in {BITS[memory.e if plan.adapters else framework.weight]}, "
        f"gradients in {BITS[framework.gradient]}, {'an' if framework.master else 'no'} fp32 copy of the weights, "
        f"{plan.optimizer} {OPTIMIZERS[plan.optimizer]:g} bytes a parameter\n"
    )
    fits = print_lines(lines, {name: getattr(Memory, name).__doc__ for name in names}, where)
    print(f"peak: {memory.moment}; lines that are not alive together do not add up to it")
    kept = lines["logits_bytes"] * (
        4 / LOSSES[plan.loss][0] if plan.loss in FP32_LOG_SOFTMAX else 1
    )
    return {
        **{name: round(size) for name, size in lines.items()},
        "reserved_bytes": round(lines["allocated_bytes"] + lines["fragmentation_bytes"]),
        "saved_for_backward_bytes": round(lines["activation_bytes"] + kept),
        "moments": {moment: round(size) for moment, size in memory.moments.items()},
        "peak_moment": memory.moment,
        "bytes_per_parameter": [
            framework.weight,
            framework.gradient,
            framework.master,
            OPTIMIZERS[plan.optimizer],
        ],
        "fits": fits,
        "plan": asdict(plan),
        **step_answer(shape, plan, where),
    }


def step_answer(shape: Shape, plan: Plan, where: machine.Machine) -> dict:
    flops = {"flops_per_token": shape.flops_per_token(seq_len=plan.seq_len)}
    if not (where.peak_flops and where.memory_bandwidth):
        print(f"step time n/a: common/devices.csv has no {plan.dtype} rate of {where.device}")
        return {**flops, "step_seconds": None, "mfu": None}
    found = step(shape, plan, where)
    rows = [["seconds of a step", "", "what it is"]]
    rows += [
        [cause, f"{found.causes[cause]:.4f}", CAUSES[cause]]
        for cause in CAUSES
        if found.causes[cause] >= 5e-5
    ]
    print(f"\n{table(rows)}")
    speed = found.tokens / found.seconds
    peak_flops = where.peak_flops * plan.gpus
    mfu = speed * flops["flops_per_token"] / peak_flops
    causal = speed * shape.flops_per_token(seq_len=plan.seq_len, causal=True) / peak_flops
    print(
        f"\nstep: {found.seconds:.3f} s for {found.tokens:,} tokens, {speed / plan.gpus:,.0f} tokens/s on each GPU\n"
        f"MFU {mfu:.1%} of {where.peak_flops / 1e12:.1f} TFLOP/s; {causal:.1%} as those count who halve attention"
    )
    speeds = {"step_seconds": found.seconds, "causes": found.causes, "tokens": found.tokens}
    return {
        **flops,
        **speeds,
        "tokens_per_second": speed,
        "mfu": mfu,
        "mfu_causal": causal,
        "predicted": True,
    }


def search_answer(
    args: argparse.Namespace, shape: Shape, plan: Plan, where: machine.Machine
) -> dict:
    if not (where.memory_bytes and where.peak_flops):
        raise ValueError(
            f"--search needs a GPU whose memory and rate are known, and --device {where.device} is none"
        )
    if shape.tied and args.pp > 1:
        raise ValueError(
            f"--pp {args.pp}: {shape.name} has tied embeddings, which train_3d.py does not cut: use 1"
        )
    if plan.gpus > args.nodes_of:
        divides("--nodes-of", args.nodes_of, "--gpus", plan.gpus)
    sequences = args.global_batch_size or 8 * plan.gpus
    searched = ("tp", "pp", "cp", "ep", "replicate", "micro_batch_size", "checkpointing")
    fixed = {name: args.given[name] for name in searched if name in args.given}
    divides("--tp x --pp x --cp", args.tp * args.pp * args.cp, "--gpus", args.gpus)
    found = layouts(shape, plan, where, sequences=sequences, **fixed)
    print(
        f"{shape.name} on {plan.gpus} x {where.device}, {sequences:,} sequences of {plan.seq_len:,} tokens per step: "
        f"{len(found):,} layouts fit ({MARGIN:.0%} of the memory stays free)\n"
    )
    heads = [
        "tp x pp x cp x ep",
        "shards x replicas",
        "micro-batch",
        "checkpointing",
        "GiB",
        "s/step",
        "tokens/s/GPU",
    ]
    rows, ranking = [heads], []
    for layout, memory, seconds in found[:8]:
        parallel = (
            f"{layout.tp} x {layout.pp} x {layout.cp} x {layout.ep}",
            f"{layout.shards} x {layout.replicate}",
        )
        batch = f"{layout.micro_batch_size} x {layout.micro_batches}", layout.checkpointing
        speed = f"{seconds.seconds:.3f}", f"{seconds.tokens / seconds.seconds / plan.gpus:,.0f}"
        rows.append([*parallel, *batch, f"{memory.total_bytes() / GIB:.1f}", *speed])
        own = {
            "total_bytes": round(memory.total_bytes()),
            "step_seconds": seconds.seconds,
            "causes": seconds.causes,
        }
        ranking.append({"plan": asdict(layout), **own})
    print(f"{table(rows)}\n\nthe first:")
    best, memory, _ = found[0]
    summary = layout_answer(shape, best, memory, where)
    ours = plan.framework == "ours" and not (shape.experts or shape.kv_rank)
    start = (
        command(args, best)
        if ours and (args.model in shapes.SIZES or Path(args.model).exists())
        else None
    )
    print(f"\nstart it on each node:\n{start or 'no command: the training scripts are of Llamas'}")
    return {**summary, "fit": len(found), "ranking": ranking, "command": start}


def command(args: argparse.Namespace, plan: Plan) -> str:
    """What starts the layout, for each node."""
    flags = (
        f"--model {args.model} --seq-len {plan.seq_len} --micro-batch-size {plan.micro_batch_size}"
    )
    flags += f" --global-batch-size {plan.dp * plan.micro_batch_size * plan.micro_batches}"
    flags += f" --checkpointing {plan.checkpointing} --dtype {plan.dtype}"
    if plan.gpus == 1:
        return f"python 04_amp/train.py {flags}"
    flags += f" --tp {plan.tp} --pp {plan.pp} --cp {plan.cp} --replicate {plan.replicate}"
    nodes = max(1, plan.gpus // args.nodes_of)
    where = (
        f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500"
        if nodes > 1
        else "--standalone"
    )
    return f"torchrun {where} --nproc_per_node={plan.gpus // nodes} 08_model_parallel/train_3d.py {flags}"


def inference_answer(args: argparse.Namespace, shape: Shape, where: machine.Machine) -> dict:
    """Bytes of each of --tp ranks. Activations are one sequence's prefill through the widest part of a block."""
    divides("--tp", args.tp, "--gpus", args.gpus)
    divides("--tp", args.tp, "attention heads", shape.heads)
    e, tokens = DTYPES[args.dtype], args.seq_len * args.concurrency
    held = {
        "weights": args.weights,
        "group_size": args.group_size,
        "tp": args.tp,
        "head_divided": True,
    }
    cache_size = inference.CACHE_DTYPES[args.kv_cache_dtype]
    lines = {
        "weight_bytes": inference.weight_bytes(shape, **held),
        "kv_cache_bytes": inference.kv_cache_bytes(
            shape, tokens=tokens, bytes_each=cache_size, tp=args.tp
        ),
        "activation_bytes": args.seq_len * (3 * shape.hidden + 3 * shape.ffn / args.tp) * e,
        "logits_bytes": args.concurrency * shape.vocab * (e + 4),
    }
    rank = Memory(shape, Plan(gpus=args.tp, tp=args.tp, on_cpu=args.device == "cpu"))
    lines |= {"context_bytes": rank.context_bytes(), "nccl_bytes": rank.nccl_bytes()}
    lines["total_bytes"] = sum(lines.values())
    formulas = {
        "weight_bytes": inference.weight_bytes.__doc__,
        "kv_cache_bytes": inference.kv_cache_bytes.__doc__,
        "activation_bytes": "one prompt through one block: 3 hidden + 3 ffn values per token",
        "logits_bytes": "sequences x vocabulary x (e + 4), the last token only",
        "context_bytes": Memory.context_bytes.__doc__,
        "nccl_bytes": Memory.nccl_bytes.__doc__,
        "total_bytes": "the sum",
    }
    fits = print_lines(lines, formulas, where)
    summary = dict.fromkeys(("gradient_bytes", "optimizer_bytes", "gathered_bytes"), 0) | {
        "fits": fits
    }
    summary |= {name: round(size) for name, size in lines.items()}
    if where.memory_bandwidth:  # a step reads the cache, and what it multiplies with
        few, many = (
            shape.active_experts,
            min(shape.experts, shape.active_experts * args.concurrency),
        )
        read = [
            inference.weight_bytes(shape, **held, count_embedding=False, experts_read=n)
            for n in (few, many)
        ]
        least, most = ((size + lines["kv_cache_bytes"]) / where.memory_bandwidth for size in read)
        own = f" ({most * 1e3:.2f} if no two sequences share an expert)" if few != many else ""
        print(f"decoding: at least {least * 1e3:.2f} ms a token{own}, by memory bandwidth")
        summary["step_seconds"] = least
    return summary | {"flops_per_token": 2 * shape.parameter_count(active=True)}


def main() -> int:
    try:
        args = parse_flags()
        shape = read_shape(args.model)
        if args.layers:
            shape = replace(
                shape, layers=args.layers, dense_layers=min(args.layers, shape.dense_layers)
            )
        if args.seq_len and shape.positions and args.seq_len > shape.positions:
            raise ValueError(
                f"--seq-len {args.seq_len} is over the limit of --model {args.model}: {shape.positions}"
            )
        args.seq_len = args.seq_len or min(4096, shape.positions or 4096)
        where = machine.read(args.device, args.dtype)
        where = replace(where, gpus_per_node=args.nodes_of, network=args.link * 1e9)
        summary = dict.fromkeys(("kv_cache_bytes", "flops_per_token", "mfu", "step_seconds"))
        summary |= {
            "device": args.device,
            "world_size": args.gpus,
            "dtype": args.dtype,
            "model": args.model,
        }
        summary["parameters"] = shape.parameter_count()
        if args.inference:
            summary |= inference_answer(args, shape, where)
        elif args.search:
            summary |= search_answer(args, shape, plan_of(args), where)
        else:
            plan = plan_of(args)
            summary |= layout_answer(shape, plan, peak(shape, plan), where)
    except ValueError as error:
        raise exits.UserError(str(error)) from None
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
