"""lm/sample.py: a run ends with the same weights to the bit, with and without generated texts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.harness import (
    NO_COMPILER,
    ROOT,
    TEXT,
    TINY,
    config_of,
    in_full,
    in_long,
    run,
    train,
    write_tiny,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lm.data import Corpus
from lm.sample import sample_text
from lm.weights import build

CPU = torch.device("cpu")

# A script that trains twice on the ranks of its job, once with a text after each step, and writes
# what each rank is left with.
SCRIPT = """
import argparse, json, sys
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, {root!r})
from common import exits, runtime
from lm import data, sample, shapes, weights
from training import optim
from training.batches import Batches

kind, mode = sys.argv[1:]
compiled = mode == "compiled"


def build(device):
    config = shapes.read_config("tiny.json")
    if kind != "fsdp":
        net = weights.build("tiny.json", config, seed=0, device=device)
        train_net = DistributedDataParallel(net) if kind == "ddp" else net
        if compiled:
            train_net.compile()
        return net, train_net
    net = weights.build("tiny.json", config, seed=0, device="meta")
    for block in net.model.layers.values():
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block)
    fully_shard(net)
    return weights.materialize(net, "tiny.json", seed=0, device=device), net


def dropout(mlp, inputs, outputs):
    return torch.nn.functional.dropout(outputs, 0.1, mlp.training)


def train(with_texts, device):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    corpus = data.load_corpus({text!r})
    args = argparse.Namespace(seq_len=32, seed=0, global_batch_size=8, micro_batch_size=None)
    rank, world_size, _ = runtime.ranks()
    samples = data.sequences(corpus, args.seq_len)
    stream = Batches(*samples, args, rank=rank, world_size=world_size).stream(0)
    net, train_net = build(device)
    net.model.layers["0"].mlp.register_forward_hook(dropout)
    optimizer, _ = optim.adamw(net, lr=0.01, weight_decay=0.1, warmup_steps=1, steps=3)
    texts = []
    for _ in range(3):
        train_net(*next(stream)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if with_texts:
            texts.append(sample.sample_text(net, corpus, seq_len=32, device=device))
    return texts, {{
        "weights": weights.digest(net),
        "random_state": torch.get_rng_state().tolist(),
        "training_mode": net.training,
        "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }}


def main():
    device = torch.device("cpu")
    if kind != "plain":
        device = runtime.init_process_group("cpu")
    _, without = train(False, device)
    texts, with_texts = train(True, device)
    of_all_ranks = runtime.all_gather((texts, without, with_texts))
    if runtime.is_rank0():
        with open("result.json", "w") as file:
            json.dump(of_all_ranks, file)
    if kind != "plain":
        runtime.shutdown()
    return 0


exits.run(main)
"""

RUNS = [
    ("plain", "eager"),
    ("fsdp", "eager"),
    in_full("ddp", "eager"),
    in_long("plain", "compiled"),
    in_long("ddp", "compiled"),
    in_full("fsdp", "compiled"),
]


@pytest.mark.parametrize(("kind", "mode"), RUNS)
def test_texts_change_nothing_in_the_training(tmp_path, kind, mode):
    write_tiny(tmp_path)
    script = tmp_path / "train.py"
    source = SCRIPT.format(root=str(ROOT), text=str(TEXT))
    script.write_text(NO_COMPILER + source, encoding="utf-8")
    nproc = None if kind == "plain" else 2
    result = run(script, tmp_path, kind, mode, nproc=nproc)
    assert result.code == 0, result

    of_all_ranks = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert len(of_all_ranks) == (nproc or 1)
    for texts, without, with_texts in of_all_ranks:
        assert with_texts == without
        assert with_texts["training_mode"]
        assert (without["compiled_graphs"] > 0) == (mode == "compiled")
        assert len(texts) == 3
    (first, *_), *_ = of_all_ranks
    assert all(isinstance(text, str) for text in first)


def sample_of(corpus: Corpus, net=None) -> str | None:
    if net is None:
        net = build("nano", config_of(TINY), seed=0)
    return sample_text(net, corpus, seq_len=64, device=CPU)


def corpus_of(text: bytes, **more) -> Corpus:
    tokens = np.frombuffer(text, np.uint8)
    return Corpus(tokens, tokens, vocab_size=256, sha256="", **more)


def test_a_text_is_one_line_that_cannot_control_a_terminal():
    text = sample_of(corpus_of(b"\x1b[31m red\r\n\0" * 20))
    assert text.isprintable()
    assert "red" in text


def test_a_run_whose_weights_are_nan_ends_with_its_own_error():
    net = build("nano", config_of(TINY), seed=0)
    torch.nn.init.constant_(net.lm_head.weight, torch.nan)
    assert sample_of(corpus_of(b"text " * 20), net).isprintable()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are 256 words."""
    words = {f"word{number}": number for number in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_tokens_of_a_tokenizer_become_its_text(tmp_path):
    write_tokenizer(tmp_path)
    text = sample_of(corpus_of(bytes([7]) * 100, tokenizer=str(tmp_path)))
    prompt, continuation = text.split(" >> ")
    assert "word7" in prompt
    assert "word" in continuation


def test_a_run_without_its_tokenizer_has_no_text(tmp_path):
    assert sample_of(corpus_of(b"text " * 20, tokenizer=str(tmp_path / "moved"))) is None


@pytest.mark.parametrize(
    ("script", "nproc"),
    [
        ("05_ddp/train.py", 2),
        in_long("04_amp/train.py", None),
        in_long("06_fsdp_zero/train_fsdp.py", 2),
    ],
)
def test_each_evaluation_shows_a_text(tmp_path, script, nproc):
    result = train(script, tmp_path, "--steps", 4, "--eval-every", 2, nproc=nproc)
    assert len(result.column("sample")) == len(result.column("val_loss")) == 2
    assert result.out.count("sample: ") == 2
