"""10_post_training/dpo.py: equal on any number of ranks, and equal to TRL's loss."""

import types
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import ROOT, Result, run

SCRIPT = "10_post_training/dpo.py"
# Few steps, of sizes that neither two nor three ranks divide.
SMALL = {
    "STEPS = 20\n": "STEPS = 3\n",
    "PAIRS = 64 ": "PAIRS = 25 ",
    "SFT_STEPS = 400\n": "SFT_STEPS = 4\n",
    "SFT_ROWS = 128 ": "SFT_ROWS = 31 ",
    "    assert accuracy_before < 0.3, accuracies\n": "",
    "    assert accuracy_after > 0.6, accuracies\n": "",
}


def run_small(folder: Path, nproc: int | None = None) -> Result:
    """Run a copy with few steps."""
    source = (ROOT / SCRIPT).read_text(encoding="utf-8")
    for line, edited in SMALL.items():
        assert source.count(f"\n{line}") == 1, line
        source = source.replace(f"\n{line}", f"\n{edited}")
    script = folder / "dpo.py"
    script.write_text(source, encoding="utf-8")
    result = run(str(script), folder, "--beta", 0.5, nproc=nproc)
    assert result.code == 0, result
    return result


def table(result: Result) -> torch.Tensor:
    """Return the printed numbers, [steps, columns]."""
    rows = []
    for line in result.out.splitlines():
        if line[:4].strip().isdigit():
            rows.append([float(cell) for cell in line.split()])
    return torch.tensor(rows)


@pytest.mark.parametrize("nproc", [2, 3])
def test_the_number_of_ranks_changes_nothing(nproc, once, tmp_path):
    baseline = once("dpo", run_small)
    expected = table(baseline)
    assert expected.shape == (3, 7)
    *_, norms = expected.unbind(dim=1)
    assert norms.min() > 0.01  # something is learned
    result = run_small(tmp_path, nproc)
    actual = table(result)
    # In the first step margins are 0 up to rounding, so any share of them may be above 0.
    actual[0, 2] = expected[0, 2]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=3e-6)
    checked = [line for line in result.out.splitlines() if line.startswith("checked: ")]
    assert len(checked) == 3


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_the_loss_is_that_of_trl(beta):
    """Compare losses and gradients of the logits, where answers of a pair differ in length."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer")
    utils = pytest.importorskip("trl.trainer.utils")
    dpo = load(SCRIPT)
    numbers = ["407", "001", "222", "980", "314"]
    pairs = len(numbers)
    texts = [dpo.make_text(number, is_reversed=True) for number in numbers]
    texts += [dpo.make_text(number, is_reversed=False) for number in numbers]
    sequences = dpo.encode(texts)
    torch.manual_seed(0)
    logits = torch.randn(2 * pairs, sequences.shape[1] - 1, dpo.VOCABULARY)
    logits = logits.to(sequences.device).requires_grad_()
    reference = -30 + torch.randn(2, pairs, device=sequences.device)

    chosen, rejected = dpo.pair_logprobs(lambda tokens: logits.flatten(0, 1), numbers)
    losses, margins = dpo.dpo_loss(chosen, rejected, *reference, beta)
    loss = losses.sum() / pairs
    [gradient] = torch.autograd.grad(loss, logits)
    assert margins.abs().max() > beta  # not at the first step, where all margins are 0

    def model(input_ids, labels, **options):
        targets = labels[:, 1:]
        mask = targets != -100
        logprobs = utils.selective_log_softmax(logits, targets.clamp(min=0), row_mask=mask)
        nothing = torch.zeros_like(logprobs)
        return types.SimpleNamespace(
            log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=mask
        )

    # TRL's method on an object that has what the method reads: no Trainer.
    accelerator = types.SimpleNamespace(
        device=sequences.device, gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    fake = types.SimpleNamespace(
        model=types.SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    is_answer = sequences != dpo.PADDING
    is_answer[:, : dpo.PROMPT_TOKENS] = False
    inputs = {
        "input_ids": sequences,
        "attention_mask": (sequences != dpo.PADDING).long(),
        "completion_mask": is_answer.long(),
        "ref_chosen_logps": reference[0],
        "ref_rejected_logps": reference[1],
    }
    expected = trainer.DPOTrainer._compute_loss(fake, model, inputs, return_outputs=False)
    [expected_gradient] = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)
    metrics = fake._metrics["eval"]
    assert metrics["rewards/margins"] == pytest.approx([margins.mean().item()], rel=1e-5)
    assert metrics["logps/chosen"] == pytest.approx([chosen.mean().item()], rel=1e-6)


MANY_RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "65"}


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        ("--beta 0", {}, ("--beta", "0.0")),
        ("--beta nan", {}, ("--beta", "nan")),
        ("", MANY_RANKS, ("PAIRS=64", "65")),
    ],
)
def test_what_cannot_run_ends_with_code_2(flags, env, words, tmp_path):
    result = run(SCRIPT, tmp_path, *flags.split(), **env)
    assert result.code == 2
    *_, error = result.err.splitlines()
    assert [word for word in words if word not in error] == []


@pytest.mark.full
def test_it_runs_as_a_reader_starts_it(tmp_path):
    result = run(SCRIPT, tmp_path, nproc=2, warm=False)
    assert result.code == 0, result
    assert "checked: held-out accuracy" in result.out
