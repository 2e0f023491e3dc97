"""A model that a CPU cannot hold is refused in one line, before anything is allocated."""

import json
from pathlib import Path

import pytest
from support.harness import TEXT, TINY, assert_refused, run, with_prelude, write_tiny

from common import hardware
from lm import shapes

FSDP = "06_fsdp_zero/train_fsdp.py"
# The largest shape takes terabytes: no machine that runs the tests has them.
ON_ANY_MACHINE = [
    ("04_amp/train.py", []),
    ("05_ddp/train.py", []),
    (FSDP, []),
    ("08_model_parallel/train_3d.py", []),
    ("06_fsdp_zero/finetune.py", ["--data", "chats.jsonl"]),
    ("09_inference/infer_70b.py", []),
    ("09_inference/kv_cache.py", []),
    ("07_memory_tricks/gradient_checkpointing.py", []),
]


def test_a_model_that_no_machine_holds_is_refused(tmp_path):
    question = {"role": "user", "content": "1 + 1"}
    chat = json.dumps({"messages": [question, {"role": "assistant", "content": "2"}]})
    (tmp_path / "chats.jsonl").write_text(40 * (chat + "\n"), encoding="utf-8")
    for script, flags in ON_ANY_MACHINE:
        result = run(script, tmp_path, "--model", "llama-405b", "--device", "cpu", *flags)
        assert_refused(result, "--model llama-405b", "GiB")


@pytest.mark.full
def test_deepspeed_refuses_it_too(tmp_path):
    pytest.importorskip("deepspeed")
    for stage in (0, 1, 3):
        flags = ["--model", "llama-405b", "--device", "cpu", "--stage", stage]
        result = run("06_fsdp_zero/train_zero.py", tmp_path / str(stage), *flags)
        assert_refused(result, "--model llama-405b", "GiB")


def with_memory(script: str, folder: Path, size: int) -> Path:
    """Return the script on a machine with so many bytes of memory."""
    return with_prelude(
        script, folder, f"from common import hardware; hardware.memory_bytes = lambda: {size}"
    )


@pytest.mark.parametrize(
    ("script", "nproc", "copies"),
    [("04_amp/train.py", None, 1), ("05_ddp/train.py", 2, 2), (FSDP, 2, 1)],
)
def test_the_least_that_training_takes_is_not_refused(tmp_path, script, nproc, copies):
    """16 bytes of each parameter: fp32 weights, gradients and AdamW's two moments."""
    write_tiny(tmp_path)
    flags = ["--model", "tiny.json", "--device", "cpu", "--seq-len", 32, "--data", TEXT]
    flags += ["--dtype", "fp32", "--global-batch-size", 6, "--steps", 1, "--keep", 0]
    size = 16 * copies * shapes.parameter_count(shapes.parse_config(TINY, "tiny"))
    fits = run(with_memory(script, tmp_path / "fits", size), tmp_path, *flags, nproc=nproc)
    assert fits.code == 0, fits
    small = with_memory(script, tmp_path / "small", size - 1)
    refused = run(small, tmp_path, *flags, nproc=nproc)
    assert_refused(refused, "--model tiny.json", "GiB")
    assert not list(tmp_path.glob("runs/*/small*"))


def test_frozen_weights_take_less_than_trained_ones(tmp_path):
    """Weights alone, in the type that they are in."""
    write_tiny(tmp_path)
    parameters = shapes.parameter_count(shapes.parse_config(TINY, "tiny"))
    tables = 2 * 4 * TINY["max_position_embeddings"] * 8  # of RoPE, for heads of 8
    flags = ["--model", "tiny.json", "--device", "cpu", "--max-new-tokens", 2]
    for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
        size = itemsize * parameters + tables
        infer = "09_inference/infer_70b.py"
        fits = with_memory(infer, tmp_path / f"{dtype}-fits", size)
        result = run(fits, tmp_path, *flags, "--dtype", dtype)
        assert result.code == 0, result
        small = with_memory(infer, tmp_path / f"{dtype}-small", size - 1)
        assert_refused(run(small, tmp_path, *flags, "--dtype", dtype), "--model tiny.json")


def group(folder: Path, name: str, content: str) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content + "\n", encoding="utf-8")


CONTAINERS = [  # groups of the process, files, the limit
    ("0::/", {"memory.max": "2147483648"}, 2**31),
    ("0::/job/step", {"job/memory.max": "2147483648", "job/step/memory.max": "max"}, 2**31),
    ("0::/", {}, None),
    # Version 1. In a container, the path is often that of the host, which is not there.
    ("4:memory:/docker/abc", {"memory/memory.limit_in_bytes": "2147483648"}, 2**31),
    (
        "4:cpu,memory:/job",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/job/memory.limit_in_bytes": "2147483648",
        },
        2**31,
    ),
    ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ("9:name=systemd:/\n4:memory:/\n0::/", {"memory/memory.limit_in_bytes": "5"}, 5),
]


def test_the_limit_of_a_container_counts(tmp_path):
    for number, (own_group, files, limit) in enumerate(CONTAINERS):
        folder = tmp_path / str(number)
        group(folder / "proc", "self/cgroup", own_group)
        group(folder / "proc", "meminfo", "MemTotal:  100 kB\nSwapTotal:  1024 kB")
        for name, content in files.items():
            group(folder / "groups", name, content)
        places = (str(folder / "proc"), str(folder / "groups"))
        assert hardware.container_memory_bytes(*places) == limit, own_group
        if limit is not None and limit < 1000:
            assert hardware.memory_bytes(*places) == limit + 2**20
