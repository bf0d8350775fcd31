"""What outcomes amount to: percentiles, attainment of promises, throughput, cold starts, the client's own lateness.

`report` puts these into words, `plots` into pictures. Pure, numpy only. Attainment counts every request that was sent:
one that failed has kept no promise. Times are seconds unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from .records import Outcome, Slo

# What --percentile-metrics takes, and the value of each for one outcome (seconds).
METRICS: Final = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")


@dataclasses.dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of all requests sent that kept a promise; None where nothing of the kind is promised.

    overall: every promised part holds. strict: token i came within TTFT + i·TPOT, for every i. good is how many kept
    all of it, good_tokens what those were answered with.
    """

    requests: int
    ttft: float | None
    tpot: float | None
    e2el: float | None
    overall: float | None
    strict: float | None
    good: int
    good_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class ColdStart:
    """A model's first request of all: its seconds to the first token, and how many requests were sent meanwhile."""

    model: str
    ttft_s: float | None
    first_token_at_s: float
    sent_before_first_token: int


def values_s(outcomes: Iterable[Outcome], metric: str) -> np.ndarray:
    """[n] f64 of one of METRICS over the outcomes that ended well."""
    good = [o for o in outcomes if o.ok]
    if metric == "itl":
        parts = [np.frombuffer(o.gaps_s, np.float32) for o in good if len(o.gaps_s)]
        return np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)
    found = [_value_s(o, metric) for o in good]
    return np.array([v for v in found if v is not None], np.float64)


def summary_ms(values: np.ndarray, metric: str, percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std and the percentiles in milliseconds, by vLLM's names; {} of nothing."""
    if not len(values):
        return {}
    ms = values * 1e3
    found = {
        f"mean_{metric}_ms": float(ms.mean()),
        f"median_{metric}_ms": float(np.median(ms)),
        f"std_{metric}_ms": float(ms.std()),
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(ms, percentile))
    return found


def kept(outcome: Outcome, slo: Slo) -> dict[str, bool]:
    """Which parts of a promise one request kept, and "overall"; parts that are not promised are absent.

    A single token has no TPOT and keeps it.
    """
    found: dict[str, bool] = {}
    for part, limit_s in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2el", slo.e2el_s)):
        if limit_s is not None:
            value_s = _value_s(outcome, part)
            found[part] = outcome.ok and (value_s <= limit_s if value_s is not None else part == "tpot")
    if found:
        found["overall"] = all(found.values())
    return found


def kept_strictly(outcome: Outcome, slo: Slo) -> bool | None:
    """Whether token i came within TTFT + i·TPOT of the request's start; None unless both are promised.

    An event's tokens count from the first of them. Where the server does not say how many an event carried it counts
    as one, which makes deadlines earlier, never later.
    """
    if slo.ttft_s is None or slo.tpot_s is None:
        return None
    ttft_s = outcome.ttft_s
    if not outcome.ok or ttft_s is None:
        return False
    arrivals_s = ttft_s + np.concatenate(
        ([0.0], np.cumsum(np.frombuffer(outcome.gaps_s, np.float32), dtype=np.float64))
    )
    if len(outcome.carried):
        index = np.cumsum(np.concatenate(([0], np.frombuffer(outcome.carried, np.uint16)[:-1].astype(np.int64))))
    else:
        index = np.arange(len(arrivals_s))
    # Gaps are float32: a microsecond of slack keeps rounding from breaking a promise that was kept exactly.
    return bool(np.all(arrivals_s <= slo.ttft_s + index * slo.tpot_s + 1e-6))


def attainment(pairs: Sequence[tuple[Outcome, Slo]]) -> Attainment:
    """Over requests, each with its own promise."""
    counts = {part: [0, 0] for part in ("ttft", "tpot", "e2el", "overall", "strict")}
    good = good_tokens = 0
    for outcome, slo in pairs:
        found: dict[str, bool | None] = {**kept(outcome, slo), "strict": kept_strictly(outcome, slo)}
        for part, holds in found.items():
            if holds is not None:
                counts[part][0] += holds
                counts[part][1] += 1
        if found.get("overall"):
            good += 1
            good_tokens += outcome.output_tokens
    shares = {part: held / total if total else None for part, (held, total) in counts.items()}
    return Attainment(requests=len(pairs), good=good, good_tokens=good_tokens, **shares)


def cold_starts(outcomes: Sequence[Outcome]) -> dict[str, ColdStart]:
    """By model, in order of their first requests."""
    by_model: dict[str, list[Outcome]] = {}
    for o in sorted(outcomes, key=lambda o: o.start_s):
        by_model.setdefault(o.plan.app.model, []).append(o)
    found: dict[str, ColdStart] = {}
    for model, same in by_model.items():
        at_s = min((o.first_s for o in same if o.first_s is not None), default=math.inf)
        before = sum(o.start_s < at_s for o in same) - 1
        found[model] = ColdStart(model, same[0].ttft_s, at_s, max(0, before))
    return found


def warm(outcomes: Sequence[Outcome], colds: dict[str, ColdStart]) -> list[Outcome]:
    """Those that were sent after their model's first token had come."""
    return [o for o in outcomes if o.start_s >= colds[o.plan.app.model].first_token_at_s]


def span_s(outcomes: Sequence[Outcome]) -> float:
    """From the first start to the last end."""
    if not outcomes:
        return 0.0
    return max(o.end_s for o in outcomes) - min(o.start_s for o in outcomes)


def token_times_s(outcomes: Iterable[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """When events came and how many tokens each stands for: [n] f64 and [n] f64.

    A server that packs several tokens into an event without saying so has them spread evenly over a request's events.
    """
    times, weights = [np.zeros(0)], [np.zeros(0)]
    for o in outcomes:
        if o.first_s is None:
            continue
        gaps = np.frombuffer(o.gaps_s, np.float32)
        times.append(o.first_s + np.concatenate(([0.0], np.cumsum(gaps, dtype=np.float64))))
        if len(o.carried):
            carried = np.frombuffer(o.carried, np.uint16).astype(np.float64)
        else:
            carried = np.ones(len(gaps) + 1)
        weights.append(carried * (o.output_tokens / carried.sum()))
    return np.concatenate(times), np.concatenate(weights)


def peak_tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """The most tokens in one of the whole seconds of the run."""
    times, weights = token_times_s(outcomes)
    if not len(times):
        return 0.0
    return float(np.bincount(np.maximum(times, 0).astype(np.int64), weights=weights).max())


def lateness_s(outcomes: Iterable[Outcome]) -> np.ndarray:
    """How long after its time the client took each request up, where no concurrency limit held it."""
    return np.array([o.start_s - o.plan.due_s for o in outcomes if not o.held], np.float64)


def connect_s(outcomes: Iterable[Outcome]) -> np.ndarray:
    """What opening a connection took, over requests that needed a new one."""
    return np.array([o.sent_s - o.start_s for o in outcomes if not o.reused and o.failure != "connect"], np.float64)


def failures(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """By reason, most frequent first: how many, and the first one's message."""
    found: dict[str, dict[str, Any]] = {}
    for o in outcomes:
        if o.failure is not None:
            entry = found.setdefault(o.failure, {"count": 0, "example": o.detail})
            entry["count"] += 1
    return dict(sorted(found.items(), key=lambda item: (-item[1]["count"], item[0])))


def _value_s(outcome: Outcome, metric: str) -> float | None:
    match metric:
        case "ttft":
            return outcome.ttft_s
        case "tpot":
            return outcome.tpot_s
        case "e2el":
            return outcome.e2el_s
        case "client_queue_time":
            return outcome.start_s - outcome.plan.due_s
        case _:
            return outcome.end_s - outcome.plan.due_s
