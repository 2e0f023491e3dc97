"""The tables that show.py prints. What a program wants is in --json."""

from old import report

UNITS = {"bytes": " GB", "watts": " W", "celsius": " °C", "mhz": " MHz", "bytes_per_second": " MB/s"}
SCALES = {"bytes": 1e9, "bytes_per_second": 1e6}


def title(name: str) -> str:
    """A key without its unit, which stands beside the value: memory_total_bytes is "memory total"."""
    unit = next((unit for unit in sorted(UNITS, key=len, reverse=True) if name.endswith(f"_{unit}")), "")
    return name.removesuffix(f"_{unit}").replace("_", " ")


def words(name: str, value: object) -> str:
    """A value for people."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(f"{v['pid']} ({v['user'] or '?'})" if isinstance(v, dict) else v for v in value) or "none"
    for unit in sorted(UNITS, key=len, reverse=True):
        if name.endswith(f"_{unit}"):
            return f"{value / SCALES.get(unit, 1):,.1f}".removesuffix(".0") + UNITS[unit]
    return f"{value:.0%}" if name == "utilization" else str(value)


def print_table(heading: str, rows: list[list[str]]) -> None:
    print(f"{heading}\n\n{report.table(rows)}\n")


def print_host(host: dict) -> None:
    print_table("This machine", [["", "value"], *([title(name), words(name, value)] for name, value in host.items())])


def print_gpus(gpus: list[dict], topology: list[list[str]]) -> None:
    """The driver's facts down and GPUs across, eight at a time at most; then how they reach each other."""
    heads = [f"GPU {gpu['index']}" for gpu in gpus]
    facts = [name for name in gpus[0] if name not in ("index", "refused")]
    for start in range(0, len(gpus), 7):
        some = slice(start, start + 7)
        rows = [[title(name), *(words(name, gpu[name]) for gpu in gpus[some])] for name in facts]
        print_table("GPUs, as the driver knows them (n/a: it does not say)", [["", *heads[some]], *rows])
    rows = [[head, *paths] for head, paths in zip(heads, topology, strict=True)]
    print_table(
        "Between them: NV4 is 4 NVLink lanes; by PCIe from near to far PIX, PXB, PHB, NODE, SYS", [["", *heads], *rows]
    )


def print_dtypes(dtypes: list[dict], device: str, how: str) -> None:
    rows = [[d["dtype"], d["verdict"], d["tried"]] for d in dtypes]
    print_table(
        f"Types that {device} multiplies: native with units for them, emulated without ({how})",
        [["type", "verdict", "a product tried"], *rows],
    )


def print_peaks(peaks: list[dict]) -> None:
    """TFLOP/s by type, one device a line; where the figures come from is told below."""
    rows = [["device", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "memory, power"]]
    for peak in peaks:
        rates = [peak[f"{dtype}_tflops"] for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8")] + [peak["int8_tops"]]
        cells = ["n/a" if rate is None else f"{rate:.5g}" if rate else "-" for rate in rates]
        known = peak["source"] is not None
        memory = words("memory_bytes", peak["memory_bytes"]), words("tdp_watts", peak["tdp_watts"])
        rows.append(
            [
                peak["device"],
                *cells,
                f"{memory[0]} at {peak['terabytes_per_second']:.4g} TB/s, {memory[1]}" if known else "n/a",
            ]
        )
    print_table("Data sheet peaks in TFLOP/s, without sparsity (-: no units for the type)", rows)
    print("\n".join(f"{peak['device']}: {peak['source']}" for peak in peaks if peak["source"]) + "\n")


def print_fits(fits: list[dict], heading: str) -> None:
    rows = [["model", "use", "over all devices", "on each device", "fits here", "devices needed", "80 GB GPUs needed"]]
    for fit in fits:
        count = [
            "none is large enough" if n is None else str(n)
            for n in (fit["devices_needed"], fit["reference_80_gb_gpus"])
        ]
        spread, each = words("spread_bytes", fit["spread_bytes"]), words("each_bytes", fit["each_bytes"])
        rows.append([fit["model"], fit["use"], spread, each, words("fits_here", fit["fits_here"]), *count])
    print_table(heading, rows)
