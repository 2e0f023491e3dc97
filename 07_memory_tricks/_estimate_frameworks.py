"""What differs between frameworks that train the same model: bytes per parameter, and what their kernels keep.

A convention comes from the framework's own code, or from a run that prints two figures. Where code leaves two readings
open, all measured rows of that framework together chose one (it says so there). None is fitted to a row.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Framework:
    weight: int  # bytes per parameter, as the forward pass finds them, or as they are sharded
    gradient: int  # as they are summed over micro-batches
    master: int  # an fp32 copy of the weights, beside the optimizer's own state
    bucket: int = 0  # copies of gradients that wait to be reduced
    # activations
    repeated_heads: bool = False  # keys and values are copied to every query head before attention
    mixed_qkv: bool = False  # one product for q, k, v: its result stays alive beside the rotated queries and keys
    ffn_tensors: int = 4  # of ffn numbers per token: gate, up, silu(gate), and their product
    gathered_inputs: bool = False  # inputs of column-parallel products, the head's too, are kept whole, not their 1/tp
    whole_summands: bool = False  # "selective" keeps row-parallel products as they are before tensor ranks add them up
    gathered_keys: bool = False  # context parallel by all-gather: keys and values of all tokens are kept, and a mask
    every_second_product: bool = False  # "selective" keeps every second product instead of all
    drops_last_product: bool = False  # "selective" keeps none of a dense block's last product: no backward reads it
    # what else is alive at the peak
    gathers_root: bool = False  # embedding and head stay gathered from forward to backward
    whole_in_pipelines: bool = False  # with pp > 1, gradients are reduced once, after a step's last backward
    weights_whole_in_pipelines: bool = False  # and weights are not resharded until then
    placeholders: bool = False  # a bf16 gradient of each shape that is never used, where the product adds in place
    stages_by_cost: bool = False  # pipeline stages of equal cost, the head counted, instead of equal layers
    reserved: float = 0.05  # the allocator's surplus over what changes within a step; long-lived tensors have none


TORCHTITAN = Framework(
    weight=4,
    gradient=4,
    master=0,
    repeated_heads=True,
    every_second_product=True,
    gathers_root=True,
    whole_in_pipelines=True,
    weights_whole_in_pipelines=True,
    gathered_inputs=True,
    whole_summands=True,
    # FSDP2 runs whose source prints both, over states that are 12.6 and 39.1 GiB: commit 83c879f 59.41 and 49.54 GiB,
    # 00cffae 107.97 and 96.60, 141.53 and 126.12. The surplus is 0.27, 0.20 and 0.18 of the rest: its median.
    reserved=0.20,
)

# 16 bytes per parameter, 18 or 20: the sum of weight, gradient, master (and bucket) and AdamW's 8.
FRAMEWORKS = {
    # common/model.py under autocast or fully_shard: fp32 weights, fp32 gradients. 16.
    "ours": Framework(
        weight=4,
        gradient=4,
        master=0,
        gathers_root=True,
        gathered_inputs=True,
        gathered_keys=True,
        whole_in_pipelines=True,
        whole_summands=True,
        drops_last_product=True,
    ),
    # DeepSpeed with fp16 or bf16, and the ZeRO paper (arXiv:1910.02054, section 3.1): 2 + 2 + 4 + 8. 16.
    "deepspeed": Framework(weight=2, gradient=2, master=4),
    # DeepSpeed's own calculator for ZeRO-3 (docs/code-docs/source/memory.rst): gradients in fp32. 18.
    "deepspeed-fp32-gradients": Framework(weight=2, gradient=4, master=4),
    # Megatron-LM with TransformerEngine: bf16 weights, fp32 main_grad, and distributed over data-parallel ranks an fp32
    # master copy and Adam. 18. SwiGLU is one kernel that keeps its input (2 ffn) and the next product its own (1 ffn).
    # With gradient accumulation fused, autograd still wants a gradient: one placeholder per shape is kept for good
    # (TransformerEngine's get_dummy_wgrad). That q, k, v stay in the mixed tensor as well was chosen by the rows.
    "megatron": Framework(
        weight=2,
        gradient=4,
        master=4,
        mixed_qkv=True,
        ffn_tensors=3,
        placeholders=True,
    ),
    # nanotron 0.5: bf16 weights, fp32 gradients whole on every rank (ZeRO-1 divides master and Adam only), and DDP's
    # bf16 buckets. 20. That its asynchronous column-parallel products keep the gathered input was chosen by the rows:
    # without it those of tp 4 and 8 with large micro-batches lack just its size.
    "nanotron": Framework(
        weight=2,
        gradient=4,
        master=4,
        bucket=2,
        gathered_inputs=True,
        stages_by_cost=True,
    ),
    # torchtitan: FSDP2 with fp32 shards and bf16 products. 16. Llama's repeat_kv copies keys and values. Selective
    # checkpointing "per op" saves attention and every second product; grouped products of experts are not on its list.
    # With a pipeline, weights stay gathered and fp32 gradients whole over all micro-batches of a step.
    "torchtitan": TORCHTITAN,
    # The same under torch.compile, block by block. Its kernels never write silu(gate) down. Reserved: three settings
    # were run with and without it, and what changes within a step is 0.92 of the eager one's (their median).
    "torchtitan-compiled": replace(TORCHTITAN, ffn_tensors=3, reserved=0.10),
}

# Bytes per logit at the peak, while the loss runs backward.
LOSSES = {
    # log-softmax 4, the gradient that nll_loss makes 4, log-softmax's own gradient 4
    "plain": 12,
    # the same, while a variable of the training loop holds the logits in fp32 until the next step has its own
    "logits-held": 16,
    # split over tensor-parallel ranks (loss_parallel): its backward makes exp(log-softmax) as a tensor of its own
    "parallel": 16,
    # torch.compile of the loss: logits and their gradient, both in 16 bits (torchtitan#1033: "input size for forward
    # and backward", the default with --compile since April 2025)
    "compiled": 4,
    # Megatron's and TransformerEngine's fused cross-entropy: the gradient takes the place of the 16-bit logits
    "fused": 2,
    # head and loss together in eight chunks, of which one is alive
    "chunked": 12 / 8,
}
FP32_LOG_SOFTMAX = ("plain", "logits-held")  # of which forward leaves 4 bytes a logit
