"""Compare what a trainer and a server compute for the same tokens with the same weights.

In reinforcement learning a server samples tokens, and a trainer computes their log-probabilities
again for its loss. With the weights of the server they should be equal. Then the importance ratio

    exp(log-probability by the trainer - log-probability by the server)

is 1. In 16 bits it is not, because the two round in different places:

    weights   autocast keeps fp32 weights and rounds the inputs of matmuls; FSDP and a server have
              16-bit weights, those of norms, too
    kernels   attention over a whole text, or of one token to a cache; fused by torch.compile or not
    shapes    a matmul of 2,552 rows may sum in another order than one of 8 rows

This file computes log-probabilities in nine ways. It compares each with the trainer in fp32, which
shows how large its rounding errors are, and with the decode step that sampled the tokens, which
gives the ratios. PPO and GRPO clip ratios of tokens at 1 +- 0.2, and GSPO has one ratio per
sequence. Errors add up over a sequence, so few tokens are outside of this range and many sequences.

One pair is equal to the bit, which this file asserts: the trainer with 16-bit weights, and a
prefill that reads the same texts in the same batch with the same attention kernel, both eager.

    laptop    python 09_inference/parity.py
    fixes     python 09_inference/parity.py --head fp32     (both compute the logits in fp32)
              python 09_inference/parity.py --dtype fp16    (3 more bits than bf16 in the fraction)
    trained   python 09_inference/parity.py --model models/smollm2-135m --batch-size 4
    one GPU   python 09_inference/parity.py --device cuda
    cluster   it uses one process only; tensor parallelism sums in yet another order

What to look at: the row in fp32 by the server, where no ratio is far from 1; the last two columns.
A model with random weights is trained for some steps first, because the log-probabilities of a
random model are all alike.

On a GPU the default is --model wide with 64 texts. Expected on an H100: other kernels for other
shapes, so that more rows differ from each other than on a CPU. A text at a time is then no longer
equal to the batch.

Previous: kv_cache.py. Next: quantized.py.
"""

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _parity as helper
from _generate import DTYPES, StaticCache, compiled, steps_of

from common import exits, report
from lm import model, shapes, weights

CLIP = 0.2  # ratios from 0.8 to 1.2 are not clipped


# --- 1. log-probabilities, and the ratio of two of them


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token in fp32: logits [..., vocab], tokens [...]."""
    logprobs = logits.float().log_softmax(dim=-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def compare(trainer: Tensor, server: Tensor) -> dict:
    """Return the figures of a row: how far log-probabilities and ratios are from equal.

    Both are [texts, tokens].
    """
    difference = trainer - server
    token_ratio = difference.exp()
    sequence_ratio = difference.sum(dim=1).exp()  # the product of the ratios of its tokens
    return {
        "difference_error": difference.abs().mean().item(),
        "largest_difference_error": difference.abs().max().item(),
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


@torch.inference_mode()
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


@torch.inference_mode()
def prefill_logprobs(
    net: model.Transformer, ids: Tensor, new_tokens: int, same_kernel: bool
) -> Tensor:
    """Return the log-probabilities of the last tokens of each text, read at once into a cache.

    Attention reads the cache with a mask, so it uses another kernel than the trainer. With
    `same_kernel` it reads the keys and values of the texts, which have no past, as the trainer
    does, and only writes to the cache.
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
    update_cache(k, v)
    return model.attend(q, k, v, *mask, **options)


def new_cache(net: model.Transformer, texts: Tensor, new_tokens: int) -> StaticCache:
    """Return an empty cache for these texts and so many more tokens."""
    batch, length = texts.shape
    slots = math.ceil((length + new_tokens) / 16) * 16  # aligned, as attention needs its mask
    dtype = net.model.embed_tokens.weight.dtype
    return StaticCache(net.config, batch=batch, length=slots, dtype=dtype, device=texts.device)


# --- 4. a fix: logits in fp32


class Fp32Head(nn.Module):
    """The output layer in fp32, also under autocast and with 16-bit weights.

    Logits of about 16 have steps of 0.06 to 0.12 in bf16, whatever was computed before.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float())


# --- 5. the comparison


def run(net: model.Transformer, prompts: Tensor, args, can_compile: bool) -> list[dict]:
    """Sample texts by decoding, and compute their log-probabilities in all ways."""
    dtype = DTYPES[args.dtype]
    new_tokens = args.new_tokens
    autocast = torch.autocast(prompts.device.type, dtype)
    net16 = copy.deepcopy(net).to(dtype)  # what FSDP gathers, and what a server loads

    generator = torch.Generator(prompts.device).manual_seed(0)

    def draw(logits: Tensor, step: int) -> Tensor:
        probabilities = logits.float().softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    tokens, sampled = decode_logprobs(net16, prompts, new_tokens, draw)
    ids = torch.cat((prompts, tokens), dim=1)

    def given(logits: Tensor, step: int) -> Tensor:
        return ids[:, prompts.shape[1] + step]

    one_by_one = [prefill_logprobs(net16, text, new_tokens, True) for text in ids.split(1)]
    logprobs = {
        helper.REFERENCE: trainer_logprobs(net, ids, new_tokens),
        helper.FP32_SERVER: decode_logprobs(net, prompts, new_tokens, given)[1],
        helper.AUTOCAST: autocast(trainer_logprobs)(net, ids, new_tokens),
        helper.TRAINER_16: trainer_logprobs(net16, ids, new_tokens),
        helper.SAME_KERNEL: prefill_logprobs(net16, ids, new_tokens, same_kernel=True),
        "server, prefill, a text at a time": torch.cat(one_by_one),
        "server, prefill, mask over the cache": prefill_logprobs(net16, ids, new_tokens, False),
        "server, decode: sampled the tokens": sampled,
    }
    if can_compile:
        # A copy, whose blocks are compiled in place, as 06_fsdp_zero/train_fsdp.py does.
        compiled_net = copy.deepcopy(net)
        for block in compiled_net.model.layers.values():
            block.compile(fullgraph=True)
        logprobs["trainer, autocast, compiled"] = autocast(trainer_logprobs)(
            compiled_net, ids, new_tokens
        )
        logprobs["server, decode, compiled"] = decode_logprobs(
            copy.deepcopy(net16), prompts, new_tokens, given, compile_decode=True
        )[1]

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


def main() -> int:
    args = report.lesson_flags(
        __doc__,
        gpu={"model": "wide", "batch_size": 64, "steps": 100},
        model="nano",
        batch_size=8,
        new_tokens=256,
        steps=40,
        dtype=("bf16", "fp16"),
        head=("16-bit", "fp32"),
        no_compile=False,
    )
    config, corpus = helper.load_text(args)
    device = report.start_lesson(args.device)
    can_compile = not args.no_compile and helper.can_compile(device)
    net = weights.build(args.model, config, seed=0, device=device)
    loss = None
    if not shapes.has_weights(args.model):
        loss = helper.train(net, corpus, args, device)
    if args.head == "fp32":
        net.lm_head = Fp32Head(net.lm_head)
    prompts = helper.prompts_of(corpus, args.batch_size, device)
    rows = run(net, prompts, args, can_compile)
    report.end_lesson(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, args, CLIP),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        tokens=args.batch_size * args.new_tokens,
        last_loss=loss,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
