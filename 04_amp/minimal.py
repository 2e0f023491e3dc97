"""Mixed precision on one device: matrices are multiplied in bf16, weights and their updates stay in fp32.

    laptop    python 04_amp/minimal.py
    one GPU   python 04_amp/minimal.py --dtype bf16    (fp16 on GPUs without bf16: V100, T4)

autocast decides for each operation: matmuls in bf16, sums and losses in fp32. fp16 has a smaller range, so
GradScaler multiplies the loss before backward and divides the gradients after it. Copy this file and change what is
marked YOURS; every other comment says why its line is there. minimal.pt in the current folder gets the weights.

Look for: the last line. In fp32, 05, 06 and 08 end with the same one, on any number of processes; bf16 and fp16 end
within 1 % of it. Before: 03_linear_regression/train.py. Next: 05_ddp/minimal.py, this program on many GPUs.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

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

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # NVIDIA's containers turn TF32 on; "high" allows it, and is faster
    torch.set_float32_matmul_precision("highest")

    torch.manual_seed(SEED)
    # made on the CPU and then moved: equal weights on every kind of device
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    # fp16 rounds small gradients to 0
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    # YOURS: the data. Here Python's library, as bytes
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )

    for step in range(1, STEPS + 1):
        rows = global_batch(text, step)
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
            # item() waits for the GPU: not at each step
            print(f"step {step} | loss {loss.item():.6f}", flush=True)

    torch.save(model.state_dict(), "minimal.pt")


if __name__ == "__main__":
    main()
