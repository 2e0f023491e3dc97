"""07_memory_tricks/quantized_inference.py: transformers' tokens, errors within bounds, guesses that change nothing."""

import dataclasses
import functools
import json
import shutil
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import ODD, TEXT, TINY, config_of, run, train
from support.real_model import answers_of_transformers
from torch.utils._python_dispatch import TorchDispatchMode

from old import inference, model, report, shapes
from old.generate import Sampler, StaticCache, generate, probabilities

quantized = load("07_memory_tricks/quantized_inference.py")
caches = load("07_memory_tricks/_quantized_inference_cache.py")
checks = load("07_memory_tricks/_quantized_inference_checks.py")
files = load("07_memory_tricks/_quantized_inference_files.py")
loading = load("07_memory_tricks/_quantized_inference_load.py")
products = load("07_memory_tricks/_quantized_inference_products.py")
reporting = load("07_memory_tricks/_quantized_inference_report.py")
speculative = load("07_memory_tricks/_quantized_inference_speculative.py")

SCRIPT = "07_memory_tricks/quantized_inference.py"
CPU = torch.device("cpu")
PROMPTS = ["def main():", "a", "The quick brown fox jumps"]  # of unequal lengths
WIDER = {**TINY, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05 + 0.01


def loaded(name, config, weights: str, *, group: int = 32, dtype=torch.float32, save=None) -> loading.Loaded:
    scheme = loading.Scheme(weights, quantized.LAYERS[weights], group)
    return loading.load(str(name), config, scheme, seed=1, dtype=dtype, device=CPU, save=save)


def steps(net: model.Transformer, cache: StaticCache):
    def prefill(ids, positions, last):
        return net(ids, positions=positions, cache=cache, last=last)

    def decode(ids, positions):
        return net(ids[:, None], positions=positions[:, None], cache=cache)[:, -1]

    def verify(ids, positions):
        return net(ids, positions=positions, cache=cache)

    return prefill, decode, verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "random"
    write_folder(folder, config_of(TINY), scale=4)
    return folder


# --- rounding


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (7, 64), (33, 96)])
def test_int4_codes_come_back_to_the_bit(rows, columns):
    codes = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    packed = products.pack_int4(codes)
    assert packed.shape == (rows, columns // 2)
    assert torch.equal(products.unpack_int4(packed), codes)
    every = torch.arange(256, dtype=torch.uint8)[None]
    assert torch.equal(products.pack_int4(products.unpack_int4(every)), every)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_int4_is_the_nearest_of_sixteen_values(group):
    weight = matrix(5, 256, seed=group)
    parts = quantized.Int4.quantize(weight, group)
    assert parts["scale"].shape == (5, 256 // group)
    assert (parts["codes"].nbytes + 2 * parts["scale"].nbytes) * 8 == weight.numel() * (4 + 32 / group)
    scale, zero = (parts[name].float().repeat_interleave(group, 1) for name in ("scale", "zero"))
    values = (torch.arange(16) - 8)[:, None, None] * scale + zero
    nearest = (values - weight).abs().amin(0)
    found = quantized.Int4.dequantize(**parts)
    assert ((found - weight).abs() <= nearest + 1e-7).all()
    assert 0.3 < checks.rounding_share(weight, found - weight, parts, "int4") <= 1


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_row_shares_a_scale(weights):
    layer, weight = quantized.LAYERS[weights], matrix(11, 52)
    weight[3] *= 100
    weight[5] = 0
    parts = layer.quantize(weight, 32)
    error = layer.dequantize(**parts) - weight
    assert parts["codes"].itemsize == 1
    assert 0.9 < checks.rounding_share(weight, error, parts, weights) <= 1
    assert error[5].abs().max() == 0
    bound = weight.abs().amax(1, keepdim=True) / 127 * 0.51 if weights == "int8" else weight.abs() / 16 + 1e-5
    assert (error.abs() <= bound).all()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (211, 52), (97, 36)])  # no whole groups, no multiple of 16
def test_packed_products_are_those_of_the_dequantized_weights(weights, dtype, rows, columns):
    layer = quantized.LAYERS[weights]
    weight = matrix(rows, columns)
    parts = layer.quantize(weight, 32)
    assert 0 < checks.product_error(layer(**parts), parts, dtype) <= (1e-6 if dtype == torch.float32 else 1e-2)
    x = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = F.linear(x.float(), layer.dequantize(**parts)[:, :columns])
    found = layer(**parts)(x)
    assert found.dtype == dtype
    assert (found.float() - expected).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * expected.norm()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_part_of_a_matrix_at_a_time(weights, monkeypatch):
    """The same to the bit, and nothing beside it is as large as the matrix in fp32."""
    layer, parts = quantized.LAYERS[weights], quantized.LAYERS[weights].quantize(matrix(1000, 96), 32)
    whole = dict(layer(**parts).named_buffers())
    error = checks.product_error(layer(**parts), parts, torch.bfloat16)

    monkeypatch.setattr(sys.modules[checks.rows_at_once.__module__], "CHUNK", 96 * 128)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Watch():
        found = layer(**parts)
        again = checks.product_error(found, parts, torch.bfloat16)
    assert whole.keys() == dict(found.named_buffers()).keys()
    assert all(torch.equal(whole[name], buffer) for name, buffer in found.named_buffers())
    assert again == pytest.approx(error)
    kept = max(part.nbytes for part in parts.values())
    assert largest <= max(kept * 1.1, 4 * 96 * 128)


def test_a_product_with_other_weights_is_seen():
    parts = quantized.Int8.quantize(matrix(16, 64), 32)
    layer = quantized.Int8(**parts)
    layer.scale = layer.scale * 1.05
    with pytest.raises(AssertionError, match="the product of Int8"):
        checks.product_error(layer, parts, torch.float32)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4)], ids=["grouped", "own keys"])
def test_attention_of_a_token_written_out_is_torchs(tokens, heads):
    """And attend, as it is called outside of a compiled step, is torch's for several tokens too."""
    generator = torch.Generator().manual_seed(1)
    length, (query_heads, key_heads) = 17, heads
    q = torch.randn(2, query_heads, tokens, 10, generator=generator)
    k, v = (torch.randn(2, key_heads, length, 10, generator=generator) for _ in range(2))
    positions = torch.tensor([[4], [11]]) + torch.arange(tokens)  # the rows of a batch see unequal parts of the cache
    seen = (torch.arange(length) <= positions[..., None])[:, None]
    how = {"is_causal": False, "enable_gqa": query_heads != key_heads}
    expected = F.scaled_dot_product_attention(q, k, v, seen, **how)
    assert torch.allclose(products.attend(q, k, v, seen, **how), expected, rtol=1e-5, atol=1e-6)
    if tokens == 1:
        assert torch.allclose(products.attention_of_a_token(q, k, v, seen), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("rows", [64, 211])
def test_one_row_times_codes(monkeypatch, rows, amx):
    monkeypatch.setattr(products, "AMX", amx)
    codes = torch.randint(-127, 128, (rows, 52), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    x = torch.randn(1, 1, 52, generator=torch.Generator().manual_seed(2))
    found = products.sums_of_rows(x, codes)
    assert torch.allclose(found, F.linear(x, codes.float()), rtol=1e-5, atol=1e-3)
    assert torch.allclose(products.one_row(x, codes.float()), F.linear(x, codes.float()), rtol=1e-5, atol=1e-3)


# --- the model


def transformers_tokens(folder: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    from transformers import LlamaForCausalLM

    net = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        net.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()
        for ids in prompts
    ]


def test_in_fp32_the_tokens_are_those_of_transformers(tmp_path, folder):
    (tmp_path / "prompts").write_text("\n".join(PROMPTS) + "\n")
    flags = ["--model", folder, "--prompts", "prompts", "--weights", "fp32", "--max-new-tokens", 64, "--device", "cpu"]
    result = run(SCRIPT, tmp_path, *flags, "--json", "summary.json")
    assert result.code == 0, result.err[-3000:]
    expected = transformers_tokens(folder, [list(prompt.encode()) for prompt in PROMPTS], 64)
    assert result.summary["token_ids"] == expected
    assert len({token for ids in expected for token in ids}) > 5  # it says more than one thing


@pytest.mark.parametrize("sizes", [TINY, {**ODD, "tie_word_embeddings": True}, WIDER])
@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_it_is_the_model_with_dequantized_weights(sizes, weights):
    """Merged products, tied and untied heads: against the plain model with the rounded weights put in."""
    config = config_of(sizes)
    net = loaded("nano", config, weights).net
    plain = model.build("nano", config, seed=1)
    layer = quantized.LAYERS[weights]
    if config.tie_word_embeddings:
        plain.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        plain.lm_head.weight = torch.nn.Parameter(plain.model.embed_tokens.weight.detach().clone())
    if weights != "fp32":
        for module in plain.modules():
            if isinstance(module, torch.nn.Linear):
                parts = layer.quantize(module.weight.detach(), 32)
                module.weight.data = layer.dequantize(**parts)[:, : module.weight.shape[1]]
    ids = torch.randint(0, config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = net(ids), plain(ids)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_what_is_held_is_what_the_formula_says():
    config = config_of(WIDER)
    parameters = shapes.parameter_count(config)
    head = config.vocab_size * config.hidden_size
    assert loaded("nano", config, "fp32").weight_bytes == 4 * parameters
    half = loaded("nano", config, "bf16", dtype=torch.bfloat16)
    assert half.weight_bytes == 2 * parameters
    assert half.bytes_per_step == 2 * (parameters - head - (2 * 2 + 1) * 64)  # an embedding is looked up; norms
    int4 = loaded("nano", config, "int4")
    assert int4.bytes_per_step < 4 * (parameters - head) * (4 + 32 / 32) / 32 * 1.1
    assert int4.matrices == 7 * 2 + 1 == len(int4.rounding_shares)


def test_logits_stay_within_what_rounding_allows():
    config = config_of(TINY)
    prompts = [list(range(20)), list(range(40, 90))]
    reference = reporting.prompt_logits(loaded("nano", config, "fp32").net, prompts, CPU)
    errors = {}
    for weights in ("int8", "int4"):
        rounded = loaded("nano", config, weights, dtype=torch.bfloat16)
        logits = reporting.prompt_logits(rounded.net, prompts, CPU)
        errors[weights] = checks.check_logits(logits, reference, rounded, "bf16")
    assert errors["int8"] < 0.02 < errors["int4"] < 0.3
    rounded.net.model.layers["0"].self_attn.o_proj.scale_and_zero.zero_()
    rounded.net.lm_head.scale_and_zero *= 2
    logits = reporting.prompt_logits(rounded.net, prompts, CPU)
    with pytest.raises(AssertionError, match="where rounding allows"):
        checks.check_logits(logits, reference, rounded, "bf16")


def test_no_more_than_a_layer_is_there_unrounded(folder, monkeypatch):
    """Counted: what of the source is alive whenever the next of its matrices is read."""
    alive: list[weakref.ref] = []
    most = 0
    read = files.tensor_of

    def counted(stored, key):
        nonlocal most
        most = max(most, sum(tensor().nbytes for tensor in alive if tensor() is not None))
        alive.append(weakref.ref(tensor := read(stored, key)))
        return tensor

    monkeypatch.setattr(files, "tensor_of", counted)
    config = config_of(TINY)
    result = loaded(folder, config, "int8", dtype=torch.bfloat16)
    assert len(alive) == 2 * 9 + 3
    layer = 4 * sum(parameter.numel() for parameter in model.Block(config).parameters())
    assert most <= layer
    assert result.weight_bytes < 4 * shapes.parameter_count(config) / 2


# --- saved and loaded


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("sizes", [TINY, {**ODD, "tie_word_embeddings": True}])
def test_saved_and_loaded_it_is_the_same_to_the_bit(tmp_path, weights, sizes):
    config = config_of(sizes)
    source = tmp_path / "source"
    write_folder(source, config)
    first = loaded(source, config, weights, dtype=torch.bfloat16, save=tmp_path / "saved")
    shutil.rmtree(source)
    kept = tmp_path / "saved"
    assert files.quantization(str(kept)) == {"weights": weights, "group_size": 32}
    assert dataclasses.asdict(shapes.read_config(str(kept))) == dataclasses.asdict(config)
    assert not kept.with_name("saved.tmp").exists()
    second = loaded(kept, config, weights, dtype=torch.bfloat16)
    assert not second.rounding_shares  # nothing was rounded again
    before, after = (dict(one.net.named_buffers()) | dict(one.net.named_parameters()) for one in (first, second))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_saved_model_runs_without_the_flags_that_made_it(tmp_path, folder):
    shared = ["--max-new-tokens", 20, "--json", "summary.json", "--device", "cpu"]
    saved = run(SCRIPT, tmp_path, "--model", folder, "--weights", "int4", "--save", "runs/four", *shared)
    assert saved.code == 0, saved.err[-3000:]
    tokens, held = saved.summary["token_ids"], saved.summary["weight_bytes"]
    again = run(SCRIPT, tmp_path, "--model", "runs/four", *shared)
    assert again.code == 0, again.err[-3000:]
    assert (again.summary["weights"], again.summary["group_size"]) == ("int4", 32)
    assert (again.summary["token_ids"], again.summary["weight_bytes"]) == (tokens, held)
    other = run(SCRIPT, tmp_path, "--model", "runs/four", "--weights", "int8")
    assert (other.code, len(other.err.splitlines())) == (2, 1)
    assert "--weights int8" in other.err


# --- the cache, the loop


def test_an_int8_cache_is_off_by_half_a_step():
    config = config_of(TINY)
    sizes = {"batch": 2, "length": 12, "dtype": torch.float32, "device": CPU}
    exact, small = StaticCache(config, **sizes), caches.Int8Cache(config, **sizes)
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([[3, 4, 5], [0, 1, 2]])
    shape = (2, config.num_key_value_heads, 3, config.head_dim)
    k, v = (torch.randn(shape, generator=generator) * 3 for _ in range(2))
    for found, expected in zip(small.extend("0", positions, k, v), exact.extend("0", positions, k, v), strict=True):
        step = expected.abs().amax(-1, keepdim=True) / 127
        assert ((found - expected).abs() <= step / 2 * 1.001).all()
        assert not torch.equal(found, expected)
    assert small.nbytes() == exact.nbytes() * (config.head_dim + 4) / (4 * config.head_dim)

    net = loaded("nano", config, "fp32").net
    logits = []
    for make in (StaticCache, caches.Int8Cache):
        prefill, decode, _ = steps(net, make(config, **sizes))
        ids = torch.arange(16).view(2, 8)
        with torch.no_grad():
            prefill(ids, torch.arange(8).expand(2, 8), torch.tensor([7, 7]))
            logits.append(decode(torch.tensor([5, 9]), torch.tensor([8, 8])))
    assert 0 < (logits[1] - logits[0]).norm() <= 0.02 * logits[0].norm()


@pytest.mark.parametrize("new", [1, 2, 9])
def test_tokens_that_are_read_late_are_the_same(new):
    config = config_of(TINY)
    net = loaded("nano", config, "fp32").net
    prompts = [[1, 2, 3], [50, 7]]

    def tokens(read_late: bool, stop: frozenset[int] = frozenset()) -> list[list[int]]:
        prefill, decode, _ = steps(net, StaticCache(config, batch=2, length=16, dtype=torch.float32, device=CPU))
        sampler = Sampler(1.0, generator=torch.Generator().manual_seed(4))
        shared = {"max_new_tokens": new, "sampler": sampler, "device": "cpu", "stop": stop}
        seen = []
        result = generate(prefill, decode, prompts, **shared, on_tokens=seen.append, read_late=read_late)
        assert [[row[i] for row in seen if row[i] is not None] for i in range(2)] == result.token_ids
        return result.token_ids

    plain = tokens(False)
    assert tokens(True) == plain
    assert [len(ids) for ids in plain] == [new, new]
    stop = frozenset({plain[0][new // 2], plain[1][new // 3]})
    assert tokens(True, stop) == tokens(False, stop) != plain


def guessing(max_new_tokens: int, draft_tokens: int, *, same: bool = False, stop=frozenset()):
    config = config_of(TINY)
    small = dataclasses.replace(config, hidden_size=16, num_hidden_layers=1, intermediate_size=24, head_dim=4)
    target = loaded("nano", config, "fp32").net
    draft = target if same else loaded("nano", small, "fp32").net
    sizes = {"batch": 1, "length": 3 + max_new_tokens + draft_tokens, "dtype": torch.float32, "device": CPU}
    prefill, decode, verify = steps(target, StaticCache(config, **sizes))
    draft_prefill, draft_decode, _ = steps(draft, StaticCache(config if same else small, **sizes))
    shared = {"max_new_tokens": max_new_tokens, "sampler": Sampler(), "device": CPU, "stop": stop}
    plain = generate(prefill, decode, [[9, 8, 7]], **shared)
    models = speculative.Models(prefill, verify, draft_prefill, draft_decode)
    result, kept = speculative.speculate(models, [9, 8, 7], draft_tokens=draft_tokens, **shared)
    return plain, result, kept


@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
def test_guesses_do_not_change_greedy_tokens(draft_tokens):
    plain, result, kept = guessing(33, draft_tokens)
    assert result.token_ids == plain.token_ids
    assert len(plain.token_ids[0]) == 33
    stop = frozenset({plain.token_ids[0][20]})
    plain, result, _ = guessing(33, draft_tokens, stop=stop)
    assert result.token_ids == plain.token_ids
    assert len(plain.token_ids[0]) <= 20
    assert result.decode_steps == len(kept) or kept


def test_a_draft_that_is_the_model_is_always_right():
    plain, result, kept = guessing(25, 3, same=True)
    assert result.token_ids == plain.token_ids
    assert kept == [3] * 6  # 1 + 6 x 4 tokens


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return ((counts - expected).square() / expected).sum().item()


def test_guesses_do_not_change_the_distribution():
    """Each token's and the pair's, over 6,000 draws at a fixed seed: Pearson's chi-square at the 0.1 % level."""
    generator = torch.Generator().manual_seed(11)
    draws, vocab = 6000, 4
    first, second = torch.randn(2, vocab, generator=generator)
    following = torch.randn(2, vocab, vocab, generator=generator)  # by the token before: the model's, the draft's
    sampling = {"temperature": 0.8}
    start, draft_start = probabilities(first, **sampling), probabilities(second, **sampling)
    then, draft_then = (probabilities(table, **sampling) for table in following)
    pairs = torch.zeros(vocab, vocab)
    kept = 0
    for _ in range(draws):
        guess = torch.multinomial(draft_start, 1, generator=generator)
        target = torch.stack((start, then[guess[0]]))
        count, token = speculative.accept(target, draft_start[None], guess, generator)
        kept += count.item()
        if count.item():
            pairs[guess, token] += 1
        else:  # the next round draws the second token
            guess = torch.multinomial(draft_then[token[0]], 1, generator=generator)
            target = torch.stack((then[token[0]], start))
            count, other = speculative.accept(target, draft_then[token], guess, generator)
            pairs[token, guess if count.item() else other] += 1
    overlap = torch.minimum(start, draft_start).sum().item()
    assert abs(kept / draws - overlap) < 0.03  # as many are kept as can be
    assert overlap < 0.9
    assert chi_square(pairs, start[:, None] * then * draws) < 37.7  # 15 degrees of freedom
    assert chi_square(pairs.sum(1), start * draws) < 16.3  # 3
    assert chi_square(pairs.sum(1), draft_start * draws) > 100  # and the test would see the draft's


# --- the script


def test_all_schemes_in_turn(tmp_path):
    (tmp_path / "shape.json").write_text(json.dumps(WIDER))
    (tmp_path / "text").write_text(TEXT.read_text()[:2000])
    flags = ["--model", "shape.json", "--weights", "all", "--max-new-tokens", 12, "--device", "cpu"]
    result = run(SCRIPT, tmp_path, *flags, "--evaluate", "text", "--json", "summary.json")
    assert result.code == 0, result.err[-3000:]
    rows = {row["weights"]: row for row in result.summary["schemes"]}
    assert [*rows][:4] == ["fp32", "bf16", "int8", "int4"]
    held = [row["weight_bytes"] for row in rows.values()]
    assert held[0] == 2 * held[1] > held[1] > held[2] > held[3]
    assert rows["bf16"]["logits_relative_error"] < rows["int8"]["logits_relative_error"]
    assert rows["int8"]["logits_relative_error"] < rows["int4"]["logits_relative_error"] < 0.5
    assert all(abs(row["loss"] - rows["fp32"]["loss"]) < 0.05 for row in rows.values())
    assert all(len(row["token_ids"][0]) == row["new_tokens"] == 12 for row in rows.values())
    assert result.summary["token_ids"] == rows[result.summary["weights"]]["token_ids"]
    assert result.summary["peak_memory_bytes"] > 0
    assert result.summary["tokens"] == result.summary["prompt_tokens"] + 12
    assert result.out.count("checked:") >= 3 + 4
    assert "tokens equal to fp32's" in result.out
    if "fp8" not in rows:
        assert result.out.startswith("left out: fp8")


def seconds_per_step(summary: dict) -> float:
    """Of the large model. A step decodes one token, and as many more as guesses are kept; of the last, a part."""
    tokens_per_step = 1 + (summary["guesses_kept_per_step"] or 0)
    return tokens_per_step / summary["decode_tokens_per_second"]


def test_a_draft_and_a_small_cache_on_the_command_line(tmp_path, folder):
    shared = [
        "--model",
        folder,
        "--weights",
        "fp32",
        "--max-new-tokens",
        24,
        "--device",
        "cpu",
        "--json",
        "summary.json",
    ]
    before = run(SCRIPT, tmp_path, *shared)
    plain = before.summary
    guessed = run(SCRIPT, tmp_path, *shared, "--draft", folder, "--draft-tokens", 2)
    assert guessed.code == 0, guessed.err[-3000:]
    summary = guessed.summary
    assert summary["token_ids"] == plain["token_ids"]
    kept = summary["guesses_kept_per_step"]
    assert kept > 1.5
    assert f"speculative: {kept:.1f} of 2 guesses kept per step" in guessed.out
    assert "speculative" not in before.out
    assert summary["weight_bytes"] == 2 * plain["weight_bytes"]
    read = {
        name: result["weight_bytes_read_per_second"] * seconds_per_step(result)
        for name, result in (("plain", plain), ("guessed", summary))
    }
    assert read["guessed"] == pytest.approx(4 * read["plain"], rel=0.1)  # itself, two guesses, the last one's cache
    small = run(SCRIPT, tmp_path, *shared, "--kv-cache", "int8")
    assert small.code == 0, small.err[-3000:]
    assert small.summary["cache_bytes"] < plain["cache_bytes"] / 2


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (["--weights", "int2"], "--weights"),
        (["--weights", "fp32", "--dtype", "bf16"], "--dtype bf16"),
        (["--weights", "int8", "--dtype", "fp16"], "--dtype fp16"),
        (["--weights", "int4", "--group-size", "48"], "--group-size"),
        (["--weights", "int4", "--group-size", "128"], "--group-size 128 does not divide intermediate_size 688"),
        (["--weights", "fp32", "--save", "kept"], "--save kept"),
        (["--weights", "int8", "--save", "."], "--save ."),
        (["--model", "nowhere"], "--model nowhere"),
        (["--model", "empty"], "--model empty: no .safetensors"),
        (["--model", "cut"], "--model cut: model.safetensors cannot be read"),
        (["--model", "lacks"], "--model lacks: none of its .safetensors files has model.layers.1"),
        (["--model", "other"], "--model other: model.layers.0.self_attn.q_proj.weight has shape"),
        (["--model", "llama-405b", "--weights", "fp32"], "more than the"),
        (["--prompt", ""], "an empty prompt"),
        (["--prompt", "a", "--max-new-tokens", "1024"], "longer than the model's context"),
        (["--draft", "llama-124m"], "--draft llama-124m has a vocabulary of 50304"),
        (["--draft", "nano", "--prompts", "two"], "--draft nano"),
        (["--draft", "short"], "--draft short has a context of 40, and prompt, answer and guesses take 47"),
        (["--draft-tokens", "2"], "--draft-tokens 2: nobody guesses without --draft"),
        (["--weights", "int8", "--group-size", "64"], "--group-size 64: --weights int8 has no groups"),
        (["--weights", "int8", "--save", "/proc/fe"], "--save /proc/fe: No such file"),
        (["--weights", "int8", "--save", "kept"], "--save kept: kept.tmp is in the way"),
        (["--model", "few"], "names model-1.safetensors, which is not there (1 of 2 files missing)"),
        (["--weights", "fp32", "--prompts", "many", "--max-new-tokens", "1000"], "the cache need 1"),
        (["--weights", "int8", "--evaluate", "nothing"], "--evaluate nothing"),
        (["--draft", "nope"], "--draft nope: no such size"),
        (["--model", "whole", "--draft", "empty"], "--draft empty: no .safetensors"),
        (["--model", "whole", "--draft", "cut"], "--draft cut: model.safetensors cannot be read, it is truncated or"),
        (["--model", "whole", "--draft", "lacks"], "--draft lacks: none of its .safetensors files has model.layers.1"),
        (["--model", "whole", "--draft", "other"], "--draft other: model.layers.0.self_attn.q_proj.weight has shape"),
        (["--model", "whole", "--draft", "few"], "--draft few: model.safetensors.index.json names model-1.safetensors"),
        (["--weights", "bf16", "--draft", "r8"], "--draft r8 has been rounded with --weights int8, and --weights bf16"),
        (["--weights", "int4", "--draft", "r8"], "use --weights int8, or a draft that is not rounded"),
        (["--draft", "r8"], "and --weights all is for model and draft"),
        (["--weights", "int4", "--draft", "r4"], "rounded with --weights int4 --group-size 64, and --weights int4 --g"),
        (["--model", "group of text"], "--model group of text: its config has a quantization that this script did not"),
        (["--draft", "group of 0"], "--draft group of 0: its config has a quantization that this script did not"),
        (["--model", "fewer tokens", "--prompt", "a", "--evaluate", "bytes"], "--evaluate bytes has token 226"),
        (
            ["--draft", "nano", "--prompt", "0123456789", "--max-new-tokens", "1012"],
            "--max-new-tokens 1012 with --draft-tokens 4 are longer than the model's context of 1024: at most 1010 new",
        ),
    ],
)
def test_bad_input_takes_one_line(tmp_path, folder, bad, named):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    (tmp_path / "two").write_text("a\nb\n")
    (tmp_path / "many").write_text("a\n" * 100_000)
    for name in ("empty", "cut", "lacks", "other", "few", "kept.tmp", "short"):
        (tmp_path / name).mkdir()
        shutil.copy(folder / "config.json", tmp_path / name)
    (tmp_path / "bytes").write_text("\N{EURO SIGN}")
    changes = {
        "short": {"max_position_embeddings": 40},
        "fewer tokens": {"vocab_size": 200},
        "r8": {"quantization": {"weights": "int8", "group_size": 32}},
        "r4": {"quantization": {"weights": "int4", "group_size": 64}},
        "group of text": {"quantization": {"weights": "int4", "group_size": "32"}},
        "group of 0": {"quantization": {"weights": "int4", "group_size": 0}},
    }
    content = json.loads((folder / "config.json").read_text())
    for name, change in changes.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(content | change))
    index = {"weight_map": {"lm_head.weight": "model-1.safetensors", "model.norm.weight": "model-2.safetensors"}}
    (tmp_path / "few/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "model.safetensors", tmp_path / "few/model-2.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    (tmp_path / "cut/model.safetensors").write_bytes(data[: len(data) // 2])
    save_file({k: v for k, v in weights.items() if "layers.1" not in k}, tmp_path / "lacks/model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, tmp_path / "other/model.safetensors")
    (tmp_path / "whole").symlink_to(folder)
    result = run(SCRIPT, tmp_path, *bad, "--device", "cpu")
    assert result.code == 2, result.out + result.err[-2000:]
    assert named in result.err
    assert len(result.err.splitlines()) == 1
    if not {"--model", "--dtype", "many"} & {*bad}:
        assert "prompt(s)" not in result.out  # refused before a model is begun
    assert (tmp_path / "kept.tmp/config.json").exists()


def test_a_saved_model_that_was_begun_is_begun_again(tmp_path):
    (tmp_path / "kept.tmp").mkdir()
    (tmp_path / "kept.tmp/config.json").write_text('{"quantization": {"weights": "int8", "group_size": 32}}')
    (tmp_path / "kept.tmp/layer-077.safetensors").write_text("cut")
    flags = ["--weights", "int8", "--save", "kept", "--draft", "nano", "--max-new-tokens", 4, "--device", "cpu"]
    result = run(SCRIPT, tmp_path, *flags)  # a draft of the same name is not saved, too
    assert result.code == 0, result.err[-3000:]
    assert not (tmp_path / "kept.tmp").exists()
    assert not (tmp_path / "kept/layer-077.safetensors").exists()
    assert files.quantization(str(tmp_path / "kept")) == {"weights": "int8", "group_size": 32}


def test_the_peak_is_read_before_the_bandwidth_is_measured(tmp_path, monkeypatch):
    """The buffer that it reads is as large as the weights, and no part of generating."""
    order = []

    def note(name: str, measure, *args):
        order.append(name)
        return measure(*args)

    for module, name in ((report, "peak_memory_bytes"), (inference, "read_bandwidth")):
        monkeypatch.setattr(module, name, functools.partial(note, name, getattr(module, name)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [SCRIPT, "--max-new-tokens", "2", "--device", "cpu", "--json", "summary.json"])
    assert quantized.main() == 0
    assert order[0] == "peak_memory_bytes"
    assert order.count("peak_memory_bytes") == 1 < order.count("read_bandwidth")
    schemes = json.loads((tmp_path / "summary.json").read_text())["schemes"]
    assert all(row["read_bandwidth_bytes_per_second"] > 0 for row in schemes)


def test_a_draft_of_the_same_rounding_guesses(tmp_path, folder):
    loaded(folder, shapes.read_config(str(folder)), "int4", save=tmp_path / "r4")
    flags = ["--model", folder, "--weights", "int4", "--draft", "r4", "--max-new-tokens", 6, "--device", "cpu"]
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, result.err[-3000:]
    assert "of 4 guesses kept per step" in result.out


@pytest.mark.parametrize(("rows", "columns"), [(33, 32), (32, 20)])
def test_fp8_weights_that_torchs_kernel_does_not_take_are_converted(monkeypatch, rows, columns):
    monkeypatch.delattr(torch, "_scaled_mm")  # it raises on a GPU for a dimension that 16 does not divide
    parts = quantized.Fp8.quantize(matrix(rows, columns), 32)
    x = matrix(5, columns, seed=1)
    torch.testing.assert_close(quantized.Fp8(**parts)(x), x @ quantized.Fp8.dequantize(**parts).T)


# --- slower


SAID_COMPILED = {
    "fp32": ("fp32",),
    "int8": ("int8",),
    "one token to go on from": ("fp32", "--prompt", "a", "--evaluate", "two.txt"),  # both without a past
    "several prompts, a small cache": ("int8", "--prompts", "prompts.txt", "--kv-cache", "int8"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", SAID_COMPILED)
def test_compiled_it_says_the_same(tmp_path, folder, case):
    """In fp32, where the order of a sum tips no token. One graph serves all positions."""
    (tmp_path / "two.txt").write_text("ab")
    (tmp_path / "prompts.txt").write_text("a\ndef main():\nand so on, and so on\n")
    weights, *more = SAID_COMPILED[case]
    shared = ["--model", folder, "--weights", weights, "--dtype", "fp32", "--max-new-tokens", 40, "--device", "cpu"]
    said = []
    for flags in ([], ["--compile"]):
        told = {"TORCH_LOGS": "recompiles,graph_code"}
        flags_of_run = [*shared, *more, *flags, "--json", "summary.json"]
        result = run(SCRIPT, tmp_path, *flags_of_run, warm=False, **told)
        assert result.code == 0, result.err[-3000:]
        said.append((result.summary["token_ids"], result.summary["schemes"][0]["loss"]))
        assert result.err.count("class GraphModule") == len(flags)
        assert "Recompiling" not in result.err
    (tokens, loss), (compiled_tokens, compiled_loss) = said
    assert tokens == compiled_tokens
    assert loss == compiled_loss


@pytest.mark.long
def test_each_model_of_a_process_has_a_compiled_step_of_its_own(tmp_path):
    """All types of weights in turn, then two of them in processes of their own: none takes the step of another."""
    shared = ["--model", "nano", "--compile", "--max-new-tokens", 12, "--device", "cpu", "--json", "summary.json"]

    def answers(weights: str) -> dict[str, list]:
        result = run(SCRIPT, tmp_path, *shared, "--weights", weights, warm=False)
        assert result.code == 0, result.err[-3000:]
        return {row["weights"]: row["token_ids"] for row in result.summary["schemes"]}

    together = answers("all")
    assert together.keys() >= {"fp32", "bf16", "int8", "int4"}
    for weights in ("bf16", "int4"):
        assert answers(weights) == {weights: together[weights]}


@pytest.mark.long
def test_the_loss_of_a_trained_model_by_scheme(tmp_path):
    train("04_amp/train.py", tmp_path, "--steps", 150, "--lr", 1e-2)
    done = run("06_fsdp_zero/convert_checkpoint.py", tmp_path, "run", "trained", "--to", "hf", "--model", "tiny.json")
    assert done.code == 0, done.err[-3000:]
    flags = ["--model", "trained", "--weights", "all", "--evaluate", TEXT, "--max-new-tokens", 8, "--device", "cpu"]
    result = run(SCRIPT, tmp_path, *flags, "--json", "summary.json")
    assert result.code == 0, result.err[-3000:]
    loss = {row["weights"]: row["loss"] for row in result.summary["schemes"]}
    assert loss["fp32"] < 3.5  # ln 256 = 5.5 untrained
    assert abs(loss["bf16"] - loss["fp32"]) < 0.01
    assert abs(loss["int8"] - loss["fp32"]) < 0.02
    assert abs(loss["int4"] - loss["fp32"]) < 0.2


# --- the real model

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Italy?",
    "How many days does a week have?",
    "What color is the sky?",
    "Name three fruits.",
    "What do bees make?",
    "Write a sentence about the sea.",
    "What is water made of?",
    "Who wrote Romeo and Juliet?",
    "What is two plus two?",
]


def real(tmp_path: Path, smollm2: Path, weights: str, *flags) -> dict:
    (tmp_path / "prompts").write_text("\n".join(QUESTIONS) + "\n")
    shared = ["--model", smollm2, "--weights", weights, "--prompts", "prompts", "--chat", "--max-new-tokens", 24]
    result = run(SCRIPT, tmp_path, *shared, *flags, "--device", "cpu", "--json", "summary.json", timeout=600)
    assert result.code == 0, result.err[-3000:]
    return result.summary


@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_the_real_model_answers_as_transformers_has_it(tmp_path, smollm2):
    expected = answers_of_transformers(smollm2, QUESTIONS, 24)
    exact = real(tmp_path, smollm2, "fp32")
    assert exact["token_ids"] == expected
    assert "Paris" in exact["texts"][0]
    whole = {}
    for weights in ("bf16", "int8"):
        rounded = real(tmp_path, smollm2, weights)
        whole[weights] = sum(one == other for one, other in zip(exact["texts"], rounded["texts"], strict=True))

    # one token that tips changes all after it, so also token by token: what int8 says after fp32's own words
    text = inference.Text(str(smollm2), None, shapes.read_config(str(smollm2)))
    net = loaded(smollm2, text.config, "int8", dtype=torch.bfloat16).net
    same, count = 0, 0
    for question, answer in zip(QUESTIONS, exact["token_ids"], strict=True):
        asked = text.encode(question, chat=True, max_new_tokens=24)
        logits = reporting.prompt_logits(net, [asked + answer], CPU)
        chosen = logits[len(asked) - 1 : -1].argmax(-1).tolist()
        same += sum(one == other for one, other in zip(chosen, answer, strict=True))
        count += len(answer)
    print(f"answers of {len(QUESTIONS)} that are fp32's to the letter: {whole}; int8: {same} of {count} tokens")
    assert whole["bf16"] >= 5
    assert whole["int8"] >= 3
    assert same >= 0.85 * count


@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_the_loss_of_the_real_model_by_scheme(tmp_path, smollm2):
    shared = ["--evaluate", smollm2 / "LICENSE"]
    summary = real(tmp_path, smollm2, "all", *shared)
    loss = {row["weights"]: row["loss"] for row in summary["schemes"]}
    print(loss)
    assert abs(loss["bf16"] - loss["fp32"]) < 0.03
    assert abs(loss["int8"] - loss["fp32"]) < 0.05
    assert abs(loss["int4"] - loss["fp32"]) < 0.15
