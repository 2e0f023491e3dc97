"""Bytes per token that a block keeps between forward and backward, and gradients inside it.

`rank` is a planner.rank.Rank. All sizes are of one token on one tensor-parallel rank, before the
division by tp: tp ranks share the tokens around norms, and the heads and MLP columns inside.
A function whose name ends with _parts returns bytes by name, so that estimate.py can print them.

e is the bytes of a number in --dtype. The residual stream has fp32 numbers under autocast, and
numbers in --dtype under FSDP.
"""

from planner.rank import Rank

Parts = dict[str, float]


def norm_parts(rank: Rank) -> Parts:
    """Return what an RMSNorm and the matmuls after it keep.

    The norm keeps its input and 1/rms, an fp32 number. On a CPU it keeps two fp32 tensors. The
    matmuls keep their input, which sequence parallelism has gathered: all tp ranks hold it whole.
    """
    hidden = rank.shape.hidden
    return {
        "norm's input": hidden * (8 if rank.plan.on_cpu else rank.residual_size),
        "1/rms": 4,
        "matmul's input": hidden * rank.e * rank.plan.tp,
    }


def attention_parts(rank: Rank) -> Parts:
    """Return what the attention of a block keeps.

    It keeps its norm and input, and for the attention kernel q, k, v, the output and the fp32
    log-sum-exp of each head. Norms of queries and keys keep their input. Context parallelism,
    unless it is a ring, keeps the keys and values of all its ranks; and the output twice: of two
    chunks for the kernel, and joined for the next matmul. Latent attention gives each head its own
    key and value; it also keeps the latents before and after their norm, the shared key, and
    queries and keys before rotation.
    """
    shape = rank.shape
    keys_and_values = 2 * shape.kv_width
    if shape.kv_rank:
        keys_and_values = shape.q_width + shape.value_width
    gathers = rank.plan.cp > 1 and not rank.plan.ring
    gathered_ranks = rank.plan.cp if gathers else 1
    outputs = 2 if gathers else 1
    parts = {
        **norm_parts(rank),
        "q": shape.q_width * rank.e,
        "k, v": gathered_ranks * keys_and_values * rank.e,
        "attention's output": outputs * shape.value_width * rank.e,
        "log-sum-exp": 4 * shape.heads,
    }
    if shape.qk_norm:
        kept = 8 if rank.plan.on_cpu else rank.residual_size
        parts["norms' q, k"] = (shape.q_width + shape.kv_width) * kept
        parts["1/rms of heads"] = 4 * (shape.heads + shape.kv_heads)
    if shape.kv_rank:
        latents = 2 * (shape.q_rank + shape.kv_rank)
        before_rotation = shape.q_width + shape.heads * (shape.nope + shape.value_dim)
        parts["latents"] = (latents + shape.rope + before_rotation) * rank.e
    return parts


def mlp_parts(rank: Rank, *, experts: bool) -> Parts:
    """Return what the MLP of a block keeps.

    It keeps its norm and input, gate, up, silu(gate) and the product. torch.compile computes
    silu(gate) again. With experts it keeps, in place of its input, a copy of the token for each
    expert and what each expert returns, and in fp32 the router's input and probabilities.
    """
    shape = rank.shape
    ffn = shape.active_ffn(experts) * rank.e
    parts = {**norm_parts(rank), "gate, up": 2 * ffn}
    if not rank.plan.compile:
        parts["silu(gate)"] = ffn
    parts["product"] = ffn
    if experts:
        del parts["matmul's input"]
        parts["copies for experts"] = expert_rows(rank)
        parts["experts' results"] = expert_rows(rank)
        parts["router"] = 4 * (shape.hidden + shape.experts)
    return parts


def checkpoint_parts(rank: Rank, *, experts: bool) -> Parts:
    """Return what a block keeps with --checkpointing.

    "full" keeps only the block's input (Chen et al. 2016, arXiv:1604.06174). "selective" also keeps
    the results of attention and of the matmuls.
    """
    parts: Parts = {"block's input": rank.shape.hidden * rank.residual_size}
    if rank.plan.checkpointing == "selective":
        parts["matmuls' results"] = matmul_results(rank, experts=experts) * rank.e
        parts["attention's output"] = rank.shape.value_width * rank.e
        parts["log-sum-exp"] = 4 * rank.shape.heads
    return parts


def matmul_results(rank: Rank, *, experts: bool) -> float:
    """Return the numbers per token of the matmul results that selective checkpointing keeps.

    With expert parallelism it also keeps the rows that have travelled, there and back.
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
        if rank.plan.ep > 1:  # what the all-to-alls of forward returned
            widths += 2 * [shape.active_experts * shape.hidden]
        if shape.shared_ffn:
            widths += [shape.shared_ffn, shape.shared_ffn, shape.hidden]
        return sum(widths)

    widths += [shape.ffn, shape.ffn]
    if not rank.plan.adapters:
        return sum(widths)
    # Each matrix has an A, whose result is as wide as the adapter's rank, and a B. The last matmul
    # of the block is down_proj's B. lm/activation_checkpointing.py knows it by its shape, so that
    # no B with as many outputs keeps its result.
    a_results = (len(widths) + 1) * rank.plan.adapters
    b_results = sum(width for width in widths if width != shape.hidden)
    return sum(widths) + partial_sum + a_results + b_results


def norm_and_input(rank: Rank) -> float:
    """Return the bytes of norm_parts. The head keeps them, too."""
    return sum(norm_parts(rank).values())


def whole_block(rank: Rank, *, experts: bool) -> float:
    """Return the bytes per token of all that backward needs of a block."""
    of_attention = sum(attention_parts(rank).values())
    return of_attention + sum(mlp_parts(rank, experts=experts).values())


def kept(rank: Rank, *, experts: bool) -> float:
    """Return the bytes per token and block that are alive between forward and backward."""
    if rank.plan.checkpointing == "none":
        return whole_block(rank, experts=experts)
    return sum(checkpoint_parts(rank, experts=experts).values())


def in_mlp_backward(rank: Rank, *, experts: bool) -> float:
    """Return the bytes per token while backward is inside the MLP of a block.

    All that backward needs of the block is there. So are the gradients of the block's output, and
    of silu(gate) and up. A mixture of experts: see in_mixture_backward.
    """
    if experts:
        return in_mixture_backward(rank)
    output_gradient = rank.shape.hidden * rank.residual_size
    inner_gradients = 2 * rank.shape.ffn * rank.e
    return whole_block(rank, experts=False) + inner_gradients + output_gradient


def in_mixture_backward(rank: Rank) -> float:
    """Return the bytes per token at the beginning of a mixture's backward.

    Each rank is assumed to receive as many rows as it sends: the router may decide otherwise.
    All that backward needs of the block is there. It makes the gradients of the experts' results,
    and of their weights, which are as large until they are summed. Autocast sums the results in
    fp32: their gradient has a 16-bit copy before.

    With expert parallelism, forward has three more copies of the rows at its last all-to-all: those
    that are sent, those that came, and the results that are sent back. Checkpointing runs it again.
    """
    output_gradient = rank.shape.hidden * rank.residual_size
    copies = 3 if rank.cast_size else 2
    if rank.plan.ep > 1 and rank.plan.checkpointing != "none":
        copies = 3
    return whole_block(rank, experts=True) + output_gradient + copies * expert_rows(rank)


def in_last_stack_backward(rank: Rank) -> float:
    """Return the bytes per token at the gradient of gate_proj, the last of a mixture's stacks.

    Of the experts there are the copies of the tokens with two gradients, and a gradient of gate.
    """
    mixture = mlp_parts(rank, experts=True)
    beside_experts = mixture["norm's input"] + mixture["1/rms"] + mixture["router"]
    gate = rank.shape.active_experts * rank.shape.expert_ffn * rank.e
    residual_gradient = rank.shape.hidden * rank.residual_size
    of_attention = sum(attention_parts(rank).values())
    return of_attention + beside_experts + residual_gradient + 3 * expert_rows(rank) + gate


def expert_rows(rank: Rank) -> float:
    """Return the bytes of a token's copies, of which each of its experts has one."""
    return rank.shape.active_experts * rank.shape.hidden * rank.e


def in_attention_backward(rank: Rank) -> float:
    """Return the bytes per token while backward is inside the attention of a block.

    The MLP is done. What attention keeps is there, and the gradients of its residual, its output,
    queries, keys and values.
    """
    shape = rank.shape
    residual_gradient = shape.hidden * rank.residual_size
    inner_gradients = (shape.value_width + shape.q_width + 2 * shape.kv_width) * rank.e
    return sum(attention_parts(rank).values()) + inner_gradients + residual_gradient


def in_words(rank: Rank, *, experts: bool) -> str:
    """Return what a block keeps per token, part by part."""
    if rank.plan.checkpointing != "none":
        return _sum_in_words(checkpoint_parts(rank, experts=experts))
    attention = _sum_in_words(attention_parts(rank))
    mlp = _sum_in_words(mlp_parts(rank, experts=experts))
    return f"attention: {attention}; MLP: {mlp}"


def _sum_in_words(parts: Parts) -> str:
    return " + ".join(f"{name} {size:,.0f}" for name, size in parts.items())
