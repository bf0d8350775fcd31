"""Puts the device side of a model together: decoder, batcher and prefix cache over weights that have their addresses.

`lifecycle` calls it on a copy thread, once for every model that is brought in; nothing runs yet when it returns.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from janus_server.catalogue import OpenedModel
from janus_server.config import ServeConfig
from janus_server.executor import Engine
from janus_server.kernels.table import Kernels
from janus_server.kv.blocks import KvPages
from janus_server.kv.prefix import Follower, PrefixCache
from janus_server.kv.xtensor import XTensor
from janus_server.model.decoder import Decoder
from janus_server.model.runner import Runner
from janus_server.model.scratch import scratch_of
from janus_server.model.weights import Weights
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.scarcity import Scarcity

if TYPE_CHECKING:
    from janus_server.paced import Imagined


def engine_of(
    opened: OpenedModel, weights: Weights, config: ServeConfig, xtensor: XTensor, kernels: Kernels, scarcity: Scarcity,
    follower: Follower | None = None,
) -> Engine:  # fmt: skip
    """The device side of a model whose weights are bound to their addresses. The follower is its prefix cache's."""
    name, spec, kv = opened.name, opened.spec, opened.kv
    cache = tuple(
        kernels.cache_layer(
            xtensor.slab, layer * kv.layer_bytes, config.page_bytes, spec.kv_heads, kv.page_tokens, spec.head_dim,
            spec.dtype,
        )
        for layer in range(spec.n_layers)
    )  # fmt: skip
    scratch = scratch_of(spec, kernels, opened.step, xtensor.scratch)
    decoder = Decoder(spec, weights, kernels, cache, opened.context_tokens, scratch)
    pages = KvPages(xtensor.pool, name, kv.page_tokens, opened.floor_pages, opened.ceiling_pages)
    limits = BatcherLimits(
        context_tokens=opened.context_tokens,
        capacity_pages=opened.longest_pages,
        step_tokens=opened.step.rows,
        sequences=opened.step.drawn,
        one_prompt_at_a_time=config.one_prompt_at_a_time,
        prefix_caching=config.prefix_cache,
    )
    batcher = Batcher(pages, PrefixCache(pages, secrets.token_bytes(32), follower), scarcity, limits)
    runner = Runner(decoder, kernels, xtensor.slab, config.page_bytes)
    return Engine(name, batcher, runner, opened.placed.total_bytes)


def imagined_of(config: ServeConfig) -> Imagined | None:
    """The device that this node is to be as slow as, in an experiment."""
    if config.paced is None:
        return None
    from janus_server.paced import Imagined

    return Imagined.of_file(config.paced, [entry.name for entry in config.models])
