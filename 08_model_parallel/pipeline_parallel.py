"""Pipeline parallelism by hand: a schedule is a list of instructions, and a worker carries it out.

Each rank holds some of the layers, a stage. A batch is cut into micro-batches, and these pass through the stages one
after another, forward and then backward. At both ends of a step ranks wait for each other: the bubble. Schedules
differ in the order of the same work. GPipe (Huang et al. 2019) does all forwards first, and so keeps the activations
of all micro-batches. 1F1B (PipeDream-flush, Narayanan et al. 2021) has the same bubble, and keeps those of at most as
many micro-batches as there are stages. Interleaved 1F1B gives each rank v smaller stages: waits are v times shorter,
and v times as many messages pass. torch.distributed.pipelining then runs the same three.

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
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _pipeline_parallel as helper
from _pipeline_parallel import LARGEST_NORM, Stage, loss_share

from common import exits, measure, report, runtime
from lm import shapes


class Instruction(NamedTuple):
    """Forward, Backward, SendActivations, ReceiveActivations, SendGradients or ReceiveGradients of a micro-batch.
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


def alternate(
    forwards: list[Instruction], backwards: list[Instruction], warm_up: int
) -> list[Instruction]:
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


def add_messages(orders: list[list[Instruction]]) -> list[list[list[Instruction]]]:
    """The complete list of each rank: what it computes, and the messages between, in batches. NCCL carries out a rank's
    calls in one order, that of the program: a message must not wait behind one that goes the other way, and two ranks
    that both send first would wait for ever. So what is ready at the same time, by `timelines`, is one call."""
    ranks = len(orders)
    last_stage = ranks * (1 + max(instruction.chunk for instruction in orders[0])) - 1
    programs = [[] for _ in orders]
    by_end = [
        (end, rank, *work)
        for rank, line in enumerate(helper.timelines(orders))
        for *work, _, end in line
    ]
    for _, works in groupby(sorted(by_end), key=itemgetter(0)):
        batches = [[] for _ in orders]
        for _, rank, name, micro_batch, chunk in works:
            programs[rank].append([Instruction(name, micro_batch, chunk)])
            what, step = ("Activations", 1) if name == "Forward" else ("Gradients", -1)
            to_stage = chunk * ranks + rank + step
            if 0 <= to_stage <= last_stage:
                to_chunk, to_rank = divmod(to_stage, ranks)
                batches[rank].append(Instruction(f"Send{what}", micro_batch, chunk))
                batches[to_rank].append(Instruction(f"Receive{what}", micro_batch, to_chunk))
        for program, batch in zip(programs, batches, strict=True):
            program += [batch] if batch else []
    return programs


def execute(
    program: list[list[Instruction]],
    stages: list[Stage],
    tokens: int,
    inputs: Tensor,
    targets: Tensor,
) -> tuple[Tensor, int]:
    """Carry out a rank's list on [micro-batches, sequences, length]. `tokens` of the targets are no padding. Returns
    the rank's part of the loss, and the largest number of micro-batches whose activations it has held at once."""
    ranks = dist.get_world_size()
    loss = torch.zeros((), device=inputs.device)
    outgoing, receiving = {}, {}  # by message; a buffer must not be read before its batch has come
    on_their_way = deque()  # a tensor that is sent must neither change nor be freed
    kept = {}  # inputs and outputs, from a forward to its backward
    most_held = 0

    def exchange(batch: list[Instruction]) -> None:
        operations, works = [], []
        for message in batch:
            to_next = message.name in ("SendActivations", "ReceiveGradients")
            peer = (stages[message.chunk].number + (1 if to_next else -1)) % ranks
            if message.name.startswith("Send"):
                operations.append(dist.P2POp(dist.isend, outgoing.pop(message), peer))
                continue
            # All messages have the shape of this buffer: a shorter one would be accepted without an error.
            buffer = torch.empty(
                *inputs.shape[1:], stages[0].net.config.hidden_size, device=inputs.device
            )
            receiving[message] = buffer, works
            operations.append(dist.P2POp(dist.irecv, buffer, peer))
        works += dist.batch_isend_irecv(operations)
        on_their_way.append((works, operations))
        if len(on_their_way) > ranks:
            wait_for(on_their_way.popleft()[0])  # the oldest, most likely done

    def wait_for(works: list[dist.Work]) -> None:
        while works:  # once each
            works.pop().wait()

    def received(name: str) -> Tensor:
        buffer, works = receiving.pop((name, *key))
        wait_for(works)
        return buffer

    for step in program:
        name, *key = step[0]
        micro_batch, chunk = key
        stage = stages[chunk]
        if name == "Forward":
            x = (
                inputs[micro_batch]
                if stage.number == 0
                else received("ReceiveActivations").requires_grad_()
            )
            y = stage.net(x)
            if stage.is_last:
                y = loss_share(y, targets[micro_batch], tokens)
                loss += y.detach()
            kept[micro_batch, chunk] = x, y
            outgoing["SendActivations", *key] = y.detach().contiguous()
            most_held = max(most_held, len(kept))
        elif name == "Backward":
            gradient = None if stage.is_last else received("ReceiveGradients")
            x, y = kept.pop((micro_batch, chunk))
            y.backward(gradient)  # adds to the weights' gradients, which need no other factor
            outgoing["SendGradients", *key] = x.grad
        else:
            exchange(step)
    for works, _ in on_their_way:
        wait_for(works)
    return loss, most_held


def clip_over_stages(parameters: list[nn.Parameter]) -> None:
    """Clip by the norm of all stages' gradients together: a rank alone would clip by the norm of its own."""
    squared_norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
    dist.all_reduce(squared_norm)
    nn.utils.clip_grads_with_norm_(parameters, LARGEST_NORM, squared_norm.sqrt())


def run(
    name: str, schedule: Callable, chunks: int, by_torch: bool, baseline: helper.Baseline
) -> dict:
    """A row: train under a schedule, and compare each step with one process. Every rank must call it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage_numbers = range(rank, ranks * chunks, ranks)
    stages = [
        helper.build_stage(baseline.config, number, ranks * chunks, baseline.device)
        for number in stage_numbers
    ]
    orders = [schedule(each, ranks, baseline.micro_batches) for each in range(ranks)]
    programs = add_messages(orders)
    by_hand = partial(execute, programs[rank], stages, baseline.tokens)
    step = helper.torch_step(name, stages, baseline) if by_torch else by_hand
    parameters = [parameter for stage in stages for parameter in stage.net.parameters()]
    optimizer = helper.make_optimizer(parameters)
    losses, errors = [], []
    for (inputs, targets), expected in zip(baseline.batches, baseline.gradients, strict=True):
        with measure.LiveBytes(device=baseline.device) as live:  # the last step's are shown
            before = live.now
            loss, most_held = step(inputs, targets)
            activation_bytes = live.peak - before
        dist.all_reduce(loss)  # the ranks without the last stage have added nothing
        losses.append(loss.item())
        clip_over_stages(parameters)
        found = {
            name: parameter.grad
            for stage in stages
            for name, parameter in stage.net.named_parameters()
        }
        errors.append(measure.relative_error([*found.values()], [expected[name] for name in found]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    held, activation_bytes, errors = zip(
        *runtime.all_gather((most_held, activation_bytes, errors)), strict=True
    )
    row = {
        "name": f"{name} by torch" if by_torch else name,
        "stages_per_rank": chunks,
        "losses": losses,
        "gradient_error": torch.tensor(errors).max().item(),  # NaN if one is
        "most_activation_bytes": max(activation_bytes),
    }
    if not by_torch:
        row |= helper.idle_share(helper.timelines(orders)) | {"most_held_per_rank": held}
        row["messages"] = sum(
            each.name.startswith("Send")
            for program in programs
            for step in program
            for each in step
        )
    return row


def main() -> int:
    # 4 micro-batches per rank: from there on the bubble is small (Huang et al. 2019, section 3.3)
    sizes = {
        "seq_len": 24,
        "micro_batch_size": 2,
        "micro_batches_per_rank": 4,
        "chunks": 2,
        "steps": 3,
    }
    args = report.lesson_flags(__doc__, model=helper.UNTIED_NANO, **sizes)
    config = helper.load_config(args)  # raises a UserError before any rank starts
    runtime.relaunch(args.device)
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    baseline = helper.train_one_process(config, args, device)
    schedules = {"GPipe": (gpipe, 1), "1F1B": (one_forward_one_backward, 1)}
    if args.chunks > 1 and dist.get_world_size() > 1:  # one rank has no other to wait for
        schedules["interleaved 1F1B"] = (partial(interleaved, chunks=args.chunks), args.chunks)
    rows = [{"name": "one process", "losses": baseline.losses}]
    for by_torch in (False, True):
        rows += [run(name, *schedule, by_torch, baseline) for name, schedule in schedules.items()]
    runtime.print0("a: forward of a micro-batch; A: its backward; .: idle")
    for row in rows[1 : 1 + len(schedules)]:
        runtime.print0(helper.picture(row))
    checked = helper.check(rows, baseline, args)
    about = {
        "dtype": "fp32",
        "parameters": shapes.parameter_count(config),
        "tokens": args.steps * baseline.tokens,
    }
    about |= {"first_loss": baseline.losses[0], "last_loss": baseline.losses[-1]}
    report.end_lesson(
        rows, columns=helper.COLUMNS, checked=checked, args=args, device=device, **about
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
