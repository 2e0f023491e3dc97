"""What a pipeline costs two ranks beside its bubble: 1F1B by hand beside DistributedDataParallel.

Both train the same shape, nano widened and untied, on the same batches in fp32, with two ranks of one thread each
(gloo). A data-parallel rank computes all layers for half of the micro-batches, a pipeline rank half of the layers for
all of them. That is the same arithmetic, but the pipeline has a bubble of (p - 1)/(m + p - 1). What is left when it is
taken out: messages between stages, stages of unequal cost, the Python between two instructions. Rounds alternate.

    python benchmarks/pipeline_cpu.py              rounds of both, interleaved
    python benchmarks/pipeline_cpu.py --rounds 9   more of them

Look for: the ratio after the bubble is taken out, round by round, beside its target. Results go to benchmarks/results/.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date
from functools import partial

import torch
import torch.distributed as dist
from _shared import REPO, cpu, facts, spread_cells, versions, write_results
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(REPO / "08_model_parallel"))
from _pipeline_parallel_batches import Batch, read_batches
from _pipeline_parallel_flags import UNTIED_NANO, load_config
from _pipeline_parallel_record import Record
from _pipeline_parallel_replay import bubble_formula
from _pipeline_parallel_stages import Pipeline, build_stages, build_whole, make_optimizer
from _pipeline_parallel_whole import summed_loss
from pipeline_parallel import add_messages, clip_over_stages, execute, one_forward_one_backward

from old import cli, exits, runtime
from old.report import spread, table

RANKS = 2
TARGET = 0.75  # of data parallelism's tokens/s, after the bubble is taken out
CLIP_NORM = 1.0
WIDENED = {"hidden_size": 512, "intermediate_size": 1376, "head_dim": 64}
SAME_LOSS = 1e-4  # in all steps: sums in another order


def pipeline_step(config, device: torch.device, micro_batches: int) -> Callable[[Batch], torch.Tensor]:
    """A step of 1F1B: a batch to this rank's part of the loss."""
    stages = build_stages(config, 1, 0, device)
    pipeline = Pipeline("1F1B", "hand", stages, Record(device), partial(clip_over_stages, max_norm=CLIP_NORM))
    ranks = dist.get_world_size()
    orders = [one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    program = add_messages(orders)[dist.get_rank()]

    def step(batch: Batch) -> torch.Tensor:
        pipeline.record.moments = []  # in place of begin_step, which would wait for the device and the other rank
        loss = execute(program, stages, pipeline.update, pipeline.record, batch)
        pipeline.optimizer.zero_grad()
        return loss

    return step


def data_parallel_step(config, device: torch.device) -> Callable[[Batch], torch.Tensor]:
    """A step of DistributedDataParallel, on this rank's part of the micro-batches."""
    net = build_whole(config, 0, device)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = make_optimizer(net.parameters())

    def step(batch: Batch) -> torch.Tensor:
        loss = torch.zeros((), device=device)
        mine = range(dist.get_rank(), len(batch.inputs), RANKS)
        for micro_batch in mine:
            with nullcontext() if micro_batch == mine[-1] else ddp.no_sync():
                part = summed_loss(ddp(batch.inputs[micro_batch]), batch.targets[micro_batch]) / batch.tokens
                (part * RANKS).backward()  # DDP averages over the ranks what is to be a sum
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def run_rounds(
    sides: dict[str, Callable[[Batch], torch.Tensor]], batches: Iterator[Batch], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Tokens/s of each side, round by round; the first round is thrown away. All sides see the same batches."""
    speeds = {side: [] for side in sides}
    for round_ in range(rounds + 1):
        chosen = [next(batches) for _ in range(steps)]
        losses = {}
        for side, step in sides.items():
            dist.barrier()
            began = time.perf_counter()
            parts = torch.stack([step(batch) for batch in chosen])
            dist.barrier()  # the slower rank ends the round
            speed = sum(batch.tokens for batch in chosen) / (time.perf_counter() - began)
            dist.all_reduce(parts)  # a rank has a part of each loss, or none
            losses[side] = parts
            runtime.say(f"round {round_ or 'warm-up':<8} {side:<6} {speed:,.0f} tokens/s, last loss {parts[-1]:.3f}")
            if round_:
                speeds[side].append(speed)
        first, second = losses.values()
        torch.testing.assert_close(first, second, rtol=SAME_LOSS, atol=0, msg="not the same training")
    return speeds


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--rounds", type=cli.positive_int, default=5, help="timed rounds, after one thrown away")
    parser.add_argument("--steps", type=cli.positive_int, default=5, help="of each side in a round")
    parser.add_argument("--seq-len", type=cli.positive_int, default=128)
    parser.add_argument("--micro-batches", type=cli.positive_int, default=8)
    parser.add_argument("--micro-batch-size", type=cli.positive_int, default=1)
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    args = parser.parse_args()
    if args.micro_batches % RANKS:
        raise exits.UserError(
            f"--micro-batches {args.micro_batches}: data parallelism shares them between {RANKS} ranks"
        )
    if cpu()["cores"] < RANKS:
        raise exits.UserError("two ranks need two cores, and this process may use one")
    if runtime.processes("cpu") != RANKS:
        raise exits.UserError(f"{runtime.processes('cpu')} processes: start it with python alone, it makes two of them")
    runtime.relaunch("cpu")
    torch.set_num_threads(1)
    device = runtime.init_process_group("cpu")
    config = dataclasses.replace(load_config(UNTIED_NANO, args.seq_len, stages=RANKS), **WIDENED)
    sizes = argparse.Namespace(
        seq_len=args.seq_len,
        global_batch_size=args.micro_batches * args.micro_batch_size,
        micro_batch_size=args.micro_batch_size,
        seed=0,
    )
    sides = {
        "1F1B": pipeline_step(config, device, args.micro_batches),
        "DDP": data_parallel_step(config, device),
    }
    speeds = run_rounds(sides, read_batches(sizes, config, device), args.rounds, args.steps)
    if runtime.is_rank0():
        conclude(args, config, speeds)
    runtime.shutdown()
    return 0


def conclude(args: argparse.Namespace, config, speeds: dict[str, list[float]]) -> None:
    """Ratios as they are, and after the bubble is taken out; on the screen and in a file."""
    bubble = float(bubble_formula("1F1B", RANKS, args.micro_batches, 1))
    plain = [a / b for a, b in zip(speeds["1F1B"], speeds["DDP"], strict=True)]
    ratios = {
        "1F1B / DDP": spread(plain),
        f"the same, without the bubble of {bubble:.3f}": spread([ratio / (1 - bubble) for ratio in plain]),
    }
    *_, without_bubble = ratios.values()
    verdict = "met" if without_bubble["median"] >= TARGET else "missed"
    claim = f"- **{verdict}**: 1F1B / DDP without the bubble: {without_bubble['median']:.3f}; we aimed at {TARGET:g}"
    rows = [["", "n", "median", "min", "max"]]
    for side, values in speeds.items():
        rows.append([f"{side}, tokens/s", *spread_cells(spread(values))])
    for name, ratio in ratios.items():
        rows.append([name, *spread_cells(ratio, ".3f")])
    shape = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, ffn {config.intermediate_size}, untied"
    how = (
        f"{shape}, fp32, {RANKS} ranks of one thread, {args.micro_batches} micro-batches of {args.micro_batch_size} x "
        f"up to {args.seq_len} tokens per step, {args.steps} steps of each side in a round."
    )
    command = " ".join(["python benchmarks/pipeline_cpu.py", *sys.argv[1:]])
    about = {"device": cpu()["cpu"], **cpu(), **versions(), "date": date.today().isoformat(), "command": command}
    text = f"{how}\n\n{table(rows)}\n\n{claim}"
    result = {**about, "speeds": speeds, "bubble": bubble, "ratios": ratios, "claims": [claim]}
    file = write_results(
        about["device"], "-pipeline", result, f"# A pipeline on two CPU ranks\n\n{facts(about)}\n\n{text}"
    )
    print(f"\n{text}\n\nwritten: {file.relative_to(REPO)} and .json")


if __name__ == "__main__":
    exits.run(main)
