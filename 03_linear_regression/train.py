"""Fit a line on whatever device is there: the five lines of every training program, with nothing around them.

100,000 points of y = 2x - 3 + noise, split into training, validation and test. The model is one nn.Linear, the loss
the mean squared error, the optimizer SGD. The fitted weights are saved, loaded back, and compared with the
least-squares solution, which for a line is known.

The lesson is the device. A tensor lives in the memory of one device, and an operation runs where its operands are. If
they are in two places, that is an error and no copy. So the model is moved once, and each batch as it comes.

    laptop    python 03_linear_regression/train.py
    one GPU   python 03_linear_regression/train.py --device cuda
    cluster   one process is all it uses; 05_ddp/minimal.py uses many

Look for: a validation loss that falls to the variance of the noise, 0.25, and no further; weights that agree with
least squares. Before: 02_tensors_precision/tensors.py. Next: 04_amp/minimal.py, the same loop around a language model.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

POINTS, SLOPE, INTERCEPT, NOISE = 100_000, 2.0, -3.0, 0.5
# SGD does not settle: it keeps moving around the solution, the more the larger --lr
TOLERANCE = 0.05


def train(
    net: nn.Module, batches: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device
) -> Tensor:
    """One epoch; returns the loss of each step, on the device."""
    losses = []
    for inputs, targets in batches:
        # not in place: a tensor's copy is returned
        inputs, targets = inputs.to(device), targets.to(device)
        predictions = net(inputs)
        loss = mse_loss(predictions, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # .item() would make the CPU wait for the GPU, at each step
    return torch.stack(losses)


@torch.no_grad()
def evaluate(net: nn.Module, dataset: Dataset, device: torch.device) -> float:
    """Mean squared error over a whole split."""
    inputs, targets = (tensor.to(device) for tensor in dataset[:])
    net.eval()  # changes nothing in a Linear; with dropout or batch norm it must be there
    loss = mse_loss(net(inputs), targets).item()
    net.train()
    return loss


def least_squares(dataset: Dataset) -> tuple[float, float]:
    """Slope and intercept of the line with the smallest loss there is."""
    inputs, targets = (tensor.double() for tensor in dataset[:])
    solution = torch.linalg.lstsq(
        torch.cat((inputs, torch.ones_like(inputs)), dim=1), targets
    ).solution
    slope, intercept = solution.flatten().tolist()
    return slope, intercept


def parse_args() -> argparse.Namespace:
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
            "this script runs in one process, more would only repeat it: 05_ddp/minimal.py uses many"
        )
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    return args


def main() -> int:
    args = parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    start = time.perf_counter()

    x = torch.rand(POINTS, 1) * 4 - 2
    y = SLOPE * x + INTERCEPT + NOISE * torch.randn(POINTS, 1)
    training, validation, test = random_split(TensorDataset(x, y), (0.8, 0.1, 0.1))
    batches = DataLoader(training, args.batch_size, shuffle=True)

    net = nn.Linear(1, 1).to(device)  # in place for a module: its parameters now live there
    # after the move: it holds these very parameters
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)

    losses = []
    for epoch in range(1, args.epochs + 1):
        losses += train(net, batches, optimizer, device).tolist()
        val_loss = evaluate(net, validation, device)
        print(
            f"epoch {epoch}/{args.epochs} | loss {losses[-1]:.4f} | validation loss {val_loss:.4f}"
        )

    args.run_dir.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), args.run_dir / "line.pt")
    loaded = nn.Linear(1, 1)
    # opens a GPU's file without a GPU
    loaded.load_state_dict(torch.load(args.run_dir / "line.pt", map_location="cpu"))
    slope, intercept = loaded.weight.item(), loaded.bias.item()
    test_loss = evaluate(loaded.to(device), test, device)

    exact_slope, exact_intercept = least_squares(training)
    print(
        f"SGD            y = {slope:.4f}x {intercept:+.4f}, loss on the test split {test_loss:.4f}"
    )
    print(f"least squares  y = {exact_slope:.4f}x {exact_intercept:+.4f}")
    distance = max(abs(slope - exact_slope), abs(intercept - exact_intercept))
    if not distance < TOLERANCE:  # true for NaN, too
        flags = f"--lr {args.lr:g} or --epochs {args.epochs}"
        print(f"not fitted: {distance:.3g} from least squares; change {flags}", file=sys.stderr)
        return 2
    print(f"checked: the weights, saved and loaded back, are within {TOLERANCE} of least squares")

    summary = {
        "script": "03_linear_regression/train.py",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "world_size": 1,
        "dtype": "fp32",
        "model": "nn.Linear(1, 1)",
        "parameters": 2,
        "steps": len(losses),
        "tokens": None,  # a line has none
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "val_loss": val_loss,
        "tokens_per_second": None,
        "mfu": None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "seconds": time.perf_counter() - start,
        "test_loss": test_loss,
        "slope": slope,
        "intercept": intercept,
        "least_squares_slope": exact_slope,
        "least_squares_intercept": exact_intercept,
    }
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
