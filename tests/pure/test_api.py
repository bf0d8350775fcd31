"""The edge of the API, without a socket: what is accepted, and what is refused and how."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server import types
from janus_server.api import parse
from janus_server.api import plan as api
from janus_server.api.bodies import ALLOWED, ChatBody, CompletionBody, Limits
from janus_server.api.embeddings import EmbeddingBody, parse_embedding
from janus_server.api.messages import MessagesBody, parse_messages
from janus_server.api.responses import ResponsesBody, parse_responses
from janus_server.api.tokenize import TokenizeBody, parse_tokenize
from janus_server.errors import Refused

LIMITS = Limits()
TARGET = api.Target("m", 100, 300, (257,), types.Sampling(temperature=0.7, top_p=0.9, top_k=5))
LABEL = api.Label("cmpl-1", 1_700_000_000, 42)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
F = {"name": "f", "arguments": "{}"}


def completion(**fields: Any) -> CompletionBody:
    return parse.parse_completion(msgspec.json.encode({**TEXT, **fields}), LIMITS)


def plan(prompts: list[list[int]] | None = None, **fields: Any) -> api.Call:
    """The call for prompts that the client gave as ids unless fields say otherwise, else for a text of three tokens."""
    if prompts:
        fields = {"prompt": prompts, **fields}
    return api.plan_completion(completion(**fields), prompts or [[1, 2, 3]], TARGET, LIMITS, LABEL)


def plan_chat(**fields: Any) -> api.Call:
    body = parse.parse_chat(msgspec.json.encode({**CHAT, **fields}), LIMITS)
    return api.plan_chat(body, [1, 2, 3], TARGET, LIMITS, LABEL)


# What is refused


BAD_COMMON: list[tuple[str, Any, str]] = [
    ("model", None, "model"),
    ("model", "", "model"),
    ("model", 3, "model"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("top_p", 1.01, "top_p"),
    ("top_p", [], "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", 2, "min_p"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -3, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("seed", 2**63, "seed"),
    ("seed", 1.5, "seed"),
    ("seed", True, "seed"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", True, "n"),
    ("n", 10**30, "n"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 1.0, "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", [""], "stop"),
    ("stop", "", "stop"),
    ("stop", [1], "stop[0]"),
    ("stop", "x" * 1025, "stop"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [True], "stop_token_ids[0]"),
    ("stop_token_ids", list(range(257)), "stop_token_ids"),
    ("logit_bias", {"x": 1}, "logit_bias"),
    ("logit_bias", {"1": 101}, "logit_bias"),
    ("logit_bias", {"1": True}, "logit_bias"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias"),
    ("logit_bias", [1], "logit_bias"),
    ("stream", 1, "stream"),
    ("stream", "true", "stream"),
    ("stream_options", True, "stream_options"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("ignore_eos", 1, "ignore_eos"),
    ("response_format", "json_object", "response_format"),
    ("structured_outputs", "a", "structured_outputs"),
    ("guided_json", 5, "guided_json"),
    ("guided_choice", ["a", 1], "guided_choice[1]"),
    ("guided_regex", ["a"], "guided_regex"),
    ("prompt_logprobs", 0, "prompt_logprobs"),
    ("bad_words", ["x"], "bad_words"),
]
BAD_TEXT: list[tuple[str, Any, str]] = [
    ("prompt", None, "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", 3, "prompt"),
    ("prompt", [1, "a"], "prompt"),
    ("prompt", [1, [2]], "prompt"),
    ("prompt", [True], "prompt[0]"),
    ("prompt", [1.5], "prompt[0]"),
    ("prompt", [["a"]], "prompt[0][0]"),
    ("prompt", ["a"] * 1025, "prompt"),
    ("logprobs", -1, "logprobs"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("best_of", 129, "best_of"),
    ("best_of", 0, "best_of"),
    ("max_tokens", 0, "max_tokens"),
    ("suffix", "x", "suffix"),
    ("echo", 1, "echo"),
]
BAD_CHAT: list[tuple[str, Any, str]] = [
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", [{}], "messages[0].role"),
    ("messages", [{"role": "robot"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 3}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": 3}]}], "messages[0].content[0].type"),
    ("messages", ["hi"], "messages[0]"),
    ("logprobs", 1, "logprobs"),
    ("top_logprobs", 2, "top_logprobs"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("functions", [{"name": "f"}], "functions"),
    ("chat_template", "{{ 1 }}", "chat_template"),
    ("chat_template_kwargs", [], "chat_template_kwargs"),
    ("add_special_tokens", True, "add_special_tokens"),
]


def refused_field(refused: Refused, param: str) -> None:
    assert refused.status == 400
    assert refused.kind == "invalid_request_error"
    assert refused.param == param
    assert refused.code
    named = param.split("[")[0].split(".")[0]
    assert refused.message.startswith(named), refused.message


@pytest.mark.parametrize(("field", "value", "param"), BAD_COMMON + BAD_TEXT)
def test_a_bad_completion_field_is_refused_by_name(field: str, value: Any, param: str) -> None:
    with pytest.raises(Refused) as caught:
        completion(**{field: value})
    refused_field(caught.value, param)


@pytest.mark.parametrize(("field", "value", "param"), BAD_COMMON + BAD_CHAT)
def test_a_bad_chat_field_is_refused_by_name(field: str, value: Any, param: str) -> None:
    with pytest.raises(Refused) as caught:
        plan_chat(**{field: value})
    refused_field(caught.value, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"max_tokens": 98}, "max_tokens"),
        ({"max_completion_tokens": 98, "max_tokens": 1}, "max_completion_tokens"),
    ],
)
def test_what_depends_on_the_model_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for planned in (plan, plan_chat):
        with pytest.raises(Refused) as caught:
            planned(**fields)
        refused_field(caught.value, param)


@pytest.mark.parametrize("field", ["content", "tool_calls"])
def test_the_parts_of_all_messages_are_bounded(field: str) -> None:
    held = [{"type": "text", "text": "x"}] if field == "content" else [{"id": "1", "function": F}]
    limits = Limits(parts=4)
    for messages in (1, 2):
        fields = {"model": "m", "messages": [{"role": "assistant", field: held * (4 // messages)}] * messages}
        parse.parse_chat(json.dumps(fields).encode(), limits)
        fields["messages"] = [{"role": "assistant", field: held * (6 // messages)}] * messages
        with pytest.raises(Refused) as caught:
            parse.parse_chat(json.dumps(fields).encode(), limits)
        refused_field(caught.value, "messages")


Shape = tuple[type[msgspec.Struct], str, dict[str, Any]]
SHAPES: list[Shape] = [
    (ChatBody, "echo", CHAT),
    (CompletionBody, "suffix", TEXT),
    (MessagesBody, "container", {**CHAT, "max_tokens": 1}),
    (ResponsesBody, "background", {"model": "m", "input": "hi"}),
    (TokenizeBody, "chat_template", {"prompt": "hi"}),
    (EmbeddingBody, "truncate_prompt_tokens", {"model": "m", "input": "hi"}),
]


@pytest.mark.parametrize(("shape", "name", "fields"), SHAPES)
def test_every_body_takes_the_same_for_no(shape: type[msgspec.Struct], name: str, fields: dict[str, Any]) -> None:
    parsers: dict[type[msgspec.Struct], Callable[[bytes, Limits], Any]] = {
        ChatBody: parse.parse_chat, CompletionBody: parse.parse_completion, MessagesBody: parse_messages,
        ResponsesBody: parse_responses, TokenizeBody: parse_tokenize, EmbeddingBody: parse_embedding,
    }  # fmt: skip
    for value in (None, False, "", [], {}):
        parsers[shape](json.dumps({**fields, name: value}).encode(), LIMITS)
    for value in (0, 0.0, 1, True, "x", [0], {"a": None}):
        with pytest.raises(Refused) as caught:
            parsers[shape](json.dumps({**fields, name: value}).encode(), LIMITS)
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_too_long_names_both_numbers() -> None:
    with pytest.raises(Refused) as caught:
        plan([[1] * 100])
    assert caught.value.code == "context_length_exceeded"
    assert "100 tokens" in caught.value.message
    with pytest.raises(Refused) as caught:
        plan([[1] * 90], max_tokens=11)
    assert caught.value.code == "context_length_exceeded"
    assert {"11", "90", "100"} <= set(caught.value.message.replace(":", "").replace(";", "").split())


def test_the_total_of_a_call_is_bounded() -> None:
    limits = Limits(total_tokens=100)
    body = completion(prompt=["a", "b"], n=4, max_tokens=20)
    with pytest.raises(Refused) as caught:
        api.plan_completion(body, [[1], [2]], TARGET, limits, LABEL)
    assert caught.value.param == "max_tokens"
    with pytest.raises(Refused) as caught:
        completion(prompt=["a"] * 100, n=100)
    assert caught.value.param == "n"
    chat = api.plan_chat(parse.parse_chat(json.dumps({**CHAT, "n": 4}).encode(), limits), [1], TARGET, limits, LABEL)
    assert chat.requests[0].max_tokens == 25


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b'{"model" "m"}', "byte 9"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b'{"model":"\\ud800","prompt":"hello"}', "surrogate"),
        (b'{"model":"m","prompt":"a"} trailing', "byte"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeply"),
        (b"[" * 100_000, "JSON object"),
    ],
)
def test_broken_json_says_where(raw: bytes, part: str) -> None:
    with pytest.raises(Refused) as caught:
        parse.parse_completion(raw, LIMITS)
    assert caught.value.status == 400
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"model":"m","prompt":"a","temperature":NaN}', "temperature"),
        (b'{"model":"m","prompt":"a","top_p":-Infinity}', "top_p"),
        (b'{"model":"m","prompt":"a","logit_bias":{"5":Infinity}}', "logit_bias.5"),
        (b'{"model":"m","prompt":"a","x":[{"y":NaN}]}', "x[0].y"),
        (b'{"model":"m","prompt":"a","temperature":1e999}', "temperature"),
    ],
)
def test_numbers_that_are_not_finite_are_named(raw: bytes, param: str) -> None:
    with pytest.raises(Refused) as caught:
        parse.parse_completion(raw, LIMITS)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("prompt", "at"), [([5, 300], "prompt[1]"), ([-1], "prompt[0]"), ([[1], [2, 3, 10**30]], "prompt[1][2]")]
)
def test_an_id_outside_the_vocabulary_is_named_by_its_place(prompt: list[Any], at: str) -> None:
    lists = prompt if isinstance(prompt[0], list) else [prompt]
    with pytest.raises(Refused) as caught:
        plan(lists, prompt=prompt)
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")
    assert caught.value.message == f"{at} must be a token id from 0 to 299"
    plan([[0, 299]], prompt=[0, 299])


def test_a_text_that_the_tokenizer_cuts_into_unknown_ids_is_refused() -> None:
    """A tokenizer may know more tokens than the model has rows for, and a client can spell them."""
    with pytest.raises(Refused) as caught:
        plan([[1], [2, 300]], prompt=["a", "b"])
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")
    with pytest.raises(Refused) as caught:
        api.plan_chat(parse.parse_chat(json.dumps(CHAT).encode(), LIMITS), [300], TARGET, LIMITS, LABEL)
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_value")


def test_every_field_says_what_it_allows() -> None:
    """A field without words would be refused with "another type"."""
    for shape in (ChatBody, CompletionBody):
        for field in msgspec.structs.fields(shape):
            assert field.type is Any or field.name in ALLOWED, field.name


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(raw: bytes) -> None:
    for read in (parse.parse_chat, parse.parse_completion):
        try:
            read(raw, LIMITS)
        except Refused as refused:
            assert refused.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({f.name for shape in (ChatBody, CompletionBody) for f in msgspec.structs.fields(shape)})


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_json_is_planned_or_refused(fields: dict[str, Any]) -> None:
    try:
        body = parse.parse_completion(json.dumps({**TEXT, **fields}).encode(), LIMITS)
        call = api.plan_completion(body, [[1]], TARGET, LIMITS, LABEL)
    except Refused as refused:
        assert refused.status == 400
        assert refused.param
    else:
        s = call.requests[0].sampling
        assert all(math.isfinite(x) for x in (s.temperature, s.top_p, s.min_p, s.repetition_penalty))
        assert call.requests[0].max_tokens >= 1
    try:
        plan_chat(**fields)
    except Refused as refused:
        assert refused.status == 400


# What is accepted


def test_what_clients_always_send_is_accepted() -> None:
    call = plan_chat(
        stop=None, logprobs=None, tools=[], tool_choice="auto", repetition_penalty=1.0,
        stream_options={"include_usage": True}, user="u", metadata={"a": 1},
        store=True, service_tier="auto", parallel_tool_calls=True, reasoning_effort="low",
        prompt_cache_key="k", response_format={"type": "text"}, functions=None, unknown_field=[1],
        continue_final_message=False,
    )  # fmt: skip
    assert call.stream is False
    plan_chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")
    plan(best_of=1, suffix=None, logprobs=None, echo=False, prompt_logprobs=None)
    plan(best_of=3, n=3)


def test_defaults_come_from_the_model_and_yield_to_the_client() -> None:
    sampling = plan().requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (0.7, 0.9, 5, None)
    sampling = plan(temperature=0, top_p=1, top_k=-1, seed=-1, logit_bias={"9": 1, "2": -100}).requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)
    assert sampling.seed == -1
    assert sampling.logit_bias == ((2, -100.0), (9, 1.0))
    assert plan(top_p=0).requests[0].sampling.top_k == 1


def test_lengths() -> None:
    assert plan().requests[0].max_tokens == 16
    assert plan([[1] * 95]).requests[0].max_tokens == 5
    assert plan_chat().requests[0].max_tokens == 97
    assert plan_chat(max_tokens=5).requests[0].max_tokens == 5
    assert plan_chat(max_tokens=5, max_completion_tokens=7).requests[0].max_tokens == 7


def test_stops() -> None:
    request = plan(stop="x", stop_token_ids=[7, 3]).requests[0]
    assert request.stop == ("x",)
    assert request.stop_ids == (3, 7, 257)
    request = plan(ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False).requests[0]
    assert (request.stop_ids, request.include_stop, request.skip_special_tokens) == ((), True, False)


def test_prompt_shapes() -> None:
    assert parse.prompts_of(completion(prompt="a")) == ("a",)
    assert parse.prompts_of(completion(prompt=["a", "b"])) == ("a", "b")
    assert parse.prompts_of(completion(prompt=[1, 2])) == ([1, 2],)
    assert parse.prompts_of(completion(prompt=[[1], [2, 3]])) == ([1], [2, 3])


def test_seeds_of_equal_prompts_differ_unless_the_client_chose_one() -> None:
    drawn = [r.sampling.seed for r in plan([[1], [1]]).requests]
    assert drawn[0] != drawn[1]
    assert drawn == [r.sampling.seed for r in plan([[1], [1]]).requests]
    chosen = plan([[1], [1]], seed=5)
    assert [r.sampling.seed for r in chosen.requests] == [5, 5]
    assert [r.id for r in chosen.requests] == ["cmpl-1-0", "cmpl-1-1"]


def test_seeds_never_meet_by_counting() -> None:
    """Labels and prompts next to each other: no seed is another's plus a small number, and none comes twice."""
    body = completion(prompt=["a"] * 8)
    seeds = {
        r.sampling.seed
        for seed in range(40)
        for r in api.plan_completion(body, [[1]] * 8, TARGET, LIMITS, api.Label("c", 0, seed)).requests
    }
    assert len(seeds) == 320
    ordered = sorted(seeds)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 1000
    chosen = {seed: plan(seed=seed).requests[0].sampling.seed for seed in (-(2**63), -1, 0, 2**63 - 1)}
    assert len(set(chosen.values())) == 4


@pytest.mark.parametrize(("asked", "used"), [(0, 0.0), (1e-300, 0.0), (9.9e-6, 0.0), (1e-5, 1e-5), (0.5, 0.5)])
def test_a_tiny_temperature_means_greedy(asked: float, used: float) -> None:
    for planned in (plan, plan_chat):
        assert planned(temperature=asked).requests[0].sampling.temperature == used
    target = msgspec.structs.replace(TARGET, defaults=types.Sampling(temperature=asked))
    assert api.plan_completion(completion(), [[1]], target, LIMITS, LABEL).requests[0].sampling.temperature == used


def test_something_can_be_drawn_before_min_tokens() -> None:
    small = api.Target("m", 100, 4, (3,), types.Sampling())
    body = completion(stop_token_ids=[0, 1, 2], min_tokens=1)
    with pytest.raises(Refused) as caught:
        api.plan_completion(body, [[1]], small, LIMITS, LABEL)
    refused_field(caught.value, "stop_token_ids")
    for fields in ({"min_tokens": 0}, {"ignore_eos": True}):
        body = completion(stop_token_ids=[0, 1, 2], **{"min_tokens": 1, **fields})
        api.plan_completion(body, [[1]], small, LIMITS, LABEL)


def test_ignored_fields_are_named() -> None:
    raw = json.dumps({**TEXT, "user": "u", "x": [{"y": 1}], "temperature": 1}).encode()
    assert parse.ignored_fields(raw, CompletionBody) == ("user", "x")
    assert parse.ignored_fields(json.dumps(CHAT).encode(), ChatBody) == ()
    assert parse.ignored_fields(json.dumps({**CHAT, "best_of": 1}).encode(), ChatBody) == ("best_of",)
    assert parse.ignored_fields(json.dumps({**TEXT, "x": "y" * parse.SEARCHED_BYTES}).encode(), CompletionBody) == ()


def test_ranges_in_words_are_the_ranges_that_are_checked() -> None:
    """The words come from the annotations; each bound they name is accepted, and what lies beyond is refused."""
    found = {}
    for name in (f.name for f in msgspec.structs.fields(CompletionBody)):
        numbers = re.fullmatch(
            r"(?:a whole number|a number) (?:from|of at least) (\S+)(?: to (\S+))?", ALLOWED.get(name, "")
        )
        if numbers:
            found[name] = [float(x) if "." in x else int(x) for x in numbers.groups() if x]
    assert found["temperature"] == [0, 2] and found["repetition_penalty"] == [0.01, 100] and found["n"] == [1]
    for name, bounds in found.items():
        for bound in bounds:
            completion(**{name: bound})
        with pytest.raises(Refused, match=name):
            completion(**{name: bounds[0] - 1})
        if len(bounds) == 2:
            with pytest.raises(Refused, match=name):
                completion(**{name: bounds[1] + 1})


def test_messages_reach_the_template_whole() -> None:
    body = {
        **CHAT,
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": F}]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
    }
    messages = parse.messages_of(parse.parse_chat(json.dumps(body).encode(), LIMITS))
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": F}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
