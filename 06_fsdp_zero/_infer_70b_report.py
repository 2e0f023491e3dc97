"""What infer_70b.py checks and tells."""

import torch
import torch.distributed as dist
from _infer_70b_placement import Place, size
from _infer_70b_served import Served
from _infer_70b_weights import held_bytes
from torch import nn

from old import hardware, hf, report, runtime, shapes
from old.generate import Generated, Sampler
from old.inference import Text, speed


def check_parts(net: nn.Module, places: list[Place]) -> None:
    """The ranks hold each number of each matrix once, and each rank as many bytes as the table has told."""
    ranks = dist.get_world_size()
    weights = dict(hf.named_weights(net))
    matrices = [weight for weight in weights.values() if weight.ndim == 2]
    held = runtime.gather(sum(held_bytes(weight) for weight in matrices))
    whole = sum(weight.numel() * weight.element_size() for weight in matrices)
    assert sum(held) == whole, f"the ranks hold {held} bytes of matrices of {whole}"
    # where the vocabulary does not divide, the first ranks have a row more of two matrices, and the last ones fewer
    rows = 2 * ranks * max(weight.shape[1] * weight.element_size() for weight in matrices)
    told = places[dist.get_rank()].weight_bytes
    mine = sum(held_bytes(weight) for weight in weights.values())
    uneven = net.config.vocab_size % ranks != 0
    assert abs(mine - told) <= (rows if uneven else 0), f"{mine} bytes of weights, where the table has {told}"
    once = f", and {ranks} ranks hold each number of the matrices once" if ranks > 1 else ""
    runtime.say(f"checked: {mine:,} bytes of weights on rank 0, as in the table{once}")


def check_answer(served: Served, prompts: list[list[int]], result: Generated, args) -> None:
    """Every rank has the same tokens; and whoever reads prompt and answer at once, without a token from the cache,
    chooses the last token again."""
    if dist.get_world_size() > 1:
        tokens = runtime.gather(result.token_ids)
        assert all(other == tokens[0] for other in tokens), f"ranks have different tokens: {tokens}"
        runtime.say(f"checked: all {len(tokens)} ranks have the same tokens")
    answered = [(prompt, ids) for prompt, ids in zip(prompts, result.token_ids, strict=True) if ids]
    if args.temperature or not answered:
        return
    again = served.generate(
        [prompt + ids[:-1] for prompt, ids in answered], max_new_tokens=1, sampler=Sampler(), stop=frozenset()
    )
    same = [[ids[-1]] == last for (_, ids), last in zip(answered, again.token_ids, strict=True)]
    told = f"prompt and answer read at once give the last token again, for {sum(same)} of {len(same)} prompts"
    if args.dtype == "fp32":
        assert all(same), told
        runtime.say(f"checked: {told}")
    else:
        runtime.say(f"{told} ({args.dtype} rounds differently when more tokens are multiplied at once)")


def print_answers(texts: list[str]) -> None:
    """The whole batch: only the first answer has been seen as it grew."""
    for number, text in enumerate(texts, start=1):
        runtime.say(f"{number}: {text}")


def peaks_by_device(device: torch.device, strategy: str) -> list[int]:
    """The most that each rank, or each GPU of a single process, has held."""
    if strategy == "device-map" and device.type == "cuda":
        return [torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())]
    return runtime.gather(report.peak_memory_bytes(device))


def summarize(
    args, served: Served, result: Generated, text: Text, device: torch.device, places: list[Place], seconds: float
) -> dict:
    """The summary, on every rank; what a device holds and reads is rank 0's."""
    peaks = peaks_by_device(device, args.strategy)
    return {
        "device": hardware.device_name(device),
        "world_size": dist.get_world_size(),
        "dtype": args.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(served.config),
        "tokens": result.prompt_tokens + sum(map(len, result.token_ids)),
        "strategy": args.strategy,
        **speed(result, text, device=device, bytes_per_step=served.weight_bytes),
        "time_per_token_seconds": result.decode_seconds / result.decode_steps if result.decode_steps else None,
        "weight_bytes_per_step": served.weight_bytes,
        "peak_memory_bytes": max(peaks),
        "peak_memory_bytes_per_device": peaks,
        "places": [place._asdict() for place in places],
        "seconds": seconds,
    }


def print_speed(summary: dict) -> None:
    """Prefill and decode apart: the one multiplies, the other reads."""
    rows = [["", "tokens/s", "ms", "weights read", "of the roof"]]
    first = summary["time_to_first_token_seconds"]
    rows.append(
        ["prefill", f"{summary['prefill_tokens_per_second']:,.0f}", f"{1e3 * first:,.1f} to first token", "", ""]
    )
    if summary["time_per_token_seconds"] is not None:
        share = summary["bandwidth_share"]
        rows.append(
            [
                "decode",
                f"{summary['decode_tokens_per_second']:,.1f}",
                f"{1e3 * summary['time_per_token_seconds']:,.1f} per token",
                f"{summary['weight_bytes_read_per_second'] / 1e9:,.1f} GB/s",
                "n/a"
                if share is None
                else f"{share:.0%} of {summary['read_bandwidth_bytes_per_second'] / 1e9:,.0f} GB/s",
            ]
        )
    runtime.say("\n" + report.table(rows))
    runtime.say(f"peak memory per device: {', '.join(map(size, summary['peak_memory_bytes_per_device']))}")
