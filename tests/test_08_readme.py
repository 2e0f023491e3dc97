"""Figures of docs/ on the costs of chapter 08 that follow from shapes: computed here again."""

import re

from support.harness import ROOT, run

from lm.shapes import SIZES, flops_per_token

NAMES = ("docs/costs.md", "docs/long_sequences.md")
PAGES = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in NAMES)
LLAMA_8B = SIZES["llama-8b"]
RANKS = 8
TOKENS = 8 * 8192  # of a step, on all ranks


def rows_of_table(first_heading: str) -> dict[str, list[str]]:
    """Return the cells of a table by their first cell. Figures have no commas."""
    table = re.search(rf"^\| {re.escape(first_heading)} \|.*\n\|.*\n((?:\|.*\n)+)", PAGES, re.M)
    rows = {}
    for line in table[1].splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = [re.sub(r"(?<=\d),(?=\d{3})", "", cell) for cell in cells]
    return rows


def sent_bytes() -> dict[str, tuple[float, int]]:
    """Return the bytes that a rank sends per token, and the tokens that it works on.

    FSDP sends as much for any number of tokens: its entry is for all tokens of a rank.
    """
    config = LLAMA_8B
    share = (RANKS - 1) / RANKS
    hidden = 2 * config.hidden_size  # bytes of a token's activations in bf16
    kv = 2 * 2 * config.num_key_value_heads * config.head_dim
    attention_parameters = 2 * config.hidden_size * (config.hidden_size + kv // 4)
    mlp_parameters = 3 * config.hidden_size * config.intermediate_size
    parameters = attention_parameters + mlp_parameters + 2 * config.hidden_size  # two norms
    own = TOKENS // RANKS
    return {
        "data, FSDP": (share * parameters * (2 + 2 + 4) / own, own),
        "tensor": (8 * share * hidden, TOKENS),
        "pipeline, 4 layers per stage": (2 * hidden / 4, TOKENS),
        "context, all-gather": (2 * (RANKS - 1) * kv, own),
        # keys and values make N - 1 hops in each pass, their gradients N of fp32
        "context, ring": ((2 * (RANKS - 1) + 2 * RANKS) * kv, own),
        "context, Ulysses": (2 * share * (2 * hidden + kv), own),
        "expert, 2 experts per token": (4 * 2 * share * hidden, own),
    }


def test_the_worked_example():
    rows = rows_of_table("kind")
    expected = sent_bytes()
    assert rows.keys() == expected.keys()
    for kind, (per_token, tokens) in expected.items():
        formula, tokens_in_table, megabytes, nvlink, network = rows[kind]
        total = per_token * tokens
        figure = per_token if kind != "data, FSDP" else total
        assert f"= {figure:.0f}" in formula
        assert int(tokens_in_table) == tokens
        assert megabytes == f"{total / 1e6:.0f}"
        assert nvlink == f"{total / 450e9 * 1e3:.1f} ms"
        assert network == f"{total / 50e9 * 1e3:.1f} ms"


def test_the_two_ratios():
    reached = 495e12  # FLOP/s, half of an H100's peak
    sent, own = sent_bytes()["data, FSDP"]
    parameters = sent * own / (RANKS - 1)  # 8 bytes per parameter, of which 7/8 are sent
    seconds_per_token = 6 * parameters / reached
    tensor, _ = sent_bytes()["tensor"]
    fsdp_row, tensor_row = rows_of_table("planned ratio").values()
    for column, link in enumerate((450e9, 50e9), 1):
        assert fsdp_row[column] == f"{sent * own / link / seconds_per_token:.0f}"
        assert tensor_row[column] == f"{tensor / link / (seconds_per_token / RANKS):.2f}"


def test_flops_of_long_sequences():
    rows = rows_of_table("tokens")
    assert len(rows) == 4
    for tokens, (matrices, attention, half, ratio) in rows.items():
        full_flops = flops_per_token(LLAMA_8B, int(tokens.replace(",", "")))
        matrix_flops = flops_per_token(LLAMA_8B, 0)
        attention_flops = full_flops - matrix_flops
        assert matrices == f"{matrix_flops / 1e9:.0f}"
        assert attention == f"{attention_flops / 1e9:.0f}"
        assert half == f"{attention_flops / 2e9:.0f}"
        assert ratio == f"{full_flops / (matrix_flops + attention_flops / 2):.2f}"


PLANNED = rows_of_table("planned")


def test_planned_figures_of_long_sequences(tmp_path):
    for name, (flags, gib, seconds, mfu, causal_mfu) in PLANNED.items():
        length = name.split(",")[0].lower()
        tokens = {"128k": 2**17, "256k": 2**18, "1m": 2**20}[length]
        model = ROOT / f"08_model_parallel/llama-8b-{length}.json"
        fixed = ("--model", model, "--seq-len", tokens, "--checkpointing", "full")
        fixed += ("--micro-batch-size", 1, "--global-batch-size", 1, "--json", "summary.json")
        result = run("07_memory_tricks/estimate.py", tmp_path, *fixed, *flags.strip("`").split())
        assert result.code == 0, result
        plan = result.summary
        assert gib.startswith(f"{plan['total_bytes'] / 2**30:.1f}"), name
        assert plan["fits"] == ("does not fit" not in gib), name
        assert seconds == f"{plan['step_seconds']:.1f}", name
        assert mfu == f"{plan['mfu']:.1%}", name
        assert causal_mfu == f"{plan['mfu_causal']:.1%}", name
