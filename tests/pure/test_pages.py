"""The page pool: worked examples, misuse, and random histories against a twin made of plain sets."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from janus_server.errors import Bug
from janus_server.kv.pages import PagePool, Reservation
from janus_server.types import Owner, PageKind

WEIGHTS = Owner("a", PageKind.WEIGHTS)
KV = Owner("a", PageKind.KV)
OTHER = Owner("b", PageKind.KV)


def _low(pool: PagePool, n: int, owner: Owner = WEIGHTS) -> Reservation:
    reservation = pool.reserve_low(n, owner)
    assert reservation is not None
    return reservation


def _high(pool: PagePool, n: int, owner: Owner = KV) -> Reservation:
    reservation = pool.reserve_high(n, owner)
    assert reservation is not None
    return reservation


def test_docstring_example() -> None:
    pool = PagePool(8)
    assert _low(pool, 3).commit() == (0, 1, 2)
    assert _high(pool, 2).commit() == (7, 6)
    assert pool.free_pages == 3
    assert pool.held() == {WEIGHTS: 3, KV: 2}
    assert pool._owners == [WEIGHTS] * 3 + [None] * 3 + [KV] * 2
    pool.check()


def test_the_border_moves_and_freed_pages_are_taken_again_from_their_ends() -> None:
    pool = PagePool(6)
    high = _high(pool, 4).commit()
    assert high == (5, 4, 3, 2)
    pool.release(KV, (3, 5))
    assert _low(pool, 3).commit() == (0, 1, 3)
    assert _high(pool, 1).commit() == (5,)
    assert pool.free_pages == 0
    pool.check()


def test_high_mark_is_the_lowest_page_ever_taken_from_the_high_end() -> None:
    pool = PagePool(10)
    assert pool.high_mark == 10
    _high(pool, 0).commit()
    assert pool.high_mark == 10
    pool.release(KV, _high(pool, 4).commit())
    assert pool.high_mark == 6
    _low(pool, 2).commit()
    assert pool.reserve_high(9, KV) is None
    assert pool.high_mark == 6


def test_reservations_are_all_or_nothing() -> None:
    pool = PagePool(4)
    _low(pool, 2)
    assert pool.reserve_low(3, WEIGHTS) is None
    assert pool.reserve_high(3, KV) is None
    assert pool.free_pages == 2
    assert _high(pool, 2).pages == (3, 2)
    pool.check()


def test_cancel_gives_everything_back() -> None:
    pool = PagePool(4)
    reservation = _low(pool, 3)
    assert pool.held() == {WEIGHTS: 3}
    reservation.cancel()
    assert (pool.free_pages, pool.held()) == (4, {})
    assert _low(pool, 4).pages == (0, 1, 2, 3)


def test_an_empty_reservation_commits_and_cancels() -> None:
    pool = PagePool(2)
    _low(pool, 0).cancel()
    assert _high(pool, 0).commit() == ()
    pool.release(KV, ())
    assert (pool.free_pages, pool.held()) == (2, {})
    pool.check()


@pytest.mark.parametrize("first", ["commit", "cancel"])
@pytest.mark.parametrize("second", ["commit", "cancel"])
def test_a_reservation_ends_once(first: str, second: str) -> None:
    reservation = _low(PagePool(4), 2)
    getattr(reservation, first)()
    with pytest.raises(Bug):
        getattr(reservation, second)()


@pytest.mark.parametrize("pages", [(7, 0), (7, 3), (7, 7), (7, 8), (7, -1), (5,)])
def test_a_wrong_release_is_a_bug_and_changes_nothing(pages: tuple[int, ...]) -> None:
    pool = PagePool(8)
    _low(pool, 2).commit()
    _high(pool, 2).commit()
    _high(pool, 1, OTHER).commit()
    before = pool.held()
    with pytest.raises(Bug):
        pool.release(KV, pages)
    assert (pool.held(), pool.free_pages) == (before, 3)
    pool.check()
    assert pool.reclaim(KV) == 2
    assert _high(pool, 5, OTHER).commit() == (7, 6, 4, 3, 2)


def test_a_released_page_is_nobodys() -> None:
    pool = PagePool(3)
    pages = _high(pool, 1).commit()
    pool.release(KV, pages)
    with pytest.raises(Bug):
        pool.release(KV, pages)
    pool.check()


def test_reclaim_returns_what_one_owner_holds() -> None:
    pool = PagePool(6)
    _low(pool, 2).commit()
    _high(pool, 3).commit()
    assert pool.reclaim(KV) == 3
    assert pool.reclaim(KV) == 0
    assert pool.held() == {WEIGHTS: 2}
    pool.check()


def test_impossible_sizes_are_bugs() -> None:
    for size in (0, -1):
        with pytest.raises(Bug):
            PagePool(size)
    pool = PagePool(2)
    for reserve in (pool.reserve_low, pool.reserve_high):
        with pytest.raises(Bug):
            reserve(-1, KV)
    assert pool.free_pages == 2


def test_eased_grows_when_pages_come_back_and_when_a_holder_may_give_one_up() -> None:
    pool = PagePool(4)
    seen = [pool.eased]
    pages = _high(pool, 2).commit()
    assert pool.reserve_low(3, WEIGHTS) is None
    assert pool.eased == seen[-1]
    for change in (lambda: pool.release(KV, pages[:1]), pool.ease, lambda: _low(pool, 1).cancel(),
                   lambda: pool.reclaim(KV)):  # fmt: skip
        change()
        assert pool.eased > seen[-1]
        seen.append(pool.eased)


def test_check_sees_a_wrong_count() -> None:
    pool = PagePool(4)
    _low(pool, 2).commit()
    pool.free_pages += 1
    with pytest.raises(Bug):
        pool.check()


def test_free_pages_are_kept_for_whoever_is_below_its_floor() -> None:
    pool = PagePool(8)
    third = Owner("c", PageKind.KV)
    pool.keep(KV, 3)
    _high(pool, 1).commit()
    pool.keep(OTHER, 1)
    _high(pool, 2, third).commit()
    assert pool.free_pages == 5
    assert (pool.available(KV), pool.available(OTHER), pool.available(third), pool.available()) == (4, 3, 2, 2)
    assert pool.reserve_high(3, third) is None and pool.reserve_low(3, WEIGHTS) is None
    mine = _high(pool, 4).commit()
    assert (pool.available(), pool.available(OTHER), pool.kept_pages) == (0, 1, 1)
    pool.release(KV, mine)
    pool.keep(KV, 0)
    assert (pool.available(), pool.available(OTHER)) == (4, 5)
    pool.check()


def test_a_floor_that_comes_late_takes_from_nobody_and_gets_what_comes_back() -> None:
    pool = PagePool(4)
    theirs = _high(pool, 4, OTHER).commit()
    pool.keep(KV, 2)
    assert (pool.available(OTHER), pool.available(KV)) == (-2, 0)
    pool.release(OTHER, theirs[:2])
    assert pool.reserve_high(1, OTHER) is None
    assert _high(pool, 2).commit() == (3, 2)


def test_a_negative_floor_is_a_bug() -> None:
    with pytest.raises(Bug):
        PagePool(2).keep(KV, -1)


@dataclasses.dataclass
class _Open:
    reservation: Reservation
    owner: Owner
    pages: tuple[int, ...]


class PoolAgainstSets(RuleBasedStateMachine):
    """The twin: a set of free ids and a set an owner. Every answer of the pool is predicted from them."""

    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.SIZE)
        self.free = set(range(self.SIZE))
        self.held: dict[Owner, set[int]] = {WEIGHTS: set(), KV: set(), OTHER: set()}
        self.open: list[_Open] = []
        self.high_mark = self.SIZE
        self.floors = {KV: 0, OTHER: 0}

    @rule(floor=st.integers(0, 5), owner=st.sampled_from([KV, OTHER]))
    def keep(self, floor: int, owner: Owner) -> None:
        self.floors[owner] = floor
        self.pool.keep(owner, floor)

    def _may_take(self, owner: Owner) -> int:
        """Free pages without those that others lack of their floors."""
        others = (max(0, floor - len(self.held[o])) for o, floor in self.floors.items() if o != owner)
        return len(self.free) - sum(others)

    @rule(n=st.integers(0, 6), owner=st.sampled_from([WEIGHTS, KV, OTHER]))
    def low(self, n: int, owner: Owner) -> None:
        self._reserved(self.pool.reserve_low(n, owner), sorted(self.free)[:n], n, owner)

    @rule(n=st.integers(0, 6), owner=st.sampled_from([WEIGHTS, KV, OTHER]))
    def high(self, n: int, owner: Owner) -> None:
        fits = n <= self._may_take(owner)
        pages = sorted(self.free, reverse=True)[:n]
        self._reserved(self.pool.reserve_high(n, owner), pages, n, owner)
        if fits:
            self.high_mark = min([self.high_mark, *pages])

    def _reserved(self, got: Reservation | None, pages: list[int], n: int, owner: Owner) -> None:
        if n > self._may_take(owner):
            assert got is None
            return
        assert got is not None and got.pages == tuple(pages)
        self.free -= set(pages)
        self.held[owner] |= set(pages)
        self.open.append(_Open(got, owner, got.pages))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        one = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        assert one.reservation.commit() == one.pages

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        one.reservation.cancel()
        self._freed(one.owner, set(one.pages))

    @rule(owner=st.sampled_from([WEIGHTS, KV, OTHER]), data=st.data())
    def release(self, owner: Owner, data: st.DataObject) -> None:
        reserved = {page for one in self.open for page in one.pages}
        pages = data.draw(st.lists(st.sampled_from(range(self.SIZE)), max_size=4))
        if set(pages) & reserved:
            return
        if len(set(pages)) < len(pages) or not set(pages) <= self.held[owner]:
            with pytest.raises(Bug):
                self.pool.release(owner, tuple(pages))
            return
        self.pool.release(owner, tuple(pages))
        self._freed(owner, set(pages))

    @rule(owner=st.sampled_from([WEIGHTS, KV, OTHER]))
    def reclaim(self, owner: Owner) -> None:
        assert self.pool.reclaim(owner) == len(self.held[owner])
        self._freed(owner, set(self.held[owner]))
        self.open = [one for one in self.open if one.owner != owner]

    def _freed(self, owner: Owner, pages: set[int]) -> None:
        self.held[owner] -= pages
        self.free |= pages

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert self.pool.free_pages == len(self.free)
        assert self.pool.held() == {owner: len(pages) for owner, pages in self.held.items() if pages}
        assert self.pool.high_mark == self.high_mark
        assert self.pool.available() == self._may_take(WEIGHTS)
        assert self.pool.available(KV) == self._may_take(KV)
        for owner, pages in self.held.items():
            assert all(self.pool._owners[page] == owner for page in pages)
        assert all(self.pool._owners[page] is None for page in self.free)


PoolAgainstSets.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolAgainstSets = PoolAgainstSets.TestCase
