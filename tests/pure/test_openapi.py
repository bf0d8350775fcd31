"""The OpenAPI document: made of the records that validate, in one order, with nothing offered that is refused."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from janus_server.api import answers, bodies, parse, plan, tokenize
from janus_server.api.bodies import ChatBody, CompletionBody, Limits, NotYet
from janus_server.api.openapi import About, Access, Operation, document, encode
from janus_server.errors import Refused
from janus_server.http.docs import PAGE, read_page

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits()
TALK = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "a"}}
CHAT = About(
    tag="generate", summary="Chat", body=ChatBody, answer=answers.ChatCompletion, event=answers.ChatCompletionChunk
)
TEXT = About(tag="generate", summary="Text", body=CompletionBody, answer=answers.Completion, event=answers.Completion)
TOKENS = About(
    tag="tokens", summary="Tokens", body=tokenize.TokenizeBody, answer=tokenize.Tokenized, one_of=("prompt", "messages")
)
MODEL = About(tag="models", summary="Model", answer=answers.Model, access=Access.ADMIN)
OPERATIONS = (
    Operation("POST", "/v1/chat/completions", CHAT),
    Operation("POST", "/v1/completions", TEXT),
    Operation("POST", "/tokenize", TOKENS),
    Operation("GET", "/v1/models/{model}", MODEL),
    Operation("DELETE", "/v1/models/{model}", None),
)
TREE = document(OPERATIONS, "1", LIMITS)
SCHEMAS = TREE["components"]["schemas"]


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from refs(inner)
    if isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def test_the_same_routes_give_the_same_bytes_in_any_order() -> None:
    assert encode(TREE) == encode(document(OPERATIONS[::-1], "1", LIMITS))
    assert json.loads(encode(TREE)) == TREE


def test_every_reference_leads_somewhere() -> None:
    found = set(refs(TREE))
    assert found
    for ref in found:
        node: Any = TREE
        for name in ref.removeprefix("#/").split("/"):
            node = node[name]


def test_ranges_and_required_fields_come_from_the_records() -> None:
    chat = SCHEMAS["ChatBody"]
    assert chat["required"] == ["model", "messages"]
    temperature = chat["properties"]["temperature"]
    assert (temperature["type"], temperature["minimum"], temperature["maximum"]) == (["number", "null"], 0.0, 2.0)
    assert chat["properties"]["n"]["maximum"] == LIMITS.n
    assert chat["properties"]["messages"]["minItems"] == 1

    class Odd(msgspec.Struct):
        number: Annotated[int, Meta(ge=3, le=7)]

    tree = document((Operation("POST", "/odd", About(tag="x", summary="x", body=Odd)),), "1", LIMITS)
    assert tree["components"]["schemas"]["Odd"]["properties"]["number"] == {
        "type": "integer",
        "minimum": 3,
        "maximum": 7,
    }


@pytest.mark.parametrize("shape", [ChatBody, CompletionBody, tokenize.TokenizeBody])
def test_what_is_refused_is_not_offered(shape: type[msgspec.Struct]) -> None:
    refused = {field.name for field in msgspec.structs.fields(shape) if field.type is NotYet}
    schema = SCHEMAS[shape.__name__]
    assert refused
    assert set(schema["x-refused"]) == refused
    assert set(schema["properties"]) == {f.name for f in msgspec.structs.fields(shape)} - refused


def test_failures_have_openais_form_and_every_status_its_words() -> None:
    operation = TREE["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(operation["responses"])
    for name, answer in TREE["components"]["responses"].items():
        assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}, name
        assert answer["description"]
    details = SCHEMAS["ErrorDetails"]
    assert sorted(details["required"]) == ["code", "message", "param", "type"]
    assert "text/event-stream" in operation["responses"]["200"]["content"]


def test_operations_have_their_own_ids_and_ways_in() -> None:
    operations = [one for item in TREE["paths"].values() for one in item.values()]
    assert len({one["operationId"] for one in operations}) == len(OPERATIONS)
    assert TREE["paths"]["/v1/models/{model}"]["get"]["security"] == [{"admin": []}]
    named = {name for one in operations for way in one["security"] for name in way}
    assert named <= set(TREE["components"]["securitySchemes"])
    assert TREE["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["in"] == "path"


def test_fields_of_bodies_are_described() -> None:
    for name in ("ChatBody", "CompletionBody", "TokenizeBody"):
        bare = [field for field, one in SCHEMAS[name]["properties"].items() if "description" not in one]
        assert bare == [], f"{name}: give these words in api/describe.py"


# The page


def test_the_page_is_installed_and_asks_nobody_else() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "janus_server" / "http"
    assert sorted(data["janus_server.http"]) == sorted(p.name for p in folder.iterdir() if p.suffix not in (".py", ""))
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?://|//[a-z]|@import|url\(", re.sub(r"(?m)^\s*//.*$", "", text))
    assert not re.search(r"innerHTML|\beval\b|new Function|document\.write|\son\w+=\"|\sstyle=\"", text)
    assert len(text) < 20_000


def test_the_policy_of_the_page_names_its_own_script_and_nothing_inline() -> None:
    policy = dict(part.strip().split(" ", 1) for part in read_page().policy.split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in read_page().policy


# Tokenize bodies


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "model": ""}, "model"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ({"prompt": "a", "chat_template": "{{ x }}"}, "chat_template"),
        ({"prompt": "a", "chat_template": 0}, "chat_template"),
        ({"prompt": "a", "tools": [1]}, "tools[0]"),
        ({**TALK, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({**TALK, "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({**TALK, "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ],
)
def test_a_bad_tokenize_body_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        tokenize.parse_tokenize(json.dumps(body).encode(), LIMITS)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "a list of strings" not in caught.value.message


@given(st.lists(st.integers(-3, 12), max_size=8))
def test_ids_out_of_range_are_named_by_their_place(tokens: list[int]) -> None:
    bad = [i for i, token in enumerate(tokens) if not 0 <= token < 10]
    if not bad:
        plan.check_ids(tokens, 10, "tokens", "tokens")
        return
    with pytest.raises(Refused) as caught:
        plan.check_ids(tokens, 10, "tokens", "tokens")
    assert caught.value.message.startswith(f"tokens[{bad[0]}] must be ")


@pytest.mark.parametrize("raw", [b'{"tokens":[1,true]}', b'{"tokens":[1.5]}', b'{"tokens":"1"}', b"{}", b"[]", b"{"])
def test_a_bad_detokenize_body_is_refused(raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        tokenize.parse_detokenize(raw)
    assert caught.value.status == 400


def test_words_for_bodies_are_those_of_the_parser() -> None:
    with pytest.raises(Refused, match="a string"):
        parse.decode(b'{"prompt": 1}', tokenize.TokenizeBody, tokenize.ALLOWED)
    assert bodies.ALLOWED["prompt"] != tokenize.ALLOWED["prompt"]
