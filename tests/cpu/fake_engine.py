"""A deterministic stand-in for a node: bytes are tokens, answers the alphabet, and each way to misbehave a knob.

Used by test_http only, so that stalls, failures and aborts happen exactly when a test wants them; the real engine has
its own tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fake_call import Merged

from janus_server import types
from janus_server.api.plan import Target
from janus_server.errors import Refused
from janus_server.orders import Stage

BOS, EOS, VOCAB = 256, 257, 300


class ByteTokenizer:
    """Token i < 256 is byte i; 256 begins a text, 257 ends it, the rest spell their number."""

    longest_token_chars = 5
    vocab_size = 300

    strips_first_space = False

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return ([BOS] if add_special else []) + list(text.encode())

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any] | None,
    ) -> list[int]:
        for i, message in enumerate(messages):
            for j, part in enumerate(message["content"] if isinstance(message["content"], list) else ()):
                if part["type"] != "text":
                    raise Refused("only text is served", param=f"messages[{i}].content[{j}].type")
        text = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return [BOS, *text.encode(), *(b"assistant:" if add_generation_prompt else b"")]

    def is_special(self, token: int) -> bool:
        return token >= 256

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special and i >= 256)).decode("utf-8", "replace")


class FakeModel:
    """Answers choice j with letters starting at (seed + j) mod 26, up to max_tokens; a stop id among them ends it.

    gate: nothing is emitted before it is set. stall_at, fail_at, abort_at, bug_at: what happens instead of that token.
    """

    def __init__(self, name: str = "fake", context: int = 512) -> None:
        self.card = types.ModelCard(name, 1_700_000_000, context, 1000, 4000, "float32", "fake")
        self.target = Target(name, context, VOCAB, (EOS,), types.Sampling(temperature=0.7, top_p=0.9))
        self.tokenizer = ByteTokenizer()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failed = False
        self.refusal: Refused | None = None
        self.stall_at = self.fail_at = self.abort_at = self.bug_at = -1
        self.step_s = 0.0
        self.text: str | None = None
        self.requests: list[types.Request] = []
        self.live: set[str] = set()
        self.aborted: list[str] = []

    def submit(
        self, requests: Sequence[types.Request], matchers: Sequence[object] = (), arrived_s: float | None = None
    ) -> Merged:
        return Merged([self.generate(request) for request in requests])

    async def generate(self, request: types.Request) -> AsyncGenerator[types.Delta, None]:
        self.requests.append(request)
        self.live.add(request.id)
        done = False
        try:
            if self.refusal is not None:
                done = True
                raise self.refusal
            await self.gate.wait()
            ended: set[int] = set()
            for step in range(request.max_tokens):
                await asyncio.sleep(self.step_s)
                if step == self.stall_at:
                    await asyncio.Event().wait()
                for index in range(request.n):
                    if index not in ended:
                        delta = self._delta(request, index, step)
                        if delta.finish is not None:
                            ended.add(index)
                        yield delta
                if len(ended) == request.n:
                    break
            done = True
        finally:
            self.live.discard(request.id)
            if not done:
                self.aborted.append(request.id)

    def _delta(self, request: types.Request, index: int, step: int) -> types.Delta:
        if step == self.bug_at:
            raise RuntimeError("secret internals")
        if step == self.fail_at:
            return types.Delta(index, finish=types.FinishReason.ERROR, message="the model failed")
        if step == self.abort_at:
            return types.Delta(index, finish=types.FinishReason.ABORT)
        token = ord("a") + (request.sampling.seed + index + step) % 26
        logprobs: tuple[types.TokenLogprob, ...] = ()
        if request.sampling.logprobs is not None:
            logprobs = (self._logprob(token, step, request.sampling.logprobs),)
        finish = types.FinishReason.LENGTH if step + 1 == request.max_tokens else None
        text = chr(token) if self.text is None else self.text
        stop = text if text in request.stop else None
        if token in request.stop_ids or stop is not None:
            finish, text = types.FinishReason.STOP, ""
        return types.Delta(index, text, (token,), logprobs, finish, cached_tokens=3, stop=stop)

    def _logprob(self, token: int, step: int, k: int) -> types.TokenLogprob:
        """The chosen token is second likeliest; one alternative is half a character, the last is impossible."""
        value = -0.1 * (step + 2) - 1e-9
        top = ((0xE2, -0.05), (token, value), (300 - 1, -2.5), (ord("Z"), -math.inf))
        return types.TokenLogprob(token, value, top[:k])


class FakeNode:
    def __init__(self, *models: FakeModel) -> None:
        self.models = {model.card.id: model for model in models}
        self.reason: str | None = None
        self.trouble: set[str] = set()
        self.operator = None
        self.pool_pages = 100
        self.free_pages = 60

    def ready(self) -> str | None:
        return self.reason

    def refusing(self) -> str | None:
        return self.reason

    async def turning_away(self) -> str | None:
        return self.reason

    @property
    def cards(self) -> dict[str, types.ModelCard]:
        return {name: model.card for name, model in self.models.items()}

    @property
    def prepared(self) -> dict[str, FakeModel]:
        return self.models

    def stages(self) -> dict[str, Stage]:
        return dict.fromkeys(self.models, Stage.ACTIVE)

    def troubled(self) -> set[str]:
        return self.trouble

    async def model(self, name: str) -> FakeModel | None:
        return self.models.get(name)

    def stats(self) -> dict[str, types.BatcherStats]:
        return {name: types.BatcherStats(len(m.live), 2, 1, 20, 10, 500, 300) for name, m in self.models.items()}

    def handed_over(self) -> None:
        return None

    def loads(self) -> dict[str, types.Load]:
        return {name: types.Load(len(m.live) + 2, 1.5) for name, m in self.models.items()}

    def memory(self) -> dict[types.Owner, int]:
        return {
            types.Owner(name, kind): pages
            for name in self.models
            for kind, pages in ((types.PageKind.WEIGHTS, 20), (types.PageKind.KV, 20))
        }


async def settled(condition: Any, within_s: float = 5.0) -> bool:
    """Whether a condition came true before the time was up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)
    return bool(condition())
