"""The tables of quantize.py and qat.py."""

from _quantize_kernels import ROUNDS
from torch import nn

from old.report import table


def print_schemes(rows: list[dict], net: nn.Module, turns: int) -> None:
    head = ["weights", "multiplied in", "weights, MB", "loss", "above fp32", "standard error", "tokens/s"]
    lines = [head]
    for row in rows:
        speed = f"{row['tokens_per_second']:,.0f} ({row['lowest']:,.0f} to {row['highest']:,.0f})"
        losses = [f"{row[key]:.4f}" for key in ("val_loss", "delta", "standard_error")]
        lines.append([row["scheme"], row["multiplied"], f"{row['weight_bytes'] / 1e6:.2f}", *losses, speed])
    print("\n" + table(lines))
    kept = sum(p.nbytes for p in net.parameters()) - rows[0]["weight_bytes"]
    print(f"speed: median, lowest and highest of {turns} turns; above fp32: noise if under twice the standard error")
    print(f"fp32 in every row: embedding, output layer and norms, {kept / 1e6:.2f} MB")
    print("int3 is stored in 4 bits")


def print_sensitivity(added: dict[str, tuple[float, float]], shown: int) -> None:
    """The ends of the scan: the layers that suffer most and least."""
    names = [*added]
    lines = [["one layer in int3, the others in fp32", "loss above fp32", "standard error"]]
    for name in [*names[:shown], *names[-shown:]]:
        delta, standard_error = added[name]
        lines.append([name, f"{delta:.4f}", f"{standard_error:.4f}"])
    print("\n" + table(lines))


def print_layer(rows: list[dict]) -> None:
    side = rows[0]["side"]
    lines = [[f"one layer of {side:,} x {side:,}", "1 token, microseconds", "256 tokens, microseconds"]]
    for row in rows:
        times = []
        for tokens in (1, 256):
            middle, low, high = (row[f"{key}_at_{tokens}"] for key in ("microseconds", "lowest", "highest"))
            times.append("n/a" if middle is None else f"{middle:,.0f} ({low:,.0f} to {high:,.0f})")
        lines.append([row["layer"], *times])
    print("\n" + table(lines))
    print(f"median, lowest and highest of {ROUNDS} turns")


def print_seeds(rows: list[dict]) -> None:
    head = ["bits", "seed", "rounded before training on", "trained on, fp32", "PTQ by largest", "PTQ by least squares"]
    lines = [[*head, "QAT", "gain"]]
    keys = ("base_ptq_loss", "rival_loss", "ptq_largest_loss", "ptq_least_squares_loss", "qat_loss")
    for row in rows:
        gain = f"{row['gain']:+.4f} (error {row['gain_standard_error']:.4f})"
        lines.append([str(row["bits"]), str(row["seed"]), *(f"{row[key]:.4f}" for key in keys), gain])
    print("\n" + table(lines))


def print_verdicts(verdicts: list[dict]) -> None:
    for v in verdicts:
        print(
            f"QAT against rounding afterwards at {v['bits']} bits: {v['verdict']}, median {v['median_gain']:+.4f} nats "
            f"({v['lowest_gain']:+.4f} to {v['highest_gain']:+.4f}), better on {v['seeds_won']} of {v['seeds']} seeds, "
            f"standard error of one seed {v['median_gain_standard_error']:.4f}"
        )
