"""Activations wait in the CPU's memory until backward needs them.

An activation lies idle between its forward and its backward. A GPU can copy it to the CPU's memory
and back over PCIe or NVLink-C2C while it computes something else. The memory must be pinned: Linux
then never moves it, and the GPU's copy engine works without the CPU. For weights and optimizer
state, take --cpu-offload of 06_fsdp_zero/train_fsdp.py.

    laptop    python 07_memory_tricks/offload.py
    one GPU   python 07_memory_tricks/offload.py --device cuda
              python 07_memory_tricks/offload.py --model llama-124m --seq-len 1024 \\
                  --batch-size 16 --dtype bf16
    cluster   it uses one process only: each rank offloads for itself, and the ranks of a node share
              its memory

On a CPU both places are the same memory. The bytes in the buffers of the host are counted apart,
and no link limits the copies.

What to look at: the bytes copied down and those left on the device; on a GPU the time. Expected on
an H100, where the model is wider and the arithmetic of a step takes at least 41 ms by the data
sheet's 67 TFLOP/s in fp32: about 1.9 GiB of activations leave the GPU. They take at least 31 ms in
each direction over PCIe 5.0, 64 GB/s, so overlapped copies cost little time.
Previous: optimizer_memory.py. Next: lora.py.
"""

import sys
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _offload as helper
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from common import lesson, measure, runtime
from lm import shapes, weights
from lm.stdlib_text import one_batch

SMALLEST_BYTES = 16 * 1024  # a copy of less costs more than it frees
# Pieces on their way down. Without a limit all would wait in the memory that is to be freed.
MOST_LEAVING = 4
MOST_AHEAD = 4  # pieces that backward requests before it needs them
STEPS = 4  # of training, whose losses are compared


def host_buffer(like: Tensor) -> Tensor:
    """Return CPU memory for a copy of this tensor, pinned for a GPU.

    Pinning is slow, so torch keeps pinned memory and uses it again.
    """
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


@dataclass
class Piece:
    """The memory of a saved tensor, or of several that share it."""

    buffer: Tensor  # in host memory
    version: int  # of the tensor: each operator that writes into it increases it
    position: int  # in forward
    users: int = 0  # operators that have saved it and not asked for it again
    data: Tensor | None = None  # on the device again, or on its way
    done: "torch.cuda.Event | None" = None  # of the last copy, down or up


class Offload(saved_tensors_hooks):
    """Offload what autograd saves in the with block.

    Autograd calls pack with each tensor that it saves, keeps what pack returns, and calls unpack
    with that in backward. torch's save_on_cpu does the same, without four things: a piece that
    several operators save is copied once, weights stay, forward goes on while pieces leave, and
    backward requests the next pieces before it needs them.

    Enter it around a forward. Each forward must have its backward before the next.
    """

    def __init__(self, device: torch.device, stays: Iterable[Tensor]) -> None:
        super().__init__(self.pack, self.unpack)
        self.device = device
        # torch.cuda, or torch.cpu, where the same names wait for nothing
        self.backend = torch.get_device_module(device)
        # Copies run in two streams beside the one that computes.
        self.down = self.backend.Stream()
        self.up = self.backend.Stream()
        self.stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self.pieces: list[Piece] = []
        self.piece_of = WeakIdKeyDictionary()  # by storage: addresses are used again, objects not
        self.leaving: deque[tuple[Piece, Tensor]] = deque()
        self.copied_bytes = 0

    def __enter__(self) -> None:
        assert not any(piece.users for piece in self.pieces), "the last forward has had no backward"
        self.pieces.clear()
        self.piece_of.clear()
        super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.let_go(still_leaving=0)

    def pack(self, tensor: Tensor) -> Tensor | tuple:
        """Send the memory of a saved tensor down, unless it is on its way, and return a handle."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES or storage.data_ptr() in self.stays:
            return tensor
        piece = self.piece_of.get(storage)
        if piece is None or piece.version != tensor._version:
            piece = self.send_down(tensor)
            self.piece_of[storage] = piece
        piece.users += 1
        return piece, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def send_down(self, tensor: Tensor) -> Piece:
        """Start the copy of all that the tensor's storage holds."""
        numbers = tensor.untyped_storage().nbytes() // tensor.itemsize
        whole_storage = tensor.detach().as_strided((numbers,), (1,), 0)
        source = whole_storage.view(torch.uint8)
        piece = Piece(host_buffer(source), tensor._version, position=len(self.pieces))
        self.pieces.append(piece)
        self.copied_bytes += source.nbytes
        self.down.wait_stream(self.backend.current_stream())  # source must have been computed
        with self.backend.stream(self.down):
            piece.buffer.copy_(source, non_blocking=True)
            piece.done = self.down.record_event()
        # Keep the tensor: its memory must not be used again before it is copied.
        self.leaving.append((piece, tensor.detach()))
        self.let_go(MOST_LEAVING)
        return piece

    def let_go(self, still_leaving: int) -> None:
        """Free the tensors that have left, until only this many are on their way."""
        while len(self.leaving) > still_leaving:
            piece, tensor = self.leaving.popleft()
            self.backend.current_stream().wait_event(piece.done)  # the CPU does not wait
            # Autograd would find this in backward. Here the copy may be wrong.
            assert tensor._version == piece.version, (
                "a tensor that autograd has saved was written over while it left"
            )

    def unpack(self, packed: Tensor | tuple) -> Tensor:
        """Return the saved tensor, and bring up the next ones."""
        if isinstance(packed, Tensor):
            return packed
        piece, dtype, *view = packed  # shape, strides and offset
        first = max(0, piece.position - MOST_AHEAD)
        # Backward goes from the last piece to the first.
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
        """Start the copy of a piece back to the device."""
        piece.data = torch.empty(piece.buffer.shape, dtype=torch.uint8, device=self.device)
        # The kernels that used this memory before must have ended.
        self.up.wait_stream(self.backend.current_stream())
        self.up.wait_event(piece.done)
        with self.backend.stream(self.up):
            piece.data.copy_(piece.buffer, non_blocking=True)
            piece.done = self.up.record_event()


class SaveOnCPU(save_on_cpu):
    """torch's own hooks, with a count of the bytes that they copy."""

    def __init__(self) -> None:
        super().__init__(pin_memory=True)
        self.copied_bytes = 0
        self.torchs_pack = self.pack_hook
        self.pack_hook = self.count

    def count(self, tensor: Tensor) -> tuple:
        device, copy = self.torchs_pack(tensor)
        self.copied_bytes += copy.nbytes
        return device, copy


METHODS = ("nothing", "activations, save_on_cpu", "activations, overlapped")


def hooks_for(method: str, device: torch.device, stays: Iterable[Tensor]):
    """Return the context in which forward runs."""
    if method == "nothing":
        return nullcontext()
    if method == "activations, save_on_cpu":
        return SaveOnCPU()
    return Offload(device, stays)


def forward(net: nn.Module, batch: tuple[Tensor, Tensor], dtype: str, hooks) -> Tensor:
    """Return the loss of a batch."""
    net.zero_grad(set_to_none=True)
    with hooks, torch.autocast(batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16"):
        return net(*batch)


def step(net: nn.Module, batch: tuple[Tensor, Tensor], dtype: str, hooks, optimizer) -> float:
    """Take one step, and return its loss."""
    loss = forward(net, batch, dtype, hooks)
    loss.backward()
    optimizer.step()
    return loss.item()


def run(
    method: str, net: nn.Module, batch: tuple[Tensor, Tensor], dtype: str, start: dict
) -> tuple[dict, list[Tensor]]:
    """Train from the same weights with a method. Return its row and the last gradients.

    The bytes are of one more step. Without a GPU LiveBytes also counts the memory of the host,
    which is subtracted. There the peak of save_on_cpu is unknown: it frees copies on the way.
    """
    device = batch[0].device
    on_cpu = device.type != "cuda"
    net.load_state_dict(start)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    hooks = hooks_for(method, device, [*net.parameters(), *net.buffers(), *batch])
    losses = [step(net, batch, dtype, hooks, optimizer) for _ in range(STEPS)]

    net.zero_grad(set_to_none=True)
    state = []
    for values in optimizer.state.values():
        state += values.values()
    hooks.copied_bytes = 0
    with measure.LiveBytes([*net.parameters(), *net.buffers(), *state], device) as memory:
        loss = forward(net, batch, dtype, hooks)
        after_forward_bytes = memory.now
        if not on_cpu:
            torch.cuda.synchronize()
            # not memory_allocated, which rounds up
            after_forward_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
        loss.backward()
    on_host_bytes = hooks.copied_bytes if on_cpu else 0
    peak_bytes = memory.peak - on_host_bytes
    if on_cpu and isinstance(hooks, SaveOnCPU):
        peak_bytes = None
    row = {
        "name": method,
        "losses": losses,
        "last_loss": losses[-1],
        "after_forward_bytes": after_forward_bytes - on_host_bytes,
        "peak_bytes": peak_bytes,
        "copied_down_bytes": hooks.copied_bytes,
    }
    return row, [weight.grad.cpu() for weight in net.parameters()]


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "seq_len": 1024, "batch_size": 8},
        model="nano",
        seq_len=64,
        batch_size=12,
        rounds=3,
        dtype=("fp32", "bf16"),
    )
    config = weights.load_config(args.model, 256, args.seq_len)
    # Without this, two runs of one method would differ in their last bits on a GPU.
    runtime.seed_all(0, deterministic=True)
    device = runtime.single_device(args.device)
    net = weights.build(args.model, config, seed=0, device=device)
    batch = one_batch(args.batch_size, args.seq_len, device)
    start = {name: value.cpu().clone() for name, value in net.state_dict().items()}
    rows = []
    for method in METHODS:
        row, gradients = run(method, net, batch, args.dtype, start)
        if method == "nothing":
            exact = gradients
        row["gradient_relative_error"] = measure.relative_error(gradients, exact)
        rows.append(row)

    torch.use_deterministic_algorithms(False)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    stays = [*net.parameters(), *net.buffers(), *batch]
    steps = {}
    for method in METHODS:
        hooks = hooks_for(method, device, stays)
        steps[method] = partial(step, net, batch, args.dtype, hooks, optimizer)
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    for row in rows:
        row |= seconds[row["name"]]
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, args.dtype),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
