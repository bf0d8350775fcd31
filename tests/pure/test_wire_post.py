"""What is told once, what is given in time, and who is given up for silence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from janus_server.orders import Dispatch, Report
from janus_server.wire.frames import Ack, Beat, Give, Outcome, Tell
from janus_server.wire.post import MOST_OPEN, MOST_UNHEARD, Intray, Judge, Orders, Outtray
from janus_server.wire.pulse import Heartbeat, Pulse

ACTION = Dispatch("a", ("r",), "why")


def report(number: int) -> Report:
    return Report(f"n{number}", {})


@given(st.lists(st.sampled_from(["tell", "arrive", "hear", "break"]), max_size=120), st.integers(0, 10**12))
def test_events_are_heard_once_and_in_order(steps: list[str], first: int) -> None:
    tray, intray = Outtray(first), Intray()
    on_way: list[Tell] = []
    heard_on_way: list[int] = []
    told, heard = 0, []

    def arrive() -> None:
        tell = on_way.pop(0)
        if intray.take(tell):
            heard.extend(event.node for event in tell.events if isinstance(event, Report))
        heard_on_way.append(intray.expected)

    for verb in [*steps, "break"]:
        if verb == "tell":
            tell = tray.add(1, (report(told),))
            assert tell is not None
            on_way.append(tell)
            told += 1
        elif verb == "arrive" and on_way:
            arrive()
        elif verb == "hear" and heard_on_way:
            assert tray.heard(heard_on_way.pop(0))
        elif verb == "break":
            heard_on_way.clear()
            on_way[:] = tray.unheard()
    while on_way:
        arrive()
    assert heard == [f"n{number}" for number in range(told)]


def test_what_nobody_hears_is_kept_only_so_long() -> None:
    tray = Outtray(5)
    assert all(tray.add(1, (report(0),)) is not None for _ in range(MOST_UNHEARD))
    assert tray.add(1, (report(0),)) is None
    assert not tray.heard(5 + MOST_UNHEARD + 1)  # more than was told
    assert tray.heard(6) and len(tray) == MOST_UNHEARD - 1


def test_an_order_is_repeated_until_it_is_answered_or_its_time_is_over() -> None:
    orders = Orders()
    assert orders.add(3, 1, ACTION, until_s=10.0) and orders.add(3, 2, ACTION, until_s=4.0)
    assert orders.due(1.0, 7) == [Give(3, 1, 9.0, 7, ACTION), Give(3, 2, 3.0, 7, ACTION)]
    assert orders.due(1.5, 7) == []  # they wait for their answers
    orders.connected()
    assert [give.id for give in orders.due(2.0, 8)] == [1, 2]
    assert orders.answered(Ack(3, 1, Outcome.EARLY)) is None
    assert [give.valid_s for give in orders.due(3.0, 8)] == [7.0]
    assert orders.expired(4.0) == [(3, 2)]
    assert orders.answered(Ack(3, 1, Outcome.APPLIED)) is Outcome.APPLIED
    assert orders.answered(Ack(3, 1, Outcome.APPLIED)) is None and orders.answered(Ack(9, 9, Outcome.STALE)) is None
    assert len(orders) == 0 and orders.due(5.0, 9) == []


def test_orders_without_end_are_refused() -> None:
    orders = Orders()
    assert all(orders.add(1, id, ACTION, 1.0) for id in range(MOST_OPEN))
    assert not orders.add(1, MOST_OPEN, ACTION, 1.0)


def test_an_order_is_judged_by_its_term_and_its_time() -> None:
    judge, give = Judge(), Give(5, 1, 2.0, 0, ACTION)
    assert judge.look(give, term=6, until_s=9.0, now=1.0) is Outcome.STALE
    assert judge.look(give, term=4, until_s=9.0, now=1.0) is Outcome.EARLY
    assert judge.look(give, term=5, until_s=1.0, now=1.0) is Outcome.STALE
    assert judge.look(give, term=5, until_s=None, now=1.0) is Outcome.STALE
    assert judge.look(give, term=5, until_s=9.0, now=1.0) is None
    judge.note(give, Outcome.APPLIED)
    assert judge.look(give, term=5, until_s=9.0, now=1.0) is Outcome.ALREADY
    assert judge.look(give, term=6, until_s=0.0, now=1.0) is Outcome.ALREADY  # it was done, whatever it is now
    refused = Give(5, 2, 2.0, 0, ACTION)
    judge.note(refused, Outcome.REFUSED)
    assert judge.look(refused, term=5, until_s=9.0, now=1.0) is Outcome.REFUSED


def test_an_order_does_not_outlive_its_way() -> None:
    """It was given after beat 2 had come, and arrives long after: its time counts from when that beat was sent."""
    node, now = Pulse(Heartbeat(beat_s=0.25, silent_s=9.0), 100.0), 100.0
    for _ in range(4):
        node.tick(now)
        now += 0.25
    assert node.sent_s(2) == 100.25
    assert node.sent_s(0) == 100.0  # none had come: since the connection is open
    assert node.sent_s(99) is None


def beating(quiet: set[int], ticks: int, *, deaf: frozenset[int] = frozenset()) -> tuple[int | None, int | None]:
    """Two ends at 4 beats a second; in the ticks of `quiet` nothing of b arrives, in those of `deaf` nothing of a.
    When either gives up."""
    a, b = Pulse(Heartbeat(), 0.0), Pulse(Heartbeat(), 0.0)
    given_up: list[int | None] = [None, None]
    for tick in range(ticks):
        now = tick * 0.25
        for index, (one, other, lost) in enumerate(((a, b, deaf), (b, a, quiet))):
            beat = one.tick(now)
            if beat is None:
                given_up[index] = given_up[index] or tick
            elif tick not in lost:
                assert other.hear(beat)
    return given_up[0], given_up[1]


def test_ends_that_hear_each_other_go_on() -> None:
    assert beating(set(), 400) == (None, None)


def test_a_silence_is_seen_by_the_end_that_hears_nothing() -> None:
    at = beating(set(range(100, 200)), 200)[0]
    assert at is not None and 107 <= at <= 110  # 2 s


def test_and_by_the_end_that_is_not_heard() -> None:
    a, b = beating(set(range(100, 200)), 200)
    assert a is not None and b is not None and b <= 112


def test_a_short_silence_is_borne() -> None:
    assert beating(set(range(100, 106)), 300) == (None, None)


def test_who_was_stopped_itself_gives_up_on_nobody() -> None:
    pulse = Pulse(Heartbeat(beat_s=0.25, silent_s=2.0), 0.0)
    assert pulse.tick(0.0) is not None
    assert pulse.tick(3600.0) is not None  # it slept for an hour: that is no silence of the other's
    assert pulse.hear(Beat(1, 1)) and pulse.tick(3600.25) is not None


def test_a_beat_of_what_was_never_sent_cannot_be() -> None:
    pulse = Pulse(Heartbeat(), 0.0)
    pulse.tick(0.0)
    assert pulse.hear(Beat(1, 1)) and not pulse.hear(Beat(2, 2))
