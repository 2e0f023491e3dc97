"""02_tensors_precision: quantize.py and qat.py, and the modules they share."""

import copy
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import TINY, config_of, run

from old import data, hardware, model, shapes
from old.exits import UserError

start_model = load("02_tensors_precision/_quantize_model.py")
workbench = load("02_tensors_precision/_quantize_workbench.py")
kernels = load("02_tensors_precision/_quantize_kernels.py")
llama2 = load("02_tensors_precision/_quantize_llama2.py")
quantize = load("02_tensors_precision/quantize.py")
qat = load("02_tensors_precision/qat.py")
CPU = torch.device("cpu")
needs_int8_units = pytest.mark.skipif("int8" not in hardware.native_types(CPU)[0], reason="a CPU without int8 units")
CONFIG = shapes.Config(256, 32, 48, 2, 4, 4, 8, 64, tie_word_embeddings=True)


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randn(32, 176) * torch.logspace(-3, 2, 32)[:, None]  # 176 = 128 + 48 = 5 · 32 + 16
    weight[3, 7] = 50.0
    weight[5] = 0.0
    return weight


@pytest.fixture
def net() -> model.Transformer:
    torch.manual_seed(0)
    net = model.Transformer(CONFIG)
    net.init_weights(0)
    for layer in workbench.linears(net).values():
        layer.weight.data.mul_(10)  # so that activations are not all alike
    return net


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(256, (4, 16)), torch.randint(256, (4, 16))


@pytest.mark.parametrize("group", ["tensor", "channel", 128, 32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_weight_is_off_by_more_than_half_its_scale(weight, bits, group):
    w = quantize.quantize(weight, bits, group)
    # scales of our own, value by value: the largest of what shares one, over the largest integer
    limit = 2 ** (bits - 1) - 1
    expected = torch.empty_like(weight)
    for row in range(len(weight)):
        width = group if isinstance(group, int) else 176
        for first in range(0, 176, width):
            largest = (weight if group == "tensor" else weight[row, first : first + width]).abs().max()
            expected[row, first : first + width] = largest / limit
    error = (quantize.dequantize(w) - weight).abs()
    assert (error <= expected * 0.5 * (1 + 2**-8)).all()  # the scale itself is bf16
    assert error.max() > 0
    assert w.scale.shape == {"tensor": (1, 1), "channel": (32, 1), 128: (32, 2), 32: (32, 6)}[group]
    codes = quantize.unpack(w.codes) if bits <= 4 else w.codes
    assert codes.abs().max() == limit


def test_finer_scales_are_nearer(weight):
    errors = [
        (quantize.dequantize(quantize.quantize(weight, 4, group)) - weight).norm()
        for group in ("tensor", "channel", 128, 32)
    ]
    assert errors == sorted(errors, reverse=True)


def test_values_that_are_on_the_grid_come_back_exactly():
    codes = torch.arange(-127, 128.0).expand(4, -1)
    exact = codes * torch.tensor([1.0, 0.5, 2.0**-20, 3.0])[:, None]
    w = quantize.quantize(exact, 8, "channel")
    assert torch.equal(quantize.dequantize(w), exact)
    assert torch.equal(w.codes, codes.to(torch.int8))


@pytest.mark.parametrize("group", ["tensor", "channel", 32])
def test_zeros_stay_zeros(group):
    w = quantize.quantize(torch.zeros(4, 64), 4, group)
    assert torch.equal(quantize.dequantize(w), torch.zeros(4, 64))
    assert (w.scale > 0).all()  # nothing was divided by zero


def test_int4_packing_is_exact_for_every_byte():
    every = torch.arange(256, dtype=torch.uint8)[None]
    values = quantize.unpack(every)
    low = [(byte & 15) - 16 * ((byte & 15) > 7) for byte in range(256)]
    high = [(byte >> 4) - 16 * ((byte >> 4) > 7) for byte in range(256)]
    assert values.dtype == torch.int8
    assert values[0, ::2].tolist() == low
    assert values[0, 1::2].tolist() == high
    assert torch.equal(quantize.pack(values), every)


def test_an_odd_row_cannot_be_packed():
    with pytest.raises(ValueError, match="33"):
        quantize.quantize(torch.ones(2, 33), 4, "channel")
    assert quantize.quantize(torch.ones(2, 33), 8, 32).codes.shape == (2, 33)


@pytest.mark.parametrize(
    ("bits", "group", "nbytes"),
    [
        (8, "tensor", 32 * 176 + 2),
        (8, "channel", 32 * 176 + 32 * 2),
        (8, 32, 32 * 176 + 32 * 6 * 2),
        (4, "channel", 32 * 88 + 32 * 2),
        (4, 128, 32 * 88 + 32 * 2 * 2),
        (4, 32, 32 * 88 + 32 * 6 * 2),
    ],
)
def test_bytes_are_those_of_the_storage(weight, bits, group, nbytes):
    w = quantize.quantize(weight, bits, group)
    assert w.nbytes == nbytes
    assert w.codes.untyped_storage().nbytes() + w.scale.numel() * w.scale.element_size() == nbytes


def test_llama2_bytes_by_formula():
    seven, thirteen, seventy = llama2.llama2_bytes(quantize.quantize)
    # the published parameter counts
    assert [r["parameters"] for r in (seven, thirteen, seventy)] == [6_738_415_616, 13_015_864_320, 68_976_648_192]
    norms = 4096 * (2 * 32 + 1)
    around = 2 * 32_000 * 4096
    matrices = 6_738_415_616 - around - norms
    assert seven["int4_per_128_bytes"] == matrices // 2 + matrices // 128 * 2 + 2 * (around + norms)
    everywhere = matrices + around
    assert seven["int4_per_128_everywhere_bytes"] == everywhere // 2 + everywhere // 128 * 2 + 2 * norms
    assert seventy["int4_per_128_bytes"] > seventy["int4_per_128_everywhere_bytes"] > 35e9  # C6: with scales it is more


def test_llama2_weights_alone_against_the_claim(capsys):
    """C5: 7B in 16 bits, INT8 and INT4 is 13.5, 6.8 to 7.0 and 3.5 to 4.2 GB of weights."""
    llama2.print_llama2(llama2.llama2_bytes(quantize.quantize))
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "Llama" in line]
    rows = {row[0]: row[1:] for row in cells}
    assert rows["Llama 2 7B"] == ["13.5", "6.7 to 7.0", "3.5 to 4.2"]
    assert rows["Llama 2 13B"][0] == "26.0"
    assert "weights only" in printed


def test_activation_codes_are_within_half_a_step_and_zero_is_exact():
    x = torch.linspace(-0.7, 2.3, 1001)
    codes, scale, zero = quantize.activation_codes(x, -0.7, 2.3)
    assert codes.min() >= -128
    assert codes.max() <= 127
    assert ((codes - zero) * scale - x).abs().max() <= scale * (0.5 + 0.51)  # the zero point is rounded too, at an end
    inside = x[(x > -0.69) & (x < 2.29)]
    codes, _, _ = quantize.activation_codes(inside, -0.7, 2.3)
    assert ((codes - zero) * scale - inside).abs().max() <= scale * 0.5001
    codes, _, zero = quantize.activation_codes(torch.zeros(1), 0.5, 2.0)
    assert codes.item() == zero
    codes, scale, zero = quantize.activation_codes(torch.tensor([-9.0, 9.0]), -1.0, 1.0)
    assert codes.tolist() == [-128, 127]
    assert all(map(math.isfinite, quantize.activation_codes(torch.zeros(1), 0.0, 0.0)[1:]))


@needs_int8_units
def test_w8a8_integers_are_the_float_arithmetic(weight):
    w = quantize.quantize(weight, 8, "channel")
    x = torch.randn(3, 20, 176)
    kernel, exact = (quantize.w8a8(w, -1.5, 2.5, kernel=k)(x) for k in (True, False))
    assert kernel.shape == (3, 20, 32)
    torch.testing.assert_close(kernel, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
    # and in exact integers
    codes, scale, zero = quantize.activation_codes(x, -1.5, 2.5)
    integers = (codes.long() - zero) @ w.codes.long().T
    expected = integers.double() * scale * w.scale[:, 0].double()
    assert (kernel - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(("bits", "group"), [(8, "channel"), (4, 32), (4, 128)])
def test_torch_kernels_agree_with_the_arithmetic(weight, bits, group):
    w = quantize.quantize(weight, bits, group)
    x = torch.randn(2, 16, 176)
    kernel = kernels.runs(lambda: quantize.torch_kernel(w), x)
    assert kernel is not None
    expected = quantize.emulate(w)(x)
    assert (kernel(x) - expected).norm() < 0.01 * expected.norm()


def test_a_kernel_that_is_wrong_or_missing(net, capsys):
    layers = workbench.linears(net)
    exact = {name: quantize.emulate(quantize.quantize(m.weight.detach(), 8, "channel")) for name, m in layers.items()}
    assert kernels.checked(layers, {name: lambda f=f: f for name, f in exact.items()}, exact).keys() == exact.keys()
    with pytest.raises(AssertionError, match="differ"):
        kernels.checked(layers, {name: lambda f=f: lambda x: f(x) * 1.02 for name, f in exact.items()}, exact)
    assert kernels.checked(layers, {name: lambda: torch.ops.aten.no_such_operator for name in exact}, exact) is None
    assert "no_such_operator" in capsys.readouterr().out


def test_observers_see_the_range_and_percentiles_clip(net, batch):
    seen = {}
    for name, layer in workbench.linears(net).items():
        layer.register_forward_pre_hook(lambda _m, args, name=name: seen.__setitem__(name, args[0].detach().clone()))
    everything = workbench.observe(net, batch[0], 0.0)
    assert everything == {name: (x.min().item(), x.max().item()) for name, x in seen.items()}
    clipped = workbench.observe(net, batch[0], 0.01)
    for name, (low, high) in clipped.items():
        x = seen[name].flatten()
        assert everything[name][0] < low < high < everything[name][1]
        assert (x < low).sum() == (x > high).sum() == int(0.01 * x.numel())
    assert all(len(layer._forward_pre_hooks) == 1 for layer in workbench.linears(net).values())  # ours; theirs are gone


def test_calibration_on_other_data_gives_other_ranges_and_a_worse_result(net, batch):
    right, wrong = workbench.observe(net, batch[0], 0.0), workbench.observe(net, torch.full_like(batch[0], 32), 0.0)
    assert right != wrong
    int8 = {name: quantize.quantize(m.weight.detach(), 8, "channel") for name, m in workbench.linears(net).items()}
    with torch.no_grad():
        exact = net(batch[0])
    errors = []
    for ranges in (right, wrong):
        copied = copy.deepcopy(net)
        for name, layer in workbench.linears(copied).items():
            layer.forward = quantize.w8a8(int8[name], *ranges[name], kernel=False)
        with torch.no_grad():
            errors.append((copied(batch[0]) - exact).norm())
    assert errors[0] < errors[1] / 2


def test_measure_is_the_models_loss_and_puts_forwards_back(net, batch):
    losses, _ = workbench.measure(net, {}, [batch, batch])
    assert losses.shape == (8,)
    assert losses.mean().item() == pytest.approx(net(*batch).item(), rel=1e-5)
    name = "layers.1.mlp.down_proj"
    changed, _ = workbench.measure(net, {name: lambda x: torch.zeros(*x.shape[:-1], 32)}, [batch])
    assert not torch.equal(changed, losses[:4])
    assert torch.equal(workbench.measure(net, {}, [batch])[0], losses[:4])
    delta, error = workbench.difference(torch.tensor([2.0, 4.0, 6.0]), torch.ones(3))
    assert (delta, error) == pytest.approx((3.0, 2 / math.sqrt(3)))


def test_linears_are_the_matrices_in_the_blocks(net):
    names = workbench.linears(net).keys()
    assert len(names) == 2 * 7
    assert all(name.startswith("layers.") for name in names)


def test_the_scan_finds_the_layer_that_hurts_and_mixed_precision_keeps_it(net, batch, monkeypatch):
    bad = "layers.1.mlp.up_proj"
    layers = workbench.linears(net)
    coarse = {}
    for name, layer in layers.items():
        w = quantize.quantize(layer.weight.detach(), 3, "channel")
        coarse[name] = quantize.emulate(w)
        if name != bad:
            layer.weight.data = quantize.dequantize(w)  # already rounded: nothing more to lose
    targets = net(batch[0]).argmax(-1)  # a model that is right, and can only get worse
    scan = workbench.sensitivity(net, coarse, [(batch[0], targets)])
    assert [name for name, (delta, _) in scan.items() if delta > 0] == [bad]
    assert [*scan.values()] == sorted(scan.values(), key=lambda item: -item[0])
    monkeypatch.setattr(quantize, "KEEP", 14)
    schemes = {scheme.name: scheme for scheme in quantize.schemes(net, [batch], [*scan], ord(" "))}
    mixed = schemes["int4 per channel, 1 most sensitive int8"]
    for name, layer in layers.items():
        x = torch.randn(5, layer.in_features)
        w = quantize.quantize(layer.weight.detach(), 8 if name == bad else 4, "channel")
        assert torch.equal(mixed.forwards[name](x), quantize.emulate(w)(x))
    extra = layers[bad].weight.numel() // 2
    assert mixed.nbytes == schemes["int4 per channel"].nbytes + extra


def test_a_clip_ends_the_scale_below_the_largest(weight):
    clip = torch.linspace(0.3, 1, 32).view(-1, 1, 1)
    w = quantize.quantize(weight, 4, "channel", clip)
    ends = weight.abs().amax(1, keepdim=True) * clip[..., 0]
    back = quantize.dequantize(w)
    assert (back.abs() <= ends * (1 + 2**-8)).all()  # the scale itself is bf16
    kept = weight.abs() <= ends
    assert ((back - weight).abs() <= ends / 7 * 0.5 * (1 + 2**-7))[kept].all()
    assert (quantize.unpack(w.codes)[~kept].abs() == 7).all()
    assert 0 < (~kept).sum() < weight.numel() / 2


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_scale_by_least_squares_is_the_best_that_was_tried(net, bits):
    limit = 2 ** (bits - 1) - 1
    clips = qat.least_squares(net, bits)
    for name, layer in workbench.linears(net).items():
        for row, share in zip(layer.weight.detach(), clips[name].flatten().tolist(), strict=True):
            errors = {}
            for tried in qat.SHARES:
                scale = (row.abs().max() * tried / limit).bfloat16().float()
                errors[tried] = ((row / scale).round().clamp(-limit, limit) * scale - row).square().sum().item()
            nearest = min(errors, key=lambda tried, share=share: abs(tried - share))  # the same, in fp32
            assert errors[nearest] <= min(errors.values()) * (1 + 1e-5)
    assert any((share < 1).any() for share in clips.values())


@pytest.mark.parametrize(("bits", "share"), [(2, 1.0), (4, 1.0), (2, 0.4), (4, 0.7)])
def test_straight_through_gradient_is_that_of_torchs_fake_quantize(bits, share):
    torch.manual_seed(0)
    limit = 2 ** (bits - 1) - 1
    weight = torch.randn(6, 64, requires_grad=True)
    gradient = torch.randn(6, 64)
    clip = torch.full((6, 1, 1), share)
    ours = qat.FakeQuantize.apply(weight, bits, clip)
    (mine,) = torch.autograd.grad(ours, weight, gradient)
    scale = quantize.quantize(weight.detach(), bits, "channel", clip).scale[:, 0].float()
    zeros = torch.zeros(6, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -limit, limit)
    (expected,) = torch.autograd.grad(theirs, weight, gradient)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(mine, expected)
    assert torch.equal(mine, gradient) == (share == 1)  # of a clipped weight it is 0


def test_qat_checks_can_fail(net, batch, monkeypatch):
    clips = qat.least_squares(net, 4)
    assert any((share < 1).any() for share in clips.values())
    qat.check_gradient(net, 4, clips, batch)
    rounded = qat.with_rounding(copy.deepcopy(net), 4, clips)
    qat.check_export(rounded, 4, clips, batch[0])
    export = qat.export
    for wrong in (lambda net, bits, clips: export(net, 3, clips), lambda net, bits, clips: export(net, bits)):
        monkeypatch.setattr(qat, "export", wrong)
        with pytest.raises(AssertionError, match="exported"):
            qat.check_export(rounded, 4, clips, batch[0])
    monkeypatch.setattr(qat.FakeQuantize, "backward", staticmethod(lambda ctx, gradient: (gradient, None, None)))
    with pytest.raises(AssertionError, match="straight-through"):
        qat.check_gradient(net, 4, clips, batch)


def test_exported_integers_alone_give_the_trained_logits(net, batch):
    clips = qat.least_squares(net, 4)
    trained = qat.with_rounding(net, 4, clips)
    with torch.no_grad():
        expected = trained(batch[0])
    forwards = qat.export(net, 4, clips)
    deployed = model.Transformer(CONFIG)
    state = net.state_dict()
    kept = {name: t for name, t in state.items() if "_proj" not in name}
    deployed.load_state_dict(kept, strict=False)
    for name, layer in workbench.linears(deployed).items():
        layer.weight.data.fill_(math.nan)  # not read
        layer.forward = forwards[name]
    with torch.no_grad():
        assert torch.equal(deployed(batch[0]), expected)


@pytest.fixture
def short_text(monkeypatch) -> data.Corpus:
    """A short text in place of the default corpus."""
    train = np.frombuffer(b"for i in range(10):\n    print(i)\n" * 700, dtype=np.uint8)
    held_out = np.frombuffer(b"while True:\n    x = y + 1\n" * 300, dtype=np.uint8)
    corpus = data.Corpus(train=train, held_out=held_out, vocab_size=256, sha256="0123456789abcdef")
    monkeypatch.setattr(data, "load_corpus", lambda *_: corpus)
    return corpus


@pytest.fixture
def small(monkeypatch, short_text) -> None:
    """The cached model, small and on a short text."""
    monkeypatch.setattr(shapes, "load_config", lambda *_: CONFIG)


def trained(folder: Path, seed: int = 0, steps: int = 3) -> dict[str, torch.Tensor]:
    net, _ = start_model.trained_model(run_dir=folder, seed=seed, train_steps=steps, device=CPU)
    return net.state_dict()


def test_a_run_dir_that_cannot_be_is_told_before_training(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(start_model, "train", lambda *_: pytest.fail("trained first"))
    with pytest.raises(UserError, match="--run-dir"):
        start_model.trained_model(run_dir=tmp_path / "file/runs", seed=0, train_steps=1, device=CPU)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_model_is_trained_once(small, tmp_path, monkeypatch):
    first = trained(tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()  # nothing under a temporary name is left
    for part in ("seed0", "steps3", torch.__version__):
        assert part in file.name
    monkeypatch.setattr(start_model, "train", lambda *_: pytest.fail("trained again"))
    assert same(trained(tmp_path / "new"), first)


@pytest.mark.parametrize("left", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_trained_again(small, tmp_path, left, capsys):
    first = trained(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole)) if left < 1 else left])
    assert same(trained(tmp_path), first)
    assert "damaged" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [file]
    assert file.stat().st_size == len(whole)


def test_another_seed_or_length_is_another_model(small, tmp_path):
    first = trained(tmp_path)
    assert not same(trained(tmp_path, seed=1), first)
    assert not same(trained(tmp_path, steps=4), first)
    assert len([*tmp_path.iterdir()]) == 3


def test_training_is_decided_by_its_seed(small):
    corpus = data.load_corpus("stdlib", "bytes")
    base = model.Transformer(CONFIG)
    base.init_weights(0)
    nets = [copy.deepcopy(base) for _ in range(3)]
    for net, seed in zip(nets, (1, 1, 2), strict=True):
        start_model.train(net, corpus.train, 3, 1e-3, seed)
    one, again, other = (net.state_dict() for net in nets)
    assert same(one, again)
    assert not same(one, other)
    assert not same(one, base.state_dict())


def test_the_calibration_set_is_not_the_evaluation_set(small):
    corpus = data.load_corpus("stdlib", "bytes")
    calibration_set, evaluation_set = start_model.held_out_sets(corpus, CPU)
    text = corpus.held_out
    half = len(text) // 2
    assert torch.equal(calibration_set[0][0][0], torch.from_numpy(text[:64].copy()).long())
    assert torch.equal(evaluation_set[0][0][0], torch.from_numpy(text[half : half + 64].copy()).long())


def test_padding_does_not_count(net, batch):
    """Evaluation pads its last batch with rows that have no target."""
    inputs, targets = batch
    padded = (torch.cat((inputs, inputs)), torch.cat((targets, torch.full_like(targets, data.PADDING))))
    losses, _ = workbench.measure(net, {}, [batch])
    torch.testing.assert_close(workbench.measure(net, {}, [padded])[0], losses)


def test_quantize_bare_flags_and_json(small, tmp_path, monkeypatch, capsys):
    flags = ["--train-steps", "3", "--run-dir", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["quantize.py", *flags, "--json", str(tmp_path / "s.json")])
    monkeypatch.setattr(quantize, "time_layer", lambda ways, side, device: kernels.time_layer(ways, 64, device))
    measured = []
    evaluate, measure = workbench.evaluate, workbench.measure

    def noting(net, forwards, batches):
        measured.append(batches)
        return measure(net, forwards, batches)

    def evaluate_noting(*args):
        with monkeypatch.context() as patch:
            patch.setattr(workbench, "measure", noting)
            return evaluate(*args)

    monkeypatch.setattr(quantize, "evaluate", evaluate_noting)
    assert quantize.main() == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    rows = {(row["scheme"], row["multiplied"]): row for row in summary["rows"]}
    fp32, int4 = rows["fp32", "fp32"], rows["int4 per channel", "fp32, dequantized"]
    assert fp32["delta"] == fp32["standard_error"] == 0
    assert int4["delta"] == pytest.approx(int4["val_loss"] - fp32["val_loss"], abs=1e-5)
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    assert fp32["weight_bytes"] == 4 * matrices
    assert int4["weight_bytes"] == matrices // 2 + 2 * 2 * (4 * 32 + 2 * 48 + 32)
    assert len(summary["sensitivity"]) == 14
    assert len(summary["llama2"]) == 3
    assert all(0 < row["lowest"] <= row["tokens_per_second"] <= row["highest"] for row in summary["rows"])
    assert "int4 per channel" in capsys.readouterr().out
    # in turns: all schemes read one batch, then all read the next
    assert all(len(batches) == 1 for batches in measured)
    inputs = [batches[0][0] for batches in measured]
    by_turn = [inputs[i : i + len(rows)] for i in range(0, len(inputs), len(rows))]
    assert all(x is turn[0] for turn in by_turn for x in turn)
    assert len({id(turn[0]) for turn in by_turn}) == len(by_turn) > 1
    assert [row["side"] for row in summary["large_layer"]] == [64] * 6


def layer_times(monkeypatch, ways) -> list[dict]:
    monkeypatch.setattr(kernels, "ROUNDS", 2)
    torch.manual_seed(0)
    return kernels.time_layer(ways, 64, CPU)


@needs_int8_units
def test_every_way_of_a_layer_is_timed(monkeypatch):
    rows = layer_times(monkeypatch, quantize.ways)
    assert [row["layer"] for row in rows] == [*quantize.ways(torch.randn(64, 64))]
    for row in rows:
        for tokens in (1, 256):
            assert 0 < row[f"lowest_at_{tokens}"] <= row[f"microseconds_at_{tokens}"] <= row[f"highest_at_{tokens}"]
        assert row.keys() == rows[0].keys()


@needs_int8_units
def test_every_way_of_a_layer_is_near_the_plain_product():
    """What each rounds to is in the tests above: here, that it is this weight and this input that are multiplied."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64) / 8, torch.randn(256, 64)
    plain = x @ weight.T
    for name, (kernel, exact) in quantize.ways(weight).items():
        for forward in (kernel(), exact):
            error = (forward(x) - plain).norm() / plain.norm()
            assert error < (0.15 if "int4" in name else 0.03), name


def test_a_layer_that_is_wrong_is_not_timed_and_one_that_is_missing_is_told(monkeypatch, capsys):
    def ways(weight):
        plain = quantize.partial(torch.nn.functional.linear, weight=weight)
        return {"plain": (lambda: plain, plain), "missing": (lambda: torch.ops.aten.no_such_operator, plain)}

    plain, missing = layer_times(monkeypatch, ways)
    assert plain["microseconds_at_1"] > 0
    assert [missing[key] for key in missing if "_at_" in key] == [None] * 6
    assert "no_such_operator" in capsys.readouterr().out
    doubled = {"doubled": (lambda: lambda x: 2 * x, lambda x: x)}
    with pytest.raises(AssertionError, match="doubled"):
        layer_times(monkeypatch, lambda weight: doubled)


def test_qat_bare_flags_and_json(small, tmp_path, monkeypatch, capsys):
    flags = ["--train-steps", "3", "--steps", "2", "--seeds", "3", "--bits", "2", "--run-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["qat.py", *flags, "--device", "cpu", "--json", str(tmp_path / "s.json")])
    assert qat.main() == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    assert [row["seed"] for row in summary["runs"]] == [0, 1, 2]
    ptq = ("ptq_largest_loss", "ptq_least_squares_loss")
    gains = sorted(min(row[way] for way in ptq) - row["qat_loss"] for row in summary["runs"])
    (verdict,) = summary["verdicts"]
    assert [verdict["lowest_gain"], verdict["median_gain"], verdict["highest_gain"]] == pytest.approx(gains)
    assert verdict["seeds_won"] == sum(gain > 0 for gain in gains)
    assert all(row["gain_standard_error"] > 0 for row in summary["runs"])
    for key in ("base_loss", "base_ptq_loss", "rival_loss", *ptq, "qat_loss"):
        assert len({row[key] for row in summary["runs"]}) == 3  # each seed is a model of its own
        assert verdict[f"median_{key}"] == sorted(row[key] for row in summary["runs"])[1]
    assert len([*tmp_path.glob("*-steps3-*.pt")]) == 3
    errors = [row["gain_standard_error"] for row in summary["runs"]]
    assert verdict["verdict"] == qat.judge(gains, errors)
    assert f"at 2 bits: {verdict['verdict']}" in capsys.readouterr().out


def run_on_folder(script, folder: Path, monkeypatch, *flags: str) -> dict:
    """The summary of the script on the model in folder/tiny, which nobody has trained."""
    write_folder(folder / "tiny", config_of(TINY))
    shared = ["--model", str(folder / "tiny"), "--run-dir", str(folder / "runs"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["script.py", *shared, "--json", str(folder / "s.json"), *flags])
    assert script.main() == 0
    assert not (folder / "runs").exists()  # nothing was trained to be kept
    summary = json.loads((folder / "s.json").read_text())
    assert summary["model"] == str(folder / "tiny")
    assert (summary["steps"], summary["tokens"]) == (None, None)
    return summary


def loss_of_folder(folder: Path, batches: list) -> float:
    net = model.build(str(folder / "tiny"), config_of(TINY), seed=0)
    with torch.no_grad():
        losses = [net(inputs[i : i + 1], targets[i : i + 1]) for inputs, targets in batches for i in range(len(inputs))]
    return torch.stack(losses).nanmean().item()  # a row that pads has no target


def test_quantize_measures_the_model_of_a_folder(short_text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantize, "time_layer", lambda ways, side, device: kernels.time_layer(ways, 64, device))
    scanned = []
    scan = quantize.sensitivity
    monkeypatch.setattr(quantize, "sensitivity", lambda *args: scanned.append(args[2]) or scan(*args))
    rows = {row["scheme"]: row for row in run_on_folder(quantize, tmp_path, monkeypatch)["rows"]}
    _, evaluation_set = start_model.held_out_sets(short_text, CPU)
    assert rows["fp32"]["val_loss"] == pytest.approx(loss_of_folder(tmp_path, evaluation_set), abs=1e-5)
    assert "int4 per channel, 2 most sensitive int8" in rows  # of 14 layers
    assert [[*inputs.shape] for inputs, _ in scanned[0]] == [[4, 64]]
    assert "weights from 1 .safetensors" in capsys.readouterr().out


def test_qat_trains_the_model_of_a_folder_on(short_text, tmp_path, monkeypatch):
    summary = run_on_folder(qat, tmp_path, monkeypatch, "--seeds", "2", "--steps", "2", "--bits", "3")
    _, evaluation_set = start_model.held_out_sets(short_text, CPU)
    first, second = summary["runs"]
    assert first["base_loss"] == second["base_loss"]  # one model
    assert first["base_loss"] == pytest.approx(loss_of_folder(tmp_path, evaluation_set), abs=1e-5)
    assert first["rival_loss"] != second["rival_loss"]  # and two orders of the data
    assert first["qat_loss"] != second["qat_loss"]


def test_calibration_texts_are_in_the_models_own_tokens(net, batch, monkeypatch):
    seen = []

    def observe(net, inputs, clipped_share):
        seen.append(inputs)
        return workbench.observe(net, inputs, clipped_share)

    monkeypatch.setattr(quantize, "observe", observe)
    weights = {name: layer.weight.detach() for name, layer in workbench.linears(net).items()}
    [*quantize.w8a8_schemes(net, weights, batch[0], space=211)]
    text, random, spaces = seen[::2]  # each is looked at by two observers
    assert torch.equal(text, batch[0])
    assert 128 < random.max() < 256
    assert (spaces == 211).all()


def test_without_int8_units_activations_are_dequantized(net, batch, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "native_types", lambda device: ({"fp32"}, "as planted"))
    weights = {name: layer.weight.detach() for name, layer in workbench.linears(net).items()}
    schemes = [*quantize.w8a8_schemes(net, weights, batch[0], space=32)]
    assert {scheme.multiplied for scheme in schemes} == {"fp32, dequantized"}
    assert "cpu has no units that multiply int8" in capsys.readouterr().out


@needs_int8_units
def test_kernels_of_activations_are_tried_where_these_are_not_all_zero(net):
    """One large activation makes the step so wide that random input of size 1 would all round to 0."""
    layers = workbench.linears(net)
    int8 = {name: quantize.quantize(layer.weight.detach(), 8, "channel") for name, layer in layers.items()}
    exact = {name: quantize.w8a8(w, -3000.0, 2000.0, kernel=False) for name, w in int8.items()}
    right = {name: quantize.partial(quantize.w8a8, w, -3000.0, 2000.0) for name, w in int8.items()}
    doubled = {name: lambda f=f: lambda x: 2 * f(x) for name, f in exact.items()}
    sizes = dict.fromkeys(layers, 3000.0)
    assert kernels.checked(layers, right, exact, sizes).keys() == layers.keys()
    with pytest.raises(AssertionError, match="differ"):
        kernels.checked(layers, doubled, exact, sizes)


@pytest.mark.parametrize("cheaper", ["whole", "fitted"])
def test_qat_clips_in_the_way_that_costs_less_on_the_calibration_set(net, batch, monkeypatch, cheaper):
    fitted = qat.least_squares(net, 2)
    name = "layers.0.mlp.up_proj"
    row_ends = {"whole": torch.ones_like(fitted[name]), "fitted": fitted[name]}
    assert not torch.equal(*row_ends.values())
    ends = quantize.dequantize(quantize.quantize(workbench.linears(net)[name].weight, 2, "channel", row_ends[cheaper]))

    def losses(net, forwards, batches):
        assert batches == [batch]
        rounded = forwards[name](torch.eye(ends.shape[1])).T
        return torch.tensor([1.0 if torch.equal(rounded, ends) else 2.0])

    monkeypatch.setattr(qat, "losses", losses)
    assert torch.equal(qat.clips_to_train_with(net, 2, [batch])[name], row_ends[cheaper])


@pytest.mark.parametrize(
    ("gains", "standard_error", "verdict"),
    [
        ([0.034, 0.025, 0.036], 0.002, "QAT is better"),
        ([-0.034, -0.025, -0.036], 0.002, "QAT is worse"),
        ([-0.0004, -0.0007, -0.0003], 0.001, "no gain shown"),  # all seeds alike, and within chance
        ([0.034, -0.025, 0.036], 0.002, "no gain shown"),  # seeds differ
        ([0.034, 0.025, 0.036], 0.02, "no gain shown"),
    ],
)
def test_a_gain_within_chance_is_no_gain(gains, standard_error, verdict):
    assert qat.judge(gains, [standard_error] * 3) == verdict


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("quantize.py", ["--train-steps", "0"], "--train-steps"),
        ("qat.py", ["--bits", "5"], "--bits"),
        ("quantize.py", ["--model", "nowhere"], "--model nowhere"),
        ("qat.py", ["--model", "."], "--model ."),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path, script, flags, said):
    result = run(f"02_tensors_precision/{script}", tmp_path, *flags)
    assert result.code == 2
    assert said in result.err
    assert len(result.err.splitlines()) == 1


def on_gpu(gpus: dict[str, str], folder: Path, script: str, *flags: str) -> dict:
    """The summary of a short run of the script on cuda."""
    short = ["--device", "cuda", "--train-steps", "30", "--run-dir", "models", "--json", "s.json"]
    env = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(f"02_tensors_precision/{script}", folder, *short, *flags, **env)
    assert result.code == 0, result.err[-4000:]
    return json.loads((folder / "s.json").read_text())


@pytest.mark.gpu(n=1)
def test_integer_kernels_on_the_gpu(gpus, tmp_path):
    rows = on_gpu(gpus, tmp_path, "quantize.py")["rows"]
    assert ("W8A8, min-max of text", "torch's kernel, int8") in {(row["scheme"], row["multiplied"]) for row in rows}
    exact = {row["scheme"]: row["val_loss"] for row in rows if "dequantized" in row["multiplied"]}
    fast = {row["scheme"]: row["val_loss"] for row in rows if "kernel, bf16" in row["multiplied"]}
    assert "int4 per 32" in fast
    assert fast == pytest.approx({scheme: exact[scheme] for scheme in fast}, abs=0.01)


@pytest.mark.gpu(n=1)
def test_qat_on_the_gpu(gpus, tmp_path):
    summary = on_gpu(gpus, tmp_path, "qat.py", "--bits", "2")  # its checks hold on cuda
    assert len(summary["runs"]) == 2
    assert summary["device"] not in ("cpu", "mps")
