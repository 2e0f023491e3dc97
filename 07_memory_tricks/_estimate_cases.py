"""Published figures beside the formulas of estimate.py: a row of tests/data/estimator_cases.csv to our answer.

Every source counts in its own way. Each way has a name here, and none has a factor of its own.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import estimate
from _estimate_config import from_json, read_shape
from _estimate_inference import inference_weight_bytes
from _estimate_shapes import Shape, parameter_count

GIB = 2**30  # DeepSpeed prints it as "GB"
GB = 10**9
MODES = {"bf16": "bf16", "int8": "int8", "int4": "int4"}


@dataclass(frozen=True)
class Case:
    id: str
    inputs: dict
    expected: float
    tolerance: str  # a share of the expected value, or "abs:0.1" in its unit
    unit: str
    source: str

    def allows(self, answer: float) -> bool:
        if self.tolerance.startswith("abs:"):
            return abs(answer - self.expected) <= float(self.tolerance[4:]) + 1e-9
        return abs(answer - self.expected) <= float(self.tolerance) * abs(self.expected)


def read_cases(file: Path) -> list[Case]:
    found = []
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            inputs = json.loads(row["inputs"])
            found.append(Case(row["id"], inputs, float(row["expected"]), row["tolerance"], row["unit"], row["source"]))
    return found


def answer(case: Case) -> float:
    """Our figure, in the unit of the case."""
    given, unit = case.inputs, case.unit
    if unit == "params":
        return parameter_count(shape_of(given), active=given.get("model", "").endswith("-active"))
    if unit == "FLOP/token":
        return flops(given)
    if unit == "%":
        speed = {"tokens_per_second": given["tokens_per_s"], "peak_flops": given["peak_flops"]}
        return 100 * estimate.mfu(**speed, flops_per_token=flops(given))
    if unit == "B/token":
        return estimate.kv_cache_bytes(shape_of(given), tokens=1)
    if unit == "tok/s/GPU":
        return given["tokens_per_step"] / given["seconds_per_step"] / given["gpus"]
    if unit == "min":
        return given["steps"] * given["seconds_per_step"] / 60
    if unit == "GB/s":
        return bandwidth(given)
    return size(given) / {"GiB": GIB, "GB": GB, "B": 1}[unit]


def shape_of(given: dict) -> Shape:
    """Of a model that has a name, or of the content of its config.json."""
    if "config" in given:
        return from_json("config", given["config"])
    return read_shape(given["model"].removesuffix("-active"))


def flops(given: dict) -> float:
    """With a model, with or without its embedding; with a parameter count alone (llm-foundry), all of it."""
    if "model" in given or "config" in given:
        shape = shape_of(given)
        counted = given.get("count_embedding", False)
        return estimate.flops_per_token(shape, seq_len=given["seq_len"], count_embedding=counted)
    return 6 * given["params"] + 12 * given["layers"] * given["hidden"] * given["seq_len"]


def bandwidth(given: dict) -> float:
    """Algorithm bandwidth is bytes over seconds; an all-reduce sends 2 (n - 1) / n of it over each link."""
    if "seconds" in given:
        return given["bytes"] / given["seconds"] / GB
    return given["algbw_GBps"] * 2 * (given["ranks"] - 1) / given["ranks"]


def size(given: dict) -> float:
    """Bytes of what a source measured or printed."""
    if "stage" in given:
        return zero_bytes(given)
    if "mode" in given:
        how = {key: given[key] for key in ("group_size", "count_embedding") if key in given}
        shape = shape_of(given)
        return inference_weight_bytes(shape, weights=MODES[given["mode"]], tp=given.get("tensor_parallel", 1), **how)
    if "bytes_per_param" in given:
        return given["params"] * given["bytes_per_param"]
    if "attention" in given:
        return korthikanti_bytes(given)
    if "run" in given:
        return of_a_run(given)
    shape = shape_of(given)
    tokens = given.get("seq_len", 0) * given.get("batch", 1)
    if "weight file" in given.get("what", ""):
        return estimate.weight_bytes(parameter_count(shape), bytes_each=2)
    if "logits" in given.get("what", ""):
        return 4 * tokens * shape.vocab
    if "checkpointing" in given:
        copies = 1 if given["checkpointing"] == "full" else transformers_copies(shape)
        return copies * tokens * shape.hidden * 2 * given.get("layers", shape.layers)
    return estimate.kv_cache_bytes(shape, tokens=tokens)


def zero_bytes(given: dict) -> float:
    """The ZeRO paper: 2 + 2 + 12 bytes per parameter, what the stage names divided by all ranks. DeepSpeed's
    calculator: 18 bytes (fp32 gradients) at stage 3, and 4 bytes of the largest layer, which is gathered."""
    n, ranks, stage = given["params"], given["ranks"], given["stage"]
    offload = given.get("offload", "")
    if "bytes" in given:
        parts = [(2 * n, 3), (2 * n, 2), (12 * n, 1)]
        return sum(part / (ranks if stage >= since else 1) for part, since in parts)
    if stage < 3:
        return 2 * n if "optimizer" in offload else 4 * n + 16 * n / ranks
    held = 0 if "params" in offload else 2 if "optimizer" in offload else 18
    return 4 * given["largest_layer"] + held * n / ranks


def korthikanti_bytes(given: dict) -> float:
    """GPT in 16 bits with dropout (Korthikanti et al. 2022, arXiv:2205.05198, 4.1): 34 s b h per layer, 5 a s^2 b
    more where attention's matrix is written down, and the mask of the embedding's dropout, s b h."""
    s, b, h, a = given["seq_len"], given["batch"], given["hidden"], given["heads"]
    layer = 34 * s * b * h
    if given["attention"] == "flash":
        return layer * given["layers"]
    return (layer + 5 * a * s * s * b) * given["layers"] + s * b * h


def transformers_copies(shape: Shape) -> float:
    """Copies of a bf16 hidden state that one block of transformers' Llama holds on a GPU, keys and values repeated.

    Each of two norms: its input, the same in fp32 (2), the normalised one, and the weighted one. Attention: q, k, v and
    the output. Feed-forward: gate, silu, up and product. Saved-tensor hooks see 2 less: not the norms' bf16 inputs."""
    norms = 2 * (1 + 2 + 1 + 1)
    attention = 4 * shape.q_width / shape.hidden
    return norms + attention + 4 * shape.ffn / shape.hidden


def of_a_run(given: dict) -> float:
    """torchtitan's Llama-3 8B on 8 GPUs with sequences of 8,192: what one change of the program changed."""
    shape = read_shape("llama3-8b")
    if "cross-entropy" in given["what"]:
        return 2 * 4 * 8192 * shape.vocab
    return estimate.optimizer_bytes(parameter_count(shape), optimizer="adamw", master=0, shards=8)
