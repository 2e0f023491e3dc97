"""Reading the weights of Hugging Face folders: .safetensors files, by name."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from old.exits import UserError
from old.runtime import gathered, own_rows, say

INDEX = "model.safetensors.index.json"


def named_weights(net: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters under their own names, also where activation checkpointing wraps a block; tied weights once."""
    for name, parameter in net.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def load_weights(net: nn.Module, folder: Path, tied: bool) -> bool:
    """Replace the weights of `net` by those of the .safetensors files in `folder`; False if it has none.

    UserError if names or shapes do not fit.
    """
    files = weight_files(folder)
    if others := [file for suffix in ("*.bin", "*.pt*", "*.distcp") for file in folder.glob(suffix)]:
        raise UserError(
            f"--model {folder}: {others[0].name} is not .safetensors: save the weights as such "
            "(06_fsdp_zero/convert_checkpoint.py --to hf), or remove it"
        )
    if not files:
        return False
    say(f"weights from {len(files)} .safetensors file(s) in {folder}")
    from safetensors import SafetensorError, safe_open

    missing = dict(named_weights(net))  # tied weights once
    try:
        for file in files:
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118, it is no dict
                    if name in missing:
                        _copy(name, missing.pop(name), weights.get_slice(name))
                    elif not (name == "lm_head.weight" and tied):
                        raise RuntimeError(f"{name} is not a weight of this model")
    except SafetensorError as error:
        raise unreadable(file, error) from None
    except RuntimeError as error:
        raise UserError(f"--model {folder}: weights do not fit its config: {error}") from None
    if missing:
        raise UserError(f"--model {folder}: weights do not fit its config: {', '.join(missing)} missing")
    return True


def unreadable(file: Path, error: Exception, flag: str = "--model") -> UserError:
    told = f"{file.name} cannot be read, it is truncated or damaged ({error}): download it again"
    return UserError(f"{flag} {file.parent}: {told}")


def weight_files(folder: Path, flag: str = "--model") -> list[Path]:
    """The .safetensors files of a folder, none if it has none. UserError if one that its index names is not there."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        named = sorted({str(Path(name)) for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{flag} {folder}: {INDEX} cannot be read: {error!r}") from None
    if absent := [name for name in named if not (folder / name).is_file()]:
        raise UserError(
            f"{flag} {folder}: {INDEX} names {absent[0]}, which is not there ({len(absent)} of {len(named)} files "
            "missing): download the folder again"
        )
    return [folder / name for name in named]


def stored_weights(folder: Path, flag: str = "--model") -> dict[str, tuple[Path, list[int]]]:
    """The file and the shape of each tensor in the .safetensors files of a folder. UserError for one that cannot be
    read."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in weight_files(folder, flag):
        try:
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118, it is no dict
                    found[name] = (file, stored.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise unreadable(file, error, flag) from None
    return found


@torch.no_grad()
def _copy(name: str, parameter: nn.Parameter, stored) -> None:
    """Read one tensor, and of a sharded model the rank's rows of it alone."""
    with gathered(parameter, to_set=True):
        if [*parameter.shape] != stored.get_shape():
            raise RuntimeError(f"{name} has shape {tuple(stored.get_shape())}, not {tuple(parameter.shape)}")
        mine = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if mine.numel():  # the last ranks may hold no row
            mine.copy_(stored[own_rows(parameter)])
