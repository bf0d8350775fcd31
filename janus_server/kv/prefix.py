"""Prefix cache of one model: full KV pages in a tree keyed by the tokens that produced them. Pure.

A key is a keyed BLAKE2b hash over the parent's key and the page's tokens, and the tree of each tenant begins with a
key of its own, so that nobody learns from a fast first token what others asked. Without the process's secret nobody
can construct a collision (predictable hashes have let one client read another's cache), and the tokens themselves are
compared on every hit, so even a collision cannot serve wrong bytes. The cache holds one reference per page; pages
nobody else holds are evicted least recently used first, leaves before parents, before any sequence is preempted. What
nobody used for long goes back by `age`, a whole page each: no prefix pins memory for ever.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from typing import Any, Protocol

import msgspec

from janus_server.errors import require
from janus_server.kv.blocks import KvPages


class Match(msgspec.Struct, frozen=True):
    """Cached pages for the start of a prompt, already shared with the caller.

    pages hold the first len(pages)·page_tokens positions. partial, when set, is a page whose first `partial_tokens`
    positions continue the prompt; the caller copies those and drops its reference to the page after the copy has run.
    """

    pages: tuple[int, ...] = ()
    partial: int | None = None
    partial_tokens: int = 0

    @property
    def held(self) -> tuple[int, ...]:
        """Every page that the caller holds for it."""
        return self.pages if self.partial is None else (*self.pages, self.partial)


class Follower(Protocol):
    """Is told which pages are cached, and keeps something of its own with each."""

    def root(self, tenant: str) -> Any: ...

    def added(self, parent: Any, tokens: Tokens[int]) -> Any:
        """A page of these tokens continues the one for which it gave `parent`."""

    def removed(self, given: Any) -> None: ...


class _Node:
    """One cached page. `key` is its identity; children are nodes whose tokens continue this page; `used` is the period
    of its last use, `given` what the follower keeps with it.

    ordered are the children sorted by their tokens: the one that shares the longest start with a prompt stands next to
    where the prompt itself would, so a partial match looks at two of the thousands that can start at the root.
    """

    __slots__ = ("children", "given", "key", "ordered", "page", "parent", "tokens", "used")

    def __init__(self, key: bytes, page: int, tokens: tuple[int, ...], parent: _Node | None, used: int = 0) -> None:
        self.key = key
        self.page = page
        self.tokens = tokens
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.ordered: list[_Node] = []
        self.used = used
        self.given: Any = None


class PrefixCache:
    """Which full pages of which token prefixes are still in memory.

    Example with page_tokens 2: after publish([1, 2, 3, 4], (9, 8)), match([1, 2, 3, 4, 5], 4) gives pages (9, 8);
    match([1, 2, 3, 7], 3) gives pages (9,) and partial page 8 with 1 token.
    """

    def __init__(self, kv: KvPages, secret: bytes, follower: Follower | None = None) -> None:
        self._follower = follower
        self._kv = kv
        self._secret = secret
        self._roots: dict[str, _Node] = {}
        # Least recently used first. Touching walks from the leaf up, which keeps parents younger than their children:
        # one pass of evict then meets every leaf before its parent.
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._by_page: dict[int, _Node] = {}
        self._period = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Tokens[int], limit: int, tenant: str = "") -> Match:
        """The longest prefix of `tokens` cached for that tenant, at most `limit` positions; shared with the caller."""
        size = self._kv.page_tokens
        node = self._root(tenant)
        path: list[_Node] = []
        while (len(path) + 1) * size <= limit:
            start = len(path) * size
            page_tokens = tuple(tokens[start : start + size])
            child = node.children.get(self._key(node.key, page_tokens))
            if child is None or child.tokens != page_tokens:
                break
            node = child
            path.append(node)
        partial, partial_tokens = self._best_partial(node, tokens[len(path) * size : limit])
        match = Match(tuple(found.page for found in path), None if partial is None else partial.page, partial_tokens)
        self.touch(match)
        for page in match.held:
            self._kv.share(page)
        return match

    def touch(self, match: Match) -> None:
        """Count the pages of a match as used just now; all of them are cached still."""
        for page in reversed(match.held):
            self._touch(self._by_page[page])

    def continuations(self, match: Match, tenant: str = "") -> int:
        """Cached pages that come right after the whole pages of `match`, which are cached still.

        While that number stands and no page was given up, `match` would find the same again.
        """
        end = self._by_page[match.pages[-1]] if match.pages else self._root(tenant)
        return len(end.children)

    def publish(self, tokens: Tokens[int], pages: Tokens[int], tenant: str = "") -> list[int]:
        """Remember for a tenant that pages[i] holds tokens[i·page_tokens : (i+1)·page_tokens]; every page must be full.

        Returns the pages that the caller holds from now on: a prefix already known keeps its first page, which the
        caller gets for its duplicate. So whoever holds a cached page holds the pages of all its parents, and no page is
        stuck above a child in use.
        """
        size = self._kv.page_tokens
        held = list(pages)
        known, node = self._deepest(pages, tenant)
        for i in range(known, len(pages)):
            page_tokens = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(self._key(node.key, page_tokens))
            if child is None:
                child = self._add(node, pages[i], page_tokens)
            elif child.tokens != page_tokens:
                break
            else:
                self._kv.share(child.page)
                self._kv.drop(pages[i])
                held[i] = child.page
            node = child
        self._touch_path(node)
        return held

    def evict(self, n: int) -> int:
        """Give up to n pages that only the cache holds back to the pool, least recently used leaves first; how many."""
        victims = list(itertools.islice(self._unpinned(), n))
        for node in victims:
            self._remove(node)
        return len(victims)

    def age(self, periods: int) -> int:
        """A period passed: give back every page that nobody used for `periods` whole ones; how many those were.

        What a sequence holds counts as used now. Nodes are in the order of their use, so that only old ones are looked
        at. Example: a page last used in some period goes at the end of the third one after it with periods 3.
        """
        self._period += 1
        given = 0
        while self._nodes:
            node = next(iter(self._nodes.values()))
            if node.used >= self._period - periods:
                break
            if self._kv.refs(node.page) > 1:
                self._touch_path(node)
            else:
                self._remove(node)
                given += 1
        return given

    def evictable(self, limit: int) -> int:
        """Pages that `evict` could free; counting stops at `limit`, which is soon where old prefixes lie unused."""
        return sum(1 for _ in itertools.islice(self._unpinned(), limit))

    def marks(self, pages: Tokens[int]) -> tuple[object, ...]:
        """A mark for each of these cached pages, which it loses when it is given up."""
        return tuple(self._by_page[page] for page in pages)

    def still(self, pages: Tokens[int], marks: Tokens[object]) -> bool:
        """True while every page has stayed cached since it was marked. Any thread: a page loses its mark before it goes
        back to the pool, so whatever was read of it until now was what it held then."""
        return all(self._by_page.get(page) is mark for page, mark in zip(pages, marks, strict=True))

    def withdraw(self, pages: Tokens[int]) -> None:
        """Forget those of `pages` that are cached, and all that continues them: what they hold is not to be trusted.

        Sequences that hold some of them keep them.
        """
        for page in pages:
            top = self._by_page.get(page)
            below = [] if top is None else [top]
            for node in below:
                below.extend(node.ordered)
            for node in reversed(below):
                self._remove(node)

    def clear(self) -> None:
        """Forget everything: the memory is about to go away, and no sequence holds any of it by now."""
        require(self.evictable(len(self)) == len(self), "cached pages are still in use")
        self.evict(len(self))

    def _unpinned(self) -> Iterator[_Node]:
        """Nodes that only the cache holds, least recently used first; every child comes before its parent.

        A pinned child has pinned parents (see `publish`), so all of them can go in this order.
        """
        return (node for node in self._nodes.values() if self._kv.refs(node.page) == 1)

    def _deepest(self, pages: Tokens[int], tenant: str) -> tuple[int, _Node]:
        """The last of `pages` that is cached and how many pages lead to it: what is known need not be hashed again."""
        for i in range(len(pages) - 1, -1, -1):
            node = self._by_page.get(pages[i])
            if node is not None:
                return i + 1, node
        return 0, self._root(tenant)

    def _root(self, tenant: str) -> _Node:
        """Where the prefixes of a tenant begin. Tenants are few: each is a key of the configuration."""
        root = self._roots.get(tenant)
        if root is None:
            word = hashlib.blake2b(tenant.encode(), key=self._secret, digest_size=16).digest()
            root = self._roots[tenant] = _Node(word, -1, (), None)
            if self._follower is not None:
                root.given = self._follower.root(tenant)
        return root

    def _add(self, parent: _Node, page: int, tokens: tuple[int, ...]) -> _Node:
        node = _Node(self._key(parent.key, tokens), page, tokens, parent, self._period)
        parent.children[node.key] = node
        bisect.insort(parent.ordered, node, key=_tokens)
        self._nodes[node.key] = node
        self._by_page[page] = node
        if self._follower is not None:
            node.given = self._follower.added(parent.given, tokens)
        self._kv.share(page)
        return node

    def _touch(self, node: _Node) -> None:
        self._nodes.move_to_end(node.key)
        node.used = self._period

    def _touch_path(self, node: _Node) -> None:
        """Count a page and all its parents as used now, the leaf first."""
        while node.parent is not None:
            self._touch(node)
            node = node.parent

    def _remove(self, node: _Node) -> None:
        require(not node.children, "a cached page went before its children")
        parent = node.parent
        if parent is not None:
            del parent.children[node.key]
            del parent.ordered[bisect.bisect_left(parent.ordered, node.tokens, key=_tokens)]
        del self._nodes[node.key]
        del self._by_page[node.page]
        if self._follower is not None:
            self._follower.removed(node.given)
        self._kv.drop(node.page)

    def _best_partial(self, node: _Node, rest: Tokens[int]) -> tuple[_Node | None, int]:
        """The child of `node` that shares the longest non-empty start with `rest`."""
        wanted = tuple(rest[: self._kv.page_tokens])
        at = bisect.bisect_left(node.ordered, wanted, key=_tokens)
        best, best_tokens = None, 0
        for child in node.ordered[max(0, at - 1) : at + 1]:
            shared = _shared_start(child.tokens, wanted)
            if shared > best_tokens:
                best, best_tokens = child, shared
        return best, best_tokens

    def _key(self, parent: bytes, tokens: tuple[int, ...]) -> bytes:
        return hashlib.blake2b(parent + array("I", tokens).tobytes(), key=self._secret, digest_size=16).digest()


def _tokens(node: _Node) -> tuple[int, ...]:
    return node.tokens


def _shared_start(a: Tokens[int], b: Tokens[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
