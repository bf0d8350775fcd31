"""Chat templates: what they get, what they may do, and that a hostile one ends in a refusal at a bounded cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from janus_server.errors import Refused
from janus_server.tokens.render import MAX_PROMPT_CHARS, Renderers
from janus_server.tokens.template import MAX_TEMPLATE_CHARS, ChatTemplate

# Room for honest templates on a busy machine; the bombs have their own, so that each costs the tests 0.2 s.
PATIENT = Renderers(workers=1, cpu_s=10.0)
BRISK = Renderers(workers=1, cpu_s=0.2, memory_bytes=256 << 20)


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    PATIENT.close()
    BRISK.close()


def render(
    source: str, *contents: Any, tools: list[Any] | None = None, kwargs: dict[str, Any] | None = None,
    renderers: Renderers = PATIENT, **message: Any
) -> str:  # fmt: skip
    template = ChatTemplate(source, {"bos_token": "<s>"}, renderers)
    messages = [{"role": "user", "content": content, **message} for content in contents or ("hi",)]
    return template.render(template.prepare(messages, tools, True, kwargs))


def refused(source: str, *contents: Any, **rest: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        render(source, *contents, **rest)
    assert caught.value.status == 400
    return caught.value


def test_what_templates_expect_of_their_engine() -> None:
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"  # trim_blocks and lstrip_blocks
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ {'a': '<é>'} | tojson }}{{ [1] | tojson(indent=2) }}") == '{"a": "<é>"}[\n  1\n]'
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}") == "<s>"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{{ 'a' ~ 1 ~ none ~ missing }}|{{ '%s-%d' % ('x', 3) }}|{{ 'ab' * 2 }}") == "a1None|x-3|abab"
    assert render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                  "a", "b") == "2"  # fmt: skip
    loop = "{% for m in messages[::-1] %}{{ m.content }}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{% endfor %}"
    assert render(loop, "a", "b") == "b0False2a1True2"
    picked = "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') | upper }}"
    assert render(picked, "a", "b") == "A,B"
    assert render("{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}") == "321"
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}{{ (1, 2)[0] }}") == "a=11"


ESCAPES = (
    "{{ ''.__class__ }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages[0]['__class__'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['sys'] }}",
    "{{ namespace.__init__ }}",
    "{{ namespace(__html__=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ self }}",
    "{{ dict }}",
    "{{ namespace(a=1) }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
)
DOUBLING = "{% set ns = namespace(x='aaaa') %}{% for i in range(64) %}"
BOMBS = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) | map('string') %}{% for j in range(99999) | list %}x{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ ([('a' * 1000000)] * 1000) | map('upper') | list }}",
    "{{ ([('a' * 1000000)] * 1000) | string }}",
    DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(x=1, y=1) %}{% for i in range(64) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    DOUBLING + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    DOUBLING + "{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
    DOUBLING + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(n=3) %}{% for i in range(64) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a\n' | indent(10**9) }}",
    "{{ ([1] * 10000) | tojson(separators=('b' * 1000000, ':')) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('b' * 1000000).join(('a,' * 100000).split(',')) }}",
    "{{ ('a,' * 100000).split(',') | join('b' * 1000000) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set x = ['a'] * 90000 %}{% for i in x %}{% set y = x | map('upper') | list %}{% endfor %}",
    "{% for i in range(90000) %}{{ 'x' * 90000 }}{% endfor %}",
    "{% set x %}{% for i in range(90000) %}" + "x" * 9000 + "{% endfor %}{% endset %}",
)


GROWN = (
    "{% set ns = namespace(x='a', y='b') %}{% for i in range(19) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% set ns.y = ns.y ~ ns.y %}{% endfor %}"
)
# Single calls into C that no counting of operations sees: quadratic in what they are given, and not interruptible.
QUADRATIC = (
    GROWN + "{{ ns.x.strip(ns.y ~ 'a') }}",
    GROWN + "{{ (ns.x ~ ns.x).rfind(ns.x[:130000] ~ 'b' ~ ns.x[:130000]) }}",
    GROWN + "{{ (ns.x | replace('a', 'f') | int(base=16)) // (ns.x[:260000] | replace('a', 'f') | int(base=16)) }}",
)


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_refused(source: str) -> None:
    error = refused(source)
    assert "Error" not in error.message and "object" not in error.message  # fixed texts, nothing of the interpreter


@pytest.mark.parametrize("source", [*BOMBS, *QUADRATIC], ids=range(len(BOMBS) + len(QUADRATIC)))
def test_a_bomb_is_refused_at_a_bounded_cost_that_is_not_ours(source: str) -> None:
    before = time.thread_time()
    refused(source, renderers=BRISK)
    assert time.thread_time() - before < 0.1
    assert render("{{ messages[0].content }}", renderers=BRISK) == "hi"  # and the next one finds a working renderer


def test_what_is_merely_large_is_rendered_up_to_the_limit() -> None:
    assert len(render("{{ messages | tojson(indent=10**6) }}")) < MAX_PROMPT_CHARS
    assert len(render("{{ strftime_now('%999999999Y') }}")) < 100
    assert refused(f"{{{{ 'ab' * {MAX_PROMPT_CHARS // 2 + 1} }}}}").param == "messages"


def test_a_renderer_that_was_killed_is_replaced() -> None:
    renderers = Renderers(workers=1)
    assert render("a", renderers=renderers) == "a"
    worker = renderers._workers._idle.queue[0]
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait(10)
    assert render("b", renderers=renderers) == "b"
    renderers.close()


def test_a_renderer_can_open_nothing() -> None:
    """Even a template that left the sandbox finds no file, no socket and no secret."""
    program = (
        "import sys\n"
        "from janus_server.bounded_child import lock_down\n"
        "from janus_server.tokens import worker\n"
        "lock_down(1 << 30)\n"
        "try: open('/etc/hostname')\n"
        "except OSError as error: sys.stdout.write(type(error).__name__ + str(error.errno))\n"
    )
    root = __file__.rsplit("/tests/", 1)[0]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": root})
    assert done.stdout == "OSError24", done.stderr


def test_the_budget_grows_with_the_conversation() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content.strip() | trim }}\n{% endfor %}"
    assert len(render(source, *["x" * 200] * 20_000)) == 207 * 20_000


def test_raise_exception_reaches_the_client_bounded() -> None:
    assert refused("{{ raise_exception('roles must alternate') }}").message.endswith(": roles must alternate")
    assert len(refused("{{ raise_exception('no ' * 999) }}").message) < 300


def test_bad_templates_are_refused_not_raised() -> None:
    for source in (
        "{% for %}",
        "{{ x | nosuchfilter }}",
        "{% endfor %}",
        "{{" + "(" * 5000,
        "x" * (MAX_TEMPLATE_CHARS + 1),
    ):
        assert "/v1/completions" in refused(source).message
    for source in ("{{ 1 / 0 }}", "{{ messages[0].a.b }}", "{{ messages + 1 }}"):
        assert "could not be rendered" in refused(source).message


def test_kwargs_reach_the_names_that_a_template_uses_and_never_the_servers_own() -> None:
    source = "{{ enable_thinking }}{{ messages[0].content }}"
    assert render(source, kwargs={"enable_thinking": False, "unused": 1}) == "Falsehi"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "range"):
        assert refused(source, kwargs={name: "x"}).param == "chat_template_kwargs"


def test_content_becomes_text() -> None:
    source = "{{ messages[0].content }}"
    assert render(source, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    assert render(source, None) == ""
    assert render("{{ messages[0].content is none }}", None) == "True"
    assert render("{{ 'name' in messages[0] }}", "a", name=None) == "False"
    error = refused(source, [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])
    assert error.param == "messages[0].content[1].type" and error.param in error.message
    assert refused(source, [{"type": "text"}]).param == "messages[0].content[0].text"
    assert refused(source, 7).param == "messages[0].content"


def test_tool_arguments_take_the_form_that_the_template_reads() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    as_object = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    assert render(as_object, None, tool_calls=[call]) == '{"a": 1}'
    as_text = "{% for c in messages[0].tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    assert render(as_text, None, tool_calls=[call]) == 'f{"a":1}'
    either = (
        "{% for c in messages[0].tool_calls %}{% set f = c.function %}"
        "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}{% endfor %}"
    )
    assert render(either, None, tool_calls=[call]) == '{"a":1}'
    broken = {**call, "function": {"name": "f", "arguments": "{"}}
    assert refused(as_object, None, tool_calls=[broken]).param == "messages[0].tool_calls[0].function.arguments"


def test_jinja_is_not_imported_into_the_server() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1])\n"
    program += "import janus_server.tokens.tokenizer\nprint('jinja2' in sys.modules)"
    root = __file__.rsplit("/tests/", 1)[0]
    done = subprocess.run([sys.executable, "-c", program, root], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
