"""Adapters as the library peft keeps them, so that whatever reads peft's folders reads these."""

import json
from pathlib import Path

from torch import nn


def save_for_peft(net: nn.Module, folder: Path, *, base: str, rank: int, alpha: float) -> None:
    """Two files: peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder) reads them."""
    from safetensors.torch import save_file

    trained = {name: p.detach().cpu() for name, p in net.named_parameters() if p.requires_grad}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in trained}),  # ...q_proj.lora_A.weight
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"base_model.model.{name}": p for name, p in trained.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
