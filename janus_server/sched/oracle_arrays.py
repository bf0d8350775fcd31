"""The arrays within the oracle's records: little-endian float64 as bytes, to numpy and back.

Apart from the records, so that whoever only passes those on need not load numpy. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def pack(values: Sequence[float] | Array) -> bytes:
    return np.ascontiguousarray(values, dtype="<f8").tobytes()


def unpack(data: bytes, columns: int = 0) -> Array:
    """[n], or [n, columns]."""
    array = np.frombuffer(data, dtype="<f8")
    return array.reshape(-1, columns) if columns else array


def within(values: Array, least: float, most: float) -> Array:
    """np.clip in half the time, where arrays are small."""
    return np.minimum(np.maximum(values, least), most)
