"""Offloading: a model whose weights do not fit on the GPUs answers, slowly, because weights travel for every token.

A decode step needs every weight once. What a GPU does not hold comes over a link, in each step again, and links are
many times slower than a GPU's memory. So offloading makes a model run at all, or serves many prompts with one trip.

device-map  one process. accelerate places whole layers: on the GPUs while there is room, then in the CPU's memory, then
            on the disk. Hooks copy a layer to a GPU when it is due.
zero3       a process per GPU (DeepSpeed). Each holds 1/N of every matrix, on the GPU or in the CPU's memory. All ranks
            gather a layer when it is due, compute with all of it, each for its own prompts, and free it.

    laptop    python 09_inference/offloaded.py
              python 09_inference/offloaded.py --memory 0.012     (GiB: some layers land on the disk)
              torchrun --nproc_per_node=2 09_inference/offloaded.py --by zero3
    one GPU   python 09_inference/offloaded.py --model models/llama-70b --memory 70
    its bytes python 09_inference/offloaded.py --model llama-70b --dry-run --world-size 2 --memory 80
    one node  torchrun --nproc_per_node=4 09_inference/offloaded.py --by zero3 --offload cpu --prompts questions.txt
    cluster   the same on every node, with --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

A named size has random weights, drawn on the CPU: minutes for llama-8b. Look for: the placement before anything is
loaded, the bytes that travel for each step. Before: infer_70b.py, where none does. Next: kv_cache.py.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _generate as shared
import _offloaded

from common import cli, exits, report, runtime
from lm import model, shapes, weights

WARM_UP_TOKENS = 2  # the first steps are slow: DeepSpeed learns the order of the layers in them


def place(net: nn.Module, free: dict[int | str, int], cache_bytes: int) -> dict[str, int | str]:
    """Device map: which module lies on which GPU (its number), on "cpu" or on "disk", from the free bytes by place.

    accelerate counts weights only. So each place is offered what the whole KV cache leaves of it, and a margin less.
    """
    from accelerate import infer_auto_device_map

    room = {where: max(0, int(0.95 * there) - cache_bytes) for where, there in free.items()}
    return infer_auto_device_map(
        net, max_memory=room, no_split_module_classes=net._no_split_modules
    )


def steps_of_transformers(net: nn.Module) -> tuple[Callable, Callable]:
    """prefill and decode as in _generate.steps_of, with transformers' growing cache. Prompts are padded on the right: the
    mask hides the padding from every later token, and positions do not count it."""
    from transformers import DynamicCache

    past = {}

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        how = {
            "attention_mask": past["mask"],
            "position_ids": positions,
            "past_key_values": past["cache"],
        }
        return net.model(ids, **how).last_hidden_state

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        past.update(cache=DynamicCache(config=net.config), mask=positions <= last[:, None])
        hidden = forward(ids, positions)
        return net.lm_head(hidden[torch.arange(len(ids)), last.to(hidden.device)]).to(ids.device)

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        past["mask"] = nn.functional.pad(past["mask"], (0, 1), value=True)
        return net.lm_head(forward(ids[:, None], positions[:, None])[:, -1]).to(ids.device)

    return prefill, decode


def cut(args, config: shapes.Config, device: torch.device) -> nn.Module:
    """Our model in DeepSpeed's engine: each tensor is cut as soon as it is made, and whole only while it is used."""
    deepspeed = _offloaded.import_deepspeed(device)
    layer_size = (
        shapes.parameter_count(config) - config.vocab_size * config.hidden_size
    ) // config.num_hidden_layers
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # required, although nothing is trained
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16"},  # neither: fp32
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": layer_size,  # elements: gather one layer ahead
            "stage3_max_live_parameters": 2 * layer_size,
            "stage3_max_reuse_distance": 0,  # free a layer after its forward
            # norms stay whole on every rank
            "stage3_param_persistence_threshold": config.hidden_size + 1,
            # a GPU copies from pinned memory while it computes
            "offload_param": {"device": args.offload, "pin_memory": device.type == "cuda"},
        },
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = model.Transformer(config)
    _offloaded.fill(deepspeed, net, args)
    net.requires_grad_(False)
    # fills the tables of the rotary embedding again: zero.Init has rounded them to 16 bits
    net.to(device)
    engine, *_ = deepspeed.initialize(model=net, config=settings, dist_init_required=False)
    engine.eval()
    return engine


def steps_of_rank(engine: nn.Module, batch: int, cache_sizes: dict) -> tuple[Callable, Callable]:
    """prefill and decode: each of N ranks computes every N-th prompt, and an all-reduce gives all ranks all logits.

    Every forward gathers weights from all ranks. A rank that stopped at its own last token would leave the others
    waiting. So all choose all tokens, from the same logits, and take part until the last prompt has ended.
    """
    mine = torch.arange(batch, device=cache_sizes["device"])[
        dist.get_rank() :: dist.get_world_size()
    ]
    rows = mine if len(mine) else mine.new_zeros(1)  # more ranks than prompts: compute another's
    cache = shared.StaticCache(engine.module.config, batch=len(rows), **cache_sizes)

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        return whole(
            engine(ids[rows], positions=positions[rows], cache=cache)[
                torch.arange(len(rows)), last[rows]
            ]
        )

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        return whole(engine(ids[rows, None], positions=positions[rows, None], cache=cache)[:, -1])

    def whole(logits: Tensor) -> Tensor:
        every = logits.new_zeros(batch, logits.shape[-1], dtype=torch.float32)
        every[mine] = logits[: len(mine)].float()
        dist.all_reduce(every)  # each row is zero on all ranks but one
        return every

    return prefill, decode


def by_device_map(
    args, config: shapes.Config, text: shared.Text, device: torch.device
) -> tuple[dict, tuple, list[str]]:
    """The bytes by place, prefill and decode, and what was checked; in a dry run the bytes alone."""
    dtype = shared.DTYPES[args.dtype]
    net = _offloaded.empty_model(config, dtype)
    token_bytes = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    )
    device_map = place(
        net, _offloaded.free_bytes(args, device), token_bytes * text.length * len(text.prompts)
    )
    planned = _offloaded.bytes_of_places(net, device_map)
    on_gpus = sum(nbytes for where, nbytes in planned.items() if isinstance(where, int))
    row = {
        "gpu_bytes": on_gpus,
        "cpu_bytes": planned.get("cpu", 0),
        "disk_bytes": planned.get("disk", 0),
    }
    row["bytes_by_place"] = planned
    # to where layers compute
    row["moved_bytes"] = row["disk_bytes"] + (row["cpu_bytes"] if on_gpus else 0)
    if args.dry_run:
        return row, (), []
    net = _offloaded.load(args, config, device_map)
    # a hook brings it when it is due
    moved = sum(weight.nbytes for weight in net.parameters() if weight.is_meta)
    assert moved == row["moved_bytes"], (
        f"{moved} bytes are offloaded, and {row['moved_bytes']} were planned"
    )
    return (
        row,
        steps_of_transformers(net),
        [f"{moved:,} bytes of weights travel for each step, as planned"],
    )


def by_zero3(
    args, config: shapes.Config, text: shared.Text, device: torch.device
) -> tuple[dict, tuple, list[str]]:
    """As by_device_map, for this rank."""
    ranks, dtype = dist.get_world_size(), shared.DTYPES[args.dtype]
    engine = cut(args, config, device)
    row = {**_offloaded.held_bytes(engine.module), "disk_bytes": 0}
    held, planned = row["gpu_bytes"] + row["cpu_bytes"], 0
    for weight in weights.build(args.model, config, seed=0, device="meta").parameters():
        planned += dtype.itemsize * math.ceil(weight.numel() / ranks)
    assert held == planned, f"{held} bytes of weights on this rank, and 1/{ranks} are {planned}"
    # the rest comes from other ranks and from the CPU
    here = row["gpu_bytes"] if device.type == "cuda" else held
    row["moved_bytes"] = shapes.parameter_count(config) * dtype.itemsize - here
    steps = steps_of_rank(
        engine, len(text.prompts), {"length": text.length, "dtype": dtype, "device": device}
    )
    return row, steps, [f"this rank holds {held:,} bytes: 1/{ranks} of each tensor"]


def main() -> int:
    flags = shared.parser(__doc__)
    flags.add_argument("--by", choices=("device-map", "zero3"), default="device-map")
    flags.add_argument(
        "--memory", type=cli.positive, metavar="GIB", help="of each GPU; without GPUs, of the CPU"
    )
    flags.add_argument(
        "--offload", choices=("none", "cpu"), default="none", help="where zero3 keeps a rank's part"
    )
    flags.add_argument(
        "--dry-run", action="store_true", help="show where device-map would place the weights"
    )
    flags.add_argument(
        "--world-size", type=cli.positive_int, help="with --dry-run: the number of GPUs"
    )
    args = flags.parse_args()
    config = shapes.read_config(args.model)
    _offloaded.check_flags(args)
    text = shared.Text(args, config)
    zero3 = args.by == "zero3"
    device = (
        runtime.init_process_group(args.device) if zero3 else runtime.single_device(args.device)
    )
    device = torch.device("cpu") if device.type == "mps" else device
    runtime.seed_all(args.seed)
    args.dtype = (
        "bf16"
        if args.dry_run and args.dtype == "auto"
        else shared.choose_dtype(args, config, device)
    )
    row, steps, checked = (by_zero3 if zero3 else by_device_map)(args, config, text, device)
    columns = {"gpu_bytes": "on GPUs", "cpu_bytes": "in CPU memory", "disk_bytes": "on disk"}
    columns |= {"moved_bytes": "moved per step"}
    if args.dry_run:
        row["world_size"] = args.world_size or 1  # of the GPUs that are not there
        report.end_lesson([row], columns=columns, checked=checked, args=args, device=device, **row)
        return 0

    def answer(new_tokens: int):
        generator = torch.Generator(device).manual_seed(args.seed)
        choose = partial(shared.sample, args=args, generator=generator)
        how = {"max_new_tokens": new_tokens, "choose": choose, "device": device, "stop": text.stop}
        return shared.generate(*steps, text.prompts, **how)

    answer(min(WARM_UP_TOKENS, args.max_new_tokens))
    result = answer(args.max_new_tokens)
    runtime.print0(text.decode(result.token_ids[0]))
    of_ranks = runtime.all_gather(result.token_ids)
    assert all(ids == of_ranks[0] for ids in of_ranks), f"ranks have different tokens: {of_ranks}"
    checked += [f"all {len(of_ranks)} ranks have the same tokens"] if len(of_ranks) > 1 else []
    checked += runtime.on_rank0(lambda: shared.check_tokens(result.token_ids, text, args, device))
    decoded = sum(len(ids[1:]) for ids in result.token_ids)  # the prefill has given the first ones
    row["time_to_first_token_seconds"] = result.prefill_seconds
    row["decode_tokens_per_second"] = decoded / result.decode_seconds if decoded else None
    columns |= {"time_to_first_token_seconds": "first token", "decode_tokens_per_second": "decode"}
    own = {"parameters": shapes.parameter_count(config), "token_ids": result.token_ids}
    own["texts"] = [text.decode(ids) for ids in result.token_ids]
    report.end_lesson(
        [row], columns=columns, checked=checked, args=args, device=device, **row, **own
    )
    if zero3:
        runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
