"""07_memory_tricks/offload.py: what leaves comes back to the bit, once, in time, and nothing else leaves."""

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from support.chapter import load
from support.harness import ODD, ROOT, config_of, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from old import model
from old.step_cost import saved_for_backward

offload = load("07_memory_tricks/offload.py")
file_level = load("07_memory_tricks/_offload_file.py")
link = load("07_memory_tricks/_offload_link.py")
streaming = load("07_memory_tricks/_offload_optimizer.py")

CPU = torch.device("cpu")
TIED = {**ODD, "vocab_size": 97, "num_key_value_heads": 2, "num_hidden_layers": 2, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Small tensors are offloaded, too."""
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 0)


def prepare(shape: dict):
    config = config_of(shape)
    net = model.Transformer(config)
    net.init_weights(0)
    tokens = torch.randint(config.vocab_size, (5, 24), generator=torch.Generator().manual_seed(1))
    return net, [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]


def gradients(net, batch, dtype: str, version) -> list[torch.Tensor]:
    net.zero_grad()
    offload.forward(net, batch, dtype, version).backward()
    return [parameter.grad for parameter in net.parameters()]


def staying(net, batch) -> list[torch.Tensor]:
    return [*net.parameters(), *net.buffers(), *batch]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [ODD, TIED], ids=["untied", "tied"])
def test_gradients_are_equal_to_the_bit(tmp_path, shape, dtype):
    net, batch = prepare(shape)
    level = file_level.File(tmp_path)
    baseline, *others = offload.make_versions(level, CPU, staying(net, batch))
    expected = [gradient.clone() for gradient in gradients(net, batch, dtype, baseline)]
    assert len(others) == 4
    for version in others:
        for _ in range(2):  # the second step finds what the first has left
            level.written_bytes = 0
            found = gradients(net, batch, dtype, version)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), version.name
            assert (level.written_bytes > 0) == ("offloaded" in version.name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_piece_leaves_once_and_weights_stay(tmp_path, dtype):
    net, batch = prepare(ODD)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")
    with saved_for_backward(net) as saved, autocast:
        net(*batch)
    stays = {t.untyped_storage().data_ptr() for t in staying(net, batch)}
    expected = sum(size for address, size in saved.activations.items() if address not in stays)
    expected += sum(saved.weight_copies.values())
    level = file_level.File(tmp_path)
    hooks = offload.Offload(level, CPU, staying(net, batch))
    gradients(net, batch, dtype, offload.Version("overlapped", lambda: hooks))
    assert level.written_bytes == expected
    level.written_bytes = 0
    waiting = offload.Version("waiting", lambda: offload.offload_and_wait(level, CPU))
    gradients(net, batch, dtype, waiting)
    assert level.written_bytes > 1.3 * expected  # the same piece again and again, and the weights


class Recorder(file_level.File):
    """A file that keeps a record of what is asked of it."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.record = []

    def write(self, slot, source) -> None:
        self.record.append(("write", slot.place))
        super().write(slot, source)

    def read(self, slot, target) -> None:
        self.record.append(("read", slot.place))
        super().read(slot, target)

    def wait(self, slot) -> None:
        self.record.append(("wait", slot.place))
        super().wait(slot)


def recorded_step(tmp_path):
    net, batch = prepare(ODD)
    level = Recorder(tmp_path)
    hooks = offload.Offload(level, CPU, staying(net, batch))
    loss = offload.forward(net, batch, "fp32", offload.Version("overlapped", lambda: hooks))
    forward, level.record = level.record, []
    loss.backward()
    return hooks, forward, level.record


def test_forward_waits_only_for_the_oldest(tmp_path):
    hooks, forward, _ = recorded_step(tmp_path)
    leaving = []
    written = 0
    for what, place in forward:
        if what == "write":
            leaving.append(place)
            written += 1
            continue
        assert what == "wait"
        # the newest is on its way before the oldest is waited for; at the end of forward all are
        assert len(leaving) == offload.MOST_LEAVING + 1 or written == len(hooks.kept)
        assert place == leaving.pop(0)
    assert not leaving


def test_backward_asks_ahead(tmp_path):
    hooks, _, backward = recorded_step(tmp_path)
    places = [kept.slot.place for kept in hooks.kept]
    asked = [place for what, place in backward if what == "read"]
    assert sorted(asked) == sorted(places)  # each once
    first_wait = {}
    for moment, (what, place) in enumerate(backward):
        if what == "wait":
            first_wait.setdefault(place, moment)
    ahead = 0
    for place, moment in first_wait.items():
        position = places.index(place)
        wanted = places[max(0, position - offload.MOST_AHEAD) : position + 1]
        asked_by_now = {p for what, p in backward[:moment] if what == "read"}
        assert set(wanted) <= asked_by_now
        ahead += ("read", place) in backward[: max(0, moment - 1)]
    assert ahead > len(places) / 2  # most were under way before they were needed
    assert all(kept.data is None and kept.users == 0 for kept in hooks.kept)


def save_twice(hooks, *, wait: bool) -> torch.Tensor:
    """The gradient of weight * x + weight * (x + 1), where x is written over between the two."""
    weight = torch.full((8,), 3.0, requires_grad=True)
    x = torch.arange(8.0)
    with hooks:
        first = weight * x  # saves x
        if wait:
            hooks.let_go(0)
        x += 1
        second = weight * x  # and x again, of which the file must not have the old numbers
    (first + second).sum().backward()
    return weight.grad


def test_what_is_written_over_is_another_piece(tmp_path):
    hooks = offload.Offload(file_level.File(tmp_path), CPU, [])
    assert torch.equal(save_twice(hooks, wait=True), 2 * torch.arange(8.0) + 1)


def test_what_is_written_over_while_it_leaves_is_told(tmp_path):
    hooks = offload.Offload(file_level.File(tmp_path), CPU, [])
    with pytest.raises(AssertionError, match="written over while it left"):
        save_twice(hooks, wait=False)


def test_a_forward_without_its_backward_is_told(tmp_path):
    net, batch = prepare(TIED)
    hooks = offload.Offload(file_level.File(tmp_path), CPU, staying(net, batch))
    version = offload.Version("overlapped", lambda: hooks)
    offload.forward(net, batch, "fp32", version)
    with pytest.raises(AssertionError, match="no backward"):
        offload.forward(net, batch, "fp32", version)


def test_views_come_back_as_they_were(tmp_path):
    level = file_level.File(tmp_path)
    base = torch.randn(7, 5, 3)
    for tensor in (base[2:5, 1:].transpose(0, 2), base[..., 1], base[0, 0, 0], base.bfloat16()[::2], base[:0]):
        hooks = offload.offload_and_wait(level, CPU)
        back = hooks.unpack_hook(hooks.pack_hook(tensor))
        assert torch.equal(back, tensor)
        assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)
        assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


def test_copies_in_parts():
    """As a system call does that copies less than it is asked to."""
    data = torch.arange(10, dtype=torch.uint8)
    seen = bytearray(10)

    def three_at_most(file: int, left: memoryview, place: int) -> int:
        seen[place : place + len(left[:3])] = left[:3]
        return len(left[:3])

    file_level.copy_all(three_at_most, 0, data, 0)
    assert list(seen) == list(range(10))
    with pytest.raises(OSError, match="10 bytes too early"):
        file_level.copy_all(lambda file, left, place: 0, 0, data, 0)


@pytest.mark.parametrize("shape", [ODD, TIED], ids=["untied", "tied"])
def test_streamed_updates_equal_those_of_one_optimizer(tmp_path, shape):
    net, batch = prepare(shape)
    start = streaming.digest(list(net.parameters()))
    version = offload.Version("on the device", nullcontext)
    level = file_level.File(tmp_path)
    together, streamed = streaming.compare_updates(net, lambda: offload.forward(net, batch, "fp32", version), level)
    assert together["weights_sha256"] == streamed["weights_sha256"] != start
    assert streaming.digest(list(net.parameters())) == start  # the model is given back as it was
    numbers = sum(parameter.numel() for parameter in net.parameters())
    assert streamed["offloaded_bytes"] == 8 * numbers
    assert together["update_peak_bytes"] >= 16 * numbers
    largest = max(parameter.numel() for parameter in net.parameters())
    assert streamed["update_peak_bytes"] <= 8 * numbers + 3 * 8 * largest + 4096  # of three parameters at most


@pytest.mark.parametrize("length", [16, 48])
def test_a_block_costs_what_its_formula_says(length):
    config = config_of(ODD)
    block = model.Block(config)
    hidden = torch.randn(2, length, config.hidden_size)
    cos, sin = (table.unsqueeze(-2) for table in model.rope_tables(config, length, CPU))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # which it counts on a CPU, too
        block(hidden, cos, sin)
    fixed, per_position = link.forward_flops_per_token(config, length)
    # torch counts all of a causal product, of which half is needed
    assert counter.get_total_flops() == 2 * length * (fixed + 2 * per_position * length)


def test_bytes_per_token_without_numbers_are_those_with():
    config = config_of(ODD)
    net, _ = prepare(ODD)
    seconds, saved = link.block_seconds(net, torch.zeros(1, 32, dtype=torch.int64), torch.bfloat16)
    assert link.saved_bytes_per_token(config, 32) == saved > 0
    assert seconds["n"] == link.ROUNDS


def test_from_the_break_even_length_on_the_link_is_fast_enough():
    config = config_of({**ODD, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12})
    flops, speed = 1e14, 5e10
    row = link.break_even(config, 64, flops, speed)
    assert row["needed_bytes_per_second"] > speed
    assert row["break_even_seq_len"] > 64
    fixed, per_position = link.forward_flops_per_token(config, 0)
    seconds = (fixed + per_position * row["break_even_seq_len"]) / flops
    assert row["saved_bytes_per_token"] / seconds == pytest.approx(speed, rel=1e-3)
    assert link.break_even(config, 64, flops, 1e15)["break_even_seq_len"] == 0


def test_the_script(tmp_path):
    (tmp_path / "odd.json").write_text(json.dumps({**ODD, "hidden_size": 72, "head_dim": 12}))
    flags = ["--model", "odd.json", "--seq-len", 61, "--micro-batch-size", 7, "--device", "cpu", "--folder", "."]
    result = run("07_memory_tricks/offload.py", tmp_path, *flags, "--json", "summary.json", "--plot", "o.png")
    assert result.code == 0, result.err
    assert result.out.count("checked: ") == 4
    assert "left out: pinned memory, streams" in result.out
    rows = {row["name"]: row for row in result.summary["versions"]}
    assert len({row["gradients_sha256"] for row in rows.values()}) == 1
    baseline, overlapped = rows["on the device"], rows["offloaded, overlapped"]
    assert baseline["after_forward_bytes"] - overlapped["after_forward_bytes"] == overlapped["offloaded_bytes"] > 0
    assert overlapped["peak_bytes"] < baseline["peak_bytes"]
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []  # its file is gone


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--device-name", "Abacus"], "Abacus"),
        (["--folder", "nowhere/deep"], "nowhere/deep"),
        (["--folder", "/proc"], "--folder /proc: not a folder that can be written to"),
        (["--link", "0"], "--link"),
        (["--model", "llama-9b"], "llama-9b"),
        (["--seq-len", "5000"], "--seq-len 5000"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path, flags, word):
    result = run("07_memory_tricks/offload.py", tmp_path, "--device", "cpu", "--folder", ".", *flags)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert word in result.err


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gpu_offloads_through_pinned_memory(gpus, tmp_path, dtype):
    command = [sys.executable, "07_memory_tricks/offload.py", "--device", "cuda", "--dtype", dtype]
    command += ["--micro-batch-size", "64", "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png")]
    result = subprocess.run(command, cwd=ROOT, env=gpus, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("checked: ") == 4
    summary = json.loads((tmp_path / "o.json").read_text())
    assert summary["left_out"] is None
    rows = {row["name"]: row for row in summary["versions"]}
    assert "torch's save_on_cpu" in rows
    baseline, overlapped = rows["on the device"], rows["offloaded, overlapped"]
    assert baseline["gradients_sha256"] == overlapped["gradients_sha256"]
    assert baseline["after_forward_bytes"] - overlapped["after_forward_bytes"] == overlapped["offloaded_bytes"]
    assert baseline["peak_bytes"] - overlapped["peak_bytes"] > 0.5 * overlapped["offloaded_bytes"]


@pytest.mark.gpu(n=1)
def test_gpu_steps_do_not_wait_for_the_cpu(gpus):
    """A copy that blocks the CPU would hide no time at all."""
    code = (
        "import torch, test_07_offload as t\n"
        "device = torch.device('cuda', 0)\n"
        "net, batch = t.prepare(t.ODD)\n"
        "net, batch = net.to(device), [x.to(device) for x in batch]\n"
        "t.offload.SMALLEST_BYTES = 0\n"
        "hooks = t.offload.Offload(t.offload.PinnedMemory(device), device, t.staying(net, batch))\n"
        "version = t.offload.Version('overlapped', lambda: hooks)\n"
        "t.gradients(net, batch, 'fp32', version)  # what is loaded or allocated once may wait\n"
        "torch.cuda.set_sync_debug_mode('error')\n"
        "t.gradients(net, batch, 'fp32', version)\n"
    )
    env = {**gpus, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
