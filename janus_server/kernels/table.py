"""The kernel table: the narrow set of operations a model is written in, one implementation per device.

`torch_ref` is the twin of every kernel and the fallback everywhere; `cpu` is the native path. A model file calls
nothing but this table, so a device is added by writing these functions and nothing else.

An `Array` is whatever the table computes on (numpy for `cpu`, torch tensors for `torch_ref`): model code only
lays it into the scratch window with `view`, slices its first dimension and reshapes it. The native path therefore
serves without importing torch, which alone would take 1.1–1.6 s of a launch.

Determinism contract, held by both tables: the result for one row depends only on that row, its position and the cached
keys and values before it; never on how many other rows share the call, on how a prompt was cut into chunks, or on
which page ids hold the cache. Outputs are then bit-equal alone and in any batch. (torch_ref in bf16 is exempt: oneDNN
picks its blocking by row count, so there ids are equal only up to near-ties.)

Dtypes: the residual stream `x` is f32. What feeds a matrix ("act") is `act_dtype(model)`: f32 on `cpu`, the model's own
dtype on torch_ref. The KV cache has the model's dtype. What a matrix is stored as is its Form, one or several a matrix.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from janus_server.errors import require

Array = Any  # numpy.ndarray or torch.Tensor, by table


class DType(enum.Enum):
    """Element types that a table stores and computes in. numpy has no bf16: a bf16 numpy array is its uint16 bits."""

    F32 = "float32"
    BF16 = "bfloat16"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.F32 else 2


class Form(enum.Enum):
    """What rows of a matrix are stored as: a name for people, values a block, bytes a block of the rows given to
    `store_rows`.

    The quantised forms hold what GGUF's blocks of that name hold, rearranged but not changed, and stand for exactly the
    float32 values that the reference dequantisation gives. A product over them equals one over those values in F32.
    """

    F32 = ("float32", 1, 4)
    BF16 = ("bfloat16", 1, 2)
    Q4_1 = ("q4_1", 32, 20)
    Q8_0 = ("q8_0", 32, 34)
    Q4_K = ("q4_k", 256, 144)
    Q6_K = ("q6_k", 256, 210)

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def block_values(self) -> int:
        return self.value[1]

    @property
    def quantised(self) -> bool:
        return self.value[1] > 1

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of k values as `store_rows` takes it; k is a multiple of block_values."""
        return k // self.value[1] * self.value[2]


PLAIN_FORM: Final = MappingProxyType({DType.F32: Form.F32, DType.BF16: Form.BF16})


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """`rows` neighbouring rows of a matrix that share one form."""

    form: Form
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix [n, k] (n outputs, k inputs) in the table's own stored forms, a band after the other.

    data is a flat uint8 numpy view of xTensor memory, the sum of the bands' `band_bytes`, that `store_rows` filled; its
    address is a multiple of 64. `handle` is whatever the table keeps beside it (a pointer, a tensor), made by `matrix`.
    """

    data: np.ndarray
    n: int
    k: int
    bands: tuple[Band, ...]
    handle: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer's keys and values as a strided view of the slab: page ids index the first dimension.

    Logical shape [pages, 2, kv_heads, page_tokens, head_dim]; [p, 0] are keys, [p, 1] values. The last four dimensions
    are contiguous; consecutive pages are `page_stride_bytes` apart. Their order inside is the table's own, so pages are
    moved and copied whole: torch_ref has them row-major; cpu too, but for keys, which are interleaved in panels of 32
    tokens (the last panel of a page has those that are left) as `cuda/janus_cache.h` says. slab is the whole slab as
    flat uint8; the layer starts at `offset_bytes` inside each page. `handle` is made by `cache_layer`.
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
class StepShape:
    """What the memory of a model's largest step depends on: its rows, those drawn, positions of its longest sequence,
    and the widths of its arrays in elements."""

    rows: int
    drawn: int
    context: int
    hidden: int
    q_width: int
    kv_width: int
    ffn: int
    vocab: int
    dtype: DType


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A recorded step: `ops` in the table's own form, and the most rows (and rows taken) that its arrays hold."""

    ops: Any
    rows: int
    taken: int
    kept: tuple[object, ...]


class Kernels(Protocol):
    """Every output array is given by the caller, contiguous, and fully written. `forms` are what a matrix may be."""

    name: str
    forms: frozenset[Form]

    def act_dtype(self, model: DType) -> DType:
        """Element type of what feeds a matrix of a model of this dtype."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Uninitialised contiguous memory, 64-byte aligned."""

    def view(self, memory: Array, offset_bytes: int, shape: tuple[int, ...], dtype: DType) -> Array:
        """A contiguous array over a part of flat uint8 device memory, no copy; it begins at a multiple of 64 bytes."""

    def temporary_bytes(self, shape: StepShape) -> int:
        """The most that operations take at any moment of such a step beside the arrays given to them, from an allocator
        of the table's own."""

    def vector(self, data: np.ndarray) -> Array:
        """A flat float32 numpy array (norm weight, bias, rope table of any shape) as this table's array, no copy."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """An f32 array as numpy, no copy on a CPU (logits for the sampler)."""

    # Weights
    def band_bytes(self, n: int, k: int, form: Form) -> int:
        """Bytes that n stored rows of k values take (a multiple of 64)."""

    def row_step(self, form: Form) -> int:
        """Rows of a band but a matrix's last, and row starts passed to `store_rows`, are multiples of this; only the
        last call for a band may give a ragged count."""

    def matrix(self, data: np.ndarray, k: int, bands: tuple[Band, ...]) -> Matrix:
        """The handle over memory that is or will be filled by store_rows."""

    def store_rows(self, rows: np.ndarray, start: int, matrix: Matrix) -> int:
        """Write rows as rows start … start+r-1, all of one band; C-contiguous, of its form: [r, k] float32, [r, k]
        uint16 bits of bf16, or [r, form.row_bytes(k)] uint8 blocks as GGUF has them.

        Returns how many of the values (in blocks: of the half floats that scale them) were NaN or infinite, so that the
        loader can refuse the tensor by name.
        """

    def read_rows(self, matrix: Matrix) -> np.ndarray:
        """What the matrix stands for, [n, k] float32."""

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

        Grouped: query head h reads kv head h // (heads / kv_heads). Scores and softmax in f32, keys taken in blocks of
        positions that depend on page_tokens at most, so that chunking cannot change a bit. Slots that were never
        written may hold anything. `cpu` does not even multiply later values by zero: an infinite one harms nobody
        before it.
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

    def copy_bytes(self, target: np.ndarray, source: np.ndarray) -> None:
        """Copy flat uint8 over as much of it, past the caches where that is possible. Any thread."""


def require_rows(rows: np.ndarray, form: Form, k: int) -> None:
    """Bug unless rows are what `store_rows` takes for that form."""
    wanted = {Form.F32: np.float32, Form.BF16: np.uint16}.get(form, np.uint8)
    width = form.row_bytes(k) // np.dtype(wanted).itemsize
    require(rows.ndim == 2 and rows.dtype == wanted, f"rows are {rows.dtype}, the matrix {form.label}")
    require(
        rows.shape[1] == width and rows.flags.c_contiguous, f"rows of {rows.shape[1]} where {form.label} has {width}"
    )
