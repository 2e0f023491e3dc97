"""How a model is trained and spread over GPUs, and what is refused because it cannot be."""

from dataclasses import dataclass, fields
from math import prod

from _estimate_frameworks import FRAMEWORKS, LOSSES
from _estimate_shapes import Shape

from old.cli import nearest_multiples
from old.exits import UserError

CHECKPOINTING = ("none", "full", "selective")
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Bytes of state per parameter besides weights and gradients: AdamW has two fp32 numbers, 8-bit AdamW two bytes and an
# fp32 maximum per block of 256 for each, SGD nothing. Adafactor keeps a row and a column per matrix: next to nothing.
OPTIMIZERS = {
    "adamw": 8.0,
    "adamw-bf16": 4.0,
    "adamw-8bit": 2 + 2 * 4 / 256,
    "muon": 4.0,  # one fp32 momentum; embeddings and vectors, which AdamW updates, are counted alike
    "sgd-momentum": 4.0,
    "sgd": 0.0,
    "adafactor": 0.01,
}


@dataclass(frozen=True)
class Plan:
    """gpus = tp x pp x cp x dp; the experts of a mixture are divided over ep of the ranks that share data."""

    gpus: int = 1
    zero: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    seq_len: int = 4096
    micro_batch_size: int = 1
    micro_batches: int = 1  # per optimizer step and data-parallel rank
    dtype: str = "bf16"
    checkpointing: str = "none"
    optimizer: str = "adamw"
    framework: str = "ours"
    loss: str = "plain"
    on_cpu: bool = False
    kept_besides: int = 0  # numbers per token and layer that checkpointing keeps beyond its usual ones; below 0: fewer

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO and FSDP divide: all that hold the same weights, context-parallel ones as well."""
        return self.dp * self.cp

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.seq_len * self.micro_batch_size / self.cp


def check(shape: Shape, plan: Plan) -> None:
    """UserError that names the first setting that cannot be."""
    for name in ("gpus", "tp", "pp", "cp", "ep", "seq_len", "micro_batch_size", "micro_batches"):
        if getattr(plan, name) < 1:
            raise UserError(f"{flag(name)} {getattr(plan, name)} is not at least 1")
    choices = {
        "zero": (0, 1, 2, 3),
        "dtype": DTYPES,
        "checkpointing": CHECKPOINTING,
        "optimizer": OPTIMIZERS,
        "framework": FRAMEWORKS,
        "loss": LOSSES,
    }
    for name, allowed in choices.items():
        if getattr(plan, name) not in allowed:
            raise UserError(f"{flag(name)} {getattr(plan, name)!r} is none of {', '.join(map(str, allowed))}")
    model_parallel = prod((plan.tp, plan.pp, plan.cp))
    if plan.gpus % model_parallel:
        raise UserError(
            f"--gpus {plan.gpus} is no multiple of --tp x --pp x --cp = {model_parallel}: "
            f"use {nearest_multiples(plan.gpus, model_parallel)}"
        )
    divides(plan.tp, "--tp", shape.heads, "attention heads")
    if not shape.latent:
        divides(plan.tp, "--tp", shape.kv_heads, "key-value heads")
    divides(plan.tp, "--tp", shape.ffn, "columns of the feed-forward part")
    divides(plan.tp * plan.cp, "--tp x --cp", plan.seq_len, "tokens of a sequence")
    if plan.pp > shape.layers:
        raise UserError(f"--pp {plan.pp} is more than the {shape.layers} layers of {shape.name}")
    if plan.ep > 1:
        if not shape.experts:
            raise UserError(f"--ep {plan.ep}: {shape.name} has no experts")
        divides(plan.ep, "--ep", shape.experts.number, "experts")
        divides(plan.ep, "--ep", plan.gpus // plan.pp, "ranks of a pipeline stage")
    if shape.gpt2 and plan.seq_len > shape.positions:
        raise UserError(f"--seq-len {plan.seq_len} is over the {shape.positions} learned positions of {shape.name}")


def divides(size: int, size_name: str, whole: int, whole_name: str) -> None:
    if whole % size:
        raise UserError(f"{size_name} {size} does not divide the {whole} {whole_name}")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


PLAN_FIELDS = [field.name for field in fields(Plan)]
