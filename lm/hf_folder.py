"""Write Hugging Face folders: weights with their config and tokenizer, and adapters for peft."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from common import files, runtime
from common.exits import UserError

LARGEST_FILE = 2e9  # bytes of tensors in a .safetensors file, all of which rank 0 holds at once
# The files of a folder that are copied beside other weights: tokenizer, chat templates, generation.
# Nothing else is: adapter_config.json, for example, would make transformers open another model.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
TEMPLATES = "additional_chat_templates"  # a folder, for templates with a name of their own


def write_folder(
    tensors: dict[str, Tensor],
    read: Callable[[str], Tensor],
    folder: Path,
    config: dict,
    origin: Path,
    mark: str,
) -> None:
    """Write a model as a Hugging Face folder, one file of weights at a time.

    Every rank must call this. `folder` appears when it is complete, in place of an older one with
    the same mark. Raise UserError if anything else is there, or if the disk is full.

    Args:
        tensors: The tensors by name, on the meta device: shapes and dtypes without values.
        read: Returns the tensor of a name. Every rank calls it for each name, in the same order,
            so it may gather shards. Rank 0 keeps the tensors of one file until it is written.
        folder: The folder to write.
        config: The content of config.json.
        origin: The folder whose tokenizer is copied.
        mark: The mark of the folder: see common/files.py.
    """
    names_by_file = _assign_to_files(tensors)
    weight_map = {}
    for file, names in names_by_file.items():
        for name in names:
            weight_map[name] = file
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def finish() -> None:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(unfinished / "config.json", config)
        _write_json(unfinished / "model.safetensors.index.json", index)
        copy_tokenizer(origin, unfinished)
        files.finish_folder(unfinished, folder, mark)

    unfinished = runtime.on_rank0(partial(files.start_folder, folder))
    for file, names in names_by_file.items():
        tensors_of_file = {}
        for name in names:
            tensor = read(name)
            if runtime.is_rank0():
                tensors_of_file[name] = tensor.cpu().contiguous()
        save = partial(save_file, tensors_of_file, unfinished / file, metadata={"format": "pt"})
        runtime.on_rank0(save)
    runtime.on_rank0(finish)


def _assign_to_files(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the tensors in each file. A new file starts every LARGEST_FILE bytes."""
    names_by_number: dict[int, list[str]] = {}
    bytes_before = 0
    for name, tensor in tensors.items():
        number = 1 + int(bytes_before // LARGEST_FILE)
        names_by_number.setdefault(number, []).append(name)
        bytes_before += tensor.nbytes
    last = max(names_by_number)
    names_by_file = {}
    for number, names in names_by_number.items():
        names_by_file[f"model-{number:05d}-of-{last:05d}.safetensors"] = names
    return names_by_file


def _write_json(file: Path, content: dict) -> None:
    """Write a JSON object to a file."""
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def tokenizer_files(origin: Path) -> list[Path]:
    """Return the files that copy_tokenizer copies. Raise UserError if one cannot be read.

    A script calls this before it trains.
    """
    paths = [origin / name for name in TOKENIZER_FILES]
    paths += sorted((origin / TEMPLATES).glob("*.jinja"))
    found = []
    for path in paths:
        if os.path.lexists(path):  # a link may lead nowhere
            try:
                with open(path, "rb"):
                    found.append(path)
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return found


def copy_tokenizer(origin: Path, folder: Path) -> None:
    """Copy the tokenizer and the chat templates of a Hugging Face folder.

    Do nothing if `origin` is not a folder: the model then has no files.
    """
    for file in tokenizer_files(origin):
        copy = folder / file.relative_to(origin)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def write_adapter(
    trained: dict[str, Tensor], folder: Path, base: str, rank: int, alpha: float
) -> None:
    """Write adapters as a folder for peft: peft.PeftModel.from_pretrained(base_model, folder).

    Args:
        trained: The matrices of the adapters by name, such as ...q_proj.lora_A.
        folder: The folder to write.
        base: The name or folder of the model that was adapted.
        rank: The rank of the adapters.
        alpha: The adapters' output is scaled by alpha / rank.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-2] for name in trained}),
    }
    folder.mkdir(exist_ok=True)
    peft_names = {f"base_model.model.{name}.weight": tensor for name, tensor in trained.items()}
    save_file(peft_names, folder / "adapter_model.safetensors")
    _write_json(folder / "adapter_config.json", config)
