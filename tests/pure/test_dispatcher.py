"""The live side of dispatch: what is begun when, with one device and several, and that nobody waits for ever."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.orders import Ticket
from janus_server.sched.dispatcher import Dispatcher


def _ticket(
    name: str, work_s: float, ttft_s: float | None, arrived_s: float = 0.0, model: str = "m", priority: int = 0
) -> Ticket:
    return Ticket(id=name, model=model, prompt_tokens=1, work_s=work_s, arrived_s=arrived_s, ttft_s=ttft_s,
                  priority=priority)  # fmt: skip


def _begun(dispatcher: Dispatcher, now: float, *machines: str) -> list[tuple[str, str]]:
    return [(one.ticket.id, one.machine) for one in dispatcher.begin(now, lambda model: machines)]


def test_the_worked_example() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    dispatcher.arrived(_ticket("a", 1.0, 5.0), 0.0)
    assert _begun(dispatcher, 0.0, "d") == [("a", "d")]
    dispatcher.arrived(_ticket("b", 2.0, 9.0), 0.1)
    dispatcher.arrived(_ticket("c", 1.0, 3.0), 0.2)
    assert _begun(dispatcher, 0.2, "d") == []
    assert dispatcher.due_s(0.2) == pytest.approx(0.9)
    assert _begun(dispatcher, 0.95, "d") == [("c", "d")]
    dispatcher.started("a", 1.0)
    dispatcher.started("c", 2.0)
    assert _begun(dispatcher, 2.0, "d") == [("b", "d")]
    assert dispatcher.due_s(2.0) is None


def test_what_cannot_be_on_time_goes_after_what_can() -> None:
    dispatcher = Dispatcher(ahead_s=0.0)
    dispatcher.arrived(_ticket("long", 5.0, 6.0), 0.0)
    dispatcher.arrived(_ticket("s1", 2.0, 7.0), 0.0)
    dispatcher.arrived(_ticket("s2", 2.0, 8.0), 0.0)
    order, now = [], 0.0
    while len(dispatcher):
        for name, _ in _begun(dispatcher, now, "d"):
            order.append(name)
            now += {"long": 5.0, "s1": 2.0, "s2": 2.0}[name]
            dispatcher.started(name, now)
    assert order == ["s1", "s2", "long"]


def test_a_model_without_a_device_waits_and_holds_nobody_up() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    dispatcher.arrived(_ticket("cold", 1.0, 1.0, model="cold"), 0.0)
    dispatcher.arrived(_ticket("warm", 1.0, 9.0, model="warm"), 0.0)
    begun = dispatcher.begin(0.0, lambda model: ("d",) if model == "warm" else ())
    assert [one.ticket.id for one in begun] == ["warm"]
    dispatcher.started("warm", 1.0)
    dispatcher.changed(1.0)
    assert [one.ticket.id for one in dispatcher.begin(1.0, lambda model: ("d",))] == ["cold"]


def test_one_device_is_shared_between_models() -> None:
    """The backlog counts over all models: a second model's request does not find the device free."""
    dispatcher = Dispatcher(ahead_s=0.1)
    dispatcher.arrived(_ticket("a", 1.0, 5.0, model="x"), 0.0)
    dispatcher.arrived(_ticket("b", 1.0, 6.0, model="y"), 0.0)
    assert _begun(dispatcher, 0.0, "d") == [("a", "d")]


def test_two_devices_take_one_each_and_a_cancel_makes_room() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    for name in "abc":
        dispatcher.arrived(_ticket(name, 1.0, 5.0), 0.0)
    assert sorted(_begun(dispatcher, 0.0, "d", "e")) == [("a", "d"), ("b", "e")]
    dispatcher.left("b", 0.1)
    assert _begun(dispatcher, 0.1, "d", "e") == [("c", "e")]
    dispatcher.left("unknown", 0.2)
    dispatcher.left("c", 0.2)
    assert dispatcher.backlog_s("e", 0.2) == 0.0


def test_nothing_is_due_while_a_model_is_away_from_an_idle_device() -> None:
    """Only an event brings it back: to ask again meanwhile would be to ask without end."""
    dispatcher = Dispatcher(ahead_s=0.1)
    dispatcher.arrived(_ticket("a", 1.0, 5.0), 0.0)
    assert _begun(dispatcher, 0.0) == []
    assert dispatcher.due_s(0.1) is None
    dispatcher.changed(0.5)
    assert dispatcher.due_s(0.5) == 0.5
    assert _begun(dispatcher, 0.5, "d") == [("a", "d")]


def test_a_device_that_is_slower_than_expected_is_looked_at_now_and_then() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    dispatcher.arrived(_ticket("a", 1.0, 5.0), 0.0)
    _begun(dispatcher, 0.0, "d")
    for name in ("b", "c"):
        dispatcher.arrived(_ticket(name, 1.0, 9.0), 0.0)
    now, looks = 0.5, 0
    while now < 10.0:
        dispatcher.begin(now, lambda model: ("d",))
        looks += 1
        due_s = dispatcher.due_s(now)
        assert due_s is not None and due_s >= now + 0.1
        now = due_s
    assert looks < 100 and len(dispatcher) == 1, "a is overdue for ever: b was begun in time, c waits for it"


def test_higher_priorities_are_begun_first() -> None:
    dispatcher = Dispatcher(ahead_s=0.0)
    dispatcher.arrived(_ticket("low", 1.0, 1.0), 0.0)
    dispatcher.arrived(_ticket("high", 1.0, 9.0, priority=3), 0.0)
    assert _begun(dispatcher, 0.0, "d") == [("high", "d")]


def test_what_waits_counts_behind_the_longest() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    for name, work_s, model in (("a", 1.0, "m"), ("b", 5.0, "m"), ("c", 2.0, "m"), ("d", 9.0, "alone")):
        dispatcher.arrived(_ticket(name, work_s, 5.0, model=model), 0.0)
    assert dispatcher.waiting_s() == {"m": 3.0, "alone": 0.0}


def test_a_device_that_is_gone_takes_its_work_along() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    dispatcher.arrived(_ticket("a", 5.0, 9.0), 0.0)
    dispatcher.arrived(_ticket("b", 5.0, 9.0), 0.0)
    assert _begun(dispatcher, 0.0, "d") == [("a", "d")]
    dispatcher.gone("d")
    dispatcher.changed(0.1)
    assert _begun(dispatcher, 0.1, "e") == [("b", "e")]
    dispatcher.started("a", 0.2)
    assert dispatcher.backlog_s("d", 0.2) == 0.0


def test_many_small_ones_are_begun_together() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    for i in range(40):
        dispatcher.arrived(_ticket(f"{i:02}", 0.01, 1.0), 0.0)
    assert len(_begun(dispatcher, 0.0, "d")) == 6  # 50 ms of them, as there are many


def test_a_few_long_ones_may_lie_further_ahead() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    for i in range(9):
        dispatcher.arrived(_ticket(f"{i:02}", 0.03, 1.0), 0.0)
    assert len(_begun(dispatcher, 0.0, "d")) == 4


def test_being_told_twice_changes_nothing() -> None:
    dispatcher = Dispatcher(ahead_s=0.1)
    for _ in range(2):
        dispatcher.arrived(_ticket("a", 1.0, 5.0), 0.0)
    assert _begun(dispatcher, 0.0, "d") == [("a", "d")]
    dispatcher.arrived(_ticket("a", 1.0, 5.0), 0.0)
    assert _begun(dispatcher, 9.0, "d") == []


@pytest.mark.parametrize("ttft_s", [None, 0.5, 600.0])
def test_nobody_waits_for_ever_beside_an_endless_stream(ttft_s: float | None) -> None:
    """Whatever was promised, and with the lowest priority: one of eight is the oldest."""
    dispatcher = Dispatcher(ahead_s=0.0)
    dispatcher.arrived(_ticket("first", 3.0, ttft_s, priority=-5), 0.0)
    now, others = 0.0, 0
    while others < 100:
        for _ in range(3):
            dispatcher.arrived(_ticket(f"s{now}-{_}", 1.0, 1.5, arrived_s=now), now)
        (begun,) = _begun(dispatcher, now, "d")
        if begun[0] == "first":
            break
        others += 1
        now += 1.0
        dispatcher.started(begun[0], now)
    assert others <= 8


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.floats(0.01, 3), st.one_of(st.none(), st.floats(0.1, 5)), st.sampled_from("xy")),
        min_size=1, max_size=40,
    ),
    st.integers(1, 3),
    st.floats(0, 0.5),
    st.floats(0.5, 3),
)  # fmt: skip
def test_every_request_is_begun_once_and_devices_never_idle_beside_one(
    requests: list[tuple[float, float, float | None, str]], devices: int, ahead_s: float, slowness: float
) -> None:
    dispatcher = Dispatcher(ahead_s=ahead_s)
    names = tuple(f"d{i}" for i in range(devices))
    free_s = dict.fromkeys(names, 0.0)
    events: list[tuple[float, int, str]] = []
    tickets = {}
    for i, (at_s, work_s, ttft_s, model) in enumerate(requests):
        tickets[f"r{i}"] = _ticket(f"r{i}", work_s, ttft_s, at_s, model)
        heapq.heappush(events, (at_s, 0, f"r{i}"))
    begun: list[str] = []
    arrived = 0
    while events:
        now, kind, name = heapq.heappop(events)
        if kind == 0:
            dispatcher.arrived(tickets[name], now)
            arrived += 1
        elif kind == 1:
            dispatcher.started(name, now)
        for one in dispatcher.begin(now, lambda model: names):
            begun.append(one.ticket.id)
            free_s[one.machine] = max(now, free_s[one.machine]) + slowness * one.ticket.work_s
            heapq.heappush(events, (free_s[one.machine], 1, one.ticket.id))
        due_s = dispatcher.due_s(now)
        if due_s is not None:
            assert due_s >= now
            if not events:
                heapq.heappush(events, (max(due_s, now + 1e-3), 2, ""))
        elif len(dispatcher):
            assert events, "nobody will ask again for who waits"
    assert sorted(begun) == sorted(tickets)
