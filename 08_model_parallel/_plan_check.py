"""plan.py --check: the best layout, built as train_3d.py builds it, and what its ranks hold beside what was predicted.

Nothing is allocated and nothing is sent. The process group is fake: it has as many ranks as the plan, a process is one
of them, and its collectives do nothing. The tensors are fake, too: shapes and types without numbers.
"""

import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context

import estimate
import torch
import torch.distributed as dist
from _estimate_peak import MOMENTS
from _estimate_shapes import Shape
from _plan_layout import Layout, of_one_replica
from _train_3d_context import Context, sequence_part
from _train_3d_stages import forward_backward, keep_stage, make_schedule
from _train_3d_tensor import cut_matrices
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from old import model, runtime
from old.exits import UserError
from old.shapes import Config
from old.step_cost import held_tensors, record_memory

CPU = torch.device("cpu")
LINES = {"weights": "weight_bytes", "gradients": "gradient_bytes", "optimizer state": "optimizer_bytes"}


@contextmanager
def shapes_not_counted() -> Iterator[None]:
    """DTensor learns the shape of a result by running the operation on whole tensors, which no rank ever has."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*args) -> object:
        with _disable_current_modes():
            return propagate(*args)

    ShardingPropagator._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate


def size_of(tensors: Iterable[DTensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(tensor.to_local().nbytes for tensor in tensors)


def config_of(shape: Shape, seq_len: int) -> Config:
    """The model of train_3d.py with this shape."""
    return Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions or seq_len,
        tie_word_embeddings=shape.tied,
    )


def build(config: Config, layout: Layout, mesh: DeviceMesh) -> nn.Module:
    """A rank's part of the model, in the order of train_3d.py: stage, matrices, recomputation, shards."""
    net = model.build("", config, seed=0, device="meta")
    keep_stage(net, mesh.get_local_rank("pipeline"), layout.pp)
    if layout.tp > 1:
        cut_matrices(net, mesh["tensor"], arguments_of_attention=3 if layout.cp == 1 else 5)
    model.checkpoint_blocks(net, layout.checkpointing)
    copies = mesh["shard"] if layout.replicate == 1 else mesh["replicate", "shard"]
    precision = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = [*net.model.layers.values()]
    for module in (*blocks, net):
        fully_shard(module, mesh=copies, mp_policy=precision)
    for block, next_block in pairwise(blocks):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])
    return net


def step(net: nn.Module, layout: Layout, stages: DeviceMesh, sequence: DeviceMesh) -> None:
    """A step of train_3d.py, with as many micro-batches as reach its peak."""
    micro_batches = min(layout.micro_batches, layout.pp + 1)
    columns = sequence_part(layout.seq_len, sequence)
    positions = torch.arange(layout.seq_len)[columns].expand(layout.micro_batch_size, -1)
    where = {"positions": positions}
    where |= {"cache": Context(sequence.get_group(), layout.seq_len, torch.bfloat16)} if layout.cp > 1 else {}
    tokens = torch.zeros_like(positions)
    if layout.pp == 1:
        for micro_step in range(1, micro_batches + 1):
            net.set_requires_all_reduce(micro_step == micro_batches)
            runtime.whole(net(tokens, tokens, **where)).backward()
        return
    sent = (layout.micro_batch_size, layout.seq_len // (layout.cp * layout.tp), net.config.hidden_size)
    schedule = make_schedule(net, stages, micro_batches, positions, torch.zeros(sent, dtype=torch.bfloat16))
    try:
        from torch.distributed.pipelining._utils import InferenceMode
    except ImportError:
        raise UserError(f"--check of a pipeline needs torch 2.13, and this is {torch.__version__}") from None
    # fake ranks cannot tell each other that they know the shapes of what they send
    schedule._stage._inference_mode = InferenceMode.STATIC
    schedule._warmup_p2p = lambda *_: None
    all_tokens = tokens.repeat(micro_batches, 1)
    forward_backward(schedule, stages, all_tokens, all_tokens, where)


def held(config: Config, layout: Layout, stage: int) -> dict[str, int]:
    """Bytes that the first rank of a pipeline stage holds, and the most that it ever holds in a step."""
    warnings.filterwarnings("ignore", "Set timeout is now only supported")  # a fake process group waits for nobody
    rank = stage * layout.gpus // layout.pp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.gpus)
    sizes = {"pipeline": layout.pp, "data": layout.dp, "context": layout.cp, "tensor": layout.tp}
    sequence = runtime.device_mesh(CPU, sizes)["context"]
    sizes = {"pipeline": layout.pp, "replicate": layout.replicate, "shard": layout.sharded_over}
    mesh = runtime.device_mesh(CPU, {**sizes, "tensor": layout.tp})
    net = build(config, layout, mesh)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if layout.tp > 1:
            stack.enter_context(loss_parallel())
        net.to_empty(device=CPU)
        net.tie_weights()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        found = {"weights": size_of(net.parameters())}
        found["gradients"] = size_of(parameter.grad for parameter in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
        found["optimizer state"] = size_of(moments)
        stack.enter_context(shapes_not_counted())
        held_before = (t.to_local() if isinstance(t, DTensor) else t for t in held_tensors(net, [optimizer]))
        memory = record_memory(partial(step, net, layout, mesh["pipeline"], sequence), CPU, held_before)
    return {**found, "peak": memory.peak_bytes}


def predicted(shape: Shape, layout: Layout, stage: int) -> dict[str, float]:
    """The same lines of estimate.py, with the kernels of a CPU: those of fake tensors without a GPU."""
    lines = estimate.memory_of_stage(shape, replace(of_one_replica(layout), on_cpu=True), stage)
    found = {name: lines[line] for name, line in LINES.items()}
    return {**found, "peak": max(lines[moment] for moment in MOMENTS)}


def compare(shape: Shape, layout: Layout) -> list[dict]:
    """A row per stage and line: bytes as built, and as predicted. The first and the last stage differ most."""
    config = config_of(shape, layout.seq_len)
    stages = sorted({0, layout.pp - 1})
    # a process for each: DTensor remembers process groups, and cannot be another rank later
    with ProcessPoolExecutor(len(stages), get_context("spawn"), max_tasks_per_child=1) as pool:
        found = list(pool.map(partial(held, config, layout), stages))
    rows = []
    for stage, built in zip(stages, found, strict=True):
        expected = predicted(shape, layout, stage)
        for line in built:
            rows.append({"stage": stage, "line": line, "built_bytes": built[line], "predicted_bytes": expected[line]})
    return rows
