"""Weights of a model: random ones, those of a Hugging Face folder, and a hash of all of them."""

import hashlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from common.exits import UserError
from common.runtime import all_gather, print0
from lm.model import Transformer
from lm.shapes import SIZES, Config

ROWS_PER_GENERATOR = 256  # rows of a random matrix that are drawn together


def build(
    name: str, config: Config, *, seed: int, device: torch.device | str = "cpu"
) -> Transformer:
    """Return a model on `device` with the weights of the folder `name`, or with random ones.

    Random weights are the same on every device. On "meta" the model has shapes and no weights.
    """
    with torch.device("meta"):
        net = Transformer(config)
    if str(device) == "meta":
        return net
    return materialize(net, name, seed=seed, device=device)


def materialize(
    net: Transformer, name: str, *, seed: int, device: torch.device | str
) -> Transformer:
    """Allocate a model from the meta device on `device`, and fill it as `build` does.

    If the model is sharded, each rank allocates and fills its own shards only.
    """
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    has_random_weights = name in SIZES or not load_weights(net, Path(name))
    if has_random_weights:
        init_weights(net, seed)
    return net


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


@torch.no_grad()
def init_weights(net: Transformer, seed: int) -> None:
    """Fill every weight with random numbers that depend on (seed, name, row) alone.

    So a model starts from the same weights whether it is whole, sharded or split into stages.
    """
    for name, parameter in net.named_parameters():
        local, (rows, *columns) = local_part(parameter)
        full_rows = random_weight(name, parameter.shape, seed, rows.start, rows.stop)
        local.copy_(full_rows[(slice(None), *columns)])


def random_weight(
    name: str, shape: tuple[int, ...], seed: int, first: int = 0, last: int | None = None
) -> Tensor:
    """Return the initial value of a parameter: its rows from `first` up to, not including, `last`.

    Matrices are normal with standard deviation 0.02, norms are 1, biases are 0. Blocks of
    ROWS_PER_GENERATOR rows have a generator each, which is seeded from (seed, name, block): a rank
    draws little more than the rows it needs, and all cores draw at once.
    """
    if last is None:
        last = shape[0]
    if len(shape) == 1:
        value = 0.0 if name.endswith(".bias") else 1.0
        return torch.full((last - first,), value)
    rows = torch.empty(last - first, *shape[1:], device="cpu")

    def draw_block(block_start: int) -> None:
        key = hashlib.sha256(f"{seed} {name} {block_start}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
        block_rows = min(ROWS_PER_GENERATOR, shape[0] - block_start)
        block = torch.empty(block_rows, *shape[1:], device="cpu")
        block.normal_(0, 0.02, generator=generator)
        # Copy the part of the block that lies between `first` and `last`.
        start = max(first, block_start)
        stop = min(last, block_start + block_rows)
        rows[start - first : stop - first] = block[start - block_start : stop - block_start]

    first_block = first // ROWS_PER_GENERATOR * ROWS_PER_GENERATOR
    block_starts = range(first_block, last, ROWS_PER_GENERATOR)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # normal_ itself uses one thread
        list(pool.map(draw_block, block_starts))
    return rows


def load_weights(net: Transformer, folder: Path) -> bool:
    """Load the weights of the .safetensors files in `folder`; return False if there are none.

    Each rank of a sharded model reads only its own shards. Raise UserError if a file cannot be
    read, or if the names and shapes in the files are not those of the model.
    """
    if not any(folder.glob("*.safetensors*")):
        for file in folder.glob("*"):
            if file.suffix in (".bin", ".pt", ".pth", ".distcp"):
                raise UserError(
                    f"--model {folder}: {file.name} is not .safetensors: save the weights as such"
                )
        return False
    # Imported here: it takes 0.6 s, which random weights need not wait for.
    import torch.distributed.checkpoint as dcp
    from safetensors import SafetensorError

    print0(f"weights from the .safetensors files in {folder}")
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        needed_names = check_names_and_shapes(net.config, reader, folder)
        parameters = {}
        for name, parameter in net.named_parameters():
            if name in needed_names:  # an adapter is not in the files
                parameters[name] = parameter
        with warnings.catch_warnings(action="ignore"):  # no_dist: no rank waits for another
            dcp.load(parameters, storage_reader=reader, no_dist=True)
    except (SafetensorError, dcp.api.CheckpointException) as error:
        raise UserError(
            f"--model {folder}: a file is truncated or damaged, download it again ({error})"
        ) from None
    return True


def check_names_and_shapes(config: Config, reader, folder: Path) -> set[str]:
    """Return the names of all parameters; raise UserError if the files have others."""
    stored_shapes = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        stored_shapes[name] = tuple(entry.size)
    for name in list(stored_shapes):
        if name.endswith("rotary_emb.inv_freq"):  # older files have it; here it is computed
            del stored_shapes[name]
    if config.tie_word_embeddings:
        stored_shapes.pop("lm_head.weight", None)

    # net itself may be a pipeline stage, and lack what other stages hold.
    full_model = build("", config, seed=0, device="meta")
    needed_shapes = {}
    for name, parameter in full_model.named_parameters():
        needed_shapes[name] = tuple(parameter.shape)

    for name in sorted(stored_shapes.keys() | needed_shapes.keys()):
        stored = stored_shapes.get(name, "missing")
        needed = needed_shapes.get(name, "missing")
        if stored != needed:
            raise UserError(
                f"--model {folder}: {name} is {stored} in its files and {needed} in the model"
            )
    return set(needed_shapes)


@torch.no_grad()
def digest(net: nn.Module) -> str:
    """Return a hash of every parameter; every rank must call this.

    Equal digests mean equal weights, bit for bit, however the models are sharded. If two ranks hold
    different copies of a weight, they get different digests.
    """
    hash_by_place = {}  # (name, first row): hash of the rows that this rank holds
    sharded = False
    for name, parameter in net.named_parameters():
        if hasattr(parameter, "placements"):
            sharded = True
            parameter = with_full_rows(parameter)
        local, (rows, *_) = local_part(parameter)
        hash_by_place[name, rows.start] = hash_rows(name, local, rows.start)
    if sharded:
        for hashes_of_rank in all_gather(hash_by_place):
            for place, rows_hash in hashes_of_rank.items():
                hash_by_place.setdefault(place, rows_hash)  # where two ranks hold it, keep our own
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
