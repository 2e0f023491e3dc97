"""The table and the checks of gradient_checkpointing.py."""

COLUMNS = {
    "name": "recomputed",
    "kept_bytes": "kept for backward",
    "peak_bytes": "peak",
    "time_ratio": "time",
}
# Relative errors of gradients. On a CPU they are 0, but a GPU may sum in another order.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


def check(rows: list[dict], dtype: str) -> list[str]:
    """Assert that gradients are equal and that each method keeps less than the one before."""
    none, selective, full, _ = rows
    errors = [row["gradient_relative_error"] for row in rows]
    largest = max(errors)
    # not `largest <= ...`: max() may skip a NaN
    assert all(error <= TOLERANCE[dtype] for error in errors), (
        f"gradients differ from those of none: relative errors {errors}"
    )
    checked = [
        "gradients of all methods equal those of none: "
        f"largest relative error {largest:.1g} (0: to the bit)"
    ]
    for row, keeps_more in ((selective, none), (full, selective)):
        assert row["kept_bytes"] < keeps_more["kept_bytes"], f"{row['name']}: no less is kept"
        less_kept = 1 - row["kept_bytes"] / none["kept_bytes"]
        off_peak = 1 - row["peak_bytes"] / none["peak_bytes"]
        checked.append(
            f"{row['name']}: {less_kept:.1%} less kept for backward, "
            f"{off_peak:.1%} off the peak of a step"
        )
    return checked
