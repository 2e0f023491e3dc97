"""What kv_cache.py tells: tables, what was checked, a picture."""

from pathlib import Path

from _kv_cache_requests import Served

from old import report

GIB = 2**30


def print_report(found: dict) -> None:
    print_sizes(found["sizes"])
    print_grouped(found["grouped_query_attention"])
    print_ways(found["one_text"])
    print_serving(found["serving"], found["static_cache_slots"])
    print_offload(found["offload"])


def print_sizes(sizes: dict) -> None:
    head = [
        "bf16",
        "query heads",
        "key-value heads",
        "a token, KiB",
        "with all heads",
        "1 x 8,192, GiB",
        "32 x 8,192",
        "weights",
    ]
    rows = [head]
    for row in sizes["named"]:
        rows.append(
            [
                row["model"],
                f"{row['heads']}",
                f"{row['key_value_heads']}",
                f"{row['bytes_per_token'] / 1024:,.0f}",
                f"{row['all_heads_bytes_per_token'] / 1024:,.0f}",
                f"{row['one_request_bytes'] / GIB:,.2f}",
                f"{row['many_requests_bytes'] / GIB:,.1f}",
                f"{row['weight_bytes'] / GIB:,.2f}",
            ]
        )
    print("\n" + report.table(rows) + "\n")
    first, last = sizes["allocated"][0], sizes["allocated"][-1]
    print(
        f"checked: {len(sizes['allocated'])} caches of this model, from {told(first)} to {told(last)}, and those of "
        "the table have the bytes of planner/'s formula"
    )
    room = [f"{tokens:,} tokens in {card}" for card, tokens in sizes["llama_70b_tokens_beside_them"].items()]
    print(
        f"llama-70b at 4 bits, scale and zero per 128: {sizes['llama_70b_int4_weight_bytes'] / 1e9:.1f} GB of weights; "
        f"beside them the cache has room for {', '.join(room)} (computed)"
    )


def told(row: dict) -> str:
    return f"{row['concurrency']} x {row['tokens']} tokens ({report.for_people('cache_bytes', row['cache_bytes'])})"


def print_grouped(grouped: dict) -> None:
    print(
        f"checked: {grouped['heads']} query heads on {grouped['key_value_heads']} key-value heads keep "
        f"{report.for_people('cache_bytes', grouped['cache_bytes'])}, with all heads "
        f"{report.for_people('cache_bytes', grouped['all_heads_cache_bytes'])}: "
        f"{grouped['new_tokens']} tokens equal, logits {grouped['logits_relative_error']:.0e} apart"
    )


def print_ways(ways: list[dict]) -> None:
    first = ways[0]
    print(f"\none text: {first['prompt_tokens']} tokens, and {first['new_tokens']} new ones\n")
    rows = [["", "tokens read", "ms per new token", "time", "logits differ by"]]
    for row in ways:
        seconds = row["seconds"]
        ms = [seconds[key] * 1e3 / row["new_tokens"] for key in ("median", "min", "max")]
        rows.append(
            [
                row["cache"],
                f"{row['tokens_read']:,}",
                f"{ms[0]:.2f} ({ms[1]:.2f} to {ms[2]:.2f})",
                f"{seconds['median'] / first['seconds']['median']:.2f}x",
                f"{row['logits_relative_error']:.0e}",
            ]
        )
    print(report.table(rows) + "\n")
    print("checked: " + equal_tokens(ways[1:], "the text without a cache"))


def equal_tokens(rows: list[dict], beside: str) -> str:
    """In 16 bits some may differ: then how many are equal, row by row."""
    found = [f"{row['equal_tokens']} of {row['new_tokens']}" for row in rows]
    if all(row["equal_tokens"] == row["new_tokens"] for row in rows):
        found = [f"in all rows all {rows[0]['new_tokens']}"]
    worst = max(row["logits_relative_error"] for row in rows)
    return f"{', '.join(found)} new tokens are those of {beside}, their logits within {worst:.0e} (relative)"


def print_serving(serving: list[dict], static_slots: int) -> None:
    first = serving[0]
    print(f"\n{first['requests']} requests, {first['new_tokens']:,} new tokens\n")
    head = ["", "steps", "prompt tokens read", "begun again", "slots taken", "with a token", "new tokens/s"]
    rows = [head]
    for row in serving:
        speed = row["new_tokens_per_second"]
        rows.append(
            [
                row["policy"],
                f"{row['steps']:,}",
                f"{row['prompt_tokens_read']:,}",
                f"{row['preemptions']}",
                f"{row['slots_reserved_most']:,}",
                f"{row['slots_filled_mean'] / row['slots_reserved_mean']:.0%}",
                f"{speed['median']:,.0f} ({speed['min']:,.0f} to {speed['max']:,.0f})",
            ]
        )
    print(report.table(rows) + "\n")
    filled = first["slots_filled_mean"] / static_slots
    print(
        f"static batching in a static cache: {static_slots:,} slots taken, {filled:.0%} with a token that is still read"
    )
    print("checked: " + equal_tokens(serving, "each request alone and without a cache"))


def print_offload(offload: dict) -> None:
    away, back, again = (offload[f"{kind}_seconds"]["median"] * 1e3 for kind in ("away", "back", "read_again"))
    print(
        f"\noffload: {offload['tokens']} tokens, {report.for_people('moved_bytes', offload['moved_bytes'])}, to "
        f"{offload['to']} in {away:.1f} ms, back in {back:.1f} ms; to read the text again takes {again:.1f} ms"
    )
    print(
        "checked: a conversation whose blocks were away, and are others now, goes on as if it had stayed: logits "
        f"{offload['logits_relative_error']:.0e} apart"
    )


def plot_slots(runs: dict[str, Served], static_slots: int, file: Path) -> str | None:
    """Slots over the steps, reserved and filled; returns the file's name, None without matplotlib."""
    if (plt := report.pyplot()) is None:
        return None
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.axhline(static_slots, color="black", linestyle="--", label="a static cache reserves")
    for color, (name, served) in zip(("C0", "C1", "C2"), runs.items(), strict=True):
        axes.step(range(len(served.slots_reserved)), served.slots_reserved, color=color, label=f"{name}: in blocks")
        axes.fill_between(range(len(served.slots_filled)), served.slots_filled, color=color, alpha=0.3, step="pre")
    axes.set(xlabel="decode step", ylabel="slots (filled: those with a token)")
    axes.set_ylim(0, 1.5 * static_slots)
    axes.legend(fontsize="small", loc="upper right")
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return str(file)
