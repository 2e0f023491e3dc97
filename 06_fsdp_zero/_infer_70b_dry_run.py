"""infer_70b.py without the devices: what each of N would hold."""

import warnings
from collections.abc import Callable

import _infer_70b_device_map as accelerated
import torch
import torch.distributed as dist
from _infer_70b_placement import Place, places, print_places, refuse_what_does_not_fit, size, tensor_parallel_bytes
from _infer_70b_weights import held_bytes
from torch.distributed.device_mesh import init_device_mesh

from old import hf, model, report, shapes
from old.exits import UserError
from planner import inference
from planner.shape import from_config


def dry_run(args, config: shapes.Config, cut: Callable) -> int:
    """Print what each device would hold. For tensor-parallel the model itself is cut, without numbers, and counted."""
    free = None if args.memory is None else round(args.memory * 2**30)
    found = device_map_places(args, config) if args.strategy == "device-map" else None
    found = found or places(args, config, args.world_size, [free] * args.world_size)
    print(f"{args.model} in {args.dtype}, --strategy {args.strategy} on {args.world_size} device(s)")
    print_places(found)
    summary = {
        "device": "none",
        "world_size": args.world_size,
        "dtype": args.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "strategy": args.strategy,
        "places": [place._asdict() for place in found],
    }
    if args.strategy == "tensor-parallel":
        held = bytes_of_rank0(args, config, cut)
        shape = from_config(args.model, config)
        if config.vocab_size % args.world_size == 0:
            assert held == tensor_parallel_bytes(shape, args.dtype, args.world_size), f"{held} bytes, not as computed"
        print(f"checked: rank 0 of the model, cut as it will be, holds {held:,} bytes of weights ({size(held)})")
        # published figures are of a layout that leaves embedding and head whole (gpt-fast's), with or without embedding
        rest = {"weights": args.dtype, "tp": args.world_size}
        whole_ends, read = (
            round(inference.weight_bytes(shape, count_embedding=count, **rest)) for count in (True, False)
        )
        print(f"as gpt-fast cuts it, embedding and head whole: {whole_ends:,} bytes, {read:,} without the embedding")
        summary |= {"rank_bytes": held, "gpt_fast_bytes": whole_ends, "gpt_fast_bytes_per_step": read}
    refuse_what_does_not_fit(args, config, found)
    report.write_json(summary, args.json)
    return 0


def device_map_places(args, config: shapes.Config) -> list[Place]:
    if args.memory is None:
        raise UserError("--dry-run with --strategy device-map needs --memory GIB: it fills one GPU after the other")
    return accelerated.plan(args, config, torch.device("cuda"), gpus=args.world_size)[1]


def bytes_of_rank0(args, config: shapes.Config, cut: Callable) -> int:
    """torch's "fake" process group takes this process for rank 0 of N; the tensors are on the meta device."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore", "Set timeout is now only supported for either nccl or gloo")
    net = model.build(args.model, config, seed=args.seed, device="meta").to(args.torch_dtype)
    if args.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
        cut(net, init_device_mesh("cpu", (args.world_size,), mesh_dim_names=("tensor",)))
    return sum(held_bytes(parameter) for _, parameter in hf.named_weights(net))
