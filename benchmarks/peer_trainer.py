"""The other side of training.py --case trainer: transformers' Trainer, with train.py's flags.

    python benchmarks/peer_trainer.py --steps 30

The Trainer has the settings that a user would give it. TF32 is off, which its torch_compile would
switch on.
"""

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, hardware, report, runtime
from lm import data, shapes
from training import flags


class Windows(data.Sequences):
    """The sequences of 04_amp/train.py, as the Trainer takes them: the model shifts the labels."""

    def __getitem__(self, i: int) -> dict:
        inputs, _ = super().__getitem__(i)
        return {"input_ids": inputs, "labels": inputs}


def main() -> int:
    args = flags.TrainingParser(__doc__).parse_args()
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    device = runtime.single_device(args.device)
    args.dtype = hardware.choose_dtype(args.dtype, device)
    shapes.use_recipe(args)
    runtime.seed_all(args.seed)
    corpus = data.load_corpus(args.data, args.tokenizer, args.model, args.run_dir, args.eval_data)
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    net = LlamaForCausalLM(LlamaConfig(**shapes.config_json(config)))
    clock: list[tuple[int, float]] = []  # a step, and when it was over

    class Clock(TrainerCallback):
        def on_step_end(self, _args, state, _control, **_) -> None:
            if state.global_step == 1 or state.global_step % args.log_every == 0:
                runtime.synchronize(device)
                clock.append((state.global_step, time.perf_counter()))

    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.global_batch_size,
            learning_rate=args.lr,
            weight_decay=args.weight_decay,
            lr_scheduler_type="cosine",
            warmup_steps=args.warmup_steps,
            max_grad_norm=args.clip_norm,
            bf16=args.dtype == "bf16",
            torch_compile=args.compile,
            tf32=False,  # else torch_compile switches it on; 04_amp/train.py never does
            optim="adamw_torch_fused" if device.type == "cuda" else TrainingArguments.optim,
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=device.type == "cuda",
            logging_steps=args.log_every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=args.seed,
        )
        trainer = Trainer(
            net, settings, train_dataset=Windows(corpus.train, args.seq_len), callbacks=[Clock()]
        )
        trainer.train()
    for parameter in net.parameters():
        assert parameter.dtype == torch.float32, "the Trainer's weights are not fp32"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32", "the Trainer has switched TF32 on"

    tokens_per_step = args.global_batch_size * args.seq_len
    speeds = []  # tokens per second between two entries of the clock
    for (first_step, start), (last_step, end) in pairwise(clock):
        speeds.append((last_step - first_step) * tokens_per_step / (end - start))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    speed = statistics.median(speeds)
    flops_per_second = speed * shapes.flops_per_token(config, args.seq_len)
    peak = hardware.peak_flops(hardware.device_name(device), args.dtype)
    summary = {
        "device": hardware.device_name(device),
        "dtype": args.dtype,
        "model": args.model,
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "first_loss": losses[0],  # the mean of the first --log-every steps
        "last_loss": losses[-1],
        "tokens_per_second": speed,
        "mfu": flops_per_second / peak if peak else None,
        "peak_memory_bytes": report.peak_memory_bytes(device),
    }
    report.summary(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
