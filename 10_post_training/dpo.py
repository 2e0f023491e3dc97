"""DPO: direct preference optimisation, which learns from pairs of a good and a bad answer.

    laptop    python 10_post_training/dpo.py
              torchrun --standalone --nproc_per_node=2 10_post_training/dpo.py    (one per GPU)
    one node  torchrun --standalone --nproc_per_node=8 10_post_training/dpo.py
    cluster   the same on every node, but in place of --standalone    ($HEAD: the name of a node)
              --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

The task is to reverse three digits: the right answer to "407=" is "704.". First a small GPT learns
from a poor teacher, which reverses in 30 % of its texts. In 70 % it copies the prompt: "407=407=.".
So the most probable answer is wrong, as in grpo.py. DPO then needs no samples, no rewards and no
server. It needs pairs: here the chosen answer is the reversed one, the rejected is the copy.

    log-ratio  log p(answer) now, minus log p(answer) under the reference, the model before DPO
    margin     beta * (log-ratio of the chosen answer - log-ratio of the rejected answer)
    loss       -log(sigmoid(margin))

What is new compared with 06: the mean of the loss is over pairs, and log p of an answer is a sum
over its tokens. The reference does not change, so its log-probabilities are computed once, two
numbers for each pair. After that there is one model in memory.

What to look at: the first loss is log(2) = 0.693147. The model still is the reference, so all
margins are 0. Then look at both columns with log p. The loss depends on their difference only, so
it falls even while both fall. Set STEPS to 60: the loss falls on, and fewer answers are right.
Previous: distill.py.
"""

import argparse
import math
import os
import random
import sys
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import gelu, logsigmoid, scaled_dot_product_attention

# YOURS: the sizes
STEPS = 20
PAIRS = 64  # per step, over all ranks
LEARNING_RATE = 3e-4
SFT_STEPS = 400
SFT_ROWS = 128  # texts per SFT step, over all ranks
SFT_LEARNING_RATE = 2e-3
SEED = 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# --- 1. the loss


def answer_logprobs(model, sequences):
    """Return log p of each answer given its prompt, [rows]: the sum over the tokens of the answer.

    Call model(...), not model.forward(...): that would skip the hooks with which FSDP gathers
    weights and averages gradients.
    """
    logits = model(sequences[:, :-1]).float()  # [rows * (tokens - 1), vocabulary]
    logprobs = logits.log_softmax(dim=-1).unflatten(0, (len(sequences), -1))
    logprobs = logprobs[:, PROMPT_TOKENS - 1 :]  # the last token of the prompt predicts the first
    answers = sequences[:, PROMPT_TOKENS:]
    logprobs = logprobs.gather(-1, answers.unsqueeze(-1)).squeeze(-1)  # [rows, ANSWER_TOKENS]
    return logprobs.masked_fill(answers == PADDING, 0).sum(dim=1)


def pair_logprobs(model, numbers):
    """Return log p of the chosen and of the rejected answers, [pairs] each, from one forward."""
    chosen = [make_text(number, is_reversed=True) for number in numbers]
    rejected = [make_text(number, is_reversed=False) for number in numbers]
    return answer_logprobs(model, encode(chosen + rejected)).chunk(2)


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta):
    """Return the loss and the margin of each pair. All arguments but beta are log p, [pairs]."""
    # beta * log-ratio is called the implicit reward of an answer.
    chosen_rewards = beta * (chosen - reference_chosen)
    rejected_rewards = beta * (rejected - reference_rejected)
    margins = chosen_rewards - rejected_rewards
    return -logsigmoid(margins), margins.detach()


@torch.no_grad()
def reference_logprobs(model):
    """Return log p of both answers of all pairs, [pairs, 2], the same on every rank."""
    # YOURS: switch dropout off, here and in training: else the first loss is not log(2). With more
    # data, loop over batches, equally many on each rank: FSDP gathers weights in each forward.
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    result = torch.zeros(len(TRAIN_NUMBERS), 2, device=DEVICE)
    share = pair_logprobs(model, TRAIN_NUMBERS[rank::world_size])
    result[rank::world_size] = torch.stack(share, dim=1)
    dist.all_reduce(result)  # of the numbers to add, all but one are 0
    return result


# --- 2. YOURS: the task

VOCABULARY = 128  # tokens are ASCII codes
PADDING = ord("_")
PROMPT_TOKENS = 4  # three digits and "="
ANSWER_TOKENS = 5  # "704.", or "407=." with one token more
NUMBERS = [f"{number:03d}" for number in range(1000)]
# Held out by a hash. Without every fifth number, no prompt in training would end in 0 or 5.
TRAIN_NUMBERS = [number for number in NUMBERS if zlib.crc32(number.encode()) % 5 != 0]
TEST_NUMBERS = [number for number in NUMBERS if zlib.crc32(number.encode()) % 5 == 0]


def make_text(number, is_reversed):
    """Return a prompt with the right answer, or with a copy of the prompt as its answer."""
    answer = number[::-1] if is_reversed else f"{number}="
    return f"{number}={answer}."


def encode(texts):
    """Return [texts, PROMPT_TOKENS + ANSWER_TOKENS]. Short texts are padded at the end."""
    width = PROMPT_TOKENS + ANSWER_TOKENS
    rows = [list(text.ljust(width, chr(PADDING)).encode()) for text in texts]
    return torch.tensor(rows, device=DEVICE)


def teacher_texts(step):
    """Return SFT_ROWS texts, the same on every rank: 30 % are reversed."""
    generator = random.Random(f"{SEED} {step}")
    texts = []
    for number in generator.choices(TRAIN_NUMBERS, k=SFT_ROWS):
        texts.append(make_text(number, is_reversed=generator.random() < 0.3))
    return texts


# --- 3. YOURS: the model, as in 06_fsdp_zero/minimal.py


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
    def __init__(self, width=64, layers=2, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(PROMPT_TOKENS + ANSWER_TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):  # [batch, tokens]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # logits, [batch * tokens, vocabulary]


# --- 4. training


def update(model, optimizer, loss):
    """Take one optimizer step. Return the norm of the gradients of all ranks."""
    # Each rank has a part of the loss, and the parts must be added up. FSDP averages gradients
    # over the ranks, so multiply by the number of ranks.
    (loss * dist.get_world_size()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    assert math.isfinite(norm), f"the norm of the gradients is {norm}: lower LEARNING_RATE"
    optimizer.step()
    optimizer.zero_grad()
    return norm


def warm_start(model):
    """Train the model on texts of the teacher (SFT)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LEARNING_RATE)
    for step in range(SFT_STEPS):
        texts = teacher_texts(step)
        tokens = sum(len(text) - PROMPT_TOKENS for text in texts)  # of all ranks
        share = texts[dist.get_rank() :: dist.get_world_size()]
        update(model, optimizer, -answer_logprobs(model, encode(share)).sum() / tokens)


def sum_over_ranks(*numbers):
    """Return the sum of each number over all ranks."""
    result = torch.stack(numbers).detach()
    dist.all_reduce(result)
    return result.tolist()


@torch.no_grad()
def accuracy(model):
    """Return the share of held-out prompts whose greedy answer is the reversed number."""
    numbers = TEST_NUMBERS[dist.get_rank() :: dist.get_world_size()]
    sequences = encode([make_text(number, is_reversed=True) for number in numbers])
    predicted = model(sequences[:, :-1]).argmax(dim=-1).unflatten(0, (len(numbers), -1))
    predicted = predicted[:, PROMPT_TOKENS - 1 :]
    answers = sequences[:, PROMPT_TOKENS:]
    # The greedy answer is right if each token is the most probable one after the right tokens
    # before it. So no loop over tokens is needed.
    is_right = ((predicted == answers) | (answers == PADDING)).all(dim=1)
    [right] = sum_over_ranks(is_right.sum())
    return right / len(TEST_NUMBERS)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--beta", type=float, default=0.1, help="factor of the margin")
    args = parser.parse_args()
    # torchrun sets these variables for each process, called a rank. Without torchrun: one rank.
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # the system picks a port
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if not 0 < args.beta < math.inf:
        parser.error(f"--beta {args.beta} is not positive and finite: 0.1 is common")
    if world_size > PAIRS:
        parser.error(f"{PAIRS=} is too small for {world_size} ranks: change it")
    if DEVICE == "cuda" and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        parser.error(f"start at most {torch.cuda.device_count()} ranks per node, one for each GPU")
    torch.set_float32_matmul_precision("highest")  # "high" allows TF32, which is faster
    if DEVICE == "cuda":
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)  # from here on, DEVICE is this GPU
        dist.init_process_group("nccl", device_id=gpu)
    else:
        dist.init_process_group("gloo")

    torch.manual_seed(SEED)  # every rank builds the same model, and keeps its shard
    model = Model().to(DEVICE)
    for block in model.blocks:
        fully_shard(block)
    # By default the root is sharded again in backward only. A forward without backward, such as the
    # evaluation, would leave its full weights to the next optimizer.
    fully_shard(model, reshard_after_forward=True)
    warm_start(model)
    accuracy_before = accuracy(model)
    reference = reference_logprobs(model)  # YOURS: save it with the data, if a run can resume
    if rank == 0:
        print(f"after SFT, held-out accuracy {accuracy_before:.3f}")
        print("step      loss  accuracy    margin  log p chosen  rejected  grad norm")

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, STEPS + 1):
        batch = random.Random(f"{SEED} {step}").sample(range(len(TRAIN_NUMBERS)), PAIRS)
        mine = batch[rank::world_size]  # some ranks may have one pair more than others
        numbers = [TRAIN_NUMBERS[index] for index in mine]
        chosen, rejected = pair_logprobs(model, numbers)
        losses, margins = dpo_loss(chosen, rejected, *reference[mine].unbind(dim=1), args.beta)
        loss = losses.sum() / PAIRS  # of all ranks: losses.mean() would be over this rank's pairs
        norm = update(model, optimizer, loss)

        right = (margins > 0).sum()
        sums = sum_over_ranks(losses.sum(), right, margins.sum(), chosen.sum(), rejected.sum())
        means = [value / PAIRS for value in sums]
        if step == 1:
            first_loss = means[0]
        if rank == 0:
            print(
                f"{step:4} {means[0]:9.6f} {means[1]:9.4f} {means[2]:9.6f} {means[3]:13.6f} "
                f"{means[4]:9.5f} {norm:10.6f}",
                flush=True,
            )

    accuracy_after = accuracy(model)
    weight_sum = 0.0
    for shard in model.parameters():
        weight_sum += shard.detach().full_tensor().double().sum().item()
    weight_sums = [None] * world_size
    dist.all_gather_object(weight_sums, weight_sum)
    assert len(set(weight_sums)) == 1, f"ranks gather different weights: {weight_sums}"
    tolerance = 1e-6 * max(1, args.beta)  # beta multiplies the rounding of log p
    assert abs(first_loss - math.log(2)) < tolerance, f"the first loss is {first_loss}, not log(2)"
    assert means[2] > 0.001 * args.beta, "margins stay 0: does the reference follow the model?"
    accuracies = f"held-out accuracy {accuracy_before:.3f} before DPO, {accuracy_after:.3f} after"
    assert accuracy_before < 0.3, accuracies
    assert accuracy_after > 0.6, accuracies
    if rank == 0:
        print(f"checked: all ranks ({world_size}) gather the same weights")
        print("checked: the first loss is log(2), so the reference is the model before DPO")
        print(f"checked: {accuracies}")
    dist.destroy_process_group()
    if DEVICE == "cpu":
        # Skip interpreter shutdown, where gloo's threads can hang. This skips atexit, too.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
