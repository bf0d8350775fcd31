"""The events of one answer, turned into token times, counts, and the verdict on how it ended.

`connection` feeds body pieces with the moment they arrived. Pure: the clock is the caller's. The rules that keep the
figures honest live here: a token is an event that carries something a model made; a role, an empty text, a finish
reason or a usage alone is none. An answer is good only if every choice finished, no error event came, and the body
ended by its framing.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import msgspec

from .wire import SseParser

_KEPT_ERROR_BYTES: Final = 16 << 10


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None
    type: str | None = None


class ChunkDecoder:
    """The typed JSON decoder that all answers of a run share; it keeps no state between events."""

    def __init__(self) -> None:
        self.decode = msgspec.json.Decoder(_Chunk).decode


class Reading:
    """One answer of one choice as it arrives. After `end` or `cut`, `failure` is None or a word, and figures are final.

    finish_s is when the finish reason came. wants_text keeps the generated text.
    """

    __slots__ = (
        "_decoder", "_done", "_error_body", "_running", "_sse", "_status", "_usage_before", "cached_tokens", "carried",
        "completion_tokens", "detail", "event_tokens", "failure", "finish", "finish_s", "first_s", "gaps_s", "last_s",
        "prompt_tokens", "texts",
    )  # fmt: skip

    def __init__(self, decoder: ChunkDecoder, *, wants_text: bool = False) -> None:
        self._decoder = decoder.decode
        self._sse = SseParser()
        self._status = 0
        self._done = False
        self._running = False
        self._error_body = b""
        self._usage_before = 0
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.gaps_s = array("f")
        self.carried = array("H")
        self.event_tokens = 0
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish: str | None = None
        self.finish_s: float | None = None
        self.failure: str | None = None
        self.detail = ""
        self.texts: list[str] | None = [] if wants_text else None

    def head(self, status: int, content_type: str) -> None:
        """The response's head has arrived."""
        self._status = status
        if status == 200 and not content_type.lower().startswith("text/event-stream"):
            self._fail("not_a_stream", f"the answer is {content_type or 'of no stated type'}, not text/event-stream")

    def body(self, piece: bytes, now_s: float) -> int:
        """Take a piece of the body that arrived at now_s; how many tokens it brought."""
        if self._status != 200 or self.failure == "not_a_stream":
            self._error_body = (self._error_body + piece)[:_KEPT_ERROR_BYTES]
            return 0
        before = self.event_tokens
        for event in self._sse.feed(piece):
            if event.data == b"[DONE]":
                self._done = True
            elif self._done:
                self._fail("bad_stream", "an event after [DONE]")
            else:
                self._take(event.data, event.name, now_s)
        return self.event_tokens - before

    def end(self) -> None:
        """The response ended by its framing."""
        if self._status != 200:
            self._refused()
        elif self.failure is None and self.finish is None:
            said = "[DONE] came" if self._done else "the stream ended"
            self._fail("no_finish", f"{said} without a finish reason")
        elif self.failure is None and self.event_tokens == 0:
            self._fail("no_tokens", "the stream finished without a token")

    def cut(self, reason: str, message: str) -> None:
        """The response will not end: the connection broke, time ran out, or the bytes made no sense."""
        self._fail(reason, message)
        if self._status not in (0, 200):
            self._refused()

    def _take(self, data: bytes, name: str, now_s: float) -> None:
        try:
            chunk = self._decoder(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("bad_event", f"{error}: {data[:120]!r}")
            return
        if chunk.error is not None or name == "error" or chunk.object == "error":
            kind, message = _error_words(chunk, data)
            self._fail(f"error_event:{kind}" if kind else "error_event", message)
            return
        tokens = 0
        for choice in chunk.choices or ():
            tokens += self._take_choice(choice, now_s)
        if chunk.usage is not None:
            tokens = self._take_usage(chunk.usage, tokens, bool(chunk.choices))
        if tokens:
            self._arrived(tokens, now_s)

    def _take_choice(self, choice: _Choice, now_s: float) -> int:
        """How many tokens this choice brings: as many ids as it shows, else one if it shows anything at all."""
        if choice.finish_reason is not None:
            self.finish, self.finish_s = choice.finish_reason, now_s
            if choice.finish_reason in ("error", "abort"):
                self._fail(f"finish:{choice.finish_reason}", f"finish_reason {choice.finish_reason!r}")
        text = choice.text
        delta = choice.delta
        made = bool(text)
        if delta is not None:
            text = delta.content or delta.reasoning_content or delta.reasoning or delta.refusal
            made = bool(text) or bool(delta.tool_calls)
        if self.texts is not None and text:
            self.texts.append(text)
        if choice.token_ids is not None:
            return len(choice.token_ids)
        return int(made)

    def _take_usage(self, usage: _Usage, tokens: int, has_choices: bool) -> int:
        """Note the counts. Running counts say how many tokens an event brought, text to show or not.

        Counts run when the first token's event has one already; a count that comes on the last event alone is the sum.
        """
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens is None:
            return tokens
        grown = usage.completion_tokens - self._usage_before
        self.completion_tokens = self._usage_before = usage.completion_tokens
        if not has_choices or (self.event_tokens > 0 and not self._running):
            return tokens
        self._running = self._running or grown > 0
        return max(grown, 0)

    def _arrived(self, tokens: int, now_s: float) -> None:
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        self.event_tokens += tokens
        if self.carried or tokens != 1:
            # Kept only once an event has carried more than one: the usual list of ones is left implicit.
            self.carried.extend([1] * (len(self.gaps_s) - len(self.carried)))
            self.carried.append(min(tokens, 65535))

    def _refused(self) -> None:
        try:
            error = msgspec.json.decode(self._error_body, type=_Chunk)
            kind, message = _error_words(error, self._error_body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            kind, message = "", self._error_body[:200].decode(errors="replace")
        self.failure = f"http_{self._status}:{kind}" if kind else f"http_{self._status}"
        self.detail = message

    def _fail(self, reason: str, message: str) -> None:
        """The first trouble is the one that is told."""
        if self.failure is None:
            self.failure, self.detail = reason, message


def _error_words(chunk: _Chunk, data: bytes) -> tuple[str, str]:
    """A short kind to count by, and the message, from the shapes that servers use for errors."""
    error = chunk.error
    if isinstance(error, dict):
        kind = error.get("code") or error.get("type") or ""
        return str(kind)[:60], str(error.get("message", ""))[:500]
    if isinstance(error, str):
        return "", error[:500]
    return (chunk.type or "")[:60], (chunk.message or data[:200].decode(errors="replace"))[:500]
