"""Answer with a model that no single GPU holds: tensor parallelism over the GPUs of a node.

A 70B model has 131 GiB of weights in bf16. If each GPU held some layers, one would work while the
others wait. Here each rank holds a shard of every matrix, and all ranks compute every layer
together. A rank computes some attention heads, and some channels of the MLP. The output of either
is a partial sum on each rank, so a layer needs two all-reduces of hidden states. A decode step has
one token per text, so these are small.

A decode step reads every weight once. N ranks read N shards at the same time, so a token takes 1/N
of the time, as long as the all-reduces are short. They are short inside a node.

    laptop    python 09_inference/infer_70b.py
              torchrun --standalone --nproc_per_node=3 09_inference/infer_70b.py \\
                  --model models/smollm2-135m --chat --prompt "What is the capital of France?"
              (`make model` makes that folder)
    one node  torchrun --standalone --nproc_per_node=8 09_inference/infer_70b.py \\
                  --model llama-70b --compile
    bytes     python 09_inference/infer_70b.py --model llama-70b --dry-run --world-size 8 \\
                  --memory 80
    cluster   between nodes, two all-reduces per layer and token take too long: use a server such
              as vLLM, which pipelines over nodes

A model named by its size, such as llama-70b, has random weights.

What to look at: the bytes per rank, which are known before anything is loaded, and the share of the
memory bandwidth. Previous: kv_cache.py. Next: quantized.py. The same shards in training:
08_model_parallel/tensor_parallel.py.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _infer_70b as helper
import torch
import torch.distributed as dist
from _prompts import Text, check_tokens, choose_dtype, parser, say_if_random
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from common import cli, lesson, runtime
from common.runtime import DTYPES
from lm import model, shapes, weights
from lm.generate import (
    BUCKET,
    Generated,
    StaticCache,
    compile_layers,
    generate,
    sample,
    speed,
    steps_of,
)
from lm.moe import Load, Mixture, mixtures

# --- 1. the shards


def shard_model(net: model.Transformer, ranks: int, device_type: str) -> None:
    """Make each matrix a DTensor that is sharded over the ranks.

    The model is on the meta device, so nothing is copied or sent.

    Colwise shards a matrix by its outputs: from the full hidden state, a rank computes some heads,
    or some channels of the MLP. Rowwise shards the next matrix by its inputs, so that a rank needs
    only what it has just computed. The result is a partial sum, and an all-reduce gives each rank
    the full sum.
    """
    plan = {
        # Rowwise shards the rows of nn.Embedding.weight: each rank has a part of the vocabulary.
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.[gu]*_proj": ColwiseParallel(),  # gate and up
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        # Each rank computes the logits of a part of the vocabulary. Replicate() gathers them.
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    mesh = init_device_mesh(device_type, (ranks,), mesh_dim_names=("tensor",))
    if len(mixtures(net)) == len(net.model.layers):  # no layer has an MLP
        del plan["model.layers.*.mlp.[gu]*_proj"], plan["model.layers.*.mlp.down_proj"]
    parallelize_module(net, mesh, plan, src_data_rank=None)
    net.tie_weights()  # parallelize_module has made two parameters of one
    for mixture in mixtures(net):
        shard_experts(mixture, mesh)


def shard_experts(mixture: Mixture, mesh: DeviceMesh) -> None:
    """Shard each expert of a mixture as an MLP: a rank has some channels of all experts.

    So every rank has a part of the experts that a token chooses. The router is on all ranks.
    """
    channels = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}  # the dimension of each stack
    for name, dimension in channels.items():
        stack = mixture.experts.get_parameter(name)
        shard = distribute_tensor(stack.detach(), mesh, [Shard(dimension)], src_data_rank=None)
        mixture.experts.register_parameter(name, nn.Parameter(shard))

    def add_up(_module, _inputs, outputs: tuple[Tensor, Load]) -> tuple[Tensor, Load]:
        partial_sums, load = outputs
        return all_reduce(partial_sums, "sum", mesh), load

    mixture.register_forward_hook(add_up)


def load_model(args, config: shapes.Config, device: torch.device) -> model.Transformer:
    """Return the model with this rank's shards of the weights, from files or random.

    No rank ever holds the full model.
    """
    net = weights.build(args.model, config, seed=args.seed, device="meta").to(DTYPES[args.dtype])
    if dist.get_world_size() > 1:
        shard_model(net, dist.get_world_size(), device.type)
    is_large = shapes.parameter_count(config) > weights.DRAWN_ON_CPU
    if args.model in shapes.SIZES and is_large:
        weights.check_weights_fit(net, f"--model {args.model}", device)
        draw_on_device(net, args.seed + dist.get_rank(), device)
        return net
    return weights.materialize(net, args.model, seed=args.seed, device=device)


@torch.no_grad()
def draw_on_device(net: model.Transformer, seed: int, device: torch.device) -> None:
    """Allocate a model from the meta device, and fill this rank's shards with random numbers."""
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two parameters of one
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in net.parameters():
        shard = runtime.local_shard(parameter)
        if shard.ndim > 1:
            shard.normal_(std=0.02, generator=generator)
        else:
            shard.fill_(1)  # a norm


# --- 2. the same token on all ranks


def same_on_all_ranks(choose: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a version of `choose` that gives all ranks the tokens of rank 0.

    Ranks may round differently. If each chose its own token, they would soon write other texts.
    """

    def choose_together(logits: Tensor) -> Tensor:
        tokens = choose(logits)
        dist.broadcast(tokens, src=0)
        return tokens

    return choose_together


# --- 3. the decode step as CUDA graphs


def captured(decode: Callable, cache: StaticCache) -> Callable:
    """Return a decode step that is one launch, so that no kernel waits for Python.

    A CUDA graph reads and writes fixed addresses, so each step copies its inputs there. Attention
    reads the slots in use, rounded up: there is one graph for each multiple of BUCKET slots.
    """
    graphs = {}
    pool = torch.cuda.graph_pool_handle()  # all graphs share the memory of their activations
    all_slots = cache.slots

    def replay(ids: Tensor, positions: Tensor) -> Tensor:
        cache.filled += 1
        slot_count = math.ceil(cache.filled / BUCKET) * BUCKET
        if slot_count not in graphs:
            cache.slots = all_slots[:slot_count]
            graphs[slot_count] = capture(decode, ids.clone(), positions.clone(), pool)
            cache.slots = all_slots  # prefill reads all slots
        graph, static_ids, static_positions, logits = graphs[slot_count]
        static_ids.copy_(ids)
        static_positions.copy_(positions)
        graph.replay()
        return logits

    return replay


def capture(decode: Callable, static_ids: Tensor, static_positions: Tensor, pool: tuple) -> tuple:
    """Return the CUDA graph of a decode step, its inputs and its output."""
    decode(static_ids, static_positions)  # compiles; the replay writes the same to the cache again
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread of the process, such as NCCL's, may call CUDA meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        logits = decode(static_ids, static_positions)
    return graph, static_ids, static_positions, logits


# --- 4. the answer


def read_flags():
    flags = parser(__doc__)
    flags.add_argument(
        "--compile", action="store_true", help="compile the decode step; on a GPU one CUDA graph"
    )
    flags.add_argument(
        "--memory", type=cli.positive, metavar="GIB", help="of each GPU (default: what is free)"
    )
    flags.add_argument(
        "--dry-run", action="store_true", help="show what each of --world-size ranks would hold"
    )
    flags.add_argument(
        "--world-size", type=cli.positive_int, help="with --dry-run: the number of ranks"
    )
    return flags.parse_args()


def run(
    net: model.Transformer, text: Text, args, ranks: int, device: torch.device
) -> tuple[Generated, list[str]]:
    """Answer all prompts. Return the answers and what was checked."""
    cache = StaticCache(
        text.config,
        batch=len(text.prompts),
        length=text.length,
        dtype=DTYPES[args.dtype],
        device=device,
        ranks=ranks,
    )
    prefill, decode = steps_of(net, cache)
    if args.compile and device.type == "cuda":
        compile_layers(net)
        decode = captured(decode, cache)
    elif args.compile:
        decode = torch.compile(decode, dynamic=False)

    def answer(max_new_tokens: int, on_tokens=None) -> Generated:
        generator = torch.Generator(device).manual_seed(args.seed)

        def choose(logits: Tensor) -> Tensor:
            return sample(logits, args, generator)

        return generate(
            prefill,
            decode,
            text.prompts,
            max_new_tokens=max_new_tokens,
            choose=same_on_all_ranks(choose),
            device=device,
            stop=text.stop,
            model=f"--model {args.model}",
            on_tokens=on_tokens,
        )

    # Warm up. A compiled step is captured for each number of slots that it meets.
    answer(args.max_new_tokens if args.compile else min(4, args.max_new_tokens))
    on_tokens = None
    if runtime.is_rank0():
        print(f"prompt: {text.texts[0]}")
        print("answer: ", end="", flush=True)
        on_tokens = helper.printer(text)
    result = answer(args.max_new_tokens, on_tokens)
    runtime.print0("")  # the answer has no line end

    token_ids_of_ranks = runtime.all_gather(result.token_ids)
    for token_ids in token_ids_of_ranks:
        assert token_ids == token_ids_of_ranks[0], (
            f"ranks have different tokens: {token_ids_of_ranks}"
        )
    checked = []
    if ranks > 1:
        checked.append(f"all {ranks} ranks have the same tokens")

    def compare_with_transformers() -> list[str]:
        return check_tokens(result.token_ids, text, args, device)

    return result, checked + runtime.on_rank0(compare_with_transformers)


def main() -> int:
    args = read_flags()
    config = weights.read_config(args.model, experts=True)
    ranks = helper.check_layout(args, config)
    text = Text(args, config)
    cache_tokens = len(text.prompts) * text.length
    if args.dry_run:
        return helper.dry_run(args, config, cache_tokens, shard_model)

    device = runtime.init_process_group(args.device)
    runtime.seed_all(args.seed)
    args.dtype = choose_dtype(args, config, device)
    helper.check_graph(args, config, ranks, device)
    row = helper.check_room(args, config, ranks, cache_tokens, device)
    net = load_model(args, config, device)
    say_if_random(args.model)
    helper.check_bytes(net, args, dist.get_rank(), ranks)
    result, checked = run(net, text, args, ranks, device)

    row |= speed(
        result,
        device,
        weight_bytes=helper.bytes_read_per_step(net, len(text.prompts)),
        bytes_per_slot=row["cache_bytes"] / cache_tokens,
    )
    planned = f"rank 0 holds the {row['weight_bytes']:,} bytes of weights that were planned"
    lesson.end(
        [row],
        columns=helper.COLUMNS,
        checked=[planned, *checked],
        args=args,
        device=device,
        **row,
        parameters=shapes.parameter_count(config),
        token_ids=result.token_ids,
        texts=[text.decode(ids) for ids in result.token_ids],
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
