"""Train a language model on a mesh of ranks: its batch, matrices, layers and sequences are each cut over some of them.

train_fsdp.py gives each rank a part of every weight, but gathers whole layers to compute with. When a layer, its
activations or the number of ranks gets too large for that, the computation itself is divided, too:

    --tp N  tensor: N ranks compute each matrix product together, and each token's norms on one of them
    --pp N  pipeline: N stages have some of the layers each; micro-batches travel through them (1F1B)
    --cp N  context: N ranks have a part of every sequence each; keys and values are all-gathered
    the rest  data: fully_shard over all ranks that are left, in --replicate copies. It also shards over --cp

Whatever the mesh, in fp32 the losses and gradients are those of one process up to rounding.

    laptop    python 08_model_parallel/train_3d.py
              torchrun --nproc_per_node=4 08_model_parallel/train_3d.py --tp 2 --cp 2
    one node  torchrun --nproc_per_node=8 08_model_parallel/train_3d.py --model llama-8b --tp 8 --checkpointing full
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 and
              --model llama-70b --tp 8 --pp 4 --micro-batch-size 1
    its bytes python 08_model_parallel/train_3d.py --dry-run --world-size 32 --model llama-70b --tp 8 --pp 4 \\
                  --micro-batch-size 1

Look for: with --dtype fp32 the losses of 06_fsdp_zero/train_fsdp.py, whatever the mesh; the bytes that each rank holds.
Before: 06_fsdp_zero/, and this chapter's scripts, one for each cut. Next: launch/.
"""

import sys
from argparse import Namespace
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _train_3d import dry_run
from _train_3d_checks import Shapes, check_parts, check_types, digest
from _train_3d_context import Context, sequence_part
from _train_3d_flags import Layout, check_layout
from _train_3d_stages import clip_over_stages, evaluate, forward_backward, keep_stage, make_schedule
from _train_3d_tensor import cut_matrices

from common.schedule import adamw_cosine
from old import checkpoint, cli, data, exits, hardware, metrics, model, run_dir, runtime

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(args: Namespace, layout: Layout, device: torch.device) -> tuple[nn.Module, Shapes, DeviceMesh, DeviceMesh]:
    """A rank's part of the model, which has no numbers yet; the shapes of the whole; its ranks, in two meshes."""
    # the same ranks twice: by what they read, and by what they hold. Tensor ranks talk most, and are neighbours
    places = {"pipeline": args.pp, "data": layout.data_ranks, "context": args.cp, "tensor": args.tp}
    batch_mesh = runtime.device_mesh(device, places)
    places = {"pipeline": args.pp, "replicate": args.replicate, "shard": layout.shards, "tensor": args.tp}
    mesh = runtime.device_mesh(device, places)
    # fp32 weights, whatever the dtype: bf16 would lose small updates
    net = model.build(args.model, layout.config, seed=args.seed, device="meta")  # no rank ever holds the whole
    whole = {name: parameter.shape for name, parameter in net.named_parameters()}
    keep_stage(net, mesh.get_local_rank("pipeline"), args.pp)
    if args.tp > 1:
        cut_matrices(net, mesh["tensor"], arguments_of_attention=3 if args.cp == 1 else 5)
    model.checkpoint_blocks(net, args.checkpointing)  # what is not kept then is computed again in backward
    shard = partial(
        fully_shard,
        mesh=mesh["shard"] if args.replicate == 1 else mesh["replicate", "shard"],  # who share one copy of the model
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
    return net, whole, batch_mesh, mesh


def surroundings(args: Namespace, layout: Layout, sequence: DeviceMesh, device: torch.device) -> tuple[dict, Tensor]:
    """What the model is told beside a micro-batch's tokens; what a stage sends to the next, in shape and type."""
    columns, micro_batch_size = sequence_part(args.seq_len, sequence), layout.micro_batch_size
    where = {"positions": torch.arange(args.seq_len, device=device)[columns].expand(micro_batch_size, -1)}
    where |= {"cache": Context(sequence.get_group(), args.seq_len, DTYPES[args.dtype])} if args.cp > 1 else {}
    sent = (micro_batch_size, args.seq_len // (args.cp * args.tp), layout.config.hidden_size)
    return where, torch.zeros(sent, dtype=DTYPES[args.dtype], device=device)


def main() -> int:
    parser = cli.training_parser(__doc__)
    parser.add_argument("--tp", type=cli.positive_int, default=1, help="ranks that share each matrix product")
    parser.add_argument("--pp", type=cli.positive_int, default=1, help="stages of layers")
    parser.add_argument("--cp", type=cli.positive_int, default=1, help="ranks that share each sequence")
    parser.add_argument("--replicate", type=cli.positive_int, default=1, help="copies of the model: HSDP from 2 on")
    parser.add_argument("--reshard-after-forward", choices=("on", "off"), default="on", help="off: blocks stay whole")
    parser.add_argument("--cpu-offload", action="store_true", help="weights, gradients, optimizer state in CPU memory")
    parser.add_argument("--dry-run", action="store_true", help="train nothing: count each stage's bytes on fake ranks")
    parser.add_argument("--world-size", type=cli.positive_int, help="with --dry-run: how many ranks (default: fewest)")
    args = parser.parse_args()
    if args.dry_run or args.world_size:
        return dry_run(args, build, surroundings)
    runtime.seed(args.seed, args.deterministic)
    device = runtime.init_process_group(args.device)
    world_size = dist.get_world_size()
    args.dtype = hardware.choose_dtype(args.dtype, device)
    if args.dtype == "fp32":
        runtime.exact_fp32(device)  # some containers set variables that turn fp32 products into tf32
    runtime.catch_stop_signals()
    layout, corpus = check_layout(args, world_size)
    runtime.say(f"{args.model}, {args.dtype} matrix products, {world_size} x {hardware.device_name(device)}")

    net, whole, batch_mesh, mesh = build(args, layout, device)
    data_rank, sequence, stages = batch_mesh.get_local_rank("data"), batch_mesh["context"], mesh["pipeline"]
    micro_batch_size, accumulation_steps = layout.micro_batch_size, layout.accumulation_steps
    where, hidden = surroundings(args, layout, sequence, device)
    model.materialize(net, args.model, seed=args.seed, device="cpu" if args.cpu_offload else device)
    until_the_end = ExitStack()
    if args.tp > 1:
        until_the_end.enter_context(loss_parallel())  # forward and backward of the loss without gathering the logits
    optimizer, scheduler = adamw_cosine(
        net, lr=args.lr, weight_decay=args.weight_decay, warmup_steps=args.warmup_steps, steps=args.steps
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")

    training = {"net": net, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    progress = {"step": 0, "skipped_steps": 0}
    folder = run_dir.claim(
        args.run_dir,
        settings=parser.settings(args),
        contents={"data": corpus.sha256, "model": repr(layout.config)},
        resume=args.resume,
    )
    checkpoints = checkpoint.Checkpoints(folder, keep=args.keep, in_background=args.async_save)
    if args.resume:
        progress = checkpoint.resume(checkpoints, **training) or progress
    start_step = progress["step"]
    held_out = data.eval_batches(
        corpus.held_out, seq_len=args.seq_len, batch_size=micro_batch_size, rank=data_rank, world_size=layout.data_ranks
    )
    batches = data.train_batches(
        corpus.train,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        micro_batch_size=micro_batch_size,
        seed=args.seed,
        device=device,
        start_step=start_step,
        rank=data_rank,
        world_size=layout.data_ranks,
        num_workers=args.num_workers,
    )
    columns = sequence_part(args.seq_len, sequence)
    held_out = [(inputs[:, columns], targets[:, columns]) for inputs, targets in held_out]
    batches = ((inputs[:, columns], targets[:, columns]) for inputs, targets in batches)
    one_by_one, schedule = accumulation_steps, None
    if args.pp > 1:  # the schedule takes all micro-batches of a step together, so that the stages work at once
        one_by_one, schedule = 0, make_schedule(net, stages, accumulation_steps, where["positions"], hidden)

    meter = metrics.Meter(
        folder,
        model=args.model,
        config=layout.config,
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
        if schedule is not None:
            with meter.phase("data"):
                parts = zip(*(next(batches) for _ in range(accumulation_steps)), strict=True)
                inputs, targets = (torch.cat(part).to(device, non_blocking=True) for part in parts)
            with meter.phase("forward"):
                step_loss += forward_backward(schedule, stages, inputs, targets, where)
        for micro_step in range(1, one_by_one + 1):  # each one reduce-scatters, or gradients would be whole
            net.set_requires_all_reduce(micro_step == one_by_one)  # copies of the model meet once, after the last
            with meter.phase("data"):
                inputs, targets = (t.to(device, non_blocking=True) for t in next(batches))
            with meter.phase("forward"):  # fully_shard casts: what it gathers is in --dtype
                loss = net(inputs, targets, **where) / accumulation_steps  # micro-batches have equal token counts
            loss = runtime.whole(loss)  # loss_parallel's is a DTensor
            scaler.scale(loss).backward()
            step_loss += loss.detach()
        scaler.unscale_(optimizer)  # before clipping: the threshold is meant for true gradients
        grad_norm = clip_over_stages(net.parameters(), args.clip_norm, stages)
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
            meter.log_eval(step, evaluate(net, stages, held_out, where, hidden))
        if save:
            checkpoint.save(checkpoints, progress, **training)
        if stop:
            break
    checkpoints.wait()
    if stop:
        runtime.say(f"signal {stop}: saved at step {progress['step']}; the same command with --resume goes on")

    check_types(net, optimizer, DTYPES[args.dtype], stages, where, hidden)
    held = check_parts(net, optimizer, mesh, whole)  # each rank holds its part of its stage's tensors and no more
    # the promise of data parallelism, checked: no rank has drifted from the others by a bit
    digests = runtime.gather(digest(net, stages, whole))
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


if __name__ == "__main__":
    exits.run(main)  # leaves by os._exit: what must be flushed at the end belongs in exits.before_exit
