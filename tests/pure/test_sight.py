"""What nodes show of themselves and of the whole: put beside each other, read of others, and the sentences kept."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.api.admin import LOST, ManagedModel
from janus_server.api.cluster import (
    ApplicationView,
    Decision,
    LeaderView,
    ModelView,
    NodeView,
    Spread,
    StandingView,
    decisions_of,
    where_served,
)
from janus_server.cluster.decisions import KEPT, Decisions
from janus_server.cluster.sight import (
    DECIDED_MOST,
    TEXT_MOST,
    UNREADABLE,
    beside,
    leader_view,
    model_view,
    read_view,
    written,
)
from janus_server.duty import Assigned, Duty
from janus_server.orders import (
    Answer,
    Asked,
    Busy,
    Decided,
    Done,
    Failed,
    Joined,
    KnownModel,
    Left,
    Lost,
    Order,
    Refuse,
    Report,
    Stage,
    Tick,
    Verb,
    Wish,
)
from janus_server.sched.brain import Brain
from janus_server.sched.state import BrainSettings
from janus_server.wire.frames import SIGHT_MOST_BYTES

MOST = SIGHT_MOST_BYTES


def known(name: str) -> KnownModel:
    return KnownModel(model=name, weight_pages=10, host_bytes=1000, longest_pages=5, preload=False)


def spread(*counts: int) -> Spread:
    return Spread(bounds_s=[0.1, 1.0], counts=list(counts))


def application(name: str = "app", ttft: Spread | None = None) -> ApplicationView:
    return ApplicationView(application=name, model="a", ttft=ttft or spread(1, 2, 3), tpot=spread(0, 0, 0))


def leads(**more: object) -> LeaderView:
    return msgspec.structs.replace(LeaderView(served={"a": ["n1"]}, predictions={}, decisions=[]), **more)


def model_of(name: str, stage: str, **more: object) -> ModelView:
    return msgspec.convert({"model": name, "stage": stage, **more}, ModelView)


def seen(node: str, stage: str = "cold", **more: object) -> NodeView:
    one = NodeView(node=node, models=[model_of("a", stage)])
    return msgspec.structs.replace(one, **more)


# What another node says of itself


@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_trouble(raw: bytes) -> None:
    view = read_view(raw, "n1")
    assert view.node == "n1" and view.trouble == UNREADABLE and not view.models


@pytest.mark.parametrize(
    "raw",
    [b'{"node":"n1","up_s":NaN}', b'{"node":"n1","up_s":1e999}', b'{"node":"n1","term":"x"}', b"[" * 100_000,
     b'{"node":"n1","models":[{"model":"a","stage":"lukewarm"}]}', b'"\\ud800"'],
)  # fmt: skip
def test_a_view_that_is_none_is_trouble(raw: bytes) -> None:
    assert read_view(raw, "n1").trouble == UNREADABLE


def test_a_view_is_read_as_it_was_written() -> None:
    view = seen("n1", "active", url="http://127.0.0.1:80", applications=[application()], leads=leads(), up_s=3.25)
    assert read_view(written(view, MOST), "n1") == view


def test_a_node_speaks_for_itself_alone() -> None:
    """Not under another name, with no address that a page could stumble over, and with counts that fit."""
    odd = application("odd", Spread(bounds_s=[0.1, 1.0], counts=[1, 2]))
    unsorted = application("unsorted", Spread(bounds_s=[1.0, 0.1], counts=[1, 2, 3]))
    long = Decision(time=1.0, term=1, kind="order", why="x" * (TEXT_MOST + 1))
    view = seen(
        "n9", url="javascript:alert(1)", trouble="it is n0 that is ill", applications=[odd, application(), unsorted],
        leads=leads(decisions=[long]), host="h" * 1000,
    )  # fmt: skip
    found = read_view(written(view, MOST), "n1")
    assert (found.node, found.url, found.trouble) == ("n1", "", None)
    assert [one.application for one in found.applications] == ["app"]
    assert found.leads is not None and not found.leads.decisions and len(found.host) == 64


def test_a_view_is_never_longer_than_it_may_be() -> None:
    """A link would end over it. What moves is left out last."""
    rests = [model_of(f"m{i}", "cold") for i in range(30_000)]
    view = seen("n1", url="http://127.0.0.1:80", pool_pages=7)
    view.models += [model_of("warm", "warm"), *rests, model_of("waited-for", "cold", held=1)]
    raw = written(view, MOST)
    assert len(raw) <= MOST
    assert [one.model for one in read_view(raw, "n1").models] == ["warm", "waited-for"]
    view.models += [model_of(f"w{i}", "warm") for i in range(30_000)]
    bare = read_view(written(view, MOST), "n1")
    assert bare.models == [] and bare.pool_pages == 7 and bare.url == view.url
    assert read_view(written(seen("n1"), MOST), "n1").models == seen("n1").models


# The whole


def test_nodes_stand_in_order_and_only_the_leader_is_heard_as_one() -> None:
    false = leads(served={"a": ["n2"]})
    view = beside("n2", "n1", 7, 5.0, [seen("n2", leads=false), seen("n0"), seen("n1", "active", leads=leads())])
    assert [one.node for one in view.nodes] == ["n0", "n1", "n2"]
    assert [one.leads is not None for one in view.nodes] == [False, True, False]
    assert (view.asked, view.leader, view.term) == ("n2", "n1", 7)
    assert where_served(view) == {"a": ["n1"]}


def test_without_a_leader_a_model_is_where_it_is_active() -> None:
    view = beside("n0", None, 7, 5.0, [seen("n0", "active", leads=leads()), seen("n1", "warm"), seen("n2", "active")])
    assert where_served(view) == {"a": ["n0", "n2"]}


def test_what_the_leader_wants_of_a_node_is_said_there() -> None:
    standings = {"n0": {"a": StandingView(goal="active", pinned=True)}}
    mine = seen("n1", leads=leads(standings=standings))
    mine.models[0].pinned = True  # which the leader knows nothing of
    view = beside("n0", "n1", 1, 5.0, [seen("n0"), mine])
    a0, a1 = view.nodes[0].models[0], view.nodes[1].models[0]
    assert (a0.goal, a0.pinned) == ("active", True)
    assert (a1.goal, a1.pinned) == (None, False)


def test_a_leader_tells_what_its_brain_knows() -> None:
    brain = Brain(BrainSettings())
    for node in ("n0", "n1"):
        brain.on(Joined(node, 100, 10_000, (known("a"), known("b"))), 0.0)
    order = next(one for one in brain.on(Asked("a", Wish.LOAD, None, "n1"), 1.0) if isinstance(one, Order))
    before = leader_view(brain, [], {"a": 3, "b": 0})
    assert before.served == {"a": [], "b": []} and before.waiting == {"a": 3}
    assert before.standings["n1"]["a"].goal == "active"
    brain.on(Done(order.id, Stage.ACTIVE, False, 0.5), 2.0)
    brain.on(Asked("a", Wish.PIN, None, "n1"), 3.0)
    after = leader_view(brain, [], {})
    assert after.served == {"a": ["n1"], "b": []}
    assert after.standings["n1"] == {"a": StandingView(pinned=True)}


def test_a_model_is_shown_as_it_is_managed() -> None:
    managed = msgspec.convert(
        {
            "model": "a", "stage": "active", "goal": None, "under_way": None, "pinned": True, "draining": False,
            "running": 4, "held": 2, "idle_s": None, "weight_pages": 9, "weight_bytes": 900, "held_pages": 8,
            "kv_pages": 7, "host_copy_bytes": 6, "load_s": 1.0, "wake_s": 1.0, "trouble": "it is ill",
            "prepared": True, "origin": "load", "source": None,
        },
        ManagedModel,
    )  # fmt: skip
    assert model_view(managed) == ModelView(
        model="a", stage="active", pinned=True, running=4, held=2, weight_pages=8, kv_pages=7, host_copy_bytes=6,
        trouble="it is ill",
    )  # fmt: skip


# Decisions


def said(at: float, term: int, why: str) -> Decision:
    return Decision(time=at, term=term, kind="order", why=why)


def test_what_earlier_leaders_decided_is_shown_once_and_in_order() -> None:
    first, second, third = said(1.0, 1, "one"), said(2.0, 2, "two"), said(3.0, 3, "three")
    nodes = [
        seen("n0", decided=[first]), seen("n1", decided=[first, second]),
        seen("n2", leads=leads(decisions=[third, third])),
    ]  # fmt: skip
    view = beside("n0", "n2", 3, 9.0, nodes)
    assert decisions_of(view) == [first, second, third]
    headless = beside("n0", None, 3, 9.0, [seen("n2", decided=[third]), seen("n0", decided=[first])])
    assert decisions_of(headless) == [first, third]


def test_who_does_not_lead_decides_nothing_in_this_term() -> None:
    """And of earlier ones it tells no more than fits, and no sentence without end."""
    late, early = said(5.0, 3, "of n1, which does not lead"), said(1.0, 2, "early")
    view = beside("n0", "n0", 3, 9.0, [seen("n0", leads=leads()), seen("n1", decided=[early, late])])
    assert decisions_of(view) == [early]
    many = [said(float(i), 1, "x") for i in range(3 * DECIDED_MOST)]
    found = read_view(msgspec.json.encode(seen("n1", decided=[*many, said(9.0, 1, "x" * (TEXT_MOST + 1))])), "n1")
    assert found.decided == many[-DECIDED_MOST + 1 :]


def test_a_new_leader_says_first_that_it_leads_and_who_is_gone() -> None:
    decisions = Decisions(4, "n1", ["n0", "n1", "n2", "n3"])
    decisions.begin(["n1", "n2"], 1.0)
    decisions.see(Left("n2"), [], 2.0)  # it was still known, and never presented itself
    decisions.see(Left("n2"), [], 3.0)
    decisions.see(Left("n0"), [], 3.0)
    assert [(one.kind, one.node, one.term, one.why) for one in decisions.last()] == [
        ("leads", "n1", 4, "n1 leads, term 4; n0, n3 are gone"), ("left", "n2", 4, "n2 is gone"),
    ]  # fmt: skip
    first = Decisions(1, "n0")
    first.begin(["n0"], 1.0)
    assert [one.why for one in first.last()] == ["n0 leads, term 1"]


def order(number: int, node: str = "n0", verb: Verb = Verb.LOAD) -> Order:
    return Order(1, number, node, "a", verb, "it is wanted")


def test_an_order_and_its_end_are_told_each_with_its_sentence() -> None:
    decisions = Decisions(4)
    decisions.see(Tick(), [order(1), Decided("a", "a to n0"), Refuse("b", "no room", None)], 10.0)
    decisions.see(Done(1, Stage.ACTIVE, False, 0.5), [], 11.0)
    decisions.see(Tick(), [order(2, verb=Verb.SLEEP)], 12.0)
    decisions.see(
        Failed(2, Stage.ACTIVE, False, "too long"), [Answer("a", True, "a is pinned"), Answer("a", False, "no")], 13.0
    )
    last = decisions.last()
    assert [(one.kind, one.model, one.node, one.verb, one.time) for one in last] == [
        ("order", "a", "n0", "load", 10.0), ("decided", "a", "", "", 10.0), ("refused", "b", "", "", 10.0),
        ("done", "a", "n0", "load", 11.0), ("order", "a", "n0", "sleep", 12.0), ("failed", "a", "n0", "sleep", 13.0),
        ("decided", "a", "", "", 13.0),
    ]  # fmt: skip
    assert [one.why for one in last if one.kind in ("done", "failed")] == [
        "a is active on n0, load took 0.5 s", "a on n0: sleep failed: too long",
    ]  # fmt: skip
    assert {one.term for one in last} == {4}


def test_only_a_model_that_ran_can_be_lost() -> None:
    """A node that presents itself tells of its host copies in the same words."""
    decisions = Decisions(1)
    for _ in range(2):  # it may present itself twice
        decisions.see(Joined("n0", 100, 0, (known("a"),)), [], 1.0)
    decisions.see(Lost("n0", "a", Stage.WARM, True), [], 1.0)
    decisions.see(Report("n0", {"a": Busy(0, 0, 1.0)}), [], 2.0)
    decisions.see(Lost("n0", "a", Stage.COLD, False), [], 3.0)
    decisions.see(Lost("n0", "a", Stage.COLD, False), [], 4.0)
    assert [(one.kind, one.time) for one in decisions.last()] == [("joined", 1.0), ("lost", 3.0)]
    assert decisions.last()[-1].why == f"a on n0: {LOST}"


def test_nodes_that_leave_take_their_orders_with_them() -> None:
    decisions = Decisions(1)
    decisions.see(Joined("n1", 100, 0, (known("a"),)), [], 0.0)
    decisions.see(Tick(), [order(1, "n1"), order(2, "n2")], 1.0)
    decisions.see(Left("n1"), [], 2.0)
    decisions.see(Tick(), [order(3, "n1")], 2.5)
    decisions.see(Left("n1"), [], 3.0)  # it said that it goes, and then it is gone: that is told once
    for number in (1, 3, 2):
        decisions.see(Done(number, Stage.ACTIVE, False, 0.5), [], 4.0)
    last = decisions.last()
    assert [(one.kind, one.node, one.time) for one in last[3:]] == [
        ("left", "n1", 2.0), ("order", "n1", 2.5), ("done", "n2", 4.0),
    ]  # fmt: skip
    decisions.see(Joined("n1", 100, 0, (known("a"),)), [], 5.0)
    decisions.see(Left("n1"), [], 6.0)
    assert [(one.kind, one.time) for one in decisions.last()[-2:]] == [("joined", 5.0), ("left", 6.0)]


def test_what_is_said_of_a_node_names_it_as_one() -> None:
    decisions = Decisions(1)
    decisions.see(Joined("n0", 100, 0, (known("a"),)), [], 0.0)
    decisions.see(Assigned("n0", Duty.DRAIN), [Answer("n0", True, "n0 is being emptied")], 1.0)
    decisions.see(Assigned("n9", Duty.DRAIN), [Answer("n9", False, "there is no node n9")], 1.0)
    decisions.see(Tick(), [Decided("n0", "n0: it is empty"), Decided("a", "a: it has no place")], 2.0)
    decisions.see(Asked("a", Wish.PIN), [Answer("a", True, "a is pinned")], 3.0)
    assert [(one.kind, one.model, one.node) for one in decisions.last()[1:]] == [
        ("decided", "", "n0"), ("decided", "", "n0"), ("decided", "a", ""), ("decided", "a", ""),
    ]  # fmt: skip


def test_only_so_many_are_kept() -> None:
    decisions = Decisions(1)
    for number in range(3 * KEPT):
        decisions.see(Tick(), [order(number, verb=Verb.DRAIN)], float(number))
    assert [one.time for one in decisions.last()] == [float(number) for number in range(2 * KEPT, 3 * KEPT)]
    assert not decisions._orders
