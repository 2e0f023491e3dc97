"""05_ddp/ddp_from_scratch.py and data_parallel.py: one process, two and three, by hand and by torch: one result."""

import copy
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.chapter import load
from support.harness import ROOT, TINY, command, config_of, descendants, finish, holds, kill_all, run
from support.harness import start as start_process
from torch import nn

from old import data, exits, model, shapes

data_parallel = load("05_ddp/data_parallel.py")
data_parallel_bytes = load("05_ddp/_data_parallel_bytes.py")
ddp_from_scratch = load("05_ddp/ddp_from_scratch.py")
ddp_link = load("05_ddp/_ddp_from_scratch_link.py")
ddp_report = load("05_ddp/_ddp_from_scratch_report.py")
ddp_timing = load("05_ddp/_ddp_from_scratch_timing.py")

AVERAGES = [
    ddp_from_scratch.average_gradients,
    ddp_from_scratch.average_buckets,
    ddp_from_scratch.average_during_backward,
]
STEPS = 4
SMALL = ("--model", "tiny.json", "--device", "cpu", "--json", "s.json")


def start(script: str, folder, *flags, nproc: int | None = None, warm: bool = True, **env: str):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(TINY))
    result = run(script, folder, *SMALL, *flags, nproc=nproc, warm=warm, **env)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return json.loads((folder / "s.json").read_text()), result.out


@pytest.fixture(scope="module")
def runs(once) -> Callable[[int], tuple[dict, str]]:
    """runs(n): the summary and the output on n ranks; two is what a bare `python` starts."""

    def run_on(folder: Path, n: int) -> tuple[dict, str]:
        return start("05_ddp/ddp_from_scratch.py", folder, "--steps", STEPS, nproc=None if n == 2 else n)

    return partial(once, "ddp from scratch", run_on)


@pytest.fixture(scope="module")
def beside(once) -> tuple[dict, str]:
    return once("data parallel", lambda folder: start("05_ddp/data_parallel.py", folder, "--steps", 1, warm=False))


def tiny() -> nn.Module:
    return model.build("tiny", config_of(TINY), seed=0)


def one_process(steps: int, momentum: float) -> list[float]:
    """The losses of plain SGD on the whole batch, in float64: what every number of ranks must reach."""
    net = tiny().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=momentum)
    sequences = data.Sequences(data.load_corpus().train, 16)
    order = data.batch_order(len(sequences), global_batch_size=24, micro_batch_size=24, seed=0)
    losses = []
    for batch in itertools.islice(order, steps):
        inputs, targets = (torch.stack(tensors) for tensors in zip(*(sequences[i] for i in batch), strict=True))
        loss = nn.functional.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("n", [1, 2, 3])
def test_losses_are_those_of_one_process(runs, n):
    summary, _ = runs(n)
    expected = one_process(ddp_timing.WARMUP_STEPS + STEPS, momentum=0.9)
    assert (summary["world_size"], len(summary["variants"])) == (n, 8)
    for variant in summary["variants"][1:]:
        assert variant["losses"] == pytest.approx(expected, rel=1e-5), variant["name"]
        assert variant["off_one_process"] < 1e-4
    assert expected[-1] < expected[0]
    assert (summary["first_loss"], summary["last_loss"]) == pytest.approx((expected[0], expected[-1]), rel=1e-5)


def test_a_bucket_larger_than_any_counter_is_one_bucket(tmp_path):
    flags = ("--steps", 1, "--bucket-mib", 1e300)  # torch's DistributedDataParallel keeps its bytes in 64 bits
    summary, _ = start("05_ddp/ddp_from_scratch.py", tmp_path, *flags, nproc=2)
    of_each = {variant["name"]: variant["bucket_bytes"] for variant in summary["variants"]}
    assert of_each["(2) buckets"] == of_each["(4) DistributedDataParallel"] == [summary["gradient_bytes"]]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_who_holds_which_bits(runs, n):
    control, *averaged = runs(n)[0]["variants"]
    assert {len(set(variant["weights_sha256"])) for variant in averaged} == {1}
    assert len(set(control["weights_sha256"])) == n
    digests = {variant["name"]: variant["weights_sha256"][0] for variant in averaged}
    assert digests["(2) buckets"] == digests["(3) overlap"]
    assert digests["(1) each gradient"] == digests["(3) overlap, a gradient each"]
    if n < 3:
        assert len(set(digests.values())) == 1


def test_what_is_measured_where_there_is_communication(runs):
    for n in (1, 2, 3):
        summary, out = runs(n)
        parameters = sum(p.numel() for p in tiny().parameters())
        assert (summary["parameters"], summary["gradient_bytes"]) == (parameters, 4 * parameters)
        for variant in summary["variants"]:
            assert variant["step_seconds"]["n"] == STEPS
            measured = n > 1 and not variant["name"].startswith("(0)")
            assert (variant["communication_seconds"] is not None) == measured
            assert (variant["hidden_share"] is not None) == measured
            if variant["bucket_bytes"]:
                assert sum(variant["bucket_bytes"]) == 4 * parameters
        assert ("nothing to hide" in out) == (n == 1)
    assert "torchrun --nproc_per_node=2" in runs(2)[1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[4]["weights_sha256"].append("drifted"), "ranks hold different weights"),
        (lambda rows: rows[0].update(weights_sha256=rows[1]["weights_sha256"]), "they read the same data"),
        (lambda rows: rows[3].update(weights_sha256=["other"] * 2), "has changed their sums"),
        (lambda rows: rows[1].update(weights_sha256=["other"] * 2), "a sum of 2 terms came out differently"),
        (lambda rows: rows[7].update(off_one_process=2e-4), "that is no rounding"),
        (lambda rows: rows[3].update(started_in_backward=0), r"0 of \d+ all-reduces started in backward"),
    ],
)
def test_a_claim_that_does_not_hold_fails(runs, spoil, message):
    rows = copy.deepcopy(runs(2)[0]["variants"])
    ddp_report.check(rows)
    spoil(rows)
    with pytest.raises(AssertionError, match=message):
        ddp_report.check(rows)


@pytest.mark.parametrize("cap", [0, 1, 5000, 40_000, float("inf")])
def test_each_parameter_is_in_one_bucket_last_first(cap):
    net = tiny()
    net.model.norm.weight.requires_grad_(False)  # has no gradient, so no place
    buckets = ddp_from_scratch.make_buckets(net, cap)
    trained = [p for p in net.parameters() if p.requires_grad]
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in reversed(trained)]
    assert all(buckets)
    for bucket, after in itertools.zip_longest(buckets, buckets[1:]):
        size = sum(p.nbytes for p in bucket)
        assert size <= cap or len(bucket) == 1
        assert after is None or size + after[0].nbytes > cap  # full


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layers(nn.Module):
    """Three layers, used in the order given: backward yields the gradients in the reverse of it."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.order = order

    def forward(self, x: torch.Tensor, _targets: None = None) -> torch.Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return x.sum()


@pytest.fixture
def launches(group, monkeypatch) -> list[int]:
    """The number of gradients that existed at the start of each all-reduce; the net is launches.net."""
    seen, real = Counter(), dist.all_reduce
    seen.log = []

    def recording(*args, **flags):
        seen.log.append(sum(p.grad is not None for p in seen.net.parameters()))
        return real(*args, **flags)

    monkeypatch.setattr(dist, "all_reduce", recording)
    return seen


@pytest.mark.parametrize(
    ("order", "expected", "early"),
    [
        ([0, 1, 2], [1, 2, 3], 2),  # last layer first, as the buckets are: each leaves at once
        ([2, 1, 0], [3, 3, 3], 0),  # first layer first: the others wait for their turn
        ([1, 2, 0], [2, 3, 3], 1),
    ],
)
def test_buckets_leave_during_backward_and_never_out_of_turn(launches, order, expected, early):
    variant = ddp_from_scratch.make_variant("", Layers(order), ddp_from_scratch.average_during_backward, 0)
    net = launches.net = variant.net
    for _ in range(2):  # the second step must find the first one's state cleared
        launches.log.clear()
        net.zero_grad()
        with ddp_timing.watch(net) as timeline:
            variant.forward(torch.ones(2, 4), None).backward()
            assert launches.log == expected
            plain = copy.deepcopy([p.grad for p in net.parameters()])
            variant.average()
        assert ddp_report.started_in_backward(ddp_timing.Record(timelines=[timeline])) == early
        assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), plain, strict=True))


@pytest.mark.parametrize("average", AVERAGES)
def test_a_parameter_without_gradient_is_named_and_nothing_hangs(launches, average):
    variant = ddp_from_scratch.make_variant("", Layers([0, 2]), average, 0)
    launches.net = variant.net
    with pytest.raises(AssertionError, match=r"no gradient for layers\.1\.weight"):
        ddp_from_scratch.forward_backward_average(variant, torch.ones(2, 4), None)
    # layer 2's bucket left before anyone could know
    assert len(launches.log) == (average is ddp_from_scratch.average_during_backward)


@pytest.mark.parametrize("average", AVERAGES[1:])
def test_a_frozen_parameter_is_left_alone(launches, average):
    net = Layers([0, 1, 2])
    net.layers[1].weight.requires_grad_(False)
    variant = ddp_from_scratch.make_variant("", net, average, 100)
    launches.net = variant.net
    ddp_from_scratch.forward_backward_average(variant, torch.ones(2, 4), None)
    assert [p.grad is None for p in variant.net.parameters()] == [False, True, False]
    assert len(launches.log) == 2


def test_the_literal_loop_is_the_first_thing_after_the_imports():
    source = (ROOT / "05_ddp/ddp_from_scratch.py").read_text()
    after_imports = source.split("from old import", 1)[1].splitlines()[1:81]
    functions = [line.split("(")[0] for line in after_imports if line.startswith("def ")]
    assert functions[0] == "def average_gradients"
    assert {f"def {average.__name__}" for average in AVERAGES} <= set(functions)


def test_a_step_is_taken_apart_where_it_must_be(group):
    """The timeline's moments come in their order, and an all-reduce that was waited for has an end."""
    for average in AVERAGES:
        variant = ddp_from_scratch.make_variant("", Layers([0, 1, 2]), average, 0)
        with ddp_timing.watch(variant.net) as timeline:
            ddp_from_scratch.forward_backward_average(variant, torch.ones(2, 4), None)
        assert timeline["start"] < timeline["forward_end"] < timeline["last_gradient"]
        assert [seen["bytes"] for seen in timeline["all_reduces"]] == [64, 64, 64]
        assert all(timeline["forward_end"] < seen["start"] for seen in timeline["all_reduces"])
        if average is not ddp_from_scratch.average_during_backward:
            assert all(timeline["last_gradient"] < seen["start"] < seen["end"] for seen in timeline["all_reduces"])
        assert dist.all_reduce.__name__ == "all_reduce"
        assert "watch" not in dist.all_reduce.__qualname__  # put back


@pytest.mark.parametrize(("cores", "ranks", "hidden_is_shown"), [(2, 2, False), (3, 2, False), (4, 2, True)])
def test_hidden_time_is_shown_where_a_core_is_free_for_it(runs, monkeypatch, cores, ranks, hidden_is_shown):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(ddp_report, "available_cores", lambda: cores)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    reason = ddp_report.no_core_for_communication(None, torch.device("cpu"))
    assert (reason is None) == hidden_is_shown
    assert ddp_report.no_core_for_communication(1000, torch.device("cpu")) is None
    told = ddp_report.table(runs(2)[0]["variants"], shows_hidden=hidden_is_shown)
    assert ("hidden" in told) == hidden_is_shown
    assert "same letter = identical" in told


def hosts_of(process: subprocess.Popen) -> list[str]:
    """Names of the hosts of this process that are there."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=600, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.split()[0].endswith(f"-{process.pid}")]


@pytest.fixture
def two_hosts(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """two_hosts(flags): the script, started on two hosts; whatever the test finds, nothing of it stays."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, ip and tc (Debian's iproute2)")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    started = []

    def on_two_hosts(*flags) -> subprocess.Popen:
        started.append(start_process(command("05_ddp/ddp_from_scratch.py", *SMALL, *flags), tmp_path))
        return started[0]

    yield on_two_hosts
    for process in started:
        kill_all(process)
        for host in hosts_of(process):
            subprocess.run(["ip", "netns", "delete", host], timeout=600, check=True)


@pytest.mark.long
def test_two_hosts_with_a_slow_link(tmp_path, two_hosts):
    """The bytes of a step cannot be faster than the link, and no host is left behind."""
    process = two_hosts("--steps", 3, "--link-mbit", 200, "--plot", "overlap.png", "--model", "nano")
    result = finish(process, tmp_path, 240)
    assert result.code == 0, result.err
    assert hosts_of(process) == []
    assert "a link of 200 Mbit/s" in result.out
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["world_size"], summary["link_mbit_per_second"]) == (2, 200)
    least = 8 * summary["gradient_bytes"] / 200e6
    for variant in summary["variants"][1:]:
        # one second of the bucket's credit (256 kB) may pass at once
        assert variant["communication_seconds"]["min"] > 0.9 * least, variant["name"]
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_two_hosts_and_their_ranks_go_when_they_are_told_to(two_hosts):
    process = two_hosts("--steps", 100_000, "--link-mbit", 1000)

    def has_ranks() -> bool:
        pids = [["ip", "netns", "pids", host] for host in hosts_of(process)]
        return [bool(subprocess.run(of, capture_output=True, timeout=600).stdout) for of in pids] == [True, True]

    assert holds(process, has_ranks)
    process.terminate()
    assert process.wait(timeout=600) == 128 + signal.SIGTERM
    assert descendants(process) == []
    assert hosts_of(process) == []


def test_a_slow_link_needs_root_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(exits.UserError, match="it needs Linux, root, ip and tc"):
        ddp_link.run_on_two_hosts(1000)


def test_data_parallel_and_ddp_train_as_one_process_does(beside):
    summary, out = beside
    expected = one_process(summary["steps"], momentum=0)
    assert [row["method"] for row in summary["methods"]] == ["DataParallel", "DistributedDataParallel"]
    for row in summary["methods"]:
        assert row["losses"] == pytest.approx(expected, rel=1e-5)
        assert row["step_seconds"]["n"] == 5
    assert summary["emulated"] is True
    assert "No two GPUs here" in out


def test_the_bytes_of_a_step(beside):
    nano = 4 * shapes.parameter_count(shapes.SIZES["nano"])
    for row in beside[0]["traffic"]:
        n = row["devices"]
        assert row["weight_bytes"] == nano
        assert (
            row["data_parallel_device_0_sent_bytes"] == row["data_parallel_device_0_received_bytes"] == (n - 1) * nano
        )
        assert row["data_parallel_other_sent_bytes"] == nano
        assert row["ddp_rank_sent_bytes"] == 2 * (n - 1) * nano // n  # nano divides by 2, 4 and 8
        assert row["data_parallel_output_bytes"] == 24 * 16 * 256 * 4 * (n - 1) // n
    assert [row["devices"] for row in beside[0]["traffic"]] == [2, 4, 8]


@pytest.mark.parametrize(("n", "size"), [(1, 5), (2, 8), (3, 10), (5, 3), (4, 4)])
def test_the_ring_sums_and_moves_each_chunk_twice(n, size):
    generator, moved = torch.Generator().manual_seed(0), Counter()
    flats = [torch.randint(-9, 9, (size,), generator=generator).float() for _ in range(n)]
    total = sum(flats[1:], flats[0].clone())
    data_parallel_bytes.ring_all_reduce(flats, moved)
    assert all(torch.equal(flat, total) for flat in flats)
    assert sum(moved["model", "sent", rank] for rank in range(n)) == 2 * (n - 1) * size * 4
    assert moved["model", "sent", 0] == moved["model", "received", 1 % n]


def test_bytes_or_gradients_that_are_wrong_fail(monkeypatch):
    text = torch.randint(0, 256, (6, 17), generator=torch.Generator().manual_seed(0))
    inputs, targets = text[:, :-1], text[:, 1:]
    count = partial(data_parallel_bytes.count_bytes, data_parallel.data_parallel_by_hand, tiny(), inputs, targets)
    assert count(3)["gradient_difference"] < 1e-5
    honest_ring, honest_send = data_parallel_bytes.ring_all_reduce, data_parallel_bytes.send
    monkeypatch.setattr(data_parallel_bytes, "ring_all_reduce", lambda flats, moved: None)
    with pytest.raises(AssertionError, match="gradients differ from one process's by"):
        count(3)
    monkeypatch.setattr(data_parallel_bytes, "ring_all_reduce", honest_ring)

    def wasteful(tensor, source, target, what, moved):
        honest_send(tensor, source, target, what, moved)
        return honest_send(tensor, source, target, what, moved)

    monkeypatch.setattr(data_parallel_bytes, "send", wasteful)
    with pytest.raises(AssertionError):
        count(3)


@pytest.mark.parametrize("script", ["ddp_from_scratch.py", "data_parallel.py"])
def test_a_wrong_flag_is_one_line_before_any_rank_starts(tmp_path, script):
    result = run(f"05_ddp/{script}", tmp_path, "--model", "giant", "--device", "cpu")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert "giant" in result.err
    assert result.out == ""


@pytest.mark.long
def test_a_failing_ddp_process_ends_the_comparison(tmp_path):
    """The worker's own traceback, and nothing left running: harness.run looks."""
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "sitecustomize.py").write_text(
        "import multiprocessing, sys\n"
        "if '--multiprocessing-fork' in sys.argv:\n"
        "    import torch.nn.parallel\n"
        "    class Broken:\n"
        "        def __init__(self, *_, **__): raise RuntimeError('planted')\n"
        "    torch.nn.parallel.DistributedDataParallel = Broken\n"
    )
    result = run("05_ddp/data_parallel.py", tmp_path, *SMALL, PYTHONPATH=str(tmp_path))
    assert result.code == 1
    assert "RuntimeError: planted" in result.err


@pytest.mark.gpu(n=2)
def test_from_scratch_over_nccl(gpus, tmp_path):
    """The script's own checks are the test: two ranks, all variants to the bit."""
    flags = ("--device", "cuda", "--steps", "4", "--json", "s.json")
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run("05_ddp/ddp_from_scratch.py", tmp_path, *flags, nproc=2, **visible)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["world_size"] == 2
    assert len({variant["weights_sha256"][0] for variant in summary["variants"][1:]}) == 1


@pytest.mark.gpu(n=2)
def test_real_data_parallel_beside_ddp(gpus, tmp_path):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    flags = ("--device", "cuda", "--seq-len", 256, "--global-batch-size", 48, "--json", "s.json")
    result = run("05_ddp/data_parallel.py", tmp_path, *flags, **visible)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    dp, ddp = summary["methods"]
    assert summary["emulated"] is False
    assert dp["losses"] == pytest.approx(ddp["losses"], rel=1e-4)
    assert dp["peak_memory_bytes_by_gpu"][0] > dp["peak_memory_bytes_by_gpu"][1]
