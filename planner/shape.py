"""The shape of a model: its matrices, parameters and FLOPs per token.

It covers what lm/model.py trains, and what it does not: experts that every token passes, and
multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from dataclasses import dataclass
from math import prod

from lm.shapes import Config


@dataclass(frozen=True)
class Shape:
    """The sizes that determine a model's bytes and FLOPs."""

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int  # width of the MLP
    head_dim: int
    tied: bool = False  # the head is the embedding's matrix
    positions: int = 0  # rows of the RoPE tables; 0: no limit known
    qkv_bias: bool = False
    qk_norm: bool = False

    # A mixture of experts in place of the MLP.
    experts: int = 0
    active_experts: int = 0  # per token
    expert_ffn: int = 0  # width of one expert
    shared_ffn: int = 0  # width of the expert that every token passes
    dense_layers: int = 0  # the first layers, which have no experts

    # Multi-head latent attention, if kv_rank is not 0.
    q_rank: int = 0  # 0: queries are projected directly
    kv_rank: int = 0
    nope: int = 0  # the part of a head's query and key without a position
    rope: int = 0  # the part with a position; all heads share the key's
    value_dim: int = 0

    @property
    def q_width(self) -> int:
        """Numbers of a token's queries, all heads together."""
        if self.kv_rank:
            return self.heads * (self.nope + self.rope)
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Numbers of a token's attention output, all heads together."""
        if self.kv_rank:
            return self.heads * self.value_dim
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        if not self.experts:
            return 0
        return self.layers - self.dense_layers

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of a head that is not tied to it."""
        return self.vocab * self.hidden

    def active_ffn(self, experts: bool) -> int:
        """Return the MLP width that a token passes, in a layer with experts or without."""
        if not experts:
            return self.ffn
        return self.active_experts * self.expert_ffn + self.shared_ffn

    def attention_matrices(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of each matrix of a layer's attention. The last is o_proj."""
        hidden = self.hidden
        if not self.kv_rank:
            query = (hidden, self.q_width)
            key = (hidden, self.kv_width)
            value = (hidden, self.kv_width)
            output = (self.q_width, hidden)
            return [query, key, value, output]

        matrices = []
        if self.q_rank:
            matrices += [(hidden, self.q_rank), (self.q_rank, self.q_width)]
        else:
            matrices += [(hidden, self.q_width)]
        matrices += [
            (hidden, self.kv_rank + self.rope),
            (self.kv_rank, self.heads * (self.nope + self.value_dim)),
            (self.value_width, hidden),
        ]
        return matrices

    def feed_forward_matrices(self, width: int) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of gate, up and down of an MLP of this width."""
        return [(self.hidden, width), (self.hidden, width), (width, self.hidden)]

    def bias_parameters(self) -> int:
        """Return how many numbers the biases of q, k and v have in one layer."""
        if not self.qkv_bias:
            return 0
        return self.q_width + 2 * self.kv_width

    def norm_parameters(self) -> int:
        """Return how many numbers the norms of one layer have.

        There are two of the hidden size, with qk_norm also one for the heads' queries and one for
        their keys. Latent attention also normalizes each latent.
        """
        parameters = 2 * self.hidden + self.q_rank + self.kv_rank
        if self.qk_norm:
            parameters += 2 * self.head_dim
        return parameters

    def vector_parameters(self) -> int:
        """Return how many numbers of one layer are in vectors: norms and biases."""
        return self.norm_parameters() + self.bias_parameters()

    def layer_parameters(self, *, experts: bool, active: bool = False) -> tuple[int, int]:
        """Return the parameters of one layer, as (those outside the routed experts, in them).

        active: of the routed experts count only those that one token passes.
        """
        parameters = count(self.attention_matrices()) + self.vector_parameters()
        if not experts:
            return parameters + count(self.feed_forward_matrices(self.ffn)), 0

        router = self.hidden * self.experts
        shared = count(self.feed_forward_matrices(self.shared_ffn))
        number = self.active_experts if active else self.experts
        routed = number * count(self.feed_forward_matrices(self.expert_ffn))
        return parameters + router + shared, routed

    def parameter_count(self, *, active: bool = False) -> int:
        """Return the number of parameters. A tied embedding counts once.

        active: of the routed experts count only those that one token passes.
        """
        dense = sum(self.layer_parameters(experts=False))
        mixture = sum(self.layer_parameters(experts=True, active=active))
        blocks = dense * (self.layers - self.expert_layers) + mixture * self.expert_layers
        embeddings = self.embedding if self.tied else 2 * self.embedding
        final_norm = self.hidden
        return blocks + embeddings + final_norm

    def flops_per_token(self, *, seq_len: int, causal: bool = False) -> float:
        """Return the FLOPs of training on one token: 6 N + 12 L heads head_dim seq_len.

        lm/shapes.py derives the formula (Chowdhery et al. 2022, appendix B). N leaves out an
        embedding that is only looked up, and has the experts of one token. With causal=True,
        attention counts half, because the mask hides half of it.
        """
        parameters = self.parameter_count(active=True)
        if not self.tied:
            parameters -= self.embedding
        attention: float = 6 * self.layers * (self.q_width + self.value_width) * seq_len
        if causal:
            attention /= 2
        return 6 * parameters + attention


def count(matrices: list[tuple[int, int]]) -> int:
    """Return the parameters of matrices, given as (inputs, outputs)."""
    return sum(map(prod, matrices))


def from_config(name: str, config: Config) -> Shape:
    """Return the shape of a model that lm/model.py implements."""
    experts = {}
    if config.experts is not None:
        experts = {
            "experts": config.experts.num_experts,
            "active_experts": config.experts.num_experts_per_tok,
            "expert_ffn": config.experts.moe_intermediate_size,
            "dense_layers": len(config.experts.dense_layers),
        }
    return Shape(
        name=name,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        ffn=config.intermediate_size,
        head_dim=config.head_dim,
        tied=config.tie_word_embeddings,
        positions=config.max_position_embeddings,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        **experts,
    )
