"""Check the bytes and gradients of data_parallel.py."""

TOLERANCE = 1e-5  # relative; what another order of the same sums in fp32 may change


def columns(rows: list[dict]) -> dict[str, str]:
    """Return the heading for each key that the table shows."""
    headings = {
        "name": "DataParallel",
        "devices": "devices",
        "device_0_sent_bytes": "device 0 sends",
        "device_1_sent_bytes": "others send",
        "outputs_to_device_0_bytes": "outputs to 0",
        "ddp_rank_sent_bytes": "DDP rank sends",
        "gradient_relative_error": "error",
    }
    if "time_ratio" in rows[-1]:
        headings["time_ratio"] = "time / one GPU's"
    return headings


def check(rows: list[dict], weight_bytes: int, logit_bytes: int) -> list[str]:
    """Assert the gradients of one process, and the formulas for the bytes."""
    for row in rows:
        error = row["gradient_relative_error"]
        assert error < TOLERANCE, (
            f"{row['devices']} devices: gradients differ from those of one process by {error:.0e}"
        )
        if row["name"] == "by hand":
            check_bytes(row, weight_bytes, logit_bytes)
    return [
        "device 0 sends (N-1)P, a rank of DDP 2(N-1)/N P, and the gradients are those of one "
        "process"
    ]


def check_bytes(row: dict, weight_bytes: int, logit_bytes: int) -> None:
    """Assert the formulas for the bytes of a step by hand."""
    n = row["devices"]
    assert row["device_0_sent_bytes"] == (n - 1) * weight_bytes, (
        f"device 0 of {n} does not send (N-1)P"
    )
    assert row["device_1_sent_bytes"] == weight_bytes, f"device 1 of {n} does not send P"
    assert row["outputs_to_device_0_bytes"] == (n - 1) * logit_bytes // n, (
        f"device 0 of {n} does not get (N-1)/N of the outputs"
    )
    assert row["ddp_rank_sent_bytes"] == round(2 * (n - 1) / n * weight_bytes), (
        "DDP does not send 2(N-1)/N P"
    )
