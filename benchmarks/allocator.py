"""What torch's own caching allocator counts beside what planner/ predicts, on GPUs that are not there.

Each case is a script as its user starts it, in bf16, on the stubs of tests/nogpu: kernels do nothing, the allocator is
the real one. Counts are exact, so n = 1. Weights are not drawn and nothing is saved: memory that nothing writes to
takes no RAM.

    bash tests/nogpu/setup.sh                       once
    python benchmarks/allocator.py                  20 minutes; rows that are there already stay
    python benchmarks/allocator.py --only compile   again those whose names have this word

Look for: what is allocated in a step, within 1 % or explained; what is reserved, which a card must have: with less the
run fails. Rows marked "aside" were first looked at after the last change of a formula.
"""

import json
import os
import subprocess
import tempfile
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

from _measure import REPO, RESULTS, Failed, about, facts, write_results

from common import cli, exits, shapes
from common.table import table
from planner import inference
from planner.memory import peak
from planner.plan import CHECKPOINTING, Plan
from planner.shape import from_config

GIB = 2**30
CHATS = [{"prompt": f"question {i}", "completion": "because of this and of that. " * 130} for i in range(10, 70)]
PROMPT = "x" * 936
SHIM = """
import runpy, sys, torch
sys.path[:0] = [{repo!r}, sys.argv[1].rpartition("/")[0]]
from common import checkpoint, model, report
model.Transformer.init_weights = lambda *_: None
model.digest = lambda *_: ""
checkpoint.Run.save = lambda *_: None
write = report.write_json
report.write_json = lambda found, path: write(found | {{"reserved": torch.cuda.max_memory_reserved()}}, path)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ONE, DDP, FSDP, ZERO = "04_amp/train.py", "05_ddp/train.py", "06_fsdp_zero/train_fsdp.py", "06_fsdp_zero/train_zero.py"
TUNE, MESH, DECODE = "06_fsdp_zero/finetune.py", "08_model_parallel/train_3d.py", "09_inference/infer_70b.py"
SMOLLM2 = str(REPO / "models/smollm2-135m")  # by make model
WHY = {  # a part of a row's name
    "train_zero llama-124m 16 x 1024 gpus 2 zero 3": "not explained",
    "train_zero": "4 bytes per parameter that a rank updates, by its size: DeepSpeed's fp32 copy",
}
OWN_FLAGS = {MESH: "--tp {tp}", ZERO: "--stage {zero}", TUNE: "--data chats.jsonl --adapters {adapters}"}
FLAGS = "--seq-len {seq_len} --checkpointing {checkpointing} --micro-batch-size {micro_batch_size}"


class Case(NamedTuple):
    script: str
    model: str  # a size; with /L that of L layers, with /L/V also of V tokens; or a folder
    plan: Plan
    flags: str = ""

    def name(self, aside: bool = False) -> str:
        p, script = self.plan, self.script.partition("/")[2].removesuffix(".py")
        batch = f"{p.micro_batch_size} x {p.seq_len}" + f" x {p.micro_batches}" * (p.micro_batches > 1)
        ways = [f"{name} {getattr(p, name)}" for name in ("gpus", "zero") if getattr(p, name) > 1 or name == "gpus"]
        model = self.model.removeprefix(f"{REPO}/models/")
        return " ".join([script, model, batch, *ways, p.checkpointing, self.flags, "(aside)" * aside]).strip()

    def config(self) -> shapes.Config:
        if self.model == SMOLLM2:
            return shapes.read_config(SMOLLM2)
        size, *cut = self.model.split("/")
        sizes = zip(("num_hidden_layers", "vocab_size"), map(int, cut), strict=False)
        return replace(shapes.SIZES[size], **dict(sizes))


def count(case: Case, folder: Path) -> tuple[int, int]:
    """Bytes allocated and reserved at the peak of a step, or of an answer."""
    plan, model = case.plan, case.model if case.model == SMOLLM2 else "config.json"
    (folder / "config.json").write_text(json.dumps(shapes.config_json(case.config())))
    (folder / "shim.py").write_text(SHIM.format(repo=str(REPO)))
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    (folder / "prompts").write_text(f"{PROMPT}\n" * plan.micro_batch_size)
    flags = f"--model {model} --dtype bf16 --device cuda --json s.json {case.flags}"
    if case.script == DECODE:
        flags += f" --prompts prompts --max-new-tokens {plan.seq_len - len(PROMPT)}"
    else:
        flags += f" --steps 4 --log-every 1 --run-dir run {FLAGS} {OWN_FLAGS.get(case.script, '')}".format(
            **asdict(plan)
        )
        flags += f" --global-batch-size {plan.dp * plan.micro_batch_size * plan.micro_batches}"
    alone = case.script == ONE or (case.script == DECODE and plan.gpus == 1)
    launcher = [] if alone else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan.gpus}"]
    command = ["bash", REPO / "tests/nogpu/run.sh", "noop", *launcher, "shim.py", REPO / case.script, *flags.split()]
    env = os.environ | {"NOGPU_DEVICES": str(plan.gpus), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    log, summary = folder / "run/metrics.jsonl", folder / "s.json"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    steps = [(r["memory_active_bytes"], r["memory_reserved_bytes"]) for r in records if "memory_active_bytes" in r]
    if len(steps) == 4:  # before evaluation; and a check of numbers may have failed at the end
        return steps[-1]
    if not summary.exists():
        raise Failed(f"{case.name()}: {done.stderr[-3000:]}")
    found = json.loads(summary.read_text())
    return found["peak_memory_bytes"], found["reserved"]


def predict(case: Case) -> tuple[float, float]:
    """The same by planner/; of a step alone, without the evaluation, which is not compiled."""
    shape, plan = from_config(case.model, case.config()), case.plan
    if case.script == DECODE:
        tp, prompts = {"tp": plan.gpus}, plan.micro_batch_size
        found = inference.weight_bytes(shape, head_divided=True, count_embedding=False, **tp)
        found += 2 * shape.embedding / plan.gpus  # the embedding, which is divided, too
        found += inference.kv_cache_bytes(shape, tokens=prompts * plan.seq_len, **tp)
        widths = 3 * shape.hidden + 3 * shape.ffn / plan.gpus  # 07_memory_tricks/estimate.py
        return found + 2 * widths * prompts * len(PROMPT), 0.0
    memory = peak(shape, plan)
    step = max(size for moment, size in memory.moments.items() if moment != "evaluation")
    return step, step + memory.fragmentation_bytes()


def cases() -> tuple[list[Case], list[Case]]:
    """Those that formulas were made on, and those that were set aside."""
    b, long = {"seq_len": 1024, "micro_batch_size": 16}, {"seq_len": 2048, "micro_batch_size": 4}
    compiled, cut = {"framework": "ours-compiled", "loss": "fused"}, {"tp": 2, "zero": 3, "loss": "parallel", "gpus": 2}
    made_on = [Case(ONE, "llama-1b", Plan(**long, checkpointing=how)) for how in CHECKPOINTING]
    made_on += [Case(ONE, "llama-124m", Plan(**b, checkpointing=how)) for how in CHECKPOINTING]
    made_on += [Case(ONE, "llama-124m", Plan(**b, **compiled, checkpointing=how), "--compile") for how in CHECKPOINTING]
    made_on += [Case(FSDP, "llama-124m", Plan(**b, zero=3, gpus=gpus)) for gpus in (1, 2, 4)]
    made_on += [Case(MESH, "llama-124m", Plan(**b, **cut, checkpointing=how)) for how in ("none", "full")]
    made_on += [Case(ZERO, "llama-124m", Plan(**b, gpus=2, zero=stage)) for stage in (1, 2, 3)]
    tune = {"seq_len": 946, "micro_batch_size": 16, "zero": 3, "adapters": 16}
    made_on += [Case(TUNE, SMOLLM2, Plan(**tune, checkpointing=how)) for how in ("none", "full")]
    made_on += [
        Case(ONE, "llama-124m", Plan(seq_len=1024, micro_batch_size=4, micro_batches=4)),
        Case(ONE, "llama-8b/2", Plan(seq_len=4096)),
        Case(ONE, "llama-1b", Plan(seq_len=2048, micro_batch_size=2, checkpointing="full")),
        Case(ONE, "llama-1b", Plan(seq_len=2048, checkpointing="full")),
        Case(DDP, "llama-1b/2/16384", Plan(**long, gpus=2, checkpointing="full")),
        Case(DDP, "llama-124m", Plan(**b, gpus=2)),
        Case(FSDP, "llama-1b/16/16384", Plan(**long, zero=3, checkpointing="selective")),
        Case(FSDP, "llama-1b/4/65536", Plan(seq_len=512, zero=3, checkpointing="full")),
        Case(MESH, "llama-1b/4/16384", Plan(**long, **cut, checkpointing="selective")),
        Case(FSDP, "llama-124m", Plan(**b, zero=3, gpus=2, checkpointing="full")),
        Case(FSDP, "llama-124m", Plan(**b, zero=3, framework="ours-compiled"), "--compile"),
        Case(ONE, "llama-1b", Plan(**long, **compiled, checkpointing="full"), "--compile"),
        Case(TUNE, SMOLLM2, Plan(**tune, gpus=2, checkpointing="selective")),
        Case(DECODE, "llama-8b", Plan(seq_len=1000, micro_batch_size=16)),
        Case(DECODE, "llama-8b", Plan(seq_len=1000, micro_batch_size=4, gpus=2)),
    ]
    aside = [
        Case(ONE, "llama-1b", Plan(seq_len=4096, micro_batch_size=2, checkpointing="full")),
        Case(ONE, "llama-1b", Plan(seq_len=2048, micro_batch_size=2, micro_batches=2)),
        Case(ONE, "llama-8b/4", Plan(seq_len=4096, checkpointing="selective")),
        Case(ONE, "llama-8b/4", Plan(seq_len=4096, micro_batch_size=2, checkpointing="full")),
    ]
    return made_on, aside


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--only", metavar="WORD", help="the cases whose names have it")
    only = parser.parse_args().only
    file = RESULTS / f"allocator-{date.today().isoformat()}.json"
    counts = json.loads(file.read_text())["counts"] if file.exists() else {}
    made_on, aside = cases()
    lines = [["case", "allocated, GiB", "predicted", "error", "reserved", "estimate", "error", "why"]]
    facts_ = about("benchmarks/allocator.py", "cpu") | {"torch": "2.11.0+cu130 on stub libraries", "n": "1: exact"}
    for case in [*made_on, *aside]:
        name = case.name(aside=case in aside)
        if only in name if only else name not in counts:
            with tempfile.TemporaryDirectory(prefix="allocator-") as folder:
                counts[name] = count(case, Path(folder))
        if name not in counts:
            continue
        line = [name]
        for counted, predicted in zip(counts[name], predict(case), strict=True):
            error = f"{predicted / counted - 1:+.1%}"
            line += [f"{counted / GIB:.2f}", *((f"{predicted / GIB:.2f}", error) if predicted else ("", ""))]
        lines.append([*line, next((why for part, why in WHY.items() if part in name), "")])
        print(*lines[-1], flush=True)
        title = "# Bytes: planner/ beside torch's own allocator, on GPUs that are not there"
        text = f"{title}\n\n{table(lines)}\n\n{facts(facts_)}"
        write_results("allocator", "", {"about": facts_, "counts": counts}, text)
    return 0


if __name__ == "__main__":
    exits.run(main)
