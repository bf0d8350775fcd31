"""The plain torch twin of every kernel: the oracle that the tests hold the native path against, and the fallback
everywhere.

Made by `choose`. The only module of the serving path that imports torch. In f32 it keeps the determinism contract by
construction: everything but the matrix products is built from correctly rounded element-wise operations and fixed
trees (torch's own exp, sum and softmax pick vector or scalar code by an element's place), and products run in row
tiles of one fixed shape. In bf16 it does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from janus_server.errors import Bug, require
from janus_server.kernels.table import (
    Array,
    Band,
    CacheLayer,
    DType,
    Form,
    Matrix,
    Program,
    StepInputs,
    StepShape,
    require_rows,
)

# F.linear on 16 rows gives a row the same bits in every slot of the tile; on 8 it does not (seen with 3 outputs, MKL,
# AVX-512).
TILE_ROWS = 16
KEY_BLOCK = 64
_TORCH: Final = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}
_STORED: Final = {Form.F32: torch.float32, Form.BF16: torch.bfloat16}


class TorchRef:
    """`Kernels` over CPU tensors. A matrix is stored as plain rows; activations have the weights' dtype."""

    name = "torch_ref"
    forms = frozenset({Form.F32, Form.BF16})

    def __init__(self, threads: int) -> None:
        require(threads >= 1, f"torch needs at least one thread, not {threads}")
        self.threads = threads
        torch.set_num_threads(threads)

    def close(self) -> None:
        """Nothing to end."""

    def act_dtype(self, model: DType) -> DType:
        return model

    def empty(self, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
        return torch.empty(shape, dtype=_TORCH[dtype])

    def view(self, memory: Array, offset_bytes: int, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
        size = math.prod(shape) * dtype.bytes
        require(0 <= offset_bytes <= memory.size - size, f"{shape} at byte {offset_bytes} is outside the memory")
        return torch.from_numpy(memory[offset_bytes : offset_bytes + size]).view(_TORCH[dtype]).view(shape)

    def temporary_bytes(self, shape: StepShape) -> int:
        """The largest of what one operation holds at once, in f32 unless it says otherwise, and a little more.

        Not in it: what oneDNN rearranges for itself, which its allocator does not tell of.
        """
        s, f32 = shape, 4
        widest = max(2 * s.ffn, s.q_width + 2 * s.kv_width, s.hidden)
        # A product in bf16 exists as such, as f32 and with its bias; in f32 only a tile of it does.
        product = 10 if s.dtype is DType.BF16 else 0
        tile = TILE_ROWS * (max(s.vocab, widest) * 2 + max(s.hidden, s.ffn, s.q_width)) * f32
        most = max(
            9 * s.rows * s.ffn * f32,  # silu_mul
            7 * s.rows * s.q_width * f32,  # rope_and_cache
            4 * s.rows * s.hidden * f32,  # rms_norm
            4 * (s.context + KEY_BLOCK) * s.kv_width * f32,  # attention: a sequence's keys and values, twice
            product * s.rows * widest,
            product * s.drawn * s.vocab,
        )
        return most + tile + (1 << 20)

    def vector(self, data: np.ndarray) -> torch.Tensor:
        require(data.dtype == np.float32 and data.flags.c_contiguous, "a vector is contiguous float32")
        return torch.from_numpy(data)

    def to_numpy(self, array: Array) -> np.ndarray:
        return array.numpy()  # type: ignore[no-any-return]

    def band_bytes(self, n: int, k: int, form: Form) -> int:
        return (n * form.row_bytes(k) + 63) // 64 * 64

    def row_step(self, form: Form) -> int:
        return 1

    def matrix(self, data: np.ndarray, k: int, bands: tuple[Band, ...]) -> Matrix:
        require(len(bands) == 1 and bands[0].form in self.forms, f"{self.name} stores a matrix in one plain form")
        form, n = bands[0].form, bands[0].rows
        require(data.dtype == np.uint8 and data.size >= n * form.row_bytes(k), f"{data.size} bytes are too few")
        rows = torch.from_numpy(data)[: n * form.row_bytes(k)].view(_STORED[form]).view(n, k)
        return Matrix(data, n, k, bands, rows)

    def store_rows(self, rows: np.ndarray, start: int, matrix: Matrix) -> int:
        form = matrix.bands[0].form
        require_rows(rows, form, matrix.k)
        require(0 <= start and start + rows.shape[0] <= matrix.n, "rows outside the matrix")
        stored = matrix.data[: matrix.n * form.row_bytes(matrix.k)].view(rows.dtype).reshape(matrix.n, matrix.k)
        stored[start : start + rows.shape[0]] = rows
        if form is Form.F32:
            return int(rows.size - np.count_nonzero(np.isfinite(rows)))
        return int(np.count_nonzero((rows & 0x7F80) == 0x7F80))

    def read_rows(self, matrix: Matrix) -> np.ndarray:
        return np.array(matrix.handle.float().numpy())

    def cache_layer(
        self, slab: np.ndarray, offset_bytes: int, page_stride_bytes: int, kv_heads: int, page_tokens: int,
        head_dim: int, dtype: DType,
    ) -> CacheLayer:  # fmt: skip
        size = dtype.bytes
        layer_bytes = 2 * kv_heads * page_tokens * head_dim * size
        require(head_dim % 2 == 0, f"head_dim {head_dim} is odd")
        require(offset_bytes >= 0 and offset_bytes + layer_bytes <= page_stride_bytes, "a layer must fit into its page")
        require(offset_bytes % size == 0 and page_stride_bytes % size == 0, "a layer is not aligned")
        pages = slab.size // page_stride_bytes
        flat = torch.from_numpy(slab[: pages * page_stride_bytes]).view(_TORCH[dtype])
        head = page_tokens * head_dim
        strides = (page_stride_bytes // size, kv_heads * head, head, head_dim, 1)
        view = flat.as_strided((pages, 2, kv_heads, page_tokens, head_dim), strides, offset_bytes // size)
        return CacheLayer(slab, offset_bytes, page_stride_bytes, pages, kv_heads, page_tokens, head_dim, dtype, view)

    def capture(self, body: Callable[[], None]) -> Program | None:
        """None: torch runs operations one by one."""
        return None

    def replay(self, program: Program, ids: np.ndarray, inputs: StepInputs, rows: np.ndarray) -> None:
        raise Bug("this table records nothing")

    def embed(self, ids: np.ndarray, table: Matrix, x: Array) -> None:
        _in_range(ids, table.n, "embed: a token id is outside the vocabulary")
        x.copy_(table.handle[_index(ids)])

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        out.copy_(_normed(x, weight, eps))

    def linear(self, act: Array, matrix: Matrix, bias: Array | None, out: Array) -> None:
        for rows, product in _products(act, matrix):
            out[rows] = product if bias is None else product + bias

    def linear_add(self, act: Array, matrix: Matrix, x: Array) -> None:
        for rows, product in _products(act, matrix):
            x[rows] += product

    def rope_and_cache(
        self, qkv: Array, q_norm: Array | None, k_norm: Array | None, eps: float, cos: Array, sin: Array,
        inputs: StepInputs, cache: CacheLayer, q: Array,
    ) -> None:  # fmt: skip
        rows, heads, head_dim = q.shape
        _in_range(inputs.positions, cos.shape[0], "rope: a position is out of range")
        positions = _index(inputs.positions)
        # The same angle for every head of a row: [N, 1, head_dim/2].
        c, s = cos[positions][:, None], sin[positions][:, None]
        split = qkv.view(rows, heads + 2 * cache.kv_heads, head_dim)
        queries, keys, values = split.split((heads, cache.kv_heads, cache.kv_heads), dim=1)
        if q_norm is not None:
            queries = _normed(queries, q_norm, eps)
        if k_norm is not None:
            keys = _normed(keys, k_norm, eps)
        q.copy_(_rotated(queries, c, s))
        pages, slots = _places(inputs, inputs.row_sequence, inputs.positions, cache)
        cache.handle[pages, 0, :, slots] = _rotated(keys, c, s).to(cache.handle.dtype)
        cache.handle[pages, 1, :, slots] = values.to(cache.handle.dtype)

    def attention(self, q: Array, inputs: StepInputs, cache: CacheLayer, scale: float, out: Array) -> None:
        require(q.shape[1] % cache.kv_heads == 0, "attention: heads do not fit the cache")
        starts = inputs.query_start.tolist()
        for sequence, (first, last) in enumerate(pairwise(starts)):
            if first < last:
                blocks = _key_blocks(inputs, sequence, int(inputs.positions[last - 1]) + 1, cache)
                for row in range(first, last, TILE_ROWS):
                    rows = slice(row, min(row + TILE_ROWS, last))
                    out[rows] = _attend(q[rows], _index(inputs.positions[rows]), blocks, scale)

    def silu_mul(self, gate_up: Array, out: Array) -> None:
        f = out.shape[1]
        gate, up = gate_up[:, :f], gate_up[:, f:]
        out.copy_(gate / (_exp(-gate) + 1.0) * up)

    def take_rows(self, x: Array, rows: np.ndarray, out: Array) -> None:
        _in_range(rows, x.shape[0], "take_rows: a row is out of range")
        out.copy_(x[_index(rows)])

    def copy_pages(self, slab: np.ndarray, page_bytes: int, source: int, target: int) -> None:
        pages = slab.size // page_bytes
        require(0 <= source < pages and 0 <= target < pages, f"copy_pages: {source} or {target} outside the slab")
        slab[target * page_bytes : (target + 1) * page_bytes] = slab[source * page_bytes : (source + 1) * page_bytes]

    def copy_bytes(self, target: np.ndarray, source: np.ndarray) -> None:
        require(target.size == source.size, "a copy has equal sizes")
        np.copyto(target, source)


@dataclasses.dataclass(frozen=True, slots=True)
class _KeyBlocks:
    """A sequence's cache in blocks of absolute positions, f32, zeros past the end.

    keys [blocks, kv_heads, head_dim, KEY_BLOCK]; values [blocks, kv_heads, KEY_BLOCK, head_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor


def _key_blocks(inputs: StepInputs, sequence: int, length: int, cache: CacheLayer) -> _KeyBlocks:
    positions = np.arange(length, dtype=np.int32)
    pages, slots = _places(inputs, np.full(length, sequence, np.int32), positions, cache)
    count = -(-length // KEY_BLOCK)
    padded = torch.zeros(count * KEY_BLOCK, 2, cache.kv_heads, cache.head_dim)
    padded[:length, 0] = cache.handle[pages, 0, :, slots].float()
    padded[:length, 1] = cache.handle[pages, 1, :, slots].float()
    blocks = padded.view(count, KEY_BLOCK, 2, cache.kv_heads, cache.head_dim)
    return _KeyBlocks(
        blocks[:, :, 0].permute(0, 2, 3, 1).contiguous(), blocks[:, :, 1].permute(0, 2, 1, 3).contiguous()
    )  # fmt: skip


def _attend(q: torch.Tensor, positions: torch.Tensor, blocks: _KeyBlocks, scale: float) -> torch.Tensor:
    """[r, heads, head_dim] for r ≤ TILE_ROWS rows: softmax carried over key blocks, always on whole tiles."""
    rows, heads, head_dim = q.shape
    kv_heads = blocks.keys.shape[1]
    group = heads // kv_heads
    tile = torch.zeros(TILE_ROWS, kv_heads, group, head_dim)
    tile[:rows] = q.float().view(rows, kv_heads, group, head_dim)
    tile = tile.transpose(0, 1).reshape(kv_heads, TILE_ROWS * group, head_dim)
    last = torch.zeros(TILE_ROWS, dtype=torch.int64)
    last[:rows] = positions
    last = last.repeat_interleave(group)[None, :, None]
    top = torch.full((kv_heads, TILE_ROWS * group, 1), -math.inf)
    total = torch.zeros_like(top)
    sums = torch.zeros(kv_heads, TILE_ROWS * group, head_dim)
    for block in range(blocks.keys.shape[0]):
        key = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
        scores = torch.bmm(tile, blocks.keys[block]) * scale
        scores = scores.masked_fill(key > last, -math.inf)
        now = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, fade = _exp(scores - now), _exp(top - now)
        total = total * fade + _row_sum(weights)
        sums = sums * fade + torch.bmm(weights, blocks.values[block])
        top = now
    out = (sums / total).view(kv_heads, TILE_ROWS, group, head_dim).transpose(0, 1)
    return out[:rows].reshape(rows, heads, head_dim)


def _products(act: torch.Tensor, matrix: Matrix) -> Iterator[tuple[slice, torch.Tensor]]:
    """act @ matrix.T as f32, tile by tile; each tile is a fresh, aligned, whole block of TILE_ROWS rows."""
    require(act.shape[1] == matrix.k, "linear: shapes differ")
    if (
        matrix.bands[0].form is Form.BF16
    ):  # oneDNN rounds the sums to bf16; a float matrix would cost four times the time
        yield slice(0, act.shape[0]), torch.nn.functional.linear(act, matrix.handle).float()
        return
    for row in range(0, act.shape[0], TILE_ROWS):
        rows = slice(row, min(row + TILE_ROWS, act.shape[0]))
        tile = torch.zeros(TILE_ROWS, matrix.k)
        tile[: rows.stop - row] = act[rows]
        yield rows, torch.nn.functional.linear(tile, matrix.handle)[: rows.stop - row]


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (1.0 / torch.sqrt(_row_sum(x * x) / x.shape[-1] + eps)) * weight


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, kept, by halving: element-wise additions in one order for every row."""
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        upper = x[..., half:width]
        x = torch.cat((x[..., : width - half] + upper, x[..., width - half : half]), dim=-1)
        width = half
    return x


def _exp(x: torch.Tensor) -> torch.Tensor:
    """e^x in f32 within 2 ulp, from operations that round correctly everywhere; exactly 0 below -87.33."""
    capped = x.clamp(-87.33, 88.37)
    n = torch.round(capped * 1.44269504)
    r = (capped - n * 0.693359375) + n * 2.12194440e-4
    y = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + c
    y = (y * r) * r + r + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < -87.33, 0.0, y * power)


def _places(
    inputs: StepInputs, sequences: np.ndarray, positions: np.ndarray, cache: CacheLayer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot of each position of its sequence."""
    column = positions // cache.page_tokens
    _in_range(column, inputs.page_table.shape[1], "a position is past its page table")
    pages = inputs.page_table[sequences, column]
    _in_range(pages, cache.pages, "a page id is outside the slab")
    return _index(pages), _index(positions % cache.page_tokens)


def _in_range(ids: np.ndarray, limit: int, message: str) -> None:
    require(ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < limit), message)


def _index(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))
