"""How few devices could hold these models at best: cheap lower bounds, each a short proof.

`packing` stops looking for a better packing where it meets one, and the benchmark counts the hard cases, where the
optimum lies above the volume. Never a guess: no packing uses fewer. Pure.
"""

from __future__ import annotations

import numpy as np

from .bins import Ints, Items
from .demand import WHOLE


def volume(models: Items) -> int:
    """The most over dimensions of the sum of shares, rounded up."""
    if not models.shards:
        return 0
    total = np.asarray(models.shards, dtype=np.int64) @ models.need
    return int((-(-total // WHOLE)).max())


def bound(models: Items, enough: int | None = None) -> int:
    """The best of these, looked for until one reaches `enough`: the volume; the shards of a model; the models a device
    may hold; large shares that exclude each other in one dimension (Martello and Toth's L2).

    Example: needs of 0.6, 0.6 and 0.5 in one dimension have a volume of 1.7 and a bound of 3.
    """
    if not models.shards:
        return 0
    shards = np.asarray(models.shards, dtype=np.int64)
    least = max(volume(models), int(shards.max()), -(-int(shards.sum()) // models.most))
    for share in models.need.T:
        if enough is None or least < enough:
            least = max(least, _l2(share, shards))
    return least


def clique(models: Items) -> int:
    """Shards that exclude each other pairwise: each needs a device of its own. O(models²), so asked for last.

    Grown greedily from each of three orders; a maximal set is a bound whichever it is.
    """
    if not models.shards:
        return 0
    need, shards = models.need, np.asarray(models.shards, dtype=np.int64)
    apart = np.asarray((need[:, None, :] + need[None, :, :] > WHOLE).any(2))
    weight = apart @ shards
    found = 0
    for key in (weight, need.max(1), need.sum(1)):
        open_ = np.ones(len(shards), dtype=bool)
        size = 0
        for i in np.argsort(-key, kind="stable").tolist():
            if open_[i]:
                size += int(shards[i])
                open_ &= apart[i]
        found = max(found, size)
    return found


def _l2(share: Ints, shards: Ints) -> int:
    """For a threshold t ≤ 1/2: shares above 1/2 lie one a device; those from t to 1/2 go beside the ones up to 1 - t,
    or to further devices. The best threshold is one of the shares."""
    half = WHOLE // 2
    order = np.argsort(share, kind="stable")
    s, n = share[order], shards[order]
    many = np.concatenate(([0], np.cumsum(n)))
    sums = np.concatenate(([0], np.cumsum(n * s)))
    middle = int(np.searchsorted(s, half, side="right"))
    thresholds = np.concatenate(([0], s[:middle]))
    low = np.searchsorted(s, thresholds, side="left")
    high = np.searchsorted(s, WHOLE - thresholds, side="right")
    large = many[-1] - many[middle]
    room = (many[high] - many[middle]) * WHOLE - (sums[high] - sums[middle])
    extra = np.maximum(0, sums[middle] - sums[low] - room)
    return int((large - (-extra // WHOLE)).max())
