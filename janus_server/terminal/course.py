"""How requests went over the last minute, from counts that only grow: what `janus status` shows of applications. Pure.

`Course.add` takes each sight of the cluster and keeps what came since the one before it. A node that began anew counts
from nothing; one that is seen for the first time is told apart from one whose requests all came just now.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from janus_server.api.cluster import ApplicationView, ClusterView, Come, NodeView, Spread

SPAN_S: Final = 60.0
_STEP_S: Final = 10.0


class Sum(msgspec.Struct):
    """Of one application, over nodes and time. The spreads are None before anything was counted."""

    view: ApplicationView
    requests: int = 0
    failed: int = 0
    ended: int = 0
    attained: int = 0
    ttft: Spread | None = None
    tpot: Spread | None = None


class Course:
    """What came in the last `span_s`."""

    def __init__(self, span_s: float = SPAN_S) -> None:
        self._span_s = span_s
        self._before: dict[str, NodeView] = {}
        self._news: deque[tuple[float, float, list[ApplicationView]]] = deque()
        self._last_s: float | None = None

    def recall(self, view: ClusterView) -> None:
        """What nodes tell of the time before the first sight, in steps."""
        steps: dict[int, list[ApplicationView]] = {}
        for node in view.nodes:
            now = {one.application: one for one in node.applications}
            for stretch in node.past:
                step = steps.setdefault(int(stretch.ago_s / _STEP_S), [])
                step += [_come(one, now[one.application]) for one in stretch.came if one.application in now]
        for i in sorted(steps, reverse=True):
            if i * _STEP_S < self._span_s:
                self._news.append((view.time - i * _STEP_S, _STEP_S, steps[i]))

    def add(self, view: ClusterView) -> None:
        """The next sight, later than the one before."""
        news: list[ApplicationView] = []
        for node in view.nodes:
            if node.trouble is not None:
                continue
            before = self._before.get(node.node)
            if before is not None:
                news += since(before, node)
            self._before[node.node] = node
        if self._last_s is not None and view.time > self._last_s:
            self._news.append((view.time, view.time - self._last_s, news))
        self._last_s = view.time
        while self._news and self._news[0][0] <= view.time - self._span_s:
            self._news.popleft()

    @property
    def over_s(self) -> float:
        """The time that it tells of; 0 before the second sight where nothing was recalled."""
        return sum(took_s for _, took_s, _ in self._news)

    def sums(self) -> dict[str, Sum]:
        """By application."""
        return total(itertools.chain.from_iterable(news for _, _, news in self._news))


def _come(one: Come, of: ApplicationView) -> ApplicationView:
    return msgspec.structs.replace(
        of, requests=one.requests, failed=one.failed, ended=one.ended, attained=one.attained,
        ttft=Spread(bounds_s=of.ttft.bounds_s, counts=one.ttft),
        tpot=Spread(bounds_s=of.tpot.bounds_s, counts=one.tpot),
    )  # fmt: skip


def since(before: NodeView, now: NodeView) -> list[ApplicationView]:
    """What was counted between two sights of a node: all of it where its process began anew."""
    old = {} if now.up_s < before.up_s else {one.application: one for one in before.applications}
    return [less(one, old.get(one.application)) for one in now.applications]


def less(now: ApplicationView, before: ApplicationView | None) -> ApplicationView:
    """Nothing where any count fell: another process counts there, and what it counted when is not known."""
    if before is None:
        return now
    counts = {name: getattr(now, name) - getattr(before, name) for name in _COUNTS}
    ttft, tpot = _less(now.ttft, before.ttft), _less(now.tpot, before.tpot)
    if ttft is None or tpot is None or min(counts.values()) < 0:
        counts, ttft, tpot = dict.fromkeys(_COUNTS, 0), _none(now.ttft), _none(now.tpot)
    return msgspec.structs.replace(now, **counts, ttft=ttft, tpot=tpot)


_COUNTS: Final = ("requests", "failed", "ended", "attained")


def _less(now: Spread, before: Spread) -> Spread | None:
    if now.bounds_s != before.bounds_s:
        return None
    counts = [new - old for new, old in zip(now.counts, before.counts, strict=True)]
    return None if min(counts) < 0 else Spread(bounds_s=now.bounds_s, counts=counts)


def _none(like: Spread) -> Spread:
    return Spread(bounds_s=like.bounds_s, counts=[0] * len(like.counts))


def total(views: Iterable[ApplicationView]) -> dict[str, Sum]:
    """All nodes' counts of each application together."""
    found: dict[str, Sum] = {}
    for one in views:
        into = found.setdefault(one.application, Sum(view=one))
        into.requests += one.requests
        into.failed += one.failed
        into.ended += one.ended
        into.attained += one.attained
        into.ttft, into.tpot = _both(into.ttft, one.ttft), _both(into.tpot, one.tpot)
    return found


def _both(one: Spread | None, other: Spread) -> Spread:
    """Nodes of one release have the same bounds; of others the first is shown."""
    if one is None or one.bounds_s != other.bounds_s:
        return other if one is None else one
    counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
    return Spread(bounds_s=one.bounds_s, counts=counts)


def quantile(spread: Spread | None, share: float) -> float | None:
    """The value that this share of all is below, evenly spread within its bounds; None of nothing.

    Beyond the last bound it is that bound. Example: bounds 1 and 2, counts 2, 2, 0: the median is 1, 0.75 gives 1.5.
    """
    if spread is None or not spread.bounds_s or not (count := sum(spread.counts)):
        return None
    rank, upto = share * count, list(itertools.accumulate(spread.counts))
    i = min(bisect.bisect_left(upto, rank), len(spread.counts) - 1)
    while not spread.counts[i]:  # rank 0 lies before the first that there is
        i += 1
    return _within(spread.bounds_s, i, (rank - (upto[i] - spread.counts[i])) / spread.counts[i])


def _within(bounds_s: Sequence[float], i: int, part: float) -> float:
    if i >= len(bounds_s):
        return bounds_s[-1]
    low_s = bounds_s[i - 1] if i else 0.0
    return low_s + part * (bounds_s[i] - low_s)
