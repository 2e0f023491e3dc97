"""A training step captured once and replayed: what launching kernels one by one costs.

In eager mode Python and torch's dispatcher start every operator anew. A GPU that is done before the next kernel arrives
waits. Then a step takes as long as its launches, however small its tensors are: it is launch-bound. A CUDA graph
records all kernels of a step with their addresses, and one call launches them all. So the step must always use the same
memory: inputs are copied into static tensors, and AdamW counts its steps on the GPU (capturable).

    laptop    python 07_memory_tricks/cuda_graphs.py
    one GPU   python 07_memory_tricks/cuda_graphs.py --dtype bf16 --compile
    cluster   one process is all it uses; with DDP or FSDP a graph must capture the collectives, too

On a CPU there is nothing to capture. There the script measures what a graph would save: the same model with the fewest
numbers that its shape allows runs the same operators, and its time is that of Python, dispatcher and autograd alone.

Look for: the share of overhead, which is large for few tokens and vanishes with many. A graph keeps a memory pool of
its own, which nothing else can use. Before: packing.py. Next: 08_model_parallel/.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, measure, report
from common.exits import UserError
from lm import shapes, weights

# libraries allocate their workspaces, and AdamW makes its state: none of it may be captured
WARM_UP_STEPS = 3
COMPARED_STEPS = 5
# relative, of a loss: kernels that add with atomics round each time anew
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}


def training_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor], dtype: str
) -> Tensor:
    """Nothing here may ask the GPU for a number: a graph cannot wait for an answer."""
    # backward then makes the gradients, in the graph's memory
    optimizer.zero_grad(set_to_none=True)
    # a cast weight must not be kept from one step to the next: a replay would not cast it again
    with torch.autocast(
        batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16", cache_enabled=False
    ):
        loss = net(*batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def capture(step: Callable[[], Tensor]) -> tuple["torch.cuda.CUDAGraph", Tensor]:
    """The graph of a step, and the tensor in which each replay leaves its loss. The step runs three times before."""
    side = torch.cuda.Stream()  # the default stream cannot be captured
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # kernels are recorded, and do not run
        loss = step()
    return graph, loss


def replay(
    graph: "torch.cuda.CUDAGraph", static_batch: list[Tensor], loss: Tensor, batch: list[Tensor]
) -> Tensor:
    """One step on another batch."""
    for static, tensor in zip(static_batch, batch, strict=True):
        static.copy_(tensor)
    graph.replay()
    return loss.clone()  # the next replay writes over it


def pool_bytes(graph: "torch.cuda.CUDAGraph") -> int:
    """What the graph keeps from others: the memory of its gradients, activations and temporaries."""
    segments = torch.cuda.memory_snapshot()
    return sum(
        segment["total_size"] for segment in segments if segment["segment_pool_id"] == graph.pool()
    )


def smallest(config: shapes.Config) -> shapes.Config:
    """As many layers and heads, and so the same operators, on the fewest numbers."""
    return dataclasses.replace(
        config,
        hidden_size=2 * config.num_attention_heads,
        head_dim=8,  # the least that attention's kernels on a GPU take without padding
        intermediate_size=2,
        vocab_size=2,
        max_position_embeddings=2,
    )


class Operators(measure.OperatorBytes):
    """Counts the operators that run inside it."""

    count = 0

    def __torch_dispatch__(self, *call):
        self.count += 1
        return super().__torch_dispatch__(*call)


def random_batch(
    config: shapes.Config, sequences: int, seq_len: int, device: torch.device
) -> list[Tensor]:
    tokens = torch.randint(config.vocab_size, (sequences, seq_len + 1), device=device)
    return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]


def make_training(config: shapes.Config, device: torch.device, mode: str | None = None) -> tuple:
    """A model with random weights, and its optimizer. With a mode, compiled: static, or a second batch size would not
    be captured."""
    net = weights.materialize(
        weights.build("nano", config, seed=0, device="meta"), "nano", seed=0, device=device
    )
    optimizer = torch.optim.AdamW(net.parameters(), fused=True, capturable=device.type == "cuda")
    return net if mode is None else torch.compile(net, mode=mode, dynamic=False), optimizer


def losses_of_replays(
    config: shapes.Config, args, device: torch.device
) -> tuple[list[float], list[float]]:
    """Train twice from the same weights on the same batches: each step launched anew, and one step replayed."""
    batches = [
        random_batch(config, args.sequences[-1], args.seq_len, device)
        for _ in range(COMPARED_STEPS)
    ]
    step = partial(training_step, *make_training(config, device))
    for _ in range(WARM_UP_STEPS):  # as capture does
        step(batches[0], args.dtype)
    eager = [step(batch, args.dtype).item() for batch in batches]
    static_batch = [tensor.clone() for tensor in batches[0]]
    graph, loss = capture(
        partial(training_step, *make_training(config, device), static_batch, args.dtype)
    )
    return eager, [replay(graph, static_batch, loss, batch).item() for batch in batches]


def run(config: shapes.Config, args, sequences: int, device: torch.device) -> list[dict]:
    """One batch size: eager, the same operators on tiny tensors, and on a GPU a graph."""
    batch = random_batch(config, sequences, args.seq_len, device)
    tiny_config = smallest(config)
    eager = partial(training_step, *make_training(config, device), batch, args.dtype)
    tiny_batch = random_batch(tiny_config, 1, 1, device)
    tiny = partial(training_step, *make_training(tiny_config, device), tiny_batch, args.dtype)
    steps = {"eager": eager, "eager, tiny model": tiny}
    operators = {}
    for name, step in steps.items():
        step()  # AdamW makes its state in the first
        with Operators() as seen:
            step()
        operators[name] = seen.count
    pool = {}
    if device.type == "cuda":
        graph, _ = capture(
            partial(training_step, *make_training(config, device), batch, args.dtype)
        )
        pool["replayed"] = pool_bytes(graph)
        steps["replayed"] = graph.replay
    if args.compile:
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        compiled_step = partial(
            training_step, *make_training(config, device, mode), batch, args.dtype
        )

        def next_compiled_step() -> Tensor:
            # what the step before has returned may be written over
            torch.compiler.cudagraph_mark_step_begin()
            return compiled_step()

        steps["compiled"] = next_compiled_step
        for _ in range(WARM_UP_STEPS):  # it compiles in the first, and captures in the second
            next_compiled_step()
    found = measure.seconds_in_turns(steps, device, args.rounds)
    counts = {"tokens": batch[0].numel()}
    return [
        {
            "name": name,
            **counts,
            "operators": operators.get(name),
            "graph_pool_bytes": pool.get(name),
            **seconds,
        }
        for name, seconds in found.items()
    ]


def check(
    rows: list[dict], losses: tuple[list[float], list[float]] | None, dtype: str
) -> list[str]:
    counts = {row["operators"] for row in rows if row["operators"]}
    assert len(counts) == 1, f"the tiny model runs other operators: {sorted(counts)}"
    (operators,) = counts
    seconds = min(row["seconds"] for row in rows if row["name"] == "eager, tiny model")
    checked = [
        f"the tiny model runs as many operators as the whole one, {operators:,}: Python, dispatcher and autograd take "
        f"{seconds * 1e3:.1f} ms of a step, {seconds / operators * 1e6:.0f} us for each, what a graph can save at most"
    ]
    if losses is not None:
        difference = max(abs(replayed / eager - 1) for eager, replayed in zip(*losses, strict=True))
        assert difference <= TOLERANCE[dtype], (
            f"replayed losses differ by {difference:.1e}: {losses}"
        )
        checked.append(
            f"the losses of {COMPARED_STEPS} replayed steps are eager's within {difference:.0e}"
        )
    return checked


def main() -> int:
    flags = {"model": "nano", "seq_len": 64, "micro_batch_sizes": "1,4,16", "rounds": 5}
    args = report.lesson_flags(__doc__, **flags, dtype=("fp32", "bf16"), compile=False)
    if not all(part.isdecimal() and int(part) for part in args.micro_batch_sizes.split(",")):
        raise UserError(
            f"--micro-batch-sizes {args.micro_batch_sizes!r}: numbers with commas between, such as 1,4,16"
        )
    args.sequences = sorted({int(part) for part in args.micro_batch_sizes.split(",")})
    config = shapes.load_config(args.model, shapes.read_config(args.model).vocab_size, args.seq_len)
    device = report.start_lesson(args.device)
    losses = losses_of_replays(config, args, device) if device.type == "cuda" else None
    if losses is None:
        print(
            "left out: capture and replay, memory of the graph, mode reduce-overhead: these need a CUDA GPU"
        )
    rows = [row for sequences in args.sequences for row in run(config, args, sequences, device)]
    columns = {"tokens": "tokens", "name": "step", "operators": "operators", "seconds": "time"}
    columns |= {"time_ratio": "of eager", "graph_pool_bytes": "kept by the graph"}
    own = {"parameters": shapes.parameter_count(config), "losses": losses}
    report.end_lesson(
        rows,
        columns=columns,
        checked=check(rows, losses, args.dtype),
        args=args,
        device=device,
        **own,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
