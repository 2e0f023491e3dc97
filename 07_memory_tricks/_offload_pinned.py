"""The slower level of a machine with a GPU for offload.py: pinned CPU memory."""

import torch
from _offload_file import Slot
from torch import Tensor


class PinnedMemory:
    """The slower level of a GPU. Copies run in streams of their own, beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)
        self.written_bytes = 0

    def slot(self, size: int) -> Slot:
        return Slot(torch.empty(size, dtype=torch.uint8, pin_memory=True), size)

    def write(self, slot: Slot, source: Tensor) -> None:
        self.written_bytes += slot.size
        self.out.wait_stream(torch.cuda.current_stream())  # source must have been computed
        with torch.cuda.stream(self.out):
            slot.place.copy_(source, non_blocking=True)
            slot.done = self.out.record_event()

    def read(self, slot: Slot, target: Tensor) -> None:
        self.back.wait_stream(torch.cuda.current_stream())  # whose memory target was must have finished with it
        self.back.wait_event(slot.done)
        with torch.cuda.stream(self.back):
            target.copy_(slot.place, non_blocking=True)
            slot.done = self.back.record_event()

    def wait(self, slot: Slot) -> None:
        """What the GPU computes from here on comes after the copy. The CPU does not wait."""
        torch.cuda.current_stream().wait_event(slot.done)

    def start_again(self) -> None:
        """Nothing to do: a slot that nobody holds goes back to torch's pool of pinned memory."""

    def leave_ram(self) -> None:
        """Pinned memory cannot."""
