"""Keep what is not needed now where there is more room: activations and optimizer state in the CPU's memory.

An activation lies idle between its forward and its backward, and AdamW's moments between two updates. A GPU can copy
both to the CPU's memory meanwhile, over PCIe or NVLink-C2C, while it computes something else. The memory must be
pinned: Linux then never moves it, and the GPU's copy engine reads and writes it without the CPU's help.

On a CPU there is no such link. There the slower level is a file, and a thread takes the part of the copy engine. The
bookkeeping is the same, and so is the proof: gradients equal to the bit, and the bytes really are in the file.

    laptop    python 07_memory_tricks/offload.py
    one GPU   python 07_memory_tricks/offload.py --model llama-124m --seq-len 1024 --micro-batch-size 16 --dtype bf16
    cluster   one process is all it uses: each rank offloads for itself, and the ranks of a node share its memory

Look for: the peak of each version, and the last table. Copying is hidden if a block's activations leave in the time of
its forward. Whether they do depends on bytes per token over FLOP per token, which grow with the sequence
length, and not on the batch size. Before: optimizer_memory.py. Next: lora.py.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _offload_file import File, Slot, View, bytes_of, look_into, view_of
from _offload_flags import DTYPES, parse
from _offload_optimizer import compare_updates
from _offload_pinned import PinnedMemory
from _offload_report import TORCHS_OWN, compare_versions, conclude

from old import exits, model, runtime, shapes

SMALLEST_BYTES = 16 * 1024  # below, a copy costs more than it frees
MOST_LEAVING = 4  # pieces on their way out at a time: without a limit, all would wait in the memory that is to be freed
MOST_AHEAD = 4  # pieces that backward asks for before it needs them


def offload_and_wait(level: PinnedMemory | File, device: torch.device) -> saved_tensors_hooks:
    """Autograd calls pack with each tensor that it saves, keeps what pack returns, and gives that to unpack."""

    def pack(tensor: Tensor) -> tuple[Slot, View]:
        slot = level.slot(tensor.untyped_storage().nbytes())
        level.write(slot, bytes_of(tensor))
        level.wait(slot)
        return slot, view_of(tensor)

    def unpack(packed: tuple[Slot, View]) -> Tensor:
        slot, view = packed
        data = torch.empty(slot.size, dtype=torch.uint8, device=device)
        level.read(slot, data)
        level.wait(slot)
        return look_into(data, view)

    return saved_tensors_hooks(pack, unpack)


@dataclass
class Kept:
    """A piece of memory that has been offloaded."""

    slot: Slot
    version: int  # of the tensor: an operator that writes into it makes another
    position: int
    users: int = 0  # operators that have saved it and not asked for it again
    data: Tensor | None = None  # on its way back, or there


class Offload:
    """What offload_and_wait lacks. A piece that several operators save is copied once. Weights stay, because they are
    on the device anyway; autocast's bf16 copies of them, which autograd alone keeps after forward, leave. Forward goes
    on while pieces leave, and backward asks for the next ones before it needs them.

    Enter it around a forward; each forward must have its backward before the next.
    """

    def __init__(self, level: PinnedMemory | File, device: torch.device, stays: Iterable[Tensor]) -> None:
        self.level, self.device = level, device
        self.stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.kept: list[Kept] = []
        self.kept_of = WeakIdKeyDictionary()  # by storage: an address may be used again, an object is not
        self.leaving: deque[tuple[Kept, Tensor]] = deque()

    def __enter__(self) -> None:
        assert not any(kept.users for kept in self.kept), "the forward before has had no backward"
        self.kept.clear()
        self.level.start_again()
        self.hooks.__enter__()

    def __exit__(self, *error) -> None:
        self.hooks.__exit__(*error)
        self.let_go(0)

    def pack(self, tensor: Tensor) -> Tensor | tuple[Kept, View]:
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES or storage.data_ptr() in self.stays:
            return tensor
        kept = self.kept_of.get(storage)
        if kept is None or kept.version != tensor._version:
            kept = Kept(self.level.slot(storage.nbytes()), tensor._version, position=len(self.kept))
            self.kept.append(kept)
            self.kept_of[storage] = kept
            self.level.write(kept.slot, bytes_of(tensor))
            self.leaving.append((kept, tensor.detach()))  # its memory must not be used again before it is copied
            self.let_go(MOST_LEAVING)
        kept.users += 1
        return kept, view_of(tensor)

    def let_go(self, still_leaving: int) -> None:
        while len(self.leaving) > still_leaving:
            kept, tensor = self.leaving.popleft()
            self.level.wait(kept.slot)
            # autograd would find this in backward; here it may have spoilt the copy
            assert tensor._version == kept.version, "a tensor that autograd has saved was written over while it left"

    def unpack(self, packed: Tensor | tuple[Kept, View]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, view = packed
        first = max(0, kept.position - MOST_AHEAD)
        for wanted in reversed(self.kept[first : kept.position + 1]):  # backward goes from the last to the first
            self.fetch(wanted)
        self.level.wait(kept.slot)
        data = kept.data
        kept.users -= 1
        if kept.users == 0:
            kept.data = None
        return look_into(data, view)

    def fetch(self, kept: Kept) -> None:
        if kept.data is None and kept.users:
            kept.data = torch.empty(kept.slot.size, dtype=torch.uint8, device=self.device)
            self.level.read(kept.slot, kept.data)


@dataclass
class Version:
    """One way to run the same forward and backward."""

    name: str
    hooks: Callable[[], AbstractContextManager] = nullcontext
    recompute: bool = False  # keep only the input of each block, and compute the rest again in backward


def make_versions(level: PinnedMemory | File, device: torch.device, stays: list[Tensor]) -> list[Version]:
    offload = Offload(level, device, stays)
    versions = [
        Version("on the device"),
        Version("offloaded, waiting", partial(offload_and_wait, level, device)),
        Version("offloaded, overlapped", lambda: offload),
        Version("recomputed", recompute=True),
        Version("recomputed, inputs offloaded", lambda: offload, recompute=True),
    ]
    if device.type == "cuda":
        versions.insert(3, Version(TORCHS_OWN, partial(save_on_cpu, pin_memory=True)))
    return versions


@contextmanager
def recomputing(net: nn.Module) -> Iterator[None]:
    """Inside, a forward keeps only the input of each block."""
    for block in net.model.layers.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    yield
    for block in net.model.layers.values():
        del block.forward  # the instance's; the class has its own


def forward(net: nn.Module, batch: list[Tensor], dtype: str, version: Version) -> Tensor:
    keep_inputs_only = recomputing(net) if version.recompute else nullcontext()
    autocast = torch.autocast(batch[0].device.type, DTYPES[dtype], enabled=dtype != "fp32")
    with version.hooks(), keep_inputs_only, autocast:
        return net(*batch)


def main() -> int:
    began = time.perf_counter()
    args = parse(__doc__)
    runtime.seed(0, deterministic=True)  # or two runs of the same version would differ in their last bits on a GPU
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = runtime.single_device(args.device)
    seq_len = args.seq_len or shapes.recipe(args.model).seq_len
    config = shapes.load_config(args.model, shapes.read_config(args.model).vocab_size, seq_len)
    net = model.build(args.model, config, seed=0, device=device)
    tokens = torch.randint(config.vocab_size, (args.micro_batch_size, seq_len + 1), device=device)
    batch = [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]

    def make_level() -> PinnedMemory | File:
        return PinnedMemory(device) if device.type == "cuda" else File(args.folder)

    level = make_level()
    held = [*net.parameters(), *net.buffers(), *batch]
    run = partial(forward, net, batch, args.dtype)
    updates = compare_updates(net, partial(run, Version("on the device")), make_level())
    rows, memories = compare_versions(net, held, make_versions(level, device, held), run, level)
    conclude(net, batch, args, rows, memories, updates, make_level(), began)
    return 0


if __name__ == "__main__":
    exits.run(main)
