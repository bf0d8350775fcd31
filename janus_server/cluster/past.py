"""What came to a node in the last ten minutes, as differences of counts that only grow: a page that is opened now shows
them. Pure.

`lookout` ends a stretch of it every ten seconds and tells of it when it is asked to. What another node tells of its
past is checked here too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from janus_server.api.cluster import ApplicationView, Come, NodeView, Spread, Stretch

STRETCH_S: Final = 10.0
KEPT: Final = 60
# Of one stretch: those with the most requests.
MOST_APPLICATIONS: Final = 50


class Past:
    """Of one node's own applications. All times are on one clock, seconds."""

    def __init__(self, now: float) -> None:
        self._since_s = now
        self._before: dict[str, ApplicationView] = {}
        self._kept: deque[tuple[float, float, list[Come]]] = deque(maxlen=KEPT)  # from, until

    def end(self, counted: Sequence[ApplicationView], now: float) -> None:
        """A stretch ends; counted is all that was counted since the process began."""
        self._kept.append((self._since_s, now, _came(self._before, counted)))
        self._since_s, self._before = now, {one.application: one for one in counted}

    def told(self, counted: Sequence[ApplicationView], now: float) -> list[Stretch]:
        """All of it, the last stretch up to now, so that nothing is missing before what comes next."""
        kept = [*self._kept, (self._since_s, now, _came(self._before, counted))]
        return [
            Stretch(ago_s=round(now - until, 3), over_s=round(until - since, 3), came=came)
            for since, until, came in kept
        ]


def _came(before: Mapping[str, ApplicationView], counted: Iterable[ApplicationView]) -> list[Come]:
    found = [one for view in counted if (one := _since(before.get(view.application), view)) is not None]
    return sorted(found, key=lambda one: -one.requests)[:MOST_APPLICATIONS]


def _since(before: ApplicationView | None, now: ApplicationView) -> Come | None:
    """None where nothing was counted."""
    if before is None:
        before = ApplicationView(application="", model="", ttft=_none(now.ttft), tpot=_none(now.tpot))
    come = Come(
        application=now.application, requests=now.requests - before.requests, failed=now.failed - before.failed,
        ended=now.ended - before.ended, attained=now.attained - before.attained,
        ttft=_less(now.ttft, before.ttft), tpot=_less(now.tpot, before.tpot),
    )  # fmt: skip
    return come if any((come.requests, come.failed, come.ended, *come.ttft, *come.tpot)) else None


def _none(like: Spread) -> Spread:
    return Spread(bounds_s=like.bounds_s, counts=[0] * len(like.counts))


def _less(now: Spread, before: Spread) -> list[int]:
    return [new - old for new, old in zip(now.counts, before.counts, strict=True)]


def sound(view: NodeView) -> list[Stretch]:
    """The past that a node tells of, so far as it fits its own applications."""
    bounds = {one.application: (len(one.ttft.counts), len(one.tpot.counts)) for one in view.applications}
    found = [one for one in view.past[-KEPT - 1 :] if one.ago_s >= 0.0 and one.over_s >= 0.0]
    for stretch in found:
        stretch.came = [
            one for one in stretch.came[:MOST_APPLICATIONS]
            if bounds.get(one.application) == (len(one.ttft), len(one.tpot))
            and min(one.requests, one.failed, one.ended, one.attained, *one.ttft, *one.tpot) >= 0
        ]  # fmt: skip
    return found
