"""04_amp/train.py beside transformers' Trainer: tokens per second of the same training on the same machine.

Both train the same shape from random weights on the same tokens, batch and precision, with as many
threads, each in a process of its own; rounds alternate, so that a machine that slows down slows both.
The clock is wall time over whole steps, everything a step costs included (reading the batch, clipping,
logging every few steps), the first steps left out. The Trainer has the settings a user would give it.

    laptop    python benchmarks/vs_trainer.py
    one GPU   python benchmarks/vs_trainer.py --model llama-124m --seq-len 1024 --batch-size 32 --dtypes bf16 --compile

Look for: the ratio, taken round by round, and its spread. Results go to benchmarks/results/.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # common/, with nothing installed
from common import cli, data, exits, model, runtime
from common.hardware import cpu_model, device_name
from common.report import read_records, table

RESULTS = REPO / "benchmarks/results"
WARMUP_STEPS = 10  # left out of the timing: compilation, first allocations, clocks
LOG_EVERY = 10  # both sides log, and are timed, in windows of so many steps


# What the benchmarks in this folder share


def start(command: list[str], env: dict[str, str], timeout: float) -> str:
    """Run to the end; everything it printed. RuntimeError with its last words if it fails or takes too long."""
    process = subprocess.Popen(
        command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        raise RuntimeError(f"did not end within {timeout:.0f} s") from None
    except BaseException:
        end(process)
        raise
    if process.returncode:
        said = [line for line in output.splitlines() if line.strip()]
        wrong = [line for line in said if re.search(r"error|exception", line, re.IGNORECASE)]
        raise RuntimeError(f"exit code {process.returncode}: {(wrong or said or ['no output'])[-1].strip()[:300]}")
    return output


def end(process: subprocess.Popen) -> None:
    """End a process that is no longer wanted: asked first, because torchrun then takes its processes along."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def train(
    script: str, flags: list[str], env: dict[str, str], timeout: float, launcher: list[str] | None = None
) -> dict:
    """Run a training script of this repository: its --json summary, its `windows` and its `tokens_per_second`."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        summary = Path(folder, "summary.json")
        own = ["--run-dir", f"{folder}/run", "--json", str(summary), "--log-every", str(LOG_EVERY)]
        start([sys.executable, *(launcher or []), script, *flags, *own], env, timeout)
        records = [r for r in read_records(Path(folder, "run/metrics.jsonl")) if "loss" in r]
        return {**json.loads(summary.read_text()), **steady(records)}


def steady(records: list[dict]) -> dict:
    """Tokens/s of each logged window after the warm-up, and over all their wall time together."""
    windows, tokens, seconds = [], 0, 0.0
    for before, record in pairwise(records):
        if before["step"] >= WARMUP_STEPS:
            windows.append(record["tokens_per_second"])
            tokens += record["tokens"] - before["tokens"]
            seconds += (record["tokens"] - before["tokens"]) / record["tokens_per_second"]
    return {"windows": windows, "tokens_per_second": tokens / seconds if seconds else None}


def train_with_trainer(flags: list[str], env: dict[str, str], timeout: float) -> dict:
    """Run the worker below in a process of its own; what it measured, in the same terms as train()."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        result = Path(folder, "result.json")
        start([sys.executable, __file__, "--worker", str(result), *flags], env, timeout)
        return json.loads(result.read_text())


def spread(values: list[float]) -> dict:
    values = [value for value in values if value is not None]
    if not values:
        return {"n": 0, "median": None, "min": None, "max": None}
    return {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def versions(*packages: str) -> dict[str, str | None]:
    """Installed versions; None for what is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {**found, "torch": torch.__version__}


def cpu() -> dict:
    """The processor and how much of it this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu_model() or platform.machine(), "cores": cores}


def facts(pairs: dict) -> str:
    return "\n".join(f"- {name}: {'n/a' if value is None else value}" for name, value in pairs.items())


def number(value: float | None, form: str = ",.0f") -> str:
    return "n/a" if value is None else format(value, form)


def write_results(device: str, kind: str, result: dict, text: str) -> Path:
    """Write results/<device><kind>-<date>.json and .md beside it; returns the .md."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{slug}{kind}-{date.today().isoformat()}"
    file.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    file.with_suffix(".md").write_text(text.rstrip() + "\n")
    return file.with_suffix(".md")


# The other side: transformers' Trainer


class Windows(data.Sequences):
    """The same windows in the form that the Trainer wants; the model shifts the labels itself."""

    def __getitem__(self, i: int) -> dict:
        inputs, _ = super().__getitem__(i)
        return {"input_ids": inputs, "labels": inputs}


def worker(args: argparse.Namespace) -> int:
    """Train with the Trainer in this process and write what it did to args.worker."""
    try:
        import accelerate  # noqa: F401  (the Trainer's own import of it would fail later and say less)
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    except ImportError as error:
        raise runtime.UserError(f"the Trainer needs transformers and accelerate: {error}") from None

    torch.manual_seed(args.seed)
    corpus = data.load_corpus("stdlib", "bytes")
    shape = model.load_config(args.model, corpus.vocab_size, args.seq_len)
    same_names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    )
    config = LlamaConfig(**{name: getattr(shape, name) for name in same_names})
    config._attn_implementation = "sdpa"
    net = LlamaForCausalLM(config)
    device = runtime.pick_device(args.device)
    marks: list[tuple[int, float]] = []  # step, when it was over

    class Clock(TrainerCallback):
        def on_step_end(self, _args, state, control, **_) -> None:
            if state.global_step % LOG_EVERY == 0:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                marks.append((state.global_step, time.perf_counter()))

    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=2e-3,
            weight_decay=0.1,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            max_grad_norm=1.0,
            bf16=args.dtype == "bf16",
            torch_compile=args.compile,
            optim="adamw_torch_fused" if device.type == "cuda" else TrainingArguments.optim,
            use_cpu=device.type == "cpu",
            dataloader_num_workers=0,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=args.seed,
        )
        trainer = Trainer(net, settings, train_dataset=Windows(corpus.train, args.seq_len), callbacks=[Clock()])
        trainer.train()

    kept = {parameter.dtype for parameter in net.parameters()}
    assert kept == {torch.float32}, f"the Trainer's weights are {kept}: not the same training"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    timed = [mark for mark in marks if mark[0] >= WARMUP_STEPS]
    if len(timed) < 2:
        raise runtime.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")
    tokens = args.batch_size * args.seq_len
    speeds = [(b[0] - a[0]) * tokens / (b[1] - a[1]) for a, b in pairwise(timed)]
    (first, began), (last, ended) = timed[0], timed[-1]
    result = {
        "tokens_per_second": (last - first) * tokens / (ended - began),
        "windows": speeds,
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "optim": settings.optim.value,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
    args.worker.write_text(json.dumps(result) + "\n")
    return 0


# The comparison


def compare(args: argparse.Namespace, dtype: str, env: dict[str, str]) -> dict:
    """Alternate rounds of both in one precision; the first round of each is thrown away."""
    compiled = ["--compile"] if args.compile else []
    ours = [
        *("--model", args.model, "--seq-len", str(args.seq_len), "--global-batch-size", str(args.batch_size)),
        *("--steps", str(args.steps), "--dtype", dtype, "--device", args.device, *compiled),
    ]
    theirs = [
        *("--model", args.model, "--seq-len", str(args.seq_len), "--batch-size", str(args.batch_size)),
        *("--steps", str(args.steps), "--dtype", dtype, "--device", args.device, *compiled),
    ]
    rounds: dict[str, list[dict]] = {"ours": [], "trainer": []}
    for number_ in range(args.rounds + 1):
        for side in ("ours", "trainer"):
            if side == "ours":
                result = train("04_amp/train.py", ours, env, args.timeout)
            else:
                result = train_with_trainer(theirs, env, args.timeout)
            name = f"round {number_}" if number_ else "warm-up"
            print(f"{dtype} {name:<8} {side:<8} {result['tokens_per_second']:>12,.0f} tokens/s", flush=True)
            if number_:
                rounds[side].append(result)
    counts = {result["parameters"] for side in rounds.values() for result in side}
    assert len(counts) == 1, f"not the same model: {counts} parameters"
    speeds = {side: [r["tokens_per_second"] for r in results] for side, results in rounds.items()}
    return {
        "dtype": dtype,
        **{side: spread(values) for side, values in speeds.items()},
        # round by round: neighbours in time had the same machine
        "ratio": spread([ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]),
        "last_loss": {side: results[-1]["last_loss"] for side, results in rounds.items()},
        "trainer_optim": rounds["trainer"][-1]["optim"],
        "commands": {
            "ours": f"python 04_amp/train.py {' '.join(ours)} --log-every {LOG_EVERY}",
            "trainer": f"python benchmarks/vs_trainer.py --worker RESULT.json {' '.join(theirs)}",
        },
        "rounds": speeds,
    }


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="a size that 04_amp/train.py knows")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step")
    add("--steps", type=cli.positive_int, default=50, help=f"per run, the first {WARMUP_STEPS} not timed")
    add("--rounds", type=cli.positive_int, default=5, help="timed runs of each side, after one thrown away")
    add("--dtypes", default="fp32,bf16", help="precisions to compare, with commas between")
    add("--threads", type=cli.positive_int, default=cpu()["cores"], help="CPU threads of each side")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--compile", action="store_true", help="torch.compile on both sides")
    add("--timeout", type=cli.positive_int, default=900, help="seconds that one run may take")
    add("--worker", type=cli.writable_file, metavar="PATH", help="only run the Trainer, and write what it did here")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the --worker")
    add("--seed", type=cli.natural, default=0, help="of the --worker")
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    if args.steps < WARMUP_STEPS + LOG_EVERY:
        raise runtime.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")
    dtypes = args.dtypes.split(",")
    if wrong := [dtype for dtype in dtypes if dtype not in ("fp32", "bf16")]:
        raise runtime.UserError(f"--dtypes {wrong[0]}: fp32, bf16 or both")
    installed = versions("transformers", "accelerate", "numpy")
    if missing := [name for name in ("transformers", "accelerate") if installed[name] is None]:
        raise runtime.UserError(f"the comparison needs {' and '.join(missing)}: pip install {' '.join(missing)}")

    device = runtime.pick_device(args.device)
    args.device = device.type
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    if device.type == "cuda":  # the Trainer would spread itself over all GPUs it sees
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    name = cpu()["cpu"] if device.type == "cpu" else device_name(device)
    about = {"device": name, **cpu(), "threads": args.threads, **installed, "date": date.today().isoformat()}
    about["command"] = f"python benchmarks/vs_trainer.py {' '.join(sys.argv[1:])}".strip()
    about["shape"] = f"{args.model}, {args.batch_size} sequences of {args.seq_len} tokens, {args.steps} steps"
    print(facts(about), flush=True)

    try:
        comparisons = [compare(args, dtype, env) for dtype in dtypes]
    except RuntimeError as error:
        raise runtime.UserError(f"a run failed: {error}") from None
    rows = [["dtype", "tokens/s", "n", "median", "min", "max"]]
    for comparison in comparisons:
        for row, form in (("ours", ",.0f"), ("trainer", ",.0f"), ("ratio", ".3f")):
            s = comparison[row]
            cells = [number(s[key], form) for key in ("median", "min", "max")]
            rows.append([comparison["dtype"], row, str(s["n"]), *cells])
    text = table(rows)
    commands = "\n".join(c for comparison in comparisons for c in comparison["commands"].values())
    report = (
        f"# 04_amp/train.py beside transformers' Trainer\n\n{facts(about)}\n\n{text}\n\n"
        f"n runs of each side, alternating, after one of each that was thrown away. Wall time over the steps after "
        f"the first {WARMUP_STEPS}.\n\n```\n{commands}\n```\n"
    )
    file = write_results(name, "-vs-trainer", {**about, "comparisons": comparisons}, report)
    print(f"\n{text}\n\nwritten: {file.relative_to(REPO)} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
