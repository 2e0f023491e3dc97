"""The file of torch.save, for convert_checkpoint.py: read through a map, written with its numbers to follow."""

import os
import pickle
from pathlib import Path

import torch
from _convert_checkpoint_files import EMBEDDING, HEAD, Read, Source, as_bytes, readable
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import MAGIC_NUMBER, skip_data

from old.exits import UserError

OLD_FORMAT = pickle.dumps(MAGIC_NUMBER, protocol=2)  # how torch.save's files began before they were zip archives


def read_pt(file: Path, key: str = "model") -> Source:
    """{"model": state dict, "config": content of config.json}, or a bare state dict."""

    def load() -> dict:
        with readable(file):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)  # maps: nothing is read yet

    check_not_old(file)
    content = load()
    check_plain(file, content, key)
    with readable(file):
        tensors = {name: tensor.to("meta") for name, tensor in content.get(key, content).items()}
        config = content.get("config")
    del content

    def read(name: str) -> Tensor:
        content = load()  # anew each time: what a map has read stays in memory as long as the map
        return content.get(key, content)[name]

    return Source(tensors, read, config)


def check_not_old(file: Path) -> None:
    """UserError if torch.save wrote it in the format of before torch 1.6, whose tensors cannot be found by a map."""
    with readable(file), open(file, "rb") as stream:
        begin = stream.read(len(OLD_FORMAT))
    if begin == OLD_FORMAT:
        raise UserError(
            f"{file} is in torch.save's old format, which is no zip archive: save it again with "
            f"torch.save(torch.load({str(file)!r}, weights_only=True), 'NEW.pt') and name NEW.pt as FROM"
        )


def check_plain(file: Path, content: object, key: str) -> None:
    """UserError if the weights lie deeper than content[key] or content: it tells where, and nothing is guessed."""
    loaded = f"torch.load({str(file)!r}, weights_only=True)"
    where = ""
    if isinstance(content, dict) and key in content:
        where, content = f"[{key!r}]", content[key]
    if is_state_dict(content):
        return
    entries = content if isinstance(content, dict) else {}
    holders = [f"{where}[{name!r}]" for name, value in entries.items() if value and is_state_dict(value)]
    if len(holders) == 1:
        raise UserError(
            f"{file}: its weights are at {holders[0]}: save them plainly with "
            f"torch.save({loaded}{holders[0]}, 'NEW.pt') and name NEW.pt as FROM"
        )
    found = f"{len(holders)} dictionaries of tensors ({', '.join(holders)})" if holders else "no dictionary of tensors"
    raise UserError(
        f"{file} holds {found}: save the weights plainly with torch.save(STATE_DICT, 'NEW.pt') and name NEW.pt as FROM"
    )


def is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    )


def write_pt(file: Path, tensors: dict[str, Tensor], read: Read, tied: bool, config: dict) -> None:
    """What net.load_state_dict(torch.load(file)["model"]) takes."""
    write_torch_file(file, "model", tensors, read, tied, more={"config": config})


def write_torch_file(file: Path, key: str, tensors: dict[str, Tensor], read: Read, tied: bool, more: dict) -> None:
    """What torch.save({key: state dict, **more}, file) would write, without ever having the state dict."""
    with FakeTensorMode():
        state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        if tied:
            state[HEAD] = state[EMBEDDING]  # one storage under two names
        with skip_data(materialize_fake_tensors=True):  # leaves room for the numbers, and a checksum that is not theirs
            torch.save({key: state, **more}, file)
        places = torch.load(file, weights_only=False)[key]  # in this mode: where in the file each storage lies
    with open(file, "r+b") as stream:
        for name in tensors:
            stream.seek(places[name].untyped_storage()._checkpoint_offset)
            stream.write(as_bytes(read(name)))
        os.fsync(stream.fileno())
