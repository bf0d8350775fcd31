"""Two real models on one device thread: a flood of long prompts on one leaves the other's stream its pace.

Steps and tokens are counted, not seconds: what a step was cut to, and how many steps lie between two tokens.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_cases import open_table
from local_engine import LocalEngine, request
from server_process import tiny_model

from janus_server.executor import DeviceThread, Engine, StepReport, Stop, Submit
from janus_server.kv.blocks import KvPages
from janus_server.kv.prefix import PrefixCache
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.turn import PATIENCE
from janus_server.types import Promise

STEP_TOKENS = 256


class Pair:
    """The models `chat` and `book`, which share weights and a pool, on a device thread of their own."""

    def __init__(self, path: Path) -> None:
        self.local = LocalEngine(path, open_table("cpu", 1), page_bytes=1 << 14, context_tokens=512)
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.thread = DeviceThread(
            self.local.xtensor.pool, self.local.scarcity, self.reports.put, lambda page: None, lambda model: None
        )
        self.local.scarcity.leave(self.local.batcher)  # of another engine, which is not used
        for model in ("chat", "book"):
            kv = KvPages(self.local.xtensor.pool, model, self.local.kv.page_tokens)
            limits = BatcherLimits(context_tokens=512, capacity_pages=2000, step_tokens=STEP_TOKENS)
            batcher = Batcher(kv, PrefixCache(kv, model.encode()), self.local.scarcity, limits)
            engine = Engine(model, batcher, self.local.runner)
            self.thread.ask(lambda engine=engine: self.thread.attach(engine))
        self.thread.start()

    def steps_until(self, ends: int) -> list[StepReport]:
        """Every step until so many choices have ended."""
        steps: list[StepReport] = []
        while ends:
            report = self.reports.get(timeout=60)
            ends -= sum(emit.finish is not None for emit in report.emits)
            if report.step is not None:
                steps.append(report)
        return steps


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tiny_model(tmp_path))
    yield made
    made.thread.post(Stop())
    made.thread.join(30)
    assert not made.thread.alive


def flood(pair: Pair, tpot_s: float) -> list[StepReport]:
    """A stream of 20 tokens on `chat` and twelve long prompts on `book` at once; the steps until all have ended."""

    def all_at_once() -> None:
        promise = Promise(ttft_s=60.0, tpot_s=tpot_s)
        pair.thread.post(Submit("chat", request("stream", [5, 6], 20, promise=promise), now))
        for i in range(12):
            prompt = [3 + (i + j * (i + 1)) % 290 for j in range(400)]
            pair.thread.post(Submit("book", request(f"b{i}", prompt, 1, promise=Promise(ttft_s=3600.0)), now))

    now = time.monotonic()
    pair.thread.ask(all_at_once).result(30)
    return pair.steps_until(13)


def test_a_flood_of_prompts_leaves_the_other_models_stream_its_turns(pair: Pair) -> None:
    """A pace that leaves no time to spare: whatever the machine does, no step of the flood may hold it up for long."""
    steps = flood(pair, tpot_s=1e-6)
    at_chat = [i for i, report in enumerate(steps) if report.model == "chat"]
    assert len(at_chat) == 20
    during = steps[at_chat[0] : at_chat[-1]]
    book = [report.step.tokens for report in during if report.model == "book" and report.step is not None]
    assert book, "the flood was not there while the stream ran"
    assert max(b - a for a, b in itertools.pairwise(at_chat)) <= PATIENCE + 2
    after = [r.step.tokens for r in steps[at_chat[-1] + 1 :] if r.model == "book" and r.step is not None]
    # Late whatever happens, so its pace bounds every step of the flood; alone, the flood has its whole steps.
    assert sorted(book)[len(book) // 2] < STEP_TOKENS / 2
    assert max(after) == STEP_TOKENS


def test_where_the_stream_has_time_to_spare_steps_are_whole(pair: Pair) -> None:
    steps = flood(pair, tpot_s=3600.0)
    book = [report.step.tokens for report in steps if report.model == "book" and report.step is not None]
    assert sum(book) == 12 * 400
    assert max(book) == STEP_TOKENS and len(book) <= 12 * 400 / STEP_TOKENS + 4


def test_both_say_what_they_say_alone(pair: Pair) -> None:
    """How a step is cut changes no token."""
    prompt = [3 + j * 7 % 290 for j in range(300)]
    alone = pair.local.generate(request("a", prompt, 8), request("b", [5, 6], 30))
    pair.thread.post(Submit("chat", request("b", [5, 6], 30, promise=Promise(tpot_s=1e-6)), 0.0))
    pair.thread.post(Submit("book", request("a", prompt, 8, promise=Promise(tpot_s=1e-6)), 0.0))
    said: dict[tuple[str, int], list[int]] = {}
    for report in pair.steps_until(2):
        for emit in report.emits:
            if emit.token is not None:
                said.setdefault((emit.request_id, emit.index), []).append(emit.token)
    assert said == alone
