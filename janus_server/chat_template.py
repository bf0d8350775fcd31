"""A checkpoint's chat template: messages in, one prompt text out, at a bounded cost.

`tokens` compiles one `ChatTemplate` per tokenizer and renders it for each chat request, off the event loop when long.
The template is the checkpoint's; it is never taken from a request. Whatever goes wrong in it is the request's refusal
(400) with a fixed text, never a traceback. jinja2 is imported on the first render, not at launch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from janus_server.errors import Refused

if TYPE_CHECKING:
    from jinja2 import Template, nodes

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_PROMPT_CHARS = 16 * 1024 * 1024
# A render may touch a fixed amount plus a multiple of its input: templates search and split each message a few dozen
# times.
_BASE_STEPS, _BASE_CHARS = 100_000, 16_000_000
_STEPS_PER_CHAR, _CHARS_PER_CHAR = 8, 64
_MAX_RAISED_CHARS = 200
_OWN_NAMES = frozenset(
    ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "range", "dict", "namespace")
)
_TOO_COSTLY = "The model's chat template needs more work for these messages than the server allows."
_FAILED = "The model's chat template could not be rendered with these messages."
_UNUSABLE = "The model's chat template cannot be used: it is not valid or not allowed here. Use /v1/completions."


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template's source says about how it wants its input.

    variables: names it reads from outside. inspected: texts that it looks for in messages (rather than writes).
    keeps_null_content: it tests content for none. wants_argument_objects: it serialises tool call arguments itself.
    """

    variables: frozenset[str]
    inspected: tuple[str, ...]
    keeps_null_content: bool
    wants_argument_objects: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ChatInput:
    """What a template is rendered with: plain JSON values, content flattened to text."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] | None
    add_generation_prompt: bool
    kwargs: Mapping[str, Any]


class ChatTemplate:
    """One template and the special tokens' texts that it may name (bos_token, eos_token …)."""

    def __init__(self, source: str, token_texts: Mapping[str, str]) -> None:
        self._source = source
        self._token_texts = dict(token_texts)
        self._compiled: tuple[Template, TemplateFacts] | None = None

    @property
    def facts(self) -> TemplateFacts:
        return self._compile()[1]

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any] | None,
    ) -> ChatInput:
        """Check a request's messages and options and bring them into the form that this template reads."""
        facts = self.facts
        own = sorted(name for name in kwargs or () if name in _OWN_NAMES or name in self._token_texts)
        if own or any(name.endswith("_token") for name in kwargs or ()):
            raise Refused(
                "chat_template_kwargs may not set the server's own template variables.", param="chat_template_kwargs"
            )
        used = {name: value for name, value in (kwargs or {}).items() if name in facts.variables}
        plain = tuple(_plain_message(message, index, facts) for index, message in enumerate(messages))
        return ChatInput(plain, tuple(tools) if tools else None, add_generation_prompt, used)

    def render(self, chat: ChatInput) -> str:
        """The prompt text. Refused when the template refuses the messages, fails on them, or costs too much."""
        from jinja2 import TemplateError

        from janus_server.chat_budget import Budget, Exhausted
        from janus_server.chat_sandbox import BUDGET_KEY, RaisedByTemplate

        size = len(self._source) + sum(len(text) for text in texts_in((chat.messages, chat.tools, chat.kwargs)))
        budget = Budget(_BASE_STEPS + _STEPS_PER_CHAR * size, _BASE_CHARS + _CHARS_PER_CHAR * size)
        values: dict[str, Any] = {
            **self._token_texts,
            **chat.kwargs,
            "messages": [dict(message) for message in chat.messages],
            "tools": None if chat.tools is None else list(chat.tools),
            "documents": chat.kwargs.get("documents"),
            "add_generation_prompt": chat.add_generation_prompt,
            BUDGET_KEY: budget,
        }
        try:
            text = "".join(self._compile()[0].generate(values))
        except (Exhausted, OverflowError, MemoryError, RecursionError):
            raise Refused(_TOO_COSTLY, param="messages") from None
        except RaisedByTemplate as error:
            said = (error.message or "")[:_MAX_RAISED_CHARS]
            raise Refused(f"The model's chat template refuses these messages: {said}", param="messages") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            raise Refused(_FAILED, param="messages") from None
        if len(text) > MAX_PROMPT_CHARS:
            raise Refused(_TOO_COSTLY, param="messages")
        return text

    def _compile(self) -> tuple[Template, TemplateFacts]:
        if self._compiled is None:  # two threads may both compile the first time; either result serves
            self._compiled = _compile(self._source)
        return self._compiled


def texts_in(value: object) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)


def _plain_message(message: Mapping[str, Any], index: int, facts: TemplateFacts) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused(f"{where} must be an object with a role.", param=where)
    # Absent and null mean the same to clients, but many templates would write "None".
    plain = {key: value for key, value in message.items() if value is not None and key != "content"}
    if message.get("content") is not None:
        plain["content"] = _plain_content(message["content"], f"{where}.content")
    else:
        plain["content"] = None if facts.keeps_null_content else ""
    if facts.wants_argument_objects and isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_parsed_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(plain["tool_calls"])]
    return plain


def _plain_content(content: object, where: str) -> str:
    """Text parts are joined by a newline, as the widespread servers do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise Refused(f"{where} must be a string or a list of parts.", param=where)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = f"{where}[{index}].type"
            raise Refused(f'{kind} must be "text": this model reads no other parts.', param=kind)
        if not isinstance(part.get("text"), str):
            raise Refused(f"{where}[{index}].text must be a string.", param=f"{where}[{index}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _parsed_call(call: object, where: str) -> object:
    """A tool call whose arguments are an object: clients send them back as the JSON string that they were given."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        where = f"{where}.function.arguments"
        raise Refused(f"{where} must be a JSON text.", param=where) from None
    return {**call, "function": {**function, "arguments": parsed}}


def _compile(source: str) -> tuple[Template, TemplateFacts]:
    from jinja2 import TemplateError

    from janus_server.chat_sandbox import MeteredEnvironment

    if len(source) > MAX_TEMPLATE_CHARS:
        raise Refused(_UNUSABLE, param="messages")
    environment = MeteredEnvironment()
    try:
        return environment.build(source), _facts(environment.parse(source))
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError):
        raise Refused(_UNUSABLE, param="messages") from None


def _facts(tree: nodes.Template) -> TemplateFacts:
    from jinja2 import meta, nodes

    inspected: set[str] = set()
    for holder in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        parts: list[nodes.Node] = [holder] if isinstance(holder, nodes.Compare) else list(holder.args or ())
        for part in parts:
            constants = [part] if isinstance(part, nodes.Const) else list(part.find_all(nodes.Const))
            inspected.update(c.value for c in constants if isinstance(c.value, str))
    tests = list(tree.find_all(nodes.Test))
    serialised = [f.node for f in tree.find_all(nodes.Filter) if f.name in ("tojson", "items", "dictsort")]
    serialised += [c.node.node for c in tree.find_all(nodes.Call) if _called(c.node) == "items"]
    copes_with_text = any(t.name in ("string", "mapping") and _last_name(t.node) == "arguments" for t in tests)
    return TemplateFacts(
        variables=frozenset(meta.find_undeclared_variables(tree)),
        inspected=tuple(sorted(inspected)),
        keeps_null_content=any(t.name == "none" and _last_name(t.node) == "content" for t in tests),
        wants_argument_objects=not copes_with_text and any(_last_name(n) == "arguments" for n in serialised),
    )


def _called(node: nodes.Node) -> str:
    from jinja2 import nodes

    return node.attr if isinstance(node, nodes.Getattr) else ""


def _last_name(node: nodes.Node | None) -> str:
    """`arguments` for `call.function.arguments`, `call["arguments"]` and a plain `arguments`."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return str(node.arg.value)
    return node.name if isinstance(node, nodes.Name) else ""
