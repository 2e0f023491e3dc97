r"""Train a language model with fully sharded data parallelism (FSDP).

Each rank holds a shard of every weight, gradient and optimizer state: its rows of each tensor. Just
before a block computes, the ranks exchange their shards of it (all-gather). After the block they
free what they received. In backward, the gradients are summed and sharded in one operation
(reduce-scatter), and each rank updates the rows that it holds. With N ranks, weights, gradients and
optimizer state take 1/N of the memory of DDP. In fp32 a rank sends 12 bytes per weight and step
instead of 8. In bf16, the default on GPUs, it sends 8: weights travel in bf16, gradients in fp32.

    laptop    torchrun --standalone --nproc_per_node=2 06_fsdp_zero/train_fsdp.py
    one node  torchrun --standalone --nproc_per_node=8 06_fsdp_zero/train_fsdp.py --model llama-8b \
                  --checkpointing full --compile
    cluster   the same on every node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB
              --replicate 4 shards within each of the 4 nodes and averages gradients between them
              (HSDP)

What to look at: with --dtype fp32 the losses are those of 05_ddp/train.py. The last lines check how
many bytes each rank holds; --json lists them by rank.

Previous: 05_ddp/train.py, zero_from_scratch.py. Next: launch/.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch
import torch.distributed as dist
from _train_fsdp import check_shards, compile_loss, sharding_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.utils import clip_grad_norm_

from common import cli, hardware, report, runtime
from training import checkpoint, flags, micro_batch, optim
from training.batches import PADDING, Batches
from training.digest import digest
from training.meter import Meter
from training.training_objects import TrainingObjects


# YOURS: replace this function to train your own model on your own data.
def load_training_objects(args, rank, world_size, device):
    """Return the model without memory, the batches of this rank, and what must match on resume.

    The model is on the meta device: it has shapes and no data. No rank ever holds the full model.
    training/training_objects.py says what the model and the batches must do.
    """
    # YOURS: these modules are for the language model only.
    from lm import balance, data, shapes, weights
    from lm.activation_checkpointing import checkpoint_blocks
    from lm.loss import use_loss
    from lm.sample import sample_text

    shapes.use_recipe(args)  # --seq-len, --lr and --warmup-steps, if they are not given
    # Raise for a model that is unknown or too large, before the text is tokenized.
    held_on = "cpu" if args.cpu_offload else device
    weights.check_model(args.model, held_on, copies=args.replicate)
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir, args.eval_data)
    train_set, held_out_set = data.sequences(corpus, args.seq_len)
    config = weights.load_config(args.model, corpus.vocab_size, args.seq_len, experts=True)
    model = weights.build(args.model, config, seed=args.seed, device="meta")
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


# YOURS: the layers of your model, its loss, and the initial values of its weights.
def shard_model(model, args, device) -> None:
    """Shard the model over the ranks, then allocate and initialize this rank's shards."""
    options = {
        "mesh": sharding_mesh(device, args.replicate),  # which ranks share one copy of the model
        # Weights are gathered in args.dtype. Gradients are averaged in fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=runtime.DTYPES[args.dtype],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        # None frees the gathered weights of each group after its forward, but not those of the root
        # module, which backward needs first.
        "reshard_after_forward": None if args.reshard_after_forward == "on" else False,
        "offload_policy": OffloadPolicy(),
    }
    if args.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    # Each block is gathered, computed and freed as one. Compile a block before it is sharded.
    for block in model.model.layers.values():
        if args.compile:
            block.compile(fullgraph=True)
        fully_shard(block, **options)
    if args.compile and args.loss == "plain":
        compile_loss(model)
    if not model.config.tie_word_embeddings:
        # Two groups, so that embedding and head are not gathered at the same time.
        fully_shard(model.model.embed_tokens, **options)
        # The gradient of an embedding does not depend on its weight: backward need not gather it.
        model.model.embed_tokens.set_unshard_in_backward(False)
        # Backward starts with the head, so it stays gathered after forward.
        head_options = options | {"reshard_after_forward": False}
        fully_shard([model.model.norm, model.lm_head], **head_options)
    # The root module. In a tied model it is one more group: embedding, final norm and head.
    fully_shard(model, **options)

    # YOURS: this module is for the language model only.
    from lm import weights

    weights.materialize(
        model, args.model, seed=args.seed, device="cpu" if args.cpu_offload else device
    )


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    parser.add_argument(
        "--replicate",
        type=cli.positive_int,
        default=1,
        help="copies of the model; 2 or more: HSDP",
    )
    parser.add_argument(
        "--reshard-after-forward",
        choices=("on", "off"),
        default="on",
        help="off: keep gathered blocks until backward",
    )
    parser.add_argument(
        "--cpu-offload",
        action="store_true",
        help="keep weights, gradients and optimizer state in CPU memory",
    )
    args = parser.parse_args()
    if args.dtype == "fp16":
        raise exits.UserError(
            "--dtype fp16: 05_ddp/train.py has a GradScaler; use bf16 or fp32 here"
        )
    runtime.seed_all(args.seed, args.deterministic)

    # 1. Join the job, as 05_ddp/train.py does.
    device = runtime.init_process_group(args.device)
    rank, world_size, _ = runtime.ranks()
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()

    # 2. Model and data. Each rank holds its shards in fp32; blocks are gathered in args.dtype.
    objects = load_training_objects(args, rank, world_size, device)
    model = objects.model
    batches = objects.batches
    shard_model(model, args, device)
    optimizer, scheduler = optim.adamw(
        model,
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
        schedule=args.lr_schedule,
    )
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
        model,
        optimizer,
        batches,
        device,
        estimate_flags="--zero 3",
    )
    held_out = batches.evaluation()
    start_step = 0
    if args.resume:
        start_step = checkpoint.resume(run, model, optimizer, scheduler)
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
    steps = range(start_step + 1, args.steps + 1)
    for step in report.progress_bar(steps, "training", initial=start_step, unit="step"):
        # Dropout draws other numbers on each rank and step, and the same ones after a resume.
        runtime.seed_step(args.seed, step, rank)
        if objects.start_step:
            objects.start_step(step)
        step_loss = torch.zeros((), device=device)
        for micro_step in range(1, batches.accumulation_steps + 1):
            inputs, targets = meter.next(stream)  # on the device; measures the wait for data
            # Each backward reduce-scatters, because full gradients would not fit. With --replicate,
            # only the last backward of a step all-reduces the shards between the copies.
            is_last_micro_step = micro_step == batches.accumulation_steps
            model.set_requires_all_reduce(is_last_micro_step)
            with meter.forward():
                loss = model(inputs, targets) / batches.accumulation_steps
            loss.backward()
            step_loss += loss.detach()

        grad_norm = clip_grad_norm_(model.parameters(), args.clip_norm)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        values = objects.end_step() if objects.end_step else {}

        # Log, evaluate and save. All three contain collectives, so every rank must take part.
        stop = runtime.stop_requested()  # the same on all ranks
        is_last_step = stop or step == args.steps
        is_save_step = args.save_every and step % args.save_every == 0
        save = is_last_step or is_save_step or runtime.save_requested()
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # the sum over ranks; divided by world_size, the mean
            meter.log(step, step_loss / world_size, grad_norm, lr, **values)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            val_loss = evaluate(model, held_out, device)
            sample = objects.sample() if objects.sample else None
            meter.log_eval(step, val_loss, sample)
        if save:
            state = checkpoint.training_state(step, model, optimizer, scheduler)
            run.save(step, state, objects.config_json)
            meter.save_plot()
        if stop:
            break
    run.wait()  # until --async-save has written the last checkpoint
    if stop:
        meter.print_stop(stop, step, args.keep)

    # 5. Check what this chapter promises: each rank holds its shards in fp32 and nothing else.
    bytes_per_rank = check_shards(model, optimizer, runtime.DTYPES[args.dtype], args.replicate)
    digests = runtime.all_gather(digest(model))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    if world_size > 1:
        runtime.print0(f"checked: all {world_size} ranks have the same weights, bit for bit")

    meter.finish(
        step,
        model=objects.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        json_path=args.json,
        weights_sha256=digests[0],
        **bytes_per_rank,
    )
    runtime.shutdown()
    return exits.REQUEUE_EXIT_CODE if stop and step < args.steps else 0


@torch.no_grad()
def evaluate(model, batches, device) -> float:
    """Return the mean loss per token over the held-out batches of all ranks."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    token_count = torch.zeros((), device=device)
    for inputs, targets in batches:
        inputs = inputs.to(device)
        targets = targets.to(device)
        loss_sum += model(inputs, targets, reduction="sum")
        token_count += (targets != PADDING).sum()
    dist.all_reduce(loss_sum)
    dist.all_reduce(token_count)
    model.train()
    return (loss_sum / token_count).item()


if __name__ == "__main__":
    exits.run(main)
