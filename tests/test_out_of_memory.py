"""How a script ends when there is too little memory: in one line, from one rank, after a save that was begun."""

import pytest
from support.harness import BASELINE, run, tiny_flags, with_prelude, write_tiny

MORE_THAN_ANY_ADDRESS_SPACE = 2**47  # bytes: refused at once, and no page of it is touched


def assert_one_line(result, *words: str) -> None:
    assert result.code == 2, result.err
    lines = [line for line in result.err.splitlines() if "error: out of memory" in line]
    assert len(lines) == 1, result.err
    assert "Traceback" not in result.err
    for word in (*words, "07_memory_tricks/memory_profile.py", "07_memory_tricks/estimate.py"):
        assert word in lines[0]


def test_a_model_that_does_not_fit_ends_in_one_line(tmp_path):
    """The limit is on the address space, so that Linux refuses instead of killing somebody."""
    limit = (
        "import resource\n"
        "mapped = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (mapped + 32 * 2**20,) * 2)"
    )
    write_tiny(tmp_path)
    flags = [*tiny_flags(tmp_path), "--seq-len", 128, "--global-batch-size", 64]
    result = run(with_prelude(BASELINE, tmp_path, limit), tmp_path, *flags)
    assert_one_line(result, "04_amp/train.py: error: out of memory: ", " asked for")
    assert result.err.count("\n") == 1


def failing_on_rank(rank: int) -> str:
    return (
        "import torch\n"
        "step = torch.optim.AdamW.step\n"
        "def failing_step(self, *args, **more):\n"
        f"    if os.environ.get('RANK') == '{rank}':\n"
        f"        torch.empty({MORE_THAN_ANY_ADDRESS_SPACE}, dtype=torch.uint8)\n"
        "    return step(self, *args, **more)\n"
        "torch.optim.AdamW.step = failing_step"
    )


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])  # rank 1 waits 15 s for rank 0 to tell
def test_one_rank_without_memory_ends_the_job_in_one_line(tmp_path, rank):
    write_tiny(tmp_path)
    script = with_prelude("05_ddp/train.py", tmp_path, failing_on_rank(rank))
    result = run(script, tmp_path, *tiny_flags(tmp_path), nproc=2)
    assert result.code != 0
    lines = [line for line in result.err.splitlines() if "error: out of memory" in line]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("rank 1: ") == (rank == 1)
    assert "DefaultCPUAllocator" not in result.err


def test_a_save_in_the_background_is_finished_first(tmp_path):
    write_tiny(tmp_path)
    prelude = (
        "import torch\n"
        "step, steps = torch.optim.AdamW.step, []\n"
        "def failing_step(self, *args, **more):\n"
        "    steps.append(0)\n"
        f"    len(steps) == 4 and torch.empty({MORE_THAN_ANY_ADDRESS_SPACE}, dtype=torch.uint8)\n"
        "    return step(self, *args, **more)\n"
        "torch.optim.AdamW.step = failing_step"
    )
    script = with_prelude(BASELINE, tmp_path, prelude)
    result = run(script, tmp_path, *tiny_flags(tmp_path), "--save-every", 1, "--async-save")
    assert_one_line(result, "out of memory")
    assert (tmp_path / "run/step-00000003/hashes.json").is_file()


def test_other_errors_keep_their_traceback(tmp_path):
    prelude = "import torch\ntorch.optim.AdamW.step = lambda self: 1 / 0"
    write_tiny(tmp_path)
    result = run(with_prelude(BASELINE, tmp_path, prelude), tmp_path, *tiny_flags(tmp_path))
    assert result.code == 1
    assert "ZeroDivisionError" in result.err


@pytest.mark.gpu(n=1)
def test_gpu_out_of_memory_is_one_line(gpus, tmp_path):
    prelude = "import torch\ntorch.cuda.set_per_process_memory_fraction(0.001)"
    write_tiny(tmp_path)
    script = with_prelude(BASELINE, tmp_path, prelude)
    flags = ["--device", "cuda", "--model", "llama-124m", "--run-dir", tmp_path / "run"]
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(script, tmp_path, *flags, warm=False, **visible)
    assert_one_line(result, "out of memory", "MiB asked for")
