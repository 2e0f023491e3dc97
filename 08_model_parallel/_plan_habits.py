"""How frameworks spend a step: what they overlap, and what their kernels move. Facts of a framework, never of a run."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Habits:
    moved: float  # bytes that kernels other than products move, as a multiple of what fused ones do
    launch: float  # seconds in which Python starts the kernels of one layer's forward
    launch_tp: float = 0.0  # more where weights are DTensors, as tensor parallelism makes them
    merged: bool = False  # q, k, v are one product, and so are gate and up
    gradients_overlap: bool = True  # gradients are reduced while backward still runs
    one_by_one: bool = False  # ZeRO-1 sends every rank's part in a collective of its own
    shuffled: bool = False  # sequence parallel along the second dimension: each collective copies once more
    all_to_all: bool = False  # context parallel by all-to-all (Ulysses), not by a ring
    gathered_keys: bool = False  # or by an all-gather that nothing hides, and attention that computes what it masks
    keeps_gathered: bool = True  # selective recomputation keeps what collectives gave
    permuted: float = 8.0  # copies of a token's vector that each of its experts moves in forward
    imbalance: float = 1.0  # tokens of the busiest rank's experts, as a multiple of the mean


TORCHTITAN = Habits(moved=1.6, launch=0.8e-3, launch_tp=3e-3, shuffled=True, permuted=16, imbalance=1.5)
HABITS = {
    # this repository's train_3d.py: eager kernels; FSDP overlaps, tensor and context parallel wait
    "ours": Habits(
        moved=1.6,
        launch=0.8e-3,
        launch_tp=3e-3,
        shuffled=True,
        imbalance=1.5,
        gathered_keys=True,
        keeps_gathered=False,
    ),
    # fused kernels of TransformerEngine; run without overlap, and with experts of a fixed capacity
    "megatron": Habits(moved=1.0, launch=0.6e-3, merged=True, gradients_overlap=False, all_to_all=True),
    # its reduce-scatter and all-gather of unequal parts are a broadcast per rank
    "nanotron": Habits(moved=1.3, launch=0.6e-3, merged=True, one_by_one=True),
    "torchtitan": TORCHTITAN,
    "torchtitan-compiled": replace(TORCHTITAN, moved=1.0, launch=0.3e-3),
}
# Bytes that a logit's loss and backward move, by the names that estimate.py has for losses
LOSS_MOVES = {"plain": 38, "logits-held": 38, "parallel": 50, "compiled": 10, "fused": 10, "chunked": 38}
BUCKET = 25 * 2**20  # bytes that DDP reduces at once
