"""Train a language model on a mesh of ranks: its batch, matrices, layers and sequences are each cut over some of them.

train_fsdp.py gives each rank a part of every weight, but gathers whole layers to compute with. When a layer, its
activations or the number of ranks gets too large for that, the computation itself is divided, too:

    --tp N    tensor: N ranks compute each matmul together; the norms of a token are computed on one of them
    --pp N    pipeline: N stages have some of the layers each; micro-batches travel through them (1F1B)
    --cp N    context: N ranks have a part of every sequence each; keys and values are all-gathered
    the rest  data: fully_shard over all ranks that are left, in --replicate copies. It also shards over --cp

Whatever the mesh, in fp32 the losses and gradients are those of one process up to rounding.

    laptop    python 08_model_parallel/train_3d.py
              torchrun --nproc_per_node=4 08_model_parallel/train_3d.py --tp 2 --cp 2
    one node  torchrun --nproc_per_node=8 08_model_parallel/train_3d.py --model llama-8b --tp 8 --checkpointing full
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 and
              --model llama-70b --tp 8 --pp 4 --micro-batch-size 1
    dry run   python 08_model_parallel/train_3d.py --dry-run --world-size 32 --model llama-70b --tp 8 --pp 4 \\
                  --micro-batch-size 1

Look for: with --dtype fp32 the losses of 06_fsdp_zero/train_fsdp.py, whatever the mesh; the bytes that each rank holds.
Before: 06_fsdp_zero/train_fsdp.py, and this chapter's scripts, one for each cut. Next: launch/.
"""

import sys
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _train_3d as helper
from _stages import cut_matrices, keep_stage

from common import cli, exits, hardware, report, runtime
from lm import checkpoint, data, flags, metrics, optim, shapes, weights
from lm.activation_checkpointing import checkpoint_blocks
from planner.fit import fit_micro_batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(args, config, mesh, device):
    """This rank's part of the model, which holds no numbers yet."""
    # shapes alone: no rank ever holds the whole
    net = weights.build(args.model, config, seed=args.seed, device="meta")
    keep_stage(net, helper.find_place(args)[0], args.pp)  # some of the layers
    if args.tp > 1:
        cut_matrices(net, mesh["tensor"])  # some heads, MLP channels and tokens of the vocabulary
    checkpoint_blocks(net, args.checkpointing)  # backward computes again what is not kept
    shard = partial(
        fully_shard,  # of all that, some rows
        mesh=mesh["shard"] if args.replicate == 1 else mesh["replicate", "shard"],
        mp_policy=MixedPrecisionPolicy(
            DTYPES[args.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        # None: all but the root
        reshard_after_forward=None if args.reshard_after_forward == "on" else False,
    )
    # checkpointed above, then compiled, then sharded: the order counts
    for block in net.model.layers.values():
        if args.compile:
            block.compile(fullgraph=True)
        shard(block)
    # what is left is one group: embeddings, final norm and head, since two of them may be one
    # matrix
    shard(net)
    # while one computes, the next is on its way
    for block, next_block in pairwise(net.model.layers.values()):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])
    return net


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    parser.add_argument(
        "--tp", type=cli.positive_int, default=1, help="ranks that share each matmul"
    )
    parser.add_argument("--pp", type=cli.positive_int, default=1, help="stages of layers")
    parser.add_argument(
        "--cp", type=cli.positive_int, default=1, help="ranks that share each sequence"
    )
    parser.add_argument(
        "--replicate", type=cli.positive_int, default=1, help="copies of the model: HSDP from 2 on"
    )
    parser.add_argument(
        "--reshard-after-forward",
        choices=("on", "off"),
        default="on",
        help="off: blocks stay whole",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: count each stage's bytes on fake ranks",
    )
    parser.add_argument(
        "--world-size",
        type=cli.positive_int,
        help="with --dry-run: how many ranks (default: fewest)",
    )
    args = parser.parse_args()
    shapes.read_config(args.model)  # raises for an unknown model
    helper.adapt_defaults(args)
    if args.dtype == "fp16":
        raise exits.UserError(
            "--dtype fp16: 05_ddp/train.py has a GradScaler; use bf16 or fp32 here"
        )
    runtime.seed_all(args.seed, args.deterministic)
    if args.dry_run or args.world_size:
        return helper.dry_run(args, build)

    # 1 Processes, in a mesh by what they hold. Each has a number among those that read other sequences, too.
    device = runtime.init_process_group(args.device)
    world_size = dist.get_world_size()
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()
    mesh = helper.make_mesh(args, device)

    # 2 The batch: a function of --seed and the step alone. Only data ranks read different sequences.
    data_ranks = helper.data_ranks(args, world_size)
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir, args.eval_data)
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    sizes = {"tp": args.tp, "pp": args.pp, "cp": args.cp, "replicate": args.replicate}
    fit_micro_batch(args, config, device, gpus=world_size, zero=3, **sizes)
    train_set, held_out_set = data.sequences(corpus, args.seq_len)
    data_rank = helper.find_place(args)[1]
    batches = data.Batches(train_set, held_out_set, args, rank=data_rank, world_size=data_ranks)
    held_out = batches.evaluation()
    runtime.print0(
        f"{args.model}, {args.dtype} matmuls, {world_size} x {hardware.device_name(device)}"
    )

    # 3 The model: each rank holds its rows, of its part of each matrix, of its layers, in fp32.
    helper.check_cuts(args, config, batches)
    net = build(args, config, mesh, device)
    weights.materialize(net, args.model, seed=args.seed, device=device)
    columns = helper.cut_sequence(net, args, mesh, DTYPES[args.dtype], device)
    stage = helper.Stage(net, args, batches, mesh, DTYPES[args.dtype], device)
    until_the_end = ExitStack()
    if args.tp > 1:  # forward and backward of the loss from cut logits, which are never gathered
        until_the_end.enter_context(loss_parallel())
    optimizer, scheduler = optim.adamw_cosine(
        net,
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
    )

    # 4 The run: its folder, and the step at which it stood.
    run = checkpoint.Run(
        args, settings=flags.settings(args, data=corpus.sha256, model=repr(config))
    )
    training = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
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
        tensorboard=args.tensorboard,
        wandb=args.wandb,
    )

    # 5 The loop.
    step, stop = start_step, 0
    steps = range(start_step + 1, args.steps + 1)
    for step in report.progress_bar(steps, "training", initial=start_step, unit="step"):
        # what dropout draws, if your model has it, is the same after a resume
        torch.manual_seed(args.seed + step)
        step_loss = torch.zeros((), device=device)
        # a pipeline takes all micro-batches of a step together, so that its stages work at once
        if args.pp > 1:
            parts = zip(
                *(meter.next(stream) for _ in range(batches.accumulation_steps)), strict=True
            )
            inputs, targets = (torch.cat(part)[:, columns].contiguous() for part in parts)
            with meter.forward():
                step_loss += stage.forward_backward(inputs, targets)
        for micro_step in range(1, batches.accumulation_steps + 1 if args.pp == 1 else 1):
            inputs, targets = (part[:, columns] for part in meter.next(stream))
            # each backward reduce-scatters, or gradients would be whole; copies (HSDP) all-reduce once, after the last
            net.set_requires_all_reduce(micro_step == batches.accumulation_steps)
            with meter.forward():
                # micro-batches have equal token counts
                loss = net(inputs, targets) / batches.accumulation_steps
            loss = runtime.full_tensor(loss)  # that of loss_parallel is a DTensor
            loss.backward()
            step_loss += loss.detach()
        grad_norm = helper.clip_over_stages([*net.parameters()], args.clip_norm, mesh)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        stop = runtime.stop_requested()  # the same answer on all ranks, so that all save
        save = stop or step == args.steps or (args.save_every and step % args.save_every == 0)
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # sums: a rank's loss is the mean of its own share
            meter.log(step, step_loss / world_size, grad_norm, lr)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            meter.log_eval(step, evaluate(net, held_out, device, stage, columns))
        if save:
            run.save(step, checkpoint.training_state(step, **training), shapes.config_json(config))
            meter.save_plot()
        if stop:
            break
    run.wait()
    if stop:
        runtime.print0(
            f"signal {stop}: saved at step {step}; the same command with --resume goes on"
        )

    # 6 What was promised, checked. No rank has drifted from the others by a bit.
    digests = runtime.all_gather(weights.digest(net))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    runtime.print0("checked: all ranks that hold the same weights have them to the bit")
    # its part of each tensor, in fp32, and no more
    held = helper.check_parts(net, optimizer, args, mesh)
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
def evaluate(net, batches, device, stage, columns) -> float:
    """Mean loss per token of the held-out sequences."""
    net.eval()
    total = torch.zeros(2, device=device)  # sum of losses, number of tokens
    for inputs, targets in batches:
        targets = targets[:, columns].to(device)
        # tokens, or what the stage before has computed
        inputs = stage.receive(inputs[:, columns].to(device))
        loss = runtime.full_tensor(net(inputs, targets))
        if not stage.is_last:
            stage.send(loss)  # hidden states: only the last stage has a head
            continue
        tokens = (targets != data.PADDING).sum()
        # padding alone has no mean
        total += torch.stack((torch.where(tokens > 0, loss * tokens, 0.0), tokens))
    dist.all_reduce(total)  # sums, not means: a rank may have read fewer tokens than the others
    net.train()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    exits.run(main)
