"""Split a model into the stages of a pipeline."""

from torch import nn


def layers_of_stage(stage: int, stages: int, layers: int) -> range:
    """Return the numbers of the layers that a stage has.

    If `stages` does not divide `layers`, the first stages have one layer more than the others.
    """
    layers_per_stage, remainder = divmod(layers, stages)
    first = stage * layers_per_stage + min(stage, remainder)
    count = layers_per_stage
    if stage < remainder:
        count += 1
    return range(first, first + count)


def keep_stage(net: nn.Module, stage: int, stages: int) -> nn.Module:
    """Delete from a model what other stages compute, and return the model.

    The first stage keeps the embedding, the last one the final norm and the head. Layer 7 keeps its
    name, 7, in whichever stage it is. Call it on the meta device, before weights have memory.
    """
    layers = net.model.layers
    kept = layers_of_stage(stage, stages, len(layers))
    for number in range(len(layers)):
        if number not in kept:
            del layers[str(number)]
    if stage > 0:
        net.model.embed_tokens = None  # this stage takes hidden states instead of tokens
    if stage < stages - 1:
        net.model.norm = None
        net.lm_head = None  # this stage returns hidden states
    return net
