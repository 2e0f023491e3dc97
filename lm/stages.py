"""How a pipeline's stages share the layers of a model.

A stage has some consecutive layers, the first one also the embedding, and the last one the final
norm and the head. This file does not import torch, so that the planner can compute with stages on
any machine.
"""

STAGES_PER_RANK = {"1f1b": 1, "interleaved": 2}  # by --schedule


def stages_of_rank(rank: int, ranks: int, schedule: str = "1f1b") -> list[int]:
    """Return the numbers of the stages that a pipeline rank has: rank, rank + ranks, ..."""
    return list(range(rank, ranks * STAGES_PER_RANK[schedule], ranks))


def split_layers(layers: int, stages: int, head: float) -> list[range]:
    """Return the numbers of the layers of each stage, so that all stages have nearly equal work.

    `head` is the work of the head, counted in layers. It is a matmul, so it works as much as layers
    with as many parameters: for llama-8b it is 525 million to 218 million of a layer, 2.4 layers.
    The embedding only looks up rows, and counts nothing.

    Each stage starts with one layer. The next layer always goes to the stage with least work. Of
    several, it goes to the last one: earlier stages hold the activations of more micro-batches.
    For example, 32 layers of llama-8b on 4 stages:

        stage              0    1    2    3
        layers             8    9    9    6
        with the head      8    9    9  8.4
    """
    counts = [1] * stages
    work = [1.0] * stages
    work[-1] += head
    for _ in range(layers - stages):
        least = min(work)
        stage = max(stage for stage in range(stages) if work[stage] == least)
        counts[stage] += 1
        work[stage] += 1

    ranges = []
    first = 0
    for count in counts:
        ranges.append(range(first, first + count))
        first += count
    return ranges
