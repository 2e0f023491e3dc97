"""Generate text: a KV cache, prefill and decode, CUDA graphs, sampling and speed.

A step is a function from token ids and positions to logits. `generate` calls prefill once, and then
decode for each further token.
"""

import argparse
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import hardware, measure, report
from common.exits import UserError
from lm import shapes

BUCKET = 256  # slots of the cache: a captured step reads a multiple of them
# Decode steps between two reads of their tokens. If a GPU had to hand over each token at once, it
# would wait for Python at every step.
READ_EVERY = 8


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
        """Allocate `length` slots for each sequence of the batch. `ranks` share the heads."""
        shape = (batch, config.num_key_value_heads // ranks, length, config.head_dim)
        self.keys = {}
        self.values = {}
        for layer in range(config.num_hidden_layers):
            # Not torch.empty: an unused slot has weight 0 in attention, and 0 times NaN is NaN.
            self.keys[str(layer)] = torch.zeros(shape, dtype=dtype, device=device)
            self.values[str(layer)] = torch.zeros(shape, dtype=dtype, device=device)
        self.tensors = [*self.keys.values(), *self.values.values()]
        self.batch_index = torch.arange(batch, device=device)[:, None]  # [batch, 1]
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
        return partial(write, keys, values, self.batch_index, positions)


def write(
    keys: Tensor, values: Tensor, batch_index: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Write k and v of new tokens into a cache, and return the keys and values of the cache.

    k and v are [batch, kv_heads, tokens, head_dim]. Token t of sequence b goes to slot slots[b, t].
    batch_index is [batch, 1]: 0, 1, 2, ...
    """
    keys[batch_index, :, slots] = k.transpose(1, 2)  # [batch, tokens, kv_heads, head_dim]
    values[batch_index, :, slots] = v.transpose(1, 2)
    return keys, values


# --- prefill and decode


def steps_of(net: nn.Module, cache: StaticCache) -> tuple[Callable, Callable]:
    """Return the two steps of generation, prefill and decode.

    prefill(ids, positions, last) reads all prompts at once. ids and positions are [batch, tokens],
    and last, [batch], is the position of the last token of each prompt.

    decode(ids, positions) reads one token of each sequence. Both are [batch].

    Both return the logits that choose the next token of each sequence, [batch, vocab].
    """
    # cuDNN's attention would build a plan for each new length, which takes 0.4 to 1 s.
    torch.backends.cuda.enable_cudnn_sdp(False)

    # Prompts have many lengths. Layers that decode has compiled would be compiled for each.
    @torch.compiler.set_stance("force_eager")
    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        cache.filled = ids.shape[1]
        hidden = net.model(ids, positions, cache)  # [batch, tokens, hidden]
        batch_index = torch.arange(len(ids), device=ids.device)
        # The head is large, so it computes the logits of the last tokens only.
        return net.lm_head(hidden[batch_index, last])

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        logits = net(ids[:, None], positions=positions[:, None], cache=cache)  # [batch, 1, vocab]
        return logits[:, -1]

    return prefill, decode


def compiled(net: nn.Module, cache: StaticCache, *steps: Callable) -> list[Callable]:
    """Return compiled versions of steps that take (ids, positions).

    A step is compiled once, because the cache keeps its addresses and its shape. On a GPU the
    layers are compiled, and then the whole step is captured as a CUDA graph, so that no kernel
    waits for Python.
    """
    if not cache.slots.is_cuda:
        return [torch.compile(step, dynamic=False) for step in steps]
    compile_layers(net)
    return [captured(step, cache) for step in steps]


def compile_layers(net: nn.Module) -> None:
    """Compile one layer for a GPU. Its code serves all layers.

    The hooks of tensor-parallel layers differ, so these are not compiled.
    """
    if hasattr(next(net.parameters()), "placements"):
        return
    options = {
        # a matmul with one row becomes a sum, without a tensor of converted weights
        "coordinate_descent_tuning": True,
        # q, k and v in one kernel, gate and up in another
        "combo_kernels": True,
    }
    for layer in net.model.layers.values():
        for name, module in layer.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(store_input)
        layer.compile(fullgraph=True, options=options)


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
        tokens_per_sequence = inputs[0].numel() // len(inputs[0])
        cache.filled += tokens_per_sequence
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


# Not in inference mode: DTensor has no rule for aten.linear, which it sees there as a whole, and
# works one out for each shape. With torch.no_grad() it sees the matmul.
@torch.no_grad()
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
    finished = set()  # the prompts whose answers have ended, by number

    def take(marked_tokens: list[float]) -> None:
        tokens: list[int | None] = [None] * len(prompts)
        for number, marked_token in enumerate(marked_tokens):
            if number in finished:
                continue
            answer = result.token_ids[number]
            if math.isnan(marked_token):
                raise not_finite_error(model, f"new token {len(answer) + 1} of prompt {number + 1}")
            token = int(marked_token)
            if token in stop:
                finished.add(number)
            else:
                answer.append(token)
                tokens[number] = token
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


# --- speed


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
    # Prompts are in the cache from the first decode step on. Each step adds a token per sequence.
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
            copied_per_second = measure.copy_bytes_per_second(device)
            keys["copy_bytes_per_second"] = copied_per_second
            keys["copy_rate_share"] = bytes_per_second / copied_per_second
    return keys
