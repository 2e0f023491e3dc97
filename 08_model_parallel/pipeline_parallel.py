"""Pipeline parallelism by hand, and by torch.distributed.pipelining: equal losses and gradients.

Each rank holds some of the layers, a stage. A batch is split into micro-batches. They pass through
the stages one after another, forward and then backward, so that all stages compute at once. At the
beginning and at the end of a step ranks wait for each other. This idle time is the bubble.

A schedule is the order in which a rank computes. With m micro-batches and p ranks:

    GPipe             all forwards, then all backwards. Idle: (p-1) / (m+p-1) of the time. Every
                      rank holds the activations of m micro-batches. (Huang et al. 2019)
    1F1B              each backward as early as possible. The same idle time, but the activations of
                      at most p micro-batches. (PipeDream-flush: Narayanan et al. 2021)
    interleaved 1F1B  each rank has v smaller stages. Idle: (p-1) / (vm+p-1), and (vp-1) / (p-1)
                      times as many messages: 3 times with p = v = 2, and about v times with many
                      ranks. (Narayanan et al. 2021, section 2.2)

    laptop    python 08_model_parallel/pipeline_parallel.py
              torchrun --standalone --nproc_per_node=3 08_model_parallel/pipeline_parallel.py \
                  --steps 2
    one node  torchrun --standalone --nproc_per_node=8 08_model_parallel/pipeline_parallel.py
    cluster   the same on each node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

Everything is in fp32. Every rank also trains the full model, to compare: it must fit on one device.
The sequences have unequal lengths, so the micro-batches have unequal numbers of tokens, and the
mean of their losses is not the loss of the batch.

What to look at: the picture, with one letter per unit of time; the share of idle units; how many
micro-batches a rank holds, and the bytes of their activations.

On GPUs the default model is wide: 2 of its layers on each GPU. Expected on 8 H100s from the data
sheet (67 TFLOP/s in fp32, NVLink 450 GB/s): the arithmetic of a micro-batch takes a rank at least
5.5 ms, and a message of 6.3 MB takes 14 us. A step of 32 micro-batches takes at least 214 ms with
GPipe and 1F1B, of which 38 ms are the bubble, and 195 ms interleaved.

Previous: tensor_parallel.py. Next: context_parallel.py.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _pipeline_parallel as helper
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _stages import keep_stage
from torch import Tensor, nn

from common import lesson, measure, runtime
from lm import model, shapes, weights

GPU_DEFAULTS = {"model": "untied-wide", "seq_len": 512}

# --- 1. schedules: the order in which a rank computes


class Instruction(NamedTuple):
    """One action of a rank on one micro-batch.

    Forward and Backward compute a stage. SendActivations, ReceiveActivations, SendGradients and
    ReceiveGradients move a tensor between a stage and its neighbour.
    """

    name: str
    micro_batch: int
    stage: int  # with several stages per rank, stage s is on rank s % ranks


def gpipe(rank: int, ranks: int, micro_batches: int) -> list[Instruction]:
    """Return all forwards, then all backwards."""
    forwards = [Instruction("Forward", i, rank) for i in range(micro_batches)]
    backwards = [Instruction("Backward", i, rank) for i in range(micro_batches)]
    return forwards + backwards


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Instruction]:
    """Return each backward as early as possible."""
    forwards = [Instruction("Forward", i, rank) for i in range(micro_batches)]
    backwards = [Instruction("Backward", i, rank) for i in range(micro_batches)]
    # The first micro-batch goes on to the last rank, and its gradient comes back. Meanwhile this
    # rank computes one more forward for each rank behind it.
    return alternate(forwards, backwards, warm_up=ranks - rank - 1)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Instruction]:
    """Return the order of a rank with `chunks` stages: rank, rank + ranks, rank + 2 * ranks, ...

    `ranks` micro-batches pass the rank's first stage, then its second, and so on. Therefore `ranks`
    must divide the number of micro-batches.
    """
    stages = range(rank, ranks * chunks, ranks)
    forwards = []
    backwards = []
    for first in range(0, micro_batches, ranks):
        group = range(first, first + ranks)
        for stage in stages:
            forwards += [Instruction("Forward", i, stage) for i in group]
        for stage in reversed(stages):
            backwards += [Instruction("Backward", i, stage) for i in group]
    warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks  # Narayanan et al. 2021, section 2.2
    return alternate(forwards, backwards, min(warm_up, len(forwards)))


def alternate(
    forwards: list[Instruction], backwards: list[Instruction], warm_up: int
) -> list[Instruction]:
    """Return `warm_up` forwards, then a forward and a backward in turn, then more backwards."""
    order = forwards[:warm_up]
    pairs = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:pairs], strict=True):
        order += [forward, backward]
    return order + backwards[pairs:]


# --- 2. time: when each rank computes, if messages take no time

# Units of time, for one stage: backward has twice as many matmuls as forward.
DURATION = {"Forward": 1, "Backward": 2}


def input_of(instruction: Instruction, last_stage: int) -> Instruction | None:
    """Return the instruction that must be done before this one, or None if there is none."""
    name, micro_batch, stage = instruction
    if name == "Forward":
        return Instruction("Forward", micro_batch, stage - 1) if stage > 0 else None
    if stage == last_stage:
        return Instruction("Forward", micro_batch, stage)  # it has computed the loss
    return Instruction("Backward", micro_batch, stage + 1)


def simulate(orders: list[list[Instruction]]) -> list[list[tuple[Instruction, int, int]]]:
    """Return the timeline of each rank: its instructions, each with its start and its end.

    A rank starts an instruction when it is done with the one before, and the input is there. Raise
    AssertionError if the ranks wait for each other forever.
    """
    last_stage = max(instruction.stage for instruction in orders[-1])
    end_of: dict[Instruction, int] = {}
    timelines = [[] for _ in orders]
    while len(end_of) < sum(len(order) for order in orders):
        done_before = len(end_of)
        for order, timeline in zip(orders, timelines, strict=True):
            rank_is_free = timeline[-1][2] if timeline else 0  # the end of its last instruction
            for instruction in order[len(timeline) :]:
                needed = input_of(instruction, last_stage)
                if needed is not None and needed not in end_of:
                    break  # another rank has to compute it
                start = max(rank_is_free, end_of.get(needed, 0))
                rank_is_free = start + DURATION[instruction.name]
                end_of[instruction] = rank_is_free
                timeline.append((instruction, start, rank_is_free))
        assert len(end_of) > done_before, "deadlock: each rank waits for another"
    return timelines


# --- 3. messages: activations to the next stage, gradients to the previous one


def messages_of(instruction: Instruction, last_stage: int) -> list[Instruction]:
    """Return the send and the receive of an instruction's result. It may need neither."""
    name, micro_batch, stage = instruction
    if name == "Forward" and stage < last_stage:
        return [
            Instruction("SendActivations", micro_batch, stage),
            Instruction("ReceiveActivations", micro_batch, stage + 1),
        ]
    if name == "Backward" and stage > 0:
        return [
            Instruction("SendGradients", micro_batch, stage),
            Instruction("ReceiveGradients", micro_batch, stage - 1),
        ]
    return []


def add_messages(orders: list[list[Instruction]]) -> list[list[Instruction | list[Instruction]]]:
    """Return the program of each rank: its order, and between its instructions lists of messages.

    NCCL carries out the calls of a rank in the order in which they were made. If two ranks first
    send to each other and then receive, both wait forever. So the programs of all ranks are made
    together, in the order of time. Messages that are ready at the same time are one list, and its
    sends and receives start together.
    """
    ranks = len(orders)
    last_stage = max(instruction.stage for instruction in orders[-1])
    done_at = defaultdict(list)  # time: the instructions that end then
    for timeline in simulate(orders):
        for instruction, _, end in timeline:
            done_at[end].append(instruction)

    programs = [[] for _ in orders]
    for end in sorted(done_at):
        messages = [[] for _ in orders]  # of each rank
        for instruction in done_at[end]:
            programs[instruction.stage % ranks].append(instruction)
            for message in messages_of(instruction, last_stage):
                messages[message.stage % ranks].append(message)
        for program, messages_of_rank in zip(programs, messages, strict=True):
            if messages_of_rank:
                program.append(messages_of_rank)
    return programs


# --- 4. a rank at work


def build_stage(
    config: shapes.Config, number: int, stages: int, device: torch.device
) -> model.Transformer:
    """Build the layers of one stage, without memory for the others. Stage 0 of 1 is the model."""
    with torch.device("meta"):
        net = model.Transformer(config)
    keep_stage(net, number, stages)
    weights.check_weights_fit(net, "--model", device)
    net.to_empty(device=device)
    weights.init_weights(net, seed=0)  # a weight depends on its name alone, not on its stage
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return net


def loss_share(logits: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """Return the share of a micro-batch in the mean loss over the `tokens` targets of the batch.

    The shares add up to the loss, and their gradients to its gradient. Means over micro-batches do
    not: in a micro-batch of few tokens each token would count more.
    """
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss_sum / tokens


class Transfer:
    """Messages on their way. Until they are done, their tensors must not change or be freed."""

    def __init__(self, operations: list[dist.P2POp]) -> None:
        self.operations = operations  # these hold the tensors
        self.works = dist.batch_isend_irecv(operations)  # returns at once

    def wait(self) -> None:
        """Wait for all messages, and let go of their tensors. On a GPU only the stream waits."""
        for work in self.works:
            work.wait()
        self.works = []  # a work of gloo must be waited for only once
        self.operations = []


class Worker:
    """Carry out the program of a rank. `stages` are the stages of this rank, by number."""

    def __init__(self, stages: dict[int, nn.Module], last_stage: int, tokens: int) -> None:
        self.stages = stages
        self.last_stage = last_stage
        self.tokens = tokens  # targets of a batch, without padding
        self.hidden_size = next(iter(stages.values())).config.hidden_size
        self.most_held = 0  # micro-batches whose activations were in memory at once

    def step(
        self, program: list[Instruction | list[Instruction]], inputs: Tensor, targets: Tensor
    ) -> Tensor:
        """Compute the gradients of a batch. Return this rank's share of the loss.

        inputs and targets are [micro-batches, sequences, tokens]. The share is 0 on a rank without
        the last stage.
        """
        self.inputs = inputs
        self.targets = targets
        self.loss = torch.zeros((), device=inputs.device)
        self.held = {}  # (micro-batch, stage): input and output, from its forward to its backward
        self.results = {}  # by the message that will send them
        self.buffers = {}  # by the message that fills them, each with its transfer
        self.transfers = []
        for entry in program:
            if isinstance(entry, list):
                self.start_transfer(entry)
            elif entry.name == "Forward":
                self.forward(entry.micro_batch, entry.stage)
            else:
                self.backward(entry.micro_batch, entry.stage)
        for transfer in self.transfers:
            transfer.wait()
        return self.loss

    def forward(self, micro_batch: int, stage: int) -> None:
        """Compute a stage of a micro-batch."""
        if stage == 0:
            x = self.inputs[micro_batch]  # [sequences, tokens]
        else:
            x = self.receive("ReceiveActivations", micro_batch, stage)
            x.requires_grad_()  # [sequences, tokens, hidden]
        y = self.stages[stage](x)  # [sequences, tokens, hidden]; the last stage returns logits
        if stage == self.last_stage:
            y = loss_share(y, self.targets[micro_batch], self.tokens)
            self.loss += y.detach()
        else:
            message = Instruction("SendActivations", micro_batch, stage)
            self.results[message] = y.detach().contiguous()
        self.held[micro_batch, stage] = (x, y)
        self.most_held = max(self.most_held, len(self.held))

    def backward(self, micro_batch: int, stage: int) -> None:
        """Add to the gradients of a stage, and compute the gradient of its input."""
        x, y = self.held.pop((micro_batch, stage))
        if stage == self.last_stage:
            y.backward()  # y is a share of the loss
        else:
            gradient = self.receive("ReceiveGradients", micro_batch, stage)
            y.backward(gradient)  # both are [sequences, tokens, hidden]
        if stage > 0:
            message = Instruction("SendGradients", micro_batch, stage)
            self.results[message] = x.grad.contiguous()

    def start_transfer(self, messages: list[Instruction]) -> None:
        """Start to send and to receive these messages, all at once."""
        ranks = dist.get_world_size()
        operations = []
        buffers = {}
        for message in messages:
            if message.name in ("SendActivations", "ReceiveGradients"):
                other_rank = (message.stage + 1) % ranks
            else:
                other_rank = (message.stage - 1) % ranks
            if message.name.startswith("Send"):
                result = self.results.pop(message)
                operations.append(dist.P2POp(dist.isend, result, other_rank))
            else:
                # The size is not sent. gloo takes a message that is too short without an error.
                shape = (*self.inputs.shape[1:], self.hidden_size)
                buffers[message] = torch.empty(shape, device=self.inputs.device)
                operations.append(dist.P2POp(dist.irecv, buffers[message], other_rank))

        transfer = Transfer(operations)
        for message, buffer in buffers.items():
            self.buffers[message] = (buffer, transfer)
        self.transfers.append(transfer)
        if len(self.transfers) > ranks:
            self.transfers.pop(0).wait()  # the oldest: it is most likely done

    def receive(self, name: str, micro_batch: int, stage: int) -> Tensor:
        """Return the tensor of a message when it has arrived."""
        buffer, transfer = self.buffers.pop(Instruction(name, micro_batch, stage))
        transfer.wait()
        return buffer


def clip_over_stages(parameters: list[nn.Parameter]) -> None:
    """Clip by the norm of the gradients of all stages. A rank's own norm would be another one."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    squared_norm = norm**2
    dist.all_reduce(squared_norm)
    nn.utils.clip_grads_with_norm_(parameters, helper.LARGEST_NORM, squared_norm.sqrt())


# --- 5. the same schedules of torch.distributed.pipelining


class TorchWorker:
    """Do what Worker does, with torch's stages and schedules."""

    def __init__(
        self, name: str, stages: dict[int, nn.Module], stage_count: int, baseline: helper.Baseline
    ) -> None:
        from torch.distributed import pipelining  # takes a second, so only where it is needed

        torch_stages = []
        for number, net in stages.items():
            stage = pipelining.PipelineStage(net, number, stage_count, baseline.device)
            torch_stages.append(stage)
        options = {
            "n_microbatches": baseline.micro_batches,
            "loss_fn": partial(loss_share, tokens=baseline.tokens),
            # By default gradients are divided by the number of micro-batches: a mean of means.
            "scale_grads": False,
        }
        if name == "GPipe":
            self.schedule = pipelining.ScheduleGPipe(torch_stages[0], **options)
        elif name == "1F1B":
            self.schedule = pipelining.Schedule1F1B(torch_stages[0], **options)
        else:
            self.schedule = pipelining.ScheduleInterleaved1F1B(torch_stages, **options)
        self.has_first = 0 in stages
        self.has_last = stage_count - 1 in stages

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a batch. Return this rank's share of the loss."""
        args = []
        kwargs = {}
        losses = []
        if self.has_first:
            args = [inputs.flatten(0, 1)]  # torch splits the batch into micro-batches itself
        if self.has_last:
            kwargs = {"target": targets.flatten(0, 1), "losses": losses}
        self.schedule.step(*args, **kwargs, return_outputs=False)
        return sum(losses, torch.zeros((), device=inputs.device)).detach()


# --- 6. the comparison


class Schedule(NamedTuple):
    """A schedule, and how many stages it puts on a rank."""

    name: str
    order: Callable[[int, int, int], list[Instruction]]
    stages_per_rank: int = 1


def run(
    schedule: Schedule, by_torch: bool, baseline: helper.Baseline
) -> tuple[dict, list[list[Tensor]]]:
    """Train with a schedule. Return its row, and the gradients of each step.

    Every step is compared with one process. Every rank must call this.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    stage_count = ranks * schedule.stages_per_rank
    stages = {}
    parameters = {}
    for number in range(rank, stage_count, ranks):
        stages[number] = build_stage(baseline.config, number, stage_count, baseline.device)
        parameters.update(stages[number].named_parameters())
    optimizer = helper.make_optimizer(parameters.values())
    row = {"name": schedule.name, "stages_per_rank": schedule.stages_per_rank}

    if by_torch:
        row["name"] += " by torch"
        step = TorchWorker(schedule.name, stages, stage_count, baseline).step
    else:
        orders = [schedule.order(number, ranks, baseline.micro_batches) for number in range(ranks)]
        programs = add_messages(orders)
        worker = Worker(stages, stage_count - 1, baseline.tokens)
        step = partial(worker.step, programs[rank])

    gradient_tensors = [parameter.grad for parameter in parameters.values()]
    meter = helper.StepMeter(gradient_tensors, baseline.device)
    losses = []
    gradients = []
    errors = []
    for number, (inputs, targets) in enumerate(baseline.batches):
        with meter:
            loss = step(inputs, targets)
        dist.all_reduce(loss)
        losses.append(loss.item())
        clip_over_stages(list(parameters.values()))
        gradients.append([parameter.grad.clone() for parameter in parameters.values()])
        expected = [baseline.gradients[number][name] for name in parameters]
        errors.append(measure.relative_error(gradients[-1], expected))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    row["losses"] = losses
    row["gradient_error"] = helper.largest_of_ranks(errors)
    row |= meter.results()
    if not by_torch:
        row["most_held_per_rank"] = runtime.all_gather(worker.most_held)
        row["messages"] = helper.count_messages(programs)
        row["timelines"] = simulate(orders)
        row["idle_share"] = helper.idle_share(row["timelines"])
    return row, gradients


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu=GPU_DEFAULTS,
        relaunches=True,
        model="untied-nano",
        seq_len=24,
        micro_batch_size=2,
        micro_batches_per_rank=4,  # from there on the bubble is small: Huang et al. 2019, 3.3
        chunks=2,
        steps=3,
    )
    # Before relaunch, a wrong flag raises one UserError. After it, every rank would raise it.
    config = helper.load_config(args)
    lesson.relaunch(args.device)  # plain python becomes torchrun: a rank per GPU, 2 on a CPU
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    net = build_stage(config, 0, 1, device)
    baseline = helper.train_one_process(net, args, device)
    del net  # its memory is free from here on

    schedules = [Schedule("GPipe", gpipe), Schedule("1F1B", one_forward_one_backward)]
    if args.chunks > 1 and dist.get_world_size() > 1:  # one rank has no other to wait for
        order = partial(interleaved, chunks=args.chunks)
        schedules.append(Schedule("interleaved 1F1B", order, args.chunks))
    rows = [{"name": "one process", "losses": baseline.losses}]
    for schedule in schedules:
        row_by_hand, gradients_by_hand = run(schedule, by_torch=False, baseline=baseline)
        row_by_torch, gradients_by_torch = run(schedule, by_torch=True, baseline=baseline)
        errors = []
        for found, expected in zip(gradients_by_torch, gradients_by_hand, strict=True):
            errors.append(measure.relative_error(found, expected))
        row_by_torch["from_hand_error"] = helper.largest_of_ranks(errors)
        rows += [row_by_hand, row_by_torch]

    runtime.print0("a: forward of a micro-batch; A: its backward; .: idle")
    for row in rows:
        if "timelines" in row:
            runtime.print0(helper.picture(row))
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, baseline, args),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=args.steps * baseline.tokens,
        first_loss=baseline.losses[0],
        last_loss=baseline.losses[-1],
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
