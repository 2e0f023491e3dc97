"""Compare what a trainer and a server compute for the same tokens with the same weights.

In reinforcement learning a server samples tokens, and a trainer computes their log-probabilities
again for its loss. Both have the same weights, so the importance ratio

    exp(log-probability by the trainer - log-probability by the server)

should be 1. In 16 bits it is not, because the two round at different places:

    dtype     Under autocast, the weights and the residual stream are fp32; inputs and outputs of
              matmuls have 16 bits. With FSDP's mixed precision, and in a server, the weights and
              the residual stream have 16 bits, too.
    kernels   Attention of all tokens at once, or of one token to a cache. Separate kernels, or
              those of torch.compile.
    shapes    A matmul with 5,104 rows may add up in another order than one with 16 rows.

This file computes log-probabilities in ten ways. It compares each with two others: with the trainer
in fp32, which shows the rounding error, and with the decode steps that sampled the tokens, which
gives the importance ratio. PPO and GRPO clip the ratio of a token, usually at 0.8 and 1.2. Some
corrections of the mismatch use the ratio of a sequence, which is the product of the ratios of its
tokens. The differences add up in it, so it is farther from 1.

Two of the ten must be equal to the bit, which this file asserts: (1) the trainer with 16-bit
weights, and (2) a prefill of the same texts, in one batch of the same shape, with the same
attention kernel. Neither uses torch.compile.

    laptop    python 09_inference/parity.py
    fixes     python 09_inference/parity.py --head fp32     (both compute logits in fp32)
              python 09_inference/parity.py --dtype fp16    (a fraction of 10 bits; bf16 has 7)
    trained   python 09_inference/parity.py --model models/smollm2-135m --batch-size 4
    one GPU   python 09_inference/parity.py --device cuda
    cluster   it uses one process only; tensor parallelism adds up in yet another order

What to look at: the server in fp32, which differs from the trainer in fp32 by fp32 rounding only.
So the cache is not the cause. Then how near the trainer is to decode, under autocast and with
16-bit weights, and the ratios of sequences. A model with random weights is trained for some steps
first, because untrained it gives all tokens about the same probability.

On a GPU the default is --model wide with 32 texts. Expected on an H100: more rows of the table
differ, because its libraries choose a kernel by the shape of the matrices. On a CPU, a prefill of
one text at a time has given the bits of the batch. On an H100 that is not expected.

Previous: export.py. Next: 10_post_training/grpo.py.
"""

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _parity as helper
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import lesson
from common.runtime import DTYPES
from lm import model, shapes, weights
from lm.generate import StaticCache, compiled, steps_of

CLIP = 0.2  # ratios from 0.8 to 1.2 are not clipped


# --- 1. log-probabilities, and the ratio of two of them


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token in fp32: logits [..., vocab], tokens [...]."""
    logprobs = logits.float().log_softmax(dim=-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def compare(trainer: Tensor, server: Tensor) -> dict:
    """Return how far the log-probabilities differ, and what that does to the importance ratio.

    Both tensors are [texts, tokens].
    """
    difference = trainer - server
    token_ratio = difference.exp()
    # The ratio of a sequence is the product of the ratios of its tokens.
    sequence_difference = difference.sum(dim=1)
    sequence_ratio = sequence_difference.exp()
    return {
        "difference_error": difference.abs().mean().item(),
        "largest_difference_error": difference.abs().max().item(),
        "largest_sequence_difference": sequence_difference.abs().max().item(),
        "clipped_tokens_share": is_clipped(token_ratio).float().mean().item(),
        "sequence_ratio": sequence_ratio.median().item(),
        "min_sequence_ratio": sequence_ratio.min().item(),
        "max_sequence_ratio": sequence_ratio.max().item(),
        "clipped_sequences_share": is_clipped(sequence_ratio).float().mean().item(),
    }


def is_clipped(ratio: Tensor) -> Tensor:
    return (ratio - 1).abs() > CLIP


# --- 2. the trainer


def trainer_logprobs(net: nn.Module, ids: Tensor, new_tokens: int) -> Tensor:
    """Return the log-probabilities of the last tokens of each text, by the forward of a step.

    ids is [texts, tokens]. The forward records what backward needs, as in training.
    """
    logits = net(ids[:, :-1])  # [texts, tokens - 1, vocab]: of each next token
    logprobs = token_logprobs(logits[:, -new_tokens:], ids[:, -new_tokens:])
    return logprobs.detach()


# --- 3. the server


@torch.no_grad()
def decode_logprobs(
    net: model.Transformer,
    prompts: Tensor,
    new_tokens: int,
    choose: Callable[[Tensor, int], Tensor],
    compile_decode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Generate token by token with a KV cache. Return the tokens and their log-probabilities.

    prompts is [texts, tokens], both results are [texts, new_tokens]. choose(logits, step) returns
    the next token of each text: it samples, or returns a token that is given.
    """
    cache = new_cache(net, prompts, new_tokens)
    prefill, decode = steps_of(net, cache)
    if compile_decode:
        (decode,) = compiled(net, cache, decode)
    positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    position = positions[:, -1]  # of the newest token, [texts]
    logits = prefill(prompts, positions, position)  # [texts, vocab]
    tokens = []
    logprobs = []
    for step in range(new_tokens):
        tokens.append(choose(logits, step))
        logprobs.append(token_logprobs(logits, tokens[-1]))
        if step < new_tokens - 1:
            position = position + 1
            logits = decode(tokens[-1], position)
    return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)


@torch.no_grad()
def prefill_logprobs(
    net: model.Transformer, ids: Tensor, new_tokens: int, same_kernel: bool
) -> Tensor:
    """Return the log-probabilities of the last tokens of each text, read at once into a cache.

    Attention reads keys and values from the cache and needs a mask, so PyTorch selects another
    kernel than for the trainer. With `same_kernel`, attention still writes keys and values to the
    cache, but uses those just computed. This is right because the cache was empty.
    """
    inputs = ids[:, :-1]
    positions = torch.arange(inputs.shape[1], device=ids.device).expand_as(inputs)
    cache = new_cache(net, inputs, 0)
    if same_kernel:
        for name, layer in net.model.layers.items():
            update_cache = cache.updater(name, positions)
            layer.self_attn.attend = partial(store_and_attend, update_cache)
        logits = net(inputs)
        for layer in net.model.layers.values():
            layer.self_attn.attend = model.attend
    else:
        logits = net(inputs, positions=positions, cache=cache)
    return token_logprobs(logits[:, -new_tokens:], ids[:, -new_tokens:])


def store_and_attend(update_cache: Callable, q: Tensor, k: Tensor, v: Tensor, *mask, **options):
    """Write k and v to a cache, and attend to them as the trainer does."""
    update_cache(k, v)
    return model.attend(q, k, v, *mask, **options)


def new_cache(net: model.Transformer, texts: Tensor, new_tokens: int) -> StaticCache:
    """Return an empty cache for these texts and so many more tokens."""
    batch, length = texts.shape
    # Attention kernels need rows of the mask that are aligned to 16 numbers.
    slots = math.ceil((length + new_tokens) / 16) * 16
    dtype = net.model.embed_tokens.weight.dtype
    return StaticCache(net.config, batch=batch, length=slots, dtype=dtype, device=texts.device)


# --- 4. a fix: logits in fp32


class Fp32Head(nn.Module):
    """The output layer with fp32 logits, also under autocast and with 16-bit weights.

    In bf16, logits between 16 and 32 are multiples of 0.125, however exact the hidden states are.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float())


# --- 5. the comparison


def run(net: model.Transformer, prompts: Tensor, args, can_compile: bool) -> list[dict]:
    """Let the server sample texts, and compute their log-probabilities in all ways.

    `net` has fp32 weights. prompts is [texts, tokens].
    """
    dtype = DTYPES[args.dtype]
    new_tokens = args.new_tokens
    # 16-bit weights: FSDP's mixed precision gathers them for a forward, and a server loads them.
    net16 = copy.deepcopy(net).to(dtype)
    generator = torch.Generator(prompts.device).manual_seed(0)

    def draw(logits: Tensor, step: int) -> Tensor:
        helper.check_finite(logits, args)
        probabilities = logits.float().softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    # On a GPU, steps_of turns cuDNN's attention off for the whole process. So the trainer does not
    # use it below, either.
    tokens, sampled = decode_logprobs(net16, prompts, new_tokens, draw)
    ids = torch.cat((prompts, tokens), dim=1)

    def given(logits: Tensor, step: int) -> Tensor:
        return ids[:, prompts.shape[1] + step]

    logprobs = {helper.REFERENCE: trainer_logprobs(net, ids, new_tokens)}
    with torch.autocast(prompts.device.type, dtype):
        logprobs[helper.AUTOCAST] = trainer_logprobs(net, ids, new_tokens)
        if can_compile:
            logprobs["trainer, autocast, compiled"] = trainer_logprobs(
                with_compiled_blocks(net), ids, new_tokens
            )
    logprobs[helper.TRAINER_16] = trainer_logprobs(net16, ids, new_tokens)

    logprobs[helper.SAME_KERNEL] = prefill_logprobs(net16, ids, new_tokens, same_kernel=True)
    logprobs["server, prefill, a text at a time"] = torch.cat(
        [prefill_logprobs(net16, text, new_tokens, same_kernel=True) for text in ids.split(1)]
    )
    logprobs["server, prefill, mask over the cache"] = prefill_logprobs(
        net16, ids, new_tokens, same_kernel=False
    )
    logprobs["server, decode: sampled the tokens"] = sampled
    if can_compile:
        _, logprobs["server, decode, compiled"] = decode_logprobs(
            copy.deepcopy(net16), prompts, new_tokens, given, compile_decode=True
        )
    _, logprobs[helper.FP32_SERVER] = decode_logprobs(net, prompts, new_tokens, given)

    reference = logprobs[helper.REFERENCE]
    rows = []
    for name, values in logprobs.items():
        error = (values - reference).abs()
        row = {
            "name": name,
            "error": error.mean().item(),
            "largest_error": error.max().item(),
            "is_16_bit": name not in (helper.REFERENCE, helper.FP32_SERVER),
            "equals_trainer": torch.equal(values, logprobs[helper.TRAINER_16]),
        }
        rows.append(row | compare(values, sampled))
    return rows


def with_compiled_blocks(net: model.Transformer) -> model.Transformer:
    """Return a copy of the model whose blocks are compiled, as 06_fsdp_zero/train_fsdp.py does."""
    net = copy.deepcopy(net)
    for block in net.model.layers.values():
        block.compile(fullgraph=True)
    return net


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "batch_size": 32, "steps": 100},
        model="nano",
        batch_size=16,
        new_tokens=256,
        steps=40,
        dtype=("bf16", "fp16"),
        head=("16-bit", "fp32"),
        no_compile=False,
    )
    config, corpus = helper.load_text(args)
    device = lesson.start(args.device)
    can_compile = not args.no_compile and helper.can_compile(device)
    prompts = helper.prompts_of(corpus, args.batch_size, device)
    net = weights.build(args.model, config, seed=0, device=device)
    loss = None
    if not shapes.has_weights(args.model):
        loss = helper.train(net, corpus, args, device)
    if args.head == "fp32":
        net.lm_head = Fp32Head(net.lm_head)
    rows = run(net, prompts, args, can_compile)
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, args),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        tokens=args.batch_size * args.new_tokens,
        last_loss=loss,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
