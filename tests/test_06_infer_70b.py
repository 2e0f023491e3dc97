"""06_fsdp_zero/infer_70b.py by device-map and tensor-parallel: transformers' tokens, bytes per rank, bad input."""

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.chapter import load
from support.harness import (
    ODD,
    ROOT,
    clean_env,
    command,
    config_of,
    descendants,
    finish,
    holds,
    needs_compiler,
    run,
    signal_another_thread,
    train,
    with_prelude,
)
from support.real_model import answers_of_transformers

from old import model, shapes
from old.exits import UserError

SCRIPT = "06_fsdp_zero/infer_70b.py"
weights = load("06_fsdp_zero/_infer_70b_weights.py")
placement = load("06_fsdp_zero/_infer_70b_placement.py")
flags_of = load("06_fsdp_zero/_infer_70b_flags.py")
PROMPTS = ["def main():", "a", "for i in range(3): print(i)"]  # of unequal lengths
EVEN = {  # for 2 and 4 ranks, which do not divide its vocabulary
    **ODD,
    "vocab_size": 203,
    "hidden_size": 56,
    "intermediate_size": 44,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
}
THREE = {**ODD, "intermediate_size": 51, "max_position_embeddings": 96}  # for 3 ranks; not tied
SHAPES = {"even": EVEN, "three": THREE}


def write_model(folder: Path, shape: dict) -> Path:
    """A folder with weights in two files and an index, as large models have. They are large enough for attention to
    matter: a model with small ones would repeat a token wherever it stands."""
    folder.mkdir(parents=True)
    config = config_of(shape)
    net = model.build("nano", config, seed=5)
    generator = torch.Generator().manual_seed(6)
    stored = {}
    for name, weight in net.named_parameters():
        scale = 8 if weight.ndim == 2 else 1
        stored[name] = weight.detach() * scale + 0.05 * torch.randn(weight.shape, generator=generator)
    names = list(stored)
    parts = {"a-00001.safetensors": names[::2], "a-00002.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: stored[name] for name in chosen}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, chosen in parts.items() for name in chosen}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(shapes.config_json(config)))
    return folder


def by_transformers(folder: Path, prompts: list[str], new_tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt.encode())])
        answer = net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
        found.append(answer[0, ids.shape[1] :].tolist())
    return found


def make_reference(where: Path, name: str) -> tuple[str, list[list[int]]]:
    folder = write_model(where / "model", SHAPES[name])
    return str(folder), by_transformers(folder, PROMPTS, 64)


@pytest.fixture
def even(once) -> tuple[str, list[list[int]]]:
    """A model's folder, and what transformers' generate goes on with after PROMPTS."""
    return once("infer-70b", make_reference, "even")


@pytest.fixture
def three(once) -> tuple[str, list[list[int]]]:
    return once("infer-70b", make_reference, "three")


def infer(where: Path, folder, *flags, nproc=None, code=0, warm=True, prompts=PROMPTS, **env):
    where.mkdir(parents=True, exist_ok=True)
    (where / "prompts.txt").write_text("\n".join(prompts) + "\n")
    shared = ["--model", folder, "--device", "cpu", "--dtype", "fp32", "--json", "summary.json"]
    flags = [*shared, "--prompts", "prompts.txt", *flags]
    result = run(SCRIPT, where, *flags, nproc=nproc, warm=warm, **env)
    assert result.code == code, f"{result.out[-2000:]}\n{result.err[-3000:]}"
    return result


def gib_for(shape: dict, share: float, new_tokens: int = 64) -> float:
    """The --memory that has room for this share of the weights, and for the cache."""
    config = config_of(shape)
    tokens = len(PROMPTS) * (max(map(len, PROMPTS)) + new_tokens)
    cache = tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return 4 * (share * shapes.parameter_count(config) + cache) / 0.95 / 2**30


# --- the same tokens as transformers


def test_the_reference_is_no_repetition(even, three):
    for _, expected in (even, three):
        assert [len(ids) for ids in expected] == [64, 64, 64]
        assert len({token for ids in expected for token in ids}) > 30
        assert len({tuple(ids[:8]) for ids in expected}) == 3


def test_one_process_gives_the_tokens_of_transformers(tmp_path, even):
    folder, expected = even
    result = infer(tmp_path, folder, "--max-new-tokens", 64, warm=False)
    assert result.summary["token_ids"] == expected
    assert "checked: prompt and answer read at once give the last token again, for 3 of 3 prompts" in result.out
    held = 4 * shapes.parameter_count(config_of(EVEN))
    assert f"checked: {held:,} bytes of weights on rank 0, as in the table" in result.out


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("three", 3),
        pytest.param("even", 2, marks=pytest.mark.long),
        pytest.param("even", 4, marks=pytest.mark.long),
    ],
)
def test_tensor_parallel_gives_the_tokens_of_transformers(tmp_path, request, name, ranks):
    folder, expected = request.getfixturevalue(name)
    result = infer(tmp_path, folder, "--max-new-tokens", 64, nproc=ranks)
    assert result.summary["token_ids"] == expected
    assert result.summary["world_size"] == ranks
    assert f"checked: all {ranks} ranks have the same tokens" in result.out
    assert f"{ranks} ranks hold each number of the matrices once" in result.out


@pytest.mark.parametrize("name", ["even", pytest.param("three", marks=pytest.mark.long)])
@pytest.mark.parametrize("memory", ["all of it", "half of it"])
def test_device_map_gives_the_tokens_of_transformers(tmp_path, request, name, memory):
    folder, expected = request.getfixturevalue(name)
    flags = []
    if memory == "half of it":
        flags = ["--memory", gib_for(SHAPES[name], 0.75)]
    result = infer(tmp_path, folder, "--strategy", "device-map", "--max-new-tokens", 64, *flags, TMPDIR=str(tmp_path))
    assert result.summary["token_ids"] == expected
    devices = [place["device"] for place in result.summary["places"]]
    assert devices == (["cpu"] if memory == "all of it" else ["cpu", "disk"])
    assert not [*tmp_path.glob("offload-*")]


def test_random_weights_are_the_same_for_every_strategy(tmp_path):
    """Also those that device-map has written to a disk of its own."""
    shape = {**EVEN, "tie_word_embeddings": False}  # tied and random, it would repeat its last token
    (tmp_path / "config.json").write_text(json.dumps(shape))
    flags = ["--random-weights", "--seed", 3, "--max-new-tokens", 8]
    one = infer(tmp_path / "one", tmp_path, *flags)
    spread = ["--strategy", "device-map", "--memory", gib_for(shape, 0.75, 8)]
    other = infer(tmp_path / "other", tmp_path, *flags, *spread, TMPDIR=str(tmp_path))
    assert other.summary["token_ids"] == one.summary["token_ids"]
    assert [place["device"] for place in other.summary["places"]] == ["cpu", "disk"]
    different = infer(tmp_path / "different", tmp_path, "--random-weights", "--seed", 4, "--max-new-tokens", 8)
    assert different.summary["token_ids"] != one.summary["token_ids"]


@pytest.mark.parametrize("memory", [0.003, 0.012])
def test_a_tied_head_is_read_from_the_disk(tmp_path, memory):
    """Also where all layers lie on it. The cache is the CPU's all the same."""
    flags = ["--max-new-tokens", 3]
    one = infer(tmp_path / "one", "nano", *flags)
    spread = ["--strategy", "device-map", "--memory", memory]
    other = infer(tmp_path / "other", "nano", *flags, *spread, TMPDIR=str(tmp_path))
    assert other.summary["token_ids"] == one.summary["token_ids"]
    places = other.summary["places"]
    assert [place["device"] for place in places] == ["cpu", "disk"]
    whole = one.summary["places"][0]
    assert [place["cache_bytes"] for place in places] == [whole["cache_bytes"], 0]
    assert sum(place["weight_bytes"] for place in places) == whole["weight_bytes"]
    assert (places[0]["weight_bytes"] == 0) == (memory == 0.003)


@pytest.mark.parametrize("shape", [(3, 5), (40, 7), (1500, 1021)])
def test_any_part_of_a_random_matrix_is_that_part_of_the_whole(shape):
    rows, columns = shape
    matrix = weights.RandomMatrix("w", shape, seed=1)
    whole = matrix[slice(0, rows), slice(0, columns)]
    part = (slice(rows // 3, rows), slice(columns // 2, columns - 1))
    assert torch.equal(matrix[part], whole[part])
    assert not torch.equal(weights.RandomMatrix("v", shape, seed=1)[part], whole[part])
    assert len({tuple(row) for row in whole[:, :4].tolist()}) == rows  # no two rows are alike
    assert whole.std() == pytest.approx(0.02, rel=0.3)


# --- sampling


def sampled(where: Path, folder, seed: int, **how) -> list[list[int]]:
    flags = ["--temperature", 0.9, "--top-k", 30, "--top-p", 0.9, "--max-new-tokens", 24, "--seed", seed]
    return infer(where, folder, *flags, **how).summary["token_ids"]


def test_the_seed_decides_what_is_sampled(tmp_path, even):
    folder, greedy = even
    first = sampled(tmp_path / "1", folder, 7)
    assert sampled(tmp_path / "2", folder, 7) == first
    assert sampled(tmp_path / "3", folder, 8) != first
    assert first != [ids[:24] for ids in greedy]


@pytest.mark.long
def test_two_ranks_sample_what_one_does(tmp_path, even):
    folder, _ = even
    assert sampled(tmp_path / "2", folder, 7, nproc=2) == sampled(tmp_path / "1", folder, 7)


def test_streaming_shows_the_first_answer_and_the_batch_shows_all(tmp_path, even):
    folder, expected = even
    result = infer(tmp_path, folder, "--max-new-tokens", 5)
    as_text = [bytes(ids[:5]).decode(errors="replace") for ids in expected]
    assert result.summary["texts"] == as_text
    assert result.out.count(as_text[0].rstrip("\ufffd")) >= 2
    for number, answer in enumerate(as_text, start=1):
        assert f"{number}: {answer}" in result.out


# --- what each rank holds


def while_loading(where: Path, shape: dict, source: str, prelude: str, *flags: str) -> list[tuple[int, int]]:
    """The most bytes that each of two ranks held while it loaded a model of this shape, from a folder or random, and
    how often the prelude has looked."""
    folder = where / "model"
    if source == "folder":
        write_model(folder, shape)
    else:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape))
        flags = (*flags, "--random-weights")
    script = with_prelude(SCRIPT, where / "run", prelude)
    shared = ["--model", folder, "--device", "cpu", "--dtype", "fp32", "--prompt", "ab", "--max-new-tokens", 2]
    result = run(script, where / "run", *shared, *flags, nproc=2)
    assert result.code == 0, result.err[-3000:]
    return [json.loads((where / f"run/rank{rank}.json").read_text()) for rank in range(2)]


# from the first line of the script to the last weight
WATCHED = """
import json, threading
from pathlib import Path
import _infer_70b_weights as weights
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
def watch():
    while not loaded.wait(0.001):
        seen.append(anonymous())
def watched(net, args, fill=weights.fill):
    fill(net, args)
    loaded.set()
    watcher.join()
    Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps([max(seen) - seen[0], len(seen)]))
weights.fill, seen, loaded = watched, [anonymous()], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
"""


@pytest.mark.long
@pytest.mark.parametrize("source", ["folder", "random"])
def test_loading_never_holds_a_layer_more_than_the_share(tmp_path, source):
    shape = {**EVEN, "hidden_size": 1024, "intermediate_size": 4000, "num_hidden_layers": 6}
    shape["head_dim"] = 128
    config = config_of(shape)
    whole = 4 * shapes.parameter_count(config)
    embedding = 4 * config.vocab_size * config.hidden_size
    layer = (whole - embedding) / config.num_hidden_layers
    for held, looks in while_loading(tmp_path, shape, source, WATCHED):
        assert looks > 50
        assert 0.45 * whole < held < whole / 2 + layer, (held, whole, layer)


def published() -> list:
    """The rows of 70B weights in 16 bits, by ranks."""
    cases = load("benchmarks/_estimator_rows.py").read_cases(ROOT / "tests/data/estimator_cases.csv")
    return [case for case in cases if case.id.startswith("W-") and "70b-tp" in case.id]


@pytest.mark.parametrize("case", published(), ids=lambda case: case.id)
def test_a_dry_run_has_the_published_bytes(tmp_path, case):
    ranks = case.inputs["tensor_parallel"]
    size = {"llama2-70b": "llama2-70b", "llama3-70b": "llama-70b"}[case.inputs["model"]]
    result = run(SCRIPT, tmp_path, "--model", size, "--dry-run", "--world-size", ranks, "--json", "summary.json")
    assert result.code == 0, result.err[-3000:]
    key = "gpt_fast_bytes" if case.inputs["count_embedding"] else "gpt_fast_bytes_per_step"
    assert case.allows(result.summary[key] / 1e9)
    # ours divides embedding and head as well: that much less
    c = {"llama2-70b": 32_000, "llama-70b": 128_256}[size]
    ends_whole = (2 if case.inputs["count_embedding"] else 1) * 2 * c * 8192
    ours = result.summary["rank_bytes"] - (0 if case.inputs["count_embedding"] else 2 * c * 8192 / ranks)
    assert case.allows((ours + ends_whole * (1 - 1 / ranks)) / 1e9)
    assert (
        f"checked: rank 0 of the model, cut as it will be, holds {result.summary['rank_bytes']:,} bytes" in result.out
    )


def test_the_published_rows_are_there():
    assert sorted(case.inputs["tensor_parallel"] for case in published()) == [2, 4, 8, 8]


@pytest.mark.parametrize("strategy", ["pipeline", "zero3", "device-map"])
def test_a_dry_run_of_the_other_strategies(tmp_path, strategy):
    flags = ["--model", "llama-70b", "--dry-run", "--world-size", 4, "--memory", 80, "--json", "summary.json"]
    result = run(SCRIPT, tmp_path, *flags, "--strategy", strategy)
    assert result.code == 0, result.err[-3000:]
    places = result.summary["places"]
    assert sum(place["weight_bytes"] for place in places) >= 2 * shapes.parameter_count(shapes.SIZES["llama-70b"])
    assert all(place["weight_bytes"] + place["cache_bytes"] < 80 * 2**30 for place in places)
    assert result.err == ""
    if strategy == "pipeline":
        assert sum(place["weight_bytes"] for place in places) == 2 * shapes.parameter_count(shapes.SIZES["llama-70b"])


def test_device_map_counts_the_cache_with_its_layers(tmp_path):
    """Layers of the CPU have theirs on the first GPU."""
    flags = ["--model", "llama-70b", "--dry-run", "--world-size", 2, "--memory", 24, "--strategy", "device-map"]
    prompt = ["--prompt", "a" * 1000, "--max-new-tokens", 1000]
    result = run(SCRIPT, tmp_path, *flags, *prompt, "--json", "summary.json")
    assert result.code == 0, result.err[-3000:]
    first, second, cpu = result.summary["places"]
    a_layer = 2 * 2000 * 8 * 128 * 2
    block = 2 * (shapes.parameter_count(shapes.SIZES["llama-70b"]) - 8192 * (2 * 128_256 + 1)) // 80
    layers = second["weight_bytes"] // block
    assert layers > 10
    assert (first["cache_bytes"], second["cache_bytes"]) == ((80 - layers) * a_layer, layers * a_layer)
    assert (cpu["device"], cpu["cache_bytes"]) == ("cpu", 0)


# --- bad input


def without_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def without_a_shard(folder: Path) -> None:
    (folder / "a-00002.safetensors").unlink()


def another_shape(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**EVEN, "intermediate_size": 48}))


def truncated(folder: Path) -> None:
    file = folder / "a-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def another_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (without_weights, "no weights"),
        (without_a_shard, "names a-00002.safetensors, which is not there"),
        (another_shape, "has shape"),
        (truncated, "a-00001.safetensors cannot be read"),
        (another_index, "index.json"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, spoil, told):
    folder = write_model(tmp_path / "model", EVEN)
    assert len(weights.check_folder(folder, config_of(EVEN))) == 2 + 9 * 3
    spoil(folder)
    config = shapes.read_config(str(folder)) if (folder / "config.json").is_file() else config_of(EVEN)
    if spoil is without_weights:
        (folder / "config.json").write_text(json.dumps(EVEN))
    with pytest.raises(UserError, match=told):
        weights.check_folder(folder, config)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (["--prompt", ""], "an empty prompt"),
        (["--prompt", "x" * 90], "at most 6 new tokens fit"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt"),
        (["--prompts", "/dev/null"], "no line with text"),
        (["--prompt", "a", "--prompts", "/dev/null"], "give one of them"),
        (["--chat"], "no chat template"),
        (["--strategy", "magic"], "--strategy"),
        (["--modle", "nano"], "--modle"),
        (["--model", "nowhere"], "--model nowhere"),
        (["--world-size", "2"], "--dry-run and --world-size N go together"),
        (["--memory", "0.00001"], "0.0 MiB that it has free"),
        (["--dry-run", "--world-size", "3"], "3 ranks do not divide 8 attention heads"),
        (["--dry-run", "--world-size", "5", "--strategy", "device-map"], "needs --memory"),
        (["--compile", "--strategy", "pipeline"], "--compile is for"),
        (["--memory", "inf"], "--memory: 'inf' is not a number above 0"),
        (["--micro-batches", "2"], "--micro-batches is for --strategy pipeline"),
        (["--offload", "cpu"], "--offload cpu is for --strategy zero3"),
        (["--top-k", "3"], "at --temperature 0 nothing is drawn"),
    ],
)
def test_bad_input_takes_one_line(tmp_path, even, bad, told):
    folder, _ = even
    result = run(SCRIPT, tmp_path, "--model", folder, "--device", "cpu", *bad)
    assert result.code == 2
    assert told in result.err
    assert len(result.err.splitlines()) == 1


def test_a_folder_without_weights_is_told_in_one_line(tmp_path):
    folder = write_model(tmp_path / "model", EVEN)
    without_weights(folder)
    result = run(SCRIPT, tmp_path, "--model", folder, "--device", "cpu")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "no weights" in result.err


def test_what_cannot_fit_is_told_with_what_would(tmp_path):
    result = run(SCRIPT, tmp_path, "--model", "llama-70b", "--device", "cpu", "--dtype", "bf16", "--memory", 20)
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "112.43 GiB more than" in result.err
    assert "tensor-parallel on 8 of them" in result.err
    roomy = run(SCRIPT, tmp_path, "--model", "llama-70b", "--device", "cpu", "--dtype", "bf16", "--memory", 50)
    assert "tensor-parallel on 4 of them, or with 09_inference/quantized.py --weights int4" in roomy.err


def test_what_would_fit_is_told_of_devices_not_of_the_host(monkeypatch):
    config = shapes.SIZES["llama-70b"]
    flags = ["--model", "llama-70b", "--strategy", "zero3", "--offload", "cpu", "--memory", "80", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [SCRIPT, *flags])
    monkeypatch.setattr(placement.hardware, "available_memory", lambda: 20 * 2**30)
    args = flags_of.parse_args("")
    args.dtype, args.batch, args.tokens_per_prompt = "bf16", 1, 42
    places = placement.places(args, config, 1, [80 * 2**30])
    with pytest.raises(UserError, match="cpu, rank 0 would hold") as refused:
        placement.refuse_what_does_not_fit(args, config, places)
    assert "on devices with 80.00 GiB free: it fits with --strategy tensor-parallel on 2 of them" in str(refused.value)


def test_a_rounded_folder_is_for_another_script(tmp_path):
    folder = write_model(tmp_path / "model", EVEN)
    save_file({"lm_head.codes": torch.zeros(2)}, folder / "a-00002.safetensors")
    with pytest.raises(UserError, match="its weights are rounded: 07_memory_tricks/quantized_inference"):
        weights.check_folder(folder, config_of(EVEN))


def test_heads_that_the_ranks_do_not_divide_are_told_by_rank_0(tmp_path, even):
    folder, _ = even
    result = run(SCRIPT, tmp_path, "--model", folder, "--device", "cpu", nproc=3)
    told = [line for line in result.err.splitlines() if "error:" in line]
    assert result.code != 0
    assert len(told) == 1
    assert "3 ranks do not divide 8 attention heads, 4 key-value heads, 44 columns" in told[0]


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, even):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"word{i}": i for i in range(EVEN["vocab_size"] + 1)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / "tokenizer")
    folder, _ = even
    result = run(SCRIPT, tmp_path, "--model", folder, "--tokenizer", "tokenizer", "--prompt", "word1")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "has 204 tokens, the model 203" in result.err


# --- in a terminal


def in_a_terminal(where: Path, folder: str, nproc: int | None, *more: str, **env) -> tuple[subprocess.Popen, int]:
    """The script with a terminal for stdin, and the other end of that."""
    ours, theirs = pty.openpty()
    flags = ["--model", folder, "--device", "cpu", "--dtype", "fp32", "--max-new-tokens", 4, *more]
    environment = clean_env(HARNESS_MARKER=str(where), PYTHONUNBUFFERED="1", **env)
    with open(where / "stdout", "w") as out, open(where / "stderr", "w") as err:
        process = subprocess.Popen(
            command(SCRIPT, *flags, nproc=nproc), cwd=where, env=environment, stdin=theirs, stdout=out, stderr=err
        )
    os.close(theirs)
    process.marker = str(where)
    return process, ours


@pytest.mark.long
@pytest.mark.parametrize("ranks", [None, 2])
def test_it_answers_line_by_line_and_ends_all_ranks_at_an_interrupt(tmp_path, even, ranks):
    folder, expected = even
    process, keyboard = in_a_terminal(tmp_path, folder, ranks)
    out = tmp_path / "stdout"
    try:
        assert holds(process, lambda: "> " in out.read_text()), (tmp_path / "stderr").read_text()
        os.write(keyboard, f"{'x' * 95}\n{PROMPTS[0]}\n".encode())
        assert holds(process, lambda: "(4 tokens" in out.read_text()), (tmp_path / "stderr").read_text()
        assert holds(process, lambda: out.read_text().count("> ") == 3)
        assert len(descendants(process)) >= (ranks or 1)
        process.send_signal(signal.SIGINT)
    finally:
        result = finish(process, tmp_path)  # fails if a rank is left
        os.close(keyboard)
    assert result.code != 0
    assert "longer than the model's context" in result.out
    assert bytes(expected[0][:4]).decode(errors="replace").rstrip("\ufffd") in result.out


@pytest.mark.long
def test_the_end_of_input_ends_all_ranks(tmp_path, even):
    process, keyboard = in_a_terminal(tmp_path, even[0], 2)
    try:
        assert holds(process, lambda: "> " in (tmp_path / "stdout").read_text())
        os.write(keyboard, b"\x04")  # Ctrl-D
    finally:
        result = finish(process, tmp_path)
        os.close(keyboard)
    assert result.code == 0, result.err[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_what_was_written_to_the_disk(tmp_path, even, number):
    spread = ("--strategy", "device-map", "--memory", gib_for(EVEN, 0.75))
    process, keyboard = in_a_terminal(tmp_path, even[0], None, *spread, TMPDIR=str(tmp_path))
    try:
        assert holds(process, lambda: "> " in (tmp_path / "stdout").read_text())
        assert [*tmp_path.glob("offload-*")]
        process.send_signal(number)
    finally:
        result = finish(process, tmp_path)
        os.close(keyboard)
    assert result.code != 0
    assert not [*tmp_path.glob("offload-*")]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_another_thread_takes_ends_the_wait_for_a_line(tmp_path, even, number):
    process, keyboard = in_a_terminal(tmp_path, even[0], None)
    try:
        assert holds(process, lambda: "> " in (tmp_path / "stdout").read_text())
        signal_another_thread(process, number)
    finally:
        result = finish(process, tmp_path)
        os.close(keyboard)
    assert result.code != 0


# --- torch.compile, and the real model


@needs_compiler
@pytest.mark.long
def test_the_compiled_decode_step_gives_the_same_tokens(tmp_path, even):
    folder, expected = even
    result = infer(tmp_path, folder, "--max-new-tokens", 64, "--compile", nproc=2, warm=False)
    assert result.summary["token_ids"] == expected


QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three colours.",
    "What is 2 + 2?",
    "Write one sentence about the sea.",
    "Who wrote Hamlet?",
    "How many days has a week?",
    "What do bees make?",
    "Say hello.",
    "What is an atom?",
]


@pytest.fixture(scope="module")
def answers(smollm2) -> list[list[int]]:
    return answers_of_transformers(smollm2, QUESTIONS, 24)


@pytest.mark.real_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("device-map", None), ("tensor-parallel", None), ("tensor-parallel", 3)]
)
def test_the_real_model_answers_as_transformers_lets_it(tmp_path, smollm2, answers, strategy, ranks):
    flags = ["--strategy", strategy, "--chat", "--max-new-tokens", 24]
    result = infer(tmp_path, smollm2, *flags, nproc=ranks, prompts=QUESTIONS)
    assert result.summary["token_ids"] == answers
    assert "Paris" in result.summary["texts"][0]


@pytest.mark.real_model
def test_two_ranks_cannot_share_the_real_models_heads(tmp_path, smollm2):
    result = run(SCRIPT, tmp_path, "--model", smollm2, "--prompt", "Hello", "--dry-run", "--world-size", 2)
    assert result.code == 2
    assert "2 ranks do not divide 9 attention heads, 3 key-value heads: start 1 or 3" in result.err


@pytest.mark.long
def test_a_model_that_was_trained_here_goes_on_with_text(tmp_path):
    train("05_ddp/train.py", tmp_path)
    converted = run("06_fsdp_zero/convert_checkpoint.py", tmp_path, "run", "converted", "--to", "hf")
    assert converted.code == 0, converted.err[-2000:]
    folder = tmp_path / "converted"
    result = infer(tmp_path / "answer", folder, "--max-new-tokens", 64)
    assert result.summary["token_ids"] == by_transformers(folder, PROMPTS, 64)
