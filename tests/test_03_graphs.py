"""03_linear_regression/graphs.py: gradients of branches and loops, breaks, recompilations. Times are not looked at."""

import json

import pytest
from support.harness import ROOT, in_long, run, with_fault
from support.printed import not_printed, quoted_outputs

SCRIPT = "03_linear_regression/graphs.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    where = tmp_path_factory.mktemp("graphs")
    # no compiler is found
    result = run(SCRIPT, where, "--device", "cpu", "--json", "summary.json", PATH="/nowhere")
    assert result.code == 0, result
    summary = json.loads((where / "summary.json").read_text(encoding="utf-8"))
    return {**summary, "printed": result.out}


def test_graphs_break_where_values_decide(found):
    source = (ROOT / SCRIPT).read_text(encoding="utf-8").splitlines()
    assert [len(row["values"]) for row in found["forwards"]] == [2, 3, 2]
    for row in found["forwards"]:
        assert row["graphs"] == row["breaks"] + 1 == len(row["lines"]) + 1
        first, *others = [source[line - 1].split()[0] for line in row["lines"]]
        assert first == "if"
        assert set(others) == {"while"}
    assert found["refused"]


def test_the_readme_quotes_what_is_printed(found):
    [quoted] = [quoted for quoted in quoted_outputs() if quoted.script == SCRIPT]
    # The share of overhead needs a compiler.
    missing = [line for line in not_printed(quoted, found["printed"]) if "overhead" not in line]
    assert missing == []


def test_what_sizes_cost(found):
    graphs = found["graphs"]
    assert graphs["dynamic=None"][:4] == [1, 2, 2, 2]
    assert graphs["dynamic=False"] == [1, 2, 3, 4, 5, 6]
    assert graphs["dynamic=True"][:4] == graphs["mark_dynamic"][:4] == [1] * 4
    assert max(found["many_sizes"]) == 8


def test_without_a_compiler_only_compiled_steps_are_left_out(found):
    assert [set(row["seconds"]) for row in found["steps"]] == [{"eager", "width 1"}] * 2


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("            y = y / 2\n", "            y = y / 3\n"),
        in_long(
            "            y = x * self.weight\n",
            "            y = (x * self.weight).detach() + 0 * y\n",
        ),
        in_long("multiply, subtract, (x", "multiply, multiply, (x"),
    ],
)
def test_a_wrong_gradient_fails(tmp_path, line, wrong):
    result = run(with_fault(SCRIPT, tmp_path, line, wrong), tmp_path, "--device", "cpu")
    assert result.code == 1, result
    assert "AssertionError" in result.err
