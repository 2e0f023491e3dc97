"""What tensor parallelism costs two CPU ranks, beside two data-parallel ranks on the same batch.

nano is widened until its matrices take most of the time. DistributedDataParallel gives each rank half of the batch; the
ways of 08_model_parallel/tensor_parallel.py give each rank half of every matrix. All take the same steps in fp32, with
clipping and AdamW, in the same two processes of one thread each (gloo). They take turns, so that a machine that slows
down slows all.

    python benchmarks/tensor_parallel.py                         rounds of all, interleaved
    python benchmarks/tensor_parallel.py --rounds 9 --width 768  more of them, of a wider model

Look for: the ratios to data parallelism, taken round by round, beside the target. Results go to benchmarks/results/.
"""

import dataclasses
import sys
from collections.abc import Callable
from datetime import date
from functools import partial

import torch
import torch.distributed as dist
from _shared import REPO, cpu, facts, repeat, spread_cells, versions, write_results
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(REPO / "08_model_parallel"))  # before this folder, which has a tensor_parallel.py, too
import tensor_parallel

from old import cli, data, exits, model, runtime
from old.report import spread, table
from old.shapes import SIZES, Config, flops_per_token, parameter_count
from old.step_cost import time_in_turns

RANKS = 2
TARGET = 0.8  # of data parallelism's tokens/s, that we aim at
BASELINE = "data parallel"
CLIP_NORM = 1.0


def widened(width: int, seq_len: int) -> Config:
    """nano with this hidden size, and everything that goes with it."""
    nano = SIZES["nano"]
    if width % nano.head_dim or (width // nano.head_dim) % RANKS:
        raise exits.UserError(f"--width {width} does not make heads for {RANKS} ranks: use a multiple of 64")
    if seq_len % RANKS or seq_len > nano.max_position_embeddings:
        raise exits.UserError(f"--seq-len {seq_len}: an even number of at most {nano.max_position_embeddings}")
    heads = width // nano.head_dim
    return dataclasses.replace(
        nano,
        hidden_size=width,
        intermediate_size=nano.intermediate_size * width // nano.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )


def data_parallel_step(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Each rank takes its rows of the batch. DDP averages the gradients."""
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters())
    inputs, targets = (tensor.chunk(RANKS)[dist.get_rank()] for tensor in batch)

    def step() -> None:
        ddp(inputs, targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
        finish(optimizer)

    return step


def tensor_parallel_step(way: tensor_parallel.Way, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Both ranks take the whole batch."""
    optimizer = torch.optim.AdamW(way.net.parameters())

    def step() -> None:
        way.backward(*batch, 1.0)
        way.clip(CLIP_NORM)
        finish(optimizer)

    return step


def finish(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()  # a step is over when the last rank is done


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=cli.positive_int, default=5, help="timed rounds, after one thrown away")
    add("--steps", type=cli.positive_int, default=2, help="of each way in a round")
    add("--width", type=cli.positive_int, default=512, help="hidden size; nano has 256")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step, over both ranks")
    add("--device", choices=("cpu",), default="cpu")
    args = parser.parse_args()
    config = widened(args.width, args.seq_len)
    if args.batch_size % RANKS:
        raise exits.UserError(f"--batch-size {args.batch_size} is odd: two data-parallel ranks take half of it each")
    if cpu()["cores"] < RANKS:
        raise exits.UserError("two ranks need two cores, and this process may use one")
    if runtime.processes(args.device) != RANKS:
        raise exits.UserError(f"{runtime.processes(args.device)} ranks were started: this compares {RANKS}")
    runtime.relaunch(args.device)
    runtime.seed(0, deterministic=False)
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)
    batch = next(
        data.train_batches(
            data.load_corpus().train,
            seq_len=args.seq_len,
            global_batch_size=args.batch_size,
            micro_batch_size=args.batch_size,
            seed=0,
            device=device,
        )
    )

    def build() -> nn.Module:
        return model.build("nano", config, seed=0, device=device)

    steps = {BASELINE: data_parallel_step(build(), batch)}
    for way in tensor_parallel.make_ways(build)[1:]:  # without one process
        steps[way.name] = tensor_parallel_step(way, batch)
    rounds = {name: partial(repeat, step, args.steps) for name, step in steps.items()}
    seconds = time_in_turns(rounds, device, args.rounds)
    runtime.on_rank0(partial(tell, seconds, args, config))
    runtime.shutdown()
    return 0


def tell(seconds: dict[str, list[float]], args, config: Config) -> None:
    tokens = args.steps * args.batch_size * args.seq_len
    speeds = {name: [tokens / duration for duration in durations] for name, durations in seconds.items()}
    ratios = {
        name: [ours / theirs for ours, theirs in zip(values, speeds[BASELINE], strict=True)]
        for name, values in speeds.items()
        if name != BASELINE
    }
    rows = [["", "n", "median", "min", "max"]]
    rows += [[f"{name}, tokens/s", *spread_cells(spread(values))] for name, values in speeds.items()]
    rows += [[f"{name} / {BASELINE}", *spread_cells(spread(values), ".3f")] for name, values in ratios.items()]
    claims = []
    for name, values in ratios.items():
        median = spread(values)["median"]
        verdict = "met" if median >= TARGET else "missed"
        claims.append(f"- **{verdict}**: {name} / {BASELINE}: {median:.3f}; we aimed at {TARGET:g}")
    about = {"device": cpu()["cpu"], **cpu(), **versions(), "date": date.today().isoformat()}
    about["command"] = f"python benchmarks/tensor_parallel.py {' '.join(sys.argv[1:])}".strip()
    how = (
        f"nano with a hidden size of {args.width} ({parameter_count(config):,} parameters, "
        f"{flops_per_token(config, args.seq_len):,} FLOP per token), fp32, {RANKS} ranks of one thread, "
        f"{args.batch_size} sequences of {args.seq_len} tokens per step, {args.steps} steps per round."
    )
    text = f"{how}\n\n{table(rows)}\n\n" + "\n".join(claims)
    result = {
        **about,
        "speeds": speeds,
        "ratios": {name: spread(values) for name, values in ratios.items()},
        "claims": claims,
    }
    report = f"# Tensor parallelism on two CPU ranks\n\n{facts(about)}\n\n{text}\n"
    file = write_results(about["device"], "-tensor-parallel", result, report)
    print(f"{facts(about)}\n\n{text}\n\nwritten: {file.relative_to(REPO)} and .json", flush=True)


if __name__ == "__main__":
    exits.run(main)
