"""06_fsdp_zero/finetune.py and mixtures of experts: steps of transformers, packing, adapters."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.chapter import load
from support.checkpoints import gradients, saved
from support.harness import ROOT, Result, assert_refused, drop_after, in_full, run, train

from lm import chats, training_rows
from training.batches import PADDING, Batches
from training.optim import lr_factor

SCRIPT = "06_fsdp_zero/finetune.py"
PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"
SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
QWEN = {
    "model_type": "qwen3_moe",
    **SMALL,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
MIXTRAL = {"model_type": "mixtral", **SMALL, "num_local_experts": 4}
STEPS = 3
BATCH = 12
LR = 1e-3
WARMUP = 1
FLAGS = (
    "--data",
    PAIRS,
    "--seq-len",
    128,
    "--lr",
    LR,
    "--save-dtype",
    "fp32",
    "--warmup-steps",
    WARMUP,
)
TRAINED = (*FLAGS, "--adapters", 0, "--steps", STEPS, "--global-batch-size", BATCH)


def write_model(folder: Path, content: dict) -> str:
    """A folder of transformers with random weights, also in its norms."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**content)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0 if parameter.ndim > 1 else 1, 0.1)
    model.save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.fixture(scope="module")
def model(once):
    """model(content): its folder."""

    def folder(content: dict) -> str:
        return once(content["model_type"], partial(write_model, content=content))

    return folder


def read(folder: Path | str):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def columns(result: Result) -> dict[str, list]:
    return {name: result.column(name) for name in ("loss", "grad_norm", "val_loss")}


def train_theirs(folder: Path, name: str) -> dict:
    """Train with transformers: each global batch in one process, as one padded micro-batch."""
    theirs = read(name).train()
    theirs.get_input_embeddings().padding_idx = None
    script = load(SCRIPT)
    args = script.flags.TrainingParser("").parse_args(["--data", str(PAIRS)])
    args.too_long = "skip"
    args.seq_len = 128
    args.global_batch_size = BATCH
    helper = load("06_fsdp_zero/_finetune.py")
    corpus, _ = helper.load_chats(args, chats.read_chat_format(name), script.chat_rows)
    rows = training_rows.Rows(corpus.train, args.seq_len)
    held_out = training_rows.Rows(corpus.held_out, args.seq_len)
    batches = Batches(rows, held_out, args, rank=0, world_size=1)
    optimizer = torch.optim.AdamW(theirs.parameters(), LR, (0.9, 0.95), weight_decay=0)
    found = {"loss": [], "grad_norm": [], "expert_tokens": []}
    for step in range(STEPS):
        pairs = rows.__getitems__(batches.global_batch(step))
        inputs, targets = map(torch.stack, zip(*pairs, strict=True))
        mask = inputs != PADDING
        output = theirs(inputs * mask, attention_mask=mask.long())
        ce = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        loss = ce + SMALL["router_aux_loss_coef"] * output.aux_loss
        loss.backward()
        found["loss"].append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        found["grad_norm"].append(norm.item())
        if step == 0:
            gradients_of_theirs = {n: p.grad.clone() for n, p in theirs.named_parameters()}
        found["expert_tokens"].append(2 * mask.sum().item())
        optimizer.param_groups[0]["lr"] = LR * lr_factor(step, "cosine", WARMUP, STEPS)
        optimizer.step()
        optimizer.zero_grad()
    theirs.save_pretrained(folder / "trained")
    found["gradients"] = {}
    for name, gradient in gradients_of_theirs.items():
        if name.endswith("gate_up_proj"):
            gate, up = gradient.chunk(2, dim=1)
            found["gradients"][name.replace("gate_up", "gate")] = gate
            found["gradients"][name.replace("gate_up", "up")] = up
        else:
            found["gradients"][name] = gradient
    return {**found, "folder": str(folder / "trained")}


@pytest.mark.parametrize(
    ("content", "nproc", "micro", "flags"),
    [
        pytest.param(QWEN, 2, 2, ("--ep", 2), id="qwen, experts on 2 ranks"),
        in_full(MIXTRAL, 3, 4, ()),
        in_full(QWEN, 1, 12, ("--checkpointing", "full")),
        in_full(QWEN, 2, 3, ("--loss", "plain", "--checkpointing", "selective")),
        in_full(QWEN, 4, 1, ("--ep", 2, "--loss", "plain", "--checkpointing", "selective")),
        in_full(QWEN, 4, 3, ("--ep", 4, "--checkpointing", "full")),
        in_full(MIXTRAL, 4, 1, ("--ep", 4)),
    ],
)
def test_steps_are_those_of_transformers_on_the_whole_batch(
    tmp_path, model, once, content, nproc, micro, flags
):
    """Losses with the balance loss, norms, gradients, the saved model. Padding is not counted."""
    name = model(content)
    expected = once("theirs", train_theirs, name)
    flags = (*TRAINED, "--model", name, "--micro-batch-size", micro, *flags)
    result = train(SCRIPT, tmp_path, *flags, "--save-every", 1, nproc=nproc)
    for column in ("loss", "grad_norm"):
        assert result.column(column) == pytest.approx(expected[column], rel=1e-5), column
    found = gradients(tmp_path)
    assert found.keys() == expected["gradients"].keys()
    for parameter, gradient in found.items():
        assert error(gradient, expected["gradients"][parameter]) < 1e-5, parameter
    for step, layers in enumerate(result.column("expert_tokens")):
        assert [sum(layer) for layer in layers] == [expected["expert_tokens"][step]] * len(layers)
    trained = read(tmp_path / "run/model")
    theirs = read(expected["folder"])
    tokens = torch.arange(64)[None]
    assert error(trained(tokens).logits, theirs(tokens).logits) < 1e-4
    assert result.summary["transformers_error"] < 1e-5


def test_packed_chats_are_trained_as_padded_ones_and_resumed_on_three_ranks(tmp_path, model):
    """Each step takes a whole epoch: 29 rows, or the six packed rows that they are put into."""
    flags = (*FLAGS, "--adapters", 0, "--model", model(QWEN), "--steps", 2)
    padded_flags = ("--global-batch-size", 29, "--seq-len", 128, "--balance-loss", 0.2)
    padded = train(SCRIPT, tmp_path / "padded", *flags, *padded_flags)
    packed_flags = (*flags, "--global-batch-size", 6, "--packing", "--seq-len", 345)
    packed_flags += ("--balance-loss", 0.2, "--micro-batch-size", 1)
    train(SCRIPT, tmp_path, *packed_flags, "--save-every", 1, "--ep", 2, nproc=2)
    drop_after(tmp_path, 1)
    resumed = train(SCRIPT, tmp_path, *packed_flags, "--resume", nproc=3)
    for name, expected in columns(padded).items():
        assert resumed.column(name) == pytest.approx(expected, rel=1e-5), name
    assert resumed.column("expert_tokens") == padded.column("expert_tokens")
    other = (*packed_flags, "--resume", "--balance-loss", 0.3)
    assert_refused(train(SCRIPT, tmp_path, *other, code=2), "--balance-loss 0.3")


@pytest.mark.full
def test_adapters_of_attention_open_with_peft(tmp_path, model):
    """Experts and router are frozen. The balance loss trains the adapters, too."""
    peft = pytest.importorskip("peft")
    base = model(MIXTRAL)
    flags = (*FLAGS, "--model", base, "--steps", 4, "--global-batch-size", 6, "--adapters", 4)
    flags += ("--lr", 1e-2)
    one = train(SCRIPT, tmp_path / "one", *flags)
    result = train(SCRIPT, tmp_path, *flags, "--micro-batch-size", 1, "--ep", 2, nproc=2)
    for name, expected in columns(one).items():
        assert result.column(name) == pytest.approx(expected, rel=1e-5), name
    names = saved(tmp_path, 4)["model"]
    assert len(names) == 2 * 4 * 3  # A and B of four matrices in three layers
    tokens = torch.arange(64)[None]
    expected = read(tmp_path / "run/model")(tokens).logits
    adapted = peft.PeftModel.from_pretrained(read(base), tmp_path / "run/adapter")
    assert error(adapted(tokens).logits, expected) < 1e-5
    assert error(read(base)(tokens).logits, expected) > 1e-2
    assert result.summary["val_loss"] < result.summary["val_loss_before"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--target-modules q_proj,up_proj", ("--target-modules q_proj,up_proj", "v_proj")),
        ("--weights int4", ("--weights int4", "mixture of experts")),
        ("--balance-bias 0.001", ("--balance-bias 0.001", "--balance-loss")),
        ("--ep 3", ("--ep 3", "4 experts")),
        ("--ep 2", ("--ep 2", "1 ranks")),
    ],
)
def test_what_a_mixture_cannot_have_is_one_line(tmp_path, model, flags, words):
    given = ("--device", "cpu", "--data", PAIRS, "--model", model(MIXTRAL), *flags.split())
    assert_refused(run(SCRIPT, tmp_path, *given), *words)
