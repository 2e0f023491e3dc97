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

import math
import sys
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _train_fsdp_bytes import check_parts

from common import checkpoint, cli, data, exits, hardware, metrics, model, run_dir, runtime, shapes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    parser = cli.training_parser(__doc__)
    parser.add_argument("--replicate", type=cli.positive_int, default=1, help="copies of the model: HSDP from 2 on")
    parser.add_argument("--reshard-after-forward", choices=("on", "off"), default="on", help="off: blocks stay whole")
    parser.add_argument("--cpu-offload", action="store_true", help="weights, gradients, optimizer state in CPU memory")
    args = parser.parse_args()
    runtime.seed(args.seed, args.deterministic)
    rank, world_size, local_rank = runtime.world_from_env()  # RANK, WORLD_SIZE, LOCAL_RANK: torchrun has set them
    device = runtime.rank_device(args.device, local_rank)  # each process of a node takes a GPU of its own
    runtime.end_with_torchrun()  # or ranks would train on for nobody when it is killed
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",  # NCCL for gradients, gloo for CPU values
        device_id=device if device.type == "cuda" else None,
        timeout=runtime.collective_timeout(),  # how long the others wait for a rank that does not come
        rank=rank,
        world_size=world_size,
        store=None if world_size > 1 or dist.is_torchelastic_launched() else dist.HashStore(),  # None: torchrun's
    )
    args.dtype = hardware.choose_dtype(args.dtype, device)
    if args.dtype == "fp32":
        runtime.exact_fp32(device)  # some containers set variables that turn fp32 products into tf32
    runtime.catch_stop_signals()
    micro_batch_size, accumulation_steps = cli.split_batch(args.global_batch_size, args.micro_batch_size, world_size)
    runtime.say(f"{args.model}, {args.dtype} matrix products, {world_size} x {hardware.device_name(device)}")

    corpus = data.load_corpus(args.data, args.tokenizer)
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    held_out = data.eval_batches(
        corpus.held_out, seq_len=args.seq_len, batch_size=micro_batch_size, rank=rank, world_size=world_size
    )
    # fp32 weights, whatever the dtype: bf16 would lose small updates
    net = model.build(args.model, config, seed=args.seed, device="meta")  # shapes alone: no rank ever holds the whole
    model.checkpoint_blocks(net, args.checkpointing)  # what is not kept then is computed again in backward
    shard = partial(
        fully_shard,
        mesh=runtime.sharding_mesh(device, args.replicate),  # which ranks share one copy of the model
        mp_policy=MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False),
        reshard_after_forward=None if args.reshard_after_forward == "on" else False,  # None: all but the root
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda") if args.cpu_offload else OffloadPolicy(),
    )
    for block in net.model.layers.values():  # wrapped above, then compiled, then cut: each sees what was done before
        if args.compile:
            block.compile(fullgraph=True)
        shard(block)
    shard(net)  # what is left is one group: embeddings, final norm and head, since two of them may be one matrix
    for block, next_block in pairwise(net.model.layers.values()):  # while one computes, the next is on its way
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])
    model.materialize(net, args.model, seed=args.seed, device="cpu" if args.cpu_offload else device)

    matrices, vectors = [], []
    for parameter in net.parameters():
        (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, warmup_steps=args.warmup_steps, steps=args.steps))
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    autocast = nullcontext  # fully_shard casts instead: all is in --dtype, also what autocast keeps in fp32

    training = {"net": net, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    progress = {"step": 0, "skipped_steps": 0}
    folder = run_dir.claim(
        args.run_dir,
        settings=parser.settings(args),
        contents={"data": corpus.sha256, "model": repr(config)},
        resume=args.resume,
    )
    checkpoints = checkpoint.Checkpoints(folder, keep=args.keep, in_background=args.async_save)
    if args.resume:
        progress = checkpoint.resume(checkpoints, **training) or progress
    start_step = progress["step"]
    batches = data.train_batches(
        corpus.train,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        micro_batch_size=micro_batch_size,
        seed=args.seed,
        device=device,
        start_step=start_step,
        rank=rank,
        world_size=world_size,
        num_workers=args.num_workers,
    )

    meter = metrics.Meter(
        folder,
        model=args.model,
        config=config,
        device=device,
        dtype=args.dtype,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        steps=args.steps,
        start_step=start_step,
    )
    scale = scaler.get_scale()
    stop = 0
    for step in range(start_step + 1, args.steps + 1):
        step_loss = torch.zeros((), device=device)
        for micro_step in range(1, accumulation_steps + 1):
            # each one reduce-scatters, or gradients would be whole; replicas (HSDP) all-reduce once, after the last
            net.set_requires_all_reduce(micro_step == accumulation_steps)
            with meter.phase("data"):
                inputs, targets = (t.to(device, non_blocking=True) for t in next(batches))
            with meter.phase("forward"), autocast():
                loss = net(inputs, targets) / accumulation_steps  # micro-batches have equal token counts
            scaler.scale(loss).backward()
            step_loss += loss.detach()
        scaler.unscale_(optimizer)  # before clipping: the threshold is meant for true gradients
        grad_norm = clip_grad_norm_(net.parameters(), args.clip_norm)
        lr = optimizer.param_groups[0]["lr"]
        scaler.step(optimizer)  # does nothing if a gradient overflowed
        scaler.update()
        previous_scale, scale = scale, scaler.get_scale()  # once a step: in fp16 it waits for the GPU
        if scale < previous_scale:
            progress["skipped_steps"] += 1
        else:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        meter.note(step_loss, grad_norm)
        progress["step"] = step

        stop = runtime.stop_requested()
        save = stop or step == args.steps or (args.save_every and step % args.save_every == 0)
        if save or step == 1 or step % args.log_every == 0:
            noted = meter.since_last_log()
            dist.all_reduce(noted)
            meter.log(step, noted / world_size, lr, progress["skipped_steps"], scale)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            meter.log_eval(step, evaluate(net, held_out, autocast, device))
        if save:
            checkpoint.save(checkpoints, progress, **training)
        if stop:
            break
    checkpoints.wait()
    if stop:
        runtime.say(f"signal {stop}: saved at step {progress['step']}; the same command with --resume goes on")

    # the promise of AMP, checked: low precision is in the arithmetic, never in what is kept
    with torch.no_grad(), autocast():
        computed = net(torch.zeros(1, 1, dtype=torch.int64, device=device)).dtype
    runtime.reshard(net)  # no backward has followed: what that forward gathered is still there
    kept = {t.dtype for t in (*net.parameters(), *(t for s in optimizer.state.values() for t in s.values()))}
    assert (computed, kept) == (DTYPES[args.dtype], {torch.float32})
    runtime.say(f"checked: matrices multiplied in {computed}, weights and optimizer state kept in {torch.float32}")
    held = check_parts(net, optimizer, args.replicate)  # each rank holds its rows of each tensor and no more
    # the promise of data parallelism, checked: no rank has drifted from the others by a bit
    digests = runtime.gather(checkpoint.digest(net))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    runtime.say(f"checked: all {world_size} ranks have the same weights to the bit")

    meter.finish(
        progress["step"],
        args.json,
        skipped_steps=progress["skipped_steps"],
        weights_sha256=digests[0],
        **held,
    )
    runtime.shutdown()
    return exits.REQUEUE_EXIT_CODE if stop and progress["step"] < args.steps else 0


def warmup_cosine(step: int, warmup_steps: int, steps: int) -> float:
    """Factor on --lr for 0-based step: up in a line, down to a tenth along a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.55 + 0.45 * math.cos(math.pi * done)


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
        total += torch.stack((torch.where(tokens > 0, loss * tokens, 0.0), tokens))  # padding alone has no mean
    dist.all_reduce(total)  # sums, not means: a rank may have read fewer tokens than the others
    net.train()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    exits.run(main)  # leaves by os._exit: what must be flushed at the end belongs in exits.before_exit
