"""A checkpoint's chat template: messages in, one prompt text out, at a bounded cost.

`tokens` keeps one `ChatTemplate` per template of its checkpoint and renders it for each chat request, off the event
loop. The template is the checkpoint's; it is never taken from a request, and it runs in a process of `render`.
Whatever goes wrong in it is the request's refusal (400) with a fixed text, never a traceback.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from janus_server.errors import Refused
from janus_server.tokens.render import Renderers

MAX_TEMPLATE_CHARS = 256 * 1024
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

    variables: Sequence[str]
    inspected: Sequence[str]
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

    def __init__(self, source: str, token_texts: Mapping[str, str], renderers: Renderers) -> None:
        self._source = source
        self._token_texts = dict(token_texts)
        self._renderers = renderers
        self._facts: TemplateFacts | None = None

    @property
    def facts(self) -> TemplateFacts:
        if self._facts is None:  # two threads may both ask the first time; either answer serves
            found = self._renderers.ask(self._source, None) if len(self._source) <= MAX_TEMPLATE_CHARS else None
            if found is None or "error" in found:
                raise Refused(_UNUSABLE, param="messages")
            self._facts = TemplateFacts(**found)
        return self._facts

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
        values = {
            **self._token_texts,
            "documents": None,
            **chat.kwargs,
            "messages": chat.messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        answer = self._renderers.ask(self._source, values) or {"error": "too costly"}
        match answer.get("error"):
            case None:
                return str(answer["text"])
            case "too costly":
                raise Refused(_TOO_COSTLY, param="messages")
            case "raised":
                raise Refused(f"The model's chat template refuses these messages: {answer['said']}", param="messages")
            case _:
                raise Refused(_FAILED, param="messages")


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
