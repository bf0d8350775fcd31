"""What the Brain makes of peers that offer copies: tried before the checkpoint, after the host copy, once each."""

from __future__ import annotations

from janus_server.orders import (
    Action,
    Asked,
    Busy,
    Done,
    Failed,
    Joined,
    KnownModel,
    Offered,
    Order,
    Refuse,
    Report,
    Stage,
    Tick,
    Verb,
    Wanted,
    Wish,
)
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings

A = KnownModel(model="a", weight_pages=10, host_bytes=1, longest_pages=1, preload=False)


def joined(offers: dict[str, tuple[str, ...]] | None = None, **known: object) -> tuple[Brain, list[Action]]:
    brain = Brain(BrainSettings())
    model = KnownModel(**{**{f: getattr(A, f) for f in A.__struct_fields__}, **known})  # type: ignore[arg-type]
    return brain, brain.on(Joined("n1", 15, 1, (model,), offers or {}), 0.0)


def the_order(actions: list[Action]) -> tuple[Verb, str | None]:
    (order,) = actions
    assert isinstance(order, Order)
    return order.verb, order.source


def number(actions: list[Action]) -> int:
    (order,) = actions
    assert isinstance(order, Order)
    return order.id


def put_to_sleep(brain: Brain, now: float) -> None:
    brain.on(Report("n1", {"a": Busy(0, 0, 1.0)}), now)
    orders = [one for one in brain.on(Asked("a", Wish.SLEEP), now) if isinstance(one, Order)]
    brain.on(Done(number(list(orders)), Stage.WARM, True, 0.1), now + 0.5)


def test_a_peer_comes_before_the_checkpoint_and_the_sentence_names_it() -> None:
    brain, _ = joined()
    assert brain.on(Offered({"a": ("n0", "n2"), "unknown": ("n0",)}), 1.0) == []
    actions = brain.on(Wanted("a"), 1.0)
    assert the_order(actions) == (Verb.FORK, "n0")
    assert isinstance(actions[0], Order) and actions[0].why == "a: wanted for 0.0 s; from node n0"


def test_what_is_loaded_at_start_comes_from_a_peer_too() -> None:
    assert the_order(joined({"a": ("n0",)}, preload=True)[1]) == (Verb.FORK, "n0")
    assert the_order(joined({"b": ("n0",)}, preload=True)[1]) == (Verb.LOAD, None)


def test_peers_that_fail_are_tried_once_each_at_once_then_the_checkpoint_and_nobody_is_refused() -> None:
    brain, _ = joined({"a": ("n0", "n2", "n3", "n4")})
    actions = brain.on(Wanted("a"), 1.0)
    for node in ("n0", "n2", "n3", "n4"):
        assert the_order(actions) == (Verb.FORK, node)
        actions = brain.on(Failed(number(actions), Stage.COLD, False, "the peer went away"), 1.0)
    assert the_order(actions) == (Verb.LOAD, None)
    again = brain.on(Failed(number(actions), Stage.COLD, False, "no disk"), 2.0)
    assert again == [] and brain.next_wake(0.0) is not None  # the checkpoint's first failure
    assert the_order(brain.on(Tick(), brain.next_wake(0.0) or 0.0)) == (Verb.LOAD, None)


def test_a_lasting_failure_ends_it() -> None:
    brain, _ = joined({"a": ("n0", "n2")})
    fork = number(brain.on(Wanted("a"), 1.0))
    (refused,) = brain.on(Failed(fork, Stage.COLD, False, "its tokenizer is broken", lasting=True), 1.0)
    assert isinstance(refused, Refuse) and refused.why == "its tokenizer is broken"


def test_a_host_copy_comes_before_a_peer_unless_an_operator_names_one() -> None:
    brain, _ = joined({"a": ("n0",)})
    brain.on(Done(number(brain.on(Wanted("a"), 1.0)), Stage.ACTIVE, False, 0.1), 2.0)
    put_to_sleep(brain, 3.0)
    brain.on(Offered({"a": ("n0",)}), 5.0)
    wake = brain.on(Wanted("a"), 5.0)
    assert the_order(wake) == (Verb.WAKE, None)
    brain.on(Done(number(wake), Stage.ACTIVE, True, 0.1), 6.0)
    put_to_sleep(brain, 7.0)
    fork = [a for a in brain.on(Asked("a", Wish.FORK, "n9"), 9.0) if isinstance(a, Order)]
    assert the_order(list(fork)) == (Verb.FORK, "n9")
    failed = brain.on(Failed(number(list(fork)), Stage.WARM, True, "the peer went away"), 9.5)
    assert the_order(failed) == (Verb.WAKE, None)


def test_an_offer_that_was_withdrawn_is_not_tried() -> None:
    brain, _ = joined({"a": ("n0",)})
    brain.on(Offered({}), 1.0)
    assert the_order(brain.on(Wanted("a"), 1.0)) == (Verb.LOAD, None)
