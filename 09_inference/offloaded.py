"""Offloading: answer with a model that does not fit on the GPU.

A decode step needs every weight once, layer by layer. So a model can be larger than the GPU's
memory: its layers wait in the CPU's memory, and in every step each layer is copied to the GPU when
it is due. Two buffers on the GPU, each as large as a layer, are enough:

    buffer A   | compute layer 0 | copy layer 2    | compute layer 2 | copy layer 4    |
    buffer B   | copy layer 1    | compute layer 1 | copy layer 3    | compute layer 3 |

A step takes at least as long as the copies, bytes / link bandwidth, and links are 50 to 100 times
slower than a GPU's memory. So offloading is for models that cannot run otherwise, or for many
prompts at once, which share one trip of the weights. There are three variants:

    stream      one process, the two buffers above, written out in this script
    device-map  one process, transformers and accelerate: the first layers are on the GPUs, as many
                as fit there, the next in the CPU's memory, the others on the disk
    zero3       a process per GPU, DeepSpeed: each rank holds 1/N of every tensor, on the GPU or in
                the CPU's memory. All ranks gather a layer when it is due, compute with the full
                tensors, each for its own prompts, and free it

    laptop    python 09_inference/offloaded.py
              python 09_inference/offloaded.py --by device-map --memory 0.012  (GiB: some on disk)
              torchrun --standalone --nproc_per_node=2 09_inference/offloaded.py --by zero3
    one GPU   python 09_inference/offloaded.py --device cuda
              python 09_inference/offloaded.py --model models/llama-70b --memory 70
    its bytes python 09_inference/offloaded.py --by device-map --model llama-70b --dry-run \\
                  --world-size 2 --memory 80
    one node  torchrun --standalone --nproc_per_node=4 09_inference/offloaded.py \\
                  --by zero3 --offload cpu --prompts questions.txt
    cluster   the same on every node, but in place of --standalone
              --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

--memory GIB is what the model may take on the GPU: the layers that fit there beside the buffers
stay. On a CPU both places are the same memory, so look at the bytes and not at the times. A named
size has random weights, which are drawn on the CPU: that takes minutes for llama-8b.

What to look at: the bytes that are copied in each step, and the bytes on the GPU. Expected on an
H100, where the model is llama-1b in bf16: a step copies 1.95 GB, at least 30 ms over PCIe 5.0
(64 GB/s), and with all weights on the GPU it reads them in at least 0.74 ms (3.35 TB/s by the data
sheet). With one buffer, a step takes the time of the computation on top of that, which is short for
one short prompt.
Previous: speculative.py. Next: export.py.
"""

import copy
import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _offloaded as helper
import _prompts
import torch
from torch import Tensor, nn

from common import lesson, measure, runtime
from common.runtime import DTYPES
from lm import model, shapes, weights, zero
from lm.generate import StaticCache, steps_of

# --- 1. stream: two buffers on the device


@dataclass
class Buffer:
    """Memory on the device for one layer, and what it holds."""

    module: nn.Module
    computed: "torch.cuda.Event"  # recorded after the last forward of what it held
    layer: int | None = None  # which layer it holds
    copied: "torch.cuda.Event | None" = None  # recorded after the copy of this layer


class LayerStream:
    """Copies layers from host memory to the device, one ahead of the computation.

    For a GPU the host memory is pinned: Linux never moves it, and the GPU's copy engine reads it
    without the CPU.
    """

    def __init__(self, layers: list[nn.Module], buffers: int, device: torch.device) -> None:
        self.layers = layers
        # torch.cuda, or torch.cpu, where the same names wait for nothing
        self.backend = torch.get_device_module(device)
        self.copy_stream = self.backend.Stream()  # beside the stream that computes
        self.buffers: deque[Buffer] = deque()  # the one that was filled last is at the end
        for _ in range(buffers):
            module = copy.deepcopy(layers[0]).to(device)
            self.buffers.append(Buffer(module, self.backend.current_stream().record_event()))
        self.copied_bytes = 0

    def compute(self, layer: int, *inputs) -> Tensor:
        """Return the output of a layer, and start the copy of the next one."""
        buffer = self.fetch(layer)  # its copy began one layer ago, or at the first call now
        self.backend.current_stream().wait_event(buffer.copied)
        output = buffer.module(*inputs)
        buffer.computed = self.backend.current_stream().record_event()
        # A GPU has only queued the computation, so this copy runs beside it. After the last layer
        # comes the first one of the next step.
        self.fetch((layer + 1) % len(self.layers))
        return output

    def fetch(self, layer: int) -> Buffer:
        """Return the buffer that holds a layer, or that will when `copied` has happened."""
        for buffer in self.buffers:
            if buffer.layer == layer:
                return buffer
        buffer = self.buffers.popleft()
        self.buffers.append(buffer)
        buffer.layer = layer
        self.copy_stream.wait_event(buffer.computed)  # until then it holds a layer that is in use
        with self.backend.stream(self.copy_stream):
            sources = self.layers[layer].parameters()
            for target, source in zip(buffer.module.parameters(), sources, strict=True):
                target.copy_(source, non_blocking=True)
                self.copied_bytes += source.nbytes
            buffer.copied = self.copy_stream.record_event()
        return buffer


class StreamedLayer(nn.Module):
    """Takes the place of a layer in the model. It has no weights: they pass through a stream."""

    def __init__(self, stream: LayerStream, layer: int) -> None:
        super().__init__()
        self.stream = stream
        self.layer = layer

    def forward(self, *inputs) -> Tensor:
        return self.stream.compute(self.layer, *inputs)


def with_streamed_layers(
    net: model.Transformer,
    host_layers: list[nn.Module],
    stay: int,
    buffers: int,
    device: torch.device,
) -> tuple[nn.Module, LayerStream | None]:
    """Return a model whose first `stay` layers are on the device, and whose others are streamed.

    `net` is a model without layers on the device: embedding, norm and head are used by all copies.
    """
    shared = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    net = copy.deepcopy(net, memo=shared)  # deepcopy does not copy what is in memo
    for i, layer in enumerate(host_layers[:stay]):
        net.model.layers[str(i)] = copy.deepcopy(layer).to(device)
    if stay == len(host_layers):
        return net, None
    stream = LayerStream(host_layers[stay:], buffers, device)
    for i in range(stay, len(host_layers)):
        net.model.layers[str(i)] = StreamedLayer(stream, i - stay)
    return net, stream


def run_stream(
    args, config: shapes.Config, text: _prompts.Text, device: torch.device
) -> tuple[list[dict], list[str]]:
    """Answer with all weights on the device if they fit, with one buffer, and with two.

    Return the rows, and what was checked.
    """
    dtype = DTYPES[args.dtype]
    net = weights.build(args.model, config, seed=args.seed, device="meta").to(dtype)
    stay = helper.layers_that_stay(net, args, text)
    weights.materialize(net, args.model, seed=args.seed, device="cpu")
    layers = list(net.model.layers.values())
    if device.type == "cuda":
        for layer in layers:
            helper.pin(layer)
    net.model.layers.clear()
    net.to(device)

    # For each variant: how many layers stay on the device, and how many buffers the others use.
    variants = {"two buffers": (stay, 2)}
    rounds = 1
    if helper.fits_twice(net, layers, device):  # else there is nothing to compare with
        variants = {
            helper.ON_DEVICE: (len(layers), 0),
            "one buffer": (stay, 1),
            "two buffers": (stay, 2),
        }
        rounds = 3

    answers = {}
    streams = {}
    rows = {}
    for name, (stay, buffers) in variants.items():
        variant, streams[name] = with_streamed_layers(net, layers, stay, buffers, device)
        cache = StaticCache(
            config, batch=len(text.prompts), length=text.length, dtype=dtype, device=device
        )
        steps = steps_of(variant, cache)
        answers[name] = partial(_prompts.answer, steps, text, args, device)
        rows[name] = helper.row_of(name, variant, streams[name])

    results = {name: [] for name in variants}

    def answer(name: str) -> None:
        results[name].append(answers[name]())

    calls = {name: partial(answer, name) for name in variants}
    timing = measure.seconds_in_turns(calls, device, rounds)
    for name, row in rows.items():
        row |= timing[name]
        helper.add_results(row, results[name][1:])  # without the warm-up
    rows = list(rows.values())
    return rows, helper.check_stream(rows, streams, results)


# --- 2. device-map: accelerate places whole layers


def place(net: nn.Module, free: dict[int | str, int], cache_bytes: int) -> dict[str, int | str]:
    """Return a device map: the place of each module, which is the number of a GPU, "cpu" or "disk".

    `free` has the free bytes of each place. accelerate counts weights only, so each place is
    offered what the KV cache leaves of it, and a margin less.
    """
    from accelerate import infer_auto_device_map

    room = {}
    for where, free_bytes in free.items():
        room[where] = max(0, int(0.95 * free_bytes) - cache_bytes)
    return infer_auto_device_map(
        net, max_memory=room, no_split_module_classes=net._no_split_modules
    )


# --- 3. zero3: DeepSpeed shards each tensor


def shard(args, config: shapes.Config, device: torch.device) -> nn.Module:
    """Return our model in DeepSpeed's engine.

    Each tensor is sharded as soon as it is made. A full tensor exists only while it is used.
    """
    deepspeed = zero.import_deepspeed(device)
    embedding_size = config.vocab_size * config.hidden_size
    layer_size = (shapes.parameter_count(config) - embedding_size) // config.num_hidden_layers
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # required, although nothing is trained
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16"},  # neither: fp32
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": layer_size,  # elements: gather one layer ahead
            "stage3_max_live_parameters": 2 * layer_size,
            "stage3_max_reuse_distance": 0,  # free a layer after its forward
            # norms stay on every rank
            "stage3_param_persistence_threshold": config.hidden_size + 1,
            # a GPU copies from pinned memory while it computes
            "offload_param": {"device": args.offload, "pin_memory": device.type == "cuda"},
        },
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        net = model.Transformer(config)
    zero.fill_weights(net, args.model, args.seed)
    net.requires_grad_(False)
    # fills the tables of the rotary embedding again: zero.Init has rounded them to 16 bits
    net.to(device)
    engine, *_ = deepspeed.initialize(model=net, config=settings, dist_init_required=False)
    engine.eval()
    return engine


# --- the libraries' variants: bytes by place, prefill and decode


def by_device_map(
    args, config: shapes.Config, text: _prompts.Text, device: torch.device
) -> tuple[dict, tuple[Callable, Callable] | None, list[str]]:
    """Return the row with the bytes, prefill and decode, and what was checked.

    A dry run places the weights and loads nothing. It has no prefill and decode.
    """
    dtype = DTYPES[args.dtype]
    net = helper.empty_model(config, dtype)
    cache_bytes = helper.cache_bytes(config, dtype, text)
    device_map = place(net, helper.free_bytes(args, device), cache_bytes)
    row = helper.placed_bytes(net, device_map)
    if args.dry_run:
        return row, None, []
    net = helper.load_with_map(args, config, device_map)
    moved = sum(weight.nbytes for weight in net.parameters() if weight.is_meta)
    assert moved == row["moved_bytes"], (
        f"{moved} bytes are offloaded, and {row['moved_bytes']} were planned"
    )
    checked = f"{moved:,} bytes of weights travel for each step, as planned"
    return row, helper.steps_of_transformers(net), [checked]


def by_zero3(
    args, config: shapes.Config, text: _prompts.Text, device: torch.device
) -> tuple[dict, tuple[Callable, Callable], list[str]]:
    """Return the row with the bytes of this rank, prefill and decode, and what was checked."""
    world_size = runtime.ranks().world_size
    dtype = DTYPES[args.dtype]
    engine = shard(args, config, device)
    row = helper.shard_bytes(engine.module)
    held = row["gpu_bytes"] + row["cpu_bytes"]
    planned = 0
    for weight in weights.build(args.model, config, seed=0, device="meta").parameters():
        planned += dtype.itemsize * math.ceil(weight.numel() / world_size)
    assert held == planned, (
        f"{held} bytes of weights on this rank, and 1/{world_size} are {planned}"
    )
    # What is not on this device comes from other ranks and from the CPU.
    on_device = row["gpu_bytes"] if device.type == "cuda" else held
    row["moved_bytes"] = shapes.parameter_count(config) * dtype.itemsize - on_device
    cache = StaticCache(
        config,
        batch=len(helper.rows_of_rank(len(text.prompts), device)),
        length=text.length,
        dtype=dtype,
        device=device,
    )
    steps = helper.steps_of_rank(engine, cache, len(text.prompts), device)
    return row, steps, [f"this rank holds {held:,} bytes: 1/{world_size} of each tensor"]


def run_library(
    args, config: shapes.Config, text: _prompts.Text, device: torch.device
) -> tuple[list[dict], list[str]]:
    """Answer by device map or ZeRO-3. Return one row, and what was checked."""
    if args.by == "device-map":
        row, steps, checked = by_device_map(args, config, text, device)
    else:
        row, steps, checked = by_zero3(args, config, text, device)
    row["name"] = args.by
    if steps is None:
        return [row], checked
    warm_up_tokens = min(helper.WARM_UP_TOKENS, args.max_new_tokens)
    _prompts.answer(steps, text, args, device, max_new_tokens=warm_up_tokens)
    result = _prompts.answer(steps, text, args, device)
    helper.add_results(row, [result])
    answers_of_ranks = runtime.all_gather(result.token_ids)
    assert all(token_ids == answers_of_ranks[0] for token_ids in answers_of_ranks), (
        f"ranks have different tokens: {answers_of_ranks}"
    )
    if len(answers_of_ranks) > 1:
        checked.append(f"all {len(answers_of_ranks)} ranks have the same tokens")
    return [row], checked


def main() -> int:
    args = helper.parse_flags(__doc__)
    config = weights.read_config(args.model)
    text = _prompts.Text(args, config)
    if args.by == "zero3":
        device = runtime.init_process_group(args.device)
    else:
        device = runtime.single_device(args.device)
    if device.type == "mps":
        device = torch.device("cpu")
    runtime.seed_all(args.seed)
    if args.dry_run and args.dtype == "auto":
        args.dtype = "bf16"  # of the GPUs that are not here
    else:
        args.dtype = _prompts.choose_dtype(args, config, device)

    run = run_stream if args.by == "stream" else run_library
    rows, checked = run(args, config, text, device)
    token_ids = rows[-1].get("token_ids")  # none in a dry run
    own = rows[-1] | {"parameters": shapes.parameter_count(config)}
    own.pop("seconds", None)  # in the summary, `seconds` is the time of the script
    if args.dry_run:
        own["world_size"] = args.world_size or 1
    else:
        own["texts"] = [text.decode(ids) for ids in token_ids]
        _prompts.say_if_random(args.model)
        runtime.print0(own["texts"][0])
        checked += runtime.on_rank0(partial(_prompts.check_tokens, token_ids, text, args, device))
    lesson.end(rows, columns=helper.columns(args), checked=checked, args=args, device=device, **own)
    if args.by == "zero3":
        runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
