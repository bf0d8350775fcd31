"""Request bodies of every shape: each is refused with its field named, or becomes a call that is safe to run.

Most cases meet `api.parse` and `api.plan` alone; a sample of the same bodies goes through HTTP to the fake node, whose
answer must agree.
"""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from typing import Any

import pytest
from fake_engine import EOS, VOCAB, ByteTokenizer
from harness import fuzz, fuzz_async
from http_server import Server, is_error, served
from json_cases import KNOWN, MARK, Body, make

from janus_server import types
from janus_server.api import bodies, parse, plan
from janus_server.api.bodies import Limits
from janus_server.errors import Refused

LIMITS = Limits(body_bytes=256 * 1024, total_tokens=4096)
TARGET = plan.Target("fake", 512, VOCAB, (EOS,), types.Sampling())
LABEL = plan.Label(id="cmpl-x", created_s=1, seed=5)
REQUIRED = frozenset({"model", "messages", "prompt"})

# What each field may hold, said again and apart from the server's own words for it.
WHOLE = ("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "n", "best_of", "top_logprobs")
RANGES = {
    "temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100), "n": (1, 128), "seed": (-(2**63), 2**63 - 1), "max_tokens": (0, math.inf),
    "max_completion_tokens": (1, 511), "min_tokens": (0, 511), "top_k": (-1, math.inf), "top_logprobs": (0, 20),
}  # fmt: skip
FLAGS = ("stream", "echo", "ignore_eos", "skip_special_tokens", "add_special_tokens", "include_stop_str_in_output")


def outcome(body: Body) -> plan.Call | Refused:
    """What the edge makes of a body; anything but these two is a failure of the target."""
    tokenizer = ByteTokenizer()
    try:
        if body.kind == "chat":
            chat = parse.parse_chat(body.raw, LIMITS)
            parse.ignored_fields(body.raw, bodies.ChatBody)
            messages = parse.messages_of(chat)
            sum(map(parse.content_chars, messages))
            prompt = tokenizer.encode_chat(messages, tools=None, add_generation_prompt=True, kwargs=None)
            return plan.plan_chat(chat, prompt, TARGET, LIMITS, LABEL)
        completion = parse.parse_completion(body.raw, LIMITS)
        parse.ignored_fields(body.raw, bodies.CompletionBody)
        special = completion.add_special_tokens is not False
        prompts = [
            tokenizer.encode(p, add_special=special, parse_special=True) if isinstance(p, str) else p
            for p in parse.prompts_of(completion)
        ]
        return plan.plan_completion(completion, prompts, TARGET, LIMITS, LABEL)
    except Refused as refused:
        return refused


def check(body: Body) -> None:
    found = outcome(body)
    if isinstance(found, Refused):
        assert not body.untouched, f"a good body was refused: {found.message}"
        check_refusal(body, found)
    else:
        check_call(body, found)


def check_refusal(body: Body, refused: Refused) -> None:
    assert refused.status == 400
    assert 0 < len(refused.message) < 400
    assert MARK not in refused.message
    if refused.param is None:
        # Only what is no JSON, no object, or too deep to be read has no field to name.
        assert not body.strict or "nested" in refused.message, refused.message
        return
    if "finite" in refused.message:
        return  # a bare NaN or Infinity is refused wherever it stands
    head = re.split(r"[.\[]", refused.param)[0]
    assert head in KNOWN, f"{head} is no field of a body"
    # Of what is no JSON from some point on, a field before that point may be named.
    assert body.fields is None or head in body.fields or head in REQUIRED, f"{head} was not sent"


def check_call(body: Body, call: plan.Call) -> None:
    """Whatever passes is within every bound, whatever was asked for."""
    requests = call.requests
    assert requests
    assert 1 <= call.n <= LIMITS.n
    assert len(requests) * call.n <= LIMITS.choices
    assert sum(r.max_tokens for r in requests) * call.n <= LIMITS.total_tokens
    for request in requests:
        assert request.prompt
        assert all(type(token) is int and 0 <= token < VOCAB for token in (*request.prompt, *request.stop_ids))
        assert len(request.prompt) + request.max_tokens <= TARGET.context_tokens
        assert 0 <= request.min_tokens <= request.max_tokens
        assert len(request.stop) <= LIMITS.stops
        assert all(0 < len(stop) <= LIMITS.stop_chars for stop in request.stop)
        s = request.sampling
        numbers = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        assert all(math.isfinite(x) for x in (*numbers, *(value for _, value in s.logit_bias)))
        assert s.temperature == 0.0 or s.temperature >= 1e-5
        assert 0.0 < s.top_p <= 1.0
        assert s.top_k >= 0
        assert s.logprobs is None or 0 <= s.logprobs <= LIMITS.logprobs
        assert -(2**63) <= s.seed < 2**63
        assert all(0 <= token < VOCAB for token, _ in s.logit_bias)
    assert body.fields is not None, "what is no JSON object was accepted"
    shape = bodies.ChatBody if body.kind == "chat" else bodies.CompletionBody
    declared, refused_whole = {*shape.__struct_fields__}, bodies.unsupported(shape)
    check_fields({name: body.fields[name] for name in declared - {*refused_whole} if name in body.fields})


def check_fields(fields: dict[str, Any]) -> None:
    """No field that was accepted is of another type or out of its range."""
    for name, value in fields.items():
        if value is None:
            continue
        if name in FLAGS:
            assert isinstance(value, bool), name
        if name in WHOLE or name in RANGES:
            assert not isinstance(value, bool), name
            assert isinstance(value, int | float), name
            assert name not in WHOLE or value == int(value), name
            low, high = RANGES.get(name, (-math.inf, math.inf))
            assert low <= value <= high, name


def test_bodies_are_refused_by_field_or_safe_to_run() -> None:
    fuzz("json", 4000, make, check)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"fake","prompt":"x","' + b"n" * 20_000 + b'":[' + b"0," * 20_000 + b"NaN]}",
        b'{"model":"fake","prompt":"x","a":' + b"[" * 500 + b"0," * 20_000 + b"NaN" + b"]" * 500 + b"}",
        b'{"model":"fake","prompt":"x","a":' + b'{"aaaa":' * 500 + b"Infinity" + b"}" * 501,
    ],
)
def test_finding_a_bare_nan_costs_no_more_than_the_body_allows(raw: bytes) -> None:
    """A path for each of a body's values would take the product of its depth and its width."""
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="finite") as caught:
            parse.parse_completion(raw, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 200 * len(raw)
    finally:
        tracemalloc.stop()
    assert len(caught.value.message) < 400


async def test_bodies_over_http_end_as_they_should() -> None:
    async def over_http(body: Body) -> None:
        found = outcome(body)
        if isinstance(found, plan.Call) and found.requests[0].prompt_logprobs is not None:
            return  # the fake engine scores no prompts
        status, kind, raw = await ask(server, body)
        assert status < 500
        if isinstance(found, Refused):
            error = is_error(json.loads(raw))
            assert status == found.status or (status, error["code"]) == (404, "model_not_found")
            assert MARK.encode() not in raw
        elif found.model != "fake":
            assert status == 404
        else:
            assert status == 200, raw
            assert kind == ("text/event-stream" if found.stream else "application/json")
        assert not server.model.live

    async with served(limits=LIMITS) as server:
        await fuzz_async("json over http", 400, make, over_http)


async def ask(server: Server, body: Body) -> tuple[int, str, bytes]:
    async with server.http.post(body.path, data=body.raw) as response:
        return response.status, response.content_type, await response.read()
