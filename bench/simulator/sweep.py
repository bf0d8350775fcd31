"""How far something can be pushed until too few promises are kept: the load upwards, or promises downwards.

`search` doubles from one end and then halves the gap, by ratios; it knows nothing of scenarios. What it answers was
run, and so was what is beyond. More load does not always keep fewer promises: the answer is the first limit met from
the easy end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from janus_server.errors import BadConfig


class Limit(NamedTuple):
    """value is the farthest at which enough was kept, None where not even the easy end was; beyond is the nearest at
    which it was not, None where the hard end was not hard enough. tried are the shares kept by value."""

    value: float | None
    beyond: float | None
    tried: Mapping[float, float]


def search(attempt: Callable[[float], float], target: float, *, easy: float, hard: float, within: float) -> Limit:
    """attempt(value) is the share kept. easy may be above hard or below it. within: beyond is at most so much farther
    than value, as a part of it."""
    if not 0.0 < target <= 1.0:
        raise BadConfig(f"the target is a share of requests, above 0 and at most 1, not {target:g}")
    if not (0.0 < easy < math.inf and 0.0 < hard < math.inf) or easy == hard or within <= 0.0:
        raise BadConfig(f"a sweep goes from one positive number to another: not from {easy:g} to {hard:g}")
    tried: dict[float, float] = {}
    ratio = 2.0 if hard > easy else 0.5

    def enough(value: float) -> bool:
        tried[value] = attempt(value)
        return tried[value] >= target

    good, at = None, easy
    while enough(at):
        if at == hard:
            return Limit(at, None, tried)
        good, at = at, min(at * ratio, hard) if ratio > 1.0 else max(at * ratio, hard)
    bad = at
    while good is not None and max(bad / good, good / bad) > 1.0 + within:
        middle = _rounded(math.sqrt(good * bad))
        if not min(good, bad) < middle < max(good, bad):
            break
        good, bad = (middle, bad) if enough(middle) else (good, middle)
    return Limit(good, bad, tried)


def _rounded(value: float) -> float:
    """Three digits: what a person can type to have the run again."""
    return float(f"{value:.3g}")
