"""Fit a line on whatever device is there: the training loop with nothing around it.

100,000 points of y = 2x - 3 + noise, split into training, validation and test. The model is one
nn.Linear, the loss the mean squared error, the optimizer SGD; the fitted weights are saved, loaded
back, and compared with the least-squares solution, which for a line is known. The lesson is the
device: model and batch are moved to the same one, because an operation runs where its operands are.
It raises an error if they are in two places.

    laptop    python 03_linear_regression/train.py
    one GPU   python 03_linear_regression/train.py --device cuda
    cluster   one process is all it uses; 05_ddp/train.py uses many

Look for: a validation loss that falls to the variance of the noise, 0.25, and no further; weights
that agree with least squares. Next: 04_amp/train.py, the same loop around a language model.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset, random_split

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from common import cli, exits, hardware, report, run_dir, runtime

POINTS, SLOPE, INTERCEPT, NOISE = 100_000, 2.0, -3.0, 0.5
TOLERANCE = 0.05  # SGD does not settle: it keeps moving around the solution, the more the larger --lr


def parse_args():
    parser = cli.Parser(__doc__)
    parser.add_argument("--epochs", type=cli.positive_int, default=4)
    parser.add_argument("--batch-size", type=cli.positive_int, default=256)
    parser.add_argument("--lr", type=cli.positive, default=0.01)
    parser.add_argument("--seed", type=cli.natural, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument("--run-dir", type=cli.path, help="folder for weights and plot (default: a new one in runs/)")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    return parser.parse_args()


@torch.no_grad()
def evaluate(net, dataset, device) -> float:
    """Mean squared error over a whole split."""
    net.eval()
    x, y = (t.to(device) for t in dataset[:])
    loss = mse_loss(net(x), y).item()
    net.train()
    return loss


def main() -> int:
    args = parse_args()
    device = runtime.single_device(args.device)
    runtime.seed(args.seed, deterministic=False)
    folder = run_dir.create(args.run_dir)

    x = torch.rand(POINTS, 1) * 4 - 2
    y = SLOPE * x + INTERCEPT + NOISE * torch.randn(POINTS, 1)
    train, validation, test = random_split(TensorDataset(x, y), (0.8, 0.1, 0.1))
    batches = DataLoader(train, args.batch_size, shuffle=True)

    net = nn.Linear(1, 1).to(device)  # in place for a module: its parameters now live there
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)  # after the move: it holds these very parameters

    start, step, records = time.perf_counter(), 0, []
    for epoch in range(1, args.epochs + 1):
        for inputs, targets in batches:
            inputs, targets = inputs.to(device), targets.to(device)  # not in place: a tensor's copy is returned
            loss = mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 50 == 1:
                records.append({"step": step, "loss": loss.item()})
        records.append({"step": step, "loss": loss.item(), "val_loss": evaluate(net, validation, device)})
        print(f"epoch {epoch}/{args.epochs} | loss {loss.item():.4f} | validation loss {records[-1]['val_loss']:.4f}")
    seconds = time.perf_counter() - start

    torch.save(net.state_dict(), folder / "line.pt")
    loaded = nn.Linear(1, 1)
    loaded.load_state_dict(torch.load(folder / "line.pt", map_location="cpu"))  # a GPU's file opens without a GPU
    slope, intercept = loaded.weight.item(), loaded.bias.item()
    test_loss = evaluate(loaded.to(device), test, device)

    train_x, train_y = train[:]
    exact = torch.linalg.lstsq(torch.cat((train_x, torch.ones_like(train_x)), 1).double(), train_y.double()).solution
    exact_slope, exact_intercept = exact.flatten().tolist()
    print(f"SGD            y = {slope:.4f}x {intercept:+.4f}")
    print(f"least squares  y = {exact_slope:.4f}x {exact_intercept:+.4f}")
    distance = max(abs(slope - exact_slope), abs(intercept - exact_intercept))
    if not distance < TOLERANCE:
        raise runtime.UserError(
            f"not fitted: {distance:.3g} from least squares; change --lr {args.lr:g} or --epochs {args.epochs}"
        )

    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": "fp32",
        "model": "nn.Linear(1, 1)",
        "parameters": 2,
        "steps": step,
        "first_loss": records[0]["loss"],
        "last_loss": loss.item(),
        "val_loss": records[-1]["val_loss"],
        "test_loss": test_loss,
        "slope": slope,
        "intercept": intercept,
        "least_squares_slope": exact_slope,
        "least_squares_intercept": exact_intercept,
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": seconds,
        "loss_plot": report.plot_loss(records, folder / "loss.png", "mean squared error"),
    }
    report.report(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
