"""The shape of a model: its matrices, parameters and FLOPs per token; Llama-like, with experts or latent attention."""

from dataclasses import dataclass
from math import prod

from common.shapes import Config

Matrix = tuple[int, int]  # inputs, outputs


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): ranks and head sizes."""

    q_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope: int  # of a head's query and key, the part without a position
    rope: int  # and the part with one; all heads share the key's
    value: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward part."""

    number: int
    active: int  # per token
    ffn: int  # width of one
    shared_ffn: int = 0  # width of the expert that every token passes
    dense_layers: int = 0  # first layers, which have no experts


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
    positions: int = 0  # rows of the RoPE tables; 0: no limit known
    qkv_bias: bool = False
    qk_norm: bool = False
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
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding, and of an output head of its own."""
        return self.vocab * self.hidden

    def active_ffn(self, experts: bool) -> int:
        """Width of what a token passes in a feed-forward part, or in experts."""
        return self.experts.active * self.experts.ffn + self.experts.shared_ffn if experts else self.ffn


def attention_matrices(shape: Shape) -> list[Matrix]:
    h = shape.hidden
    if not (mla := shape.latent):
        return [(h, shape.q_width), (h, shape.kv_width), (h, shape.kv_width), (shape.q_width, h)]
    query = [(h, mla.q_rank), (mla.q_rank, shape.q_width)] if mla.q_rank else [(h, shape.q_width)]
    keys_and_values = [(h, mla.kv_rank + mla.rope), (mla.kv_rank, shape.heads * (mla.nope + mla.value))]
    return [*query, *keys_and_values, (shape.value_width, h)]


def feed_forward_matrices(shape: Shape, width: int) -> list[Matrix]:
    """Gate, up and down."""
    return [(shape.hidden, width), (shape.hidden, width), (width, shape.hidden)]


def count(matrices: list[Matrix]) -> int:
    return sum(map(prod, matrices))


def vector_parameters(shape: Shape) -> int:
    """Norms and biases of one layer; latent attention has a norm on each latent."""
    biases = (shape.q_width + 2 * shape.kv_width) * shape.qkv_bias
    latent_norms = shape.latent.q_rank + shape.latent.kv_rank if shape.latent else 0
    return 2 * shape.hidden + biases + 2 * shape.head_dim * shape.qk_norm + latent_norms


def layer_parameters(shape: Shape, *, experts: bool, active: bool = False) -> tuple[int, int]:
    """Parameters of one layer without its routed experts, and of those: all, or the active ones."""
    found = count(attention_matrices(shape)) + vector_parameters(shape)
    if not experts:
        return found + count(feed_forward_matrices(shape, shape.ffn)), 0
    mixture = shape.experts
    found += shape.hidden * mixture.number + count(feed_forward_matrices(shape, mixture.shared_ffn))
    return found, (mixture.active if active else mixture.number) * count(feed_forward_matrices(shape, mixture.ffn))


def parameter_count(shape: Shape, *, active: bool = False) -> int:
    """Every number that the model learns, tied embeddings once. active: of the experts those that one token passes."""
    found = shape.embedding * (1 if shape.tied else 2) + shape.hidden
    found += sum(layer_parameters(shape, experts=False)) * (shape.layers - shape.expert_layers)
    if shape.expert_layers:
        found += sum(layer_parameters(shape, experts=True, active=active)) * shape.expert_layers
    return found


def largest_layer(shape: Shape) -> int:
    """Parameters of the largest layer: what is gathered at once where layers are sharded."""
    kinds = {layer >= shape.layers - shape.expert_layers for layer in range(shape.layers)}
    return max(sum(layer_parameters(shape, experts=experts)) for experts in kinds)


def flops_per_token(shape: Shape, *, seq_len: int, causal: bool = False) -> float:
    """6 N + 12 L heads head_dim seq_len (Chowdhery et al. 2022, appendix B): 2 per weight forward, 4 backward. N without
    an embedding that is only looked up; of a mixture, the experts of one token. causal: half the attention."""
    n = parameter_count(shape, active=True) - (0 if shape.tied else shape.embedding)
    attention = 6 * shape.layers * (shape.q_width + shape.value_width) * seq_len
    return 6 * n + attention / (2 if causal else 1)


def from_config(name: str, c: Config) -> Shape:
    sizes = (c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads)
    return Shape(name, *sizes, c.intermediate_size, c.head_dim, c.tie_word_embeddings, c.max_position_embeddings)
