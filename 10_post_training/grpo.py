"""GRPO: reinforcement learning with a reward that a program computes.

    laptop    python 10_post_training/grpo.py
              torchrun --standalone --nproc_per_node=2 10_post_training/grpo.py    (one per GPU)
    one node  torchrun --standalone --nproc_per_node=8 10_post_training/grpo.py
    cluster   the same on every node, but in place of --standalone    ($HEAD: the name of a node)
              --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

The task is to reverse three digits: the right answer to "407=" is "704.". First a small GPT learns
from a poor teacher, which reverses in 30 % of its texts and copies in 70 %. So the model's most
probable answer is wrong, but some of its samples are right. Then each step of GRPO has five parts:

    1. rollouts    a server samples GROUP answers to each prompt
    2. rewards     a program checks each answer: 1 if it is right, 0 if not
    3. advantages  each reward is compared with the mean reward of its group
    4. updates     the trainer makes answers with a positive advantage more probable
    5. sync        the server gets the new weights of the trainer

What is new compared with 06: there are two copies of the model. The trainer is sharded over all
ranks. The server is whole on every rank, because it computes one token at a time. Both compute the
log-probability of each sampled token. If they disagree, rewards may rise all the same. --beta adds
a third copy, the reference, whole on every rank.

What to look at: the column mismatch, which is the mean |logp_trainer - logp_server|. It is 0 up to
rounding if both have the same weights and dtype. Then try --server-dtype bf16, or --stale 3. The
loss is no measure of progress: without flags, and if all answers are equally long, it is 0 up to
rounding, as the advantages of a group add up to 0.
Previous: 09_inference/parity.py. Next: distill.py, where a teacher replaces the reward.
"""

import argparse
import json
import math
import os
import random
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import gelu, scaled_dot_product_attention

# YOURS: the sizes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = {"cpu": 64, "cuda": 512}[DEVICE]
LAYERS = {"cpu": 2, "cuda": 4}[DEVICE]
PROMPTS = {"cpu": 24, "cuda": 256}[DEVICE]  # per step, over all ranks
LEARNING_RATE = {"cpu": 1e-3, "cuda": 2e-4}[DEVICE]
GROUP = 8  # answers per prompt, at least 2
STEPS = 60
SFT_STEPS = 250
SFT_ROWS = 128  # texts per SFT step, over all ranks
TEMPERATURE = 0.8  # of sampling
CLIP = 0.2  # a token stops learning once its ratio has moved so far from 1
MAX_WEIGHT = 3.0  # larger importance weights become this one
SEED = 0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# --- 1. the loss


def group_advantages(rewards):
    """Return how far each reward is above the mean of its group, in standard deviations, [rows, 1].

    Return also whether the rewards of its group differ. If not, the loss leaves the group out, with
    its KL divergence: all advantages are 0.
    """
    groups = rewards.view(-1, GROUP)
    mean = groups.mean(dim=1, keepdim=True)
    std = groups.std(dim=1, keepdim=True)
    advantages = (groups - mean) / (std + 1e-4)
    teaches = (groups != groups[:, :1]).any(dim=1, keepdim=True).expand_as(groups)
    return advantages.reshape(-1, 1), teaches.reshape(-1, 1)


def importance_weights(old_logprobs, server_logprobs, mask, correction):
    """Return p_trainer / p_server of each token, [rows, tokens], or of each answer, [rows, 1]."""
    difference = (old_logprobs - server_logprobs) * mask
    if correction == "none":
        difference = torch.zeros_like(difference)
    elif correction == "sequence":  # the product of the tokens' weights
        difference = difference.sum(dim=1, keepdim=True)
    elif correction == "sequence-mean":  # their geometric mean
        difference = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    return difference.exp().clamp(max=MAX_WEIGHT)


def grpo_loss(logprobs, batch, beta):
    """Return the loss and the ratio of each token, and whether it is clipped: [rows, tokens]."""
    ratio = (logprobs - batch.old_logprobs).exp()  # 1 before the first update of a step
    objective = ratio * batch.advantages
    clipped_objective = ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages
    losses = -torch.minimum(objective, clipped_objective) * batch.weights
    if beta > 0:
        # The KL divergence from the reference, by the estimator called k3. Its gradient is that of
        # the KL divergence only with the factor ratio, although the ratio is 1 at first, and only
        # if the server had the weights of the trainer.
        difference = batch.reference_logprobs - logprobs
        losses = losses + beta * ratio * (difference.exp() - difference - 1)
    return losses, ratio.detach(), clipped_objective < objective


def divisors(mask, tokens, answers, loss_type):
    """Return what to divide the loss of each token by, before all are added up.

    mask is [rows, tokens] of this rank. tokens and answers are their numbers over all ranks.
    """
    if loss_type == "grpo":  # the mean of each answer, then the mean of all answers
        return answers * mask.sum(dim=1, keepdim=True).clamp(min=1)
    if loss_type == "dr_grpo":  # a constant. The paper also leaves out the std of the group
        return answers * mask.shape[1]
    return tokens  # dapo: the mean of all tokens


# --- 2. the server


def sync_weights(model, server):
    """Copy the weights of the sharded trainer to the server of this rank."""
    # full_tensor() waits until all ranks have called it. Gather all weights before any is used:
    # a rank that sends one to a real server while the others gather the next can hang.
    full_weights = {}
    for name, weight in model.named_parameters():
        full_weights[name] = weight.detach().full_tensor()
    # YOURS: strict=False if your model has tied weights, which have one name in named_parameters.
    server.load_state_dict(full_weights)  # casts to the dtype of the server


def next_token_logprobs(model, tokens):
    """Return log-probabilities in fp32, [rows, tokens, vocabulary].

    Trainer and server must both divide by the temperature. Call model(...), not model.forward(...),
    which skips the hooks with which FSDP gathers weights and averages gradients.
    """
    logits = model(tokens).float() / TEMPERATURE
    return logits.log_softmax(dim=-1).unflatten(0, tokens.shape)


def answer_logprobs(model, sequences):
    """Return the log-probability of each token of the answers, [rows, ANSWER_TOKENS]."""
    logprobs = next_token_logprobs(model, sequences[:, :-1])
    logprobs = logprobs[:, PROMPT_TOKENS - 1 :]  # the last token of the prompt predicts the first
    answers = sequences[:, PROMPT_TOKENS:]
    return logprobs.gather(-1, answers.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def generate(server, prompts, noise):
    """Return prompts with sampled answers, the mask of the answers, and their log-probabilities.

    prompts is [rows, PROMPT_TOKENS], noise is [rows, ANSWER_TOKENS, VOCABULARY]. With Gumbel noise
    the argmax below is a sample from the distribution. With 0 it is the most probable token.
    """
    sequences = prompts
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=DEVICE)
    mask = []
    logprobs = []
    for position in range(ANSWER_TOKENS):
        # This computes all earlier tokens again. Real servers have a KV cache: see 09_inference.
        distribution = next_token_logprobs(server, sequences)[:, -1]  # [rows, VOCABULARY]
        tokens = (distribution + noise[:, position]).argmax(dim=-1)
        tokens = tokens.masked_fill(finished, PADDING)
        logprobs.append(distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
        mask.append(~finished)  # before the next line, so the stop token is part of the answer
        finished = finished | (tokens == STOP)
        sequences = torch.cat((sequences, tokens.unsqueeze(-1)), dim=1)
    return sequences, torch.stack(mask, dim=1), torch.stack(logprobs, dim=1)


def gumbel_noise(step, prompt, answer):
    """Return the noise of one answer. It does not depend on the rank that samples the answer."""
    key = zlib.crc32(f"{SEED} {step} {prompt} {answer}".encode())
    generator = torch.Generator().manual_seed(key)
    return -torch.empty(ANSWER_TOKENS, VOCABULARY).exponential_(generator=generator).log()


# --- 3. YOURS: the task

VOCABULARY = 128  # tokens are ASCII codes
STOP = ord(".")
PADDING = ord("_")
PROMPT_TOKENS = 4  # three digits and "="
ANSWER_TOKENS = 4  # three digits and "."
NUMBERS = [f"{number:03d}" for number in range(1000)]
# Held out by a hash. Without every fifth number, no prompt in training would end in 0 or 5.
TRAIN_NUMBERS = [number for number in NUMBERS if zlib.crc32(number.encode()) % 5 != 0]
TEST_NUMBERS = [number for number in NUMBERS if zlib.crc32(number.encode()) % 5 == 0]


def encode(texts):
    """Return [texts, tokens]. All texts must have the same length."""
    return torch.tensor([list(text.encode()) for text in texts], device=DEVICE)


def rewards_of(sequences):
    """Return 1 for each right answer and 0 for each wrong one, [rows]."""
    digits = sequences[:, :3]
    is_reversed = (sequences[:, 4:7] == digits.flip(1)).all(dim=1)
    has_stopped = sequences[:, 7] == STOP
    return (is_reversed & has_stopped).float()


def teacher_texts(step, reversed_share):
    """Return SFT_ROWS texts, the same on every rank."""
    generator = random.Random(f"{SEED} {step}")
    texts = []
    for number in generator.choices(TRAIN_NUMBERS, k=SFT_ROWS):
        is_reversed = generator.random() < reversed_share
        answer = number[::-1] if is_reversed else number
        texts.append(f"{number}={answer}.")
    return texts


# --- 4. YOURS: the model, as in 06_fsdp_zero/minimal.py


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
    def __init__(self, width=WIDTH, layers=LAYERS, heads=4):
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
        return self.head(x.flatten(0, 1))  # logits, [batch * tokens, VOCABULARY]


# --- 5. training


def shard(model):
    """Shard the model over all ranks, as in 06_fsdp_zero/minimal.py, and return it."""
    for block in model.blocks:
        fully_shard(block)
    # By default the root keeps its full weights until backward, so full_tensor() would fail after
    # a forward without backward.
    return fully_shard(model, reshard_after_forward=True)


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


def warm_start(model, reversed_share):
    """Train the model on texts of a teacher (supervised fine-tuning, SFT)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2 * LEARNING_RATE)
    for step in range(SFT_STEPS):
        texts = teacher_texts(step, reversed_share)[dist.get_rank() :: dist.get_world_size()]
        logprobs = answer_logprobs(model, encode(texts))
        update(model, optimizer, -logprobs.sum() / (SFT_ROWS * ANSWER_TOKENS))


def sample(server, step):
    """Sample GROUP answers to each prompt of this rank. Return what generate returns."""
    numbers = random.Random(f"{SEED} {step}").choices(TRAIN_NUMBERS, k=PROMPTS)
    prompts = []
    noise = []
    for prompt in range(dist.get_rank(), PROMPTS, dist.get_world_size()):
        for answer in range(GROUP):
            prompts.append(numbers[prompt] + "=")
            noise.append(gumbel_noise(step, prompt, answer))
    return generate(server, encode(prompts), torch.stack(noise).to(DEVICE))


@torch.no_grad()
def make_batch(rollouts, model, reference, correction):
    """Return what the trainer learns from: tensors with one row per answer."""
    sequences, answer_mask, server_logprobs = rollouts
    old_logprobs = answer_logprobs(model, sequences)  # of the trainer, before its updates
    rewards = rewards_of(sequences)
    advantages, teaches = group_advantages(rewards)
    batch = SimpleNamespace(
        sequences=sequences,  # [rows, PROMPT_TOKENS + ANSWER_TOKENS]
        answer_mask=answer_mask,  # False for padding after the answer, [rows, ANSWER_TOKENS]
        loss_mask=answer_mask & teaches,  # the tokens that the loss is a mean of
        rewards=rewards,  # [rows]
        advantages=advantages,  # [rows, 1]
        weights=importance_weights(old_logprobs, server_logprobs, answer_mask, correction),
        mismatch=(old_logprobs - server_logprobs).abs() * answer_mask,
        old_logprobs=old_logprobs,  # [rows, ANSWER_TOKENS]
    )
    if reference is not None:
        batch.reference_logprobs = answer_logprobs(reference, sequences)
    return batch


def minibatch_of(batch, number, minibatches):
    """Return the rows of one mini-batch. Its prompts are the same on any number of ranks."""
    rows = []
    prompts_of_this_rank = range(dist.get_rank(), PROMPTS, dist.get_world_size())
    for place, prompt in enumerate(prompts_of_this_rank):
        if prompt * minibatches // PROMPTS == number:
            rows += range(place * GROUP, (place + 1) * GROUP)
    return SimpleNamespace(**{name: tensor[rows] for name, tensor in vars(batch).items()})


def over_ranks(*numbers):
    """Return the sum of each number over all ranks."""
    sums = torch.stack(numbers).detach().float()
    dist.all_reduce(sums)
    return sums.tolist()


def train(model, optimizer, batch, args):
    """Take one optimizer step per mini-batch. Return what is printed about them."""
    answers, tokens, answer_tokens = over_ranks(
        batch.loss_mask[:, 0].sum(),
        batch.loss_mask.sum(),
        batch.answer_mask.sum(),
    )
    # Over all mini-batches, so that all tokens of a step count the same.
    tokens = max(tokens, 1)  # 0 if the rewards of every group are equal
    answers = max(answers, 1)
    clipped = torch.zeros((), device=DEVICE)
    loss_sum = torch.zeros((), device=DEVICE)
    ratios = []
    for number in range(args.minibatches):
        part = minibatch_of(batch, number, args.minibatches)
        logprobs = answer_logprobs(model, part.sequences)
        losses, ratio, is_clipped = grpo_loss(logprobs, part, args.beta)
        divisor = divisors(part.loss_mask, tokens, answers, args.loss_type) / args.minibatches
        loss = (losses * part.loss_mask / divisor).sum()
        norm = update(model, optimizer, loss)
        loss_sum += loss.detach()
        clipped += (is_clipped & part.loss_mask).sum()
        ratios.append(torch.where(part.loss_mask, ratio, 1.0))

    ratios = torch.cat(ratios)
    ends = torch.stack((-ratios.min(), ratios.max()))
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    right, mismatch, weights, clipped, loss = over_ranks(
        batch.rewards.sum(),
        batch.mismatch.sum(),
        (batch.weights * batch.answer_mask).sum(),
        clipped,
        loss_sum,
    )
    return {
        "reward": right / (PROMPTS * GROUP),
        "mismatch": mismatch / answer_tokens,
        "weight": weights / answer_tokens,
        "lowest": -ends[0].item(),
        "highest": ends[1].item(),
        "clipped": clipped / tokens,
        "loss": loss / args.minibatches,
        "norm": norm,  # of the last mini-batch
        "tokens": answer_tokens,
        "loss_tokens": tokens,  # that the loss is a mean of
    }


def accuracy(server):
    """Return the share of held-out prompts whose greedy answer is right."""
    numbers = TEST_NUMBERS[dist.get_rank() :: dist.get_world_size()]
    prompts = encode([number + "=" for number in numbers])
    noise = torch.zeros(len(numbers), ANSWER_TOKENS, VOCABULARY, device=DEVICE)
    sequences, _, _ = generate(server, prompts, noise)
    [right] = over_ranks(rewards_of(sequences).sum())
    return right / len(TEST_NUMBERS)


def clock():
    """Return the time in seconds, after all work of the GPU so far."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def read_flags(world_size):
    """Return the flags. Exit with one line if they cannot work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stale", type=int, default=0, help="steps that the server may be behind")
    parser.add_argument("--minibatches", type=int, default=1, help="updates per step")
    parser.add_argument("--server-dtype", choices=DTYPES, default="fp32")
    corrections = ("none", "token", "sequence", "sequence-mean")
    parser.add_argument("--correction", choices=corrections, default="token")
    parser.add_argument("--loss-type", choices=("dapo", "grpo", "dr_grpo"), default="dapo")
    parser.add_argument("--beta", type=float, default=0.0, help="factor of the KL divergence")
    parser.add_argument("--json", type=Path, help="write a summary to this file")
    args = parser.parse_args()
    if args.stale < 0:
        parser.error(f"--stale {args.stale} is negative: 0 syncs after every step")
    if not 0 <= args.beta < math.inf:
        parser.error(f"--beta {args.beta} is not 0 or a positive number")
    if args.minibatches < 1:
        parser.error(f"--minibatches {args.minibatches} is below 1")
    most_ranks = min(PROMPTS // args.minibatches, SFT_ROWS, len(TEST_NUMBERS))
    if world_size > most_ranks:
        parser.error(
            f"{world_size} ranks, but work for {most_ranks}: start fewer, lower "
            f"--minibatches {args.minibatches}, or raise {PROMPTS=} or {SFT_ROWS=}"
        )
    if DEVICE == "cuda" and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        parser.error(f"start at most {torch.cuda.device_count()} ranks per node, one for each GPU")
    if GROUP < 2:
        parser.error(f"{GROUP=}: an answer needs others to be compared with: take 2 or more")
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: it is a folder, or its folder does not exist")
    return args


def main():
    # torchrun sets these variables for each process, called a rank. Without torchrun: one rank.
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # the system picks a port
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    args = read_flags(world_size)
    torch.set_float32_matmul_precision("highest")  # "high" allows TF32, which is faster
    if DEVICE == "cuda":
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)  # from here on, DEVICE is this GPU
        dist.init_process_group("nccl", device_id=gpu)
    else:
        dist.init_process_group("gloo")

    torch.manual_seed(SEED)  # every rank builds the same model, and keeps its shard
    model = shard(Model().to(DEVICE))
    warm_start(model, reversed_share=0.3)
    server = Model().to(DEVICE, DTYPES[args.server_dtype])
    sync_weights(model, server)
    reference = None
    if args.beta > 0:
        reference = Model().to(DEVICE)  # keeps these weights
        sync_weights(model, reference)
    before = accuracy(server)
    if rank == 0:
        print(f"after SFT, held-out accuracy {before:.3f}")
        print("step   reward mismatch   weight     ratio        clipped       loss  grad norm")

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    history = []
    seconds = {"generation": 0.0, "training": 0.0, "sync": 0.0}
    for step in range(1, STEPS + 1):
        started = clock()
        rollouts = sample(server, step)
        sampled = clock()
        batch = make_batch(rollouts, model, reference, args.correction)
        numbers = train(model, optimizer, batch, args)
        trained = clock()
        if step % (args.stale + 1) == 0:
            sync_weights(model, server)
        seconds["generation"] += sampled - started
        seconds["training"] += trained - sampled
        seconds["sync"] += clock() - trained
        history.append(numbers)
        if rank == 0:
            line = "{reward:8.4f} {mismatch:8.1e} {weight:8.4f} {lowest:8.4f} to {highest:.4f} "
            line += "{clipped:8.4f} {loss:10.6f} {norm:10.6f}"
            print(f"{step:4} {line.format(**numbers)}", flush=True)

    sync_weights(model, server)
    after = accuracy(server)
    if rank == 0:
        total_seconds = sum(seconds.values())
        speed = sum(numbers["tokens"] for numbers in history) / total_seconds
        shares = ", ".join(f"{part} {seconds[part] / total_seconds:.0%}" for part in seconds)
        print(f"held-out accuracy {before:.3f} before, {after:.3f} after")
        print(f"{shares} of {total_seconds:.1f} s, {speed:,.0f} tokens/s")
        summary = {
            "tokens_per_second": speed,  # tokens of answers
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None,
            "seconds": seconds,
            "accuracy_before": before,
            "accuracy_after": after,
            "history": history,
        }
        if args.json:
            args.json.write_text(json.dumps(summary, indent=1), encoding="utf-8")

    weight_sum = sum(weight.double().sum().item() for weight in server.parameters())
    weight_sums = [0.0] * world_size
    dist.all_gather_object(weight_sums, weight_sum)
    assert len(set(weight_sums)) == 1, f"the servers have different weights: {weight_sums}"
    if rank == 0:
        print(f"checked: the servers of all ranks ({world_size}) have the same weights")
    if args.stale == 0 and args.server_dtype == "fp32":  # a server with the same weights
        mismatch = max(numbers["mismatch"] for numbers in history)
        assert mismatch < 1e-5, f"trainer and server differ: mismatch {mismatch:.1e}"
        assert before < 0.3, f"{before:.3f} before: the default settings give less than 0.3"
        assert after > 0.9, f"{after:.3f} after: the default settings give more than 0.9"
        counted = sum(numbers["loss_tokens"] / numbers["tokens"] for numbers in history) / STEPS
        assert 0 < counted < 1, f"{counted:.0%} of the tokens are in groups of unequal rewards"
        if rank == 0:
            print(f"checked: groups of equal rewards are left out: {1 - counted:.0%} of the tokens")
            print(f"checked: trainer and server agree: mismatch at most {mismatch:.1e}")
            print("checked: held-out accuracy rises from below 0.3 to above 0.9")
    dist.destroy_process_group()
    if DEVICE == "cpu":
        # Skip interpreter shutdown, where gloo's threads can hang. This skips atexit, too.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
