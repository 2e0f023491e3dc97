"""Read chats from files, and turn their messages into text by a model's chat template.

    read_records       the file        -> JSON objects, each with the number of its line
    read_conversation  a JSON object   -> messages, and the tools that the assistant may call
    render_answer      messages        -> text of a prompt, and text of the answer to it

06_fsdp_zero/finetune.py turns these texts into token ids and targets.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common import runtime
from common.exits import UserError
from lm import shapes
from lm.tokenizer import (
    has_tokenizer,
    largest_id,
    open_tokenizer,
    stop_ids,
    tokenizer_in_errors,
)

FORM = (
    'a line is {"messages": [{"role", "content"}, ...]}, {"prompt", "completion"}, {"instruction", '
    '"input", "output"} or {"text"}, with "tools" if a chat has any'
)
LISTS = ("messages", "conversations")
ALPACA = {"instruction", "input", "output", "text"}
KEYS = {*LISTS, "prompt", "completion", "tools", *ALPACA}
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
MESSAGE_KEYS = {"from": "role", "value": "content"}  # ShareGPT's names
# keys that name a speaker or a call: a template may ignore them, since they hold no text
NAMES = ("role", "content", "name", "tool_call_id")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
PROBE = "xyzzy"  # in no template


# 1 The file: JSON objects, then conversations


def read_records(file: str, flag: str = "--data") -> list[tuple[str, object]]:
    """Return the JSON values of a file, each with its place, such as ("line 3", {...}).

    The file has one value per line, or is one JSON array. Raise UserError, with the name of `flag`,
    if it cannot be read.
    """
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # -sig skips a byte order mark
    except FileNotFoundError:
        raise UserError(f"{flag} {file} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {file} is no UTF-8 .jsonl file of chats: {error}") from None
    if text.lstrip().startswith("["):
        array = parse_json(text, f"{flag} {file}, a JSON array")
        return [(f"entry {number}", value) for number, value in enumerate(array, 1)]
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"line {number}"
            records.append((where, parse_json(line, f"{flag} {file}, {where}")))
    return records


def parse_json(text: str, where: str) -> Any:
    """Return a JSON value. Raise UserError, which begins with `where`, if the text is not one."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        if error.lineno > 1:
            place = f"line {error.lineno}, {place}"
        raise UserError(f"{where} is not JSON: {error.msg} ({place})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None


class Conversation(NamedTuple):
    """The messages of a chat, and the tools that its assistant may call.

    Messages before number `first_answer` are context. The assistant may be among them, but nobody
    asks the model for these answers, so they are no targets.

    A text that is no chat has no messages. All its tokens are targets.
    """

    messages: list[dict]
    tools: list[dict] | None = None
    first_answer: int = 1
    text: str | None = None


def read_conversation(record: object) -> Conversation:
    """Return the conversation in a JSON object. Raise ValueError for any other content.

    These all have the messages [{"role": "user", "content": "hi"}, {"role": "assistant",
    "content": "hello"}]:

        {"prompt": "hi", "completion": "hello"}
        {"instruction": "hi", "input": "", "output": "hello"}    Alpaca's
        {"conversations": [{"from": "human", "value": "hi"},
                           {"from": "gpt", "value": "hello"}]}   ShareGPT's
    """
    if not isinstance(record, dict):
        raise ValueError(f"{FORM}, not {shorten(record)}")
    check_surrogates(record)
    record = {key: value for key, value in record.items() if value is not None}
    unknown = [key for key in record if key not in KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}: remove it; {FORM}")
    tools = read_tools(record.pop("tools", None))

    key = next(iter(record), None)
    if len(record) == 1 and key in LISTS:
        messages = read_messages(record[key], role="")
        return Conversation(messages, tools)
    if set(record) == {"prompt", "completion"}:
        prompt = read_messages(record["prompt"], role="user")
        completion = read_messages(record["completion"], role="assistant")
        return Conversation(prompt + completion, tools, first_answer=max(1, len(prompt)))
    if set(record) == {"text"} and not tools:
        return Conversation([], text=read_text(record, "text"))
    if {"instruction", "output"} <= set(record) <= ALPACA:
        # Stanford's file also has a "text", which repeats the others.
        question = read_text(record, "instruction")
        if record.get("input"):
            question += "\n" + read_text(record, "input")
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": read_text(record, "output")},
        ]
        return Conversation(messages, tools)
    raise ValueError(f"{FORM}, not the keys {', '.join(record) or 'of an empty object'}")


def read_text(record: dict, key: str) -> str:
    """Return the text under a key. Raise ValueError if it is empty or no text."""
    text = record[key]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"{key!r} is a text that is not empty, not {shorten(text)}: remove the line"
        )
    return text


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
            name = MESSAGE_KEYS.get(key, key)
            if name in known:
                raise ValueError(f"{where} has {name!r} twice, under two names: remove one")
            known[name] = value

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
    is_text = isinstance(content, list) and len(texts) == len(content) > 0
    if not is_text or not all(isinstance(text, str) for text in texts):
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
    encode_text: Callable[[str], list[int]]  # also bos, where the tokenizer adds it by itself
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
        raise UserError(f"{where} needs an eos_token: it ends an answer")

    render: Callable[..., str] = partial(render_with_template, tokenizer, date=date)
    template: Callable[[list[dict] | None], str] = partial(template_source, tokenizer)
    start: tuple[int, ...] = ()  # the template has written bos, if the model is asked with one
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
        encode_text=partial(tokenizer.encode, verbose=False),
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


def byte_ids(text: str) -> list[int]:
    """Return the bytes of a text as token ids."""
    return list(text.encode())


def byte_chat() -> Chat:
    """Return the format of a model that reads bytes: lines that end with a byte 0."""
    end = 0
    return Chat(
        template=plain_template,
        render=partial(render_plainly, end=chr(end)),
        encode=byte_ids,
        encode_text=byte_ids,
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
    messages, tools, first_answer, _ = conversation
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
        word = f"{PROBE}{number}{PROBE}"
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
    changed[position] = message | {key: message[key] + PROBE}
    try:
        return chat.render(changed, tools=tools) != rendered
    except Exception:  # the template reads the text, since it fails at this one
        return True


def has_word(text: str, word: str) -> bool:
    """Return whether a text has this word, and not just as a part of a longer name."""
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


# 3 One answer: its prompt and itself


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
    answer: str | None
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
