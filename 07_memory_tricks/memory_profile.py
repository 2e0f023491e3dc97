"""Where memory goes in one training step: by category, by module, and at each moment.

Every tensor looks into a piece of memory, its storage. This script sees each piece come and go, and says what it is
for. Parameters, buffers, optimizer state and the batch are known before the step. A gradient is known when autograd
has accumulated it. An activation is what autograd saves for the backward pass. Whatever is left is temporary: results
that nobody saves, and the gradients of activations. So no byte is guessed, and none is counted twice.

    laptop    python 07_memory_tricks/memory_profile.py
    one GPU   python 07_memory_tricks/memory_profile.py --model llama-124m --micro-batch-size 16 --dtype bf16
    cluster   one process is all it uses: profile one rank's model and batch on one GPU of the kind that the job gets

On a GPU it also asks torch's caching allocator: what it holds and does not use (fragmentation), what
expandable_segments change, and what a limit per process does. runs/memory_profile_snapshot.pickle is for
https://pytorch.org/memory_viz, which shows the line of code behind each piece.

Look for: the peak, which is reached early in backward; activations, the one category that grows with the batch.
Before: estimate.py. Next: gradient_checkpointing.py for activations, optimizer_memory.py for optimizer state.
"""

import sys
import time
import weakref
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _memory_profile_cuda import show_allocator
from _memory_profile_report import CATEGORIES, by_module, plot, print_tables, summarize, timelines

from old import cli, exits, hardware, model, report, runtime, shapes
from old.step_cost import LiveMemory, is_of_a_weight

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Piece:
    """A piece of memory: its size, what it is for, and the operators between which it was there."""

    size: int
    module: str  # in whose forward it was made; of a gradient and of optimizer state, whose parameter it belongs to
    born: int
    category: str = "temporaries"
    freed: int | None = None  # None: it is still there


class Profile(LiveMemory):
    """Sees every operator, and keeps a record of every piece of memory, also of those that are gone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.device = next(net.parameters()).device
        self.pieces: list[Piece] = []
        self.piece_of = weakref.WeakKeyDictionary()  # by storage
        self.live_bytes: list[int] = []  # at each moment, all pieces that are alive added up anew
        self.allocated_bytes: list[int] = []  # on CUDA: what all libraries of this process have asked the allocator for
        self.phases: dict[str, int] = {}  # the moment at which each begins
        self.running = [""]  # modules whose forward runs, the innermost last
        self.hooks = []
        for name, module in net.named_modules():
            self.hooks += [
                module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name)),
                module.register_forward_hook(lambda *_: self._leave_module()),
            ]
        for name, parameter in net.named_parameters():
            note = partial(self._mark_gradient, owner=owner_of(name))
            self.hooks.append(parameter.register_post_accumulate_grad_hook(note))

    def mark(self, tensor: Tensor, category: str, module: str | None = None) -> None:
        """From birth on, the memory of this tensor has been of this category, unless it has another already."""
        self._note(tensor)
        piece = self.piece_of.get(tensor.untyped_storage())  # None for what is not in the device's memory
        if piece is not None and piece.category == "temporaries":
            piece.category = category
            piece.module = piece.module if module is None else module

    def save(self, tensor: Tensor) -> Tensor:
        """Autograd calls this with what it keeps for backward. Autocast's copy of a weight is no activation."""
        self.mark(tensor, "weight copies" if is_of_a_weight(tensor) else "activations")
        return tensor

    def enter(self, phase: str) -> None:
        """A moment of its own: what the phase before has left."""
        self.phases[phase] = len(self.live_bytes)
        self._next_moment()

    def after(self, operator, operands: tuple) -> None:
        self._next_moment()

    def _next_moment(self) -> None:
        self.live_bytes.append(self.bytes_now())
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
            weakref.finalize(storage, self._free, piece).atexit = False

    def _mark_gradient(self, parameter: Tensor, owner: str) -> None:
        self.mark(parameter.grad, "gradients", owner)

    def _free(self, piece: Piece) -> None:
        piece.freed = len(self.live_bytes)

    def _leave_module(self) -> None:
        self.running.pop()


def training_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor], dtype: str, enter: Callable[[str], None]
) -> None:
    """Any training step. `enter` is told which phase begins."""
    enter("forward")
    with torch.autocast(batch[0].device.type, DTYPES[dtype], enabled=dtype != "fp32"):
        loss = net(*batch)
    enter("backward")
    loss.backward()
    enter("update")
    optimizer.step()
    optimizer.zero_grad()
    enter("end")


def profile_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor], dtype: str) -> Profile:
    """One step under the eyes of a Profile, which knows what was there before and what autograd saves."""
    profile = Profile(net)
    for name, parameter in net.named_parameters():
        profile.mark(parameter, "parameters", owner_of(name))
        for state in optimizer.state[parameter].values():
            profile.mark(state, "optimizer state", owner_of(name))
    for name, buffer in net.named_buffers():
        profile.mark(buffer, "buffers", owner_of(name))
    for tensor in batch:
        profile.mark(tensor, "batch")
    with profile, saved_tensors_hooks(profile.save, lambda tensor: tensor):
        training_step(net, optimizer, batch, dtype, profile.enter)
    for hook in profile.hooks:
        hook.remove()
    return profile


def owner_of(name: str) -> str:
    """The module that the parameter or buffer of this name belongs to."""
    return name.rpartition(".")[0]


def check(profile: Profile, found: dict[str, list[int]], net: nn.Module) -> None:
    """Three things that must hold to the byte."""
    in_tensors = [found[category] for category in CATEGORIES if category != "libraries"]
    added = [sum(sizes) for sizes in zip(*in_tensors, strict=True)]
    assert added == profile.live_bytes, "the categories do not add up to what is alive"
    assert min(found["libraries"]) >= 0, "tensors take more than was allocated"
    print(f"checked: at each of {len(added):,} moments the categories add up to the bytes that are alive")

    tensors = [parameter.numel() for parameter in net.parameters()]
    expected = {
        "parameters": ("forward", 4 * sum(tensors)),
        "gradients": ("update", 4 * sum(tensors)),
        "optimizer state": ("forward", 8 * sum(tensors) + 4 * len(tensors)),
    }
    for category, (phase, size) in expected.items():
        measured = found[category][profile.phases[phase]]
        assert measured == size, f"{category}: {measured} bytes, by formula {size}"
    print(
        f"checked: of {sum(tensors):,} parameters in {len(tensors)} tensors, weights and gradients take 4 bytes each, "
        "AdamW's state 8 and 4 per tensor (its step count)"
    )

    end_of_forward = profile.phases["backward"]
    scalar = found["temporaries"][end_of_forward]
    assert scalar == 4, f"{scalar} bytes are alive at the end of forward that autograd has not saved, and the loss is 4"
    saved = found["activations"][end_of_forward] + found["weight copies"][end_of_forward]
    print(f"checked: forward leaves {saved:,} bytes that autograd saved for backward, 4 of the loss, and nothing else")


def parse() -> Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="nano, llama-124m, -1b, -8b, or a path to an HF config.json or folder")
    add("--seq-len", type=cli.positive_int, help="tokens per sequence (default: from the model, nano 64)")
    add("--micro-batch-size", type=cli.positive_int, default=24, help="sequences per forward")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="what matrices are multiplied in; weights stay fp32")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    add("--plot", type=cli.plot_file, default="runs/memory_profile.png", metavar="PNG")
    return parser.parse_args()


def main() -> int:
    began = time.perf_counter()
    args = parse()
    runtime.seed(0, deterministic=False)
    device = runtime.single_device(args.device)
    seq_len = args.seq_len or shapes.recipe(args.model).seq_len
    config = shapes.load_config(args.model, shapes.read_config(args.model).vocab_size, seq_len)
    net = model.build(args.model, config, seed=0, device=device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, (args.micro_batch_size, seq_len + 1), device=device)
    batch = [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]  # what they say does not change what they take
    del tokens  # or it would be there, too, and of no category

    training_step(net, optimizer, batch, args.dtype, enter=lambda phase: None)  # AdamW makes its state in the first
    profile = profile_step(net, optimizer, batch, args.dtype)
    found = timelines(profile)
    rows_of_modules = by_module(profile)
    print_tables(found, profile.phases, rows_of_modules)
    check(profile, found, net)
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": args.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "steps": 2,
        "tokens": 2 * batch[0].numel(),
        **summarize(found, profile.phases),
        "peak_memory_bytes": report.peak_memory_bytes(device),  # on a CPU of the whole process, with its libraries
        "modules": rows_of_modules,
        "plot": plot(found, profile.phases, rows_of_modules, args.plot),
        "allocator": None,
        "left_out": None,
    }
    if device.type == "cuda":
        step = partial(training_step, net, optimizer, batch, args.dtype)
        summary["allocator"] = show_allocator(step, device, args.plot)
    else:
        summary["left_out"] = "the caching allocator's snapshot, fragmentation and limits: these need a CUDA GPU"
        print(f"left out: {summary['left_out']}")
    summary["seconds"] = time.perf_counter() - began
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
