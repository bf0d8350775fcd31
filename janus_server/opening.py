"""What a node makes at its start before any model is loaded: kernels, the catalogue, the memory and its scratch pages.

`node` calls it on a worker thread: compiling and reading headers take their time.
"""

from __future__ import annotations

import dataclasses
import logging

from janus_server.catalogue import OpenedModel, headroom_pages, open_models, scratch_pages
from janus_server.config import ServeConfig
from janus_server.kernels.choose import choose
from janus_server.kernels.table import Kernels
from janus_server.kv.host import chunks_for
from janus_server.kv.touch import Ahead
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.kv.xtensor import XTensor
from janus_server.model.checkpoint import contents_of

log = logging.getLogger("janus.node")


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """What the start made."""

    kernels: Kernels
    catalogue: tuple[OpenedModel, ...]
    memory: CpuMemory
    xtensor: XTensor


def open_node(config: ServeConfig, with_peers: bool) -> Opened:
    """Raises BadModel or BadConfig."""
    kernels, reasons = choose(config.kernels.value, config.threads, config.cache_dir)
    for reason in reasons:
        log.debug("%s", reason)
    catalogue = open_models(config, kernels)
    if with_peers:
        catalogue = tuple(dataclasses.replace(one, contents=contents_of(one.checkpoint)) for one in catalogue)
    memory = CpuMemory(max(1, config.memory_bytes // config.page_bytes), config.page_bytes)
    xtensor = XTensor(memory)
    page_bytes = config.page_bytes
    xtensor.reserve_scratch(scratch_pages(catalogue, page_bytes), headroom_pages(catalogue, page_bytes))
    return Opened(kernels, catalogue, memory, xtensor)


def ahead_of(catalogue: tuple[OpenedModel, ...]) -> Ahead:
    """What to have at hand before it is needed. A model that is alone is never put to sleep for another."""
    known = [one.known() for one in catalogue]
    host_bytes = sum(one.host_bytes for one in known) if len(known) > 1 else 0
    return Ahead(sum(one.weight_pages for one in known), chunks_for(host_bytes))
