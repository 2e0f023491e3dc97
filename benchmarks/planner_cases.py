"""Step times that planner/ predicts beside steps that others measured: every error, and how often the order is right.

First the rows that no formula was made on (tests/data/more_planner_cases.csv), then those that the formulas were made
on (planner_cases.csv). Beside both a trivial baseline: every run has the same MFU, the median of the rows that the
formulas were made on. A pair is two layouts of one model and sequence length on one machine, from one source; their
order is that of seconds per token.

    python benchmarks/planner_cases.py                  written to benchmarks/results/
    python benchmarks/planner_cases.py --cases FILE     other rows of the same columns, which are not written down

Look for: what the formulas are better at than the baseline. Nothing is measured here, and the answer is the same on
every machine.
"""

import statistics
from datetime import date
from itertools import combinations
from pathlib import Path

from _planner_rows import MADE_ON, NOT_MADE_ON, steps
from _shared import REPO, versions, write_results

from common import cli, exits
from common.report import table

NEAR = 0.30
# Why a row is outside, by its id.
OUTSIDE = {
    "nanotron-8.86b-64n-best": "one micro-batch of two sequences a step on 64 nodes: mostly waiting, cause unknown",
    "nanotron-80b-4n-best": "half the MFU of the same model on eight times as many nodes, which is within 1 %, though "
    "256 micro-batches leave next to no bubble; a single iteration was timed, the third",
    "titan-ds16b-8h100-fsdp4tp2ep2-none": "60 ms for each layer of an early version that mixes tensor and expert "
    "parallel, 4.6 % MFU: Python and its waiting for the GPU, of which the formulas know nothing for experts",
    **dict.fromkeys(
        [
            *("foundry-7b-8h100-65536", "foundry-7b-8h100-32768", "foundry-3b-8h100-65536"),
            *("foundry-3b-8h100-32768", "foundry-1b-8h100-65536", "foundry-1b-8h100-32768"),
            *("foundry-760m-8h100-32768", "foundry-760m-8h100-16384"),
        ],
        "long sequences, probably measured before there were attention kernels made for this GPU",
    ),
}


def order(rows: list[dict], key: str) -> tuple[int, int]:
    """Pairs whose order `key` has right, and all pairs that differ."""
    right = pairs = 0
    for one, other in combinations(rows, 2):
        measured = one["measured"] / one["tokens"] - other["measured"] / other["tokens"]
        predicted = one[key] / one["tokens"] - other[key] / other["tokens"]
        if one["group"] == other["group"] and measured:
            pairs += 1
            right += measured * predicted > 0
    return right, pairs


def summary(name: str, rows: list[dict], key: str = "predicted") -> dict:
    errors = [abs(row[key] / row["measured"] - 1) for row in rows]
    right, pairs = order(rows, key)
    return {
        "rows": name,
        "n": len(rows),
        "median_error": statistics.median(errors),
        "share_under_30_percent": sum(error < NEAR for error in errors) / len(errors),
        "largest_error": max(errors),
        "pairs_in_order": right,
        "pairs": pairs,
    }


def print_table(summaries: list[dict]) -> str:
    rows = [["rows", "n", "median error", f"under {NEAR:.0%}", "largest", "pairs in order"]]
    for found in summaries:
        shares = [f"{found[name]:.1%}" for name in ("median_error", "share_under_30_percent", "largest_error")]
        pairs = f"{found['pairs_in_order']} of {found['pairs']}" if found["pairs_in_order"] else "none"
        rows.append([found["rows"], str(found["n"]), *shares, pairs])
    return table(rows)


def summaries(name: str, rows: list[dict], mfu: float) -> list[dict]:
    for row in rows:
        row["one_mfu"] = row["at_the_peak"] / mfu
    found = [summary(name, rows), summary(f"{name}: every run at {mfu:.0%} MFU", rows, "one_mfu")]
    sources = dict.fromkeys(row["source"] for row in rows)
    return found + [summary(source, [row for row in rows if row["source"] == source]) for source in sources]


def case_rows(rows: list[dict]) -> list[list[str]]:
    found = [["row", "device", "measured s", "predicted s", "error", "largest causes"]]
    for row in rows:
        causes = sorted(row["causes"].items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{cause} {seconds / row['predicted']:.0%}" for cause, seconds in causes)
        seconds = f"{row['measured']:.3f}", f"{row['predicted']:.3f}"
        found.append([row["id"], row["device"], *seconds, f"{row['error']:+.1%}", shares])
    return found


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--cases", type=Path, help="other rows of the same columns")
    args = parser.parse_args()
    if args.cases and not args.cases.is_file():
        raise exits.UserError(f"--cases {args.cases} is no file")
    made_on = steps(MADE_ON)
    mfu = statistics.median(row["at_the_peak"] / row["measured"] for row in made_on)
    if args.cases:
        found = steps(args.cases)
        print(print_table(summaries(args.cases.name, found, mfu)))
        print(f"\n{table(case_rows(found))}")
        return 0
    not_made_on = steps(NOT_MADE_ON)
    first = summaries("no formula was made on these", not_made_on, mfu)
    second = summaries("the formulas were made on these", made_on, mfu)
    outside = [["outside", "error", "why"]]
    for row in (*not_made_on, *made_on):
        if abs(row["error"]) >= NEAR:
            outside.append([row["id"], f"{row['error']:+.1%}", OUTSIDE.get(row["id"], "not explained")])
    parts = [
        f"# Step times: planner/ beside measured steps, {date.today().isoformat()}",
        f"## Rows that no formula was made on: more_planner_cases.csv\n\n{print_table(first)}",
        f"## Rows that the formulas were made on: planner_cases.csv\n\n{print_table(second)}",
        f"## What stays outside {NEAR:.0%}\n\n{table(outside)}",
        f"## Every measured step\n\n{table(case_rows([*not_made_on, *made_on]))}",
        f"```\npython benchmarks/planner_cases.py\n```\n\nPython {versions()['python']}; torch is not used.",
    ]
    result = {
        "date": date.today().isoformat(),
        "versions": {"python": versions()["python"]},
        "not_made_on": first,
        "made_on": second,
        "rows_not_made_on": not_made_on,
        "rows_made_on": made_on,
    }
    file = write_results("planner", "", result, "\n\n".join(parts))
    print("\n\n".join(parts[1:4]))
    print(f"\nwritten: {file.relative_to(REPO)} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
