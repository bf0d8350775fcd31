"""How an imaginary node batches: limits, promises and memory that both fidelities of a device keep to.

`devices.make` hands these to `stepwise` and `fluid`; the defaults are the live batcher's, with a data-centre device's
step. Frozen records and arithmetic only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from janus_server.errors import BadConfig
from janus_server.sched.sequence import UNPROMISED_TPOT_S, UNPROMISED_TTFT_S

from .constants import SEQUENCES, STEP_TOKENS
from .physics import page_tokens
from .records import AppSpec, Call, ModelSpec, NodeSpec, Scenario


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """step_tokens, sequences, shared_prompts and one_prompt_at_a_time are those of `BatcherLimits`.

    parts: a node's memory is cut into so many equal parts, of which each model has one for its weights and KV, as
    where every model's server has memory of its own; 0 shares it all. prompt: tokens of a call's prompt, for `stepwise`
    with prefix caching; without it nobody's prompt has anything in common with another's.
    """

    step_tokens: int = STEP_TOKENS
    sequences: int = SEQUENCES
    shared_prompts: int = 4
    one_prompt_at_a_time: bool = False
    parts: int = 0
    prompt: Callable[[Call], tuple[int, ...]] | None = None


class Promised(msgspec.Struct, frozen=True):
    """What an application's calls count on; paced where a TPOT was promised at all."""

    ttft_s: float = UNPROMISED_TTFT_S
    tpot_s: float = UNPROMISED_TPOT_S
    paced: bool = False
    priority: int = 0


UNPROMISED = Promised()


def promises(apps: Sequence[AppSpec]) -> tuple[Promised, ...]:
    """By index of the application."""
    return tuple(Promised(app.ttft_s, app.tpot_s, True, app.priority) for app in apps)


def promised(known: Sequence[Promised], app: int) -> Promised:
    return known[app] if 0 <= app < len(known) else UNPROMISED


def room_pages(model: ModelSpec, node: NodeSpec, rules: Rules) -> int:
    """KV pages that a model can have there at most: what its weights leave of the node, or of its part of it."""
    mine = node.pool_pages // rules.parts if rules.parts else node.pool_pages
    return max(0, mine - model.known.weight_pages)


def check_room(scenario: Scenario, rules: Rules) -> None:
    """BadConfig where memory in parts leaves some model without room on every device: all its requests were refused."""
    for model in scenario.models if rules.parts else ():
        if not any(longest_tokens(model, node, rules) for node in scenario.nodes):
            part = max(node.pool_pages for node in scenario.nodes) // rules.parts
            raise BadConfig(
                f"{model.known.model} fits in none of {rules.parts} parts of a device's memory: it has "
                f"{model.known.weight_pages} pages of weights, and a part {part}"
            )


def longest_tokens(model: ModelSpec, node: NodeSpec, rules: Rules) -> int:
    """The longest prompt and answer together that may come: what placement keeps room for, as far as there is any."""
    room = room_pages(model, node, rules)
    return min(model.known.longest_pages or room, room) * page_tokens(model, node.page_bytes)


def check_length(call: Call, model: str, longest: int, node: str) -> None:
    """A call that fits no memory must be refused before it comes here: it would wait for ever."""
    if call.input_tokens + call.output_tokens > longest:
        raise BadConfig(
            f"call {call.id} is of {call.input_tokens} + {call.output_tokens} tokens; {model} holds {longest} at most "
            f"on {node}: give it more memory, or bound the trace's lengths"
        )
