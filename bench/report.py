"""A run in words and numbers: the result document (vLLM's field names, and ours beside them) and the table.

`serve` builds the document from outcomes and writes it; the table is made from the document alone, so a saved result
prints the same. Pure.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from . import stats
from .records import Application, Drawn, Outcome

# Beyond these the figures describe the client rather than the server.
LATE_S: Final = 0.005
LAG_S: Final = 0.020
CPU_SHARE: Final = 0.85
_TABLE_APPS: Final = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What happened, and what was asked for (`settings` goes into the document as it is)."""

    outcomes: Sequence[Outcome]
    warmups: Sequence[Outcome]
    apps: Sequence[Application]
    settings: Mapping[str, Any]
    metrics: Sequence[str]
    percentiles: Sequence[float]
    most_active: int
    cpu_s: float
    lags_s: Sequence[float]
    wall_s: float
    exact_prompts: bool = True
    ignore_eos: bool = False
    notes: Sequence[str] = ()


def document(run: Run, *, detailed: bool) -> dict[str, Any]:
    """The whole result; `detailed` adds a list entry per request, in order of their times."""
    outcomes = sorted((o for o in run.outcomes if o.failure != "interrupted"), key=lambda o: (o.plan.due_s, o.start_s))
    good = [o for o in outcomes if o.ok]
    duration_s = stats.span_s(outcomes)
    overall = stats.attainment([(o, o.plan.app.slo) for o in outcomes])
    tokens_in = sum(_input_tokens(o) for o in good)
    tokens_out = sum(o.output_tokens for o in good)
    found: dict[str, Any] = {
        **run.settings,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _per(len(good), duration_s),
        "request_goodput": _per(overall.good, duration_s) if overall.overall is not None else None,
        "output_throughput": _per(tokens_out, duration_s),
        "total_token_throughput": _per(tokens_in + tokens_out, duration_s),
        "max_output_tokens_per_s": stats.peak_tokens_per_s(good),
        "max_concurrent_requests": run.most_active,
    }
    for metric in run.metrics:
        found |= stats.summary_ms(stats.values_s(good, metric), metric, run.percentiles)
    found |= _cold_and_warm(run, outcomes)
    found["attainment"] = dataclasses.asdict(overall)
    by_app: dict[str, list[Outcome]] = {app.name: [] for app in run.apps}
    for o in outcomes:
        by_app[o.plan.app.name].append(o)
    found["applications"] = {app.name: _application(app, by_app[app.name], run, duration_s) for app in run.apps}
    found["failures"] = stats.failures(outcomes)
    found["interrupted"] = len(run.outcomes) - len(outcomes)
    found["tokens"] = _token_counts(good)
    found["client"] = _client(run, outcomes)
    found["warnings"] = [*run.notes, *_warnings(run, found, good)]
    if detailed:
        found |= _details(outcomes)
    return found


def table(found: Mapping[str, Any]) -> str:
    """The document for a terminal."""
    lines = [f"{found['model_id']} at {found['base_url']}, {found['dataset_name']}"]
    lines += _totals(found)
    for metric, name in (("ttft", "time to first token"), ("tpot", "time per output token"), ("itl", "between events"),
                         ("e2el", "whole request"), ("client_queue_time", "queued in the client"),
                         ("e2el_including_client_queue", "request with its queue")):  # fmt: skip
        if f"mean_{metric}_ms" in found:
            lines.append(_row(name, _latencies(found, metric)))
    if "mean_warm_ttft_ms" in found and found["cold_start"]:
        lines.append(_row("first token, warm", _latencies(found, "warm_ttft")))
        cold = [f"{m} {_ms(c['ttft_ms'])}" for m, c in list(found["cold_start"].items())[:4]]
        lines.append(_row("a model's first request", ", ".join(cold) + (" …" if len(found["cold_start"]) > 4 else "")))
    client = found["client"]
    late = ", ".join(f"{k} {_ms(client[f'send_lateness_{k}_ms'])}" for k in ("p50", "p99", "max"))
    when = "all were sent after" if found.get("request_rate") == "inf" else "sent late by"
    lines.append(_row(when, f"{late}; client used {client['cpu_share']:.0%} of a core"))
    lines += _failure_lines(found)
    lines += _application_lines(found)
    lines += [f"! {warning}" for warning in found["warnings"]]
    return "\n".join(lines)


def _cold_and_warm(run: Run, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Cold starts are the warm-ups' where there were any: they came first, and left all models warm."""
    colds = stats.cold_starts(run.warmups or outcomes)
    warm = outcomes if run.warmups else stats.warm(outcomes, colds)
    return {
        "cold_start": {
            model: {
                "ttft_ms": None if cold.ttft_s is None else cold.ttft_s * 1e3,
                "sent_before_first_token": cold.sent_before_first_token,
                "in_warmup": bool(run.warmups),
            }
            for model, cold in colds.items()
        },
        **stats.summary_ms(stats.values_s(warm, "ttft"), "warm_ttft", run.percentiles),
    }


def _application(app: Application, own: Sequence[Outcome], run: Run, duration_s: float) -> dict[str, Any]:
    kept = stats.attainment([(o, app.slo) for o in own])
    found: dict[str, Any] = {
        "model": app.model,
        "requests": len(own),
        "completed": sum(o.ok for o in own),
        "failures": stats.failures(own),
        "slo": {
            "ttft_ms": _scaled(app.slo.ttft_s),
            "tpot_ms": _scaled(app.slo.tpot_s),
            "e2el_ms": _scaled(app.slo.e2el_s),
            "attain": app.slo.attain,
        },
        "attainment": {p: getattr(kept, p) for p in ("ttft", "tpot", "e2el", "overall", "strict")},
        "goodput_requests_per_s": _per(kept.good, duration_s) if kept.overall is not None else None,
        "goodput_tokens_per_s": _per(kept.good_tokens, duration_s) if kept.overall is not None else None,
        "output_tokens": sum(o.output_tokens for o in own if o.ok),
        "output_throughput": _per(sum(o.output_tokens for o in own if o.ok), duration_s),
    }
    for metric in run.metrics:
        found |= stats.summary_ms(stats.values_s(own, metric), metric, run.percentiles)
    return found


def _token_counts(good: Sequence[Outcome]) -> dict[str, Any]:
    """What the server counted and what was seen, side by side."""
    with_usage = [o for o in good if o.usage_completion is not None]
    return {
        "output_by_usage": sum(o.usage_completion or 0 for o in with_usage),
        "output_by_event": sum(o.event_tokens for o in good),
        "output_by_event_where_usage": sum(o.event_tokens for o in with_usage),
        "requests_without_usage": len(good) - len(with_usage),
        "input_by_usage": sum(o.usage_prompt or 0 for o in good),
        "input_planned": sum(o.plan.prompt.tokens for o in good if isinstance(o.plan.prompt, Drawn)),
        "input_cached": sum(o.usage_cached or 0 for o in good),
    }


def _client(run: Run, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    late, connects, lags = stats.lateness_s(outcomes), stats.connect_s(outcomes), np.array(run.lags_s)
    return {
        **_spread("send_lateness", late),
        **_spread("connect", connects),
        **_spread("loop_lag", lags),
        "connections_opened": len(connects),
        "held_by_max_concurrency": sum(o.held for o in outcomes),
        "cpu_share": _per(run.cpu_s, run.wall_s),
    }


def _warnings(run: Run, found: Mapping[str, Any], good: Sequence[Outcome]) -> list[str]:
    """What a reader must know before believing the figures."""
    client, tokens = found["client"], found["tokens"]
    said = []
    if client["send_lateness_p99_ms"] > LATE_S * 1e3 and found.get("request_rate") != "inf":
        said.append(
            f"requests left late (p99 {_ms(client['send_lateness_p99_ms'])}): this client or its machine is "
            "overloaded, and the server saw a gentler load than was asked for"
        )
    if client["loop_lag_p99_ms"] > LAG_S * 1e3 or client["cpu_share"] > CPU_SHARE:
        said.append(
            f"the client was busy (loop lag p99 {_ms(client['loop_lag_p99_ms'])}, "
            f"{client['cpu_share']:.0%} of a core): arrivals may have been read late"
        )
    if tokens["requests_without_usage"]:
        said.append(f"{tokens['requests_without_usage']} answers had no usage: their tokens are counted by events")
    seen, counted = tokens["output_by_event_where_usage"], tokens["output_by_usage"]
    if counted > 1.02 * seen > 0:
        said.append(
            f"an event carries {counted / seen:.2f} tokens on average: times between events are not between tokens"
        )
    short = sum(o.output_tokens < o.plan.output_tokens for o in good)
    if run.ignore_eos and short:
        said.append(f"{short} answers are shorter than asked for: the server may not know ignore_eos")
    if not run.exact_prompts:
        said.append("prompt lengths are estimates (no --tokenizer)")
    if found["interrupted"]:
        said.append(f"the run was stopped: {found['interrupted']} requests under way are not counted")
    return said


def _details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """vLLM's lists, and which application and model each entry belongs to."""
    return {
        "input_lens": [_input_tokens(o) for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft_s for o in outcomes],
        "itls": [[round(float(g), 7) for g in o.gaps_s] for o in outcomes],
        "start_times": [o.start_s for o in outcomes],
        "latencies": [o.e2el_s for o in outcomes],
        "queue_times": [o.start_s - o.plan.due_s for o in outcomes],
        "generated_texts": [o.text or "" for o in outcomes],
        "errors": ["" if o.failure is None else f"{o.failure}: {o.detail}" for o in outcomes],
        "applications_of": [o.plan.app.name for o in outcomes],
        "models_of": [o.plan.app.model for o in outcomes],
    }


def _totals(found: Mapping[str, Any]) -> list[str]:
    goodput = found["request_goodput"]
    good = "" if goodput is None else f", {goodput:.2f} of them good"
    return [
        _row("requests", f"{found['completed']} completed, {found['failed']} failed in {found['duration']:.1f} s"),
        _row("requests a second", f"{found['request_throughput']:.2f}{good}"),
        _row(
            "tokens a second",
            f"{found['output_throughput']:.1f} out (most in one second {found['max_output_tokens_per_s']:.0f}), "
            f"{found['total_token_throughput']:.1f} in and out",
        ),
        _row("tokens", f"{found['total_input_tokens']} in, {found['total_output_tokens']} out"),
        _row("most at once", f"{found['max_concurrent_requests']}"),
    ]


def _latencies(found: Mapping[str, Any], metric: str) -> str:
    matches = (re.fullmatch(rf"(p[0-9.]+)_{metric}_ms", key) for key in found)
    names = [match[1] for match in matches if match]
    parts = [f"mean {_ms(found[f'mean_{metric}_ms'])}", f"median {_ms(found[f'median_{metric}_ms'])}"]
    return ", ".join(parts + [f"{n} {_ms(found[f'{n}_{metric}_ms'])}" for n in names])


def _failure_lines(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for reason, entry in list(found["failures"].items())[:8]:
        lines.append(_row("failed", f"{entry['count']} × {reason}: {entry['example'][:100]}"))
    return lines


def _application_lines(found: Mapping[str, Any]) -> list[str]:
    apps = found["applications"]
    promised = any(a["attainment"]["overall"] is not None for a in apps.values())
    if len(apps) < 2 and not promised:
        return []
    lines = [
        "",
        f"{'application':<22}{'requests':>9}{'failed':>8}{'TTFT':>8}{'TPOT':>8}{'overall':>8}{'strict':>8}{'good/s':>9}",
    ]
    ordered = sorted(apps.items(), key=lambda item: -item[1]["requests"])
    for name, app in ordered[:_TABLE_APPS]:
        kept, wanted = app["attainment"], app["slo"]["attain"]
        missed = kept["overall"] is not None and kept["overall"] < wanted
        rate = app["goodput_requests_per_s"]
        lines.append(
            f"{name[:21]:<22}{app['requests']:>9}{app['requests'] - app['completed']:>8}{_share(kept['ttft']):>8}"
            f"{_share(kept['tpot']):>8}{_share(kept['overall']):>8}{_share(kept['strict']):>8}"
            f"{'-' if rate is None else f'{rate:.2f}':>9}{f'  below {wanted:.0%}' if missed else ''}"
        )
    if len(ordered) > _TABLE_APPS:
        lines.append(f"… and {len(ordered) - _TABLE_APPS} more in the result file")
    return [*lines, ""]


def _row(name: str, text: str) -> str:
    return f"  {name:<24} {text}"


def _input_tokens(o: Outcome) -> int:
    if o.usage_prompt is not None:
        return o.usage_prompt
    return o.plan.prompt.tokens if isinstance(o.plan.prompt, Drawn) else 0


def _spread(name: str, seconds: np.ndarray) -> dict[str, float]:
    ms = seconds * 1e3 if len(seconds) else np.zeros(1)
    return {f"{name}_{k}_ms": float(np.percentile(ms, q)) for k, q in (("p50", 50), ("p99", 99), ("max", 100))}


def _per(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _share(value: float | None) -> str:
    return "-" if value is None else f"{math.floor(value * 1000) / 10:.1f}%"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 9995 else f"{value:.0f} ms" if value >= 99.5 else f"{value:.2f} ms"
