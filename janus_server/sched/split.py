"""Whether another node computes a request's prompt, or hands over what it has cached of it, for the one that runs it.

The Brain asks it for every request that is begun. A node that decodes for many is held up by a long prompt; one that
runs nothing can compute it meanwhile, and the keys and values then cost a copy. A node so used ends up with prompts
alone, and is free for the next. Pure; nothing is decided here that could not be undone: a helper that fails is done
without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from janus_server.orders import Helper, Ticket
from janus_server.types import Split

if TYPE_CHECKING:
    from janus_server.sched.dispatcher import Dispatcher
    from janus_server.sched.room import Room


class SplitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """fixed_s: two messages, and two waits for a step's end. A prompt of less than least_s holds up nobody for long. A
    copy may cost a share of copy_most of the work that it saves: what is predicted is not exact."""

    choice: Split = Split.OFF
    fixed_s: float = 0.01
    bytes_per_s: float = 1e9
    least_s: float = 0.1
    copy_most: float = 0.25


class Stand(NamedTuple):
    """A node as it stands now: requests that run there beyond those whose prompts it has to compute, what those take,
    and how many tokens of the prompt in question it has cached."""

    node: str
    busy: int
    backlog_s: float
    cached_tokens: int = 0


def aid(
    settings: SplitSettings, ticket: Ticket, token_bytes: int, here: Stand, others: Sequence[Stand]
) -> Helper | None:
    """Who helps `here` with a prompt; None where it is best left alone.

    Example: 4,000 tokens take 2 s and are 100 MB of keys and values. Here 12 requests run; another node that runs none
    computes them, and 0.11 s of copying is little beside that. Where the other decodes for one request, nobody helps.
    """
    if settings.choice is Split.OFF or not others:
        return None
    if settings.choice is Split.ALWAYS:
        first = min(others, key=lambda one: (one.backlog_s, one.busy, one.node))
        return Helper(first.node, ticket.prompt_tokens)
    most = max(others, key=lambda one: (one.cached_tokens, -one.backlog_s, one.node))
    more = min(most.cached_tokens, ticket.prompt_tokens) - here.cached_tokens
    if more > 0 and _pays(settings, more, token_bytes, _work_s(ticket, more)):
        return Helper(most.node, most.cached_tokens, cached=True)
    lacking = ticket.prompt_tokens - here.cached_tokens
    if not here.busy or _work_s(ticket, lacking) < settings.least_s:
        return None
    if not _pays(settings, lacking, token_bytes, _work_s(ticket, lacking)):
        return None
    longest_s = here.backlog_s + _work_s(ticket, lacking)  # to wait for it no longer than it would wait there
    resting = [one for one in others if not one.busy and one.backlog_s <= longest_s]
    first = min(resting, key=lambda one: (one.backlog_s, -one.cached_tokens, one.node), default=here)
    return None if first is here else Helper(first.node, ticket.prompt_tokens)


def _work_s(ticket: Ticket, tokens: int) -> float:
    """What so many of its tokens take to compute."""
    return ticket.work_s * tokens / max(1, ticket.prompt_tokens)


def _pays(settings: SplitSettings, tokens: int, token_bytes: int, saved_s: float) -> bool:
    copy_s = settings.fixed_s + tokens * token_bytes / settings.bytes_per_s
    return copy_s <= settings.copy_most * saved_s


class Splits:
    """The same over what the Brain knows of its nodes, and what it has given them to do."""

    def __init__(
        self, settings: SplitSettings, rooms: Mapping[str, Room], serving: Callable[[str], Sequence[str]],
        dispatcher: Dispatcher,
    ) -> None:  # fmt: skip
        """serving(model) takes its requests."""
        self._settings, self._rooms = settings, rooms
        self._serving, self._dispatcher = serving, dispatcher

    def helper(self, ticket: Ticket, node: str, now: float) -> Helper | None:
        """Who helps `node` with the prompt of a request that it was given just now."""
        if self._settings.choice is Split.OFF:
            return None
        nodes = [one for one in self._serving(ticket.model) if one in self._rooms]
        if node not in nodes or len(nodes) < 2:
            return None
        cached = self._dispatcher.cached(ticket, nodes)
        stands = {one: self._stand(one, cached.get(one, 0), now) for one in nodes}
        here = stands.pop(node)
        here = here._replace(backlog_s=max(0.0, here.backlog_s - ticket.work_s))  # without this one
        known = self._rooms[node].models[ticket.model].known
        helper = aid(self._settings, ticket, known.kv_token_bytes, here, tuple(stands.values()))
        if helper is not None and not helper.cached:
            self._dispatcher.moved(ticket, helper.node, now)
        return helper

    def _stand(self, node: str, cached_tokens: int, now: float) -> Stand:
        busy = sum(belief.busy for belief in self._rooms[node].models.values()) - self._dispatcher.pending(node)
        return Stand(node, max(0, busy), self._dispatcher.backlog_s(node, now), cached_tokens)
