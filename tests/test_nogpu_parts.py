"""benchmarks/gpu.py: a part goes on after a failure, and where a killed run of it has stopped.

The GPUs are not there: see nogpu/README.md.
"""

import json
import os
import signal

import pytest
from support.harness import ROOT, descendants, finish, holds, kill_all, start

pytestmark = [pytest.mark.nogpu, pytest.mark.usefixtures("nogpu_tool")]

# gpu.py with a plan of these commands
DRIVER = """
import sys
sys.path[:0] = [{benchmarks!r}]
import gpu
from common import exits
from _gpu import Command, Part
gpu.PARTS = {{"A": Part(600, alone=[Command(*c) for c in {alone!r}],
                       together=[Command(*c) for c in {together!r}])}}
sys.argv = ["gpu.py", "A"]
exits.run(gpu.main)
"""
FINE = 'import json, sys\njson.dump({"tokens_per_second": 5.0}, open(sys.argv[-1], "w"))\n'


def plan(folder, alone: dict[str, str], together: dict[str, str]):
    """Write scripts by name, and a driver whose plan they are."""
    commands = []
    for scripts in (alone, together):
        commands.append([])
        for name, code in scripts.items():
            file = folder / f"{name}.py"
            file.write_text(code, encoding="utf-8")
            commands[-1].append((name, str(file), 20.0))
    source = DRIVER.format(
        benchmarks=str(ROOT / "benchmarks"), alone=commands[0], together=commands[1]
    )
    (folder / "driver.py").write_text(source, encoding="utf-8")


def start_part(folder):
    argv = ["bash", str(ROOT / "tests/nogpu/run.sh"), "noop", str(folder / "driver.py")]
    paths = {"OUT": str(folder / "out"), "TMPDIR": str(folder)}
    return start(argv, folder, NOGPU_DEVICES="1", **paths)


def rows(folder) -> dict[str, dict]:
    files = list((folder / "out").glob("*gpu-a-*.json"))
    if not files:
        return {}
    return {
        row["name"]: row for row in json.loads(files[0].read_text(encoding="utf-8"))["commands"]
    }


def test_a_part_goes_on_after_a_failure(tmp_path):
    fails = "raise ValueError('planted')"
    plan(tmp_path, {"first": fails, "second": FINE}, {"beside": fails, "other": FINE})
    result = finish(start_part(tmp_path), tmp_path)
    assert result.code == 1, result
    found = rows(tmp_path)
    assert set(found) == {"first", "second", "beside", "other"}
    for name in ("first", "beside"):
        assert "planted" in found[name]["failed"]
        assert "Traceback" in found[name]["output"]
    for name in ("second", "other"):
        assert found[name]["failed"] is None
        assert found[name]["summary"] == {"tokens_per_second": 5.0}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_part_goes_on_where_it_was(tmp_path, number):
    """The second of three commands waits at a pipe. It is there that the part is killed."""
    os.mkfifo(tmp_path / "pipe")
    waits = f"open({str(tmp_path / 'pipe')!r}).read()\n" + FINE
    plan(tmp_path, {"first": FINE, "second": waits, "third": FINE}, {})
    killed = start_part(tmp_path)
    assert holds(killed, lambda: "first" in rows(tmp_path))
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)  # returns when the second command runs
    if number == signal.SIGKILL:
        kill_all(killed)
        assert set(rows(tmp_path)) == {"first"}
    else:
        for process in descendants(killed):
            if process.cmdline()[-1].endswith("driver.py") and "bash" not in process.name():
                process.send_signal(number)
        result = finish(killed, tmp_path)
        assert result.code == 75, result
        found = rows(tmp_path)
        assert [found[name]["not_run"] is None for name in found] == [True, False, False]
    os.close(writer)

    began = rows(tmp_path)["first"]
    (tmp_path / "second.py").write_text(FINE, encoding="utf-8")
    result = finish(start_part(tmp_path), tmp_path)
    assert result.code == 0, result
    found = rows(tmp_path)
    assert found["first"] == began  # not run again
    assert all(row["summary"] for row in found.values())
    assert set(found) == {"first", "second", "third"}


@pytest.mark.parametrize("part", ["A", "B", "C"])
def test_the_plan_knows_its_scripts(tmp_path, part):
    """Some commands of each part at the size of nano, end to end."""
    only = {"A": "124m", "B": "train 8b", "C": "one gpu untied"}[part]
    argv = ["bash", str(ROOT / "tests/nogpu/run.sh"), "noop", str(ROOT / "benchmarks/gpu.py")]
    argv += [part, "--trial", "--only", only, "--at-once", "1"]
    environment = {"OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path), "NOGPU_DEVICES": "2"}
    result = finish(start(argv, tmp_path, **environment), tmp_path)
    assert result.code == 0, result
    [file] = (tmp_path / "out").glob(f"*gpu-{part.lower()}-*.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {"cuda", "cudnn", "nccl", "driver", "power_limit_watts"} <= set(content["about"])
    for row in content["commands"]:
        assert only in row["name"]
        assert row["summary"]["tokens_per_second"] > 0
