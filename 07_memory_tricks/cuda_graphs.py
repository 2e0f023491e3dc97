"""Capture a training step once as a CUDA graph, and replay it with one launch.

In eager mode Python and torch's dispatcher launch the kernels of a step one by one. If a kernel
ends before the next one is launched, the GPU waits. Then a step takes as long as its launches do,
however little it computes: it is launch-bound. A CUDA graph records all kernels of a step, with the
addresses that they read and write, and one call launches them all. So a step must use the same
memory each time: batches are copied into static tensors, and AdamW counts its steps on the GPU
(capturable=True).

    laptop    python 07_memory_tricks/cuda_graphs.py
    one GPU   python 07_memory_tricks/cuda_graphs.py --device cuda
              python 07_memory_tricks/cuda_graphs.py --dtype bf16 --compile
    cluster   it uses one process only; with DDP or FSDP a graph must capture the collectives, too

A CPU has nothing to capture. There the script measures what a graph could save: the time of the
same operators on the smallest tensors that the shape of the model allows. That is the time of
Python, the dispatcher and autograd alone.

What to look at: the time of the tiny model beside that of eager. It is a large share for few tokens
and a small one for many. A graph keeps its memory for itself. Expected on an H100: a replay is
several times as fast as eager for 256 tokens. For 40,960 tokens it is about as fast, because their
arithmetic takes at least 20 ms by the data sheet's 67 TFLOP/s in fp32.
Previous: packing.py. Next: 08_model_parallel/.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _cuda_graphs as helper
import torch
from torch import Tensor, nn

from common import lesson, measure
from lm import shapes, weights

# In their first steps libraries allocate their workspaces and AdamW creates its state. Neither may
# happen in a capture.
WARM_UP_STEPS = 3
COMPARED_STEPS = 5

# --- 1. capture and replay


def training_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor], dtype: str
) -> Tensor:
    """Train on a batch and return the loss.

    Nothing here may copy a value to the CPU, as .item() does: a graph cannot wait for it.
    """
    optimizer.zero_grad(set_to_none=True)  # so backward creates gradients in the graph's memory
    # cache_enabled=False: a bf16 copy of a weight that is kept from the step before would not be
    # part of the graph, and a replay would not update it.
    autocast = torch.autocast(
        batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16", cache_enabled=False
    )
    with autocast:
        loss = net(*batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def capture(step: Callable[[], Tensor]) -> tuple["torch.cuda.CUDAGraph", Tensor]:
    """Return the graph of a step, and the tensor in which each replay leaves the loss."""
    # Warm up on a side stream, as torch's documentation says: no work of the capture may depend on
    # the default stream. The capture itself has a stream of its own.
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side_stream)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # kernels are recorded, and do not run
        loss = step()
    return graph, loss


def replay(
    graph: "torch.cuda.CUDAGraph", static_batch: list[Tensor], loss: Tensor, batch: list[Tensor]
) -> Tensor:
    """Train on another batch with one launch, and return the loss."""
    for static_tensor, tensor in zip(static_batch, batch, strict=True):
        static_tensor.copy_(tensor)  # the graph reads these addresses
    graph.replay()
    return loss.clone()  # the next replay overwrites `loss`


def losses_of_replays(
    config: shapes.Config, args, device: torch.device
) -> tuple[list[float], list[float]]:
    """Train twice from the same weights on the same batches, and return the losses.

    The first training launches each step anew, and the second replays one graph.
    """
    batches = []
    for _ in range(COMPARED_STEPS):
        batches.append(helper.random_batch(config, args.sequences[-1], args.seq_len, device))

    eager_losses = []
    net, optimizer = make_training(config, device)
    for _ in range(WARM_UP_STEPS):  # as capture does
        training_step(net, optimizer, batches[0], args.dtype)
    for batch in batches:
        loss = training_step(net, optimizer, batch, args.dtype)
        eager_losses.append(loss.item())

    replayed_losses = []
    net, optimizer = make_training(config, device)
    static_batch = [tensor.clone() for tensor in batches[0]]
    step = partial(training_step, net, optimizer, static_batch, args.dtype)
    graph, static_loss = capture(step)
    for batch in batches:
        loss = replay(graph, static_batch, static_loss, batch)
        replayed_losses.append(loss.item())
    return eager_losses, replayed_losses


# --- 2. what the launches of a step cost


def make_training(
    config: shapes.Config, device: torch.device, compile_mode: str | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with random weights and its optimizer. With a mode, compile the model."""
    net = weights.build("nano", config, seed=0, device=device)  # a name that is no folder
    optimizer = torch.optim.AdamW(net.parameters(), fused=True, capturable=device.type == "cuda")
    if compile_mode is not None:
        # Not dynamic: torch.compile captures no graph for shapes that may change.
        net = torch.compile(net, mode=compile_mode, dynamic=False)
    return net, optimizer


def make_step(
    config: shapes.Config, batch: list[Tensor], dtype: str, compile_mode: str | None = None
) -> Callable[[], Tensor]:
    """Return a function that trains a new model on this batch, one step per call."""
    net, optimizer = make_training(config, batch[0].device, compile_mode)
    return partial(training_step, net, optimizer, batch, dtype)


def run(config: shapes.Config, args, sequences: int, device: torch.device) -> list[dict]:
    """Return the rows of one batch size: eager, the tiny model, and on a GPU a graph."""
    batch = helper.random_batch(config, sequences, args.seq_len, device)
    tiny_config = helper.smallest(config)
    tiny_batch = helper.smallest_batch(tiny_config, batch)
    steps = {
        "eager": make_step(config, batch, args.dtype),
        helper.TINY: make_step(tiny_config, tiny_batch, args.dtype),
    }
    operators = {name: helper.count_operators(step) for name, step in steps.items()}
    pool_bytes = {}

    if device.type == "cuda":
        graph, _ = capture(make_step(config, batch, args.dtype))
        steps["replayed"] = graph.replay
        pool_bytes["replayed"] = helper.pool_bytes(graph)
    if args.compile:
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        compiled_step = make_step(config, batch, args.dtype, mode)

        def next_compiled_step() -> Tensor:
            # The graph of this step may overwrite what the last step returned.
            torch.compiler.cudagraph_mark_step_begin()
            return compiled_step()

        for _ in range(WARM_UP_STEPS):  # it compiles in the first, and captures in the second
            next_compiled_step()
        steps["compiled"] = next_compiled_step

    rows = []
    for name, seconds in measure.seconds_in_turns(steps, device, args.rounds).items():
        row = {
            "name": name,
            "tokens": batch[0].numel(),
            "operators": operators.get(name),
            "graph_pool_bytes": pool_bytes.get(name),
        }
        rows.append(row | seconds)
    return rows


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"seq_len": 256, "micro_batch_sizes": "1,16,160"},
        model="nano",
        seq_len=64,
        micro_batch_sizes="1,4,16",
        rounds=5,
        dtype=("fp32", "bf16"),
        compile=False,
    )
    args.sequences = helper.parse_sizes(args.micro_batch_sizes)
    vocab_size = shapes.read_config(args.model).vocab_size
    config = weights.load_config(args.model, vocab_size, args.seq_len)
    device = lesson.start(args.device)

    losses = None
    if device.type == "cuda":
        losses = losses_of_replays(config, args, device)
    else:
        print("left out, because they need a CUDA GPU: capture, replay, mode reduce-overhead")
    rows = []
    for sequences in args.sequences:
        rows += run(config, args, sequences, device)
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, losses, args.dtype),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
        losses=losses,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
