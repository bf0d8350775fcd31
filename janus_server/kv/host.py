"""Warm copies: weights of models that are not on the device, kept in host memory within a budget.

`lifecycle` takes, fills and drops copies; the Brain decides which. Memory comes in chunks of one arena and is kept when
a copy goes: the first touch of memory that a virtual machine never used costs 7 ms for 2 MiB, every later one nothing.
Huge pages where the system gives them, locked where it may be. Nothing here decides.
"""

from __future__ import annotations

import ctypes
import heapq
import mmap
import threading

import numpy as np

from janus_server.errors import require
from janus_server.kv.move import Pace
from janus_server.kv.touched import Touched
from janus_server.kv.vmm_cpu import runs

CHUNK_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MAP_NORESERVE = 0x4000


class HostCopy:
    """One model's weights in host memory, as runs of chunks: `parts` are flat uint8, `size_bytes` together.

    digest is set once it is filled.
    """

    def __init__(self, chunks: tuple[int, ...], parts: tuple[np.ndarray, ...]) -> None:
        self.chunks = chunks
        self.parts = parts
        self.size_bytes = sum(map(len, parts))
        self.digest: int | None = None


class HostCopies:
    """All copies of a node by model, never more than `budget_bytes` together. Any thread."""

    def __init__(self, budget_bytes: int) -> None:
        self._chunks = budget_bytes // CHUNK_BYTES
        self.budget_bytes = self._chunks * CHUNK_BYTES
        self._free = list(range(self._chunks))
        self._copies: dict[str, HostCopy] = {}
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._arena = _arena(self._chunks)
        self.touched = Touched(self._chunks, self._provide)

    def held(self) -> dict[str, int]:
        """Bytes by model, whole chunks."""
        with self._lock:
            return {model: len(copy.chunks) * CHUNK_BYTES for model, copy in self._copies.items()}

    def take(self, model: str, size_bytes: int) -> HostCopy | None:
        """Memory for a copy, to be filled by the caller; None when the budget has too little left."""
        count = chunks_for(size_bytes)
        with self._lock:
            require(model not in self._copies, f"{model} has a host copy already")
            if count > len(self._free):
                return None
            chunks = tuple(heapq.heappop(self._free) for _ in range(count))
            copy = self._copies[model] = HostCopy(chunks, self._parts(chunks, size_bytes))
        return copy

    def prepare(self, copy: HostCopy, pace: Pace) -> int:
        """Have the system provide what of a copy's memory was never used, and lock it; how many chunks that were.

        Unprivileged processes may lock little, and go without. Raises Stopped when the pace says so.
        """
        fresh = self.touched.prepare(runs(copy.chunks), pace)
        for part in copy.parts:
            self._libc.mlock(part.ctypes.data, len(part))
        return fresh

    def get(self, model: str) -> HostCopy | None:
        """The model's copy, or None while there is none or it is not filled."""
        with self._lock:
            copy = self._copies.get(model)
        return copy if copy is not None and copy.digest is not None else None

    def drop(self, model: str) -> None:
        """Give a copy's memory to whoever takes one next; nothing may read it any more. Unknown models are fine."""
        with self._lock:
            copy = self._copies.pop(model, None)
            for chunk in copy.chunks if copy is not None else ():
                heapq.heappush(self._free, chunk)

    def _provide(self, chunk: int, count: int) -> None:
        """Refusal (an old kernel, memory short) is fine: the memory then comes when it is first written."""
        address = self._arena.ctypes.data + chunk * CHUNK_BYTES
        self._libc.madvise(address, count * CHUNK_BYTES, _MADV_POPULATE_WRITE)

    def _parts(self, chunks: tuple[int, ...], size_bytes: int) -> tuple[np.ndarray, ...]:
        parts = []
        left = size_bytes
        for first, count in runs(chunks):
            size = min(count * CHUNK_BYTES, left)
            parts.append(self._arena[first * CHUNK_BYTES : first * CHUNK_BYTES + size])
            left -= size
        return tuple(parts)


def chunks_for(size_bytes: int) -> int:
    """Chunks that a copy of that size takes."""
    return -(-size_bytes // CHUNK_BYTES)


def _arena(chunks: int) -> np.ndarray:
    """Address space for all chunks, aligned to them; the system gives memory when a chunk is first written."""
    if not chunks:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    space = mmap.mmap(-1, (chunks + 1) * CHUNK_BYTES, flags=flags)
    space.madvise(_MADV_HUGEPAGE)
    whole = np.frombuffer(space, dtype=np.uint8)
    skip = -whole.ctypes.data % CHUNK_BYTES
    return whole[skip : skip + chunks * CHUNK_BYTES]
