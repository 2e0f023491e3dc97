"""The data of a training run, from text to the batches of each rank.

    text --load_corpus()--> Corpus --sequences()--> samples --Batches--> micro-batches of one rank

- load_corpus() turns text into token ids and caches them in files.
- sequences() cuts the token ids into samples: pairs (inputs, targets).
- Batches chooses the samples that each rank reads at each step. The choice depends on the seed and
  the step. It does not depend on the number of ranks.

To train on your own data, pass your own torch Datasets to Batches.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common import files
from common.exits import UserError
from common.runtime import all_gather, print0
from lm.corpus import (
    HELD_OUT,
    documents,
    encoder,
    has_tokenizer,
    load_tokenizer,
    open_tokens,
    sources,
)
from lm.lock import Lock

# A training script tokenizes a text of at most so many bytes: it uses one process and holds all
# documents in memory.
LARGEST_TEXT = 200_000_000
CACHE_VERSION = 6  # increase it with every change to how text becomes tokens
CACHE_MARK = "tokens"  # of a folder in the cache: see common/files.py
CORPUS_FILES = ("train.npy", "held_out.npy", "corpus.json")

EVAL_SEQUENCES = 96  # an evaluation reads at most so many held-out samples, evenly spaced
PADDING = -100  # a target that the loss ignores: ignore_index of F.cross_entropy


class JoinedTokens:
    """Two arrays of tokens, one after the other, without a copy. A slice of it is an array."""

    def __init__(self, first: np.ndarray, second: np.ndarray) -> None:
        self.first = first
        self.second = second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        border = len(self.first)
        of_first = self.first[start:stop]
        of_second = self.second[max(start - border, 0) : max(stop - border, 0)]
        return np.concatenate([of_first, of_second])


class Corpus(NamedTuple):
    """Token ids for training and for evaluation, in two one-dimensional arrays.

    load_corpus() maps the arrays from files, so that all processes of a node share one copy.
    """

    train: np.ndarray | JoinedTokens
    held_out: np.ndarray | JoinedTokens
    vocab_size: int
    sha256: str  # of the token ids, first train, then held_out; with eval_data, of train alone
    tokenizer: str = "bytes"  # "bytes", or a Hugging Face name or folder


class _Tokens(NamedTuple):
    """The tokens of one text, and what corpus.json says of them."""

    about: dict
    train: np.ndarray
    held_out: np.ndarray
    tokenizer: str  # "bytes", or a Hugging Face name or folder
    origins: set[str]  # the files and data sets that the tokens come from

    def joined(self) -> np.ndarray | JoinedTokens:
        """Return all tokens."""
        if len(self.held_out) == 0:
            return self.train
        return JoinedTokens(self.train, self.held_out)


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

    if eval_data is None:
        tokens = _load_tokens(data, tokenizer, run_dir)
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
        )

    tokens = _load_tokens(data, tokenizer, run_dir, hold_out=False)
    with _named_eval_data():
        eval_tokens = _load_tokens(
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
    return Corpus(train, held_out, tokens.about["vocab_size"], sha256, tokens.tokenizer)


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
    found = sources(data, outputs=outputs)
    folder = _cache_folder(data, found.fingerprint, tokenizer, hold_out)
    try:
        if not _is_complete(folder):
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One process of the node tokenizes. The others wait, and then find the files.
            with Lock(folder.with_suffix(".lock")):
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
        names = ", ".join(found.run_outputs[:3])
        if len(found.run_outputs) > 3:
            names += ", ..."
        print0(f"--data {data}: left out what runs have written: {names}")

    origins = {data}  # a data set
    if not data.startswith("hf:"):
        origins = {os.path.realpath(path) for path in found.origins}
    return tokens._replace(origins=origins)


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in CORPUS_FILES)


def _cache_folder(data: str, fingerprint: list, tokenizer: str, hold_out: bool) -> Path:
    """Return the cache folder of a text. Its name is a hash of all that its tokens depend on.

    `fingerprint` is that of sources(). Raise UserError if the tokenizer cannot be loaded.
    """
    # Not a hash of the tokenizer's files: which of them count depends on the kind of tokenizer.
    definition, about = load_tokenizer(tokenizer)
    del about["tokenizer"]  # its path
    definition_sha256 = hashlib.sha256(definition.encode()).hexdigest()

    # The fingerprint of a data set does not contain the name.
    data_set = data if data.startswith("hf:") else False
    # The standard library has a split of its own.
    kind = data_set or data == "stdlib"
    key = (CACHE_VERSION, kind, fingerprint, definition_sha256, sorted(about.items()))
    if not hold_out:
        key = (*key, "all of it")
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:20]

    cache = os.environ.get("CORPUS_CACHE")
    if not cache:
        cache = Path(tempfile.gettempdir(), f"corpus-cache-{os.getuid()}")
    return Path(cache) / name


def _is_folder_of_tokens(folder: Path) -> bool:
    """Return whether 05_ddp/prepare_data.py made a folder, also if one of its files is missing."""
    about = folder / "corpus.json"
    if about.is_symlink() or about.exists():  # a link may lead nowhere
        return True
    return (folder / "train.npy").is_file() and (folder / "held_out.npy").is_file()


def _open_tokens(folder: Path, tokenizer: str | None, where: str, fix: str) -> _Tokens:
    """Open a folder of tokens, memory-mapped.

    Raise UserError if another tokenizer made them or if a file is damaged: see open_tokens.
    """
    about, train, held_out = open_tokens(folder, where, fix)
    if tokenizer:
        _, wanted = load_tokenizer(tokenizer)
        if wanted["vocabulary_sha256"] != about["vocabulary_sha256"]:
            raise UserError(
                f"--data {folder} was made with --tokenizer {about['tokenizer']}, "
                f"and --tokenizer {tokenizer} has other tokens: prepare it again"
            )
    return _Tokens(about, train, held_out, tokenizer or about["tokenizer"], origins=set())


def tokenize(origins: list, tokenizer: str, folder: Path, data: str, hold_out: bool = True) -> None:
    """Write the tokens of all documents to a folder: train.npy, held_out.npy and corpus.json.

    If the process is killed, there is no folder: it gets its name when all its files are complete.
    `origins` comes from sources(). `data` is the value of --data, for error messages. Without
    `hold_out`, all tokens are in train.npy, and held_out.npy is empty.
    """
    texts = _read_texts(origins, tokenizer, data)
    if not hold_out:
        train_texts = texts
        held_out_texts = []
    elif data == "stdlib":
        # Many figures were measured on the corpus "stdlib". So it keeps its split.
        train_texts, held_out_texts = _split_by_count(texts)
    else:
        train_texts, held_out_texts = _split(texts)
    definition, about = load_tokenizer(tokenizer)
    encode = encoder(definition, about)

    unfinished = files.start_folder(folder)
    sha256 = hashlib.sha256()
    for part, part_texts in (("train", train_texts), ("held_out", held_out_texts)):
        nothing = np.empty(0, about["dtype"])  # np.concatenate needs at least one array
        tokens = np.concatenate([nothing, *(encode(text) for text in part_texts)])
        np.save(unfinished / f"{part}.npy", tokens)
        sha256.update(tokens)
    about["sha256"] = sha256.hexdigest()
    (unfinished / "corpus.json").write_text(json.dumps(about), encoding="utf-8")

    # A folder of this name has lost some of its files, as temporary files do.
    files.finish_folder(unfinished, folder, CACHE_MARK)


def _read_texts(origins: list, tokenizer: str, data: str) -> list[bytes]:
    """Return all documents; raise UserError if they are empty or larger than LARGEST_TEXT."""
    texts = []
    size = 0
    for origin in origins:
        for text in documents(origin):
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


def _split(texts: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split documents into training and held-out texts: 5 % of all bytes are held out.

    A document with more than 5 % of all bytes is cut: its own last 5 % are held out. Of the others,
    those with the lowest hashes are held out, until they are 5 % of the others. The split does not
    depend on the order of the documents, and all copies of a document are treated alike.
    """
    copies = Counter(texts)
    total_bytes = sum(map(len, texts))
    large = set()
    for text, count in copies.items():
        if len(text) * count > total_bytes * HELD_OUT:
            large.add(text)
    others = [text for text in copies if text not in large]
    wanted_bytes = sum(len(text) * copies[text] for text in others) * HELD_OUT

    held_out_texts = set()
    held_out_bytes = 0
    for text in sorted(others, key=_sha256):
        size = len(text) * copies[text]
        # Take the document if the sum is nearer to 5 % with it than without it.
        if held_out_bytes + size / 2 <= wanted_bytes:
            held_out_texts.add(text)
            held_out_bytes += size

    train = []
    held_out = []
    for text in texts:
        if text in large:
            cut = int(len(text) * (1 - HELD_OUT))
            train.append(text[:cut])
            held_out.append(text[cut:])
        elif text in held_out_texts:
            held_out.append(text)
        else:
            train.append(text)
    return train, held_out


def _split_by_count(texts: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split documents into training and held-out texts: the 5 % with the lowest hashes.

    All copies of a document are on the same side.
    """
    unique = sorted(set(texts), key=_sha256)
    held_out_count = math.ceil(len(unique) * HELD_OUT)
    held_out_texts = set(unique[:held_out_count])
    train = [text for text in texts if text not in held_out_texts]
    held_out = [text for text in texts if text in held_out_texts]
    return train, held_out


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class Sequences(Dataset):
    """Training samples of seq_len tokens, cut from an array of tokens.

    A sample is a pair (inputs, targets), both int64 [seq_len]. The target at each position is the
    token that follows the input there. With seq_len 4, the tokens a b c d e f g h i become:

        sample 0    inputs a b c d    targets b c d e
        sample 1    inputs e f g h    targets f g h i

    A sample may hold the end of one document and the start of the next. Attention then sees across
    the border, as in many recipes of pretraining. 07_memory_tricks/packing.py keeps them apart.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * self.seq_len
        window = self.tokens[start : start + self.seq_len + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def sequences(corpus: Corpus, seq_len: int) -> tuple[Sequences, Sequences]:
    """Return the samples of training and of evaluation, sequences of seq_len tokens."""
    return Sequences(corpus.train, seq_len), Sequences(corpus.held_out, seq_len)


class Batches:
    """The batches that one rank reads.

    At each step, all ranks together read the same samples, no matter how many ranks there are.

    Global batch: the samples of one optimizer step, over all ranks. Each rank reads an equal share
    of it, in micro-batches. A rank runs forward and backward once per micro-batch, and accumulates
    the gradients:

        global_batch_size = world_size x accumulation_steps x micro_batch_size

    Epoch: every training sample once, in a random order that depends on the seed and the number of
    the epoch. The epochs follow each other in one endless stream. If there are n training samples,
    position p of the stream holds sample

        order[p % n]    where order is the random order of epoch p // n

    Step s, counted from 0, reads global_batch_size positions, from s x global_batch_size on. Rank 0
    reads the first share of them, rank 1 the second, and so on. The samples of a step depend on the
    seed and the step only. So a run can resume at any step and on another number of ranks.

    Example: with 10 training samples, a global batch of 8 and micro-batches of 2, two ranks read
    these positions:

                  rank 0                rank 1
        step 0    [0, 1]   [2, 3]       [4, 5]   [6, 7]
        step 1    [8, 9]   [10, 11]     [12, 13] [14, 15]

    Positions 0 to 9 are the first epoch. The second epoch starts in the middle of step 1. Of four
    ranks, each reads one micro-batch per step: in step 0, rank 0 reads [0, 1], rank 1 reads [2, 3],
    rank 2 reads [4, 5], and rank 3 reads [6, 7].
    """

    def __init__(
        self, train: Dataset, held_out: Dataset, args, *, rank: int, world_size: int
    ) -> None:
        """Compute the sizes of the batches.

        Args:
            train: The training samples, a Dataset with a length. A sample is a pair of tensors
                (inputs, targets). The samples have equal shapes, except where the Dataset has a
                method __getitems__ that pads the samples of a micro-batch to equal shapes.
            held_out: The samples of the evaluation, all of equal shapes. The loss must ignore
                targets that are PADDING.
            args: The flags global_batch_size, micro_batch_size, seed and seq_len. If
                micro_batch_size is None, a rank reads its share as one micro-batch.
            rank: The data-parallel index of this rank. Ranks that hold parts of the same model, as
                in tensor parallelism, read the same samples and pass the same index.
            world_size: The number of data-parallel indices.

        Raises:
            UserError: The global batch is not a multiple of world_size x micro_batch_size, or there
                are too few samples.
        """
        self.rank = rank
        self.world_size = world_size
        self.seed = args.seed
        self.global_batch_size = args.global_batch_size

        unit = world_size * (args.micro_batch_size or 1)
        if self.global_batch_size % unit != 0:
            below = self.global_batch_size // unit * unit
            above = below + unit
            nearest = f"{below} or {above}" if below > 0 else f"{above}"
            raise UserError(
                f"--global-batch-size {self.global_batch_size} is no multiple of {unit} "
                f"(micro-batch x ranks): use {nearest}"
            )
        self.samples_per_rank = self.global_batch_size // world_size
        # A script may set another size before it calls stream() and evaluation().
        self.micro_batch_size = args.micro_batch_size or self.samples_per_rank

        self.train = train
        self.held_out = held_out
        self._check_length("--data", "training", train, self.global_batch_size, args.seq_len)
        eval_data = getattr(args, "eval_data", None)
        held_out_flag = f"--eval-data {eval_data}" if eval_data else "--data"
        self._check_length(held_out_flag, "held-out", held_out, 1, args.seq_len)
        # A sample has as many targets as tokens; an image, for example, has one.
        _, targets = held_out[0]
        self.tokens_per_step = self.global_batch_size * targets.numel()

        # Keep the orders of two epochs: a step can read the end of one and the start of the next.
        self._order_of_epoch = lru_cache(maxsize=2)(self._shuffle)

    @property
    def accumulation_steps(self) -> int:
        """Return how many micro-batches this rank reads per optimizer step."""
        return self.samples_per_rank // self.micro_batch_size

    def _check_length(
        self, flag: str, part: str, samples: Dataset, needed: int, seq_len: int
    ) -> None:
        """Raise UserError if there are fewer samples than needed."""
        if len(samples) < needed:
            raise UserError(
                f"{flag} has {len(samples)} {part} sequences of --seq-len {seq_len}, "
                f"and needs {needed}: add text, or lower --seq-len or --global-batch-size"
            )

    def _shuffle(self, epoch: int) -> np.ndarray:
        """Return the random order of an epoch: the indices of all training samples, [samples]."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.train))

    def global_batch(self, step: int) -> list[int]:
        """Return the indices of the samples that all ranks together read at a step.

        Steps are counted from 0.
        """
        start = step * self.global_batch_size
        indices = []
        for position in range(start, start + self.global_batch_size):
            epoch, place = divmod(position, len(self.train))
            indices.append(int(self._order_of_epoch(epoch)[place]))
        return indices

    def micro_batch_indices(self, start_step: int = 0) -> Iterator[list[int]]:
        """Yield the sample indices of each micro-batch of this rank. The iterator never ends."""
        # Where this rank's share of the global batch starts and ends.
        start = self.rank * self.samples_per_rank
        end = start + self.samples_per_rank
        for step in itertools.count(start_step):
            indices = self.global_batch(step)
            for first in range(start, end, self.micro_batch_size):
                yield indices[first : first + self.micro_batch_size]

    def stream(
        self, start_step: int, *, pin: bool = False, num_workers: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an endless iterator over the micro-batches of this rank.

        A micro-batch is (inputs, targets), each [micro_batch_size, *shape of a sample], on the CPU.

        Args:
            start_step: The step to start with, counted from 0. A run that resumes passes the number
                of steps that are done.
            pin: Return tensors in pinned memory. A GPU can copy them while it computes.
            num_workers: Processes that load samples in advance. With 0, this process loads them.
        """
        loader = DataLoader(
            self.train,
            batch_sampler=self.micro_batch_indices(start_step),
            num_workers=num_workers,
            worker_init_fn=_ignore_signals,
            pin_memory=pin,
            # DataLoader draws a seed for its workers. From the default generator it would change
            # the random state that a resumed run restores.
            generator=torch.Generator(),
        )
        return iter(loader)

    def evaluation(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's share of the held-out samples, in micro-batches as in stream().

        All ranks together read at most EVAL_SEQUENCES samples. Every rank gets the same number of
        micro-batches: forward of a sharded model communicates, and would hang if one rank called it
        less often. A rank with fewer samples gets additional rows whose targets are all PADDING.
        """
        count = min(EVAL_SEQUENCES, len(self.held_out))
        evenly_spaced = np.linspace(0, len(self.held_out) - 1, count, dtype=np.int64)
        chosen = np.unique(evenly_spaced)

        most_per_rank = math.ceil(len(chosen) / self.world_size)
        micro_batches = math.ceil(most_per_rank / self.micro_batch_size)
        rows = micro_batches * self.micro_batch_size
        first_inputs, first_targets = self.held_out[0]
        inputs = first_inputs.new_zeros(rows, *first_inputs.shape)
        targets = first_targets.new_full((rows, *first_targets.shape), PADDING)
        chosen_by_this_rank = chosen[self.rank :: self.world_size]
        for row, i in enumerate(chosen_by_this_rank.tolist()):
            inputs[row], targets[row] = self.held_out[i]

        input_batches = inputs.split(self.micro_batch_size)
        target_batches = targets.split(self.micro_batch_size)
        return list(zip(input_batches, target_batches, strict=True))


def _ignore_signals(_worker: int) -> None:
    """Let a DataLoader worker ignore the signals that stop a run.

    A scheduler sends them to all processes of a job. The ranks then finish their step and save a
    checkpoint, and need their workers until then.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def one_batch(batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first samples of the corpus "stdlib" as one batch, for lessons that need no more.

    The batch is (inputs, targets), each int64 [batch_size, seq_len], on `device`.

    Raises:
        UserError: The corpus has fewer samples.
    """
    samples = Sequences(load_corpus("stdlib").train, seq_len)
    if len(samples) < batch_size:
        raise UserError(
            f"{batch_size} sequences of {seq_len} tokens, the text has {len(samples)}: "
            "lower the steps or batch"
        )
    pairs = [samples[i] for i in range(batch_size)]
    inputs = torch.stack([inputs for inputs, _ in pairs])
    targets = torch.stack([targets for _, targets in pairs])
    return inputs.to(device), targets.to(device)
