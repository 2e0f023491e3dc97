"""06_fsdp_zero/finetune.py: targets, equal losses on any ranks, peft and transformers on the same rows, resuming."""

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.checkpoints import saved, write_folder
from support.harness import ROOT, TINY, assert_refused, config_of, drop_after, run, train, with_prelude

from common import adapters, data, model
from common.model import warmup_cosine

SCRIPT = "06_fsdp_zero/finetune.py"
PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"
QWEN = {**TINY, "model_type": "qwen2", "tie_word_embeddings": True}
STEPS, WARMUP, BATCH, RANK, LR = 10, 4, 6, 4, 1e-3
FLAGS = ("--data", PAIRS, "--seq-len", 128, "--steps", STEPS, "--global-batch-size", BATCH, "--lr", LR)
FLAGS += ("--save-dtype", "fp32", "--micro-batch-size", 1, "--warmup-steps", WARMUP)
full = pytest.mark.full
# at the first step the last of three ranks reads rows without a target, and so does each micro-batch of them
NO_TARGET = """
from common import data
init = data.Batches.__init__
def without_targets(batches, *args, **how):
    init(batches, *args, **how)
    for i in batches.global_batch(0)[-2:]:
        batches.train.rows[i].counts[:] = False
data.Batches.__init__ = without_targets
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder without a tokenizer: its tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "model"
    write_folder(folder, config_of(QWEN), scale=4)
    return folder


@pytest.mark.parametrize("rank", [RANK, pytest.param(0, marks=full)])
def test_losses_are_equal_on_one_two_and_three_ranks_one_of_them_without_a_target(tmp_path, folder, rank):
    runs = {}
    for nproc in (1, 2, 3):
        script = with_prelude(SCRIPT, tmp_path / str(nproc), NO_TARGET)
        flags = (*FLAGS, "--model", folder, "--adapters", rank)
        runs[nproc] = train(str(script), tmp_path / str(nproc), *flags, nproc=nproc)
    for column in ("loss", "grad_norm", "val_loss"):
        for nproc in (2, 3):
            assert runs[nproc].column(column) == pytest.approx(runs[1].column(column), rel=1e-5), column
    held = [runs[nproc].summary["optimizer_bytes_per_rank"] for nproc in (1, 2)]
    assert held[1] == pytest.approx(held[0] / 2, rel=0.05)


def read_rows(args: Namespace) -> tuple:
    """The rows of --data as the script reads them, and the order of the global batches."""
    script, helper = load(SCRIPT), load("06_fsdp_zero/_finetune.py")
    corpus, _ = helper.load_chats(args, helper.read_chat_format(str(args.model)), script.chat_rows)
    batches = data.Batches(corpus, args, rank=0, world_size=1, sequences=lambda *of: helper.Rows(*of, trim=False))
    return batches.train, batches.held_out, batches.global_batch


def stack(rows, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*(rows[i] for i in chosen), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def into_peft(net, folder: Path, rank: int):
    """transformers' model with peft's adapters, which start from our A and B."""
    peft = pytest.importorskip("peft")
    theirs = peft.get_peft_model(net, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    ours = model.build(str(folder), load_config(folder), seed=0)
    adapters.adapt(ours, rank=rank, alpha=2 * rank)
    adapters.init_adapters(ours, seed=0)
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            named[f"base_model.model.{name}.default.weight"].data.copy_(parameter.data)
    return theirs


def load_config(folder: Path):
    return config_of(json.loads((folder / "config.json").read_text()))


def loss_of(net, inputs, targets) -> torch.Tensor:
    return F.cross_entropy(net(input_ids=inputs).logits.flatten(0, 1), targets.flatten())  # one mean over all


@pytest.mark.parametrize("rank", [RANK, 0])
def test_ten_steps_are_those_of_peft_and_transformers_and_both_load_what_is_left(tmp_path, folder, rank):
    from transformers import AutoModelForCausalLM

    result = train(SCRIPT, tmp_path, *FLAGS, "--model", folder, "--adapters", rank, nproc=2)
    train_rows, held_out, order = read_rows(Namespace(
        model=folder, data=PAIRS, seq_len=128, global_batch_size=BATCH, micro_batch_size=None, seed=0
    ))  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # its config has no padding token
    theirs = into_peft(theirs, folder, rank) if rank else theirs
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * warmup_cosine(step, WARMUP, STEPS)
        loss = loss_of(theirs, *stack(train_rows, order(step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert result.column("loss") == pytest.approx(losses, rel=1e-5)
    inputs, targets = stack(held_out, range(len(held_out)))
    with torch.no_grad():
        expected, before = theirs(inputs).logits, AutoModelForCausalLM.from_pretrained(folder)(inputs).logits
        assert result.summary["val_loss"] == pytest.approx(loss_of(theirs, inputs, targets).item(), rel=1e-5)
        assert error(AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")(inputs).logits, expected) <= 1e-5
        assert error(before, expected) > 1e-2
        if rank:
            import peft

            base = AutoModelForCausalLM.from_pretrained(folder)
            assert (
                error(peft.PeftModel.from_pretrained(base, tmp_path / "run/adapter")(inputs).logits, expected) <= 1e-5
            )
    assert result.summary["tokens_equal_transformers"]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_killed_and_resumed_on_other_ranks_it_ends_alike_and_saves_adapters_alone(tmp_path, folder):
    flags = (*FLAGS, "--model", folder, "--adapters", RANK, "--save-every", 4)
    whole = train(SCRIPT, tmp_path, *flags, nproc=2)
    drop_after(tmp_path, 4)
    names = saved(tmp_path, 4)["model"]
    assert len(names) == 2 * 14
    assert all("lora_" in name for name in names)
    resumed = train(SCRIPT, tmp_path, *flags, "--resume", nproc=3)
    assert resumed.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
    assert resumed.summary["val_loss"] == pytest.approx(whole.summary["val_loss"], rel=1e-5)
    drop_after(tmp_path, 4)
    other_rank = train(SCRIPT, tmp_path, *flags, "--adapters", 2, "--resume", code=2)
    assert_refused(other_rank, "--adapters")


CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}{% else %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# as Qwen3's: only the last answer keeps its thoughts
REWRITES = CHATML.replace("{% generation %}{{ m.content }}", "{% generation %}{{ m.content if loop.last else 'x' }}")
CHATS = [
    [{"role": "user", "content": "Why? "}, {"role": "assistant", "content": " Because.  \n"}],
    [
        {"role": "system", "content": "Be short."},
        *({"role": role, "content": f"{role} ä {i}"} for i in range(2) for role in ("user", "assistant")),
    ],
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Callable[[str], Path]:
    """A byte-level tokenizer with a chat template, and a model for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(template: str) -> Path:
        folder = tmp_path_factory.mktemp("tokenizers") / "model"
        write_folder(folder, config_of({**QWEN, "vocab_size": 300}), scale=4)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: i for i, letter in enumerate([*letters, "be", "he"])}
        core = Tokenizer(models.BPE(vocabulary, [("b", "e"), ("h", "e")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        names = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>", extra_special_tokens=names
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_ids_and_mask_are_those_of_transformers_with_markers(tokenizer_folder, template):
    from transformers import AutoTokenizer

    folder = tokenizer_folder(re.sub(r"{% (end)?generation %}", "", template))
    script, helper = load(SCRIPT), load("06_fsdp_zero/_finetune.py")
    theirs = AutoTokenizer.from_pretrained(folder)
    for messages in CHATS:
        found = theirs.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        assert 0 < sum(found["assistant_masks"]) < len(found["input_ids"])
        [(ids, counts)] = script.chat_rows(helper.read_chat_format(str(folder)), messages)
        assert (ids, counts) == (found["input_ids"], [mark == 1 for mark in found["assistant_masks"]])


def test_an_answer_that_the_template_rewrites_is_a_row_of_its_own(tokenizer_folder):
    helper = load("06_fsdp_zero/_finetune.py")
    chat = helper.read_chat_format(str(tokenizer_folder(re.sub(r"{% (end)?generation %}", "", REWRITES))))
    rows = load(SCRIPT).chat_rows(chat, CHATS[1])
    answers = [chat.decode([i for i, c in zip(*row, strict=True) if c]) for row in rows]
    assert answers == ["assistant ä 0<|im_end|>\n", "assistant ä 1<|im_end|>\n"]


PAIR = '{"prompt": "a", "completion": "b"}\n'
REFUSALS = {  # lines of --data, flags, what the message has to name
    "no file": (None, "", ("chats.jsonl",)),
    "not json": (8 * PAIR + "hello", "", ("line 9",)),
    "no chat": ('{"text": "a"}\n', "", ("line 1",)),
    "an answer that is no text": ('{"prompt": "a", "completion": 3}\n', "", ("line 1",)),
    "too few": (3 * PAIR, "", ("--data", "--global-batch-size")),
    "all too long": (8 * PAIR, "--seq-len 4", ("--seq-len 4",)),
    "random weights": (8 * PAIR, "--model nano --adapters 4", ("--adapters 4", "nano")),
    "fp16": (8 * PAIR, "--dtype fp16", ("--dtype fp16",)),
    "over the model's limit": ('{"prompt": "a", "completion": "%s"}\n' % ("b" * 200), "", ("--seq-len",)),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_in_one_line(tmp_path, folder, case):
    lines, flags, words = REFUSALS[case]
    if lines is not None:
        (tmp_path / "chats.jsonl").write_text(lines)
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--data", "chats.jsonl", "--model", folder, *flags.split())
    assert_refused(result, *words)


def test_a_template_that_asks_otherwise_than_it_writes_is_refused(tmp_path, tokenizer_folder):
    template = re.sub(r"{% (end)?generation %}", "", CHATML)
    folder = tokenizer_folder(template.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"))
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--model", folder, "--data", PAIRS)
    assert_refused(result, "line 1", "template")


@pytest.mark.real_model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("rank", "lr", "tolerance"), [(8, 1e-3, 1e-5), (0, 1e-4, 1e-3)])
def test_the_real_model_learns_as_with_peft_and_the_trainer(tmp_path, smollm2, rank, lr, tolerance):
    """Full training differs by one row: transformers gives the embedding of pad_token_id, here <|im_end|>, the end of
    each turn, no gradient as an input. With padding_idx None its gradient is complete, as ours."""
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    steps, batch = 4, 8
    flags = ("--model", smollm2, "--data", PAIRS, "--dtype", "fp32", "--device", "cpu", "--adapters", rank, "--lr", lr)
    flags += ("--steps", steps, "--global-batch-size", batch, "--micro-batch-size", 2, "--log-every", 1)
    flags += ("--warmup-steps", 0, "--run-dir", "run", "--json", "summary.json")
    result = run(SCRIPT, tmp_path, *flags, nproc=2, timeout=1500)
    assert result.code == 0, result
    sizes = {"global_batch_size": batch, "micro_batch_size": None, "seed": 0}
    train_rows, held_out, order = read_rows(Namespace(model=smollm2, data=PAIRS, seq_len=1024, **sizes))
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs.get_input_embeddings().padding_idx = None
    theirs = into_peft(theirs, smollm2, rank) if rank else theirs
    # Trainer shifts labels itself: inputs and targets are one token apart, so both go in by one tensor
    rows = []
    for i in (i for step in range(steps) for i in order(step)):
        tokens, counts = (torch.from_numpy(part) for part in train_rows.rows[i])
        padded = torch.zeros(train_rows.seq_len + 1, dtype=torch.int64)
        labels = torch.full_like(padded, data.PADDING)
        padded[: len(tokens)] = tokens
        labels[: len(tokens)] = torch.where(counts, tokens, data.PADDING)
        rows.append({"input_ids": padded, "labels": labels})
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    how = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    how |= {"train_sampling_strategy": "sequential", "report_to": [], "save_strategy": "no", "use_cpu": True}
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, 0, steps))
    arguments = TrainingArguments(str(tmp_path / "theirs"), max_grad_norm=1.0, logging_steps=1, **how)
    trainer = Trainer(theirs, arguments, train_dataset=rows, optimizers=(optimizer, scheduler))
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert result.column("loss") == pytest.approx(losses, rel=max(tolerance, 1e-4))  # Trainer rounds what it logs
    with torch.no_grad():
        val_loss = loss_of(theirs, *stack(held_out, range(len(held_out)))).item()
    assert result.summary["val_loss"] == pytest.approx(val_loss, rel=tolerance)
    assert result.summary["val_loss"] < 0.5 * result.summary["val_loss_before"]
