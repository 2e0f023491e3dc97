"""Attention for rows that hold several documents, which 07_memory_tricks/packing.py explains.

A row's positions tell where its documents begin: there they are 0.
"""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lm import model


def unpack(inputs: Tensor, documents: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the tokens of packed rows, and the positions and the mask to give to a model.

    inputs is [batch, 2, tokens]: tokens and positions. The mask is `document_mask`. With
    `documents`, the most of a row, it is `document_ends`, for a model with `use_varlen`.
    """
    tokens, positions = inputs.unbind(1)
    mask = document_mask(positions) if documents is None else document_ends(positions, documents)
    return tokens, {"positions": positions, "mask": mask}


def use_varlen(net: model.Transformer) -> None:
    """Make a model compute attention by one kernel that takes the ends of all documents.

    It needs CUDA, and bf16 or fp16. Give it `document_ends` as its mask.
    """
    from torch.nn.attention.varlen import varlen_attn

    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in torch 2.11
    attend = partial(attend_to_documents, varlen_attn=varlen_attn, takes_groups=takes_groups)
    for block in net.model.layers.values():
        block.self_attn.attend = attend


def document_mask(positions: Tensor) -> Tensor:
    """Return the mask in which a token sees those of its document up to itself.

    positions is [batch, tokens], the mask [batch, 1, tokens, tokens].
    """
    document = (positions == 0).cumsum(1)  # its number in the row, [batch, tokens]
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def document_ends(positions: Tensor, documents: int) -> Tensor:
    """Return 0 and the ends of all documents in a batch of rows that follow each other.

    positions is [batch, tokens]. The result, int32 [batch * documents + 1], has room for so many
    documents in each row: those that are missing are empty. So its shape does not depend on the
    batch, and the CPU does not wait for the GPU.
    """
    document = (positions == 0).flatten().cumsum(0) - 1  # its number in the batch
    token = torch.arange(len(document), device=positions.device, dtype=torch.int32)
    ends = token.new_full((len(positions) * documents + 1,), len(document))
    # a document begins where the one before it ends: at the lowest of its tokens
    return ends.scatter_reduce(0, document, token, "amin")


def attend_to_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor | None = None,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
    varlen_attn: Callable[..., Tensor],
    takes_groups: bool,
) -> Tensor:
    """Compute causal attention of each document by itself; return [batch, heads, tokens, head_dim].

    q is [batch, heads, tokens, head_dim], k and v are [batch, kv_heads, tokens, head_dim]. Without
    `ends` this is model.attend.
    """
    if ends is None:
        return model.attend(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
    batch, heads, tokens, _ = q.shape
    options: dict = {"window_size": (-1, 0)}  # causal; by default it is not
    if takes_groups:
        options["enable_gqa"] = enable_gqa
    else:
        group = heads // k.shape[1]
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    # [batch, heads, tokens, head_dim] -> [batch * tokens, heads, head_dim]
    q = q.transpose(1, 2).flatten(0, 1)
    k = k.transpose(1, 2).flatten(0, 1)
    v = v.transpose(1, 2).flatten(0, 1)
    # no document is longer than a row
    output = varlen_attn(q, k, v, ends, ends, tokens, tokens, **options)
    return output.unflatten(0, (batch, tokens)).transpose(1, 2)
