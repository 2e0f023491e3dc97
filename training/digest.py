"""A hash of the weights of a model, however they are sharded."""

import hashlib

import torch
from torch import Tensor, nn

from common.runtime import all_gather


@torch.no_grad()
def digest(net: nn.Module) -> str:
    """Return one hash of all parameters. Every rank must call this.

    Equal digests mean equal weights, bit for bit, however the models are sharded. If two ranks hold
    different copies of a weight, they get different digests.
    """
    hash_by_place = {}  # (name, first row): hash of the rows that this rank holds
    sharded = False
    for name, parameter in net.named_parameters():
        if hasattr(parameter, "placements"):
            sharded = True
            parameter = with_full_rows(parameter)
        if parameter.ndim == 0:
            parameter = parameter.reshape(1)
        local, (row_slice, *_) = local_part(parameter)
        first = row_slice.start
        hash_by_place[name, first] = hash_rows(name, local, first)
    if sharded:
        for hashes_of_rank in all_gather(hash_by_place):
            for place, rows_hash in hashes_of_rank.items():
                hash_by_place.setdefault(place, rows_hash)  # replicated: keep the own hash
    return f"{sum(hash_by_place.values()) % 2**256:064x}"


def with_full_rows(parameter: Tensor) -> Tensor:
    """Return a DTensor that no mesh dimension shards by columns, so that a rank has full rows."""
    from torch.distributed.tensor import Replicate

    if not any(placement.is_shard(1) for placement in parameter.placements):
        return parameter
    placements = []
    for placement in parameter.placements:
        placements.append(Replicate() if placement.is_shard(1) else placement)
    return parameter.redistribute(placements=placements)


def hash_rows(name: str, rows: Tensor, first: int = 0) -> int:
    """Return the sum of the SHA-256 of each row, where `first` is the number of the first row.

    Because it is a sum, the hashes of the parts of a matrix add up to the hash of the matrix.
    """
    if len(rows) == 0:
        return 0
    rows_on_cpu = rows.detach().cpu().contiguous()
    row_bytes = rows_on_cpu.view(torch.uint8).numpy().reshape(len(rows), -1)
    total = 0
    for number, row in enumerate(row_bytes, first):
        row_hash = hashlib.sha256(f"{name} {number} ".encode() + row.tobytes())
        total += int.from_bytes(row_hash.digest())
    return total


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return what this rank holds of a parameter, and which slice of the full parameter that is."""
    if not hasattr(parameter, "placements"):  # not a DTensor: the rank holds all of it
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    # Imported here: it takes a second, which unsharded training need not wait for.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    slices = []
    for size, offset in zip(local_shape, offsets, strict=True):
        slices.append(slice(offset, offset + size))
    return parameter.to_local(), tuple(slices)
