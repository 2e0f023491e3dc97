"""Which files of a model's folder are read, what is refused, and heads that are tied wrongly."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_folder
from support.harness import (
    BASELINE,
    ROOT,
    TEXT,
    TINY,
    assert_refused,
    config_of,
    in_full,
    run,
)

FINETUNE = "06_fsdp_zero/finetune.py"
FSDP = "06_fsdp_zero/train_fsdp.py"
ZERO = "06_fsdp_zero/train_zero.py"
CONVERT = "06_fsdp_zero/convert_checkpoint.py"
THREE_D = "08_model_parallel/train_3d.py"
ESTIMATE = "07_memory_tricks/estimate.py"
QUANTIZED = "09_inference/quantized.py"
OFFLOADED = "09_inference/offloaded.py"
INFER = "09_inference/infer_70b.py"
SPECULATIVE = "09_inference/speculative.py"

CONFIG = config_of(TINY)
TIED = config_of({**TINY, "tie_word_embeddings": True})
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"

TRAINING = ["--device", "cpu", "--dtype", "fp32", "--seq-len", 32, "--data", TEXT]
TRAINING += ["--global-batch-size", 6, "--steps", 1, "--keep", 0, "--json", "summary.json"]
ANSWERING = ["--device", "cpu", "--dtype", "fp32", "--max-new-tokens", 4, "--json", "summary.json"]


def train_one_step(folder: Path, model: Path, script: str = BASELINE, *flags, nproc=None) -> dict:
    """Return the summary of one training step from the weights of a folder."""
    result = run(script, folder, "--model", model, *TRAINING, *flags, nproc=nproc)
    assert result.code == 0, result
    return result.summary


def answer(folder: Path, model: Path, script: str = INFER, *flags, nproc=None) -> dict:
    """Return the summary of answering one prompt with the weights of a folder."""
    result = run(script, folder, "--model", model, *ANSWERING, *flags, nproc=nproc)
    assert result.code == 0, result
    return result.summary


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with the weights in model.safetensors. Their seed is 1."""
    write_folder(tmp_path / "model", CONFIG, seed=1, scale=4)
    return tmp_path / "model"


@pytest.fixture(scope="module")
def alone(once) -> tuple[dict, dict]:
    """Return the summaries of one training step and of an answer with the weights of `folder`."""

    def train_and_answer(folder: Path) -> tuple[dict, dict]:
        model = folder / "model"
        write_folder(model, CONFIG, seed=1, scale=4)
        return train_one_step(folder / "train", model), answer(folder / "answer", model)

    return once("weights alone", train_and_answer)


def put(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / name, metadata={"format": "pt"})


def older_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return weights with the model's names and other numbers."""
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        weights[name] = weight.flip(0).contiguous() + 0.1
    return weights


def split(folder: Path, weights: dict[str, torch.Tensor], *, index: bool) -> None:
    """Write weights in two files, and an index of them."""
    weight_map = {}
    names = list(weights)
    for number, part in ((1, names[:9]), (2, names[9:])):
        file = f"model-{number:05}-of-00002.safetensors"
        put(folder, file, {name: weights[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
        )


# --- which files are read


def shards_of_an_older_save(folder: Path) -> None:
    split(folder, older_weights(folder), index=False)


def an_older_save_with_its_index(folder: Path) -> None:
    split(folder, older_weights(folder), index=True)


def a_file_that_the_index_does_not_name(folder: Path) -> None:
    put(folder, "ema.safetensors", older_weights(folder))
    put(folder, "model-ema.safetensors", older_weights(folder))
    split(folder, load_file(folder / "model.safetensors"), index=True)
    (folder / "model.safetensors").unlink()


def shards_without_an_index(folder: Path) -> None:
    put(folder, "consolidated.safetensors", older_weights(folder))
    split(folder, load_file(folder / "model.safetensors"), index=False)
    (folder / "model.safetensors").unlink()


def other_names_and_an_adapter(folder: Path) -> None:
    put(folder, "consolidated.safetensors", {"layers.0.attention.wq.weight": torch.ones(2, 2)})
    put(folder, "adapter_model.safetensors", {"base_model.model.x.lora_A.weight": torch.ones(2, 2)})
    (folder / "pytorch_model.bin").write_text(POINTER, encoding="utf-8")
    (folder / "optimizer.safetensors").symlink_to("nowhere")


def a_link_to_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to("../blob")


OTHER_FILES = [
    shards_of_an_older_save,
    an_older_save_with_its_index,
    a_file_that_the_index_does_not_name,
    shards_without_an_index,
    other_names_and_an_adapter,
    a_link_to_the_weights,
]


@pytest.mark.parametrize("add_files", OTHER_FILES, ids=lambda function: function.__name__)
def test_other_files_are_not_read(tmp_path, folder, alone, add_files):
    expected, _ = alone
    add_files(folder)
    found = train_one_step(tmp_path / "beside", folder)
    for key in ("first_loss", "weights_sha256"):
        assert found[key] == expected[key]


@pytest.mark.parametrize(
    ("script", "flags", "nproc"),
    [
        (QUANTIZED, ["--weights", "fp32"], None),
        (OFFLOADED, ["--by", "device-map"], None),
        in_full(OFFLOADED, [], None),
        in_full(INFER, [], 2),
    ],
)
def test_other_scripts_read_the_same_files(tmp_path, folder, alone, script, flags, nproc):
    _, expected = alone
    a_file_that_the_index_does_not_name(folder)
    found = answer(tmp_path / "beside", folder, script, *flags, nproc=nproc)
    assert found["token_ids"] == expected["token_ids"]


@pytest.mark.full
def test_deepspeed_reads_the_same_files(tmp_path, folder, alone):
    pytest.importorskip("deepspeed")
    expected, _ = alone
    shards_of_an_older_save(folder)
    flags = ["--stage", 3, "--keep", 1]
    found = train_one_step(tmp_path / "beside", folder, ZERO, *flags, nproc=2)
    assert found["first_loss"] == pytest.approx(expected["first_loss"], rel=1e-5)


def test_a_conversion_reads_the_same_files(tmp_path, folder):
    expected = load_file(folder / "model.safetensors")
    an_older_save_with_its_index(folder)
    result = run(CONVERT, tmp_path, folder, "to.pt", "--to", "pt")
    assert result.code == 0, result
    found = torch.load(tmp_path / "to.pt")["model"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Files that name safetensors' and transformers' functions that open weight files. All others ask
# lm/weight_files.py. These read a folder that they have just written, or link the chosen files.
READERS = r"safe_open|\bload_file\(|HuggingFaceStorageReader|\.glob\(.*safetensors"
READERS += r"|LM\.from_pretrained|safetensors\.torch import (?!save_file)"
MAY_READ = {
    "lm/weight_files.py",
    "lm/reference.py",
    "09_inference/_export.py",
    "09_inference/_offloaded.py",
    "benchmarks/peer_sft.py",
    "models/make_smollm2.py",
}


def test_no_other_module_opens_weight_files():
    readers = set()
    for file in [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")]:
        path = file.relative_to(ROOT)
        if path.parts[0] not in ("tests", "runs") and re.search(
            READERS, file.read_text(encoding="utf-8")
        ):
            readers.add(str(path))
    assert readers == MAY_READ


# --- files that cannot be read


def dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/0123")


def dangling_shard(folder: Path) -> None:
    a_file_that_the_index_does_not_name(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").symlink_to("/nowhere/0123")


def missing_shard(folder: Path) -> None:
    a_file_that_the_index_does_not_name(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def shard_not_in_a_folder_without_index(folder: Path) -> None:
    shards_without_an_index(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER, encoding="utf-8")


def pointer_as_shard(folder: Path) -> None:
    a_file_that_the_index_does_not_name(folder)
    (folder / "model-00001-of-00002.safetensors").write_text(POINTER, encoding="utf-8")


def pointer_as_index(folder: Path) -> None:
    a_file_that_the_index_does_not_name(folder)
    (folder / INDEX).write_text(POINTER, encoding="utf-8")


def index_of_another_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {HEAD: "../model.safetensors"}}), encoding="utf-8"
    )


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20_000)


def truncated_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def web_page(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "<html>404: there is nothing here</html>", encoding="utf-8"
    )


def a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def twice(folder: Path) -> None:
    shards_without_an_index(folder)
    put(folder, "model-00001-of-00003.safetensors", {HEAD: torch.ones(256, 32)})


def adapter_alone(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def torch_format(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


UNREADABLE = {  # words of the error line
    dangling: "model.safetensors ../../blobs/0123",
    dangling_shard: "model-00001-of-00002.safetensors /nowhere/0123",
    missing_shard: "model-00002-of-00002.safetensors missing",
    shard_not_in_a_folder_without_index: "missing",
    pointer: "model.safetensors git-LFS",
    pointer_as_shard: "model-00001-of-00002.safetensors git-LFS",
    pointer_as_index: INDEX,
    index_of_another_folder: f"{INDEX} ../model.safetensors",
    truncated: "model.safetensors truncated",
    truncated_header: "model.safetensors truncated",
    empty: "model.safetensors truncated",
    web_page: "model.safetensors truncated",
    a_folder: "model.safetensors",
    twice: f"{HEAD} model-00001-of-00003.safetensors",
    adapter_alone: "adapter_model.safetensors",
    torch_format: "pytorch_model.bin",
}


def test_files_that_cannot_be_read_are_named(tmp_path):
    for break_it, words in UNREADABLE.items():
        own_folder = tmp_path / break_it.__name__
        own_folder.mkdir()
        write_folder(own_folder / "model", CONFIG)
        break_it(own_folder / "model")
        result = run(BASELINE, own_folder, "--model", "model", *TRAINING)
        assert_refused(result, "--model model", *words.split())


CHATS = ["--data", "chats.jsonl", "--global-batch-size", 2]
OTHER_SCRIPTS = [  # script, damage, flags, words of the line
    (FINETUNE, truncated, ["--model", "model", *CHATS], "--model model"),
    (OFFLOADED, pointer, ["--model", "model", "--by", "device-map"], "--model model"),
    (SPECULATIVE, pointer, ["--draft", "model"], "--draft model"),
    (CONVERT, truncated, ["model", "to", "--to", "dcp"], "FROM model"),
]


def test_other_scripts_name_them_too(tmp_path):
    with open(tmp_path / "chats.jsonl", "w", encoding="utf-8") as file:
        for number in range(40):
            question = {"role": "user", "content": f"{number} + 1"}
            chat = [question, {"role": "assistant", "content": f"{number + 1}"}]
            file.write(json.dumps({"messages": chat}) + "\n")
    for script, break_it, flags, word in OTHER_SCRIPTS:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        write_folder(tmp_path / "model", CONFIG)
        break_it(tmp_path / "model")
        assert_refused(run(script, tmp_path, *flags), word)


# --- a head that config.json ties to the embedding


@pytest.fixture
def own_head(tmp_path) -> tuple[Path, Path]:
    """Return two folders with the same weights: the first has a tied config, the second has not."""
    tied = tmp_path / "tied"
    weights = write_folder(tied, TIED, seed=1, scale=4)
    weights[HEAD] = weights[EMBEDDING].flip(0).contiguous()
    put(tied, "model.safetensors", weights)
    untied = tmp_path / "untied"
    write_folder(untied, CONFIG)
    put(untied, "model.safetensors", weights)
    return tied, untied


@pytest.mark.parametrize(
    ("script", "flags", "nproc"),
    [
        (BASELINE, [], None),
        in_full(FSDP, [], 2),
        in_full(THREE_D, ["--pp", 2, "--micro-batch-size", 1], 2),
    ],
)
def test_another_head_is_used_in_training(tmp_path, own_head, script, flags, nproc):
    tied, untied = own_head
    found = train_one_step(tmp_path / "found", tied, script, *flags, nproc=nproc)
    expected = train_one_step(tmp_path / "expected", untied, script, *flags, nproc=nproc)
    for key in ("first_loss", "weights_sha256", "parameters"):
        assert found[key] == expected[key]
    told = [
        line
        for line in (tmp_path / "found/stdout").read_text(encoding="utf-8").splitlines()
        if HEAD in line
    ]
    assert len(told) == 1, told


def test_another_head_is_used_in_answers(tmp_path, own_head):
    tied, untied = own_head
    expected = answer(tmp_path / "expected", untied)["token_ids"]
    assert answer(tmp_path / "one", tied)["token_ids"] == expected
    assert answer(tmp_path / "q", tied, QUANTIZED, "--weights", "fp32")["token_ids"] == expected
    assert answer(tmp_path / "infer", tied, INFER, nproc=2)["token_ids"] == expected
    assert answer(tmp_path / "offloaded", tied, OFFLOADED)["token_ids"] == expected
    device_map = ("--by", "device-map")
    assert answer(tmp_path / "map", tied, OFFLOADED, *device_map)["token_ids"] == expected


def test_another_head_is_converted(tmp_path, own_head):
    tied, _ = own_head
    for script_flags in (["tied", "dcp", "--to", "dcp"], ["dcp", "hf", "--to", "hf"]):
        result = run(CONVERT, tmp_path, *script_flags)
        assert result.code == 0, result
    assert (
        json.loads((tmp_path / "hf/config.json").read_text(encoding="utf-8"))["tie_word_embeddings"]
        is False
    )
    found = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        found |= load_file(file)
    torch.testing.assert_close(found, load_file(tied / "model.safetensors"), rtol=0, atol=0)


def test_an_equal_head_stays_tied(tmp_path):
    weights = write_folder(tmp_path / "model", TIED)
    expected = train_one_step(tmp_path / "expected", tmp_path / "model")
    weights[HEAD] = weights[EMBEDDING].clone()
    put(tmp_path / "model", "model.safetensors", weights)
    found = train_one_step(tmp_path / "found", tmp_path / "model")
    for key in ("first_loss", "weights_sha256", "parameters"):
        assert found[key] == expected[key]


# --- config.json

WRONG_TYPES = {  # changes of config.json, and words of the line
    "vocab_size": ({"vocab_size": "256"}, "vocab_size '256'"),
    "positions": ({"max_position_embeddings": "128"}, "max_position_embeddings '128'"),
    "theta": ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta '1e4'"),
    "older theta": ({"rope_theta": "10000"}, "rope_theta '10000'"),
    "eps": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps '1e-5'"),
    "layers": ({"num_hidden_layers": "2"}, "num_hidden_layers '2'"),
    "heads": ({"num_key_value_heads": [2]}, "num_key_value_heads [2]"),
    "width": ({"hidden_size": "32"}, "hidden_size '32'"),
    "half a token": ({"vocab_size": 256.5}, "vocab_size 256.5"),
    "negative": ({"intermediate_size": -64}, "intermediate_size -64"),
    "tied": ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'"),
    "rope": ({"rope_parameters": "default"}, "rope_parameters 'default'"),
    "factor": (
        {"rope_scaling": {"rope_type": "llama3", "factor": "8.0"}},
        "factor '8.0'",
    ),
    "window": ({"model_type": "mistral", "sliding_window": "64"}, "sliding_window '64'"),
    "layer types": ({"layer_types": 5}, "--model config.json"),
}


def test_values_of_a_wrong_type_are_named(tmp_path):
    for change, words in WRONG_TYPES.values():
        (tmp_path / "config.json").write_text(json.dumps({**TINY, **change}), encoding="utf-8")
        result = run(BASELINE, tmp_path, "--model", "config.json", *TRAINING)
        assert_refused(result, "--model config.json", *words.split())


def test_other_scripts_name_values_of_a_wrong_type(tmp_path, folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": "128"}), encoding="utf-8"
    )
    for script, flags in (
        (ESTIMATE, ["--model", "model"]),
        (CONVERT, ["model", "to", "--to", "dcp"]),
    ):
        assert_refused(run(script, tmp_path, *flags), "model", "max_position_embeddings", "'128'")


NOT_A_CONFIG = {  # path, content
    "weights": ("model/model.safetensors", None),
    "weights of torch": ("model.bin", b"\x80\x02" + 5000 * b"x"),
    "text": ("notes.txt", b"some notes\n" * 1000),
    "bytes": ("blob", bytes(range(256)) * 100),
    "a list": ("list.json", b"[1, 2]"),
    "cut": ("cut.json", b'{"vocab_size": 25'),
}


@pytest.mark.usefixtures("folder")
def test_a_file_that_is_no_config_is_a_short_line(tmp_path):
    for script in (BASELINE, ESTIMATE):
        for name, content in NOT_A_CONFIG.values():
            if content is not None:
                (tmp_path / name).write_bytes(content)
            result = run(script, tmp_path, "--model", name)
            assert_refused(result, f"--model {name}")
            assert len(result.err) < 400


def test_a_vocabulary_that_is_too_small_does_not_blame_a_flag_that_was_not_given(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps({**TINY, "vocab_size": 200}), encoding="utf-8")
    result = run(BASELINE, tmp_path, "--model", "small.json", *TRAINING)
    assert_refused(result, "--model small.json", "200", "256")
    assert "--tokenizer" not in result.err

    write_folder(tmp_path / "large", config_of({**TINY, "vocab_size": 2000}))
    result = run(BASELINE, tmp_path, "--model", "large", *TRAINING)
    assert_refused(result, "--model large", "2000", "bytes")
    assert "--tokenizer" not in result.err


# --- folders that prepare_data.py made

PREPARE = "05_ddp/prepare_data.py"


def cut(name: str, size: int) -> Callable[[Path], None]:
    def damage(tokens: Path) -> None:
        os.truncate(tokens / name, size)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    def damage(tokens: Path) -> None:
        (tokens / name).unlink()

    return damage


def replace_about(**changes) -> Callable[[Path], None]:
    def damage(tokens: Path) -> None:
        file = tokens / "corpus.json"
        about = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**about, **changes}), encoding="utf-8")

    return damage


def fewer_tokens(tokens: Path) -> None:
    """Put the shorter array, which is whole, in the place of the other."""
    (tokens / "train.npy").write_bytes((tokens / "held_out.npy").read_bytes())


TOKENS = {  # what happens to the folder, and the file that the line names
    "train cut": (cut("train.npy", 500), "train.npy"),
    "train's header cut": (cut("train.npy", 20), "train.npy"),
    "held_out empty": (cut("held_out.npy", 0), "held_out.npy"),
    "held_out gone": (remove("held_out.npy"), "held_out.npy"),
    "train gone": (remove("train.npy"), "train.npy"),
    "corpus.json cut": (cut("corpus.json", 30), "corpus.json"),
    "corpus.json gone": (remove("corpus.json"), "corpus.json"),
    "corpus.json of another type": (replace_about(dtype="uint32"), "train.npy"),
    "corpus.json with a string": (replace_about(vocab_size="256"), "corpus.json"),
    "fewer tokens": (fewer_tokens, "train.npy"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("prepared")
    result = run(PREPARE, where, "--data", TEXT, "--out", "tokens", "--workers", 1)
    assert result.code == 0, result
    return where / "tokens"


def copy_of(prepared: Path, folder: Path) -> Path:
    tokens = folder / "tokens"
    shutil.rmtree(tokens, ignore_errors=True)
    tokens.mkdir(parents=True)
    for file in prepared.iterdir():
        (tokens / file.name).write_bytes(file.read_bytes())
    return tokens


def test_a_damaged_folder_of_tokens_is_named(tmp_path, prepared):
    for damage, name in TOKENS.values():
        damage(copy_of(prepared, tmp_path))
        result = run(BASELINE, tmp_path, *TRAINING, "--data", "tokens")
        assert_refused(result, "--data tokens", name)


def test_preparing_it_again_names_the_damage(tmp_path, prepared):
    for damage, name in (
        (remove("train.npy"), "train.npy"),
        (cut("source.json", 9), "source.json"),
    ):
        damage(copy_of(prepared, tmp_path))
        result = run(PREPARE, tmp_path, "--data", TEXT, "--out", "tokens", "--workers", 1)
        assert_refused(result, "--out tokens", name)
