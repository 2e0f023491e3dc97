"""Where memory goes in one training step: by category, by module, and at each moment.

Each tensor refers to a piece of memory, its storage. This script sees each piece come and go, and
knows what it is for:

    Parameters, buffers, optimizer state and the batch are known before the step.
    Gradients are known when backward has ended.
    Activations are what autograd saves for backward.
    Temporaries are the rest: results that are never saved, and the gradients of activations.

So no byte is guessed, and none is counted twice.

    laptop    python 07_memory_tricks/memory_profile.py
    one GPU   python 07_memory_tricks/memory_profile.py --device cuda
              python 07_memory_tricks/memory_profile.py --model llama-124m --dtype bf16
    cluster   it uses one process only: profile one rank's model and batch on one GPU of the job

On a GPU it also writes runs/memory_snapshot.pickle, the allocator's history of a step, for
pytorch.org/memory_viz.

What to look at: the peak, which is reached early in backward; activations, the one category that
grows with the batch; the lower rows, which say the same by module. Expected on an H100, where the
model is wider: 870 MiB of weights, gradients and optimizer state, 16 bytes per parameter,
and about 1.9 GiB of activations for 8,192 tokens.
Previous: estimate.py. Next: gradient_checkpointing.py.
"""

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _memory_profile as helper
import torch
from _saved_tensors import is_of_a_weight
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common import lesson, measure
from lm import shapes, weights
from lm.activation_checkpointing import checkpoint_blocks


@dataclass
class Piece:
    """A piece of memory: its size, what it is for, and the moments at which it is alive."""

    size: int
    # The module whose forward allocates it. Parameters, their gradients and their optimizer state
    # belong to the module that has the parameter.
    module: str
    born: int
    category: str = "temporaries"
    freed: int | None = None  # None while it is alive


class Profile(measure.OperatorBytes):
    """Record every piece of memory that operators allocate in the with block, and when it goes."""

    def __init__(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]
    ) -> None:
        super().__init__()
        self.net = net
        self.device = batch[0].device
        self.pieces: list[Piece] = []
        self.piece_of = weakref.WeakKeyDictionary()  # by storage
        self.live_bytes: list[int] = []  # at each moment, of all pieces that are alive
        self.allocated_bytes: list[int] = []  # on CUDA: what this process has allocated in all
        self.phases: dict[str, int] = {}  # the moment at which each begins
        self.running = [""]  # modules whose forward runs, the innermost last

        for tensor in batch:
            self.mark(tensor, "batch")
        for name, module in net.named_modules():
            module.register_forward_pre_hook(partial(self.enter_module, name))
            module.register_forward_hook(self.leave_module)
            for parameter in module.parameters(recurse=False):
                self.mark(parameter, "parameters", name)
                for state in optimizer.state[parameter].values():
                    self.mark(state, "optimizer state", name)
            for buffer in module.buffers(recurse=False):
                self.mark(buffer, "buffers", name)

    def mark(self, tensor: Tensor, category: str, module: str | None = None) -> None:
        """Set the category of a tensor's memory, unless it has one already.

        The memory keeps its category from its allocation on, so also before this call.
        """
        self._note(tensor)
        piece = self.piece_of.get(tensor.untyped_storage())  # None if it is on another device
        if piece is not None and piece.category == "temporaries":
            piece.category = category
            if module is not None:
                piece.module = module

    def save(self, tensor: Tensor) -> Tensor:
        """Mark what autograd saves for backward. Autocast's copy of a weight is no activation."""
        category = "weight copies" if is_of_a_weight(tensor) else "activations"
        self.mark(tensor, category)
        return tensor

    def enter(self, phase: str) -> None:
        """Begin a phase of the step, with a moment that shows what the last phase has left."""
        for name, module in self.net.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter.grad is not None:
                    self.mark(parameter.grad, "gradients", name)
        self.phases[phase] = len(self.live_bytes)
        self.next_moment()

    def __torch_dispatch__(self, *call):
        # torch calls this in place of every operator.
        result = super().__torch_dispatch__(*call)
        self.next_moment()
        return result

    def next_moment(self) -> None:
        self.live_bytes.append(self.now)
        if self.device.type == "cuda":
            self.allocated_bytes.append(torch.cuda.memory_stats()["requested_bytes.all.current"])

    def _note(self, tensor: Tensor) -> None:
        if tensor.device.type != self.device.type:
            return
        super()._note(tensor)
        storage = tensor.untyped_storage()
        if storage not in self.piece_of:
            piece = Piece(storage.nbytes(), self.running[-1], born=len(self.live_bytes))
            self.pieces.append(piece)
            self.piece_of[storage] = piece
            weakref.finalize(storage, self.free, piece).atexit = False

    def free(self, piece: Piece) -> None:
        piece.freed = len(self.live_bytes)

    def enter_module(self, name: str, *_) -> None:
        self.running.append(name)

    def leave_module(self, *_) -> None:
        self.running.pop()


def do_nothing(phase: str) -> None:
    """Take no notice of a phase."""


def training_step(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: list[Tensor],
    dtype: str,
    enter: Callable[[str], None] = do_nothing,
) -> None:
    """Take one step. `enter` is called with the name of each phase that begins."""
    enter("forward")
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16"):
        loss = net(*batch)
    enter("backward")
    loss.backward()
    enter("update")
    optimizer.step()
    optimizer.zero_grad()
    enter("end")


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "seq_len": 1024, "micro_batch_size": 8},
        model="nano",
        seq_len=64,
        micro_batch_size=24,
        dtype=("fp32", "bf16"),
        checkpointing=("none", "full"),
    )
    device = lesson.start(args.device)
    config = weights.load_config(
        args.model, shapes.read_config(args.model).vocab_size, args.seq_len
    )
    net = weights.build(args.model, config, seed=0, device=device)
    checkpoint_blocks(net, args.checkpointing)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    size = (args.micro_batch_size, args.seq_len)
    batch = [torch.randint(config.vocab_size, size, device=device) for _ in range(2)]

    step = partial(training_step, net, optimizer, batch, args.dtype)
    step()  # AdamW makes its state in the first step
    if device.type == "cuda":
        helper.write_snapshot(step)
    profile = Profile(net, optimizer, batch)
    with profile, saved_tensors_hooks(profile.save, lambda tensor: tensor):
        step(profile.enter)

    bytes_of = helper.by_category(profile)
    peak_bytes, peak, peak_phase = helper.peak_of(profile, bytes_of)
    moments = helper.columns_of(profile, peak, peak_phase)
    columns = {"name": "what"}
    for heading in moments:
        columns[f"{heading} bytes"] = heading
    lesson.end(
        helper.rows_of(profile, bytes_of, moments),
        columns=columns,
        checked=helper.check(profile, bytes_of),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        activation_bytes=bytes_of["activations"][profile.phases["backward"]],
        total_bytes=peak_bytes,
        peak_phase=peak_phase,
        timelines=bytes_of,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
