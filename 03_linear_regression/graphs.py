"""Graphs that change: `if` and `while` in forward, and what torch.compile makes of them.

Eager mode records the operations that ran, anew at each forward. So an `if` on a value and a loop
of any length need nothing special: autograd follows what was taken. torch.compile records the
operations before it knows the values. Where Python decides by a value, it breaks the graph in two.
For another size it compiles again (a recompilation). With fullgraph=True it raises instead of
breaking. torch.cond puts both branches into one graph.

    laptop    python 03_linear_regression/graphs.py
    one GPU   python 03_linear_regression/graphs.py --device cuda
    cluster   one process is all it uses; --compile of 05_ddp/train.py is the same under DDP

What to look at: the lines where graphs break, how many graphs the sizes cost, and the share of
overhead, which falls as a step grows. Expected on an H100 from its data sheet: the large step of
8,192 rows and width 2,048 has 0.82 TFLOP, at least 12 ms in fp32, and nearly no overhead. The small
step has nearly nothing else, and there compiling should pay most.
Previous: train.py. Next: 04_amp/minimal.py.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SIZES = [3, 4, 5, 6, 1, 0]  # 0 and 1 always get graphs of their own
# (rows, width) of a small and of a large step
STEPS = {"cpu": [(4, 16), (256, 512)], "cuda": [(4, 16), (8192, 2048)]}
LAYERS = 4
ROUNDS = 30
WARM_UP = 3

# --- 1. Python decides


class Choosing(nn.Module):
    """Values decide what runs: which branch, and how many passes of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.weight
        if x.sum() > 0:
            y = x * self.weight
        while y.abs().sum() > 1:
            y = y / 2
        return y.sum()


# --- 2. the graph decides


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def subtract(x: Tensor, weight: Tensor) -> Tensor:
    return x - weight


class ChoosingInGraph(Choosing):
    """The same `if` as an operator. Both branches are in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        # a branch must not return one of its arguments
        return torch.cond(x.sum() > 0, multiply, subtract, (x, self.weight)).sum()


# --- gradients, breaks and recompilations

# x, passes of the loop, and the gradients of the branch by hand: for each value of x, then for the
# weight, which is 3.
CASES = [
    ([2.0, -0.5], 3, [3.0, 3.0, 1.5]),  # of the sum of 3x
    ([-1.0, 0.25, -4.0], 4, [1.0, 1.0, 1.0, -3.0]),  # of the sum of x - 3
    ([0.125, 0.125], 0, [3.0, 3.0, 0.25]),
]


def gradients(net: nn.Module, values: list[float]) -> list[float]:
    """Return the gradient for each value, then for the weight."""
    x = torch.tensor(values, requires_grad=True)
    by_values, by_weight = torch.autograd.grad(net(x), (x, net.weight))
    return [*by_values.tolist(), by_weight.item()]


def graph_breaks(net: nn.Module, values: list[float]) -> dict:
    """Return how many graphs Dynamo makes of a forward, and the lines where Python decides."""
    torch._dynamo.reset()
    explanation = torch._dynamo.explain(net)(torch.tensor(values))
    return {
        "values": values,
        "graphs": explanation.graph_count,
        "breaks": explanation.graph_break_count,
        "lines": [reason.user_stack[-1].lineno for reason in explanation.break_reasons],
    }


def double(x: Tensor) -> Tensor:
    return (x * 2).sum()


def graphs_by_size(sizes: list[int], *, dynamic: bool | None, mark: bool = False) -> list[int]:
    """Return how many graphs have been compiled after each size.

    The backend "eager" runs a graph as it is, so no compiler is needed.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(double, backend="eager", dynamic=dynamic)
    graphs = []
    for size in sizes:
        x = torch.ones(size)
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        compiled(x)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs


# --- what compiling can save


def layers(width: int) -> nn.Module:
    blocks = []
    for _ in range(LAYERS):
        blocks += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*blocks)


def time_steps(rows: int, width: int, device: str, *, compiled: bool) -> dict:
    """Time a step eager, compiled, and with width 1. The variants take turns.

    Width 1 runs the same operators on almost no data, so its time is overhead. The times are
    [median, lowest, highest] in seconds.
    """
    torch._dynamo.reset()
    net = layers(width).to(device)
    x = torch.randn(rows, width, device=device)
    steps = {"eager": (net, x), "width 1": (layers(1).to(device), x[:1, :1])}
    if compiled:
        steps["compiled"] = (torch.compile(net, dynamic=False), x)

    seconds = {name: [] for name in steps}
    for round_number in range(WARM_UP + ROUNDS):
        for name, (step, inputs) in steps.items():
            start = time.perf_counter()
            step(inputs).sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_number >= WARM_UP:  # the first rounds compile and allocate
                seconds[name].append(time.perf_counter() - start)

    ranges = {}
    for name, own in seconds.items():
        ranges[name] = [statistics.median(own), min(own), max(own)]
    return {
        "rows": rows,
        "width": width,
        "overhead_share": ranges["width 1"][0] / ranges["eager"][0],
        "seconds": ranges,
    }


# --- four reports, each with its checks


def report_breaks() -> list[dict]:
    net = Choosing()
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    forwards = []
    for values, passes, gradients_of_branch in CASES:
        row = graph_breaks(net, values)
        forwards.append(row)
        places = [f"line {line}, {source[line - 1].strip()}" for line in row["lines"]]
        print(f"{values}: {row['graphs']} graphs, broken at")
        for place in places:
            print(f"  {place}")
        assert row["graphs"] == row["breaks"] + 1, row
        by_hand = [gradient / 2**passes for gradient in gradients_of_branch]
        assert gradients(net, values) == by_hand, row
        assert gradients(torch.compile(net, backend="eager"), values) == by_hand, row
    print("checked: gradients through if and while are exactly those by hand, compiled or not")
    return forwards


def report_one_graph() -> str:
    """Return what fullgraph=True says about an `if` on a value."""
    message = ""
    try:
        compiled = torch.compile(Choosing(), backend="eager", fullgraph=True)
        compiled(torch.tensor(CASES[0][0]))
    except torch._dynamo.exc.Unsupported as error:
        message = str(error).splitlines()[0]
    assert message, "fullgraph=True has compiled an `if` on a value"

    in_one_graph = torch.compile(ChoosingInGraph(), backend="aot_eager", fullgraph=True)
    for values, _, gradients_of_branch in CASES:
        assert gradients(in_one_graph, values) == gradients_of_branch, values
    print(f"checked: fullgraph=True raises at the if ({message})")
    print("checked: torch.cond is one graph with the gradients by hand\n")
    return message


def report_recompilations() -> tuple[dict[str, list[int]], list[int]]:
    graphs = {
        "dynamic=None": graphs_by_size(SIZES, dynamic=None),
        "dynamic=False": graphs_by_size(SIZES, dynamic=False),
        "dynamic=True": graphs_by_size(SIZES, dynamic=True),
        "mark_dynamic": graphs_by_size(SIZES, dynamic=None, mark=True),
    }
    sizes = " | ".join(str(size) for size in SIZES)
    print(f"| graphs so far, at sizes | {sizes} |")
    print("| --- |" + " --: |" * len(SIZES))
    for name, counts in graphs.items():
        cells = " | ".join(str(count) for count in counts)
        print(f"| {name:<23} | {cells} |")
    # the second size compiles the graph for all sizes from 2 on
    assert graphs["dynamic=None"] == [1, 2, 2, 2, 3, 4], graphs
    assert graphs["dynamic=False"] == [1, 2, 3, 4, 5, 6], graphs
    assert graphs["dynamic=True"] == graphs["mark_dynamic"] == [1, 1, 1, 1, 2, 3], graphs

    many = graphs_by_size(list(range(2, 20)), dynamic=False)
    limit = torch._dynamo.config.recompile_limit
    assert many == [min(number, limit) for number in range(1, 19)], many
    print(f"\nchecked: of 18 sizes dynamic=False compiles {limit}, then it warns and runs eager\n")
    return graphs, many


def report_overhead(device: str) -> list[dict]:
    can_compile = device == "cuda" or shutil.which("g++") is not None
    if not can_compile:
        print("left out: compiled steps, which need g++")
    steps = []
    for rows, width in STEPS[device]:
        step = time_steps(rows, width, device, compiled=can_compile)
        steps.append(step)
        for name, (median, low, high) in step["seconds"].items():
            times = f"{median * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})"
            print(f"{rows:,} rows of {width:,}, {name}: {times}")
    small, large = [step["overhead_share"] for step in steps]
    assert small > large, f"the share of overhead does not fall: {small:.1%}, {large:.1%}"
    print(
        f"checked: overhead is {small:.0%} of the small step and {large:.0%} of the large one "
        f"(medians, n={ROUNDS})"
    )
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument(
        "--device", choices=devices, default=devices[0], help="where steps are timed (%(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write what was found as one JSON object"
    )
    args = parser.parse_args()
    if args.json and args.json.is_file() and b'"script"' not in args.json.read_bytes():
        parser.error(f"--json {args.json} exists and is no summary: name another file")

    forwards = report_breaks()
    refused = report_one_graph()
    graphs, many = report_recompilations()
    steps = report_overhead(args.device)
    if args.json:
        summary = {
            "script": "03_linear_regression/graphs.py",
            "torch": torch.__version__,
            "device": args.device,
            "refused": refused,
            "forwards": forwards,
            "graphs": graphs,
            "many_sizes": many,
            "steps": steps,
        }
        args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
