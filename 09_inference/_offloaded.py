"""What offloaded.py needs beside its three variants: flags, bytes, libraries, table and checks."""

import argparse
import json
import logging
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import _prompts
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import cli, disk, exits, hardware, lesson, report, runtime
from common.exits import UserError
from common.runtime import DTYPES
from lm import shapes, weights
from lm.generate import Generated, StaticCache
from lm.weight_files import INDEX, StoredWeights

ON_DEVICE = "all on the device"
WARM_UP_TOKENS = 2  # the first steps are slow: DeepSpeed learns the order of the layers in them

# accelerate warns that weights are offloaded: that is the point here
logging.getLogger("accelerate").setLevel(logging.ERROR)


# --- flags


def parse_flags(doc: str) -> argparse.Namespace:
    """Parse the flags, and raise UserError for those that contradict each other.

    On a GPU the model is so large that copying a layer takes longer than launching its kernels.
    """
    flags = _prompts.parser(doc)
    flags.add_argument("--by", choices=("stream", "device-map", "zero3"), default="stream")
    flags.add_argument(
        "--memory",
        type=cli.positive,
        metavar="GIB",
        help="for the model: of the device (stream), of each GPU, or without one of the CPU "
        "(device-map)",
    )
    flags.add_argument(
        "--offload",
        choices=("none", "cpu"),
        default="none",
        help="where zero3 keeps a rank's shards",
    )
    flags.add_argument(
        "--dry-run", action="store_true", help="show where device-map would place the weights"
    )
    flags.add_argument(
        "--world-size", type=cli.positive_int, help="with --dry-run: the number of GPUs"
    )
    flags.set_defaults(model=None)
    args = flags.parse_args()
    check_flags(args)
    lesson.fill_defaults(args, cpu={"model": "nano"}, gpu={"model": "llama-1b"})
    return args


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags that contradict each other."""
    if args.by == "zero3" and args.memory is not None:
        raise UserError(
            "--memory does not belong to --by zero3: there each of N ranks holds 1/N of the model"
        )
    if args.by != "zero3" and args.offload != "none":
        raise UserError(
            f"--offload {args.offload} belongs to --by zero3; here --memory limits a GPU"
        )
    if args.by != "device-map" and args.dry_run:
        raise UserError("--dry-run shows a device map: add --by device-map")
    if args.by != "zero3" and runtime.ranks().world_size > 1:
        raise UserError(f"--by {args.by} is one process: start it with python, or add --by zero3")
    if args.world_size is not None and not (args.dry_run and args.memory):
        raise UserError(
            "--world-size N needs --dry-run and --memory GIB: it places the model on N such GPUs"
        )


# --- bytes


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters. Tied weights count once."""
    return runtime.held_bytes(module.parameters())


def cache_bytes(config: shapes.Config, dtype: torch.dtype, text: _prompts.Text) -> int:
    """Return the bytes of the keys and values of all prompts and answers."""
    values_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return values_per_token * dtype.itemsize * text.length * len(text.prompts)


def limit_bytes(args: argparse.Namespace) -> int | None:
    """Return --memory in bytes, or None."""
    if args.memory is None:
        return None
    return int(args.memory * 2**30)


def free_bytes(args: argparse.Namespace, device: torch.device) -> dict[int | str, int]:
    """Return the room of each place, in the order in which a device map fills them.

    --memory limits the GPUs, or the CPU where there is none. In a dry run for GPUs the CPU takes
    the rest: its memory is not known here.
    """
    limit = limit_bytes(args)
    if args.world_size is not None:
        return dict.fromkeys(range(args.world_size), limit) | {"cpu": 2**60}
    host_bytes = hardware.free_bytes(torch.device("cpu"))
    if device.type != "cuda":
        return {"cpu": limit or host_bytes}
    room = {}
    for gpu in range(torch.cuda.device_count()):
        room[gpu] = limit or hardware.free_bytes(torch.device("cuda", gpu))
    return room | {"cpu": host_bytes}


# --- stream


def layers_that_stay(net: nn.Module, args: argparse.Namespace, text: _prompts.Text) -> int:
    """Return how many layers fit on the device beside all that must be there, by --memory.

    Embedding, norm, head, the KV cache and two buffers must be there. Without --memory no layer
    stays. Raise UserError if --memory is too little. `net` may be on the meta device.
    """
    limit = limit_bytes(args)
    if limit is None:
        return 0
    layers = list(net.model.layers.values())
    layer_bytes = weight_bytes(layers[0])
    dtype = next(net.parameters()).dtype
    cached = cache_bytes(net.config, dtype, text)
    fixed_bytes = weight_bytes(net) - len(layers) * layer_bytes + cached
    if fixed_bytes + len(layers) * layer_bytes <= limit:
        return len(layers)
    stay = (limit - fixed_bytes - 2 * layer_bytes) // layer_bytes
    if stay < 0:
        least = (fixed_bytes + 2 * layer_bytes) / 2**30
        raise UserError(
            f"--memory {args.memory:g}: embedding, head, KV cache and two layers of --model "
            f"{args.model} take {least:.3g} GiB: give at least so much"
        )
    return stay


def pin(layer: nn.Module) -> None:
    """Move the weights of a layer to pinned memory."""
    for weight in layer.parameters():
        weight.data = weight.data.pin_memory()


def fits_twice(net: nn.Module, layers: list[nn.Module], device: torch.device) -> bool:
    """Return whether all layers take at most half of the memory that is free on the device."""
    return sum(map(weight_bytes, layers)) <= hardware.free_bytes(device) / 2


def row_of(name: str, net: nn.Module, stream) -> dict:
    """Return the bytes of a variant, by where they are. `stream` is a LayerStream or None."""
    row = {
        "name": name,
        "gpu_bytes": weight_bytes(net),
        "cpu_bytes": 0,
        "disk_bytes": 0,
        "moved_bytes": 0,
        "buffer_bytes": 0,
    }
    if stream is not None:
        row["cpu_bytes"] = sum(map(weight_bytes, stream.layers))
        row["buffer_bytes"] = sum(weight_bytes(buffer.module) for buffer in stream.buffers)
        if len(stream.layers) > len(stream.buffers):  # else each layer keeps its buffer
            row["moved_bytes"] = row["cpu_bytes"]
    return row


def check_stream(rows: list[dict], streams: dict, results: dict[str, list]) -> list[str]:
    """Assert that all variants give the same tokens, and that each step copies what was planned."""
    checked = []
    first = rows[0]
    for row in rows[1:]:
        assert row["token_ids"] == first["token_ids"], (
            f"{row['name']}: {row['token_ids']}, and {first['name']}: {first['token_ids']}"
        )
    if len(rows) > 1:
        checked.append(f"the tokens of {len(rows)} variants are equal")

    for row in rows:
        if not row["moved_bytes"]:
            continue
        stream = streams[row["name"]]
        # The last step has started the copy of one layer for a step that does not come.
        layer_bytes = row["cpu_bytes"] // len(stream.layers)
        steps = sum(1 + result.decode_steps for result in results[row["name"]])  # 1: the prefill
        planned = steps * row["moved_bytes"] + layer_bytes
        assert stream.copied_bytes == planned, (
            f"{row['name']}: {stream.copied_bytes} bytes in {steps} steps, not {planned}"
        )
        checked.append(f"{row['name']}: each step copies {row['moved_bytes']:,} bytes of weights")
    return checked


# --- device-map


def empty_model(config: shapes.Config, dtype: torch.dtype) -> nn.Module:
    """Return transformers' model of this shape on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers_config = AutoConfig.for_model(**shapes.config_json(config))
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(transformers_config).to(dtype)
    net.tie_weights()
    return net


def placed_bytes(net: nn.Module, device_map: dict[str, int | str]) -> dict:
    """Return the bytes of weights on each place of a device map, and print its modules."""
    by_place = dict.fromkeys(device_map.values(), 0)
    for name, weight in net.named_parameters():
        by_place[place_of(name, device_map)] += weight.nbytes
    for where, nbytes in by_place.items():
        modules = [module or "all" for module, there in device_map.items() if there == where]
        device = f"cuda:{where}" if isinstance(where, int) else where
        size = report.for_people("bytes", nbytes)
        runtime.print0(f"{device}: {size}, {modules[0]} to {modules[-1]}")

    on_gpus = sum(nbytes for where, nbytes in by_place.items() if isinstance(where, int))
    row = {
        "gpu_bytes": on_gpus,
        "cpu_bytes": by_place.get("cpu", 0),
        "disk_bytes": by_place.get("disk", 0),
        "bytes_by_place": by_place,
    }
    # Weights move to where their layer computes: to a GPU, or without one from the disk to the CPU.
    row["moved_bytes"] = row["disk_bytes"]
    if on_gpus:
        row["moved_bytes"] += row["cpu_bytes"]
    return row


def place_of(weight_name: str, device_map: dict[str, int | str]) -> int | str:
    """Return the place of a weight. The innermost module around it that the map names decides."""
    module = weight_name
    while module not in device_map:
        assert module, f"{weight_name} is not in the device map"
        module = module.rpartition(".")[0]
    return device_map[module]


def temporary_folder() -> Path:
    """Create a folder that is deleted when the script ends."""
    folder = tempfile.TemporaryDirectory(prefix="offloaded-", ignore_cleanup_errors=True)
    exits.at_exit.callback(folder.cleanup)
    return Path(folder.name)


def load_with_map(
    args: argparse.Namespace, config: shapes.Config, device_map: dict[str, int | str]
) -> nn.Module:
    """Return transformers' model with each module where the map has it.

    accelerate gives each module a hook that brings input and weights before its forward.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = temporary_folder()
    dtype = DTYPES[args.dtype]
    stored = weights.open_weights(args.model, config)
    needed_bytes = 0  # links
    if stored is None:
        needed_bytes = shapes.parameter_count(config) * dtype.itemsize
    with disk.room_for(needed_bytes, folder):
        content = json.dumps(shapes.config_json(config))
        (folder / "config.json").write_text(content, encoding="utf-8")
        if stored is None:  # random weights
            net = weights.build(args.model, config, seed=args.seed).to(dtype)
            tensors = dict(net.named_parameters())
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            link_weight_files(stored, folder)
    try:
        with disk.room_for(0, folder):
            net, info = AutoModelForCausalLM.from_pretrained(
                folder,
                output_loading_info=True,
                dtype=dtype,
                device_map=device_map,
                offload_folder=temporary_folder(),
            )
    except SafetensorError as error:
        raise UserError(
            f"--model {args.model}: a file is damaged, download it again ({error})"
        ) from None
    if info["missing_keys"]:  # transformers would draw them at random
        raise UserError(f"--model {args.model}: its files lack {', '.join(info['missing_keys'])}")
    return net


def link_weight_files(stored: StoredWeights, folder: Path) -> None:
    """Link the weight files from `folder`, with an index, so that transformers reads no others."""
    weight_map = {}
    for name, tensor in stored.tensors.items():
        weight_map[name] = tensor.file.name
        link = folder / tensor.file.name
        if not link.is_symlink():
            link.symlink_to(tensor.file.resolve())
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )


def steps_of_transformers(net: nn.Module) -> tuple[Callable, Callable]:
    """Return prefill and decode as steps_of does, with transformers' growing cache.

    Prompts are padded on the right. The mask hides the padding from every later token, and
    positions do not count it.
    """
    from transformers import DynamicCache

    past = {}  # the cache, and the mask of the tokens in it, [batch, tokens]

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        output = net.model(
            ids,
            attention_mask=past["mask"],
            position_ids=positions,
            past_key_values=past["cache"],
        )
        return output.last_hidden_state  # [batch, tokens, hidden]

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        past["cache"] = DynamicCache(config=net.config)
        past["mask"] = positions <= last[:, None]
        hidden = forward(ids, positions)
        hidden_of_last = hidden[torch.arange(len(ids)), last.to(hidden.device)]  # [batch, hidden]
        return net.lm_head(hidden_of_last).to(ids.device)

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        past["mask"] = nn.functional.pad(past["mask"], (0, 1), value=True)
        hidden = forward(ids[:, None], positions[:, None])
        return net.lm_head(hidden[:, -1]).to(ids.device)

    return prefill, decode


# --- zero3


def shard_bytes(net: nn.Module) -> dict[str, int]:
    """Return the bytes of this rank's shards, by where they are.

    A norm counts as its shard. The full norms that every rank also keeps do not count.
    """
    row = {"gpu_bytes": 0, "cpu_bytes": 0, "disk_bytes": 0}
    for parameter in net.parameters():
        local_shard = parameter.ds_tensor
        place = "cpu_bytes" if local_shard.device.type == "cpu" else "gpu_bytes"
        row[place] += local_shard.nbytes
    return row


def prompts_of_rank(batch: int, device: torch.device) -> Tensor:
    """Return the numbers of the prompts that this rank computes: every N-th of `batch`."""
    numbers = torch.arange(batch, device=device)
    return numbers[dist.get_rank() :: dist.get_world_size()]


def rows_of_rank(batch: int, device: torch.device) -> Tensor:
    """Return the rows of the batch that this rank's forward reads, at least one.

    With more ranks than prompts, a rank without one computes rank 0's first prompt again.
    """
    numbers = prompts_of_rank(batch, device)
    if len(numbers) == 0:
        return numbers.new_zeros(1)
    return numbers


def steps_of_rank(
    engine: nn.Module, cache: StaticCache, batch: int, device: torch.device
) -> tuple[Callable, Callable]:
    """Return prefill and decode that compute this rank's prompts, and give every rank all logits.

    Every forward gathers weights from all ranks. A rank that stopped at its own last token would
    leave the others waiting. So all ranks choose all tokens, from the same logits, and take part
    until the last prompt has ended.
    """
    prompts = prompts_of_rank(batch, device)
    rows = rows_of_rank(batch, device)

    def all_logits(logits: Tensor) -> Tensor:
        """Return the logits of all prompts, [batch, vocab], from those of this rank's rows."""
        total = logits.new_zeros(batch, logits.shape[-1], dtype=torch.float32)
        total[prompts] = logits[: len(prompts)].float()
        dist.all_reduce(total)  # each row is zero on all ranks but one
        return total

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        logits = engine(ids[rows], positions=positions[rows], cache=cache)  # [rows, tokens, vocab]
        return all_logits(logits[torch.arange(len(rows)), last[rows]])

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        logits = engine(ids[rows, None], positions=positions[rows, None], cache=cache)
        return all_logits(logits[:, -1])

    return prefill, decode


# --- the table


def add_results(row: dict, results: list[Generated]) -> None:
    """Add the tokens of the last answer to a row, and the medians of the times of all answers."""
    last = results[-1]
    decoded = sum(len(ids[1:]) for ids in last.token_ids)  # the prefill has given the first ones
    first_token = [result.prefill_seconds for result in results]
    row["token_ids"] = last.token_ids
    row["time_to_first_token_seconds"] = statistics.median(first_token)
    row["decode_tokens_per_second"] = None
    row["copied_gb_per_s"] = None
    if decoded == 0:
        return
    decode_seconds = statistics.median([result.decode_seconds for result in results])
    row["decode_tokens_per_second"] = decoded / decode_seconds
    row["copied_gb_per_s"] = row["moved_bytes"] * last.decode_steps / decode_seconds / 1e9


def columns(args: argparse.Namespace) -> dict[str, str]:
    """Return the heading of each key that the table shows."""
    headings = {"name": "variant"}
    headings["gpu_bytes"] = "on the device" if args.by == "stream" else "on GPUs"
    if args.by == "stream":
        headings["buffer_bytes"] = "buffers"
    headings["cpu_bytes"] = "in CPU memory"
    if args.by == "device-map":
        headings["disk_bytes"] = "on disk"
    headings["moved_bytes"] = "copied per step"
    if args.dry_run:
        return headings
    headings["time_to_first_token_seconds"] = "first token"
    headings["decode_tokens_per_second"] = "decode"
    if args.by == "stream":
        headings["copied_gb_per_s"] = "GB/s copied"
        headings["time_ratio"] = "time"
    return headings
