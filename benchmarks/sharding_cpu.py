"""What sharding costs two CPU ranks: 06_fsdp_zero/train_fsdp.py and DeepSpeed's ZeRO-3 beside 05_ddp/train.py.

All train the same model on the same batches in fp32, with two ranks of one thread each (gloo), in processes of their
own. Rounds alternate, so that a machine that slows down slows all. Sharding sends half as many bytes again as DDP, and
on a CPU the same cores send and compute.

    python benchmarks/sharding_cpu.py              rounds of all, interleaved
    python benchmarks/sharding_cpu.py --rounds 9   more of them

Look for: the ratio to DDP, taken round by round, beside its target. Results go to benchmarks/results/.
"""

import os
import sys
from datetime import date

from _shared import (
    LOG_EVERY,
    REPO,
    TORCHRUN,
    WARMUP_STEPS,
    Failed,
    cpu,
    facts,
    spread_cells,
    train,
    versions,
    write_results,
)

from common import cli, exits, runtime
from common.report import spread, table

SIDES = {
    "DDP": ("05_ddp/train.py", []),
    "FSDP": ("06_fsdp_zero/train_fsdp.py", []),
    "ZeRO-3, DeepSpeed": ("06_fsdp_zero/train_zero.py", ["--stage", "3"]),
}
FSDP_TARGET = 0.8  # of DDP's tokens/s


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=cli.positive_int, default=5, help="timed rounds, after one thrown away")
    add("--steps", type=cli.positive_int, default=40, help=f"per run, the first {WARMUP_STEPS} not timed")
    add("--model", default="nano", help="as in 05_ddp/train.py")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step, over both ranks")
    add("--timeout", type=cli.positive_int, default=600, help="seconds that one run may take")
    args = parser.parse_args()
    if args.steps < WARMUP_STEPS + LOG_EVERY:
        raise runtime.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")
    if cpu()["cores"] < 2:
        raise runtime.UserError("two ranks need two cores, and this process may use one")
    about = {"device": cpu()["cpu"], **cpu(), **versions("deepspeed"), "date": date.today().isoformat()}
    about["command"] = f"python benchmarks/sharding_cpu.py {' '.join(sys.argv[1:])}".strip()
    print(facts(about), flush=True)

    shape = ["--model", args.model, "--device", "cpu", "--dtype", "fp32", "--seq-len", str(args.seq_len)]
    shape += ["--global-batch-size", str(args.batch_size), "--steps", str(args.steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    speeds: dict[str, list[float]] = {side: [] for side in SIDES}
    for round_ in range(args.rounds + 1):
        for side, (script, flags) in SIDES.items():
            try:
                launcher = [*TORCHRUN, "--nproc_per_node=2"]
                run = train(script, [*shape, *flags], environment, args.timeout, launcher)
            except Failed as error:
                raise runtime.UserError(f"a run failed: {error}") from None
            name = f"round {round_}" if round_ else "warm-up"
            print(f"{name:<8} {side:<18} {run['tokens_per_second']:,.0f} tokens/s", flush=True)
            if round_:
                speeds[side].append(run["tokens_per_second"])

    ratios = {
        side: spread([ours / ddp for ours, ddp in zip(speeds[side], speeds["DDP"], strict=True)]) for side in SIDES
    }
    rows = [["", "n", "median", "min", "max"]]
    for side, values in speeds.items():
        rows.append([f"{side}, tokens/s", *spread_cells(spread(values))])
    for side in [*SIDES][1:]:
        rows.append([f"{side} / DDP", *spread_cells(ratios[side], ".3f")])
    verdict = "met" if ratios["FSDP"]["median"] >= FSDP_TARGET else "missed"
    claim = f"- **{verdict}**: FSDP over DDP: {ratios['FSDP']['median']:.3f}; we aimed at {FSDP_TARGET:g}"
    how = (
        f"{args.model}, fp32, 2 ranks of one thread, {args.batch_size} sequences of {args.seq_len} tokens per step, "
        f"{args.steps} steps, the first {WARMUP_STEPS} not timed."
    )
    commands = [
        f"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 {script} {' '.join([*shape, *flags])} "
        f"--log-every {LOG_EVERY}"
        for script, flags in SIDES.values()
    ]
    shell = "\n".join(commands)
    text = f"{how}\n\n{table(rows)}\n\n{claim}"
    report = f"# Sharding on two CPU ranks\n\n{facts(about)}\n\n{text}\n\n```\n{shell}\n```\n"
    result = {**about, "speeds": speeds, "ratios": ratios, "verdict": verdict, "commands": commands}
    file = write_results(about["device"], "-sharding", result, report)
    print(f"\n{text}\n\nwritten: {file.relative_to(REPO)} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
