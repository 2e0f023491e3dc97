"""The flags of quantized_inference.py, and what is refused before a weight is read."""

import argparse

import torch
from _quantized_inference_files import GROUPS, is_left_over, quantization, unfinished_folder

from old import cli, hardware, inference, shapes
from old.exits import UserError

WEIGHTS = ("fp32", "bf16", "int8", "int4", "fp8")
GROUP = 32
GUESSES = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse_args(description: str) -> argparse.Namespace:
    parser = inference.inference_parser(description)
    add = parser.add_argument
    told = "(default: of nano all in turn, of a saved folder its own, else int8)"
    add("--weights", choices=("all", *WEIGHTS), help=f"what the weights are kept in {told}")
    add("--group-size", type=int, choices=GROUPS, help=f"int4 weights that share a scale and a zero (default: {GROUP})")
    add("--kv-cache", choices=("full", "int8"), default="full", help="full: in the type of the activations")
    add("--compile", action="store_true", help="torch.compile the decode step; on a GPU as one CUDA graph")
    add("--draft", metavar="MODEL", help="a small model that guesses tokens, with the same vocabulary")
    told = f"guesses that one step verifies (default: {GUESSES})"
    add("--draft-tokens", type=cli.positive_int, metavar="K", help=told)
    add("--save", type=cli.path, metavar="FOLDER", help="write the rounded model there, for --model FOLDER")
    add("--evaluate", type=cli.path, metavar="FILE", help="a text: its loss per token with these weights")
    args = parser.parse_args()
    inference.check_drawing(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    if args.draft_tokens is not None and args.draft is None:
        raise UserError(f"--draft-tokens {args.draft_tokens}: nobody guesses without --draft MODEL")
    args.draft_tokens = 0 if args.draft is None else args.draft_tokens or GUESSES
    given_group = args.group_size
    entry = quantization(args.model)
    if entry is not None:
        for flag, value, kept in (
            ("--weights", args.weights, entry["weights"]),
            ("--group-size", args.group_size, entry.get("group_size")),
        ):
            if value not in (None, kept):
                raise UserError(f"{flag} {value}: --model {args.model} has been rounded, with {flag} {kept}")
        args.weights, args.group_size = entry["weights"], entry.get("group_size")
    args.weights = args.weights or ("all" if args.model == "nano" else "int8")
    if given_group is not None and args.weights not in ("int4", "all"):
        raise UserError(f"--group-size {given_group}: --weights {args.weights} has no groups; int4 has")
    if args.group_size is None:
        args.group_size = GROUP
    elif entry is None:
        for flag, name in (("--model", args.model), ("--draft", args.draft)):
            if name is not None:
                check_groups(shapes.read_config(name, flag), args.group_size, f"{flag} {name}")
    if args.draft is not None:
        check_rounding_of_draft(args)
    if args.save is not None:
        check_save(args, rounded=entry is not None)
    return args


def check_rounding_of_draft(args: argparse.Namespace) -> None:
    """UserError for a rounded draft where the model is kept in other weights: both take the same."""
    entry = quantization(args.draft, "--draft")
    if entry is None:
        return
    kept, wanted = f"--weights {entry['weights']}", f"--weights {args.weights}"
    if "int4" == entry["weights"] == args.weights:
        kept += f" --group-size {entry.get('group_size', GROUP)}"
        wanted += f" --group-size {args.group_size}"
    if kept != wanted:
        raise UserError(
            f"--draft {args.draft} has been rounded with {kept}, and {wanted} is for model and draft: use {kept}, or "
            "a draft that is not rounded"
        )


def check_save(args: argparse.Namespace, rounded: bool) -> None:
    if args.weights not in ("int8", "int4", "fp8") or rounded:
        raise UserError(f"--save {args.save}: there is something to round with --weights int8, int4 or fp8")
    if args.save.exists():
        raise UserError(f"--save {args.save}: it exists already; name another folder")
    unfinished = unfinished_folder(args.save)
    try:
        if not unfinished.exists():  # try whether it can be made, before a model is
            unfinished.mkdir(parents=True)
            unfinished.rmdir()
        elif not is_left_over(unfinished):
            raise UserError(f"--save {args.save}: {unfinished} is in the way, and not from here; name another folder")
    except OSError as error:
        raise UserError(f"--save {args.save}: {error.strerror}; name another folder") from None


def schemes(args: argparse.Namespace, device: torch.device) -> list[str]:
    """The types of weights to run; one line for what this device has no units for."""
    chosen = WEIGHTS if args.weights == "all" else (args.weights,)
    native, why = hardware.native_types(device)
    if "fp8" in chosen and "fp8" not in native:
        line = f"fp8: {hardware.device_name(device)} has no units that multiply it ({why})"
        if args.weights == "fp8":
            raise UserError(f"--weights {line}; use --weights int8")
        print(f"left out: {line}", flush=True)
        chosen = [weights for weights in chosen if weights != "fp8"]
    return [*chosen]


def activation_dtype(args: argparse.Namespace, weights: str, device: torch.device) -> str:
    """fp32 or bf16: what activations and cache are in."""
    if args.dtype == "fp16" or (weights in DTYPES and args.dtype not in ("auto", weights)):
        raise UserError(f"--dtype {args.dtype}: activations are fp32 or bf16; with --weights fp32 or bf16 that type")
    if weights in DTYPES:
        return weights
    if device.type == "cuda" and weights == "int4" and args.dtype == "fp32":
        raise UserError("--dtype fp32: torch's int4 product on a GPU takes bf16; use --dtype bf16")
    return "bf16" if args.dtype == "auto" else args.dtype


def check_groups(config: shapes.Config, group: int, where: str) -> None:
    """UserError if the rows of a matrix do not divide into groups of this size."""
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads x head_dim": config.num_attention_heads * config.head_dim,
    }
    for width_name, width in widths.items():
        if width % group:
            fitting = [str(size) for size in GROUPS if all(width % size == 0 for width in widths.values())]
            instead = f"use {' or '.join(fitting)}" if fitting else "leave it out: 32, and zeros fill the last group"
            raise UserError(f"--group-size {group} does not divide {width_name} {width} of {where}: {instead}")


def bits_per_weight(weights: str, group: int) -> float:
    return {"fp32": 32, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4 + 32 / group}[weights]


def needed_bytes(config: shapes.Config, weights: str, group: int) -> int:
    """About what the weights take: scales of rows and norms are left out, they are less than 1 %."""
    embedding = config.vocab_size * config.hidden_size
    products = shapes.parameter_count(config) - (0 if config.tie_word_embeddings else embedding)
    tied = config.tie_word_embeddings and weights in DTYPES  # else the head is a rounded matrix of its own
    embedding_bytes = 0 if tied else embedding * (4 if weights == "fp32" else 2)
    return int(products * bits_per_weight(weights, group) / 8) + embedding_bytes


def check_fits(config: shapes.Config, weights: str, group: int, cache_bytes: int, device: torch.device) -> None:
    """UserError that says how much is missing, and what would fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier model has given back is free too
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = hardware.available_memory()
    needed = needed_bytes(config, weights, group) + cache_bytes
    if needed <= free:
        return
    fitting = [
        f"--weights {other}" for other in ("int8", "int4") if needed_bytes(config, other, group) + cache_bytes <= free
    ]
    instead = f"{' or '.join(fitting)} would fit" if fitting else "divide it over GPUs with 06_fsdp_zero/infer_70b.py"
    raise UserError(
        f"--weights {weights} and the cache need {needed / 2**30:.1f} GiB, {(needed - free) / 2**30:.1f} more than the "
        f"{free / 2**30:.1f} GiB that are free: {instead}"
    )


def check_draft(args: argparse.Namespace, config: shapes.Config, prompts: list[list[int]]) -> None:
    """UserError for a draft that cannot guess for this model."""
    name = args.draft
    if len(prompts) > 1:
        raise UserError(f"--draft {name}: guesses are verified for one prompt at a time, {len(prompts)} were given")
    draft = shapes.read_config(name, "--draft")
    if (size := draft.vocab_size) != config.vocab_size:
        raise UserError(
            f"--draft {name} has a vocabulary of {size}, the model {config.vocab_size}: it must be the same"
        )
    longest = len(prompts[0]) + args.max_new_tokens + args.draft_tokens
    if (context := draft.max_position_embeddings) < longest:
        raise UserError(f"--draft {name} has a context of {context}, and prompt, answer and guesses take {longest}")
