"""What planner/ says of memory beside what others measured and published: every error, and what stays outside.

The formulas were made on these rows: their errors say how well the formulas describe them, not how well they predict
others. Peaks are compared in the convention of their source.

    python benchmarks/estimator_cases.py                          written to benchmarks/results/
    python benchmarks/estimator_cases.py --planner-cases FILE     other rows of the same columns, not written down

Look for: the rows above 10 %, and why. Nothing is measured here, and the answer is the same on every machine.
"""

from datetime import date
from pathlib import Path

from _estimator_rows import answer, read_cases
from _measure import about, facts, write_results
from _planner_rows import DATA, MADE_ON, peaks, print_rows, print_summaries, summary

from common import cli, exits
from common.table import table

NEAR = 0.10


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--planner-cases", type=Path, default=MADE_ON, help="rows with a peak")
    args = parser.parse_args()
    if not args.planner_cases.is_file():
        raise exits.UserError(f"--planner-cases {args.planner_cases} is no file")
    found = peaks(args.planner_cases)
    names = dict.fromkeys(row["source"] for row in found)
    own = [summary(name, [row for row in found if row["source"] == name], NEAR) for name in names]
    summaries = [summary("all", found, NEAR), *own]
    far = [row for row in found if abs(row["error"]) >= NEAR]
    print(f"{print_summaries(summaries)}\n\n{print_rows(far, 'why')}")
    if args.planner_cases != MADE_ON:
        return 0
    files = (DATA / "estimator_cases.csv", DATA / "more_estimator_cases.csv")
    cases = [(case, answer(case)) for file in files for case in read_cases(file)]
    answered = [(case, ours) for case, ours in cases if ours is not None]
    missed = [case.id for case, ours in answered if not case.allows(ours)]
    rows = [["row", "published", "ours", "unit", "tolerance"]]
    rows += [[case.id, f"{case.expected:,.6g}", f"{ours:,.6g}", case.unit, case.tolerance] for case, ours in answered]
    about_ = about("benchmarks/estimator_cases.py", "cpu")
    parts = [
        f"# Memory: planner/ beside published figures, {date.today().isoformat()}",
        f"## {len(found)} measured peaks that the formulas were made on, in GiB\n\n{print_summaries(summaries)}",
        f"## What stays outside {NEAR:.0%}\n\n{print_rows(far, 'why')}",
        f"## Every measured peak\n\n{print_rows(found, 'source', 'setting')}",
        f"## {len(answered)} published figures, of which {len(missed)} are outside their tolerance\n\n{table(rows)}",
        f"{len(cases) - len(answered)} more rows ask for what planner/ has no formula for.",
        facts(about_),
    ]
    result = dict(about_)
    result |= {"cases": len(answered), "cases_missed": missed, "made_on": summaries, "rows_made_on": found}
    file = write_results("estimator", "", result, "\n\n".join(parts))
    print(f"\nwritten: {file} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
