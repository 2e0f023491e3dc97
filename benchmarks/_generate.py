"""The other side of vs_generate.py and inference_gpu.py: transformers' `generate`, which they start.

    python benchmarks/_generate.py RESULT.json --model nano --dtype fp32 --max-new-tokens 64
    python benchmarks/_generate.py RESULT.json --model llama-8b --dtype bf16 --device cuda --cache static

Always the likeliest token, batch 1. A static cache is compiled where transformers does so, which is on a GPU. The first
call is thrown away; a streamer, which generate calls with each token, is the clock of the second. A static cache is
made anew by each call and its CUDA graph recorded anew in the first decode steps: its clock starts at the sixth new
token. A named size has random weights, on a CPU those of our model of the same seed, so that in fp32 both must give
the same tokens.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from _shared import start

from old import exits, inference, model, shapes
from old.generate import Generated
from old.hardware import choose_dtype, device_name
from old.report import peak_memory_bytes
from old.runtime import exact_fp32, pick_device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GENERATE = "generate"  # the name of this side
# the new token that the clock starts at, by cache
CLOCK_STARTS_AT = {"dynamic": 1, "static": 6}
OURS = "07_memory_tricks/quantized_inference.py"


def run_side(side: str, flags: list[str], env: dict[str, str], timeout: float) -> dict:
    """Run this file, or for any other side our script; what it measured, under the same keys."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        result = Path(folder, "result.json")
        start([sys.executable, *words_of(side, str(result)), *flags], env, timeout)
        return json.loads(result.read_text())


def words_of(side: str, result: str) -> list[str]:
    return ["benchmarks/_generate.py", result] if side == GENERATE else [OURS, "--json", result]


def command_of(side: str, flags: list[str]) -> str:
    """The command as a reader would type it."""
    return " ".join(["python", *words_of(side, "RESULT.json"), *flags])


class Clock:
    """For generate's `streamer`: when the prompt was given, and when each new token came."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:  # on the CPU already: a GPU has been waited for
        self.marks.append(time.perf_counter())

    def end(self) -> None:
        pass


def seconds_of(marks: list[float], began: float, cache: str) -> dict:
    """Prefill and decode from the times of the prompt and of each new token."""
    at = CLOCK_STARTS_AT[cache]
    steps = len(marks) - 1 - at  # marks[0] is the prompt, marks[1] the first new token
    if steps < 1:
        raise exits.UserError(f"generate ended after {len(marks) - 1} new tokens: more than {at} are needed")
    return {
        "prefill_seconds": marks[1] - began,
        "decode_seconds": marks[-1] - marks[at],
        "decode_steps": steps,
        "decoded_tokens": steps,
    }


def load_model(args, config: shapes.Config, dtype: torch.dtype, device: torch.device):
    """transformers' model, with our weights; on a GPU a named size has transformers' own random ones, made there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaConfig(**shapes.config_json(config))
    with torch.device(device):
        net = LlamaForCausalLM._from_config(theirs, dtype=dtype)
    if device.type == "cpu" or args.model not in shapes.SIZES:
        ours = model.build(args.model, config, seed=args.seed, device="cpu")
        net.load_state_dict(ours.state_dict())
    return net.eval()


def main() -> int:
    parser = inference.inference_parser(__doc__)
    parser.add_argument("result", metavar="RESULT", type=Path, help="where to write what was measured, as JSON")
    parser.add_argument("--cache", choices=tuple(CLOCK_STARTS_AT), default="dynamic")
    args = parser.parse_args()
    device = pick_device(args.device)
    exact_fp32(device)
    dtype = choose_dtype(args.dtype, device)
    config = shapes.read_config(args.model)
    text = inference.Text(args.model, args.tokenizer, config)
    ids = text.encode(
        inference.read_prompts(prompt=args.prompt, file=args.prompts)[0],
        chat=args.chat,
        max_new_tokens=args.max_new_tokens,
    )
    net = load_model(args, config, DTYPES[dtype], device)

    prompt = torch.tensor([ids], device=device)
    how = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    if args.cache == "static":
        how["cache_implementation"] = "static"
    net.generate(prompt, **how)
    clock = Clock()
    began = time.perf_counter()
    tokens = net.generate(prompt, streamer=clock, **how)
    timed = seconds_of(clock.marks, began, args.cache)
    result = Generated(token_ids=[tokens[0, len(ids) :].tolist()], prompt_tokens=len(ids), **timed)
    summary = {
        "device": device_name(device),
        "dtype": dtype,
        "peak_memory_bytes": peak_memory_bytes(device),
        **inference.speed(result, text, device=device, bytes_per_step=bytes_read(net, config)),
    }
    args.result.write_text(json.dumps(summary) + "\n")
    return 0


def bytes_read(net: torch.nn.Module, config: shapes.Config) -> int:
    """The weights that a decode step reads: all of them, but of an embedding that is not the head one row alone."""
    looked_up = 0 if config.tie_word_embeddings else net.get_input_embeddings().weight.nbytes
    return sum(parameter.nbytes for parameter in net.parameters()) - looked_up


if __name__ == "__main__":
    exits.run(main)
