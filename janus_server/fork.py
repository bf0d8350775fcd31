"""What a node tells its peers of a model's weights, and what it asks of them: the words that must be equal for a fork.

`lifecycle` calls it on both sides. Weights are the same where the layout, the kernel table's form of it and the
checkpoint's headers and samples of its tensors are; what a copy brought is checked by its digest.
"""

from __future__ import annotations

import hashlib

from janus_server.catalogue import OpenedModel
from janus_server.kernels.table import Kernels
from janus_server.kv.xtensor import WeightMemory
from janus_server.model.rope import RopeKind
from janus_server.model.weights import layout_hash
from janus_server.transfer.grants import Offer
from janus_server.transfer.pull import Want


def want_of(opened: OpenedModel, kernels: Kernels, digest: int | None, term: int = 0) -> Want:
    """The model as this node would hold it; digest is that of its weights where they were here before, term that of
    the leader who wants them copied."""
    return Want(
        model=opened.name,
        layout=layout_hash(opened.placed, kernels.name),
        checkpoint=checkpoint_of(opened),
        size_bytes=opened.placed.total_bytes,
        digest=digest,
        term=term,
    )


def offer_of(opened: OpenedModel, kernels: Kernels, memory: WeightMemory | None, digest: int | None) -> Offer | None:
    """An Active model's weights as peers may read them; None while they are not all there."""
    if memory is None or not memory.pages or digest is None:
        return None
    return Offer(
        layout=layout_hash(opened.placed, kernels.name),
        checkpoint=checkpoint_of(opened),
        size_bytes=memory.size_bytes,
        pages=memory.pages,
        digest=digest,
    )


def checkpoint_of(opened: OpenedModel) -> str:
    """A digest of its files, once their contents were read."""
    return f"{opened.checkpoint.fingerprint}:{opened.contents}"


def kv_words(opened: OpenedModel, table: str, page_bytes: int) -> str:
    """What must be equal for a page of keys and values to mean the same on two nodes; table names their kernels."""
    spec, kv = opened.spec, opened.kv
    stretched = opened.context_tokens if spec.rope.kind is RopeKind.DYNAMIC else 0  # there keys depend on it
    words = (
        layout_hash(opened.placed, table), checkpoint_of(opened), page_bytes, kv.page_tokens, kv.layer_bytes,
        kv.token_bytes, spec.n_layers, spec.kv_heads, spec.head_dim, spec.dtype.value, stretched,
    )  # fmt: skip
    return hashlib.sha256(" ".join(map(str, words)).encode()).hexdigest()
