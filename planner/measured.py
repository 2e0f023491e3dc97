"""What programs reach of a data sheet's rates: the constants of planner/step.py.

All of them are shares, so that they apply to any device and any model. The measured ones come from
benchmarks/results/nvidia-h200-2026-11-26.md: one H200, bf16, compiled. No other device has been
measured, and no link: another card may reach more or less.
"""

# --- measured: "What limits a training step", the column of llama-124m, 64 x 1,024 tokens, and
# "Variants of the 124m step"

# Matmuls: 751 of 989.4 TFLOP/s, at the card's power limit.
MATMUL = 0.759
# Attention: 17.30 ms a step for 4.87e12 FLOPs. These are two matmuls in forward and five in
# backward, of whole tiles of scores: see step.attention_flops.
ATTENTION = 0.2845
# Head and loss, fused: 8.47 ms a step for 19.8 GB, 6 bytes per logit, of 4.8 TB/s.
LOSS = 0.487
# Clipping and AdamW: 1.42 ms a step for 4.94 GB, 40 bytes per parameter.
OPTIMIZER = 0.725
# Kernels between matmuls: norms, rotations, activations, casts. The step with separate matmuls
# takes 120.86 ms. Without the gaps below and the four parts above, 25.2 ms are left for the 77.5 GB
# of step.kernel_bytes and step.cast_bytes.
KERNELS = 0.640
# Time between kernels: a step of 130.87 ms has 126.88 ms of them.
GAPS = 0.0314

# --- measured: decode

# A kernel that streams: silu(gate) * up, 2.23 ms for 9.66 GB in the step above.
STREAM = 0.904
# A decode step of llama-8b takes 4.435 ms. STREAM would read its 15.04 GB of weights and cache in
# 3.466 ms; the rest, by its 32 layers.
DECODE_LAYER_SECONDS = 30.3e-6
# A decode step of llama-70b in int4 takes 25.4 ms (39.4 tokens/s): 43.51 GB, and 80 layers of the
# above. The matmuls are torch's _weight_int4pack_mm.
INT4_STREAM = 0.395

# --- assumed: nothing here has been measured

# Seconds in which Python starts one kernel, and kernels of a layer's forward and backward. Eager
# was counted: 552 kernels for a step of nano's six layers (counted-per-step-2026-11-25.md).
LAUNCH_SECONDS = 6e-6
LAUNCHES = {"eager": 92, "compiled": 30}
# More launches where weights are DTensors (tensor parallelism). A compiled block has none.
TENSOR_LAUNCHES = 3
LINK = 0.6  # of the links inside a node
NETWORK = 0.6  # of the links between nodes
START_SECONDS = 12e-6  # until a collective moves its first byte
HOP_SECONDS = 1.5e-6  # for each further rank of its ring
NETWORK_HOP_SECONDS = 15e-6  # for each further node
# Of two things that run at once, the shorter one costs the rest: they share memory and
# multiprocessors.
OVERLAP = 0.85
# Tokens of the busiest rank's experts, as a multiple of the mean, and how many copies of a token's
# vector each of its experts moves in forward.
EXPERT_IMBALANCE = 1.5
EXPERT_COPIES = 8
