"""Why a model gets as many replicas as it does: the grounds of a decision, and the one sentence made of them. Pure.

`scaling` decides and fills them in; nothing here decides.
"""

from __future__ import annotations

import enum

import msgspec

from janus_server.units import format_seconds


class Decider(enum.Enum):
    """Whose word it was."""

    ORACLE = "oracle"
    TABLE = "table"
    BACKLOG = "backlog"
    LATE = "late"
    IDLE = "idle"


class Grounds(msgspec.Struct, frozen=True):
    """What was predicted and seen. share: attainment with the replicas there are, best: with those predicted."""

    decider: Decider = Decider.IDLE
    predicted: int = 0
    factor: float = 1.0
    ahead_s: float = 0.0
    tokens_s: float = 0.0
    met: bool = True
    share: float = 0.0
    best: float = 0.0
    target: float = 0.0
    backlog_s: float = 0.0
    late: float = 0.0
    idle_s: float = 0.0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A model is to have so many replicas; wanted, with devices enough. met: then its promise would be kept."""

    model: str
    replicas: int
    before: int
    wanted: int
    decider: Decider
    met: bool
    why: str


def sentence(model: str, before: int, count: int, wanted: int, grounds: Grounds, short: tuple[int, int] | None) -> str:
    """Example: "chat 3→5: predicted 0.82 at 3, target 0.95, for 1.3 times the traffic in 3 s (oracle)"."""
    head = f"{model} {before}→{count}"
    if short is not None:
        head += f" of {wanted} wanted, as all together want {short[0]} devices and there are {short[1]}"
    return f"{head}: {_because(before, count, grounds)}"


def _because(before: int, count: int, grounds: Grounds) -> str:
    ahead = ""
    if grounds.factor > 1.0:
        ahead = f", for {grounds.factor:.3g} times the traffic in {format_seconds(grounds.ahead_s)}"
    match grounds.decider:
        case Decider.BACKLOG:
            return f"{format_seconds(grounds.backlog_s)} of prompts wait (backlog)"
        case Decider.LATE:
            return f"{grounds.late:.0%} of the last requests were late (late)"
        case Decider.IDLE:
            return f"no traffic for {format_seconds(grounds.idle_s)} (idle)"
        case Decider.TABLE:
            return f"{grounds.tokens_s:.0f} tokens a second{ahead} (table: the oracle knows nothing of it)"
        case Decider.ORACLE if not grounds.met:
            return (
                f"no number of replicas meets {grounds.target:.4g}: predicted {grounds.best:.3f} with "
                f"{grounds.predicted}{ahead}, and twice as many would hardly help (oracle)"
            )
        case Decider.ORACLE if count > before and before:
            return f"predicted {grounds.share:.3f} at {before}, target {grounds.target:.4g}{ahead} (oracle)"
        case Decider.ORACLE:
            return f"predicted {grounds.best:.3f} with {grounds.predicted}, target {grounds.target:.4g}{ahead} (oracle)"
