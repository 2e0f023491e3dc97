"""Train a language model on many GPUs: each process holds the whole model and reads a part of each batch.

torchrun starts one process per GPU, called a rank. All ranks start from equal weights: DistributedDataParallel (DDP)
sends those of rank 0 once, when it is built. While backward still runs, it averages the gradients that are ready over
all ranks, bucket by bucket (an all-reduce: by NCCL between GPUs, by gloo between CPUs). So every rank takes the same
step. The batch belongs to the run, not to the machine: 1, 2, 3 or 8 processes give the same loss curve.

    laptop    torchrun --nproc_per_node=2 05_ddp/train.py
    one node  torchrun --nproc_per_node=8 05_ddp/train.py --model llama-124m --global-batch-size 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Look for: equal losses whatever nproc_per_node is, the slowest rank and its lag, and the last check: all
ranks have the same weights to the bit. Before: 04_amp/. Next: launch/.
"""

import math
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from common import checkpoint, cli, data, exits, hardware, metrics, model, run_dir, runtime, shapes

warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.11 does not have its successor
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    parser = cli.training_parser(__doc__)
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
    net = model.build(args.model, config, seed=args.seed, device=device)
    model.checkpoint_blocks(net, args.checkpointing)  # what is not kept then is computed again in backward

    matrices, vectors = [], []
    for parameter in net.parameters():
        (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, warmup_steps=args.warmup_steps, steps=args.steps))
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    autocast = partial(torch.autocast, device.type, DTYPES[args.dtype], enabled=args.dtype != "fp32")

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

    # a quarter of the gradients, 4 bytes each: with one bucket, backward would end before its all-reduce starts
    bucket_mib = max(1, min(25, shapes.parameter_count(config) / 2**20))
    ddp = DistributedDataParallel(net, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, broadcast_buffers=False)
    if args.compile:
        ddp.compile()
    if args.deterministic:
        # DDP rebuilds its buckets after the first backward. With three or more ranks that changes the order of
        # summation, and so the last bits. One throw-away step first makes every later step alike.
        with autocast():
            loss = ddp(*torch.zeros(2, micro_batch_size, args.seq_len, dtype=torch.int64, device=device))
        loss.backward()
        optimizer.zero_grad(set_to_none=True)

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
            with meter.phase("data"):
                inputs, targets = (t.to(device, non_blocking=True) for t in next(batches))
            # only the last backward of a step averages, once for all micro-batches; DDP decides that in forward
            sync = nullcontext() if micro_step == accumulation_steps else ddp.no_sync()
            with sync, meter.phase("forward"), autocast():
                loss = ddp(inputs, targets) / accumulation_steps  # micro-batches have equal token counts
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
    kept = {t.dtype for t in (*net.parameters(), *(t for s in optimizer.state.values() for t in s.values()))}
    assert (computed, kept) == (DTYPES[args.dtype], {torch.float32})
    runtime.say(f"checked: matrices multiplied in {computed}, weights and optimizer state kept in {torch.float32}")
    # the promise of data parallelism, checked: no rank has drifted from the others by a bit
    digests = runtime.gather(checkpoint.digest(net))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    buckets = ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    runtime.say(f"checked: all {world_size} ranks have the same weights to the bit")

    meter.finish(
        progress["step"],
        args.json,
        skipped_steps=progress["skipped_steps"],
        weights_sha256=digests[0],
        bucket_bytes=[int(size) for size in buckets.split(",") if size],
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
