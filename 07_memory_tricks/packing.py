"""Packing: documents of unequal length share a row, where padding would be computed and thrown away.

A batch of documents is as wide as its longest one. Packing puts whole documents one behind the other until a row is
full. Then two things must not cross a document's end: attention, or a document reads those before it; and the target,
or a last token learns to guess the first of a stranger. Positions start anew, so that a document computes what it
would alone; they do not keep documents apart. Two ways to keep attention inside: a mask of L x L, or q, k and v cut at
the ends, one attention call per document.

    laptop    python 07_memory_tricks/packing.py
              torchrun --nproc_per_node=2 07_memory_tricks/packing.py
    one GPU   python 07_memory_tricks/packing.py --model llama-124m --seq-len 960 --documents 256 --dtype bf16
    cluster   each rank packs rows of its own; where ranks share a row, what torchrun shows here is needed

A row is a micro-batch here, since the ends differ by row. Under torchrun two more ways: a row's tokens over all ranks
(context parallel), and the layers over all ranks (pipeline). On a GPU with --dtype bf16: varlen_attn, one kernel for
all documents. FlexAttention has no backward on a CPU, so it is not here.

Look for: useful tokens per second; what one changed word moves. Before: lora.py. Next: cuda_graphs.py.
"""

import bisect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
import _packing as helper

from common import data, exits, lesson, measure, model, runtime, shapes

# all-gather with a backward: torch 2.13's name, and the one of before
all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
TOGETHER = 8  # documents of a padded batch


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Rows of documents, by number: the longest first, each into the fullest row that has room."""
    rows, room = [], []  # room: (free tokens, row), sorted
    for document in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        fits = bisect.bisect_left(room, (lengths[document], -1))
        free, row = room.pop(fits) if fits < len(room) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        bisect.insort(room, (free - lengths[document], row))
    return rows


def in_order(lengths: list[int], size: int) -> list[list[int]]:
    """As they come: what does not fit starts the next row."""
    rows, free = [], 0
    for document, length in enumerate(lengths):
        if length > free:
            rows.append([])
            free = size
        rows[-1].append(document)
        free -= length
    return rows


class Batch(NamedTuple):
    """Of each token: [rows, tokens]."""

    inputs: Tensor
    targets: Tensor  # the next token of the same document; PADDING for its last
    positions: Tensor  # 0, 1, 2, ... in each document
    owner: Tensor  # the number of its document; -1 is padding


def pack(documents: list[Tensor], row: list[int], size: int) -> Batch:
    """One row: these documents one behind the other, then padding."""
    padding = documents[0].new_zeros(size - sum(len(documents[number]) for number in row))
    parts = [(number, documents[number]) for number in row] + [(-1, padding)]
    inputs = torch.cat([part for _, part in parts])
    positions = torch.cat([torch.arange(len(part), device=part.device) for _, part in parts])
    owner = torch.cat([torch.full_like(part, number) for number, part in parts])
    is_last = owner != F.pad(owner[1:], (0, 1), value=-1)
    targets = inputs.roll(-1).masked_fill(is_last | (owner < 0), data.PADDING)
    return Batch(inputs[None], targets[None], positions[None], owner[None])


def pad(documents: list[Tensor], numbers: range) -> Batch:
    """A row for each document, as wide as the longest."""
    width = max(len(documents[number]) for number in numbers)
    return Batch(*map(torch.cat, zip(*(pack(documents, [number], width) for number in numbers), strict=True)))


# What stands in for F.scaled_dot_product_attention in a batch. q, k, v: [rows, heads, tokens, head_dim].


def causal(batch: Batch) -> Callable:
    """No mask. Right for padding, which comes after its document; in a packed row a document reads all before it."""
    return F.scaled_dot_product_attention


def masked(batch: Batch, queries: slice = slice(None)) -> Callable:
    """A query sees the keys of its own document that are not in its future."""
    (owner,) = batch.owner
    mask = (owner[:, None] == owner).tril()[queries]
    return lambda q, k, v, *_, enable_gqa, **__: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=enable_gqa)


def cut(batch: Batch) -> Callable:
    """No mask, and no score that a mask throws away."""
    lengths = batch.owner[0].unique_consecutive(return_counts=True)[1].tolist()

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, **how) -> Tensor:
        documents = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*document, **how) for document in documents], dim=2)

    return attend


def varlen(batch: Batch) -> Callable:
    """As cut, in one kernel that takes the documents' ends. CUDA and bf16 alone."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = batch.owner[0].unique_consecutive(return_counts=True)[1]
    ends, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))  # [tokens, heads, head_dim]
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        causal = {"window_size": (-1, 0)}  # by default a query sees its future
        return varlen_attn(q, k, v, ends, ends, longest, longest, **causal).transpose(0, 1)[None]

    return attend


# A way takes a batch and returns the part of it that this rank has logits of, and these.


def on_one_rank(net: nn.Module, attention_of: Callable, batch: Batch) -> tuple[Batch, Tensor]:
    set_attention(net, attention_of(batch))
    return batch, net(batch.inputs, positions=batch.positions)


def tokens_over_ranks(net: nn.Module, batch: Batch) -> tuple[Batch, Tensor]:
    """Context parallel: a rank has some tokens, and gathers all keys. It must know where all documents end: a library
    that puts is_causal in the place of the mask here lets documents see each other (huggingface/trl#6843)."""
    size = batch.inputs.shape[1] // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    with_mask = masked(batch, queries=mine)

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, **how) -> Tensor:
        k, v = (all_gather(tensor.contiguous(), gather_dim=2, group=dist.group.WORLD) for tensor in (k, v))
        return with_mask(q, k, v, **how)

    set_attention(net, attend)
    part = Batch(*(tensor[:, mine] for tensor in batch))
    return part, net(part.inputs, positions=part.positions)


def layers_over_ranks(stage: nn.Module, batch: Batch) -> tuple[Batch, Tensor]:
    """Pipeline: a rank has some layers. Hidden states do not say where documents end, so every rank has the batch."""
    set_attention(stage, cut(batch))
    rank, x = dist.get_rank(), batch.inputs
    if rank > 0:
        x = torch.empty(*x.shape, stage.config.hidden_size, device=x.device)
        dist.recv(x, rank - 1)
        x.requires_grad_().register_hook(lambda gradient: dist.send(gradient.contiguous(), rank - 1))
    y = stage(x, positions=batch.positions).clone()  # not x itself, where a rank has no layer
    if rank == dist.get_world_size() - 1:
        return batch, y
    dist.send(y.detach(), rank + 1)

    def receive(gradient: Tensor) -> Tensor:
        dist.recv(gradient := torch.empty_like(gradient).contiguous(), rank + 1)
        return gradient

    y.register_hook(receive)
    return Batch(*(tensor[:, :0] for tensor in batch)), y[:, :0]  # no token, but backward comes by


def set_attention(net: nn.Module, attend: Callable) -> None:
    for layer in net.model.layers.values():
        layer.self_attn.attend = attend


def autocast(batch: Batch, dtype: str) -> torch.autocast:
    return torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=dtype == "bf16")


def step(net: nn.Module, way: Callable, batches: list[Batch], dtype: str) -> None:
    """The gradient of the mean over all targets. Rows hold unequal numbers of them: a mean of means is another."""
    net.zero_grad(set_to_none=True)
    target_count = sum((batch.targets != data.PADDING).sum() for batch in batches)
    for batch in batches:
        with autocast(batch, dtype):
            part, logits = way(batch)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), part.targets.flatten(), reduction="sum")
        (loss / target_count).backward()
    if way.func is not on_one_rank:  # each rank has found a term of the sum
        for weight in net.parameters():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)


def largest_change(way: Callable, batches: list[Batch], dtype: str) -> float:
    """Change the first word of a document: how far do logits of the others in its batch move? 0: not by a bit."""
    batch = next((batch for batch in batches if batch.owner.unique().numel() > 2), batches[0])
    changed = batch._replace(inputs=batch.inputs.clone())
    changed.inputs[0, :4] ^= 1
    with autocast(batch, dtype):
        (part, before), (_, after) = way(batch), way(changed)
    others = (part.owner != batch.owner[0, 0]) & (part.owner >= 0)
    of_this_rank = F.pad((after - before).detach()[others].abs().flatten(), (0, 1)).max()  # a 0 if it has none of them
    return torch.tensor(runtime.gather(of_this_rank.item())).max().item()  # NaN if one is


def run(name: str, way: Callable, batches: list[Batch], net: nn.Module, dtype: str, exact: list[Tensor]) -> dict:
    """A row. `exact` is filled by the first way, one document at a time, and the others are compared with it."""
    net.zero_grad(set_to_none=True)
    with measure.LiveBytes(net.parameters(), batches[0].inputs.device) as memory:
        step(net, way, batches, dtype)
    exact += [] if exact else [weight.grad.clone() for weight in net.parameters()]
    change = largest_change(way, batches, dtype)
    useful = sum((batch.owner >= 0).sum().item() for batch in batches)
    return {
        "name": name,
        "useful_tokens": useful,
        "useful_token_share": useful / sum(batch.owner.numel() for batch in batches),
        "targets": sum((batch.targets != data.PADDING).sum().item() for batch in batches),
        "peak_bytes": memory.peak,
        "gradient_error": measure.relative_error([weight.grad for weight in net.parameters()], exact),
        "largest_change": change,
        "documents_see_each_other": change != 0,
    }


def main() -> int:
    args = lesson.flags(__doc__, model="nano", seq_len=240, documents=32, rounds=3, dtype=("fp32", "bf16"))
    config, size = shapes.load_config(args.model, 256, args.seq_len), args.seq_len
    lengths = helper.document_lengths(args.documents, size)
    rows_of_documents = helper.checked_rows(best_fit(lengths, size), size)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    documents = helper.read_documents(lengths, device)
    net = model.build(args.model, config, seed=0, device=device)

    together = [range(first, min(first + TOGETHER, len(lengths))) for first in range(0, len(lengths), TOGETHER)]
    batches = {
        "one at a time": [pack(documents, [number], length) for number, length in enumerate(lengths)],
        "padded": [pad(documents, numbers) for numbers in together],
        "in order": [pack(documents, row, size) for row in in_order(lengths, size)],
        "best fit": [pack(documents, row, size) for row in rows_of_documents],
    }
    ways = {
        "one at a time": partial(on_one_rank, net, causal),
        "padded": partial(on_one_rank, net, causal),
        "in order, cut": partial(on_one_rank, net, cut),
        "best fit, no mask": partial(on_one_rank, net, causal),
        "best fit, mask": partial(on_one_rank, net, masked),
        "best fit, cut": partial(on_one_rank, net, cut),
    }
    if device.type == "cuda" and args.dtype == "bf16":
        ways["best fit, varlen_attn"] = partial(on_one_rank, net, varlen)
    else:
        runtime.say("planned: varlen_attn (needs a CUDA GPU and --dtype bf16)")
    if dist.get_world_size() > 1:
        ways["best fit, tokens over ranks"] = partial(tokens_over_ranks, net)
        ways["best fit, layers over ranks"] = partial(layers_over_ranks, helper.stage_of(net))
    exact, rows, steps = [], [], {}
    for name, way in ways.items():
        of_way = batches[name.split(",")[0]]
        rows.append(run(name, way, of_way, net, args.dtype, exact))
        steps[name] = partial(step, net, way, of_way, args.dtype)
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    for row in rows:
        row |= seconds[row["name"]]
        for low, high in (("", ""), ("min_", "max_"), ("max_", "min_")):
            row[f"{low}tokens_per_second"] = row["useful_tokens"] / row[f"{high}seconds"]
    many = helper.document_lengths(10_000, size)
    shares = {packing.__name__: sum(many) / (size * len(packing(many, size))) for packing in (in_order, best_fit)}
    checked = helper.check(rows, shares, args)
    own = {"parameters": shapes.parameter_count(config), "shares_of_10000": shares}
    lesson.end(rows, columns=helper.COLUMNS, checked=checked, args=args, device=device, **own)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
