"""The losses and tokens of data/golden.json, by each way to train and to answer that golden.py lists."""

import json
from pathlib import Path

import golden
import pytest
from support.harness import run

WAYS = [
    pytest.param(way, id=way[0], marks=() if way[1] else pytest.mark.full) for way in golden.WAYS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    golden.write_inputs(folder)
    return folder


def start_warm(ranks: int, script: str, flags: list[str], folder: Path) -> None:
    result = run(script, folder, *flags, nproc=ranks or None, CORPUS_CACHE=str(folder / "corpus"))
    assert result.code == 0, result


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_do_not_move(folder, way):
    name, _, keys, *commands = way
    expected = json.loads(golden.FILE.read_text(encoding="utf-8"))
    found = golden.go(folder / name, commands, start_warm)
    for key, values in zip(keys, found, strict=True):
        golden.compare(name, key, expected[key], values)
