"""07_memory_tricks/memory_profile.py against the allocator's own count."""

import json
import subprocess
import sys

import pytest
import torch
from support.chapter import load
from support.harness import ODD, ROOT, config_of, run

from common import model

memory_profile = load("07_memory_tricks/memory_profile.py")
helper = load("07_memory_tricks/_memory_profile.py")
shared = load("07_memory_tricks/_shared.py")

TIED = {**ODD, "vocab_size": 97, "num_key_value_heads": 2, "num_hidden_layers": 1, "tie_word_embeddings": True}


def prepare(shape: dict, dtype: str = "fp32"):
    """A model, its optimizer with state, and a batch."""
    config = config_of(shape)
    net = model.Transformer(config)
    net.init_weights(0)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, (5, 24), generator=torch.Generator().manual_seed(1))
    batch = [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]
    memory_profile.training_step(net, optimizer, batch, dtype, lambda phase: None)
    return net, optimizer, batch


def allocator_changes(net, optimizer, batch, dtype: str) -> dict[str, int]:
    """By phase, the bytes that torch's CPU allocator gave out in it, less those it took back."""
    changes = {}
    profiler = None
    began = None

    def enter(phase: str) -> None:
        nonlocal profiler, began
        if profiler is not None:
            profiler.__exit__(None, None, None)
            events = profiler.profiler.kineto_results.events()
            changes[began] = sum(event.nbytes() for event in events if event.name() == "[memory]")
        if phase != "end":
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            began = phase
            profiler.__enter__()

    memory_profile.training_step(net, optimizer, batch, dtype, enter)
    return changes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [ODD, TIED], ids=["untied", "tied"])
def test_live_bytes_are_the_allocators(shape, dtype):
    prepared = prepare(shape, dtype)
    profile = memory_profile.profile_step(*prepared, dtype)
    at = {phase: profile.live_bytes[moment] for phase, moment in profile.phases.items()}
    expected = allocator_changes(*prepared, dtype)
    assert at["backward"] - at["forward"] == expected["forward"]
    assert at["update"] - at["backward"] == expected["backward"]
    assert at["end"] - at["update"] == expected["update"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [ODD, TIED], ids=["untied", "tied"])
def test_categories_are_those_of_independent_counts(shape, dtype):
    net, optimizer, batch = prepare(shape, dtype)
    profile = memory_profile.profile_step(net, optimizer, batch, dtype)
    found = helper.by_category(profile)
    memory_profile.check(profile, found, net)
    end_of_forward, end_of_backward = profile.phases["backward"], profile.phases["update"]

    with shared.saved_for_backward(net) as saved, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        net(*batch)
    known = {t.untyped_storage().data_ptr() for t in (*batch, *net.buffers())}
    activations = sum(size for address, size in saved["activations"].items() if address not in known)
    assert found["activations"][end_of_forward] == activations
    assert found["weight copies"][end_of_forward] == sum(saved["weight copies"].values())
    assert (found["weight copies"][end_of_forward] > 0) == (dtype == "bf16")

    numbers = sum(p.numel() for p in net.parameters())
    assert set(found["parameters"]) == {4 * numbers}
    assert set(found["batch"]) == {2 * 8 * 5 * 23}
    assert found["gradients"][end_of_backward] == 4 * numbers
    assert found["gradients"][-1] == 0
    assert found["activations"][end_of_backward] == 0


def test_checkpointing_shows_as_fewer_activations():
    net, optimizer, batch = prepare(ODD)
    plain = memory_profile.profile_step(net, optimizer, batch, "fp32")
    model.checkpoint_blocks(net, "full")  # as --checkpointing full does
    recomputed = memory_profile.profile_step(net, optimizer, batch, "fp32")
    kept = [helper.by_category(p)["activations"][p.phases["backward"]] for p in (plain, recomputed)]
    assert kept[1] < kept[0] / 3
    memory_profile.check(recomputed, helper.by_category(recomputed), net)


def test_against_torchs_own_tracker():
    """A private module, which knows neither what autograd saves nor which module made it: only a second opinion."""
    MemTracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker
    net, optimizer, batch = prepare(ODD)
    profile = memory_profile.profile_step(net, optimizer, batch, "fp32")
    found = helper.by_category(profile)
    tracker = MemTracker()
    tracker.track_external(net, optimizer, *batch)
    theirs = {}

    def enter(phase: str) -> None:
        snapshot = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        theirs[phase] = {getattr(kind, "value", kind): size for kind, size in snapshot.items()}

    with tracker:
        memory_profile.training_step(net, optimizer, batch, "fp32", enter)
    ours = {"Parameter": "parameters", "Buffer": "buffers", "Gradient": "gradients", "Optstate": "optimizer state"}
    for phase in ("backward", "update"):
        for their_name, our_name in ours.items():
            assert theirs[phase][their_name] == found[our_name][profile.phases[phase]], (phase, our_name)
        assert theirs[phase]["Total"] == profile.live_bytes[profile.phases[phase]]


def test_the_script(tmp_path):
    (tmp_path / "odd.json").write_text(json.dumps(ODD))
    flags = ["--model", "odd.json", "--seq-len", 19, "--micro-batch-size", 3, "--device", "cpu"]
    result = run("07_memory_tricks/memory_profile.py", tmp_path, *flags, "--json", "summary.json")
    assert result.code == 0, result.err
    assert result.out.count("checked: ") == 3
    assert "left out: the caching allocator's snapshot" in result.out
    summary = result.summary
    rows = {row["name"]: row for row in summary["rows"]}
    numbers = summary["parameters"]
    assert rows["parameters"]["end of backward bytes"] == rows["gradients"]["end of backward bytes"] == 4 * numbers
    total = {moment: size for moment, size in rows["all"].items() if moment != "name"}
    assert summary["total_bytes"] == total[f"peak, in {summary['peak_phase']} bytes"] == max(total.values())
    matrix = 4 * 36 * 52  # each of three in each of three layers has AdamW's two moments and its count of steps, too
    assert rows["in model.layers.*.mlp"]["before the step bytes"] == 3 * 3 * (3 * matrix + 4)
    assert rows["activations"]["end of forward bytes"] == summary["activation_bytes"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--model", "llama-9b"], "llama-9b"),
        (["--micro-batch-size", "0"], "--micro-batch-size"),
        (["--seq-len", "5000"], "--seq-len 5000"),
        (["--dtype", "fp8"], "fp8"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path, flags, word):
    result = run("07_memory_tricks/memory_profile.py", tmp_path, "--device", "cpu", *flags)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert word in result.err


def test_fragmentation_of_segments():
    used, free = "active_allocated", "inactive"
    segments = [
        {"total_size": 20, "allocated_size": 7, "blocks": blocks((4, used), (10, free), (3, used), (3, free))},
        {"total_size": 8, "allocated_size": 8, "blocks": blocks((8, used))},
    ]
    assert helper.fragmentation(segments) == {
        "segments": 2,
        "reserved_bytes": 28,
        "allocated_bytes": 15,
        "unused_bytes": 13,
        "largest_free_block_bytes": 10,
    }


def blocks(*sizes_and_states) -> list[dict]:
    return [{"size": size, "state": state} for size, state in sizes_and_states]


# --- on a GPU


def on_gpu(gpus: dict[str, str], folder, *flags: str) -> dict:
    command = [sys.executable, "07_memory_tricks/memory_profile.py", "--device", "cuda", *flags]
    command += ["--json", str(folder / "p.json"), "--snapshot", str(folder / "p.pickle")]
    result = subprocess.run(command, cwd=ROOT, env=gpus, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("checked: ") == 3
    return json.loads((folder / "p.json").read_text())


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gpu_tensors_and_libraries_are_what_is_allocated(gpus, tmp_path, dtype):
    summary = on_gpu(gpus, tmp_path, "--dtype", dtype)
    (row,) = (row for row in summary["rows"] if row["name"] == "libraries")
    libraries = {size for moment, size in row.items() if moment != "name"}
    assert len(libraries) == 1  # workspaces were made in the first step, and stay
    assert libraries.pop() < 200 * 2**20
    # blocks are rounded up to 512 bytes, and what operators free before they return counts in the peak only
    assert summary["total_bytes"] <= summary["peak_memory_bytes"] < 1.2 * summary["total_bytes"]


@pytest.mark.gpu(n=1)
def test_gpu_allocator(gpus, tmp_path):
    found = on_gpu(gpus, tmp_path)["allocator"]
    assert found["end_of_forward"]["unused_bytes"] >= found["end_of_forward"]["largest_free_block_bytes"]
    assert (tmp_path / "p.pickle").stat().st_size > 10_000
    fixed, expandable = (found[f"growing_tensors_reserved_bytes{end}"] for end in ("", "_expandable"))
    assert fixed == sum(helper.GROWING_SIZES)
    assert expandable < 1.2 * max(helper.GROWING_SIZES)
    assert "allocate 1024.00 MiB" in found["error_at_limit"] or "allocate 1.00 GiB" in found["error_at_limit"]
