"""The file of torch.save, for convert_checkpoint.py: read through a map, written with its numbers to follow."""

import os
from pathlib import Path

import torch
from _convert_checkpoint_files import EMBEDDING, HEAD, Read, Source, as_bytes, readable
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data


def read_pt(file: Path, key: str = "model") -> Source:
    """{"model": state dict, "config": content of config.json}, or a bare state dict."""

    def load() -> dict:
        with readable(file):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)  # maps: nothing is read yet

    content = load()
    with readable(file):
        tensors = {name: tensor.to("meta") for name, tensor in content.get(key, content).items()}
        config = content.get("config")
    del content

    def read(name: str) -> Tensor:
        content = load()  # anew each time: what a map has read stays in memory as long as the map
        return content.get(key, content)[name]

    return Source(tensors, read, config)


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
