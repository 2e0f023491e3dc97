"""Train a language model with DeepSpeed's ZeRO: a number says what the ranks share, an engine does the rest.

--stage 1 gives each rank a part of the optimizer state, 2 a part of the gradients too, 3 a part of the weights too; 0
is plain data parallelism. zero_from_scratch.py shows how. Here a dictionary configures DeepSpeed. Its engine takes over
backward, the sum over the ranks, clipping, the loss scale of fp16 and the optimizer's step. --offload moves optimizer
state, or weights as well, from the GPU to the CPU's memory, and with --nvme FOLDER to files on a fast disk. In fp32 the
losses stay those of 05_ddp/train.py.

    laptop    torchrun --nproc_per_node=2 06_fsdp_zero/train_zero.py
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/train_zero.py --model llama-8b --stage 3 --checkpointing full
              deepspeed --num_gpus=8 06_fsdp_zero/train_zero.py --model llama-8b --stage 3 --offload optimizer
    cluster   HOSTFILE=hosts launch/deepspeed/hostfile.sh --stage 3 --run-dir /shared/run, on every node; or torchrun

Look for: with --dtype fp32 the losses of 05_ddp/train.py at every stage, and the last check: the bytes that each rank
holds are its part and no more. --write-config PATH writes the dictionary, for use elsewhere. With --resume a run goes
on, also on another number of ranks. One with --nvme cannot: DeepSpeed loads the files of such a run, and not AdamW's
step counters. It ends with its weights, as a Hugging Face folder. Before: zero_from_scratch.py, train_fsdp.py. Next:
launch/.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint as recompute_in_backward

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _train_zero_bytes import bytes_by_rank, told
from _train_zero_checkpoint import load, make_universal, save, saved_ranks
from _train_zero_nvme import claim_nvme, end_early, give_back_nvme
from _train_zero_setup import check_flags, import_deepspeed, parameter_groups, same_timeouts, warmup_cosine

from old import checkpoint, cli, data, exits, hardware, metrics, model, run_dir, runtime, shapes


def configure(args, shape: shapes.Config, micro_batch_size: int, accumulation_steps: int, universal: bool) -> dict:
    """All that DeepSpeed is told."""
    parameters_per_block = shapes.parameter_count(shape) // shape.num_hidden_layers
    buffers = {"max_in_cpu": 0, "buffer_size": max(shape.vocab_size, shape.intermediate_size) * shape.hidden_size}
    place, nowhere = {"device": "nvme" if args.nvme else "cpu", "nvme_path": args.nvme}, {"device": "none"}
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,  # backward divides the loss by it
        "gradient_clipping": 0.0 if args.clip_norm == math.inf else args.clip_norm,
        "torch_autocast": {"enabled": args.dtype == "bf16", "dtype": "bfloat16"},  # weights stay in fp32
        # weights in fp16, a copy of them in fp32 beside the optimizer state; halve the scale at the first overflow
        "fp16": {"enabled": args.dtype == "fp16", "hysteresis": 1, "loss_scale_window": 2000},
        "zero_optimization": {
            "stage": args.stage,
            # elements that travel together: the default of 5e8 makes buffers larger than a small model
            "reduce_bucket_size": parameters_per_block,
            "allgather_bucket_size": 2 * parameters_per_block,
            # stage 3: gather one block ahead; forget a block after its forward; keep only vectors whole
            "stage3_prefetch_bucket_size": parameters_per_block,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": shape.hidden_size + 1,
            "offload_optimizer": nowhere if args.offload == "none" else place,
            "offload_param": {**place, **buffers} if args.offload == "params" else nowhere,
            "sub_group_size": parameters_per_block if args.nvme else 10**9,  # how much AdamW updates at a time
        },
        # torch's AdamW, which is compiled already; DeepSpeed's own needs a compiler at start
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
    }


def build_model(deepspeed, config: dict, args, shape: shapes.Config, device: torch.device) -> model.Transformer:
    """The model with the weights of one process. At stage 3 no rank ever holds the whole of it."""
    if args.stage < 3:
        net = model.build(args.model, shape, seed=args.seed, device=device)
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):  # cuts each parameter as soon as it is made
            net = model.Transformer(shape)
        model.set_weights(net, args.model, seed=args.seed)  # one tensor at a time is whole
        net.to(device)  # fills RoPE's tables again: in fp16, zero.Init has rounded their angles
    for block in net.model.layers.values() if args.checkpointing != "none" else ():
        # not model.checkpoint_blocks, which wraps: DeepSpeed's files would have names of other parameters
        kept = model.what_is_kept(block, args.checkpointing)
        block.forward = partial(recompute_in_backward, block.forward, use_reentrant=False, **kept)
    return net


def train_step(engine, batches, device: torch.device, meter: metrics.Meter) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step of the engine; returns the mean loss of this rank's micro-batches and the gradient norm."""
    step_loss, grad_norm = torch.zeros((), device=device), None
    for _ in range(engine.gradient_accumulation_steps()):
        with meter.phase("data"):
            inputs, targets = (t.to(device, non_blocking=True) for t in next(batches))
        with meter.phase("forward"):
            loss = engine(inputs, targets)
        engine.backward(loss)  # the engine scales the loss, and reduces the gradients when its buckets are full
        if engine.zero_optimization_stage() == 0:  # stage 0 clips in step, and does not report the norm
            grad_norm = get_total_norm([parameter.grad for parameter in engine.module.parameters()])
        engine.step()  # after each micro-batch; only the last one of a step clips, updates and moves the schedule
        step_loss += loss.detach() / engine.gradient_accumulation_steps()
    if grad_norm is None:
        grad_norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32, device=device)
    return step_loss, grad_norm


def main() -> int:
    parser = cli.training_parser(__doc__)
    add = parser.add_argument
    shared = "what the ranks share: 1: optimizer state, 2: gradients too, 3: weights too"
    add("--stage", identity=True, type=int, choices=range(4), default=2, help=shared)
    add("--nvme", identity=True, metavar="FOLDER", help="what --offload names goes to files there, at --stage 3")
    add("--offload", choices=("none", "optimizer", "params"), default="none", help="to CPU memory; params: both")
    add("--write-config", type=cli.writable_file, metavar="PATH", help="write DeepSpeed's configuration as JSON")
    add("--local_rank", type=int, help="from the deepspeed launcher; its LOCAL_RANK is read instead")
    args = parser.parse_args()
    check_flags(args)
    runtime.seed(args.seed, args.deterministic)
    device = runtime.init_process_group(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args.dtype = hardware.choose_dtype(args.dtype, device)
    deepspeed = import_deepspeed(device, args)  # it takes the process group that is there
    if args.dtype == "fp32":
        runtime.exact_fp32(device)  # some containers set variables that turn fp32 products into tf32
    runtime.catch_stop_signals()
    micro_batch_size, accumulation_steps = cli.split_batch(args.global_batch_size, args.micro_batch_size, world_size)
    runtime.say(f"{args.model}, ZeRO-{args.stage}, {args.dtype}, {world_size} x {hardware.device_name(device)}")

    corpus = data.load_corpus(args.data, args.tokenizer)
    shape = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    claim_nvme(args.nvme, shape)
    held_out = data.eval_batches(
        corpus.held_out, seq_len=args.seq_len, batch_size=micro_batch_size, rank=rank, world_size=world_size
    )
    folder = run_dir.claim(
        args.run_dir,
        settings=parser.settings(args),
        contents={"data": corpus.sha256, "model": repr(shape)},
        resume=args.resume,
    )
    checkpoints = checkpoint.Checkpoints(folder, keep=args.keep, in_background=args.async_save)
    newest = checkpoints.newest() if args.resume else None
    universal = newest is not None and args.stage > 0 and saved_ranks(newest) != world_size
    if universal:
        runtime.on_rank0(lambda: make_universal(newest))

    config = configure(args, shape, micro_batch_size, accumulation_steps, universal)
    if args.write_config and rank == 0:
        args.write_config.write_text(json.dumps(config, indent=2) + "\n")
    net = build_model(deepspeed, config, args, shape, device)
    optimizer = torch.optim.AdamW(parameter_groups(net, args.weight_decay), lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, warmup_steps=args.warmup_steps, steps=args.steps))
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
    )
    same_timeouts()
    if args.compile:
        engine.compile()

    progress = load(newest, engine, universal) if newest else {"step": 0, "skipped_steps": 0}
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
        config=shape,
        device=device,
        dtype=args.dtype,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        steps=args.steps,
        start_step=start_step,
    )
    stop = 0
    for step in range(start_step + 1, args.steps + 1):
        lr = optimizer.param_groups[0]["lr"]
        step_loss, grad_norm = train_step(engine, batches, device, meter)
        meter.note(step_loss, grad_norm)
        progress = {"step": step, "skipped_steps": engine.skipped_steps}

        stop = runtime.stop_requested()
        save_now = stop or step == args.steps or (args.save_every and step % args.save_every == 0)
        if save_now or step == 1 or step % args.log_every == 0:
            noted = meter.since_last_log()
            dist.all_reduce(noted)
            scale = engine.optimizer.loss_scale if args.dtype == "fp16" else 1.0
            meter.log(step, noted / world_size, lr, progress["skipped_steps"], scale)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            meter.log_eval(step, evaluate(engine, held_out, device))
        if save_now:
            save(checkpoints, progress, engine)
        if stop:
            break
    checkpoints.wait()
    if stop and args.nvme and progress["step"] < args.steps:
        end_early(stop, progress["step"], folder, args.nvme)
    if stop:
        runtime.say(f"signal {stop}: saved at step {progress['step']}; the same command with --resume goes on")

    # the promise of ZeRO, checked: a rank holds its part of what the stage cuts and no more, and all gather one model
    held = bytes_by_rank(engine, args.stage, args.nvme)
    digests = runtime.gather(checkpoint.digest(net))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    runtime.say(f"checked: {told(held)}; all ranks have the same weights to the bit")

    meter.finish(
        progress["step"],
        args.json,
        skipped_steps=progress["skipped_steps"],
        weights_sha256=digests[0],
        **held,
    )
    give_back_nvme(args.nvme)
    runtime.shutdown()
    return exits.REQUEUE_EXIT_CODE if stop and progress["step"] < args.steps else 0


@torch.no_grad()
def evaluate(engine, batches, device) -> float:
    """Mean loss per token of the held-out sequences."""
    engine.eval()
    total = torch.zeros(2, device=device)  # sum of losses, number of tokens
    for inputs, targets in batches:
        targets = targets.to(device)
        loss = engine(inputs.to(device), targets)
        tokens = (targets != data.PADDING).sum()
        total += torch.stack((torch.where(tokens > 0, loss * tokens, 0.0), tokens))  # padding alone has no mean
    dist.all_reduce(total)  # sums, not means: a rank may have read fewer tokens than the others
    engine.train()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    exits.run(main)  # leaves by os._exit: what must be flushed at the end belongs in exits.before_exit
