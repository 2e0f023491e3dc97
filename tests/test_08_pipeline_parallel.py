"""08_model_parallel/pipeline_parallel.py: every schedule trains as one process does, and waits as long as it must."""

import argparse
import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.harness import config_of, run

from old import data, model
from old.exits import UserError

SCRIPT = "08_model_parallel/pipeline_parallel.py"
pipeline = load(SCRIPT)
replay = load("08_model_parallel/_pipeline_parallel_replay.py")
stages = load("08_model_parallel/_pipeline_parallel_stages.py")
sizes = load("08_model_parallel/_pipeline_parallel_flags.py")
batches = load("08_model_parallel/_pipeline_parallel_batches.py")
picture = load("08_model_parallel/_pipeline_parallel_picture.py")
report = load("08_model_parallel/_pipeline_parallel_report.py")
Instruction = pipeline.Instruction
STEPS = 10
CLIP_NORM = 2.5  # some steps are clipped, and some are not
# 9 layers for 1 to 4 ranks with one or two stages each: no number but 1 and 3 divides them
SHAPE = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 9,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SIZES = [(1, 1), (1, 5), (2, 2), (2, 6), (3, 3), (3, 9), (4, 4), (4, 8), (8, 64)]  # ranks and micro-batches


def orders_of(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    if schedule == "interleaved 1F1B":
        return [pipeline.interleaved(rank, ranks, micro_batches, chunks) for rank in range(ranks)]
    build = {"GPipe": pipeline.gpipe, "1F1B": pipeline.one_forward_one_backward}[schedule]
    return [build(rank, ranks, micro_batches) for rank in range(ranks)]


ALL = [(name, *size, 1) for name in ("GPipe", "1F1B") for size in SIZES]
ALL += [("interleaved 1F1B", *size, chunks) for size in SIZES if size[0] > 1 for chunks in (2, 3)]


def short(order: list[Instruction]) -> str:
    return " ".join(f"{name[0]}{micro_batch}.{chunk}" for name, micro_batch, chunk in order).replace(".0", "")


# What a schedule is


def test_the_orders_of_the_papers():
    assert [short(order) for order in orders_of("GPipe", 2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [short(order) for order in orders_of("1F1B", 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    # Narayanan et al. 2021, Figure 4, with 2 devices
    assert [short(order) for order in orders_of("interleaved 1F1B", 2, 4, 2)] == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks"), ALL)
def test_the_bubble_is_that_of_the_formula(name, ranks, micro_batches, chunks):
    orders = orders_of(name, ranks, micro_batches, chunks)
    expected = Fraction(ranks - 1, chunks * micro_batches + ranks - 1)
    assert replay.idle_share(replay.replay(orders)) == expected
    assert replay.bubble_formula(name, ranks, micro_batches, chunks) == expected
    for order in orders:
        work = [
            (kind, i, chunk)
            for kind in ("Forward", "Backward")
            for i in range(micro_batches)
            for chunk in range(chunks)
        ]
        assert Counter(order) == Counter(Instruction(*each) for each in work)
    held = [replay.most_held(order) for order in orders]
    assert held == report.held_formula(name, ranks, micro_batches, chunks)


def test_what_a_rank_keeps():
    assert report.held_formula("GPipe", 4, 8, 1) == [8, 8, 8, 8]
    assert report.held_formula("1F1B", 4, 8, 1) == [4, 3, 2, 1]
    assert report.held_formula("interleaved 1F1B", 4, 8, 2) == [11, 9, 7, 5]


# Messages


def run_blocking(programs: list[list[Instruction]], stages_per_rank: int) -> None:
    """Carry the lists out with calls that block until both sides are there, matched by their order alone, as NCCL does.

    The strictest rules there are: a list that ends here ends with any backend. AssertionError at a deadlock.
    """
    ranks = len(programs)
    last = ranks * stages_per_rank - 1
    at = [0] * ranks
    have = set()

    def peer(rank: int, instruction: Instruction) -> int:
        name, _, chunk = instruction
        forward = name in ("SendActivations", "ReceiveGradients")
        return (chunk * ranks + rank + (1 if forward else -1)) % ranks

    def message(rank: int, instruction: Instruction) -> tuple:
        """What is sent: its kind, micro-batch and the stage that it is for."""
        name, micro_batch, chunk = instruction
        stage = chunk * ranks + rank
        if name.startswith("Send"):
            stage += 1 if name == "SendActivations" else -1
        return name.removeprefix("Send").removeprefix("Receive"), micro_batch, stage

    while any(at[rank] < len(programs[rank]) for rank in range(ranks)):
        before = list(at)
        for rank in range(ranks):
            if at[rank] == len(programs[rank]):
                continue
            instruction = name, micro_batch, chunk = programs[rank][at[rank]]
            stage = chunk * ranks + rank
            if name == "Forward":
                assert stage == 0 or ("Activations", micro_batch, stage) in have
                have.add((name, micro_batch, stage))
            elif name == "Backward":
                assert ("Forward", micro_batch, stage) in have
                assert stage == last or ("Gradients", micro_batch, stage) in have
                have.add((name, micro_batch, stage))
            elif name.startswith("Send"):
                assert ("Forward" if name == "SendActivations" else "Backward", micro_batch, stage) in have
                other = peer(rank, instruction)
                theirs = programs[other][at[other]]
                if not (theirs.name.startswith("Receive") and peer(other, theirs) == rank):
                    continue
                assert message(rank, instruction) == message(other, theirs), "two ranks take a message for another"
                have.add(message(rank, instruction))
                at[other] += 1
            elif name.startswith("Receive"):
                continue  # the sender moves both on
            at[rank] += 1
        assert at != before, f"deadlock at {[program[i] for program, i in zip(programs, at, strict=True)]}"


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks"), ALL)
def test_the_lists_end_even_if_every_call_blocks(name, ranks, micro_batches, chunks):
    programs = pipeline.add_messages(orders_of(name, ranks, micro_batches, chunks))
    run_blocking(programs, chunks)
    for rank, program in enumerate(programs):
        assert program[-1] == Instruction("Step")
        names = Counter(instruction.name for instruction in program)
        boundaries = chunks - (rank == ranks - 1), chunks - (rank == 0)  # to the stage after, to the one before
        assert names["SendActivations"] == names["ReceiveGradients"] == micro_batches * boundaries[0]
        assert names["SendGradients"] == names["ReceiveActivations"] == micro_batches * boundaries[1]


def test_two_that_send_first_deadlock():
    """The obvious place of the messages, beside what makes and needs them, does not end."""
    programs = []
    for rank, order in enumerate(orders_of("1F1B", 2, 2)):
        program = []
        for instruction in order:
            what, sends = ("Activations", rank == 0) if instruction.name == "Forward" else ("Gradients", rank == 1)
            if not sends:
                program.append(instruction._replace(name=f"Receive{what}"))
            program.append(instruction)
            if sends:
                program.append(instruction._replace(name=f"Send{what}"))
        programs.append(program)
    with pytest.raises(AssertionError, match="deadlock"):
        run_blocking(programs, 1)


def test_a_replay_sees_a_deadlock():
    orders = orders_of("GPipe", 2, 2)
    orders[0].reverse()
    with pytest.raises(AssertionError, match="deadlock"):
        replay.replay(orders)


# Stages


@pytest.mark.parametrize(("count", "layers"), [(1, 9), (2, 9), (4, 9), (8, 9), (9, 9), (5, 126)])
def test_every_layer_is_in_one_stage(count, layers):
    parts = [stages.layers_of(stage, count, layers) for stage in range(count)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert {len(part) for part in parts} <= {layers // count, -(-layers // count)}


def arguments(**changed) -> argparse.Namespace:
    given = {"model": "m.json", "chunks": 2, "micro_batch_size": 2, "global_batch_size": None}
    return argparse.Namespace(**{**given, **changed})


def test_the_sizes_that_fit():
    config = config_of(SHAPE)
    args = arguments()
    assert sizes.check_sizes(args, config, 4) == 16
    assert args.global_batch_size == 32
    assert sizes.check_sizes(arguments(chunks=1, global_batch_size=10), config, 4) == 5
    for ranks in (1, 2, 8, 16):
        assert sizes.load_config(sizes.UNTIED_NANO, 32, stages=2 * ranks).num_hidden_layers == max(8, 2 * ranks)


@pytest.mark.parametrize(
    ("changed", "ranks", "message"),
    [
        ({}, 5, r"--chunks 2 on 5 processes makes 10 stages, and m.json has 9 layers: .* use --chunks 1$"),
        ({"chunks": 1}, 10, r"--chunks 1 on 10 processes makes 10 stages.* use at most 9 processes$"),
        ({"global_batch_size": 7}, 2, r"--global-batch-size 7 is no whole .* --micro-batch-size 2: use 4 or 8$"),
        (
            {"global_batch_size": 4, "chunks": 1},
            3,
            r"--global-batch-size 4 makes 2 micro-batch.* 1F1B .* use 6 or more$",
        ),
        ({"global_batch_size": 10}, 4, r"makes 5 micro-batches of 2, .* 4 at a time.*: use 8 or 16, or --chunks 1$"),
    ],
)
def test_sizes_that_no_schedule_can_do(changed, ranks, message):
    with pytest.raises(UserError, match=message):
        sizes.check_sizes(arguments(**changed), config_of(SHAPE), ranks)


def test_the_picture_in_letters():
    timelines = replay.replay(orders_of("1F1B", 2, 3))
    assert [line.split()[-1] for line in picture.letters(timelines)] == ["ab..AAcBB.CC", ".aAAbBBcCC.."]


# Training


@pytest.fixture(scope="module")
def finished(request, once) -> dict:
    return once("08 pipeline", finish, request.param)


def finish(folder: Path, n: int) -> dict:
    result = start(folder, "--json", "s.json", "--plot", "p.png", nproc=n)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    summary = json.loads((folder / "s.json").read_text())
    return {**summary, "out": result.out, "picture": (folder / "p.png").read_bytes()[:4]}


FLAGS = ("--model", "m.json", "--device", "cpu", "--seq-len", 9, "--micro-batch-size", 3, "--clip-norm", CLIP_NORM)


def start(folder: Path, *flags, nproc: int | None, shape: dict | None = None, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "m.json").write_text(json.dumps(shape or SHAPE))
    return run(script, folder, *FLAGS, "--steps", STEPS, *flags, nproc=nproc)


RANKS = [1, 2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
each_number_of_ranks = pytest.mark.parametrize("finished", RANKS, indirect=True)


def one_process(sequences: int, shape: dict = SHAPE) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the whole model on the whole batch, by the mean over its tokens."""
    args = argparse.Namespace(seq_len=9, global_batch_size=sequences, micro_batch_size=3, seed=0)
    config = config_of(shape)
    stream = batches.read_batches(args, config, torch.device("cpu"))
    net = model.build("m.json", config, seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=stages.LEARNING_RATE, momentum=0.9)
    losses = []
    norms = []
    for _ in range(STEPS):
        batch = next(stream)
        inputs, targets = torch.cat(batch.inputs), torch.cat(batch.targets)
        loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), ignore_index=data.PADDING)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@each_number_of_ranks
def test_each_schedule_trains_as_one_process_does(finished):
    ranks = finished["world_size"]
    losses, norms = one_process(12 * ranks)
    assert max(norms) > CLIP_NORM > min(norms)  # clipping has had something to do, and something to leave alone
    rows = finished["schedules"]
    names = ["GPipe", "1F1B"] if ranks == 1 else ["GPipe", "1F1B", "interleaved 1F1B"]
    own = ["interleaved zero-bubble"] if ranks > 1 else []
    assert [row["schedule"] for row in rows] == [*names, *names, *own]
    for row in rows:
        assert row["losses"] == pytest.approx(losses, rel=1e-5), row["schedule"]
        assert row["gradient_norms"] == pytest.approx(norms, rel=1e-5), row["schedule"]
        assert max(row["relative_errors"].values()) <= 1e-5, row["schedule"]
    assert (finished["first_loss"], finished["last_loss"]) == pytest.approx((losses[0], losses[-1]), rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_eight_ranks_train_as_one_process_does(tmp_path):
    """17 layers in 8 and in 16 stages, and two micro-batches for each rank. The script checks messages and bytes."""
    shape = {**SHAPE, "num_hidden_layers": 17}
    result = start(tmp_path, "--global-batch-size", 48, "--json", "s.json", nproc=8, shape=shape)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    summary = json.loads((tmp_path / "s.json").read_text())
    losses, norms = one_process(48, shape)
    assert len(summary["schedules"]) == 7
    for row in summary["schedules"]:
        assert row["losses"] == pytest.approx(losses, rel=1e-5), row["schedule"]
        assert row["gradient_norms"] == pytest.approx(norms, rel=1e-5), row["schedule"]
        assert max(row["relative_errors"].values()) <= 1e-5, row["schedule"]
        assert row["bubble_replayed"] == row["bubble_formula"]


@each_number_of_ranks
def test_what_is_sent_kept_and_waited_for(finished):
    ranks = finished["world_size"]
    micro_batches = 4 * ranks
    assert finished["micro_batches"] == micro_batches
    for row in finished["schedules"]:
        chunks = row["stages_per_rank"]
        if row["by"] == "hand":
            messages = [micro_batches * 2 * chunks] * ranks
            messages[0] -= micro_batches
            messages[-1] -= micro_batches
            assert row["messages_per_step_per_rank"] == messages
            assert row["sent_per_step_bytes_per_rank"] == [4 * 3 * 9 * 36 * count for count in messages]
        if "zero" not in row["schedule"]:
            assert row["bubble_formula"] == float(Fraction(ranks - 1, chunks * micro_batches + ranks - 1))
        assert row["bubble_replayed"] == row["bubble_formula"]
        if row["schedule"] == "GPipe":  # by hand, and as torch's ranks have computed
            assert row["most_held_per_rank"] == [micro_batches] * ranks
        if row["schedule"] == "1F1B":
            assert row["most_held_per_rank"] == [*range(ranks, 0, -1)]
        assert 0 <= row["bubble_measured"]["min"] <= row["bubble_measured"]["max"] < 1
        assert row["bubble_measured"]["n"] == STEPS - 2


@each_number_of_ranks
def test_what_a_reader_sees(finished):
    out = finished["out"]
    assert out.count("checked: ") == 2
    pictures = [line.split()[-1] for line in out.splitlines() if line.startswith("    rank ")]
    ranks = finished["world_size"]
    assert len(pictures) == 2 * ranks * (2 if ranks == 1 else 4)  # replayed and recorded
    first = pictures[ranks : 2 * ranks]  # GPipe as recorded: all forwards, then all backwards
    for line in first:
        letters = line.replace(".", "")
        assert letters.lstrip("abcdefghijklmnop").isupper()
    assert finished["picture"] == b"\x89PNG"
    assert finished["tokens"] < STEPS * 12 * ranks * 9  # sequences have unequal lengths


def torch_order(rank: int, ranks: int, micro_batches: int, chunks: int, zero_bubble: bool) -> list[tuple]:
    """What torch's interleaved schedules compute, without the process group that the classes ask for."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "_get_1f1b_rank_ops"):
        pytest.skip("this torch builds its orders in another place")
    forwards = chunks * micro_batches
    step = 1 if zero_bubble else 2
    warm_up = schedules._get_warmup_ops(rank, chunks, ranks, ranks, micro_batches, multiply_factor=step)
    actions = schedules._get_1f1b_rank_ops(
        chunks,
        ranks,
        warm_up,
        forwards - warm_up,
        warm_up,
        rank,
        lambda op: op // ranks % chunks * ranks + rank,
        lambda op: (chunks - 1 - (op - warm_up) // ranks % chunks) * ranks + rank,
        num_1f1b_microbatches=rank if zero_bubble else 0,
        enable_zero_bubble=zero_bubble,
    )
    names = load("08_model_parallel/_pipeline_parallel_torch.py").NAMES
    actions = [action for action in actions if action is not None]
    return [(names[a.computation_type.name], a.microbatch_index, a.stage_index // ranks) for a in actions]


@pytest.mark.parametrize(("ranks", "rounds", "chunks"), [(2, 1, 2), (2, 4, 2), (3, 3, 3), (4, 2, 2), (8, 4, 3)])
def test_torch_s_interleaved_orders(ranks, rounds, chunks):
    """One is the order by hand. The other, zero-bubble, leaves one unit of time a rank idle."""
    micro_batches = ranks * rounds
    by_hand = orders_of("interleaved 1F1B", ranks, micro_batches, chunks)
    assert [torch_order(rank, ranks, micro_batches, chunks, False) for rank in range(ranks)] == by_hand
    zero_bubble = [torch_order(rank, ranks, micro_batches, chunks, True) for rank in range(ranks)]
    expected = Fraction(ranks - 1, 3 * chunks * micro_batches + ranks - 1)
    assert replay.idle_share(replay.replay(zero_bubble)) == expected
    assert replay.bubble_formula("interleaved zero-bubble", ranks, micro_batches, chunks) == expected


def test_what_is_compared_keeps_the_worst():
    """NaN is the worst of all, and rounding in a gradient that is almost zero is none."""
    pipeline_so_far = SimpleNamespace(relative_errors={})

    def error_after(got: float, expected: float, least: float = 0.0) -> float:
        tensors = torch.tensor([got]), torch.tensor([expected]), torch.tensor(least)
        stages.Pipeline.note_error(pipeline_so_far, "gradients", *tensors)
        return pipeline_so_far.relative_errors["gradients"]

    assert error_after(2.0, 2.0) == 0
    assert error_after(1e-9, 0.0, least=1e-3) == pytest.approx(1e-6)
    assert error_after(3.0, 2.0) == 0.5
    assert error_after(2.2, 2.0) == 0.5
    assert math.isnan(error_after(math.nan, 2.0))
    assert math.isnan(error_after(2.0, 2.0))


# What goes wrong


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "nano"), "--model nano has tied embeddings"),
        (("--chunks", 5), "--chunks 5 on 2 processes makes 10 stages"),
        (("--global-batch-size", 3), "1F1B needs one for each: use 6 or more"),
        (("--global-batch-size", 9), "interleaving takes 2 at a time"),
        (("--global-batch-size", 8), "--global-batch-size 8 is no whole number of micro-batches"),
        (("--seq-len", 65), "--seq-len 65 is over the limit"),
        (("--model", "giant"), "--model giant"),
        (("--clip-norm", 0), "--clip-norm"),
    ],
)
def test_a_wrong_flag_is_one_line_before_any_rank_starts(tmp_path, flags, message):
    result = start(tmp_path, *flags, nproc=None)
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert result.out == ""


@pytest.mark.long
def test_a_wrong_flag_is_one_line_from_many_ranks(tmp_path):
    result = start(tmp_path, "--global-batch-size", 15, nproc=3)
    assert result.code == 1  # torchrun's own
    told = [line for line in result.err.splitlines() if "error: " in line]
    assert len(told) == 1
    assert "interleaving takes 3 at a time" in told[0]
    assert "exitcode  : 2" in result.err


SPOILED = {
    "losses differ from one process": lambda rows: rows[0]["relative_errors"].update(losses=1e-3),
    "gradients differ from one process by nan": lambda rows: rows[2]["relative_errors"].update(gradients=float("nan")),
    "messages and bytes are": lambda rows: rows[1]["messages_per_step_per_rank"].insert(0, 9),
    "must hold": lambda rows: rows[1]["most_held_per_rank"].reverse(),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_claim_that_does_not_hold_fails(message):
    rows = [
        {
            "schedule": name,
            "by": "hand",
            "stages_per_rank": 1,
            "relative_errors": {"losses": 1e-7, "gradients": 1e-7},
            "messages_per_step_per_rank": [8, 16, 8],
            "sent_per_step_bytes_per_rank": [80, 160, 80],
            "most_held_per_rank": [8] * 3 if name == "GPipe" else [3, 2, 1],
        }
        for name in ("GPipe", "1F1B", "1F1B")
    ]
    report.check(rows, 8, 10)
    SPOILED[message](rows)
    with pytest.raises(AssertionError, match=message):
        report.check(rows, 8, 10)


@pytest.mark.long
def test_it_runs_bare(tmp_path):
    """Without flags and without torchrun, from a cold start."""
    result = run(SCRIPT, tmp_path, warm=False)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 2
    assert "untied-nano: 8 layers" in result.out


def test_the_schedules_are_the_first_thing_after_the_imports():
    source = (Path(pipeline.__file__)).read_text()
    after_imports = source.split("from old import", 1)[1].splitlines()[1:81]
    found = [line.split("(")[0].split()[-1] for line in after_imports if line.startswith(("def ", "class "))]
    schedules = ["gpipe", "one_forward_one_backward", "interleaved", "alternate"]
    assert found == ["Instruction", *schedules, "add_messages", "execute"]


@pytest.mark.gpu
def test_one_gpu(gpus, tmp_path):
    """The script's own checks are the test: one stage, no messages, the clock of the GPU."""
    check_on_gpus(gpus, tmp_path, 1)


@pytest.mark.gpu(n=2)
def test_over_nccl(gpus, tmp_path):
    check_on_gpus(gpus, tmp_path, 2)


def check_on_gpus(gpus, folder: Path, n: int) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, folder, "--device", "cuda", "--json", "s.json", nproc=n, **visible)
    assert result.code == 0, result.err
    summary = json.loads((folder / "s.json").read_text())
    assert summary["world_size"] == n
    for row in summary["schedules"]:
        assert 0 <= row["bubble_measured"]["median"] < 1
