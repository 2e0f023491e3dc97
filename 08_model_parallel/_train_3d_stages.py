"""Pipeline parallelism: each stage has some of the layers, and hidden states travel from stage to stage."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from old import data, runtime


def keep_stage(net: nn.Module, stage: int, stages: int) -> None:
    """Leave of the model what this stage computes. The first stages take one layer more where they do not divide."""
    own = np.array_split([*net.model.layers], stages)[stage].tolist()
    net.model.layers = nn.ModuleDict({name: net.model.layers[name] for name in own})  # layer 7 is still called 7
    if stage > 0:
        net.model.embed_tokens = None
    if stage < stages - 1:
        net.model.norm = None
        net.lm_head = None


def make_schedule(
    net: nn.Module, mesh: DeviceMesh, micro_batches: int, positions: Tensor, hidden: Tensor
) -> Schedule1F1B:
    """One forward, one backward: as soon as a stage can go backward with a micro-batch, it does, and frees what that
    had kept. So a stage holds the activations of at most as many micro-batches as there are stages, not of all.

    `positions` are those of a micro-batch's tokens on this rank, `hidden` is what stages send each other.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return runtime.whole(total) / (micro_batches * positions.numel())  # a step's tokens on this rank

    stage, last = mesh.get_local_rank(), mesh.size() - 1
    hidden = hidden.detach().requires_grad_()  # its gradient comes back
    logits = hidden.new_empty(*positions.shape, net.config.vocab_size, device="meta", requires_grad=True)
    part = PipelineStage(
        net,
        stage,
        mesh.size(),
        hidden.device,
        input_args=positions if stage == 0 else hidden,  # in shape and type: token ids are as positions are
        output_args=logits if stage == last else hidden,
        group=mesh.get_group(),
    )
    # scale_grads would divide the gradients by the number of micro-batches, which the loss does already
    return Schedule1F1B(part, micro_batches, loss_fn=loss, scale_grads=False)


def forward_backward(
    schedule: Schedule1F1B, mesh: DeviceMesh, inputs: Tensor, targets: Tensor, where: dict[str, object]
) -> Tensor:
    """A whole step's micro-batches, one after the other in inputs and targets, through all stages and back.

    Returns the loss of this rank's tokens, such that its mean over all stages is right: 0 before the last.
    """
    stage, losses = mesh.get_local_rank(), []
    positions = where["positions"]  # of one micro-batch; the schedule cuts what it is given into all of them
    where = {**where, "positions": positions.repeat(len(inputs) // len(positions), 1)}
    if stage == 0:
        schedule.step(inputs, return_outputs=False, **where)
    elif stage < mesh.size() - 1:
        schedule.step(return_outputs=False, **where)
    else:
        schedule.step(target=targets, losses=losses, return_outputs=False, **where)
    return mesh.size() * sum(losses, torch.zeros((), device=targets.device))


@torch.no_grad()
def evaluate(
    net: nn.Module,
    mesh: DeviceMesh,
    batches: list[tuple[Tensor, Tensor]],
    where: dict[str, object],
    hidden: Tensor,
) -> float:
    """Mean loss per token of the held-out sequences. `hidden` is what the stage before sends, in shape and type."""
    net.eval()
    stage, device = mesh.get_local_rank(), hidden.device
    total = torch.zeros(2, device=device)  # sum of losses, number of tokens
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        if stage > 0:
            inputs = torch.empty_like(hidden)
            dist.recv(inputs, group=mesh.get_group(), group_src=stage - 1)
        output = net(inputs, targets, **where)  # the loss only where the head is
        if stage < mesh.size() - 1:
            dist.send(output.contiguous(), group=mesh.get_group(), group_dst=stage + 1)
            continue
        tokens = (targets != data.PADDING).sum()
        # padding alone has no mean
        total += torch.stack((torch.where(tokens > 0, runtime.whole(output) * tokens, 0.0), tokens))
    dist.all_reduce(total)  # sums, not means: a rank may have read fewer tokens than the others
    net.train()
    return (total[0] / total[1]).item()


def clip_over_stages(parameters: Iterable[Tensor], largest: float, mesh: DeviceMesh) -> Tensor:
    """Scale all gradients as one process would: by the norm over all stages, not over the own."""
    if mesh.size() == 1:
        return clip_grad_norm_(parameters, largest)
    parameters = list(parameters)
    norm = runtime.whole(get_total_norm([parameter.grad for parameter in parameters]))
    squared = norm**2
    dist.all_reduce(squared, group=mesh.get_group())
    clip_grads_with_norm_(parameters, largest, squared.sqrt())
    return squared.sqrt()
