"""What a run reports: loss, speed, memory, stragglers, on the console and in metrics.jsonl."""

import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common import report
from common.exits import UserError
from common.hardware import device_name, peak_flops
from common.runtime import full_tensor, gather, is_rank0, on_rank0, ranks, synchronize
from lm.data import Batches
from lm.shapes import Config, flops_per_token, parameter_count


class Meter:
    """Times a run between log lines and keeps its records. Rank 0 writes; every rank must call log and finish."""

    def __init__(
        self, folder: Path, args, *, config: Config, device, batches: Batches, start_step: int
    ) -> None:
        if start_step > args.steps:
            raise UserError(
                f"--steps {args.steps}: the run in {folder} is at step {start_step} already"
            )
        self.folder, self.args, self.config, self.device = folder, args, config, device
        self.world_size, self.tokens_per_step = ranks()[1], batches.tokens_per_step
        self.peak_flops = peak_flops(device_name(device), args.dtype)
        self.start_step = self.last_step = start_step
        self.speeds: list[float] = []  # tokens per second between log lines
        self.data_seconds, self.forward_seconds = 0.0, None
        self.records: list[dict] = []
        on_rank0(self._open)
        self.start = self.last_time = time.perf_counter()

    def _open(self) -> None:
        file = self.folder / "metrics.jsonl"
        # what a killed run wrote after its last checkpoint happens again, so its record goes
        self.records = [
            record for record in read_records(file) if record["step"] <= self.start_step
        ]
        file.with_suffix(".tmp").write_text(
            "".join(json.dumps(record) + "\n" for record in self.records)
        )
        file.with_suffix(".tmp").rename(file)
        self.file = file.open("a")

    def _write(self, record: dict, line: str) -> None:
        self.records.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        print(line, flush=True)

    def next(self, stream: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The next micro-batch, on its way to the device, and how long this rank has waited for it."""
        start = time.perf_counter()
        inputs, targets = (part.to(self.device, non_blocking=True) for part in next(stream))
        self.data_seconds += time.perf_counter() - start
        return inputs, targets

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Times the first forward after each log line: what a rank computes alone, before any collective. Only there
        is the GPU waited for: elsewhere that would end the very overlap that makes a step fast."""
        if self.forward_seconds is not None:
            yield
            return
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.forward_seconds = time.perf_counter() - start

    def log(
        self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, skipped_steps=0, scale=1.0
    ) -> None:
        """One line for the steps since the last: the last one's global loss and norm, tokens/s of all wall time since.
        UserError if one is not finite, before anything is saved: what a step has spoilt stays in the weights."""
        loss, grad_norm = (
            loss.item(),
            full_tensor(grad_norm).item(),
        )  # waits for the GPU, once a line
        # an fp16 gradient may overflow: the scaler skips that step and tries a smaller scale, down to 1
        if (
            not math.isfinite(loss)
            or scale < 1
            or not (math.isfinite(grad_norm) or self.args.dtype == "fp16")
        ):
            raise UserError(
                f"loss or gradient not finite by step {step}: lower --lr, raise --warmup-steps or use bf16"
            )
        now = time.perf_counter()
        seconds = now - self.last_time
        self.speeds.append((step - self.last_step) * self.tokens_per_step / seconds)
        memory = torch.cuda.memory_stats(self.device) if self.device.type == "cuda" else {}
        peaks = [memory.get(f"{kind}_bytes.all.peak", 0) for kind in ("active", "reserved")]
        mine = (self.data_seconds, self.data_seconds + (self.forward_seconds or 0.0), *peaks)
        data, busy, active, reserved = zip(*gather(mine), strict=True)
        if is_rank0():
            record = {
                "step": step,
                "loss": loss,
                "lr": lr,
                # JSON has no infinity
                "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
                "tokens": step * self.tokens_per_step,
                "tokens_per_second": self.speeds[-1],
                "mfu": self.mfu(self.speeds[-1]),
                "data_wait_share": max(data) / seconds,
                "memory_active_bytes": max(active) or None,
                "memory_reserved_bytes": max(reserved) or None,
                "slowest_rank": busy.index(max(busy)) if len(busy) > 1 else None,
                "slowest_rank_lag": max(busy) / statistics.median_low(busy) - 1
                if len(busy) > 1
                else None,
                "skipped_steps": skipped_steps,
                "loss_scale": scale,
            }
            self._write(record, _line(record, self.args.steps))
        self.data_seconds, self.forward_seconds = 0.0, None
        self.last_step, self.last_time = step, now

    def log_eval(self, step: int, val_loss: float) -> None:
        """Record the held-out loss after `step`; UserError if it is not finite."""
        if not math.isfinite(val_loss):
            raise UserError(f"the held-out loss is {val_loss} after step {step}: lower --lr")
        if is_rank0():
            self._write(
                {"step": step, "val_loss": val_loss},
                f"step {step:>6} | held-out loss {val_loss:.4f}",
            )

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOP/s over the peak of all ranks' devices; None where the peak is not known."""
        flops = tokens_per_second * flops_per_token(self.config, self.args.seq_len)
        return flops / (self.peak_flops * self.world_size) if self.peak_flops else None

    def finish(self, step: int, **own) -> None:
        """Print the summary (the run's whole curve, this process's speed), write --json."""
        peak_memory = max(gather(report.peak_memory_bytes(self.device)))
        if not is_rank0():
            return
        losses, val_losses = (
            [each[name] for each in self.records if name in each] for name in ("loss", "val_loss")
        )
        # the first compiles
        speed = statistics.median(self.speeds[1:] or self.speeds) if self.speeds else None
        summary = {
            "device": device_name(self.device),
            "world_size": self.world_size,
            "dtype": self.args.dtype,
            "model": self.args.model,
            "parameters": parameter_count(self.config),
            "steps": step,
            "tokens": step * self.tokens_per_step,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "val_loss": val_losses[-1] if val_losses else None,
            "tokens_per_second": speed,
            "mfu": speed and self.mfu(speed),
            "peak_flops_per_device": self.peak_flops,
            "peak_memory_bytes": peak_memory,
            "seconds": time.perf_counter() - self.start,
            **own,
        }
        report.summary(summary, self.args.json)


def _line(record: dict, steps: int) -> str:
    parts = [
        f"step {record['step']:>6}/{steps}",
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        "norm overflow" if record["grad_norm"] is None else f"norm {record['grad_norm']:.2f}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"MFU {report.for_people('mfu', record['mfu'])}",
        f"data {record['data_wait_share']:.1%}",
    ]
    if record["memory_active_bytes"]:
        parts.append(f"active {record['memory_active_bytes'] / 2**30:.2f} GiB")
    if record["slowest_rank"] is not None:
        parts.append(f"slowest rank {record['slowest_rank']} +{record['slowest_rank_lag']:.0%}")
    if record["skipped_steps"]:
        parts.append(f"{record['skipped_steps']} skipped, scale {record['loss_scale']:g}")
    return " | ".join(parts)


def read_records(file: Path) -> list[dict]:
    """The records of a metrics.jsonl, without lines that a kill or a power cut has damaged."""
    records = []
    for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and "step" in record]
