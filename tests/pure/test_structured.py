"""What the fields that ask for structured output turn into, and how each is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from janus_server import types
from janus_server.api import checks, parse, plan, structured
from janus_server.api.bodies import Limits
from janus_server.errors import Refused
from janus_server.types import Grammar, GrammarKind

LIMITS = Limits()
TARGET = plan.Target("m", 100, 300, (257,), types.Sampling())
LABEL = plan.Label("cmpl-1", 1_700_000_000, 42)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
SOURCE = json.dumps(SCHEMA, separators=(",", ":"))  # the order of properties is the order of the answer


def asked(**fields: Any) -> Grammar | None:
    """The grammar of the request; chat and completions must agree."""
    chat = parse.parse_chat(msgspec.json.encode({**CHAT, **fields}), LIMITS)
    text = parse.parse_completion(msgspec.json.encode({**TEXT, **fields}), LIMITS)
    calls = (
        plan.plan_chat(chat, [1, 2], TARGET, LIMITS, LABEL),
        plan.plan_completion(text, [[1, 2]], TARGET, LIMITS, LABEL),
    )
    found = {request.grammar for call in calls for request in call.requests}
    assert len(found) == 1
    return found.pop()


def schema(**inner: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **inner}}}


def nested(levels: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(levels - 1):
        tree = {"not": tree}
    return tree


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": None},
        {"guided_choice": []}, {"guided_regex": ""}, {"grammar": ""}, {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "choice": [], "regex": ""}},
        {"response_format": {"type": "text"}, "structured_outputs": None, "guided_grammar": None},
    ],
)  # fmt: skip
def test_what_clients_send_to_say_no(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, SOURCE),
        (schema(schema=SCHEMA, strict=True, description="d"), GrammarKind.JSON_SCHEMA, SOURCE),
        (schema(schema={}, strict=None), GrammarKind.JSON_SCHEMA, "{}"),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SOURCE),
        ({"structured_outputs": {"json": SOURCE}}, GrammarKind.JSON_SCHEMA, SOURCE),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
        ({"structured_outputs": {"regex": "a+", "json": None}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a", "b"], "disable_fallback": True}}, GrammarKind.REGEX, "a|b"),
        ({"structured_outputs": {"grammar": "start: X"}}, GrammarKind.LARK, "start: X"),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SOURCE),
        ({"guided_json": SOURCE}, GrammarKind.JSON_SCHEMA, SOURCE),
        ({"guided_json": {}}, GrammarKind.JSON_SCHEMA, "{}"),
        ({"guided_regex": "[0-9]"}, GrammarKind.REGEX, "[0-9]"),
        ({"guided_choice": ["yes"]}, GrammarKind.REGEX, "yes"),
        ({"guided_grammar": 'root ::= "a"'}, GrammarKind.LARK, 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, GrammarKind.LARK, 'root ::= "a"'),
    ],
)
def test_each_way_to_ask(fields: dict[str, Any], kind: GrammarKind, source: str) -> None:
    assert asked(**fields) == Grammar(kind, source)


def test_a_choice_is_spelled_exactly() -> None:
    choices = ["a.b*c", "(x|y)", "\\d", "é\n\t\x00", "a/b", "#~&-", '"q"', "[^]{2}$", " "]
    grammar = asked(guided_choice=choices)
    assert grammar is not None
    for text in choices:
        assert re.fullmatch(grammar.source, text)
    for text in ("aXbc", "x", "1", "é\n\t", "", "^", "ab", "a.b*c(x|y)"):
        assert not re.fullmatch(grammar.source, text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": None}}, "response_format.type"),
        ({"response_format": {"type": "regex"}}, "response_format.type"),
        ({"response_format": {"type": ["json_object"]}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
        (schema(), "response_format.json_schema"),
        (schema(schema=True), "response_format.json_schema.schema"),
        (schema(schema=[]), "response_format.json_schema.schema"),
        (schema(schema="{"), "response_format.json_schema.schema"),
        (schema(schema={}, strict="yes"), "response_format.json_schema.strict"),
        (schema(schema={}, name=5), "response_format.json_schema.name"),
        (schema(schema={}, description=[]), "response_format.json_schema.description"),
        (schema(schema=nested(65)), "response_format.json_schema.schema"),
        (schema(schema={"enum": ["x" * 70_000]}), "response_format.json_schema.schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"guided_json": "["}, "guided_json"),
        ({"guided_json": "[" * 5000}, "guided_json"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": ["." * 40_000]}, "guided_choice"),
        ({"guided_regex": "a" * 65_537}, "guided_regex"),
        ({"guided_grammar": "é" * 40_000}, "guided_grammar"),
    ],
)
def test_what_is_refused_says_where_and_what_is_allowed(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        asked(**fields)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, "invalid_value")
    assert error.message.startswith(f"{param} must be ") and len(error.message) < 200


def test_only_one_can_be_followed() -> None:
    for fields in (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"structured_outputs": {"regex": "a"}, "grammar": "start: X"},
    ):
        names = list(fields)
        with pytest.raises(Refused) as caught:
            asked(**fields)
        assert caught.value.param == names[1] and names[0] in caught.value.message
    assert asked(response_format={"type": "text"}, guided_regex="a", guided_choice=[]) == Grammar(
        GrammarKind.REGEX, "a"
    )


def test_depth_is_measured_without_recursion() -> None:
    assert asked(guided_json=nested(64)) is not None
    wide = {"properties": {str(i): {"enum": [[i]]} for i in range(500)}}
    assert not checks.deeper(wide, 5) and checks.deeper(wide, 4)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert checks.deeper(deep, 64)
    while deep:  # a tree so deep is taken apart by hand, too
        deep = deep[0]


def test_a_schema_is_measured_before_it_is_walked() -> None:
    """One that is too large and too deep is told of its size: a walk through some megabytes takes a second."""
    large = {**nested(80), "x": "y" * LIMITS.grammar_bytes}
    for fields in ({"guided_json": large}, {"guided_json": json.dumps(large)}, schema(schema=large)):
        with pytest.raises(Refused, match=f"at most {LIMITS.grammar_bytes} bytes"):
            asked(**fields)


def test_the_field_that_asked_is_known_for_later_refusals() -> None:
    body = parse.parse_chat(msgspec.json.encode({**CHAT, **schema(schema=SCHEMA)}), LIMITS)
    assert structured.field_of(body) == "response_format"
    assert structured.field_of(parse.parse_chat(msgspec.json.encode(CHAT), LIMITS)) is None
