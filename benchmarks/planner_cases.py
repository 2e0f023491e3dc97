"""Step times that planner/ predicts beside steps that others measured: every error, and how often the order is right.

First the rows that no formula was made on (tests/data/more_planner_cases.csv), then those that the formulas were made
on (planner_cases.csv). Beside both a trivial baseline: every run has the same MFU, the median of the rows that the
formulas were made on. A pair is two layouts of one model and sequence length on one machine, from one source.

    python benchmarks/planner_cases.py                  written to benchmarks/results/
    python benchmarks/planner_cases.py --cases FILE     other rows of the same columns, not written down
"""

import statistics
from datetime import date
from pathlib import Path

from _measure import about, facts, write_results
from _planner_rows import MADE_ON, NOT_MADE_ON, print_rows, print_summaries, steps, summary

from common import cli, exits

NEAR = 0.30


def summaries(name: str, rows: list[dict], mfu: float) -> list[dict]:
    """Of all rows, of the baseline, and of each source."""
    for row in rows:
        row["one_mfu"] = row["at_the_peak"] / mfu
    baseline = summary(f"{name}: every run at {mfu:.0%} MFU", rows, NEAR, "one_mfu")
    sources = dict.fromkeys(row["source"] for row in rows)
    own = [summary(source, [row for row in rows if row["source"] == source], NEAR) for source in sources]
    return [summary(name, rows, NEAR), baseline, *own]


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
        print(f"{print_summaries(summaries(args.cases.name, found, mfu))}\n\n{print_rows(found, 'causes')}")
        return 0
    others = steps(NOT_MADE_ON)
    first = summaries("no formula was made on these", others, mfu)
    second = summaries("the formulas were made on these", made_on, mfu)
    far = [row for row in (*others, *made_on) if abs(row["error"]) >= NEAR]
    about_ = about("benchmarks/planner_cases.py", "cpu")
    parts = [
        f"# Step times: planner/ beside measured steps, {date.today().isoformat()}",
        f"## Rows that no formula was made on: more_planner_cases.csv\n\n{print_summaries(first)}",
        f"## Rows that the formulas were made on: planner_cases.csv\n\n{print_summaries(second)}",
        f"## What stays outside {NEAR:.0%}\n\n{print_rows(far, 'why')}",
        f"## Every measured step, in seconds\n\n{print_rows([*others, *made_on], 'setting', 'causes')}",
        facts(about_),
    ]
    result = dict(about_)
    result |= {"not_made_on": first, "made_on": second, "rows_not_made_on": others, "rows_made_on": made_on}
    file = write_results("planner", "", result, "\n\n".join(parts))
    print("\n\n".join(parts[1:4]), f"\n\nwritten: {file} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
