"""DataParallel and DistributedDataParallel train the same model on the same batches, in turns, and are timed.

Used by data_parallel.py. DDP needs processes, which are started here and told by a queue how many steps to do.
"""

import ctypes
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from old import data, model, report, runtime, shapes

warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.11 does not have its successor
ROUNDS = 6  # the two take turns; the first round warms up


def prepare(name: str, *, seq_len: int, batch_size: int, seed: int, device="cpu") -> tuple[nn.Module, Iterator]:
    """The model, and the batches of the whole group on the CPU."""
    runtime.seed(seed, deterministic=False)
    runtime.exact_fp32(torch.device(device))  # or some containers would multiply in tf32
    net = model.build(name, shapes.load_config(name, 256, seq_len), seed=seed, device=device)
    batches = data.train_batches(
        data.load_corpus().train,
        seq_len=seq_len,
        global_batch_size=batch_size,
        micro_batch_size=batch_size,
        seed=seed,
        device=torch.device("cpu"),
    )
    return net, batches


def train(step: Callable, net: nn.Module, batches: Iterator, steps: int) -> tuple[float, Tensor]:
    """Seconds per step, and the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    start = time.perf_counter()
    for _ in range(steps):
        losses.append(step(*next(batches)))
        optimizer.step()
        optimizer.zero_grad()
    losses = torch.stack(losses).cpu()  # waits for the GPU
    return (time.perf_counter() - start) / steps, losses


def ddp_rank(rank: int, n: int, job: dict, kind: str, port: int, orders: list, answers) -> None:
    """One process of DDP: for each order it trains so many steps, and answers with the time and the losses."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: if the script dies, even of kill -9, so do we
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, device_id=device, store=store, rank=rank, world_size=n)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    net, batches = prepare(**job, device=device)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        my_inputs = inputs.chunk(n)[rank].to(device)
        my_targets = targets.chunk(n)[rank].to(device)
        loss = ddp(my_inputs, my_targets)
        loss.backward()
        return loss.detach()

    while steps := orders[rank].get():
        dist.barrier()
        seconds, losses = train(step, net, batches, steps)
        dist.all_reduce(losses)
        answers.put((rank, seconds, (losses / n).tolist(), report.peak_memory_bytes(device)))
    runtime.shutdown()


def collect(workers, answers, n: int) -> list[tuple]:
    """The answer of each rank; raises with its traceback if one has failed."""
    found = []
    while len(found) < n:
        if answers.empty():
            workers.join(timeout=0.05)
        else:
            found.append(answers.get())
    return sorted(found)


def compare(data_parallel_step: Callable, job: dict, steps: int, device: torch.device, n: int) -> list[dict]:
    """Train both ways on the same batches, in turns: the seconds per step and the losses of each."""
    net, batches = prepare(**job, device=device)
    dp_step = data_parallel_step(net, device, n)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free
    spawn = torch.multiprocessing.get_context("spawn")
    orders = [spawn.SimpleQueue() for _ in range(n)]
    answers = spawn.SimpleQueue()
    arguments = (n, job, device.type, store.port, orders, answers)
    workers = torch.multiprocessing.spawn(ddp_rank, arguments, nprocs=n, join=False)
    dp_seconds, ddp_seconds = [], []
    dp_losses, ddp_losses = [], []
    for _ in range(ROUNDS):
        seconds, losses = train(dp_step, net, batches, steps)
        dp_seconds.append(seconds)
        dp_losses += losses.tolist()
        for order in orders:
            order.put(steps)
        ranks = collect(workers, answers, n)
        ddp_seconds.append(max(seconds for _, seconds, _, _ in ranks))
        ddp_losses += ranks[0][2]
    for order in orders:
        order.put(0)
    while not workers.join():
        pass
    on_gpus = device.type == "cuda"
    dp_peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in range(n)] if on_gpus else None
    ddp_peaks = [peak for _, _, _, peak in ranks] if on_gpus else None
    return [
        {
            "method": "DataParallel",
            "step_seconds": report.spread(dp_seconds[1:]),
            "losses": dp_losses,
            "peak_memory_bytes_by_gpu": dp_peaks,
        },
        {
            "method": "DistributedDataParallel",
            "step_seconds": report.spread(ddp_seconds[1:]),
            "losses": ddp_losses,
            "peak_memory_bytes_by_gpu": ddp_peaks,
        },
    ]


def print_methods(rows: list[dict], steps: int) -> None:
    lines = [["method", "ms per step", "lowest to highest", "last loss", "peak MiB on each GPU"]]
    for row in rows:
        low, median, high = (row["step_seconds"][name] * 1e3 for name in ("min", "median", "max"))
        peaks = row["peak_memory_bytes_by_gpu"] or []
        memory = " ".join(f"{peak / 2**20:,.0f}" for peak in peaks) or "n/a"
        times = [f"{median:.1f}", f"{low:.1f} to {high:.1f}"]
        lines.append([row["method"], *times, f"{row['losses'][-1]:.4f}", memory])
    print(report.table(lines))
    print(f"Medians of {ROUNDS - 1} rounds of {steps} steps, taken in turns.")
