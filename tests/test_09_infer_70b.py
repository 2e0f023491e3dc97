"""09_inference/infer_70b.py: on any number of ranks the tokens of transformers' generate, planned bytes, refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chapter import load
from support.harness import (
    ODD,
    assert_refused,
    config_of,
    in_full,
    in_long,
    needs_compiler,
    run,
    with_fault,
)
from support.real_model import answers_of_transformers

from lm import shapes
from lm.weights import build

SCRIPT = "09_inference/infer_70b.py"
PROMPTS = ["def main():", "a", "for i in range(3): print(i)"]  # of unequal lengths
SHAPES = {
    "even": {  # for 2 and 4 ranks, which do not divide its vocabulary; tied
        **{
            **ODD,
            "vocab_size": 203,
            "hidden_size": 56,
            "intermediate_size": 44,
            "num_attention_heads": 8,
        },
        **{
            "num_key_value_heads": 4,
            "head_dim": 6,
            "max_position_embeddings": 96,
            "tie_word_embeddings": True,
        },
    },
    "three": {**ODD, "intermediate_size": 51, "max_position_embeddings": 96},
}
SIX = {  # for 2 and 3 ranks: 12 heads on 6 of keys and values
    **{**ODD, "hidden_size": 96, "intermediate_size": 54, "head_dim": 8},
    **{"num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 96},
}
SHAPES["qwen2"] = {**SIX, "model_type": "qwen2", "vocab_size": 210}  # biases of q, k and v
# norms of heads
SHAPES["qwen3"] = {**SIX, "model_type": "qwen3", "vocab_size": 203, "tie_word_embeddings": True}
NEW_TOKENS = 48


def make_reference(where: Path, name: str) -> tuple[str, list[list[int]]]:
    """A folder with weights in two files and an index, as large models have, and what transformers' generate answers.
    The weights are large enough for attention to matter: with small ones a model repeats one token."""
    config = config_of(SHAPES[name])
    net = build("nano", config, seed=5)
    generator = torch.Generator().manual_seed(6)
    stored = {}
    for key, weight in net.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        scale = 0.3 if key.endswith(".bias") else 0.05
        stored[key] = (8 if weight.ndim > 1 else 1) * weight.detach() + scale * noise
    files = {f"part-{i}.safetensors": dict(list(stored.items())[i::2]) for i in range(2)}
    for file, weights in files.items():
        save_file(weights, where / file, metadata={"format": "pt"})
    weight_map = {name: file for file, weights in files.items() for name in weights}
    (where / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}),
        encoding="utf-8",
    )
    (where / "config.json").write_text(json.dumps(shapes.config_json(config)), encoding="utf-8")

    from transformers import AutoModelForCausalLM

    baseline = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([list(prompt.encode())])
        answer = baseline.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        answers.append(answer[0, ids.shape[1] :].tolist())
    assert len({token for ids in answers for token in ids}) > 20  # no repetition
    return str(where), answers


@pytest.fixture
def reference(once):
    return lambda name: once("infer-70b", make_reference, name)


def infer(where: Path, model: str | Path, *flags, prompts=PROMPTS, **how) -> dict:
    where.mkdir(parents=True, exist_ok=True)
    (where / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    shared = [
        "--model",
        model,
        "--device",
        "cpu",
        "--json",
        "summary.json",
        "--prompts",
        "prompts.txt",
    ]
    result = run(SCRIPT, where, *shared, *flags, **how)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-3000:]}"
    return result.summary


CUTS = [
    ("even", None),
    ("even", 2),
    ("qwen2", 3),
    *(in_full(*cut) for cut in [("qwen3", 3), ("even", 4)]),
    *(in_long(*cut) for cut in [("qwen2", 2), ("qwen3", 2), ("three", 3)]),
]


def bytes_of_rank0(folder: str, ranks: int, bytes_each: int) -> int:
    """Add up what rank 0 keeps of each tensor in the folder's files."""
    total = 0
    for file in Path(folder).glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.endswith("norm.weight"):
                numbers = tensor.numel()
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                numbers = tensor.chunk(ranks, dim=1)[0].numel()
            else:
                numbers = tensor.chunk(ranks, dim=0)[0].numel()
            total += numbers * bytes_each
    return total


@pytest.mark.parametrize(("name", "ranks"), CUTS)
def test_the_tokens_are_those_of_transformers(tmp_path, reference, name, ranks):
    folder, expected = reference(name)
    found = infer(tmp_path, folder, "--max-new-tokens", NEW_TOKENS, nproc=ranks)
    assert found["token_ids"] == expected
    assert found["world_size"] == (ranks or 1)
    assert found["tokens"] == sum(map(len, PROMPTS)) + 3 * NEW_TOKENS
    assert found["weight_bytes"] == bytes_of_rank0(folder, ranks or 1, bytes_each=4)
    assert any("transformers" in line for line in found["checked"])


def test_a_dry_run_has_the_bytes_of_a_run(tmp_path, reference):
    for name, ranks in (("qwen2", 2), ("qwen2", 3), ("even", 4)):
        folder, _ = reference(name)
        flags = ["--model", folder, "--dry-run", "--world-size", ranks, "--memory", 1]
        result = run(SCRIPT, tmp_path, *flags, "--json", "summary.json")
        assert result.code == 0, result
        expected = bytes_of_rank0(folder, ranks, bytes_each=2)
        assert result.summary["weight_bytes"] == expected, (name, ranks)


FAULTS = {  # a line, and what stands in its place
    "a rank holds all of k's bias": ("[qkv]_proj", "[qv]_proj"),
    "the embedding is on every rank": ('"model.embed_tokens": Rowwise', '"none": Rowwise'),
}


@pytest.mark.parametrize(
    "fault", ["the embedding is on every rank", in_long("a rank holds all of k's bias")]
)
def test_bytes_that_were_not_planned_fail(tmp_path, reference, fault):
    folder, _ = reference("qwen2")
    script = with_fault(SCRIPT, tmp_path, *FAULTS[fault])
    result = run(str(script), tmp_path, "--model", folder, "--dry-run", "--world-size", 2)
    assert result.code == 1, result
    assert "bytes of weights" in result.err, result


@pytest.mark.long
@needs_compiler
def test_compiled_on_two_ranks(tmp_path, reference):
    folder, expected = reference("even")
    assert (
        infer(tmp_path, folder, "--max-new-tokens", NEW_TOKENS, "--compile", nproc=2)["token_ids"]
        == expected
    )


def test_an_answer_ends_at_a_stop_token(tmp_path, reference):
    folder, expected = reference("even")
    other = tmp_path / "model"
    other.mkdir()
    for file in Path(folder).iterdir():
        (other / file.name).symlink_to(file)
    stop = expected[0][5]
    (other / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [stop]}), encoding="utf-8"
    )
    found = infer(tmp_path, other, "--max-new-tokens", NEW_TOKENS)["token_ids"]
    assert found == [ids[: ids.index(stop)] if stop in ids else ids for ids in expected]
    assert len(found[0]) <= 5


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_ranks(tmp_path, reference):
    drawn = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.9, "--max-new-tokens", 16]
    folder = reference("even")[0]
    one, two, other = (
        infer(tmp_path / str(i), folder, *drawn, "--seed", seed, nproc=ranks)["token_ids"]
        for i, (seed, ranks) in enumerate([(1, None), (1, 2), (2, None)])
    )
    assert one == two != other


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.7), (5, 1.0), (5, 0.7)])
def test_what_top_k_and_top_p_leave(top_k, top_p):
    """Only top-p of the whole vocabulary sorts it, which takes longer than softmax or topk."""
    logits = 2 * torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    with torch.profiler.profile() as profile:
        found = load("lm/generate.py").probabilities(
            logits, temperature=0.8, top_k=top_k, top_p=top_p
        )
    for row, chances in zip(logits.double(), found, strict=True):
        expected = (row / 0.8).softmax(-1)
        likeliest_first = sorted(range(40), key=lambda token: -expected[token].item())
        if top_k:
            expected[likeliest_first[top_k:]] = 0
        expected /= expected.sum()
        total = 0.0
        for token in likeliest_first:
            chance = expected[token].item()
            if total >= top_p:
                expected[token] = 0
            total += chance
        torch.testing.assert_close(chances.double(), expected / expected.sum(), rtol=1e-5, atol=0)
    is_sorted = "aten::sort" in {event.key for event in profile.key_averages()}
    assert is_sorted == (top_k == 0 and top_p < 1)


def test_a_dry_run_has_the_published_bytes(tmp_path):
    """Llama-3 70B in bf16: 70,553,706,496 parameters; norms are whole on each of 8 ranks."""
    flags = [
        "--model",
        "llama-70b",
        "--dry-run",
        "--world-size",
        8,
        "--memory",
        80,
        "--json",
        "summary.json",
    ]
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, result.err
    norms = (2 * 80 + 1) * 8192
    assert result.summary["weight_bytes"] == 2 * ((70_553_706_496 - norms) // 8 + norms)


REFUSED = {  # flags: words of the line
    "--memory 80 --dry-run --model llama-70b --world-size 1": "llama-70b 09_inference/quantized.py",
    "--world-size 3 --dry-run --model llama-70b --memory 80": "3 64",
    "--dry-run": "--world-size",
    "--max-new-tokens 5000 --prompt x": "--max-new-tokens",
    "--top-k 3": "--top-k --temperature",
    "--chat": "",
    "--prompts none.txt": "",
    "--model none": "",
}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags, words in REFUSED.items():
        assert_refused(run(SCRIPT, tmp_path, *flags.split()), *(words or flags).split())


@pytest.mark.real_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [in_long(None), 3])
def test_the_real_model_answers_as_transformers_lets_it(tmp_path, smollm2, ranks):
    questions = ["What is the capital of France?", "Say hello."]
    found = infer(
        tmp_path, smollm2, "--chat", "--max-new-tokens", 8, prompts=questions, nproc=ranks
    )
    assert found["token_ids"] == answers_of_transformers(smollm2, questions, 8)
    assert "Paris" in found["texts"][0]
