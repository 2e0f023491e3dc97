"""Show the records of a run in other programs: TensorBoard, Weights & Biases, and a picture.

`training.meter.Meter` calls open_trackers and save_loss_plot on rank 0, and passes each record that
it writes to metrics.jsonl. All of it goes into the folder of the run:

    tensorboard/        event files, for `tensorboard --logdir runs`
    wandb/, wandb.id    the files of W&B, and the id by which a resumed run continues the same run
    loss.png            the losses of the whole run
"""

import os
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from common import files
from common.exits import UserError, at_exit
from common.runtime import is_rank0
from training.run_folder import read_settings

WANDB_PROJECT = "gpu-training-reference"  # unless the environment variable of this name is set

# Names of charts. What stands before the slash is the section in which both trackers show a chart.
CHARTS = {
    "loss": "loss/train",
    "val_loss": "loss/held-out",
    "lr": "optimizer/lr",
    "grad_norm": "optimizer/grad_norm",
    "skipped_steps": "optimizer/skipped_steps",
    "loss_scale": "optimizer/loss_scale",
    "tokens": "progress/tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "data_wait_share": "speed/data_wait_share",
    "slowest_rank": "speed/slowest_rank",
    "slowest_rank_lag": "speed/slowest_rank_lag",
    "memory_active_bytes": "memory/active_bytes",
    "memory_reserved_bytes": "memory/reserved_bytes",
}


def check_packages(*, tensorboard: bool, wandb: bool) -> None:
    """Raise UserError if a package for --tensorboard or --wandb is not installed.

    Only rank 0 writes, so only its node needs them.
    """
    if not is_rank0():
        return
    for package, wanted in (("tensorboard", tensorboard), ("wandb", wandb)):
        if wanted and find_spec(package) is None:
            raise UserError(f"--{package} needs the package {package}: pip install {package}")


def open_trackers(
    folder: Path, *, tensorboard: bool, wandb: bool, start_step: int, records: list[dict]
) -> Callable[[dict], None]:
    """Return a function that shows a record in TensorBoard and W&B, if these are switched on.

    CHARTS renames the values. Others keep their names. Both are closed when the script ends.

    Arguments:
        folder: the folder of the run
        start_step: the step from which the run is resumed, or 0
        records: the records up to start_step

    Raise UserError if W&B does not accept the run, for example because nobody is logged in.
    """
    writers = []
    if tensorboard:
        writers.append(_open_tensorboard(folder, start_step, records))
    if wandb:
        writers.append(_open_wandb(folder))

    def log(record: dict) -> None:
        for write in writers:
            write(_plain_values(record))

    return log


def _open_tensorboard(folder: Path, start_step: int, records: list[dict]) -> Callable[[dict], None]:
    """Return a function that writes values as TensorBoard's event files, under their step.

    A resumed run repeats the steps after its checkpoint. TensorBoard then drops what the event
    files have of these steps. If there are no event files, as when the run had no --tensorboard
    until now, the records up to the checkpoint are written first.
    """
    from torch.utils.tensorboard import SummaryWriter

    logs = folder / "tensorboard"
    is_new = not any(logs.glob("events.out.tfevents.*"))
    writer = SummaryWriter(str(logs), purge_step=start_step + 1)
    at_exit.callback(writer.close)

    def write(values: dict) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                writer.add_text(name, value, values["step"])
            elif name != "step":
                writer.add_scalar(name, value, values["step"])
        writer.flush()

    if is_new:
        for record in records:
            write(_plain_values(record))
    return write


def _open_wandb(folder: Path) -> Callable[[dict], None]:
    """Return a function that logs values to Weights & Biases.

    The project is WANDB_PROJECT, the run is named after the folder. The settings of the run are its
    W&B config. With the environment variable WANDB_MODE=offline it needs no network.

    A resumed run continues the run at W&B and logs the steps after its checkpoint again. W&B cannot
    drop what it has of them, so they have two points in a chart, which are equal.
    """
    import wandb

    id_file = folder / "wandb.id"
    if id_file.exists():
        run_id = id_file.read_text(encoding="utf-8").strip()
    else:
        run_id = secrets.token_hex(4)
        id_file.write_text(run_id + "\n", encoding="utf-8")

    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or WANDB_PROJECT,
            dir=str(folder),
            name=folder.name,
            id=run_id,
            resume="allow",
            config=read_settings(folder),
        )
    except (wandb.errors.Error, ValueError) as error:
        raise UserError(f"--wandb: {error} Run `wandb login`, or set WANDB_MODE=offline") from None
    # W&B counts calls of log, and drops calls with a smaller step than before. So the step is a
    # value like others, and charts are drawn over it.
    run.define_metric("*", step_metric="step")

    def finish(_kind, error: BaseException | None, _trace) -> None:
        run.finish(exit_code=0 if error is None else 1)  # waits until W&B has all of it

    at_exit.push(finish)
    return run.log


def _plain_values(record: dict) -> dict:
    """Return the numbers and texts of a record by chart, without values that are not known."""
    values = {}
    for name, value in record.items():
        if isinstance(value, int | float | str):
            values[CHARTS.get(name, name)] = value
    return values


def save_loss_plot(records: list[dict], file: Path) -> None:
    """Draw the losses and the learning rate over the steps as a PNG.

    After a failure the file is as it was before.
    """
    from matplotlib.figure import Figure  # without pyplot: into a file only, never on a screen

    training = [record for record in records if "loss" in record]
    held_out = [record for record in records if "val_loss" in record]
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))

    losses.plot(_column(training, "step"), _column(training, "loss"), label="training")
    if held_out:
        losses.plot(
            _column(held_out, "step"), _column(held_out, "val_loss"), "o-", label="held out"
        )
    losses.set_ylabel("loss, nats per token")
    losses.legend()

    rates.plot(_column(training, "step"), _column(training, "lr"))
    rates.set_ylabel("learning rate")
    rates.set_xlabel("step")
    for axes in (losses, rates):
        axes.grid(alpha=0.3)

    with files.complete_file(file, "wb") as stream:
        figure.savefig(stream, format="png", dpi=120)


def _column(records: list[dict], key: str) -> list[float]:
    return [record[key] for record in records]
