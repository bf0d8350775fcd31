"""Imaginary devices by fidelity: `make` is all that `world` needs to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from janus_server.errors import BadConfig
from janus_server.suggest import nearest

from .batching import Rules, promises
from .fluid import Fluid
from .records import AppSpec, Device, ModelSpec, NodeSpec
from .stepwise import Stepwise

FIDELITIES: Final = ("step", "fluid")


def make(
    fidelity: str,
    node: NodeSpec,
    models: Sequence[ModelSpec],
    siblings: Sequence[NodeSpec] = (),
    apps: Sequence[AppSpec] = (),
    rules: Rules = Rules(),  # noqa: B008 - frozen
) -> Device:
    """One node's batching. apps are the scenario's, in their order: turns go by what they were promised.

    siblings, the other devices that a replica may have shards on, compute the same steps at the same time: a model
    that has one of those to itself does not feel what shares the head's device, nor the other way round.
    """
    known = promises(apps)
    if fidelity == "step":
        return Stepwise(node, models, known, rules)
    if fidelity == "fluid":
        return Fluid(node, models, known, rules)
    raise BadConfig(
        f"there is no fidelity {fidelity!r}; there are: {', '.join(FIDELITIES)}{nearest(fidelity, FIDELITIES)}"
    )
