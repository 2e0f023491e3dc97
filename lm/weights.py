"""Random initial weights, weights from Hugging Face folders, and a hash of all weights."""

import hashlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from common.exits import UserError
from common.runtime import gather, print0
from lm.model import Transformer
from lm.shapes import SIZES, Config

ROWS = 256  # of a random matrix that share a generator


def random_weight(
    name: str, shape: tuple[int, ...], seed: int, first: int = 0, last: int | None = None
) -> Tensor:
    """The initial value of a parameter of this shape, or its rows from `first` to before `last`: a function of (seed,
    name, row) alone, drawn on all cores. ROWS rows share a generator, so a rank draws little but what it holds."""
    last = shape[0] if last is None else last
    if len(shape) < 2:
        return torch.full((last - first,), 0.0 if name.endswith(".bias") else 1.0)  # of norms
    rows = torch.empty(last - first, *shape[1:], device="cpu")

    def draw(start: int) -> None:
        key = hashlib.sha256(f"{seed} {name} {start}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
        block = torch.empty(min(ROWS, shape[0] - start), *shape[1:], device="cpu").normal_(
            0, 0.02, generator=generator
        )
        rows[max(start - first, 0) : start - first + ROWS] = block[
            max(first - start, 0) : last - start
        ]

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # torch itself draws in one
        list(pool.map(draw, range(first // ROWS * ROWS, last, ROWS)))
    return rows


def part_of(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this rank holds of a parameter, and where it lies in the whole: all of it, or a part of a DTensor."""
    if not hasattr(parameter, "placements"):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    # 1 s, not for unsharded training
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    place = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(
        slice(first, first + size) for size, first in zip(*place, strict=True)
    )


@torch.no_grad()
def init_weights(net: Transformer, seed: int) -> None:
    """Fill every weight with a function of (seed, name, row).

    A model that is whole, sharded or split into pipeline stages therefore starts from the same weights.
    """
    for name, parameter in net.named_parameters():
        local, (rows, *others) = part_of(parameter)
        weight = random_weight(name, parameter.shape, seed, rows.start, rows.stop)
        local.copy_(weight[(slice(None), *others)])


def build(
    name: str, config: Config, *, seed: int, device: torch.device | str = "cpu"
) -> Transformer:
    """The model on `device`: weights of the folder `name`, or random, the same on any device; on "meta" no numbers."""
    with torch.device("meta"):
        net = Transformer(config)
    return net if str(device) == "meta" else materialize(net, name, seed=seed, device=device)


def materialize(
    net: Transformer, name: str, *, seed: int, device: torch.device | str
) -> Transformer:
    """Give a model from the meta device, whole or sharded, its memory on `device` and its weights, as build does."""
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    if name in SIZES or not load_weights(net, Path(name)):
        init_weights(net, seed)
    return net


def load_weights(net: Transformer, folder: Path) -> bool:
    """Read the weights from the .safetensors files in `folder`, of a sharded model each rank its part alone. False if
    there are none; UserError for a file that cannot be read, a name or a shape that does not fit."""
    if not any(folder.glob("*.safetensors*")):
        for file in folder.glob("*"):
            if file.suffix in (".bin", ".pt", ".pth", ".distcp"):
                raise UserError(
                    f"--model {folder}: {file.name} is not .safetensors: save the weights as such"
                )
        return False
    import torch.distributed.checkpoint as dcp  # 0.6 s that random weights need not wait for
    from safetensors import SafetensorError

    print0(f"weights from the .safetensors files in {folder}")
    of_all_stages = build("", net.config, seed=0, device="meta").named_parameters()
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        stored = {
            name: tuple(entry.size)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        }
        # computed
        stored = {
            name: size for name, size in stored.items() if not name.endswith("rotary_emb.inv_freq")
        }
        needed = {name: tuple(weight.shape) for name, weight in of_all_stages}
        if net.config.tie_word_embeddings:
            stored.pop("lm_head.weight", None)
        for name, _ in sorted(stored.items() ^ needed.items()):
            there = f"{stored.get(name, 'missing')} in its files and {needed.get(name, 'missing')} in the model"
            raise UserError(f"--model {folder}: {name} is {there}")
        with warnings.catch_warnings(action="ignore"):  # no_dist: no rank waits for another
            # no adapters
            mine = {name: weight for name, weight in net.named_parameters() if name in needed}
            dcp.load(mine, storage_reader=reader, no_dist=True)
    except (SafetensorError, dcp.api.CheckpointException) as error:
        raise UserError(
            f"--model {folder}: a file is truncated or damaged, download it again ({error})"
        ) from None
    return True


def hash_rows(name: str, rows: Tensor, first: int = 0) -> int:
    """The sum of the SHA-256 of each row, the first of which has this number: parts of a matrix add up to the whole."""
    content = (
        rows.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(len(rows), -1)
        if len(rows)
        else ()
    )
    hashes = (
        hashlib.sha256(f"{name} {i} ".encode() + row.tobytes())
        for i, row in enumerate(content, first)
    )
    return sum(int.from_bytes(each.digest()) for each in hashes)


@torch.no_grad()
def digest(net: nn.Module) -> str:
    """A hash of every parameter: equal digests are equal weights, to the bit, however they are sharded. A rank hashes
    the rows that it holds, so every rank must call this; ranks whose copies differ get different digests."""
    hashes = {}
    for name, parameter in net.named_parameters():
        if placements := getattr(parameter, "placements", ()):
            from torch.distributed.tensor import Replicate

            # then whole rows, of the same matrix
            if any(place.is_shard(1) for place in placements):
                parameter = parameter.redistribute(
                    placements=[Replicate() if p.is_shard(1) else p for p in placements]
                )
        held, (rows, *_) = part_of(parameter)
        hashes[name, rows.start] = hash_rows(name, held, rows.start)
    if placements:
        for theirs in gather(hashes):
            hashes = theirs | hashes  # its own, where two hold the same
    return f"{sum(hashes.values()) % 2**256:064x}"
