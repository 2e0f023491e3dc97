"""Read the rows of chats, and write what a fine-tuning run leaves behind."""

import argparse
import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import cli, exits, files, report, runtime
from lm import balance, data, exchange, lora, model, reference, shapes, stdlib_text
from lm.chats import (
    Chat,
    Conversation,
    check_keys,
    check_texts,
    read_conversation,
    read_records,
    render_answer,
)
from lm.expert_files import in_files
from lm.hf_folder import (
    copy_tokenizer,
    keep_generation_config,
    special_ids,
    tokenizer_files,
    write_adapter,
    write_folder,
)
from lm.training_rows import PackedRows, Row, Rows, hash_of_rows
from lm.weight_files import StoredWeights
from lm.weights import BAR_DELAY, build, random_weight, read_config
from training.batches import PADDING
from training.digest import local_part
from training.run_folder import read_run

MODEL = "model"  # what finetune.py writes into the folder of a run
ADAPTER = "adapter"
FOLDERS = (MODEL, ADAPTER)
QUESTIONS = 3
PROMPT_TOKENS = 32  # of a text
ANSWER_TOKENS = 8  # each one takes a forward over everything before it
HELPS = {  # where finetune.py has other defaults than the other training scripts
    "model": "an HF folder, or a model without weights: nano, wide, llama-124m, -1b, -8b, ... "
    "(default: models/smollm2-135m if it is there, else nano)",
    "data": ".jsonl file of chats; several: A,B (all of each), A:0.7,B:0.3 (mixed by weight) "
    "(default: the pairs of 07_memory_tricks/lora.py)",
    "eval_data": "evaluate on the chats of these files, and train on all of --data (default: hold "
    "out 5 %% of --data)",
    "seq_len": "most tokens of a row; see --too-long",
    "global_batch_size": "rows per step, all ranks",
    "micro_batch_size": "rows per rank and forward (default: a rank's share)",
    "steps": "optimizer steps; may grow on --resume",
    "lr": "peak learning rate (default: the model's, and ten times that for adapters)",
    "warmup_steps": "steps of warm-up",
    "dtype": "of matmuls and frozen weights (auto: bf16 or fp32); not fp16",
    "compile": "torch.compile the blocks (default: off)",
}
LARGEST_COMPARED = 4e9  # bytes of a folder that transformers reads again
COMPARED_TOKENS = 64  # of a prompt: the logits of each take 4 bytes per entry of the vocabulary


# 1 Flags


def add_flags(parser: cli.Parser) -> None:
    """Add the flags that other training scripts do not have, and say where defaults differ."""
    parser.set_helps(HELPS)
    parser.add_argument(
        "--adapters",
        type=cli.natural,
        help="rank of A and B; 0: no adapters (default: 16; 0 for a model without weights)",
    )
    parser.add_argument(
        "--alpha",
        type=cli.positive,
        help="the output of an adapter is scaled by alpha / rank (default: 2 x rank)",
    )
    parser.add_argument(
        "--dropout",
        type=cli.share,
        help="of the input of adapters; drawn for each rank, so the losses depend on the number of "
        "ranks (default: 0)",
    )
    parser.add_argument(
        "--target-modules",
        type=target_modules,
        metavar="NAMES",
        help="layers with adapters, such as q_proj,v_proj (default: all-linear)",
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "int4"),
        default="auto",
        help="how adapted matrices are stored: in --dtype, or in 4.5 bits a weight (QLoRA)",
    )
    parser.add_argument(
        "--too-long",
        choices=("skip", "cut"),
        default="skip",
        help="what to do with a row longer than --seq-len: leave it out, or cut its end",
    )
    parser.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="put several rows into one of --seq-len tokens, apart from each other",
    )
    parser.add_argument(
        "--save-dtype", choices=("bf16", "fp32"), default="bf16", help="of the folder model/"
    )
    parser.add_argument(
        "--ep",
        type=cli.positive_int,
        default=1,
        help="ranks that share the experts of a layer; 2 or more: tokens travel to their experts",
    )
    parser.add_argument(
        "--cpu-offload",
        action="store_true",
        help="weights, gradients, optimizer state in CPU memory",
    )


def target_modules(text: str) -> tuple[str, ...]:
    """Return the names of layers in `text`, in the order of a block.

    Raise argparse's error for a name that no block has.
    """
    if text == "all-linear":
        return lora.TARGET_MODULES
    names = text.split(",")
    for name in names:
        if name not in lora.TARGET_MODULES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no linear layer of a block: use all-linear, or some of "
                f"{','.join(lora.TARGET_MODULES)}"
            )
    return tuple(name for name in lora.TARGET_MODULES if name in names)


def choose_adapters(args) -> None:
    """Set the flags of adapters, and --lr, where they are not given.

    Raise UserError for flags that do not fit the model or each other.
    """
    if args.dtype == "fp16":
        raise exits.UserError(
            "--dtype fp16: 05_ddp/train.py has a GradScaler; use bf16 or fp32 here"
        )
    config = read_config(args.model, experts=True)  # raises for an unknown model
    balance.check_flags(args, config)
    check_expert_ranks(args, config)
    if args.packing and cli.has_mixture_weights("--data", args.data):
        raise exits.UserError(
            f"--packing: the weights of --data {args.data} count rows, which packing joins: "
            "leave the weights out, or --packing"
        )
    if args.balance_bias:
        raise exits.UserError(
            f"--balance-bias {args.balance_bias:g}: model/ would not be the trained model, because "
            "a Hugging Face folder has no bias of the router: use --balance-loss"
        )
    has_weights = shapes.has_weights(args.model)
    if args.adapters is None:
        args.adapters = 16 if has_weights else 0
    if args.adapters and not has_weights:
        raise exits.UserError(
            f"--adapters {args.adapters}: --model {args.model} has no weights to freeze: use 0"
        )
    if not args.lr:
        args.lr = shapes.recipe(args.model).lr
        if args.adapters:
            args.lr *= 10  # adapters take about ten times the learning rate
    if args.adapters:
        args.alpha = args.alpha or 2 * args.adapters
        args.dropout = args.dropout or 0.0
        if config.experts is not None:
            check_adapters_of_mixture(args)
            args.target_modules = args.target_modules or lora.ATTENTION_MODULES
        args.target_modules = args.target_modules or lora.TARGET_MODULES
        # a resumed run has them as a list
        if args.weights == "int4" and len(args.target_modules) < len(lora.TARGET_MODULES):
            raise exits.UserError(
                "--weights int4 stores the matrices that have adapters in 4 bits, and "
                f"--target-modules {','.join(args.target_modules)} leaves some out: use all-linear"
            )
        return
    if args.weights == "int4":
        raise exits.UserError(
            "--weights int4 is of frozen weights, and --adapters is 0: add --adapters 16, "
            "or leave it out"
        )
    # a run with adapters, whose flags a resume has: checkpoint.Run names --adapters
    earlier = read_run(args.run_dir)["flags"] if args.resume else {}
    for flag in ("alpha", "dropout", "target_modules"):
        if getattr(args, flag) is not None and earlier.get(flag) is None:
            raise exits.UserError(
                f"--{flag.replace('_', '-')} is of adapters, and --adapters is 0: leave it out"
            )


def check_expert_ranks(args, config: shapes.Config) -> None:
    """Raise UserError if --ep ranks cannot share the experts."""
    exchange.check_ranks(args.ep, args.model, config, runtime.ranks().world_size)
    if args.ep > 1 and args.compile:
        raise exits.UserError(
            f"--compile: torch.compile cannot trace the exchange of --ep {args.ep}: use "
            "--no-compile"
        )


def check_adapters_of_mixture(args) -> None:
    """Raise UserError for adapters that a mixture of experts cannot have."""
    for name in args.target_modules or ():
        if name not in lora.ATTENTION_MODULES:
            raise exits.UserError(
                f"--target-modules {','.join(args.target_modules)}: in a mixture of experts only "
                f"attention has adapters: use some of {','.join(lora.ATTENTION_MODULES)}"
            )
    if args.weights == "int4":
        raise exits.UserError(
            f"--weights int4 stores the matrices that have adapters, and --model {args.model} is a "
            "mixture of experts, which have none: leave it out"
        )


# 2 Rows: what a training step reads


@dataclass
class Chats:
    """The chats in the files of a flag."""

    # By their hash: copies of a chat have the same hash.
    conversations: dict[str, Conversation] = field(default_factory=dict)
    # With the hash of the chat and the number of its file.
    rows: list[tuple[str, int, Row]] = field(default_factory=list)
    # Places, by what is left out there.
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    longest_left_out: int = 0  # inputs


def load_chats(args, chat: Chat, chat_rows: Callable) -> tuple[data.Corpus, list[Conversation]]:
    """Return the rows to train on and to hold out, and the held-out conversations.

    With --eval-data, its chats are held out, and all chats of --data are for training.
    Else hold out 5 % of the chats, those with the lowest hashes; copies of a chat count once. From
    12 chats on, hold out at least QUESTIONS. Lower args.seq_len to the longest row.
    Raise UserError for a chat that cannot be used, and if there are too few.
    """
    chats = read_chats("--data", args, chat, chat_rows)
    if args.eval_data is None:
        held_out = hold_out_chats(chats)
        held_out_rows = [row for key, _, row in sorted_by_chat(chats.rows) if key in held_out]
        train = [entry for entry in chats.rows if entry[0] not in held_out]
        if not train and len(chats.rows) > 1:
            # Copies of one chat, as in a trial.
            train = chats.rows
            runtime.print0(f"--data {args.data}: all chats are equal, also what is held out")
    else:
        eval_chats = read_chats("--eval-data", args, chat, chat_rows)
        check_eval_chats(args, chats, eval_chats)
        held_out = eval_chats.conversations
        held_out_rows = [row for _, _, row in eval_chats.rows]
        train = chats.rows
        data.check_same_eval_data(args.eval_data, hash_of_rows(held_out_rows))

    train_rows = [row for _, _, row in train]
    check_enough(args, train_rows, held_out_rows, chats)
    print_rows(chat, train_rows, len({key for key, _, _ in train}), args.seq_len)
    longest = max(len(row.tokens) - 1 for row in train_rows + held_out_rows)
    args.seq_len = min(args.seq_len, longest)

    mixture = mixture_of(args, train)
    if args.eval_data is None:
        sha256 = hash_of_rows(train_rows + held_out_rows)
    else:
        # the hash tells which rows are trained on: a run must not resume with 5 % held out
        sha256 = f"all of {hash_of_rows(train_rows)}"
    if mixture is not None:
        sha256 += f" mixed {mixture}"
    corpus = data.Corpus(train_rows, held_out_rows, chat.vocab_size, sha256, mixture=mixture)
    return corpus, list(held_out.values())


def read_chats(flag: str, args, chat: Chat, chat_rows: Callable) -> Chats:
    """Return the chats in the files of `flag`, with rows of at most --seq-len inputs.

    Print what is left out. Raise UserError for a chat that cannot be used.
    """
    value = args.data if flag == "--data" else args.eval_data
    names = [name for name, _ in cli.split_mixture(flag, value)]
    chats = Chats()
    for number, file in enumerate(names):
        for where, record in read_records(file, flag):
            try:
                conversation = read_conversation(record)
                check_keys(chat, conversation)
                rows = rows_of(chat, conversation, chat_rows)
                check_texts(chat, conversation)
            except Exception as error:  # a template may raise any exception
                reason = str(error) or repr(error)
                raise exits.UserError(f"{flag} {file}, {where}: {reason}") from None

            place = where if len(names) == 1 else f"{file}, {where}"
            if not rows:
                chats.left_out["rows without an answer of the role assistant"].append(place)
            elif conversation.messages and conversation.messages[-1]["role"] != "assistant":
                chats.left_out["messages behind the last answer"].append(place)
            key = hash_of(conversation)
            for ids, counts in rows:
                if not any(counts[1:]):  # such as an empty text: eos alone
                    chats.left_out["rows without a target"].append(place)
                    continue
                if len(ids) - 1 > args.seq_len:
                    chats.longest_left_out = max(chats.longest_left_out, len(ids) - 1)
                    ids = ids[: args.seq_len + 1]
                    counts = counts[: args.seq_len + 1]
                    if args.too_long == "skip" or not any(counts[1:]):
                        chats.left_out[f"rows longer than --seq-len {args.seq_len}"].append(place)
                        continue
                    chats.left_out[f"ends of rows, cut to --seq-len {args.seq_len}"].append(place)
                chats.conversations[key] = conversation
                row = Row(np.array(ids, np.int32), np.array(counts))
                chats.rows.append((key, number, row))
    print_left_out(f"{flag} {value}", chats)
    return chats


def rows_of(
    chat: Chat, conversation: Conversation, chat_rows: Callable
) -> list[tuple[list[int], list[bool]]]:
    """Return the rows of a conversation. A text that is no chat is one row of targets."""
    messages, tools, first_answer, text = conversation
    if text is None:
        return chat_rows(chat, messages, tools, first_answer)
    ids = chat.encode_text(text)
    if ids[-1:] != [chat.end]:
        ids = [*ids, chat.end]
    return [(ids, [True] * len(ids))]


def hold_out_chats(chats: Chats) -> dict[str, Conversation]:
    """Return the chats to hold out, by their hash."""
    count = len(chats.conversations)
    held_out_count = max(math.ceil(count * stdlib_text.HELD_OUT), min(QUESTIONS, count // 4))
    keys = sorted(chats.conversations)[:held_out_count]
    return {key: chats.conversations[key] for key in keys}


def sorted_by_chat(rows: list[tuple[str, int, Row]]) -> list[tuple[str, int, Row]]:
    """Return rows in the order of the hashes of their chats."""
    return sorted(rows, key=lambda entry: entry[0])


def mixture_of(args, train: list[tuple[str, int, Row]]) -> list[tuple[int, float]] | None:
    """Return the number of rows and the weight of each file of --data; None without weights.

    Raise UserError for a file without a row to train on.
    """
    if not cli.has_mixture_weights("--data", args.data):
        return None
    mixture = []
    for number, (name, weight) in enumerate(cli.split_mixture("--data", args.data)):
        count = sum(1 for _, part, _ in train if part == number)
        if count == 0:
            raise exits.UserError(
                f"--data {args.data}: {name} has no row to train on: leave it out"
            )
        mixture.append((count, weight))
    return mixture


def check_eval_chats(args, chats: Chats, eval_chats: Chats) -> None:
    """Raise UserError if --eval-data has no row, or only chats that are trained on.

    Print a line if some of its chats are trained on.
    """
    flag = f"--eval-data {args.eval_data}"
    if not eval_chats.rows:
        reasons = ""
        for reason, places in eval_chats.left_out.items():
            reasons += f", {len(places)} {reason}"
        raise exits.UserError(f"{flag} has no row to evaluate on{reasons}: add other chats")
    count = len(eval_chats.conversations)
    common = len(chats.conversations.keys() & eval_chats.conversations.keys())
    if common == count:
        raise exits.UserError(
            f"{flag}: all its chats are also in --data {args.data}, and would be trained on: "
            "use other chats, or leave out --eval-data, which holds out 5 % of --data"
        )
    runtime.print0(f"{flag}: {count} chats held out")
    if common:
        runtime.print0(f"  {common} of them are also in --data {args.data}, and are trained on")


def hash_of(conversation: Conversation) -> str:
    """Return the SHA-256 of a conversation."""
    content = conversation.messages or conversation.text
    if conversation.tools:
        content = [content, conversation.tools]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def print_left_out(flag: str, chats: Chats) -> None:
    """Print what is left out, and ten of the places."""
    for what, places in chats.left_out.items():
        some = ", ".join(places[:10])
        if len(places) > 10:
            some += ", ..."
        runtime.print0(f"left out of {flag}: {len(places)} {what}: {some}")
    if chats.longest_left_out:
        runtime.print0(f"  --seq-len {chats.longest_left_out} would take them all")


def check_enough(args, train_rows: list[Row], held_out_rows: list[Row], chats: Chats) -> None:
    """Raise UserError if the rows are too few for a step."""
    if len(train_rows) >= args.global_batch_size:
        return
    counts = [f"{len(train_rows)} rows to train on"]
    if args.eval_data is None:
        counts.append(f"{len(held_out_rows)} held out")
    for reason, places in chats.left_out.items():
        counts.append(f"{len(places)} {reason}")
    found = ", ".join(counts)
    needed = f"--global-batch-size is {args.global_batch_size}"
    fix = "add different chats, or lower --global-batch-size"
    if chats.longest_left_out:
        fix = f"raise --seq-len to {chats.longest_left_out}, {fix}"
    raise exits.UserError(f"--data {args.data} has {found}, and {needed}: {fix}")


def print_rows(chat: Chat, rows: list[Row], chats: int, seq_len: int) -> None:
    """Print the size of an epoch, and the first row, with its targets between >> and <<.

    Rows of seq_len inputs may have been cut, and then say nothing about the end of an answer.
    """
    tokens = sum(len(row.tokens) for row in rows)
    targets = sum(int(row.counts.sum()) for row in rows)
    runtime.print0(
        f"an epoch: {chats} chats, {len(rows)} rows, {tokens:,} tokens, {targets:,} of them targets"
    )
    if len(rows) > chats:
        runtime.print0(
            "  more rows than chats: some come twice, or the chat template rewrites earlier turns"
        )
    row = rows[0]
    changes = np.flatnonzero(np.diff(row.counts)) + 1
    text = ""
    for ids, counts in zip(
        np.split(row.tokens, changes), np.split(row.counts, changes), strict=True
    ):
        part = chat.decode(ids.tolist())
        text += f">>{part}<<" if counts[0] else part
    runtime.print0(
        f"the first row, {len(row.tokens)} tokens, {row.counts.sum()} of them targets:\n  {text!r}"
    )
    answers = [row.tokens[row.counts].tolist() for row in rows if len(row.tokens) <= seq_len]
    if answers and not chat.stops.intersection(answers[0]):
        answer = answers[0]
        runtime.print0(
            f"  an answer ends with {chat.decode(answer[-2:])!r}, and generation stops at "
            f"{chat.decode(sorted(chat.stops))!r} alone: add the token that ends an answer to "
            "eos_token_id in generation_config.json"
        )


def print_padding(rows: Rows, packed: PackedRows, micro_batch_size: int) -> dict[str, float]:
    """Print how much of the inputs is padding, and return it, unpacked and packed, as shares."""
    before = rows.padding_share(micro_batch_size)
    after = packed.padding_share()
    runtime.print0(
        f"packed: {len(rows)} rows in {len(packed)} of {packed.size:,} tokens; padding is "
        f"{after:.1%} of the tokens, unpacked it is {before:.1%} of micro-batches of "
        f"{micro_batch_size}"
    )
    return {"unpacked_padding_share": before, "padding_share": after}


# 3 The adapters


@torch.no_grad()
def init_adapters(net: nn.Module, seed: int) -> None:
    """Set A to random numbers and B to zero, sharded or not.

    The numbers depend on the seed and the name alone, so they are the same on any number of ranks.
    """
    for name, parameter in net.named_parameters():
        if name.endswith("lora_A"):
            held, place = local_part(parameter)
            # the deviation of kaiming_uniform_ in LoRALinear; random_weight has 0.02
            deviation = (3 * parameter.shape[1]) ** -0.5
            drawn = random_weight(name, parameter.shape, seed)
            held.copy_(drawn[place] / 0.02 * deviation)
        elif name.endswith("lora_B"):
            parameter.zero_()


def quantize_weights(net: nn.Module, model_name: str) -> None:
    """Fill the QLoRALinear layers with the weights of a Hugging Face folder.

    A rank reads its rows of one matrix, and quantizes them, before it reads the next one.
    """
    stored = StoredWeights(Path(model_name), "--model")
    layers = {}
    for name, module in net.named_modules():
        if isinstance(module, lora.QLoRALinear):
            layers[name] = module
    names = report.progress_bar(list(layers), "quantizing", unit="tensor", delay=BAR_DELAY)
    for name in names:
        codes, (rows, _) = local_part(layers[name].codes)
        weight = stored.read(f"{name}.weight", (rows, slice(None)))
        layers[name].quantize(weight.to(codes.device))


# 4 Answers to held-out questions


def questions(
    chat: Chat, conversations: list[Conversation], config: shapes.Config
) -> list[list[int]]:
    """Return the ids of the first prompt of some conversations, and of the beginnings of texts.

    A prompt that leaves no room for an answer loses its beginning.
    """
    longest = config.max_position_embeddings - ANSWER_TOKENS
    prompts = []
    for messages, tools, first_answer, text in conversations[:QUESTIONS]:
        if text is not None:
            ids = chat.encode_text(text)
            prompts.append(ids[: min(PROMPT_TOKENS, len(ids) // 2 + 1)])
            continue
        roles = [message["role"] for message in messages]
        position = roles.index("assistant", first_answer)
        prompt_text, _ = render_answer(chat, messages, position, tools)
        prompt = [*chat.start, *chat.encode(prompt_text)]
        prompts.append(prompt[-longest:])
    return prompts


@torch.no_grad()
def greedy(
    net: nn.Module, chat: Chat, prompts: list[list[int]], device, unpack: Callable
) -> list[list[int]]:
    """Return at most ANSWER_TOKENS of the likeliest tokens behind each prompt.

    All prompts are one batch, without a cache. Every rank has to call this, because a sharded model
    gathers its weights in forward; all continue with the tokens of rank 0. A model may have more
    tokens than its tokenizer: these are not chosen.
    """
    net.eval()
    answers = [[] for _ in prompts]
    rows = []

    def is_done(answer: list[int]) -> bool:
        return len(answer) == ANSWER_TOKENS or bool(chat.stops.intersection(answer))

    def last_of_each(_, inputs: tuple[Tensor]) -> Tensor:
        (hidden,) = inputs  # [prompts, tokens, hidden]
        last = [len(row) - 1 for row in rows]
        return hidden[range(len(rows)), last]

    # The head computes one row of logits for each prompt. With a vocabulary of 128k, those of all
    # tokens of long prompts could take gigabytes.
    hook = net.lm_head.register_forward_pre_hook(last_of_each)
    while not all(is_done(answer) for answer in answers):
        rows = []
        for prompt, answer in zip(prompts, answers, strict=True):
            rows.append(torch.tensor(prompt + answer))
        # padded at the end, where causal attention does not look
        inputs = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
        tokens, masks = unpack(inputs.to(device))
        logits = net(tokens, **masks)  # [prompts, vocabulary]
        next_tokens = logits[:, : chat.vocab_size].argmax(dim=-1)
        dist.broadcast(next_tokens, 0)
        for answer, token in zip(answers, next_tokens.tolist(), strict=True):
            if not is_done(answer):
                answer.append(token)
    hook.remove()
    net.train()
    return answers


def print_answers(
    chat: Chat, prompts: list[list[int]], before: list[list[int]], after: list[list[int]]
) -> list[str]:
    """Print each question with its answers before and after training. Return the later ones."""
    for prompt, first, second in zip(prompts, before, after, strict=True):
        runtime.print0(
            f"held out: {chat.decode(prompt)!r}\n"
            f"  before: {chat.decode(first)!r}\n"
            f"  after:  {chat.decode(second)!r}"
        )
    return [chat.decode(tokens) for tokens in after]


# 5 Folders that others load


def check_folders(args, inputs: dict[str, Path], mark: str) -> None:
    """Raise UserError if write_folders could not write its folders after the training.

    An input must not be in them, such as the model of --model, and what is there must have the mark
    of this run. The files that are copied must be readable.
    """
    tokenizer_files(Path(args.model))
    if args.tokenizer:
        tokenizer_files(Path(args.tokenizer))
    if args.run_dir is None:
        return
    for name in FOLDERS:
        folder = args.run_dir / name
        cli.check_not_input("--run-dir", folder, inputs, with_content=True)
        files.check_replaceable(folder, mark)


def write_folders(
    net: model.Transformer, chat: Chat, folder: Path, args, dtype: torch.dtype, mark: str
) -> None:
    """Write model/, with merged adapters, and adapter/ for peft. Every rank has to call this.

    transformers, vLLM and the scripts of this repository read model/. `mark` marks the folders, as
    common/files.py says: a resumed run replaces only the folders that it has written.
    """
    layers = {}
    for name, module in net.named_modules():
        if isinstance(module, lora.LoRALinear):
            layers[name] = module
    weights = {}
    trained = []
    tensors = {}  # on the meta device
    for name, weight in net.named_parameters():
        weights[name] = weight.detach()
        owner, _, kind = name.rpartition(".")
        if kind in ("lora_A", "lora_B"):
            trained.append(name)
        elif kind in ("scale", "minimum"):
            continue  # of 4 bits, with the codes
        elif kind == "codes":
            shape = (layers[owner].out_features, layers[owner].in_features)
            tensors[f"{owner}.weight"] = torch.empty(shape, dtype=dtype, device="meta")
        else:
            tensors[name] = torch.empty(weight.shape, dtype=dtype, device="meta")

    def read(name: str) -> Tensor:
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            return runtime.full_tensor(weights[name]).to(dtype)
        # a rank multiplies its rows of B with all of A, which is small
        return runtime.full_tensor(layer.merged_weight()).to(dtype)

    if net.config.experts is not None:
        tensors, read = in_files(tensors, read, net.config)
    config = shapes.config_json(net.config)
    if shapes.has_weights(args.model):
        config = shapes.read_config_json(args.model)
        if not net.config.tie_word_embeddings:  # read_config may have untied the head
            config["tie_word_embeddings"] = False
    kind = str(dtype).removeprefix("torch.")
    is_bytes = chat.save_tokenizer is None
    tokenizer = "bytes" if is_bytes else args.tokenizer or args.model
    config |= {"dtype": kind, "torch_dtype": kind, **special_ids(args.model, tokenizer)}
    save = partial(save_tokenizer, chat, args)
    write_folder(tensors, read, folder / MODEL, config, save, mark)

    adapters = {name: runtime.full_tensor(weights[name]).cpu() for name in trained}
    if adapters:
        write = partial(write_adapter_folder, adapters, chat, folder / ADAPTER, args, mark)
        runtime.on_rank0(write)


def save_tokenizer(chat: Chat, args, folder: Path) -> None:
    """Write the tokenizer that the model was trained with, and the generation settings of its base.

    Programs that ask the model with another tokenizer or template would get worse answers.
    """
    name = args.tokenizer or args.model
    if chat.save_tokenizer is None:
        name = "bytes"
    elif Path(name).is_dir():
        copy_tokenizer(Path(name), folder)
    else:  # of the hub
        chat.save_tokenizer(folder)
    keep_generation_config(args.model, name, folder)


def write_adapter_folder(
    adapters: dict[str, Tensor], chat: Chat, folder: Path, args, mark: str
) -> None:
    """Write adapter/: the adapters, the absolute path of their base, tokenizer and template."""
    unfinished = files.start_folder(folder)
    write_adapter(
        adapters,
        unfinished,
        base=os.path.abspath(args.model),  # peft may load it from any directory
        rank=args.adapters,
        alpha=args.alpha,
        dropout=args.dropout,
    )
    if chat.save_tokenizer is not None:
        chat.save_tokenizer(unfinished)
    files.finish_folder(unfinished, folder, mark)


@torch.no_grad()
def compare_with_transformers(
    folder: Path,
    config: shapes.Config,
    prompt: list[int],
    device: torch.device,
) -> float | None:
    """Return the relative error in fp32 of lm/model.py's logits against transformers'.

    Both read this folder. Rank 0 computes both, on its GPU if they fit there, else on the CPU.
    Return None if transformers is not installed, or if the folder is too large to be read twice.
    """
    size = sum(file.stat().st_size for file in folder.iterdir())
    if size > LARGEST_COMPARED or not find_spec("transformers"):
        runtime.print0(f"{folder} was not compared with transformers: not installed, or over 4 GB")
        return None
    with reference.comparison(device, needed_bytes=2 * 4 * shapes.parameter_count(config)) as where:
        error = logits_error(folder, config, prompt, where)
    assert error < 1e-3, (
        f"lm/model.py and transformers differ by {error:.1e} of the logits from {folder}"
    )
    line = f"checked: from {folder}, transformers and lm/model.py give the same logits within 1e-3"
    runtime.print0(report.fold(line))
    return error


def logits_error(
    folder: Path,
    config: shapes.Config,
    prompt: list[int],
    device: torch.device,
) -> float:
    """Return |ours - transformers'| / |transformers'| of the prompt's logits, as norms."""
    tokens = torch.tensor([prompt[-COMPARED_TOKENS:]], device=device)
    expected = reference.read_transformers(folder, device)(tokens).logits
    ours = build(str(folder), config, seed=0, device=device).eval()
    found = ours(tokens)
    difference = torch.linalg.vector_norm(found - expected)
    return (difference / torch.linalg.vector_norm(expected)).item()
