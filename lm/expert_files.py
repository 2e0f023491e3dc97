"""How experts lie in weight files: a matrix per expert, or a stack of all experts.

    model       layers.0.mlp.experts.gate_proj                 [experts, intermediate, hidden]
    files on the hub
      Qwen3     layers.0.mlp.experts.7.gate_proj.weight        [intermediate, hidden]
      Mixtral   layers.0.block_sparse_moe.experts.7.w1.weight  (gate), w3 (up), w2 (down)
    stacks      layers.0.mlp.experts.gate_up_proj              [experts, 2 * intermediate, hidden]

Folders are written as on the hub. Files with stacks, which transformers 5 can write, are read, too.
"""

from collections.abc import Callable, Container
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lm.shapes import Config

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class StoredPart(NamedTuple):
    """A tensor of a weight file, and which part of a parameter it has."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None  # it is the matrix of this expert; None: it has all of the parameter
    first_row: int = 0  # of the parameter, in a stack of two projections


def stored_parts(
    name: str, shape: tuple[int, ...], stored: Container[str] = (), *, mixtral: bool = False
) -> list[StoredPart]:
    """Return the stored tensors that a parameter of the model consists of.

    Args:
        name: The parameter.
        shape: Its shape.
        stored: The names in the files, which decide between the layouts above. Without files,
            experts have the names of Qwen3, or with `mixtral` those of Mixtral.
    """
    layer, _, inner = name.partition(".mlp.")
    router = f"{layer}.block_sparse_moe.gate.weight"
    mixtral = mixtral or router in stored
    if inner == "gate.weight" and mixtral:
        return [StoredPart(router, tuple(shape))]
    if not inner.startswith("experts."):
        return [StoredPart(name, tuple(shape))]

    projection = inner.removeprefix("experts.")
    experts, rows, columns = shape
    stack = f"{layer}.mlp.experts.gate_up_proj"
    if stack in stored:
        if projection == "down_proj":
            return [StoredPart(name, tuple(shape))]
        first_row = rows if projection == "up_proj" else 0
        return [StoredPart(stack, (experts, 2 * rows, columns), first_row=first_row)]

    folder = f"{layer}.mlp.experts"
    if mixtral:
        folder = f"{layer}.block_sparse_moe.experts"
        projection = MIXTRAL[projection]
    parts = []
    for expert in range(experts):
        parts.append(StoredPart(f"{folder}.{expert}.{projection}.weight", (rows, columns), expert))
    return parts


def in_files(
    tensors: dict[str, Tensor], read: Callable[[str], Tensor], config: Config
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Return the tensors of a model by the names in files, and the function that reads one of them.

    Args:
        tensors: The tensors by the names of the model, on the meta device.
        read: Returns the tensor of such a name. It is called once for each stack, if the names
            that are returned are read in their order.
        config: The shape of the model.
    """
    mixtral = config.experts is not None and not config.qk_norm
    stored = {}
    places = {}
    for name, tensor in tensors.items():
        for part in stored_parts(name, tensor.shape, mixtral=mixtral):
            stored[part.name] = tensor if part.expert is None else tensor[part.expert]
            places[part.name] = (name, part.expert)
    read_once = lru_cache(maxsize=1)(read)

    def read_part(stored_name: str) -> Tensor:
        name, expert = places[stored_name]
        tensor = read_once(name)
        return tensor if expert is None else tensor[expert]

    return stored, read_part


def from_files(
    tensors: dict[str, Tensor], read: Callable[[str], Tensor], needed: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Return the tensors of files by the names of the model, and the function that reads one.

    Args:
        tensors: The tensors by the names in the files, on the meta device.
        read: Returns the tensor of such a name.
        needed: The shape of each tensor of the model. What the files lack is left out. What only
            the files have keeps its name.
    """
    parts_of = {}
    rest = dict(tensors)
    for name, shape in needed.items():
        parts = stored_parts(name, shape, tensors)
        if all(part.name in tensors for part in parts):
            parts_of[name] = parts
            for part in parts:
                rest.pop(part.name, None)

    def join(name: str, get: Callable[[str], Tensor]) -> Tensor:
        parts = parts_of[name]
        if parts[0].expert is not None:
            return torch.stack([get(part.name) for part in parts])
        tensor = get(parts[0].name)
        if tensor.ndim == 3:  # perhaps a stack of two projections
            first_row = parts[0].first_row
            tensor = tensor[:, first_row : first_row + needed[name][1]]
        return tensor

    def read_tensor(name: str) -> Tensor:
        return join(name, read) if name in parts_of else read(name)

    found = {name: join(name, tensors.__getitem__) for name in parts_of}
    return {**found, **rest}, read_tensor
