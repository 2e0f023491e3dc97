"""Graphs that change: Python decides while the module runs, autograd follows, and torch.compile has to cut.

Eager mode records what has run, anew at each forward. So an `if` on a value and a loop of any length need nothing
special: the gradient is that of what was taken. torch.compile records before it knows the values. It cuts the graph
where Python needs one (a break), compiles again for another size (a recompilation), or refuses (fullgraph=True);
torch.cond has both branches in one graph.

    laptop    python 03_linear_regression/graphs.py
    one GPU   python 03_linear_regression/graphs.py --device cuda
    cluster   one process is all it uses; --compile of 05_ddp/train.py is the same under DDP

Look for: the lines where graphs break; how many graphs sizes cost; the share of overhead, which falls as a step grows.
Before: train.py. Next: 04_amp/minimal.py.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

# x, passes of the loop, and by hand the gradients of the branch: by each value of x, and by the
# weight 3
CASES = [
    ([2.0, -0.5], 3, [3.0, 3.0, 1.5]),  # of the sum of 3x
    ([-1.0, 0.25, -4.0], 4, [1.0, 1.0, 1.0, -3.0]),  # of the sum of x - 3
    ([0.125, 0.125], 0, [3.0, 3.0, 0.25]),
]
SIZES = [3, 4, 5, 6, 1, 0]  # 0 and 1 are always graphs of their own
STEPS = [(4, 16), (256, 512)]  # rows and width of a small and of a large step
LAYERS, ROUNDS, WARM_UP = 4, 30, 3


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


class ChoosingInGraph(Choosing):
    """The same `if` as an operator: both branches are in the graph. None may return its argument as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda x, w: x * w, lambda x, w: x - w, (x, self.weight)
        ).sum()


def gradients(net: nn.Module, values: list[float]) -> list[float]:
    """Of each value, then of the weight."""
    x = torch.tensor(values, requires_grad=True)
    by_values, by_weight = torch.autograd.grad(net(x), (x, net.weight))
    return [*by_values.tolist(), by_weight.item()]


def breaks(net: nn.Module, values: list[float]) -> dict:
    """What Dynamo makes of a forward: graphs, and the lines at which Python decides between two of them."""
    torch._dynamo.reset()
    found = torch._dynamo.explain(net)(torch.tensor(values))
    lines = [reason.user_stack[-1].lineno for reason in found.break_reasons]
    return {
        "values": values,
        "graphs": found.graph_count,
        "breaks": found.graph_break_count,
        "lines": lines,
    }


def graphs_by_size(sizes: list[int], *, dynamic: bool | None, mark: bool = False) -> list[int]:
    """How many graphs there are after each size. The backend "eager" runs a graph as it is: no compiler is needed."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    double = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=dynamic)
    graphs = []
    for size in sizes:
        x = torch.ones(size)
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        double(x)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs


def layers(width: int) -> nn.Module:
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*blocks)


def time_steps(rows: int, width: int, device: str, *, compiled: bool) -> dict:
    """[median, lowest, highest] seconds of a step, in turns. Width 1 has the same operators: its time is overhead."""
    torch._dynamo.reset()
    net, x = layers(width).to(device), torch.randn(rows, width, device=device)
    steps = {"eager": (net, x), "width 1": (layers(1).to(device), x[:1, :1])}
    if compiled:
        steps["compiled"] = torch.compile(net, dynamic=False), x
    seconds = {name: [] for name in steps}
    for _ in range(WARM_UP + ROUNDS):
        for name, (step, inputs) in steps.items():
            start = time.perf_counter()
            step(inputs).sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    # the first ones compile and allocate
    timed = {name: own[WARM_UP:] for name, own in seconds.items()}
    found = {name: [statistics.median(own), min(own), max(own)] for name, own in timed.items()}
    return {
        "rows": rows,
        "width": width,
        "overhead_share": found["width 1"][0] / found["eager"][0],
        "seconds": found,
    }


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

    net, source = Choosing(), Path(__file__).read_text().splitlines()
    forwards = [breaks(net, values) for values, _, _ in CASES]
    for row, (values, passes, of_branch) in zip(forwards, CASES, strict=True):
        cuts = "; ".join(f"line {line}, {source[line - 1].strip()}" for line in row["lines"])
        print(f"{values}: {row['graphs']} graphs, cut at {cuts}")
        assert row["graphs"] == row["breaks"] + 1, row
        for way in (net, torch.compile(net, backend="eager")):
            assert gradients(way, values) == [each / 2**passes for each in of_branch], row
    print(
        "checked: autograd follows if and while, compiled or not: its gradients are those by hand, to the bit"
    )
    refused = ""
    try:
        torch.compile(net, backend="eager", fullgraph=True)(torch.tensor(CASES[0][0]))
    except torch._dynamo.exc.Unsupported as error:
        refused = str(error).splitlines()[0]
    assert refused, "fullgraph=True has compiled an `if` on a value"
    in_one_graph = torch.compile(ChoosingInGraph(), backend="aot_eager", fullgraph=True)
    for values, _, of_branch in CASES:
        assert gradients(in_one_graph, values) == of_branch, values
    print(
        f"checked: fullgraph=True refuses the if ({refused}); torch.cond is one graph with the gradients by hand\n"
    )

    graphs = {
        f"dynamic={dynamic}": graphs_by_size(SIZES, dynamic=dynamic)
        for dynamic in (None, False, True)
    }
    graphs["mark_dynamic"] = graphs_by_size(SIZES, dynamic=None, mark=True)
    print(
        f"| graphs so far, at sizes | {' | '.join(map(str, SIZES))} |\n| --- |{' --: |' * len(SIZES)}"
    )
    for name, counts in graphs.items():
        print(f"| {name:<23} | {' | '.join(map(str, counts))} |")
    many = graphs_by_size(list(range(2, 20)), dynamic=False)
    # the second size makes the graph of all from 2 on
    assert graphs["dynamic=None"] == [1, 2, 2, 2, 3, 4], graphs
    assert graphs["dynamic=False"] == [1, 2, 3, 4, 5, 6], graphs
    assert graphs["dynamic=True"] == graphs["mark_dynamic"] == [1, 1, 1, 1, 2, 3], graphs
    assert many == [1, 2, 3, 4, 5, 6, 7] + [8] * 11, many  # torch._dynamo.config.recompile_limit
    print("\nchecked: of 18 sizes dynamic=False compiles 8, then it warns and runs eager")

    can_compile = args.device == "cuda" or shutil.which("g++") is not None
    print("" if can_compile else "left out: compiled steps, which need g++")
    steps = [time_steps(rows, width, args.device, compiled=can_compile) for rows, width in STEPS]
    for row in steps:
        for name, (middle, low, high) in row["seconds"].items():
            times = f"{middle * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})"
            print(f"{row['rows']} rows of {row['width']}, {name}: {times}")
    small, large = (row["overhead_share"] for row in steps)
    assert small > large, f"the share of overhead does not fall: {small:.1%}, {large:.1%}"
    print(
        f"checked: overhead is {small:.0%} of the small step and {large:.0%} of the large one (medians, n={ROUNDS})"
    )
    if args.json:
        summary = {
            "script": "03_linear_regression/graphs.py",
            "torch": torch.__version__,
            "device": args.device,
        }
        summary |= {
            "refused": refused,
            "forwards": forwards,
            "graphs": graphs,
            "many_sizes": many,
            "steps": steps,
        }
        args.json.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
