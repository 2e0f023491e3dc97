"""What every script here needs: prompts, a static KV cache, prefill and decode, sampling, streaming; and the proof that
they share: in fp32, the greedy tokens of transformers' generate."""

import argparse
import contextlib
import json
import math
import os
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import cli, hardware, measure, report
from common.exits import UserError
from lm import reference, shapes, weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_PROMPT = "def main():"
# parameters: up to here --dtype auto is fp32, and the tokens are compared with transformers'
SMALL = 200e6
BUCKET = 256  # slots: a captured step reads a multiple of them
# decode steps: a GPU that has to hand over each token at once waits for Python at each step
READ_EVERY = 8


class StaticCache:
    """Keys and values of the tokens so far: [batch, key-value heads, length, head_dim] per layer, allocated once.

    A token's slot is its position. It sees the slots up to its own, so what padding or a rejected guess has left behind
    is never seen, and the next token at that position overwrites it. `ranks`: how many share the heads.
    """

    def __init__(
        self, config: shapes.Config, *, batch: int, length: int, dtype, device, ranks: int = 1
    ) -> None:
        names = [str(layer) for layer in range(config.num_hidden_layers)]
        shape = (batch, config.num_key_value_heads // ranks, length, config.head_dim)
        # zeros: a slot that nothing was written to has weight 0 in attention, and 0 times NaN would be NaN
        self.keys = {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}
        self.values = {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}
        self.tensors = [*self.keys.values(), *self.values.values()]
        self.rows = torch.arange(batch, device=device)[:, None]
        self.slots = torch.arange(length, device=device)  # that attention reads
        self.filled = 0  # the most that a prompt and the steps since may have filled

    def mask(self, positions: Tensor) -> Tensor:
        """[batch, tokens] -> [batch, 1, tokens, slots]: added to scores, 0 where a token sees a slot or -infinity."""
        return (self.slots <= positions.unsqueeze(-1)).to(self.keys["0"].dtype).log().unsqueeze(1)

    def updater(self, layer: str, positions: Tensor) -> Callable:
        """From k and v [batch, heads, tokens, head_dim] of these tokens to all keys and values that the layer reads."""
        keys, values = (
            cached[layer][:, :, : self.slots.shape[0]] for cached in (self.keys, self.values)
        )
        return partial(write, keys, values, self.rows, positions)


def write(
    keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    keys[rows, :, slots] = k.transpose(1, 2)
    values[rows, :, slots] = v.transpose(1, 2)
    return keys, values


@dataclass
class Generated:
    """New tokens per prompt, without the stop token; seconds of the prefill and of all decode steps after it."""

    token_ids: list[list[int]]
    prompt_tokens: int
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0


def steps_of(net: nn.Module, cache: StaticCache) -> tuple[Callable, Callable]:
    """prefill(ids, positions, last) reads all prompts at once, [batch, tokens], and decode(ids, positions) one token of
    each, [batch]. Both return the logits [batch, vocab] of each row's last token, in prefill at `last` [batch]."""
    # it would build a plan for each new length, in 0.4 to 1 s
    torch.backends.cuda.enable_cudnn_sdp(False)

    @torch.compiler.set_stance("force_eager")  # or the blocks would be compiled for each length
    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        cache.filled = ids.shape[1]
        hidden = net.model(ids, positions, cache)
        # not of every prompt token
        return net.lm_head(hidden[torch.arange(len(ids), device=ids.device), last])

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        return net(ids[:, None], positions=positions[:, None], cache=cache)[:, -1]

    return prefill, decode


def compiled(net: nn.Module, cache: StaticCache, *steps: Callable) -> list[Callable]:
    """Steps of (ids, positions), compiled once: the cache keeps its addresses, whatever the position. On a GPU a block
    is compiled, whose code serves all, and the whole step is captured, so that no kernel waits for Python."""
    if not cache.slots.is_cuda:
        return [torch.compile(step, dynamic=False) for step in steps]
    # a matmul of one row as a sum, without a tensor of converted codes; q, k, v and gate, up in one kernel each
    options = {"coordinate_descent_tuning": True, "combo_kernels": True}
    # the hooks of tensor parallel blocks differ
    same = not hasattr(next(net.parameters()), "placements")
    for block in net.model.layers.values() if same else ():
        for name, module in block.named_modules():
            if name.endswith("_proj"):
                # a view of memory must be in memory: else Inductor computes norm and gate anew for each row of a matrix
                module.register_forward_pre_hook(
                    lambda _, x: x[0].as_strided(x[0].shape, x[0].stride())
                )
        block.compile(fullgraph=True, options=options)
    return [captured(step, cache) for step in steps]


def captured(step: Callable, cache: StaticCache) -> Callable:
    """The step as a CUDA graph for each bucket of slots: attention reads the filled ones up to the end of the last."""
    graphs, pool, slots = {}, torch.cuda.graph_pool_handle(), cache.slots

    def replay(*inputs: Tensor) -> Tensor:
        cache.filled += inputs[0].numel() // len(inputs[0])
        cache.slots = slots[: -(-cache.filled // BUCKET) * BUCKET]
        key = len(cache.slots), inputs[0].shape
        if key not in graphs:
            static, graph = [each.clone() for each in inputs], torch.cuda.CUDAGraph()
            step(*static)  # compiles, and writes to the cache what the replay writes again
            # NCCL's own goes on
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                graphs[key] = graph, static, step(*static)
        cache.slots = slots  # which prefill reads
        graph, static, logits = graphs[key]
        torch._foreach_copy_(static, inputs)
        graph.replay()
        return logits

    return replay


@torch.inference_mode()
def generate(
    prefill, decode, prompts, *, max_new_tokens, choose, device, stop=(), on_tokens=None
) -> Generated:
    """Prefill gives the first token of each prompt, each decode step one more, up to those of `stop`: see steps_of.
    choose: logits [batch, vocab] to tokens [batch]; on_tokens gets each step's tokens, None for an ended row."""
    result, finished = Generated([[] for _ in prompts], sum(map(len, prompts))), set()

    def take(tokens: list[int]) -> None:
        for row, token in enumerate(tokens):
            if row in finished or token in stop:
                finished.add(row)
                tokens[row] = None
            else:
                result.token_ids[row].append(token)
        if on_tokens:
            on_tokens(tokens)

    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ids = nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt, device=device) for prompt in prompts], batch_first=True
    )
    positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    start = time.perf_counter()
    tokens = choose(prefill(ids, positions, lengths - 1))
    take(tokens.tolist())
    result.prefill_seconds = time.perf_counter() - start

    steps = range(max_new_tokens - 1)
    if not on_tokens:  # which prints them as they come
        steps = report.progress_bar(steps, "decoding", unit="token", delay=2)
    start = time.perf_counter()
    unread = []
    for step in steps:
        if len(finished) == len(prompts):
            break
        tokens = choose(decode(tokens, lengths + step))
        result.decode_steps += 1
        unread.append(tokens)
        if device.type == "cpu" or len(unread) == READ_EVERY or step == max_new_tokens - 2:
            for step_tokens in torch.stack(unread).tolist():
                take(step_tokens)
            unread = []
    result.decode_seconds = time.perf_counter() - start
    return result


def probabilities(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """What tokens are drawn from: logits [..., vocab] / temperature, then the `top_k` likeliest of them (0: all), then
    the fewest whose probabilities reach `top_p` together. Temperature 0 leaves the likeliest alone."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    likely, order = (logits.float() / temperature).softmax(-1).sort(dim=-1, descending=True)
    likely[..., top_k or likely.shape[-1] :] = 0
    likely /= likely.sum(-1, keepdim=True)
    likely[likely.cumsum(-1) - likely >= top_p] = 0  # what is before it has this share already
    return torch.zeros_like(likely).scatter(-1, order, likely / likely.sum(-1, keepdim=True))


def sample(logits: Tensor, args: argparse.Namespace, generator: torch.Generator) -> Tensor:
    """The next tokens [batch] from logits [batch, vocab], by the flags."""
    if args.temperature == 0:
        return logits.argmax(-1)
    chances = probabilities(
        logits, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p
    )
    return torch.multinomial(chances, 1, generator=generator).squeeze(-1)


def parser(description: str) -> cli.Parser:
    """The flags of every script that answers."""
    flags = cli.Parser(description)
    add = flags.add_argument
    add(
        "--model",
        default="nano",
        help=f"a Hugging Face folder, or with random weights: {', '.join(shapes.SIZES)}",
    )
    either = flags.add_mutually_exclusive_group()
    either.add_argument("--prompt", help=f"text to continue (default: {DEFAULT_PROMPT})")
    either.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a file with one prompt a line: one batch"
    )
    add("--chat", action="store_true", help="put each prompt into the tokenizer's chat template")
    add("--max-new-tokens", type=cli.positive_int, default=32)
    add("--temperature", type=cli.not_negative, default=0.0, help="0: greedy")
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


class Text:
    """The prompts of the flags as token ids, and generated token ids as text.

    The tokens are those of the model's tokenizer. A model without a tokenizer reads and writes
    bytes.

    Attributes:
        texts: The prompts, as the user wrote them.
        prompts: The token ids of each prompt.
        length: The slots that a cache needs for each prompt and its answer.
        stop: The token ids that end an answer.
        vocab_size: How many logits are used; the rows of the vocabulary behind them are padding.
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
                raise UserError(f"an empty prompt, {text!r}: there is nothing to continue")
            self.check_vocabulary(ids, f"the prompt {reprlib.repr(text)}")
            self.prompts.append(ids)

        self.length = cache_length(max(map(len, self.prompts)), args, config, ahead)
        self.stop = stop_tokens(self.tokenizer, args.model)

    def check_vocabulary(self, ids: Iterable[int], where: str) -> None:
        """Raise UserError if a token is not in the model's vocabulary.

        A tokenizer can have more tokens than the model, such as a padding token that was added. The
        model cannot read these tokens, but needs not, if no text contains them.
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
    """Return the tokenizer in a model's folder, or None if the folder has none.

    Raise UserError if the folder has files of a tokenizer that cannot be read.
    """
    if model in shapes.SIZES or not any(Path(model).glob("tokenizer*")):
        return None
    from transformers import AutoTokenizer  # a slow import, which bytes do not need

    fix = "copy tokenizer.json and tokenizer_config.json into the folder again"
    with as_user_error(f"{flag} {model}: its tokenizer cannot be read", fix):
        tokenizer = AutoTokenizer.from_pretrained(model)
    # some classes come without any file, and then have special tokens alone
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"{flag} {model}: its tokenizer has no tokens for text: {fix}")
    return tokenizer


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
        fix = f"use --max-new-tokens {room}" if room > 0 else "shorten the prompt"
        raise UserError(
            f"a prompt of {longest} tokens in a context of {config.max_position_embeddings}: {fix}"
        )
    # Otherwise attention would copy its mask in each layer to align it.
    return math.ceil(length / 16) * 16


def stop_tokens(tokenizer, model: str) -> frozenset[int]:
    """Return the token ids that end an answer: the tokenizer's, and those of the folder.

    generation_config.json has one id, a list of ids or null. Raise UserError if it has anything
    else.
    """
    stop = set()
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        stop.add(tokenizer.eos_token_id)
    path = Path(model) / "generation_config.json"
    if os.path.lexists(path):  # a link to a missing file cannot be read, which is an error
        stop.update(read_stop_tokens(path))
    return frozenset(stop)


def read_stop_tokens(path: Path) -> list[int]:
    """Return the ids of eos_token_id in a generation_config.json."""
    with as_user_error(
        f"--model {path.parent}: {path.name} cannot be read", "download it again, or delete it"
    ):
        content = json.loads(path.read_bytes())
        value = content.get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise UserError(
            f"--model {path.parent}: {path.name} has eos_token_id {value!r}: "
            "write a token id or a list of token ids"
        )
    return ids


def choose_dtype(args: argparse.Namespace, config: shapes.Config, device: torch.device) -> str:
    """The --dtype; "auto" is fp32 for a small model, where it costs little and makes tokens comparable."""
    given_or_large = args.dtype != "auto" or shapes.parameter_count(config) > SMALL
    return hardware.choose_dtype(args.dtype, device) if given_or_large else "fp32"


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
        expected = tokens_of_transformers(text, args, where)
    for ids, expected_ids in zip(found, expected, strict=True):
        assert ids == expected_ids, f"tokens {ids}, and transformers' generate gives {expected_ids}"
    if not any(found):
        return []
    line = f"the {sum(map(len, found))} greedy tokens are those of transformers' generate"
    if where.type != device.type:
        line += f", computed on the {where.type.upper()}"
    if device.type == "cuda" and where.type == "cpu":
        line += ": its model does not fit on the GPU beside this one"
    return [line]


def tokens_of_transformers(
    text: Text,
    args: argparse.Namespace,
    device: torch.device,
) -> list[list[int]]:
    """Return each prompt's new tokens by transformers' generate, with this script's weights."""
    net = weights.build(args.model, text.config, seed=args.seed, device=device)
    baseline = reference.build_transformers(text.config, net.state_dict(), device)
    answers = []
    padding = list(range(text.vocab_size, text.config.vocab_size))
    for prompt in text.prompts:
        inputs = torch.tensor([prompt], device=device)
        answer = baseline.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            eos_token_id=sorted(text.stop) or None,
            pad_token_id=0,
            suppress_tokens=padding or None,
        )
        new_tokens = answer[0, len(prompt) :].tolist()
        answers.append([token for token in new_tokens if token not in text.stop])
    return answers


def speed(result: Generated, device: torch.device, bytes_per_step: int) -> dict:
    """Return the summary keys about time.

    `bytes_per_step` are the weights that a decode step reads from the memory of one device. No step
    can be faster than that. `bandwidth_share` compares it with the bandwidth in the data sheet (on
    a CPU: with a measured read), `copy_rate_share` with the rate at which this GPU copies.
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
