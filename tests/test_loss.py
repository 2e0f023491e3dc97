"""lm/loss.py: the chunked loss has the gradients of the plain one, and never all logits."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm import shapes, weights
from lm.loss import use_loss
from training.batches import PADDING

VOCABULARY = 1009
CONFIG = dataclasses.replace(shapes.SIZES["nano"], vocab_size=VOCABULARY, num_hidden_layers=1)


class Largest(TorchDispatchMode):
    """The largest number of logits in one tensor."""

    logits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_tensor = isinstance(result, torch.Tensor) and result.shape[-1:] == (VOCABULARY,)
        if is_tensor and result.shape != (CONFIG.hidden_size, VOCABULARY):  # the head has that
            self.logits = max(self.logits, result.numel())
        return result


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_gradients_are_those_of_the_plain_loss_and_an_eighth_of_the_logits_is_alive(
    dtype, tolerance, frozen_head
):
    inputs, targets = torch.randint(VOCABULARY, (2, 3, 43)).unbind()  # 8 does not divide 129
    targets[:, :11] = PADDING
    losses = []
    gradients = []
    logits = []
    for method in ("plain", "chunked"):
        net = weights.build("nano", CONFIG, seed=0)
        net.lm_head.weight.requires_grad_(not frozen_head)
        use_loss(net, method)
        with Largest() as largest:
            with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
                loss = net(inputs, targets, reduction="sum") / 7
            loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
        logits.append(largest.logits)
        with torch.no_grad():
            mean = net(inputs, targets)
        assert mean.item() == pytest.approx(losses[0] * 7 / (3 * 32), rel=tolerance)
        assert mean.dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=min(tolerance, 1e-3))
    assert len(gradients[0]) == len(gradients[1])
    for plain, chunked in zip(*gradients, strict=True):
        assert (plain - chunked).norm() <= tolerance * plain.norm()
    assert logits[0] == 129 * VOCABULARY
    assert logits[1] == 17 * VOCABULARY
