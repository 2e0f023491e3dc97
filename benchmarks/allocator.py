"""Count what torch's own caching allocator has in a step, beside what planner/ predicts.

The GPUs are not there: each case is a script as its user starts it, in bf16, on the stubs of
tests/nogpu. Kernels do nothing, the allocator is the real one. Counts are exact, so n = 1. Weights
are not drawn and nothing is saved: memory that nothing writes to takes no RAM.

    bash tests/nogpu/setup.sh                       once
    python benchmarks/allocator.py                  half an hour; rows that are there already stay
    python benchmarks/allocator.py --only compile   again those whose names have this word

Look for: what is allocated in a step, within 3 % or explained; what is reserved, which a card must
have: with less the run fails. "run" is the peak of the whole run, evaluation included.
"""

import json
import os
import subprocess
import tempfile
from dataclasses import replace
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
# A script; a model, which is a size, with /L that of L layers, with /L/V also of V tokens, or a
# folder in models/; fields of its Plan other than the defaults; # why the prediction is off.
CASES = """
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4 checkpointing selective
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4 checkpointing full
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4 loss chunked
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 2 checkpointing full
04_amp/train.py llama-1b seq_len 2048 checkpointing full
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 2 micro_batches 2
04_amp/train.py llama-8b/2 seq_len 4096
04_amp/train.py llama-8b/4 seq_len 4096 checkpointing selective
04_amp/train.py llama-8b/4 seq_len 4096 micro_batch_size 2 checkpointing full
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 16
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 4 micro_batches 4
04_amp/train.py llama-1b seq_len 2048 micro_batch_size 4 checkpointing full compile yes
04_amp/train.py llama-1b seq_len 4096 micro_batch_size 4 compile yes
04_amp/train.py llama-8b/2 seq_len 4096 checkpointing full compile yes
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 64 compile yes
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 16 compile yes
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 16 micro_batches 3 compile yes
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 16 checkpointing selective compile yes
04_amp/train.py llama-124m seq_len 1024 micro_batch_size 16 checkpointing full compile yes
05_ddp/train.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2
05_ddp/train.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2 compile yes
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 gpus 2
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 gpus 2 \
    checkpointing full
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 gpus 4
06_fsdp_zero/train_fsdp.py llama-1b/16/16384 seq_len 2048 micro_batch_size 4 zero 3 \
    checkpointing selective
06_fsdp_zero/train_fsdp.py llama-1b/4/65536 seq_len 512 zero 3 checkpointing full
06_fsdp_zero/train_fsdp.py llama-1b seq_len 4096 micro_batch_size 4 zero 3 compile yes
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 compile yes
06_fsdp_zero/train_fsdp.py llama-124m seq_len 1024 micro_batch_size 16 zero 3 gpus 2 \
    micro_batches 2 compile yes
06_fsdp_zero/train_fsdp.py llama-1b/2 seq_len 4096 micro_batch_size 4 zero 3
06_fsdp_zero/train_fsdp.py llama-1b/2 seq_len 4096 micro_batch_size 4 zero 3 loss chunked
06_fsdp_zero/train_fsdp.py llama-8b/2 seq_len 4096 micro_batch_size 2 zero 3
06_fsdp_zero/train_fsdp.py llama-8b/2 seq_len 4096 micro_batch_size 2 zero 3 loss chunked
06_fsdp_zero/train_zero.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2 zero 1
06_fsdp_zero/train_zero.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2 zero 2
06_fsdp_zero/train_zero.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2 zero 3 deepspeed yes
06_fsdp_zero/finetune.py smollm2-135m seq_len 946 micro_batch_size 16 zero 3 adapters 16 \
    checkpointing full
06_fsdp_zero/finetune.py smollm2-135m seq_len 946 micro_batch_size 16 zero 3 adapters 16 gpus 2 \
    checkpointing selective
08_model_parallel/train_3d.py llama-124m seq_len 1024 micro_batch_size 16 gpus 2 tp 2
08_model_parallel/train_3d.py llama-1b/4/16384 seq_len 2048 micro_batch_size 4 gpus 2 tp 2 \
    checkpointing selective
09_inference/infer_70b.py llama-8b seq_len 1000 micro_batch_size 16
09_inference/infer_70b.py llama-8b seq_len 1000 micro_batch_size 4 gpus 2  # not explained
"""
CHATS = [
    {"prompt": f"question {i}", "completion": "because of this and of that. " * 130}
    for i in range(10, 70)
]
PROMPT = "x" * 936
OWN_FLAGS = {
    "train_3d.py": "--tp {plan.tp}",
    "train_zero.py": "--stage {plan.zero}",
    "finetune.py": "--data chats.jsonl --adapters {plan.adapters}",
}
# No weights, no files, and no check that a loss is finite: kernels compute nothing.
SHIM = """
import math, runpy, sys, torch, types
sys.path[:0] = [{repo!r}, sys.argv[1].rpartition("/")[0]]
from common import report
from lm import weights
from training import checkpoint, digest, meter
meter.math = types.SimpleNamespace(**vars(math) | {{"isfinite": lambda value: True}})
weights.init_weights = lambda *_, **__: None
digest.digest = lambda *_: ""
checkpoint.Run.save = lambda *_: None
write = report.write_json
def write_with_reserved(summary, path):
    write(summary | {{"reserved": torch.cuda.max_memory_reserved()}}, path)
report.write_json = write_with_reserved
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def read_case(name: str) -> tuple[Path, shapes.Config, Shape, Plan]:
    """Return the script, config, shape and plan of a case."""
    script, model, *settings = name.split()
    size, *smaller = model.split("/")
    config = shapes.read_config(size if size in shapes.SIZES else str(REPO / "models" / size))
    if smaller:
        config = replace(config, num_hidden_layers=int(smaller[0]))
    if len(smaller) > 1:
        config = replace(config, vocab_size=int(smaller[1]))

    values = {}
    for field, text in zip(settings[::2], settings[1::2], strict=True):
        if text == "yes":
            values[field] = True
        else:
            values[field] = int(text) if text.isdigit() else text
    plan = Plan(**values)
    if plan.tp > 1:
        plan = replace(plan, zero=3)
    return REPO / script, config, from_config(model, config), plan


def script_flags(script: Path, plan: Plan) -> str:
    """Return the flags of a case, without model, device and --json."""
    if script.name == "infer_70b.py":
        return f"--prompts prompts --max-new-tokens {plan.seq_len - len(PROMPT)}"
    batch = plan.dp * plan.micro_batch_size * plan.micro_batches
    flags = "--steps 4 --log-every 1 --run-dir run"
    flags += f" --seq-len {plan.seq_len} --micro-batch-size {plan.micro_batch_size}"
    flags += f" --global-batch-size {batch} --checkpointing {plan.checkpointing} "
    flags += OWN_FLAGS.get(script.name, "").format(plan=plan)
    if plan.compile:
        flags += " --compile"
    if plan.loss:
        flags += f" --loss {plan.loss}"
    return flags


def count(name: str, folder: Path) -> dict:
    """Return the bytes allocated and reserved at the peak of a step, and of the whole run.

    With infer_70b.py the step is the answer to all prompts.
    """
    script, config, shape, plan = read_case(name)
    (folder / "config.json").write_text(json.dumps(shapes.config_json(config)), encoding="utf-8")
    (folder / "shim.py").write_text(SHIM.format(repo=str(REPO)), encoding="utf-8")
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)), encoding="utf-8")
    (folder / "prompts").write_text(f"{PROMPT}\n" * plan.micro_batch_size, encoding="utf-8")
    # With adapters a model with a tokenizer, by make model.
    model = REPO / "models" / shape.name if plan.adapters else "config.json"
    flags = f"--model {model} --dtype bf16 --device cuda --json s.json {script_flags(script, plan)}"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan.gpus}"]
    tool = ["bash", REPO / "tests/nogpu/run.sh", "noop"]
    command = [*tool, *launcher, "shim.py", script, *flags.split()]
    env = os.environ | {"NOGPU_DEVICES": str(plan.gpus), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)

    log = folder / "run/metrics.jsonl"
    summary = {}
    if (folder / "s.json").exists():  # a check of numbers may have failed at the end
        summary = json.loads((folder / "s.json").read_text(encoding="utf-8"))
    records = []
    if log.exists():
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    if len(records) > 3:
        step = records[3]  # before the evaluation
        return {
            "allocated": step["memory_active_bytes"],
            "reserved": step["memory_reserved_bytes"],
            "run": summary.get("peak_memory_bytes"),
        }
    if not summary:
        raise Failed(f"{name}: {done.stderr[-3000:]}", done.stderr)
    return {
        "allocated": summary["peak_memory_bytes"],
        "reserved": summary["reserved"],
        "run": summary["peak_memory_bytes"],
    }


def predict(name: str) -> dict:
    """Return the same by planner/, None where it says nothing."""
    script, _, shape, plan = read_case(name)
    if script.name == "infer_70b.py":
        prompts = plan.micro_batch_size
        size = inference.weight_bytes(shape, head_divided=True, count_embedding=False, tp=plan.gpus)
        size += 2 * shape.embedding / plan.gpus  # the ranks share the embedding, too
        size += inference.kv_cache_bytes(shape, tokens=prompts * plan.seq_len, tp=plan.gpus)
        prompt_tokens = prompts * len(PROMPT)
        size += inference.prefill_bytes(shape, tokens=prompt_tokens, bytes_each=2, tp=plan.gpus)
        return {"allocated": size, "reserved": None, "run": size}
    memory = peak(shape, plan)
    return {
        "allocated": memory.step_bytes(),
        "reserved": memory.step_bytes() + memory.fragmentation_bytes(),
        "run": memory.allocated_bytes(),
    }


def make_row(name: str, counted: dict, reason: str) -> list[str]:
    """Return the row of a case: for each count the prediction and its error."""
    row = [name]
    predicted = predict(name)
    for key in ("allocated", "run", "reserved"):
        if counted[key] is None or predicted[key] is None:
            row += ["n/a", "n/a", "n/a"]
            continue
        error = predicted[key] / counted[key] - 1
        row += [f"{counted[key] / GIB:.2f}", f"{predicted[key] / GIB:.2f}", f"{error:+.1%}"]
    return [*row, reason]


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--only", metavar="WORD", help="the cases whose names have it")
    only = parser.parse_args().only
    file = RESULTS / f"allocator-{date.today().isoformat()}.json"
    counts = json.loads(file.read_text(encoding="utf-8"))["counts"] if file.exists() else {}
    headings = ["case"]
    for count_name in ("allocated, GiB", "run", "reserved"):
        headings += [count_name, "predicted", "error"]
    rows = [[*headings, "why"]]
    facts_ = about("benchmarks/allocator.py", "cpu") | {
        "torch": "2.11.0+cu130 on stub libraries",
        "n": "1: exact",
    }
    for line in CASES.strip().splitlines():
        case, _, reason = line.partition("  # ")
        name = " ".join(case.split())  # long cases go on in a second line
        wanted = only in name if only else name not in counts
        if wanted:
            try:
                with tempfile.TemporaryDirectory(prefix="allocator-") as folder:
                    counts[name] = count(name, Path(folder))
            except Failed as error:
                print(error, flush=True)
        if name not in counts:
            continue
        rows.append(make_row(name, counts[name], reason))
        print(*rows[-1], flush=True)
        title = "# Bytes: planner/ beside torch's own allocator, on GPUs that are not there"
        text = f"{title}\n\n{table(rows)}\n\n{facts(facts_)}"
        write_results("allocator", "", {"about": facts_, "counts": counts}, text)
    return 0


if __name__ == "__main__":
    exits.run(main)
