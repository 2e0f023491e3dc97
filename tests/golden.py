"""The numbers that the scripts give must not move: losses and gradient norms of a small run, greedy tokens of a model.

Whatever way a model is trained or answers, the numbers are the same. So each key of data/golden.json has one list that
many commands must give. The tokens come from transformers, which is asked when the file is written.

    python tests/golden.py                 everything, in some minutes
    python tests/golden.py --only tensor   the ways with that word in their name
    python tests/golden.py --write         write the file, where numbers were meant to move

It ends with 1 and the first difference. When scripts or flags get other names, WAYS is all that changes.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests/data/golden.json"
TEXT = shlex.quote(str(ROOT / "tests/data/text.txt"))
TOLERANCE = 1e-5  # relative; another kind of CPU moves these losses by 3e-7
# of the likeliest token's logit over the next: rounding moves them by less than 1e-5
CLEAR_LEAD = 0.03
PROMPTS = ["for i in range(3): print(i)", "x = 1"]  # of unequal lengths
NEW_TOKENS = 24
HIDDEN, MIDDLE, VOCABULARY, LAYERS, HEAD, HEADS, KEY_HEADS = 36, 52, 258, 3, 10, 4, 2
SHAPE = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 128,
}

TRAINED = ("losses", "gradient norms", "held-out losses")
ANSWERED = ("greedy tokens, prompt 1", "greedy tokens, prompt 2")
# Four of the ten norms are above --clip-norm. The first epoch ends in the tenth step.
TRAIN = f"--model ../model/config.json --data {TEXT} --seq-len 32 --global-batch-size 36 --lr 4e-3 --warmup-steps 5"
TRAIN += " --weight-decay 0.1 --clip-norm 1.42 --seed 1 --dtype fp32 --device cpu --log-every 1 --eval-every 5"
TRAIN += " --run-dir run --steps"
ANSWER = (
    f"--dtype fp32 --device cpu --max-new-tokens {NEW_TOKENS} --json summary.json --model ../model"
)
BOTH = f"{ANSWER} --prompts ../prompts.txt"
DRAFT = f"{ANSWER} --draft ../draft --prompt {shlex.quote(PROMPTS[0])}"  # for one prompt
DDP, FSDP = "05_ddp/train.py", "06_fsdp_zero/train_fsdp.py"
ZERO, MESH = "06_fsdp_zero/train_zero.py", "08_model_parallel/train_3d.py"
INFER, IN_FP32 = "09_inference/infer_70b.py", "09_inference/quantized.py --weights fp32"
OFFLOADED = "09_inference/offloaded.py"

# The way, whether make test goes it (make test-all goes all), the keys it gives, and commands: ranks under torchrun
# (0: without), script.
WAYS = [
    ("one device", True, TRAINED, f"0 04_amp/train.py {TRAIN} 10"),
    ("ddp, 1 rank", False, TRAINED, f"1 {DDP} {TRAIN} 10 --micro-batch-size 12"),
    ("ddp, 2 ranks", True, TRAINED, f"2 {DDP} {TRAIN} 10 --micro-batch-size 6"),
    (
        "ddp, 2 ranks, from step 5 on 1 rank",
        False,
        TRAINED,
        f"2 {DDP} {TRAIN} 5",
        f"0 {DDP} {TRAIN} 10 --resume",
    ),
    ("fsdp, 2 ranks", True, TRAINED, f"2 {FSDP} {TRAIN} 10 --micro-batch-size 9"),
    ("zero stage 0, 2 ranks", False, TRAINED, f"2 {ZERO} --stage 0 {TRAIN} 10"),
    ("zero stage 3, 2 ranks", True, TRAINED, f"2 {ZERO} --stage 3 {TRAIN} 10"),
    (
        "fsdp, 1 rank, from step 5 on 2 ranks",
        False,
        TRAINED,
        f"0 {FSDP} {TRAIN} 5",
        f"2 {FSDP} {TRAIN} 10 --resume",
    ),
    ("tensor parallel 2", True, TRAINED, f"2 {MESH} --tp 2 {TRAIN} 10"),
    ("pipeline parallel 2", False, TRAINED, f"2 {MESH} --pp 2 {TRAIN} 10 --micro-batch-size 9"),
    ("context parallel 2", False, TRAINED, f"2 {MESH} --cp 2 {TRAIN} 10"),
    ("answers of one device", True, ANSWERED, f"0 {INFER} {BOTH}"),
    ("answers by device map", False, ANSWERED, f"0 {OFFLOADED} --by device-map {BOTH}"),
    ("answers, weights streamed", False, ANSWERED, f"0 {OFFLOADED} {BOTH}"),
    ("answers by tensor parallel 2", True, ANSWERED, f"2 {INFER} {BOTH}"),
    ("answers by zero stage 3, 2 ranks", False, ANSWERED, f"2 {OFFLOADED} --by zero3 {BOTH}"),
    ("answers, not quantized", False, ANSWERED, f"0 {IN_FP32} {BOTH}"),
    ("answers, guessed by a draft", False, ANSWERED[:1], f"0 09_inference/speculative.py {DRAFT}"),
]


def write_folder(folder: Path, noise: float) -> None:
    """A Hugging Face folder with random weights, large enough for attention to decide the next token as well. No code
    of the repository draws them, and RandomState gives the same numbers in every version of numpy."""
    sizes = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        block = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KEY_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KEY_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (MIDDLE, HIDDEN),
            "mlp.up_proj": (MIDDLE, HIDDEN),
            "mlp.down_proj": (HIDDEN, MIDDLE),
        }
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in block.items()}
    weights = {}
    for name, size in sizes.items():
        random = np.random.RandomState(zlib.crc32(name.encode()))
        drawn = random.standard_normal(size) + noise * random.standard_normal(size)
        weights[f"{name}.weight"] = np.float32(0.2 * drawn if len(size) == 2 else 1 + 0.1 * drawn)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")


def write_inputs(folder: Path) -> None:
    """What all ways read, beside the folders that they run in."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    write_folder(folder / "model", noise=0)
    write_folder(folder / "draft", noise=0.1)  # it guesses some tokens right


def tokens_of_transformers(folder: Path, prompt: str) -> list[int]:
    """What transformers' own Llama goes on with, reading the whole text again for each token."""
    import torch
    from transformers import LlamaForCausalLM

    net = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(prompt.encode())
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            two = net(torch.tensor([ids])).logits[0, -1].topk(2)
        best, second = two.values.tolist()
        if best - second < CLEAR_LEAD:
            sys.exit(
                f"{prompt!r}: a lead of {best - second:.4f} may be a matter of rounding, take another prompt"
            )
        ids.append(two.indices[0].item())
    return ids[-NEW_TOKENS:]


def start(ranks: int, script: str, flags: list[str], folder: Path) -> None:
    """Run a script in `folder` as a shell does, under torchrun where it has ranks."""
    # no older tokens
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CORPUS_CACHE": str(folder / "corpus")}
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    argv = [sys.executable, *launcher, str(ROOT / script), *flags]
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        sys.exit(f"{done.stderr[-4000:]}\nexit code {done.returncode}: {shlex.join(argv)}")


def go(folder: Path, commands: list[str], start: Callable = start) -> list[list]:
    """Run the commands one after the other in `folder`, which is made; the lists that they leave behind."""
    folder.mkdir()
    for command in commands:
        ranks, script, *flags = shlex.split(command)
        start(int(ranks), script, flags, folder)
    if (folder / "summary.json").exists():
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["token_ids"]
    records = [
        json.loads(line)
        for line in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [
        [record[column] for record in records if column in record]
        for column in ("loss", "grad_norm", "val_loss")
    ]


def compare(way: str, key: str, wanted: list, got: list) -> None:
    """Ends the program at the first difference. No token is within the tolerance of another one."""
    for index, (want, found) in enumerate(zip_longest(wanted, got)):
        if None in (want, found) or not math.isclose(want, found, rel_tol=TOLERANCE):
            sys.exit(f"{way}: {key}[{index}]: wanted {want}, got {found}")


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="the ways that have them in their name"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the file, if all ways give the same numbers"
    )
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--write goes all ways: leave out --only")
    ways = [way for way in WAYS if args.only in way[0]]
    if not ways:
        parser.error(f"--only {args.only}: no such way")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        write_inputs(folder)
        if args.write:
            answers = [tokens_of_transformers(folder / "model", prompt) for prompt in PROMPTS]
            golden = dict(zip(ANSWERED, answers, strict=True))
        else:
            golden = json.loads(FILE.read_text(encoding="utf-8"))
        runs = [
            pool.submit(go, folder / str(i), commands)
            for i, (_, _, _, *commands) in enumerate(ways)
        ]
        try:
            for (way, _, keys, *_), run in zip(ways, runs, strict=True):
                for key, got in zip(keys, run.result(), strict=True):
                    if args.write:  # the first way says what the others must give
                        golden.setdefault(key, [float(f"{number:.8g}") for number in got])
                    compare(way, key, golden[key], got)
                print(f"same: {way}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    if args.write:
        lines = [f"  {json.dumps(key)}: {json.dumps(numbers)}" for key, numbers in golden.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(ways)} ways in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
