"""The bodies that clients send, as msgspec records, and the bounds on them; `api` reads them, `http` hands them around.

Every optional field is nullable: None means "not given", so that a model's own defaults can fill it. Ranges that OpenAI
publishes live in the annotations, and `ALLOWED` says them in words; bounds that an operator may change live in
`Limits`. Fields that are not declared are ignored. A field that would change the answer but is not supported yet is
declared as `NotYet` and refused by name, never ignored.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from janus_server.api.tool_bodies import TOOL_WORDS, NamedChoice, Tool, ToolCall

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
NotYet = Any  # any value is read, so that the refusal can name the field; nothing else in a body has this type

NAME_CHARS = 512
MOST_BIAS = 100.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request; beyond them it is refused before it costs anything.

    total_tokens bounds n · prompts · max_tokens of one call. parts bounds the content parts and tool calls of all
    messages: a walk through so many takes some 30 ms of the loop's time. logprobs is 20 in both APIs, although OpenAI's
    completions stop at 5; scores bounds the log probabilities that one call may have written of its prompts (1 +
    logprobs a token and choice), embedding_values the numbers of all its embeddings. stall_s is how long a reader may
    leave a full socket before its request is cancelled. Text longer than inline_chars is encoded on a thread of its own
    (2048 characters take about 0.5 ms); text longer than hopeless_chars is first checked against what the context could
    hold. bodies_bytes is what all bodies being read may hold together, request_s the time from arrival to the end of an
    answer (None: any).
    """

    body_bytes: int = 4 << 20
    body_s: float = 60.0
    bodies_bytes: int = 256 << 20
    connections: int = 4096
    headers_s: float = 20.0
    idle_s: float = 75.0
    request_s: float | None = None
    header_line_bytes: int = 16 * 1024
    headers: int = 128
    n: int = 128
    prompts: int = 1024
    choices: int = 2048
    messages: int = 4096
    parts: int = 16384
    tools: int = 128
    tool_bytes: int = 256 * 1024
    tool_depth: int = 64
    stops: int = 16
    stop_chars: int = 1024
    stop_ids: int = 256
    logit_bias: int = 1024
    logprobs: int = 20
    scores: int = 1 << 20
    inputs: int = 2048
    embedding_values: int = 1 << 22
    total_tokens: int = 4 * 1024 * 1024
    keep_alive_s: float = 15.0
    grammar_bytes: int = 64 * 1024
    grammar_choices: int = 1024
    schema_depth: int = 64
    stall_s: float = 60.0
    inline_chars: int = 2048
    hopeless_chars: int = 1 << 16
    encode_threads: int = 2
    share_prefixes: bool = False
    shutdown_s: float = 1.0


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content. Only text can be served; the tokenizer refuses the others by their place."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """What chat and completions share: the one inheritance of fields, so that their ranges cannot drift apart."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    min_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Positive | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Natural] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    prompt_logprobs: NotYet = None
    bad_words: NotYet = None
    allowed_token_ids: NotYet = None
    use_beam_search: NotYet = None
    truncate_prompt_tokens: NotYet = None
    logits_processors: NotYet = None
    cache_salt: NotYet = None


class ChatBody(CommonBody, kw_only=True):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Natural | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    functions: NotYet = None
    function_call: NotYet = None
    chat_template: NotYet = None
    continue_final_message: NotYet = None
    documents: NotYet = None
    audio: NotYet = None
    echo: NotYet = None


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: Natural | None = None
    logprobs: Natural | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: NotYet = None
    prompt_embeds: NotYet = None


def unsupported(shape: type[CommonBody]) -> tuple[str, ...]:
    """The fields of a body that are declared only to be refused."""
    return tuple(field.name for field in msgspec.structs.fields(shape) if field.type is NotYet)


def _in_words(kind: inspect.Type) -> str | None:
    """What a plain field may hold, from its annotation: a range is written once. None where that takes more words."""
    if isinstance(kind, inspect.UnionType):
        kind, *others = (one for one in kind.types if not isinstance(one, inspect.NoneType))
        if others:
            return None
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return "a string"
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return None
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    return f"{noun} of at least {kind.ge:g}" if kind.le is None else f"{noun} from {kind.ge:g} to {kind.le:g}"


def plain_fields(shape: type[msgspec.Struct], path: str = "") -> dict[str, str]:
    """The words for the plain fields of a record that stands at `path`, by the path of each."""
    words = {field.name: _in_words(inspect.type_info(field.type)) for field in msgspec.structs.fields(shape)}
    return {path + name: text for name, text in words.items() if text is not None}


UNSUPPORTED_CHAT = unsupported(ChatBody)
UNSUPPORTED_COMPLETION = unsupported(CompletionBody)

# What each field may hold, by its path with the indices left out: the second half of "<path> must be …".
ALLOWED: Mapping[str, str] = types.MappingProxyType({
    **plain_fields(ChatBody),
    **plain_fields(CompletionBody),
    **plain_fields(StreamOptions, "stream_options."),
    **plain_fields(Message, "messages[]."),
    **plain_fields(ContentPart, "messages[].content[]."),
    "model": f"the name of a served model, a string of 1 to {NAME_CHARS} characters",
    "messages": "a list of at least one message, each an object with 'role' and 'content'",
    "messages[]": "an object with 'role' and 'content'",
    "messages[].role": "one of developer, system, user, assistant, tool",
    "messages[].content": "a string, null, or a list of parts such as {\"type\": \"text\", \"text\": \"…\"}",
    "messages[].content[]": "an object such as {\"type\": \"text\", \"text\": \"…\"}",
    "messages[].content[].type": "a string such as \"text\"",
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids, and not empty",
    "top_k": "a whole number of at least 0, or -1 for all",
    "seed": "a whole number that fits in 64 bits, signed",
    "max_tokens": "a whole number of at least 1, or 0 in completions with echo",
    "best_of": "a whole number, n or more",
    "stop": "a string or a list of strings",
    "stop_token_ids": "a list of token ids",
    "logit_bias": f"an object from token id to a number from {-MOST_BIAS:g} to {MOST_BIAS:g}",
    "logprobs": "true or false in chat, a whole number of at least 0 in completions",
    "stream_options": "an object with include_usage and continuous_usage_stats",
    "chat_template_kwargs": "an object",
    **TOOL_WORDS,
    "reasoning_effort": "one of none, minimal, low, medium, high, xhigh, max",
    "response_format": "an object with 'type'",
    "structured_outputs": "an object with one of json, json_object, regex, choice, grammar",
    "guided_json": "a JSON schema, as an object or as text",
    "guided_choice": "a list of strings",
})  # fmt: skip
