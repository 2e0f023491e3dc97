"""Measure a training run: loss, throughput, MFU, memory and stragglers.

`Meter` prints a line every --log-every steps, appends the same values to metrics.jsonl in the
folder of the run, and prints a summary at the end. The records can also go to TensorBoard and to
Weights & Biases, and loss.png shows them: see training/trackers.py. `Meter` knows nothing about the
model: the caller gives it the number of floating-point operations per token.
"""

import contextlib
import json
import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common import files, output, report
from common.exits import STOP_FILE, UserError, writing
from common.hardware import device_name
from common.progress import print_line
from common.runtime import all_gather, full_tensor, is_rank0, on_rank0, ranks, synchronize
from training import run_folder, trackers
from training.run_folder import read_records

COLUMNS = 80  # of the console
# A log line shows the share of time in the loader, and the slowest rank, if they are at least this.
LEAST_DATA_WAIT = 0.01
LEAST_LAG = 0.1
# The time between two pictures is at least 100 times that of a picture: they take 1 % of the run.
PLOT_INTERVAL = 100


class Meter:
    """Measure the steps between two log lines, and keep the records of the whole run.

    Every rank must create it, and call `log` and `finish`: they are collectives. Rank 0 prints and
    writes.

    Arguments:
        folder: the folder of the run, where metrics.jsonl is
        steps: the step at which the run ends
        start_step: the step from which it is resumed, or 0
        tokens_per_step: tokens that all ranks together read in a step
        flops_per_token: floating-point operations to train on one token; None if not known
        peak_flops: FLOP/s of one device in `dtype`, from its data sheet; None if not known
        dtype: fp32, bf16 or fp16. With fp16 a gradient norm may be infinite, see `log`
        tensorboard: also write event files for TensorBoard
        wandb: also log to Weights & Biases
        held_out: a hash of the held-out data, for --keep-best; None if it cannot change

    Without flops_per_token or peak_flops, MFU is None in the records, and log lines leave it out.
    Raise UserError if the run is past `steps` already, or if W&B does not accept it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        start_step: int,
        tokens_per_step: int,
        flops_per_token: float | None,
        peak_flops: float | None,
        device: torch.device,
        dtype: str,
        tensorboard: bool = False,
        wandb: bool = False,
        held_out: str | None = None,
    ) -> None:
        if start_step > steps:
            raise UserError(f"--steps {steps}: the run in {folder} is at step {start_step} already")
        self.folder = folder
        self.steps = steps
        self.start_step = start_step
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.device = device
        self.dtype = dtype
        self.held_out = held_out
        _, self.world_size, _ = ranks()

        # The whole run's records, on rank 0, and where they go beside metrics.jsonl.
        self.records: list[dict] = []
        on_rank0(self._open_file)
        on_rank0(lambda: self._open_trackers(tensorboard, wandb))
        self.plotted_records = 0
        self.next_plot_time = 0.0
        self.told_lost_output = False

        # Measurements since the last log line.
        self.data_seconds = 0.0
        self.micro_batches = 0
        self.forward_seconds: float | None = None
        self.last_step = start_step
        self.tokens_per_second: list[float] = []  # one value per log line of this process
        self.start_time = time.perf_counter()
        self.last_time = self.start_time

    def next(self, stream: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the next micro-batch, on the device. Add the time of this call to data_seconds.

        On a GPU this time costs speed only if the GPU has no work queued meanwhile. The copy to a
        GPU runs in the background if `stream` yields pinned memory.
        """
        start = time.perf_counter()
        inputs, targets = next(stream)
        inputs = inputs.to(self.device, non_blocking=True)
        targets = targets.to(self.device, non_blocking=True)
        self.data_seconds += time.perf_counter() - start
        self.micro_batches += 1
        return inputs, targets

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Measure the first forward after each log line, to find the slowest rank.

        A forward is what a rank computes before it waits for other ranks. To measure it, the CPU
        must wait for the GPU before and after. That would end the overlap of CPU and GPU, which
        makes a step fast. So only one forward per log line is measured.
        """
        if self.forward_seconds is not None:
            yield
            return
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.forward_seconds = time.perf_counter() - start

    def log(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor,
        lr: float,
        skipped_steps: int = 0,
        scale: float = 1.0,
        **values: Tensor,
    ) -> None:
        """Print and record one line about the steps since the last line.

        `loss` and `grad_norm` are scalars of the last step, for the batch of all ranks. Tokens per
        second count all the time since the last line, with evaluation and saving.

        Raise UserError if the loss or the gradient norm is not finite. Call this before saving a
        checkpoint: the weights are useless after such a step. In fp16 an infinite gradient norm is
        normal: GradScaler skips that step and lowers `scale`. Below 1 it can no longer help.
        `values` are recorded, and not printed.
        """
        # .item() waits for the GPU: here, once per log line, and not in every step.
        loss_value = loss.item()
        norm_value = full_tensor(grad_norm).item()
        norm_is_bad = not math.isfinite(norm_value) and self.dtype != "fp16"
        if not math.isfinite(loss_value) or norm_is_bad or scale < 1:
            raise UserError(
                f"loss or gradient not finite by step {step}: "
                "lower --lr, raise --warmup-steps or use bf16"
            )

        now = time.perf_counter()
        seconds = now - self.last_time
        tokens_per_second = (step - self.last_step) * self.tokens_per_step / seconds
        self.tokens_per_second.append(tokens_per_second)

        memory = {}
        if self.device.type == "cuda":
            memory = torch.cuda.memory_stats(self.device)
        # What a rank does on its own for one micro-batch: get it, and one forward.
        seconds_per_load = self.data_seconds / max(1, self.micro_batches)
        measured_by_rank = all_gather(
            {
                "data_seconds": self.data_seconds,
                "own_seconds": seconds_per_load + (self.forward_seconds or 0.0),
                "active_bytes": memory.get("active_bytes.all.peak", 0),
                "reserved_bytes": memory.get("reserved_bytes.all.peak", 0),
            }
        )
        if is_rank0():
            slowest_rank, slowest_rank_lag = _find_slowest_rank(measured_by_rank)
            record = {
                "step": step,
                "loss": loss_value,
                "lr": lr,
                # JSON has no infinity.
                "grad_norm": norm_value if math.isfinite(norm_value) else None,
                "tokens": step * self.tokens_per_step,
                "tokens_per_second": tokens_per_second,
                "mfu": self.mfu(tokens_per_second),
                "data_wait_share": _largest(measured_by_rank, "data_seconds") / seconds,
                "memory_active_bytes": _largest(measured_by_rank, "active_bytes") or None,
                "memory_reserved_bytes": _largest(measured_by_rank, "reserved_bytes") or None,
                "slowest_rank": slowest_rank,
                "slowest_rank_lag": slowest_rank_lag,
                "skipped_steps": skipped_steps,
                "loss_scale": scale,
            }
            record |= {name: value.tolist() for name, value in values.items()}
            self._write(record, _line(record, self._last_logged(), self.steps))

        self.data_seconds = 0.0
        self.micro_batches = 0
        self.forward_seconds = None
        self.last_step = step
        self.last_time = now

    def log_eval(self, step: int, val_loss: float, sample: str | None = None) -> None:
        """Print and record the loss on held-out data after `step`, and a text of the model.

        `sample` is what TrainingObjects.sample returns. Raise UserError if the loss is not finite.
        """
        if not math.isfinite(val_loss):
            raise UserError(f"the held-out loss is {val_loss} after step {step}: lower --lr")
        if is_rank0():
            record: dict = {"step": step, "val_loss": val_loss}
            if self.held_out is not None:
                record["held_out"] = self.held_out
            line = f"step {step:>6} | held-out loss {val_loss:.4f}"
            if sample is not None:
                record["sample"] = sample
                line += "\n" + _sample_line(sample)
            self._write(record, line)

    def save_plot(self) -> None:
        """Draw loss.png. Call it at each save; `finish` calls it, too.

        Only rank 0 draws. To draw takes about 0.1 s, so this does nothing if the last picture is
        recent. A picture that cannot be drawn does not end the run: a line says why.
        """
        if time.perf_counter() >= self.next_plot_time:
            self._draw_plot()

    def _draw_plot(self) -> None:
        if not is_rank0() or self.plotted_records == len(self.records):
            return
        start = time.perf_counter()
        file = self.folder / "loss.png"
        try:
            trackers.save_loss_plot(self.records, file)
        except Exception as error:  # the run is worth more than its picture
            print_line(f"{file} was not drawn: {type(error).__name__}: {error}")
        end = time.perf_counter()
        self.plotted_records = len(self.records)
        self.next_plot_time = end + PLOT_INTERVAL * (end - start)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the model FLOPs utilization (MFU), a share of the peak of all devices.

        Return None if the peak or the FLOPs per token are not known.
        """
        if self.peak_flops is None or self.flops_per_token is None:
            return None
        return tokens_per_second * self.flops_per_token / (self.peak_flops * self.world_size)

    def finish(
        self,
        step: int,
        *,
        model: str,
        parameters: int | None,
        json_path: Path | None,
        details: dict | None = None,
        **own_values,
    ) -> None:
        """Print the summary of the run, and write it to `json_path` unless that is None.

        Losses are those of the whole run, throughput and seconds those of this process. `model` is
        a name, `parameters` a count. `own_values` are further keys of the summary, and `details`
        those that are not printed.
        """
        peak_memory_bytes = max(all_gather(report.peak_memory_bytes(self.device)))
        if not is_rank0():
            return
        self._draw_plot()
        losses = [record["loss"] for record in self.records if "loss" in record]
        val_losses = [record["val_loss"] for record in self.records if "val_loss" in record]

        tokens_per_second = None
        mfu = None
        if self.tokens_per_second:
            # The first value includes compilation and the start of the data loader.
            values = self.tokens_per_second[1:] or self.tokens_per_second
            tokens_per_second = statistics.median(values)
            mfu = self.mfu(tokens_per_second)

        summary = {
            "device": device_name(self.device),
            "world_size": self.world_size,
            "dtype": self.dtype,
            "model": model,
            "parameters": parameters,
            "steps": step,
            "tokens": step * self.tokens_per_step,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "val_loss": val_losses[-1] if val_losses else None,
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            "peak_flops_per_device": self.peak_flops,
            "peak_memory_bytes": peak_memory_bytes,
            "seconds": time.perf_counter() - self.start_time,
            **own_values,
        }
        report.summary(summary, json_path, details)
        self._print_what_is_left(step)

    def _print_what_is_left(self, step: int) -> None:
        """Print the folder of the run and its picture, how to ask its model, and how to go on."""
        print(f"\nrun:     {self.folder}")
        picture = self.folder / "loss.png"
        if picture.is_file():
            print(f"picture: {picture}")
        best = run_folder.find_best(self.folder)
        if best is not None and best.step < step:
            print(f"best:    {best.folder}, held-out loss {best.val_loss:.4f}")
        command = run_folder.command_to_ask(self.folder, step)
        if command is not None:
            print(f"ask it:  {command}")
        if step < self.steps and (self.folder / f"step-{step:08d}").is_dir():
            folder = shlex.quote(str(self.folder))
            print(f"go on:   the same command with --run-dir {folder} --resume")

    def print_stop(self, number: int, step: int, keep: int) -> None:
        """Print on rank 0 what has stopped the run after `step`: see stop_requested for `number`.

        `keep` is the flag --keep: with 0 nothing is saved.
        """
        if not is_rank0():
            return
        if number == STOP_FILE:
            name = "the file stop"
        elif number == signal.SIGINT:
            name = "Ctrl-C"
        else:
            name = signal.Signals(number).name
        folder = shlex.quote(str(self.folder))
        if keep:
            line = f"{name}: saved at step {step}. Continue with --run-dir {folder} --resume"
        else:
            line = f"{name}: stopped at step {step}, and --keep 0 saves no checkpoint"
        print_line(line)

    def _open_file(self) -> None:
        """Load the records up to the start step, and open metrics.jsonl to append more."""
        file = self.folder / "metrics.jsonl"
        # A killed run may have logged steps after its last checkpoint. The resumed run repeats
        # these steps, so their records are dropped.
        for record in read_records(file):
            if record["step"] <= self.start_step:
                self.records.append(record)

        with files.complete_file(file) as stream:
            for record in self.records:
                stream.write(json.dumps(record) + "\n")
        self.file = file.open("a", encoding="utf-8")

    def _open_trackers(self, tensorboard: bool, wandb: bool) -> None:
        self.show = trackers.open_trackers(
            self.folder,
            tensorboard=tensorboard,
            wandb=wandb,
            start_step=self.start_step,
            records=self.records,
        )

    def _last_logged(self) -> dict:
        """Return the last record of training, or {}."""
        for record in reversed(self.records):
            if "loss" in record:
                return record
        return {}

    def _write(self, record: dict, line: str) -> None:
        self.records.append(record)
        with writing("metrics", self.folder):
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            self.show(record)
        print_line(line)
        if "stdout" in output.lost and not self.told_lost_output:
            self.told_lost_output = True
            print(
                f"the log cannot be printed any more ({output.lost['stdout'].strerror}): "
                f"the run goes on, and its log is in {self.folder / 'metrics.jsonl'}",
                file=sys.stderr,
                flush=True,
            )


def _largest(measured_by_rank: list[dict], name: str) -> float:
    return max(measured[name] for measured in measured_by_rank)


def _find_slowest_rank(measured_by_rank: list[dict]) -> tuple[int | None, float | None]:
    """Return the slowest rank, and how much longer it takes than the median rank, as a share.

    Compare the time that each rank spends on its own for a micro-batch: to get it, and one forward.
    """
    if len(measured_by_rank) == 1:
        return None, None
    own_seconds = [measured["own_seconds"] for measured in measured_by_rank]
    slowest_rank = own_seconds.index(max(own_seconds))
    lag = max(own_seconds) / statistics.median_low(own_seconds) - 1
    return slowest_rank, lag


def _sample_line(sample: str) -> str:
    """Return the line for the console about a generated text, which is shortened."""
    line = f"  sample: {sample}"
    if len(line) > COLUMNS:
        line = line[: COLUMNS - 3] + "..."
    return line


def _line(record: dict, previous: dict, steps: int) -> str:
    """Return what the console shows of a record.

    Values that are seldom of interest are shown when they are: much time in the loader, a slow
    rank, and memory and skipped steps that differ from those of the `previous` record.
    """
    norm = "norm overflow"
    if record["grad_norm"] is not None:
        norm = f"norm {record['grad_norm']:.2f}"
    lr = f"{record['lr']:.2e}".replace("e-0", "e-")
    parts = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"loss {record['loss']:.4f}",
        f"lr {lr}",
        norm,
        f"{record['tokens_per_second']:,.0f} tok/s",
    ]
    if record["mfu"] is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record["data_wait_share"] >= LEAST_DATA_WAIT:
        parts.append(f"loader {record['data_wait_share']:.1%}")
    lag = record["slowest_rank_lag"]
    if lag is not None and lag >= LEAST_LAG:
        parts.append(f"rank {record['slowest_rank']} +{lag:.0%}")
    active_bytes = record["memory_active_bytes"]
    if active_bytes and active_bytes != previous.get("memory_active_bytes"):
        parts.append(f"active {active_bytes / 2**30:.2f} GiB")
    if record["skipped_steps"] > previous.get("skipped_steps", 0):
        parts.append(f"{record['skipped_steps']} skipped, scale {record['loss_scale']:g}")
    return _fold(parts)


def _fold(parts: list[str]) -> str:
    """Join the parts of a line. What does not fit in COLUMNS goes to a second, indented line."""
    line = parts[0]
    folded = []
    for part in parts[1:]:
        if len(line) + len(f" | {part}") > COLUMNS:
            folded.append(line)
            line = f"  {part}"
        else:
            line += f" | {part}"
    folded.append(line)
    return "\n".join(folded)
