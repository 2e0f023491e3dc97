"""Bytes of a model that generates: weights in 16 bits or quantized with their scales, and the KV cache."""

from planner.shape import Shape, count

CACHE_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
WEIGHTS = ("fp32", "bf16", "fp16", "int8", "int4")


def kv_cache_bytes(shape: Shape, *, tokens: int, bytes_each: float = 2, tp: int = 1) -> float:
    """2 (keys, values) x layers x key-value heads x head_dim x bytes x tokens, over the tp ranks; a latent: on each"""
    if shape.kv_rank:
        return shape.layers * (shape.kv_rank + shape.rope) * bytes_each * tokens
    return 2 * shape.layers * shape.kv_width * bytes_each * tokens / min(tp, shape.kv_heads)


def matrix_bytes(matrices: list[tuple[int, int]], weights: str, group_size: int) -> float:
    """N x bytes; int8 has a 16-bit scale per output, int4 a 16-bit scale and zero per group."""
    n = count(matrices)
    if weights == "int4":
        return n / 2 + 2 * 2 * n / group_size
    if weights == "int8":
        return n + 2 * sum(outputs for _, outputs in matrices)
    return n * CACHE_DTYPES[weights]


def weight_bytes(
    shape: Shape,
    *,
    weights="bf16",
    group_size=32,
    tp=1,
    head_divided=False,
    count_embedding=True,
    experts_read=None,
) -> float:
    """matrices of blocks and head in --weights, the rest in 16 bits (fp32: in 32);

    tp divides the blocks without their norms. count_embedding=False leaves out an embedding that is
    only looked up. experts_read is the number of experts that count in each layer.
    """
    plain = 4 if weights == "fp32" else 2
    dense_layers = shape.layers - shape.expert_layers
    blocks = matrix_bytes(shape.attention_matrices(), weights, group_size) * shape.layers
    blocks += (
        matrix_bytes(shape.feed_forward_matrices(shape.ffn), weights, group_size) * dense_layers
    )
    experts = shape.feed_forward_matrices(shape.expert_ffn) * (experts_read or shape.experts)
    of_layer = matrix_bytes(
        experts + shape.feed_forward_matrices(shape.shared_ffn), weights, group_size
    )
    # and the router
    blocks += (of_layer + plain * shape.hidden * shape.experts) * shape.expert_layers
    head = matrix_bytes([(shape.hidden, shape.vocab)], weights, group_size)
    embedding = shape.embedding * plain if count_embedding and not shape.tied else 0
    blocks += plain * shape.bias_parameters() * shape.layers
    norms = shape.norm_parameters() * shape.layers + shape.hidden
    return blocks / tp + (head / tp if head_divided else head) + embedding + plain * norms
