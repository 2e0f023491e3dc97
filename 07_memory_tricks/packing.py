"""Packing: documents of unequal length share a row, where padding would be computed and thrown away.

Packing puts whole documents one behind the other until a row is full. Then two things must not cross a document's end:
attention, or a document reads those before it; and the target, or a last token learns to guess a stranger's first.
Positions start anew, so that a document computes what it would alone; they do not keep documents apart. Two ways do: a
mask of tokens x tokens, or q, k and v cut at the ends, one attention call per document.

    laptop    python 07_memory_tricks/packing.py
              torchrun --nproc_per_node=2 07_memory_tricks/packing.py
    one GPU   python 07_memory_tricks/packing.py --model llama-124m --seq-len 960 --documents 256 --dtype bf16
    cluster   each rank packs rows of its own; where ranks share a row, as with the second command

A row is a micro-batch here, since the ends differ by row. Under torchrun two more ways: a row's tokens over all ranks
(context parallel), and the layers over all ranks (pipeline). On a GPU with --dtype bf16 varlen_attn: one kernel for
all documents.

Look for: useful tokens per second; what one changed word moves. Before: lora.py. Next: cuda_graphs.py.
"""

import math
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _packing as helper

from common import exits, measure, report, runtime
from lm import data, model, shapes, weights

# all-gather with a backward: torch 2.13's name, and the one of before
all_gather = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)
PADDED_TOGETHER = 8  # documents of a padded batch


def rows_of(lengths: list[int], size: int, best_fit: bool = True) -> list[list[int]]:
    """Rows of documents, by number. Best fit: the longest first, each into the fullest row that has room. Else as they
    come: what does not fit starts the next row."""
    rows, free = [], []
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number] * best_fit):
        open_rows = range(len(rows)) if best_fit else range(len(rows))[-1:]
        fits = [row for row in open_rows if free[row] >= lengths[document]]
        row = min(fits, key=free.__getitem__, default=len(rows))
        if row == len(rows):
            rows.append([])
            free.append(size)
        rows[row].append(document)
        free[row] -= lengths[document]
    return rows


class Batch(NamedTuple):
    """Of each token: [rows, tokens]."""

    inputs: Tensor
    targets: Tensor  # the next token of the same document; PADDING for its last
    positions: Tensor  # 0, 1, 2, ... in each document
    owner: Tensor  # the number of its document; -1 is padding


def pack(documents: tuple[Tensor, ...], rows: list[list[int]], size: int) -> Batch:
    """In each row these documents one behind the other, then padding."""
    parts = []
    for row in rows:
        padding = documents[0].new_zeros(size - sum(len(documents[number]) for number in row))
        parts += [(number, documents[number]) for number in row] + [(-1, padding)]
    inputs = torch.cat([part for _, part in parts])
    positions = torch.cat([torch.arange(len(part), device=part.device) for _, part in parts])
    owner = torch.cat([torch.full_like(part, number) for number, part in parts])
    is_last = owner != F.pad(owner[1:], (0, 1), value=-1)
    targets = inputs.roll(-1).masked_fill(is_last | (owner < 0), data.PADDING)
    return Batch(
        *(tensor.unflatten(0, (len(rows), size)) for tensor in (inputs, targets, positions, owner))
    )


# What stands in for the attention of the model in a batch. q, k, v: [rows, heads, tokens, head_dim].


def causal(batch: Batch) -> Callable:
    """No mask. Right for padding, which comes after its document; in a packed row a document reads all before it."""
    return model.attend


def masked(batch: Batch, queries: slice = slice(None)) -> Callable:
    """A query sees the keys of its own document that are not in its future."""
    (owner,) = batch.owner
    mask = (owner[:, None] == owner).tril()[queries]
    return lambda q, k, v, *_, enable_gqa, **__: model.attend(q, k, v, mask, enable_gqa=enable_gqa)


def cut(batch: Batch) -> Callable:
    """No mask, and no score that a mask throws away."""
    lengths = batch.owner[0].unique_consecutive(return_counts=True)[1].tolist()

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, **how) -> Tensor:
        documents = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
        return torch.cat([model.attend(*document, **how) for document in documents], dim=2)

    return attend


# A way takes a batch and returns the part of it that this rank has logits of, and these.


def on_one_rank(net: nn.Module, attention_of: Callable, batch: Batch) -> tuple[Batch, Tensor]:
    attend = attention_of(batch)
    for layer in net.model.layers.values():
        layer.self_attn.attend = attend
    return batch, net(batch.inputs, positions=batch.positions)


def tokens_over_ranks(net: nn.Module, batch: Batch) -> tuple[Batch, Tensor]:
    """Context parallel: a rank has some tokens, and gathers all keys. It must know where all documents end: a library
    that puts is_causal in the place of the mask here lets documents see each other (huggingface/trl#6843)."""
    size = batch.inputs.shape[1] // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    with_mask = masked(batch, queries=mine)

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, **how) -> Tensor:
        k, v = (
            all_gather(tensor.contiguous(), gather_dim=2, group=dist.group.WORLD)
            for tensor in (k, v)
        )
        return with_mask(q, k, v, **how)

    return on_one_rank(net, lambda _: attend, Batch(*(tensor[:, mine] for tensor in batch)))


def layers_over_ranks(net: nn.Module, batch: Batch) -> tuple[Batch, Tensor]:
    """Pipeline: a rank has some layers. Hidden states do not say where documents end, so every rank has the batch."""
    rank, last, decoder = dist.get_rank(), dist.get_world_size() - 1, net.model
    attend, size = cut(batch), math.ceil(len(decoder.layers) / (last + 1))
    x = decoder.embed_tokens(batch.inputs)
    if rank > 0:
        x = receive(x.detach(), rank - 1).requires_grad_()
        x.register_hook(lambda gradient: dist.send(gradient.contiguous(), rank - 1))
    y = x.clone()  # not x itself, where a rank has no layer
    cos, sin = (
        table[batch.positions].unsqueeze(-2) for table in (decoder.rope_cos, decoder.rope_sin)
    )
    for layer in [*decoder.layers.values()][rank * size : (rank + 1) * size]:
        layer.self_attn.attend = attend
        y = layer(y, cos, sin)
    if rank == last:
        return batch, net.lm_head(decoder.norm(y))
    dist.send(y.detach(), rank + 1)
    y.register_hook(lambda _: receive(torch.empty_like(y), rank + 1))
    # no token, but backward comes by here
    return Batch(*(tensor[:, :0] for tensor in batch)), y[:, :0]


def receive(buffer: Tensor, sender: int) -> Tensor:
    dist.recv(buffer, sender)
    return buffer


def step(net: nn.Module, way: Callable, batches: list[Batch], over_ranks: bool) -> None:
    """The gradient of the mean over all targets. Rows hold unequal numbers of them: a mean of means is another."""
    net.zero_grad(set_to_none=True)
    target_count = sum((batch.targets != data.PADDING).sum() for batch in batches)
    for batch in batches:
        part, logits = way(batch)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), part.targets.flatten(), reduction="sum"
        )
        (loss / target_count).backward()
    for weight in net.parameters() if over_ranks else ():  # each rank has found a term of the sum
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(weight.grad)


def largest_change(way: Callable, batches: list[Batch]) -> float:
    """Change the first word of a document: how far do logits of the others in its batch move? 0: not by a bit."""
    batch = next((batch for batch in batches if batch.owner.unique().numel() > 2), batches[0])
    changed = batch._replace(inputs=batch.inputs.clone())
    changed.inputs[0, :4] ^= 1
    (part, before), (_, after) = way(batch), way(changed)
    others = (part.owner != batch.owner[0, 0]) & (part.owner >= 0)
    # a 0 if it has none of them
    of_this_rank = F.pad((after - before).detach()[others].abs().flatten(), (0, 1)).max()
    return torch.tensor(runtime.all_gather(of_this_rank.item())).max().item()  # NaN if one is


def run(name: str, one_step: partial, exact: list[Tensor]) -> dict:
    """A row. `exact` is filled by the first way, one document at a time; the others are compared with it."""
    net, way, batches = one_step.args
    net.zero_grad(set_to_none=True)
    with measure.LiveBytes(net.parameters(), batches[0].inputs.device) as memory:
        one_step()
    gradients = [weight.grad.clone() for weight in net.parameters()]
    exact += [] if exact else gradients
    useful = sum((batch.owner >= 0).sum().item() for batch in batches)
    change = largest_change(way, batches)
    return {
        "name": name,
        "useful_tokens": useful,
        "useful_token_share": useful / sum(batch.owner.numel() for batch in batches),
        "targets": sum((batch.targets != data.PADDING).sum().item() for batch in batches),
        "peak_bytes": memory.peak,
        "gradient_error": measure.relative_error(gradients, exact),
        "largest_change": change,
        "documents_see_each_other": change != 0,
    }


def main() -> int:
    args = report.lesson_flags(
        __doc__, model="nano", seq_len=240, documents=20, rounds=3, dtype=("fp32", "bf16")
    )
    config, size = shapes.load_config(args.model, 256, args.seq_len), args.seq_len
    lengths = helper.document_lengths(args.documents, size)
    helper.refuse(rows_of(lengths, size), args)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    documents = data.one_batch(1, sum(lengths), device)[0][0].split(lengths)
    net = weights.build(args.model, config, seed=0, device=device)

    alone = [pack(documents, [[number]], length) for number, length in enumerate(lengths)]
    groups = [
        range(len(lengths))[first:][:PADDED_TOGETHER]
        for first in range(0, len(lengths), PADDED_TOGETHER)
    ]
    padded = [
        pack(documents, [[number] for number in group], max(lengths[i] for i in group))
        for group in groups
    ]
    ordered, fitted = (
        [pack(documents, [row], size) for row in rows_of(lengths, size, fit)]
        for fit in (False, True)
    )
    ways = {
        "one at a time": (alone, partial(on_one_rank, net, causal)),
        "padded": (padded, partial(on_one_rank, net, causal)),
        "in order, cut": (ordered, partial(on_one_rank, net, cut)),
        "best fit, no mask": (fitted, partial(on_one_rank, net, causal)),
        "best fit, mask": (fitted, partial(on_one_rank, net, masked)),
        "best fit, cut": (fitted, partial(on_one_rank, net, cut)),
    }
    if device.type == "cuda" and args.dtype == "bf16":
        ways["best fit, varlen_attn"] = (fitted, partial(on_one_rank, net, helper.varlen))
    if dist.get_world_size() > 1:
        ways["best fit, tokens over ranks"] = (fitted, partial(tokens_over_ranks, net))
        ways["best fit, layers over ranks"] = (fitted, partial(layers_over_ranks, net))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16")
    exact, rows, steps = [], [], {}
    for name, (batches, way) in ways.items():
        steps[name] = partial(
            step, net, autocast(way), batches, over_ranks=name.endswith("over ranks")
        )
        rows.append(run(name, steps[name], exact))
    for row, seconds in zip(
        rows, measure.seconds_in_turns(steps, device, args.rounds).values(), strict=True
    ):
        row |= seconds
        for low, high in (("", ""), ("min_", "max_"), ("max_", "min_")):
            row[f"{low}tokens_per_second"] = row["useful_tokens"] / row[f"{high}seconds"]
    many = helper.document_lengths(10_000, size)
    row_counts = {
        name: len(rows_of(many, size, name == "best_fit")) for name in ("in_order", "best_fit")
    }
    shares = {name: sum(many) / (size * count) for name, count in row_counts.items()}
    own = {"parameters": shapes.parameter_count(config), "shares_of_10000_documents": shares}
    checked = helper.check(rows, shares, args)
    report.end_lesson(
        rows, columns=helper.COLUMNS, checked=checked, args=args, device=device, **own
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
