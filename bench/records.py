"""The records of a load run: who asks (applications and their promises), what is asked (plans), what came (outcomes).

Pure. Data sets and arrivals make plans, the client turns each into one outcome, statistics and reports read outcomes.
All times of a run are seconds since its start, on one monotonic clock.
"""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple


class Endpoint(enum.Enum):
    """Which API a run speaks; the value is the path's usual end."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class Slo(NamedTuple):
    """What a request must keep to count as good; None means that nothing is promised. `attain` is the wanted share."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None
    attain: float = 0.95

    @property
    def empty(self) -> bool:
        return self.ttft_s is None and self.tpot_s is None and self.e2el_s is None


@dataclasses.dataclass(frozen=True, slots=True)
class Application:
    """A kind of traffic, reported apart. `model` is the name on the wire.

    share weighs it among the applications without a rate of their own; request_rate, input_tokens and output_tokens
    replace the run's for this application.
    """

    name: str
    model: str
    slo: Slo = dataclasses.field(default_factory=Slo)
    share: float = 1.0
    request_rate: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Segment(NamedTuple):
    """`tokens` tokens that depend on `key` alone: two prompts with equal leading segments share that prefix."""

    key: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt of a stated size without a content of its own; `wording` makes ids or text of it."""

    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.segments)


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A prompt from a file: a text, token ids, or chat messages."""

    content: str | tuple[int, ...] | tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One request to come: sent at `due_s`, for at most `output_tokens` tokens."""

    due_s: float
    app: Application
    prompt: Drawn | Written
    output_tokens: int
    warmup: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went.

    start_s is when the client took it up (its connection included), never before due_s. first_s and last_s are the
    arrivals of the first and last event that carried a token, gaps_s the times between such events. carried holds the
    number of tokens of each such event where the server tells it, else it is empty. failure is a word to count by, or
    None for a request whose stream ended as it should. held: a concurrency limit, not its plan, decided its start.
    """

    plan: Plan
    start_s: float
    sent_s: float
    end_s: float
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: array[float] = dataclasses.field(default_factory=lambda: array("f"))
    carried: array[int] = dataclasses.field(default_factory=lambda: array("H"))
    usage_prompt: int | None = None
    usage_completion: int | None = None
    usage_cached: int | None = None
    event_tokens: int = 0
    finish: str | None = None
    failure: str | None = None
    detail: str = ""
    reused: bool = False
    held: bool = False
    text: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.start_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def output_tokens(self) -> int:
        """What the server counted, else what was seen."""
        return self.event_tokens if self.usage_completion is None else self.usage_completion

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first; None when there was no second one."""
        tokens = self.output_tokens
        if self.first_s is None or self.last_s is None or tokens < 2:
            return None
        return (self.last_s - self.first_s) / (tokens - 1)
