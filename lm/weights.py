"""Weights of a language model: random weights, and weights from a Hugging Face folder."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from common import cli, hardware, report
from common.exits import UserError
from common.runtime import print0, ranks
from lm import shapes
from lm.expert_files import StoredPart, stored_parts
from lm.model import Transformer
from lm.moe import mixtures
from lm.shapes import SIZES, Config, has_weights, parameter_count
from lm.weight_files import HEAD, StoredWeights, has_own_head, weight_files
from training.digest import digest as digest  # it was here until 0.4.0
from training.digest import local_part

ROWS_PER_GENERATOR = 256  # rows of a random matrix that are drawn together
# Of each parameter in training: weight, gradient, and the two moments of AdamW, in fp32.
TRAINING_BYTES = 16
# fingerprint reads so many samples of so many bytes from each file.
SAMPLES = 16
SAMPLE_BYTES = 2**16
# Up to so many parameters the CPU draws random weights, which are then the same on every device.
# Inference with a larger model draws them on its GPUs: a CPU would take a quarter of an hour for
# llama-70b.
DRAWN_ON_CPU = 2e9
BAR_DELAY = 2.0  # seconds after which a progress bar appears


def read_config(name: str, flag: str = "--model", *, experts: bool = False) -> Config:
    """Return the shape of the model that `build` makes of `name`.

    It is that of shapes.read_config, which also says what is raised, with one exception: a head
    that config.json ties to the embedding is not tied if the folder's weights differ.

    experts: whether the script computes mixtures of experts. If not, raise UserError for one.
    """
    config = shapes.read_config(name, flag)
    if config.experts and not experts:
        raise UserError(
            f"{flag} {name} is a mixture of experts, which this script does not compute: "
            "04_amp/train.py, 05_ddp/train.py, 06_fsdp_zero/train_fsdp.py, "
            "06_fsdp_zero/finetune.py, 08_model_parallel/train_3d.py and "
            "09_inference/infer_70b.py do"
        )
    if config.tie_word_embeddings and name not in SIZES and has_own_head(Path(name)):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    return config


def load_config(name: str, tokenizer_size: int, seq_len: int, *, experts: bool = False) -> Config:
    """Return the shape to train on tokens of a tokenizer, in sequences of `seq_len` tokens.

    The shape is that of read_config, also for `experts`. Only nano and nano-moe take their
    vocabulary size from the tokenizer.

    Raise UserError if read_config does, if the tokenizer has more tokens than the model, or if
    `seq_len` is longer than the model allows.
    """
    config = read_config(name, experts=experts)
    if name in ("nano", "nano-moe"):
        config = dataclasses.replace(config, vocab_size=tokenizer_size)

    # 256 tokens are bytes. Weights with a large vocabulary were trained with another tokenizer.
    if has_weights(name) and tokenizer_size == 256 and config.vocab_size > 1000:
        raise UserError(
            f"--model {name}: its weights know {config.vocab_size} tokens, and this text is in "
            "bytes: use the tokenizer that the model was trained with"
        )
    if tokenizer_size > config.vocab_size:
        raise UserError(
            f"--model {name} has {config.vocab_size} tokens, and the tokenizer of this text has "
            f"{tokenizer_size}: use the model's own tokenizer, or a model with as many tokens"
        )
    if seq_len > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise UserError(f"--seq-len {seq_len} is over the limit of --model {name}: {limit}")
    return config


def fingerprint(name: str) -> str | None:
    """Return a hash of a model's weight files, or None for a model with random weights.

    The hash is over the size of each file, and samples of its content: large models have hundreds
    of gigabytes, which would take minutes to read.
    """
    if not has_weights(name):
        return None
    sha256 = hashlib.sha256()
    for path in weight_files(Path(name)):
        size = path.stat().st_size
        sha256.update(f"{size} ".encode())
        with open(path, "rb") as file:
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                sha256.update(file.read(SAMPLE_BYTES))
    return sha256.hexdigest()


def check_model(
    name: str,
    device: torch.device | str,
    *,
    copies: int,
    bytes_per_parameter: float = TRAINING_BYTES,
) -> None:
    """Raise UserError if a model is not known, or if this node's memory is too small to train it.

    A script calls this before it reads its text, which may take minutes. Only a CPU's memory is
    compared, with a lower bound, without activations: a GPU says itself that it is full, and a
    system without memory kills processes, or hangs.

    Arguments:
        copies: how many copies of the model all ranks hold together
        bytes_per_parameter: in each copy, of weights, gradients and optimizer state
    """
    config = shapes.read_config(name)
    world_size = ranks().world_size
    local_world_size = cli.environment_number("LOCAL_WORLD_SIZE", cli.positive_int, default="1")
    ranks_here = min(local_world_size, world_size)
    needed = parameter_count(config) * bytes_per_parameter * copies * ranks_here / world_size
    what = f"--model {name}: its weights"
    if bytes_per_parameter > 4:
        what += ", gradients and optimizer state"
    if ranks_here > 1:
        what += f" on {ranks_here} ranks"
    _check_memory(needed, what, device)


def _check_memory(needed_bytes: float, what: str, device: torch.device | str) -> None:
    """Raise UserError if a CPU's memory has fewer bytes."""
    if torch.device(device).type in ("cuda", "meta"):
        return
    memory = hardware.memory_bytes()
    if memory is None or needed_bytes <= memory:
        return
    raise UserError(
        f"{what} take {needed_bytes / 2**30:,.1f} GiB, and this machine or container has "
        f"{memory / 2**30:,.1f} GiB of memory: use a smaller model, or 06_fsdp_zero/train_fsdp.py "
        "and 09_inference/infer_70b.py on GPUs"
    )


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
    net: Transformer, name: str, *, seed: int, device: torch.device | str, flag: str = "--model"
) -> Transformer:
    """Allocate a model from the meta device on `device`, and fill it as `build` does.

    If the model is sharded, each rank allocates and fills its own shards only. Raise UserError,
    with the name of `flag`, if the folder's files are not the model's weights, or if they do not
    fit into the memory of a CPU.
    """
    check_weights_fit(net, f"{flag} {name}", device)
    stored = open_weights(name, net.config, flag)
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    for mixture in mixtures(net):
        if mixture.bias is not None:
            mixture.bias.zero_()
    if stored is None:
        init_weights(net, seed)
    else:
        load_weights(net, stored)
    return net


def check_weights_fit(net: nn.Module, name: str, device: torch.device | str) -> None:
    """Raise UserError if the memory of a CPU is too small for a model that is on the meta device.

    Only what this rank will hold counts. `name` is what the line calls the model.
    """
    needed = 0
    for tensor in [*net.parameters(), *net.buffers()]:
        local, _ = local_part(tensor)
        needed += local.nbytes
    _check_memory(needed, f"{name}: its weights", device)


@torch.no_grad()
def init_weights(net: Transformer, seed: int) -> None:
    """Fill every weight with random numbers that depend on (seed, name, row) alone.

    So a model starts from the same weights whether it is whole, sharded or split into stages.
    """

    def draw(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        rows, *columns = slices
        full_rows = random_weight(name, shape, seed, rows.start, rows.stop)
        return full_rows[(slice(None), *columns)]

    for name, parameter in _with_bar(net, "drawing weights"):
        fill(parameter, stored_parts(name, parameter.shape), draw)


def fill(
    parameter: Tensor,
    parts: list[StoredPart],
    read: Callable[[str, tuple[int, ...], tuple[slice, ...]], Tensor],
) -> None:
    """Fill what this rank holds of a parameter, part by part.

    read(name, shape, slices) returns the numbers in some slices of a stored tensor.
    """
    local, held = local_part(parameter)
    for part in parts:
        target = local
        slices = held
        if part.expert is not None:  # the matrix of an expert
            if part.expert not in range(held[0].start, held[0].stop):
                continue
            target = local[part.expert - held[0].start]
            slices = held[1:]
        elif part.first_row > 0:  # in a stack of two projections
            experts, rows, columns = held
            rows = slice(rows.start + part.first_row, rows.stop + part.first_row)
            slices = (experts, rows, columns)
        if target.numel() > 0:  # a rank may hold no rows of a small matrix
            target.copy_(read(part.name, part.shape, slices))


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


def open_weights(name: str, config: Config, flag: str = "--model") -> StoredWeights | None:
    """Return the weights of the folder `name`, or None for a model with random weights.

    Raise UserError, with the name of `flag`, if a file cannot be read, or if the names and shapes
    in the files are not those of the model.
    """
    if name in SIZES:
        return None
    stored = StoredWeights(Path(name), flag)
    if not stored.tensors:
        return None
    check_names_and_shapes(config, stored)
    print0(f"weights from the .safetensors files in {name}")
    return stored


@torch.no_grad()
def load_weights(net: Transformer, stored: StoredWeights) -> None:
    """Fill a model with stored weights. Each rank of a sharded model reads only its own shards."""

    def read(name: str, _: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        return stored.read(name, slices)

    for name, parameter in _with_bar(net, "loading weights"):
        parts = stored_parts(name, parameter.shape, stored.tensors)
        if parts[0].name in stored.tensors:  # else it is an adapter
            fill(parameter, parts, read)


def _with_bar(net: Transformer, description: str) -> Iterable[tuple[str, nn.Parameter]]:
    """Return the named parameters, with a progress bar if the work on them takes long."""
    parameters = list(net.named_parameters())
    return report.progress_bar(parameters, description, unit="tensor", delay=BAR_DELAY)


def check_names_and_shapes(config: Config, stored: StoredWeights) -> None:
    """Raise UserError if the names and shapes of the stored tensors are not those of the model."""
    stored_shapes = {}
    for name, tensor in stored.tensors.items():
        stored_shapes[name] = tensor.shape
    if config.tie_word_embeddings:  # read_config has seen that the stored head is the embedding
        stored_shapes.pop(HEAD, None)

    # The model at hand may be a pipeline stage, and lack what other stages hold.
    full_model = build("", config, seed=0, device="meta")
    needed_shapes = {}
    for name, parameter in full_model.named_parameters():
        for part in stored_parts(name, parameter.shape, stored.tensors):
            needed_shapes[part.name] = part.shape

    for name in sorted(stored_shapes.keys() | needed_shapes.keys()):
        stored_shape = stored_shapes.get(name, "missing")
        needed_shape = needed_shapes.get(name, "missing")
        if stored_shape != needed_shape:
            raise UserError(
                f"{stored.where}: {name} is {stored_shape} in its files "
                f"and {needed_shape} in the model"
            )
