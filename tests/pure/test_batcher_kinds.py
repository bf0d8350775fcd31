"""Sequences that do more than draw: scored prompts, embeddings, grammars, and those that go wrong, in the batcher."""

from __future__ import annotations

import pytest
from twin_batcher import POISON, Node, Rhythm, chain_of, embedding, generate, request_of, scores

from janus_server.errors import Bug
from janus_server.types import Emit, FinishReason, Pooling, PoolSpec, Reading, Request, ScoreSpec

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


def ends(node: Node, name: str) -> list[FinishReason]:
    told = sorted((e for e in node.emits if e.request_id == name and e.finish is not None), key=lambda e: e.index)
    return [e.finish for e in told if e.finish is not None]


class TestScores:
    def test_chunks_say_which_rows_predict_what(self) -> None:
        node = Node(10, step_tokens=4)
        request = request_of("a", (1, 2, 3, 4, 5, 6), max_tokens=2, prompt_logprobs=3)
        node.batcher.add(request, 0.0)
        first, second, third = node.step(), node.step(), node.step()
        assert first is not None and second is not None and third is not None
        assert first.chunks[0].read == ScoreSpec(0, (2, 3, 4, 5), 3)
        assert second.chunks[0].read == ScoreSpec(0, (6,), 3) and second.chunks[0].sample is not None
        assert third.chunks[0].read is None
        assert node.scores("a") == scores(request)
        assert node.right(request)

    def test_they_come_over_the_emits_of_choice_0_and_the_cache_is_told_with_the_token(self) -> None:
        node = Node(20, step_tokens=4)
        node.batcher.add(request_of("a", (1, 2, 3, 4, 5, 6), max_tokens=1, prompt_logprobs=0, n=2), 2.0)
        node.batcher.plan(5.0)
        batch = node.batcher.plan(5.0)
        assert batch is not None
        node.emits += node.batcher.commit(batch, *node.memory.run(batch))
        node.run()
        parts = [(e.index, len(e.prompt_logprobs), e.token is None, e.queued_s) for e in node.emits]
        assert parts == [(0, 4, True, None), (0, 1, False, 3.0), (1, 0, False, None)]

    def test_a_prompt_that_is_preempted_is_read_on_where_it_was(self) -> None:
        node = Node(20, step_tokens=4)
        request = request_of("a", tuple(range(15)), max_tokens=2, prompt_logprobs=0)
        node.batcher.add(request, 0.0)
        node.step(), node.step()
        node.batcher.preempt(node.batcher.running[0])
        batch = node.step()
        assert batch is not None
        # What was read comes from the cache: two pages, computed and published before.
        assert (batch.chunks[0].start, batch.chunks[0].read) == (8, ScoreSpec(0, (9, 10, 11, 12), 0))
        node.run()
        assert node.scores("a") == scores(request) and node.right(request)

    def test_without_the_cache_the_rows_are_computed_again_but_not_read(self) -> None:
        node = Node(20, step_tokens=6, prefix_caching=False)
        request = request_of("a", tuple(range(15)), max_tokens=2, prompt_logprobs=0)
        node.batcher.add(request, 0.0)
        node.step()
        node.batcher.preempt(node.batcher.running[0])
        again, on = node.step(), node.step()
        assert again is not None and on is not None
        assert (again.chunks[0].start, again.chunks[0].read) == (0, None)
        assert (on.chunks[0].start, on.chunks[0].read) == (6, ScoreSpec(0, tuple(range(7, 13)), 0))
        node.run()
        assert node.scores("a") == scores(request)

    def test_a_cached_prompt_is_scored_all_the_same(self) -> None:
        node = Node(20)
        prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
        node.batcher.add(request_of("a", prompt, max_tokens=1), 0.0)
        node.run()
        scored = request_of("b", prompt, max_tokens=1, prompt_logprobs=0)
        node.batcher.add(scored, 1.0)
        node.run()
        assert node.scores("b") == scores(scored)
        assert node.emits[-1].cached_tokens == 0

    def test_an_heir_goes_on_scoring(self) -> None:
        node = Node(20, step_tokens=4)
        request = request_of("a", tuple(range(10)), max_tokens=1, prompt_logprobs=0, n=2)
        node.batcher.add(request, 0.0)
        node.step()
        node.batcher.cancel("a", 0)
        node.run()
        assert node.scores("a") == scores(request)

    @pytest.mark.parametrize("n", [1, 3])
    def test_no_token_is_drawn_where_none_is_wanted(self, n: int) -> None:
        node = Node(20, step_tokens=4)
        request = request_of("a", tuple(range(9)), max_tokens=0, prompt_logprobs=0, n=n)
        node.batcher.add(request, 0.0)
        node.run()
        assert node.scores("a") == scores(request)
        assert ends(node, "a") == [LENGTH] * n
        assert node.batcher.stats().sampled_tokens == 0
        node.batcher.prefix.clear()
        assert node.pool.free_pages == 20


class TestEmbeddings:
    @pytest.mark.parametrize("pooling", list(Pooling))
    @pytest.mark.parametrize("prompt", [1, 4, 5, 9])
    def test_the_end_brings_it(self, pooling: Pooling, prompt: int) -> None:
        node = Node(20, step_tokens=4)
        request = request_of("a", prompt, max_tokens=0, pooling=pooling)
        node.batcher.add(request, 1.0)
        assert node.run() == [Emit("a", 0, finish=STOP, queued_s=-1.0, embedding=embedding(request))]
        assert node.batcher.idle

    def test_the_sums_travel_with_the_chunks(self) -> None:
        node = Node(20, step_tokens=4)
        request = request_of("a", (1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=0, pooling=Pooling.MEAN)
        node.batcher.add(request, 0.0)
        rows = [chain_of(request.prompt[:i]) for i in range(1, 10)]
        reads = [batch.chunks[0].read for batch in (node.step(), node.step(), node.step()) if batch is not None]
        assert reads == [PoolSpec(0), PoolSpec(0, sum(rows[:4])), PoolSpec(0, sum(rows[:8]), 9)]

    def test_the_last_state_needs_no_more_than_the_last_row(self) -> None:
        node = Node(20)
        prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
        node.batcher.add(request_of("a", prompt, max_tokens=0, pooling=Pooling.MEAN), 0.0)
        node.run()
        node.batcher.add(request_of("b", prompt, max_tokens=0, pooling=Pooling.LAST), 1.0)
        batch = node.step()
        assert batch is not None
        assert (batch.chunks[0].start, batch.chunks[0].read) == (8, PoolSpec(0, None, 1))
        assert node.emits[-1].cached_tokens == 8

    def test_a_row_left_over_is_no_decode_that_could_starve(self) -> None:
        """One row of a prompt is left, as for a token: it neither grows nor samples."""
        node = Node(3, step_tokens=4)
        request = request_of("a", 5, max_tokens=0, pooling=Pooling.MEAN)
        node.batcher.add(request, 0.0)
        node.step()
        assert node.batcher.running[0].gap == 1
        last = node.step()
        assert last is not None and last.chunks[0].sample is None
        assert node.emits[-1].embedding == embedding(request)

    @pytest.mark.parametrize("fields", [{"n": 2}, {"prompt_logprobs": 0}, {"max_tokens": 1}])
    def test_it_asks_for_nothing_else(self, fields: dict[str, int]) -> None:
        request = Request(
            **{"id": "a", "model": "m", "prompt": (1,), "max_tokens": 0, "pooling": Pooling.MEAN, **fields}
        )
        with pytest.raises(Bug, match="embedding"):
            Node(3).batcher.add(request, 0.0)

    def test_a_reading_for_each_chunk_that_reads(self) -> None:
        node = Node(3)
        node.batcher.add(request_of("a", 2, max_tokens=0, pooling=Pooling.MEAN), 0.0)
        batch = node.batcher.plan(0.0)
        assert batch is not None
        for readings in ([], [Reading(), Reading()]):
            with pytest.raises(Bug, match="one reading"):
                node.batcher.commit(batch, [], readings)


class TestGrammars:
    def test_every_choice_draws_under_a_copy_of_its_own(self) -> None:
        node = Node(30)
        request = request_of("a", 5, max_tokens=9, n=3)
        grammar = Rhythm(6)
        node.batcher.add(request, 0.0, grammar)
        node.run()
        for index in range(3):
            tokens, finish = generate(request, index, 1000, grammar)
            assert node.tokens("a", index) == tokens and finish is STOP
        assert ends(node, "a") == [STOP] * 3
        assert grammar.said == ()

    def test_it_stays_in_step_when_the_sequence_is_preempted(self) -> None:
        node = Node(30)
        request = request_of("a", 5, max_tokens=9)
        node.batcher.add(request, 0.0, Rhythm(7))
        for step in range(12):
            if node.batcher.idle:
                break
            node.step()
            if step % 2 and node.batcher.running:
                node.batcher.preempt(node.batcher.running[0])
        assert node.batcher.stats().preemptions > 1
        assert node.tokens("a") == generate(request, 0, 1000, Rhythm(7))[0]

    def test_the_limit_still_cuts_it(self) -> None:
        node = Node(30)
        node.batcher.add(request_of("a", 5, max_tokens=3), 0.0, Rhythm(7))
        node.batcher.add(request_of("b", 5, max_tokens=3), 0.0, Rhythm(3))
        node.run()
        assert (ends(node, "a"), ends(node, "b")) == ([LENGTH], [STOP])

    def test_where_it_allows_nothing_the_choice_ends_alone_and_its_pages_stay(self) -> None:
        node = Node(30)
        node.batcher.add(request_of("a", 9, max_tokens=9), 0.0, Rhythm(7, dry_at=2))
        node.batcher.add(request_of("b", 9, max_tokens=9), 0.0)
        node.run()
        assert (ends(node, "a"), ends(node, "b")) == ([ERROR], [LENGTH])
        assert len(node.tokens("a")) == 2
        assert len(node.batcher.prefix) >= 2 + 2

    def test_where_it_allows_only_the_end_there_is_no_token(self) -> None:
        node = Node(30)
        node.batcher.add(request_of("a", 9, max_tokens=9), 0.0, Rhythm(0))
        assert [(e.token, e.finish) for e in node.run()] == [(None, STOP)]


class TestSpoilt:
    def test_it_ends_alone_with_all_its_choices(self) -> None:
        node = Node(30, step_tokens=8)
        good = request_of("good", (1, 2, 3, 4, 5), max_tokens=6)
        node.batcher.add(good, 0.0)
        node.batcher.add(request_of("bad", (1, 2, 3, 4, POISON), max_tokens=6, n=3), 0.0)
        node.run()
        assert ends(node, "bad") == [ERROR] * 3 and not node.tokens("bad")
        assert node.right(good)

    def test_nothing_of_it_stays_in_the_cache_and_others_keep_what_they_hold(self) -> None:
        node = Node(30, step_tokens=6)
        start = (1, 2, 3, 4, 5, 6, 7, 8)
        good = request_of("good", start, max_tokens=12)
        node.batcher.add(good, 0.0)
        node.step(), node.step()
        assert len(node.batcher.prefix) == 2
        node.batcher.add(request_of("bad", (*start, POISON, 9), max_tokens=2), 1.0)
        while "bad" in {s.request.id for s in [*node.batcher.running, *node.batcher.waiting]}:
            node.step()
        assert len(node.batcher.prefix) == 0
        node.run()
        assert node.right(good)
        assert len(node.batcher.prefix) == (8 + 12 - 1) // 4
        node.batcher.prefix.clear()
        assert node.pool.free_pages == 30

    def test_the_head_of_the_queue_forgets_what_it_saw_of_it(self) -> None:
        """It waits for room and remembers its match; that match leaves the cache under it."""
        node = Node(8, step_tokens=4)
        start = (1, 2, 3, 4, 5, 6, 7, 8)
        node.batcher.add(request_of("bad", (*start, 9, 9, 9, POISON, 1), max_tokens=12), 0.0)
        node.step(), node.step()
        big = request_of("big", (*start, *range(100, 116)), max_tokens=4)
        node.batcher.add(big, 1.0)
        node.step()
        assert node.batcher.starved is not None
        node.run()
        assert ends(node, "bad") == [ERROR] and node.right(big)

    def test_a_scored_prompt_says_what_it_had_before(self) -> None:
        node = Node(30, step_tokens=4)
        node.batcher.add(request_of("a", (1, 2, 3, 4, 5, POISON, 6, 7), max_tokens=2, prompt_logprobs=0), 0.0)
        node.run()
        assert len(node.scores("a")) == 4 and ends(node, "a") == [ERROR]
