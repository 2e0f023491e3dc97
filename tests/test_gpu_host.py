"""tests/support/gpu_host.py: scripts in one process end as scripts in processes of their own."""

import pytest
from support import gpu_host
from support.harness import BASELINE, SEVERAL, tiny_flags, train, write_tiny

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
pytestmark = pytest.mark.long
PID = "import os\nprint(os.getpid())\n"


@pytest.fixture
def host_run():
    def run(*arguments, **how):
        return gpu_host.run(*arguments, gpus=NO_GPU, **how)

    yield run
    gpu_host.close()


def script(folder, code: str):
    folder.mkdir()
    (folder / "script.py").write_text(code, encoding="utf-8")
    return folder / "script.py"


def test_training_ends_equal_to_the_bit(tmp_path, host_run):
    """The second script of a host, and the third, which has a process group of one rank."""
    alone = train(BASELINE, tmp_path / "alone").summary["weights_sha256"]
    changes = "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.manual_seed(9)\n"
    assert host_run(script(tmp_path / "before", changes), tmp_path / "before").code == 0
    for name, nproc in ((BASELINE, None), (SEVERAL[0], 1)):
        folder = tmp_path / str(nproc)
        write_tiny(folder)
        result = host_run(name, folder, *tiny_flags(folder), nproc=nproc)
        assert result.code == 0, result
        assert result.summary["weights_sha256"] == alone


def test_a_failure_is_one_scripts_own(tmp_path, host_run):
    fails = host_run(script(tmp_path / "fails", PID + "raise KeyError('planted')"), tmp_path)
    refuses = host_run(BASELINE, tmp_path / "refuses", "--model", "nonsense", "--device", "cpu")
    goes_on = host_run(script(tmp_path / "goes_on", PID), tmp_path)
    assert (fails.code, refuses.code, goes_on.code) == (1, 2, 0)
    assert "planted" in fails.err
    assert "planted" not in refuses.err
    assert "--model nonsense" in refuses.err
    assert fails.out == goes_on.out  # one process


@pytest.mark.parametrize(
    ("end", "limit"),
    [("os.kill(os.getpid(), 9)", 600), ("import threading; threading.Event().wait()", 0.5)],
    ids=["killed", "too long"],
)
def test_a_host_that_has_ended_is_replaced(tmp_path, host_run, end, limit):
    first = host_run(script(tmp_path / "first", PID), tmp_path)
    ended = host_run(script(tmp_path / "ended", PID + end), tmp_path, timeout=limit)
    last = host_run(script(tmp_path / "last", PID), tmp_path)
    assert ended.code != 0
    assert first.out != last.out
