"""A cache of keys and values in int8 for quantized_inference.py: half the bytes of bf16, so twice the tokens."""

import torch
from torch import Tensor

from old.generate import StaticCache
from old.shapes import Config


class Int8Cache(StaticCache):
    """As StaticCache, with codes of -127 to 127 and a scale for each key and each value vector.

    The newest tokens are rounded, too, so that a token is the same to whoever looks at it. A step gives attention all
    keys and values of the layer in full: what is saved is what the cache holds from step to step.
    """

    def __init__(self, config: Config, *, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, batch=batch, length=length, dtype=torch.int8, device=device)
        self.dtype = dtype
        self.key_scales = {name: torch.zeros(part.shape[:3], device=device) for name, part in self.keys.items()}
        self.value_scales = {name: torch.zeros_like(scales) for name, scales in self.key_scales.items()}

    def extend(self, layer: str, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for stored, scales, fresh in (
            (self.keys[layer], self.key_scales[layer], k),
            (self.values[layer], self.value_scales[layer], v),
        ):
            scale = fresh.float().abs().amax(-1).clamp(min=1e-12) / 127
            codes = (fresh.float() / scale[..., None]).round().to(torch.int8)
            stored.transpose(1, 2)[self.rows, positions] = codes.transpose(1, 2)
            scales.transpose(1, 2)[self.rows, positions] = scale.transpose(1, 2)
        return tuple(
            (stored[layer] * scales[layer][..., None]).to(self.dtype)
            for stored, scales in ((self.keys, self.key_scales), (self.values, self.value_scales))
        )

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.key_scales.values(), *self.value_scales.values()]
