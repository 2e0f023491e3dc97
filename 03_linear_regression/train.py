"""Fit a line on any device: the five lines of every training loop, and nothing else.

The data are 100,000 points of y = 2x - 3 + noise. The model is one nn.Linear, the loss is the mean
squared error, and the optimizer is SGD. The best possible answer is known: it is the least-squares
solution. The script saves the trained weights, loads them back, and compares them with it.

What is new compared with a spreadsheet is the device. A tensor lives in the memory of one device,
and an operation runs on the device of its operands. PyTorch raises an error if the operands are on
two devices: it does not copy one of them. So the model is moved once, and each batch is moved just
before it is used.

    laptop    python 03_linear_regression/train.py
    one GPU   python 03_linear_regression/train.py --device cuda
    cluster   this script uses one process; 05_ddp/minimal.py uses many

What to look at: the validation loss falls to 0.25, which is the variance of the noise, and then
stays there. The last line checks that the weights agree with least squares.

Previous: 02_tensors_precision/tensors.py. Next: 04_amp/minimal.py, the same loop with a language
model.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

POINTS = 100_000
SLOPE = 2.0
INTERCEPT = -3.0
NOISE = 0.5  # standard deviation
# SGD does not come to rest: each batch moves the weights a little. A larger --lr moves them more.
TOLERANCE = 0.05


def main() -> int:
    args = parse_args()
    torch.manual_seed(args.seed)
    start = time.perf_counter()

    # 1. Choose the device.
    device = torch.device(args.device)

    # 2. Data. It stays in CPU memory, because a GPU may be too small for all of it.
    x = torch.rand(POINTS, 1) * 4 - 2  # [points, 1], from -2 to 2
    y = SLOPE * x + INTERCEPT + NOISE * torch.randn(POINTS, 1)
    train_set, validation_set, test_set = random_split(TensorDataset(x, y), (0.8, 0.1, 0.1))
    batches = DataLoader(train_set, args.batch_size, shuffle=True)

    # 3. Model and optimizer. Move the model first, because the optimizer refers to its parameters.
    model = nn.Linear(1, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    # 4. The training loop.
    losses = []
    for epoch in range(1, args.epochs + 1):
        for inputs, targets in batches:
            inputs = inputs.to(device)  # returns a copy; `inputs` itself would not move
            targets = targets.to(device)

            predictions = model(inputs)
            loss = mse_loss(predictions, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())  # .item() here would make the CPU wait for the GPU

        val_loss = evaluate(model, validation_set, device)
        print(
            f"epoch {epoch}/{args.epochs} | loss {losses[-1].item():.4f} "
            f"| validation loss {val_loss:.4f}"
        )

    # 5. Save the weights and load them back. The file remembers the device of each tensor.
    args.run_dir.mkdir(parents=True, exist_ok=True)
    weights_file = args.run_dir / "line.pt"
    torch.save(model.state_dict(), weights_file)
    loaded = nn.Linear(1, 1)
    state_dict = torch.load(weights_file, map_location="cpu")  # also on a machine without a GPU
    loaded.load_state_dict(state_dict)
    slope = loaded.weight.item()
    intercept = loaded.bias.item()
    test_loss = evaluate(loaded.to(device), test_set, device)

    # 6. Check what this chapter promises: training found the least-squares line.
    exact_slope, exact_intercept = least_squares(train_set)
    print(
        f"SGD            y = {slope:.4f}x {intercept:+.4f}, loss on the test split {test_loss:.4f}"
    )
    print(f"least squares  y = {exact_slope:.4f}x {exact_intercept:+.4f}")
    distance = max(abs(slope - exact_slope), abs(intercept - exact_intercept))
    if not distance < TOLERANCE:  # also true if the distance is NaN
        print(
            f"not fitted: {distance:.3g} from least squares; "
            f"change --lr {args.lr:g} or --epochs {args.epochs}",
            file=sys.stderr,
        )
        return 2
    print(f"checked: the weights, saved and loaded back, are within {TOLERANCE} of least squares")

    on_gpu = device.type == "cuda"
    summary = {
        "script": "03_linear_regression/train.py",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "world_size": 1,
        "dtype": "fp32",
        "model": "nn.Linear(1, 1)",
        "parameters": 2,
        "steps": len(losses),
        "tokens": None,  # the data are points
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
        "val_loss": val_loss,
        "tokens_per_second": None,
        "mfu": None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "seconds": time.perf_counter() - start,
        "test_loss": test_loss,
        "slope": slope,
        "intercept": intercept,
        "least_squares_slope": exact_slope,
        "least_squares_intercept": exact_intercept,
    }
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, device: torch.device) -> float:
    """Return the mean squared error over all points of a split."""
    inputs, targets = dataset[:]
    inputs = inputs.to(device)
    targets = targets.to(device)
    model.eval()  # nn.Linear does not need it; dropout and batch norm do
    loss = mse_loss(model(inputs), targets)
    model.train()
    return loss.item()


def least_squares(dataset: Dataset) -> tuple[float, float]:
    """Return the slope and the intercept of the line with the smallest loss."""
    inputs, targets = dataset[:]
    inputs = inputs.double()
    columns = torch.cat((inputs, torch.ones_like(inputs)), dim=1)  # [points, 2]
    solution = torch.linalg.lstsq(columns, targets.double()).solution  # [2, 1]
    slope, intercept = solution.flatten().tolist()
    return slope, intercept


def parse_args() -> argparse.Namespace:
    """Return the flags. Exit with code 2 if one of them cannot work here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/line"),
        help="folder for the weights (%(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the summary as one JSON object"
    )
    args = parser.parse_args()
    if args.json and args.json.is_file() and b'"script"' not in args.json.read_bytes():
        parser.error(f"--json {args.json} exists and is no summary: name another file")

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if args.device == "auto":
        args.device = next(name for name in available if available[name])
    if not available[args.device]:
        parser.error(f"--device {args.device}: there is none here; use --device cpu")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        parser.error(
            "this script runs in one process, more would only repeat it: "
            "05_ddp/minimal.py uses many"
        )
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
