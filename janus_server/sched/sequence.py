"""One choice of one request while it is being generated: what is known of it, and which pages hold how much of that.

The batcher makes sequences and is the only one that writes their fields; `scarcity` reads their age. Pure.
"""

from __future__ import annotations

from typing import Any

from janus_server.sched.seen import Seen
from janus_server.types import PageCopy, Pooling, Request


class Sequence:
    """One choice of one request. Owned by its batcher; nobody else writes its fields.

    cached is how many prompt tokens the prefix cache gave, set once, when the request first finds its pages. A sibling
    starts from what the first choice computed, so that is no gain of the cache: its number is 0 from the start.

    Of the prompt's rows those from `read` to `to_read` still owe something beside the next token (log probabilities, a
    share of the embedding). They are computed in order and never come from a cache; what was read stays read when the
    sequence is preempted, and `sums` with it. grammar is the request's matcher as it came, shared by its choices;
    matcher is this choice's own copy, in step with its generated tokens. Neither is looked into here. seen is in step
    with them too, from the first draw on, where the sampling needs history; None where not.
    """

    __slots__ = ("cached", "computed", "copy", "first", "grammar", "index", "matcher", "number", "order",
                 "pages", "published", "read", "request", "seen", "siblings", "started_s", "sums", "to_read",
                 "tokens")  # fmt: skip

    def __init__(self, number: int, request: Request, index: int, arrived_s: float, grammar: Any = None) -> None:
        self.number = number
        self.request = request
        self.index = index
        self.order = (arrived_s, number)
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


def _rows_to_read(request: Request) -> tuple[int, int]:
    """The first row of the prompt whose output is wanted beside the next token, and the one after the last."""
    rows = len(request.prompt)
    match request.pooling:
        case Pooling.MEAN:
            return 0, rows
        case Pooling.LAST:
            return rows - 1, rows
    return 0, 0 if request.prompt_logprobs is None else rows - 1


def by_age(seq: Sequence) -> tuple[float, int]:
    """Older first: by arrival, ties by number."""
    return seq.order
