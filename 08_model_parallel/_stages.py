"""Split a model into the stages of a pipeline."""

import torch
from torch import nn

from lm.stages import split_layers


def keep_stage(net: nn.Module, stage: int, stages: int) -> nn.Module:
    """Delete from a model what other stages compute, and return the model.

    The first stage keeps the embedding, the last one the final norm and the head. Layer 7 keeps its
    name, 7, in whichever stage it is. Call it on the meta device, before weights have memory.
    """
    keep_stages(net, [stage], stages)
    return net


def keep_stages(net: nn.Module, kept: list[int], stages: int) -> dict[int, nn.Module]:
    """Delete from a model what the stages in `kept` do not compute; return each stage by number.

    With one stage, it is the model itself. With several, each is another Transformer that holds
    modules of the model. So the model still has all weights of the rank, by the names of the full
    model.
    """
    layers = net.model.layers
    layer_parameters = sum(parameter.numel() for parameter in layers["0"].parameters())
    head = net.lm_head.weight.numel() / layer_parameters
    layer_ranges = split_layers(len(layers), stages, head)
    kept_layers = []
    for stage in kept:
        kept_layers += layer_ranges[stage]
    for number in range(len(layers)):
        if number not in kept_layers:
            del layers[str(number)]
    if 0 not in kept:
        net.model.embed_tokens = None  # this rank takes hidden states instead of tokens
    if stages - 1 not in kept:
        net.model.norm = None
        net.lm_head = None  # this rank returns hidden states
    if len(kept) == 1:
        return {kept[0]: net}

    modules = {}
    for stage in kept:
        with torch.device("meta"):
            part = type(net)(net.config)
        part.model.layers = nn.ModuleDict(
            {str(number): layers[str(number)] for number in layer_ranges[stage]}
        )
        part.model.embed_tokens = net.model.embed_tokens if stage == 0 else None
        part.model.norm = net.model.norm if stage == stages - 1 else None
        part.lm_head = net.lm_head if stage == stages - 1 else None
        modules[stage] = part
    return modules


def share_rope_tables(net: nn.Module, modules: dict[int, nn.Module]) -> None:
    """Give the stages the RoPE tables of the model, which `materialize` has filled."""
    for module in modules.values():
        module.model.rope_cos = net.model.rope_cos
        module.model.rope_sin = net.model.rope_sin
