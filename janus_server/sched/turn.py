"""Which co-resident model runs the next step. Pure.

Least recently served first, so that no model waits for more than one step of each other one. (Least slack first, with
budgets in predicted milliseconds, comes with applications and their promises.)
"""

from __future__ import annotations


class Turn:
    """Example: order(("a", "b")) == ("a", "b"); after took("a") it is ("b", "a")."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._count = 0

    def order(self, models: tuple[str, ...]) -> tuple[str, ...]:
        """The models to try, first the one whose last step lies furthest back; ties keep the given order."""
        return tuple(sorted(models, key=lambda model: self._last.get(model, 0)))

    def took(self, model: str) -> None:
        """`model` ran a step."""
        self._count += 1
        self._last[model] = self._count
