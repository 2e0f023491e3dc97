"""The reporting side of tensor_parallel.py: is each way equal to one process, and does it send what it must?"""

import argparse
import time

import torch
import torch.distributed as dist
from _tensor_parallel_count import (
    assert_equal,
    expect,
    expect_after_backward,
    held_parameters,
)

from old import cli, hardware, report, runtime
from old.exits import UserError
from old.shapes import Config, parameter_count

TOLERANCE = 1e-5  # relative; what another order of the same sums in fp32 may change in 10 steps


def check_sizes(args: argparse.Namespace, config: Config, ranks: int) -> None:
    """UserError for what so many ranks cannot cut. Channels and vocabulary may be cut into unequal parts."""
    heads = config.num_key_value_heads  # with each of them goes its group of query heads
    if heads % ranks:
        *fewer, most = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        fitting = f"{', '.join(fewer)} or {most}" if fewer else most
        raise UserError(
            f"--model {args.model}: {ranks} ranks do not divide its {heads} key-value head(s): start {fitting}"
        )
    if args.seq_len % ranks:
        fitting = cli.nearest_multiples(args.seq_len, ranks, config.max_position_embeddings)
        raise UserError(f"--seq-len {args.seq_len}: {ranks} ranks do not divide it into equal parts: use {fitting}")


def describe(way, config: Config, args: argparse.Namespace) -> dict:
    """A way after its last step, as --json has it. Every rank must call it."""
    seen = way.seen
    ranks = dist.get_world_size()
    tokens = args.micro_batch_size * args.seq_len
    expected = expect(way.name, config, tokens, args.global_batch_size // args.micro_batch_size, ranks)
    after_backward = expect_after_backward(way.name, config) or seen.traffic_after_backward[0]
    for step in range(args.steps):
        assert_equal(f"{way.name}: traffic of forward and backward", seen.traffic[step], expected)
        assert_equal(f"{way.name}: traffic after backward", seen.traffic_after_backward[step], after_backward)
    held = runtime.gather(held_parameters(way.net.parameters()))
    errors = torch.tensor(runtime.gather(torch.stack(seen.gradient_errors).tolist()))
    return {
        "way": way.name,
        "parameters_per_rank": held,
        "losses": torch.stack(seen.losses).tolist(),
        "gradient_norms": torch.stack(seen.gradient_norms).tolist(),
        "gradient_errors": errors.amax(0).tolist(),
        "all_reduces_per_step": expected.calls["all_reduces"],
        "reduce_scatters_per_step": expected.calls["reduce_scatters"],
        "all_gathers_per_step": expected.calls["all_gathers"],
        "bytes_sent_per_rank_per_step": expected.bytes_sent(ranks),
        "calls_after_backward_per_step": after_backward.calls.total(),
        "bytes_sent_after_backward_per_rank_per_step": after_backward.bytes_sent(ranks),
    }


def check(rows: list[dict], config: Config, ranks: int) -> None:
    """What the script teaches; fails where it does not hold."""
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size  # on each rank whole
    cut = parameter_count(config) - norms
    for row in rows[1:]:
        held = sum(row["parameters_per_rank"])
        assert held == cut + ranks * norms, f"{row['way']}: {held:,} weights on all ranks, not {cut + ranks * norms:,}"
    print("checked: the ranks together hold each cut weight once; calls and bytes of each step are the formula's")
    one_process, *others = rows
    differences = {
        "losses": [relative_differences(row["losses"], one_process["losses"]) for row in others],
        "gradient norms": [
            relative_differences(row["gradient_norms"], one_process["gradient_norms"]) for row in others
        ],
        "gradients": [row["gradient_errors"] for row in others],
    }
    for what, of_ways in differences.items():
        for row, found in zip(others, of_ways, strict=True):
            worst = torch.tensor(found).max().item()  # NaN if any is, which Python's max may drop
            assert worst <= TOLERANCE, (
                f"{row['way']}: {what} differ from one process by {worst:.0e}: that is no rounding"
            )
    told = ", ".join(f"{what} {max(map(max, of_ways)):.0e}" for what, of_ways in differences.items())
    steps = len(one_process["losses"])
    print(f"checked: each way equals one process over {steps} steps (tolerance {TOLERANCE:g}): {told}")


def relative_differences(ours: list[float], theirs: list[float]) -> list[float]:
    return [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]


def table(rows: list[dict]) -> str:
    lines = [["way", "weights per rank", "all-reduces", "reduce-scatters", "all-gathers", "sent", "after backward"]]
    for row in rows:
        after_backward = row["bytes_sent_after_backward_per_rank_per_step"] / 2**10
        lines.append(
            [
                row["way"],
                f"{max(row['parameters_per_rank']):,}",
                *(str(row[f"{name}_per_step"]) for name in ("all_reduces", "reduce_scatters", "all_gathers")),
                f"{row['bytes_sent_per_rank_per_step'] / 2**20:.2f} MiB",
                f"{row['calls_after_backward_per_step']} calls, {after_backward:.1f} KiB",
            ]
        )
    return report.table(lines)


def conclude(ways: list, args: argparse.Namespace, config: Config, device: torch.device, began: float) -> None:
    """Say what was measured, then whether what the script teaches holds. Every rank must call it."""
    rows = [describe(way, config, args) for way in ways]
    if not runtime.is_rank0():
        return
    ranks = dist.get_world_size()
    baseline = rows[0]
    clipped = sum(norm > args.clip_norm for norm in baseline["gradient_norms"])
    print(
        f"{args.model}: {parameter_count(config):,} parameters in fp32, {ranks} ranks, {args.steps} steps of "
        f"{args.global_batch_size} sequences of {args.seq_len} tokens, {args.micro_batch_size} at a time"
    )
    print(f"loss {baseline['losses'][0]:.3f} to {baseline['losses'][-1]:.3f}, gradients clipped in {clipped} steps\n")
    print("What a rank holds, and what it calls and sends in a step:")
    print(table(rows))
    print()
    summary = {
        "device": hardware.device_name(device),
        "world_size": ranks,
        "dtype": "fp32",
        "model": args.model,
        "parameters": parameter_count(config),
        "steps": args.steps,
        "tokens": args.steps * args.global_batch_size * args.seq_len,
        "first_loss": baseline["losses"][0],
        "last_loss": baseline["losses"][-1],
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "clipped_steps": clipped,
        "rows": rows,
    }
    report.write_json(summary, args.json)
    check(rows, config, ranks)
