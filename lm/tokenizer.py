"""Open tokenizers, and find the token ids that end an answer.

This file does not import torch: the worker processes of 05_ddp/prepare_data.py import it.
"""

import json
import os
from pathlib import Path

from common.exits import UserError
from lm import shapes

# Files from which transformers may make a tokenizer. A model without any of them reads bytes.
PATTERNS = (
    "tokenizer*",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "*.model",
)


def open_tokenizer(name: str | Path, flag: str | None = None, download: bool = True):
    """Open a tokenizer by transformers.

    Args:
        name: A folder, or a name on the Hugging Face Hub.
        flag: The flag that named it. By default, errors name --tokenizer, but no flag for a folder,
            which may be the folder of --model.
        download: Whether transformers may download a tokenizer that it does not have.

    Raises:
        UserError: The tokenizer cannot be read, or has no tokens for text.
    """
    name = str(name)
    _check_folder_exists(name, flag)
    where = tokenizer_in_errors(name, flag)
    fix = "name a folder with a tokenizer.json, or a tokenizer of the Hugging Face Hub"
    if Path(name).is_dir():
        fix = "copy tokenizer.json and tokenizer_config.json into the folder again"
        files = _tokenizer_files(name)
        if not any(file.startswith("tokenizer") for file in files):
            found = " and ".join(files) or "its files"
            fix = f"convert {found} to tokenizer.json, or copy that file into the folder"

    from transformers import AutoTokenizer  # a slow import, which bytes do not need

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not download)
    except Exception as error:  # transformers raises many types, and tokenizers Exception itself
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{where} cannot be read ({reason}): {fix}") from None
    # some classes come without any file, and then have special tokens alone
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"{where} has no tokens for text: {fix}")
    return tokenizer


def tokenizer_in_errors(name: str, flag: str | None = None) -> str:
    """Return how an error calls a tokenizer: see open_tokenizer for `flag`."""
    if Path(name).is_dir():
        return f"the tokenizer in {flag} {name}" if flag else f"the tokenizer in {name}"
    return f"{flag or '--tokenizer'} {name}"


def _check_folder_exists(name: str, flag: str | None) -> None:
    """Raise UserError if `name` can only be a folder, and there is none.

    transformers would look for it on the Hub, and try again for 45 seconds without a network. A
    name on the Hub has at most two parts, such as "gpt2" and "openai-community/gpt2".
    """
    path = Path(name)
    is_only_a_path = (
        path.is_absolute()
        or name.startswith((".", "~"))
        or len(path.parts) > 2
        or path.parts[0] == "models"  # the folder of this repository
    )
    if is_only_a_path and not path.exists():
        hint = ". `make model` makes it" if name.rstrip("/") == "models/smollm2-135m" else ""
        raise UserError(f"{flag or '--tokenizer'} {name}: no such folder{hint}")


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether a folder has files of a tokenizer. If not, its model reads bytes."""
    return bool(_tokenizer_files(folder))


def _tokenizer_files(folder: str | Path) -> list[str]:
    """Return the names of the files of a tokenizer in a folder."""
    if folder in shapes.SIZES:
        return []
    names = set()
    for pattern in PATTERNS:
        names.update(file.name for file in Path(folder).glob(pattern))
    return sorted(names)


def largest_id(vocabulary: dict[str, int]) -> int:
    """Return the largest token id. Ids can have gaps, so it can be more than the number of tokens.

    Tokenizers get gaps when tokens are removed, or are added behind reserved ids.
    """
    return max(vocabulary.values(), default=0)


def generation_settings(model: str, flag: str = "--model") -> tuple[str, dict]:
    """Return the settings that transformers' generate reads from a folder, with their file's name.

    They are in generation_config.json. If there is no such file, config.json counts instead. A
    model or tokenizer without a folder has no settings. Raise UserError, with the name of `flag`,
    if a file cannot be read.
    """
    path = Path(model, "generation_config.json")
    if model in shapes.SIZES:
        return "config.json", {}
    if not os.path.lexists(path):  # a link to a missing file cannot be read, which is an error
        has_config = Path(model).is_file() or Path(model, "config.json").is_file()
        return "config.json", shapes.read_config_json(model, flag) if has_config else {}
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise TypeError("it is no JSON object")
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise UserError(
            f"{flag} {model}: {path.name} cannot be read ({error}): download it again, or delete it"
        ) from None
    return path.name, content


def stop_ids(model: str, tokenizer=None, flag: str = "--model") -> frozenset[int]:
    """Return the token ids that end an answer.

    As in transformers' generate, they are the eos_token_id of generation_config.json. If there is
    no such file, those of config.json count. If the folder names none, the end of the tokenizer
    does.

    Raise UserError, with the name of `flag`, if an eos_token_id is no id, list of ids or null.
    """
    file, settings = generation_settings(model, flag)
    value = settings.get("eos_token_id")
    if value is None:
        value = [] if tokenizer is None else tokenizer.eos_token_id
    if value is None:
        value = []
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise UserError(
            f"{flag} {model}: {file} has eos_token_id {value!r}: "
            "write a token id or a list of token ids"
        )
    return frozenset(ids)
