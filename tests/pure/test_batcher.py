"""The batcher: worked examples, misuse, cancellation, sharing of a step, of pages and of prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twin_batcher import Node, generate, request_of
from twin_sample import same_history

from janus_server.errors import Bug
from janus_server.kv.prefix import Match
from janus_server.sched.share import share
from janus_server.types import Batch, BatcherStats, FinishReason, PageCopy, Sampled, Sampling


def _shape(batch: Batch | None) -> list[tuple[int, int]]:
    """(first position, tokens) of each chunk."""
    assert batch is not None
    return [(c.start, len(c.tokens)) for c in batch.chunks]


class Unread(list[Any]):
    """A list that may be searched by halves, never from end to end."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the whole list was gone through")

    def remove(self, value: object) -> None:
        raise AssertionError("the whole list was searched")


class TestShare:
    def test_docstring_example(self) -> None:
        assert share([100, 1000, 1000], 513) == [100, 207, 206]
        assert share([5, 10, 10], 2) == [1, 1, 0]
        assert share([], 9) == []
        assert share([3, 4], 0) == [0, 0]

    @given(st.lists(st.integers(1, 60), max_size=8), st.integers(0, 200))
    def test_uses_the_budget_and_is_fair(self, gaps: list[int], budget: int) -> None:
        shares = share(gaps, budget)
        assert sum(shares) == min(budget, sum(gaps))
        hungry = [share for share, gap in zip(shares, gaps, strict=True) if share < gap]
        assert all(0 <= share <= gap for share, gap in zip(shares, gaps, strict=True))
        if hungry:
            assert max(shares) - min(hungry) <= 1
        unequal = [share for share, gap in zip(shares, gaps, strict=True) if gap > min(hungry, default=0)]
        assert unequal == sorted(unequal, reverse=True) or not hungry


class TestOneSequence:
    def test_prompt_in_chunks_then_a_token_a_step(self) -> None:
        node = Node(10, step_tokens=6)
        request = request_of("a", 10, max_tokens=3)
        node.batcher.add(request, 0.0)
        shapes = []
        while not node.batcher.idle:
            shapes.append(_shape(node.step()))
        assert shapes == [[(0, 6)], [(6, 4)], [(10, 1)], [(11, 1)]]
        assert node.right(request)
        assert [e.cached_tokens for e in node.emits] == [0, 0, 0]

    def test_chunks_carry_the_pages_up_to_their_end(self) -> None:
        node = Node(10, step_tokens=6)
        node.batcher.add(request_of("a", 10), 0.0)
        first, second = node.step(), node.step()
        assert first is not None and second is not None
        assert (first.step, first.chunks[0].pages, first.chunks[0].sample) == (1, (9, 8), None)
        assert (second.step, second.chunks[0].pages) == (2, (9, 8, 7))
        assert second.chunks[0].sample is not None and second.chunks[0].sample.position == 0

    def test_a_one_token_prompt_and_a_one_token_answer(self) -> None:
        node = Node(1, page_tokens=2)
        request = request_of("a", 1, max_tokens=1)
        node.batcher.add(request, 0.0)
        assert len(node.run()) == 1 and node.right(request)

    def test_the_context_ends_it(self) -> None:
        node = Node(10, context_tokens=8)
        node.batcher.add(request_of("a", 5, max_tokens=30), 0.0)
        assert [e.finish for e in node.run()] == [None, None, FinishReason.LENGTH]

    def test_stop_ids_end_it_but_not_before_min_tokens(self) -> None:
        node = Node(10)
        everything = tuple(range(1, 6))
        node.batcher.add(request_of("a", 5, max_tokens=9, min_tokens=3, stop_ids=everything), 0.0)
        banned = []
        while not node.batcher.idle:
            batch = node.step()
            assert batch is not None and batch.chunks[0].sample is not None
            banned.append(batch.chunks[0].sample.banned)
        assert node.tokens("a")[:3] == [0, 0, 0] and set(banned[:3]) == {everything} and set(banned[3:]) <= {()}

    def test_history_travels_only_where_the_sampling_needs_it(self) -> None:
        node = Node(10)
        node.batcher.add(request_of("a", (5, 5), sampling=Sampling(repetition_penalty=1.2)), 0.0)
        node.batcher.add(request_of("b", (4, 4)), 0.0)
        node.step()
        batch = node.step()
        assert batch is not None
        a, b = (c.sample for c in batch.chunks)
        assert a is not None and a.history is not None and same_history(a.history, (5, 5), node.tokens("a")[:1])
        assert b is not None and b.history is None
        assert [s.seen is None for s in node.batcher.running] == [False, True]

    def test_a_prompt_is_looked_through_once_for_all_choices_and_a_preemption(self) -> None:
        node = Node(40)
        node.batcher.add(request_of("a", 9, max_tokens=8, n=3, sampling=Sampling(presence_penalty=0.5)), 0.0)
        prompts = set()
        for step in range(12):
            batch = node.batcher.plan(0.0)
            assert batch is not None
            for chunk in batch.chunks:
                (seq,) = [s for s in node.batcher.running if s.number == chunk.sequence]
                if chunk.sample is not None:
                    assert chunk.sample.history is not None
                    said = node.tokens("a", seq.index)
                    assert same_history(chunk.sample.history, seq.request.prompt, said)
                    prompts.add(id(chunk.sample.history.prompt))
            node.emits += node.batcher.commit(batch, *node.memory.run(batch))
            if step == 3:
                node.batcher.preempt(node.batcher.running[1])
            if node.batcher.idle:
                break
        assert node.batcher.idle and len(prompts) == 1


class TestSharingAStep:
    def test_decodes_first_then_prompts_share_the_rest(self) -> None:
        node = Node(100, step_tokens=21)
        node.batcher.add(request_of("a", 3, max_tokens=50), 0.0)
        node.step()
        for name in ("b", "c"):
            node.batcher.add(request_of(name, 40), 1.0)
        assert _shape(node.step()) == [(3, 1), (0, 10), (0, 10)]

    def test_short_prompts_do_not_wait_for_long_ones(self) -> None:
        node = Node(100, step_tokens=20)
        node.batcher.add(request_of("long", 100), 0.0)
        node.batcher.add(request_of("short", 5), 0.0)
        assert _shape(node.step()) == [(0, 15), (0, 5)]
        assert node.tokens("short") and not node.tokens("long")

    def test_at_most_shared_prompts_share_a_full_step(self) -> None:
        node = Node(100, step_tokens=20, shared_prompts=2)
        for name in ("a", "b", "c"):
            node.batcher.add(request_of(name, 50), 0.0)
        assert _shape(node.step()) == [(0, 10), (0, 10)]
        assert (node.batcher.stats().running, node.batcher.stats().waiting) == (2, 1)

    def test_one_prompt_at_a_time(self) -> None:
        node = Node(100, step_tokens=20, one_prompt_at_a_time=True)
        for name in ("a", "b"):
            node.batcher.add(request_of(name, 30, max_tokens=9), 0.0)
        assert [_shape(node.step()) for _ in range(4)] == [
            [(0, 20)], [(20, 10)], [(30, 1), (0, 19)], [(31, 1), (19, 11)],
        ]  # fmt: skip

    def test_a_step_never_exceeds_its_tokens_however_many_run(self) -> None:
        node = Node(100, step_tokens=3, sequences=50)
        requests = [request_of(f"r{i}", 2, max_tokens=6, n=3) for i in range(5)]
        for request in requests:
            node.batcher.add(request, 0.0)
        while not node.batcher.idle:
            batch = node.step()
            assert batch is not None and batch.tokens <= 3
        assert node.right(*requests)

    def test_the_sequence_limit(self) -> None:
        node = Node(100, sequences=2)
        for i in range(5):
            node.batcher.add(request_of(f"r{i}", 2), 0.0)
        node.step()
        assert node.batcher.stats().running == 2


class TestChoices:
    def test_choices_start_from_the_computed_prompt(self) -> None:
        node = Node(20)
        request = request_of("a", 10, n=3)
        node.batcher.add(request, 0.0)
        assert _shape(node.step()) == [(0, 10)]
        assert node.batcher.stats().running == 3
        batch = node.batcher.plan(0.0)
        assert _shape(batch) == [(10, 1), (9, 1), (9, 1)]
        assert batch is not None
        first, second, third = (c.pages for c in batch.chunks)
        assert first[:2] == second[:2] == third[:2] and len({first[2], second[2], third[2]}) == 3
        assert batch.copies == (PageCopy(first[2], second[2]), PageCopy(first[2], third[2]))
        node.emits += node.batcher.commit(batch, *node.memory.run(batch))
        node.run()
        assert node.right(request)

    def test_no_copy_where_the_prompt_ends_with_a_pages_first_token(self) -> None:
        node = Node(20)
        request = request_of("a", 9, n=2)
        node.batcher.add(request, 0.0)
        node.step()
        batch = node.step()
        assert batch is not None and not batch.copies and _shape(batch) == [(9, 1), (8, 1)]
        node.run()
        assert node.right(request)

    def test_choices_draw_from_streams_of_their_own(self) -> None:
        node = Node(20)
        node.batcher.add(request_of("a", 3, n=3, sampling=Sampling(seed=40)), 0.0)
        node.step()
        batch = node.step()
        assert batch is not None
        specs = [c.sample for c in batch.chunks if c.sample]
        assert [(spec.sampling.seed, spec.choice) for spec in specs] == [(40, 0), (40, 1), (40, 2)]

    @pytest.mark.parametrize("sequences", [1, 2, 8])
    def test_choices_that_find_no_place_wait_their_turn(self, sequences: int) -> None:
        node = Node(6, sequences=sequences)
        request = request_of("a", 10, max_tokens=8, n=5)
        node.batcher.add(request, 0.0)
        assert node.batcher.stats().waiting == 5
        node.run()
        assert node.right(request)


class TestPrefix:
    def test_a_second_prompt_reuses_pages_and_part_of_one(self) -> None:
        node = Node(20)
        first = request_of("a", (1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=1)
        second = request_of("b", (1, 2, 3, 4, 5, 6, 9, 9, 9), max_tokens=1)
        node.batcher.add(first, 0.0)
        node.step()
        node.batcher.add(second, 1.0)
        batch = node.step()
        assert _shape(batch) == [(6, 3)] and batch is not None and len(batch.copies) == 1
        assert node.emits[-1].cached_tokens == 6
        assert node.right(first, second)
        stats = node.batcher.stats()
        assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.computed_tokens) == (18, 6, 12)

    def test_the_whole_prompt_is_never_taken_from_the_cache(self) -> None:
        node = Node(20)
        for when, name in enumerate(("a", "b")):
            node.batcher.add(request_of(name, (1, 2, 3, 4, 5, 6, 7, 8), max_tokens=1), float(when))
            node.step()
        assert [e.cached_tokens for e in node.emits] == [0, 7]

    def test_what_a_preempted_request_finds_again_is_its_own(self) -> None:
        """Preempted in the middle of its prompt, it meets its own pages in the cache: they are no gain."""
        node = Node(20, step_tokens=4)
        node.batcher.add(request_of("old", (1, 2, 3, 4, 5), max_tokens=1), 0.0)
        node.run()
        request = request_of("a", (1, 2, 3, 4, *range(10, 22)), max_tokens=2)
        node.batcher.add(request, 1.0)
        node.step(), node.step()
        (seq,) = node.batcher.running
        assert seq.computed == 12
        node.batcher.preempt(seq)
        node.run()
        assert node.right(request) and node.batcher.stats().prefix_hit_tokens == 4 + 12
        assert [e.cached_tokens for e in node.emits if e.request_id == "a"] == [4, 0]

    @pytest.mark.parametrize("sequences", [1, 2, 8])
    def test_only_the_first_choice_tells_what_the_cache_gave(self, sequences: int) -> None:
        """Choices that waited for a place find the first one's pages in the cache; the prompt was still computed."""
        node = Node(20, sequences=sequences)
        for when, (name, expected) in enumerate((("a", 0), ("b", 8))):
            node.batcher.add(request_of(name, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), max_tokens=2, n=3), float(when))
            node.run()
            told = {e.index: e.cached_tokens for e in reversed(node.emits) if e.request_id == name}
            assert told == {0: expected, 1: 0, 2: 0}

    def test_an_heir_tells_what_the_cache_gave_the_first_choice(self) -> None:
        node = Node(20, step_tokens=4)
        node.batcher.add(request_of("old", (1, 2, 3, 4, 5), max_tokens=1), 0.0)
        node.run()
        node.batcher.add(request_of("a", (1, 2, 3, 4, *range(10, 22)), max_tokens=1, n=2), 1.0)
        node.batcher.cancel("a", 0)
        node.run()
        assert [(e.index, e.cached_tokens) for e in node.emits if e.request_id == "a"] == [(1, 4)]

    def test_caching_can_be_off(self) -> None:
        node = Node(20, prefix_caching=False)
        for when, name in enumerate(("a", "b")):
            node.batcher.add(request_of(name, (1, 2, 3, 4, 5, 6, 7, 8), max_tokens=1), float(when))
            node.step()
        assert [e.cached_tokens for e in node.emits] == [0, 0]
        assert node.pool.free_pages == 20

    def test_cached_pages_survive_an_admission_that_does_not_fit(self) -> None:
        """Giving up the cache helps nobody when even all of it is too little."""
        node = Node(8)
        node.batcher.add(request_of("cached", 8, max_tokens=1), 0.0)
        node.run()
        node.batcher.add(request_of("long", 12, max_tokens=12), 1.0)
        node.step()
        node.batcher.add(request_of("big", 24, max_tokens=4), 2.0)
        node.step()
        assert node.batcher.starved is not None and len(node.batcher.prefix) == 2 + 3
        node.run()

    def test_a_partial_hit_on_page_zero_that_stands_in_the_way_is_let_go(self) -> None:
        """Pool of two: page 0 is cached and matches in part, and the prompt needs both pages."""
        node = Node(2)
        first, second = request_of("a", (1, 2, 3, 4, 5), 2), request_of("b", (1, 2, 9, 9, 9), 2)
        keep = node.batcher.kv.take(1)
        node.batcher.add(request_of("z", (1, 2, 3, 4), 1), 0.0)
        node.run()
        for page in keep or ():
            node.batcher.kv.drop(page)
        assert [n.page for n in node.batcher.prefix._nodes.values()] == [0]
        node.batcher.add(second, 1.0)
        node.run()
        node.batcher.add(first, 2.0)
        node.run()
        assert node.right(first, second)

    def test_a_duplicate_page_does_not_block_the_oldest(self) -> None:
        """Two prompts with one start are computed side by side: of their equal first pages only one may stay."""
        node = Node(6, page_tokens=2)
        a, b = request_of("a", (1, 2, 3), 1), request_of("b", (1, 2, 4), 9)
        node.batcher.add(a, 0.0)
        node.batcher.add(b, 0.0)
        assert _shape(node.step()) == [(0, 3), (0, 3)]
        node.run()
        assert node.right(a, b)


class TestStarved:
    @staticmethod
    def _count_tries(node: Node) -> list[int]:
        """Grows by one each time a prompt is looked up in the cache."""
        tries: list[int] = []
        match = node.batcher.prefix.match

        def counted(tokens: Sequence[int], limit: int, tenant: str) -> Match:
            tries.append(len(tokens))
            return match(tokens, limit, tenant)

        node.batcher.prefix.match = counted  # type: ignore[method-assign]
        return tries

    def test_the_head_of_the_queue_is_not_hashed_again_while_nothing_changes(self) -> None:
        node = Node(9)
        long, big = request_of("long", 12, max_tokens=20), request_of("big", 24, max_tokens=4)
        node.batcher.add(long, 0.0)
        node.step()
        node.batcher.add(big, 1.0)
        tries = self._count_tries(node)
        steps = 0
        while node.batcher.starved is not None or not steps:
            node.step()
            steps += 1
        assert steps > 15 and len(tries) <= 3
        node.run()
        assert node.right(long, big)

    def test_it_tries_again_when_another_gives_up_pages(self) -> None:
        """Cancelled, finished, of another model: whoever frees pages, the next plan admits."""
        node = Node(12, models=2)
        node.batchers[1].add(request_of("other", 24, max_tokens=20), 0.0)
        node.step(1)
        node.batcher.add(request_of("small", 8, max_tokens=20), 1.0)
        node.step(0)
        node.batcher.add(request_of("big", 24, max_tokens=4), 2.0)
        for _ in range(3):
            node.step(0)
        assert node.batcher.starved is not None
        node.batchers[1].cancel("other")
        node.step(0)
        assert node.batcher.starved is None and [s.request.id for s in node.batcher.running] == ["small", "big"]

    def test_it_tries_again_when_its_own_prompt_comes_into_the_cache(self) -> None:
        """Nothing is freed, but each step of its twin shortens what the prompt still needs."""
        node = Node(9, step_tokens=8)
        first, second = request_of("a", tuple(range(24)), max_tokens=9), request_of("b", tuple(range(24)), max_tokens=2)
        node.batcher.add(first, 0.0)
        node.step()
        node.batcher.add(second, 1.0)
        node.step()
        assert node.batcher.starved is not None
        node.step(), node.step()
        assert [s.request.id for s in node.batcher.running] == ["a", "b"]
        node.run()
        assert node.right(first, second)


class TestMisuse:
    def test_what_just_fits_runs(self) -> None:
        node = Node(3)
        request = request_of("a", 8, max_tokens=4)
        node.batcher.add(request, 0.0)
        node.run()
        assert node.right(request)

    def test_misuse_is_a_bug(self) -> None:
        node = Node(3)
        with pytest.raises(Bug):
            node.batcher.add(request_of("a", ()), 0.0)
        with pytest.raises(Bug, match="longer than the memory"):
            node.batcher.add(request_of("a", 9, max_tokens=4), 0.0)
        node.batcher.add(request_of("a", 2), 0.0)
        batch = node.batcher.plan(0.0)
        assert batch is not None
        for results in ([], [Sampled(1), Sampled(1)]):
            with pytest.raises(Bug):
                node.batcher.commit(batch, results)


class TestCancel:
    @pytest.mark.parametrize("steps", range(6))
    def test_everything_goes_back_whenever_it_comes(self, steps: int) -> None:
        node = Node(20, step_tokens=4)
        node.batcher.add(request_of("a", 9, max_tokens=9, n=3), 0.0)
        for _ in range(steps):
            node.step()
        node.batcher.cancel("a")
        assert node.batcher.idle and node.batcher.plan(0.0) is None
        node.batcher.prefix.clear()
        assert node.pool.free_pages == 20
        assert all(e.finish is None for e in node.emits)

    @pytest.mark.parametrize("index", range(3))
    @pytest.mark.parametrize("steps", range(5))
    def test_one_choice_ends_and_the_others_go_on(self, index: int, steps: int) -> None:
        node = Node(20, step_tokens=4)
        request = request_of("a", 9, max_tokens=5, n=3)
        node.batcher.add(request, 0.0)
        for _ in range(steps):
            node.step()
        said = node.tokens("a", index)
        node.batcher.cancel("a", index)
        node.run()
        assert node.tokens("a", index) == said
        for other in {0, 1, 2} - {index}:
            assert node.tokens("a", other) == generate(request, other, 1000)[0]

    def test_it_does_not_look_through_the_queue(self) -> None:
        node = Node(40, sequences=8)
        for i in range(60):
            node.batcher.add(request_of(f"r{i}", 5, n=1 + i % 2), float(i % 7))
        node.step()
        node.batcher.running, node.batcher.waiting = Unread(node.batcher.running), Unread(node.batcher.waiting)
        for i in range(0, 60, 3):
            node.batcher.cancel(f"r{i}")
        left = {node.batcher.waiting[i].request.id for i in range(len(node.batcher.waiting))}
        left |= {node.batcher.running[i].request.id for i in range(len(node.batcher.running))}
        assert left == {f"r{i}" for i in range(60) if i % 3}

    def test_unknown_and_ended_ids_are_fine(self) -> None:
        node = Node(20)
        node.batcher.cancel("nobody")
        node.batcher.add(request_of("a", 3, max_tokens=1), 0.0)
        node.run()
        node.batcher.cancel("a")
        node.batcher.cancel("a", 0)
        assert node.batcher.idle

    def test_cancel_all_ends_every_choice_once(self) -> None:
        node = Node(20, sequences=2)
        for i in range(4):
            node.batcher.add(request_of(f"r{i}", 5, n=2), 0.0)
        node.step()
        emits = node.batcher.cancel_all()
        assert sorted((e.request_id, e.index) for e in emits) == [(f"r{i}", n) for i in range(4) for n in range(2)]
        assert {e.finish for e in emits} == {FinishReason.ABORT} and node.batcher.idle
        node.batcher.prefix.clear()
        assert node.pool.free_pages == 20

    def test_abandoned_pages_are_reclaimed_by_owner(self) -> None:
        node = Node(20)
        node.batcher.add(request_of("a", 9, n=2), 0.0)
        node.step()
        assert [e.finish for e in node.batcher.abandon()] == [FinishReason.ERROR] * 2 and node.batcher.idle
        assert node.pool.reclaim(node.batcher.kv.owner) > 0
        node.pool.check()
        assert node.pool.free_pages == 20


def test_stats_count_choices_and_only_grow() -> None:
    node = Node(20)
    assert node.batcher.stats() == BatcherStats(0, 0, 0, 0, 0, 0, 0)
    node.batcher.add(request_of("a", 6, max_tokens=3, n=2), 0.0)
    assert node.batcher.stats().waiting == 2
    node.run()
    assert node.batcher.stats() == BatcherStats(0, 0, 0, 6, 0, 6 + 2 + 1 + 2, 6)
