"""Export: a trained model leaves Python as a compiled package, an ONNX graph and a GGUF file.

torch.export runs the model once with example inputs and records each operator: the result is a
graph without Python. Whatever Python decided while it was recorded stays as it was. So three things
must be said when a language model is exported:

    sizes     which sizes may vary: batch, tokens, and slots of the KV cache. All others are fixed.
              A size of 1 in the example would be fixed, too, so the example has larger ones.
    cache     where keys and values live: in tensors of the caller, a list with one for each layer
    outputs   what the graph returns, and which inputs it writes. torch's own forms write the cache
              in place. The ONNX exporter drops such writes without a message, so there the graph
              returns the cache.

Prefill and decode are one graph, with many tokens or one. It becomes files of three kinds:

    aoti      AOTInductor's .pt2: machine code for one kind of device, with the weights. It needs
              torch's library, and neither Python nor this source.
    onnx      an .onnx with the graph and an .onnx.data with the weights, for ONNX Runtime and many
              others. int8: the same with quantized weights and activations.
    gguf      for llama.cpp and Ollama. It has no graph: only the shape, the vocabulary and the
              weights (f16, or q8_0 with 8 bits) of an architecture that llama.cpp knows.

    laptop    python 09_inference/export.py
    your own  python 09_inference/export.py --model models/smollm2-135m --chat \\
                  --prompt "What is an atom?" --forms onnx,int8,f16,q8_0  (make model makes it)
    one GPU   python 09_inference/export.py --device cuda
    cluster   servers read the Hugging Face folder that 06_fsdp_zero/convert_checkpoint.py writes

What to look at: the first token at which a form leaves eager's answer, which is transformers', and
what int8 costs in loss. On a GPU the default is a wider model and the package alone: ONNX Runtime
and llama.cpp, as pip installs them, compute on the CPU. Expected on an H100: a decode step reads
228 MB in at least 0.07 ms, and eager takes longer to launch its kernels, at about 5 microseconds
each. The package has fewer kernels, and launches them from C++, so it is faster.
Previous: offloaded.py. Next: parity.py.
"""

import dataclasses
import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _export as helper
import _prompts
import torch
from torch import Tensor, nn

from common import disk, lesson, measure
from lm import model, shapes, weights

MOST_ROWS = 64  # of a batch: an upper bound that the package checks

# --- 1. what torch.export records


class CallersCache:
    """The caller's KV cache: for each layer a tensor [batch, kv_heads, slots, head_dim].

    A token's slot is its position. Writes are in place.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys = keys
        self.values = values
        batch, _, slots, _ = keys[0].shape
        self.batch_index = torch.arange(batch, device=keys[0].device)[:, None]  # [batch, 1]
        self.slots = torch.arange(slots, device=keys[0].device)

    def mask(self, positions: Tensor) -> Tensor:  # [batch, tokens] -> [batch, 1, tokens, slots]
        visible = self.slots <= positions.unsqueeze(-1)  # [batch, tokens, slots]
        return torch.where(visible, 0.0, -torch.inf).unsqueeze(1)

    def updater(self, layer: str, positions: Tensor) -> Callable:
        """Return the function that stores a layer's k and v, and returns its keys and values."""
        keys = self.keys[int(layer)]
        values = self.values[int(layer)]

        def update_cache(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys[self.batch_index, :, positions] = k.transpose(
                1, 2
            )  # [batch, tokens, kv_heads, head_dim]
            values[self.batch_index, :, positions] = v.transpose(1, 2)
            return keys, values

        return update_cache


class Step(nn.Module):
    """Prefill and decode in one graph.

    It returns the logits, [batch, vocab], of each row's token at `last`. The cache is written in
    place; or it is copied, and the copy is returned.
    """

    def __init__(self, net: model.Transformer, *, in_place: bool) -> None:
        super().__init__()
        self.net = net.eval().requires_grad_(False)
        self.in_place = in_place

    def forward(
        self,
        ids: Tensor,  # [batch, tokens]
        positions: Tensor,  # [batch, tokens]
        last: Tensor,  # [batch]
        keys: list[Tensor],
        values: list[Tensor],
    ):
        if not self.in_place:
            keys = [tensor.clone() for tensor in keys]
            values = [tensor.clone() for tensor in values]
        hidden = self.net.model(ids, positions, CallersCache(keys, values))
        rows = torch.arange(ids.shape[0], device=ids.device)
        logits = self.net.lm_head(hidden[rows, last])
        if self.in_place:
            return logits
        return logits, keys, values


def record(net: model.Transformer, device, *, in_place: bool) -> torch.export.ExportedProgram:
    """Record a step. A size that may vary has a name and bounds."""
    config = net.config
    ids = torch.zeros(2, 5, dtype=torch.long, device=device)
    last = torch.tensor([4, 2], device=device)
    keys, values = helper.empty_cache(config, rows=2, slots=16, device=device)

    batch = torch.export.Dim("batch", min=1, max=MOST_ROWS)
    tokens = torch.export.Dim("tokens", min=1, max=config.max_position_embeddings)
    slots = torch.export.Dim("slots", min=1, max=config.max_position_embeddings)
    cache_of_layers = [{0: batch, 2: slots}] * config.num_hidden_layers
    dynamic_shapes = {
        "ids": {0: batch, 1: tokens},
        "positions": {0: batch, 1: tokens},
        "last": {0: batch},
        "keys": cache_of_layers,
        "values": cache_of_layers,
    }
    example = (ids, ids.clone(), last, keys, values)
    step = Step(net, in_place=in_place)
    return torch.export.export(step, example, dynamic_shapes=dynamic_shapes)


# --- 2. the file formats


def make_package(name: str, config: shapes.Config, file: Path, device: str) -> None:
    """Write an AOTInductor package, which has machine code and weights."""
    net = weights.build(name, config, seed=0, device=device)
    program = record(net, device, in_place=True)
    print(f"recorded: {helper.describe(program)}")
    # The example's sizes of 2 become lower bounds, which are checked although 1 was exported for.
    settings = {"aot_inductor.check_lowerbound": False}
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(file), inductor_configs=settings
    )


def make_onnx(name: str, config: shapes.Config, file: Path, *, in_place: bool = False) -> int:
    """Write an .onnx with the graph, and an .onnx.data with the weights, which must move along.

    Return the number of its outputs.
    """
    logging.captureWarnings(True)
    logging.disable(logging.WARNING)  # the exporter's
    net = weights.build(name, config, seed=0)
    program = record(net, "cpu", in_place=in_place)
    onnx = torch.onnx.export(program, (), file, dynamo=True, verbose=False)
    return len(onnx.model.graph.outputs)


def write_gguf(net: model.Transformer, folder: Path, file: Path) -> None:
    """Write shape, vocabulary and weights to one file. `folder` has the tokenizer, if there is one.

    The name of the file says how the matrices are stored: F16, or Q8_0 in blocks of 32.
    """
    import gguf

    config = net.config
    writer = gguf.GGUFWriter(file, "llama")
    helper.add_shape(writer, config)
    helper.add_vocabulary(writer, config, folder)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in net.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = neighbours_from_halves(weight, config.head_dim)
        if weight.ndim == 1:
            kind = "F32"
        elif weight.shape[-1] % 32:
            kind = "F16"  # its rows cannot be cut into blocks of 32
        else:
            kind = file.stem.upper()
        kind = gguf.GGMLQuantizationType[kind]
        numbers = weight.detach().cpu().contiguous().numpy()
        numbers = gguf.quants.quantize(numbers, kind)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(gguf_name, numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def neighbours_from_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of q_proj or k_proj, [heads * head_dim, hidden], for llama.cpp.

    RoPE rotates pairs of numbers. In Hugging Face's layout row i of a head is paired with row
    i + head_dim / 2, and in llama.cpp's with its neighbour.
    """
    pairs = weight.unflatten(0, (-1, 2, head_dim // 2))  # [heads, 2, head_dim / 2, hidden]
    return pairs.transpose(1, 2).flatten(0, 2)


# --- 3. each form, beside eager


def run(
    args, folder: Path, device: torch.device, forms: list[str], text: _prompts.Text
) -> dict[str, dict]:
    """Make the forms, and let each repeat the steps of eager's answer. Return the row of each."""
    config = text.config
    net = weights.build(args.model, config, seed=0, device=device)
    token_ids = helper.answer_of(net, text, args, device)
    calls = helper.calls_of(text.prompts, token_ids, device)
    new_cache = partial(
        helper.empty_cache, config, rows=len(text.prompts), slots=text.length, device=device
    )
    steps = {"eager": Step(net, in_place=True)}
    rows = {"eager": {"token_ids": token_ids}}

    makers = {
        "onnx": partial(make_onnx, args.model, config, folder / "onnx.onnx"),
        "aoti": partial(make_package, args.model, config, folder / "aoti.pt2", device.type),
        "int8": partial(helper.quantize_onnx, folder / "onnx.onnx", folder / "int8.onnx"),
    }
    for form, make in makers.items():
        if form not in forms:
            continue
        made, outputs = helper.cpu_seconds(make)
        loaded, steps[form] = helper.cpu_seconds(partial(helper.load, folder, form))
        rows[form] = {
            "outputs": outputs,
            "make_and_load_seconds": [made, loaded],
            "file_bytes": sum(part.stat().st_size for part in folder.glob(f"{form}.*")),
        }
    if "onnx" in forms:  # what happens to a cache that is written in place
        small = dataclasses.replace(shapes.SIZES["nano"], num_hidden_layers=1)
        lost = make_onnx("nano", small, folder / "lost.onnx", in_place=True)
        rows["onnx"]["outputs_in_place"] = lost

    logits = helper.replay(steps["eager"], calls, new_cache)
    held_out = helper.held_out_tokens(args.model, text, device)
    for form, step in steps.items():
        rows[form] |= helper.compare(step, calls, new_cache, token_ids, logits)
        rows[form]["loss"] = helper.held_out_loss(step, held_out, config)
    decoded_tokens = sum(len(ids[1:]) for ids in token_ids)
    decode = {
        form: partial(helper.replay, step, calls[1:], new_cache) for form, step in steps.items()
    }
    timing = measure.seconds_in_turns(decode, device, helper.ROUNDS)
    for form, seconds in timing.items():
        helper.add_seconds(rows[form], seconds, decoded_tokens)

    if "aoti" in rows:
        fresh, rejected = helper.run_fresh(folder / "aoti.pt2", calls, new_cache())
        rows["aoti"]["fresh_logits_relative_error"] = measure.relative_error(fresh, logits)
        rows["aoti"]["rejected"] = rejected
    for form in ("f16", "q8_0"):
        if form not in forms:
            continue
        file = folder / f"{form}.gguf"
        made, _ = helper.cpu_seconds(partial(write_gguf, net, Path(args.model), file))
        rows[form] = helper.run_llama_cpp(net, file, made, text.prompts, token_ids, logits)
    return rows


def main() -> int:
    args = helper.parse_flags(__doc__)
    name = args.model
    config = helper.shape_of(name)
    text = _prompts.Text(args, config)
    forms, checked_tokens = helper.possible_forms(args, config, text, write_gguf)
    device = lesson.start(args.device, args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with disk.room_for(helper.least_bytes(name, config, forms), folder):
            if name in helper.TRAINED_HERE:
                args.model = helper.train(name, folder / name, config, device)
            rows = run(args, folder, device, forms, text)
        checked = _prompts.check_tokens(rows["eager"]["token_ids"], text, args, device)
        checked += helper.check(rows, config)
        checked += checked_tokens
    lesson.end(
        [{"form": form, **row} for form, row in rows.items()],
        columns=helper.COLUMNS,
        checked=checked,
        args=args,
        device=device,
        model=name,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
