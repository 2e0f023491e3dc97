"""07_memory_tricks/memory_profile.py against the allocator's own count, and how the scripts end without memory."""

import json
import subprocess
import sys

import pytest
import torch
from support.chapter import load
from support.harness import BASELINE, ODD, ROOT, config_of, run, tiny_flags, with_prelude, write_tiny
from torch.utils.checkpoint import checkpoint

from old import exits, model
from old.step_cost import saved_for_backward

memory_profile = load("07_memory_tricks/memory_profile.py")
reporting = load("07_memory_tricks/_memory_profile_report.py")
allocator = load("07_memory_tricks/_memory_profile_cuda.py")

TIED = {**ODD, "vocab_size": 97, "num_key_value_heads": 2, "num_hidden_layers": 1, "tie_word_embeddings": True}
MORE_THAN_ANY_ADDRESS_SPACE = 2**47  # bytes: refused at once, and no page of it is touched


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
    found = reporting.timelines(profile)
    memory_profile.check(profile, found, net)
    end_of_forward, end_of_backward = profile.phases["backward"], profile.phases["update"]

    with saved_for_backward(net) as saved, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        net(*batch)
    known = {t.untyped_storage().data_ptr() for t in (*batch, *net.buffers())}
    activations = sum(size for address, size in saved.activations.items() if address not in known)
    assert found["activations"][end_of_forward] == activations
    assert found["weight copies"][end_of_forward] == sum(saved.weight_copies.values())
    assert (found["weight copies"][end_of_forward] > 0) == (dtype == "bf16")

    numbers = sum(p.numel() for p in net.parameters())
    assert set(found["parameters"]) == {4 * numbers}
    assert set(found["batch"]) == {2 * 8 * 5 * 23}
    assert found["gradients"][end_of_backward] == 4 * numbers
    assert found["gradients"][-1] == 0
    assert found["activations"][end_of_backward] == 0


def test_modules_hold_what_the_categories_hold():
    net, optimizer, batch = prepare(ODD)
    profile = memory_profile.profile_step(net, optimizer, batch, "fp32")
    rows = {row["module"]: row for row in reporting.by_module(profile)}
    for category, phase in reporting.KEPT.items():
        in_all = reporting.timelines(profile)[category][profile.phases[phase]]
        assert sum(row[category] for row in rows.values()) == in_all
    tokens = 5 * 23
    gate, silu = rows["model.layers.1.mlp.gate_proj"], rows["model.layers.1.mlp"]
    assert gate["parameters"] == gate["gradients"] == 4 * 36 * 52
    assert gate["optimizer state"] == 8 * 36 * 52 + 4
    assert gate["activations"] == 4 * tokens * 52  # its output, which silu saves
    assert silu["activations"] == 2 * 4 * tokens * 52  # silu's output, and its product with up_proj's
    merged = {row["module"]: row for row in reporting.merge_layers(list(rows.values()))}
    assert merged["model.layers.*.mlp"]["parameters"] == 3 * 3 * 4 * 36 * 52


def test_checkpointing_shows_as_fewer_activations():
    net, optimizer, batch = prepare(ODD)
    plain = memory_profile.profile_step(net, optimizer, batch, "fp32")
    for block in net.model.layers.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    recomputed = memory_profile.profile_step(net, optimizer, batch, "fp32")
    kept = [reporting.timelines(p)["activations"][p.phases["backward"]] for p in (plain, recomputed)]
    assert kept[1] < kept[0] / 3
    memory_profile.check(recomputed, reporting.timelines(recomputed), net)


def test_against_torchs_own_tracker():
    """A private module, which knows neither what autograd saves nor which module made it: only a second opinion."""
    MemTracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker
    net, optimizer, batch = prepare(ODD)
    profile = memory_profile.profile_step(net, optimizer, batch, "fp32")
    found = reporting.timelines(profile)
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
    result = run("07_memory_tricks/memory_profile.py", tmp_path, *flags, "--json", "summary.json", "--plot", "p.png")
    assert result.code == 0, result.err
    assert result.out.count("checked: ") == 3
    assert "left out: the caching allocator's snapshot" in result.out
    summary = result.summary
    numbers = summary["parameters"]
    assert summary["weight_bytes"] == summary["gradient_bytes"] == 4 * numbers
    assert summary["total_bytes"] == sum(summary["moments"][f"peak, in {summary['peak_phase']}"].values())
    assert summary["total_bytes"] >= max(sum(sizes.values()) for sizes in summary["moments"].values())
    assert sum(row["activations"] for row in summary["modules"]) == summary["activation_bytes"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


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
    assert allocator.fragmentation(segments) == {
        "segments": 2,
        "reserved_bytes": 28,
        "allocated_bytes": 15,
        "unused_bytes": 13,
        "largest_free_block_bytes": 10,
    }


def blocks(*sizes_and_states) -> list[dict]:
    return [{"size": size, "state": state} for size, state in sizes_and_states]


# --- how a script ends when there is no memory


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


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])  # rank 1 waits 15 s for rank 0 to tell
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


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), "an unknown number of bytes asked for"),
        (MemoryError("Unable to allocate 7.28 TiB for an array with shape (3,)"), "7.28 TiB asked for"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 3221225472 bytes."), "3.00 GiB"),
        (RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 64]"), "an unknown number"),
        (OSError(12, "Cannot allocate memory"), "an unknown number of bytes asked for"),
    ],
)
def test_too_little_ram_is_known_by_its_errors(error, asked):
    assert exits.is_out_of_memory(error)
    line = exits.describe_out_of_memory(error)
    assert asked in line
    assert " held" in line
    assert "\n" not in line


def test_too_little_gpu_memory_names_the_device(monkeypatch):
    told = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which 8.00 GiB is "
        "free. Including non-PyTorch memory, this process has 71.00 GiB memory in use."
    )
    sizes = {"memory_allocated": 60 * 2**30, "memory_reserved": 70 * 2**30, "current_device": 3}
    for name, value in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    class Properties:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    error = torch.OutOfMemoryError(told)
    assert exits.is_out_of_memory(error)
    line = exits.describe_out_of_memory(error)
    assert "20.00 GiB asked for, 60.00 GiB allocated and 70.00 GiB reserved of the 80.00 GiB of cuda:3" in line


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), ValueError("out of memory"), OSError()])
def test_other_errors_are_not_taken_for_it(error):
    assert not exits.is_out_of_memory(error)


# --- on a GPU


def on_gpu(gpus: dict[str, str], folder, *flags: str) -> dict:
    command = [sys.executable, "07_memory_tricks/memory_profile.py", "--device", "cuda", *flags]
    command += ["--json", str(folder / "p.json"), "--plot", str(folder / "p.png")]
    result = subprocess.run(command, cwd=ROOT, env=gpus, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("checked: ") == 3
    return json.loads((folder / "p.json").read_text())


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gpu_tensors_and_libraries_are_what_is_allocated(gpus, tmp_path, dtype):
    summary = on_gpu(gpus, tmp_path, "--dtype", dtype)
    libraries = {sizes["libraries"] for sizes in summary["moments"].values()}
    assert len(libraries) == 1  # workspaces were made in the first step, and stay
    assert libraries.pop() < 200 * 2**20
    # blocks are rounded up to 512 bytes, and what operators free before they return counts in the peak only
    assert summary["total_bytes"] <= summary["peak_memory_bytes"] < 1.2 * summary["total_bytes"]


@pytest.mark.gpu(n=1)
def test_gpu_allocator(gpus, tmp_path):
    found = on_gpu(gpus, tmp_path)["allocator"]
    assert found["end_of_forward"]["unused_bytes"] >= found["end_of_forward"]["largest_free_block_bytes"]
    assert (tmp_path / "p_snapshot.pickle").stat().st_size > 10_000
    assert (tmp_path / "p_segments.png").read_bytes().startswith(b"\x89PNG")
    fixed, expandable = (found[f"growing_tensors_reserved_bytes{end}"] for end in ("", "_expandable"))
    assert fixed == sum(allocator.GROWING_SIZES)
    assert expandable < 1.2 * max(allocator.GROWING_SIZES)
    assert "1024.00 MiB asked for" in found["error_at_limit"] or "1.00 GiB asked for" in found["error_at_limit"]
    assert " allocated and " in found["error_at_limit"]


@pytest.mark.gpu(n=1)
def test_gpu_out_of_memory_is_one_line(gpus, tmp_path):
    prelude = "import torch\ntorch.cuda.set_per_process_memory_fraction(0.001)"
    write_tiny(tmp_path)
    script = with_prelude(BASELINE, tmp_path, prelude)
    flags = ["--device", "cuda", "--model", "llama-124m", "--run-dir", tmp_path / "run"]
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(script, tmp_path, *flags, warm=False, **visible)
    assert_one_line(result, "out of memory", "MiB asked for")
