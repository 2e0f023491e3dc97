"""--is-my-mfu-right: one speed, the MFU by each way of counting, and which of them cannot be."""

import estimate
from _estimate_shapes import Shape
from _estimate_time import RECOMPUTED, Device

from old import report
from old.exits import UserError


def conventions(shape: Shape, *, seq_len: int, checkpointing: str) -> dict[str, float]:
    """FLOP per token by convention."""
    plain = estimate.flops_per_token(shape, seq_len=seq_len)
    return {
        "MFU: 6 (N - looked up) + 12 L h s": plain,
        "MFU, embedding counted: 6 N + 12 L h s": estimate.flops_per_token(
            shape, seq_len=seq_len, count_embedding=True
        ),
        "MFU, causal: half of the attention": estimate.flops_per_token(shape, seq_len=seq_len, causal=True),
        f"HFU, --checkpointing {checkpointing}: with what is recomputed": plain * (1 + RECOMPUTED[checkpointing]),
    }


def shares(shape: Shape, device: Device, *, tokens_per_second: float, seq_len: int, checkpointing: str) -> dict:
    """The share of the peak by convention; tokens_per_second is one device's."""
    if not device.peak_flops:
        raise UserError(f"--is-my-mfu-right needs a peak, and {device.name} has none in common/devices.csv")
    found = conventions(shape, seq_len=seq_len, checkpointing=checkpointing)
    speed = {"tokens_per_second": tokens_per_second, "peak_flops": device.peak_flops}
    return {name: estimate.mfu(flops_per_token=flops, **speed) for name, flops in found.items()}


def print_shares(
    shape: Shape,
    device: Device,
    *,
    tokens_per_second: float,
    gpus: int,
    seq_len: int,
    checkpointing: str,
) -> dict[str, float]:
    how = {"seq_len": seq_len, "checkpointing": checkpointing}
    found = shares(shape, device, tokens_per_second=tokens_per_second, **how)
    flops = conventions(shape, **how)
    rows = [["convention", "FLOP/token", "share of peak", "verdict"]]
    for name, share in found.items():
        verdict = "impossible: above the peak" if share > 1 else "possible"
        rows.append([name, f"{flops[name]:,.0f}", f"{share:.2%}", verdict])
    print(f"{tokens_per_second:,.0f} tokens/s on each {device.name}, peak {device.peak_flops / 1e12:.1f} TFLOP/s\n")
    print(report.table(rows))
    impossible = [name.split(":")[0] for name, share in found.items() if share > 1]
    if not impossible:
        print("\nno convention is above the peak; say which one a figure is in, they differ by the factors above")
        return found
    highest = device.peak_flops / flops[next(iter(flops))]
    print(f"\nimpossible in {len(impossible)} of {len(found)}: more than {highest:,.0f} tokens/s would exceed the peak")
    if gpus > 1:
        share = next(iter(found.values())) / gpus
        print(f"if that was the speed of all {gpus} devices together, the MFU is {share:.2%}")
    return found
