"""Figures on timelines made by hand: percentiles, attainment, goodput, cold starts, warnings, and the document."""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import report, stats
from bench.load import Counts
from bench.plots import attainment_over_time, grouped, windows
from bench.progress import line
from bench.records import Application, Drawn, Outcome, Plan, Segment, Slo

APP = Application("a", "m")


def outcome(
    arrivals: Sequence[float] = (0.5, 1.0, 1.5), start: float = 0.0, due: float | None = None, **fields: Any
) -> Outcome:
    """Events at `arrivals` seconds after the start, one token each unless `carried` says otherwise."""
    app = fields.pop("app", APP)
    carried = array("H", fields.pop("carried", ()))
    tokens = sum(carried) if carried else len(arrivals)
    plan = Plan(start if due is None else due, app, Drawn((Segment(1, 10),)), fields.pop("wanted", tokens))
    gaps = np.diff(np.array(arrivals, np.float64)) if arrivals else []
    given = {
        "end_s": start + (arrivals[-1] if arrivals else 1.0),
        "first_s": start + arrivals[0] if arrivals else None,
        "last_s": start + arrivals[-1] if arrivals else None,
        "event_tokens": tokens,
        "usage_completion": tokens,
        "usage_prompt": 10,
        "sent_s": start,
    }
    return Outcome(plan, start, gaps_s=array("f", gaps), carried=carried, **{**given, **fields})


def failed(reason: str = "http_503", **fields: Any) -> Outcome:
    return outcome((), failure=reason, usage_completion=None, usage_prompt=None, **fields)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 99, 99.9, 100]))
def test_percentiles_interpolate_between_order_statistics(values: list[float], percentile: float) -> None:
    found = stats.summary_ms(np.array(values), "x", [percentile])
    ordered = sorted(v * 1e3 for v in values)
    at = percentile / 100 * (len(ordered) - 1)
    low, high = math.floor(at), math.ceil(at)
    expected = ordered[low] + (at - low) * (ordered[high] - ordered[low])
    assert found[f"p{percentile:g}_x_ms"] == pytest.approx(expected)
    assert found["mean_x_ms"] == pytest.approx(sum(ordered) / len(ordered))
    assert set(found) == {"mean_x_ms", "median_x_ms", "std_x_ms", f"p{percentile:g}_x_ms"}


def test_the_measures_of_one_request() -> None:
    o = outcome((0.5, 0.6, 0.9, 1.7), start=10.0, due=9.75)
    values = {m: stats.values_s([o, failed()], m).tolist() for m in stats.METRICS}
    assert values["ttft"] == [0.5]
    assert values["tpot"] == pytest.approx([0.4])
    assert values["itl"] == pytest.approx([0.1, 0.3, 0.8])
    assert values["e2el"] == pytest.approx([1.7])
    assert values["client_queue_time"] == [0.25]
    assert values["e2el_including_client_queue"] == pytest.approx([1.95])


def test_tpot_counts_tokens_not_events() -> None:
    packed = outcome((1.0, 2.0), carried=(4, 4))
    assert packed.tpot_s == pytest.approx(1 / 7)
    assert outcome((1.0, 2.0), usage_completion=6).tpot_s == pytest.approx(0.2)
    assert outcome((1.0,)).tpot_s is None


def test_promises_are_kept_apart() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.5, e2el_s=2.0)
    assert stats.kept(outcome((0.5, 1.0, 1.5)), slo) == {"ttft": True, "tpot": True, "e2el": True, "overall": True}
    assert stats.kept(outcome((0.6, 1.0)), slo)["overall"] is False
    assert stats.kept(outcome((0.5, 1.1)), slo) == {"ttft": True, "tpot": False, "e2el": True, "overall": False}
    assert stats.kept(outcome((0.4,)), slo)["overall"] is True
    assert set(stats.kept(failed(), slo).values()) == {False}
    assert stats.kept(outcome(), Slo()) == {}


def test_attainment_counts_failures_against_it() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.2)
    outcomes = [outcome((0.5, 0.6)), outcome((0.5, 0.9)), outcome((1.5, 1.6, 1.7)), failed()]
    found = stats.attainment([(o, slo) for o in outcomes])
    assert (found.ttft, found.tpot, found.e2el, found.overall) == (0.5, 0.5, None, 0.25)
    assert (found.requests, found.good, found.good_tokens) == (4, 1, 2)
    assert stats.attainment([(outcome(), Slo())]).overall is None


def test_the_strict_variant_catches_a_stall_that_the_mean_hides() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    steady = outcome([1.0 + 0.1 * i for i in range(11)])
    stall = outcome([0.5, *(1.45 + 0.005 * i for i in range(10))])
    assert stats.kept(steady, slo)["overall"]
    assert stats.kept(stall, slo)["overall"]
    assert stats.kept_strictly(steady, slo) is True
    assert stats.kept_strictly(stall, slo) is False
    assert stats.kept_strictly(steady, Slo(ttft_s=1.0)) is None
    assert stats.kept_strictly(failed(), slo) is False


def test_the_strict_variant_gives_an_event_the_index_of_its_first_token() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    assert stats.kept_strictly(outcome((1.0, 1.3), carried=(3, 3)), slo) is True
    assert stats.kept_strictly(outcome((1.0, 1.31), carried=(3, 3)), slo) is False
    # Six tokens by usage in two events of unknown sizes: taken as tokens 0 and 1.
    assert stats.kept_strictly(outcome((1.0, 1.3), usage_completion=6), slo) is False


@given(st.lists(st.floats(0.001, 0.3), min_size=1, max_size=12), st.floats(0.05, 0.5), st.floats(0.01, 0.2))
def test_the_strict_variant_against_its_definition(gaps: list[float], ttft_s: float, tpot_s: float) -> None:
    arrivals = np.cumsum(gaps)
    expected = all(t <= ttft_s + i * tpot_s for i, t in enumerate(arrivals))
    margin = min(abs(ttft_s + i * tpot_s - t) for i, t in enumerate(arrivals))
    if margin > 1e-5:
        assert stats.kept_strictly(outcome(arrivals.tolist()), Slo(ttft_s, tpot_s)) is expected


def test_cold_starts_are_each_models_first_request_and_warm_ones_came_after_its_first_token() -> None:
    b = Application("b", "other")
    outcomes = [
        outcome((1.0, 1.5), start=0.0),
        outcome((0.8, 1.5), start=0.5),
        outcome((0.2, 0.3), start=1.0),
        outcome((0.1, 0.2), start=3.0),
        failed(app=b, start=0.0),
        outcome((2.0,), app=b, start=0.1),
    ]
    colds = stats.cold_starts(outcomes)
    assert (colds["m"].ttft_s, colds["m"].sent_before_first_token) == (1.0, 1)
    assert (colds["other"].ttft_s, colds["other"].sent_before_first_token) == (None, 1)
    assert [o.start_s for o in stats.warm(outcomes, colds)] == [1.0, 3.0]


def test_tokens_over_time_add_up_to_what_the_server_counted() -> None:
    outcomes = [outcome((0.5, 1.5), usage_completion=6), outcome((0.2, 1.2), carried=(3, 1)), failed()]
    times, weights = stats.token_times_s(outcomes)
    assert weights.sum() == 10
    assert sorted(zip(times.round(6).tolist(), weights.tolist(), strict=True)) == [
        (0.2, 3),
        (0.5, 3),
        (1.2, 1),
        (1.5, 3),
    ]
    assert stats.peak_tokens_per_s(outcomes) == 6


def run_of(outcomes: Sequence[Outcome], **fields: Any) -> report.Run:
    apps = list({o.plan.app.name: o.plan.app for o in outcomes}.values())
    settings = {"model_id": "m", "base_url": "http://x", "dataset_name": "random"}
    given = {
        "warmups": (), "apps": apps, "settings": settings, "metrics": ("ttft", "tpot", "itl", "e2el"),
        "percentiles": (99.0,), "most_active": 2, "cpu_s": 0.1, "lags_s": (0.001,), "wall_s": 1.0,
    }  # fmt: skip
    return report.Run(outcomes, **{**given, **fields})


def test_the_document_has_vllms_names_and_adds_up() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.6)
    good, bad = Application("good", "m", slo), Application("bad", "m2", slo, share=2)
    outcomes = [outcome((0.5, 1.0), app=good), outcome((0.5, 1.0), start=3.0, app=good), failed(app=bad, start=1.0)]
    found = report.document(run_of(outcomes), detailed=True)
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 4.0)
    assert (found["request_throughput"], found["request_goodput"], found["output_throughput"]) == (0.5, 0.5, 1.0)
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_token_throughput"]) == (20, 4, 6.0)
    assert (found["mean_ttft_ms"], found["p99_tpot_ms"], found["std_e2el_ms"]) == (500.0, 500.0, 0.0)
    assert found["max_concurrent_requests"] == 2
    assert found["attainment"]["overall"] == pytest.approx(2 / 3)
    apps = found["applications"]
    assert apps["good"]["attainment"] == {"ttft": 1.0, "tpot": 1.0, "e2el": None, "overall": 1.0, "strict": 1.0}
    assert (apps["bad"]["attainment"]["overall"], apps["bad"]["goodput_requests_per_s"]) == (0.0, 0.0)
    assert found["failures"] == {"http_503": {"count": 1, "example": ""}}
    assert found["errors"] == ["", "http_503: ", ""]
    assert found["ttfts"] == [0.5, None, 0.5]
    assert found["applications_of"] == ["good", "bad", "good"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    shown = report.table(found)
    assert "1 × http_503" in shown
    assert "below 95%" in shown
    assert shown.count("p99 500 ms") >= 2


def test_warmups_take_the_cold_start_and_stay_out_of_the_figures() -> None:
    found = report.document(run_of([outcome((0.1, 0.2))], warmups=[outcome((9.0,))]), detailed=False)
    assert found["cold_start"]["m"] == {"ttft_ms": 9000.0, "sent_before_first_token": 0, "in_warmup": True}
    assert found["mean_ttft_ms"] == found["mean_warm_ttft_ms"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("outcomes", "fields", "expected"),
    [
        ([outcome(start=1.0, due=0.9)], {}, "requests left late"),
        ([outcome()], {"lags_s": (0.5,)}, "the client was busy"),
        ([outcome()], {"cpu_s": 0.95}, "the client was busy"),
        ([outcome(usage_completion=None)], {}, "1 answers had no usage"),
        ([outcome(usage_completion=6)], {}, "an event carries 2.00 tokens"),
        ([outcome(wanted=9)], {"ignore_eos": True}, "1 answers are shorter"),
        ([outcome()], {"exact_prompts": False}, "estimates"),
        ([outcome(), outcome(failure="interrupted")], {}, "the run was stopped: 1"),
        ([outcome()], {"notes": ("said before",)}, "said before"),
    ],
)
def test_what_a_reader_is_warned_of(outcomes: list[Outcome], fields: dict[str, Any], expected: str) -> None:
    warnings = report.document(run_of(outcomes, **fields), detailed=False)["warnings"]
    assert len(warnings) == 1
    assert expected in warnings[0]


def test_a_clean_run_has_no_warning_and_a_held_one_is_not_late() -> None:
    clean = report.document(run_of([outcome(), outcome(start=5.0, due=1.0, held=True)]), detailed=False)
    assert clean["warnings"] == []
    at_once = run_of([outcome(start=3.0, due=0.0)])
    at_once = dataclasses.replace(at_once, settings={**at_once.settings, "request_rate": "inf"})
    assert report.document(at_once, detailed=False)["warnings"] == []
    assert clean["client"]["held_by_max_concurrency"] == 1


def test_a_run_in_which_everything_failed_still_prints() -> None:
    found = report.document(run_of([failed("connect"), failed("connect")]), detailed=True)
    assert "mean_ttft_ms" not in found
    assert "2 × connect" in report.table(found)
    assert report.table(report.document(run_of([]), detailed=True))


def test_many_applications_are_pooled_in_pictures_and_shortened_in_the_table() -> None:
    apps = [Application(f"app{i:02d}", "m", Slo(ttft_s=1.0)) for i in range(20)]
    outcomes = [outcome(app=app) for i, app in enumerate(apps) for _ in range(40 - i)]
    groups = grouped(outcomes, apps)
    assert list(groups)[:2] == ["app00", "app01"]
    assert list(groups)[-1] == "13 others"
    assert sum(len(g) for g in groups.values()) == len(outcomes)
    assert "and 8 more" in report.table(report.document(run_of(outcomes), detailed=False))


def test_attainment_over_time_has_gaps_where_nothing_was_sent() -> None:
    app = Application("a", "m", Slo(ttft_s=0.6))
    outcomes = [outcome((0.5,), start=0.1, app=app), outcome((0.7,), start=0.2, app=app), outcome((0.5,), 2.5, app=app)]
    shares = attainment_over_time(outcomes, np.array([0.0, 1.0, 2.0, 3.0]))
    assert shares[0] == 0.5
    assert math.isnan(shares[1])
    assert shares[2] == 1.0
    assert windows(outcomes).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_progress_line() -> None:
    counts = Counts(sent=9, active=3, waiting=2, completed=5, failed=1, tokens=100)
    assert (
        line(counts, 20, 12.3, 456.7, 2.5)
        == "  12.3 s  6/20 done  3 running  2 held  1 failed  2.5 requests/s  457 tokens/s"
    )
