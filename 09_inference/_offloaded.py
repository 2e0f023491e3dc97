"""What offloaded.py needs around its two ways: flags that contradict each other, folders, bytes, DeepSpeed imported."""

import json
import logging
import os
import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
from _generate import DTYPES
from torch import nn

from common import exits, report, runtime
from lm import shapes, weights
from lm.weight_files import INDEX, StoredWeights

# it warns that weights are offloaded: that is the point here
logging.getLogger("accelerate").setLevel(logging.ERROR)


def check_flags(args) -> None:
    """UserError for flags that contradict each other."""
    if args.by == "zero3" and (args.memory is not None or args.dry_run):
        raise exits.UserError(
            "--memory and --dry-run belong to --by device-map: zero3 holds 1/N on each rank"
        )
    if args.by == "device-map" and args.offload != "none":
        raise exits.UserError(
            f"--offload {args.offload} belongs to --by zero3; here --memory limits each GPU"
        )
    if args.by == "device-map" and runtime.ranks()[1] > 1:
        raise exits.UserError(
            "--by device-map is one process for all GPUs: start it with python, or add --by zero3"
        )
    if args.world_size is not None and not (args.dry_run and args.memory):
        raise exits.UserError(
            "--world-size N needs --dry-run and --memory GIB: it places the model on N such GPUs"
        )


def free_bytes(args, device: torch.device) -> dict[int | str, int]:
    """What each place has room for, in the order in which they are filled. --memory limits the GPUs, or the CPU where
    there is none. In a dry run for GPUs the CPU takes the rest: its memory is not known here."""
    import psutil

    limit = args.memory and int(args.memory * 2**30)
    if args.world_size is not None:
        return dict.fromkeys(range(args.world_size), limit) | {"cpu": 2**60}
    in_memory = psutil.virtual_memory().available
    if device.type != "cuda":
        return {"cpu": limit or in_memory}
    gpus = range(torch.cuda.device_count())
    return {gpu: limit or torch.cuda.mem_get_info(gpu)[0] for gpu in gpus} | {"cpu": in_memory}


def empty_model(config: shapes.Config, dtype: torch.dtype) -> nn.Module:
    """transformers' model of this shape, without numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**shapes.config_json(config))
        ).to(dtype)
    net.tie_weights()
    return net


def bytes_of_places(net: nn.Module, device_map: dict[str, int | str]) -> dict[int | str, int]:
    """Bytes of the weights on each place of the map, printed with its modules; tied weights count once."""
    found = dict.fromkeys(device_map.values(), 0)
    for name, weight in net.named_parameters():
        around = [
            module for module in device_map if f"{name}.".startswith(f"{module}.") or module == ""
        ]
        found[device_map[max(around, key=len)]] += weight.nbytes
    for where, nbytes in found.items():
        modules = [module or "all" for module, there in device_map.items() if there == where]
        device = f"cuda:{where}" if isinstance(where, int) else where
        print(
            f"{device}: {report.for_people('bytes', nbytes)}, {modules[0]} to {modules[-1]}",
            flush=True,
        )
    return found


def temporary_folder() -> str:
    """Gone when the script ends."""
    folder = tempfile.mkdtemp(prefix="offloaded-")
    exits.before_exit.append(partial(shutil.rmtree, folder, ignore_errors=True))
    return folder


def load(args, config: shapes.Config, device_map: dict[str, int | str]) -> nn.Module:
    """transformers' model, each module where the map has it. A hook before each forward brings input and weights."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = temporary_folder()
    Path(folder, "config.json").write_text(json.dumps(shapes.config_json(config)))
    stored = weights.open_weights(args.model, config)
    if stored is None:  # random weights
        net = weights.build(args.model, config, seed=args.seed).to(DTYPES[args.dtype])
        save_file(
            dict(net.named_parameters()), f"{folder}/model.safetensors", metadata={"format": "pt"}
        )
    else:
        link_weight_files(stored, Path(folder))
    how = {
        "dtype": DTYPES[args.dtype],
        "device_map": device_map,
        "offload_folder": temporary_folder(),
    }
    try:
        net, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **how)
    except SafetensorError as error:
        raise exits.UserError(
            f"--model {args.model}: a file is damaged, download it again ({error})"
        ) from None
    if found["missing_keys"]:  # transformers would draw them at random
        raise exits.UserError(
            f"--model {args.model}: its files lack {', '.join(found['missing_keys'])}"
        )
    return net


def link_weight_files(stored: StoredWeights, folder: Path) -> None:
    """Link the weight files from `folder`, with an index: transformers reads these and no others."""
    weight_map = {}
    for name, tensor in stored.tensors.items():
        weight_map[name] = tensor.file.name
        link = folder / tensor.file.name
        if not link.is_symlink():
            link.symlink_to(tensor.file.resolve())
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def import_deepspeed(device: torch.device):
    """The package, for this device and in the process group that is there."""
    # read by the import; else it takes a GPU wherever it finds one
    os.environ["DS_ACCELERATOR"] = device.type
    # read by zero.Init, also in one process without torchrun
    os.environ.setdefault("LOCAL_RANK", "0")
    logging.disable(logging.INFO)  # the import itself logs, to stdout
    import deepspeed

    logging.disable(logging.NOTSET)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # names that torch has since changed
    warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)
    # on a CPU it would compile an all-reduce through shared memory, for two minutes, which is not used here
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    return deepspeed


@torch.no_grad()
def fill(deepspeed, net: nn.Module, args) -> None:
    """Fill the model with the weights of the folder, or with random ones.

    Rank 0 reads them tensor by tensor, and each rank keeps its part.
    """
    stored = weights.open_weights(args.model, net.config)
    for name, parameter in net.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if not runtime.is_rank0():
                continue
            if stored is None:
                weight = weights.random_weight(name, parameter.ds_shape, args.seed)
            else:
                weight = stored.read(name)
            parameter.copy_(weight)


def held_bytes(net: nn.Module) -> dict[str, int]:
    """Bytes of this rank's parts of the weights, by where they are. Without norms, which are kept whole beside them."""
    found = {"gpu_bytes": 0, "cpu_bytes": 0}
    for parameter in net.parameters():
        part = parameter.ds_tensor
        found["cpu_bytes" if part.device.type == "cpu" else "gpu_bytes"] += part.nbytes
    return found
