"""The requests that kv_cache.py answers, and what serving them took."""

from argparse import Namespace
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Request:
    """It ends after `new_tokens`, as if the model had given a stop token: the server does not know when."""

    key: int
    prompt: list[int]
    new_tokens: int
    arrival: int = 0  # the step from which on it waits to be answered
    ids: list[int] = field(default_factory=list)  # the text so far
    logits: list[Tensor] = field(default_factory=list)  # that the new tokens were taken from

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    def take(self, token: int, logits: Tensor) -> None:
        """Nothing, once it has ended: in static batching it runs on until the longest of its batch ends."""
        if not self.ended:
            self.ids.append(token)
            self.logits.append(logits)

    @property
    def ended(self) -> bool:
        return len(self.ids) >= len(self.prompt) + self.new_tokens

    def again(self) -> "Request":
        """As it came in."""
        return Request(self.key, self.prompt, self.new_tokens, self.arrival)


@dataclass
class Served:
    """What answering the requests took. Slots by decode step: with a token that will be read again, and reserved."""

    steps: int = 0
    prompt_tokens_read: int = 0
    preemptions: int = 0
    slots_filled: list[int] = field(default_factory=list)
    slots_reserved: list[int] = field(default_factory=list)

    def note(self, cache, running: list[Request], block_tokens: int) -> None:
        """After a decode step: the newest token has no slot yet, and what has ended needs none. Blocks that two share
        count once."""
        filled = {}
        for request in running:
            tokens = 0 if request.ended else len(request.ids) - 1
            for i, block in enumerate(cache.tables[request.key]):
                filled[block] = min(block_tokens, max(0, tokens - i * block_tokens))
        self.slots_filled.append(sum(filled.values()))
        self.slots_reserved.append(len(filled) * block_tokens)


def make_requests(args: Namespace, vocab_size: int) -> tuple[Request, list[Request]]:
    """A system prompt, and requests that begin with it. Most answers are short and a few long; after the first ones a
    request arrives every four steps."""
    generator = torch.Generator().manual_seed(args.seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    quarter = args.seq_len // 4
    system = Request(-1, tokens(quarter), 0)
    requests = []
    for key in range(args.requests):
        own = int(torch.randint(1, quarter + 1, (), generator=generator))
        chance = torch.rand((), generator=generator).item()
        new_tokens = 2 + round((args.seq_len // 2 - 2) * chance**3)
        arrival = 4 * max(0, key - args.concurrency)
        requests.append(Request(key, system.prompt + tokens(own), new_tokens, arrival))
    return system, requests
