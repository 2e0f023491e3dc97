"""The weight files of a Hugging Face folder: which of them are the model's, and what is in them.

Every script opens weights through this file, so that all of them read the same files. torch and
safetensors are imported only when a tensor is read: the planner needs names and shapes at most.
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from common.exits import UserError
from lm.runs import refuse_run

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model*.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".gguf")
GIT_LFS_POINTER = b"version https://git-lfs"  # how the small file in place of a large one begins
COMPUTED_BUFFER = "rotary_emb.inv_freq"  # older files have it; lm/model.py computes it

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROWS_PER_COMPARISON = 4096


def weight_files(folder: Path, flag: str = "--model") -> list[Path]:
    """Return the files with the weights of the model in `folder`, or [] if there are no weights.

    They are model.safetensors if it exists, else the files that model.safetensors.index.json names,
    else model*.safetensors. A folder may hold more, which is not read: an older save, an adapter,
    the same weights with other names.

    Raise UserError, with the name of `flag`, if one of the files is missing or cannot be read, or
    if the folder has weights in other files only.
    """
    where = f"{flag} {folder}"
    single_file = folder / SINGLE_FILE
    index = folder / INDEX
    if _is_listed(single_file):
        files = [single_file]
    elif _is_listed(index):
        files = _files_in_index(index, where)
    else:
        files = sorted(folder.glob(SHARDS))
    for file in files:
        _check_file(file, where)
    if not files:
        refuse_run(str(folder), flag)
        _check_no_other_weights(folder, where)
    return files


def _is_listed(path: Path) -> bool:
    """Return whether the folder lists this name, also if it is a link to a missing file."""
    return path.is_symlink() or path.exists()


def _files_in_index(index: Path, where: str) -> list[Path]:
    """Return the files that an index names, sorted."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not names:
            raise ValueError("its weight_map is empty")
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not the name of a file beside it")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where}: {index.name} is not an index of weights, download it again "
            f"({type(error).__name__}: {error})"
        ) from None
    return [index.parent / name for name in sorted(names)]


def _check_file(file: Path, where: str) -> None:
    """Raise UserError if a weight file is missing, cannot be read or is a git-LFS pointer."""
    if file.is_symlink() and not file.exists():
        raise UserError(
            f"{where}: {file.name} is a link to {os.readlink(file)}, which is missing: "
            "download it again"
        )
    if not file.exists():
        raise UserError(f"{where}: {file.name}, which {INDEX} names, is missing: download it")
    try:
        with open(file, "rb") as stream:
            start = stream.read(len(GIT_LFS_POINTER))
    except OSError as error:
        raise UserError(f"{where}: {file.name} cannot be read: {error.strerror}") from None
    if start == GIT_LFS_POINTER:
        raise UserError(
            f"{where}: {file.name} is a git-LFS pointer, and not the weights: "
            "run git lfs pull in the folder"
        )


def _check_no_other_weights(folder: Path, where: str) -> None:
    """Raise UserError if a folder has weights in other formats or under other names."""
    if not folder.is_dir():
        return
    for file in sorted(folder.iterdir()):
        if file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json"):
            raise UserError(
                f"{where}: {file.name} is there, and no {SINGLE_FILE}, {INDEX} or {SHARDS}: "
                "save the whole model with transformers' save_pretrained"
            )


class StoredTensor(NamedTuple):
    """Describe a tensor in a weight file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, ...


class StoredWeights:
    """The tensors in the weight files of a folder. Only `read` reads their numbers."""

    def __init__(self, folder: Path, flag: str = "--model") -> None:
        """Read the names and shapes.

        Raise UserError, with the name of `flag`, if a file is missing or damaged, or if two files
        have a tensor of the same name.
        """
        self.where = f"{flag} {folder}"
        self.tensors: dict[str, StoredTensor] = {}
        for file in weight_files(folder, flag):
            for name, entry in _read_header(file, self.where).items():
                if name in self.tensors:
                    other = self.tensors[name].file.name
                    raise UserError(
                        f"{self.where}: {name} is in {other} and in {file.name}: "
                        "remove the files of the older save"
                    )
                if not name.endswith(COMPUTED_BUFFER):
                    self.tensors[name] = StoredTensor(file, tuple(entry["shape"]), entry["dtype"])

    def read(self, name: str, slices: tuple[slice, ...] = ()):
        """Return a tensor, on the CPU and in the type of the file, or the part in `slices`."""
        from safetensors import SafetensorError, safe_open

        file = self.tensors[name].file
        try:
            # Open the file anew for each tensor: it is mapped into memory, and an open map would
            # keep every page that was ever read.
            with safe_open(file, "pt") as opened:
                if slices:
                    return opened.get_slice(name)[slices]
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(file, self.where, error) from None


def _read_header(file: Path, where: str) -> dict[str, dict]:
    """Return the entries in the header of a .safetensors file, by the name of the tensor.

    The file is the header's length (8 bytes), the header in JSON, and the data of all tensors. An
    entry has dtype, shape and data_offsets: [first byte, byte after the last] in the data.
    """
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = os.fstat(stream.fileno()).st_size
            if length + 8 > size:
                raise ValueError("it ends within its header")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        data_size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != 8 + length + data_size:
            raise ValueError(f"it has {size:,} bytes, and {8 + length + data_size:,} are due")
        for entry in header.values():
            entry["shape"], entry["dtype"]  # KeyError if they are missing
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(file, where, error) from None
    return header


def _damaged(file: Path, where: str, error: Exception) -> UserError:
    return UserError(f"{where}: {file.name} is truncated or damaged, download it again ({error})")


def has_own_head(folder: Path) -> bool:
    """Return whether the files have a head that differs from the embedding; if so, print a line.

    transformers 5 then unties the two, whatever config.json says, and so do we. Files that cannot
    be read have no head here: whoever loads them raises the error.
    """
    try:
        files = []
        for file in weight_files(folder):
            status = file.stat()
            files.append((file, status.st_size, status.st_mtime_ns))
        return _own_head_of_files(folder, *files)
    except (UserError, OSError):
        return False


@lru_cache
def _own_head_of_files(folder: Path, *files: tuple[Path, int, int]) -> bool:
    """Do as has_own_head says, once for the same files: (path, size, time of change)."""
    stored = StoredWeights(folder)
    if HEAD not in stored.tensors or EMBEDDING not in stored.tensors:
        return False
    if are_equal(stored, HEAD, EMBEDDING):
        return False
    if os.environ.get("RANK", "0") == "0":
        print(untied(str(folder)), flush=True)
    return True


def are_equal(stored: StoredWeights, name: str, other: str) -> bool:
    """Return whether two matrices have the same numbers. Read some rows of each at a time."""
    import torch

    shape = stored.tensors[name].shape
    if shape != stored.tensors[other].shape:
        return False
    for first in range(0, shape[0], ROWS_PER_COMPARISON):
        rows = (slice(first, min(first + ROWS_PER_COMPARISON, shape[0])),)
        if not torch.equal(stored.read(name, rows).float(), stored.read(other, rows).float()):
            return False
    return True


def untied(where: str) -> str:
    """Return the line for a head that config.json ties to the embedding, and that differs."""
    return (
        f"{where}: config.json ties {HEAD} to {EMBEDDING}, but the stored ones differ: "
        "they are not tied here"
    )
