"""The data of a training run, from text to samples.

    text --load_corpus()--> Corpus --sequences()--> samples --Batches--> micro-batches of one rank

- load_corpus() turns text into token ids and caches them in files.
- sequences() cuts the token ids into samples: pairs (inputs, targets).
- Batches (training/batches.py) chooses the samples that each rank reads at each step.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from common import cli, files
from common.exits import UserError
from common.runtime import all_gather, print0
from lm import documents, token_folder
from lm.encoder import encoder, load_tokenizer
from lm.tokenizer import has_tokenizer
from training.lock import Lock

# A training script tokenizes a text of at most so many bytes: it uses one process and holds all
# documents in memory.
LARGEST_TEXT = 200_000_000
CACHE_VERSION = 6  # increase it with every change to how text becomes tokens
CACHE_MARK = "tokens"  # of a folder in the cache: see common/files.py


class JoinedTokens:
    """Arrays of tokens, one after the other, without a copy. A slice of it is an array."""

    def __init__(self, arrays: list) -> None:
        self.arrays = arrays
        self.starts = np.cumsum([0, *map(len, arrays)]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        pieces = []
        for array, begin in zip(self.arrays, self.starts[:-1], strict=True):
            pieces.append(array[max(start - begin, 0) : max(stop - begin, 0)])
        return np.concatenate(pieces)


class Corpus(NamedTuple):
    """Token ids for training and for evaluation, in two one-dimensional arrays.

    load_corpus() maps the arrays from files, so that all processes of a node share one copy.
    """

    train: np.ndarray | JoinedTokens
    held_out: np.ndarray | JoinedTokens
    vocab_size: int
    sha256: str  # of the token ids, first train, then held_out; with eval_data, of train alone
    tokenizer: str = "bytes"  # "bytes", or a Hugging Face name or folder
    # of data with weights: the training tokens and the weight of each part
    mixture: list[tuple[np.ndarray | JoinedTokens, float]] | None = None


class _Tokens(NamedTuple):
    """The tokens of one text, and what corpus.json says of them."""

    about: dict
    train: np.ndarray | JoinedTokens
    held_out: np.ndarray | JoinedTokens
    tokenizer: str  # "bytes", or a Hugging Face name or folder
    origins: set[str]  # the files and data sets that the tokens come from
    mixture: list[tuple[np.ndarray | JoinedTokens, float]] | None = None  # as in Corpus

    def joined(self) -> np.ndarray | JoinedTokens:
        """Return all tokens."""
        if len(self.held_out) == 0:
            return self.train
        return JoinedTokens([self.train, self.held_out])


def load_corpus(
    data: str,
    tokenizer: str | None = None,
    model: str = "nano",
    run_dir: Path | None = None,
    eval_data: str | None = None,
) -> Corpus:
    """Load the token ids of a text, or of a folder that 05_ddp/prepare_data.py made.

    The first call with a text tokenizes it, holds out 5 % of it for evaluation, and caches the
    token ids. Later calls only open the cache. Its key is a hash of the text and of the tokenizer,
    so a change of either leads to a new entry, also where names and times stay. The environment
    variable CORPUS_CACHE names the cache folder, which by default is a folder for temporary files.

    With `eval_data`, nothing of `data` is held out: all its tokens are for training, and all tokens
    of `eval_data` are for evaluation. In a folder of prepare_data.py these are the tokens of its
    two files, train.npy and then held_out.npy.

    `data` may name several texts and folders, with or without weights: see cli.split_mixture. Each
    is loaded by itself. Without weights, their tokens follow each other. With weights, sequences()
    returns a mixture of their sequences.

    Except for "stdlib" alone, rank 0 prints the numbers of tokens. It also prints what was left out
    of the text because runs have written it.

    Args:
        data: The text, at most 200 MB: "stdlib", a file, a folder, or hf:NAME. Or a folder that
            05_ddp/prepare_data.py made, of any size.
        tokenizer: "bytes", or a Hugging Face name or folder. Default: the tokenizer in the folder
            `model`, or "bytes" if it has none.
        model: The value of --model.
        run_dir: The value of --run-dir. What is in there is left out of the text.
        eval_data: The text for evaluation, of the same kinds as `data`. It is tokenized as `data`
            is. With `eval_data` this function is a collective.

    Raises:
        UserError: The text or the tokenizer cannot be read, the text is too large, the cache cannot
            be written, or the folder was made with another tokenizer. Or a file of `eval_data` is
            also in `data`, or nodes have different files under the name `eval_data`.
    """
    if not tokenizer:
        tokenizer = model if has_tokenizer(model) else None

    tokens = _load_parts("--data", data, tokenizer, run_dir, hold_out=eval_data is None)
    if eval_data is None:
        if data != "stdlib":
            print0(
                f"--data {data}: {len(tokens.train):,} tokens for training, "
                f"{len(tokens.held_out):,} held out"
            )
        return Corpus(
            train=tokens.train,
            held_out=tokens.held_out,
            vocab_size=tokens.about["vocab_size"],
            sha256=tokens.about["sha256"],
            tokenizer=tokens.tokenizer,
            mixture=tokens.mixture,
        )

    with _named_eval_data():
        eval_tokens = _load_parts(
            "--eval-data",
            eval_data,
            tokenizer,
            run_dir,
            hold_out=False,
            text_tokenizer=tokens.about["tokenizer"],
        )
    _check_eval_data(data, tokens, eval_data, eval_tokens)
    train = tokens.joined()
    held_out = eval_tokens.joined()
    print0(
        f"--data {data}: {len(train):,} tokens for training; "
        f"--eval-data {eval_data}: {len(held_out):,} for evaluation"
    )
    # The hash tells which tokens are trained on: a run must not resume with 5 % of --data held out.
    sha256 = hashlib.sha256(f"all of {tokens.about['sha256']}".encode()).hexdigest()
    return Corpus(
        train, held_out, tokens.about["vocab_size"], sha256, tokens.tokenizer, tokens.mixture
    )


@contextlib.contextmanager
def _named_eval_data() -> Iterator[None]:
    """Name --eval-data in the errors of the `with` block, which begin with --data."""
    try:
        yield
    except UserError as error:
        message = str(error)
        if message.startswith("--data "):
            message = message.replace("--data ", "--eval-data ", 1)
        raise UserError(message) from None


def _check_eval_data(data: str, tokens: _Tokens, eval_data: str, eval_tokens: _Tokens) -> None:
    """Raise UserError if --eval-data cannot be used with --data."""
    flag = f"--eval-data {eval_data}"
    if tokens.about["vocabulary_sha256"] != eval_tokens.about["vocabulary_sha256"]:
        raise UserError(
            f"{flag} was made with --tokenizer {eval_tokens.about['tokenizer']}, and --data {data} "
            f"with {tokens.about['tokenizer']}, which has other tokens: prepare it again"
        )
    common = sorted(tokens.origins & eval_tokens.origins)
    if common or tokens.about["sha256"] == eval_tokens.about["sha256"]:
        what = common[0] if common else "its text"
        raise UserError(
            f"{flag}: {what} is also in --data {data}, and would be trained on: use other text, "
            "or leave out --eval-data, which holds out 5 % of --data"
        )
    check_same_eval_data(eval_data, eval_tokens.about["sha256"])


def check_same_eval_data(eval_data: str, sha256: str) -> None:
    """Raise UserError if the ranks have read different content. All ranks must call this.

    The hash in the settings of a run, which all ranks compare, is of the training data alone.
    """
    hashes = all_gather(sha256)
    for rank, hash_of_rank in enumerate(hashes):
        if hash_of_rank != hashes[0]:
            raise UserError(
                f"--eval-data {eval_data} of rank {rank} is not that of rank 0: "
                "use the same files on every node"
            )


def _load_parts(
    flag: str,
    data: str,
    tokenizer: str | None,
    run_dir: Path | None,
    *,
    hold_out: bool,
    text_tokenizer: str = "bytes",
) -> _Tokens:
    """Return the tokens of all parts of `data`. The arguments are those of _load_tokens."""
    names = cli.split_mixture(flag, data)
    parts: list[_Tokens] = []
    for name, _ in names:
        if parts:
            text_tokenizer = parts[0].about["tokenizer"]
        part = _load_tokens(
            name, tokenizer, run_dir, hold_out=hold_out, text_tokenizer=text_tokenizer
        )
        for other in parts:
            _check_parts(f"{flag} {data}", name, part, other)
        parts.append(part)
    if len(parts) == 1:
        return parts[0]

    weights = [weight for _, weight in names if weight is not None]
    assert not weights or flag == "--data", "training/flags.py refuses weights of --eval-data"
    mixture = None
    if weights:
        train = [part.train if hold_out else part.joined() for part in parts]
        mixture = list(zip(train, weights, strict=True))
        for (name, weight), tokens in zip(names, train, strict=True):
            share = (weight or 0) / sum(weights)
            print0(f"{flag} {name}: {len(tokens):,} tokens, {share:.1%} of the samples")
    contents = [part.about["sha256"] for part in parts]
    sha256 = hashlib.sha256(repr([contents, weights]).encode()).hexdigest()
    return _Tokens(
        about={**parts[0].about, "sha256": sha256},
        train=JoinedTokens([part.train for part in parts]),
        held_out=JoinedTokens([part.held_out for part in parts]),
        tokenizer=parts[0].tokenizer,
        origins=set().union(*[part.origins for part in parts]),
        mixture=mixture,
    )


def _check_parts(where: str, name: str, part: _Tokens, other: _Tokens) -> None:
    """Raise UserError if two parts have other tokenizers or a common file."""
    if part.about["vocabulary_sha256"] != other.about["vocabulary_sha256"]:
        raise UserError(
            f"{where}: {name} has the tokens of {part.about['tokenizer']}, and another part those "
            f"of {other.about['tokenizer']}: add --tokenizer, or prepare one of them again"
        )
    common = sorted(part.origins & other.origins)
    if common:
        raise UserError(f"{where}: {common[0]} is in two parts: name it once")


def _load_tokens(
    data: str,
    tokenizer: str | None,
    run_dir: Path | None,
    *,
    hold_out: bool = True,
    text_tokenizer: str = "bytes",
) -> _Tokens:
    """Open the tokens of a text, which may have to be made first, or those of a prepared folder.

    Args:
        data: As in load_corpus.
        tokenizer: The tokenizer to use. A prepared folder must have been made with it. None: any.
        run_dir: As in load_corpus.
        hold_out: Whether to hold out 5 % of a text. If not, the held-out array is empty.
        text_tokenizer: The tokenizer for a text where `tokenizer` is None.

    Raises:
        UserError: As in load_corpus. The message begins with --data.
    """
    if _is_folder_of_tokens(Path(data)):
        again = "prepare the folder again with 05_ddp/prepare_data.py"
        tokens = _open_tokens(Path(data), tokenizer, f"--data {data}", again)
        return tokens._replace(origins={os.path.realpath(data)})

    tokenizer = tokenizer or text_tokenizer
    outputs = [run_dir] if run_dir else []
    found = documents.find(data, outputs=outputs)
    folder = _cache_folder(data, found.fingerprint, tokenizer, hold_out)
    try:
        if not _is_complete(folder):
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One process of the node tokenizes. The others wait, and then find the files.
            with Lock(folder.with_suffix(".lock.lease")):
                if not _is_complete(folder):
                    tokenize(found.origins, tokenizer, folder, data, hold_out)
        where = f"--data {data}: its tokens in the cache, {folder}"
        tokens = _open_tokens(folder, None, where, "delete that folder")
        # The cache may have the path of the same tokenizer from another directory.
        about = {**tokens.about, "tokenizer": tokenizer}
        tokens = tokens._replace(about=about, tokenizer=tokenizer)
    except OSError as error:
        # A full disk, for example. numpy's OSError for it lacks the errno by which common.exits
        # would know it.
        raise UserError(
            f"cannot keep the tokens in {folder}: {error}; delete it, or set CORPUS_CACHE"
        ) from None
    if found.run_outputs:
        print0(f"--data {data}: {found.left_out()}")

    origins = {data}  # a data set
    if not data.startswith("hf:"):
        origins = {os.path.realpath(path) for path in found.origins}
    return tokens._replace(origins=origins)


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in token_folder.NAMES)


def _cache_folder(data: str, fingerprint: list, tokenizer: str, hold_out: bool) -> Path:
    """Return the cache folder of a text. Its name is a hash of all that its tokens depend on.

    `fingerprint` is that of documents.find(). Raise UserError if the tokenizer cannot be loaded.
    """
    # Not a hash of the tokenizer's files: which of them count depends on the kind of tokenizer.
    definition, about = load_tokenizer(tokenizer)
    del about["tokenizer"]  # its path
    definition_sha256 = hashlib.sha256(definition.encode()).hexdigest()

    # The fingerprint of a data set does not contain the name.
    data_set = data if data.startswith("hf:") else False
    # The standard library has a split of its own.
    kind = data_set or data == "stdlib"
    key: tuple = (CACHE_VERSION, kind, fingerprint, definition_sha256, sorted(about.items()))
    if not hold_out:
        key = (*key, "all of it")
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:20]

    default = Path(tempfile.gettempdir(), f"corpus-cache-{os.getuid()}")
    return Path(os.environ.get("CORPUS_CACHE") or default, name)


def _is_folder_of_tokens(folder: Path) -> bool:
    """Return whether 05_ddp/prepare_data.py made a folder, also if one of its files is missing."""
    about = folder / "corpus.json"
    if about.is_symlink() or about.exists():  # a link may lead nowhere
        return True
    return (folder / "train.npy").is_file() and (folder / "held_out.npy").is_file()


def _open_tokens(folder: Path, tokenizer: str | None, where: str, fix: str) -> _Tokens:
    """Open a folder of tokens, memory-mapped.

    Raise UserError if another tokenizer made them or if a file is damaged.
    """
    about, train, held_out = token_folder.read(folder, where, fix)
    if tokenizer:
        _, wanted = load_tokenizer(tokenizer)
        if wanted["vocabulary_sha256"] != about["vocabulary_sha256"]:
            raise UserError(
                f"--data {folder} was made with --tokenizer {about['tokenizer']}, "
                f"and --tokenizer {tokenizer} has other tokens: prepare it again"
            )
    return _Tokens(about, train, held_out, tokenizer or about["tokenizer"], origins=set())


def tokenize(origins: list, tokenizer: str, folder: Path, data: str, hold_out: bool = True) -> None:
    """Write the tokens of all documents to a folder: see lm/token_folder.py.

    If the process is killed, there is no folder: it gets its name when all its files are complete.
    `origins` comes from documents.find(). `data` is the value of --data. Without `hold_out`, all
    tokens are in train.npy, and held_out.npy is empty.
    """
    texts = _read_texts(origins, tokenizer, data)
    sides = np.full(len(texts), token_folder.TRAIN)
    if hold_out:
        hashes = np.array([token_folder.hash_of(text) for text in texts], np.uint64)
        sizes = np.array([len(text) for text in texts])
        sides = token_folder.choose_sides(data, hashes, sizes)
    definition, about = load_tokenizer(tokenizer)
    encode = encoder(definition, about)

    unfinished = files.start_folder(folder)
    with token_folder.writer(unfinished, about) as write:
        for text, side_of_text in zip(texts, sides, strict=True):
            for side, piece in token_folder.split(text, side_of_text):
                write(side, encode(piece))
    # A folder of this name has lost some of its files, as temporary files do.
    files.finish_folder(unfinished, folder, CACHE_MARK)


def _read_texts(origins: list, tokenizer: str, data: str) -> list[bytes]:
    """Return all documents; raise UserError if they are empty or larger than LARGEST_TEXT."""
    texts = []
    size = 0
    for origin in origins:
        for text in documents.read(origin):
            texts.append(text)
            size += len(text)
            if size > LARGEST_TEXT:
                prepare = "python 05_ddp/prepare_data.py"
                raise UserError(
                    f"--data {data} is more than 200 MB of text: "
                    f"{prepare} --data {data} --tokenizer {tokenizer} --out FOLDER, "
                    "and pass FOLDER in its place"
                )
    if size == 0:
        raise UserError(f"--data {data} holds no text")
    return texts


class Sequences(Dataset):
    """Training samples of seq_len tokens, cut from an array of tokens.

    A sample is a pair (inputs, targets), both int64 [seq_len]. The target at each position is the
    token that follows the input there. With seq_len 4, the tokens a b c d e f g h i become:

        sample 0    inputs a b c d    targets b c d e
        sample 1    inputs e f g h    targets f g h i

    A sample may hold the end of one document and the start of the next. Attention then sees across
    the border, as in many recipes of pretraining. 07_memory_tricks/packing.py keeps them apart.
    """

    def __init__(self, tokens: np.ndarray | JoinedTokens, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * self.seq_len
        window = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def sequences(corpus: Corpus, seq_len: int) -> tuple[Dataset, Sequences]:
    """Return the samples of training and of evaluation, sequences of seq_len tokens.

    Raise UserError if a part of a mixture has no sequence.
    """
    held_out = Sequences(corpus.held_out, seq_len)
    if corpus.mixture is None:
        return Sequences(corpus.train, seq_len), held_out
    parts = [Sequences(tokens, seq_len) for tokens, _ in corpus.mixture]
    lengths = [len(part) for part in parts]
    if 0 in lengths:
        raise UserError(
            f"--data: part {lengths.index(0) + 1} has no training sequence of --seq-len {seq_len}: "
            "add text, or lower --seq-len"
        )
    train = ConcatDataset(parts)
    train.mixture = [(n, weight) for n, (_, weight) in zip(lengths, corpus.mixture, strict=True)]
    return train, held_out
