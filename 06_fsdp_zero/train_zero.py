"""Train a language model with DeepSpeed's ZeRO: a number says what the ranks share, an engine does the rest.

--stage 1 gives each rank a part of the optimizer state, 2 of the gradients too, 3 of the weights too; 0 is plain data
parallelism. Here a dictionary configures DeepSpeed. Its engine takes over backward, the sum over the ranks, clipping
and the optimizer's step. --offload moves optimizer state, or weights too, to the CPU's memory.

    laptop    torchrun --nproc_per_node=2 06_fsdp_zero/train_zero.py
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/train_zero.py --model llama-8b --stage 3 --checkpointing full
              deepspeed --num_gpus=8 06_fsdp_zero/train_zero.py --model llama-8b --stage 3 --offload optimizer
    cluster   HOSTFILE=hosts launch/deepspeed/hostfile.sh --stage 3 --run-dir /shared/run, on every node; or torchrun

Look for: with --dtype fp32 the losses of 05_ddp/train.py at every stage, and the bytes that each rank holds: its part
and no more. --resume works on any number of ranks. Before: zero_from_scratch.py, train_fsdp.py. Next: launch/.
"""

import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _train_zero as helper

from common import exits, hardware, runtime
from lm import data, flags, metrics, model, optim, shapes, weights
from lm.activation_checkpointing import checkpoint_blocks


def configure(args, config: shapes.Config, batches: data.Batches, universal: bool) -> dict:
    """DeepSpeed's configuration, all of it."""
    parameters_per_block = shapes.parameter_count(config) // config.num_hidden_layers
    return {
        "train_micro_batch_size_per_gpu": batches.micro_batch_size,
        # backward divides the loss by it
        "gradient_accumulation_steps": batches.accumulation_steps,
        "gradient_clipping": 0.0 if args.clip_norm == math.inf else args.clip_norm,
        # weights stay in fp32
        "torch_autocast": {"enabled": args.dtype == "bf16", "dtype": "bfloat16"},
        "zero_optimization": {
            "stage": args.stage,
            # elements that travel together: the default of 5e8 makes buffers larger than a small model
            "reduce_bucket_size": parameters_per_block,
            "allgather_bucket_size": 2 * parameters_per_block,
            # stage 3: gather one block ahead; forget a block after its forward; keep only vectors whole
            "stage3_prefetch_bucket_size": parameters_per_block,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": config.hidden_size + 1,
            "offload_optimizer": {"device": "none" if args.offload == "none" else "cpu"},
            "offload_param": {"device": "cpu" if args.offload == "params" else "none"},
        },
        # torch's AdamW, which is compiled already; DeepSpeed's own needs a compiler at start
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},  # or it would wait for the GPU twice a step
        "checkpoint": {"load_universal": universal},
    }


def build_model(
    deepspeed, engine_config: dict, args, config: shapes.Config, device: torch.device
) -> model.Transformer:
    """The model with the weights of one process. At stage 3 no rank ever holds the whole of it."""
    if args.stage < 3:
        net = weights.build(args.model, config, seed=args.seed, device=device)
    else:
        # cuts each parameter as soon as it is made
        with deepspeed.zero.Init(config_dict_or_path=engine_config):
            net = model.Transformer(config)
        helper.set_weights(deepspeed, net, args.model, args.seed)  # one tensor at a time is whole
        net.to(device)  # RoPE's tables, which were made on the CPU
    checkpoint_blocks(net, args.checkpointing)  # backward computes again what is not kept
    return net


def train_step(engine, stream, meter: metrics.Meter) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step of the engine; returns the mean loss of this rank's micro-batches and the gradient norm."""
    losses, grad_norm = [], None
    for _ in range(engine.gradient_accumulation_steps()):
        inputs, targets = meter.next(stream)
        with meter.forward():
            loss = engine(inputs, targets)
        # the engine scales the loss, and reduces the gradients when its buckets are full
        engine.backward(loss)
        # stage 0 clips in step, and does not report the norm
        if engine.zero_optimization_stage() == 0:
            grad_norm = get_total_norm([parameter.grad for parameter in engine.module.parameters()])
        # after each micro-batch; only the last one of a step clips, updates and moves the schedule
        engine.step()
        losses.append(loss.detach())
    if grad_norm is None:
        grad_norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32)
    return torch.stack(losses).mean(), grad_norm


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    parser.add_argument(
        "--stage", type=int, choices=range(4), default=2, help="what the ranks share"
    )
    parser.add_argument(
        "--offload", choices=("none", "optimizer", "params"), default="none", help="params: both"
    )
    parser.add_argument(
        "--local_rank", type=int, help="from the deepspeed launcher; its LOCAL_RANK is read instead"
    )
    args = parser.parse_args()
    shapes.read_config(args.model)  # raises for an unknown model
    helper.check_flags(args)
    runtime.seed_all(args.seed, args.deterministic)

    # 1 Processes. As in chapter 05; DeepSpeed takes the process group that is there.
    device = runtime.init_process_group(args.device)
    rank, world_size, _ = runtime.ranks()
    args.dtype = hardware.choose_dtype(args.dtype, device)
    deepspeed = helper.import_deepspeed(device)
    runtime.catch_stop_signals()

    # 2 The batch: a function of --seed and the step alone. Rank r of N reads the r-th of N equal parts.
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir)
    batches = data.Batches(
        *data.sequences(corpus, args.seq_len), args, rank=rank, world_size=world_size
    )
    held_out = batches.evaluation()
    runtime.print0(
        f"{args.model}, ZeRO-{args.stage}, {args.dtype}, {world_size} x {hardware.device_name(device)}"
    )

    # 3 The run: its folder, and the step at which it stood. A step saved on other ranks is converted first.
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    settings = flags.settings(args, data=corpus.sha256, model=repr(config)) | {
        "--stage": args.stage
    }
    run = helper.Run(args, settings=settings)
    newest = run.find_intact() if args.resume else None
    universal = helper.make_universal(newest, args.stage) if newest else None

    # 4 The model, and the engine that owns it from here on.
    engine_config = configure(args, config, batches, universal is not None)
    net = build_model(deepspeed, engine_config, args, config, device)
    # stage 3 has left flat parts
    dimensions = {p: len(getattr(p, "ds_shape", p.shape)) for p in net.parameters()}
    matrices = [parameter for parameter in dimensions if dimensions[parameter] >= 2]
    vectors = [parameter for parameter in dimensions if dimensions[parameter] < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(
        optimizer, partial(optim.warmup_cosine, warmup_steps=args.warmup_steps, steps=args.steps)
    )
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=scheduler, config=engine_config
    )
    # those of DeepSpeed would wait torch's own 30 minutes
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(runtime.timeout(), group)
    if args.compile:
        engine.compile()
    start_step = helper.load(newest, engine, universal) if newest else 0
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
        lr = optimizer.param_groups[0]["lr"]
        step_loss, grad_norm = train_step(engine, stream, meter)

        stop = runtime.stop_requested()  # the same answer on all ranks, so that all save
        save = stop or step == args.steps or (args.save_every and step % args.save_every == 0)
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # sums: a rank's loss is the mean of its own share
            meter.log(step, step_loss / world_size, grad_norm, lr)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            meter.log_eval(step, evaluate(engine, held_out, device))
        if save:
            run.save(step, engine, shapes.config_json(config))
        if stop:
            break
    if stop:
        runtime.print0(
            f"signal {stop}: saved at step {step}; the same command with --resume goes on"
        )

    # 6 What was promised, checked: a rank holds its part of what the stage cuts and no more, and all gather one model.
    # At stage 3 the last forward leaves parameters gathered. A save partitions them again, and
    # --keep 0 saves nothing.
    engine.empty_partition_cache()
    held = helper.check_parts(engine, args.stage)
    digests = runtime.all_gather(helper.digest(deepspeed, net))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    runtime.print0("checked: each rank holds its part of what the stage shares, and no more")
    runtime.print0(f"checked: all {world_size} ranks have the same weights to the bit")
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
def evaluate(engine, batches, device) -> float:
    """Mean loss per token of the held-out sequences."""
    engine.eval()
    total = torch.zeros(2, device=device)  # sum of losses, number of tokens
    for inputs, targets in batches:
        targets = targets.to(device)
        loss = engine(inputs.to(device), targets)
        tokens = (targets != data.PADDING).sum()
        # padding alone has no mean
        total += torch.stack((torch.where(tokens > 0, loss * tokens, 0.0), tokens))
    dist.all_reduce(total)  # sums, not means: a rank may have read fewer tokens than the others
    engine.train()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    exits.run(main)
