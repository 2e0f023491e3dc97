"""Let the model of a run continue a held-out text, so that people see what it has learned."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.exits import UserError
from common.runtime import is_rank0
from lm.data import Corpus
from lm.tokenizer import open_tokenizer

PROMPT_TOKENS = 64  # at most, of the first held-out sequence
NEW_TOKENS = 48  # at most
SHOWN_CHARACTERS = 32  # of the prompt, its end
TEMPERATURE = 0.8


@torch.no_grad()
def sample_text(
    net: nn.Module, corpus: Corpus, *, seq_len: int, device: torch.device, seed: int = 0
) -> str | None:
    """Return the end of a held-out text, ">>" and how the model continues it, in one line.

    Every rank must call this. All ranks compute the same forward passes, because forward of a
    sharded model is a collective. Rank 0 draws each token and sends it to the others, so that they
    cannot differ. Rank 0 returns the text, the others return None. So does rank 0 if it does not
    have the tokenizer: a folder of tokens needs none to train.

    `net` is the model itself, which DDP may have wrapped, or fully_shard sharded. Blocks that are
    compiled run eagerly here, so nothing is compiled again. The training does not change: the
    tokens are drawn with a generator that is seeded from `seed` alone, and the mode of `net` is
    restored. Call it under the autocast of the evaluation.
    """
    prompt = corpus.held_out[: max(1, min(PROMPT_TOKENS, seq_len // 2))]
    prompt_length = len(prompt)
    length = min(prompt_length + NEW_TOKENS, seq_len)
    # Positions behind the last token hold 0. Attention is causal, so no token sees them.
    tokens = torch.zeros(1, length, dtype=torch.int64)
    tokens[0, :prompt_length] = torch.from_numpy(prompt.astype("int64"))
    generator = torch.Generator().manual_seed(seed)

    was_training = net.training
    net.eval()
    with torch.compiler.set_stance("force_eager"):
        for position in range(prompt_length, length):
            logits = net(tokens.to(device))[0, position - 1]  # [vocab]
            token = torch.zeros((), dtype=torch.int64)
            if is_rank0():
                token = draw(logits[: corpus.vocab_size], generator)
            if dist.is_initialized():
                dist.broadcast(token, src=0)  # a tensor on the CPU, which goes over gloo
            tokens[0, position] = token
    net.train(was_training)

    if not is_rank0():
        return None
    decode = decoder(corpus.tokenizer)
    if decode is None:
        return None
    ids = tokens[0].tolist()
    shown_prompt = visible(decode(ids[:prompt_length]))[-SHOWN_CHARACTERS:]
    return f"{shown_prompt} >> {visible(decode(ids[prompt_length:]))}"


def draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return the id of a token, drawn on the CPU from the softmax of logits / TEMPERATURE.

    A model that has diverged has logits that are not finite. Meter.log_eval then says so.
    """
    finite = logits.float().cpu().nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4)
    probabilities = torch.softmax(finite / TEMPERATURE, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[0]


@functools.cache
def decoder(tokenizer: str) -> Callable[[list[int]], str] | None:
    """Return the function that turns token ids into text, or None if the tokenizer is not here.

    `tokenizer` is "bytes", or a Hugging Face name or folder. Nothing is downloaded.
    """
    if tokenizer == "bytes":
        return decode_bytes
    try:
        return open_tokenizer(tokenizer, download=False).decode
    except UserError:
        return None


def decode_bytes(ids: list[int]) -> str:
    """Return the text of bytes. What is no UTF-8, or no byte, becomes a replacement character."""
    values = [token if token < 256 else 0xFF for token in ids]
    return bytes(values).decode(errors="replace")


def visible(text: str) -> str:
    r"""Return the text in one line: control characters such as line ends become \n, \x00 and so on.

    So a text that is drawn at random cannot control the terminal.
    """
    shown = ""
    for character in text:
        if character.isprintable():
            shown += character
        else:
            shown += character.encode("unicode_escape", errors="replace").decode()
    return shown
