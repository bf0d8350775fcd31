"""Prefix keys: what they tell and what not, what a node tells of its caches, and what the leader makes of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.cluster import prefixes
from janus_server.cluster.prefixes import BLOCK_TOKENS, MOST_BLOCKS, MOST_KEYS, Keys, Prefixes, Trail
from janus_server.kv.blocks import KvPages
from janus_server.kv.pages import PagePool
from janus_server.kv.prefix import PrefixCache
from janus_server.sched.prefixes import MOST_BELIEVED, Cached, Holders, PrefixKey, work_left_s
from janus_server.types import Pooling, Request


def _request(prompt: tuple[int, ...], model: str = "m", tenant: str = "", **more: object) -> Request:
    return Request(id="r", model=model, prompt=prompt, max_tokens=1, tenant=tenant, **more)  # type: ignore[arg-type]


def _keys(secret: bytes = b"s" * 32) -> Keys:
    return Keys(lambda: secret)


def _numbers(seed: int, n: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(50_000) for _ in range(n))


def test_keys_stand_for_blocks_and_all_before_them() -> None:
    prompt = _numbers(0, 300)
    keys = _keys().of(_request(prompt))
    assert [one.tokens for one in keys] == [64, 128, 192, 256]
    other = list(prompt)
    other[130] += 1
    changed = _keys().of(_request(tuple(other)))
    assert [one == same for one, same in zip(keys, changed, strict=True)] == [True, True, False, False]
    assert _keys().of(_request(prompt[:256])) == keys[:3], "the last token is always computed: nothing of it is wanted"
    assert _keys().of(_request(prompt[:64])) == ()


def test_nobody_else_has_the_keys_of_a_tenant_of_a_model_or_of_a_cluster() -> None:
    prompt = _numbers(1, 200)
    sets = [
        {one.key for one in keys.of(_request(prompt, model, tenant))}
        for keys in (_keys(), _keys(b"t" * 32))
        for model, tenant in (("m", ""), ("m", "a"), ("ma", ""), ("n", "a"), ("", "ma"))
    ]
    assert all(len(one) == 3 for one in sets)
    assert len(set().union(*sets)) == 3 * len(sets)


def test_long_prompts_have_no_more_keys_than_others_and_what_reads_all_rows_has_none() -> None:
    keys = _keys().of(_request(_numbers(2, MOST_BLOCKS * BLOCK_TOKENS + 5000)))
    assert len(keys) <= MOST_KEYS and keys[-1].tokens == MOST_BLOCKS * BLOCK_TOKENS
    assert _keys().of(_request(_numbers(2, 500), prompt_logprobs=1)) == ()
    assert _keys().of(_request(_numbers(2, 500), pooling=Pooling.MEAN)) == ()


@given(st.integers(1, 200), st.integers(0, 700), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_pages_of_every_size_lead_to_the_same_keys(page_tokens: int, n: int, seed: int) -> None:
    prompt = _numbers(seed, n + 1)
    node = Prefixes(lambda: b"s" * 32)
    trail = node.trail("m")
    mark, whole = trail.root(""), n // page_tokens * page_tokens
    for start in range(0, whole, page_tokens):
        mark = trail.added(mark, prompt[start : start + page_tokens])
    told = node.news("n0")
    assert told is not None
    wanted = [one.key for one in _keys().of(_request(prompt)) if one.tokens <= whole]
    assert list(told.came) == wanted


class _Node:
    """A node with one model's cache, and what its leader believes."""

    def __init__(self, page_tokens: int) -> None:
        self.pool = PagePool(400)
        self.kv = KvPages(self.pool, "m", page_tokens)
        self.node = Prefixes(lambda: b"s" * 32)
        self.renew()
        self.leader = Holders()
        self.paths: dict[tuple[int, ...], None] = {}

    def renew(self) -> None:
        """The model was torn down: nobody says what went."""
        self.trail: Trail = self.node.trail("m")
        self.cache = PrefixCache(self.kv, b"p" * 32, self.trail)

    def publish(self, tokens: tuple[int, ...], tenant: str) -> None:
        size = self.kv.page_tokens
        n = len(tokens) // size
        pages = self.kv.take(n)
        if pages is None:
            self.cache.evict(n)
            pages = self.kv.take(n)
        if pages is not None:
            for page in self.cache.publish(tokens[: n * size], pages, tenant):
                self.kv.drop(page)

    def held(self) -> set[int]:
        """By walking the tree: the keys of all whole blocks that its pages hold."""
        found: set[int] = set()
        keys = _keys()
        for tenant, root in self.cache._roots.items():
            stack = [(root, ())]
            while stack:
                node, tokens = stack.pop()
                found.update(one.key for one in keys.of(_request((*tokens, 0), tenant=tenant)))
                stack += [(child, (*tokens, *child.tokens)) for child in node.ordered]
        return found

    def tell(self, lose: bool = False) -> None:
        for _ in range(60):
            told = self.node.news("n0")
            if told is None:
                return
            if not lose:
                self.leader.hear(told)
        raise AssertionError("it never ends")

    def believed(self) -> frozenset[int]:
        return self.leader.memory().get("n0", frozenset())


_STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "publish", "publish", "evict", "withdraw", "clear", "tear", "tell", "lose"]),
              st.integers(0, 5), st.integers(1, 260), st.sampled_from(["", "t"])),
    max_size=25,
)  # fmt: skip


@given(st.sampled_from([1, 7, 16, 64, 100]), st.integers(1, 6), _STEPS)
@settings(max_examples=120, deadline=None)
def test_the_leader_believes_what_the_caches_hold(
    page_tokens: int, most_told: int, steps: list[tuple[str, int, int, str]]
) -> None:
    """Whatever came and went, in however many reports; after one was lost it may be wrong until it is told afresh."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "MOST_TOLD", most_told)
        world, lost = _Node(page_tokens), False
        for verb, seed, n, tenant in steps:
            match verb:
                case "publish":
                    world.publish(_numbers(seed % 3, n) + _numbers(seed, 130), tenant)
                case "evict":
                    world.cache.evict(n % 20)
                case "withdraw":
                    world.cache.withdraw([node.page for node in list(world.cache._nodes.values())[:1]])
                case "clear":
                    world.cache.clear()
                case "tear":
                    world.pool.reclaim(world.kv.owner)
                    world.kv = KvPages(world.pool, "m", page_tokens)
                    world.renew()
                case "tell":
                    world.tell()
                    assert lost or world.believed() == world.held()
                case "lose":
                    world.tell(lose=True)
                    lost = True
        world.node.restart()
        world.tell()
        assert world.believed() == world.held()


def test_a_block_is_held_as_long_as_one_page_begins_with_it() -> None:
    """A page of 100 tokens holds one whole block; two pages that part after that hold the same one."""
    world = _Node(100)
    for tail in (1, 2):
        world.publish(_numbers(0, 70) + _numbers(tail, 30), "")
    world.tell()
    assert len(world.believed()) == 1
    for left in (1, 0):
        assert world.cache.evict(1) == 1
        world.tell()
        assert len(world.believed()) == left


def test_a_node_tells_no_more_than_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_HELD", 10)
    world = _Node(16)
    for seed in range(4):
        world.publish(_numbers(seed, 256), "")
    world.tell()
    assert len(world.believed()) == 10 and world.believed() < world.held()
    world.cache.clear()
    world.tell()
    assert world.believed() == frozenset()
    world.publish(_numbers(7, 256), "")
    world.tell()
    assert world.believed() == world.held() and len(world.held()) == 4


def test_nothing_piles_up_while_nobody_leads() -> None:
    world = _Node(64)
    for seed in range(50):
        world.publish(_numbers(seed, 640), "")
        world.cache.clear()
        world.node.look()
    assert not world.node._news and not world.node._changes


def test_a_node_that_tells_more_than_it_could_hold_is_believed_so_much() -> None:
    leader = Holders()
    for start in range(0, 4 * MOST_BELIEVED, MOST_BELIEVED // 2):
        leader.hear(Cached("n1", tuple(range(start, start + MOST_BELIEVED // 2))))
    assert len(leader.memory()["n1"]) == MOST_BELIEVED


@given(st.integers(0, 40), st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 45)))
def test_the_longest_prefix_is_found(n: int, depths: dict[str, int]) -> None:
    prefix = tuple(PrefixKey(64 * (at + 1), 1000 + at) for at in range(n))
    leader = Holders({node: range(1000, 1000 + depth) for node, depth in depths.items()})
    expected = {node: 64 * min(depth, n) for node, depth in depths.items() if min(depth, n)}
    assert leader.cached(prefix, ["a", "b", "c"]) == expected
    leader.gone("a")
    assert "a" not in leader.cached(prefix, ["a", "b", "c"])


def test_what_is_left_of_a_prompt() -> None:
    assert work_left_s(1.0, 0.1, 101, 0) == 1.0
    assert work_left_s(1.0, 0.1, 101, 50) == pytest.approx(0.55)
    assert work_left_s(1.0, 0.1, 101, 100) == work_left_s(1.0, 0.1, 101, 5000) == pytest.approx(0.1)
    assert work_left_s(1.0, float("nan"), 101, 50) == pytest.approx(0.5)
    assert work_left_s(1.0, 5.0, 101, 100) == pytest.approx(0.0)
    assert work_left_s(1.0, 0.0, 1, 64) == 1.0
