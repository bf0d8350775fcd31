"""When another node computes a prompt: where that pays by prediction, and never where it holds up somebody else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.errors import Bug
from janus_server.kv.blocks import KvPages
from janus_server.kv.pages import PagePool
from janus_server.kv.prefix import PrefixCache
from janus_server.orders import (
    Asked,
    Busy,
    Dispatch,
    Done,
    Event,
    Helper,
    Joined,
    KnownModel,
    Left,
    Order,
    Report,
    Stage,
    Ticket,
    Traffic,
    Wish,
)
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.brain import Brain
from janus_server.sched.scarcity import Scarcity
from janus_server.sched.split import SplitSettings, Stand, aid
from janus_server.sched.state import BrainSettings
from janus_server.types import Owner, PageKind, Request, Split
from janus_server.wire.frames import STREAM_ASKS, Lend, Run, read, write
from janus_server.wire.sound import sound

AUTO = SplitSettings(choice=Split.AUTO)
TOKEN_BYTES = 25_000


def ticket(tokens: int = 4000, work_s: float = 2.0, name: str = "t") -> Ticket:
    return Ticket(id=name, model="m", prompt_tokens=tokens, work_s=work_s, arrived_s=0.0)


# What is decided


def test_an_idle_node_computes_for_one_that_is_busy() -> None:
    here, idle, busy = Stand("n0", 12, 0.0), Stand("n1", 0, 0.0), Stand("n2", 1, 0.0)
    assert aid(AUTO, ticket(), TOKEN_BYTES, here, (busy, idle)) == Helper("n1", 4000)
    assert aid(AUTO, ticket(), TOKEN_BYTES, here, (busy,)) is None
    assert aid(AUTO, ticket(), TOKEN_BYTES, here._replace(busy=0), (busy, idle)) is None
    assert aid(AUTO, ticket(work_s=0.05), TOKEN_BYTES, here, (busy, idle)) is None
    assert aid(AUTO, ticket(), 100 * TOKEN_BYTES, here, (busy, idle)) is None
    assert aid(AUTO, ticket(), TOKEN_BYTES, here, (idle._replace(backlog_s=1.9),)) == Helper("n1", 4000)
    assert aid(AUTO, ticket(), TOKEN_BYTES, here, (idle._replace(backlog_s=2.1),)) is None
    assert aid(SplitSettings(), ticket(), TOKEN_BYTES, here, (busy, idle)) is None


def test_what_is_cached_elsewhere_is_copied_where_that_is_quicker_than_computing_it() -> None:
    here, holder = Stand("n0", 0, 0.0, 640), Stand("n1", 9, 5.0, 3200)
    assert aid(AUTO, ticket(), TOKEN_BYTES, here, (holder,)) == Helper("n1", 3200, cached=True)
    assert aid(AUTO, ticket(), TOKEN_BYTES, here, (holder._replace(cached_tokens=640),)) is None
    assert aid(AUTO, ticket(), 100 * TOKEN_BYTES, here, (holder,)) is None


stands = st.builds(
    Stand, st.just("?"), st.integers(0, 3), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0, 320, 3200])
)


@given(st.lists(stands, min_size=2, max_size=5), st.sampled_from([0.01, 0.2, 3.0]), st.sampled_from(list(Split)))
def test_help_saves_more_than_it_costs_and_disturbs_nobody(found: list[Stand], work_s: float, choice: Split) -> None:
    here, *others = [one._replace(node=f"n{i}") for i, one in enumerate(found)]
    settings = SplitSettings(choice=choice)
    helper = aid(settings, ticket(work_s=work_s), TOKEN_BYTES, here, others)
    assert helper == aid(settings, ticket(work_s=work_s), TOKEN_BYTES, here, others[::-1])
    if choice is Split.OFF:
        assert helper is None
    elif choice is Split.ALWAYS:
        assert helper is not None and helper.node != here.node
    elif helper is not None:
        (one,) = [other for other in others if other.node == helper.node]
        moved = (one.cached_tokens if helper.cached else 4000) - here.cached_tokens
        assert 4 * (settings.fixed_s + moved * TOKEN_BYTES / settings.bytes_per_s) <= work_s * moved / 4000
        assert helper.cached or (here.busy and not one.busy and one.backlog_s <= here.backlog_s + work_s)


def test_the_brain_names_a_helper_and_lays_the_work_on_it() -> None:
    """Two long prompts at once: the second is helped by another node than the first, or by none."""
    brain = Brain(BrainSettings(split=SplitSettings(choice=Split.AUTO)))
    known = KnownModel(
        model="m", weight_pages=2, host_bytes=0, longest_pages=2, kv_token_bytes=TOKEN_BYTES, pinned=True
    )  # fmt: skip
    now, nodes = 0.0, ("n0", "n1", "n2")
    events: list[Event] = [Joined(node, 64, 0, (known,)) for node in nodes]
    events += [Asked("m", Wish.LOAD, None, node) for node in nodes]
    while events:
        orders = [one for one in brain.on(events.pop(0), now) if isinstance(one, Order) and one.verb.ends]
        events = [*(Done(order.id, Stage.ACTIVE, False, 0.1) for order in orders), *events]
    assert set(brain.serving("m")) == set(nodes)
    now = 1.0
    for node, running in zip(nodes, (5, 5, 0), strict=True):
        brain.on(Report(node, {"m": Busy(running, 0, 0.0)}), now)

    def begin(name: str, at: float) -> Dispatch:
        (begun,) = [a for a in brain.on(Traffic((ticket(name=name),)), at) if isinstance(a, Dispatch)]
        return begun

    def backlog_s(at: float) -> dict[str, float]:
        return {node: round(brain._dispatcher.backlog_s(node, at), 2) for node in nodes}

    first = begin("a", now)
    assert first.helper == Helper("n2", 4000) and first.node != "n2" and "prompts from n2" in first.why
    assert backlog_s(now) == {"n0": 0.0, "n1": 0.0, "n2": 2.0}
    second = begin("b", now + 0.01)  # it is busy with a prompt alone
    assert second.helper == Helper("n2", 4000) and second.node != "n2"
    assert backlog_s(now + 0.01) == {"n0": 0.0, "n1": 0.0, "n2": 3.99}
    third = begin("c", now + 0.02)  # now it has enough to do
    assert third.helper is None and third.node != "n2"
    assert backlog_s(now + 0.02) == {"n0": 0.0, "n1": 0.0, "n2": 3.98, third.node: 2.0}
    brain.on(Traffic(started=("a", "b", "c")), now + 1)
    assert backlog_s(now + 1) == dict.fromkeys(nodes, 0.0)
    brain.on(Report("n2", {"m": Busy(0, 0, 0.0)}), now + 1)
    assert begin("d", now + 1.1).helper is not None
    brain.on(Left("n2"), now + 1.2)
    brain.on(Traffic(left=("d",)), now + 1.2)
    assert backlog_s(now + 1.2) == dict.fromkeys(nodes, 0.0)


# What travels


def run_of(**fields: object) -> Run:
    request = Request(id="r", model="m", prompt=(1, 2, 3), max_tokens=0)
    return Run(stream=1, id="r", call="r", upto=8, request=request, **fields)  # type: ignore[arg-type]


def test_a_prompt_to_be_lent_comes_to_nothing_else() -> None:
    bare = run_of(lend=Lend(2, "i1"))
    assert read(write(bare), STREAM_ASKS, 1 << 16) == bare
    assert sound(bare) and sound(run_of(helper=Helper("n1", 9)))
    for change in ({"max_tokens": 1}, {"n": 2}, {"prompt_logprobs": 0}):
        request = Request(**{"id": "r", "model": "m", "prompt": (1, 2, 3), "max_tokens": 0, **change})
        assert not sound(Run(stream=1, id="r", call="r", upto=8, request=request, lend=Lend(0, "i1")))
    assert not sound(run_of(lend=Lend(0, "i1"), helper=Helper("n1", 9)))
    assert not sound(run_of(helper=Helper("n" * 600, 9))) and not sound(run_of(helper=Helper("n", -1)))


# Pages that change hands

ARRIVING = Owner("(arriving)", PageKind.KV)


def test_pages_that_arrive_are_nobody_elses_and_then_the_models() -> None:
    pool = PagePool(8)
    kv = KvPages(pool, "m", 2, floor_pages=2, ceiling_pages=4)
    kv.keep_floor()
    pages = kv.take(3)
    assert pages is not None
    kv.share(pages[0])
    with pytest.raises(Bug):
        kv.part(pages, ARRIVING)
    kv.drop(pages[0])
    kv.part(pages, ARRIVING)
    pool.check()
    assert (kv.held, pool.held(), pool.free_pages) == (0, {ARRIVING: 3}, 5)
    assert pool.reclaim(kv.owner) == 0  # a model that is torn down meanwhile takes nothing of them
    with pytest.raises(Bug):
        kv.adopt((pages[0], 0), ARRIVING)
    kv.adopt(pages, ARRIVING)
    pool.check()
    assert (kv.held, pool.held()) == (3, {kv.owner: 3})
    for page in pages:
        kv.drop(page)
    assert pool.free_pages == 8


def test_newcomers_wait_for_what_is_lent_and_those_who_run_do_not() -> None:
    pool = PagePool(6)
    kv = KvPages(pool, "m", 2)
    cache, scarcity = PrefixCache(kv, b"s"), Scarcity(pool)
    batcher = Batcher(kv, cache, scarcity, BatcherLimits(context_tokens=64, capacity_pages=6))
    scarcity.join(batcher)
    fresh = kv.take(4)
    assert fresh is not None
    pages = tuple(cache.publish(range(8), fresh))
    loans = scarcity.loans
    loan, other = loans.hold(batcher, pages), loans.hold(batcher, tuple(cache.match(range(8), 4).pages))
    batcher.add(Request(id="new", model="m", prompt=tuple(range(50, 55)), max_tokens=1), 0.0)
    assert batcher.plan(0.0) is None and scarcity.passing and loans.stands(loan) and loans.stands(other)
    loans.end(loan)
    loans.end(loan)
    assert not loans.stands(loan) and not scarcity.evict(5, kv)
    batch = batcher.plan(0.0)  # two pages of the other loan stay
    assert batch is not None and loans.stands(other)
    assert scarcity.make_room(3, batcher.running[0], kv)  # rather than that anybody is preempted
    assert not loans.stands(other) and not scarcity.passing and batcher.running and kv.available == 3
    last = loans.hold(batcher, ())
    scarcity.leave(batcher)  # its pages go back by their owner
    assert not loans.stands(last) and not loans.recall()
    pool.check()


@given(st.data())
def test_a_mark_holds_for_as_long_as_its_page_stays_cached(data: st.DataObject) -> None:
    """Whatever is published, evicted, withdrawn and found again: a mark is lost with the page, and never comes back."""
    pool = PagePool(12)
    kv = KvPages(pool, "m", 2)
    cache = PrefixCache(kv, b"s")
    marked: list[tuple[int, object, bool]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=8))
        match data.draw(st.sampled_from(["publish", "evict", "withdraw", "mark"])):
            case "publish":
                pages = kv.take(len(tokens) // 2)
                if pages is not None:
                    for page in cache.publish(tokens, pages):
                        kv.drop(page)
            case "evict":
                cache.evict(data.draw(st.integers(1, 3)))
            case "withdraw":
                cache.withdraw(cache.match(tokens, 2).pages[:0])
            case "mark":
                match = cache.match(tokens, len(tokens))
                marks = cache.marks(match.pages)
                assert cache.still(match.pages, marks)
                marked += [(page, mark, True) for page, mark in zip(match.pages, marks, strict=True)]
                for page in match.held:
                    kv.drop(page)
        for i, (page, mark, before) in enumerate(marked):
            now = cache.still((page,), (mark,))
            assert before or not now
            assert now == (kv.refs(page) > 0 and cache._by_page.get(page) is mark)
            marked[i] = (page, mark, now)
    assert all(a[2] is False or b[2] is False or a[1] is b[1] for a, b in itertools.combinations(marked, 2)
               if a[0] == b[0])  # fmt: skip
