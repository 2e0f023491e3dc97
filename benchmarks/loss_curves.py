"""The loss does not depend on how many processes train: curves of 1, 2, 3 and 8, and of a run that moved.

05_ddp/train.py runs with the same seed and global batch on each number of processes. Then the run of three goes back
to its first checkpoint, as a kill would have left it, and is resumed on two. All losses are equal but for rounding:
another number of processes adds the same gradients in another order.

    make figures                                           this and the other pictures in docs/images
    python benchmarks/loss_curves.py                       docs/images/loss_curves.png, some minutes on 2 cores
    python benchmarks/loss_curves.py --device cuda --processes 1,2,4,8    on a node with 8 GPUs

Look for: the largest relative difference over the first 20 steps, which must stay below 1e-5 (else exit code 1), and
how it grows later: training amplifies rounding. The losses and the differences go to benchmarks/results/.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from _measure import REPO, Side, about, choose_device, facts, write_results
from matplotlib.figure import Figure

from common import cli, exits
from common.metrics import read_records
from common.table import table

GLOBAL_BATCH_SIZE, SEQ_LEN = 24, 32  # 1, 2, 3 and 8 divide the batch
STEPS = 40  # of every run
CLAIMED_STEPS = 20  # over which the losses are claimed to agree
TOLERANCE = 1e-5  # relative


def train(processes: int, flags: str, run_dir: Path) -> list[float]:
    """The loss of every step. More than one thread would round in another order."""
    flags = f"{flags} --run-dir {run_dir}"
    Side("", "05_ddp/train.py", flags, processes, env={"OMP_NUM_THREADS": "1"}).run(timeout=600)
    return [record["loss"] for record in read_records(run_dir / "metrics.jsonl") if "loss" in record]


def draw(curves: dict[str, list[float]], differ: dict[str, list[float]], title: str) -> None:
    figure = Figure(figsize=(7, 6))
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for i, (name, losses) in enumerate(curves.items()):
        above.plot(range(1, STEPS + 1), losses, linewidth=9 - 7 * i / (len(curves) - 1), label=name)
    above.set(ylabel="training loss (nats per byte)", title=title)
    above.legend(fontsize="small")
    for i, (name, values) in enumerate(differ.items(), start=1):
        below.plot(
            range(1, STEPS + 1), [value or None for value in values], "o", markersize=4, color=f"C{i}", label=name
        )
    below.axhline(TOLERANCE, color="black", linewidth=0.8, linestyle="--", label=f"{TOLERANCE:g}: tolerance")
    below.axvline(CLAIMED_STEPS, color="black", linewidth=0.8, linestyle=":", label=f"of steps 1 to {CLAIMED_STEPS}")
    below.set(yscale="log", xlabel="step", ylabel="relative difference\nfrom 1 process")
    below.legend(fontsize="small", title="no point: equal to the bit", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(REPO / "docs/images/loss_curves.png", dpi=100, bbox_inches="tight")


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--processes", default="1,2,3,8", help=f"the first is 1, all divide {GLOBAL_BATCH_SIZE}, commas between")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    counts = [int(word) for word in args.processes.split(",") if word.isdecimal() and int(word) > 0]
    if counts[:1] != [1] or len(counts) < 2 or any(GLOBAL_BATCH_SIZE % count for count in counts):
        raise exits.UserError(f"--processes {args.processes}: begin with 1, all divide {GLOBAL_BATCH_SIZE}")
    device = choose_device(args.device)
    flags = f"--model nano --dtype fp32 --deterministic --device {device} --seq-len {SEQ_LEN} --log-every 1"
    flags += f" --global-batch-size {GLOBAL_BATCH_SIZE} --steps {STEPS} --save-every {STEPS // 3} --keep 9"
    facts_ = about("benchmarks/loss_curves.py", device)
    print(facts(facts_), flush=True)

    curves = {}
    with tempfile.TemporaryDirectory(prefix="loss-curves-") as folder:
        for count in counts:
            label = "1 process" if count == 1 else f"{count} processes"
            curves[label] = train(count, flags, Path(folder, str(count)))
            print(f"{label}: loss {curves[label][0]:.6f} to {curves[label][-1]:.6f}", flush=True)
        after, before = counts[len(counts) // 2 - 1 :][:2]
        for saved in Path(folder, str(before)).glob("step-*"):
            if saved.name != f"step-{STEPS // 3}":
                shutil.rmtree(saved)  # only the first checkpoint is left
        curves[f"{before} processes, then {after}"] = train(after, f"{flags} --resume", Path(folder, str(before)))

    reference, *others = curves
    differ = {}
    for name in others:
        pairs = zip(curves[name], curves[reference], strict=True)
        differ[name] = [abs(loss / other - 1) for loss, other in pairs]
    largest = max(max(values[:CLAIMED_STEPS]) for values in differ.values())
    rows = [["run", f"largest relative difference, steps 1 to {CLAIMED_STEPS}", f"to {STEPS}"]]
    rows += [[name, f"{max(values[:CLAIMED_STEPS]):.1e}", f"{max(values):.1e}"] for name, values in differ.items()]
    text = f"{table(rows)}\n\nThe last run moved after step {STEPS // 3}."
    result = {**facts_, "losses": curves, "relative_differences": differ, "moved_after_step": STEPS // 3}
    result |= {"claimed_steps": CLAIMED_STEPS, "tolerance": TOLERANCE, "largest_relative_difference": largest}
    shell = f"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=N 05_ddp/train.py {flags}"
    report = f"# The loss on {args.processes} processes\n\n{facts(facts_)}\n\n{text}\n\n```\n{shell}\n```"
    written = write_results(facts_["device"], "loss-curves", result, report)
    print(f"\n{text}\n\nwritten: {written} and .json")
    draw(curves, differ, f"nano, fp32, {GLOBAL_BATCH_SIZE} x {SEQ_LEN} tokens a step, {device}")
    if largest > TOLERANCE:
        print(f"FAILED: the losses differ by {largest:.1e}, more than {TOLERANCE:g}", file=sys.stderr)
        return 1
    print(f"checked: the losses of the first {CLAIMED_STEPS} steps agree within {largest:.1e}")
    return 0


if __name__ == "__main__":
    exits.run(main)
