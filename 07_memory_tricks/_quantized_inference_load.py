"""Weights for quantized_inference.py, one matrix at a time: read or drawn, rounded, packed, and the next."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from _quantized_inference_checks import product_error, rounding_share
from _quantized_inference_files import Parts, Writer, reader
from _quantized_inference_products import rows_at_once
from torch import Tensor, nn
from tqdm import tqdm

from old import model, shapes


class Scheme(NamedTuple):
    weights: str
    layer: type[nn.Module]
    group: int

    @property
    def rounds(self) -> bool:
        return hasattr(self.layer, "quantize")


@dataclass
class Loaded:
    net: model.Transformer
    weight_bytes: int = 0  # of everything that is held
    bytes_per_step: int = 0  # of what a decode step reads: all but the embedding, of which it looks up a row
    matrices: int = 0
    rounding_shares: list[float] = field(default_factory=list)  # of what rounding allows, the largest of each matrix
    relative_weight_errors: list[float] = field(default_factory=list)
    product_errors: list[float] = field(default_factory=list)


class MergedAttention(model.Attention):
    """model.Attention with one product for queries, keys and values: the same bytes in a third of the calls."""

    def __init__(self, config: shapes.Config, qkv_proj: nn.Module, o_proj: nn.Module) -> None:
        nn.Module.__init__(self)
        self.head_dim = config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.widths = [count * config.head_dim for count in heads]
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv_proj(x).split(self.widths, dim=-1)


class MergedMLP(model.MLP):
    def __init__(self, gate_up_proj: nn.Module, down_proj: nn.Module) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.gate_up_proj(x).chunk(2, dim=-1)


def load(
    name: str,
    config: shapes.Config,
    scheme: Scheme,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    save: Path | None = None,
    flag: str = "--model",
) -> Loaded:
    """The model with its weights in `scheme`: those of folder `name`, else random ones, written to `save` on the way.

    What is there beside the result is one matrix as it was read, or codes of one layer once more while they are merged
    and packed. To round, to pack and to check takes a part of a matrix at a time.
    """
    with torch.device("meta"):
        net = model.Transformer(config)
    loaded = Loaded(net)
    read = reader(name, config, scheme, seed=seed, device=device, flag=flag)
    writer = Writer(save, name, scheme)

    def plain(parameter: str) -> nn.Parameter:
        """The embedding and norms, which are not rounded."""
        tensor = read(parameter)["weight"].to(device, dtype)
        writer.add(parameter, {"weight": tensor})
        return frozen(tensor)

    def product(*parameters: str) -> nn.Module:
        """One layer for these matrices, one below the other."""
        all_parts = []
        for parameter in parameters:
            parts = read(parameter)
            if scheme.rounds and "weight" in parts:
                parts = rounded(parts.pop("weight"), scheme, device, loaded)
            parts = {part: tensor.to(device, None if scheme.rounds else dtype) for part, tensor in parts.items()}
            writer.add(parameter, parts)
            all_parts.append(parts)
        together = {part: torch.cat([parts[part] for parts in all_parts]) for part in all_parts[0]}
        layer = scheme.layer(**together)
        if scheme.rounds and len(loaded.product_errors) < 4:  # those of one block: the others run the same code
            loaded.product_errors.append(product_error(layer, together, dtype))
        loaded.bytes_per_step += sum(buffer.nbytes for buffer in layer.buffers())
        loaded.matrices += len(parameters)
        return layer

    net.model.rope_cos, net.model.rope_sin = model.rope_tables(config, config.max_position_embeddings, device)
    net.model.embed_tokens.weight = plain("model.embed_tokens.weight")
    writer.write("embedding")
    for index, block in tqdm(net.model.layers.items(), unit="layer", disable=None, leave=False):
        prefix = f"model.layers.{index}."
        qkv = product(*(f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"))
        block.self_attn = MergedAttention(config, qkv, product(prefix + "self_attn.o_proj.weight"))
        gate_up = product(*(f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")))
        block.mlp = MergedMLP(gate_up, product(prefix + "mlp.down_proj.weight"))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(block, norm).weight = plain(f"{prefix}{norm}.weight")
        writer.write(f"layer-{int(index):03}")
    net.model.norm.weight = plain("model.norm.weight")
    if config.tie_word_embeddings and not scheme.rounds:
        net.lm_head = scheme.layer(net.model.embed_tokens.weight.detach())
        loaded.bytes_per_step += net.lm_head.weight.nbytes
    else:  # a step reads all of the head, so it is rounded, and of a tied embedding, which stays as it is, a row
        net.lm_head = product("lm_head.weight")
    writer.write("head")
    writer.finish()

    held = [*net.parameters(), *(buffer for name, buffer in net.named_buffers() if "rope" not in name)]
    assert not any(tensor.is_meta for tensor in held), "a weight was left without values"
    loaded.weight_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
    return loaded


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@torch.no_grad()
def rounded(weight: Tensor, scheme: Scheme, device: torch.device, loaded: Loaded) -> Parts:
    """Codes and scales of a matrix, some rows at a time."""
    all_parts, share, squared_error, squared = [], 0.0, 0.0, 0.0
    for rows in weight.split(rows_at_once(weight.shape[1])):
        exact = rows.to(device).float()
        parts = scheme.layer.quantize(exact, scheme.group)
        error = scheme.layer.dequantize(**parts)[:, : exact.shape[1]] - exact
        share = max(share, rounding_share(exact, error, parts, scheme.weights))
        squared_error += error.double().square().sum().item()
        squared += exact.double().square().sum().item()
        all_parts.append(parts)
    assert share <= 1, f"a weight is off by {share:.3f} of what rounding to {scheme.weights} allows"
    loaded.rounding_shares.append(share)
    loaded.relative_weight_errors.append((squared_error / max(squared, 1e-30)) ** 0.5)
    return {part: torch.cat([parts[part] for parts in all_parts]) for part in all_parts[0]}
