"""What the fields and statuses of the API mean, in a sentence each, and the bounds that an operator may change.

Pure data for `openapi`. A field is looked up by its record and name first, then by its name alone, so that a field
which means the same everywhere is described once. Ranges are not repeated here: they live in the records.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from janus_server.api.bodies import Limits

TITLE = "Janus"
TAGS = ("generate", "tokens", "models", "status", "admin")

STATUSES: Mapping[str, str] = types.MappingProxyType({
    "stream": "Server-sent events where the body has stream true: `data: ` and a JSON text, then an empty line. Lines "
    "that begin with a colon keep the connection alive. Trouble after the first event is an event with `error`; the "
    "last event is `data: [DONE]`.",
    "events": "Server-sent events: `data: ` and a JSON text, then an empty line. Lines that begin with a colon keep "
    "the connection alive. When the server stops, the last event is `data: [DONE]`.",
    "400": "The request cannot be served as it stands; `param` names the field and `message` says what is allowed",
    "401": "A key is missing or unknown",
    "403": "The key or the origin of the request may not do this",
    "404": "No such model, object or path",
    "408": "The body took too long to arrive",
    "409": "The state of the server does not allow it now",
    "413": "The body is too large",
    "415": "The body is compressed; send it as it is",
    "429": "Too many requests; Retry-After says when to come back",
    "500": "The server failed; its log has the details under the id in the message",
    "501": "The model or this build cannot do this",
    "503": "Loading, draining, or no room; Retry-After says when to come back",
    "504": "The deadline passed",
})  # fmt: skip

PATH_WORDS: Mapping[str, str] = types.MappingProxyType({
    "model": "The name of a served model; slashes in it need no escape",
    "id": "The id of an object",
    "wish": "load, wake, sleep, evict, pin or unpin",
})  # fmt: skip

_WORDS: Mapping[str, str] = types.MappingProxyType({
    "model": "The name of a served model or application, as /v1/models lists it",
    "max_tokens": "Most tokens to generate for each choice; max_completion_tokens wins over it",
    "max_completion_tokens": "Most tokens to generate for each choice",
    "min_tokens": "No end token or stop string counts before that many tokens",
    "temperature": "0 takes the likeliest token every time; higher is more varied. Default: the model's own",
    "top_p": "Draw only from the likeliest tokens that hold this share of the probability together",
    "top_k": "Draw only from that many likeliest tokens; 0 or -1 for all",
    "min_p": "Draw only from tokens at least this likely, relative to the likeliest",
    "presence_penalty": "Taken from the logit of every token that the answer holds already",
    "frequency_penalty": "Taken from the logit of a token once for each time that the answer holds it",
    "repetition_penalty": "Divides the logits of tokens that prompt or answer hold; 1 does nothing",
    "seed": "The same seed, model and body give the same answer",
    "n": "Choices for each prompt",
    "stop": "Texts that end a choice; they are not part of it",
    "stop_token_ids": "Tokens that end a choice",
    "include_stop_str_in_output": "Keep the text that ended a choice at its end",
    "ignore_eos": "Go on after the model's own end tokens",
    "logit_bias": "What to add to the logit of a token, by the token's id",
    "stream": "Answer with server-sent events as tokens come",
    "stream_options": "What a stream tells beside the text",
    "include_usage": "One more event at the end with the usage and no choices",
    "continuous_usage_stats": "The usage so far in every event",
    "skip_special_tokens": "Leave control tokens out of the text (default true)",
    "add_special_tokens": "Put the model's begin token before the prompt (default true; false in chat)",
    "response_format": "What form the answer must have: text, json_object or json_schema",
    "structured_outputs": "What the answer must follow: one of json, json_object, regex, choice and grammar",
    "guided_json": "A JSON schema that the answer must follow, as an object or as text",
    "guided_regex": "A regular expression that the whole answer must match",
    "guided_choice": "Texts of which the answer must be one",
    "guided_grammar": "A grammar that the answer must follow, in Lark or GBNF",
    "grammar": "What guided_grammar means",
    "messages": "The conversation so far, oldest first",
    "tools": "Functions that the model may ask to be called",
    "tool_choice": "none, auto, required, or the function to call",
    "parallel_tool_calls": "Whether one answer may hold several tool calls",
    "chat_template_kwargs": "Values for the variables of the model's chat template",
    "add_generation_prompt": "End the prompt where the assistant speaks (default true)",
    "top_logprobs": "How many of the likeliest tokens to list in each place; needs logprobs",
    "ChatBody.logprobs": "Tell the log probability of each token",
    "CompletionBody.logprobs": "Tell the log probability of each token and of that many likeliest ones; 0 is a request",
    "CompletionBody.prompt": "A text, a list of texts, a list of token ids, or a list of such lists",
    "TokenizeBody.prompt": "The text to encode; special tokens that it spells are read as such",
    "TokenizeBody.model": "The name of a served model; may be left out where one is served",
    "DetokenizeBody.model": "The name of a served model; may be left out where one is served",
    "DetokenizeBody.tokens": "Ids of the model's vocabulary",
    "return_token_strs": "Also return the entries of the vocabulary",
    "echo": "Begin each choice with its prompt; with logprobs, tell those of its tokens too",
    "reasoning_effort": "How much the model should reason first; none where its template can leave it out",
    "separate_reasoning": "Give what the model reasoned in a field of its own (default true)",
    "include_reasoning": "false means what separate_reasoning false means",
    "input": "A text, or a list of messages and other items",
    "EmbeddingBody.input": "A text, a list of texts, a list of token ids, or a list of such lists",
    "EmbeddingBody.add_special_tokens": "Put the model's begin token before each text (default true)",
    "encoding_format": "float for numbers (the default), base64 for the little-endian float32 of them",
    "dimensions": "The length of the vectors: the model's own, or left out",
    "pooling": "mean of the last hidden states of all tokens (the default), or that of the last token",
    "normalize": "Scale each vector to length 1 (default true)",
    "user": "Ignored",
    "instructions": "What stands before the conversation as the system's message",
    "system": "What stands before the conversation as the system's message",
    "max_output_tokens": "Most tokens to generate",
    "stop_sequences": "Texts that end the answer; they are not part of it",
    "strict": "Whether arguments must follow the schema",
    "best_of": "Make that many choices and show the n likeliest; equal to n in a stream",
    "role": "Who speaks",
    "ContentPart.type": "Only \"text\" can be served",
    "Message.content": "A text or a list of parts; null beside tool calls",
    "Message.name": "The speaker's name, where the template shows it",
    "Message.tool_calls": "The calls that an assistant's message made",
    "Message.tool_call_id": "Which call a tool's message answers",
    "Message.reasoning_content": "What an assistant's message reasoned, where the template shows it",
    "count": "How many tokens there are",
    "max_model_len": "The longest prompt plus answer in tokens",
    "token_strs": "The entries of the vocabulary, in the order of tokens",
    "created": "Unix time in seconds",
    "finish_reason": "stop: an end token or stop text; length: the limit; tool_calls: the client is to call tools",
    "stop_reason": "The stop text or token that ended the choice, if one did",
    "cached_tokens": "Prompt tokens that were computed before",
    "chat_template": "The template's source (Jinja)",
})  # fmt: skip


def words_for(record: str, field: str) -> str | None:
    """What a field means, or None where its name says it."""
    return _WORDS.get(f"{record}.{field}", _WORDS.get(field))


def bounds(record: str, field: str, limits: Limits) -> dict[str, Any]:
    """What the server bounds beyond the record's own ranges."""
    match record, field:
        case (("ChatBody" | "TokenizeBody"), "messages"):
            return {"minItems": 1, "maxItems": limits.messages}
        case _, "n":
            return {"maximum": limits.n}
        case _, "top_logprobs" if record == "ChatBody":
            return {"maximum": limits.logprobs}
        case "CompletionBody", "logprobs":
            return {"maximum": limits.logprobs}
        case _, "stop_token_ids":
            return {"maxItems": limits.stop_ids}
        case _, "logit_bias":
            return {"maxProperties": limits.logit_bias}
        case _:
            return {}
