"""Rebuild nn.DataParallel, and see why DistributedDataParallel (DDP) replaced it.

DataParallel takes one line and one process. In each step it copies all weights from GPU 0 to the
other GPUs, splits the batch, and runs a thread per GPU. All threads share one Python interpreter
lock. It collects the outputs on GPU 0 and computes the loss there. After backward it adds up all
gradients on GPU 0. DDP has a process per GPU and sends gradients only.

The bytes of a step, with weights of P bytes on N GPUs:

    DataParallel, one copy per GPU    GPU 0 sends (N-1) P and receives (N-1) P
    DataParallel over NCCL            GPU 0 sends about P and receives about P, in rings or trees
    DDP                               each rank sends 2 (N-1)/N P, mostly while backward runs

The first is what this script does by hand. With either of the first two, GPU 0 alone holds all
outputs and the optimizer state, no communication overlaps with backward, and there is no second
node. The gradients of all three are those of one process.

    laptop    python 05_ddp/data_parallel.py
    one node  python 05_ddp/data_parallel.py    with two GPUs or more: also the real nn.DataParallel
    cluster   DataParallel cannot use a second node; 05_ddp/train.py can

What to look at: the bytes that device 0 sends, by the number of devices. The last row of two GPUs
or more is the real nn.DataParallel, with its time as a multiple of one GPU's. Expected with --model
wide, the default there, on 8 H100s: well over 1/8, because GPU 0 sends 228 MB of weights before
each forward and adds up 228 MB of gradients after each backward, while all GPUs wait.

Previous: ddp_from_scratch.py. Next: collectives.py.
"""

import copy
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _data_parallel import check, columns
from torch import Tensor, nn

from common import lesson, measure
from lm import shapes, stdlib_text, weights

GPU_DEFAULTS = {"model": "wide", "seq_len": 256}  # nano is too small to keep a GPU busy
BATCH_SIZE = 24  # 8 devices get equal shares
DEVICES = (2, 4, 8)

sent_bytes: Counter[tuple[int, str]] = Counter()  # by the device that sends, and by what it sends


# --- DataParallel by hand


def send(tensor: Tensor, source: int, target: int, what: str) -> Tensor:
    """Copy a tensor from one device to another, and count its bytes.

    The devices of this script are numbers. All of them are the same GPU or CPU.
    """
    if source == target:
        return tensor.detach()
    sent_bytes[source, what] += tensor.nbytes
    return tensor.detach().clone()


def data_parallel_by_hand(replicas: list[nn.Module], inputs: Tensor, targets: Tensor) -> None:
    """Compute the gradients of a batch as nn.DataParallel does in every step.

    Replica i is on device i. The gradients end on device 0, in replica 0.
    """
    n = len(replicas)
    net = replicas[0]

    # 1. Replicate. The optimizer has changed the weights on device 0 only, so all of them are sent
    #    in every step.
    for i in range(1, n):
        for parameter, weight in zip(replicas[i].parameters(), net.parameters(), strict=True):
            parameter.data = send(weight, 0, i, "weights")

    # 2. Scatter. Each device gets its part of the batch.
    parts = [send(part, 0, i, "data") for i, part in enumerate(inputs.chunk(n))]

    with ThreadPoolExecutor(n) as threads:
        # 3. Forward, in one thread per device.
        outputs = list(threads.map(nn.Module.__call__, replicas, parts))

        # 4. Gather. Device 0 gets every output, and computes the loss over the whole batch.
        collected = [send(output, i, 0, "outputs") for i, output in enumerate(outputs)]
        logits = torch.cat(collected).requires_grad_()  # [batch, tokens, vocab]
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

        # 5. Backward. Each device gets the gradient of its output, and continues from there.
        returned = [send(part, 0, i, "data") for i, part in enumerate(logits.grad.chunk(n))]
        list(threads.map(Tensor.backward, outputs, returned))

    # 6. Reduce. Only now, after backward, are the gradients added up on device 0.
    for i in range(1, n):
        for parameter, other in zip(net.parameters(), replicas[i].parameters(), strict=True):
            parameter.grad += send(other.grad, i, 0, "gradients")


# --- what DDP sends


def bytes_sent_by_ddp(gradients: list[Tensor], n: int) -> int:
    """Return the bytes that a rank of DDP sends in a step: each gradient is all-reduced.

    The process group has n ranks, of which only this one exists.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    with measure.Traffic() as traffic:
        for gradient in gradients:
            dist.all_reduce(gradient.clone())
    dist.destroy_process_group()
    return round(traffic.bytes_sent["all_reduces"])


# --- the comparison


def forward_backward(net: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Compute the gradients of a batch as one process does, or as nn.DataParallel does."""
    net.zero_grad()
    logits = net(inputs)  # [batch, tokens, vocab]
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()


def gradients_of(net: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters."""
    return [parameter.grad for parameter in net.parameters()]


def by_hand(
    net: nn.Module, n: int, inputs: Tensor, targets: Tensor, expected: list[Tensor]
) -> dict:
    """Return the bytes and the gradient error of one step by hand on n devices."""
    sent_bytes.clear()
    replicas = [copy.deepcopy(net) for _ in range(n)]
    data_parallel_by_hand(replicas, inputs, targets)
    return {
        "name": "by hand",
        "devices": n,
        "device_0_sent_bytes": sent_bytes[0, "weights"],
        "device_1_sent_bytes": sent_bytes[1, "gradients"],
        "outputs_to_device_0_bytes": sum(sent_bytes[i, "outputs"] for i in range(n)),
        "ddp_rank_sent_bytes": bytes_sent_by_ddp(expected, n),
        "gradient_relative_error": measure.relative_error(gradients_of(replicas[0]), expected),
    }


def real_data_parallel(
    net: nn.Module, inputs: Tensor, targets: Tensor, expected: list[Tensor], device: torch.device
) -> dict:
    """Return the time and the gradient error of nn.DataParallel on all GPUs of this machine."""
    parallel_net = nn.DataParallel(net)  # the one line
    steps = {
        "one GPU": partial(forward_backward, net, inputs, targets),
        "nn.DataParallel": partial(forward_backward, parallel_net, inputs, targets),
    }
    timings = measure.seconds_in_turns(steps, device, rounds=10)
    row = {"name": "nn.DataParallel", "devices": torch.cuda.device_count()}
    # nn.DataParallel made the last step, so these are its gradients.
    row["gradient_relative_error"] = measure.relative_error(gradients_of(net), expected)
    row.update(timings["nn.DataParallel"])
    return row


def main() -> int:
    args = lesson.parse_flags(__doc__, gpu=GPU_DEFAULTS, model="nano", seq_len=16)
    config = weights.load_config(args.model, 256, args.seq_len)
    device = lesson.start(args.device)
    net = weights.build(args.model, config, seed=0, device=device)
    inputs, targets = stdlib_text.one_batch(BATCH_SIZE, args.seq_len, device)

    forward_backward(net, inputs, targets)
    expected = [gradient.clone() for gradient in gradients_of(net)]
    net.zero_grad()

    rows = [by_hand(net, n, inputs, targets, expected) for n in DEVICES]
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        rows.append(real_data_parallel(net, inputs, targets, expected, device))

    parameters = shapes.parameter_count(config)
    logit_bytes = 4 * targets.numel() * config.vocab_size
    lesson.end(
        rows,
        columns=columns(rows),
        checked=check(rows, weight_bytes=4 * parameters, logit_bytes=logit_bytes),
        args=args,
        device=device,
        dtype="fp32",
        parameters=parameters,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
