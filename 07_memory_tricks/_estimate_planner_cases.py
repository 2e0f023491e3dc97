"""Measured peaks beside estimate.py: a row of tests/data/planner_cases.csv to a shape, a plan and our figure.

What a row does not say, its framework's code at that time does. The five facts of that kind stand below, each with its
source; they are of a framework, a version or a way of compiling, never of a row.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import estimate
from _estimate_plan import Plan
from _estimate_shapes import Experts, Latent, Shape

GIB = 2**30
# torchtitan compiles its loss together with the model since April 2025 (torchtitan#1033, sources from then on). Its
# graph_trainer always does (the log in #3184). For the DeepSeek run of f738a03 that is inferred: its log does not say.
LOSS_COMPILED_IF_MODEL_IS = ("202506", "mxfp8.md", "d66b72a", "d9bdfbb", "0691f51")
LOSS_ALWAYS_COMPILED = ("fca8ab7", "6a74d74", "f738a03")
# Head and loss in eight chunks: torchtitan#2937, for its large configurations since May 2026.
LOSS_CHUNKED = ("bcc0929", "00cffae")
# Before June 2024 the training loop held the logits through backward (torchtitan#391: 3.9 GB).
LOGITS_HELD = ("83c879f", "40f8fd0")
# From October 2025 (torchtitan#1776) attention ran in cuDNN on every GPU, on Blackwell since May (#1196; mxfp8.md has
# only B200s), but selective checkpointing kept its result only since December (#2095). #1196 measured it: 46.39 GiB
# before, 44.59 after.
ATTENTION_NOT_KEPT = ("d9bdfbb", "mxfp8.md")
COMPILED = ("torch.compile", "full inductor", "aot_eager")


@dataclass(frozen=True)
class Answer:
    id: str
    framework: str
    loss: str
    checkpointing: str
    convention: str
    measured_gib: float
    estimated_gib: float

    @property
    def error(self) -> float:
        return self.estimated_gib / self.measured_gib - 1


def read_rows(file: Path) -> list[dict]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def shape_of(row: dict) -> Shape:
    def size(name: str) -> int:
        return int(row[name] or 0)

    latent = re.search(r"q_lora (\d+) kv_lora (\d+) qk_nope (\d+) qk_rope (\d+) v (\d+)", row["attention"])
    head_dim = re.search(r"head_dim (\d+)", row["attention"])
    experts = None
    if row["experts"]:
        dense_layers = size("dense_layers")
        widths = size("expert_ffn"), size("shared_expert_ffn")
        experts = Experts(size("experts"), size("top_k"), *widths, dense_layers)
    return Shape(
        name=row["model"],
        vocab=size("vocab"),
        hidden=size("hidden"),
        layers=size("layers"),
        heads=size("heads"),
        kv_heads=size("kv_heads"),
        ffn=size("ffn"),
        head_dim=int(head_dim[1]) if head_dim else size("hidden") // size("heads"),
        tied=row["tied_embeddings"] == "1",
        experts=experts,
        latent=Latent(*map(int, latent.groups())) if latent else None,
    )


def framework_of(row: dict) -> str:
    name = row["framework"].split()[0].lower()
    if name == "torchtitan" and is_compiled(row):
        return "torchtitan-compiled"
    return {"megatron-lm": "megatron", "llm-foundry": "torchtitan"}.get(name, name)  # both: FSDP, eager kernels


def is_of(row: dict, versions: tuple[str, ...]) -> bool:
    return any(version in row["source"] for version in versions)


def is_compiled(row: dict) -> bool:
    return row["recompute"].startswith("graph") or any(word in row["notes"] for word in COMPILED)


def loss_of(row: dict) -> str:
    framework = row["framework"].split()[0]
    if framework != "torchtitan":
        return "fused" if framework == "Megatron-LM" else "plain"
    compiled = is_compiled(row) and is_of(row, LOSS_COMPILED_IF_MODEL_IS)
    if compiled or is_of(row, LOSS_ALWAYS_COMPILED):
        return "compiled"
    if is_of(row, LOSS_CHUNKED):
        return "chunked"
    if int(row["tp"]) > 1:
        return "parallel"
    return "logits-held" if is_of(row, LOGITS_HELD) else "plain"


def kept_besides(row: dict) -> int:
    """Numbers per token and layer that selective checkpointing keeps more, or less, than its framework does today."""
    if "wo outputs" in row["recompute"]:
        return int(row["hidden"])
    return -shape_of(row).value_width if is_of(row, ATTENTION_NOT_KEPT) else 0


def plan_of(row: dict) -> Plan:
    sizes = {name: int(row[name] or 1) for name in ("tp", "pp", "cp", "ep", "dp")}
    recompute = row["recompute"].split()
    stage = re.search(r"ZeRO-(\d)", row["zero_stage_or_distributed_optimizer"])
    return Plan(
        gpus=sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"],
        zero=int(stage[1] if stage else row["zero_stage_or_distributed_optimizer"]),
        tp=sizes["tp"],
        pp=sizes["pp"],
        cp=sizes["cp"],
        ep=sizes["ep"],
        seq_len=int(row["seq"]),
        micro_batch_size=int(row["micro_batch"] or 1),  # not stated: one, and as many of them as there are stages
        micro_batches=int(row["num_micro_batches"] or sizes["pp"]),
        checkpointing=recompute[0] if recompute and recompute[0] in ("none", "full") else "selective",
        framework=framework_of(row),
        loss=loss_of(row),
        kept_besides=kept_besides(row),
    )


def answer(row: dict) -> Answer:
    """Our peak beside the measured one, both allocated or both reserved, as the source counts."""
    plan = plan_of(row)
    only_first = [0] if plan.framework == "nanotron" else None  # it prints the memory of rank 0
    lines = estimate.memory(shape_of(row), plan, stages=only_first)
    # nanotron's label does not say which; the value grows with the micro-batch after the counters are reset, as only
    # reserved memory does
    reserved = row["memory_convention"] == "max_memory_reserved" or plan.framework == "nanotron"
    gib = lines["reserved_bytes" if reserved else "allocated_bytes"] / GIB
    if capacity := re.search(
        r"\(([\d.]+) GiB\)", row["gpu"]
    ):  # before it fails, the allocator gives back what it caches
        gib = max(lines["allocated_bytes"] / GIB, min(gib, float(capacity[1]) - estimate.CONTEXT / GIB))
    return Answer(
        id=row["id"],
        framework=plan.framework,
        loss=plan.loss,
        checkpointing=plan.checkpointing,
        convention="reserved" if reserved else "allocated",
        measured_gib=float(row["measured_peak_gib"]),
        estimated_gib=gib,
    )


def answers(file: Path) -> list[Answer]:
    return [answer(row) for row in read_rows(file) if row["measured_peak_gib"]]
