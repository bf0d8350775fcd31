"""What `/admin/cluster` answers on any node: the whole cluster as that node sees it, for the dashboard and
`janus status`. Pure.

A node tells what it knows of itself (`NodeView`); whoever is asked asks all others and puts the answers beside each
other (`ClusterView`). Counts only grow as long as a node's process lives, and a reader takes differences: where up_s
fell, all was counted since; where a count fell all the same, nothing is known of that application. Sizes are in pages
and bytes, times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from janus_server.api.admin import Prediction, StageName, UnderWay


class ModelView(msgspec.Struct, kw_only=True):
    """One model on one node. running are requests in its batch and queue there, held those that wait at this node's
    front for it to be served anywhere. weight_pages and kv_pages are what it holds of the pool now."""

    model: str
    stage: StageName
    goal: StageName | None = None
    under_way: UnderWay | None = None
    pinned: bool = False
    draining: bool = False
    running: int = 0
    held: int = 0
    weight_pages: int = 0
    kv_pages: int = 0
    host_copy_bytes: int = 0
    trouble: str | None = None


class Spread(msgspec.Struct, kw_only=True):
    """A histogram: counts[i] values were at most bounds_s[i] and more than the bound before; the last count is of those
    beyond all bounds, so there is one more count than there are bounds."""

    bounds_s: list[float]
    counts: list[int]


class ApplicationView(msgspec.Struct, kw_only=True):
    """The requests of one application (or of a model by its own name) that came to one node. ended are those that a
    promise was made for and that are over, attained those of them that kept all of it."""

    application: str
    model: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    attain: float | None = None
    requests: int = 0
    failed: int = 0
    ended: int = 0
    attained: int = 0
    ttft: Spread
    tpot: Spread


class Come(msgspec.Struct, kw_only=True):
    """What was counted of one application within a stretch of time. ttft and tpot are by the bounds of its
    `ApplicationView`."""

    application: str
    requests: int = 0
    failed: int = 0
    ended: int = 0
    attained: int = 0
    ttft: list[int]
    tpot: list[int]


class Stretch(msgspec.Struct, kw_only=True):
    """over_s seconds that ended ago_s before the node said so. What is left out of came had nothing to tell."""

    ago_s: float
    over_s: float
    came: list[Come]


class Decision(msgspec.Struct, kw_only=True):
    """A sentence of the Brain's: what it ordered or found, of which model ("" for none), on which node ("" for none).
    time is Unix time."""

    time: float
    term: int
    kind: Literal["order", "decided", "refused", "done", "failed", "lost", "joined", "left", "leads"]
    model: str = ""
    node: str = ""
    verb: str = ""
    why: str


class StandingView(msgspec.Struct, kw_only=True):
    """How the leader treats one model on one node."""

    goal: StageName | None = None
    pinned: bool = False
    draining: bool = False


class LeaderView(msgspec.Struct, kw_only=True):
    """What only the leader knows: where models are served, what it expects of them, its last decisions, newest last.
    draining are nodes that an operator has it empty, waiting are requests that nobody has begun, by model. standings
    are by node and model, those left out of whom there is nothing to say."""

    served: dict[str, list[str]]
    predictions: dict[str, Prediction]
    decisions: list[Decision]
    draining: list[str] = []
    waiting: dict[str, int] = {}
    standings: dict[str, dict[str, StandingView]] = {}


class NodeView(msgspec.Struct, kw_only=True):
    """One node. url is where its HTTP API is, "" where it is not known; leads holds what it knows as the leader, None
    on all others. empty says that nothing is up there and nothing on its way: once an operator has emptied it, it can
    be stopped. trouble says why nothing is known of a node that is a member: then the rest is empty. decided are the
    last decisions of terms that it led in before, the newest last; past is told to who asks for it: the last minutes,
    in order and without a gap up to now."""

    node: str
    url: str = ""
    host: str = ""
    domain: str = ""
    version: str = ""
    up_s: float = 0.0
    term: int = 0
    leaving: bool = False
    empty: bool = False
    page_bytes: int = 0
    pool_pages: int = 0
    free_pages: int = 0
    scratch_pages: int = 0
    host_budget_bytes: int = 0
    models: list[ModelView] = []
    applications: list[ApplicationView] = []
    past: list[Stretch] = []
    decided: list[Decision] = []
    leads: LeaderView | None = None
    trouble: str | None = None


class ClusterView(msgspec.Struct, kw_only=True):
    """All nodes, by name. asked is the one that answers; leader is None while nobody leads. time is Unix time."""

    object: Literal["cluster"] = "cluster"
    asked: str
    leader: str | None
    term: int
    time: float
    nodes: list[NodeView]


def leads_of(view: ClusterView) -> LeaderView | None:
    """What the leader knows; None while nobody leads, or it does not answer."""
    return next((node.leads for node in view.nodes if node.leads is not None), None)


def decisions_of(view: ClusterView) -> list[Decision]:
    """Those of all leaders that are known, each once, the newest last."""
    told = [one for node in view.nodes for one in (*node.decided, *(node.leads.decisions if node.leads else ()))]
    once = {msgspec.structs.astuple(one): one for one in told}
    return sorted(once.values(), key=lambda one: one.time)


def where_served(view: ClusterView) -> dict[str, Sequence[str]]:
    """The nodes that take each model's requests, as the leader says; where nobody does, those where it is Active."""
    found: dict[str, list[str]] = {}
    for node in view.nodes:
        for one in node.models:
            found.setdefault(one.model, [])
            if one.stage == "active":
                found[one.model].append(node.node)
    leads = leads_of(view)
    return dict(found) if leads is None else {**found, **leads.served}
