"""How many bytes of weights and optimizer state each rank holds under ZeRO, and that they are its part and no more."""

import math

import torch.distributed as dist
from _train_zero_nvme import PADDED_TO, state_files

from old import runtime

FP32 = 4  # bytes


def bytes_by_rank(engine, stage: int, nvme: str | None) -> dict[str, list[int]]:
    """The bytes that each rank holds, in rank order: of weights, of AdamW's two moments, and of the fp32 copy of its
    part of the weights that DeepSpeed's optimizer updates from stage 1 on, also where the weights are in fp32.

    AssertionError if a rank holds anything but its part. Stages 1 and 2 lay a group of parameters end to end and cut it
    into equal parts of an even number of elements. Stage 3 cuts each parameter. What comes last is padded. With --nvme
    most of the state and of the copies is in files, and what is in memory is counted apart.
    """
    ranks = dist.get_world_size()
    parameters = list(engine.module.parameters())
    if stage == 3:
        whole = [tuple(p.ds_shape) for p in parameters if p.numel() and not p.ds_persist]
        assert not whole, f"gathered and not forgotten: {whole}"
        weights = [parameter.ds_tensor for parameter in parameters]
        part = sum(math.ceil(parameter.ds_numel / ranks) for parameter in parameters)
        weights_due = part
    else:
        weights = parameters
        groups = [sum(p.numel() for p in parameters if (p.ndim >= 2) == matrices) for matrices in (True, False)]
        part = sum(2 * math.ceil(size / (2 * ranks)) for size in groups) if stage else sum(groups)
        weights_due = sum(groups)
    updated = engine.basic_optimizer.state  # the tensors that AdamW updates, each with its state
    known = {tensor.untyped_storage().data_ptr() for tensor in weights}
    copies = [tensor for tensor in updated if tensor.untyped_storage().data_ptr() not in known]
    moments = [t for state in updated.values() for t in state.values() if t.ndim]
    held = {
        "parameter_bytes_per_rank": sum(tensor.nbytes for tensor in weights),
        "optimizer_bytes_per_rank": sum(tensor.nbytes for tensor in moments),
        "fp32_copy_bytes_per_rank": sum(tensor.nbytes for tensor in copies),
    }
    if nvme is None:
        assert held["parameter_bytes_per_rank"] == weights_due * weights[0].element_size(), (held, weights_due)
        assert held["optimizer_bytes_per_rank"] == 2 * FP32 * part, (held, part)
        assert held["fp32_copy_bytes_per_rank"] == (FP32 * part if stage else 0), (held, part)
    else:
        sizes = [file.stat().st_size for file in state_files(nvme)]
        held["nvme_bytes_per_rank"] = sum(sizes)
        too_much = sum(sizes) + held["optimizer_bytes_per_rank"] + held["fp32_copy_bytes_per_rank"] - 3 * FP32 * part
        assert 0 <= too_much < PADDED_TO * max(1, len(sizes)), (held, part)
    by_rank = runtime.gather(held)
    return {name: [ranks_own[name] for ranks_own in by_rank] for name in held}


def told(held: dict[str, list[int]]) -> str:
    """What a rank holds, in a line for people: all hold equally much."""
    mib = {name: f"{by_rank[0] / 2**20:,.1f} MiB" for name, by_rank in held.items()}
    copy = f" and {mib['fp32_copy_bytes_per_rank']} of fp32 copies" if held["fp32_copy_bytes_per_rank"][0] else ""
    weights, state = mib["parameter_bytes_per_rank"], mib["optimizer_bytes_per_rank"]
    told = f"each rank holds {weights} of weights, {state} of optimizer state{copy}"
    return f"{told}, and {mib['nvme_bytes_per_rank']} of both in files" if "nvme_bytes_per_rank" in mib else told
