"""05_ddp/data_parallel.py: its bytes and gradients, and that its check finds wrong ones."""

import json

import pytest
from support.harness import TINY, assert_refused, in_long, run, with_fault

from lm import shapes

SCRIPT = "05_ddp/data_parallel.py"


def test_the_bytes_of_a_step_and_the_gradients_of_one_process(tmp_path):
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--json", "s.json")
    assert result.code == 0, result.err
    nano = 4 * shapes.parameter_count(shapes.SIZES["nano"])
    rows = {
        row["devices"]: row
        for row in json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["rows"]
    }
    assert rows.keys() >= {2, 4, 8}
    for n, row in rows.items():
        assert (row["device_0_sent_bytes"], row["device_1_sent_bytes"]) == ((n - 1) * nano, nano)
        assert row["ddp_rank_sent_bytes"] == 2 * (n - 1) * nano // n  # nano divides by 2, 4 and 8
        assert row["outputs_to_device_0_bytes"] == 24 * 16 * 256 * 4 * (n - 1) // n
        assert row["gradient_relative_error"] < 1e-5


GRADIENTS = 'parameter.grad += send(other.grad, i, 0, "gradients")'
WEIGHTS = 'parameter.data = send(weight, 0, i, "weights")'
OUTPUTS = 'collected = [send(output, i, 0, "outputs") for i, output in enumerate(outputs)]'
WRONG = {  # a line, what stands there instead, what the error names
    "gradients are a thousandth too large": (
        GRADIENTS,
        'parameter.grad += 1.001 * send(other.grad, i, 0, "gradients")',
        "gradients differ",
    ),
    "weights travel twice": (WEIGHTS, f"{WEIGHTS}; {WEIGHTS}", "device_0_sent_bytes"),
    "outputs travel twice": (OUTPUTS, f"{OUTPUTS}; {OUTPUTS}", "outputs_to_device_0_bytes"),
    "DDP sends a gradient less": (
        "for gradient in gradients:",
        "for gradient in gradients[1:]:",
        "ddp_rank_sent_bytes",
    ),
}


@pytest.mark.parametrize(
    "fault", ["gradients are a thousandth too large", *map(in_long, [*WRONG][1:])]
)
def test_bytes_or_gradients_that_are_wrong_fail(tmp_path, fault):
    line, wrong, words = WRONG[fault]
    (tmp_path / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    result = run(
        with_fault(SCRIPT, tmp_path, line, wrong),
        tmp_path,
        "--model",
        "tiny.json",
        "--device",
        "cpu",
    )
    assert result.code == 1, result.out + result.err
    assert words in result.err


def test_what_is_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--model", "giant", "--device", "cpu"), "--model", "giant")


@pytest.mark.gpu(n=2)
def test_the_real_one_on_two_gpus(gpu_run, tmp_path):
    result = gpu_run(SCRIPT, tmp_path, "--device", "cuda", "--seq-len", 256, "--json", "s.json")
    assert result.code == 0, result.err
    real = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["rows"][-1]
    assert real["name"] == "nn.DataParallel"
    assert real["gradient_relative_error"] < 1e-5
