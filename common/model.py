"""A decoder-only transformer with names and arithmetic of transformers' Llama, Mistral, Qwen2 and Qwen3 (RMSNorm,
rotary embedding, grouped queries, SwiGLU): their checkpoints load here, and ours there, as they are. Its optimizer."""

import hashlib
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from common.exits import UserError
from common.runtime import gather, say
from common.shapes import SIZES, Config

ROWS = 256  # of a random matrix that share a generator


def rope_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation at each position, as rotate takes them: [length, head_dim], fp32 (Su et al. 2021,
    section 3.2). With rope_scaling, long wavelengths are stretched as in Llama 3.1."""
    even = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** -(even / config.head_dim)
    if (scaling := config.rope_scaling) is not None:
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / scaling["factor"]
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return torch.cat((angle.cos(), angle.cos()), dim=-1), torch.cat(
        (-angle.sin(), angle.sin()), dim=-1
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (a, b) = (x[i], x[i + head_dim / 2]) by its position's angle: (a cos - b sin, b cos + a sin).
    x: [batch, length, heads, head_dim]; cos and sin: [length, 1, head_dim], or a row per sequence of the batch."""
    exact = x.float()
    swapped = exact.roll(x.shape[-1] // 2, dims=-1)  # (b, a), and the first half of sin is negative
    return torch.addcmul(exact * cos, swapped, sin).to(x.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None = None,
    *,
    is_causal=False,
    enable_gqa=False,
) -> Tensor:
    """torch's, `seen` [queries, keys] or [batch, 1, queries, keys]. CUDA's kernels that do not hold all scores refuse
    grouped heads in fp32 and with a mask: there each group becomes a sequence of its own."""
    if not enable_gqa or (seen is None and not (q.is_cuda and q.dtype == torch.float32)):
        return F.scaled_dot_product_attention(
            q, k, v, seen, is_causal=is_causal, enable_gqa=enable_gqa
        )
    groups = k.shape[1]
    # [batch x groups, query heads of a group, tokens, head_dim]
    q = q.unflatten(1, (groups, -1)).flatten(0, 1)
    k, v = (part.flatten(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for part in (k, v))
    seen = (
        seen
        if seen is None or seen.ndim == 2
        else seen.expand(-1, groups, -1, -1).flatten(0, 1)[:, None]
    )
    y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=is_causal)
    return y.unflatten(0, (-1, groups)).flatten(1, 2)


def random_weight(
    name: str, shape: tuple[int, ...], seed: int, first: int = 0, last: int | None = None
) -> Tensor:
    """The initial value of a parameter of this shape, or its rows from `first` to before `last`: a function of (seed,
    name, row) alone, drawn on all cores. ROWS rows share a generator, so a rank draws little but what it holds."""
    last = shape[0] if last is None else last
    if len(shape) < 2:
        return torch.full((last - first,), 0.0 if name.endswith(".bias") else 1.0)  # of norms
    rows = torch.empty(last - first, *shape[1:], device="cpu")

    def draw(start: int) -> None:
        key = hashlib.sha256(f"{seed} {name} {start}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
        block = torch.empty(min(ROWS, shape[0] - start), *shape[1:], device="cpu").normal_(
            0, 0.02, generator=generator
        )
        rows[max(start - first, 0) : start - first + ROWS] = block[
            max(first - start, 0) : last - start
        ]

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # torch itself draws in one
        list(pool.map(draw, range(first // ROWS * ROWS, last, ROWS)))
    return rows


def part_of(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this rank holds of a parameter, and where it lies in the whole: all of it, or a part of a DTensor."""
    if not hasattr(parameter, "placements"):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    # 1 s, not for unsharded training
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    place = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(
        slice(first, first + size) for size, first in zip(*place, strict=True)
    )


class RMSNorm(nn.RMSNorm):
    """Normalised in fp32; under autocast the result is rounded once, not again by each matmul that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        y, device = super().forward(x), x.device.type
        return y.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else y


class Attention(nn.Module):
    attend = staticmethod(attend)  # context parallelism puts another in its place

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.grouped = c.num_key_value_heads != c.num_attention_heads
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, extend: Callable | None = None, seen=None
    ) -> Tensor:
        """`extend` gives keys and values with those of past tokens before them; `seen` says who may look at which."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [batch, tokens, heads, head_dim]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = rotate(self.q_norm(q), cos, sin)  # before the transpose, which would cost a copy
        k = rotate(self.k_norm(k), cos, sin)
        q = q.transpose(1, 2)  # [batch, heads, tokens, head_dim]
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        k, v = (k, v) if extend is None else extend(k, v)
        y = self.attend(q, k, v, seen, is_causal=seen is None, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *past) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, *past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        # by name, not by place: layer 7 is called 7 also where a pipeline stage holds only some
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.num_hidden_layers)})
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self._fill_rope_tables()

    def _fill_rope_tables(self) -> None:
        cos, sin = rope_tables(
            self.config, self.config.max_position_embeddings, next(self.parameters()).device
        )
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        # to_empty() leaves them unset, and .to(bfloat16) would round the angles
        self._fill_rope_tables()
        return self

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, cache=None) -> Tensor:
        """Hidden states [batch, length, hidden]; `positions` [batch, length] are 0, 1, 2, ... if not given, but a cache
        needs them. A pipeline stage has None for what it lacks, and takes the hidden states of the stage before."""
        x = input_ids if self.embed_tokens is None else self.embed_tokens(input_ids)
        # loaded, not computed here: a compiler would compute the angles again in every kernel that reads them
        rows = slice(input_ids.shape[1]) if positions is None else positions
        # to(x.device): with weights offloaded to the CPU, the tables are there too
        cos, sin = (
            table[rows].unsqueeze(-2).to(x.device) for table in (self.rope_cos, self.rope_sin)
        )
        seen = None if cache is None else cache.visible(positions)
        for name, layer in self.layers.items():
            past = () if cache is None else (cache.extend(name, positions), seen)
            x = layer(x, cos, sin, *past)
        return x if self.norm is None else self.norm(x)


class Transformer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if (
            self.config.tie_word_embeddings
            and self.lm_head is not None
            and self.model.embed_tokens is not None
        ):
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Every weight is a function of (seed, name, row): whole, sharded or cut into stages, the start is the same."""
        for name, parameter in self.named_parameters():
            held, (rows, *others) = part_of(parameter)
            weight = random_weight(name, parameter.shape, seed, rows.start, rows.stop)
            held.copy_(weight[(slice(None), *others)])

    def forward(
        self, input_ids, targets: Tensor | None = None, positions=None, cache=None, reduction="mean"
    ) -> Tensor:
        """Logits [batch, length, vocab]; given targets [batch, length], their mean cross-entropy in nats, or its "sum":
        without those of -100, and the mean is NaN if no other is there. positions and cache as in Decoder."""
        hidden = self.model(input_ids, positions, cache)
        if self.lm_head is None:
            return hidden
        return self.lm_head(hidden) if targets is None else self.loss(hidden, targets, reduction)

    def loss(self, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        # no name for the 16-bit logits: they would live until the loss is there
        return F.cross_entropy(
            self.lm_head(hidden).flatten(0, 1).float(), targets.flatten(), reduction=reduction
        )


def checkpoint_blocks(net: Transformer, how: str) -> None:
    """What backward computes again: none; full: all but a block's input; selective: all but attention and matmuls, too.
    Call it before compile and fully_shard."""
    for block in net.model.layers.values() if how != "none" else ():
        # down_proj's, or that of its adapter
        last = tuple([*block.mlp.parameters()][-1].shape[::-1])
        context = {"context_fn": partial(selective_contexts, last)} if how == "selective" else {}
        again = partial(checkpoint, block.forward, use_reentrant=False, **context)
        # of Python: compile finds no frame in a partial
        block.forward = lambda *args, again=again: again(*args)


def selective_contexts(last: tuple[int, int]) -> tuple:
    """For torch's checkpoint, which calls it at each forward: keep what attention and matmuls gave, compute the rest
    again. That of the last matmul, known by its [in, out], is not kept: no backward reads it."""

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        attention = operator.name().startswith("aten::_scaled_dot_product_")  # by whatever kernel
        # addmm has a bias
        matmul = operator.name() in ("aten::mm", "aten::addmm") and args[-1].shape != last
        return (
            CheckpointPolicy.MUST_SAVE if attention or matmul else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def build(
    name: str, config: Config, *, seed: int, device: torch.device | str = "cpu"
) -> Transformer:
    """The model on `device`: weights of the folder `name`, or random, the same on any device; on "meta" no numbers."""
    with torch.device("meta"):
        net = Transformer(config)
    return net if str(device) == "meta" else materialize(net, name, seed=seed, device=device)


def materialize(
    net: Transformer, name: str, *, seed: int, device: torch.device | str
) -> Transformer:
    """Give a model from the meta device, whole or sharded, its memory on `device` and its weights, as build does."""
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    if name in SIZES or not load_weights(net, Path(name)):
        net.init_weights(seed)
    return net


def load_weights(net: Transformer, folder: Path) -> bool:
    """Read the weights from the .safetensors files in `folder`, of a sharded model each rank its part alone. False if
    there are none; UserError for a file that cannot be read, a name or a shape that does not fit."""
    if not any(folder.glob("*.safetensors*")):
        for file in folder.glob("*"):
            if file.suffix in (".bin", ".pt", ".pth", ".distcp"):
                raise UserError(
                    f"--model {folder}: {file.name} is not .safetensors: save the weights as such"
                )
        return False
    import torch.distributed.checkpoint as dcp  # 0.6 s that random weights need not wait for
    from safetensors import SafetensorError

    say(f"weights from the .safetensors files in {folder}")
    of_all_stages = build("", net.config, seed=0, device="meta").named_parameters()
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        stored = {
            name: tuple(entry.size)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        }
        # computed
        stored = {
            name: size for name, size in stored.items() if not name.endswith("rotary_emb.inv_freq")
        }
        needed = {name: tuple(weight.shape) for name, weight in of_all_stages}
        if net.config.tie_word_embeddings:
            stored.pop("lm_head.weight", None)
        for name, _ in sorted(stored.items() ^ needed.items()):
            there = f"{stored.get(name, 'missing')} in its files and {needed.get(name, 'missing')} in the model"
            raise UserError(f"--model {folder}: {name} is {there}")
        with warnings.catch_warnings(action="ignore"):  # no_dist: no rank waits for another
            # no adapters
            mine = {name: weight for name, weight in net.named_parameters() if name in needed}
            dcp.load(mine, storage_reader=reader, no_dist=True)
    except (SafetensorError, dcp.api.CheckpointException) as error:
        raise UserError(
            f"--model {folder}: a file is truncated or damaged, download it again ({error})"
        ) from None
    return True


def hash_rows(name: str, rows: Tensor, first: int = 0) -> int:
    """The sum of the SHA-256 of each row, the first of which has this number: parts of a matrix add up to the whole."""
    content = (
        rows.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(len(rows), -1)
        if len(rows)
        else ()
    )
    hashes = (
        hashlib.sha256(f"{name} {i} ".encode() + row.tobytes())
        for i, row in enumerate(content, first)
    )
    return sum(int.from_bytes(each.digest()) for each in hashes)


@torch.no_grad()
def digest(net: nn.Module) -> str:
    """A hash of every parameter: equal digests are equal weights, to the bit, however they are sharded. A rank hashes
    the rows that it holds, so every rank must call this; ranks whose copies differ get different digests."""
    hashes = {}
    for name, parameter in net.named_parameters():
        if placements := getattr(parameter, "placements", ()):
            from torch.distributed.tensor import Replicate

            # then whole rows, of the same matrix
            if any(place.is_shard(1) for place in placements):
                parameter = parameter.redistribute(
                    placements=[Replicate() if p.is_shard(1) else p for p in placements]
                )
        held, (rows, *_) = part_of(parameter)
        hashes[name, rows.start] = hash_rows(name, held, rows.start)
    if placements:
        for theirs in gather(hashes):
            hashes = theirs | hashes  # its own, where two hold the same
    return f"{sum(hashes.values()) % 2**256:064x}"


def adamw_cosine(
    net: nn.Module, *, lr: float, weight_decay: float, warmup_steps: int, steps: int
) -> tuple:
    """The optimizer and its schedule; call scheduler.step() after each optimizer step. `lr` is the peak."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    # norms: decay would shrink them
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": p, "weight_decay": d} for p, d in ((matrices, weight_decay), (vectors, 0.0)) if p
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    return optimizer, LambdaLR(
        optimizer, partial(warmup_cosine, warmup_steps=warmup_steps, steps=steps)
    )


def warmup_cosine(step: int, warmup_steps: int, steps: int) -> float:
    """Factor on the peak learning rate for 0-based `step`: up in a line, down to a tenth along a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.55 + 0.45 * math.cos(math.pi * done)
