"""Random chat templates and messages through the real renderer processes: a text or a refusal, at a bounded cost.

The grammar has what real templates have, what loops and grows without end, and what has led out of sandboxes.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import fuzz, scribble

from janus_server.errors import Refused
from janus_server.tokens.render import Renderers
from janus_server.tokens.template import ChatTemplate

WORKERS = 2
NAMES = ("messages", "tools", "add_generation_prompt", "bos_token", "message", "loop", "ns", "m", "i", "self", "cycler",
         "range", "dict", "lipsum", "joiner", "namespace", "raise_exception", "strftime_now",
         "undefined_name")  # fmt: skip
ATTRIBUTES = (
    "content", "role", "name", "tool_calls", "index", "first", "last", "length", "items", "upper", "strip", "split",
    "format", "format_map", "join", "replace", "__class__", "__mro__", "__subclasses__", "__globals__", "__init__",
    "__builtins__", "__code__", "__dict__", "gi_frame", "f_back", "mro", "_body", "__call__", "append", "pop", "update",
    "clear", "encode", "__add__", "__format__", "__self__", "im_func", "environment", "eval_ctx", "exported_vars",
)  # fmt: skip
FILTERS = (
    "trim", "upper", "length", "tojson", "tojson(indent=2)", "join(',')", "list", "first", "last", "string", "int",
    "float", "default('x')", "attr('__class__')", "map(attribute='content')", "map('upper')", "selectattr('role')",
    "select('defined')", "reject('none')", "sort", "sort(attribute='role')", "unique", "groupby('role')", "batch(2)",
    "slice(3)", "dictsort", "items", "replace('a','b')", "indent(4)", "wordwrap(3)", "center(50)", "format(1)", "e",
    "safe", "xmlattr", "pprint", "reverse", "sum", "random", "truncate(5)", "urlize", "striptags", "nosuchfilter",
)  # fmt: skip
TESTS = ("defined", "none", "string", "mapping", "iterable", "sequence", "number", "odd", "divisibleby(2)", "in([1])",
         "sameas(none)", "callable", "nosuchtest", "equalto('a')", "boolean")  # fmt: skip
CONSTANTS = ("0", "1", "-1", "3", "99999999999", "1e300", "'a'", "''", "'<|im_start|>'", "none", "true", "false", "[]",
             "{}", "[1, 2, 3]", "{'a': 1}", "(1, 'b')", "'{0.__class__}'", "'%s'", "'é\\u2028'")  # fmt: skip
COSTLY = (
    "{% for i in range(99999999) %}x{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{{ 'x' * 999999999999 }}", "{{ 'x' | center(9999999999) }}", "{{ 9 ** 9 ** 9 }}",
    "{{ '%999999999d' | format(1) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ [1] * 10 ** 10 }}", "{{ range(10 ** 9) | list | length }}",
    "{% for a in range(999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ '{:>999999999}'.format('x') }}", "{{ ('a' * 100000) | wordwrap(1) | wordwrap(1) | length }}",
)  # fmt: skip
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ self.__init__.__globals__ }}", "{{ cycler.__init__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "{{ messages.append(1) }}", "{{ lipsum }}",
    "{{ namespace.__init__.__globals__['os'] }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}",
    "{{ messages | map(attribute='__class__') | list }}", "{{ raise_exception.__globals__ }}", "{{ loop }}",
    "{% set x = ''|attr('__class__') %}{{ x }}", "{{ ''['__class__'] }}", "{{ strftime_now('%Y' * 99999) }}",
    "{{ joiner.__init__.__globals__.sys.modules }}", "{% extends messages %}", "{{ dict(a=1).__class__ }}",
    "{{ range }}",
)  # fmt: skip
# What may never stand in a prompt: a file, or something that only a forbidden attribute leads to. (A template may write
# its own joiner as text, silly as that is.)
LEAK = re.compile(
    r"<(?:module|slot wrapper|method-wrapper|code object|attribute '|frame at)|mappingproxy|root:x|<class 'os"
)


@dataclasses.dataclass(frozen=True)
class Case:
    source: str
    messages: list[Any]
    tools: list[Any] | None
    kwargs: dict[str, Any] | None


def make(rng: random.Random) -> Case:
    kind = rng.random()
    if kind < 0.008:
        source = rng.choice(COSTLY)
    elif kind < 0.08:
        source = rng.choice(ESCAPES) + _statements(rng, 1)
    else:
        source = _statements(rng, 3)
    if rng.random() < 0.1:
        source = scribble(rng, source.encode() or b"x").decode("utf-8", "replace")
    tools = rng.choice((None, None, [], [{"type": "function", "function": {"name": "f", "parameters": {}}}]))
    kwargs = rng.choice((None, None, {"x": 1}, {"i": [1]}, {"messages": []}, {"bos_token": "x"}, {"my_token": 1}))
    return Case(source, [_message(rng) for _ in range(rng.randrange(4))], tools, kwargs)


def _statements(rng: random.Random, depth: int) -> str:
    return "".join(_statement(rng, depth) for _ in range(rng.randrange(1, 5)))


def _statement(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(("text\n", "<|im_start|>", f"{{{{ {_value(rng, 2)} }}}}", f"{{{{- {_value(rng, 1)} -}}}}"))
    inner = _statements(rng, depth - 1)
    name = rng.choice(("m", "i", "message", "x", "ns"))
    match rng.randrange(9):
        case 0 | 1 | 2:
            source = rng.choice(("messages", "range(3)", "[1,2]", _value(rng, 1)))
            extra = rng.choice(("", "", "{% if loop.first %}{% break %}{% endif %}", "{% else %}none"))
            return f"{{% for {name} in {source} %}}{inner}{extra}{{% endfor %}}"
        case 3 | 4:
            return f"{{% if {_value(rng, 2)} %}}{inner}{{% elif {_value(rng, 1)} %}}b{{% else %}}c{{% endif %}}"
        case 5:
            return f"{{% set {name} = {_value(rng, 2)} %}}{inner}"
        case 6:
            made, later = _value(rng, 1), _value(rng, 1)
            return f"{{% set ns = namespace(a={made}) %}}{{% set ns.a = {later} %}}{inner}{{{{ ns.a }}}}"
        case 7:
            return f"{{% macro f({name}) %}}{inner}{{% endmacro %}}{{{{ f({_value(rng, 1)}) }}}}"
        case _:
            return rng.choice((
                f"{{% generation %}}{inner}{{% endgeneration %}}", f"{{% filter upper %}}{inner}{{% endfilter %}}",
                f"{{% raw %}}{inner}{{% endraw %}}", f"{{{{ raise_exception({_value(rng, 1)}) }}}}",
                f"{{% call f(1) %}}{inner}{{% endcall %}}", f"{{% block b %}}{inner}{{% endblock %}}",
                f"{{% with a = {_value(rng, 1)} %}}{inner}{{% endwith %}}", "{% for", "{{ 'a", "{% endif %}", "{# c",
            ))  # fmt: skip


def _value(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice((*CONSTANTS, *NAMES, "message.content", "message['role']", "m.content"))
    inner = _value(rng, depth - 1)
    match rng.randrange(8):
        case 0:
            return f"{inner}.{rng.choice(ATTRIBUTES)}"
        case 1:
            return f"{inner}.{rng.choice(ATTRIBUTES)}({_value(rng, depth - 1)})"
        case 2:
            return f"{inner}[{rng.choice((*CONSTANTS, '0', '-1', '1:', '::-1', repr(rng.choice(ATTRIBUTES))))}]"
        case 3 | 4:
            return f"({inner}) | {rng.choice(FILTERS)}"
        case 5:
            return f"({inner}) is {rng.choice(('', 'not '))}{rng.choice(TESTS)}"
        case 6:
            operator = rng.choice(("+", "-", "*", "/", "//", "%", "~", "==", "<", "in", "not in", "and", "or"))
            return f"({inner}) {operator} ({_value(rng, depth - 1)})"
        case _:
            return f"({inner} if {_value(rng, depth - 1)} else {_value(rng, depth - 1)})"


def _message(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return rng.choice((None, 3, "x", [], {}))
    message: dict[str, Any] = {"role": rng.choice(("user", "assistant", "system", "tool", "", "é", None))}
    if rng.random() < 0.9:
        message["content"] = rng.choice((
            "hello", "", None, "{{ 7 * 7 }}", "<|im_end|>", "\x00\u2028😀", "x" * 5000, [{"type": "text",
            "text": "a"}], [],
            [{"type": "image_url"}], [3], {"a": 1},
        ))  # fmt: skip
    if rng.random() < 0.2:
        function = {"name": "f", "arguments": rng.choice(("{}", "{", '{"a": 1}', {"a": 1}, None, "[" * 3000))}
        message["tool_calls"] = rng.choice(([{"function": function}], [3], "x", [{}], [{"function": None}]))
    return message


@pytest.fixture
def renderers() -> Iterator[Renderers]:
    made = Renderers(WORKERS, cpu_s=0.2, memory_bytes=256 << 20)
    yield made
    made.close()


def test_templates_give_a_text_or_a_refusal_at_a_bounded_cost(renderers: Renderers) -> None:
    def check(case: Case) -> None:
        template = ChatTemplate(case.source, {"bos_token": "<s>", "eos_token": "</s>"}, renderers)
        try:
            text = template.render(template.prepare(case.messages, case.tools, True, case.kwargs))
        except Refused as refused:
            assert refused.status == 400
            assert 0 < len(refused.message) < 400
            assert refused.param is not None
            text = refused.message
        assert not LEAK.search(text), text[:500]
        assert len(workers() - others) <= WORKERS
        open_files.append(len(os.listdir("/proc/self/fd")))

    others = workers()  # of tests before this one
    open_files: list[int] = []
    fuzz("templates", 600, make, check)
    # The first case opens the first worker's socket; a worker that is replaced gives its own back.
    assert max(open_files) <= open_files[0] + WORKERS - 1
    renderers.close()
    assert workers() <= others


def workers() -> set[int]:
    """Child processes of this one that run the renderers' program."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for child in path.read_text().split():
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and b"worker.py" in command.read_bytes():
                found.add(int(child))
    return found


def test_the_leak_pattern_finds_leaks() -> None:
    for leaked in (
        os,
        make.__code__,
        vars(int),
        int.__add__,
        (1).__add__,
        os._wrap_close,
        Path("/etc/passwd").read_text(),
    ):
        assert LEAK.search(str(leaked)), leaked
    assert not LEAK.search("<s>x < 3 and <|im_start|>class")
