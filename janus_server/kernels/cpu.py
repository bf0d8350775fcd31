"""The native CPU table: numpy arrays in, pointers out to the C++ library in `cuda/`; every call drops the GIL.

`choose` makes it, the device thread of one node uses it; calls that compute share one pool of threads and come one at a
time. `store_rows`, `read_rows`, `copy_pages` and `copy_bytes` do not use the pool: a loader may call them from any
thread. A captured step is one call: the GIL is taken once, not once an operation, which with a busy event loop costs up
to a switch interval each. Must never import torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from janus_server.errors import require
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

ABI = 4
PANEL_ROWS = 32
MAX_HEAD_DIM = 1024
ALIGNMENT_BYTES = 64

_P = ctypes.c_void_p
_I = ctypes.c_int64

_SIGNATURES: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("janus_abi", _I, ()),
    ("janus_pool_new", _P, (_I,)),
    ("janus_pool_free", None, (_P,)),
    ("janus_band_bytes", _I, (_I, _I, _I)),
    ("janus_store_rows", _I, (_P, _P, _I, _I)),
    ("janus_read_rows", None, (_P, _P)),
    ("janus_run", _I, (_P, _P, _I, _P)),
    ("janus_copy", None, (_P, _I, _I, _I)),
    ("janus_stream", None, (_P, _P, _I)),
)


# Forms by the numbers that the library knows them by.
_FORMS = (Form.F32, Form.BF16, Form.Q4_1, Form.Q8_0, Form.Q4_K, Form.Q6_K)


class _Kind(enum.IntEnum):
    """Operations by the numbers that the library knows them by."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    LINEAR_ADD = 3
    ROPE = 4
    ATTEND = 5
    SILU = 6
    TAKE = 7


class _OpRecord(ctypes.Structure):
    _fields_ = (("kind", _I), ("size", _I * 3), ("real", ctypes.c_double), ("at", _P * 7))


class _StepRecord(ctypes.Structure):
    _fields_ = (
        ("rows", _I), ("sequences", _I), ("table_width", _I), ("taken", _I),
        ("ids", _P), ("positions", _P), ("query_start", _P), ("page_table", _P), ("row_sequence", _P), ("take", _P),
    )  # fmt: skip


class _BandRecord(ctypes.Structure):
    _fields_ = (("data", _P), ("n", _I), ("k", _I), ("form", _I))


class _MatrixRecord(ctypes.Structure):
    _fields_ = (("bands", ctypes.POINTER(_BandRecord)), ("count", _I), ("n", _I), ("k", _I))


class _CacheRecord(ctypes.Structure):
    _fields_ = (
        ("base", _P), ("page_stride", _I), ("pages", _I), ("kv_heads", _I), ("page_tokens", _I), ("head_dim", _I),
        ("bf16", _I),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Handle:
    """A record that the library reads, and its address; kept so that a call passes one integer."""

    record: ctypes.Structure
    address: int


@dataclasses.dataclass(slots=True)
class _Tape:
    """Operations being recorded, what their pointers point into, and the rows that the recording had."""

    ops: list[_OpRecord]
    kept: list[object]
    rows: int = 0
    taken: int = 0


class _Recording(threading.local):
    """The capture that runs on this thread: one model is being made while others run their steps."""

    tape: _Tape | None = None


class CpuNative:
    """`Kernels` over the compiled library. Activations are f32, the cache f32 or bf16; weights have any form."""

    name = "cpu"
    forms = frozenset(Form)

    def __init__(self, library: Path, threads: int) -> None:
        """Raises OSError when the library cannot be loaded on this machine (a missing symbol is a Bug)."""
        require(threads >= 1, f"a pool needs at least one thread, not {threads}")
        loaded = ctypes.CDLL(str(library))
        for symbol, result, arguments in _SIGNATURES:
            function = getattr(loaded, symbol)
            function.restype = result
            function.argtypes = arguments
        require(loaded.janus_abi() == ABI, f"{library.name} speaks another version than this server")
        self.threads = threads
        self._band_bytes = loaded.janus_band_bytes
        self._store_rows = loaded.janus_store_rows
        self._read_rows = loaded.janus_read_rows
        self._run = loaded.janus_run
        self._copy = loaded.janus_copy
        self._stream = loaded.janus_stream
        self._pool_free = loaded.janus_pool_free
        self._pool: int | None = loaded.janus_pool_new(threads)
        self._recording = _Recording()

    def close(self) -> None:
        """End the pool's threads. No call may follow."""
        if self._pool is not None:
            self._pool_free(self._pool)
            self._pool = None

    def act_dtype(self, model: DType) -> DType:
        return DType.F32

    def empty(self, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        count = 1
        for size in shape:
            count *= size
        raw = np.empty(count * dtype.bytes + ALIGNMENT_BYTES, np.uint8)
        skip = -_address(raw) % ALIGNMENT_BYTES
        flat = raw[skip : skip + count * dtype.bytes].view(np.float32 if dtype is DType.F32 else np.uint16)
        return flat.reshape(shape)

    def view(self, memory: Array, offset_bytes: int, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        size = math.prod(shape) * dtype.bytes
        require(0 <= offset_bytes <= memory.size - size, f"{shape} at byte {offset_bytes} is outside the memory")
        part = memory[offset_bytes : offset_bytes + size]
        require(_address(part) % ALIGNMENT_BYTES == 0, "an array begins at a multiple of 64 bytes")
        kind = np.float32 if dtype is DType.F32 else np.uint16
        return part.view(kind).reshape(shape)  # type: ignore[no-any-return]

    def temporary_bytes(self, shape: StepShape) -> int:
        """0: the library has some KB a thread and nothing that grows with a step."""
        return 0

    def vector(self, data: np.ndarray) -> np.ndarray:
        require(data.dtype == np.float32 and data.flags.c_contiguous, "a vector is contiguous float32")
        return data

    def to_numpy(self, array: Array) -> np.ndarray:
        return array  # type: ignore[no-any-return]

    # Weights and cache

    def band_bytes(self, n: int, k: int, form: Form) -> int:
        return int(self._band_bytes(n, k, _FORMS.index(form)))

    def row_step(self, form: Form) -> int:
        return PANEL_ROWS

    def matrix(self, data: np.ndarray, k: int, bands: tuple[Band, ...]) -> Matrix:
        require(k > 0 and len(bands) > 0 and all(b.rows > 0 for b in bands), f"an empty matrix of {k} inputs")
        require(data.dtype == np.uint8 and data.flags.c_contiguous, "a matrix lies in flat bytes")
        at = _address(data)
        require(at % ALIGNMENT_BYTES == 0, "a matrix begins at a multiple of 64 bytes")
        records, n, used = (_BandRecord * len(bands))(), 0, 0
        for record, band in zip(records, bands, strict=True):
            require(k % band.form.block_values == 0, f"rows of {k} values are not whole {band.form.label} blocks")
            require(n % PANEL_ROWS == 0, f"a band begins at row {n}, inside a panel")
            record.data, record.n, record.k, record.form = at + used, band.rows, k, _FORMS.index(band.form)
            n, used = n + band.rows, used + self.band_bytes(band.rows, k, band.form)
        require(data.size >= used, f"{data.size} bytes are too few for [{n}, {k}]")
        whole = _MatrixRecord(records, len(bands), n, k)
        return Matrix(data, n, k, bands, _Handle(whole, ctypes.addressof(whole)))

    def store_rows(self, rows: np.ndarray, start: int, matrix: Matrix) -> int:
        index, first = 0, 0  # of the band that row `start` is in
        while index < len(matrix.bands) - 1 and start >= first + matrix.bands[index].rows:
            first += matrix.bands[index].rows
            index += 1
        band, count = matrix.bands[index], rows.shape[0]
        require_rows(rows, band.form, matrix.k)
        end = first + band.rows
        require(first <= start and start + count <= end, f"rows {start}+{count} outside their band")
        whole = start % PANEL_ROWS == 0 and (count % PANEL_ROWS == 0 or start + count == end)
        require(whole, f"rows {start}+{count} split a panel")
        if count == 0:
            return 0
        record = ctypes.addressof(matrix.handle.record.bands[index])
        return int(self._store_rows(record, _address(rows), count, start - first))

    def read_rows(self, matrix: Matrix) -> np.ndarray:
        rows = np.empty((matrix.n, matrix.k), np.float32)
        self._read_rows(matrix.handle.address, _address(rows))
        return rows

    def cache_layer(
        self, slab: np.ndarray, offset_bytes: int, page_stride_bytes: int, kv_heads: int, page_tokens: int,
        head_dim: int, dtype: DType,
    ) -> CacheLayer:  # fmt: skip
        layer_bytes = 2 * kv_heads * page_tokens * head_dim * dtype.bytes
        require(0 < head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0, f"head_dim {head_dim} odd or above {MAX_HEAD_DIM}")
        require(offset_bytes >= 0 and offset_bytes + layer_bytes <= page_stride_bytes, "a layer must fit into its page")
        require(offset_bytes % dtype.bytes == 0 and page_stride_bytes % dtype.bytes == 0, "a layer is not aligned")
        pages = slab.size // page_stride_bytes
        at = _address(slab) + offset_bytes
        record = _CacheRecord(at, page_stride_bytes, pages, kv_heads, page_tokens, head_dim, dtype is DType.BF16)
        handle = _Handle(record, ctypes.addressof(record))
        return CacheLayer(
            slab, offset_bytes, page_stride_bytes, pages, kv_heads, page_tokens, head_dim, dtype, handle
        )  # fmt: skip

    def copy_pages(self, slab: np.ndarray, page_bytes: int, source: int, target: int) -> None:
        pages = slab.size // page_bytes
        require(0 <= source < pages and 0 <= target < pages, f"copy_pages: {source} or {target} outside the slab")
        self._copy(_address(slab), source * page_bytes, target * page_bytes, page_bytes)

    def copy_bytes(self, target: np.ndarray, source: np.ndarray) -> None:
        require(target.size == source.size and target.flags.c_contiguous, "a copy has equal sizes")
        require(target.dtype == source.dtype == np.uint8 and source.flags.c_contiguous, "a copy is of flat bytes")
        require(target.flags.writeable, "a copy goes where it may write")
        self._stream(target.ctypes.data, source.ctypes.data, target.size)

    # Steps

    def capture(self, body: Callable[[], None]) -> Program:
        require(self._recording.tape is None, "one capture at a time on a thread")
        tape = self._recording.tape = _Tape([], [])
        try:
            body()
        finally:
            self._recording.tape = None
        return Program((_OpRecord * len(tape.ops))(*tape.ops), tape.rows, tape.taken, tuple(tape.kept))

    def replay(self, program: Program, ids: np.ndarray, inputs: StepInputs, rows: np.ndarray) -> None:
        require(ids.size <= program.rows and rows.size <= program.taken, "a step larger than the recording's arrays")
        self._call(program.ops, len(program.ops), _step(ids.size, ids, inputs, rows))

    def embed(self, ids: np.ndarray, table: Matrix, x: Array) -> None:
        require(x.shape == (ids.size, table.k), "embed: x has another shape")
        self._do(_Kind.EMBED, (table.handle, x), _step(ids.size, ids=ids))

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        rows, k = x.shape
        require(weight.size == k and out.shape == x.shape, "rms_norm: shapes differ")
        self._do(_Kind.NORM, (x, weight, out), _step(rows), (k,), eps)

    def linear(self, act: Array, matrix: Matrix, bias: Array | None, out: Array) -> None:
        rows, k = act.shape
        require(k == matrix.k and out.shape == (rows, matrix.n), "linear: shapes differ")
        self._do(_Kind.LINEAR, (act, matrix.handle, bias, out), _step(rows))

    def linear_add(self, act: Array, matrix: Matrix, x: Array) -> None:
        rows, k = act.shape
        require(k == matrix.k and x.shape == (rows, matrix.n), "linear_add: shapes differ")
        self._do(_Kind.LINEAR_ADD, (act, matrix.handle, None, x), _step(rows))

    def rope_and_cache(
        self, qkv: Array, q_norm: Array | None, k_norm: Array | None, eps: float, cos: Array, sin: Array,
        inputs: StepInputs, cache: CacheLayer, q: Array,
    ) -> None:  # fmt: skip
        rows, heads, head_dim = q.shape
        require(head_dim == cache.head_dim and cos.shape[1] * 2 == head_dim, "rope: head_dim differs")
        require(qkv.shape == (rows, (heads + 2 * cache.kv_heads) * head_dim), "rope: qkv has another shape")
        operands = (qkv, q_norm, k_norm, cos, sin, cache.handle, q)
        self._do(_Kind.ROPE, operands, _step(rows, inputs=inputs), (heads, cos.shape[0]), eps)

    def attention(self, q: Array, inputs: StepInputs, cache: CacheLayer, scale: float, out: Array) -> None:
        rows, heads, head_dim = q.shape
        require(heads % cache.kv_heads == 0 and head_dim == cache.head_dim, "attention: heads do not fit the cache")
        self._do(_Kind.ATTEND, (q, cache.handle, out), _step(rows, inputs=inputs), (heads,), scale)

    def silu_mul(self, gate_up: Array, out: Array) -> None:
        rows, f = out.shape
        require(gate_up.shape == (rows, 2 * f), "silu_mul: shapes differ")
        self._do(_Kind.SILU, (gate_up, out), _step(rows), (f,))

    def take_rows(self, x: Array, rows: np.ndarray, out: Array) -> None:
        have, k = x.shape
        require(out.shape == (rows.size, k), "take_rows: shapes differ")
        self._do(_Kind.TAKE, (x, out), _step(have, rows=rows), (k,))

    def _do(
        self, kind: _Kind, operands: tuple[Any, ...], step: _StepRecord, sizes: tuple[int, ...] = (), real: float = 0.0
    ) -> None:
        """Record an operation while a capture runs on this thread, else execute it."""
        at = (o if o is None else o.address if isinstance(o, _Handle) else _address(o) for o in operands)
        op = _OpRecord(kind, (_I * 3)(*sizes), real, (_P * 7)(*at))
        tape = self._recording.tape
        if tape is None:
            self._call(ctypes.pointer(op), 1, step)
            return
        tape.ops.append(op)
        tape.kept.append(operands)
        tape.rows = max(tape.rows, step.rows)
        tape.taken = max(tape.taken, step.taken)

    def _call(self, ops: Any, count: int, step: _StepRecord) -> None:
        at = self._run(self._pool, ctypes.cast(ops, _P), count, ctypes.addressof(step))
        if at >= 0:
            kind = _Kind(ops[at].kind).name
            require(False, f"{kind}: a token id, position, page or row is out of range")


def _step(
    count: int, ids: np.ndarray | None = None, inputs: StepInputs | None = None, rows: np.ndarray | None = None
) -> _StepRecord:
    """The record of `count` rows; arrays that an operation does not read stay null."""
    record = _StepRecord(rows=count)
    if ids is not None:
        record.ids = _address(ids)
    if rows is not None:
        record.taken, record.take = rows.size, _address(rows)
    if inputs is not None:
        record.sequences, record.table_width = inputs.page_table.shape
        record.positions, record.query_start = _address(inputs.positions), _address(inputs.query_start)
        record.page_table, record.row_sequence = _address(inputs.page_table), _address(inputs.row_sequence)
    return record


def _address(array: np.ndarray, at: Any = ctypes.addressof, view: Any = ctypes.c_char.from_buffer) -> int:
    """Where an array's data begins.

    The buffer protocol is four times faster than numpy's own attribute, refuses what is not contiguous, and cannot look
    at empty or read-only arrays: those take the slow way.
    """
    try:
        return at(view(array))  # type: ignore[no-any-return]
    except (TypeError, ValueError):
        require(array.flags.c_contiguous, "a kernel was given an array that is not contiguous")
        return int(array.__array_interface__["data"][0])
