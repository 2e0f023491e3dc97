"""What convert_checkpoint.py finds: the kind of a checkpoint, the shape of its model, and whether they fit."""

import contextlib
import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from old import checkpoint, model, run_dir, shapes
from old.exits import UserError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # one matrix in a tied model
NOT_READABLE = (CheckpointException, SafetensorError, pickle.UnpicklingError, OSError, EOFError, RuntimeError)
NOT_READABLE += (ValueError, LookupError, TypeError, AttributeError)  # what parsing a damaged or a foreign file raises
TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model")  # and generation_config.json
Read = Callable[[str], Tensor]


class Source(NamedTuple):
    """A checkpoint of any kind. `tensors` are on the meta device: names, shapes and types, and no numbers yet."""

    tensors: dict[str, Tensor]
    read: Read
    config: dict | None = None  # the content of a config.json, if the file itself holds it


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """UserError that names the path for whatever a damaged file makes a library raise."""
    try:
        yield
    except NOT_READABLE as error:
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        raise UserError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def find(path: Path) -> tuple[str, Path]:
    """The kind of the checkpoint at `path`, and where exactly it lies. UserError if there is none, or a broken one."""
    if path.is_file():
        return "pt", path
    if steps := sorted(path.glob(run_dir.CHECKPOINTS)):
        path = steps[-1]
    if (path / "hashes.json").is_file() and (problem := checkpoint.find_damage(path)):
        raise UserError(f"{path} is broken ({problem}): name another step")
    if (path / ".metadata").is_file():
        return "dcp", path
    if any(path.glob("*.safetensors")):
        return "hf", path
    if (path / "latest").is_file():  # DeepSpeed's own folder: the name of the newest tag in it
        path = path / (path / "latest").read_text().strip()
    if any(path.glob("*_model_states.pt")):
        return "deepspeed", path
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder")
    raise UserError(
        f"{path} is no checkpoint: it has neither step-N, .metadata (DCP), .safetensors (Hugging Face) nor "
        "_model_states.pt (DeepSpeed)"
    )


def find_config(named: str | None, source: Source, path: Path) -> dict:
    """The content of the model's config.json: of --model, of the file itself, or of a config.json beside it."""
    if named is not None:
        return shapes.config_content(named)
    if source.config is not None:
        return source.config
    here = [path / "config.json", path.parent / "config.json"] if path.is_dir() else []
    file = next((place for place in here if place.is_file()), None)
    if file is None:
        raise UserError(f"{path} does not say the shape of its model: add --model, a size, config.json or folder")
    with readable(file):
        return dict(json.loads(file.read_text()))


def check_fits(source: Source, content: dict, path: Path) -> bool:
    """UserError that names each weight that is missing, superfluous or of another shape. Returns: is the model tied?"""
    config = shapes.parse_config(content, f"{path}: its config")
    with torch.device("meta"):
        expected = model.Transformer(config).state_dict()
    tied = config.tie_word_embeddings
    problems = []
    for name, tensor in source.tensors.items():
        if name not in expected:
            problems.append(f"{name} is not a weight of this model")
        elif tensor.shape != expected[name].shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(expected[name].shape)}")
        elif tensor.layout != torch.strided:
            problems.append(f"{name} is sparse")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is of type {tensor.dtype}")
    optional = {HEAD} if tied else set()
    problems += [f"{name} is missing" for name in expected if name not in source.tensors and name not in optional]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{path} does not fit its model's config: {'; '.join(problems[:5])}{more}")
    if tied and HEAD in source.tensors and sha256(source.read(HEAD)) != sha256(source.read(EMBEDDING)):
        raise UserError(f"{path}: its config ties {HEAD} to {EMBEDDING}, and they differ")
    return tied


def check_free(target: Path) -> None:
    """UserError if something is there, or the folder for it is not: better said now than after hours of reading."""
    if target.exists():
        raise UserError(f"{target} exists, and nothing is overwritten: remove it, or name another")
    if temporary_name(target).exists():
        raise UserError(
            f"{temporary_name(target)} is there: another conversion writes it, or was killed; then remove it"
        )
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target} cannot be written: no such folder {target.absolute().parent}")


def temporary_name(target: Path) -> Path:
    return target.with_name(target.name + ".tmp")


@contextlib.contextmanager
def aside(target: Path) -> Iterator[Path]:
    """A temporary name to write to, which becomes `target` if all goes well, and else is removed. UserError if the disk
    refuses."""
    temporary = temporary_name(target)
    try:
        yield temporary
        temporary.rename(target)
    except BaseException as failure:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)
        error = next(iter(failure.failures.values()))[0] if isinstance(failure, CheckpointException) else failure
        if isinstance(error, OSError) or "unexpected pos" in str(error):  # what torch.save says of a full disk
            free = shutil.disk_usage(target.absolute().parent).free / 2**20
            raise UserError(f"{target} cannot be written ({free:,.0f} MiB free there): {error}") from None
        raise error from None


def copy_tokenizer(named: str | None, path: Path, folder: Path) -> None:
    """The small files beside the weights of --model, or of `path`, so that `folder` can be used as that one was."""
    origin = path if named is None else Path(named)
    for file in origin.iterdir() if origin.is_dir() else ():
        ours = file.name in ("config.json", "hashes.json", "settings.json") or file.name.endswith(".index.json")
        if file.suffix in TOKENIZER_FILES and not ours:
            shutil.copy(file, folder / file.name)


def as_bytes(tensor: Tensor):
    """The tensor's memory as a row of bytes, no copy."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor)).hexdigest()
