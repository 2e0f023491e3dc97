"""05_ddp/data_parallel.py: its bytes and gradients, and that its check finds wrong ones."""

import json

import pytest
import torch
from support.chapter import load
from support.harness import TINY, config_of, run, with_fault

from common import model, shapes

SCRIPT = "05_ddp/data_parallel.py"
SMALL = ("--model", "tiny.json", "--device", "cpu", "--json", "s.json")
data_parallel = load(SCRIPT)


def test_the_bytes_of_a_step(tmp_path):
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--json", "s.json", warm=False)
    assert result.code == 0, result.err
    assert result.out.count("checked: ") == 1
    nano = 4 * shapes.parameter_count(shapes.SIZES["nano"])
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["devices"] for row in rows] == [2, 4, 8]
    for row in rows:
        n = row["devices"]
        assert (row["device_0_sent_bytes"], row["device_1_sent_bytes"]) == ((n - 1) * nano, nano)
        assert row["ddp_rank_sent_bytes"] == 2 * (n - 1) * nano // n  # nano divides by 2, 4 and 8
        assert row["outputs_to_device_0_bytes"] == 24 * 16 * 256 * 4 * (n - 1) // n
        assert row["gradient_relative_error"] < 1e-5


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_by_hand_gives_the_gradients_of_one_process_in_float64(n):
    nets = [model.build("tiny", config_of(TINY), seed=0).double() for _ in range(n + 1)]
    text = torch.randint(0, 256, (30, 17), generator=torch.Generator().manual_seed(0))
    data_parallel.data_parallel_by_hand(nets[:n], text[:, :-1], text[:, 1:])
    data_parallel.step(nets[n], text[:, :-1], text[:, 1:])
    for found, expected in zip(nets[0].parameters(), nets[n].parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        ('parameter.grad += send(other.grad, i, 0, "gradients")', "pass", "gradients differ from those of one process"),
        (
            'parameter.data = send(weight, 0, i, "weights")',
            'parameter.data = send(send(weight, 0, i, "weights"), 0, i, "weights")',
            "device 0 of 2 does not send (N-1)P",
        ),
        ("dist.all_reduce(gradient.clone())", "pass", "DDP does not send 2(N-1)/N P"),
    ],
)
def test_bytes_or_gradients_that_are_wrong_fail(tmp_path, line, wrong, message):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    result = run(with_fault(SCRIPT, tmp_path, line, wrong), tmp_path, *SMALL)
    assert result.code == 1
    assert message in result.err


def test_a_wrong_flag_is_one_line(tmp_path):
    result = run(SCRIPT, tmp_path, "--model", "giant", "--device", "cpu")
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert "giant" in result.err


@pytest.mark.gpu(n=2)
def test_the_real_one_on_two_gpus(gpus, tmp_path):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, tmp_path, "--device", "cuda", "--seq-len", 256, "--json", "s.json", **visible)
    assert result.code == 0, result.err
    real = json.loads((tmp_path / "s.json").read_text())["rows"][-1]
    assert real["name"] == "nn.DataParallel"
    assert real["gradient_relative_error"] < 1e-5
