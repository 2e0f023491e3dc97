"""What several lessons of this chapter need: ZeRO's groups of parameters, the bytes held and sent, and folders that
other libraries read."""

import json
import math
import shutil
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common import measure, runtime

# files that describe the weights of one folder, and are not copied to another
OWN_FILES = ("config.json", "hashes.json", "settings.json")
MOST_FILE_BYTES = 2e9  # of a .safetensors file, which rank 0 holds whole while it writes it


class Group:
    """Parameters that travel together. They become views into one flat tensor, and each rank owns a part of it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.weights = flatten(parameters)
        for parameter, view in zip(parameters, unflatten(self.weights, parameters), strict=True):
            parameter.data = view
        # a view too, and all that this rank's AdamW knows
        self.my_weights = nn.Parameter(my_part(self.weights))


def flatten(tensors: list[Tensor]) -> Tensor:
    """One after the other in a flat copy, with zeros behind the last so that the ranks divide it."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views into the flat tensor, in the shapes of `like`."""
    sizes = [tensor.numel() for tensor in like]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def my_part(flat: Tensor) -> Tensor:
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def keep_all_gradients(group: Group) -> Tensor:
    """Backward adds each gradient to its view of one flat tensor; AdamW sees this rank's part."""
    gradients = torch.zeros_like(group.weights)
    for parameter, view in zip(
        group.parameters, unflatten(gradients, group.parameters), strict=True
    ):
        parameter.grad = view
    group.my_weights.grad = my_part(gradients)
    return gradients


def group_by_block(net: nn.Module) -> tuple[list[nn.Module], list[Group]]:
    """A group per block, and one for what is around them: embedding, final norm and head, which may share a matrix.
    Also the module that uses each."""
    blocks = list(net.model.layers.values())
    rest = [
        parameter
        for name, parameter in net.named_parameters()
        if not name.startswith("model.layers.")
    ]
    return [*blocks, net], [*(Group(list(block.parameters())) for block in blocks), Group(rest)]


def after_the_last_gradient(parameters: list[nn.Parameter], call: Callable[[], None]) -> None:
    """`call` in every backward, as soon as it has computed the last of their gradients."""
    missing = len(parameters)

    def gradient_is_ready(_: nn.Parameter) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            missing = len(parameters)  # for the next step
            call()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that these tensors look into, each piece once; of a DTensor, this rank's part."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(
        {
            storage._cdata: storage.nbytes() for storage in (t.untyped_storage() for t in local)
        }.values()
    )


def bytes_of_training(weights: list[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What weights, gradients and optimizer state hold on this rank."""
    states = optimizer.state.values()
    return {
        "parameter_bytes_per_rank": held_bytes(weights),
        "gradient_bytes_per_rank": held_bytes(
            weight.grad for weight in weights if weight.grad is not None
        ),
        "optimizer_bytes_per_rank": held_bytes(
            tensor for state in states for tensor in state.values()
        ),
    }


class SummedBytes(measure.OperatorBytes):
    """Keep the bytes alive as a sum that follows each storage as it is made, resized and freed.

    To add up thousands of pieces after each operator would take minutes for 80 layers.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by address
        self._sum = 0
        super().__init__()

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_

        # ZeRO-3 and fully_shard free and fill their memory so
        def resize(storage: torch.UntypedStorage, size: int):
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    @property
    def now(self) -> int:
        return self._sum

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._set, storage._cdata, None)
        self._set(storage._cdata, storage.nbytes())

    def _set(self, address: int, size: int | None) -> None:
        self._sum += (size or 0) - self._sizes.pop(address, 0)
        if size is not None:
            self._sizes[address] = size


def step_memory(device: torch.device) -> measure.AllocatorBytes | SummedBytes:
    """Return a counter of bytes alive whose peak can begin anew for each step."""
    if device.type == "cuda":
        return measure.AllocatorBytes(device)
    return SummedBytes()


def of_zero(stage: int, net: nn.Module, ranks: int) -> dict[str, int]:
    """From the model's shape alone, in fp32 with AdamW. Stage 0 is data parallelism, an all-reduce per parameter."""
    parameters = [parameter.numel() for parameter in net.parameters()]
    whole = sum(parameters)
    blocks = [
        sum(parameter.numel() for parameter in block.parameters())
        for block in net.model.layers.values()
    ]
    groups = [whole] if stage == 1 else [*blocks, whole - sum(blocks)]  # what is cut in one piece
    part = sum(math.ceil(size / ranks) for size in groups)
    padded = part * ranks if stage else whole
    updated_tensors = len(groups) if stage else len(parameters)
    trips = 3 if stage == 3 else 2  # of all weights round the ring
    return {
        "parameter_bytes_per_rank": 4 * (part if stage == 3 else padded),
        "gradient_bytes_per_rank": 4 * (part if stage >= 2 else padded),
        # two moments of each element, and of each tensor the number of steps so far
        "optimizer_bytes_per_rank": 8 * (part if stage else whole) + 4 * updated_tensors,
        "all_gathers_per_step": (0, 1, len(groups), 2 * len(groups))[stage],
        "reduce_scatters_per_step": (0, 1, len(groups), len(groups))[stage],
        "all_reduces_per_step": 0 if stage else updated_tensors,
        "bytes_sent_per_rank_per_step": round(trips * 4 * padded * (ranks - 1) / ranks),
    }


def of_fully_shard(net: nn.Module, ranks: int, copies: int, gathered_bytes: int) -> dict[str, int]:
    """FSDP, or HSDP with several copies: each tensor is cut by rows; for rows that a rank lacks it sends zeros."""
    shards = ranks // copies
    parts = {
        name: math.ceil(p.shape[0] / shards) * p.shape[1:].numel()
        for name, p in net.named_parameters()
    }
    part, part_of_blocks = (
        sum(parts.values()),
        sum(parts[name] for name in parts if name.startswith("model.layers.")),
    )
    groups = len(net.model.layers) + 1
    # the root once, a block in forward and in backward
    gathered = gathered_bytes * (part + part_of_blocks)
    between_copies = 2 * 4 * part * (copies - 1) / copies
    return {
        "parameter_bytes_per_rank": 4 * part,
        "gradient_bytes_per_rank": 4 * part,
        "optimizer_bytes_per_rank": 8 * part + 4 * len(parts),
        "all_gathers_per_step": 2 * groups - 1 if shards > 1 else 0,
        "reduce_scatters_per_step": groups if shards > 1 else 0,
        "all_reduces_per_step": groups if copies > 1 else 0,
        "bytes_sent_per_rank_per_step": round(
            (gathered + 4 * part) * (shards - 1) + between_copies
        ),
    }


def write_folder(
    tensors: dict[str, Tensor], read: Callable, folder: Path, config: dict, origin: Path
) -> None:
    """A Hugging Face folder, file by file. `tensors` are on the meta device, and `read` gives one by its name: every
    rank calls it for each, for it may have to gather it, and rank 0 keeps those of a file. origin: whose tokenizer."""
    numbers, filled = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + int(filled // MOST_FILE_BYTES)
        filled += tensor.nbytes
    files = {
        name: f"model-{number:05d}-of-{max(numbers.values()):05d}.safetensors"
        for name, number in numbers.items()
    }
    unfinished = folder.with_name(folder.name + ".tmp")

    def begin() -> None:
        for old in (folder, unfinished):  # of a run that was killed here, or has since gone on
            shutil.rmtree(old, ignore_errors=True)
        unfinished.mkdir()

    def end() -> None:
        index = {"metadata": {"total_size": filled}, "weight_map": files}
        for name, content in (("config.json", config), ("model.safetensors.index.json", index)):
            (unfinished / name).write_text(json.dumps(content, indent=1) + "\n")
        copy_tokenizer(origin, unfinished)
        unfinished.rename(folder)

    runtime.on_rank0(begin)
    for file in dict.fromkeys(files.values()):
        kept = {}
        for name in [name for name in files if files[name] == file]:
            tensor = read(name)
            if runtime.is_rank0():
                kept[name] = tensor.cpu().contiguous()
        runtime.on_rank0(partial(save_file, kept, unfinished / file, metadata={"format": "pt"}))
    runtime.on_rank0(end)


def copy_tokenizer(origin: Path, folder: Path) -> None:
    """Copy the files of a Hugging Face folder that are not of its weights: tokenizer, templates.

    Do nothing if `origin` is not a folder, as when a model has no weights of its own.
    """
    if not origin.is_dir():
        return
    for file in origin.iterdir():
        of_weights = file.name in OWN_FILES or file.name.endswith(".index.json")
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not of_weights:
            shutil.copy(file, folder / file.name)
    templates = origin / "additional_chat_templates"  # beside chat_template.jinja, by name
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)


def write_adapter(
    trained: dict[str, Tensor], folder: Path, base: str, rank: int, alpha: float
) -> None:
    """For peft: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder) reads it."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-2] for name in trained}),  # ...q_proj.lora_A
    }
    folder.mkdir(exist_ok=True)
    peft_names = {f"base_model.model.{name}.weight": tensor for name, tensor in trained.items()}
    save_file(peft_names, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
