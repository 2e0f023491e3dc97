"""Flags of estimate.py, the shapes it knows, and the plan that its flags name."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from common import cli, exits
from lm import shapes
from lm.stages import STAGES_PER_RANK
from planner import inference, machine, micro_batch
from planner.plan import CHECKPOINTING, DTYPES, LOSSES, OPTIMIZERS, Plan, divides, script_defaults
from planner.shape import Shape, from_config

# The model_type of a config.json, and the family with the same defaults for its attention.
FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v2": "llama",
    "deepseek_v3": "llama",
}
# Sizes in a config.json that only mixtures of experts and multi-head latent attention have.
OTHER_SIZES = (
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "first_k_dense_replace",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
# Of the mixtures of experts that are trained here.
EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
)
# Flags that only a training step, or only --inference, reads; None: see make_plan.
TRAINING = {
    "zero": None,
    "pp": 1,
    "schedule": "1f1b",
    "cp": 1,
    "ring": False,
    "ep": 1,
    "replicate": 1,
    "micro_batch_size": None,
    "global_batch_size": None,
    "checkpointing": None,
    "compile": None,
    "optimizer": "adamw",
    "framework": "ours",
    "loss": None,
    "adapters": 0,
}
SERVING = {"concurrency": 1, "weights": "bf16", "group_size": 32, "kv_cache_dtype": "bf16"}


# --- flags


def parse_flags(description: str) -> argparse.Namespace:
    """Return the flags. Those that were not given have their defaults; `given` has the others.

    Raise ValueError for flags that do not go together.
    """
    parser = cli.Parser(description)
    add = parser.add_argument

    # Model and machine.
    add("--model", help="one of our sizes, a name of models.json, or a config.json (default: nano)")
    add("--layers", type=cli.positive_int, help="keep so many layers of the model")
    add("--gpus", type=cli.positive_int, help="of all nodes (default: --tp x --pp x --cp)")
    add("--device", default="NVIDIA H100 80GB HBM3", help="a name of common/devices.csv, or cpu")
    add("--nodes-of", type=cli.positive_int, default=8, metavar="N", help="GPUs of a node")
    add(
        "--link",
        type=cli.positive,
        default=50.0,
        metavar="GB/s",
        help="between nodes, per GPU, in one direction",
    )

    # Layout.
    add(
        "--zero",
        type=int,
        choices=range(4),
        help="0: DDP, 3: FSDP, 1 and 2: DeepSpeed (default: 3, on one GPU 0)",
    )
    add("--tp", type=cli.positive_int, help="tensor parallel, with sequence parallel")
    add("--pp", type=cli.positive_int, help="pipeline ranks")
    add("--schedule", choices=STAGES_PER_RANK, help="of the pipeline (default: 1f1b)")
    add("--cp", type=cli.positive_int, help="context parallel")
    add("--ring", action="store_true", help="--cp by ring attention, which train_3d.py has not")
    add("--ep", type=cli.positive_int, help="expert parallel")
    add("--replicate", type=cli.positive_int, help="copies of the sharded model (HSDP)")

    # What the scripts call the same.
    add("--seq-len", type=cli.positive_int, help="tokens per sequence (default: the script's)")
    add(
        "--micro-batch-size",
        type=cli.positive_int,
        help="sequences per rank and forward (default: on a GPU what fits)",
    )
    add(
        "--global-batch-size",
        type=cli.positive_int,
        help="sequences per step (default: the script's; --search: 8 per GPU)",
    )
    add("--dtype", choices=DTYPES, help="of matmuls (default: bf16, or fp32 without units for it)")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="torch.compile the model (default: as the script)",
    )
    add("--checkpointing", choices=CHECKPOINTING, help="what backward recomputes (default: none)")
    add("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    add("--adapters", type=cli.positive_int, metavar="RANK", help="LoRA beside frozen matrices")
    add("--loss", choices=LOSSES, help="default: as the script computes it")
    add(
        "--framework",
        choices=("ours", "ours-compiled", "deepspeed"),
        help="deepspeed: --zero by train_zero.py; ours-compiled: --compile (default: ours)",
    )

    # Other answers.
    add("--search", action="store_true", help="every layout: the best eight; given sizes are kept")
    add("--inference", action="store_true", help="weights and KV cache instead of a training step")
    add("--concurrency", type=cli.positive_int, help="sequences of --seq-len tokens in the cache")
    add(
        "--weights",
        choices=inference.WEIGHTS,
        help="of --inference (default: bf16); int4: also of the matrices beside --adapters",
    )
    add("--group-size", type=cli.positive_int, help="weights per scale of int4 (default: 32)")
    add("--kv-cache-dtype", choices=inference.CACHE_DTYPES, help="default: bf16")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the answer as one object")

    args = parser.parse_args()
    args.given = {}
    for name, value in vars(args).items():
        if name != "given" and value is not None and value is not False:
            args.given[name] = value
    if args.compile is False:
        args.given["compile"] = False
    check_flags(args)
    fill_defaults(args)
    return args


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that the answer does not read."""
    for name in args.given:
        flag = f"--{name.replace('_', '-')}"
        if args.inference and (name in TRAINING or name == "search"):
            raise ValueError(
                f"{flag} is of training, and --inference does not read it: leave it out"
            )
        if name == "weights" and args.weights == "int4":
            if not (args.inference or args.adapters):
                raise ValueError("--weights int4 needs --inference, or --adapters: add one of them")
            continue
        if not args.inference and name in SERVING:
            raise ValueError(f"{flag} is of serving, and is read with --inference only")
    if args.group_size and args.weights != "int4":
        raise ValueError(
            f"--group-size {args.group_size} is of --weights int4: add that, or leave it out"
        )
    if "ring" in args.given and not args.search and args.given.get("cp", 1) == 1:
        raise ValueError("--ring is of context parallelism: add --cp N, or leave it out")


def fill_defaults(args: argparse.Namespace) -> None:
    """Give the flags that were not given the values that the scripts have."""
    defaults = script_defaults(args.device, args.model)
    for name, value in {**TRAINING, **SERVING, "tp": 1}.items():
        if name not in args.given:
            setattr(args, name, value)
    args.default_batch = defaults.global_batch_size
    if args.model is None:
        args.model = defaults.model
    if args.dtype is None:
        args.dtype = defaults.dtype
    if args.checkpointing is None:
        args.checkpointing = defaults.checkpointing
    if args.compile is None:
        args.compile = defaults.compile or args.framework == "ours-compiled"
    if args.gpus is None:
        args.gpus = args.tp * args.pp * args.cp


# --- shapes


def read_shape(name: str) -> Shape:
    """Return the shape of --model: one of our sizes, a name of models.json, or a config.json.

    The last may also be its folder. Raise UserError or ValueError if it cannot be read.
    """
    published = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
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
    return shape_from_json(name, shapes.read_config_json(name))


def shape_from_json(name: str, content: dict) -> Shape:
    """Return the shape in the content of a Hugging Face config.json.

    Raise UserError or ValueError that names the key that is missing or impossible.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES or content.get("mlp_bias"):
        raise ValueError(
            f"--model {name}: model_type {kind!r} is none of {', '.join(FAMILIES)}, "
            "or it has mlp_bias"
        )
    # No window: it changes no size.
    sizes = {
        "model_type": FAMILIES[kind],
        "max_position_embeddings": 0,
        "sliding_window": None,
    }
    keys = [key for key in shapes.Config.__dataclass_fields__ if "rope" not in key]
    if kind in shapes.MIXTURES:
        keys += EXPERT_KEYS
    for key in keys:
        if key in content:
            sizes[key] = content[key]
    other_sizes = {}
    for key in OTHER_SIZES:
        value = content.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise ValueError(f"--model {name}: {key} is {value!r}, and not a whole number")
        other_sizes[key] = value
    shape = from_config(name, shapes.parse_config(sizes, f"--model {name}"))
    shape = replace(
        shape,
        qkv_bias=kind == "qwen2" or content.get("attention_bias", False),
        qk_norm=kind.startswith("qwen3"),
    )
    try:
        sizes = {**expert_sizes(kind, other_sizes), **latent_sizes(kind, other_sizes)}
    except KeyError as error:
        missing = error.args[0]
        raise ValueError(f"--model {name}: the config.json of a {kind} lacks {missing}") from None
    shape = replace(shape, **sizes)
    if shape.active_experts > shape.experts:
        raise ValueError(
            f"--model {name}: num_experts_per_tok {shape.active_experts} of {shape.experts} experts"
        )
    return shape


def expert_sizes(kind: str, content: dict[str, int]) -> dict[str, int]:
    """Return the sizes of DeepSeek's mixture of experts in a config.json, or none."""
    if not kind.startswith("deepseek") or not content.get("n_routed_experts"):
        return {}
    width = content["moe_intermediate_size"]
    shared_experts = content.get("n_shared_experts", 0)
    return {
        "experts": content["n_routed_experts"],
        "active_experts": content["num_experts_per_tok"],
        "expert_ffn": width,
        "shared_ffn": shared_experts * width,
        "dense_layers": content.get("first_k_dense_replace", 0),
    }


def latent_sizes(kind: str, content: dict[str, int]) -> dict[str, int]:
    """Return the sizes of multi-head latent attention in a config.json, or none."""
    if not kind.startswith("deepseek"):
        return {}
    return {
        "q_rank": content.get("q_lora_rank", 0),
        "kv_rank": content["kv_lora_rank"],
        "nope": content["qk_nope_head_dim"],
        "rope": content["qk_rope_head_dim"],
        "value_dim": content["v_head_dim"],
    }


def default_seq_len(args: argparse.Namespace, shape: Shape) -> int:
    """Return the script's --seq-len for a model that it trains, else 4,096 or the model's limit."""
    longest = min(4096, shape.positions or 4096)
    if args.inference:
        return longest
    try:
        return shapes.recipe(args.model).seq_len
    except exits.UserError:  # a model that only the planner knows
        return longest


# --- plan


def make_plan(args: argparse.Namespace, shape: Shape) -> Plan:
    """Return the plan that the flags name. What they do not say is as the scripts do it.

    Raise ValueError if --global-batch-size is no multiple of what all ranks take at once.
    """
    zero = args.zero
    if zero is None:
        zero = 3 if args.gpus > 1 else 0
    plan = Plan(
        gpus=args.gpus,
        zero=zero,
        deepspeed=args.framework == "deepspeed",
        tp=args.tp,
        pp=args.pp,
        schedule=args.schedule,
        cp=args.cp,
        ring=args.ring,
        ep=args.ep,
        replicate=args.replicate,
        seq_len=args.seq_len,
        micro_batch_size=args.micro_batch_size or 1,
        dtype=args.dtype,
        compile=args.compile,
        checkpointing=args.checkpointing,
        optimizer=args.optimizer,
        loss=args.loss,
        adapters=args.adapters,
        weights="int4" if args.weights == "int4" else "auto",
        on_cpu=args.device == "cpu",
    )
    if args.search:
        return plan
    divides("--tp x --pp x --cp", args.tp * args.pp * args.cp, "--gpus", args.gpus)
    return with_batch(plan, args, shape)


def with_batch(plan: Plan, args: argparse.Namespace, shape: Shape) -> Plan:
    """Return the plan with the micro-batches of a step.

    Without --global-batch-size it has the script's, or one micro-batch per rank and stage where the
    ranks cannot share that. Without --micro-batch-size it has the largest size that fits in an
    empty GPU, on a CPU a rank's share.
    """
    at_once = plan.dp * plan.micro_batch_size
    sequences = args.global_batch_size
    if sequences is None:
        sequences = args.default_batch
        if sequences % (at_once * plan.pp):
            sequences = at_once * plan.pp
    if sequences % at_once:
        lower = sequences // at_once * at_once
        sizes = [str(size) for size in (lower, lower + at_once) if size]
        raise ValueError(
            f"--global-batch-size {sequences} is no multiple of data-parallel ranks x micro-batch "
            f"size = {at_once}: use {' or '.join(sizes)}"
        )
    share = sequences // plan.dp
    size = args.micro_batch_size
    if size is None:
        size = share // plan.pp if share % plan.pp == 0 else 1
        memory_bytes = machine.read(args.device, plan.dtype).memory_bytes
        if memory_bytes is not None and not plan.on_cpu:
            size = micro_batch.choose(shape, plan, share=share, free_bytes=memory_bytes).size
    return micro_batch.with_size(plan, size, share)
