"""What a node knows of itself, as a record, and the sights of all nodes beside each other. Pure.

`lookout` carries them. What another node says of itself is believed as far as it concerns that node alone: its name is
the one that its link proved, and what it knows as the leader counts only where it is the leader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from janus_server.api.admin import ManagedModel
from janus_server.api.cluster import (
    ApplicationView,
    ClusterView,
    Decision,
    LeaderView,
    ModelView,
    NodeView,
    StandingView,
    leads_of,
)
from janus_server.cluster.past import sound
from janus_server.orders import Stage
from janus_server.sched.state import Standing
from janus_server.types import Owner, PageKind

if TYPE_CHECKING:
    from janus_server.operate import Operator

UNREADABLE: Final = "what it says of itself cannot be read"
# Of terms that are over.
DECIDED_MOST: Final = 100
# Names and sentences are shown: of another node's, no more than fits a line or two.
TEXT_MOST: Final = 2000
_URL: Final = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]{1,300}", re.ASCII)


class Reached:
    """What the HTTP side of a node tells of itself: where clients reach it, and how their requests went."""

    def __init__(self) -> None:
        self.url = ""
        self.applications: Callable[[], list[ApplicationView]] = list


class Shown(Protocol):
    """The part of a node that is looked at. memory() are the pages held, by owner, after the last step."""

    @property
    def name(self) -> str: ...

    @property
    def reached(self) -> Reached: ...

    @property
    def where(self) -> tuple[str, str]: ...

    @property
    def pool_pages(self) -> int: ...

    @property
    def free_pages(self) -> int: ...

    @property
    def leaving(self) -> bool: ...

    def memory(self) -> Mapping[Owner, int]: ...


class Knows(Protocol):
    """The part of a Brain that is looked at."""

    def nodes(self) -> tuple[str, ...]: ...

    def stages(self, node: str) -> dict[str, Stage]: ...

    def serving(self, model: str) -> tuple[str, ...]: ...

    def standing(self, node: str, model: str) -> Standing: ...

    def leaving(self) -> tuple[str, ...]: ...


def own_view(node: Shown, operator: Operator, version: str, up_s: float) -> NodeView:
    """What a node knows of itself just now."""
    managed, (host, domain) = operator.models(), node.where
    leads = operator.leading()
    if leads is not None:
        leads.predictions = {one.model: one.prediction for one in managed if one.prediction is not None}
    return NodeView(
        node=node.name, url=node.reached.url, host=host, domain=domain, version=version, up_s=round(up_s, 3),
        term=operator.term, leaving=node.leaving, empty=not any(map(_there, managed)),
        page_bytes=operator.page_bytes, pool_pages=node.pool_pages, free_pages=node.free_pages,
        host_budget_bytes=operator.host_budget_bytes,
        scratch_pages=sum(pages for owner, pages in node.memory().items() if owner.kind is PageKind.SCRATCH),
        models=[model_view(one) for one in managed], applications=node.reached.applications(), leads=leads,
        decided=operator.decided(),
    )  # fmt: skip


def _there(one: ManagedModel) -> bool:
    return one.stage == "active" or one.under_way is not None


def model_view(one: ManagedModel) -> ModelView:
    return ModelView(
        model=one.model, stage=one.stage, goal=one.goal, under_way=one.under_way, pinned=one.pinned,
        draining=one.draining, running=one.running, held=one.held, weight_pages=one.held_pages, kv_pages=one.kv_pages,
        host_copy_bytes=one.host_copy_bytes, trouble=one.trouble,
    )  # fmt: skip


def leader_view(brain: Knows, decisions: list[Decision], waiting: Mapping[str, int]) -> LeaderView:
    """What a leader knows, without predictions; waiting are requests that nobody has begun."""
    served: dict[str, list[str]] = {}
    standings: dict[str, dict[str, StandingView]] = {}
    for node in brain.nodes():
        for model in brain.stages(node):
            if model not in served:
                served[model] = list(brain.serving(model))
            standing = brain.standing(node, model)
            if standing.goal is not None or standing.pinned or standing.draining:
                standings.setdefault(node, {})[model] = StandingView(
                    goal=None if standing.goal is None else standing.goal.value, pinned=standing.pinned,
                    draining=standing.draining,
                )  # fmt: skip
    return LeaderView(
        served=served, predictions={}, decisions=decisions, draining=list(brain.leaving()),
        waiting={model: count for model, count in waiting.items() if count}, standings=standings,
    )  # fmt: skip


def written(view: NodeView, most_bytes: int) -> bytes:
    """As it travels, in JSON, which has no numbers that are none. Of too many models those that rest are left out, and
    where that does not help, all that grows with their number. The past goes first."""
    now = msgspec.structs.replace(view, past=[])
    models = [one for one in view.models if one.stage != "cold" or one.running or one.held or one.under_way]
    for less in (view, now, msgspec.structs.replace(now, models=models)):
        raw = msgspec.json.encode(less)
        if len(raw) <= most_bytes:
            return raw
    return msgspec.json.encode(msgspec.structs.replace(now, models=[], applications=[], decided=[], leads=None))


def read_view(raw: bytes, node: str) -> NodeView:
    """What the node of that name says of itself, so far as it makes sense."""
    try:
        view = msgspec.json.decode(raw, type=NodeView)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NodeView(node=node, trouble=UNREADABLE)
    view.node, view.trouble = node, None
    view.url = view.url if _URL.fullmatch(view.url) else ""
    view.host, view.domain, view.version = view.host[:64], view.domain[:64], view.version[:64]
    view.models = [one for one in view.models if len(one.model) <= TEXT_MOST]
    view.applications = [one for one in view.applications if _whole(one)]
    view.past = sound(view)
    view.decided = [one for one in view.decided[-DECIDED_MOST:] if len(one.why) <= TEXT_MOST]
    for one in view.models:
        one.trouble = one.trouble if one.trouble is None else one.trouble[:TEXT_MOST]
    if view.leads is not None:
        view.leads.decisions = [one for one in view.leads.decisions if len(one.why) <= TEXT_MOST]
    return view


def _whole(one: ApplicationView) -> bool:
    """Its counts fit its bounds: who takes differences must not stumble."""
    spreads = (one.ttft, one.tpot)
    return len(one.application) <= TEXT_MOST and all(
        len(spread.counts) == len(spread.bounds_s) + 1 and list(spread.bounds_s) == sorted(spread.bounds_s)
        for spread in spreads
    )


def beside(asked: str, leader: str | None, term: int, now: float, views: Iterable[NodeView]) -> ClusterView:
    """All nodes, by name; what the leader knows of the others' models is said of those too. now is Unix time."""
    nodes = sorted(views, key=lambda view: view.node)
    for view in nodes:
        if view.node != leader:
            view.leads = None
        if leader is not None:
            view.decided = [one for one in view.decided if one.term < term]
    whole = ClusterView(asked=asked, leader=leader, term=term, time=now, nodes=nodes)
    leads = leads_of(whole)
    if leads is not None:
        for view in nodes:
            standings = leads.standings.get(view.node, {})
            for one in view.models:
                _treated(one, standings.get(one.model, StandingView()))
    return whole


def _treated(one: ModelView, standing: StandingView) -> None:
    one.goal, one.pinned, one.draining = standing.goal, standing.pinned, standing.draining
