"""The answers of /v1/messages: one message, or the events that build it up; and errors in Anthropic's form.

Pure. `http` makes a `WholeMessage` or a `StreamMessage` of each call and feeds it the call's deltas; `edge` writes the
errors of these routes with `messages_error`. A stream ends with message_stop or with an error, and has no [DONE].
"""

from __future__ import annotations

from typing import Any

import msgspec

from janus_server import types
from janus_server.api.plan import Call
from janus_server.api.reply import Tally, error_body
from janus_server.api.speech import Piece, Said, Thought, ToolArguments, ToolOpened
from janus_server.api.translation import Listener, event
from janus_server.errors import Refused, require

PREFIX = "msg_"

_ERRORS: tuple[tuple[int, str], ...] = (
    (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"), (413, "request_too_large"),
    (429, "rate_limit_error"), (503, "overloaded_error"), (504, "timeout_error"),
)  # fmt: skip


class WholeMessage:
    """The message of one call that is not streamed. Only its end tells which tool calls were any."""

    def __init__(self, call: Call, _: object) -> None:
        self._call = call
        self._tally = Tally(call)
        self._listener = Listener(call)
        self._pieces: list[Piece] = []
        self._stop: str | None = None

    def add(self, prompt: int, delta: types.Delta) -> None:
        self._tally.add(prompt, delta)
        self._pieces.extend(self._listener.hear(delta).pieces)
        self._stop = delta.stop

    def body(self) -> bytes:
        blocks: list[_Block] = []
        for piece in self._listener.settled(self._pieces):
            if not blocks or not blocks[-1].takes(piece):
                blocks.append(_Block(piece))
            blocks[-1].add(piece)
        blocks = blocks or [_Block(Said(""))]  # clients look for a block, be it empty
        ends = _ends(self._listener.finish, self._stop, self._listener.called)
        content = [block.written() for block in blocks]
        return msgspec.json.encode(_message(self._call, content, ends, _usage(self._tally)))


class StreamMessage:
    """The events of one streamed call."""

    def __init__(self, call: Call, _: object) -> None:
        self._call = call
        self._tally = Tally(call)
        self._listener = Listener(call)
        self._block: _Block | None = None
        self._index = -1
        self._begun = False
        self._stop: str | None = None

    def events(self, prompt: int, delta: types.Delta) -> bytes:
        self._tally.add(prompt, delta)
        self._stop = delta.stop
        events = []
        if not self._begun:
            self._begun = True
            usage = {**_usage(self._tally), "output_tokens": 0}
            none = {"stop_reason": None, "stop_sequence": None}
            events.append(_event("message_start", message=_message(self._call, [], none, usage)))
        for piece in self._listener.hear(delta).pieces:
            events.append(self._write(piece))
        if delta.finish is not None:
            if self._block is None:
                events.append(self._open(Said("")))
            events.append(self._close())
        return b"".join(events)

    def end(self) -> bytes:
        ends = _ends(self._listener.finish, self._stop, self._listener.called_well)
        return _event("message_delta", delta=ends, usage=_usage(self._tally)) + _event("message_stop")

    def error(self, refused: Refused) -> bytes:
        return event("error", messages_error(refused))

    def _write(self, piece: Piece) -> bytes:
        opened = b""
        if self._block is None or not self._block.takes(piece):
            opened = self._close() + self._open(piece)
        change = _change(piece)
        return opened if change is None else opened + _event("content_block_delta", index=self._index, delta=change)

    def _open(self, piece: Piece) -> bytes:
        self._block = _Block(piece)
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=self._block.written())

    def _close(self) -> bytes:
        return b"" if self._block is None else _event("content_block_stop", index=self._index)


def messages_error(refused: Refused) -> dict[str, Any]:
    """Anthropic's error object. Ours has param and code too, so that a client can find its field."""
    usual = "invalid_request_error" if refused.status < 500 else "api_error"
    kind = next((kind for status, kind in _ERRORS if status == refused.status), usual)
    return {"type": "error", "error": {**error_body(refused)["error"], "type": kind}}


class _Block:
    """One block of the content, begun by its first piece."""

    def __init__(self, first: Piece) -> None:
        self._first = first
        self._texts: list[str] = []

    def takes(self, piece: Piece) -> bool:
        """Whether a piece continues this block."""
        match self._first, piece:
            case (Said(), Said()) | (Thought(), Thought()):
                return True
            case ToolOpened(opened), ToolArguments(number):
                return opened == number
        return False

    def add(self, piece: Piece) -> None:
        if not isinstance(piece, ToolOpened):
            self._texts.append(piece.text)

    def written(self) -> dict[str, Any]:
        """The block with what was added to it."""
        text = "".join(self._texts)
        match self._first:
            case Said():
                return {"type": "text", "text": text}
            case Thought():
                # The signature proves to Anthropic who thought it; nobody here asks.
                return {"type": "thinking", "thinking": text, "signature": ""}
            case ToolOpened(_, call_id, name):
                return {"type": "tool_use", "id": call_id, "name": name, "input": _object(text)}
        require(False, "arguments without a tool call")
        return {}


def _change(piece: Piece) -> dict[str, Any] | None:
    match piece:
        case Said(text):
            return {"type": "text_delta", "text": text}
        case Thought(text):
            return {"type": "thinking_delta", "thinking": text}
        case ToolArguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}
        case _:
            return None


def _object(text: str) -> Any:
    """A tool's input. What the limit cut short is no JSON, and max_tokens says so."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _ends(finish: types.FinishReason | None, stop: str | None, called: bool) -> dict[str, Any]:
    require(finish is not None, "a message is written before it ended")
    if finish is types.FinishReason.LENGTH:
        reason = "max_tokens"
    elif stop is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop}


def _message(call: Call, content: list[Any], ends: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
    head = {"id": call.label.id, "type": "message", "role": "assistant", "model": call.model}
    return {**head, "content": content, **ends, "usage": usage}


def _usage(tally: Tally) -> dict[str, int]:
    """Anthropic counts cached tokens apart from the others of the prompt."""
    usage = tally.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _event(name: str, **fields: Any) -> bytes:
    return event(name, {"type": name, **fields})
