"""The losses and tokens of data/golden.json, by each way to train and to answer that golden.py lists."""

import json

import golden
import pytest

WAYS = [
    pytest.param(way, id=way[0], marks=() if way[1] else pytest.mark.full) for way in golden.WAYS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    golden.write_inputs(folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_do_not_move(folder, way):
    name, _, keys, *commands = way
    expected = json.loads(golden.FILE.read_text(encoding="utf-8"))
    for key, found in zip(keys, golden.go(folder / name, commands), strict=True):
        golden.compare(name, key, expected[key], found)
