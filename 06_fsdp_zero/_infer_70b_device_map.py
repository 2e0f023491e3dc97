"""--strategy device-map of infer_70b.py: which module goes where, random weights there, and the two passes."""

import logging
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
from _infer_70b_placement import ROOM, Place, bytes_of_cache, free_bytes
from _infer_70b_weights import RandomMatrix, copy_part
from torch import Tensor, nn
from tqdm import tqdm

from old import exits, hardware, shapes

logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)  # that a dry run's GPUs are not here
logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # that some weights are elsewhere is the point


def empty_model(config: shapes.Config, dtype: torch.dtype) -> nn.Module:
    """transformers' Llama of this shape, without numbers."""
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    with init_empty_weights(include_buffers=False):  # its table of frequencies is real, and small
        net = LlamaForCausalLM(LlamaConfig(**shapes.config_json(config))).to(dtype).eval()
    net.tie_weights()  # .to() has made two matrices of one
    return net


def plan(args, config: shapes.Config, device: torch.device, gpus: int | None = None) -> tuple[dict, list[Place]]:
    """Which module goes where, and what each device then holds."""
    if gpus is None:
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    net = empty_model(config, args.torch_dtype)
    cache = bytes_of_cache(args, config)
    device_map = place_modules(net, cache, args, device, gpus)
    return device_map, places(net, device_map, cache, args, device, gpus)


def place_modules(net: nn.Module, cache: int, args, device: torch.device, gpus: int) -> dict[str, int | str]:
    """accelerate's answer: the GPUs are filled in their order, then the CPU, then the disk.

    It counts weights alone, so each device is offered what the cache leaves. A GPU keeps the cache of its layers. The
    first one computes the layers of CPU and disk as well, and keeps their cache too: of all layers, at the most.
    """
    from accelerate import infer_auto_device_map

    room = dict(enumerate(room_of_gpus(args, gpus)))
    layers = net.model.layers
    layer_bytes = sum(parameter.nbytes for parameter in layers[0].parameters())
    layer_cache = -(-cache // len(layers))
    for index in room:
        most = len(layers) if index == 0 else min(len(layers), room[index] // (layer_bytes + layer_cache) + 1)
        room[index] = max(0, room[index] - most * layer_cache)
    in_ram = free_ram(args, device, gpus)
    room["cpu"] = 2**62 if in_ram is None else max(0, int(ROOM * in_ram) - (0 if gpus else cache))
    return infer_auto_device_map(net, max_memory=room, no_split_module_classes=net._no_split_modules)


def free_ram(args, device: torch.device, gpus: int) -> int | None:
    """Of the computer's memory; None in a dry run with GPUs, whose computer is another one."""
    if not gpus:
        return free_bytes(args, device)
    return None if args.dry_run else hardware.available_memory()


def room_of_gpus(args, gpus: int) -> list[int]:
    if args.memory is not None:
        return [int(ROOM * args.memory * 2**30)] * gpus
    return [int(ROOM * torch.cuda.mem_get_info(index)[0]) for index in range(gpus)]


def places(
    net: nn.Module, device_map: dict[str, int | str], cache: int, args, device: torch.device, gpus: int
) -> list[Place]:
    """What each device holds. Tied weights count where their first user is."""
    held, modules = {}, {}
    for name, parameter in net.named_parameters():
        where = device_of(name, device_map)
        held[where] = held.get(where, 0) + parameter.nbytes
        module = name.removeprefix("model.").rpartition(".")[0].split(".self_attn")[0].split(".mlp")[0]
        modules.setdefault(where, {})[module.replace("layers.", "layer ")] = None
    caches = cache_by_device(len(net.model.layers), device_map, cache)
    for where in caches:  # of layers that all lie on the disk, the cache lies elsewhere
        held.setdefault(where, 0)
    room = dict(enumerate(room_of_gpus(args, gpus)))
    free = {where: round(bytes_there / ROOM) for where, bytes_there in room.items()}
    free["cpu"] = free_ram(args, device, gpus)
    written = args.random_weights and not args.dry_run  # else it is in files already
    free["disk"] = shutil.disk_usage(tempfile.gettempdir()).free if written else None
    found = []
    for where in sorted(held, key=lambda where: (isinstance(where, str), str(where))):
        names = [name.split(".")[0] for name in modules.get(where, ["no layer"])]
        told = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        device_name = f"cuda:{where}" if isinstance(where, int) else where
        found.append(Place(device_name, told, held[where], caches.get(where, 0), free[where]))
    return found


def cache_by_device(layers: int, device_map: dict[str, int | str], cache: int) -> dict[int | str, int]:
    """Bytes of the cache where they lie: with the layer, or where a layer of CPU or disk is computed: on the first GPU
    that holds something, else on the CPU."""
    gpus = [where for where in device_map.values() if where not in ("cpu", "disk")]
    main_device = min(gpus, default="cpu")
    held = {}
    for index in range(layers):
        where = device_of(f"model.layers.{index}", device_map)
        if where in ("cpu", "disk"):
            where = main_device
        held[where] = held.get(where, 0) + 1
    return {where: cache * count // layers for where, count in held.items()}


def device_of(name: str, device_map: dict[str, int | str]) -> int | str:
    """Where the module, or the one around it, goes."""
    while name not in device_map:
        name = name.rpartition(".")[0]
        if not name:
            return device_map[""]
    return device_map[name]


def random_model(args, config: shapes.Config, folder: str) -> nn.Module:
    """Random weights made where they belong, one tensor at a time, and those of the disk written to `folder`."""
    from accelerate import dispatch_model
    from accelerate.utils import offload_weight, save_offload_index, set_module_tensor_to_device

    net, on_disk = empty_model(config, args.torch_dtype), {}
    with torch.no_grad():
        for name, empty in tqdm([*net.named_parameters()], desc="loading", disable=None):
            where = device_of(name, args.device_map)
            weight = torch.empty_like(empty, device="cpu" if where == "disk" else where)
            copy_part(weight, RandomMatrix(name, empty.shape, args.seed) if empty.ndim == 2 else None)
            if where == "disk":
                offload_weight(weight, name, folder, on_disk)
            else:
                set_module_tensor_to_device(net, name, where, value=weight)
    net.tie_weights()
    if on_disk:
        if config.tie_word_embeddings and "model.embed_tokens.weight" in on_disk:  # the head's, by its name too
            on_disk["lm_head.weight"] = on_disk["model.embed_tokens.weight"]
            Path(folder, "lm_head.weight.dat").symlink_to("model.embed_tokens.weight.dat")
        save_offload_index(on_disk, folder)
    return dispatch_model(net, args.device_map, offload_dir=folder if on_disk else None)


def disk_folder() -> str:
    """Where layers lie that fit nowhere else; gone when the script ends."""
    folder = tempfile.mkdtemp(prefix="offload-")
    exits.before_exit.append(partial(shutil.rmtree, folder, ignore_errors=True))
    return folder


def passes(net: nn.Module, batch_lengths: Tensor) -> tuple:
    """prefill and decode for common.generate.generate, from transformers' model and its growing cache.

    Prompts are padded on the right. The mask hides the padding from every later token, and a token's position is what
    it would be without it.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=net.config)
    longest = int(batch_lengths.max())
    seen = torch.arange(longest, device=batch_lengths.device) < batch_lengths[:, None]

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        hidden = run(ids, positions)
        return net.lm_head(hidden[torch.arange(len(last)), last.to(hidden.device)]).to(ids.device)

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        nonlocal seen
        seen = torch.cat((seen, seen.new_ones(len(ids), 1)), dim=1)
        return net.lm_head(run(ids[:, None], positions[:, None])[:, -1]).to(ids.device)

    def run(ids: Tensor, positions: Tensor) -> Tensor:
        return net.model(ids, attention_mask=seen, position_ids=positions, past_key_values=cache).last_hidden_state

    return prefill, decode
