"""Choose, report and check the variants of context_parallel.py; run torch's ring on a CPU."""

import argparse
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from common import lesson, measure, runtime
from common.exits import UserError
from lm import shapes
from training.batches import PADDING

try:  # private: another torch may have its ring elsewhere
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
except ImportError:
    torch_ring = None

# Variants in the order of the table, and the value of --attention that chooses each.
ATTENTION_OF = {
    "one process": "all",
    "ring, contiguous": "ring",
    "ring, zigzag": "ring",
    "all-gather": "all-gather",
    "Ulysses": "ulysses",
    "torch": "torch",
}
COLUMNS = {
    "name": "variant",
    "calls": "calls in a step",
    "sent_bytes": "sent by a rank",
    "busiest_ratio": "work, busiest / mean",
    "kept_bytes_per_rank": "kept for backward",
    "kept_share": "share of one process's",
    "gradient_error": "gradients' error",
    "seconds": "forward and backward",
}
BF16_COLUMNS = {
    "blocks": "blocks",
    "sums": "sums of the ring",
    "output_error": "output's error",
    "gradient_error": "gradients' error",
}
BF16_QUERIES = 256
BF16_KEYS = 2048
TOLERANCE = 1e-5  # relative, of losses and gradients

# --- which variants run


def chosen_variants(args: argparse.Namespace, config: shapes.Config) -> list[str]:
    """Return the names of the variants that --attention chooses, with the baseline first.

    Print which ones the model or torch does not allow. Raise UserError if --attention names one of
    these, or if the ranks do not divide the sequence.
    """
    ranks = lesson.world_size_after_relaunch(args.device)
    chunks = 2 * ranks
    if args.seq_len % chunks:
        multiple = multiple_for_torch(args, ranks)
        nearest = max(args.seq_len // multiple, 1) * multiple
        raise UserError(
            f"--seq-len {args.seq_len} does not divide into {chunks} chunks, two per rank: "
            f"use {nearest}"
        )
    names = []
    for name, attention in ATTENTION_OF.items():
        if args.attention not in ("all", attention) and name != "one process":
            continue
        problem = problem_of(name, args, config, ranks)
        if problem is None:
            names.append(name)
        elif args.attention == attention:
            raise UserError(f"--attention {attention}: {problem}")
        else:
            runtime.print0(f"{name} is left out: {problem}")
    return names


def problem_of(
    name: str, args: argparse.Namespace, config: shapes.Config, ranks: int
) -> str | None:
    """Return why a variant cannot run, or None if it can."""
    kv_heads = config.num_key_value_heads
    if name == "Ulysses" and kv_heads % ranks:
        right_sizes = [str(size) for size in range(1, kv_heads + 1) if kv_heads % size == 0]
        return (
            f"{ranks} ranks do not divide the {kv_heads} key-value heads of --model {args.model}: "
            f"start {', '.join(right_sizes)}, or leave out --attention"
        )
    if name == "torch":
        needed = ("_templated_ring_attention", "_templated_ring_attention_backward", "custom_ops")
        if not all(hasattr(torch_ring, part) for part in needed):
            return f"torch {torch.__version__} has its ring elsewhere"
        multiple = multiple_for_torch(args, ranks)
        if args.seq_len % multiple:
            return f"on a GPU --seq-len {args.seq_len} must be a multiple of {multiple}"
        if is_on_gpu(args) and config.head_dim % 4:
            return f"CUDA's kernel for fp32 takes heads of a multiple of 4, not {config.head_dim}"
    return None


def is_on_gpu(args: argparse.Namespace) -> bool:
    """Return whether the ranks will run on GPUs."""
    return runtime.device_type(args.device, relaunches=True) == "cuda"


def multiple_for_torch(args: argparse.Namespace, ranks: int) -> int:
    """Return what --seq-len must be a multiple of for torch's ring: of two chunks per rank.

    On a GPU a chunk must be a multiple of 32 tokens. The kernel for fp32 pads its log-sum-exp to
    such a multiple, and torch's ring does not remove the padding.
    """
    return 2 * ranks * (32 if is_on_gpu(args) else 1)


# --- (4) on a CPU
#
# torch's ring takes any kernel that returns its log-sum-exp, and registers three of CUDA. The CPU's
# flash attention returns it, too. It is registered here in the same table.

CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register_cpu_attention(device: torch.device) -> None:
    """Register the CPU's flash attention with torch's context_parallel, if the device is a CPU."""
    if device.type == "cpu" and hasattr(torch_ring, "custom_ops"):
        torch_ring.custom_ops[CPU_FORWARD] = ring_forward
        torch_ring.custom_ops[CPU_BACKWARD] = ring_backward


def ring_forward(operator, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
    """Run torch's ring with the CPU's kernel. DTensor calls this in place of the operator."""
    mesh = args[0].device_mesh
    q, k, v, _, is_causal = local_tensors(args)
    results = torch_ring._templated_ring_attention(
        mesh.get_group(), 2, operator, q, k, v, is_causal=is_causal, **kwargs
    )
    return sharded(results, mesh)


def ring_backward(operator, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
    """Run the backward of torch's ring with the CPU's kernel."""
    mesh = args[0].device_mesh
    out_gradient, q, k, v, out, log_sum_exp, dropout, is_causal = local_tensors(args)

    def kernel(*, query, key, value, out, logsumexp, is_causal, grad_out, **options):
        return operator(grad_out, query, key, value, out, logsumexp, dropout, is_causal, **options)

    gradients = torch_ring._templated_ring_attention_backward(
        mesh.get_group(),
        2,  # the dimension of the tokens
        kernel,
        grad_out=out_gradient,
        grad_out_name="grad_out",
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=log_sum_exp,
        is_causal=is_causal,
        **kwargs,
    )
    return sharded(gradients, mesh)


def local_tensors(args: tuple) -> list:
    """Return the arguments of an operator with local shards in place of DTensors."""
    return [arg.to_local() if isinstance(arg, DTensor) else arg for arg in args]


def sharded(tensors: tuple[Tensor, ...], mesh) -> tuple[DTensor, ...]:
    """Return DTensors that are sharded by tokens, [batch, heads, tokens, ...]."""
    return tuple(DTensor.from_local(tensor, mesh, [Shard(2)]) for tensor in tensors)


# --- the rows


def count_targets(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the number of targets in a batch, padding left out."""
    _, targets, _ = batch
    return (targets != PADDING).sum()


def largest(errors_of_ranks: list[list[float]]) -> float:
    """Return the largest error of all ranks and steps, NaN if one is NaN."""
    return torch.tensor(errors_of_ranks).max().item()


def in_words(calls: Counter[str]) -> str:
    """Return the collectives of a step: 12 all-gathers, 12 all-to-alls."""
    words = [f"{count} {kind.replace('_', '-')}" for kind, count in calls.items()]
    return ", ".join(words) or "none"


def scores_of_ranks(my_scores: int) -> dict:
    """Return the scores of each rank, and the scores of the busiest rank over the mean."""
    scores = runtime.all_gather(my_scores)
    return {
        "scores_of_each_rank": scores,
        "busiest_ratio": max(scores) * len(scores) / sum(scores),
    }


# --- what bf16 loses


def errors_in_bf16(
    add_tile: Callable, tile_gradients: Callable, device: torch.device
) -> list[dict]:
    """Print the errors of ring attention in bf16, with its sums in fp32 and in bf16.

    One process computes as a ring of so many ranks does, without a mask. The errors are those
    against torch in fp64. Return the rows of the table.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = []  # q, k, v and the gradient of the result: [batch, heads, tokens, head_dim]
    for tokens in (BF16_QUERIES, BF16_KEYS, BF16_KEYS, BF16_QUERIES):
        tensor = torch.randn(1, 1, tokens, 64, generator=generator)
        tensors.append(tensor.to(device).bfloat16())
    *inputs, out_gradient = tensors
    exact_inputs = [tensor.double().requires_grad_() for tensor in inputs]
    exact = F.scaled_dot_product_attention(*exact_inputs)
    exact.backward(out_gradient.double())

    rows = []
    for blocks in (1, 8, 64):
        for sums in ("fp32", "bf16"):
            out, *gradients = ring_in_bf16(
                add_tile, tile_gradients, tensors, blocks, runtime.DTYPES[sums]
            )
            errors = []
            for gradient, exact_input in zip(gradients, exact_inputs, strict=True):
                errors.append(measure.relative_error(gradient, exact_input.grad))
            output_error = measure.relative_error(out, exact)
            rows.append(
                {
                    "blocks": blocks,
                    "sums": sums,
                    "output_error": output_error,
                    "gradient_error": largest([errors]),
                }
            )
    if runtime.is_rank0():
        print(f"\nattention in bf16, {BF16_QUERIES:,} queries, {BF16_KEYS:,} keys, one process\n")
        lesson.print_rows(rows, BF16_COLUMNS)
    return rows


def ring_in_bf16(
    add_tile: Callable,
    tile_gradients: Callable,
    tensors: list[Tensor],
    blocks: int,
    sums: torch.dtype,
) -> list[Tensor]:
    """Return the attention of q to `blocks` blocks, and the gradients of q, k and v, in fp64.

    The gradients of q are a sum over the blocks of keys. Those of k and v are a sum over the ranks,
    each with a block of queries.
    """
    q, k, v, out_gradient = tensors
    q = q.unsqueeze(2)  # [batch, kv_heads, group, tokens, head_dim]
    out_gradient = out_gradient.unsqueeze(2)
    out = torch.zeros_like(q, dtype=sums)
    log_sum_exp = q.new_full(q.shape[:-1], -torch.inf, dtype=sums)
    for k_block, v_block in zip(k.chunk(blocks, -2), v.chunk(blocks, -2), strict=True):
        add_tile(q, k_block, v_block, False, out, log_sum_exp)
    out = out.bfloat16()
    row_sums = (out_gradient.to(sums) * out).sum(-1)

    q_gradient, k_gradient, v_gradient = (
        torch.zeros_like(tensor, dtype=sums) for tensor in (q, k, v)
    )
    for k_block, v_block in zip(k.chunk(blocks, -2), v.chunk(blocks, -2), strict=True):
        q_term, _, _ = tile_gradients(
            q, k_block, v_block, False, out_gradient, log_sum_exp, row_sums
        )
        q_gradient += q_term
    for queries in torch.arange(BF16_QUERIES, device=q.device).chunk(blocks):
        _, k_term, v_term = tile_gradients(
            q[..., queries, :],
            k,
            v,
            False,
            out_gradient[..., queries, :],
            log_sum_exp[..., queries],
            row_sums[..., queries],
        )
        k_gradient += k_term
        v_gradient += v_term
    results = (out.squeeze(2), q_gradient.squeeze(2), k_gradient, v_gradient)
    return [result.double() for result in results]


# --- what must hold


def expected(name: str, config: shapes.Config, args: argparse.Namespace) -> dict:
    """Return the calls and bytes of a rank in a step, and the scores of each rank, from shapes.

    torch's own variant is not predicted.
    """
    layers = config.num_hidden_layers
    n = dist.get_world_size()
    tokens = args.batch_size * args.seq_len // n
    # bytes of a rank's queries, and of its keys and values
    q = 4 * tokens * config.num_attention_heads * config.head_dim
    kv = 2 * 4 * tokens * config.num_key_value_heads * config.head_dim
    if name == "one process":
        return {"calls": "none", "sent_bytes": 0}
    if name == "all-gather":
        return {
            "calls": f"{layers} all-gathers, {layers} reduce-scatters",
            "sent_bytes": layers * 2 * (n - 1) * kv,
        }
    if name == "Ulysses":
        return {
            "calls": f"{4 * layers} all-to-alls",
            "sent_bytes": layers * 2 * (n - 1) * (2 * q + kv) // n,
        }
    if name == "torch":
        return {}

    # Keys and values make n - 1 hops in forward and in backward, their gradients n in backward.
    hops = 3 * n - 2 if n > 1 else 0
    if name == "ring, zigzag":
        tiles_of_ranks = [2 * n + 1] * n
    else:
        tiles_of_ranks = [4 * rank + 3 for rank in range(n)]
    chunk = args.seq_len // (2 * n)
    return {
        "calls": f"{layers * hops} sends" if hops else "none",
        "sent_bytes": layers * hops * kv,
        "scores_of_each_rank": [count * chunk**2 for count in tiles_of_ranks],
    }


def check(rows: list[dict], config: shapes.Config, args: argparse.Namespace) -> list[str]:
    """Assert that all variants train as one process does, and that formulas give what they send.

    Return a line for each thing that was checked.
    """
    n = dist.get_world_size()
    losses = torch.tensor([row["losses"] for row in rows], dtype=torch.float64)
    loss_errors = (losses / losses[0] - 1).abs().amax(1).tolist()
    for row, loss_error in zip(rows, loss_errors, strict=True):
        name = row["name"]
        for key, value in expected(name, config, args).items():
            assert row[key] == value, f"{name}: {key} is {row[key]}, and must be {value}"
        for what, error in (("loss", loss_error), ("gradient", row["gradient_error"])):
            assert error <= TOLERANCE, f"{name}: {what} differs from one process by {error:.0e}"
        assert len(set(row["weights_sha256"])) == 1, f"{name}: ranks hold different weights"
        # 2 %, because each rank also keeps a few small tensors that are not sharded
        kept = row["kept_bytes_per_rank"]
        most = 1.02 * rows[0]["kept_bytes_per_rank"] / n + 4096
        assert kept <= most or not name.startswith("ring"), (
            f"{name} keeps {kept:,} bytes for backward, more than {most:,.0f}"
        )

    errors = {row["name"]: row["gradient_error"] for row in rows}
    checked = [
        f"losses (to {max(loss_errors):.0e}) and gradients (to {max(errors.values()):.0e}) "
        "are those of one process, and all ranks hold the same weights",
        "calls and bytes of the variants by hand are those of the formulas",
    ]
    if "ring, zigzag" in errors:
        checked.append(f"a rank of the ring keeps 1/{n} for backward, and zigzag gives equal work")
    if "ring, zigzag" in errors and "torch" in errors:
        most = errors["ring, zigzag"] + errors["torch"]
        checked.append(f"the ring by hand and torch's have the same gradients (to {most:.0e})")
    return checked
