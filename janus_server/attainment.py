"""Whether an application's requests got what was promised, and the counters that say how many did.

`judge` is pure: what was promised and how a request went, in; which kinds of promise it attains, out. `metrics` has one
`Families` and a `Counts` for each application; `http` tells it of requests that end or are turned away. Nothing here
reads a clock.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from janus_server.api.cluster import ApplicationView, Spread
from janus_server.applications import Application
from janus_server.errors import Refused
from janus_server.types import Promise, Request

# The kind of a `Refused` that is the server's fault: no room, no time left, a failure.
OUR_FAULT = "server_error"


class Outcome(enum.Enum):
    """How a request ended: as it should, through this server, by a limit or mistake of the client's, or by its leaving.

    FAILED covers errors, shutdowns and refusals for want of room or time; REFUSED the rest.
    """

    OK = "ok"
    FAILED = "failed"
    REFUSED = "refused"
    LEFT = "left"


class Kind(enum.Enum):
    """What can be attained: each promise, both of them, and every single token i by TTFT + i·TPOT."""

    TTFT = "ttft"
    TPOT = "tpot"
    OVERALL = "overall"
    TOKENS = "tokens"


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """How one request went. tpot_s is the mean time per token after the first, of its longest choice.

    ttft_s is None before a first token, tpot_s before a second. tokens over all choices; late ones came after
    TTFT + i·TPOT. open_s is how long it took in all.
    """

    outcome: Outcome
    open_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens: int = 0
    late_tokens: int = 0


def kinds_of(promise: Promise) -> tuple[Kind, ...]:
    """The kinds that a promise can be attained in."""
    single = [kind for kind, seconds in ((Kind.TTFT, promise.ttft_s), (Kind.TPOT, promise.tpot_s)) if seconds]
    if not single:
        return ()
    return (*single, Kind.OVERALL, Kind.TOKENS) if len(single) == 2 else (*single, Kind.OVERALL)


def judge(promise: Promise, course: Course) -> dict[Kind, bool]:
    """What a request attains of what was promised. A kind that cannot be judged is missing.

    What this server failed attains nothing. Whose client left is judged by what it got until then: not at all where it
    left in time before the first token. One token has no mean time: it attains any TPOT.
    """
    kinds = kinds_of(promise)
    if course.outcome is Outcome.REFUSED:
        return {}
    if course.outcome is Outcome.FAILED:
        return dict.fromkeys(kinds, False)
    found: dict[Kind, bool] = {}
    if promise.ttft_s is not None:
        if course.ttft_s is not None:
            found[Kind.TTFT] = course.ttft_s <= promise.ttft_s
        elif course.open_s > promise.ttft_s:
            found[Kind.TTFT] = False
    if promise.tpot_s is not None:
        if course.tpot_s is not None:
            found[Kind.TPOT] = course.tpot_s <= promise.tpot_s
        elif course.outcome is Outcome.OK:
            found[Kind.TPOT] = True
    promised = [kind for kind in kinds if kind in (Kind.TTFT, Kind.TPOT)]
    if not all(found.values()):
        found[Kind.OVERALL] = False
    elif promised and all(kind in found for kind in promised):
        found[Kind.OVERALL] = True
    if Kind.TOKENS in kinds and Kind.TTFT in found:
        found[Kind.TOKENS] = found[Kind.TTFT] and course.late_tokens == 0
    return found


class Families:
    """The series of all applications, in one registry. Labels are names of the configuration and fixed words."""

    def __init__(
        self, registry: CollectorRegistry, ttft_buckets_s: Sequence[float], tpot_buckets_s: Sequence[float]
    ) -> None:
        self.ttft_s, self.tpot_s = ttft_buckets_s, tpot_buckets_s
        own, kind = ("application",), ("application", "kind")
        self.requests = Counter(
            "janus_application_requests", "Requests ended, by outcome", ("application", "model", "outcome"),
            registry=registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "janus_application_ttft_seconds", "Arrival to first token of a request", own, buckets=ttft_buckets_s,
            registry=registry,
        )  # fmt: skip
        self.tpot = Histogram(
            "janus_application_tpot_seconds", "Mean time per token after the first of a request", own,
            buckets=tpot_buckets_s, registry=registry,
        )  # fmt: skip
        self.promised = Counter(
            "janus_application_promised", "Requests judged by a promise, by kind", kind, registry=registry
        )
        self.attained = Counter(
            "janus_application_attained", "Requests that attained it, by kind", kind, registry=registry
        )
        self.tokens = Counter("janus_application_tokens", "Tokens generated", own, registry=registry)
        self.late_tokens = Counter(
            "janus_application_late_tokens", "Tokens i that came after TTFT + i·TPOT", own, registry=registry
        )
        self.good_tokens = Counter(
            "janus_application_goodput_tokens", "Tokens of requests that attained all that was promised", own,
            registry=registry,
        )  # fmt: skip
        self.promise_s = Gauge("janus_application_promise_seconds", "What is promised", kind, registry=registry)
        self.target = Gauge(
            "janus_application_target_share", "Share of requests that are to attain it", own, registry=registry
        )
        self.priority = Gauge("janus_application_priority", "Higher goes first", own, registry=registry)


Told = Callable[[Request, Course, bool | None], None]
"""Hears how each request went, and whether it attained all that was promised; None where that cannot be said."""


class Totals:
    """One application's counts, as plain numbers too: reading them of the series takes a hundred times as long."""

    def __init__(self, ttft_bounds_s: Sequence[float], tpot_bounds_s: Sequence[float]) -> None:
        self._requests = self._failed = self._ended = self._attained = 0
        self._ttft, self._tpot = _none(ttft_bounds_s), _none(tpot_bounds_s)

    def add(self, course: Course, found: Mapping[Kind, bool]) -> None:
        """How one more request went, and what it attained."""
        self._requests += 1
        self._failed += course.outcome is Outcome.FAILED
        self._ended += Kind.OVERALL in found
        self._attained += found.get(Kind.OVERALL, False)
        for spread, time_s in ((self._ttft, course.ttft_s), (self._tpot, course.tpot_s)):
            if time_s is not None:
                spread.counts[bisect.bisect_left(spread.bounds_s, time_s)] += 1

    def view(self, application: Application) -> ApplicationView:
        """What was counted so far."""
        promise = application.promise
        return ApplicationView(
            application=application.name, model=application.model, ttft_s=promise.ttft_s, tpot_s=promise.tpot_s,
            attain=promise.attain if kinds_of(promise) else None, requests=self._requests, failed=self._failed,
            ended=self._ended, attained=self._attained, ttft=_copy(self._ttft), tpot=_copy(self._tpot),
        )  # fmt: skip


def _none(bounds_s: Sequence[float]) -> Spread:
    return Spread(bounds_s=list(map(float, bounds_s)), counts=[0] * (len(bounds_s) + 1))


def _copy(spread: Spread) -> Spread:
    return Spread(bounds_s=spread.bounds_s, counts=list(spread.counts))


class Counts:
    """One application's series with their labels resolved."""

    def __init__(self, families: Families, application: Application, told: Told = lambda *_: None) -> None:
        self._told = told
        name, promise = application.name, application.promise
        self.promise = promise
        self.ttft, self.tpot = families.ttft.labels(name), families.tpot.labels(name)
        self.totals = Totals(families.ttft_s, families.tpot_s)
        self._requests = {one: families.requests.labels(name, application.model, one.value) for one in Outcome}
        kinds = kinds_of(promise)
        self._promised = {kind: families.promised.labels(name, kind.value) for kind in kinds}
        self._attained = {kind: families.attained.labels(name, kind.value) for kind in kinds}
        self._tokens = families.tokens.labels(name)
        # Only where there is something to keep: a 0 would read as a promise of no seconds, or as nothing kept.
        self._good_tokens = families.good_tokens.labels(name) if kinds else None
        self._late_tokens = families.late_tokens.labels(name) if Kind.TOKENS in kinds else None
        families.priority.labels(name).set(application.priority)
        if kinds:
            families.target.labels(name).set(promise.attain)
        for kind, seconds in ((Kind.TTFT, promise.ttft_s), (Kind.TPOT, promise.tpot_s)):
            if seconds is not None:
                families.promise_s.labels(name, kind.value).set(seconds)

    def ended(self, request: Request, course: Course) -> None:
        """One request is over. One that generates nothing has no tokens that could be late."""
        self._requests[course.outcome].inc()
        self._tokens.inc(course.tokens)
        if course.ttft_s is not None:
            self.ttft.observe(course.ttft_s)
        if course.tpot_s is not None:
            self.tpot.observe(course.tpot_s)
        found = judge(self.promise, course) if self._promised and request.max_tokens else {}
        self._told(request, course, found.get(Kind.OVERALL))
        self.totals.add(course, found)
        for kind, attained in found.items():
            self._promised[kind].inc()
            self._attained[kind].inc(attained)
        if self._late_tokens is not None:
            self._late_tokens.inc(course.late_tokens)
        if self._good_tokens is not None and found.get(Kind.OVERALL):
            self._good_tokens.inc(course.tokens)

    def turned_away(self, requests: Sequence[Request], refused: Refused) -> None:
        """Requests that were not let in."""
        course = Course(outcome=outcome_of(refused), open_s=0.0)
        for request in requests:
            self.ended(request, course)


def outcome_of(refused: Refused) -> Outcome:
    """What a refusal makes of the requests that it ends."""
    return Outcome.FAILED if refused.kind == OUR_FAULT else Outcome.REFUSED
