"""From the fields that ask for structured output to the one grammar that a request carries. Pure.

`plan` calls `grammar_of`. OpenAI says `response_format`; vLLM says `structured_outputs`, and once said `guided_…`; the
grammar of llama.cpp is `grammar`. Whether a schema can be enforced shows where it is compiled, with `field_of` as the
name to complain of; what can be told from the body alone is refused here. Nothing here may recurse into a schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from janus_server.api.bodies import CommonBody, Limits
from janus_server.api.checks import deeper, json_of, need
from janus_server.errors import Refused
from janus_server.types import Grammar, GrammarKind

FIELDS: Final = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "grammar",
)  # fmt: skip
# What structured_outputs may hold beside one way to say what is wanted. `strict` is how it is served anyway.
_IGNORED: Final = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties"})
_META: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")

Reader = Callable[[Any, str, Limits], Grammar | None]


def grammar_of(body: CommonBody, limits: Limits) -> Grammar | None:
    """What the text of every choice must follow, if anything; refused when two fields ask for different things."""
    asked = field_of(body)
    if asked is None:
        return None
    value = getattr(body, asked)
    if asked == "response_format":
        return _response_format(value, limits)
    if asked == "structured_outputs":
        return _structured_outputs(value, limits)
    return _READERS[asked.removeprefix("guided_")](value, asked, limits)


def field_of(body: CommonBody) -> str | None:
    """The field of a body that asks for structured output; None when none does."""
    asked = [name for name in FIELDS if _asks(name, getattr(body, name))]
    if len(asked) > 1:
        raise Refused(
            f"{asked[1]} must be left out where {asked[0]} is given: an answer can follow only one of them",
            param=asked[1], code="invalid_value",
        )  # fmt: skip
    return asked[0] if asked else None


def _asks(name: str, value: Any) -> bool:
    if value is None or value == "" or value == []:  # how clients say "no"
        return False
    return not (name == "response_format" and value.get("type") == "text") and not (
        name == "structured_outputs" and not any(_given(value).values())
    )


def _given(fields: Mapping[str, Any]) -> dict[str, bool]:
    """Which fields of structured_outputs say something."""
    return {name: not (value is None or value is False or value in ("", [])) for name, value in fields.items()}


def _response_format(value: Mapping[str, Any], limits: Limits) -> Grammar:
    kind, at = value.get("type"), "response_format"
    if kind == "json_object":
        # Several servers take a schema with this type too.
        return _schema(value["schema"], f"{at}.schema", limits) if value.get("schema") is not None else _object()
    need(kind == "json_schema", f"{at}.type", "one of text, json_object, json_schema")
    inner, at = value.get("json_schema"), f"{at}.json_schema"
    if not isinstance(inner, dict) or inner.get("schema") is None:
        inner = {}
    need("schema" in inner, at, "an object with 'name' and 'schema'")
    for name, shape, words in (("name", str, "a string"), ("description", str, "a string"), ("strict", bool, "a bool")):
        need(isinstance(inner.get(name), shape | None), f"{at}.{name}", words.replace("a bool", "true or false"))
    return _schema(inner["schema"], f"{at}.schema", limits)


def _structured_outputs(value: Mapping[str, Any], limits: Limits) -> Grammar | None:
    at = "structured_outputs"
    given = [name for name, says in _given(value).items() if says and name not in _IGNORED]
    need(all(name in _READERS for name in given), at, f"an object with one of {', '.join(_READERS)}")
    need(len(given) == 1, at, f"an object with only one of {', '.join(_READERS)}")
    return _READERS[given[0]](value[given[0]], f"{at}.{given[0]}", limits)


# The ways to say what is wanted


def _object() -> Grammar:
    return Grammar(GrammarKind.JSON_OBJECT)


def _json_object(value: Any, path: str, limits: Limits) -> Grammar:
    need(value is True, path, "true or false")
    return _object()


def _schema(value: Any, path: str, limits: Limits) -> Grammar:
    """A schema as an object, or as the text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            value = None
    need(isinstance(value, dict), path, "a JSON schema, an object")
    # Measured before it is walked: a walk is far dearer a byte than writing it.
    text = json_of(value, path, limits.grammar_bytes, limits.schema_depth)
    need(not deeper(value, limits.schema_depth), path, f"nested at most {limits.schema_depth} deep")
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _regex(value: Any, path: str, limits: Limits) -> Grammar:
    return Grammar(GrammarKind.REGEX, _text(value, path, limits))


def _grammar(value: Any, path: str, limits: Limits) -> Grammar:
    return Grammar(GrammarKind.LARK, _text(value, path, limits))


def _choice(value: Any, path: str, limits: Limits) -> Grammar:
    """One of several texts, as a pattern that spells them."""
    words = f"a list of 1 to {limits.grammar_choices} strings, none of them empty"
    need(isinstance(value, list) and 0 < len(value) <= limits.grammar_choices, path, words)
    need(all(isinstance(text, str) and text for text in value), path, words)
    return Grammar(GrammarKind.REGEX, _sized("|".join(map(_spelled, value)), path, limits))


_READERS: Final[Mapping[str, Reader]] = MappingProxyType({
    "json": _schema, "json_object": _json_object, "regex": _regex, "choice": _choice, "grammar": _grammar,
})  # fmt: skip


def _text(value: Any, path: str, limits: Limits) -> str:
    need(isinstance(value, str) and bool(value), path, "a string that is not empty")
    return _sized(value, path, limits)


def _sized(text: str, path: str, limits: Limits) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        size = limits.grammar_bytes + 1
    need(size <= limits.grammar_bytes, path, f"at most {limits.grammar_bytes} bytes of valid UTF-8")
    return text


def _spelled(text: str) -> str:
    """A pattern that matches this text and no other."""
    escaped = _META.sub(r"\\\g<0>", text)
    return re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped)
