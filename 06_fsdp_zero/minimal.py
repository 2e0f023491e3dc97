"""Fully sharded data parallelism (FSDP, ZeRO-3): no GPU ever has the full model.

    laptop    torchrun --standalone --nproc_per_node=2 06_fsdp_zero/minimal.py    (one per GPU)
    one node  torchrun --standalone --nproc_per_node=8 06_fsdp_zero/minimal.py
    cluster   the same on every node, but in place of --standalone    ($HEAD: the name of a node)
              --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

What is new compared with 05: of N ranks, each stores 1/N of the weights, gradients and optimizer
state. A block's weights are gathered from all ranks just before it computes, in forward and again
in backward, and freed after it. There is no autocast: weights are cast to bf16 when they are
gathered, so all layers compute in bf16. The shards and the sums of gradients are fp32.

Copy this file and change what is marked YOURS. At the end, rank 0 collects the weights in CPU
memory and writes them to minimal.pt.

What to look at: with --dtype fp32, the last line printed is that of 04 and 05.
Previous: 05_ddp/minimal.py. Next: 08_model_parallel/minimal.py, where ranks share a block's work.
"""

import argparse
import os
import sys
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

# YOURS: the sizes
STEPS = 20
GLOBAL_BATCH = 24  # sequences per optimizer step, over all processes
LENGTH = 64  # tokens per sequence
LEARNING_RATE = 1e-3
SEED = 0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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


# YOURS: the batch
def choose_rows(text, step):
    """Return where each row of the global batch starts in the text: the same on every rank."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    return torch.randint(len(text) - LENGTH - 1, (GLOBAL_BATCH,), generator=generator)


def read_rows(text, starts):
    """Return [len(starts), LENGTH + 1] tokens."""
    return torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()


# YOURS: inputs, targets and loss
def compute_loss(model, rows):
    """Return the mean loss over the rows. All rows must have equally many targets."""
    inputs = rows[:, :-1]
    targets = rows[:, 1:]  # the token that follows each input
    logits = model(inputs).float()  # cross-entropy in fp32
    return cross_entropy(logits, targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    dtype = DTYPES[parser.parse_args().dtype]
    # torchrun sets these variables for each process, called a rank. Without torchrun: one rank.
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # the system picks a port
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if GLOBAL_BATCH % world_size != 0:
        parser.error(f"{GLOBAL_BATCH=} has no equal shares on {world_size} ranks: change it")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("highest")  # "high" allows TF32, which is faster
    if device.type == "cuda":
        # Each rank has its own GPU: start at most as many ranks per node as there are GPUs.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    with torch.device("meta"):  # shapes only, no memory
        model = Model()  # YOURS
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)  # YOURS: what is gathered and freed as a whole
    fully_shard(model, mp_policy=policy)  # the rest: embeddings and head
    model.to_empty(device=device)  # allocates shards and buffers, with undefined values
    for name, buffer in model.named_buffers():
        # YOURS: fill it here, if your model has buffers, such as rotary tables
        parser.error(f"buffer {name} {list(buffer.shape)} is undefined after to_empty: fill it")
    # YOURS: the initial weights
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = initial_weight(name, parameter.shape).to(device)  # the same on every rank
            place = (parameter.device_mesh, parameter.placements)
            parameter.copy_(distribute_tensor(weight, *place, src_data_rank=None))  # its shard
    torch.manual_seed(zlib.crc32(f"{SEED} dropout {rank}".encode()))  # differs by rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)  # YOURS
    text = make_text()  # YOURS: the data

    for step in range(1, STEPS + 1):
        starts = choose_rows(text, step)[rank::world_size]  # the share of this rank
        rows = read_rows(text, starts).to(device)
        loss = compute_loss(model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        if step % 5 == 0 or step == STEPS:
            mean_loss = loss.detach() / world_size
            dist.all_reduce(mean_loss)  # the sum over all ranks; every rank must call it
            if rank == 0:
                print(f"step {step} | loss {mean_loss.item():.6f}", flush=True)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # every rank calls, rank 0 receives
    if rank == 0:
        torch.save(weights, "minimal.pt")
    dist.barrier()  # wait until rank 0 has saved
    dist.destroy_process_group()
    if device.type == "cpu":
        # Skip interpreter shutdown, where gloo's threads can hang. This skips atexit, too: before
        # it, call wandb.finish() and the like, and close your files.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
