"""Random checkpoints of a Qwen3 shape for benchmarks of memory: as large as asked for, written in a second.

`memory_speed` and `memory_disturb` make theirs with it. bf16 weights in one safetensors file, with a small real
tokenizer beside it. What such a model says is noise; how long its bytes take to move is not.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

_BLOCK_VALUES: Final = 1 << 22
_VOCAB: Final = 512
_TEMPLATE: Final = "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


class Shape(NamedTuple):
    """What decides a model's size: bytes grow with layers, and with the square of hidden."""

    hidden: int
    layers: int
    head_dim: int = 64

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
            "vocab_size": _VOCAB, "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.hidden // self.head_dim,
            "num_key_value_heads": max(self.hidden // self.head_dim // 2, 1), "head_dim": self.head_dim,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
            "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 2, "attention_bias": False,
        }  # fmt: skip

    def tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, wide = self.hidden, 3 * self.hidden
        keys = max(hidden // self.head_dim // 2, 1) * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
            "self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
        }  # fmt: skip
        found = {"model.embed_tokens.weight": (_VOCAB, hidden), "model.norm.weight": (hidden,)}
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
        return found


def shape_of(size_bytes: int) -> Shape:
    """The shape whose weights come next to size_bytes. Example: 100 MB is 768 wide with 7 layers."""
    hidden = 768 if size_bytes < 400e6 else 1536
    layer_bytes = 2 * 12 * hidden * hidden
    return Shape(hidden, max(1, round((size_bytes - 2 * _VOCAB * hidden) / layer_bytes)))


def write(folder: Path, shape: Shape, seed: int = 0, scale: float = 0.02) -> Path:
    """The checkpoint's folder. scale is the weights' deviation: what a model of small ones says repeats itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    _write_tokenizer(folder)
    header: dict[str, object] = {}
    at = 0
    sizes = shape.tensors()
    for name, size in sizes.items():
        count = 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, at + count]}
        at += count
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    # The same values over and over from another start: fresh ones for a gigabyte would take ten seconds.
    noise = np.random.default_rng(seed).standard_normal(_BLOCK_VALUES, np.float32) * np.float32(scale)
    block = (noise.view(np.uint32) >> 16).astype(np.uint16)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for number, size in enumerate(sizes.values()):
            left, start = int(np.prod(size)), number * 977 % _BLOCK_VALUES
            while left:
                part = block[start : start + left]
                file.write(part.tobytes())
                left, start = left - len(part), 0
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["memory moves by the page " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}')
