"""Tools and reasoning of a chat call: dialects of templates, what is refused, and what a forced call may be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from janus_server import types
from janus_server.api import parse, plan, tools
from janus_server.api.bodies import Limits
from janus_server.api.dialect import Dialect, Marker, dialect_of, ends_in_thought, markers_of
from janus_server.api.speech import Speech, Style, ToolForm, gathered
from janus_server.errors import Refused

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
LIMITS = Limits()
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HERMES = Dialect(reads_tools=True, tools=ToolForm.HERMES)
THINKER = Dialect(reasoning=True, thinking_switch=True, reads_tools=True, tools=ToolForm.HERMES)
NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
F = {"type": "function", "function": {"name": "f", "description": "d", "parameters": NUMBERS, "strict": True}}
G = {"type": "function", "function": {"name": "g"}}


def body(**fields: Any) -> Any:
    return parse.parse_chat(json.dumps({**CHAT, **fields}).encode(), LIMITS)


def spoken(dialect: Dialect, prompt_end: str = "", **fields: Any) -> plan.Call:
    """The call for a body, as `http` makes it."""
    target = plan.Target("m", 100, 300, (257,), types.Sampling(), dialect)
    given = body(**fields)
    call = plan.plan_chat(given, [1, 2], target, LIMITS, plan.Label("chatcmpl-1", 1, 1))
    return tools.spoken_by(call, tools.talk_of(given, dialect), prompt_end)


def deep(levels: int) -> Any:
    """An object of that many levels."""
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


# Dialects. Each template is a fragment that does what a family's template does.

QWEN = """{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- 'return <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}{%- endif %}
{%- for message in messages %}{{- message.content.split('</think>')[-1] }}{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
LLAMA = """{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": dictionary}' }}
{%- endif %}{%- for message in messages %}{{- message.content }}{%- endfor %}"""
MISTRAL = "{%- if tools is not none %}[AVAILABLE_TOOLS]{{ tools }}{%- endif %}{{- '[TOOL_CALLS] [' }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, THINKER),
        (LLAMA, Dialect(reads_tools=True, tools=ToolForm.LLAMA)),
        (MISTRAL, Dialect(reads_tools=True, tools=ToolForm.MISTRAL)),
        ("{{ messages[0].content }}", Dialect()),
        (None, Dialect()),
        ("{# tools: <tool_call> {'arguments'} </think> enable_thinking #}{{ messages[0].content }}", Dialect()),
        ("{% for t in tools %}{{ t }}{% endfor %}", Dialect(reads_tools=True)),
        ("{{ tools }}<tool_call>\n<function=f>\n{'arguments'}", Dialect(reads_tools=True)),
        ("{{ tools }}[TOOL_CALLS]f[ARGS]{}", Dialect(reads_tools=True)),
        ("<|Assistant|><think>\n{{ c.split('</think>') }}", Dialect(reasoning=True)),
    ],
)
def test_dialects(template: str | None, expected: Dialect) -> None:
    assert dialect_of(template, template, ()) == expected


def test_a_template_for_tools_alone_says_how_tools_are_called() -> None:
    assert dialect_of("{{ messages[0].content }}", MISTRAL, ()).tools is ToolForm.MISTRAL
    assert dialect_of(QWEN, "{{ messages[0].content }}", ()) == Dialect(reasoning=True, thinking_switch=True)


@pytest.mark.parametrize(("folder", "expected"), [("qwen3", THINKER), ("deepseek_v3", Dialect())])
def test_real_templates(folder: str, expected: Dialect) -> None:
    path = SHARED / "models" / "tokenizers" / folder / "tokenizer_config.json"
    if not path.exists():
        pytest.skip("the shared tokenizers are not here")
    template = json.loads(path.read_text())["chat_template"]
    assert dialect_of(template, template, ()) == expected


def test_a_prompt_may_leave_a_thought_open() -> None:
    assert ends_in_thought("<|Assistant|><think>\n")
    assert not ends_in_thought("<think>\n\n</think>\n\n")
    assert not ends_in_thought("assistant\n")


# The request


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [F, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
        ({"tools": [F, G, F]}, "tools[2].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters.type"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(65)}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(900)}}]},
         "tools[0].function.parameters"),
        ({"tools": [F], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"function_call": "auto"}, "function_call"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
         "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        body(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param.split(".")[0].split("[")[0])


def test_tools_are_measured_before_they_are_walked() -> None:
    one = {"type": "function", "function": {"name": "f", "parameters": deep(LIMITS.tool_depth + 9)}}
    large = {"type": "function", "function": {"name": "g", "description": "x" * LIMITS.tool_bytes}}
    with pytest.raises(Refused, match=f"tools must be at most {LIMITS.tool_bytes} bytes"):
        body(tools=[one, large])
    with pytest.raises(Refused, match="nested at most"):
        body(tools=[one])


def test_bounds_are_allowed() -> None:
    parameters = {"type": "object", "default": deep(63)}
    given = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(128)]
    assert len(body(tools=given).tools) == 128


def test_a_model_that_cannot_be_told_of_tools_says_so() -> None:
    for dialect, words in ((Dialect(), "chat template knows no tools"), (Dialect(reads_tools=True), "not supported")):
        for choice in (None, "auto", "required"):
            with pytest.raises(Refused, match=words) as caught:
                spoken(dialect, tools=[F], tool_choice=choice)
            assert caught.value.param == "tools"
        assert spoken(dialect, tools=[F], tool_choice="none").style == Style()


def test_what_the_template_is_given() -> None:
    talk = tools.talk_of(body(tools=[F, G]), HERMES)
    assert talk.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": NUMBERS}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    )
    assert tools.talk_of(body(tools=[F], tool_choice="none"), HERMES).tools is None
    assert tools.talk_of(body(), HERMES).tools is None


def test_effort_switches_thinking_off_where_the_template_can() -> None:
    for dialect, fields, kwargs in (
        (THINKER, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (THINKER, {"reasoning_effort": "low"}, None),
        (THINKER, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
         {"enable_thinking": True}),
        (HERMES, {"reasoning_effort": "none"}, None),
    ):  # fmt: skip
        assert tools.talk_of(body(**fields), dialect).kwargs == kwargs


def test_a_plain_call_keeps_the_fast_path() -> None:
    call = spoken(HERMES)
    assert call.style == Style() and call.requests[0].shown_ids == () and call.requests[0].grammar is None
    for off in ("separate_reasoning", "include_reasoning"):
        assert spoken(THINKER, "<think>\n", **{off: False}).style == Style()
    assert spoken(THINKER, "<think>\n").style == Style(reasoning=True, in_thought=True)


def test_only_the_markers_that_are_needed_are_shown() -> None:
    markers = markers_of({"<think>": (1, True), "</think>": (2, True), "<tool_call>": (3, True), "x": (4, True),
                          "</tool_call>": (5, False)})  # fmt: skip
    dialect = msgspec.structs.replace(THINKER, markers=markers)
    assert markers[1] == Marker("</think>", 2, True)
    assert spoken(dialect).requests[0].shown_ids == (1, 2)
    assert spoken(dialect, tools=[F]).requests[0].shown_ids == (1, 2, 3)
    assert spoken(dialect, tools=[F], separate_reasoning=False).requests[0].shown_ids == (3,)


def test_a_grammar_only_where_a_call_is_forced() -> None:
    assert spoken(HERMES, tools=[F]).requests[0].grammar is None
    grammar = spoken(HERMES, tools=[F, G], tool_choice="required").requests[0].grammar
    assert grammar is not None and grammar.kind is types.GrammarKind.TOOLS
    assert 'name\\": \\"g' in grammar.source
    named = spoken(HERMES, tools=[F, G], tool_choice={"type": "function", "function": {"name": "f"}})
    assert named.requests[0].grammar is not None
    assert 'name\\": \\"g' not in named.requests[0].grammar.source
    assert named.style.named and named.style.single


# What the grammars allow


class Constrained:
    """A grammar as the engine runs it, over Qwen3's vocabulary."""

    def __init__(self) -> None:
        llguidance = pytest.importorskip("llguidance")
        path = SHARED / "models" / "tokenizers" / "qwen3" / "tokenizer.json.gz"
        if not path.exists():
            pytest.skip("the shared tokenizers are not here")
        import tokenizers

        source = gzip.decompress(path.read_bytes()).decode()
        self.ids = tokenizers.Tokenizer.from_str(source)
        self._matcher = llguidance.LLMatcher
        self._vocabulary = llguidance.LLTokenizer(source)

    def accepts(self, grammar: types.Grammar | None, text: str) -> bool:
        """Whether the text is a whole answer."""
        assert grammar is not None
        matcher = self._matcher(self._vocabulary, grammar.source)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.ids.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def qwen() -> Constrained:
    return Constrained()


CALL_F = '{"name": "f", "arguments": {"n": 1}}'
CALL_G = '{"name": "g", "arguments": {}}'
BROKEN = ('{"name": "f", "arguments": {"n": "1"}}', '{"name": "f", "arguments": {}}', '{"name": "h", "arguments": {}}')


def marked(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def test_forced_hermes_calls(qwen: Constrained) -> None:
    markers = (Marker("<tool_call>", 151657, False), Marker("</tool_call>", 151658, False))
    dialect = msgspec.structs.replace(HERMES, markers=markers)
    several = spoken(dialect, tools=[F, G], tool_choice="required").requests[0].grammar
    one = spoken(dialect, tools=[F, G], tool_choice="required", parallel_tool_calls=False).requests[0].grammar
    named = spoken(dialect, tools=[F, G], tool_choice={"type": "function", "function": {"name": "g"}})
    assert qwen.accepts(several, marked(CALL_F)) and qwen.accepts(several, marked(CALL_G, CALL_F))
    assert qwen.accepts(one, marked(CALL_F)) and not qwen.accepts(one, marked(CALL_F, CALL_G))
    assert qwen.accepts(named.requests[0].grammar, marked(CALL_G))
    assert not qwen.accepts(named.requests[0].grammar, marked(CALL_F))
    for text in ("hello", "", *(marked(call) for call in BROKEN), "so " + marked(CALL_F), marked(CALL_F) + " so"):
        assert not qwen.accepts(several, text), text


def test_a_forced_call_may_be_thought_about_first(qwen: Constrained) -> None:
    ids = {"<think>": 151667, "</think>": 151668, "<tool_call>": 151657, "</tool_call>": 151658}
    markers = markers_of({text: (i, False) for text, i in ids.items()})
    thought, call = "hm <b>\n</think>\n\n", marked(CALL_F)
    for known in (markers, markers[2:]):
        dialect = msgspec.structs.replace(THINKER, markers=known)
        forced = {"tools": [F], "tool_choice": "required"}
        possible = spoken(dialect, "assistant\n", **forced).requests[0].grammar
        inside = spoken(dialect, "<think>\n", **forced).requests[0].grammar
        never = spoken(dialect, "<think>\n\n</think>\n\n", **forced).requests[0].grammar
        if known is markers:
            assert qwen.accepts(possible, f"<think>\n{thought}{call}")
            assert qwen.accepts(inside, thought + call)
        assert qwen.accepts(possible, call)
        assert not qwen.accepts(inside, call)
        assert qwen.accepts(never, call) and not qwen.accepts(never, f"<think>\n{thought}{call}")


def test_forced_calls_of_other_families(qwen: Constrained) -> None:
    forced = {"tools": [F, G], "tool_choice": "required"}
    llama = spoken(Dialect(reads_tools=True, tools=ToolForm.LLAMA), **forced).requests[0].grammar
    assert qwen.accepts(llama, CALL_F.replace("arguments", "parameters"))
    assert not qwen.accepts(llama, CALL_F)
    mistral = spoken(Dialect(reads_tools=True, tools=ToolForm.MISTRAL), **forced).requests[0].grammar
    for text in (f"[TOOL_CALLS] [{CALL_F}, {CALL_G}]", f"[TOOL_CALLS][{CALL_G}]"):
        assert qwen.accepts(mistral, text)
    assert not qwen.accepts(mistral, "[TOOL_CALLS] []")


def test_tools_that_are_left_to_the_model_and_a_schema_for_what_it_says(qwen: Constrained) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
    markers = (Marker("<tool_call>", 151657, False), Marker("</tool_call>", 151658, False))
    for dialect, call in (
        (msgspec.structs.replace(HERMES, markers=markers), marked(CALL_F)),
        (Dialect(reads_tools=True, tools=ToolForm.MISTRAL), f"[TOOL_CALLS] [{CALL_F}]"),
    ):
        grammar = spoken(dialect, tools=[F], response_format=wanted).requests[0].grammar
        assert qwen.accepts(grammar, '{"n": 3}') and not qwen.accepts(grammar, '{"m": 3}')
        assert qwen.accepts(grammar, call) and not qwen.accepts(grammar, "n")
    with pytest.raises(Refused, match="JSON objects like the answers"):
        spoken(Dialect(reads_tools=True, tools=ToolForm.LLAMA), tools=[F], response_format=wanted)
    anything = spoken(HERMES, tools=[F], response_format={"type": "json_object"}).requests[0].grammar
    assert qwen.accepts(anything, '{"m": [3]}') and not qwen.accepts(anything, "m")
    with pytest.raises(Refused, match="no room for them"):
        spoken(HERMES, tools=[F], guided_regex="a+")
    forced = spoken(HERMES, tools=[F], tool_choice="required", response_format=wanted)
    assert forced.requests[0].grammar == spoken(HERMES, tools=[F], tool_choice="required").requests[0].grammar


def test_an_answer_with_a_schema_may_be_thought_about_first(qwen: Constrained) -> None:
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}}
    dialect = msgspec.structs.replace(
        THINKER, markers=markers_of({"<think>": (151667, False), "</think>": (151668, False)})
    )
    possible = spoken(dialect, "assistant\n", **wanted)
    assert qwen.accepts(possible.requests[0].grammar, '<think>\nhm\n</think>\n\n{"n": 3}')
    assert qwen.accepts(possible.requests[0].grammar, '{"n": 3}')
    inside = spoken(dialect, "<think>\n", **wanted)
    assert inside.style.in_thought
    assert qwen.accepts(inside.requests[0].grammar, 'hm\n</think>\n\n{"n": 3}')
    assert not qwen.accepts(inside.requests[0].grammar, '{"n": 3}')
    for fields in ({"separate_reasoning": False}, {"response_format": None, "guided_regex": "a"}):
        plain = spoken(dialect, "<think>\n", **{**wanted, **fields})
        assert not plain.style.in_thought
        grammar = plain.requests[0].grammar
        assert grammar is not None and grammar.kind is not types.GrammarKind.TOOLS


def test_what_a_grammar_forces_is_read_back() -> None:
    for form, text in (
        (ToolForm.HERMES, marked(CALL_F, CALL_G)),
        (ToolForm.LLAMA, CALL_F.replace("arguments", "parameters")),
        (ToolForm.MISTRAL, f"[TOOL_CALLS] [{CALL_F}, {CALL_G}]"),
    ):
        call = spoken(Dialect(reads_tools=True, tools=form), tools=[F, G], tool_choice="required")
        speech = Speech(call.style, "k")
        told = gathered([*speech.push(text), *speech.finish()], speech.broken | speech.incomplete)
        assert told.content == "" and told.calls[0].arguments == '{"n": 1}'


def test_schemas_keep_their_own_definitions(qwen: Constrained) -> None:
    schema = {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "$defs": {"n": {"type": "boolean"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar = spoken(Dialect(reads_tools=True, tools=ToolForm.LLAMA), tools=[tool], tool_choice="required")
    source = grammar.requests[0].grammar
    assert qwen.accepts(source, '{"name": "f", "parameters": {"n": true}}')
    assert not qwen.accepts(source, '{"name": "f", "parameters": {"n": 1}}')
