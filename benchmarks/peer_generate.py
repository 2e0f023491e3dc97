"""The other side of inference.py: transformers' `generate`, with the flags of infer_70b.py.

    python benchmarks/peer_generate.py --model nano --dtype fp32 --max-new-tokens 64
    python benchmarks/peer_generate.py --model llama-8b --dtype bf16 --device cuda --compile

Greedy, batch 1. The first call warms up. In the second call a streamer, which generate calls with
each token, notes the times. --compile means a static cache, which is new in each call, and a
compiled forward: with that cache it is transformers' own default on a GPU. Its CUDA graph is
captured again in the first steps, so decode is timed from the sixth new token on.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import cli, exits, hardware, report, runtime
from lm import shapes
from lm.weights import build

PROMPT = b"def main():"  # infer_70b.py's own
FIRST_TIMED_TOKEN = 6


class Clock(list):
    """A streamer for generate: it notes when the prompt was given, and when each new token came."""

    def put(self, _tokens: torch.Tensor) -> None:
        # The tokens are on the CPU, so a GPU has finished the step.
        self.append(time.perf_counter())

    def end(self) -> None:
        pass


def load_model(args, config: shapes.Config, device: torch.device):
    """Return transformers' model with our weights, on `device` in `args.dtype`.

    On a GPU a model with random weights keeps transformers' own, because drawing ours takes long.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        transformers_config = LlamaConfig(**shapes.config_json(config))
        net = LlamaForCausalLM._from_config(transformers_config, dtype=runtime.DTYPES[args.dtype])
    if device.type == "cpu" or args.model not in shapes.SIZES:
        ours = build(args.model, config, seed=0)
        net.load_state_dict(ours.state_dict(), strict=not config.tie_word_embeddings)
    return net.eval()


def options(args, device: torch.device) -> dict:
    """Return the arguments of generate: greedy, without a stop token, compiled or not."""
    from transformers import CompileConfig

    settings = {
        "max_new_tokens": args.max_new_tokens,
        "min_new_tokens": args.max_new_tokens,
        "do_sample": False,
    }
    if not args.compile:
        return {**settings, "disable_compile": True}
    compile_config = CompileConfig() if device.type == "cuda" else CompileConfig(mode="default")
    compile_config._compile_all_devices = True  # the default is accelerators only
    return {**settings, "cache_implementation": "static", "compile_config": compile_config}


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="a size with random weights, or a Hugging Face folder")
    add("--max-new-tokens", type=cli.positive_int, default=32)
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
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
    settings = options(args, device)
    net.generate(**inputs, **settings)
    clock = Clock()
    began = time.perf_counter()
    output = net.generate(**inputs, streamer=clock, **settings)  # [1, prompt and new tokens]
    tokens = output[0, len(prompt) :].tolist()

    # clock[0] is the time of the prompt, and clock[n] the time of the n-th new token
    decode_steps = len(clock) - 1 - FIRST_TIMED_TOKEN
    decode_seconds = clock[-1] - clock[FIRST_TIMED_TOKEN]
    prefill_seconds = clock[1] - began
    bytes_by_name = {name: weight.nbytes for name, weight in net.named_parameters()}
    if not config.tie_word_embeddings:
        del bytes_by_name["model.embed_tokens.weight"]  # a step reads one row of it
    bytes_per_second = sum(bytes_by_name.values()) * decode_steps / decode_seconds
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
        "bandwidth_share": bytes_per_second / bandwidth if bandwidth else None,
        "peak_memory_bytes": report.peak_memory_bytes(device),
    }
    report.summary(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
