"""06_fsdp_zero/train_fsdp.py: cut over ranks in every way its flags allow, one curve; what travels, who holds what."""

import ast
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints import (
    assert_near,
    assert_same_first_gradients,
    assert_same_gradients,
    moments,
    saved,
    write_folder,
)
from support.harness import (
    BASELINE,
    NO_COMPILER,
    ROOT,
    TINY,
    Result,
    assert_refused,
    config_of,
    drop_after,
    in_full,
    in_long,
    needs_compiler,
    run,
    train,
    with_prelude,
)

from lm import shapes
from lm.weights import build, digest

full = pytest.mark.full
SCRIPT, DDP = "06_fsdp_zero/train_fsdp.py", "05_ddp/train.py"
LAYERS, STEPS = 3, 6
UNEVEN = {  # 4 ranks divide none of its sizes
    **TINY,
    **{"vocab_size": 259, "hidden_size": 42, "intermediate_size": 50, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 3, "num_key_value_heads": 3},
}
FLAGS = ("--steps", STEPS, "--save-every", 1, "--keep", 100, "--deterministic")


def uneven(folder: Path, tied: bool) -> tuple:
    """The flags for a small model with uneven sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uneven.json").write_text(
        json.dumps({**UNEVEN, "tie_word_embeddings": tied}), encoding="utf-8"
    )
    return ("--model", "uneven.json", *FLAGS)


@pytest.fixture(scope="module")
def baseline(once) -> Callable[[bool], Result]:
    """baseline(tied): the run of one process that shards nothing."""

    def run(folder: Path, tied: bool) -> Result:
        return train(BASELINE, folder, *uneven(folder, tied))

    return partial(once, "06 baseline", run)


ACCUMULATED = ("--micro-batch-size", 1)
MICRO_BATCHES = 3  # of each of four ranks, then: 12 sequences in a step
ENDS_A_STEP = 2  # all-reduces: the loss for the log, and whether a rank was asked to stop
CASES = {  # tied embeddings, flags
    "sharded": (True, ()),
    "kept until backward": (
        False,
        ("--reshard-after-forward", "off", "--loss", "chunked", *ACCUMULATED),
    ),
    "two copies": (False, ("--replicate", 2, *ACCUMULATED)),
    "all flags": (
        True,
        (
            "--replicate",
            2,
            "--reshard-after-forward",
            "off",
            "--cpu-offload",
            "--checkpointing=full",
        ),
    ),
}


# What each micro-batch says to other ranks: three forwards with their backwards where --micro-batch-size is given, else
# one. A mode for each, as torch wants it.
COUNTS = """
import itertools, json, os, sys
from torch.distributed.tensor.debug import CommDebugMode
from training.batches import Batches
made = Batches.stream
micro_batches = 3 if "--micro-batch-size" in sys.argv else 1

def counted(*args, **kwargs):
    batches, counts = made(*args, **kwargs), []
    for batch in itertools.islice(batches, micro_batches):
        mode = CommDebugMode()
        with mode:
            yield batch
        counts.append({str(op): n for op, n in mode.get_comm_counts().items()})
    with open(f"counts-{os.environ['RANK']}.json", "w") as file:
        json.dump(counts, file)
    yield from batches

Batches.stream = counted
"""


def assert_same(ours: Result, theirs: Result) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert ours.column(column) == pytest.approx(theirs.column(column), rel=1e-5), column


def assert_gradients(ours: Result, theirs: Result) -> None:
    """Of the first three steps, each number; and the running mean of all."""
    assert_same_gradients(ours.folder, theirs.folder, 3)
    assert_near(moments(ours.folder, STEPS), moments(theirs.folder, STEPS))


@pytest.mark.parametrize(
    "case", ["sharded", in_long("kept until backward"), *map(in_full, ("two copies", "all flags"))]
)
def test_sharded_over_four_ranks_is_one_process(tmp_path, baseline, case):
    tied, flags = CASES[case]
    script = with_prelude(SCRIPT, tmp_path, COUNTS)
    result = train(script, tmp_path, *uneven(tmp_path, tied), *flags, nproc=4)
    assert len(result.column("loss")) == STEPS
    assert_same(result, baseline(tied))
    assert_gradients(result, baseline(tied))
    assert_counts(tmp_path, tied, flags)
    shards = 2 if "--replicate" in flags else 4
    sizes = [p.shape for p in build("nano", config(tied), seed=0, device="meta").parameters()]
    expected = [
        sum(part_bytes(shape, rank % shards, shards) for shape in sizes) for rank in range(4)
    ]
    assert len(set(expected)) > 1  # the sizes are uneven indeed
    assert sum(expected) == 4 * shapes.parameter_count(config(tied)) * (4 // shards)
    assert result.summary["parameter_bytes_per_rank"] == expected
    assert result.summary["optimizer_bytes_per_rank"] == [2 * held for held in expected]


def test_without_torchrun_it_is_one_process(tmp_path):
    """The weights of the chapter before, to the bit."""
    digests = []
    for script in (BASELINE, SCRIPT):
        result = train(script, tmp_path / script, "--steps", 3)
        assert result.summary["world_size"] == 1
        digests.append(result.summary["weights_sha256"])
    assert digests[0] == digests[1]


def test_shards_start_from_the_weights_of_one_process_to_the_bit(tmp_path):
    """Random ones, and those of a folder. At a learning rate that moves nothing, they are the weights at the end."""
    write_folder(tmp_path / "hf", config(True), seed=5)
    for seed, more in ((4, ()), (5, ("--model", tmp_path / "hf"))):
        folder = tmp_path / str(seed)
        flags = (*uneven(folder, True), "--seed", 4, *more, "--steps", 1, "--lr", 1e-30)
        result = train(SCRIPT, folder, *flags, nproc=3)
        assert result.summary["weights_sha256"] == digest(build("nano", config(True), seed=seed))


def config(tied: bool) -> shapes.Config:
    return config_of({**UNEVEN, "tie_word_embeddings": tied})


def part_bytes(shape: torch.Size, rank: int, shards: int) -> int:
    """The bytes of a rank's part of an fp32 tensor: equal numbers of rows, rounded up, until there are none left."""
    each = math.ceil(shape[0] / shards)
    rows = max(0, min(each, shape[0] - rank * each))
    return 4 * rows * shape[1:].numel()


def assert_counts(folder: Path, tied: bool, flags: tuple) -> None:
    """Assert that all groups are gathered in forward, and blocks that were freed again in backward.

    Each group reduces once. Copies of the model add what they have reduced once a step, after its
    last micro-batch.
    """
    groups = LAYERS + (
        1 if tied else 2
    )  # beside the blocks: one for both matrices, or the embedding and the head
    expected = {
        "c10d._allgather_base_": groups if "off" in flags else LAYERS + groups,
        "c10d._reduce_scatter_base_": groups,
    }
    all_reduces = [ENDS_A_STEP + (groups if "--replicate" in flags else 0)]
    if ACCUMULATED[0] in flags:
        all_reduces = (MICRO_BATCHES - 1) * [0] + all_reduces
    for rank in range(4):
        counts = json.loads((folder / f"counts-{rank}.json").read_text(encoding="utf-8"))
        for count, all_reduce in zip(counts, all_reduces, strict=True):
            due = {**expected, "c10d.allreduce_": all_reduce}
            assert {name: count.get(name, 0) for name in due} == due


def two_steps_untied(folder: Path) -> Result:
    return train(BASELINE, folder, *uneven(folder, False), "--steps", 2)


UNTIED_CASES = {  # ranks, flags
    "2 ranks": (2, ()),
    "3 ranks": (3, ("--micro-batch-size", 2)),
    "2 ranks, compiled": (2, ("--compile", "--checkpointing", "selective")),
}


@pytest.mark.parametrize(
    "case",
    [
        "3 ranks",
        pytest.param("2 ranks", marks=full),
        pytest.param("2 ranks, compiled", marks=(full, needs_compiler)),
    ],
)
def test_gradients_of_an_untied_model_are_those_of_one_process(tmp_path, once, case):
    """Embedding and head are two groups, and backward does not gather the embedding."""
    flags = (*uneven(tmp_path, False), "--steps", 2)
    nproc, more = UNTIED_CASES[case]
    ours = train(SCRIPT, tmp_path, *flags, *more, nproc=nproc)
    theirs = once("06 two steps untied", two_steps_untied)
    assert_same(ours, theirs)
    assert_same_first_gradients(ours.folder, theirs.folder)


@full
def test_a_run_moves_between_ranks_and_scripts(tmp_path, baseline):
    """Saved on 4 ranks; resumed by DDP on 2, then sharded over 3, then over 1."""
    flags = uneven(tmp_path, True)
    train(SCRIPT, tmp_path, *flags, nproc=4)
    for step, script, n in ((1, DDP, 2), (3, SCRIPT, 3), (5, SCRIPT, 1)):
        drop_after(tmp_path, step)
        result = train(script, tmp_path, *flags, "--resume", nproc=n)
        assert f"resuming from {tmp_path}/run/step-{step:08d}" in result.out
        assert result.column("step") == [*range(1, STEPS + 1), STEPS]
        assert_same(result, baseline(True))
    assert_near(moments(tmp_path, STEPS), moments(baseline(True).folder, STEPS))


@full
def test_resumed_with_all_flags_is_uninterrupted_to_the_bit(tmp_path):
    flags = (*uneven(tmp_path, True), *CASES["all flags"][1], "--async-save")
    whole = train(SCRIPT, tmp_path, *flags, nproc=4)
    summary, losses = whole.summary, whole.column("loss")
    weights = saved(tmp_path, STEPS)["model"]
    drop_after(tmp_path, 3)
    resumed = train(SCRIPT, tmp_path, *flags, "--resume", nproc=4)
    assert resumed.summary["weights_sha256"] == summary["weights_sha256"]
    assert resumed.column("loss") == losses
    torch.testing.assert_close(saved(tmp_path, STEPS)["model"], weights, rtol=0, atol=0)


@full
def test_many_blocks_compile_once(tmp_path):
    """After eight versions of one function torch.compile gives up."""
    (tmp_path / "deep.json").write_text(
        json.dumps({**TINY, "num_hidden_layers": 10}), encoding="utf-8"
    )
    flags = (
        "--model",
        "deep.json",
        "--compile",
        "--checkpointing",
        "selective",
        "--steps",
        2,
        "--seq-len",
        16,
    )
    flags += ("--global-batch-size", 2, "--dtype", "fp32", "--device", "cpu")
    result = run(with_prelude(SCRIPT, tmp_path, NO_COMPILER), tmp_path, *flags)
    assert result.code == 0, result.err


@pytest.mark.long
@needs_compiler
def test_compiled_changes_nothing(tmp_path, baseline):
    flags = ("--compile", "--checkpointing", "full")
    result = train(SCRIPT, tmp_path, *uneven(tmp_path, True), *flags, nproc=2)
    assert_same(result, baseline(True))
    assert_gradients(result, baseline(True))


def test_what_is_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--dtype", "fp16"), "--dtype", "fp16", "05_ddp/train.py")
    assert "--replicate 3" in train(SCRIPT, tmp_path, "--replicate", 3, code=2).err


def sharding_of(script: str, function: str) -> str:
    """Return the statements of a function that shard a model, without those that compile."""

    class WithoutCompile(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.If | None:
            compiles = ast.unparse(node.test).startswith("args.compile")
            return None if compiles else self.generic_visit(node)

    module = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    [found] = [node for node in module.body if getattr(node, "name", "") == function]
    statements = WithoutCompile().visit(found).body
    texts = [ast.unparse(statement) for statement in statements]
    [last] = [i for i, text in enumerate(texts) if text.startswith("fully_shard(model")]
    [first] = [i for i, text in enumerate(texts) if text.startswith("for block in")]
    return "\n".join(texts[first : last + 1])


def test_other_scripts_shard_a_model_in_the_groups_that_this_one_shows():
    """finetune.py, compare.py and muon.py import them from one file."""
    shown = sharding_of(SCRIPT, "shard_model")
    assert shown.count("fully_shard(") == 4
    assert sharding_of("06_fsdp_zero/_sharding.py", "shard_groups") == shown
