"""What train_3d.py needs beside train_fsdp.py: meshes, a part of each sequence, a stage, and what a dry run counts."""

import logging
import math
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common import report, runtime
from common.exits import UserError
from common.report import table
from common.torch_versions import all_gather_with_backward
from lm import model, shapes
from lm.data import Batches, load_corpus, sequences
from lm.defaults import ON_CPU
from lm.weights import build

# DTensor warns of two collectives in a row, over tensor ranks and over shards: here for a norm, and for the digest.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def adapt_defaults(args) -> None:
    """Replace defaults of a GPU that the layout does not allow. Flags that were given stay.

    Tensor parallelism is not compiled, and the tied head of llama-124m cannot be on another stage
    than its embedding.
    """
    if args.pp > 1 and "model" not in args.given:
        args.model = ON_CPU.model
    if "compile" not in args.given and (args.tp > 1 or args.pp > 1):
        args.compile = False


def data_ranks(args, world_size: int) -> int:
    """How many parts the batch is divided into."""
    unit = args.tp * args.pp * args.cp * args.replicate
    if world_size % unit:
        sizes = f"--tp {args.tp} x --pp {args.pp} x --cp {args.cp} x --replicate {args.replicate} = {unit}"
        raise UserError(
            f"{sizes} does not divide {world_size} processes: start {-(-world_size // unit) * unit}"
        )
    return world_size // (args.tp * args.pp * args.cp)


def find_place(args) -> list[int]:
    """This rank's number along --pp, data, --cp and --tp. Tensor ranks talk most: they are neighbours."""
    sizes = (args.pp, data_ranks(args, dist.get_world_size()), args.cp, args.tp)
    return [int(number) for number in np.unravel_index(dist.get_rank(), sizes)]


def make_mesh(args, device: torch.device) -> DeviceMesh:
    """The ranks by what they hold of the weights, which context ranks divide as data ranks do. What is not cut has no
    dimension here: each dimension is a group, and each group of NCCL takes memory, even if it has one rank."""
    shards = data_ranks(args, dist.get_world_size()) * args.cp // args.replicate
    sizes = {"pipeline": args.pp, "replicate": args.replicate, "shard": shards, "tensor": args.tp}
    # fully_shard always needs one
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:  # its groups would take torch's own timeout
        dist.distributed_c10d._set_pg_timeout(runtime.timeout(), mesh.get_group(name))
    return mesh


def check_cuts(args, config: shapes.Config, batches: Batches) -> None:
    """UserError if the model or the batch cannot be cut so."""
    tp, pp, cp, of_model = args.tp, args.pp, args.cp, f"of --model {args.model}"
    if tp > 1 and args.compile:
        raise UserError(
            f"--compile with --tp {tp}: compiled, gradients are not those of one process: leave it out"
        )
    # the last, since fully_shard cuts parts of unequal size at other rows than DTensor
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = {name: getattr(config, name) for name in names}
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % tp]:
        use = max(n for n in range(1, tp) if math.gcd(*sizes.values()) % n == 0)
        raise UserError(
            f"--tp {tp} does not divide the {', '.join(odd)} {of_model}: use --tp {use}"
        )
    if args.seq_len % (cp * tp):
        use = max(1, args.seq_len // (cp * tp)) * cp * tp
        raise UserError(
            f"--seq-len {args.seq_len} does not divide over --cp {cp} x --tp {tp} ranks: use {use}"
        )
    if pp > config.num_hidden_layers:
        raise UserError(
            f"--pp {pp} is more than the {config.num_hidden_layers} layers {of_model}: use fewer stages"
        )
    if pp > 1 and config.tie_word_embeddings:
        raise UserError(
            f"--pp {pp}: embedding and head {of_model} are tied, and would be in two stages: use --pp 1"
        )
    if batches.accumulation_steps < pp:
        use = "a smaller --micro-batch-size, or a larger --global-batch-size"
        raise UserError(
            f"--pp {pp} needs {pp} micro-batches per step, not {batches.accumulation_steps}: use {use}"
        )


def cut_sequence(
    net: nn.Module, args, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device
) -> slice:
    """Have the model compute this rank's part of each sequence; returns its columns of a batch."""
    own, number = args.seq_len // args.cp, find_place(args)[2]
    columns = slice(number * own, (number + 1) * own)
    positions = torch.arange(args.seq_len, device=net.model.rope_cos.device)
    # a later stage could not count them: with --tp its hidden states are those of some tokens
    net.forward = partial(net.forward, positions=positions[columns])
    if args.cp > 1:
        # if those that share my sequences are those that share my weights
        group = mesh.get_group("shard")
        if args.cp < mesh["shard"].size():
            ranks = (
                torch.arange(dist.get_world_size())
                .view(-1, args.cp, args.tp)
                .movedim(1, 2)
                .flatten(0, 1)
            )
            group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), runtime.timeout())
        future = (positions > positions[columns, None]).to(device)
        # attention would turn True and False into such a mask in each layer anew, and keep them all
        mask = torch.zeros(future.shape, dtype=dtype, device=device).masked_fill_(
            future, -torch.inf
        )
        for block in net.model.layers.values():
            block.self_attn.attend = partial(attend_to_all, mask=mask, group=group)
    return columns


def attend_to_all(
    q: Tensor, k: Tensor, v: Tensor, *_, mask: Tensor, group: dist.ProcessGroup, **how
) -> Tensor:
    """Attention of this rank's queries, [batch, heads, tokens, head_dim], to the keys and values of all ranks. In
    backward a reduce-scatter adds up what the queries of all ranks have found for my keys and values."""
    # one collective for both
    parts = all_gather_with_backward(torch.stack((k, v)), gather_dim=0, group=group)
    # one rank's tokens after the other's
    keys, values = parts.unflatten(0, (-1, 2)).movedim(0, 3).flatten(3, 4)
    return model.attend(q, keys, values, mask, enable_gqa=how["enable_gqa"])


class Stage:
    """This rank's stage of the pipeline: tokens or the hidden states of the stage before become hidden states, in the
    last stage the loss. Where there is one stage it is both."""

    def __init__(
        self, net, args, batches, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.number, self.count = find_place(args)[0], args.pp
        self.is_last = self.number == self.count - 1
        sent = (
            batches.micro_batch_size,
            args.seq_len // args.cp // args.tp,
            net.config.hidden_size,
        )
        # what the stage before sends, without backward
        self.hidden = torch.zeros(sent, dtype=dtype, device=device)
        if self.count == 1:
            return
        self.group = mesh.get_group("pipeline")
        stage = PipelineStage(net, self.number, self.count, device, group=self.group)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            mean = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            # micro-batches have equal token counts
            return runtime.full_tensor(mean) / batches.accumulation_steps

        # One forward, one backward: a stage holds the activations of at most as many micro-batches as there are stages.
        # scale_grads would divide by the number of micro-batches, which the loss does already
        self.schedule = Schedule1F1B(
            stage, batches.accumulation_steps, loss_fn=loss, scale_grads=False
        )

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """All micro-batches of a step, one after the other in inputs and targets, through all stages and back. Returns
        the loss of this rank's tokens, such that its mean over the stages is right: 0 before the last."""
        losses, tokens = [], (inputs,) if self.number == 0 else ()
        self.schedule.step(*tokens, target=targets, losses=losses, return_outputs=False)
        return self.count * sum(losses, torch.zeros((), device=targets.device))

    def receive(self, tokens: Tensor) -> Tensor:
        """Forward alone: what this stage takes, tokens in the first one."""
        if self.number == 0:
            return tokens
        dist.recv(self.hidden, group=self.group, group_src=self.number - 1)
        return self.hidden

    def send(self, hidden: Tensor) -> None:
        dist.send(hidden.contiguous(), group=self.group, group_dst=self.number + 1)


def clip_over_stages(
    parameters: list[nn.Parameter], largest_norm: float, mesh: DeviceMesh
) -> Tensor:
    """Scale all gradients as one process would: by the norm over all stages."""
    norm = runtime.full_tensor(get_total_norm([parameter.grad for parameter in parameters]))
    if "pipeline" in mesh.mesh_dim_names:
        dist.all_reduce(squared := norm**2, group=mesh.get_group("pipeline"))
        norm = squared.sqrt()
    clip_grads_with_norm_(parameters, largest_norm, norm)
    return norm


def check_parts(
    net: nn.Module, optimizer: torch.optim.Optimizer, args, mesh: DeviceMesh
) -> dict[str, list[int]]:
    """The bytes of weights and of optimizer state that each rank holds, in rank order. AssertionError if they are not
    the ranks' parts, in fp32: low precision is in the arithmetic, never in what is kept."""
    whole = dict(build("", net.config, seed=0, device="meta").named_parameters())
    tensor, shard = find_place(args)[3], mesh["shard"]
    weights = state = due = 0  # bytes
    for name, parameter in net.named_parameters():
        part = whole[name]
        # [outputs, inputs]; the second of a pair is cut by its inputs
        if not name.endswith("norm.weight"):
            by_inputs = name.endswith(("o_proj.weight", "down_proj.weight"))
            part = part.chunk(args.tp, int(by_inputs))[tensor]
        rows = part.chunk(shard.size())[shard.get_local_rank() :]  # the last ranks may have none
        due += rows[0].nbytes if rows else 0
        weights += parameter.to_local().nbytes
        state += sum(t.to_local().nbytes for t in optimizer.state[parameter].values() if t.ndim)
    by_rank = runtime.all_gather((weights, state, due))
    assert all(found == (found[2], 2 * found[2], found[2]) for found in by_rank), (
        f"bytes by rank: {by_rank}"
    )
    weights, state, due = map(list, zip(*by_rank, strict=True))
    # nothing is missing: of each copy of the model all that is cut, and each norm once per tensor rank
    total = sum(
        t.nbytes * (args.tp if name.endswith("norm.weight") else 1) for name, t in whole.items()
    )
    assert sum(due) == args.replicate * total, f"bytes by rank: {due}, of copies of {total}"
    runtime.print0(
        f"checked: each rank holds its part of weights and optimizer state, at most {max(weights):,} bytes"
    )
    return {"parameter_bytes_per_rank": weights, "optimizer_bytes_per_rank": state}


def dry_run(args, build) -> int:
    """Print, and write to --json, what the first rank of each stage holds: built by `build`, on fake ranks."""
    if not args.dry_run or runtime.ranks()[1] > 1:
        raise UserError(
            "--world-size goes with --dry-run, which is one process without torchrun: give both or none"
        )
    args.dtype = "bf16" if args.dtype == "auto" else args.dtype  # as on a GPU
    args.world_size = args.world_size or args.tp * args.pp * args.cp * args.replicate
    corpus = load_corpus(args.data, args.tokenizer, args.model, args.run_dir, args.eval_data)
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    ranks_with_own_data = data_ranks(args, args.world_size)
    batches = Batches(
        *sequences(corpus, args.seq_len), args, rank=0, world_size=ranks_with_own_data
    )
    check_cuts(args, config, batches)
    # a process for each stage: none can be another rank later
    with ProcessPoolExecutor(
        min(args.pp, os.cpu_count()), get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        rows = list(pool.map(partial(count_bytes, args, config, build), range(args.pp)))
    print(f"{args.model}: bytes on the first rank of each stage, of {args.world_size} fake ranks\n")
    print(
        table(
            [
                [*rows[0]],
                *([report.for_people(key, value) for key, value in row.items()] for row in rows),
            ]
        )
    )
    summary = {
        name: getattr(args, name)
        for name in ("model", "dtype", "world_size", "tp", "pp", "cp", "replicate")
    }
    report.write_json({**summary, "device": "fake", "stages": rows}, args.json)
    return 0


def count_bytes(args, config: shapes.Config, build, stage: int) -> dict[str, int]:
    """What the first rank of a stage holds, in fp32 and with two moments, as check_parts finds it in every run."""
    device = runtime.join_fake_ranks(stage * args.world_size // args.pp, args.world_size)
    net = build(args, config, make_mesh(args, device), device)
    weights = sum(parameter.to_local().nbytes for parameter in net.parameters())
    held = {"weight_bytes": weights, "gradient_bytes": weights, "optimizer_bytes": 2 * weights}
    return {"stage": stage, "layers": len(net.model.layers), **held}
