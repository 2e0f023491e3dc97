"""What the cuts of chapter 08 cost where there is nothing to cut: each way on a world of one, beside plain training.

A world of one sends nothing, so tensor, pipeline and context parallelism should take as long as a plain loop, and
experts over ranks as long as the same experts in one process. What they take more is the machinery itself: collectives
with oneself, schedules, sorted tokens, and attention written out beside a fused kernel. On a CPU we expect more of it:
gloo's copies take turns with the arithmetic. All train the same model on the same batch in fp32, with SGD and clipping,
in one process; they take turns, so that a machine that slows down slows all. Nine models are held at once, with their
gradients and momentum: 18 GB for llama-124m, computed.

    one GPU  python benchmarks/model_parallel_gpu.py
    laptop   python benchmarks/model_parallel_gpu.py --device cpu --model nano --seq-len 128 --batch-size 8

Look for: the ratios to plain training, taken round by round, beside the target. Results go to benchmarks/results/.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from datetime import date
from functools import partial

import torch
from _shared import REPO, cpu, facts, repeat, spread_cells, versions, write_results
from torch import Tensor, nn

sys.path.insert(0, str(REPO / "08_model_parallel"))
import context_parallel
import expert_parallel
import pipeline_cpu
import tensor_parallel
from _expert_parallel_proof import LocalMixture
from _pipeline_parallel_batches import Batch
from _pipeline_parallel_stages import make_optimizer

from old import cli, data, exits, model, runtime, shapes
from old.hardware import device_name
from old.report import spread, table
from old.step_cost import time_in_turns

TARGET = 0.98  # of the speed of plain training, that we aim at
CLIP_NORM = 1.0
EXPERTS, TOP_K = 8, 2
SAME_LOSS = 1e-4  # relative: sums in another order
Step = Callable[[], Tensor]  # trains on the batch; gives its mean loss


def plain_step(net: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Step:
    optimizer = make_optimizer(net.parameters())

    def step() -> Tensor:
        total = torch.zeros((), device=micro_batches[0][0].device)
        for inputs, targets in micro_batches:
            loss = net(inputs, targets) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
        update(optimizer)
        return total

    return step


def tensor_step(way: tensor_parallel.Way, micro_batches: list[tuple[Tensor, Tensor]]) -> Step:
    optimizer = make_optimizer(way.net.parameters())

    def step() -> Tensor:
        share = 1 / len(micro_batches)
        total = sum(way.backward(inputs, targets, share).detach() * share for inputs, targets in micro_batches)
        way.clip(CLIP_NORM)
        update(optimizer)
        return runtime.whole(total)

    return step


def pipeline_step(config: shapes.Config, micro_batches: list[tuple[Tensor, Tensor]], device: torch.device) -> Step:
    """1F1B with a single stage."""
    inputs, targets = ([*tensors] for tensors in zip(*micro_batches, strict=True))
    shape = (*inputs[0].shape, config.hidden_size)
    batch = Batch(inputs, targets, sum(part.numel() for part in targets), shape)
    return partial(pipeline_cpu.pipeline_step(config, device, len(micro_batches)), batch)


def context_step(net: nn.Module, way: str, micro_batches: list[tuple[Tensor, Tensor]]) -> Step:
    for layer in net.model.layers.values():
        layer.self_attn.attend = context_parallel.WAYS[way][1]
    optimizer = make_optimizer(net.parameters())
    tokens = sum(targets.numel() for _, targets in micro_batches)

    def step() -> Tensor:
        total = torch.zeros((), device=micro_batches[0][0].device)
        for inputs, targets in micro_batches:
            loss = context_parallel.loss_of(net, way, inputs, targets, tokens)
            loss.backward()
            total += loss.detach()
        context_parallel.sum_over_ranks(total, net)
        nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
        update(optimizer)
        return total

    return step


def expert_step(net: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Step:
    optimizer = make_optimizer(net.parameters())

    def step() -> Tensor:
        losses, _ = expert_parallel.compute_gradients(net, micro_batches, CLIP_NORM, balance_weight=0.0)
        update(optimizer)
        return losses[0]

    return step


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def dense_steps(
    name: str, config: shapes.Config, micro_batches: list[tuple[Tensor, Tensor]], device: torch.device
) -> dict[str, Step]:
    """Plain training, and the ways that train the same model."""

    def build() -> nn.Module:
        return model.build(name, config, seed=0, device=device)

    _, *ways = tensor_parallel.make_ways(build)
    steps = {"plain": plain_step(build(), micro_batches)}
    steps |= {f"tensor, {way.name}": tensor_step(way, micro_batches) for way in ways}
    steps["pipeline, 1F1B"] = pipeline_step(config, micro_batches, device)
    for way in [*context_parallel.WAYS][1:]:  # the first is one process
        steps[f"context, {way}"] = context_step(build(), way, micro_batches)
    return steps


def expert_steps(
    config: shapes.Config, micro_batches: list[tuple[Tensor, Tensor]], device: torch.device
) -> dict[str, Step]:
    """The same experts in one process, and over ranks."""

    def build(mixture: type[nn.Module]) -> nn.Module:
        make = partial(mixture, experts=EXPERTS, k=TOP_K, capacity_factor=None)
        return expert_parallel.build(config, make, TOP_K, seed=0, device=device)

    return {
        "experts in one process": plain_step(build(LocalMixture), micro_batches),
        "experts over ranks": expert_step(build(expert_parallel.Mixture), micro_batches),
    }


def measure(
    steps: dict[str, Step], args: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each way in each round, under the name of their baseline, the first of them."""
    baseline = next(iter(steps))
    check_first_losses(steps, baseline)
    rounds = {name: partial(repeat, step, args.steps) for name, step in steps.items()}
    return {baseline: time_in_turns(rounds, device, args.rounds)}


def check_first_losses(steps: dict[str, Step], baseline: str) -> None:
    """AssertionError if a way does not train what its baseline trains."""
    losses = {name: step().item() for name, step in steps.items()}
    for name, loss in losses.items():
        error = abs(loss / losses[baseline] - 1)
        assert error < SAME_LOSS, f"{name}: a loss of {loss} where {baseline} has {losses[baseline]}"


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", choices=tuple(shapes.SIZES), default="llama-124m")
    add("--seq-len", type=cli.positive_int, default=1024)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step, in two micro-batches")
    add("--rounds", type=cli.positive_int, default=5, help="timed rounds, after one thrown away")
    add("--steps", type=cli.positive_int, default=4, help="of each way in a round")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    args = parser.parse_args()
    if args.batch_size % 2:
        raise exits.UserError(f"--batch-size {args.batch_size} is odd: it is cut into two micro-batches")
    if (ranks := exits.world_from_env()[1]) > 1:
        raise exits.UserError(f"{ranks} processes were started, and this is about a world of one: use python alone")
    # a pipeline's last stage holds the head, its first one the embedding: they cannot be one matrix
    config = dataclasses.replace(shapes.load_config(args.model, 256, args.seq_len), tie_word_embeddings=False)
    runtime.seed(0, deterministic=False)
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)
    stream = data.train_batches(
        data.load_corpus().train,
        seq_len=args.seq_len,
        global_batch_size=args.batch_size,
        micro_batch_size=args.batch_size // 2,
        seed=0,
        device=device,
    )
    micro_batches = [tuple(tensor.to(device) for tensor in next(stream)) for _ in range(2)]
    # one group after the other: the models of the first are gone before those of the second come
    seconds = measure(dense_steps(args.model, config, micro_batches, device), args, device)
    seconds |= measure(expert_steps(config, micro_batches, device), args, device)
    write_report(seconds, args, config, device)
    runtime.shutdown()
    return 0


def write_report(
    seconds: dict[str, dict[str, list[float]]], args: argparse.Namespace, config: shapes.Config, device: torch.device
) -> None:
    """Tokens/s and ratios, on the screen and in a file."""
    tokens = args.steps * args.batch_size * args.seq_len
    rows = [["on a world of one", "n", "tokens/s", "of the baseline", "lowest", "highest"]]
    claims, ratios = [], {}
    for baseline, of_ways in seconds.items():
        for way, durations in of_ways.items():
            speed = spread([tokens / duration for duration in durations])
            ratio = spread([plain / own for plain, own in zip(of_ways[baseline], durations, strict=True)])
            rows.append([way, str(speed["n"]), f"{speed['median']:,.0f}", *spread_cells(ratio, ".3f")[1:]])
            if way != baseline:
                ratios[way] = ratio
                verdict = "met" if ratio["median"] >= TARGET else "missed"
                claims.append(f"- **{verdict}**: {way} over {baseline}: {ratio['median']:.3f}; we aimed at {TARGET}")
    hardware_name = cpu()["cpu"] if device.type == "cpu" else device_name(device)
    about = {"device": hardware_name, **cpu(), **versions(), "date": date.today().isoformat()}
    about["command"] = f"python benchmarks/model_parallel_gpu.py {' '.join(sys.argv[1:])}".strip()
    how = (
        f"{args.model} with a head of its own ({shapes.parameter_count(config):,} parameters), fp32, {args.batch_size} "
        f"sequences of {args.seq_len} tokens per step in two micro-batches, {args.steps} steps per round. Experts: "
        f"{EXPERTS} in place of each MLP, {TOP_K} for each token."
    )
    text = f"{how}\n\n{table(rows)}\n\n" + "\n".join(claims)
    result = {**about, "seconds": seconds, "ratios": ratios, "claims": claims}
    report = f"# Model parallelism on a world of one\n\n{facts(about)}\n\n{text}\n"
    file = write_results(about["device"], "-model-parallel", result, report)
    print(f"{facts(about)}\n\n{text}\n\nwritten: {file.relative_to(REPO)} and .json", flush=True)


if __name__ == "__main__":
    exits.run(main)
