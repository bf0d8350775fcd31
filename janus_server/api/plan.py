"""From a parsed body and its encoded prompts to validated `types.Request`s: the second half of the edge.

Pure: no clock, no randomness, no tokenizer. `http` calls `plan_*` with what `parse` and the tokenizer made; `reply`
writes the answer to the `Call` that comes out. Nothing past this file checks client input again, so a value that passes
here must be safe to run.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from janus_server import types
from janus_server.api.bodies import ChatBody, CommonBody, CompletionBody, Limits
from janus_server.api.checks import need
from janus_server.api.dialect import Dialect
from janus_server.api.parse import prompts_of, stops_of
from janus_server.api.speech import Style
from janus_server.api.structured import field_of, grammar_of
from janus_server.errors import Refused

# A temperature below this would only weigh logits against each other that lie within the noise of a float32 sum. vLLM
# draws the line at the same place.
GREEDY_BELOW = 1e-5


class Kind(enum.Enum):
    CHAT = "chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"

    @property
    def param(self) -> str:
        """The field of the body that the prompts come from."""
        return {Kind.CHAT: "messages", Kind.COMPLETION: "prompt", Kind.EMBEDDING: "input"}[self]


class Target(msgspec.Struct, frozen=True):
    """What validation must know of the served model. context_tokens covers prompt and answer; ids are below vocab.

    hidden is the length of an embedding, pooling how it is made where a client does not say.
    """

    model: str
    context_tokens: int
    vocab: int
    eos_ids: tuple[int, ...]
    defaults: types.Sampling
    dialect: Dialect = Dialect()
    hidden: int = 0
    pooling: types.Pooling = types.Pooling.MEAN


class Label(msgspec.Struct, frozen=True):
    """What the shell adds to a call: its id, the wall clock in seconds, and a number that missing seeds are made of."""

    id: str
    created_s: int
    seed: int


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One validated API call: a `Request` per prompt, n choices each, and how the answer is to be written.

    Choice j of prompt i has index i·n+j. echo holds the text to put before the choices of each prompt, "" for none; the
    shell fills it in, since the ids of a prompt may be turned into text only once they are known to be in range. style
    says how the text of each choice is cut into pieces. Of a prompt's n choices the `best` likeliest are shown, where
    that is set, and numbered by rank. grammar_from is the field of the body that asked for the requests' grammar.
    """

    kind: Kind
    label: Label
    model: str
    requests: tuple[types.Request, ...]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    echo: tuple[str, ...]
    style: Style = Style()
    best: int | None = None
    grammar_from: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests)

    @property
    def wordy(self) -> bool:
        """Whether its answer may take seconds to write: 128 choices with 20 log probabilities a token, or vectors."""
        return self.logprobs or self.kind is Kind.EMBEDDING


def plan_chat(body: ChatBody, prompt: Sequence[int], target: Target, limits: Limits, label: Label) -> Call:
    """The call that answers a chat body whose rendered and encoded prompt is `prompt`."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _plan(Kind.CHAT, body, (prompt,), ("",), logprobs, target, limits, label)


def plan_completion(
    body: CompletionBody, prompts: Sequence[Sequence[int]], target: Target, limits: Limits, label: Label
) -> Call:
    """The call that answers a completion body; prompts are in the order of `prompts_of`. Its echo is still empty.

    With echo and logprobs the prompts are scored; with best_of above n more choices are made than shown, and the log
    probabilities that rank them are computed though nobody asked to see them.
    """
    shown, made = body.n or 1, body.best_of or body.n or 1
    logprobs = 0 if made > shown and body.logprobs is None else body.logprobs
    ids, wider = _id_lists(body), msgspec.structs.replace(body, n=made)
    call = _plan(Kind.COMPLETION, wider, prompts, ids, logprobs, target, limits, label)
    scored = body.logprobs if body.echo else None
    if scored is not None:
        written = call.prompt_tokens * shown * (1 + scored)
        need(written <= limits.scores, "logprobs", f"left out with a prompt so long: with echo {written} log "
             f"probabilities of prompt tokens would be written, and {limits.scores} is the most")  # fmt: skip
    return msgspec.structs.replace(
        call,
        requests=tuple(msgspec.structs.replace(request, prompt_logprobs=scored) for request in call.requests),
        logprobs=body.logprobs is not None,
        best=shown if made > shown else None,
    )


def refuse_hopeless(chars: int, longest_token_chars: int, target: Target, param: str) -> None:
    """Refuse a text that cannot fit the context however it is cut, before it costs a second to cut it."""
    if chars > target.context_tokens * longest_token_chars:
        raise Refused(
            f"the text has {chars} characters; the model's context of {target.context_tokens} tokens cannot hold them",
            param=param,
            code="context_length_exceeded",
        )


def check_ids(ids: Sequence[int], vocab: int, name: str, param: str) -> None:
    """Refuse ids outside the vocabulary, naming the first one's place. `name` is the path of their list in the body; ""
    says that they are no list of the client's but what a text was cut into.
    """
    if not ids or (min(ids) >= 0 and max(ids) < vocab):
        return
    if not name:
        raise Refused(f"{param} spells a token that this model's tokenizer knows and the model does not", param=param,
                      code="invalid_value")  # fmt: skip
    at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
    raise Refused(f"{name}[{at}] must be a token id from 0 to {vocab - 1}", param=param, code="invalid_value")


def _id_lists(body: CompletionBody) -> tuple[str, ...]:
    """For each prompt, the path of its list of ids in the body; "" where the prompt is a text."""
    prompts = prompts_of(body)
    if isinstance(prompts[0], str):
        return ("",) * len(prompts)
    alone = isinstance(body.prompt, list) and isinstance(body.prompt[0], int)
    return ("prompt",) if alone else tuple(f"prompt[{i}]" for i in range(len(prompts)))


# Planning


def _plan(
    kind: Kind,
    body: CommonBody,
    prompts: Sequence[Sequence[int]],
    id_lists: Sequence[str],
    logprobs: int | None,
    target: Target,
    limits: Limits,
    label: Label,
) -> Call:
    n = body.n or 1
    sampling = _sampling(body, target, logprobs)
    stop_ids = _stop_ids(body, target)
    grammar = grammar_of(body, limits)
    budget = limits.total_tokens // (n * len(prompts))
    requests = []
    for i, (prompt, id_list) in enumerate(zip(prompts, id_lists, strict=True)):
        max_tokens = _max_tokens(kind, body, len(prompt), target.context_tokens, budget)
        check_ids(prompt, target.vocab, id_list, kind.param)
        need((body.min_tokens or 0) <= max_tokens, "min_tokens", "at most max_tokens")
        seed = _prompt_seed(label, i) if body.seed is None else body.seed
        requests.append(
            types.Request(
                id=f"{label.id}-{i}",
                model=target.model,
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                min_tokens=body.min_tokens or 0,
                n=n,
                sampling=msgspec.structs.replace(sampling, seed=seed),
                stop_ids=stop_ids,
                stop=stops_of(body),
                include_stop=body.include_stop_str_in_output is True,
                skip_special_tokens=body.skip_special_tokens is not False,
                grammar=grammar,
            )
        )
    options = body.stream_options
    return Call(
        kind=kind,
        label=label,
        model=body.model,
        requests=tuple(requests),
        n=n,
        stream=body.stream is True,
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=options is not None and options.continuous_usage_stats is True,
        logprobs=logprobs is not None,
        echo=("",) * len(prompts),
        grammar_from=field_of(body),
    )


def _prompt_seed(label: Label, prompt: int) -> int:
    """The seed of one prompt when the client gave none: equal prompts of one call must not give equal answers."""
    word = f"{label.seed} {prompt}".encode()
    return int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little") >> 1


def _stop_ids(body: CommonBody, target: Target) -> tuple[int, ...]:
    given = body.stop_token_ids or []
    check_ids(given, target.vocab, "stop_token_ids", "stop_token_ids")
    stop_ids = {*given, *(() if body.ignore_eos else target.eos_ids)}
    need(
        not body.min_tokens or len(stop_ids) < target.vocab, "stop_token_ids",
        "fewer than all tokens: before min_tokens none of them may be drawn",
    )  # fmt: skip
    return tuple(sorted(stop_ids))


def _sampling(body: CommonBody, target: Target, logprobs: int | None) -> types.Sampling:
    """The client's choices over the model's defaults. A temperature below GREEDY_BELOW means greedy, here and nowhere
    else: whoever divides by a temperature later may rely on it.
    """
    defaults = target.defaults
    bias = sorted((body.logit_bias or {}).items())
    if bias and not 0 <= bias[0][0] <= bias[-1][0] < target.vocab:
        need(False, "logit_bias", f"an object whose keys are token ids from 0 to {target.vocab - 1}")
    top_k = _given(body.top_k, defaults.top_k)
    top_p = _given(body.top_p, defaults.top_p)
    # top_p 0 keeps the likeliest token alone; said through top_k, where the sampler has no empty set to trip over.
    top_k, top_p = (1, 1.0) if top_p == 0.0 else (max(top_k, 0), top_p)
    temperature = _given(body.temperature, defaults.temperature)
    return types.Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=_given(body.min_p, defaults.min_p),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, defaults.frequency_penalty),
        logit_bias=tuple(bias),
        logprobs=logprobs,
    )


def _max_tokens(kind: Kind, body: CommonBody, prompt: int, context: int, budget: int) -> int:
    """How many tokens may be made for a prompt of `prompt` tokens; `budget` is a choice's share of the call's total."""
    need(prompt > 0, kind.param, "at least one token long")
    room = context - prompt
    asked = _given(body.max_completion_tokens, body.max_tokens)
    if room < (0 if asked == 0 else 1):
        raise Refused(
            f"the prompt has {prompt} tokens, but the model's context of {context} tokens must hold it and an answer",
            param=kind.param,
            code="context_length_exceeded",
        )
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if asked is None:
        return min(room, budget) if kind is Kind.CHAT else min(room, budget, 16)
    if asked > room:
        shown = asked if asked < 1 << 31 else "too large"  # JSON holds whole numbers of four thousand digits
        raise Refused(
            f"{name} is {shown} and the prompt has {prompt} tokens: together more than the model's context of "
            f"{context} tokens; {name} must be at most {room}",
            param=name,
            code="context_length_exceeded",
        )
    need(asked <= budget, name, f"at most {budget} with this n and this many prompts")
    return asked


T = TypeVar("T")


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
