"""From `types.Delta`s to the answers of chat: messages and their chunks, with reasoning and tool calls where a call has
them.

Pure. `http` feeds the deltas of a `Call` in the order they came. Most calls have a style that cuts nothing: their text
goes straight into chunks, and a token costs a few microseconds. All others go through a `Speech` per choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from janus_server import types
from janus_server.api.plan import Call
from janus_server.api.reply import Frame, Tally, choices_of, finite, json_bytes, reason_of
from janus_server.api.speech import Piece, Said, Speech, Style, Thought, ToolArguments, ToolOpened, gathered
from janus_server.errors import Refused, require

if TYPE_CHECKING:
    from janus_server.tokens.tokenizer import Tokenizer


class StreamChat:
    """The events of one streamed chat call. The role comes with a choice's first event, never before there is text."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._tally = Tally(call)
        self._frame = Frame(call, "chat.completion.chunk", self._tally)
        self._opened = [False] * choices_of(call)
        self._cutters = _cutters(call)
        # Log probabilities of tokens whose text is still held back.
        self._waiting: list[list[types.TokenLogprob]] = [[] for _ in self._cutters]

    def events(self, prompt: int, delta: types.Delta) -> bytes:
        """The events for one delta of prompt `prompt`: often one; none while all of its text is held back."""
        index = prompt * self._call.n + delta.index
        self._tally.add(prompt, delta)
        if self._cutters:
            return self._cut(index, delta)
        logprobs = b"null"
        if self._call.logprobs and delta.logprobs:
            logprobs = json_bytes(_logprobs(delta.logprobs, self._tokenizer))
        if delta.finish is None:
            return self._frame.event(index, self._said(index, delta.text), logprobs, b"null")
        reason = b'"' + reason_of(delta.finish).encode() + b'"'
        if not delta.text and self._opened[index]:
            return self._frame.event(index, b'"delta":{}', logprobs, reason)
        return self._frame.event(index, self._said(index, delta.text), logprobs, b"null") + self._frame.event(
            index, b'"delta":{}', b"null", reason
        )

    def end(self) -> bytes:
        """The last events: the usage when it was asked for, then [DONE]."""
        return self._frame.end()

    def error(self, refused: Refused) -> bytes:
        """The events that end a stream which cannot go on; [DONE] follows for clients that know no errors."""
        return self._frame.error(refused)

    def _said(self, index: int, text: str) -> bytes:
        if self._opened[index]:
            return b'"delta":{"content":' + json_bytes(text) + b"}"
        self._opened[index] = True
        return b'"delta":{"role":"assistant","content":' + json_bytes(text) + b"}"

    def _cut(self, index: int, delta: types.Delta) -> bytes:
        cutter = self._cutters[index]
        pieces = cutter.push(delta, self._tally)
        self._waiting[index].extend(delta.logprobs)
        events = [self._frame.event(index, self._piece(index, piece), self._take(index), b"null") for piece in pieces]
        if delta.finish is not None:
            if not self._opened[index]:
                events.append(self._frame.event(index, self._said(index, ""), self._take(index), b"null"))
            reason = b'"' + cutter.streamed_reason(delta.finish).encode() + b'"'
            events.append(self._frame.event(index, b'"delta":{}', self._take(index), reason))
        return b"".join(events)

    def _piece(self, index: int, piece: Piece) -> bytes:
        """A piece as a delta; the first one of a choice has the role, and says that there is no content yet."""
        match piece:
            case Said(text):
                return self._said(index, text)
            case Thought(text):
                written = json_bytes(text)
                fields = b'"reasoning_content":%b,"reasoning":%b' % (written, written)
            case ToolOpened(number, call_id, name):
                function = b'"type":"function","function":{"name":%b,"arguments":""}' % json_bytes(name)
                fields = b'"tool_calls":[{"index":%d,"id":%b,%b}]' % (number, json_bytes(call_id), function)
            case ToolArguments(number, text):
                fields = b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (number, json_bytes(text))
        role = b"" if self._opened[index] else b'"role":"assistant","content":null,'
        self._opened[index] = True
        return b'"delta":{%b%b}' % (role, fields)

    def _take(self, index: int) -> bytes:
        """The waiting log probabilities of a choice, for the event that its text comes with."""
        waiting, self._waiting[index] = self._waiting[index], []
        return json_bytes(_logprobs(waiting, self._tokenizer)) if waiting and self._call.logprobs else b"null"


class WholeChat:
    """The answer of one chat call that is not streamed, gathered delta by delta."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._tally = Tally(call)
        self._cutters = _cutters(call)
        self._pieces: list[list[Piece]] = [[] for _ in self._cutters]
        self._texts: list[list[str]] = [[] for _ in range(choices_of(call))]
        self._logprobs: list[list[types.TokenLogprob]] = [[] for _ in range(choices_of(call))]
        self._finish: list[types.FinishReason | None] = [None] * choices_of(call)

    def add(self, prompt: int, delta: types.Delta) -> None:
        index = prompt * self._call.n + delta.index
        self._tally.add(prompt, delta)
        if self._cutters:
            self._pieces[index].extend(self._cutters[index].push(delta, self._tally))
        else:
            self._texts[index].append(delta.text)
        self._logprobs[index].extend(delta.logprobs)
        if delta.finish is not None:
            self._finish[index] = delta.finish

    def body(self) -> bytes:
        """The JSON body; every choice must have ended."""
        call = self._call
        return json_bytes(
            {
                "id": call.label.id,
                "object": "chat.completion",
                "created": call.label.created_s,
                "model": call.model,
                "choices": [self._choice(i) for i in range(choices_of(call))],
                "usage": self._tally.usage(),
            }
        )

    def _choice(self, index: int) -> dict[str, Any]:
        finish = self._finish[index]
        require(finish is not None, "a choice is written before it ended")
        reason = reason_of(finish)
        message = {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None}
        if self._cutters:
            message, reason = self._message(index, reason)
        logprobs = _logprobs(self._logprobs[index], self._tokenizer) if self._call.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _message(self, index: int, reason: str) -> tuple[dict[str, Any], str]:
        """The message of a choice that was cut, and why it ended."""
        style = self._call.style
        told = gathered(self._pieces[index], self._cutters[index].lost(self._finish[index]))
        content = told.content or (None if told.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if style.reasoning:
            message["reasoning_content"] = message["reasoning"] = told.reasoning or None
        if told.calls:
            message["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in told.calls
            ]
        calls = bool(told.calls) and not style.named and reason == "stop"
        return message, "tool_calls" if calls else reason


class _Cutter:
    """The speech of one choice, fed with its deltas."""

    def __init__(self, style: Style, key: str) -> None:
        self._style = style
        self._speech = Speech(style, key)

    def push(self, delta: types.Delta, tally: Tally) -> list[Piece]:
        if self._speech.thinking and tally.reasoning is not None:
            tally.reasoning += len(delta.tokens)
        pieces = self._speech.push(delta.text) if delta.text else []
        return pieces if delta.finish is None else [*pieces, *self._speech.finish()]

    def lost(self, finish: types.FinishReason | None) -> dict[int, str]:
        """Calls that are none, with their text. One that the limit cut off stays a call."""
        cut = finish is types.FinishReason.LENGTH
        return self._speech.broken if cut else self._speech.broken | self._speech.incomplete

    def streamed_reason(self, finish: types.FinishReason) -> str:
        """Why a streamed choice ended: it does not tell of tool calls where one that was begun came to nothing."""
        calls = self._speech.calls > 0 and not self.lost(finish) and not self._style.named
        return "tool_calls" if calls and finish is types.FinishReason.STOP else reason_of(finish)


def _cutters(call: Call) -> list[_Cutter]:
    """One for each choice, or none where the style of the call cuts nothing."""
    if call.style == Style():
        return []
    return [_Cutter(call.style, f"{call.label.id} {index}") for index in range(choices_of(call))]


def _logprobs(entries: Sequence[types.TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    return {"content": [told_logprob(entry, tokenizer) for entry in entries], "refusal": None}


def told_logprob(entry: types.TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """The log probability of one token as OpenAI's APIs for messages tell it."""
    top = [_token(token, value, tokenizer) for token, value in entry.top]
    return {**_token(entry.token, entry.logprob, tokenizer), "top_logprobs": top}


def _token(token: int, value: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": tokenizer.token_text(token), "logprob": finite(value), "bytes": list(raw)}
