"""What it would take to have a model on a node: by which the Brain ranks them, or says that there are too few. Pure."""

from __future__ import annotations

from janus_server.sched.room import Room


def ado(room: Room, model: str, now: float) -> tuple[bool, bool, bool, bool, float, int, str]:
    """What it takes to have a model on a node: it is there or on its way, it fits at all, it is not broken there, there
    is room, it is quick.
    """
    belief, missing = room.models[model], room.missing_pages(model)
    return (
        not belief.holds_pages, not room.able(model), belief.barred(now), missing > 0, belief.reload_s, missing,
        room.node,
    )  # fmt: skip


def few(shards: int, nodes: int) -> str:
    return f"it takes {shards} nodes that have it, and there are {nodes}" if nodes else "no node has it"
