"""Write Hugging Face folders: weights with their config and tokenizer, and adapters for peft."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from common import files, runtime
from common.exits import UserError, writing
from lm import shapes
from lm.tokenizer import open_tokenizer

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
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# of bytes: a byte 0 ends a document, and an answer
BYTE_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}


def write_folder(
    tensors: dict[str, Tensor],
    read: Callable[[str], Tensor],
    folder: Path,
    config: dict,
    save_tokenizer: Callable[[Path], object],
    mark: str,
) -> None:
    """Write a model as a Hugging Face folder, one file of weights at a time.

    Every rank must call this. `folder` appears when it is complete, in place of an older one with
    the same mark. Raise UserError if anything else is there, or, with the free space, if the disk
    fails.

    Args:
        tensors: The tensors by name, on the meta device: shapes and dtypes without values.
        read: Returns the tensor of a name. Every rank calls it for each name, in the same order,
            so it may gather shards. Rank 0 keeps the tensors of one file until it is written.
        folder: The folder to write.
        config: The content of config.json.
        save_tokenizer: Writes the tokenizer into the folder that it is called with.
        mark: The mark of the folder: see common/files.py.
    """
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def finish() -> None:
        files.write_json(unfinished / "config.json", config)
        save_tokenizer(unfinished)
        files.finish_folder(unfinished, folder, mark)

    with writing(f"a model of {total_bytes / 2**20:,.1f} MiB", folder):
        unfinished = runtime.on_rank0(partial(files.start_folder, folder))
        try:
            write_weights(tensors, read, unfinished)
            runtime.on_rank0(finish)
        except BaseException:
            # Of a disk that is full, for example: the files would only take room.
            if runtime.is_rank0() and unfinished.exists():
                files.delete(unfinished)
            raise


def write_weights(
    tensors: dict[str, Tensor],
    read: Callable[[str], Tensor],
    folder: Path,
    most_file_bytes: float = LARGEST_FILE,
) -> None:
    """Write the .safetensors files of a model, one at a time, and their index.

    Every rank must call this. A file has at most `most_file_bytes` of tensors, or one larger
    tensor. For `tensors` and `read` see write_folder.
    """
    names_by_file = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > most_file_bytes:
            names_by_file.append([])
            filled = 0
        names_by_file[-1].append(name)
        filled += tensor.nbytes

    weight_map = {}
    for number, names in enumerate(names_by_file, 1):
        file = f"model-{number:05d}-of-{len(names_by_file):05d}.safetensors"
        of_file = {}
        for name in names:
            weight_map[name] = file
            tensor = read(name)
            if runtime.is_rank0():
                of_file[name] = tensor.cpu().contiguous()
        runtime.on_rank0(partial(save_file, of_file, folder / file, metadata={"format": "pt"}))

    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_index = partial(files.write_json, folder / "model.safetensors.index.json", index)
    runtime.on_rank0(write_index)


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


def special_ids(origin: str, tokenizer: str) -> dict[str, int | list[int] | None]:
    """Return the ids of bos, eos and pad for the config.json of a trained model.

    They are those of the model that the training began with, as far as they are ids of the
    tokenizer that it was trained with. Without them, generation would not end.

    Args:
        origin: The model that the training began with: a folder, a config.json, or any other name.
        tokenizer: "bytes", or a Hugging Face name or folder.
    """
    stored = _stored_ids(origin)
    is_own = os.path.realpath(origin) == os.path.realpath(tokenizer)
    if is_own and stored.get("eos_token_id") is not None:
        return stored
    ids = _ids_of_tokenizer(tokenizer)
    if not is_own and not _same_end(stored, ids):
        return ids
    for key, value in stored.items():
        if value is not None:
            ids[key] = value
    return ids


def keep_generation_config(origin: str, tokenizer: str, folder: Path) -> None:
    """Copy generation_config.json of a model to a folder, if its ids are those of the tokenizer.

    It may name more eos tokens than config.json. Do nothing if the folder has one, from the folder
    of the tokenizer.
    """
    name = "generation_config.json"
    file = Path(origin, name)
    if (folder / name).exists() or not file.is_file():
        return
    if _same_end(_stored_ids(origin), _ids_of_tokenizer(tokenizer)):
        shutil.copyfile(file, folder / name)


def _same_end(stored: dict, ids: dict) -> bool:
    """Return whether the eos of a tokenizer is an eos of the model, or the tokenizer has none."""
    eos = stored.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    return ids["eos_token_id"] in (None, *ends)


def _stored_ids(origin: str) -> dict:
    """Return the ids in the config.json of a model, or {} if it has no such file."""
    path = Path(origin)
    if path.is_dir():
        path = path / "config.json"
    if origin in shapes.SIZES or not path.is_file():
        return {}
    config = shapes.read_config_json(str(path))
    return {key: config[key] for key in SPECIAL_IDS if key in config}


def _ids_of_tokenizer(name: str) -> dict[str, int | list[int] | None]:
    """Return the ids of bos, eos and pad of a tokenizer. They are None if it cannot be loaded."""
    if name == "bytes":
        return dict(BYTE_IDS)
    try:
        tokenizer = open_tokenizer(name)
    except UserError:
        return dict.fromkeys(SPECIAL_IDS)
    return {key: getattr(tokenizer, key) for key in SPECIAL_IDS}


def write_adapter(
    trained: dict[str, Tensor],
    folder: Path,
    base: str,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
) -> None:
    """Write adapters as a folder for peft: peft.PeftModel.from_pretrained(base_model, folder).

    Args:
        trained: The matrices of the adapters by name, such as ...q_proj.lora_A.
        folder: The folder to write.
        base: The name or folder of the model that was adapted.
        rank: The rank of the adapters.
        alpha: The adapters' output is scaled by alpha / rank.
        dropout: The dropout in front of the adapters, with which they were trained.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted({name.split(".")[-2] for name in trained}),
    }
    peft_names = {f"base_model.model.{name}.weight": tensor for name, tensor in trained.items()}
    with writing("the adapters", folder):
        folder.mkdir(exist_ok=True)
        save_file(peft_names, folder / "adapter_model.safetensors")
        files.write_json(folder / "adapter_config.json", config)
