"""Sentences of the READMEs that the planner computes: each is computed here again."""

import json
import re
import shlex

import pytest
from support.harness import ROOT, run

from common.hardware import devices

ESTIMATE = "07_memory_tricks/estimate.py"


def page(name: str) -> str:
    """Return a page with its continued lines as one."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r" *\\\n *", " ", text)


def words_of(command: str) -> list[str]:
    """Return the words of a command, in an order that is the same for equal commands."""
    return sorted(re.split(r" (?=--|\S+\.py)", command))


def test_a_command_of_08_for_a_node_is_what_its_search_prints(tmp_path):
    text = page("docs/train_3d.md")
    search = re.search(rf"^python {ESTIMATE} (.*--search)$", text, re.MULTILINE)[1]
    result = run(ESTIMATE, tmp_path, *shlex.split(search))
    [recommended] = re.findall(r"^torchrun .*", result.out, re.MULTILINE)
    commands = re.findall(r"^torchrun .*--nproc_per_node=8 .*", text, re.MULTILINE)
    assert words_of(commands[1]) == words_of(recommended)  # the first one is FSDP alone

    # The docstring's command leaves out what is the default.
    script = page("08_model_parallel/train_3d.py")
    command = re.search(r"one node +(torchrun .*)", script)[1]
    defaults = {"--checkpointing none", "--dtype bf16", "--tp 1", "--replicate 1"}
    assert set(words_of(recommended)) - set(words_of(command)) == defaults
    assert set(words_of(command)) <= set(words_of(recommended))


def test_08_compares_its_first_command_with_two_others(tmp_path):
    text = page("docs/train_3d.md")
    search = re.search(rf"^python {ESTIMATE} (.*) --search$", text, re.MULTILINE)[1]
    fits = {}
    layouts = {
        "first": "--pp 2 --cp 2 --micro-batch-size 1",
        "fsdp": "--checkpointing selective --micro-batch-size 1",
        "tensor": "--tp 8 --checkpointing full",
    }
    for name, flags in layouts.items():
        flags = shlex.split(f"{search} {flags} --json plan.json")
        assert run(ESTIMATE, tmp_path, *flags).code == 0
        fits[name] = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    seconds = {name: plan["step_seconds"] for name, plan in fits.items()}
    slower = seconds["fsdp"] / seconds["first"] - 1
    less = (fits["first"]["total_bytes"] - fits["fsdp"]["total_bytes"]) / 2**30
    words = f"is {slower:.0%}".replace("%", " %") + f" slower and takes {less:.0f} GiB less"
    assert words in text.replace("\n", " ")
    assert 2 < seconds["tensor"] / seconds["first"] < 2.5


def test_a_70b_needs_as_many_nodes_as_06_says(tmp_path):
    """All weights trained by train_fsdp.py, checkpointed, on nodes of eight H100s of 80 GiB."""
    text = page("docs/finetune.md")
    base = "--model llama-70b --nodes-of 8 --link 50 --checkpointing full --compile "
    base += "--seq-len 2048 --micro-batch-size 1 --zero 3"
    fits = []
    for nodes in (1, 2, 3):
        gpus = 8 * nodes
        flags = f"{base} --gpus {gpus} --global-batch-size {gpus} --json plan.json"
        run(ESTIMATE, tmp_path, *shlex.split(flags))
        plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
        fits.append(plan["fits"])
    assert fits == [False, False, True]
    assert "use three nodes" in text
    offloaded = 16 * plan["parameters"] / 1e12
    assert f"{offloaded:.1f} TB of the node's CPU memory" in text.replace("\n", " ")


def test_a_30b_mixture_of_experts_takes_what_08_and_its_recipe_say(tmp_path):
    chapter = page("08_model_parallel/README.md")
    [command] = re.findall(rf"^python {ESTIMATE} (.*moe-30b-a3b.*)$", chapter, re.MULTILINE)
    recipe = page("docs/finetune.md")
    assert f"python {ESTIMATE} {command}\n" in recipe
    rows = {  # of the recipe: what differs from the command
        "all weights | full | 8 x 2,048": "",
        "all weights | none | 8 x 2,048": "--checkpointing none",
        "all weights | full | 512 x 4,096": "--seq-len 4096 --global-batch-size 512",
        "adapters | full | 8 x 2,048": "--adapters 16",
        "adapters | none | 8 x 4,096": "--adapters 16 --checkpointing none --seq-len 4096",
    }
    for name, flags in rows.items():
        flags = shlex.split(f"{command} {flags} --json plan.json")
        assert run(ESTIMATE, tmp_path, *flags).code == 0
        plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
        assert plan["fits"]
        seconds = plan["step_seconds"]
        cells = f"{seconds:.0f}" if seconds > 10 else f"{seconds:.2f}"
        cells += f" | {plan['tokens_per_second'] / 8:,.0f} |"
        gib = f"{plan['total_bytes'] / 2**30:.0f}"
        assert f"| {name} | {gib} | {cells}" in recipe
        what = "adapters of attention" if "adapters" in name else "all weights"
        if "| full | 8 x" in name:
            assert f"| {what}, 8 x 2,048 tokens | {gib} GiB | {cells}" in chapter
    states = plan["parameters"] * 16 / 8
    assert f"{states / 2**30:.0f} GiB a rank" in recipe


def test_what_else_is_in_a_gpus_memory_on_day_4(tmp_path):
    """The answer names the parts of llama-8b on 8 GPUs by the planner."""
    text = page("ONBOARDING.md").replace("\n", " ")
    result = run(ESTIMATE, tmp_path, "--model", "llama-8b", "--gpus", 8)
    gib = {}
    for name in ("activations", "logits", "gathered weights"):
        row = re.search(rf"^\| {name} .*", result.out, re.MULTILINE)[0]
        gib[name] = [float(number) for number in re.findall(r"[\d.]+", row)]
    # Activations are those of forward: backward makes a few more.
    assert f"here {gib['activations'][0]:.1f} GiB without checkpointing" in text
    assert f"({max(gib['logits']):.1f} GiB)" in text
    assert f"({max(gib['gathered weights']):.1f} GiB)" in text


def test_where_the_cache_of_a_decode_step_is_as_large_as_its_weights(tmp_path):
    """The takeaway of 09, for llama-8b in bf16 on an H200."""
    text = page("09_inference/README.md").replace("\n", " ")
    plans = []
    for sequences in (1, 28):
        flags = f"--model llama-8b --inference --seq-len 4096 --concurrency {sequences}"
        flags = [*shlex.split(flags), "--device", "NVIDIA H200", "--json", "plan.json"]
        assert run(ESTIMATE, tmp_path, *flags).code == 0
        plans.append(json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")))
    bandwidth = devices()["NVIDIA H200"]["bandwidth"]
    cache_per_token = plans[0]["kv_cache_bytes"] / 4096
    assert f"{cache_per_token:,.0f} bytes per token" in text

    # step time = (weights + batch x cache) / bandwidth
    weights = plans[0]["least_step_seconds"] * bandwidth - plans[0]["kv_cache_bytes"]
    assert f"{weights / 1e9:.1f} GB / 4.8 TB/s" in text
    assert f"{bandwidth / weights:.0f} tokens/s" in text
    both = weights + 28 * plans[0]["kv_cache_bytes"]
    assert plans[1]["least_step_seconds"] == pytest.approx(both / bandwidth)

    crossing = weights / cache_per_token  # tokens of all sequences together
    assert f"{round(crossing, -3):,.0f} tokens" in text
    assert f"{crossing / 4096:.0f} sequences of 4,096" in text
    assert plans[1]["kv_cache_bytes"] == pytest.approx(weights, rel=0.05)
