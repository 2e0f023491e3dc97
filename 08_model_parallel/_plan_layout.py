"""A layout: how a model and its batch are spread over GPUs. The plan of estimate.py, and what only time asks for."""

from dataclasses import dataclass, replace

import estimate
from _estimate_frameworks import FRAMEWORKS
from _estimate_plan import Plan
from _estimate_shapes import Shape


@dataclass(frozen=True)
class Layout(Plan):
    """gpus = pp x dp x cp x tp, ranks counted with tp fastest: tensor parallel groups are neighbours in a node."""

    replicate: int = 1  # copies of the sharded model: FSDP divides weights by dp x cp / replicate ranks
    virtual: int = 1  # parts of the model per pipeline rank (interleaved 1F1B)
    fp8: str = ""  # linear layers in 8 bits: "tensorwise" or "rowwise" scales
    tp_hidden: float = 0.0  # share of tensor parallel's collectives that run behind products

    @property
    def sharded_over(self) -> int:
        return self.shards // self.replicate

    @property
    def recomputed(self) -> tuple[float, float, float]:
        """Shares of a forward that backward repeats: products, attention, and kernels that only move numbers."""
        if self.checkpointing == "full":
            return 1.0, 1.0, 1.0
        if self.checkpointing == "selective":
            return (0.5 if FRAMEWORKS[self.framework].every_second_product else 0.0), 0.0, 1.0
        return 0.0, 0.0, 0.0


def of_one_replica(layout: Layout) -> Layout:
    """A rank of a replica holds as much as if that were alone."""
    return replace(layout, gpus=layout.gpus // layout.replicate) if layout.zero == 3 else layout


def bytes_of(shape: Shape, layout: Layout) -> dict[str, float]:
    """The lines of estimate.py. Of virtual stages the first rank holds (pp - 1) / (pp x virtual) more activations
    (Narayanan et al. 2021, arXiv:2104.04473, 2.2). Replicas have one more group of ranks."""
    lines = estimate.memory(shape, of_one_replica(layout), stages=sorted({0, layout.pp - 1}))
    more = float(estimate.NCCL) if layout.zero == 3 and layout.replicate > 1 else 0.0
    if layout.virtual > 1:
        more += lines["activation_bytes"] * (layout.pp - 1) / (layout.pp * layout.virtual)
    return {**lines, "total_bytes": lines["total_bytes"] + more}
