"""Train a language model on many GPUs: each process holds the whole model and reads a part of each batch.

torchrun starts one process per GPU, called a rank. All ranks start from equal weights: DistributedDataParallel (DDP)
sends those of rank 0 once, when it is built. While backward still runs, it averages the gradients that are ready over
all ranks, bucket by bucket (an all-reduce: by NCCL between GPUs, by gloo between CPUs). So every rank takes the same
step. The batch belongs to the run, not to the machine: in fp32 1, 2, 3 or 8 processes give the same loss curve.

    laptop    torchrun --nproc_per_node=2 05_ddp/train.py
    one node  torchrun --nproc_per_node=8 05_ddp/train.py --model llama-124m --global-batch-size 512
    cluster   on each of 4 nodes, $HEAD being the name of one:
              torchrun --nnodes=4 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 05_ddp/train.py

Look for: with --dtype fp32 equal losses whatever nproc_per_node is (bf16 rounds each micro-batch size differently), the
slowest rank, and the last check: all ranks have the same weights to the bit. Before: 04_amp/. Next: train_fsdp.py.
"""

import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, hardware, runtime
from lm import checkpoint, data, flags, metrics, optim, shapes, weights
from lm.activation_checkpointing import checkpoint_blocks

# torch 2.11 lacks its new name
warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    args = parser.parse_args()
    runtime.seed_all(args.seed, args.deterministic)

    # 1 Processes. torchrun starts one per GPU and numbers them.
    rank, world_size, _ = runtime.ranks()  # RANK, WORLD_SIZE, LOCAL_RANK
    # cuda:LOCAL_RANK: each process of a node takes a GPU of its own
    device = runtime.pick_device(args.device)
    runtime.end_with_torchrun()  # or ranks would train on when it is killed
    dist.init_process_group(
        # NCCL for gradients, gloo for CPU values
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
        timeout=runtime.timeout(),  # how long the others wait for a rank that does not come
        rank=rank,
        world_size=world_size,
        # None under torchrun, which has one; for a plain `python` one of its own
        store=runtime.store(),
    )
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()

    # 2 The batch: a function of --seed and the step alone. Rank r of N reads the r-th of N equal parts.
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir)
    batches = data.Batches(corpus, args, rank=rank, world_size=world_size)
    held_out = batches.evaluation()
    runtime.print0(
        f"{args.model}, {args.dtype} matmuls, {world_size} x {hardware.device_name(device)}"
    )

    # 3 The model: weights in fp32, or small updates would be rounded away; matmuls in --dtype.
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    net = weights.build(args.model, config, seed=args.seed, device=device)
    checkpoint_blocks(net, args.checkpointing)  # backward computes again what is not kept
    autocast = partial(
        torch.autocast, device.type, DTYPES[args.dtype], enabled=args.dtype != "fp32"
    )
    optimizer, scheduler = optim.adamw_cosine(
        net,
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")

    # 4 The run: its folder, and the step at which it stood.
    run = checkpoint.Run(
        args, settings=flags.settings(args, data=corpus.sha256, model=repr(config))
    )
    training = {"net": net, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    # about four buckets of fp32 gradients: with only one, backward would end before its all-reduce starts
    bucket_mib = max(1, min(25, 4 * shapes.parameter_count(config) / 4 / 2**20))
    train_net = DistributedDataParallel(
        net, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    if args.compile:
        train_net.compile()
    if args.deterministic:
        # DDP rebuilds its buckets after the first backward. With three or more ranks that changes the order of
        # summation, and so the last bits. A throw-away step before the resume makes every later step alike.
        with autocast():
            loss = train_net(
                *torch.zeros(
                    2, batches.micro_batch_size, args.seq_len, dtype=torch.int64, device=device
                )
            )
        loss.backward()
        optimizer.zero_grad()
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
    step, stop, scale = start_step, 0, scaler.get_scale()
    for step in range(start_step + 1, args.steps + 1):
        # what dropout draws, if your model has it, is the same after a resume
        torch.manual_seed(args.seed + step)
        step_loss = torch.zeros((), device=device)
        for micro_step in range(1, batches.accumulation_steps + 1):
            inputs, targets = meter.next(stream)
            # only the last backward of a step averages, once for all micro-batches; DDP decides that in forward
            sync = (
                nullcontext() if micro_step == batches.accumulation_steps else train_net.no_sync()
            )
            with sync, meter.forward(), autocast():
                # micro-batches have equal token counts
                loss = train_net(inputs, targets) / batches.accumulation_steps
            scaler.scale(loss).backward()
            step_loss += loss.detach()
        scaler.unscale_(optimizer)  # before clipping: the threshold is meant for true gradients
        grad_norm = clip_grad_norm_(net.parameters(), args.clip_norm)
        lr = optimizer.param_groups[0]["lr"]
        scaler.step(optimizer)  # does nothing if a gradient overflowed
        scaler.update()
        # once a step: in fp16 it waits for the GPU
        previous_scale, scale = scale, scaler.get_scale()
        if scale >= previous_scale:  # the step was taken
            scheduler.step()
        optimizer.zero_grad()

        stop = runtime.stop_requested()  # the same answer on all ranks, so that all save
        save = stop or step == args.steps or (args.save_every and step % args.save_every == 0)
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # sums: a rank's loss is the mean of its own share
            meter.log(
                step, step_loss / world_size, grad_norm, lr, step - scheduler.last_epoch, scale
            )
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
    # No rank has drifted from the others by a bit.
    digests = runtime.all_gather(weights.digest(net))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    runtime.print0(f"checked: all {world_size} ranks have the same weights to the bit")

    meter.finish(
        step,
        model=args.model,
        parameters=shapes.parameter_count(config),
        json_path=args.json,
        skipped_steps=step - scheduler.last_epoch,
        weights_sha256=digests[0],
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
