"""Bytes of a training step on one rank, by line, and the moment at which most of them are alive together.

In the formulas N is the parameters of the rank's pipeline stage, T the tokens of a micro-batch on the rank, L layers,
e bytes of --dtype. Tensor, pipeline and expert parallel sizes divide N."""

from functools import cached_property
from math import prod

from planner.frameworks import FP32_LOG_SOFTMAX, FRAMEWORKS, LOSSES
from planner.plan import DTYPES, OPTIMIZERS, Plan, check
from planner.shape import Shape, count

# CUDA's context with torch's kernels: assumed, nvidia-smi shows 400 to 600 MiB
CONTEXT = 512 * 2**20
# cuBLAS on Hopper and Blackwell: 32 MiB for each thread's handle (torch's CublasHandlePool)
WORKSPACE = 2 * 32 * 2**20
NCCL = 256 * 2**20  # per communicator: 32 channels x (send, receive) x NCCL_BUFFSIZE, 4 MiB
# Of ours, by torch's allocator (benchmarks/allocator.py). Gradients and optimizer state come to lie where logits were:
# the next logits need new memory, the more, the larger they are beside gradients and activations. FSDP: by most counts.
SURPLUS, BESIDE_LOGITS = {"none": 0.10, "selective": 0.15, "full": 0.20}, 0.45
LINES = (
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "block_bytes",
    "logits_bytes",
)
LINES += ("gathered_bytes", "reduced_bytes", "cast_bytes", "buffer_bytes")


class Memory:
    """One tensor- and expert-parallel rank of pipeline stage `number`, and its bytes: a method for each of LINES."""

    def __init__(self, shape: Shape, plan: Plan, number: int = 0) -> None:
        self.shape, self.plan, self.stage = shape, plan, number
        self.traits, self.e = FRAMEWORKS[plan.framework], DTYPES[plan.dtype]
        self.gradients_stay_whole = plan.zero == 3 and plan.pp > 1 and self.traits.whole_gradients
        self.weights_stay_whole = self.gradients_stay_whole and self.traits.whole_weights
        self.first, self.last = number == 0, number == plan.pp - 1
        layers = layer_range(shape, plan, number)
        self.expert_layers = sum(layer >= shape.layers - shape.expert_layers for layer in layers)
        self.dense_layers = len(layers) - self.expert_layers
        dense, (rest, routed) = (
            shape.layer_parameters(experts=False)[0],
            shape.layer_parameters(experts=True),
        )
        whole = dense * self.dense_layers + rest * self.expert_layers
        self.expert_parameters = routed * self.expert_layers / plan.ep
        vectors = shape.vector_parameters() * len(layers)
        # of embedding and head. A tied head is the embedding's matrix, of which a last stage of its own holds a copy
        self.tied = self.first and self.last and shape.tied
        self.root_parameters = shape.embedding * (self.first + (self.last and not self.tied))
        self.parameters = (
            (whole - vectors + self.root_parameters) / plan.tp + vectors + shape.hidden * self.last
        )
        self.all_parameters = self.parameters + self.expert_parameters
        self.multiplied = (
            whole - vectors + shape.embedding * self.last
        ) / plan.tp + self.expert_parameters
        # micro-batches that wait for backward, under 1F1B
        self.in_flight = min(plan.pp - number, plan.micro_batches)
        if plan.virtual > 1:  # Narayanan et al. 2021, arXiv:2104.04473, section 2.2
            self.in_flight *= 1 + (plan.pp - 1) / (plan.pp * plan.virtual)
        autocast = self.traits.autocast and plan.zero < 3
        # the residual stream stays fp32, and so do weights' gradients
        self.residual_size = 4 if autocast else self.e
        self.cast_size = self.e if autocast and plan.dtype != "fp32" else 0
        matrices = [*shape.attention_matrices(), *shape.feed_forward_matrices(shape.ffn)]
        # numbers of A and B in a layer
        self.layer_adapters = plan.adapters * sum(map(sum, matrices))
        self.own_tokens = plan.tokens / plan.tp
        self.largest_layer = shape.largest_layer() / plan.ep / plan.tp
        undivided = shape.embedding * (1 - 1 / plan.tp) * self.first
        self.whole_gradients = 4 * (self.all_parameters + undivided) * self.gradients_stay_whole
        self.among_gathered = self.gradients_stay_whole and not self.weights_stay_whole
        self.reduced_size = (self.e + 4 * (not self.among_gathered)) * (plan.zero == 3)

    def held(self, since: int) -> float:
        """Numbers that the rank has of N if ZeRO divides them from stage `since` on."""
        if self.plan.zero < since:
            return self.all_parameters
        return self.parameters / self.plan.shards + self.expert_parameters / self.plan.expert_shards

    def trained(self, since: int) -> float:  # the same of A and B alone, where there are any
        ranks = self.plan.shards if self.plan.zero >= since else 1
        return (
            self.layer_adapters * self.shape.layers / ranks
            if self.plan.adapters
            else self.held(since)
        )

    def weight_bytes(self) -> float:
        """N x bytes each, divided by the ranks that share data under ZeRO-3 and FSDP (arXiv:1910.02054, section 5)"""
        return (
            self.held(3) * self.e + 4 * self.trained(3)
            if self.plan.adapters
            else self.held(3) * self.traits.weight
        )

    def gradient_bytes(self) -> float:
        """N x bytes each, divided from ZeRO-2 on"""
        return self.trained(2) * self.traits.gradient

    def optimizer_bytes(self) -> float:
        """N x (master copy + state), divided from ZeRO-1 on; AdamW's state is two fp32 numbers"""
        return self.trained(1) * (self.traits.master + OPTIMIZERS[self.plan.optimizer])

    def of_input(self) -> float:
        """Per token, a norm's input and 1/rms (two fp32 tensors on a CPU), and the input of column-parallel matmuls."""
        norm = self.shape.hidden * (8 if self.plan.on_cpu else self.residual_size) + 4
        return norm + self.shape.hidden * self.e * (
            self.plan.tp if self.traits.gathered_inputs else 1
        )

    def of_attention(self) -> float:
        """Per token, what backward needs of a block's attention: its input, q, k, v, output and log-sum-exp."""
        shape = self.shape
        # keys and values of every query head
        own_heads = self.traits.repeated_heads or shape.kv_rank
        ranks = self.plan.cp if self.traits.gathered_keys else 1  # whose keys and values are kept
        keys = ranks * (shape.q_width if own_heads else shape.kv_width)
        values = ranks * (shape.value_width if own_heads else shape.kv_width)
        numbers = shape.q_width + keys + values + shape.value_width
        # latents before and after their norm, the shared key, queries and keys before rotation
        if shape.kv_rank:
            before_rotation = shape.q_width + shape.heads * (shape.nope + shape.value_dim)
            numbers += 2 * (shape.q_rank + shape.kv_rank) + shape.rope + before_rotation
        elif self.traits.mixed_qkv or (self.traits.compiled and self.plan.zero < 3):  # which has v
            numbers += shape.q_width + 2 * shape.kv_width - values
        return self.of_input() + numbers * self.e + 4 * shape.heads

    def of_feed_forward(self, *, experts: bool) -> float:
        """The same of the feed-forward part: input, gate, up, silu, product; copies for experts, the router's fp32."""
        numbers = self.traits.ffn_tensors * self.shape.active_ffn(experts)
        numbers += self.shape.active_experts * self.shape.hidden * experts
        return self.of_input() + numbers * self.e + 2 * 4 * self.shape.experts * experts

    def matmul_widths(self, *, experts: bool) -> int:
        """Numbers per token of the matmul results that selective checkpointing keeps."""
        shape, every = self.shape, 2 if self.traits.every_second else 1
        # as wide as the sum
        summand = shape.hidden * (self.plan.tp if self.traits.whole_summands else 1)
        widths = [outputs for _, outputs in shape.attention_matrices()[:-1]] + [summand]
        if not experts:
            widths += [shape.ffn, shape.ffn, summand]
            # B's results are as wide, and of all that the very last is not kept
            if self.plan.adapters:
                return 2 * sum(widths[:-1]) + summand + len(widths) * self.plan.adapters
            return sum(widths[:-1] if self.traits.drops_last else widths[::every])
        if every == 1:  # torch._grouped_mm is not on torchtitan's list
            widths += [
                shape.active_experts * width
                for width in (shape.expert_ffn, shape.expert_ffn, shape.hidden)
            ]
        if shape.shared_ffn:
            widths += [shape.shared_ffn, shape.shared_ffn, shape.hidden]
        return sum(widths[::every])

    def kept(self, checkpointing: str, *, experts: bool) -> float:
        """Per token and block, between forward and backward: all; its input (arXiv:1604.06174); or also its matmuls."""
        if checkpointing == "none":
            return self.of_attention() + self.of_feed_forward(experts=experts)
        kept = self.shape.hidden * self.residual_size + self.plan.kept_besides * self.e
        if checkpointing == "full":
            return kept
        numbers = self.matmul_widths(experts=experts) + self.shape.value_width
        return kept + numbers * self.e + 4 * self.shape.heads

    def activation_bytes(self) -> float:
        """T x L x what --checkpointing keeps of a block / tp x micro-batches in flight, the head's input, token ids"""
        plan = self.plan
        of_layers = self.kept(plan.checkpointing, experts=False) * self.dense_layers
        of_layers += self.kept(plan.checkpointing, experts=True) * self.expert_layers
        per_token = of_layers * self.in_flight + self.of_input() * self.last
        masked = plan.cp > 1 and self.traits.gathered_keys  # one mask for all layers
        mask = plan.seq_len / plan.cp * plan.seq_len * self.e * masked * self.in_flight
        # ids of inputs and targets: int64
        return self.own_tokens * per_token + plan.tokens * 16 * self.first + mask

    def block_bytes(self) -> float:
        """T x all that backward needs of one block / tp: part of the activations, or recomputed in backward"""
        return self.kept("none", experts=self.expert_layers > 0) * self.own_tokens

    def logits_bytes(self) -> float:
        """T x vocabulary x bytes / tp: 12 at the peak of a plain cross-entropy; forward leaves 4 (log-softmax)"""
        return self.own_tokens * self.shape.vocab * LOSSES[self.plan.loss][0] * self.last

    def gathered_bytes(self) -> float:
        """ZeRO-3: two blocks, embedding and head, whole, x e / tp; in a pipeline also the stage's fp32 gradients"""
        if self.plan.zero < 3:
            return 0.0
        if self.weights_stay_whole:
            return self.all_parameters * (self.e + 4)
        root = self.root_parameters / self.plan.tp if self.traits.gathers_root else 0
        return (2 * self.largest_layer + root) * self.e + self.whole_gradients

    def reduced_bytes(self) -> float:
        """ZeRO-3: a block's whole gradient x (e + 4) / tp: as backward makes it, and the fp32 copy that is reduced"""
        return (self.layer_adapters or self.largest_layer) * self.reduced_size

    def cast_bytes(self) -> float:
        """N of matrices x e: the 16-bit copies that autocast keeps until backward; fully_shard gathers them so"""
        return self.multiplied * self.cast_size

    def buffer_bytes(self) -> float:
        """RoPE's tables in fp32, 64 MiB of cuBLAS workspaces, all-reduce buckets, Megatron's placeholder gradients"""
        tables = 2 * 4 * self.shape.positions * (self.shape.rope or self.shape.head_dim)
        buckets = self.traits.bucket * self.parameters if self.plan.shards > 1 else 0
        placeholders = self.placeholders() if self.traits.placeholders else 0
        return tables + buckets + placeholders + (0 if self.plan.on_cpu else WORKSPACE)

    def placeholders(self) -> float:
        """Unused bf16 gradients: one for each shape of weight, q, k, v and gate, up as one matrix each."""
        shape, h = self.shape, self.shape.hidden
        merged = [(h, shape.q_width + 2 * shape.kv_width), (h, shape.q_width)]
        sizes = {
            prod(matrix) for matrix in (shape.attention_matrices() if shape.kv_rank else merged)
        }
        sizes |= {h * shape.ffn, 2 * h * shape.ffn} if self.dense_layers else set()
        if self.expert_layers:
            sizes |= {
                n * h * width for n in (1, 2) for width in (shape.expert_ffn, shape.shared_ffn)
            }
        return 2 * sum(sizes | {shape.embedding * self.last}) / self.plan.tp

    @cached_property
    def moments(self) -> dict[str, float]:
        """Bytes at each moment that may be the peak. Gradients that accumulate, and DDP's, are there all the time; else
        they come one by one, the embedding's last. A tied matrix has two and for a moment their sum. In a pipeline,
        unreduced gradients count as gathered, and at the first block all layers are gathered."""
        shape, plan, lines = self.shape, self.plan, self.lines
        experts, tokens, compiled = self.expert_layers > 0, self.own_tokens, self.traits.compiled
        accumulate = (
            plan.micro_batches > 1
            or not self.traits.autocast
            or (plan.zero == 0 and plan.shards > 1)
        )
        gradients = 0 if self.among_gathered else lines["gradient_bytes"]
        one_by_one = not (accumulate or self.among_gathered)
        # bytes of a number's gradient
        to_come = lines["gradient_bytes"] / self.all_parameters * one_by_one
        embedding = shape.embedding / plan.tp
        head_cast = embedding * self.cast_size * self.last
        cast = lines["cast_bytes"] if plan.checkpointing == "none" else head_cast
        states = (
            lines["weight_bytes"]
            + lines["optimizer_bytes"]
            + lines["buffer_bytes"]
            + lines["gathered_bytes"]
        )
        waiting = states + lines["activation_bytes"] + (gradients if accumulate else 0)
        gathers_ahead = (
            plan.zero == 3 and self.traits.gathers_root and not self.gradients_stay_whole
        )
        waiting_for_loss = waiting - self.largest_layer * self.e * gathers_ahead  # no block follows
        logits = lines["logits_bytes"] / LOSSES[plan.loss][0]
        # in fp32, and log-softmax
        in_forward = 8 * logits if plan.loss in FP32_LOG_SOFTMAX else lines["logits_bytes"]
        held_logits = 4 * logits * (plan.loss == "logits-held")
        # gradients in a block: of its output, and of silu(gate) and up, or of attention's output, queries, keys, values
        output_gradient = shape.hidden * self.residual_size
        in_feed_forward = (
            lines["block_bytes"]
            + (2 * shape.active_ffn(experts) * self.e + output_gradient) * tokens
        )
        width = shape.value_width + shape.q_width + 2 * shape.kv_width
        in_attention = (self.of_attention() + width * self.e + output_gradient) * tokens
        matrices = shape.attention_matrices()
        before_down = (count(matrices) + 2 * shape.hidden * shape.ffn) / plan.tp
        parts = ((in_feed_forward, before_down), (in_attention, count(matrices[:-1]) / plan.tp))
        kept = self.kept(plan.checkpointing, experts=experts) + self.of_input() * self.last
        last_block = in_feed_forward - kept * tokens
        last_block += (
            cast - head_cast if plan.checkpointing == "none" else before_down * self.cast_size
        )
        last_block += embedding * to_come * self.last + lines["reduced_bytes"]
        first_block = max(
            activations + later * (self.cast_size - to_come) for activations, later in parts
        )
        first_block -= embedding * to_come * (self.first and not self.tied)
        # blocks that backward has gathered stay whole: at its end all of the stage's
        if self.gradients_stay_whole:
            first_block += max(
                0.0, self.all_parameters * self.e + self.whole_gradients - lines["gathered_bytes"]
            )
        # of other micro-batches
        first_block += lines["activation_bytes"] * (1 - 1 / self.in_flight)
        # a tied matrix' second gradient: under autocast it is added in place; FSDP adds in 16 bits, before the copy
        sums = self.tied * (plan.zero < 3) * (1 if self.cast_size and not plan.on_cpu else 2)
        # one rank's copy is its gradient
        whole_copy = self.reduced_size - 4 * (plan.zero == 3 and plan.shards == 1)
        of_root = (
            self.root_parameters / plan.tp * whole_copy + sums * embedding * self.residual_size
        )
        return {
            "end of forward": waiting_for_loss
            + (cast if compiled else lines["cast_bytes"])
            + in_forward,
            "loss backward": waiting_for_loss + cast + lines["logits_bytes"],
            "last block": waiting + held_logits + last_block,
            "first block": states + held_logits + gradients + first_block,
            "last gradients": states
            + held_logits
            + gradients
            + of_root * (not plan.adapters)
            + head_cast * compiled,
            "evaluation": (states + lines["cast_bytes"] + 10 * tokens * shape.vocab * self.last)
            * compiled,
        }

    @cached_property
    def lines(self) -> dict[str, float]:
        return {name: getattr(self, name)() for name in LINES}

    @property
    def moment(self) -> str:
        return max(self.moments, key=self.moments.get)

    def allocated_bytes(self) -> float:
        """the peak, as torch.cuda.max_memory_allocated counts it"""
        return max(self.moments.values())

    def fragmentation_bytes(self) -> float:
        """a share of what changes within a step, or of what is alive at other moments than the peak: assumed"""
        allocated = self.allocated_bytes()
        changes = max(
            0.0, allocated - sum(self.lines[name] for name in (*LINES[:3], "buffer_bytes"))
        )
        if not self.traits.autocast or self.plan.pp > 1:  # pipelines were not counted
            return self.traits.reserved * changes
        others = self.lines["gradient_bytes"] + self.lines["activation_bytes"]
        share = (
            1
            if self.plan.zero == 3
            else min(1, BESIDE_LOGITS * self.lines["logits_bytes"] / others)
        )
        return max(
            SURPLUS[self.plan.checkpointing] * changes,
            share * (sum(self.lines.values()) - allocated),
        )

    def context_bytes(self) -> float:
        """CUDA's context with its kernels: assumed"""
        return 0.0 if self.plan.on_cpu else CONTEXT

    def nccl_bytes(self) -> float:
        """256 MiB for each group of ranks: all of them, and those of a cut, if they are not all or another's"""
        plan = self.plan
        cuts = [plan.shards, plan.replicate, plan.tp, plan.pp, plan.ep] + [plan.cp] * (
            plan.cp != plan.shards
        )
        groups = (plan.gpus > 1) + sum(1 < size < plan.gpus for size in cuts)
        return 0.0 if plan.on_cpu else NCCL * groups

    def total_bytes(self) -> float:
        """allocated + fragmentation + context + NCCL"""
        return (
            self.allocated_bytes()
            + self.fragmentation_bytes()
            + self.context_bytes()
            + self.nccl_bytes()
        )


def layer_range(shape: Shape, plan: Plan, number: int) -> range:
    """Layers of stage `number`: equal counts, the first stages one more; or equal cost, the output head counted."""
    each, more = divmod(shape.layers, plan.pp)
    ends = [i * each + min(i, more) for i in range(plan.pp + 1)]
    if plan.pp > 1 and FRAMEWORKS[plan.framework].stages_by_cost:
        layer = shape.layer_parameters(experts=False)[0] - shape.vector_parameters()
        cost_of_stage = (shape.layers * layer + shape.embedding) / plan.pp
        ends[1:-1] = [
            min(shape.layers, int(cost_of_stage * i / layer) + 1) for i in range(1, plan.pp)
        ]
    return range(ends[number], ends[number + 1])


def peak(shape: Shape, plan: Plan, stages: list[int] | None = None) -> Memory:
    """Memory of the rank that needs most, among those of `stages` (default: all). ValueError: see plan.check."""
    check(shape, plan)
    return max(
        (Memory(shape, plan, number) for number in stages or range(plan.pp)),
        key=Memory.allocated_bytes,
    )
