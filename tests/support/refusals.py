"""What a user sees of bad input: exit code 2 and one line that names the flag and the value."""

from support.harness import Result


def assert_refused(result: Result, flags: str, words: str = "") -> None:
    """The command line `flags` was refused before any work, in one line with these words: those given, or the first
    flag and its value. Of several ranks one speaks, and torchrun's own code is 1."""
    shown = f"\n{flags}: exit code {result.code}\n{result.out[-1000:]}\n{result.err[-3000:]}"
    lines = [line for line in result.err.splitlines() if "error: " in line]
    assert len(lines) == 1, f"expected one line that says what is wrong{shown}"
    for word in words.split() or flags.split()[:2]:
        assert word in lines[0], f"expected {word!r} in the line{shown}"
    assert "Traceback" not in result.err, f"expected no traceback{shown}"
    if "exitcode  : " in result.err:
        assert "exitcode  : 2" in result.err, f"expected exit code 2 of a rank{shown}"
    else:
        assert (result.code, result.err.count("\n")) == (2, 1), f"expected exit code 2{shown}"
