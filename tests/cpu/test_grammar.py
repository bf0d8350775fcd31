"""Grammars as the sampler meets them: masks against brute force, ends, copies, and what hostile sources cost."""

from __future__ import annotations

import codecs
import contextlib
import functools
import gc
import itertools
import json
import os
import random
import signal
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from janus_server.errors import Refused
from janus_server.grammar import limits
from janus_server.grammar.compile import _ENTRY_BYTES, Grammars
from janus_server.grammar.limits import WHITESPACE
from janus_server.grammar.matcher import Budget, Matcher
from janus_server.types import Grammar, GrammarKind

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pure"))
import tokenizer_cases

EOS, OTHER_EOS, CONTROL = 0, 1, 2
PIECES = ('{"', '":', '","', "true", "null", "12", "  ", "\n\n", "[[", "]]", "}}", "ab", "é", "<x>", 'a"')


class Tiny:
    """Two ends, a control token that spells like text, every byte, and some longer pieces; then nothing but padding."""

    def __init__(self) -> None:
        self.tokens = [b"<eos>", b"", b"a", *(bytes([i]) for i in range(256)), *(p.encode() for p in PIECES), b""]
        self.vocab_size = len(self.tokens)

    def token_bytes(self, token: int) -> bytes:
        return self.tokens[token]

    def is_special(self, token: int) -> bool:
        return token in (EOS, CONTROL)

    def ids(self, text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]


TINY = Tiny()
GRAMMARS = Grammars(cpu_s=10.0)
BRISK = Grammars(cpu_s=0.5, memory_bytes=256 << 20)


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    GRAMMARS.close()
    BRISK.close()


def compiled(kind: GrammarKind, source: Any = "", source_of: Any = TINY) -> Matcher:
    text = source if isinstance(source, str) else json.dumps(source)
    return GRAMMARS.compile(source_of, Grammar(kind, text), (EOS, OTHER_EOS))


def allows(matcher: Matcher, text: str) -> bool:
    """Whether the text is whole; the matcher is left as it was."""
    walker = matcher.copy()
    return all(walker.accept(token) for token in TINY.ids(text)) and (walker.done or EOS in walker.mask())


# Masks


ws = f"(?:{WHITESPACE})?"
PATTERNS: list[tuple[GrammarKind, Any, str]] = [
    (GrammarKind.REGEX, "[0-9]{2,4}-(a|ab|é)*", "[0-9]{2,4}-(a|ab|é)*"),
    (GrammarKind.REGEX, "(a*)*b?", "(a*)*b?"),
    (GrammarKind.REGEX, "yes|no|\\{\"x", "yes|no|\\{\"x"),
    (GrammarKind.REGEX, "^a/b\"c$", "a/b\"c"),
    (GrammarKind.LARK, "start: \"a\" WORD? \"<x>\"\nWORD: /[a-c]+/", "a[a-c]*<x>"),
    (GrammarKind.LARK, "root ::= item+\nitem ::= \"- \" [^\\n]* \"\\n\"", "(- [^\\n]*\\n)+"),
    (GrammarKind.JSON_SCHEMA, {"enum": ["ab", 12, None, True]}, "\"ab\"|12|null|true"),
    (GrammarKind.JSON_SCHEMA, {"type": "array", "items": {"enum": [1, 12]}, "maxItems": 2},
     f"\\[{ws}((1|12){ws}(,{ws}(1|12){ws})?)?\\]"),
    (GrammarKind.JSON_SCHEMA, {"type": "object", "properties": {"ab": {"type": "boolean"}}, "required": ["ab"],
                               "additionalProperties": False},
     f"\\{{{ws}\"ab\"{ws}:{ws}(true|false){ws}\\}}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "pattern"), PATTERNS, ids=range(len(PATTERNS)))
def test_masks_are_what_brute_force_finds(kind: GrammarKind, source: Any, pattern: str) -> None:
    """A token is allowed exactly when the text with it can still become one that the pattern matches."""
    whole = regex.compile(pattern)

    def viable(data: bytes) -> bool:
        return any(whole.fullmatch(text, partial=True) for text in finished(data))

    draw = random.Random(7)
    for _ in range(6):
        matcher, data = compiled(kind, source).copy(), b""
        for _ in range(12):
            mask = matcher.mask()
            assert (np.diff(mask) > 0).all() and mask.max() < TINY.vocab_size
            ended = whole.fullmatch(data.decode(errors="replace")) is not None
            expected = {EOS, OTHER_EOS} if ended else set()
            if not matcher.done:
                expected |= {t for t in range(3, TINY.vocab_size) if TINY.tokens[t] and viable(data + TINY.tokens[t])}
            assert set(mask.tolist()) == expected, (data, [TINY.tokens[t] for t in set(mask.tolist()) ^ expected])
            spoken = sorted(expected - {EOS, OTHER_EOS})
            if not spoken:
                break
            token = draw.choice(spoken)
            assert matcher.accept(token)
            data += TINY.tokens[token]


def finished(data: bytes) -> Iterator[str]:
    """The text of `data`, and where its last character is unfinished, texts with several that it may become."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data)
    except UnicodeDecodeError:
        return
    pending = decoder.getstate()[0]
    if not pending:
        yield text
        return
    for size in (1, 2, 3):
        for tail in itertools.product((0x80, 0x90, 0xA0, 0xA9, 0xBF), repeat=size):
            with contextlib.suppress(UnicodeDecodeError):
                yield text + (pending + bytes(tail)).decode()


def test_an_end_is_allowed_exactly_where_the_text_may_end() -> None:
    matcher = compiled(GrammarKind.REGEX, "ab?")
    assert EOS not in matcher.mask() and not matcher.done
    assert not matcher.copy().accept(EOS)
    assert matcher.accept(TINY.ids("a")[0])
    assert {EOS, OTHER_EOS} <= set(matcher.mask().tolist()) and not matcher.done
    ended = matcher.copy()
    assert ended.accept(OTHER_EOS) and ended.done and not ended.failed
    assert ended.mask().tolist() == [EOS, OTHER_EOS] and not ended.accept(TINY.ids("b")[0])
    assert matcher.accept(TINY.ids("b")[0])
    assert matcher.done and not matcher.failed  # nothing can follow: no end token is needed
    assert matcher.mask().tolist() == [EOS, OTHER_EOS]
    assert compiled(GrammarKind.REGEX, "").mask().tolist() == [EOS, OTHER_EOS]


def test_a_token_out_of_place_fails_and_stays_failed() -> None:
    for token in (CONTROL, TINY.ids("b")[0], TINY.vocab_size - 1, TINY.vocab_size, 10**9, -1, EOS):
        matcher = compiled(GrammarKind.REGEX, "a+")
        assert not matcher.accept(token), token
        assert matcher.failed and not matcher.done
        assert len(matcher.mask()) == 0 and not matcher.accept(TINY.ids("a")[0])


def test_control_tokens_are_no_text_unless_a_grammar_names_them() -> None:
    assert CONTROL not in compiled(GrammarKind.REGEX, "(?s:.*)").mask()
    named = compiled(GrammarKind.LARK, f'start: <[{CONTROL}]> "b"')
    assert named.mask().tolist() == [CONTROL] and named.accept(CONTROL) and named.accept(TINY.ids("b")[0])
    with pytest.raises(Refused):  # an end token is where the text ends, and nowhere else
        compiled(GrammarKind.LARK, f'start: <[{EOS}]> "b"')


def test_ends_beyond_the_tokenizer_are_known_too() -> None:
    matcher = GRAMMARS.compile(TINY, Grammar(GrammarKind.REGEX, "a*"), (EOS, TINY.vocab_size + 5))
    assert matcher.mask().tolist()[-1] == TINY.vocab_size + 5 and matcher.accept(TINY.vocab_size + 5) and matcher.done


def test_copies_are_independent() -> None:
    start = compiled(GrammarKind.JSON_OBJECT)
    one, two = start.copy(), start.copy()
    before = start.mask().tolist()
    assert all(one.accept(token) for token in TINY.ids('{"a": 1}')) and one.done
    assert not two.accept(TINY.ids("[")[0]) and two.failed
    assert start.mask().tolist() == before and not start.failed and not start.done
    late = start.copy()
    assert late.accept(TINY.ids("{")[0]) and late.copy().accept(TINY.ids("}")[0]) and not late.done


def test_json_object_is_an_object_and_blanks_have_an_end() -> None:
    matcher = compiled(GrammarKind.JSON_OBJECT)
    for text in ("{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1,\n  "b": 2\n}', '{"a":1}', '{"é\\n": "\\\\"}'):
        assert allows(matcher, text), text
    for text in ("[]", "1", "null", '"a"', " {}", "{} ", "{'a': 1}", '{"a": 1,}', "{\n\n}", "{   }", '{"a"}'):
        assert not allows(matcher, text), text
    assert allows(matcher, json.dumps({"a": {"b": [1, 2]}}, indent=8))
    own = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert not allows(compiled(GrammarKind.JSON_SCHEMA, own), "{\n\n\n}")


@pytest.mark.parametrize("name", ["trained", "stories260K", "qwen3", "smollm2"])
def test_real_vocabularies(name: str) -> None:
    """Byte-level and sentencepiece: every text that is allowed is valid, and the model's own spelling is allowed."""
    tokenizer = tokenizer_cases.tokenizer(name)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
              "required": ["name", "n"], "additionalProperties": False}  # fmt: skip
    start = GRAMMARS.compile(tokenizer, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), tokenizer.eos_ids)
    first = start.mask()
    assert not any(tokenizer.is_special(token) for token in first.tolist())
    assert {tokenizer.token_bytes(token) for token in first.tolist()} <= {b"{", b'{"', b"{\n", b"{\r\n"}
    for seed in range(3):
        matcher, draw, data = start.copy(), random.Random(seed), b""
        for _ in range(300):
            token = int(draw.choice(matcher.mask()))
            assert matcher.accept(token)
            if matcher.done:
                break
            data += tokenizer.token_bytes(token)
        assert matcher.done
        assert _valid(schema, json.loads(data + _last(tokenizer, token)))


def _last(tokenizer: Any, token: int) -> bytes:
    return b"" if token in tokenizer.eos_ids else bytes(tokenizer.token_bytes(token))


# Random schemas


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    numbers = st.tuples(st.integers(-50, 50), st.integers(0, 60)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    )
    strings = st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
    )
    names = st.text(string.ascii_lowercase, min_size=1, max_size=3)
    values = st.one_of(st.integers(-99, 99), st.booleans(), st.none(), names, st.lists(st.integers(0, 9), max_size=2))
    leaves = st.one_of(
        numbers, strings, st.just({"type": "boolean"}), st.just({"type": ["null", "boolean"]}),
        st.lists(values, min_size=1, max_size=4).map(lambda found: {"enum": found}),
        st.just({"type": "string", "pattern": "^[a-c]{1,3}(x|yz)$"}),
    )  # fmt: skip

    def grown(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
        )
        objects = st.dictionaries(names, st.tuples(inner, st.booleans()), max_size=4).map(
            lambda fields: {
                "type": "object", "properties": {name: schema for name, (schema, _) in fields.items()},
                "required": [name for name, (_, required) in fields.items() if required],
                "additionalProperties": False,
            }
        )  # fmt: skip
        return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found}))

    return st.recursive(leaves, grown, max_leaves=6)


@given(schemas(), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whatever_is_drawn_from_a_schema_is_valid(schema: dict[str, Any], seed: int) -> None:
    matcher, draw, data = compiled(GrammarKind.JSON_SCHEMA, schema), random.Random(seed), b""
    for _ in range(3000):
        token = int(draw.choice(matcher.mask()))
        assert matcher.accept(token) and not matcher.failed
        if token in (EOS, OTHER_EOS):
            break
        data += TINY.tokens[token]
        if matcher.done:
            break
    assert matcher.done
    assert _valid(schema, json.loads(data)), (schema, data)


def _valid(schema: dict[str, Any], value: Any) -> bool:
    """The keywords that `schemas` uses."""
    if "anyOf" in schema:
        return any(_valid(one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(one) is type(value) and one == value for one in schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    shape = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object", type(None): "null"}
    if shape.get(type(value)) not in kinds:
        return False
    if isinstance(value, str):
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**6)
        return fits and regex.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(_valid(schema["items"], v) for v in value)
    if isinstance(value, dict):
        known = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(known) and all(
            _valid(known[k], v) for k, v in value.items()
        )
    return (
        isinstance(value, bool)
        or value is None
        or schema.get("minimum", value) <= value <= schema.get("maximum", value)
    )


# What is refused


REFUSED: list[tuple[GrammarKind, Any, str]] = [
    (GrammarKind.JSON_SCHEMA, {"type": "banana"}, "a value of the wrong kind"),
    (GrammarKind.JSON_SCHEMA, {"type": 5}, "a value of the wrong kind"),
    (GrammarKind.JSON_SCHEMA, {"type": "object", "properties": 5}, "a value of the wrong kind"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": 5}, "a value of the wrong kind"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "("}, "a regular expression that is not valid"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "^(?=.*a)b"}, "look-around"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "(a)\\1"}, "back-references"),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "format": "nope"}, "a format that is not supported"),
    (GrammarKind.JSON_SCHEMA, {"not": {}, "if": {}}, "keywords that are not supported: if, not"),
    (GrammarKind.JSON_SCHEMA, {"type": "array", "uniqueItems": True}, "not supported: uniqueItems"),
    (GrammarKind.JSON_SCHEMA, {"enum": []}, "allows no text"),
    (GrammarKind.JSON_SCHEMA, {"type": "integer", "minimum": 2, "maximum": 1}, "allows no text"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "#"}, "allows no text"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
     "allows no text"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "#/nowhere"}, "a reference that leads nowhere"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "http://127.0.0.1/x"}, "another document"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "file:///etc/passwd"}, "another document"),
    (GrammarKind.JSON_SCHEMA, "not json", "is not a JSON object"),
    (GrammarKind.JSON_SCHEMA, '{"type": "object"', "is not a JSON object"),
    (GrammarKind.JSON_SCHEMA, '{"a":' * 3000 + "1" + "}" * 3000, "needs more work"),
    (GrammarKind.REGEX, "(", "not valid"),
    (GrammarKind.REGEX, "a(?!b)", "look-around"),
    (GrammarKind.REGEX, "(" * 20_000 + ")" * 20_000, "not valid"),
    (GrammarKind.LARK, "start: missing", "a rule that it does not define"),
    (GrammarKind.LARK, "start: \"a", "a mistake in its syntax"),
    (GrammarKind.LARK, "start: a\na: a", "allows no text"),
    (GrammarKind.LARK, "start: " + "(" * 20_000 + "\"a\"" + ")" * 20_000, "needs more work"),
    (GrammarKind.LARK, "start: <|im_end|>", "names a token"),
    (GrammarKind.LARK, "start: <[99999999]>", "names a token"),
    (GrammarKind.LARK, "root ::= missing", "not a valid GBNF"),
    (GrammarKind.LARK, "root ::= " + "(" * 5000, "not a valid GBNF"),
    (GrammarKind.LARK, "a ::= \"a\"", "not a valid GBNF"),
    (GrammarKind.LARK, "{\"grammars\": [{\"json_schema\": {}}]}", "a mistake in its syntax"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_enforced_is_refused_in_fixed_words(kind: GrammarKind, source: Any, why: str) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(Refused) as caught:
        GRAMMARS.compile(TINY, Grammar(kind, text), (EOS,), "response_format")
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "response_format", "invalid_grammar")
    assert error.message.startswith("response_format ") and why in error.message, error.message
    for leaked in ("banana", "passwd", "nope", "127.0", "/src/", "missing", "im_end", "panic", "llguidance"):
        assert leaked not in error.message


WORDS = [f"{a}{b}{c}" for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh"]
ENDS = {"$ref": "#/$defs/e"}
COSTLY: list[tuple[GrammarKind, Any]] = [
    (GrammarKind.LARK, "start: A\nA: " + " & ".join(f"/(a{{{p}}})*/" for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29))),
    (GrammarKind.LARK, "start: e\ne: " + " | ".join(f'e e "{w}"' for w in WORDS[:300]) + ' | "x"'),
    (GrammarKind.LARK, "start: " + " | ".join(f'"{w}"' for w in WORDS)),
    (GrammarKind.LARK, "\n".join(["start: r0", *(f'r{i}: r{i + 1} "x" | r{i} "y"' for i in range(500)), 'r500: "q"'])),
    (GrammarKind.LARK, "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(3000)), 'r3000 ::= "q"'])),
    (GrammarKind.REGEX, "(\\w{1,1000}){1,1000}"),
    (GrammarKind.JSON_SCHEMA, {"allOf": [{"anyOf": [{"properties": {w: {"type": "integer"}}} for w in WORDS[i : i + 6]]}
                                         for i in range(10)]}),
    (GrammarKind.JSON_SCHEMA, {"type": "object", "properties": {w: {"type": "string"} for w in WORDS}}),
    (GrammarKind.JSON_SCHEMA, {"enum": [{w: 1, "k": i} for i, w in enumerate(WORDS)]}),
    (GrammarKind.JSON_SCHEMA, {**ENDS, "$defs": {"e": {"anyOf": [{"type": "array", "items": ENDS, "minItems": i}
                                                                 for i in range(400)]}}}),
    (GrammarKind.JSON_SCHEMA, {"type": "integer", "multipleOf": 982451653}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source"), COSTLY, ids=range(len(COSTLY)))
def test_a_costly_source_is_refused_and_the_next_one_served(kind: GrammarKind, source: Any) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(Refused, match="needs more work"):
        BRISK.compile(TINY, Grammar(kind, text), (EOS,))
    assert BRISK.compile(TINY, Grammar(GrammarKind.REGEX, "a"), (EOS,)).mask().tolist() == TINY.ids("a")


BOUNDED: list[tuple[GrammarKind, Any]] = [
    (GrammarKind.REGEX, "(a|a)*b"),
    (GrammarKind.REGEX, "(a*)*b"),
    (GrammarKind.REGEX, "(.*a){20}"),
    (GrammarKind.REGEX, ".*a.{20}"),
    (GrammarKind.REGEX, "((a{1,100}){1,100}){1,100}"),
    (GrammarKind.REGEX, "a{1,2147483647}"),
    (GrammarKind.REGEX, "\\w{1,1000}"),
    (GrammarKind.JSON_SCHEMA, {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    (GrammarKind.JSON_SCHEMA, {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
    (GrammarKind.JSON_SCHEMA, {"type": "string", "pattern": "^(a|a)*b$", "maxLength": 10**6}),
    (GrammarKind.JSON_SCHEMA, {**ENDS, "$defs": {"e": {"anyOf": [{"properties": {"l": ENDS, "r": ENDS}}, ENDS]}}}),
    (GrammarKind.LARK, "start: e\ne: e e e | e e | \"x\" | \"xx\""),
    (GrammarKind.LARK, "start: a*\na: b*\nb: c*\nc: \"x\"?"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source"), BOUNDED, ids=range(len(BOUNDED)))
def test_what_only_looks_costly_is_served(kind: GrammarKind, source: Any) -> None:
    """A walk ends well, or runs for as long as it is let; a failure would be an error of that request alone."""
    matcher, draw = compiled(kind, source), random.Random(3)
    for _ in range(150):
        if matcher.done:
            break
        mask = matcher.mask()
        assert len(mask) and not matcher.failed
        assert matcher.accept(int(draw.choice(mask)))


def test_a_grammar_that_turns_out_slow_fails_its_request_and_is_refused_from_then_on() -> None:
    grammars = Grammars()
    grammar = Grammar(GrammarKind.REGEX, "[a-z]+")
    running = grammars.compile(TINY, grammar, (EOS,))
    other = running.copy()
    running._budget.spend(0.004)
    assert not running.failed
    running._budget.spend(3.0)
    assert running.failed and other.failed and len(other.mask()) == 0 and not other.accept(TINY.ids("a")[0])
    with pytest.raises(Refused, match="needs more work"):
        grammars.compile(TINY, grammar, (EOS,))
    grammars.close()


def test_a_budget_forgives_what_cheap_steps_pay_back() -> None:
    told: list[int] = []
    budget = Budget(lambda: told.append(1))
    for _ in range(100):
        budget.spend(0.05)
        for _ in range(20):
            budget.spend(0.0001)
    assert not budget.exceeded
    for _ in range(5):
        budget.spend(0.05)
    assert budget.exceeded and told == [1]


def test_a_checker_that_was_killed_is_replaced() -> None:
    grammars = Grammars()
    grammars.compile(TINY, Grammar(GrammarKind.REGEX, "a"), (EOS,))
    worker = grammars._workers._idle.queue[0]
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait(10)
    assert grammars.compile(TINY, Grammar(GrammarKind.REGEX, "b"), (EOS,)).mask().tolist() == TINY.ids("b")
    grammars.close()
    with pytest.raises(Refused):
        grammars.compile(TINY, Grammar(GrammarKind.REGEX, "c"), (EOS,))


def test_the_memory_of_verdicts_stays_within_its_bytes() -> None:
    grammars = Grammars(cache_bytes=20 * _ENTRY_BYTES)
    for i in range(60):
        grammars.compile(TINY, Grammar(GrammarKind.REGEX, f"a{{{i}}}b"), (EOS,))
        assert 0 < grammars._verdicts.bytes <= 20 * _ENTRY_BYTES
        assert grammars._verdicts.bytes == sum(kept.bytes for kept in grammars._verdicts._kept.values())
    grammars.compile(TINY, Grammar(GrammarKind.REGEX, "a" * 20_000), (EOS,))  # more than all of it: served, not kept
    assert grammars._verdicts.bytes <= 20 * _ENTRY_BYTES
    grammars.close()


def test_one_request_never_uses_up_the_states_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's copies share their lexer, whose states are counted: they must be those of one request."""
    few = functools.partial(limits.parser_limits, lexer_states=200)
    monkeypatch.setattr(limits, "parser_limits", few)
    grammar, starved = Grammar(GrammarKind.REGEX, "(.*a.{18}){1,40}b"), False
    for _ in range(3):
        matcher, draw = GRAMMARS.compile(TINY, grammar, (EOS,)), random.Random(1)
        assert len(matcher.mask()) and not matcher.failed
        while len(mask := matcher.mask()) and not matcher.done:
            matcher.accept(int(draw.choice(mask)))
        starved = starved or matcher.failed
    assert starved


def test_a_table_lives_as_long_as_its_tokenizer() -> None:
    grammars, source = Grammars(), Tiny()
    grammars.prepare(source)
    table = grammars._table(source)
    assert grammars._table(source) is table and len(grammars._tables) == 1
    del source, table
    gc.collect()
    assert len(grammars._tables) == 0
    grammars.close()
