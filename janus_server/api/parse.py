"""From a client's bytes to a body with every field in range: the first half of the edge.

Pure: no clock, no randomness, no tokenizer. `http` calls `parse_*` and encodes what `prompts_of` and `messages_of`
give; what depends on the model is checked by `plan`. Every refusal names its field in `param`, says what is allowed,
and quotes nothing of the client's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from janus_server.api import bodies
from janus_server.api.bodies import ChatBody, CommonBody, CompletionBody, Limits
from janus_server.api.checks import need, refuse_given
from janus_server.api.tools import check_tools
from janus_server.errors import Refused

# Names are looked for only in bodies up to this size: a body of nothing but names would cost 25 times its bytes.
SEARCHED_BYTES = 1 << 18
# So much of a field's path is repeated in a refusal: a client may make its own names as long as a body.
PATH_CHARS = 200

Body = TypeVar("Body", bound=msgspec.Struct)


def parse_chat(raw: bytes, limits: Limits) -> ChatBody:
    """The body of /v1/chat/completions, its fields in range; what depends on the model is checked by `plan_chat`."""
    body = decode(raw, ChatBody)
    check_chat(body, limits)
    return body


def chat_of(fields: Mapping[str, Any], limits: Limits) -> ChatBody:
    """The chat body that another API's body was translated to, checked like a client's own."""
    try:
        body = msgspec.convert(fields, ChatBody)
    except msgspec.ValidationError as error:
        _refuse_field(str(error), bodies.ALLOWED)
    check_chat(body, limits)
    return body


def check_chat(body: ChatBody, limits: Limits) -> None:
    """Refuse a chat body whose fields are out of range, or do not go together."""
    _check_common(body, limits, bodies.UNSUPPORTED_CHAT)
    need(0 < len(body.messages) <= limits.messages, "messages", f"a list of 1 to {limits.messages} messages")
    parts = sum(len(held) for one in body.messages for held in (one.content, one.tool_calls) if isinstance(held, list))
    need(parts <= limits.parts, "messages", f"of at most {limits.parts} parts together")
    check_tools(body, limits)
    need(body.add_special_tokens is not True, "add_special_tokens", "false in chat: the template writes them")
    if body.top_logprobs:
        need(body.logprobs is True, "top_logprobs", "left out unless logprobs is true")
        need(body.top_logprobs <= limits.logprobs, "top_logprobs", f"from 0 to {limits.logprobs}")


def parse_completion(raw: bytes, limits: Limits) -> CompletionBody:
    """The body of /v1/completions, its fields in range; what depends on the model is checked by `plan_completion`."""
    body = decode(raw, CompletionBody)
    _check_common(body, limits, bodies.UNSUPPORTED_COMPLETION)
    n = body.n or 1
    made = n if body.best_of is None else body.best_of
    need(n <= made <= limits.n, "best_of", f"from n to {limits.n}")
    need(made == n or not body.stream, "best_of", "equal to n in a stream: which choices are best shows at the end")
    need(body.logprobs is None or body.logprobs <= limits.logprobs, "logprobs", f"from 0 to {limits.logprobs}")
    need(body.max_tokens != 0 or body.echo is True, "max_tokens", "at least 1 without echo")
    prompts = len(prompts_of(body))
    need(prompts <= limits.prompts, "prompt", f"at most {limits.prompts} prompts in one call")
    param = "n" if made == n else "best_of"
    need(prompts * made <= limits.choices, param, f"at most {limits.choices} choices over all prompts of one call")
    return body


def prompts_of(body: CompletionBody) -> tuple[str | list[int], ...]:
    """The prompts of a completion call, each a text or a list of ids; a mixture is refused."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return ([item for item in prompt if isinstance(item, int)],)
    need(len(kinds) == 1, "prompt", bodies.ALLOWED["prompt"])
    return tuple(item for item in prompt if not isinstance(item, int))


def messages_of(body: ChatBody) -> list[dict[str, Any]]:
    """The messages as chat templates expect them. OpenAI's "developer" is what templates call "system"."""
    messages = []
    for message in body.messages:
        fields: dict[str, Any] = msgspec.to_builtins(message)
        fields.setdefault("content", None)
        if message.role == "developer":
            fields["role"] = "system"
        messages.append(fields)
    return messages


def content_chars(message: Mapping[str, Any]) -> int:
    """Characters of a message's text, parts included."""
    content = message["content"]
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text") or "") for part in content or ())


def ignored_fields(raw: bytes, shape: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names in a body that parsed as `shape` which nothing here reads, in their order."""
    if len(raw) > SEARCHED_BYTES:
        return ()
    try:
        names = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:  # a name that is not UTF-8: the reader of `shape` passes over what it ignores
        _refuse_json(raw, str(error))
    return tuple(name for name in names if name not in shape.__struct_fields__)


# Decoding


def decode(raw: bytes, shape: type[Body], allowed: Mapping[str, str] = bodies.ALLOWED) -> Body:
    """A body of that shape. `allowed` says what each field may hold, by its path: see `bodies.ALLOWED`."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError as error:
        _refuse_field(str(error), allowed)
    except msgspec.DecodeError as error:
        _refuse_json(raw, str(error))
    except RecursionError:
        raise Refused("the body is nested too deeply", code="invalid_json") from None


def _refuse_field(text: str, allowed: Mapping[str, str]) -> NoReturn:
    """Turn msgspec's "Expected `int`, got `str` - at `$.a[0]`" into a refusal that says what is allowed there."""
    missing = re.search(r"missing required field `([^`]+)`", text)
    found = re.search(r"`\$\.?([^`]*)`$", text)
    path = found.group(1).replace("[...]", "") if found else ""
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
    if not path:
        raise Refused("the body must be a JSON object", code="invalid_json")
    general = re.sub(r"\[\d+\]", "[]", path)
    while general and general not in allowed:
        general = general[:-2] if general.endswith("[]") else general.rpartition(".")[0]
    words = allowed.get(general, "of another type")
    # An element of a list is described by its list when it has no words of its own.
    shown = path if general == re.sub(r"\[\d+\]", "[]", path) else re.split(r"[.\[]", path)[0]
    verb = "is required and must be" if missing else "must be"
    raise Refused(f"{shown} {verb} {words}", param=path, code="missing_field" if missing else "invalid_value")


def _refuse_json(raw: bytes, text: str) -> NoReturn:
    if b"NaN" in raw or b"Infinity" in raw:
        path = _not_finite(raw)
        if path is not None:
            raise Refused(
                f"{path} must be a finite number; NaN and Infinity are not JSON", param=path, code="invalid_value"
            )
    where = text.removeprefix("JSON is malformed: ")
    raise Refused(f"the body is not valid JSON: {where[:1].lower()}{where[1:]}", code="invalid_json")


def _not_finite(raw: bytes) -> str | None:
    """The path of the first bare NaN or Infinity, or None when the body is broken in another way too (or is huge)."""
    if len(raw) > 1024 * 1024:
        return None
    marker = object()
    try:
        tree = json.loads(raw, parse_constant=lambda _: marker)
    except (ValueError, RecursionError):
        return None
    # A place is its parent's place and a key: paths as texts could take a thousand times the body's bytes.
    pending: list[tuple[Any, Any]] = [((), tree)]
    while pending:
        place, value = pending.pop()
        if value is marker:
            return _spelled(place)
        if isinstance(value, dict):
            pending.extend(((place, key), item) for key, item in reversed(value.items()))
        elif isinstance(value, list):
            pending.extend(((place, i), value[i]) for i in reversed(range(len(value))))
    return None


def _spelled(place: Any) -> str:
    """a.b[0] for (((), "a"), "b"), 0), cut where it is too long to be shown."""
    parts: list[str] = []
    while place:
        place, key = place
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key[:PATH_CHARS]}")
    path = "".join(reversed(parts)).removeprefix(".")
    return path if len(path) <= PATH_CHARS else path[:PATH_CHARS] + "…"


# Checks


def _check_common(body: CommonBody, limits: Limits, unsupported: Sequence[str]) -> None:
    refuse_given(body, unsupported)
    need(body.n is None or body.n <= limits.n, "n", f"from 1 to {limits.n}")
    stops = stops_of(body)
    need(len(stops) <= limits.stops, "stop", f"at most {limits.stops} strings")
    need(all(0 < len(s) <= limits.stop_chars for s in stops), "stop", f"strings of 1 to {limits.stop_chars} characters")
    need(len(body.stop_token_ids or ()) <= limits.stop_ids, "stop_token_ids", f"at most {limits.stop_ids} ids")
    need(len(body.logit_bias or ()) <= limits.logit_bias, "logit_bias", f"at most {limits.logit_bias} entries")


def stops_of(body: CommonBody) -> tuple[str, ...]:
    """The stop strings, however they were given."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
