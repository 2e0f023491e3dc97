"""--strategy zero3 of infer_70b.py: DeepSpeed's ZeRO-3 without training. The ranks share each weight, and answer apart.

A rank holds 1/N of every tensor: on its GPU, with --offload cpu in the computer's memory, with --offload nvme in files
on a fast disk. Before a layer computes, all ranks gather it from each other. After it, they forget it. So every weight
comes over a link for every token. That is slow unless many prompts share the trip: each rank answers its part of them.
"""

import contextlib
import importlib.util
import math
import shutil
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _infer_70b_deepspeed import OURS, check_nvme_folder, import_deepspeed, same_timeouts
from _infer_70b_served import Served
from _infer_70b_weights import fill
from torch import Tensor

from old import exits, model, shapes
from old.exits import UserError
from old.generate import Generated, Sampler, StaticCache
from old.generate import generate as generate_here


def configure(args, config: shapes.Config, device: torch.device) -> dict:
    """All that DeepSpeed is told."""
    parameters_per_block = shapes.parameter_count(config) // config.num_hidden_layers
    largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    place = {
        "device": args.offload,
        "nvme_path": args.nvme,
        "pin_memory": device.type == "cuda",  # a GPU copies from pinned memory while it computes
        "max_in_cpu": 0,  # of what belongs on the disk
        # to read files into: each holds the largest tensor's part, and a block has nine tensors
        "buffer_size": math.ceil(largest / dist.get_world_size()),
        "buffer_count": 2 * 9 + 2,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,  # it wants one; nothing is trained
        "bf16": {"enabled": args.dtype == "bf16"},  # the type of the weights; neither: fp32
        "fp16": {"enabled": args.dtype == "fp16"},
        "zero_optimization": {
            "stage": 3,
            # elements: gather one block ahead; forget a block after its forward; keep only vectors whole
            "stage3_prefetch_bucket_size": parameters_per_block,
            "stage3_max_live_parameters": 2 * parameters_per_block,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": config.hidden_size + 1,
            "offload_param": {"device": "none"} if args.offload == "none" else place,
        },
    }


def load(args, config: shapes.Config, device: torch.device) -> Served:
    """Our model in DeepSpeed's engine. A tensor is cut as soon as it is made, and filled one at a time."""
    check(args)
    deepspeed = import_deepspeed(device, args)
    if args.offload == "nvme":
        check_nvme_folder(args.nvme)
        exits.before_exit.append(partial(give_back, args.nvme, dist.get_rank()))
    settings = configure(args, config, device)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = model.Transformer(config)
    fill(net, args)
    net.requires_grad_(False)
    net.to(device)  # fills RoPE's tables again: in 16 bits, zero.Init has rounded their angles
    engine, *_ = deepspeed.initialize(model=net, config=settings, dist_init_required=False)
    same_timeouts()
    engine.eval()
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weight_bytes = (shapes.parameter_count(config) - looked_up) * args.torch_dtype.itemsize
    return Served(partial(generate, engine, dtype=args.torch_dtype, device=device), weight_bytes, config)


def generate(
    engine,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler,
    dtype: torch.dtype,
    device: torch.device,
    **how,
) -> Generated:
    """As common.generate.generate, where each rank computes every N-th prompt and all learn the tokens of all.

    Each pass gathers the weights from all ranks. So a rank without a prompt computes one that is not its own, and all
    go on until the last prompt has ended.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(len(prompts), device=device)[rank::ranks]
    rows = mine if len(mine) else torch.zeros(1, dtype=torch.long, device=device)
    length = max(map(len, prompts)) + max_new_tokens
    cache = StaticCache(engine.module.config, batch=len(rows), length=length, dtype=dtype, device=device)

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        return engine(ids[rows], positions=positions[rows], cache=cache, last=last[rows])

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        return engine(ids[rows, None], positions=positions[rows, None], cache=cache)[:, -1]

    def sample(logits: Tensor) -> Tensor:
        drawn = sampler.draw(len(prompts)).to(device)  # for all rows, as one process does it
        tokens = torch.zeros(len(prompts), dtype=torch.long, device=device)
        tokens[mine] = sampler(logits, drawn[rows])[: len(mine)]
        dist.all_reduce(tokens)  # each row is zero on all ranks but one
        return tokens

    return generate_here(prefill, decode, prompts, max_new_tokens=max_new_tokens, sampler=sample, device=device, **how)


def check(args) -> None:
    """UserError for flags that contradict each other, or without DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("--strategy zero3 needs the package deepspeed: pip install deepspeed==0.19.8")
    if args.offload == "nvme" and args.nvme is None:
        raise UserError("--offload nvme: to which folder? Add --nvme FOLDER, on a fast disk")
    if args.offload != "nvme" and args.nvme is not None:
        raise UserError(f"--nvme {args.nvme}: nothing would go there; add --offload nvme")
    if args.nvme is not None and not Path(args.nvme).is_dir():
        raise UserError(f"--nvme {args.nvme}: no such folder")


def give_back(folder: str, rank: int) -> None:
    """Remove this rank's files; the folders go with the last of a node's ranks."""
    for own in Path(folder, OURS).glob(f"*/rank{rank}"):
        shutil.rmtree(own, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: another rank still reads its own
            own.parent.rmdir()
            own.parent.parent.rmdir()
