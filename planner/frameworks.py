"""What differs between frameworks that train the same model. A fact comes from the framework's own code, or from a run
that prints two figures. Where code leaves two readings open, all measured rows of that framework chose one."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Framework:
    # bytes per parameter: 16, 18 or 20 with AdamW's 8
    weight: int = 4  # as the forward pass finds it, or as it is sharded
    gradient: int = 4  # as it is summed over micro-batches
    master: int = 0  # an fp32 copy of the weights beside the optimizer's own state
    bucket: int = 0  # copies of gradients that wait to be reduced
    # activations
    repeated_heads: bool = False  # keys and values are copied to every query head before attention
    # one matmul for q, k, v: its result stays alive beside the rotated queries and keys
    mixed_qkv: bool = False
    ffn_tensors: int = 4  # of ffn numbers per token: gate, up, silu(gate), and their product
    # inputs of column-parallel matmuls, the head's too, are kept whole, not their 1/tp
    gathered_inputs: bool = False
    # "selective" keeps row-parallel results as they are before tensor ranks add them up
    whole_summands: bool = False
    # context parallel by all-gather: keys and values of all tokens are kept, and a mask
    gathered_keys: bool = False
    every_second: bool = False  # "selective" keeps every second matmul's result instead of all
    # "selective" keeps none of a dense block's last matmul: no backward reads it
    drops_last: bool = False
    # below ZeRO-3 the residual stream is fp32, matmuls cast, and gradients come one by one
    autocast: bool = False
    # ours by --compile: silu(gate) is computed again, an evaluation is not compiled
    compiled: bool = False
    # what else is alive at the peak
    gathers_root: bool = False  # embedding and head stay gathered from forward to backward
    # with ZeRO-3 and pp > 1, gradients are reduced once, after a step's last backward
    whole_gradients: bool = False
    whole_weights: bool = False  # and weights are not resharded until then
    placeholders: bool = False  # a bf16 gradient of each weight shape that is never used
    # pipeline stages of equal cost, the head counted, instead of equal layers
    stages_by_cost: bool = False
    reserved: float = 0.05  # the allocator's surplus over what changes within a step
    # time
    # bytes that kernels other than matmuls move, as a multiple of what fused ones do
    moved: float = 1.6
    launch: float = 0.8e-3  # seconds in which Python starts the kernels of one layer's forward
    launch_tp: float = 0.0  # more of it where weights are DTensors
    overlaps: bool = True  # gradients are reduced while backward still runs
    one_by_one: bool = False  # ZeRO-1 sends every rank's part in a collective of its own
    permuted: float = 8.0  # copies of a token's vector that each of its experts moves in forward
    imbalance: float = 1.0  # tokens of the busiest rank's experts, as a multiple of the mean


# FSDP2 and DTensors: fp32 shards, 16-bit matmuls. 16 bytes per parameter.
FSDP2 = Framework(
    gathers_root=True,
    whole_gradients=True,
    gathered_inputs=True,
    whole_summands=True,
    launch_tp=3e-3,
    imbalance=1.5,
)
OURS = replace(FSDP2, autocast=True, gathered_keys=True, drops_last=True)  # lm/model.py
FRAMEWORKS = {
    "ours": OURS,
    "ours-compiled": replace(OURS, compiled=True, ffn_tensors=3, moved=1.0, launch=0.3e-3),
    # fp16 or bf16, and the ZeRO paper (arXiv:1910.02054, section 3.1): 2 + 2 + 4 + 8 = 16
    "deepspeed": Framework(weight=2, gradient=2, master=4),
}
# Bytes per logit: at the peak, while the loss runs backward, and moved by loss and backward together.
LOSSES = {
    "plain": (12, 38),  # log-softmax 4, nll_loss's gradient 4, log-softmax's own gradient 4
    # and a variable of the training loop holds the fp32 logits until the next step
    "logits-held": (16, 38),
    # split over tensor ranks (loss_parallel): backward makes exp(log-softmax) as its own tensor
    "parallel": (16, 50),
    # torch.compile of the loss: logits and their gradient, both in 16 bits (torchtitan#1033)
    "compiled": (4, 10),
    # Megatron's, TransformerEngine's, 04's --compile: the gradient takes the 16-bit logits' place
    "fused": (2, 10),
    "chunked": (12 / 8, 38),  # head and loss together in eight chunks, of which one is alive
}
FP32_LOG_SOFTMAX = ("plain", "logits-held")  # of which forward leaves 4 bytes a logit
