"""Which tokens a choice has seen and how often it drew each, kept token by token: what penalties look back on.

`chunk` makes one when a choice whose sampling needs it first draws, the batcher tells it of every token that is
accepted. Nothing here goes through a prompt or an output a second time, and preemption changes nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from janus_server.types import History

_FIRST_ROOM_TOKENS = 16


class Seen:
    """One choice's own counts over its prompt's ids; prompt_ids, ascending, are shared by the choices of a request."""

    __slots__ = ("_counts", "_drawn", "_fresh", "_fresh_n", "_places", "prompt_ids")

    def __init__(self, prompt_ids: np.ndarray) -> None:
        self.prompt_ids = prompt_ids
        self._places: dict[int, int] = {}
        self._drawn = np.empty(_FIRST_ROOM_TOKENS, np.int64)
        self._counts = np.empty(_FIRST_ROOM_TOKENS, np.int64)
        self._fresh = np.empty(_FIRST_ROOM_TOKENS, np.int64)
        self._fresh_n = 0

    def add(self, token: int) -> None:
        """The choice drew this token."""
        place = self._places.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._places[token] = len(self._places)
        if place == len(self._drawn):
            self._drawn, self._counts, self._fresh = map(_doubled, (self._drawn, self._counts, self._fresh))
        self._drawn[place], self._counts[place] = token, 1
        at = int(self.prompt_ids.searchsorted(token))
        if at == len(self.prompt_ids) or self.prompt_ids[at] != token:
            self._fresh[self._fresh_n] = token
            self._fresh_n += 1

    def history(self) -> History:
        """A view for one draw; nothing is copied."""
        n = len(self._places)
        return History(self.prompt_ids, self._fresh[: self._fresh_n], self._drawn[:n], self._counts[:n])


def distinct(tokens: Iterable[int]) -> np.ndarray:
    """The ids among these tokens, ascending, each once."""
    return np.unique(np.fromiter(tokens, np.int64))


def _doubled(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, np.empty_like(array)])
