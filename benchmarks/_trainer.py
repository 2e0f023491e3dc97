"""The other side of gpu_report.py and sharding_cpu.py: a training run by transformers' Trainer, which they start.

    python benchmarks/_trainer.py RESULT.json
    torchrun --nproc_per_node=2 benchmarks/_trainer.py RESULT.json --device cpu --shard fsdp

The Trainer has the settings a user would give it, but for TF32, which its torch_compile would switch on. --shard has
it cut the model over the ranks, by FSDP2 or by DeepSpeed's ZeRO-3, and what each rank then holds is checked.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from _shared import LOG_EVERY, TORCHRUN, WARMUP_STEPS, start
from torch.distributed.tensor import DTensor

from old import cli, data, exits, runtime, shapes

SAME_NAMES = (  # in our configuration and in that of transformers
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)


def train_with_trainer(flags: list[str], env: dict[str, str], timeout: float, ranks: int | None = None) -> dict:
    """Run this file, under torchrun if ranks are given; what it measured, in the same terms as _shared.train()."""
    launcher = [*TORCHRUN, f"--nproc_per_node={ranks}"] if ranks else []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        result = Path(folder, "result.json")
        start([sys.executable, *launcher, __file__, str(result), *flags], env, timeout)
        return json.loads(result.read_text())


class Windows(data.Sequences):
    """The same windows in the form that the Trainer wants; the model shifts the labels itself."""

    def __getitem__(self, i: int) -> dict:
        inputs, _ = super().__getitem__(i)
        return {"input_ids": inputs, "labels": inputs}


def sharding(how: str | None, shape: shapes.Config) -> dict:
    """What TrainingArguments takes for it. ZeRO-3 has the sizes of 06_fsdp_zero/train_zero.py."""
    if how == "fsdp":
        return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}
    if how == "zero3":
        parameters_per_block = shapes.parameter_count(shape) // shape.num_hidden_layers
        zero = {
            "stage": 3,
            "reduce_bucket_size": parameters_per_block,
            "allgather_bucket_size": 2 * parameters_per_block,
            "stage3_prefetch_bucket_size": parameters_per_block,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": shape.hidden_size + 1,
        }
        of_the_trainer = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        config = {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **dict.fromkeys(of_the_trainer, "auto"),
        }
        return {"deepspeed": config}
    return {}


def let_cpu_ranks_shard() -> None:
    """accelerate shards with FSDP on accelerators alone. On CPU ranks it passes over `fsdp` without a word and trains
    with DDP. So it is told that these ranks are GPUs, on a device that is the CPU."""
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def import_deepspeed(device: torch.device) -> None:
    """DeepSpeed for this device. On a CPU it would compile an all-reduce that training does not use."""
    os.environ["DS_ACCELERATOR"] = device.type
    warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)  # several at each step
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check_sharded(how: str, net: torch.nn.Module) -> None:
    """AssertionError if this rank holds more than its part of any parameter: the Trainer would have trained otherwise
    than it was asked to."""
    ranks = dist.get_world_size()
    for name, parameter in net.named_parameters():
        if how == "fsdp":
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            assert parameter.placements[0].is_shard(0), f"{name} is {parameter.placements}"
            rows = math.ceil(parameter.shape[0] / ranks)
            assert parameter.to_local().shape[0] <= rows, f"{name}: {parameter.to_local().shape} of {parameter.shape}"
        else:
            assert hasattr(parameter, "ds_tensor"), f"{name} is not sharded"
            part = math.ceil(parameter.ds_numel / ranks)
            assert parameter.ds_tensor.numel() == part, f"{name}: {parameter.ds_tensor.numel()} of {parameter.ds_numel}"


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("result", type=cli.writable_file, metavar="RESULT", help="where to write what was measured, as JSON")
    add("--model", default="nano", help="a size that 04_amp/train.py knows")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step, over all ranks")
    add("--steps", type=cli.positive_int, default=50, help=f"the first {WARMUP_STEPS} not timed")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--compile", action="store_true", help="torch.compile")
    add("--shard", choices=("fsdp", "zero3"), help="cut the model over the ranks")
    add("--seed", type=cli.natural, default=0)
    add("--data", default="stdlib", help="as in 04_amp/train.py")
    args = parser.parse_args()
    rank, ranks, _ = exits.world_from_env()
    if args.steps < WARMUP_STEPS + LOG_EVERY:
        raise exits.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")
    if args.shard and ranks == 1:
        raise exits.UserError(f"--shard {args.shard} needs ranks to cut the model over: start with torchrun")
    if args.batch_size % ranks:
        raise exits.UserError(f"--batch-size {args.batch_size} does not divide by {ranks} ranks")
    try:
        import accelerate  # noqa: F401  (the Trainer's own import of it would fail later and say less)
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    except ImportError as error:
        raise exits.UserError(f"the Trainer needs transformers and accelerate: {error}") from None
    device = runtime.pick_device(args.device)
    if args.shard == "fsdp" and device.type == "cpu":
        let_cpu_ranks_shard()
    if args.shard == "zero3":
        import_deepspeed(device)

    torch.manual_seed(args.seed)  # the same weights on all ranks
    corpus = data.load_corpus(args.data, "bytes")
    shape, recipe = shapes.load_config(args.model, corpus.vocab_size, args.seq_len), shapes.recipe(args.model)
    config = LlamaConfig(**{name: getattr(shape, name) for name in SAME_NAMES})
    config._attn_implementation = "sdpa"
    net = LlamaForCausalLM(config)
    marks: list[tuple[int, float]] = []  # step, when it was over

    class Clock(TrainerCallback):
        def on_step_end(self, _args, state, control, **_) -> None:
            if state.global_step % LOG_EVERY == 0:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                marks.append((state.global_step, time.perf_counter()))

    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size // ranks,
            learning_rate=recipe.lr,
            weight_decay=0.1,
            lr_scheduler_type="cosine",
            warmup_steps=recipe.warmup_steps,
            max_grad_norm=1.0,
            bf16=args.dtype == "bf16",
            torch_compile=args.compile,
            tf32=False,  # else torch_compile switches it on; 04_amp/train.py never does
            optim="adamw_torch_fused" if device.type == "cuda" else TrainingArguments.optim,
            use_cpu=device.type == "cpu" and args.shard != "fsdp",
            dataloader_num_workers=0,
            dataloader_pin_memory=device.type == "cuda",
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=args.seed,
            **sharding(args.shard, shape),
        )
        assert settings.device.type == device.type, settings.device
        trainer = Trainer(net, settings, train_dataset=Windows(corpus.train, args.seq_len), callbacks=[Clock()])
        trainer.train()

    if args.shard:
        check_sharded(args.shard, net)
    result = summarize(args, net, device, marks, trainer.state.log_history)
    if rank == 0:
        args.result.write_text(json.dumps({**result, "optim": settings.optim.value}) + "\n")
    if dist.is_initialized():
        runtime.shutdown()
    return 0


def summarize(args: argparse.Namespace, net: torch.nn.Module, device: torch.device, marks: list, log: list) -> dict:
    """Tokens per second from the marks of the clock, and what shows that it is the same training."""
    kept = {parameter.dtype for parameter in net.parameters()}
    assert kept == {torch.float32}, f"the Trainer's weights are {kept}: not the same training"
    fp32_products = torch.backends.cuda.matmul.fp32_precision
    assert fp32_products != "tf32", "the Trainer has switched TF32 on: not the same training"
    losses = [entry["loss"] for entry in log if "loss" in entry]
    timed = [(step, seconds) for step, seconds in marks if step >= WARMUP_STEPS]
    tokens_per_step = args.batch_size * args.seq_len
    windows = []
    for (first, began), (last, ended) in pairwise(timed):
        windows.append((last - first) * tokens_per_step / (ended - began))
    first, began = timed[0]
    last, ended = timed[-1]
    return {
        "tokens_per_second": (last - first) * tokens_per_step / (ended - began),
        "windows": windows,
        "parameters": sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in net.parameters()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


if __name__ == "__main__":
    exits.run(main)
