"""05_ddp/train.py and what common/metrics.py says of several ranks."""

import ast
import itertools
import json
import math

import pytest
import torch
from support.checkpoints import saved
from support.harness import ROOT, needs_compiler, run, train

from common import data, metrics, model, report, runtime, shapes

SCRIPT = "05_ddp/train.py"


def test_the_logged_loss_is_the_mean_over_ranks_and_micro_batches(tmp_path):
    """Recompute it by hand, sequence by sequence, in float64, for the first step and one in the middle."""
    result = train(
        SCRIPT, tmp_path, "--data", "stdlib", "--micro-batch-size", 2, "--save-every", 7, "--seed", 3, nproc=2
    )
    net = model.build("nano", shapes.load_config(str(tmp_path / "tiny.json"), 256, 32), seed=3)
    sequences = data.Sequences(data.load_corpus("stdlib", "bytes").train, 32)
    order = {"global_batch_size": 12, "micro_batch_size": 12, "seed": 3}
    for step, weights in ((1, net.state_dict()), (8, saved(tmp_path, 7)["model"])):
        net.load_state_dict(weights)
        batch = next(itertools.islice(data.batch_order(len(sequences), **order), step - 1, None))
        with torch.no_grad():
            losses = [net.double()(*(t[None] for t in sequences[i])).item() for i in batch]
        assert len(set(batch)) == 12
        assert result.column("loss")[step - 1] == pytest.approx(sum(losses) / 12, rel=1e-6)
        net.float()


def test_gradients_travel_in_several_buckets(tmp_path):
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--steps", 3, "--json", "s.json", nproc=2)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert set(summary) >= set(report.SUMMARY)
    assert len(summary["bucket_bytes"]) >= 3
    assert sum(summary["bucket_bytes"]) == 4 * summary["parameters"]  # fp32
    assert "checked: all 2 ranks have the same weights to the bit" in result.out


def test_eight_processes(tmp_path):
    """The first command of the README, on a machine with fewer cores than ranks; only the steps are fewer."""
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--steps", 2, nproc=8)
    assert result.code == 0, result.err
    assert "checked: all 8 ranks have the same weights to the bit" in result.out


def test_replicas_that_never_talk_are_found(tmp_path):
    (tmp_path / "silent.py").write_text(
        "import runpy, sys, torch.nn.parallel\n"
        "class Silent(torch.nn.Module):\n"
        "    def __init__(self, net, **_): super().__init__(); self.net = net\n"
        "    def forward(self, *a): return self.net(*a)\n"
        "    def _get_ddp_logging_data(self): return {}\n"
        "torch.nn.parallel.DistributedDataParallel = Silent\n"
        f"sys.argv = [{str(ROOT / SCRIPT)!r}, *sys.argv[1:]]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    result = run(tmp_path / "silent.py", tmp_path, "--device", "cpu", "--steps", 2, nproc=2)
    assert result.code != 0
    assert "ranks hold different weights" in result.err


LEAVES = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, {root!r})
from common import runtime

store, rank, world_size = next(dist.rendezvous("env://"))
sys.setswitchinterval(1000)  # who wants the GIL gets it when it is given up, and not before
for turn in range(30):
    dist.init_process_group("gloo", store=dist.PrefixStore(str(turn), store), rank=rank, world_size=world_size)
    ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    ddp(torch.ones(8, 64)).sum().backward()
    runtime.gather("as at the end of training")
    runtime.shutdown()
    del ddp
    if rank == 0:
        print(turn, flush=True)
"""


def test_no_rank_hangs_after_its_last_line(tmp_path):
    """gloo's destructor joins threads that may want the GIL, and DDP would run it with the GIL held."""
    (tmp_path / "leaves.py").write_text(LEAVES.format(root=str(ROOT)))
    result = run(tmp_path / "leaves.py", tmp_path, nproc=2)
    assert result.code == 0, result.err
    assert result.out.split() == [str(turn) for turn in range(30)]


@needs_compiler
def test_compiled_with_accumulation_equals_eager(tmp_path):
    flags = ("--steps", 3, "--micro-batch-size", 3)
    eager = train(SCRIPT, tmp_path / "eager", *flags, nproc=2)
    compiled = train(SCRIPT, tmp_path / "compiled", *flags, "--compile", nproc=2)
    assert compiled.column("loss") == pytest.approx(eager.column("loss"), rel=1e-5)


@pytest.fixture
def meter(tmp_path, monkeypatch):
    """A Meter of three ranks on a clock that the test moves."""
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    meter = metrics.Meter(
        tmp_path,
        model="llama-124m",
        config=shapes.SIZES["llama-124m"],
        device=torch.device("cpu"),
        dtype="bf16",
        seq_len=32,
        global_batch_size=12,
        steps=20,
        start_step=0,
    )
    meter.clock = clock
    return meter


def test_tokens_per_second_counts_the_gaps_between_the_phases(meter):
    for name, seconds in (("data", 1.0), ("forward", 2.0)):
        with meter.phase(name):
            meter.clock[0] += seconds
    meter.clock[0] += 5.0  # backward, a save, an evaluation: nothing times these
    meter.log(4, torch.ones(4, 2), 1.0, 0, 1.0)
    record = meter.records[-1]
    assert record["tokens_per_second"] == 4 * 12 * 32 / 8.0
    assert record["data_wait_share"] == 1.0 / 8.0
    meter.clock[0] += 2.0
    meter.log(5, torch.ones(1, 2), 1.0, 0, 1.0)
    assert meter.records[-1]["tokens_per_second"] == 12 * 32 / 2.0
    assert meter.records[-1]["data_wait_share"] == 0


def test_a_gradient_norm_may_be_on_another_device_than_the_loss(meter):
    """As with a loss on the GPU and gradients that fully_shard keeps on the CPU."""
    meter.note(torch.ones((), device="meta"), torch.ones(()))
    assert meter.since_last_log().device.type == "meta"


def test_mfu_is_against_the_peak_of_all_devices(meter):
    assert meter.mfu(1e6) is None
    meter.peak_flops, meter.devices = 989.4e12, 8
    assert meter.mfu(8 * 468_000) == pytest.approx(468_000 * meter.flops_per_token / 989.4e12)


def test_mfu_is_against_the_peak_of_this_device_in_this_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    for dtype, peak in (("bf16", 989.4e12), ("fp32", 67e12)):
        shape = {"model": "nano", "config": shapes.SIZES["nano"], "device": torch.device("cpu"), "dtype": dtype}
        batch = {"seq_len": 32, "global_batch_size": 12, "steps": 20, "start_step": 0}
        meter = metrics.Meter(tmp_path, **shape, **batch)
        assert meter.mfu(1e6) == pytest.approx(1e6 * shapes.flops_per_token(shapes.SIZES["nano"], 32) / peak)


def test_the_slowest_rank_and_its_lag(meter, monkeypatch):
    def three_ranks(mine):
        return [{**mine, "busy": busy, "data": wait} for busy, wait in ((1.0, 0.1), (1.5, 0.4), (1.0, 0.2))]

    monkeypatch.setattr(metrics, "gather", three_ranks)
    meter.clock[0] += 2.0
    meter.log(1, torch.ones(1, 2), 1.0, 0, 1.0)
    record = meter.records[-1]
    assert (record["slowest_rank"], record["slowest_rank_lag"]) == (1, 0.5)
    monkeypatch.setattr(metrics, "gather", lambda mine: three_ranks(mine)[:2])
    meter.clock[0] += 2.0
    meter.log(2, torch.ones(1, 2), 1.0, 0, 1.0)
    assert meter.records[-1]["slowest_rank_lag"] == 0.5  # of two, over the other
    assert record["data_wait_share"] == 0.2


def test_the_first_step_that_is_not_finite_is_named(meter):
    window = torch.ones(5, 2)
    window[3, 0] = math.nan
    with pytest.raises(runtime.UserError, match="step 19 "):
        meter.log(20, window, 1.0, 0, 1.0)
    window[3, 0], window[1, 1] = 1.0, math.inf
    with pytest.raises(runtime.UserError, match="step 17 "):
        meter.log(20, window, 1.0, 0, 1.0)
    meter.clock[0] += 1.0
    meter.dtype = "fp16"  # there an overflowing gradient is the scaler's business
    meter.log(20, window, 1.0, 1, 1.0)


def test_nothing_waits_for_the_gpu_inside_the_step():
    """A synchronize() around the phases would end the overlap that they time."""
    # no training script imports these: a clock has to wait, and a token has to be read
    others = {ROOT / "common/step_cost.py", ROOT / "common/generate.py"}
    for file in {*ROOT.glob("0*/train*.py"), *ROOT.glob("common/*.py")} - others:
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        assert not [c for c in calls if isinstance(c, ast.Attribute) and c.attr == "synchronize"], file


def test_a_record_cut_short_by_a_kill_is_left_out(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert report.read_records(file) == [{"step": 1, "loss": 2.0}]
    assert report.read_records(tmp_path / "none") == []
