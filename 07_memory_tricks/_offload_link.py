"""When offloading is free: what a block saves per token, what it computes per token, and what the link carries.

Both grow with the number of tokens alike. So the batch does not matter, and the length only through attention.
"""

import time

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from old import hardware, report
from old.model import Block
from old.shapes import SIZES, Config, recipe
from old.step_cost import is_of_a_weight, time_in_turns, wait_for

ROUNDS = 5
MODELS = ("llama-124m", "llama-1b", "llama-8b", "llama-70b")
COPY_BYTES = {"cuda": 2**28, "cpu": 2**26}  # of one copy when the link's speed is measured
PCIE5_BYTES_PER_SECOND = 63e9  # 16 lanes x 32 GT/s x 128/130 / 8: the specification's, which no copy reaches
SHARE_OF_PEAK = 0.5  # of the data sheet's FLOP/s, that a good training step reaches inside its blocks


def link_speed(level, device: torch.device) -> dict[str, dict]:
    """Bytes per second, out and back, of one large copy at a time."""
    size = COPY_BYTES[device.type]
    data = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    slot = level.slot(size)
    seconds = {"out": [], "back": []}
    for counted in (False, *(True,) * ROUNDS):
        for direction, copy in (("out", level.write), ("back", level.read)):
            wait_for(device)
            start = time.perf_counter()
            copy(slot, data)
            level.wait(slot)
            wait_for(device)
            if counted:
                seconds[direction].append(time.perf_counter() - start)
    return {direction: report.spread([size / one for one in found]) for direction, found in seconds.items()}


def saved_bytes(block: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype | None) -> int:
    """What one forward of a block leaves for its backward, without its weights, their copies and rotation tables."""
    apart = {id(tensor.untyped_storage()) for tensor in inputs[1:]}
    saved = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in apart and not is_of_a_weight(tensor):
            saved[id(storage)] = storage
        return tensor

    device = inputs[0].device.type
    with saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast(device, dtype, enabled=dtype is not None):
        kept_until_counted = block(*inputs)
    size = sum(storage.nbytes() for storage in saved.values())
    del kept_until_counted
    return size


def block_seconds(net: nn.Module, tokens: Tensor, dtype: torch.dtype | None) -> tuple[dict, float]:
    """Seconds of one block's forward, and the bytes that it saves per token."""
    block = net.model.layers["0"]
    hidden = net.model.embed_tokens(tokens).detach().requires_grad_()
    tables = [table[: tokens.shape[1]].unsqueeze(-2) for table in (net.model.rope_cos, net.model.rope_sin)]
    inputs = (hidden, *tables)

    def forward() -> None:
        with torch.autocast(tokens.device.type, dtype, enabled=dtype is not None):
            block(*inputs)

    seconds = time_in_turns({"block": forward}, tokens.device, ROUNDS)["block"]
    return report.spread(seconds), saved_bytes(block, inputs, dtype) / tokens.numel()


def describe_block(net: nn.Module, tokens: Tensor, dtype: torch.dtype, speed: dict) -> dict:
    """Measured on this device: whether the activations of a block leave in the time of its forward."""
    seconds, saved = block_seconds(net, tokens, None if dtype == torch.float32 else dtype)
    needed = saved * tokens.numel() / seconds["median"]
    out = speed["out"]["median"]
    back = speed["back"]["median"]
    verdict = "less" if needed <= out else "more"
    print(
        f"measured: in {seconds['median'] * 1e3:.1f} ms of forward a block saves {saved:,.0f} bytes per token: "
        f"{needed / 1e9:.2f} GB/s, {verdict} than copies reach here ({out / 1e9:.2f} GB/s out, {back / 1e9:.2f} back)"
    )
    return {"forward_seconds": seconds, "saved_bytes_per_token": saved, "needed_bytes_per_second": needed}


def saved_bytes_per_token(config: Config, seq_len: int) -> float:
    """The same for a block of any size in bf16, with tensors that hold no numbers."""
    with FakeTensorMode():
        hidden = torch.empty(1, seq_len, config.hidden_size, requires_grad=True)
        tables = [torch.empty(seq_len, 1, config.head_dim) for _ in range(2)]
        return saved_bytes(Block(config), (hidden, *tables), torch.bfloat16) / seq_len


def forward_flops_per_token(config: Config, seq_len: int) -> tuple[int, int]:
    """Of one block: the part that does not depend on the length, and what each further position of it adds.

    A causal query looks at half of the positions on average: 2 products x 2 FLOP / 2.
    """
    c = config
    heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads
    weights = c.hidden_size * c.head_dim * heads + 3 * c.hidden_size * c.intermediate_size
    return 2 * weights, 2 * c.num_attention_heads * c.head_dim


def break_even(config: Config, seq_len: int, flops: float, link: float) -> dict:
    """What a block's forward asks of the link if copying is to take no time, and the length from which `link` does."""
    saved = saved_bytes_per_token(config, seq_len)
    fixed, per_position = forward_flops_per_token(config, seq_len)
    seconds = (fixed + per_position * seq_len) / flops
    enough_flops = saved / link * flops
    return {
        "seq_len": seq_len,
        "saved_bytes_per_token": saved,
        "forward_flops_per_token": fixed + per_position * seq_len,
        "needed_bytes_per_second": saved / seconds,
        "needed_bytes_per_second_inputs_only": 4 * config.hidden_size / seconds,  # the residual stream is fp32
        "break_even_seq_len": max(0, round((enough_flops - fixed) / per_position)),
    }


def show_break_even(device_name: str, link: float, link_from: str) -> list[dict]:
    """Computed, not measured: from shapes, the data sheet and the link's speed."""
    peak = hardware.peak_flops(device_name, "bf16")
    rows = []
    for name in MODELS:
        rows.append({"model": name, **break_even(SIZES[name], recipe(name).seq_len, SHARE_OF_PEAK * peak, link)})
    cells = [
        [
            row["model"],
            f"{row['seq_len']:,}",
            f"{row['saved_bytes_per_token'] / 1e3:,.0f}",
            f"{row['forward_flops_per_token'] / 1e6:,.0f}",
            f"{row['needed_bytes_per_second'] / 1e9:,.0f}",
            f"{row['break_even_seq_len']:,}",
            f"{row['needed_bytes_per_second_inputs_only'] / 1e9:,.0f}",
        ]
        for row in rows
    ]
    head = [
        "model",
        "seq-len",
        "kB per token",
        "MFLOP per token",
        "GB/s that hides all",
        "hidden from seq-len",
        "GB/s for inputs only",
    ]
    print(
        f"computed for one block in bf16 on {device_name} at {SHARE_OF_PEAK:.0%} of its peak, with a link of "
        f"{link / 1e9:.1f} GB/s each way ({link_from})"
    )
    print(report.table([head, *cells]) + "\n")
    return rows
