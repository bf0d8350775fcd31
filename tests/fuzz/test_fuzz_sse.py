"""Random deltas through the writers of event streams: a strict reader and openai's own decoder find the texts again.

Most cases meet `api.reply` alone, cut into pieces at random; a sample is served over a real socket, where the pieces
are those that TCP made.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from fake_engine import VOCAB, ByteTokenizer, FakeModel
from harness import fuzz, fuzz_async
from http_server import served
from openai._streaming import SSEDecoder
from sse_reader import Malformed, SseReader

from janus_server import types
from janus_server.api import chat_reply, plan, reply

PIECES = (
    "a", "", "\r", "\n", "\r\n", "\n\n", "data: ", "[DONE]", ": ping", '"', "\\", "\\n", "\x00", "\x0b", "\x0c", "\x1c",
    "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "é", "😀", "\ufffd", "\ufeff", "\x7f", "</s>", "{}", "x" * 300, " ",
)  # fmt: skip
ENDS = (types.FinishReason.STOP, types.FinishReason.LENGTH)
TROUBLES = (types.FinishReason.ERROR, types.FinishReason.ABORT)


class OddTokenizer(ByteTokenizer):
    """One whose higher tokens spell what line readers stumble over."""

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token % len(PIECES)].encode() if token >= 256 else super().token_bytes(token)


@dataclasses.dataclass(frozen=True)
class Case:
    """deltas: (prompt, delta) in the order they come; trouble: whether the last one ends in an error."""

    chat: bool
    n: int
    prompts: int
    logprobs: bool
    include_usage: bool
    continuous_usage: bool
    echo: tuple[str, ...]
    deltas: tuple[tuple[int, types.Delta], ...]
    trouble: bool
    cuts: int

    @property
    def call(self) -> plan.Call:
        requests = tuple(
            types.Request(id=f"r{i}", model="m", prompt=(1, 2), max_tokens=100, n=self.n) for i in range(self.prompts)
        )
        return plan.Call(
            kind=plan.Kind.CHAT if self.chat else plan.Kind.COMPLETION,
            label=plan.Label(id="cmpl-1", created_s=1_700_000_000, seed=1),
            model='odd "name"\u2028\n', requests=requests, n=self.n, stream=True, include_usage=self.include_usage,
            continuous_usage=self.continuous_usage, logprobs=self.logprobs, echo=self.echo,
        )  # fmt: skip

    def texts(self) -> dict[int, str]:
        """What each choice says, the echo of its prompt before it."""
        found = {i * self.n + j: self.echo[i] for i in range(self.prompts) for j in range(self.n)}
        begun = set()
        for prompt, delta in self.deltas:
            index = prompt * self.n + delta.index
            if delta.finish not in TROUBLES:
                found[index] += delta.text
                begun.add(index)
        return {index: text if index in begun else "" for index, text in found.items()}


def make(rng: random.Random) -> Case:
    chat = rng.random() < 0.5
    prompts, n = (1 if chat else rng.choice((1, 1, 2, 3))), rng.choice((1, 1, 2, 4))
    logprobs = rng.random() < 0.3
    order = [(p, i) for p in range(prompts) for i in range(n) for _ in range(rng.choice((0, 1, 3, 8)))]
    rng.shuffle(order)
    deltas = [(p, _delta(rng, i, logprobs, None)) for p, i in order]
    trouble = rng.random() < 0.2
    if trouble:
        p, i = rng.randrange(prompts), rng.randrange(n)
        deltas.append((p, types.Delta(i, finish=rng.choice(TROUBLES), message=rng.choice((None, "it ended")))))
    else:
        for p, i in rng.sample([(p, i) for p in range(prompts) for i in range(n)], prompts * n):
            deltas.append((p, _delta(rng, i, logprobs, rng.choice(ENDS))))
    echo = tuple(_text(rng) if not chat and rng.random() < 0.3 else "" for _ in range(prompts))
    return Case(
        chat, n, prompts, logprobs, rng.random() < 0.4, rng.random() < 0.2, echo, tuple(deltas), trouble,
        rng.randrange(1 << 30),
    )  # fmt: skip


def written(case: Case) -> bytes:
    """The stream of a call as `http` puts it together."""
    kind = chat_reply.StreamChat if case.chat else reply.StreamReply
    stream = kind(case.call, OddTokenizer())  # type: ignore[arg-type]
    parts = []
    for prompt, delta in case.deltas:
        refused = reply.failure(delta)
        if refused is not None:
            return b"".join([*parts, stream.error(refused)])
        parts.append(stream.events(prompt, delta))
    return b"".join([*parts, stream.end()])


def check(case: Case) -> None:
    raw = written(case)
    check_stream(case, list(pieces(case, raw)), case.call.model)


def check_stream(case: Case, cut: list[bytes], model: str) -> None:
    """Both readers agree, and what they read is what the case says."""
    reader = SseReader()
    for piece in cut:
        reader.feed(piece)
    reader.finish()
    theirs = [event.data for event in SSEDecoder().iter_bytes(iter(cut))]
    assert theirs[-1] == "[DONE]"
    assert all(theirs), "an empty event"
    assert [json.loads(data) for data in theirs[:-1]] == reader.events
    assert len({(e["id"], e["created"], e["object"]) for e in reader.events if "error" not in e}) <= 1
    assert {e["model"] for e in reader.events if "error" not in e} <= {model}
    check_events(case, reader.events)


def check_events(case: Case, events: list[dict[str, Any]]) -> None:
    if case.trouble:
        error = events.pop()
        assert set(error) == {"error"}
        assert set(error["error"]) == {"message", "type", "param", "code"}
    elif case.include_usage:
        usage = events.pop()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == sum(len(d.tokens) for _, d in case.deltas)
    texts = {index: "" for index in case.texts()}
    finished: dict[int, str] = {}
    entries = {index: 0 for index in texts}
    opened: set[int] = set()
    for event in events:
        assert ("usage" in event) is (case.include_usage or case.continuous_usage)
        (choice,) = event["choices"]
        index = choice["index"]
        assert index not in finished, "something after the end of a choice"
        if case.chat:
            delta = choice["delta"]
            assert ("role" in delta) is (index not in opened)
            texts[index] += delta.get("content", "")
        else:
            texts[index] += choice["text"]
        opened.add(index)
        entries[index] += count_logprobs(case, choice["logprobs"])
        if choice["finish_reason"] is not None:
            finished[index] = choice["finish_reason"]
            assert not case.chat or choice["delta"] == {}
    assert texts == case.texts()
    ends = {p * case.n + d.index: d.finish.value for p, d in case.deltas if d.finish in ENDS and d.finish is not None}
    assert finished == ends
    given = {index: 0 for index in texts}
    for prompt, delta in case.deltas:
        given[prompt * case.n + delta.index] += len(delta.logprobs)
    assert entries == given


def count_logprobs(case: Case, logprobs: dict[str, Any] | None) -> int:
    if logprobs is None:
        return 0
    assert case.logprobs
    if case.chat:
        values = [entry["logprob"] for entry in logprobs["content"]]
        assert all(bytes(entry["bytes"]) is not None for entry in logprobs["content"])
    else:
        values = logprobs["token_logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == len(values)
    assert all(math.isfinite(value) for value in values)
    return len(values)


def pieces(case: Case, raw: bytes) -> Iterator[bytes]:
    """The stream cut anywhere, in the middle of characters and line ends too."""
    rng = random.Random(case.cuts)
    most = rng.choice((1, 2, 7, 100, 100_000)) if len(raw) < 4000 else rng.choice((50, 1000, 100_000))
    at = 0
    while at < len(raw):
        size = rng.randrange(1, most + 1)
        yield raw[at : at + size]
        at += size


def _delta(rng: random.Random, index: int, logprobs: bool, finish: types.FinishReason | None) -> types.Delta:
    tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 1, 1, 3))))
    entries: tuple[types.TokenLogprob, ...] = ()
    if logprobs:
        entries = tuple(_logprob(rng, token) for token in tokens)
    return types.Delta(index, _text(rng), tokens, entries, finish, cached_tokens=rng.choice((0, 0, 1)))


def _logprob(rng: random.Random, token: int) -> types.TokenLogprob:
    values = (-0.0, -1.5, -1e-300, -1e308, -math.inf, math.nan)
    top = tuple((rng.randrange(VOCAB), rng.choice(values)) for _ in range(rng.randrange(4)))
    return types.TokenLogprob(token, rng.choice(values), top)


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.choice((0, 0, 1, 1, 2, 6))))


def test_streams_are_read_back_exactly_however_they_are_cut() -> None:
    fuzz("sse", 1200, make, check)


class Scripted(FakeModel):
    """Answers every request with the deltas of the case that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = OddTokenizer()
        self.case: Case | None = None

    async def generate(self, request: types.Request) -> AsyncGenerator[types.Delta, None]:
        assert self.case is not None
        for prompt, delta in self.case.deltas:
            if request.id.endswith(f"-{prompt}"):
                yield delta
                await asyncio.sleep(0)


def make_served(rng: random.Random) -> Case:
    """A case that a body can ask for: no echo (ids cannot say it), one prompt (their order is the engine's)."""
    while True:
        case = make(rng)
        if case.prompts == 1 and not case.continuous_usage and (case.deltas or case.trouble):
            return dataclasses.replace(case, echo=("",))


async def test_streams_over_a_socket_are_read_back_exactly() -> None:
    async def over_socket(case: Case) -> None:
        model.case = case
        body: dict[str, Any] = {"model": "fake", "stream": True, "n": case.n, "max_tokens": 100}
        body |= {"stream_options": {"include_usage": case.include_usage}}
        body |= {"messages": [{"role": "user", "content": "x"}]} if case.chat else {"prompt": [1, 2]}
        if case.logprobs:
            body |= {"logprobs": True, "top_logprobs": 2} if case.chat else {"logprobs": 2}
        async with server.http.post(f"/v1/{'chat/' * case.chat}completions", json=body) as response:
            cut = [piece async for piece, _ in response.content.iter_chunks() if piece]
        if case.trouble and len(case.deltas) == 1:
            assert response.status in (500, 503)
            return
        assert response.status == 200
        check_stream(case, cut, "fake")

    model = Scripted()
    async with served(model) as server:
        await fuzz_async("sse over a socket", 250, make_served, over_socket)


@pytest.mark.parametrize(
    "raw",
    [
        b"data: {}\r\n\r\n", b"data:\n\n", b"data: {}\ndata: {}\n\n", b"data: NaN\n\n", b"data: 1\n\n", b"event: x\n\n",
        b"data: [DONE]\n\ndata: {}\n\n", b"data: \xff\n\n", b'data: "\xe2\x80\xa8"\n\n', b"data: {}\n",
    ],
)  # fmt: skip
def test_the_reader_is_strict(raw: bytes) -> None:
    reader = SseReader()
    with pytest.raises((Malformed, ValueError)):
        reader.feed(raw + b"data: [DONE]\n\n")
    for piece in (b": ping\n\n", b"data: {}", b"\n\nda", b"ta: [DONE]\n\n"):
        reader = SseReader() if piece.startswith(b":") else reader
        reader.feed(piece)
    reader.finish()
    assert (reader.events, reader.comments) == ([{}], 1)
