"""Steps and peaks that others measured beside what planner/ predicts: every error, and how often the order is right.

Rows that no formula was made on (tests/data/more_planner_cases.csv) and those that the formulas were made on
(planner_cases.csv) are kept apart: the errors of the latter say how well the formulas describe them, and not how well
they predict others. Beside the steps stands a trivial baseline: every run has the same MFU, the median of the rows that
the formulas were made on. A pair is two layouts of one model and sequence length on one machine, from one source. Peaks
are compared in the convention of their source, allocated or reserved.

    python benchmarks/planner_cases.py    written to benchmarks/results/

What a row does not say, its framework's code at that time does: tests/data/planner_versions.csv and the facts below,
each with its source. They are of a framework, a version or a way of compiling, never of a row.

Nothing is measured here, and the answer is the same on every machine.
"""

import csv
import json
import math
import re
import statistics
from dataclasses import replace
from datetime import date
from itertools import combinations
from pathlib import Path

from _measure import REPO, about, facts, write_results

from common import cli, exits
from common.report import table
from planner import machine, memory
from planner.machine import Machine
from planner.plan import Plan
from planner.shape import Shape
from planner.step import step

DATA = REPO / "tests/data"
MADE_ON = DATA / "planner_cases.csv"  # the rows that the formulas were made on
NOT_MADE_ON = DATA / "more_planner_cases.csv"  # no formula was made on them
NEAR = {"steps": 0.30, "peaks": 0.10}
# From October 2025 (torchtitan#1776) attention ran in cuDNN on every GPU, on Blackwell since May (#1196; mxfp8.md has
# only B200s), but selective checkpointing kept its result only since December (#2095): 46.39 GiB before, 44.59 after.
ATTENTION_NOT_KEPT = ("d9bdfbb", "mxfp8.md")
COMPILED = ("torch.compile", "full inductor", "aot_eager")
# How the rows name devices, in the order in which they are tried, and the names of common/devices.csv.
DEVICES = {
    "GB200": "NVIDIA GB200",
    "B200": "NVIDIA B200",
    "H200": "NVIDIA H200",
    "H100": "NVIDIA H100 80GB HBM3",
}
DEVICES |= {"A100 80GB PCIe": "NVIDIA A100 80GB PCIe", "A100": "NVIDIA A100-SXM4-80GB"}
# torchtitan's H100s have 96 GB of HBM2e and are limited to 500 W. Where a row does not say so, their 95 GiB do.
H100_96GB = {
    "device": "H100 96GB HBM2e",
    "memory_bandwidth": 2.4e12,
    "efficiency": (0.56, 0.4, 0.6),
}


def read_rows(file: Path) -> list[dict]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def shape_of(row: dict) -> Shape:
    same = (
        "vocab",
        "hidden",
        "layers",
        "heads",
        "kv_heads",
        "experts",
        "expert_ffn",
        "dense_layers",
    )
    names = {name: name for name in same} | {
        "active_experts": "top_k",
        "shared_ffn": "shared_expert_ffn",
    }
    sizes = {ours: int(row[theirs] or 0) for ours, theirs in names.items()}
    # GPT's two matrices of 4 x hidden are written as three of 8/3: to the next multiple of the tensor ranks
    sizes["ffn"] = -(-int(row["ffn"]) // int(row["tp"])) * int(row["tp"])
    head_dim = re.search(r"head_dim (\d+)", row["attention"])
    sizes["head_dim"] = int(head_dim[1]) if head_dim else sizes["hidden"] // sizes["heads"]
    if latent := re.search(
        r"q_lora (\d+) kv_lora (\d+) qk_nope (\d+) qk_rope (\d+) v (\d+)", row["attention"]
    ):
        names = ("q_rank", "kv_rank", "nope", "rope", "value_dim")
        sizes |= zip(names, map(int, latent.groups()), strict=True)
    return Shape(name=row["model"], **sizes, tied=row["tied_embeddings"] == "1")


def is_compiled(row: dict) -> bool:
    return row["recompute"].startswith("graph") or any(word in row["notes"] for word in COMPILED)


def framework_of(row: dict) -> str:
    name = row["framework"].split()[0].lower() + "-compiled" * is_compiled(row)
    # the latter: FSDP, eager kernels
    return {"megatron-lm": "megatron", "llm-foundry": "torchtitan"}.get(name, name)


def loss_of(row: dict) -> str:
    if "torchtitan" not in row["framework"]:
        return "fused" if "Megatron-LM" in row["framework"] else "plain"
    holds = {"": True, "compiled": is_compiled(row), "tp 1": row["tp"] == "1"}
    for version in read_rows(DATA / "planner_versions.csv"):
        if version["source"] in row["source"] and holds[version["only_if"]]:
            return version["loss"]
    return "parallel" if int(row["tp"]) > 1 else "plain"


def kept_besides(row: dict) -> int:
    """Numbers per token and layer that selective checkpointing keeps more, or less, than its framework does today."""
    not_kept = any(version in row["source"] for version in ATTENTION_NOT_KEPT)
    return (
        int(row["hidden"]) * ("wo outputs" in row["recompute"])
        - shape_of(row).value_width * not_kept
    )


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
        # not stated: one, and as many of them as there are stages
        micro_batch_size=int(row["micro_batch"] or 1),
        micro_batches=int(row["num_micro_batches"] or sizes["pp"]),
        checkpointing=recompute[0]
        if recompute and recompute[0] in ("none", "full")
        else "selective",
        framework=framework_of(row),
        loss=loss_of(row),
        async_tp="async TP" in row["notes"],
        fp8=""
        if "float8" not in row["dtype"]
        else "rowwise"
        if "rowwise" in row["notes"]
        else "tensorwise",
        kept_besides=kept_besides(row),
    )


def machine_of(row: dict) -> Machine | None:
    """None: a device that nothing is known of, or whose power is limited, which common/devices.csv does not know."""
    device = next((name for part, name in DEVICES.items() if part in row["gpu"]), None)
    if device is None or "power limited" in row["gpu"]:
        return None
    # ports of 200 and 400 Gb/s
    found = replace(machine.read(device), network=25e9 if "A100" in device else 50e9)
    if "H100" in device and re.search(r"HBM2e|\(95\.0", row["gpu"]):
        found = replace(found, **H100_96GB)
    return (
        replace(found, link=math.inf, network=math.inf)
        if "fake communication" in row["notes"]
        else found
    )


def outcome(row: dict, what: str, measured: float, predicted: float, **more) -> dict:
    why = json.loads((DATA / "planner_outside.json").read_text())[what].get(
        row["id"], "not explained"
    )
    error = predicted / measured - 1
    return {
        "id": row["id"],
        "measured": measured,
        "predicted": predicted,
        "error": error,
        "why": why,
        **more,
    }


def peaks(file: Path) -> list[dict]:
    """Rows that have a peak: GiB, measured and predicted, both allocated or both reserved, as the source counts."""
    found = []
    for row in read_rows(file):
        if not row["measured_peak_gib"]:
            continue
        plan = plan_of(row)
        only_first = [0] if plan.framework == "nanotron" else None  # it prints the memory of rank 0
        predicted = memory.peak(shape_of(row), plan, stages=only_first)
        # nanotron's label does not say which; it grows after the counters are reset, as only reserved memory does
        reserved = row["memory_convention"] == "max_memory_reserved" or plan.framework == "nanotron"
        allocated = predicted.allocated_bytes()
        size = allocated + predicted.fragmentation_bytes() * reserved
        # the allocator gives back its cache before it fails
        if capacity := re.search(r"\(([\d.]+) GiB\)", row["gpu"]):
            size = max(allocated, min(size, float(capacity[1]) * 2**30 - memory.CONTEXT))
        setting = f"{plan.checkpointing}, {plan.loss}, {'reserved' if reserved else 'allocated'}"
        own = {
            "source": plan.framework,
            "setting": setting,
            "causes": predicted.moment,
            "group": None,
        }
        found.append(outcome(row, "peaks", float(row["measured_peak_gib"]), size / 2**30, **own))
    return found


def measured_seconds(row: dict, tokens: float, seconds_at_the_peak: float) -> float | None:
    """Of a step, from what the source states: the time, tokens per second of a GPU, or MFU in percent."""
    names = ("measured_iteration_s", "measured_tokens_per_second_per_gpu", "measured_mfu")
    seconds, speed, mfu = (float(row[name] or 0) for name in names)
    return seconds or (
        tokens / speed if speed else seconds_at_the_peak / mfu * 100 if mfu else None
    )


def steps(file: Path) -> list[dict]:
    """Rows that have a time on a known device: seconds of a step, measured and predicted."""
    found = []
    for row in read_rows(file):
        where = machine_of(row)
        if where is None:
            continue
        shape, plan = shape_of(row), plan_of(row)
        timed = step(shape, plan, where)
        tokens = timed.tokens / plan.gpus
        # at 100 % MFU
        at_the_peak = tokens * shape.flops_per_token(seq_len=plan.seq_len) / where.peak_flops
        measured = measured_seconds(row, tokens, at_the_peak)
        if measured is None:
            continue
        causes = sorted(timed.causes, key=timed.causes.get, reverse=True)[:3]
        own = {
            "source": row["source"].split(":")[0],
            "setting": where.device,
            "causes": ", ".join(
                f"{cause} {timed.causes[cause] / timed.seconds:.0%}" for cause in causes
            ),
            "group": f"{row['model']}, {row['seq']}, {row['gpus']} x {row['gpu']}, {row['source']}",
            "tokens": tokens,
            "seconds_at_the_peak": at_the_peak,
        }
        found.append(outcome(row, "steps", measured, timed.seconds, **own))
    return found


def summary(name: str, rows: list[dict], near: float, key: str = "predicted") -> dict:
    """Errors of `key`, and of the pairs in one group those whose order by seconds per token is right."""
    errors = [abs(row[key] / row["measured"] - 1) for row in rows]
    orders = []
    for one, other in combinations(rows, 2):
        if one["group"] and one["group"] == other["group"]:
            orders.append(
                math.prod(
                    one[k] / one["tokens"] - other[k] / other["tokens"] for k in ("measured", key)
                )
            )
    return {
        "rows": name,
        "n": len(rows),
        "median_error": statistics.median(errors),
        f"share_under_{near:.0%}": sum(error < near for error in errors) / len(errors),
        "largest_error": max(errors),
        "pairs_in_order": f"{sum(order > 0 for order in orders)} of {len(orders)}"
        if any(orders)
        else "none",
    }


def summaries(what: str, rows: list[dict], mfu: float) -> list[dict]:
    """Of all rows, of the baseline if these are steps, and of each source."""
    near = NEAR[what]
    found = [summary("all", rows, near)]
    if what == "steps":
        for row in rows:
            row["one_mfu"] = row["seconds_at_the_peak"] / mfu
        found.append(summary(f"every run at {mfu:.0%} MFU", rows, near, "one_mfu"))
    for source in dict.fromkeys(row["source"] for row in rows):
        found.append(summary(source, [row for row in rows if row["source"] == source], near))
    return found


def main() -> int:
    cli.Parser(__doc__).parse_args()
    mfu = statistics.median(row["seconds_at_the_peak"] / row["measured"] for row in steps(MADE_ON))
    about_ = about("benchmarks/planner_cases.py", "cpu")
    result = {"about": about_, "one_mfu": mfu}
    texts = [f"# Steps and peaks: planner/ beside what others measured, {date.today().isoformat()}"]
    for what, measured_rows in (("steps", steps), ("peaks", peaks)):
        result[what] = {}
        for name, file in (("not_made_on", NOT_MADE_ON), ("made_on", MADE_ON)):
            rows = measured_rows(file)
            if not rows:
                continue
            found = summaries(what, rows, mfu)
            result[what][name] = {"summaries": found, "rows": rows}
            heading = f"{what}, {file.name} ({name.replace('_', ' ')})"
            lines = [
                [f"{cell:.1%}" if isinstance(cell, float) else str(cell) for cell in one.values()]
                for one in found
            ]
            texts.append(f"## {heading.capitalize()}\n\n{table([[*found[0]], *lines])}")
    texts.append(
        "Every row is in the .json, with its causes and, where it is known, why it is further off."
    )
    print("\n\n".join(texts))
    written = write_results("planner", "", result, "\n\n".join([*texts, facts(about_)]))
    print(f"\nwritten: {written} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
