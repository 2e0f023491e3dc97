"""Activations that backward needs only later wait in the CPU's memory.

An activation lies idle between its forward and its backward. A GPU can copy it to the CPU's memory and back over PCIe
or NVLink-C2C while it computes something else. The memory must be pinned: Linux then never moves it, and the GPU's copy
engine works without the CPU. (For weights and optimizer state: --cpu-offload of 06_fsdp_zero/train_fsdp.py.)

    laptop    python 07_memory_tricks/offload.py
    one GPU   python 07_memory_tricks/offload.py --model llama-124m --seq-len 1024 --batch-size 16 --dtype bf16
    cluster   one process is all it uses: each rank offloads for itself, and the ranks of a node share its memory

On a CPU both places are the same memory: bytes in the host's buffers are counted apart, and no link limits the copies.

Look for: bytes copied down and left on the device; a GPU's time. Before: optimizer_memory.py. Next: lora.py.
"""

import sys
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, measure, report, runtime
from lm import shapes, weights
from lm.data import one_batch

SMALLEST_BYTES = 16 * 1024  # below, a copy costs more than it frees
# pieces on their way down: without a limit, all would wait in the memory that is to be freed
MOST_LEAVING = 4
MOST_AHEAD = 4  # pieces that backward asks for before it needs them
STEPS = 4  # of training, whose losses are compared


def host_buffer(like: Tensor) -> Tensor:
    """Memory of the CPU for a copy of this tensor, pinned for a GPU; torch uses it again, since pinning is slow."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


@dataclass
class Piece:
    """The memory of a saved tensor, or of several that look into the same."""

    buffer: Tensor  # in host memory
    version: int  # of the tensor: an operator that writes into it makes another
    position: int  # in forward
    users: int = 0  # operators that have saved it and not asked for it again
    data: Tensor | None = None  # on the device again, or on its way
    done: "torch.cuda.Event | None" = None  # of the last copy, down or up


class Offload(saved_tensors_hooks):
    """Autograd calls pack with each tensor that it saves, keeps what pack returns, and gives that to unpack. What
    torch's save_on_cpu lacks: a piece that several operators save is copied once, weights stay, forward goes on while
    pieces leave, and backward asks for the next ones before it needs them. Enter it around a forward; each forward must
    have its backward before the next."""

    def __init__(self, device: torch.device, stays: Iterable[Tensor]) -> None:
        super().__init__(self.pack, self.unpack)
        self.device = device
        # torch.cuda; in torch.cpu the same names wait for nothing
        self.backend = torch.get_device_module(device)
        # beside the stream that computes
        self.down, self.up = self.backend.Stream(), self.backend.Stream()
        self.stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self.pieces: list[Piece] = []
        # by storage: an address may be used again, an object is not
        self.piece_of = WeakIdKeyDictionary()
        self.leaving: deque[tuple[Piece, Tensor]] = deque()
        self.copied_bytes = 0

    def __enter__(self) -> None:
        assert not any(piece.users for piece in self.pieces), (
            "the forward before has had no backward"
        )
        self.pieces.clear()
        self.piece_of.clear()
        super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.let_go(still_leaving=0)

    def pack(self, tensor: Tensor) -> Tensor | tuple:
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES or storage.data_ptr() in self.stays:
            return tensor
        piece = self.piece_of.get(storage)
        if piece is None or piece.version != tensor._version:
            piece = self.piece_of[storage] = self.send_down(tensor)
        piece.users += 1
        return piece, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def send_down(self, tensor: Tensor) -> Piece:
        numbers = tensor.untyped_storage().nbytes() // tensor.itemsize
        # all that its storage holds
        source = tensor.detach().as_strided((numbers,), (1,), 0).view(torch.uint8)
        piece = Piece(host_buffer(source), tensor._version, position=len(self.pieces))
        self.pieces.append(piece)
        self.copied_bytes += source.nbytes
        self.down.wait_stream(self.backend.current_stream())  # source must have been computed
        with self.backend.stream(self.down):
            piece.buffer.copy_(source, non_blocking=True)
            piece.done = self.down.record_event()
        # its memory must not be used again before it is copied
        self.leaving.append((piece, tensor.detach()))
        self.let_go(MOST_LEAVING)
        return piece

    def let_go(self, still_leaving: int) -> None:
        while len(self.leaving) > still_leaving:
            piece, tensor = self.leaving.popleft()
            self.backend.current_stream().wait_event(piece.done)  # the CPU does not wait
            # autograd would find this in backward; here it may have spoilt the copy
            assert tensor._version == piece.version, (
                "a tensor that autograd has saved was written over while it left"
            )

    def unpack(self, packed: Tensor | tuple) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        piece, dtype, *view = packed
        first = max(0, piece.position - MOST_AHEAD)
        # backward goes from the last to the first
        for needed in reversed(self.pieces[first : piece.position + 1]):
            if needed.data is None and needed.users:
                self.bring_up(needed)
        self.backend.current_stream().wait_event(piece.done)
        data = piece.data
        piece.users -= 1
        if piece.users == 0:
            piece.data = None
        return data.view(dtype).as_strided(*view)

    def bring_up(self, piece: Piece) -> None:
        piece.data = torch.empty(piece.buffer.shape, dtype=torch.uint8, device=self.device)
        # whose memory this was must have finished with it
        self.up.wait_stream(self.backend.current_stream())
        self.up.wait_event(piece.done)
        with self.backend.stream(self.up):
            piece.data.copy_(piece.buffer, non_blocking=True)
            piece.done = self.up.record_event()


class SaveOnCPU(save_on_cpu):
    """torch's own, which counts what it copies."""

    def __init__(self) -> None:
        super().__init__(pin_memory=True)
        self.copied_bytes, self.torchs_pack, self.pack_hook = 0, self.pack_hook, self.count

    def count(self, tensor: Tensor) -> tuple:
        device, copy = self.torchs_pack(tensor)
        self.copied_bytes += copy.nbytes
        return device, copy


WAYS = {
    "nothing": lambda device, stays: nullcontext(),
    "activations, save_on_cpu": lambda device, stays: SaveOnCPU(),
    "activations, overlapped": Offload,
}


def forward(net: nn.Module, batch: tuple[Tensor, Tensor], dtype: str, hooks) -> Tensor:
    net.zero_grad(set_to_none=True)
    with hooks, torch.autocast(batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16"):
        return net(*batch)


def step(net: nn.Module, batch: tuple[Tensor, Tensor], dtype: str, hooks, optimizer) -> float:
    loss = forward(net, batch, dtype, hooks)
    loss.backward()
    optimizer.step()
    return loss.item()


def run(way: str, net: nn.Module, batch: tuple[Tensor, Tensor], dtype: str, start: dict) -> dict:
    """Train from the same weights in this way, and count the bytes of one more step. Without a GPU the host's memory is
    among what LiveBytes counts, and is taken off; save_on_cpu frees its copies on the way, so its peak is unknown."""
    device = batch[0].device
    net.load_state_dict(start)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    hooks = WAYS[way](device, [*net.parameters(), *net.buffers(), *batch])
    losses = [step(net, batch, dtype, hooks, optimizer) for _ in range(STEPS)]

    net.zero_grad(set_to_none=True)
    state = [
        tensor for of_parameter in optimizer.state.values() for tensor in of_parameter.values()
    ]
    hooks.copied_bytes = 0
    with measure.LiveBytes([*net.parameters(), *net.buffers(), *state], device) as memory:
        loss = forward(net, batch, dtype, hooks)
        after_forward_bytes = memory.now
        if device.type == "cuda":
            torch.cuda.synchronize()
            # the allocator rounds up
            after_forward_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
        loss.backward()
    on_host_bytes = 0 if device.type == "cuda" else hooks.copied_bytes
    return {
        "name": way,
        "gradients": [weight.grad.cpu() for weight in net.parameters()],
        "losses": losses,
        "last_loss": losses[-1],
        "after_forward_bytes": after_forward_bytes - on_host_bytes,
        "peak_bytes": None
        if on_host_bytes and isinstance(hooks, SaveOnCPU)
        else memory.peak - on_host_bytes,
        "copied_down_bytes": hooks.copied_bytes,
    }


def check(rows: list[dict], dtype: str) -> list[str]:
    nothing, torchs, overlapped = rows
    assert overlapped["gradient_relative_error"] == 0, (
        "overlapped: gradients differ from those of nothing"
    )
    assert overlapped["losses"] == nothing["losses"], (
        "overlapped: losses differ from those of nothing"
    )
    # save_on_cpu makes contiguous copies, and other strides may be summed in another order
    assert torchs["gradient_relative_error"] <= (1e-5 if dtype == "fp32" else 2e-2), (
        "save_on_cpu: other gradients"
    )
    copied, freed = (
        overlapped["copied_down_bytes"],
        nothing["after_forward_bytes"] - overlapped["after_forward_bytes"],
    )
    assert freed == copied, (
        f"overlapped: {copied:,} bytes were copied down, {freed:,} have left the device"
    )
    more = torchs["copied_down_bytes"] / copied
    assert more > 1, f"save_on_cpu copies {more:.2f} times as many bytes"
    return [
        "gradients equal those of nothing offloaded: to the bit, those of save_on_cpu within rounding",
        f"activations, overlapped: all {copied:,} bytes that were copied down have left the device after forward",
        f"save_on_cpu copies {more:.2f} times as many bytes: weights too, and a piece for each of its users",
    ]


def main() -> int:
    args = report.lesson_flags(
        __doc__, model="nano", seq_len=64, batch_size=12, rounds=3, dtype=("fp32", "bf16")
    )
    config = shapes.load_config(args.model, 256, args.seq_len)
    # or two runs of one way would differ in their last bits on a GPU
    runtime.seed_all(0, deterministic=True)
    device = runtime.single_device(args.device)
    net = weights.build(args.model, config, seed=0, device=device)
    batch = one_batch(args.batch_size, args.seq_len, device)
    start = {name: value.cpu().clone() for name, value in net.state_dict().items()}
    rows = [run(way, net, batch, args.dtype, start) for way in WAYS]
    gradients = [row.pop("gradients") for row in rows]
    for row, found in zip(rows, gradients, strict=True):
        row["gradient_relative_error"] = measure.relative_error(found, gradients[0])

    torch.use_deterministic_algorithms(False)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    stays = [*net.parameters(), *net.buffers(), *batch]
    steps = {
        way: partial(step, net, batch, args.dtype, WAYS[way](device, stays), optimizer)
        for way in WAYS
    }
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    rows = [{**row, **seconds[row["name"]]} for row in rows]
    columns = {
        "name": "in the CPU's memory",
        "after_forward_bytes": "on the device after forward",
        "peak_bytes": "peak of a step",
        "copied_down_bytes": "copied down",
        "time_ratio": "time",
    }
    count = shapes.parameter_count(config)
    report.end_lesson(
        rows,
        columns=columns,
        checked=check(rows, args.dtype),
        args=args,
        device=device,
        parameters=count,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
