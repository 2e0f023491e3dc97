"""Packing: documents of unequal length share a row, so that no padding is computed.

Packing puts documents one behind the other until a row is full. Two things must then stop at the
end of a document. Attention must, or a document reads the ones before it. Targets must, or a last
token learns to predict the first token of the next document. Positions start again at 0, so that a
document computes what it would alone, but they do not keep documents apart. These do:

    a mask       [tokens, tokens], True within a document. Scores outside are computed, and dropped.
    a cut        q, k and v are split at the ends: one attention call per document.
    varlen_attn  one kernel that takes the ends of all documents. It needs CUDA, and bf16 or fp16.

    laptop    python 07_memory_tricks/packing.py
    one GPU   python 07_memory_tricks/packing.py --device cuda
              python 07_memory_tricks/packing.py --seq-len 4096 --documents 128 --dtype bf16
    cluster   it uses one process only: each rank packs its own rows

A row is one micro-batch, because each row has other ends. On Hopper varlen_attn runs flash
attention 2, while rows that are not packed run cuDNN's attention kernel: compare their times with
that in mind. With the package flash_attn_interface (folder hopper/ of Dao-AILab/flash-attention)
torch.nn.attention.activate_flash_attention_impl("FA3") makes varlen_attn run flash attention 3.

What to look at: useful tokens per second; what one changed word moves in other documents. Expected
on an H100, where the model is wider: the useful tokens per second grow with the useful share.
Previous: lora.py. Next: cuda_graphs.py.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _packing as helper
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import lesson, measure
from lm import model, shapes, stdlib_text, weights
from training.batches import PADDING

# --- 1. rows


def in_order(lengths: list[int], size: int) -> list[list[int]]:
    """Return rows of documents as they come. One that does not fit starts the next row."""
    rows = []
    room = 0
    for document, length in enumerate(lengths):
        if length > room:
            rows.append([])
            room = size
        rows[-1].append(document)
        room -= length
    return rows


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Return rows of documents: the longest first, each in the fullest row that has room."""
    rows = []
    room = []  # of each row
    longest_first = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    for document in longest_first:
        fitting = [row for row in range(len(rows)) if room[row] >= lengths[document]]
        if fitting:
            row = min(fitting, key=lambda row: room[row])
        else:
            row = len(rows)
            rows.append([])
            room.append(size)
        rows[row].append(document)
        room[row] -= lengths[document]
    return rows


class Batch(NamedTuple):
    """Rows of documents. Each tensor is [rows, tokens]."""

    inputs: Tensor
    targets: Tensor  # the next token of the same document; PADDING for its last token
    positions: Tensor  # 0, 1, 2, ... in each document
    owner: Tensor  # the number of the token's document; -1 is padding


def pack(documents: tuple[Tensor, ...], rows: list[list[int]], size: int) -> Batch:
    """Put the documents of each row one behind the other, and padding behind the last."""
    parts = []  # (number of the document, its tokens)
    for row in rows:
        for number in row:
            parts.append((number, documents[number]))
        used = sum(len(documents[number]) for number in row)
        parts.append((-1, documents[0].new_zeros(size - used)))
    inputs = torch.cat([tokens for _, tokens in parts])
    positions = torch.cat([torch.arange(len(tokens), device=inputs.device) for _, tokens in parts])
    owner = torch.cat([torch.full_like(tokens, number) for number, tokens in parts])
    is_last = owner != F.pad(owner[1:], (0, 1), value=-1)
    targets = inputs.roll(-1).masked_fill(is_last | (owner < 0), PADDING)
    tensors = (inputs, targets, positions, owner)
    return Batch(*[tensor.unflatten(0, (len(rows), size)) for tensor in tensors])


# --- 2. attention that stops at the end of a document
#
# Each function takes a batch and returns what the model calls as its `attend`. There q is [rows,
# heads, tokens, head_dim]; k and v have kv_heads.


def causal(batch: Batch) -> Callable:
    """Return attention without a mask: a token sees all tokens before it.

    That is right for padding, which comes after its document, and wrong for a packed row.
    """
    return model.attend


def masked(batch: Batch) -> Callable:
    """Return attention in which a token sees those of its own document up to itself."""
    (owner,) = batch.owner
    mask = (owner[:, None] == owner).tril()  # [tokens, tokens]

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, enable_gqa: bool, **__) -> Tensor:
        return model.attend(q, k, v, mask, enable_gqa=enable_gqa)

    return attend


def cut(batch: Batch) -> Callable:
    """Return attention of each document by itself. No score is computed in vain."""
    _, lengths = batch.owner[0].unique_consecutive(return_counts=True)
    lengths = lengths.tolist()

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, **options) -> Tensor:
        documents = zip(
            q.split(lengths, dim=2), k.split(lengths, dim=2), v.split(lengths, dim=2), strict=True
        )
        outputs = [model.attend(q, k, v, **options) for q, k, v in documents]
        return torch.cat(outputs, dim=2)

    return attend


def varlen(batch: Batch) -> Callable:
    """Return attention of each document by itself, in one kernel that takes their ends.

    It has not run on a GPU yet. Compare its gradients with those of `cut` before you copy it.
    """
    from torch.nn.attention.varlen import varlen_attn

    _, lengths = batch.owner[0].unique_consecutive(return_counts=True)
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()  # 0, the end of the first document, ...
    longest = int(lengths.max())
    options = {"window_size": (-1, 0)}  # causal; by default it is not
    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    if takes_groups:
        options["enable_gqa"] = True

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
        # [1, heads, tokens, head_dim] -> [tokens, heads, head_dim]
        q = q[0].transpose(0, 1)
        k = k[0].transpose(0, 1)
        v = v[0].transpose(0, 1)
        if not takes_groups:
            group = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(group, dim=1)
            v = v.repeat_interleave(group, dim=1)
        out = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
        return out.transpose(0, 1)[None]

    return attend


# --- 3. a step


def logits_of(net: nn.Module, attention_of: Callable, batch: Batch) -> Tensor:
    """Return the logits of a batch, [rows, tokens, vocabulary]."""
    attend = attention_of(batch)
    for layer in net.model.layers.values():
        layer.self_attn.attend = attend
    return net(batch.inputs, positions=batch.positions)


def step(net: nn.Module, compute_logits: Callable[[Batch], Tensor], batches: list[Batch]) -> None:
    """Compute the gradient of the mean over all targets.

    Rows hold unequal numbers of targets, so the mean of the rows' means is another loss.
    """
    net.zero_grad(set_to_none=True)
    target_count = sum((batch.targets != PADDING).sum() for batch in batches)
    for batch in batches:
        logits = compute_logits(batch).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), batch.targets.flatten(), reduction="sum")
        (loss / target_count).backward()


def largest_change(compute_logits: Callable[[Batch], Tensor], batches: list[Batch]) -> float:
    """Change the first word of a document, and return how far logits of others move at most.

    0 means not by a bit. The batch is the first with several documents and padding, if there is
    one.
    """
    batch = batches[0]
    for candidate in batches:
        if candidate.owner.unique().numel() > 2:
            batch = candidate
            break
    changed = batch._replace(inputs=batch.inputs.clone())
    changed.inputs[0, :4] ^= 1
    before = compute_logits(batch)
    after = compute_logits(changed)
    others = (batch.owner != batch.owner[0, 0]) & (batch.owner >= 0)
    if not others.any():
        return 0.0
    return (after - before).detach()[others].abs().max().item()


def run(
    name: str,
    net: nn.Module,
    compute_logits: Callable[[Batch], Tensor],
    batches: list[Batch],
    exact: list[Tensor] | None,
) -> tuple[dict, list[Tensor]]:
    """Return the row of a method, and its gradients. `exact` are those of the first method."""
    net.zero_grad(set_to_none=True)
    with measure.LiveBytes(net.parameters(), batches[0].inputs.device) as memory:
        step(net, compute_logits, batches)
    gradients = [weight.grad.clone() for weight in net.parameters()]
    useful = sum((batch.owner >= 0).sum().item() for batch in batches)
    change = largest_change(compute_logits, batches)
    row = {
        "name": name,
        "useful_tokens": useful,
        "useful_token_share": useful / sum(batch.owner.numel() for batch in batches),
        "targets": sum((batch.targets != PADDING).sum().item() for batch in batches),
        "peak_bytes": memory.peak,
        "gradient_error": measure.relative_error(gradients, exact or gradients),
        "largest_change": change,
        "documents_see_each_other": change != 0,
    }
    return row, gradients


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "seq_len": 2048, "documents": 40},
        model="nano",
        seq_len=240,
        documents=20,
        rounds=3,
        dtype=("fp32", "bf16"),
    )
    size = args.seq_len
    config = weights.load_config(args.model, 256, size)
    lengths = helper.document_lengths(args.documents, size)
    helper.check_rows(best_fit(lengths, size), size, args.documents)
    device = lesson.start(args.device)
    text, _ = stdlib_text.one_batch(1, sum(lengths), device)
    documents = text[0].split(lengths)
    net = weights.build(args.model, config, seed=0, device=device)

    alone = [pack(documents, [[number]], length) for number, length in enumerate(lengths)]
    padded = []
    for group in helper.groups_of(len(lengths)):
        longest = max(lengths[number] for number in group)
        padded.append(pack(documents, [[number] for number in group], longest))
    ordered = [pack(documents, [row], size) for row in in_order(lengths, size)]
    fitted = [pack(documents, [row], size) for row in best_fit(lengths, size)]
    methods = {
        "one at a time": (alone, causal),
        "padded": (padded, causal),
        "in order, cut": (ordered, cut),
        helper.NO_MASK: (fitted, causal),
        "best fit, mask": (fitted, masked),
        "best fit, cut": (fitted, cut),
    }
    if device.type == "cuda" and args.dtype == "bf16":
        methods["best fit, varlen_attn"] = (fitted, varlen)

    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16")
    exact = None
    rows = []
    steps = {}
    for name, (batches, attention_of) in methods.items():
        compute_logits = autocast(partial(logits_of, net, attention_of))
        row, gradients = run(name, net, compute_logits, batches, exact)
        exact = exact or gradients
        rows.append(row)
        steps[name] = partial(step, net, compute_logits, batches)
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    for row in rows:
        helper.add_seconds(row, seconds[row["name"]])

    many = helper.document_lengths(10_000, size)
    shares = {}
    for name, make_rows in (("in_order", in_order), ("best_fit", best_fit)):
        shares[name] = sum(many) / (size * len(make_rows(many, size)))
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, shares, args),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        shares_of_10000_documents=shares,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
