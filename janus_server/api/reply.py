"""From `types.Delta`s to the bytes a client reads: whole answers and stream events, chat and completions.

Pure. `http` feeds the deltas of a `Call` in the order they came, and sends what it gets back. A stream event is written
around pieces that are encoded once per call, so that a token costs a few microseconds; whole answers are plain dicts.
No float that JSON cannot hold leaves this file, and a choice ends only with "stop" or "length".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from janus_server import types
from janus_server.api.plan import Call, Kind
from janus_server.errors import Refused, require
from janus_server.tokens.detokenize import Detokenizer

if TYPE_CHECKING:
    from janus_server.tokens.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
UNLIKELY = -9999.0  # what OpenAI writes for a probability too small to say


class Tally:
    """Token counts of one call: prompt tokens once, all choices summed, cached tokens once per prompt."""

    def __init__(self, call: Call) -> None:
        self.prompt = call.prompt_tokens
        self.completion = 0
        self._cached = [0] * len(call.requests)

    def add(self, prompt: int, delta: types.Delta) -> None:
        self.completion += len(delta.tokens)
        if delta.cached_tokens > self._cached[prompt]:
            self._cached[prompt] = delta.cached_tokens

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }


class StreamReply:
    """The events of one streamed call. The role comes with a choice's first event, never before there is a token."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        chat = call.kind is Kind.CHAT
        self._call = call
        self._chat = chat
        self._tally = Tally(call)
        choices = range(_choices(call))
        self._writers = [_LogprobWriter(call, i // call.n, tokenizer) for i in choices] if call.logprobs else []
        self._opened = [False] * _choices(call)
        head = {
            "id": call.label.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": call.label.created_s,
            "model": call.model,
        }
        self._head = b"data: " + _json(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if call.include_usage and not call.continuous_usage else b"}\n\n"

    def events(self, prompt: int, delta: types.Delta) -> bytes:
        """The events for one delta of prompt `prompt`: one, or in chat a second one for the end of a choice."""
        index = prompt * self._call.n + delta.index
        self._tally.add(prompt, delta)
        logprobs = b"null"
        if self._call.logprobs and delta.logprobs:
            logprobs = _json(self._writers[index].entries(delta.logprobs))
        reason = b"null" if delta.finish is None else b'"' + _reason(delta.finish).encode() + b'"'
        if not self._chat:
            text = delta.text if self._opened[index] else self._call.echo[prompt] + delta.text
            self._opened[index] = True
            return self._event(index, b'"text":' + _text(text), logprobs, reason)
        if delta.finish is None:
            return self._event(index, self._chat_delta(index, delta.text), logprobs, reason)
        if not delta.text and self._opened[index]:
            return self._event(index, b'"delta":{}', logprobs, reason)
        return self._event(index, self._chat_delta(index, delta.text), logprobs, b"null") + self._event(
            index, b'"delta":{}', b"null", reason
        )

    def end(self) -> bytes:
        """The last events: the usage when it was asked for, then [DONE]."""
        if not self._call.include_usage:
            return DONE
        return self._head + b'],"usage":' + _json(self._tally.usage()) + b"}\n\n" + DONE

    def error(self, refused: Refused) -> bytes:
        """The events that end a stream which cannot go on; [DONE] follows for clients that know no errors."""
        return b"data: " + _json(error_body(refused)) + b"\n\n" + DONE

    def _chat_delta(self, index: int, text: str) -> bytes:
        if self._opened[index]:
            return b'"delta":{"content":' + _text(text) + b"}"
        self._opened[index] = True
        return b'"delta":{"role":"assistant","content":' + _text(text) + b"}"

    def _event(self, index: int, piece: bytes, logprobs: bytes, reason: bytes) -> bytes:
        tail = self._tail
        if self._call.continuous_usage:
            tail = b',"usage":' + _json(self._tally.usage()) + b"}\n\n"
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head, index, piece, logprobs, reason, tail
        )  # fmt: skip


class WholeReply:
    """The answer of one call that is not streamed, gathered delta by delta."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._tally = Tally(call)
        self._texts: list[list[str]] = [[] for _ in range(_choices(call))]
        self._logprobs: list[list[types.TokenLogprob]] = [[] for _ in range(_choices(call))]
        self._finish: list[types.FinishReason | None] = [None] * _choices(call)

    def add(self, prompt: int, delta: types.Delta) -> None:
        index = prompt * self._call.n + delta.index
        self._tally.add(prompt, delta)
        self._texts[index].append(delta.text)
        self._logprobs[index].extend(delta.logprobs)
        if delta.finish is not None:
            self._finish[index] = delta.finish

    def body(self) -> bytes:
        """The JSON body; every choice must have ended."""
        call = self._call
        return _json(
            {
                "id": call.label.id,
                "object": "chat.completion" if call.kind is Kind.CHAT else "text_completion",
                "created": call.label.created_s,
                "model": call.model,
                "choices": [self._choice(i) for i in range(_choices(call))],
                "usage": self._tally.usage(),
            }
        )

    def _choice(self, index: int) -> dict[str, Any]:
        call = self._call
        finish = self._finish[index]
        require(finish is not None, "a choice is written before it ended")
        text = "".join(self._texts[index])
        echo = call.echo[index // call.n]
        logprobs = None
        if call.logprobs:
            logprobs = _LogprobWriter(call, index // call.n, self._tokenizer).entries(self._logprobs[index])
        end = {"logprobs": logprobs, "finish_reason": _reason(finish)}
        if call.kind is Kind.CHAT:
            return {"index": index, "message": {"role": "assistant", "content": text, "refusal": None}, **end}
        return {"index": index, "text": echo + text, **end}


def error_body(refused: Refused) -> dict[str, Any]:
    """OpenAI's error object; all four keys, always."""
    error = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": error}


def failure(delta: types.Delta) -> Refused | None:
    """The refusal that a delta stands for when its choice ended in trouble; None for text and natural ends."""
    if delta.finish is types.FinishReason.ERROR:
        message = delta.message or "the model failed while it answered"
        return Refused(message, status=500, kind="server_error", code="engine_error")
    if delta.finish is types.FinishReason.ABORT:
        message = delta.message or "the server is shutting down; it ended this request before it was complete"
        return Refused(message, status=503, kind="server_error", code="shutting_down", retry_after_s=1.0)
    return None


def model_entry(card: types.ModelCard) -> dict[str, Any]:
    """One entry of /v1/models: OpenAI's fields, vLLM's max_model_len, and what we know of the weights."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created_s,
        "owned_by": "janus",
        "root": card.id,
        "parent": None,
        "max_model_len": card.context_tokens,
        "meta": {
            "parameters": card.parameters,
            "weight_bytes": card.weight_bytes,
            "dtype": card.dtype,
            "family": card.family,
        },
    }


class _LogprobWriter:
    """Log probabilities of one choice in the shape of its API; remembers where the text of the next token starts.

    Offsets count the text that the client sees: a token that is not shown, and the space that a text loses at its
    start, take no room in it.
    """

    def __init__(self, call: Call, prompt: int, tokenizer: Tokenizer) -> None:
        request = call.requests[prompt]
        self._chat = call.kind is Kind.CHAT
        self._tokenizer = tokenizer
        self._offset = len(call.echo[prompt])
        self._shown = Detokenizer(tokenizer, request.skip_special_tokens, request.prompt)

    def entries(self, logprobs: Sequence[types.TokenLogprob]) -> dict[str, Any]:
        return self._chat_entries(logprobs) if self._chat else self._completion_entries(logprobs)

    def _chat_entries(self, logprobs: Sequence[types.TokenLogprob]) -> dict[str, Any]:
        content = []
        for entry in logprobs:
            top = [self._chat_token(token, value) for token, value in entry.top]
            content.append({**self._chat_token(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, value: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": self._tokenizer.token_text(token), "logprob": _finite(value), "bytes": list(raw)}

    def _completion_entries(self, logprobs: Sequence[types.TokenLogprob]) -> dict[str, Any]:
        tops = []
        offsets = []
        for entry in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._shown.push(entry.token))
            top: dict[str, float] = {}
            for token, value in _with_chosen(entry):
                name = self._name(token)
                # Two ids may spell the same text; a map that lost one of them could lose the likeliest.
                top[name if name not in top else f"token_id:{token}"] = _finite(value)
            tops.append(top)
        return {
            "tokens": [self._name(entry.token) for entry in logprobs],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token as text, or OpenAI's "bytes:\\xNN" form when it holds only part of a character."""
        raw = self._tokenizer.token_bytes(token)
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self._tokenizer.token_text(token)


def _with_chosen(entry: types.TokenLogprob) -> Sequence[tuple[int, float]]:
    """The likeliest tokens and, in completions alone, always the chosen one: k or k + 1 of them, as OpenAI has it.

    With the same float in both places: graders compare the two for equality.
    """
    if any(token == entry.token for token, _ in entry.top):
        return entry.top
    return (*entry.top, (entry.token, entry.logprob))


def _finite(value: float) -> float:
    return value if value > UNLIKELY else UNLIKELY  # NaN compares false, and is as unlikely


def _reason(finish: types.FinishReason | None) -> str:
    require(finish in (types.FinishReason.STOP, types.FinishReason.LENGTH), "an abnormal end reached the answer")
    return "stop" if finish is types.FinishReason.STOP else "length"


def _choices(call: Call) -> int:
    return call.n * len(call.requests)


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _text(text: str) -> bytes:
    """A JSON string. Separators that some line readers take for a line end are escaped, so no event is ever cut."""
    encoded = msgspec.json.encode(text)
    if text.isascii():
        return encoded
    for raw, escaped in ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")):
        encoded = encoded.replace(raw, escaped)
    return encoded
