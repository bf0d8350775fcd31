"""From `types.Delta`s to the bytes a client reads: the answers of completions, and what all answers share.

Pure. `http` feeds the deltas of a `Call` in the order they came, and sends what it gets back; chat has `chat_reply`. A
stream event is written around pieces that are encoded once per call, so that a token costs a few microseconds; whole
answers are plain dicts. No float that JSON cannot hold leaves this file, and no choice ends in a word that is not
OpenAI's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from janus_server import types
from janus_server.api.plan import Call
from janus_server.errors import Refused, require
from janus_server.tokens.detokenize import Detokenizer

if TYPE_CHECKING:
    from janus_server.tokens.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
UNLIKELY = -9999.0  # what OpenAI writes for a probability too small to say


class Tally:
    """Token counts of one call: prompt tokens once, all choices summed, cached tokens once per prompt.

    reasoning counts those that were drawn inside a thought; None where nobody looks.
    """

    def __init__(self, call: Call) -> None:
        self.prompt = call.prompt_tokens
        self.completion = 0
        self.reasoning: int | None = 0 if call.style.reasoning else None
        self._cached = [0] * len(call.requests)

    def add(self, prompt: int, delta: types.Delta) -> None:
        self.completion += len(delta.tokens)
        if delta.cached_tokens > self._cached[prompt]:
            self._cached[prompt] = delta.cached_tokens

    def usage(self) -> dict[str, Any]:
        thoughts = {} if self.reasoning is None else {"completion_tokens_details": {"reasoning_tokens": self.reasoning}}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            **thoughts,
        }


class StreamReply:
    """The events of one streamed completion call."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tally = Tally(call)
        choices = range(choices_of(call))
        self._writers = [_LogprobWriter(call, i // call.n, tokenizer) for i in choices] if call.logprobs else []
        self._opened = [False] * choices_of(call)
        self._scored: list[dict[str, list[Any]]] = [{}] * len(call.requests)
        self._frame = Frame(call, "text_completion", self._tally)

    def events(self, prompt: int, delta: types.Delta) -> bytes:
        """The event for one delta of prompt `prompt`. An echoed prompt and its scores come with a choice's first."""
        index = prompt * self._call.n + delta.index
        self._tally.add(prompt, delta)
        logprobs = b"null"
        first = not self._opened[index]
        if self._call.logprobs and first and self._call.requests[prompt].prompt_logprobs is not None:
            writer = self._writers[index]
            if not self._scored[prompt]:
                self._scored[prompt] = writer.prompt_entries(delta.prompt_logprobs)
            logprobs = json_bytes(_joined(self._scored[prompt], writer.entries(delta.logprobs)))
        elif self._call.logprobs and delta.logprobs:
            logprobs = json_bytes(self._writers[index].entries(delta.logprobs))
        reason = b"null" if delta.finish is None else b'"' + reason_of(delta.finish).encode() + b'"'
        text = self._call.echo[prompt] + delta.text if first else delta.text
        self._opened[index] = True
        return self._frame.event(index, b'"text":' + json_bytes(text), logprobs, reason)

    def end(self) -> bytes:
        """The last events: the usage when it was asked for, then [DONE]."""
        return self._frame.end()

    def error(self, refused: Refused) -> bytes:
        """The events that end a stream which cannot go on; [DONE] follows for clients that know no errors."""
        return self._frame.error(refused)


class Frame:
    """What surrounds each event of one stream: the same for all of them but for the usage, where that is asked for."""

    def __init__(self, call: Call, kind: str, tally: Tally) -> None:
        head = {"id": call.label.id, "object": kind, "created": call.label.created_s, "model": call.model}
        self._head = b"data: " + json_bytes(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if call.include_usage and not call.continuous_usage else b"}\n\n"
        self._tally = tally
        self._include_usage = call.include_usage
        self._continuous_usage = call.continuous_usage

    def event(self, index: int, piece: bytes, logprobs: bytes, reason: bytes) -> bytes:
        tail = self._tail
        if self._continuous_usage:
            tail = b',"usage":' + json_bytes(self._tally.usage()) + b"}\n\n"
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head, index, piece, logprobs, reason, tail
        )  # fmt: skip

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + json_bytes(self._tally.usage()) + b"}\n\n" + DONE

    def error(self, refused: Refused) -> bytes:
        return b"data: " + json_bytes(error_body(refused)) + b"\n\n" + DONE


class WholeReply:
    """The answer of one completion call that is not streamed, gathered delta by delta.

    Where more choices were made than are shown, the ones with the highest mean log probability a token are.
    """

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._tally = Tally(call)
        self._texts: list[list[str]] = [[] for _ in range(choices_of(call))]
        self._logprobs: list[list[types.TokenLogprob]] = [[] for _ in range(choices_of(call))]
        self._finish: list[types.FinishReason | None] = [None] * choices_of(call)
        self._scores: list[tuple[types.TokenLogprob, ...]] = [()] * len(call.requests)

    def add(self, prompt: int, delta: types.Delta) -> None:
        index = prompt * self._call.n + delta.index
        self._tally.add(prompt, delta)
        self._texts[index].append(delta.text)
        self._logprobs[index].extend(delta.logprobs)
        self._scores[prompt] += delta.prompt_logprobs
        if delta.finish is not None:
            self._finish[index] = delta.finish

    def body(self) -> bytes:
        """The JSON body; every choice must have ended."""
        call = self._call
        return json_bytes(
            {
                "id": call.label.id,
                "object": "text_completion",
                "created": call.label.created_s,
                "model": call.model,
                "choices": [self._choice(number, index) for number, index in enumerate(self._shown())],
                "usage": self._tally.usage(),
            }
        )

    def _shown(self) -> list[int]:
        """The choices that are shown, in the order in which they are."""
        shown: list[int] = []
        for prompt in range(len(self._call.requests)):
            choices = range(prompt * self._call.n, (prompt + 1) * self._call.n)
            ranked = choices if self._call.best is None else sorted(choices, key=self._likelihood, reverse=True)
            shown += ranked[: self._call.best]
        return shown

    def _likelihood(self, index: int) -> float:
        """The mean log probability of a choice's tokens; 0, a certainty, where it has none."""
        values = [finite(entry.logprob) for entry in self._logprobs[index]]
        return sum(values) / len(values) if values else 0.0

    def _choice(self, number: int, index: int) -> dict[str, Any]:
        call, prompt = self._call, index // self._call.n
        finish = self._finish[index]
        require(finish is not None, "a choice is written before it ended")
        text = "".join(self._texts[index])
        logprobs = None
        if call.logprobs:
            writer = _LogprobWriter(call, prompt, self._tokenizer)
            logprobs = writer.entries(self._logprobs[index])
            if call.requests[prompt].prompt_logprobs is not None:
                logprobs = _joined(writer.prompt_entries(self._scores[prompt]), logprobs)
        text = call.echo[prompt] + text
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason_of(finish)}


def error_body(refused: Refused) -> dict[str, Any]:
    """OpenAI's error object; all four keys, always."""
    error = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": error}


def failure(delta: types.Delta) -> Refused | None:
    """The refusal that a delta stands for when its choice ended in trouble; None for text and natural ends."""
    if delta.finish is types.FinishReason.ERROR:
        message = delta.message or "the model failed while it answered"
        if delta.fault is types.Fault.GRAMMAR:
            return Refused(message, code="invalid_grammar")
        return Refused(message, status=500, kind="server_error", code="engine_error")
    if delta.finish is types.FinishReason.ABORT:
        message = delta.message or "the server is shutting down; it ended this request before it was complete"
        return Refused(message, status=503, kind="server_error", code="shutting_down", retry_after_s=1.0)
    return None


def model_entry(card: types.ModelCard, name: str, parent: str | None) -> dict[str, Any]:
    """One entry of /v1/models: OpenAI's fields, vLLM's max_model_len, and what we know of the weights.

    name is the served name, parent its model's where that is another one, as vLLM lists adapters.
    """
    return {
        "id": name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "janus",
        "root": parent or name,
        "parent": parent,
        "max_model_len": card.context_tokens,
        "meta": {
            "parameters": card.parameters,
            "weight_bytes": card.weight_bytes,
            "dtype": card.dtype,
            "family": card.family,
            "fingerprint": card.fingerprint,
        },
    }


class _LogprobWriter:
    """Log probabilities of one choice; remembers where the text of the next token starts.

    Offsets count the text that the client sees: a token that is not shown, and the space that a text loses at its
    start, take no room in it. An echoed prompt is the text of its tokens then, so that its offsets lead into it.
    """

    def __init__(self, call: Call, prompt: int, tokenizer: Tokenizer) -> None:
        request = self._request = call.requests[prompt]
        self._tokenizer = tokenizer
        self._offset = len(call.echo[prompt])
        self._shown = Detokenizer(tokenizer, request.skip_special_tokens, request.prompt)

    def entries(self, logprobs: Sequence[types.TokenLogprob]) -> dict[str, list[Any]]:
        offsets = []
        for entry in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._shown.push(entry.token))
        return {
            "tokens": [self._name(entry.token) for entry in logprobs],
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def prompt_entries(self, scores: Sequence[types.TokenLogprob]) -> dict[str, list[Any]]:
        """The prompt's own tokens, as the model saw them: nothing says how likely the first one was."""
        prompt, offset, offsets = self._request.prompt, 0, []
        require(len(scores) == len(prompt) - 1, "a prompt is written before it was scored")
        shown = Detokenizer(self._tokenizer, self._request.skip_special_tokens)
        for token in prompt:
            offsets.append(offset)
            offset += len(shown.push(token))
        return {
            "tokens": [self._name(token) for token in prompt],
            "token_logprobs": [None, *(finite(entry.logprob) for entry in scores)],
            "top_logprobs": [None, *(self._top(entry) for entry in scores)],
            "text_offset": offsets,
        }

    def _top(self, entry: types.TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value in _with_chosen(entry):
            name = self._name(token)
            # Two ids may spell the same text; a map that lost one of them could lose the likeliest.
            top[name if name not in top else f"token_id:{token}"] = finite(value)
        return top

    def _name(self, token: int) -> str:
        """A token as text, or OpenAI's "bytes:\\xNN" form when it holds only part of a character."""
        raw = self._tokenizer.token_bytes(token)
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self._tokenizer.token_text(token)


def _joined(first: dict[str, list[Any]], then: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: [*values, *then[key]] for key, values in first.items()}


def _with_chosen(entry: types.TokenLogprob) -> Sequence[tuple[int, float]]:
    """The likeliest tokens and, in completions alone, always the chosen one: k or k + 1 of them, as OpenAI has it.

    With the same float in both places: graders compare the two for equality.
    """
    if any(token == entry.token for token, _ in entry.top):
        return entry.top
    return (*entry.top, (entry.token, entry.logprob))


def finite(value: float) -> float:
    return value if value > UNLIKELY else UNLIKELY  # NaN compares false, and is as unlikely


def reason_of(finish: types.FinishReason | None) -> str:
    require(finish in (types.FinishReason.STOP, types.FinishReason.LENGTH), "an abnormal end reached the answer")
    return "stop" if finish is types.FinishReason.STOP else "length"


def choices_of(call: Call) -> int:
    return call.n * len(call.requests)


def json_bytes(value: Any) -> bytes:
    """JSON. Separators that some line readers take for a line end are escaped, so no event is ever cut."""
    encoded = msgspec.json.encode(value)
    if encoded.isascii():
        return encoded
    for raw, escaped in ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")):
        encoded = encoded.replace(raw, escaped)
    return encoded
