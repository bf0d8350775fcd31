"""What prompts take in this cluster, as the nodes that compute them have learnt it. Pure; `lead` owns one.

A front predicts a prompt's work from the steps that ran on its own node. Of a model that never ran there it can only
guess, and a guess that is off by a factor of three misleads whoever plans with it: the leader puts what was measured in
its place.
"""

from __future__ import annotations

from statistics import median

import msgspec

from janus_server.orders import Counted, Ticket
from janus_server.sched.cost import PromptCost


class Prices:
    """The last cost that each node told, by model."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, PromptCost]] = {}

    def heard(self, node: str, counted: Counted) -> None:
        for model, counts in counted.models.items():
            if counts.prompt is not None and counts.prompt.sound:
                self._known.setdefault(model, {})[node] = counts.prompt

    def gone(self, node: str) -> None:
        for costs in self._known.values():
            costs.pop(node, None)

    def of(self, ticket: Ticket) -> Ticket:
        """The ticket with the work that its prompt is, and its last token alone where another part of it may be cached;
        as it came where no node knows."""
        costs = self._known.get(ticket.model)
        if not costs:
            return ticket
        work_s = median(cost.work_s(ticket.prompt_tokens) for cost in costs.values())
        # Both of one model: they are subtracted from each other.
        least_s = median(cost.work_s(1) for cost in costs.values()) if ticket.prefix else ticket.least_s
        return msgspec.structs.replace(ticket, work_s=work_s, least_s=least_s)
