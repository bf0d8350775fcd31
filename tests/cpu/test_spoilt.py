"""A sequence whose numbers are not finite ends alone: not a bit changes for its neighbours, nor for those after it."""

from __future__ import annotations

import itertools
import logging
import queue
from pathlib import Path

import numpy as np
import pytest
from checkpoints import hf_folder
from kernel_cases import open_table
from local_engine import LocalEngine, request

from janus_server.executor import DeviceThread, Engine, StepReport, Stop, Submit
from janus_server.types import FinishReason, Pooling, Request, Sampling

BAD = 9
ERROR = FinishReason.ERROR


def prompt_of(count: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(10, 320, count)]


SHARED = prompt_of(40, 0)
GOOD = (
    request("a", prompt_of(30, 1), 12, sampling=Sampling(seed=1, logprobs=2)),
    request("b", SHARED, 8, n=2, sampling=Sampling(seed=2)),
    request("c", [*SHARED[:33], *prompt_of(5, 2)], 8, prompt_logprobs=1),
    request("d", SHARED, 0, pooling=Pooling.MEAN),
)
SPOILT = (
    request("x", [*SHARED[:20], BAD, *SHARED[20:]], 8, n=3),
    request("y", [*SHARED, BAD], 8),
    request("z", [BAD, *SHARED], 8, prompt_logprobs=1, n=2),
    request("v", [*SHARED[:36], BAD, 11], 0, pooling=Pooling.MEAN),
    request("w", [*SHARED[:36], BAD, 11], 0, pooling=Pooling.LAST),
    request("u", [*SHARED[:36], BAD, 11], 0, prompt_logprobs=0),
)


@pytest.fixture(scope="module", params=["cpu", "torch_ref"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    folder = tmp_path_factory.mktemp(request.param)
    hf_folder(folder, initializer_range=0.3)
    made = LocalEngine(folder, open_table(request.param, 1), page_bytes=1 << 13)
    made.poison(BAD)
    return made


def news(engine: LocalEngine, one: Request) -> list[object]:
    """All that a request was told, choice by choice, but for what the cache gave."""
    told = sorted((e for e in engine.emits if e.request_id == one.id), key=lambda e: e.index)
    scores = [score for e in told for score in e.prompt_logprobs]
    said = [(e.index, e.token, e.logprob, e.finish, e.embedding) for e in told if e.token is not None or e.finish]
    return [scores, said]


def alone(engine: LocalEngine) -> dict[str, list[object]]:
    found = {}
    for one in GOOD:
        engine.reset()
        engine.generate(one)
        found[one.id] = news(engine, one)
    return found


@pytest.mark.parametrize("step_tokens", [512, 24])
@pytest.mark.parametrize("caching", [False, True])
def test_neighbours_are_bit_equal(engine: LocalEngine, step_tokens: int, caching: bool) -> None:
    expected = alone(engine)
    engine.reset(step_tokens=step_tokens, prefix_caching=caching)
    mixed = [one for pair in itertools.zip_longest(SPOILT, GOOD) for one in pair if one is not None]
    engine.generate(*mixed)
    for one in SPOILT:
        assert [engine.finish(one.id, index) for index in range(one.n)] == [ERROR] * one.n
        assert all(e.token is None and e.embedding is None for e in engine.emits if e.request_id == one.id)
    for one in GOOD:
        assert news(engine, one) == expected[one.id]
    # Again, from what the cache kept and over pages that held NaN.
    engine.generate(*SPOILT)
    engine.generate(*GOOD)
    for one in GOOD:
        assert news(engine, one) == expected[one.id]


def test_nothing_that_is_spoilt_stays_in_the_cache(engine: LocalEngine) -> None:
    engine.reset(step_tokens=16, prefix_caching=True)
    engine.generate(request("good", SHARED, 1))
    kept = len(engine.prefix)
    assert kept == 40 // engine.kv.page_tokens
    engine.generate(request("other", prompt_of(40, 5), 1))
    for one in SPOILT:
        engine.generate(one)
        assert all(BAD not in node.tokens for node in engine.prefix._nodes.values())
    assert len(engine.prefix) == kept, "what has nothing to do with it stays"
    assert engine.kv.held == len(engine.prefix)


def test_while_one_that_shares_its_start_runs(engine: LocalEngine) -> None:
    """The pages that both hold leave the cache under the one that goes on."""
    engine.reset(step_tokens=24, prefix_caching=True)
    long = request("long", SHARED, 60)
    expected = engine.generate(long)
    engine.reset(step_tokens=24, prefix_caching=True)
    engine.emits = []
    engine.batcher.add(long, 0.0)
    for _ in range(6):
        engine.step()
    engine.batcher.add(SPOILT[0], 1.0)
    while not engine.batcher.idle:
        engine.step()
    said = [e.token for e in engine.emits if e.request_id == "long"]
    assert said == expected[("long", 0)]
    assert engine.kv.held == len(engine.prefix) > 0, "it published its pages anew"
    engine.xtensor.pool.check()


def test_the_instance_lives_and_the_log_says_why(
    engine: LocalEngine, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine.reset(prefix_caching=True)
    reports: queue.Queue[StepReport] = queue.Queue()
    thread = DeviceThread(engine.xtensor.pool, engine.scarcity, reports.put, lambda page: None, lambda model: None)
    attached = Engine("m", engine.batcher, engine.runner)
    thread.ask(lambda: thread.attach(attached))
    everything = (*SPOILT, *GOOD)
    with caplog.at_level(logging.WARNING, "janus.executor"):
        for one in everything:
            thread.post(Submit("m", one, 0.0))
        thread.start()
        ends: dict[tuple[str, int], FinishReason] = {}
        while len(ends) < sum(one.n for one in everything):
            report = reports.get(timeout=30)
            assert not report.failed
            ends |= {(e.request_id, e.index): e.finish for e in report.emits if e.finish is not None}
        thread.post(Stop())
        thread.join(30)
    assert not thread.alive
    bad = {one.id for one in SPOILT}
    assert all((finish is ERROR) == (name in bad) for (name, _), finish in ends.items())
    assert any("not finite" in record.message for record in caplog.records)
