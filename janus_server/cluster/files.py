"""Whether nodes mean the same by a model's name: by the digests of its files, as each node read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from janus_server.orders import KnownModel


class Files:
    """Of the nodes of one term."""

    def __init__(self) -> None:
        self._digests: dict[str, dict[str, str]] = {}

    def joined(self, node: str, models: Sequence[KnownModel]) -> str | None:
        """None, or why that node cannot be of the cluster: then nothing of it is kept."""
        self.left(node)
        mine = {one.model: one.checkpoint for one in models if one.checkpoint}
        for other, theirs in self._digests.items():
            for model, digest in mine.items():
                if theirs.get(model, digest) != digest:
                    return f"node {node} has other files of {model} than node {other}: give one of them another name"
        self._digests[node] = mine
        return None

    def left(self, node: str) -> None:
        self._digests.pop(node, None)
