r"""Train a language model on a mesh of ranks, with each kind of parallelism of this chapter.

With train_fsdp.py, each rank holds a shard of the weights, but computes full layers on full
sequences. At some size this no longer works: the activations of a layer do not fit on one GPU, or
there are more GPUs than sequences in a batch. This script also shards the computation.

    --tp N       tensor parallelism: N ranks share each matmul
    --pp N       pipeline parallelism: N stages have some consecutive layers each
                 (--schedule interleaved: two smaller stages on each of N ranks)
    --cp N       context parallelism: N ranks share each sequence
    --ep N       expert parallelism: N ranks share the experts of each layer

The remaining factor of the world size is data parallelism: world size / (tp * pp * cp) groups of
ranks read different sequences. fully_shard shards the weights over the data and context ranks.
--replicate N keeps N copies (HSDP). --ep takes no factor of its own: data, tensor and context ranks
have different tokens, and each rank holds 1/N of the experts. fully_shard shards them over the
ranks that hold the same ones.

    laptop    torchrun --standalone --nproc_per_node=4 08_model_parallel/train_3d.py --tp 2 --cp 2
    one node  torchrun --standalone --nproc_per_node=8 08_model_parallel/train_3d.py \
                  --model llama-8b --pp 2 --cp 2 --seq-len 8192 --micro-batch-size 1 \
                  --global-batch-size 128
    cluster   the same on every node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB
              before the script, and after it
              --model llama-70b --tp 8 --pp 4 --micro-batch-size 1, or
              --model moe-30b-a3b --ep 8 --micro-batch-size 1 --global-batch-size 64
    dry run   python 08_model_parallel/train_3d.py --dry-run --world-size 32 --model llama-70b \
                  --tp 8 --pp 4 --micro-batch-size 1
              It trains nothing, and prints the bytes of weights and optimizer state of each stage.

What to look at: with --dtype fp32 the losses are those of 06_fsdp_zero/train_fsdp.py on every mesh,
up to rounding. The last lines check how many bytes each rank holds; --json lists them by rank.

Previous: 06_fsdp_zero/train_fsdp.py, and the lesson of this chapter about each kind of parallelism.
Next: 09_inference/kv_cache.py.
"""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _train_3d as helper
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _stages import keep_stages, share_rope_tables
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention.bias import CausalBias, causal_lower_right

from common import cli, hardware, report, runtime
from common.torch_versions import all_gather_with_backward
from lm import balance, data, exchange, shapes, weights
from lm.activation_checkpointing import checkpoint_blocks
from lm.moe import Mixture, mixtures
from lm.stages import STAGES_PER_RANK, stages_of_rank
from training import checkpoint, flags, micro_batch, optim
from training.batches import PADDING, Batches
from training.digest import digest
from training.meter import Meter
from training.training_objects import TrainingObjects


# YOURS: replace this function to train your own model on your own data.
def load_training_objects(args, data_rank, data_ranks, device):
    """Return the model without memory, the batches of this rank, and what must match on resume.

    The batch is shared out over `data_ranks` ranks. The tensor, context and pipeline ranks with the
    same data_rank read the same sequences. The model is on the meta device: it has shapes and no
    data. training/training_objects.py says what the model and the batches must do.
    """
    # Raise for a model that is unknown or too large, before the text is tokenized.
    held_on = "meta" if args.dry_run else device
    weights.check_model(args.model, held_on, copies=args.replicate)
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir, args.eval_data)
    train_set, held_out_set = data.sequences(corpus, args.seq_len)
    config = weights.load_config(args.model, corpus.vocab_size, args.seq_len, experts=True)
    model = weights.build(args.model, config, seed=args.seed, device="meta")
    batches = Batches(train_set, held_out_set, args, rank=data_rank, world_size=data_ranks)
    experts = balance.callbacks(args, model, batches, device)  # of a mixture of experts
    return TrainingObjects(
        model=model,
        name=args.model,
        batches=batches,
        must_match={
            "data": corpus.sha256,
            "model": repr(config),
            "weights of --model": weights.fingerprint(args.model),
            **balance.setting(args),
        },
        flops_per_token=shapes.flops_per_token(config, args.seq_len),
        config_json=shapes.config_json(config),
        **experts,
    )


# --- the mesh


class Place(NamedTuple):
    """The numbers of a rank: which layers, sequences, tokens and matrix shards it has."""

    pipeline_rank: int
    data_rank: int
    context_rank: int
    tensor_rank: int


def find_place(args, data_ranks: int) -> Place:
    """Return the place of this rank in the mesh.

    Tensor ranks communicate most, so they are neighbours, and torchrun starts them on the same
    node. Pipeline ranks communicate least. For example, 8 ranks with --tp 2 --pp 2:

        rank           0  1  2  3  4  5  6  7
        tensor rank    0  1  0  1  0  1  0  1
        data rank      0  0  1  1  0  0  1  1
        pipeline rank  0  0  0  0  1  1  1  1
    """
    rest, tensor_rank = divmod(dist.get_rank(), args.tp)
    rest, context_rank = divmod(rest, args.cp)
    pipeline_rank, data_rank = divmod(rest, data_ranks)
    return Place(pipeline_rank, data_rank, context_rank, tensor_rank)


def make_mesh(args, data_ranks: int, device: torch.device) -> DeviceMesh:
    """Return the mesh: the ranks, arranged by what they hold of the model.

    Context ranks hold the same layers and matrices, and their tokens differ. So FSDP can shard the
    weights over them as it does over data ranks: the dimension "shard" has both.
    """
    sizes = {
        "pipeline": args.pp,
        "replicate": args.replicate,
        "shard": data_ranks // args.replicate * args.cp,
        "tensor": args.tp,
    }
    # Each dimension becomes a process group, which takes memory on a GPU. So leave out dimensions
    # of size 1. fully_shard always needs "shard".
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:
        # The groups of a mesh start with torch's own timeout, not with that of the job.
        runtime.set_timeout(mesh.get_group(name))
    return mesh


# --- tensor parallelism


# YOURS: the names of your model's layers.
def shard_matrices(model, mesh: DeviceMesh) -> None:
    """Shard each matrix over the tensor ranks, by a plan for torch's DTensor.

    Inside attention and the MLP, a rank has all tokens, and some of the heads or channels. Between
    them it has all channels of some tokens, [batch, tokens / tp, hidden] (sequence parallelism).
    tensor_parallel.py does the same by hand.
    """
    all_tokens = Replicate()
    my_tokens = Shard(1)
    plan = {
        "model.layers.*.*_layernorm": SequenceParallel(),
        # Attention: an all-gather of the tokens, then some of the heads on each rank, then a
        # reduce-scatter. Of the arguments x, cos and sin, only x is sharded.
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(my_tokens, None, None), desired_input_layouts=(all_tokens, None, None)
        ),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=my_tokens),
    }
    for number, block in model.model.layers.items():
        mlp = f"model.layers.{number}.mlp"
        if isinstance(block.mlp, Mixture):
            # No all-gather: to a mixture of experts, tensor ranks are ranks with other tokens.
            plan[mlp] = PrepareModuleInput(
                input_layouts=my_tokens, desired_input_layouts=my_tokens, use_local_output=True
            )
        else:
            # An all-gather, then some of the channels on each rank, then a reduce-scatter.
            plan[mlp] = PrepareModuleInput(
                input_layouts=my_tokens, desired_input_layouts=all_tokens
            )
            plan[f"{mlp}.gate_proj"] = ColwiseParallel()
            plan[f"{mlp}.up_proj"] = ColwiseParallel()
            plan[f"{mlp}.down_proj"] = RowwiseParallel(output_layouts=my_tokens)
    if model.config.qk_norm:
        # The input is [batch, tokens, heads / tp, head_dim]. SequenceParallel replicates the weight
        # and takes any dimension as sharded, here the heads. DTensor sums the gradients of the
        # weight over the tensor ranks.
        by_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["model.layers.*.self_attn.[qk]_norm"] = by_heads
    if model.model.embed_tokens is not None:
        # Each rank has some rows of the embedding, and outputs zeros for tokens whose row is on
        # another rank. A reduce-scatter sums the outputs, and leaves each rank its own tokens.
        plan["model.embed_tokens"] = RowwiseParallel(
            input_layouts=all_tokens, output_layouts=my_tokens
        )
    if model.lm_head is not None:
        plan["model.norm"] = SequenceParallel()
        # Logits stay sharded by vocabulary. loss_parallel() computes the loss from the shards.
        plan["lm_head"] = ColwiseParallel(
            input_layouts=my_tokens, output_layouts=Shard(-1), use_local_output=False
        )
    # By default torch sends the weights of the first tensor rank to the others. Here there are none
    # yet: the parameters are on the meta device.
    parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
    for mixture in mixtures(model):
        # Each tensor rank has the whole router. local_weight of lm/moe.py says that its gradient is
        # the sum over these ranks.
        router = mixture.gate.weight.detach()
        router = distribute_tensor(router, mesh["tensor"], [Replicate()], src_data_rank=None)
        mixture.gate.weight = nn.Parameter(router)
    if model.model.embed_tokens is not None:
        model.model.embed_tokens.register_forward_hook(wait_for_tokens)
    # Embedding and head may share one parameter, which parallelize_module has replaced by two.
    model.tie_weights()


def wait_for_tokens(_embedding: nn.Module, _inputs: tuple, hidden: Tensor) -> Tensor:
    """Wait for the reduce-scatter of the embedding's output, before the first block gets it.

    The output is an AsyncCollectiveTensor: torch waits for its values where they are first used.
    In torch 2.13 a compiled block takes it for a tensor that needs no gradient, and the embedding
    gets none (https://github.com/pytorch/pytorch/pull/191113). clone() uses the values.
    """
    return hidden.clone()


# --- context parallelism


def shard_sequences(
    stages: dict[int, nn.Module], args, mesh: DeviceMesh, place: Place, device: torch.device
) -> Tensor:
    """Prepare the stages for this rank's tokens of each sequence; return their positions.

    With --cp, a sequence has 2 * cp chunks, and rank r has chunks r and 2 * cp - 1 - r. The first
    chunk sees one chunk of keys, and the last one sees all of them. In this order, called zigzag,
    each rank computes equally many scores. With --cp 4:

        context rank   0    1    2    3
        chunks         0 7  1 6  2 5  3 4
    """
    chunk_positions = torch.arange(args.seq_len, device=device).chunk(2 * args.cp)
    chunks = (place.context_rank, 2 * args.cp - 1 - place.context_rank)
    my_positions = torch.cat([chunk_positions[chunk] for chunk in chunks])

    # By default the model numbers the tokens of its input from 0. With --cp, a rank's tokens are
    # elsewhere. With --tp and --pp, the input of a later stage has only tokens / tp, and attention
    # gathers them again. So always pass the positions.
    for module in stages.values():
        module.forward = partial(module.forward, positions=my_positions)
    if args.cp == 1:
        return my_positions

    # The last query of a chunk sees all keys up to the end of the chunk. With a fused kernel these
    # masks store nothing: they tell the kernel in which corner of the scores the diagonal ends.
    # torch.compile cannot trace their creation, so make them once, outside of the blocks.
    tokens = args.seq_len // (2 * args.cp)
    masks = [causal_lower_right(tokens, (chunk + 1) * tokens) for chunk in chunks]
    group = context_group(args, mesh)
    for module in stages.values():
        for block in module.model.layers.values():
            block.self_attn.attend = partial(attend_to_all_tokens, masks=masks, group=group)
    return my_positions


def context_group(args, mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of the ranks that share this rank's sequences."""
    if args.cp == mesh["shard"].size():
        return mesh.get_group("shard")  # the same ranks
    # cp * tp consecutive ranks read the same sequences. Of these, ranks with the same tensor rank
    # have the same heads, and form a group. For --tp 2 --cp 2: [0, 2], [1, 3], [4, 6], [5, 7].
    groups = []
    for first in range(0, dist.get_world_size(), args.cp * args.tp):
        for tensor_rank in range(args.tp):
            start = first + tensor_rank
            groups.append(list(range(start, start + args.cp * args.tp, args.tp)))
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=runtime.timeout())
    return group


def attend_to_all_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: None,
    *,
    is_causal: bool,
    enable_gqa: bool,
    masks: list[CausalBias],
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute causal attention of this rank's two chunks to the keys and values of all ranks.

    It replaces `attend` of lm/model.py, and has its arguments up to enable_gqa. It ignores _mask
    and is_causal, because each chunk of queries has its own mask. q is [batch, heads, tokens / cp,
    head_dim].

    In backward, a reduce-scatter sums the gradients of this rank's keys and values, which the
    queries of all ranks have used.
    """
    # In memory a token's heads are together, as the matmuls before and after attention have them.
    k = k.transpose(1, 2)  # [batch, tokens / cp, kv_heads, head_dim]
    v = v.transpose(1, 2)
    kv = torch.stack((k, v))  # one collective for both
    gathered = all_gather_with_backward(kv, gather_dim=0, group=group)  # [cp * 2, batch, ...]
    # [cp, 2, batch, 2, tokens of a chunk, kv_heads, head_dim]
    gathered = gathered.unflatten(0, (-1, 2)).unflatten(3, (2, -1))
    early, late = gathered.unbind(3)
    in_order = torch.cat((early, late.flip(0)))  # [cp * 2, 2, batch, chunk, kv_heads, head_dim]
    in_order = in_order.movedim(0, 2).flatten(2, 3)  # [2, batch, tokens, kv_heads, head_dim]
    if enable_gqa and q.dtype == torch.float32:
        # In fp32 torch has no fused kernel for grouped heads. It would make a mask in memory.
        in_order = in_order.repeat_interleave(q.shape[1] // k.shape[2], dim=3)
        enable_gqa = False
    keys, values = in_order.transpose(2, 3)  # each [batch, heads, tokens, head_dim]

    outputs = []
    for queries, mask in zip(q.chunk(2, dim=2), masks, strict=True):
        end = mask.seq_len_kv  # the chunk sees no key after its own
        output = F.scaled_dot_product_attention(
            queries, keys[:, :, :end], values[:, :, :end], mask, enable_gqa=enable_gqa
        )
        outputs.append(output.transpose(1, 2))  # [batch, tokens of a chunk, heads, head_dim]
    return torch.cat(outputs, dim=1).transpose(1, 2)


# --- expert parallelism


def make_expert_mesh(args, device_type: str) -> DeviceMesh:
    """Return the mesh of the experts: the ranks, arranged by which experts they hold.

    All ranks have different tokens, tensor ranks too. --ep neighbours split the experts: each
    expert is whole on one of them. The ranks with the same experts form the dimension "shard", over
    which FSDP splits them again. For example, 8 ranks with --tp 2 --ep 4:

        rank           0  1  2  3  4  5  6  7
        tensor rank    0  1  0  1  0  1  0  1
        expert rank    0  1  2  3  0  1  2  3
        "shard"        0  0  0  0  1  1  1  1
    """
    ranks_of_copy = dist.get_world_size() // args.replicate
    sizes = {
        "replicate": args.replicate,
        "shard": ranks_of_copy // args.ep,
        "expert": args.ep,
    }
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:
        runtime.set_timeout(mesh.get_group(name))
    return mesh


def shard_experts(model, args, mesh: DeviceMesh, options: dict) -> None:
    """Shard the experts of each layer: whole ones over the expert ranks, then each by FSDP.

    The gradient should be the sum over all ranks, divided by ranks / tp, because tensor ranks share
    one loss. The exchange sums over the expert ranks, whose rows come to the expert. fully_shard
    sums over the others, and divides by ranks / ep. So a factor of tp / ep is left.
    """
    options = options | {"mesh": mesh["shard"]}
    if args.replicate > 1:
        options["mesh"] = mesh["replicate", "shard"]
    for mixture in mixtures(model):
        experts = mixture.experts
        experts.gradient_factor = args.tp / args.ep
        if args.ep > 1:
            exchange.shard_experts(experts, mesh["expert"])
            group = mesh.get_group("expert")
            mixture.run_experts = partial(exchange.run_experts, experts, group)
        fully_shard(experts, **options)


# --- data parallelism, and the order in which all of them are applied


# YOURS: the layers of your model.
def parallelize(model, args, mesh: DeviceMesh, pipeline_rank: int) -> dict[int, nn.Module]:
    """Reduce a model on the meta device to what this rank holds of it. The order matters.

    Return this rank's stages by number. Without --pp the model is stage 0 of 1.
    """
    # 1. Some of the layers.
    kept = stages_of_rank(pipeline_rank, args.pp, args.schedule)
    stages = keep_stages(model, kept, args.pp * STAGES_PER_RANK[args.schedule])
    if args.tp > 1:
        shard_matrices(model, mesh)  # 2. of these layers, some heads and channels
    checkpoint_blocks(model, args.checkpointing)  # 3. backward recomputes activations

    # 4. Of these matrices, some rows.
    options = {
        "mesh": mesh["shard"],
        # The matmuls run in args.dtype. Gradients are summed in fp32, with one exception: with --tp
        # torch 2.13 sums those of norms and routers over the tensor ranks in args.dtype
        # (pytorch#190626), and over the other ranks in fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=runtime.DTYPES[args.dtype],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        # None frees the gathered weights of each group after its forward, but not those of the root
        # module, which backward needs first.
        "reshard_after_forward": None if args.reshard_after_forward == "on" else False,
    }
    if args.replicate > 1:
        options["mesh"] = mesh["replicate", "shard"]

    # Tensor ranks and expert ranks have different tokens. For experts they count as data ranks, on
    # a mesh of their own, and before the block.
    experts_apart = bool(mixtures(model)) and max(args.ep, args.tp) > 1
    if experts_apart:
        shard_experts(model, args, make_expert_mesh(args, mesh.device_type), options)
    # Each block is gathered, computed and freed as one. Compile a block before it is sharded.
    for block in model.model.layers.values():
        if args.compile:
            block.compile(fullgraph=True)
        fully_shard(block, **options)
        if experts_apart and isinstance(block.mlp, Mixture):
            # The CPU waits in the exchange. So start the experts' all-gather before attention.
            block.set_modules_to_forward_prefetch([block.mlp.experts])
    if not model.config.tie_word_embeddings:
        # Two groups, so that embedding and head are not gathered at the same time.
        if model.model.embed_tokens is not None:
            fully_shard(model.model.embed_tokens, **options)
            # The gradient of an embedding does not depend on its weight: backward need not gather
            # it.
            model.model.embed_tokens.set_unshard_in_backward(False)
        if model.lm_head is not None:
            # Backward starts with the head, so it stays gathered after forward.
            head_options = options | {"reshard_after_forward": False}
            fully_shard([model.model.norm, model.lm_head], **head_options)
    # The root modules. The root of a tied model is a group, too: embedding, final norm and head.
    for module in stages.values():
        fully_shard(module, **options)
    return stages


# --- pipeline parallelism


class Pipeline:
    """The stages of this rank, and what they exchange with the stages before and after them.

    The first stage turns tokens into hidden states, [micro_batch, tokens / cp / tp, hidden]. It
    sends them to the next stage, and so on. The last stage computes the loss. The gradients of the
    hidden states travel back. A step has several micro-batches, so that all stages have work at the
    same time.

    stage(inputs) returns hidden states, and logits on the last stage. With targets, the last stage
    returns their loss instead.
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        args,
        batches: Batches,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.ranks = args.pp
        self.last = args.pp * len(stages) - 1
        self.group = mesh.get_group("pipeline")
        some_stage, *_ = stages.values()
        # Evaluation receives hidden states in this buffer.
        self.hidden = torch.zeros(
            batches.micro_batch_size,
            args.seq_len // args.cp // args.tp,
            some_stage.config.hidden_size,
            dtype=runtime.DTYPES[args.dtype],
            device=device,
        )

        def loss_of_micro_batch(logits: Tensor, targets: Tensor) -> Tensor:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            # full_tensor: with --tp, loss_parallel returns a DTensor. All micro-batches have
            # equally many targets, so the mean of their means is the mean over all targets.
            return runtime.full_tensor(loss) / batches.accumulation_steps

        torch_stages = []
        for number, module in stages.items():
            stage = PipelineStage(module, number, self.last + 1, device, group=self.group)
            torch_stages.append(stage)
        options = {
            "n_microbatches": batches.accumulation_steps,
            "loss_fn": loss_of_micro_batch,
            "scale_grads": False,  # the loss is already divided by the number of micro-batches
        }
        # pipeline_parallel.py draws both schedules. torch lets FSDP reduce-scatter after the last
        # backward of a step only, so a rank holds the full gradients of its stages.
        if args.schedule == "interleaved":
            # Stages are half as large, so the pipeline fills and drains in half the time.
            self.schedule = ScheduleInterleaved1F1B(torch_stages, **options)
        else:
            # "One forward, one backward": a stage holds the activations of at most args.pp
            # micro-batches.
            self.schedule = Schedule1F1B(*torch_stages, **options)

    @property
    def has_last(self) -> bool:
        """True if this rank has the last stage, which computes the loss."""
        return self.last in self.stages

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run all micro-batches of a step, [accumulation_steps * micro_batch, tokens / cp].

        Return a loss whose mean over the ranks is the loss of the step. Only the last stage knows
        the loss: its rank returns the loss times the number of ranks, and the others return 0.
        """
        losses = []
        if 0 in self.stages:
            self.schedule.step(inputs, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(target=targets, losses=losses, return_outputs=False)
        if not self.has_last:
            return torch.zeros((), device=targets.device)
        return self.ranks * torch.stack(losses).sum().detach()

    def forward_only(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run one micro-batch through all stages, for evaluation. All ranks must call it.

        The rank of the last stage returns the sum of the losses of its tokens, and the others
        return 0.
        """
        for number, module in self.stages.items():
            if number > 0:
                dist.recv(self.hidden, group=self.group, group_src=(number - 1) % self.ranks)
                inputs = self.hidden
            output = module(inputs, targets, reduction="sum")
            if number == self.last:
                return runtime.full_tensor(output)
            next_rank = (number + 1) % self.ranks
            dist.send(output.contiguous(), group=self.group, group_dst=next_rank)
        return torch.zeros((), device=targets.device)


# --- the training


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    parser.add_argument(
        "--tp", type=cli.positive_int, default=1, help="ranks that share each matmul"
    )
    parser.add_argument(
        "--pp", type=cli.positive_int, default=1, help="ranks that share the layers"
    )
    parser.add_argument(
        "--schedule",
        choices=tuple(STAGES_PER_RANK),
        default="1f1b",
        help="order of work with --pp; interleaved: two smaller stages per rank",
    )
    parser.add_argument(
        "--cp", type=cli.positive_int, default=1, help="ranks that share each sequence"
    )
    parser.add_argument(
        "--ep", type=cli.positive_int, default=1, help="ranks that share the experts of a layer"
    )
    parser.add_argument(
        "--replicate",
        type=cli.positive_int,
        default=1,
        help="copies of the model; 2 or more: HSDP",
    )
    parser.add_argument(
        "--reshard-after-forward",
        choices=("on", "off"),
        help="off: keep gathered blocks until backward (default: on; with --pp off)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: count each stage's bytes on fake ranks",
    )
    parser.add_argument(
        "--world-size",
        type=cli.positive_int,
        help="with --dry-run: how many ranks (default: fewest)",
    )
    args = parser.parse_args()
    shapes.use_recipe(args)  # --seq-len, --lr and --warmup-steps, if they are not given
    helper.adapt_defaults(args)
    if args.dtype == "fp16":
        raise exits.UserError(
            "--dtype fp16: 05_ddp/train.py has a GradScaler; use bf16 or fp32 here"
        )
    if args.loss == "chunked":
        raise exits.UserError("--loss chunked: use 06_fsdp_zero/train_fsdp.py, or plain here")
    runtime.seed_all(args.seed, args.deterministic)
    if args.dry_run or args.world_size:
        return helper.dry_run(args, load_training_objects, make_mesh, parallelize)

    # 1. Join the job, as 05_ddp/train.py does, and find this rank's place in the mesh.
    device = runtime.init_process_group(args.device)
    world_size = dist.get_world_size()
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()
    data_ranks = helper.count_data_ranks(args, world_size)
    place = find_place(args, data_ranks)
    mesh = make_mesh(args, data_ranks, device)

    # 2. Model and data. Each rank holds its shards in fp32; blocks are gathered in args.dtype.
    objects = load_training_objects(args, place.data_rank, data_ranks, device)
    model = objects.model
    batches = objects.batches
    if args.pp > 1:
        # The pipeline is built for one size, so it is not measured. Many small micro-batches keep
        # its stages busy.
        batches.micro_batch_size = micro_batch.fixed(
            args,
            batches,
            device,
            most=1,
            fewest_micro_batches=args.pp,
            estimate_flags="--zero 3",
        )
    helper.check_layout(args, model.config, batches, world_size)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    stages = parallelize(model, args, mesh, place.pipeline_rank)
    weights.materialize(model, args.model, seed=args.seed, device=device)
    share_rope_tables(model, stages)
    my_tokens = shard_sequences(stages, args, mesh, place, device)
    if model.balance is not None:
        model.balance.shard_tokens(my_tokens, mesh["tensor"] if args.tp > 1 else None)
    pipeline = None
    if args.pp > 1:
        pipeline = Pipeline(stages, args, batches, mesh, device)
    run_context = ExitStack()  # stays open until the process ends
    if args.tp > 1:
        # Compute each loss, in forward and backward, from logits that are sharded by vocabulary.
        run_context.enter_context(loss_parallel())
    optimizer, scheduler = optim.adamw(
        model,
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
        schedule=args.lr_schedule,
    )
    runtime.print0(
        f"{objects.name}, {args.dtype} matmuls, {world_size} x {hardware.device_name(device)}"
    )

    # 3. Checkpoints: resume where the last run stopped, on any mesh.
    settings = flags.settings(args, **objects.must_match)  # must not change on --resume
    run = checkpoint.Run(args, settings=settings)
    if args.pp == 1:
        # --micro-batch-size, or the largest that fits: this runs forward and backward, and leaves
        # weights, optimizer and random numbers as they are.
        batches.micro_batch_size = micro_batch.choose(
            args,
            model,
            optimizer,
            batches,
            device,
            my_tokens=my_tokens,
            estimate_flags="--zero 3",
        )
    held_out = batches.evaluation()
    start_step = 0
    if args.resume:
        start_step = checkpoint.resume(run, model, optimizer, scheduler)
    stream = batches.stream(start_step, pin=device.type == "cuda", num_workers=args.num_workers)
    meter = Meter(
        run.folder,
        steps=args.steps,
        start_step=start_step,
        tokens_per_step=batches.tokens_per_step,
        flops_per_token=objects.flops_per_token,
        peak_flops=hardware.peak_flops(hardware.device_name(device), args.dtype),
        device=device,
        dtype=args.dtype,
        tensorboard=args.tensorboard,
        wandb=args.wandb,
    )
    run.remember_flags(args, batches.micro_batch_size)

    # 4. The training loop.
    step = start_step
    stop = 0  # the number of a signal, such as SIGTERM
    steps = range(start_step + 1, args.steps + 1)
    for step in report.progress_bar(steps, "training", initial=start_step, unit="step"):
        # lm/model.py has no dropout. If your model has, tensor ranks must draw the same numbers
        # where they hold the same activations. Other ranks, and other steps, draw other numbers.
        runtime.seed_step(args.seed, step, dist.get_rank() // args.tp)
        if objects.start_step:
            objects.start_step(step)
        step_loss = torch.zeros((), device=device)
        if args.pp > 1:
            # The pipeline takes all micro-batches together, so that all its stages have work.
            micro_batches = [meter.next(stream) for _ in range(batches.accumulation_steps)]
            inputs = torch.cat([inputs for inputs, _ in micro_batches])
            targets = torch.cat([targets for _, targets in micro_batches])
            inputs = inputs[:, my_tokens]
            targets = targets[:, my_tokens]
            with meter.forward():
                step_loss += pipeline.forward_backward(inputs, targets)
        else:
            for micro_step in range(1, batches.accumulation_steps + 1):
                inputs, targets = meter.next(stream)  # on the device; measures the wait for data
                inputs = inputs[:, my_tokens]
                targets = targets[:, my_tokens]
                # DDP would use no_sync() for all but the last micro-batch. Here each backward
                # reduce-scatters, so that a rank keeps only its shard of the gradients. With
                # --replicate, the last backward of a step also all-reduces between the copies.
                is_last_micro_step = micro_step == batches.accumulation_steps
                model.set_requires_all_reduce(is_last_micro_step)
                # A mean of means, over micro-batches and then over ranks: right because all have
                # equally many targets. 06_fsdp_zero/finetune.py shows what to do if they have not.
                with meter.forward():
                    loss = model(inputs, targets) / batches.accumulation_steps
                loss = runtime.full_tensor(loss)  # with --tp, loss_parallel returns a DTensor
                loss.backward()
                step_loss += loss.detach()

        grad_norm = optim.clip_grad_norm(
            model.parameters(), args.clip_norm, stages=pipeline.group if pipeline else None
        )
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        values = objects.end_step() if objects.end_step else {}

        # Log, evaluate and save. All three contain collectives, so every rank must take part.
        stop = runtime.stop_requested()  # the same on all ranks
        is_last_step = stop or step == args.steps
        is_save_step = args.save_every and step % args.save_every == 0
        save = is_last_step or is_save_step or runtime.save_requested()
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # the sum over ranks; divided by world_size, the mean
            meter.log(step, step_loss / world_size, grad_norm, lr, **values)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            meter.log_eval(step, evaluate(model, held_out, device, my_tokens, pipeline))
        if save:
            state = checkpoint.training_state(step, model, optimizer, scheduler)
            run.save(step, state, objects.config_json)
            meter.save_plot()
        if stop:
            break
    run.wait()  # until --async-save has written the last checkpoint
    if stop:
        meter.print_stop(stop, step, args.keep)

    # 5. Check what this chapter promises: of weights and optimizer state, each rank holds its
    # shards in fp32 and nothing else. Copies of a shard, on other ranks, are equal bit for bit.
    bytes_per_rank = helper.check_bytes(model, optimizer, args, mesh)
    # A digest is the same on all ranks if all copies of each shard are equal.
    digests = runtime.all_gather(digest(model))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    runtime.print0("checked: ranks that hold the same weights have them bit for bit")

    meter.finish(
        step,
        model=objects.name,
        parameters=parameter_count,
        json_path=args.json,
        weights_sha256=digests[0],
        **bytes_per_rank,
    )
    runtime.shutdown()
    return exits.REQUEUE_EXIT_CODE if stop and step < args.steps else 0


@torch.no_grad()
def evaluate(model, batches, device, my_tokens, pipeline) -> float:
    """Return the mean loss per token over the held-out batches of all ranks."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    token_count = torch.zeros((), device=device)
    for inputs, targets in batches:
        inputs = inputs.to(device)[:, my_tokens]
        targets = targets.to(device)[:, my_tokens]
        if pipeline is not None:
            loss_sum += pipeline.forward_only(inputs, targets)
            if not pipeline.has_last:
                continue  # the last stage counts the tokens
        else:
            loss_sum += runtime.full_tensor(model(inputs, targets, reduction="sum"))
        token_count += (targets != PADDING).sum()
    # Tensor ranks have the same tokens: both sums count each of them --tp times.
    dist.all_reduce(loss_sum)
    dist.all_reduce(token_count)
    model.train()
    return (loss_sum / token_count).item()


if __name__ == "__main__":
    exits.run(main)
