"""Bytes per token that a block keeps between forward and backward, and gradients inside it.

`rank` is a planner.rank.Rank. All sizes are of one token on one tensor-parallel rank, before the
division by tp: tp ranks share the tokens around norms, and the heads and MLP columns inside.
e is the bytes of a number in --dtype. The residual stream has fp32 numbers under autocast, and
numbers in --dtype under FSDP.
"""

from planner.rank import Rank


def norm_and_input(rank: Rank) -> float:
    """Return the bytes that an RMSNorm and the matmuls after it keep per token.

    The norm keeps its input and 1/rms, an fp32 number. On a CPU it keeps two fp32 tensors. The
    matmuls keep their input, which sequence parallelism has gathered: all tp ranks hold it whole.
    """
    hidden = rank.shape.hidden
    norm_input = hidden * (8 if rank.plan.on_cpu else rank.residual_size)
    inverse_rms = 4
    matmul_input = hidden * rank.e * rank.plan.tp
    return norm_input + inverse_rms + matmul_input


def attention(rank: Rank) -> float:
    """Return the bytes that the attention of a block keeps per token.

    It keeps its norm and input, and for the attention kernel q, k, v, the output and the fp32
    log-sum-exp of each head. Context parallelism keeps the keys and values of all its ranks. Latent
    attention gives each head its own key and value; it also keeps the latents before and after
    their norm, the shared key, and queries and keys before rotation.
    """
    shape = rank.shape
    if shape.kv_rank:
        keys = shape.q_width
        values = shape.value_width
    else:
        keys = shape.kv_width
        values = shape.kv_width
    numbers = shape.q_width + rank.plan.cp * (keys + values) + shape.value_width
    if shape.kv_rank:
        latents = 2 * (shape.q_rank + shape.kv_rank)
        before_rotation = shape.q_width + shape.heads * (shape.nope + shape.value_dim)
        numbers += latents + shape.rope + before_rotation
    log_sum_exp = 4 * shape.heads
    return norm_and_input(rank) + numbers * rank.e + log_sum_exp


def mlp(rank: Rank, *, experts: bool) -> float:
    """Return the bytes that the MLP of a block keeps per token.

    It keeps its norm and input, gate, up, silu(gate) and the product. torch.compile computes
    silu(gate) again. With experts it also keeps a copy of the token for each expert, and the
    router's logits and probabilities in fp32.
    """
    shape = rank.shape
    tensors = 3 if rank.plan.compile else 4
    numbers = tensors * shape.active_ffn(experts)
    router = 0
    if experts:
        numbers += shape.active_experts * shape.hidden
        router = 2 * 4 * shape.experts
    return norm_and_input(rank) + numbers * rank.e + router


def matmul_results(rank: Rank, *, experts: bool) -> float:
    """Return the numbers per token of the matmul results that selective checkpointing keeps.

    Backward reads no result of a block's last matmul, and a dense block does not keep it. Results
    of o_proj and down_proj are partial sums, as wide on each tp rank as their sum.
    """
    shape = rank.shape
    partial_sum = shape.hidden * rank.plan.tp
    widths = [outputs for _, outputs in shape.attention_matrices()[:-1]]
    widths.append(partial_sum)
    if experts:
        expert_widths = (shape.expert_ffn, shape.expert_ffn, shape.hidden)
        widths += [shape.active_experts * width for width in expert_widths]
        if shape.shared_ffn:
            widths += [shape.shared_ffn, shape.shared_ffn, shape.hidden]
        return sum(widths)

    widths += [shape.ffn, shape.ffn]
    if not rank.plan.adapters:
        return sum(widths)
    # B's result is as wide as its matrix's, A's has the rank's width, and only the very last
    # result of the block is not kept.
    a_results = (len(widths) + 1) * rank.plan.adapters
    return 2 * sum(widths) + partial_sum + a_results


def kept(rank: Rank, checkpointing: str, *, experts: bool) -> float:
    """Return the bytes per token and block that are alive between forward and backward.

    "none" keeps what attention and MLP need. "full" keeps only the block's input (Chen et al. 2016,
    arXiv:1604.06174). "selective" also keeps the results of attention and of the matmuls.
    """
    if checkpointing == "none":
        return attention(rank) + mlp(rank, experts=experts)
    block_input = rank.shape.hidden * rank.residual_size
    if checkpointing == "full":
        return block_input
    numbers = matmul_results(rank, experts=experts) + rank.shape.value_width
    log_sum_exp = 4 * rank.shape.heads
    return block_input + numbers * rank.e + log_sum_exp


def kept_words(rank: Rank, *, experts: bool) -> str:
    """Return in words what a block keeps per token."""
    checkpointing = rank.plan.checkpointing
    if checkpointing == "none":
        of_mlp = mlp(rank, experts=experts)
        return f"(attention {attention(rank):,.0f} + MLP {of_mlp:,.0f})"
    block_input = f"its input {rank.shape.hidden * rank.residual_size:,}"
    if checkpointing == "full":
        return f"({block_input})"
    return f"({block_input}, and the results of attention and matmuls)"


def in_mlp_backward(rank: Rank, *, experts: bool) -> float:
    """Return the bytes per token while backward is inside the MLP of a block.

    All that the block keeps is there. So are the gradients of the block's output, and of silu(gate)
    and up.
    """
    output_gradient = rank.shape.hidden * rank.residual_size
    inner_gradients = 2 * rank.shape.active_ffn(experts) * rank.e
    return kept(rank, "none", experts=experts) + inner_gradients + output_gradient


def in_attention_backward(rank: Rank) -> float:
    """Return the bytes per token while backward is inside the attention of a block.

    The MLP is done. What attention keeps is there, and the gradients of its residual, its output,
    queries, keys and values.
    """
    shape = rank.shape
    residual_gradient = shape.hidden * rank.residual_size
    inner_gradients = (shape.value_width + shape.q_width + 2 * shape.kv_width) * rank.e
    return attention(rank) + inner_gradients + residual_gradient
