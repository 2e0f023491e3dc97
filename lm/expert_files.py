"""How experts lie in weight files: a matrix per expert, or a stack of all experts.

    model       layers.0.mlp.experts.gate_up_proj              [experts, 2 * intermediate, hidden]
    files on the hub
      Qwen3     layers.0.mlp.experts.7.gate_proj.weight        [intermediate, hidden]
                layers.0.mlp.experts.7.up_proj.weight
      Mixtral   layers.0.block_sparse_moe.experts.7.w1.weight  (gate), w3 (up), w2 (down)

Folders are written as on the hub. Files with stacks, which transformers 5 can write, are read, too.
"""

from collections.abc import Callable, Container
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from lm.shapes import Config

STACKS = {  # the matrices of an expert in each stack, from the first row to the last
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class StoredPart(NamedTuple):
    """A tensor of a weight file, and where it lies in a parameter of the model."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None  # its index in a stack
    first_row: int = 0  # in the parameter, or in the matrix of an expert


def is_mixtral(config: Config) -> bool:
    """Return whether a model with experts is written as a Mixtral. Otherwise it is a Qwen3."""
    return config.experts is not None and not config.qk_norm


def stored_parts(
    name: str, shape: tuple[int, ...], stored: Container[str] = (), *, mixtral: bool = False
) -> list[StoredPart]:
    """Return the stored tensors that a parameter of the model consists of.

    Args:
        name: The parameter.
        shape: Its shape.
        stored: The names in the files. They decide which of the names above are used. Without
            files, experts have the names of Qwen3, or with `mixtral` those of Mixtral.
    """
    layer, is_mlp, inner = name.partition(".mlp.")
    router = f"{layer}.block_sparse_moe.gate.weight"
    mixtral = mixtral or router in stored
    if is_mlp and inner == "gate.weight" and mixtral:
        return [StoredPart(router, tuple(shape))]
    if not inner.startswith("experts.") or name in stored:
        return [StoredPart(name, tuple(shape))]

    projections = STACKS[inner.removeprefix("experts.")]
    experts, rows, columns = shape
    rows //= len(projections)
    folder = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    parts = []
    for expert in range(experts):
        for number, projection in enumerate(projections):
            stored_name = MIXTRAL[projection] if mixtral else projection
            parts.append(
                StoredPart(
                    f"{folder}.experts.{expert}.{stored_name}.weight",
                    (rows, columns),
                    expert,
                    number * rows,
                )
            )
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
    parts_by_name = {}
    for name, tensor in tensors.items():
        for part in stored_parts(name, tensor.shape, mixtral=is_mixtral(config)):
            parts_by_name[part.name] = (name, part)

    def cut(tensor: Tensor, part: StoredPart) -> Tensor:
        if part.expert is None:
            return tensor
        return tensor[part.expert, part.first_row : part.first_row + part.shape[0]]

    read = lru_cache(maxsize=1)(read)

    def read_part(stored_name: str) -> Tensor:
        name, part = parts_by_name[stored_name]
        return cut(read(name), part)

    stored = {}
    for stored_name, (name, part) in parts_by_name.items():
        stored[stored_name] = cut(tensors[name], part)
    return stored, read_part


def from_files(
    tensors: dict[str, Tensor], read: Callable[[str], Tensor], needed: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Return the tensors of files by the names of the model, and the function that reads one.

    Args:
        tensors: The tensors by the names in the files, on the meta device.
        read: Returns the tensor of such a name.
        needed: The shape of each tensor of the model. What the files lack is left out; what is in
            the files only keeps its name.
    """
    parts_by_name = {}
    remaining = dict(tensors)
    for name, shape in needed.items():
        parts = stored_parts(name, shape, tensors)
        if all(part.name in tensors for part in parts):
            parts_by_name[name] = parts
            for part in parts:
                remaining.pop(part.name)

    def join(name: str, get: Callable[[str], Tensor]) -> Tensor:
        parts = parts_by_name[name]
        if parts[0].expert is None:
            return get(parts[0].name)
        first = get(parts[0].name)
        stack = first.new_empty(needed[name])
        for part in parts:
            rows = slice(part.first_row, part.first_row + part.shape[0])
            stack[part.expert, rows] = get(part.name)
        return stack

    def read_tensor(name: str) -> Tensor:
        return join(name, read) if name in parts_by_name else read(name)

    found = {name: join(name, tensors.__getitem__) for name in parts_by_name}
    return {**found, **remaining}, read_tensor
