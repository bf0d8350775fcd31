"""Who waits for whom when pages are short: preemption, other models' caches, and nobody for ever.

Written against `Scarcity` through real batchers on one pool.
"""

from __future__ import annotations

from twin_batcher import Node, request_of

from janus_server.sched.batcher import Batcher
from janus_server.sched.scarcity import Scarcity
from janus_server.types import Owner, PageKind


def test_the_youngest_is_preempted_and_all_finish() -> None:
    node = Node(6)
    requests = [request_of(f"r{i}", 3, max_tokens=20) for i in range(3)]
    for request in requests:
        node.batcher.add(request, 0.0)
    finished = [e.request_id for e in node.run() if e.finish]
    assert node.batcher.stats().preemptions > 0
    assert finished == ["r0", "r1", "r2"] and node.right(*requests)


def test_64_requests_in_a_pool_for_about_8() -> None:
    """Whoever runs is older than whoever waits, and the oldest advances in every step."""
    node = Node(8 * 3 + 2)
    requests = [request_of(f"r{i}", 3 + i % 5, max_tokens=8 + i % 17) for i in range(64)]
    for i, request in enumerate(requests):
        node.batcher.add(request, float(i // 8))
    steps = 0
    while not node.batcher.idle:
        oldest = min([*node.batcher.running, *node.batcher.waiting], key=lambda s: s.order)
        computed = oldest.computed
        assert node.step() is not None
        assert oldest.computed > computed
        if node.batcher.running and node.batcher.waiting:
            assert node.batcher.running[-1].order < node.batcher.waiting[0].order
        steps += 1
    assert node.right(*requests) and node.batcher.stats().preemptions > 0
    assert steps <= sum(r.max_tokens for r in requests)


def test_two_models_that_each_need_one_more_page_both_finish() -> None:
    node = Node(4, models=2)
    a, b = request_of("a", 8, max_tokens=8), request_of("b", 8, max_tokens=8)
    node.batchers[0].add(a, 0.0)
    node.batchers[1].add(b, 1.0)
    node.step(0), node.step(1)
    assert node.pool.free_pages == 0
    finished = [e.request_id for e in node.run() if e.finish]
    assert finished == ["a", "b"] and node.right(a, b)
    assert [x.stats().preemptions for x in node.batchers] == [0, 1]


def test_another_models_cache_is_given_up_before_anyone_is_preempted() -> None:
    node = Node(6, models=2)
    node.batchers[1].add(request_of("old", 12, max_tokens=1), 0.0)
    node.run()
    assert len(node.batchers[1].prefix) == 3
    requests = [request_of(f"r{i}", 8, max_tokens=4) for i in range(2)]
    for request in requests:
        node.batchers[0].add(request, 1.0)
    node.run()
    assert node.right(*requests) and len(node.batchers[1].prefix) == 0
    assert node.batchers[0].stats().preemptions == 0


def test_a_stream_of_small_requests_does_not_starve_a_neighbours_large_one() -> None:
    node = Node(8, models=2)
    large = request_of("large", 24, max_tokens=2)
    for now in range(60):
        if now == 2:
            node.batchers[0].add(large, float(now))
        node.batchers[1].add(request_of(f"s{now}", 4), float(now))
        node.step(0), node.step(1)
        if node.tokens("large"):
            break
    assert now < 20
    node.run()
    assert node.right(large)


def test_a_batcher_joins_when_it_is_let_and_not_by_being_made() -> None:
    """One that was made for a load that then failed must not be asked for pages."""
    node = Node(4)
    node.batcher.add(request_of("x", 8, max_tokens=1), 0.0)
    node.run()
    scarcity = Scarcity(node.pool)
    Batcher(node.batcher.kv, node.batcher.prefix, scarcity, node.limits)
    assert node.pool.free_pages == 2 and not scarcity.evict(3)
    scarcity.join(node.batcher)
    assert scarcity.evict(3)


def test_a_model_that_left_is_not_asked() -> None:
    node = Node(4, models=2)
    node.batchers[1].add(request_of("x", 8, max_tokens=1), 0.0)
    node.run()
    node.batchers[0]._scarcity.leave(node.batchers[1])
    assert not node.batchers[0]._scarcity.evict(3)
    assert node.batchers[0]._scarcity.evict(2)


def test_a_choice_preempted_before_its_turn_in_the_same_plan_waits() -> None:
    """A one-token prompt's second choice is one token behind with nothing computed; preempted, it looks the same."""
    node = Node(8, page_tokens=1, models=2, prefix_caching=False)
    requests = [request_of("c", 1, 6), request_of("d", 1, 6), request_of("a", 1, 4), request_of("b", 1, 4, n=2)]
    node.batchers[1].add(requests[0], 0.0)
    node.batchers[1].add(requests[1], 0.0)
    node.step(1)
    node.batchers[0].add(requests[2], 1.0)
    node.step(0)
    node.batchers[0].add(requests[3], 2.0)
    node.step(0)
    node.step(1)
    assert node.pool.free_pages == 0 and node.batchers[0].running[-1].index == 1
    batch = node.step(0)
    assert batch is not None and len(batch.chunks) == 1
    assert [s.index for s in node.batchers[0].waiting] == [0, 1]
    node.run()
    assert node.right(*requests)


def _fill_cache(node: Node, model: int, pages: int) -> None:
    node.batchers[model].add(request_of(f"old{model}", 4 * pages, max_tokens=1), 0.0)
    node.run()
    assert len(node.batchers[model].prefix) == pages


def test_a_floor_keeps_pages_free_and_cached_ones_up_to_it() -> None:
    node = Node(10, models=2, floors=(0, 4))
    _fill_cache(node, 1, 6)
    a, b = node.batchers
    assert (node.pool.free_pages, a.kv.available) == (4, 4)
    assert not node.scarcity.evict(7, a.kv) and len(b.prefix) == 6, "all or nothing"
    assert node.scarcity.evict(6, a.kv) and len(b.prefix) == 4
    assert node.scarcity.evict(10, b.kv) is True, "its own cache is not what its floor guards against"


def test_weights_do_not_take_what_floors_keep() -> None:
    node = Node(10, models=2, floors=(3, 2))
    _fill_cache(node, 0, 4)
    assert not node.scarcity.clear(6) and node.batcher.kv.held == 4
    assert node.scarcity.clear(5) and node.batcher.kv.held == 3
    assert node.pool.reserve_low(6, Owner("w", PageKind.WEIGHTS)) is None
    assert node.pool.reserve_low(5, Owner("w", PageKind.WEIGHTS)) is not None


def test_a_model_within_its_floor_is_no_victim_and_one_above_it_is() -> None:
    """The youngest is left alone where its model has no more than its floor; the next younger one gives way."""
    node = Node(10, models=2, floors=(0, 3))
    a, b = node.batchers
    old, middle, young = request_of("old", 16, 12), request_of("mid", 8, 12), request_of("young", 8, 4)
    a.add(old, 0.0), a.add(middle, 1.0), b.add(young, 2.0)
    node.step(0), node.step(1)
    assert (a.kv.held, b.kv.held) == (6, 2)
    node.run()
    assert (a.stats().preemptions, b.stats().preemptions) == (1, 0) and node.right(old, middle, young)


def test_a_model_that_joins_gets_its_floor_from_those_above_theirs() -> None:
    node = Node(8, models=2, floors=(2, 4))
    a, b = node.batchers
    node.scarcity.leave(b)
    old, young = request_of("old", 8, 4), request_of("young", 12, 4)
    a.add(old, 0.0), a.add(young, 1.0)
    node.step(0)
    assert a.kv.held == 5 and node.pool.free_pages == 3
    node.scarcity.join(b)
    assert [s.request.id for s in a.running] == ["old"] and node.pool.free_pages >= node.pool.kept_pages == 4
    node.run()
    assert node.right(old, young)


def test_a_model_at_its_ceiling_gives_up_its_own_cache_then_its_own_youngest() -> None:
    node = Node(20, models=2, ceilings=(4, None))
    a, b = node.batchers
    _fill_cache(node, 1, 3)
    _fill_cache(node, 0, 2)
    first, second = request_of("first", 8, 8), request_of("second", 8, 8)
    a.add(first, 1.0), a.add(second, 2.0)
    while not a.idle:
        node.step(0)
        assert a.kv.held <= 4
    assert len(b.prefix) == 3 and node.pool.free_pages >= 13
    assert node.right(first, second)


def test_a_model_at_its_ceiling_takes_nothing_from_a_younger_one_of_another_model() -> None:
    node = Node(20, models=2, ceilings=(5, None))
    a, b = node.batchers
    old, own, other = request_of("old", 8, 12), request_of("own", 8, 8), request_of("other", 8, 20)
    a.add(old, 0.0), a.add(own, 1.0), b.add(other, 2.0)
    node.run()
    assert (a.stats().preemptions, b.stats().preemptions) == (1, 0) and node.right(old, own, other)


def test_whoever_is_kept_out_by_its_own_ceiling_keeps_nobody_else_waiting() -> None:
    node = Node(20, models=2, ceilings=(4, None))
    a, b = node.batchers
    a.add(request_of("long", 8, 8), 0.0)
    node.step(0)
    a.add(request_of("kept out", 8, 8), 1.0)
    node.step(0)
    assert a.waiting and a.starved is None
    b.add(request_of("younger", 8, 4), 2.0)
    assert node.step(1) is not None
    node.run()


def test_what_stays_within_its_floor_need_not_wait_for_an_older_one_of_another_model() -> None:
    node = Node(10, models=2, floors=(0, 3))
    a, b = node.batchers
    a.add(request_of("runs", 20, 8), 0.0)
    node.step(0)
    a.add(request_of("starved", 20, 4), 1.0)
    node.step(0)
    assert a.starved is not None
    b.add(request_of("small", 4, 4), 2.0)
    assert node.step(1) is not None and b.running
    b.add(request_of("too much", 8, 4), 3.0)
    node.step(1)
    assert [s.request.id for s in b.waiting] == ["too much"]
    node.run()


def test_two_models_at_their_floors_that_each_need_one_more_page_both_finish() -> None:
    node = Node(6, models=2, floors=(2, 2))
    a, b = request_of("a", 8, max_tokens=8), request_of("b", 8, max_tokens=8)
    node.batchers[0].add(a, 0.0)
    node.batchers[1].add(b, 1.0)
    finished = [e.request_id for e in node.run() if e.finish]
    assert finished == ["a", "b"] and node.right(a, b)


def test_periods_are_told_once_each_and_only_matter_while_something_is_cached() -> None:
    node = Node(6)
    scarcity = Scarcity(node.pool, idle_s=8.0)
    scarcity.join(node.batcher)
    assert [scarcity.period_over(now) for now in (100.0, 101.9, 102.0, 103.0, 109.0, 110.0)] == [
        True, False, True, False, True, False,
    ]  # fmt: skip
    assert scarcity.next_period() is None
    _fill_cache(node, 0, 1)
    assert scarcity.next_period() == 111.0
    forever = Scarcity(node.pool)
    forever.join(node.batcher)
    assert not forever.period_over(1e9) and forever.next_period() is None
