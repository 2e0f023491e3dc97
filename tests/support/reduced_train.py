"""05_ddp/train.py without what a training run needs to survive: the 80 lines that are left when you take it with you.

python tests/support/reduced_train.py my_folder/my_train.py   writes them

Each part that goes is named below by its first and its last line. README.md of 05_ddp has the same list in words.
"""

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# of common/, all that is left to import
MODULES = ("__init__", "cli", "data", "exits", "hf", "model", "runtime", "shapes")
DOCSTRING = '''"""Train a language model on many GPUs: torchrun --nproc_per_node=2 my_train.py"""'''

# (first line of a passage, its last line, what stands there instead)
CHANGES = [
    # the learning rate's schedule
    ("def warmup_cosine(", "return 0.55", ""),
    ("scheduler = LambdaLR(", "scheduler = LambdaLR(", ""),
    ("from torch.optim.lr_scheduler", "from torch.optim.lr_scheduler", ""),
    ("import math", "import math", ""),
    # fp16, and the choice of a type
    ("args.dtype = hardware", "args.dtype = hardware", ""),
    ("scaler = torch.amp", "scaler = torch.amp", ""),
    (
        "autocast = partial(",
        "autocast = partial(",
        "    autocast = partial(torch.autocast, device.type, torch.bfloat16)",
    ),
    ("scaler.scale(loss)", "scaler.scale(loss)", "            loss.backward()"),
    ("scaler.unscale_(", "scaler.unscale_(", ""),
    ("grad_norm = clip", "grad_norm = clip", "        clip_grad_norm_(net.parameters(), args.clip_norm)"),
    ('lr = optimizer.param_groups[0]["lr"]', "scheduler.step()", "        optimizer.step()"),
    ("scale = scaler.get_scale()", "scale = scaler.get_scale()", ""),
    ("DTYPES = ", "DTYPES = ", ""),
    # evaluation
    ("@torch.no_grad()", "return (total[0]", ""),
    ("held_out = data.eval_batches(", ")", ""),
    ("if step == args.steps or (args.eval_every", "meter.log_eval(", ""),
    # checkpoints, resume, signals
    ("runtime.catch_stop_signals()", "runtime.catch_stop_signals()", ""),
    ("training = {", 'start_step = progress["step"]', ""),
    ("start_step=start_step,", "start_step=start_step,", ""),
    ("stop = 0", "stop = 0", ""),
    ("for step in range(", "for step in range(", "    for step in range(1, args.steps + 1):"),
    ('progress["step"] = step', "save = stop or", ""),
    ("if save:", "break", ""),
    ("checkpoints.wait()", 'runtime.say(f"signal', ""),
    ("return exits.REQUEUE_EXIT_CODE", "return exits.REQUEUE_EXIT_CODE", "    return 0"),
    # --compile and --deterministic
    ("if args.compile:", "ddp.compile()", ""),
    ("if args.deterministic:", "optimizer.zero_grad(", ""),
    # --checkpointing
    ("model.checkpoint_blocks(", "model.checkpoint_blocks(", ""),
    # speed, memory, the slowest rank
    ("meter = metrics.Meter(", ")", ""),
    (
        'with meter.phase("data"):',
        "inputs, targets",
        "            inputs, targets = (t.to(device, non_blocking=True) for t in next(batches))",
    ),
    ("with sync, meter.phase", "with sync, meter.phase", "            with sync, autocast():"),
    ("meter.note(", "meter.note(", ""),
    (
        "if save or step == 1",
        "meter.log(",
        """        if step % args.log_every == 0:
            dist.all_reduce(step_loss)
            runtime.say(f"step {step}: loss {step_loss.item() / world_size:.4f}")""",
    ),
    ("meter.finish(", ")", ""),
    # the checks at the end: that of DDP, shorter
    (
        "# the promise of AMP",
        'runtime.say(f"checked: all',
        """    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    weights_of_rank_0 = weights.clone()
    dist.broadcast(weights_of_rank_0, src=0)
    assert torch.equal(weights, weights_of_rank_0), "ranks hold different weights\"""",
    ),
    ('runtime.say(f"{args.model}', 'runtime.say(f"{args.model}', ""),
    (
        "from common import checkpoint",
        "from common import checkpoint",
        "from common import cli, data, exits, model, runtime, shapes",
    ),
]


def reduced(source: str) -> str:
    """The program with every change made; AssertionError if a passage is not there once."""
    lines = source.splitlines()
    lines = lines[next(i for i, line in enumerate(lines[1:], 1) if line.startswith('"""')) + 1 :]
    for first, last, instead in CHANGES:
        starts = [i for i, line in enumerate(lines) if line.strip().startswith(first)]
        assert starts, f"train.py has no line that starts with {first!r}"
        start = starts[0]
        end = next((i for i in range(start, len(lines)) if lines[i].strip().startswith(last)), None)
        assert end is not None, f"train.py has no line that starts with {last!r} after {first!r}"
        lines[start : end + 1] = instead.splitlines()
    text = "\n".join([DOCSTRING, *lines]) + "\n"
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the file to write")
    parser.parse_args().path.write_text(reduced((ROOT / "05_ddp/train.py").read_text()))
