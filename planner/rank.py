"""One rank of a plan, with the sizes that its bytes and seconds follow from."""

from math import ceil

from lm.stages import split_layers, stages_of_rank
from planner.plan import DTYPES, GROUP, Plan
from planner.shape import Shape, count


class Rank:
    """One tensor- and expert-parallel rank of pipeline rank `stage`, counted from 0.

    Parameters are those of the rank's stages after tp and ep, and before ZeRO or FSDP shards them:

        parameters         outside the routed experts
        expert_parameters  in the routed experts
        all_parameters     both
        matrices           those that a matmul reads: all without embedding, norms and biases
        embedding          of the embedding, or of a head of its own
        root               of embedding and head, as far as the stage has them

    `e` is the bytes of a number in --dtype. `residual_size` is that of the residual stream's
    numbers, and `cast_size` that of autocast's copies of weights, or 0.
    """

    def __init__(self, shape: Shape, plan: Plan, stage: int = 0) -> None:
        self.shape = shape
        self.plan = plan
        self.stage = stage
        self.e = DTYPES[plan.dtype]

        # Layers. A tied head is the embedding's matrix, if the stage has both.
        layers = layers_of_rank(shape, plan, stage)
        first_expert_layer = shape.layers - shape.expert_layers
        self.layers = len(layers)
        self.expert_layers = sum(layer >= first_expert_layer for layer in layers)
        self.dense_layers = self.layers - self.expert_layers
        self.has_embedding = stage == 0
        self.has_head = stage == plan.pp - 1
        self.is_tied = shape.tied and self.has_embedding and self.has_head

        # Parameters. Tensor parallelism shards matrices, and neither vectors nor routers.
        dense, _ = shape.layer_parameters(experts=False)
        beside_experts, routed = shape.layer_parameters(experts=True)
        blocks = dense * self.dense_layers + beside_experts * self.expert_layers
        vectors = shape.vector_parameters() * self.layers
        routers = shape.hidden * shape.experts * self.expert_layers
        final_norm = shape.hidden if self.has_head else 0
        head = shape.embedding if self.has_head else 0
        self.embedding = shape.embedding / plan.tp
        self.root = 0.0
        if self.has_embedding:
            self.root += self.embedding
        if self.has_head and not self.is_tied:
            self.root += self.embedding
        whole = vectors + routers
        self.parameters = (blocks - whole) / plan.tp + self.root + whole + final_norm
        self.expert_parameters = routed * self.expert_layers / plan.ep
        self.all_parameters = self.parameters + self.expert_parameters
        self.matrices = (blocks - vectors + head) / plan.tp + self.expert_parameters
        # The largest layer, which sharding gathers at once: with experts, if there are some.
        self.largest_layer = dense / plan.tp if self.dense_layers else 0.0
        if self.expert_layers:
            mixture = beside_experts / plan.tp + routed / plan.ep
            self.largest_layer = max(self.largest_layer, mixture)
        self.layer_adapters = plan.adapters * sum(_adapted_widths(shape))

        # Parts of a layer's matrices: those before attention's kernel, and all before down_proj.
        attention = shape.attention_matrices()
        self.qkv_matrices = count(attention[:-1]) / plan.tp
        self.layer_matrices = count(attention) + count(shape.feed_forward_matrices(shape.ffn))
        self.before_down = (count(attention) + 2 * shape.hidden * shape.ffn) / plan.tp
        # Backward of a mixture starts behind down_proj: all gradients of the layer are to come.
        self.expert_stack = shape.experts * shape.hidden * shape.expert_ffn / plan.ep  # one of 3
        self.beside_stacks = (beside_experts - shape.vector_parameters()) / plan.tp
        if self.expert_layers:
            self.before_down = self.beside_stacks + 3 * self.expert_stack

        # Under autocast the residual stream is fp32, and matmuls cast the fp32 weights. FSDP casts
        # weights when it gathers them, and everything is in --dtype.
        under_autocast = not plan.is_fsdp
        self.residual_size = 4 if under_autocast else self.e
        self.cast_size = 0
        if under_autocast and plan.dtype != "fp32":
            self.cast_size = self.e

        # Bytes of a weight in the matrices of blocks, as adapters hold and gather them. In 4 bits a
        # group's scale and minimum are held in bf16, and gathered in --dtype.
        self.frozen_size: float = self.e
        self.gathered_size: float = self.e
        if plan.weights == "int4":
            self.frozen_size = 0.5 + 2 * 2 / GROUP
            self.gathered_size = 0.5 + 2 * self.e / GROUP
        self.gathered_layer = self.largest_layer * self.e
        self.gathered_layer += self.layer_matrices * (self.gathered_size - self.e)

        # Tokens, and micro-batches that wait for backward. 1F1B starts one for each later stage.
        # Interleaved, a rank starts twice as many, and one for each rank before it goes on to its
        # next stage (Narayanan et al. 2021, section 2.2). Each is of one of its stages.
        self.own_tokens = plan.tokens / plan.tp
        later = plan.pp - 1 - stage
        per_rank = plan.stages_per_rank
        started = later + 1 if per_rank == 1 else 2 * later + (per_rank - 1) * plan.pp + 1
        self.in_flight = min(started, per_rank * plan.micro_batches) / per_rank

        # FSDP gathers a tied embedding and head as one group, and others as two. With a pipeline
        # this is False: a stage has at most one of them.
        self.has_two_groups = plan.is_fsdp and plan.pp == 1 and not self.is_tied

        # In a pipeline FSDP reduces gradients once, after the last backward of the step. Without
        # resharding, the weights also stay gathered until then.
        self.gradients_stay_whole = plan.is_fsdp and plan.pp > 1
        self.weights_stay_gathered = self.gradients_stay_whole and not plan.reshard_after_forward
        # Else gradients come one by one in backward. They are there all the time if micro-batches
        # accumulate in them, and in DDP's buckets.
        self.gradients_are_there = plan.micro_batches > 1 or plan.is_ddp

    def held(self, since: int) -> float:
        """Return how many parameters the rank holds if ZeRO shards them from stage `since` on."""
        if self.plan.zero < since:
            return self.all_parameters
        return self.parameters / self.plan.shards + self.expert_parameters * self.largest_shard

    @property
    def largest_shard(self) -> float:
        """The largest share of its experts that a rank holds when they are sharded.

        fully_shard gives a rank whole experts: 6 on 4 ranks are 2, 2, 2 and none.
        """
        plan = self.plan
        if not plan.is_fsdp or not self.shape.experts:
            return 1 / plan.expert_shards
        experts = self.shape.experts // plan.ep
        return ceil(experts / plan.expert_shards) / experts

    def frozen_bytes(self, size: float) -> float:
        """Return the bytes of all frozen weights if those in 4 bits have `size` bytes each."""
        in_blocks = self.layer_matrices * self.layers
        return self.all_parameters * self.e + in_blocks * (size - self.e)

    def trained(self, since: int) -> float:
        """Return the same of the parameters that are trained: with adapters only A and B."""
        if not self.plan.adapters:
            return self.held(since)
        adapters = self.layer_adapters * self.shape.layers
        if self.plan.zero < since:
            return adapters
        return adapters / self.plan.shards


def layers_of_rank(shape: Shape, plan: Plan, rank: int) -> list[int]:
    """Return the numbers of the layers that a pipeline rank has."""
    layer = sum(shape.layer_parameters(experts=shape.expert_layers > 0, active=True))
    ranges = split_layers(shape.layers, plan.stages, shape.embedding / layer)
    layers = []
    for stage in stages_of_rank(rank, plan.pp, plan.schedule):
        layers += ranges[stage]
    return layers


def _adapted_widths(shape: Shape) -> list[int]:
    """Return inputs + outputs of each adapted matrix: LoRA's A and B have rank times so many.

    In a mixture of experts these are the matrices of attention alone.
    """
    matrices = shape.attention_matrices()
    if not shape.experts:
        matrices = [*matrices, *shape.feed_forward_matrices(shape.ffn)]
    return [inputs + outputs for inputs, outputs in matrices]
