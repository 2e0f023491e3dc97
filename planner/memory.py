"""Bytes of a training step on one rank, by line, and the moment at which most of them are alive together.

In the formulas N is the parameters of the rank's pipeline stage, T the tokens of a micro-batch on the rank, L layers,
e bytes of --dtype. Tensor, pipeline and expert parallel sizes divide N.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import planner.shape as shapes
from planner.frameworks import FP32_LOG_SOFTMAX, LOSSES
from planner.plan import OPTIMIZERS, Plan, check
from planner.shape import Shape

CONTEXT = 512 * 2**20  # CUDA's context with torch's kernels: assumed, nvidia-smi shows 400 to 600 MiB
WORKSPACE = 2 * 32 * 2**20  # cuBLAS on Hopper and Blackwell: 32 MiB for each thread's handle (torch's CublasHandlePool)
NCCL = 256 * 2**20  # per communicator: 32 channels x (send, receive) x NCCL_BUFFSIZE, 4 MiB
LINES = (
    *("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "block_bytes", "logits_bytes"),
    *("gathered_bytes", "reduced_bytes", "cast_bytes", "buffer_bytes"),
)


class Rank:
    """One tensor- and expert-parallel rank of pipeline stage `number`, and its bytes: a method for each of LINES."""

    def __init__(self, shape: Shape, plan: Plan, number: int = 0) -> None:
        self.shape, self.plan, self.traits, self.e = shape, plan, plan.traits, plan.element_size
        self.first, self.last = number == 0, number == plan.pp - 1
        layers = layer_range(shape, plan, number)
        self.expert_layers = sum(layer >= shape.layers - shape.expert_layers for layer in layers)
        self.dense_layers = len(layers) - self.expert_layers
        whole = shapes.layer_parameters(shape, experts=False)[0] * self.dense_layers
        self.expert_parameters = 0.0  # of routed experts
        if self.expert_layers:
            rest, of_experts = shapes.layer_parameters(shape, experts=True)
            whole += rest * self.expert_layers
            self.expert_parameters = of_experts * self.expert_layers / plan.ep
        vectors = shapes.vector_parameters(shape) * len(layers)
        # of embedding and head. A tied head is the embedding's matrix, of which a last stage of its own holds a copy
        self.tied = self.first and self.last and shape.tied
        self.root_parameters = shape.embedding * (self.first + (self.last and not self.tied))
        final_norm = shape.hidden * self.last
        self.parameters = (whole - vectors + self.root_parameters) / plan.tp + vectors + final_norm
        self.all_parameters = self.parameters + self.expert_parameters
        multiplied = whole - vectors + shape.embedding * self.last
        self.matrix_parameters = multiplied / plan.tp + self.expert_parameters
        self.in_flight = min(plan.pp - number, plan.micro_batches)  # micro-batches that wait for backward, under 1F1B
        if plan.virtual > 1:  # Narayanan et al. 2021, arXiv:2104.04473, section 2.2
            self.in_flight *= 1 + (plan.pp - 1) / (plan.pp * plan.virtual)
        # under autocast the residual stream stays fp32, as gradients of weights do
        autocast = plan.framework == "ours" and plan.zero < 3
        self.residual_size = 4 if autocast else self.e
        self.cast_size = self.e if autocast and plan.dtype != "fp32" else 0
        self.own_tokens = plan.tokens / plan.tp
        self.largest_layer = shapes.largest_layer(shape) / plan.ep / plan.tp

    def held(self, since: int) -> float:
        """Numbers that the rank has of N if ZeRO divides them from stage `since` on."""
        if self.plan.zero < since:
            return self.all_parameters
        return self.parameters / self.plan.shards + self.expert_parameters / self.plan.expert_shards

    def weight_bytes(self) -> float:
        """N x bytes each; ZeRO-3 and FSDP divide by the ranks that share data (arXiv:1910.02054, section 5)"""
        return self.held(3) * self.traits.weight

    def gradient_bytes(self) -> float:
        """N x bytes each, divided from ZeRO-2 on"""
        return self.held(2) * self.traits.gradient

    def optimizer_bytes(self) -> float:
        """N x (master copy + state), divided from ZeRO-1 on; AdamW's state is two fp32 numbers"""
        return self.held(1) * (self.traits.master + OPTIMIZERS[self.plan.optimizer])

    def of_input(self) -> float:
        """Per token, a norm's input and 1/rms, and the normalised input of column-parallel matmuls, which may be kept
        gathered. A CPU keeps two of the norm's tensors, in fp32; CUDA's kernel computes the second again."""
        norm = self.shape.hidden * (8 if self.plan.on_cpu else self.residual_size) + 4
        return norm + self.shape.hidden * self.e * (self.plan.tp if self.traits.gathered_inputs else 1)

    def of_attention(self) -> float:
        """Per token, what backward needs of a block's attention: its input, q, k, v, output and log-sum-exp."""
        shape, mla = self.shape, self.shape.latent
        own_heads = self.traits.repeated_heads or mla  # keys and values of every query head
        ranks = self.plan.cp if self.traits.gathered_keys else 1  # whose keys and values are kept
        keys = ranks * (shape.q_width if own_heads else shape.kv_width)
        values = ranks * (shape.value_width if own_heads else shape.kv_width)
        numbers = shape.q_width + keys + values + shape.value_width
        if mla:  # latents before and after their norm, the shared key, queries and keys before rotation
            numbers += 2 * (mla.q_rank + mla.kv_rank) + mla.rope + shape.q_width + shape.heads * (mla.nope + mla.value)
        elif self.traits.mixed_qkv:  # which has v
            numbers += shape.q_width + 2 * shape.kv_width - values
        return self.of_input() + numbers * self.e + 4 * shape.heads

    def of_feed_forward(self, *, experts: bool) -> float:
        """Per token, what backward needs of the feed-forward part: its input, gate, up, silu and their product; of
        experts the copies of its active ones, and the router's fp32 logits and probabilities."""
        numbers, router = self.traits.ffn_tensors * self.shape.active_ffn(experts), 0
        if experts:
            numbers += self.shape.experts.active * self.shape.hidden
            router = 2 * 4 * self.shape.experts.number
        return self.of_input() + numbers * self.e + router

    def matmul_widths(self, *, experts: bool) -> int:
        """Numbers per token of the matmul results that selective checkpointing keeps."""
        shape, every = self.shape, 2 if self.traits.every_second else 1
        # what each tensor rank has of a sum is as wide as the sum
        summand = shape.hidden * (self.plan.tp if self.traits.whole_summands else 1)
        widths = [outputs for _, outputs in shapes.attention_matrices(shape)[:-1]] + [summand]
        if not experts:
            widths += [shape.ffn, shape.ffn, summand]
            return sum(widths[:-1] if self.traits.drops_last else widths[::every])
        mixture = shape.experts
        if every == 1:  # torch._grouped_mm is not on torchtitan's list
            widths += [mixture.active * outputs for outputs in (mixture.ffn, mixture.ffn, shape.hidden)]
        if mixture.shared_ffn:
            widths += [mixture.shared_ffn, mixture.shared_ffn, shape.hidden]
        return sum(widths[::every])

    def kept(self, checkpointing: str, *, experts: bool) -> float:
        """Per token and block, what lies between forward and backward: all; the block's input (Chen et al. 2016,
        arXiv:1604.06174); or that, the results of its matmuls, and attention."""
        if checkpointing == "none":
            return self.of_attention() + self.of_feed_forward(experts=experts)
        kept = self.shape.hidden * self.residual_size + self.plan.kept_besides * self.e
        if checkpointing == "full":
            return kept
        numbers = self.matmul_widths(experts=experts) + self.shape.value_width
        return kept + numbers * self.e + 4 * self.shape.heads

    def activation_bytes(self) -> float:
        """T x L x what --checkpointing keeps of a block / tp x micro-batches in flight, the head's input and token ids;
        with context parallel by all-gather also a mask of all tokens for the own ones"""
        plan = self.plan
        of_layers = self.kept(plan.checkpointing, experts=False) * self.dense_layers
        if self.expert_layers:
            of_layers += self.kept(plan.checkpointing, experts=True) * self.expert_layers
        per_token = of_layers * self.in_flight + self.of_input() * self.last
        masked = plan.cp > 1 and self.traits.gathered_keys  # one mask for all layers
        mask = plan.seq_len / plan.cp * plan.seq_len * self.e * masked
        token_ids = 16 * self.first  # inputs and targets, int64
        return self.own_tokens * per_token + plan.tokens * token_ids + mask * self.in_flight

    def block_bytes(self) -> float:
        """T x all that backward needs of one block / tp: part of the activations, or recomputed in backward"""
        return self.kept("none", experts=self.expert_layers > 0) * self.own_tokens

    def logits_bytes(self) -> float:
        """T x vocabulary x bytes / tp: 12 at the peak of a plain cross-entropy; forward leaves 4 of them (log-softmax)"""
        return self.own_tokens * self.shape.vocab * LOSSES[self.plan.loss][0] * self.last

    def whole_gradient_bytes(self) -> float:
        """fp32 gradients of a stage that pipelines keep whole. Tensor ranks do not divide the embedding's: DTensor
        keeps each rank's summand until it is reduced."""
        numbers = self.all_parameters + self.shape.embedding * (1 - 1 / self.plan.tp) * self.first
        return 4 * numbers if self.plan.gradients_stay_whole else 0.0

    def gathered_bytes(self) -> float:
        """ZeRO-3: the block that computes and the next one, embedding and head, whole, x e / tp; in a pipeline also the
        stage's fp32 gradients"""
        if self.plan.zero < 3:
            return 0.0
        if self.plan.weights_stay_whole:
            return self.all_parameters * (self.e + 4)
        root = self.root_parameters / self.plan.tp if self.traits.gathers_root else 0
        return (2 * self.largest_layer + root) * self.e + self.whole_gradient_bytes()

    def reduced_bytes(self) -> float:
        """ZeRO-3: a block's whole gradient x (e + 4) / tp: as backward makes it, and the fp32 copy that is reduced"""
        return self.largest_layer * self.gradient_copies()

    def gradient_copies(self) -> int:
        copy = 0 if self.plan.gradients_stay_whole and not self.plan.weights_stay_whole else 4
        return self.e + copy if self.plan.zero == 3 else 0

    def cast_bytes(self) -> float:
        """N of matrices x e: the 16-bit copies that autocast keeps until backward; fully_shard gathers them so"""
        return self.matrix_parameters * self.cast_size

    def buffer_bytes(self) -> float:
        """RoPE's tables in fp32, 64 MiB of cuBLAS workspaces, all-reduce buckets, Megatron's placeholder gradients"""
        rotated = self.shape.latent.rope if self.shape.latent else self.shape.head_dim
        tables = 2 * 4 * self.shape.positions * rotated
        buckets = self.traits.bucket * self.parameters if self.plan.shards > 1 else 0
        placeholders = self.placeholder_bytes() if self.traits.placeholders else 0
        return tables + buckets + placeholders + (0 if self.plan.on_cpu else WORKSPACE)

    def placeholder_bytes(self) -> float:
        """Unused bf16 gradients: one for each shape of weight, q, k, v and gate, up as one matrix each."""
        shape, h = self.shape, self.shape.hidden
        sizes = {h * (shape.q_width + 2 * shape.kv_width), h * shape.q_width}
        if shape.latent:
            sizes = {inputs * outputs for inputs, outputs in shapes.attention_matrices(shape)}
        widths = [shape.ffn] if self.dense_layers else []
        if self.expert_layers:
            widths += [shape.experts.ffn, shape.experts.shared_ffn]
        for width in widths:
            sizes |= {h * width, 2 * h * width}
        sizes |= {shape.embedding * self.last}
        return 2 * sum(sizes) / self.plan.tp

    def moments(self, lines: dict[str, float]) -> dict[str, float]:
        """Bytes at each moment that may be the peak. Backward begins at the last block.

        A block's backward begins with what forward has kept of it, and computes the rest again. Gradients that
        accumulate are there all the time, and so are DDP's, which are views of its buckets; else they come one by one,
        the embedding's last. A tied matrix has two, of head and of embedding, and for a moment their sum. In a
        pipeline, unreduced gradients count as gathered. At the first block all layers are gathered, and later
        micro-batches' activations are still alive."""
        shape, plan, experts, tokens = self.shape, self.plan, self.expert_layers > 0, self.own_tokens
        accumulate = plan.micro_batches > 1 or plan.framework != "ours" or (plan.zero == 0 and plan.shards > 1)
        among_gathered = plan.gradients_stay_whole and not plan.weights_stay_whole
        gradients = 0 if among_gathered else lines["gradient_bytes"]
        one_by_one = not accumulate and not among_gathered
        to_come = lines["gradient_bytes"] / self.all_parameters * one_by_one  # bytes of each number's gradient
        embedding = shape.embedding / plan.tp
        head_cast = embedding * self.cast_size * self.last
        # without checkpointing all casts wait for backward; else autocast casts again there
        cast = lines["cast_bytes"] if plan.checkpointing == "none" else head_cast
        states = lines["weight_bytes"] + lines["optimizer_bytes"] + lines["buffer_bytes"] + lines["gathered_bytes"]
        waiting = states + lines["activation_bytes"] + (gradients if accumulate else 0)
        gathers_ahead = plan.zero == 3 and self.traits.gathers_root and not plan.gradients_stay_whole
        waiting_for_loss = waiting - self.largest_layer * self.e * gathers_ahead  # no block follows
        logits, bytes_per_logit = lines["logits_bytes"], LOSSES[plan.loss][0]
        logits_in_forward = logits
        if plan.loss in FP32_LOG_SOFTMAX:  # the logit itself, in 16 bits the same in fp32, and log-softmax
            logits_in_forward *= (8 if plan.dtype == "fp32" else 10) / bytes_per_logit
        held_logits = logits * 4 / bytes_per_logit if plan.loss == "logits-held" else 0
        # in a block, where silu(gate) * up is differentiated: gradients of both factors and of the block's output
        output_gradient = shape.hidden * self.residual_size
        in_feed_forward = lines["block_bytes"] + (2 * shape.active_ffn(experts) * self.e + output_gradient) * tokens
        # and where attention is: gradients of its output, queries, keys and values, and of the block's output
        width = shape.value_width + shape.q_width + 2 * shape.kv_width
        in_attention = (self.of_attention() + width * self.e + output_gradient) * tokens
        # weights of the block that backward has still to reach there
        before_attention = shapes.count(shapes.attention_matrices(shape)[:-1]) / plan.tp
        before_down = (shapes.count(shapes.attention_matrices(shape)) + 2 * shape.hidden * shape.ffn) / plan.tp
        last_block = in_feed_forward - self.kept(plan.checkpointing, experts=experts) * tokens
        last_block -= self.of_input() * tokens * self.last
        last_block += cast - head_cast if plan.checkpointing == "none" else before_down * self.cast_size
        last_block += embedding * to_come * self.last + lines["reduced_bytes"]
        parts = ((in_feed_forward, before_down), (in_attention, before_attention))
        first_block = max(activations + later * (self.cast_size - to_come) for activations, later in parts)
        first_block -= embedding * to_come * (self.first and not self.tied)
        if plan.gradients_stay_whole:  # blocks that backward has gathered stay whole: at its end all of the stage's
            whole = self.all_parameters * self.e + self.whole_gradient_bytes()
            first_block += max(0.0, whole - lines["gathered_bytes"])
        first_block += lines["activation_bytes"] * (1 - 1 / self.in_flight)  # of other micro-batches
        of_root = self.root_parameters / plan.tp * self.gradient_copies() + 2 * embedding * self.residual_size * self.tied
        return {
            "end of forward": waiting_for_loss + lines["cast_bytes"] + logits_in_forward,
            "loss backward": waiting_for_loss + cast + logits,
            "last block": waiting + held_logits + last_block,
            "first block": states + held_logits + gradients + first_block,
            "last gradients": states + held_logits + gradients + of_root,
        }


def layer_range(shape: Shape, plan: Plan, number: int) -> range:
    """Layers of stage `number`: equal counts, the first stages one more; or equal cost, the output head counted, where
    the layer that passes the mark still belongs to the stage before it."""
    if plan.pp > 1 and plan.traits.stages_by_cost:
        layer = shapes.layer_parameters(shape, experts=False)[0] - shapes.vector_parameters(shape)
        cost_of_stage = (shape.layers * layer + shape.embedding) / plan.pp
        ends = [0, *(int(cost_of_stage * i / layer) + 1 for i in range(1, plan.pp)), shape.layers]
        return range(min(ends[number], shape.layers), min(ends[number + 1], shape.layers))
    each, more = divmod(shape.layers, plan.pp)
    start = number * each + min(number, more)
    return range(start, start + each + (number < more))


@dataclass(frozen=True)
class Memory:
    lines: dict[str, float]
    moments: dict[str, float]  # what torch has allocated
    stage: int  # the pipeline stage whose ranks need most
    allocated_bytes: float  # the peak, as torch.cuda.max_memory_allocated counts it
    reserved_bytes: float  # and fragmentation
    total_bytes: float  # and CUDA's context and NCCL's buffers

    @property
    def moment(self) -> str:
        return max(self.moments, key=self.moments.get)


def of_stage(shape: Shape, plan: Plan, number: int) -> Memory:
    rank = Rank(shape, plan, number)
    lines = {name: getattr(rank, name)() for name in LINES}
    moments = rank.moments(lines)
    allocated = max(moments.values())
    long_lived = sum(lines[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes"))
    lines["fragmentation_bytes"] = plan.traits.reserved * max(0.0, allocated - long_lived)
    lines["context_bytes"] = 0 if plan.on_cpu else CONTEXT
    groups = plan.dp // plan.replicate, plan.replicate, plan.tp, plan.pp, plan.cp, plan.ep
    lines["nccl_bytes"] = 0 if plan.on_cpu else NCCL * sum(size > 1 for size in groups)
    reserved = allocated + lines["fragmentation_bytes"]
    return Memory(lines, moments, number, allocated, reserved, reserved + lines["context_bytes"] + lines["nccl_bytes"])


def peak(shape: Shape, plan: Plan, stages: Iterable[int] | None = None) -> Memory:
    """Memory of the rank that needs most, among those of `stages` (default: all). ValueError: see plan.check."""
    check(shape, plan)
    found = [of_stage(shape, plan, number) for number in stages or range(plan.pp)]
    return max(found, key=lambda memory: memory.allocated_bytes)
