"""Shard a model as train_fsdp.py does, and count the bytes that a rank holds and sends."""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from common import runtime
from common.runtime import held_bytes
from lm import exchange
from lm.moe import Mixture, mixtures


def shard_groups(model: nn.Module, options: dict) -> None:
    """Shard a model in the groups that train_fsdp.py shows, with these options of fully_shard."""
    for block in model.model.layers.values():
        fully_shard(block, **options)
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, **options)
        model.model.embed_tokens.set_unshard_in_backward(False)
        head_options = options | {"reshard_after_forward": False}
        fully_shard([model.model.norm, model.lm_head], **head_options)
    fully_shard(model, **options)
    prefetch_experts(model)


def prefetch_experts(model: nn.Module) -> None:
    """Start the all-gather of experts that are sharded apart before attention, not behind it.

    Behind it the CPU waits for the sizes of an exchange.
    """
    for block in model.model.layers.values():
        if isinstance(block.mlp, Mixture) and isinstance(block.mlp.experts, FSDPModule):
            block.set_modules_to_forward_prefetch([block.mlp.experts])


def shard_experts(model: nn.Module, expert_ranks: int, options: dict) -> None:
    """Shard the experts of each layer, as --ep does in 08_model_parallel/train_3d.py.

    `expert_ranks` neighbours share the experts, and tokens travel between them. fully_shard shards
    what a rank has of them over the ranks that have the same. Call it before shard_groups, with the
    same options of fully_shard.
    """
    device_type = options["mesh"].device_type
    sizes = (dist.get_world_size() // expert_ranks, expert_ranks)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("shard", "expert"))
    for name in ("shard", "expert"):
        runtime.set_timeout(mesh.get_group(name))
    for mixture in mixtures(model):
        experts = mixture.experts
        exchange.shard_experts(experts, mesh["expert"])
        mixture.run_experts = partial(exchange.run_experts, experts, mesh.get_group("expert"))
        # The rows of all expert ranks come to the expert, so its gradient is their sum. fully_shard
        # divides by the other ranks only. It should be divided by all, so 1 / expert ranks is left.
        experts.gradient_factor = 1 / expert_ranks
        fully_shard(experts, **options | {"mesh": mesh["shard"]})


def bytes_of_training(weights: list[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state on this rank."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    optimizer_state = []
    for state in optimizer.state.values():
        optimizer_state += state.values()
    return {
        "parameter_bytes_per_rank": held_bytes(weights),
        "gradient_bytes_per_rank": held_bytes(gradients),
        "optimizer_bytes_per_rank": held_bytes(optimizer_state),
    }


def zero_formula(stage: int, net: nn.Module, ranks: int) -> dict[str, int]:
    """Compute what a rank holds, calls and sends in a training step with AdamW in fp32.

    Stage 0 is data parallelism with an all-reduce for each parameter. Stage 1 shards all parameters
    as one group. Stages 2 and 3 have a group for each block, and one for the other parameters. A
    group is padded to a multiple of the number of ranks.

    Bytes sent assume a ring: a rank sends (ranks - 1) / ranks of a tensor in a reduce-scatter
    or an all-gather, and twice that in an all-reduce.
    """
    ring_share = (ranks - 1) / ranks
    sizes = [parameter.numel() for parameter in net.parameters()]
    total = sum(sizes)
    if stage == 0:
        return {
            "parameter_bytes_per_rank": 4 * total,
            "gradient_bytes_per_rank": 4 * total,
            # Two moments of each element, and a step count for each tensor.
            "optimizer_bytes_per_rank": 8 * total + 4 * len(sizes),
            "all_gathers_per_step": 0,
            "reduce_scatters_per_step": 0,
            "all_reduces_per_step": len(sizes),
            "bytes_sent_per_rank_per_step": round(2 * 4 * total * ring_share),
        }

    group_sizes = [total]
    if stage >= 2:
        group_sizes = []
        for block in net.model.layers.values():
            group_sizes.append(sum(parameter.numel() for parameter in block.parameters()))
        group_sizes.append(total - sum(group_sizes))
    shard = sum(math.ceil(size / ranks) for size in group_sizes)  # elements of one rank
    padded = shard * ranks

    weights = shard if stage == 3 else padded
    gradients = shard if stage >= 2 else padded
    # Stage 3 gathers a group before forward and before backward, the others after the update.
    gathers_per_group = 2 if stage == 3 else 1
    gathered = gathers_per_group * padded  # elements
    reduced = padded
    return {
        "parameter_bytes_per_rank": 4 * weights,
        "gradient_bytes_per_rank": 4 * gradients,
        "optimizer_bytes_per_rank": 8 * shard + 4 * len(group_sizes),
        "all_gathers_per_step": gathers_per_group * len(group_sizes),
        "reduce_scatters_per_step": len(group_sizes),
        "all_reduces_per_step": 0,
        "bytes_sent_per_rank_per_step": round(4 * (gathered + reduced) * ring_share),
    }
