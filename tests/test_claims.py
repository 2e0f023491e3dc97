"""The computed figures of the claims, computed again, and the README's headline: what a row says is what is found."""

import json
import re

import pytest
import torch
from support.harness import ROOT, run
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

CLAIMS = (ROOT / "benchmarks/results/claims.md").read_text(encoding="utf-8")
ONE_LINERS = re.findall(r"`(python -c \"[^`]+\")`", CLAIMS)


def rows(claim: str) -> str:
    """All rows of one claim, as one text without thousands separators."""
    found = [line for line in CLAIMS.splitlines() if line.startswith(f"| {claim} |")]
    assert found, f"no row {claim}"
    return re.sub(r"(?<=\d),(?=\d{3})", "", "\n".join(found))


def flops(net: nn.Module, *inputs: torch.Tensor) -> int:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        net(*inputs)
    return counter.get_total_flops()


def test_a_one_liner_prints_what_its_row_says(tmp_path):
    assert ONE_LINERS
    wrong = []
    for number, command in enumerate(ONE_LINERS):
        code = command.removeprefix('python -c "').removesuffix('"')
        script = tmp_path / f"line{number}.py"
        script.write_text(
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}\n", encoding="utf-8"
        )
        result = run(script, tmp_path)
        row = next(line for line in CLAIMS.splitlines() if command in line).replace(command, "")
        missing = [printed for printed in result.out.split() if printed not in row.replace(",", "")]
        if result.code != 0 or missing:
            wrong.append(f"{command}: the row has no {missing} {result.err}")
    assert not wrong, "\n".join(wrong)


def test_every_claim_has_a_row_and_every_row_names_what_shows_it():
    for claim in [f"C{n}" for n in range(1, 16)] + [f"S{n}" for n in range(1, 20)]:
        assert rows(claim)
    heads = ("| id |", "| what |", "| what is said |", "| ---")
    lines = [line for line in CLAIMS.split("\n## Speed\n")[1].splitlines() if line.startswith("| ")]
    shown = re.compile(r"`(pytest|python|torchrun|make|pip) |\]\(http|to come")
    assert [line for line in lines if not line.startswith(heads) and not shown.search(line)] == []


def test_the_short_page_has_rows_of_the_long_one():
    found = CLAIMS.replace("](../../", "](")
    rows_of_page = [
        line
        for line in (ROOT / "CLAIMS.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith(("| what", "| ---"))
    ]
    assert rows_of_page
    for line in rows_of_page:
        assert line.split(" | ")[1] in found, line


def test_the_headline_is_what_was_measured():
    newest = max(
        ROOT.glob("benchmarks/results/*-loss-curves-*.json"), key=lambda file: file.stem[-10:]
    )
    measured = json.loads(newest.read_text(encoding="utf-8"))
    differences = measured["relative_differences"].values()
    first = max(max(values[: measured["claimed_steps"]]) for values in differences)
    whole = max(max(values) for values in differences)
    for figure in (first, whole):
        assert f"{figure:.1e}".replace("e-0", "e-") in (ROOT / "README.md").read_text(
            encoding="utf-8"
        )


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformer_on_512_by_512_has_two_readings():
    net = nn.Transformer().eval()
    with pytest.raises(TypeError, match="tgt"):
        net(torch.zeros(1, 512, 512))  # as the tutorial prints it: without a target
    batch_of_512 = torch.zeros(1, 512, 512)  # length 1: the default is [length, batch, hidden]
    length_512 = torch.zeros(512, 1, 512)
    for x in (batch_of_512, length_512):
        billions = flops(net, x, x) / 1e9
        assert f"{billions:.1f} GFLOP" in rows("C1")
        assert f"{billions / 2.3:.0f} GFLOP/s" in rows("C1")
        assert f"{billions / 28:.1f} TFLOP/s" in rows("C1")


def test_training_time_of_resnet50_and_bert():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        resnet = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(num_labels=1000)
        )
        images = torch.zeros(2, 3, 224, 224)
        encoder = transformers.BertModel(transformers.BertConfig()).encoder
    with FlopCounterMode(display=False) as counter:
        resnet(images).logits.sum().backward()
    # images of ImageNet, epochs
    resnet_flops = counter.get_total_flops() / len(images) * 1_281_167 * 90
    assert f"{resnet_flops / 1e18:.1f} EFLOP" in rows("C12")
    assert f"{resnet_flops / 1500 / 1e15:.1f} PFLOP/s" in rows("C12")
    assert f"{resnet_flops / 43_200 / 1e12:.0f} TFLOP/s" in rows("C12")

    parameters = sum(p.numel() for p in encoder.parameters())
    # as published: a million steps, nine in ten of length 128
    tokens = 256 * (900_000 * 128 + 100_000 * 512)
    bert_flops = 6 * parameters * tokens
    assert f"{bert_flops / 1e18:.1f} EFLOP" in rows("C12")
    assert f"{bert_flops / 3600 / 1e15:.1f} PFLOP/s" in rows("C12")


def test_accumulation_without_a_last_step_or_zero_grad_keeps_gradients():
    """Ten batches in groups of four: `if (i + 1) % 4 == 0: step()` takes eight, and two leave only their gradient."""
    x = torch.ones(1, requires_grad=True)
    optimizer, steps = torch.optim.SGD([x], lr=0.1), 0
    for i in range(10):
        x.square().sum().div(4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == 2
    assert x.grad == 2 * 2 * x / 4  # of two batches, and goes into the first step of the next epoch


@pytest.mark.full
def test_ddp_sends_the_weights_of_rank_0_once_and_torchrun_sets_error_handling(tmp_path):
    (tmp_path / "weights.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "net = torch.nn.Linear(3, 3, bias=False)\n"
        "torch.nn.init.constant_(net.weight, rank + 1)\n"
        "DistributedDataParallel(net)\n"
        "handling = os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING']\n"
        "line = f'rank {rank} holds {net.weight.mean().item()}, handling {handling}\\n'\n"
        "os.write(1, line.encode())\n"  # in one piece: both ranks write to the same pipe
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)\n",  # gloo's threads may abort the interpreter's own way out
        encoding="utf-8",
    )
    result = run(tmp_path / "weights.py", tmp_path, nproc=2, warm=False)  # the real torchrun
    assert result.code == 0, result.err
    assert "rank 0 holds 1.0" in result.out
    assert "rank 1 holds 1.0" in result.out
    assert "handling 1" in result.out  # torchrun sets it


def test_a_mismatch_of_types_or_devices_raises():
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.ones(2, 2) @ weight
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|invalid device"):
        weight.to(f"cuda:{torch.cuda.device_count()}")


def test_figures_of_the_h200_name_their_commit():
    for row in CLAIMS.splitlines():
        if row.startswith("| ") and "H200" in row:
            assert "309bbc5" in row, row
    for page in (*ROOT.glob("*.md"), *ROOT.glob("[0-9]*/*.md"), *ROOT.glob("docs/*.md")):
        text = page.read_text(encoding="utf-8")
        for paragraph in re.split(r"\n\n|\n(?=\|)", text):
            if "H200" in paragraph and "torch 2.11" in paragraph:
                assert "309bbc5" in paragraph, f"{page.relative_to(ROOT)}: {paragraph}"


def test_what_was_calibrated_is_told_apart_from_what_was_predicted():
    [row] = [row for row in rows("S13").splitlines() if "can be predicted" in row]
    calibrated, predicted = row.split("not calibrated")
    for figure in ("120.9", "4.43", "25.4"):
        assert figure in calibrated
    for figure in ("271.1", "268.0", "34.5", "33.9"):
        assert figure in predicted
