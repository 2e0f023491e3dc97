"""Tensor-parallel inference: a model that no GPU holds answers from all GPUs of a node.

A 70B model is 131 GiB in bf16. Layer by layer on several GPUs, one works while the others wait. Here each rank holds a
part of every matrix, and all compute every layer together: whole attention heads, and a part of the MLP. Each of
these gives a partial sum of its output, so each layer needs two all-reduces of the hidden states; a decode step has one
token per text, so they are small there. It reads every weight once; N ranks read N parts at the same time, so the time
of a token falls with N as long as the all-reduces are short: inside a node.

    laptop    python 09_inference/infer_70b.py
              torchrun --nproc_per_node=3 09_inference/infer_70b.py --model models/smollm2-135m --chat \\
                  --prompt "What is the capital of France?"                    (make model makes that folder)
    one node  torchrun --nproc_per_node=8 09_inference/infer_70b.py --model llama-70b --compile
    its bytes python 09_inference/infer_70b.py --model llama-70b --dry-run --world-size 8 --memory 80
    cluster   two all-reduces per layer and token are too many between nodes: use a server such as vLLM there

A named size has random weights. Look for: the bytes that each rank holds, known before anything is loaded; the share of
the memory bandwidth. Before: 08_model_parallel/tensor_parallel.py, the same cuts in training. Next: offloaded.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _generate as shared
from _infer_70b import check_bytes, check_layout, check_room, dry_run, held_bytes, local, printer

from common import cli, exits, report, runtime
from lm import model, shapes, weights

DRAWN_ON_CPU = 2e9  # parameters; a CPU takes a quarter of an hour to draw those of llama-70b


def cut(net: model.Transformer, ranks: int, device_type: str) -> None:
    """Make each matrix a DTensor that knows this rank's part of it. On the meta device, so nothing is copied or sent.

    Colwise cuts a matrix by its outputs: a rank computes some heads, or some channels of the MLP, from a copy of
    the hidden state. Rowwise cuts the next matrix by its inputs: each rank has the part that it has just computed.
    The result is a partial sum, and the all-reduce after it gives each rank a copy of the whole sum.
    """
    plan = {
        # a rank has a part of the vocabulary
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.[gu]*_proj": ColwiseParallel(),  # gate and up
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        # a rank's part of the logits; then gathered
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    mesh = init_device_mesh(device_type, (ranks,), mesh_dim_names=("tensor",))
    parallelize_module(net, mesh, plan, src_data_rank=None)
    net.tie_weights()  # parallelize_module has made two parameters of one


def as_rank0(choose: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """All ranks go on with rank 0's token. One that rounds differently would soon write another text."""

    def choose_together(logits: Tensor) -> Tensor:
        tokens = choose(logits)
        dist.broadcast(tokens, src=0)
        return tokens

    return choose_together


def load(args, config: shapes.Config, device: torch.device) -> model.Transformer:
    """The model with this rank's part of the weights, from the files or random. No rank ever holds the whole."""
    net = weights.build(args.model, config, seed=args.seed, device="meta").to(
        shared.DTYPES[args.dtype]
    )
    if dist.get_world_size() > 1:
        cut(net, dist.get_world_size(), device.type)
    if args.model not in shapes.SIZES or shapes.parameter_count(config) <= DRAWN_ON_CPU:
        return weights.materialize(net, args.model, seed=args.seed, device=device)
    net.to_empty(device=device)
    net.tie_weights()
    generator = torch.Generator(device).manual_seed(args.seed + dist.get_rank())
    with torch.no_grad():
        for weight in map(local, net.parameters()):
            weight.normal_(std=0.02, generator=generator) if weight.ndim > 1 else weight.fill_(1)
    return net


def main() -> int:
    flags = shared.parser(__doc__)
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
    args = flags.parse_args()
    config = shapes.read_config(args.model)
    ranks = check_layout(args, config)
    text = shared.Text(args, config)
    cache_tokens = len(text.prompts) * text.length
    if args.dry_run:
        return dry_run(args, config, cache_tokens, cut)

    device = runtime.init_process_group(args.device)
    runtime.seed_all(args.seed)
    args.dtype = shared.choose_dtype(args, config, device)
    row = check_room(args, config, ranks, cache_tokens, device)
    net = load(args, config, device)
    check_bytes(net, args, dist.get_rank(), ranks)
    kind = {"dtype": shared.DTYPES[args.dtype], "device": device}
    cache = shared.StaticCache(
        config, batch=len(text.prompts), length=text.length, ranks=ranks, **kind
    )
    prefill, decode = shared.steps_of(net, cache)
    if args.compile:
        (decode,) = shared.compiled(net, cache, decode)

    def answer(new_tokens: int, on_tokens=None):
        generator = torch.Generator(device).manual_seed(args.seed)
        choose = as_rank0(lambda logits: shared.sample(logits, args, generator))
        how = {"max_new_tokens": new_tokens, "choose": choose, "device": device, "stop": text.stop}
        return shared.generate(prefill, decode, text.prompts, on_tokens=on_tokens, **how)

    # the first steps are slow, compiled ones in each bucket
    answer(args.max_new_tokens if args.compile else min(4, args.max_new_tokens))
    result = answer(args.max_new_tokens, printer(text) if runtime.is_rank0() else None)
    of_ranks = runtime.all_gather(result.token_ids)
    assert all(ids == of_ranks[0] for ids in of_ranks), f"ranks have different tokens: {of_ranks}"
    checked = [f"rank 0 holds the {row['weight_bytes']:,} bytes of weights that were planned"]
    checked += [f"all {ranks} ranks have the same tokens"] if ranks > 1 else []
    checked += runtime.on_rank0(lambda: shared.check_tokens(result.token_ids, text, args, device))
    row |= shared.speed(result, device, held_bytes(net, read=True))
    columns = {
        "weight_bytes": "weights per rank",
        "cache_bytes": "cache",
        "time_to_first_token_seconds": "first token",
        "prefill_tokens_per_second": "prefill",
        "decode_tokens_per_second": "decode",
        "bandwidth_share": "of memory bandwidth",
        "copy_rate_share": "of copy rate",
    }
    own = {"parameters": shapes.parameter_count(config), "token_ids": result.token_ids}
    own["texts"] = [text.decode(ids) for ids in result.token_ids]
    report.end_lesson(
        [row], columns=columns, checked=checked, args=args, device=device, **row, **own
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
