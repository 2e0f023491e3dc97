"""08_model_parallel/pipeline_parallel.py: every schedule trains as one process does."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.harness import ODD, assert_refused, config_of, in_full, in_long, run, with_fault
from torch import nn

from lm import stdlib_text, weights

SCRIPT = "08_model_parallel/pipeline_parallel.py"
# 9 layers: the stages are uneven.
SHAPE = {**ODD, "vocab_size": 256, "num_hidden_layers": 9, "tie_word_embeddings": False}
STEPS = 3
SEQ_LEN = 12
SEQUENCES = 3  # of a micro-batch
BY_HAND = ["GPipe", "1F1B", "interleaved 1F1B"]
BY_TORCH = [f"{name} by torch" for name in BY_HAND]
# processes, micro-batches per process, chunks
RUNS = [
    (2, 2, 2),
    in_full((3, 2, 3)),
    in_long((4, 1, 2)),
]


def start(folder: Path, *more, nproc: int | None = None, script: str = SCRIPT):
    """Run the script on a tiny model."""
    (folder / "tiny.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    flags = (
        *("--model", "tiny.json"),
        *("--steps", STEPS),
        *("--seq-len", SEQ_LEN),
        *("--micro-batch-size", SEQUENCES),
        *("--device", "cpu"),
        *("--json", "s.json"),
    )
    return run(script, folder, *flags, *more, nproc=nproc)


def finish(folder: Path, nproc: int, per_rank: int, chunks: int) -> dict:
    """Return the summary of a run. Two ranks start by themselves."""
    sizes = ("--micro-batches-per-rank", per_rank, "--chunks", chunks)
    result = start(folder, *sizes, nproc=None if nproc == 2 else nproc)
    assert result.code == 0, result.err[-4000:]
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=RUNS, ids=lambda values: f"{values[0]}-ranks")
def finished(request, once) -> tuple[int, int, int, dict]:
    """Return the sizes of a run, and its summary."""
    return *request.param, once("08 pipeline", finish, *request.param)


def one_process(size: int) -> tuple[list[float], list[float]]:
    """Train on batches of `size` sequences of unequal lengths. Return losses and gradient norms."""
    net = weights.build("tiny", config_of(SHAPE), seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []
    norms = []
    all_inputs, all_targets = stdlib_text.one_batch(STEPS * size, SEQ_LEN, torch.device("cpu"))
    for inputs, targets in zip(all_inputs.split(size), all_targets.split(size), strict=True):
        for i in range(size):
            targets[i, 7 * i % SEQ_LEN + 1 :] = -100
        loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def test_every_schedule_trains_as_one_process_does(finished):
    nproc, per_rank, _, summary = finished
    losses, norms = one_process(nproc * per_rank * SEQUENCES)
    assert {row["name"] for row in summary["rows"]} >= {*BY_HAND, *BY_TORCH}
    for row in summary["rows"]:
        assert row["losses"] == pytest.approx(losses, rel=1e-5), row["name"]
        assert row.get("gradient_error", 0) < 1e-5
    assert len(set(losses)) == len(losses)  # each step trains
    assert max(norms) > 1  # some gradients are clipped


def test_torch_has_the_losses_and_gradients_of_the_schedules_by_hand(finished):
    rows = {row["name"]: row for row in finished[-1]["rows"]}
    for by_hand, by_torch in zip(BY_HAND, BY_TORCH, strict=True):
        assert rows[by_torch]["losses"] == pytest.approx(rows[by_hand]["losses"], rel=1e-5)
        assert rows[by_torch]["from_hand_error"] < 1e-5


def test_bubble_activations_and_messages_are_those_of_the_formulas(finished):
    p, per_rank, v, summary = finished
    m = p * per_rank
    rows = {row["name"]: row for row in summary["rows"]}
    most_interleaved = [min(2 * (p - rank - 1) + (v - 1) * p + 1, v * m) for rank in range(p)]
    expected = {  # work of a rank for each unit that it waits for another, most that it holds
        "GPipe": (m, [m] * p),
        "1F1B": (m, [*range(p, 0, -1)]),
        "interleaved 1F1B": (v * m, most_interleaved),
    }
    for name, (work, held) in expected.items():
        assert rows[name]["idle_share"] == pytest.approx((p - 1) / (work + p - 1), abs=1e-12)
        assert rows[name]["most_held_per_rank"] == held
        stages = p * v if name == "interleaved 1F1B" else p
        assert rows[name]["messages"] == 2 * m * (stages - 1)  # there and back


def received_as(message, last_stage: int):
    """Return the message with which the other rank receives what this one sends."""
    name, micro_batch, stage = message
    step = 1 if name == "SendActivations" else -1
    assert 0 <= stage + step <= last_stage
    return (name.replace("Send", "Receive"), micro_batch, stage + step)


def assert_no_deadlock(programs: list[list], last_stage: int) -> None:
    """Carry out the messages of all ranks under the strictest rules.

    A message goes when both ranks have come to it, and a call ends with the last of its messages.
    NCCL may ask for that.
    """
    ranks = len(programs)
    calls = []
    for program in programs:
        calls.append([list(step) for step in program if isinstance(step, list)])
    while any(calls):
        current = {rank: left[0] for rank, left in enumerate(calls) if left}
        gone = []
        for rank, messages in current.items():
            for message in messages:
                if not message.name.startswith("Send"):
                    continue
                received = received_as(message, last_stage)
                to_rank = received[2] % ranks
                if received in current.get(to_rank, ()):
                    gone += [(rank, message), (to_rank, received)]
        assert gone, "deadlock"
        for rank, message in gone:
            current[rank].remove(message)
        for rank, left in enumerate(calls):
            calls[rank] = [messages for messages in left if messages]


@pytest.mark.parametrize(("p", "m", "v"), [(1, 5, 1), (2, 6, 2), (3, 9, 3), (4, 4, 2), (8, 32, 2)])
def test_no_rank_waits_for_ever_if_every_call_blocks(p, m, v):
    lesson = load(SCRIPT)
    for schedule in (lesson.gpipe, lesson.one_forward_one_backward):
        orders = [schedule(rank, p, m) for rank in range(p)]
        assert_no_deadlock(lesson.add_messages(orders), last_stage=p - 1)
    if p > 1:
        orders = [lesson.interleaved(rank, p, m, v) for rank in range(p)]
        assert_no_deadlock(lesson.add_messages(orders), last_stage=p * v - 1)


# flags: words of the line
REFUSED = {"--model nano": "", "--chunks 5": "--chunks 5 10 9", "--seq-len 999": ""}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags, words in REFUSED.items():
        assert_refused(start(tmp_path, *flags.split()), *(words or flags).split())


FAULTS = {  # a line, and what stands in its place
    "a stage clips by its own norm": ("    dist.all_reduce(squared_norm)\n", ""),
    "1F1B warms up too long": ("warm_up=ranks - rank - 1)", "warm_up=ranks - rank)"),
    "a mean of means": (
        "self.targets[micro_batch], self.tokens)",
        "self.targets[micro_batch], (self.targets[micro_batch] >= 0).sum())",
    ),
}
OFTEN_PLANTED = "1F1B warms up too long"


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [OFTEN_PLANTED, *(in_long(fault) for fault in FAULTS if fault != OFTEN_PLANTED)]
)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    result = start(tmp_path, script=str(with_fault(SCRIPT, tmp_path, *FAULTS[fault])))
    assert result.code == 1, result.err[-3000:]
    assert "AssertionError" in result.err, result.err[-3000:]
