"""The source text of the Python standard library: the text of lessons, and of --data stdlib.

Only one_batch imports torch: the processes of prepare_data.py do without.
"""

import hashlib
import math
import os
import sysconfig
from pathlib import Path

import numpy as np

from common.exits import UserError

HELD_OUT = 0.05  # share of any text that is held out for evaluation
# Folders of the standard library that are no part of the text.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def source_files() -> list[Path]:
    """Return the .py files of the Python standard library, sorted, without hidden ones."""
    files = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        # os.walk does not enter folders that are removed from its list.
        folders[:] = [name for name in folders if name[0] != "." and name not in LEFT_OUT]
        files += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(path for path in files if path.suffix == ".py")


def split(texts: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split texts into training and held-out texts: the 5 % with the lowest hashes.

    All copies of a text are on the same side.
    """
    unique = sorted(set(texts), key=sha256)
    held_out_count = math.ceil(len(unique) * HELD_OUT)
    held_out_texts = set(unique[:held_out_count])
    train = [text for text in texts if text not in held_out_texts]
    held_out = [text for text in texts if text in held_out_texts]
    return train, held_out


def sha256(text: bytes) -> bytes:
    """Return the hash that orders texts, so that a split does not depend on their order."""
    return hashlib.sha256(text).digest()


def one_batch(batch_size: int, seq_len: int, device) -> tuple:
    """Return the first sequences of the training text as one batch, for lessons.

    The tokens are bytes, and a 0 ends each file. The batch is (inputs, targets), tensors of int64
    [batch_size, seq_len] on `device`. The target at each position is the token that follows the
    input there.

    Raises:
        UserError: The text has fewer sequences.
    """
    import torch

    train, _ = split([file.read_bytes() for file in source_files()])
    text = np.frombuffer(b"\0".join([*train, b""]), np.uint8)
    count = batch_size * seq_len
    if count + 1 > len(text):
        raise UserError(
            f"{batch_size} sequences of {seq_len} tokens, the text has "
            f"{(len(text) - 1) // seq_len}: lower the steps or batch"
        )
    tokens = torch.from_numpy(text[: count + 1].astype(np.int64))
    inputs = tokens[:-1].view(batch_size, seq_len)
    targets = tokens[1:].view(batch_size, seq_len)
    # Copies: a lesson may write into one of them.
    return inputs.to(device, copy=True), targets.to(device, copy=True)
