"""Requests that ran on another node until that was lost: what was said, and how a batcher goes on from there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twin_batcher import Node, Rhythm, generate, request_of
from twin_sample import same_history

from janus_server.cluster.said import Said, going_on
from janus_server.sched.sequence import Begun
from janus_server.types import Emit, FinishReason, Request, Sampling, TokenLogprob
from janus_server.wire.frames import Known


def said_by(node: Node, request: Request) -> Said:
    """What a front would have heard."""
    said = Said(request)
    for emit in node.emits:
        said.hear(emit)
    return said


@given(
    prompt=st.integers(1, 20), n=st.integers(1, 4), tokens=st.integers(1, 12), steps=st.integers(0, 12),
    stops=st.sets(st.integers(0, 5), max_size=2), length=st.none() | st.integers(1, 8), penalty=st.booleans(),
)  # fmt: skip
def test_wherever_a_node_is_lost_the_next_one_says_the_rest(
    prompt: int, n: int, tokens: int, steps: int, stops: set[int], length: int | None, penalty: bool
) -> None:
    sampling = Sampling(seed=5, presence_penalty=0.5 if penalty else 0.0)
    request = request_of("a", prompt, max_tokens=tokens, n=n, stop_ids=tuple(stops), min_tokens=2, sampling=sampling)
    grammar = None if length is None else Rhythm(length)
    lost, found = Node(60, step_tokens=8), Node(60, step_tokens=8)
    lost.batcher.add(request, 0.0, grammar)
    for _ in range(steps):
        if not lost.batcher.idle:
            lost.step()
    said = said_by(lost, request)
    if not said.over:
        found.batcher.resume(request, 1.0, going_on(request, said.known(), said.ended(), grammar))
        found.run()
    for index in range(n):
        expected, finish = generate(request, index, 1000, grammar)
        assert lost.tokens("a", index) + found.tokens("a", index) == expected
        ends = [e.finish for e in [*lost.emits, *found.emits] if e.index == index and e.finish]
        assert ends == [finish]
    assert found.pool.free_pages == 60 - len(found.batcher.prefix)


def test_penalties_look_back_on_what_was_drawn_elsewhere() -> None:
    node = Node(20)
    request = request_of("a", (5, 5), max_tokens=9, sampling=Sampling(repetition_penalty=1.2))
    node.batcher.resume(request, 0.0, (Begun(0, (1, 2, 1)),))
    batch = node.step()
    assert batch is not None and batch.chunks[0].sample is not None
    spec = batch.chunks[0].sample
    assert spec.position == 3 and spec.history is not None and same_history(spec.history, (5, 5), (1, 2, 1))


def test_what_was_told_is_not_told_again() -> None:
    """Scores of the prompt, how long it queued, what came from the cache: with the first token, wherever that was."""
    node = Node(20)
    request = request_of("a", 6, max_tokens=9, prompt_logprobs=1)
    node.batcher.resume(request, 0.0, (Begun(0, (1, 2)),))
    emits = node.run()
    assert emits and all(e.queued_s is None and not e.cached_tokens and not e.prompt_logprobs for e in emits)


def test_a_choice_that_is_not_wanted_any_more_is_not_gone_on_with() -> None:
    said = Said(request_of("a", 3, n=3))
    for index in range(3):
        said.hear(Emit("a", index, token=4))
    said.hear(Emit("a", 1, token=5, finish=FinishReason.STOP))
    said.end(2)
    assert (said.known(), said.ended(), said.over) == ((Known(0, (4,)),), (1, 2), False)
    assert said.rest() == [Emit("a", 0, finish=FinishReason.ERROR)]
    assert [begun.choice for begun in going_on(said.request, said.known(), said.ended(), None)] == [0]


@pytest.mark.parametrize(
    ("emits", "can"),
    [
        ([], True),
        ([Emit("a", 0, prompt_logprobs=(TokenLogprob(1, -0.5),))], False),
        ([Emit("a", 0, prompt_logprobs=(TokenLogprob(1, -0.5),)), Emit("a", 0, token=3)], True),
    ],
)
def test_half_of_a_prompts_scores_cannot_be_gone_on_from(emits: list[Emit], can: bool) -> None:
    said = Said(request_of("a", 3, prompt_logprobs=1))
    for emit in emits:
        said.hear(emit)
    assert said.can_go_on is can
