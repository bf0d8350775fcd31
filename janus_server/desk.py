"""The front desk: turns calls into tickets for the leader, and begins those that it says. Lives on the event loop.

It predicts what a prompt will take from the steps that ran, decides nothing, and tells no token to anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from janus_server.orders import Counts, Dispatch, Ticket, Traffic
from janus_server.sched.cost import Shape, StepCost

if TYPE_CHECKING:
    from janus_server.executor import StepReport
    from janus_server.flow import Entrant, Flow
    from janus_server.instance import Call


# A step with fewer tokens beside those of decodes tells more of the decodes than of prompts.
LEAST_PROMPT_TOKENS: Final = 16


class PromptCosts:
    """What prompts take, by model: from the steps that ran here, before those from weight_bytes."""

    def __init__(self, weight_bytes: Mapping[str, int], step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._costs = {model: StepCost(size) for model, size in weight_bytes.items()}

    def work_s(self, model: str, tokens: int) -> float:
        """A prompt of so many tokens, alone."""
        return self._costs[model].prompt_s(tokens, 0.0, self._step_tokens, Shape())

    def priced(self, counts: Mapping[str, Counts]) -> dict[str, Counts]:
        """With what prompts take, of the models that ran here."""
        found = dict(counts)
        for model, counted in counts.items():
            if model in self._costs and (prompt := self._costs[model].prompt(self._step_tokens)) is not None:
                found[model] = msgspec.structs.replace(counted, prompt=prompt)
        return found

    def observe(self, report: StepReport) -> None:
        """Learn from a step what prompts take. Steps that only decode teach nothing of that."""
        step, stats = report.step, report.stats
        if step is None or stats is None or step.tokens < stats.running + LEAST_PROMPT_TOKENS:
            return
        shape = Shape(decodes=stats.running, prompt_tokens=step.tokens - stats.running)
        self._costs[report.model].observe(shape, step.total_s)


class NoDesk:
    """Where calls wait elsewhere: what runs here was begun by somebody who was told to."""

    def __init__(self, weight_bytes: Mapping[str, int], step_tokens: int) -> None:
        self.costs = PromptCosts(weight_bytes, step_tokens)

    def ready(self, flow: Flow, call: Call) -> None:
        flow.run(call)

    def started(self, call: Call) -> None:
        pass

    def left(self, call: Entrant) -> None:
        pass

    def changed(self) -> None:
        pass

    def observe(self, report: StepReport) -> None:
        """A step ran here."""
        self.costs.observe(report)


class FrontDesk:
    """Every call of the node that is not over. weight_bytes are those of each model, for a first guess at its speed.

    changed() is told when there is something to `take`, or calls wait for their model.
    """

    def __init__(self, weight_bytes: Mapping[str, int], step_tokens: int, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._costs = PromptCosts(weight_bytes, step_tokens)
        self._calls: dict[str, tuple[Flow, Call]] = {}
        self._arrived: dict[str, Ticket] = {}
        self._started: list[str] = []
        self._left: list[str] = []

    def ready(self, flow: Flow, call: Call) -> None:
        if call.id in self._calls:  # its ticket still waits, though its model was away meanwhile
            return
        self._calls[call.id] = flow, call
        tokens = call.prompt_tokens
        self._arrived[call.id] = Ticket(
            id=call.id, model=flow.model, prompt_tokens=tokens, arrived_s=call.arrived_s, ttft_s=call.ttft_s,
            priority=call.priority,
            work_s=self._costs.work_s(flow.model, tokens),
        )  # fmt: skip

    def started(self, call: Call) -> None:
        self._started.append(call.id)

    def left(self, call: Entrant) -> None:
        if self._calls.pop(call.id, None) is not None and self._arrived.pop(call.id, None) is None:
            self._left.append(call.id)

    def changed(self) -> None:
        self._changed()

    def take(self) -> Traffic | None:
        """What happened since it was last taken; None where nothing did."""
        if not (self._arrived or self._started or self._left):
            return None
        traffic = Traffic(tuple(self._arrived.values()), tuple(self._started), tuple(self._left))
        self._arrived, self._started, self._left = {}, [], []
        return traffic

    def begin(self, dispatch: Dispatch) -> None:
        """Let requests run, but for those that have left; that is told at the next `take`."""
        for request in dispatch.requests:
            if request in self._calls:
                flow, call = self._calls[request]
                flow.run(call)

    def observe(self, report: StepReport) -> None:
        """A step ran here."""
        self._costs.observe(report)
