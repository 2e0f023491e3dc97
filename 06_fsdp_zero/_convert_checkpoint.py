"""What convert_checkpoint.py finds: the kind of a checkpoint, the shape of its model, and whether they fit."""

import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from common.exits import UserError
from lm import checkpoint, model, shapes
from lm.weight_files import EMBEDDING, HEAD, untied

# where training programs keep the state dict in a file: here, Lightning, many others, DeepSpeed
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "module")
# parts of names that come from torch.compile, DDP, activation checkpointing and FSDP
WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
SAFETENSORS_DTYPES = {  # of the tensors in a .safetensors file, by the names used there
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DAMAGE = (CheckpointException, SafetensorError, pickle.UnpicklingError, OSError, RuntimeError)
# what libraries raise for a damaged or a foreign file
DAMAGE += (EOFError, LookupError, TypeError, ValueError)


class Source(NamedTuple):
    """A checkpoint. `tensors` are on the meta device: names, shapes and types, and no numbers yet."""

    tensors: dict[str, Tensor]
    read: Callable[[str], Tensor]


def find(path: Path) -> tuple[str, Path]:
    """The kind of the checkpoint at `path`, and where exactly it lies. UserError if there is none, or a broken one."""
    if path.suffix == ".safetensors":
        raise UserError(f"{path} is one file of a Hugging Face folder: name the folder")
    if path.is_file():
        return "pt", path
    path = max(path.glob("step-" + 8 * "[0-9]"), default=path)
    if (path / "latest").is_file():  # DeepSpeed's own folder: the name of its newest step
        path = path / (path / "latest").read_text().strip()
    if (path / "hashes.json").is_file() and (problem := checkpoint.find_damage(path)):
        raise UserError(f"{path} is broken ({problem}): name another step")
    for kind, files in (
        ("dcp", ".metadata"),
        ("hf", "*.safetensors*"),
        ("deepspeed", "*_model_states.pt"),
    ):
        if any(path.glob(files)):
            return kind, path
    raise UserError(
        f"{path} is no checkpoint: step-N, a folder of DCP, Hugging Face or DeepSpeed, or a .pt file"
    )


def load_torch_file(path: Path) -> dict[str, Tensor]:
    """Load the weights of a file of torch.save: a state dict, or a dict that holds one.

    Raise UserError, which says what the file holds, if they are not there.
    """
    if path.suffix == ".safetensors":
        raise UserError(f"{path} is a file of a Hugging Face folder: name the folder")
    try:
        # mmap reads a tensor when it is used; files older than torch 1.6 are not zip files
        content = torch.load(path, mmap=zipfile.is_zipfile(path), weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} is damaged, or holds more than tensors and numbers: "
            "in the program that wrote it, torch.save the state dict alone"
        ) from None
    if isinstance(content, Mapping):
        for key in STATE_DICT_KEYS:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{path} holds {describe(content)}: torch.save a state dict in it")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"{path}: {name!r} is {describe(value)} and not a tensor: torch.save the state dict "
                f"alone, or under one of the keys {', '.join(STATE_DICT_KEYS)}"
            )
    return dict(content)


def describe(value: object) -> str:
    """Return the type of a value, and the first keys of a dict."""
    if not isinstance(value, Mapping):
        return f"a value of type {type(value).__name__}"
    keys = ", ".join(str(key) for key in list(value)[:4])
    return f"a dict of {len(value)} values ({keys})" if value else "an empty dict"


def without_wrappers(name: str) -> str:
    """Return the name of a weight without what DDP, FSDP, torch.compile and others add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def without_prefixes(source: Source, path: Path) -> Source:
    """Return the source with the names of the model, where it was saved as a part of something.

    torch.compile adds _orig_mod and DDP module. A module that has the model as an attribute, as in
    Lightning, adds the name of the attribute. Raise UserError if two weights get the same name.
    """
    short_names = {name: without_wrappers(name) for name in source.tensors}
    prefixes = []
    for name in short_names.values():
        if name.endswith("." + EMBEDDING):
            prefixes.append(name.removesuffix(EMBEDDING))
    prefix = prefixes[0] if len(prefixes) == 1 else ""

    saved_names = {}
    for saved_name, short_name in short_names.items():
        name = short_name.removeprefix(prefix)
        if name in saved_names:
            raise UserError(f"{path}: {saved_names[name]} and {saved_name} are both {name}")
        saved_names[name] = saved_name

    tensors = {name: source.tensors[saved_name] for name, saved_name in saved_names.items()}
    return Source(tensors, lambda name: source.read(saved_names[name]))


def find_config(named: str | None, path: Path) -> dict:
    """The content of the model's config.json: of --model, or of what lies with the weights."""
    near = [place for place in (path, path.parent) if (place / "config.json").is_file()]
    if not (named or near):
        raise UserError(
            f"{path} does not say the shape of its model: add --model, a size, config.json or folder"
        )
    place = Path(named or near[0])
    if str(place) in shapes.SIZES:
        return shapes.config_json(shapes.SIZES[str(place)])
    config = shapes.read_config_json(str(place))
    shapes.parse_config(config, f"--model {place}" if named else str(place))  # raises UserErrors
    return config


def fit(source: Source, config: dict, path: Path) -> tuple[Source, bool]:
    """Return the source without a tied head, and whether there is one.

    If the config ties a head that differs from the embedding, untie it in `config`, as read_config
    does. Raise UserError if the source does not fit the config.
    """
    with torch.device("meta"):
        net = model.Transformer(shapes.parse_config(config, f"{path}: its config"))
    needed = {name: tuple(weight.shape) for name, weight in net.named_parameters()}
    tied = net.config.tie_word_embeddings
    if (
        tied
        and HEAD in source.tensors
        and not torch.equal(source.read(HEAD), source.read(EMBEDDING))
    ):
        print(untied(str(path)), flush=True)
        config["tie_word_embeddings"] = False
        return fit(source, config, path)
    tensors = {}
    for name, tensor in source.tensors.items():
        # older files have inv_freq; here it is computed
        if not (tied and name == HEAD) and not name.endswith("rotary_emb.inv_freq"):
            tensors[name] = tensor
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, _ in sorted(found.items() ^ needed.items()):
        there = f"{found.get(name, 'missing')} in its files and {needed.get(name, 'missing')} in the model"
        raise UserError(f"{path} does not fit its config: {name} is {there}")
    return Source(tensors, source.read), tied


@contextlib.contextmanager
def readable(path: object) -> Iterator[None]:
    """UserError that names the path for whatever a damaged file makes a library raise."""
    try:
        yield
    except DAMAGE as error:
        raise UserError(f"{path} cannot be read: {cause_of(error)!r}") from None


def cause_of(error: BaseException) -> BaseException:
    """What a CheckpointException has caught, or the error itself."""
    return next(iter(getattr(error, "failures", {}).values()), (error,))[0]


def load_deepspeed(path: Path) -> dict:
    """The fp32 weights of a step of DeepSpeed. Its files hold objects of its own, so loading one runs code: open only
    what you trust."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by the import, which else looks for GPUs
    if not any(path.glob("*_optim_states.pt")):  # stage 0: the module as it is, on every rank
        return torch.load(next(path.glob("*_model_states.pt")), mmap=True, weights_only=False)[
            "module"
        ]
    # it prints its progress
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
        from deepspeed.utils.zero_to_fp32 import (
            get_fp32_state_dict_from_zero_checkpoint as zero_to_fp32,
        )

        return zero_to_fp32(str(path.parent), tag=path.name, lazy_mode=True)
