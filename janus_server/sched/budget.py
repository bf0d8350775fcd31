"""How few devices are shared out among models that want more replicas than there is room for. Pure arithmetic.

`scaling` and `pools` ask it. Everybody gets one replica before anybody gets two; beyond that the important come first,
and models of one priority give up the same part of what they want.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

# Of what it had: a share that differs by less than this part, or by one, is about as many.
_FEW: Final = 0.15


class Claim(msgspec.Struct, frozen=True):
    """Replicas that a model wants, of so many devices each. Of one priority the hottest gets its first one first."""

    model: str
    replicas: int
    devices: int = 1
    priority: int = 0
    heat: float = 0.0


def share_out(claims: Sequence[Claim], devices: int) -> dict[str, int]:
    """Replicas of each model, in all no more than fit on `devices`; what was wanted where that fits.

    Shares of one priority are proportional to what is wanted beyond the first replica, cut to whole replicas, and the
    rest goes to the largest remainders; 0 for the coldest where there is not even one for everybody.

    Example: of 8 devices, "a" wants 8, "b" 3 and "c" 1. Each gets 1; 5 are left for 7 and 2: 3.89 and 1.11, so 3 and
    1, and the last one to "a": 5, 2 and 1.
    """
    if sum(claim.replicas * claim.devices for claim in claims) <= devices:
        return {claim.model: claim.replicas for claim in claims}
    given = {claim.model: 0 for claim in claims}
    left = devices
    for claim in sorted(claims, key=lambda c: (-c.priority, -c.heat, c.model)):
        if claim.replicas and claim.devices <= left:
            given[claim.model] = 1
            left -= claim.devices
    for peers in _priorities([claim for claim in claims if given[claim.model]]):
        left = _share(peers, given, left)
    return given


def settled(
    claims: Sequence[Claim], given: Mapping[str, int], before: Mapping[str, int], devices: int
) -> dict[str, int]:
    """`given`, without moving a few replicas to and fro where devices are short: every change of what anybody wants
    would change everybody's share a little.

    Who had about as many, among those of the lowest priority, keeps what it had; what that takes is taken from those
    among them that gain most.
    """
    kept = {c.model: min(before.get(c.model, 0), c.replicas) for c in claims}
    if all(given[c.model] >= c.replicas for c in claims) or not any(given[c.model] < kept[c.model] for c in claims):
        return dict(given)
    lowest = min(c.priority for c in claims)
    out = dict(given)
    for c in claims:
        few = max(1.0, _FEW * kept[c.model])
        if c.priority == lowest and kept[c.model] and abs(given[c.model] - kept[c.model]) <= few:
            out[c.model] = kept[c.model]
    over = sum(out[c.model] * c.devices for c in claims) - devices
    gains = sorted((c for c in claims if c.priority == lowest and out[c.model] > max(kept[c.model], 1)),
                   key=lambda c: (c.priority, kept[c.model] - out[c.model], c.model))  # fmt: skip
    for c in gains:
        back = min(out[c.model] - max(kept[c.model], 1), max(0, -(-over // c.devices)))
        out[c.model] -= back
        over -= back * c.devices
    if over > 0:
        return dict(given)
    for c in sorted(claims, key=lambda c: (-c.priority, -c.heat, c.model)):
        if given[c.model] > out[c.model] and c.devices <= -over:
            out[c.model] += 1
            over += c.devices
    return out


def _priorities(claims: Sequence[Claim]) -> Iterator[list[Claim]]:
    """Highest first, by model within."""
    for priority in sorted({claim.priority for claim in claims}, reverse=True):
        yield sorted((claim for claim in claims if claim.priority == priority), key=lambda c: c.model)


def _share(claims: Sequence[Claim], given: dict[str, int], left: int) -> int:
    """What is left afterwards."""
    wanted = sum((claim.replicas - 1) * claim.devices for claim in claims)
    part = min(1.0, left / wanted) if wanted else 0.0
    ideal = {claim.model: (claim.replicas - 1) * part for claim in claims}
    for claim in claims:
        more = math.floor(ideal[claim.model] + 1e-9)
        given[claim.model] += more
        left -= more * claim.devices
    # Largest remainder first; again where devices are left because some take several at once.
    order = sorted(claims, key=lambda c: (math.floor(ideal[c.model] + 1e-9) - ideal[c.model], -c.heat, c.model))
    short = order
    while short:
        for claim in short:
            if given[claim.model] < claim.replicas and claim.devices <= left:
                given[claim.model] += 1
                left -= claim.devices
        short = [claim for claim in short if given[claim.model] < claim.replicas and claim.devices <= left]
    return left
