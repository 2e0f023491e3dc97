"""Published figures: a row of tests/data/estimator_cases.csv to what planner/ says in its place."""

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from _shared import REPO

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


def answer(case: Case) -> float | None:
    """Our figure in the unit of the case. None: planner/ has no formula for it (GPT-2, attention that writes its matrix
    down, offloading, arithmetic on published speeds)."""
    given = case.inputs
    name = given.get("model", "llama3-8b")
    if "stage" in given:
        found = zero_bytes(given) if "bytes" in given else None
    elif name.startswith("gpt") or not given.keys() & {"model", "config", "run"}:
        found = None
    elif "config" in given:
        found = of_shape(shape_from_json("config", given["config"]), case, active=False)
    else:
        found = of_shape(read_shape(name.removesuffix("-active")), case, active=name.endswith("-active"))
    return None if found is None else found / UNITS[case.unit]


def zero_bytes(given: dict) -> float:
    """The ZeRO paper counts parameters, without a shape."""
    rank = Memory(read_shape("llama3-8b"), Plan(gpus=given["ranks"], zero=given["stage"], framework="deepspeed"))
    rank.parameters = rank.all_parameters = given["params"]
    return rank.weight_bytes() + rank.gradient_bytes() + rank.optimizer_bytes()


def of_shape(shape: Shape, case: Case, *, active: bool) -> float | None:
    given, what = case.inputs, case.inputs.get("what", "")
    tokens = given.get("seq_len", 0) * given.get("batch", 1)
    if case.unit == "params":
        return shape.parameter_count(active=active)
    if case.unit in ("FLOP/token", "%"):
        flops = shape.flops_per_token(seq_len=given["seq_len"])
        if given.get("count_embedding") and not shape.tied:
            flops += 6 * shape.embedding
        return flops if case.unit != "%" else given["tokens_per_s"] * flops / given["peak_flops"]
    if case.unit == "B/token":
        return inference.kv_cache_bytes(shape, tokens=1)
    if "mode" in given:
        how = {key: given[key] for key in ("group_size", "count_embedding") if key in given}
        return inference.weight_bytes(shape, weights=given["mode"], tp=given.get("tensor_parallel", 1), **how)
    if "weight file" in what:
        return inference.weight_bytes(shape)
    if "run" in given and "logit" not in what:  # what the first step adds: AdamW's state
        return Memory(shape, Plan(gpus=8, zero=3)).optimizer_bytes()
    if given.get("checkpointing") == "full":
        rank = Memory(shape, Plan(gpus=2, zero=3, checkpointing="full"))
        return rank.kept("full", experts=False) * tokens * given.get("layers", shape.layers)
    return None if what else inference.kv_cache_bytes(shape, tokens=tokens)
