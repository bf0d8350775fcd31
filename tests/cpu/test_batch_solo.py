"""Two requests of one batch never influence each other: each gets, bit for bit, what it gets alone.

Sampling of every kind, grammars, log probabilities of answers and prompts, embeddings, several choices, stop strings
and cancels are mixed at random, in chunks, with prefix hits, preempted at any step and short of memory. The engine is
the real one from the kernels to the `Call` that the HTTP layer reads; only its threads are left out. `search` looks for
as long as it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoints import hf_folder
from kernel_cases import open_table
from local_engine import LocalEngine

from janus_server import types
from janus_server.api.plan import Target
from janus_server.executor import Cancel, StepReport, Submit
from janus_server.flow import AtOnce, Flow
from janus_server.grammar.compile import Grammars
from janus_server.instance import Call, ServedModel
from janus_server.kernels.table import DType
from janus_server.streams import Streams
from janus_server.types import FinishReason, Grammar, GrammarKind, Pooling, Request, Sampling

VOCAB, EOS = 320, 2
Said = dict[int, dict[str, Any]]


class Letters:
    """A tokenizer whose every token is one letter."""

    strips_first_space = False
    vocab_size = VOCAB

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token % 7])

    def is_special(self, token: int) -> bool:
        return token == EOS


class Stripes:
    """A grammar that allows a fifth of the vocabulary, another fifth after each token, and its end after `length`."""

    def __init__(self, length: int, said: int = 0, total: int = 0) -> None:
        self.length, self.said, self.total = length, said, total
        self.failed = False

    @property
    def done(self) -> bool:
        return self.said >= self.length

    def copy(self) -> Stripes:
        return Stripes(self.length, self.said, self.total)

    def mask(self) -> np.ndarray:
        return np.arange((self.total + self.said) % 5, VOCAB, 5)

    def accept(self, token: int) -> bool:
        self.failed = (token - self.total - self.said) % 5 != 0
        self.said, self.total = self.said + 1, (self.total + token) % 5
        return not self.failed


class Job(msgspec.Struct, frozen=True):
    """A request, when it comes (in steps), under which grammar, and after how many deltas its client leaves."""

    request: Request
    step: int
    grammar: Any
    leaves: int | None


class Orders:
    """Stands where the device thread does: orders are applied at once."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def post(self, order: Submit | Cancel) -> None:
        if isinstance(order, Submit):
            self._engine.batcher.add(order.request, float(self._engine.batcher._steps), order.matcher)
        else:
            self._engine.batcher.cancel(order.request_id, order.index)


def grammars() -> list[Any]:
    """Grammars at their start, three of them as a client's are compiled."""
    compiler, letters = Grammars(cpu_s=10.0), Letters()
    try:
        made = [
            compiler.compile(letters, Grammar(GrammarKind.REGEX, source), (EOS,))
            for source in ("[a-c]{3,9}(de|fg)+", "(abc|abd)e{2,6}", "[a-g]*")
        ]
    finally:
        compiler.close()
    return [*made, Stripes(1), Stripes(6), Stripes(14)]


def jobs(rng: random.Random, known: list[Any]) -> list[Job]:
    prompts: list[tuple[int, ...]] = []
    made = []
    for number in range(rng.randint(3, 9)):
        base = rng.choice(prompts) if prompts and rng.random() < 0.6 else ()
        tail = [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 3, 17, 40)))]
        prompts.append((*base[: rng.randint(0, len(base))], *tail)[:90])
        request = _request(rng, f"r{number}", prompts[-1])
        grammar = rng.choice(known) if request.max_tokens and rng.random() < 0.4 else None
        leaves = rng.randint(0, 6) if rng.random() < 0.15 else None
        made.append(Job(request, rng.randint(0, 12), grammar, leaves))
    return made


def _request(rng: random.Random, name: str, prompt: tuple[int, ...]) -> Request:
    kind = rng.random()
    if kind < 0.2:
        return Request(id=name, model="m", prompt=prompt, max_tokens=0, pooling=rng.choice(list(Pooling)))
    max_tokens = rng.choice((0, 1, 9, 20)) if kind < 0.5 else rng.randint(1, 20)
    scored = kind < 0.5 or max_tokens == 0
    return Request(
        id=name,
        model="m",
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
        n=rng.choice((1, 1, 1, 2, 3)),
        sampling=Sampling(
            temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
            top_p=rng.choice((1.0, 1.0, 0.8)),
            top_k=rng.choice((0, 0, 5)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            presence_penalty=rng.choice((0.0, 0.5)),
            seed=rng.randrange(1000),
            logit_bias=((7, 2.0), (9, -3.0)) if rng.random() < 0.2 else (),
            logprobs=rng.choice((None, None, 0, 3)),
        ),
        stop_ids=(EOS, *rng.sample(range(3, VOCAB), rng.choice((0, 20)))),
        stop=tuple("".join(rng.choice("abcdefg") for _ in range(2)) for _ in range(rng.choice((0, 0, 2)))),
        prompt_logprobs=rng.randint(0, 3) if scored else None,
    )


async def run(engine: LocalEngine, load: list[Job], rng: random.Random | None = None) -> dict[str, Said]:
    """What each client of a load heard; with a generator, sequences are preempted at any time."""
    card = types.ModelCard("m", 0, engine.context_tokens, 0, 0, "float32", "llama")
    target = Target("m", engine.context_tokens, VOCAB, (EOS,), Sampling())
    streams = Streams()
    flow = Flow("m", Orders(engine), AtOnce())  # type: ignore[arg-type]
    flow.serve()
    model = ServedModel(card, target, Letters(), flow, streams)  # type: ignore[arg-type]
    heard: dict[str, Said] = {}
    waiting, clients, steps = list(load), [], 0
    async with contextlib.AsyncExitStack() as stack:
        while waiting or clients or not engine.batcher.idle:
            assert steps < 5000, "a client waits for an answer that never ends"
            for job in [job for job in waiting if job.step <= steps]:
                waiting.remove(job)
                call = await stack.enter_async_context(model.submit([job.request], [job.grammar]))
                clients.append((job, call))
                heard[job.request.id] = {}
            if not engine.batcher.idle:
                streams.deliver(StepReport("m", engine.step(), {}, 0))
            for client in list(clients):
                if await _listen(*client, heard[client[0].request.id]):
                    clients.remove(client)
            if rng is not None and engine.batcher.running and rng.random() < 0.1:
                engine.batcher.preempt(rng.choice(engine.batcher.running))
            steps += 1
    return heard


async def _listen(job: Job, call: Call, said: Said) -> bool:
    """Take what has come; True when the client is done or leaves."""
    news = await call.take(0.0)
    for delta in (one.delta for one in news or ()):
        choice = said.setdefault(delta.index, {"tokens": [], "logprobs": [], "text": "", "deltas": 0})
        assert "finish" not in choice, "it spoke after its end"
        choice["tokens"] += delta.tokens
        choice["logprobs"] += delta.logprobs
        choice["text"] += delta.text
        choice["deltas"] += 1
        if delta.prompt_logprobs:
            choice["scores"] = delta.prompt_logprobs
        if delta.finish is not None:
            choice |= {"finish": delta.finish, "stop": delta.stop, "embedding": delta.embedding}
    if job.leaves is not None and sum(choice["deltas"] for choice in said.values()) >= job.leaves:
        await call.__aexit__(None, None, None)
        return True
    return news is None


def check(engine: LocalEngine, seed: int, known: list[Any]) -> None:
    """One random load, together and alone."""
    rng = random.Random(seed)
    load = jobs(rng, known)
    engine.reset()
    alone: dict[str, Said] = {}
    for job in load:
        alone |= asyncio.run(run(engine, [msgspec.structs.replace(job, step=0, leaves=None)]))
    longest = max(len(job.request.prompt) + job.request.max_tokens for job in load)
    engine.reset(
        step_tokens=rng.choice((4, 16, 33, 512)), sequences=rng.choice((2, 4, 64)), prefix_caching=rng.random() < 0.6,
        one_prompt_at_a_time=rng.random() < 0.2,
    )  # fmt: skip
    pages = -(-longest // engine.kv.page_tokens) + rng.choice((0, 2, 10))
    held = engine.kv.take(engine.xtensor.pool.free_pages - pages)
    assert held is not None
    together = asyncio.run(run(engine, load, rng))
    for page in held:
        engine.kv.drop(page)
    engine.xtensor.pool.check()
    assert engine.kv.held == len(engine.prefix)
    for job in load:
        _compare(job, together[job.request.id], alone[job.request.id])


def _compare(job: Job, together: Said, alone: Said) -> None:
    if job.leaves is None:
        assert together == alone, job
        assert {choice["finish"] for choice in alone.values()} <= {FinishReason.STOP, FinishReason.LENGTH}
        return
    for index, choice in together.items():
        whole = alone[index]
        count = len(choice["tokens"])
        assert choice["tokens"] == whole["tokens"][:count] and choice["logprobs"] == whole["logprobs"][:count]
        assert whole["text"].startswith(choice["text"])
        assert choice.get("scores") in (None, whole.get("scores"))


def engine_of(folder: Path, table: str, dtype: DType) -> LocalEngine:
    return LocalEngine(folder, open_table(table, 1), dtype=dtype, page_bytes=1 << 12, memory_bytes=8 << 20)


@pytest.mark.parametrize(
    ("table", "dtype", "loads"), [("torch_ref", DType.F32, 3), ("cpu", DType.F32, 30), ("cpu", DType.BF16, 20)]
)
def test_a_batch_gives_each_request_what_it_gets_alone(tmp_path: Path, table: str, dtype: DType, loads: int) -> None:
    hf_folder(tmp_path, initializer_range=0.3)
    engine = engine_of(tmp_path, table, dtype)
    preemptions, known = 0, grammars()
    for seed in range(loads):
        check(engine, seed, known)
        preemptions += engine.batcher.stats().preemptions
    assert preemptions > loads


def search(folder: Path, seconds: float, table: str = "cpu", first: int = 1000) -> int:
    """By hand: random loads from `first` on for so many seconds; returns how many there were."""
    hf_folder(folder, initializer_range=0.3)
    engine = engine_of(folder, table, DType.F32)
    end, seed, known = time.monotonic() + seconds, first, grammars()
    while time.monotonic() < end:
        check(engine, seed, known)
        seed += 1
    return seed - first
