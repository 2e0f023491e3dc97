"""What offload.py copies, and the slower level of a machine without a GPU: a file, with a thread that copies."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Slot:
    """A place on the slower level, and the end of the last copy to it or from it."""

    place: Tensor | int  # pinned memory, or where in the file
    size: int
    done: "torch.cuda.Event | Future | None" = None


class View(NamedTuple):
    """How a tensor looks into its memory."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def view_of(tensor: Tensor) -> View:
    return View(tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


def bytes_of(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor looks into, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def look_into(data: Tensor, view: View) -> Tensor:
    """The tensor again, from a copy of its memory."""
    empty = torch.empty(0, dtype=view.dtype, device=data.device)
    return empty.set_(data.untyped_storage(), view.offset, view.shape, view.stride)


class File:
    """A file without a name. What write() and read() start is finished after wait().

    Linux keeps a file's pages in RAM as long as there is room. So its speed is that of copying, until RAM gets short.
    """

    def __init__(self, folder: Path) -> None:
        self.file, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)  # it ends with the process
        self.thread = ThreadPoolExecutor(1)  # one: copies of the same place must not overtake each other
        self.end = 0
        self.written_bytes = 0

    def slot(self, size: int) -> Slot:
        self.end += size
        return Slot(self.end - size, size)

    def write(self, slot: Slot, source: Tensor) -> None:
        self.written_bytes += slot.size
        slot.done = self.thread.submit(copy_all, os.pwrite, self.file, source, slot.place)

    def read(self, slot: Slot, target: Tensor) -> None:
        slot.done = self.thread.submit(copy_all, read_into, self.file, target, slot.place)

    def wait(self, slot: Slot) -> None:
        slot.done.result()

    def start_again(self) -> None:
        """Forget what is in the file: the next slots begin at its start."""
        self.end = 0

    def leave_ram(self) -> None:
        """Have Linux write the file to the disk and forget its pages. It does so by itself when memory gets short."""
        os.fsync(self.file)
        if hasattr(os, "posix_fadvise"):  # Linux
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)


def copy_all(copy: Callable[[int, memoryview, int], int], file: int, data: Tensor, place: int) -> None:
    """One call copies 2 GiB at most."""
    left = memoryview(data.numpy())
    while left:
        copied = copy(file, left, place)
        if copied == 0:
            raise OSError(f"the file ends {len(left)} bytes too early")
        left = left[copied:]
        place += copied


def read_into(file: int, target: memoryview, place: int) -> int:
    return os.preadv(file, [target], place)
