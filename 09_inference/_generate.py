"""Generate text: prompts, a KV cache, prefill and decode, sampling, and a comparison.

The scripts of this chapter share this file. check_tokens asserts that they generate the same
greedy tokens in fp32 as transformers' generate.
"""

import argparse
import contextlib
import math
import reprlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import cli, hardware, measure, report, runtime
from common.exits import UserError
from common.runtime import DTYPES
from lm import reference, shapes, weights
from lm.tokenizer import generation_settings, has_tokenizer, open_tokenizer, stop_ids

DEFAULT_PROMPT = "def main():"
# A model with at most so many parameters is small: its --dtype auto is fp32, and its tokens are
# compared with transformers' tokens.
SMALL = 200e6
BUCKET = 256  # slots of the cache: a captured step reads a multiple of them
# Decode steps between two reads of their tokens. If a GPU had to hand over each token at once, it
# would wait for Python at every step.
READ_EVERY = 8
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
# Parts of the messages with which the system, safetensors, torch.save and NumPy report a full disk.
DISK_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "file write failed",
    "requested and",  # "100 requested and 20 written"
    "problem writing element",
)
LEAST_FREE = 2**14  # bytes; a disk with less is full, whatever an error says


# --- the cache


class StaticCache:
    """The keys and values of all tokens so far, in memory that is allocated once.

    It is the cache that kv_cache.py explains, for many ranks and for CUDA graphs, too. It has two
    tensors per layer, [batch, kv_heads, slots, head_dim].

    The slot of a token is its position, and the token sees the slots up to its own. So it never
    sees what padding or a rejected guess has left in later slots. The next token at that position
    overwrites it.

    Attributes:
        keys, values: The tensors, by the name of the layer.
        slots: The numbers of the slots that attention reads: all of them, or the first ones.
        filled: The number of slots that may be in use. Prefill sets it, a captured step adds to it,
            and speculative decoding takes back the slots of rejected guesses.
    """

    def __init__(
        self,
        config: shapes.Config,
        *,
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: int = 1,
    ) -> None:
        """Allocate `length` slots for each text of the batch. `ranks` share the heads."""
        shape = (batch, config.num_key_value_heads // ranks, length, config.head_dim)
        self.keys = {}
        self.values = {}
        for layer in range(config.num_hidden_layers):
            # Not torch.empty: an unused slot has weight 0 in attention, and 0 times NaN is NaN.
            self.keys[str(layer)] = torch.zeros(shape, dtype=dtype, device=device)
            self.values[str(layer)] = torch.zeros(shape, dtype=dtype, device=device)
        self.tensors = [*self.keys.values(), *self.values.values()]
        self.rows = torch.arange(batch, device=device)[:, None]  # [batch, 1]
        self.slots = torch.arange(length, device=device)
        self.filled = 0

    def mask(self, positions: Tensor) -> Tensor:
        """Return the attention mask, [batch, 1, tokens, slots], for positions [batch, tokens].

        It is added to the scores: 0 where a token sees a slot, -inf elsewhere.
        """
        visible = self.slots <= positions.unsqueeze(-1)  # [batch, tokens, slots]
        mask = torch.zeros(visible.shape, dtype=self.keys["0"].dtype, device=visible.device)
        return mask.masked_fill(~visible, -torch.inf).unsqueeze(1)

    def updater(self, layer: str, positions: Tensor) -> Callable:
        """Return update_cache(k, v) of a layer, for tokens at these positions, [batch, tokens].

        It writes k and v, [batch, kv_heads, tokens, head_dim], and returns the keys and values of
        all slots that attention reads.
        """
        slot_count = self.slots.shape[0]  # not len(), which torch.export takes as a constant
        keys = self.keys[layer][:, :, :slot_count]
        values = self.values[layer][:, :, :slot_count]
        return partial(write, keys, values, self.rows, positions)


def write(
    keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Write k and v of new tokens into a cache, and return the keys and values of the cache.

    Token t of text b goes to slot slots[b, t] of row rows[b, t].
    """
    keys[rows, :, slots] = k.transpose(1, 2)  # [batch, tokens, kv_heads, head_dim]
    values[rows, :, slots] = v.transpose(1, 2)
    return keys, values


# --- prefill and decode


def steps_of(net: nn.Module, cache: StaticCache) -> tuple[Callable, Callable]:
    """Return the two steps of generation, prefill and decode.

    prefill(ids, positions, last) reads all prompts at once. ids and positions are [batch, tokens],
    and last, [batch], is the position of the last token of each prompt.

    decode(ids, positions) reads one token of each text. Both are [batch].

    Both return the logits that choose the next token of each text, [batch, vocab].
    """
    # cuDNN's attention would build a plan for each new length, which takes 0.4 to 1 s.
    torch.backends.cuda.enable_cudnn_sdp(False)

    # Prompts have many lengths. Blocks that decode has compiled would be compiled for each.
    @torch.compiler.set_stance("force_eager")
    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        cache.filled = ids.shape[1]
        hidden = net.model(ids, positions, cache)  # [batch, tokens, hidden]
        rows = torch.arange(len(ids), device=ids.device)
        # The head is large, so it computes the logits of the last tokens only.
        return net.lm_head(hidden[rows, last])

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        logits = net(ids[:, None], positions=positions[:, None], cache=cache)  # [batch, 1, vocab]
        return logits[:, -1]

    return prefill, decode


def compiled(net: nn.Module, cache: StaticCache, *steps: Callable) -> list[Callable]:
    """Return compiled versions of steps that take (ids, positions).

    A step is compiled once, because the cache keeps its addresses and its shape. On a GPU a block
    is compiled, whose code serves all blocks, and then the whole step is captured as a CUDA graph,
    so that no kernel waits for Python.
    """
    if not cache.slots.is_cuda:
        return [torch.compile(step, dynamic=False) for step in steps]
    options = {
        # a matmul with one row becomes a sum, without a tensor of converted weights
        "coordinate_descent_tuning": True,
        # q, k and v in one kernel, gate and up in another
        "combo_kernels": True,
    }
    # The hooks of tensor-parallel blocks differ, so the code of one block would not serve all.
    is_tensor_parallel = hasattr(next(net.parameters()), "placements")
    if not is_tensor_parallel:
        for block in net.model.layers.values():
            for name, module in block.named_modules():
                if name.endswith("_proj"):
                    module.register_forward_pre_hook(store_input)
            block.compile(fullgraph=True, options=options)
    return [captured(step, cache) for step in steps]


def store_input(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Make Inductor store the input of a matmul: as_strided needs it in memory.

    Otherwise Inductor computes the norm or the gate before a matmul again for each row of weights.
    """
    x = inputs[0]
    return x.as_strided(x.shape, x.stride())


def captured(step: Callable, cache: StaticCache) -> Callable:
    """Return the step as CUDA graphs: one for each number of slots that attention reads.

    Attention reads the slots in use, rounded up to a multiple of BUCKET.
    """
    graphs = {}
    pool = torch.cuda.graph_pool_handle()
    all_slots = cache.slots

    def replay(*inputs: Tensor) -> Tensor:
        tokens_per_text = inputs[0].numel() // len(inputs[0])
        cache.filled += tokens_per_text
        slot_count = math.ceil(cache.filled / BUCKET) * BUCKET
        cache.slots = all_slots[:slot_count]
        key = (len(cache.slots), inputs[0].shape)
        if key not in graphs:
            graphs[key] = capture(step, inputs, pool)
        cache.slots = all_slots  # prefill reads all slots
        graph, static_inputs, logits = graphs[key]
        torch._foreach_copy_(static_inputs, inputs)
        graph.replay()
        return logits

    return replay


def capture(step: Callable, inputs: tuple[Tensor, ...], pool: tuple) -> tuple:
    """Return the CUDA graph of a step, with the tensors from which it reads and to which it writes.

    The step also runs once before, and compiles. The replay writes the same to the cache again.
    """
    static_inputs = [tensor.clone() for tensor in inputs]
    step(*static_inputs)
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread of the process, such as NCCL's, may call CUDA meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        logits = step(*static_inputs)
    return graph, static_inputs, logits


# --- generation


@dataclass
class Generated:
    """The new tokens of each prompt, without a stop token, and how long they took."""

    token_ids: list[list[int]]
    prompt_tokens: int  # of all prompts
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # of all decode steps
    decode_steps: int = 0


@torch.inference_mode()
def generate(
    prefill,
    decode,
    prompts,
    *,
    max_new_tokens,
    choose,
    device,
    stop=(),
    on_tokens=None,
    model="the model",
) -> Generated:
    """Generate text. Prefill gives the first token of each prompt, each decode step one more.

    Args:
        prefill, decode: The steps that steps_of returns.
        prompts: The token ids of each prompt.
        choose: A function from logits, [batch, vocab], to tokens, [batch].
        stop: The token ids that end an answer.
        on_tokens: A function that gets the tokens of each step, with None for an answer that ended.
        model: What the message of an error calls the model.

    Raise UserError if a logit is NaN or infinite.
    """
    result = Generated(
        token_ids=[[] for _ in prompts],
        prompt_tokens=sum(map(len, prompts)),
    )
    finished = set()  # rows of answers that have ended

    def take(marked_tokens: list[float]) -> None:
        tokens = [None] * len(prompts)
        for row, marked_token in enumerate(marked_tokens):
            if row in finished:
                continue
            answer = result.token_ids[row]
            if math.isnan(marked_token):
                raise not_finite_error(model, f"new token {len(answer) + 1} of prompt {row + 1}")
            token = int(marked_token)
            if token in stop:
                finished.add(row)
            else:
                answer.append(token)
                tokens[row] = token
        if on_tokens:
            on_tokens(tokens)

    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ids = nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt, device=device) for prompt in prompts], batch_first=True
    )  # [batch, tokens]
    positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    start = time.perf_counter()
    logits = prefill(ids, positions, lengths - 1)
    tokens = choose(logits)
    take(mark(tokens, logits).tolist())
    result.prefill_seconds = time.perf_counter() - start

    steps = range(max_new_tokens - 1)
    if not on_tokens:  # on_tokens shows the progress itself
        steps = report.progress_bar(steps, "decoding", unit="token", delay=2)
    start = time.perf_counter()
    unread = []  # the marked tokens of the last steps, [batch] each
    for step in steps:
        if len(finished) == len(prompts):
            break
        logits = decode(tokens, lengths + step)
        tokens = choose(logits)
        result.decode_steps += 1
        unread.append(mark(tokens, logits))
        if device.type == "cpu" or len(unread) == READ_EVERY or step == max_new_tokens - 2:
            for step_tokens in torch.stack(unread).tolist():
                take(step_tokens)
            unread = []
    result.decode_seconds = time.perf_counter() - start
    return result


def mark(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return tokens, [batch], as fp32: NaN in place of a token if a logit is NaN or infinite.

    The CPU reads both in one copy, when it reads tokens anyway: a wait at each step would take
    longer. fp32 holds every integer up to 2**24.
    """
    return tokens + nan_if_not_finite(logits)


def nan_if_not_finite(logits: Tensor) -> Tensor:
    """Return [...] for logits [..., vocab]: 0 if all logits are finite, else NaN."""
    return (logits * 0).sum(-1, dtype=torch.float32)


def not_finite_error(model: str, where: str) -> UserError:
    """Return the error for logits that are NaN or infinite."""
    return UserError(
        f"{model}: its logits for {where} are NaN or infinite: a weight is NaN or infinite "
        "(download the files again), or a number is too large for the dtype (use --dtype fp32)"
    )


def probabilities(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Return the probabilities from which tokens are drawn, in the shape of logits, [..., vocab].

    They are the softmax of logits / temperature. With top_k only the k likeliest tokens can be
    drawn, and then, with top_p, only the fewest tokens that have this probability together.
    Temperature 0 leaves the likeliest token alone.
    """
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    # multinomial fails for NaN, on a GPU without a message that names the cause. generate tells it.
    finite = logits.float().nan_to_num(nan=0.0, posinf=0.0, neginf=-1e30)
    chances = (finite / temperature).softmax(-1)
    if top_k == 0 and top_p == 1:
        return chances

    # Only top_p without top_k has to sort the whole vocabulary.
    if top_k > 0:
        likely, order = chances.topk(min(top_k, chances.shape[-1]))  # the likeliest first
    else:
        likely, order = chances.sort(dim=-1, descending=True)
    likely /= likely.sum(-1, keepdim=True)
    if top_p < 1:
        before = likely.cumsum(-1) - likely  # the probability of all likelier tokens
        likely[before >= top_p] = 0
        likely /= likely.sum(-1, keepdim=True)
    return torch.zeros_like(chances).scatter(-1, order, likely)  # in the order of the vocabulary


def sample(logits: Tensor, args: argparse.Namespace, generator: torch.Generator) -> Tensor:
    """Return the next tokens, [batch], for logits [batch, vocab]: greedy or drawn, as flags say."""
    if args.temperature == 0:
        return logits.argmax(-1)
    chances = probabilities(
        logits, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p
    )
    return torch.multinomial(chances, 1, generator=generator).squeeze(-1)


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

    The tokens are those of the model's tokenizer. A model without a tokenizer reads and writes
    bytes.

    Attributes:
        texts: The prompts, as the user wrote them.
        prompts: The token ids of each prompt.
        length: The slots that a cache needs for each prompt and its answer.
        stop: The token ids that end an answer.
        folder_stop: Those of them that end an answer of transformers' generate, too.
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


# --- the comparison with transformers, and speed


def check_tokens(
    found: list[list[int]],
    text: Text,
    args: argparse.Namespace,
    device: torch.device,
) -> list[str]:
    """Assert that greedy fp32 tokens are those of transformers' generate, prompt by prompt.

    transformers computes on the script's GPU if both copies of the weights fit there, else on the
    CPU. Sampled tokens, those in 16 bits and those of large models are not compared: then the list
    is empty.
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


def speed(
    result: Generated, device: torch.device, *, weight_bytes: int, bytes_per_slot: float
) -> dict:
    """Return the summary keys about time.

    A decode step reads `weight_bytes`, and `bytes_per_slot` for each token in the KV cache, from
    the memory of one device. No step can be faster than that. `bandwidth_share` compares it with
    the bandwidth in the data sheet (on a CPU: with a measured read), `copy_rate_share` with the
    rate at which this GPU copies.
    """
    decoded_tokens = sum(len(ids[1:]) for ids in result.token_ids)  # prefill has given the first
    keys = {
        "tokens": result.prompt_tokens + sum(map(len, result.token_ids)),
        "time_to_first_token_seconds": result.prefill_seconds,
        "prefill_tokens_per_second": result.prompt_tokens / result.prefill_seconds,
        "decode_tokens_per_second": None,
        "bandwidth_share": None,
        "copy_bytes_per_second": None,
        "copy_rate_share": None,
    }
    if decoded_tokens == 0:
        return keys
    keys["decode_tokens_per_second"] = decoded_tokens / result.decode_seconds
    # Prompts are in the cache from the first decode step on. Each step adds a token of each text.
    cached_tokens = result.prompt_tokens + len(result.token_ids) * (result.decode_steps + 1) / 2
    bytes_per_step = round(weight_bytes + bytes_per_slot * cached_tokens)
    bytes_per_second = bytes_per_step * result.decode_steps / result.decode_seconds
    if device.type == "cpu":
        # There is no data sheet. Read as many bytes, since few of them fit into the cache.
        buffer = torch.ones(min(bytes_per_step, 2**30) // 4)
        timing = measure.seconds_in_turns({"read": buffer.sum}, device, 5)["read"]
        bandwidth = buffer.nbytes / timing["min_seconds"]
    else:
        bandwidth = hardware.devices().get(hardware.device_name(device), {}).get("bandwidth")
    if bandwidth:
        keys["bandwidth_share"] = bytes_per_second / bandwidth
    if device.type == "cuda":
        # the model may leave no room for two buffers
        with contextlib.suppress(torch.OutOfMemoryError):
            keys["copy_bytes_per_second"] = measure.copy_bytes_per_second(device)
            keys["copy_rate_share"] = bytes_per_second / keys["copy_bytes_per_second"]
    return keys


# --- temporary files


@contextlib.contextmanager
def room_for(needed_bytes: int, folder: Path) -> Iterator[None]:
    """Raise UserError if `folder` has less room than the `with` block needs there.

    That is asked before the block starts. A disk can also become full while the block writes, or
    have a quota.
    """
    free_bytes = shutil.disk_usage(folder).free
    message = (
        f"temporary files in {folder} need at least {needed_bytes:,} bytes, and {free_bytes:,} are "
        "free there: delete something, or name a folder on a larger disk, TMPDIR=FOLDER"
    )
    if free_bytes < needed_bytes:
        raise UserError(message)
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_disk_full(error, folder):
            raise
        raise UserError(f"{message} ({error})") from None


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Return whether an exception, or one that led to it, tells that the disk is full."""
    if shutil.disk_usage(folder).free < LEAST_FREE:
        return True
    causes = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    messages = " ".join(str(cause) for cause in causes)
    return any(words in messages for words in DISK_FULL)
