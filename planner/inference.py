"""Bytes of a model that generates: its weights, quantized or not, and its KV cache."""

from planner.shape import Shape, count

CACHE_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
WEIGHTS = ("fp32", "bf16", "fp16", "int8", "int4")


def kv_cache_bytes(shape: Shape, *, tokens: int, bytes_each: float = 2, tp: int = 1) -> float:
    """Return the bytes of the keys and values of so many tokens on one of tp ranks.

    Every layer keeps a key and a value of kv_heads x head_dim numbers per token, and the ranks
    share the heads. Latent attention keeps one latent and one shared key instead, on every rank.
    """
    if shape.kv_rank:
        return shape.layers * (shape.kv_rank + shape.rope) * bytes_each * tokens
    ranks = min(tp, shape.kv_heads)
    return 2 * shape.layers * shape.kv_width * bytes_each * tokens / ranks


def matrix_bytes(matrices: list[tuple[int, int]], weights: str, group_size: int) -> float:
    """Return the bytes of matrices, given as (inputs, outputs), with weights of this type.

    int8 has a 16-bit scale per output. int4 has a 16-bit scale and zero per group of weights.
    """
    parameters = count(matrices)
    if weights == "int4":
        groups = parameters / group_size
        return parameters / 2 + groups * (2 + 2)
    if weights == "int8":
        outputs = sum(outputs for _, outputs in matrices)
        return parameters + 2 * outputs
    return parameters * CACHE_DTYPES[weights]


def weight_bytes(
    shape: Shape,
    *,
    weights: str = "bf16",
    group_size: int = 32,
    tp: int = 1,
    head_divided: bool = False,
    count_embedding: bool = True,
    experts_read: int | None = None,
) -> float:
    """Return the bytes of a model's weights on one of tp ranks.

    The matrices of blocks and head have the type `weights`. Everything else has 16 bits, or 32 if
    `weights` is fp32. The ranks share the blocks, except norms and routers.

    Arguments:
        head_divided: the ranks share the head, too
        count_embedding: False leaves out an embedding that is only looked up
        experts_read: experts to count in each layer; None: all
    """
    bytes_each = 4 if weights == "fp32" else 2
    experts = shape.experts if experts_read is None else experts_read
    dense_layers = shape.layers - shape.expert_layers

    def in_weights(matrices: list[tuple[int, int]]) -> float:
        return matrix_bytes(matrices, weights, group_size)

    attention = in_weights(shape.attention_matrices())
    dense_mlp = in_weights(shape.feed_forward_matrices(shape.ffn))
    routed = shape.feed_forward_matrices(shape.expert_ffn) * experts
    mixture = in_weights(routed + shape.feed_forward_matrices(shape.shared_ffn))
    router = bytes_each * shape.hidden * shape.experts
    biases = bytes_each * shape.bias_parameters()

    blocks = (attention + biases) * shape.layers
    blocks += dense_mlp * dense_layers
    blocks += mixture * shape.expert_layers

    head = in_weights([(shape.hidden, shape.vocab)])
    if head_divided:
        head /= tp
    embedding = 0.0
    if count_embedding and not shape.tied:
        embedding = shape.embedding * bytes_each
    norms = bytes_each * (shape.norm_parameters() * shape.layers + shape.hidden)
    routers = router * shape.expert_layers
    return blocks / tp + routers + head + embedding + norms


def prefill_bytes(shape: Shape, *, tokens: int, bytes_each: float, tp: int = 1) -> float:
    """Return the bytes of activations while prompts of so many tokens pass a block.

    The MLP is the widest part: its input, the residual and its output have `hidden` numbers per
    token, and gate, up and their product have `ffn`. The ranks share the latter. A mixture has
    a copy of the token for each of its experts, and what lm/moe.py computes from it.
    """
    numbers = 3 * shape.hidden + 3 * shape.ffn / tp
    if shape.experts:
        copies = shape.active_experts * shape.hidden
        gate = shape.active_experts * shape.expert_ffn / tp
        # At gate * up, at down_proj, and when the results are weighted.
        widest = max(copies + 3 * gate, 2 * copies + 2 * gate, 3 * copies)
        mixture = 2 * shape.hidden + widest
        numbers = mixture if shape.expert_layers == shape.layers else max(numbers, mixture)
    return tokens * numbers * bytes_each


def logits_bytes(shape: Shape, *, sequences: int, bytes_each: float) -> float:
    """Return the bytes of the logits of each sequence's last token, and of an fp32 copy."""
    return sequences * shape.vocab * (bytes_each + 4)
