"""What finetune.py does beside the concept: its file of chats, its plan, greedy answers, and the folders it leaves."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _shared import write_adapter, write_folder
from torch import Tensor, nn

from common import exits, runtime
from lm import data, lora, model, reference, shapes
from lm.weight_files import weight_files
from lm.weights import build, local_part, random_weight
from planner import memory, plan, shape

QUESTIONS, ANSWER_TOKENS = 3, 8  # each token is a forward of all that is before it
ALPHA_PER_RANK = 2  # alpha / rank scales what A and B add


class Row(NamedTuple):
    tokens: np.ndarray
    counts: np.ndarray  # whether a token is a target


class Rows(torch.utils.data.Dataset):
    """Item i is (inputs, targets) of a chat, each int64 [seq_len], targets one token on: PADDING where none counts."""

    def __init__(self, rows: list[Row], seq_len: int, *, trim: bool) -> None:
        self.rows, self.seq_len, self.trim = rows, seq_len, trim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int, length: int | None = None) -> tuple[Tensor, Tensor]:
        tokens, counts = (torch.from_numpy(part) for part in self.rows[i])
        targets = torch.where(counts, tokens, data.PADDING)
        missing = (0, (length or self.seq_len) - len(tokens) + 1)
        return F.pad(tokens[:-1].long(), missing), F.pad(
            targets[1:].long(), missing, value=data.PADDING
        )

    # DataLoader takes micro-batches by it
    def __getitems__(self, chosen: list[int]) -> list[tuple[Tensor, Tensor]]:
        longest = max(len(self.rows[i].tokens) - 1 for i in chosen)
        return [self.__getitem__(i, longest if self.trim else None) for i in chosen]

    def mean_length(self) -> float:
        return sum(len(row.tokens) - 1 for row in self.rows) / len(self.rows)

    def target_count(self, chosen: list[int]) -> int:
        return sum(int(self.rows[i].counts[1:].sum()) for i in chosen)


class Chat(NamedTuple):
    """How chats become text, and text becomes tokens."""

    render: Callable[..., str]  # messages, add_generation_prompt
    # ids, and where in the text each of them stands
    encode: Callable[[str], tuple[list[int], list[tuple[int, int]]]]
    decode: Callable[[list[int]], str]
    end: int  # the token that ends an answer
    vocab_size: int


def plain_template(messages: list[dict], add_generation_prompt: bool = False, *, end: str) -> str:
    """For models that come without a chat template."""
    return (
        "".join(f"{m['role']}: {m['content']}{end}\n" for m in messages)
        + "assistant: " * add_generation_prompt
    )


def read_chat_format(name: str) -> Chat:
    """That of the tokenizer called `name`, or in that folder; of bytes for one without."""
    if name in ("bytes", *shapes.SIZES) or (
        Path(name).exists() and not any(Path(name).glob("tokenizer*"))
    ):

        def to_bytes(text: str) -> tuple[list[int], list[tuple[int, int]]]:
            return list(text.encode()), [
                (i, i + 1) for i, letter in enumerate(text) for _ in letter.encode()
            ]

        return Chat(
            partial(plain_template, end="\0"),
            to_bytes,
            lambda t: bytes(t).decode(errors="replace"),
            0,
            256,
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise exits.UserError(f"--tokenizer {name}: {error}") from None
    if not tokenizer.is_fast or tokenizer.eos_token is None:
        raise exits.UserError(
            f"--tokenizer {name} needs a tokenizer.json, for the mask's offsets, and an eos_token"
        )
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    if tokenizer.chat_template is None:
        runtime.print0(
            f"{name} has no chat template: chats become lines of `role: content{tokenizer.eos_token}`"
        )
        render = partial(plain_template, end=tokenizer.eos_token)

    # the template has written a first token already
    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return found["input_ids"], found["offset_mapping"]

    return Chat(render, encode, tokenizer.decode, tokenizer.eos_token_id, len(tokenizer))


def read_messages(line: str) -> list[dict[str, str]]:
    """The messages of a line of --data. ValueError if there are none."""
    content = dict(json.loads(line))
    pair = {"user": content.get("prompt"), "assistant": content.get("completion")}
    messages = content.get("messages") or [
        {"role": role, "content": text} for role, text in pair.items()
    ]
    if not all(
        isinstance(message, dict) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise ValueError(
            'a line is {"messages": [{"role", "content"}, ...]} or {"prompt", "completion"}, all texts'
        )
    return messages


def load_chats(args, chat: Chat, chat_rows: Callable) -> tuple[data.Corpus, list[list[dict]]]:
    """The rows of --data, and held-out chats. The 5 % whose hash is lowest are held out, at least QUESTIONS of
    a dozen: copies of a chat fall on one side. Sets args.seq_len to the longest row, if that is shorter."""
    try:
        lines = Path(args.data).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise exits.UserError(f"--data {args.data} is no .jsonl file of chats: {error}") from None
    chats, rows = {}, {}  # by the hash of a chat
    left_out = defaultdict(list)  # numbers of lines, by the reason
    for number, line in ((number, line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            messages = read_messages(line)
            found = chat_rows(chat, messages)
        except Exception as error:  # a template may raise whatever it likes
            raise exits.UserError(f"--data {args.data}, line {number}: {error}") from None
        key = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
        for ids, counts in found:
            if len(ids) - 1 > args.seq_len:
                left_out[f"longer than --seq-len {args.seq_len}"].append(number)
            elif not any(counts[1:]):
                left_out["without a target"].append(number)
            else:
                chats[key] = messages
                rows.setdefault(key, []).append(Row(np.array(ids, np.int32), np.array(counts)))
    for reason, numbers in left_out.items():
        some = ", ".join(map(str, numbers[:10])) + ", ..." * (len(numbers) > 10)
        runtime.print0(f"left out: {len(numbers)} rows {reason}, of line {some}")
    held_out_count = max(math.ceil(len(rows) * data.HELD_OUT), min(QUESTIONS, len(rows) // 4))
    held_out = dict.fromkeys(sorted(rows)[:held_out_count])
    train_rows = [row for key in rows if key not in held_out for row in rows[key]]
    held_out_rows = [row for key in held_out for row in rows[key]]
    if train_rows:
        show_row(chat, train_rows[0], len(train_rows))
    args.seq_len = min(
        args.seq_len,
        max((len(row.tokens) - 1 for row in train_rows + held_out_rows), default=2**30),
    )
    sha = hashlib.sha256(
        b"".join(part.tobytes() for row in train_rows + held_out_rows for part in row)
    ).hexdigest()
    return data.Corpus(train_rows, held_out_rows, chat.vocab_size, sha), [
        chats[key] for key in held_out
    ]


def show_row(chat: Chat, row: Row, count: int) -> None:
    """As text, with what counts between >> and <<."""
    changes = np.flatnonzero(np.diff(row.counts)) + 1
    parts = zip(np.split(row.tokens, changes), np.split(row.counts, changes), strict=True)
    text = "".join(
        f">>{chat.decode(t.tolist())}<<" if c[0] else chat.decode(t.tolist()) for t, c in parts
    )
    runtime.print0(
        f"the first of {count} rows, {len(row.tokens)} tokens, {row.counts.sum()} of them targets:\n  {text!r}"
    )


def say_plan(args, config: shapes.Config, batches: data.Batches, device: torch.device) -> int:
    """What a rank will hold at its peak, by planner/: 07_memory_tricks/estimate.py prints the same, with formulas."""
    flags = {
        name: getattr(args, name) for name in ("adapters", "seq_len", "dtype", "checkpointing")
    }
    flags |= {
        "micro_batch_size": batches.micro_batch_size,
        "micro_batches": batches.accumulation_steps,
    }
    found = memory.peak(
        shape.from_config(args.model, config), plan.Plan(gpus=batches.world_size, zero=3, **flags)
    )
    parts = ", ".join(
        f"{name.removesuffix('_bytes')} {size / 2**30:.2f}"
        for name, size in found.lines.items()
        if size
    )
    runtime.print0(
        f"planned: {found.total_bytes() / 2**30:.2f} GiB on each rank's GPU at the peak (of {parts})"
    )
    if (
        device.type == "cuda"
        and found.total_bytes() > torch.cuda.get_device_properties(device).total_memory
    ):
        runtime.print0(
            "  more than this GPU has: --checkpointing full, --micro-batch-size 1 or --cpu-offload help"
        )
    return round(found.allocated_bytes())


def base_sha256(name: str) -> str:
    """Of each .safetensors file in the folder `name` size and first MiB: all of 141 GB would take minutes."""
    sha = hashlib.sha256()
    if name not in shapes.SIZES:
        for file in weight_files(Path(name)):
            with open(file, "rb") as stream:
                sha.update(f"{file.name} {file.stat().st_size}".encode() + stream.read(2**20))
    return sha.hexdigest()


@torch.no_grad()
def init_adapters(net: nn.Module, seed: int) -> None:
    """The initial A and B as a function of (seed, name) alone, whole or sharded: as many ranks as there may be."""
    for name, parameter in net.named_parameters():
        if name.endswith("lora_A"):
            held, place = local_part(parameter)
            # of kaiming_uniform_ in LoRALinear; of random_weight 0.02
            deviation = (3 * parameter.shape[1]) ** -0.5
            held.copy_(random_weight(name, parameter.shape, seed)[place] / 0.02 * deviation)
        elif name.endswith("lora_B"):
            parameter.zero_()


def questions(chat: Chat, chats: list[list[dict]], config: shapes.Config) -> list[list[int]]:
    """The prompts of the first held-out chats, as tokens: the end of one that leaves no room for an answer."""
    prompts = []
    for messages in chats[:QUESTIONS]:
        first_answer = [message["role"] for message in messages].index("assistant")
        prompt, _ = chat.encode(chat.render(messages[:first_answer], add_generation_prompt=True))
        prompts.append(prompt[-(config.max_position_embeddings - ANSWER_TOKENS) :])
    return prompts


@torch.no_grad()
def greedy(forward: Callable, prompts: list[list[int]], end: int, device) -> list[list[int]]:
    """Answers of the likeliest tokens, all prompts in one batch, without a cache. All ranks call it, for a sharded
    model gathers its weights in forward, and go on with rank 0's tokens."""
    answers = [[] for _ in prompts]
    while not all(end in answer or len(answer) == ANSWER_TOKENS for answer in answers):
        rows = [
            torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        # at the end: causal attention never looks there
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = forward(tokens.to(device))
        chosen = torch.stack(
            [of_row[len(row) - 1].argmax() for of_row, row in zip(logits, rows, strict=True)]
        )
        dist.broadcast(chosen, 0)
        for answer, token in zip(answers, chosen.tolist(), strict=True):
            if end not in answer:
                answer.append(token)
    return answers


def leave_folders(net: model.Transformer, folder: Path, args, dtype: torch.dtype) -> None:
    """model/, with merged adapters, for transformers, vLLM and the scripts here; adapter/ for peft. All call it."""
    layers = {
        name: module for name, module in net.named_modules() if isinstance(module, lora.LoRALinear)
    }
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    shapes_only = {
        n: torch.empty(w.shape, dtype=dtype, device="meta")
        for n, w in weights.items()
        if "lora_" not in n
    }

    def read(name: str) -> Tensor:
        layer = layers.get(name.removesuffix(".weight"))
        # of sharded matrices B keeps its rows, and A, which is small, is gathered
        return runtime.full_tensor(weights[name] if layer is None else layer.merged_weight()).to(
            dtype
        )

    config = shapes.config_json(net.config)
    if shapes.has_weights(args.model):
        config = shapes.read_config_json(args.model)
        if not net.config.tie_word_embeddings:  # read_config may have untied the head
            config["tie_word_embeddings"] = False
    kind = str(dtype).removeprefix("torch.")
    write_folder(
        shapes_only,
        read,
        folder / "model",
        config | {"dtype": kind, "torch_dtype": kind},
        Path(args.model),
    )
    trained = {
        name: runtime.full_tensor(weights[name]).cpu() for name in weights if "lora_" in name
    }
    if trained:
        how = {"base": args.model, "rank": args.adapters, "alpha": ALPHA_PER_RANK * args.adapters}
        runtime.on_rank0(partial(write_adapter, trained, folder / "adapter", **how))


@torch.no_grad()
def compare_with_transformers(
    folder: Path,
    config: shapes.Config,
    prompt: list[int],
    device: torch.device,
) -> float | None:
    """Return the relative error in fp32 of lm/model.py's logits against transformers'.

    Both read this folder. Rank 0 computes both, on its GPU if they fit beside what is there, else on
    the CPU. None where transformers is not installed, and for a folder too large to be opened twice.
    """
    if sum(file.stat().st_size for file in folder.iterdir()) > 4e9 or not find_spec("transformers"):
        runtime.print0(f"{folder} was not compared with transformers: not installed, or over 4 GB")
        return None
    with reference.comparison(device, needed_bytes=2 * 4 * shapes.parameter_count(config)) as where:
        error = logits_error(folder, config, prompt, where)
    assert error < 1e-3, (
        f"lm/model.py and transformers differ by {error:.1e} of the logits from {folder}"
    )
    runtime.print0(
        f"checked: from {folder}, transformers and lm/model.py give the same logits within 1e-3"
    )
    return error


def logits_error(
    folder: Path,
    config: shapes.Config,
    prompt: list[int],
    device: torch.device,
) -> float:
    """Return |ours - transformers'| / |transformers'| of the prompt's logits, as norms."""
    tokens = torch.tensor([prompt], device=device)
    expected = reference.read_transformers(folder, device)(tokens).logits
    found = build(str(folder), config, seed=0, device=device)(tokens)
    return ((found - expected).norm() / expected.norm()).item()


def say_answers(
    chat: Chat, prompts: list[list[int]], before: list[list[int]], after: list[list[int]]
) -> list[str]:
    for prompt, one, other in zip(prompts, before, after, strict=True):
        question, *answers = (chat.decode(tokens) for tokens in (prompt, one, other))
        runtime.print0(
            f"held out: {question!r}\n  before: {answers[0]!r}\n  after:  {answers[1]!r}"
        )
    return [chat.decode(tokens) for tokens in after]
