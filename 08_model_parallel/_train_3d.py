"""train_3d.py --dry-run: what the ranks of a layout hold, counted on ranks and tensors that are not there."""

import os
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context

import torch
from _train_3d_flags import Layout, check_layout
from _train_3d_stages import forward_backward, make_schedule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from common import fake_ranks
from common.schedule import adamw_cosine
from old import report, runtime
from old.exits import UserError
from old.step_cost import LiveMemory, held_tensors

COLUMNS = {"weight_bytes": "weights", "gradient_bytes": "gradients", "optimizer_bytes": "AdamW", "peak_bytes": "peak"}


def dry_run(args: Namespace, build: Callable, surroundings: Callable) -> int:
    """Count, print and write to --json what the first rank of each stage holds, built by train_3d.py's functions."""
    if not args.dry_run or runtime.world_from_env()[1] > 1:
        raise UserError("--world-size goes with --dry-run, which is one process without torchrun: give both or none")
    if args.compile or args.cpu_offload:
        raise UserError("--dry-run counts one memory and kernels that are not compiled: no --compile, no --cpu-offload")
    args.dtype = "bf16" if args.dtype == "auto" else args.dtype  # as on a GPU
    args.world_size = args.world_size or args.tp * args.pp * args.cp * args.replicate
    layout, _ = check_layout(args, args.world_size)
    # a process for each stage: none can be another rank later
    with ProcessPoolExecutor(min(args.pp, os.cpu_count()), get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = list(pool.map(partial(count, args, layout, build, surroundings), range(args.pp)))
    print(f"{args.model}, {args.dtype}, micro-batches of {layout.micro_batch_size} x {args.seq_len:,} tokens")
    print(f"GiB on the first rank of each stage, of {args.world_size} fake ones, with a CPU's kernels:\n")
    cells = [[*map(str, row.values())][:2] + [f"{row[name] / 2**30:.3f}" for name in COLUMNS] for row in rows]
    print(report.table([["stage", "layers", *COLUMNS.values()], *cells]))
    assert all(row["optimizer_bytes"] == 2 * row["gradient_bytes"] == 2 * row["weight_bytes"] for row in rows), rows
    print("\nchecked: gradients take the bytes of the fp32 weights, AdamW's state twice as many")
    summary = {name: getattr(args, name) for name in ("model", "dtype", "world_size", "tp", "pp", "cp", "replicate")}
    report.write_json({**summary, "device": "fake", "stages": rows}, args.json)
    return 0


def count(args: Namespace, layout: Layout, build: Callable, surroundings: Callable, stage: int) -> dict[str, int]:
    """Bytes that the first rank of a pipeline stage holds, and the most that it ever holds in a step."""
    device = fake_ranks.join(stage * args.world_size // args.pp, args.world_size)
    net, _, batch_mesh, mesh = build(args, layout, device)
    with fake_ranks.tensors(), loss_parallel() if args.tp > 1 else nullcontext():
        net.to_empty(device=device)
        net.tie_weights()
        optimizer, _ = adamw_cosine(net, lr=args.lr, weight_decay=args.weight_decay, warmup_steps=0, steps=1)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes its state. It is one kernel, and memory peaks before it
        optimizer.zero_grad()
        where, hidden = surroundings(args, layout, batch_mesh["context"], device)
        held = (*held_tensors(net, [optimizer]), where["positions"], hidden)
        with Peak(own_part(tensor) for tensor in held) as memory:
            forward_and_back(net, layout, mesh["pipeline"], where, hidden)
        moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
        return {
            "stage": stage,
            "layers": len(net.model.layers),
            "weight_bytes": sum(own_part(parameter).nbytes for parameter in net.parameters()),
            "gradient_bytes": sum(own_part(parameter.grad).nbytes for parameter in net.parameters()),
            "optimizer_bytes": sum(own_part(moment).nbytes for moment in moments),
            "peak_bytes": memory.peak_bytes,
        }


class Peak(LiveMemory):
    """The most bytes that are ever alive. They are added up only where an operator may have made something."""

    peak_bytes = 0

    def after(self, operator, operands: tuple) -> None:
        if not operator.is_view and operator.namespace != "prim":  # prim: a fake tensor is asked for its device
            self.peak_bytes = max(self.peak_bytes, self.bytes_now())


def own_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def forward_and_back(net: nn.Module, layout: Layout, stages: DeviceMesh, where: dict, hidden: Tensor) -> None:
    """As many micro-batches of a step as reach its peak."""
    micro_batches = min(layout.accumulation_steps, stages.size() + 1)
    tokens = torch.zeros_like(where["positions"])
    if stages.size() == 1:
        for micro_step in range(1, micro_batches + 1):
            net.set_requires_all_reduce(micro_step == micro_batches)
            runtime.whole(net(tokens, tokens, **where)).backward()
        return
    try:
        from torch.distributed.pipelining._utils import InferenceMode
    except ImportError:
        raise UserError(f"--dry-run with --pp needs torch 2.13, and this is {torch.__version__}") from None
    schedule = make_schedule(net, stages, micro_batches, where["positions"], hidden)
    schedule._stage._inference_mode = InferenceMode.STATIC  # fake ranks cannot tell each other what shapes they know
    schedule._warmup_p2p = lambda *_: None
    all_tokens = tokens.repeat(micro_batches, 1)
    forward_backward(schedule, stages, all_tokens, all_tokens, where)
