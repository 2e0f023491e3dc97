"""--strategy pipeline of infer_70b.py: each rank holds some layers, one after the other, and hands on hidden states.

A token passes through all ranks in turn, so with one micro-batch all ranks but one wait. The prompts are therefore
split into micro-batches: while the second rank computes the first of them, the first rank computes the second. The last
rank draws the new tokens and sends them to all. The first goes on from them, and all know which prompts have ended.

    rank 0   A0 B0 C0 A1 B1 C1 A2 ...     A, B, C: micro-batches; 0: the prompts; 1, 2: a token each
    rank 1      A0 B0 C0 A1 B1 C1 ...     A1 starts as soon as A0 has passed the last rank
    rank 2         A0 B0 C0 A1 B1 ...
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from _infer_70b_served import Served
from _infer_70b_weights import fill
from torch import Tensor

from old import model, shapes
from old.exits import UserError
from old.generate import Generated, Sampler, StaticCache, pad, take


def layers_of(rank: int, stages: int, layers: int) -> range:
    """The layers of a stage: as many as of any other, the first stages one more where they do not divide."""
    each, more = divmod(layers, stages)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def build_stage(config: shapes.Config, rank: int, stages: int) -> model.Transformer:
    """A rank's part of the model, without numbers yet. What it does not hold is None, and the model leaves that out."""
    with torch.device("meta"):
        net = model.Transformer(config)
    mine = layers_of(rank, stages, config.num_hidden_layers)
    for name in [*net.model.layers]:
        if int(name) not in mine:
            del net.model.layers[name]
    last = rank == stages - 1
    if rank > 0 and not (last and config.tie_word_embeddings):  # tied: the head is the embedding's matrix
        net.model.embed_tokens = None
    if not last:
        net.model.norm = None
        net.lm_head = None
    return net


def load(args, config: shapes.Config, device: torch.device) -> Served:
    """The stage of this rank, with its weights alone: those of other layers are neither read nor made."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    check(args, config, stages)
    net = build_stage(config, rank, stages).to(args.torch_dtype)
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    net.requires_grad_(False)
    fill(net, args)
    if rank > 0:
        net.model.embed_tokens = None  # the tied head has been filled under the embedding's name
    multiplied = [module for module in (net.model.layers, net.model.norm, net.lm_head) if module is not None]
    weight_bytes = sum(weight.nbytes for module in multiplied for weight in module.parameters())
    micro_batches = args.micro_batches or stages
    served = partial(generate, net, micro_batches=micro_batches, device=device)
    return Served(served, weight_bytes, config)


def check(args, config: shapes.Config, stages: int) -> None:
    """UserError for more stages than layers."""
    if stages > config.num_hidden_layers:
        raise UserError(
            f"--strategy pipeline: {stages} processes for the {config.num_hidden_layers} layers of {args.model}: "
            f"a stage holds at least one, so start at most {config.num_hidden_layers}"
        )


@dataclass
class MicroBatch:
    """Some rows of the batch, on their way through the stages."""

    rows: slice
    ids: Tensor  # [rows, tokens]: the prompts, padded
    lengths: Tensor  # [rows]: of the prompts
    cache: StaticCache  # of this stage's layers
    result: Generated
    tokens: Tensor | None = None  # [rows], on the CPU: the last ones drawn
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)  # a tensor on its way must not be freed

    def ended(self) -> bool:
        return len(self.result.finished) == len(self.ids)


@torch.inference_mode()
def generate(
    net: model.Transformer,
    prompts: list[list[int]],
    *,
    micro_batches: int,
    device: torch.device,
    max_new_tokens: int,
    sampler: Sampler,
    stop: frozenset[int] = frozenset(),
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> Generated:
    """As common.generate.generate, on every rank. All ranks take the micro-batches in the same order, step by step."""
    started = time.perf_counter()
    parts = split_batch(net, prompts, micro_batches, max_new_tokens, device)
    whole = Generated([], sum(map(len, prompts)))
    for step in range(max_new_tokens + 1):  # step 0 reads the prompts; the last one only takes the tokens before it
        if all(part.ended() for part in parts):
            break
        fresh = []  # the tokens of the step before, of all rows
        drawn = None
        for part in parts:
            if step > 0:
                take_tokens(part, stop, fresh)
            if step == 1 and part is parts[-1]:
                whole.prefill_seconds = time.perf_counter() - started
            if step == max_new_tokens or part.ended():
                continue
            if drawn is None:  # once a step and for all rows, as one process does it
                drawn = sampler.draw(len(prompts))
                whole.decode_steps += step > 0
            whole.weight_reads += step > 0
            compute(net, part, step, partial(sampler, drawn=drawn[part.rows]))
        if step > 0 and on_tokens:
            on_tokens(fresh)
    for part in parts:
        wait_until_sent(part)
    whole.decode_seconds = time.perf_counter() - started - whole.prefill_seconds
    whole.token_ids = [ids for part in parts for ids in part.result.token_ids]
    whole.decoded_tokens = sum(len(ids[1:]) for ids in whole.token_ids)
    return whole


def compute(net: model.Transformer, part: MicroBatch, step: int, sample: Callable[[Tensor], Tensor]) -> None:
    """This stage's part of a step: take hidden states from the rank before, hand on what our layers make of them."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    if step == 0:
        positions = torch.arange(part.ids.shape[1], device=part.ids.device).expand_as(part.ids)
        last_token = part.lengths - 1
    else:
        positions = (part.lengths + step - 1)[:, None]
        last_token = torch.zeros_like(part.lengths)
    wait_until_sent(part)  # no wait: its tokens are back, so the other ranks have long had what it sent
    if rank == 0:
        inputs = part.ids if step == 0 else part.tokens[:, None].to(part.ids.device)
    else:
        weight = next(net.parameters())
        inputs = torch.empty(*positions.shape, net.config.hidden_size, dtype=weight.dtype, device=weight.device)
        dist.recv(inputs, src=rank - 1)
    outputs = net(inputs, positions=positions, cache=part.cache, last=last_token)
    if rank < stages - 1:
        part.sent.append((dist.isend(outputs, dst=rank + 1), outputs))
        return
    # over gloo, also from a GPU: every rank reads them on its CPU. The other way round than the hidden states, they
    # might with NCCL wait in one queue with these, and two ranks for each other
    part.tokens = sample(outputs).cpu()
    part.sent += [(dist.isend(part.tokens, dst=other), part.tokens) for other in range(stages - 1)]


def take_tokens(part: MicroBatch, stop: frozenset[int], fresh: list[int | None]) -> None:
    """Add the tokens that the last rank has drawn to the result, and to `fresh`: None for a row that has ended."""
    last_rank = dist.get_world_size() - 1
    if part.ended():
        fresh += [None] * len(part.ids)
        return
    if dist.get_rank() != last_rank:
        part.tokens = torch.empty(len(part.ids), dtype=torch.long)
        dist.recv(part.tokens, src=last_rank)
    take(part.tokens, part.result, stop, fresh.extend)


def wait_until_sent(part: MicroBatch) -> None:
    while part.sent:
        request, _ = part.sent.pop()
        request.wait()


def split_batch(
    net: model.Transformer, prompts: list[list[int]], micro_batches: int, max_new_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """The prompts in micro-batches of equal size, the first ones one larger where they do not divide."""
    parts = []
    for rows in torch.arange(len(prompts)).tensor_split(min(micro_batches, len(prompts))):
        mine = slice(int(rows[0]), int(rows[-1]) + 1)
        ids, lengths = pad(prompts[mine], device)
        cache = StaticCache(
            net.config,
            batch=len(rows),
            length=ids.shape[1] + max_new_tokens,
            dtype=next(net.parameters()).dtype,
            device=device,
            layers=net.model.layers,
        )
        parts.append(MicroBatch(mine, ids, lengths, cache, Generated([[] for _ in rows], int(lengths.sum()))))
    return parts
