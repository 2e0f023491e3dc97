"""A model from the meta device has the weights of one that is built whole; what positions and types change in it."""

import dataclasses

import pytest
import torch

from lm import shapes, weights

UNEVEN = shapes.Config(83, 42, 50, 3, 6, 3, 14, 32)  # nothing that two or three ranks divide


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_the_meta_device_has_nothing_unset(monkeypatch, tied):
    config = dataclasses.replace(UNEVEN, tie_word_embeddings=tied)
    built = weights.build("nano", config, seed=5)
    net = weights.build("nano", config, seed=5, device="meta")
    assert all(tensor.is_meta for tensor in net.state_dict().values())
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda t, **more: empty_like(t, **more).fill_(torch.nan)
    )
    weights.materialize(net, "nano", seed=5, device="cpu")
    tensors = [*net.named_parameters(), *net.named_buffers()]
    expected = [*built.named_parameters(), *built.named_buffers()]
    assert [name for name, _ in tensors] == [name for name, _ in expected]
    for (name, tensor), (_, wanted) in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, msg=name)
    assert (net.lm_head.weight is net.model.embed_tokens.weight) == tied
    assert sum(p.numel() for p in net.parameters()) == shapes.parameter_count(config)


@pytest.mark.parametrize(
    ("first", "last"), [(0, 1000), (0, 1), (255, 257), (300, 700), (999, 1000), (1000, 1000)]
)
def test_a_rank_draws_the_rows_of_the_whole(first, last):
    """Across the blocks of rows that share a generator."""
    whole = weights.random_weight("x", (1000, 3), 7)
    assert torch.equal(weights.random_weight("x", (1000, 3), 7, first, last), whole[first:last])
    assert len(whole.unique()) > 2900


def test_nothing_is_drawn_from_the_global_generator():
    before = torch.get_rng_state()
    weights.build("nano", UNEVEN, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_positions_may_be_given():
    net = weights.build("nano", UNEVEN, seed=0)
    tokens = torch.randint(0, 83, (2, 9), generator=torch.Generator().manual_seed(1))
    counted = torch.arange(9).expand(2, 9)
    with torch.no_grad():
        assert torch.equal(net(tokens), net(tokens, positions=counted))
        # only distances count
        torch.testing.assert_close(net(tokens), net(tokens, positions=counted + 11))
        assert not torch.allclose(net(tokens), net(tokens, positions=counted * 2))
        rows = net(tokens, positions=torch.stack((counted[0], counted[1] * 2)))
        torch.testing.assert_close(rows[0], net(tokens)[0])
        torch.testing.assert_close(rows[1], net(tokens, positions=counted * 2)[1])


def test_rounding_the_weights_leaves_the_angles_exact():
    net = weights.build("nano", UNEVEN, seed=0)
    assert net.model.rope_cos.dtype == torch.float32
    assert net.to(torch.bfloat16).model.rope_cos.dtype == torch.float32
    assert "model.rope_cos" not in net.state_dict()
