"""The flags of kv_cache.py."""

from argparse import Namespace

import torch

from old import cli, shapes
from old.exits import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHORTEST = 32  # tokens: a system prompt, a prompt and an answer, a quarter, a quarter and a half of it


def parse_args(description: str) -> Namespace:
    """UserError for what cannot be, before anything expensive starts."""
    parser = cli.Parser(description)
    add = parser.add_argument
    add("--model", default="nano", help=f"a Hugging Face folder, or with random weights: {' | '.join(shapes.SIZES)}")
    add("--seq-len", type=cli.positive_int, default=192, help="tokens of the longest request: prompt and answer")
    add("--requests", type=cli.positive_int, default=12)
    add("--concurrency", type=cli.positive_int, default=4, help="requests that are answered at a time")
    add("--dtype", choices=("auto", *DTYPES), default="fp32", help="of weights and cache; equal tokens want fp32")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--seed", type=cli.natural, default=0, help="of the random weights and of the requests")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    add("--plot", type=cli.plot_file, default="runs/kv_cache.png", metavar="PNG")
    args = parser.parse_args()
    most = shapes.read_config(args.model).max_position_embeddings
    if not SHORTEST <= args.seq_len <= most:
        raise UserError(
            f"--seq-len {args.seq_len}: from {SHORTEST} to the {most} that --model {args.model} was made for"
        )
    return args
