"""models/smollm2-135m, a model that has been trained: training starts where it stands, and leaves it able to answer."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from support.chapter import load
from support.harness import TEXT, Result, run

from lm import data
from training.batches import Batches

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]
QUANTIZE = "02_tensors_precision/quantize.py"
CONVERT, LORA = "06_fsdp_zero/convert_checkpoint.py", "07_memory_tricks/lora.py"
SEQ_LEN, SEQUENCES = 64, 4


@pytest.fixture(scope="module")
def first_loss(smollm2) -> float:
    """The loss of the first batch, as transformers computes it."""
    from transformers import AutoModelForCausalLM

    corpus = data.load_corpus(str(TEXT), str(smollm2))
    sizes = {
        "seq_len": SEQ_LEN,
        "global_batch_size": SEQUENCES,
        "micro_batch_size": SEQUENCES,
        "seed": 0,
    }
    samples = data.sequences(corpus, SEQ_LEN)
    batches = Batches(*samples, Namespace(**sizes), rank=0, world_size=1)
    inputs, targets = next(batches.stream(0))
    net = AutoModelForCausalLM.from_pretrained(smollm2)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    with torch.no_grad():
        return F.cross_entropy(net(inputs).logits.flatten(0, 1), targets.flatten()).item()


def safetensors_norm(file: Path) -> torch.Tensor:
    with safe_open(file, "pt") as weights:
        return weights.get_tensor("model.norm.weight")


def train(script: str, folder: Path, where: Path, steps: int, nproc: int | None = None) -> Result:
    flags = [
        "--model",
        folder,
        "--tokenizer",
        folder,
        "--data",
        TEXT,
        "--seq-len",
        SEQ_LEN,
        "--steps",
        steps,
    ]
    flags += [
        "--global-batch-size",
        SEQUENCES,
        "--lr",
        2e-5,
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--log-every",
        1,
    ]
    result = run(
        script,
        where,
        *flags,
        "--run-dir",
        "run",
        "--json",
        "summary.json",
        nproc=nproc,
        timeout=900,
    )
    assert result.code == 0, result
    return result


@pytest.mark.long  # the next test shows it with two ranks
def test_training_starts_at_the_loss_of_transformers(tmp_path, smollm2, first_loss):
    result = train("04_amp/train.py", smollm2, tmp_path, 1)
    assert result.column("loss") == pytest.approx([first_loss], rel=1e-4)
    shutil.rmtree(tmp_path / "run")  # 1.6 GB


def test_trained_sharded_and_converted_back_it_still_knows_france(tmp_path, smollm2, first_loss):
    result = train("06_fsdp_zero/train_fsdp.py", smollm2, tmp_path, 3, 2)
    assert result.column("loss")[0] == pytest.approx(first_loss, rel=1e-4)
    done = run(CONVERT, tmp_path, "run", "trained", "--to", "hf", "--model", smollm2, timeout=900)
    assert done.code == 0, done.err
    shutil.rmtree(tmp_path / "run")
    assert "Paris" in load("models/make_smollm2.py").answer(tmp_path / "trained")
    trained = next((tmp_path / "trained").glob("*.safetensors"))
    before, after = (safetensors_norm(path) for path in (smollm2 / "model.safetensors", trained))
    assert not torch.equal(before, after)  # it has been trained indeed
    shutil.rmtree(tmp_path / "trained")


@pytest.fixture(scope="module")
def adapters(smollm2, tmp_path_factory) -> Path:
    """LoRA on the instructions that ship with lora.py: its run's folder."""
    where = tmp_path_factory.mktemp("lora")
    flags = ["--model", smollm2, "--method", "lora", "--steps", 15, "--device", "cpu"]
    result = run(LORA, where, *flags, "--json", "summary.json", timeout=900)
    assert result.code == 0, result.err
    return where


@pytest.mark.long
def test_lora_teaches_a_way_to_answer(adapters):
    summary = json.loads((adapters / "summary.json").read_text(encoding="utf-8"))
    (row,) = summary["rows"]
    assert row["val_loss_after"] < row["val_loss_before"] / 2
    assert row["val_loss_merged"] == pytest.approx(row["val_loss_after"], abs=0.02)
    assert not summary["answer_before"].startswith("In short:")
    assert row["answer"].startswith("In short:")
    assert "Tokyo" in row["answer"]
    assert row["trained_parameters"] < summary["parameters"] / 50


@pytest.mark.long  # minutes on quiet cores, half an hour on busy ones
@pytest.mark.timeout(3600)
def test_a_real_model_loses_more_the_fewer_the_bits(tmp_path, smollm2):
    flags = ["--model", smollm2, "--device", "cpu", "--json", "summary.json"]
    result = run(QUANTIZE, tmp_path, *flags, timeout=3500, OMP_NUM_THREADS="2")
    assert result.code == 0, result.err
    lost = {row["scheme"]: row["delta"] for row in result.summary["rows"]}
    assert abs(lost["int8 per channel"]) < 0.05
    by_group = [lost[f"int4 per {group}"] for group in (32, 128, "channel", "tensor")]
    assert by_group == sorted(by_group)
    assert 0.05 < by_group[0] < 1
    assert lost["int3 per channel"] > lost["int4 per channel"]
    assert result.summary["peak_memory_bytes"] < 8 * 2**30
