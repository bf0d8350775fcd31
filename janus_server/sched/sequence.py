"""One choice of one request while it is being generated: what is known of it, and which pages hold how much of that.

The batcher makes sequences and is the only one that writes their fields; `scarcity` reads their age. Pure.
"""

from __future__ import annotations

from janus_server.types import PageCopy, Request


class Sequence:
    """One choice of one request. Owned by its batcher; nobody else writes its fields.

    cached is how many prompt tokens the prefix cache gave, set once, when the request first finds its pages. A sibling
    starts from what the first choice computed, so that is no gain of the cache: its number is 0 from the start.
    """

    __slots__ = ("cached", "computed", "copy", "first", "index", "number", "order", "pages", "published", "request",
                 "siblings", "started_s", "tokens")  # fmt: skip

    def __init__(self, number: int, request: Request, index: int, arrived_s: float) -> None:
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

    @property
    def gap(self) -> int:
        """Known tokens whose keys and values are not cached yet."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


def by_age(seq: Sequence) -> tuple[float, int]:
    """Older first: by arrival, ties by number."""
    return seq.order
