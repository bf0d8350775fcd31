"""What a simulation leaves behind: counts against naive ones, the cluster against brute force, pages that escape, the
story of a request, and the search for the fewest devices.
"""

from __future__ import annotations

import functools
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import plan as plan_command
from bench.simulator import columns, devices, html, policies, report, scenario
from bench.simulator.decisions import Decisions
from bench.simulator.explain import Told, Witness, explain, story
from bench.simulator.plan import Judge, Kept, Trial, judged, marginal, search, sentences, trial_of
from bench.simulator.recorder import Record
from bench.simulator.records import AppSpec, Call, Device, ModelSpec, NodeSpec, Outcome, Scenario
from bench.simulator.run import run
from bench.simulator.summary import bad_seconds, recovery_s, summarise
from bench.simulator.tallies import HOUR_S, Part
from janus_server.errors import BadConfig
from janus_server.orders import Decided, Dispatch, KnownModel, Order, Refuse, Stage, Verb
from janus_server.sched.shapes import DeviceShape, ModelShape

HOSTILE = '</script><img src=x onerror="alert(1)">&amp;[bold]'


def model_of(name: str, shards: int = 1) -> ModelSpec:
    known = KnownModel(model=name, weight_pages=10, host_bytes=1, longest_pages=2, shards=shards)
    return ModelSpec(
        known=known, shape=ModelShape(name=name, parameters=1e9, layers=8, hidden=64, kv_bytes=1e3, pair_flops=1e3)
    )


def scenario_of(
    apps: Sequence[tuple[str, str]] = (("chat", "a"), ("code", "b")),
    duration_s: float = 60.0,
    calls: Sequence[Call] = (),
    shards: int = 1,
    nodes: int = 4,
) -> Scenario:
    """apps are names and models; the first is promised 1 s and 50 ms, each other one twice that."""
    shape = DeviceShape(name="x", flops=1e14, memory_bytes=6.4e10, bandwidth_bytes_s=1e12, link_bytes_s=1e11)
    names = list(dict.fromkeys(model for _, model in apps))
    return Scenario(
        name="made up", duration_s=duration_s, calls=calls, subjects={},
        models=tuple(model_of(name, shards if i == 0 else 1) for i, name in enumerate(names)),
        apps=tuple(AppSpec(name=name, model=model, ttft_s=2.0 if i else 1.0, tpot_s=0.1 if i else 0.05)
                   for i, (name, model) in enumerate(apps)),
        nodes=tuple(NodeSpec(name=f"n{i}", host="h", domain="d", shape=shape, pool_pages=9, page_bytes=1, host_bytes=9)
                    for i in range(nodes)),
    )  # fmt: skip


def ended(id: int, at_s: float, app: int = 0, ttft_s: float | None = 0.5, tpot_s: float = 0.02, why: str = "",
          output_tokens: int = 10) -> Outcome:  # fmt: skip
    call = Call(id, at_s, app, 100, output_tokens)
    return Outcome(call, ttft_s, tpot_s, at_s + 1.0, "n0" if ttft_s is not None else "", why)


def order(verb: Verb, model: str = "a", node: str = "n0", why: str = "because", id: int = 1) -> Order:
    return Order(term=1, id=id, node=node, model=model, verb=verb, why=why)


waits = st.one_of(st.none(), st.floats(1e-3, 100.0))
drawn_outcomes = st.lists(
    st.tuples(st.floats(0.0, 2.9 * HOUR_S), st.integers(0, 2), waits, st.floats(0.0, 0.5),
              st.sampled_from(["", "", "refused: no room", "cut: n0 lost it"]), st.integers(1, 50)),
    max_size=60,
)  # fmt: skip


@settings(max_examples=60)
@given(drawn_outcomes)
def test_requests_are_counted_like_one_would_by_hand(
    drawn: list[tuple[float, int, float | None, float, str, int]],
) -> None:
    made = scenario_of([("x", "a"), ("y", "b"), ("z", "a")], 3 * HOUR_S)
    record, outcomes = Record(made), []
    for i, (at_s, app, ttft_s, tpot_s, why, tokens) in enumerate(sorted(drawn, key=lambda d: d[0])):
        why = why if ttft_s is not None else "refused: no room"
        outcomes.append(ended(i, at_s, app, ttft_s, tpot_s, why, tokens))
        record.outcome(outcomes[-1])
    record.closed(3 * HOUR_S)
    found = summarise(record)

    def kept(o: Outcome) -> tuple[bool, bool]:
        promise = made.apps[o.call.app]
        return o.ttft_s is not None and o.ttft_s <= promise.ttft_s, not o.why and o.tpot_s <= promise.tpot_s

    def expect(some: list[Outcome], shown: dict[str, dict[str, float | None]]) -> None:
        done = [o for o in some if not o.why]
        for base, name in ((some, "of_all"), (done, "of_ended")):
            wanted = [sum(pick(kept(o)) for o in base) for pick in (lambda k: k[0], lambda k: k[1], all)]
            for value, kind in zip(wanted, ("ttft", "tpot", "overall"), strict=True):
                assert shown[name][kind] == (pytest.approx(value / len(base)) if base else None)

    expect(outcomes, found["attainment"])
    for hour in range(3):
        inside = [o for o in outcomes if hour * HOUR_S <= o.call.at_s < (hour + 1) * HOUR_S]
        assert found["hours"][hour]["requests"] == len(inside)
        expect(inside, found["hours"][hour]["attainment"])
    for i, app in enumerate(found["applications"]):
        expect([o for o in outcomes if o.call.app == i], app["attainment"])
    expect([o for o in outcomes if made.apps[o.call.app].model == "a"], found["models"]["a"]["attainment"])
    good = [o for o in outcomes if all(kept(o))]
    assert found["goodput_tokens_s"] == pytest.approx(sum(o.call.output_tokens for o in good) / (3 * HOUR_S))
    assert sum(f["requests"] for f in found["failures"].values()) == sum(bool(o.why) for o in outcomes)
    first = sorted(o.ttft_s for o in outcomes if o.ttft_s is not None)
    if first:
        assert found["ttft_s"]["max"] == first[-1]
        assert found["ttft_s"]["mean"] == pytest.approx(np.mean(first))
        assert found["ttft_s"]["p50"] == pytest.approx(first[max(0, math.ceil(0.5 * len(first)) - 1)], rel=0.011)


def test_one_token_has_no_pace_and_a_cut_request_kept_its_first_token_only() -> None:
    record = Record(scenario_of())
    record.outcome(ended(0, 1.0, output_tokens=1, tpot_s=0.0))
    record.outcome(ended(1, 2.0, why="cut: n0 lost it"))
    found = summarise(record)
    assert found["tpot_s"]["mean"] is None
    assert found["attainment"]["of_all"] == {"ttft": 1.0, "tpot": 0.5, "overall": 0.5}
    assert found["attainment"]["of_ended"] == {"ttft": 1.0, "tpot": 1.0, "overall": 1.0}
    assert any("1 cut" in note for note in found["notes"])
    assert any("did not come to its end" in note for note in found["notes"])


def test_what_came_before_it_counts_is_left_out() -> None:
    record = Record(scenario_of(), since_s=20.0)
    record.moment(0.0, ["n0", "n1", "n2"])
    record.moment(10.0, ["n0"])
    for i in range(60):
        record.outcome(ended(i, float(i), ttft_s=9.0 if i < 20 else 0.1))
    record.closed(70.0)
    found = summarise(record)
    assert found["requests"] == 40 and found["attainment"]["of_all"]["overall"] == 1.0
    assert found["devices"]["mean"] == pytest.approx(1.0) and found["devices"]["device_hours"] == pytest.approx(
        40 / 3600
    )
    assert found["devices"]["device_hours_after_the_trace"] == pytest.approx(10 / 3600)
    assert found["goodput_requests_s"] == pytest.approx(1.0)
    assert any("from second 20 on" in note for note in found["notes"])
    with pytest.raises(BadConfig, match="nothing comes from 60 s on"):
        Record(scenario_of(), since_s=60.0)


def test_memory_does_not_grow_with_requests() -> None:
    record = Record(scenario_of())
    before = [record.tallies.counts.shape, record.tallies.seconds.shape, record.tallies.waits.shape]
    for i in range(20_000):
        why = f"refused: reason {i}" if i % 3 == 0 else ""
        record.outcome(ended(i, i * 0.003, ttft_s=None if why else 0.5 + i % 7, why=why))
        record.decision(order(Verb.WAKE, why=f"reason {i}"), i * 0.003)
    record.settle()
    assert before == [record.tallies.counts.shape, record.tallies.seconds.shape, record.tallies.waits.shape]
    assert len(record.tallies.reasons) <= 65 and len(record.tallies.latest()) == 40
    assert sum(reason.requests for reason in record.tallies.reasons.values()) == len(range(0, 20_000, 3))
    assert record.decisions.counts == {"wake": 20_000}
    said = record.decisions.sentences
    assert len(said) < 1000 and said[0].at_s < 1.0 and said[-1].at_s > 59.0  # all of the run, not its beginning


def test_the_latest_are_those_that_missed_by_the_most() -> None:
    record = Record(scenario_of())
    for i in range(200):
        record.outcome(ended(i, i * 0.1, ttft_s=1.0 + (i * 37 % 200) / 100))
    found = summarise(record)["latest"]
    assert [late["ttft_s"] for late in found] == sorted((1.0 + k / 100 for k in range(160, 200)), reverse=True)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40), st.integers(0, 39))
def test_recovery_against_every_window_looked_at(drawn: list[tuple[int, int]], burst: int) -> None:
    seconds = np.zeros((len(drawn), len(Part)), np.int32)
    for i, (came, good) in enumerate(drawn):
        seconds[i, Part.CAME], seconds[i, Part.GOOD] = came, min(came, good)
    bad = bad_seconds(seconds, 1.0)
    burst = min(burst, len(drawn) - 1)

    def holds(t: int) -> bool:
        window = seconds[t : t + 5]
        return bool(window[:, Part.GOOD].sum() >= 0.95 * window[:, Part.CAME].sum())

    assert bad.tolist() == [not holds(t) for t in range(len(drawn))]
    recovered = next((t for t in range(burst, len(drawn)) if all(holds(u) for u in range(t, len(drawn)))), None)
    assert recovery_s(bad, 1.0, float(burst)) == (None if recovered is None else recovered - burst)


def test_recovery_of_nine_seconds() -> None:
    record = Record(scenario_of())
    for i in range(600):
        at_s = i * 0.1
        record.outcome(ended(i, at_s, ttft_s=3.0 if 20.0 <= at_s < 29.0 else 0.1))
    found = summarise(record, [20.0])
    assert found["bursts"] == [{"at_s": 20.0, "recovery_s": 9.0}]
    assert found["dips"]["spells"] == 1


events = st.lists(
    st.tuples(st.floats(0.01, 9.0), st.integers(0, 3), st.integers(0, 2), st.sampled_from(Stage), st.integers(0, 4)),
    max_size=40,
)  # fmt: skip


@settings(max_examples=60)
@given(events, st.sampled_from([20.0, 400.0]))
def test_the_cluster_over_time_against_brute_force(
    drawn: list[tuple[float, int, int, Stage, int]], duration_s: float
) -> None:
    """Also where the run lasts so much longer than its trace that bins are merged."""
    made = scenario_of([("x", "a"), ("y", "b"), ("z", "c")], duration_s, shards=2)
    record, now = Record(made), 0.0
    active: set[tuple[str, str]] = set()
    held = 0
    totals = {"held": 0.0, "inside": 0.0, "serving": 0.0, "a": 0.0, "share a": 0.0}
    for step_s, node, model, stage, count in drawn:
        nodes = {n for n, _ in active}
        totals["held"] += held * step_s
        totals["inside"] += held * max(0.0, min(now + step_s, duration_s) - now)
        totals["serving"] += len(nodes) * step_s
        totals["a"] += sum(m == "a" for _, m in active) / 2 * step_s
        totals["share a"] += sum(1 / sum(n == k for k, _ in active) for n, m in active if m == "a") * step_s
        now += step_s
        record.stage(f"n{node}", "abc"[model], stage, now)
        (active.add if stage is Stage.ACTIVE else active.discard)((f"n{node}", "abc"[model]))
        record.moment(now, ["x"] * count)
        held = count
    record.closed(now)
    line = record.timeline
    spans = np.full(line.bins, line.width_s)
    spans[-1] = now - (line.bins - 1) * line.width_s
    assert line.held_s + line.tail_s == pytest.approx(totals["held"], abs=1e-6)
    assert line.held_s == pytest.approx(totals["inside"], abs=1e-6)
    if now:
        assert line.held() @ spans == pytest.approx(totals["held"], abs=1e-6)
        assert line.serving() @ spans == pytest.approx(totals["serving"], abs=1e-6)
        assert line.replicas()[:, 0] @ spans == pytest.approx(totals["a"], abs=1e-6)
        assert line.shares()[:, 0] @ spans == pytest.approx(totals["share a"], abs=1e-6)
        assert line.shares().sum(axis=1) == pytest.approx(line.serving(), abs=1e-6)


def test_a_run_far_beyond_its_trace_keeps_its_memory_and_its_sums() -> None:
    record = Record(scenario_of(duration_s=10.0))
    for k in range(4000):
        record.moment(k * 0.5, ["n0", "n1"])
    record.closed(2000.0)
    line = record.timeline
    assert line.bins <= 960 and line.width_s >= 2.0
    assert line.held().sum() * line.width_s == pytest.approx(4000.0, rel=0.01) and line.held().max() < 2.001
    found = summarise(record)["devices"]
    assert found["device_hours"] == pytest.approx(20.0 / 3600)
    assert found["device_hours_after_the_trace"] == pytest.approx(2 * 1990.0 / 3600)
    assert (found["mean"], found["peak"], found["busy"]) == (pytest.approx(2.0), 2, None)


def test_devices_by_pool_follow_what_the_policy_says() -> None:
    record = Record(scenario_of())
    record.timeline.ask_pools = lambda: {"a": "steady", "b": "elastic"}
    for node, model in (("n0", "a"), ("n1", "b"), ("n2", "b")):
        record.stage(node, model, Stage.ACTIVE, 0.0)
    record.moment(0.0, ["n0", "n1", "n2"])
    record.closed(10.0)
    assert record.timeline.pool_names == ["elastic", "steady"]
    assert record.timeline.pools()[0].tolist() == [2.0, 1.0]


def test_decisions_are_counted_by_kind_and_what_is_frequent_leaves_room_for_what_is_not() -> None:
    decisions = Decisions(240.0)
    for k in range(50):
        decisions.add(order(Verb.DRAIN, why="x" * 1000), 0.01 * k)
    decisions.add(order(Verb.FORK), 0.6)
    decisions.add(Refuse(model="a", why="no room", retry_after_s=None), 0.7)
    decisions.add(Dispatch("n0", ("1", "2"), "here"), 0.8)
    decisions.add(Decided("a", "it cannot be helped"), 0.9)
    assert decisions.counts == {"drain": 50, "fork": 1, "refuse": 1, "dispatch": 1, "decided": 1}
    assert decisions.dispatched == 2
    assert [s.kind for s in decisions.sentences] == ["drain", "drain", "drain", "fork", "refuse", "decided"]
    assert max(len(s.why) for s in decisions.sentences) == 400
    decisions.began(order(Verb.FORK), 0.4)
    decisions.began(order(Verb.FORK), 0.8)
    assert decisions.took[("fork", "a")] == (2, pytest.approx(1.2), 0.4, 0.8)


# Reports


def recorded(name: str = "chat", seed: int = 0) -> Record:
    record = Record(scenario_of([(name, "a"), ("code", "b")]))
    draws = np.random.default_rng(seed)
    for i in range(400):
        record.outcome(ended(i, i * 0.15, i % 2, ttft_s=float(draws.uniform(0.1, 1.3)), tpot_s=0.02))
    record.outcome(ended(400, 59.0, ttft_s=None, why=f"refused: {name}"))
    record.decision(order(Verb.LOAD, why=f"it is wanted {name}"), 1.0)
    record.began(order(Verb.LOAD), 1.0, 2.5)
    record.moment(1.0, ["n0"])
    record.stage("n0", "a", Stage.ACTIVE, 3.5)
    record.closed(61.0)
    return record


def embedded(page: str) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_no_text_that_the_browser_would_read_as_its_own() -> None:
    records = {HOSTILE: recorded(HOSTILE), "@TABLE@": recorded("@DATA@")}
    text = html.page(records, {name: summarise(record) for name, record in records.items()})
    assert "<img" not in text and text.count("</script>") == 2
    assert "@TABLE@" in text and "@TITLE@" not in text and "@SCRIPT@" not in text
    data = embedded(text)
    assert [p["name"] for p in data["policies"]] == list(records)
    assert data["policies"][0]["heat"][1]["name"] == "code" or data["policies"][0]["heat"][0]["name"] == HOSTILE
    assert data["policies"][0]["sentences"] == [[1.0, "load", "a", "n0", f"it is wanted {HOSTILE}"]]
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name of SVG, which nobody fetches
    assert "default-src 'none'" in text


def test_what_is_written_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    records = {"janus": recorded(), "prism": recorded(seed=1)}
    found = report.write(records, tmp_path / "deep" / "out", bursts_s=[10.0])
    out = capsys.readouterr().out
    assert "janus" in out and "kept" in out and "not recovered" in out
    document = json.loads((tmp_path / "deep" / "out" / "summary.json").read_text())
    assert records["janus"].tallies.counts.sum() > 0
    assert document["prism"]["requests"] == found["prism"]["requests"] == 401
    pictures = sorted((tmp_path / "deep" / "out").glob("*.png"))
    assert [p.stem for p in pictures] == ["attainment", "cost", "devices", "models", "waits"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_a_run_without_a_request_is_reported_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(scenario_of())
    record.closed(0.0)
    report.write({"idle": record}, tmp_path, pictures=False)
    assert "no request came" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["idle"]["attainment"]["of_all"]["overall"] is None
    assert embedded((tmp_path / "report.html").read_text())["policies"][0]["name"] == "idle"


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    record = recorded()
    with pytest.raises(BadConfig, match="cannot be written"):
        report.save({"x": record}, {"x": summarise(record)}, tmp_path / "file" / "out")
    with pytest.raises(BadConfig, match="nothing to report"):
        report.write({})


def test_names_are_no_markup_on_the_terminal() -> None:
    from rich.console import Console

    out = io.StringIO()
    record = recorded("[red]x[/red]")
    report.show({"[bold]p[/bold]": summarise(record)}, Console(file=out, width=140, highlight=False))
    assert out.getvalue().count("[bold]p[/bold]") >= 2 and "[red]x[/red]" in out.getvalue()


def test_the_best_of_a_column() -> None:
    kept, hours = columns.COLUMNS[0], next(c for c in columns.COLUMNS if c.title == "device-hours")
    found = {n: {"attainment": {"of_all": {"overall": v}}, "devices": {"device_hours": h}}
             for n, v, h in (("a", 0.9, 10.0), ("b", 0.99, 10.0), ("c", None, 10.0))}  # fmt: skip
    assert columns.best_of(kept, found) == {"b"}
    assert columns.best_of(hours, found) == set()  # all alike
    assert columns.share(0.9999) == "99.9 %" and columns.share(1.0) == "100.0 %" and columns.share(0.97) == "97.0 %"


# How many devices


def tried(nodes: int, attainment: float, **models: tuple[int, int]) -> Trial:
    return Trial(nodes, attainment, {m: Kept(*k) for m, k in models.items()})


@given(st.lists(st.booleans(), min_size=1, max_size=70), st.integers(1, 8))
def test_the_answer_was_run_and_one_less_was_not_enough(enough: list[bool], first: int) -> None:
    """Whatever the loads do, monotone or not."""
    most, asked = len(enough), []

    def attempt(nodes: int) -> Trial:
        asked.append(nodes)
        return tried(nodes, 0.96 if enough[nodes - 1] else 0.5)

    first = min(first, most)
    try:
        found = search(attempt, 0.95, first=first, most=most)
    except BadConfig:
        assert not enough[-1]
        return
    assert enough[found.enough.nodes - 1]
    assert found.enough.nodes == 1 or (found.below is not None and not enough[found.enough.nodes - 2])
    assert len(asked) == len(set(asked)) <= 2 * math.log2(most + 1) + 3
    assert {t.nodes for t in found.odd} == {n for n in asked if n > found.enough.nodes and not enough[n - 1]}
    if enough == sorted(enough):  # monotone: the very least
        assert found.enough.nodes == enough.index(True) + 1


def test_the_marginal_model_is_the_one_that_loses_most_requests() -> None:
    answer = tried(8, 0.96, big=(1000, 980), small=(10, 10), idle=(0, 0))
    below = tried(7, 0.91, big=(1000, 900), small=(10, 5), idle=(0, 0))
    found = marginal(answer, below)
    assert found is not None and found == ("big", 0.98, 0.9)
    assert marginal(answer, tried(7, 0.0)) is None
    lines = sentences(search(lambda n: answer._replace(nodes=n) if n >= 8 else below._replace(nodes=n), 0.95))
    assert lines[0].startswith("8 devices: 96.0 %") and "big" in lines[2] and "90.0 %" in lines[2]


def test_a_search_that_cannot_end_well_says_why() -> None:
    with pytest.raises(BadConfig, match=r"only 50.0 %; the worst model is b with 25.0 %"):
        search(lambda n: tried(n, 0.5, a=(4, 3), b=(4, 1)), 0.9, most=16)
    with pytest.raises(BadConfig, match="can run this: too large"):
        search(lambda n: Trial(n, 0.0, {}, why="too large"), 0.9, most=4)
    for target in (0.0, 1.5):
        with pytest.raises(BadConfig, match="target"):
            search(lambda n: tried(n, 1.0), target)


def test_what_is_judged() -> None:
    record = Record(scenario_of([("x", "a"), ("y", "b")], 2 * HOUR_S))
    for i in range(300):
        record.outcome(ended(i, i * 20.0, 0, ttft_s=5.0 if i < 30 else 0.1))
    for i in range(4):
        record.outcome(ended(300 + i, 7000.0, 1, ttft_s=9.0 if i else 0.1))
    found = summarise(record)
    assert judged(found, Judge.OVERALL) == pytest.approx(271 / 304)
    assert judged(found, Judge.HOUR) == pytest.approx(150 / 180)
    assert judged(found, Judge.APPLICATION) == 0.25  # the tail, pooled
    assert trial_of(3, found).models["a"] == (300, 270)


# Stories


def test_a_story_names_who_was_ahead_and_by_what_it_was_late() -> None:
    calls = [
        Call(0, 1.0, 0, 10, 5),
        Call(1, 1.5, 0, 10, 5),
        Call(2, 2.0, 0, 120, 5),
        Call(3, 2.5, 0, 10, 5),
        Call(5, 2.6, 0, 10, 5),
        Call(4, 9.0, 1, 1, 1),
    ]
    witness = Witness(scenario_of(calls=calls), 2)
    witness.stage("n1", "a", Stage.ACTIVE, 0.5)
    witness.decision(order(Verb.LOAD, why="long before"), 0.6)
    witness.decision(Dispatch("n1", ("0",), "first come"), 1.1)
    witness.moment(2.0, [])
    witness.decision(order(Verb.FORK, node="n2", why="one is not enough"), 2.2)
    witness.decision(order(Verb.FORK, model="b", node="n3", why="not ours"), 2.3)
    witness.decision(Dispatch("n1", ("1", "3", "5"), "by deadline"), 3.0)
    witness.decision(Dispatch("n1", ("2",), "its turn"), 3.5)
    with pytest.raises(Told):
        witness.outcome(Outcome(calls[2], 2.25, 0.02, 4.4, "n1"))
    lines = story(witness)
    text = "\n".join(lines)
    assert "came at 00:00:02.000 for a, with a prompt of 120 tokens" in text
    assert "Active on 1 device (n1) then; 1 of its requests waited already: 1." in text
    assert "00:00:02.200: decided to fork a on n2: one is not enough" in text
    assert "not ours" not in text and "long before" not in text
    assert "begun on n1 after 1.50 s: its turn; 3 of its model's requests were begun before it" in text
    assert "2 of which had come later" in text
    assert "4 of its model ran there already" in text
    assert "its first token, after 2.25 s: 1.25 s late." in text
    assert lines[-1].endswith("Its promise was broken.")


def device_of(asked: Scenario, node: NodeSpec) -> Device:
    return devices.make("step", node, asked.models, (), asked.apps)


def test_the_story_of_a_run_ends_like_the_run() -> None:
    asked = scenario.read("smoke", 3, {"duration_s": "6"})

    class Kept:
        """All outcomes, beside the record's."""

        def __init__(self) -> None:
            self.record, self.seen = Record(asked), {}  # type: ignore[var-annotated]

        def outcome(self, outcome: Outcome) -> None:
            self.seen[outcome.call.id] = outcome

        def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
            return getattr(self.record, name)

    kept = Kept()
    make = functools.partial(policies.make, "prism", asked)
    device = functools.partial(device_of, asked)
    run(asked, make, device, kept)  # type: ignore[arg-type]
    for id in sorted(kept.seen)[:: max(1, len(kept.seen) // 4)]:
        outcome = kept.seen[id]
        lines = explain(asked, make, device, id)
        app = asked.apps[outcome.call.app]
        first_s = math.inf if outcome.ttft_s is None else outcome.ttft_s
        good = not outcome.why and first_s <= app.ttft_s and outcome.tpot_s <= app.tpot_s
        assert ("was kept" in lines[-1]) == good
        assert any(f"after {columns.seconds(outcome.ttft_s)}:" in line for line in lines) or outcome.ttft_s is None
        assert outcome.ttft_s is None or any(f"begun on {outcome.node}" in line for line in lines)
    with pytest.raises(BadConfig, match="no request 999999"):
        explain(asked, make, device, 999_999)


def test_plan_finds_and_shows_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text("""
about = "a model that does not fit on one small device"
[cluster]
devices = 1
host_memory = "100GB"
memory = "24GB"
[workload]
source = "apps"
duration_s = 8
[[apps]]
name = "one"
model = "Qwen3-8B"
ttft_s = 30.0
per_second = 1.0
lengths = "100/4"
""")
    out = tmp_path / "plan.json"
    asked = ["--scenario", str(path), "--policy", "prism", "--fidelity", "step", "--most", "4", "--quiet"]
    assert plan_command.main([*asked, "--target", "0.5", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "2 devices:" in shown and "with 1 it cannot run: tiny: Qwen3-8B takes 2 devices" in shown
    document = json.loads(out.read_text())
    assert document["nodes"] == 2 and [t["nodes"] for t in document["trials"]] == [1, 2]
    for wrong, words in (
        (["--set", "hosts=3"], "number of devices"),
        (["--set", "x"], "KEY=VALUE"),
    ):
        with pytest.raises(BadConfig, match=words):
            plan_command.main([*asked, *wrong])
