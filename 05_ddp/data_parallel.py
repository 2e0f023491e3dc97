"""nn.DataParallel beside DistributedDataParallel: the same gradients, by a way that is longer and hides nothing.

DataParallel is one line and one process. In each step it copies all weights from GPU 0 to the others, cuts the batch,
runs a thread per GPU (all under one Python interpreter lock) and collects the outputs on GPU 0, where the loss is
computed. When backward is over, it adds up all gradients on GPU 0. DDP has a process per GPU and sends gradients only.

Bytes, with weights of P bytes on N GPUs. Sent one by one, as here by hand, DataParallel is a star: GPU 0 sends (N-1)P
and receives (N-1)P. Over NCCL it broadcasts and reduces along rings or trees: GPU 0 then sends about P and receives
about P. Either way GPU 0 alone holds all outputs and the optimizer state, nothing hides behind backward, and there is
no second node. A rank of DDP sends 2(N-1)/N P, never more than 2P, and mostly while backward runs.

    laptop    python 05_ddp/data_parallel.py
    one node  python 05_ddp/data_parallel.py --model llama-124m --seq-len 512 --global-batch-size 64
    cluster   DataParallel ends at the node: 05_ddp/train.py

Look for: the bytes of device 0 by N; on two GPUs or more, the time per step and the memory of GPU 0. Where there are
none, threads on the CPU do DataParallel's steps, and processes DDP's. Before: ddp_from_scratch.py. Next:
collectives.py.
"""

import copy
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _data_parallel_bytes import count_bytes, print_bytes
from _data_parallel_timing import ROUNDS, compare, prepare, print_methods

from old import cli, exits, hardware, report, runtime, shapes


def data_parallel(net: nn.Module, gpus: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step over several GPUs: the model is wrapped in one line, the rest stays as it was for one GPU."""
    dp = nn.DataParallel(net, gpus)  # the one line

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = dp(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    return step


def data_parallel_by_hand(replicas: list[nn.Module], inputs: Tensor, targets: Tensor, send: Callable) -> Tensor:
    """What that line does in every step. Replica i is on device i; the mean gradient ends on device 0.

    `send(tensor, source, target, what)` returns the tensor as it arrives on the target.
    """
    n = len(replicas)
    net = replicas[0]
    # 1. replicate: the optimizer has changed the weights of device 0 only, so all of them travel, in every step
    for i in range(1, n):
        for parameter, weight in zip(replicas[i].parameters(), net.parameters(), strict=True):
            parameter.data = send(weight, 0, i, "model")
            parameter.grad = None
    # 2. scatter: each device gets its part of the batch
    parts = [send(part, 0, i, "data") for i, part in enumerate(inputs.chunk(n))]
    with ThreadPoolExecutor(n) as threads:
        # 3. forward, in one thread per device
        outputs = list(threads.map(lambda replica, part: replica(part), replicas, parts))
        # 4. gather: device 0 gets every output, and computes the loss over the whole batch
        collected = [send(output, i, 0, "data") for i, output in enumerate(outputs)]
        logits = torch.cat(collected).requires_grad_()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        # 5. backward: each device gets the gradient of its output and goes on from there
        returned = [send(part, 0, i, "data") for i, part in enumerate(logits.grad.chunk(n))]
        list(threads.map(lambda output, gradient: output.backward(gradient), outputs, returned))
    # 6. reduce: only now, when backward is over, are the gradients added up on device 0
    for i in range(1, n):
        for parameter, other in zip(net.parameters(), replicas[i].parameters(), strict=True):
            parameter.grad += send(other.grad, i, 0, "model")
    return loss.detach()


def copied(tensor: Tensor, source: int, target: int, what: str) -> Tensor:
    """Send without a second GPU: a copy in the same memory."""
    return tensor.detach() if source == target else tensor.detach().clone()


def data_parallel_step(net: nn.Module, device: torch.device, n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The real DataParallel on n GPUs; on a CPU its steps by hand, on n copies of the model."""
    if device.type == "cuda":
        step = data_parallel(net, list(range(n)))
        return lambda inputs, targets: step(inputs.to(device), targets.to(device))
    torch.set_num_threads(1)  # a thread per device
    replicas = [net]
    for _ in range(1, n):
        replicas.append(copy.deepcopy(net))
    return lambda inputs, targets: data_parallel_by_hand(replicas, inputs, targets, copied)


def main() -> int:
    began = time.perf_counter()
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", default="nano", help="as in train.py; the bytes are always counted on nano")
    parser.add_argument("--seq-len", type=cli.positive_int, default=16)
    parser.add_argument("--global-batch-size", type=cli.positive_int, help="over all devices (default: about 24)")
    parser.add_argument("--steps", type=cli.positive_int, default=3, help=f"of each method in each of {ROUNDS} rounds")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=cli.natural, default=0)
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    if args.device == "cuda" and gpus < 2:
        raise exits.UserError(f"--device cuda: DataParallel needs two GPUs, not {gpus}: use --device cpu")
    device = runtime.single_device("cuda" if gpus > 1 else "cpu")
    n = gpus if gpus > 1 else 2
    batch_size = args.global_batch_size or n * max(1, 24 // n)
    cli.split_batch(batch_size, None, n)  # these two raise a UserError before any process starts
    shapes.load_config(args.model, 256, args.seq_len)

    nano, batches = prepare("nano", seq_len=16, batch_size=24, seed=args.seed)
    inputs, targets = next(batches)
    traffic = [count_bytes(data_parallel_by_hand, nano, inputs, targets, devices) for devices in (2, 4, 8)]
    print_bytes(traffic)

    if device.type == "cpu":
        print("\nNo two GPUs here: threads do DataParallel's steps by hand, processes over gloo do DDP's.")
    else:
        print(f"\n{n} x {hardware.device_name(device)}")
    job = {"name": args.model, "seq_len": args.seq_len, "batch_size": batch_size, "seed": args.seed}
    methods = compare(data_parallel_step, job, args.steps, device, n)
    print_methods(methods, args.steps)
    differences = [abs(a / b - 1) for a, b in zip(methods[0]["losses"], methods[1]["losses"], strict=True)]
    assert max(differences) < 1e-4, f"losses differ by {max(differences):.0e}"
    compared = f"{len(differences)} losses of DataParallel with those of DistributedDataParallel"
    print(f"checked: {compared}, relative error {max(differences):.0e} at most")

    steps = ROUNDS * args.steps
    summary = {
        "device": hardware.device_name(device),
        "world_size": n,
        "dtype": "fp32",
        "model": args.model,
        "steps": steps,
        "tokens": steps * batch_size * args.seq_len,
        "first_loss": methods[1]["losses"][0],
        "last_loss": methods[1]["losses"][-1],
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "traffic": traffic,
        "methods": methods,
        "emulated": device.type == "cpu",
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
