"""A small valid checkpoint in both formats, as plain values that a case can change before they become bytes.

The files are written here by hand, apart from the code that reads them. `TENSORS` has the same numbers in both formats
but for q and k, whose rows GGUF keeps in another order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 32, 2, 1, 16, 64, 40

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FFN, "vocab_size": VOCAB,
    "num_hidden_layers": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip

# Hugging Face name, GGUF name, shape.
TENSORS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("model.embed_tokens.weight", "token_embd.weight", (VOCAB, HIDDEN)),
    ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight", (HIDDEN,)),
    ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", (HEADS * HEAD_DIM, HIDDEN)),
    ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
    ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
    ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight", (HIDDEN, HEADS * HEAD_DIM)),
    ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight", (HIDDEN,)),
    ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight", (FFN, HIDDEN)),
    ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight", (FFN, HIDDEN)),
    ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", (HIDDEN, FFN)),
    ("model.norm.weight", "output_norm.weight", (HIDDEN,)),
    ("lm_head.weight", "output.weight", (VOCAB, HIDDEN)),
)

# GGUF's numbers for value types.
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(8)), "▁", *"abcdefghijklmnopqrstuvwxyz", "ab",
          "abc"]  # fmt: skip

# (key, type, value); an array's value is (type, items).
METADATA: tuple[tuple[str, int, Any], ...] = (
    ("general.architecture", STRING, "llama"),
    ("general.alignment", U32, 32),
    ("llama.context_length", U32, 128),
    ("llama.embedding_length", U32, HIDDEN),
    ("llama.block_count", U32, 1),
    ("llama.feed_forward_length", U32, FFN),
    ("llama.attention.head_count", U32, HEADS),
    ("llama.attention.head_count_kv", U32, KV_HEADS),
    ("llama.attention.key_length", U32, HEAD_DIM),
    ("llama.attention.value_length", U32, HEAD_DIM),
    ("llama.rope.freq_base", F32, 10000.0),
    ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
    ("llama.vocab_size", U32, VOCAB),
    ("tokenizer.ggml.model", STRING, "llama"),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, TOKENS)),
    ("tokenizer.ggml.scores", ARRAY, (F32, [-float(i) for i in range(VOCAB)])),
    ("tokenizer.ggml.token_type", ARRAY, (I32, [2, 3, 3, *([6] * 8), *([1] * (VOCAB - 11))])),
    ("tokenizer.ggml.bos_token_id", U32, 1),
    ("tokenizer.ggml.eos_token_id", U32, 2),
    ("tokenizer.chat_template", STRING, "{% for m in messages %}{{ m.content }}{% endfor %}"),
)
# The same vocabulary with the keys of the byte-level kind instead.
BYTE_LEVEL: tuple[tuple[str, int, Any], ...] = (
    *((key, kind, value) for key, kind, value in METADATA if key not in ("tokenizer.ggml.model",
    "tokenizer.ggml.scores")),
    ("tokenizer.ggml.model", STRING, "gpt2"),
    ("tokenizer.ggml.pre", STRING, "default"),
    ("tokenizer.ggml.merges", ARRAY, (STRING, ["a b", "ab c"])),
)  # fmt: skip


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 numbers of a tensor, told by its name alone."""
    rng = np.random.default_rng(sum(name.encode()))
    return rng.normal(1.0 if "norm" in name else 0.0, 0.1, shape).astype(np.float32)


def scalar(kind: int, value: Any) -> bytes:
    if kind == STRING:
        raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(raw)) + raw
    return struct.pack("<" + CODES[kind], value)


def metadata_entry(key: str, kind: int, value: Any) -> bytes:
    if kind != ARRAY:
        return scalar(STRING, key) + struct.pack("<I", kind) + scalar(kind, value)
    item, items = value
    return scalar(STRING, key) + struct.pack("<IIQ", ARRAY, item, len(items)) + b"".join(scalar(item, v) for v in items)


def tensor_line(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return scalar(STRING, name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(metadata: Sequence[tuple[str, int, Any]], lines: Sequence[tuple[str, Sequence[int], int, int]],
               data: bytes, version: int = 3) -> tuple[bytes, int]:  # fmt: skip
    """A GGUF file, and how many of its bytes are its header."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(lines), len(metadata))
    head += b"".join(metadata_entry(*entry) for entry in metadata)
    head += b"".join(tensor_line(*line) for line in lines)
    return head + bytes(-len(head) % 32) + data, len(head)


def gguf_tensors(stored: Mapping[str, int]) -> tuple[list[tuple[str, tuple[int, ...], int, int]], bytes]:
    """Header lines and data of all tensors; `stored` has the types of those that are not F32 (1 F16, 8 Q8_0)."""
    lines, data = [], b""
    for _, name, shape in TENSORS:
        kind = stored.get(name, 0)
        lines.append((name, shape[::-1], kind, len(data)))
        data += encode(values(name, shape), kind)
        data += bytes(-len(data) % 32)
    return lines, data


def encode(numbers: np.ndarray, kind: int) -> bytes:
    if kind == 0:
        return numbers.tobytes()
    if kind == 1:
        return numbers.astype(np.float16).tobytes()
    blocks = numbers.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 127.0).astype(np.float16)
    quants = np.round(blocks / np.maximum(scales.astype(np.float32), 1e-8)[:, None]).clip(-127, 127).astype(np.int8)
    return b"".join(s.tobytes() + q.tobytes() for s, q in zip(scales, quants, strict=True))


def safetensors_header() -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, alias, shape in TENSORS:
        raw = values(alias, shape).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def safetensors_bytes(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def write_folder(folder: Path, raw: bytes, config: object = CONFIG) -> Path:
    (folder / "model.safetensors").write_bytes(raw)
    (folder / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return folder
