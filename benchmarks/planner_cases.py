"""Steps and peaks that others measured beside what planner/ predicts: every error, and how often the order is right.

Rows that no formula was made on (tests/data/more_planner_cases.csv) and those that the formulas were made on
(planner_cases.csv) are kept apart: the errors of the latter say how well the formulas describe them, and not how well
they predict others. Beside the steps stands a trivial baseline: every run has the same MFU, the median of the rows that
the formulas were made on. A pair is two layouts of one model and sequence length on one machine, from one source. Peaks
are compared in the convention of their source, allocated or reserved.

    python benchmarks/planner_cases.py                  written to benchmarks/results/
    python benchmarks/planner_cases.py --cases FILE     other rows of the same columns, not written down

Look for: what stays outside, and why. Nothing is measured here, and the answer is the same on every machine.
"""

import math
import statistics
from datetime import date
from itertools import combinations
from pathlib import Path

from _measure import about, facts, write_results
from _planner_cases import MADE_ON, NOT_MADE_ON, peaks, ran_out_of_memory, steps

from common import cli, exits
from common.table import table

NEAR = {"steps": 0.30, "peaks": 0.10}


def summary(name: str, rows: list[dict], near: float, key: str = "predicted") -> dict:
    """Errors of `key`, and of the pairs in one group those whose order by seconds per token is right."""
    errors = [abs(row[key] / row["measured"] - 1) for row in rows]
    orders = []
    for one, other in combinations(rows, 2):
        if one["group"] and one["group"] == other["group"]:
            orders.append(math.prod(one[k] / one["tokens"] - other[k] / other["tokens"] for k in ("measured", key)))
    return {
        "rows": name,
        "n": len(rows),
        "median_error": statistics.median(errors),
        f"share_under_{near:.0%}": sum(error < near for error in errors) / len(errors),
        "largest_error": max(errors),
        "pairs_in_order": f"{sum(order > 0 for order in orders)} of {len(orders)}" if any(orders) else "none",
    }


def summaries(what: str, rows: list[dict], mfu: float) -> list[dict]:
    """Of all rows, of the baseline if these are steps, and of each source."""
    near = NEAR[what]
    found = [summary("all", rows, near)]
    if what == "steps":
        for row in rows:
            row["one_mfu"] = row["seconds_at_the_peak"] / mfu
        found.append(summary(f"every run at {mfu:.0%} MFU", rows, near, "one_mfu"))
    for source in dict.fromkeys(row["source"] for row in rows):
        found.append(summary(source, [row for row in rows if row["source"] == source], near))
    return found


def print_summaries(found: list[dict]) -> str:
    rows = [[name.replace("_", " ") for name in found[0]]]
    rows += [[f"{value:.1%}" if isinstance(value, float) else str(value) for value in one.values()] for one in found]
    return table(rows)


def print_rows(rows: list[dict], *names: str) -> str:
    found = [["row", "measured", "predicted", "error", *names]]
    for row in rows:
        figures = f"{row['measured']:.3f}", f"{row['predicted']:.3f}", f"{row['error']:+.1%}"
        found.append([row["id"], *figures, *(row[name] for name in names)])
    return table(found)


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--cases", type=Path, help="other rows of the same columns")
    args = parser.parse_args()
    if args.cases and not args.cases.is_file():
        raise exits.UserError(f"--cases {args.cases} is no file")
    mfu = statistics.median(row["seconds_at_the_peak"] / row["measured"] for row in steps(MADE_ON))
    files = {"not_made_on": NOT_MADE_ON, "made_on": MADE_ON}
    if args.cases:
        files = {"other_rows": args.cases}

    about_ = about("benchmarks/planner_cases.py", "cpu")
    result = {"about": about_, "one_mfu": mfu, "ran_out_of_memory": ran_out_of_memory(args.cases or MADE_ON)}
    first, every = [], []
    for what, unit, measured_rows in (("steps", "seconds", steps), ("peaks", "GiB", peaks)):
        result[what] = {}
        for name, file in files.items():
            rows = measured_rows(file)
            if not rows:
                continue
            found = summaries(what, rows, mfu)
            result[what][name] = {"summaries": found, "rows": rows}
            far = [row for row in rows if abs(row["error"]) >= NEAR[what]]
            heading = f"{what}, {file.name} ({name.replace('_', ' ')})"
            first.append(f"## {heading.capitalize()}\n\n{print_summaries(found)}")
            first.append(f"Outside {NEAR[what]:.0%}, in {unit}:\n\n{print_rows(far, 'why')}")
            every.append(f"## Every row: {heading}, in {unit}\n\n{print_rows(rows, 'setting', 'causes')}")
    ran_out = result["ran_out_of_memory"]
    seen = sum(row["predicted"] > row["capacity"] for row in ran_out)
    first.append(f"Runs that ran out of memory: {len(ran_out)}, predicted to need more than there is: {seen}")
    print("\n\n".join(first))
    if not args.cases:
        title = f"# Steps and peaks: planner/ beside what others measured, {date.today().isoformat()}"
        file = write_results("planner", "", result, "\n\n".join([title, *first, *every, facts(about_)]))
        print(f"\nwritten: {file} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
