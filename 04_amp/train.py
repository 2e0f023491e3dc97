"""Train a language model on one GPU in mixed precision (AMP).

Tensor cores multiply bf16 and fp16 many times faster than fp32, and activations take half the memory.
Automatic mixed precision keeps weights and optimizer state in fp32, so that small updates are not
rounded away, and lets autocast run the matmuls in low precision. bf16 has the range of fp32
and needs no more. In fp16 small gradients would become zero. So GradScaler multiplies the loss by a large
factor, divides the gradients by it before the step, and skips the step where something overflowed.

    laptop    python 04_amp/train.py
    one GPU   python 04_amp/train.py --model llama-124m --global-batch-size 64 --compile
    cluster   one process is all it uses; 05_ddp/train.py is the same program on many

Look for: tokens/s and memory beside those of --dtype fp32, at almost the same losses; steps skipped with
fp16 (few CPUs have it: add --steps 5 there); the last check: what was multiplied and what kept in which
precision. Before: 03_linear_regression/. Next: 05_ddp/.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, hardware, runtime
from lm import checkpoint, data, flags, metrics, optim, shapes, weights
from lm.activation_checkpointing import checkpoint_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    args = parser.parse_args()
    runtime.seed_all(args.seed, args.deterministic)

    # 1 Processes. There is one; chapter 05 has more.
    rank, world_size = 0, 1
    device = runtime.single_device(args.device)
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
    start_step = checkpoint.resume(run, **training) if args.resume else 0
    # net itself stays as it is, for evaluation
    train_net = torch.compile(net) if args.compile else net
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
        for _ in range(batches.accumulation_steps):
            inputs, targets = meter.next(stream)
            with meter.forward(), autocast():
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
    meter.finish(
        step,
        model=args.model,
        parameters=shapes.parameter_count(config),
        json_path=args.json,
        skipped_steps=step - scheduler.last_epoch,
        weights_sha256=weights.digest(net),
    )
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
    net.train()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    exits.run(main)
