"""A run in numbers: attainment by every denominator, waits, devices, decisions, and how it came through bursts.

`summarise` makes the document that the table, the JSON file and the HTML page all show; it is made of a `Record` alone.

A request keeps its promise when its first token came in time and the mean of the later ones did. The stricter variant,
which wants every single token by its own deadline, cannot be told from means; it is not reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .recorder import Record
from .tallies import HOUR_S, Part, by_model, percentile_s

TAIL_REQUESTS: Final = 100
RECOVERED: Final = 0.95
RECOVERY_S: Final = 5.0
_PERCENTILES: Final = (50, 90, 95, 99)
_DIPS: Final = 20


def summarise(record: Record, bursts_s: Sequence[float] = ()) -> dict[str, Any]:
    """bursts_s: when bursts began, where that is known; the time to recover is counted from them."""
    record.settle()
    scenario, tallies = record.scenario, record.tallies
    whole = tallies.counts.sum(axis=1)
    apps = [_application(record, i, whole[i]) for i in range(len(scenario.apps))]
    models = by_model(scenario)
    pooled = [i for i, app in enumerate(apps) if 0 < app["requests"] < TAIL_REQUESTS]
    bad = bad_seconds(tallies.seconds, tallies.second_s)
    found: dict[str, Any] = {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "duration_s": scenario.duration_s,
        "since_s": record.since_s,
        "closed_s": record.closed_s,
        "took_s": record.took_s,
        "nodes": len(scenario.nodes),
        **_group(record, list(range(len(apps)))),
        "hours": [_hour(record, k) for k in range(tallies.hours)],
        "applications": apps,
        "models": {model: _group(record, own) for model, own in models.items()},
        "tail": {"applications": len(pooled), "fewer_than": TAIL_REQUESTS, **_group(record, pooled)},
        "failures": {
            why: r._asdict() for why, r in sorted(tallies.reasons.items(), key=lambda item: -item[1].requests)
        },
        "devices": _devices(record),
        "decisions": dict(sorted(record.decisions.counts.items(), key=lambda item: -item[1])),
        "transitions": _transitions(record),
        "dips": _dips(bad, tallies.second_s),
        "bursts": [{"at_s": b, "recovery_s": recovery_s(bad, tallies.second_s, b)} for b in bursts_s],
        "latest": [{**late._asdict(), "app": scenario.apps[late.app].name} for late in tallies.latest()],
    }
    found["worst_hour"] = _worst(found["hours"])
    found["worst_application"] = _worst([app for app in apps if app["requests"] >= TAIL_REQUESTS])
    found["notes"] = [*record.notes, *_notes(record, found)]
    return found


def shares(parts: np.ndarray) -> dict[str, dict[str, float | None]]:
    """[parts] by both denominators: of all requests, and of those that got all their tokens."""
    came, ended = int(parts[Part.CAME]), int(parts[Part.ENDED])
    ttft, ttft_ended, tpot, good = (int(parts[p]) for p in (Part.TTFT, Part.TTFT_ENDED, Part.TPOT, Part.GOOD))
    return {
        "of_all": {"ttft": _per(ttft, came), "tpot": _per(tpot, came), "overall": _per(good, came)},
        "of_ended": {"ttft": _per(ttft_ended, ended), "tpot": _per(tpot, ended), "overall": _per(good, ended)},
    }


def bad_seconds(seconds: np.ndarray, second_s: float) -> np.ndarray:
    """[seconds] whether the window of five seconds that begins there attains less than 95 %, by when requests came."""
    width = max(1, round(RECOVERY_S / second_s))
    came, good = (np.cumsum(np.append(seconds[:, p], np.zeros(width))) for p in (Part.CAME, Part.GOOD))
    sums = [np.append(total[width - 1], total[width:] - total[:-width]) for total in (came, good)]
    sent, kept = (part[: len(seconds)] for part in sums)
    found: np.ndarray = kept < RECOVERED * sent
    return found


def recovery_s(bad: np.ndarray, second_s: float, burst_s: float) -> float | None:
    """From the burst until the first second from which every window attains; None if the run ends before that."""
    late = np.flatnonzero(bad[int(burst_s / second_s) :])
    if not len(late):
        return 0.0
    good = int(burst_s / second_s) + int(late[-1]) + 1
    return max(0.0, good * second_s - burst_s) if good < len(bad) else None


def _group(record: Record, apps: list[int]) -> dict[str, Any]:
    """The figures of some applications together."""
    tallies = record.tallies
    parts = tallies.counts[apps].sum(axis=(0, 1))
    span_s = _span_s(record)
    ins, outs, ended_outs, good_outs = (int(x) for x in tallies.tokens[apps].sum(axis=0))
    return {
        "requests": int(parts[Part.CAME]),
        "ended": int(parts[Part.ENDED]),
        "good": int(parts[Part.GOOD]),
        "attainment": shares(parts),
        "goodput_requests_s": int(parts[Part.GOOD]) / span_s,
        "goodput_tokens_s": good_outs / span_s,
        "input_tokens": ins,
        "output_tokens_asked": outs,
        "output_tokens": ended_outs,
        "ttft_s": _times(tallies.waits[apps], tallies.sums_s[apps, 0], tallies.most_s[apps, 0]),
        "tpot_s": _times(tallies.paces[apps], tallies.sums_s[apps, 1], tallies.most_s[apps, 1]),
    }


def _application(record: Record, index: int, parts: np.ndarray) -> dict[str, Any]:
    app = record.scenario.apps[index]
    overall = shares(parts)["of_all"]["overall"]
    return {
        "name": app.name,
        "model": app.model,
        "promise": {"ttft_s": app.ttft_s, "tpot_s": app.tpot_s, "attain": app.attain},
        "kept": None if overall is None else overall >= app.attain,
        **_group(record, [index]),
    }


def _hour(record: Record, hour: int) -> dict[str, Any]:
    parts = record.tallies.counts[:, hour].sum(axis=0)
    return {"from_s": hour * HOUR_S, "requests": int(parts[Part.CAME]), "ended": int(parts[Part.ENDED]),
            "attainment": shares(parts)}  # fmt: skip


def _span_s(record: Record) -> float:
    """Of what is counted."""
    return max(record.scenario.duration_s - record.since_s, 1e-9)


def _worst(groups: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The least of each share over hours or applications, of all requests."""
    least: dict[str, float | None] = {}
    for kind in ("ttft", "tpot", "overall"):
        known = [group["attainment"]["of_all"][kind] for group in groups if group["requests"]]
        least[kind] = min(known, default=None)
    return least


def _times(histograms: np.ndarray, sums_s: np.ndarray, most_s: np.ndarray) -> dict[str, float | None]:
    """Percentiles are within 1 % of the true ones; the mean and the longest are exact."""
    merged = histograms.sum(axis=0)
    count = int(merged.sum())
    return {
        "mean": float(sums_s.sum()) / count if count else None,
        **{f"p{p}": percentile_s(merged, p) for p in _PERCENTILES},
        "max": float(most_s.max()) if count else None,
    }


def _devices(record: Record) -> dict[str, Any]:
    """A device counts while it holds a model that is Active, on its way or being drained."""
    line, nodes = record.timeline, len(record.scenario.nodes)
    span_s = _span_s(record)
    mean = line.held_s / span_s
    used_s = sum(record.used_s.values())
    return {
        "device_hours": line.held_s / HOUR_S,
        "device_hours_after_the_trace": line.tail_s / HOUR_S,
        "mean": mean,
        "peak": line.most,
        "cluster": nodes,
        "share_of_cluster": _per(mean, nodes),
        # Steps' seconds over the seconds that devices were held, of the whole run; unknown where nobody counted steps.
        "busy": _per(used_s, line.all_s) if record.used_s else None,
        "busy_s_by_model": dict(record.used_s),
    }


def _transitions(record: Record) -> list[dict[str, Any]]:
    """How long models took to come and go, by verb and model."""
    rows = sorted(record.decisions.took.items())
    return [{"verb": verb, "model": model, "count": t.times, "mean_s": t.sum_s / t.times, "least_s": t.least_s,
             "most_s": t.most_s} for (verb, model), t in rows]  # fmt: skip


def _dips(bad: np.ndarray, second_s: float) -> dict[str, Any]:
    """Spells in which windows of five seconds attained less than 95 %."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bad.astype(int), [0]])))
    spells = sorted(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True), key=lambda s: (s[0] - s[1], s[0]))
    return {
        "seconds_below": float(bad.sum() * second_s),
        "spells": len(spells),
        "longest": [{"from_s": a * second_s, "lasts_s": (b - a) * second_s} for a, b in spells[:_DIPS]],
    }


def _notes(record: Record, found: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    said = []
    if record.closed_s is None:
        said.append("the run did not come to its end: these are the figures so far")
    if record.since_s:
        said.append(f"requests and devices are counted from second {record.since_s:g} on")
    if not found["requests"]:
        said.append("no request came")
    unended = found["requests"] - found["ended"]
    if unended:
        kinds: dict[str, int] = {}
        for why, reason in record.tallies.reasons.items():
            kinds[why.partition(":")[0]] = kinds.get(why.partition(":")[0], 0) + reason.requests
        parts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))
        said.append(f"{unended:,} of {found['requests']:,} requests did not get all their tokens: {parts}")
    served = {m for m, own in found["models"].items() if own["ended"]}
    never = [m for m, own in found["models"].items() if own["requests"] and m not in served]
    if never:
        said.append(f"never served: {', '.join(never)}")
    return said


def _per(amount: float, of: float) -> float | None:
    return amount / of if of > 0 and math.isfinite(of) else None
