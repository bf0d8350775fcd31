"""The Brain against an imaginary node: transcripts that a reader can follow, and random lives that all end well."""

from __future__ import annotations

import heapq
import random

import pytest

from janus_server import orders
from janus_server.orders import (
    Asked,
    Busy,
    Done,
    Failed,
    Joined,
    KnownModel,
    Order,
    Refuse,
    Report,
    Stage,
    Tick,
    Unwanted,
    Verb,
    Wanted,
    Wish,
)
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings


def known(name: str, weight_pages: int = 40, longest_pages: int = 10, **more: object) -> KnownModel:
    return KnownModel(model=name, weight_pages=weight_pages, host_bytes=weight_pages, longest_pages=longest_pages,
                      **{"preload": False, **more})  # type: ignore[arg-type]  # fmt: skip


def brain(*models: KnownModel, pool: int = 100, host: int = 1000, **settings: float) -> Brain:
    made = Brain(BrainSettings(**settings))
    assert made.on(Joined("n0", pool, host, models), 0.0) == []
    return made


def said(actions: list[orders.Action]) -> list[str]:
    return [f"{a.verb.value} {a.model}" if isinstance(a, Order) else f"{type(a).__name__.lower()} {a.model}"
            for a in actions]  # fmt: skip


def first(actions: list[orders.Action]) -> Order:
    assert isinstance(actions[0], Order)
    return actions[0]


def active(b: Brain, name: str, now: float) -> None:
    """Have the model loaded at once."""
    order = first(b.on(Wanted(name), now))
    assert order.verb in (Verb.LOAD, Verb.WAKE)
    b.on(Done(order.id, Stage.ACTIVE, copy=True, took_s=1.0), now)
    b.on(Report("n0", {name: Busy(0, 0, 0.0)}), now)


def test_a_wanted_model_is_loaded_once() -> None:
    b = brain(known("a"))
    load = first(b.on(Wanted("a"), 1.0))
    assert (load.verb, load.node, load.model) == (Verb.LOAD, "n0", "a")
    assert "a: wanted" in load.why
    assert b.on(Wanted("a"), 1.1) == []
    assert b.on(Done(load.id, Stage.ACTIVE, copy=False, took_s=0.5), 1.5) == []
    assert b.on(Wanted("a"), 1.6) == []
    assert b.stages("n0") == {"a": Stage.ACTIVE}


def test_the_least_recently_used_idle_model_makes_room_and_keeps_a_copy() -> None:
    b = brain(known("a"), known("b"), known("c"))
    active(b, "a", 1.0)
    active(b, "b", 2.0)
    b.on(Report("n0", {"a": Busy(0, 0, 8.0), "b": Busy(0, 0, 3.0)}), 10.0)
    sleep = first(b.on(Wanted("c"), 10.0))
    assert (sleep.verb, sleep.model) == (Verb.SLEEP, "a")
    assert b.on(Tick(), 10.1) == []
    load = first(b.on(Done(sleep.id, Stage.WARM, copy=True, took_s=0.1), 10.2))
    assert (load.verb, load.model) == (Verb.LOAD, "c")


def test_a_busy_model_is_drained_only_after_patience_and_its_stay() -> None:
    b = brain(known("a"), known("b"), pool=60, patience_s=2.0, stay_s=4.0)
    active(b, "a", 1.0)
    b.on(Report("n0", {"a": Busy(1, 0, 0.0)}), 2.0)
    assert b.on(Wanted("b"), 2.0) == []
    assert b.next_wake(0.0) == 5.0  # four seconds after a became Active
    assert said(b.on(Tick(), 5.0)) == ["drain a"]
    assert b.on(Wanted("a"), 5.5) == []  # new requests for a wait their turn
    sleep = first(b.on(Report("n0", {"a": Busy(0, 0, 0.0)}), 6.0))
    assert sleep.verb is Verb.SLEEP
    load = first(b.on(Done(sleep.id, Stage.WARM, copy=True, took_s=0.1), 6.1))
    assert (load.verb, load.model) == (Verb.LOAD, "b")
    b.on(Done(load.id, Stage.ACTIVE, copy=True, took_s=0.5), 6.6)
    back = first(b.on(Report("n0", {"b": Busy(0, 0, 0.0)}), 7.0))
    assert (back.verb, back.model) == (Verb.SLEEP, "b")


def test_who_leaves_gives_the_drained_model_back() -> None:
    b = brain(known("a"), known("b"), pool=60, patience_s=0.0, stay_s=0.0)
    active(b, "a", 1.0)
    b.on(Report("n0", {"a": Busy(1, 0, 0.0)}), 2.0)
    assert said(b.on(Wanted("b"), 2.0)) == ["drain a"]
    assert said(b.on(Unwanted("b"), 2.5)) == ["serve a"]


def test_failures_are_tried_again_then_those_who_wait_are_refused() -> None:
    b = brain(known("a"), tries=2, backoff_s=1.0)
    load = first(b.on(Wanted("a"), 0.0))
    assert b.on(Failed(load.id, Stage.COLD, False, "the file went away"), 1.0) == []
    assert b.next_wake(0.0) == 2.0
    again = first(b.on(Tick(), 2.0))
    refusal = b.on(Failed(again.id, Stage.COLD, False, "the file went away"), 3.0)
    assert refusal == [Refuse("a", "the file went away", 2.0)]
    assert b.on(Tick(), 100.0) == []
    assert said(b.on(Wanted("a"), 101.0)) == ["load a"]


def test_a_lasting_failure_is_refused_at_once() -> None:
    b = brain(known("a"))
    load = first(b.on(Wanted("a"), 0.0))
    refusal = b.on(Failed(load.id, Stage.COLD, False, "not a checkpoint", lasting=True), 1.0)
    assert refusal == [Refuse("a", "not a checkpoint", None)]


def test_host_memory_goes_to_the_copy_that_is_worth_most() -> None:
    b = brain(known("a", idle_s=5.0), known("b", idle_s=5.0), host=40)
    active(b, "a", 0.0)
    actions = b.on(Report("n0", {"a": Busy(0, 0, 6.0)}), 6.0)
    assert said(actions) == ["sleep a"]
    b.on(Done(first(actions).id, Stage.WARM, copy=True, took_s=0.1), 6.1)
    load = first(b.on(Wanted("b"), 7.0))
    b.on(Done(load.id, Stage.ACTIVE, copy=False, took_s=0.1), 7.1)
    assert said(b.on(Report("n0", {"b": Busy(0, 0, 5.0)}), 20.0)) == ["evict a", "sleep b"]


def test_without_host_memory_nothing_is_kept() -> None:
    b = brain(known("a", idle_s=1.0), host=0)
    load = first(b.on(Wanted("a"), 0.0))
    b.on(Done(load.id, Stage.ACTIVE, copy=False, took_s=0.1), 0.1)
    assert said(b.on(Report("n0", {"a": Busy(0, 0, 2.0)}), 2.1)) == ["unload a"]


@pytest.mark.parametrize(
    ("wish", "accepted", "then"),
    [(Wish.SLEEP, True, ["sleep a"]), (Wish.EVICT, True, ["unload a"]), (Wish.LOAD, True, []), (Wish.WAKE, True, [])],
)
def test_wishes_for_an_active_model(wish: Wish, accepted: bool, then: list[str]) -> None:
    b = brain(known("a"))
    active(b, "a", 0.0)
    actions = b.on(Asked("a", wish), 1.0)
    assert isinstance(actions[0], orders.Answer)
    assert actions[0].accepted is accepted
    assert said(actions[1:]) == then


def test_wishes_that_conflict_name_the_present_state() -> None:
    b = brain(known("a"))
    for wish in (Wish.WAKE, Wish.SLEEP):
        (answer,) = b.on(Asked("a", wish), 0.0)
        assert isinstance(answer, orders.Answer)
        assert not answer.accepted
        assert "cold" in answer.why
    b.on(Asked("a", Wish.LOAD), 1.0)
    (answer,) = b.on(Asked("a", Wish.EVICT), 1.1)
    assert answer == orders.Answer("a", False, "a is cold and being changed (load)")


def test_asking_again_for_what_is_under_way_is_accepted_and_orders_nothing_more() -> None:
    b = brain(known("a"))
    load = first(b.on(Asked("a", Wish.LOAD), 0.0)[1:])
    for wish in (Wish.LOAD, Wish.WAKE):
        (answer,) = b.on(Asked("a", wish), 0.1)
        assert isinstance(answer, orders.Answer)
        assert answer.accepted
    b.on(Done(load.id, Stage.ACTIVE, copy=False, took_s=1.0), 1.0)
    b.on(Report("n0", {"a": Busy(0, 0, 0.0)}), 1.0)
    assert b.settled("n0", "a")
    sleep = first(b.on(Asked("a", Wish.SLEEP), 2.0)[1:])
    (answer,) = b.on(Asked("a", Wish.SLEEP), 2.1)
    assert isinstance(answer, orders.Answer)
    assert answer.accepted
    b.on(Done(sleep.id, Stage.WARM, copy=True, took_s=0.1), 2.2)
    assert b.settled("n0", "a")
    assert not b.standing("n0", "a").draining


def test_a_sleep_that_the_host_had_no_room_for_is_over_and_not_asked_of_the_model_again() -> None:
    b = brain(known("a"), host=0)
    for now in (0.0, 10.0):
        load = first(b.on(Wanted("a"), now))
        assert b.on(Done(load.id, Stage.ACTIVE, copy=False, took_s=1.0), now + 1) == []
        assert b.on(Report("n0", {"a": Busy(0, 0, 0.0)}), now + 1) == []
        if now:
            break
        unload = first(b.on(Asked("a", Wish.SLEEP), 2.0)[1:])
        assert unload.verb is Verb.UNLOAD
        b.on(Done(unload.id, Stage.COLD, copy=False, took_s=0.1), 2.1)
        assert b.settled("n0", "a")
    assert b.stages("n0") == {"a": Stage.ACTIVE}


def test_a_wish_outlives_the_clients_who_wanted_the_same() -> None:
    b = brain(known("a"), known("b"), pool=60, patience_s=100.0)
    active(b, "b", 0.0)
    b.on(Report("n0", {"b": Busy(1, 0, 0.0)}), 1.0)
    b.on(Wanted("a"), 1.0)
    b.on(Asked("a", Wish.LOAD), 1.1)
    b.on(orders.Unwanted("a"), 1.2)
    assert not b.settled("n0", "a")
    assert said(b.on(Report("n0", {"b": Busy(0, 0, 1.0)}), 2.0)) == ["sleep b"]


def test_pinned_models_stay_and_who_cannot_fit_beside_them_is_refused() -> None:
    b = brain(known("a", pinned=True), known("b"), pool=60)
    active(b, "a", 0.0)
    (refusal,) = b.on(Wanted("b"), 100.0)
    assert isinstance(refusal, Refuse)
    assert refusal.retry_after_s is None


def test_at_start_those_are_loaded_that_fit_in_their_order() -> None:
    models = (known("a", preload=True), known("b", 60, preload=True), known("c", preload=True))
    b = Brain(BrainSettings())
    assert said(b.on(Joined("n0", 100, 0, models), 0.0)) == ["load a", "load c"]


class World:
    """An imaginary node: orders take time and sometimes fail; requests come, run for a while, and leave."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.pool = rng.choice((60, 100, 150))
        self.models = {
            name: known(name, rng.randint(5, 40), rng.randint(1, 15), floor_pages=rng.choice((0, 3)),
                        idle_s=rng.choice((None, 3.0)))
            for name in "abcdef"[: rng.randint(2, 6)]
        }  # fmt: skip
        self.host = rng.choice((0, 50, 500))
        self.brain = Brain(BrainSettings(patience_s=rng.choice((0.0, 1.0)), stay_s=rng.choice((0.0, 2.0))))
        self.now = 0.0
        self.heap: list[tuple[float, int, str, object]] = []
        self.count = 0
        self.stage = dict.fromkeys(self.models, Stage.COLD)
        self.copy = dict.fromkeys(self.models, False)
        self.open: dict[str, Order] = {}
        self.held: dict[str, bool] = dict.fromkeys(self.models, False)
        self.waiting: dict[str, int] = dict.fromkeys(self.models, 0)
        self.running: dict[str, int] = dict.fromkeys(self.models, 0)
        self.ended_s = dict.fromkeys(self.models, 0.0)
        self.asked = self.served = self.refused = 0

    def later(self, delay_s: float, what: str, data: object = None) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay_s, self.count, what, data))

    def run(self, requests: int) -> None:
        self.tell(Joined("n0", self.pool, self.host, tuple(self.models.values())))
        for _ in range(requests):
            self.later(self.rng.expovariate(1.0) * 10, "request", self.rng.choice(list(self.models)))
        steps = 0
        while self.heap:
            steps += 1
            assert steps < 20_000, "the world does not come to rest"
            self.now, _, what, data = heapq.heappop(self.heap)
            getattr(self, f"_{what}")(data)
        assert not self.open
        assert self.served + self.refused == self.asked
        assert not any(self.waiting.values())

    def tell(self, event: orders.Event) -> None:
        up = [m for m in self.models if self.stage[m] is Stage.ACTIVE]
        report = Report("n0", {m: Busy(self.running[m], 0, self.now - self.ended_s[m]) for m in up})
        for each in (report, event):
            for action in self.brain.on(each, self.now):
                self.obey(action)
        due_s = self.brain.next_wake(0.0)
        if due_s is not None:
            self.later(max(0.0, due_s - self.now), "tick")

    def obey(self, action: orders.Action) -> None:
        if isinstance(action, Refuse):
            self.refused += self.waiting[action.model]
            self.waiting[action.model] = 0
            return
        assert isinstance(action, Order)
        model, verb = action.model, action.verb
        if verb in (Verb.DRAIN, Verb.SERVE):
            assert self.stage[model] is Stage.ACTIVE
            self.held[model] = verb is Verb.DRAIN
            if verb is Verb.SERVE:
                self.start(model)
            return
        assert model not in self.open, "two orders for one model at a time"
        assert {
            Verb.LOAD: (Stage.COLD,), Verb.WAKE: (Stage.WARM,), Verb.SLEEP: (Stage.ACTIVE,),
            Verb.UNLOAD: (Stage.ACTIVE,), Verb.EVICT: (Stage.WARM, Stage.ACTIVE),
        }[verb].count(self.stage[model]) == 1  # fmt: skip
        if verb in (Verb.SLEEP, Verb.UNLOAD):
            assert not self.running[model], "a model with running requests was put to sleep"
            self.held[model] = True
        self.open[model] = action
        self.check_memory()
        self.later(self.rng.uniform(0.01, 1.0), "end", action)

    def check_memory(self) -> None:
        up = [m for m in self.models if self.stage[m] is Stage.ACTIVE
              or (m in self.open and self.open[m].verb in (Verb.LOAD, Verb.WAKE))]  # fmt: skip
        weights = sum(self.models[m].weight_pages for m in up)
        floors = sum(self.models[m].floor_pages for m in up)
        beyond = max([0, *(self.models[m].longest_pages - self.models[m].floor_pages for m in up)])
        assert weights + floors + beyond <= self.pool, "the longest sequence could not finish beside all floors"
        copies = sum(self.models[m].host_bytes for m in self.models
                     if (self.copy[m] and (m not in self.open or self.open[m].verb is not Verb.EVICT))
                     or (m in self.open and self.open[m].verb is Verb.SLEEP))  # fmt: skip
        assert copies <= self.host

    def start(self, model: str) -> None:
        while self.waiting[model]:
            self.waiting[model] -= 1
            self.running[model] += 1
            self.later(self.rng.uniform(0.1, 3.0), "finish", model)

    def _request(self, model: object) -> None:
        assert isinstance(model, str)
        self.asked += 1
        self.waiting[model] += 1
        if self.stage[model] is Stage.ACTIVE and not self.held[model]:
            self.start(model)
            self.tell(Tick())
        else:
            self.tell(Wanted(model))
            if self.rng.random() < 0.2:
                self.later(self.rng.uniform(0, 1), "leave", model)

    def _leave(self, model: object) -> None:
        assert isinstance(model, str)
        if self.waiting[model]:
            self.refused += self.waiting[model]
            self.waiting[model] = 0
            self.tell(Unwanted(model))

    def _finish(self, model: object) -> None:
        assert isinstance(model, str)
        self.running[model] -= 1
        self.served += 1
        self.ended_s[model] = self.now
        self.tell(Tick())

    def _end(self, order: object) -> None:
        assert isinstance(order, Order)
        model, verb = order.model, order.verb
        del self.open[model]
        if verb is not Verb.EVICT and self.rng.random() < 0.15:  # freeing host memory cannot fail
            self.held[model] = self.stage[model] is not Stage.ACTIVE
            if self.stage[model] is Stage.ACTIVE:
                self.start(model)
            self.tell(Failed(order.id, self.stage[model], self.copy[model], "no luck", self.rng.random() < 0.1))
            return
        if verb in (Verb.LOAD, Verb.WAKE):
            self.stage[model], self.held[model] = Stage.ACTIVE, False
            self.ended_s[model] = self.now
            self.start(model)
        elif verb is Verb.SLEEP:
            self.stage[model], self.copy[model] = Stage.WARM, True
        elif verb is Verb.UNLOAD:
            self.stage[model] = Stage.COLD
        else:
            self.copy[model] = False
            self.stage[model] = Stage.COLD if self.stage[model] is Stage.WARM else self.stage[model]
        self.tell(Done(order.id, self.stage[model], self.copy[model], 0.2))

    def _tick(self, _: object) -> None:
        self.tell(Tick())


@pytest.mark.parametrize("seed", range(300))
def test_every_request_ends_and_memory_is_never_promised_twice(seed: int) -> None:
    world = World(seed)
    world.run(40)


def test_the_same_events_give_the_same_actions() -> None:
    first_run, second_run = World(7), World(7)
    first_run.run(40)
    second_run.run(40)
    assert (first_run.now, first_run.count, first_run.served) == (second_run.now, second_run.count, second_run.served)


def test_what_cannot_be_loaded_is_refused_for_a_while_and_takes_nobodys_room() -> None:
    b = brain(known("a"), known("b"), pool=60)
    active(b, "a", 0.0)
    b.on(Report("n0", {"a": Busy(0, 0, 5.0)}), 5.0)
    sleep = first(b.on(Wanted("b"), 5.0))
    load = first(b.on(Done(sleep.id, Stage.WARM, copy=True, took_s=0.1), 5.1))
    assert b.on(Failed(load.id, Stage.COLD, False, "truncated", lasting=True), 5.2) == [Refuse("b", "truncated", None)]
    active(b, "a", 6.0)
    (refusal,) = b.on(Wanted("b"), 10.0)
    assert isinstance(refusal, Refuse) and refusal.why == "truncated"
    assert refusal.retry_after_s == pytest.approx(25.2)
    assert said(b.on(Wanted("b"), 40.0)) == ["sleep a"]


def test_an_operator_may_try_a_broken_model_again() -> None:
    b = brain(known("a"))
    load = first(b.on(Wanted("a"), 0.0))
    b.on(Failed(load.id, Stage.COLD, False, "truncated", lasting=True), 1.0)
    assert said(b.on(Asked("a", Wish.LOAD), 2.0)) == ["answer a", "load a"]


def test_an_operators_sleep_comes_before_those_who_go_on_asking() -> None:
    b = brain(known("a"))
    active(b, "a", 0.0)
    b.on(Report("n0", {"a": Busy(3, 0, 0.0)}), 1.0)
    assert said(b.on(Asked("a", Wish.SLEEP), 1.0)) == ["answer a", "drain a"]
    for now in (1.1, 1.2, 1.3):
        assert b.on(Report("n0", {"a": Busy(2, 0, 0.0)}), now) == []
        assert b.on(Wanted("a"), now) == []
    sleep = first(b.on(Report("n0", {"a": Busy(0, 0, 0.0)}), 2.0))
    assert sleep.verb is Verb.SLEEP
    assert said(b.on(Done(sleep.id, Stage.WARM, copy=True, took_s=0.1), 2.5)) == ["wake a"]


def test_a_pin_takes_back_a_sleep_that_was_asked_for_and_not_begun() -> None:
    b = brain(known("a"))
    active(b, "a", 0.0)
    b.on(Report("n0", {"a": Busy(3, 0, 0.0)}), 1.0)
    b.on(Asked("a", Wish.SLEEP), 1.0)
    assert said(b.on(Asked("a", Wish.PIN), 1.5)) == ["answer a", "serve a"]
    assert b.on(Report("n0", {"a": Busy(0, 0, 9.0)}), 20.0) == []
    b.on(Asked("a", Wish.UNPIN), 21.0)
    b.on(Asked("a", Wish.SLEEP), 21.0)
    (answer,) = b.on(Asked("a", Wish.PIN), 21.1)
    assert isinstance(answer, orders.Answer) and not answer.accepted and "being changed" in answer.why
