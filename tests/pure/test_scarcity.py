"""Who waits for whom when pages are short: preemption, other models' caches, and nobody for ever.

Written against `Scarcity` through real batchers on one pool.
"""

from __future__ import annotations

from twin_batcher import Node, request_of

from janus_server.sched.batcher import Batcher
from janus_server.sched.scarcity import Scarcity


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
