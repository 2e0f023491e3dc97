"""Compare 06_fsdp_zero/finetune.py with TRL's SFTTrainer: the losses of ten steps, and their time.

    python benchmarks/peer_sft.py --rounds 5

Both train all weights of a small Llama with random weights, in fp32 on the CPU. A global batch is
the whole epoch of 40 chats, so that both see the same chats at each step, in any order. Packed
chats are in rows of at most 512 tokens; each row is a micro-batch. It needs trl and datasets.

What to look at: the largest difference of a loss, which must be below 1e-5, and the ratio of the
times. A time is the median of a run's steps. The sides take turns.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from _measure import REPO, spread, start
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import cli, exits
from common.report import print_table

STEPS = 10
CHATS = 40
PACKED_ROWS = 11  # of at most SEQ_LEN tokens: both pack the chats of write_chats into so many
SEQ_LEN = 512
LR = 1e-3
PACKAGES = ("trl", "datasets", "transformers")
SIDES = ("finetune.py", "SFTTrainer")
TOLERANCE = 1e-5
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chats(file: Path, count: int, seed: int) -> None:
    """Write chats of one to three questions, with answers of unequal lengths."""
    draw = random.Random(seed)
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            messages = []
            for _ in range(draw.randint(1, 3)):
                numbers = [draw.randint(0, 99) for _ in range(draw.randint(2, 12))]
                question = "sort " + " ".join(map(str, numbers))
                answer = " ".join(map(str, sorted(numbers)))
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            stream.write(json.dumps({"messages": messages}) + "\n")


def write_model(folder: Path) -> None:
    """Write a small Llama with random weights, whose tokens are bytes."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def run_finetune(folder: Path, packing: bool) -> list[float]:
    """Run finetune.py in this process, and return its losses."""
    rows = PACKED_ROWS if packing else CHATS
    flags = f"--model {folder}/model --data {folder}/chats.jsonl --eval-data {folder}/eval.jsonl "
    flags += f"--adapters 0 --dtype fp32 --device cpu --seq-len {SEQ_LEN} --steps {STEPS} "
    flags += f"--global-batch-size {rows} --micro-batch-size {1 if packing else CHATS} --lr {LR} "
    run_dir = Path(tempfile.mkdtemp(prefix="run", dir=folder))
    flags += f"--lr-schedule constant --warmup-steps 0 --keep 0 --log-every 1 --run-dir {run_dir}"
    sys.argv = ["finetune.py", *flags.split(), "--packing" if packing else "--no-packing"]
    sys.path.insert(0, str(REPO / "06_fsdp_zero"))
    import finetune

    assert finetune.main() == 0
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if "loss" in record]


def run_trl(folder: Path, packing: bool) -> list[float]:
    """Train with TRL's SFTTrainer, and return its losses."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        packing=packing,
        max_length=SEQ_LEN,
        per_device_train_batch_size=1 if packing else CHATS,
        gradient_accumulation_steps=PACKED_ROWS if packing else 1,
        assistant_only_loss=True,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    lines = (folder / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        settings,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    assert len(trainer.train_dataset) == (PACKED_ROWS if packing else CHATS)
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def run_side(side: str, folder: Path, packing: bool) -> None:
    """Run a side in this process, and write its losses and the seconds of its steps."""
    clock: list[tuple[float, float]] = []  # at the end of each optimizer step: of the wall, the CPU

    def note(*_) -> None:
        clock.append((time.perf_counter(), time.process_time()))

    register_optimizer_step_post_hook(note)
    losses = run_finetune(folder, packing) if side == SIDES[0] else run_trl(folder, packing)
    assert len(losses) == len(clock) == STEPS, (len(losses), len(clock))
    result: dict = {"losses": losses}
    for i, name in enumerate(("seconds", "cpu_seconds")):
        result[name] = statistics.median(after[i] - before[i] for before, after in pairwise(clock))
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def compare(folder: Path, packing: bool, rounds: int) -> list[list[str]]:
    """Run both sides in turns, print the losses, and return rows of a table."""
    runs: dict[str, list[dict]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
            if packing:
                command.append("--packing")
            start(command, 600, {"TOKENIZERS_PARALLELISM": "false"}, folder)
            runs[side].append(json.loads((folder / "result.json").read_text(encoding="utf-8")))
    kind = "packed" if packing else "unpacked"
    difference = 0.0
    for own, other in zip(*runs.values(), strict=True):
        for ours, theirs in zip(own["losses"], other["losses"], strict=True):
            difference = max(difference, abs(ours - theirs))
    losses = runs[SIDES[0]][0]["losses"]
    print(f"{kind}: loss {losses[0]:.6f} to {losses[-1]:.6f}, largest difference {difference:.1e}")
    assert difference < TOLERANCE, f"{kind}: the losses differ: {runs}"
    rows = []
    for key in ("seconds", "cpu_seconds"):
        own = [run[key] for run in runs[SIDES[0]]]
        other = [run[key] for run in runs[SIDES[1]]]
        speeds = [b / a for a, b in zip(own, other, strict=True)]  # tokens/s of ours over theirs
        values = {SIDES[0]: own, SIDES[1]: other, "ratio of tokens/s": speeds}
        for name, numbers in values.items():
            figures = spread(numbers)
            cells = [f"{figures[which]:.3f}" for which in ("median", "min", "max")]
            rows.append([kind, name, key, *cells, str(figures["n"])])
    return rows


def main() -> int:
    flags = cli.Parser(__doc__)
    flags.add_argument("--rounds", type=cli.positive_int, default=5, help="how often a side runs")
    flags.add_argument("--side", choices=SIDES, help="run this side alone, in --folder")
    flags.add_argument("--folder", type=Path)
    flags.add_argument("--packing", action="store_true", help="of --side")
    args = flags.parse_args()
    if args.side:
        run_side(args.side, args.folder, args.packing)
        return 0
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise exits.UserError(f"{missing[0]} is missing: pip install {' '.join(PACKAGES)}")
    rows = [["chats", "side", "of a step", "median", "lowest", "highest", "n"]]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        write_chats(folder / "chats.jsonl", CHATS, seed=0)
        write_chats(folder / "eval.jsonl", 4, seed=1)
        write_model(folder / "model")
        for packing in (False, True):
            rows += compare(folder, packing, args.rounds)
    print_table(rows)
    return 0


if __name__ == "__main__":
    exits.run(main)
