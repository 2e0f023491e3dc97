"""For export.py: a model to export, the calls that each form repeats, its runtimes, and checks."""

import argparse
import dataclasses
import json
import os
import reprlib
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import _prompts
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map

from common import lesson, measure
from common.exits import UserError
from lm import data, model, shapes, stdlib_text
from lm.generate import StaticCache, generate, steps_of
from lm.tokenizer import has_tokenizer, open_tokenizer
from lm.weights import build

ONNX = ("onnx", "onnxscript", "onnxruntime")
GGUF = ("gguf", "xllamacpp")
FORMS = {"aoti": ("g++",), "onnx": ONNX, "int8": ONNX, "f16": GGUF, "q8_0": GGUF}  # what each needs
LEAST_BYTES = {"aoti": 4, "onnx": 4, "int8": 1, "f16": 2, "q8_0": 1}  # of a file, for each weight
# Named sizes are trained first, because random weights repeat one token for ever.
TRAINED_HERE = {"nano": 5e-3, "wide": 6e-4}  # and the learning rate
NANO_LAYERS = 2
ROUNDS = 5  # of all forms in turn, for the time
LOSS_ROWS = 16  # of held-out text
LOSS_TOKENS = 32  # of each
# The largest relative error that is allowed: of logits, or of a GGUF file's weights. ONNX Runtime
# sums in another order: with 2 layers of nano that makes 3e-7, with 30 layers of SmolLM2 2.3e-5.
MOST_ERROR = {"aoti": 1e-5, "onnx": 1e-4, "f16": 1e-3, "q8_0": 1e-2}
# Texts that tokenizers of other kinds split otherwise.
TEXTS = (
    "the dog jumps over it",
    " leading space",
    "It's 1999, isn't it? WE'LL SEE!!",
    "x  y\n\n  z\t12345 ",
    "def f(a_b):\n    return a_b**2 != 1_000\n",
    "Cafe\u0301 na\u00efve \u00bd",
    "\u65e5\u672c\u8a9e \u0395\u03bb\u03bb\u03ac\u03b4\u03b1 \U0001f642",
)
COLUMNS = {
    "form": "form",
    "first_difference": "leaves eager at",
    "logits_relative_error": "error of logits",
    "loss": "loss",
    "file_bytes": "file",
    "make_and_load_seconds": "CPU to make, to load",
    "decode_tokens_per_second": "decode",
}

# For `python -I` in a folder of its own, which cannot import this repository.
FRESH_PROCESS = """
import sys
import torch

calls, cache, wrong_calls = torch.load("calls.pt")
step = torch._inductor.aoti_load_package(sys.argv[1])
logits = [step(*call, *cache) for call in calls]
rejected = {}
for name, call in wrong_calls.items():
    try:
        step(*call)
    except RuntimeError as error:
        for line in str(error).splitlines():
            if "input_handles" in line and name not in rejected:
                rejected[name] = line.replace("input_handles[0]", "ids")  # the first input
torch.save((logits, rejected), "logits.pt")
"""

Call = tuple[Tensor, Tensor, Tensor]  # ids, positions, last: the inputs of a step but for the cache
Cache = tuple[list[Tensor], list[Tensor]]


# --- flags


def parse_flags(doc: str) -> argparse.Namespace:
    """Parse the flags. Raise UserError for those that this script cannot use."""
    flags = _prompts.parser(doc)
    flags.set_defaults(max_new_tokens=24, model=None)
    flags.add_argument(
        "--forms",
        help=f"beside eager, some of {','.join(FORMS)} (default: all, on a GPU aoti)",
    )
    args = flags.parse_args()
    if args.temperature or args.dtype not in ("auto", "fp32"):
        raise UserError("greedy tokens in fp32 are compared: leave --temperature and --dtype out")
    args.dtype = "fp32"
    if args.prompt is None and args.prompts is None:
        args.prompts = Path(__file__).with_name("kv_cache_prompts.txt")
    lesson.fill_defaults(
        args,
        cpu={"model": "nano", "forms": ",".join(FORMS)},
        gpu={"model": "wide", "forms": "aoti"},
    )
    return args


def possible_forms(
    args: argparse.Namespace, config: shapes.Config, text: _prompts.Text, write_gguf: Callable
) -> tuple[list[str], list[str]]:
    """Return the forms of --forms that can be made here, and print why others are left out.

    The second list says what was checked for that. Raise UserError for an unknown form.
    """
    forms = args.forms.split(",")
    unknown = [form for form in forms if form not in FORMS]
    if unknown or ("int8" in forms and "onnx" not in forms):
        raise UserError(
            f"--forms {args.forms}: use some of {','.join(FORMS)}; int8 is made from onnx"
        )
    possible = []
    for form in forms:
        missing = [need for need in FORMS[form] if not (which(need) or find_spec(need))]
        if FORMS[form] == GGUF and not fits_gguf(args.model, config):
            missing.append("a Llama without rope_scaling, with GPT-2's tokenizer")
        if missing:
            print(f"left out: {form}: needs {', '.join(missing)}")
        else:
            possible.append(form)
    gguf_forms = [form for form in possible if FORMS[form] == GGUF]
    if not gguf_forms:
        return possible, []

    names = ", ".join(gguf_forms)
    texts = texts_to_compare(text)
    difference = difference_in_llama_cpp(args.model, config, texts, write_gguf)
    if difference is None:
        return possible, [f"{names}: llama.cpp has the model's tokens for {len(texts)} texts"]
    print(f"left out: {names}: {difference}")
    return [form for form in possible if form not in gguf_forms], []


def least_bytes(name: str, config: shapes.Config, forms: list[str]) -> int:
    """Return how many bytes the temporary files of this script have at least."""
    bytes_per_weight = sum(LEAST_BYTES[form] for form in forms)
    if name in TRAINED_HERE:
        bytes_per_weight += 4  # its folder, in fp32
    return shapes.parameter_count(config) * bytes_per_weight


def fits_gguf(name: str, config: shapes.Config) -> bool:
    """Return whether `write_gguf` can write this model: a plain Llama, with GPT-2's tokenizer.

    llama.cpp implements tokenizers by name. GPT-2's has no normalizer, adds no space in front, and
    splits words by its own regular expression.
    """
    if config.rope_scaling or config.qkv_bias or config.qk_norm:
        return False
    file = Path(name, "tokenizer.json")
    if not file.is_file():
        return not has_tokenizer(name)  # without a tokenizer it reads bytes
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    words = tokenizer.get("pre_tokenizer") or {}
    return (
        tokenizer["model"].get("type") == "BPE"
        and tokenizer.get("normalizer") is None
        and words.get("type") == "ByteLevel"
        and words.get("use_regex", True)
        and not words.get("add_prefix_space", True)
    )


# --- the tokens of llama.cpp


def texts_to_compare(text: _prompts.Text) -> dict[str, tuple[list[int], bool]]:
    """Return texts with their tokens, and whether special tokens such as BOS are added to them.

    They are TEXTS, the prompts, the prompt of a chat, and a text with each added token. A text with
    tokens that the model does not have is left out.
    """
    texts = [*TEXTS, *text.texts]
    tokenizer = text.tokenizer
    if tokenizer is None:
        tokens = {each: (list(each.encode(errors="surrogateescape")), True) for each in texts}
    else:
        for added in tokenizer.added_tokens_decoder.values():
            texts.append(f"the{added.content}dog {added.content} end")
        if json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("ignore_merges"):
            texts.append(all_words(tokenizer))
        tokens = {each: (tokenizer(each, verbose=False)["input_ids"], True) for each in texts}
        if isinstance(tokenizer.chat_template, str):
            tokens |= chat_to_compare(text)
    readable = {}
    for each, (ids, add_special) in tokens.items():
        is_unicode = each.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in each)
        if is_unicode and max(ids) < text.config.vocab_size:
            readable[each] = (ids, add_special)
    return readable


def chat_to_compare(text: _prompts.Text) -> dict[str, tuple[list[int], bool]]:
    """Return the first prompt in the chat template, with its tokens, if the template takes it."""
    messages = [{"role": "user", "content": text.texts[0]}]
    how = {"add_generation_prompt": True}
    try:
        prompt = text.tokenizer.apply_chat_template(messages, tokenize=False, **how)
        ids = text.tokenizer.apply_chat_template(messages, **how)["input_ids"]
    except Exception:  # templates raise many types; --chat has told the user before
        return {}
    return {prompt: (ids, False)}


def all_words(tokenizer) -> str:
    """Return a text with each token of the vocabulary that is a text."""
    words = []
    for token_id in sorted(tokenizer.get_vocab().values()):
        if token_id in tokenizer.added_tokens_decoder:
            continue
        word = tokenizer.backend_tokenizer.decode([token_id])
        if "\N{REPLACEMENT CHARACTER}" not in word:  # a part of a character
            words.append(word)
    return "\n".join(words)


def difference_in_llama_cpp(
    name: str,
    config: shapes.Config,
    texts: dict[str, tuple[list[int], bool]],
    write_gguf: Callable,
) -> str | None:
    """Return how llama.cpp reads a text into other tokens, or None if all texts are read alike.

    It reads the vocabulary of the model from a GGUF file with the smallest possible weights.
    """
    import xllamacpp

    tiny = dataclasses.replace(
        config,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "f16.gguf")
        write_gguf(build("nano", tiny, seed=0), Path(name), file)
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.verbosity = -1
        params.warmup = False
        server = xllamacpp.Server(params)
        for text, (ids, add_special) in texts.items():
            found = tokens_of_llama_cpp(server, text, add_special)
            if found != ids:
                first = 0
                while found[first : first + 1] == ids[first : first + 1]:
                    first += 1
                return (
                    f"llama.cpp reads {reprlib.repr(text)} otherwise: its token {first + 1} is "
                    f"{found[first : first + 1]}, and {ids[first : first + 1]} by the tokenizer"
                )
    return None


def tokens_of_llama_cpp(server, text: str, add_special: bool) -> list[int]:
    """Return the tokens that llama.cpp's server makes of a text."""
    question = {"content": text, "add_special": add_special, "parse_special": True}
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    with opener.open(request, timeout=60) as reply:
        return json.load(reply)["tokens"]


# --- the model


def shape_of(name: str) -> shapes.Config:
    """Return the shape of a model. nano has fewer layers here, because compiling takes long."""
    config = shapes.read_config(name)
    if name == "nano":
        return dataclasses.replace(config, num_hidden_layers=NANO_LAYERS)
    return config


def train(name: str, folder: Path, config: shapes.Config, device: torch.device) -> str:
    """Train a named size for 150 steps, write it as a Hugging Face folder, and return its path."""
    from safetensors.torch import save_file

    net = build(name, config, seed=0, device=device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=TRAINED_HERE[name])
    inputs, targets = stdlib_text.one_batch(150 * 4, 32, device)  # 150 steps of 4 x 32 tokens
    for step_inputs, step_targets in zip(inputs.split(4), targets.split(4), strict=True):
        net(step_inputs, step_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir()
    tensors = {name: weight.detach().cpu() for name, weight in net.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shapes.config_json(config)), encoding="utf-8")
    return str(folder)


def answer_of(
    net: model.Transformer, text: _prompts.Text, args: argparse.Namespace, device: torch.device
) -> list[list[int]]:
    """Return eager's greedy tokens for each prompt."""
    cache = StaticCache(
        net.config,
        batch=len(text.prompts),
        length=text.length,
        dtype=torch.float32,
        device=device,
    )
    prefill, decode = steps_of(net, cache)
    result = generate(
        prefill,
        decode,
        text.prompts,
        max_new_tokens=args.max_new_tokens,
        choose=lambda logits: logits.argmax(-1),
        device=device,
        stop=text.stop,
        model=f"--model {args.model}",
    )
    return result.token_ids


def held_out_tokens(name: str, text: _prompts.Text, device: torch.device) -> Tensor:
    """Return tokens of held-out text, [LOSS_ROWS, LOSS_TOKENS + 1]."""
    tokenizer = "bytes" if text.tokenizer is None else name
    held_out = data.load_corpus("stdlib", model=name, tokenizer=tokenizer).held_out
    held_out = held_out[: LOSS_ROWS * (LOSS_TOKENS + 1)]
    text.check_vocabulary(held_out, "the held-out text")
    return torch.from_numpy(held_out.astype("int64")).view(LOSS_ROWS, -1).to(device)


# --- torch.export


def empty_cache(config: shapes.Config, *, rows: int, slots: int, device) -> Cache:
    """Return keys and values, [rows, kv_heads, slots, head_dim], a tensor of each per layer."""
    shape = (rows, config.num_key_value_heads, slots, config.head_dim)
    keys = [torch.zeros(shape, device=device) for _ in range(config.num_hidden_layers)]
    values = [torch.zeros(shape, device=device) for _ in range(config.num_hidden_layers)]
    return keys, values


def describe(program: torch.export.ExportedProgram) -> str:
    """Return in words what a recorded graph has."""
    operators = [node.target for node in program.graph.nodes if node.op == "call_function"]
    writing = [operator for operator in operators if "index_put_" in str(operator)]
    signature = program.graph_signature
    weights = len(signature.parameters) + len(signature.buffers)
    return (
        f"{len(operators)} operators, {len(writing)} of which write the cache; "
        f"{weights} weights and tables, {len(signature.user_inputs)} inputs, "
        f"{len(signature.user_outputs)} output"
    )


# --- the calls that each form repeats


def calls_of(prompts: list[list[int]], answers: list[list[int]], device) -> list[Call]:
    """Return the inputs of a prefill of the prompts, and of the decode steps for these answers."""
    rows_of_ids = [torch.tensor(row, dtype=torch.long, device=device) for row in prompts]
    rows_of_answers = [torch.tensor(row, dtype=torch.long, device=device) for row in answers]
    ids = pad_sequence(rows_of_ids, batch_first=True)  # [batch, tokens]
    answer_ids = pad_sequence(rows_of_answers, batch_first=True)  # [batch, new tokens]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    # repeat and contiguous, because a package takes no expanded tensor
    positions = torch.arange(ids.shape[1], device=device).repeat(len(ids), 1)
    calls = [(ids, positions, lengths - 1)]
    for i in range(answer_ids.shape[1] - 1):
        token = answer_ids[:, i : i + 1].contiguous()  # [batch, 1]
        calls.append((token, lengths[:, None] + i, torch.zeros_like(lengths)))
    return calls


@torch.inference_mode()
def replay(step: Callable, calls: list[Call], new_cache: Callable[[], Cache]) -> list[Tensor]:
    """Return the logits of each call, [batch, vocab].

    All forms get the calls of eager's answer, so that every step can be compared.
    """
    keys, values = new_cache()
    return [step(*call, keys, values) for call in calls]


def compare(
    step: Callable,
    calls: list[Call],
    new_cache: Callable[[], Cache],
    token_ids: list[list[int]],
    logits: list[Tensor],
) -> dict:
    """Return how far a form is from eager, whose tokens and logits are given."""
    own_logits = replay(step, calls, new_cache)
    own_tokens = torch.stack(own_logits, dim=1).argmax(-1)  # [batch, new tokens]
    return {
        "first_difference": first_difference(own_tokens.tolist(), token_ids),
        "logits_relative_error": measure.relative_error(own_logits, logits),
    }


def first_difference(answers: list[list[int]], expected_answers: list[list[int]]) -> str:
    """Return the prompt and the token at which an answer leaves the expected one."""
    pairs = zip(answers, expected_answers, strict=True)
    for row, (answer, expected) in enumerate(pairs, 1):
        for place, token in enumerate(expected):
            if place >= len(answer) or answer[place] != token:
                return f"prompt {row}, token {place + 1}"
    return "none"


def held_out_loss(step: Callable, tokens: Tensor, config: shapes.Config) -> float:
    """Return the loss of held-out text, [rows, tokens + 1], which is read token by token."""
    rows, slots = tokens.shape

    def new_cache() -> Cache:
        return empty_cache(config, rows=rows, slots=slots, device=tokens.device)

    calls = calls_of(tokens[:, :1].tolist(), tokens[:, 1:].tolist(), tokens.device)
    logits = torch.stack(replay(step, calls, new_cache), dim=1)  # [rows, tokens, vocab]
    targets = tokens[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets).item()


def cpu_seconds(work: Callable[[], object]) -> tuple[float, object]:
    """Return the CPU time of `work`, with the compilers that it starts, and what it returns."""
    before = sum(os.times()[:4])
    result = work()
    return sum(os.times()[:4]) - before, result


def add_seconds(row: dict, seconds: dict, decoded_tokens: int) -> None:
    """Add the tokens per second of a form."""
    row["decode_tokens_per_second"] = decoded_tokens / seconds["seconds"]
    row["min_decode_tokens_per_second"] = decoded_tokens / seconds["max_seconds"]
    row["max_decode_tokens_per_second"] = decoded_tokens / seconds["min_seconds"]


# --- runtimes of the package and of ONNX


def load(folder: Path, form: str) -> Callable:
    """Load a form, and return a function with the arguments of Step.forward."""
    if form == "aoti":
        return torch._inductor.aoti_load_package(folder / "aoti.pt2")
    return load_onnx(folder / f"{form}.onnx")


def load_onnx(file: Path) -> Callable:
    """Return ONNX Runtime's step. It puts the returned cache into the caller's lists."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    providers = onnxruntime.get_available_providers()
    session = onnxruntime.InferenceSession(file, options, providers)
    names = [given.name for given in session.get_inputs()]

    def step(
        ids: Tensor, positions: Tensor, last: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        inputs = {}
        for name, tensor in zip(names, (ids, positions, last, *keys, *values), strict=True):
            inputs[name] = tensor.cpu().numpy()
        outputs = [torch.from_numpy(array).to(ids.device) for array in session.run(None, inputs)]
        logits, *cache = outputs
        keys[:] = cache[: len(keys)]
        values[:] = cache[len(keys) :]
        return logits

    return step


def quantize_onnx(source: Path, target: Path) -> None:
    """Write an .onnx whose weights have 8 bits, and whose activations are quantized as it runs."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target, per_channel=True)


def run_fresh(
    package: Path, calls: list[Call], cache: Cache
) -> tuple[list[Tensor], dict[str, str]]:
    """Run the package in a process that cannot import this repository.

    Return its logits, and its messages about wrong inputs.
    """
    inputs = (*calls[0], *cache)
    ids = inputs[0]

    def with_65_rows(tensor: Tensor) -> Tensor:
        return tensor[:1].repeat_interleave(65, dim=0)

    wrong_calls = {
        "a batch of 65": tree_map(with_65_rows, inputs),
        "ids of 32 bits": (ids.int(), *inputs[1:]),
    }
    torch.save((calls, cache, wrong_calls), package.with_name("calls.pt"))
    subprocess.run(
        [sys.executable, "-I", "-c", FRESH_PROCESS, package],
        cwd=package.parent,
        # Without this variable the process may abort, or go on.
        env={**os.environ, "AOTI_RUNTIME_CHECK_INPUTS": "1"},
        check=True,
    )
    return torch.load(package.with_name("logits.pt"))


# --- GGUF and llama.cpp


def add_shape(writer, config: shapes.Config) -> None:
    """Add the shape of a model to a GGUF file."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    # without these three, llama.cpp takes hidden_size / heads for head_dim
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_vocabulary(writer, config: shapes.Config, folder: Path) -> None:
    """Add the tokens of the folder's tokenizer to a GGUF file, or bytes if it has none.

    llama.cpp finds control tokens and user-defined tokens in a text before it splits the text into
    words. It spells out a special token that is marked as a normal one.
    """
    import gguf

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    if (folder / "tokenizer.json").is_file():
        tokenizer = open_tokenizer(folder, "--model")
        tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        special.update(tokenizer.all_special_ids)
        special_vocab = gguf.SpecialVocab(folder, load_merges=True, n_vocab=config.vocab_size)
        special_vocab.add_to_gguf(writer)
    else:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        # A byte is a token, under the letter that GPT-2 writes for it. The last byte, which is in
        # no UTF-8 text, ends an answer.
        tokens = bytes_to_unicode()
        added = {}
        special = {config.vocab_size - 1}
        writer.add_token_merges(["! !"])  # llama.cpp refuses a list without one
        writer.add_eos_token_id(config.vocab_size - 1)

    names = []
    kinds = []
    for token_id in range(config.vocab_size):
        names.append(tokens.get(token_id, f"<unused row {token_id}>"))
        if token_id in special:
            kinds.append(gguf.TokenType.CONTROL)
        elif token_id in added:
            kinds.append(gguf.TokenType.USER_DEFINED)
        elif token_id in tokens:
            kinds.append(gguf.TokenType.NORMAL)
        else:
            kinds.append(gguf.TokenType.UNUSED)
    writer.add_token_list(names)
    writer.add_token_types(kinds)


def run_llama_cpp(
    net: model.Transformer,
    file: Path,
    made_seconds: float,
    prompts: list[list[int]],
    token_ids: list[list[int]],
    logits: list[Tensor],
) -> dict:
    """Read a GGUF file by transformers, answer with it by llama.cpp, and return its row."""
    import xllamacpp
    from transformers import AutoModelForCausalLM

    read_back = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).state_dict()
    stored_weights = [read_back[name].float() for name, _ in net.named_parameters()]
    weights = [weight.cpu() for weight in net.parameters()]

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.verbosity = -1
    loaded_seconds, server = cpu_seconds(lambda: xllamacpp.Server(params))
    answers = []
    differences = []  # of the first token's log-probability
    for row, prompt in enumerate(prompts):
        reply = server.handle_completions(
            {
                "prompt": prompt,
                "temperature": 0.0,
                "top_k": 1,
                "logprobs": 1,
                "max_tokens": len(logits),
                "cache_prompt": False,
            }
        )
        tokens = reply["choices"][0]["logprobs"]["content"]
        answers.append([token["id"] for token in tokens])
        eager_logprobs = logits[0][row].log_softmax(-1)  # [vocab]
        difference = tokens[0]["logprob"] - eager_logprobs[tokens[0]["id"]].item()
        differences.append(abs(difference))
    return {
        "first_difference": first_difference(answers, token_ids),
        "file_bytes": file.stat().st_size,
        "make_and_load_seconds": [made_seconds, loaded_seconds],
        "weights_relative_error": measure.relative_error(stored_weights, weights),
        "logprob_difference": max(differences),
    }


# --- the checks


def check(rows: dict[str, dict], config: shapes.Config) -> list[str]:
    """Assert that the forms are near eager, and that wrong inputs are rejected.

    Return a line for each thing that was checked.
    """
    checked = []
    for form, most_error in MOST_ERROR.items():
        if form not in rows:
            continue
        row = rows[form]
        what = "weights" if form in ("f16", "q8_0") else "logits"
        error = max(row[f"{what}_relative_error"], row.get("fresh_logits_relative_error", 0))
        assert error <= most_error, f"{form}: the error of {what} is {error:.1e}"
        checked.append(f"{form}: {what} differ from eager's by at most {error:.1e} (relative)")
    if "aoti" in rows:
        rejected = rows["aoti"]["rejected"]
        assert len(rejected) == 2, rejected
        for line in rejected.values():
            checked.append(f"aoti in a process without this source rejects an input: {line}")
    if "onnx" in rows:
        outputs = rows["onnx"]["outputs"]
        outputs_in_place = rows["onnx"]["outputs_in_place"]
        assert outputs == 1 + 2 * config.num_hidden_layers, outputs
        assert outputs_in_place == 1, outputs_in_place
        checked.append(
            f"onnx returns the cache, {outputs} outputs; with in-place writes the exporter drops "
            f"it without an error, {outputs_in_place} output"
        )
    if "int8" in rows:
        cost = rows["int8"]["loss"] - rows["eager"]["loss"]
        checked.append(f"int8 costs {cost:+.4f} nats on {LOSS_ROWS * LOSS_TOKENS} held-out tokens")
    return checked
