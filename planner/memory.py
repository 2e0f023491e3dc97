"""Bytes of a training step on one rank, as a table that a person can check by hand.

Rows are parts of the memory, columns are moments of a step, and a cell is the bytes that are alive.
The peak is the largest sum of a column. Each part has one function, which returns its row and the
derivation of its numbers in words.

The moments, in order:

    end of forward   the last micro-batch's loss is known
    loss backward    backward has the gradient of the logits
    head gradient    backward has left the head, whose gradient FSDP reduces if it is not tied
    last block       backward is in the MLP of the last block, whose activations all exist
    first MLP        backward is in the MLP of the first block, the last to be visited
    first attention  backward is in its attention
    last gradients   backward is at the embedding; the optimizer's step adds nothing to this
    evaluation       forward of held-out sequences between steps, which is never compiled

In a pipeline the blocks are those of the rank's stage. If they have experts, a column has the
fuller of two moments:

    last block       backward is at the experts' results, or at the first of their three gradients;
                     with FSDP, or in the block before, beside the gradients of the last
    first MLP        backward is at the experts' results, or at the last of their three gradients
"""

from dataclasses import dataclass

from planner import activations
from planner.plan import CHUNKS, LOSSES, OPTIMIZERS, Plan, check
from planner.rank import Rank
from planner.shape import Shape

MOMENTS = (
    "end of forward",
    "loss backward",
    "head gradient",
    "last block",
    "first MLP",
    "first attention",
    "last gradients",
    "evaluation",
)
OR_LATER = {
    "last block": "later in last block",
    "first MLP": "last stack",
}  # of a mixture of experts
BEFORE_BACKWARD = ("end of forward", "loss backward")
ZERO_PAPER = "Rajbhandari et al. 2020, arXiv:1910.02054, section 5"

# cuBLAS on Hopper and Blackwell: 32 MiB for each thread's handle (torch's CublasHandlePool). One
# thread runs forward, another one backward.
WORKSPACE_BYTES = 2 * 32 * 2**20
# Assumed: nvidia-smi shows 400 to 600 MiB for a process that has allocated nothing.
CONTEXT_BYTES = 512 * 2**20
# 32 channels x (send, receive) x NCCL_BUFFSIZE, 4 MiB.
NCCL_BYTES = 256 * 2**20
# What the allocator reserves beyond the peak, as a share of the bytes that change within a step:
# from the counts of benchmarks/allocator.py.
FRAGMENTATION = {"none": 0.10, "selective": 0.15, "full": 0.20}
BESIDE_LOGITS = 0.45
# Bytes per logit while the loss runs backward.
LOSS_BYTES = {"plain": 12, "parallel": 16, "fused": 2}


@dataclass(frozen=True)
class Row:
    """The bytes of one part at each moment, and how they are derived."""

    part: str
    cells: dict[str, float]
    words: str

    def __getitem__(self, moment: str) -> float:
        return self.cells.get(moment, 0.0)

    @property
    def largest(self) -> float:
        return max(self.cells.values(), default=0.0)


def always(size: float) -> dict[str, float]:
    """Return the cells of a part that has the same bytes at all moments."""
    return dict.fromkeys((*MOMENTS, *OR_LATER.values()), size)


# --- the parts


def weights(rank: Rank) -> Row:
    """Return the row of the weights: 4 bytes for each parameter, sharded under FSDP and ZeRO-3.

    Frozen matrices beside LoRA's A and B have the bytes of --dtype, or 4.5 bits a weight.
    """
    size = weight_bytes(rank)
    held = f"{rank.held(3):,.0f} parameters"
    if rank.plan.shards > 1 and rank.plan.zero == 3:
        held = f"{rank.all_parameters:,.0f} parameters / {rank.plan.shards} ranks"
    if rank.plan.adapters:
        each = rank.frozen_bytes(rank.frozen_size) / rank.all_parameters
        words = f"{held}, frozen, x {each:.3g} bytes + {rank.trained(3):,.0f} of A and B x 4"
    else:
        words = f"{held} x 4 bytes (fp32)"
    if rank.plan.zero == 3:
        words += f": {ZERO_PAPER}"
    return Row("weights", always(size), words)


def weight_bytes(rank: Rank) -> float:
    """Return the bytes of the weights that the rank holds between steps."""
    if rank.plan.adapters:
        each = rank.frozen_bytes(rank.frozen_size) / rank.all_parameters
        return rank.held(3) * each + 4 * rank.trained(3)
    return 4 * rank.held(3)


def optimizer_state(rank: Rank) -> Row:
    """Return the row of the optimizer state, sharded from ZeRO-1 on.

    AdamW has two fp32 moments for each trained parameter. ZeRO by DeepSpeed also keeps an fp32 copy
    of the parameters whose state it holds.
    """
    each = OPTIMIZERS[rank.plan.optimizer]
    words = f"{rank.trained(1):,.0f} trained parameters x {each:g} bytes ({rank.plan.optimizer})"
    if rank.plan.uses_deepspeed and rank.plan.zero > 0:
        words += " and 4 for DeepSpeed's copy of the weights (counted: benchmarks/allocator.py)"
    return Row("optimizer state", always(optimizer_bytes(rank)), words)


def optimizer_bytes(rank: Rank) -> float:
    """Return the bytes of the optimizer state that the rank holds."""
    each = OPTIMIZERS[rank.plan.optimizer]
    if rank.plan.uses_deepspeed and rank.plan.zero > 0:
        each += 4
    return each * rank.trained(1)


def gradients(rank: Rank) -> Row:
    """Return the row of the gradients: 4 bytes for each trained parameter, sharded from ZeRO-2 on.

    zero_grad() frees them, and in backward they come one by one: the head's first, the embedding's
    last. They are there all the time if micro-batches accumulate in them, and in DDP's buckets. A
    tied matrix has a second one for a moment.

    In a pipeline FSDP keeps unreduced gradients of the whole stage in fp32 until the last backward.
    Tensor-parallel ranks then hold those of the whole embedding.
    """
    plan = rank.plan
    if rank.gradients_stay_whole:
        undivided = 0.0
        if rank.has_embedding:
            undivided = rank.shape.embedding - rank.embedding
        size = 4 * (rank.all_parameters + undivided)
        words = f"{rank.all_parameters:,.0f} parameters x 4 bytes: FSDP reduces once a step"
        return Row("gradients", always(size) | {"evaluation": 0.0}, words)

    size = gradient_bytes(rank)
    words = f"{rank.trained(2):,.0f} trained parameters x 4 bytes (fp32)"
    second_of_tied = 0.0
    if rank.is_tied and not plan.is_fsdp:
        second_of_tied = rank.embedding * second_gradient_size(rank)
        words += f" + {second_gradient_size(rank)} bytes at the end for each of the tied matrix"

    stack = 0.0 if plan.is_fsdp else rank.expert_stack
    if rank.gradients_are_there:
        cells = always(size)
        in_16_bits_and_fp32 = stack * (rank.cast_size + 4)
        cells["later in last block"] += in_16_bits_and_fp32
        cells["last stack"] += in_16_bits_and_fp32
        if not plan.is_ddp:
            cells["evaluation"] = 0.0
        cells["last gradients"] += second_of_tied
        reason = f"{plan.micro_batches} micro-batches add up in them"
        if plan.is_ddp:
            reason = "they are DDP's buckets"
        return Row("gradients", cells, f"{words}; there all the time, because {reason}")

    each = size / rank.all_parameters
    embedding_to_come = 0.0
    if rank.has_embedding and not rank.is_tied:
        embedding_to_come = rank.embedding
    of_head = each * rank.embedding if rank.has_head else 0.0
    cells = {
        "head gradient": of_head,
        "last block": of_head,
        "first MLP": size - each * (rank.before_down + embedding_to_come),
        "first attention": size - each * (rank.qkv_matrices + embedding_to_come),
        "last gradients": size + second_of_tied,
    }
    if plan.is_fsdp and rank.layers > 2:
        cells["later in last block"] = of_head + each * rank.largest_layer
    cells["last stack"] = cells["first MLP"] + stack * (3 * each + rank.cast_size)
    return Row("gradients", cells, f"{words}; they come one by one in backward")


def second_gradient_size(rank: Rank) -> int:
    """Return the bytes per number that a tied matrix has beside its gradient, for a moment.

    It gets two gradients, the head's and the embedding's. In fp32 both exist beside their sum.
    Under autocast the second is added to the first in place. A compiled backward adds them at its
    end, and holds the head's in 16 bits until then.
    """
    if not rank.cast_size or rank.plan.on_cpu:
        return 2 * rank.residual_size
    if rank.plan.compile:
        return rank.residual_size + rank.e
    return rank.residual_size


def gradient_bytes(rank: Rank) -> float:
    """Return the bytes of the gradients that the optimizer reads."""
    return 4 * rank.trained(2)


def kept_activations(rank: Rank) -> Row:
    """Return the row of the activations.

    From forward to backward each block keeps what --checkpointing says, for each micro-batch in
    flight. The head keeps its norm and input, the first stage the token ids. Then backward visits
    the blocks from last to first. What a block did not keep is computed again before.
    """
    tokens = rank.own_tokens
    experts = rank.expert_layers > 0
    size = activation_bytes(rank)
    of_block = activations.kept(rank, experts=experts)
    consumed = of_block
    if rank.has_head:
        consumed += activations.norm_and_input(rank)
    in_mlp = activations.in_mlp_backward(rank, experts=experts) * tokens
    in_attention = activations.in_attention_backward(rank) * tokens
    of_other_micro_batches = size * (1 - 1 / rank.in_flight)

    cells = dict.fromkeys((*BEFORE_BACKWARD, "head gradient"), size)
    cells["last block"] = size - consumed * tokens + in_mlp
    cells["first MLP"] = of_other_micro_batches + in_mlp
    cells["first attention"] = of_other_micro_batches + in_attention
    if experts:
        gone = of_block if rank.plan.is_fsdp else 3 * activations.expert_rows(rank)
        cells["later in last block"] = cells["last block"] - gone * tokens
        in_last_stack = activations.in_last_stack_backward(rank) * tokens
        cells["last stack"] = of_other_micro_batches + in_last_stack
    words = f"{tokens:,.0f} tokens x ({rank.layers} layers x {of_block:,.0f} bytes"
    if rank.plan.pp > 1:
        words += f" x {rank.in_flight:g} micro-batches in flight"
    if rank.has_head:
        words += f" + {activations.norm_and_input(rank):,.0f} for the head"
    words += f"); a layer keeps {activations.in_words(rank, experts=experts)}"
    if rank.plan.checkpointing != "none":
        whole_block = activations.whole_block(rank, experts=experts)
        words += f"; backward makes all {whole_block:,.0f} of one layer again"
    return Row("activations", cells, words)


def activation_bytes(rank: Rank) -> float:
    """Return the bytes of the activations between forward and backward."""
    plan = rank.plan
    dense = activations.kept(rank, experts=False) * rank.dense_layers
    mixture = activations.kept(rank, experts=True) * rank.expert_layers
    per_token = (dense + mixture) * rank.in_flight
    if rank.has_head:
        per_token += activations.norm_and_input(rank)
    size = rank.own_tokens * per_token

    if rank.has_embedding:
        size += plan.tokens * 2 * 8  # int64 ids of inputs and targets
    return size


def block_bytes(rank: Rank) -> float:
    """Return the bytes of all that backward needs of one block."""
    return activations.whole_block(rank, experts=rank.expert_layers > 0) * rank.own_tokens


def logits(rank: Rank) -> Row:
    """Return the row of the logits and their gradients, on the stage that has the head.

    A plain cross-entropy has the logits and log-softmax in fp32 at the end of forward, 4 + 4 bytes.
    In backward it has log-softmax, its gradient and the logits' gradient, 4 + 4 + 4. With the
    vocabulary on several ranks exp(log-softmax) is one more. Compiled with the head, the loss has
    logits in 16 bits, and their gradient takes their place. In chunks: see chunked_logits.

    An evaluation has fp32 logits and log-softmax: only FSDP also evaluates with the compiled loss.
    """
    if not rank.has_head:
        return Row("logits", {}, "this stage has no head")
    method = rank.plan.loss_method
    if method == "chunked":
        return chunked_logits(rank)
    number = rank.own_tokens * rank.shape.vocab
    in_backward = LOSS_BYTES[method]
    if method == "fused" and rank.plan.dtype == "fp32":
        in_backward = 4
    in_forward = 8 if method == "plain" else in_backward
    in_evaluation = in_forward
    if method == "fused" and not rank.plan.is_fsdp:
        in_evaluation = 8
    cells = {
        "end of forward": in_forward * number,
        "loss backward": in_backward * number,
        "evaluation": in_evaluation * number,
    }
    words = f"{rank.own_tokens:,.0f} tokens x {rank.shape.vocab:,} x {in_backward:g} bytes"
    return Row("logits", cells, f"{words} at the most: {LOSSES[method]}")


def chunked_logits(rank: Rank) -> Row:
    """Return the row of the logits if the loss is computed in chunks.

    Of one chunk the logits and log-softmax are alive in forward, in fp32, 4 + 4 bytes. Forward also
    computes the gradients of the hidden states and of a head that is trained, which backward uses.
    """
    number = rank.own_tokens * rank.shape.vocab / CHUNKS
    chunk = 8 * number
    gradients = rank.own_tokens * rank.shape.hidden * rank.e
    if not rank.plan.adapters:
        gradients += rank.embedding * (rank.e if rank.plan.is_fsdp else 4)
    cells = {
        "end of forward": chunk + gradients,
        "loss backward": gradients,
        "evaluation": chunk,
    }
    words = f"{number:,.0f} logits of a chunk x 8 bytes"
    words += f" + {gradients:,.0f} of gradients"
    return Row("logits", cells, f"{words}: {LOSSES['chunked']}")


def gathered_weights(rank: Rank) -> Row:
    """Return the row of the weights that FSDP gathers, in --dtype.

    Two blocks: one that computes, and the next one on its way. At the loss no next one is on its
    way. A tied embedding and head stay gathered from forward to the end of backward: see
    gathered_in_two_groups for others. In a pipeline all weights of the stage stay gathered until
    the last backward of the step; or, with --reshard-after-forward on, those that backward has
    gathered. DeepSpeed gathers fp32 weights, and autocast casts them.
    """
    if rank.plan.zero < 3:
        return Row("gathered weights", {}, "every rank holds all weights")
    if rank.has_two_groups:
        return gathered_in_two_groups(rank)
    size = rank.e if rank.plan.is_fsdp else 4
    if rank.weights_stay_gathered:
        words = f"{rank.all_parameters:,.0f} parameters x {size} bytes: gathered once a step"
        return Row("gathered weights", always(rank.all_parameters * size), words)
    block = rank.gathered_layer if rank.plan.is_fsdp else rank.largest_layer * size
    root = rank.root * size
    cells = always(2 * block + root)
    if rank.gradients_stay_whole:
        at_first_block = max(2 * block + root, rank.all_parameters * size)
        cells["first MLP"] = at_first_block
        cells["first attention"] = at_first_block
    else:
        for moment in BEFORE_BACKWARD:
            cells[moment] -= block
        if rank.expert_layers:  # the first block is the last to be gathered
            cells["first MLP"] -= block
            cells["last stack"] -= block
    words = (
        f"2 blocks x {rank.largest_layer:,.0f} parameters x {block / rank.largest_layer:.3g} bytes "
        f"+ {rank.root:,.0f} of embedding and head x {size}"
    )
    return Row("gathered weights", cells, f"{words}: fully_shard")


def gathered_in_two_groups(rank: Rank) -> Row:
    """Return the row of the weights that FSDP gathers if the embedding is a group of its own.

    The embedding is freed after its forward, and the head after its backward. In forward, torch
    keeps the buffer of the last gather beside the weights that it copied from it. A compiled loss
    is inside the group of the head, whose backward starts with the gather of the last block.
    """
    block = rank.gathered_layer
    head = rank.embedding * rank.e
    in_forward = head if rank.plan.shards == 1 else 2 * head
    cells = {
        "end of forward": in_forward,
        "loss backward": head + (block if rank.plan.loss_method == "fused" else 0.0),
        "head gradient": block,
        "last block": 2 * block,
        "first MLP": 2 * block,
        "first attention": 2 * block,
        "evaluation": in_forward,
    }
    if rank.expert_layers:
        cells |= {"later in last block": 2 * block, "first MLP": block, "last stack": block}
    each = f"{block / rank.largest_layer:.3g}"
    words = f"2 blocks x {rank.largest_layer:,.0f} x {each} bytes, or {rank.embedding:,.0f} of head"
    return Row("gathered weights", cells, f"{words}: fully_shard")


def dequantized_weights(rank: Rank) -> Row:
    """Return the row of the matrix that is dequantized when backward reads it.

    Its codes have a byte each while its numbers are made of them.
    """
    if rank.plan.weights != "int4":
        return Row("dequantized matrix", {}, "no weights are in 4 bits")
    size = 1 + rank.e
    shape = rank.shape
    largest = shape.hidden * shape.ffn
    cells: dict[str, float] = {
        "last block": largest * size,
        "first MLP": largest * size,
        "first attention": shape.hidden * shape.q_width * size,
    }
    return Row("dequantized matrix", cells, f"{largest:,.0f} weights x {size} bytes, one at a time")


def reduced_gradients(rank: Rank) -> Row:
    """Return the row of whole gradients that FSDP is about to shard.

    Backward leaves those of a block in --dtype, and FSDP copies them to fp32 to reduce them. The
    last are those of a tied embedding and head. If they are not tied, those of the head come first,
    whose copies stay until the next group is reduced, and those of the embedding last. On one rank
    the copy is the gradient itself.
    """
    if not rank.plan.is_fsdp:
        return Row("gradients to reduce", {}, "gradients are reduced in place")
    size = rank.e
    if not rank.gradients_stay_whole:
        size += 4
    block = rank.layer_adapters or rank.largest_layer
    cells = {"last block": block * size}
    if rank.expert_layers:
        of_later_block = 4.0 * block if rank.layers > 1 else 0.0
        cells = {
            "last block": 0.0,
            "later in last block": of_later_block,
            "first MLP": of_later_block,
            "last stack": of_later_block,
        }
        if not rank.plan.adapters:  # which leave experts frozen
            cells["last stack"] += 3 * rank.expert_stack * rank.e
    if not rank.plan.adapters:
        copy_is_gradient = rank.plan.shards == 1 and not rank.gradients_stay_whole
        size_of_last = size - 4 if copy_is_gradient else size
        if rank.has_two_groups:
            cells["head gradient"] = rank.embedding * size_of_last
            cells["last gradients"] = rank.embedding * size_of_last
            if not copy_is_gradient:
                beside_head = rank.embedding * 4.0
                if not rank.expert_layers:
                    beside_head += block * rank.e
                cells["last block"] = max(cells["last block"], beside_head)
        else:
            cells["last gradients"] = rank.root * size_of_last
    words = f"of a block, {block:,.0f} parameters x {size} bytes, or of embedding and head"
    return Row("gradients to reduce", cells, f"{words}: fully_shard, reduce_dtype=fp32")


def casts(rank: Rank) -> Row:
    """Return the row of autocast's 16-bit copies of the matrices.

    Autocast keeps the copies until forward ends, and autograd those that backward multiplies with.
    Under checkpointing autograd keeps the head's only: a block's copies are made again. A compiled
    forward makes no others.
    """
    if not rank.cast_size:
        return Row("casts", {}, "weights are multiplied as they are stored or gathered")
    all_casts = cast_bytes(rank)
    head = rank.embedding * rank.cast_size if rank.has_head else 0.0
    keeps_all = rank.plan.checkpointing == "none"
    for_backward = all_casts if keeps_all else head
    cells = {
        "end of forward": for_backward if rank.plan.compile else all_casts,
        "loss backward": for_backward,
        "last block": all_casts - head if keeps_all else rank.before_down * rank.cast_size,
        "first MLP": rank.before_down * rank.cast_size,
        "later in last block": all_casts - head if keeps_all else rank.before_down * rank.cast_size,
        "last stack": rank.beside_stacks * rank.cast_size,
        "first attention": rank.qkv_matrices * rank.cast_size,
        "evaluation": all_casts,
    }
    words = f"{rank.matrices:,.0f} parameters of matrices x {rank.cast_size} bytes at the most"
    return Row("casts", cells, f"{words}: torch.autocast's cache")


def cast_bytes(rank: Rank) -> float:
    """Return the bytes of the 16-bit copies of all matrices."""
    return rank.matrices * rank.cast_size


def buffers(rank: Rank) -> Row:
    """Return the row of RoPE's two fp32 tables, and of cuBLAS's workspaces."""
    width = rank.shape.rope or rank.shape.head_dim
    tables = 2 * 4 * rank.shape.positions * width
    words = f"2 RoPE tables x {rank.shape.positions:,} positions x {width} x 4 bytes"
    if rank.plan.on_cpu:
        return Row("buffers", always(tables), words)
    words += ", and 2 cuBLAS workspaces of 32 MiB"
    return Row("buffers", always(tables + WORKSPACE_BYTES), words)


PARTS = (
    weights,
    optimizer_state,
    gradients,
    kept_activations,
    logits,
    gathered_weights,
    dequantized_weights,
    reduced_gradients,
    casts,
    buffers,
)


# --- the table


class Memory:
    """The table of one rank, its peak, and what a GPU holds beside it."""

    def __init__(self, shape: Shape, plan: Plan, stage: int = 0) -> None:
        self.rank = Rank(shape, plan, stage)
        self.rows = [part(self.rank) for part in PARTS]
        if self.rank.expert_layers:
            for moment, later in OR_LATER.items():
                if sum(row[later] for row in self.rows) > sum(row[moment] for row in self.rows):
                    for row in self.rows:
                        row.cells[moment] = row[later]
        self.moments = {}
        for moment in MOMENTS:
            self.moments[moment] = sum(row[moment] for row in self.rows)

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=self.moments.__getitem__)

    @property
    def lines(self) -> dict[str, float]:
        """The sizes behind the table, with the names of estimate.py's --json."""
        rows = {row.part: row for row in self.rows}
        return {
            "weight_bytes": weight_bytes(self.rank),
            "gradient_bytes": gradient_bytes(self.rank),
            "optimizer_bytes": optimizer_bytes(self.rank),
            "activation_bytes": activation_bytes(self.rank),
            "block_bytes": block_bytes(self.rank),
            "logits_bytes": rows["logits"]["loss backward"],
            "gathered_bytes": rows["gathered weights"].largest,
            "reduced_bytes": rows["gradients to reduce"]["last block"],
            "cast_bytes": cast_bytes(self.rank),
            "buffer_bytes": rows["buffers"].largest,
        }

    def allocated_bytes(self) -> float:
        """Return the peak, as torch.cuda.max_memory_allocated counts it."""
        return max(self.moments.values())

    def step_bytes(self) -> float:
        """Return the peak of the training step, without an evaluation."""
        return max(self.moments[moment] for moment in MOMENTS if moment != "evaluation")

    def fragmentation_bytes(self) -> float:
        """Return what torch's allocator reserves beyond the peak.

        It is an estimate: a share of the bytes that change within a step, or of those that are
        alive at other moments than the peak. Gradients and optimizer state come to lie where logits
        were, and the next logits need new memory. The larger they are beside gradients and
        activations, the more. With FSDP nearly all of it was needed anew.
        """
        lines = self.lines
        allocated = self.allocated_bytes()
        states = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes")
        changing = allocated - sum(lines[name] for name in states)
        if self.rank.plan.pp > 1:  # pipelines were not counted
            return 0.05 * max(0.0, changing)
        share = FRAGMENTATION[self.rank.plan.checkpointing] * max(0.0, changing)

        at_other_moments = sum(lines.values()) - allocated
        if self.rank.plan.zero < 3:
            others = lines["gradient_bytes"] + lines["activation_bytes"]
            at_other_moments *= min(1, BESIDE_LOGITS * lines["logits_bytes"] / others)
        return max(share, at_other_moments)

    def context_bytes(self) -> float:
        """Return the bytes of CUDA's context with its kernels: assumed."""
        if self.rank.plan.on_cpu:
            return 0.0
        return CONTEXT_BYTES

    def nccl_bytes(self) -> float:
        """Return the bytes of NCCL: 256 MiB for each group of ranks.

        The groups are all ranks, and those of a parallel size that is neither 1 nor all of them.
        Context parallelism reuses the group of the shards if it has the same ranks. The mesh of the
        experts has groups of its own.
        """
        plan = self.rank.plan
        if plan.on_cpu:
            return 0.0
        sizes = [plan.shards, plan.replicate, plan.tp, plan.pp]
        if plan.cp != plan.shards:
            sizes.append(plan.cp)
        groups = sum(1 < size < plan.gpus for size in sizes)
        if plan.gpus > 1:
            groups += 1
        if plan.ep > 1:
            groups += sum(size > 1 for size in (plan.ep, plan.expert_shards, plan.replicate))
        return NCCL_BYTES * groups

    def total_bytes(self) -> float:
        """Return what the card must have: allocated, fragmentation, context and NCCL."""
        reserved = self.allocated_bytes() + self.fragmentation_bytes()
        return reserved + self.context_bytes() + self.nccl_bytes()


def peak(shape: Shape, plan: Plan, stages: list[int] | None = None) -> Memory:
    """Return the memory of the rank that needs most, among those of `stages` (default: all).

    Raise ValueError if there is no such plan: see planner.plan.check.
    """
    check(shape, plan)
    if stages is None:
        stages = list(range(plan.pp))
    memories = [Memory(shape, plan, stage) for stage in stages]
    return max(memories, key=Memory.allocated_bytes)
