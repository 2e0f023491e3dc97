"""Tensor parallelism: two ranks share the work of every block. FSDP shards what each has over the other ranks.

    laptop    torchrun --nproc_per_node=4 08_model_parallel/minimal.py    (or 2, 3; python: one process)
    one node  torchrun --nproc_per_node=8 08_model_parallel/minimal.py --dtype bf16
    cluster   the same on every node, with --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 before its name

Against 06: the ranks are a grid, data x tensor. The two of a tensor group read the same rows. Each computes half of
the outputs of q, k, v and up; of o and down it computes a summand, and an all-reduce adds the two. Change what is
marked YOURS. Look for: the last line is that of 04, 05 and 06. Next: tensor_parallel.py, the same by hand.
"""

import argparse
import logging
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

# YOURS; LENGTH counts tokens
STEPS, GLOBAL_BATCH, LENGTH, LEARNING_RATE, SEED = 20, 24, 64, 1e-3, 0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
    # YOURS: ranks that share a block. Divides its heads; within a node
    tensor = 2 if world_size % 2 == 0 else 1
    groups = world_size // tensor
    if GLOBAL_BATCH % groups:
        parser.error(
            f"{GLOBAL_BATCH=} does not divide over {groups} groups of ranks: use a multiple of {groups}"
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
    # its advice on speed, once a rank
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel("ERROR")
    mesh = init_device_mesh(device.type, (groups, tensor), mesh_dim_names=("data", "tensor"))
    # YOURS: a rank has half of the outputs (heads)
    plan = dict.fromkeys(["q", "k", "v", "up"], ColwiseParallel())
    # and half of these inputs; an all-reduce adds the results
    plan |= dict.fromkeys(["o", "down"], RowwiseParallel())
    # gradients are summed in fp32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)  # first by tensor, then by data
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)  # over the ranks with the same half
    # the rest. Before the optimizer: it makes new parameters
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    # parameters on two meshes
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    # YOURS: the data. Here Python's library, as bytes
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )

    for step in range(1, STEPS + 1):
        # equal shares; both ranks of a group read the same
        rows = global_batch(text, step)[rank // tensor :: groups]
        inputs, targets = rows[:, :-1].to(device), rows[:, 1:].to(device)
        # logits are bf16 under the policy
        loss = cross_entropy(model(inputs).float(), targets.flatten())
        loss.backward()
        # meshes differ
        norms = [parameter.grad.norm().full_tensor() for parameter in model.parameters()]
        nn.utils.clip_grads_with_norm_(
            model.parameters(), 1.0, torch.stack(norms).norm(), foreach=False
        )
        optimizer.step()
        optimizer.zero_grad()  # backward adds to the gradients that it finds

        if step % 5 == 0 or step == STEPS:
            # a rank knows the loss of its own share, and all_reduce sums
            loss = loss.detach() / world_size
            # a collective: every rank has to call it, not only the one that prints
            dist.all_reduce(loss)
            if rank == 0:
                # item() waits for the GPU: not at each step
                print(f"step {step} | loss {loss.item():.6f}", flush=True)

    # a collective, too
    weights = {name: shard.full_tensor().cpu() for name, shard in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, "minimal.pt")
    dist.barrier()  # a rank that leaves while another still needs it takes that one down
    dist.destroy_process_group()
    # a thread of gloo may abort Python's own end. Skips atexit: close your loggers before
    os._exit(0)


if __name__ == "__main__":
    main()
