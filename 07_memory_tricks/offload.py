"""Keep what is not needed now in the CPU's memory: activations, or AdamW's state.

An activation lies idle between its forward and its backward, and AdamW's moments between two steps. A GPU can copy
activations to the CPU's memory and back over PCIe or NVLink-C2C while it computes something else. The memory must be
pinned: Linux then never moves it, and the GPU's copy engine works without the CPU. AdamW's state need not come back at
all: gradients come down, the CPU updates its copy of the weights, and new weights go up.

    laptop    python 07_memory_tricks/offload.py
    one GPU   python 07_memory_tricks/offload.py --model llama-124m --seq-len 1024 --batch-size 16 --dtype bf16
    cluster   one process is all it uses: each rank offloads for itself, and the ranks of a node share its memory

On a CPU both places are the same memory: bytes in the host's buffers are counted apart, and no link limits the copies.

Look for: bytes copied down beside bytes on the device; the peak beside that of recomputing; from which sequence length
a link hides the copies (computed). Before: optimizer_memory.py. Next: lora.py.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _offload import Piece, SaveOnCPU, break_even, host_buffer, measure_step

from common import exits, lesson, measure, model, runtime, shapes

SMALLEST_BYTES = 16 * 1024  # below, a copy costs more than it frees
MOST_LEAVING = 4  # pieces on their way down: without a limit, all would wait in the memory that is to be freed
MOST_AHEAD = 4  # pieces that backward asks for before it needs them
STEPS = 4  # of training, whose losses are compared


class AdamWOnHost:
    """AdamW whose weights and moments are in host memory, as in ZeRO-Offload: gradients come down, weights go up."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.masters = [host_buffer(weight).copy_(weight.detach()).requires_grad_() for weight in self.parameters]
        for master, weight in zip(self.masters, self.parameters, strict=True):
            master.grad = host_buffer(weight)
        self.optimizer = torch.optim.AdamW(self.masters, fused=True)
        self.state = self.optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        for master, weight in zip(self.masters, self.parameters, strict=True):
            master.grad.copy_(weight.grad, non_blocking=True)
        runtime.wait_for(self.parameters[0].device)  # the CPU is about to read them
        self.optimizer.step()
        for master, weight in zip(self.masters, self.parameters, strict=True):
            weight.copy_(master, non_blocking=True)


class Offload:
    """What save_on_cpu lacks. A piece that several operators save is copied once. Weights stay: they are on the device
    anyway. Forward goes on while pieces leave, and backward asks for the next ones before it needs them. Autograd calls
    pack with each tensor that it saves, keeps what pack returns, and gives that to unpack. Enter it around a forward,
    of the same shapes each time; each forward must have its backward before the next."""

    def __init__(self, device: torch.device, stays: Iterable[Tensor]) -> None:
        self.device = device
        self.backend = torch.get_device_module(device)  # torch.cuda; in torch.cpu the same names wait for nothing
        self.down, self.up = self.backend.Stream(), self.backend.Stream()  # beside the stream that computes
        self.stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.buffers: list[Tensor] = []  # used again at each step: pinning is slow
        self.pieces: list[Piece] = []
        self.piece_of = WeakIdKeyDictionary()  # by storage: an address may be used again, an object is not
        self.leaving: deque[tuple[Piece, Tensor]] = deque()

    def __enter__(self) -> None:
        assert not any(piece.users for piece in self.pieces), "the forward before has had no backward"
        self.pieces.clear()
        self.piece_of.clear()
        self.hooks.__enter__()

    def __exit__(self, *error) -> None:
        self.hooks.__exit__(*error)
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
        source = tensor.detach().as_strided((numbers,), (1,), 0).view(torch.uint8)  # all that its storage holds
        position = len(self.pieces)
        if position == len(self.buffers):
            self.buffers.append(host_buffer(source))
        piece = Piece(self.buffers[position], tensor._version, position)
        self.pieces.append(piece)
        self.down.wait_stream(self.backend.current_stream())  # source must have been computed
        with self.backend.stream(self.down):
            piece.buffer.copy_(source, non_blocking=True)
            piece.done = self.down.record_event()
        self.leaving.append((piece, tensor.detach()))  # its memory must not be used again before it is copied
        self.let_go(MOST_LEAVING)
        return piece

    def let_go(self, still_leaving: int) -> None:
        while len(self.leaving) > still_leaving:
            piece, tensor = self.leaving.popleft()
            self.backend.current_stream().wait_event(piece.done)  # the CPU does not wait
            # autograd would find this in backward; here it may have spoilt the copy
            assert tensor._version == piece.version, "a tensor that autograd has saved was written over while it left"

    def unpack(self, packed: Tensor | tuple) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        piece, dtype, *view = packed
        first = max(0, piece.position - MOST_AHEAD)
        for needed in reversed(self.pieces[first : piece.position + 1]):  # backward goes from the last to the first
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
        self.up.wait_stream(self.backend.current_stream())  # whose memory this was must have finished with it
        self.up.wait_event(piece.done)
        with self.backend.stream(self.up):
            piece.data.copy_(piece.buffer, non_blocking=True)
            piece.done = self.up.record_event()


class Way(NamedTuple):
    name: str
    hooks: Callable = nullcontext  # around forward
    recompute: bool = False  # keep only the input of each block, and compute the rest again in backward
    make_optimizer: Callable = partial(torch.optim.AdamW, fused=True)


def make_ways(device: torch.device, stays: list[Tensor]) -> list[Way]:
    activations, inputs = Offload(device, stays), Offload(device, stays)
    return [
        Way("nothing"),
        Way("activations, save_on_cpu", hooks=SaveOnCPU),
        Way("activations, overlapped", hooks=lambda: activations),
        Way("nothing, recomputed", recompute=True),
        Way("inputs of blocks, recomputed", hooks=lambda: inputs, recompute=True),
        Way("AdamW's state", make_optimizer=AdamWOnHost),
    ]


def forward(net: nn.Module, way: Way, batch: tuple[Tensor, Tensor], dtype: str, hooks=None) -> Tensor:
    net.zero_grad(set_to_none=True)
    for block in net.model.layers.values():
        block.__dict__.pop("forward", None)  # of the way before; the class has its own
    if way.recompute:
        model.checkpoint_blocks(net, "full")
    with hooks or way.hooks(), torch.autocast(batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16"):
        return net(*batch)


def step(net: nn.Module, way: Way, batch: tuple[Tensor, Tensor], dtype: str, optimizer) -> float:
    loss = forward(net, way, batch, dtype)
    loss.backward()
    optimizer.step()
    return loss.item()


def run(net: nn.Module, way: Way, batch: tuple[Tensor, Tensor], dtype: str, start: dict, exact: list[Tensor]) -> dict:
    """Train from the same weights in this way, and count the bytes of a step."""
    net.load_state_dict(start)
    optimizer = way.make_optimizer(net.parameters())
    forward(net, way, batch, dtype).backward()
    error = measure.relative_error([weight.grad.cpu() for weight in net.parameters()], exact)
    losses = [step(net, way, batch, dtype, optimizer) for _ in range(STEPS)]
    hooks = way.hooks()
    memory = measure_step(partial(forward, net, way, batch, dtype, hooks), optimizer, hooks, net, batch[0].device)
    return {"name": way.name, **memory, "gradient_relative_error": error, "losses": losses, "last_loss": losses[-1]}


def check(rows: list[dict], dtype: str) -> list[str]:
    nothing, torchs, overlapped, recomputed, inputs, state = rows
    for row in rows:  # save_on_cpu makes contiguous copies, and other strides may be summed in another order
        allowed = 0 if row is not torchs else 1e-5 if dtype == "fp32" else 2e-2
        assert row["gradient_relative_error"] <= allowed, f"{row['name']}: gradients differ from those of nothing"
    checked = ["gradients equal those of nothing offloaded: to the bit, those of save_on_cpu within rounding"]
    for without, row in ((nothing, overlapped), (recomputed, inputs)):
        copied, freed = row["copied_down_bytes"], without["after_forward_bytes"] - row["after_forward_bytes"]
        assert freed == copied, f"{row['name']}: {copied:,} bytes were copied down, {freed:,} have left the device"
        checked.append(f"{row['name']}: all {copied:,} bytes that were copied down have left the device after forward")
    more = torchs["copied_down_bytes"] / overlapped["copied_down_bytes"]
    assert more > 1, f"save_on_cpu copies {more:.2f} times as many bytes"
    checked.append(f"save_on_cpu copies {more:.2f} times as many bytes: weights too, and a piece for each of its users")
    held, freed = state["state_bytes"], nothing["after_forward_bytes"] - state["after_forward_bytes"]
    assert freed == held, f"AdamW's state has {held:,} bytes, {freed:,} have left the device"
    difference = max(abs(a / b - 1) for a, b in zip(state["losses"], nothing["losses"], strict=True))
    assert difference <= (1e-6 if dtype == "fp32" else 1e-3), f"AdamW's state: losses differ by {difference:.1e}"
    checked.append(f"AdamW's state: all {freed:,} bytes left; largest difference of {STEPS} losses {difference:.1g}")
    return checked


COLUMNS = {
    "name": "in the CPU's memory",
    "after_forward_bytes": "on the device after forward",
    "peak_bytes": "peak of a step",
    "copied_down_bytes": "copied down",
    "time_ratio": "time",
}


def main() -> int:
    args = lesson.flags(__doc__, model="nano", seq_len=64, batch_size=12, rounds=3, dtype=("fp32", "bf16"))
    config = shapes.load_config(args.model, 256, args.seq_len)
    runtime.seed_all(0, deterministic=True)  # or two runs of one way would differ in their last bits on a GPU
    device = runtime.single_device(args.device)
    net = model.build(args.model, config, seed=0, device=device)
    batch = lesson.one_batch(args.batch_size, args.seq_len, device)
    ways = make_ways(device, [*net.parameters(), *net.buffers(), *batch])
    forward(net, ways[0], batch, args.dtype).backward()
    exact = [weight.grad.cpu() for weight in net.parameters()]
    start = {name: value.cpu().clone() for name, value in net.state_dict().items()}
    rows = [run(net, way, batch, args.dtype, start, exact) for way in ways]

    torch.use_deterministic_algorithms(False)
    optimizers = {make: make(net.parameters()) for make in {way.make_optimizer for way in ways}}
    steps = {way.name: partial(step, net, way, batch, args.dtype, optimizers[way.make_optimizer]) for way in ways}
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    rows = [{**row, **seconds[row["name"]]} for row in rows]
    checked, count = check(rows, args.dtype), shapes.parameter_count(config)
    computed = break_even(device)
    lesson.end(rows, columns=COLUMNS, checked=checked, args=args, device=device, parameters=count, break_even=computed)
    return 0


if __name__ == "__main__":
    exits.run(main)
