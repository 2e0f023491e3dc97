"""For export.py: a trained nano, the GGUF file, llama.cpp, and the process that has only torch and a package."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from common import exits, measure
from lm import model, shapes
from lm.data import one_batch
from lm.weights import build

ONNX, GGUF = ("onnx", "onnxscript", "onnxruntime"), ("gguf", "xllamacpp")
FORMS = {"aoti": ("g++",), "onnx": ONNX, "int8": ONNX, "f16": GGUF, "q8_0": GGUF}  # and needs
COLUMNS = {
    "form": "form",
    "first_difference": "leaves eager at",
    "logits_relative_error": "error of logits",
}
COLUMNS |= {"loss": "loss", "file_bytes": "file", "make_and_load_seconds": "CPU to make, to load"}
COLUMNS["decode_tokens_per_second"] = "decode"

# For `python -I` in a folder of its own, which cannot import this repository.
FRESH_PROCESS = """
import sys, torch
calls, cache, wrong = torch.load("calls.pt")
step = torch._inductor.aoti_load_package(sys.argv[1])
logits, refused = [step(*call, *cache) for call in calls], {}
for name, call in wrong.items():
    try:
        step(*call)
    except RuntimeError as error:  # ids are the first input
        line = next(line for line in str(error).splitlines() if "input_handles" in line)
        refused[name] = line.replace("input_handles[0]", "ids")
torch.save((logits, refused), "logits.pt")
"""


def cpu_seconds(work: Callable, *arguments) -> tuple[float, object]:
    """What `work` takes, with the compilers that it starts, and what it returns."""
    before = sum(os.times()[:4])
    result = work(*arguments)
    return sum(os.times()[:4]) - before, result


def train_nano(folder: Path, config: shapes.Config) -> str:
    """A Hugging Face folder with a nano that has learned something: random weights repeat one token for ever."""
    from safetensors.torch import save_file

    net = build("nano", config, seed=0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    batches = one_batch(150 * 4, 32, torch.device("cpu"))
    for inputs, targets in zip(*(part.split(4) for part in batches), strict=True):
        net(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir()
    save_file(dict(net.named_parameters()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shapes.config_json(config)))
    return str(folder)


def write_gguf(net: model.Transformer, folder: Path, file: Path) -> None:
    """All of a model in one file: shape, vocabulary and weights (by the file's name F16, or Q8_0 in blocks of 32)."""
    import gguf

    config = net.config
    writer = gguf.GGUFWriter(file, "llama")
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
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    if (folder / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens, special = (
            {i: token for token, i in tokenizer.get_vocab().items()},
            {*tokenizer.all_special_ids},
        )
        special_vocab = gguf.SpecialVocab(folder, load_merges=True, n_vocab=config.vocab_size)
        special_vocab.add_to_gguf(writer)
    else:
        # a byte is a token, under the letter that GPT-2 writes for it; the last, in no text, ends
        # an answer
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        tokens, special = bytes_to_unicode(), {config.vocab_size - 1}
        writer.add_token_merges(["! !"])  # llama.cpp refuses a list without one
        writer.add_eos_token_id(config.vocab_size - 1)
    writer.add_token_list([tokens.get(i, f"<unused{i}>") for i in range(config.vocab_size)])
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([kinds[i in special] for i in range(config.vocab_size)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in net.named_parameters():
        # it rotates neighbours, where we rotate halves
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = (
                weight.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
            )
        of_matrix = "F16" if weight.shape[-1] % 32 else file.stem.upper()
        kind = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else of_matrix]
        data = gguf.quants.quantize(weight.detach().cpu().contiguous().numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_row(
    net, folder: Path, file: Path, prompts, token_ids: list[list[int]], logits: list[Tensor]
) -> dict:
    """Write a GGUF file, read it by transformers, run it by llama.cpp prompt by prompt."""
    import xllamacpp
    from transformers import AutoModelForCausalLM

    made, _ = cpu_seconds(write_gguf, net, folder, file)
    read_back = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).state_dict()
    weights = [(read_back[name].float(), weight.cpu()) for name, weight in net.named_parameters()]
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity = str(file), -1
    loaded, server = cpu_seconds(xllamacpp.Server, params)
    greedy = {
        "temperature": 0.0,
        "top_k": 1,
        "logprobs": 1,
        "max_tokens": len(logits),
        "cache_prompt": False,
    }
    answers = [
        server.handle_completions({"prompt": ids, **greedy})["choices"][0]["logprobs"]
        for ids in prompts
    ]
    found = [[token["id"] for token in answer["content"]] for answer in answers]
    ours = [row.log_softmax(-1)[ids[0]].item() for row, ids in zip(logits[0], found, strict=True)]
    return {
        "first_difference": first_difference(found, token_ids),
        "file_bytes": file.stat().st_size,
        "make_and_load_seconds": [made, loaded],
        "weights_relative_error": measure.relative_error(*zip(*weights, strict=True)),
        "logprob_difference": max(
            abs(a["content"][0]["logprob"] - b) for a, b in zip(answers, ours, strict=True)
        ),
    }


def first_difference(found: list[list[int]], expected: list[list[int]]) -> str:
    """The prompt and the token at which an answer leaves the expected one."""
    for row, (ids, ours) in enumerate(zip(found, expected, strict=True), 1):
        wrong = [place for place, token in enumerate(ours) if ids[place : place + 1] != [token]]
        if wrong:
            return f"prompt {row}, token {wrong[0] + 1}"
    return "none"


def possible(args, config: shapes.Config) -> list[str]:
    """The forms of --forms that can be made here; prints why others are left out. UserError for an unknown one."""
    forms = args.forms.split(",")
    if any(form not in FORMS for form in forms) or ("int8" in forms and "onnx" not in forms):
        raise exits.UserError(
            f"--forms {args.forms}: use some of {','.join(FORMS)}; int8 is made from onnx"
        )
    special_shape = config.rope_scaling or config.qkv_bias or config.qk_norm
    plain = not special_shape and has_words_of_gpt2(args.model)
    missing = {
        form: [need for need in FORMS[form] if not (which(need) or find_spec(need))]
        for form in forms
    }
    for form in forms:
        if FORMS[form] == GGUF and not plain:
            missing[form].append("a Llama without rope_scaling, with GPT-2's words")
        if missing[form]:
            print(f"left out: {form}: needs {', '.join(missing[form])}")
    return [form for form in forms if not missing[form]]


def has_words_of_gpt2(model: str) -> bool:
    """Tell whether a model's tokenizer splits a text into words as GPT-2's does, or reads bytes."""
    file = Path(model, "tokenizer.json")
    if not file.is_file():
        return not any(Path(model).glob("tokenizer*"))
    words = json.loads(file.read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    return words.get("type") == "ByteLevel"


def load(folder: Path, form: str) -> Callable:
    """A package, or ONNX Runtime behind Step's signature: the caller's lists get the returned cache."""
    if form == "aoti":
        return torch._inductor.aoti_load_package(folder / "aoti.pt2")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        folder / f"{form}.onnx", options, onnxruntime.get_available_providers()
    )

    def step(
        ids: Tensor, positions: Tensor, last: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        tensors = zip(session.get_inputs(), (ids, positions, last, *keys, *values), strict=True)
        found = session.run(None, {given.name: tensor.cpu().numpy() for given, tensor in tensors})
        logits, *cache = (torch.from_numpy(each).to(ids.device) for each in found)
        keys[:], values[:] = cache[: len(keys)], cache[len(keys) :]
        return logits

    return step


def run_fresh(package: Path, calls: list[tuple], cache: tuple) -> tuple[list, dict]:
    """The logits of the package in a process that cannot import this repository, and what it says to wrong inputs."""
    ids, *others = (*calls[0], *cache)
    too_many = tree_map(lambda each: each[:1].repeat_interleave(65, dim=0), (ids, *others))
    wrong = {"a batch of 65": too_many, "ids of 32 bits": (ids.int(), *others)}
    torch.save((calls, cache, wrong), package.with_name("calls.pt"))
    # without it the process may abort, or go on
    checks = {**os.environ, "AOTI_RUNTIME_CHECK_INPUTS": "1"}
    subprocess.run(
        [sys.executable, "-I", "-c", FRESH_PROCESS, package],
        cwd=package.parent,
        env=checks,
        check=True,
    )
    return torch.load(package.with_name("logits.pt"))
