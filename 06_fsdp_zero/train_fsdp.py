"""Train a language model that does not fit: each process holds a part of every weight, gradient and optimizer state.

fully_shard (FSDP2) cuts each tensor by rows, one part per rank. Just before a block computes, the ranks send each other
their parts of it (an all-gather). After it they forget what is not theirs. In backward the gradients are summed and cut
in one go (a reduce-scatter), and each rank updates the rows that it holds. With N ranks, weights, gradients and
optimizer state take 1/N of the memory of chapter 05, for half as much communication again: three times the weights
instead of twice. Weights are gathered in --dtype, and gradients are summed in fp32. With --dtype fp32 the loss curve
stays that of one process.

    laptop    torchrun --nproc_per_node=2 06_fsdp_zero/train_fsdp.py
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/train_fsdp.py --model llama-8b --checkpointing full --compile
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400; --replicate 4
              shards inside each of four nodes and averages gradients between them (HSDP)

Look for: with --dtype fp32 the losses of 05_ddp/train.py, and the last check: the bytes that each rank holds are its
part and no more. With --json they are listed by rank. Before: 05_ddp/, zero_from_scratch.py. Next: launch/.
"""

import sys
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from _train_fsdp import check_parts, sharding_mesh

from common import cli, exits, hardware, runtime
from lm import checkpoint, data, flags, metrics, optim, shapes, weights
from lm.activation_checkpointing import checkpoint_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    parser.add_argument(
        "--replicate", type=cli.positive_int, default=1, help="copies of the model: HSDP from 2 on"
    )
    parser.add_argument(
        "--reshard-after-forward",
        choices=("on", "off"),
        default="on",
        help="off: blocks stay whole",
    )
    parser.add_argument(
        "--cpu-offload",
        action="store_true",
        help="weights, gradients, optimizer state in CPU memory",
    )
    args = parser.parse_args()
    if args.dtype == "fp16":
        raise exits.UserError(
            "--dtype fp16: 05_ddp/train.py has a GradScaler; use bf16 or fp32 here"
        )
    runtime.seed_all(args.seed, args.deterministic)

    # 1 Processes. As in chapter 05.
    device = runtime.init_process_group(args.device)
    rank, world_size, _ = runtime.ranks()
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()

    # 2 The batch: a function of --seed and the step alone. Rank r of N reads the r-th of N equal parts.
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir)
    batches = data.Batches(corpus, args, rank=rank, world_size=world_size)
    held_out = batches.evaluation()
    runtime.print0(
        f"{args.model}, {args.dtype} matmuls, {world_size} x {hardware.device_name(device)}"
    )

    # 3 The model: each rank holds its rows of every fp32 weight; blocks are gathered in --dtype when they compute.
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    # shapes alone: no rank ever holds the whole
    net = weights.build(args.model, config, seed=args.seed, device="meta")
    checkpoint_blocks(net, args.checkpointing)  # backward computes again what is not kept
    shard = partial(
        fully_shard,
        mesh=sharding_mesh(device, args.replicate),  # which ranks share one copy of the model
        mp_policy=MixedPrecisionPolicy(
            DTYPES[args.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        # None: all but the root
        reshard_after_forward=None if args.reshard_after_forward == "on" else False,
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if args.cpu_offload
        else OffloadPolicy(),
    )
    # wrapped above, then compiled, then cut: each sees what was done before
    for block in net.model.layers.values():
        if args.compile:
            block.compile(fullgraph=True)
        shard(block)
    if args.compile:
        # the largest tensor, the logits, is read less often
        net.loss = torch.compile(net.loss, fullgraph=True)
    # what is left is one group: embeddings, final norm and head, since two of them may be one
    # matrix
    shard(net)
    # while one computes, the next is on its way
    for block, next_block in pairwise(net.model.layers.values()):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])
    weights.materialize(
        net, args.model, seed=args.seed, device="cpu" if args.cpu_offload else device
    )
    # fully_shard casts instead: all is in --dtype, also what autocast keeps in fp32
    autocast = nullcontext
    optimizer, scheduler = optim.adamw_cosine(
        net,
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
    )

    # 4 The run: its folder, and the step at which it stood.
    run = checkpoint.Run(
        args, settings=flags.settings(args, data=corpus.sha256, model=repr(config))
    )
    training = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    start_step = checkpoint.resume(run, **training) if args.resume else 0
    stream = batches.stream(start_step, pin=device.type == "cuda", num_workers=args.num_workers)
    meter = metrics.Meter(
        run.folder,
        steps=args.steps,
        start_step=start_step,
        tokens_per_step=batches.tokens_per_step,
        flops_per_token=shapes.flops_per_token(config, args.seq_len),
        peak_flops=hardware.peak_flops(hardware.device_name(device), args.dtype),
        device=device,
        dtype=args.dtype,
    )

    # 5 The loop.
    step, stop = start_step, 0
    for step in range(start_step + 1, args.steps + 1):
        # what dropout draws, if your model has it, is the same after a resume
        torch.manual_seed(args.seed + step)
        step_loss = torch.zeros((), device=device)
        for micro_step in range(1, batches.accumulation_steps + 1):
            inputs, targets = meter.next(stream)
            # each backward reduce-scatters, or gradients would be whole; copies (HSDP) all-reduce once, after the last
            net.set_requires_all_reduce(micro_step == batches.accumulation_steps)
            with meter.forward(), autocast():
                # micro-batches have equal token counts
                loss = net(inputs, targets) / batches.accumulation_steps
            loss.backward()
            step_loss += loss.detach()
        grad_norm = clip_grad_norm_(net.parameters(), args.clip_norm)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        stop = runtime.stop_requested()  # the same answer on all ranks, so that all save
        save = stop or step == args.steps or (args.save_every and step % args.save_every == 0)
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # sums: a rank's loss is the mean of its own share
            meter.log(step, step_loss / world_size, grad_norm, lr)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            meter.log_eval(step, evaluate(net, held_out, autocast, device))
        if save:
            run.save(step, checkpoint.training_state(step, **training), shapes.config_json(config))
        if stop:
            break
    run.wait()
    if stop:
        runtime.print0(
            f"signal {stop}: saved at step {step}; the same command with --resume goes on"
        )

    # 6 What was promised, checked. Low precision is in the arithmetic, never in what is kept.
    kept = {
        t.dtype
        for t in (*net.parameters(), *(t for s in optimizer.state.values() for t in s.values()))
    }
    with torch.no_grad(), autocast():
        computed = net(torch.zeros(1, 1, dtype=torch.int64, device=device)).dtype
    assert (computed, kept) == (DTYPES[args.dtype], {torch.float32})
    runtime.print0(
        f"checked: matmuls in {computed}, weights and optimizer state kept in {torch.float32}"
    )
    for module in (net, *net.model.layers.values()):
        module.reshard()  # what that forward gathered is still there: no backward has followed
    # No rank has drifted from the others by a bit.
    digests = runtime.all_gather(weights.digest(net))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    runtime.print0(f"checked: all {world_size} ranks have the same weights to the bit")
    held = check_parts(net, optimizer, args.replicate)  # its rows of each tensor and no more
    meter.finish(
        step,
        model=args.model,
        parameters=shapes.parameter_count(config),
        json_path=args.json,
        weights_sha256=digests[0],
        **held,
    )
    runtime.shutdown()
    return exits.REQUEUE_EXIT_CODE if stop and step < args.steps else 0


@torch.no_grad()
def evaluate(net, batches, autocast, device) -> float:
    """Mean loss per token of the held-out sequences."""
    net.eval()
    total = torch.zeros(2, device=device)  # sum of losses, number of tokens
    for inputs, targets in batches:
        targets = targets.to(device)
        with autocast():
            loss = net(inputs.to(device), targets)
        tokens = (targets != data.PADDING).sum()
        # padding alone has no mean
        total += torch.stack((torch.where(tokens > 0, loss * tokens, 0.0), tokens))
    dist.all_reduce(total)  # sums, not means: a rank may have read fewer tokens than the others
    net.train()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    exits.run(main)
