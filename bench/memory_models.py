"""Small Llamas of a chosen shape: `synthetic` writes their checkpoints, the memory benches serve them.

What a shape takes in pages of weights is the server's to say; here stands only what its KV cache takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

from . import synthetic


class Shape(NamedTuple):
    """A decoder's dimensions; the embedding is tied. Its KV cache is bf16, as its weights are."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    context: int = 1024
    vocab: int = 320

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def page_tokens(self, page_bytes: int) -> int:
        """Tokens of KV cache that a page holds, all layers of them."""
        return page_bytes // self.token_bytes

    def kv_pages(self, tokens: int, page_bytes: int) -> int:
        """Pages of a sequence of so many tokens."""
        return -(-tokens // self.page_tokens(page_bytes))

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "max_position_embeddings": self.context, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 0,
            "eos_token_id": 2,
        }  # fmt: skip

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and sizes, as checkpoints of the family have them."""
        hidden, mlp = self.hidden, self.mlp
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }  # fmt: skip
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
        return {**found, "model.norm.weight": (hidden,)}


def write_model(folder: Path, shape: Shape, seed: int, scale: float = 0.02) -> Path:
    """A Hugging Face folder; the same bytes for the same seed."""
    return synthetic.write(folder, cast(Any, shape), seed, scale)
