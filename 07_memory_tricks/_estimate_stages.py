"""Which layers, and how many parameters, one rank of a plan holds."""

from dataclasses import dataclass

import _estimate_shapes as shapes
from _estimate_frameworks import FRAMEWORKS
from _estimate_plan import Plan
from _estimate_shapes import Shape


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, as one of its tensor- and expert-parallel ranks holds it."""

    first: bool
    last: bool
    dense_layers: int
    expert_layers: int
    parameters: float  # all but routed experts
    expert_parameters: float
    matrix_parameters: float  # of the first, those that are multiplied with
    in_flight: int  # micro-batches whose activations wait for their backward, under 1F1B

    @property
    def all_parameters(self) -> float:
        return self.parameters + self.expert_parameters


def layer_range(shape: Shape, plan: Plan, number: int) -> range:
    """Layers of stage `number`: equal counts, the first stages one more; or equal cost, the output head counted,
    where the layer that passes the mark still belongs to the stage before it."""
    if plan.pp > 1 and FRAMEWORKS[plan.framework].stages_by_cost:
        layer = shapes.attention_parameters(shape) + shapes.count(shapes.feed_forward_matrices(shape, shape.ffn))
        cost_of_stage = (shape.layers * layer + shapes.embedding_parameters(shape)) / plan.pp
        ends = [0, *(int(cost_of_stage * i / layer) + 1 for i in range(1, plan.pp)), shape.layers]
        ends = [min(end, shape.layers) for end in ends]
        return range(ends[number], ends[number + 1])
    each, more = divmod(shape.layers, plan.pp)
    start = number * each + min(number, more)
    return range(start, start + each + (number < more))


def stage_of(shape: Shape, plan: Plan, number: int) -> Stage:
    layers = layer_range(shape, plan, number)
    first, last = number == 0, number == plan.pp - 1
    with_experts = sum(1 for layer in layers if layer >= shape.layers - shape.expert_layers)
    without = len(layers) - with_experts
    attention = shapes.attention_parameters(shape) * len(layers)
    vectors = shapes.vector_parameters(shape) * len(layers)
    feed_forward = shapes.count(shapes.feed_forward_matrices(shape, shape.ffn)) * without
    routed = 0.0
    if mixture := shape.experts:
        shared = shapes.count(shapes.feed_forward_matrices(shape, mixture.shared_ffn))
        feed_forward += (shape.hidden * mixture.number + shared) * with_experts
        one = shapes.count(shapes.feed_forward_matrices(shape, mixture.ffn))
        routed = one * mixture.number * with_experts / plan.ep
    embedding = shapes.embedding_parameters(shape) + shapes.learned_positions(shape) if first else 0
    # a tied head is the embedding's matrix, of which a last stage of its own holds a second copy
    head = 0 if not last or (first and shape.tied) else shapes.embedding_parameters(shape)
    final_norm = shape.hidden * (2 if shape.gpt2 else 1) if last else 0
    multiplied = attention + feed_forward + (shapes.embedding_parameters(shape) if last else 0)
    return Stage(
        first=first,
        last=last,
        dense_layers=without,
        expert_layers=with_experts,
        parameters=(attention + feed_forward + embedding + head) / plan.tp + vectors + final_norm,
        expert_parameters=routed,
        matrix_parameters=multiplied / plan.tp + routed,
        in_flight=min(plan.pp - number, plan.micro_batches) if plan.pp > 1 else 1,
    )


def placeholder_bytes(shape: Shape, plan: Plan, stage: Stage) -> float:
    """Megatron's unused bf16 gradients: one for each shape of weight, q, k, v and gate, up as one matrix each."""
    if not FRAMEWORKS[plan.framework].placeholders:
        return 0.0
    h = shape.hidden
    if shape.latent:
        sizes = {inputs * outputs for inputs, outputs in shapes.attention_matrices(shape)}
    else:
        sizes = {h * (shape.q_width + 2 * shape.kv_width), h * shape.q_width}
    widths = [shape.ffn] if stage.dense_layers else []
    if stage.expert_layers:
        widths += [shape.experts.ffn, shape.experts.shared_ffn]
    for width in widths:
        sizes |= {h * width, 2 * h * width}
    if stage.last:
        sizes.add(shapes.embedding_parameters(shape))
    return 2 * sum(sizes) / plan.tp
