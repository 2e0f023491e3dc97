"""The loss does not depend on how many processes train: curves of 1, 2, 3 and 8, and of a run that moved.

05_ddp/train.py runs with the same seed and global batch on each number of processes. One more run is stopped
half-way by a signal on three processes and resumed on two. All losses should be equal but for float rounding:
another number of processes adds the same gradients in another order. The upper panel has the curves, one on top
of the other; the lower one their relative difference from one process, on a logarithmic scale.

    make figures                                           this and the other pictures in docs/images
    python benchmarks/loss_curves.py                       docs/images/loss_curves.png, some minutes on 2 cores
    python benchmarks/loss_curves.py --device cuda --processes 1,2,4,8    on a node with 8 GPUs

Look for: the largest relative difference over the first 20 steps, which must stay below 1e-5 (else exit code 1), and
how it grows later: training amplifies rounding, as it amplifies any difference. The losses and the differences go to
benchmarks/results/.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from _shared import REPO, TORCHRUN, Failed, cpu, end, facts, start, versions, write_results

from old import cli, exits, runtime
from old.report import pyplot, read_records, table

SCRIPT = "05_ddp/train.py"
CLAIMED_STEPS = 20  # over which the losses are claimed to agree
TOLERANCE = 1e-5  # relative
BATCH = ["--global-batch-size", "24"]  # 1, 2, 3 and 8 divide it


def launcher(processes: int) -> list[str]:
    """The start of the command line of a run on so many processes."""
    return [sys.executable, *TORCHRUN, f"--nproc_per_node={processes}", SCRIPT]


def read_losses(run_dir: Path) -> list[float]:
    """The training loss of each step."""
    records = [record for record in read_records(run_dir / "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "a step is missing"
    return [record["loss"] for record in records]


def train(processes: int, flags: list[str], folder: Path, timeout: float) -> list[float]:
    """The losses of an uninterrupted run."""
    run_dir = folder / f"{processes}-processes"
    start([*launcher(processes), *flags, "--run-dir", str(run_dir)], environment(), timeout)
    return read_losses(run_dir)


def train_and_move(flags: list[str], stop_after: int, folder: Path, timeout: float) -> tuple[list[float], int]:
    """The losses of a run stopped by SIGTERM on three processes and resumed on two, and the step of the stop."""
    run_dir = folder / "moved"
    command = [*launcher(3), *flags, "--run-dir", str(run_dir)]
    deadline = time.monotonic() + timeout
    output = folder / "moved.log"
    with open(output, "w") as log:
        process = subprocess.Popen(command, cwd=REPO, env=environment(), stdout=log, stderr=log)
    try:
        while len(read_records(run_dir / "metrics.jsonl")) < stop_after:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed("the run to be stopped ended too early or is too slow", output.read_text())
            time.sleep(0.02)  # between two looks
        process.send_signal(signal.SIGTERM)  # torchrun passes it on; the ranks save and stop after their step
        process.wait(timeout=timeout)
    finally:
        if process.poll() is None:
            end(process)
    stopped_at = len(read_records(run_dir / "metrics.jsonl"))
    start([*launcher(2), *flags, "--run-dir", str(run_dir), "--resume"], environment(), timeout)
    return read_losses(run_dir), stopped_at


def environment() -> dict[str, str]:
    """One thread for each process, however many there are: more threads would round in another order."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def differences(losses: list[float], reference: list[float]) -> list[float]:
    """Relative difference at each step."""
    return [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]


def draw(
    curves: dict[str, list[float]], differ: dict[str, list[float]], stopped_at: int, title: str, file: Path
) -> bool:
    """Curves on top of each other, and below them their distance from the first. False without matplotlib."""
    if (plt := pyplot()) is None:
        return False
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 6), height_ratios=(3, 2))
    widths = [
        9 - 7 * i / max(1, len(curves) - 1) for i in range(len(curves))
    ]  # the first widest, or it would be hidden
    for (name, losses), width in zip(curves.items(), widths, strict=True):
        above.plot(range(1, len(losses) + 1), losses, linewidth=width, label=name)
    above.axvline(stopped_at, color="gray", linestyle=":", label=f"stopped after step {stopped_at}, resumed")
    above.set(ylabel="training loss (nats per byte)", title=title)
    above.legend(fontsize="small")
    for i, (name, values) in enumerate(differ.items(), start=1):
        # a step whose loss is equal to the bit has no place on a logarithmic scale
        points = [(step, value) for step, value in enumerate(values, start=1) if value > 0]
        if points:
            below.plot(*zip(*points, strict=True), "o", markersize=4, color=f"C{i}", label=name)
    tolerance = f"{TOLERANCE:g}: tolerance of the tests"
    below.axhline(TOLERANCE, color="black", linewidth=0.8, linestyle="--", label=tolerance)
    held_until = f"the tolerance is for the first {CLAIMED_STEPS} steps"
    below.axvline(CLAIMED_STEPS, color="black", linewidth=0.8, linestyle=":", label=held_until)
    below.set(yscale="log", xlabel="step", ylabel="relative difference\nfrom 1 process")
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # inside it would lie on the points
    below.legend(fontsize="small", title="no point: equal to the bit", title_fontsize="small", **beside)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100, bbox_inches="tight")
    plt.close(figure)
    return True


def process_counts(text: str) -> list[int]:
    counts = [cli.positive_int(word) for word in text.split(",")]
    if counts[0] != 1 or any(24 % count for count in counts):
        raise runtime.UserError(f"--processes {text}: begin with 1, and only numbers that divide the batch of 24")
    return counts


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--processes", default="1,2,3,8", help="how many, with commas between; the first is 1")
    add("--steps", type=cli.positive_int, default=40, help=f"of every run, more than {CLAIMED_STEPS}")
    add("--seq-len", type=cli.positive_int, default=32)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--timeout", type=cli.positive_int, default=300, help="seconds that one run may take")
    add("--plot", type=Path, default=REPO / "docs/images/loss_curves.png", metavar="PATH")
    args = parser.parse_args()
    counts = process_counts(args.processes)
    if args.steps <= CLAIMED_STEPS:
        raise runtime.UserError(f"--steps {args.steps}: more than {CLAIMED_STEPS}, over which the losses are compared")
    flags = ["--model", "nano", "--dtype", "fp32", "--deterministic", "--device", args.device, *BATCH]
    flags += ["--seq-len", str(args.seq_len), "--steps", str(args.steps), "--log-every", "1"]
    about = {
        "device": cpu()["cpu"] if args.device == "cpu" else "cuda",
        **cpu(),
        **versions("numpy"),
        "date": date.today().isoformat(),
        "command": f"python benchmarks/loss_curves.py {' '.join(sys.argv[1:])}".strip(),
        "shape": f"nano, fp32, 24 sequences of {args.seq_len} tokens per step, {args.steps} steps",
    }
    print(facts(about), flush=True)

    curves = {}
    with tempfile.TemporaryDirectory(prefix="loss-curves-") as name:
        folder = Path(name)
        try:
            for count in counts:
                label = "1 process" if count == 1 else f"{count} processes"
                curves[label] = train(count, flags, folder, args.timeout)
                print(f"{label}: loss {curves[label][0]:.6f} to {curves[label][-1]:.6f}", flush=True)
            moved = "3 processes, then 2"
            curves[moved], stopped_at = train_and_move(flags, args.steps // 3, folder, args.timeout)
            print(f"{moved}: stopped after step {stopped_at}, then to {curves[moved][-1]:.6f}", flush=True)
        except Failed as error:
            raise runtime.UserError(f"a run failed: {error}") from None

    reference, *others = curves
    differ = {name: differences(curves[name], curves[reference]) for name in others}
    later = f"steps {CLAIMED_STEPS + 1} to {args.steps}"
    rows = [["run", f"largest relative difference, steps 1 to {CLAIMED_STEPS}", later]]
    for label, values in differ.items():
        rows.append([f"on {label}", f"{max(values[:CLAIMED_STEPS]):.1e}", f"{max(values[CLAIMED_STEPS:]):.1e}"])
    largest = max(max(values[:CLAIMED_STEPS]) for values in differ.values())
    holds = largest <= TOLERANCE
    verdict = f"the losses of the first {CLAIMED_STEPS} steps agree within {largest:.1e}; we aimed at {TOLERANCE:g}"
    text = f"{table(rows)}\n\n- **{'met' if holds else 'missed'}**: {verdict}"
    result = {**about, "losses": curves, "relative_differences": differ, "stopped_after_step": stopped_at}
    result |= {"claimed_steps": CLAIMED_STEPS, "tolerance": TOLERANCE, "largest_relative_difference": largest}
    shell = f"torchrun --standalone --nproc_per_node=N {SCRIPT} {' '.join(flags)}"
    report = f"# The loss on 1, 2, 3 and 8 processes\n\n{facts(about)}\n\n{text}\n\n```\n{shell}\n```\n"
    written = write_results(about["device"], "-loss-curves", result, report)
    print(f"\n{text}\n\nwritten: {written.relative_to(REPO)} and .json")
    title = f"nano, fp32, --deterministic, global batch 24 x {args.seq_len} tokens, {args.device.upper()}"
    if draw(curves, differ, stopped_at, title, args.plot):
        print(f"picture: {args.plot}")
    if holds:
        print(f"checked: {verdict}")
    return 0 if holds else 1


if __name__ == "__main__":
    exits.run(main)
