"""Compare with a reference, such as transformers' model: on the script's own GPU, in exact fp32."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from common import report
from lm import shapes

ROOM = 0.9  # of the free memory; the rest is for activations and workspaces


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Compute fp32 matmuls without TF32 inside, and restore the process's setting afterwards."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def comparison(device: torch.device, needed_bytes: int = 0) -> Iterator[torch.device]:
    """Yield the device to compare on: the script's GPU if `needed_bytes` fit there, else the CPU.

    Inside, fp32 matmuls are exact. The peak of GPU memory that a script reports does not count the
    comparison: what it allocates must be released when the block ends.
    """
    if device.type != "cuda":
        with exact_fp32():
            yield torch.device("cpu")
        return

    torch.cuda.empty_cache()  # what torch keeps for later would not count as free
    free_bytes, _ = torch.cuda.mem_get_info(device)
    fits = needed_bytes <= ROOM * free_bytes
    report.remember_peak(device)
    try:
        with exact_fp32():
            yield device if fits else torch.device("cpu")
    finally:
        gc.collect()  # a model may be part of a cycle
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def build_transformers(
    config: shapes.Config,
    weights: dict[str, Tensor],
    device: torch.device,
) -> nn.Module:
    """Return transformers' model of this shape with these weights, in fp32 on `device`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers_config = AutoConfig.for_model(**shapes.config_json(config))
    with device:
        net = AutoModelForCausalLM.from_config(transformers_config, dtype=torch.float32)
    net.load_state_dict(weights, strict=not config.tie_word_embeddings)
    return net.eval()


def read_transformers(folder: Path, device: torch.device) -> nn.Module:
    """Return the model that transformers reads from a Hugging Face folder, in fp32 on `device`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # "Loading weights", also where stderr is a file
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
