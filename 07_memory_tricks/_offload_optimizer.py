"""AdamW's state on the slower level: it visits the device one parameter at a time.

Activations are idle within a step, this state between two steps. Per parameter 8 bytes come and 8 bytes leave at each
update. Accumulating gradients over more micro-batches makes updates rarer, and so the copies cheaper.
"""

import hashlib
import time
from collections.abc import Callable
from itertools import zip_longest

import torch
from _offload_file import Slot, bytes_of
from torch import Tensor, nn

from old import report
from old.step_cost import record_memory, wait_for

MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 6  # the first makes the state, and is not counted


def offload_moments(optimizers: dict[nn.Parameter, torch.optim.AdamW], level) -> dict[nn.Parameter, dict[str, Slot]]:
    """From here on AdamW's two moments of each parameter are on the slower level, and nothing of them on the device."""
    slots = {}
    for parameter, optimizer in optimizers.items():
        state = optimizer.state[parameter]
        slots[parameter] = {name: level.slot(state[name].nbytes) for name in MOMENTS}
        for name, slot in slots[parameter].items():
            level.write(slot, bytes_of(state[name]))
            level.wait(slot)
            state[name] = None
    return slots


def update_streamed(optimizers: dict[nn.Parameter, torch.optim.AdamW], slots: dict, level) -> None:
    """One parameter after the other. While it is updated, the moments of the next come and those of the last leave."""

    def bring(parameter: nn.Parameter) -> dict[str, Tensor]:
        moments = {name: torch.empty_like(parameter) for name in MOMENTS}
        for name, slot in slots[parameter].items():
            level.read(slot, bytes_of(moments[name]))
        return moments

    parameters = list(optimizers)
    arriving = bring(parameters[0])
    leaving: list[tuple[Slot, Tensor]] = []
    for this, following in zip_longest(parameters, parameters[1:]):
        moments = arriving
        arriving = None if following is None else bring(following)
        for slot in slots[this].values():
            level.wait(slot)
        state = optimizers[this].state[this]
        state.update(moments)
        optimizers[this].step()
        optimizers[this].zero_grad()
        for slot, _ in leaving:
            level.wait(slot)
        leaving = [(slots[this][name], moments[name]) for name in MOMENTS]
        for slot, moment in leaving:
            level.write(slot, bytes_of(moment))
        state.update(dict.fromkeys(MOMENTS))
    for slot, _ in leaving:
        level.wait(slot)


def digest(tensors: list[Tensor]) -> str:
    """Equal digests are equal numbers, to the bit."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()


def train(net: nn.Module, forward: Callable[[], Tensor], update: Callable[[int], None]) -> list[float]:
    """Seconds of the counted updates."""
    device = next(net.parameters()).device
    seconds = []
    for step in range(STEPS):
        forward().backward()
        wait_for(device)
        start = time.perf_counter()
        update(step)
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def compare_updates(net: nn.Module, forward: Callable[[], Tensor], level) -> list[dict]:
    """Train twice from the same weights: with the state on the device, and streamed."""
    start = {name: value.cpu().clone() for name, value in net.state_dict().items()}
    parameters = list(net.parameters())
    net.zero_grad()
    together = torch.optim.AdamW(parameters, fused=True)

    def update_together(step: int) -> None:
        together.step()
        together.zero_grad()

    rows = [measure("on the device", net, forward, update_together, [together])]
    together.state.clear()
    net.load_state_dict(start)
    each = {parameter: torch.optim.AdamW([parameter], fused=True) for parameter in parameters}
    slots = {}

    def update(step: int) -> None:
        if step == 0:
            for optimizer in each.values():
                optimizer.step()
                optimizer.zero_grad()
            slots.update(offload_moments(each, level))
        else:
            update_streamed(each, slots, level)

    rows.append(measure("streamed", net, forward, update, list(each.values())))
    rows[-1]["offloaded_bytes"] = sum(slot.size for of_parameter in slots.values() for slot in of_parameter.values())
    net.load_state_dict(start)
    return rows


def measure(
    name: str, net: nn.Module, forward: Callable[[], Tensor], update: Callable[[int], None], optimizers: list
) -> dict:
    seconds = train(net, forward, update)
    weights = digest(list(net.parameters()))
    forward().backward()
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    held = [tensor for state in states for tensor in state.values() if tensor is not None]
    parameters = list(net.parameters())
    memory = record_memory(
        lambda: update(STEPS), parameters[0].device, [*parameters, *(p.grad for p in parameters), *held]
    )
    return {
        "name": name,
        "update_peak_bytes": memory.peak_bytes,
        "offloaded_bytes": 0,
        "update_seconds": report.spread(seconds),
        "weights_sha256": weights,
    }
