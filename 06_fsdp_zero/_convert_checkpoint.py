"""Find what convert_checkpoint.py needs of a checkpoint: its kind, its shape and its tokenizer."""

import contextlib
import io
import logging
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.tensor  # torch.load needs it for DTensors
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from common import cli
from common.exits import UserError
from lm import encoder, model, runs, shapes, token_folder
from lm.expert_files import from_files
from lm.hf_folder import copy_tokenizer, keep_generation_config, special_ids
from lm.tokenizer import has_tokenizer, open_tokenizer, tokenizer_in_errors
from lm.weight_files import EMBEDDING, HEAD, untied
from training import run_folder

# of dcp.save and dcp.load in one process
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

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
# Names of weights begin so. Names of optimizer state and of counters do not.
TOP_LEVEL = ("model.", "lm_head.")
GATHER = (
    "gather first, in the program that wrote it, for example with torch.distributed.checkpoint."
    "state_dict.get_model_state_dict and StateDictOptions(full_state_dict=True)"
)
BYTES = 256  # tokens of the byte tokenizer
DAMAGE = (CheckpointException, SafetensorError, pickle.UnpicklingError, OSError, RuntimeError)
# what libraries raise for a damaged or a foreign file
DAMAGE += (EOFError, LookupError, TypeError, ValueError)


class Source(NamedTuple):
    """A checkpoint. `tensors` are on the meta device: names, shapes and types without numbers."""

    tensors: dict[str, Tensor]
    read: Callable[[str], Tensor]


def find(path: Path) -> tuple[str, Path]:
    """Return the kind of the checkpoint at `path`, and where exactly it is.

    Raise UserError if there is no checkpoint, or if it is broken.
    """
    if path.suffix == ".safetensors":
        raise UserError(f"{path} is one file of a Hugging Face folder: name the folder")
    if path.is_file():
        return "pt", path
    path = max(path.glob("step-" + 8 * "[0-9]"), default=path)
    if (path / "latest").is_file():  # DeepSpeed's own folder: the name of its newest step
        path = path / (path / "latest").read_text(encoding="utf-8").strip()
    if (path / "hashes.json").is_file():
        check_hashes(path)
    for kind, files in (
        ("dcp", ".metadata"),
        ("hf", "*.safetensors*"),
        ("deepspeed", "*_model_states.pt"),
    ):
        if any(path.glob(files)):
            return kind, path
    raise UserError(
        f"{path} is no checkpoint: name step-N, a folder of DCP, Hugging Face or DeepSpeed, "
        "or a .pt file"
    )


def check_hashes(path: Path) -> None:
    """Raise UserError, which names an intact checkpoint of the run, if this one is broken."""
    problem = run_folder.find_damage(path)
    if problem is None:
        return
    intact = runs.newest_intact(run_folder.list_checkpoints(path.parent))
    fix = f"use {intact}" if intact else "the run has no other that is intact"
    raise UserError(f"{path} is broken ({problem}): {fix}")


def load_torch_file(path: Path) -> dict[str, Tensor]:
    """Load the weights of a file of torch.save: a state dict, or a dict that holds one.

    Raise UserError, which says what the file holds, if they are not there.
    """
    if path.suffix == ".safetensors":
        raise UserError(f"{path} is a file of a Hugging Face folder: name the folder")
    # Its warning is about torch.compile with the mesh of a DTensor.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    is_zip = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # deprecated types, which are refused below
            # mmap reads a tensor when it is used; files older than torch 1.6 are not zip files
            content = torch.load(path, mmap=is_zip, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path} {why_not_loaded(path)}") from None
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise
        raise UserError(
            f"{path} is a TorchScript archive: torch.save the state dict alone"
        ) from None
    if isinstance(content, Mapping):
        for key in STATE_DICT_KEYS:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{path} holds {describe(content)}: torch.save a state dict in it")
    weights = {}
    for name, value in content.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            raise UserError(
                f"{path}: {name!r} is {describe(value)} and not a tensor: torch.save the "
                f"state dict alone, or under one of the keys {', '.join(STATE_DICT_KEYS)}"
            )
        weights[name] = full_tensor(name, value, path)
    return weights


def why_not_loaded(path: Path) -> str:
    """Return why torch.load does not load a file with weights_only=True, and what to do."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except DAMAGE:  # a file of an older torch, or a damaged one
        names = []
    if any(name.endswith("ShardedTensor") for name in names):
        return f"holds shards of ShardedTensors: {GATHER}"
    if names:
        more = ", ..." if len(names) > 3 else ""
        return (
            f"holds objects of {', '.join(sorted(names)[:3])}{more}: in the program that wrote it, "
            "torch.save the state dict alone, model.state_dict()"
        )
    return (
        "is damaged, or holds more than tensors and numbers: "
        "in the program that wrote it, torch.save the state dict alone"
    )


def full_tensor(name: str, value: Tensor, path: Path) -> Tensor:
    """Return a tensor of a file as an ordinary tensor. Raise UserError if the file lacks numbers.

    A DTensor in a file of torch.save has the shard of the rank that saved it, and no others.
    """
    if hasattr(value, "placements"):
        ranks = value.device_mesh.size()
        replicated = all(placement.is_replicate() for placement in value.placements)
        if ranks > 1 and not replicated:
            raise UserError(f"{path} holds shards of DTensors, from one of {ranks} ranks: {GATHER}")
        value = value.to_local()
    problem = None
    if value.is_meta:
        problem = "on the meta device, which has no numbers: torch.save the loaded model"
    elif value.is_quantized:
        problem = f"quantized, {value.dtype}: torch.save the weights before quantization"
    elif value.layout != torch.strided:
        problem = f"sparse, {value.layout}: torch.save its to_dense()"
    if problem is not None:
        raise UserError(f"{path}: {name} is {problem}")
    return value


def describe(value: object) -> str:
    """Return the type of a value, and the first keys of a dict."""
    if not isinstance(value, Mapping):
        return f"a value of type {type(value).__name__}"
    keys = ", ".join(str(key) for key in list(value)[:4])
    return f"a dict of {len(value)} values ({keys})" if value else "an empty dict"


def without_wrappers(name: str) -> str:
    """Return the name of a weight without what DDP, FSDP, torch.compile and others add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def without_prefixes(source: Source, path: Path, *, has_optimizer: bool = False) -> Source:
    """Return the source with the names of the model, where it was saved as a part of something.

    torch.compile adds _orig_mod and DDP module. A module that has the model as an attribute, as in
    Lightning, adds the name of the attribute, and DCP the keys of the dicts around the state dict.
    Only the tensors with the model's prefix are taken. `has_optimizer` says that the others are
    mostly optimizer state.

    Raise UserError if there is no model, or several, or if two weights get the same name.
    """
    short_names = {name: without_wrappers(name) for name in source.tensors}
    prefixes = set()
    for name in short_names.values():
        if f".{name}".endswith(f".{EMBEDDING}"):
            prefixes.add(name.removesuffix(EMBEDDING))
    if not prefixes:
        raise UserError(
            f"{path} has no {EMBEDDING}, under any prefix, but {describe(source.tensors)}"
        )
    if len(prefixes) > 1:
        listed = ", ".join(repr(prefix) for prefix in sorted(prefixes))
        raise UserError(
            f"{path} has {len(prefixes)} models, whose weights have the prefixes {listed}: "
            "save one of them alone"
        )
    prefix = prefixes.pop()

    starts = (prefix,)
    if has_optimizer:
        starts = tuple(prefix + part for part in TOP_LEVEL)
    saved_names = {}
    left_out = []
    for saved_name, short_name in short_names.items():
        if not short_name.startswith(starts):
            left_out.append(saved_name)
            continue
        name = short_name.removeprefix(prefix)
        if name in saved_names:
            raise UserError(f"{path}: {saved_names[name]} and {saved_name} are both {name}")
        saved_names[name] = saved_name
    if left_out and not has_optimizer:
        print(f"{path}: not under {prefix}, and left out: {describe(dict.fromkeys(left_out))}")

    tensors = {name: source.tensors[saved_name] for name, saved_name in saved_names.items()}
    return Source(tensors, lambda name: source.read(saved_names[name]))


def find_config(named: str | None, path: Path) -> dict:
    """Return the content of the model's config.json, from --model or from beside the weights.

    Raise UserError if there is none, or if lm/model.py does not implement the model.
    """
    near = [place for place in (path, path.parent) if (place / "config.json").is_file()]
    if not (named or near):
        raise UserError(
            f"{path} does not say the shape of its model: "
            "add --model, a size, config.json or folder"
        )
    place = Path(named or near[0])
    if str(place) in shapes.SIZES:
        return shapes.config_json(shapes.SIZES[str(place)])
    config = shapes.read_config_json(str(place))
    shapes.parse_config(config, f"--model {place}" if named else str(place))  # raises UserErrors
    return config


def find_tokenizer(given: str | None, named: str | None, path: Path, config: dict) -> str | None:
    """Return the tokenizer of a checkpoint: "bytes", a Hugging Face name or folder, or None.

    It comes from --tokenizer (`given`), --model (`named`), the folder `path`, or the run that wrote
    `path`. None: there is no tokenizer, or none is known.

    Raise UserError if the tokenizer of a run cannot be found or read, or does not fit the model.
    """
    if given is None:
        for place in (named, path):
            if place and has_tokenizer(place):
                return str(place)
        if not run_folder.read_settings(path.parent):
            return None
    name = given or tokenizer_of_run(path.parent)
    if name is None and config["vocab_size"] == BYTES:
        name = "bytes"
    if name is None:
        raise UserError(
            f"{path}: the --model or --data of its run is not here, and the tokenizer was theirs: "
            "add --tokenizer, bytes or a Hugging Face name or folder"
        )
    try:
        _, about = encoder.load_tokenizer(name)
    except UserError as error:
        if given:
            raise
        raise UserError(
            f"{path}: its run used {error}; add --tokenizer, with the folder of that tokenizer"
        ) from None
    if about["vocab_size"] > config["vocab_size"]:
        raise UserError(
            f"{tokenizer_in_errors(name)} has {about['vocab_size']} tokens, and the model "
            f"in {path} has {config['vocab_size']}: add --tokenizer, with the one of its training"
        )
    return name


def tokenizer_of_run(folder: Path) -> str | None:
    """Return the tokenizer of a run: "bytes", or a Hugging Face name or folder.

    Return None if the run took it from a model or from tokens that are not here.
    """
    settings = run_folder.read_settings(folder)
    if settings.get("--tokenizer"):
        return settings["--tokenizer"]

    model_name = without_hash(settings["--model"])
    if has_tokenizer(model_name):
        return model_name
    if model_name not in shapes.SIZES and not Path(model_name).exists():
        return None

    data = without_hash(settings["--data"]).partition(" with --eval-data ")[0]
    data = cli.split_mixture("--data", data)[0][0]  # all parts have the same tokenizer
    if data == "stdlib" or data.startswith("hf:"):
        return "bytes"
    if not Path(data).exists():
        return None
    tokens = Path(data, "corpus.json")  # a folder that 05_ddp/prepare_data.py made
    if not tokens.exists():
        return "bytes"
    about, _, _ = token_folder.read(Path(data), f"--data {data}", "add --tokenizer")
    return about["tokenizer"]


def set_special_ids(config: dict, named: str | None, path: Path, tokenizer: str | None) -> None:
    """Set the ids of bos, eos and pad in a config.json to those that the model was trained with.

    The config.json in a checkpoint of a run does not have them.
    """
    if tokenizer is not None:
        config.update(special_ids(origin_of(named, path), tokenizer))


def origin_of(named: str | None, path: Path) -> str:
    """Return the model that has the ids of a checkpoint: --model, its run's model, or itself."""
    if named:
        return named
    settings = run_folder.read_settings(path.parent)
    if settings and run_folder.is_checkpoint(path):
        return without_hash(settings["--model"])
    return str(path)


def without_hash(setting: str) -> str:
    """Return the value of a run's setting without the hash that training.flags.with_hash adds."""
    return re.sub(r" \(SHA-256 \w+\)$", "", setting)


def save_tokenizer(name: str | None, folder: Path, origin: str) -> None:
    """Write the tokenizer's files into a Hugging Face folder. Bytes need none.

    `origin` is the model whose generation_config.json is kept.
    """
    if name is None:
        return
    if Path(name).is_dir():
        copy_tokenizer(Path(name), folder)
    elif name != "bytes":
        open_tokenizer(name).save_pretrained(folder)
    keep_generation_config(origin, name, folder)


def fit(source: Source, config: dict, path: Path) -> tuple[Source, bool]:
    """Return the source without a tied head, and whether there is one.

    If the config ties a head that differs from the embedding, untie it in `config`, as read_config
    does. Raise UserError if the source does not fit the config.
    """
    with torch.device("meta"):
        net = model.Transformer(shapes.parse_config(config, f"{path}: its config"))
    needed = {name: tuple(weight.shape) for name, weight in net.named_parameters()}
    if net.config.experts:
        if any(name.endswith(".mlp.bias") for name in source.tensors):
            raise UserError(
                f"{path} was trained with --balance-bias: folders of this family have no place for "
                "the router's bias, and without it the model is another one"
            )
        source = Source(*from_files(*source, needed))
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
        if name in needed and not is_stored_weight(tensor.dtype):
            raise UserError(
                f"{path}: {name} is {tensor.dtype}, and no weight of a model: "
                "save the weights before quantization, in bf16 or fp32"
            )
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, _ in sorted(found.items() ^ needed.items()):
        stored_shape = found.get(name, "missing")
        needed_shape = needed.get(name, "missing")
        raise UserError(
            f"{path} does not fit its config: {name} is {stored_shape} in its files "
            f"and {needed_shape} in the model"
        )
    return Source(tensors, source.read), tied


def is_stored_weight(dtype: torch.dtype) -> bool:
    """Return whether a weight may have this type: a floating-point type of .safetensors files."""
    return dtype.is_floating_point and dtype in SAFETENSORS_DTYPES.values()


@contextlib.contextmanager
def readable(path: object) -> Iterator[None]:
    """Raise UserError, which names the path, for what libraries raise for a damaged file."""
    try:
        yield
    except DAMAGE as error:
        raise UserError(f"{path} cannot be read: {cause_of(error)!r}") from None


def cause_of(error: BaseException) -> BaseException:
    """Return what a CheckpointException has caught, or the error itself."""
    return next(iter(getattr(error, "failures", {}).values()), (error,))[0]


def load_deepspeed(path: Path) -> dict:
    """Return the fp32 weights of a checkpoint of DeepSpeed.

    Its files hold objects of DeepSpeed, so loading one runs code: open only what you trust.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by the import, which else looks for GPUs
    if not any(path.glob("*_optim_states.pt")):  # stage 0: the module as it is, on every rank
        file = next(path.glob("*_model_states.pt"))
        return torch.load(file, mmap=True, map_location="cpu", weights_only=False)["module"]
    # it prints its progress
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
        from deepspeed.utils.zero_to_fp32 import (
            get_fp32_state_dict_from_zero_checkpoint as zero_to_fp32,
        )

        return zero_to_fp32(str(path.parent), tag=path.name, lazy_mode=True)
