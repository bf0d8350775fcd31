"""The answers of /v1/responses: one response object, or the events that build it up.

Pure. `http` makes a `WholeResponse` or a `StreamResponse` of each call and feeds it the call's deltas. Both watch the
same `_Draft` grow: the output's items, each opened, written and closed in turn. Ids are made of the call's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from janus_server import types
from janus_server.api.chat_reply import told_logprob
from janus_server.api.plan import Call
from janus_server.api.reply import Tally, error_body
from janus_server.api.responses import ResponsesBody
from janus_server.api.speech import Piece, Said, Thought, ToolArguments, ToolOpened
from janus_server.api.translation import Heard, Listener, event
from janus_server.errors import Refused, require

if TYPE_CHECKING:
    from janus_server.tokens.tokenizer import Tokenizer

PREFIX = "resp_"

Emit = Callable[[str, dict[str, Any]], None]


class WholeResponse:
    """The response object of one call that is not streamed. Only its end tells which tool calls were any."""

    def __init__(self, body: ResponsesBody, call: Call, tokenizer: Tokenizer) -> None:
        self._draft = _Draft(body, call, tokenizer, _unheard)
        self._listener = Listener(call)
        self._heard: list[Heard] = []

    def add(self, prompt: int, delta: types.Delta) -> None:
        self._heard.append(self._listener.hear(delta))

    def body(self) -> bytes:
        for heard in self._heard:
            settled = list(self._listener.settled(heard.pieces))
            self._draft.take(msgspec.structs.replace(heard, pieces=settled))
        return msgspec.json.encode(self._draft.ended())


class StreamResponse:
    """The events of one streamed call, numbered. They end with the response: completed, incomplete or failed."""

    def __init__(self, body: ResponsesBody, call: Call, tokenizer: Tokenizer) -> None:
        self._draft = _Draft(body, call, tokenizer, self._emit)
        self._listener = Listener(call)
        self._events: list[bytes] = []
        self._number = 0

    def events(self, prompt: int, delta: types.Delta) -> bytes:
        self._begin()
        self._draft.take(self._listener.hear(delta))
        return self._written()

    def end(self) -> bytes:
        response = self._draft.ended()
        self._emit(f"response.{response['status']}", {"response": response})
        return self._written()

    def error(self, refused: Refused) -> bytes:
        """What ends a stream that cannot go on: the failed response, then the error.

        The error has OpenAI's documented fields, and the object that its clients raise on.
        """
        self._begin()
        self._emit("response.failed", {"response": self._draft.failed(refused)})
        flat = {"code": refused.code, "message": refused.message, "param": refused.param}
        self._emit("error", {**flat, **error_body(refused)})
        return self._written()

    def _begin(self) -> None:
        if self._number == 0:
            for name in ("response.created", "response.in_progress"):
                self._emit(name, {"response": self._draft.response("in_progress")})

    def _emit(self, name: str, fields: dict[str, Any]) -> None:
        self._events.append(event(name, {"type": name, "sequence_number": self._number, **fields}))
        self._number += 1

    def _written(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)


class _Draft:
    """The output items of one call as they grow; `emit` hears of every change."""

    def __init__(self, body: ResponsesBody, call: Call, tokenizer: Tokenizer, emit: Emit) -> None:
        self._body = body
        self._call = call
        self._tokenizer = tokenizer
        self._emit = emit
        self._tally = Tally(call)
        self._items: list[_Item] = []
        self._finish: types.FinishReason | None = None
        self._reasoning_tokens = 0
        self._lost: Mapping[int, str] = {}
        # Log probabilities whose text is still held back.
        self._waiting: list[dict[str, Any]] = []

    def take(self, heard: Heard) -> None:
        """The next news of the one choice."""
        delta = heard.delta
        self._lost = heard.lost
        self._tally.add(0, delta)
        if heard.thought:
            self._reasoning_tokens += len(delta.tokens)
        elif self._call.logprobs:
            self._waiting.extend(told_logprob(entry, self._tokenizer) for entry in delta.logprobs)
        for piece in heard.pieces:
            self._write(piece)
        if delta.finish is not None:
            self._finish = delta.finish
            if not self._items:  # clients look for a message, be it empty
                self._open("message", {})
            self._close("completed" if delta.finish is types.FinishReason.STOP else "incomplete")

    def ended(self) -> dict[str, Any]:
        """The response of a call whose choice has ended."""
        require(self._finish is not None, "a response is written before it ended")
        if self._finish is types.FinishReason.STOP:
            return self.response("completed", usage=self._usage())
        cut = {"reason": "max_output_tokens"}
        return self.response("incomplete", incomplete_details=cut, usage=self._usage())

    def failed(self, refused: Refused) -> dict[str, Any]:
        """The response of a call that ended in trouble, with what there was of it."""
        code = "rate_limit_exceeded" if refused.status == 429 else "server_error"
        return self.response("failed", error={"code": code, "message": refused.message}, usage=self._usage())

    def response(self, status: str, **ends: Any) -> dict[str, Any]:
        """OpenAI's response object: what was asked, and what there is of the answer."""
        body, call = self._body, self._call
        sampling = call.requests[0].sampling
        return {
            "id": call.label.id,
            "object": "response",
            "created_at": call.label.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": body.model,
            "output": [item.written() for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature if body.temperature is None else body.temperature,
            "text": _text_options(body),
            "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            "tools": [msgspec.to_builtins(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **ends,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._tally.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    # The items

    def _write(self, piece: Piece) -> None:
        logprobs, self._waiting = self._waiting, []  # only an answer's text tells them
        match piece:
            case Said(text):
                self._part("message").append(text, self._emit, logprobs)
            case Thought(text):
                self._part("reasoning").append(text, self._emit, [])
            case ToolOpened(number, call_id, name):
                self._open("function_call", {"call_id": call_id, "name": name}, number)
            case ToolArguments(_, text):
                require(self._is_open("function_call"), "arguments without a tool call")
                self._items[-1].append(text, self._emit, [])

    def _part(self, kind: str) -> _Item:
        return self._items[-1] if self._is_open(kind) else self._open(kind, {})

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1].kind == kind and self._items[-1].status == "in_progress"

    def _open(self, kind: str, fields: Mapping[str, str], number: int | None = None) -> _Item:
        self._close("completed")
        item = _Item(kind, len(self._items), self._call.label.id.removeprefix(PREFIX), fields, number)
        self._items.append(item)
        item.open(self._emit)
        return item

    def _close(self, status: str) -> None:
        if self._items and self._items[-1].status == "in_progress":
            lost = self._items[-1].number in self._lost
            self._items[-1].close("incomplete" if lost else status, self._emit, self._waiting)


# How the text of each kind of item is called: the prefix of the item's id, and the event that tells of more of it.
_KINDS: tuple[tuple[str, str, str], ...] = (
    ("message", "msg", "output_text"),
    ("reasoning", "rs", "reasoning_text"),
    ("function_call", "fc", "function_call_arguments"),
)


class _Item:
    """One item of the output; its one text arrives piece by piece. number is that of a tool call."""

    def __init__(self, kind: str, index: int, suffix: str, fields: Mapping[str, str], number: int | None) -> None:
        _, prefix, self._text_name = next(entry for entry in _KINDS if entry[0] == kind)
        self.kind = kind
        self.status = "in_progress"
        self.number = number
        self._index = index
        self._id = f"{prefix}_{suffix}_{index}"
        self._fields = fields
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def open(self, emit: Emit) -> None:
        empty: dict[str, Any] = {} if self.kind == "function_call" else {"content": []}
        emit("response.output_item.added", {"output_index": self._index, "item": {**self.written(), **empty}})
        if self.kind != "function_call":
            emit("response.content_part.added", {**self._place(), "part": self._part()})

    def append(self, text: str, emit: Emit, logprobs: Sequence[dict[str, Any]]) -> None:
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        told = {"logprobs": logprobs} if self.kind == "message" else {}
        emit(f"response.{self._text_name}.delta", {**self._place(), "delta": text, **told})

    def close(self, status: str, emit: Emit, logprobs: Sequence[dict[str, Any]]) -> None:
        self.status = status
        self._logprobs.extend(logprobs)
        text = "".join(self._texts)
        if self.kind == "function_call":
            done = {"arguments": text, "name": self._fields["name"]}
            emit("response.function_call_arguments.done", {**self._place(), **done})
        else:
            told = {"logprobs": self._logprobs} if self.kind == "message" else {}
            emit(f"response.{self._text_name}.done", {**self._place(), "text": text, **told})
            emit("response.content_part.done", {**self._place(), "part": self._part()})
        emit("response.output_item.done", {"output_index": self._index, "item": self.written()})

    def written(self) -> dict[str, Any]:
        """The item as it stands."""
        head = {"id": self._id, "type": self.kind, "status": self.status}
        match self.kind:
            case "message":
                return {**head, "role": "assistant", "content": [self._part()]}
            case "reasoning":
                return {**head, "summary": [], "content": [self._part()]}
            case _:
                return {**head, **self._fields, "arguments": "".join(self._texts)}

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if self.kind == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        return {"type": "reasoning_text", "text": text}

    def _place(self) -> dict[str, Any]:
        part = {} if self.kind == "function_call" else {"content_index": 0}
        return {"item_id": self._id, "output_index": self._index, **part}


def _text_options(body: ResponsesBody) -> dict[str, Any]:
    given = body.text.format if body.text is not None else None
    if given is None or given.type != "json_schema":  # what else stands there was not looked at
        held = {"type": "text" if given is None else given.type}
    else:
        held = msgspec.to_builtins(given)
    options: dict[str, Any] = {"format": {name: value for name, value in held.items() if value is not None}}
    if body.text is not None and body.text.verbosity is not None:
        options["verbosity"] = body.text.verbosity
    return options


def _unheard(name: str, fields: dict[str, Any]) -> None:
    """Nobody listens while the answer is gathered whole."""
