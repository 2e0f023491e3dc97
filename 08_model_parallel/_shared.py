"""How a model is cut: its layers into the stages of a pipeline, its matrices by torch's plan for tensor parallelism."""

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


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of a stage. All have equally many; where stages do not divide the layers, the first have one more."""
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def keep_stage(net: nn.Module, stage: int, stages: int) -> nn.Module:
    """Drop from a model on the meta device what other stages compute. Layer 7 is still called 7."""
    for layer in set(range(len(net.model.layers))) - set(
        layers_of(stage, stages, len(net.model.layers))
    ):
        del net.model.layers[str(layer)]
    if stage > 0:
        net.model.embed_tokens = None  # the stage takes hidden states instead of tokens
    if stage < stages - 1:
        net.model.norm = None
        net.lm_head = None  # it returns hidden states
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
