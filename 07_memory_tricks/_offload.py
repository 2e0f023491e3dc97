"""What offload.py counts and computes: bytes on the device, and the link that would hide the copies."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu

from common import hardware, measure, shapes
from common.model import Block

MODELS = ("llama-1b", "llama-8b", "llama-70b")
PCIE5_BYTES_PER_SECOND = 63e9  # 16 lanes x 32 GT/s x 128/130 / 8: the specification's, which no copy reaches
SHARE_OF_PEAK = 0.5  # of the data sheet's FLOP/s, that a good training step reaches inside its blocks


def host_buffer(like: Tensor) -> Tensor:
    """Memory of the CPU for a copy of this tensor, pinned where a GPU will read and write it."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


@dataclass
class Piece:
    """The memory of a tensor or of several views of it."""

    buffer: Tensor  # in host memory
    version: int  # of the tensor: an operator that writes into it makes another
    position: int  # in forward
    users: int = 0  # operators that have saved it and not asked for it again
    data: Tensor | None = None  # on the device again, or on its way
    done: "torch.cuda.Event | None" = None  # of the last copy, down or up


class SaveOnCPU(save_on_cpu):
    """torch's own, which counts what it copies."""

    def __init__(self) -> None:
        super().__init__(pin_memory=True)
        self.copied_bytes = 0
        self.torchs_pack = self.pack_hook
        self.pack_hook = self.count

    def count(self, tensor: Tensor) -> tuple:
        device, copy = self.torchs_pack(tensor)
        self.copied_bytes += copy.nbytes
        return device, copy


def measure_step(forward: Callable[[], Tensor], optimizer, hooks, net: nn.Module, device: torch.device) -> dict:
    """Bytes on the device after forward, at the peak, and copied down. Without a GPU the host's buffers are among what
    LiveBytes counts, and are taken off. The copies of save_on_cpu are made and freed on the way: no peak for them."""
    net.zero_grad(set_to_none=True)
    state = [tensor for of_parameter in optimizer.state.values() for tensor in of_parameter.values()]
    buffers = getattr(hooks, "buffers", [])
    masters = getattr(optimizer, "masters", [])
    gradients = [master.grad for master in masters]
    on_host = [*buffers, *masters, *gradients, *(state if masters else [])]
    with measure.LiveBytes([*net.parameters(), *net.buffers(), *state, *on_host], device) as memory:
        loss = forward()
        if device.type == "cuda":
            torch.cuda.synchronize()
            after_forward = torch.cuda.memory_stats()["requested_bytes.all.current"]  # without the allocator's rounding
        else:
            after_forward = memory.now
        loss.backward()
        optimizer.step()
    by_torch = getattr(hooks, "copied_bytes", 0)
    peak = memory.peak
    if device.type != "cuda":
        host_bytes = by_torch + sum(tensor.nbytes for tensor in on_host)
        after_forward -= host_bytes
        peak = None if by_torch else peak - host_bytes
    return {
        "after_forward_bytes": after_forward,
        "peak_bytes": peak,
        "copied_down_bytes": by_torch + sum(tensor.nbytes for tensor in (*buffers, *gradients)),
        "state_bytes": sum(tensor.nbytes for tensor in state),
    }


def link_bytes_per_second(device: torch.device) -> float:
    """Of copies down into pinned memory, the median of 5; without a GPU what PCIe's specification says."""
    if device.type != "cuda":
        return PCIE5_BYTES_PER_SECOND
    data = torch.ones(2**28, dtype=torch.uint8, device=device)
    buffer = host_buffer(data)
    copies = measure.seconds_in_turns({"down": lambda: buffer.copy_(data, non_blocking=True)}, device, rounds=5)
    return data.nbytes / copies["down"]["seconds"]


def saved_bytes_per_token(config: shapes.Config, seq_len: int) -> float:
    """What a block in bf16 leaves for its backward, weights apart. Counted on tensors that hold no numbers."""
    with FakeTensorMode():
        block = Block(config)
        hidden = torch.empty(1, seq_len, config.hidden_size, requires_grad=True)
        rotation = [torch.empty(seq_len, 1, config.head_dim) for _ in range(2)]
        with measure.LiveBytes() as memory:
            with torch.autocast("cpu", torch.bfloat16):
                output = block(hidden, *rotation)  # as large as the input, which the block saves and LiveBytes misses
            kept = memory.now
        del output
        weight_copies = sum(2 * weight.numel() for weight in block.parameters() if weight.ndim == 2)  # autocast's
    return (kept - weight_copies) / seq_len


def forward_flops_per_token(config: shapes.Config, seq_len: int) -> tuple[int, int]:
    """Of one block: the part that does not depend on the length, and what each further position of it adds. A causal
    query looks at half of the positions on average: 2 matmuls x 2 FLOP / 2."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    weights = config.hidden_size * config.head_dim * heads + 3 * config.hidden_size * config.intermediate_size
    return 2 * weights, 2 * config.num_attention_heads * config.head_dim


def break_even(device: torch.device) -> list[dict]:
    """Computed, not measured: what the forward of a block asks of the link if copying is to take no time, and the
    sequence length from which `link` suffices. Bytes and FLOP grow with the batch alike, so it does not matter; only
    attention's FLOP per token grow with the length."""
    device_name, link = hardware.device_name(device), link_bytes_per_second(device)
    if hardware.peak_flops(device_name, "bf16") is None:
        device_name = "NVIDIA H100 80GB HBM3"
    flops = SHARE_OF_PEAK * hardware.peak_flops(device_name, "bf16")
    print(
        f"computed for a block in bf16, {device_name} at {SHARE_OF_PEAK:.0%} of its peak, {link / 1e9:.0f} GB/s down:"
    )
    rows = []
    for name in MODELS:
        config, seq_len = shapes.SIZES[name], shapes.recipe(name).seq_len
        saved = saved_bytes_per_token(config, seq_len)
        fixed, per_position = forward_flops_per_token(config, seq_len)
        seconds = (fixed + per_position * seq_len) / flops
        row = {
            "model": name,
            "seq_len": seq_len,
            "link_bytes_per_second": link,
            "saved_bytes_per_token": saved,
            "needed_bytes_per_second": saved / seconds,
            "needed_bytes_per_second_inputs_only": 4 * config.hidden_size / seconds,  # the residual stream is fp32
            "break_even_seq_len": max(0, round((saved / link * flops - fixed) / per_position)),
        }
        rows.append(row)
        needed, of_inputs = row["needed_bytes_per_second"] / 1e9, row["needed_bytes_per_second_inputs_only"] / 1e9
        print(
            f"  {name}, {seq_len:,} tokens: {saved / 1e3:.0f} kB a token, hidden by {needed:.0f} GB/s; its input alone "
            f"by {of_inputs:.0f}; all of it hidden here from {row['break_even_seq_len']:,} tokens on"
        )
    return rows
