"""The shapes that estimate.py knows: our own sizes, those of model_shapes.csv, and any config.json of a family below.

A shape lists its matrices layer by layer, so that parameters are counted once and can be divided by tensor, pipeline
and expert parallel sizes. Families: Llama (with Mistral, Qwen 2 and Qwen 3), GPT-2, mixtures of experts (Mixtral,
Qwen 3, DeepSeek) and multi-head latent attention (DeepSeek 2 and 3). No torch here.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from old import shapes

TABLE = Path(__file__).with_name("model_shapes.csv")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): ranks and head sizes."""

    q_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope: int  # of a head's query and key without a position
    rope: int  # of a head's query and key with one; the key's is shared by all heads
    value: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward part."""

    number: int
    active: int  # per token
    ffn: int  # width of one
    shared_ffn: int = 0  # width of the expert that every token passes
    dense_layers: int = 0  # first layers that have none


@dataclass(frozen=True)
class Shape:
    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int
    tied: bool = False
    gpt2: bool = False  # LayerNorm and biases everywhere, two matrices instead of three, learned positions
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: int = 0  # learned positions, or the rows of the RoPE tables
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def q_width(self) -> int:
        return self.heads * (self.latent.nope + self.latent.rope if self.latent else self.head_dim)

    @property
    def value_width(self) -> int:
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def kv_width(self) -> int:
        """Keys of one token in one layer, and as many values."""
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        return self.layers - self.experts.dense_layers if self.experts else 0


def attention_matrices(shape: Shape) -> list[tuple[int, int]]:
    """(inputs, outputs) of each matrix of one layer's attention."""
    h = shape.hidden
    if not (mla := shape.latent):
        return [(h, shape.q_width), (h, shape.kv_width), (h, shape.kv_width), (shape.q_width, h)]
    query = [(h, mla.q_rank), (mla.q_rank, shape.q_width)] if mla.q_rank else [(h, shape.q_width)]
    keys_and_values = [(h, mla.kv_rank + mla.rope), (mla.kv_rank, shape.heads * (mla.nope + mla.value))]
    return [*query, *keys_and_values, (shape.value_width, h)]


def feed_forward_matrices(shape: Shape, width: int) -> list[tuple[int, int]]:
    into = [(shape.hidden, width)] * (1 if shape.gpt2 else 2)  # gate and up
    return [*into, (width, shape.hidden)]


def count(matrices: list[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def attention_parameters(shape: Shape) -> int:
    return count(attention_matrices(shape))


def vector_parameters(shape: Shape) -> int:
    """Norms and biases of one layer, those of experts excepted."""
    h = shape.hidden
    if shape.gpt2:  # two LayerNorms of 2h; biases 3h (q, k, v), h, ffn and h
        return 4 * h + 3 * h + h + shape.ffn + h
    found = 2 * h
    found += (shape.q_width + 2 * shape.kv_width) if shape.qkv_bias else 0
    found += 2 * shape.head_dim if shape.qk_norm else 0
    found += (shape.latent.q_rank + shape.latent.kv_rank) if shape.latent else 0  # a norm on each latent
    return found


def dense_parameters(shape: Shape) -> int:
    """Of all layers, what every rank of an expert-parallel group holds: everything but the routed experts."""
    per_layer = attention_parameters(shape) + vector_parameters(shape)
    dense = count(feed_forward_matrices(shape, shape.ffn)) * (shape.layers - shape.expert_layers)
    found = per_layer * shape.layers + dense
    if e := shape.experts:
        router = shape.hidden * e.number
        found += shape.expert_layers * (router + count(feed_forward_matrices(shape, e.shared_ffn)))
    return found


def expert_parameters(shape: Shape, *, active: bool = False) -> int:
    """Of all layers, the routed experts: all, or those that one token passes."""
    if not (e := shape.experts):
        return 0
    number = e.active if active else e.number
    return shape.expert_layers * number * count(feed_forward_matrices(shape, e.ffn))


def embedding_parameters(shape: Shape) -> int:
    """The matrix of token embeddings, without the output head."""
    return shape.vocab * shape.hidden


def head_parameters(shape: Shape) -> int:
    """The output head's own matrix: none where it is the embedding's."""
    return 0 if shape.tied else shape.vocab * shape.hidden


def learned_positions(shape: Shape) -> int:
    return shape.positions * shape.hidden if shape.gpt2 else 0


def parameter_count(shape: Shape, *, active: bool = False) -> int:
    """Every number that the model learns; tied embeddings count once. active: of the experts those of one token."""
    final_norm = 2 * shape.hidden if shape.gpt2 else shape.hidden
    outside = embedding_parameters(shape) + head_parameters(shape) + learned_positions(shape) + final_norm
    return outside + dense_parameters(shape) + expert_parameters(shape, active=active)


def largest_layer(shape: Shape) -> int:
    """Parameters of the largest layer: what is gathered at once where layers are sharded."""
    attention = attention_parameters(shape) + vector_parameters(shape)
    feed_forward = [count(feed_forward_matrices(shape, shape.ffn))]
    if e := shape.experts:
        widths = [e.ffn] * e.number + [e.shared_ffn]
        feed_forward.append(
            sum(count(feed_forward_matrices(shape, width)) for width in widths) + shape.hidden * e.number
        )
    dense_is_there = not shape.experts or shape.experts.dense_layers
    return attention + (max(feed_forward) if dense_is_there else feed_forward[-1])


def read_table(file: Path = TABLE) -> dict[str, Shape]:
    """The published shapes of a model_shapes.csv, by name."""
    found = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            sizes = {
                key: int(row[key]) for key in ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn", "head_dim")
            }
            mixture = row["family"].startswith("llama-moe")
            words = row["family"].replace(",", " ").split()
            found[row["model"]] = Shape(
                name=row["model"],
                **sizes,
                tied=row["tied_embeddings"] == "1",
                gpt2=row["family"] == "gpt2",
                qkv_bias=row["qkv_bias"] == "1",
                positions=int(row["positions"] or 0),
                experts=Experts(int(words[1]), int(words[3]), sizes["ffn"]) if mixture else None,
            )
    return found


def from_config(name: str, c: shapes.Config) -> Shape:
    """A shape of common/shapes.py."""
    return Shape(
        name=name,
        vocab=c.vocab_size,
        hidden=c.hidden_size,
        layers=c.num_hidden_layers,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        ffn=c.intermediate_size,
        head_dim=c.head_dim,
        tied=c.tie_word_embeddings,
        positions=c.max_position_embeddings,
    )
