"""Data parallelism: each process holds the whole model and reads its share of every batch.

    laptop    torchrun --nproc_per_node=2 05_ddp/minimal.py    (python 05_ddp/minimal.py: one process)
    one node  torchrun --nproc_per_node=8 05_ddp/minimal.py --dtype bf16
    cluster   the same on every node, with --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 before its name

Against 04: torchrun starts one process per GPU, a rank. DistributedDataParallel (DDP) averages the gradients of all
ranks while backward runs, so all take the same step. The batch belongs to the run: GLOBAL_BATCH rows in all, whatever
the number of ranks. Copy this file and change what is marked YOURS. Rank 0 writes minimal.pt, as 04 does.

Look for: in fp32 the last line is that of 04, on any number of ranks. Next: 06_fsdp_zero/minimal.py, where no process
needs room for the whole model.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

# YOURS; LENGTH counts tokens
STEPS, GLOBAL_BATCH, LENGTH, LEARNING_RATE, SEED = 20, 24, 64, 1e-3, 0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# YOURS: the model. Here a small transformer that predicts the next byte.
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=256, width=128, layers=4, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # a row of logits for each token


# YOURS: the batch. A function of (seed, step) alone: a resumed run and every rank draw the same rows for a step.
def global_batch(text, step):
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    starts = torch.randint(len(text) - LENGTH - 1, (GLOBAL_BATCH,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    dtype = DTYPES[parser.parse_args().dtype]

    # started by python, not by torchrun: the only rank. Port 0: any that is free
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if GLOBAL_BATCH % world_size:
        parser.error(
            f"{GLOBAL_BATCH=} does not divide over {world_size} ranks: use a multiple of {world_size}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # NVIDIA's containers turn TF32 on; "high" allows it, and is faster
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        # before NCCL: until here "cuda" is GPU 0 on all ranks
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # NCCL or gloo
    dist.init_process_group(
        device_id=torch.cuda.current_device() if device.type == "cuda" else None
    )

    torch.manual_seed(SEED)
    # made on the CPU and then moved: equal weights on every kind of device
    model = Model().to(device)
    # sends rank 0's weights to all; averages the gradients in backward
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    # fp16 rounds small gradients to 0
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    # YOURS: the data. Here Python's library, as bytes
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )

    for step in range(1, STEPS + 1):
        # equal shares: DDP weighs all ranks alike
        rows = global_batch(text, step)[rank::world_size]
        inputs, targets = rows[:, :-1].to(device), rows[:, 1:].to(device)
        # forward only: backward follows it
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = cross_entropy(model(inputs), targets.flatten())
        scaler.scale(loss).backward()
        # before clipping, or the limit of 1.0 would apply to the scaled gradients
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # in fp16 skips the step if a gradient is inf or NaN
        scaler.update()  # halves the scale after such a step; has to be called once per step
        optimizer.zero_grad()  # backward adds to the gradients that it finds

        if step % 5 == 0 or step == STEPS:
            # a rank knows the loss of its own share, and all_reduce sums
            loss = loss.detach() / world_size
            # a collective: every rank has to call it, not only the one that prints
            dist.all_reduce(loss)
            if rank == 0:
                # item() waits for the GPU: not at each step
                print(f"step {step} | loss {loss.item():.6f}", flush=True)

    if rank == 0:
        # .module: DDP puts "module." before each name
        torch.save(model.module.state_dict(), "minimal.pt")
    dist.barrier()  # a rank that leaves while another still needs it takes that one down
    dist.destroy_process_group()
    # a thread of gloo may abort Python's own end. Skips atexit: close your loggers before
    os._exit(0)


if __name__ == "__main__":
    main()
