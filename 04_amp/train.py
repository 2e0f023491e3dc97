"""Train a language model on one GPU in mixed precision (AMP).

Tensor cores multiply bf16 and fp16 many times faster than fp32, and activations take a little over
half the memory. Automatic mixed precision keeps weights and optimizer state in fp32, so that small
updates are not rounded away, and autocast runs the matmuls in low precision. bf16 has the range of
fp32 and needs nothing else. In fp16 small gradients would become zero. So GradScaler multiplies the
loss by a large factor, divides the gradients by it before the step, and skips a step that
overflowed.

    laptop    python 04_amp/train.py    (the model is nano)
    one GPU   python 04_amp/train.py    (the model is llama-124m, compiled)
    cluster   this script uses one GPU; 05_ddp/train.py is the same program on many

What to look at: tokens/s and memory beside those of --dtype fp32, at almost the same losses. With
--dtype fp16, the skipped steps (few CPUs have fp16: add --steps 5 there). The last line checks the
precision of the matmuls and of the weights.

Previous: 03_linear_regression/train.py. Next: 05_ddp/train.py.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch
from torch.nn.utils import clip_grad_norm_

from common import hardware, report, runtime
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
    weights.check_model(args.model, device, copies=1)
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

    # 1. Choose the device. There is one process; 05_ddp/train.py has more.
    rank = 0
    world_size = 1
    device = runtime.single_device(args.device)
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()

    # 2. Model and data. Weights stay in fp32; autocast runs the matmuls in args.dtype.
    objects = load_training_objects(args, rank, world_size, device)
    model = objects.model
    batches = objects.batches
    autocast = partial(
        torch.autocast, device.type, runtime.DTYPES[args.dtype], enabled=args.dtype != "fp32"
    )
    # Evaluation and checkpoints use `model`, which is not compiled.
    train_model = torch.compile(model) if args.compile else model
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

    # 3. Checkpoints: resume where the last run stopped.
    settings = flags.settings(args, **objects.must_match)  # must not change on --resume
    run = checkpoint.Run(args, settings=settings)
    # --micro-batch-size, or the largest that fits: this runs forward and backward, and leaves
    # weights, optimizer and random numbers as they are.
    batches.micro_batch_size = micro_batch.choose(
        args,
        train_model,
        optimizer,
        batches,
        device,
        autocast=autocast,
    )
    held_out = batches.evaluation()
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
        runtime.seed_step(args.seed, step)  # dropout draws the same numbers after a resume
        if objects.start_step:
            objects.start_step(step, autocast)
        step_loss = torch.zeros((), device=device)
        for _ in range(batches.accumulation_steps):
            inputs, targets = meter.next(stream)  # on the device; measures the wait for data
            with meter.forward(), autocast():
                loss = train_model(inputs, targets) / batches.accumulation_steps
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

        # Log, evaluate and save.
        stop = runtime.stop_requested()
        is_last_step = stop or step == args.steps
        is_save_step = args.save_every and step % args.save_every == 0
        save = is_last_step or is_save_step or runtime.save_requested()
        if save or step == 1 or step % args.log_every == 0:
            skipped_steps = step - scheduler.last_epoch  # last_epoch counts scheduler.step()
            meter.log(step, step_loss, grad_norm, lr, skipped_steps, scale, **values)
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

    # 5. Check what this chapter promises: low precision in the matmuls, fp32 in all that is kept.
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        for value in optimizer.state[parameter].values():
            assert value.dtype == torch.float32
    with autocast():
        product = torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)
    assert product.dtype == runtime.DTYPES[args.dtype]
    runtime.print0(
        f"checked: matmuls in {product.dtype}, weights and optimizer state in {torch.float32}"
    )

    meter.finish(
        step,
        model=objects.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        json_path=args.json,
        skipped_steps=step - scheduler.last_epoch,
        weights_sha256=digest(model),
    )
    return exits.REQUEUE_EXIT_CODE if stop and step < args.steps else 0


@torch.no_grad()
def evaluate(model, batches, autocast, device) -> float:
    """Return the mean loss per token over the held-out batches."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    token_count = torch.zeros((), device=device)
    for inputs, targets in batches:
        inputs = inputs.to(device)
        targets = targets.to(device)
        with autocast():
            loss_sum += model(inputs, targets, reduction="sum")
        token_count += (targets != PADDING).sum()
    model.train()
    return (loss_sum / token_count).item()


if __name__ == "__main__":
    exits.run(main)
