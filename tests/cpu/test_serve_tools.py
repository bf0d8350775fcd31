"""Forced tool calls from a real server: a model with random weights must still write calls that can be read."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import Server, tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("janus_server.grammar") is None, reason="this build compiles no grammars"
)

# What families tell a model of tools, in as few tokens as a tiny context asks for.
HERMES = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}"
    "<tool_call>\n{\"name\": …, \"arguments\": …}\n</tool_call>{% endif %}"
)  # fmt: skip
LLAMA = '{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{"name": …, "parameters": …}{% endif %}'
MISTRAL = "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}[TOOL_CALLS] [{% endif %}"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Bergen"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "hourly": {"$ref": "#/$defs/switch"},
    },
    "required": ["city", "days", "hourly"],
    "additionalProperties": False,
    "$defs": {"switch": {"type": "boolean"}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def model(folder: Path, tools: str) -> Path:
    made = tiny_model(folder)
    template = made / "chat_template.jinja"
    template.write_text(tools + template.read_text())
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    families = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
    names = [f"{name}={model(tmp_path_factory.mktemp(name), source)}" for name, source in families.items()]
    with Server(*names, "--memory", "96MiB", "--page-size", str(1 << 14)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def fits(name: str, arguments: Any) -> bool:
    if name == "time":
        return arguments == {}
    known = arguments["city"] in ("Oslo", "Bergen") and arguments["days"] in range(1, 10)
    return known and isinstance(arguments["hourly"], bool) and len(arguments) == 3


@pytest.mark.parametrize("family", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_can_be_read(client: openai.OpenAI, family: str, choice: Any) -> None:
    asked: Any = {
        "model": family, "messages": [{"role": "user", "content": "the quick brown fox"}], "tools": TOOLS,
        "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200, "temperature": 1.0,
    }  # fmt: skip
    for seed in range(4):
        answer = client.chat.completions.create(**asked, seed=seed).choices[0]
        [call] = answer.message.tool_calls or ()
        assert answer.message.content is None
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert call.function.name in (("weather", "time") if choice == "required" else ("weather",))
        assert fits(call.function.name, json.loads(call.function.arguments))
        name, arguments = "", ""
        for chunk in client.chat.completions.create(**asked, seed=seed, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        assert (name, arguments) == (call.function.name, call.function.arguments)


def test_several_choices_are_forced_each(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="hermes", messages=[{"role": "user", "content": "fox"}], tools=TOOLS, tool_choice="required", n=3,
        parallel_tool_calls=False, max_tokens=200,
    )  # fmt: skip
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len({call.id for call in calls}) == 3
    assert all(fits(call.function.name, json.loads(call.function.arguments)) for call in calls)


def test_a_forced_call_that_the_limit_cuts_off(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="llama", messages=[{"role": "user", "content": "fox"}], tools=TOOLS, tool_choice=NAMED, max_tokens=40
    ).choices[0]
    assert answer.finish_reason == "length"
