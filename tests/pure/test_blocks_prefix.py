"""KV pages and the prefix cache: worked examples, misuse, and random histories against a dict of whole prefixes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from janus_server.errors import Bug
from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.pages import PagePool
from janus_server.kv.prefix import Match, PrefixCache


def _kv(n_pages: int = 10, page_tokens: int = 2) -> KvPages:
    return KvPages(PagePool(n_pages), "m", page_tokens)


def _take(kv: KvPages, n: int) -> tuple[int, ...]:
    pages = kv.take(n)
    assert pages is not None
    return pages


def _drop(kv: KvPages, match: Match) -> None:
    for page in match.pages:
        kv.drop(page)
    if match.partial is not None:
        kv.drop(match.partial)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_pages_for_is_the_smallest_sufficient_number(tokens: int, page_tokens: int) -> None:
    n = pages_for(tokens, page_tokens)
    assert n * page_tokens >= tokens > (n - 1) * page_tokens
    assert pages_for(29, 14) == 3


class TestKvPages:
    def test_takes_from_the_high_end_all_or_nothing(self) -> None:
        kv = _kv(3)
        assert _take(kv, 2) == (2, 1)
        assert kv.take(2) is None
        assert (kv.held, kv.refs(2), kv.refs(0)) == (2, 1, 0)

    def test_a_shared_page_goes_back_with_its_last_holder(self) -> None:
        pool = PagePool(3)
        kv = KvPages(pool, "m", 2)
        (page,) = _take(kv, 1)
        kv.share(page)
        assert (kv.refs(page), kv.held) == (2, 1)
        assert not kv.drop(page)
        assert pool._owners[page] == kv.owner
        assert kv.drop(page)
        assert (pool._owners[page], pool.free_pages, kv.held) == (None, 3, 0)

    def test_a_page_down_to_one_holder_may_be_given_up(self) -> None:
        pool = PagePool(3)
        kv = KvPages(pool, "m", 2)
        (page,) = _take(kv, 1)
        kv.share(page), kv.share(page)
        eased = pool.eased
        kv.drop(page)
        assert (kv.refs(page), pool.eased) == (2, eased)
        kv.drop(page)
        assert (kv.refs(page), pool.eased) == (1, eased + 1)

    def test_misuse_is_a_bug(self) -> None:
        kv = _kv()
        with pytest.raises(Bug):
            kv.share(4)
        with pytest.raises(Bug):
            kv.drop(4)
        (page,) = _take(kv, 1)
        kv.drop(page)
        with pytest.raises(Bug):
            kv.drop(page)
        with pytest.raises(Bug):
            kv.share(page)
        with pytest.raises(Bug):
            KvPages(PagePool(1), "m", 0)

    def test_two_models_hold_pages_of_one_pool_apart(self) -> None:
        pool = PagePool(4)
        a, b = KvPages(pool, "a", 2), KvPages(pool, "b", 5)
        (mine,), (theirs,) = _take(a, 1), _take(b, 1)
        with pytest.raises(Bug):
            a.drop(theirs)
        assert pool.held() == {a.owner: 1, b.owner: 1}
        assert a.drop(mine) and b.drop(theirs)

    def test_nothing_is_taken_above_the_ceiling_or_from_another_models_floor(self) -> None:
        pool = PagePool(8)
        a, b = KvPages(pool, "a", 2, 3, 4), KvPages(pool, "b", 2, 2)
        a.keep_floor(), b.keep_floor()
        mine = _take(a, 3)
        assert (a.surplus, a.available, a.above_ceiling(1), a.above_ceiling(3)) == (0, 3, 0, 2)
        assert a.take(2) is None and pool.free_pages == 5
        mine += _take(a, 1)
        assert (a.surplus, b.available) == (1, 4)
        assert _take(b, 4) and b.take(1) is None
        a.drop(mine[0]), a.drop(mine[1])
        assert (b.surplus, b.available) == (2, 1)
        b.drop_floor(), a.drop_floor()
        assert (a.available, b.available) == (2, 2)
        pool.check()

    def test_a_floor_above_its_ceiling_is_a_bug(self) -> None:
        with pytest.raises(Bug):
            KvPages(PagePool(4), "a", 2, 3, 2)


class TestPrefixCache:
    def test_docstring_example(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        assert cache.publish([1, 2, 3, 4], _take(kv, 2)) == [9, 8]
        assert cache.match([1, 2, 3, 4, 5], 4) == Match((9, 8))
        assert cache.match([1, 2, 3, 7], 3) == Match((9,), 8, 1)
        assert (kv.refs(9), kv.refs(8), len(cache)) == (4, 4, 2)

    @pytest.mark.parametrize(
        ("tokens", "limit", "expected"),
        [
            ([1, 2, 3, 4, 5, 6], 6, Match((9, 8, 7))),
            ([1, 2, 3, 4, 5, 6], 5, Match((9, 8), 7, 1)),
            ([1, 2, 3, 4], 3, Match((9,), 8, 1)),
            ([1, 2, 3, 4], 2, Match((9,))),
            ([1, 9, 3, 4], 4, Match((), 9, 1)),
            ([1], 0, Match()),
            ([3, 4, 5, 6], 4, Match()),
            ([2, 1], 2, Match()),
            ([1, 2, 9, 9], 4, Match((9,))),
        ],
    )
    def test_matches(self, tokens: list[int], limit: int, expected: Match) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        cache.publish([1, 2, 3, 4, 5, 6], _take(kv, 3))
        assert cache.match(tokens, limit) == expected

    def test_the_same_page_tokens_after_another_parent_are_another_prefix(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        cache.publish([1, 1, 5, 5], _take(kv, 2))
        cache.publish([2, 2, 5, 5], _take(kv, 2))
        assert cache.match([1, 1, 5, 5], 4).pages == (9, 8)
        assert cache.match([2, 2, 5, 5], 4).pages == (7, 6)

    def test_the_longest_partial_wins(self) -> None:
        kv = _kv(page_tokens=4)
        cache = PrefixCache(kv, b"s")
        for tail in ([1, 2, 9, 9], [1, 2, 3, 9], [1, 9, 9, 9]):
            cache.publish(tail, _take(kv, 1))
        assert cache.match([1, 2, 3, 4], 3) == Match((), 8, 3)

    def test_a_duplicate_is_swapped_for_the_known_page(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        cache.publish([1, 2], _take(kv, 1))
        assert cache.publish([1, 2, 3, 4], _take(kv, 2)) == [9, 7]
        assert (kv.refs(9), kv.refs(8), kv.refs(7)) == (3, 0, 2)

    def test_continuations_tell_when_a_match_could_be_longer(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        cache.publish([1, 2, 3, 4], _take(kv, 2))
        nothing, some = cache.match([9, 9, 9], 3), cache.match([1, 2, 9, 9], 4)
        assert (cache.continuations(nothing), cache.continuations(some)) == (1, 1)
        cache.publish([1, 2, 9, 9], _take(kv, 2))
        assert (cache.continuations(nothing), cache.continuations(some)) == (1, 2)
        cache.publish([9, 9], _take(kv, 1))
        assert (cache.continuations(nothing), cache.continuations(some)) == (2, 2)

    def test_touching_a_match_keeps_it_longest(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        for tokens in ([1, 1], [2, 2]):
            for page in cache.publish(tokens, _take(kv, 1)):
                kv.drop(page)
        match = cache.match([1, 1], 2)
        _drop(kv, match)
        _drop(kv, cache.match([2, 2], 2))
        cache.touch(match)
        cache.evict(1)
        assert _cached(kv, cache, [1, 1]) and not _cached(kv, cache, [2, 2])

    def test_least_recently_used_leaves_go_first(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        for tokens in ([1, 1, 2, 2], [3, 3], [1, 1, 4, 4]):
            for page in cache.publish(tokens, _take(kv, len(tokens) // 2)):
                kv.drop(page)
        _drop(kv, cache.match([3, 3], 2))
        assert (cache.evictable(9), cache.evictable(2)) == (4, 2)
        survivors = []
        while cache.evict(1):
            survivors.append([t for t in ([1, 1, 2, 2], [1, 1, 4, 4], [1, 1], [3, 3]) if _cached(kv, cache, t)])
        assert survivors == [[[1, 1, 4, 4], [1, 1], [3, 3]], [[1, 1], [3, 3]], [[3, 3]], []]
        assert kv.held == 0

    def test_pinned_pages_are_never_evicted(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        for page in cache.publish([1, 1, 2, 2, 3, 3], _take(kv, 3)):
            kv.drop(page)
        held = cache.match([1, 1, 2, 2, 9, 9], 6)
        assert (cache.evictable(9), cache.evict(9), len(cache)) == (1, 1, 2)
        _drop(kv, held)
        assert (cache.evict(9), len(cache), kv.held) == (2, 0, 0)

    def test_what_nobody_used_for_so_many_whole_periods_goes_back(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        for tokens in ([1, 1, 2, 2], [3, 3]):
            for page in cache.publish(tokens, _take(kv, len(tokens) // 2)):
                kv.drop(page)
        assert [cache.age(2), cache.age(2)] == [0, 0]
        _drop(kv, cache.match([1, 1, 9], 2))
        assert (cache.age(2), kv.held) == (2, 1), "the leaf that was not matched, and the other root"
        assert _cached(kv, cache, [1, 1])
        assert [cache.age(2) for _ in range(3)] == [0, 1, 0] and kv.held == 0

    def test_what_a_sequence_holds_does_not_age_nor_do_its_parents(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        pages = cache.publish([1, 1, 2, 2, 3, 3], _take(kv, 3))
        kv.drop(pages[2])
        assert [cache.age(1) for _ in range(9)] == [0, 1, *[0] * 7] and len(cache) == 2
        kv.drop(pages[0]), kv.drop(pages[1])
        # Touched on the eighth at the latest: it counts from its last check in use, a period at most after its end.
        assert sum(cache.age(1) for _ in range(2)) == 2 and kv.held == 0

    def test_a_leaf_in_use_stays_before_its_younger_parent(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        pages = cache.publish([1, 1, 2, 2], _take(kv, 2))
        cache.age(2), cache.age(2)
        _drop(kv, cache.match([1, 1], 2))
        assert cache.age(2) == 0
        for page in pages:
            kv.drop(page)
        assert cache.evict(1) == 1 and _cached(kv, cache, [1, 1])

    def test_clear_forgets_everything_once_no_sequence_is_left(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        pages = cache.publish([1, 2, 3, 4], _take(kv, 2))
        with pytest.raises(Bug):
            cache.clear()
        assert (len(cache), kv.held) == (2, 2)
        for page in pages:
            kv.drop(page)
        cache.clear()
        assert (len(cache), kv.held) == (0, 0)
        assert cache.match([1, 2], 2) == Match()

    def test_publishing_again_adds_only_what_is_new(self) -> None:
        kv = _kv()
        cache = PrefixCache(kv, b"s")
        pages = cache.publish([1, 2], _take(kv, 1))
        for end in (4, 6):
            pages = cache.publish([1, 2, 3, 4, 5, 6][:end], [*pages, *_take(kv, 1)])
            assert cache.publish([1, 2, 3, 4, 5, 6][:end], pages) == pages
        assert pages == [9, 8, 7] and [kv.refs(page) for page in pages] == [2, 2, 2]
        assert cache.match([1, 2, 3, 4, 5, 6], 6).pages == (9, 8, 7)

    def test_publishing_a_page_nobody_holds_is_a_bug(self) -> None:
        with pytest.raises(Bug):
            PrefixCache(_kv(), b"s").publish([1, 2], (3,))

    def test_keys_depend_on_the_secret_and_on_token_boundaries(self) -> None:
        a, b = PrefixCache(_kv(), b"a"), PrefixCache(_kv(), b"b")
        assert a._key(b"", (1, 2)) != b._key(b"", (1, 2))
        assert a._key(b"", (1, 256)) != a._key(b"", (1, 1)) != a._key(b"", (0, 1))
        assert a._key(b"", (70_000,)) != a._key(b"", (70_000 % 65_536,))

    def test_a_collision_of_keys_serves_nothing(self) -> None:
        class Colliding(PrefixCache):
            def _key(self, parent: bytes, tokens: tuple[int, ...]) -> bytes:
                return b"same"

        kv = _kv()
        cache = Colliding(kv, b"s")
        cache.publish([1, 2], _take(kv, 1))
        assert cache.match([3, 4], 2) == Match()
        assert cache.publish([3, 4], _take(kv, 1)) == [8]
        assert cache.match([3, 4], 2) == Match()
        assert (len(cache), kv.refs(8)) == (1, 1)


def _cached(kv: KvPages, cache: PrefixCache, tokens: list[int]) -> bool:
    """Is the whole of `tokens` cached? Looks without touching the order of use."""
    node = cache._root("")
    for start in range(0, len(tokens), kv.page_tokens):
        found = [c for c in node.children.values() if list(c.tokens) == tokens[start : start + kv.page_tokens]]
        if not found:
            return False
        node = found[0]
    return True


@dataclasses.dataclass
class _Entry:
    page: int
    used: int
    period: int = 0


Prefix = tuple[int, ...]


class CacheAgainstDict(RuleBasedStateMachine):
    """The twin: whole token prefixes → (page, when used), with the holders of each page counted apart."""

    T = 3

    def __init__(self) -> None:
        super().__init__()
        self.kv = _kv(24, self.T)
        self.cache = PrefixCache(self.kv, b"s")
        self.known: dict[Prefix, _Entry] = {}
        self.clock = 0
        self.period = 0
        self.holders: list[list[int]] = []

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)

    @rule(tokens=prompts, data=st.data())
    def match(self, tokens: list[int], data: st.DataObject) -> None:
        limit = data.draw(st.integers(0, len(tokens)))
        whole = 0
        while whole + self.T <= limit and tuple(tokens[: whole + self.T]) in self.known:
            whole += self.T
        path = [tuple(tokens[:end]) for end in range(self.T, whole + 1, self.T)]
        shares = {
            prefix: _common(prefix, tokens[:limit]) - whole
            for prefix in self.known
            if len(prefix) == whole + self.T and prefix[:whole] == tuple(tokens[:whole])
        }
        got = self.cache.match(tokens, limit)
        assert got.pages == tuple(self.known[prefix].page for prefix in path)
        assert got.partial_tokens == max(shares.values(), default=0)
        # Several may share as much; any of them will do.
        best = next((prefix for prefix in shares if self.known[prefix].page == got.partial), None)
        assert (best is not None) == (got.partial_tokens > 0)
        assert best is None or shares[best] == got.partial_tokens
        self._touch([*path, best] if best else path)
        self.holders.append([*got.pages, *([got.partial] if got.partial is not None else [])])

    @rule(tokens=prompts, data=st.data())
    def publish(self, tokens: list[int], data: st.DataObject) -> None:
        """As a sequence does: match some, take what is missing, compute, publish; it goes on holding what it got."""
        full = len(tokens) // self.T
        path = [tuple(tokens[: (i + 1) * self.T]) for i in range(full)]
        pages: list[int] = []
        for prefix in path[: data.draw(st.integers(0, full))]:
            if prefix not in self.known:
                break
            pages.append(self.known[prefix].page)
        fresh = self.kv.take(full - len(pages))
        if fresh is None:
            return
        for page in pages:
            self.kv.share(page)
        pages += fresh
        expected = [
            self.known.setdefault(prefix, _Entry(page, 0)).page for prefix, page in zip(path, pages, strict=True)
        ]
        assert self.cache.publish(tokens, pages) == expected
        self._touch(path)
        self.holders.append(expected)

    def _touch(self, path: list[Prefix]) -> None:
        for prefix in reversed(path):
            self.clock += 1
            self.known[prefix].used = self.clock
            self.known[prefix].period = self.period

    @rule(periods=st.integers(1, 3))
    def age(self, periods: int) -> None:
        """What is old goes unless it is held; what is held and old counts as used now, leaves before parents."""
        self.period += 1
        pinned = {page for pages in self.holders for page in pages}
        old = [p for p, e in self.known.items() if e.period < self.period - periods]
        gone = [p for p in old if self.known[p].page not in pinned]
        held = self.kv.held
        assert self.cache.age(periods) == len(gone) == held - self.kv.held
        for prefix in gone:
            del self.known[prefix]
        for prefix in sorted((p for p in old if p in self.known), key=lambda p: self.known[p].used):
            if self.known[prefix].period < self.period - periods:
                self._touch([prefix[:end] for end in range(self.T, len(prefix) + 1, self.T)])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        for page in self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))):
            self.kv.drop(page)

    @rule(n=st.integers(0, 6))
    def evict(self, n: int) -> None:
        pinned = {page for pages in self.holders for page in pages}
        free = sorted((p for p, e in self.known.items() if e.page not in pinned), key=lambda p: self.known[p].used)
        assert self.cache.evictable(n) == min(n, len(free))
        assert self.cache.evict(n) == min(n, len(free))
        for prefix in free[:n]:
            del self.known[prefix]
            longer = [other for other in self.known if other[: len(prefix)] == prefix]
            assert not longer, "a parent went before its child"

    @precondition(lambda self: not self.holders)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.known.clear()

    @invariant()
    def references_add_up(self) -> None:
        refs = Counter(page for pages in self.holders for page in pages)
        refs.update(entry.page for entry in self.known.values())
        assert dict(self.kv._refs) == dict(refs)
        assert len(self.cache) == len(self.known)
        order = {node.key: i for i, node in enumerate(self.cache._nodes.values())}
        for node in self.cache._nodes.values():
            assert node.parent is not None
            assert node.parent.parent is None or order[node.parent.key] > order[node.key], "a parent would go first"


def _common(a: Prefix, b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


CacheAgainstDict.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCacheAgainstDict = CacheAgainstDict.TestCase
