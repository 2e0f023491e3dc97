"""What a rank of pipeline_parallel.py did when, sent and held. Nothing here waits for a GPU while a step runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from _pipeline_parallel_replay import Span
from torch import Tensor

from old.step_cost import wait_for


class Record:
    """The steps of one schedule on this rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timelines: list[list[Span]] = []  # of each step, in seconds since its begin
        self.step_seconds: list[float] = []
        self.messages = 0
        self.bytes_sent = 0
        self.most_held = 0

    def now(self) -> float | torch.cuda.Event:
        """A moment: on a GPU one of the GPU's own, which the CPU is far ahead of."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_since_begin(self, moment: float | torch.cuda.Event) -> float:
        if self.device.type != "cuda":
            return moment - self.began
        return self.began.elapsed_time(moment) / 1e3

    def begin_step(self) -> None:
        """All ranks begin together, so that their clocks can be laid beside each other."""
        wait_for(self.device)
        dist.barrier()
        wait_for(self.device)
        self.moments = []
        self.began = self.now()

    @contextmanager
    def compute(self, instruction: tuple) -> Iterator[None]:
        start = self.now()
        yield
        self.moments.append((instruction, start, self.now()))

    def end_step(self) -> None:
        end = self.now()
        wait_for(self.device)
        self.step_seconds.append(self.seconds_since_begin(end))
        self.timelines.append(
            [
                Span(instruction, self.seconds_since_begin(start), self.seconds_since_begin(stop))
                for instruction, start, stop in self.moments
            ]
        )

    def count_message(self, tensor: Tensor) -> None:
        self.messages += 1
        self.bytes_sent += tensor.nbytes

    def note_held(self, held: int) -> None:
        self.most_held = max(self.most_held, held)
