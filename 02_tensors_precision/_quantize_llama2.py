"""How many bytes the weights of Llama 2 take, by quantize.py's formats: computed on the meta device, nothing is stored.

Weights only. What a server needs beside them (KV cache, activations, workspace) depends on its load.
"""

import collections
from collections.abc import Callable

import torch
from _quantize_workbench import linears

from old import model, shapes
from old.report import table

LLAMA2 = {  # vocabulary, hidden, ffn, layers, heads, key-value heads, head_dim, length; lm_head is not tied
    "7B": shapes.Config(32_000, 4096, 11_008, 32, 32, 32, 128, 4096),
    "13B": shapes.Config(32_000, 5120, 13_824, 40, 40, 40, 128, 4096),
    "70B": shapes.Config(32_000, 8192, 28_672, 80, 64, 8, 128, 4096),
}

KINDS = {"int8_per_channel": (8, "channel"), "int4_per_128": (4, 128), "int4_per_32": (4, 32)}


def llama2_bytes(quantize: Callable) -> list[dict]:
    """Bytes of the weights by model and kind of quantization; norms are bf16.

    KIND_bytes: the matrices of the blocks are quantized, embedding and lm_head are bf16. KIND_everywhere_bytes: these
    are quantized, too.
    """
    rows = []
    for name, config in LLAMA2.items():
        with torch.device("meta"):  # tensors with a shape and no storage: any size fits
            net = model.Transformer(config)
            counts = collections.Counter(layer.weight.shape for layer in linears(net).values())
            in_blocks = {torch.empty(shape): count for shape, count in counts.items()}
            around_blocks = {torch.empty(config.vocab_size, config.hidden_size): 2}  # embedding and lm_head
        parameters = shapes.parameter_count(config)
        rest = parameters - elements(in_blocks)
        norms = rest - elements(around_blocks)
        row = {"model": name, "parameters": parameters, "bf16_bytes": 2 * parameters}
        for kind, (bits, group) in KINDS.items():
            blocks = sum(quantize(weight, bits, group).nbytes * count for weight, count in in_blocks.items())
            around = sum(quantize(weight, bits, group).nbytes * count for weight, count in around_blocks.items())
            row[f"{kind}_bytes"] = blocks + 2 * rest
            row[f"{kind}_everywhere_bytes"] = blocks + around + 2 * norms
        rows.append(row)
    return rows


def elements(weights: dict[torch.Tensor, int]) -> int:
    return sum(weight.numel() * count for weight, count in weights.items())


def print_llama2(rows: list[dict]) -> None:
    lines = [["weights only, GB", "bf16", "int8", "int4"]]
    for row in rows:
        cells = [f"Llama 2 {row['model']}", f"{row['bf16_bytes'] / 1e9:.1f}"]
        for bits in ("int8", "int4"):
            sizes = [value / 1e9 for key, value in row.items() if key.startswith(bits)]
            cells.append(f"{min(sizes):.1f} to {max(sizes):.1f}")
        lines.append(cells)
    print("\n" + table(lines))
    print("from all matrices with the fewest scales to embedding and head in bf16 with the most (int4: one per 32)")
    print("cache, activations and workspace come on top")
