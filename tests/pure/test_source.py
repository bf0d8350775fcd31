"""Where weights come from: the published times, the order of sources, shared links, and trees of copies."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.orders import Verb
from janus_server.sched.placement import Cluster, Device, Model, Replica, Standing
from janus_server.sched.source import Copy, Link, Links, Origin, choose, spread

CHAT = Model(model="chat", pages=1, weight_bytes=65_000_000_000)
# A near copy of it takes 1 s, a wake 2 s alone, a far copy 4 s and the disk 10 s.
SIMPLE = Links(near=Link(0.0, 65e9), host=Link(0.0, 32.5e9, 65e9), far=Link(0.0, 16.25e9), disk=Link(0.0, 6.5e9))


def device(name: str, host: str = "h0", domain: str = "d0", copies: tuple[str, ...] = ()) -> Device:
    return Device(id=name, host=host, domain=domain, pages=10, copies=copies)


def holder(on: str, standing: Standing = Standing.ACTIVE, backlog_s: float = 0.0, serves: int = 0) -> Replica:
    return Replica(model="chat", devices=(on,), standing=standing, backlog_s=backlog_s, serves=serves)


def told(copy: Copy) -> tuple[Origin, str | None, float, float]:
    return copy.origin, copy.source.devices[0] if copy.source else None, copy.begin_s, copy.end_s


@pytest.mark.parametrize(
    ("gigabytes", "published_s", "within"),
    [(8.2, 0.408, 0.01), (32.8, 0.783, 0.01), (42.0, 0.742, 0.3)],
)
def test_forks_take_about_as_long_as_published(gigabytes: float, published_s: float, within: float) -> None:
    """The largest took less than the line through the other two says: its links reached 91 GB/s."""
    assert Links().near.seconds(int(gigabytes * 1e9)) == pytest.approx(published_s, rel=within)


def test_wakes_take_as_long_as_published_alone_and_together() -> None:
    host = Links().host
    assert host.seconds(8_200_000_000) == pytest.approx(0.42, abs=0.01)
    assert host.seconds(42_000_000_000, sharing=16) == pytest.approx(2.71, rel=0.01)


def test_the_order_of_sources() -> None:
    near, far = holder("a"), holder("f")
    devices = (device("a"), device("b"), device("f", "h9", "d9"))
    with_copy = (device("a"), device("b", copies=("chat",)), device("f", "h9", "d9"))
    assert choose(CHAT, ["b"], Cluster(with_copy, (near, far)), SIMPLE).origin is Origin.NEAR
    assert choose(CHAT, ["b"], Cluster(with_copy, (far,)), SIMPLE).origin is Origin.HOST
    assert choose(CHAT, ["b"], Cluster(devices, (far,)), SIMPLE).origin is Origin.FAR
    assert choose(CHAT, ["b"], Cluster(devices), SIMPLE).origin is Origin.DISK
    assert [origin.verb for origin in Origin] == [Verb.FORK, Verb.WAKE, Verb.FORK, Verb.LOAD]


def test_of_near_holders_the_busiest_is_drained_last_and_one_that_feeds_is_avoided() -> None:
    devices = tuple(map(device, "abcx"))
    held = (holder("a", backlog_s=0.2), holder("b", backlog_s=0.9), holder("c", backlog_s=2.0, serves=1))
    chosen = choose(CHAT, ["x"], Cluster(devices, held), SIMPLE)
    assert told(chosen) == (Origin.NEAR, "b", 0.0, 1.0)
    assert "the busiest of them, 900 ms behind" in chosen.why


def test_what_is_drained_or_still_arriving_is_no_source() -> None:
    held = (holder("a", Standing.DRAINING), holder("b", Standing.RISING), holder("c", Standing.SINKING))
    assert choose(CHAT, ["x"], Cluster(tuple(map(device, "abcx")), held), SIMPLE).origin is Origin.DISK


def test_waiting_for_a_busy_holder_is_better_than_the_disk() -> None:
    chosen = choose(CHAT, ["x"], Cluster((device("a"), device("x")), (holder("a", serves=1),)), SIMPLE)
    assert told(chosen) == (Origin.NEAR, "a", 1.0, 2.0) and "which is free in 1 s" in chosen.why


def test_a_burst_spreads_as_a_tree() -> None:
    devices = tuple(device(f"n{i}") for i in range(8))
    copies = spread(CHAT, [(f"n{i}",) for i in range(1, 8)], Cluster(devices, (holder("n0"),)), SIMPLE)
    assert [copy.end_s for copy in copies] == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert [copy.source.devices[0] for copy in copies if copy.source] == ["n0", "n0", "n1", "n0", "n1", "n2", "n3"]


def test_wakes_on_one_host_share_its_memory() -> None:
    devices = tuple(device(f"n{i}", copies=("chat",)) for i in range(4))
    copies = spread(CHAT, [(f"n{i}",) for i in range(4)], Cluster(devices), SIMPLE)
    assert copies[0].origin is Origin.HOST and copies[0].end_s == 2.0
    assert max(copy.end_s for copy in copies) <= 4.0


def test_shards_of_one_replica_share_too() -> None:
    devices = tuple(device(f"n{i}", copies=("chat",)) for i in range(16))
    big = Model(model="chat", pages=1, weight_bytes=42_000_000_000, shards=16)
    chosen = choose(big, [d.id for d in devices], Cluster(devices))
    assert chosen.origin is Origin.HOST and chosen.end_s == pytest.approx(2.71, rel=0.01)


def test_unknown_devices_and_an_empty_cluster_have_the_checkpoint() -> None:
    assert choose(CHAT, ["nowhere"], Cluster()).origin is Origin.DISK
    assert spread(CHAT, [], Cluster()) == []


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3), st.integers(1, 12), st.booleans())
def test_no_holder_feeds_two_at_once_and_nobody_reads_what_has_not_arrived(
    holders: int, wanted: int, copies: bool
) -> None:
    names = [f"n{i:02d}" for i in range(holders + wanted)]
    devices = tuple(device(n, copies=("chat",) if copies else ()) for n in names)
    made = spread(CHAT, [(n,) for n in names[holders:]], Cluster(devices, tuple(map(holder, names[:holders]))), SIMPLE)
    arrived = {n: 0.0 for n in names[:holders]} | {copy.devices[0]: copy.end_s for copy in made}
    feeding: dict[str, list[tuple[float, float]]] = {}
    for copy in made:
        assert copy.end_s > copy.begin_s
        if copy.source is not None:
            assert copy.begin_s >= arrived[copy.source.devices[0]]
            feeding.setdefault(copy.source.devices[0], []).append((copy.begin_s, copy.end_s))
    for spans in feeding.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    # Doubling: never worse than one after the other from the best single source.
    assert max(copy.end_s for copy in made) <= 10.0 * wanted


def test_a_link_that_is_slower_than_the_checkpoint_is_not_taken() -> None:
    cluster = Cluster(devices=(device("a"), device("b")), replicas=(holder("a"),))
    assert choose(CHAT, ("b",), cluster, SIMPLE).origin is Origin.NEAR
    slow = Links(near=Link(0.0, 6e9), far=Link(0.0, 1e9), disk=SIMPLE.disk)
    assert choose(CHAT, ("b",), cluster, slow).origin is Origin.DISK
