"""From a client's bytes to validated `types.Request`s: the edge where every field is checked once.

Pure: no clock, no randomness, no tokenizer. `http` calls `parse_*` on the body, encodes the prompts, then `plan_*`;
`reply` writes the answer to the `Call` that comes out. Every refusal names its field in `param`, says what is
allowed, and quotes nothing of the client's. Nothing past this file checks client input again, so a value that passes
here must be safe to run.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from janus_server import types
from janus_server.api import bodies
from janus_server.api.bodies import ChatBody, CommonBody, CompletionBody, Limits
from janus_server.errors import Refused


class Kind(enum.Enum):
    CHAT = "chat"
    COMPLETION = "completion"


class Target(msgspec.Struct, frozen=True):
    """What validation must know of the served model. context_tokens covers prompt and answer; ids are below vocab."""

    model: str
    context_tokens: int
    vocab: int
    eos_ids: tuple[int, ...]
    defaults: types.Sampling


class Label(msgspec.Struct, frozen=True):
    """What the shell adds to a call: its id, the wall clock in seconds, and a seed for when the client gave none."""

    id: str
    created_s: int
    seed: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One validated API call: a `Request` per prompt, n choices each, and how the answer is to be written.

    Choice j of prompt i has index i·n+j. echo holds the text to put before the choices of each prompt, "" for none.
    """

    kind: Kind
    label: Label
    model: str
    requests: tuple[types.Request, ...]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    echo: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests)


Body = TypeVar("Body", bound=CommonBody)


def parse_chat(raw: bytes, limits: Limits) -> ChatBody:
    """The body of /v1/chat/completions, its fields in range; what depends on the model is checked by `plan_chat`."""
    body = _decode(raw, ChatBody)
    _check_common(body, limits, bodies.UNSUPPORTED_CHAT)
    _need(0 < len(body.messages) <= limits.messages, "messages", f"a list of 1 to {limits.messages} messages")
    if body.tools and body.tool_choice != "none":
        raise _not_yet("tools")
    _need(body.add_special_tokens is not True, "add_special_tokens", "false in chat: the template writes them")
    if body.top_logprobs:
        _need(body.logprobs is True, "top_logprobs", "left out unless logprobs is true")
        _need(body.top_logprobs <= limits.logprobs, "top_logprobs", f"from 0 to {limits.logprobs}")
    return body


def parse_completion(raw: bytes, limits: Limits) -> CompletionBody:
    """The body of /v1/completions, its fields in range; what depends on the model is checked by `plan_completion`."""
    body = _decode(raw, CompletionBody)
    _check_common(body, limits, bodies.UNSUPPORTED_COMPLETION)
    _need(body.best_of is None or body.best_of == (body.n or 1), "best_of", "equal to n")
    if body.logprobs is not None:
        _need(body.logprobs <= limits.logprobs, "logprobs", f"from 0 to {limits.logprobs}")
        if body.echo:
            raise _not_yet("echo", "together with logprobs")
    prompts = len(prompts_of(body))
    _need(prompts <= limits.prompts, "prompt", f"at most {limits.prompts} prompts in one call")
    _need(
        prompts * (body.n or 1) <= limits.choices, "n", f"at most {limits.choices} choices over all prompts of one call"
    )
    return body


def prompts_of(body: CompletionBody) -> tuple[str | list[int], ...]:
    """The prompts of a completion call, each a text or a list of ids; a mixture is refused."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return ([item for item in prompt if isinstance(item, int)],)
    _need(len(kinds) == 1, "prompt", bodies.ALLOWED["prompt"])
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


def plan_chat(body: ChatBody, prompt: Sequence[int], target: Target, limits: Limits, label: Label) -> Call:
    """The call that answers a chat body whose rendered and encoded prompt is `prompt`."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _plan(Kind.CHAT, body, (prompt,), ("",), logprobs, target, limits, label)


def plan_completion(
    body: CompletionBody,
    prompts: Sequence[Sequence[int]],
    echo: Sequence[str],
    target: Target,
    limits: Limits,
    label: Label,
) -> Call:
    """The call that answers a completion body; prompts and echo texts are in the order of `prompts_of`."""
    return _plan(Kind.COMPLETION, body, prompts, echo, body.logprobs, target, limits, label)


def refuse_hopeless(chars: int, longest_token_chars: int, target: Target, param: str) -> None:
    """Refuse a text that cannot fit the context however it is cut, before it costs a second to cut it."""
    if chars > target.context_tokens * longest_token_chars:
        raise Refused(
            f"the text has {chars} characters; the model's context of {target.context_tokens} tokens cannot hold them",
            param=param,
            code="context_length_exceeded",
        )


def check_ids(ids: Sequence[int], vocab: int, param: str, name: str) -> None:
    """Refuse token ids outside the vocabulary, naming the first one's place. `name` is the list's path in the body."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
        raise Refused(f"{name}[{at}] must be a token id from 0 to {vocab - 1}", param=param, code="invalid_value")


# Decoding


def _decode(raw: bytes, shape: type[Body]) -> Body:
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError as error:
        _refuse_field(str(error))
    except msgspec.DecodeError as error:
        _refuse_json(raw, str(error))
    except RecursionError:
        raise Refused("the body is nested too deeply", code="invalid_json") from None


def _refuse_field(text: str) -> NoReturn:
    """Turn msgspec's "Expected `int`, got `str` - at `$.a[0]`" into a refusal that says what is allowed there."""
    missing = re.search(r"missing required field `([^`]+)`", text)
    found = re.search(r"`\$\.?([^`]*)`$", text)
    path = found.group(1).replace("[...]", "") if found else ""
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
    if not path:
        raise Refused("the body must be a JSON object", code="invalid_json")
    general = re.sub(r"\[\d+\]", "[]", path)
    while general and general not in bodies.ALLOWED:
        general = general[:-2] if general.endswith("[]") else general.rpartition(".")[0]
    allowed = bodies.ALLOWED.get(general, "of another type")
    # An element of a list is described by its list when it has no words of its own.
    shown = path if general == re.sub(r"\[\d+\]", "[]", path) else re.split(r"[.\[]", path)[0]
    verb = "is required and must be" if missing else "must be"
    raise Refused(f"{shown} {verb} {allowed}", param=path, code="missing_field" if missing else "invalid_value")


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
    pending: list[tuple[str, Any]] = [("", tree)]
    while pending:
        path, value = pending.pop()
        if value is marker:
            return path
        if isinstance(value, dict):
            pending.extend((f"{path}.{key}" if path else key, item) for key, item in reversed(value.items()))
        elif isinstance(value, list):
            pending.extend((f"{path}[{i}]", item) for i, item in reversed(list(enumerate(value))))
    return None


# Checks


def _need(condition: bool, param: str, allowed: str) -> None:
    if not condition:
        raise Refused(f"{param} must be {allowed}", param=param, code="invalid_value")


def _not_yet(param: str, how: str = "") -> Refused:
    text = f"{param} {how} is not supported yet" if how else f"{param} is not supported yet"
    return Refused(text, param=param, code="unsupported_parameter")


def _check_common(body: CommonBody, limits: Limits, unsupported: Sequence[str]) -> None:
    for name in unsupported:
        value = getattr(body, name)
        # 0 is a request for some of these (prompt_logprobs); false, null and empty are how clients say "no".
        if not (value is None or value is False or value == "" or value == [] or value == {}):
            raise _not_yet(name)
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise _not_yet("response_format", "other than {\"type\": \"text\"}")  # fmt: skip
    _need(body.n is None or body.n <= limits.n, "n", f"from 1 to {limits.n}")
    stops = _stops(body)
    _need(len(stops) <= limits.stops, "stop", f"at most {limits.stops} strings")
    _need(
        all(0 < len(s) <= limits.stop_chars for s in stops), "stop", f"strings of 1 to {limits.stop_chars} characters"
    )
    _need(len(body.stop_token_ids or ()) <= limits.stop_ids, "stop_token_ids", f"at most {limits.stop_ids} ids")
    _need(len(body.logit_bias or ()) <= limits.logit_bias, "logit_bias", f"at most {limits.logit_bias} entries")


# Planning


def _plan(
    kind: Kind,
    body: CommonBody,
    prompts: Sequence[Sequence[int]],
    echo: Sequence[str],
    logprobs: int | None,
    target: Target,
    limits: Limits,
    label: Label,
) -> Call:
    n = body.n or 1
    sampling = _sampling(body, target, logprobs, label.seed)
    stop_ids = body.stop_token_ids or []
    check_ids(stop_ids, target.vocab, "stop_token_ids", "stop_token_ids")
    eos = () if body.ignore_eos else target.eos_ids
    budget = limits.total_tokens // (n * len(prompts))
    requests = []
    for i, prompt in enumerate(prompts):
        max_tokens = _max_tokens(kind, body, len(prompt), target.context_tokens, budget)
        _need((body.min_tokens or 0) <= max_tokens, "min_tokens", "at most max_tokens")
        # Without a seed from the client, equal prompts of one call must not give equal answers.
        drawn = sampling if body.seed is not None else msgspec.structs.replace(sampling, seed=(label.seed + i) % 2**63)
        requests.append(
            types.Request(
                id=f"{label.id}-{i}",
                model=target.model,
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                min_tokens=body.min_tokens or 0,
                n=n,
                sampling=drawn,
                stop_ids=tuple(sorted({*eos, *stop_ids})),
                stop=_stops(body),
                include_stop=body.include_stop_str_in_output is True,
                skip_special_tokens=body.skip_special_tokens is not False,
            )
        )
    options = body.stream_options
    return Call(
        kind=kind,
        label=label,
        model=body.model,
        requests=tuple(requests),
        n=n,
        stream=body.stream is True,
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=options is not None and options.continuous_usage_stats is True,
        logprobs=logprobs is not None,
        echo=tuple(echo),
    )


def _sampling(body: CommonBody, target: Target, logprobs: int | None, seed: int) -> types.Sampling:
    defaults = target.defaults
    bias = sorted((body.logit_bias or {}).items())
    if bias and not 0 <= bias[0][0] <= bias[-1][0] < target.vocab:
        _need(False, "logit_bias", f"an object whose keys are token ids from 0 to {target.vocab - 1}")
    top_k = _given(body.top_k, defaults.top_k)
    top_p = _given(body.top_p, defaults.top_p)
    # top_p 0 keeps the likeliest token alone; said through top_k, where the sampler has no empty set to trip over.
    top_k, top_p = (1, 1.0) if top_p == 0.0 else (max(top_k, 0), top_p)
    return types.Sampling(
        temperature=_given(body.temperature, defaults.temperature),
        top_p=top_p,
        top_k=top_k,
        min_p=_given(body.min_p, defaults.min_p),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, defaults.frequency_penalty),
        seed=_given(body.seed, seed) % 2**63,
        logit_bias=tuple(bias),
        logprobs=logprobs,
    )


def _max_tokens(kind: Kind, body: CommonBody, prompt: int, context: int, budget: int) -> int:
    """How many tokens may be made for a prompt of `prompt` tokens; `budget` is a choice's share of the call's total."""
    _need(prompt > 0, "messages" if kind is Kind.CHAT else "prompt", "at least one token long")
    room = context - prompt
    if room < 1:
        raise Refused(
            f"the prompt has {prompt} tokens, but the model's context of {context} tokens must hold it and an answer",
            param="messages" if kind is Kind.CHAT else "prompt",
            code="context_length_exceeded",
        )
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = _given(body.max_completion_tokens, body.max_tokens)
    if asked is None:
        return min(room, budget) if kind is Kind.CHAT else min(room, budget, 16)
    if asked > room:
        raise Refused(
            f"{name} is {asked} and the prompt has {prompt} tokens: together more than the model's context of "
            f"{context} tokens; {name} must be at most {room}",
            param=name,
            code="context_length_exceeded",
        )
    _need(asked <= budget, name, f"at most {budget} with this n and this many prompts")
    return asked


def _stops(body: CommonBody) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


T = TypeVar("T")


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
