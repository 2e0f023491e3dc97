"""Published figures: a row of tests/data/estimator_cases.csv to what planner/ says in its place."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from _measure import REPO
from _planner_rows import read_rows

sys.path.insert(0, str(REPO / "07_memory_tricks"))  # it reads names and config.json
from estimate import read_shape, shape_from_json

from planner import inference
from planner.memory import Memory
from planner.plan import Plan
from planner.shape import Shape

UNITS = {"GiB": 2**30, "GB": 10**9, "B": 1, "B/token": 1, "params": 1, "FLOP/token": 1, "%": 0.01}


@dataclass(frozen=True)
class Case:
    id: str
    inputs: dict
    expected: float
    tolerance: str  # a share of the expected value, or "abs:0.1" in its unit
    unit: str
    source: str

    def allows(self, answer: float) -> bool:
        kind, _, size = self.tolerance.rpartition(":")
        return abs(answer - self.expected) <= (float(size) + 1e-9 if kind else float(size) * abs(self.expected))


def read_cases(file: Path) -> list[Case]:
    more = [{"inputs": json.loads(row["inputs"]), "expected": float(row["expected"])} for row in read_rows(file)]
    return [Case(**(row | own)) for row, own in zip(read_rows(file), more, strict=True)]


def answer(case: Case) -> float | None:
    """Our figure in the unit of the case. None: planner/ has no formula for it, as for GPT-2, offloading, or speeds."""
    given = case.inputs
    name = given.get("model", "llama3-8b")
    if "stage" in given and "bytes" in given:  # the ZeRO paper counts parameters, without a shape
        rank = Memory(read_shape(name), Plan(gpus=given["ranks"], zero=given["stage"], framework="deepspeed"))
        rank.parameters = rank.all_parameters = given["params"]
        found = rank.weight_bytes() + rank.gradient_bytes() + rank.optimizer_bytes()
    elif name.startswith("gpt") or not given.keys() & {"model", "config", "run"}:
        found = None
    elif "config" in given:
        found = of_shape(shape_from_json("config", given["config"]), case)
    else:
        found = of_shape(read_shape(name.removesuffix("-active")), case)
    return None if found is None else found / UNITS[case.unit]


def of_shape(shape: Shape, case: Case) -> float | None:
    given, what = case.inputs, case.inputs.get("what", "")
    tokens = given.get("seq_len", 0) * given.get("batch", 1)
    if case.unit == "params":
        return shape.parameter_count(active=given.get("model", "").endswith("-active"))
    if case.unit in ("FLOP/token", "%"):
        flops = shape.flops_per_token(seq_len=given["seq_len"])
        flops += 6 * shape.embedding * (given.get("count_embedding", False) and not shape.tied)
        return flops if case.unit != "%" else given["tokens_per_s"] * flops / given["peak_flops"]
    if "mode" in given or "weight file" in what:
        how = {key: given[key] for key in ("group_size", "count_embedding") if key in given}
        return inference.weight_bytes(
            shape, weights=given.get("mode", "bf16"), tp=given.get("tensor_parallel", 1), **how
        )
    if "run" in given and "logit" not in what:  # what the first step adds: AdamW's state
        return Memory(shape, Plan(gpus=8, zero=3)).optimizer_bytes()
    if given.get("checkpointing") == "full":
        rank = Memory(shape, Plan(gpus=2, zero=3, checkpointing="full"))
        return rank.kept("full", experts=False) * tokens * given.get("layers", shape.layers)
    return None if what else inference.kv_cache_bytes(shape, tokens=tokens or 1)
