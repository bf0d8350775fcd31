"""Renders chat templates in a process of its own, so that the kernel bounds what they cost. A program, not a module.

`render` starts it and asks one question at a time (see `bounded_child`). A template that is too slow, too large or
finds a way out of the sandbox ends this process, which holds no secret, can open no file, and is replaced. Imports
jinja2, the standard library and `bounded_child` only; nothing else of the server.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from typing import Any

from jinja2 import Template, TemplateError, TemplateRuntimeError, Undefined, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from janus_server.bounded_child import serve

TEMPLATES_KEPT = 64
# What these make jinja2 import cannot be imported once no file can be opened.
WARM = (
    r"{{ 'é\N{BULLET}' | wordwrap }}{{ strftime_now('%Y') }}{{ [1] | tojson(indent=1) }}",
    "{{ raise_exception('') }}",
)


class RaisedByTemplate(TemplateError):
    """The template itself called raise_exception; the message is its author's."""


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks an assistant's words for training; here the body is just written."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2 as chat templates expect it. What the sandbox forbids is an error here, not an empty text."""

    def __init__(self) -> None:
        extensions = [LoopControlExtension, GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_plain)
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _tojson

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError("a chat template may not read this attribute")


def main(cpu_s: float, memory_bytes: int, output_chars: int) -> None:
    sandbox = Sandbox()
    compiled: dict[str, Template] = {}
    for source in WARM:
        with contextlib.suppress(TemplateError):
            sandbox.from_string(source).render()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            return _answer(sandbox, compiled, question, output_chars)
        except (MemoryError, RecursionError, OverflowError):
            return {"error": "too costly"}
        except RaisedByTemplate as error:
            return {"error": "raised", "said": (error.message or "")[:200]}
        except (TemplateError, SyntaxError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            return {"error": "failed"}

    serve(answer, cpu_s, memory_bytes)


def _answer(
    sandbox: Sandbox, compiled: dict[str, Template], question: dict[str, Any], output_chars: int
) -> dict[str, Any]:
    source = question["source"]
    if question["values"] is None:
        sandbox.from_string(source)
        return facts(sandbox.parse(source))
    if source not in compiled:
        if len(compiled) >= TEMPLATES_KEPT:
            compiled.clear()
        compiled[source] = sandbox.from_string(source)
    text = compiled[source].render(question["values"])
    return {"error": "too costly"} if len(text) > output_chars else {"text": text}


def facts(tree: nodes.Template) -> dict[str, Any]:
    """What a template's source says about how it wants its input: the fields of `chat_template.TemplateFacts`."""
    inspected: set[str] = set()
    for holder in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        parts: list[nodes.Node] = [holder] if isinstance(holder, nodes.Compare) else list(getattr(holder, "args", ()))
        for part in parts:
            constants = [part] if isinstance(part, nodes.Const) else list(part.find_all(nodes.Const))
            inspected.update(c.value for c in constants if isinstance(c.value, str))
    tests = list(tree.find_all(nodes.Test))
    serialised = [f.node for f in tree.find_all(nodes.Filter) if f.name in ("tojson", "items", "dictsort")]
    called = [call.node for call in tree.find_all(nodes.Call)]
    serialised += [c.node for c in called if isinstance(c, nodes.Getattr) and c.attr == "items"]
    copes_with_text = any(t.name in ("string", "mapping") and _last_name(t.node) == "arguments" for t in tests)
    return {
        "variables": sorted(meta.find_undeclared_variables(tree)),
        "inspected": sorted(inspected),
        "keeps_null_content": any(t.name == "none" and _last_name(t.node) == "content" for t in tests),
        "wants_argument_objects": not copes_with_text and any(_last_name(n) == "arguments" for n in serialised),
    }


def _last_name(node: nodes.Node | None) -> str:
    """`arguments` for `call.function.arguments`, `call["arguments"]` and a plain `arguments`."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return str(node.arg.value)
    return node.name if isinstance(node, nodes.Name) else ""


def _plain(value: object) -> object:
    """Only values are written; the engine's own objects have no text that belongs in a prompt."""
    if not isinstance(value, str | int | float | list | tuple | dict | Undefined | None):
        raise TemplateRuntimeError("only plain values can be written")
    return value


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(message if isinstance(message, str) else "")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
    """JSON without HTML escapes: models were trained on plain text. `style`: indent, separators, sort_keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **style)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
