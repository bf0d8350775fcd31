"""Which replicas of a split model compute prompts and which the tokens after them. Pure.

`rollout` asks. A lone replica is DECODE and does both; later ones are PREFILL. There is always one DECODE, and with two
replicas or more one PREFILL; in between, roles follow the work, and only when one side is short by most of a replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from janus_server.sched.placement import Change, Model, Replica, Role, Standing

# Of a replica: how far the numbers of each role may be from the work before one changes its role.
_SHORT: Final = 0.75


def first_role(model: Model, standing: Sequence[Replica]) -> Role:
    """Of a replica that joins these."""
    if not model.split:
        return Role.BOTH
    staying = [r for r in standing if r.standing in (Standing.ACTIVE, Standing.RISING)]
    return Role.PREFILL if any(r.role is Role.DECODE for r in staying) else Role.DECODE


def flips(model: Model, replicas: Sequence[Replica], decode_share: float) -> list[Change]:
    """At most one change of role: a lost DECODE is replaced at once, else the side that is short gets one.

    decode_share is the part of the work that is decoding; nan where nobody knows. The idlest of a role changes.

    Example: of four Active replicas one is DECODE and 0.45 of the work is decoding: 1.8 replicas' worth, 0.8 more than
    there are, so the idlest PREFILL changes. With 0.4 it would not.
    """
    active = [r for r in replicas if r.standing is Standing.ACTIVE]
    coming = [r for r in replicas if r.standing is Standing.RISING]
    decode = [r for r in active if r.role is Role.DECODE]
    others = [r for r in active if r.role is not Role.DECODE]
    if not decode and others and not any(r.role is Role.DECODE for r in coming):
        return [_change(others, Role.DECODE, f"{model.model} has no replica left that decodes")]
    known = math.isfinite(decode_share) and 0.0 <= decode_share <= 1.0
    if not known or len(active) < 2 or coming:
        return []
    wanted = min(max(decode_share * len(active), 1.0), len(active) - 1.0)
    part = f"{decode_share:.2f} of the work of {len(active)} replicas is decoding and {len(decode)} decode"
    if wanted - len(decode) > _SHORT and len(others) > 1:
        return [_change(others, Role.DECODE, part)]
    if len(decode) - wanted > _SHORT and len(decode) > 1:
        return [_change(decode, Role.PREFILL, part)]
    return []


def _change(among: Sequence[Replica], role: Role, why: str) -> Change:
    chosen = min(among, key=lambda r: (r.backlog_s, r.running, r.devices))
    return Change(verb=None, model=chosen.model, devices=chosen.devices, role=role,
                  why=f"{chosen.name} changes from {chosen.role.value} to {role.value}: {why}")  # fmt: skip
