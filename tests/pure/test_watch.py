"""What onlookers are told: everything in order, progress only as fast as they read, and nothing that waits for them."""

from __future__ import annotations

import asyncio
import threading

from janus_server import watch
from janus_server.orders import Answer, Done, Failed, Lost, Order, Refuse, Stage, Tick, Verb
from janus_server.watch import Subscription, Watch


def order(number: int = 1, model: str = "a", verb: Verb = Verb.LOAD) -> Order:
    return Order(1, number, "n0", model, verb, f"{model}: because")


async def types_of(reader: Subscription) -> list[str]:
    return [event.type for event in await reader.take(0.0) or []]


async def test_a_reader_sees_what_happens_from_then_on_in_order() -> None:
    one = Watch()
    one.see(order(1))
    with one.subscribe() as reader:
        one.see(Done(1, Stage.ACTIVE, copy=False, took_s=0.5))
        one.see(Tick())
        one.see(order(2, verb=Verb.DRAIN))
        one.see(Answer("a", True, "yes"))
        one.see(Refuse("a", "no room", None))
        one.see(Lost("n0", "a", Stage.COLD, copy=False))
        events = await reader.take(0.0) or []
    assert [event.type for event in events] == ["done", "order", "answer", "refused", "lost"]
    assert (events[0].model, events[0].verb, events[0].stage, events[0].took_s) == ("a", "load", "active", 0.5)
    assert all(event.model == "a" for event in events)


async def test_what_is_under_way_and_what_went_wrong_is_known_to_who_comes_late() -> None:
    one = Watch()
    assert one.under_way("a") is None
    one.see(order(1))
    one.see(order(2, "b", Verb.DRAIN))
    one.progress("a", 30, 100)
    found = one.under_way("a")
    assert found is not None
    assert (found.verb, found.why, found.done_bytes, found.total_bytes) == ("load", "a: because", 30, 100)
    assert one.under_way("b") is None
    one.see(Failed(1, Stage.COLD, copy=False, reason="its pages are not free yet"))
    assert one.under_way("a") is None
    assert one.trouble("a") == "its pages are not free yet"
    one.see(order(3))
    one.see(Done(3, Stage.ACTIVE, copy=False, took_s=0.5))
    assert one.trouble("a") is None


async def test_progress_from_threads_is_told_now_and_then_and_always_at_its_end() -> None:
    one = Watch()
    one.see(order(1))
    with one.subscribe() as reader:

        def move() -> None:
            for done in range(1001):
                one.progress("a", done, 1000)
            one.progress("nobody", 1, 2)

        thread = threading.Thread(target=move)
        thread.start()
        await asyncio.to_thread(thread.join)
        events = await reader.take(1.0) or []
    assert {event.type for event in events} == {"progress"}
    assert 2 <= len(events) < 100
    assert events[-1].done_bytes == events[-1].total_bytes == 1000


async def test_progress_of_an_order_that_has_ended_is_not_told() -> None:
    one = Watch()
    one.see(order(1))
    one.progress("a", 5, 10)
    one.see(Done(1, Stage.ACTIVE, copy=False, took_s=0.5))
    with one.subscribe() as reader:
        await asyncio.sleep(0)
        assert await types_of(reader) == []


async def test_a_slow_reader_loses_progress_first_then_news_and_is_told_how_much() -> None:
    one = Watch()
    one.see(order(1))
    with one.subscribe() as slow, one.subscribe() as quick:
        for done in range(200):
            one._tell_progress(one._tasks["a"], done, 1000)
            await quick.take(0.0)
        assert await types_of(slow) == ["progress"] * watch.PROGRESS_QUEUE
        for number in range(watch.QUEUE + 7):
            one.see(Answer("a", True, str(number)))
        found = await slow.take(0.0) or []
        assert len(found) == watch.QUEUE + 1
        assert (found[-1].type, found[-1].count) == ("gap", 7)
        assert [event.why for event in found[:3]] == ["0", "1", "2"]
        assert await types_of(slow) == []


async def test_taking_waits_for_news_for_a_while_and_ends_with_the_watch() -> None:
    one = Watch()
    with one.subscribe() as reader:
        assert await reader.take(0.01) == []
        waiting = asyncio.create_task(reader.take(30.0))
        await asyncio.sleep(0)
        one.see(Answer("a", True, "yes"))
        assert [event.type for event in await waiting or []] == ["answer"]
        one.see(Answer("a", True, "last"))
        one.close()
        assert [event.why for event in await reader.take(30.0) or []] == ["last"]
        assert await reader.take(30.0) is None
    assert not one._readers
