"""Read chats, turn them into token ids, and write what a fine-tuning run leaves behind.

A file of chats becomes rows in five steps:

    read_records       the file            -> JSON objects, each with the number of its line
    read_conversation  a JSON object       -> messages, and the tools that the assistant may call
    render_answer      messages            -> text of a prompt, and text of the answer to it
    encode_answer      both texts          -> token ids of both, the last of which ends the answer
    chat_rows          ids of all answers  -> rows with targets (in finetune.py)
"""

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common import cli, exits, files, report, runtime
from lm import data, lora, model, reference, shapes, stdlib_text
from lm.hf_folder import (
    copy_tokenizer,
    keep_generation_config,
    special_ids,
    tokenizer_files,
    write_adapter,
    write_folder,
)
from lm.tokenizer import (
    has_tokenizer,
    largest_id,
    open_tokenizer,
    stop_ids,
    tokenizer_in_errors,
)
from lm.weights import build, random_weight
from planner import memory, plan, shape
from training.batches import PADDING, Batches
from training.digest import local_part

MODEL = "model"  # what finetune.py writes into the folder of a run
ADAPTER = "adapter"
FOLDERS = (MODEL, ADAPTER)
QUESTIONS = 3
ANSWER_TOKENS = 8  # each one takes a forward over everything before it
ALPHA_PER_RANK = 2  # alpha / rank scales the adapter's output
LARGEST_COMPARED = 4e9  # bytes of a folder that transformers reads again

FORM = (
    'a chat is {"messages": [{"role", "content"}, ...]} or {"prompt", "completion"}, with "tools"'
    " if it has any"
)
LISTS = ("messages", "conversations")
KEYS = (*LISTS, "prompt", "completion", "tools")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
MESSAGE_KEYS = {"from": "role", "value": "content"}  # ShareGPT's names
# keys that name a speaker or a call: a template may ignore them, since they hold no text
NAMES = ("role", "content", "name", "tool_call_id")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
PROBE_ANSWER = "xyzzy"  # in no template
PROBE = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": PROBE_ANSWER},
    {"role": "user", "content": "bye"},
]


# 1 The file: JSON objects, then conversations


def read_records(file: str, flag: str = "--data") -> list[tuple[str, object]]:
    """Return the JSON values of a file, each with its place, such as ("line 3", {...}).

    The file has one value per line, or is one JSON array. Raise UserError, with the name of `flag`,
    if it cannot be read.
    """
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # -sig skips a byte order mark
    except FileNotFoundError:
        raise exits.UserError(f"{flag} {file} does not exist") from None
    except (OSError, ValueError) as error:
        raise exits.UserError(f"{flag} {file} is no UTF-8 .jsonl file of chats: {error}") from None
    if text.lstrip().startswith("["):
        array = parse_json(text, f"{flag} {file}, a JSON array")
        return [(f"entry {number}", value) for number, value in enumerate(array, 1)]
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"line {number}"
            records.append((where, parse_json(line, f"{flag} {file}, {where}")))
    return records


def parse_json(text: str, where: str) -> object:
    """Return a JSON value. Raise UserError, which begins with `where`, if the text is not one."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        if error.lineno > 1:
            place = f"line {error.lineno}, {place}"
        raise exits.UserError(f"{where} is not JSON: {error.msg} ({place})") from None
    except (ValueError, RecursionError) as error:
        raise exits.UserError(f"{where} is not JSON: {error}") from None


class Conversation(NamedTuple):
    """The messages of a chat, and the tools that its assistant may call.

    Messages before number `first_answer` are context. The assistant may be among them, but nobody
    asks the model for these answers, so they are no targets.
    """

    messages: list[dict]
    tools: list[dict] | None = None
    first_answer: int = 1


def read_conversation(record: object) -> Conversation:
    """Return the conversation in a JSON object. Raise ValueError for any other content.

    For example {"prompt": "hi", "completion": "hello"} and {"conversations": [{"from": "human",
    "value": "hi"}, {"from": "gpt", "value": "hello"}]} both have the messages [{"role": "user",
    "content": "hi"}, {"role": "assistant", "content": "hello"}].
    """
    if not isinstance(record, dict):
        raise ValueError(f"{FORM}, not {shorten(record)}")
    check_surrogates(record)
    record = {key: value for key, value in record.items() if value is not None}
    unknown = [key for key in record if key not in KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}: remove it; {FORM}")
    tools = read_tools(record.pop("tools", None))

    if len(record) == 1 and next(iter(record)) in LISTS:
        messages = read_messages(*record.values(), role="")
        return Conversation(messages, tools)
    if set(record) == {"prompt", "completion"}:
        prompt = read_messages(record["prompt"], role="user")
        completion = read_messages(record["completion"], role="assistant")
        return Conversation(prompt + completion, tools, first_answer=max(1, len(prompt)))
    raise ValueError(f"{FORM}, not the keys {', '.join(record) or 'of an empty object'}")


def shorten(value: object) -> str:
    """Return at most 40 characters that show a JSON value."""
    text = json.dumps(value)
    if len(text) > 40:
        return f"{text[:37]}..."
    return text


def check_surrogates(record: dict) -> None:
    """Raise ValueError if a text has half of a surrogate pair, which is no character."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{half!r} is half of a surrogate pair: an emoji was cut in two") from None


def read_tools(tools: object) -> list[dict] | None:
    """Return a list of tools, which may be given as JSON text. None if there are none."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except ValueError as error:
            raise ValueError(f'"tools" is not JSON: {error}') from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f'"tools" is a list of objects, not {shorten(tools)}')
    return tools


def read_messages(messages: object, role: str) -> list[dict]:
    """Return a list of messages. A text is one message of `role`, if that is not empty."""
    if role and isinstance(messages, str):
        return [{"role": role, "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{FORM}, not {shorten(messages)}")
    return [read_message(message, f"message {i}") for i, message in enumerate(messages, 1)]


def read_message(message: object, where: str) -> dict:
    """Return a message with a role, and with text or tool calls. ValueError if it has none."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} is no object: {shorten(message)}")
    known = {}
    for key, value in message.items():
        if value is not None and value != []:  # keys that other lines of a data set have
            known[MESSAGE_KEYS.get(key, key)] = value

    role = known.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has no role")
    known["role"] = ROLES.get(role, role)

    if "tool_calls" in known:
        known["tool_calls"] = read_tool_calls(known["tool_calls"], where)
        known.setdefault("content", None)
    elif "content" not in known:
        raise ValueError(f"{where} has no content")
    known["content"] = read_content(known["content"], where)
    return known


def read_content(content: object, where: str) -> str | None:
    """Return the text of a message, which may come as a list of text parts."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and set(part) == {"type", "text"}:
                texts.append(part["text"])
    if not texts or len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: the content is no text, but {shorten(content)}")
    return "\n".join(texts)


def read_tool_calls(calls: object, where: str) -> list[dict]:
    """Return the tool calls of a message, with their arguments as dicts.

    OpenAI's API has arguments as text, and most chat templates expect a dict.
    """
    form = 'a tool call is {"function": {"name", "arguments"}}'
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls is a list, not {shorten(calls)}")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: {form}, not {shorten(call)}")
    try:
        return [with_arguments_as(dict, call) for call in calls]
    except ValueError as error:
        raise ValueError(f"{where}: the arguments of a call are not JSON: {error}") from None


def with_arguments_as(kind: type, call: dict) -> dict:
    """Return a tool call whose arguments are a dict, or a str of JSON."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, dict) and kind is str:
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and kind is dict:
        arguments = json.loads(arguments or "{}")
    return call | {"function": call["function"] | {"arguments": arguments}}


# 2 The format: messages to text, text to token ids


@dataclass(frozen=True)
class Chat:
    """The format of a model's chats.

    template(tools) is the source of the chat template that serves a chat with these tools.
    render(messages, tools=None, add_generation_prompt=False) is the text of messages; with
    add_generation_prompt it ends where the model is asked to answer.
    """

    template: Callable[[list[dict] | None], str]
    render: Callable[..., str]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end: int  # the tokenizer's eos
    stops: frozenset[int]  # ids at which generation stops: some models have several
    special: frozenset[int]  # ids of special tokens: one of these ends each answer
    vocab_size: int
    start: tuple[int, ...] = ()  # ids with which the tokenizer begins each prompt, such as bos
    save_tokenizer: Callable[[Path], object] | None = None

    def has_end(self, ids: list[int]) -> bool:
        """Return whether the last id that is not white space is a special token."""
        for token in reversed(ids):
            if token in self.special:
                return True
            if self.decode([token]).strip():
                return False
        return False


def render_plainly(
    messages: list[dict], tools: None = None, add_generation_prompt: bool = False, *, end: str
) -> str:
    """Return lines of `role: content`, for models without a chat template.

    The prompt ends with "assistant:", without the space: tokenizers join a space to the word
    behind it, and the model would be asked with other tokens than it was trained on.
    """
    lines = [f"{message['role']}: {message['content']}{end}\n" for message in messages]
    if add_generation_prompt:
        lines.append("assistant:")
    return "".join(lines)


def plain_template(tools: list[dict] | None) -> str:
    """Return the keys of a message that render_plainly reads."""
    return "role content"


def read_chat_format(name: str, date: datetime | None = None) -> Chat:
    """Return the chat format of a tokenizer, or of bytes for a model without a tokenizer.

    name: a folder or a name that transformers knows. Raise UserError if it cannot be used.
    date: what a template that writes the date of today writes instead; None: today.
    """
    without_tokenizer = Path(name).exists() and not has_tokenizer(name)
    if name == "bytes" or name in shapes.SIZES or without_tokenizer:
        return byte_chat()
    where = tokenizer_in_errors(name)
    tokenizer = open_tokenizer(name)
    if tokenizer.eos_token is None:
        raise exits.UserError(f"{where} needs an eos_token: it ends an answer")

    render = partial(render_with_template, tokenizer, date=date)
    template = partial(template_source, tokenizer)
    start = ()  # the template has written bos, if the model is asked with one
    if tokenizer.chat_template is None:
        runtime.print0(
            f"{name} has no chat template: chats become lines of"
            f" `role: content{tokenizer.eos_token}`"
        )
        render = partial(render_plainly, end=tokenizer.eos_token)
        template = plain_template
        start = ids_before_text(tokenizer, where)

    special = set(tokenizer.all_special_ids)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special.add(token_id)
    stops = stop_ids(name, tokenizer, flag="--tokenizer")
    return Chat(
        template=template,
        render=render,
        encode=partial(tokenizer.encode, add_special_tokens=False, verbose=False),
        decode=tokenizer.decode,
        end=tokenizer.eos_token_id,
        stops=stops,
        special=frozenset(special | stops),
        vocab_size=largest_id(tokenizer.get_vocab()) + 1,
        start=start,
        save_tokenizer=tokenizer.save_pretrained,
    )


def ids_before_text(tokenizer, where: str) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before each text by itself: bos, or none.

    Without a chat template, programs ask the model with the text of a prompt, and so with these
    ids. Ids that the tokenizer puts behind a text are no part of a row: a prompt that ends with eos
    asks for nothing.
    """
    encoding = tokenizer("assistant:", return_special_tokens_mask=True)
    ids = encoding.input_ids
    text_begins = encoding.special_tokens_mask.index(0)
    text_ends = len(ids) - encoding.special_tokens_mask[::-1].index(0)
    if text_ends < len(ids):
        runtime.print0(
            f"{where} writes {tokenizer.decode(ids[text_ends:])!r} behind each text: ask the "
            "trained model without it"
        )
    return tuple(ids[:text_begins])


def byte_chat() -> Chat:
    """Return the format of a model that reads bytes: lines that end with a byte 0."""
    end = 0
    return Chat(
        template=plain_template,
        render=partial(render_plainly, end=chr(end)),
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids).decode(errors="replace"),
        end=end,
        stops=frozenset([end]),
        special=frozenset([end]),
        vocab_size=256,
    )


def template_source(tokenizer, tools: list[dict] | None) -> str:
    """Return the source of the chat template. A tokenizer may have another one for tools."""
    return tokenizer.get_chat_template(tools=tools)


def render_with_template(
    tokenizer,
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = False,
    date: datetime | None = None,
) -> str:
    """Return the text of messages by the tokenizer's chat template."""
    import jinja2

    template = tokenizer.get_chat_template(tools=tools)
    if date is not None:
        template = with_date(template, date)
    render = partial(
        tokenizer.apply_chat_template,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        chat_template=template,
    )
    try:
        return render(messages)
    except (TypeError, jinja2.UndefinedError):
        # DeepSeek's templates add content and the arguments of a tool call to a text
        return render([with_texts(message) for message in messages])


def with_date(template: str, date: datetime) -> str:
    """Return a chat template that writes `date` where it wrote the date of today."""

    def written(call: re.Match) -> str:
        return repr(date.strftime(call["format"]))

    return re.sub(r"strftime_now\((?P<quote>['\"])(?P<format>.*?)(?P=quote)\)", written, template)


def with_texts(message: dict) -> dict:
    """Return a message whose content is text, and whose tool calls have their arguments as text."""
    if "tool_calls" not in message:
        return message
    calls = [with_arguments_as(str, call) for call in message["tool_calls"]]
    return message | {"content": message["content"] or "", "tool_calls": calls}


def check_keys(chat: Chat, conversation: Conversation) -> None:
    """Raise ValueError for a key that the chat template does not read.

    Without this check its text would be left out in silence.
    """
    template = chat.template(conversation.tools)
    if conversation.tools and not has_word(template, "tools"):
        raise ValueError("the chat template takes no tools: remove the key 'tools'")
    known = set(NAMES)
    # transformers offers thoughts to a template under each of these keys
    if "<think>" in template or any(has_word(template, key) for key in THOUGHTS):
        known.update(THOUGHTS)
    for number, message in enumerate(conversation.messages, 1):
        for key in message:
            if key not in known and not has_word(template, key):
                raise ValueError(
                    f"message {number}: the chat template does not read the key {key!r}: remove it"
                )


def check_texts(chat: Chat, conversation: Conversation) -> None:
    """Raise ValueError for a text or tools of the conversation that reach no row.

    A template passes over roles that it does not know, or over all messages but the last. So each
    text gets another end, and then the template has to write another text.
    """
    messages, tools, first_answer = conversation
    roles = [message["role"] for message in messages]
    answers = [i for i in range(first_answer, len(roles)) if roles[i] == "assistant"]
    if not answers:
        return
    messages = messages[: answers[-1] + 1]
    rendered = chat.render(messages, tools=tools)
    if tools and chat.render(messages) == rendered:
        raise ValueError("the chat template leaves out the tools: remove the key 'tools'")

    places = []
    for position, message in enumerate(messages):
        for key in message:
            if is_text_for_template(message, key):
                places.append((position, key))
    if all_are_rendered(chat, messages, tools, places):
        return
    for position, key in places:
        if not is_rendered(chat, messages, tools, position, key, rendered):
            role = messages[position]["role"]
            raise ValueError(
                f"message {position + 1}: the chat template leaves out the {key} of this message "
                f"of the role {role!r}: remove the message, or use a template that writes it"
            )


def is_text_for_template(message: dict, key: str) -> bool:
    """Return whether a value of a message is a text that a row has to have.

    Templates leave out earlier thoughts by design, and may leave out names.
    """
    if key != "content" and key in (*NAMES, *THOUGHTS):
        return False
    value = message[key]
    return isinstance(value, str) and value.strip() != ""


def all_are_rendered(
    chat: Chat, messages: list[dict], tools: list[dict] | None, places: list[tuple[int, str]]
) -> bool:
    """Return whether the template writes words that are added to the texts, another to each.

    If not, it may still write the texts: a template may change words, or fail at them.
    """
    changed = list(messages)
    words = []
    for number, (position, key) in enumerate(places):
        word = f"{PROBE_ANSWER}{number}{PROBE_ANSWER}"
        words.append(word)
        message = changed[position]
        changed[position] = message | {key: message[key] + word}
    try:
        text = chat.render(changed, tools=tools)
    except Exception:  # a template may raise any exception
        return False
    return all(word in text for word in words)


def is_rendered(
    chat: Chat,
    messages: list[dict],
    tools: list[dict] | None,
    position: int,
    key: str,
    rendered: str,
) -> bool:
    """Return whether the template writes another text than `rendered` if one text is longer."""
    message = messages[position]
    changed = list(messages)
    changed[position] = message | {key: message[key] + PROBE_ANSWER}
    try:
        return chat.render(changed, tools=tools) != rendered
    except Exception:  # the template reads the text, since it fails at this one
        return True


def has_word(text: str, word: str) -> bool:
    """Return whether a text has this word, and not just as a part of a longer name."""
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


# 3 One answer: its prompt and itself, as text and as token ids


def encode_answer(
    chat: Chat, messages: list[dict], position: int, tools: list[dict] | None = None
) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt, and the ids that the model has to answer with.

    position: index of the answer in messages. The prompt's ids are those that the model is asked
    with. The last ids of the answer make generation stop.

        [..., {"role": "assistant", "content": "hello"}]
        prompt  ... <|im_start|> assistant \\n
        answer  hello <|im_end|> \\n
    """
    prompt_text, answer_text = render_answer(chat, messages, position, tools)
    prompt = chat.encode(prompt_text)
    turn = chat.encode(prompt_text + answer_text)
    answer = turn[len(prompt) :]
    if turn[: len(prompt)] != prompt:  # a token reaches across the border
        answer = encode_apart(chat, answer_text)
    if not chat.has_end(answer) and not ends_with_marker(chat, answer_text):
        answer = answer + encode_end(chat, messages, position, tools)
    return [*chat.start, *prompt], answer


def encode_apart(chat: Chat, text: str) -> list[int]:
    """Return the ids of a text that follows another one.

    Tokenizers of the SentencePiece kind begin each text with a space. So the text is tokenized
    behind a line break, whose ids are then removed, unless the two share a token.
    """
    line_break = chat.encode("\n")
    ids = chat.encode("\n" + text)
    if ids[: len(line_break)] == line_break:
        return ids[len(line_break) :]
    return chat.encode(text)


def render_answer(
    chat: Chat, messages: list[dict], position: int, tools: list[dict] | None = None
) -> tuple[str, str]:
    """Return the text of a prompt, and the text that the chat template writes behind it.

    Raise ValueError if the template writes the answer behind another text.
    """
    prompt = chat.render(messages[:position], tools=tools, add_generation_prompt=True)
    turn = chat.render(messages[: position + 1], tools=tools)
    if turn.startswith(prompt):
        answer = turn[len(prompt) :]
    else:
        answer = answer_after_opened_thoughts(prompt, turn, messages[position])
    if answer is None:
        raise ValueError(
            f"message {position + 1}: the chat template's generation prompt is no prefix of the"
            " rendered reply"
        )
    for call in messages[position].get("tool_calls", []):
        name = call["function"]["name"]
        if name not in answer:
            raise ValueError(
                f"message {position + 1}: the chat template leaves out the call of {name!r}"
            )
    return prompt, answer


def answer_after_opened_thoughts(prompt: str, turn: str, message: dict) -> str | None:
    """Return the answer to a prompt that ends with <think>, or with empty thoughts; else None.

    Such templates (DeepSeek's, Nemotron's) open the thoughts in the generation prompt, and write
    an answer without them. The model has to close the thoughts before it answers:

        prompt   ...<|Assistant|><think>\\n
        turn     ...<|Assistant|>hello<eos>
        returns  its thoughts, if the message has some, then \\n</think>\\n\\nhello<eos>
    """
    opened = re.search(r"<think>\s*(</think>\s*)?$", prompt)
    if opened is None or not turn.startswith(prompt[: opened.start()]):
        return None
    reply = turn[opened.start() :]
    if opened[1]:  # the prompt has closed them: the model is asked for an answer without thoughts
        return re.sub(r"^<think>.*?</think>", "", reply, flags=re.DOTALL).lstrip("\n")
    if reply.startswith("<think>"):  # this template writes empty thoughts in another form
        return reply.removeprefix("<think>").lstrip("\n")
    reply = reply.lstrip("\n")
    return f"{thoughts_of(message)}\n</think>\n\n{reply}"


def thoughts_of(message: dict) -> str:
    """Return the thoughts in a message: under a key, or before </think> in its content."""
    for key in THOUGHTS:
        if message.get(key):
            return message[key].strip("\n")
    thoughts, closed, _ = (message["content"] or "").partition("</think>")
    if not closed:
        return ""
    return thoughts.strip().removeprefix("<think>").strip("\n")


def ends_with_marker(chat: Chat, answer: str) -> bool:
    """Return whether an answer ends with text that the chat template writes behind each answer.

    Such a marker, for example "### End", need not be a token of the tokenizer.
    """
    turn = chat.render(PROBE[:2])
    marker = turn.rpartition(PROBE_ANSWER)[2].strip()
    return marker != "" and answer.rstrip().endswith(marker)


def encode_end(
    chat: Chat, messages: list[dict], position: int, tools: list[dict] | None
) -> list[int]:
    """Return the ids with which the next turn begins, for templates that do not end an answer.

    GLM-4's template writes <|user|> next, or <|observation|> after a tool call, and generation
    stops there. Raise ValueError if the next turn begins with no special token.
    """
    before = PROBE[:2]
    after = PROBE
    if "tool_calls" in messages[position]:
        before = messages[: position + 1]
        result = {"role": "tool", "content": "done"}
        if position + 1 < len(messages) and messages[position + 1]["role"] == "tool":
            result = messages[position + 1]
        after = [*before, result]
    else:
        tools = None
    text_before = chat.render(before, tools=tools)
    text_after = chat.render(after, tools=tools)
    if text_after.startswith(text_before):
        ids = chat.encode(text_after[len(text_before) :])
        for count in range(1, len(ids) + 1):
            if chat.has_end(ids[:count]):
                return ids[:count]
            if chat.decode(ids[:count]).strip():
                break
    raise ValueError(
        f"message {position + 1}: the chat template writes no token behind the answer at which"
        " generation stops: write {{ eos_token }} there"
    )


# 4 Rows: what a training step reads


class Row(NamedTuple):
    """The token ids of a row, and which of them are targets."""

    tokens: np.ndarray  # int32
    counts: np.ndarray  # bool


class Rows(torch.utils.data.Dataset):
    """Rows as (inputs, targets), each int64 [seq_len]; the targets are one token ahead.

    Tokens that are no targets are PADDING among the targets. A micro-batch is as long as its
    longest row.
    """

    def __init__(self, rows: list[Row], seq_len: int) -> None:
        self.rows = rows
        self.seq_len = seq_len

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int, length: int | None = None) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(self.rows[i].tokens).long()
        counts = torch.from_numpy(self.rows[i].counts)
        targets = torch.where(counts, tokens, PADDING)
        missing = (length or self.seq_len) - len(tokens) + 1
        inputs = F.pad(tokens[:-1], (0, missing))
        return inputs, F.pad(targets[1:], (0, missing), value=PADDING)

    def __getitems__(self, chosen: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return a micro-batch: DataLoader calls this one."""
        length = max(len(self.rows[i].tokens) - 1 for i in chosen)
        return [self.__getitem__(i, length) for i in chosen]

    def mean_length(self) -> float:
        """Return the mean number of inputs in a row."""
        return sum(len(row.tokens) - 1 for row in self.rows) / len(self.rows)

    def longest(self) -> int:
        """Return the number of inputs in the longest row."""
        return max(len(row.tokens) - 1 for row in self.rows)

    def target_count(self, chosen: list[int]) -> int:
        """Return the number of targets in these rows."""
        return sum(int(self.rows[i].counts[1:].sum()) for i in chosen)


class Chats(NamedTuple):
    """The chats of a file, by their hash: copies of a chat have the same hash."""

    conversations: dict[str, Conversation]
    rows: dict[str, list[Row]]
    left_out: dict[str, list[str]]  # places of rows, by the reason
    behind_answers: list[str]  # places of chats that go on behind their last answer
    longest_left_out: int

    def all_rows(self) -> list[Row]:
        """Return the rows of all chats."""
        rows = []
        for rows_of_chat in self.rows.values():
            rows.extend(rows_of_chat)
        return rows


def load_chats(args, chat: Chat, chat_rows: Callable) -> tuple[data.Corpus, list[Conversation]]:
    """Return the rows to train on and to hold out, and the held-out conversations.

    With --eval-data, its chats are held out, and all chats of --data are for training.
    Else the 5 % of the chats whose hash is lowest are held out, at least QUESTIONS of a dozen
    chats; copies of a chat count once. Set args.seq_len to the longest row, if that is shorter.
    Raise UserError for a chat that cannot be used, and if there are too few.
    """
    chats = read_chats(args.data, "--data", args.seq_len, chat, chat_rows)
    print_left_out("--data", chats)
    if args.eval_data is None:
        train_rows, held_out_rows, held_out = hold_out_chats(args, chats)
        train_chats = len(chats.rows) - len(held_out)
        sha256 = hash_of_rows(train_rows + held_out_rows)
    else:
        eval_chats = read_chats(args.eval_data, "--eval-data", args.seq_len, chat, chat_rows)
        print_left_out("--eval-data", eval_chats)
        check_eval_chats(args, chats, eval_chats)
        train_rows = chats.all_rows()
        held_out_rows = eval_chats.all_rows()
        held_out = list(eval_chats.conversations.values())
        train_chats = len(chats.rows)
        # the hash tells which rows are trained on: a run must not resume with 5 % held out
        sha256 = f"all of {hash_of_rows(train_rows)}"
        data.check_same_eval_data(args.eval_data, hash_of_rows(held_out_rows))

    check_enough(args, train_rows, held_out_rows, chats)
    print_rows(chat, train_rows, train_chats)
    longest = max(len(row.tokens) - 1 for row in train_rows + held_out_rows)
    args.seq_len = min(args.seq_len, longest)
    return data.Corpus(train_rows, held_out_rows, chat.vocab_size, sha256), held_out


def read_chats(file: str, flag: str, seq_len: int, chat: Chat, chat_rows: Callable) -> Chats:
    """Return the chats of a file, with rows of at most `seq_len` inputs.

    Raise UserError, with the name of `flag`, for a chat that cannot be used.
    """
    chats = Chats({}, defaultdict(list), defaultdict(list), [], 0)
    longest_left_out = 0
    for where, record in read_records(file, flag):
        try:
            conversation = read_conversation(record)
            check_keys(chat, conversation)
            found = chat_rows(chat, *conversation)
            check_texts(chat, conversation)
        except Exception as error:  # a template may raise any exception
            reason = str(error) or repr(error)
            raise exits.UserError(f"{flag} {file}, {where}: {reason}") from None
        if not found:
            chats.left_out["without an answer of the role assistant"].append(where)
        elif conversation.messages[-1]["role"] != "assistant":
            chats.behind_answers.append(where)
        key = hash_of(conversation)
        for ids, counts in found:
            if len(ids) - 1 > seq_len:
                chats.left_out[f"longer than --seq-len {seq_len}"].append(where)
                longest_left_out = max(longest_left_out, len(ids) - 1)
            else:
                chats.conversations[key] = conversation
                chats.rows[key].append(Row(np.array(ids, np.int32), np.array(counts)))
    return chats._replace(longest_left_out=longest_left_out)


def hold_out_chats(args, chats: Chats) -> tuple[list[Row], list[Row], list[Conversation]]:
    """Return the rows to train on, the held-out rows and the held-out conversations."""
    rows = chats.rows
    count = max(math.ceil(len(rows) * stdlib_text.HELD_OUT), min(QUESTIONS, len(rows) // 4))
    held_out = sorted(rows)[:count]
    train_rows = []
    held_out_rows = []
    for key in rows:
        if key not in held_out:
            train_rows.extend(rows[key])
    for key in held_out:
        held_out_rows.extend(rows[key])
    if len(rows) == 1 and len(held_out_rows) > 1:
        # Copies of one chat, as in a trial: train on all copies but the last.
        *train_rows, last_row = held_out_rows
        held_out_rows = [last_row]
        runtime.print0(f"--data {args.data}: all chats are equal, also the one that is held out")
    return train_rows, held_out_rows, [chats.conversations[key] for key in held_out]


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
    common = len(chats.rows.keys() & eval_chats.rows.keys())
    if common == len(eval_chats.rows):
        raise exits.UserError(
            f"{flag}: all its chats are also in --data {args.data}, and would be trained on: "
            "use other chats, or leave out --eval-data, which holds out 5 % of --data"
        )
    runtime.print0(f"{flag}: {len(eval_chats.rows)} chats held out")
    if common:
        runtime.print0(f"  {common} of them are also in --data {args.data}, and are trained on")


def hash_of_rows(rows: list[Row]) -> str:
    """Return the SHA-256 of rows."""
    sha256 = hashlib.sha256()
    for row in rows:
        sha256.update(row.tokens.tobytes())
        sha256.update(row.counts.tobytes())
    return sha256.hexdigest()


def hash_of(conversation: Conversation) -> str:
    """Return the SHA-256 of a conversation."""
    content = conversation.messages
    if conversation.tools:
        content = [content, conversation.tools]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def print_left_out(flag: str, chats: Chats) -> None:
    """Print how many rows are left out, for which reason, and where ten of them are."""
    for reason, places in chats.left_out.items():
        count = len(places)
        runtime.print0(f"left out of {flag}: {count} rows {reason}: {first_places(places)}")
    if chats.longest_left_out:
        runtime.print0(f"  --seq-len {chats.longest_left_out} would take them all")
    places = chats.behind_answers
    if places:
        runtime.print0(
            f"left out of {flag}: what follows the last answer of {len(places)} chats, which no "
            f"answer depends on: {first_places(places)}"
        )


def first_places(places: list[str]) -> str:
    """Return ten of the places."""
    some = ", ".join(places[:10])
    if len(places) > 10:
        some += ", ..."
    return some


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


def print_rows(chat: Chat, rows: list[Row], chats: int) -> None:
    """Print the size of an epoch, and the first row, with its targets between >> and <<."""
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
    answer = row.tokens[row.counts].tolist()
    if not chat.stops.intersection(answer):
        runtime.print0(
            f"  its answer ends with {chat.decode(answer[-2:])!r}, and generation stops at "
            f"{chat.decode(sorted(chat.stops))!r} alone: add the token that ends an answer to "
            "eos_token_id in generation_config.json"
        )


# 5 The plan, and the adapters


def print_plan(args, config: shapes.Config, batches: Batches, device: torch.device) -> int:
    """Print what a rank will hold at its peak, and return its bytes, as torch counts them.

    07_memory_tricks/estimate.py prints the same, with formulas.
    """
    planned = plan.Plan(
        on_cpu=device.type != "cuda",
        gpus=batches.world_size,
        zero=3,
        adapters=args.adapters,
        seq_len=args.seq_len,
        dtype=args.dtype,
        compile=args.compile,
        loss="plain",  # --compile compiles blocks only
        checkpointing=args.checkpointing,
        micro_batch_size=batches.micro_batch_size,
        micro_batches=batches.accumulation_steps,
    )
    peak = memory.peak(shape.from_config(args.model, config), planned)
    allocated = round(peak.allocated_bytes())
    parts = []
    for row in peak.rows:
        size = row[peak.moment]
        if size:
            parts.append(f"{row.part} {report.for_people('bytes', size)}")
    where = "on each rank's GPU" if device.type == "cuda" else "in each rank's memory"
    line = f"planned: {report.for_people('bytes', allocated)} {where} at the peak: "
    runtime.print0(report.fold(line + ", ".join(parts)))

    if device.type == "cuda":
        total = peak.total_bytes()
        runtime.print0(
            f"  with CUDA's context, NCCL and fragmentation {report.for_people('bytes', total)}"
        )
        if total > torch.cuda.get_device_properties(device).total_memory:
            runtime.print0(
                "  more than this GPU has:"
                " --checkpointing full, --micro-batch-size 1 or --cpu-offload help"
            )
    return allocated


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


# 6 Answers to held-out questions


def questions(
    chat: Chat, conversations: list[Conversation], config: shapes.Config
) -> list[list[int]]:
    """Return the ids of the first prompt of some conversations.

    A prompt that leaves no room for an answer loses its beginning.
    """
    longest = config.max_position_embeddings - ANSWER_TOKENS
    prompts = []
    for messages, tools, first_answer in conversations[:QUESTIONS]:
        roles = [message["role"] for message in messages]
        position = roles.index("assistant", first_answer)
        prompt, _ = encode_answer(chat, messages, position, tools)
        prompts.append(prompt[-longest:])
    return prompts


@torch.no_grad()
def greedy(
    forward: Callable, prompts: list[list[int]], stops: frozenset[int], device
) -> list[list[int]]:
    """Return at most ANSWER_TOKENS of the likeliest tokens behind each prompt.

    All prompts are one batch, without a cache. Every rank has to call this, because a sharded model
    gathers its weights in forward; all continue with the tokens of rank 0.
    """
    answers = [[] for _ in prompts]

    def is_done(answer: list[int]) -> bool:
        return len(answer) == ANSWER_TOKENS or bool(stops.intersection(answer))

    while not all(is_done(answer) for answer in answers):
        rows = []
        for prompt, answer in zip(prompts, answers, strict=True):
            rows.append(torch.tensor(prompt + answer))
        # padded at the end, where causal attention does not look
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = forward(tokens.to(device))  # [prompts, tokens, vocabulary]
        chosen = []
        for row, row_logits in zip(rows, logits, strict=True):
            chosen.append(row_logits[len(row) - 1].argmax())
        next_tokens = torch.stack(chosen)
        dist.broadcast(next_tokens, 0)
        for answer, token in zip(answers, next_tokens.tolist(), strict=True):
            if not is_done(answer):
                answer.append(token)
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


# 7 Folders that others load


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
        if "lora_" in name:
            trained.append(name)
        else:
            tensors[name] = torch.empty(weight.shape, dtype=dtype, device="meta")

    def read(name: str) -> Tensor:
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            return runtime.full_tensor(weights[name]).to(dtype)
        # a rank multiplies its rows of B with all of A, which is small
        return runtime.full_tensor(layer.merged_weight()).to(dtype)

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
    if Path(name).is_dir():
        copy_tokenizer(Path(name), folder)
    elif chat.save_tokenizer is not None:  # of the hub
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
        alpha=ALPHA_PER_RANK * args.adapters,
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
    tokens = torch.tensor([prompt], device=device)
    expected = reference.read_transformers(folder, device)(tokens).logits
    ours = build(str(folder), config, seed=0, device=device).eval()
    found = ours(tokens)
    difference = torch.linalg.vector_norm(found - expected)
    return (difference / torch.linalg.vector_norm(expected)).item()
