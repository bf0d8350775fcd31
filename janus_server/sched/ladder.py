"""Which replica counts an oracle is asked about, and the one that its answer chooses. Pure arithmetic.

`scaling` uses both. Counts near the present one are asked about one by one, far ones in steps that grow, so that a
cluster of thousands is a few dozen questions and what is out of reach is told from what is only far away.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

_STEP: Final = 1.5
# Of attainment: what twice as many replicas must add to be worth having where the target is out of reach.
_HARDLY: Final = 0.05


class Choice(msgspec.Struct, frozen=True):
    """The count, its attainment, and whether that meets the target."""

    count: int
    share: float
    met: bool


def ladder(near: int, most: int) -> tuple[int, ...]:
    """1 … near, rounded up to a multiple of 8, then each half as many again, up to `most`.

    Example: near 5 of at most 30: 1 … 8, 12, 18, 27, 30.
    """
    near = min(most, 8 * -(-near // 8))
    counts, count = list(range(1, near + 1)), near
    while count < most:
        count = min(most, int(count * _STEP))
        counts.append(count)
    return tuple(counts)


def choose(counts: Sequence[int], shares: Sequence[float] | npt.NDArray[np.float64], target: float) -> Choice:
    """The fewest that meet the target; where none does, as many as can be halved no more at little loss.

    Example: 1, 2, 4, 8 replicas attain 0.2, 0.7, 0.89 and 0.9, and the target is 0.95: half of 8 loses 0.01, half of
    4 loses 0.19. So 4.
    """
    if shares[-1] >= target:
        i = next(i for i, share in enumerate(shares) if share >= target)
        return Choice(counts[i], float(shares[i]), True)
    i = len(counts) - 1
    while i:
        half = bisect.bisect_right(counts, counts[i] // 2) - 1
        if half < 0 or shares[half] < shares[i] - _HARDLY:
            break
        i = half
    return Choice(counts[i], float(shares[i]), False)
