"""The shape of a model: its matrices, parameters and FLOPs per token; Llama-like, with experts or latent attention."""

from dataclasses import dataclass
from math import prod

from lm.shapes import Config


def count(matrices: list[tuple[int, int]]) -> int:  # of (inputs, outputs)
    return sum(map(prod, matrices))


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
    # a mixture of experts in place of the feed-forward part
    experts: int = 0
    active_experts: int = 0  # per token
    expert_ffn: int = 0  # width of one
    shared_ffn: int = 0  # width of the expert that every token passes
    dense_layers: int = 0  # first layers, which have no experts
    # multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1); kv_rank 0: none
    q_rank: int = 0  # 0: queries are projected directly
    kv_rank: int = 0
    nope: int = 0  # of a head's query and key, the part without a position
    rope: int = 0  # and the part with one; all heads share the key's
    value_dim: int = 0

    @property
    def q_width(self) -> int:
        return self.heads * (self.nope + self.rope if self.kv_rank else self.head_dim)

    @property
    def value_width(self) -> int:
        return self.heads * (self.value_dim if self.kv_rank else self.head_dim)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding(self) -> int:  # parameters, as of an output head of its own
        return self.vocab * self.hidden

    def active_ffn(self, experts: bool) -> int:  # width of what a token passes
        return self.active_experts * self.expert_ffn + self.shared_ffn if experts else self.ffn

    def attention_matrices(self) -> list[tuple[int, int]]:
        h = self.hidden
        if not self.kv_rank:
            return [(h, self.q_width), (h, self.kv_width), (h, self.kv_width), (self.q_width, h)]
        query = (
            [(h, self.q_rank), (self.q_rank, self.q_width)] if self.q_rank else [(h, self.q_width)]
        )
        keys_and_values = [
            (h, self.kv_rank + self.rope),
            (self.kv_rank, self.heads * (self.nope + self.value_dim)),
        ]
        return [*query, *keys_and_values, (self.value_width, h)]

    def feed_forward_matrices(self, width: int) -> list[tuple[int, int]]:
        # gate, up and down
        return [(self.hidden, width), (self.hidden, width), (width, self.hidden)]

    def bias_parameters(self) -> int:
        """Return how many numbers the biases of q, k and v have in one layer."""
        return self.q_width + 2 * self.kv_width if self.qkv_bias else 0

    def norm_parameters(self) -> int:
        """Return how many numbers one layer's norms have. Latent attention normalizes each latent."""
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        return 2 * self.hidden + head_norms + self.q_rank + self.kv_rank

    def vector_parameters(self) -> int:
        return self.norm_parameters() + self.bias_parameters()

    def layer_parameters(self, *, experts: bool, active: bool = False) -> tuple[int, int]:
        """Parameters of one layer without its routed experts, and of those: all, or the active ones."""
        found = count(self.attention_matrices()) + self.vector_parameters()
        if not experts:
            return found + count(self.feed_forward_matrices(self.ffn)), 0
        # router, shared
        found += self.hidden * self.experts + count(self.feed_forward_matrices(self.shared_ffn))
        number = self.active_experts if active else self.experts
        return found, number * count(self.feed_forward_matrices(self.expert_ffn))

    def parameter_count(self, *, active: bool = False) -> int:
        """Every number that the model learns, tied embeddings once. active: of experts those that one token passes."""
        found = self.embedding * (1 if self.tied else 2) + self.hidden
        found += sum(self.layer_parameters(experts=False)) * (self.layers - self.expert_layers)
        return found + sum(self.layer_parameters(experts=True, active=active)) * self.expert_layers

    def largest_layer(self) -> int:
        """Parameters of the largest layer: what is gathered at once where layers are sharded."""
        kinds = {layer >= self.layers - self.expert_layers for layer in range(self.layers)}
        return max(sum(self.layer_parameters(experts=experts)) for experts in kinds)

    def flops_per_token(self, *, seq_len: int, causal: bool = False) -> float:
        """6 N + 12 L heads head_dim seq_len (Chowdhery et al. 2022, appendix B): 2 per weight forward, 4 backward. N is
        without an embedding that is only looked up, and has one token's experts. causal: half of the attention."""
        n = self.parameter_count(active=True) - (0 if self.tied else self.embedding)
        return 6 * n + 6 * self.layers * (self.q_width + self.value_width) * seq_len / (
            2 if causal else 1
        )


def from_config(name: str, c: Config) -> Shape:
    sizes = (
        c.vocab_size,
        c.hidden_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
    )
    more = (c.head_dim, c.tie_word_embeddings, c.max_position_embeddings, c.qkv_bias, c.qk_norm)
    return Shape(name, *sizes, c.intermediate_size, *more)
