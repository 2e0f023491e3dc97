"""The Makefile: what `make` alone says, and what each target installs, with a pip that notes it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.harness import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")

# Stands for python3, for the virtual environment's python and for its torchrun.
STUB = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/torchrun" ;;
  *device_count*) echo 2 ;;
  "-c "*) ;;
  *) echo "${0##*/} $*, threads: $OMP_NUM_THREADS" >> log ;;
esac
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the Makefile, the requirements and the stub."""
    for file in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(file, tmp_path)
    stub = tmp_path / "stub"
    stub.write_text(STUB, encoding="utf-8")
    stub.chmod(0o755)
    return tmp_path


def make(folder: Path, *words: str) -> tuple[str, list[str]]:
    """Run make. Return its output, and the commands that the stub has noted."""
    log = folder / "log"
    log.write_text("", encoding="utf-8")
    names = ("MAKEFLAGS", "MAKELEVEL", "OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in names}
    argv = ["make", "PYTHON=./stub", *words]
    result = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result
    return result.stdout, log.read_text(encoding="utf-8").splitlines()


def test_make_alone_lists_every_target_and_does_nothing(folder):
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)", text, re.MULTILINE)[1].split()
    out, commands = make(folder)
    assert out == make(folder, "help")[0]
    assert not [target for target in targets if f"make {target} " not in out]
    assert len(out.splitlines()) < 24  # one screen
    assert not commands
    assert not (folder / ".venv").exists()


def test_train_installs_what_the_scripts_need_and_the_tests_the_rest(folder):
    out, commands = make(folder, "train")
    installed, trained = commands
    assert re.search(r"pip install .*-r requirements\.txt", installed)
    assert "--quiet" not in installed
    assert out.index("GB") < out.index("pip install")
    assert ". .venv/bin/activate" in out
    assert re.match(r"torchrun .*--local-addr=127\.0\.0\.1 .*05_ddp/train\.py", trained)
    assert trained.endswith("threads: 1")
    assert len(make(folder, "train")[1]) == 1  # installs nothing the second time

    _, commands = make(folder, "venv")
    assert re.search(r"pip install .*-r requirements-dev\.txt", commands[0])
    assert len(commands) == 1
    assert not make(folder, "venv")[1]
    _, commands = make(folder, "train")
    assert [command.split()[0] for command in commands] == ["torchrun"]


def test_train_after_venv_installs_nothing(folder):
    assert len(make(folder, "venv")[1]) == 1
    assert "pip install" not in make(folder, "train")[0]
