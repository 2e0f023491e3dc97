"""Flags, prompts and tokenizers of this chapter, and the comparison with transformers.

All scripts of the chapter share this file. check_tokens asserts that they generate the same greedy
tokens in fp32 as transformers' generate.
"""

import argparse
import contextlib
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from common import cli, hardware, runtime
from common.exits import UserError
from common.runtime import DTYPES
from lm import reference, shapes, weights
from lm.generate import Generated, generate, sample
from lm.tokenizer import generation_settings, has_tokenizer, open_tokenizer, stop_ids

DEFAULT_PROMPT = "def main():"
# A model with at most so many parameters is small: its --dtype auto is fp32, and its tokens are
# compared with transformers' tokens.
SMALL = 200e6
# A smaller --temperature is greedy. Logits divided by it would not stay finite.
LEAST_TEMPERATURE = 1e-5
# A model without a tokenizer reads bytes. It may have some tokens more, such as padding.
MOST_BYTE_TOKENS = 320
# Keys of generation_config.json that change greedy tokens, and the values that change nothing. None
# of them is applied here.
GREEDY_KEYS = {
    "bad_words_ids": (),
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": (),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}


# --- flags and prompts


def say_if_random(model: str) -> None:
    """Print that an answer means nothing, if the model has random weights."""
    if not shapes.has_weights(model):
        runtime.print0(f"--model {model} has random weights: what it answers means nothing")


def parser(description: str, default_prompt: str = DEFAULT_PROMPT) -> cli.Parser:
    """Return a parser with the flags of every script that generates text.

    `default_prompt` is what --help calls the default of --prompt.
    """
    flags = cli.Parser(description)
    add = flags.add_argument
    add(
        "--model",
        default="nano",
        help=f"a Hugging Face folder, or with random weights: {', '.join(shapes.SIZES)}",
    )
    one_or_many = flags.add_mutually_exclusive_group()
    one_or_many.add_argument("--prompt", help=f"text to continue (default: {default_prompt})")
    one_or_many.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a file with one prompt a line: one batch"
    )
    add("--chat", action="store_true", help="put each prompt into the tokenizer's chat template")
    add("--max-new-tokens", type=cli.positive_int, default=32)
    add("--temperature", type=temperature, default=0.0, help="0: greedy")
    add(
        "--top-k",
        type=cli.natural,
        default=0,
        help="draw from the k likeliest tokens (0: from all)",
    )
    add(
        "--top-p",
        type=cli.positive,
        default=1.0,
        help="draw from the likeliest tokens with this share together",
    )
    add("--seed", type=cli.natural, default=0, help="of random weights and of sampling")
    add(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of weights and cache (auto: fp32 if small)",
    )
    cli.add_device_and_json(flags)
    return flags


def temperature(text: str) -> float:
    """Return the temperature in `text`: 0 if it is so small that the likeliest token is certain."""
    value = cli.not_negative(text)
    return value if value >= LEAST_TEMPERATURE else 0.0


class Text:
    """The prompts of the flags as token ids, and generated token ids as text.

    The model's tokenizer makes the tokens. A model without a tokenizer reads and writes bytes.

    Attributes:
        texts: The prompts, as the user wrote them.
        prompts: The token ids of each prompt.
        length: The slots that a cache needs for each prompt and its answer.
        stop: The token ids that end an answer.
        folder_stop: The ids in `stop` that also end an answer of transformers' generate.
        not_applied: The settings of the folder that change greedy tokens, and that do not count
            here.
        vocab_size: The number of tokens. Further rows of the model's vocabulary are padding.
    """

    def __init__(self, args: argparse.Namespace, config: shapes.Config, *, ahead: int = 0) -> None:
        """Read the prompts. `ahead` is the number of positions used beyond the last token.

        Raise UserError for flags, files or prompts that the model cannot answer.
        """
        check_sampling_flags(args)
        self.model = args.model
        self.config = config
        self.vocab_size = config.vocab_size
        self.chat = args.chat
        self.tokenizer = read_tokenizer(args.model)
        if self.tokenizer is None:
            check_reads_bytes(args.model, config)
        if args.chat:
            check_chat_template(self.tokenizer, args.model)

        if args.prompts is not None:
            self.texts = read_prompts(args.prompts)
        else:
            self.texts = [DEFAULT_PROMPT if args.prompt is None else args.prompt]
        self.prompts = []
        for text in self.texts:
            ids = self.encode(text)
            if not ids:
                raise UserError(f"an empty prompt, {text!r}: give --prompt or --prompts a text")
            self.check_vocabulary(ids, f"the prompt {reprlib.repr(text)}")
            self.prompts.append(ids)

        self.length = cache_length(max(map(len, self.prompts)), args, config, ahead)
        self.folder_stop = stop_ids(args.model)
        self.stop = stop_ids(args.model, self.tokenizer)
        file, settings = generation_settings(args.model)
        self.not_applied = not_applied(settings)
        if self.not_applied:
            runtime.print0(f"not applied, from {file}: {self.not_applied}")

    def check_vocabulary(self, ids: Iterable[int], where: str) -> None:
        """Raise UserError if a token is not in the model's vocabulary.

        A tokenizer can have more tokens than the model, such as a padding token that was added. The
        model cannot read these tokens. That matters only if a text contains them.
        """
        largest = max(ids)
        if largest < self.config.vocab_size:
            return
        limit = f"beyond the {self.config.vocab_size} tokens of --model {self.model}"
        if self.tokenizer is None:
            raise UserError(
                f"byte {largest} of {where} is {limit}, which has no tokenizer: "
                "put its tokenizer.json into the folder"
            )
        token = self.tokenizer.convert_ids_to_tokens(int(largest))
        raise UserError(
            f"token {largest} ({token!r}) of {where} is {limit}, whose tokenizer has "
            f"{len(self.tokenizer)}: use the tokenizer that this model was trained with"
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt; with --chat, in the tokenizer's chat template."""
        if self.tokenizer is None:
            return list(text.encode(errors="surrogateescape"))
        if self.chat:
            messages = [{"role": "user", "content": text}]
            with as_user_error(
                f"--chat: the chat template of --model {self.model} fails for a prompt alone",
                "leave --chat out, and write the whole conversation into the prompt",
            ):
                return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
                    "input_ids"
                ]
        where = f"the prompt {reprlib.repr(text)}"
        with as_user_error(f"{where} cannot be tokenized", "write it in UTF-8"):
            return self.tokenizer(text, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        if self.tokenizer is not None:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        # a token beyond the bytes is shown as a question mark
        values = [token if token < 256 else ord("?") for token in ids]
        return bytes(values).decode(errors="replace")


@contextlib.contextmanager
def as_user_error(what: str, fix: str) -> Iterator[None]:
    """Raise UserError in place of any exception of the `with` block.

    Libraries raise many types of exceptions for a file that the user can repair. `what` says which
    of the user's values cannot be used, and `fix` what to do.
    """
    try:
        yield
    except Exception as error:
        raise UserError(f"{what} ({type(error).__name__}: {error}): {fix}") from None


def check_sampling_flags(args: argparse.Namespace) -> None:
    """Raise UserError for --top-k and --top-p that have no effect or no meaning."""
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        raise UserError("--top-k and --top-p need sampling: add --temperature 0.8")
    if args.top_p > 1:
        raise UserError(
            f"--top-p {args.top_p:g} is over 1: it is a share of the probability, such as 0.9"
        )


def read_tokenizer(model: str, flag: str = "--model"):
    """Return the tokenizer in a model's folder, or None if the folder has none."""
    return open_tokenizer(model, flag) if has_tokenizer(model) else None


def check_reads_bytes(model: str, config: shapes.Config) -> None:
    """Raise UserError if a model without a tokenizer was not trained on bytes.

    Its tokens would be other words. Random weights mean nothing, so they may read bytes.
    """
    if config.vocab_size <= MOST_BYTE_TOKENS or not shapes.has_weights(model):
        return
    # A run on bytes keeps the vocabulary of its size. transformers would have written its version.
    content = shapes.read_config_json(model)
    if config in shapes.SIZES.values() and "transformers_version" not in content:
        return
    raise UserError(
        f"--model {model} has {config.vocab_size} tokens and no tokenizer, and bytes are only 256: "
        "copy tokenizer.json and tokenizer_config.json of this model into the folder"
    )


def check_chat_template(tokenizer, model: str) -> None:
    """Raise UserError if the tokenizer has no chat template that is used by default."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        raise UserError(
            f"--chat: --model {model} has no chat template: leave --chat out, "
            "or use a model that was trained on chats"
        )
    if isinstance(template, dict) and "default" not in template:
        names = ", ".join(sorted(template))
        raise UserError(
            f"--chat: --model {model} has several chat templates ({names}) and none is the "
            "default: save the one to use as chat_template.jinja in the folder"
        )


def read_prompts(file: Path) -> list[str]:
    r"""Return the prompts in a UTF-8 file: one a line, without blank lines.

    Lines end with \n or \r\n. Other characters that some editors show as line ends, such as
    U+2028, belong to the prompt. A byte order mark at the start of the file does not.
    """
    with as_user_error(f"--prompts {file} is no text file", "use a UTF-8 file, one prompt a line"):
        content = file.read_bytes().decode("utf-8-sig")
    lines = content.replace("\r\n", "\n").split("\n")
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--prompts {file} has no prompt: write one a line")
    return prompts


def cache_length(
    longest: int,
    args: argparse.Namespace,
    config: shapes.Config,
    ahead: int,
) -> int:
    """Return how many slots a cache needs for a prompt of `longest` tokens and its answer.

    Raise UserError if that is more than the context of the model.
    """
    length = longest + args.max_new_tokens + ahead
    if length > config.max_position_embeddings:
        room = config.max_position_embeddings - longest - ahead
        fix = (
            f"use --max-new-tokens {room}" if room > 0 else "shorten it with --prompt or --prompts"
        )
        raise UserError(
            f"a prompt of {longest} tokens in a context of {config.max_position_embeddings}: {fix}"
        )
    # Otherwise attention would copy its mask in each layer to align it.
    return math.ceil(length / 16) * 16


def not_applied(settings: dict) -> str:
    """Return the settings of generate that change greedy tokens, with their values, or ""."""
    found = []
    for key, neutral_values in GREEDY_KEYS.items():
        value = settings.get(key)
        if value is not None and value not in neutral_values:
            found.append(f"{key} {reprlib.repr(value)}")
    return ", ".join(found)


def choose_dtype(args: argparse.Namespace, config: shapes.Config, device: torch.device) -> str:
    """Return the dtype that --dtype means on this device.

    "auto" is fp32 for a small model. There fp32 takes little time, and makes tokens comparable.
    """
    if args.dtype == "auto" and shapes.parameter_count(config) <= SMALL:
        return "fp32"
    return hardware.choose_dtype(args.dtype, device)


def answer(
    steps: tuple[Callable, Callable],
    text: Text,
    args: argparse.Namespace,
    device: torch.device,
    *,
    max_new_tokens: int | None = None,
    prompts: list[list[int]] | None = None,
) -> Generated:
    """Answer all prompts of a text as one batch, or these, with the sampling of the flags.

    `steps` are prefill and decode. `max_new_tokens` defaults to the flag.
    """
    prefill, decode = steps
    generator = torch.Generator(device).manual_seed(args.seed)
    return generate(
        prefill,
        decode,
        text.prompts if prompts is None else prompts,
        max_new_tokens=args.max_new_tokens if max_new_tokens is None else max_new_tokens,
        choose=partial(sample, args=args, generator=generator),
        device=device,
        stop=text.stop,
        model=f"--model {args.model}",
    )


# --- the comparison with transformers


def check_tokens(
    found: list[list[int]],
    text: Text,
    args: argparse.Namespace,
    device: torch.device,
) -> list[str]:
    """Assert that transformers' generate gives the same greedy fp32 tokens, prompt by prompt.

    transformers computes on the script's GPU if both copies of the weights fit there, else on the
    CPU. Sampled tokens, tokens in 16 bits and tokens of large models are not compared: then the
    list is empty.
    """
    parameters = shapes.parameter_count(text.config)
    if args.temperature or args.dtype != "fp32" or parameters > SMALL:
        return []
    with reference.comparison(device, needed_bytes=2 * 4 * parameters) as where:
        expected, conditions = tokens_of_transformers(text, args, where)
    for ids, expected_ids in zip(found, expected, strict=True):
        assert ids == expected_ids, f"tokens {ids}, and transformers' generate gives {expected_ids}"
    if not any(found):
        return []
    line = f"the {sum(map(len, found))} greedy tokens are those of transformers' generate"
    line += "".join(conditions)
    if where.type != device.type:
        line += f", computed on the {where.type.upper()}"
    if device.type == "cuda" and where.type == "cpu":
        line += ": its model does not fit on the GPU beside this one"
    return [line]


def tokens_of_transformers(
    text: Text,
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[list[list[int]], list[str]]:
    """Return each prompt's new tokens by transformers' generate, and what else was done to them.

    transformers reads the folder itself, and gets no setting but do_sample=False and
    max_new_tokens. Every exception is in the second list, as words for the line of the check.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    baseline, conditions = model_of_transformers(text, args, device)
    if conditions or text.not_applied:  # the folder's settings are not there, or do not count
        stop = sorted(text.folder_stop) or None
        baseline.generation_config = GenerationConfig(eos_token_id=stop)
    if text.not_applied:
        conditions.append(f" without {text.not_applied}: of plain greedy decoding")
    if baseline.generation_config.pad_token_id is None:
        baseline.generation_config.pad_token_id = 0  # a warning less: one prompt has no padding

    rows_left_out = list(range(text.vocab_size, text.config.vocab_size))
    settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    if rows_left_out:
        settings["suppress_tokens"] = rows_left_out
        conditions.append(f" from the first {text.vocab_size} rows of the vocabulary")
    answers = []
    goes_on = False
    for prompt in text.prompts:
        inputs = torch.tensor([prompt], device=device)
        output = baseline.generate(inputs, attention_mask=torch.ones_like(inputs), **settings)
        answer = []
        for token in output[0, len(prompt) :].tolist():
            if token in text.stop:
                goes_on |= token not in text.folder_stop
                break
            answer.append(token)
        answers.append(answer)
    if goes_on:
        conditions.append(", which does not end at the tokenizer's stop token")
    return answers, conditions


def model_of_transformers(
    text: Text,
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[nn.Module, list[str]]:
    """Return transformers' model. The list says if its weights were not read by transformers."""
    folder = Path(args.model)
    why = ""
    if shapes.has_weights(args.model):
        # with adapter_config.json in the folder, transformers would open the model that it names
        if not (folder / "adapter_config.json").exists():
            try:
                return reference.read_transformers(folder, device), []
            except Exception as error:  # it reads fewer kinds of folders, and raises many types
                why = f" ({type(error).__name__})"
        why = f" with weights that this script has read: transformers does not open {folder}{why}"
    net = weights.build(args.model, text.config, seed=args.seed, device=device)
    baseline = reference.build_transformers(text.config, net.state_dict(), device)
    return baseline, [why]
