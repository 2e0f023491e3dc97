"""06_fsdp_zero/convert_checkpoint.py: every bit there and back, what others load, what is refused, what it takes."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chapter import load
from support.checkpoints import saved
from support.harness import SEVERAL, TINY, case, damage, run, train

from common import checkpoint, hf, model
from common.exits import UserError

SCRIPT, FSDP = "06_fsdp_zero/convert_checkpoint.py", "06_fsdp_zero/train_fsdp.py"
UNEVEN = model.Config(83, 42, 50, 2, 6, 3, 14, 32)  # nothing that two or three ranks divide
slow = pytest.mark.launch  # CI's slow half


def convert(*words) -> None:
    """The script's main with this command line, in this process."""
    script = load(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [SCRIPT, *map(str, words)])
        assert script.main() == 0


def refused(*words) -> str:
    """What the script says to a command line that it refuses."""
    with pytest.raises(UserError) as error:
        convert(*words)
    return str(error.value)


def write_folder(folder: Path, config: model.Config, seed: int = 1) -> dict[str, torch.Tensor]:
    """A Hugging Face folder with random weights, written without the script; returns the weights."""
    folder.mkdir()
    weights = {name: weight.detach() for name, weight in model.build("nano", config, seed=seed).named_parameters()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf.config_json(dataclasses.asdict(config))))
    return weights


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """As transformers computes them from the folder."""
    from transformers import AutoModelForCausalLM

    net, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    with torch.no_grad():
        return net(tokens).logits


def test_random_weights_go_round_all_kinds(tmp_path):
    result = run(SCRIPT, tmp_path, "--json", "summary.json")
    assert result.code == 0, result.err
    rows = result.summary["rows"]
    assert [row["to"] for row in rows] == ["dcp", "hf", "pt", "dcp"]
    assert all(row["tensor_bytes"] == 4 * result.summary["parameters"] <= row["file_bytes"] for row in rows)
    assert "checked: nano's 57 weights are the same to the bit" in result.out


@pytest.mark.parametrize("tied", [pytest.param(True, marks=slow), False])
def test_a_run_becomes_a_folder_that_transformers_computes_alike(tmp_path, tied):
    """Trained on two ranks; to a folder of several files, a .pt and back to DCP: the same bits, the same logits."""
    (tmp_path / "own.json").write_text(json.dumps({**TINY, "tie_word_embeddings": tied}))
    train(FSDP, tmp_path, "--model", "own.json", "--steps", 2, "--save-every", 1, nproc=2)
    weights = saved(tmp_path, 2)["model"]
    folder, file, again = tmp_path / "hf", tmp_path / "one.pt", tmp_path / "dcp"
    convert(tmp_path / "run", folder, "--to", "hf", "--max-shard-gb", 2e-5)
    convert(folder, file, "--to", "pt")
    convert(file, again, "--to", "dcp")
    shutil.move(again, tmp_path / "run/step-00000003")
    torch.testing.assert_close(saved(tmp_path, 3)["model"], weights, rtol=0, atol=0)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(4 * w.numel() for n, w in weights.items() if not tied or "lm" not in n)
    net = model.Transformer(model.read_config(str(folder)))
    net.load_state_dict(torch.load(file)["model"])
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(folder, tokens), net(tokens), rtol=1e-5, atol=1e-5)


@slow
@pytest.mark.parametrize("script", [case("04_amp/train.py"), *(case(script) for script in SEVERAL)])
def test_training_goes_on_from_a_converted_folder(tmp_path, script):
    """At a learning rate that moves nothing, the weights at the end are those that the run before had."""
    before = train(FSDP, tmp_path, "--steps", 2, nproc=2).summary
    convert(tmp_path / "run", tmp_path / "hf", "--to", "hf")
    again = tmp_path / "again"
    flags = ("--model", tmp_path / "hf", "--steps", 1, "--lr", 1e-30)
    result = train(script, again, *flags, nproc=2 if script in SEVERAL else None)
    assert result.summary["weights_sha256"] == before["weights_sha256"]
    assert "weights from 1 .safetensors file(s)" in result.out
