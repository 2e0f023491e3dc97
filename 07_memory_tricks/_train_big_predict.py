"""What train_big.py will take: estimate.py's formulas, with what its own tricks change in them."""

from dataclasses import replace

import _estimate_shapes as shapes
import estimate
from _estimate_plan import DTYPES, Plan
from _estimate_shapes import Shape

from old.shapes import Config, flops_per_token, parameter_count

RANK = 16  # of QLoRA's adapters
LOSS_CHUNKS = 8  # the loss takes an eighth of the tokens at a time
INT4_BYTES = 0.5 + 2 * 2 / 64  # per weight: a code, and a scale and a zero in bf16 for each 64


def predict(shape: Shape, recipe, *, seq_len: int, dtype: str, on_cpu: bool) -> float:
    """The peak of a step with one sequence, in bytes, when all weights are trained."""
    eight_bits = recipe.moments == "8bit"
    plan = Plan(
        seq_len=seq_len,
        dtype=dtype,
        checkpointing=recipe.checkpointing,
        loss="chunked" if recipe.chunked_loss else "plain",
        optimizer="adamw-8bit" if eight_bits else "adamw",
        on_cpu=on_cpu,
    )
    if recipe.step_inside_backward:  # over micro-batches all gradients are there all the time, so they can be left out
        lines = estimate.memory(shape, replace(plan, micro_batches=2))
        peaks = {moment: lines[moment] - lines["gradient_bytes"] for moment in estimate.MOMENTS}
    else:
        lines = estimate.memory(shape, plan)
        peaks = {moment: lines[moment] for moment in estimate.MOMENTS}
    embedding = shapes.embedding_parameters(shape)
    if recipe.checkpointing == "full" and dtype != "fp32":  # a block's copies of weights go with it: see autocast there
        peaks["end of forward"] += DTYPES[dtype] * embedding - lines["cast_bytes"]
    if recipe.chunked_loss:  # it makes the head's gradient in forward
        peaks["end of forward"] += 4 * embedding
        peaks["loss backward"] += 4 * embedding
    if recipe.step_inside_backward:  # one gradient at a time
        # to update a tensor, its 8-bit moments are made fp32, and then quantized: 21 bytes for each number, at the most
        update = 4 + (21 if eight_bits else 0)
        if not shape.tied:  # the head is updated first of all, while every block's input still waits
            kept = sum(lines[name] for name in ("weight_bytes", "optimizer_bytes", "buffer_bytes", "activation_bytes"))
            peaks["update of the head"] = kept + update * shapes.head_parameters(shape)
        tied_gradients = 8 * embedding if shape.tied else 0  # are added up before the update
        waiting = 4 * embedding if shape.tied else 0  # a tied head's gradient, for the embedding's part
        # a block's last matrix is updated before silu(gate) * up is differentiated, which makes two gradients
        later = 2 * DTYPES[dtype] * shape.ffn * seq_len
        for moment in ("last block", "first block"):
            peaks[moment] += waiting + max(0, update * largest_matrix(shape) - later)
        peaks["last gradients"] += max(4 * embedding, update * embedding - tied_gradients)
    return max(peaks.values())


def largest_matrix(shape: Shape) -> int:
    """Parameters of the largest matrix in a block."""
    return max(inputs * outputs for inputs, outputs in matrices_of_block(shape))


def matrices_of_block(shape: Shape) -> list[tuple[int, int]]:
    """(inputs, outputs) of each."""
    return shapes.attention_matrices(shape) + shapes.feed_forward_matrices(shape, shape.ffn)


def predict_qlora(shape: Shape, recipe, *, rank: int, seq_len: int, dtype: str, on_cpu: bool) -> float:
    """The same with blocks frozen in int4, the rest frozen in `dtype`, and adapters of 16 bytes per parameter."""
    # "deepspeed": as there, weights are kept in the type of arithmetic
    plan = Plan(
        seq_len=seq_len,
        dtype=dtype,
        checkpointing=recipe.checkpointing,
        loss="chunked",
        framework="deepspeed",
        on_cpu=on_cpu,
    )
    lines = estimate.memory(shape, plan)
    matrices = matrices_of_block(shape)
    in_blocks = shape.layers * shapes.count(matrices)
    around_blocks = shapes.parameter_count(shape) - in_blocks
    frozen = in_blocks * INT4_BYTES + around_blocks * DTYPES[dtype]
    adapters = 16 * rank * shape.layers * sum(inputs + outputs for inputs, outputs in matrices)
    # a byte per code, code x scale, and their sum with the zero
    dequantizing = (1 + 2 * DTYPES[dtype]) * largest_matrix(shape)
    block = lines["block_bytes"] + dequantizing
    return frozen + adapters + lines["buffer_bytes"] + lines["activation_bytes"] + max(block, lines["logits_bytes"])


def qlora_flops_per_token(config: Config, rank: int, seq_len: int) -> int:
    """As flops_per_token, for adapters on a frozen base. A frozen weight takes 4 FLOP per token instead of 6: it has no
    gradient of its own. Nothing trained comes before the first block's q, k and v: their inputs need no gradient."""
    c = config
    looked_up = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size
    frozen = parameter_count(c) - looked_up
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    sides_of_attention = 2 * (c.hidden_size + queries) + 2 * (c.hidden_size + keys)
    adapters = rank * c.num_hidden_layers * (sides_of_attention + 3 * (c.hidden_size + c.intermediate_size))
    first_inputs = c.hidden_size * (queries + 2 * keys) + 3 * rank * c.hidden_size  # of W and of A
    return flops_per_token(c, seq_len) - 2 * frozen + 6 * adapters - 2 * first_inputs
