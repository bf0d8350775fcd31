"""One choice of one request while it is being generated: what is known of it, and which pages hold how much of that.

The batcher makes sequences and is the only one that writes their fields; `scarcity` reads their age. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from janus_server.sched.seen import Seen, distinct
from janus_server.types import PageCopy, Pooling, Promise, Request

# By what a request is served that was promised nothing, or not the one of the two: somebody waits, and then reads.
UNPROMISED_TTFT_S: Final = 2.0
UNPROMISED_TPOT_S: Final = 0.2
# A request of one class higher goes before those of the class below that came up to so much earlier.
PRIORITY_S: Final = 1.0
# A stream that fell behind makes up for the last few tokens; what it lost before is not owed any more.
OWED_TOKENS: Final = 4


class Lane(NamedTuple):
    """What decides, beside when it is due, how urgent a sequence is. paced: its request was promised a TPOT."""

    priority: int
    pace_s: float
    paced: bool


class Begun(NamedTuple):
    """A choice that ran elsewhere: what it has drawn so far, and its grammar's matcher after that."""

    choice: int
    tokens: tuple[int, ...]
    grammar: Any = None


class Sequence:
    """One choice of one request. Owned by its batcher; nobody else writes its fields.

    order is its seniority: by arrival, where each class of priority counts as PRIORITY_S of age, so that nobody is
    overtaken for ever. due_s is when its next token is promised: the first one TTFT after arrival, every other one TPOT
    after the one before it came, or was due if that was earlier. Where all that is kept, so is the mean TPOT, at every
    token, and if the first was in time, token i came by TTFT + i times TPOT too. That sum alone would not do for a
    deadline: a stream whose first token was early could then be slower than promised, and one that ran ahead could stop
    for as long as it is ahead, which a reader sees as stuttering.

    cached is how many prompt tokens the prefix cache gave, set once, when the request first finds its pages. A sibling
    starts from what the first choice computed, so that is no gain of the cache: its number is 0 from the start.

    Of the prompt's rows those from `read` to `to_read` still owe something beside the next token (log probabilities, a
    share of the embedding). They are computed in order and never come from a cache; what was read stays read when the
    sequence is preempted, and `sums` with it. grammar is the request's matcher as it came, shared by its choices;
    matcher is this choice's own copy, in step with its generated tokens. Neither is looked into here. seen is in step
    with them too, from the first draw on, where the sampling needs history; None where not.
    """

    __slots__ = ("arrived_s", "cached", "computed", "copy", "due_s", "first", "grammar", "index", "lane", "matcher",
                 "number", "order", "pages", "published", "read", "request", "seen", "siblings", "started_s", "sums",
                 "to_read", "tokens")  # fmt: skip

    def __init__(self, number: int, request: Request, index: int, arrived_s: float, grammar: Any = None) -> None:
        self.number = number
        self.request = request
        self.index = index
        self.arrived_s = arrived_s
        self.order = (arrived_s - PRIORITY_S * request.priority, number)
        promise = request.promise if request.promise is not None else Promise()
        paced = promise.tpot_s is not None
        self.lane = Lane(request.priority, UNPROMISED_TPOT_S if promise.tpot_s is None else promise.tpot_s, paced)
        self.due_s = arrived_s + (UNPROMISED_TTFT_S if promise.ttft_s is None else promise.ttft_s)
        self.tokens = list(request.prompt)
        self.computed = 0
        self.pages: list[int] = []
        self.published = 0
        self.cached: int | None = 0 if index else None
        self.first = True
        self.started_s: float | None = None
        self.copy: PageCopy | None = None
        self.siblings: list[Sequence] = []
        self.grammar = grammar
        self.matcher: Any = None
        self.seen: Seen | None = None
        self.sums: Any = None
        self.read, self.to_read = _rows_to_read(request) if index == 0 else (0, 0)

    @property
    def gap(self) -> int:
        """Known tokens whose keys and values are not cached yet."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def go_on(self, tokens: Iterable[int]) -> None:
        """It has drawn these elsewhere, and told of them and of its prompt."""
        self.tokens += tokens
        self.first, self.cached, self.read = False, 0, self.to_read
        if self.request.sampling.needs_history:
            self.seen = Seen(distinct(self.request.prompt))
            for token in self.tokens[len(self.request.prompt) :]:
                self.seen.add(token)

    def drew(self, now: float) -> None:
        """A token came: when the next one is due."""
        pace_s = self.lane.pace_s
        late_s = 0.0 if self.generated == 1 else min(max(0.0, now - self.due_s), OWED_TOKENS * pace_s)
        self.due_s = now - late_s + pace_s


def _rows_to_read(request: Request) -> tuple[int, int]:
    """The first row of the prompt whose output is wanted beside the next token, and the one after the last."""
    rows = len(request.prompt)
    match request.pooling:
        case Pooling.MEAN:
            return 0, rows
        case Pooling.LAST:
            return rows - 1, rows
    return 0, 0 if request.prompt_logprobs is None else rows - 1


def by_seniority(seq: Sequence) -> tuple[float, int]:
    """More senior first; among those of one priority that is older first, ties by number."""
    return seq.order
