"""07_memory_tricks/optimizer_memory.py: what is rounded, by how much, and that training goes on from what is kept."""

import copy
import io
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import TINY, config_of, run

from common import model

SCRIPT = "07_memory_tricks/optimizer_memory.py"
optimizers = load(SCRIPT)
report = load("07_memory_tricks/_optimizer_memory.py")
UNEVEN = {**TINY, "hidden_size": 33, "intermediate_size": 65, "head_dim": 8, "tie_word_embeddings": True}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return model.build("nano", config_of(UNEVEN), seed=0).to(dtype)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    texts = torch.randint(256, (count, 2, 17), generator=generator(1))
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def train(net: torch.nn.Module, steppers: list[torch.optim.Optimizer], texts: list) -> list[float]:
    losses = []
    for inputs, targets in texts:
        loss = net(inputs, targets)
        loss.backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in net.parameters()])


# --- the two roundings


def test_stochastic_rounding_gives_one_of_the_two_neighbours():
    x = torch.cat((torch.randn(5000, generator=generator()), torch.tensor([0.0, -0.0, 1e-30, -3e38])))
    got = optimizers.stochastic_round(x, generator(1)).float()
    towards_zero = (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
    away = ((x.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    assert ((got == towards_zero) | (got == away)).all()
    assert (got[:5000] == towards_zero[:5000]).float().mean() == pytest.approx(0.5, abs=0.05)


def test_stochastic_rounding_is_unbiased():
    """The mean of n draws of a variable with two values `gap` apart has a deviation of gap / (2 sqrt(n)) at most."""
    draws = 4000
    x = torch.randn(50, generator=generator())
    exponent = torch.frexp(x.abs()).exponent - 1
    gap = torch.exp2(exponent - 7.0)  # bf16 has 7 bits after the point
    source = generator(2)
    mean = torch.stack([optimizers.stochastic_round(x, source).double() for _ in range(draws)]).mean(0)
    assert ((mean - x).abs() <= 5 * gap / (2 * math.sqrt(draws))).all()
    assert ((x.bfloat16().double() - x).abs() > 5 * gap / (2 * math.sqrt(draws))).any()  # the nearest would not pass


def test_the_code_books():
    signed, unsigned = optimizers.BOOKS["first"], optimizers.BOOKS["second"]
    assert (len(signed), len(unsigned)) == (256 - 1 + 1, 256 - 1)
    for book in (signed, unsigned):
        assert (book.diff() > 0).all()
        assert book.max() == 1.0
    assert (signed == 0).sum() == 1
    assert torch.equal(signed[signed < 0], -signed[(signed > 0) & (signed < 1)].flip(0))
    assert 0 < unsigned.min() < 1e-6  # a second moment of zero would be divided by
    assert 0 < signed[signed > 0].min() < 1e-6


@pytest.mark.parametrize("shape", [(256,), (255,), (33, 65), (3, 256), (1,)])
@pytest.mark.parametrize("name", ["first", "second"])
def test_a_round_trip_is_off_by_half_a_gap_at_most(shape, name):
    book = optimizers.BOOKS[name]
    x = torch.randn(shape, generator=generator()) * 10.0 ** torch.randint(-5, 1, shape, generator=generator(1))
    x = x if name == "first" else x.square()
    codes, scales = optimizers.quantize(x, book)
    assert codes.dtype == torch.uint8
    assert codes.nbytes + scales.nbytes == math.ceil(x.numel() / 256) * 260
    got = optimizers.dequantize(codes, scales, book, x.shape)
    assert got.shape == x.shape
    scale = scales.expand(-1, 256).flatten()[: x.numel()].view(shape)
    assert ((got - x).abs() <= scale * (book.diff().max() / 2 * 1.0001).clamp(min=1e-6)).all()
    relative_to_scale = (x / scale).contiguous()
    place = torch.bucketize(relative_to_scale, book).clamp(1, len(book) - 1)  # book[place - 1] < x <= book[place]
    half_gap = (book[place] - book[place - 1]) / 2
    inside = (relative_to_scale >= book[0]) & (relative_to_scale <= book[-1])
    assert ((got - x).abs() <= scale * half_gap * 1.001)[inside].all()
    largest = x.abs().flatten().argmax()
    assert got.flatten()[largest].abs() >= 0.985 * x.abs().max()  # each block's largest is in its book, or next to it
    if name == "second":
        assert (got > 0).all()


# --- the optimizers


def test_in_fp32_it_is_torchs_adamw():
    own, torchs = tiny_net(), tiny_net()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    train(own, [optimizers.CompactAdamW(own.parameters(), 1e-2, "fp32")], batches(5))
    train(torchs, [torch.optim.AdamW(torchs.parameters(), **settings)], batches(5))
    moved = (weights(torchs) - weights(tiny_net())).norm()
    assert (weights(own) - weights(torchs)).norm() < 1e-5 * moved


@pytest.mark.parametrize(("moments", "limit"), [("bf16", 0.02), ("8bit", 0.05)])
def test_narrow_moments_move_the_weights_nearly_as_far(moments, limit):
    own, torchs = tiny_net(), tiny_net()
    train(own, [optimizers.CompactAdamW(own.parameters(), 1e-3, moments)], batches(5))
    train(torchs, [optimizers.CompactAdamW(torchs.parameters(), 1e-3, "fp32")], batches(5))
    moved = (weights(torchs) - weights(tiny_net())).norm()
    assert 0 < (weights(own) - weights(torchs)).norm() < limit * moved


def test_a_master_copy_is_fp32_training_seen_through_bf16():
    net = tiny_net(torch.bfloat16)
    optimizer = optimizers.CompactAdamW(net.parameters(), 1e-5, "fp32", master=True)
    start = weights(net)
    train(net, [optimizer], batches(5))
    for parameter in net.parameters():
        master = optimizer.state[parameter]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), parameter)
    masters = torch.cat([optimizer.state[parameter]["master"].flatten() for parameter in net.parameters()])
    assert (masters != start).float().mean() > 0.99  # and of the bf16 weights hardly one has moved
    assert (weights(net) != start).float().mean() < 0.5


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_state_goes_on_to_the_bit(moments, dtype):
    texts = batches(6)
    net = tiny_net(dtype)
    optimizer = optimizers.CompactAdamW(net.parameters(), 1e-3, moments, master=dtype == torch.bfloat16)
    train(net, [optimizer], texts[:3])
    saved = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), saved)
    saved.seek(0)
    train(net, [optimizer], texts[3:])

    resumed = tiny_net(dtype)
    other = optimizers.CompactAdamW(resumed.parameters(), 1e-3, moments, master=dtype == torch.bfloat16)
    net_state, optimizer_state = torch.load(saved)
    resumed.load_state_dict(net_state)
    other.load_state_dict(optimizer_state)
    kinds = {name: value.dtype for name, value in other.state[next(resumed.parameters())].items() if name != "step"}
    assert kinds == {
        name: value.dtype for name, value in optimizer.state[next(net.parameters())].items() if name != "step"
    }
    train(resumed, [other], texts[3:])
    assert torch.equal(weights(resumed), weights(net))


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=1e-2, fused=True),
        partial(optimizers.CompactAdamW, lr=1e-2, moments="bf16"),  # by chance, but by the same
        partial(optimizers.CompactAdamW, lr=1e-2, moments="8bit"),
    ],
    ids=["fp32", "bf16", "8bit"],
)
def test_a_step_inside_backward_is_the_step_after_it_to_the_bit(make):
    inside, after = tiny_net(), tiny_net()
    losses = train(after, [make(after.parameters())], batches(5))
    optimizers.step_inside_backward(inside, make)
    seen = train(inside, [], batches(5))
    assert seen == losses
    assert torch.equal(weights(inside), weights(after))
    assert all(parameter.grad is None for parameter in inside.parameters())


# --- the script


def finish(folder: Path) -> dict:
    (folder / "uneven.json").write_text(json.dumps(UNEVEN))
    flags = ("--model", "uneven.json", "--device", "cpu", "--steps", 4, "--seq-len", 16, "--seeds", 2)
    result = run(SCRIPT, folder, *flags, "--batch-size", 4, "--lr", 1e-3, "--json", "o.json")
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 3
    return json.loads((folder / "o.json").read_text())


def test_bytes_and_losses(once):
    summary = once("07 optimizer memory", finish)
    rows = {row["recipe"]: row for row in summary["rows"]}
    per_parameter = {name: row["bytes_per_parameter"] for name, row in rows.items()}
    assert per_parameter["AdamW"] == per_parameter["bf16 weights, fp32 master"] == 16
    assert per_parameter["moments in bf16"] == per_parameter["step inside backward"] == 12
    assert per_parameter["bf16 weights"] == per_parameter["bf16 weights, stochastic rounding"] == 8
    assert 10.03 < per_parameter["moments in 8 bits"] < 10.5
    assert 8 < per_parameter["Adafactor"] < 8.5
    for row in rows.values():
        assert [len(losses) for losses in row["losses"]] == [4, 4]
        assert row["last_loss"] < row["first_loss"]
    assert all(first != second for first, second in (row["losses"] for row in rows.values()))
    adamw = rows["AdamW"]["losses"]
    spread = abs(adamw[0][2] - adamw[1][2])
    bf16 = rows["bf16 weights"]
    assert bf16["largest_distance"] > 0
    if bf16["largest_distance_step"] == 3:
        assert bf16["spread_over_seeds_there"] == pytest.approx(spread)


SPOILED = {
    "bytes, not": lambda rows: rows[2].update(optimizer_bytes=rows[2]["optimizer_bytes"] - 4),
    "bytes of gradients": lambda rows: rows[4].update(gradient_bytes=4),
    "trains differently": lambda rows: rows[4]["losses"][1].__setitem__(3, 1.0),
    "a step inside backward takes": lambda rows: rows[4].update(peak_bytes=rows[0]["peak_bytes"] + 1),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_claim_that_does_not_hold_fails(once, message):
    rows = copy.deepcopy(once("07 optimizer memory", finish)["rows"])
    low = [{"losses": [1.0], "moved_share": share} for share in (1.0, 0.2, 0.8)]
    report.check(rows, low, config_of(UNEVEN))
    SPOILED[message](rows)
    with pytest.raises(AssertionError, match=message):
        report.check(rows, low, config_of(UNEVEN))


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--batch-size", "999999999"), ("--steps", "0"), ("--lr", "-1"), ("--model", "nope"), ("--device", "x")],
)
def test_a_wrong_flag_is_one_line(tmp_path, flag, value):
    result = run(SCRIPT, tmp_path, flag, value)
    assert result.code == 2
    assert flag in result.err
    assert result.err.count("\n") == 1
