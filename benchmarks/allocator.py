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

from _measure import REPO, RESULTS, Failed, about, facts, write_results

from common import cli, exits
from common.report import table
from lm import shapes
from planner import inference
from planner.memory import peak
from planner.plan import Plan
from planner.shape import Shape, from_config

GIB = 2**30
# script, model (a size, with /L that of L layers, with /L/V also of V tokens, or a folder), its Plan without defaults
CASES = """
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4 checkpointing selective
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4 checkpointing full
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 2 checkpointing full
04_amp/train.py llama-1b seq_len 2048 checkpointing full
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4 checkpointing full framework ours-compiled loss fused
04_amp/train.py llama-8b/2 seq_len 4096
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 16
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 4 micro_batches 4
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 16 framework ours-compiled loss fused
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 16 checkpointing full framework ours-compiled loss fused
05_ddp/train.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 framework ours-compiled loss fused
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 gpus 2
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 gpus 2 checkpointing full
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 gpus 4
06_fsdp_zero/train_fsdp.py llama-1b/16/16384 seq_len 2048 micro_batch_size 4 zero 3 checkpointing selective
06_fsdp_zero/train_fsdp.py llama-1b/4/65536 seq_len 512 zero 3 checkpointing full
06_fsdp_zero/train_zero.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2 zero 1  # 4 bytes a parameter: fp32 copies
06_fsdp_zero/train_zero.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2 zero 3  # not explained
06_fsdp_zero/finetune.py smollm2-135m seq_len 946 micro_batch_size 16 zero 3 adapters 16 checkpointing full
06_fsdp_zero/finetune.py smollm2-135m seq_len 946 micro_batch_size 16 zero 3 adapters 16 gpus 2 checkpointing selective
08_model_parallel/train_3d.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2 tp 2
08_model_parallel/train_3d.py llama-1b/4/16384 seq_len 2048 micro_batch_size 4 gpus 2 tp 2 checkpointing selective
09_inference/infer_70b.py llama-8b seq_len 1000 micro_batch_size 16
09_inference/infer_70b.py llama-8b seq_len 1000 micro_batch_size 4 gpus 2
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 2 micro_batches 2  # aside
04_amp/train.py llama-8b/4 seq_len 4096 checkpointing selective  # aside
04_amp/train.py llama-8b/4 seq_len 4096 micro_batch_size 2 checkpointing full  # aside
"""
CHATS = [
    {"prompt": f"question {i}", "completion": "because of this and of that. " * 130}
    for i in range(10, 70)
]
PROMPT = "x" * 936
TRAINING = "--steps 4 --log-every 1 --run-dir run --seq-len {seq_len} --micro-batch-size {micro_batch_size}"
TRAINING += " --checkpointing {checkpointing} --global-batch-size {global_batch_size}"
OWN_FLAGS = {"train_3d.py": "--tp {tp}", "train_zero.py": "--stage {zero}"}
OWN_FLAGS |= {"finetune.py": "--data chats.jsonl --adapters {adapters}"}
SHIM = """
import runpy, sys, torch
sys.path[:0] = [{repo!r}, sys.argv[1].rpartition("/")[0]]
from common import report
from lm import checkpoint, weights
weights.init_weights = lambda *_, **__: None
weights.digest = lambda *_: ""
checkpoint.Run.save = lambda *_: None
write = report.write_json
report.write_json = lambda found, path: write(found | {{"reserved": torch.cuda.max_memory_reserved()}}, path)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def read_case(name: str) -> tuple[Path, shapes.Config, Shape, Plan]:
    script, model, *settings = name.split()
    size, *cut = model.split("/")
    config = shapes.read_config(size if size in shapes.SIZES else str(REPO / "models" / size))
    config = replace(
        config, **dict(zip(("num_hidden_layers", "vocab_size"), map(int, cut), strict=False))
    )
    values = (int(text) if text.isdigit() else text for text in settings[1::2])
    plan = Plan(**dict(zip(settings[::2], values, strict=True)))
    if plan.tp > 1:
        plan = replace(plan, zero=3, loss="parallel")
    return REPO / script, config, from_config(model, config), plan


def count(name: str, folder: Path) -> tuple[int, int]:
    """Bytes allocated and reserved at the peak of a step, or of an answer."""
    script, config, shape, plan = read_case(name)
    (folder / "config.json").write_text(json.dumps(shapes.config_json(config)))
    (folder / "shim.py").write_text(SHIM.format(repo=str(REPO)))
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    (folder / "prompts").write_text(f"{PROMPT}\n" * plan.micro_batch_size)
    # one with a tokenizer, by make model
    model = REPO / "models" / shape.name if plan.adapters else "config.json"
    flags = f"--model {model} --dtype bf16 --device cuda --json s.json "
    if script.name == "infer_70b.py":
        flags += f"--prompts prompts --max-new-tokens {plan.seq_len - len(PROMPT)}"
    else:
        batch = plan.dp * plan.micro_batch_size * plan.micro_batches
        own = f"{TRAINING} {OWN_FLAGS.get(script.name, '')}" + " --compile" * (
            plan.framework == "ours-compiled"
        )
        flags += own.format(**asdict(plan), global_batch_size=batch)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan.gpus}"]
    command = [
        "bash",
        REPO / "tests/nogpu/run.sh",
        "noop",
        *launcher,
        "shim.py",
        script,
        *flags.split(),
    ]
    env = os.environ | {"NOGPU_DEVICES": str(plan.gpus), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    log, summary = folder / "run/metrics.jsonl", folder / "s.json"
    if log.exists():  # before evaluation; and a check of numbers may have failed at the end
        step = [json.loads(line) for line in log.read_text().splitlines()][3]
        return step["memory_active_bytes"], step["memory_reserved_bytes"]
    if not summary.exists():
        raise Failed(f"{name}: {done.stderr[-3000:]}")
    found = json.loads(summary.read_text())
    return found["peak_memory_bytes"], found["reserved"]


def predict(name: str) -> tuple[float, float | None]:
    """The same by planner/; of a step alone, without the evaluation, which is not compiled."""
    script, _, shape, plan = read_case(name)
    if script.name == "infer_70b.py":
        prompts = plan.micro_batch_size
        found = inference.weight_bytes(
            shape, head_divided=True, count_embedding=False, tp=plan.gpus
        )
        found += 2 * shape.embedding / plan.gpus  # the embedding, which is divided, too
        found += inference.kv_cache_bytes(shape, tokens=prompts * plan.seq_len, tp=plan.gpus)
        widths = 3 * shape.hidden + 3 * shape.ffn / plan.gpus  # 07_memory_tricks/estimate.py
        return found + 2 * widths * prompts * len(PROMPT), None
    memory = peak(shape, plan)
    step = max(size for moment, size in memory.moments.items() if moment != "evaluation")
    return step, step + memory.fragmentation_bytes()


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--only", metavar="WORD", help="the cases whose names have it")
    only = parser.parse_args().only
    file = RESULTS / f"allocator-{date.today().isoformat()}.json"
    counts = json.loads(file.read_text())["counts"] if file.exists() else {}
    rows = [
        ["case", "allocated, GiB", "predicted", "error", "reserved", "estimate", "error", "why"]
    ]
    facts_ = about("benchmarks/allocator.py", "cpu") | {
        "torch": "2.11.0+cu130 on stub libraries",
        "n": "1: exact",
    }
    for line in CASES.strip().splitlines():
        name, _, why = line.partition("  # ")
        if only in name if only else name not in counts:
            with tempfile.TemporaryDirectory(prefix="allocator-") as folder:
                counts[name] = count(name, Path(folder))
        if name not in counts:
            continue
        row = [name]
        for counted, predicted in zip(counts[name], predict(name), strict=True):
            row.append(f"{counted / GIB:.2f}")
            row += (
                [f"{predicted / GIB:.2f}", f"{predicted / counted - 1:+.1%}"]
                if predicted
                else ["n/a", "n/a"]
            )
        rows.append([*row, why])
        print(*rows[-1], flush=True)
        title = "# Bytes: planner/ beside torch's own allocator, on GPUs that are not there"
        text = f"{title}\n\n{table(rows)}\n\n{facts(facts_)}"
        write_results("allocator", "", {"about": facts_, "counts": counts}, text)
    return 0


if __name__ == "__main__":
    exits.run(main)
