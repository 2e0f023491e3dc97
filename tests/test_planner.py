"""planner/ and estimate.py: beside torch's allocator, our own model on a CPU and an H200; the laws
that bytes and seconds keep, what the search finds, and what is refused."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support.chapter import load
from support.harness import ROOT, TINY, assert_refused, run

from common.measure import LiveBytes
from lm import shapes, weights
from lm.activation_checkpointing import checkpoint_blocks
from planner import machine, measured
from planner.memory import peak
from planner.plan import Plan, script_defaults
from planner.rank import Rank
from planner.search import MARGIN, layouts
from planner.shape import from_config
from planner.step import launch_seconds, stage_causes, step
from training.flags import TrainingParser

SCRIPT = "07_memory_tricks/estimate.py"
ESTIMATE = load(SCRIPT)
of_size = ESTIMATE.read_shape
H100 = machine.read("NVIDIA H100 80GB HBM3")
GIB = 2**30


def answer(folder, *flags) -> dict:
    result = run(SCRIPT, folder, *flags, "--json", "summary.json")
    assert result.code == 0, result.err
    return result.summary


# Beside torch's own allocator

# GiB of a step on a GPU that computes nothing: benchmarks/allocator.py counts them anew.
COUNTED = {
    "llama-1b 4 none": 40.34,
    "llama-1b 4 selective": 33.03,
    "llama-1b 4 full": 27.26,
    "llama-1b 1 full": 19.53,  # at the last gradient
    "llama-124m 16 none gpus 2": 17.26,
    "llama-124m 16 none gpus 2 zero 3": 15.36,
    "llama-124m 16 full gpus 2 zero 3": 10.38,
    "llama-124m 16 none gpus 2 zero 3 tp 2": 9.90,
    "llama-124m 64 none compile 1": 28.38,
    "llama-124m 16 none compile 1": 8.42,
    "llama-124m 16 none compile 1 micro_batches 3": 8.90,
    "llama-1b 4 full compile 1": 20.01,
}


def test_peaks_that_torchs_own_allocator_counted():
    for case, gib in COUNTED.items():
        size, batch, checkpointing, *more = case.split()
        own = {name: int(value) for name, value in zip(more[::2], more[1::2], strict=True)}
        own |= {"seq_len": shapes.recipe(size).seq_len, "micro_batch_size": int(batch)}
        plan = Plan(checkpointing=checkpointing, **own)
        assert peak(of_size(size), plan).step_bytes() == pytest.approx(gib * GIB, rel=0.01), case


def test_what_a_card_must_have():
    """llama-1b in 23 GiB, without the context, checkpointed: two sequences ran out of memory."""
    for batch, fits in ((2, False), (1, True)):
        memory = peak(
            of_size("llama-1b"), Plan(seq_len=2048, micro_batch_size=batch, checkpointing="full")
        )
        assert memory.allocated_bytes() < 23 * GIB
        assert (memory.allocated_bytes() + memory.fragmentation_bytes() < 23 * GIB) is fits


# Beside an H200


def test_what_was_measured_on_an_h200(tmp_path):
    """Predicted seconds are within 10 %, and bytes within 3 %, where the code is the same."""
    result = run("benchmarks/predictions.py", tmp_path, OUT=str(tmp_path))
    assert result.code == 0, result.err
    [file] = tmp_path.glob("planner-*.json")
    rows = [
        row for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if not row["reason"]
    ]
    predicted = [row for row in rows if row["seconds_use"] == "predicted"]
    assert len(predicted) >= 2
    for row in predicted:
        assert abs(row["seconds_error"]) < 0.10, row
    for row in rows:
        assert abs(row["bytes_error"]) < 0.03, row


# Beside our own model, on a CPU

STEPS = {
    "nano": (shapes.SIZES["nano"], 4, 64),
    "grouped": (shapes.Config(1031, 96, 200, 3, 6, 2, 16, 128), 3, 37),  # untied, everything odd
}


@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [("fp32", "none"), ("fp32", "selective"), ("bf16", "full")]
)
@pytest.mark.parametrize("name", ["grouped", pytest.param("nano", marks=pytest.mark.long)])
def test_a_step_of_our_model_holds_what_is_predicted(name, dtype, checkpointing):
    config, batch, length = STEPS[name]
    net = weights.build("nano", config, seed=0)
    checkpoint_blocks(net, checkpointing)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    inputs, targets = torch.randint(config.vocab_size, (2, batch, length)).unbind()

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            return net(inputs, targets)

    def one_step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    one_step()
    moments = []
    for state in optimizer.state.values():
        moments.extend(state.values())
    with LiveBytes([*net.parameters(), *net.buffers(), inputs, *moments]) as live:
        one_step()
    sizes = {"seq_len": length, "micro_batch_size": batch, "dtype": dtype, "on_cpu": True}
    predicted = peak(from_config(name, config), Plan(**sizes, checkpointing=checkpointing))
    assert predicted.allocated_bytes() == pytest.approx(live.peak, rel=0.03)
    with LiveBytes() as live:  # what lies between forward and backward is exact
        loss = forward()
        kept = live.now - loss.nbytes - 4  # the loss, and its sum of weights
    head_cast = 2 * config.vocab_size * config.hidden_size if dtype == "bf16" else 0
    lines = predicted.lines
    casts = lines["cast_bytes"] if checkpointing == "none" else head_cast
    # ids were there before
    log_softmax = 4 * batch * length * config.vocab_size
    token_ids = 16 * batch * length
    assert kept == lines["activation_bytes"] - token_ids + log_softmax + casts


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mixtral", "deepseek_v3"])
def test_every_family_counts_what_transformers_builds(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {
        **{
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "head_dim": 16,
        },
        **{"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64},
    }
    latent = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
    experts = {
        "moe_intermediate_size": 20,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
    }
    groups = {"num_key_value_heads": 3, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    by_kind = {
        "mixtral": {**sizes, "num_local_experts": 4, "num_experts_per_tok": 2},
        "deepseek_v3": {**sizes, **latent, **experts, **groups, "q_lora_rank": 14},
    }
    config = transformers.AutoConfig.for_model(kind, **by_kind.get(kind, sizes))
    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(config)
    shape = ESTIMATE.shape_from_json(kind, json.loads(config.to_json_string(use_diff=False)))
    assert shape.parameter_count() == sum(parameter.numel() for parameter in net.parameters())


# Laws


def states(memory) -> tuple[float, float, float]:
    lines = memory.lines
    return lines["weight_bytes"], lines["gradient_bytes"], lines["optimizer_bytes"]


def test_what_zero_divides():
    """DeepSpeed's optimizer, of stages 1 and 2, has its own copy of the weights."""
    shape = of_size("llama-1b")
    n = shape.parameter_count()
    expected = {
        0: (4 * n, 4 * n, 8 * n),
        1: (4 * n, 4 * n, 12 * n / 8),
        2: (4 * n, n / 2, 12 * n / 8),
        3: (n / 2, n / 2, n),
    }
    for zero, sizes in expected.items():
        assert states(peak(shape, Plan(gpus=8, zero=zero))) == sizes


def test_what_divides_activations_and_experts():
    shape = of_size("llama-8b")
    mixture = of_size("mixtral-8x7b")
    # tensor ranks keep the gathered inputs of attention, MLP and head
    token_ids = 16 * 4096
    inputs = 4096 * (2 * 32 + 1) * 2 * shape.hidden
    whole = peak(shape, Plan()).lines["activation_bytes"] - token_ids
    parted = peak(shape, Plan(gpus=4, tp=4)).lines["activation_bytes"]
    assert parted == whole / 4 + inputs * 3 / 4 + token_ids
    sharded, _, _ = states(peak(mixture, Plan(gpus=8, zero=3, ep=8)))
    assert sharded == pytest.approx(4 * mixture.parameter_count() / 8)
    # Each expert is on one of the 8 ranks; 16 ranks do not hold less of them.
    _, experts = mixture.layer_parameters(experts=True)
    rest = mixture.parameter_count() - experts * mixture.layers
    sharded, _, _ = states(peak(mixture, Plan(gpus=16, zero=3)))
    assert sharded == pytest.approx(4 * (rest / 16 + experts * mixture.layers / 8))
    # replicas hold what one sharded model holds
    replicated = peak(shape, Plan(gpus=32, zero=3, replicate=4)).lines
    assert peak(shape, Plan(gpus=8, zero=3)).lines == replicated


def test_rows_travel_four_times_a_layer_and_six_times_with_checkpointing():
    shape = of_size("moe-30b-a3b")
    plan = Plan(gpus=8, zero=3, ep=8)
    slow = replace(H100, link=1e6)  # so that starting a collective takes no part
    rows = plan.tokens * shape.active_experts * measured.EXPERT_IMBALANCE
    sent = shape.layers * rows * shape.hidden * 2 * 7 / 8
    for checkpointing, times in (("none", 4), ("selective", 4), ("full", 6)):
        each = replace(plan, checkpointing=checkpointing)
        seconds = step(shape, each, slow).causes["expert"]
        assert seconds == pytest.approx(times * sent / (1e6 * measured.LINK), rel=1e-3)


def test_gradients_that_accumulate_are_there_at_the_peak():
    shape = of_size("llama-1b")
    one, four = (peak(shape, Plan(seq_len=2048, micro_batches=n)).step_bytes() for n in (1, 4))
    assert four - one == 4 * shape.parameter_count()


def test_the_table_adds_up():
    for plan in (Plan(), Plan(gpus=8, zero=3, pp=2, micro_batches=4, checkpointing="full")):
        memory = peak(of_size("llama-8b"), plan)
        for moment, total in memory.moments.items():
            assert sum(row[moment] for row in memory.rows) == total
            assert min(row[moment] for row in memory.rows) >= 0
        assert memory.allocated_bytes() == max(memory.moments.values())


def test_what_costs_time():
    shape = of_size("llama-8b")
    plan = Plan(gpus=8, zero=3, micro_batches=4)
    full = step(shape, replace(plan, checkpointing="full"), H100).causes
    forward = full["matmuls"] / 3 + full["attention"] / 3.5
    assert 1 < full["recomputation"] / forward < 1.3  # with the kernels between matmuls
    slow = step(shape, replace(plan, gpus=16), replace(H100, network=1e9)).causes
    quick = step(shape, replace(plan, gpus=16), H100).causes
    assert [cause for cause in quick if slow[cause] > quick[cause]] == ["data"]
    across = replace(plan, gpus=16, tp=8)
    waits = []
    for size in (8, 4):
        waits.append(step(shape, across, replace(H100, gpus_per_node=size)).causes["tensor"])
    assert 0 < waits[0] < waits[1]
    staged = Plan(gpus=4, pp=4, micro_batches=12)
    bubble = step(shape, staged, H100).causes["bubble"]
    one_stage = step(shape, replace(staged, gpus=1, pp=1), H100)
    busy = (one_stage.seconds - one_stage.causes["optimizer"]) / 12
    # 1F1B: pp - 1 micro-batches of a stage
    assert bubble == pytest.approx(3 / 4 * busy, rel=0.05)


def test_context_ranks_compute_each_score_of_a_causal_mask_once():
    """8 context ranks have the scores and the attention FLOPs of one GPU, and no mask."""
    shape = of_size("llama-8b")
    one = Plan(zero=3, seq_len=8192, checkpointing="full")
    alone, shared = (step(shape, plan, H100).causes for plan in (one, replace(one, gpus=8, cp=8)))
    assert shared["attention"] == pytest.approx(alone["attention"] / 8)


def test_a_ring_of_context_ranks_holds_no_gathered_keys_and_hides_what_it_sends():
    shape = of_size("llama-8b")
    gathered = Plan(gpus=8, zero=3, cp=8, seq_len=8192, checkpointing="full")
    ring = replace(gathered, ring=True)
    # In backward a block has keys and values of this rank only, and its output once.
    blocks = [peak(shape, plan).lines["block_bytes"] for plan in (gathered, ring)]
    widths = 7 * 2 * shape.kv_width + shape.value_width
    assert blocks[0] - blocks[1] == 8192 / 8 * widths * 2
    # It sends more, beside its arithmetic. With little arithmetic it cannot hide that.
    slow = replace(H100, link=1e9)
    sent = [step(shape, plan, slow).causes["context"] for plan in (gathered, ring)]
    assert sent[1] > sent[0]
    assert step(shape, ring, H100).causes["context"] < step(shape, gathered, H100).causes["context"]


def test_what_a_pipeline_holds_and_waits_for():
    shape = of_size("llama-8b")
    plan = Plan(gpus=16, zero=3, pp=4, micro_batches=12)
    # Stages have about the same work, also the one with the head.
    busy = [sum(stage_causes(Rank(shape, plan, stage), H100).values()) for stage in range(4)]
    assert max(busy) / min(busy) < 1.2
    # Weights are gathered once a step and stay; or for each micro-batch.
    freed = replace(plan, reshard_after_forward=True)
    kept_bytes, freed_bytes = (
        peak(shape, each, stages=[1]).moments["end of forward"] for each in (plan, freed)
    )
    assert kept_bytes > freed_bytes
    slow = replace(H100, network=1e9)
    waits = [step(shape, each, slow).causes["data"] for each in (plan, freed)]
    assert waits[0] < waits[1] / 2
    # Two smaller stages on each rank: half of the bubble, and more activations.
    interleaved = replace(plan, schedule="interleaved")
    bubbles = [step(shape, each, H100).causes["bubble"] for each in (plan, interleaved)]
    assert bubbles[1] / bubbles[0] == pytest.approx(0.5, rel=0.05)
    held = [Rank(shape, each, 0).in_flight for each in (plan, interleaved)]
    assert held == [4, 5.5]


def test_a_compiled_block_of_tensor_ranks_starts_no_more_kernels_than_another():
    shape = of_size("llama-1b")
    for compiled, expected in ((False, measured.TENSOR_LAUNCHES), (True, 1)):
        alone = Rank(shape, Plan(compile=compiled))
        shared = Rank(shape, Plan(gpus=2, tp=2, compile=compiled))
        assert launch_seconds(shared) / launch_seconds(alone) == pytest.approx(expected)


# The search


def test_what_is_found_fits_and_is_ranked():
    shape = of_size("llama-70b")
    base = Plan(gpus=64, zero=3, seq_len=8192)
    found = layouts(shape, base, H100, sequences=256)
    seconds = [timed.seconds for _, _, timed in found]
    assert seconds == sorted(seconds)
    for plan, memory, timed in found[:50]:
        assert plan.tp * plan.pp * plan.cp * plan.dp == 64
        assert plan.dp * plan.micro_batch_size * plan.micro_batches == 256
        assert (
            peak(shape, plan).total_bytes()
            == memory.total_bytes()
            <= H100.memory_bytes * (1 - MARGIN)
        )
        assert step(shape, plan, H100).seconds == timed.seconds
    assert {
        (plan.tp, plan.pp) for plan, *_ in layouts(shape, base, H100, sequences=256, tp=4, pp=2)
    } == {(4, 2)}
    with pytest.raises(
        ValueError, match="--model llama-70b does not fit on --gpus 2 x NVIDIA H100"
    ):
        layouts(shape, replace(base, gpus=2), H100, sequences=2)


def test_what_is_found_for_experts_is_what_train_3d_runs():
    shape = of_size("moe-30b-a3b")
    base = Plan(gpus=8, zero=3, loss="chunked", checkpointing="full")
    size = {"micro_batch_size": 1, "checkpointing": "full"}
    eager = [plan for plan, *_ in layouts(shape, base, H100, sequences=8, **size)]
    assert {plan.ep for plan in eager} == {1, 2, 4, 8}
    assert {plan.pp for plan in eager} == {1}
    compiled = layouts(shape, replace(base, compile=True), H100, sequences=8, **size)
    assert {plan.ep for plan, *_ in compiled} == {1}


# The door


def test_bare_and_without_torch(tmp_path):
    """-S: without site-packages, and so without torch, numpy and transformers."""
    command = [sys.executable, "-S", str(ROOT / SCRIPT), "--json", "summary.json"]
    for flags, key in (
        ([], "fits"),
        (["--search"], "command"),
        (["--inference"], "kv_cache_bytes"),
    ):
        done = subprocess.run(
            [*command, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))[key]


def test_without_flags_it_describes_the_scripts_without_flags(tmp_path):
    args = TrainingParser("").parse_args([])
    defaults = script_defaults("cpu", model=None)
    for name in ("model", "global_batch_size", "compile", "checkpointing"):
        assert getattr(args, name) == getattr(defaults, name)
    plan = answer(tmp_path, "--device", "cpu")["plan"]
    assert plan["seq_len"] == args.seq_len
    assert plan["micro_batch_size"] * plan["micro_batches"] == args.global_batch_size


def test_a_batch_that_is_given_is_accumulated(tmp_path):
    flags = ("--model", "llama-124m", "--gpus", 2, "--micro-batch-size", 4)
    plan = answer(tmp_path, *flags)["plan"]
    assert (plan["micro_batch_size"], plan["micro_batches"]) == (4, 3)
    plan = answer(tmp_path, *flags, "--global-batch-size", 64)["plan"]
    assert plan["micro_batches"] == 8


def test_training(tmp_path):
    flags = ("--model", "llama-8b", "--gpus", 8, "--micro-batch-size", 1, "--seq-len", 8192)
    summary = answer(tmp_path, *flags, "--global-batch-size", 8)
    states = summary["weight_bytes"] + summary["gradient_bytes"] + summary["optimizer_bytes"]
    assert states == 16 * 8_030_261_248 / 8
    parts = summary["reserved_bytes"] + summary["context_bytes"] + summary["nccl_bytes"]
    assert summary["total_bytes"] == pytest.approx(parts, abs=4)
    assert summary["fits"] is True
    flops = 6 * (8_030_261_248 - 128_256 * 4096)
    attention = 12 * 32 * 4096 * 8192
    assert summary["flops_per_token"] == flops + attention
    assert summary["mfu_causal"] / summary["mfu"] == pytest.approx(
        (flops + attention / 2) / (flops + attention)
    )


@pytest.mark.parametrize(
    ("gpus", "device"), [(2, "NVIDIA L40S"), (8, "NVIDIA GeForce RTX 4090")], ids=["48GB", "24GB"]
)
def test_a_70b_in_4_bits_with_adapters_fits_on_small_cards(tmp_path, gpus, device):
    flags = ("--model", "llama-70b", "--gpus", gpus, "--device", device, "--adapters", 16)
    flags += ("--weights", "int4", "--checkpointing", "full", "--micro-batch-size", 1)
    found = answer(tmp_path, *flags, "--seq-len", 4096)
    in_blocks = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    others = 2 * (70_553_706_496 - in_blocks)
    adapters = 4 * found["optimizer_bytes"] / 8
    expected = (in_blocks * 4.5 / 8 + others) / gpus + adapters
    assert found["weight_bytes"] == pytest.approx(expected)
    assert found["fits"]


def test_inference(tmp_path):
    flags = ("--model", "llama3-8b", "--inference", "--concurrency", 128, "--seq-len", 1024)
    summary = answer(tmp_path, *flags)
    assert summary["kv_cache_bytes"] == 131_072 * 128 * 1024
    assert summary["weight_bytes"] == 2 * 8_030_261_248
    read = summary["weight_bytes"] - 2 * 128_256 * 4096 + summary["kv_cache_bytes"]
    assert summary["least_step_seconds"] == pytest.approx(read / 3.35e12)
    assert summary["step_seconds"] > summary["least_step_seconds"]
    halved = answer(
        tmp_path,
        *flags,
        "--tp",
        2,
        "--kv-cache-dtype",
        "fp8",
        "--weights",
        "int4",
        "--group-size",
        64,
    )
    assert halved["kv_cache_bytes"] == summary["kv_cache_bytes"] / 4
    matrices = 7_504_658_432
    embedding = 128_256 * 4096
    norms = 65 * 4096
    assert halved["weight_bytes"] == pytest.approx(
        matrices * (0.5 + 4 / 64) / 2 + 2 * (embedding + norms), abs=1
    )


@pytest.mark.full
def test_the_command_starts(tmp_path):
    flags = ("--search", "--model", "nano", "--gpus", 2, "--seq-len", 32, "--global-batch-size", 4)
    summary = answer(tmp_path, *flags, "--dtype", "fp32")
    script = next(
        word
        for word in summary["command"].split()
        if word.endswith("train.py") or "train_3d" in word
    )
    own = summary["command"].split(f"{script} ")[1].split()
    assert "torchrun" in summary["command"]
    result = run(
        script, tmp_path, *own, "--steps", 1, "--device", "cpu", "--json", "summary.json", nproc=2
    )
    assert result.code == 0, result.err
    assert result.summary["tokens"] == 4 * 32


SMALL_CARDS = re.findall(
    r"^(\w+ .*?)  # .+: ([\d.]+) GiB$",
    (ROOT / "docs/machines.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
assert SMALL_CARDS


def test_what_the_page_says_of_small_cards(tmp_path):
    for command, gib in SMALL_CARDS:
        script, *flags = command.split()[3 if "torchrun" in command else 1 :]
        plan = ["--gpus", 2 if "torchrun" in command else 1, "--zero", 0]
        if script.startswith("09_inference"):
            plan = ["--inference", "--seq-len", 4096]
        found = answer(tmp_path, *flags, *plan)["total_bytes"] / GIB
        assert found == pytest.approx(float(gib), abs=0.051), command


REFUSED = {  # flags: words of the message
    "--tp 3 --gpus 3 --model llama-8b": (
        "--tp 3",
        "32",
        "2",
    ),  # heads, and the nearest size that divides them
    "--tp 8 --pp 2 --gpus 8 --model llama-8b": ("--tp", "--pp", "16", "--gpus 8"),
    "--ep 2 --gpus 2": ("--ep 2", "llama-124m"),
    "--replicate 2 --zero 1": ("--replicate 2", "FSDP"),
    "--seq-len 9000 --model llama-8b": ("--seq-len 9000", "8192"),
    "--device l40": ("l40", "NVIDIA L40S"),
    "--model nothing": ("--model nothing",),
    "--model config.json": ("gpt2", "llama"),
    "--global-batch-size 12 --gpus 8": ("--global-batch-size 12", "8"),
    "--search --model moe-30b-a3b --gpus 8 --pp 2": ("--pp 2", "experts", "--ep"),
    "--search --model moe-30b-a3b --gpus 8 --ep 8 --compile": ("--compile", "--ep 8"),
    "--search --model llama-405b --gpus 8": ("--model llama-405b", "--gpus 8"),
    "--inference --zero 3": ("--zero",),
    "--zero 1 --tp 2": ("--zero 1", "train_zero.py"),
    "--ring": ("--ring", "--cp"),
    "--weights int4": ("--weights int4", "--adapters"),
    "--schedule interleaved": ("--schedule interleaved", "--pp"),
    "--cp 8 --seq-len 1000 --gpus 8": ("--cp", "16", "1000"),
}


def test_a_wrong_flag_is_one_line_and_code_2(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY, "model_type": "gpt2"}), encoding="utf-8"
    )
    for flags, words in REFUSED.items():
        assert_refused(run(SCRIPT, tmp_path, *flags.split()), *words)


# On a GPU

RUNS = {"nano": 24, "llama-124m": 8, "llama-1b": 2}  # sequences of the model's own length


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("script", ["04_amp/train.py", "06_fsdp_zero/train_fsdp.py"])
@pytest.mark.parametrize("name", RUNS)
def test_the_peak_is_what_a_gpu_allocates(name, script, gpu_run, tmp_path):
    flags = ("--dtype", "bf16", "--steps", 3, "--model", name)
    flags += ("--global-batch-size", RUNS[name], "--micro-batch-size", RUNS[name])
    sharded = script.endswith("train_fsdp.py")
    files = ("--run-dir", tmp_path / "run", "--json", "summary.json")
    result = gpu_run(script, tmp_path, *flags, *files, nproc=1 if sharded else None)
    assert result.code == 0, result.err
    sizes = {"seq_len": shapes.recipe(name).seq_len, "micro_batch_size": RUNS[name]}
    predicted = peak(of_size(name), Plan(**sizes, zero=3 if sharded else 0)).allocated_bytes()
    shutil.rmtree(tmp_path / "run")  # a checkpoint of llama-1b is 15 GB
    workspaces = 32 * 2**20 if name == "nano" else 0  # a guess, and a quarter of so small a peak
    assert predicted == pytest.approx(result.summary["peak_memory_bytes"], rel=0.03, abs=workspaces)
