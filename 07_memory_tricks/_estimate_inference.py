"""Bytes of weights as a model is served: in 16 bits, or quantized with their scales."""

from math import prod

import _estimate_shapes as shapes
from _estimate_shapes import Shape

from old.exits import UserError

CACHE_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
WEIGHTS = ("fp32", "bf16", "fp16", "int8", "int4")
SCALE = 2  # bytes: int8 has a 16-bit scale per row, int4 a 16-bit scale and zero per group


def linear_bytes(matrices: list[tuple[int, int]], *, weights: str, group_size: int) -> float:
    """Of matrices (inputs, outputs): N x bytes, and for int8 and int4 their scales."""
    n = sum(prod(matrix) for matrix in matrices)
    if weights == "int8":
        return n + SCALE * sum(outputs for _, outputs in matrices)
    if weights == "int4":
        return n / 2 + 2 * SCALE * n / group_size
    return n * (4 if weights == "fp32" else 2)


def inference_weight_bytes(
    shape: Shape,
    *,
    weights: str = "bf16",
    group_size: int = 32,
    tp: int = 1,
    count_embedding: bool = True,
    head_divided: bool = False,
    experts_read: int | None = None,
) -> float:
    """Matrices of the blocks and the head in --weights, the embedding and the norms in 16 bits (fp32: in 32).

    tp divides the blocks. gpt-fast leaves embedding and head whole on each rank; head_divided divides the head.
    count_embedding: whether tables that are only looked up count, as they do not where bandwidth is reckoned.
    experts_read: of each layer's experts, how many count (default: all)."""
    if weights not in WEIGHTS:
        raise UserError(f"--weights {weights!r} is none of {', '.join(WEIGHTS)}")
    block = [*shapes.attention_matrices(shape), *shapes.feed_forward_matrices(shape, shape.ffn)]
    how = {"weights": weights, "group_size": group_size}
    if shape.experts:
        dense = shape.layers - shape.expert_layers
        number = shape.experts.number if experts_read is None else experts_read
        experts = shapes.expert_parameters(shape) * number // shape.experts.number
        shared = shapes.feed_forward_matrices(shape, shape.experts.shared_ffn)
        divided = linear_bytes(shapes.attention_matrices(shape), **how) * shape.layers
        divided += linear_bytes(shapes.feed_forward_matrices(shape, shape.ffn), **how) * dense
        divided += (linear_bytes(shared, **how) + 2 * shape.hidden * shape.experts.number) * shape.expert_layers
        divided += linear_bytes([(shape.hidden, experts // shape.hidden)], **how)
    else:
        divided = linear_bytes(block, **how) * shape.layers
    plain = 4 if weights == "fp32" else 2
    vectors = shapes.vector_parameters(shape) * shape.layers + shape.hidden
    head = linear_bytes([(shape.hidden, shape.vocab)], **how)
    embedding = shapes.embedding_parameters(shape) * plain if count_embedding and not shape.tied else 0
    found = divided / tp + (head / tp if head_divided else head) + embedding
    return found + plain * (vectors + (shapes.learned_positions(shape) if count_embedding else 0))


def experts_in_a_step(shape: Shape, concurrency: int) -> tuple[int | None, int | None]:
    """Of each layer's experts, the fewest and the most that one token of each sequence passes: all sequences choose the
    same ones, or each its own."""
    if not (mixture := shape.experts):
        return None, None
    return mixture.active, min(mixture.number, concurrency * mixture.active)
