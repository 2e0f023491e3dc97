"""One process of preflight.py: all-reduce over the processes of two nodes, and print GB/s."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import torch
import torch.distributed as dist

from common import runtime

TIMEOUT = timedelta(seconds=60)  # preflight.py kills this process then
SAMPLES = 5

runtime.end_with_torchrun()  # end when preflight.py is killed
rank, world_size, local_rank = runtime.ranks()
device = torch.device("cpu")
buffer_bytes = 2**22
if torch.cuda.is_available():
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    buffer_bytes = 2**28

# All pairs use node 0's store. The prefix keeps their keys apart.
address = os.environ["MASTER_ADDR"]
store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT)
dist.init_process_group(
    "nccl" if device.type == "cuda" else "gloo",
    store=dist.PrefixStore(sys.argv[1], store),
    rank=rank,
    world_size=world_size,
    device_id=device if device.type == "cuda" else None,
    timeout=TIMEOUT,
)
numbers = torch.ones(buffer_bytes // 4, device=device)
dist.all_reduce(numbers)  # opens the connections
assert numbers.eq(world_size).all(), f"a sum over {world_size} processes is wrong"
numbers.zero_()

fastest = float("inf")
for _ in range(SAMPLES):
    dist.barrier()
    runtime.synchronize(device)
    start = time.perf_counter()
    dist.all_reduce(numbers)
    runtime.synchronize(device)
    fastest = min(fastest, time.perf_counter() - start)
dist.barrier()  # no process leaves while another still sends
if rank == 0:
    sent_bytes = 2 * (world_size - 1) / world_size * buffer_bytes  # of each process, in a ring
    print(sent_bytes / fastest / 1e9, flush=True)
os._exit(0)  # gloo's threads can crash Python's shutdown
