"""What is whole for a while of weights and gradients that ZeRO-3 and FSDP shard."""

import _estimate_shapes as shapes
from _estimate_frameworks import FRAMEWORKS
from _estimate_plan import DTYPES, Plan
from _estimate_shapes import Shape
from _estimate_stages import Stage


def gradients_stay_whole(plan: Plan) -> bool:
    """torch's pipeline schedules let fully_shard reduce gradients once, after a step's last backward."""
    return plan.zero == 3 and plan.pp > 1 and FRAMEWORKS[plan.framework].whole_in_pipelines


def weights_stay_whole(plan: Plan) -> bool:
    """And does the framework keep what it has gathered until then?"""
    return gradients_stay_whole(plan) and FRAMEWORKS[plan.framework].weights_whole_in_pipelines


def gathered_bytes(shape: Shape, plan: Plan, stage: Stage) -> float:
    """ZeRO-3: the block that computes and the next one, whole, in --dtype; and embedding and head, in one group. In a
    pipeline also the stage's gradients, in fp32."""
    if plan.zero < 3:
        return 0.0
    e = DTYPES[plan.dtype]
    if weights_stay_whole(plan):
        return stage.all_parameters * (e + 4)
    whole = 2 * shapes.largest_layer(shape) / plan.ep
    if FRAMEWORKS[plan.framework].gathers_root:
        whole += root_parameters(shape, stage)
    return whole * e / plan.tp + whole_gradient_bytes(shape, plan, stage)


def block_ahead_bytes(shape: Shape, plan: Plan) -> float:
    """The next of these two blocks, which is not there at the end of forward: none follows."""
    if plan.zero < 3 or gradients_stay_whole(plan) or not FRAMEWORKS[plan.framework].gathers_root:
        return 0.0
    return shapes.largest_layer(shape) / plan.ep * DTYPES[plan.dtype] / plan.tp


def whole_gradient_bytes(shape: Shape, plan: Plan, stage: Stage) -> float:
    """fp32 gradients of a stage that pipelines keep whole. Tensor ranks do not divide the embedding's: DTensor keeps
    each rank's summand until it is reduced."""
    if not gradients_stay_whole(plan):
        return 0.0
    embedding = shapes.embedding_parameters(shape) * (1 - 1 / plan.tp) if stage.first else 0
    return 4 * (stage.all_parameters + embedding)


def gathered_by_backward(shape: Shape, plan: Plan, stage: Stage) -> float:
    """In a pipeline, blocks that backward has gathered stay whole: at its end all of the stage's, beyond the above."""
    if not gradients_stay_whole(plan):
        return 0.0
    whole = stage.all_parameters * DTYPES[plan.dtype] + whole_gradient_bytes(shape, plan, stage)
    return max(0.0, whole - gathered_bytes(shape, plan, stage))


def reduced_bytes(parameters: float, plan: Plan) -> float:
    """ZeRO-3: a group's whole gradient, in --dtype, and its fp32 copy that is reduced and scattered."""
    copy = 0 if gradients_stay_whole(plan) and not weights_stay_whole(plan) else 4
    return parameters * (DTYPES[plan.dtype] + copy) / plan.tp if plan.zero == 3 else 0.0


def root_parameters(shape: Shape, stage: Stage) -> int:
    """Of embedding and head, which a tied model has once."""
    embedding = shapes.embedding_parameters(shape)
    return embedding * (stage.first + (stage.last and not (stage.first and shape.tied)))
