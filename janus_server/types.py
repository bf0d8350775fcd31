"""Every record that crosses a room, a thread or a wire: frozen msgspec structs, no behaviour beyond derived values.

Pure: imports nothing of ours. What changes over time lives in a named owner elsewhere (a `Sequence` in the batcher, the
`PagePool`), never here.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np


class FinishReason(enum.Enum):
    """Why a choice ended. `STOP` and `LENGTH` are OpenAI's words; the others reach a client as an error event."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GrammarKind(enum.Enum):
    """In which language a grammar is written; JSON_OBJECT needs no source.

    TOOLS is LARK too, but written by the server around schemas of the client's, and may be as large as a schema.
    """

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    TOOLS = "tools"


class Grammar(msgspec.Struct, frozen=True):
    """What the text of every choice of a request must follow. Compiled where the request runs."""

    kind: GrammarKind
    source: str = ""


class Pooling(enum.Enum):
    """How the hidden states of a prompt become its embedding: their mean, or the last one."""

    MEAN = "mean"
    LAST = "last"


class Fault(enum.Enum):
    """Why a step has no answer for one row. The words are for the log."""

    NOT_FINITE = "the model's numbers are not finite"
    GRAMMAR = "the grammar allows no token"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn from logits. Defaults are the identity: pure sampling at temperature 1.

    temperature 0 means greedy; what is so small that it comes to the same was made 0 at the edge. top_k 0 means all.
    seed is always set: the front draws one when the client gave none. logit_bias is sorted by id. logprobs None means
    none; k means the chosen token's and the k likeliest (0 is a request).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """True when the draw depends on tokens already seen."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Promise(msgspec.Struct, frozen=True):
    """What an application promises its callers: a request attains it when its TTFT and its mean TPOT both do.

    None promises nothing of that kind. attain is the share of requests that are to.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    attain: float = 0.99


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One validated prompt with n choices, as it travels from the front to the node that runs it.

    id is made by the server. stop_ids already contains the model's end tokens unless the client asked to ignore them;
    with min_tokens they are not drawn before that many tokens exist. Stop strings are matched where text is made.
    shown_ids are control tokens that appear in the text although the others are skipped.
    prompt_logprobs k asks for the log probability of every prompt token but the first, and the k likeliest in its
    place. With max_tokens 0 nothing is generated: the request ends where its prompt does, and with pooling it brings
    the embedding of that prompt. application is the name that its promise and priority (higher first) were given under.
    """

    id: str
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    tenant: str = ""
    application: str = ""
    promise: Promise | None = None
    priority: int = 0


class TokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token's log probability, and exactly the k likeliest; where it is one of them, with the same float."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampled(msgspec.Struct, frozen=True):
    """What the executor returns for one row that was sampled.

    done says that the choice's grammar is complete: with this token, or before it where there is none. With a fault
    there is no token, and the choice ends in an error.
    """

    token: int | None
    logprob: TokenLogprob | None = None
    done: bool = False
    fault: Fault | None = None


class Reading(msgspec.Struct, frozen=True):
    """What the executor returns for one chunk that was read: scores in the order of its targets, or what was pooled.

    sums are what the prompt's next PoolSpec takes, embedding [hidden] comes with the last one.
    """

    scores: tuple[TokenLogprob, ...] = ()
    sums: Any = None
    embedding: tuple[float, ...] | None = None
    fault: Fault | None = None


class Split(enum.Enum):
    """When another node computes a prompt than the one that runs its request."""

    OFF = "off"
    AUTO = "auto"
    ALWAYS = "always"


class HandedOver(msgspec.Struct, frozen=True):
    """Prompts of requests that run here which another node was to compute, so far: those whose pages came from it, in
    so many pages and seconds, and those that were computed here after all. What was here already is in neither."""

    brought: int = 0
    failed: int = 0
    pages: int = 0
    seconds: float = 0.0


class Lent(msgspec.Struct, frozen=True):
    """Pages of keys and values of a prompt that this node may read under a grant of another's, for a while.

    They follow on the `first` pages that it has already; layout is what they must be to be of use.
    """

    grant: str
    layout: str
    first: int
    pages: int


class Emit(msgspec.Struct, frozen=True):
    """One step's news about one choice: at most one token, or the end, or both. Crosses from device thread to loop.

    The first emit of a choice that brings a token or the end tells how many prompt tokens came from the cache and how
    long the request waited to start. Only one choice of a request tells of cached tokens: the others start from what
    that one computed. prompt_logprobs come with choice 0, in order, over as many emits as the prompt took steps;
    embedding [hidden] comes with the end, and so does what is lent of a prompt that another node had computed here.
    """

    request_id: str
    index: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    queued_s: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] | None = None
    fault: Fault | None = None
    lent: Lent | None = None


class Delta(msgspec.Struct, frozen=True):
    """News about one choice as the API writes it: text that can no longer change, and the tokens it came from.

    text may lag tokens (held-back UTF-8 and stop strings). prompt_logprobs come all at once, with the first delta of
    choice 0. After `finish` nothing follows for that index. With finish
    ERROR, `message` is the fixed text for the client; with STOP, `stop` is the stop string that ended it, if one did.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0
    queued_s: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] | None = None
    message: str | None = None
    fault: Fault | None = None
    stop: str | None = None


class PageKind(enum.Enum):
    WEIGHTS = "weights"
    KV = "kv"
    SCRATCH = "scratch"


class Owner(msgspec.Struct, frozen=True):
    """Who holds a physical page: a model instance on this node and what for."""

    model: str
    kind: PageKind


class History(msgspec.Struct, frozen=True, eq=False):
    """What a choice has seen, for its penalties: int64 arrays of distinct ids.

    prompt are the ids of its prompt, drawn those that it drew, counts[i] how often drawn[i]; fresh are the drawn ones
    that the prompt lacks. They are views of what the choice's next token changes: for the step that they come with.
    """

    prompt: np.ndarray
    fresh: np.ndarray
    drawn: np.ndarray
    counts: np.ndarray


class SampleSpec(msgspec.Struct, frozen=True):
    """What the sampler needs for one row beyond its logits.

    position is the index of the token to be drawn, counted from the first generated token (0), choice the index of the
    choice it is drawn for. banned are ids that may not be drawn at this position (stop ids before min_tokens).
    history is there only when the sampling needs it. matcher is the state of the choice's grammar, which the sampler
    alone looks into and advances.
    """

    sampling: Sampling
    position: int
    choice: int = 0
    banned: tuple[int, ...] = ()
    history: History | None = None
    matcher: Any = None


class ScoreSpec(msgspec.Struct, frozen=True):
    """Wanted of a chunk: the log probability of targets[i] after its row first+i, and of the `top` likeliest there."""

    first: int
    targets: tuple[int, ...]
    top: int


class PoolSpec(msgspec.Struct, frozen=True):
    """Wanted of a chunk: the sum of its hidden states from row `first` on, added to `sums` of the chunks before.

    mean_of comes with the last chunk: over so many rows the sums become the embedding.
    """

    first: int
    sums: Any = None
    mean_of: int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One sequence's share of a step: compute positions start … start+len(tokens)-1, over `pages`; sample if asked.

    pages is the sequence's page table up to the last position of the chunk; page i holds positions
    i·page_tokens … (i+1)·page_tokens-1. read is what is wanted of its rows beside the next token.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    sample: SampleSpec | None = None
    read: ScoreSpec | PoolSpec | None = None


class PageCopy(msgspec.Struct, frozen=True):
    """Copy page `source` to page `target` before the step runs; the sequence needs only the start of it."""

    source: int
    target: int


class Batch(msgspec.Struct, frozen=True):
    """One step of one model: what the executor runs.

    What comes back is a Sampled a chunk that samples and a Reading a chunk that is read, both in the order of chunks.
    """

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[PageCopy, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(c.tokens) for c in self.chunks)


class ModelCard(msgspec.Struct, frozen=True):
    """What `/v1/models` says of a served model, and /metrics of its cache.

    kv_pages are those that its KV cache could have at most, of kv_page_tokens tokens each. fingerprint is a digest of
    the checkpoint's headers, configs and file sizes as they were opened.
    """

    id: str
    created_s: int
    context_tokens: int
    parameters: int
    weight_bytes: int
    dtype: str
    family: str
    kv_page_tokens: int = 0
    kv_pages: int = 0
    kv_dtype: str = ""
    prefix_caching: bool = True
    fingerprint: str = ""


class BatcherStats(msgspec.Struct, frozen=True):
    """A snapshot for gauges; counters only grow. deferred of those waiting wait for their first choice's prompt."""

    running: int
    waiting: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    computed_tokens: int
    sampled_tokens: int
    deferred: int = 0


class Load(msgspec.Struct, frozen=True):
    """Choices of a model that have not ended, and the age of its oldest request without a first token (0: none)."""

    choices: int = 0
    oldest_s: float = 0.0


class CallFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One API call in numbers, for logs and traces; nothing that a client wrote.

    Seconds count from its arrival: queue_s to the first step, ttft_s to the first token, last_s to the last one. None
    where it did not come so far. ends are the reasons why its choices ended, each once. application is the name that
    it counts under.
    """

    model: str
    application: str = ""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float | None
    ttft_s: float | None
    last_s: float | None
    total_s: float
    ends: tuple[str, ...]
