"""Train a language model with distributed data parallelism (DDP).

Each GPU runs one process, called a rank. Every rank holds a full copy of the model and reads its
own share of the global batch. DDP averages the gradients across ranks while backward is still
running, so that all copies take the same optimizer step and stay identical.

    laptop    torchrun --standalone --nproc_per_node=2 05_ddp/train.py    (the model is nano)
    one node  torchrun --standalone --nproc_per_node=8 05_ddp/train.py    (llama-124m, compiled)
    cluster   the same on every node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

What to look at: with --dtype fp32 the loss does not depend on the number of ranks, up to rounding.
The log names the slowest rank. The line "checked: ..." says that all ranks hold identical weights.

Previous: 04_amp/train.py. Next: 06_fsdp_zero/train_fsdp.py, for models that do not fit on one GPU.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common import hardware, report, runtime
from common.torch_versions import KEEP_BUFFERS
from training import checkpoint, flags, micro_batch, optim
from training.batches import PADDING, Batches
from training.digest import digest
from training.meter import Meter
from training.training_objects import TrainingObjects


# YOURS: replace this function to train your own model on your own data.
def load_training_objects(args, rank, world_size, device):
    """Return the model on `device`, the batches of this rank, and what must match on resume.

    training/training_objects.py says what the model and the batches must do. Examples:
    05_ddp/own_images.py and 05_ddp/own_gpt2.py.
    """
    # YOURS: these modules are for the language model only.
    from lm import balance, data, shapes, weights
    from lm.activation_checkpointing import checkpoint_blocks
    from lm.loss import use_loss
    from lm.sample import sample_text

    shapes.use_recipe(args)  # --seq-len, --lr and --warmup-steps, if they are not given
    # Raise for a model that is unknown or too large, before the text is tokenized.
    weights.check_model(args.model, device, copies=world_size)
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir, args.eval_data)
    train_set, held_out_set = data.sequences(corpus, args.seq_len)
    config = weights.load_config(args.model, corpus.vocab_size, args.seq_len, experts=True)
    model = weights.build(args.model, config, seed=args.seed, device=device)
    checkpoint_blocks(model, args.checkpointing)  # backward recomputes activations
    use_loss(model, args.loss)  # plain, or chunk by chunk
    batches = Batches(train_set, held_out_set, args, rank=rank, world_size=world_size)
    experts = balance.callbacks(args, model, batches, device)  # of a mixture of experts
    return TrainingObjects(
        model=model,
        name=args.model,
        batches=batches,
        must_match={
            "data": corpus.sha256,
            "model": repr(config),
            "weights of --model": weights.fingerprint(args.model),
            **balance.setting(args),
        },
        flops_per_token=shapes.flops_per_token(config, args.seq_len),
        config_json=shapes.config_json(config),
        sample=partial(sample_text, model, corpus, seq_len=args.seq_len, device=device),
        **experts,
    )


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    args = parser.parse_args()
    runtime.seed_all(args.seed, args.deterministic)

    # 1. Join the job. torchrun has set RANK, WORLD_SIZE and LOCAL_RANK for this process.
    rank, world_size, _ = runtime.ranks()
    if args.device == "auto" and not torch.cuda.is_available():
        args.device = "cpu"  # not mps, which has no collectives
    device = runtime.pick_device(args.device)  # cuda:LOCAL_RANK, if there are GPUs
    runtime.end_with_torchrun()  # exit if torchrun is killed
    backend = "gloo"
    device_id = None
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # NCCL for gradients, gloo for small values on the CPU
        device_id = device
    dist.init_process_group(
        backend=backend,
        device_id=device_id,
        timeout=runtime.timeout(),  # COLLECTIVE_TIMEOUT_SECONDS, by default 10 minutes
        rank=rank,
        world_size=world_size,
        store=runtime.store(),  # that of torchrun; plain `python` has none and gets its own
    )
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()

    # 2. Model and data. Weights stay in fp32; autocast runs the matmuls in args.dtype.
    objects = load_training_objects(args, rank, world_size, device)
    model = objects.model
    batches = objects.batches
    autocast = partial(
        torch.autocast, device.type, runtime.DTYPES[args.dtype], enabled=args.dtype != "fp32"
    )
    # DDP copies rank 0's weights to all ranks. Training calls ddp_model, so that backward averages
    # the gradients. Evaluation and checkpoints use `model`, whose names have no prefix.
    ddp_model = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,  # gradients live in the all-reduce buckets: no copy
        **KEEP_BUFFERS,  # YOURS: remove this line if your model has BatchNorm
    )
    if args.compile:
        ddp_model.compile()
    optimizer, scheduler = optim.adamw(
        model,
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
        schedule=args.lr_schedule,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    runtime.print0(
        f"{objects.name}, {args.dtype} matmuls, {world_size} x {hardware.device_name(device)}"
    )

    # 3. Checkpoints: resume where the last run stopped, on any number of ranks.
    settings = flags.settings(args, **objects.must_match)  # must not change on --resume
    run = checkpoint.Run(args, settings=settings)
    # --micro-batch-size, or the largest that fits: this runs forward and backward, and leaves
    # weights, optimizer and random numbers as they are.
    batches.micro_batch_size = micro_batch.choose(
        args,
        ddp_model,
        optimizer,
        batches,
        device,
        autocast=autocast,
        estimate_flags="--zero 0",
    )
    held_out = batches.evaluation()
    if args.deterministic:
        rebuild_buckets(ddp_model, held_out[0], autocast, device)
    start_step = 0
    if args.resume:
        start_step = checkpoint.resume(run, model, optimizer, scheduler, scaler)
    stream = batches.stream(start_step, pin=device.type == "cuda", num_workers=args.num_workers)
    meter = Meter(
        run.folder,
        steps=args.steps,
        start_step=start_step,
        tokens_per_step=batches.tokens_per_step,
        flops_per_token=objects.flops_per_token,
        peak_flops=hardware.peak_flops(hardware.device_name(device), args.dtype),
        device=device,
        dtype=args.dtype,
        tensorboard=args.tensorboard,
        wandb=args.wandb,
    )
    run.remember_flags(args, batches.micro_batch_size)

    # 4. The training loop.
    step = start_step
    stop = 0  # the number of a signal, such as SIGTERM
    scale = scaler.get_scale()
    steps = range(start_step + 1, args.steps + 1)
    for step in report.progress_bar(steps, "training", initial=start_step, unit="step"):
        # Dropout draws other numbers on each rank and step, and the same ones after a resume.
        runtime.seed_step(args.seed, step, rank)
        if objects.start_step:
            objects.start_step(step, autocast)
        step_loss = torch.zeros((), device=device)
        for micro_step in range(1, batches.accumulation_steps + 1):
            inputs, targets = meter.next(stream)  # on the device; measures the wait for data
            # All-reduce once per step, in the last backward. no_sync() must enclose forward, too.
            is_last_micro_step = micro_step == batches.accumulation_steps
            with nullcontext() if is_last_micro_step else ddp_model.no_sync():
                with meter.forward(), autocast():
                    loss = ddp_model(inputs, targets) / batches.accumulation_steps
                scaler.scale(loss).backward()
            step_loss += loss.detach()

        scaler.unscale_(optimizer)  # clip the true gradients, not the scaled ones
        grad_norm = clip_grad_norm_(model.parameters(), args.clip_norm)
        lr = optimizer.param_groups[0]["lr"]
        scaler.step(optimizer)  # skipped if a gradient overflowed
        scaler.update()
        previous_scale = scale
        scale = scaler.get_scale()
        skipped = scale < previous_scale
        if not skipped:
            scheduler.step()
        optimizer.zero_grad()
        values = objects.end_step(skipped=skipped) if objects.end_step else {}

        # Log, evaluate and save. All three contain collectives, so every rank must take part.
        stop = runtime.stop_requested()  # the same on all ranks
        is_last_step = stop or step == args.steps
        is_save_step = args.save_every and step % args.save_every == 0
        save = is_last_step or is_save_step or runtime.save_requested()
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # the sum over ranks; divided by world_size, the mean
            skipped_steps = step - scheduler.last_epoch  # last_epoch counts scheduler.step()
            meter.log(step, step_loss / world_size, grad_norm, lr, skipped_steps, scale, **values)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            val_loss = evaluate(model, held_out, autocast, device)
            with autocast():
                sample = objects.sample() if objects.sample else None
            meter.log_eval(step, val_loss, sample)
        if save:
            state = checkpoint.training_state(step, model, optimizer, scheduler, scaler)
            run.save(step, state, objects.config_json)
            meter.save_plot()
        if stop:
            break
    run.wait()  # until --async-save has written the last checkpoint
    if stop:
        meter.print_stop(stop, step, args.keep)

    # 5. Check what this chapter promises: all ranks hold identical weights.
    digests = runtime.all_gather(digest(model))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    if world_size > 1:
        runtime.print0(f"checked: all {world_size} ranks have the same weights, bit for bit")

    meter.finish(
        step,
        model=objects.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        json_path=args.json,
        skipped_steps=step - scheduler.last_epoch,
        weights_sha256=digests[0],
    )
    runtime.shutdown()
    return exits.REQUEUE_EXIT_CODE if stop and step < args.steps else 0


def rebuild_buckets(ddp_model, batch, autocast, device) -> None:
    """Run forward and backward once, so that DDP rebuilds its buckets before the first step.

    DDP rebuilds its buckets of gradients after the first backward. With three or more ranks, that
    changes the order in which gradients are summed, and so their last bits. After this function, a
    new run and a resumed run use the same buckets in every step.
    """
    buffers = [buffer.clone() for buffer in ddp_model.buffers()]
    inputs, targets = batch
    with autocast():
        loss = ddp_model(inputs.to(device), targets.to(device))
    loss.backward()
    ddp_model.zero_grad()
    for buffer, value in zip(ddp_model.buffers(), buffers, strict=True):
        buffer.copy_(value)  # such as the statistics of BatchNorm


@torch.no_grad()
def evaluate(model, batches, autocast, device) -> float:
    """Return the mean loss per token over the held-out batches of all ranks."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    token_count = torch.zeros((), device=device)
    for inputs, targets in batches:
        inputs = inputs.to(device)
        targets = targets.to(device)
        with autocast():
            loss_sum += model(inputs, targets, reduction="sum")
        token_count += (targets != PADDING).sum()
    dist.all_reduce(loss_sum)
    dist.all_reduce(token_count)
    model.train()
    return (loss_sum / token_count).item()


if __name__ == "__main__":
    exits.run(main)
