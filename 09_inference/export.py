"""Out of Python: a trained model as a compiled package, an ONNX graph and a GGUF file, each held against eager.

A form that leaves Python is a graph recorded once, so it keeps what Python decided while it was recorded. Three things
must be said aloud: which sizes may vary (batch, tokens and slots are symbols, recorded at sizes above 1), where the KV
cache lives (tensors that the caller passes in, a list per layer), and what is refused (a package checks nothing by
itself). Prefill and decode are one graph. Torch's forms write the cache in place. ONNX has no such write: the exporter
drops it without a word, so there the cache is returned.

    laptop    python 09_inference/export.py
    your own  python 09_inference/export.py --model models/smollm2-135m --chat --prompt "What is an atom?" \\
                  --forms onnx,int8,f16,q8_0           (make model makes that folder)
    one GPU   python 09_inference/export.py --device cuda
    cluster   servers read the Hugging Face folder that 06_fsdp_zero/convert_checkpoint.py leaves: README

Look for: the first token at which a form leaves eager's answer, which is transformers'; what int8 costs in loss.
Before: speculative.py. Next: launch/README.md.
"""

import dataclasses
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
import _export
from _shared import StaticCache, Text, check_tokens, generate, parser

from common import data, exits, lesson, measure, model, shapes
from common.exits import UserError

LAYERS, MOST_ROWS, ROUNDS = 2, 64, 5
LOSS_ROWS, LOSS_TOKENS = 16, 32


class Slots(StaticCache):
    """The KV cache of the caller: a tensor [batch, heads, slots, head_dim] per layer, written in place or replaced."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], in_place: bool) -> None:
        self.keys, self.values = ({str(i): each for i, each in enumerate(part)} for part in (keys, values))
        self.in_place = in_place
        self.rows = torch.arange(keys[0].shape[0], device=keys[0].device)[:, None]
        self.slots = torch.arange(keys[0].shape[2], device=keys[0].device)

    def extend(self, layer: str, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.in_place:
            return super().extend(layer, positions, k, v)
        for held, new in ((self.keys, k), (self.values, v)):
            written = held[layer].transpose(1, 2).index_put((self.rows, positions), new.transpose(1, 2))
            held[layer] = written.transpose(1, 2)
        return self.keys[layer], self.values[layer]


class Step(nn.Module):
    """Prefill and decode in one: the logits [batch, vocab] of each row's token at `last`, and the cache if returned."""

    def __init__(self, net: model.Transformer, *, in_place: bool) -> None:
        super().__init__()
        self.net, self.in_place = net.eval().requires_grad_(False), in_place

    def forward(self, ids: Tensor, positions: Tensor, last: Tensor, keys: list[Tensor], values: list[Tensor]):
        cache = Slots(keys, values, self.in_place)
        hidden = self.net.model(ids, positions, cache)
        logits = self.net.lm_head(hidden[torch.arange(ids.shape[0], device=ids.device), last])
        return logits if self.in_place else (logits, [*cache.keys.values()], [*cache.values.values()])


def empty_cache(config: shapes.Config, rows: int, slots: int, device) -> tuple[list[Tensor], list[Tensor]]:
    shape = rows, config.num_key_value_heads, slots, config.head_dim
    return tuple([torch.zeros(shape, device=device) for _ in range(config.num_hidden_layers)] for _ in range(2))


def sizes(config: shapes.Config, device) -> tuple[tuple, dict]:
    """What a graph is recorded with: inputs with no size of 1, which would be frozen, and which sizes may vary."""
    ids = torch.zeros(2, 5, dtype=torch.long, device=device)
    example = ids, ids.clone(), torch.tensor([4, 2], device=device), *empty_cache(config, 2, 16, device)
    rows = torch.export.Dim("batch", min=1, max=MOST_ROWS)
    tokens, slots = (torch.export.Dim(name, min=1, max=config.max_position_embeddings) for name in ("tokens", "slots"))
    cache = [{0: rows, 2: slots}] * config.num_hidden_layers
    text = {0: rows, 1: tokens}
    return example, {"ids": text, "positions": text, "last": {0: rows}, "keys": cache, "values": cache}


def make_package(net: model.Transformer, file: Path, device) -> None:
    """AOTInductor: a .pt2 with machine code and weights, which needs torch's library and not this source."""
    example, dynamic = sizes(net.config, device)
    exported = torch.export.export(Step(net, in_place=True), example, dynamic_shapes=dynamic)
    # the example's sizes of 2 become lower bounds, which are checked although 1 was exported for
    settings = {"aot_inductor.check_lowerbound": False}
    torch._inductor.aoti_compile_and_package(exported, package_path=str(file), inductor_configs=settings)


def make_onnx(net: model.Transformer, file: Path, *, in_place: bool = False) -> int:
    """An .onnx with the graph, and an .onnx.data with the weights, which must move along; returns its outputs."""
    example, dynamic = sizes(net.config, "cpu")
    step = Step(net, in_place=in_place)
    program = torch.onnx.export(step, example, file, dynamo=True, dynamic_shapes=dynamic, verbose=False)
    return len(program.model.graph.outputs)


@torch.no_grad()
def make(form: str, name: str, config: shapes.Config, folder: Path, device: str) -> dict:
    """In a process of its own: write the file of a form, and what a row says of that."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    before, facts = sum(os.times()[:4]), {}
    file = folder / f"{form}.{'pt2' if form == 'aoti' else 'onnx'}"
    if form == "aoti":
        make_package(model.build(name, config, seed=0, device=device), file, device)
    elif form == "onnx":
        facts["outputs"] = make_onnx(model.build(name, config, seed=0), file)
        small = model.build("nano", dataclasses.replace(shapes.SIZES["nano"], num_hidden_layers=1), seed=0)
        facts["outputs_in_place"] = make_onnx(small, folder / "lost.onnx", in_place=True)
    else:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(folder / "onnx.onnx", file, weight_type=QuantType.QInt8, per_channel=True)
    held = sum(part.stat().st_size for part in folder.glob(f"{file.name}*"))
    return facts | {"file": str(file), "file_bytes": held, "make_cpu_seconds": sum(os.times()[:4]) - before}


@torch.inference_mode()
def replay(step: Callable, calls: list[tuple], config: shapes.Config) -> list[Tensor]:
    """The logits of each call. The calls are those of eager's answer, so that every step can be compared."""
    rows, slots = calls[0][0].shape[0], 1 + max(int(positions.max()) for _, positions, _ in calls)
    cache = empty_cache(config, rows, slots, calls[0][0].device)
    return [step(*call, *cache) for call in calls]


def text_loss(step: Callable, tokens: Tensor, config: shapes.Config) -> float:
    """Mean loss over held-out text, token by token, and so by the decode step."""
    last = torch.zeros_like(tokens[:, 0])
    calls = [(tokens[:, i : i + 1].contiguous(), torch.full_like(tokens[:, :1], i), last) for i in range(LOSS_TOKENS)]
    logits = torch.stack(replay(step, calls, config), dim=1)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def answer(step: Callable, text: Text, new_tokens: int, device) -> tuple[list[list[int]], list[tuple], list[Tensor]]:
    """Greedy tokens, and of each step the call and the logits."""
    calls, logits = [], []
    cache = empty_cache(text.config, len(text.prompts), text.length, device)

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        calls.append((ids, positions.contiguous(), last))  # a package takes no expanded tensor
        logits.append(step(*calls[-1], *cache))
        return logits[-1]

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        return prefill(ids[:, None], positions[:, None], torch.zeros_like(ids))

    how = {"max_new_tokens": new_tokens, "choose": lambda scores: scores.argmax(-1), "device": device}
    result = generate(prefill, decode, text.prompts, stop=text.stop, **how)
    return result.token_ids, calls, logits


def run(args, folder: Path, device: torch.device, forms: list[str], text: Text) -> dict[str, dict]:
    """A row per form, by its name."""
    config = text.config
    net = model.build(args.model, config, seed=0, device=device)
    eager = Step(net, in_place=True)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        of_row = args.model, config, folder, device.type
        makers = {form: pool.submit(make, form, *of_row) for form in forms if form in ("aoti", "onnx")}
        token_ids, calls, logits = answer(eager, text, args.max_new_tokens, device)
        rows, steps = {"eager": {"token_ids": token_ids, "make_and_load_seconds": None}}, {"eager": eager}
        if "compile" in forms:
            before = sum(os.times()[:4])
            steps["compile"] = torch.compile(eager, dynamic=True)
            replay(steps["compile"], calls[:2], config)
            rows["compile"] = {"make_and_load_seconds": [sum(os.times()[:4]) - before, 0.0]}
        rows |= {form: maker.result() for form, maker in makers.items()}
    if "int8" in forms:
        rows["int8"] = make("int8", *of_row)
    for form in [form for form in ("aoti", "onnx", "int8") if form in rows]:
        start = time.perf_counter()
        file = rows[form].pop("file")
        steps[form] = torch._inductor.aoti_load_package(file) if form == "aoti" else _export.open_onnx(file)
        rows[form]["make_and_load_seconds"] = [rows[form].pop("make_cpu_seconds"), time.perf_counter() - start]
    held_out = data.load_corpus("stdlib", model=args.model).held_out[: LOSS_ROWS * (LOSS_TOKENS + 1)]
    tokens = torch.from_numpy(held_out.astype("int64")).view(LOSS_ROWS, -1).to(device)
    for form, step in steps.items():
        found = replay(step, calls, config)
        chosen = torch.stack(found, dim=1).argmax(-1).tolist()
        rows[form] |= {
            "first_difference": _export.first_difference(chosen, token_ids),
            "logits_relative_error": measure.relative_error(found, logits),
            "loss": text_loss(step, tokens, config),
        }
    prompt_tokens, new_tokens = sum(map(len, text.prompts)), sum(len(ids) - 1 for ids in token_ids)
    for phase, part, count in (("prefill", calls[:1], prompt_tokens), ("decode", calls[1:], new_tokens)):
        of_phase = {form: partial(replay, step, part, config) for form, step in steps.items()}
        for form, found in measure.seconds_in_turns(of_phase, device, ROUNDS).items():
            for prefix, slowest in (("", ""), ("min_", "max_"), ("max_", "min_")):
                rows[form][f"{prefix}{phase}_tokens_per_second"] = count / found[f"{slowest}seconds"]
    if "aoti" in rows:
        fresh, rows["aoti"]["refused"] = _export.run_fresh(folder / "aoti.pt2", calls, partial(empty_cache, config))
        rows["aoti"]["fresh_logits_relative_error"] = measure.relative_error(fresh, logits)
    for form in [form for form in ("f16", "q8_0") if form in forms]:
        file = folder / f"{form}.gguf"
        rows[form] = _export.gguf_row(net, Path(args.model), file, text.prompts, token_ids, logits)
    return rows


def check(rows: dict[str, dict], config: shapes.Config) -> list[str]:
    checked = []
    for form in [form for form in ("compile", "aoti", "onnx") if form in rows]:
        error = max(rows[form]["logits_relative_error"], rows[form].get("fresh_logits_relative_error", 0))
        assert error <= 1e-5, f"{form}: logits are off by {error:.1e}"
        checked.append(f"{form}: the logits of every step are within {error:.1e} of eager's")
    if "aoti" in rows:
        assert len(rows["aoti"]["refused"]) == 2, rows["aoti"]["refused"]
        checked += [f"aoti in a process without this source: {line}" for line in rows["aoti"]["refused"].values()]
    if "onnx" in rows:
        outputs, lost = rows["onnx"]["outputs"], rows["onnx"]["outputs_in_place"]
        assert (outputs, lost) == (1 + 2 * config.num_hidden_layers, 1), (outputs, lost)
        checked.append(
            f"onnx: the cache is returned, {outputs} outputs; written in place it is lost, 1 output and no error"
        )
    if "int8" in rows:
        cost = rows["int8"]["loss"] - rows["eager"]["loss"]
        checked.append(f"int8 costs {cost:+.4f} nats on {LOSS_ROWS * LOSS_TOKENS} held-out tokens")
    for form in [form for form in ("f16", "q8_0") if form in rows]:
        error, difference = rows[form]["weights_relative_error"], rows[form]["logprob_difference"]
        assert error <= {"f16": 1e-3, "q8_0": 1e-2}[form], f"{form}: a matrix is off by {error:.1e}"
        of_llama_cpp = f"llama.cpp's log-probability of a first token is off by {difference:.1e}"
        checked.append(
            f"{form}: transformers reads back no matrix that is off by more than {error:.1e}; {of_llama_cpp}"
        )
    return checked


def main() -> int:
    flags = parser(__doc__)
    flags.set_defaults(max_new_tokens=24)
    flags.add_argument("--forms", default=",".join(_export.FORMS), help="beside eager (%(default)s)")
    args = flags.parse_args()
    if args.temperature or args.dtype not in ("auto", "fp32"):
        raise UserError("greedy tokens in fp32 are compared: leave --temperature and --dtype out")
    args.dtype = "fp32"
    if args.prompt is None and args.prompts is None:
        args.prompts = Path(__file__).with_name("kv_cache_prompts.txt")
    device, name = lesson.start(args.device, args.seed), args.model
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.model == "nano":
            args.model = _export.train_nano(folder / "nano", LAYERS)
        text = Text(args, shapes.read_config(args.model))
        rows = run(args, folder, device, _export.possible(args, text.config), text)
        checked = check_tokens(rows["eager"]["token_ids"], text, args) + check(rows, text.config)
    columns = {"form": "form", "first_difference": "leaves eager at", "logits_relative_error": "error of logits"}
    columns |= {"loss": "loss", "file_bytes": "file", "make_and_load_seconds": "CPU to make, to load"}
    columns |= {"prefill_tokens_per_second": "prefill", "decode_tokens_per_second": "decode"}
    rows = [{"form": form, **row} for form, row in rows.items()]
    own = {"model": name, "dtype": "fp32", "parameters": shapes.parameter_count(text.config)}
    lesson.end(rows, columns=columns, checked=checked, args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
