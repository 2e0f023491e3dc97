"""Pipeline parallelism by hand: a schedule is a list of instructions, and a worker of fifty lines carries it out.

Each rank holds some of the layers, a stage. A batch is cut into micro-batches, and these pass through the stages one
behind the other, forward and then backward. At both ends of a step ranks wait for each other: the bubble. Schedules
differ in the order of the same work. GPipe (Huang et al. 2019) makes all forwards first, and so keeps the activations
of all micro-batches. 1F1B (PipeDream-flush, Narayanan et al. 2021) has the same bubble, and keeps those of at most one
micro-batch per stage. Interleaved 1F1B gives each rank v smaller stages: ranks wait for a v-th of the time. The same
three then run in torch.distributed.pipelining, and a fourth that fills the bubble with the weights' gradients.

    laptop    python 08_model_parallel/pipeline_parallel.py --plot pipeline.png
              torchrun --nproc_per_node=3 08_model_parallel/pipeline_parallel.py --steps 5
    one node  torchrun --nproc_per_node=8 08_model_parallel/pipeline_parallel.py --seq-len 512 --global-batch-size 64
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

All is in fp32, and every rank also trains the whole model, to compare: one device must hold it. Sequences have unequal
lengths here, so micro-batches have unequal numbers of tokens, and the mean of their means is not the mean.

Look for: the bubble in time units, exact, beside the measured one; the micro-batches that a rank holds; the letters of
the text picture, a column per moment. Before: 06_fsdp_zero/zero_from_scratch.py, which cuts tensors, not layers.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _pipeline_parallel_batches import Batch, read_batches
from _pipeline_parallel_flags import parse
from _pipeline_parallel_record import Record
from _pipeline_parallel_replay import in_order_of_time
from _pipeline_parallel_report import conclude
from _pipeline_parallel_stages import Pipeline, Stage, build_stages, build_whole, make_optimizer
from _pipeline_parallel_torch import torch_pipelines
from _pipeline_parallel_whole import summed_loss, train_whole

from old import exits, runtime


class Instruction(NamedTuple):
    """Forward, Backward, SendActivations, ReceiveActivations, SendGradients, ReceiveGradients or Step."""

    name: str
    micro_batch: int = 0
    chunk: int = 0  # which of the rank's stages, where it has several: stage chunk * ranks + rank


def gpipe(rank: int, ranks: int, micro_batches: int) -> list[Instruction]:
    """(1) All forwards, then all backwards. The activations of every micro-batch wait in memory for their backward."""
    forwards = [Instruction("Forward", i) for i in range(micro_batches)]
    backwards = [Instruction("Backward", i) for i in range(micro_batches)]
    return forwards + backwards


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Instruction]:
    """(2) Each backward as soon as it can be. In (1) a rank keeps all micro-batches, here at most `ranks - rank`."""
    forwards = [Instruction("Forward", i) for i in range(micro_batches)]
    backwards = [Instruction("Backward", i) for i in range(micro_batches)]
    # The first backward can start when the first micro-batch has been to the last rank and come back.
    return alternate(forwards, backwards, warm_up=ranks - rank - 1)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Instruction]:
    """(3) As (2) with `chunks` stages on each rank. In (2) a rank waits for whole stages, here for parts of them.

    `ranks` micro-batches at a time go through the first chunk, then through the next: that divides the micro-batches.
    """
    forwards = []
    backwards = []
    for first in range(0, micro_batches, ranks):
        for chunk in range(chunks):
            group = range(first, first + ranks)
            forwards += [Instruction("Forward", i, chunk) for i in group]
            backwards += [Instruction("Backward", i, chunks - 1 - chunk) for i in group]
    warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks  # Narayanan et al. 2021, section 2.2
    return alternate(forwards, backwards, min(warm_up, len(forwards)))


def alternate(forwards: list[Instruction], backwards: list[Instruction], warm_up: int) -> list[Instruction]:
    """Some forwards, then one forward and one backward in turn, then the backwards that are left."""
    order = forwards[:warm_up]
    pairs = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:pairs], strict=True):
        order += [forward, backward]
    return order + backwards[pairs:]


def add_messages(orders: list[list[Instruction]]) -> list[list[Instruction]]:
    """The complete list of each rank: what it computes, what it sends and receives, and the optimizer's step.

    NCCL matches messages by their order alone. Two ranks that both send first would wait for ever. So all messages get
    one order, that of a replay, and stand in it on both ranks. A receive is posted early, and waited for when needed.
    """
    ranks = len(orders)
    last_stage = ranks * (1 + max(instruction.chunk for instruction in orders[0])) - 1
    programs = [[] for _ in orders]
    for rank, instruction in in_order_of_time(orders):
        name, micro_batch, chunk = instruction
        programs[rank].append(instruction)
        what, step = ("Activations", 1) if name == "Forward" else ("Gradients", -1)
        to_stage = chunk * ranks + rank + step
        if 0 <= to_stage <= last_stage:
            to_chunk, to_rank = divmod(to_stage, ranks)
            programs[rank].append(Instruction(f"Send{what}", micro_batch, chunk))
            programs[to_rank].append(Instruction(f"Receive{what}", micro_batch, to_chunk))
    return [[*program, Instruction("Step")] for program in programs]


def execute(
    program: list[Instruction], stages: list[Stage], update: Callable[[], None], record: Record, batch: Batch
) -> Tensor:
    """Carry out a rank's list. Returns its part of the loss: all of it on the rank of the last stage, else 0."""
    ranks = dist.get_world_size()
    loss = torch.zeros((), device=record.device)
    receiving = {}  # buffers, which must not be read before their message has come
    kept = {}  # inputs and outputs, from a forward to its backward
    input_gradients = {}
    sending = []  # a tensor on its way must neither change nor be freed

    def send(tensor: Tensor, to_stage: int) -> None:
        sending[:] = [(work, sent) for work, sent in sending if not work.is_completed()]
        tensor = tensor.contiguous()
        sending.append((dist.isend(tensor, dst=to_stage % ranks), tensor))
        record.count_message(tensor)

    def wait_for(name: str, key: tuple[int, int]) -> Tensor:
        buffer, work = receiving.pop((name, *key))
        work.wait()
        return buffer

    for instruction in program:
        name, micro_batch, chunk = instruction
        key = (micro_batch, chunk)
        stage = stages[chunk]
        if name in ("ReceiveActivations", "ReceiveGradients"):
            from_stage = stage.number + (-1 if name == "ReceiveActivations" else 1)
            # The message has the shape of the buffer: a shorter one would be taken without an error.
            buffer = torch.empty(batch.hidden_shape, device=record.device)
            receiving[instruction] = buffer, dist.irecv(buffer, src=from_stage % ranks)
        elif name == "Forward":
            if stage.number == 0:
                inputs = batch.inputs[micro_batch]
            else:
                inputs = wait_for("ReceiveActivations", key).requires_grad_()
            with record.compute(instruction):
                outputs = stage.net(inputs)
                if stage.is_last:
                    outputs = summed_loss(outputs, batch.targets[micro_batch]) / batch.tokens
                    loss += outputs.detach()
            kept[key] = inputs, outputs
            record.note_held(len(kept))
        elif name == "SendActivations":
            send(kept[key][1].detach(), stage.number + 1)
        elif name == "Backward":
            gradient = None if stage.is_last else wait_for("ReceiveGradients", key)
            inputs, outputs = kept.pop(key)
            with record.compute(instruction):
                outputs.backward(gradient)  # adds to the weights' gradients, which need no other factor
            input_gradients[key] = inputs.grad
        elif name == "SendGradients":
            send(input_gradients.pop(key), stage.number - 1)
        elif name == "Step":
            for work, _ in sending:
                work.wait()
            update()
    return loss


def clip_over_stages(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Clip by the norm of all stages' gradients together: a rank alone would clip by the norm of its own."""
    squared_norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
    dist.all_reduce(squared_norm)
    norm = squared_norm.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def pipelines_by_hand(build: Callable[[str, int], Pipeline], micro_batches: int, chunks: int) -> list[Pipeline]:
    """One for each schedule, with a copy of the model of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedules = {"GPipe": (gpipe, 1), "1F1B": (one_forward_one_backward, 1)}
    if chunks > 1:
        schedules["interleaved 1F1B"] = (partial(interleaved, chunks=chunks), chunks)
    pipelines = []
    for name, (schedule, stages_per_rank) in schedules.items():
        orders = [schedule(each, ranks, micro_batches) for each in range(ranks)]
        pipeline = build(name, stages_per_rank)
        pipeline.orders = orders
        pipeline.train_step = partial(
            execute, add_messages(orders)[rank], pipeline.stages, pipeline.update, pipeline.record
        )
        pipelines.append(pipeline)
    return pipelines


def main() -> int:
    began = time.perf_counter()
    args, config, micro_batches = parse(__doc__)
    runtime.relaunch(args.device)
    runtime.seed(args.seed, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)  # or some containers would multiply in tf32

    def build(name: str, stages_per_rank: int, by: str = "hand") -> Pipeline:
        stages = build_stages(config, stages_per_rank, args.seed, device)
        return Pipeline(name, by, stages, Record(device), partial(clip_over_stages, max_norm=args.clip_norm))

    pipelines = pipelines_by_hand(build, micro_batches, args.chunks)
    pipelines += torch_pipelines(build, micro_batches, args.chunks)
    whole = build_whole(config, args.seed, device)
    optimizer = make_optimizer(whole.parameters())
    batches = read_batches(args, config, device)
    expected_losses = []
    tokens = []
    for _ in range(args.steps):
        batch = next(batches)
        expected_loss, expected_norm = train_whole(whole, batch, args.clip_norm)
        for pipeline in pipelines:
            pipeline.record.begin_step()
            loss = pipeline.train_step(batch)
            pipeline.record.end_step()
            dist.all_reduce(loss)  # the ranks without the last stage have added nothing
            pipeline.compare(loss, expected_loss, expected_norm, whole)
        optimizer.step()
        optimizer.zero_grad()
        expected_losses.append(expected_loss.item())
        tokens.append(batch.tokens)

    conclude(args, pipelines, expected_losses, tokens, batch, whole, device, began)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
