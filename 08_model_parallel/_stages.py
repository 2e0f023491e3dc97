"""Split a model into the stages of a pipeline, and its matrices over tensor ranks."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


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


def cut_matrices(net: nn.Module, mesh: DeviceMesh, attention_arguments: int = 3) -> None:
    """Tensor parallelism with sequence parallelism by torch's plan: weights become DTensors that know how they are cut.

    Activations [batch, length, hidden] are sharded by length around norms and residuals, and replicated inside
    attention and the MLP: an all-gather leads in, and o_proj and down_proj, whose results are partial sums, leave by a
    reduce-scatter. `attention_arguments`: how many tensors a block gives its attention, x, cos and sin at the least.
    """
    replicate, by_length = Replicate(), Shard(1)
    untouched = (None,) * (attention_arguments - 1)
    plan = {
        "model.layers.*.*_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(by_length, *untouched), desired_input_layouts=(replicate, *untouched)
        ),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),  # a rank has whole heads
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=by_length),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=by_length, desired_input_layouts=replicate
        ),
        # gate and up; plain tensors would not tell down_proj that the parts of the channels may be unequal
        "model.layers.*.mlp.[gu]*_proj": ColwiseParallel(use_local_output=False),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=by_length),
    }
    # of a rank's own heads, so the gradient of the weight is a summand, which this adds up
    if net.config.qk_norm:
        plan["model.layers.*.self_attn.[qk]_norm"] = SequenceParallel(
            sequence_dim=2, use_local_output=True
        )
    # a rank looks up the tokens that it holds, and adds zeros for the others
    if net.model.embed_tokens is not None:
        plan["model.embed_tokens"] = RowwiseParallel(
            input_layouts=replicate, output_layouts=by_length
        )
    if net.lm_head is not None:
        plan["model.norm"] = SequenceParallel()
        # logits stay sharded by vocabulary: loss_parallel() computes the loss from the parts
        plan["lm_head"] = ColwiseParallel(
            input_layouts=by_length, output_layouts=Shard(-1), use_local_output=False
        )
    # or rank 0 would send its weights to all
    parallelize_module(net, mesh, plan, src_data_rank=None)
    net.tie_weights()  # parallelize_module has made two parameters of one
