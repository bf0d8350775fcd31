"""The simulator's world: links shared fairly, orders that take what physics says, requests that end once each."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_toys import LONGEST, Diary, Rover, Script, live_through, model_spec, node_spec, scenario_of

from bench import simulate
from bench.simulator import devices, policies, scenario
from bench.simulator.links import Links
from bench.simulator.records import Call, Fault, FaultKind
from bench.simulator.run import Bar, run
from bench.simulator.serving import PATIENCE_S
from bench.simulator.world import Seen
from janus_server.errors import BadConfig, Bug
from janus_server.orders import Counted, Done, Failed, Lost, Observed, Report, Stage, Traffic, Unwanted, Verb, Wanted

# Links


def fair(flows: dict[int, tuple[float, tuple[str, ...]]], capacity: dict[str, float]) -> dict[int, float]:
    """Max-min by raising all rates together in small steps until a link is full."""
    rates, frozen = dict.fromkeys(flows, 0.0), set[int]()
    for _ in range(len(flows)):
        open_ = [flow for flow in flows if flow not in frozen]
        if not open_:
            break
        more = min(
            (capacity[link] - sum(rates[f] for f in flows if link in flows[f][1])) / count
            for link in capacity
            if (count := sum(link in flows[f][1] for f in open_))
        )
        for flow in open_:
            rates[flow] += more
        for link, room in capacity.items():
            if sum(rates[f] for f in flows if link in flows[f][1]) >= room * (1 - 1e-9):
                frozen |= {f for f in flows if link in flows[f][1]}
    return rates


def integrate(begins: list[tuple[float, float, tuple[str, ...]]], capacity: dict[str, float]) -> dict[int, float]:
    """When each transfer ends: from event to event, with all rates anew each time."""
    left = {i: size for i, (_, size, _) in enumerate(begins)}
    now, ends = 0.0, dict[int, float]()
    while len(ends) < len(begins):
        on = {i: (left[i], begins[i][2]) for i in left if begins[i][0] <= now and i not in ends}
        rates = fair(on, capacity)
        until = [begins[i][0] for i in left if begins[i][0] > now] + [now + left[i] / rates[i] for i in on]
        then = min(until)
        for i in on:
            left[i] -= rates[i] * (then - now)
            if left[i] <= 1e-6:
                ends[i] = then
        now = then
    return ends


LINKS_OF = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True).map(tuple)
BEGINS = st.lists(st.tuples(st.floats(0, 5), st.floats(1, 50), LINKS_OF), min_size=1, max_size=6)


@given(BEGINS, st.fixed_dictionaries({link: st.floats(1, 20) for link in "abcd"}))
@settings(max_examples=150, deadline=None)
def test_links_are_shared_as_a_brute_force_integration_shares_them(
    begins: list[tuple[float, float, tuple[str, ...]]], capacity: dict[str, float]
) -> None:
    # A byte is the least there is: sizes in gigabytes, so that rounding to bytes is nothing.
    links, ends = Links(lambda link: capacity[str(link)] * 1e9), dict[int, float]()
    todo = sorted(range(len(begins)), key=lambda i: begins[i][0])
    while len(ends) < len(begins):
        due_s = links.next_s()
        if todo and (due_s is None or begins[todo[0]][0] <= due_s):
            at_s, size, path = begins[todo[0]]
            for over in links.ended(at_s):
                ends[int(str(over.thing))] = over.ends_s
            links.begin(todo.pop(0), size * 1e9, path, at_s)
            continue
        assert due_s is not None
        for over in links.ended(due_s):
            ends[int(str(over.thing))] = due_s
    want = integrate(begins, capacity)
    assert ends == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_a_cancelled_transfer_leaves_its_link_to_the_other() -> None:
    links = Links(lambda _: 10.0e9)
    one = links.begin("one", 100e9, ("a",), 0.0)
    links.begin("two", 100e9, ("a",), 0.0)
    assert links.next_s() == pytest.approx(20.0)
    links.cancel(one, 10.0)  # 50 of each are left
    assert links.next_s() == pytest.approx(15.0)
    assert [over.thing for over in links.ended(15.0)] == ["two"]
    assert links.next_s() is None


# Orders

A, B = "model-a", "model-b"
LOAD_S = 0.5 + 6.5 / 3.0  # 6.5 GB from disk
FORK_S = 0.283 + 6.5 / 65.0
WAKE_S = 0.283 + 6.5 / 59.0
SLEEP_S = 6.5 / 59.0


def test_orders_take_what_the_paths_take() -> None:
    nodes, models = [node_spec("n1"), node_spec("n2")], [model_spec(A)]
    script = Script(
        (1.0, "n1", A, Verb.LOAD, None),
        (10.0, "n2", A, Verb.FORK, "n1"),
        (20.0, "n1", A, Verb.SLEEP, None),
        (30.0, "n1", A, Verb.WAKE, None),
        (40.0, "n1", A, Verb.SLEEP, None),  # its copy is there still
        (50.0, "n1", A, Verb.EVICT, None),
        (60.0, "n2", A, Verb.UNLOAD, None),
    )
    _, diary = live_through(scenario_of([], nodes, models, 70.0), lambda: script)
    took = [event.took_s for _, event in script.told(Done) if isinstance(event, Done)]
    assert took == pytest.approx([LOAD_S, FORK_S, SLEEP_S, WAKE_S, 0.0, 0.0, 0.0], abs=1e-3)
    assert [now for now, _ in script.told(Done)][:2] == pytest.approx([1.0 + LOAD_S, 10.0 + FORK_S])
    assert [takes_s for _, takes_s in diary.orders.values()] == pytest.approx([LOAD_S, FORK_S, SLEEP_S, WAKE_S])
    ends = [(e.stage, e.copy) for _, e in script.told(Done) if isinstance(e, Done)]
    warm, up = (Stage.WARM, True), (Stage.ACTIVE, True)
    assert ends == [
        (Stage.ACTIVE, False),
        (Stage.ACTIVE, False),
        warm,
        up,
        warm,
        (Stage.COLD, False),
        (Stage.COLD, False),
    ]
    holding = {now: nodes for now, nodes in diary.moments}
    assert holding[0.5] == () and holding[5.0] == ("n1",) and holding[15.0] == ("n1", "n2") and holding[65.0] == ()


def test_copies_that_hosts_hold_from_the_start_are_told_of_and_can_be_woken() -> None:
    script = Script((1.0, "n1", A, Verb.WAKE, None))
    scenario = scenario_of([], [node_spec("n0"), node_spec("n1")], [model_spec(A), model_spec(B)], 5.0)
    live_through(msgspec.structs.replace(scenario, copies={"n1": (A, B)}), lambda: script)
    told = [(e.node, e.model, e.stage, e.copy) for _, e in script.told(Lost) if isinstance(e, Lost)]
    assert told == [("n1", A, Stage.WARM, True), ("n1", B, Stage.WARM, True)]
    assert [e.took_s for _, e in script.told(Done) if isinstance(e, Done)] == pytest.approx([WAKE_S])


def test_sixteen_devices_of_a_host_share_its_memory() -> None:
    nodes = [node_spec(f"n{i}") for i in range(16)]
    bring = [(1.0, f"n{i}", A, Verb.LOAD, None) for i in range(16)]
    sleep = [(200.0, f"n{i}", A, Verb.SLEEP, None) for i in range(16)]
    wake = [(300.0, f"n{i}", A, Verb.WAKE, None) for i in range(16)]
    script = Script(*bring, *sleep, *wake)
    live_through(scenario_of([], nodes, [model_spec(A, 42e9)], 400.0), lambda: script)
    took = [event.took_s for _, event in script.told(Done) if isinstance(event, Done)]
    assert took[:16] == pytest.approx([0.5 + 16 * 42 / 6.0] * 16, rel=1e-3)
    assert took[32:] == pytest.approx([0.283 + 16 * 42 / 276.0] * 16, rel=1e-3)


def test_a_source_steps_slower_while_it_is_read_and_a_copy_from_who_lacks_it_fails() -> None:
    nodes = [node_spec(f"n{i}") for i in range(3)]
    script = Script((1.0, "n0", A, Verb.LOAD, None), (10.0, "n1", A, Verb.FORK, "n0"), (10.1, "n2", A, Verb.FORK, "n1"))
    world, _ = live_through(scenario_of([], nodes, [model_spec(A)], 20.0), lambda: script)
    source = world.device("n0")
    assert len(source.factors) == 2 and source.factors[0] > 1.0 and source.factors[1] == 1.0
    failed = [event for _, event in script.told(Failed) if isinstance(event, Failed)]
    assert [f.reason for f in failed] == ["n1 does not hold it"]


def test_what_is_busy_or_read_does_not_go() -> None:
    calls = [Call(1, 5.0, 0, 100, 500)]
    script = Script(
        (1.0, "n0", A, Verb.LOAD, None), (6.0, "n0", A, Verb.SLEEP, None), (20.0, "n1", A, Verb.FORK, "n0"),
        (20.1, "n0", A, Verb.UNLOAD, None), (20.2, "n1", A, Verb.SLEEP, None) ,
    )  # fmt: skip
    with pytest.raises(Bug, match="while order 3 is open"):
        live_through(scenario_of(calls, [node_spec("n0"), node_spec("n1")], [model_spec(A)], 30.0), lambda: script)
    reasons = [event.reason for _, event in script.told(Failed) if isinstance(event, Failed)]
    assert reasons == ["requests came for it", "its weights are being read"]


def test_a_policy_that_over_commits_pages_is_a_bug_that_names_the_order() -> None:
    script = Script(*[(1.0, "n0", name, Verb.LOAD, None) for name in ("a", "b", "c")])
    models = [model_spec(name) for name in ("a", "b", "c")]
    with pytest.raises(Bug, match=r"order 3 \(load c on n0\) takes 42 pages where 16 of 100 are free"):
        live_through(scenario_of([], [node_spec("n0")], models, 5.0), lambda: script)


def test_a_policy_that_over_commits_host_memory_is_a_bug_that_names_the_order() -> None:
    names = ("a", "b")
    steps = [(1.0 + i, "n0", name, Verb.LOAD, None) for i, name in enumerate(names)]
    steps += [(10.0 + i, "n0", name, Verb.SLEEP, None) for i, name in enumerate(names)]
    with pytest.raises(Bug, match=r"order 4 \(sleep b on n0\) makes 80 bytes of host copies where 79"):
        live_through(
            scenario_of([], [node_spec("n0", host_bytes=79)], [model_spec(name) for name in names], 20.0),
            lambda: Script(*steps),
        )


def test_a_replica_of_two_shards_serves_when_both_are_there_and_its_head_does_the_work() -> None:
    calls = [Call(1, 2.0, 0, 100, 201)]
    script = Script((1.0, "n0", A, Verb.LOAD, None), (5.0, "n1", A, Verb.LOAD, None))
    script.replicas[A] = ("n1", "n0")
    nodes, models = [node_spec("n0"), node_spec("n1")], [model_spec(A, 13e9, shards=2)]
    _, diary = live_through(scenario_of(calls, nodes, models, 10.0), lambda: script)
    (outcome,) = diary.outcomes
    assert outcome.node == "n1" and outcome.ttft_s == pytest.approx(5.0 + LOAD_S + 0.01 - 2.0)
    reports = [event for _, event in script.told(Report) if isinstance(event, Report)]
    assert {report.node for report in reports if report.models and report.models[A].running} == {"n0", "n1"}


def test_every_shard_is_told_idle_after_a_request_between_two_beats_and_after_another_shard_died() -> None:
    calls = [Call(1, 6.1, 0, 100, 2), Call(2, 7.1, 0, 100, 90_000)]
    script = Script((0.0, "n0", A, Verb.LOAD, None), (0.0, "n1", A, Verb.LOAD, None))
    script.replicas[A] = ("n0", "n1")
    nodes, models = [node_spec("n0"), node_spec("n1")], [model_spec(A, 13e9, shards=2)]
    faults = [Fault(at_s=7.2, kind=FaultKind.NODE, node="n0", lasts_s=30.0)]
    live_through(scenario_of(calls, nodes, models, 10.0, faults), lambda: script)
    told = [
        (now, e.models[A]) for now, e in script.told(Report) if isinstance(e, Report) and e.node == "n1" and e.models
    ]
    assert [busy.running for now, busy in told if 6.1 < now < 7.1] == [0]
    assert [busy.running for now, busy in told if 7.2 < now] == [0]


def test_shards_that_do_not_make_a_replica_are_a_bug() -> None:
    script = Script((1.0, "n0", A, Verb.LOAD, None))
    with pytest.raises(Bug, match="names 1 nodes of a replica of 2 shards"):
        live_through(
            scenario_of([], [node_spec("n0"), node_spec("n1")], [model_spec(A, shards=2)], 5.0), lambda: script
        )


# Requests


def test_a_request_is_told_of_begun_and_ended_with_the_right_times() -> None:
    calls = [Call(7, 0.25, 0, 1000, 11), Call(8, 6.0, 0, 2000, 1), Call(9, 6.0, 0, 1000, 2)]
    script = Script((0.0, "n0", A, Verb.LOAD, None))
    _, diary = live_through(scenario_of(calls, [node_spec("n0")], [model_spec(A)], 10.0), lambda: script)
    first, second, third = diary.outcomes
    assert (first.call.id, first.node, first.why) == (7, "n0", "")
    assert first.ttft_s == pytest.approx(LOAD_S + 0.1 - 0.25) and first.tpot_s == pytest.approx(0.01)
    assert second.ttft_s == pytest.approx(0.2) and second.tpot_s == 0.0  # its first token is its last
    assert third.ttft_s == pytest.approx(0.3) and third.ended_s == pytest.approx(6.31)
    traffic = [event for _, event in script.told(Traffic) if isinstance(event, Traffic)]
    assert [t.id for event in traffic for t in event.arrived] == ["7", "8", "9"]
    assert [name for event in traffic for name in event.started] == ["7", "8", "9"]
    assert [name for event in traffic for name in event.left] == ["7", "8", "9"]
    assert traffic[0].arrived[0].work_s == pytest.approx(0.1) and traffic[0].arrived[0].ttft_s == 1.0
    assert [(now, type(e).__name__) for now, e in script.heard if isinstance(e, Wanted | Unwanted)] == [
        (0.25, "Wanted"), (pytest.approx(LOAD_S), "Unwanted")
    ]  # fmt: skip
    counted = [event.models[A] for _, event in script.told(Counted) if isinstance(event, Counted)]
    assert (counted[-1].input_tokens, counted[-1].output_tokens, counted[-1].ended, counted[-1].late) == (
        4000,
        14,
        3,
        1,
    )
    for before, after in itertools.pairwise(counted):
        assert before.output_tokens <= after.output_tokens and before.input_tokens <= after.input_tokens


def test_a_request_that_no_device_can_hold_is_refused() -> None:
    script = Script((0.0, "n0", A, Verb.LOAD, None))
    calls = [Call(1, 5.0, 0, LONGEST, 1), Call(2, 5.0, 0, 10, 1)]
    _, diary = live_through(scenario_of(calls, [node_spec("n0")], [model_spec(A)], 10.0), lambda: script)
    assert [(outcome.call.id, outcome.why[:8]) for outcome in diary.outcomes] == [(1, "refused:"), (2, "")]
    assert [t.id for _, e in script.told(Traffic) if isinstance(e, Traffic) for t in e.arrived] == ["2"]


def test_windows_are_observed_with_the_replicas_that_were_there_all_the_time() -> None:
    calls = [Call(i, 0.3 * i, 0, 100, 3) for i in range(400)]
    script = Script((0.0, "n0", A, Verb.LOAD, None), (45.0, "n1", A, Verb.FORK, "n0"))
    _, _ = live_through(scenario_of(calls, [node_spec("n0"), node_spec("n1")], [model_spec(A)], 125.0), lambda: script)
    seen = [(now, e.models[A]) for now, e in script.told(Observed) if isinstance(e, Observed) and e.models]
    assert [now for now, _ in seen] == [30.0, 60.0, 90.0, 120.0]
    assert [one.replicas for _, one in seen] == [0, 0, 2, 2]
    assert seen[2][1].features.request_rate == pytest.approx(1 / 0.3, rel=0.02)
    assert seen[2][1].requests == pytest.approx(100, abs=1) and seen[2][1].on_time == seen[2][1].requests
    assert seen[2][1].compute == pytest.approx(100 * 0.01 / 30 / 2, rel=0.02)
    assert sum(one.requests for _, one in seen) == 400


def test_nobody_waits_for_ever_for_a_model_that_is_never_placed() -> None:
    calls = [Call(i, float(i), i % 2, 10, 2) for i in range(20)]
    models = [model_spec(A), model_spec(B)]
    script = Script((0.0, "n0", A, Verb.LOAD, None))
    world, diary = live_through(scenario_of(calls, [node_spec("n0")], models, 20.0), lambda: script)
    assert Counter(outcome.why for outcome in diary.outcomes) == {
        "": 10,
        "refused: its model was not there for 120 s": 10,
    }
    assert max(outcome.ended_s for outcome in diary.outcomes) <= 20.0 + PATIENCE_S
    assert world.lines == [f"never served: {B}"]


def test_a_policy_that_begins_nothing_ends_with_a_clear_line() -> None:
    script = Script((0.0, "n0", A, Verb.LOAD, None))
    script.ready = lambda model: False  # type: ignore[method-assign]
    calls = [Call(i, float(i), 0, 10, 2) for i in range(5)]
    world, diary = live_through(scenario_of(calls, [node_spec("n0")], [model_spec(A)], 10.0), lambda: script)
    assert {outcome.why for outcome in diary.outcomes} == {"unfinished at the end of the run"}
    assert world.lines and world.lines[0].startswith("5 requests had not ended")
    assert diary.closed_s is not None and diary.closed_s < 700.0


class _Hasty(Script):
    """Wants to be woken now, always."""

    def next_wake(self, now: float) -> float | None:
        return now


def test_a_policy_that_always_wants_to_be_woken_now_does_not_stop_the_clock() -> None:
    _, diary = live_through(scenario_of([], [node_spec("n0")], [model_spec(A)], 2.0), lambda: _Hasty())
    assert diary.closed_s == pytest.approx(2.0, abs=0.5)


# Faults


def test_a_node_that_dies_gives_back_who_saw_no_token_and_cuts_off_the_others() -> None:
    calls = [Call(1, 4.0, 0, 100, 1000), Call(2, 5.0, 0, 100_000, 5)]
    script = Script((0.0, "n0", A, Verb.LOAD, None), (0.0, "n1", B, Verb.LOAD, None), (9.0, "n1", A, Verb.LOAD, None))
    faults = [Fault(at_s=8.0, kind=FaultKind.NODE, node="n0", lasts_s=30.0)]
    nodes, models = [node_spec("n0"), node_spec("n1")], [model_spec(A), model_spec(B)]
    _, diary = live_through(scenario_of(calls, nodes, models, 60.0, faults), lambda: script)
    cut, again = diary.outcomes
    assert (cut.call.id, cut.node, cut.why, cut.ended_s) == (1, "n0", "cut: n0 lost it", 8.0)
    assert again.call.id == 2 and again.node == "n1" and again.ttft_s == pytest.approx(9.0 + LOAD_S + 10.0 - 5.0)
    names = [type(event).__name__ for now, event in script.heard if now == 8.0]
    assert names.index("Left") < names.index("Traffic")
    told = [event for now, event in script.heard if now == 8.0 and isinstance(event, Traffic)]
    assert set(told[0].left) == {"1", "2"} and [t.id for t in told[-1].arrived] == ["2"]
    assert [now for now, event in script.heard if type(event).__name__ == "Joined"] == [0.0, 0.0, 38.0]
    assert diary.moments[30][1] == ("n1",)


def test_copies_that_fail_leave_everything_as_it_was() -> None:
    script = Script(
        (0.0, "n0", A, Verb.LOAD, None), (10.0, "n1", A, Verb.FORK, "n0"), (10.3, "n1", A, Verb.LOAD, None),
        (12.0, "n1", A, Verb.LOAD, None), (12.0, "n1", B, Verb.LOAD, None),
    )  # fmt: skip
    faults = [Fault(at_s=10.2, kind=FaultKind.COPY, node="n1", lasts_s=1.0)]
    nodes, models = [node_spec("n0"), node_spec("n1")], [model_spec(A), model_spec(B)]
    live_through(scenario_of([], nodes, models, 20.0, faults), lambda: script)
    failed = [(now, event.stage) for now, event in script.told(Failed) if isinstance(event, Failed)]
    assert failed == [(10.2, Stage.COLD), (10.3, Stage.COLD)]
    done = [now for now, _ in script.told(Done)]
    assert done[1:] == pytest.approx([12.5 + 13.0 / 3.0] * 2)  # one device reads both


def test_a_new_leader_is_told_what_nodes_know_and_who_waits() -> None:
    calls = [Call(1, 4.0, 0, 100, 1000), Call(2, 5.5, 1, 10, 5)]
    first = Script((0.0, "n0", A, Verb.LOAD, None), (0.0, "n0", B, Verb.LOAD, None), (5.2, "n0", B, Verb.SLEEP, None),
                   (5.9, "n1", A, Verb.FORK, "n0"))  # fmt: skip
    second = Script((7.0, "n0", B, Verb.WAKE, None))
    leaders = iter([first, second])
    faults = [Fault(at_s=6.0, kind=FaultKind.LEADER)]
    nodes, models = [node_spec("n0"), node_spec("n1")], [model_spec(A), model_spec(B)]
    _, diary = live_through(scenario_of(calls, nodes, models, 20.0, faults), lambda: next(leaders))
    names = [type(event).__name__ for now, event in second.heard if now == 6.0]
    assert names[:5] == ["Joined", "Lost", "Report", "Joined", "Report"] and "Traffic" in names and "Wanted" in names
    assert sorted(outcome.why for outcome in diary.outcomes) == ["", ""]
    assert not [event for now, event in second.told(Done) if isinstance(event, Done) and event.order != 1]
    assert not any("n1" in nodes for now, nodes in diary.moments if now > 6.5)  # the fork was undone


CHOICES = st.randoms(use_true_random=False)
FAULT = st.builds(
    Fault, at_s=st.floats(0, 30), kind=st.sampled_from(FaultKind), node=st.sampled_from(["n0", "n1", "n2"]),
    lasts_s=st.floats(0, 10),
)  # fmt: skip


@given(CHOICES, st.lists(FAULT, max_size=4), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_whatever_policies_and_faults_do(
    rng: random.Random, faults: list[Fault], count: int
) -> None:
    at_s = sorted(rng.uniform(0, 30) for _ in range(count))
    calls = [Call(i, at, rng.randrange(3), rng.randrange(1, 3000), rng.randrange(1, 300)) for i, at in enumerate(at_s)]
    nodes = [node_spec("n0"), node_spec("n1"), node_spec("n2", host="h2", domain="d2")]
    models = [model_spec(name, pages=pages) for name, pages in (("a", 40), ("b", 50), ("c", 90))]
    scenario = scenario_of(calls, nodes, models, 30.0, faults)
    seed = rng.random()

    def once() -> list[tuple[object, ...]]:
        draw = random.Random(seed)
        world, diary = live_through(scenario, lambda: Rover(lambda n: int(draw.random() * n), scenario))
        assert Counter(outcome.call.id for outcome in diary.outcomes) == Counter(range(count))
        world.check_ledger()
        for outcome in diary.outcomes:
            assert outcome.ended_s >= outcome.call.at_s and (outcome.why or outcome.ttft_s is not None)
            if not outcome.why:
                least_s = outcome.call.input_tokens * 1e-4
                assert outcome.ttft_s is not None and outcome.ttft_s >= least_s - 1e-9
        return [(o.call.id, o.ttft_s, o.ended_s, o.node, o.why) for o in diary.outcomes]

    assert once() == once()


# What makes no sense


def test_a_scenario_that_makes_no_sense_is_refused_before_the_run() -> None:
    node, model = node_spec("n0"), model_spec(A)
    for bad, says in (
        (scenario_of([], [], [model], 1.0), "there are no nodes"),
        (scenario_of([], [node, node], [model], 1.0), "the same name"),
        (scenario_of([], [node], [model_spec(A, pages=99)], 1.0), "the largest device has 100"),
        (scenario_of([], [node], [model_spec(A, shards=2)], 1.0), "takes 2 devices"),
        (msgspec.structs.replace(scenario_of([], [node], [model], 1.0), copies={"n0": ("x",)}), "is not there"),
        (msgspec.structs.replace(scenario_of([], [node], [model], 1.0), copies={"n0": (A, A)}), "no host memory"),
        (scenario_of([], [node], [model], 1.0, [Fault(at_s=1.0, kind=FaultKind.NODE, node="nx")]), "not there"),
        (scenario_of([Call(1, 2.0, 0, 5, 5), Call(2, 1.0, 0, 5, 5)], [node], [model], 3.0), "after one at"),
        (scenario_of([Call(1, 0.0, 0, -5, 5)], [node], [model], 1.0), "-5 tokens in"),
        (scenario_of([Call(1, float("nan"), 0, 5, 5)], [node], [model], 1.0), "comes at nan s"),
    ):
        with pytest.raises(BadConfig, match=says):
            live_through(bad, lambda: Script())


# All parts together


@pytest.mark.parametrize("fidelity", ["fluid", "step"])
@pytest.mark.parametrize("name", ["janus", "static", "serverlessllm"])
def test_real_policies_and_devices_end_every_request_once_and_the_same_each_time(name: str, fidelity: str) -> None:
    asked = scenario.read("smoke", 3, {"duration_s": "15"})
    faults = (Fault(at_s=9.0, kind=FaultKind.NODE, node=asked.nodes[1].name, lasts_s=5.0),)
    asked = msgspec.structs.replace(asked, faults=faults)
    outcomes = []
    for _ in range(2):
        diary = Diary()
        make = functools.partial(policies.make, name, asked)
        done = run(asked, make, lambda node: devices.make(fidelity, node, asked.models, (), asked.apps), diary)
        assert Counter(o.call.id for o in diary.outcomes) == Counter(call.id for call in asked.calls)
        assert done.came == len(diary.outcomes) > 100 and sum(done.used_s.values()) > 0.0
        outcomes.append(diary.outcomes)
    assert outcomes[0] == outcomes[1]
    assert sum(not outcome.why for outcome in outcomes[0]) > 0.5 * len(outcomes[0])
    for outcome in outcomes[0]:
        if not outcome.why:
            assert outcome.ttft_s is not None and outcome.ttft_s > 0.0 and outcome.tpot_s >= 0.0
            last_s = outcome.call.at_s + outcome.ttft_s + outcome.tpot_s * (outcome.call.output_tokens - 1)
            assert outcome.ended_s == pytest.approx(last_s)


def test_the_command_says_what_is_wrong_and_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "day62" in listed and "serverlessllm" in listed
    for arguments, says in (
        (["--policy", "janos"], "did you mean"),
        (["--scenario", "nowhere"], "no scenario is named"),
        (["--fidelity", "rough"], "step, fluid"),
        (["--set", "duration_s"], "KEY=VALUE"),
    ):
        with pytest.raises(BadConfig, match=says):
            simulate.main(arguments)


def test_the_command_compares_policies_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--set", "duration_s=10", "--policy", "janus", "static", "--quiet", "--out", str(tmp_path)]
    assert simulate.main(arguments) == 0
    shown = capsys.readouterr()
    assert "janus" in shown.out and "static" in shown.out and not shown.err
    assert set(json.loads((tmp_path / "summary.json").read_text())) == {"janus", "static"}
    assert simulate.main(["--set", "duration_s=10", "--explain", "5", "--quiet"]) == 0
    assert "5" in capsys.readouterr().out


def test_the_bar_says_how_far_a_run_is() -> None:
    line = Bar("janus", 7200.0).line(Seen(3600.0, 50_000, 12), 10.0)
    assert "1:00:00 of 2:00:00" in line and "360 s/s" in line and "5,000 requests/s" in line and "0:00:10 left" in line
