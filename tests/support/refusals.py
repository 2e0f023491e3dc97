"""What a script refuses: one line that names the flag and the value, before any rank starts, exit code 2."""

from pathlib import Path

from support.harness import Result, run


def assert_refused(script: str | Path, folder: Path, flags: str, words: str, **how) -> Result:
    """`flags` as typed, and the words that the line must have, wherever they stand."""
    result = run(script, folder, *flags.split(), **how)
    assert (result.code, result.out) == (2, ""), f"{script} {flags}\n{result.out[-2000:]}\n{result.err[-4000:]}"
    assert len(result.err.splitlines()) == 1, result.err
    missing = [word for word in words.split() if word not in result.err]
    assert not missing, f"{missing} missing in: {result.err}"
    return result
