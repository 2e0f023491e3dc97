"""Measured training runs: a row of tests/data/planner_cases.csv or more_planner_cases.csv to a shape, plan and machine.

What a row does not say, its framework's code at that time does. Those facts stand below, each with its source; they are
of a framework, a version or a way of compiling, never of a row.
"""

import csv
import re
from dataclasses import replace
from math import inf
from pathlib import Path

from _shared import REPO

from planner import machine, memory
from planner.machine import Machine
from planner.plan import Plan
from planner.shape import Shape
from planner.step import step

DATA = REPO / "tests/data"
MADE_ON = DATA / "planner_cases.csv"  # the rows that the formulas were made on
NOT_MADE_ON = DATA / "more_planner_cases.csv"  # no formula was made on them
# torchtitan compiles its loss together with the model since April 2025 (torchtitan#1033, sources from then on). Its
# graph_trainer always does (the log in #3184). For the DeepSeek run of f738a03 that is inferred: its log does not say.
LOSS_COMPILED_IF_MODEL_IS = ("202506", "mxfp8.md", "d66b72a", "d9bdfbb", "0691f51")
LOSS_ALWAYS_COMPILED = ("fca8ab7", "6a74d74", "f738a03")
# Head and loss in eight chunks: torchtitan#2937, for its large configurations since May 2026.
LOSS_CHUNKED = ("bcc0929", "00cffae")
# Before June 2024 the training loop held the logits through backward (torchtitan#391: 3.9 GB).
LOGITS_HELD = ("83c879f", "40f8fd0")
# From October 2025 (torchtitan#1776) attention ran in cuDNN on every GPU, on Blackwell since May (#1196; mxfp8.md has
# only B200s), but selective checkpointing kept its result only since December (#2095): 46.39 GiB before, 44.59 after.
ATTENTION_NOT_KEPT = ("d9bdfbb", "mxfp8.md")
COMPILED = ("torch.compile", "full inductor", "aot_eager")
# How the rows name devices, in the order in which they are tried, and the names of common/devices.csv.
DEVICES = {
    "GB200": "NVIDIA GB200",
    "GB300": "NVIDIA GB200",
    "B200": "NVIDIA B200",
    "H200": "NVIDIA H200",
    "A100 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "A100": "NVIDIA A100-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
}
NOT_COUNTED = ("GB300", "power limited")  # devices that common/devices.csv does not know: printed only
# torchtitan's H100s have 96 GB of HBM2e and are limited to 500 W. Where a row does not say so, their 95 GiB do.
H100_96GB = {"memory_bandwidth": 2.4e12, "efficiency": (0.56, 0.4, 0.6)}
NETWORK_OF_A100 = 25e9  # bytes per second and GPU between nodes, 200 Gb/s; the others have 400


def read_rows(file: Path) -> list[dict]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def shape_of(row: dict) -> Shape:
    def size(name: str) -> int:
        return int(row[name] or 0)

    latent = re.search(r"q_lora (\d+) kv_lora (\d+) qk_nope (\d+) qk_rope (\d+) v (\d+)", row["attention"])
    latent_names = ("q_rank", "kv_rank", "nope", "rope", "value_dim")
    head_dim = re.search(r"head_dim (\d+)", row["attention"])
    return Shape(
        name=row["model"],
        **{name: size(name) for name in ("vocab", "hidden", "layers", "heads", "kv_heads")},
        # GPT's two matrices of 4 x hidden are written as three of 8/3: to the next multiple of the tensor ranks
        ffn=-(-size("ffn") // size("tp")) * size("tp"),
        head_dim=int(head_dim[1]) if head_dim else size("hidden") // size("heads"),
        tied=row["tied_embeddings"] == "1",
        experts=size("experts"),
        active_experts=size("top_k"),
        expert_ffn=size("expert_ffn"),
        shared_ffn=size("shared_expert_ffn"),
        dense_layers=size("dense_layers"),
        **dict(zip(latent_names, map(int, latent.groups()), strict=True) if latent else ()),
    )


def is_of(row: dict, versions: tuple[str, ...]) -> bool:
    return any(version in row["source"] for version in versions)


def is_compiled(row: dict) -> bool:
    return row["recompute"].startswith("graph") or any(word in row["notes"] for word in COMPILED)


def framework_of(row: dict) -> str:
    name = row["framework"].split()[0].lower()
    if name == "torchtitan" and is_compiled(row):
        return "torchtitan-compiled"
    return {"megatron-lm": "megatron", "llm-foundry": "torchtitan"}.get(name, name)  # both: FSDP, eager kernels


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
        gpus=sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes.pop("dp"),
        **sizes,
        zero=int(stage[1] if stage else row["zero_stage_or_distributed_optimizer"]),
        virtual=int(row["vpp"] or 1),
        seq_len=int(row["seq"]),
        micro_batch_size=int(row["micro_batch"] or 1),  # not stated: one, and as many of them as there are stages
        micro_batches=int(row["num_micro_batches"] or sizes["pp"]),
        checkpointing=recompute[0] if recompute and recompute[0] in ("none", "full") else "selective",
        framework=framework_of(row),
        loss=loss_of(row),
        async_tp="async TP" in row["notes"],
        fp8="" if "float8" not in row["dtype"] else "rowwise" if "rowwise" in row["notes"] else "tensorwise",
        kept_besides=kept_besides(row),
    )


def machine_of(row: dict) -> Machine | None:
    """None: a device that nothing is known of."""
    device = next((name for part, name in DEVICES.items() if part in row["gpu"]), None)
    if device is None:
        return None
    found = machine.read(device)
    if "A100" in device:
        found = replace(found, network=NETWORK_OF_A100)
    if "H100" in device and re.search(r"HBM2e|\(95\.0", row["gpu"]):
        found = replace(found, device="H100 96GB HBM2e", **H100_96GB)
    return replace(found, link=inf, network=inf) if "fake communication" in row["notes"] else found


def peaks(file: Path) -> list[dict]:
    """Rows that have a peak: measured and predicted, both allocated or both reserved, as the source counts."""
    found = []
    for row in read_rows(file):
        if not row["measured_peak_gib"]:
            continue
        plan = plan_of(row)
        only_first = [0] if plan.framework == "nanotron" else None  # it prints the memory of rank 0
        predicted = memory.peak(shape_of(row), plan, stages=only_first)
        # nanotron's label does not say which; the value grows with the micro-batch after the counters are reset, as
        # only reserved memory does
        reserved = row["memory_convention"] == "max_memory_reserved" or plan.framework == "nanotron"
        allocated = predicted.allocated_bytes()
        size = allocated + predicted.fragmentation_bytes() * reserved
        if capacity := re.search(
            r"\(([\d.]+) GiB\)", row["gpu"]
        ):  # before it fails, the allocator gives back its cache
            room = float(capacity[1]) * 2**30 - memory.CONTEXT
            size = max(allocated, min(size, room))
        measured = float(row["measured_peak_gib"])
        found.append(
            {
                "id": row["id"],
                "framework": plan.framework,
                "setting": f"{plan.checkpointing}, {plan.loss}",
                "counts": "reserved" if reserved else "allocated",
                "measured": measured,
                "predicted": size / 2**30,
                "error": size / 2**30 / measured - 1,
            }
        )
    return found


def measured_seconds(row: dict, plan: Plan, peak_flops: float) -> float | None:
    tokens = plan.tokens * plan.micro_batches / (plan.tp * plan.pp)  # per step and GPU
    if row["measured_iteration_s"]:
        return float(row["measured_iteration_s"])
    if row["measured_tokens_per_second_per_gpu"]:
        return tokens / float(row["measured_tokens_per_second_per_gpu"])
    if row["measured_mfu"]:
        flops = shape_of(row).flops_per_token(seq_len=plan.seq_len)
        return tokens * flops / (peak_flops * float(row["measured_mfu"]) / 100)
    return None


def steps(file: Path) -> list[dict]:
    """Rows that have a time on a known device: measured and predicted seconds of a step."""
    found = []
    for row in read_rows(file):
        where = machine_of(row)
        if where is None or any(word in row["gpu"] for word in NOT_COUNTED):
            continue
        shape, plan = shape_of(row), plan_of(row)
        measured = measured_seconds(row, plan, where.peak_flops)
        if measured is None:
            continue
        predicted = step(shape, plan, where)
        flops = shape.flops_per_token(seq_len=plan.seq_len) * predicted.tokens / plan.gpus
        found.append(
            {
                "id": row["id"],
                "source": row["source"].split(":")[0],
                "device": where.device,
                # layouts of one model and sequence length on one machine, from one source
                "group": f"{row['model']}, {row['seq']}, {row['gpus']} x {row['gpu']}, {row['source']}",
                "measured": measured,
                "predicted": predicted.seconds,
                "error": predicted.seconds / measured - 1,
                "gpu_seconds_per_token": measured * plan.gpus / predicted.tokens,
                "at_the_peak": flops / where.peak_flops,  # seconds if MFU were 100 %
                "causes": predicted.causes,
                "tokens": predicted.tokens / plan.gpus,
            }
        )
    return found
