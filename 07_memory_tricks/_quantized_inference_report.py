"""What quantized_inference.py measures of a scheme, and how it is told."""

from pathlib import Path

import torch
from torch import Tensor

from old import report
from old.exits import UserError
from old.inference import Text
from old.model import Transformer

WINDOW = 256  # tokens of a text that are read together


@torch.inference_mode()
def prompt_logits(net: Transformer, prompts: list[list[int]], device: torch.device) -> Tensor:
    """In fp32, of every token of every prompt, one below the other."""
    return torch.cat([net(torch.tensor([ids], device=device))[0].float() for ids in prompts])


def read_text(file: Path, text: Text) -> list[int]:
    """The tokens of --evaluate's file."""
    try:
        content = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--evaluate {file}: {error}") from None
    ids = list(content.encode()) if text.hf is None else text.hf(content, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise UserError(f"--evaluate {file}: fewer than two tokens")
    text.check_known(ids, f"--evaluate {file}")
    return ids


@torch.inference_mode()
def evaluate(net: Transformer, ids: list[int], device: torch.device) -> float:
    """The loss per token of a text, in nats: every token but the first of each window, given those before it."""
    window = min(WINDOW, net.config.max_position_embeddings)
    windows = [ids[start : start + window + 1] for start in range(0, len(ids) - 1, window)]
    total, count = 0.0, 0
    for tokens in windows:
        inputs, targets = torch.tensor([tokens[:-1]], device=device), torch.tensor([tokens[1:]], device=device)
        total += net(inputs, targets).item() * targets.numel()
        count += targets.numel()
    return total / count


def print_rows(rows: list[dict]) -> None:
    equal = f"tokens equal to {rows[0]['weights']}'s"
    table = [["weights", "held, MiB", "tokens/s", "read, GB/s", "of the roof", "error of logits", equal]]
    if rows[0]["loss"] is not None:
        table[0].append("loss")
    for row in rows:
        same = sum(
            mine == other
            for ids, others in zip(row["token_ids"], rows[0]["token_ids"], strict=True)
            for mine, other in zip(ids, others, strict=False)
        )
        table.append(
            [
                row["weights"],
                f"{row['weight_bytes'] / 2**20:,.1f}",
                figure(row["decode_tokens_per_second"], "{:,.1f}"),
                figure(row["weight_bytes_read_per_second"], "{:.1f}", 1e9),
                figure(row["bandwidth_share"], "{:.0%}"),
                figure(row["logits_relative_error"], "{:.2%}"),
                f"{same} of {rows[0]['new_tokens']}",
            ]
        )
        if row["loss"] is not None:
            table[-1].append(f"{row['loss']:.4f}")
    print("\n" + report.table(table))


def figure(value: float | None, form: str, unit: float = 1.0) -> str:
    return "n/a" if value is None else form.format(value / unit)
