"""Test lm/weights.py on the meta device and by rows, and lm/model.py with given positions."""

import dataclasses

import pytest
import torch

from lm import shapes, weights

# 2 and 3 ranks divide none of the sizes.
UNEVEN = shapes.Config(
    vocab_size=83,
    hidden_size=42,
    intermediate_size=50,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=14,
    max_position_embeddings=32,
)


@pytest.fixture
def nan_in_new_memory():
    """With deterministic algorithms, torch fills memory that is not initialized with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_the_meta_device_has_nothing_unset(nan_in_new_memory, tied):
    config = dataclasses.replace(UNEVEN, tie_word_embeddings=tied)
    built = weights.build("nano", config, seed=5)
    net = weights.build("nano", config, seed=5, device="meta")
    assert all(tensor.is_meta for tensor in net.state_dict().values())

    weights.materialize(net, "nano", seed=5, device="cpu")

    found = dict([*net.named_parameters(), *net.named_buffers()])
    expected = dict([*built.named_parameters(), *built.named_buffers()])
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
    assert (net.lm_head.weight is net.model.embed_tokens.weight) == tied
    parameter_count = sum(parameter.numel() for parameter in net.parameters())
    assert parameter_count == shapes.parameter_count(config)


@pytest.mark.parametrize(
    ("first", "last"), [(0, 1000), (0, 1), (255, 257), (300, 700), (999, 1000), (1000, 1000)]
)
def test_a_rank_draws_the_rows_of_the_full_matrix(first, last):
    """256 rows share a generator, and the rows of a rank may begin and end anywhere."""
    full = weights.random_weight("x", (1000, 3), 7)
    rows = weights.random_weight("x", (1000, 3), 7, first, last)
    assert torch.equal(rows, full[first:last])
    assert len(full.unique()) > 2900


def test_nothing_is_drawn_from_the_global_generator():
    before = torch.get_rng_state()
    weights.build("nano", UNEVEN, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_positions_may_be_given():
    net = weights.build("nano", UNEVEN, seed=0)
    tokens = torch.randint(0, 83, (2, 9), generator=torch.Generator().manual_seed(1))
    counted = torch.arange(9).expand(2, 9)
    with torch.no_grad():
        logits = net(tokens)
        assert torch.equal(logits, net(tokens, positions=counted))

        # Only the distance between two positions matters.
        torch.testing.assert_close(logits, net(tokens, positions=counted + 11))
        spread = net(tokens, positions=counted * 2)
        assert not torch.allclose(logits, spread)

        # Each sequence has its own positions.
        mixed = net(tokens, positions=torch.stack((counted[0], counted[1] * 2)))
        torch.testing.assert_close(mixed[0], logits[0])
        torch.testing.assert_close(mixed[1], spread[1])


def test_rounding_the_weights_leaves_the_angles_exact():
    net = weights.build("nano", UNEVEN, seed=0)
    assert net.model.rope_cos.dtype == torch.float32
    assert net.to(torch.bfloat16).model.rope_cos.dtype == torch.float32
    assert "model.rope_cos" not in net.state_dict()
