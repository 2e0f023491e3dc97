"""DDP with what a run of days needs: data on disk, schedule, evaluation, checkpoints, resume.

    laptop    torchrun --standalone --nproc_per_node=2 05_ddp/resumable.py --run-dir run
    one node  torchrun --standalone --nproc_per_node=8 05_ddp/resumable.py --run-dir run
    cluster   the same on every node, but in place of --standalone    ($HEAD: the name of a node)
              --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

What is new compared with minimal.py: a run that was stopped continues. Start the same command
again, on any number of ranks that divides --global-batch. The losses equal the losses of a run
that was never stopped: bit for bit on the same number of ranks, if the GPU's kernels are
deterministic, and up to rounding on other numbers. 06_fsdp_zero/resumable.py can continue
the run, too.

The folder --run-dir must be on a disk that all nodes share. It gets:

    settings.json   what the losses depend on. A start with other settings is refused
    metrics.jsonl   what is printed. A resume repeats some steps: the last loss of a step counts
    step-00000050/  a checkpoint, complete when it has this name. The newest two are kept
    lock            keeps a second run out of the folder

SIGTERM or SIGUSR1 to any rank, or SIGTERM to torchrun: all ranks finish their step, save, and end
with exit code 75, which means "start me again". torchrun itself then ends with 1. It kills ranks
that need more than 30 s: torchrun --shutdown-timeout=300 gives them more.

To use the weights elsewhere, run the line below. torch.load("all.pt")["model"] is then the state
dict of the plain Model.

    python -m torch.distributed.checkpoint.format_utils dcp_to_torch run/step-00000100 all.pt

What to look at: kill the run, start it again with another number of ranks, and compare the losses.
Copy this file and change what is marked YOURS.
Previous: minimal.py. Next: train.py, with more models, data formats and checks.
"""

import argparse
import fcntl
import json
import math
import os
import shutil
import signal
import sys
import time
import zlib
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

# YOURS: the sizes
LENGTH = 64  # tokens per sequence
WARM_UP_STEPS = 10
WEIGHT_DECAY = 0.1
EVALUATION_BATCHES = 4  # each of --global-batch sequences, the same at every evaluation
KEEP = 2  # checkpoints
SEED = 0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# YOURS: your GPU. Dense bf16 operations per second, from the data sheets of the SXM modules. The
# PCIe and NVL cards have fewer.
PEAK_FLOPS = {"A100": 312e12, "L40S": 362e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
RESTART = 75  # the exit code of a run that has saved and has not finished
stop_signals = []  # the signals that this rank has received


# YOURS: the model. Here a small GPT that predicts the next byte.
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):  # [batch, tokens, width]
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k = self.k(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        v = self.v(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        # q, k, v and the result of attention: [batch, heads, tokens, head_dim]
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=256, width=128, layers=4, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):  # [batch, tokens]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # logits, [batch * tokens, vocabulary]


# YOURS: the initial weights
def initial_weight(name, shape):
    """Return random numbers that depend on SEED, the name and the row only.

    So a weight starts the same on every device, and however it is sharded.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # of a LayerNorm
        return torch.ones(shape)
    rows = []
    for number in range(shape[0]):
        key = zlib.crc32(f"{SEED} {name} {number}".encode())
        rows.append(torch.randn(shape[1], generator=torch.Generator().manual_seed(key)))
    return 0.02 * torch.stack(rows)


# YOURS: the data. Here 1.4 MB of sums such as "12 + 34 = 46".
def make_text():
    """Return the training text as a tensor of bytes."""
    lines = []
    for a in range(300):
        for b in range(300):
            lines.append(f"{a} + {b} = {a + b}\n")
    return torch.frombuffer(bytearray("".join(lines).encode()), dtype=torch.uint8)


# YOURS: the data
def load_tokens(path, vocabulary):
    """Return the tokens to train on and the held-out tokens.

    `path` is a text file, whose bytes are the tokens, or a folder with train.bin and val.bin in
    nanoGPT's format: token ids without a header, of two bytes, or of four if `vocabulary` needs it.
    """
    if path and Path(path).is_dir():
        dtype = torch.uint16 if vocabulary <= 2**16 else torch.uint32
        tokens = []
        for name in ("train.bin", "val.bin"):
            file = Path(path, name)
            size = file.stat().st_size // dtype.itemsize
            tokens.append(torch.from_file(str(file), size=size, dtype=dtype))  # stays on disk
        return tokens
    text = make_text()
    if path:
        text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    cut = len(text) * 95 // 100
    return text[:cut], text[cut:]


# YOURS: the batch
def choose_rows(tokens, number, count):
    """Return where each row of a global batch starts in the tokens: the same on every rank.

    The rows depend on SEED and the batch's number only. So a resume needs no state of the data.
    """
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + number)
    return torch.randint(len(tokens) - LENGTH - 1, (count,), generator=generator)


def read_rows(tokens, starts):
    """Return [len(starts), LENGTH + 1] tokens."""
    return torch.stack([tokens[start : start + LENGTH + 1].long() for start in starts])


# YOURS: inputs, targets and loss
def compute_loss(model, rows):
    """Return the mean loss over the rows. All rows must have equally many targets."""
    inputs = rows[:, :-1]
    targets = rows[:, 1:]  # the token that follows each input
    logits = model(inputs).float()  # cross-entropy in fp32
    return cross_entropy(logits, targets.flatten())


# YOURS: the schedule
def learning_rate(step, args):
    """Return the learning rate of a step: it rises linearly, then falls as a cosine to a tenth."""
    if step <= WARM_UP_STEPS:
        return args.lr * step / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, args.steps - WARM_UP_STEPS)  # from 0 to 1
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


# YOURS: the optimizer
def make_optimizer(model, device):
    """Return AdamW with weight decay on matrices, and none on biases and the weights of norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")


# YOURS: the operations that MFU counts
def flops_per_token(model):
    """Return the operations of forward and backward: 6 per weight of a matmul, and attention."""
    weights = 0
    for name, parameter in model.named_parameters():
        if not name.startswith(("embedding", "position")):  # these are looked up, not multiplied
            weights += parameter.numel()
    width = model.embedding.embedding_dim
    return 6 * weights + 12 * len(model.blocks) * width * LENGTH


def peak_flops(device):
    """Return the GPU's operations per second in bf16, or None if it is not in PEAK_FLOPS."""
    if device.type == "cuda":
        for name, peak in PEAK_FLOPS.items():
            if name in torch.cuda.get_device_name(device):
                return peak
    return None


def write_json(file, value):
    """Write a file. A kill leaves the old file or the new one, never a part of it."""
    temporary = file.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())  # returns when the bytes are on the disk
    temporary.replace(file)


def fsync_folder(folder):
    """Return when the names of the files in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def list_checkpoints(run_dir, ending=""):
    """Return the folders of the checkpoints, the oldest first."""
    return sorted(run_dir.glob("step-" + "[0-9]" * 8 + ending))


def training_state(model, optimizer):
    """Return what a checkpoint holds. Names and shapes are the same with DDP and with FSDP."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optimizer_state}


def save(run_dir, step, model, optimizer, rank):
    """Write a checkpoint. Every rank must call it, and writes a part of the tensors."""
    folder = run_dir / f"step-{step:08d}"
    temporary = folder.with_suffix(".tmp")
    # dcp.save returns when the files of all ranks are on the disk (it calls fsync).
    dcp.save(training_state(model, optimizer), checkpoint_id=temporary)
    if rank != 0:
        return
    index = dcp.FileSystemReader(temporary).read_metadata().storage_data.values()
    names = {".metadata", *(part.relative_path for part in index)}
    # stat raises if this node does not see a file of another: --run-dir must be on a shared disk.
    sizes = {name: (temporary / name).stat().st_size for name in sorted(names)}
    write_json(temporary / "sizes.json", sizes)
    fsync_folder(temporary)
    temporary.rename(folder)  # a kill before this line leaves a .tmp folder, which no resume reads
    fsync_folder(run_dir)  # the new checkpoint is safe before an old one is deleted
    for old in list_checkpoints(run_dir)[:-KEEP]:
        shutil.rmtree(old)


def is_complete(folder):
    """Return whether all files of a checkpoint have the sizes with which they were written."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):  # a file is missing, or sizes.json is truncated
        return False


def newest_checkpoint(run_dir):
    """Return the newest complete checkpoint, or None. Only rank 0 calls it."""
    for unfinished in list_checkpoints(run_dir, ".tmp"):
        shutil.rmtree(unfinished)
    for folder in reversed(list_checkpoints(run_dir)):
        if is_complete(folder):
            return folder
        print(f"{folder} is damaged: it gets another name, and the one before is next", flush=True)
        folder.rename(run_dir / f"damaged-{folder.name}-{time.time_ns()}")
    if list(run_dir.glob("damaged-*")):
        raise RuntimeError(f"{run_dir} has damaged checkpoints only: start with another --run-dir")
    return None


def lock_folder(run_dir):
    """Keep a second run out of the folder until this process ends."""
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT)  # it stays open
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(f"{run_dir} is in use: use another --run-dir") from None
    except OSError:
        pass  # this disk has no locks


def note_signal(number, frame):
    """Note a signal, and do not end at once. The training loop looks after each step."""
    stop_signals.append(number)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, default=Path("runs/05_resumable"))
    parser.add_argument("--data", help="text file, or folder with train.bin and val.bin")
    parser.add_argument("--vocabulary", type=int, default=256, help="number of token ids")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=24, help="sequences per step")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences per rank at once")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    # torchrun sets these variables for each process, called a rank. Without torchrun: one rank.
    if "RANK" not in os.environ:
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            parser.error("srun has started several tasks: start one torchrun per node")
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # the system picks a port
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if args.global_batch % world_size != 0:
        parser.error(f"--global-batch {args.global_batch} is not divisible by {world_size} ranks")
    try:
        train, held_out = load_tokens(args.data, args.vocabulary)
    except OSError as error:
        parser.error(f"--data: {error}")
    if min(len(train), len(held_out)) < LENGTH + 2:
        parser.error(f"--data: {len(held_out)} held-out tokens are too few, need {LENGTH + 2}")
    first_tokens = train[:1_000_000].long()
    largest = max(first_tokens.max(), held_out[:1_000_000].long().max())
    if largest >= args.vocabulary:
        parser.error(f"--data has token id {largest}: give --vocabulary a larger number")
    torch.manual_seed(SEED)
    model = Model(args.vocabulary)  # YOURS
    # What the losses depend on. YOURS: what else they depend on, such as the number of heads.
    settings = {
        "tokens": len(train),
        "sum_of_first_tokens": first_tokens.sum().item(),
        "vocabulary": args.vocabulary,
        "length": LENGTH,
        "steps": args.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "global_batch": args.global_batch,
        "lr": args.lr,
        "weight_decay": WEIGHT_DECAY,
        "dtype": args.dtype,
        "seed": SEED,
        "model": zlib.crc32(str(model).encode()),
    }
    settings_file = args.run_dir / "settings.json"
    if settings_file.exists():
        saved = json.loads(settings_file.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if saved.get(name) != value:
                parser.error(f"{settings_file} has {name} {saved.get(name)}, not {value}")
    elif list_checkpoints(args.run_dir, "*"):
        parser.error(f"{args.run_dir} has checkpoints, and no settings.json of this script")
    signal.signal(signal.SIGTERM, note_signal)
    signal.signal(signal.SIGUSR1, note_signal)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")  # "high" allows TF32, which is faster
    if device.type == "cuda":
        # Each rank has its own GPU: start at most as many ranks per node as there are GPUs.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # gloo is for tensors on the CPU: the flag of a signal, and the name of a checkpoint.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    model.to(device)
    if device.type == "cuda":
        for block in model.blocks:
            block.compile()  # the environment variable TORCH_COMPILE_DISABLE=1 turns this off
    # YOURS: the initial weights
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape))
    # Forward through ddp_model averages gradients.
    ddp_model = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model, device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    # YOURS: if a batch is several tensors, split and move each. len(rows) counts its sequences.
    def load_batch(tokens, number):
        """Return this rank's rows of a global batch, as micro-batches on the device."""
        starts = choose_rows(tokens, number, args.global_batch)[rank::world_size]
        return read_rows(tokens, starts).to(device).split(args.micro_batch)

    def log(line, record):
        """Print a line, and append a record to metrics.jsonl. Only rank 0 does it."""
        if rank == 0:
            print(line, flush=True)
            with open(args.run_dir / "metrics.jsonl", "a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")

    def evaluate():
        """Return the mean loss on the held-out tokens. Every rank must call it."""
        model.eval()
        loss_sum = torch.zeros((), device=device)
        with torch.no_grad(), autocast:
            for number in range(EVALUATION_BATCHES):
                for rows in load_batch(held_out, number):
                    loss_sum += compute_loss(model, rows) * len(rows)
        dist.all_reduce(loss_sum)
        model.train()
        return loss_sum.item() / (EVALUATION_BATCHES * args.global_batch)

    found = [None]
    if rank == 0:
        args.run_dir.mkdir(parents=True, exist_ok=True)
        lock_folder(args.run_dir)
        write_json(settings_file, settings)
        found = [newest_checkpoint(args.run_dir)]
    dist.broadcast_object_list(found)  # on a network disk, ranks may see different folders
    checkpoint = found[0]
    first_step = 1
    if checkpoint is not None:
        # DDP sorts the gradients into buckets anew after the first backward, which changes the
        # order of sums. Run a backward now, so that the next step sums as without the stop.
        with autocast:
            loss = compute_loss(ddp_model, load_batch(train, 0)[0])
        loss.backward()
        optimizer.zero_grad()
        state = training_state(model, optimizer)
        dcp.load(state, checkpoint_id=checkpoint)  # into the tensors of `state`
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        first_step = int(checkpoint.name.removeprefix("step-")) + 1

    model.train()  # a pretrained model may be in evaluation mode
    operations = flops_per_token(model)
    peak = peak_flops(device)
    record = {"ranks": world_size, "first_step": first_step}
    log(f"{world_size} ranks | {first_step - 1} of {args.steps} steps are done", record)
    stop = False
    timed_from = first_step
    clock = time.perf_counter()
    for step in range(first_step, args.steps + 1):
        # Dropout differs by rank and step, and is the same after a resume on as many ranks.
        torch.manual_seed(zlib.crc32(f"{SEED} dropout {step} {rank}".encode()))
        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        micro_batches = load_batch(train, step)
        step_loss = torch.zeros((), device=device)
        for number, rows in enumerate(micro_batches, 1):
            is_last_micro_batch = number == len(micro_batches)
            # The mean over ranks of these weighted sums is the mean over the global batch.
            share = len(rows) * world_size / args.global_batch
            # Backward of the last micro-batch averages the gradients of all of them.
            with nullcontext() if is_last_micro_batch else ddp_model.no_sync():
                with autocast:
                    loss = compute_loss(ddp_model, rows) * share
                loss.backward()
            step_loss += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == first_step:
            for name, parameter in model.named_parameters():
                is_unused = parameter.requires_grad and parameter.grad is None
                assert not is_unused, f"{name} has no gradient: freeze it, or no run can resume"
        optimizer.step()
        optimizer.zero_grad()

        stop_flag = torch.tensor(len(stop_signals))
        dist.all_reduce(stop_flag)  # so that all ranks stop after the same step
        stop = stop_flag.item() > 0
        is_last_step = step == args.steps or stop
        must_log = step % args.log_every == 0 or is_last_step
        must_save = step % args.save_every == 0 or is_last_step
        must_evaluate = step % args.evaluate_every == 0 or step == args.steps
        if must_log:
            mean_loss = step_loss / world_size
            dist.all_reduce(mean_loss)  # the sum over all ranks; every rank must call it
            record = {"step": step, "loss": mean_loss.item(), "lr": lr, "norm": norm.item()}
            seconds = time.perf_counter() - clock  # item() has waited for the GPU
            tokens = (step - timed_from + 1) * args.global_batch * LENGTH
            record["tokens_per_second"] = round(tokens / seconds)
            line = f"step {step} | loss {record['loss']:.6f} | lr {lr:.2e} | norm {norm.item():.2f}"
            line += f" | {record['tokens_per_second']:,} tokens/s"
            if peak:
                record["mfu"] = operations * tokens / seconds / (peak * world_size)
                line += f" | MFU {record['mfu']:.1%}"
            log(line, record)
        if must_save or must_evaluate:
            if not math.isfinite(norm.item()):
                raise RuntimeError(f"the gradient norm of step {step} is {norm.item()}")
            for buffer in model.buffers():  # such as BatchNorm's, which differ between ranks
                dist.broadcast(buffer, src=0)
        if must_save:
            save(args.run_dir, step, model, optimizer, rank)
        if must_evaluate:
            held_out_loss = evaluate()
            record = {"step": step, "held_out_loss": held_out_loss}
            log(f"step {step} | held-out loss {held_out_loss:.6f}", record)
        if must_log or must_save or must_evaluate:
            timed_from = step + 1
            clock = time.perf_counter()
        if stop:
            break

    dist.barrier()  # wait until rank 0 has given the checkpoint its name
    dist.destroy_process_group()
    code = RESTART if stop and step < args.steps else 0
    if device.type == "cpu":
        # Skip interpreter shutdown, where gloo's threads can hang. This skips atexit, too: before
        # it, call wandb.finish() and the like, and close your files.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
