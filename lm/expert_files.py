"""How the experts of a model lie in weight files: a matrix per expert, or the stacks of all experts.

    model          layers.0.mlp.experts.gate_up_proj              [experts, 2 * intermediate, hidden]
    files on the   layers.0.mlp.experts.7.gate_proj.weight        [intermediate, hidden]
    hub: Qwen3     layers.0.mlp.experts.7.up_proj.weight
    Mixtral        layers.0.block_sparse_moe.experts.7.w1.weight  (gate), w3 (up), w2 (down)

Folders are written as on the hub. Files with stacks, which transformers 5 can write, are read, too.
"""

from collections.abc import Container
from typing import NamedTuple

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
