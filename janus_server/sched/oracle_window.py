"""What the oracle remembers of one model: a bounded window of observations that favours the recent and the rare.

`oracle` owns one a model. When it is full, a new observation takes the place of the one that is most like it, if one
is; else of the oldest. So a quiet night does not push out the one burst that was seen, and nothing stays for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from janus_server.sched.oracle_arrays import Array
from janus_server.sched.oracle_records import Observation


class Window:
    """At most `most` observations, none older than keep_s. rows [n, d] are the inputs of the elasticity GP."""

    def __init__(self, most: int, keep_s: float, alike: float) -> None:
        self._most = most
        self._keep_s = keep_s
        self._alike = alike
        self._observations: list[Observation] = []
        self._rows: list[Array] = []
        self.added = 0

    def __len__(self) -> int:
        return len(self._observations)

    @property
    def observations(self) -> Sequence[Observation]:
        """In the order in which they came."""
        return self._observations

    def rows(self) -> Array:
        return np.array(self._rows)

    def add(self, observation: Observation, row: Array) -> None:
        """alike is the distance in log units within which two observations tell the same."""
        self.expire(observation.at_s)
        if len(self) >= self._most:
            distances = np.abs(self.rows() - row).max(axis=1)
            nearest = int(distances.argmin())
            self._drop(nearest if distances[nearest] <= self._alike else 0)
        self._observations.append(observation)
        self._rows.append(row)
        self.added += 1

    def restore(self, observations: Sequence[Observation], rows: Sequence[Array], added: int) -> None:
        """Go on where another one was."""
        self._observations, self._rows, self.added = list(observations), list(rows), added

    def expire(self, now_s: float) -> None:
        """A clock that jumped ahead must not empty the window: the newest observation stays."""
        while len(self) > 1 and self._observations[0].at_s < now_s - self._keep_s:
            self._drop(0)

    def _drop(self, index: int) -> None:
        del self._observations[index], self._rows[index]
