"""models/smollm2-135m, a model that has been trained: training starts where it stands, and leaves it able to answer."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from support.chapter import load
from support.harness import ROOT, Result, run

from common import data

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]
CONVERT = "06_fsdp_zero/convert_checkpoint.py"
TEXT, SEQ_LEN, SEQUENCES = ROOT / "common/model.py", 64, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The model's folder, made if it is not there; skips with pip's own words where that cannot be."""
    made = run("models/make_smollm2.py", tmp_path_factory.mktemp("make"), timeout=900, warm=False)
    if made.code == 2:
        pytest.skip(f"models/smollm2-135m: {made.err.strip()}")
    assert made.code == 0, made.err
    return ROOT / "models/smollm2-135m"


@pytest.fixture(scope="module")
def first_loss(folder) -> float:
    """The loss of the first batch, as transformers computes it."""
    from transformers import AutoModelForCausalLM

    corpus = data.load_corpus(str(TEXT), str(folder))
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": SEQUENCES, "micro_batch_size": SEQUENCES}
    inputs, targets = next(data.train_batches(corpus.train, **sizes, seed=0, device=torch.device("cpu")))
    net = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    with torch.no_grad():
        return F.cross_entropy(net(inputs).logits.flatten(0, 1), targets.flatten()).item()


def safetensors_norm(file: Path) -> torch.Tensor:
    with safe_open(file, "pt") as weights:
        return weights.get_tensor("model.norm.weight")


def train(script: str, folder: Path, where: Path, steps: int, nproc: int | None) -> Result:
    flags = ["--model", folder, "--tokenizer", folder, "--data", TEXT, "--seq-len", SEQ_LEN, "--steps", steps]
    flags += ["--global-batch-size", SEQUENCES, "--lr", 2e-5, "--dtype", "fp32", "--device", "cpu", "--log-every", 1]
    result = run(script, where, *flags, "--run-dir", "run", "--json", "summary.json", nproc=nproc, timeout=900)
    assert result.code == 0, result.err
    return result


@pytest.mark.parametrize(("script", "nproc"), [("04_amp/train.py", None), ("05_ddp/train.py", 2)])
def test_training_starts_at_the_loss_of_transformers(tmp_path, folder, first_loss, script, nproc):
    result = train(script, folder, tmp_path, 1, nproc)
    assert result.column("loss") == pytest.approx([first_loss], rel=1e-4)
    shutil.rmtree(tmp_path / "run")  # 1.6 GB


def test_trained_sharded_and_converted_back_it_still_knows_france(tmp_path, folder, first_loss):
    result = train("06_fsdp_zero/train_fsdp.py", folder, tmp_path, 20, 2)
    assert result.column("loss")[0] == pytest.approx(first_loss, rel=1e-4)
    done = run(CONVERT, tmp_path, "run", "trained", "--to", "hf", "--model", folder, timeout=900)
    assert done.code == 0, done.err
    shutil.rmtree(tmp_path / "run")
    assert "Paris" in load("models/make_smollm2.py").answer(tmp_path / "trained")
    before, after = (safetensors_norm(path / "model.safetensors") for path in (folder, tmp_path / "trained"))
    assert not torch.equal(before, after)  # it has been trained indeed
    shutil.rmtree(tmp_path / "trained")
