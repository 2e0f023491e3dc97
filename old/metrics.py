"""What a run tells: speed, memory and stragglers, on the console, in metrics.jsonl, TensorBoard and loss.png."""

import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from old.exits import UserError
from old.hardware import device_name, peak_flops
from old.report import describe, peak_memory_bytes, plot_loss, read_records, report
from old.runtime import gather, is_rank0, on_rank0, say, whole
from old.shapes import Config, flops_per_token, parameter_count

MFU_CONVENTION = "6(N - N_embedding) + 12·L·H·head_dim·seq_len FLOP per token, recomputation not counted"


def least_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm that the error of a gradient is divided by, at the least: a thousandth of all gradients' together.

    Some are almost zero, such as those of q and k for one token: of these there is only rounding to compare.
    """
    return torch.nn.utils.get_total_norm([*gradients]) / 1000


class Meter:
    """Times a run between log lines and keeps its records. Rank 0 writes; every rank must call log and finish.

    Tokens/s and MFU are those of the whole job, whatever part of the batch or of the model a rank has.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        model: str,
        config: Config,
        device: torch.device,
        dtype: str,
        seq_len: int,
        global_batch_size: int,
        steps: int,
        start_step: int,
    ) -> None:
        self.run_dir, self.device, self.dtype, self.steps = run_dir, device, dtype, steps
        self.model, self.parameters = model, parameter_count(config)
        self.devices = dist.get_world_size() if dist.is_initialized() else 1
        self.tokens_per_step = global_batch_size * seq_len
        self.flops_per_token = flops_per_token(config, seq_len)
        self.peak_flops = peak_flops(device_name(device), dtype)
        self.phases: dict[str, float] = defaultdict(float)
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.steps_since_log: list[Tensor] = []  # loss and gradient norm of each
        self.tokens_and_seconds: list[tuple[int, float]] = []  # between log lines
        self.records: list[dict] = []
        self.start_step = self.last_step = start_step
        if start_step > steps:
            raise UserError(f"--steps {steps}: the run in {run_dir} is at step {start_step} already")
        on_rank0(self._open)
        self.start = self.last_time = time.perf_counter()

    def _open(self) -> None:
        file = self.run_dir / "metrics.jsonl"
        self.tensorboard = None
        try:
            # what a killed run wrote after its last checkpoint happens again, so its record goes
            self.records = [record for record in read_records(file) if record["step"] <= self.start_step]
            file.with_suffix(".tmp").write_text("".join(json.dumps(record) + "\n" for record in self.records))
            file.with_suffix(".tmp").rename(file)
            self.file = file.open("a")
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(self.run_dir / "tensorboard", purge_step=self.start_step + 1)
        except ImportError:
            say("no TensorBoard files (pip install tensorboard)")
        except OSError as error:
            raise UserError(f"--run-dir {self.run_dir} cannot be used: {error}") from None
        self.bar = tqdm(total=self.steps, initial=self.start_step, unit="step", disable=not sys.stderr.isatty())

    def _write(self, record: dict) -> None:
        self.records.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what a rank does on its own, "data" or "forward". It does not wait for the GPU: a
        synchronize() here would end the very overlap that is to be measured."""
        if self.device.type == "cuda" and name == "forward":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self.events.append((start, end))
        else:
            start = time.perf_counter()
            yield
            self.phases[name] += time.perf_counter() - start

    def note(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Keep a step's loss and gradient norm on the device: reading one would stall the GPU."""
        loss = whole(loss)
        # fully_shard with CPU offload has the gradients, and their norm, on the CPU
        self.steps_since_log.append(torch.stack((loss, whole(grad_norm).to(loss.device))))

    def since_last_log(self) -> Tensor:
        """What was noted since the last log line, [steps, 2]: the loss and the gradient norm of each step."""
        noted = torch.stack(self.steps_since_log)
        self.steps_since_log.clear()
        return noted

    def log(self, step: int, noted: Tensor, lr: float, skipped_steps: int, scale: float) -> None:
        """One line for the steps since the last; `noted` [steps, 2] has the global loss and the gradient
        norm of each, and the last is shown. Tokens/s counts all wall time since the last line.

        UserError names the first step whose loss or gradient is not finite, before anything of it is saved.
        """
        noted = noted.cpu()  # waits for the GPU, once a line
        # an fp16 gradient may overflow: the scaler skips that step and tries a smaller scale
        finite = noted[:, : 1 if self.dtype == "fp16" else 2].isfinite().all(1).tolist()
        if self.dtype == "fp16" and scale < 1:
            finite[-1] = False  # no scale is small enough: every step is skipped
        if not all(finite):
            first = step - len(finite) + 1 + finite.index(False)
            raise UserError(
                f"loss or gradient is not finite at step {first} (learning rate {lr:g}): lower --lr or --clip-norm, "
                "raise --warmup-steps or, with --dtype fp16, try bf16 or fp32"
            )
        now = time.perf_counter()
        forward = self.phases["forward"] + sum(start.elapsed_time(end) for start, end in self.events) / 1e3
        memory = torch.cuda.memory_stats(self.device) if self.device.type == "cuda" else {}
        ranks = gather(
            {
                "busy": self.phases["data"] + forward,  # before any collective: a slow rank shows here alone
                "data": self.phases["data"],
                "active": memory.get("active_bytes.all.peak"),
                "reserved": memory.get("reserved_bytes.all.peak"),
            }
        )
        if is_rank0():
            seconds, busy = now - self.last_time, [r["busy"] for r in ranks]
            tokens = (step - self.last_step) * self.tokens_per_step
            self.tokens_and_seconds.append((tokens, seconds))
            speed = tokens / seconds
            slowest = max(range(len(busy)), key=busy.__getitem__)
            record = {
                "step": step,
                "loss": noted[-1, 0].item(),
                "lr": lr,
                "grad_norm": noted[-1, 1].item() if noted[-1, 1].isfinite() else None,  # JSON has no infinity
                "tokens": step * self.tokens_per_step,
                "tokens_per_second": speed,
                "mfu": self.mfu(speed),
                "data_wait_share": max(r["data"] for r in ranks) / seconds,
                "memory_active_bytes": max((r["active"] for r in ranks if r["active"]), default=None),
                "memory_reserved_bytes": max((r["reserved"] for r in ranks if r["reserved"]), default=None),
                "slowest_rank": slowest if len(busy) > 1 else None,
                "slowest_rank_lag": busy[slowest] / statistics.median_low(busy) - 1 if len(busy) > 1 else None,
                "skipped_steps": skipped_steps,
                "loss_scale": scale,
            }
            self._write(record)
            if self.tensorboard:
                for name, value in record.items():
                    if value is not None and name != "step":
                        self.tensorboard.add_scalar(name, value, step)
            self.bar.update(step - self.last_step)
            tqdm.write(describe(record, self.steps), file=sys.stdout)
            sys.stdout.flush()
        self.phases.clear()
        self.events.clear()
        self.last_step, self.last_time = step, now

    def log_eval(self, step: int, val_loss: float) -> None:
        """Record the held-out loss after `step`; UserError if it is not finite."""
        if not math.isfinite(val_loss):
            raise UserError(f"the held-out loss is {val_loss} after step {step}: lower --lr")
        if is_rank0():
            self._write({"step": step, "val_loss": val_loss})
            if self.tensorboard:
                self.tensorboard.add_scalar("val_loss", val_loss, step)
            tqdm.write(f"step {step:>6} | held-out loss {val_loss:.4f}", file=sys.stdout)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOP/s over the peak of all ranks' devices; None where the peak is not known."""
        if self.peak_flops is None:
            return None
        return tokens_per_second * self.flops_per_token / (self.peak_flops * self.devices)

    def finish(self, step: int, json_path: Path | None, **own) -> None:
        """Plot the loss, print the summary (the run's whole curve, this process's speed), write --json."""
        peak_memory = max(gather(peak_memory_bytes(self.device)))
        if not is_rank0():
            return
        self.bar.close()
        if self.tensorboard:
            self.tensorboard.close()
        losses = [r["loss"] for r in self.records if "loss" in r]
        val_losses = [r["val_loss"] for r in self.records if "val_loss" in r]
        # saves and evaluations included, but not the first line, which pays for warm-up and compilation
        timed = self.tokens_and_seconds[1:] or self.tokens_and_seconds
        tokens, seconds = sum(tokens for tokens, _ in timed), sum(seconds for _, seconds in timed)
        speed = tokens / seconds if tokens else None
        summary = {
            "device": device_name(self.device),
            "world_size": self.devices,
            "dtype": self.dtype,
            "model": self.model,
            "parameters": self.parameters,
            "steps": step,
            "tokens": step * self.tokens_per_step,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "val_loss": val_losses[-1] if val_losses else None,
            "tokens_per_second": speed,
            "mfu": speed and self.mfu(speed),
            "mfu_convention": MFU_CONVENTION,
            "peak_flops_per_device": self.peak_flops,
            "peak_memory_bytes": peak_memory,
            "seconds": time.perf_counter() - self.start,
            "loss_plot": plot_loss(self.records, self.run_dir / "loss.png", "cross-entropy (nats per token)"),
            **own,
        }
        report(summary, json_path)
