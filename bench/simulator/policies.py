"""Policies by name: the leader's Brain, what is left of it without its parts, and imitations of other systems.

`make` builds one for a scenario; `names` says what there is, for --help. All baselines are given the links that the
Brain plans with. A name that stands for something which cannot be done honestly here is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from janus_server.errors import BadConfig
from janus_server.sched.brain import Brain
from janus_server.sched.dispatch import Order, dispatch, dispatch_live
from janus_server.sched.pools import Pool
from janus_server.sched.rivals import edf
from janus_server.sched.rules import Rule
from janus_server.sched.source import Links
from janus_server.sched.state import BrainSettings
from janus_server.suggest import nearest

from . import peaks
from .ablations import HostOnly, without_forks
from .arbiter import ArbiterDesk
from .baseline import Baseline
from .baseline import Rule as Scaling
from .blitzscale import BlitzScale
from .frontdesk import Desk, LeastDesk, fewest_running, in_turn, least_work
from .kvload import KvLoad
from .llumnix import Llumnix
from .planned import AHEAD_S, Late, PlannedDesk
from .prism import Pressure, Prism
from .records import Policy, Scenario
from .serverlessllm import ServerlessLLM, cap
from .static import Static
from .yard import Yard


class Entry(NamedTuple):
    """One name: what it is, in a line, and how it is made."""

    what: str
    make: Callable[[Scenario, BrainSettings], Policy]


def names() -> dict[str, str]:
    """All that `make` knows, each with a line of what it is."""
    return {name: entry.what for name, entry in _ENTRIES.items()}


def make(name: str, scenario: Scenario, settings: BrainSettings | None = None) -> Policy:
    """A new policy that knows nothing yet; settings are the Brain's, where it is one."""
    if name in _REFUSED:
        raise BadConfig(f"policy {name}: {_REFUSED[name]}")
    if name not in _ENTRIES:
        raise BadConfig(f"there is no policy {name}{nearest(name, _ENTRIES)}; there are {', '.join(_ENTRIES)}")
    if not scenario.nodes or not scenario.models:
        raise BadConfig(f"scenario {scenario.name} has no nodes, or no models: there is nothing to decide")
    return _ENTRIES[name].make(scenario, settings or BrainSettings())


# The Brain and its parts


def _brain(scenario: Scenario, settings: BrainSettings) -> Policy:
    return Brain(settings)


def _pool(pool: Pool, scenario: Scenario, settings: BrainSettings) -> Policy:
    fleet = msgspec.structs.replace(settings.fleet, pools=(pool,))
    return Brain(msgspec.structs.replace(settings, fleet=fleet))


def _ruled(rule: Rule, scenario: Scenario, settings: BrainSettings) -> Policy:
    return Brain(msgspec.structs.replace(settings, dispatch=rule))


def _host_only(scenario: Scenario, settings: BrainSettings) -> Policy:
    return HostOnly(Brain(without_forks(settings)))


# Baselines


def _static(desk: Callable[[Yard], Desk], scenario: Scenario, settings: BrainSettings) -> Policy:
    yard = Yard(_links(settings), tree=True)
    return Baseline(yard, desk(yard), Static(yard, partial(peaks.needs, scenario)))


def _serverlessllm(scenario: Scenario, settings: BrainSettings) -> Policy:
    yard = Yard(_links(settings))
    desk = LeastDesk(yard, fewest_running, partial(cap, yard))
    return Baseline(yard, desk, ServerlessLLM(yard, desk))


def _prism(scenario: Scenario, settings: BrainSettings) -> Policy:
    yard = Yard(_links(settings))
    desk = ArbiterDesk(yard)
    models = {
        spec.known.model: Pressure(
            spec.shape.kv_bytes / spec.known.shards,
            min((app.tpot_s for app in scenario.apps if app.model == spec.known.model), default=1.0),
        )
        for spec in scenario.models
    }
    rule: Scaling = Prism(yard, desk, models, {node.name: node.page_bytes for node in scenario.nodes})
    return Baseline(yard, desk, rule)


def _blitzscale(scenario: Scenario, settings: BrainSettings) -> Policy:
    yard, kv = Yard(_links(settings), tree=True), KvLoad(room_tokens(scenario))
    desk = LeastDesk(yard, least_work, lambda model: AHEAD_S)
    return Baseline(yard, desk, BlitzScale(yard, desk, kv))


def _llumnix(scenario: Scenario, settings: BrainSettings) -> Policy:
    yard, kv = Yard(_links(settings)), KvLoad(room_tokens(scenario))
    desk = LeastDesk(yard, lambda replica: -kv.freeness(replica))
    return Baseline(yard, desk, Llumnix(yard, desk, kv))


def _least(key: Callable[..., float], yard: Yard) -> Desk:
    return LeastDesk(yard, key)


def _links(settings: BrainSettings) -> Links:
    return settings.fleet.links


def room_tokens(scenario: Scenario) -> dict[str, float]:
    """By model, the tokens whose KV a replica has room for on the roomiest node, beside its weights."""
    room = {}
    for spec in scenario.models:
        token_bytes = max(spec.shape.kv_bytes / spec.known.shards, 1.0)
        free = max((node.pool_pages - spec.known.weight_pages) * node.page_bytes for node in scenario.nodes)
        room[spec.known.model] = max(0, free) / token_bytes
    return room


def _planned(yard: Yard) -> Desk:
    return PlannedDesk(yard, dispatch_live, Late.EXTEND, BrainSettings().ahead_s)


def _lst_latest(yard: Yard) -> Desk:
    return PlannedDesk(yard, dispatch, Late.DEFER)


def _lst_earliest(yard: Yard) -> Desk:
    return PlannedDesk(yard, partial(dispatch, order=Order.EARLIEST), Late.DEFER)


def _edf(yard: Yard) -> Desk:
    return PlannedDesk(yard, edf, Late.SAME)


_FIXED: Final = "fixed replicas for the peak; requests "
_ENTRIES: Final = MappingProxyType[str, Entry](
    {
        "janus": Entry("our leader: both pools, forks, prediction, dispatch by latest start", _brain),
        "elastic-only": Entry("janus with every model in the elastic pool", partial(_pool, Pool.ELASTIC)),
        "steady-only": Entry("janus with every model in the steady pool", partial(_pool, Pool.STEADY)),
        "h2d-only": Entry("janus without copies from device to device", _host_only),
        "janus-turns": Entry("janus, requests round robin over replicas", partial(_ruled, Rule.ROUND_ROBIN)),
        "janus-least": Entry("janus, requests to the least predicted prefill", partial(_ruled, Rule.LEAST_LOAD)),
        "static": Entry(
            "ServerlessLLM provisioned all day for the peaks of this trace, whole devices",
            partial(_static, partial(_least, fewest_running)),
        ),
        "serverlessllm": Entry("whole devices by active requests / 8, 60 s kept alive, quickest tier", _serverlessllm),
        "prism": Entry("devices shared by KV pressure, one replica a model, Moore-Hodgson a device", _prism),
        "blitzscale": Entry("a scaler for each model every second, weights spread from peers", _blitzscale),
        "llumnix": Entry("to the freest replica; one more or fewer every 10 s by free blocks", _llumnix),
        "dispatch-live": Entry(_FIXED + "by our live plan, as the leader does it", partial(_static, _planned)),
        "dispatch-latest": Entry(_FIXED + "by LST-IMH, latest start first", partial(_static, _lst_latest)),
        "dispatch-earliest": Entry(_FIXED + "by LST-IMH, earliest start first", partial(_static, _lst_earliest)),
        "dispatch-edf": Entry(_FIXED + "by earliest deadline", partial(_static, _edf)),
        "dispatch-prism": Entry(_FIXED + "by Prism's arbiter, one queue a device", partial(_static, ArbiterDesk)),
        "dispatch-least": Entry(
            _FIXED + "to the least predicted prefill", partial(_static, partial(_least, least_work))
        ),
        "dispatch-turns": Entry(_FIXED + "round robin", partial(_static, partial(_least, in_turn))),
    }
)

_RULE: Final = "needs a choice of planners in BrainSettings (Dispatcher); dispatch-{} compares it on fixed replicas"
_REFUSED: Final = MappingProxyType(
    {
        "janus-latest": _RULE.format("latest"),
        "janus-earliest": _RULE.format("earliest"),
        "janus-edf": _RULE.format("edf"),
        "janus-prism": _RULE.format("prism"),
        "xtensor-off": "needs devices whose memory is in fixed parts: it is a property of devices, not of a policy",
    }
)
