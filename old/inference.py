"""What the inference scripts share around generate.py: flags, text to tokens and back, the figures of a run."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from old import cli, shapes
from old.data import load_tokenizer
from old.exits import UserError
from old.generate import Generated
from old.hardware import device_name, memory_bandwidth

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
QUESTION = "def main():"  # what a model answers that is asked nothing


def inference_parser(description: str) -> cli.Parser:
    """The flags of every script that generates text."""
    parser = cli.Parser(description)
    add = parser.add_argument
    add("--model", default="nano", help=f"a Hugging Face folder, or with random weights: {' | '.join(shapes.SIZES)}")
    add("--tokenizer", help="an HF name or folder (default: that of the --model folder, else bytes)")
    add("--prompt", help="text to go on from")
    add("--prompts", type=cli.path, metavar="FILE", help="a file with one prompt a line, all generated as one batch")
    add("--chat", action="store_true", help="put each prompt into the chat template of the tokenizer")
    add("--max-new-tokens", type=cli.positive_int, default=32)
    add("--temperature", type=cli.not_negative, default=0.0, help="0: always the likeliest token")
    add("--top-k", type=cli.natural, default=0, help="draw from the k likeliest tokens (0: from all)")
    add("--top-p", type=cli.share, default=1.0, help="draw from the likeliest tokens that have this share together")
    add("--seed", type=cli.natural, default=0, help="of the random weights and of what is drawn")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="of weights and cache")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    return parser


class Text:
    """Prompts to tokens and back: with the tokenizer of a Hugging Face folder, or as bytes where there is none."""

    def __init__(self, model: str, tokenizer: str | None, config: shapes.Config) -> None:
        its_own = any((Path(model) / name).is_file() for name in TOKENIZER_FILES)
        found = tokenizer or (model if its_own else None)
        self.hf = load_tokenizer(found) if found else None
        self.config = config
        self.ends = _ends_of_generation(Path(model) / "generation_config.json")
        if self.hf is not None and len(self.hf) > config.vocab_size:
            raise UserError(
                f"--tokenizer {found} has {len(self.hf)} tokens, the model {config.vocab_size}: it is another model's"
            )

    @property
    def stop(self) -> frozenset[int]:
        """The tokens that end an answer."""
        if self.hf is None:
            return self.ends
        end_of_turn = self.hf.convert_tokens_to_ids("<|eot_id|>")  # Llama 3's; a tokenizer without it gives its unknown
        ends = {self.hf.eos_token_id, None if end_of_turn == self.hf.unk_token_id else end_of_turn}
        return self.ends | frozenset(ends - {None})

    def encode(self, prompt: str, *, chat: bool, max_new_tokens: int, draft_tokens: int = 0) -> list[int]:
        """The tokens of a prompt; UserError for one that the model cannot go on from. `draft_tokens`: guesses, which
        may reach as far beyond the last new token."""
        if not prompt:
            raise UserError("an empty prompt: there is nothing to go on from")
        if chat and (self.hf is None or self.hf.chat_template is None):
            raise UserError("--chat: the tokenizer has no chat template")
        if chat:
            messages = [{"role": "user", "content": prompt}]
            ids = self.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        elif self.hf is not None:
            ids = self.hf(prompt, verbose=False)["input_ids"]
        else:
            ids = list(prompt.encode(errors="surrogateescape"))  # a byte of the command line that is no UTF-8 stays one
        if not ids:
            raise UserError("a prompt without a token: there is nothing to go on from")
        self.check_known(ids, "the prompt")
        if (room := self.config.max_position_embeddings - len(ids) - draft_tokens) < max_new_tokens:
            wanted = f"a prompt of {len(ids)} tokens and --max-new-tokens {max_new_tokens}"
            wanted += f" with --draft-tokens {draft_tokens}" if draft_tokens else ""
            fix = f"at most {room} new tokens fit" if room > 0 else f"shorten the prompt by {1 - room} tokens or more"
            raise UserError(
                f"{wanted} are longer than the model's context of {self.config.max_position_embeddings}: {fix}"
            )
        return ids

    def check_known(self, ids: list[int], where: str) -> None:
        """UserError for a token that the model has no row of its embedding for."""
        if max(ids) >= self.config.vocab_size:
            raise UserError(
                f"{where} has token {max(ids)}, and the model knows {self.config.vocab_size}: "
                "give its own tokenizer with --tokenizer"
            )

    def decode(self, ids: list[int]) -> str:
        if self.hf is not None:
            return self.hf.decode(ids, skip_special_tokens=True)
        return bytes(token if token < 256 else ord("?") for token in ids).decode(errors="replace")


def _ends_of_generation(file: Path) -> frozenset[int]:
    """The eos_token_id of a generation_config.json, one number or several; nothing where there is no such file."""
    if not file.is_file():
        return frozenset()
    try:
        ends = json.loads(file.read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error!r}") from None
    if ends is None:
        return frozenset()
    ends = ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int for end in ends):
        raise UserError(f"{file}: its eos_token_id {ends} is no token, nor a list of tokens")
    return frozenset(ends)


def read_prompts(*, prompt: str | None, file: Path | None) -> list[str]:
    """The prompts of --prompt and --prompts; one of our own where neither is given."""
    if prompt is not None and file is not None:
        raise UserError("--prompt and --prompts: give one of them")
    if file is None:
        return [QUESTION if prompt is None else prompt]
    try:
        prompts = [line for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {file}: {error}") from None
    if not prompts:
        raise UserError(f"--prompts {file}: no line with text")
    return prompts


def check_drawing(*, temperature: float, top_k: int, top_p: float) -> None:
    """UserError for flags that choose among what is drawn where nothing is."""
    if temperature == 0 and (top_k or top_p < 1):
        raise UserError("--top-k and --top-p: at --temperature 0 nothing is drawn; add --temperature 0.8")


def stream_to(write: Callable[[str], object], text: Text) -> Callable[[list[int | None]], None]:
    """For generate's on_tokens: write the first row's text as it grows, whole characters only."""
    ids, written = [], ""

    def on_tokens(fresh: list[int | None]) -> None:
        nonlocal written
        if fresh[0] is None:
            return
        ids.append(fresh[0])
        whole = text.decode(ids)
        if whole.startswith(written) and not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            write(whole[len(written) :])
            written = whole

    return on_tokens


def read_bandwidth(device: torch.device, nbytes: int) -> float | None:
    """Bytes per second that weights of this size can be read with: the data sheet's for a GPU, on a CPU measured.

    The CPU's buffer is as large as the weights, so that weights that fit into its cache have the cache's roof; but a
    GiB at most, which no cache holds: the memory is full of weights.
    """
    if device.type != "cpu":
        return memory_bandwidth(device_name(device))
    buffer = torch.ones(max(1, min(nbytes, 2**30) // 4))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - started)
    return buffer.nbytes / best


def speed(result: Generated, text: Text, *, device: torch.device, bytes_per_step: int) -> dict:
    """The keys of a summary that every script that generates has. `bytes_per_step`: the weights that a decode step
    reads from memory, on one device."""
    new_tokens = sum(len(ids) for ids in result.token_ids)
    known = result.decode_steps > 0
    reads = result.weight_reads or result.decode_steps
    bytes_per_second = bytes_per_step * reads / result.decode_seconds if known else None
    roof = read_bandwidth(device, bytes_per_step)
    return {
        "token_ids": result.token_ids,
        "texts": [text.decode(ids) for ids in result.token_ids],
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": new_tokens,
        "time_to_first_token_seconds": result.prefill_seconds,
        "prefill_tokens_per_second": result.prompt_tokens / result.prefill_seconds,
        "decode_tokens_per_second": result.decoded_tokens / result.decode_seconds if known else None,
        "weight_bytes_read_per_second": bytes_per_second,
        "read_bandwidth_bytes_per_second": roof,
        "bandwidth_share": bytes_per_second / roof if known and roof else None,
    }
