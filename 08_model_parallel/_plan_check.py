"""plan.py --check: what ranks hold in train_3d.py's dry run of the best layout, beside what was predicted."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import estimate
from _estimate_peak import MOMENTS
from _estimate_shapes import Shape
from _plan_layout import Layout, of_one_replica

TRAINER = Path(__file__).resolve().parents[1] / "08_model_parallel/train_3d.py"
LINES = {"weights": "weight_bytes", "gradients": "gradient_bytes", "optimizer state": "optimizer_bytes"}


def built(shape: Shape, layout: Layout) -> list[dict]:
    """What the first rank of each pipeline stage holds."""
    content = {
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions or layout.seq_len,
        "tie_word_embeddings": shape.tied,
    }
    flags = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "replicate", "checkpointing")}
    flags |= {"world-size": layout.gpus, "seq-len": layout.seq_len, "micro-batch-size": layout.micro_batch_size}
    flags["global-batch-size"] = layout.dp * layout.micro_batch_size * layout.micro_batches
    with TemporaryDirectory() as folder:
        model, answer = Path(folder, "model.json"), Path(folder, "answer.json")
        model.write_text(json.dumps(content))
        command = [sys.executable, TRAINER, "--dry-run", f"--model={model}", f"--json={answer}"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(answer.read_text())["stages"]


def compare(shape: Shape, layout: Layout) -> list[dict]:
    """A row per stage and line: bytes as built, and as predicted. The first and the last stage differ most."""
    rows = []
    found = built(shape, layout)
    for stage in sorted({0, layout.pp - 1}):
        # with the kernels of a CPU: those of fake tensors without a GPU
        lines = estimate.memory_of_stage(shape, replace(of_one_replica(layout), on_cpu=True), stage)
        predicted = {line: lines[name] for line, name in LINES.items()} | {"peak": max(lines[m] for m in MOMENTS)}
        for line, expected in predicted.items():
            held = found[stage][LINES.get(line, "peak_bytes")]
            rows.append({"stage": stage, "line": line, "built_bytes": held, "predicted_bytes": expected})
    return rows
