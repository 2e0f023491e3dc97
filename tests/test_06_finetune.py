"""06_fsdp_zero/finetune.py: targets, equal losses on any ranks, peft and transformers on the same rows, resuming."""

import json
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from support.chapter import load
from support.checkpoints import saved, write_folder
from support.harness import (
    NO_COMPILER,
    ROOT,
    TINY,
    assert_refused,
    checkpoints,
    config_of,
    damage,
    drop_after,
    in_long,
    needs_compiler,
    run,
    train,
    with_prelude,
)

from lm import chats, lora, shapes, weights
from training.batches import PADDING, Batches
from training.optim import lr_factor
from training.run_folder import best_first

SCRIPT = "06_fsdp_zero/finetune.py"
PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"
QWEN = {**TINY, "model_type": "qwen2", "tie_word_embeddings": True}
STEPS, WARMUP, BATCH, RANK, LR = 6, 2, 6, 4, 1e-3
ALPHA = 12
MODULES = "q_proj,v_proj,down_proj"
FLAGS = (
    "--data",
    PAIRS,
    "--seq-len",
    128,
    "--steps",
    STEPS,
    "--global-batch-size",
    BATCH,
    "--lr",
    LR,
)
FLAGS += ("--save-dtype", "fp32", "--micro-batch-size", 1, "--warmup-steps", WARMUP)
# at the first step the last of three ranks reads rows without a target, and so does each micro-batch of them
NO_TARGET = """
from training.batches import Batches
init = Batches.__init__
def without_targets(batches, *args, **how):
    init(batches, *args, **how)
    for i in batches.global_batch(0)[-2:]:
        batches.train.rows[i].counts[:] = False
Batches.__init__ = without_targets
"""

# writes the lengths of the inputs in training, and how many graphs torch.compile has made
LENGTHS = """
import json
import torch
from torch._dynamo.utils import counters
from common import exits
forward = torch.nn.Embedding.forward
lengths = []
def with_lengths(embedding, tokens):
    if torch.is_grad_enabled():
        lengths.append(tokens.shape[1])
    return forward(embedding, tokens)
torch.nn.Embedding.forward = with_lengths
def write():
    found = {"lengths": lengths, "graphs": counters["stats"]["unique_graphs"]}
    open("found.json", "w", encoding="utf-8").write(json.dumps(found))
exits.at_exit.callback(write)
"""
# writes how often gradients are reduced in each dtype
REDUCED = """
import collections, json, os
from torch.utils._python_dispatch import TorchDispatchMode
from common import exits
class Reduced(TorchDispatchMode):
    counts = collections.Counter()
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "reduce_scatter" in operator.name():
            self.counts[str(args[1].dtype)] += 1
        return operator(*args, **(kwargs or {}))
reduced = Reduced()
reduced.__enter__()
def write():
    name = f"reduced-{os.environ['RANK']}.json"
    open(name, "w", encoding="utf-8").write(json.dumps(reduced.counts))
exits.at_exit.callback(write)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder without a tokenizer: its tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "model"
    write_folder(folder, config_of(QWEN), scale=4)
    return folder


@pytest.mark.parametrize("rank", [RANK, in_long(0)])
def test_losses_are_equal_on_one_two_and_three_ranks_one_of_them_without_a_target(
    tmp_path, folder, rank
):
    runs = {}
    for nproc in (1, 2, 3):
        script = with_prelude(SCRIPT, tmp_path / str(nproc), NO_TARGET)
        # with seed 0 rounding grows to 1.1e-5 of a gradient norm
        flags = (*FLAGS, "--model", folder, "--adapters", rank, "--seed", 1)
        runs[nproc] = train(str(script), tmp_path / str(nproc), *flags, nproc=nproc)
    for column in ("loss", "grad_norm", "val_loss"):
        for nproc in (2, 3):
            assert runs[nproc].column(column) == pytest.approx(runs[1].column(column), rel=1e-5), (
                column
            )
    held = [runs[nproc].summary["optimizer_bytes_per_rank"] for nproc in (1, 2)]
    assert held[1] == pytest.approx(held[0] / 2, rel=0.05)


def read(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference(folder: Path, rank: int):
    """transformers' model, for rank with peft's adapters, which start from our A and B."""
    theirs = read(folder)
    # it takes the gradient of that row, which we train
    theirs.get_input_embeddings().padding_idx = None
    if not rank:
        return theirs
    peft = pytest.importorskip("peft")
    theirs = peft.get_peft_model(
        theirs, peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=MODULES.split(","))
    )
    ours = weights.build(str(folder), shapes.read_config(str(folder)), seed=0)
    lora.adapt(ours, rank=rank, alpha=ALPHA, target_modules=MODULES.split(","))
    load("06_fsdp_zero/_finetune.py").init_adapters(ours, seed=0)
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            named[f"base_model.model.{name}.default.weight"].data.copy_(parameter.data)
    return theirs


def train_theirs(theirs, rows: list[dict], steps: int, lr: float, folder: Path) -> list[float]:
    """The losses of transformers' Trainer on these rows, in their order."""
    optimizer = torch.optim.AdamW(
        (p for p in theirs.parameters() if p.requires_grad), lr, (0.9, 0.95), weight_decay=0
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, "cosine", WARMUP, steps)
    )
    how = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": BATCH,
        "num_train_epochs": 1,
    }
    how |= {
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
    }
    how |= {"max_grad_norm": 1.0, "logging_steps": 1}
    arguments = transformers.TrainingArguments(str(folder), **how)
    trainer = transformers.Trainer(
        theirs, arguments, train_dataset=rows, optimizers=(optimizer, scheduler)
    )
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def error(found, expected) -> float:
    return ((found.logits - expected.logits).norm() / expected.logits.norm()).item()


REAL = (pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(1800))
CASES = [("folder", RANK, LR, 1e-5), pytest.param("folder", 0, LR, 1e-5, marks=pytest.mark.full)]
CASES += [pytest.param("smollm2", *how, marks=REAL) for how in ((8, 1e-3, 1e-5), (0, 1e-4, 1e-3))]


@pytest.mark.parametrize(("name", "rank", "lr", "tolerance"), CASES)
def test_steps_are_those_of_peft_and_trainer_and_both_load_the_end(
    tmp_path, request, name, rank, lr, tolerance
):
    peft, steps = pytest.importorskip("peft"), STEPS if name == "folder" else 3
    folder = request.getfixturevalue(name)
    flags = (*FLAGS, "--model", folder, "--adapters", rank, "--steps", steps, "--lr", lr)
    if rank:
        flags += ("--alpha", ALPHA, "--target-modules", MODULES)
    result = train(SCRIPT, tmp_path, *flags, nproc=2)
    script, helper = load(SCRIPT), load("06_fsdp_zero/_finetune.py")
    args = Namespace(
        data=str(PAIRS),
        eval_data=None,
        too_long="skip",
        seq_len=128,
        global_batch_size=BATCH,
        micro_batch_size=None,
        seed=0,
    )
    corpus, _ = helper.load_chats(args, chats.read_chat_format(str(folder)), script.chat_rows)
    train_rows = helper.Rows(corpus.train, args.seq_len)
    held_out_rows = helper.Rows(corpus.held_out, args.seq_len)
    batches = Batches(train_rows, held_out_rows, args, rank=0, world_size=1)
    chosen = [corpus.train[i] for step in range(steps) for i in batches.global_batch(step)]
    rows = [
        {"input_ids": t, "labels": np.where(counts, t, np.int64(PADDING))} for t, counts in chosen
    ]
    theirs = reference(folder, rank)
    losses = train_theirs(theirs, rows, steps, lr, tmp_path / "theirs")
    assert result.column("loss") == pytest.approx(losses, rel=tolerance)
    inputs, targets = (torch.stack(part) for part in zip(*batches.held_out, strict=True))
    inputs = inputs.clamp(min=0)  # padding
    with torch.no_grad():
        expected, before = theirs.eval()(inputs), read(folder)(inputs)
        val_loss = F.cross_entropy(expected.logits.flatten(0, 1), targets.flatten()).item()
        assert result.summary["val_loss"] == pytest.approx(val_loss, rel=tolerance)
        assert result.summary["val_loss"] < result.summary["val_loss_before"]
        assert error(read(tmp_path / "run/model")(inputs), expected) <= tolerance
        assert error(before, expected) > 1e-2
        if rank:
            adapted = peft.PeftModel.from_pretrained(read(folder), tmp_path / "run/adapter")
            assert error(adapted(inputs), expected) <= tolerance
    assert result.summary["transformers_error"] <= 1e-5


def test_killed_and_resumed_on_other_ranks_it_ends_alike_and_saves_adapters_alone(tmp_path, folder):
    pairs = PAIRS.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(pairs[:8]), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("".join(pairs[8:]), encoding="utf-8")
    mixture = ("--data", f"{tmp_path}/a.jsonl:0.7,{tmp_path}/b.jsonl:0.3")
    flags = (*FLAGS, *mixture, "--model", folder, "--adapters", RANK, "--save-every", 4)
    whole = train(SCRIPT, tmp_path, *flags, nproc=2)
    drop_after(tmp_path, 4)
    names = saved(tmp_path, 4)["model"]
    assert len(names) == 2 * 14
    assert all("lora_" in name for name in names)
    resumed = train(SCRIPT, tmp_path, *flags, "--resume", nproc=3)
    assert resumed.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
    assert resumed.summary["val_loss"] == pytest.approx(whole.summary["val_loss"], rel=1e-5)
    drop_after(tmp_path, 4)
    without = train(SCRIPT, tmp_path, *flags, "--adapters", 0, "--resume", code=2)
    assert_refused(without, f"--adapters 0 (was {RANK})")
    other = ("--adapters 2", "--alpha 3.0", "--dropout 0.1", "--target-modules q_proj")
    flags += (*" ".join(other).split(), "--data", mixture[1].replace("0.7", "0.6"))
    assert_refused(train(SCRIPT, tmp_path, *flags, "--resume", code=2), "--data", *other)


def test_int4_weights_are_those_of_the_lesson_in_shards_and_peft_loads_their_adapters(
    tmp_path, folder
):
    peft = pytest.importorskip("peft")
    lesson = load("07_memory_tricks/lora.py")
    flags = (*FLAGS, "--model", folder, "--adapters", RANK, "--weights", "int4", "--seed", 1)
    flags += ("--steps", 20, "--lr", 1e-2)
    runs = {n: train(SCRIPT, tmp_path / str(n), *flags, nproc=n) for n in (1, 2, 3)}
    losses = runs[1].column("loss")
    assert losses[-1] < 0.9 * losses[0]
    held = runs[1].summary["parameter_bytes_per_rank"]
    for nproc in (2, 3):
        for column in ("loss", "grad_norm", "val_loss"):
            found = runs[nproc].column(column)
            assert found == pytest.approx(runs[1].column(column), rel=1e-5), column
        share = runs[nproc].summary["parameter_bytes_per_rank"] / held
        assert share == pytest.approx(1 / nproc, rel=0.1)  # padding: 32 rows on 3 ranks

    base = read(folder)
    in_4_bits = 0
    for name, module in base.model.layers.named_modules():
        if name.endswith("_proj"):
            columns = module.in_features
            module.weight.data = F.pad(module.weight.data, (0, -columns % lesson.GROUP))
            layer = lesson.QLoRALinear(module, RANK, ALPHA)
            module.weight.data = layer.frozen_weight()[:, :columns].contiguous()
            in_4_bits += layer.codes.nbytes + layer.scale.nbytes + layer.minimum.nbytes
    others = sum(p.nbytes for name, p in base.named_parameters() if "_proj.weight" not in name)
    adapters = runs[1].summary["optimizer_bytes_per_rank"] / 2
    assert held == pytest.approx(in_4_bits + others + adapters, abs=100)
    tokens = torch.arange(64)[None]
    written = read(tmp_path / "3/run/model")(tokens)
    assert (
        error(peft.PeftModel.from_pretrained(base, tmp_path / "3/run/adapter")(tokens), written)
        < 1e-5
    )

    again = (*flags, "--resume", "--weights", "auto")
    assert_refused(train(SCRIPT, tmp_path / "1", *again, code=2), "--weights auto", "int4")


def test_a_layer_in_4_bits_has_the_gradients_of_its_dequantized_weight():
    torch.manual_seed(0)
    linear = torch.nn.Linear(80, 8)  # the last group of a row is padded
    in_4_bits = lora.QLoRALinear(linear, rank=4, alpha=12)
    torch.nn.init.normal_(in_4_bits.lora_B)
    linear.weight.data = in_4_bits.frozen_weight()
    plain = lora.LoRALinear(linear, rank=4, alpha=12)
    x = torch.randn(5, 80)
    found = {}
    for layer in (in_4_bits, plain):
        layer.lora_A.data = in_4_bits.lora_A.data
        layer.lora_B.data = in_4_bits.lora_B.data
        own_x = x.clone().requires_grad_()
        output = layer(own_x)
        output.square().sum().backward()
        found[layer] = [output, own_x.grad, layer.lora_A.grad, layer.lora_B.grad]
    torch.testing.assert_close(found[in_4_bits], found[plain])


def test_epochs_are_steps_and_the_model_that_is_written_is_the_best(tmp_path, folder):
    flags = (
        "--data",
        PAIRS,
        "--model",
        folder,
        "--adapters",
        0,
        "--save-dtype",
        "fp32",
        "--device",
    )
    flags += ("cpu", "--epochs", 1.5, "--lr", 0.1, "--warmup-steps", 8, "--save-every", 1)
    flags += ("--eval-every", 1, "--keep", 1, "--keep-best", "--run-dir", "run", "--dtype", "fp32")
    result = run(SCRIPT, tmp_path, *flags, "--json", "summary.json")
    assert result.code == 0, result
    assert result.summary["steps"] == 8  # 1.5 x 29 rows in batches of 6
    losses = result.column("val_loss")
    best = losses.index(min(losses)) + 1
    assert best < 8
    assert result.summary["best_step"] == best
    assert checkpoints(tmp_path) == [f"step-{best:08d}", "step-00000008"]
    written = read(tmp_path / "run/model").state_dict()
    for name, weight in saved(tmp_path, best)["model"].items():
        assert torch.equal(weight, written[name])
    assert result.summary["val_loss"] == min(losses)

    # The best is damaged, and no other checkpoint has a loss: the last weights are kept.
    damage(tmp_path / f"run/step-{best:08d}", "one bit")
    metrics = tmp_path / "run/metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [x for x in lines if "val_loss" not in x or json.loads(x)["step"] == best]
    metrics.write_text("".join(kept), encoding="utf-8")
    resumed = run(SCRIPT, tmp_path, *flags, "--resume", "--json", "summary.json")
    assert resumed.code == 0, resumed
    assert resumed.summary["best_step"] is None
    assert f"step-{best:08d} is broken" in resumed.out
    written = read(tmp_path / "run/model").state_dict()
    for name, weight in saved(tmp_path, 8)["model"].items():
        assert torch.equal(weight, written[name])


def test_losses_on_other_held_out_data_are_not_compared(tmp_path):
    records = []
    for step, (val_loss, held_out) in enumerate([(1.0, "a"), (3.0, "b"), (2.0, "b")], 1):
        records.append({"step": step, "val_loss": val_loss, "held_out": held_out})
        (tmp_path / f"step-{step:08d}").mkdir()
    lines = [json.dumps(record) + "\n" for record in records]
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    assert [checkpoint.step for checkpoint in best_first(tmp_path)] == [3, 2]


def test_dropout_is_that_of_peft_and_of_training_alone():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 8, bias=False)
    ours = lora.LoRALinear(linear, rank=4, alpha=12)
    ours.dropout = 0.5
    torch.nn.init.normal_(ours.lora_B)
    how = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.5, "target_modules": ["0"]}
    theirs = peft.get_peft_model(torch.nn.Sequential(linear), peft.LoraConfig(**how))
    named = dict(theirs.named_parameters())
    for name in ("lora_A", "lora_B"):
        named[f"base_model.model.0.{name}.default.weight"].data.copy_(getattr(ours, name))
    x = torch.randn(5, 16)
    outputs = {}
    for training in (True, False):
        for layer in (ours, theirs):
            torch.manual_seed(1)
            outputs[layer, training] = layer.train(training)(x)
        torch.testing.assert_close(outputs[ours, training], outputs[theirs, training])
    assert not torch.allclose(outputs[ours, True], outputs[ours, False])


def test_packed_chats_are_trained_as_padded_ones_compiled_on_two_ranks_and_resumed_on_three(
    tmp_path, folder
):
    """Each step takes a whole epoch: 29 rows, or the six packed rows that they are put into."""
    flags = ("--model", folder, "--data", PAIRS, "--adapters", RANK, "--lr", LR, "--steps", 2)
    padded_flags = ("--global-batch-size", 29, "--seq-len", 128)
    padded = train(SCRIPT, tmp_path / "padded", *flags, *padded_flags)
    packed_flags = (*flags, "--global-batch-size", 6, "--packing", "--seq-len", 345)
    script = with_prelude(SCRIPT, tmp_path, NO_COMPILER)
    packed = train(script, tmp_path, *packed_flags, "--save-every", 1, "--compile", nproc=2)
    drop_after(tmp_path, 1)
    resumed = train(SCRIPT, tmp_path, *packed_flags, "--resume", "--no-compile", nproc=3)
    for column in ("loss", "grad_norm", "val_loss"):
        expected = padded.column(column)
        assert packed.column(column) == pytest.approx(expected, rel=1e-5), column
        assert resumed.column(column) == pytest.approx(expected, rel=1e-5), column
    # of 6 x 345 tokens, and of micro-batches of two rows
    assert resumed.summary["padding_share"] == pytest.approx(0.045, abs=1e-3)
    assert resumed.summary["unpacked_padding_share"] == pytest.approx(0.056, abs=1e-3)


def test_gradients_of_adapters_beside_frozen_bf16_weights_are_reduced_in_fp32(tmp_path, folder):
    """fully_shard takes a group's reduce_dtype at its first forward, from what is trained then."""
    script = with_prelude(SCRIPT, tmp_path, REDUCED)
    flags = ("--model", folder, "--data", PAIRS, "--seq-len", 128, "--steps", 1, "--dtype", "bf16")
    train(script, tmp_path, *flags, "--adapters", RANK, "--global-batch-size", 2, nproc=2)
    for rank in (0, 1):
        counts = json.loads((tmp_path / f"reduced-{rank}.json").read_text(encoding="utf-8"))
        assert counts == {"torch.float32": TINY["num_hidden_layers"]}


# few templates of the hub have them, and transformers' masks need them
MARKERS = "{% (end)?generation %}"
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
REWRITES = CHATML.replace(
    "{% generation %}{{ m.content }}", "{% generation %}{{ m.content if loop.last else 'x' }}"
)
CHATS = [
    [{"role": "user", "content": "Why? "}, {"role": "assistant", "content": " Because.  \n"}],
    [
        {"role": "system", "content": "Be short."},
        *(
            {"role": role, "content": f"{role} ä {i}"}
            for i in range(2)
            for role in ("user", "assistant")
        ),
    ],
]


def with_tokenizer(folder: Path, template: str) -> Path:
    """A model, and a byte-level tokenizer with this chat template, without its markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write_folder(folder, config_of({**QWEN, "vocab_size": 300}), scale=4)
    vocabulary = {
        letter: i
        for i, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "be", "he"])
    }
    core = Tokenizer(models.BPE(vocabulary, [("b", "e"), ("h", "e")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    how = {"bos_token": "<s>", "eos_token": "<|im_end|>", "extra_special_tokens": names}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **how)
    tokenizer.chat_template = re.sub(MARKERS, "", template)
    tokenizer.save_pretrained(folder)
    return folder


def test_ids_and_mask_are_those_of_transformers_with_markers(tmp_path):
    script = load(SCRIPT)
    for number, template in enumerate((CHATML, LLAMA3)):
        folder = with_tokenizer(tmp_path / str(number), template)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        how = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
        for messages in CHATS:
            found = theirs.apply_chat_template(messages, **how)
            assert 0 < sum(found["assistant_masks"]) < len(found["input_ids"])
            [(ids, counts)] = script.chat_rows(chats.read_chat_format(str(folder)), messages)
            assert ids == found["input_ids"]
            assert counts == [mark == 1 for mark in found["assistant_masks"]]


def test_an_answer_that_the_template_rewrites_is_a_row_of_its_own(tmp_path):
    chat = chats.read_chat_format(str(with_tokenizer(tmp_path / "model", REWRITES)))
    rows = load(SCRIPT).chat_rows(chat, CHATS[1])
    answers = [chat.decode([i for i, c in zip(*row, strict=True) if c]) for row in rows]
    assert answers == ["assistant ä 0<|im_end|>\n", "assistant ä 1<|im_end|>\n"]


def test_a_model_with_more_tokens_than_bytes_answers_with_bytes_as_transformers_would(tmp_path):
    """Also with 2 ranks, each of which holds a part of the head."""
    folder = tmp_path / "model"
    write_folder(folder, config_of({**QWEN, "vocab_size": 1000}), scale=4)
    flags = ("--model", folder, "--data", PAIRS, "--seq-len", 128, "--steps", 1, "--dtype", "fp32")
    result = train(SCRIPT, tmp_path, *flags, "--save-dtype", "fp32", nproc=2)
    helper = load("06_fsdp_zero/_finetune.py")
    chat = chats.byte_chat()
    records = [chats.read_conversation(record) for _, record in chats.read_records(str(PAIRS))]
    held_out = sorted(records, key=helper.hash_of)[:3]
    prompts = helper.questions(chat, held_out, shapes.read_config(str(folder)))
    model = read(tmp_path / "run/model")
    for prompt, found in zip(prompts, result.summary["answers"], strict=True):
        answer = []
        while len(answer) < helper.ANSWER_TOKENS and chat.end not in answer:
            logits = model(torch.tensor([prompt + answer])).logits[0, -1]
            answer.append(logits[: chat.vocab_size].argmax().item())
        assert found == chat.decode(answer)


PAIR = '{"prompt": "a", "completion": "b"}\n'
REFUSALS = {  # lines of --data, flags, what the message has to name
    "no file": (None, "", ("chats.jsonl",)),
    "not json": (8 * PAIR + "hello", "", ("line 9",)),
    "no chat": ('{"texts": "a"}\n', "", ("line 1",)),
    "an answer that is no text": ('{"prompt": "a", "completion": 3}\n', "", ("line 1",)),
    "too few": (3 * PAIR, "", ("--data", "--global-batch-size")),
    "all too long": (8 * PAIR, "--seq-len 4", ("--seq-len 4",)),
    "random weights": (8 * PAIR, "--model nano --adapters 4", ("--adapters 4", "nano")),
    "int4 without adapters": (
        8 * PAIR,
        "--adapters 0 --weights int4",
        ("--weights int4", "--adapters 16"),
    ),
    "int4 of some": (
        8 * PAIR,
        "--target-modules q_proj --weights int4",
        ("--weights int4", "--target-modules q_proj"),
    ),
    "packing of weights": ("", "--data chats.jsonl:1,b:1 --packing", ("--packing", "weights")),
    "epochs of weights": ("", "--data chats.jsonl:1,b:1 --epochs 1", ("--epochs 1", "weights")),
    "weights of --eval-data": ("", "--eval-data a:1,b:2", ("--eval-data", "weights")),
    "a flag of experts": ("", "--balance-loss 1", ("--balance-loss",)),
    "rows without a target": ('{"text": "\\u0000"}\n', "", ("1 rows without a target",)),
    "fp16": (8 * PAIR, "--dtype fp16", ("--dtype fp16",)),
    "over the model's limit": (
        "".join(json.dumps({"prompt": str(i), "completion": "b" * 200}) + "\n" for i in range(9)),
        "",
        ("--seq-len", "limit"),
    ),
}


def test_bad_input_is_refused_in_one_line(tmp_path, folder):
    for case, (lines, flags, words) in REFUSALS.items():
        own_folder = tmp_path / case
        own_folder.mkdir()
        if lines is not None:
            (own_folder / "chats.jsonl").write_text(lines, encoding="utf-8")
        given = ("--device", "cpu", "--data", "chats.jsonl", "--model", folder, *flags.split())
        assert_refused(run(SCRIPT, own_folder, *given), *words)


def test_tokens_per_step_follow_the_weights_of_a_mixture():
    """The first part has rows of one input, the second of nine, and weights of 3 : 1."""
    helper = load("06_fsdp_zero/_finetune.py")
    rows = [helper.Row(np.zeros(n, np.int32), np.ones(n, bool)) for n in (2, 2, 2, 2, 10)]
    assert helper.Rows(rows, 9, [(4, 0.75), (1, 0.25)]).mean_length() == 3
    assert helper.Rows(rows, 9).mean_length() == 13 / 5


def test_a_template_that_asks_otherwise_than_it_writes_is_refused(tmp_path):
    asks = CHATML.replace("assistant\n{% endif %}", "helper\n{% endif %}")
    folder = with_tokenizer(tmp_path / "model", asks)
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--model", folder, "--data", PAIRS)
    assert_refused(result, "line 1", "template")


def test_a_signal_in_the_last_step_does_not_cost_the_model(tmp_path, folder):
    prelude = "from common import runtime\nruntime.stop_requested = lambda: 15"
    script = with_prelude(SCRIPT, tmp_path, prelude)
    flags = ("--model", folder, "--data", PAIRS, "--seq-len", 128, "--global-batch-size", 2)
    result = run(str(script), tmp_path, *flags, "--steps", 1, "--run-dir", "run")
    assert result.code == 0, result
    assert (tmp_path / "run/model/config.json").is_file()


@pytest.mark.parametrize(
    "prelude",
    [
        pytest.param(NO_COMPILER, id="aot_eager", marks=pytest.mark.full),
        pytest.param("", id="inductor", marks=[pytest.mark.long, needs_compiler]),
    ],
)
def test_compiled_micro_batches_are_as_long_as_their_longest_row(tmp_path, folder, prelude):
    """And not as the longest of all rows. torch compiles for one length, then for any."""
    flags = ("--model", folder, "--data", PAIRS, "--seq-len", 128, "--steps", 4, "--dtype", "fp32")
    flags += ("--global-batch-size", 4, "--micro-batch-size", 2, "--lr", LR)
    runs = {}
    found = {}
    for name, more_flags in {"eager": (), "compiled": ("--compile",)}.items():
        script = with_prelude(SCRIPT, tmp_path / name, LENGTHS + prelude)
        runs[name] = train(script, tmp_path / name, *flags, *more_flags)
        found[name] = json.loads((tmp_path / name / "found.json").read_text(encoding="utf-8"))
    for column in ("loss", "grad_norm", "val_loss"):
        eager = runs["eager"].column(column)
        assert runs["compiled"].column(column) == pytest.approx(eager, rel=1e-5), column
    lengths = found["compiled"]["lengths"]
    assert lengths == found["eager"]["lengths"]
    # one length and any length, each with and without gradients
    assert 0 < found["compiled"]["graphs"] <= 4 < len(set(lengths))
