"""06_fsdp_zero/infer_70b.py by pipeline and zero3: transformers' tokens on any number of ranks, bytes while loading."""

import ctypes
from pathlib import Path

import pytest
from support.chapter import load
from support.harness import ODD, config_of, run, with_prelude
from support.real_model import answers_of_transformers
from test_06_infer_70b import SCRIPT, by_transformers, infer, while_loading, write_model

from old import shapes

slow = pytest.mark.long
pipeline = load("06_fsdp_zero/_infer_70b_pipeline.py")
PROMPTS = ["import os", "x", "while True:", "if __name__ ==", "no"]  # no number of ranks or micro-batches divides them
UNTIED = {**ODD, "num_hidden_layers": 5, "max_position_embeddings": 80}  # 5 layers: uneven stages
TIED = {**UNTIED, "vocab_size": 197, "hidden_size": 42, "head_dim": 10, "tie_word_embeddings": True}
SHAPES = {"tied": TIED, "untied": UNTIED}
NEW_TOKENS = 64


def make_reference(where: Path, name: str) -> tuple[str, list[list[int]]]:
    folder = write_model(where / "model", SHAPES[name])
    return str(folder), by_transformers(folder, PROMPTS, NEW_TOKENS)


@pytest.fixture
def reference(once):
    """reference(name): a model's folder, and what transformers' generate goes on with after PROMPTS."""
    return lambda name: once("infer-stages", make_reference, name)


def tokens(where: Path, folder: str, *flags, nproc: int | None = None, prompts=PROMPTS, **how) -> list[list[int]]:
    flags = ["--max-new-tokens", NEW_TOKENS, *flags]
    return infer(where, folder, *flags, nproc=nproc, prompts=prompts, **how).summary["token_ids"]


def test_the_reference_is_no_repetition(reference):
    for name in SHAPES:
        _, expected = reference(name)
        assert [len(ids) for ids in expected] == [NEW_TOKENS] * len(PROMPTS)
        assert len({tuple(ids[:8]) for ids in expected}) == len(PROMPTS)
        assert len({token for ids in expected for token in ids}) > 30


# --- the same tokens as transformers


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches"),
    [
        ("tied", 3, 2),
        ("untied", 2, 0),
        pytest.param("untied", 1, 3, marks=slow),
        pytest.param("tied", 2, 1, marks=slow),
        pytest.param("tied", 4, 5, marks=slow),
        pytest.param("untied", 3, 1, marks=slow),
        pytest.param("untied", 4, 9, marks=slow),  # more than there are prompts
    ],
)
def test_a_pipeline_gives_the_tokens_of_transformers(tmp_path, reference, name, ranks, micro_batches):
    folder, expected = reference(name)
    found = tokens(tmp_path, folder, "--strategy", "pipeline", "--micro-batches", micro_batches, nproc=ranks)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "ranks", "offload"),
    [
        ("tied", 2, "cpu"),
        pytest.param("untied", None, "none", marks=slow),
        pytest.param("untied", 2, "none", marks=slow),
        pytest.param("untied", 3, "cpu", marks=slow),
        pytest.param("tied", 4, "none", marks=slow),
    ],
)
def test_zero3_gives_the_tokens_of_transformers(tmp_path, reference, name, ranks, offload):
    pytest.importorskip("deepspeed")
    folder, expected = reference(name)
    assert tokens(tmp_path, folder, "--strategy", "zero3", "--offload", offload, nproc=ranks) == expected


@slow
@pytest.mark.parametrize("strategy", ["pipeline", "zero3"])
def test_started_cold_with_fewer_prompts_than_ranks(tmp_path, reference, strategy):
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    folder, expected = reference("untied")
    assert tokens(tmp_path, folder, "--strategy", strategy, nproc=3, prompts=PROMPTS[1:2], warm=False) == expected[1:2]


# a folder without tokenizer has no stop tokens: as if one had these
STOPS = """
from old import inference
inference.Text.stop = frozenset({stops})
"""


def cut_at(ids: list[int], stops: set[int]) -> list[int]:
    return ids[: next((i for i, token in enumerate(ids) if token in stops), len(ids))]


@pytest.mark.parametrize("strategy", [pytest.param("pipeline"), pytest.param("zero3", marks=slow)])
def test_each_prompt_ends_at_its_own_stop_token(tmp_path, reference, strategy):
    """So micro-batches end at different steps, and the ranks must agree on what is still to be computed."""
    folder, expected = reference("untied")
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    stops = {expected[1][0], expected[3][20], expected[4][10]}  # one prompt ends before it begins
    ends = [cut_at(ids, stops) for ids in expected]
    assert len({len(ids) for ids in ends}) >= 3
    assert max(map(len, ends[:3])) > max(map(len, ends[3:]))  # the second micro-batch ends before the first
    script = with_prelude(SCRIPT, tmp_path, STOPS.format(stops=stops))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    flags = ["--model", folder, "--prompts", "prompts.txt", "--max-new-tokens", NEW_TOKENS, "--strategy", strategy]
    flags += ["--device", "cpu", "--dtype", "fp32", "--json", "summary.json"]
    if strategy == "pipeline":
        flags += ["--micro-batches", 2]
    result = run(script, tmp_path, *flags, nproc=2)
    assert result.code == 0, result.err[-3000:]
    assert result.summary["token_ids"] == ends


# --- sampling


SAMPLED = ["--temperature", 1.1, "--top-k", 40, "--top-p", 0.95]


@pytest.fixture
def sampled_alone(once, reference) -> list[list[int]]:
    """What one process samples, which holds the whole model."""
    folder, _ = reference("tied")
    return once("infer-stages", lambda where: tokens(where / "alone", folder, *SAMPLED, "--seed", 11))


@pytest.mark.parametrize(
    ("strategy", "ranks", "micro_batches"),
    [
        ("pipeline", 2, 3),
        pytest.param("pipeline", 3, 1, marks=slow),
        pytest.param("zero3", 2, 0, marks=slow),
        pytest.param("zero3", 3, 0, marks=slow),
    ],
)
def test_parts_of_a_batch_are_sampled_as_one_process_samples_the_whole(
    tmp_path, reference, sampled_alone, strategy, ranks, micro_batches
):
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    folder, greedy = reference("tied")
    flags = [*SAMPLED, "--strategy", strategy, "--micro-batches", micro_batches]
    assert tokens(tmp_path / "11", folder, *flags, "--seed", 11, nproc=ranks) == sampled_alone
    assert sampled_alone != greedy
    if strategy == "pipeline":
        assert tokens(tmp_path / "12", folder, *flags, "--seed", 12, nproc=ranks) != sampled_alone


# --- what a rank holds


@pytest.mark.parametrize(("layers", "stages"), [(5, 1), (5, 3), (80, 8), (81, 16), (7, 7)])
def test_stages_share_the_layers_evenly_and_in_order(layers, stages):
    parts = [pipeline.layers_of(rank, stages, layers) for rank in range(stages)]
    assert [layer for part in parts for layer in part] == [*range(layers)]
    counts = [len(part) for part in parts]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def test_a_stage_has_no_weight_of_another():
    """Of an untied model each is on one stage; of a tied one the first and the last have the embedding."""
    for shape, twice in ((UNTIED, 0), (TIED, 1)):
        stages = [pipeline.build_stage(config_of(shape), rank, 3) for rank in range(3)]
        names = [name for net in stages for name, _ in net.named_parameters()]
        assert len(names) - len(set(names)) == twice
        assert (
            sum(p.numel() for net in stages for p in net.parameters())
            == shapes.parameter_count(config_of(shape)) + twice * shape["vocab_size"] * shape["hidden_size"]
        )
        assert all(parameter.is_meta for net in stages for parameter in net.parameters())


# bytes that malloc has given out: files that are mapped do not count, nor what was freed and is kept for later
WATCHED = """
import ctypes, json, threading
from pathlib import Path
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed  # not counted
import _infer_70b_pipeline, _infer_70b_zero3
class Mallinfo(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena ordblks smblks hblks hblkhd us fs uordblks fordblks keep".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
def given_out():
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd
def watched(strategy):
    load, fill, seen, filled = strategy.load, strategy.fill, [], threading.Event()
    def watch():
        while not filled.is_set():
            seen.append(given_out())
    def load_watched(*args):
        seen.append(given_out())
        threading.Thread(target=watch).start()
        return load(*args)
    def fill_watched(*args):
        fill(*args)
        filled.set()
        Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps([max(seen) - seen[0], len(seen)]))
    strategy.load, strategy.fill = load_watched, fill_watched
watched(_infer_70b_pipeline)
watched(_infer_70b_zero3)
"""


@slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 counts the bytes")
@pytest.mark.parametrize("strategy", ["pipeline", "zero3"])
@pytest.mark.parametrize("source", ["folder", "random"])
def test_loading_never_holds_a_layer_more_than_the_share(tmp_path, strategy, source):
    pytest.importorskip("deepspeed")
    shape = {**ODD, "hidden_size": 600, "intermediate_size": 2500, "num_hidden_layers": 14, "head_dim": 100}
    config = config_of(shape)
    whole = 4 * shapes.parameter_count(config)
    ends = 4 * 2 * config.vocab_size * config.hidden_size
    layer = (whole - ends) / config.num_hidden_layers
    for held, looks in while_loading(tmp_path, shape, source, WATCHED, "--strategy", strategy):
        assert looks > 20
        assert 0.45 * whole < held < whole / 2 + layer, (held, whole, layer)


# --- files on a disk


def async_io_is_compiled() -> bool:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("async_io", verbose=False), "async_io.so").exists()


@slow
def test_weights_in_files_give_the_same_tokens(tmp_path):
    pytest.importorskip("deepspeed")
    if not async_io_is_compiled():
        pytest.skip("DeepSpeed's async_io is not compiled here: one run with --nvme compiles it, which takes minutes")
    shape = {**UNTIED, "hidden_size": 768, "intermediate_size": 1600, "head_dim": 128}  # less than a MB stays in memory
    folder = write_model(tmp_path / "model", shape)
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = ["--strategy", "zero3", "--max-new-tokens", 8]
    expected = [ids[:8] for ids in by_transformers(folder, PROMPTS, 8)]
    assert tokens(tmp_path / "files", folder, *flags, "--offload", "nvme", "--nvme", disk, nproc=2) == expected
    assert list(disk.iterdir()) == []


# --- bad input


def test_more_stages_than_layers_are_told_by_rank_0(tmp_path, reference):
    small = write_model(tmp_path / "model", {**ODD, "num_hidden_layers": 2})
    result = run(SCRIPT, tmp_path, "--model", small, "--strategy", "pipeline", "--device", "cpu", nproc=3)
    told = [line for line in result.err.splitlines() if "error:" in line]
    assert result.code != 0
    assert len(told) == 1
    assert "3 processes for the 2 layers" in told[0]
    assert told[0].endswith("start at most 2")


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (["--offload", "nvme"], "--offload nvme: to which folder? Add --nvme FOLDER"),
        (["--nvme", "."], "--nvme .: nothing would go there; add --offload nvme"),
        (["--offload", "nvme", "--nvme", "nowhere"], "--nvme nowhere: no such folder"),
        (["--offload", "gpu"], "--offload"),
    ],
)
def test_wrong_flags_of_zero3_take_one_line(tmp_path, bad, told):
    pytest.importorskip("deepspeed")
    result = run(SCRIPT, tmp_path, "--strategy", "zero3", "--device", "cpu", *bad)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert told in result.err


# --- the real model

QUESTIONS = [
    "What is the capital of France?",
    "What do bees make?",
    "Name three colours.",
    "How many legs has a spider?",
]


@pytest.fixture(scope="module")
def answers(smollm2) -> list[list[int]]:
    return answers_of_transformers(smollm2, QUESTIONS, 16)


@pytest.mark.real_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", ["pipeline", "zero3"])
def test_the_real_model_answers_as_with_transformers(tmp_path, smollm2, answers, strategy):
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    flags = ["--strategy", strategy, "--chat", "--max-new-tokens", 16]
    result = infer(tmp_path, smollm2, *flags, nproc=2, prompts=QUESTIONS)
    assert result.summary["token_ids"] == answers
    assert "Paris" in result.summary["texts"][0]
