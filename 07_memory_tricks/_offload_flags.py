"""The flags of offload.py."""

import tempfile
from argparse import Namespace

import torch

from old import cli, hardware
from old.exits import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse(description: str) -> Namespace:
    """UserError for what cannot be, before anything expensive starts."""
    parser = cli.Parser(description)
    add = parser.add_argument
    add("--model", default="nano", help="nano, llama-124m, -1b, -8b, or a path to an HF config.json or folder")
    add("--seq-len", type=cli.positive_int, help="tokens per sequence (default: from the model, nano 64)")
    add("--micro-batch-size", type=cli.positive_int, default=12, help="sequences per forward")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="what matrices are multiplied in; weights stay fp32")
    add("--folder", type=cli.path, default="runs", help="without a GPU: where the file is made; a disk, not RAM")
    add(
        "--device-name",
        help="the GPU of the last table (default: this one, if it is in common/devices.csv, else an H100)",
    )
    add("--link", type=cli.positive, help="GB/s each way for the last table (default: measured, else 63 of PCIe 5.0)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    add("--plot", type=cli.plot_file, default="runs/offload.png", metavar="PNG")
    args = parser.parse_args()
    if args.device_name is None:
        here = torch.cuda.get_device_name() if torch.cuda.is_available() and args.device != "cpu" else ""
        args.device_name = here if hardware.peak_flops(here, "bf16") else "NVIDIA H100 80GB HBM3"
    if hardware.peak_flops(args.device_name, "bf16") is None:
        raise UserError(f"--device-name {args.device_name}: common/devices.csv has no bf16 FLOP/s for it")
    try:
        args.folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=args.folder):  # /proc has a writer's permission, and takes no file
            pass
    except OSError as error:
        raise UserError(f"--folder {args.folder}: not a folder that can be written to ({error.strerror})") from None
    return args
