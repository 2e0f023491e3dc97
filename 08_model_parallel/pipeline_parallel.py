"""Pipeline parallelism by hand: a schedule is a list of instructions, and a worker carries it out.

Each rank holds some of the layers, a stage. A batch is cut into micro-batches, and these pass through the stages one
after another, forward and then backward. At both ends of a step ranks wait for each other: the bubble. Schedules
differ in the order of the same work. GPipe (Huang et al. 2019) does all forwards first, and so keeps the activations
of all micro-batches. 1F1B (PipeDream-flush, Narayanan et al. 2021) has the same bubble, and keeps those of at most as
many micro-batches as there are stages. Interleaved 1F1B gives each rank v smaller stages: waits are v times shorter. A
zero-bubble schedule (ZB-H1, Qi et al. 2023) cuts the backward in two, and fills the bubble with the weights' half.
torch.distributed.pipelining then runs the same four.

    laptop    python 08_model_parallel/pipeline_parallel.py
              torchrun --nproc_per_node=3 08_model_parallel/pipeline_parallel.py --steps 2
    one node  torchrun --nproc_per_node=8 08_model_parallel/pipeline_parallel.py --seq-len 512 --micro-batch-size 4
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

All is in fp32, and every rank also trains the whole model, to compare: one device must hold it. Sequences have unequal
lengths here, so micro-batches have unequal numbers of tokens, and the mean of their losses is not the loss.

Look for: the picture, one letter per unit of time; the share of idle units; the micro-batches that a rank holds,
and the bytes that this takes. Before: tensor_parallel.py. Next: context_parallel.py.
"""

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
import _pipeline_parallel as helper
from _pipeline_parallel import LARGEST_NORM, Stage, loss_share

from common import exits, lesson, measure, runtime, shapes, traffic


class Instruction(NamedTuple):
    """Forward; Backward, or its halves BackwardInput and BackwardWeight; SendActivations, ReceiveGradients and so on.
    A rank may have several stages: its chunk c is stage c * ranks + rank. With 2 ranks, rank 1 has stages 1 and 3."""

    name: str
    micro_batch: int
    chunk: int = 0


def gpipe(rank: int, ranks: int, micro_batches: int) -> list[Instruction]:
    """(1) All forwards, then all backwards. The activations of every micro-batch wait in memory for their backward."""
    forwards = [Instruction("Forward", i) for i in range(micro_batches)]
    backwards = [Instruction("Backward", i) for i in range(micro_batches)]
    return forwards + backwards


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Instruction]:
    """(2) Each backward as soon as possible. In (1) a rank keeps all micro-batches, here at most `ranks - rank`."""
    forwards = [Instruction("Forward", i) for i in range(micro_batches)]
    backwards = [Instruction("Backward", i) for i in range(micro_batches)]
    # The first backward can start when the first micro-batch has been to the last rank and come back.
    return alternate(forwards, backwards, warm_up=ranks - rank - 1)


def alternate(forwards: list[Instruction], backwards: list[Instruction], warm_up: int) -> list[Instruction]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    order = forwards[:warm_up]
    pairs = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:pairs], strict=True):
        order += [forward, backward]
    return order + backwards[pairs:]


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Instruction]:
    """(3) As (2) with `chunks` smaller stages on each rank: waiting for one takes less time. `ranks` micro-batches go
    through the first chunk, then through the next; so `ranks` must divide the number of micro-batches."""
    forwards = []
    backwards = []
    for first in range(0, micro_batches, ranks):
        for chunk in range(chunks):
            group = range(first, first + ranks)
            forwards += [Instruction("Forward", i, chunk) for i in group]
            backwards += [Instruction("Backward", i, chunks - 1 - chunk) for i in group]
    warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks  # Narayanan et al. 2021, section 2.2
    return alternate(forwards, backwards, min(warm_up, len(forwards)))


def zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[Instruction]:
    """(4) In (2) the previous rank waits for a whole backward, but needs only the inputs' gradients. So those come
    first. The weights' gradients follow `rank` micro-batches later, the last at the step's end, where (2) waits."""
    order = []
    for instruction in one_forward_one_backward(rank, ranks, micro_batches):
        name, micro_batch, _ = instruction
        order.append(instruction if name == "Forward" else Instruction("BackwardInput", micro_batch))
        if name == "Backward" and micro_batch >= rank:
            order.append(Instruction("BackwardWeight", micro_batch - rank))
    return order + [Instruction("BackwardWeight", i) for i in range(micro_batches - rank, micro_batches)]


def add_messages(orders: list[list[Instruction]]) -> list[list[Instruction]]:
    """The complete list of each rank: what it computes, and what it sends and receives.

    NCCL matches messages by their order alone. Two ranks that both send first would wait for ever. So all messages get
    one order, by when their work ends in `timelines`. A rank posts a receive early, and waits for it later.
    """
    ranks = len(orders)
    last_stage = ranks * (1 + max(instruction.chunk for instruction in orders[0])) - 1
    programs = [[] for _ in orders]
    by_end = [(end, rank, *work) for rank, line in enumerate(helper.timelines(orders)) for *work, _, end in line]
    for _, rank, name, micro_batch, chunk in sorted(by_end):
        programs[rank].append(Instruction(name, micro_batch, chunk))
        what, step = ("Activations", 1) if name == "Forward" else ("Gradients", -1)
        to_stage = chunk * ranks + rank + step
        if name != "BackwardWeight" and 0 <= to_stage <= last_stage:
            to_chunk, to_rank = divmod(to_stage, ranks)
            programs[rank].append(Instruction(f"Send{what}", micro_batch, chunk))
            programs[to_rank].append(Instruction(f"Receive{what}", micro_batch, to_chunk))
    return programs


def execute(
    program: list[Instruction], stages: list[Stage], tokens: int, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, int]:
    """Carry out a rank's list on [micro-batches, sequences, length]. `tokens` of the targets are no padding. Returns
    the rank's part of the loss, and the largest number of micro-batches whose activations it has held at once."""
    ranks = dist.get_world_size()
    loss = torch.zeros((), device=inputs.device)
    receiving = {}  # buffers, which must not be read before their message has come
    sending = deque()  # a tensor on its way must neither change nor be freed
    kept = {}  # inputs and outputs, from a forward to its backward
    weights_halves = {}  # what the first half of a backward leaves for the second
    input_gradients = {}
    most_held = 0

    def send(tensor: Tensor, to_stage: int) -> None:
        sending.append((dist.isend(tensor, dst=to_stage % ranks), tensor))
        if len(sending) > ranks:
            sending.popleft()[0].wait()  # the oldest, most likely done

    def wait_for(name: str) -> Tensor:  # of the loop's micro-batch, chunk
        buffer, work = receiving.pop((name, micro_batch, chunk))
        work.wait()
        return buffer

    for instruction in program:
        name, micro_batch, chunk = instruction
        key = micro_batch, chunk
        stage = stages[chunk]
        if name.startswith("Receive"):
            from_stage = stage.number + (-1 if name == "ReceiveActivations" else 1)
            # All messages have the shape of this buffer: a shorter one would be accepted without an error.
            buffer = torch.empty(*inputs.shape[1:], stage.net.config.hidden_size, device=inputs.device)
            receiving[instruction] = buffer, dist.irecv(buffer, src=from_stage % ranks)
        elif name == "Forward":
            x = inputs[micro_batch] if stage.number == 0 else wait_for("ReceiveActivations").requires_grad_()
            y = stage.net(x)
            if stage.is_last:
                y = loss_share(y, targets[micro_batch], tokens)
                loss += y.detach()
            kept[key] = x, y
            most_held = max(most_held, len(kept) + len(weights_halves))
        elif name == "SendActivations":
            send(kept[key][1].detach().contiguous(), stage.number + 1)
        elif name in ("Backward", "BackwardInput"):
            gradient = None if stage.is_last else wait_for("ReceiveGradients")
            x, y = kept.pop(key)
            y.backward(gradient)  # adds to the weights' gradients, which need no other factor
            input_gradients[key] = x.grad
            if name == "BackwardInput":
                weights_halves[key] = [*stage.delayed]
                stage.delayed.clear()
        elif name == "BackwardWeight":
            for weight, x, gradient in weights_halves.pop(key):
                weight.grad += gradient.flatten(0, -2).T @ x.flatten(0, -2)
        elif name == "SendGradients":
            send(input_gradients.pop(key).contiguous(), stage.number - 1)
    for work, _ in sending:
        work.wait()
    return loss, most_held


class SplitLinear(torch.autograd.Function):
    """A linear layer for (4). Backward computes the inputs' gradient; what the weight's needs is noted for later."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, delayed: list) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.delayed = delayed
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.delayed.append((weight, x.detach(), gradient))  # x alone, without the graph behind it
        return gradient @ weight, None, None


def split_backward(stage: Stage) -> None:
    """From now on backward leaves the matrices' gradients out. Norms and the embedding are small: it computes those."""
    for module in stage.net.modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x, weight=module.weight: SplitLinear.apply(x, weight, stage.delayed)


def clip_over_stages(parameters: list[nn.Parameter]) -> Tensor:
    """Clip by the norm of all stages' gradients together: a rank alone would clip by the norm of its own."""
    squared_norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
    dist.all_reduce(squared_norm)
    norm = squared_norm.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, LARGEST_NORM, norm)
    return norm


def run(name: str, schedule: Callable, chunks: int, by_torch: bool, baseline: helper.Baseline) -> dict:
    """A row: train under a schedule, and compare each step with one process. Every rank must call it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage_numbers = range(rank, ranks * chunks, ranks)
    stages = [helper.build_stage(baseline.config, number, ranks * chunks, baseline.device) for number in stage_numbers]
    orders = [schedule(each, ranks, baseline.micro_batches) for each in range(ranks)]
    if by_torch:
        step = helper.torch_step(name, orders, stages, baseline)
    else:
        step = partial(execute, add_messages(orders)[rank], stages, baseline.tokens)
        if name == "zero bubble":
            split_backward(stages[0])
    parameters = [parameter for stage in stages for parameter in stage.net.parameters()]
    optimizer = helper.make_optimizer(parameters)
    losses, norms, errors = [], [], []
    for (inputs, targets), expected in zip(baseline.batches, baseline.gradients, strict=True):
        with traffic.Traffic() as sent, measure.LiveBytes(device=baseline.device) as live:  # the last step's are shown
            before = live.now
            loss, most_held = step(inputs, targets)
            activation_bytes = live.peak - before
        dist.all_reduce(loss)  # the ranks without the last stage have added nothing
        norm = clip_over_stages(parameters)
        losses.append(loss.item())
        norms.append(norm.item())
        errors.append(helper.gradient_error(stages, expected))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    of_ranks = runtime.gather((most_held, activation_bytes, int(sent.bytes_sent["sends"]), errors))
    held, activation_bytes, sent_bytes, errors = zip(*of_ranks, strict=True)
    row = {
        "name": f"{name} by torch" if by_torch else name,
        "stages_per_rank": chunks,
        "losses": losses,
        "gradient_norms": norms,
        "gradient_error": torch.tensor(errors).max().item(),  # NaN if one is
        "most_activation_bytes": max(activation_bytes),
    }
    if not by_torch:
        row["timelines"] = helper.timelines(orders)
        row["idle_share"] = float(helper.idle_share(row["timelines"]))
        row["most_held_per_rank"] = held
        row["sent_bytes_per_rank"] = sent_bytes
        row["sent_bytes"] = sum(sent_bytes)
    return row


def main() -> int:
    # 4 micro-batches per rank: from there on the bubble is small (Huang et al. 2019, section 3.3)
    sizes = {"seq_len": 24, "micro_batch_size": 2, "micro_batches_per_rank": 4, "chunks": 2, "steps": 3}
    args = lesson.flags(__doc__, model=helper.UNTIED_NANO, **sizes)
    config = helper.load_config(args)  # raises a UserError before any rank starts
    lesson.relaunch(args.device)
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    baseline = helper.train_one_process(config, args, device)
    schedules = {"GPipe": (gpipe, 1), "1F1B": (one_forward_one_backward, 1)}
    if args.chunks > 1 and dist.get_world_size() > 1:  # one rank has no other to wait for
        schedules["interleaved 1F1B"] = (partial(interleaved, chunks=args.chunks), args.chunks)
    schedules["zero bubble"] = (zero_bubble, 1)
    rows = [baseline.row]
    for by_torch in (False, True):
        rows += [run(name, *schedule, by_torch, baseline) for name, schedule in schedules.items()]
    runtime.say("a: forward of a micro-batch; A: its backward; #: the weights' part of a backward; .: idle")
    for row in rows[1 : 1 + len(schedules)]:
        runtime.say(helper.picture(row))
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, baseline, args),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=args.steps * baseline.tokens,
        first_loss=baseline.row["losses"][0],
        last_loss=baseline.row["losses"][-1],
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
