"""The kernel table: the narrow set of operations a model is written in, one implementation per device.

`torch_ref` is the twin of every kernel and the fallback everywhere; `cpu` is the native path. A model file calls
nothing but this table, so a device is added by writing these functions and nothing else.

An `Array` is whatever the table computes on (numpy for `cpu`, torch tensors for `torch_ref`): model code only
allocates it with `empty`, slices its first dimension and reshapes it. The native path therefore serves without
importing torch, which alone would take 1.1–1.6 s of a launch.

Determinism contract, held by both tables: the result for one row depends only on that row, its position and the cached
keys and values before it; never on how many other rows share the call, on how a prompt was cut into chunks, or on
which page ids hold the cache. Outputs are then bit-equal alone and in any batch. (torch_ref in bf16 is exempt: oneDNN
picks its blocking by row count, so there ids are equal only up to near-ties.)

Dtypes: the residual stream `x` is f32. What feeds a matrix ("act") is `act_dtype(weights)`: f32 on `cpu`, the weights'
own dtype on torch_ref. The KV cache has the model's dtype.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor, by table


class DType(enum.Enum):
    """Element types that a table stores and computes in. numpy has no bf16: a bf16 numpy array is its uint16 bits."""

    F32 = "float32"
    BF16 = "bfloat16"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.F32 else 2


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix [n, k] (n outputs, k inputs) in the table's own stored form.

    data is a flat uint8 numpy view of xTensor memory that `matrix_bytes(n, k, dtype)` sized and `store_rows` filled;
    its address is a multiple of 64. `handle` is whatever the table keeps beside it (a pointer, a tensor), made by
    `matrix`.
    """

    data: np.ndarray
    n: int
    k: int
    dtype: DType
    handle: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer's keys and values as a strided view of the slab: page ids index the first dimension.

    Logical shape [pages, 2, kv_heads, page_tokens, head_dim]; [p, 0] are keys, [p, 1] values. The last four dimensions
    are contiguous (row-major); consecutive pages are `page_stride_bytes` apart. slab is the whole slab as flat uint8;
    the layer starts at `offset_bytes` inside each page. `handle` is made by `cache_layer`.
    """

    slab: np.ndarray
    offset_bytes: int
    page_stride_bytes: int
    pages: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: DType
    handle: Any


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """Where the rows of one step belong: N rows in S sequences, all int32 numpy arrays, C-contiguous.

    positions [N]: each row's position in its sequence. query_start [S+1]: rows of sequence s are
    query_start[s] … query_start[s+1]-1, in position order. page_table [S, P]: page ids, padded with 0.
    row_sequence [N]: s of each row. Row i attends to cached positions 0 … positions[i] of its sequence.
    """

    positions: np.ndarray
    query_start: np.ndarray
    page_table: np.ndarray
    row_sequence: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A recorded step: `ops` in the table's own form, and the most rows (and rows taken) that its arrays hold."""

    ops: Any
    rows: int
    taken: int
    kept: tuple[object, ...]


class Kernels(Protocol):
    """Every output array is given by the caller, contiguous, and fully written."""

    name: str

    def act_dtype(self, weights: DType) -> DType:
        """Element type of what feeds a matrix."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Uninitialised contiguous memory, 64-byte aligned."""

    def vector(self, data: np.ndarray) -> Array:
        """A flat float32 numpy array (norm weight, bias, rope table of any shape) as this table's array, no copy."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """An f32 array as numpy, no copy on a CPU (logits for the sampler)."""

    # Weights
    def matrix_bytes(self, n: int, k: int, dtype: DType) -> int:
        """Bytes that a stored [n, k] matrix takes (a multiple of 64)."""

    def row_step(self, dtype: DType) -> int:
        """Row starts passed to `store_rows` are multiples of this; only the last call may give a ragged count."""

    def matrix(self, data: np.ndarray, n: int, k: int, dtype: DType) -> Matrix:
        """The handle over memory that is or will be filled by store_rows."""

    def store_rows(self, rows: np.ndarray, start: int, matrix: Matrix) -> int:
        """Write rows [r, k] (float32, or uint16 bits of bf16: exactly matrix.dtype, C-contiguous) as rows start …
        start+r-1.

        Returns how many of the values were NaN or infinite, so that the loader can refuse the tensor by name.
        """

    def read_rows(self, matrix: Matrix) -> np.ndarray:
        """The stored matrix as plain rows [n, k]; the inverse of store_rows."""

    def cache_layer(
        self,
        slab: np.ndarray,
        offset_bytes: int,
        page_stride_bytes: int,
        kv_heads: int,
        page_tokens: int,
        head_dim: int,
        dtype: DType,
    ) -> CacheLayer:
        """The handle over one layer's part of every page of the slab."""

    # The mathematics of a decoder, in the order a layer uses them
    def embed(self, ids: np.ndarray, table: Matrix, x: Array) -> None:
        """x [N, k] f32 = rows `ids` [N] int32 of table."""

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out [N, k] act = x [N, k] f32 / sqrt(mean(x²) + eps) * weight [k] f32."""

    def linear(self, act: Array, matrix: Matrix, bias: Array | None, out: Array) -> None:
        """out [N, n] f32 = act [N, k] @ matrix.T + bias [n] f32; accumulated in f32."""

    def linear_add(self, act: Array, matrix: Matrix, x: Array) -> None:
        """x [N, n] f32 += act [N, k] @ matrix.T."""

    def rope_and_cache(
        self,
        qkv: Array,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        cos: Array,
        sin: Array,
        inputs: StepInputs,
        cache: CacheLayer,
        q: Array,
    ) -> None:
        """Split, normalise per head (when weights are given), rotate, and write keys and values into their pages.

        qkv [N, (heads + 2·kv_heads)·head_dim] f32: q heads, then k heads, then v heads. q_norm, k_norm [head_dim] f32
        (Qwen3: RMS norm of each head before rotation). cos, sin [max_positions, head_dim/2] f32 indexed by position;
        rotation of halves (x1, x2) → (x1·cos − x2·sin, x2·cos + x1·sin). q [N, heads, head_dim] act receives the
        queries.
        """

    def attention(self, q: Array, inputs: StepInputs, cache: CacheLayer, scale: float, out: Array) -> None:
        """out [N, heads, head_dim] act: causal attention of each row over its sequence's cached positions ≤ its own.

        Grouped: query head h reads kv head h // (heads / kv_heads). Scores and softmax in f32, keys taken in fixed
        blocks of absolute positions so that chunking cannot change a bit.
        """

    def silu_mul(self, gate_up: Array, out: Array) -> None:
        """out [N, f] act = silu(gate_up[:, :f]) * gate_up[:, f:]; gate_up [N, 2f] f32."""

    def take_rows(self, x: Array, rows: np.ndarray, out: Array) -> None:
        """out [R, k] f32 = x[rows] (the rows whose logits are wanted); rows [R] int32."""

    # Whole steps
    def capture(self, body: Callable[[], None]) -> Program | None:
        """Record the operations that `body` calls (they do not run), to be replayed with other rows in one call.

        None when this table runs operations one by one; `body` has not been called then.
        """

    def replay(self, program: Program, ids: np.ndarray, inputs: StepInputs, rows: np.ndarray) -> None:
        """Run a recorded step on `ids` [N] at `inputs`, taking `rows` [R]: the first N and R rows of its arrays."""

    def copy_pages(self, slab: np.ndarray, page_bytes: int, source: int, target: int) -> None:
        """Copy one whole page inside the slab."""
