"""nn.DataParallel, and why not: the gradients of one process, by a way that is longer and hides nothing.

DataParallel is one line and one process. In each step it copies all weights from GPU 0 to the others, cuts the batch,
runs a thread per GPU (all under one Python interpreter lock) and collects the outputs on GPU 0, where the loss is
computed. When backward is over, it adds up all gradients on GPU 0. DDP has a process per GPU and sends gradients only.

Bytes, with weights of P bytes on N GPUs. Sent one by one, as here by hand, DataParallel is a star: GPU 0 sends (N-1)P
and receives (N-1)P. Over NCCL it broadcasts and reduces along rings or trees: GPU 0 then sends about P and receives
about P. Either way GPU 0 alone holds all outputs and the optimizer state, nothing hides behind backward, and there is
no second node. A rank of DDP sends 2(N-1)/N P, never more than 2P, and mostly while backward runs.

    laptop    python 05_ddp/data_parallel.py
    one node  python 05_ddp/data_parallel.py --model llama-124m --seq-len 512
    cluster   DataParallel ends at the node: 05_ddp/train.py

Look for: the bytes of device 0 by N. On two GPUs or more the last row is the real nn.DataParallel, with its time
against one GPU's. Before: ddp_from_scratch.py. Next: collectives.py.
"""

import copy
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, measure, report
from lm import data, shapes, weights

sent: Counter[str] = Counter()  # bytes, by device and by what they are


def send(tensor: Tensor, source: int, target: int, what: str) -> Tensor:
    """The tensor on another device, here a copy in the same memory."""
    if source == target:
        return tensor.detach()
    sent[f"device {source} sends {what}"] += tensor.nbytes
    return tensor.detach().clone()


def data_parallel_by_hand(replicas: list[nn.Module], inputs: Tensor, targets: Tensor) -> None:
    """What nn.DataParallel does in every step. Replica i is on device i; the mean gradient ends on device 0."""
    n = len(replicas)
    net = replicas[0]
    # 1. replicate: the optimizer has changed the weights of device 0 only, so all of them travel, in every step
    for i in range(1, n):
        for parameter, weight in zip(replicas[i].parameters(), net.parameters(), strict=True):
            parameter.data = send(weight, 0, i, "weights")
    # 2. scatter: each device gets its part of the batch
    parts = [send(part, 0, i, "data") for i, part in enumerate(inputs.chunk(n))]
    with ThreadPoolExecutor(n) as threads:
        # 3. forward, in one thread per device
        outputs = list(threads.map(lambda replica, part: replica(part), replicas, parts))
        # 4. gather: device 0 gets every output, and computes the loss over the whole batch
        collected = [send(output, i, 0, "outputs") for i, output in enumerate(outputs)]
        logits = torch.cat(collected).requires_grad_()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        # 5. backward: each device gets the gradient of its output and goes on from there
        returned = [send(part, 0, i, "data") for i, part in enumerate(logits.grad.chunk(n))]
        list(threads.map(lambda output, gradient: output.backward(gradient), outputs, returned))
    # 6. reduce: only now, when backward is over, are the gradients added up on device 0
    for i in range(1, n):
        for parameter, other in zip(net.parameters(), replicas[i].parameters(), strict=True):
            parameter.grad += send(other.grad, i, 0, "gradients")


def step(net: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    net.zero_grad()
    F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten()).backward()


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in net.parameters()]


def ddp_sends(gradients: list[Tensor], n: int) -> int:
    """Bytes that a rank of DDP sends in a step: each gradient is all-reduced, in buckets or alone. Counted in a group
    whose other ranks are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    with measure.Traffic() as counted:
        for gradient in gradients:
            dist.all_reduce(gradient.clone())
    dist.destroy_process_group()
    return round(counted.bytes_sent["all_reduces"])


def run(net: nn.Module, n: int, inputs: Tensor, targets: Tensor, expected: list[Tensor]) -> dict:
    """One step on n devices, by hand."""
    sent.clear()
    replicas = [copy.deepcopy(net) for _ in range(n)]
    data_parallel_by_hand(replicas, inputs, targets)
    return {
        "name": "by hand",
        "devices": n,
        "device_0_sent_bytes": sent["device 0 sends weights"],
        "device_1_sent_bytes": sent["device 1 sends gradients"],
        "outputs_to_device_0_bytes": sum(
            size for key, size in sent.items() if key.endswith("outputs")
        ),
        "ddp_rank_sent_bytes": ddp_sends(expected, n),
        "gradient_relative_error": measure.relative_error(gradients(replicas[0]), expected),
    }


def check(rows: list[dict], weight_bytes: int, logit_bytes: int) -> list[str]:
    for row in rows:
        n, error = row["devices"], row["gradient_relative_error"]
        assert error < 1e-5, (
            f"{n} devices: gradients differ from those of one process by {error:.0e}"
        )
        if row["name"] == "by hand":
            outputs = (n - 1) * logit_bytes // n
            assert row["device_0_sent_bytes"] == (n - 1) * weight_bytes, (
                f"device 0 of {n} does not send (N-1)P"
            )
            assert row["device_1_sent_bytes"] == weight_bytes, f"device 1 of {n} does not send P"
            assert row["outputs_to_device_0_bytes"] == outputs, (
                f"device 0 of {n} does not get (N-1)/N of the outputs"
            )
            assert row["ddp_rank_sent_bytes"] == round(2 * (n - 1) / n * weight_bytes), (
                "DDP does not send 2(N-1)/N P"
            )
    return [
        "(N-1)P leave device 0, 2(N-1)/N P each rank of DDP, and the gradients are those of one process"
    ]


def main() -> int:
    args = report.lesson_flags(__doc__, model="nano", seq_len=16)
    config = shapes.load_config(args.model, 256, args.seq_len)
    device = report.start_lesson(args.device)
    net = weights.build(args.model, config, seed=0, device=device)
    batch = data.one_batch(24, args.seq_len, device)
    step(net, *batch)
    expected = [gradient.clone() for gradient in gradients(net)]
    net.zero_grad()
    rows = [run(net, n, *batch, expected) for n in (2, 4, 8)]
    if torch.cuda.device_count() > 1 and device.type == "cuda":
        parallel = nn.DataParallel(net)  # the one line
        steps = {
            "one GPU": lambda: step(net, *batch),
            "nn.DataParallel": lambda: step(parallel, *batch),
        }
        # the last step is DataParallel's
        times = measure.seconds_in_turns(steps, device, rounds=10)
        found = measure.relative_error(gradients(net), expected)
        name, gpus = "nn.DataParallel", torch.cuda.device_count()
        rows.append(
            {"name": name, "devices": gpus, "gradient_relative_error": found, **times[name]}
        )
    columns = {
        "name": "DataParallel",
        "devices": "devices",
        "device_0_sent_bytes": "device 0 sends",
        "device_1_sent_bytes": "each other sends",
        "outputs_to_device_0_bytes": "outputs to device 0",
        "ddp_rank_sent_bytes": "a rank of DDP sends",
        "gradient_relative_error": "relative error of gradients",
    }
    columns |= {"time_ratio": "time"} if len(rows) > 3 else {}
    count = shapes.parameter_count(config)
    logit_bytes = 4 * batch[1].numel() * config.vocab_size
    checked = check(rows, 4 * count, logit_bytes)
    report.end_lesson(
        rows,
        columns=columns,
        checked=checked,
        args=args,
        device=device,
        dtype="fp32",
        parameters=count,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
