"""Whether nodes mean the same by a model: its name, the digest of its files as each read them, what it computes
with, its context. Pure.

A request that one node takes may run on any other, and go on there: so each must come to the same words, and have room
for the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from janus_server.orders import KnownModel

_Models = Mapping[str, KnownModel]


class Files:
    """Of the nodes of one term."""

    def __init__(self) -> None:
        self._models: dict[str, _Models] = {}

    def joined(self, node: str, models: Sequence[KnownModel]) -> str | None:
        """None, or why that node cannot be of the cluster: then nothing of it is kept."""
        self.left(node)
        mine = {one.model: one for one in models}
        for other, theirs in self._models.items():
            if trouble := _trouble(node, mine, other, theirs):
                return trouble
        self._models[node] = mine
        return None

    def left(self, node: str) -> None:
        self._models.pop(node, None)


def _trouble(node: str, mine: _Models, other: str, theirs: _Models) -> str | None:
    """What is not known of a model is like any."""
    same = "nodes of one cluster are given the same models"
    if missing := sorted(theirs.keys() - mine.keys()):
        return f"node {node} lacks {', '.join(missing)}, which node {other} has: {same}"
    if beyond := sorted(mine.keys() - theirs.keys()):
        return f"node {node} has {', '.join(beyond)}, which node {other} lacks: {same}"
    for model, own in mine.items():
        their = theirs[model]
        if own.checkpoint and their.checkpoint and own.checkpoint != their.checkpoint:
            return f"node {node} has other files of {model} than node {other}: give one of them another name"
        if own.numbers and their.numbers and own.numbers != their.numbers:
            return (f"node {node} computes {model} in {own.numbers} and node {other} in {their.numbers}: give all the "
                    "same --dtype and --kernels")  # fmt: skip
        lengths = own.context_tokens, their.context_tokens
        if all(lengths) and lengths[0] != lengths[1]:
            return (f"node {node} has sequences of {lengths[0]} tokens of {model} and node {other} of {lengths[1]}: "
                    f"give all the same memory, or --max-model-len {min(lengths)}")  # fmt: skip
    return None
