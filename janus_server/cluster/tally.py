"""What all fronts of a cluster counted, summed. Pure.

Each tells totals, so that one that is not heard loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from janus_server.orders import Counted, Counts

_NOTHING = Counts(0, 0)


class Tally:
    """What was told by each node, and what those that are gone had counted."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, Counts]] = {}
        self._gone: dict[str, Counts] = {}
        self._changed: set[str] = set()

    def heard(self, node: str, counted: Counted) -> None:
        known = self._nodes.setdefault(node, {})
        for model, counts in counted.models.items():
            before = known.get(model)
            if before is not None and counts.requests < before.requests:  # another process of that name
                self._gone[model] = _sum(self._gone.get(model, _NOTHING), before)
            known[model] = counts
            self._changed.add(model)

    def gone(self, node: str) -> None:
        """It counts no more; what it had counted stays."""
        for model, counts in self._nodes.pop(node, {}).items():
            self._gone[model] = _sum(self._gone.get(model, _NOTHING), counts)

    def take(self) -> Counted | None:
        """The models of which anything changed since the last time."""
        changed, self._changed = sorted(self._changed), set()
        return Counted({model: self._total(model) for model in changed}) if changed else None

    def _total(self, model: str) -> Counts:
        total = self._gone.get(model, _NOTHING)
        for node in sorted(self._nodes):
            total = _sum(total, self._nodes[node].get(model, _NOTHING))
        return total


def _sum(one: Counts, other: Counts) -> Counts:
    return Counts(
        one.input_tokens + other.input_tokens, one.output_tokens + other.output_tokens, one.ended + other.ended,
        one.late + other.late, one.requests + other.requests,
    )  # fmt: skip


def changed(now: Mapping[str, Counts], told: Mapping[str, Counts]) -> dict[str, Counts]:
    """What a front tells: the totals that are other ones than those that it told last."""
    return {model: counts for model, counts in now.items() if told.get(model) != counts}
