"""Turn documents into token ids.

This file does not import torch: see lm/token_folder.py.
"""

import hashlib
import json
from collections.abc import Callable

import numpy as np

from common.exits import UserError
from lm.documents import as_user_error
from lm.tokenizer import largest_id, open_tokenizer, tokenizer_in_errors

# Characters to tokenize at once. Tokenizing takes 110 to 170 bytes of memory per byte of text.
PIECE = 2**18
OVERLAP = 2**12  # characters that a piece shares with the next one
AGREEING = 16  # tokens around the place where two pieces are joined, the same in both


def load_tokenizer(name: str, end_token: str | None = None) -> tuple[str, dict]:
    """Load a tokenizer: "bytes", or a Hugging Face name or folder.

    Args:
        name: The tokenizer.
        end_token: The token to write after each document. Default: the tokenizer's eos token, which
            some tokenizers do not have. In "bytes" it is the byte 0, which occurs in no text.

    Returns:
        The definition, from which encoder() makes the tokenizer: "bytes", or the content of its
        tokenizer.json. And a dict that describes the tokens, to be saved in corpus.json: tokenizer,
        vocabulary_sha256, vocab_size, dtype, end_token, end_id. The last two are None if documents
        have no end token.

    Raises:
        UserError: The tokenizer cannot be loaded, or has no such end token.
    """
    if name == "bytes":
        definition = "bytes"
        vocab_size = 256
        vocabulary = {"\0": 0}
        eos_token = "\0"
    else:
        tokenizer = open_tokenizer(name)
        with as_user_error(tokenizer_in_errors(name)):
            definition = tokenizer.backend_tokenizer.to_str()
        vocabulary = tokenizer.get_vocab()
        vocab_size = largest_id(vocabulary) + 1
        eos_token = tokenizer.eos_token

    if end_token and end_token not in vocabulary:
        raise UserError(f"--end-token {end_token} is no token of --tokenizer {name}")
    end_token = end_token or eos_token

    vocabulary_text = json.dumps(sorted(vocabulary.items()))
    about = {
        "tokenizer": name,
        "vocabulary_sha256": hashlib.sha256(vocabulary_text.encode()).hexdigest(),
        "vocab_size": vocab_size,
        "dtype": _smallest_dtype(vocab_size),
        "end_token": end_token,
        "end_id": vocabulary.get(end_token),
    }
    return definition, about


def _smallest_dtype(vocab_size: int) -> str:
    """Return the smallest unsigned dtype that holds every token id."""
    if vocab_size <= 2**8:
        return "uint8"
    if vocab_size <= 2**16:
        return "uint16"
    return "uint32"


def encoder(definition: str, about: dict) -> Callable[[bytes], np.ndarray]:
    """Return a function that turns a document into its token ids, followed by the end token.

    `definition` and `about` come from load_tokenizer. The function never produces a special token
    from the text of a document: "<|endoftext|>" on a web page is tokenized as ordinary text.
    """
    if definition == "bytes":
        return _encode_bytes

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # encode the characters of a special token as text
    end_id = about["end_id"]

    def encode(document: bytes) -> np.ndarray:
        # A document that was split into training and held-out text may start or end inside a
        # character.
        text = document.decode(errors="replace")
        ids = _encode_in_pieces(tokenizer, text)
        if end_id is not None:
            ids.append(end_id)
        return np.array(ids, about["dtype"])

    return encode


def _encode_in_pieces(tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, with the memory that a piece of it takes.

    At the border of a piece the tokens are not those of the whole text: the border may cut a word,
    and some tokenizers add a space to each text that they get. So each piece begins inside the
    piece before, and they are joined where both have the same tokens at the same places. If there
    is no such place, the piece is made longer.
    """
    start = 0
    stop = min(PIECE, len(text))
    tokens = _tokens_of(tokenizer, text, start, stop)
    ids = []
    joined = 0  # the tokens of `ids` are those that start before this place
    while stop < len(text):
        next_start = stop - OVERLAP
        next_stop = min(next_start + PIECE, len(text))
        next_tokens = _tokens_of(tokenizer, text, next_start, next_stop)
        join = _place_to_join(tokens, next_tokens, (next_start + stop) // 2, stop)
        if join is None:
            stop = min(stop + (stop - start), len(text))
            tokens = _tokens_of(tokenizer, text, start, stop)
        else:
            ids += tokens[_index(tokens, joined) : _index(tokens, join), 0].tolist()
            tokens = next_tokens
            start = next_start
            stop = next_stop
            joined = join
    return ids + tokens[_index(tokens, joined) :, 0].tolist()


def _tokens_of(tokenizer, text: str, start: int, stop: int) -> np.ndarray:
    """Return the tokens of a part of a text, [tokens, 3]: id, where it starts, where it ends."""
    encoding = tokenizer.encode(text[start:stop], add_special_tokens=False)
    places = start + np.array(encoding.offsets, np.int64).reshape(-1, 2)
    return np.column_stack([np.array(encoding.ids, np.int64), places])


def _index(tokens: np.ndarray, place: int) -> int:
    """Return the index of the first token that starts at a place or behind it."""
    return int(np.searchsorted(tokens[:, 1], place))


def _place_to_join(
    tokens: np.ndarray, next_tokens: np.ndarray, first: int, stop: int
) -> int | None:
    """Return a place from `first` to `stop` around which both have the same tokens, or None."""
    half = AGREEING // 2
    for place in tokens[_index(tokens, first) : _index(tokens, stop), 1].tolist():
        around = []
        for array in (tokens, next_tokens):
            middle = _index(array, place)
            around.append(array[max(0, middle - half) : middle + half])
        if len(around[0]) == AGREEING and np.array_equal(around[0], around[1]):
            return place
    return None


def _encode_bytes(document: bytes) -> np.ndarray:
    """Return the bytes of a document, uint8, followed by the end token 0."""
    text = document.replace(b"\0", b"?")  # 0 stands for the end only
    return np.frombuffer(text + b"\0", "uint8")
