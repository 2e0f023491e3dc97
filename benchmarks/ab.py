"""Compare two versions of one thing in one process, in turns: which is faster on this device?

    laptop    python benchmarks/ab.py
    one GPU   python benchmarks/ab.py --case head --model llama-1b --dtype bf16 --seq-len 2048 \\
                  --rounds 50
    int4      python benchmarks/ab.py --case int4 --model llama-70b

A case is a function that returns its two versions by name, the baseline first, and what both are
called with. For another question write another. Look for: the verdict. A range of ratios on both
sides of 1 shows no difference.

The case int4 needs a GPU. It compares torch's kernels for int4 and int8 with that of
09_inference/quantized.py, for each matrix of a layer, and ends within 150 s.
"""

import dataclasses
import sys
from functools import partial

import _int4
import torch
from _measure import REPO, verdict
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import exits, measure, report
from lm import model, shapes, weights

sys.path.insert(0, str(REPO / "09_inference"))
from _shared import DTYPES, StaticCache, compiled, steps_of


def step(dtype, version, x, *others):
    with torch.autocast(
        x.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16 and x.is_floating_point()
    ):
        y = version(x, *others)
    if y.requires_grad:
        y.float().sum().backward()
    return y.detach()


def block(net, x, dtype):
    rotation = (table[: x.shape[1], None] for table in (net.model.rope_cos, net.model.rope_sin))
    eager = net.model.layers["0"]
    return {"eager": eager, "compiled": torch.compile(eager)}, x, *rotation


def head(net, x, dtype):
    targets = torch.zeros(x.shape[:2].numel(), dtype=torch.int64, device=x.device)
    return {"eager": net.loss, "compiled": torch.compile(net.loss)}, x, targets, "mean"


def attention(net, x, dtype):
    heads = net.config.num_attention_heads
    groups = net.config.num_key_value_heads
    empty = [
        x.new_empty(len(x), n, x.shape[1], net.config.head_dim, dtype=dtype)
        for n in (heads, groups, groups)
    ]
    qkv = [part.normal_().requires_grad_() for part in empty]
    attend = partial(model.attend, is_causal=True, enable_gqa=heads != groups)
    kernels = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION if x.is_cuda else SDPBackend.MATH,
    )
    return {kernel.name: sdpa_kernel(kernel)(attend) for kernel in kernels}, *qkv


def decode(net, x, dtype):
    net.to(dtype).requires_grad_(False)
    cache = StaticCache(net.config, batch=1, length=x.shape[1], dtype=dtype, device=x.device)
    eager = steps_of(net, cache)[1]
    token = torch.zeros(1, dtype=torch.int64, device=x.device)
    return {"eager": eager, "compiled": compiled(net, cache, eager)[0]}, token, token


CASES = {case.__name__: case for case in (block, head, attention, decode)}


def compare(args, device: torch.device) -> tuple[list[dict], list[str]]:
    """Return a row for each case and version, and what was checked."""
    config = shapes.load_config(args.model, 256, args.seq_len)
    config = dataclasses.replace(config, num_hidden_layers=2)
    dtype = DTYPES[args.dtype]  # of the matmuls
    x = torch.randn(
        args.batch_size, args.seq_len, config.hidden_size, device=device, requires_grad=True
    )
    names = [args.case]
    if args.case == "all":
        names = list(CASES)
    rows = []
    checked = []
    for name in names:
        net = weights.build("nano", config, seed=0, device=device)
        versions, *inputs = CASES[name](net, x, dtype)
        steps = {
            version: partial(step, dtype, function, *inputs)
            for version, function in versions.items()
        }
        baseline, other = [work().clone() for work in steps.values()]
        error = measure.relative_error(other, baseline)
        assert error <= (1e-4 if args.dtype == "fp32" else 3e-2), (
            f"{name}: the versions differ by {error:.0e}"
        )
        checked.append(f"{name}: the versions' results differ by {error:.0e}")
        for version, row in measure.seconds_in_turns(steps, device, args.rounds).items():
            speeds = {
                "n": args.rounds,
                "min": 1 / row["max_time_ratio"],
                "max": 1 / row["min_time_ratio"],
            }
            rows.append({"case": name, "version": version, **row, "verdict": verdict(speeds)})
    return rows, checked


def main() -> int:
    cases = ("all", *CASES, "int4")
    sizes = {"model": "nano", "seq_len": 256, "batch_size": 4, "rounds": 10}
    args = report.lesson_flags(__doc__, case=cases, dtype=("fp32", "bf16"), **sizes)
    device = report.start_lesson(args.device)
    columns = {"case": "case", "version": "version"}
    if args.case == "int4":
        args.dtype = "bf16"  # of the activations
        rows, checked = _int4.compare(args.model, device, args.rounds)
        columns["time_us"] = "µs"
        columns["bandwidth_share"] = "of memory bandwidth"
    else:
        rows, checked = compare(args, device)
        columns["seconds"] = "a step"
    columns["time_ratio"] = "time"
    columns["verdict"] = "verdict"
    report.end_lesson(rows, columns=columns, checked=checked, args=args, device=device)
    return 0


if __name__ == "__main__":
    exits.run(main)
