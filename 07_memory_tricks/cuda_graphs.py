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
its own, which nothing else can use. Before: lora.py. Next: kv_cache.py.
"""

import dataclasses
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from old import cli, exits, hardware, model, report, runtime, shapes
from old.step_cost import record_memory, time_in_turns

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP_STEPS = 3  # libraries allocate their workspaces, and AdamW makes its state: none of it may be captured
COMPARED_STEPS = 5
TOLERANCE = {
    "fp32": 1e-4,
    "bf16": 1e-2,
}  # relative, of a loss: kernels that add with atomics round differently each time
ROUNDS = 5


def training_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor], dtype: str) -> Tensor:
    """Nothing here may ask the GPU for a number: a graph cannot wait for an answer."""
    optimizer.zero_grad(set_to_none=True)  # backward then makes the gradients, in the graph's memory
    # a cast weight must not be kept from one step to the next: a replay would not cast it again
    with torch.autocast(batch[0].device.type, DTYPES[dtype], enabled=dtype != "fp32", cache_enabled=False):
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


def replay(graph: "torch.cuda.CUDAGraph", static_batch: list[Tensor], loss: Tensor, batch: list[Tensor]) -> Tensor:
    """One step on another batch."""
    for static, tensor in zip(static_batch, batch, strict=True):
        static.copy_(tensor)
    graph.replay()
    return loss.clone()  # the next replay writes over it


def pool_bytes(graph: "torch.cuda.CUDAGraph") -> int:
    """What the graph keeps from others: the memory of its gradients, activations and temporaries."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == graph.pool())


def make_training(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    on_gpu = next(net.parameters()).is_cuda
    return net, torch.optim.AdamW(net.parameters(), fused=True, capturable=on_gpu)


def random_batch(config: shapes.Config, sequences: int, seq_len: int, device: torch.device) -> list[Tensor]:
    tokens = torch.randint(config.vocab_size, (sequences, seq_len + 1), device=device)
    return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]


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


def count_operators(step: Callable[[], Tensor], device: torch.device) -> int:
    return len(record_memory(step, device).timeline)


def compare_losses(build: Callable[[shapes.Config], nn.Module], config: shapes.Config, args: Namespace) -> dict:
    """Train twice from the same weights on the same batches: each step launched anew, and one step replayed."""
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [random_batch(config, args.micro_batch_sizes[-1], args.seq_len, device) for _ in range(COMPARED_STEPS)]
    step = partial(training_step, *make_training(build(config)))
    for _ in range(WARM_UP_STEPS):  # as capture does
        step(batches[0], args.dtype)
    eager = torch.stack([step(batch, args.dtype) for batch in batches])

    static_batch = [tensor.clone() for tensor in batches[0]]
    graph, loss = capture(partial(training_step, *make_training(build(config)), static_batch, args.dtype))
    replayed = torch.stack([replay(graph, static_batch, loss, batch) for batch in batches])
    difference = ((replayed - eager).abs() / eager).max().item()
    assert difference <= TOLERANCE[args.dtype], f"replayed losses differ by {difference:.1e}: {replayed}, {eager}"
    print(f"checked: the losses of {COMPARED_STEPS} replayed steps are eager's within {difference:.0e}")
    return {"eager": eager.tolist(), "replayed": replayed.tolist(), "largest_relative_difference": difference}


def measure(
    build: Callable[[shapes.Config], nn.Module],
    config: shapes.Config,
    args: Namespace,
    sequences: int,
    device: torch.device,
) -> dict:
    """One batch size: eager, the same operators on tiny tensors, and on a GPU a graph."""
    batch = random_batch(config, sequences, args.seq_len, device)
    eager = partial(training_step, *make_training(build(config)), batch, args.dtype)
    tiny_config = smallest(config)
    tiny_batch = random_batch(tiny_config, 1, 1, device)
    tiny = partial(training_step, *make_training(build(tiny_config)), tiny_batch, args.dtype)
    steps = {"eager": eager, "tiny": tiny}
    for step in steps.values():
        step()  # AdamW makes its state in the first
    operators = count_operators(eager, device)
    assert count_operators(tiny, device) == operators, "the tiny model runs other operators"
    row = {"sequences": sequences, "tokens": batch[0].numel(), "operators": operators}
    if device.type == "cuda":
        graph, _ = capture(partial(training_step, *make_training(build(config)), batch, args.dtype))
        row["graph_pool_bytes"] = pool_bytes(graph)
        steps["replayed"] = graph.replay
    if args.compile:
        mode = "reduce-overhead" if device.type == "cuda" else None
        compiled = torch.compile(
            build(config), mode=mode, dynamic=False
        )  # or the second batch size would not be static
        compiled_step = partial(training_step, *make_training(compiled), batch, args.dtype)

        def next_compiled_step() -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()  # what the step before has returned may be written over
            return compiled_step()

        steps["compiled"] = next_compiled_step
        for _ in range(WARM_UP_STEPS):  # it compiles in the first, and captures in the second
            next_compiled_step()
    seconds = time_in_turns(steps, device, ROUNDS)
    for name, found in seconds.items():
        row[f"{name}_seconds"] = report.spread(found)
    shares = [tiny / eager for tiny, eager in zip(seconds["tiny"], seconds["eager"], strict=True)]
    row["overhead_share"] = report.spread(shares)
    return row


def print_rows(rows: list[dict]) -> None:
    names = [name for name in ("eager", "tiny", "replayed", "compiled") if f"{name}_seconds" in rows[0]]
    table = [["tokens", "operators", *(f"{name}, ms" for name in names), "overhead of eager"]]
    for row in rows:
        share = row["overhead_share"]
        milliseconds = [f"{row[f'{name}_seconds']['median'] * 1e3:,.1f}" for name in names]
        told = f"{share['median']:.0%} ({share['min']:.0%} to {share['max']:.0%})"
        table.append([f"{row['tokens']:,}", f"{row['operators']:,}", *milliseconds, told])
    print(report.table(table) + "\n")


def sizes(text: str) -> list[int]:
    """Numbers of sequences, with commas between them."""
    return sorted({cli.positive_int(part) for part in text.split(",")})


def parse() -> Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="nano, llama-124m, -1b, -8b, or a path to an HF config.json or folder")
    add("--seq-len", type=cli.positive_int, help="tokens per sequence (default: from the model, nano 64)")
    add("--micro-batch-sizes", type=sizes, default="1,4,16", help="sequences per step, with commas between them")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="what matrices are multiplied in; weights stay fp32")
    add("--compile", action="store_true", help="torch.compile beside it, on CUDA with mode reduce-overhead")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    return parser.parse_args()


def main() -> int:
    began = time.perf_counter()
    args = parse()
    runtime.seed(0, deterministic=False)
    device = runtime.single_device(args.device)
    args.seq_len = args.seq_len or shapes.recipe(args.model).seq_len
    config = shapes.load_config(args.model, shapes.read_config(args.model).vocab_size, args.seq_len)

    def build(of_shape: shapes.Config) -> nn.Module:
        net = model.build("nano", of_shape, seed=0, device="meta")
        return model.materialize(net, "nano", seed=0, device=device)  # random weights, whatever --model is

    losses, left_out = None, None
    if device.type == "cuda":
        losses = compare_losses(build, config, args)
    rows = [measure(build, config, args, sequences, device) for sequences in args.micro_batch_sizes]
    print_rows(rows)
    tiny_seconds = min(row["tiny_seconds"]["median"] for row in rows)
    operators = rows[0]["operators"]
    print(
        f"measured: Python, dispatcher and autograd take {tiny_seconds * 1e3:.1f} ms of a step, "
        f"{tiny_seconds / operators * 1e6:.0f} us for each of {operators:,} operators: what a graph can save at most"
    )
    if device.type == "cuda":
        print(
            f"measured: the graph of the largest batch keeps {rows[-1]['graph_pool_bytes'] / 2**20:,.1f} MiB to itself"
        )
    print("checked: the tiny model runs as many operators as the whole one")
    if device.type != "cuda":
        left_out = "capture and replay, memory of the graph, mode reduce-overhead: these need a CUDA GPU"
        print(f"left out: {left_out}")
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": args.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "rows": rows,
        "losses": losses,
        "left_out": left_out,
        "seconds": time.perf_counter() - began,
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
