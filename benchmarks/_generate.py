"""The other side of inference.py: transformers' `generate`, with the flags of 09_inference/infer_70b.py.

    python benchmarks/_generate.py --model nano --dtype fp32 --max-new-tokens 64
    python benchmarks/_generate.py --model llama-8b --dtype bf16 --device cuda --compile

Greedy, batch 1. The first call is thrown away. A streamer, which generate calls with each token, is the clock of the
second. --compile: a static cache, new in each call, and a compiled forward, transformers' own default on a GPU with
that cache; its CUDA graph is recorded anew in the first steps, so decode is timed from the sixth new token.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import cli, exits, hardware, report, runtime
from lm import shapes
from lm.weights import build

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT = b"def main():"  # infer_70b.py's own
FIRST_TIMED_TOKEN = 6


class Clock(list):
    """For generate's `streamer`: when the prompt was given, and when each new token came."""

    def put(self, _tokens: torch.Tensor) -> None:  # on the CPU already: a GPU has been waited for
        self.append(time.perf_counter())

    def end(self) -> None:
        pass


def load_model(args, config: shapes.Config, device: torch.device):
    """transformers' model with our weights, built on `device` in `args.dtype`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        net = LlamaForCausalLM._from_config(
            LlamaConfig(**shapes.config_json(config)), dtype=DTYPES[args.dtype]
        )
    # on a GPU random weights of 8B stay transformers' own
    if device.type == "cpu" or args.model not in shapes.SIZES:
        ours = build(args.model, config, seed=0)
        net.load_state_dict(ours.state_dict(), strict=not config.tie_word_embeddings)
    return net.eval()


def options(args, device: torch.device) -> dict:
    """What generate takes: greedy, as many tokens as asked for whatever they are, compiled or not."""
    from transformers import CompileConfig

    how = {
        "max_new_tokens": args.max_new_tokens,
        "min_new_tokens": args.max_new_tokens,
        "do_sample": False,
    }
    if not args.compile:
        return {**how, "disable_compile": True}
    compile_config = CompileConfig() if device.type == "cuda" else CompileConfig(mode="default")
    # by itself transformers compiles on accelerators only
    compile_config._compile_all_devices = True
    return {**how, "cache_implementation": "static", "compile_config": compile_config}


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="a size with random weights, or a Hugging Face folder")
    add("--max-new-tokens", type=cli.positive_int, default=32)
    add("--dtype", choices=tuple(DTYPES), default="fp32")
    add("--compile", action="store_true", help="static cache and torch.compile")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    if args.max_new_tokens <= FIRST_TIMED_TOKEN:
        raise exits.UserError(
            f"--max-new-tokens {args.max_new_tokens}: use at least {FIRST_TIMED_TOKEN + 1}"
        )
    device = runtime.single_device(args.device)
    runtime.seed_all(0)
    config = shapes.read_config(args.model)
    prompt = [byte % config.vocab_size for byte in PROMPT]
    net = load_model(args, config, device)
    inputs = {"input_ids": torch.tensor([prompt], device=device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    how = options(args, device)
    net.generate(**inputs, **how)
    clock = Clock()
    began = time.perf_counter()
    tokens = net.generate(**inputs, streamer=clock, **how)[0, len(prompt) :].tolist()

    # clock[0] is the prompt's, clock[n] that of the n-th new token
    decode_steps = len(clock) - 1 - FIRST_TIMED_TOKEN
    decode_seconds = clock[-1] - clock[FIRST_TIMED_TOKEN]
    prefill_seconds = clock[1] - began
    weights = {name: parameter.nbytes for name, parameter in net.named_parameters()}
    if not config.tie_word_embeddings:
        del weights["model.embed_tokens.weight"]  # a step reads one row of it
    name = hardware.device_name(device)
    bandwidth = hardware.devices().get(name, {}).get("bandwidth")
    summary = {
        "device": name,
        "dtype": args.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "token_ids": [tokens],
        "time_to_first_token_seconds": prefill_seconds,
        "decode_tokens_per_second": decode_steps / decode_seconds,
        "bandwidth_share": bandwidth
        and sum(weights.values()) * decode_steps / decode_seconds / bandwidth,
        "peak_memory_bytes": report.peak_memory_bytes(device),
    }
    report.summary(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
