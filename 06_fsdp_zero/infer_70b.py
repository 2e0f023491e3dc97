"""A model that one device does not hold, answering: four ways to serve it from several.

device-map       one process; whole layers on the GPUs while there is room, then on the CPU, then on the disk. One
                 device computes at a time, and what lies elsewhere is copied to it for every token.
tensor-parallel  a process per GPU; each holds a part of every matrix, and all compute every layer together. Two sums
                 over all ranks per layer: the fastest inside a node, where links are fast.
zero3            a process per GPU; each holds a part of every tensor, gathers a layer when it is due and computes all
                 of it. The link carries every weight for every token: for large batches, or to have it run at all.
pipeline         a process per GPU; each holds some layers and hands hidden states on. Little is sent, so it works
                 between nodes, and all ranks are busy if there are several prompts.

A token needs every weight once. At batch 1 it can therefore not come faster than the weights are read from memory:
that roof is shown beside the speed, for prefill (reading the prompts at once) and decode (token by token) apart.

    laptop    python 06_fsdp_zero/infer_70b.py
    answers   python 06_fsdp_zero/infer_70b.py --model models/smollm2-135m --chat --prompt "What is an atom?"
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/infer_70b.py --model llama-70b --compile
    its bytes python 06_fsdp_zero/infer_70b.py --model llama-70b --dry-run --world-size 8 --memory 80
    cluster   torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 \\
                  06_fsdp_zero/infer_70b.py --model llama-70b --strategy pipeline

A named size gets random weights, made shard by shard: they decode as fast as trained ones. With a folder, a terminal
and no --prompt it answers line by line. Look for: the table before anything is loaded, and the share of the bandwidth.
Before: compare.py. Next: 09_inference/quantized.py, the same model on one card.
"""

import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
import _infer_70b_device_map as accelerated
import _infer_70b_pipeline as pipeline
import _infer_70b_placement as placement
import _infer_70b_terminal as terminal
import _infer_70b_zero3 as zero3
from _infer_70b_dry_run import dry_run
from _infer_70b_flags import check_strategy, parse_args, read_shape
from _infer_70b_report import check_answer, check_parts, print_answers, print_speed, summarize
from _infer_70b_served import Served
from _infer_70b_weights import bytes_per_step, check_folder, fill

from old import exits, generate, hardware, model, report, runtime
from old.inference import Text, read_prompts, stream_to

TYPED_TOKENS = 4096  # of a line that is typed, at most
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_map(args, config, device: torch.device) -> Served:
    """transformers' model, spread by accelerate. Hooks bring each layer its input, and its weights if need be."""
    from transformers import AutoModelForCausalLM

    folder = accelerated.disk_folder()
    if args.random_weights:
        net = accelerated.random_model(args, config, folder)
    else:
        how = {"dtype": args.torch_dtype, "device_map": args.device_map, "offload_folder": folder}
        net = AutoModelForCausalLM.from_pretrained(args.model, **how)

    def generate_spread(prompts: list[list[int]], **how) -> generate.Generated:
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        prefill, decode = accelerated.passes(net, lengths)
        return generate.generate(prefill, decode, prompts, device=device, **how)

    return Served(generate_spread, bytes_per_step(net), config)


def tensor_parallel_styles(layers: int) -> dict:
    """Which way each matrix is cut.

    By its outputs (Colwise): each rank computes some heads, or some columns of the feed-forward part, from the whole
    hidden state. By its inputs (Rowwise): these parts are multiplied where they are, and the products summed over the
    ranks. So a block needs two sums, after o_proj and after down_proj. Norms stay whole.
    """
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),  # each rank looks up some of the tokens
        "lm_head": ColwiseParallel(output_layouts=Replicate()),  # and computes their logits, which all ranks get
    }
    for i in range(layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{i}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{i}.{name}"] = RowwiseParallel()
    return plan


def cut(net: model.Transformer, mesh) -> None:
    """Make each matrix a DTensor that knows which part of it is this rank's. On the meta device: nothing is sent."""
    parallelize_module(net, mesh, tensor_parallel_styles(net.config.num_hidden_layers), src_data_rank=None)
    net.tie_weights()  # it has made two matrices of one


def tensor_parallel(args, config, device: torch.device) -> Served:
    """Our model. Each rank reads its part of the weights from the files, or makes it; no rank ever holds the whole."""
    ranks = dist.get_world_size()
    net = model.build(args.model, config, seed=args.seed, device="meta").to(args.torch_dtype)
    if ranks > 1:
        cut(net, runtime.device_mesh(device, {"tensor": ranks}))
    net.to_empty(device=device)
    net.tie_weights()
    fill(net, args)
    check_parts(net, args.places)
    step = torch.compile(net, dynamic=True) if args.compile else net

    def generate_together(prompts: list[list[int]], *, max_new_tokens: int, sampler, **how) -> generate.Generated:
        length = max(map(len, prompts)) + max_new_tokens
        # of this rank's heads
        cache = generate.StaticCache(
            config, batch=len(prompts), length=length, dtype=args.torch_dtype, device=device, ranks=ranks
        )

        def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
            return net(ids, positions=positions, cache=cache, last=last)

        def decode(ids: Tensor, positions: Tensor) -> Tensor:
            return step(ids[:, None], positions=positions[:, None], cache=cache)[:, -1]

        how |= {"max_new_tokens": max_new_tokens, "sampler": as_rank0(sampler), "device": device}
        return generate.generate(prefill, decode, prompts, read_late=device.type == "cuda", **how)

    return Served(generate_together, bytes_per_step(net), config)


def as_rank0(sampler: generate.Sampler):
    """All ranks go on with rank 0's token: one that rounds differently would soon write another text."""

    def choose(logits: Tensor) -> Tensor:
        tokens = sampler(logits)
        if dist.get_world_size() > 1:
            dist.broadcast(tokens, src=0)
        return tokens

    return choose


STRATEGIES = {
    "device-map": device_map,
    "tensor-parallel": tensor_parallel,
    "zero3": zero3.load,
    "pipeline": pipeline.load,
}


def answer(served: Served, prompts: list[list[int]], text: Text, args) -> generate.Generated:
    """Generate, and show the first answer as it grows."""
    sampler = generate.Sampler(args.temperature, args.top_k, args.top_p, torch.Generator().manual_seed(args.seed))
    how = {"max_new_tokens": args.max_new_tokens, "sampler": sampler, "stop": text.stop}
    if runtime.is_rank0():
        how["on_tokens"] = stream_to(partial(print, end="", flush=True), text)
    result = served.generate(prompts, **how)
    runtime.say("")
    return result


def converse(served: Served, text: Text, args) -> None:
    """Answer what is typed, line by line. Each line stands alone."""
    for line in terminal.lines():
        try:
            prompt = text.encode(line, chat=args.chat, max_new_tokens=args.max_new_tokens)
            if len(prompt) > TYPED_TOKENS:
                raise exits.UserError(f"a line of {len(prompt)} tokens: there is room for {TYPED_TOKENS}")
        except exits.UserError as error:
            runtime.say(f"error: {error}")
            continue
        result = answer(served, [prompt], text, args)
        told = f"{len(result.token_ids[0])} tokens, {1e3 * result.prefill_seconds:.0f} ms to the first"
        if result.decode_steps:
            told += f", then {result.decoded_tokens / result.decode_seconds:,.1f} tokens/s"
        runtime.say(f"({told})")


def main() -> int:
    started = time.perf_counter()
    args = parse_args(__doc__)
    terminal.end_at_once()
    config = read_shape(args.model)
    text = Text(args.model, args.tokenizer, config)
    encode = partial(text.encode, chat=args.chat, max_new_tokens=args.max_new_tokens)
    prompts = [encode(prompt) for prompt in read_prompts(prompt=args.prompt, file=args.prompts)]
    args.batch, args.tokens_per_prompt = len(prompts), max(map(len, prompts)) + args.max_new_tokens
    check_strategy(args, config, args.world_size or exits.world_from_env()[1])
    if args.dry_run:
        args.dtype = "bf16" if args.dtype == "auto" else args.dtype
        args.torch_dtype = DTYPES[args.dtype]
        return dry_run(args, config, cut)

    device = runtime.init_process_group(args.device)
    args.dtype = hardware.choose_dtype(args.dtype, device)
    args.torch_dtype = DTYPES[args.dtype]
    if args.dtype == "fp32":
        runtime.exact_fp32(device)
    args.weight_files = {} if args.random_weights else check_folder(Path(args.model), config)
    runtime.say(f"{args.model} in {args.dtype}, --strategy {args.strategy}, {dist.get_world_size()} x {device.type}")
    nothing_given = args.prompt is None and args.prompts is None
    typed = nothing_given and not args.random_weights and terminal.is_a_terminal()  # random weights have nothing to say
    if typed and args.json:
        raise exits.UserError("--json: of a conversation nothing is written; give --prompt or --prompts")
    if typed:  # one line at a time, of a length that is not known yet
        args.tokens_per_prompt = min(config.max_position_embeddings, TYPED_TOKENS + args.max_new_tokens)
    if args.strategy == "device-map":
        args.device_map, places = accelerated.plan(args, config, device)
    else:
        free = runtime.gather(placement.free_bytes(args, device))
        places = placement.places(args, config, dist.get_world_size(), free)
    args.places = places
    placement.print_places(places)
    placement.refuse_what_does_not_fit(args, config, places)

    served = STRATEGIES[args.strategy](args, config, device)
    if typed:
        converse(served, text, args)
    else:
        served.generate(prompts, max_new_tokens=2, sampler=generate.Sampler(), stop=frozenset())  # the first is slow
        result = answer(served, prompts, text, args)
        summary = summarize(args, served, result, text, device, places, time.perf_counter() - started)
        if len(prompts) > 1:
            print_answers(summary["texts"])
        check_answer(served, prompts, result, args)
        if runtime.is_rank0():
            print_speed(summary)
            report.write_json(summary, args.json)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
