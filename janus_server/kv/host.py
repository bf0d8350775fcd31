"""Warm copies: weights of models that are not on the device, kept in host memory within a budget.

`lifecycle` takes, fills and drops copies; the Brain decides which. A copy is anonymous memory of its own, in huge pages
where the system gives them, locked where it may be. Nothing here decides.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np

from janus_server.errors import require

_MADV_HUGEPAGE = 14
_HUGE_BYTES = 2 << 20


class HostCopy:
    """One model's weights in host memory; `array` is flat uint8 of the bytes asked for.

    locked says whether the system promised not to swap it out. digest is set once it is filled.
    """

    def __init__(self, size_bytes: int) -> None:
        require(size_bytes > 0, "a copy has at least one byte")
        # Rounded up and over: huge pages need an aligned start, which anonymous maps of that size get or can be cut to.
        self._map = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(_MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        skip = -whole.ctypes.data % _HUGE_BYTES
        self.array = whole[skip : skip + size_bytes]
        self.locked = _lock(self.array)
        self.digest: int | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.array)


class HostCopies:
    """All copies of a node by model, never more than `budget_bytes` together. Any thread."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._copies: dict[str, HostCopy] = {}
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(copy.size_bytes for copy in self._copies.values())

    def held(self) -> dict[str, int]:
        """Bytes by model."""
        with self._lock:
            return {model: copy.size_bytes for model, copy in self._copies.items()}

    def take(self, model: str, size_bytes: int) -> HostCopy | None:
        """Memory for a copy, to be filled by the caller; None when the budget or the system has too little."""
        with self._lock:
            require(model not in self._copies, f"{model} has a host copy already")
            if sum(copy.size_bytes for copy in self._copies.values()) + size_bytes > self.budget_bytes:
                return None
            try:
                copy = HostCopy(size_bytes)
            except OSError:
                return None
            self._copies[model] = copy
            return copy

    def get(self, model: str) -> HostCopy | None:
        """The model's copy, or None while there is none or it is not filled."""
        with self._lock:
            copy = self._copies.get(model)
        return copy if copy is not None and copy.digest is not None else None

    def drop(self, model: str) -> None:
        """Give a copy back; the system has its memory once nothing reads it any more. Unknown models are fine."""
        with self._lock:
            self._copies.pop(model, None)


def _lock(array: np.ndarray) -> bool:
    """Ask the system to keep the memory; unprivileged processes may lock little (8 MiB by default), which is fine."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mlock(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(array))) == 0
