"""Run and time this repository on the GPUs of this machine, the most valuable commands first.

    one GPU   python benchmarks/gpu.py A        nine minutes: does it run, and how fast?
    one GPU   python benchmarks/gpu.py B        five minutes: 70B, training of 8B, open questions
    2, 4, 8   python benchmarks/gpu.py C        nine minutes: several GPUs against one
    any       python benchmarks/gpu.py tests    pytest -m "gpu and not slow"
    any       python benchmarks/gpu.py all      all that fit this machine: make gpu
    a trial   python benchmarks/gpu.py A --trial --only 124m

Nothing is installed. Each command is a process of its own with a limit of time. A command that
fails, or takes too long, does not end the part. What has no time left is named, exit code 75, and
the same command goes on with it. Results are written anew after each command, to $OUT or
benchmarks/results/: what SIGTERM leaves is what was found.

Seconds of a plan were measured on one H200, with eight commands at a time in the smoke commands; a
command that has run nowhere yet has a guess. Compiled kernels are shared by all commands and kept
in kernel-caches.tar.gz beside the results, for the next machine.

Look for: FAILED; MFU; the share of the bandwidth; ratios to one GPU, whose losses must be equal.
"""

import _gpu
from _gpu import ALL, Command, Part
from _measure import choose_device

from common import cli, exits

NANO = "--model nano --dtype bf16 --device cuda"
EXPERTS = "--model nano-moe --dtype bf16 --device cuda --keep 0 --no-compile --steps 20"
LARGE = "--dtype bf16 --device cuda --compile --keep 0 --log-every 10"
LLAMA_124M = f"--model llama-124m --seq-len 1024 --global-batch-size 64 {LARGE}"
LLAMA_1B = f"--model llama-1b --seq-len 4096 --global-batch-size 4 {LARGE}"
LLAMA_8B = "--model llama-8b --seq-len 4096 --global-batch-size 1 --micro-batch-size 1"
DECODE = "--device cuda --compile --max-new-tokens"
PLAIN = "04_amp/train.py"
DDP = "05_ddp/train.py"
FSDP = "06_fsdp_zero/train_fsdp.py"
MESH = "08_model_parallel/train_3d.py"
INFER = "09_inference/infer_70b.py"
QUANTIZED = "09_inference/quantized.py"
LLAMA_70B = f"{QUANTIZED} --model llama-70b --weights"
AB = "benchmarks/ab.py --device cuda --case"

# Several at a time: most of each is importing and compiling, which cores do. The `warm` commands
# compile what is timed alone later.
SMOKE = [
    Command("warm 124m", f"{PLAIN} {LLAMA_124M} --steps 2", 54),
    Command("warm 1b", f"{PLAIN} {LLAMA_1B} --steps 2", 75),
    Command("warm fsdp 1b", f"{FSDP} {LLAMA_1B} --steps 2", 75),
    Command("warm 8b", f"{INFER} --model llama-8b --dtype bf16 {DECODE} 200", 33),
    Command("smoke quantized", f"{QUANTIZED} {NANO.replace(' --dtype bf16', '')}", 97),
    Command("smoke infer", f"{INFER} {NANO}", 17),
    Command("smoke infer compiled", f"{INFER} {NANO} --compile", 41),
    Command("smoke 06 offloaded", f"{FSDP} {NANO} --steps 20 --cpu-offload", 73),
    Command("smoke 04", f"{PLAIN} {NANO} --steps 20", 15),
    Command("smoke 04 compiled", f"{PLAIN} {NANO} --steps 20 --compile", 40),
    Command("smoke 05", f"{DDP} {NANO} --steps 20", 15),
    Command("smoke 05 compiled", f"{DDP} {NANO} --steps 20 --compile", 47),
    Command("smoke 06", f"{FSDP} {NANO} --steps 20", 16),
    Command("smoke 06 compiled", f"{FSDP} {NANO} --steps 20 --compile", 37),
    Command(
        "smoke 06 selective",
        f"{FSDP} {NANO} --steps 20 --compile --checkpointing selective",
        39,
    ),
    Command("smoke 08", f"{MESH} {NANO} --steps 20", 15),
    Command("smoke 08 compiled", f"{MESH} {NANO} --steps 20 --compile", 27),
    Command("smoke kv cache", "09_inference/kv_cache.py --device cuda", 60),
]
ALONE = [
    Command("124m", f"{PLAIN} {LLAMA_124M} --steps 60", 23),
    Command("1b", f"{PLAIN} {LLAMA_1B} --steps 40", 42),
    Command("fsdp 1b", f"{FSDP} {LLAMA_1B} --steps 40", 52, against="1b"),
    Command("decode 8b", f"{INFER} --model llama-8b --dtype bf16 {DECODE} 200", 18),
    Command("devices", "01_devices/benchmark.py --device cuda", 60),
    Command("124m again", f"{PLAIN} {LLAMA_124M} --steps 60", 23),
    Command("1b again", f"{PLAIN} {LLAMA_1B} --steps 40", 42),
    Command("fsdp 1b again", f"{FSDP} {LLAMA_1B} --steps 40", 52, against="1b again"),
    Command("decode 8b again", f"{INFER} --model llama-8b --dtype bf16 {DECODE} 200", 18),
]
LARGEST = [
    Command("70b int4", f"{LLAMA_70B} int4 --kernel triton {DECODE} 200", 56),
    Command("70b int8", f"{LLAMA_70B} int8 --kernel triton {DECODE} 200", 60, memory_gib=75),
    Command("70b bf16", f"{INFER} --model llama-70b --dtype bf16 {DECODE} 100", 35, memory_gib=136),
    Command(
        "train 8b",
        f"{PLAIN} {LLAMA_8B} --checkpointing full --dtype bf16 --device cuda --keep 0 --steps 8 "
        "--log-every 2",
        50,
        memory_gib=123,
    ),
]
# The quick ones first. A second run of the part goes on with those that had no time.
QUESTIONS = [
    Command("ab attention 124m", f"{AB} attention --model llama-124m", 15),
    Command("ab attention 1b", f"{AB} attention --model llama-1b", 15),
    Command("ab moments 1b", f"{AB} moments --model llama-1b", 35),
    Command("70b int8 by torch", f"{LLAMA_70B} int8 {DECODE} 200", 60, memory_gib=75),
    Command("70b int4 by torch", f"{LLAMA_70B} int4 {DECODE} 200", 56),
    Command("ab projections 1b", f"{AB} projections --model llama-1b", 85),
    Command("ab int4, int8 70b", f"{AB} int4 --model llama-70b", 150),
    Command("grpo", "10_post_training/grpo.py", 60),
    Command("experts nano", f"{PLAIN} {EXPERTS}", 40),
    Command("ab micro-batch 124m", f"{AB} micro_batch --model llama-124m", 90),
    Command("ab loss 124m", f"{AB} loss --model llama-124m", 95),
    Command("ab loss 1b", f"{AB} loss --model llama-1b", 120),
]
ON_MESH = f"{MESH} --model llama-1b --seq-len 4096 --global-batch-size 8 --dtype bf16"
ON_MESH += " --device cuda --keep 0 --log-every 5 --steps 20 --no-compile"
# A pipeline needs a head that is not tied to the embedding.
UNTIED = ON_MESH.replace("llama-1b", "nano").replace("4096", "64") + " --micro-batch-size 1"
ON_EXPERTS = ON_MESH.replace("llama-1b", "nano-moe").replace("4096", "64") + " --micro-batch-size 1"
SEVERAL = [
    Command("collectives", "05_ddp/collectives.py --device cuda", 60, ALL),
    Command("one gpu 124m", f"{DDP} {LLAMA_124M} --steps 40", 45, 1),
    Command("ddp 124m", f"{DDP} {LLAMA_124M} --steps 40", 45, ALL, against="one gpu 124m"),
    Command("fsdp 124m", f"{FSDP} {LLAMA_124M} --steps 40", 50, ALL, against="one gpu 124m"),
    Command("one gpu mesh 1b", ON_MESH, 50, 1),
    Command("tensor 1b", f"{ON_MESH} --tp 2", 40, ALL, against="one gpu mesh 1b"),
    Command("context 1b", f"{ON_MESH} --cp 2", 40, ALL, against="one gpu mesh 1b"),
    Command("shards 1b", ON_MESH, 40, ALL, against="one gpu mesh 1b"),
    Command("one gpu untied", UNTIED, 25, 1),
    Command("stages", f"{UNTIED} --pp 2", 25, ALL, against="one gpu untied"),
    Command("one gpu experts", ON_EXPERTS, 25, 1),
    Command("experts", f"{ON_EXPERTS} --ep 2", 25, ALL, against="one gpu experts"),
    Command(
        "tests for two",
        "-m pytest -m gpu(n=2) -v -ra --durations=0 --durations-min=1 "
        "--continue-on-collection-errors tests",
        180,
    ),
]
TESTS = [
    Command(
        "tests",
        "-m pytest -m gpu\\ and\\ not\\ slow -v -ra --durations=0 --durations-min=1 "
        "--continue-on-collection-errors tests",
        400,
    ),
]
PARTS = {
    "A": Part(540, together=SMOKE, alone=ALONE),
    "B": Part(300, alone=LARGEST + QUESTIONS),
    "C": Part(540, alone=SEVERAL, least_gpus=2),
    "tests": Part(540, alone=TESTS),
}


def choose_parts(name: str, gpus: int) -> list[str]:
    """Return the parts to run. Raise UserError if this machine has too few GPUs for one."""
    if name == "all":
        return [other for other, part in PARTS.items() if part.least_gpus <= gpus]
    if PARTS[name].least_gpus > gpus:
        raise exits.UserError(f"part {name} needs {PARTS[name].least_gpus} GPUs, {gpus} here")
    return [name]


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("part", choices=("all", *PARTS), nargs="?", default="all")
    add("--seconds", type=cli.positive, help="all of it ends within this time (default: the plan)")
    add("--only", metavar="WORDS", help="only commands with these words in their name")
    add("--trial", action="store_true", help="every command at the size of nano, not compiled")
    add("--at-once", type=cli.positive_int, default=8, help="smoke commands at a time")
    args = parser.parse_args()
    choose_device("cuda")
    machine = _gpu.Machine(args.at_once)
    codes = []
    for name in choose_parts(args.part, machine.gpus):
        part = PARTS[name]
        if args.only:
            part = part.select(args.only)
        if args.trial:
            part = part.small()
        codes.append(_gpu.run_part(name, part, machine, args.seconds or part.seconds))
    # 1 is worse than 75, which asks for another run
    return min((code for code in codes if code), default=0)


if __name__ == "__main__":
    exits.run(main)
