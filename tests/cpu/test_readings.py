"""Prompt log probabilities and embeddings against transformers, on both tables, however the prompt was cut up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import hf_folder
from kernel_cases import open_table
from local_engine import LocalEngine, request

from janus_server.model.scratch import READ_ROWS
from janus_server.types import FinishReason, Pooling, TokenLogprob

VOCAB = 320
FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, count)]


def log_softmax(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """[len(tokens), vocab] in float64."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()


def hidden_states(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """[len(tokens), hidden], after the final norm."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].double().numpy()


def assert_scores(scores: list[TokenLogprob], tokens: list[int], theirs: np.ndarray, top: int) -> None:
    assert [score.token for score in scores] == tokens[1:]
    for score, row in zip(scores, theirs[:-1], strict=True):
        assert score.logprob == pytest.approx(row[score.token], abs=2e-4)
        assert len(score.top) == top
        assert [value for _, value in score.top] == pytest.approx(sorted(row, reverse=True)[:top], abs=2e-4)
        assert dict(score.top).get(score.token, score.logprob) == score.logprob


def scarce(engine: LocalEngine, tokens: int) -> tuple[int, ...]:
    """Leave memory for that many tokens; the pages to drop afterwards."""
    pages = -(-tokens // engine.kv.page_tokens)
    held = engine.kv.take(engine.xtensor.pool.free_pages - pages)
    assert held is not None
    return held


@pytest.fixture(scope="module", params=["cpu", "torch_ref"])
def table(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_embeddings_match_transformers(tmp_path: Path, table: str, family: str) -> None:
    model = hf_folder(tmp_path, family, initializer_range=0.3)
    engine = LocalEngine(tmp_path, open_table(table, 1), page_bytes=1 << 13)
    tokens = prompt_of(2 * READ_ROWS + 7)
    theirs, hidden = log_softmax(model, tokens), hidden_states(model, tokens)
    engine.generate(
        request("score", tokens, 1, prompt_logprobs=3),
        request("mean", tokens, 0, pooling=Pooling.MEAN),
        request("last", tokens, 0, pooling=Pooling.LAST),
    )
    assert_scores(engine.scores("score"), tokens, theirs, 3)
    assert engine.embedding("mean") == pytest.approx(hidden.mean(axis=0), abs=2e-4)
    assert engine.embedding("last") == pytest.approx(hidden[-1], abs=2e-4)
    assert engine.finish("mean") is engine.finish("last") is FinishReason.STOP


@pytest.fixture(scope="module")
def engine(table: str, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    folder = tmp_path_factory.mktemp(table)
    hf_folder(folder, initializer_range=0.3)
    return LocalEngine(folder, open_table(table, 1), page_bytes=1 << 13)


class TestHoweverThePromptIsCut:
    """The same bits in one piece, in odd chunks, after preemption in mid-prompt, and beside others."""

    @pytest.mark.parametrize("step_tokens", [1, 7, 33, 512])
    def test_in_chunks(self, engine: LocalEngine, step_tokens: int) -> None:
        tokens = prompt_of(75, seed=1)
        asked = (
            request("score", tokens, 4, prompt_logprobs=2),
            request("mean", tokens, 0, pooling=Pooling.MEAN),
            request("last", tokens, 0, pooling=Pooling.LAST),
        )
        engine.reset()
        plain = engine.generate(request("plain", tokens, 4))[("plain", 0)]
        whole = engine.generate(asked[0])
        scores = engine.scores("score")
        vectors = []
        for one in asked[1:]:
            engine.generate(one)
            vectors.append(engine.embedding(one.id))
        engine.reset(step_tokens=step_tokens, sequences=4)
        assert engine.generate(*asked) == whole == {("score", 0): plain}
        assert engine.scores("score") == scores
        assert np.array_equal(engine.embedding("mean"), vectors[0])
        assert np.array_equal(engine.embedding("last"), vectors[1])

    @pytest.mark.parametrize("caching", [False, True])
    def test_preempted_in_mid_prompt(self, engine: LocalEngine, caching: bool) -> None:
        tokens = prompt_of(75, seed=2)
        asked = request("score", tokens, 4, prompt_logprobs=2), request("mean", tokens, 0, pooling=Pooling.MEAN)
        engine.reset()
        plain = engine.generate(*asked)
        scores, mean = engine.scores("score"), engine.embedding("mean")
        engine.reset(step_tokens=11, prefix_caching=caching)
        engine.emits = []
        for one in asked:
            engine.batcher.add(one, 0.0)
        steps = 0
        out: list[int | None] = []
        while not engine.batcher.idle:
            out += [e.token for e in engine.step() if e.request_id == "score" and e.token is not None]
            steps += 1
            if steps in (3, 6, 17):
                for seq in list(engine.batcher.running):
                    engine.batcher.preempt(seq)
        assert engine.batcher.stats().preemptions >= 4
        assert out == plain[("score", 0)]
        assert engine.scores("score") == scores
        assert np.array_equal(engine.embedding("mean"), mean)

    def test_what_is_read_never_comes_from_the_cache_but_feeds_it(self, engine: LocalEngine) -> None:
        tokens = prompt_of(64, seed=3)
        engine.reset(prefix_caching=True)
        engine.generate(request("a", tokens, 1, prompt_logprobs=0))
        engine.generate(request("b", tokens, 1, prompt_logprobs=0), request("c", tokens, 0, pooling=Pooling.MEAN))
        assert len(engine.scores("b")) == 63
        assert [e.cached_tokens for e in engine.emits if e.finish is not None] == [0, 0]
        engine.generate(request("d", tokens, 1), request("e", tokens, 0, pooling=Pooling.LAST))
        assert [e.cached_tokens for e in engine.emits] == [63, 63]

    def test_the_sampled_token_and_its_log_probability_are_unaffected(self, engine: LocalEngine) -> None:
        tokens = prompt_of(40, seed=4)
        engine.reset()
        sampling = dict(sampling=request("x", [1], 1).sampling.__class__(seed=5, logprobs=4))
        engine.generate(request("a", tokens, 6, **sampling))
        alone = [(e.token, e.logprob) for e in engine.emits]
        engine.generate(request("a", tokens, 6, prompt_logprobs=7, **sampling))
        assert [(e.token, e.logprob) for e in engine.emits if e.token is not None] == alone

    @pytest.mark.parametrize("n", [1, 3])
    def test_scored_only(self, engine: LocalEngine, n: int) -> None:
        tokens = prompt_of(30, seed=5)
        engine.reset(step_tokens=8)
        assert engine.generate(request("a", tokens, 0, prompt_logprobs=1, n=n)) == {}
        assert len(engine.scores("a")) == 29
        assert [engine.finish("a", index) for index in range(n)] == [FinishReason.LENGTH] * n

    def test_the_shortest_prompts(self, engine: LocalEngine) -> None:
        engine.reset()
        engine.generate(
            request("score", [5], 0, prompt_logprobs=1),
            request("mean", [5], 0, pooling=Pooling.MEAN),
            request("last", [5], 0, pooling=Pooling.LAST),
        )
        assert engine.scores("score") == []
        assert np.array_equal(engine.embedding("mean"), engine.embedding("last"))

    def test_with_hardly_any_memory(self, engine: LocalEngine) -> None:
        """An answer grows into the pages of a prompt that is being scored: it is preempted, and then read on."""
        first, second = prompt_of(60, seed=6), prompt_of(90, seed=7)
        asked = request("a", first, 60, prompt_logprobs=1), request("b", second, 2, prompt_logprobs=1)
        engine.reset()
        engine.generate(*asked)
        expected = engine.scores("a"), engine.scores("b")
        engine.reset(step_tokens=4, shared_prompts=1)
        held = scarce(engine, 172)
        engine.generate(*asked)
        assert engine.batcher.stats().preemptions > 0
        assert (engine.scores("a"), engine.scores("b")) == expected
        for page in held:
            engine.kv.drop(page)
