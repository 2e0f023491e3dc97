r"""Train a language model with DeepSpeed's ZeRO, which shards its state over the ranks.

--stage says what is sharded: 1 is the optimizer state, 2 adds the gradients and 3 the weights. At
stage 0 every rank holds everything, as with DDP. A dictionary configures DeepSpeed. Its engine runs
backward, averages the gradients over the ranks, clips them and takes the optimizer step. --offload
keeps the optimizer state, or the weights as well, in CPU memory.

    laptop    torchrun --standalone --nproc_per_node=2 06_fsdp_zero/train_zero.py
    one node  torchrun --standalone --nproc_per_node=8 06_fsdp_zero/train_zero.py --model llama-8b \
                  --stage 3 --checkpointing full
              deepspeed --num_gpus=8 06_fsdp_zero/train_zero.py --model llama-8b --stage 3 \
                  --offload optimizer
    cluster   run HOSTFILE=hosts launch/deepspeed/hostfile.sh --stage 3 --run-dir /shared/run on
              every node, or the first command with --nnodes as in train_fsdp.py

What to look at: with --dtype fp32 the losses are those of 05_ddp/train.py at every stage. The last
lines check how many bytes each rank holds; --json lists them by rank. --resume works on any number
of ranks.

Previous: train_fsdp.py, zero_from_scratch.py. Next: launch/.
"""

import math
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _train_zero as helper
import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR

from common import hardware, report, runtime
from lm import data, shapes, weights, zero
from lm.activation_checkpointing import checkpoint_blocks
from lm.loss import use_loss
from lm.model import Transformer
from training import flags, micro_batch, optim
from training.batches import PADDING, Batches
from training.meter import Meter
from training.training_objects import TrainingObjects


# YOURS: replace this function to train your own model on your own data.
def load_training_objects(args, rank, world_size, device):
    """Return the model, the batches of this rank, and what must match on resume.

    At stage 3 the model is sharded already: no rank ever holds the full model.
    training/training_objects.py says what the model and the batches must do.
    """
    # Raise for a model that is unknown or too large, before the text is tokenized.
    shapes.use_recipe(args)  # --seq-len, --lr and --warmup-steps, if they are not given
    helper.check_model_fits(args, world_size, device)
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir, args.eval_data)
    train_set, held_out_set = data.sequences(corpus, args.seq_len)
    config = weights.load_config(args.model, corpus.vocab_size, args.seq_len)
    batches = Batches(train_set, held_out_set, args, rank=rank, world_size=world_size)
    # DeepSpeed must know --micro-batch-size now, before there is a model to measure. Without the
    # flag, a micro-batch has about as many tokens as keep a GPU busy.
    on_gpu = micro_batch.measures_on(device)
    batches.micro_batch_size = micro_batch.fixed(
        args,
        batches,
        device,
        most=8192 // args.seq_len if on_gpu else None,
        estimate_flags=f"--framework deepspeed --zero {args.stage}",
    )
    if args.stage == 3:
        model = build_sharded(args, config, batches, device)
    else:
        model = weights.build(args.model, config, seed=args.seed, device=device)
    checkpoint_blocks(model, args.checkpointing)  # backward recomputes activations
    use_loss(model, args.loss)  # plain, or chunk by chunk
    return TrainingObjects(
        model=model,
        name=args.model,
        batches=batches,
        must_match={
            "data": corpus.sha256,
            "model": repr(config),
            "weights of --model": weights.fingerprint(args.model),
        },
        flops_per_token=shapes.flops_per_token(config, args.seq_len),
        config_json=shapes.config_json(config),
    )


def build_sharded(args, config, batches, device):
    """Return a model for stage 3, with this rank's shards of the weights on `device`."""
    deepspeed = zero.import_deepspeed(device)
    with deepspeed.zero.Init(config_dict_or_path=deepspeed_config(args, config, batches)):
        model = Transformer(config)  # each weight is sharded as soon as it is created
    zero.fill_weights(model, args.model, args.seed)
    model.to(device)  # the tables of RoPE, which are no parameters
    return model


# YOURS: the sizes that depend on the model.
def deepspeed_config(args, config, batches) -> dict:
    """Return the configuration of DeepSpeed."""
    parameters_per_block = shapes.parameter_count(config) // config.num_hidden_layers
    return {
        "train_micro_batch_size_per_gpu": batches.micro_batch_size,
        # engine.backward divides the loss by this number.
        "gradient_accumulation_steps": batches.accumulation_steps,
        "gradient_clipping": 0.0 if args.clip_norm == math.inf else args.clip_norm,
        # The matmuls run in bf16. Weights stay in fp32.
        "torch_autocast": {
            "enabled": args.dtype == "bf16",
            "dtype": "bfloat16",
            # Average gradients in fp32, as DDP and FSDP here do. By default DeepSpeed sends the
            # gradients of each nn.Linear in bf16, and at stage 3 also its weights. That halves the
            # bytes, and each rank's gradient is rounded once more before the sum.
            "lower_precision_safe_modules": [],
        },
        "zero_optimization": {
            "stage": args.stage,
            # How many numbers are sent together. The default of 5e8 is for large models: its
            # buffers would be larger than a small model.
            "reduce_bucket_size": parameters_per_block,
            "allgather_bucket_size": 2 * parameters_per_block,
            # Stage 3: gather one block ahead of its use, and free a block after its forward.
            "stage3_prefetch_bucket_size": parameters_per_block,
            "stage3_max_reuse_distance": 0,
            # Parameters with fewer numbers stay gathered: here all vectors.
            "stage3_param_persistence_threshold": config.hidden_size + 1,
            "offload_optimizer": {"device": "none" if args.offload == "none" else "cpu"},
            "offload_param": {"device": "cpu" if args.offload == "params" else "none"},
        },
        # Take the AdamW of torch. DeepSpeed's own is compiled when the script starts.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Do not time the steps: each measurement would wait for the GPU.
        "timers": {"throughput": {"enabled": False}},
    }


def make_engine(model, args, batches, device, *, load_universal):
    """Return DeepSpeed's engine, which owns the model, the optimizer and the schedule.

    `load_universal` says whether a checkpoint in universal form will be loaded.
    """
    deepspeed = zero.import_deepspeed(device)
    # These are the groups of optim.adamw, which does not know the shapes of sharded weights.
    matrices = []
    vectors = []
    for parameter in model.parameters():
        if len(helper.full_shape(parameter)) >= 2:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    factor = partial(
        optim.lr_factor,
        schedule=args.lr_schedule,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
    )

    config = deepspeed_config(args, model.config, batches)
    config["checkpoint"] = {"load_universal": load_universal}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=LambdaLR(optimizer, factor),
        config=config,
    )
    helper.set_timeouts()
    if args.compile:
        engine.compile()
    return engine


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="what is sharded")
    parser.add_argument(
        "--offload",
        choices=("none", "optimizer", "params"),
        default="none",
        help="keep the optimizer state in CPU memory; params: the weights as well",
    )
    parser.add_argument(
        "--local_rank",
        type=int,
        help="set by the deepspeed launcher; not used: the script reads LOCAL_RANK",
    )
    args = parser.parse_args()
    helper.check_flags(args)
    runtime.seed_all(args.seed, args.deterministic)

    # 1. Join the job, as 05_ddp/train.py does. DeepSpeed uses the same process group.
    device = runtime.init_process_group(args.device)
    rank, world_size, _ = runtime.ranks()
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()

    # 2. Model and data.
    objects = load_training_objects(args, rank, world_size, device)
    model = objects.model
    batches = objects.batches
    held_out = batches.evaluation()
    runtime.print0(
        f"{objects.name}, ZeRO-{args.stage}, {args.dtype} matmuls, "
        f"{world_size} x {hardware.device_name(device)}"
    )

    # 3. Checkpoints: resume where the last run stopped, on any number of ranks.
    settings = flags.settings(args, **objects.must_match)  # must not change on --resume
    settings["--stage"] = args.stage
    run = helper.Run(args, settings=settings)
    saved = run.find_intact() if args.resume else None
    # If another number of ranks has saved it, DeepSpeed loads it only in its universal form. The
    # engine has to know that when it is created.
    universal = helper.make_universal(saved, args.stage) if saved else None
    engine = make_engine(model, args, batches, device, load_universal=universal is not None)
    start_step = 0
    if saved:
        start_step = helper.resume(engine, saved, universal)
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
        lr = engine.get_lr()[0]
        step_loss = torch.zeros((), device=device)
        for _ in range(batches.accumulation_steps):
            inputs, targets = meter.next(stream)  # on the device; measures the wait for data
            with meter.forward():
                loss = engine(inputs, targets)
            engine.backward(loss)
            if args.stage == 0:
                # Stage 0 does not report the norm, and clips the gradients in step().
                grad_norm = get_total_norm([parameter.grad for parameter in model.parameters()])
            # Call step() after every micro-batch. The engine counts them: after the last one of a
            # step it clips, updates the weights, moves the schedule and zeroes the gradients.
            engine.step()
            step_loss += loss.detach() / batches.accumulation_steps
        if args.stage > 0:
            grad_norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32)

        # Log, evaluate and save. All three contain collectives, so every rank must take part.
        stop = runtime.stop_requested()  # the same on all ranks
        is_last_step = stop or step == args.steps
        is_save_step = args.save_every and step % args.save_every == 0
        save = is_last_step or is_save_step or runtime.save_requested()
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # the sum over ranks; divided by world_size, the mean
            meter.log(step, step_loss / world_size, grad_norm, lr)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            val_loss = evaluate(engine, held_out, device)
            meter.log_eval(step, val_loss)
        if save:
            run.save(step, engine, objects.config_json)
            meter.save_plot()
        if stop:
            break
    if stop:
        meter.print_stop(stop, step, args.keep)

    # 5. Check what this chapter promises: each rank holds its shards in fp32 and nothing else.
    engine.empty_partition_cache()  # at stage 3 the last evaluation has left gathered weights
    bytes_per_rank = helper.check_shards(engine, args.stage)
    digests = runtime.all_gather(helper.digest(model))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    if world_size > 1:
        runtime.print0(f"checked: all {world_size} ranks have the same weights, bit for bit")

    meter.finish(
        step,
        model=objects.name,
        parameters=sum(math.prod(helper.full_shape(parameter)) for parameter in model.parameters()),
        json_path=args.json,
        weights_sha256=digests[0],
        **bytes_per_rank,
    )
    runtime.shutdown()
    return exits.REQUEUE_EXIT_CODE if stop and step < args.steps else 0


@torch.no_grad()
def evaluate(engine, batches, device) -> float:
    """Return the mean loss per token over the held-out batches of all ranks."""
    engine.eval()
    loss_sum = torch.zeros((), device=device)
    token_count = torch.zeros((), device=device)
    for inputs, targets in batches:
        inputs = inputs.to(device)
        targets = targets.to(device)
        loss_sum += engine(inputs, targets, reduction="sum")
        token_count += (targets != PADDING).sum()
    dist.all_reduce(loss_sum)
    dist.all_reduce(token_count)
    engine.train()
    return (loss_sum / token_count).item()


if __name__ == "__main__":
    exits.run(main)
