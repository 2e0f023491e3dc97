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
    4. update      the trainer makes answers with a positive advantage more probable
    5. sync        the server gets the new weights of the trainer

What is new compared with 06: there are two copies of the model. The trainer is sharded over all
ranks. The server is whole on every rank, because it computes one token at a time. Both compute the
log-probability of each sampled token. If they disagree, no error is raised and rewards may rise.

What to look at: the column mismatch, which is the mean |logp_trainer - logp_server|. It is 0 up to
rounding if both have the same weights and dtype. Then try --server-dtype bf16, or --stale 3. The
loss is no measure of progress: advantages of a group add up to 0, so it is near 0 from the start.
Previous: 09_inference/parity.py. Next: distill.py, where a teacher replaces the reward.
"""

import argparse
import os
import random
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import gelu, scaled_dot_product_attention

# YOURS: the sizes
STEPS = 60
PROMPTS = 24  # per step, over all ranks
GROUP = 8  # answers per prompt
TEMPERATURE = 0.8  # of sampling
CLIP = 0.2  # a token stops learning once its ratio has moved so far from 1
MAX_WEIGHT = 3.0  # larger importance weights are truncated
LEARNING_RATE = 1e-3
SFT_STEPS = 250
SFT_ROWS = 128  # texts per SFT step, over all ranks
SEED = 0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# --- 1. the loss


def group_advantages(rewards):
    """Return how far each reward is above the mean of its group: [rows], then [rows, 1]."""
    groups = rewards.view(-1, GROUP)
    mean = groups.mean(dim=1, keepdim=True)
    std = groups.std(dim=1, keepdim=True)  # 0 if all answers are right, or all are wrong
    return ((groups - mean) / (std + 1e-4)).view(-1, 1)


def importance_weights(old_logprobs, server_logprobs, mask, correction):
    """Return p_trainer / p_server of each token, [rows, tokens], or of each answer, [rows, 1]."""
    difference = (old_logprobs - server_logprobs) * mask
    if correction == "none":
        difference = torch.zeros_like(difference)
    if correction == "sequence":
        difference = difference.sum(dim=1, keepdim=True)  # the product of the tokens' weights
    return difference.exp().clamp(max=MAX_WEIGHT)


def grpo_loss(logprobs, batch, beta):
    """Return the loss and the ratio of each token, and which are clipped: [rows, tokens]."""
    ratio = (logprobs - batch.old_logprobs).exp()  # 1 before the first update of a step
    objective = ratio * batch.advantages
    clipped_objective = ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages
    loss = -torch.minimum(objective, clipped_objective) * batch.weights
    if beta > 0:  # KL divergence from the reference, by the estimator called k3
        difference = batch.reference_logprobs - logprobs
        loss = loss + beta * (difference.exp() - difference - 1)
    return loss, ratio.detach(), clipped_objective < objective


# --- 2. the server


def sync_weights(model, server):
    """Copy the weights of the sharded trainer to the server of this rank."""
    # full_tensor() waits until all ranks have called it. Gather all weights before any is used:
    # with a real server, a rank that sends while the others gather makes them wait, or hang.
    full_weights = {}
    for name, shard in model.named_parameters():
        full_weights[name] = shard.detach().full_tensor()
    server.load_state_dict(full_weights)  # casts to the dtype of the server


def next_token_logprobs(model, tokens):
    """Return log-probabilities in fp32, [rows, tokens, vocabulary].

    Trainer and server must both divide by the temperature. Call model(...), not model.forward(...):
    that would skip the hooks with which FSDP gathers weights and averages gradients.
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

    prompts is [rows, PROMPT_TOKENS], noise is [rows, ANSWER_TOKENS, vocabulary]. With Gumbel noise
    the argmax below is a sample from the distribution. With 0 it is the most probable token.
    """
    sequences = prompts
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=DEVICE)
    mask = []
    logprobs = []
    for position in range(ANSWER_TOKENS):
        # Computes all earlier tokens again. Real servers have a KV cache, see 09_inference.
        distribution = next_token_logprobs(server, sequences)[:, -1]  # [rows, vocabulary]
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
    noise = torch.empty(ANSWER_TOKENS, VOCABULARY).exponential_(generator=generator)
    return -noise.log().to(DEVICE)


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


# --- 5. training


def update(model, optimizer, loss):
    """Take one optimizer step. Return the norm of the gradients of all ranks."""
    # Each rank has a part of the loss, and the parts must be added up. FSDP averages gradients
    # over the ranks, so multiply by the number of ranks.
    (loss * dist.get_world_size()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor().item()


def warm_start(model, reversed_share):
    """Train the model on texts of a teacher (SFT)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2 * LEARNING_RATE)
    for step in range(SFT_STEPS):
        texts = teacher_texts(step, reversed_share)[dist.get_rank() :: dist.get_world_size()]
        logprobs = answer_logprobs(model, encode(texts))
        update(model, optimizer, -logprobs.sum() / (SFT_ROWS * ANSWER_TOKENS))


@torch.no_grad()
def make_batch(model, server, reference, step, indices, correction):
    """Sample and score GROUP answers to each prompt of this rank. indices number its prompts."""
    numbers = random.Random(f"{SEED} {step}").choices(TRAIN_NUMBERS, k=PROMPTS)
    prompts = []
    noise = []
    for index in indices:
        for answer in range(GROUP):
            prompts.append(numbers[index] + "=")
            noise.append(gumbel_noise(step, index, answer))
    sequences, mask, server_logprobs = generate(server, encode(prompts), torch.stack(noise))
    old_logprobs = answer_logprobs(model, sequences)  # of the trainer, before its updates
    rewards = rewards_of(sequences)
    return SimpleNamespace(
        sequences=sequences,  # [rows, PROMPT_TOKENS + ANSWER_TOKENS]
        mask=mask,  # False for padding after the answer, [rows, ANSWER_TOKENS]
        rewards=rewards,
        advantages=group_advantages(rewards),  # [rows, 1]
        weights=importance_weights(old_logprobs, server_logprobs, mask, correction),
        mismatch=(old_logprobs - server_logprobs).abs() * mask,
        old_logprobs=old_logprobs,
        reference_logprobs=answer_logprobs(reference, sequences),
    )


def over_ranks(numbers, operation=dist.ReduceOp.SUM):
    """Return the sum, or the maximum, of each number over all ranks."""
    result = torch.stack(numbers).detach().float()
    dist.all_reduce(result, operation)
    return result.tolist()


def accuracy(server):
    """Return the share of held-out prompts whose greedy answer is right."""
    numbers = TEST_NUMBERS[dist.get_rank() :: dist.get_world_size()]
    prompts = encode([number + "=" for number in numbers])
    noise = torch.zeros(len(numbers), ANSWER_TOKENS, VOCABULARY, device=DEVICE)
    sequences, _, _ = generate(server, prompts, noise)
    [right] = over_ranks([rewards_of(sequences).sum()])
    return right / len(TEST_NUMBERS)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stale", type=int, default=0, help="steps that the server may be behind")
    parser.add_argument("--minibatches", type=int, default=1, help="updates per step")
    parser.add_argument("--server-dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--correction", choices=("none", "token", "sequence"), default="token")
    parser.add_argument("--beta", type=float, default=0.0, help="factor of the KL divergence")
    args = parser.parse_args()
    # torchrun sets these variables for each process, called a rank. Without torchrun: one rank.
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # the system picks a port
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if PROMPTS // args.minibatches < world_size:
        parser.error(f"{PROMPTS=} is too small for {args.minibatches=} and {world_size} ranks")
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
    fully_shard(model)
    warm_start(model, reversed_share=0.3)
    server = Model().to(DEVICE, DTYPES[args.server_dtype])
    reference = Model().to(DEVICE)
    sync_weights(model, server)
    sync_weights(model, reference)
    accuracy_before = accuracy(server)
    if rank == 0:
        print(f"after SFT, held-out accuracy {accuracy_before:.3f}")
        print("step   reward  mismatch  ratio min     max  clipped       loss  grad norm")

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    largest_mismatch = 0.0
    for step in range(1, STEPS + 1):
        batches = []  # all are sampled before the first update
        for indices in torch.arange(PROMPTS).tensor_split(args.minibatches):
            mine = indices[rank::world_size].tolist()
            batches.append(make_batch(model, server, reference, step, mine, args.correction))

        for batch in batches:
            logprobs = answer_logprobs(model, batch.sequences)
            token_losses, ratio, is_clipped = grpo_loss(logprobs, batch, args.beta)
            [tokens] = over_ranks([batch.mask.sum()])  # of all ranks
            loss = (token_losses * batch.mask).sum() / tokens
            norm = update(model, optimizer, loss)

        if step % (args.stale + 1) == 0:
            sync_weights(model, server)

        # The reward is that of the step, the other columns are of its last mini-batch.
        rewards = sum(batch.rewards.sum() for batch in batches)
        clipped = (is_clipped * batch.mask).sum()
        sums = over_ranks([rewards, batch.mismatch.sum(), clipped, loss])
        rewards, mismatch, clipped, loss = sums
        ratio = ratio[batch.mask]
        extremes = over_ranks([-ratio.min(), ratio.max()], dist.ReduceOp.MAX)
        largest_mismatch = max(largest_mismatch, mismatch / tokens)
        if rank == 0:
            print(
                f"{step:4} {rewards / (PROMPTS * GROUP):8.4f} {mismatch / tokens:9.1e} "
                f"{-extremes[0]:10.4f} {extremes[1]:7.4f} {clipped / tokens:8.4f} "
                f"{loss:10.6f} {norm:10.6f}",
                flush=True,
            )

    sync_weights(model, server)
    accuracy_after = accuracy(server)
    weight_sum = sum(weight.double().sum().item() for weight in server.parameters())
    weight_sums = [None] * world_size
    dist.all_gather_object(weight_sums, weight_sum)
    assert len(set(weight_sums)) == 1, f"the servers have different weights: {weight_sums}"
    checked = [f"the servers of all ranks ({world_size}) have the same weights"]
    if args.server_dtype == "fp32" and args.stale == 0:
        assert largest_mismatch < 1e-5, f"trainer and server differ by {largest_mismatch:.1e}"
        checked.append(f"trainer and server agree: mismatch at most {largest_mismatch:.1e}")
    accuracies = f"held-out accuracy {accuracy_before:.3f} before GRPO, {accuracy_after:.3f} after"
    assert accuracy_before < 0.3, accuracies
    assert accuracy_after > 0.9, accuracies
    checked.append(accuracies)
    if rank == 0:
        for text in checked:
            print("checked:", text, flush=True)
    dist.destroy_process_group()
    os._exit(0)  # exit without interpreter shutdown, where gloo's threads can hang


if __name__ == "__main__":
    main()
