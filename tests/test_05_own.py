"""05_ddp/own_images.py and own_gpt2.py: a model and data of one's own in train.py."""

import re

import pytest
from support.harness import ROOT, assert_refused, in_full, run, with_prelude

from lm import shapes

PEAK_FLOPS = 1e12
# A CPU has no data sheet: give it one, so that MFU is known.
KNOWN_PEAK = f"""
from common import hardware
hardware.peak_flops = lambda *_: {PEAK_FLOPS}
"""
FLAGS = ["--device", "cpu", "--dtype", "fp32", "--global-batch-size", 12, "--lr", "1e-3"]
FLAGS += ["--seq-len", 32, "--warmup-steps", 2, "--log-every", 1, "--json", "summary.json"]
DATA = {
    "05_ddp/own_images.py": [],
    "05_ddp/own_gpt2.py": ["--data", ROOT / "tests/data/text.txt"],
}

# Per image, 2 FLOPs per multiplication and addition: two convolutions with 3 x 3 kernels, one
# linear layer. Backward takes twice as many as forward.
FIRST_CONV = 2 * 16 * 16 * 32 * 3 * 9
SECOND_CONV = 2 * 8 * 8 * 64 * 32 * 9
LINEAR = 2 * 64 * 8 * 8 * 10
# Per token of the GPT-2. Matmuls: 6 FLOPs per parameter. The embedding of positions is looked up.
POSITIONS = 32 * 128
EMBEDDINGS = 256 * 128 + POSITIONS
BLOCK = 12 * 128 * 128 + 13 * 128
GPT2_PARAMETERS = EMBEDDINGS + 4 * BLOCK + 2 * 128
FLOPS = {
    "05_ddp/own_images.py": 3 * (FIRST_CONV + SECOND_CONV + LINEAR),
    "05_ddp/own_gpt2.py": 6 * (GPT2_PARAMETERS - POSITIONS) + 12 * 4 * 128 * 32,
}


def test_the_formula_of_the_readme_is_that_of_the_scripts():
    readme = (ROOT / "docs/your_model.md").read_text(encoding="utf-8")
    formula = re.search(r"`(6 \* \(parameters - looked_up\) .*?)`", readme)[1]
    for name in ("llama-8b", "nano"):  # its embedding is not tied to the head, and it is
        config = shapes.SIZES[name]
        tied = config.tie_word_embeddings
        values = {
            "parameters": shapes.parameter_count(config),
            "looked_up": 0 if tied else config.vocab_size * config.hidden_size,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "head_dim": config.head_dim,
            "seq_len": 64,
        }
        assert eval(formula, values) == shapes.flops_per_token(config, 64)


def run_own(script, folder, *flags, nproc):
    started = with_prelude(script, folder, KNOWN_PEAK)
    flags = [*FLAGS, *DATA[script], "--run-dir", folder / "run", *flags]
    result = run(started, folder, *flags, nproc=nproc)
    assert result.code == 0, result
    return result


@pytest.mark.parametrize("script", ["05_ddp/own_gpt2.py", in_full("05_ddp/own_images.py")])
def test_two_ranks_have_the_losses_of_one_and_resume(script, tmp_path):
    one = run_own(script, tmp_path / "one", "--steps", 8, nproc=None)
    two = run_own(script, tmp_path / "two", "--steps", 8, "--save-every", 4, nproc=2)
    for column in ("loss", "val_loss"):
        assert two.column(column) == pytest.approx(one.column(column), rel=1e-5)
    first, *later = one.column("loss")
    assert min(later) < first

    # Resume after step 4, on another number of ranks.
    (tmp_path / "two/run/step-00000008").rename(tmp_path / "step-00000008")
    resumed = run_own(script, tmp_path / "two", "--steps", 8, "--resume", nproc=1)
    assert "resuming from" in resumed.out
    assert resumed.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)


@pytest.mark.parametrize("script", DATA)
def test_mfu_counts_the_operations_of_the_model(script, tmp_path):
    summary = run_own(script, tmp_path, "--steps", 3, "--keep", 0, nproc=None).summary
    flops = summary["mfu"] * PEAK_FLOPS * summary["world_size"] / summary["tokens_per_second"]
    assert flops == pytest.approx(FLOPS[script], rel=1e-6)
    if script == "05_ddp/own_gpt2.py":
        assert summary["parameters"] == GPT2_PARAMETERS


def test_a_run_of_another_model_is_not_resumed(tmp_path):
    run_own("05_ddp/own_images.py", tmp_path, "--steps", 2, nproc=None)
    flags = [*FLAGS, *DATA["05_ddp/own_gpt2.py"], "--run-dir", tmp_path / "run", "--resume"]
    assert_refused(run("05_ddp/own_gpt2.py", tmp_path, *flags), "--run-dir", "other settings")
