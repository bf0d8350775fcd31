"""The arithmetic under loading: dequantising against the reference, rounding against torch, rope against its source."""

from __future__ import annotations

import functools
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import TINY, random_blocks
from hypothesis import given
from hypothesis import strategies as st

from janus_server.kernels.table import Form
from janus_server.model import dequant
from janus_server.model.dequant import convert_rows, round_to_bf16
from janus_server.model.rope import inv_freq
from janus_server.model.spec import ModelSpec, from_hf, rope_tables
from janus_server.model.stored import Encoding

QUANTS = [encoding for encoding in Encoding if encoding.block_values > 1]


@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda e: e.label)
def test_block_sizes_and_numbers_are_ggufs(encoding: Encoding) -> None:
    kind = gguf.GGMLQuantizationType[encoding.label]
    assert int(kind) == encoding.ggml_type
    assert gguf.GGML_QUANT_SIZES[kind] == (encoding.block_values, encoding.block_bytes)


@pytest.mark.parametrize("encoding", QUANTS, ids=lambda e: e.label)
def test_every_stored_byte_pattern_dequantises_as_the_reference(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequant, "STEP_VALUES", 1024)  # several steps, the last one ragged
    kind = gguf.GGMLQuantizationType[encoding.label]
    raw = random_blocks((37, 768), kind)
    out = np.empty((37, 768), np.float32)
    convert_rows(raw, encoding, Form.F32, out)
    np.testing.assert_array_equal(out, gguf.dequantize(raw, kind))
    bits = np.empty((37, 768), np.uint16)
    convert_rows(raw, encoding, Form.BF16, bits)
    wanted = torch.from_numpy(out).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(bits, wanted)


@pytest.mark.parametrize("encoding", QUANTS, ids=lambda e: e.label)
def test_a_scale_that_is_nan_shows(encoding: Encoding) -> None:
    raw = random_blocks((2, 256), gguf.GGMLQuantizationType[encoding.label])
    at = 208 if encoding is Encoding.Q6_K else 0
    raw.reshape(2, -1, encoding.block_bytes)[1, 0, at : at + 2] = 0xFF  # the NaN with the largest payload
    raw[0, :at] |= 1
    bits = np.empty((2, 256), np.uint16)
    convert_rows(raw, encoding, Form.BF16, bits)
    assert ((bits[1] & 0x7FFF) > 0x7F80).any()
    assert ((bits[0] & 0x7F80) != 0x7F80).all()


def test_every_half_widens_exactly() -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(16, -1)
    for encoding, wanted in (
        (Encoding.F16, torch.arange(1 << 16).to(torch.uint16).view(torch.float16).float()),
        (Encoding.BF16, torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()),
    ):
        out = np.empty((16, 4096), np.float32)
        convert_rows(raw, encoding, Form.F32, out)
        np.testing.assert_array_equal(out.reshape(-1), wanted.numpy())


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64))
def test_rounding_is_torchs(patterns: list[int]) -> None:
    values = np.array(patterns, np.uint32).view(np.float32)
    out = np.empty(len(values), np.uint16)
    round_to_bf16(values, out)
    wanted = torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(out[numbers], wanted[numbers])
    assert ((out[~numbers] & 0x7FFF) > 0x7F80).all()


def test_rounding_ties_go_to_even() -> None:
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    out = np.empty(6, np.uint16)
    round_to_bf16(values.view(np.float32), out)
    assert out.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0x7FC0]


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 0.8, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
]  # fmt: skip


def reference(rope: dict[str, Any], head_dim: int) -> tuple[Any, ModelSpec]:
    """A transformers Llama rotary module for a rope config, and our spec of the same config."""
    config = transformers.LlamaConfig(
        **{**TINY, "head_dim": head_dim, "rope_parameters": {"rope_theta": 10000.0, **rope}}
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    return LlamaRotaryEmbedding(config), from_hf(raw, None)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values())))
def test_rope_is_transformers(rope: dict[str, Any], head_dim: int) -> None:
    module, spec = reference(rope, head_dim)
    ours = inv_freq(spec.rope, head_dim, spec.max_positions)
    assert ours.inv_freq.dtype == np.float32
    np.testing.assert_allclose(ours.inv_freq, module.inv_freq.numpy(), rtol=1e-6)
    assert ours.attention_scaling == pytest.approx(module.attention_scaling, rel=1e-12)
    positions = spec.max_positions
    cos, sin = module(torch.zeros(1, 1, dtype=torch.float32), torch.arange(positions)[None])
    tables = rope_tables(spec, positions)
    for got, wanted in ((tables.cos, cos), (tables.sin, sin)):
        # Angles reach 256 radians, whose float32 neighbours are 3e-5 apart.
        np.testing.assert_allclose(got, wanted[0, :, : head_dim // 2].numpy(), atol=6e-5)


def test_dynamic_rope_beyond_the_models_length_is_transformers_at_that_length() -> None:
    module, spec = reference({"rope_type": "dynamic", "factor": 2.0}, 64)
    module(torch.zeros(1, 1, dtype=torch.float32), torch.arange(1000)[None])
    np.testing.assert_allclose(inv_freq(spec.rope, 64, 1000).inv_freq, module.inv_freq.numpy(), rtol=1e-5)


def test_old_spellings_give_the_same_tables() -> None:
    for rope in ROPES[2:]:
        _, spec = reference(rope, 64)
        inner = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
        old = {
            **TINY, "architectures": ["LlamaForCausalLM"], "head_dim": 64, "rope_theta": rope.get("rope_theta", 1e4),
            "rope_scaling": {**inner, "type": rope["rope_type"]},
        }  # fmt: skip
        np.testing.assert_array_equal(rope_tables(from_hf(old, None), 64).cos, rope_tables(spec, 64).cos)


def test_tables_are_bounded_work() -> None:
    # The largest context that a config may ask for is refused elsewhere; a long one must come in steps, not at once.
    config = functools.reduce(lambda a, b: {**a, **b}, [TINY, {"architectures": ["LlamaForCausalLM"]}])
    tables = rope_tables(from_hf(config, None), 10000)
    assert tables.cos.shape == (10000, 8) and tables.cos[9999, 0] == np.float32(np.cos(9999.0))
