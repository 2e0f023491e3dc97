"""The files of quantized_inference.py: a Hugging Face folder read matrix by matrix, a rounded one written and read.

A rounded model is a folder with a config.json that says so and a .safetensors file per layer, with plain codes and
scales: the packed form that a product reads depends on the instruction set. Loading it rounds nothing.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from old import hf, model, shapes
from old.exits import UserError

if TYPE_CHECKING:
    from _quantized_inference_load import Scheme

Parts = dict[str, Tensor]  # of a matrix: {"weight"}, {"codes", "scale"} or {"codes", "scale", "zero"}
GROUPS = (32, 64, 128, 256)  # weights that share a scale and a zero: what torch's int4 products take
BESIDE = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def quantization(name: str, flag: str = "--model") -> dict | None:
    """What the config.json of a model says about its rounding: {"weights": "int4", "group_size": 32}."""
    if name in shapes.SIZES:
        return None
    entry = shapes.config_content(name, flag).get("quantization")
    if entry is None:
        return None
    if isinstance(entry, dict) and entry.get("weights") in ("int8", "int4", "fp8"):
        group = entry.get("group_size", GROUPS[0])
        if type(group) is int and group in GROUPS:
            return entry
    raise UserError(f"{flag} {name}: its config has a quantization that this script did not write: {entry!r}")


def reader(
    name: str, config: shapes.Config, scheme: "Scheme", *, seed: int, device: torch.device, flag: str = "--model"
) -> Callable[[str], Parts]:
    """A function that gives a matrix by the name of its parameter. UserError if the folder that `flag` names has not
    all of them."""
    with torch.device("meta"):
        wanted = {key: parameter.shape for key, parameter in model.Transformer(config).named_parameters()}

    def source(parameter: str) -> str:
        return parameter if parameter in wanted else "model.embed_tokens.weight"  # a tied head

    if not Path(name).is_dir():
        return lambda parameter: {"weight": drawn(source(parameter), wanted[source(parameter)], seed, device)}
    stored = hf.stored_weights(Path(name), flag)
    if not stored:
        raise UserError(f"{flag} {name}: no .safetensors files in it; its config.json alone gives random weights")
    if quantization(name, flag) is None:
        check_shapes(name, stored, wanted, flag)
        return lambda parameter: {"weight": tensor_of(stored, source(parameter))}

    rounded_shapes = {}
    for parameter, shape in {**wanted, "lm_head.weight": wanted[source("lm_head.weight")]}.items():
        if len(shape) == 1 or parameter == "model.embed_tokens.weight":
            rounded_shapes[parameter] = shape
        else:
            parts = scheme.layer.quantize(torch.empty(shape, device="meta"), scheme.group)
            rounded_shapes |= {parameter.removesuffix("weight") + part: parts[part].shape for part in parts}
    check_shapes(name, stored, rounded_shapes, flag)

    def read(parameter: str) -> Parts:
        prefix = parameter.removesuffix("weight")
        names = {part: prefix + part for part in ("weight", "codes", "scale", "zero")}
        return {part: tensor_of(stored, key) for part, key in names.items() if key in rounded_shapes}

    return read


def drawn(parameter: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """A random weight: on a CPU model.build's. A GPU draws its own, because 70 billion numbers take a CPU long."""
    if device.type == "cpu" or len(shape) < 2:
        return model.random_weight(parameter, shape, seed)
    generator = model.weight_generator(parameter, seed, device)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)


def check_shapes(
    name: str, stored: dict[str, tuple[Path, list[int]]], wanted: dict[str, torch.Size], flag: str
) -> None:
    if missing := [key for key in wanted if key not in stored]:
        raise UserError(f"{flag} {name}: none of its .safetensors files has {missing[0]} ({len(missing)} are missing)")
    for key, shape in wanted.items():
        if stored[key][1] != [*shape]:
            raise UserError(f"{flag} {name}: {key} has shape {stored[key][1]}, its config wants {[*shape]}")


def tensor_of(stored: dict[str, tuple[Path, list[int]]], key: str) -> Tensor:
    with safe_open(stored[key][0], "pt") as content:
        return content.get_tensor(key)


def unfinished_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + ".tmp")


def is_left_over(folder: Path) -> bool:
    """Whether nothing is lost with this folder: a Writer began it, or it is empty."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        return "weights" in json.loads((folder / "config.json").read_text())["quantization"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Writer:
    """Writes a rounded model layer by layer, to a folder that has its name only when it is whole."""

    def __init__(self, folder: Path | None, name: str, scheme: "Scheme") -> None:
        self.folder = folder
        self.parts: Parts = {}
        if folder is None:
            return
        self.unfinished = unfinished_folder(folder)
        if is_left_over(self.unfinished):
            shutil.rmtree(self.unfinished)
        self.unfinished.mkdir(parents=True)
        entry = {"weights": scheme.weights, "group_size": scheme.group}
        content = {**shapes.config_content(name), "quantization": entry}
        (self.unfinished / "config.json").write_text(json.dumps(content, indent=1) + "\n")
        for pattern in BESIDE if Path(name).is_dir() else ():
            for file in Path(name).glob(pattern):
                shutil.copy(file, self.unfinished)

    def add(self, parameter: str, parts: Parts) -> None:
        if self.folder is not None:
            prefix = parameter.removesuffix("weight")
            self.parts |= {prefix + part: tensor.cpu().contiguous() for part, tensor in parts.items()}

    def write(self, layer: str) -> None:
        if self.parts:
            save_file(self.parts, self.unfinished / f"{layer}.safetensors", metadata={"format": "pt"})
            self.parts = {}

    def finish(self) -> None:
        if self.folder is not None:
            self.unfinished.rename(self.folder)
