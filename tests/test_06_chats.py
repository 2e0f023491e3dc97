"""06_fsdp_zero/finetune.py: files of chats as people have them, and rows as the model is asked."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import (
    ROOT,
    TINY,
    assert_refused,
    config_of,
    run,
    with_prelude,
)

from lm.chats import read_chat_format, read_conversation

SCRIPT = "06_fsdp_zero/finetune.py"
MARKS = [
    *("<s>", "<eos>", "<|im_start|>", "<|im_end|>", "[BOT]", "[USER]"),
]

# the script writes the rows of each chat to rows.json, and ends
DUMP = """
import json
import shutil
import _finetune
load_chats = _finetune.load_chats
def dump(args, chat, chat_rows):
    written = []
    def record(*arguments):
        written.append(chat_rows(*arguments))
        return written[-1]
    load_chats(args, chat, record)
    with open("rows.json", "w") as file:
        json.dump(written, file)
    raise SystemExit(0)
_finetune.load_chats = dump
"""
FLAGS = ("--device", "cpu", "--global-batch-size", 1, "--data", "chats.jsonl")
ANOTHER = '{"prompt": "another", "completion": "chat"}\n'  # for one is held out

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# tool calls count only if there is no content, which transformers does not tell from none
LEAVES_OUT = TOOLS.replace("m.tool_calls or []", "(m.tool_calls if m.content is none else [])")
# the prompt opens thoughts, and the rendered answer has none, as DeepSeek R1's
OPENS = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}[BOT]"
    "{{ m.content.split('</think>')[-1] }}<eos>{% else %}[USER]{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[BOT]<think>\n{% endif %}"
)
# the prompt opens thoughts, and an answer without thoughts has them in another form, as Nemotron's
OPENS_OTHERWISE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n{{ m.content }}"
    "{% elif m.role == 'assistant' and '<think>' not in m.content %}"
    "<think></think>{{ m.content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# the prompt has empty thoughts already
CLOSES = OPENS_OTHERWISE.replace("<think>\n{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
# only the last answer has thoughts, as Qwen3's
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# nothing ends an answer, or a text that is no token
NEVER_ENDS = (
    "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)
TEXT_END = NEVER_ENDS.replace("{% endfor", "### end\n{% endfor")


def message(role: str, content: str | None, **more) -> dict:
    """Return a message."""
    return {"role": role, "content": content, **more}


def chat(*texts: str) -> list[dict]:
    """Return messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    return [message(roles[i % 2], text) for i, text in enumerate(texts)]


def lines(records: list) -> str:
    """Return JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


@dataclass
class Model:
    """A model's folder, with its tokenizer."""

    folder: Path
    tokenizer: transformers.PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Make a model with a chat template, or with none. Spaces and line breaks join other tokens.

    Its tokenizer adds `before` and `behind` to each text.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers import models as kinds

    made = {}

    def make(template: str | None, before: str = "", behind: str = "") -> Model:
        key = (template, before, behind)
        if key in made:
            return made[key]
        folder = tmp_path_factory.mktemp("models") / "model"
        write_folder(folder, config_of({**TINY, "vocab_size": 300}))
        words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĊĠ", "ĊĠĠ", "Ġt", "be"]
        merges = [("Ċ", "Ċ"), ("Ċ", "Ġ"), ("ĊĠ", "Ġ"), ("Ġ", "t"), ("b", "e")]
        vocabulary = {word: i for i, word in enumerate(words)}
        core = Tokenizer(kinds.BPE(vocabulary, merges))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=core, eos_token="<eos>", extra_special_tokens=MARKS
        )
        tokenizer.chat_template = template
        if before:
            special = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in (before, "<eos>")]
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{before} $A {behind}".strip(), special_tokens=special
            )
        tokenizer.save_pretrained(folder)
        made[key] = Model(folder, tokenizer)
        return made[key]

    return make


def rows_of(folder: Path, text: str | bytes, model: object = "nano") -> tuple[list, str]:
    """Return the rows of each chat in a file, as the script reads it, and what it prints."""
    folder.mkdir(exist_ok=True)
    (folder / "chats.jsonl").write_bytes(as_bytes(text))
    script = with_prelude(SCRIPT, folder, DUMP)
    result = run(str(script), folder, *FLAGS, "--model", model)
    assert result.code == 0, result
    return json.loads((folder / "rows.json").read_text(encoding="utf-8")), result.out


def as_bytes(text: str | bytes) -> bytes:
    """Return the bytes of a text in UTF-8."""
    if isinstance(text, bytes):
        return text
    return text.encode()


def targets(model: Model, rows: list) -> list[str]:
    """Return the targets of each row as text."""
    texts = []
    for ids, counts in rows:
        chosen = [token for token, count in zip(ids, counts, strict=True) if count]
        texts.append(model.tokenizer.decode(chosen))
    return texts


THOUGHT = message("assistant", "yes", reasoning_content="hm")
INLINE = "<think>\nhm\n</think>\n\nyes"
TWICE = chat("q", "yes", "r", "no")
CALL = {"id": "1", "type": "function", "function": {"name": "sun", "arguments": '{"at": "sea"}'}}
PARSED_CALL = {**CALL, "function": {"name": "sun", "arguments": {"at": "sea"}}}
CALLED = [
    message("user", "weather?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "yes"},
    message("assistant", "sunny"),
]
TOOL = {"type": "function", "function": {"name": "sun", "parameters": {}}}
IM = "<|im_end|>\n"

# the template, and chats with the targets of each row
ROWS = {
    "no template: spaces join the word behind them": (
        None,
        [
            (chat("what is two?", "two words"), [" two words<eos>\n"]),
            (TWICE, [" yes<eos>\n no<eos>\n"]),
            (chat("q", "\n\nx"), [" \n\nx<eos>\n"]),
        ],
    ),
    "answers that begin with white space": (
        CHATML,
        [
            (chat("code", "  two"), [f"  two{IM}"]),
            (chat("code", "\n\nx", "more", "\n y"), [f"\n\nx{IM}", f"\n y{IM}"]),
            (chat("code", "    return 1", "more", " t"), [f"    return 1{IM}", f" t{IM}"]),
            (chat("code", "", "more", "x"), [f"{IM}x{IM}"]),
            ([*chat("q", "yes"), message("assistant", "or no")], [f"yes{IM}or no{IM}"]),
            # nobody asks for the first message
            ([message("assistant", "hello"), *chat("q", "yes")], [f"yes{IM}"]),
            ([message("system", "be short"), message("assistant", "hello")], [f"hello{IM}"]),
        ],
    ),
    "prompts that open thoughts": (
        OPENS,
        [
            (chat("q", "yes"), ["\n</think>\n\nyes<eos>"]),
            (chat("q", "  yes"), ["\n</think>\n\n  yes<eos>"]),
            (chat("q", INLINE), ["hm\n</think>\n\nyes<eos>"]),
            (chat("q", INLINE.removeprefix("<think>\n")), ["hm\n</think>\n\nyes<eos>"]),
            ([message("user", "q"), THOUGHT], ["hm\n</think>\n\nyes<eos>"]),
            (TWICE, ["\n</think>\n\nyes<eos>", "\n</think>\n\nno<eos>"]),
        ],
    ),
    "prompts that open thoughts, and answers with empty ones": (
        OPENS_OTHERWISE,
        [
            (chat("q", "yes", "r", "\nno"), [f"</think>yes{IM}", f"</think>\nno{IM}"]),
            (chat("q", INLINE), [f"hm\n</think>\n\nyes{IM}"]),
            ([message("user", "q"), THOUGHT], [f"hm\n</think>\nyes{IM}"]),
        ],
    ),
    "prompts with empty thoughts": (
        CLOSES,
        [
            (chat("q", "yes"), [f"yes{IM}"]),
            ([message("user", "q"), THOUGHT], [f"yes{IM}"]),
        ],
    ),
    "earlier answers are rewritten": (
        REWRITES,
        [
            (chat("q", "yes"), [f"<think>\n\n</think>\n\nyes{IM}"]),
            (
                TWICE,
                [f"<think>\n\n</think>\n\nyes{IM}", f"<think>\n\n</think>\n\nno{IM}"],
            ),
        ],
    ),
    "tool calls without content": (
        TOOLS,
        [(CALLED, [f'<call>sun {{"at": "sea"}}</call>{IM}sunny{IM}'])],
    ),
    "content and arguments that are added to a text": (
        TOOLS.replace("| tojson }}</call>", "+ '.' }}</call>").replace(
            "m.content", "m.content + ''"
        ),
        [(CALLED, [f'<call>sun {{"at": "sea"}}.</call>{IM}sunny{IM}'])],
    ),
}


def as_templates_take(messages: list[dict], template: str) -> list[dict]:
    """Return messages with text for their content, and arguments as the template takes them."""
    changed = []
    for m in messages:
        m = {**m, "content": m["content"] or ""}
        if "tool_calls" in m and "tojson }}</call>" in template:
            m["tool_calls"] = [PARSED_CALL]
        changed.append(m)
    return changed


def prompt_ids(model: Model, messages: list[dict]) -> list[int]:
    """Return the ids that the model is asked with."""
    if model.tokenizer.chat_template is None:
        lines = [f"{m['role']}: {m['content']}<eos>\n" for m in messages]
        text = "".join([*lines, "assistant:"])
    else:
        text = model.tokenizer.apply_chat_template(
            as_templates_take(messages, model.tokenizer.chat_template),
            tokenize=False,
            add_generation_prompt=True,
        )
    return model.tokenizer.encode(text, add_special_tokens=False)


def is_asked(prompt: list[int], rows: list) -> bool:
    """Return whether a row begins with this prompt, and its targets go on right behind it."""
    for ids, counts in rows:
        begins = ids[: len(prompt)] == prompt
        if begins and counts[len(prompt)] and not counts[len(prompt) - 1]:
            return True
    return False


@pytest.mark.parametrize("case", ROWS)
def test_a_row_begins_with_the_ids_that_are_asked_and_targets_are_the_answers(
    tmp_path, models, case
):
    template, chats = ROWS[case]
    model = models(template)
    text = lines([{"messages": messages} for messages, _ in chats]) + ANOTHER
    *found, _ = rows_of(tmp_path, text, model.folder)[0]
    for (messages, expected), rows in zip(chats, found, strict=True):
        assert targets(model, rows) == expected
        for i in range(1, len(messages)):
            if messages[i]["role"] == "assistant":
                assert is_asked(prompt_ids(model, messages[:i]), rows), (messages, i)


@pytest.mark.parametrize("behind", ["", "<eos>"])
def test_without_a_template_a_row_begins_with_the_ids_that_the_tokenizer_adds(
    tmp_path, models, behind
):
    """A prompt is a text for the programs that ask: their tokenizer adds bos. Rows have no eos."""
    model = models(None, before="<s>", behind=behind)
    texts = [chat("what is two?", "two words"), chat("q", "yes", "r", "no")]
    text = lines([{"messages": messages} for messages in texts]) + ANOTHER
    (two, twice, _), out = rows_of(tmp_path, text, model.folder)
    assert targets(model, two) == [" two words<eos>\n"]
    assert targets(model, twice) == [" yes<eos>\n no<eos>\n"]
    for rows, prompt in (
        (two, "user: what is two?<eos>\nassistant:"),
        (twice, "user: q<eos>\nassistant:"),
        (twice, "user: q<eos>\nassistant: yes<eos>\nuser: r<eos>\nassistant:"),
    ):
        asked = model.tokenizer(prompt).input_ids
        if behind:
            *asked, end = asked
            assert end == model.tokenizer.eos_token_id
        assert is_asked(asked, rows), prompt
    [[ids, _]] = twice
    assert model.tokenizer.convert_ids_to_tokens(ids).count("<s>") == 1
    assert ("'<eos>' behind each text" in out) == bool(behind)


def test_a_template_alone_decides_about_bos(tmp_path, models):
    """The tokenizer would add another one, and programs that ask with a template let it not."""
    for template, count in ((CHATML, 0), ("<s>" + CHATML, 1)):
        model = models(template, before="<s>")
        (rows, _), _ = rows_of(tmp_path, lines([{"messages": TWICE}]) + ANOTHER, model.folder)
        [[ids, _]] = rows
        assert model.tokenizer.convert_ids_to_tokens(ids).count("<s>") == count


def test_answers_in_a_prompt_are_context_and_tools_are_rendered(tmp_path, models):
    model = models(TOOLS)
    pair = {"prompt": TWICE[:3], "completion": TWICE[3:]}
    tools = [{**pair, "tools": [TOOL]}, {**pair, "tools": json.dumps([TOOL])}]
    plain, *with_tools, _ = rows_of(tmp_path, lines([pair, *tools]) + ANOTHER, model.folder)[0]
    assert targets(model, plain) == [f"no{IM}"]
    for [[ids, counts]] in with_tools:
        assert targets(model, [(ids, counts)]) == [f"no{IM}"]
        _, rendered, *_ = model.tokenizer.decode(ids).splitlines()
        assert json.loads(rendered.removesuffix("<|im_end|>")) == [TOOL]


CHATS = [chat(f"q{i}", f"ä {i}") for i in range(3)]


def renamed(messages: list[dict], role: str, content: str, names: dict) -> list[dict]:
    """Return messages with other keys and roles."""
    return [{role: names.get(m["role"], m["role"]), content: m["content"]} for m in messages]


SHAREGPT = {"user": "human", "assistant": "gpt"}
PAIRS = [{"prompt": q["content"], "completion": a["content"]} for q, a in CHATS]
MESSAGES = [{"messages": messages} for messages in CHATS]
PARTS = []
NULLS = []
for messages in CHATS:
    parts = [message(m["role"], [{"type": "text", "text": m["content"]}]) for m in messages]
    PARTS.append({"messages": parts})
    nulls = [{**m, "tool_calls": None, "name": None} for m in messages]
    NULLS.append({"messages": nulls, "tools": None})
SAME_CHATS = {
    "pairs": lines(PAIRS),
    "pairs of messages": lines([{"prompt": [q], "completion": [a]} for q, a in CHATS]),
    "a byte order mark": b"\xef\xbb\xbf" + lines(MESSAGES).encode(),
    "line ends of Windows, blank lines": lines(MESSAGES).replace("\n", "\r\n  \r\n"),
    "one array": json.dumps(MESSAGES),
    "an array over several lines": "\n" + json.dumps(PAIRS, indent=1),
    "an array behind a byte order mark": b"\xef\xbb\xbf" + json.dumps(PAIRS).encode(),
    "Alpaca": lines(
        [{"instruction": q["content"], "input": "", "output": a["content"]} for q, a in CHATS]
    ),
    "Alpaca, with the text that repeats it": lines(
        [{"instruction": q["content"], "output": a["content"], "text": "both"} for q, a in CHATS]
    ),
    "ShareGPT": lines(
        [{"conversations": renamed(m, "from", "value", SHAREGPT)} for m in CHATS],
    ),
    "ShareGPT's messages": lines(
        [{"messages": renamed(m, "from", "value", SHAREGPT)} for m in CHATS]
    ),
    "ShareGPT's roles": lines(
        [{"messages": renamed(m, "role", "content", SHAREGPT)} for m in CHATS]
    ),
    "conversations of messages": lines([{"conversations": m} for m in CHATS]),
    "texts in parts": lines(PARTS),
    "null keys": lines(NULLS),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the rows of CHATS."""
    rows, _ = rows_of(tmp_path_factory.mktemp("plain"), lines(MESSAGES))
    assert len(rows) == len(CHATS)
    return rows


def test_the_same_chats_in_another_form_are_the_same_rows(tmp_path, expected):
    for case, text in SAME_CHATS.items():
        assert rows_of(tmp_path, text)[0] == expected, case


GOOD = lines(MESSAGES)
LINE_4 = {  # the fourth line, and what the message has to name
    "an unknown key": ({**MESSAGES[0], "weight": 0}, "weight"),
    "arguments of the template": (
        {**MESSAGES[0], "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs",
    ),
    "a system prompt beside the chat": ({"conversations": CHATS[0], "system": "x"}, "system"),
    "Alpaca's history": ({"instruction": "a", "output": "b", "history": []}, "history"),
    "an answer that is empty": ({"instruction": "a", "input": "", "output": ""}, "output"),
    "a text that is none": ({"text": ["a"]}, "text"),
    "an unknown key of a message": (
        {"messages": [CHATS[0][0], {**CHATS[0][1], "weight": 0}]},
        "weight",
    ),
    "tools, and no template": ({**MESSAGES[0], "tools": [TOOL]}, "tools"),
    "tools that are no list": ({**MESSAGES[0], "tools": "sun"}, "tools"),
    "tool calls, and no template": ({"messages": CALLED}, "tool_calls"),
    "no role": ({"messages": [{"content": "x"}, CHATS[0][1]]}, "message 1"),
    "no content": ({"messages": [{"role": "user"}, CHATS[0][1]]}, "message 1"),
    "tool calls that are no list": (
        {"messages": [{"role": "assistant", "tool_calls": {"name": "sun"}}]},
        "tool_calls",
    ),
    "a tool call without a name": (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "sun"}]}]},
        "tool call",
    ),
    "null content": ({"messages": [message("user", "x"), message("assistant", None)]}, "2"),
    "a picture": (
        {"messages": [message("user", [{"type": "image_url", "image_url": "x"}]), CHATS[0][1]]},
        "image_url",
    ),
    "a number": ({"prompt": "2 + 2?", "completion": 4}, "4"),
    "no completion": ({"prompt": "x"}, "prompt"),
    "no messages": ({"messages": []}, "messages"),
    "messages that are text": ({"messages": "hi"}, "messages"),
    "a text": ("hi", "messages"),
    "half a surrogate pair": ({"prompt": "cut \ud83d", "completion": "b"}, "surrogate"),
    "half a pair in a role": ({"messages": [message("\udc00", "x"), CHATS[0][1]]}, "surrogate"),
}


def test_a_chat_that_cannot_be_used_is_refused_with_its_line(tmp_path):
    for record, word in LINE_4.values():
        (tmp_path / "chats.jsonl").write_text(GOOD + json.dumps(record), encoding="utf-8")
        assert_refused(run(SCRIPT, tmp_path, *FLAGS, "--model", "nano"), "line 4", word)


FILES = {
    "a comma behind each line": (GOOD.replace("}]}\n", "}]},\n"), ["line 1"]),
    "a cut line": (GOOD + GOOD[:30], ["line 4"]),
    "UTF-16": (GOOD.encode("utf-16"), ["UTF-8"]),
    "an empty file": ("", ["--data"]),
    "a cut array": (json.dumps(MESSAGES)[:-1], ["--data", "JSON"]),
    "an array with a bad chat": (json.dumps([*MESSAGES, {"a": 1}]), ["entry 4", "'a'"]),
    "arrays without end": ("[" * 100_000, ["--data", "JSON"]),
    "one chat": (lines(MESSAGES[:1]), ["--data", "different"]),
    "roles without an assistant": (
        GOOD.replace("assistant", "helper"),
        ["--data", "assistant"],
    ),
}


def test_a_file_that_cannot_be_used_is_refused(tmp_path):
    for text, words in FILES.values():
        (tmp_path / "chats.jsonl").write_bytes(as_bytes(text))
        assert_refused(run(SCRIPT, tmp_path, *FLAGS, "--model", "nano"), *words)


def longest_row(chats: list) -> int:
    """Return the number of inputs in the longest row."""
    return max(len(ids) - 1 for [[ids, _]] in chats)


def test_rows_that_are_all_too_long_say_which_length_would_do(tmp_path, expected):
    longest = longest_row(expected)
    (tmp_path / "chats.jsonl").write_text(GOOD, encoding="utf-8")
    flags = (*FLAGS, "--model", "nano", "--seq-len", 8)
    assert_refused(run(SCRIPT, tmp_path, *flags), "--seq-len 8", f"raise --seq-len to {longest}")


def test_rows_that_are_too_long_are_cut_and_counted(tmp_path, expected):
    """A row whose first answer begins behind --seq-len would have no target: it is left out."""
    question = "".ljust(longest_row(expected), "q")
    longest = {"prompt": question, "completion": "yes"}
    text = GOOD + lines([longest, {"text": "no chat"}])
    (tmp_path / "chats.jsonl").write_text(text, encoding="utf-8")
    length = longest_row(expected) - 2
    flags = (*FLAGS, "--model", "nano", "--seq-len", length, "--too-long", "cut", "--steps", 1)
    result = run(SCRIPT, tmp_path, *flags, "--keep", 0)
    assert result.code == 0, result
    told = [line for line in result.out.splitlines() if line.startswith("left out")]
    assert told[0].endswith(f"3 ends of rows, cut to --seq-len {length}: line 1, line 2, line 3")
    assert told[1].endswith(f"1 rows longer than --seq-len {length}: line 4")
    assert "an epoch: 3 chats, 3 rows" in result.out  # one is held out
    assert "eos_token_id" not in result.out  # since the answer has no end, it says nothing of it


def test_a_text_is_what_the_tokenizer_makes_of_it_and_an_end(models):
    model = models(CHATML, before="<s>")
    helper = load("06_fsdp_zero/_finetune.py")
    chat_format = read_chat_format(str(model.folder))
    [(ids, counts)] = helper.rows_of(chat_format, read_conversation({"text": "two tt"}), None)
    assert model.tokenizer.decode(ids) == "<s>two tt<eos>"
    assert all(counts)


def test_a_template_that_cannot_be_trained_on_is_refused(tmp_path, models):
    (tmp_path / "chats.jsonl").write_text(GOOD, encoding="utf-8")
    for template, word in (
        (NEVER_ENDS, "eos_token"),
        (TEXT_END, "eos_token"),
        ("{{ raise_exception('first a system message') }}", "first a system message"),
        (CHATML.replace("assistant\n{% endif", "helper\n{% endif"), "generation prompt"),
        (CHATML + "{{ 1 + 'a' }}", "line 1"),
    ):
        result = run(SCRIPT, tmp_path, *FLAGS, "--model", models(template).folder)
        assert_refused(result, "line 1", word)


def test_a_stop_token_that_is_no_id_is_refused(tmp_path, models):
    """As the scripts of 09_inference do, which would ask the trained model."""
    shutil.copytree(models(CHATML).folder, tmp_path / "model")
    settings = json.dumps({"eos_token_id": "<|im_end|>"})
    (tmp_path / "model/generation_config.json").write_text(settings, encoding="utf-8")
    (tmp_path / "chats.jsonl").write_text(GOOD, encoding="utf-8")
    result = run(SCRIPT, tmp_path, *FLAGS, "--model", "model")
    assert_refused(result, "generation_config.json", "'<|im_end|>'")


def test_tool_calls_that_the_template_leaves_out_are_refused(tmp_path, models):
    (tmp_path / "chats.jsonl").write_text(lines([{"messages": CALLED}]), encoding="utf-8")
    result = run(SCRIPT, tmp_path, *FLAGS, "--model", models(LEAVES_OUT).folder)
    assert_refused(result, "line 1", "sun")


MESSAGE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"


def only_if(condition: str) -> str:
    """Return CHATML, which passes over the other messages."""
    return CHATML.replace(MESSAGE, f"{{% if {condition} %}}{MESSAGE}{{% endif %}}")


FROM_LAST_QUESTION = (
    "{% set last = namespace(question=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
) + only_if("loop.index0 >= last.question")
SYSTEM = [message("system", "be short"), *chat("q", "yes")]
LATER_SYSTEM = [*SYSTEM, message("system", "be long"), *chat("r", "no")]
CALL_WITH_TEXT = [CALLED[0], {**CALLED[1], "content": "let me see"}, *CALLED[2:]]
PASSED_OVER = {  # the template, the chat, and words of the refusal
    "a role": (
        only_if("m.role in ('user', 'assistant')"),
        {"messages": SYSTEM},
        "message 1 'system'",
    ),
    "results of tools": (
        TOOLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
        {"messages": CALLED},
        "message 3 'tool'",
    ),
    "a second system message": (
        only_if("loop.first or m.role != 'system'"),
        {"messages": LATER_SYSTEM},
        "message 4 'system'",
    ),
    "all but the last question": (
        FROM_LAST_QUESTION,
        {"messages": chat("q", "yes", "r", "no")},
        "message 1 'user'",
    ),
    "the text beside a call": (
        TOOLS.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}"),
        {"messages": CALL_WITH_TEXT},
        "message 2 'assistant'",
    ),
    "the end of a text": (
        CHATML.replace("m.content", "m.content[:20]"),
        {"messages": chat("a question of more than twenty characters", "yes")},
        "message 1 'user'",
    ),
    "texts, for it takes lists": (
        CHATML.replace(
            "{{ m.content }}",
            "{% if m.role == 'user' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}",
        ),
        {"messages": chat("q", "yes")},
        "message 1 'user'",
    ),
    "tools": (
        CHATML + "{# tools #}",
        {"messages": chat("q", "yes"), "tools": [TOOL]},
        "tools",
    ),
    "a key that it only mentions": (
        CHATML + "{# the key hint #}",
        {"messages": [message("user", "q", hint="think"), message("assistant", "yes")]},
        "message 1 hint",
    ),
}


def test_a_text_that_the_template_passes_over_is_refused(tmp_path, models):
    for template, record, words in PASSED_OVER.values():
        (tmp_path / "chats.jsonl").write_text(lines([record]), encoding="utf-8")
        result = run(SCRIPT, tmp_path, *FLAGS, "--model", models(template).folder)
        assert_refused(result, "line 1", *words.split())


# templates that change or read texts, drop earlier thoughts, and write no empty ones
WRITES_ALL = (
    "{% for m in messages %}{% if m.role != 'note' %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' and m.content not in ('yes', '42') %}"
    "{{ raise_exception('no such result') }}{% endif %}"
    "{% if m.role == 'user' %}{{ m.content | trim | upper }}{% elif m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_texts_that_are_changed_or_read_and_thoughts_are_not_refused(tmp_path, models):
    model = models(WRITES_ALL)
    chats = [
        chat("q", "<think>hm</think>yes", "r", "<think>hm hm</think>no"),
        [message("note", ""), message("note", " \n"), *chat(" q ", "yes")],
        [message("user", "q"), message("tool", "42"), message("assistant", "yes")],
        [*chat("q", "yes"), message("user", "bye"), message("note", "end")],
    ]
    text = lines([{"messages": messages} for messages in chats]) + ANOTHER
    (*rows, _), out = rows_of(tmp_path, text, model.folder)
    expected = [[f"yes{IM}no{IM}"], [f"yes{IM}"], [f"yes{IM}"], [f"yes{IM}"]]
    assert [targets(model, of_chat) for of_chat in rows] == expected
    [told] = [line for line in out.splitlines() if "behind the last answer" in line]
    assert told.endswith("line 4")


def test_rows_and_tokens_of_an_epoch_are_printed_beside_the_chats(tmp_path, models):
    model = models(REWRITES)
    texts = lines([{"messages": chat(f"q{i}", "yes", "r", "no")} for i in range(4)])
    rows, out = rows_of(tmp_path, texts, model.folder)
    tokens = 0
    for found in rows:
        assert len(found) == 2
        tokens += sum(len(ids) for ids, _ in found)
    [epoch] = [line for line in out.splitlines() if line.startswith("an epoch")]
    for number in ("3 chats", "6 rows", f"{tokens * 3 // 4} tokens"):  # one is held out
        assert number in epoch


def test_an_adapter_loads_from_any_folder_with_its_tokenizer(tmp_path, models, monkeypatch):
    peft = pytest.importorskip("peft")
    model = models(CHATML)
    (tmp_path / "base").symlink_to(model.folder)
    (tmp_path / "chats.jsonl").write_text(GOOD, encoding="utf-8")
    flags = ("--model", "base", "--steps", 2, "--adapters", 2)
    flags += ("--run-dir", "run", "--json", "summary.json")
    result = run(SCRIPT, tmp_path, *FLAGS, *flags)
    assert result.code == 0, result
    monkeypatch.chdir(ROOT)
    adapter = tmp_path / "run/adapter"
    assert Path(peft.PeftConfig.from_pretrained(adapter).base_model_name_or_path).is_dir()
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
    trained = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert trained > 0
    assert result.summary["gradient_bytes_per_rank"] == 4 * trained
    tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.encode("two\n\n") == model.tokenizer.encode("two\n\n")


# the date of a template, as Llama 3.2's; and a clock that stands at another day
DATED = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}<|im_end|>\n" + CHATML
ANOTHER_DAY = """
from datetime import datetime
import training.checkpoint
from transformers.utils import chat_template_utils
class AnotherDay:
    fromisoformat = staticmethod(datetime.fromisoformat)
    def now():
        return datetime(2031, 5, 17, 12, 0, 0)
training.checkpoint.datetime = AnotherDay
chat_template_utils.datetime = AnotherDay
"""


def test_a_run_keeps_the_date_that_its_template_writes(tmp_path, models):
    """Otherwise its data would be other data on the next day."""
    (tmp_path / "chats.jsonl").write_text(GOOD, encoding="utf-8")
    flags = (*FLAGS, "--model", models(DATED).folder, "--run-dir", "run", "--save-every", 1)
    later = with_prelude(SCRIPT, tmp_path / "later", ANOTHER_DAY)
    for steps, script in ((1, SCRIPT), (2, later)):
        result = run(script, tmp_path, *flags, "--steps", steps, "--resume")
        assert result.code == 0, result
    assert "resuming from run/step-00000001" in result.out
    shutil.rmtree(tmp_path / "run")
    fresh = run(later, tmp_path, *flags, "--steps", 1)
    assert fresh.code == 0, fresh
    assert_refused(run(SCRIPT, tmp_path, *flags, "--data", "chats.jsonl"), "--resume")
    assert "2031-05-17" in (tmp_path / "run/run.json").read_text(encoding="utf-8")


def test_copies_of_one_chat_train(tmp_path, models):
    """As in a first trial, with a chat that is pasted several times, in the form of ShareGPT."""
    turns = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}]
    (tmp_path / "chats.jsonl").write_text(lines([{"conversations": turns}] * 5), encoding="utf-8")
    flags = ("--model", models(CHATML).folder, "--steps", 1, "--keep", 0, "--json", "summary.json")
    result = run(SCRIPT, tmp_path, *FLAGS, *flags)
    assert result.code == 0, result
    assert result.summary["steps"] == 1
