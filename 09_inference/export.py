"""Out of Python: a trained model as a compiled package, an ONNX graph and a GGUF file, each held against eager.

A form that leaves Python is a graph recorded once, so it keeps what Python decided then. Three things must be said:
which sizes may vary (batch, tokens and slots are symbols, recorded at sizes above 1), where the KV cache lives (tensors
of the caller, a list per layer), and what is refused (a package checks nothing by itself). Prefill and decode are one
graph. Torch's forms write the cache in place. ONNX's exporter drops such writes silently: there the cache is returned.

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
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _export
from _generate import StaticCache, Text, check_tokens, generate, parser, steps_of

from common import exits, measure, report
from lm import data, model, shapes, weights

LAYERS, MOST_ROWS, ROUNDS = 2, 64, 5
LOSS_ROWS, LOSS_TOKENS = 16, 32
WORST = {"aoti": 1e-5, "onnx": 1e-5, "f16": 1e-3, "q8_0": 1e-2}  # errors: of logits, or of weights


class Slots(StaticCache):
    """The KV cache of the caller: a tensor [batch, heads, slots, head_dim] per layer, written in place."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys, self.values = (
            {str(i): each for i, each in enumerate(part)} for part in (keys, values)
        )
        self.rows = torch.arange(keys[0].shape[0], device=keys[0].device)[:, None]
        self.slots = torch.arange(keys[0].shape[2], device=keys[0].device)


class Step(nn.Module):
    """Prefill and decode in one: the logits [batch, vocab] of each row's token at `last`, and the cache if returned."""

    def __init__(self, net: model.Transformer, *, in_place: bool) -> None:
        super().__init__()
        self.net, self.in_place = net.eval().requires_grad_(False), in_place

    def forward(
        self, ids: Tensor, positions: Tensor, last: Tensor, keys: list[Tensor], values: list[Tensor]
    ):
        if not self.in_place:
            keys, values = ([each.clone() for each in part] for part in (keys, values))
        hidden = self.net.model(ids, positions, Slots(keys, values))
        logits = self.net.lm_head(hidden[torch.arange(ids.shape[0], device=ids.device), last])
        return logits if self.in_place else (logits, keys, values)


def empty_cache(
    config: shapes.Config, rows: int, slots: int, device
) -> tuple[list[Tensor], list[Tensor]]:
    shape = rows, config.num_key_value_heads, slots, config.head_dim
    return tuple(
        [torch.zeros(shape, device=device) for _ in range(config.num_hidden_layers)]
        for _ in range(2)
    )


def record(net: model.Transformer, device, *, in_place: bool) -> torch.export.ExportedProgram:
    """The graph, with names for the sizes that may vary. A size of 1 in the example would be frozen."""
    config, ids = net.config, torch.zeros(2, 5, dtype=torch.long, device=device)
    example = (
        ids,
        ids.clone(),
        torch.tensor([4, 2], device=device),
        *empty_cache(config, 2, 16, device),
    )
    rows = torch.export.Dim("batch", min=1, max=MOST_ROWS)
    tokens, slots = (
        torch.export.Dim(name, min=1, max=config.max_position_embeddings)
        for name in ("tokens", "slots")
    )
    text, cache = {0: rows, 1: tokens}, [{0: rows, 2: slots}] * config.num_hidden_layers
    dynamic = {"ids": text, "positions": text, "last": {0: rows}, "keys": cache, "values": cache}
    return torch.export.export(Step(net, in_place=in_place), example, dynamic_shapes=dynamic)


def make_package(name: str, config: shapes.Config, file: Path, device: str) -> None:
    """AOTInductor: a .pt2 with machine code and weights, which needs torch's library and not this source."""
    program = record(weights.build(name, config, seed=0, device=device), device, in_place=True)
    # the example's sizes of 2 become lower bounds, which are checked although 1 was exported for
    settings = {"aot_inductor.check_lowerbound": False}
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(file), inductor_configs=settings
    )


def make_onnx(name: str, config: shapes.Config, file: Path, *, in_place: bool = False) -> int:
    """An .onnx with the graph, and an .onnx.data with the weights, which must move along; returns its outputs."""
    logging.captureWarnings(True)
    logging.disable(logging.WARNING)  # the exporter's
    program = record(weights.build(name, config, seed=0), "cpu", in_place=in_place)
    return len(torch.onnx.export(program, (), file, dynamo=True, verbose=False).model.graph.outputs)


def calls_of(prompts: list[list[int]], answers: list[list[int]], device) -> list[tuple]:
    """ids, positions and last of a prefill of these prompts, and of the decode steps that read these answers."""
    parts = (
        [torch.tensor(row, dtype=torch.long, device=device) for row in rows]
        for rows in (prompts, answers)
    )
    ids, read = (pad_sequence(part, batch_first=True) for part in parts)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    # a package takes no expanded tensor
    positions = torch.arange(ids.shape[1], device=device).repeat(len(ids), 1)
    decode = [
        (each[:, None].contiguous(), lengths[:, None] + i, 0 * lengths)
        for i, each in enumerate(read.T[:-1])
    ]
    return [(ids, positions, lengths - 1), *decode]


@torch.inference_mode()
def replay(step: Callable, calls: list[tuple], new_cache: Callable) -> list[Tensor]:
    """The logits of each call. All forms get the calls of eager's answer, so that every step can be compared."""
    cache = new_cache()
    return [step(*call, *cache) for call in calls]


def run(args, folder: Path, device: torch.device, forms: list[str], text: Text) -> dict[str, dict]:
    """A row per form, by its name."""
    config, batch = text.config, len(text.prompts)
    held_out = data.load_corpus("stdlib", model=args.model).held_out
    held_out = held_out[: LOSS_ROWS * (LOSS_TOKENS + 1)]
    text.check_vocabulary(held_out, "the held-out text")
    net = weights.build(args.model, config, seed=0, device=device)
    new_cache = partial(empty_cache, config, batch, text.length, device)
    steps = {"eager": Step(net, in_place=True)}
    cache = StaticCache(config, batch=batch, length=text.length, dtype=torch.float32, device=device)
    how = {"max_new_tokens": args.max_new_tokens, "stop": text.stop, "device": device}
    answer = generate(
        *steps_of(net, cache), text.prompts, choose=lambda logits: logits.argmax(-1), **how
    )
    calls, token_ids = calls_of(text.prompts, answer.token_ids, device), answer.token_ids
    rows = {"eager": {"token_ids": token_ids}}
    makers = {
        "onnx": partial(make_onnx, args.model, config, folder / "onnx.onnx"),
        "aoti": partial(make_package, args.model, config, folder / "aoti.pt2", device.type),
    }
    if "int8" in forms:
        from onnxruntime.quantization import quantize_dynamic

        makers["int8"] = partial(
            quantize_dynamic, folder / "onnx.onnx", folder / "int8.onnx", per_channel=True
        )
    for form in [form for form in makers if form in forms]:
        made, outputs = _export.cpu_seconds(makers[form])
        loaded, steps[form] = _export.cpu_seconds(_export.load, folder, form)
        rows[form] = {"outputs": outputs, "make_and_load_seconds": [made, loaded]}
        rows[form]["file_bytes"] = sum(part.stat().st_size for part in folder.glob(f"{form}.*"))
    if "onnx" in forms:
        small = dataclasses.replace(shapes.SIZES["nano"], num_hidden_layers=1)
        rows["onnx"]["outputs_in_place"] = make_onnx(
            "nano", small, folder / "lost.onnx", in_place=True
        )
    logits = replay(steps["eager"], calls, new_cache)
    tokens = torch.from_numpy(held_out.astype("int64")).view(LOSS_ROWS, -1).to(device)
    # token by token
    held_out_calls = calls_of(tokens[:, :1].tolist(), tokens[:, 1:].tolist(), device)
    for form, step in steps.items():
        found = replay(step, calls, new_cache)
        chosen = torch.stack(found, dim=1).argmax(-1).tolist()
        rows[form]["first_difference"] = _export.first_difference(chosen, token_ids)
        rows[form]["logits_relative_error"] = measure.relative_error(found, logits)
        read = torch.stack(
            replay(step, held_out_calls, partial(empty_cache, config, *tokens.shape, device)), dim=1
        )
        rows[form]["loss"] = nn.functional.cross_entropy(
            read.flatten(0, 1), tokens[:, 1:].flatten()
        ).item()
    new_tokens = sum(len(ids[1:]) for ids in token_ids)
    decode = {form: partial(replay, step, calls[1:], new_cache) for form, step in steps.items()}
    for form, found in measure.seconds_in_turns(decode, device, ROUNDS).items():
        for prefix, slowest in (("", ""), ("min_", "max_"), ("max_", "min_")):
            rows[form][f"{prefix}decode_tokens_per_second"] = (
                new_tokens / found[f"{slowest}seconds"]
            )
    if "aoti" in rows:
        fresh, rows["aoti"]["refused"] = _export.run_fresh(folder / "aoti.pt2", calls, new_cache())
        rows["aoti"]["fresh_logits_relative_error"] = measure.relative_error(fresh, logits)
    for form in [form for form in ("f16", "q8_0") if form in forms]:
        rows[form] = _export.gguf_row(
            net, Path(args.model), folder / f"{form}.gguf", text.prompts, token_ids, logits
        )
    return rows


def check(rows: dict[str, dict], config: shapes.Config) -> list[str]:
    checked = []
    for form in [form for form in WORST if form in rows]:
        key = "weights_relative_error" if form in ("f16", "q8_0") else "logits_relative_error"
        worst = max(rows[form][key], rows[form].get("fresh_logits_relative_error", 0))
        assert worst <= WORST[form], f"{form}: {key} {worst:.1e}"
        checked.append(f"{form}: {key.replace('_', ' ')} against eager's at most {worst:.1e}")
    if "aoti" in rows:
        refused = rows["aoti"]["refused"]
        assert len(refused) == 2, refused
        checked += [f"aoti in a process without this source: {line}" for line in refused.values()]
    if "onnx" in rows:
        outputs, lost = rows["onnx"]["outputs"], rows["onnx"]["outputs_in_place"]
        assert (outputs, lost) == (1 + 2 * config.num_hidden_layers, 1), (outputs, lost)
        checked.append(
            f"onnx returns the cache, {outputs} outputs; written in place it is lost: 1, and no error"
        )
    if "int8" in rows:
        cost = rows["int8"]["loss"] - rows["eager"]["loss"]
        checked.append(f"int8 costs {cost:+.4f} nats on {LOSS_ROWS * LOSS_TOKENS} held-out tokens")
    return checked


def main() -> int:
    flags = parser(__doc__)
    flags.set_defaults(max_new_tokens=24)
    flags.add_argument(
        "--forms", default=",".join(_export.FORMS), help="beside eager (%(default)s)"
    )
    args = flags.parse_args()
    if args.temperature or args.dtype not in ("auto", "fp32"):
        raise exits.UserError(
            "greedy tokens in fp32 are compared: leave --temperature and --dtype out"
        )
    args.dtype = "fp32"
    if args.prompt is None and args.prompts is None:
        args.prompts = Path(__file__).with_name("kv_cache_prompts.txt")
    name = args.model
    config = shapes.read_config(name)
    if name == "nano":
        config = dataclasses.replace(config, num_hidden_layers=LAYERS)
    text = Text(args, config)
    forms = _export.possible(args, config)
    device = report.start_lesson(args.device, args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if name == "nano":
            args.model = _export.train_nano(folder / "nano", config)
        rows = run(args, folder, device, forms, text)
        checked = check_tokens(rows["eager"]["token_ids"], text, args, device)
        checked += check(rows, text.config)
    own = {"model": name, "dtype": "fp32", "parameters": shapes.parameter_count(text.config)}
    rows = [{"form": form, **row} for form, row in rows.items()]
    report.end_lesson(
        rows, columns=_export.COLUMNS, checked=checked, args=args, device=device, **own
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
