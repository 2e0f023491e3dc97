"""08_model_parallel/train_3d.py: on any mesh the run of one process; who holds what; what a mesh must divide."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints import assert_near, assert_same_gradients, moments, saved, write_folder
from support.collectives import COUNTS
from support.harness import (
    BASELINE,
    Result,
    config_of,
    drop_after,
    finish,
    holds,
    launch,
    run,
    steps_logged,
    tiny_flags,
    train,
    with_prelude,
)

from old import checkpoint, model, shapes

SCRIPT, FSDP = "08_model_parallel/train_3d.py", "06_fsdp_zero/train_fsdp.py"
STEPS = 10
UNEVEN = {  # 3 layers for 2 stages; 131 tokens, 27 MLP columns a tensor rank for 2 shards
    "model_type": "llama",
    "vocab_size": 262,
    "hidden_size": 38,
    "head_dim": 6,
    "intermediate_size": 54,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FLAGS = ("--steps", STEPS, "--save-every", 1, "--keep", 100, "--eval-every", 5, "--clip-norm", 0.9)
HALF = ("--micro-batch-size", 3)
TP, PP, CP, COPIES = ("--tp", 2), ("--pp", 2), ("--cp", 2), ("--replicate", 2)

long = pytest.mark.long
LAYOUTS = {  # ranks, tied embeddings, flags
    "one process": (1, True, ()),
    "shards": (2, True, HALF),
    "tensor": (2, True, TP),
    "tensor, untied": (2, False, (*TP, *HALF)),
    "context": (2, True, (*CP, *HALF)),
    "stages": (2, False, (*PP, *HALF)),
    "3 stages": (3, False, ("--pp", 3, "--micro-batch-size", 2)),
    "3 contexts": (3, True, ("--cp", 3, "--seq-len", 30)),
    "3 shards": (3, True, ("--micro-batch-size", 2)),
    "tensor, stages": (4, False, (*TP, *PP, *HALF)),
    "tensor, contexts": (4, True, (*TP, *CP, *HALF)),
    "stages, contexts": (4, False, (*PP, *CP, *HALF)),
    "shards, tensor": (4, True, (*TP, *HALF)),
    "shards, contexts": (4, False, (*CP, *HALF)),
    "shards, stages": (4, False, (*PP, *HALF)),
    "copies, tensor": (4, True, (*COPIES, *TP, *HALF)),
    "copies, stages": (4, False, (*COPIES, *PP, "--micro-batch-size", 2)),
    "copies, contexts": (4, True, (*COPIES, *CP, *HALF)),
    "shards, tensor, stages": (8, False, (*TP, *PP, *HALF)),
    "copies, tensor, stages": (8, False, (*COPIES, *TP, *PP, *HALF)),
    "tensor, stages, contexts": (8, False, (*TP, *PP, *CP, *HALF)),
    "recomputed": (4, False, (*TP, *CP, "--checkpointing", "selective", "--reshard-after-forward", "off")),
    "recomputed stages": (4, False, (*PP, *CP, *HALF, "--checkpointing", "full")),
}
QUICK = {"tensor", "context", "stages"}
each_layout = pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=long) for name in LAYOUTS]
)


def write(folder: Path, tied: bool) -> tuple:
    """The flags for the small model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uneven.json").write_text(json.dumps({**UNEVEN, "tie_word_embeddings": tied}))
    return ("--model", "uneven.json", *FLAGS)


def config(tied: bool) -> shapes.Config:
    return config_of({**UNEVEN, "tie_word_embeddings": tied})


@pytest.fixture(scope="module")
def one_process(once) -> Callable[[bool, int], Result]:
    """one_process(tied, seq_len): the run of the baseline script, which knows of no other rank."""

    def run(folder: Path, tied: bool, seq_len: int) -> Result:
        return train(BASELINE, folder, *write(folder, tied), "--seq-len", seq_len)

    return partial(once, "08 one process", run)


@pytest.fixture(scope="module")
def runs(once) -> Callable[[str], Result]:
    """runs(layout): the run of the script on that mesh."""

    def run(folder: Path, layout: str) -> Result:
        ranks, tied, flags = LAYOUTS[layout]
        return train(SCRIPT, folder, *write(folder, tied), *flags, nproc=ranks)

    return partial(once, "08 train_3d", run)


def assert_same_curve(ours: Result, theirs: Result) -> None:
    for column in ("loss", "grad_norm", "val_loss"):
        assert ours.column(column) == pytest.approx(theirs.column(column), rel=1e-5), column


def seq_len_of(flags: tuple) -> int:
    return flags[flags.index("--seq-len") + 1] if "--seq-len" in flags else 32


@each_layout
def test_any_mesh_is_one_process(runs, one_process, layout):
    _, tied, flags = LAYOUTS[layout]
    ours, theirs = runs(layout), one_process(tied, seq_len_of(flags))
    assert len(ours.column("loss")) == STEPS
    assert len(ours.column("val_loss")) == 2
    assert_same_curve(ours, theirs)
    assert_same_gradients(ours.folder, theirs.folder, STEPS)
    assert ours.out.count("checked: ") == 3


EIGHT = {  # whatever the mesh, 8 ranks divide it
    **UNEVEN,
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
MESHES_OF_8 = [
    (tp, pp, cp, copies)
    for tp, pp, cp, copies in itertools.product((1, 2, 4, 8), repeat=4)
    if 8 % (tp * pp * cp * copies) == 0
]


@pytest.mark.long
@pytest.mark.parametrize(("tp", "pp", "cp", "copies"), MESHES_OF_8)
def test_every_mesh_of_8_is_one_process(once, tmp_path, tp, pp, cp, copies):
    flags = ("--model", "eight.json", "--steps", 3, "--save-every", 1, "--eval-every", 3, "--clip-norm", 0.9)
    flags += ("--global-batch-size", 16, "--micro-batch-size", 2)

    def run_in(folder: Path, script: str, *more, nproc: int | None) -> Result:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "eight.json").write_text(json.dumps({**EIGHT, "tie_word_embeddings": False}))
        return train(script, folder, *flags, *more, nproc=nproc)

    theirs = once("08 eight", lambda folder: run_in(folder, BASELINE, nproc=None))
    mesh = ("--tp", tp, "--pp", pp, "--cp", cp, "--replicate", copies)
    ours = run_in(tmp_path, SCRIPT, *mesh, nproc=8)
    assert_same_curve(ours, theirs)
    assert max(ours.column("grad_norm")) > 0.9  # they were clipped
    assert_same_gradients(ours.folder, theirs.folder, 3)


@long
def test_what_a_micro_batch_says(tmp_path):
    """Tensor and context ranks, whose weights are sharded; one with more to come after it."""
    ranks, tied, flags = LAYOUTS["tensor, contexts"]
    train(with_prelude(SCRIPT, tmp_path, COUNTS), tmp_path, *write(tmp_path, tied), *flags, nproc=ranks)
    layers = UNEVEN["num_hidden_layers"]
    into_and_out = 2 * layers + 1  # of attention and MLP, and of the embedding or into the head
    expected = {
        "c10d_functional.all_gather_into_tensor": 2 * into_and_out,  # backward gathers where forward scattered
        "c10d_functional.reduce_scatter_tensor": 2 * into_and_out,
        "c10d_functional.all_reduce": 2 * layers + 1 + 3,  # gradients of norms; maximum, sum and loss of cut logits
        "c10d._allgather_base_": 2 * layers + 1 + 2 * layers,  # weights, the root's once; keys and values
        "c10d._reduce_scatter_base_": layers + 1 + 2 * layers,  # and the gradients of all these
    }
    for rank in range(ranks):
        counts = json.loads((tmp_path / f"counts-{rank}.json").read_text())
        assert counts == 3 * [expected]


SENDS = """
import json, os
import torch
from torch.distributed.pipelining import schedules
from old import exits
sent = []
exchange = schedules._batch_p2p

def counted(operations, *args, **kwargs):
    if torch.is_grad_enabled():  # not in evaluation
        sent.extend((op.op.__name__, op.peer, [*op.tensor.shape]) for op in operations)
    return exchange(operations, *args, **kwargs)

schedules._batch_p2p = counted
exits.before_exit.append(lambda: json.dump(sent, open(f"sent-{os.environ['RANK']}.json", "w")))
"""


@long
def test_what_stages_say_to_each_other(tmp_path):
    """Of each micro-batch its hidden states go forward once and their gradients come back once, and nothing else."""
    train(with_prelude(SCRIPT, tmp_path, SENDS), tmp_path, *write(tmp_path, False), *PP, *HALF, "--steps", 4, nproc=2)
    micro_batches = 4 * 4  # of 3 sequences, in 4 steps
    hidden = [3, 32, UNEVEN["hidden_size"]]
    for rank in range(2):
        sent = Counter(map(str, json.loads((tmp_path / f"sent-{rank}.json").read_text())))
        assert sent == {str([name, 1 - rank, hidden]): micro_batches for name in ("isend", "irecv")}


def part(size: int, rank: int, ranks: int) -> int:
    """How many of `size` things a rank holds: equally many, rounded up, until there are none left."""
    each = -(-size // ranks)
    return max(0, min(each, size - rank * each))


def expected_bytes(ranks: int, tied: bool, flags: tuple) -> list[int]:
    """The bytes of fp32 weights by rank, from the shape alone."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    tp, pp, copies = (given.get(flag, 1) for flag in ("--tp", "--pp", "--replicate"))
    c = config(tied)
    shards = ranks // (tp * pp * copies)
    stage_layers = {1: [3], 2: [2, 1], 3: [1, 1, 1]}[pp]
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    found = []
    for rank in range(ranks):
        tensor, shard = rank % tp, rank // tp % shards
        stage = rank // (ranks // pp)

        def rows(count: int, columns: int, cut: bool = True, tensor=tensor, shard=shard) -> int:
            return 4 * columns * part(part(count, tensor, tp) if cut else count, shard, shards)

        norm = rows(c.hidden_size, 1, cut=False)
        block = sum(rows(outputs, c.hidden_size) for outputs in (heads, kv_heads, kv_heads, *[c.intermediate_size] * 2))
        block += rows(c.hidden_size, heads // tp, cut=False) + rows(c.hidden_size, c.intermediate_size // tp, cut=False)
        total = stage_layers[stage] * (block + 2 * norm)
        if stage == pp - 1:
            total += norm
        embedding = rows(c.vocab_size, c.hidden_size)
        total += embedding * ((stage == 0) + (stage == pp - 1 and not tied))
        found.append(total)
    return found


@each_layout
def test_each_rank_holds_its_part_and_no_more(runs, layout):
    ranks, tied, flags = LAYOUTS[layout]
    expected = expected_bytes(ranks, tied, flags)
    summary = runs(layout).summary
    assert summary["parameter_bytes_per_rank"] == expected
    assert summary["optimizer_bytes_per_rank"] == [2 * held for held in expected]


@long
@pytest.mark.parametrize("flags", [TP, (*TP, *PP, *HALF)], ids=["tensor", "tensor, stages"])
def test_a_vocabulary_that_tensor_ranks_do_not_divide(tmp_path, flags):
    shape = {**UNEVEN, "vocab_size": 261, "tie_word_embeddings": False}
    results = []
    for script, more, ranks in ((BASELINE, (), None), (SCRIPT, flags, 4 if PP[0] in flags else 2)):
        folder = tmp_path / str(ranks)
        given = write(folder, False)
        (folder / "uneven.json").write_text(json.dumps(shape))
        results.append(train(script, folder, *given, *more, nproc=ranks))
    one, several = results
    assert_same_curve(several, one)
    assert_same_gradients(several.folder, one.folder)


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=long)])
def test_without_a_mesh_it_is_train_fsdp_to_the_bit(tmp_path, ranks):
    summaries = []
    for script in (FSDP, SCRIPT):
        folder = tmp_path / Path(script).stem
        result = train(script, folder, *write(folder, True), "--deterministic", nproc=ranks)
        summaries.append((result.summary["weights_sha256"], result.column("loss"), result.column("val_loss")))
    assert summaries[0] == summaries[1]


@long
@pytest.mark.parametrize(
    "layout", ["tensor", "tensor, untied", "stages", "shards, tensor", "shards, tensor, stages", "tensor, stages"]
)
def test_training_starts_from_the_weights_of_one_process_to_the_bit(tmp_path, layout):
    """And the digest over stages is that of the whole model: at this learning rate, nothing moves."""
    ranks, tied, flags = LAYOUTS[layout]
    flags = (*write(tmp_path, tied), *flags, "--seed", 4, "--steps", 1, "--lr", 1e-30, "--eval-every", 0)
    result = train(SCRIPT, tmp_path, *flags, nproc=ranks)
    assert result.summary["weights_sha256"] == checkpoint.digest(model.build("nano", config(tied), seed=4))


@long
def test_a_run_moves_from_mesh_to_mesh(tmp_path, one_process):
    """Saved by stages, resumed by other cuts, and by a script that knows none."""
    flags = write(tmp_path, False)
    moves = [
        (0, SCRIPT, 4, (*TP, *PP, *HALF)),
        (2, SCRIPT, 4, (*CP, *HALF)),
        (4, SCRIPT, 4, (*TP, *HALF)),
        (6, BASELINE, None, ()),
        (8, SCRIPT, 3, ("--pp", 3, "--micro-batch-size", 2)),
    ]
    for step, script, ranks, layout in moves:
        drop_after(tmp_path, step)
        result = train(script, tmp_path, *flags, *layout, *(("--resume",) if step else ()), nproc=ranks)
        assert (f"resuming from {tmp_path}/run/step-{step:08d}" in result.out) == (step > 0)
        assert_same_curve(result, one_process(False, 32))
    assert_near(moments(tmp_path, STEPS), moments(one_process(False, 32).folder, STEPS))


@long
def test_resumed_on_the_same_mesh_is_uninterrupted_to_the_bit(tmp_path):
    flags = (*write(tmp_path, False), *TP, *PP, *HALF, "--deterministic", "--async-save")
    whole = train(SCRIPT, tmp_path, *flags, nproc=4)
    weights, losses = whole.summary["weights_sha256"], whole.column("loss")
    drop_after(tmp_path, 4)
    resumed = train(SCRIPT, tmp_path, *flags, "--resume", nproc=4)
    assert resumed.summary["weights_sha256"] == weights
    assert resumed.column("loss") == losses


@long
@pytest.mark.parametrize(("ranks", "flags"), [(2, TP), (4, (*PP, *CP, *HALF))])
def test_bf16_is_in_the_products_and_not_in_what_is_kept(tmp_path, one_process, ranks, flags):
    result = train(SCRIPT, tmp_path, *write(tmp_path, False), *flags, "--dtype", "bf16", nproc=ranks)
    assert {weight.dtype for weight in saved(tmp_path, STEPS)["model"].values()} == {torch.float32}
    theirs = one_process(False, 32).column("loss")
    assert result.column("loss") == pytest.approx(theirs, rel=1e-2)
    assert result.column("loss") != pytest.approx(theirs, rel=1e-6)


# --- what a mesh must divide: one line from rank 0, exit code 2

BAD = {  # ranks, flags, words
    "vocabulary": (
        4,
        ("--tp", 2, "--model", "odd.json"),
        "--tp 2 does not divide the 261 tokens of the vocabulary",
    ),
    "tensor ranks": (1, ("--tp", 2), "--tp 2 x --pp 1 x --cp 1 x --replicate 1 takes a multiple of 2 processes, and 1"),
    "mesh": (3, ("--cp", 2), "and 3 were started: use 2 or 4"),
    "copies": (2, ("--replicate", 3), "and 2 were started: use 3"),
    "tied stages": (2, ("--pp", 2, "--micro-batch-size", 6, "--model", "tied.json"), '"tie_word_embeddings": false'),
    "nano's stages": (2, ("--pp", 2, "--micro-batch-size", 6, "--model", "nano"), "--model nano has tied embeddings"),
    "empty stage": (4, ("--pp", 4, "--micro-batch-size", 3), "--model uneven.json has 3 layers, one stage would have"),
    "heads": (4, ("--tp", 4), "--tp 4 does not divide the 6 attention heads, 2 key-value heads, 54 MLP columns"),
    "key-value heads": (
        3,
        ("--tp", 3),
        "--tp 3 does not divide the 2 key-value heads of --model uneven.json: use --tp 2",
    ),
    "sequence": (
        2,
        ("--cp", 2, "--seq-len", 31),
        "--seq-len 31 does not divide over --cp 2 x --tp 1 = 2 ranks: use 30 or",
    ),
    "sequence parts": (4, ("--cp", 2, "--tp", 2, "--seq-len", 62), "--cp 2 x --tp 2 = 4 ranks: use 60 or 64"),
    "short sequence": (2, ("--cp", 2, "--seq-len", 1), "use 2"),
    "micro-batches": (
        2,
        ("--pp", 2),
        "12 sequences per rank in parts of --micro-batch-size 12 are 1: use --micro-batch-",
    ),
    "batch": (2, ("--pp", 2, "--global-batch-size", 1), "use a --global-batch-size 2 times as large"),
    "batch over ranks": (2, ("--global-batch-size", 7), "use 6 or 8"),
    "compile": (2, ("--tp", 2, "--compile"), "--compile with --tp 2 --pp 1 --cp 1 was never compared"),
    "offload": (2, ("--cp", 2, "--cpu-offload"), "--cpu-offload with --tp 1 --pp 1 --cp 2 was never compared"),
    "fp16": (
        2,
        ("--pp", 2, "--dtype", "fp16", "--micro-batch-size", 6),
        "--dtype fp16 with --tp 1 --pp 2 --cp 1",
    ),
    "weights": (2, ("--tp", 2, "--model", "folder"), "--model folder has weights, and --tp and --pp start from random"),
    "zero": (1, ("--tp", 0), "--tp"),
}


OFTEN = {"tensor ranks", "mesh", "tied stages", "key-value heads", "sequence", "micro-batches"}


@pytest.mark.parametrize("case", [case if case in OFTEN else pytest.param(case, marks=long) for case in BAD])
def test_what_a_mesh_cannot_be(tmp_path, case):
    ranks, flags, words = BAD[case]
    given = write(tmp_path, False)
    (tmp_path / "tied.json").write_text(json.dumps({**UNEVEN, "tie_word_embeddings": True}))
    (tmp_path / "odd.json").write_text(json.dumps({**UNEVEN, "vocab_size": 261}))
    if "folder" in flags:
        write_folder(tmp_path / "folder", config(False))
    result = run(SCRIPT, tmp_path, *tiny_flags(tmp_path), *given, *flags, nproc=ranks)
    assert result.code != 0
    told = [line for line in result.err.splitlines() if f"{SCRIPT}: error: " in line]
    assert len(told) == 1, result.err
    assert "Traceback" not in result.err
    assert "exitcode  : 2 (" in result.err  # torchrun's report
    assert words in told[0]
    assert not list(tmp_path.glob("run/step-*"))


# --- ranks that die, or drift

FAULT = """
import torch
calls = 0
step = torch.optim.AdamW.step
def failing_step(self, *args, **kwargs):
    global calls
    calls += 1
    if os.environ["RANK"] == "RANK_THAT_FAILS" and calls == 3:
        FAULT
    return step(self, *args, **kwargs)
torch.optim.AdamW.step = failing_step
"""
FIRST_WEIGHT = "self.param_groups[0]['params'][0].data"


def with_fault(folder: Path, rank: int, fault: str) -> Path:
    """The script, with one statement run on that rank before its third optimizer step."""
    return with_prelude(SCRIPT, folder, FAULT.replace("RANK_THAT_FAILS", str(rank)).replace("FAULT", fault))


@long
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("os.kill(os.getpid(), 9)", "Signal 9 (SIGKILL)"),
        ('raise RuntimeError("the third step broke")', "RuntimeError: the third step broke"),
    ],
)
def test_a_rank_that_dies_takes_all_stages_down(tmp_path, fault, told):
    flags = (*write(tmp_path, False), *TP, *PP, *HALF, "--steps", 5000)
    process = launch(with_fault(tmp_path, 3, fault), tmp_path, *flags, nproc=4)
    assert holds(process, lambda: steps_logged(tmp_path) >= 2)
    result = finish(process, tmp_path)
    assert result.code != 0
    assert told in result.err


@long
@pytest.mark.parametrize(("ranks", "flags", "fails"), [(2, COPIES, 1), (4, (*COPIES, *PP, *HALF), 1)])
def test_a_copy_that_drifts_is_found_at_the_end(tmp_path, ranks, flags, fails):
    drift = f"getattr({FIRST_WEIGHT}, '_local_tensor', {FIRST_WEIGHT}).view(-1)[0].mul_(1.0001)"
    flags = (*write(tmp_path, False), *flags)
    result = train(with_fault(tmp_path, fails, drift), tmp_path, *flags, nproc=ranks, code=1)
    assert "AssertionError: ranks hold different weights" in result.err


@long
def test_norms_that_drift_between_tensor_ranks_are_found(tmp_path):
    """Each tensor rank has all of a norm: nothing but its gradient, summed over them, keeps the copies equal."""
    norm = "self.param_groups[1]['params'][0].data"
    drift = f"{norm}._local_tensor[0].mul_(1.0001)"
    result = train(with_fault(tmp_path, 1, drift), tmp_path, *write(tmp_path, True), *TP, nproc=2, code=1)
    assert "AssertionError: ranks hold different weights" in result.err


# --- as a reader starts it


@long
def test_bare(tmp_path):
    result = run(SCRIPT, tmp_path, warm=False)
    assert result.code == 0, result.err
    assert "checked: all 1 ranks have the same weights to the bit" in result.out


def on_gpus(folder: Path, gpus: dict[str, str], script: str, nproc: int | None, *flags) -> Result:
    more = ("--device", "cuda", "--deterministic")
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"], "OMP_NUM_THREADS": "4"}
    flags = (*tiny_flags(folder), *write(folder, False), *more, *flags)
    result = run(script, folder, *flags, nproc=nproc, warm=False, **visible)
    assert result.code == 0, f"exit code {result.code}\n{result.out[-2000:]}\n{result.err[-4000:]}"
    return result


@pytest.mark.gpu(n=1)
def test_one_gpu_is_train_fsdp(gpus, tmp_path):
    ours, theirs = (on_gpus(tmp_path / Path(script).stem, gpus, script, 1) for script in (SCRIPT, FSDP))
    assert ours.summary["weights_sha256"] == theirs.summary["weights_sha256"]


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("flags", [TP, CP, (*PP, *HALF)], ids=["tensor", "context", "stages"])
def test_two_gpus_are_one(gpus, tmp_path, flags):
    one = on_gpus(tmp_path / "one", gpus, BASELINE, None)
    two = on_gpus(tmp_path / "two", gpus, SCRIPT, 2, *flags)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-4)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-3)
