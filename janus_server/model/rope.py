"""Rotary position frequencies and tables for every scaling that is served. Pure numpy; `spec` and the model call it.

The frequencies are those that transformers computes for the same config: the weights were trained against them. It must
never depend on the length of a single prompt, because cached keys are rotated once and shared between requests.
"""

from __future__ import annotations

import enum
import math
from typing import Final, NamedTuple

import msgspec
import numpy as np

TABLE_STEP_POSITIONS: Final = 4096


class RopeKind(enum.Enum):
    NONE = "none"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How positions become angles. Fields beyond theta matter only to the kinds that use them.

    original_max_positions is the pretrained length (for DYNAMIC: the model's max_positions, from which it grows).
    attention_factor None means YaRN's own, from factor and the mscales. freq_factors, one per pair, divide the
    frequencies when present (how GGUF stores Llama 3's scaling).
    """

    theta: float
    kind: RopeKind = RopeKind.NONE
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()


class Frequencies(NamedTuple):
    """inv_freq [head_dim/2] float32, radians per position; attention_scaling multiplies cos and sin."""

    inv_freq: np.ndarray
    attention_scaling: float


class RopeTables(NamedTuple):
    """cos, sin [positions, head_dim/2] float32, attention scaling folded in."""

    cos: np.ndarray
    sin: np.ndarray


def inv_freq(rope: RopeSpec, head_dim: int, seq_len: int) -> Frequencies:
    """Frequencies for a context of seq_len positions, computed in float64 and rounded once.

    Only DYNAMIC depends on seq_len, and only beyond the model's own length: transformers then recomputes as a prompt
    grows, which cached keys cannot follow, so here the whole context uses the frequencies of its full length.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    theta = rope.theta
    if rope.kind is RopeKind.DYNAMIC and seq_len > rope.original_max_positions and head_dim > 2:
        stretch = rope.factor * seq_len / rope.original_max_positions - (rope.factor - 1.0)
        theta *= stretch ** (head_dim / (head_dim - 2))
    freqs = theta**-exponents
    if rope.freq_factors:
        freqs = freqs / np.asarray(rope.freq_factors, dtype=np.float64)
    scaling = 1.0
    if rope.kind is RopeKind.LINEAR:
        freqs = freqs / rope.factor
    elif rope.kind is RopeKind.LLAMA3:
        freqs = _llama3(freqs, rope)
    elif rope.kind is RopeKind.YARN:
        freqs, scaling = _yarn(freqs, rope, head_dim), _yarn_attention(rope)
    return Frequencies(freqs.astype(np.float32), scaling)


def rotary_tables(rope: RopeSpec, head_dim: int, positions: int) -> RopeTables:
    """Tables for positions 0 … positions-1.

    Angles are float32 products, as in training; their cosine is taken in float64, since float32 range reduction loses
    bits at large angles.
    """
    freqs, scaling = inv_freq(rope, head_dim, positions)
    cos = np.empty((positions, head_dim // 2), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, positions, TABLE_STEP_POSITIONS):
        stop = min(start + TABLE_STEP_POSITIONS, positions)
        angles = (np.arange(start, stop, dtype=np.float32)[:, None] * freqs).astype(np.float64)
        np.multiply(np.cos(angles), scaling, out=cos[start:stop], casting="same_kind")
        np.multiply(np.sin(angles), scaling, out=sin[start:stop], casting="same_kind")
    return RopeTables(cos, sin)


def _llama3(freqs: np.ndarray, rope: RopeSpec) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between."""
    turns = rope.original_max_positions * freqs / (2 * math.pi)  # rotations within the pretrained length
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return freqs * (keep + (1.0 - keep) / rope.factor)


def _yarn(freqs: np.ndarray, rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Pairs that turn often are kept, those that turn seldom are divided by the factor, a ramp over those between."""

    def pair_of(rotations: float) -> float:
        length = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    divided = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    blended: np.ndarray = freqs * (1.0 - divided) + freqs / rope.factor * divided
    return blended


def _yarn_attention(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    log = 0.1 * math.log(max(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (rope.mscale * log + 1.0) / (rope.mscale_all_dim * log + 1.0)
    return log + 1.0
