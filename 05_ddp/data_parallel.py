"""nn.DataParallel beside DistributedDataParallel: the same gradients, by a way that is longer and has to be waited for.

DataParallel is one line and one process. Each forward it copies all weights from GPU 0 to the others, cuts the batch,
runs a thread per GPU (all under one Python interpreter lock) and collects the outputs on GPU 0, where the loss is;
when backward is over, it adds up all gradients on GPU 0. With weights of P bytes on N GPUs, GPU 0 sends (N-1)P and
receives (N-1)P (NCCL's rings spare it the factor), nothing of it hides behind backward, GPU 0 alone holds all outputs
and the optimizer state, and a second node is out of reach. DDP has a process per GPU; each sends and receives
2(N-1)/N P, never more than 2P, and mostly during backward. Here both are done by hand, and every byte is counted.

    laptop    python 05_ddp/data_parallel.py
    one node  python 05_ddp/data_parallel.py --model llama-124m --seq-len 512 --global-batch-size 64
    cluster   DataParallel ends at the node: 05_ddp/train.py

Look for: the bytes of device 0 by N; on two GPUs or more, the time per step and the memory of GPU 0. Where there are
none, threads on the CPU do DataParallel's steps, and processes DDP's. Before: ddp_from_scratch.py. Next:
collectives.py.
"""

import argparse
import copy
import ctypes
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _data_parallel_by_hand import count, data_parallel_by_hand, traffic_table

from common import cli, data, exits, hardware, model, report, runtime

ROUNDS = 6  # the two take turns; the first round warms up


def prepare(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Iterator]:
    runtime.seed(args.seed, deterministic=False)
    net = model.build(args.model, model.load_config(args.model, 256, args.seq_len)).to(device)
    order = argparse.Namespace(**vars(args), data="stdlib", num_workers=0)
    corpus = data.load_corpus("stdlib", "bytes").train
    batches = data.train_batches(corpus, order, args.global_batch_size, 0, 0, 1, torch.device("cpu"))
    return net, torch.optim.SGD(net.parameters(), lr=0.01), batches


def train(backward: Callable, optimizer: torch.optim.Optimizer, batches: Iterator, steps: int) -> tuple[float, Tensor]:
    """Seconds per step, and the losses."""
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        losses.append(backward(*next(batches)))
        optimizer.step()
        optimizer.zero_grad()
    losses = torch.stack(losses).cpu()  # waits for the GPU
    return (time.perf_counter() - start) / steps, losses


def ddp_rank(rank: int, n: int, args: argparse.Namespace, kind: str, port: int, orders: list, answers) -> None:
    """One process of DDP: for each order it trains so many steps, and answers with the time and the losses."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: if the script dies, even of kill -9, so do we
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    backend = {"backend": "gloo"}
    if kind == "cuda":
        torch.cuda.set_device(device)
        backend = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(**backend, store=store, rank=rank, world_size=n)
    net, optimizer, batches = prepare(args, device)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = ddp(*(t.chunk(n)[rank].to(device) for t in (inputs, targets)))
        loss.backward()
        return loss.detach()

    while steps := orders[rank].get():
        dist.barrier()
        seconds, losses = train(backward, optimizer, batches, steps)
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


def compare(args: argparse.Namespace, device: torch.device, n: int) -> list[dict]:
    """Train one model on the same batches both ways, in turns: seconds per step and losses of each."""
    net, optimizer, batches = prepare(args, device)
    if device.type == "cuda":
        dp = nn.DataParallel(net, list(range(n)))  # the one line
    else:
        torch.set_num_threads(1)  # a thread per device
        replicas = [net, *(copy.deepcopy(net) for _ in range(n - 1))]

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        if device.type != "cuda":
            return data_parallel_by_hand(replicas, inputs, targets, Counter())
        loss = F.cross_entropy(dp(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        return loss.detach()

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free
    spawn = torch.multiprocessing.get_context("spawn")
    orders, answers = [spawn.SimpleQueue() for _ in range(n)], spawn.SimpleQueue()
    job = (n, args, device.type, store.port, orders, answers)
    workers = torch.multiprocessing.spawn(ddp_rank, job, nprocs=n, join=False)
    rows = [{"method": name, "step_seconds": [], "losses": []} for name in ("DataParallel", "DistributedDataParallel")]
    for _ in range(ROUNDS):
        seconds, losses = train(backward, optimizer, batches, args.steps)
        rows[0]["step_seconds"].append(seconds)
        rows[0]["losses"] += losses.tolist()
        for order in orders:
            order.put(args.steps)
        ranks = collect(workers, answers, n)
        rows[1]["step_seconds"].append(max(seconds for _, seconds, *_ in ranks))
        rows[1]["losses"] += ranks[0][2]
    for order in orders:
        order.put(0)
    while not workers.join():
        pass
    peaks = [[torch.cuda.max_memory_allocated(i) for i in range(n)], [peak for *_, peak in ranks]]
    for row, peak in zip(rows, peaks, strict=True):
        times = row["step_seconds"][1:]
        row["step_seconds"] = {
            "median": statistics.median(times),
            "min": min(times),
            "max": max(times),
            "n": ROUNDS - 1,
        }
        row["peak_memory_bytes_by_gpu"] = peak if device.type == "cuda" else None
    return rows


def main() -> int:
    began = time.perf_counter()
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", default="nano", help="as in train.py; the bytes are always counted on nano")
    parser.add_argument("--seq-len", type=cli.positive_int, default=16)
    parser.add_argument("--global-batch-size", type=cli.positive_int, help="over all devices (default: about 24)")
    parser.add_argument("--steps", type=cli.positive_int, default=3, help=f"of each method in each of {ROUNDS} rounds")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=cli.seed, default=0)
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    if args.device == "cuda" and gpus < 2:
        raise exits.UserError(f"--device cuda: DataParallel needs two GPUs, not {gpus}: use --device cpu")
    device, n = (runtime.single_device("cuda"), gpus) if gpus > 1 else (runtime.single_device("cpu"), 2)
    args.global_batch_size = args.global_batch_size or n * max(1, 24 // n)
    cli.split_batch(args.global_batch_size, None, n)  # these two refuse what cannot be, before any process starts
    model.load_config(args.model, 256, args.seq_len)

    nano = argparse.Namespace(**{**vars(args), "model": "nano", "seq_len": 16, "global_batch_size": 24})
    net, _, batches = prepare(nano, torch.device("cpu"))
    traffic = [count(net, *next(batches), devices) for devices in (2, 4, 8)]
    print(traffic_table(traffic))

    if device.type == "cpu":
        print("without two GPUs: DataParallel's steps by hand, in threads and RAM, against DDP's processes over gloo")
    rows = compare(args, device, n)
    table = [["method", "ms per step", "lowest to highest", "last loss", "peak MiB by GPU"]]
    for row in rows:
        low, median, high = (row["step_seconds"][name] * 1e3 for name in ("min", "median", "max"))
        memory = " ".join(f"{peak / 2**20:.0f}" for peak in row["peak_memory_bytes_by_gpu"] or []) or "n/a"
        cells = [f"{median:.1f}", f"{low:.1f} to {high:.1f}", f"{row['losses'][-1]:.4f}", memory]
        table.append([row["method"], *cells])
    print(f"{report.table(table)}\nmedians of {ROUNDS - 1} rounds of {args.steps} steps, taken in turns")
    off = max(abs(a / b - 1) for a, b in zip(rows[0]["losses"], rows[1]["losses"], strict=True))
    assert off < 1e-4, f"losses differ by {off:.0e}"
    print(f"checked: the same losses at each of {len(rows[0]['losses'])} steps ({off:.0e} off at most)")
    summary = {
        **{"device": hardware.device_name(device), "world_size": n, "dtype": "fp32", "model": args.model},
        **{"steps": ROUNDS * args.steps, "tokens": ROUNDS * args.steps * args.global_batch_size * args.seq_len},
        **{"first_loss": rows[1]["losses"][0], "last_loss": rows[1]["losses"][-1]},
        **{"peak_memory_bytes": report.peak_memory_bytes(device), "seconds": time.perf_counter() - began},
        **{"traffic": traffic, "methods": rows, "emulated": device.type == "cpu"},
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
