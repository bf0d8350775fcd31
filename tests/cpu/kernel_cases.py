"""What both kernel tests stand on: tables built for several instruction sets, packed weights, paged caches, plain
float64 answers.

The float64 formulas are written from the mathematics, not from either table.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import random_blocks

from janus_server.kernels import build
from janus_server.kernels.cpu import CpuNative
from janus_server.kernels.table import PLAIN_FORM, Band, CacheLayer, DType, Form, Matrix, StepInputs
from janus_server.kernels.torch_ref import TorchRef

# One library an instruction set: AVX-512 (or what this machine has), AVX2 with FMA, and plain SSE2 without a fused
# multiply-add.
TARGETS = {"cpu": build.NATIVE, "cpu-avx2": "-march=x86-64-v3", "cpu-plain": "-march=x86-64"}
TABLES = ("torch_ref", *TARGETS)


def open_table(name: str, threads: int = 2) -> Any:
    if name == "torch_ref":
        return TorchRef(1)
    if name != "cpu" and platform.machine() != "x86_64":
        pytest.skip(f"{name} is for x86_64, this is {platform.machine()}")
    if name == "cpu-avx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    built = build.ensure(build.cache_dir(os.environ), TARGETS[name])
    if built.path is None:
        pytest.skip(f"the native kernels cannot be built here: {built.how}")
    return CpuNative(built.path, threads)


def to_bits(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits, nearest even."""
    u = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def give(table: Any, values: np.ndarray, dtype: DType = DType.F32) -> Any:
    """numpy float32 as an array of the table, in its own memory."""
    array = table.empty(values.shape, dtype)
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        import torch

        array.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return array


def take(table: Any, array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array.copy()
    return np.array(array.float().numpy())


def weights(table: Any, values: np.ndarray, dtype: DType) -> Matrix:
    """A matrix stored plainly as dtype."""
    form = PLAIN_FORM[dtype]
    return stored(table, ((form, plain_rows(values, form)),))


def stored(table: Any, bands: tuple[tuple[Form, np.ndarray], ...]) -> Matrix:
    """A matrix of these bands' rows, written in several calls when the table allows it."""
    form, rows = bands[0]
    k = rows.nbytes // len(rows) // form.row_bytes(form.block_values) * form.block_values
    nbytes = sum(table.band_bytes(len(rows), k, form) for form, rows in bands)
    matrix = table.matrix(aligned(nbytes), k, tuple(Band(form, len(rows)) for form, rows in bands))
    first = 0
    for form, rows in bands:
        step = table.row_step(form) * 2
        for start in range(0, len(rows), step):
            some = np.ascontiguousarray(rows[start : start + step])
            assert table.store_rows(some, first + start, matrix) == 0
        first += len(rows)
    return matrix


def plain_rows(values: np.ndarray, form: Form) -> np.ndarray:
    return values.astype(np.float32) if form is Form.F32 else to_bits(values)


def some_rows(form: Form, n: int, k: int, seed: int) -> np.ndarray:
    """Random rows as `store_rows` takes them; blocks with any integers and small scales of either sign."""
    if not form.quantised:
        return plain_rows(np.random.default_rng(seed).standard_normal((n, k)), form)
    return random_blocks((n, k), gguf.GGMLQuantizationType[form.name], seed)


def meant(rows: np.ndarray, form: Form) -> np.ndarray:
    """The float32 values [n, k] that stored rows stand for, by the reference package."""
    if not form.quantised:
        return rows if form is Form.F32 else from_bits(rows)
    return np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType[form.name]))


def rounded(values: np.ndarray, dtype: DType) -> np.ndarray:
    return values.astype(np.float32) if dtype is DType.F32 else from_bits(to_bits(values))


@dataclasses.dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    page_tokens: int
    dtype: DType


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows first … last-1 of a sequence, which this step computes."""

    sequence: int
    first: int
    last: int


@dataclasses.dataclass
class Paged:
    """A slab with one layer in the middle of each page, and a page table a sequence."""

    table: Any
    cache: CacheLayer
    pages: list[np.ndarray]

    def inputs(self, chunks: list[Chunk]) -> StepInputs:
        width = max(len(self.pages[c.sequence]) for c in chunks)
        page_table = np.zeros((len(chunks), width), np.int32)
        for i, c in enumerate(chunks):
            page_table[i, : len(self.pages[c.sequence])] = self.pages[c.sequence]
        positions = np.concatenate([np.arange(c.first, c.last) for c in chunks]).astype(np.int32)
        counts = [c.last - c.first for c in chunks]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return StepInputs(positions, starts, page_table, np.repeat(np.arange(len(chunks)), counts).astype(np.int32))


def paged(table: Any, h: Heads, lengths: list[int], rng: np.random.Generator) -> Paged:
    """Pages in random order, filled with NaN bits so that a read of what was never written shows."""
    needed = [-(-n // h.page_tokens) for n in lengths]
    layer = 2 * h.kv_heads * h.page_tokens * h.dim * h.dtype.bytes
    offset, stride = 64, layer + 192
    count = sum(needed) + 2
    slab = aligned(count * stride)
    slab[:] = 0xFF
    ids = rng.permutation(count).astype(np.int32)
    cuts = np.cumsum([0, *needed])
    cache = table.cache_layer(slab, offset, stride, h.kv_heads, h.page_tokens, h.dim, h.dtype)
    return Paged(table, cache, [ids[a:b] for a, b in itertools.pairwise(cuts)])


def angles(positions: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    turn = np.arange(positions)[:, None] / 10000.0 ** (np.arange(dim // 2) * 2 / dim)
    return np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)


def norm64(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate64(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [N, heads, dim], cos and sin [N, dim/2]."""
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def attend64(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, scale: float) -> np.ndarray:
    """q [r, heads, dim] at positions first …; keys, values [length, kv_heads, dim]."""
    group = q.shape[1] // keys.shape[1]
    out = np.zeros(q.shape)
    for r in range(q.shape[0]):
        end = first + r + 1
        for head in range(q.shape[1]):
            scores = keys[:end, head // group].astype(np.float64) @ q[r, head].astype(np.float64) * scale
            share = np.exp(scores - scores.max())
            out[r, head] = share @ values[:end, head // group].astype(np.float64) / share.sum()
    return out


def error(got: np.ndarray, want: np.ndarray, size: float = 0.0) -> float:
    """Largest deviation as a share of `size` or of the largest value (at least 1e-6: below that f32 is noise here)."""
    return float(np.abs(got - want).max() / max(np.abs(want).max(), size, 1e-6))
