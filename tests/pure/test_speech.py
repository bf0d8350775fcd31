"""What a chat model says, cut into content, reasoning and tool calls: examples, properties, and a brute force."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.api.calljson import MAX_DEPTH, JsonValue
from janus_server.api.speech import Said, Speech, Style, Thought, ToolArguments, ToolForm, ToolOpened, gathered

HERMES = Style(reasoning=True, tools=ToolForm.HERMES)
LLAMA = Style(tools=ToolForm.LLAMA, names=frozenset({"f", "g"}))
MISTRAL = Style(tools=ToolForm.MISTRAL)
STYLES = (
    Style(),
    Style(reasoning=True),
    Style(reasoning=True, in_thought=True),
    HERMES,
    Style(reasoning=True, in_thought=True, tools=ToolForm.HERMES, single=True),
    LLAMA,
    Style(reasoning=True, tools=ToolForm.LLAMA, names=frozenset({"f"})),
    MISTRAL,
)


class Heard:
    """All that came of a text pushed in these pieces."""

    def __init__(self, style: Style, pieces: list[str]) -> None:
        self.speech = Speech(style, "key")
        self.pieces = [piece for text in pieces for piece in self.speech.push(text)] + self.speech.finish()
        self.lost = self.speech.broken | self.speech.incomplete
        told = gathered(self.pieces, {})
        self.content, self.reasoning, self.calls = told.content, told.reasoning, told.calls
        self.whole = gathered(self.pieces, self.lost)

    def functions(self) -> list[tuple[str, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in self.whole.calls]

    def all(self) -> tuple[object, ...]:
        return (self.content, self.reasoning, self.calls, self.speech.broken, self.speech.incomplete, self.whole)


def hear(style: Style, text: str) -> Heard:
    return Heard(style, [text])


def call(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def hermes(name: str, arguments: object) -> str:
    return f"<tool_call>\n{call(name, arguments)}\n</tool_call>"


# Examples


def test_reasoning_then_text_then_calls_then_text() -> None:
    text = f"<think>\nhm, <b>\n</think>\n\nLet me see.\n{hermes('f', {'a': 1})}\n{hermes('g', {})}\nDone."
    heard = hear(HERMES, text)
    assert heard.reasoning == "hm, <b>"
    assert heard.content == "Let me see.\nDone."
    assert heard.functions() == [("f", {"a": 1}), ("g", {})]
    assert len({one.id for one in heard.calls}) == 2
    assert all(re.fullmatch("call_[0-9a-f]{24}", one.id) for one in heard.calls)
    assert {one.id for one in Heard(HERMES, list(text)).calls} == {one.id for one in heard.calls}


def test_a_message_of_calls_alone_has_no_content() -> None:
    for style, text in (
        (HERMES, f"\n\n{hermes('f', {})}\n\n"),
        (HERMES, f"<think>\n\n</think>\n\n{hermes('f', {})}\n"),
        (LLAMA, "\n" + call("f", {}, "parameters") + " "),
        (MISTRAL, f"[TOOL_CALLS] [{call('f', {})}]\n"),
    ):
        heard = hear(style, text)
        assert (heard.content, heard.reasoning) == ("", ""), text
        assert heard.functions() == [("f", {})]


def test_where_the_text_starts() -> None:
    inside = Style(reasoning=True, in_thought=True)
    assert (hear(inside, "a\n</think>\n\nb").reasoning, hear(inside, "a\n</think>\n\nb").content) == ("a", "b")
    assert hear(inside, "never closed").reasoning == "never closed"
    plain = Style(reasoning=True)
    assert hear(plain, "  b").content == "  b"
    assert hear(plain, "say <think>\n</think>").content == "say <think>\n</think>"
    assert hear(plain, "<thin").content == "<thin"
    assert hear(plain, "<think>\na").reasoning == "a"
    assert hear(plain, "</think>b").content == "</think>b"


def test_pieces_come_as_early_as_they_can() -> None:
    speech = Speech(HERMES, "key")
    assert speech.push("a <b") == [Said("a <b")]
    assert speech.push(" <tool") == []
    assert speech.push("s> ") == [Said(" <tools>")]
    assert speech.push('<tool_call>{"name": "f"') == []
    opened, arguments = speech.push(', "arguments": {"a')
    assert isinstance(opened, ToolOpened) and (opened.number, opened.name) == (0, "f")
    assert arguments == ToolArguments(0, '{"a')
    assert speech.push('": "b\\') == [ToolArguments(0, '": "b\\')]
    assert speech.push('""}}') == [ToolArguments(0, '""}')]
    thinking = Speech(Style(reasoning=True), "key")
    assert thinking.push("<think>") == [] and thinking.thinking
    assert thinking.push("so </") == [Thought("so")]
    assert thinking.push("p>") == [Thought(" </p>")]
    assert thinking.push("</think>a ") == [Said("a ")] and not thinking.thinking


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"type": "function", "id": 3, "name": "f", "arguments": {}}', {}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f", "arguments": {"code": "a\nb\tc"}}', {"code": "a\nb\tc"}),
        ('{"name": "f", "arguments": {"a": "</tool_call> <tool_call>"}}', {"a": "</tool_call> <tool_call>"}),
        ('{"name": "f", "arguments": {"a": 1}', {"a": 1}),
    ],
)
def test_what_is_a_call(text: str, arguments: object) -> None:
    for end in ("</tool_call>", "\n</tool_call>", ""):
        heard = hear(HERMES, f"<tool_call>{text}{end}")
        assert heard.functions() == [("f", arguments)]
        assert (heard.content, heard.lost) == ("", {})


@pytest.mark.parametrize(
    "text",
    [
        "f(1)",
        "{}",
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "a b", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": "no object"}',
        '{"name": "f", "arguments": nul',
        '{"name": "f", "other": {}}',
        '{"name": "f", "name": "g"}',
        '{"arguments": {"a": 1}}',
        '{"name": "\\ud800", "arguments": {}}',
        "{'name': 'f'}",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    for whole in (f"<tool_call>\n{text}\n</tool_call> then", f"say <tool_call>{text}"):
        heard = hear(HERMES, whole)
        assert (heard.content, heard.calls, heard.lost) == (whole, (), {})


def test_a_call_that_breaks_is_told_as_far_as_it_was_good_and_is_content_as_a_whole() -> None:
    text = 'a <tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call> b ' + hermes("g", {})
    heard = hear(HERMES, text)
    assert [one.arguments for one in heard.calls] == ['{"a": tru', "{}"]
    assert list(heard.speech.broken) == [0]
    assert heard.whole.content == text[: text.index(" <tool_call>\n")]
    assert heard.functions() == [("g", {})]


def test_a_call_that_the_end_cuts_off() -> None:
    heard = hear(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b')
    assert [one.arguments for one in heard.calls] == ['{"a": "b']
    assert list(heard.speech.incomplete) == [0] and heard.speech.broken == {}
    early = hear(HERMES, '<tool_call>{"name": "f", "argum')
    assert early.content == '<tool_call>{"name": "f", "argum' and early.lost == {}


def test_llama_calls_are_the_message_and_name_a_function_that_was_offered() -> None:
    both = '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    assert hear(LLAMA, both).functions() == [("f", {"a": 1}), ("g", {})]
    assert hear(LLAMA, both.replace("; ", "\n")).functions() == [("f", {"a": 1}), ("g", {})]
    for text in ('{"name": "h", "parameters": {}}', 'so: {"name": "f", "parameters": {}}', '{"city": "Rome"}', "{"):
        assert (hear(LLAMA, text).content, hear(LLAMA, text).calls) == (text, ())


def test_mistral_calls_are_one_list() -> None:
    heard = hear(MISTRAL, f"so [TOOL_CALLS] [{call('f', {'a': 1})}, {call('g', {})}]")
    assert (heard.content, heard.functions()) == ("so", [("f", {"a": 1}), ("g", {})])
    for text in ("[TOOL_CALLS] none", "[TOOL_CALLS", "[TOOL_CALLS] [3]", "[TOOL_CALLS] "):
        assert hear(MISTRAL, text).content == text
    # Its templates take back no other ids than these.
    assert all(re.fullmatch("[0-9a-f]{9}", one.id) for one in heard.calls)


def test_only_the_first_call_counts_where_one_was_asked_for() -> None:
    heard = hear(Style(tools=ToolForm.HERMES, single=True), hermes("f", {}) + "\n" + hermes("g", {}) + "\nso")
    assert heard.functions() == [("f", {})]
    assert heard.content == "so"


# Properties

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "<tool", "</", "<", "{",
    "}", "[", "]", ":", ",", ";", '"', "\\", '"name"', '"f"', '"arguments"', '"parameters"', '"a"', "null", "tru",
    "true", "-1", "0", "2.5e", "\n", " ", "x", "é", call("f", {"a": [1, "b\n"]}), hermes("g", {"<think>": None}),
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("style", STYLES)
@given(pieces=cut_texts())
def test_it_does_not_matter_how_a_text_is_cut(style: Style, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = hear(style, text)
    assert Heard(style, pieces).all() == Heard(style, list(text)).all() == whole.all()


@pytest.mark.parametrize("style", STYLES)
@given(text=TEXTS)
def test_what_is_told_as_a_call_is_one_and_nothing_is_lost(style: Style, text: str) -> None:
    heard = hear(style, text)
    for name, arguments in heard.functions():
        assert re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) and isinstance(arguments, dict)
    for piece in heard.pieces:
        assert not hasattr(piece, "text") or piece.text
    if not heard.whole.calls:
        kept = heard.whole.reasoning + heard.whole.content
        assert squeezed(kept) == squeezed(without_markers(style, text)) or style.single


def without_markers(style: Style, text: str) -> str:
    if style.reasoning:
        text = text if style.in_thought else re.sub(r"^\s*<think>", "", text)
        opened = style.in_thought or text != text
        return text.replace("</think>", "", 1) if opened else text
    return text


def squeezed(text: str) -> str:
    return "".join(text.split())


# Brute force: the same rules on the whole text, with the standard library's parser

NAMES = st.sampled_from(["f", "g.h", "long-name_1"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
    | st.sampled_from(["<tool_call>", "</tool_call>", "</think>", '"}']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
GOOD = st.builds(hermes, NAMES, st.dictionaries(st.text(max_size=3), VALUES, max_size=3))
BAD = st.sampled_from(
    ["<tool_call>", "<tool_call>{", '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>', "<tool_call>[1]"]
)
WORDS = st.text(alphabet='ab {}[]:,".<\n', max_size=12)
MESSAGES = st.lists(GOOD | BAD | WORDS, max_size=6).map("".join)


@given(thought=st.none() | st.text(alphabet="ab <\n", max_size=8), message=MESSAGES)
def test_against_a_parser_of_the_whole_text(thought: str | None, message: str) -> None:
    text = message if thought is None else f"<think>{thought}</think>{message}"
    heard = hear(HERMES, text)
    content, calls = parsed(message)
    assert squeezed(heard.whole.content) == squeezed(content)
    assert heard.functions() == calls
    assert heard.reasoning.strip() == (thought or "").strip()


def parsed(message: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a text that has all of its markers outside of malformed calls."""
    content, calls = [], []
    decoder = json.JSONDecoder(strict=False)
    while True:
        before, marker, rest = message.partition("<tool_call>")
        content.append(before)
        if not marker:
            return "".join(content), calls
        try:
            start = len(rest) - len(rest.lstrip(" \t\n\r"))
            found, end = decoder.raw_decode(rest, start)
            calls.append((found["name"], found["arguments"]))
        except (ValueError, TypeError, KeyError):
            content.append(marker)
            message = rest
        else:
            message = re.sub(r"^[ \t\n\r]*</tool_call>", "", rest[end:])


@given(value=VALUES, rest=st.sampled_from(["", " ", ",", "}", "]"]))
def test_values_end_where_they_end(value: object, rest: str) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        reader = JsonValue()
        end = reader.feed(text + (rest or " "), 0)
        assert (reader.bad, reader.done, end) == (False, True, len(text))


@given(st.text(alphabet='{}[]:,"\\ 01-.eEtruefalsn\n', max_size=16))
def test_a_value_is_bad_exactly_when_a_parser_finds_it_so(text: str) -> None:
    text = f"[{text}]"
    reader = JsonValue()
    end = reader.feed(text, 0)
    try:
        json.loads(text, strict=False)
    except ValueError:
        assert not reader.done or end < len(text)
    else:
        assert reader.done and end == len(text)


def test_a_value_can_be_neither_too_deep_nor_too_long() -> None:
    for text, good in (("[" * MAX_DEPTH + "]" * MAX_DEPTH, True), ("[" * (MAX_DEPTH + 1), False), ("1" * 5000, False)):
        reader = JsonValue()
        reader.feed(text + " ", 0)
        assert (reader.done, reader.bad) == (good, not good)
