"""Where memory goes in one training step: by category, by module, and at each moment.

Every tensor looks into a piece of memory, its storage. This script sees each piece come and go, and says what it is
for. Parameters, buffers, optimizer state and the batch are known before the step. Gradients are known when backward has
ended. An activation is what autograd saves for the backward pass. Whatever is left is temporary: results that are never
saved, and the gradients of activations. So no byte is guessed, and none is counted twice.

    laptop    python 07_memory_tricks/memory_profile.py
    one GPU   python 07_memory_tricks/memory_profile.py --model llama-124m --seq-len 1024 --dtype bf16
    cluster   one process is all it uses: profile one rank's model and batch on one GPU of the kind that the job gets

On a GPU it also writes runs/memory_snapshot.pickle, the allocator's history of a step, for pytorch.org/memory_viz.

Look for: the peak, which is reached early in backward; activations, the one category that grows with the batch; the
lower rows, which say the same by module. Before: estimate.py. Next: gradient_checkpointing.py.
"""

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from _saved_tensors import is_of_a_weight

from common import exits, measure, report
from lm import shapes, weights
from lm.activation_checkpointing import checkpoint_blocks

CATEGORIES = [
    "parameters",
    "buffers",
    "optimizer state",
    "batch",
    "gradients",
    "weight copies",
    "activations",
]
# the last is what no tensor of ours takes, such as the workspace of cuBLAS
CATEGORIES += ["temporaries", "libraries"]
SNAPSHOT = Path("runs/memory_snapshot.pickle")


@dataclass
class Piece:
    """A piece of memory: its size, what it is for, and the moments between which it is there."""

    size: int
    # in whose forward it is made; of parameters, their gradients and optimizer state, whose it is
    module: str
    born: int
    category: str = "temporaries"
    freed: int | None = None  # None: it is still there


class Profile(measure.OperatorBytes):
    """Sees every operator inside it, and keeps a record of every piece of memory, also of those that are gone."""

    def __init__(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]
    ) -> None:
        super().__init__()
        self.net, self.device = net, batch[0].device
        self.pieces: list[Piece] = []
        self.piece_of = weakref.WeakKeyDictionary()  # by storage
        self.live_bytes: list[int] = []  # at each moment, all pieces that are alive added up anew
        # on CUDA: what all libraries of this process have asked the allocator for
        self.allocated_bytes: list[int] = []
        self.phases: dict[str, int] = {}  # the moment at which each begins
        self.running = [""]  # modules whose forward runs, the innermost last
        for tensor in batch:
            self.mark(tensor, "batch")
        for name, module in net.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
            module.register_forward_hook(lambda *_: self.leave_module())
            for parameter in module.parameters(recurse=False):
                self.mark(parameter, "parameters", name)
                for state in optimizer.state[parameter].values():
                    self.mark(state, "optimizer state", name)
            for buffer in module.buffers(recurse=False):
                self.mark(buffer, "buffers", name)

    def mark(self, tensor: Tensor, category: str, module: str | None = None) -> None:
        """From birth on, the memory of this tensor has been of this category, unless it has another already."""
        self._note(tensor)
        # None for what is not in the device's memory
        piece = self.piece_of.get(tensor.untyped_storage())
        if piece is not None and piece.category == "temporaries":
            piece.category = category
            piece.module = piece.module if module is None else module

    def save(self, tensor: Tensor) -> Tensor:
        """Autograd calls this with what it keeps for backward. Autocast's copy of a weight is no activation."""
        self.mark(tensor, "weight copies" if is_of_a_weight(tensor) else "activations")
        return tensor

    def enter(self, phase: str) -> None:
        """A moment of its own: what the phase before has left."""
        for name, module in self.net.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter.grad is not None:
                    self.mark(parameter.grad, "gradients", name)
        self.phases[phase] = len(self.live_bytes)
        self.next_moment()

    def __torch_dispatch__(self, *call):
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

    def leave_module(self) -> None:
        self.running.pop()


def training_step(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: list[Tensor],
    dtype: str,
    enter: Callable[[str], None],
) -> None:
    """Any training step. `enter` gets the name of the phase that begins."""
    enter("forward")
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16"):
        loss = net(*batch)
    enter("backward")
    loss.backward()
    enter("update")
    optimizer.step()
    optimizer.zero_grad()
    enter("end")


def write_snapshot(step: Callable[[], None]) -> None:
    SNAPSHOT.parent.mkdir(exist_ok=True)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
    step()
    torch.cuda.memory._dump_snapshot(str(SNAPSHOT))
    torch.cuda.memory._record_memory_history(enabled=None)
    print(f"written: {SNAPSHOT} (drop it on https://pytorch.org/memory_viz)")


def timelines(profile: Profile, name_of: Callable[[Piece], str]) -> dict[str, list[int]]:
    """By name, the bytes that are alive at each moment."""
    moments = len(profile.live_bytes)
    changes = defaultdict(lambda: [0] * (moments + 1))
    for piece in profile.pieces:
        changes[name_of(piece)][piece.born] += piece.size
        if piece.freed is not None:
            changes[name_of(piece)][piece.freed] -= piece.size
    return {name: list(accumulate(of_name[:moments])) for name, of_name in changes.items()}


def by_category(profile: Profile) -> dict[str, list[int]]:
    found = timelines(profile, lambda piece: piece.category)
    allocated = profile.allocated_bytes or profile.live_bytes
    found["libraries"] = [
        all_ - live for all_, live in zip(allocated, profile.live_bytes, strict=True)
    ]
    return {category: found.get(category, [0] * len(allocated)) for category in CATEGORIES}


def module_of(piece: Piece) -> str:
    """The same part of all layers has one name, and nothing deeper than a part of a layer has one."""
    parts = ["*" if part.isdecimal() else part for part in piece.module.split(".")[:4]]
    return "in " + (".".join(parts) or "no module")


def run(profile: Profile, found: dict[str, list[int]], moments: dict[str, int]) -> list[dict]:
    """The rows of the table, in bytes at each of these moments: by category, of all, and once more by module."""
    everything = [sum(sizes) for sizes in zip(*found.values(), strict=True)]
    return [
        {"name": name, **{f"{moment} bytes": sizes[at] for moment, at in moments.items()}}
        for name, sizes in {**found, "all": everything, **timelines(profile, module_of)}.items()
        if any(sizes)
    ]


def check(profile: Profile, found: dict[str, list[int]]) -> list[str]:
    in_tensors = [sizes for category, sizes in found.items() if category != "libraries"]
    added = [sum(sizes) for sizes in zip(*in_tensors, strict=True)]
    assert added == profile.live_bytes, "the categories do not add up to what is alive"
    assert min(found["libraries"]) >= 0, "tensors take more than was allocated"

    tensors = [parameter.numel() for parameter in profile.net.parameters()]
    expected = {
        "parameters": ("forward", 4 * sum(tensors)),
        "gradients": ("update", 4 * sum(tensors)),
        "optimizer state": ("forward", 8 * sum(tensors) + 4 * len(tensors)),
    }
    for category, (phase, size) in expected.items():
        measured = found[category][profile.phases[phase]]
        assert measured == size, f"{category}: {measured} bytes, by formula {size}"

    end_of_forward = profile.phases["backward"]
    scalar = found["temporaries"][end_of_forward]
    assert scalar == 4, (
        f"{scalar} bytes are alive at the end of forward that autograd has not saved, and the loss is 4"
    )
    saved = found["activations"][end_of_forward] + found["weight copies"][end_of_forward]
    return [
        f"at each of {len(added):,} moments the categories add up to the bytes that are alive",
        f"of {sum(tensors):,} parameters in {len(tensors)} tensors, weights and gradients take 4 bytes each, "
        "AdamW's state 8 and 4 per tensor (its step count)",
        f"forward leaves {saved:,} bytes that autograd saved for backward, 4 of the loss, and nothing else",
    ]


def main() -> int:
    choices = {"dtype": ("fp32", "bf16"), "checkpointing": ("none", "full")}
    args = report.lesson_flags(__doc__, model="nano", seq_len=64, micro_batch_size=24, **choices)
    device = report.start_lesson(args.device)
    config = shapes.load_config(args.model, shapes.read_config(args.model).vocab_size, args.seq_len)
    net = weights.build(args.model, config, seed=0, device=device)
    checkpoint_blocks(net, args.checkpointing)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    size = (args.micro_batch_size, args.seq_len)
    # any inputs and targets
    batch = [torch.randint(config.vocab_size, size, device=device) for _ in range(2)]

    # AdamW makes its state in the first
    training_step(net, optimizer, batch, args.dtype, enter=lambda phase: None)
    if device.type == "cuda":
        write_snapshot(
            lambda: training_step(net, optimizer, batch, args.dtype, enter=lambda phase: None)
        )
    profile = Profile(net, optimizer, batch)
    with profile, saved_tensors_hooks(profile.save, lambda tensor: tensor):
        training_step(net, optimizer, batch, args.dtype, profile.enter)

    found = by_category(profile)
    totals = [sum(sizes) for sizes in zip(*found.values(), strict=True)]
    peak = totals.index(max(totals))
    peak_phase = [phase for phase, start in profile.phases.items() if start <= peak][-1]
    names = {
        "forward": "before the step",
        "backward": "end of forward",
        "update": "end of backward",
        "end": "end",
    }
    moments = {names[phase]: moment for phase, moment in profile.phases.items()} | {
        f"peak, in {peak_phase}": peak
    }
    moments = dict(sorted(moments.items(), key=lambda item: item[1]))
    own = {
        "parameters": shapes.parameter_count(config),
        "activation_bytes": found["activations"][profile.phases["backward"]],
        "total_bytes": totals[peak],
        "peak_phase": peak_phase,
        "timelines": found,
    }
    columns = {"name": "what", **{f"{moment} bytes": moment for moment in moments}}
    rows = run(profile, found, moments)
    report.end_lesson(
        rows, columns=columns, checked=check(profile, found), args=args, device=device, **own
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
