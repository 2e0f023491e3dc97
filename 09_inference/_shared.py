"""What every script here needs: prompts, a static KV cache, prefill and decode, sampling, streaming; and the proof that
they share: in fp32, the greedy tokens of transformers' generate."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import cli, hardware, measure
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

    start = time.perf_counter()
    unread = []
    for step in range(max_new_tokens - 1):
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
    """The prompts of the flags as tokens, and tokens as text: by the model's tokenizer, or as bytes without one."""

    def __init__(self, args: argparse.Namespace, config: shapes.Config, *, ahead: int = 0) -> None:
        """UserError for flags or prompts that the model cannot answer; `ahead`: positions beyond the last token."""
        if args.temperature == 0 and (args.top_k or args.top_p < 1):
            raise UserError("--top-k and --top-p need sampling: add --temperature 0.8")
        if args.top_p > 1:
            raise UserError(
                f"--top-p {args.top_p:g} is over 1: it is a share of the probability, such as 0.9"
            )
        self.tokenizer = None
        if any(Path(args.model).glob("tokenizer*")):
            from transformers import AutoTokenizer  # seconds that bytes need not wait for

            self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        if args.chat and getattr(self.tokenizer, "chat_template", None) is None:
            raise UserError(f"--chat: --model {args.model} has no chat template")
        self.chat, self.config = args.chat, config
        self.texts = [DEFAULT_PROMPT if args.prompt is None else args.prompt]
        if args.prompts is not None:
            try:
                self.texts = [
                    line for line in args.prompts.read_text().splitlines() if line.strip()
                ]
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--prompts {args.prompts} is no text file: {error}") from None
        self.prompts = [self.encode(text) for text in self.texts]
        if not self.prompts or not all(self.prompts):
            raise UserError("an empty prompt: there is nothing to continue")
        longest = max(map(len, self.prompts))
        self.length = longest + args.max_new_tokens + ahead  # slots of a cache
        if self.length > config.max_position_embeddings:
            room = config.max_position_embeddings - longest - ahead
            fix = f"use --max-new-tokens {room}" if room > 0 else "shorten the prompt"
            raise UserError(
                f"a prompt of {longest} tokens in a context of {config.max_position_embeddings}: {fix}"
            )
        # or attention would copy its mask, in each layer, to align it
        self.length += -self.length % 16
        stop = set() if self.tokenizer is None else {self.tokenizer.eos_token_id}
        generation_config = Path(args.model) / "generation_config.json"
        if generation_config.is_file():
            ends = json.loads(generation_config.read_text()).get("eos_token_id")
            stop |= set(ends) if isinstance(ends, list) else {ends}
        self.stop = frozenset(stop - {None})  # the tokens that end an answer

    def encode(self, text: str) -> list[int]:
        if self.chat:
            messages = [{"role": "user", "content": text}]
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
                "input_ids"
            ]
        if self.tokenizer is not None:
            return self.tokenizer(text, verbose=False)["input_ids"]
        return list(text.encode(errors="surrogateescape"))

    def decode(self, ids: list[int]) -> str:
        if self.tokenizer is not None:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return bytes(token if token < 256 else ord("?") for token in ids).decode(errors="replace")


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
    for prompt in text.prompts:
        inputs = torch.tensor([prompt], device=device)
        answer = baseline.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            eos_token_id=sorted(text.stop) or None,
            pad_token_id=0,
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
